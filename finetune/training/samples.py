"""The model's answers to fixed prompts and the held-out loss, before and after training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from finetune.measure.metrics import eval_line, evaluation_in_words
from finetune.model.generate import answer, answering
from finetune.tokens.encoder import SamplePrompt
from finetune.training.loop import evaluate
from finetune.training.run import Run
from finetune.training.run_output import RunOutput
from finetune.training.start import Start


def look_before(start: Start, run: Run, model: nn.Module, output: RunOutput) -> None:
    """Answers and held-out loss of the `model` that training starts from; `model` is unwrapped."""
    write_samples(start, model, output, when="before", step=0)
    if run.eval_rows is not None:
        line = eval_line(0, evaluate(run.accelerator, run.model, run.eval_rows, run.plan, run.eval_sets))
        run.write_metrics(line)
        run.terminal.log(f"before training: {evaluation_in_words(line)}")


def write_samples(start: Start, model: nn.Module, output: RunOutput, *, when: str, step: int) -> None:
    """Rank 0 writes the answers; where weights are sharded, every rank takes part in computing them."""
    if start.launch.is_main or start.strategy.shards_parameters:
        length = start.recipe.samples.max_new_tokens
        answers = samples(model, start.tokenizer, start.prepared.prompts, max_new_tokens=length, when=when, step=step)
        output.write_samples(answers)


def samples(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[SamplePrompt],
    *,
    max_new_tokens: int,
    when: str,
    step: int,
) -> Iterator[dict[str, Any]]:
    """The model's answers to the fixed prompts, as lines of samples.jsonl; `when` is before or after."""
    with answering(model):
        for sample in prompts:
            text = answer(model, tokenizer, sample.prompt_ids, max_new_tokens=max_new_tokens)
            yield {"when": when, "step": step, "prompt": sample.prompt, "answer": text, "reference": sample.reference}
