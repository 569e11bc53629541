"""A deep model's events, repeated from a shallow one's, are those of the deep model's own trace."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from finetune.measure.live_tensors import NONE
from finetune.planner.depth.caching_allocator import CachingAllocator, NoMemory, replay
from finetune.planner.depth.extrapolate import with_layers
from finetune.planner.depth.repeat_layers import (
    StorageChange,
    add_unlayered_storage,
    phases_of_changes,
    repeat_layers,
)
from finetune.planner.trace.fake_device import DEVICE_NAME
from finetune.planner.trace.timeline import Event, Timeline
from finetune.planner.trace.trace import trace
from finetune.recipe.strategy import read_strategy
from tests.support.memory.planned import Case, models

DEEP = 10
# The number of tensors of a model shows in what foreach kernels make for each of them, a few bytes a tensor.
FEW = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models(tmp_path_factory.mktemp("repeat_layers"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "checkpointing", "strategy", "ranks"),
    [
        ("lora", 1, "single", 1),
        ("full", 0, "single", 1),
        ("full", 2, "single", 1),
        ("full", 1, "fsdp2", 8),
        ("qlora", 2, "fsdp2", 8),
    ],
)
def test_a_deep_models_changes(
    method: str, checkpointing: int, strategy: str, ranks: int, folder: Path, tmp_path: Path
) -> None:
    case = Case(method, "bf16", checkpointing, packed=True, tied=False, micro_steps=2)
    recipe, period = case.recipe(folder), max(1, checkpointing)
    config = json.loads(Path(recipe.model.name_or_path, "config.json").read_text())

    def timeline_of(layers: int) -> Timeline:
        smaller = with_layers(recipe, config, layers, tmp_path)
        return trace(smaller, read_strategy(strategy), case.batches(), ranks=ranks, gpu=True).timeline

    whole = list(repeat_layers(timeline_of(DEEP), DEVICE_NAME, DEEP, DEEP, period))
    shallow = 4 + period + DEEP % period
    grown = list(repeat_layers(timeline_of(shallow), DEVICE_NAME, shallow, DEEP, period))
    assert large(grown) == large(whole)
    there, here = replay(whole), replay(grown)
    assert list(here) == list(there)
    for phase, held in there.items():
        assert here[phase].allocated == pytest.approx(held.allocated, abs=64 * 1024), phase
        assert here[phase].reserved == held.reserved, phase


def large(changes: list[StorageChange]) -> Counter[tuple[str, int]]:
    return Counter((change.phase, change.nbytes) for change in changes if change.nbytes > FEW)


def test_an_order_that_goes_up_and_one_that_goes_down() -> None:
    """Layers 0 to 4: each makes something in forward, which its backward frees; the one above has it in between."""
    phases = ("forward", "backward")
    timeline = Timeline(places=[(phase, f"model.layers.{layer}.mlp") for phase in phases for layer in range(5)])
    timeline.devices = [DEVICE_NAME] * 5
    timeline.events = [Event(NONE, 0, 0), *(Event(layer, 100 + layer, layer) for layer in range(5))]
    timeline.events += [Event(NONE, 0, 5), *(Event(layer, 0, 5 + layer) for layer in reversed(range(5)))]
    changes = [change for change in repeat_layers(timeline, DEVICE_NAME, 5, 7) if isinstance(change.storage, tuple)]
    found = [(change.phase, change.storage[0], change.nbytes) for change in changes]  # type: ignore[index]
    up = [("forward", layer, nbytes) for layer, nbytes in enumerate((100, 101, 102, 102, 102, 103, 104))]
    assert found == [*up, *(("backward", layer, 0) for layer in range(6, -1, -1))]


def test_the_worked_example() -> None:
    """The table in the module's docstring: in backward each layer frees what the layer before it made."""
    phases = ("forward", "backward")
    timeline = Timeline(places=[(phase, f"model.layers.{layer}.mlp") for phase in phases for layer in range(5)])
    timeline.devices = [DEVICE_NAME] * 5
    timeline.events = [Event(NONE, 0, 0), *(Event(layer, 100, layer) for layer in range(5))]
    timeline.events += [Event(NONE, 0, 5), *(Event(layer - 1, 0, 5 + layer) for layer in (4, 3, 2, 1))]
    changes = [change for change in repeat_layers(timeline, DEVICE_NAME, 5, 7) if isinstance(change.storage, tuple)]
    signed = ["+-"[change.nbytes == 0] + str(change.storage[0]) for change in changes]  # type: ignore[index]
    assert " ".join(signed) == "+0 +1 +2 +3 +4 +5 +6 -5 -4 -3 -2 -1 -0"


def test_a_phases_peak_and_end_are_the_sums_of_its_changes() -> None:
    """Seven layers of 100 bytes: 700 when forward ends, none when backward does. A resized one counts once."""
    changes = [StorageChange(None, 0, "forward"), *(StorageChange(layer, 100, "forward") for layer in range(7))]
    changes += [StorageChange(None, 0, "backward"), StorageChange(6, 150, "backward")]
    changes += [StorageChange(layer, 0, "backward") for layer in range(7)]
    found = {name: (phase.peak.nbytes, phase.end_bytes) for name, phase in phases_of_changes(changes).items()}
    assert found == {"forward": (700, 700), "backward": (750, 0)}


def test_what_no_layer_has_is_beside_them_in_its_phase() -> None:
    """ZeRO's flat copy of all weights is there while they are loaded, and no longer."""
    mib = 2**20
    changes = [StorageChange(None, 0, "load"), StorageChange("a", 20 * mib, "load")]
    for phase in ("forward", "step"):
        changes += [StorageChange(None, 0, phase), StorageChange("b", 40 * mib, phase), StorageChange("b", 0, phase)]
    held = replay(add_unlayered_storage(2 * changes, {"load": 100 * mib, "forward": 10 * mib, "step": -5 * mib}))
    assert {phase: found.allocated // mib for phase, found in held.items()} == {"load": 120, "forward": 70, "step": 60}
    assert held["step"].reserved == 120 * mib, "pieces of 10 and 90, found again; the 40 lie in the larger meanwhile"
    assert list(add_unlayered_storage(changes, {"load": 0})) == changes


def test_a_full_gpu() -> None:
    """A cached segment is given back when another is needed; what is in use is not."""
    mib = 2**20
    changes = [
        StorageChange("a", 60 * mib, "load"),
        StorageChange("a", 0, "load"),
        StorageChange("b", 80 * mib, "load"),
    ]
    assert replay([StorageChange(None, 0, "load"), *changes])["load"].reserved == 140 * mib
    assert replay([StorageChange(None, 0, "load"), *changes], 100 * mib)["load"].reserved == 80 * mib
    allocator = CachingAllocator(100 * mib)
    allocator.malloc("a", 60 * mib)
    with pytest.raises(NoMemory):
        allocator.malloc("b", 80 * mib)
