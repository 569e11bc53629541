"""Two shallow traces give the deep one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.planner.depth.extrapolate import SHALLOW, extrapolate, layers_kept_gathered, with_layers
from finetune.planner.trace.timeline import Timeline
from finetune.planner.trace.trace import trace
from finetune.recipe.strategy import read_strategy
from tests.support.planned import Case, models

LAYERS = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models(tmp_path_factory.mktemp("layers"))


@pytest.mark.parametrize(
    ("method", "checkpointing", "strategy", "ranks"),
    [
        ("full", 0, "single", 1),
        pytest.param("lora", 1, "single", 1, marks=pytest.mark.slow),
        pytest.param("full", 2, "single", 1, marks=pytest.mark.slow),
        pytest.param("full", 1, "fsdp2", 2, marks=pytest.mark.slow),
        pytest.param("full", 1, "fsdp2_grad_op", 8, marks=pytest.mark.slow),
        pytest.param("lora", 2, "fsdp2", 8, marks=pytest.mark.slow),
        pytest.param("full", 0, "ddp", 2, marks=pytest.mark.slow),
        pytest.param("full", 1, "zero2", 2, marks=pytest.mark.slow),
        pytest.param("lora", 1, "zero3", 2, marks=pytest.mark.slow),
    ],
)
def test_deep_from_shallow(
    method: str, checkpointing: int, strategy: str, ranks: int, folder: Path, tmp_path: Path
) -> None:
    case = Case(method, "bf16", checkpointing, packed=True, tied=False, micro_steps=1)
    recipe, depths = case.recipe(folder), []
    config = json.loads(Path(recipe.model.name_or_path, "config.json").read_text())

    def timeline_of(layers: int) -> Timeline:
        depths.append(layers)
        smaller = with_layers(recipe, config, layers, tmp_path)
        return trace(smaller, read_strategy(strategy), case.batches(), ranks=ranks).timeline

    whole = timeline_of(LAYERS).phases("cpu")
    shallow = SHALLOW + (layers_kept_gathered(config) if strategy == "zero3" else 0)
    found = extrapolate(timeline_of, LAYERS, "cpu", period=max(1, checkpointing), shallow=shallow)
    assert max(depths[1:]) < LAYERS
    assert list(found) == list(whole)
    for name, phase in whole.items():
        assert found[name].end == phase.end
        assert found[name].peak.nbytes == pytest.approx(phase.peak.nbytes, rel=1e-5), name
