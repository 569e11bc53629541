"""A deep model's storage changes from a shallow one's, for the allocator's replay.

The allocator's reserved bytes depend on the order of requests, so they cannot be extrapolated by a line as peaks can.

A trace is a list of events: a storage has N bytes from now on. It is divided into *runs*: consecutive events in one
decoder layer. That is the layer that is running or, if none is running, the storage's own layer. The first two layers
and the last two are kept as they are. The layer between them (or the `period` of layers, where every n-th is
recomputed) is repeated, run by run, in the phase's order through the layers.

A storage is identified by the layer that made it, the index of that layer's run (its *visit*), and its position in that
run. In layer 2's first run the third storage is (2, 0, 2); the copies' are (3, 0, 2), (4, 0, 2). So if a run frees the
storages of the layer before it, or fills those of the next one, each of its copies does so too.

An example: 5 traced layers become 7, period 1 (5 are the fewest: two, one that repeats, and two). In forward layer i
allocates a storage (+i); in backward, which runs from right to left, it frees that of the layer before it (-(i-1)):

    run of traced layer       0    1    2              3    4
    traced, forward          +0   +1   +2             +3   +4
    deep, forward            +0   +1   +2   +3   +4   +5   +6     the run of layer 2 is copied twice
    traced, backward              -0   -1             -2   -3
    deep, backward                -0   -1   -2   -3   -4   -5     each copy frees its own neighbour's; traced layer 3
    is deep layer             0    1    2    3    4    5    6     frees that of the last copy, which is next to it

A storage that a distant run frees is freed in all copies: an optimizer step does so for all gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, product
from typing import NamedTuple

from finetune.closed_form.constants import CAST_WEIGHTS
from finetune.measure.live_tensors import NONE
from finetune.planner.trace.timeline import Event, Peak, PhaseMemory, Timeline, layer_of

FIRST = 2  # index of the first layer that is repeated; as many layers follow the repeated ones


class StorageChange(NamedTuple):
    """An event in the deep model: a storage has `nbytes` from now on; 0 is its end."""

    storage: Hashable  # None: a phase begins
    nbytes: int
    phase: str
    stream: int = 0


class _Run(NamedTuple):
    layer: int | None
    visit: int  # index among this layer's runs
    events: list[Event]


@dataclass(frozen=True)
class LayerRepeat:
    """The shallow model's layers in the deep model."""

    period: int
    copies: int  # copies of the repeated layers, in addition to the traced ones

    def repeats(self, layer: int | None) -> bool:
        return layer is not None and FIRST <= layer < FIRST + self.period

    def positions(self, layer: int, copy: int | None) -> list[int]:
        """A traced layer's indices in the deep model: in one copy or, with None, in all."""
        if copy is not None:
            return [layer + copy * self.period]
        if self.repeats(layer):
            return [layer + number * self.period for number in range(self.copies + 1)]
        if layer < FIRST:
            return [layer]
        return [layer + self.copies * self.period]

    def positions_of(self, layer: int, run: int | None, copy: int) -> list[int]:
        """Indices of the layer that copy `copy` of layer `run`'s run refers to."""
        near = run is not None and abs(layer - run) <= 1
        if self.repeats(run) and (near or self.repeats(layer)):
            return self.positions(layer, copy)
        if near and self.repeats(layer):
            # The layer before the repeated ones refers to the first copy, the layer after them to the last.
            return self.positions(layer, 0 if run == FIRST - 1 else self.copies)
        return self.positions(layer, None)


def repeat_layers(timeline: Timeline, device: str, layers: int, deep: int, period: int = 1) -> Iterator[StorageChange]:
    """The changes on `device` for a model with `deep` layers, from a timeline with `layers`.

    Layers repeat after `period`. With deep == layers the changes equal the timeline's.
    """
    repeat = LayerRepeat(period, (deep - layers) // period)
    assert repeat.copies * period == deep - layers
    assert not repeat.copies or layers >= FIRST + period + FIRST, "no layers are left around those that repeat"
    runs = _runs(timeline, device)
    # Layer, visit and position of each storage's first event.
    names: dict[int, tuple[int | None, int, int]] = {}
    for run in runs:
        position = 0
        for event in run.events:
            if event.storage != NONE and event.storage not in names:
                names[event.storage] = run.layer, run.visit, position
                position += 1
    previous_layer: int | None = None
    for repeated, group in groupby(runs, key=lambda run: repeat.repeats(run.layer)):
        block = list(group)
        copies = [*range(repeat.copies + 1)] if repeated else [0]
        if previous_layer is not None and previous_layer >= FIRST:  # backward goes from the last layer to the first
            copies.reverse()
        for copy, run in product(copies, block):
            for event in run.events:
                phase = timeline.places[event.place][0]
                if event.storage == NONE:
                    yield StorageChange(None, 0, phase)
                    continue
                layer, *visit_and_position = names[event.storage]
                stream = timeline.streams.get(event.storage, 0)
                positions: Sequence[int | None] = (
                    [None] if layer is None else repeat.positions_of(layer, run.layer, copy)
                )
                for deep_layer in positions:
                    yield StorageChange((deep_layer, *visit_and_position), event.nbytes, phase, stream)
        previous_layer = block[-1].layer


def phases_of_changes(changes: Iterable[StorageChange]) -> dict[str, PhaseMemory]:
    """Each phase's peak and end, without their components."""
    sizes: dict[Hashable, int] = {}
    live, peaks, ends = 0, dict[str, int](), dict[str, int]()
    for storage, nbytes, phase, _ in changes:
        if storage is not None:
            live += nbytes - sizes.get(storage, 0)
            sizes[storage] = nbytes
        elif phase not in peaks:
            peaks[phase] = 0
        if phase in peaks:
            peaks[phase], ends[phase] = max(peaks[phase], live), live
    whole = {name: Peak(nbytes, {"other": nbytes}) for name, nbytes in peaks.items() if name}
    return {name: PhaseMemory(peak, {"other": ends[name]}) for name, peak in whole.items()}


def add_unlayered_storage(changes: Iterable[StorageChange], short: Mapping[str, int]) -> Iterator[StorageChange]:
    """The changes, with further storages that have `short` bytes together in each phase.

    They belong to no layer and grow with depth: DDP's buckets, ZeRO's flat partitions. Bytes that all phases lack are
    one storage that stays. Bytes that only some phases lack are allocated and freed. If forward lacks 3 bytes and
    backward 5, there is a storage with 3 bytes in both, and one with 2 in backward.
    """
    levels = sorted({0, *(nbytes for nbytes in short.values() if nbytes > 0)})
    pieces = list(pairwise(levels))
    allocated = 0  # pieces
    for change in changes:
        if change.storage is None:  # before the phase's peak is watched
            needed = sum(top <= short.get(change.phase, 0) for _, top in pieces)
            yield from (StorageChange(("unlayered", index), 0, change.phase) for index in range(needed, allocated))
            for index in range(allocated, needed):
                below, top = pieces[index]
                yield StorageChange(("unlayered", index), top - below, change.phase)
            allocated = needed
        yield change


def _runs(timeline: Timeline, device: str) -> list[_Run]:
    """All events on the device, in order.

    Events without a layer belong to the run before them. Weight copies are made before the layers run, each in its
    layer's run.
    """
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
        elif not begins and (phase not in in_layers or timeline.components[event.storage] == CAST_WEIGHTS):
            layer = owners.get(event.storage)
        if begins or (layer is not None and layer != runs[-1].layer):
            runs.append(_Run(layer, visits[layer], []))
            visits[layer] += 1
        runs[-1].events.append(event)
    return runs
