"""A comparison as tables for the terminal and as one chart."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from finetune.errors import EnvironmentMismatch
from finetune.output_stream import rich_console
from finetune.preflight.compare_rows import SEED_KEY, STRATEGY_KEY
from finetune.preflight.comparison import (
    MEMORY_NOTES,
    TRAFFIC_NOTES,
    Comparison,
    Measure,
    Row,
    compare,
    compare_one,
    points_of,
    preference_verdict,
)
from finetune.report.pictures import Chart, Series, save_png
from finetune.wording import counted

MEASURE_WORDS: dict[Measure, str] = {
    "loss": "loss",
    "reward_accuracy": "reward accuracy",
    "reward_margin": "reward margin",
    "kl_by_token": "KL by token",
    "kl": "KL baseline",
    "logp_chosen_by_token": "log-p chosen",
    "logps_chosen": "log-p chosen",
}
COLUMN_HEADS = MEASURE_WORDS | {
    "reward_accuracy": "accuracy",
    "reward_margin": "margin",
    "kl_by_token": "KL",
    "kl": "KL base",
}
COLUMN_HEADS |= dict.fromkeys(("logp_chosen_by_token", "logps_chosen"), "log-p\nchosen")
SHOWN_PHASES = ("load", "forward", "backward", "step")
MOVING = ("forward", "backward", "step")  # traffic while loading is paid once


def run_and_report(comparison: Comparison, *, quiet: bool, only: int | None = None) -> dict[str, Any]:
    """Run the comparison, show its progress on standard error, write table and picture.

    `only`: run this row alone, from 1, as a task of a job array.

    Raises EnvironmentMismatch after everything is written, if no row ran, or if rows that should learn the same end at
    different losses.
    """
    result = _run_with_progress(comparison, only)
    if not quiet:
        print_tables(result, rich_console())
    draw(result, comparison.folder / "compare.png")
    if not any(row["ok"] for row in result["rows"]):
        raise EnvironmentMismatch("compare: no row ran; the reasons are above, the logs beside compare.json")
    if not result["losses"]["agree"]:
        differing = {name for group in result["losses"]["groups"] if not group["agree"] for name in group["rows"]}
        rows = [row for row in result["rows"] if row["name"] in differing]
        losses = ", ".join(f"{row['name']} {row['final_loss']:.6f}" for row in rows)
        raise EnvironmentMismatch(f"compare: rows that should learn the same do not: final losses {losses}")
    if not quiet:
        print(f"{comparison.folder}: compare.json, compare.png, logs/")
    return result


def _run_with_progress(comparison: Comparison, only: int | None) -> dict[str, Any]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def show(name: str, step: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(escape(name), total=comparison.steps)
            task = tasks[name]
            if step is None:
                bars.stop_task(task)
            else:
                bars.update(task, completed=step)

        if only is not None:
            return compare_one(comparison, only, show)
        return compare(comparison, show)


def where_it_ran(result: dict[str, Any], rows: Sequence[Row]) -> str:
    """The rows' processes, the device and the steps: `1 process on the CPU, 20 steps`."""
    sizes = sorted({row["world_size"] for row in rows})
    processes = counted(sizes[0], "process", "processes")
    if len(sizes) > 1:
        processes = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]} processes"
    device = "the CPU" if result["device"] == "cpu" else result["device"]
    return f"{processes} on {device}, {counted(result['steps'], 'step')}"


def unit_of(largest: int) -> tuple[str, int]:
    """One unit for all bytes of a table or a panel, after its largest figure."""
    for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if largest >= size:
            return name, size
    return "B", 1


def print_tables(result: dict[str, Any], console: Console) -> None:
    """Memory per phase; time, traffic and loss; then reasons of the rows that failed, and what to know."""
    rows = [row for row in result["rows"] if row["ok"]]
    head = _first_heading(result)
    ranking = result.get("ranking") or []
    # A sweep of other keys than the strategy is about the ranking. `finetune report` shows its memory.
    costs = not ranking or STRATEGY_KEY in result["varied"]
    if rows:
        device = where_it_ran(result, rows)
        tables = []
        if ranking:
            tables.append(_ranking_table(ranking, head, device, result["ranked_by"]))
        if costs:
            tables.append(_memory_table(rows, head, device, host=result["device"] != "cpu"))
            tables.append(_traffic_table(rows, head))
        for title, table in tables:
            console.print(title, markup=False, highlight=False, style="bold")  # a table's own title breaks at its width
            console.print(table)
    for row in result["rows"]:
        if not row["ok"]:
            console.print(f"{row['name']}: did not run: {row['reason']}", markup=False, highlight=False)
    for line in _losses_in_words(result["losses"]["groups"]):
        console.print(line, markup=False, highlight=False)
    warnings = preference_verdict(ranking)
    for note in result["notes"]:
        if costs or note not in (*MEMORY_NOTES, *TRAFFIC_NOTES):
            console.print(note, markup=False, highlight=False, style=None if note in warnings else "dim")


def _first_heading(result: dict[str, Any]) -> str:
    """`strategy`, or the one key that rows differ in: its name is above the rows then, and not in each of them."""
    keys = [key for key in result["varied"] if key != SEED_KEY]
    if keys == [STRATEGY_KEY]:
        return "strategy"
    name = keys[0].rpartition(".")[2] if len(keys) == 1 else ""
    if name and all(row["name"].startswith(f"{name}=") for row in result["rows"]):
        return name
    return "row"


def _first_cell(name: str, head: str) -> str:
    return escape(name.removeprefix(f"{head}="))


def _ranking_table(ranking: Sequence[dict[str, Any]], head: str, device: str, measure: Measure) -> tuple[str, Table]:
    """The rows by their best held-out figure: the lowest loss, or the highest reward accuracy or margin, first."""
    when = "Final training" if ranking[0]["step"] is None else "Best held-out"
    order = "lowest" if measure == "loss" else "highest"
    title = f"{when} {MEASURE_WORDS[measure]}, the {order} first ({device})"
    table = Table(box=SIMPLE_HEAD)
    widest = max(len(word) for entry in ranking for word in _first_cell(entry["name"], head).split())
    table.add_column(head.replace("_", "_\n"), overflow="fold", min_width=min(widest, 24))
    with_seeds = any(len(entry["rows"]) > 1 for entry in ranking)
    beside: list[Measure] = list(dict.fromkeys(name for entry in ranking for name in entry.get("beside", {})))
    if "logp_chosen_by_token" in beside:  # of KTO's answers only the sum is known
        beside = [name for name in beside if name != "logps_chosen"]
    names = [
        COLUMN_HEADS[measure],
        *[COLUMN_HEADS[name] for name in beside],
        *["seeds"] * with_seeds,
        "at\nstep",
        "s a\nstep",
    ]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for entry in ranking:
        cells = [_best_cell(entry, measure), *[_figure(name, entry.get("beside", {}).get(name)) for name in beside]]
        cells += [str(len(entry["rows"]))] * with_seeds
        table.add_row(_first_cell(entry["name"], head), *cells, str(entry["step"] or "-"), f"{entry['seconds']:.2f}")
    return title, table


def _best_cell(entry: dict[str, Any], measure: Measure) -> str:
    """An entry's best figure, with half the range over its seeds."""
    if len(entry["rows"]) > 1:
        return f"{_figure(measure, entry['best'])} ± {_figure(measure, entry['spread'])}"
    return _figure(measure, entry["best"])


def _figure(measure: Measure, value: float | None) -> str:
    if value is None:
        return "-"
    match measure:
        case "loss":
            return f"{value:.4f}"
        case "reward_accuracy":
            return f"{value:.1%}"
        case "kl_by_token" | "logp_chosen_by_token":
            return f"{value:.2f}"
        case _:
            return f"{value:.3g}"


def _losses_in_words(groups: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each group of rows that learn the same, where there are two or more of them."""
    for group in groups:
        if len(group["rows"]) > 1:
            names = "" if len(groups) == 1 else f" of {', '.join(group['rows'])}"
            verdict = "agree" if group["agree"] else "DIFFER"
            worst, bound = group["worst_relative_difference"], group["bound"]
            yield f"final losses{names} {verdict}: worst relative difference {worst:.1e}, bound {bound:g}"


def _memory_table(rows: Sequence[Row], head: str, device: str, *, host: bool) -> tuple[str, Table]:
    """Peak / allocated of each phase; on GPUs the host's peak beside the device's."""
    unit, size = unit_of(max(entry["peak_bytes"] for row in rows for entry in row["phases"].values()))
    title = f"Memory of a rank in {unit}, peak / allocated ({device})"
    table = Table(box=SIMPLE_HEAD)
    table.add_column(head, overflow="fold")
    for phase in (*SHOWN_PHASES, *["host"] * host):
        table.add_column(phase, justify="right", no_wrap=True)
    for row in rows:
        cells = [_memory_cell(row["phases"].get(phase), size) for phase in SHOWN_PHASES]
        if host:
            cells.append(_short(max(entry["host_peak_bytes"] for entry in row["phases"].values()) / size))
        table.add_row(_first_cell(row["name"], head), *cells)
    return title, table


def _memory_cell(entry: dict[str, Any] | None, size: int) -> str:
    if entry:
        return f"{_short(entry['peak_bytes'] / size)} / {_short(entry['allocated_bytes'] / size)}"
    return "-"


def _short(value: float) -> str:
    """Three figures, or two decimals."""
    if value < 10:
        return f"{value:.2f}"
    if value < 100:
        return f"{value:.1f}"
    return f"{value:.0f}"


def _traffic_table(rows: Sequence[Row], head: str) -> tuple[str, Table]:
    """Seconds, collectives and bytes of each phase of a step, and the final loss."""
    unit, size = unit_of(max(moved_per_step(row) for row in rows))
    title = f"Seconds of 20 steps, traffic of a step in {unit} (collectives), final loss"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(head, overflow="fold")
    for name in ("s/20", *MOVING, "sum", "in P", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [_traffic_cell(row["phases"][phase], size) for phase in MOVING]
        seconds, total, loss = row["seconds_per_20_steps"], moved_per_step(row) / size, row["final_loss"]
        table.add_row(
            _first_cell(row["name"], head),
            f"{seconds:.2f}",
            *cells,
            _short(total),
            _multiple(row) or "-",
            f"{loss:.5f}",
        )
    return title, table


def _traffic_cell(entry: dict[str, Any], size: int) -> str:
    calls = sum(entry["collectives"].values())
    if calls:
        return f"{_short(entry['textbook_bytes'] / size)} ({calls})"
    return "-"


def moved_per_step(row: Row) -> int:
    """Textbook bytes that one rank moves in one step."""
    return sum(row["phases"][phase]["textbook_bytes"] for phase in MOVING)


def _multiple(row: Row) -> str:
    """The traffic in units of P, the bytes of the weights. Empty if some are frozen: some engines move those too."""
    if row["all_trained"]:
        return f"{moved_per_step(row) / row['trained_bytes']:.2f}"
    return ""


def draw(result: dict[str, Any], file: Path) -> None:
    """The picture: a sweep's held-out curves, else memory by phase. Nothing if no row ran."""
    rows = [row for row in result["rows"] if row["ok"]]
    if rows:
        chart = _curves(result, rows) if result.get("ranking") else _memory_bars(rows)
        title = f"{Path(result['recipe']).stem}, {where_it_ran(result, rows)}: {chart.title}"
        save_png(replace(chart, title=title), file)


def _curves(result: dict[str, Any], rows: Sequence[Row]) -> Chart:
    """Held-out loss or reward by step, the best setting first. A setting with several seeds shows their mean."""
    by_name = {row["name"]: row for row in rows}
    measure: Measure = result["ranked_by"]
    held_out = any(len(points_of(row, measure)) > 1 for row in rows)
    measure = measure if held_out else "loss"  # of training lines the loss alone is kept
    series = []
    for entry in result["ranking"]:
        seeds = [by_name[name] for name in entry["rows"]]
        of_seeds = [points_of(row, measure) if held_out else list(enumerate(row["losses"], 1)) for row in seeds]
        points = [
            (points[0][0], statistics.fmean(value for _, value in points)) for points in zip(*of_seeds, strict=False)
        ]
        label = f"{entry['name']}: {_best_cell(entry, result['ranked_by'])}"
        if entry.get("too_far"):
            label += f", {entry['too_far'].partition(':')[0]}"
        series.append(Series(label, points))
    return Chart(f"{'held-out' if held_out else 'training'} {MEASURE_WORDS[measure]}", series)


def _memory_bars(rows: Sequence[Row]) -> Chart:
    """Each row's peak in each phase."""
    unit, size = unit_of(max(entry["peak_bytes"] for row in rows for entry in row["phases"].values()))
    series = [
        Series(
            row["name"],
            [
                (place, row["phases"][phase]["peak_bytes"] / size)
                for place, phase in enumerate(SHOWN_PHASES)
                if phase in row["phases"]
            ],
        )
        for row in rows
    ]
    return Chart(f"peak memory of a rank, {unit}", series, SHOWN_PHASES)
