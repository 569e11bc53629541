"""Lectures held as a reader holds them, each once a session; and their pages, taken apart."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lectures.output import MEASURED

ROOT = Path(__file__).resolve().parents[2]
LEARN = ROOT / "docs" / "learn"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")


@dataclass(frozen=True)
class Held:
    """What a lecture's command printed and wrote."""

    text: str
    facts: dict[str, Any]
    seconds: float
    picture_bytes: int


@lru_cache
def held(name: str, *words: str) -> Held:
    """`python -m lectures NAME WORDS`, in a folder that is like a clone."""
    with tempfile.TemporaryDirectory(prefix="finetune-lecture-") as folder:
        for each in ("recipes", "accelerate_configs", "data", "finetune", "lectures"):
            (Path(folder) / each).symlink_to(ROOT / each)
        command = [sys.executable, "-m", "lectures", name, *words]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        began = time.monotonic()
        process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        seconds = time.monotonic() - began
        assert process.returncode == 0, process.stderr
        written = Path(folder) / "runs" / f"lecture_{name}"
        facts = json.loads((written / f"{name}.json").read_text("utf-8"))
        return Held(process.stdout, facts, seconds, (written / f"{name}.png").stat().st_size)


@dataclass(frozen=True)
class Page:
    """A page of docs/learn/, in parts that must be equal in both languages, and its prose."""

    commands: list[str]
    outputs: list[str]
    pictures: list[str]
    prose: str

    @property
    def figures(self) -> list[str]:
        """Numbers written in digits, sorted: a translation moves them."""
        return sorted(NUMBER.findall(self.prose))


def page(file: Path) -> Page:
    """Read a page."""
    text = file.read_text("utf-8")
    blocks = FENCE.findall(text)
    prose = FENCE.sub("", text)
    pictures = [Path(path).name for path in PICTURE.findall(prose)]
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    return Page(
        [block for language, block in blocks if language == "bash"],
        [block for language, block in blocks if language == "text"],
        pictures,
        prose,
    )


def comparable(output: str) -> list[str]:
    """The lines of an output, in which measured figures are not told apart: their digits and widths may be others."""
    lines, measured = [], False
    for line in output.strip().splitlines():
        if not line.strip():
            measured = False
        measured = measured or line.endswith(MEASURED)
        lines.append(_without_figures(line) if measured else line.rstrip())
    return lines


def _without_figures(line: str) -> str:
    without = re.sub(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", "#", line)
    return re.sub(r"-{2,}", "--", " ".join(without.split()))
