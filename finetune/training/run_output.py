"""Rank 0's output during a run: metrics, samples, the open page, trackers, the copy on a storage.

Every rank has this object, so that no caller asks for its rank. On other ranks it does nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.files import append_lines
from finetune.measure.metrics import Terminal
from finetune.recipe.schema import Recipe
from finetune.run_folder.folder import mark_step

if TYPE_CHECKING:
    from types import TracebackType

    from finetune.report.trackers import Trackers
    from finetune.storage.mirror import Mirror

SECONDS_BETWEEN_STATES = 1.0  # and a hundred times what the last one took: 12 ms here, for each is synced
SECONDS_BETWEEN_PAGES = 60.0  # drawing takes half a second of CPU for 1,000 steps


class RunOutput:
    """The lines of a run, to its folder, the terminal and its trackers.

    Leaving the block gives trackers the report and closes them. After a success it also waits for the checkpoint that
    is still on its way to the storage.
    """

    def __init__(
        self,
        recipe: Recipe,
        total_steps: int,
        *,
        silent: bool = False,
        writes: bool = True,
        mirror: Mirror | None = None,
    ) -> None:
        """
        Args:
            silent: This rank prints nothing.
            writes: This rank writes the run's folder.
            mirror: The run's copy on its storage; rank 0's alone.
        """
        self.terminal = Terminal(total_steps, silent=silent)
        self._recipe, self._writes = recipe, writes
        self._trackers: Trackers | None = None
        self.mirror = mirror
        self.has_changed = False  # a saved checkpoint differed from the start: checksums read every trained tensor
        self._state_due = -math.inf
        self._page_drawn = time.monotonic()  # a run shorter than a minute has its page at its end

    @property
    def _run_dir(self) -> Path:
        return Path(self._recipe.run_dir)

    def __enter__(self) -> RunOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._trackers is not None:
            self._trackers.finish()
        # A second Ctrl-C waits for nothing. Then the next start watches the lease for a while.
        if self.mirror is not None and self._writes and not (kind is not None and issubclass(kind, KeyboardInterrupt)):
            self.mirror.close(wait=kind is None)

    def open_trackers(self, first_step: int) -> None:
        """Call it after the Accelerator is made. A `first_step` above 0 continues an earlier start's report."""
        if self._writes and self._recipe.report_to:
            from finetune.report.trackers import Trackers

            self._trackers = Trackers(self._recipe)
            self._trackers.start(first_step)

    def write_metrics(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl, and its step into run_state.json, once a second at most; after an evaluation
        report.html is drawn again, once a minute at most."""
        if self._writes:
            append_lines(self._run_dir / "metrics.jsonl", [line])
            if self._trackers is not None:
                self._trackers.log(line)
            if (began := time.monotonic()) >= self._state_due:
                mark_step(self._run_dir, line["step"])
                ended = time.monotonic()
                self._state_due = ended + max(SECONDS_BETWEEN_STATES, 100 * (ended - began))
            if line["kind"] == "eval" and time.monotonic() - self._page_drawn >= SECONDS_BETWEEN_PAGES:
                from finetune.report.run_page import write_page

                write_page(self._run_dir, self.terminal.say)
                self._page_drawn = time.monotonic()

    def write_samples(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write lines of samples.jsonl as soon as each is computed. Call it on every rank: generating is collective."""
        written = []
        for line in lines:
            if self._writes:
                append_lines(self._run_dir / "samples.jsonl", [line])
                written.append(line)
        if self._trackers is not None:
            self._trackers.log_samples(written)

    def push_checkpoint(self, step: int, best: int | None) -> None:
        """Send the checkpoint of this step to the storage, in the background; the best one too if it lacks it."""
        if self.mirror is not None and self._writes:
            self.mirror.push(step, best)
