"""Reads a pipeline from an Accelerate config's name.

Accelerate has no word for a pipeline and refuses unknown keys. So our part stands in the file's name: `1f1b`, or
`1f1b_ddp2` for two pipelines beside each other.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from finetune.errors import RecipeError
from finetune.wording import counted

SCHEDULES = ("gpipe", "1f1b", "naive", "interleaved_1f1b")
RUNS = {"interleaved_1f1b": 2}  # runs of decoder layers on each stage; one under the other schedules
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
        """Why so many ranks are not these pipelines, after the strategy's name; None where they are."""
        if ranks % self.copies == 0 and ranks >= 2 * self.copies:
            return None
        fitting = max(2, ranks // self.copies) * self.copies
        return (
            f"is {self.copies} pipelines of two stages or more, all as long; {counted(ranks, 'process', 'processes')} "
            f"cannot be divided so: launch {fitting}"
        )


def can_interleave(stages: int, micro_batches: int) -> bool:
    """Whether interleaved_1f1b can order them: it needs rounds of equal size, with at least one micro-batch a stage."""
    rounds = micro_batches // stages
    return rounds > 0 and micro_batches % rounds == 0


def pipelines_named(name: str) -> Pipelines | None:
    """The pipelines that a file with this name, without its ending, asks for; None: no pipeline.

    Raises RecipeError for a name without the number of copies, because it would silently be plain DDP.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    schedule, copies = match.groups()
    if copies is not None and not re.fullmatch("[2-9]|[1-9][0-9]{1,4}", copies):
        raise RecipeError(
            [
                f"accelerate_config: {name}: its name does not say how many pipelines train beside each other; name it "
                f"{schedule}_ddp2 for two"
            ]
        )
    return Pipelines(schedule, int(copies or 1))
