"""A run's size in one line, printed before weights are loaded, and one line for each thing that looks wrong.

A training with three steps, idle ranks, another method's rate, or documents longer than the model's positions ends
without an error and teaches little. Each line names the value that would help, before the minutes are spent. `finetune
preview`, `check --data` and `plan` print the same lines. No torch at import, for recipes without a tokenizer here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.base.location import resolve_model_path
from finetune.errors import FinetuneError
from finetune.recipe.optimizers import far_rate
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import strategy_of
from finetune.tokens.dataset import Prepared, prepare_here
from finetune.training.batch_plan import BatchPlan, plan_batches
from finetune.wording import counted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FEW = 20  # steps; in fewer, warmup and decay leave few steps at the recipe's learning rate


def batch_notes(recipe: Recipe, prepared: Prepared, plan: BatchPlan, positions: int | None) -> list[str]:
    """The line about the data, and one for each thing that looks wrong. `positions`: the model's; None: not known."""
    return [
        data_line(recipe, prepared, plan),
        *few_steps(recipe, plan),
        *long_warmup(recipe, plan),
        *idle_ranks(plan),
        *large_micro_batch(plan),
        *far_rate(recipe),
        *router_left_out(recipe),
        *beyond_positions(recipe, prepared, positions),
    ]


def notes_before_launch(
    recipe: Recipe, prepared: Prepared | None = None, uncounted: str = "", ranks: int | None = None
) -> dict[str, Any]:
    """The lines of `batch_notes` and their figures. `ranks` default to the recipe's budget.

    Without `prepared` and `uncounted`, the line that says why rows were not counted, the rows are encoded here. If not
    all rows are counted, that line stands in place of the figures, and `rows` is None.
    """
    of_lengths: list[str] = []
    if prepared is None and not uncounted:
        try:
            prepared, uncounted = prepare_here(recipe)
        except FinetuneError:
            uncounted = "data: not counted: training would refuse the rows; `finetune check --data` says why"
        of_lengths = [note for note in (prepared.notes if prepared else ()) if "data.max_length" in note]
    if prepared is None or uncounted:
        from finetune.model.known_configs import beyond_stated

        notes = [uncounted, *far_rate(recipe), *router_left_out(recipe), *beyond_stated(recipe)]
        return {"rows": None, "notes": notes}
    budget = recipe.budget
    strategy = strategy_of(recipe)
    ranks = strategy.data_rank_count(ranks or strategy.rank_count(max(1, budget.gpus * budget.nodes)))
    plan = plan_batches(recipe, len(prepared.train), world_size=ranks, rank=0, flat=True)
    return {
        "rows": len(prepared.train),
        "tokens": int(prepared.facts["tokens"]),
        "steps": plan.total_steps,
        "tokens_per_step": _tokens_a_step(prepared, plan),
        "warmup_steps": recipe.training.warmup_of(plan.total_steps),
        "ranks": ranks,
        "idle_ranks": _idle(plan),
        "notes": batch_notes(recipe, prepared, plan, positions_of(recipe)) + of_lengths,
    }


def data_line(recipe: Recipe, prepared: Prepared, plan: BatchPlan) -> str:
    """Rows, tokens, steps, tokens per step, warmup steps, idle ranks."""
    warming = recipe.training.warmup_of(plan.total_steps)
    once = "" if plan.total_rows == plan.rows else " an epoch"
    longest = int(prepared.train.lengths.max())
    if recipe.data.packing and recipe.data.unit == "documents":
        longest = recipe.data.max_length
    idle = f"; {_idle(plan)} of {counted(plan.world_size, 'rank')} idle" if _idle(plan) else ""
    return (
        f"data: {_rows(plan, plan.rows)} of up to {longest:,} tokens ({prepared.facts['tokens']:,} tokens{once}); "
        f"{_steps(plan.total_steps)} of {_rows(plan, min(plan.global_batch_size, plan.total_rows))}, about "
        f"{_tokens_a_step(prepared, plan):,} tokens each, {warming:,} of them warming up{idle}"
    )


def _tokens_a_step(prepared: Prepared, plan: BatchPlan) -> int:
    """12,345 as 12,300: a mean over rows has no more than three certain figures."""
    count: int = round(prepared.facts["tokens"] / plan.rows * min(plan.global_batch_size, plan.total_rows))
    return round(count, min(0, 3 - len(str(count))))


def _idle(plan: BatchPlan) -> int:
    """Ranks that have no row in any step."""
    return max(0, plan.world_size - min(plan.global_batch_size, plan.total_rows))


def few_steps(recipe: Recipe, plan: BatchPlan) -> Iterator[str]:
    """A line for fewer than 20 steps: why, and the settings that give 20. max_steps=20 is no remedy: the user chose
    max_steps, and needs to know what the epochs and the batch would give without it."""
    training = recipe.training
    if plan.total_steps >= FEW:
        return
    few = f"{_steps(plan.total_steps)} {'is' if plan.total_steps == 1 else 'are'} few"
    epochs = f"{_rows(plan, plan.rows)} x {training.num_train_epochs:g} epoch{'s' * (training.num_train_epochs != 1)}"
    why, then = f"{few}: {epochs}, {_rows(plan, plan.global_batch_size)} a step", "set"
    if training.max_steps is not None:
        total_rows = training.model_copy(update={"max_steps": None}).rows_of_run(plan.rows)
        plan = replace(plan, total_rows=total_rows, total_steps=math.ceil(total_rows / plan.global_batch_size))
        if plan.total_steps >= FEW:
            yield f"training.max_steps: {few}; without it there are {plan.total_steps:,}: {epochs}"
            return
        why, then = few, "leave it out and set"
    most = (plan.total_rows - 1) // (FEW - 1)  # the largest step, in rows, that still gives 20 steps
    least = max(plan.world_size, 2 if recipe.data.unit == "judged" else 1)
    if most >= least:
        place, remedy = "global_batch_size", f"{then} {_rows_a_step(plan, most)}"
    else:
        # Even steps of one row a rank would be too few.
        batch = min(plan.global_batch_size, least)
        settings = [_rows_a_step(plan, batch)] if batch < plan.global_batch_size else []
        settings.append(f"training.num_train_epochs={(FEW - 1) * batch // plan.rows + 1}")
        place, remedy = "num_train_epochs", f"add {plan.noun}s, or {then} {' '.join(settings)}"
    if training.max_steps is not None:
        place = "max_steps"
    yield f"training.{place}: {why}; for {FEW} or more {remedy}"


def long_warmup(recipe: Recipe, plan: BatchPlan) -> Iterator[str]:
    """A line for a warmup longer than the run. Training refuses it after counting the rows."""
    warmup, steps = recipe.training.warmup_of(plan.total_steps), plan.total_steps
    if warmup > steps:
        longer = f"a warmup of {_steps(warmup)} is longer than the run of {steps:,}, which training refuses"
        yield f"training.warmup_steps: {longer}; set training.warmup_steps={steps} or less, or train for more steps"


def idle_ranks(plan: BatchPlan) -> Iterator[str]:
    """A line for more ranks than rows of a step."""
    ranks, rows = plan.world_size, plan.global_batch_size
    if rows < ranks:
        idle = f"{_rows(plan, rows)} a step leave {ranks - rows} of {ranks} ranks without one"
        yield f"training.global_batch_size: {idle}; set training.global_batch_size={ranks}, or take fewer ranks"
    elif plan.total_rows < ranks:
        idle = f"{_rows(plan, plan.total_rows)} in all leave {ranks - plan.total_rows} of {ranks} ranks without one"
        yield f"data.train: {idle}; set training.num_train_epochs={-(-ranks // plan.rows)}, or take fewer ranks"


def large_micro_batch(plan: BatchPlan) -> Iterator[str]:
    """A line for more rows in one forward of all ranks than a step has."""
    rows, ranks, batch = plan.per_device_batch_size, plan.world_size, plan.global_batch_size
    if rows > 1 and rows * ranks > batch:
        on = f" on each of {ranks} ranks are {rows * ranks}" if ranks > 1 else ""
        larger = f"{_rows(plan, rows)} at a time{on}, a step has {batch}"
        yield f"training.per_device_batch_size: {larger}; set training.per_device_batch_size={max(1, batch // ranks)}"


def router_left_out(recipe: Recipe) -> Iterator[str]:
    """A line for a training on preferences without the router's balance loss that a supervised one would add."""
    if recipe.preferences is None:
        return
    objective, asked = recipe.training.objective, recipe.model.router_aux_loss_coef
    left_out = f"objective {objective}: the router's balance loss is not added"
    if asked:
        yield f"{left_out}: model.router_aux_loss_coef is {asked:g}; set it to 0"
    elif asked is None:
        from finetune.model.known_configs import config_here

        config = config_here(recipe.model.name_or_path, recipe.model.revision) or {}
        sections = [config, *(part for part in config.values() if isinstance(part, dict))]  # a text part's is its own
        if any(part.get("output_router_logits") and part.get("router_aux_loss_coef", 1) for part in sections):
            why = "the model's configuration asks for it; if that is right, set model.router_aux_loss_coef: 0"
            yield f"{left_out}: {why}"


def beyond_positions(recipe: Recipe, prepared: Prepared, positions: int | None) -> Iterator[str]:
    """A line for documents, or rows, longer than the model's positions. Positions count within a document."""
    data, pool = recipe.data, prepared.pool
    used = np.union1d(prepared.split.train, prepared.split.held_out)
    lengths = pool.longest()
    at = int(used[np.argmax(lengths[used])])
    longest = int(lengths[at])
    if positions is None or max(longest, data.max_length) <= positions:
        return
    set_it, model_has = f"set data.max_length={positions}", counted(positions, "position")
    if longest > positions:
        count = int((lengths[used] > positions).sum())
        noun = "document" if data.unit == "documents" else data.row_noun
        longer = f"{counted(count, noun)} {'are' if count > 1 else 'is'} longer than the model's {model_has}"
        handled = (" data.truncation=right" if data.truncation == "error" else "") + ", or model.rope_scaling"
        yield f"data.max_length: {longer}, the longest {longest:,} tokens ({pool.place(at)}); {set_it}{handled}"
        return
    packed = "positions begin anew in each document of a row" if data.packing else "a row is one document"
    if data.unit == "pairs":
        packed = "positions begin anew in each answer"
    yield (
        f"data.max_length: {data.max_length:,} is beyond the model's {model_has}; {packed} and the longest "
        f"has {longest:,} tokens, so none is beyond them; to have longer ones refused {set_it}"
    )


def positions_of(recipe: Recipe, config: PreTrainedConfig | None = None) -> int | None:
    """The model's number of positions, with its own or the recipe's scaling; None where its configuration has none.

    Args:
        config: The model's configuration; None: it is read from the base's files.
    """
    from transformers import AutoConfig

    from finetune.model.known_configs import positions_in

    section = recipe.model
    try:
        loaded: Any = config or AutoConfig.from_pretrained(
            resolve_model_path(section.name_or_path),
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
        )
    except Exception:
        return None  # loading the model, a moment later, raises it with a remedy
    text = loaded.get_text_config()  # GPT-2's has another name in its dictionary
    stated = {"max_position_embeddings": getattr(text, "max_position_embeddings", None)}
    return positions_in(text.to_dict() | stated, section.rope_scaling)


def _rows_a_step(plan: BatchPlan, most: int) -> str:
    """The settings for at most `most` rows a step, the same number on each rank; `most` is at least one a rank."""
    ranks, rows = plan.world_size, min(plan.per_device_batch_size, most // plan.world_size)
    settings = f"training.global_batch_size={most - most % (ranks * rows)}"
    if rows == plan.per_device_batch_size:
        return settings
    return f"{settings} training.per_device_batch_size={rows}"


def _rows(plan: BatchPlan, count: int) -> str:
    """3 rows, 3 pairs or 3 judged answers."""
    return counted(count, plan.noun)


def _steps(count: int) -> str:
    return counted(count, "step")
