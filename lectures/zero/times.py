"""The homework's seconds, by bytes: two rates are read off two of its rows, and the other four rows follow from them.

The notes name neither the GPU nor what connects it. In 20 micro-steps ZeRO-1 neither reduces nor updates, so its row is
computation alone; what ZeRO-2's row takes longer is its all-reduces. Everything else is counted: bytes from DeepSpeed
0.19's sources with its default settings, overlap as the planner's roofline has it.

    row               moved in a micro-step, of b P bytes on N ranks          DeepSpeed 0.19
    zero1             nothing before the 32nd
    zero2             2 b P (N-1)/N in backward: all-reduced to everyone      stage_1_and_2.py use_multi_rank_bucket_...
    zero2 + offload   and 2 b P/N over the bus: the sum so far, to and fro    async_accumulate_grad_in_cpu_via_gpu
    zero3             b P (N-1)/N gathered in forward, and kept whole (fewer  stage3_max_live_parameters 1e9
                      than 1e9 parameters); as much reduced and scattered
    zero3 + offload   and 4 b P/N over the bus: weights, gradients thrice;    partition_grads
                      AdamW on the host, 44 bytes a weight
    zero3 + fp16      half of zero3's bytes, and half of its computation
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.closed_form.constants import FLOAT32
from finetune.planner import not_overlapped
from lectures.zero.notes import GPT2_LARGE, GPT2_LAYERS, HOMEWORK, HOMEWORK_RANKS, LOGGED_STEPS, HomeworkRow

_FORWARD, _BACKWARD = 1 / 3, 2 / 3  # of the computation: two products of backward for each of forward
HOMEWORK_BUS = 16e9  # bytes/s one way: PCIe 3.0, sixteen lanes
# bytes/s of one rank's AdamW on the host, by the one thread that launchers leave it: 225 GB in 20 to 30 s
# (strategies/accelerator.py: use_all_cores).
HOMEWORK_THREAD = 9e9
# Of a weight on the host: AdamW reads weight, gradient and two moments and writes three of them (28); the clipping
# reads and writes the gradient (8); the new weight is copied (8).
HOST_BYTES_A_WEIGHT = 28 + 8 + 8


@dataclass(frozen=True)
class Rates:
    """What two rows of the notes say of the machine."""

    micro_step: float  # seconds of computation in float32
    link: float  # bytes/s that one rank sends in a ring


@dataclass(frozen=True)
class ModelledTime:
    """Seconds of 20 logged steps by their causes."""

    computation: float
    communication: float  # not overlapped with computation
    copies: float  # over the bus
    host: float

    @property
    def seconds(self) -> float:
        return self.computation + self.communication + self.copies + self.host


def rates_of_the_notes() -> Rates:
    """From the rows of ZeRO-1 and ZeRO-2."""
    seconds = {row.name: row.seconds / LOGGED_STEPS for row in HOMEWORK}
    micro_step = seconds["zero1"]
    # All of the reduction but what runs beside the backward of the other layers (roofline.py: not_overlapped).
    reducing = seconds["zero2"] - micro_step + _BACKWARD * micro_step * (GPT2_LAYERS - 1) / GPT2_LAYERS
    zero2 = next(row for row in HOMEWORK if row.name == "zero2")
    return Rates(micro_step, sent(zero2)["backward"] / reducing)


def sent(row: HomeworkRow) -> dict[str, float]:
    """Bytes that a rank sends in forward and backward of one micro-step."""
    piece = row.job.param_bytes * GPT2_LARGE * (HOMEWORK_RANKS - 1) / HOMEWORK_RANKS
    if row.job.stage == 3:
        return {"forward": piece, "backward": piece}
    return {"forward": 0.0, "backward": 2 * piece if row.job.stage == 2 else 0.0}


def copied(row: HomeworkRow) -> float:
    """Bytes of a rank over the bus in 20 logged steps."""
    if not row.job.offload:
        return 0.0
    part = row.job.param_bytes * GPT2_LARGE / HOMEWORK_RANKS
    if row.job.stage == 3:
        return 4 * part * LOGGED_STEPS
    return part * (2 * LOGGED_STEPS - 1)  # the first micro-step has no sum to fetch


def modelled(row: HomeworkRow, rates: Rates) -> ModelledTime:
    """The row's seconds for 20 steps."""
    computation = rates.micro_step * row.job.param_bytes / FLOAT32
    moved = sent(row)
    shares = {"forward": _FORWARD, "backward": _BACKWARD}
    exposed = sum(
        not_overlapped(moved[phase] / rates.link, share * computation, GPT2_LAYERS) for phase, share in shares.items()
    )
    updates = LOGGED_STEPS if row.job.stage == 3 and row.job.offload else 0
    return ModelledTime(
        LOGGED_STEPS * computation,
        LOGGED_STEPS * exposed,
        copied(row) / HOMEWORK_BUS,
        updates * HOST_BYTES_A_WEIGHT * GPT2_LARGE / HOMEWORK_RANKS / HOMEWORK_THREAD,
    )
