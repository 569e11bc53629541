"""`finetune plan --audit`: planned against measured, from the receipts of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main

GIB = 2**30


def write_run(folder: Path, memory: dict[str, Any] | None, lines: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir()
    receipt: dict[str, Any] = {"strategy": "fsdp2", "world_size": 2}
    if memory is not None:
        receipt["memory"] = memory
    (folder / "receipt.json").write_text(json.dumps(receipt))
    if lines is not None:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def memory_of(planned: dict[str, int], measured: dict[str, int]) -> dict[str, Any]:
    return {
        "planned": {"phases": {name: {"peak_bytes": nbytes} for name, nbytes in planned.items()}},
        "why": None,
        "measured": {"phases": {name: {"peak_bytes": nbytes} for name, nbytes in measured.items()}},
    }


def plan_output(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["plan", "--audit", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_errors_are_tabulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exact = memory_of({"load": 90, "forward": 110, "backward": 205, "save": 50}, {"load": 100, "forward": 100})
    metrics = [
        {"kind": "phase", "rank": 0, "phase": "backward", "peak_gib": 200 / GIB},
        {"kind": "phase", "rank": 0, "phase": "backward", "peak_gib": 100 / GIB},
        {"kind": "phase", "rank": 1, "phase": "backward", "peak_gib": 900 / GIB},
        {"kind": "train", "step": 1},
    ]
    one = write_run(tmp_path / "one", exact, metrics)
    other = write_run(tmp_path / "other", memory_of({"step": 99}, {"step": 100}))
    code, out, _ = plan_output([str(one), str(other), "--json"], capsys)
    told = json.loads(out)
    assert code == 0
    found = [(row["phase"], row["measured_bytes"], round(row["error"], 6)) for row in told["rows"]]
    assert found == [("load", 100, -0.1), ("forward", 100, 0.1), ("backward", 200, 0.025), ("step", 100, -0.01)]
    assert told["median_error"] == pytest.approx(0.025)
    assert told["worst_error"] == pytest.approx(0.1), "of loading no error counts"
    code, out, _ = plan_output([str(one), str(other)], capsys)
    assert "+10.000%" in out
    assert out.splitlines()[-1].endswith("of 2 runs: median error 2.500%, worst 10.000%")


def test_runs_without_a_plan_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = write_run(tmp_path / "none", {"planned": None, "why": "zero2 cannot be planned yet", "measured": {}})
    old = write_run(tmp_path / "old", None)
    code, out, _ = plan_output([str(none), str(old)], capsys)
    assert code == 0
    assert f"{none}: not planned: zero2 cannot be planned yet" in out
    assert f"{old}: not planned: its receipt has no memory section" in out


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = plan_output([str(tmp_path)], capsys)
    assert code == 2
    assert err == f"--audit: {tmp_path}: has no receipt.json; name the folder of a run\n"
