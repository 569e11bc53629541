"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama (float32 safetensors) and its tokenizer. Read-only: shared by the session."""
    return save_tiny(tmp_path_factory.mktemp("tiny_llama"))
