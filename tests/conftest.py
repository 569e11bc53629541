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

# A trace starts autograd's threads for the planner's device, for good; a process that has them cannot fork ranks.
TRACING = (
    "test_closed",
    "test_foretold",
    "test_pla",
    "test_pretend",
    "test_public_memory",
    "test_recipe_plans",
    "test_splice",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What traces in the tests' own process comes last."""
    items.sort(key=lambda item: item.path.name.startswith(TRACING))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama (float32 safetensors) and its tokenizer. Read-only: shared by the session."""
    return save_tiny(tmp_path_factory.mktemp("tiny_llama"))
