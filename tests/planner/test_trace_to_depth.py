"""A plan at full depth has what only deep models have, with a stand-in for the trace of one depth."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.measure.live_tensors import NONE
from finetune.planner.depth import trace_to_depth as module
from finetune.planner.depth.trace_to_depth import TraceRequest, trace_to_depth
from finetune.planner.trace.step_work import StepWork
from finetune.planner.trace.timeline import Event, Timeline
from finetune.planner.trace.trace import Traced
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import read_strategy
from tests.support.models.tiny import flat_batch
from tests.support.runs.recipes import least_recipe

LAYERS = 40
CONFIG = {  # an embedding as large as 3.2 layers
    **{"model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 2048},
}
OF_ONE_LAYER = {"rank_pattern": {"layers.20.mlp.up_proj": 64}}


def of_layers(depth: int, alike_from: int) -> int:
    """Bytes: each layer adds more than the one before it, and those beyond `alike_from` add one."""
    return min(depth, alike_from) ** 2 + depth


def standing_in(alike_from: int) -> Callable[..., Traced]:
    def traced(recipe: Recipe, *_: Any, **__: Any) -> Traced:
        layers = json.loads(Path(recipe.model.name_or_path, "config.json").read_text())["num_hidden_layers"]
        events = [Event(NONE, 0, 0), Event(0, of_layers(layers, alike_from), 0)]
        return Traced(Timeline(events, [("step", "")], ["cpu"], ["parameters"]), {}, {}, StepWork({}))

    return traced


@pytest.mark.parametrize(
    ("sections", "alike_from", "full_depth"),
    [
        pytest.param({"accelerate_config": "fsdp2"}, 4, False, id="layers that are alike"),
        # It keeps two layers and the embedding gathered, as large as 6 layers, or as 9 of half the elements.
        pytest.param({"accelerate_config": "zero3", "lora": None}, 2 * 6, False, id="ZeRO-3"),
        pytest.param(
            {"accelerate_config": "zero3", "quantization": {"load_in_4bit": True}}, 2 * 9, False, id="ZeRO-3, 4 bits"
        ),
        pytest.param({"accelerate_config": "fsdp2", "lora": OF_ONE_LAYER}, LAYERS, False, id="an adapter of one layer"),
        pytest.param({"accelerate_config": "fsdp2"}, LAYERS, True, id="a run of its own batches"),
    ],
)
def test_what_only_deep_models_have_is_planned(
    sections: dict[str, Any], alike_from: int, full_depth: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "trace", standing_in(alike_from))
    recipe = least_recipe(**sections)
    strategy = read_strategy(recipe.accelerate_config)
    request = TraceRequest(recipe, CONFIG, strategy, [flat_batch()], 2, 2, False, 0, None, 0)  # type: ignore[list-item]
    found = trace_to_depth(request, tmp_path, full_depth=full_depth).phases["step"]
    assert found.peak.nbytes == found.end_bytes == of_layers(LAYERS, alike_from)
