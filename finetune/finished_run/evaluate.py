"""`finetune eval`: loss and perplexity of base and tuned model over the rows that were held out, token by token."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from finetune import attention
from finetune.assemble import COMPUTE
from finetune.batches import prepare
from finetune.errors import FinetuneError
from finetune.loop import evaluate
from finetune.model import attention_name, load_tokenizer
from finetune.run import make_plan
from finetune.run_facts import read_run
from finetune.tuned import FinishedRun, fitting, load_adapted, load_whole


def held_out_figures(run: FinishedRun, device: torch.device) -> dict[str, Any]:
    """The trainer's own evaluation, of the finished model and of its base.

    Loss is the mean over every supervised token of the held-out rows, perplexity its exponential. `recorded` is what
    the run's last evaluation wrote. Raises FinetuneError when no rows are held out.
    """
    recipe = run.recipe
    if recipe.data.eval is None:
        raise FinetuneError(f"{run.folder}: its recipe holds no rows out (data.eval is null); --tasks needs none")
    prepared = prepare(recipe, load_tokenizer(recipe))
    if prepared.eval is None:
        raise FinetuneError(f"{run.folder}: data.eval leaves no held-out row; name other rows")
    accelerator = Accelerator(cpu=device.type == "cpu")
    flat = attention_name(recipe) == attention.NAME
    plan = make_plan(recipe, len(prepared.train), world_size=1, rank=0, flat=flat)
    figures: dict[str, Any] = {
        "documents": prepared.facts["eval_documents"],
        "tokens": int(prepared.eval.supervised.sum()),
    }
    for name, model in models_of(run, device, with_loss=True):
        with fitting(device), _arithmetic(recipe.training.mixed_precision, device):
            loss = evaluate(accelerator, model, prepared.eval, plan)
        figures[name] = {"loss": loss, "perplexity": math.exp(loss)}
    evals = read_run(run.folder, recipe).evals()
    return figures | {"recorded": evals[-1]["loss"] if evals else None}


def models_of(run: FinishedRun, device: torch.device, *, with_loss: bool) -> Iterator[tuple[str, nn.Module]]:
    """("base", ...), then ("tuned", ...), one at a time on the device; use each before taking the next."""
    if not run.base_is_inside:
        yield "base", load_whole(run, device, tuned=False, with_loss=with_loss)
        gc.collect()
    if run.recipe.lora is None:
        yield "tuned", load_whole(run, device, tuned=True, with_loss=with_loss)
        return
    adapted: Any = load_adapted(run, device, with_loss=with_loss)
    if run.base_is_inside:
        with adapted.disable_adapter():
            yield "base", adapted
    yield "tuned", adapted


def _arithmetic(mixed_precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """That of the training's own evaluations."""
    compute = COMPUTE[mixed_precision]
    return nullcontext() if compute is None else torch.autocast(device.type, compute)


def in_words(figures: dict[str, Any]) -> str:
    """A table, and what the run itself wrote down."""
    lines = [f"{figures['documents']:,} held-out documents, {figures['tokens']:,} tokens that would be learned:"]
    lines += [f"{'':8}{'loss':>9}{'perplexity':>13}"]
    lines += [f"{n:8}{figures[n]['loss']:>9.4f}{figures[n]['perplexity']:>13.2f}" for n in ("base", "tuned")]
    if figures["recorded"] is not None:
        lines.append(f"at the end of its training the run wrote {figures['recorded']:.4f}")
    return "\n".join(lines)
