"""`finetune status`: what it says of a run that lives, stalls, died, or ended, while the run writes its folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.errors import EnvironmentMismatch
from finetune.files import append_lines, read_lines, write_json
from finetune.ranks.heartbeat import (
    Heartbeat,
    clear_heartbeats,
    heartbeat_file,
    last_heartbeat,
    record_now,
)
from finetune.run_folder.facts import STATE, saved_steps
from finetune.run_folder.folder import RunIdentity, claim_run_folder, lock_run_folder, mark_failed, mark_run
from finetune.run_folder.status import RunStatus, read_status
from tests.support.models.tiny import write_chats
from tests.support.runs.hostile_files import KINDS, put_hostile
from tests.support.runs.recipes import least, tiny_lora, write_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
# Another process, without torch, has the run's lock and heartbeats of so many ranks, and lives until it is killed.
RUN = """
import json, os, sys, time
from pathlib import Path
from finetune.files import lock
from finetune.ranks.heartbeat import Heartbeat
folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
held = lock(folder / ".lock", wait_seconds=0)
state = json.loads((folder / "run_state.json").read_text())
(folder / "run_state.json").write_text(json.dumps(state | {"process": os.getpid()}))
beats = [Heartbeat(folder, rank, 11) for rank in range(ranks)]
for beat in beats:
    beat.write("running", "training", 7)
print("claimed", flush=True)
time.sleep(600)
"""


@contextmanager
def claimed(folder: Path, ranks: int = 0) -> Iterator[subprocess.Popen[str]]:
    claim_run_folder(
        lock_run_folder(folder), resume="auto", identity=RunIdentity({}), command="finetune train r.yaml"
    ).release()
    if ranks:
        clear_heartbeats(folder)
    words = [sys.executable, "-c", RUN, str(folder), str(ranks)]
    process = subprocess.Popen(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "claimed\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def age(folder: Path, seconds: float, *names: str) -> None:
    """Nothing was written for so long, or these files were not."""
    then = time.time() - seconds
    for path in [*map(folder.joinpath, names)] or [path for path in folder.rglob("*") if path.is_file()]:
        os.utime(path, (then, then))


def train_line(step: int, loss: float, seconds: float = 2.0) -> dict[str, Any]:
    figures = {"tokens": 4000, "step_seconds": seconds, "tokens_per_second": 4000 / seconds, "peak_memory_gib": 1.0}
    return {"kind": "train", "step": step, "loss": loss, **figures}


def checkpoint(folder: Path, step: int, written: int = 10, listed: int = 10) -> Path:
    place = folder / "checkpoints" / f"step-{step:08d}"
    place.mkdir(parents=True)
    (place / "model-00000.safetensors").write_bytes(b"x" * written)
    write_json(place / "MANIFEST.json", {"files": {"model-00000.safetensors": {"bytes": listed}}})
    return place


def test_a_run_that_trains(tmp_path: Path) -> None:
    """Every figure against its own arithmetic."""
    with claimed(tmp_path):
        write_json(tmp_path / "receipt.json", {"batch": {"total_steps": 50}})
        append_lines(
            tmp_path / "metrics.jsonl", [train_line(step, 3 - step / 10, 1 + step % 2) for step in range(1, 31)]
        )
        append_lines(tmp_path / "metrics.jsonl", [{"kind": "eval", "step": 30, "loss": 9.0}])
        checkpoint(tmp_path, 20)
        newest = checkpoint(tmp_path, 28)
        checkpoint(tmp_path, 30, written=9)  # damaged
        found = read_status(tmp_path)
    assert (found.state, found.reason, found.phase, found.command) == ("running", None, None, "finetune train r.yaml")
    assert (found.step, found.total_steps, found.loss) == (30, 50, 0.0)
    assert found.tokens_per_second == 4000
    assert found.seconds_left == 20 * 1.5  # the last 20 lines took 1 and 2 s in turn
    assert found.checkpoint == {"step": 28, "where": str(newest)}
    assert found.silent_seconds is not None
    assert found.silent_seconds < 60
    lines = str(found).splitlines()
    assert lines[0] == f"{tmp_path}: running"
    assert lines[1] == "step 30 of 50, loss 0.0000, 4,000 tokens/s, 30 s left"
    assert lines[2] == f"last complete checkpoint: step 28, {newest}"
    assert len(lines) == 3


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    with claimed(tmp_path):
        append_lines(tmp_path / "metrics.jsonl", [train_line(step, 1 / step) for step in range(1, 5001)])
        whole, last = read_lines(tmp_path / "metrics.jsonl"), read_lines(tmp_path / "metrics.jsonl", 2**18)
        assert 1000 < len(last) < 2500
        assert last == whole[-len(last) :]
        ends = [len(json.dumps(line)) + 1 for line in whole[-2:]]  # bytes of the last two lines
        for size, lines in ((ends[1] - 1, 0), (ends[1], 1), (sum(ends) - 1, 1), (sum(ends), 2)):
            assert read_lines(tmp_path / "metrics.jsonl", size) == whole[len(whole) - lines :]
        assert read_status(tmp_path).loss == 1 / 5000


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_killed_run_is_dead(ranks: int, tmp_path: Path) -> None:
    with claimed(tmp_path, ranks) as process:
        assert read_status(tmp_path).state == "running"
        process.kill()
        process.wait()
        age(tmp_path, 3 * 3600)
        found = read_status(tmp_path)
    assert json.loads((tmp_path / STATE).read_text())["state"] == "running"  # nobody wrote an end
    assert found.state == "dead"
    assert found.reason is not None
    assert found.reason.endswith("3:00:00 after its last sign of life")
    assert str(found).splitlines()[-2:] == ["continue with:", "  finetune train r.yaml"]


def test_a_process_number_that_another_has_now_is_no_life(tmp_path: Path) -> None:
    claim_run_folder(lock_run_folder(tmp_path), resume="auto", identity=RunIdentity({}), command="c").release()
    assert json.loads((tmp_path / STATE).read_text())["process"] == os.getpid()
    assert read_status(tmp_path).state == "dead"


def test_a_process_that_writes_nothing_is_stalled(tmp_path: Path) -> None:
    with claimed(tmp_path):
        write_recipe(tmp_path, least("m/x", timeout_seconds=100))
        append_lines(tmp_path / "metrics.jsonl", [train_line(1, 2.0, seconds=2)])
        age(tmp_path, 90)
        assert read_status(tmp_path).state == "running"
        age(tmp_path, 110)
        found = read_status(tmp_path)
        assert (found.state, found.reason) == ("stalled", "its process lives, and has written nothing for 1:50")
        append_lines(tmp_path / "metrics.jsonl", [train_line(2, 2.0, seconds=30)])
        age(tmp_path, 110)  # less than ten such steps
        assert read_status(tmp_path).state == "running"


def test_a_silent_rank_is_named(tmp_path: Path) -> None:
    with claimed(tmp_path, ranks=3):
        write_recipe(tmp_path, least("m/x", timeout_seconds=100))
        found = read_status(tmp_path)
        assert (found.state, found.phase, found.step) == ("running", "training", 7)
        age(tmp_path, 40, ".ranks/rank-00002.json")
        found = read_status(tmp_path)
    assert found.state == "stalled"
    assert found.reason == f"rank 2 on {os.uname().nodename} shows no sign of life for 40 s"


def test_heartbeats_of_an_earlier_start_do_not_count(tmp_path: Path) -> None:
    with claimed(tmp_path, ranks=2):
        pass
    age(tmp_path, 5000)
    with claimed(tmp_path):
        found = read_status(tmp_path)
    assert (found.state, found.phase, found.step) == ("running", None, 0)


def test_a_machine_whose_locks_do_not_reach_here_lives_by_its_heartbeat(tmp_path: Path) -> None:
    claim_run_folder(lock_run_folder(tmp_path), resume="auto", identity=RunIdentity({}), command="c").release()
    clear_heartbeats(tmp_path)
    Heartbeat(tmp_path, 0, 11).write("running", "training", 5)
    file = heartbeat_file(tmp_path, 0)
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"machine": "another"}))
    assert read_status(tmp_path).state == "running"
    age(tmp_path, 200, ".ranks/rank-00000.json")
    assert read_status(tmp_path).state == "dead"


def test_each_end_has_its_reason(tmp_path: Path) -> None:
    def begin() -> None:
        claim_run_folder(lock_run_folder(tmp_path), resume="auto", identity=RunIdentity({}), command="c").release()

    begin()
    write_json(tmp_path / "receipt.json", {"batch": {"total_steps": 9}})
    mark_failed(tmp_path, EnvironmentMismatch("the disk is full"), phase="save", rank=3, step=4)
    found = read_status(tmp_path)
    assert (found.state, found.phase, found.step) == ("failed", "save", 4)
    assert found.reason == "rank 3: EnvironmentMismatch: the disk is full"
    begin()
    mark_run(tmp_path, "stopped", step=5, reason="run.stop_after: 3h50m")
    found = read_status(tmp_path)
    assert (found.state, found.step, found.reason) == ("stopped", 5, "run.stop_after: 3h50m")
    mark_run(tmp_path, "finished", step=6)
    assert (read_status(tmp_path).state, read_status(tmp_path).reason) == ("finished", "early stopping")
    mark_run(tmp_path, "finished", step=9)
    found = read_status(tmp_path)
    assert (found.state, found.reason, found.silent_seconds, found.seconds_left) == ("finished", None, None, None)


def test_a_start_that_has_only_the_lock(tmp_path: Path) -> None:
    with claimed(tmp_path):
        (tmp_path / STATE).unlink()
        assert read_status(tmp_path).state == "starting"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no run is or was here"),
        ("{", "unreadable"),
        ('{"state": "x\\u001b[2J", "step": 1, "command": "", "identity": {}}', "state is not as a run writes it"),
    ],
)
def test_what_is_no_run_is_one_line(
    content: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / STATE).write_text(content)
    assert main(["status", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert "\x1b" not in line


def test_a_strangers_figures_are_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"state": "failed", "step": 1, "command": "a\x1b[2Jb", "identity": {}, "error": ["\x1b[2J"], "rank": {}}
    (tmp_path / STATE).write_text(json.dumps(state | {"phase": 3, "updated": None, "process": "x"}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(train_line(2, 1.0)).replace("1.0", "1e999") + "\n[]\n{}\n")
    (tmp_path / "receipt.json").write_text('{"batch": {"total_steps": "many"}}')
    (tmp_path / ".ranks").mkdir()
    (tmp_path / ".ranks" / "rank-x.json").write_text("{}")
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    assert main(["status", str(tmp_path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert main(["status", str(tmp_path), "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [STATE, ".lock", "metrics.jsonl", "receipt.json", "recipe.yaml", "rank 0", "rank 1", "manifest"]
)
def test_a_hostile_file_is_no_traceback_and_no_wait(
    kind: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"state": "running", "step": 1, "command": "", "identity": {}}
    (tmp_path / STATE).write_text(json.dumps(state))
    clear_heartbeats(tmp_path)
    heartbeat_file(tmp_path, 0).write_text(json.dumps({"token": 11}))
    place = checkpoint(tmp_path, 4)
    files = {"rank 0": heartbeat_file(tmp_path, 0), "rank 1": heartbeat_file(tmp_path, 1)}
    put_hostile(kind, (files | {"manifest": place / "MANIFEST.json"}).get(name, tmp_path / name))
    began = time.process_time()
    assert main(["status", str(tmp_path), "--json"]) == (2 if name == STATE else 0)
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert time.process_time() - began < 3


def test_large_figures_and_strange_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No number leaves the range of JSON, and no folder's name is taken for a step."""
    (tmp_path / STATE).write_text(json.dumps({"state": "running", "step": 1, "command": "", "identity": {}}))
    lines = [train_line(2, 1.0) | {"step_seconds": 1e308}, train_line(3, 10**400), train_line(4, 0.5)]  # type: ignore[arg-type]
    for line in lines:
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        for total in (100, 10**400):
            write_json(tmp_path / "receipt.json", {"batch": {"total_steps": total}})
            assert main(["status", str(tmp_path), "--json"]) == 0
            json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
            assert main(["status", str(tmp_path)]) == 0
            capsys.readouterr()
    checkpoint(tmp_path, 4)
    for name in ("step-²", "step-٠٠٠٠٠٠٠٩", "step-" + "9" * 30, "step-x"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert saved_steps(tmp_path) == [4]
    write_json(tmp_path / "checkpoints" / "step-00000004" / "MANIFEST.json", {"files": {"a\0b": {"bytes": 1}}})
    assert main(["status", str(tmp_path)]) == 0


@pytest.mark.parametrize("change", [{"phase": []}, {"host": {}}, {"machine": 1}, {"step": 1.5}, {"more": 1}])
def test_a_heartbeat_that_no_rank_wrote_does_not_count(tmp_path: Path, change: dict[str, Any]) -> None:
    clear_heartbeats(tmp_path)
    record = asdict(record_now(1, 11, "running", "training", 7, 1))
    heartbeat_file(tmp_path, 1).write_text(json.dumps(record))
    assert last_heartbeat(tmp_path, 1, 11) is not None
    heartbeat_file(tmp_path, 1).write_text(json.dumps(record | change))
    assert last_heartbeat(tmp_path, 1, 11) is None


def test_the_folder_of_heartbeats_is_emptied_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    (tmp_path / ".ranks").symlink_to("mine")
    clear_heartbeats(tmp_path)
    (tmp_path / ".ranks" / "folder").mkdir()
    clear_heartbeats(tmp_path)
    assert list((tmp_path / ".ranks").iterdir()) == []
    assert (tmp_path / "mine" / "notes").read_text() == "mine"


def test_the_page_explains_each_key() -> None:
    page = (REPOSITORY / "docs" / "elsewhere.md").read_text("utf-8")
    for key in RunStatus.__dataclass_fields__:
        assert f"| `{key}` |" in page, key


@pytest.mark.thorough
def test_no_torch_is_loaded(tmp_path: Path) -> None:
    claim_run_folder(lock_run_folder(tmp_path), resume="auto", identity=RunIdentity({}), command="c").release()
    program = "import sys; from finetune.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    words = [sys.executable, "-c", program, "status", str(tmp_path)]
    process = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert process.stdout.splitlines()[-1] == "False", process.stderr


@pytest.mark.slow
def test_a_run_that_is_written_meanwhile_never_makes_it_fail(tmp_path: Path, tiny_llama: Path) -> None:
    """Asked all the time from before the start, through a stop, its continuation, and a start over."""
    chats = write_chats(tmp_path / "chats.jsonl", [30, 45, 60, 80, 25, 100, 40, 55])
    steps: dict[str, Any] = {"training": {"max_steps": 12}, "eval_steps": 5, "save_steps": 1, "save_total_limit": 1}
    recipe = write_recipe(tmp_path, tiny_lora(tiny_llama, chats, **steps, output_dir=str(tmp_path / "run")))
    seen: list[str] = []

    def until_ended(*words: str, stop_at: int | None = None) -> int:
        command = [sys.executable, "-m", "finetune.train", str(recipe), *words]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        reached, sent = 0, False
        while process.poll() is None:
            time.sleep(0.03)
            if not seen and not (tmp_path / "run" / ".lock").exists():
                continue
            found = read_status(tmp_path / "run")
            if found.state != (seen[-1:] or [""])[0]:
                seen.append(found.state)
            if found.state == "running" and not words:
                assert found.step >= reached
                assert found.checkpoint is None or found.checkpoint["step"] <= found.step
                reached = found.step
            if stop_at is not None and reached >= stop_at and not sent:
                process.send_signal(signal.SIGTERM)
                sent = True
        return process.returncode

    assert until_ended(stop_at=4) == 130
    assert read_status(tmp_path / "run").state == "stopped"
    assert until_ended() == 0
    assert until_ended("training.resume=never") == 0
    found = read_status(tmp_path / "run")
    assert (found.state, found.step, found.total_steps, found.checkpoint and found.checkpoint["step"]) == (
        "finished",
        12,
        12,
        12,
    )
    last = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"][-1]
    assert (found.loss, found.tokens_per_second) == (last["loss"], last["tokens_per_second"])
    assert {"running", "stopped", "finished"} <= set(seen) <= {"starting", "running", "stopped", "finished"}, seen
