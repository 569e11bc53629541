"""A Hub on the loopback, for tests: the part of the Hub's protocol that the installed client speaks.

`with running_hub() as hub:` starts it; `hub.url` is what HF_ENDPOINT wants. The real client talks to it, nothing of the
client is patched. The state is git's own (blobs, trees and commits by their hashes) and faults come on demand.
"""

from tests.support.hub.server import Hub, running_hub
from tests.support.hub.state import Fault, Request

__all__ = ["Fault", "Hub", "Request", "running_hub"]
