"""The events of a deep model from those of a shallow one, for what cannot be grown by a line: the allocator's replay.

Events are cut into runs that belong to one decoder layer: the one whose module is running or, where none is, the one
that the storage belongs to. All layers but the first two and the last two are alike, or repeat by a period; their runs
are repeated, in the order in which the phase goes through the layers. A storage goes by where it was made: the layer,
the how-manieth of its runs, and the place there. So a run that lets go what the layer before it made, or fills what the
next one needs, does so in each of its copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from finetune.measure.live_tensors import NONE
from finetune.planner.trace.timeline import Event, Timeline, layer_of

FIRST = 2  # of the layers that are repeated; as many stand behind them


class Change(NamedTuple):
    """An event of the deep model: a storage has so many bytes from now on."""

    storage: Hashable  # None: a phase begins
    nbytes: int
    phase: str
    stream: int = 0


class _Run(NamedTuple):
    layer: int | None
    visit: int  # how many runs of this layer were before
    events: list[Event]


@dataclass(frozen=True)
class LayerRepeat:
    """How the layers of the shallow model stand in the deep one."""

    period: int
    copies: int  # of the repeated layers, beside those that are there

    def repeats(self, layer: int | None) -> bool:
        return layer is not None and FIRST <= layer < FIRST + self.period

    def moved(self, layer: int, copy: int | None) -> list[int]:
        """Where a layer is: in one copy, or (None) seen from outside of the copies: in all."""
        if copy is not None:
            return [layer + copy * self.period]
        if self.repeats(layer):
            return [layer + each * self.period for each in range(self.copies + 1)]
        return [layer if layer < FIRST else layer + self.copies * self.period]

    def seen(self, layer: int, run: int | None, copy: int) -> list[int]:
        """Where the layer is that a run of layer `run` speaks of."""
        near = run is not None and abs(layer - run) <= 1
        if self.repeats(run):
            return self.moved(layer, copy if near or self.repeats(layer) else None)
        if near and self.repeats(layer):  # the first copy, or the last
            return self.moved(layer, 0 if run == FIRST - 1 else self.copies)
        return self.moved(layer, None)


def repeat_layers(timeline: Timeline, device: str, layers: int, deep: int, period: int = 1) -> Iterator[Change]:
    """The changes on `device` of a model with `deep` layers, from the timeline of one with `layers`.

    Layers repeat after `period`. With deep == layers they are those of the timeline.
    """
    depth = LayerRepeat(period, (deep - layers) // period)
    assert depth.copies * period == deep - layers
    assert not depth.copies or layers >= FIRST + period + FIRST, "no layers are left around those that repeat"
    runs = _runs(timeline, device)
    names = _names(runs)
    before: int | None = None
    for repeated, group in groupby(runs, key=lambda run: depth.repeats(run.layer)):
        block = list(group)
        copies = range(depth.copies + 1 if repeated else 1)
        upwards = before is None or before < FIRST
        for copy in copies if upwards else reversed(copies):
            for run in block:
                yield from _changes(timeline, names, run, depth, copy)
        before = block[-1].layer


def add_unlayered_storage(changes: Iterable[Change], short: Mapping[str, int]) -> Iterator[Change]:
    """With storages beside them that have so many bytes together in each phase: of what is no layer's and grows with
    depth, as DDP's buckets and ZeRO's flat partitions.

    What the phases have in common is a storage that stays; what some have beyond others comes and goes.
    """
    levels = sorted({0, *(nbytes for nbytes in short.values() if nbytes > 0)})
    pieces = list(pairwise(levels))
    held = 0  # so many of them
    for change in changes:
        if change.storage is None:  # before the phase's peak is watched
            needed = sum(top <= short.get(change.phase, 0) for _, top in pieces)
            yield from (Change(("no layer's", index), 0, change.phase) for index in range(needed, held))
            for index in range(held, needed):
                below, top = pieces[index]
                yield Change(("no layer's", index), top - below, change.phase)
            held = needed
        yield change


def _runs(timeline: Timeline, device: str) -> list[_Run]:
    """All events on the device, in order; those that belong to no layer go with the run before them."""
    in_layers = {phase for phase, module in timeline.places if layer_of(module) is not None}
    owners = dict(timeline.layers)
    visits: dict[int | None, int] = defaultdict(int)
    runs: list[_Run] = []
    for event in timeline.events:
        phase, module = timeline.places[event.place]
        begins = event.storage == NONE
        if not begins and timeline.devices[event.storage] != device:
            continue
        layer = layer_of(module)
        if layer is not None:
            owners.setdefault(event.storage, layer)
        elif not begins and phase not in in_layers:
            layer = owners.get(event.storage)
        if begins or (layer is not None and layer != runs[-1].layer):
            runs.append(_Run(layer, visits[layer], []))
            visits[layer] += 1
        runs[-1].events.append(event)
    return runs


def _names(runs: list[_Run]) -> dict[int, tuple[int | None, int, int]]:
    """Layer, visit and place of each storage's first event."""
    names: dict[int, tuple[int | None, int, int]] = {}
    for run in runs:
        made = 0
        for event in run.events:
            if event.storage != NONE and event.storage not in names:
                names[event.storage] = run.layer, run.visit, made
                made += 1
    return names


def _changes(
    timeline: Timeline, names: dict[int, tuple[int | None, int, int]], run: _Run, depth: LayerRepeat, copy: int
) -> Iterator[Change]:
    for event in run.events:
        phase = timeline.places[event.place][0]
        if event.storage == NONE:
            yield Change(None, 0, phase)
            continue
        layer, *place = names[event.storage]
        stream = timeline.streams.get(event.storage, 0)
        for where in [None] if layer is None else depth.seen(layer, run.layer, copy):
            yield Change((where, *place), event.nbytes, phase, stream)
