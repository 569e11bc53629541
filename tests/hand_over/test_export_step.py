"""finetune export: a checkpoint is, byte for byte, what a training that ended there hands over; all verbs read it."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.cli.main import main as cli
from finetune.files import read_lines
from finetune.run_folder.checkpoint import step_folder, write_checkpoint
from finetune.run_folder.tensor_checks import checksums
from finetune.strategies.pieces import Ranks
from finetune.train import main
from tests.support.models.ties import changed_base
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.exports import assert_same_product, contents, product_of
from tests.support.runs.recipes import merged, tiny_lora, write_recipe

LENGTHS = [30, 45, 60, 80, 25, 100, 40, 55, 70, 35, 65, 50]
METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora, head in full": {"lora": {"use_dora": True, "modules_to_save": ["lm_head"]}},
    "orthogonal": {"lora": {"init_lora_weights": "orthogonal"}},
    "qlora": {"quantization": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}},
    "full": {"lora": None},
    "full in bfloat16": {"lora": None, "model": {"dtype": "bfloat16"}},
}


def write(folder: Path, base: Path, *changes: dict[str, Any], steps: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    constant = {"training": {"max_steps": steps, "lr_scheduler_type": "constant"}, "save_total_limit": 9}
    constant["samples"] = {"count": 2, "max_new_tokens": 4}
    content = tiny_lora(base, write_chats(folder / "chats.jsonl", LENGTHS), output_dir=str(folder / "run"))
    return write_recipe(folder, merged(content, constant, {"save_steps": 2, "eval_steps": 2}, *changes))


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", METHODS)
def test_it_is_what_a_shorter_training_hands_over(tmp_path: Path, method: str, tied: bool) -> None:
    if tied and method in ("qlora", "orthogonal", "full in bfloat16"):
        pytest.skip("tied ends meet the others")
    base = save_tiny(tmp_path / "base", tie_word_embeddings=tied)
    long = write(tmp_path / "long", base, METHODS[method], steps=6)
    short = write(tmp_path / "short", base, METHODS[method], steps=4)
    assert main([str(long)]) == main([str(short)]) == 0
    assert cli(["export", str(long.parent / "run"), "--step", "4", "--to", str(tmp_path / "four")]) == 0
    assert_same_product(tmp_path / "four", short.parent / "run")
    weights = "model.safetensors" if method[:4] == "full" else "adapter_model.safetensors"
    assert contents(product_of(tmp_path / "four"))[weights] != contents(product_of(long.parent / "run"))[weights]
    steps = [line["step"] for line in read_lines(tmp_path / "four" / "metrics.jsonl")]
    assert max(steps) == 4
    assert (tmp_path / "four" / "export.json").is_file()
    answers, of_shorter = (read_lines(folder / "samples.jsonl") for folder in (tmp_path / "four", short.parent / "run"))
    assert [line["when"] for line in answers] == ["before"] * 2
    assert answers == of_shorter[:2]


@pytest.mark.slow
def test_a_base_whose_files_say_more_than_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two matrices that config.json ties; without the files nothing says that the head is one of its own."""
    base = changed_base(tmp_path / "base", tied=True)
    long = write(tmp_path / "long", base, METHODS["full"], steps=4)
    assert main([str(long)]) == 0
    export = ["export", str(long.parent / "run"), "--step", "4", "--to", str(tmp_path / "four")]
    assert cli(export) == 0
    assert_same_product(tmp_path / "four", long.parent / "run")
    (base / "model.safetensors").unlink()
    line = said(export, capsys, code=2)
    assert "has a lm_head.weight of its own, which the model of recipe.yaml has not" in line
    assert "fetch them again" in line


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    recipe = write(folder, save_tiny(folder / "base"), steps=6)
    assert main([str(recipe)]) == 0
    return folder / "run"


def said(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    capsys.readouterr()
    assert cli(words) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


@pytest.mark.slow
def test_every_verb_takes_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "eval"}
    figures = json.loads(said(["eval", str(run), "--step", "2", "--json"], capsys))["held_out"]
    assert figures["tuned"]["loss"] == pytest.approx(recorded[2], rel=1e-5)
    assert abs(recorded[2] - recorded[6]) > 1e-3
    assert figures["recorded"] == recorded[2]
    answer = said(["chat", str(run), "--step", "4", "--prompt", "hi", "--max-new-tokens", "2", "--json"], capsys)
    assert [one["who"] for one in json.loads(answer)["answers"]] == ["base", "tuned"]
    facts = json.loads(said(["merge", str(run), "--step", "4", "--verify", "1", "--json"], capsys))
    assert facts["folder"] == str(run / "exports" / "step-00000004" / "merged")
    pushed = json.loads(said(["push", str(run), "me/it", "--step", "4", "--dry-run", "--json"], capsys))
    assert "| optimizer steps | 4 of 6, exported |" in pushed["card"]
    assert f"{recorded[4]:.4f}" in pushed["card"]
    assert f"{recorded[6]:.4f}" not in pushed["card"]
    assert not (run / "merged").exists()


@pytest.mark.slow
def test_an_export_is_made_once_and_again_when_its_checkpoint_is_another(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("exports"))
    step = ["eval", str(copy), "--step", "2", "--json"]
    first = said(step, capsys)
    weights = copy / "exports" / "step-00000002" / "adapter" / "adapter_model.safetensors"
    made = weights.stat().st_ino
    assert said(step, capsys) == first
    assert weights.stat().st_ino == made
    shutil.rmtree(step_folder(copy, 2))
    assert said(step, capsys) == first  # pruned since
    tensors = {name: value + 1 for name, value in load_file(step_folder(run, 4) / "model-00000.safetensors").items()}
    write_checkpoint(copy, 2, {"model": tensors, "optimizer": {}}, {}, keep=9)
    assert said(step, capsys) != first


@pytest.mark.thorough
def test_the_command_after_an_export_is_read_by_a_shell(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my runs" / "$four"
    told = said(["export", str(run), "--step", "4", "--to", str(folder)], capsys)
    assert told.splitlines()[0] == f"exported step 4: {folder}/adapter"
    assert shlex.split(told.rpartition("talk to it: ")[2]) == ["finetune", "chat", str(folder)]
    assert (folder / "report.html").is_file()


def damaged(run: Path) -> None:
    (step_folder(run, 2) / "model-00000.safetensors").write_bytes(b"torn")


def not_finite(run: Path) -> None:
    """As an earlier release could write it: complete, hashed, and not looked at."""
    folder = step_folder(run, 2)
    tensors = load_file(folder / "model-00000.safetensors")
    shutil.rmtree(folder)
    write_checkpoint(run, 2, {"model": tensors, "optimizer": {}}, {}, keep=9)
    first = next(iter(tensors))
    save_file(tensors | {first: torch.full_like(tensors[first], torch.nan)}, folder / "model-00000.safetensors")
    from finetune.run_folder import checkpoint as manifests

    manifest = json.loads((folder / "MANIFEST.json").read_text())
    del manifest["sha256"], manifest["finite"]
    manifest["files"]["model-00000.safetensors"]["sha256"] = manifests.sha256_of(folder / "model-00000.safetensors")
    (folder / "MANIFEST.json").write_text(json.dumps(manifest | {"sha256": manifests.self_hash(manifest)}))


def pruned(run: Path) -> None:
    shutil.rmtree(step_folder(run, 2))


def unchanged(run: Path) -> None:
    """As a run writes it whose steps change no weight, before it is refused at its end."""
    tensors = load_file(step_folder(run, 2) / "model-00000.safetensors")
    shutil.rmtree(step_folder(run, 2))
    state = {"start_checksums": checksums(tensors, Ranks())}
    write_checkpoint(run, 2, {"model": tensors, "optimizer": {}}, state, keep=9)


def foreign(run: Path) -> None:
    (run.parent / "out").mkdir()
    (run.parent / "out" / "thesis.tex").write_text("")


def no_run(run: Path) -> None:
    (run / "recipe.yaml").unlink()


REFUSALS: list[tuple[Callable[[Path], None], str]] = [
    (pruned, "has no checkpoint of step 2; name one of those it has: 4, 6 (save_total_limit"),
    (
        damaged,
        "damaged, not exported: model-00000.safetensors is not the file that was written; name another step: 4, 6",
    ),
    (not_finite, "damaged, not exported: not finite: base_model"),
    (unchanged, "training: its steps changed no bit of the 28 trained tensors, first base_model"),
    (foreign, "is there and is not an earlier export; name another folder: --to FOLDER"),
    (no_run, "not a run folder (recipe.yaml is missing); name a run's output_dir"),
]


@pytest.mark.parametrize(("prepare", "words"), REFUSALS)
def test_what_cannot_be_exported_is_one_line(
    run: Path, tmp_path: Path, prepare: Callable[[Path], None], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("exports"))
    prepare(tmp_path / "run")
    before = contents(tmp_path)
    error = said(["export", str(tmp_path / "run"), "--step", "2", "--to", str(tmp_path / "out")], capsys, code=2)
    assert words in error
    assert len(error.splitlines()) == 1
    assert contents(tmp_path) == before, "nothing is written"
    if prepare is not foreign:
        assert words in said(["chat", str(tmp_path / "run"), "--step", "2", "--prompt", "x"], capsys, code=2)


@pytest.mark.thorough
def test_a_number_that_does_not_fit_the_exports_format_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write(tmp_path, save_tiny(tmp_path / "base"), {"lora": None}, steps=2)
    assert main([str(recipe)]) == 0
    run = tmp_path / "run"
    tensors = load_file(step_folder(run, 2) / "model-00000.safetensors")
    name = sorted(tensors)[0]
    shutil.rmtree(step_folder(run, 2))
    write_checkpoint(run, 2, {"model": tensors | {name: tensors[name] * 0 + 1e6}, "optimizer": {}}, {}, keep=9)
    text = (run / "recipe.yaml").read_text().replace("dtype: float32", "dtype: float16", 1)
    (run / "recipe.yaml").write_text(text)
    assert f"export: not finite in float16: 1 of the weights, first {name}" in said(
        ["export", str(run), "--step", "2"], capsys, code=2
    )
    assert not (run / "exports" / "step-00000002").exists()
