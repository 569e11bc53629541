"""What a trace leaves: every storage that was made, resized and let go, in order, and what each of them was for.

Peaks, compositions and allocator replays are functions of this record. A storage has one component for all its life,
which may be found out late (a tensor made in backward turns out to be a parameter's gradient); so compositions are
read off afterwards, and their parts add up to the total because each live storage is counted once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

COMPONENTS = (
    "parameters",
    "gradients",  # as the optimizer sees them: of shards where the strategy shards
    "unsharded gradients",  # whole, on their way to the ranks that keep them
    "optimizer state",
    "activations",  # what forward makes, recomputation in backward too
    "logits and loss",
    "gathered layers",  # weights put together from their shards
    "cast weights",  # copies in the computation's number format
    "communication buffers",
    "quantisation workspace",  # 4-bit weights, unpacked for a matrix product
    "backward workspace",  # gradients of activations, and of weights before they are added up
    "other",  # batches, norms, what an update needs beside its state
)


class Event(NamedTuple):
    """A storage has so many bytes from now on; 0 is its end."""

    storage: int
    nbytes: int
    place: int  # index into Timeline.places


@dataclass(frozen=True)
class Peak:
    """The largest live total of a phase on one device, what it was made of, and when it was reached."""

    nbytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)  # by component; adds up to nbytes
    module: str = ""  # whose forward or backward was running
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


@dataclass
class Timeline:
    """The events of a trace and what is known of its storages."""

    events: list[Event] = field(default_factory=list)
    places: list[tuple[str, str]] = field(default_factory=list)  # phase ("" between phases) and module
    devices: list[str] = field(default_factory=list)  # of each storage
    components: list[str] = field(default_factory=list)  # of each storage

    def replay(self, device: str) -> Iterator[tuple[int, str, str, dict[str, int]]]:
        """After each event on `device`: its index, phase, module, and live bytes by component (one dict, updated)."""
        live: dict[str, int] = {}
        held: dict[int, int] = {}
        for index, (storage, nbytes, place) in enumerate(self.events):
            if self.devices[storage] != device:
                continue
            component = self.components[storage]
            live[component] = live.get(component, 0) + nbytes - held.get(storage, 0)
            held[storage] = nbytes
            yield index, *self.places[place], live

    def phases(self, device: str) -> dict[str, PhaseMemory]:
        """Each phase's peak and end on `device`, in order of first appearance."""
        found: dict[str, PhaseMemory] = {}
        best: dict[str, tuple[int, dict[str, int], str, int]] = {}
        before: dict[str, int] = {}
        total, running = 0, ""
        for index, phase, module, live in self.replay(device):
            if phase and phase != running:  # what was live when the phase began belongs to it
                best[phase] = max(best.get(phase, (-1, {}, "", -1)), (total, before, module, index - 1), key=_bytes)
            running = phase
            total = sum(live.values())
            if phase and total > best[phase][0]:
                best[phase] = total, _parts(live), module, index
            before = _parts(live)
            if phase:
                found[phase] = PhaseMemory(Peak(), before)
        return {name: PhaseMemory(Peak(*best[name]), memory.end) for name, memory in found.items()}


def _bytes(candidate: tuple[int, dict[str, int], str, int]) -> int:
    return candidate[0]


def _parts(live: dict[str, int]) -> dict[str, int]:
    return {component: live[component] for component in COMPONENTS if live.get(component)}
