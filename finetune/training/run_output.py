"""Rank 0's output during a run: receipt, metrics, samples, pages, trackers, checkpoints to the Hub.

Every rank has these objects, so that no caller asks for its rank. On other ranks they do nothing.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from finetune.files import append_lines, write_json
from finetune.hub.checkpoints import CheckpointPusher
from finetune.measure.metrics import Terminal
from finetune.report.run_page import write_page, write_pages
from finetune.run_folder.folder import mark_step
from finetune.strategies.receipt import add_optimizer_state
from finetune.training.start import Start
from finetune.training.trackers import Trackers

SECONDS_BETWEEN_STATES = 1.0  # and a hundred times what the last one took: 12 ms here, for each is synced
SECONDS_BETWEEN_PAGES = 60.0  # drawing takes half a second of CPU for 1,000 steps


class RunOutput:
    """The lines of a run, to its folder, the terminal and its trackers."""

    def __init__(self, start: Start) -> None:
        self.terminal = Terminal(start.plan.total_steps, silent=not start.launch.is_main)
        self._run_dir, self._writes = start.run_dir, start.writes
        self._trackers, self._pusher = Trackers(start.recipe), CheckpointPusher(start.recipe)
        self._state_due = -math.inf
        self._page_drawn = time.monotonic()  # a run shorter than a minute has its page at its end

    def open_trackers(self, first_step: int) -> None:
        """Call it after the Accelerator is made. A `first_step` above 0 continues an earlier start's report."""
        if self._writes:
            self._trackers.start(first_step)

    def write_metrics(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl, and its step into run_state.json, once a second at most; after an evaluation
        report.html is drawn again, once a minute at most."""
        if self._writes:
            append_lines(self._run_dir / "metrics.jsonl", [line])
            self._trackers.log(line)
            if (began := time.monotonic()) >= self._state_due:
                mark_step(self._run_dir, line["step"])
                ended = time.monotonic()
                self._state_due = ended + max(SECONDS_BETWEEN_STATES, 100 * (ended - began))
            if line["kind"] == "eval" and time.monotonic() - self._page_drawn >= SECONDS_BETWEEN_PAGES:
                write_page(self._run_dir, self.terminal.log)
                self._page_drawn = time.monotonic()

    def write_samples(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write lines of samples.jsonl as soon as each is computed. All ranks call it, so that all of them compute
        it."""
        written = []
        for line in lines:
            if self._writes:
                append_lines(self._run_dir / "samples.jsonl", [line])
                written.append(line)
        self._trackers.log_samples(written)

    def push_checkpoint(self, step: int) -> None:
        """Send the checkpoint of this step to the Hub, in the background."""
        if self._writes:
            self._pusher.push(step)

    def write_pages(self) -> None:
        """The run's pages, complete; when no rank waits any more."""
        if self._writes:
            write_pages(self._run_dir, print)

    def close(self, *, wait: bool) -> None:
        """Give trackers the report and close them; `wait` for checkpoints that are still on their way to the Hub."""
        if self._writes:
            self._trackers.finish()
            self._pusher.close(wait=wait)


class Receipt:
    """receipt.json, which grows while the run is built and trained. Every rank holds its content, rank 0 writes it."""

    def __init__(self, start: Start, content: dict[str, Any]) -> None:
        self._start, self.content = start, content

    def write(self) -> None:
        if self._start.writes:
            write_json(self._start.run_dir / "receipt.json", self.content)

    def add(self, section: str, facts: dict[str, Any]) -> None:
        """Add or replace a section, and write the receipt."""
        self.content[section] = facts
        self.write()

    def add_optimizer_state(self, elements: Counter[str]) -> None:
        """Add the elements of optimizer state that this rank holds. Raises EnvironmentMismatch: not as asked for."""
        ranks = self.content["world_size"]
        add_optimizer_state(self._start.recipe, self._start.strategy, self.content, elements, ranks)
        self.write()
