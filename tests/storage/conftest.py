"""The loopback Hub for these tests too, and short waits of a lease."""

from __future__ import annotations

import pytest

from finetune.storage import backends, journal
from tests.support.hub.fixture import hub  # noqa: F401  # a fixture


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(journal, "WATCH_SECONDS", 0.4)
    monkeypatch.setattr(journal, "SETTLE_SECONDS", 0.5)
    monkeypatch.setattr(backends, "FIRST_WAIT_SECONDS", 0.0)
