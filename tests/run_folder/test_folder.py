"""Who may write in a run's folder, where a run starts, and how its end is recorded."""

from __future__ import annotations

import errno
import json
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.files import append_lines, cache_folder, cut_lines, read_lines
from finetune.measure.environment import environment
from finetune.recipe.schema import Recipe
from finetune.run_folder import folder
from finetune.run_folder.checkpoint import step_folder, write_checkpoint
from finetune.run_folder.facts import missing_steps, read_state
from finetune.run_folder.folder import (
    Claim,
    RunIdentity,
    claim_run_folder,
    curve_identity,
    keys_at_default,
    lock_run_folder,
    mark_failed,
    mark_run,
    mark_step,
    record_base,
)
from tests.support.runs.recipes import half_recipe

IDENTITY = {"training.seed": 42, "training.learning_rate": 2e-4, "lora.r": 16, "data": "abc"}


def claim(run_dir: Path, resume: str = "auto", **changes: Any) -> Claim:
    return claim_run_folder(
        lock_run_folder(run_dir, wait_seconds=0),
        resume=resume,
        identity=RunIdentity(IDENTITY | changes),
        command="python train.py r.yaml",
    )  # type: ignore[arg-type]


def save(run_dir: Path, step: int) -> None:
    append_lines(run_dir / "metrics.jsonl", [{"kind": "train", "step": step, "loss": 1 / step}])
    write_checkpoint(run_dir, step, {"model": {"w": torch.full((3,), float(step))}}, {}, keep=2)


def run(run_dir: Path, *, steps: int, end: str | None = None) -> None:
    """A run that made `steps` checkpoints and then ended, or was killed."""
    claimed = claim(run_dir)
    for step in range(1, steps + 1):
        save(run_dir, step)
    if end == "failed":
        mark_failed(run_dir, RuntimeError("out of memory"), phase="forward", rank=0, step=steps)
    elif end:
        (run_dir / "adapter").mkdir()  # without it a finished run would go on
        mark_run(run_dir, end, step=steps)  # type: ignore[arg-type]
    claimed.release()


# what is there, resume, changed keys -> status, step, what the notes say
DECISIONS: list[tuple[Callable[[Path], object], str, dict[str, Any], str, int | None, str]] = [
    (lambda path: None, "auto", {}, "fresh", None, ""),
    (lambda path: None, "never", {}, "fresh", None, ""),
    (lambda path: path.mkdir(), "auto", {}, "fresh", None, ""),
    (lambda path: run(path, steps=0), "auto", {}, "fresh", None, ""),
    (lambda path: run(path, steps=0), "auto", {"lora.r": 8}, "fresh", None, ""),
    (lambda path: run(path, steps=0, end="failed"), "auto", {"lora.r": 8}, "fresh", None, ""),
    (lambda path: run(path, steps=0), "never", {}, "fresh", None, "previous-1"),
    (lambda path: run(path, steps=2), "auto", {}, "resumed", 2, "resumed from step 2 ("),
    (lambda path: run(path, steps=2, end="stopped"), "auto", {}, "resumed", 2, "step-00000002)"),
    (lambda path: run(path, steps=2, end="failed"), "auto", {}, "resumed", 2, "resumed from step 2 ("),
    (lambda path: run(path, steps=2), "never", {}, "fresh", None, "previous-1"),
    (lambda path: run(path, steps=2), "never", {"lora.r": 8}, "fresh", None, "previous-1"),
    (lambda path: run(path, steps=2, end="finished"), "auto", {}, "finished", 2, ""),
    (lambda path: run(path, steps=2, end="finished"), "never", {}, "fresh", None, "previous-1"),
]


@pytest.mark.parametrize(("prepare", "resume", "changes", "status", "step", "note"), DECISIONS)
def test_where_a_run_starts(
    tmp_path: Path,
    prepare: Callable[[Path], object],
    resume: str,
    changes: dict[str, Any],
    status: str,
    step: int | None,
    note: str,
) -> None:
    run_dir = tmp_path / "runs" / "a"
    run_dir.parent.mkdir()
    prepare(run_dir)
    claimed = claim(run_dir, resume, **changes)
    assert claimed.status == status
    assert (claimed.checkpoint.step if claimed.checkpoint else None) == step
    assert note in "\n".join(claimed.notes)
    assert bool(claimed.notes) == bool(note)
    state = read_state(run_dir)
    assert state is not None
    assert state["state"] == ("finished" if status == "finished" else "running")
    assert state["identity"] == json.loads(json.dumps(IDENTITY | changes))
    assert (claimed.lock is None) == (status == "finished")
    claimed.release()


def damage(run_dir: Path, step: int) -> None:
    (step_folder(run_dir, step) / "model-00000.safetensors").write_bytes(b"")


def foreign(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "thesis.tex").write_text("do not touch")


def unreadable(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "run_state.json").write_text("{")


def all_damaged(run_dir: Path) -> None:
    run(run_dir, steps=2)
    damage(run_dir, 1)
    damage(run_dir, 2)


REFUSALS: list[tuple[Callable[[Path], object], str, dict[str, Any], str]] = [
    (foreign, "auto", {}, r"holds other files \(thesis.tex\)"),
    (foreign, "never", {}, r"holds other files \(thesis.tex\)"),
    (lambda path: path.write_text(""), "auto", {}, "is a file"),
    (unreadable, "auto", {}, "run_state.json: unreadable"),
    (
        all_damaged,
        "auto",
        {},
        r"(?s)step-00000002: damaged.*step-00000001: damaged.*none of its checkpoints is complete",
    ),
    (lambda path: run(path, steps=2), "auto", {"lora.r": 8}, "lora.r: 16 there, 8 now"),
    (lambda path: run(path, steps=2, end="finished"), "auto", {"lora.r": 8}, "lora.r: 16 there, 8 now"),
    (lambda path: run(path, steps=2), "auto", {"data": "xyz"}, "data: abc there, xyz now"),
    (lambda path: run(path, steps=2), "auto", {"new.key": "set"}, r"new.key: \(not set\) there, set now"),
]


@pytest.mark.parametrize(("prepare", "resume", "changes", "words"), REFUSALS)
def test_what_is_refused_stays_as_it_was(
    tmp_path: Path, prepare: Callable[[Path], object], resume: str, changes: dict[str, Any], words: str
) -> None:
    run_dir = tmp_path / "run"
    prepare(run_dir)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(FinetuneError, match=words) as caught:
        claim(run_dir, resume, **changes)
    assert "choose another output_dir" in str(caught.value) or "training.resume=never" in str(caught.value)
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before


def test_the_tables_are_whole() -> None:
    assert len(DECISIONS) + len(REFUSALS) >= 23


def test_a_run_of_the_release_before_goes_on(tmp_path: Path) -> None:
    """It lacks keys that came since, which matter only if they have another value; its data had another address."""
    run_dir = tmp_path / "run"
    run(run_dir, steps=2)

    def again(at_default: set[str], **also: Any) -> Claim:
        return claim_run_folder(
            lock_run_folder(run_dir, wait_seconds=0),
            resume="auto",
            identity=RunIdentity(since, at_default, **also),
            command="x",
        )

    since = IDENTITY | {"data.sheet": None, "model.load_in_fp8": False, "data": "new"}
    newer = {"data.sheet", "model.load_in_fp8"}
    with pytest.raises(FinetuneError, match="holds a run of another recipe:\n  data: abc there, new now\n  set"):
        again(newer)
    with pytest.raises(FinetuneError, match=r"  model.load_in_fp8: \(not set\) there, False now"):
        again({"data.sheet"})
    again(newer, also={"data": ("ab", "abc")}).release()


def test_the_keys_at_their_default() -> None:
    given = recipe()
    at_default = keys_at_default(given)
    assert {"model.load_in_fp8", "training.weight_decay", "data.train[0].split"} <= at_default
    assert not {"model.name_or_path", "data.train[0].path"} & at_default
    changed = recipe(model={"revision": "v2"}, training={"weight_decay": 0.25})
    assert at_default - keys_at_default(changed) == {"model.revision", "training.weight_decay"}


def test_every_difference_is_listed(tmp_path: Path) -> None:
    run(tmp_path / "run", steps=1)
    with pytest.raises(FinetuneError) as caught:
        claim(tmp_path / "run", **{"lora.r": 8, "training.seed": 1})
    assert "training.seed: 42 there, 1 now" in str(caught.value)
    assert "lora.r: 16 there, 8 now" in str(caught.value)
    assert "learning_rate" not in str(caught.value)


def test_a_damaged_newest_checkpoint_is_named_and_the_older_one_used(tmp_path: Path) -> None:
    run(tmp_path, steps=3)
    damage(tmp_path, 3)
    claimed = claim(tmp_path)
    assert claimed.checkpoint is not None
    assert claimed.checkpoint.step == 2
    resumed, damaged = claimed.notes
    assert resumed == f"resumed from step 2 ({step_folder(tmp_path, 2)})"
    assert "step-00000003: damaged, not used: model-00000.safetensors" in damaged
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    claimed.release()


def test_never_moves_run_after_run_aside(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for number in (1, 2, 3):
        claimed = claim(run_dir, "never")
        save(run_dir, number)
        claimed.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.previous-1", "run.previous-2"]
    assert step_folder(tmp_path / "run.previous-1", 1).is_dir()
    assert step_folder(tmp_path / "run.previous-2", 2).is_dir()
    assert not step_folder(run_dir, 2).exists()


def test_leftovers_go_and_metrics_end_at_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, steps=3)
    (tmp_path / "checkpoints" / ".tmp-step-00000004").mkdir()
    (tmp_path / "checkpoints" / ".tmp-step-00000004" / "model-00000.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-77-run_state.json").write_text("{")
    (tmp_path / ".tmp-adapter").mkdir()
    content = (tmp_path / "metrics.jsonl").read_bytes()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"kind":"train","step":4,"loss":1.0}\n{"kind":"train","st')
    claim(tmp_path).release()
    assert not list(tmp_path.rglob(".tmp-*"))
    assert (tmp_path / "metrics.jsonl").read_bytes() == content


def test_samples_after_the_last_step_follow_its_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, steps=2)
    append_lines(tmp_path / "samples.jsonl", [{"when": "before", "step": 0}, {"when": "after", "step": 2}])
    claim(tmp_path).release()
    assert read_lines(tmp_path / "samples.jsonl") == [{"when": "before", "step": 0}]


def test_a_run_without_a_checkpoint_starts_with_empty_metrics(tmp_path: Path) -> None:
    claimed = claim(tmp_path)
    append_lines(tmp_path / "metrics.jsonl", [{"step": 1}])
    claimed.release()
    claim(tmp_path).release()
    assert not (tmp_path / "metrics.jsonl").exists()


HOLD = """
import sys, time
from pathlib import Path
from finetune.run_folder.folder import RunIdentity, claim_run_folder, lock_run_folder
claim_run_folder(lock_run_folder(Path(sys.argv[1])), resume="auto", identity=RunIdentity({}), command="c")
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_another_living_process_is_refused_and_a_killed_one_is_not(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        for resume in ("auto", "never"):
            with pytest.raises(FinetuneError, match=rf"another run is writing here \(process {holder.pid} on "):
                claim(tmp_path, resume)
        holder.kill()
        holder.wait()
        claim(tmp_path, identity={}).release()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_an_unusable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FinetuneError, match="output_dir cannot be used: Not a directory"):
        claim(tmp_path / "file" / "run")


def recipe(**changes: Any) -> Recipe:
    return half_recipe("m", **{"output_dir": "runs/a", **changes})


def test_the_identity_is_what_the_curve_depends_on() -> None:
    base = curve_identity(recipe())
    assert base["training.learning_rate"] == 2e-4
    assert base["data.train[0].path"] == "json"
    # `auto` formats depend on the device, and on a CPU without bf16 kernels they are float32. So name them here.
    formats = {
        "model": {"dtype": base["model.dtype"]},
        "training": {"mixed_precision": base["training.mixed_precision"]},
    }
    free: list[dict[str, Any]] = [
        {"budget": {"gpus": 4, "gpu_memory_gb": 24}, **formats},
        {"accelerate_config": "fsdp2"},
        {"samples": {"count": 0}},
        {"logging_steps": 7},
        {"eval_steps": 7},
        {"save_steps": 7},
        {"save_total_limit": 7},
        {"measure_phases": True},
        {"output_dir": "runs/b"},
        {"training": {"per_device_batch_size": 7}},
        {"training": {"compile": True}},
        {"training": {"non_blocking": False}},
        {"training": {"resume": "never"}},
    ]
    assert [change for change in free if curve_identity(recipe(**change)) != base] == []
    bound: list[dict[str, Any]] = [
        {"model": {"name_or_path": "n"}},
        {"lora": None},
        {"lora": {"r": 8}},
        {"training": {"seed": 1}},
        {"training": {"global_batch_size": 8}},
        {"training": {"max_steps": 8}},
        {"data": {"train": [{"path": "json"}, {"path": "csv"}]}},
    ]
    assert [change for change in bound if curve_identity(recipe(**change)) == base] == []


def test_the_end_is_recorded_with_the_command_that_continues(tmp_path: Path) -> None:
    claimed = claim(tmp_path)
    assert mark_run(tmp_path, "stopped", step=5) == "python train.py r.yaml"
    state = read_state(tmp_path)
    assert state is not None
    assert (state["state"], state["step"], state["command"]) == ("stopped", 5, "python train.py r.yaml")
    claimed.release()


def test_the_first_failure_stays(tmp_path: Path) -> None:
    claimed = claim(tmp_path)
    mark_failed(tmp_path, ValueError("loss is nan"), phase="backward", rank=1, step=7)
    mark_failed(tmp_path, RuntimeError("connection closed by peer"), phase="forward", rank=0, step=6)
    state = read_state(tmp_path)
    assert state is not None
    assert {key: state[key] for key in ("state", "step", "phase", "rank", "error")} == {
        "state": "failed",
        "step": 7,
        "phase": "backward",
        "rank": 1,
        "error": "ValueError: loss is nan",
    }
    claimed.release()


def test_the_step_of_now(tmp_path: Path) -> None:
    claimed = claim(tmp_path)
    mark_step(tmp_path, 3)
    state = read_state(tmp_path)
    assert state is not None
    assert (state["state"], state["step"], state["command"]) == ("running", 3, "python train.py r.yaml")
    assert state["identity"] == IDENTITY
    mark_failed(tmp_path, ValueError("loss is nan"), phase="backward", rank=1, step=7)
    mark_step(tmp_path, 8)
    state = read_state(tmp_path)
    assert state is not None
    assert (state["state"], state["step"], state["rank"]) == ("failed", 7, 1), "a rank's failure stays"
    claimed.release()


def fails_in_another_process(run_dir: Path) -> subprocess.Popen[str]:
    program = (
        "from pathlib import Path; from finetune.run_folder.folder import mark_failed; print('now', flush=True)\n"
        f"mark_failed(Path({str(run_dir)!r}), ValueError('lost'), phase='forward', rank=1, step=1)"
    )
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_failure_of_another_rank_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between the reading of the state and its writing, and waits for the second."""
    claimed = claim(tmp_path)
    reads, others = [], []

    def read_then_fail(run_dir: Path) -> dict[str, Any] | None:
        state = read_state(run_dir)
        if not reads:
            others.append(fails_in_another_process(run_dir))
            assert others[0].stdout is not None
            assert others[0].stdout.readline() == "now\n"
            with suppress(subprocess.TimeoutExpired):
                others[0].wait(1)
        reads.append(state)
        return state

    monkeypatch.setattr(folder, "read_state", read_then_fail)
    mark_step(tmp_path, 2)
    others[0].communicate(timeout=60)
    mark_step(tmp_path, 3)
    state = read_state(tmp_path)
    assert state is not None
    assert (state["state"], state["error"]) == ("failed", "ValueError: lost")
    claimed.release()


def line_of(step: int, steps: int = 1) -> dict[str, Any]:
    """A training line that is the mean of `steps` steps."""
    seconds = 0.1 + 0.01 * (step % 7)
    figures = {"tokens": 517 * steps, "step_seconds": seconds, "tokens_per_second": 517 / seconds}
    return {"kind": "train", "step": step, "loss": 1 / step, **figures}


@pytest.mark.parametrize(
    ("lines", "until", "expected"),
    [
        ([], 0, []),
        ([], 3, [(1, 3)]),
        ([line_of(1), line_of(2), line_of(3)], 3, []),
        ([line_of(1), line_of(4)], 4, [(2, 3)]),
        ([line_of(2), line_of(3)], 3, [(1, 1)]),
        ([line_of(1), line_of(2)], 4, [(3, 4)]),
        ([line_of(10, 10), line_of(20, 10)], 25, []),  # the next line would be that of step 30
        ([line_of(10, 10), line_of(20, 10)], 30, [(21, 30)]),
        ([line_of(10, 10), line_of(30, 10), line_of(31), line_of(32)], 32, [(11, 20)]),  # logging_steps was changed
        ([line_of(10, 10), line_of(40, 10), line_of(60, 10)], 60, [(11, 30), (41, 50)]),
        ([{"kind": "train", "step": 5}, {"kind": "eval", "step": 9}], 5, []),  # a line without the figures
    ],
)
def test_steps_without_a_line(lines: list[dict[str, Any]], until: int, expected: list[tuple[int, int]]) -> None:
    assert missing_steps(lines, until) == expected
    assert missing_steps(lines[::-1], until) == expected


def test_lost_metrics_are_reported_at_a_resume(tmp_path: Path) -> None:
    def resumed(lines: bytes) -> tuple[str, ...]:
        (tmp_path / "metrics.jsonl").write_bytes(lines)
        claimed = claim(tmp_path)
        claimed.release()
        return claimed.notes[1:]

    run(tmp_path, steps=4)
    whole = [json.dumps(line_of(step)).encode() + b"\n" for step in range(1, 6)]
    assert resumed(b"".join(whole)) == ()
    assert resumed(b"".join(whole[:4]) + whole[4][:20]) == (), "a line torn by the crash belongs to a later step"
    place = f"{tmp_path}: metrics.jsonl"
    assert resumed(whole[0] + whole[1][:-9] + b"\n" + whole[2] + whole[3]) == (
        f"{place}: no line for step 2, 1 torn line passed over; the report shows where",
    )
    assert resumed(whole[3]) == (f"{place}: no line for steps 1 to 3; the report shows where",)
    (tmp_path / "metrics.jsonl").unlink()
    assert claim(tmp_path).notes[1:] == (f"{place}: no line for steps 1 to 4; the report shows where",)


def test_the_environment_names_versions_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    facts = environment()
    assert facts["versions"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    text = json.dumps(facts)
    assert "hf_secret" not in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", b""),
        (b'{"step":1}\n{"step":2}\n{"step":3}\n', b'{"step":1}\n{"step":2}\n'),
        (b'{"kind":"phase"}\n{"step":3}\n{"kind":"phase"}\n', b'{"kind":"phase"}\n{"kind":"phase"}\n'),
        (b'{"step":2}\n{"ste', b'{"step":2}\n'),
        (b'{"step":2}\n{"step":2}', b'{"step":2}\n'),
        (b'{"step":1,"t":"\xc3\xa4"}\n{"step":2,"t":"\xc3', b'{"step":1,"t":"\xc3\xa4"}\n'),
        (b'{"step":1}\n\0\0\0\0\0', b'{"step":1}\n'),
        (b'{"step":1}\n[]\n', b'{"step":1}\n'),
        (b'{"step":1}\n{"st\n{"step":2}\n', b'{"step":1}\n{"step":2}\n'),
        (b'{"step":1, "x": 1e-3}\n', b'{"step":1, "x": 1e-3}\n'),
    ],
)
def test_lines_are_cut_bit_for_bit(tmp_path: Path, content: bytes, expected: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    cut_lines(path, 2)
    assert path.read_bytes() == expected


def test_appended_lines_are_whole_and_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [{"step": 1, "loss": 0.1 + 0.2, "text": "ä\n"}])
    append_lines(path, [{"step": 2, "loss": float("nan"), "parts": [float("inf"), 1]}])
    assert path.read_text().count("\n") == 2
    assert read_lines(path) == [
        {"step": 1, "loss": 0.1 + 0.2, "text": "ä\n"},
        {"step": 2, "loss": None, "parts": [None, 1]},
    ]


BEFORE = {
    "model.name_or_path": "m/llama", "model.revision": "main", "base": {"name": "m/llama", "content": "c1"},
    "data.train[0].path": "json", "data.train[0].data_files": "a.jsonl", "data.eval[0].data_files[1]": "e.jsonl",
    "data.train[0].format": "messages", "data fingerprint": "d1",
    "model.adapter": "runs/a/adapter", "adapter fingerprint": "s1",
}  # fmt: skip


class TestMoved:
    """Keys that name a place may change if the content there is equal, with a line for each."""

    def again(self, run_dir: Path, **changes: Any) -> Claim:
        return claim_run_folder(
            lock_run_folder(run_dir, wait_seconds=0),
            resume="auto",
            identity=RunIdentity(BEFORE | changes),
            command="python train.py r.yaml",
        )

    @pytest.fixture
    def there(self, tmp_path: Path) -> Path:
        claimed = self.again(tmp_path / "run")
        save(tmp_path / "run", 2)
        claimed.release()
        return tmp_path / "run"

    @pytest.mark.parametrize(
        "changes",
        [
            {"model.name_or_path": "n/llama", "base": {"name": "n/llama", "content": "c1"}},
            {"model.name_or_path": "acme/llama", "model.revision": "v2", "base": {"content": "c1", "commit": "9"}},
            {"data.train[0].data_files": "other/a.jsonl"},
            {"data.train[0].path": "parquet", "data.eval[0].data_files[1]": "f.jsonl"},
            {"model.adapter": "adapter", "model.adapter_revision": "v1"},
        ],
    )
    def test_equal_content_goes_on_with_a_line_for_each(self, there: Path, changes: dict[str, Any]) -> None:
        claimed = self.again(there, **changes)
        claimed.release()
        assert claimed.status == "resumed"
        told = [note for note in claimed.notes if "its content is the same, so the run goes on" in note]
        assert len(told) == len(changes.keys() - {"base"})
        assert all(key in " ".join(told) for key in changes if key != "base")
        again = self.again(there, **changes)
        again.release()
        assert not [note for note in again.notes if "its content" in note], "told once"

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            (
                {"base": {"name": "m/llama", "content": "c2"}},
                r"another base:\n  base: m/llama .*c1\) there, .*c2",
            ),
            (
                {"model.name_or_path": "n", "base": {"name": "n", "content": "c2"}},
                r"path: m/llama there, n now",
            ),
            (
                {"model.name_or_path": "n", "base": {"name": "n", "content": None}},
                r"path: m/llama there, n now",
            ),
            ({"data.train[0].data_files": "b.jsonl", "data fingerprint": "d2"}, r"data_files: a.jsonl there, b.jsonl"),
            ({"data.train[0].format": "text"}, r"format: messages there, text now"),
            ({"model.adapter": "b", "adapter fingerprint": "s2"}, r"model.adapter: runs/a/adapter there, b now"),
        ],
    )
    def test_other_content_is_refused(self, there: Path, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(FinetuneError, match=words):
            self.again(there, **changes)

    def test_a_run_that_recorded_no_base_goes_on_as_ever(self, there: Path) -> None:
        state = json.loads((there / "run_state.json").read_text())
        del state["identity"]["base"]
        (there / "run_state.json").write_text(json.dumps(state))
        self.again(there).release()

    def test_a_base_that_is_loaded_later_is_recorded(self, there: Path) -> None:
        claimed = self.again(there, base={"commit": "1", "content": None})
        record_base(there, {"commit": "1", "content": "c3"})
        claimed.release()
        self.again(there, base={"commit": None, "content": "c3"}, **{"model.name_or_path": "copy"}).release()


def test_never_keeps_a_link_and_renames_the_folder_behind_it(tmp_path: Path) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "disk" / "real")
    run(link, steps=1)
    claim(link, "never").release()
    assert link.is_symlink()
    assert link.resolve() == tmp_path / "disk" / "real"
    assert step_folder(tmp_path / "disk" / "real.previous-1", 1).is_dir()
    assert not step_folder(link, 1).exists()


def test_a_name_too_long_for_its_suffix_is_one_line(tmp_path: Path) -> None:
    long = tmp_path / ("y" * (os.pathconf(tmp_path, "PC_NAME_MAX") - 7))
    run(long, steps=1)
    with pytest.raises(FinetuneError, match=r"cannot be renamed to .previous-1: File name too long; move it away"):
        claim(long, "never")
    claim(long).release()


@pytest.mark.parametrize("name", [".lock", "run_state.json", "metrics.jsonl", "checkpoints/step-00000001"])
def test_a_file_of_another_user_is_named_with_the_command(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `chown USER run`: the folder may be written, a file in it not."""
    run(tmp_path / "my run", steps=1)
    real, other = os.access, tmp_path / "my run" / name
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != other and real(path, mode))
    monkeypatch.setattr(os, "getuid", lambda: 955)
    owner = other.stat().st_uid
    with pytest.raises(FinetuneError) as caught:
        claim(tmp_path / "my run")
    words = str(caught.value)
    assert f"{name} cannot be written, it belongs to user {owner}" in words
    assert f"chown -R 955 '{tmp_path / 'my run'}'" in words
    assert "choose another" not in words


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME is not set, and the uid has no entry in passwd."""
    for name in ("HOME", "FINETUNE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(EnvironmentMismatch, match=r"no home folder; set HOME .*FINETUNE_CACHE") as caught:
        cache_folder()
    assert caught.value.exit_code == 4
    monkeypatch.setenv("FINETUNE_CACHE", "/somewhere")
    assert cache_folder() == Path("/somewhere")


class TestMounts:
    """A mounted bucket as run folder: each call that it refuses is named, and run.storage with it."""

    @pytest.mark.parametrize(
        ("target", "number", "words"),
        [
            ("os.replace", errno.EPERM, "cannot rename a file (Operation not permitted)"),
            ("os.rename", errno.ENOSYS, "cannot rename a folder (Function not implemented)"),
            ("fcntl.lockf", errno.ENOSYS, "this file system has no locks (Function not implemented)"),
            ("append", errno.EPERM, "cannot append to a file (Operation not permitted)"),
            ("in place", errno.EOPNOTSUPP, "cannot write in place (Operation not supported)"),
        ],
    )
    def test_what_it_cannot_do_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, number: int, words: str
    ) -> None:
        real_open = open

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise OSError(number, os.strerror(number))

        def mounted_open(path: Any, mode: str = "r", **kwargs: Any) -> Any:
            if (target == "append" and "a" in mode) or (target == "in place" and "+" in mode):
                refuse()
            return real_open(path, mode, **kwargs)

        if "." in target:
            monkeypatch.setattr(target, refuse)
        else:
            monkeypatch.setattr("builtins.open", mounted_open)
        with pytest.raises(FinetuneError, match=re.escape(words)) as caught:
            claim_run_folder(
                lock_run_folder(tmp_path / "run", wait_seconds=0), resume="auto", identity=RunIdentity({}), command=""
            )
        monkeypatch.undo()
        assert "run.storage" in str(caught.value)
        assert "\n" not in str(caught.value)
        left = {path.name for path in tmp_path.rglob("*")}
        assert left <= {"run", ".lock"}, "an empty folder if it cannot be locked, else nothing"

    def test_a_disk_leaves_no_trace(self, tmp_path: Path) -> None:
        claim_run_folder(
            lock_run_folder(tmp_path / "run"), resume="auto", identity=RunIdentity({}), command=""
        ).release()
        assert {path.name for path in (tmp_path / "run").iterdir()} <= {".lock", ".state.lock", "run_state.json"}
