"""The choices that all ranks of a training share: the rank with the least memory decides what `auto` means.

Each rank chooses for its own device (training/start.py). In the process group every rank hears all choices, in one
gather, and makes the same `Agreed` of them. `build` and `train` read it, and nothing replaces a field of it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from finetune.base.identity import base_in_words, is_same_base
from finetune.errors import EnvironmentMismatch
from finetune.launch.launcher import Launch
from finetune.launch.signals import StopRequest
from finetune.measure.phases import memory_of
from finetune.model.optimizer import Schedule
from finetune.recipe.mixed_precision import BASE_FORMAT, PRECISION, ChosenFormats
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.training import RECOMPUTATIONS
from finetune.recipe.strategy import Strategy
from finetune.strategies.pieces import all_ranks
from finetune.tokens.dataset import Prepared
from finetune.training.batch_plan import BatchPlan
from finetune.training.start import Start
from finetune.wording import recomputation_in_words

if TYPE_CHECKING:
    from finetune.generation.held_out import ScoredSet
    from finetune.recipe.gpus import Gpus
    from finetune.training.start_adapter import StartAdapter


class OwnChoices(NamedTuple):
    """One rank's choices, as all ranks hear them."""

    first_step: int | None  # finished steps; None: the run is finished. Rank 0's counts.
    formats: str
    recomputation: int  # its place in RECOMPUTATIONS
    rows: int  # of a micro-batch


@dataclass(frozen=True)
class Agreed:
    """A training as every rank runs it: what this rank chose before, and the choices that all ranks share."""

    recipe: Recipe
    launch: Launch
    strategy: Strategy
    tokenizer: PreTrainedTokenizerBase
    base: Mapping[str, Any]  # the identity of this rank's base
    prepared: Prepared
    plan: BatchPlan
    schedule: Schedule  # of the learning rate
    adapter: StartAdapter | None  # that a new run starts from
    stop: StopRequest
    probed: Mapping[str, Any]  # the probe's result for the model
    formats: ChosenFormats  # what `auto` chose
    recomputation: Mapping[str, Any]  # what `auto` chose, with its reason; empty if the recipe names it
    rows: Mapping[str, Any]  # likewise, for the rows of a micro-batch
    reduction: Mapping[str, Any]  # how often FSDP2 reduces gradients, and why
    gpus: Gpus | None  # with the memory that `auto` counts on; None: a CPU
    scored: ScoredSet | None  # rows whose answers are scored in training
    writes: bool  # whether this rank writes the run's folder

    @property
    def run_dir(self) -> Path:
        """Rank 0's folder, or its machine's own where that is not seen."""
        return Path(self.recipe.run_dir)


def own_choices(start: Start) -> OwnChoices:
    """This rank's choices, for the other ranks."""
    first_step: int | None = 0
    if start.claim is not None and start.claim.checkpoint:
        first_step = start.claim.checkpoint.step
    if start.claim is not None and start.claim.status == "finished":
        first_step = None
    recipe = start.choices.recipe
    return OwnChoices(
        first_step,
        formats=f"{recipe.training.mixed_precision} {recipe.model.dtype}",
        recomputation=RECOMPUTATIONS.index(recipe.training.activation_checkpointing),
        rows=start.plan.per_device_batch_size,
    )


def settle_choices(start: Start, everyone: Sequence[OwnChoices], run_dir: str) -> Agreed:
    """What this rank trains, from every rank's choices. Every rank calls it.

    Where `auto` chose, the rank with the least memory decides: it recomputes most, in micro-batches of the fewest rows.

    Args:
        run_dir: Rank 0's folder, or this machine's own where that is not seen.

    Raises EnvironmentMismatch if `auto` chose different number formats.
    """
    choices, checked = start.choices, start.choices.checked
    refuse_other_formats(everyone, checked.formats)
    recipe, plan, rows, recomputation = choices.recipe, start.plan, choices.rows, choices.recomputation
    changes: dict[str, Any] = {}
    reason = "another rank's device has less memory"
    most = RECOMPUTATIONS[max(other.recomputation for other in everyone)]
    if recomputation and most != recipe.training.activation_checkpointing:
        line = f"activation checkpointing: {recomputation_in_words(most)}, because {reason}"
        recomputation = {**recomputation, "runs": most, "why": reason, "line": line}
        changes["activation_checkpointing"] = most
    least = min(other.rows for other in everyone)
    if rows and least != plan.per_device_batch_size:
        from finetune.closed_form.recomputation import rows_facts

        plan, rows = replace(plan, per_device_batch_size=least), rows_facts(least, reason)
        changes["per_device_batch_size"] = least
    training = recipe.training.model_copy(update=changes)
    recipe = recipe.model_copy(update={"training": training, "output_dir": run_dir})

    # FSDP2 reduces gradients once a step if all of them fit unsharded on every rank.
    strategy, reduction = checked.strategy, {}
    if strategy.shards_modules:
        from finetune.closed_form.recomputation import Reduction, choose_reduction

        ranks, gpus = checked.launch.local_world_size, choices.gpus
        memory = gpus.memory if gpus else memory_of(checked.device).total
        chosen = choose_reduction(recipe, choices.known, strategy, gpus, ranks=ranks, memory=memory)
        once = all(all_ranks().gather(chosen is not None and chosen.once))
        if chosen is not None:
            reduction = (Reduction(False, reason) if chosen.once and not once else chosen).facts
            strategy = replace(strategy, keeps_gradients=once)
    return Agreed(
        recipe=recipe,
        launch=checked.launch,
        strategy=strategy,
        tokenizer=choices.tokenizer,
        base=choices.base,
        prepared=start.prepared,
        plan=plan,
        schedule=start.schedule,
        adapter=choices.adapter,
        stop=start.stop,
        probed=choices.probed,
        formats=checked.formats,
        recomputation=recomputation,
        rows=rows,
        reduction=reduction,
        gpus=choices.gpus,
        scored=start.scored,
        writes=start.writes,
    )


def refuse_other_formats(everyone: Sequence[OwnChoices], chosen: ChosenFormats) -> None:
    """Every rank computes in the same format. Raises EnvironmentMismatch if `auto` chose differently on two ranks."""
    first = everyone[0].formats
    for rank, other in enumerate(everyone):
        if chosen.keys and other.formats != first:
            # A run that has begun keeps its formats in its identity. A new one takes a format that no CPU emulates.
            precision, base = first.split() if chosen.kept else ("no", "float32")
            raise EnvironmentMismatch(
                f"{' and '.join(chosen.keys)}: auto chose {first} on rank 0 and {other.formats} on rank "
                f"{rank}, whose devices differ; set {PRECISION}={precision} {BASE_FORMAT}={base} for all ranks"
            )


def refuse_apart(agreed: Agreed, apart: Mapping[int, int]) -> None:
    """Raise EnvironmentMismatch, on every rank, if the ranks `apart` would not train rank 0's run.

    They did not read the base and the formats that it began with in its folder, and may have other files.
    """
    for what, device in agreed.strategy.offload_devices.items():
        key = f"offload_{what}_nvme_path"
        if device == "nvme" and not agreed.strategy.section("deepspeed_config").get(key):
            raise EnvironmentMismatch(
                f"output_dir: rank {min(apart)} does not see rank 0's folder, where {what} offload keeps its files; "
                f"set {key} in accelerate_config's deepspeed_config to a folder of each machine's own disk"
            )
    own = (agreed.base, agreed.prepared.fingerprint, agreed.adapter and agreed.adapter.sha256)
    everyone = all_ranks().gather((socket.gethostname(), *own))
    _, base, rows, adapter = everyone[0]
    for rank, (host, other_base, other_rows, other_adapter) in enumerate(everyone):
        problem = None
        if is_same_base(base, other_base) is False:
            problem = f"model: {base_in_words(base)} on rank 0, {base_in_words(other_base)}"
        elif rows != other_rows:
            problem = f"data: rows {rows[:12]} on rank 0, {other_rows[:12]}"
        elif adapter != other_adapter:
            problem = f"model.adapter: {str(adapter)[:12]} on rank 0, {str(other_adapter)[:12]}"
        if problem is not None:
            raise EnvironmentMismatch(f"{problem} on rank {rank}, {host}; put rank 0's files there")
