"""The model of the notes' seconds, in sentences made from its figures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from finetune.planner import HOST_MEMORY
from lectures.zero.notes import HOMEWORK, LOGGED_STEPS, HomeworkRow
from lectures.zero.times import (
    HOMEWORK_BUS,
    HOMEWORK_THREAD,
    HOST_BYTES_A_WEIGHT,
    Rates,
    modelled,
)

_WIDTH = 116
_GB, _TERA = 1e9, 1e12


def of_the_model(rates: Rates) -> Iterator[str]:
    """What the model of the notes' seconds rests on."""
    shared = LOGGED_STEPS * HOST_BYTES_A_WEIGHT * _row("zero3").job.parameters / HOST_MEMORY
    offloaded = modelled(_row("zero3 + offload"), rates)
    lines = [
        "Read off the table, because the notes name no machine: "
        f"{rates.micro_step:.3f} s of computation a micro-step (zero1, which sends nothing), and "
        f"{rates.link / _GB:.2f} GB/s that a rank sends (zero2 less zero1). The other four rows follow.",
        f"Assumed: a third of the computation is forward; all but one layer's traffic runs beside it; fp16 halves it; "
        f"{HOMEWORK_BUS / _GB:.0f} GB/s to the host (PCIe 3.0); AdamW on the host by one thread a rank, "
        f"{HOST_BYTES_A_WEIGHT} bytes a weight at {HOMEWORK_THREAD / _GB:.0f} GB/s. With all of a machine's "
        f"{HOST_MEMORY / _GB:.0f} GB/s instead, zero3 + offload would take "
        f"{offloaded.seconds - offloaded.host + shared:.1f} s.",
        f"{_order(rates)}",
    ]
    for line in lines:
        yield from textwrap.wrap(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _order(rates: Rates) -> str:
    measured = sorted(HOMEWORK, key=lambda row: row.seconds)
    found = sorted(HOMEWORK, key=lambda row: modelled(row, rates).seconds)
    worst = max(abs(modelled(row, rates).seconds / row.seconds - 1) for row in HOMEWORK)
    same = "as the notes do" if measured == found else "not as the notes do"
    names = ", ".join(row.name for row in found)
    return f"The model orders the rows {same}: {names}. The row that is farthest off is off by {worst:.0%}."


def _row(name: str) -> HomeworkRow:
    return next(row for row in HOMEWORK if row.name == name)
