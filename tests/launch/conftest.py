"""What the tests of launches share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.runs.two_hosts import Host, two_hosts, why_not


@pytest.fixture(autouse=True)
def hangup_as_usual() -> Iterator[None]:
    """A suite that runs under nohup ignores SIGHUP, and so would the programs that these tests start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, ...]]:
    """Two hosts with a cable between them, where this machine can be two."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with two_hosts() as pair:
        yield pair
