"""A training, and what goes to others of it: pages, trackers, the Hub's branch of checkpoints. By the main process."""

from __future__ import annotations

from dataclasses import replace

from finetune.hub_checkpoints import CheckpointPusher
from finetune.pages.keep import write_pages
from finetune.session import Start, train_claimed
from finetune.trackers import Trackers


def train_and_report(start: Start) -> int:
    """Train; then, when no rank waits any more, the pages of the run and what trackers are handed of them."""
    if start.claim is None or start.claim.status == "finished":
        return train_claimed(start)
    trackers, pusher = Trackers(start.recipe), CheckpointPusher(start.recipe)
    ended = False
    try:
        code = train_claimed(replace(start, trackers=trackers, pusher=pusher))
        write_pages(start.run_dir, print)
        ended = True
        return code
    finally:
        trackers.finish()
        pusher.close(wait=ended)
