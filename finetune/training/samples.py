"""The model's answers to fixed prompts and the held-out loss, before and after training.

If weights are sharded, each forward of an answer gathers the whole model, and every rank takes part. So the prompts are
asked as one left-padded batch, which needs as many forwards as its longest answer. Under a pipeline each forward goes
through all stages, in the first copy if there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from finetune.architecture.flash_kernels import FlashKernel
from finetune.generation.generate import BATCH_TOKENS, answering, greedy_answers, may_share_a_batch, prompt_batches
from finetune.measure.metrics import eval_line, evaluation_in_words
from finetune.strategies.accelerator import holds_on_all
from finetune.strategies.assemble import Assembled
from finetune.strategies.pieces import Ranks, all_ranks
from finetune.tokens.encoder import SamplePrompt
from finetune.training.agreement import Agreed
from finetune.training.loop import evaluate_run
from finetune.training.run import Run
from finetune.wording import counted


@dataclass(frozen=True)
class Questions:
    """The prompts, and how they are asked."""

    prompts: Sequence[SamplePrompt]
    batches: Sequence[range]  # of prompts that share a left-padded batch
    max_new_tokens: int

    @property
    def forwards(self) -> int:
        """At most; answers that all end before make fewer."""
        return len(self.batches) * self.max_new_tokens


def look_before(agreed: Agreed, run: Run, parts: Assembled, kernel: FlashKernel) -> None:
    """Answers and held-out loss before training. The loss uses the steps' kernel."""
    write_samples(agreed, run, parts, when="before", step=0)
    if run.eval_rows is not None:
        with kernel.active():
            losses = evaluate_run(run)
        line = eval_line(0, losses)
        run.write_metrics(line)
        run.output.terminal.log(f"before training: {evaluation_in_words(line)}")
    if run.scorer is not None:
        run.scorer.score(0)


def write_samples(agreed: Agreed, run: Run, parts: Assembled, *, when: str, step: int) -> None:
    """Rank 0 writes the answers; where weights are sharded or in stages, every rank takes part in computing them."""
    pipeline = parts.pipeline
    joined = agreed.strategy.shards_parameters or pipeline is not None
    if not agreed.prepared.prompts or not (agreed.launch.is_main or joined):
        return
    synced = joined and agreed.launch.world_size > 1
    shared = may_share_a_batch(agreed.probed)
    model, device = parts.unwrapped_model, run.parts.accelerator.device
    most = BATCH_TOKENS
    if pipeline is None:
        from finetune.generation.held_out import tokens_that_fit

        most = tokens_that_fit(model, device, all_ranks() if synced else Ranks())
    questions = questions_of(
        agreed, shared=holds_on_all(run.parts.accelerator, shared) if synced else shared, most=most
    )
    if pipeline is not None and pipeline.place.copy:
        return
    if joined:
        again = " The same again after training." if when == "before" else ""
        run.output.terminal.log(cost_in_words(questions, staged=pipeline is not None) + again)

    def show(text: str) -> None:
        run.output.terminal.progress(f"samples {when} training: {text}")

    with run.parts.weights.cast():
        if pipeline is None:
            answers = list(samples(model, agreed.tokenizer, questions, device, show, synced=synced))
        else:
            with pipeline.answering(model):
                answers = list(samples(model, agreed.tokenizer, questions, device, show, synced=False, cached=False))
    run.output.write_samples({"when": when, "step": step} | answer for answer in answers)


def questions_of(agreed: Agreed, *, shared: bool, most: int) -> Questions:
    """How a run asks its prompts: `shared` ones in batches with `most` tokens, or as many as a micro-batch of training;
    else each by itself.

    The same on every rank.
    """
    recipe, prompts = agreed.recipe, agreed.prepared.prompts
    sharded = agreed.strategy.shards_parameters or agreed.strategy.schedule is not None
    length = recipe.samples.length(max(prompt.reference_tokens for prompt in prompts), sharded=sharded)
    most = max(most, recipe.training.rows_at_once * recipe.data.max_length)
    lengths = [len(prompt.prompt_ids) for prompt in prompts]
    return Questions(prompts, prompt_batches(lengths, length, most if shared else 0), length)


def cost_in_words(questions: Questions, *, staged: bool) -> str:
    """How many forwards the answers take at most, and what each costs beside its products."""
    batching = f"in {counted(len(questions.batches), 'batch', 'batches')}"
    if len(questions.batches) == len(questions.prompts) > 1:
        batching = "one at a time"
    cost = "each computes all tokens again, through all stages" if staged else "each gathers the weights"
    return (
        f"samples: {counted(len(questions.prompts), 'prompt')} {batching}, "
        f"{counted(questions.max_new_tokens, 'new token')} each: at most {counted(questions.forwards, 'forward')}, "
        f"and {cost}; samples.max_new_tokens and samples.count make "
        "them fewer."
    )


def samples(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    questions: Questions,
    device: torch.device,
    show: Callable[[str], None],
    *,
    synced: bool,
    cached: bool = True,
) -> Iterator[dict[str, Any]]:
    """The model's answers to the prompts, as lines for samples.jsonl; `model` is unwrapped.

    Args:
        show: Receives the progress after each token.
        synced: All ranks compute the same answers.
        cached: Keys and values are kept from one new token to the next.
    """
    with answering(model):
        for batch in questions.batches:
            prompts = [questions.prompts[index] for index in batch]
            numbers = str(batch[0] + 1)
            if len(batch) > 1:
                numbers += f" to {batch[-1] + 1}"
            answers = f"answers {numbers} of {len(questions.prompts)}"

            def show_token(token: int, answers: str = answers) -> None:
                show(f"{answers}, token {token} of at most {questions.max_new_tokens}")

            replies = greedy_answers(
                model,
                tokenizer,
                [prompt.prompt_ids for prompt in prompts],
                max_new_tokens=questions.max_new_tokens,
                device=device,
                synced=synced,
                cached=cached,
                show=show_token,
            )
            for prompt, answer in zip(prompts, replies, strict=True):
                cut = {} if answer.ended else {"cut": questions.max_new_tokens}
                yield {"prompt": prompt.prompt, "answer": answer.text, "reference": prompt.reference, **cut}
