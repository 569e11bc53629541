"""The Hub that these tests talk to."""

from tests.support.hub.fixture import hub

__all__ = ["hub"]
