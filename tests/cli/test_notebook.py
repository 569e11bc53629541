"""The notebook, from its first to its last cell, on the embedded model; and its code without a training."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = json.loads((ROOT / "notebooks" / "your_own_data.ipynb").read_text("utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_cells_are_python_and_hold_no_output() -> None:
    assert len(CELLS) == 9
    for cell in CELLS:
        ast.parse(cell)
    assert all(not cell.get("outputs") for cell in NOTEBOOK["cells"])
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)


@pytest.mark.slow
def test_every_cell_runs(tmp_path: Path) -> None:
    """A training of four steps on the example table; what a user gets is longer."""
    pytest.importorskip("gguf")
    overrides = "training.max_steps=4 samples.max_new_tokens=8 eval_steps=4 save_steps=4 data.max_length=128"
    environment = os.environ | {
        "FINETUNE_REPO": str(ROOT),
        "FINETUNE_INSTALLED": "1",
        "FINETUNE_OVERRIDES": overrides,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    program = "\n".join(CELLS)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "wrote mine.yaml" in done.stdout
    assert "step 4/4" in done.stdout
    for name in ("mine.yaml", "preview.html", "runs/mine/report.html", "adapter.zip"):
        assert (tmp_path / name).is_file(), name
