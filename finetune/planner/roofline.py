"""Step time by the roofline model: an upper bound on speed, with the communication that is not overlapped.

    operation    the longer of its floating-point operations at the chip's peak and its bytes at the memory's bandwidth
    compiled     forward and backward are matrix products and attention alone, because all else is fused, into a number
                 of kernels that only a GPU's compiler knows; RoundedAdamW's update is one kernel
    collective   one rank's bytes in a ring, over the slowest link that it crosses
    overlap      a phase's collectives overlap with its computation, except the first (sharded weights, for which the
                 first layer waits) or the last (gradients), and any excess over the computation

All figures are vendors' peaks, and real kernels are slower. Kernel launches and waiting for data cost nothing here.

Offloading costs two things more:

    copies       between GPU and host, over PCIe: overlapped with forward and backward, not with the update
    host         its computation, above all the update, takes its bytes at the bandwidth of the host's memory; a
                 machine's ranks share that, and no GPU computes meanwhile

Collectives and copies do not slow each other here, although cards without NVLink have one bus for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from finetune.closed_form.constants import STEP_PHASES
from finetune.measure.collectives import WEIGHT, CollectiveStats
from finetune.planner.plan_recipe import Layout, Plan
from finetune.planner.trace.flops import COPY, ON_DEVICE, ON_HOST
from finetune.planner.trace.step_work import GATHERS, StepWork
from finetune.strategies.pipeline.timeline import bubble, bubble_of_equal_stages, planned_spans
from finetune.wording import counted

NVLINK_MACHINE = 50e9  # bytes/s a GPU to other machines: 400 Gbit/s each
NVLINK = 300e9  # bytes/s to GPUs of the machine, at least; PCIe's sixteen lanes have 64e9 at most
PCIE_MACHINE = 12.5e9 / 8  # 100 Gbit/s a machine of eight
HOST_MEMORY = 200e9  # bytes/s of a machine's memory: eight channels of DDR4-3200 have 205
SCALE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Chip:
    """A GPU by its vendor's data sheet, dense."""

    half: float  # FLOP/s of matrix products in 16 bits, summed up in float32
    single: float  # in float32, without TF32, which torch leaves off
    memory: float  # bytes/s
    link: float  # bytes/s one way to other GPUs in its machine: NVLink, or PCIe's sixteen lanes
    between: float  # bytes/s to other machines
    host: float  # bytes/s one way to host memory: PCIe's sixteen lanes, version 3, 4 or 5
    eight: float = 0  # FLOP/s of products in 8-bit integers, and in float8 if it has any; 0: as in 16 bits


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
    # An eighth of the HGX B200, as NVIDIA's HGX page has it; without sparsity.
    "B200": Chip(2250e12, 75e12, 8000e9, 900e9, NVLINK_MACHINE, 64e9, 4500e12),
    # NVIDIA's white papers "RTX Blackwell GPU Architecture" and "RTX PRO Blackwell GPU Architecture".
    "RTX5090": Chip(209.5e12, 104.8e12, 1792e9, 64e9, PCIE_MACHINE, 64e9, 838e12),
    "RTXPRO6000": Chip(503.8e12, 126e12, 1792e9, 64e9, PCIE_MACHINE, 64e9, 1007.6e12),
}


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
    host: float = 0.0  # the host's own computation

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.update + self.exposed + self.exposed_copies + self.host

    @property
    def tokens_per_second(self) -> float:
        """All ranks together."""
        return self.layout.ranks * self.layout.tokens * self.layout.micro_steps / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Seconds and tokens per second."""
        return {
            "ranks": self.layout.ranks,
            "micro_steps": self.layout.micro_steps,
            "tokens_per_second": self.tokens_per_second,
            "step_seconds": self.seconds,
            "update_seconds": self.update,
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
        times * max(operation.flops / peaks.get(operation.itemsize, chip.single), operation.nbytes / chip.memory)
        for operation, times in work.operations.items()
        if operation.phase == phase and operation.place == ON_DEVICE and not (fused and operation.kind == "other")
    )


def step_time(work: StepWork, chip: Chip, layout: Layout, traced: Layout) -> StepTime:
    """A step in `layout`, from the work of one rank in `traced`.

    Only a shard's work depends on the number of ranks: a sharded update, and offloaded tensors.
    """
    forward, backward, update = (compute_seconds(work, chip, phase) for phase in STEP_PHASES)
    # A rank's shard here over its shard in the trace: from 8 ranks to 32 it is 1/4, if both have as many copies.
    shard_ratio = traced.ranks / traced.copies * layout.copies / layout.ranks
    if layout.shards_state:
        update *= shard_ratio
    micro_steps = layout.micro_steps
    sent = {phase: _ring_seconds(work.collectives.get(phase, {}), chip, layout) for phase in STEP_PHASES}
    gatherings = 1 if layout.gathers_once else micro_steps
    # The last backward sends everything. If gradients are reduced once, those before it gather weights at most.
    before = sent["backward"]
    if layout.reduces_once:
        gathered = {name: stats for name, stats in work.collectives.get("backward", {}).items() if name in GATHERS}
        before = _ring_seconds(gathered, chip, layout)
    communication = gatherings * sent["forward"] + (micro_steps - 1) * before + sent["backward"] + sent["step"]
    exposed = (
        gatherings * not_overlapped(sent["forward"], forward, layout.layers)
        + (micro_steps - 1) * not_overlapped(before, backward, layout.layers)
        + not_overlapped(sent["backward"], backward, layout.layers)
        + sent["step"]
    )
    copied = {phase: shard_ratio * work.nbytes(phase, COPY) / chip.host for phase in STEP_PHASES}
    exposed_copies = {
        "forward": not_overlapped(copied["forward"], forward, layout.layers),
        "backward": not_overlapped(copied["backward"], backward, layout.layers),
        "step": copied["step"],
    }
    host_bandwidth = HOST_MEMORY / min(layout.node, layout.ranks)  # one rank's share, bytes/s
    counts = {"forward": micro_steps, "backward": micro_steps, "step": 1}
    return StepTime(
        layout=layout,
        forward=micro_steps * forward,
        backward=micro_steps * backward,
        update=update,
        communication=communication,
        exposed=exposed,
        copies=sum(counts[phase] * copied[phase] for phase in STEP_PHASES),
        exposed_copies=sum(counts[phase] * exposed_copies[phase] for phase in STEP_PHASES),
        host=sum(counts[phase] * shard_ratio * work.nbytes(phase, ON_HOST) / host_bandwidth for phase in STEP_PHASES),
    )


def scaled_step_times(work: StepWork, chip: Chip, traced: Layout) -> Iterator[StepTime]:
    """Step times on 1 to 512 ranks; under HSDP with 2 to 512 / `node` copies."""
    for ranks in SCALE:
        copies = 1
        if traced.copies > 1:
            copies = ranks // traced.node
            if ranks <= traced.node:
                continue  # HSDP has at least two copies
        yield step_time(work, chip, replace(traced, ranks=ranks, copies=copies), traced)


def _ring_seconds(collectives: Mapping[str, CollectiveStats], chip: Chip, layout: Layout) -> float:
    total = 0.0
    for name, stats in collectives.items():
        # Under HSDP shards are exchanged within a copy, and gradients are reduced between the copies.
        between_copies = layout.copies > 1 and name == "all_reduce"
        group = layout.copies if between_copies else layout.ranks // layout.copies
        link = chip.link
        if between_copies or group > layout.node:  # the ring crosses machines
            link = min(chip.link, chip.between)
        total += WEIGHT[name] * stats.payload_bytes * (group - 1) / group / link
    return total


def not_overlapped(communication: float, computing: float, layers: int) -> float:
    """Seconds that communication adds.

    Each layer has one collective. All but one overlap with another layer's computation. With 4 layers, 8 s of
    communication and 6 s of computation they add 2 + max(0, 6 - 4.5) = 3.5 s.
    """
    one = communication / layers
    return one + max(0.0, communication - one - computing * (layers - 1) / layers)


SHOWN_SECONDS = 1e-3  # copies that take less of a step are not shown: a batch's token ids take less


def roofline_json(planned: Plan) -> dict[str, Any]:
    """One rank's `communication` and `arithmetic`, per micro-step and update; `speed` on a named GPU; a `pipeline`."""
    work, layout = planned.work, planned.layout
    communication = {
        phase: {name: {"calls": stats.calls, "bytes": stats.payload_bytes} for name, stats in collectives.items()}
        for phase, collectives in work.collectives.items()
    }
    arithmetic = {
        f"{phase}_flops_per_token": (work.flops(phase, "product") + work.flops(phase, "attention")) / layout.tokens
        for phase in STEP_PHASES[:2]
    }
    attention = sum(work.flops(phase, "attention") for phase in STEP_PHASES[:2])
    arithmetic["attention_share"] = attention / sum(work.flops(phase) for phase in STEP_PHASES[:2])
    arithmetic |= {f"{phase}_launches": work.launches(phase) for phase in STEP_PHASES}
    result = {"communication": communication, "arithmetic": arithmetic, "speed": _speed(planned)}
    if planned.stages:
        result["pipeline"] = _pipeline(planned)
    return result


def _speed(planned: Plan) -> dict[str, Any] | None:
    """The plan's speed; None without a known GPU, with weights or states on a disk, and for a pipeline's stage."""
    if planned.stage is not None or planned.gpus is None or planned.gpus.name not in CHIPS or planned.layout.on_disk:
        return None
    work, layout, chip = planned.work, planned.layout, CHIPS[planned.gpus.name]
    scale: list[StepTime] = []
    if planned.strategy != "single":
        scale = list(scaled_step_times(work, chip, layout))
    as_written = step_time(work.as_written(), chip, layout, layout)  # with training.compile: false
    launches = layout.micro_steps * (work.launches("forward") + work.launches("backward")) + work.launches("step")
    return {
        **step_time(work, chip, layout, layout).as_json(),
        "scale": [timing.as_json() for timing in scale],  # on other numbers of ranks
        "compiled_layers": work.compiles,
        "uncompiled_tokens_per_second": as_written.tokens_per_second,
        # The host has so long to launch an operation, without compiled layers, before the GPU waits for it.
        "uncompiled_launch_seconds": as_written.seconds / launches,
    }


def _pipeline(planned: Plan) -> dict[str, Any]:
    """A step's forwards and backwards on a pipeline's stages, in its schedule's order.

    Messages take the slowest link that they cross. A sender does not wait until its message has arrived. Several
    pipelines' gradients are added up afterwards, over the same link. Without a known GPU the stages' floating-point
    operations stand for their seconds, in the idle shares alone.
    """
    layout, schedule = planned.layout, planned.schedule or ""
    works = [stage.work for stage in planned.stages]
    forward, backward = ([work.flops(phase) / 1e9 for work in works] for phase in STEP_PHASES[:2])
    chip, message_seconds, link = None, 0.0, 0.0
    if planned.gpus is not None:
        chip = CHIPS.get(planned.gpus.name)
    if chip is not None:
        forward, backward = ([compute_seconds(work, chip, phase) for work in works] for phase in STEP_PHASES[:2])
        link = chip.link
        if planned.node < planned.ranks:
            link = min(chip.link, chip.between)
        sent = works[0].collectives.get("backward", {}).get("send", CollectiveStats())
        message_seconds = sent.payload_bytes / max(1, sent.calls) / link
    spans = planned_spans(schedule, forward, backward, layout.micro_steps, message_seconds)
    facts: dict[str, Any] = {
        "schedule": schedule,
        "micro_batches": layout.micro_steps,
        "bubble_share": bubble(spans),
        "bubble_share_of_equal_stages": bubble_of_equal_stages(schedule, len(works), layout.micro_steps),
        "forward_seconds": None,  # of one micro-batch on each stage
        "backward_seconds": None,
        "step_seconds": None,
        "tokens_per_second": None,
    }
    if chip is None:
        return facts
    sums = [work.collectives.get("backward", {}).get("all_reduce", CollectiveStats()) for work in works]
    # Each pipeline is a copy of the model. A ring sends 2 (copies - 1) / copies of the gradients.
    reduced_bytes = 2 * (layout.ranks - 1) / layout.ranks * max(stats.payload_bytes for stats in sums)
    update = max(compute_seconds(work, chip, "step") for work in works) + reduced_bytes / link
    seconds = max(span.end for span in spans) + update
    tokens = layout.tokens * layout.micro_steps * layout.ranks
    facts |= {"forward_seconds": forward, "backward_seconds": backward}
    return facts | {"step_seconds": seconds, "tokens_per_second": tokens / seconds}


def roofline_lines(planned: Plan, facts: Mapping[str, Any]) -> Iterator[str]:
    """One rank's traffic and computation, and the time that they take at best.

    Args:
        facts: The plan's `roofline_json`.
    """
    work, layout, speed = planned.work, planned.layout, facts["speed"]
    once = {"step", *["forward"] * layout.gathers_once}
    for phase in STEP_PHASES:
        for name, stats in work.collectives.get(phase, {}).items():
            if stats.payload_bytes >= 2**20:
                reduced = phase == "backward" and layout.reduces_once and name not in GATHERS
                times = "step" if phase in once or reduced else "micro-step"
                yield f"{phase}: {stats.calls:,} x {name}, {stats.payload_bytes / 2**30:.2f} GiB a {times}"
    for phase in STEP_PHASES:
        times = "step" if phase == "step" else "micro-step"
        for place, words in ((COPY, "between GPU and host"), (ON_HOST, "read and written by the host")):
            nbytes = work.nbytes(phase, place)
            if nbytes >= 2**20:
                yield f"{phase}: {nbytes / 2**30:.2f} GiB {words} a {times}"
    forward, backward = (work.flops(phase) / layout.tokens / 1e9 for phase in STEP_PHASES[:2])
    share = facts["arithmetic"]["attention_share"]
    yield f"GFLOP a token: {forward:.2f} forward, {backward:.2f} backward, {share:.0%} of both in attention"
    launches = [work.launches(phase) for phase in STEP_PHASES]
    counts = f"{launches[0] + launches[1]:,.0f} operations a micro-step, {launches[2]:,.0f} an update"
    if speed is not None:
        counts += f"; the host has {speed['uncompiled_launch_seconds'] * 1e6:.0f} us to launch each"
    yield f"without compiled layers: {counts}"
    if planned.stages:
        yield from _pipeline_lines(planned, facts["pipeline"])
    if planned.gpus is None or speed is None:
        return
    gpu, chip, scale = planned.gpus.name, CHIPS[planned.gpus.name], speed["scale"]
    yield (
        f"at most {speed['tokens_per_second']:,.0f} tokens/s on {speed['ranks']} x {gpu}, "
        f"{speed['step_seconds']:.2f} s a step, {speed['exposed_share']:.1%} of that communication that is not "
        "overlapped"
    )
    if speed["compiled_layers"]:
        yield (
            "  of compiled layers, by matrix products and attention alone, because all else is fused; "
            f"{speed['uncompiled_tokens_per_second']:,.0f} with training.compile: false"
        )
    yield "  " + _assumed(chip)
    if max(speed["copy_seconds"], speed["host_seconds"]) >= SHOWN_SECONDS:
        yield (
            f"  {speed['host_seconds']:.2f} s of the host, {speed['exposed_copy_seconds']:.2f} s of copies that are "
            f"not overlapped ({speed['copy_seconds']:.2f} s in all)"
        )
        yield (
            f"  assumed for offloading: {chip.host / 1e9:.0f} GB/s from a GPU to the host, one way (PCIe), overlapped "
            f"with forward and backward, not with the update; {HOST_MEMORY / 1e9:.0f} GB/s of host memory, shared by "
            f"{counted(min(layout.node, layout.ranks), 'rank')} of a machine"
        )
    if scale:
        yield f"  {'ranks':<12}" + "".join(f"{row['ranks']:>11,}" for row in scale)
        yield f"  {'tokens/s':<12}" + "".join(f"{row['tokens_per_second']:>11,.0f}" for row in scale)
        yield f"  {'exposed':<12}" + "".join(f"{row['exposed_share']:>11.1%}" for row in scale)
        largest = [row["ranks"] for row in scale if row["ranks"] > layout.rows]
        if largest:
            yield f"  from {largest[0]} ranks on, a step has more rows than global_batch_size: one for each rank"


def copying_line(planned: Plan, step_seconds: float, change: str) -> str:
    """What `change` spares adapters under FSDP2 in a machine with NVLink; empty for other plans.

    FSDP2 copies each gathered layer out of its buffer: read and written once, in forward and in backward. Llama 3 8B on
    an H100: 2 x 30 GiB / 3.35 TB/s = 19 ms a micro-step. Compiled layers' bound has no copies.
    """
    layout, chip = planned.layout, CHIPS.get(planned.gpus.name if planned.gpus else "")
    if planned.strategy != "fsdp2" or chip is None or chip.link < NVLINK or layout.ranks > layout.node:
        return ""
    collectives = [planned.work.collectives.get(phase, {}) for phase in STEP_PHASES[:2]]
    gathered = sum(named["all_gather"].payload_bytes for named in collectives if "all_gather" in named)
    copying = layout.micro_steps * 2 * gathered / chip.memory
    share = copying / (step_seconds + planned.work.compiles * copying)
    copies = f"FSDP2 copies {gathered / 2**30:.1f} GiB of gathered weights a micro-step, {share:.0%} of its time"
    return f"adapters alone over NVLink: {change} fits too; {copies} by arithmetic"


def _assumed(chip: Chip) -> str:
    return (
        f"an upper bound from vendors' peak figures: {chip.half / 1e12:.0f} TFLOP/s in 16 bits and "
        f"{chip.single / 1e12:.0f} in 32, {chip.memory / 1e12:.2f} TB/s of memory, {chip.link / 1e9:.0f} GB/s to GPUs "
        f"of the machine, {chip.between / 1e9:.1f} to others; real kernels are slower"
    )


def _pipeline_lines(planned: Plan, facts: Mapping[str, Any]) -> Iterator[str]:
    stages = range(len(planned.stages))
    yield (
        f"{facts['schedule']} over {len(stages)} stages, "
        f"{counted(facts['micro_batches'], 'micro-batch', 'micro-batches')} a step: {facts['bubble_share']:.1%} of the "
        f"stages' time in forward and backward is idle; {facts['bubble_share_of_equal_stages']:.1%} if every stage "
        "took as long"
    )
    yield f"  {'stage':<14}" + "".join(f"{stage:>9}" for stage in stages)
    for phase in STEP_PHASES[:2]:
        unit, figures = "GFLOP", [stage.work.flops(phase) / 1e9 for stage in planned.stages]
        if facts["step_seconds"] is not None:
            unit, figures = "ms", [1e3 * seconds for seconds in facts[f"{phase}_seconds"]]
        yield f"  {f'{phase}, {unit}':<14}" + "".join(f"{figure:>9.2f}" for figure in figures)
    if facts["step_seconds"] is not None and planned.gpus is not None:
        yield (
            f"at most {facts['tokens_per_second']:,.0f} tokens/s on {planned.ranks} x {planned.gpus.name}, "
            f"{facts['step_seconds']:.2f} s a step"
        )
        yield "  " + _assumed(CHIPS[planned.gpus.name])
