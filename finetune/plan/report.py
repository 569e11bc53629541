"""A plan as a person reads it: the verdict, the reason, and memory by phase and component."""

from __future__ import annotations

from collections.abc import Iterator

from finetune.plan.job import Planned
from finetune.plan.timeline import COMPONENTS

GIB = 2**30


def describe(planned: Planned) -> str:
    """Verdict, reason, table, and what is assumed."""
    return "\n".join([verdict(planned), "", *_table(planned), "", *_rest(planned)])


def verdict(planned: Planned) -> str:
    """One sentence."""
    phase, peak = planned.peak
    where = f"{phase}, in {peak.module}" if peak.module else phase
    largest, nbytes = max(peak.parts.items(), key=lambda part: part[1])
    most = f"most of it {largest}, {nbytes / GIB:.1f} GiB"
    needs = f"needs {planned.needed / GIB:.1f} GiB a GPU ({where}; {most})"
    if planned.gpus is None:
        return f"{planned.strategy} on {planned.ranks} rank(s) {needs}"
    needs += f", at most about {planned.upper / GIB:.1f} with what torch's allocator caches"
    spare = (planned.gpus.memory - max(planned.needed, planned.upper)) / GIB
    gpus = f"{planned.ranks} x {planned.gpus.name}"
    if planned.fits:
        return f"fits {gpus}: {needs}; {spare:.1f} GiB to spare"
    return f"does not fit {gpus}: {needs}; {-spare:.1f} GiB more than there is"


def _table(planned: Planned) -> Iterator[str]:
    phases = planned.phases
    shown = [name for name in COMPONENTS if any(phase.peak.parts.get(name) for phase in phases.values())]
    yield f"{'GiB at the peak of':<24}" + "".join(f"{name:>10}" for name in phases)
    for component in shown:
        cells = (phase.peak.parts.get(component, 0) / GIB for phase in phases.values())
        yield f"{component:<24}" + "".join(f"{cell:>10.2f}" for cell in cells)
    yield f"{'all tensors':<24}" + "".join(f"{phase.peak.nbytes / GIB:>10.2f}" for phase in phases.values())


def _rest(planned: Planned) -> Iterator[str]:
    if planned.outside:
        listed = ", ".join(f"{name} {nbytes / GIB:.2f}" for name, nbytes in planned.outside.items())
        yield f"beside the tensors, GiB: {listed}"
    if planned.reserved:
        least, most = (nbytes / GIB for nbytes in planned.reserved)
        yield f"reserved by torch's allocator, GiB: {least:.1f} at least, {most:.1f} where there is room"
    yield "full rows of data.max_length"
    yield from planned.notes
