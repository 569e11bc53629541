"""Reads a pipeline from an Accelerate config's name.

Accelerate has no key for a pipeline and refuses unknown keys. So the file's name says it: `1f1b`, or `1f1b_ddp2` for
two pipelines side by side.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from finetune.errors import RecipeError
from finetune.wording import counted

SCHEDULES = ("gpipe", "1f1b", "naive", "interleaved_1f1b")
RUNS = {"interleaved_1f1b": 2}  # runs of decoder layers on each stage; other schedules have one
_NAME = re.compile(rf"({'|'.join(SCHEDULES)})(?:_ddp(.*))?")


class Pipelines(NamedTuple):
    """The order in which micro-batches are computed, and the number of pipeline copies."""

    schedule: str
    copies: int

    @property
    def runs(self) -> int:
        """Runs of decoder layers on each stage: one, or several that take turns."""
        return RUNS.get(self.schedule, 1)

    def misfit(self, ranks: int) -> str | None:
        """Why these pipelines cannot have so many ranks, as words after the strategy's name; None if they can."""
        if ranks % self.copies == 0 and ranks >= 2 * self.copies:
            return None
        fitting = max(2, ranks // self.copies) * self.copies
        return (
            f"is {self.copies} pipelines of two stages or more, all equally long; "
            f"{counted(ranks, 'process', 'processes')} cannot be divided so: launch {fitting}"
        )


def can_interleave(stages: int, micro_batches: int) -> bool:
    """Whether interleaved_1f1b can order the micro-batches.

    It needs rounds of equal size, with a micro-batch or more for each stage. 4 stages: 9 micro-batches make two rounds,
    one of 4 and one of 5, so they cannot be ordered.
    """
    rounds = micro_batches // stages
    return rounds > 0 and micro_batches % rounds == 0


def pipelines_named(name: str) -> Pipelines | None:
    """The pipelines that a file's name, without its ending, asks for; None: no pipeline.

    Raises RecipeError for a name without the number of copies, because such a file would silently be plain DDP.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    schedule, copies = match.groups()
    if copies is not None and not re.fullmatch("[2-9]|[1-9][0-9]{1,4}", copies):
        raise RecipeError(
            [
                f"accelerate_config: {name}: its name does not say how many pipelines train side by side; name it "
                f"{schedule}_ddp2 for two"
            ]
        )
    return Pipelines(schedule, int(copies or 1))
