"""The closed form is the trace, within 1 %; it needs no torch and no time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.closed_form.constants import CUBLAS_WORKSPACE_HOPPER, ROUNDED_AT_ONCE, loss_chunk_rows, loss_gradient_rows
from finetune.closed_form.estimate import RESERVED, estimate, unsupported
from finetune.closed_form.rank import RankSizes, read_strategy
from finetune.closed_form.shape import shape_of
from finetune.model.known_configs import full_config
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.schema import Data, DataSet, Lora, ModelSection, Quantization, Recipe, Training
from tests.support.memory.closed_form_points import closed, key_of, points, recipe_of, traced

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "closed_form.json"
LARGEST = 0.01
COUNT = 65  # recorded points
SELECTIVE: list[tuple[Any, ...]] = [
    ("meta-llama/Llama-3.1-8B", "lora", ("single", "80GB", 1), 2048, 1, "selective"),
    ("meta-llama/Llama-3.2-1B", "full", ("single", "80GB", 1), 2048, 1, "selective"),
    ("Qwen/Qwen3-4B", "full pure", ("fsdp2", "8x80GB", 1), 2048, 1, "selective"),
    ("meta-llama/Llama-3.1-8B", "qlora", ("single", "80GB", 1), 2048, 1, "selective"),
    ("meta-llama/Llama-3.2-3B", "lora pure", ("ddp", "4x80GB", 1), 2048, 4, "selective"),
]
WEIGHTS = {
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
}


def recipe(model: str = "meta-llama/Llama-3.1-8B", **keys: Any) -> Recipe:
    # bf16, not auto, which asks this machine's processor.
    training = {"activation_checkpointing": False, "mixed_precision": "bf16"} | keys.pop("training", {})
    return Recipe(
        model=ModelSection(name_or_path=model),
        data=Data(train=[DataSet(path="json", data_files="unused.jsonl")], max_length=keys.pop("max_length", 4096)),
        training=Training(**training),
        **keys,
    )


def recorded() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Points and their traces, of benchmarks/closed_form.py, with the closed form computed now."""
    rows = json.loads(RESULTS.read_text("utf-8"))["points"]
    found = [(point, rows.pop(key_of(point)) | closed(point)) for point in points(240) if key_of(point) in rows]
    assert not rows, "of other points"
    assert len(found) >= COUNT
    yield from found


def test_every_recorded_point_agrees_with_its_trace() -> None:
    off = {key_of(point): row["closed_bytes"] / row["traced_bytes"] - 1 for point, row in recorded()}
    assert {key: error for key, error in off.items() if abs(error) > LARGEST} == {}


def test_the_allocators_share_covers_all_its_replays() -> None:
    """No replay holds more than the closed form's upper bound; of every kind of strategy there are ten."""
    replays: Counter[str] = Counter()
    for point, row in recorded():
        beside = row["traced_bytes"] - max(row["traced_peaks"].values())
        held = row["traced_reserved"][1] + beside  # with all the room it asks for
        assert row["traced_upper"] <= held <= row["closed_upper"], key_of(point)
        kind = read_strategy(recipe_of(point)[0].accelerate_config).kind
        assert held / row["closed_bytes"] - 1 <= RESERVED[kind], key_of(point)
        replays[kind] += 1
    assert replays.keys() == RESERVED.keys()
    assert min(replays.values()) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("point", points(240)[:6], ids=key_of)
def test_a_point_traced_now(point: tuple[Any, ...]) -> None:
    assert closed(point)["closed_bytes"] == pytest.approx(traced(point)["traced_bytes"], rel=LARGEST)


@pytest.mark.slow
@pytest.mark.parametrize("point", SELECTIVE, ids=key_of)
def test_selective_recomputation_traced_now(point: tuple[Any, ...]) -> None:
    """The recorded points were drawn before there was any."""
    found, expected = closed(point), traced(point)
    assert found["closed_bytes"] == pytest.approx(expected["traced_bytes"], rel=LARGEST)
    assert expected["traced_upper"] <= found["closed_upper"]


TILED: list[tuple[Any, ...]] = [
    ("meta-llama/Llama-3.1-8B", "qlora", ("single", "80GB", 1), 16384, 1, True),
    ("meta-llama/Llama-3.2-1B", "full", ("single", "80GB", 1), 16384, 1, True),
    ("Qwen/Qwen3-4B", "lora", ("fsdp2", "2x24GB", 1), 8192, 1, 2),
    ("meta-llama/Llama-3.2-1B", "lora", ("ddp", "4x80GB", 1), 8192, 1, False),
]


@pytest.mark.slow
@pytest.mark.parametrize("point", TILED, ids=key_of)
def test_tiles_traced_now(point: tuple[Any, ...]) -> None:
    found, expected = closed(point, tile=2048), traced(point, tile=2048)
    assert found["closed_bytes"] == pytest.approx(expected["traced_bytes"], rel=LARGEST)
    assert expected["traced_upper"] <= found["closed_upper"]


@pytest.mark.parametrize(("method", "whole", "tiled"), [("lora", 459_624, 353_284), ("full pure", 459_432, 353_188)])
def test_bytes_that_each_token_adds(method: str, whole: int, tiled: int) -> None:
    """Of Llama 8B on long rows: hidden states 262,144, attention's tensors, and without tiles the MLP's."""
    point = ("meta-llama/Llama-3.1-8B", method, ("single", "141GB", 1), 1, 1, True)
    for tile, expected in ((None, whole), (4096, tiled)):
        few, more = (
            closed((*point[:3], tokens, *point[4:]), tile=tile)["closed_bytes"] for tokens in (65_536, 131_072)
        )
        assert (more - few) / 65_536 == pytest.approx(expected, rel=1e-4)


KEPT: list[tuple[Any, ...]] = [
    ("meta-llama/Llama-3.2-1B", "full", ("fsdp2", "8x80GB", 1), 2048, 1, True),
    ("meta-llama/Llama-3.2-3B", "full", ("fsdp2", "8x80GB", 1), 2048, 4, 2),
    ("meta-llama/Llama-3.1-8B", "lora", ("fsdp2", "8x80GB", 1), 2048, 1, True),
    ("Qwen/Qwen3-4B", "full pure", ("fsdp2_grad_op", "8x80GB", 1), 2048, 1, False),
    ("meta-llama/Llama-3.2-3B", "full pure", ("hsdp", "8x80GB", 2), 512, 4, True),
]


@pytest.mark.slow
@pytest.mark.parametrize("point", KEPT, ids=key_of)
def test_gradients_that_are_reduced_once_traced_now(point: tuple[Any, ...]) -> None:
    found, expected = closed(point, keeps_gradients=True), traced(point, keeps_gradients=True)
    assert found["closed_bytes"] == pytest.approx(expected["traced_bytes"], rel=LARGEST)
    assert expected["traced_upper"] <= found["closed_upper"]
    each = closed(point)
    assert each["closed_bytes"] < found["closed_bytes"]


@pytest.mark.parametrize("model", WEIGHTS)
def test_published_numbers_of_weights(model: str) -> None:
    assert shape_of(recipe(model), full_config(model)[0]).total_weights == WEIGHTS[model]


def test_adapters_as_peft_counts_them() -> None:
    job = recipe()
    shape = shape_of(job, full_config(job.model.name_or_path)[0])
    assert shape.adapter_weights * shape.layers == 41_943_040
    only = recipe(lora=Lora(target_modules=["q_proj", "v_proj"]))
    assert {name: x.rank for name, x in shape_of(only, full_config(only.model.name_or_path)[0]).linears.items()} == {
        "q": 16, "k": 0, "v": 16, "o": 0, "gate": 0, "up": 0, "down": 0,
    }  # fmt: skip


def test_what_a_layer_leaves_for_backward() -> None:
    """In bfloat16 throughout: T (8h + 4q + 4kv + 4n + 6f + 8) bytes, as can be counted by hand."""
    job = recipe(lora=None, training={"pure_bf16": True})
    h, q, kv, heads, inner, tokens = 4096, 4096, 1024, 32, 14336, 4096
    rank = RankSizes(job, full_config(job.model.name_or_path)[0], parse_gpus("80GB"))
    assert rank.saved_by_layers(1)[0] == tokens * (8 * h + 4 * q + 4 * kv + 4 * heads + 6 * inner + 8)


@pytest.mark.parametrize("adapters", [False, True])
def test_what_a_layer_keeps_under_selective_recomputation(adapters: bool) -> None:
    """Of 8B: q, k, v, attention's output, o, gate and up in bfloat16, log-sums in float32; seven x A^T of rank 16."""
    keys: dict[str, Any] = {"lora": Lora()} if adapters else {"lora": None}
    found = {}
    for setting in (False, "selective", True):
        job = recipe(training={"pure_bf16": True, "activation_checkpointing": setting}, **keys)
        rank = RankSizes(job, full_config(job.model.name_or_path)[0], parse_gpus("80GB"))
        found[setting] = rank.kept_layer_bytes, rank.saved_by_layers(32)[0]
    h, q, k, heads, inner, tokens = 4096, 4096, 1024, 32, 14336, 4096
    kept = tokens * (2 * (2 * q + 2 * k + h + 2 * inner + 7 * 16 * adapters) + 4 * heads)
    assert {setting: each for setting, (each, _) in found.items()} == {False: 0, "selective": kept, True: 0}
    assert found["selective"][1] - found[True][1] == 32 * kept
    assert found[True][1] == 32 * 2 * tokens * h


def test_components_and_phases_are_the_plans_own() -> None:
    from finetune.closed_form.constants import COMPONENTS

    job = recipe(quantization=Quantization(load_in_4bit=True))
    found = estimate(job, full_config(job.model.name_or_path)[0], parse_gpus("24GB"))
    assert list(found.phases) == ["load", "forward", "backward", "step", "save"]
    assert {part for parts in found.phases.values() for part in parts} <= set(COMPONENTS)
    assert all(size > 0 for parts in found.phases.values() for size in parts.values())


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"training": {"mixed_precision": "no"}}, "mixed_precision"),
        ({"training": {"optim": "adamw_8bit"}}, "optim"),
        ({"lora": Lora(use_dora=True)}, "DoRA"),
        ({"accelerate_config": "zero3"}, "zero3"),
    ],
)
def test_what_has_no_closed_form_says_so(keys: dict[str, Any], reason: str) -> None:
    job = recipe(**keys)
    assert reason in (unsupported(job, full_config(job.model.name_or_path)[0], parse_gpus("24GB")) or "")


def test_it_takes_no_time() -> None:
    job, gpus = recipe("meta-llama/Llama-3.1-405B", accelerate_config="fsdp2", lora=None), parse_gpus("H100:8", 64)
    config = full_config(job.model.name_or_path)[0]
    begun = time.process_time()
    for _ in range(5):
        estimate(job, config, gpus)
    assert (time.process_time() - begun) / 5 < 0.05


def test_the_loss_takes_chunks_of_the_size_that_is_planned() -> None:
    from finetune.architecture.loss import chunk_rows, gradient_rows

    for vocabulary in (*range(1, 400_000, 997), 128_256, 151_936, 262_144, 262_208):
        assert loss_chunk_rows(vocabulary) == chunk_rows(vocabulary)
        for hidden in (64, 576, 2048, 4096, 8192):
            assert loss_gradient_rows(vocabulary, hidden) == gradient_rows(vocabulary, hidden)


def test_an_update_in_bfloat16_holds_what_is_planned() -> None:
    """Of the embeddings [128256, 4096], in chunks; nothing where it is one kernel, where masters are
    float32 or adapters are trained.
    """
    from finetune.model.optimizers.rounded_adamw import ROUNDED_CHUNK

    assert ROUNDED_AT_ONCE == ROUNDED_CHUNK
    for keys, expected in (
        ({"lora": None, "training": {"pure_bf16": True}}, 0),
        ({"lora": None, "training": {"pure_bf16": True, "compile": False}}, 24 * ROUNDED_CHUNK),
        ({"lora": None}, 0),
        ({"training": {"pure_bf16": True, "compile": False}}, 0),
    ):
        job = recipe(**keys)  # type: ignore[arg-type]
        found = estimate(job, full_config(job.model.name_or_path)[0], parse_gpus("80GB"))
        workspaces = 2 * CUBLAS_WORKSPACE_HOPPER  # of the threads of forward and backward
        assert found.phases["step"]["other"] == workspaces + expected


@pytest.mark.thorough
def test_it_needs_no_torch() -> None:
    code = "import sys; from finetune.planner import candidates, remedies\n"
    code += "print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "set()", done.stderr
