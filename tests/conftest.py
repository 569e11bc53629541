"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch loads, here and in every process that a test starts: on tiny models a second thread only waits (the
# suite took 446 s with two, beside another program).
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A planner beside each of the suite's hundreds of runs would be most of the suite; tests of it turn it on.
os.environ.setdefault("FINETUNE_PLANNER", "off")

from tests.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama (float32 safetensors) and its tokenizer. Read-only: shared by the session."""
    return save_tiny(tmp_path_factory.mktemp("tiny_llama"))
