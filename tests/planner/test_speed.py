"""The bound of a plan's speed, with layers that are compiled and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.planner.plan_recipe import Plan, plan_recipe
from finetune.planner.roofline import CHIPS, compute_seconds, roofline_json, roofline_lines
from finetune.planner.trace.flops import COPY, FUSED_UPDATE
from finetune.planner.trace.step_work import FUSED_BYTES
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.schema import Recipe
from tests.support.models.tiny import save_tiny
from tests.support.runs.recipes import least_recipe


def planned(recipe: Recipe, gpus: str = "1xH100") -> Plan:
    return plan_recipe(recipe, parse_gpus(gpus))


def recipe(base: Path, **sections: Any) -> Recipe:
    sections.setdefault("training", {"global_batch_size": 3})
    return least_recipe(base, data={"max_length": 512}, **sections)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("speed"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def auto(base: Path) -> Plan:
    return planned(recipe(base))


@pytest.mark.slow
def test_compiled_layers_leave_products_and_attention(base: Path, auto: Plan) -> None:
    off = planned(recipe(base, training={"global_batch_size": 3, "compile": False}))
    compiled, written = roofline_json(auto), roofline_json(off)
    assert (compiled["speed"]["compiled_layers"], written["speed"]["compiled_layers"]) == (True, False)
    assert compiled["arithmetic"] == written["arithmetic"], "both are of the layers as they are written"
    assert compiled["speed"]["uncompiled_tokens_per_second"] == written["speed"]["tokens_per_second"]
    assert written["speed"]["uncompiled_tokens_per_second"] == written["speed"]["tokens_per_second"]
    chip, work = CHIPS["H100"], auto.work
    kept = {op: times for op, times in work.operations.items() if op.kind in ("product", "attention")}
    by_hand = sum(
        times * max(op.flops / (chip.half if op.itemsize == 2 else chip.single), op.nbytes / chip.memory)
        for op, times in kept.items()
        if op.phase != "step"
    )
    update = compute_seconds(off.work, chip, "step")
    assert compiled["speed"]["step_seconds"] == pytest.approx(3 * by_hand + update)
    assert update > 0, "which is not compiled"
    text = "\n".join(roofline_lines(auto, compiled))
    assert f"{written['speed']['tokens_per_second']:,.0f} with training.compile: false" in text
    assert "training.compile" not in "\n".join(roofline_lines(off, written))


@pytest.mark.thorough
def test_a_fused_update_is_one_kernel_that_stands_for_many(base: Path) -> None:
    """With training.compile: false the plan has the update as written: its temporaries, bytes and kernels."""
    training = {"global_batch_size": 3, "pure_bf16": True, "mixed_precision": "bf16"}
    auto = planned(recipe(base, lora=None, training=training))
    off = planned(recipe(base, lora=None, training=training | {"compile": False}))
    fused = {op: times for op, times in auto.work.operations.items() if op.kind == FUSED_UPDATE}
    weights = auto.phases["step"].peak.parts["gradients"] // 2
    assert sum(op.nbytes * times for op, times in fused.items()) == FUSED_BYTES * weights
    assert {op.kind for op in off.work.operations}.isdisjoint({FUSED_UPDATE})

    chip = CHIPS["H100"]
    as_written = compute_seconds(auto.work.as_written(), chip, "step")
    assert as_written == pytest.approx(compute_seconds(off.work, chip, "step"))
    assert compute_seconds(auto.work, chip, "step") < as_written / 10
    copies = sum(times for op, times in auto.work.operations.items() if (op.phase, op.place) == ("step", COPY))
    assert copies == 2 * sum(fused.values()), "of keys and factors"
    assert auto.work.launches("step") - copies == off.work.launches("step")

    temporaries = {name: plan.phases["step"] for name, plan in (("fused", auto), ("written", off))}
    beside = {name: step.peak.parts["other"] - step.end["other"] for name, step in temporaries.items()}
    assert beside["fused"] < 1024
    assert 0 <= beside["written"] - 6 * 4 * 512 * 64 < 1024, "six float32 tensors of the embeddings [512, 64]"


def test_the_host_has_so_long_for_each_operation(auto: Plan) -> None:
    speed, arithmetic = (roofline_json(auto)[key] for key in ("speed", "arithmetic"))
    launches = [arithmetic[f"{phase}_launches"] for phase in ("forward", "backward", "step")]
    whole = 3 * (launches[0] + launches[1]) + launches[2]
    seconds = 3 * 512 / speed["uncompiled_tokens_per_second"]
    assert min(launches) > 10
    assert speed["uncompiled_launch_seconds"] == pytest.approx(seconds / whole)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("sections", "strategy", "gpus"),
    [
        ({"training": {"compile": False}}, "single", "1xH100"),
        ({"training": {"activation_checkpointing": "selective", "compile": "auto"}}, "single", "1xH100"),
        ({"lora": {"r": 4}, "quantization": {"load_in_8bit": True}}, "single", "1xH100"),
        ({}, "zero3", "2xH100"),
    ],
    ids=["switched off", "selective", "int8", "zero3"],
)
def test_where_layers_are_not_compiled_the_bound_counts_all(
    base: Path, sections: dict[str, Any], strategy: str, gpus: str
) -> None:
    found = planned(recipe(base, accelerate_config=strategy, **sections), gpus)
    assert not found.work.compiles
    assert replace(found.work, compiles=True) != found.work


@pytest.mark.slow
def test_sharded_layers_are_compiled(base: Path) -> None:
    assert planned(recipe(base, accelerate_config="fsdp2"), "2xH100").work.compiles


@pytest.mark.thorough
def test_a_plan_for_a_cpu_compiles_nothing(base: Path) -> None:
    found = plan_recipe(recipe(base, training={"mixed_precision": "no"}), None)
    assert not found.work.compiles
    assert roofline_json(found)["speed"] is None
