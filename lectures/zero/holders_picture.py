"""The drawing of who holds what when: a row for each strategy, a column for each phase of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from finetune.closed_form.constants import STEP_PHASES
from finetune.report.pictures import COLOURS, new_figure
from lectures.zero.holders import ENGINE_PREFIX, HELD_PARTS, HOLDING_RANKS, LEAST, RankHolding

OTHERS = "#ececec"  # what other ranks hold
HELD_COLOURS = dict(zip(HELD_PARTS, (COLOURS[0], COLOURS[6], COLOURS[1], COLOURS[2]), strict=True))
ROW_INCHES, WIDTH_INCHES = 1.12, 13.0


def draw_holders(holders: Sequence[RankHolding], file: Path) -> None:
    """Write the picture. A bar is all of the weights, masters, gradients or moments; filled is what rank 0 has of it at
    the phase's peak, hatched what it has for a moment, the rest is with the other ranks or in host memory."""
    traced = [each for each in holders if not each.reason]
    figure = new_figure(figsize=(WIDTH_INCHES, 0.9 + ROW_INCHES * len(traced)))
    grid = figure.subplots(len(traced), len(STEP_PHASES), squeeze=False, sharex=True)
    for row, holding in zip(grid, traced, strict=True):
        for axes, phase in zip(row, STEP_PHASES, strict=True):
            draw_holding(axes, holding, phase)
        row[0].set_ylabel(holding.strategy, rotation=0, ha="right", va="center", fontsize=11, labelpad=58)
        row[0].set_yticks(range(len(HELD_PARTS)), list(HELD_PARTS), fontsize=8)
    for axes, phase in zip(grid[0], STEP_PHASES, strict=True):
        axes.set_title(phase, fontsize=12)
    patch = partial(grid[0][0].barh, [0], [0])
    patches = [patch(color="#777777"), patch(color="white", edgecolor="#777777", hatch="////"), patch(color=OTHERS)]
    names = (f"rank 0 of {HOLDING_RANKS} holds", "has whole for a while", "others hold, or the host")
    figure.suptitle("P: bytes of the weights in float32", x=0.01, ha="left", fontsize=9)
    figure.legend(patches, names, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    figure.savefig(file)


def draw_holding(axes: Any, holding: RankHolding, phase: str) -> None:
    """One strategy in one phase: a bar of each part, its filled and its hatched share, and the collectives in words."""
    for place, part in enumerate(HELD_PARTS):
        own, passing = holding.own[phase][part], holding.passing[phase][part]
        if part != "masters" or holding.strategy.startswith(ENGINE_PREFIX):  # the others update the weights themselves
            axes.barh(place, 1.0, 0.74, color=OTHERS)
        axes.barh(place, min(own, 1.0), 0.74, color=HELD_COLOURS[part])
        left = min(own, 1.0)
        if passing >= LEAST and left < 1.0:
            width = min(passing, 1.0 - left)
            axes.barh(place, width, 0.74, left, color="white", edgecolor=HELD_COLOURS[part], hatch="////", linewidth=0)
    for rank in range(1, HOLDING_RANKS):
        axes.axvline(rank / HOLDING_RANKS, color="white", linewidth=1)
    words = [f"{name} {share:.2f} P" for name, share in holding.sent[phase].items()]
    if holding.host[phase] >= LEAST:
        words.append(f"host: {holding.host[phase]:.2f} P")
    axes.text(1.04, 1.5, "\n".join(words), fontsize=9, va="center")
    axes.set_xlim(0, 1.75)
    axes.set_ylim(len(HELD_PARTS) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
