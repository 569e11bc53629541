"""Records name their code, and docs/measured.md says which are of other code than this."""

from __future__ import annotations

import datetime
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records, skills

NAMES = sorted(file.stem for file in records.RESULTS.glob("*.json"))


def test_the_page_says_which_records_are_of_other_code() -> None:
    assert records.on_page(records.PAGE.read_text("utf-8")) == records.table(), "run python benchmarks/records.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_record_names_its_code_and_the_files_are_there(name: str) -> None:
    content = records.record(name)
    assert set(content) >= {"date", "commit", "files_sha256", "device"}
    assert re.fullmatch(r"[0-9a-f]{64}", content["files_sha256"])
    assert all((records.ROOT / path).exists() for path in records.DEPENDS[name])


def test_no_record_lacks_its_files() -> None:
    assert sorted(name for name in records.DEPENDS if name in NAMES) == NAMES
    assert len(NAMES) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_the_digest_is_that_of_its_commit(name: str) -> None:
    content = records.record(name)
    commit, changed, _ = content["commit"].partition(" and changes")
    if changed or commit == "not recorded":
        return
    try:
        records.git("cat-file", "-e", f"{commit}^{{commit}}")
    except Exception:
        pytest.skip("this checkout lacks the commit")
    # A folder that has come since is no part of the record.
    assert content["files_sha256"] == records.digest_at(name, commit)


def test_a_changed_file_changes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, folder in {"ROOT": tmp_path, "RESULTS": tmp_path}.items():
        monkeypatch.setattr(records, name, folder)
    monkeypatch.setattr(records, "DEPENDS", {"speed": ("code",)})
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "step.py").write_text("x = 1\n")
    (tmp_path / "speed.json").write_text(
        json.dumps({**records.stamp("speed", {}), "date": "2026-11-29", "device": "a card"})
    )
    assert records.table().endswith("| `speed` | not recorded | 2026-11-29 | a card | no |\n")
    for name, text in (("step.py", "x = 2\n"), ("other.py", "x = 1\n")):
        (tmp_path / "code" / name).write_text(text)
        assert records.has_changed("speed")
    (tmp_path / "code" / "other.py").unlink()
    (tmp_path / "code" / "step.py").write_text("x = 1\n")
    assert not records.has_changed("speed")
    # A row of an earlier call keeps that call's stamp; new rows, or none, have a stamp of their own.
    first = {**records.stamp("speed", {}), "device": "a card", "rows": {"a": {"seconds": 1.5}, "b": {}}}
    (tmp_path / "speed.json").write_text(json.dumps(first | {"date": "2025-01-01"}))
    for rows, date in (({"a": {"seconds": 1.5}, "c": {"x": 1}}, "2025-01-01"), ({"a": {"seconds": 1.6}, "b": {}}, "")):
        stamp = records.stamp("speed", {"rows": rows})
        assert (stamp["date"] == date) == bool(date)
        assert stamp["files_sha256"] == first["files_sha256"]
    monkeypatch.undo()
    # git's digest of a commit and this folder's are one, where nothing has changed.
    if not records.git("status", "--porcelain", "--", *records.DEPENDS["tokenise"]):
        assert records.digest_at("tokenise", "HEAD") == records.digest_now("tokenise")


LORA_8B, LORA_1B, FULL_8B = "llama3_8b_lora_1x80gb", "llama3_1b_lora_1x8gb", "llama3_8b_full_1x80gb"
GIB = 2**-30
# Page -> a pattern with the number, its record and key, and by what the record's value is multiplied.
FIGURES = [
    ("README.md", r"LoRA ([\d.]+) GiB planned and", f"gpu/steps/{LORA_8B}/phases/forward/planned_bytes", GIB),
    ("README.md", r"LoRA ([\d.]+) GiB planned and", f"gpu/steps/{LORA_8B}/peak_memory_gib", 1),
    ("README.md", r"1B LoRA planned at ([\d.]+) GiB", f"gpu/steps/{LORA_1B}/phases/forward/planned_bytes", GIB),
    ("README.md", r"GiB took ([\d.]+) \|", f"gpu/steps/{LORA_1B}/peak_memory_gib", 1),
    ("README.md", r"8B at ([\d,]+) tokens/s", f"gpu/steps/{LORA_8B}/tokens_per_second", 1),
    ("README.md", r"over (\w+) steps", f"gpu/steps/{LORA_8B}/steps_timed", 1),
    ("README.md", r"weights at ([\d,]+) tokens/s", f"gpu_h100/steps/{FULL_8B}/tokens_per_second", 1),
    ("docs/measured.md", r"held-out loss ([\d.]+) to", "quickstart/runs/avx512/losses/0", 1),
    ("docs/measured.md", r"to ([\d.]+) in 60 steps", "quickstart/runs/avx512/losses/60", 1),
    ("docs/measured.md", r"AVX-512: (\d+) s from a fresh", "quickstart/runs/avx512/wall_seconds", 1),
    ("docs/measured.md", r"clone, (\d+) CPU seconds", "quickstart/runs/avx512/cpu_seconds", 1),
    ("docs/measured.md", r"(\d+) install", "quickstart/runs/avx512/phases/setup/cpu", 1),
    ("docs/measured.md", r"(\d+) convert", "quickstart/runs/avx512/phases/model and data/cpu", 1),
    ("docs/measured.md", r"(\d+) steps, 28", "quickstart/runs/avx512/phases/training/cpu", 1),
    ("docs/measured.md", r"install: (\d+) s,", "quickstart/runs/avx2, without setup/wall_seconds", 1),
    ("docs/measured.md", r"(\d+) CPU seconds, 103", "quickstart/runs/avx2, without setup/cpu_seconds", 1),
    ("docs/measured.md", r"seconds, (\d+) in steps", "quickstart/runs/avx2, without setup/phases/training/cpu", 1),
    ("README.md", r"(\d+) seconds on two quiet", "quickstart/runs/avx512/wall_seconds", 1),
    ("README.md", r"\n(\d+) seconds after the install", "quickstart/runs/avx2, without setup/wall_seconds", 1),
    ("docs/measured.md", r"recomputed: ([\d.]+) times TRL's", "throughput/ours_over/trl_packed_kept", 1),
    ("docs/measured.md", r"([\d.]+) times transformers' Trainer", "throughput/ours_over/trainer", 1),
    ("docs/measured.md", r"([\d.]+) times TRL packed", "throughput/ours_over/trl_packed", 1),
    ("docs/measured.md", r"([\d.]+) times its defaults", "throughput/ours_over/trl", 1),
    ("docs/measured.md", r"(\d+) % of the bf16 peak", "throughput/ours_share_of_peak", 100),
    ("docs/measured.md", r"\(([\d.]+) times\)", "throughput/ours_compiled_over/ours", 1),
    ("docs/measured.md", r"([\d,]+) tokens per CPU second", "tokenise/runs/-1/tokens_per_cpu_second", 1),
    ("docs/measured.md", r"([\d.]+) times linear growth", "tokenise/growth_over_linear", 1),
    ("docs/measured.md", r"growth from 4,000 to 16,000 chats, (\d+) MB", "tokenise/runs/-1/peak_growth_bytes", 1e-6),
    ("docs/measured.md", r"(\d+) kills under", "soak/totals/kills", 1),
    ("docs/measured.md", r"(\d+) before the last step", "soak/totals/before_the_last_step", 1),
    ("docs/measured.md", r"(\d+) within a save", "soak/totals/in_a_save", 1),
    ("docs/measured.md", r"median (\d+) s of wall time", "rehearse/recipes/*/seconds/median", 1),
    ("docs/measured.md", r"the longest (\d+) s", "rehearse/recipes/*/seconds/max", 1),
    ("docs/what_to_run.md", r"median (\d+) s \(", "rehearse/recipes/*/seconds/median", 1),
    ("docs/what_to_run.md", r"26 to (\d+) \| no", "rehearse/recipes/*/seconds/max", 1),
    ("docs/measured.md", r"tokens ([\d,]+) tokens/s, peak", f"gpu/steps/{LORA_8B}/tokens_per_second", 1),
    ("docs/measured.md", r"peak ([\d.]+) GiB as planned", f"gpu/steps/{LORA_8B}/peak_memory_gib", 1),
    ("docs/measured.md", r"planned at ([\d.]+) GiB", f"gpu/steps/{LORA_1B}/phases/forward/planned_bytes", GIB),
    ("docs/measured.md", r"planned at [\d.]+ GiB took ([\d.]+);", f"gpu/steps/{LORA_1B}/peak_memory_gib", 1),
    ("docs/measured.md", r"weights ([\d,]+) tokens/s", f"gpu_h100/steps/{FULL_8B}/tokens_per_second", 1),
    ("docs/measured.md", r"and ([\d.]+) GiB as planned", f"gpu_h100/steps/{FULL_8B}/peak_memory_gib", 1),
    ("docs/measured.md", r"compiled layers ([\d,]+)", f"gpu_h100/steps/{LORA_8B}:eager/tokens_per_second", 1),
    ("docs/measured.md", r"check` \| ([\d.]+) s and", "start/cpu_seconds/help", 1),
    ("docs/measured.md", r"check` \| [\d.]+ s and ([\d.]+) s", "start/cpu_seconds/check", 1),
    ("docs/planner.md", r"Half of the (\d+) points", "closed_form/count", 1),
    ("docs/planner.md", r"the worst by ([\d.]+) %", "closed_form/worst", 100),
    ("docs/planner.md", r"less than ([\d.]+) % of the", "closed_form/median", 100),
    ("docs/planner.md", r"A trace took (\d+) seconds", "closed_form/points/*/trace_seconds/median", 1),
    ("docs/planner.md", r"\n  form ([\d.]+) ms\.", "closed_form/points/*/closed_milliseconds/median", 1),
    ("docs/planner.md", r"median error ([\d.]+) %", "public_memory/reserved_error/median", 1),
    ("docs/planner.md", r"\((\d+) are traced\)", "public_memory/reserved_error/points", 1),
    ("docs/planner.md", r"\*Allocated\*: ([\d.]+) %", "public_memory/mean_allocated_error/median", 1),
    ("docs/planner.md", r"measured at ([\d.]+) GiB", f"gpu/steps/{LORA_8B}/peak_memory_gib", 1),
    ("docs/planner.md", r"LoRA was planned at ([\d.]+)", f"gpu/steps/{LORA_1B}/phases/forward/planned_bytes", GIB),
    ("docs/planner.md", r"GiB and took ([\d.]+)\.\n", f"gpu/steps/{LORA_1B}/peak_memory_gib", 1),
]
WORDS = {"four": 4, "six": 6}
MEASURED = re.compile(r"\d[\d.,]* (?:GiB|tokens/s|times|steps|minutes|hours|kills|%)")


def figure(path: str) -> float:
    """A record's value: its name and keys, with slashes between. `*/seconds/max` is the largest of all rows."""
    name, *keys = path.split("/")
    value: Any = records.record(name)
    while keys:
        key = keys.pop(0)
        if key == "*":
            return float({"max": max, "median": statistics.median}[keys[1]](row[keys[0]] for row in value.values()))
        value = value[int(key)] if isinstance(value, list) else value[key]
    return float(value)


@pytest.mark.parametrize(("page", "pattern", "path", "scale"), FIGURES)
def test_a_figure_is_its_records(page: str, pattern: str, path: str, scale: float) -> None:
    """Rounded to the digits that the page has: 14,300 is to hundreds."""
    stated = re.search(pattern, (records.ROOT / page).read_text("utf-8"))
    assert stated is not None, "the page says it in other words"
    text = str(WORDS.get(stated[1], stated[1])).replace(",", "")
    unit = 10.0 ** (len(text) - len(text.rstrip("0"))) if "." not in text else 10.0 ** -len(text.partition(".")[2])
    assert figure(path) * scale == pytest.approx(float(text), abs=0.51 * unit)


def test_each_measured_figure_of_readme_has_a_record_of_this_code_or_of_a_gpu() -> None:
    text = (records.ROOT / "README.md").read_text("utf-8")
    own = [
        (re.search(pattern, text), path.partition("/")[0]) for page, pattern, path, _ in FIGURES if page == "README.md"
    ]
    spans = [(match.start(), match.end()) for match, _ in own if match is not None]
    loose = [match[0] for match in MEASURED.finditer(text) if not any(a <= match.start() < b for a, b in spans)]
    assert loose == [], "bind it to a record in FIGURES"
    for match, name in own:
        assert match is not None
        if not name.startswith("gpu"):
            assert not records.has_changed(name), f"measure {name} again, or take its figure out of README"
            continue
        line = next(line for line in text.splitlines() if match[0].strip("\n") in line)
        date = datetime.date.fromisoformat(records.record(name)["date"][:10])
        assert f"kit of {date.day} {date:%B}" in line


def test_the_phases_of_the_first_command_are_its_records() -> None:
    runs, page = records.record("quickstart")["runs"], (records.ROOT / "docs/measured.md").read_text("utf-8")
    for phase, figures in runs["avx512"]["phases"].items():
        other = f"{runs['avx2, without setup']['phases'][phase]['cpu']:.1f}" if phase != "setup" else "as before"
        assert f"| {phase} | {figures['cpu']:.1f} | {other} |" in page


def test_the_page_of_results_is_what_its_records_say() -> None:
    """Else: python benchmarks/skills.py --page"""
    assert skills.PAGE.read_text("utf-8") == skills.page(records.record("skills"))


def test_readme_marks_the_recipes_that_a_gpu_has_run() -> None:
    ran = {
        name.partition(":")[0]
        for record in ("gpu", "gpu_h100")
        for name, row in records.record(record)["steps"].items()
        if "tokens_per_second" in row
    }
    table = re.findall(
        r"^\| [^|]+ \| `(\w[\w.]*)` \| [^|]+ \| (.*)\|$", (records.ROOT / "README.md").read_text("utf-8"), re.MULTILINE
    )
    assert len(table) >= 8
    assert {name for name, mark in table if mark.strip()} == ran
