"""The lecture `scaling`: the tables and the picture, with the published points beside the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from finetune.lectures.output import Chapter, LectureRequest, Told, columns
from finetune.lectures.scaling.plans import (
    GPU,
    GPU_COUNTS,
    HEAD,
    NODE,
    PUBLISHED,
    ROWS,
    SHARDING_RANKS,
    SHARDINGS,
    TOKENS,
    Cell,
    bytes_a_parameter,
    decoder_config_of,
    gpus_of_ranks,
    parameters_of,
    plan_cell,
    state_bytes,
    with_model,
)
from finetune.measure.units import GIB
from finetune.planner.roofline import CHIPS
from finetune.recipe.loader import load_recipe
from finetune.report.pictures import COLOURS, new_figure

# Bytes of a weight, a gradient and the optimizer's part: as the ZeRO paper counts, and as this kit trains in float32.
WAYS_OF_COUNTING = {"16-bit weights": (2, 2, 12), "float32 weights": (4, 4, 8)}
STAGES = {"DDP": "1", "ZeRO-1": "up to 4", "ZeRO-2": "up to 8", "ZeRO-3, FSDP": f"{SHARDING_RANKS}"}  # the notes' times
Cells = Mapping[tuple[str, str], Cell]


def scaling_lecture(asked: LectureRequest) -> Told:
    """Raises FinetuneError, of the recipe."""
    recipe = load_recipe(asked.recipe, asked.overrides).recipe
    cells: dict[tuple[str, str], Cell] = {}
    counts: dict[str, int] = {}
    for size, (parameters, hidden, layers) in PUBLISHED.items():
        config = decoder_config_of(parameters, hidden, layers)
        counts[size] = parameters_of(config)
        for strategy in SHARDINGS[size]:
            asked.note(f"planning {size} under {strategy}")
            cells[size, strategy] = plan_cell(
                with_model(recipe, config, asked.folder / "models" / size), strategy, config
            )
    memory = gpus_of_ranks(NODE).memory
    sections = [
        _sizes(counts),
        _memory(cells, memory),
        _speed(cells, memory),
        _beside(cells, memory),
        _traffic(cells, counts),
        _sharding(cells, counts["611M"]),
    ]
    facts = {
        "recipe": str(asked.recipe),
        "overrides": list(asked.overrides),
        "parameters": counts,
        "gpu_bytes": memory,
        "cells": {" ".join(key): _facts(cell) for key, cell in cells.items()},
        "states_bytes": {name: state_bytes(cells["611M", name].planned) for name in ("ddp", "fsdp2")},
    }
    return Told(sections, facts, partial(_draw, cells, memory))


def _facts(cell: Cell) -> dict[str, Any]:
    return {
        "traced_ranks": cell.planned.ranks,
        "traced_bytes": cell.planned.needed,
        "traced_fits": cell.planned.fits,
        "needed_bytes": {str(ranks): needed for ranks, needed in cell.needed.items()},
        "teraflops": {str(ranks): cell.teraflops(ranks) for ranks in cell.times},
        "exposed_share": {str(ranks): time.exposed / time.seconds for ranks, time in cell.times.items()},
    }


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

    return Chapter(f"GiB of a GPU that has {memory / GIB:.1f} (! does not fit)", _grid(cells, shown))


def _speed(cells: Cells, memory: int) -> Chapter:
    def shown(cell: Cell, ranks: int) -> str:
        if cell.needed[ranks] > memory:
            return "-"
        return f"{cell.teraflops(ranks):.0f}, {100 * cell.times[ranks].exposed / cell.times[ranks].seconds:.1f} %"

    chip = CHIPS[GPU]
    lines = [
        *_grid(cells, shown),
        f"A bound by makers' figures: {chip.half / 1e12:.0f} TFLOP/s, {chip.link / 1e9:.0f} GB/s to GPUs of the "
        f"machine, {chip.between / 1e9:.0f} to others.",
        "Without congestion and waiting for each other, which grow with the ranks; a collective's start costs nothing.",
    ]
    return Chapter("TFLOP/s of a GPU at most, and the share of the step that waits for communication", lines)


def _beside(cells: Cells, memory: int) -> Chapter:
    """Each published statement beside the plan's figure."""
    largest, middle = cells["11.3B", "fsdp2"], cells["2.28B", "ddp"]
    ratios = {size: cells[size, "fsdp2"].teraflops(8) / cells[size, "ddp"].teraflops(8) for size in ("611M", "2.28B")}
    alike = ", ".join(f"{size}: {100 * ratio:.0f} % of DDP's TFLOP/s" for size, ratio in ratios.items())
    verdicts = [
        f"{size} {'fits' if planned.fits else 'does not fit'}, {planned.needed / GIB:.1f} of {memory / GIB:.1f} GiB"
        for size, planned in (("2.28B", middle.planned), ("11.3B", cells["11.3B", "ddp"].planned))
    ]
    hsdp = cells["11.3B", "hsdp"]
    rows = [
        ("DDP runs 2.28B and is out of memory at 11.3B", f"by the trace {'; '.join(verdicts)}"),
        ("FSDP and DDP are alike on 611M and 2.28B", f"FSDP2 on 8 GPUs: {alike}"),
        (
            "11.3B loses 7 % of TFLOP/s from 8 to 512 GPUs",
            f"FSDP2 {100 * largest.loss:.1f} %, HSDP {100 * hsdp.loss:.1f} %",
        ),
    ]
    return Chapter("The published points beside the plan", columns(("published", "planned"), rows, left=2))


def _traffic(cells: Cells, counts: Mapping[str, int]) -> Chapter:
    """Textbook bytes of one step in units of P, the bytes of the weights in float32."""
    rows = []
    for strategy in SHARDINGS["611M"]:
        work, weights = cells["611M", strategy].planned.work, 4 * counts["611M"]
        each = [
            sum(stats.textbook_bytes for stats in work.collectives.get(phase, {}).values()) / weights
            for phase in ("forward", "backward", "step")
        ]
        rows.append((strategy, *(f"{share:.2f}" for share in each), f"{sum(each):.2f}"))
    lines = [
        *columns(("one step of 611M", "forward", "backward", "step", "sum"), rows),
        "P: bytes of the weights in float32. Weights are gathered in bfloat16, which halves their share; gradients are",
        "reduced in float32. In one format for both, DDP moves 2 P and sharded weights 3 P: half as much again.",
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
    ddp, fsdp = (state_bytes(cells["611M", name].planned) / count for name in ("ddp", "fsdp2"))
    lines = [
        *columns(head, rows),
        "16-bit weights: 2 and 2, beside 12 of float32 masters and moments. float32 weights: 4 and 4, moments 8.",
        f"The plan, 611M on {NODE} GPUs in the update: DDP {ddp:.2f}, FSDP2 {fsdp:.2f}, {ddp / fsdp:.1f} times.",
    ]
    return Chapter("How much do shards of states, gradients and weights save?", lines)


def _draw(cells: Cells, memory: int, file: Path) -> None:
    """Memory and TFLOP/s of a GPU over the number of GPUs."""
    figure = new_figure(figsize=(9.0, 7.5))
    top, bottom = figure.subplots(2, 1)
    styles = dict(zip(SHARDINGS["11.3B"], ("o-", "s--", "^:"), strict=True))
    colours = dict(zip(PUBLISHED, COLOURS, strict=False))
    for (size, strategy), cell in cells.items():
        style = {"color": colours[size], "markersize": 5, "label": f"{size} {strategy}"}
        top.plot(list(cell.needed), [each / GIB for each in cell.needed.values()], styles[strategy], **style)
        fitting = [ranks for ranks in cell.times if cell.needed[ranks] <= memory]
        bottom.plot(fitting, [cell.teraflops(ranks) for ranks in fitting], styles[strategy], **style)
    top.axhline(memory / GIB, color="#a00000", linewidth=1)
    top.annotate(
        f"{GPU}: {memory / GIB:.1f} GiB", (GPU_COUNTS[-1], memory / GIB), (0, 4), textcoords="offset points", ha="right"
    )
    top.set_yscale("log")
    top.set_ylabel("GiB of a GPU")
    bottom.set_ylabel("TFLOP/s of a GPU, at most")
    for axes, title in ((top, "Memory by the plan"), (bottom, "Speed by the plan's bound, where it fits")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(GPU_COUNTS, [str(ranks) for ranks in GPU_COUNTS])
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    bottom.set_xlabel("GPUs")
    top.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.0))
    figure.savefig(file)
