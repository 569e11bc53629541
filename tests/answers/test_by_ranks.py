"""Eval by several ranks: the answers, scores and losses of one process, and one line where memory runs out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.cli.main import main
from finetune.errors import DoesNotFit, FinetuneError
from finetune.files import read_lines, write_json
from finetune.finished_run import finished_run as load_run
from finetune.finished_run import fitting
from finetune.strategies.pieces import Ranks
from finetune.untrusted.json_files import read_object
from tests.support.models.tiny import save_tiny
from tests.support.runs.curve_table import skip_where_missing
from tests.support.runs.finished import finished_run
from tests.support.runs.one_rank_without_memory import FULL

ROOT = Path(__file__).resolve().parents[2]
CASES = [
    ("fsdp2", {"r": 4}, 2),
    ("ddp", {"r": 4}, 2),
    ("single", None, 2),
    ("fsdp2", None, 4),
    ("zero3", {"r": 4}, 2),
    ("zero3", None, 2),
    ("gpipe", None, 2),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose answers end at different tokens: every eighth token is an end."""
    folder = save_tiny(tmp_path_factory.mktemp("base"), num_hidden_layers=4)
    vocabulary = read_object(folder / "config.json")["vocab_size"]
    write_json(folder / "generation_config.json", {"eos_token_id": list(range(3, vocabulary, 8))})
    return folder


@pytest.mark.parametrize("found", [{"left": [3]}, None, FinetuneError("rank 0 has no disk")])
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_decides_for_every_rank(rank: int, found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 acts never, and has rank 0's result or its mistake."""
    acted, sent = list[int](), list[Any]()

    def act() -> Any:
        acted.append(rank)
        if isinstance(found, FinetuneError):
            raise found
        return found

    def gather(own: Any) -> list[Any]:
        sent.append(own)
        return [found, "rank 1's own"]

    monkeypatch.setattr(Ranks, "gather", lambda _, own: gather(own))
    with pytest.raises(FinetuneError, match="no disk") if isinstance(found, FinetuneError) else nullcontext():
        assert Ranks(rank, 2).rank_0_first(act) == found
    assert (acted, sent) == (([0], [found]) if rank == 0 else ([], [None]))


def made(folder: Path, base: Path, strategy: str, lora: dict[str, Any] | None) -> Path:
    run = finished_run(folder, base, move=0.3, lora=lora, accelerate_config=strategy)
    share_batches(run, True)
    return run


def share_batches(run: Path, share: bool) -> None:
    """Whether the run's probe lets prompts share left-padded batches."""
    write_json(run / "receipt.json", {"probe": {"padding": {"same": share}}})


def evaluated(run: Path, words: list[str], code: int = 0) -> tuple[dict[str, Any], list[Any], str]:
    """eval.json and the answers of `python WORDS eval RUN`, and what was printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    asked = ["eval", str(run), "--max-new-tokens", "8", "--metric", "exact", "--metric", "chrf"]
    done = subprocess.run(
        [sys.executable, *words, *asked], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        return {}, [], done.stderr
    return json.loads((run / "eval.json").read_text("utf-8")), read_lines(run / "eval_answers.jsonl"), done.stdout


VERB, TORCHRUN = ["-m", "finetune.cli.main"], ["-m", "torch.distributed.run", "--nproc-per-node"]


def same_as_alone(run: Path, words: list[str], tmp_path: Path) -> str:
    """The ranks' results are those of one process that answers one prompt at a time. Returns what they printed."""
    share_batches(run, False)
    alone, answers, _ = evaluated(run, VERB)
    share_batches(run, True)
    found, theirs, printed = evaluated(run, words)
    assert [(row["base"], row["tuned"]) for row in theirs] == [(row["base"], row["tuned"]) for row in answers]
    assert any(row["base"] != row["tuned"] for row in answers)
    cut = [who in row.get("cut", {}) for row in answers for who in ("base", "tuned")]
    assert {*cut} == {True, False}, "all rows end at once, or none"
    assert found["scores"] == alone["scores"]
    for which in ("base", "tuned"):
        assert found["held_out"][which]["loss"] == pytest.approx(alone["held_out"][which]["loss"], rel=1e-6)
    assert found["held_out"]["base"] != found["held_out"]["tuned"]
    return printed


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "lora", "ranks"), CASES)
def test_ranks_answer_as_one_process(
    strategy: str, lora: dict[str, Any] | None, ranks: int, base: Path, tmp_path: Path
) -> None:
    skip_where_missing(strategy)
    run = made(tmp_path / "made", base, strategy, lora)
    same_as_alone(run, [str(ROOT / "tests/support/runs/eval_by.py"), str(ranks)], tmp_path)


@pytest.mark.slow
def test_started_by_torchrun(base: Path, tmp_path: Path) -> None:
    run = made(tmp_path / "made", base, "fsdp2", {"r": 4})
    same_as_alone(run, [*TORCHRUN, "2", *VERB], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_a_rank_without_memory_answers_in_smaller_batches(
    strategy: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has all four rows in one batch; under FSDP2 rank 1 gathers with it until the batch has ended."""
    monkeypatch.setenv(FULL, "0 1")
    run = made(tmp_path / "made", base, strategy, None)
    program = str(ROOT / "tests/support/runs/one_rank_without_memory.py")
    printed = same_as_alone(run, [*TORCHRUN, "2", program], tmp_path)
    assert printed.count("tokens does not fit; they go on with") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "full"), [("zero3", "0 1"), ("zero3", "1 0"), ("fsdp2", "1 0"), ("ddp", "0 0")])
def test_a_rank_without_memory_ends_all_ranks_in_one_line(
    strategy: str, full: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeRO-3 cannot go on inside a layer, nobody without memory for one row."""
    skip_where_missing(strategy)
    monkeypatch.setenv(FULL, full)
    run = made(tmp_path / "made", base, strategy, None)
    program = str(ROOT / "tests/support/runs/one_rank_without_memory.py")
    printed = evaluated(run, [str(ROOT / "tests/support/runs/eval_by.py"), "2", program], code=3)[2]
    lines = [line for line in printed.splitlines() if "does not fit" in line]
    assert len(lines) == 1, printed
    assert "Traceback" not in printed
    assert not (run / "eval.json").exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--processes", "99"], "--processes: 99 is more than the"),
        (["--processes", "2", "--tasks", "x"], "--tasks: is asked by one process; leave --processes out"),
        (
            ["--processes", "2", "--endpoint", "http://x/v1"],
            "--endpoint: is asked by one process; leave --processes out",
        ),
    ],
)
def test_refused_before_any_rank_starts(
    words: list[str], message: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "made", base, "fsdp2", {"r": 4})
    assert main(["eval", str(run), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["eval", "sample"])
def test_a_server_is_not_asked_by_several_ranks(
    verb: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(tmp_path / "made", base, "fsdp2", {"r": 4})
    (rows := tmp_path / "prompts.jsonl").write_text('{"prompt": "one", "completion": "two"}\n', "utf-8")
    monkeypatch.setattr("finetune.launch.local_ranks.is_rank_already", lambda: True)
    monkeypatch.setattr("finetune.train.set_up_process", lambda recipe: SimpleNamespace(world_size=2, is_main=True))
    options = ["--endpoint", "http://localhost:1/v1", *(["--data", str(rows)] if verb == "sample" else [])]
    assert main([verb, str(run), *options]) == 2
    assert capsys.readouterr().err.endswith("--endpoint: is asked by one process; 2 were started\n")


@pytest.mark.parametrize(("strategy", "names"), [("fsdp2", True), ("gpipe", True), ("single", False)])
def test_a_model_that_does_not_fit_names_the_command(strategy: str, names: bool, base: Path, tmp_path: Path) -> None:
    run = load_run(made(tmp_path / "made", base, strategy, None))
    line = "the model does not fit into the memory of cpu; "
    with pytest.raises(DoesNotFit, match=line) as caught, fitting(torch.device("cpu"), run):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert ("--processes 2 spreads it over GPUs" in str(caught.value)) is names
    assert "--endpoint URL asks a server" in str(caught.value)
