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
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.cells import ROOT, launch
from tests.support.runs.curve_table import METHODS, SHORT, TOLERANCE, apart, receipt_of, worst
from tests.support.runs.exports import assert_same_product, assert_the_last_step_exports_alike
from tests.support.runs.killed import rewind
from tests.support.runs.one_curve import LENGTHS, STEPS, checkpointed, curve_of, reference, write_curve_recipe
from tests.support.runs.reference import Step

ALONE = {"per_device_batch_size": 1}
PACKED = {"data": {"packing": True, "max_length": 300}, "training": ALONE | {"global_batch_size": 4}}  # four rows
SPLITS: dict[str, dict[str, Any]] = {
    "whole": {"training": {"per_device_batch_size": 2}},  # 1f1b needs as many micro-batches as stages
    "accumulated": {"training": ALONE},
    "packed": PACKED,
    "checkpointed": {"training": ALONE | {"activation_checkpointing": True}},
}
PATIENT = 900  # seconds of a launch: four ranks share two cores, perhaps with other programs
KINDS = ("full", "lora")
# Strategy and ranks -> schedule, stages, copies of the pipeline, layers of the model: a run is a layer or two.
WAYS = {(schedule, ranks): (schedule, ranks, 1, 4) for schedule in ("gpipe", "1f1b", "naive") for ranks in (2, 4)}
WAYS |= {("interleaved_1f1b", ranks): ("interleaved_1f1b", ranks, 1, 2 * ranks) for ranks in (2, 4)}
WAYS |= {(f"{schedule}_ddp2", 4): (schedule, 2, 2, 4) for schedule in ("gpipe", "1f1b")}
BESIDE, INTERLEAVED = ("1f1b_ddp2", 4), ("interleaved_1f1b", 2)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


@pytest.fixture(scope="module")
def of_depth(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Path]]:
    """Models of so many layers; embeddings and head are one tensor, which two stages have, or two."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def made(layers: int) -> dict[str, Path]:
        return {
            name: save_tiny(folder / f"{name} {layers}", num_hidden_layers=layers, tie_word_embeddings=name == "tied")
            for name in ("tied", "untied")
        }

    return made


@pytest.fixture(scope="module")
def models(of_depth: Callable[[int], dict[str, Path]]) -> dict[str, Path]:
    return of_depth(4)


@pytest.fixture(scope="module")
def curve(chats: Path) -> Callable[[Path, str], list[Step]]:
    """Of a model and a method, by the independent loop."""
    return cache(lambda model, method: reference(model, chats, method))


def assert_a_pipeline_ran(recipe: Path, strategy: str, ranks: int) -> None:
    receipt = receipt_of(recipe)
    pipeline, (schedule, stages, copies, layers) = receipt["pipeline"], WAYS[strategy, ranks]
    assert (receipt["strategy"], receipt["world_size"]) == (strategy, ranks)
    assert (pipeline["schedule"], pipeline["stages"], pipeline["copies"]) == (schedule, stages, copies)
    assert receipt["batch"]["world_size"] == copies
    assert len(pipeline["layers"]) == (2 * stages if schedule == "interleaved_1f1b" else stages)
    assert [index for first, last in pipeline["layers"] for index in range(first, last + 1)] == list(range(layers))
    assert receipt["sharding"]["held_share"] < 0.75  # the embeddings of a tiny model are half of it


def trained(written: list[Path], strategy: str, ranks: int) -> None:
    """Train them in one launch."""
    words = [f"accelerate_config={strategy}"]
    assert launch(written, ranks=ranks, words=words, timeout=PATIENT) == [0] * len(written)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "method", "split"),
    [("tied", "full", "packed"), pytest.param("untied", "lora", "accumulated", marks=pytest.mark.slow)],
)
def test_gpipe_on_two_ranks(
    model: str,
    method: str,
    split: str,
    curve: Callable[[Path, str], list[Step]],
    models: dict[str, Path],
    chats: Path,
    tmp_path: Path,
) -> None:
    """Tied weights in full on packed rows, and adapters on padded ones; both export what was trained."""
    recipe = write_curve_recipe(tmp_path, models[model], chats, method, SPLITS[split], save_steps=STEPS // 2)
    assert launch([recipe], ranks=2, words=["accelerate_config=gpipe"], timeout=PATIENT) == [0]
    assert_a_pipeline_ran(recipe, "gpipe", 2)
    assert worst(curve_of(recipe), curve(models[model], method)) <= TOLERANCE
    assert_the_last_step_exports_alike(tmp_path / "run", tmp_path / "exported")
    receipt = receipt_of(recipe)
    assert receipt["pipeline"]["shared_tensors"] == (1 if model == "tied" else 0)
    assert receipt["batch"]["width"] == max(LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), WAYS)
def test_one_curve(
    strategy: str,
    ranks: int,
    curve: Callable[[Path, str], list[Step]],
    of_depth: Callable[[int], dict[str, Path]],
    chats: Path,
    tmp_path: Path,
) -> None:
    models = of_depth(WAYS[strategy, ranks][-1])
    cells = [(model, method, split) for model in models for method in KINDS for split in SPLITS]
    recipes = [
        write_curve_recipe(tmp_path / "-".join(cell), models[cell[0]], chats, cell[1], SPLITS[cell[2]])
        for cell in cells
    ]
    trained(recipes, strategy, ranks)
    apart = {}
    for recipe, (model, method, split) in zip(recipes, cells, strict=True):
        assert_a_pipeline_ran(recipe, strategy, ranks)
        apart[model, method, split] = worst(curve_of(recipe), curve(models[model], method))
    assert len(apart) == 16
    assert {cell: far for cell, far in apart.items() if far > TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("gpipe", 2), BESIDE, INTERLEAVED])
def test_number_formats(strategy: str, ranks: int, models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    """16-bit copies of float32 weights, adapters over a 16-bit base and over one in 4 bits, and weights rounded at
    random, whose update waits for the host, each beside its own run in one process and within that method's bounds."""
    names = ("full, bf16", "lora, bf16", "full, pure bf16", "qlora", "qlora, bf16")
    written: list[list[Path]] = []
    for how, processes in (("single", 1), (strategy, ranks)):
        recipes = []
        for name in names:
            kind, dtype, changes, *_ = METHODS[name]
            in_dtype = {"model": {"dtype": dtype}, "training": {"mixed_precision": SHORT[dtype]}}
            folder = tmp_path / f"{how} {name}"
            recipes.append(write_curve_recipe(folder, models["tied"], chats, kind, PACKED, in_dtype, changes))
        trained(recipes, how, processes)
        written.append(recipes)
    for name, alone, staged in zip(names, *written, strict=True):
        found, wanted = curve_of(staged), curve_of(alone)
        loss, norm = (apart([step[which] for step in found], [step[which] for step in wanted]) for which in (0, 1))
        assert loss <= METHODS[name].loss, (name, loss)
        assert norm <= METHODS[name].norm, (name, norm)
        receipt = receipt_of(staged)
        assert sum(receipt["quantized_layers"].values()) == (28 if "qlora" in name else 0)
        assert receipt["sharding"]["held_share"] < 0.75


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "batch", "steps"), [("1f1b", 2, 2, 3), (*INTERLEAVED, 2, 3), (*BESIDE, 4, 2)]
)
def test_a_last_step_of_fewer_micro_batches_than_stages(
    strategy: str, ranks: int, batch: int, steps: int, models: dict[str, Path], tmp_path: Path
) -> None:
    """Five rows: the last step has one, which 1F1B over two stages cannot order; of two pipelines the second has none
    of it, and takes part."""
    chats = write_chats(tmp_path / "chats.jsonl", LENGTHS[:5])
    training = ALONE | {"max_steps": None, "num_train_epochs": 1, "global_batch_size": batch}
    curves = []
    for how, processes in (("single", 1), (strategy, ranks)):
        recipe = write_curve_recipe(tmp_path / how, models["tied"], chats, "full", training=training)
        trained([recipe], how, processes)
        curves.append(curve_of(recipe))
    assert len(curves[0]) == steps
    assert worst(curves[1], curves[0]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("gpipe", 2), BESIDE, INTERLEAVED])
def test_evaluations_are_those_of_one_process(
    strategy: str, ranks: int, models: dict[str, Path], tmp_path: Path
) -> None:
    """Held-out losses of adapters on packed rows, before training and after every second step."""
    chats = write_chats(tmp_path / "chats.jsonl", [45, 20, 60, 31, 80, 25, 50, 40] * 3)
    data = {"packing": True, "max_length": 128, "eval": {"fraction": 0.3}}
    found = []
    for how, processes in (("single", 1), (strategy, ranks)):
        training = ALONE | {"global_batch_size": 4}
        recipe = write_curve_recipe(
            tmp_path / how, models["tied"], chats, "lora", data=data, training=training, eval_steps=2
        )
        trained([recipe], how, processes)
        lines = read_lines(tmp_path / how / "run" / "metrics.jsonl")
        found.append({line["step"]: line["loss"] for line in lines if line["kind"] == "eval"})
    assert list(found[0]) == list(found[1]) == [0, 2, 4, 6]
    assert list(found[1].values()) == pytest.approx(list(found[0].values()), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("gpipe", 2), BESIDE, INTERLEAVED])
def test_exports_are_those_of_one_process(
    strategy: str, ranks: int, models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    """The last checkpoint of one process, resumed by stages that have no step left, is exported byte by byte alike."""
    written: dict[str, list[Path]] = {
        how: [
            write_curve_recipe(tmp_path / f"{method} {how}", models["tied"], chats, method, PACKED) for method in KINDS
        ]
        for how in ("alone", "staged")
    }
    trained(written["alone"], "single", 1)
    for alone, staged in zip(*written.values(), strict=True):
        rewind(alone.parent / "run", staged.parent / "run", STEPS)
    trained(written["staged"], strategy, ranks)
    for alone, staged in zip(*written.values(), strict=True):
        assert_same_product(staged.parent / "run", alone.parent / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("1f1b", 2), BESIDE, INTERLEAVED])
@pytest.mark.parametrize("method", KINDS)
def test_resumed(method: str, strategy: str, ranks: int, models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    """From the third step on: on the same stages bitwise, on other ones and in one process to rounding."""
    changes = PACKED | {"save_steps": STEPS // 2, "save_total_limit": 2}
    whole = write_curve_recipe(tmp_path / "whole", models["tied"], chats, method, changes)
    trained([whole], strategy, ranks)
    for how, processes in ((strategy, ranks), ("gpipe", 4), ("single", 1), ("ddp", 2)):
        again = write_curve_recipe(tmp_path / how, models["tied"], chats, method, changes)
        rewind(whole.parent / "run", again.parent / "run", STEPS // 2)
        trained([again], how, processes)
        found, expected = checkpointed(again.parent / "run"), checkpointed(whole.parent / "run")
        assert found.keys() == expected.keys()
        if how == strategy:
            assert curve_of(again) == curve_of(whole)
            assert all(bool((found[name] == expected[name]).all()) for name in expected)
            assert_same_product(again.parent / "run", whole.parent / "run")
        else:
            assert worst(curve_of(again), curve_of(whole)) <= 1e-5, how


@pytest.mark.slow
@pytest.mark.parametrize("ways", ["2:gpipe", "2:1f1b", "2:gpipe,1:single", "4:1f1b_ddp2", "2:interleaved_1f1b"])
def test_killed_at_random_moments(tmp_path: Path, ways: str) -> None:
    command = [
        sys.executable,
        str(ROOT / "tests" / "support" / "runs" / "soak_resume.py"),
        "--ways",
        ways,
        "--kills",
        "3",
    ]
    process = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    assert json.loads(process.stdout.splitlines()[-1])["kills"] >= 3
