"""The fixture `hub`: the Hub that tests talk to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hub import Hub, running_hub
from tests.support.hub.server import TOKEN


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """On the loopback; this process writes to it with its first user's token."""
    # The client reads HF_HUB_DISABLE_XET, HF_HUB_OFFLINE and HF_ENDPOINT once, when it is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running_hub() as running:
        yield running
