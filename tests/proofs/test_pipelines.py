"""A pipeline is the same training: curves, checkpoints, resumes and exports of stages, beside one process.

Each launch trains several recipes, because starting its ranks takes ten times as long as six steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from finetune.files import read_lines
from finetune.preflight.gpu_proof.sequence import rewind
from tests.support.cells import ROOT, launch
from tests.support.curve_table import METHODS, TOLERANCE, apart, receipt_of, worst
from tests.support.exports import assert_same_product, assert_the_last_step_exports_alike
from tests.support.one_curve import LENGTHS, STEPS, checkpointed, curve_of, reference, write_curve_recipe
from tests.support.reference import Step
from tests.support.tiny import save_tiny, write_chats

ALONE = {"per_device_batch_size": 1}
PACKED = {"data": {"packing": True, "max_length": 300}, "training": ALONE | {"global_batch_size": 4}}  # four rows
SPLITS: dict[str, dict[str, Any]] = {
    "whole": {"training": {"per_device_batch_size": 2}},  # 1f1b needs as many micro-batches as stages
    "accumulated": {"training": ALONE},
    "packed": PACKED,
    "checkpointed": {"training": ALONE | {"activation_checkpointing": True}},
}
PATIENT = 900  # seconds of a launch: four ranks share two cores, perhaps with other programs
KINDS, SCHEDULES, LAYERS = ("full", "lora"), ("gpipe", "1f1b", "naive"), 4


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four layers; embeddings and head are one tensor, which two stages have, or two."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: save_tiny(folder / name, num_hidden_layers=LAYERS, tie_word_embeddings=name == "tied")
        for name in ("tied", "untied")
    }


@pytest.fixture(scope="module")
def curve(models: dict[str, Path], chats: Path) -> Callable[[str, str], list[Step]]:
    """Of a model and a method, by the independent loop."""
    return cache(lambda model, method: reference(models[model], chats, method))


def assert_a_pipeline_ran(recipe: Path, schedule: str, stages: int) -> None:
    receipt = receipt_of(recipe)
    pipeline = receipt["pipeline"]
    assert (receipt["strategy"], receipt["world_size"], pipeline["schedule"]) == (schedule, stages, schedule)
    assert len(pipeline["layers"]) == stages
    assert [index for first, last in pipeline["layers"] for index in range(first, last + 1)] == list(range(LAYERS))
    assert receipt["sharding"]["held_share"] < 0.75  # the embeddings of a tiny model are half of it


@pytest.mark.parametrize(
    ("model", "method", "split"),
    [("tied", "full", "packed"), pytest.param("untied", "lora", "accumulated", marks=pytest.mark.slow)],
)
def test_gpipe_on_two_ranks(
    model: str,
    method: str,
    split: str,
    curve: Callable[[str, str], list[Step]],
    models: dict[str, Path],
    chats: Path,
    tmp_path: Path,
) -> None:
    """Tied weights in full on packed rows, and adapters on padded ones; both export what was trained."""
    recipe = write_curve_recipe(tmp_path, models[model], chats, method, SPLITS[split], save_steps=STEPS // 2)
    assert launch([recipe], ranks=2, words=["accelerate_config=gpipe"], timeout=PATIENT) == [0]
    assert_a_pipeline_ran(recipe, "gpipe", 2)
    assert worst(curve_of(recipe), curve(model, method)) <= TOLERANCE
    assert_the_last_step_exports_alike(tmp_path / "run", tmp_path / "exported")
    receipt = receipt_of(recipe)
    assert receipt["pipeline"]["shared_tensors"] == (1 if model == "tied" else 0)
    assert receipt["batch"]["width"] == max(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_curve(
    schedule: str,
    stages: int,
    curve: Callable[[str, str], list[Step]],
    models: dict[str, Path],
    chats: Path,
    tmp_path: Path,
) -> None:
    cells = [(model, method, split) for model in models for method in KINDS for split in SPLITS]
    recipes = [
        write_curve_recipe(tmp_path / "-".join(cell), models[cell[0]], chats, cell[1], SPLITS[cell[2]])
        for cell in cells
    ]
    words = [f"accelerate_config={schedule}"]
    assert launch(recipes, ranks=stages, words=words, timeout=PATIENT) == [0] * 16
    apart = {}
    for recipe, (model, method, split) in zip(recipes, cells, strict=True):
        assert_a_pipeline_ran(recipe, schedule, stages)
        apart[model, method, split] = worst(curve_of(recipe), curve(model, method))
    assert {cell: far for cell, far in apart.items() if far > TOLERANCE} == {}


@pytest.mark.slow
def test_number_formats(models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    """16-bit copies of float32 weights, adapters over a 16-bit base, and weights rounded at random, whose update waits
    for the host, each beside its own run in one process and within that method's bounds."""
    names = ("full, bf16", "lora, bf16", "full, pure bf16")
    recipes: dict[str, list[Path]] = {"single": [], "gpipe": []}
    for strategy, written in recipes.items():
        for name in names:
            kind, dtype, changes, *_ = METHODS[name]
            in_16_bits = {"model": {"dtype": dtype}, "training": {"mixed_precision": "bf16"}}
            folder = tmp_path / f"{strategy} {name}"
            written.append(write_curve_recipe(folder, models["tied"], chats, kind, PACKED, in_16_bits, changes))
        ranks, words = 1 if strategy == "single" else 2, [f"accelerate_config={strategy}"]
        assert launch(written, ranks=ranks, words=words, timeout=PATIENT) == [0] * len(names)
    for name, alone, staged in zip(names, *recipes.values(), strict=True):
        found, wanted = curve_of(staged), curve_of(alone)
        loss, norm = (apart([step[which] for step in found], [step[which] for step in wanted]) for which in (0, 1))
        assert loss <= METHODS[name].loss, (name, loss)
        assert norm <= METHODS[name].norm, (name, norm)


@pytest.mark.slow
def test_a_last_step_of_fewer_micro_batches_than_stages(models: dict[str, Path], tmp_path: Path) -> None:
    """Five rows by two make steps of two, two and one, which 1F1B over two stages cannot order."""
    chats = write_chats(tmp_path / "chats.jsonl", LENGTHS[:5])
    training = ALONE | {"max_steps": None, "num_train_epochs": 1, "global_batch_size": 2}
    curves = []
    for strategy, ranks in (("single", 1), ("1f1b", 2)):
        recipe = write_curve_recipe(tmp_path / strategy, models["untied"], chats, "full", training=training)
        assert launch([recipe], ranks=ranks, words=[f"accelerate_config={strategy}"], timeout=PATIENT) == [0]
        curves.append(curve_of(recipe))
    assert len(curves[0]) == 3
    assert worst(curves[1], curves[0]) <= TOLERANCE


@pytest.mark.slow
def test_evaluations_are_those_of_one_process(models: dict[str, Path], tmp_path: Path) -> None:
    """Held-out losses of adapters on packed rows, before training and after every second step."""
    chats = write_chats(tmp_path / "chats.jsonl", [45, 20, 60, 31, 80, 25, 50, 40] * 3)
    data = {"packing": True, "max_length": 128, "eval": {"fraction": 0.3}}
    found = []
    for strategy, ranks in (("single", 1), ("gpipe", 2)):
        training = ALONE | {"global_batch_size": 4}
        recipe = write_curve_recipe(
            tmp_path / strategy, models["tied"], chats, "lora", data=data, training=training, eval_steps=2
        )
        assert launch([recipe], ranks=ranks, words=[f"accelerate_config={strategy}"], timeout=PATIENT) == [0]
        lines = read_lines(tmp_path / strategy / "run" / "metrics.jsonl")
        found.append({line["step"]: line["loss"] for line in lines if line["kind"] == "eval"})
    assert list(found[0]) == list(found[1]) == [0, 2, 4, 6]
    assert list(found[1].values()) == pytest.approx(list(found[0].values()), rel=1e-6)


@pytest.mark.slow
def test_exports_are_those_of_one_process(models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    """The last checkpoint of one process, resumed by stages that have no step left, is exported byte by byte alike."""
    for method in KINDS:
        alone = write_curve_recipe(tmp_path / f"{method} alone", models["tied"], chats, method, PACKED)
        staged = write_curve_recipe(tmp_path / f"{method} staged", models["tied"], chats, method, PACKED)
        assert launch([alone], ranks=1) == [0]
        rewind(alone.parent / "run", staged.parent / "run", STEPS)
        assert launch([staged], ranks=2, words=["accelerate_config=gpipe"], timeout=PATIENT) == [0]
        assert_same_product(staged.parent / "run", alone.parent / "run")


@pytest.mark.slow
@pytest.mark.parametrize("method", KINDS)
def test_resumed(method: str, models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    """From the third step on: on the same stages bitwise, on other ones and in one process to rounding."""
    changes = PACKED | {"save_steps": STEPS // 2, "save_total_limit": 2}
    whole = write_curve_recipe(tmp_path / "whole", models["tied"], chats, method, changes)
    assert launch([whole], ranks=2, words=["accelerate_config=1f1b"], timeout=PATIENT) == [0]
    ways = {"1f1b": 2, "gpipe": 4, "single": 1, "ddp": 2}
    for strategy, ranks in ways.items():
        again = write_curve_recipe(tmp_path / strategy, models["tied"], chats, method, changes)
        rewind(whole.parent / "run", again.parent / "run", STEPS // 2)
        assert launch([again], ranks=ranks, words=[f"accelerate_config={strategy}"], timeout=PATIENT) == [0]
        found, expected = checkpointed(again.parent / "run"), checkpointed(whole.parent / "run")
        assert found.keys() == expected.keys()
        if strategy == "1f1b":
            assert curve_of(again) == curve_of(whole)
            assert all(bool((found[name] == expected[name]).all()) for name in expected)
            assert_same_product(again.parent / "run", whole.parent / "run")
        else:
            assert worst(curve_of(again), curve_of(whole)) <= 1e-5, strategy


@pytest.mark.slow
@pytest.mark.parametrize("ways", ["2:gpipe", "2:1f1b", "2:gpipe,1:single"])
def test_killed_at_random_moments(tmp_path: Path, ways: str) -> None:
    command = [sys.executable, str(ROOT / "tests" / "support" / "soak_resume.py"), "--ways", ways, "--kills", "3"]
    process = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    assert json.loads(process.stdout.splitlines()[-1])["kills"] >= 3
