"""Step time by the roofline model: a bound that no real run reaches, with the communication that is not overlapped.

Each operation takes the longer of its floating-point operations at the chip's peak and its bytes at the memory's
bandwidth. Where layers are compiled, forward and backward are matrix products and attention alone: what lies between
those is fused, into how few kernels only a GPU's compiler knows. A collective takes the bytes that one rank sends in a
ring over the slowest link it crosses. A phase's collectives overlap with its computation, except the first (sharded
weights, for which the first layer waits) or the last (gradients), and what exceeds the computation. All figures are
makers' peaks: no kernel reaches them; kernel launches and waiting for data cost nothing here.

What is offloaded costs two things more. Copies between a GPU and the host go over PCIe, in forward and backward
beside the computation like the collectives, in the update before or after it. What the host computes, above all the
update, takes its bytes at the bandwidth of the host's memory, which the ranks of a machine share; no GPU computes
meanwhile. Collectives and copies do not slow each other here, although cards without NVLink have one bus for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from finetune.closed_form.constants import STEP_PHASES
from finetune.measure.collectives import WEIGHT, CollectiveStats
from finetune.planner.trace.flops import COPY, ON_DEVICE, ON_HOST
from finetune.planner.trace.step_work import StepWork

NVLINK_MACHINE = 50e9  # bytes/s a GPU to other machines: 400 Gbit/s each
PCIE_MACHINE = 12.5e9 / 8  # 100 Gbit/s a machine of eight
HOST_MEMORY = 200e9  # bytes/s of a machine's memory: eight channels of DDR4-3200 have 205
SCALE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Chip:
    """A GPU by its maker's data sheet, dense."""

    half: float  # FLOP/s of matrix products in 16 bits, summed up in float32
    single: float  # in float32, without TF32, which torch leaves off
    memory: float  # bytes/s
    link: float  # bytes/s one way to the GPUs of its machine: NVLink, or PCIe's sixteen lanes
    between: float  # bytes/s to other machines
    host: float  # bytes/s one way to host memory: PCIe's sixteen lanes, of version 3, 4 or 5
    eight: float = 0  # FLOP/s of products of 8-bit integers, and of float8 where it has any; 0: as in 16 bits


CHIPS = {
    "T4": Chip(65e12, 8.1e12, 320e9, 16e9, PCIE_MACHINE, 16e9, 130e12),
    "L4": Chip(121e12, 30.3e12, 300e9, 32e9, PCIE_MACHINE, 32e9, 242e12),
    "A10G": Chip(70e12, 35e12, 600e9, 32e9, PCIE_MACHINE, 32e9, 140e12),
    "RTX3090": Chip(71e12, 35.6e12, 936e9, 32e9, PCIE_MACHINE, 32e9, 284e12),
    "RTX4090": Chip(165e12, 82.6e12, 1008e9, 32e9, PCIE_MACHINE, 32e9, 661e12),
    "L40S": Chip(362e12, 91.6e12, 864e9, 32e9, PCIE_MACHINE, 32e9, 733e12),
    "A100-40GB": Chip(312e12, 19.5e12, 1555e9, 300e9, NVLINK_MACHINE, 32e9, 624e12),
    "A100": Chip(312e12, 19.5e12, 2039e9, 300e9, NVLINK_MACHINE, 32e9, 624e12),
    "H100": Chip(989e12, 67e12, 3350e9, 450e9, NVLINK_MACHINE, 64e9, 1979e12),
    "H200": Chip(989e12, 67e12, 4800e9, 450e9, NVLINK_MACHINE, 64e9, 1979e12),
}


@dataclass(frozen=True)
class Layout:
    """How ranks are grouped, and how a step's rows are divided among them."""

    ranks: int
    node: int  # ranks of one machine
    tokens: int  # of a micro-batch
    rows: int  # micro-batches of a step over all ranks
    layers: int
    copies: int = 1  # HSDP: of the sharded model; gradients are reduced between them
    gathers_once: bool = False  # FSDP2 that keeps weights gathered: they are, in the first micro-step alone
    reduces_once: bool = False  # DDP, ZeRO-1: gradients are sent in the last micro-step alone
    shards_state: bool = True  # an update is divided among the ranks
    on_disk: bool = False  # weights or states wait on a disk, of which no rate is known here

    @property
    def micro_steps(self) -> int:
        """Of one rank; at least one, also where there are more ranks than rows."""
        return max(1, -(-self.rows // self.ranks))


@dataclass(frozen=True)
class StepTime:
    """One optimizer step, in seconds."""

    layout: Layout
    forward: float  # computation of all micro-steps
    backward: float
    update: float
    communication: float  # overlapped or not
    exposed: float  # communication not overlapped with computation
    copies: float = 0.0  # between GPU and host, overlapped or not
    exposed_copies: float = 0.0
    host: float = 0.0  # what the host computes

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.update + self.exposed + self.exposed_copies + self.host

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.layout.ranks * self.layout.tokens * self.layout.micro_steps / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Seconds and tokens per second."""
        return {
            "ranks": self.layout.ranks,
            "micro_steps": self.layout.micro_steps,
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.seconds,
            "communication_seconds": self.communication,
            "exposed_seconds": self.exposed,
            "exposed_share": self.exposed / self.seconds,
            "copy_seconds": self.copies,
            "exposed_copy_seconds": self.exposed_copies,
            "host_seconds": self.host,
        }


def compute_seconds(work: StepWork, chip: Chip, phase: str) -> float:
    """One forward, backward or update, on the device."""
    fused = work.compiles and phase != "step"
    peaks = {1: chip.eight or chip.half, 2: chip.half}
    return sum(
        times * max(op.flops / peaks.get(op.itemsize, chip.single), op.nbytes / chip.memory)
        for op, times in work.operations.items()
        if op.phase == phase and op.place == ON_DEVICE and not (fused and op.kind == "other")
    )


def step_time(work: StepWork, chip: Chip, layout: Layout, traced: Layout) -> StepTime:
    """A step of `layout`, from the work of a rank of `traced`. Only what is a shard's depends on the number of ranks: a
    sharded update, and what is offloaded."""
    forward, backward, update = (compute_seconds(work, chip, phase) for phase in STEP_PHASES)
    smaller = traced.ranks / traced.copies * layout.copies / layout.ranks
    if layout.shards_state:
        update *= smaller
    sent = {phase: _ring_seconds(work.collectives.get(phase, {}), chip, layout) for phase in STEP_PHASES}
    gatherings, reductions = (1 if once else layout.micro_steps for once in (layout.gathers_once, layout.reduces_once))
    exposed = (
        gatherings * not_overlapped(sent["forward"], forward, layout.layers)
        + reductions * not_overlapped(sent["backward"], backward, layout.layers)
        + sent["step"]
    )
    whole = gatherings * sent["forward"] + reductions * sent["backward"] + sent["step"]
    times = layout.micro_steps
    counts = {"forward": times, "backward": times, "step": 1}
    copied = {phase: smaller * work.nbytes(phase, COPY) / chip.host for phase in STEP_PHASES}
    beside = {"forward": forward, "backward": backward}
    waited = {phase: not_overlapped(copied[phase], computing, layout.layers) for phase, computing in beside.items()}
    waited["step"] = copied["step"]
    shared = HOST_MEMORY / min(layout.node, layout.ranks)  # bytes/s of one rank
    host = sum(counts[phase] * smaller * work.nbytes(phase, ON_HOST) / shared for phase in STEP_PHASES)
    return StepTime(
        *(layout, times * forward, times * backward, update, whole, exposed),
        copies=sum(counts[phase] * copied[phase] for phase in STEP_PHASES),
        exposed_copies=sum(counts[phase] * waited[phase] for phase in STEP_PHASES),
        host=host,
    )


def scaled_step_times(work: StepWork, chip: Chip, traced: Layout) -> Iterator[StepTime]:
    """The same recipe on 1 to 512 ranks, or of HSDP on 2 to 512 / `node` copies."""
    for ranks in SCALE:
        if traced.copies > 1 and ranks <= traced.node:
            continue  # HSDP has at least two copies
        copies = ranks // traced.node if traced.copies > 1 else 1
        yield step_time(work, chip, replace(traced, ranks=ranks, copies=copies), traced)


def _ring_seconds(collectives: Mapping[str, CollectiveStats], chip: Chip, layout: Layout) -> float:
    total = 0.0
    for name, each in collectives.items():
        # Under HSDP shards are exchanged within a copy, and gradients are reduced between the copies.
        between = layout.copies > 1 and name == "all_reduce"
        group = layout.copies if between else layout.ranks // layout.copies
        crosses = between or group > layout.node
        link = min(chip.link, chip.between) if crosses else chip.link
        total += WEIGHT[name] * each.payload_bytes * (group - 1) / group / link
    return total


def not_overlapped(communication: float, computing: float, layers: int) -> float:
    """Seconds that communication adds: of one collective for each layer, all but one overlap with the computation of
    another layer."""
    one = communication / layers
    return one + max(0.0, communication - one - computing * (layers - 1) / layers)
