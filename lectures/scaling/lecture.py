"""The lecture `scaling`: the tables, with the published points beside the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from finetune.closed_form.constants import FLOAT32, STEP_PHASES
from finetune.measure.collectives import WEIGHT
from finetune.planner import CHIPS
from finetune.recipe.loader import load_recipe
from finetune.wording import GIB
from lectures.output import Chapter, LectureRequest, LectureResult, columns
from lectures.scaling.picture import draw_scaling
from lectures.scaling.plans import (
    GPU,
    GPU_COUNTS,
    HEAD,
    NODE,
    PUBLISHED,
    PUBLISHED_LOSS,
    ROWS,
    SWEPT_STRATEGIES,
    TOKENS,
    Cell,
    bytes_a_parameter,
    decoder_config_of,
    gpus_of_ranks,
    parameters_of,
    plan_size,
    state_bytes,
    with_model,
)

SHARDING_RANKS = 64  # of the notes' "64 GPUs: 1/64"
# Bytes of a weight, a gradient and the optimizer's part: as the ZeRO paper counts, and as this kit trains in float32.
WAYS_OF_COUNTING = {"16-bit weights": (2, 2, 12), "float32 weights": (4, 4, 8)}
STAGES = {"DDP": "1", "ZeRO-1": "up to 4", "ZeRO-2": "up to 8", "ZeRO-3, FSDP": f"{SHARDING_RANKS}"}  # the notes' times
SMALLEST, MIDDLE, LARGEST = PUBLISHED
COMPARED = ("ddp", "fsdp2")  # the strategies of the published runs
Cells = Mapping[tuple[str, str], Cell]


def scaling_lecture(asked: LectureRequest) -> LectureResult:
    """Raises FinetuneError, of the recipe."""
    recipe = load_recipe(asked.recipe, asked.overrides).recipe
    cells: dict[tuple[str, str], Cell] = {}
    counts: dict[str, int] = {}
    for size, (parameters, hidden, layers) in PUBLISHED.items():
        asked.note(f"planning {size} under {', '.join(SWEPT_STRATEGIES)}")
        config = decoder_config_of(parameters, hidden, layers)
        counts[size] = parameters_of(config)
        own = with_model(recipe, config, asked.folder / "models" / size)
        cells |= {(size, strategy): cell for strategy, cell in plan_size(own, config)}
    memory = gpus_of_ranks(NODE).memory
    sections = [
        _sizes(counts),
        _memory(cells, memory),
        _speed(cells, memory),
        _beside(cells, memory),
        _traffic(cells, counts[SMALLEST]),
        _sharding(cells, counts[SMALLEST]),
    ]
    facts = {
        "recipe": str(asked.recipe),
        "overrides": list(asked.overrides),
        "parameters": counts,
        "gpu_bytes": memory,
        "cells": {" ".join(key): _facts(cell) for key, cell in cells.items()},
    }
    return LectureResult(sections, facts, partial(draw_scaling, cells, memory))


def _facts(cell: Cell) -> dict[str, Any]:
    traced = cell.traced and {
        "ranks": cell.traced.ranks,
        "needed_bytes": cell.traced.needed,
        "states_bytes": state_bytes(cell.traced),
        "fits": cell.traced.fits,
    }
    return {
        "traced": traced,
        "needed_bytes": {str(ranks): needed for ranks, needed in cell.needed.items()},
        "teraflops": {str(ranks): cell.teraflops(ranks) for ranks in cell.times},
        "flops": cell.flops,
        "loss": {"one_link": cell.loss(), "all_links": cell.loss(all_links=True)},
        "exposed_share": {str(ranks): time.exposed / time.seconds for ranks, time in cell.times.items()},
        "sent": {phase: _sent(cell, phase) for phase in STEP_PHASES},
    }


def _sent(cell: Cell, phase: str) -> float:
    """Bytes of a phase by the textbook: an all-reduce counts twice."""
    return sum(WEIGHT[name] * each.payload_bytes for name, each in cell.work.collectives.get(phase, {}).items())


def _sizes(counts: Mapping[str, int]) -> Chapter:
    rows = []
    for size, (parameters, hidden, layers) in PUBLISHED.items():
        width = decoder_config_of(parameters, hidden, layers)["intermediate_size"]
        apart = counts[size] / parameters - 1
        shape = (f"{hidden:,}", f"{layers}", f"{width:,}", f"{hidden // HEAD}")
        rows.append((f"T5 {size}", f"{counts[size]:,}", f"{100 * apart:+.2f} %", *shape))
    lines = [
        *columns(("published", "planned parameters", "apart", "hidden", "layers", "MLP", "heads"), rows),
        "T5 has an encoder and a decoder, which the plan does not know; it plans a Llama of as many parameters, with",
        f"T5's vocabulary, on micro-batches of {ROWS} x {TOKENS} tokens a GPU: our choice, as layers and widths are.",
    ]
    return Chapter("The published sizes, as the plan can express them", lines)


def _grid(cells: Cells, cell_of: Callable[[Cell, int], str]) -> list[str]:
    rows = [
        (size, strategy, *(cell_of(cell, ranks) if ranks in cell.times else "-" for ranks in GPU_COUNTS))
        for (size, strategy), cell in cells.items()
    ]
    return columns(("size", "strategy", *(f"{ranks} GPUs" for ranks in GPU_COUNTS)), rows, left=2)


def _memory(cells: Cells, memory: int) -> Chapter:
    def shown(cell: Cell, ranks: int) -> str:
        return f"{cell.needed[ranks] / GIB:.1f}" + "!" * (cell.needed[ranks] > memory)

    off = max(abs(cell.needed[NODE] / cell.traced.needed - 1) for cell in cells.values() if cell.traced)
    lines = [
        *_grid(cells, shown),
        f"HSDP shards within a machine of {NODE} and has a copy on each: it needs two of them.",
        f"By the closed form, which is at most {100 * off:.1f} % off the traces on {NODE} GPUs.",
    ]
    return Chapter(f"GiB of a GPU that has {memory / GIB:.1f} (! does not fit)", lines)


def _speed(cells: Cells, memory: int) -> Chapter:
    def shown(cell: Cell, ranks: int) -> str:
        if cell.needed[ranks] > memory:
            return "-"
        return f"{cell.teraflops(ranks):.0f}, {100 * cell.times[ranks].exposed / cell.times[ranks].seconds:.1f} %"

    chip = CHIPS[GPU]
    lines = [
        *_grid(cells, shown),
        f"By makers' figures: {chip.half / 1e12:.0f} TFLOP/s, {chip.link / 1e9:.0f} GB/s to GPUs of the machine. "
        f"A ring between machines has one GPU's link, {chip.between / 1e9:.0f} GB/s.",
        "Without congestion and waiting for each other, which grow with the ranks; a collective's start costs nothing.",
        "Products that are recomputed in backward count as work.",
    ]
    return Chapter("Plan TFLOP/s of a GPU, and the share of the step that waits for communication", lines)


def _beside(cells: Cells, memory: int) -> Chapter:
    """Each published statement beside the plan's figure."""
    rows = [
        ("DDP runs 2.28B and is out of memory at 11.3B", _verdict(cells, MIDDLE, memory)),
        ("", _verdict(cells, LARGEST, memory)),
        ("FSDP and DDP are alike on 611M and 2.28B", _alike(cells, SMALLEST)),
        ("", _alike(cells, MIDDLE)),
        *zip((f"11.3B loses {PUBLISHED_LOSS} % of TFLOP/s from 8 to 512 GPUs", "", ""), _losses(cells), strict=True),
    ]
    times = [cells[SMALLEST, name].times[NODE] for name in COMPARED]
    updates = [100 * time.update / time.seconds for time in times]
    lines = [
        *columns(("published", "planned"), rows, left=2),
        f"On {NODE} GPUs the update takes {updates[0]:.1f} % of DDP's step of {SMALLEST} and, divided among them, "
        f"{updates[1]:.1f} % of FSDP2's.",
        f"All links: a ring through the link of each GPU of a machine, {NODE} x {CHIPS[GPU].between / 1e9:.0f} GB/s "
        f"instead of {CHIPS[GPU].between / 1e9:.0f}; then NVLink is the slowest.",
    ]
    return Chapter("The published points beside the plan", lines)


def _verdict(cells: Cells, size: str, memory: int) -> str:
    traced = cells[size, "ddp"].traced
    assert traced is not None
    fits = "fits" if traced.fits else "does not fit"
    return f"{size} {fits}: {traced.needed / GIB:.1f} of {memory / GIB:.1f} GiB, traced"


def _alike(cells: Cells, size: str) -> str:
    ddp, fsdp = (cells[size, name].teraflops(NODE) for name in COMPARED)
    return f"{size}: FSDP2 has {100 * fsdp / ddp:.0f} % of DDP's TFLOP/s on {NODE} GPUs"


def _losses(cells: Cells) -> list[str]:
    fsdp, hsdp = (cells[LARGEST, name] for name in ("fsdp2", "hsdp"))
    first, last = min(GPU_COUNTS), max(GPU_COUNTS)
    return [
        f"FSDP2 {_loses(fsdp.loss())} from {first} to {last} GPUs",
        f"FSDP2 {_loses(fsdp.loss(all_links=True))} with all links",
        f"HSDP {_loses(hsdp.loss())} from {2 * NODE} to {last}",
    ]


def _loses(share: float) -> str:
    return f"{'loses' if share > 0 else 'gains'} {abs(100 * share):.1f} %"


def _traffic(cells: Cells, count: int) -> Chapter:
    """Textbook bytes of one step in units of P, the bytes of the weights in float32."""
    rows = []
    for strategy in SWEPT_STRATEGIES:
        each = [_sent(cells[SMALLEST, strategy], phase) / (FLOAT32 * count) for phase in STEP_PHASES]
        rows.append((strategy, *(f"{share:.2f}" for share in each), f"{sum(each):.2f}"))
    lines = [
        *columns((f"one step of {SMALLEST}", *STEP_PHASES, "sum"), rows),
        "P: bytes of the weights in float32. Weights are gathered in bfloat16, which halves their share; gradients are",
        "reduced in float32. In one format for both, DDP moves 2 P and sharded weights 3 P: half as much again.",
        "HSDP's gradients go on between machines, each rank's shard by an all-reduce.",
    ]
    return Chapter("Is the overhead of sharding larger than DDP's? Bytes a GPU sends, in units of P", lines)


def _sharding(cells: Cells, count: int) -> Chapter:
    """The notes' 4, 8 and N times, by both ways of counting; and by the plan."""
    rows = []
    for stage, (name, claimed) in enumerate(STAGES.items()):
        cells_of_row: list[str] = []
        for counted in WAYS_OF_COUNTING.values():
            whole, each = (bytes_a_parameter(*counted, at, SHARDING_RANKS) for at in (0, stage))
            cells_of_row += [f"{each:.2f}", f"{whole / each:.1f}"]
        rows.append((name, *cells_of_row, claimed))
    head = (
        f"bytes a parameter on {SHARDING_RANKS} GPUs",
        *(word for name in WAYS_OF_COUNTING for word in (name, "times")),
        "notes",
    )
    plans = [cells[SMALLEST, name].traced for name in ("ddp", "fsdp2")]
    ddp, fsdp = (state_bytes(each) / count for each in plans if each is not None)
    lines = [
        *columns(head, rows),
        "16-bit weights: 2 and 2, beside 12 of float32 masters and moments. float32 weights: 4 and 4, moments 8.",
        f"The plan, {SMALLEST} on {NODE} GPUs in the update: DDP {ddp:.2f}, FSDP2 {fsdp:.2f}, {ddp / fsdp:.1f} times.",
    ]
    return Chapter("How much do shards of states, gradients and weights save?", lines)
