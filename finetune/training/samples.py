"""The model's answers to fixed prompts and the held-out loss, before and after training.

If weights are sharded, each forward of an answer gathers the whole model, and every rank takes part. So prompts share
left-padded batches, which need as many forwards as their longest answer. Under a pipeline each forward goes through
all stages, in the first copy if there are several.
"""

from __future__ import annotations

from contextlib import nullcontext

from finetune.architecture.flash_kernels import FlashKernel
from finetune.generation.settings import may_share_a_batch
from finetune.measure.metrics import eval_line, evaluation_in_words
from finetune.strategies.accelerator import holds_on_all
from finetune.strategies.assemble import Assembled
from finetune.strategies.pieces import Ranks, all_ranks
from finetune.training.agreement import Agreed
from finetune.training.loop import evaluate_run
from finetune.training.run import Run
from finetune.wording import counted


def look_before(agreed: Agreed, run: Run, parts: Assembled, kernel: FlashKernel) -> None:
    """Answers and held-out loss before training. The loss uses the steps' kernel."""
    write_samples(agreed, run, parts, when="before", step=0)
    if run.eval_rows is not None:
        with kernel.active():
            losses = evaluate_run(run)
        line = eval_line(0, losses)
        run.write_metrics(line)
        run.output.terminal.say(f"before training: {evaluation_in_words(line)}")
    if run.scorer is not None:
        run.scorer.score(0)


def write_samples(agreed: Agreed, run: Run, parts: Assembled, *, when: str, step: int) -> None:
    """Rank 0 writes the answers; where weights are sharded or in stages, every rank takes part in computing them."""
    from finetune.generation.generate import BATCH_TOKENS, prompt_batches
    from finetune.generation.held_out import Batching, ScoredSet, generated_answers

    prompts, pipeline, accelerator = agreed.prepared.prompts, parts.pipeline, run.parts.accelerator
    sharded = agreed.strategy.shards_parameters
    joined = sharded or pipeline is not None
    if not prompts or not (agreed.launch.is_main or joined):
        return
    shared = may_share_a_batch(agreed.probed)
    if joined and agreed.launch.world_size > 1:
        shared = holds_on_all(accelerator, shared)
    if pipeline is not None and pipeline.place.copy:
        return
    new = agreed.recipe.samples.length(max(prompt.reference_tokens for prompt in prompts), sharded=joined)
    terminal = run.output.terminal
    if joined:
        lengths = sorted(len(prompt.prompt_ids) for prompt in prompts)
        batches = len(prompt_batches(lengths, new, BATCH_TOKENS if shared else 0))
        if pipeline is None:  # the ranks share the batches out
            batches = -(-batches // agreed.launch.world_size)
        again = " The same again after training." if when == "before" else ""
        terminal.say(cost_in_words(len(prompts), batches * new, new, staged=pipeline is not None) + again)
    batching = Batching(shared, accelerator.device, all_ranks() if sharded else Ranks(), sharded, pipeline is not None)
    questions = ScoredSet("the prompts", list(prompts), [], [], new)
    model, begun = parts.decoder, f"samples {when} training: "
    with run.parts.weights.cast(), pipeline.answering(model) if pipeline else nullcontext():
        answers = generated_answers(
            model, agreed.tokenizer, questions, batching, lambda text: terminal.progress(begun + text), terminal.say
        )
    lines = []
    for prompt, answer in zip(prompts, answers, strict=True):
        cut = {} if answer.ended else {"cut": new}
        line = {"prompt": prompt.prompt, "answer": answer.text, "reference": prompt.reference, **cut}
        lines.append({"when": when, "step": step, **line})
    run.output.write_samples(lines)


def cost_in_words(prompts: int, forwards: int, new: int, *, staged: bool) -> str:
    """How many forwards the answers take at most, and what each costs beside its products.

    Args:
        new: Tokens of the longest answer. Answers that all end before make fewer forwards.
    """
    cost = "each computes all tokens again, through all stages" if staged else "each gathers the weights"
    return (
        f"samples: {counted(prompts, 'prompt')}, {counted(new, 'new token')} each: at most "
        f"{counted(forwards, 'forward')}, and {cost}; samples.max_new_tokens and samples.count make them fewer."
    )
