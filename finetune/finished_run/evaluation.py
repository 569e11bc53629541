"""`finetune eval`: loss and perplexity of base and tuned model over the held-out rows, token by token."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from finetune.architecture import attention
from finetune.errors import EnvironmentMismatch, FinetuneError, NotFinite
from finetune.finished_run.load import FinishedRun, fitting, load_adapted, load_run_tokenizer, load_whole
from finetune.model.build import attention_name, load_tokenizer
from finetune.model.dtypes import COMPUTE
from finetune.run_folder.facts import read_run
from finetune.tokens.dataset import prepare
from finetune.training.batch_plan import plan_batches
from finetune.training.loop import evaluate
from finetune.training.objectives import objective_of
from finetune.wording import counted


def held_out_figures(run: FinishedRun, device: torch.device) -> dict[str, Any]:
    """The trainer's own evaluation, for the finished model and its base.

    Loss is the mean over every supervised held-out token, perplexity its exponential. `recorded` is the run's own
    figure for the exported weights. Raises FinetuneError if no rows are held out.
    """
    recipe = run.recipe
    if recipe.data.eval is None:
        raise FinetuneError(f"{run.folder}: its recipe holds no rows out (data.eval is null); --tasks needs none")
    prepared = prepare(recipe, load_tokenizer(recipe))
    if prepared.eval is None:
        raise FinetuneError(f"{run.folder}: data.eval leaves no held-out row; name other rows")
    # The trainer's own plan and autocast, so that the figure equals the run's own one.
    accelerator = Accelerator(cpu=device.type == "cpu")
    flat = attention_name(recipe) == attention.NAME
    plan = plan_batches(recipe, len(prepared.train), world_size=1, rank=0, flat=flat)
    figures: dict[str, Any] = {
        "documents": prepared.facts["eval_documents"],
        "tokens": int(prepared.eval.supervised.sum()),
    }
    for name, model in models_of(run, device, with_loss=True):
        with fitting(device), _arithmetic(recipe.training.mixed_precision, device):
            try:
                loss = evaluate(accelerator, model, prepared.eval, plan, objective_of(recipe))["loss"]
            except NotFinite:  # its text is about a training
                raise NotFinite(
                    f"{run.folder}: not finite: the held-out loss of the {name} model; look at its weights"
                ) from None
        figures[name] = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # exp(710) overflows a double
    exported = read_run(run.folder, recipe).exported_eval()
    return figures | {"recorded": exported["loss"] if exported else None}


def models_of(run: FinishedRun, device: torch.device, *, with_loss: bool) -> Iterator[tuple[str, nn.Module]]:
    """("base", ...), then ("tuned", ...). Use each before you take the next: one is on the device at a time."""
    if not run.base_is_inside:
        yield "base", load_whole(run, device, tuned=False, with_loss=with_loss)
        gc.collect()  # models refer to themselves in circles, and the next one needs the memory
    if run.recipe.lora is None:
        yield "tuned", load_whole(run, device, tuned=True, with_loss=with_loss)
        return
    adapted: Any = load_adapted(run, device, with_loss=with_loss)
    if run.base_is_inside:  # one model serves as both
        with adapted.disable_adapter():
            yield "base", adapted
    yield "tuned", adapted


def _arithmetic(mixed_precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast of the training's own evaluations."""
    compute = COMPUTE[mixed_precision]
    if compute is None:
        return nullcontext()
    return torch.autocast(device.type, compute)


def held_out_in_words(figures: dict[str, Any]) -> str:
    """A table, and the run's own figure."""
    documents, tokens = counted(figures["documents"], "held-out document"), counted(figures["tokens"], "token")
    lines = [f"{documents}, {tokens} that would be learned:", f"{'':8}{'loss':>9}{'perplexity':>13}"]
    for name in ("base", "tuned"):
        lines.append(f"{name:8}{figures[name]['loss']:>9.4f}{figures[name]['perplexity']:>13.2f}")
    if figures["recorded"] is not None:
        lines.append(f"of these weights the run itself wrote {figures['recorded']:.4f}")
    return "\n".join(lines)


def task_figures(
    run: FinishedRun, device: torch.device, tasks: Sequence[str], *, include: Path | None, limit: int | None
) -> dict[str, Any]:
    """base or tuned -> task -> metric -> value, with lm-eval's own settings and metrics.

    Args:
        tasks: lm-eval's names; * matches any letters.
        include: A folder with the user's own task files.
        limit: Questions per task; None: all.

    Raises:
        EnvironmentMismatch: lm-eval is not installed, or a task's data cannot be fetched.
        FinetuneError: lm-eval does not know a task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise EnvironmentMismatch(f"--tasks: {error}; install it with: pip install 'finetune[eval]'") from error
    manager = TaskManager(include_path=str(include) if include else None)
    for name in tasks:
        if not manager.match_tasks([name]):
            raise FinetuneError(
                f"--tasks: lm-eval does not know {name}; lm_eval ls tasks shows all, --include adds a folder"
            )
    tokenizer = load_run_tokenizer(run)
    figures = {}
    for which, model in models_of(run, device, with_loss=False):
        language_model = HFLM(pretrained=model, tokenizer=tokenizer, device=str(device))
        with fitting(device):
            try:
                evaluation = simple_evaluate(
                    language_model,
                    tasks=manager.match_tasks(list(tasks)),
                    task_manager=manager,
                    limit=limit,
                    log_samples=False,
                )
            except (OSError, ValueError) as error:  # most often a data set that is not on this machine
                reason = " ".join(str(error).split())[:300]
                raise EnvironmentMismatch(f"--tasks: lm-eval could not run {', '.join(tasks)}: {reason}") from error
        # lm-eval's keys are "metric,filter", with "none" for no filter: acc,none. Other keys hold names and counts.
        figures[which] = {
            task: {
                key.removesuffix(",none"): float(value)
                for key, value in values.items()
                if isinstance(value, int | float) and "," in key
            }
            for task, values in evaluation["results"].items()
        }
    return figures


def tasks_in_words(figures: dict[str, Any]) -> str:
    """A line for each task and metric, base and tuned side by side."""
    lines = [f"{'task':24}{'metric':24}{'base':>10}{'tuned':>10}"]
    for task, metrics in figures["tuned"].items():
        for metric, value in metrics.items():
            lines.append(f"{task:24}{metric:24}{figures['base'][task][metric]:>10.4f}{value:>10.4f}")
    return "\n".join(lines)
