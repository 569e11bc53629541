"""Who holds what when, and which collective moves it: by a trace of one training step of the shrunken model under each
strategy, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from finetune import planner
from finetune.closed_form.constants import (
    BACKWARD_WORKSPACE,
    COMMUNICATION_BUFFERS,
    GATHERED_LAYERS,
    GRADIENTS,
    MASTERS,
    OPTIMIZER_STATE,
    PARAMETERS,
    STEP_PHASES,
    UNSHARDED_GRADIENTS,
)
from finetune.errors import FinetuneError
from finetune.measure.collectives import WEIGHT, CollectiveStats
from finetune.planner import Plan, changed, run_in_forks
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from lectures.output import Chapter, LectureRequest, columns

HOLDING_RANKS, MICRO_STEPS = 4, 2  # of the traced step
# Every strategy of accelerate_configs/ that holds a whole model between its ranks, and the GPUs that it is traced on.
TRACED_ON = dict.fromkeys(
    ("ddp", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp2", "fsdp2_grad_op", "fsdp2_offload"),
    f"{HOLDING_RANKS}x24GB",
) | {"hsdp": f"2x{HOLDING_RANKS // 2}x24GB"}
AT_ONCE = 2  # traces beside each other
# What is held, as the plan's components: those of a rank's own, and those of full size that pass by.
HELD_PARTS = {
    "weights": ((PARAMETERS,), (GATHERED_LAYERS,)),
    "masters": ((MASTERS,), ()),
    "gradients": ((GRADIENTS,), (UNSHARDED_GRADIENTS,)),
    "moments": ((OPTIMIZER_STATE,), ()),
}
# DeepSpeed's engine gathers weights into buffers of its own, and whole gradients are backward's until they are reduced.
ENGINE_PREFIX = "zero"  # the beginning of its strategies' names
ENGINE_PARTS = {
    "weights": ((PARAMETERS,), (COMMUNICATION_BUFFERS,)),  # without what is there in every phase, to reduce with
    "gradients": ((GRADIENTS,), (BACKWARD_WORKSPACE,)),
}
WHOLE = {"moments": 2}  # in units of P where it is not one: AdamW's two, each as large as the weights
COLLECTIVE_LETTERS = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "reduce": "R", "broadcast": "B"}
LEAST = 0.005  # of P: what is smaller is not shown (loss sums, norms, step counts)


@dataclass(frozen=True)
class RankHolding:
    """One strategy on one of its ranks, in the phases of a step; every share is of what DDP holds whole."""

    strategy: str
    reason: str = ""  # why it was not traced
    own: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by phase and part, at the phase's peak
    passing: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # gathered, or not yet scattered
    host: Mapping[str, float] = field(default_factory=dict)  # by phase: in host memory, in units of P
    sent: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by phase and collective, in units of P


def trace_holders(asked: LectureRequest, model: Path) -> list[RankHolding]:
    """A trace of each strategy on the model of a folder. P, the bytes of the weights, is DDP's."""
    recipe = _small(load_recipe(asked.recipe, asked.overrides).recipe, model)
    plans: dict[str, Plan | FinetuneError] = {}
    names = list(TRACED_ON)
    for first in range(0, len(names), AT_ONCE):
        some = names[first : first + AT_ONCE]
        asked.note(f"tracing who holds what under {' and '.join(some)}")
        functions = {place: partial(_plan, recipe, name) for place, name in enumerate(some)}
        with run_in_forks(functions) as result:
            plans |= {name: result(place) for place, name in enumerate(some)}
    whole = plans["ddp"]
    if isinstance(whole, FinetuneError):
        raise whole
    weights = whole.phases["step"].peak.parts[PARAMETERS]
    return [holding_of(name, plan, weights) for name, plan in plans.items()]


def _small(recipe: Recipe, model: Path) -> Recipe:
    changes = {
        "model.name_or_path": str(model),
        "model.revision": "main",
        "data.max_length": 64,
        "training.global_batch_size": HOLDING_RANKS * MICRO_STEPS,
        "training.per_device_batch_size": 1,
    }
    return changed(recipe, changes)


def _plan(recipe: Recipe, strategy: str) -> Plan | FinetuneError:
    """The plan, or why there is none: DeepSpeed may not be installed."""
    try:
        return planner.plan(changed(recipe, {"accelerate_config": strategy}), parse_gpus(TRACED_ON[strategy]))
    except FinetuneError as error:
        return error


def holding_of(strategy: str, planned: Plan | FinetuneError, weights: int) -> RankHolding:
    """Shares of a plan; `weights` are the bytes of all of them."""
    if isinstance(planned, FinetuneError):
        return RankHolding(strategy, str(planned))
    own: dict[str, dict[str, float]] = {}
    passing: dict[str, dict[str, float]] = {}
    parts = HELD_PARTS | ENGINE_PARTS if strategy.startswith(ENGINE_PREFIX) else HELD_PARTS
    always = min(planned.phases[phase].peak.parts.get(COMMUNICATION_BUFFERS, 0) for phase in STEP_PHASES)
    for phase in STEP_PHASES:
        live = planned.phases[phase].peak.parts
        live = live | {COMMUNICATION_BUFFERS: live.get(COMMUNICATION_BUFFERS, 0) - always}
        for kinds, shares in ((0, own), (1, passing)):
            held = {part: sum(live.get(each, 0) for each in names[kinds]) for part, names in parts.items()}
            shares[phase] = {part: nbytes / (weights * WHOLE.get(part, 1)) for part, nbytes in held.items()}
    host = {phase: planned.host.get(phase, 0) / weights for phase in STEP_PHASES}
    sent = {phase: _sent(planned.work.collectives.get(phase, {}), weights) for phase in STEP_PHASES}
    return RankHolding(strategy, "", own, passing, host, sent)


def _sent(collectives: Mapping[str, CollectiveStats], weights: int) -> dict[str, float]:
    found = {name: WEIGHT[name] * each.payload_bytes / weights for name, each in collectives.items()}
    return {name: share for name, share in found.items() if share >= LEAST}


def holders_table(holders: Sequence[RankHolding]) -> Chapter:
    """What a rank keeps, and what it sends in each phase."""
    rows = []
    for each in holders:
        if each.reason:
            continue
        kept = [_share(each.own["step"][part]) for part in HELD_PARTS]
        host = _share(max(each.host.values()))
        rows.append((each.strategy, *kept, host, *(sent_in_words(each, phase) for phase in STEP_PHASES)))
    lines = [
        *columns(("a rank of 4", *HELD_PARTS, "on the host", *(f"{phase} sends" for phase in STEP_PHASES)), rows),
        "Shares of all weights, gradients, moments at the update's peak; on the host and sent: P, the weights' bytes.",
        "Sent by a micro-step (DDP's and ZeRO-1's gradients in the last alone): AG all_gather, RS reduce_scatter,",
        "AR all_reduce (counts twice), R reduce, B broadcast. hsdp: two machines of two GPUs.",
        *(f"{each.strategy}: is not traced: {each.reason}" for each in holders if each.reason),
    ]
    return Chapter(f"Who holds what on {HOLDING_RANKS} GPUs, and which collective moves it: traced", lines)


def _share(share: float) -> str:
    return f"{share:.2f}" if share >= LEAST else "-"


def sent_in_words(holding: RankHolding, phase: str) -> str:
    """The collectives of a phase with what they send, as `AG 1.00 RS 1.00`."""
    sent = holding.sent[phase]
    return " ".join(f"{COLLECTIVE_LETTERS.get(name, name)} {share:.2f}" for name, share in sent.items()) or "-"


def holders_json(holders: Sequence[RankHolding]) -> list[dict[str, Any]]:
    return [vars(each) for each in holders]
