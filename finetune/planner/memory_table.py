"""A plan as text: the verdict, the reason, and memory by phase and component."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from finetune.closed_form.constants import COMPONENTS
from finetune.measure.units import GIB
from finetune.planner.plan_recipe import Plan
from finetune.strategies.pipeline.timeline import alive_at_most
from finetune.wording import counted

WIDTH, EMPTY = 50, "."
# The bars' shades: weights, which are there all the time; tensors that a step makes; and buffers.
DRAWN = {
    "█": ("parameters", "masters"),
    "▓": ("gradients", "unsharded gradients", "optimizer state"),
    "▒": ("activations", "logits and loss"),
    "░": (
        *("gathered layers", "cast weights", "communication buffers"),
        *("quantisation workspace", "backward workspace", "other"),
    ),
}
NAMES = ("weights", "gradients, optimizer", "activations, loss", "buffers")
assert {part for parts in DRAWN.values() for part in parts} == set(COMPONENTS)


def plan_text(planned: Plan) -> str:
    """Verdict, reason, table, bars, and assumptions."""
    phases = planned.phases
    lines = [verdict(planned), "", f"{'GiB at the peak of':<24}" + "".join(f"{name:>10}" for name in phases)]
    for component in COMPONENTS:
        if any(phase.peak.parts.get(component) for phase in phases.values()):
            cells = (phase.peak.parts.get(component, 0) / GIB for phase in phases.values())
            lines.append(f"{component:<24}" + "".join(f"{cell:>10.2f}" for cell in cells))
    lines.append(f"{'all tensors':<24}" + "".join(f"{phase.peak.nbytes / GIB:>10.2f}" for phase in phases.values()))
    lines += ["", *plan_bars(planned)]
    if planned.stages:
        lines += ["", *_stages(planned)]
    lines.append("")
    if planned.outside:
        listed = ", ".join(f"{name} {nbytes / GIB:.2f}" for name, nbytes in planned.outside.items())
        lines.append(f"outside of tensors, GiB: {listed}")
    if planned.reserved:
        least, most = (nbytes / GIB for nbytes in planned.reserved)
        lines.append(f"reserved by torch's allocator, GiB: at least {least:.1f}, {most:.1f} with enough room")
    if any(planned.host.values()):
        listed = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in planned.host.items())
        lines.append(f"in host memory of rank 0, of {planned.node} per machine, GiB at the peak of: {listed}")
    if planned.held >= GIB // 10:
        lines.append(
            f"in host memory of each rank until the worst step is over, GiB: {planned.held / GIB:.1f}, a copy of the "
            "weights to go back to, which goes through the disk if a machine has no room for it"
        )
    return "\n".join([*lines, *planned.notes])


def verdict(planned: Plan) -> str:
    """The verdict in one sentence."""
    phase, peak = planned.peak
    where = f"{phase}, in {peak.module}" if peak.module else phase
    if planned.stages:
        where = f"stage {planned.stage} of {len(planned.stages)}, which needs most; {where}"
    largest, nbytes = max(peak.parts.items(), key=lambda part: part[1])
    most = f"the largest part {largest}, {nbytes / GIB:.1f} GiB"
    needs = f"needs {planned.needed / GIB:.1f} GiB per GPU ({where}; {most})"
    if planned.gpus is None:
        return f"{planned.strategy} on {counted(planned.ranks, 'rank')} {needs}"
    needs += f", at most about {planned.upper / GIB:.1f} with what torch's allocator caches"
    spare = (planned.gpus.memory - max(planned.needed, planned.upper)) / GIB
    gpus = f"{planned.ranks} x {planned.gpus.name}"
    if planned.fits:
        return f"fits {gpus}: {needs}; {spare:.1f} GiB to spare"
    return f"does not fit {gpus}: {needs}; {-spare:.1f} GiB too much"


def plan_bars(planned: Plan) -> Iterator[str]:
    """Each phase's peak as a bar, relative to the GPU's memory or to the largest peak."""
    outside, phases = sum(planned.outside.values()), planned.phases
    full_bytes = max(phase.peak.nbytes for phase in phases.values()) + outside
    if planned.gpus is not None:
        full_bytes = max(full_bytes, planned.gpus.memory)
    for name, phase in phases.items():
        sizes = [sum(phase.peak.parts.get(part, 0) for part in parts) for parts in DRAWN.values()]
        bar = ""
        for shade, total in zip((*DRAWN, "x"), accumulate([*sizes, outside]), strict=True):
            # Running sums are rounded, so that the bar ends where the total is.
            bar += shade * (round(total / full_bytes * WIDTH) - len(bar))
        needed = (phase.peak.nbytes + outside) / GIB
        yield f"{name:<9}{bar:{EMPTY}<{WIDTH}} {needed:6.1f} of {full_bytes / GIB:.1f} GiB"
    legend = [f"{shade} {name}" for shade, name in zip(DRAWN, NAMES, strict=True)]
    if outside:
        legend.append("x other")
    yield " " * 9 + "  ".join(legend)


def _stages(planned: Plan) -> Iterator[str]:
    """Each pipeline stage's memory. The table and bars before it show the stage that needs most."""
    layers = [", ".join(f"{run.start} to {run.stop - 1}" for run in stage.stage_layers) for stage in planned.stages]
    width = max(9, *map(len, layers))
    yield f"stage  {'layers':>{width}}  micro-batches  weights, state  activations  all, GiB  fits"
    for stage, own_layers in zip(planned.stages, layers, strict=True):
        parts = stage.peak[1].parts
        state = sum(parts.get(part, 0) for shade in "█▓" for part in DRAWN[shade]) / GIB
        activations = sum(parts.get(part, 0) for part in DRAWN["▒"]) / GIB
        fits = ""
        if stage.gpus is not None:
            fits = "yes" if stage.fits else "no"
        yield (
            f"{stage.stage:<7}{own_layers:>{width}}{micro_batches_alive(stage):>15}{state:>16.2f}{activations:>13.2f}"
            f"{stage.needed / GIB:>10.2f}{fits:>6}"
        )
    in_turn = ", in either of its runs of layers" if len(planned.stages[0].stage_layers) > 1 else ""
    yield f"micro-batches: whose activations the stage holds at once{in_turn}, at most"
    if planned.layout.ranks > 1:
        yield f"each stage is there {planned.layout.ranks} times, in as many pipelines"


def micro_batches_alive(stage: Plan) -> int:
    """The micro-batches that have activations on this pipeline stage at once, at most."""
    assert stage.stage is not None
    stages = stage.ranks // stage.layout.ranks
    return alive_at_most(stage.schedule or "", stage.stage, stages, stage.layout.micro_steps)


def plan_json(planned: Plan) -> dict[str, Any]:
    """The plan; every size is an integer number of bytes.

    A pipeline's plan is the stage that needs most, and `stages` has all stages.
    """
    head: dict[str, Any] = {}
    if planned.stage is not None:
        head["stage"] = planned.stage
    if planned.stages:
        head["stages"] = []
    for stage in planned.stages:
        runs = [[run.start, run.stop - 1] for run in stage.stage_layers]  # first and last layer of each
        layers = runs[0] if len(runs) == 1 else runs
        facts = {"layers": layers, "micro_batches_alive": micro_batches_alive(stage), **plan_json(stage)}
        head["stages"].append(facts)
    return {
        **head,
        "fits": planned.fits,
        "strategy": planned.strategy,
        "ranks": planned.ranks,
        "needed_bytes": planned.needed,
        "reserved_bytes": list(planned.reserved) if planned.reserved else None,
        "upper_bytes": planned.upper,
        "gpu_bytes": planned.gpus.memory if planned.gpus else None,
        "peak": {"phase": planned.peak[0], "module": planned.peak[1].module},
        "outside_bytes": planned.outside,
        "host_bytes": dict(planned.host),
        "held_bytes": planned.held,
        "phases": {
            name: {
                "peak_bytes": phase.peak.nbytes,
                "parts": phase.peak.parts,
                "module": phase.peak.module,
                "end_bytes": phase.end_bytes,
            }
            for name, phase in planned.phases.items()
        },
        "notes": list(planned.notes),
    }
