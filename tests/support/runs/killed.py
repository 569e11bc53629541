"""A run as SIGKILL would have left it."""

from __future__ import annotations

import shutil
from pathlib import Path

from finetune.files import remove_folder


def rewind(finished: Path, run_dir: Path, step: int) -> None:
    """A copy of a finished run as SIGKILL would have left it after the checkpoint of `step` was written."""
    from finetune.run_folder.checkpoint import checkpoint_steps, step_folder  # with torch
    from finetune.run_folder.folder import mark_run

    shutil.copytree(finished, run_dir, dirs_exist_ok=True)
    later = [step_folder(run_dir, saved) for saved in checkpoint_steps(run_dir) if saved > step]
    for folder in (*later, run_dir / "model", run_dir / "adapter"):
        if folder.exists():
            remove_folder(folder)
    mark_run(run_dir, "running", step=step)
