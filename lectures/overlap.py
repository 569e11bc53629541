"""The lecture `overlap`: training.non_blocking on and off, by the plan's seconds and bytes as a timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune import planner
from finetune.errors import FinetuneError
from finetune.planner import CHIPS, compute_seconds, worst_batches
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.report.pictures import COLOURS, new_figure
from lectures.output import Chapter, LectureRequest, LectureResult, columns, whole_number

HOST_LINK = CHIPS["RTX4090"].link  # bytes/s: sixteen lanes of PCIe 4, by which a GPU reads host memory
VISIBLE = 0.4  # of a forward and backward: the copy of a batch that would be large enough to be seen
SHARE = 0.01  # of the step, from which on a copy is worth hiding


@dataclass(frozen=True)
class TimeSpan:
    """One copy or one forward and backward, in seconds."""

    what: str  # copy or compute
    batch: int
    begin: float
    end: float


def timeline(batches: int, copy: float, compute: float, *, non_blocking: bool) -> list[TimeSpan]:
    """The copies and computations of micro-batches, as tokens/batches.py: prefetch makes them. Without `non_blocking`
    the host waits for each copy, and a copy for the computation before it; with it copies have their own stream."""
    spans: list[TimeSpan] = []
    copied = computed = begun = 0.0
    for batch in range(batches):
        begin = max(copied, begun if non_blocking else computed)  # one ahead: beside the computation before it
        copied = begin + copy
        spans.append(TimeSpan("copy", batch, begin, copied))
        begun = max(copied, computed)
        computed = begun + compute
        spans.append(TimeSpan("compute", batch, begun, computed))
    return spans


def overlap_lecture(asked: LectureRequest) -> LectureResult:
    """Raises FinetuneError, of the recipe and of a GPU that the plan does not know."""
    gpu, batches = asked.settings["gpu"], whole_number(asked.settings, "batches")
    if gpu not in CHIPS:
        raise FinetuneError(f"gpu: {gpu}: the plan has no speeds of it; write gpu= and one of {', '.join(CHIPS)}")
    recipe = load_recipe(asked.recipe, asked.overrides).recipe
    asked.note(f"planning {asked.recipe.stem} on {gpu}")
    planned = planner.plan(recipe, parse_gpus(f"1x{gpu}"))
    copied = {
        name: value.nbytes for name, value in worst_batches(recipe, 1)[0].items() if isinstance(value, torch.Tensor)
    }
    copy = sum(copied.values()) / HOST_LINK
    compute = sum(compute_seconds(planned.work, CHIPS[gpu], phase) for phase in ("forward", "backward"))
    cases = {"this recipe's batch": copy, f"a batch whose copy takes {100 * VISIBLE:.0f} % of that": VISIBLE * compute}
    sections = [_batch(copied, gpu), _times(cases, compute, batches), _said(copy, compute)]
    facts = {
        "recipe": str(asked.recipe),
        "overrides": list(asked.overrides),
        "gpu": gpu,
        "batch_bytes": copied,
        "copy_seconds": copy,
        "compute_seconds": compute,
        "totals": {name: _totals(seconds, compute, batches) for name, seconds in cases.items()},
    }
    return LectureResult(sections, facts, partial(_draw, cases, compute, batches, f"{asked.recipe.stem} on {gpu}"))


def _totals(copy: float, compute: float, batches: int) -> dict[str, float]:
    return {
        name: timeline(batches, copy, compute, non_blocking=non_blocking)[-1].end
        for name, non_blocking in (("off", False), ("on", True))
    }


def _batch(copied: Mapping[str, int], gpu: str) -> Chapter:
    rows = [(name, f"{nbytes:,}") for name, nbytes in copied.items()]
    lines = columns(("tensor of a micro-batch", "bytes"), [*rows, ("all", f"{sum(copied.values()):,}")])
    return Chapter(f"What is copied to the {gpu} for each micro-batch", lines)


def _times(cases: Mapping[str, float], compute: float, batches: int) -> Chapter:
    rows = []
    for name, copy in cases.items():
        total = _totals(copy, compute, batches)
        won = 1 - total["on"] / total["off"]
        seconds = (copy, compute, total["off"], total["on"])
        rows.append((name, *(f"{1000 * each:,.3f}" for each in seconds), f"{100 * won:.4f}"))
    head = (f"ms, of {batches} micro-batches", "a copy", "forward, backward", "off", "on", "won, %")
    lines = [
        *columns(head, rows),
        "off: the host waits for each copy. on: pinned memory, a stream for copies, one batch ahead.",
        f"By the plan: forward and backward at the GPU's peaks, copies at {HOST_LINK / 1e9:.0f} GB/s of PCIe 4.",
        "Nothing here was measured: a CPU has nothing to copy to. Real kernels are slower: copies matter less still.",
    ]
    return Chapter("training.non_blocking off and on", lines)


def _said(copy: float, compute: float) -> Chapter:
    needed = SHARE * compute * HOST_LINK
    times = needed / (copy * HOST_LINK)
    lines = [
        f"A copy takes {100 * copy / compute:.4f} % of its forward and backward: tokens are integers, and few.",
        f"From {needed / 1e6:,.0f} MB a micro-batch on, {times:,.0f} times as many, it would take {100 * SHARE:.0f} %.",
        "What non_blocking saves here is the host's wait: with it the host may launch the next kernels at once.",
    ]
    return Chapter("When does it matter?", lines)


def _draw(cases: Mapping[str, float], compute: float, batches: int, name: str, file: Path) -> None:
    """Both cases, off and on: a row of copies over a row of computations."""
    figure = new_figure(figsize=(9.0, 6.0))
    for axes, (title, copy) in zip(figure.subplots(len(cases), 1), cases.items(), strict=True):
        ends = [_bars(axes, copy, compute, batches, non_blocking) for non_blocking in (False, True)]
        if copy < 0.002 * max(ends):  # too short to be seen
            for row in (3, 1):
                axes.annotate(f"each {1000 * copy:.3f} ms", (0, row), (4, 0), textcoords="offset points", va="center")
        axes.set_yticks((3, 2, 1, 0), ("off: copies", "off: computation", "on: copies", "on: computation"))
        axes.set_ylim(3.6, -0.6)
        axes.set_xlim(0, 1000 * max(ends) * 1.02)
        axes.invert_yaxis()
        axes.set_title(f"{name}: {title}", loc="left", fontsize=11)
        axes.set_xlabel("ms, by the plan")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def _bars(axes: Any, copy: float, compute: float, batches: int, non_blocking: bool) -> float:
    spans: Sequence[TimeSpan] = timeline(batches, copy, compute, non_blocking=non_blocking)
    rows = {"copy": 1, "compute": 0} if non_blocking else {"copy": 3, "compute": 2}
    for span in spans:
        colour = COLOURS[1] if span.what == "copy" else COLOURS[0]
        begin, length = 1000 * span.begin, 1000 * (span.end - span.begin)
        axes.barh(rows[span.what], length, 0.7, begin, color=colour, edgecolor="white")
    return spans[-1].end
