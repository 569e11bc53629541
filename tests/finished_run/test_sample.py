"""`finetune sample`: the same bytes in every run, rows for the next recipe, and one line for every mistake."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.files import append_lines, read_lines
from finetune.finished_run import sample
from finetune.finished_run.kept_rows import pass_at
from finetune.recipe.loader import load_recipe
from finetune.tokens.dataset import prepare
from finetune.model.build import load_tokenizer
from finetune.training import scored_answers
from tests.support.models.tiny import save_tiny
from tests.support.runs.curve_table import skip_where_missing
from tests.support.runs.sampling import sampled_run

ROOT = Path(__file__).resolve().parents[2]
NEW = ["--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sampled_run(tmp_path_factory.mktemp("made"), base)


def words(run: Path, folder: Path, *more: str) -> list[str]:
    """The command with the run's tasks and scorer; 8 answers to each of 40 prompts."""
    made = run.parent
    own = [] if "--metric" in more or "--scorer" in more else ["--scorer", f"{made / 'check.py'}:score"]
    return ["sample", str(run), "--data", str(made / "tasks.jsonl"), "-o", str(folder), *NEW, *own, *more]


@pytest.fixture(scope="module")
def whole(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed command."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert main(words(run, folder)) == 0
    return folder


def test_forty_prompts_with_eight_answers(base: Path, whole: Path) -> None:
    lines, figures = read_lines(whole / "answers.jsonl"), json.loads((whole / "sample.json").read_text())["figures"]
    assert [len(line["answers"]) for line in lines] == [8] * 40
    right = [sum(len(each["text"]) % 3 == 0 for each in line["answers"]) for line in lines]
    assert right == [sum(each["score"] for each in line["answers"]) for line in lines]
    for k in (1, 2, 4, 8):
        mean = sum(pass_at(each, 8, k) for each in right) / 40
        assert figures["pass_at"][str(k)]["mean"] == pytest.approx(mean, abs=1e-12)
    assert 0.1 < figures["pass_at"]["1"]["mean"] < figures["pass_at"]["8"]["mean"]
    assert all(1 <= each["tokens"] <= 12 for line in lines for each in line["answers"])
    ended = sum(each["ended"] for line in lines for each in line["answers"])
    assert 200 < ended < 320
    assert len({each["text"] for line in lines for each in line["answers"]}) > 250
    rows = read_lines(whole / "rows.jsonl")
    assert len(rows) == figures["rows"] > 20
    assert {row["written_by"] for row in rows} == {f"run, trained from {base.name}"}


def test_stopped_ten_times_and_continued(
    run: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stop comes while a line is written, every second one leaves a torn line."""
    folder, draw, stops, left = tmp_path / "out", random.Random(3), 0, 0

    class Stop(Exception):
        pass

    def stopping(file: Path, rows: list[dict[str, Any]]) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            append_lines(file, rows)
            return
        if stops % 2:
            with file.open("ab") as written:
                written.write((json.dumps(rows[0]) + "\n").encode()[: draw.randint(1, 200)])
        raise Stop

    monkeypatch.setattr(sample, "append_lines", stopping)
    while True:
        left = draw.randint(1, 4)
        try:
            assert main(words(run, folder)) == 0
            break
        except Stop:
            stops += 1
    assert stops >= 10
    for name in ("answers.jsonl", "rows.jsonl", "sample.json", "held_out.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


def test_the_batch_changes_no_byte(run: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less memory for batches, and prompts in groups of seven."""
    monkeypatch.setattr(scored_answers, "BATCH_TOKENS", 300)
    monkeypatch.setattr(sample, "MOST_BATCH_TOKENS", 10**6)
    own = sample._way

    def in_sevens(*arguments: Any) -> Any:
        how, _, author = own(*arguments)
        return how, 7, author

    monkeypatch.setattr(sample, "_way", in_sevens)
    assert main(words(run, tmp_path / "out")) == 0
    assert (tmp_path / "out/answers.jsonl").read_bytes() == (whole / "answers.jsonl").read_bytes()


def test_another_seed_draws_other_answers(run: Path, whole: Path, tmp_path: Path) -> None:
    assert main(words(run, tmp_path / "out", "--seed", "1", "--limit", "4")) == 0
    other, one = (read_lines(folder / "answers.jsonl")[0]["answers"] for folder in (tmp_path / "out", whole))
    assert [each["text"] for each in other] != [each["text"] for each in one]


def test_a_small_top_p_is_greedy(run: Path, tmp_path: Path) -> None:
    assert main(words(run, tmp_path / "p", "--top-p", "1e-9", "--n", "3", "--limit", "4")) == 0
    assert main(words(run, tmp_path / "greedy", "--temperature", "0", "--n", "1", "--limit", "4")) == 0
    for drawn, greedy in zip(
        read_lines(tmp_path / "p/answers.jsonl"), read_lines(tmp_path / "greedy/answers.jsonl"), strict=True
    ):
        assert [each["text"] for each in drawn["answers"]] == [greedy["answers"][0]["text"]] * 3


@pytest.mark.parametrize("keep", ["right", "pairs", "judged", "all"])
def test_the_next_recipe_trains_on_the_rows(run: Path, whole: Path, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another --keep loads no model. The recipe's data are read, and its held-out questions are the run's."""
    monkeypatch.setattr(sample, "models_by_ranks", None)
    assert main(words(run, whole, "--keep", keep)) == 0
    recipe = load_recipe(whole / "recipe.yaml").recipe
    prepared = prepare(recipe, load_tokenizer(recipe))
    assert prepared.facts["documents"] == len(read_lines(whole / "rows.jsonl"))
    author = read_lines(whole / "answers.jsonl")[0]["by"]["model"]
    assert prepared.facts["written_by"] == {author: prepared.facts["documents"]}
    assert recipe.model.adapter == str(run / "adapter")
    assert recipe.eval.generate.file == str(whole / "held_out.jsonl")
    assert len(read_lines(whole / "held_out.jsonl")) == 4  # 0.3 of 12
    assert not Path(recipe.run_dir).exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_write_one_processes_rows(strategy: str, base: Path, tmp_path: Path) -> None:
    skip_where_missing(strategy)
    run = sampled_run(tmp_path / "made", base, accelerate_config=strategy)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    assert main(words(run, tmp_path / "one")) == 0
    command = [sys.executable, str(ROOT / "tests/support/runs/eval_by.py"), "2", *words(run, tmp_path / "two")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("written: ") == 1
    for name in ("answers.jsonl", "rows.jsonl"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


