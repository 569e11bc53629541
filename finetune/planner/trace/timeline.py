"""A trace's record: every storage that was allocated, resized and freed, in order, with its purpose.

Peaks, compositions and allocator replays are computed from this record. A storage has one component for all its life,
but that may be known late: a tensor made in backward turns out to be a parameter's gradient. So compositions are
computed afterwards. Their parts add up to the total, because each live storage is counted once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from finetune.closed_form.constants import COMPONENTS
from finetune.measure.live_tensors import NONE

LAYER = re.compile(r"\.layers\.(\d+)\b")


def layer_of(name: str) -> int | None:
    """The decoder layer that a module or parameter is in."""
    match = LAYER.search(name)
    if match is None:
        return None
    return int(match.group(1))


class Event(NamedTuple):
    """A storage has `nbytes` from now on; 0 is its end."""

    storage: int  # NONE: a phase begins
    nbytes: int
    place: int  # index into Timeline.places


@dataclass(frozen=True)
class Peak:
    """A phase's largest live total on one device, its parts, and when it was reached."""

    nbytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)  # by component; adds up to nbytes
    module: str = ""  # its forward or backward was running
    event: int = -1  # index into Timeline.events; -1: before the first

    def __post_init__(self) -> None:
        assert sum(self.parts.values()) == self.nbytes


@dataclass(frozen=True)
class PhaseMemory:
    """One phase on one device, over all its runs."""

    peak: Peak
    end: dict[str, int]  # live bytes by component after its latest run

    @property
    def end_bytes(self) -> int:
        return sum(self.end.values())


class Moment(NamedTuple):
    """After one event on one device."""

    event: int
    phase: str
    module: str
    begins: bool  # the phase; nothing changed
    live: dict[str, int]  # by component; one dict for all moments


@dataclass
class Timeline:
    """A trace's events, and facts about its storages."""

    events: list[Event] = field(default_factory=list)
    places: list[tuple[str, str]] = field(default_factory=list)  # phase ("" between phases) and module
    devices: list[str] = field(default_factory=list)  # by storage
    components: list[str] = field(default_factory=list)  # by storage
    streams: dict[int, int] = field(default_factory=dict)  # by storage, unless it is on a device's default stream
    layers: dict[int, int] = field(default_factory=dict)  # the decoder layer of weights and optimizer states

    def replay(self, device: str) -> Iterator[Moment]:
        """Each change on `device`, and each phase's beginning."""
        live: dict[str, int] = {}
        sizes: dict[int, int] = {}
        for index, (storage, nbytes, place) in enumerate(self.events):
            if storage != NONE and self.devices[storage] != device:
                continue
            if storage != NONE:
                component = self.components[storage]
                live[component] = live.get(component, 0) + nbytes - sizes.get(storage, 0)
                sizes[storage] = nbytes
            yield Moment(index, *self.places[place], storage == NONE, live)

    def segments(self, device: str) -> dict[str, dict[tuple[int, str], Peak]]:
        """Each phase's peaks, by the phase's run (the first is 0) and the latest module, in order of appearance."""
        segments: dict[str, dict[tuple[int, str], Peak]] = {}
        runs: Counter[str] = Counter()
        for moment in self.replay(device):
            total = sum(moment.live.values())
            runs[moment.phase] += moment.begins
            # A phase's first moment is its beginning: storages that ended before it do not count.
            if moment.phase and runs[moment.phase]:
                best = segments.setdefault(moment.phase, {})
                key = runs[moment.phase] - 1, moment.module
                if key not in best or total > best[key].nbytes:
                    best[key] = Peak(total, _parts(moment.live), moment.module, moment.event)
        return segments

    def ends(self, device: str) -> dict[str, dict[str, int]]:
        """Live bytes when each phase's latest run ends, by component."""
        return {moment.phase: _parts(moment.live) for moment in self.replay(device) if moment.phase}

    def phases(self, device: str) -> dict[str, PhaseMemory]:
        """Each phase's peak and end on `device`, in order of appearance."""
        ends = self.ends(device)
        peaks = {name: max(best.values(), key=lambda peak: peak.nbytes) for name, best in self.segments(device).items()}
        return {name: PhaseMemory(peak, ends[name]) for name, peak in peaks.items()}


def _parts(live: dict[str, int]) -> dict[str, int]:
    return {component: live[component] for component in COMPONENTS if live.get(component)}
