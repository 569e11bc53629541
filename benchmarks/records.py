"""Whether the records of benchmarks/results/ are of the code as it is: the table in docs/measured.md.

    python benchmarks/records.py        writes the table; tests/benchmarks/test_records.py holds it

A record names its commit, and a digest of the files that its figures depend on. It has changed if these files have.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "measured.md"
HEAD = "| record | commit | date | machine | files changed since |\n|---|---|---|---|---|\n"
STAMP = ("date", "commit", "commit_from", "files_sha256", "device", "versions")  # what is not a figure of a record

STEP = ("finetune/training", "finetune/architecture", "finetune/model")  # what one step computes
UPDATE = (
    "finetune/training/step.py",
    "finetune/training/update.py",
    "finetune/training/objectives/supervised.py",
    "finetune/model/optimizer.py",
)
ANSWERS = ("finetune/generation", "finetune/answers", "finetune/scoring")
# Where a folder's files were until 30 November 2026, for records of earlier commits.
WERE = {"finetune/answers": "finetune/finished_run", "finetune/rehearse": "finetune/preflight"}
RUN = (*STEP, "finetune/strategies", "finetune/run_folder")
PLAN = ("finetune/planner/trace", "finetune/planner/depth", "finetune/planner/plan_recipe.py", "finetune/closed_form")
# Record -> files and folders that decide its figures. A row of one recipe names that itself.
DEPENDS = {
    "checker": (*STEP, *ANSWERS, "benchmarks/checker.py"),
    "classes": (*STEP, *ANSWERS, "benchmarks/classes.py"),
    "closed_form": (*PLAN, "benchmarks/closed_form.py"),
    "experts": ("finetune/model/packed_experts.py", "benchmarks/experts.py"),
    "families": ("finetune/architecture", "finetune/model", "finetune/probe", "benchmarks/families.py"),
    "float8": (*STEP, "recipes/quickstart.yaml", "benchmarks/float8.py"),
    "gpu": (*STEP, *PLAN, "benchmarks/gpu_checks.py", "benchmarks/gpu_proofs.py", "benchmarks/gpu_recipes.py"),
    "gpu_h100": (*STEP, *PLAN, "benchmarks/gpu_checks.py", "benchmarks/gpu_recipes.py"),
    "mixture_load": ("finetune/model", "benchmarks/mixture_load.py"),
    "one_curve": (*STEP, "finetune/strategies", "finetune/tokens", "benchmarks/one_curve.py"),
    "parity": (*STEP, "finetune/tokens", "benchmarks/parity.py", "benchmarks/parity_peer.py"),
    "plan_recipes": (*PLAN, "finetune/probe"),
    "public_memory": (*PLAN, "benchmarks/public_memory.py"),
    # These files decide its losses and answers. Its seconds are those of one machine on one day.
    "quickstart": ("recipes/quickstart.yaml", "data/devils_dictionary.jsonl", "finetune/tokens", *UPDATE),
    "rehearse": (*RUN, "finetune/rehearse", "benchmarks/rehearse_all.py"),
    "resume": (*RUN, "benchmarks/resume.py"),
    "skills": (*STEP, *ANSWERS, "data/skills", "benchmarks/skills"),
    "soak": (*RUN, "benchmarks/soak.py"),
    "soak_storage": ("finetune/storage", "finetune/run_folder", "benchmarks/soak_storage.py"),
    "start": ("finetune/cli", "finetune/recipe", "finetune/train.py"),
    "storage_overhead": ("finetune/storage", "finetune/run_folder", "benchmarks/storage_overhead.py"),
    "throughput": (*STEP, "finetune/tokens", "recipes/quickstart.yaml", "benchmarks/throughput.py"),
    "tokenise": ("finetune/data", "finetune/tokens"),
    "train_recipes": (*RUN, "benchmarks/train_recipes.py"),
}


def digest(blobs: dict[str, str]) -> str:
    """One digest for many files; `blobs` has git's hash of each file's content, by path."""
    lines = "".join(f"{path} {blob}\n" for path, blob in sorted(blobs.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def digest_now(name: str) -> str:
    """The digest of a record's files as they are in this folder. Needs no git."""
    blobs = {}
    for start in DEPENDS[name]:
        found = [ROOT / start] if (ROOT / start).is_file() else sorted((ROOT / start).rglob("*"))
        for file in found:
            if file.is_file() and "__pycache__" not in file.parts:
                content = file.read_bytes()
                blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
                blobs[file.relative_to(ROOT).as_posix()] = blob.hexdigest()
    return digest(blobs)


def digest_at(name: str, commit: str) -> str:
    """The digest of a record's files as they were in a commit."""
    folders = [*DEPENDS[name], *(WERE[folder] for folder in DEPENDS[name] if folder in WERE)]
    listed = git("ls-tree", "-r", commit, "--", *folders).splitlines()
    return digest({path: facts.split()[2] for facts, _, path in (line.partition("\t") for line in listed)})


def git(*words: str) -> str:
    """Run git in this folder, and return its output. Raises CalledProcessError, or FileNotFoundError without git."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def stamp(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Date, commit (where this folder is a checkout) and digest of the files, for a record with these figures.

    A record that keeps a row of an earlier call keeps that call's stamp, so it is as old as its oldest row. Delete the
    file to measure all of it anew.
    """
    if (RESULTS / f"{name}.json").is_file():
        earlier = record(name)
        rows = rows_of(figures)
        if any(row in rows for row in rows_of(earlier)):
            return {key: earlier[key] for key in STAMP[:4] if key in earlier}
    try:
        commit, own = git("rev-parse", "--short=8", "HEAD"), git("status", "--porcelain", "--", *DEPENDS[name])
    except (subprocess.CalledProcessError, FileNotFoundError):
        commit, own = "not recorded", ""
    commit += " and changes" if own else ""
    return {"date": datetime.date.today().isoformat(), "commit": commit, "files_sha256": digest_now(name)}


def rows_of(figures: dict[str, Any]) -> list[Any]:
    """The rows of a record's tables: what stands in its dictionaries and lists, except single values."""
    tables = [part for key, part in figures.items() if key not in STAMP and isinstance(part, dict | list)]
    parts = [row for table in tables for row in (table.values() if isinstance(table, dict) else table)]
    return [row for row in parts if isinstance(row, dict | list) and row]


def record(name: str) -> dict[str, Any]:
    """A record as it was written."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return content


def has_changed(name: str) -> bool:
    """Whether a file that decides the record's figures has changed since."""
    return bool(record(name)["files_sha256"] != digest_now(name))


def table() -> str:
    """The table in docs/measured.md."""
    lines = []
    for name in sorted(file.stem for file in RESULTS.glob("*.json")):
        content = record(name)
        changed = "yes" if has_changed(name) else "no"
        facts = content["commit"], content["date"][:10], content.get("device") or "not recorded"
        lines.append(f"| `{name}` | {' | '.join(facts)} | {changed} |\n")
    return HEAD + "".join(lines)


def on_page(text: str) -> str:
    """The table as it stands in the page's text."""
    begin = text.index(HEAD)
    return text[begin : text.index("\n\n", begin) + 1]


def main() -> int:
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text.replace(on_page(text), table()), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
