"""`finetune status URL`, and what job files say about a storage."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.launch.plan import JobOptions, plan_launch
from finetune.launch.script import script
from finetune.storage.backends import FolderStorage
from finetune.storage.journal import Saved, newest_entry, take_lease
from tests.support.runs.faulty_storage import FaultyStorage
from tests.support.runs.hostile_files import KINDS, put_hostile


def stored(tmp_path: Path, state: dict[str, object], *, seconds: float = 0.0, closed: bool = False) -> str:
    """A storage with a run at step 20, whose owner moved its counter `seconds` ago. Returns its address."""
    storage = FaultyStorage(f"file://{tmp_path}/store")
    lease = take_lease(storage, None, lambda _: None)
    lease.stop_renewing()
    facts = {"step": 20, "command": "", "identity": {}, "updated": "2026-11-28T10:00:00+00:00", **state}
    line = {"kind": "train", "step": 20, "loss": 1.5, "tokens": 100, "tokens_per_second": 50.0, "step_seconds": 2.0}
    files = {
        "run_state.json": json.dumps(facts).encode(),
        "metrics.jsonl": (json.dumps(line | {"peak_memory_gib": 1.0}) + "\n").encode(),
        "receipt.json": b'{"batch": {"total_steps": 50}}',
    }
    saved = Saved(20, lease.next_folder, {"state.json": 2})
    sizes = {name: len(content) for name, content in files.items()}
    checkpoint = {"checkpoints/step-00000020/state.json": b"{}"}
    lease.publish({**files, **checkpoint}, [saved], sizes)
    content = {"counter": 1, "closed": closed, "seconds": time.time() - seconds}
    storage.put("lease-00000001.json", json.dumps(content).encode())
    return storage.url


@pytest.mark.parametrize(
    ("state", "seconds", "closed", "word"),
    [
        ({"state": "running"}, 5.0, False, "running"),
        ({"state": "running"}, 3600.0, False, "dead"),
        ({"state": "running"}, 3600.0, True, "running"),  # it said that it ended: no counter is watched
        ({"state": "stopped", "reason": "SIGTERM"}, 3600.0, True, "stopped"),
        ({"state": "finished"}, 3600.0, True, "finished"),
    ],
)
def test_it_reads_the_storage(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    state: dict[str, object],
    seconds: float,
    closed: bool,
    word: str,
) -> None:
    url = stored(tmp_path, state, seconds=seconds, closed=closed)
    assert main(["status", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["run"], found["state"], found["step"], found["total_steps"]) == (True, url, word, 20, 50)
    assert found["checkpoint"] == {"step": 20, "where": f"{url}/00000002/checkpoints/step-00000020"}
    assert (found["loss"], found["tokens_per_second"], found["command"]) == (1.5, 50.0, None)
    assert found["reason"] == state.get("reason") or word in ("dead", "finished")
    assert main(["status", url]) == 0
    assert f"last complete checkpoint: step 20, {url}/00000002" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("file:///nowhere/at/all", "file:///nowhere/at/all: no run is or was here; name a recipe's run.storage"),
        ("s3://bucket", "s3://bucket names a bucket and no place in it for this run; write s3://bucket/PREFIX"),
        ("ftp://x/y", "ftp://x/y is no address of a storage; write s3://"),
        ("s3://b/lr=1e-4", "s3://b/lr=1e-4 holds '='; write letters, digits, and . _ - between slashes"),
        ("s3://b/my run/", "s3://b/my run holds ' '; write letters"),
        ("hf://buckets/me/b/a\nb", "hf://buckets/me/b/a b holds '\\n'; write letters"),
    ],
)
def test_no_run_is_one_line(capsys: pytest.CaptureFixture[str], url: str, line: str) -> None:
    assert main(["status", url]) == 2
    told = capsys.readouterr().err
    assert told.startswith(line)
    assert len(told.strip().splitlines()) == 1


@pytest.mark.parametrize("kind", [*KINDS, "link"])
@pytest.mark.parametrize("name", ["00000003.json", "00000002.json", "lease-00000001.json", "00000002/run_state.json"])
def test_a_hostile_object_is_one_line_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    """A size is looked at before anything is read, and nothing but a plain file is opened."""
    url = stored(tmp_path, {"state": "running"})
    main(["status", "file:///nowhere/at/all"])  # imports torch, for the clock below
    capsys.readouterr()
    began = time.process_time()
    put_hostile(kind, tmp_path / "store" / name)
    code = main(["status", url])
    told = capsys.readouterr().err
    assert time.process_time() - began < 3
    if name.startswith("lease") and kind == "deep":  # a counter that nobody can read is none
        assert code == 0
        return
    assert code in (2, 4)
    assert told.startswith(url)
    assert len(told.splitlines()) == 1


def test_an_owners_name_reaches_no_terminal_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = stored(tmp_path, {"state": "running"})
    file = tmp_path / "store" / "00000002.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"by": "me\x1b]0;mine\x07" + "m" * 500}))
    (tmp_path / "store" / "٠٠٠٠٠٠٠٩.json").write_text("no entry, though its digits are numbers")
    entry = newest_entry(FolderStorage(url))
    assert entry is not None
    assert (entry.number, len(entry.by)) == (2, 120)
    assert entry.by.isprintable()


@pytest.mark.parametrize("change", [{"step": -1}, {"step": 1e999}, {"step": "x"}, {"files": {"state.json": "2"}}])
def test_numbers_that_no_run_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]) -> None:
    url = stored(tmp_path, {"state": "running"})
    file = tmp_path / "store" / "00000002.json"
    value = json.loads(file.read_text())
    value["checkpoints"][0] |= change
    file.write_text(json.dumps(value))
    assert main(["status", url]) == 2
    assert "00000002.json: is not what a run writes (" in capsys.readouterr().err


@pytest.mark.parametrize(
    "seconds", [10**400, -(10**400), 1e999, float("nan"), True], ids=["large", "small", "inf", "nan", "true"]
)
def test_a_counters_time_that_no_owner_writes(tmp_path: Path, seconds: float) -> None:
    url = stored(tmp_path, {"state": "running"})
    (tmp_path / "store" / "lease-00000001.json").write_text(json.dumps({"counter": 1, "seconds": seconds}))
    assert main(["status", url, "--json"]) == 0


SHIPPED = Path("smollm2_1.7b_lora_1x8gb")
IMAGE = JobOptions(image="registry.example/finetune:1.0")


def job_of(on: str, *words: str) -> str:
    return script(plan_launch(SHIPPED, list(words), launcher=on, options=IMAGE), "8h")


def test_job_files_carry_the_credentials_names() -> None:
    """No value of a secret, and the names only where the storage needs them."""
    with_bucket = job_of("hf-jobs", "run.storage=s3://bucket/x")
    assert "--secrets AWS_ACCESS_KEY_ID" in with_bucket
    assert "--secrets AWS_SECRET_ACCESS_KEY" in with_bucket
    on_hub = job_of("hf-jobs", "run.storage=hf://me/devils@steps")
    assert "AWS" not in on_hub
    assert "A job's disk ends with it" not in on_hub
    assert "With run.storage=" in job_of("hf-jobs", "hub.push=true", "hub.repo_id=me/devils")
    assert "name: storage" in job_of("kubeflow", "run.storage=s3://bucket/x")
    for address, package in {"s3": "s3fs, as the Dockerfile's has", "gs": "gcsfs, which", "az": "adlfs, which"}.items():
        for on in ("kubeflow", "hf-jobs"):
            assert package in job_of(on, f"run.storage={address}://bucket/x"), "else the job ends at its start"
    assert "Dockerfile" not in on_hub
    assert "envFrom" not in job_of("kubeflow")


@pytest.mark.parametrize("on", ["kubeflow", "hf-jobs"])
def test_a_folder_of_this_machine_is_refused(on: str) -> None:
    with pytest.raises(Exception, match=r"run\.storage: file:///data/x is a folder of this machine; name a bucket"):
        job_of(on, "run.storage=file:///data/x", "hub.push=true", "hub.repo_id=me/devils")
