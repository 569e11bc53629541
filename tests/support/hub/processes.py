"""Processes whose Hub is the loopback one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.hub.server import TOKEN, Hub

REPOSITORY = Path(__file__).resolve().parents[3]


def run_python(hub: Hub, words: list[str], home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`python WORDS` in the repository, with none of this process' settings of the Hub; its caches are under `home`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"PYTHONPATH": str(REPOSITORY), "WANDB_API_KEY": "a-key-of-another-house", **more}
    words = [sys.executable, *words]
    return subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=400)
