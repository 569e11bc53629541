"""Two shallow traces give the deep one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.planner.depth.extrapolate import (
    SHALLOW,
    depths,
    extrapolate,
    kinds_of_layers,
    layers_kept_gathered,
    period_and_depth,
    with_layers,
)
from finetune.planner.trace.timeline import Timeline
from finetune.planner.trace.trace import trace
from finetune.recipe.strategy import read_strategy
from tests.support.memory.planned import Case, models

LAYERS = 9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models(tmp_path_factory.mktemp("layers"))


@pytest.mark.slow
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
    recipe = case.recipe(folder)
    config = json.loads(Path(recipe.model.name_or_path, "config.json").read_text())

    def timeline_of(layers: int) -> Timeline:
        smaller = with_layers(recipe, config, layers, tmp_path)
        return trace(smaller, read_strategy(strategy), case.batches(), ranks=ranks).timeline

    shallow = SHALLOW + (layers_kept_gathered(config) if strategy == "zero3" else 0)
    layers = max(LAYERS, shallow + 2)
    whole = timeline_of(layers).phases("cpu")
    period = max(1, checkpointing)
    two = depths(layers, period, shallow)
    assert max(two) < layers
    found = extrapolate({depth: timeline_of(depth) for depth in two}, layers, "cpu", period=period)
    assert list(found) == list(whole)
    for name, phase in whole.items():
        assert found[name].end == phase.end
        assert found[name].peak.nbytes == pytest.approx(phase.peak.nbytes, rel=1e-5), name


@pytest.mark.parametrize(
    ("kinds", "every", "found"),
    [
        ("a" * 30, 1, (1, 4)),
        ("a" * 30, 3, (3, 4)),
        ("d" + "s" * 29, 1, (1, 6)),  # the first one is dense
        ("dd" + "s" * 28, 1, (1, 6)),
        ("ddd" + "s" * 27, 1, (1, 30)),  # a replay keeps two at either end
        ("lllf" * 8, 1, (4, 8)),
        ("lllf" * 8, 2, (4, 8)),
        ("lllf" * 8, 3, (3, 32)),  # repeats after twelve: as many layers twice as at once
        ("lllf" * 4, 1, (1, 16)),
        ("lllf" * 8 + "l", 1, (4, 8)),
        ("lllf" * 4 + "LLLF" * 4, 1, (1, 32)),
        ("abcdefgh", 1, (1, 8)),
    ],
)
def test_after_how_many_layers_their_kinds_repeat(kinds: str, every: int, found: tuple[int, int]) -> None:
    assert period_and_depth(kinds, every) == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "checkpointing"),
    [("full", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("lora", 1), ("full", 0), ("full", 3)))],
)
def test_deep_from_shallow_of_layers_of_two_kinds(
    method: str, checkpointing: int, folder: Path, tmp_path: Path
) -> None:
    """Every other layer attends to everything, with heads twice as wide: its matrices and its queries are larger."""
    layers = 12 if checkpointing < 2 else 36
    case = Case(method, "bf16", checkpointing, packed=True, tied=False, micro_steps=1)
    config = {
        **{"model_type": "gemma4_text", "num_hidden_layers": layers, "hidden_size": 32, "intermediate_size": 48},
        **{"layer_types": [("sliding_attention", "full_attention")[at % 2] for at in range(layers)]},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 16},
        **{"vocab_size": 97, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 0, "sliding_window": 16},
    }
    whole_model = tmp_path / "whole"
    whole_model.mkdir()
    (whole_model / "config.json").write_text(json.dumps(config), "utf-8")
    recipe = case.recipe(folder)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name_or_path": str(whole_model)})})
    period, shallow = period_and_depth(kinds_of_layers(config), max(1, checkpointing))
    assert (period, shallow) == ((2, 4) if checkpointing < 2 else (6, 12))

    def timeline_of(depth: int) -> Timeline:
        smaller = with_layers(recipe, config, depth, tmp_path)
        return trace(smaller, read_strategy("single"), case.batches(), ranks=1).timeline

    whole = timeline_of(layers).phases("cpu")
    two = depths(layers, period, shallow)
    assert max(two) < layers
    found = extrapolate({depth: timeline_of(depth) for depth in two}, layers, "cpu", period=period)
    for name, phase in whole.items():
        assert found[name].end == phase.end, name
        assert found[name].peak.nbytes == phase.peak.nbytes, name
