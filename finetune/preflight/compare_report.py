"""A comparison as tables for the terminal and as one picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
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
    best_entry,
    compare,
    points_of,
    preference_verdict,
)
from finetune.report.pictures import new_figure
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
TICK_CHARACTERS = 21  # below a group of bars
PHASE_COLOURS = {"load": "#7f7f7f", "forward": "#4c78a8", "backward": "#f58518", "step": "#54a24b"}


def run_and_report(comparison: Comparison, *, quiet: bool) -> dict[str, Any]:
    """Run the comparison, show its progress on standard error, write table and picture.

    Raises EnvironmentMismatch after everything is written, if no row ran, or if rows that should learn the same end at
    different losses.
    """
    result = _run_with_progress(comparison)
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


def _run_with_progress(comparison: Comparison) -> dict[str, Any]:
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
    left_out: set[str] = set()  # notes on tables that are not shown
    if rows:
        device = where_it_ran(result, rows)
        tables = []
        ranking = result.get("ranking") or []
        if ranking:
            tables.append(_ranking_table(ranking, head, device, result["ranked_by"]))
        if not ranking or memory_differs(rows, ranking):
            tables.append(_memory_table(rows, head, device, host=result["device"] != "cpu"))
        else:
            left_out |= {*MEMORY_NOTES}
        if not ranking or traffic_differs(rows):
            tables.append(_traffic_table(rows, head))
        else:
            left_out |= {*TRAFFIC_NOTES}
        for title, table in tables:
            console.print(title, markup=False, highlight=False, style="bold")  # a table's own title breaks at its width
            console.print(table)
    for row in result["rows"]:
        if not row["ok"]:
            console.print(f"{row['name']}: did not run: {row['reason']}", markup=False, highlight=False)
    for line in _losses_in_words(result["losses"]["groups"]):
        console.print(line, markup=False, highlight=False)
    warnings = preference_verdict(result.get("ranking") or [])
    for note in result["notes"]:
        if note not in left_out:
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


def memory_differs(rows: Sequence[Row], ranking: Sequence[dict[str, Any]]) -> bool:
    """Whether some phase's peak differs by more than a fiftieth between the ranking's entries.

    An entry's peak is its seeds' largest, because each seed draws other batches.
    """
    phases_of = {row["name"]: row["phases"] for row in rows}
    for phase in SHOWN_PHASES:
        peaks = []
        for entry in ranking:
            of_seeds = [phases_of[name] for name in entry["rows"] if phase in phases_of.get(name, {})]
            if of_seeds:
                peaks.append(max(phases[phase]["peak_bytes"] for phases in of_seeds))
        if peaks and max(peaks) > 1.02 * min(peaks):
            return True
    return False


def traffic_differs(rows: Sequence[Row]) -> bool:
    """Whether rows move different numbers of bytes in a step."""
    return len({moved_per_step(row) for row in rows}) > 1


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
    """The picture: held-out curves where rows learn differently, else memory per phase, seconds, traffic."""
    rows = [row for row in result["rows"] if row["ok"]]
    if not rows:
        return
    if result.get("ranking"):
        _draw_curves(result, rows, file)
        return
    figure = new_figure(figsize=(max(9.0, 2.5 + 1.5 * len(rows)), 11))
    memory, seconds, traffic = figure.subplots(3, 1, height_ratios=[2.2, 1, 1.3])
    where = where_it_ran(result, rows)
    figure.suptitle(f"{Path(result['recipe']).stem}: {where}", fontweight="bold")
    _draw_memory(memory, rows)
    _draw_seconds(seconds, rows)
    _draw_traffic(traffic, rows)
    absent = [row["name"] for row in result["rows"] if not row["ok"]]
    if absent:
        figure.supxlabel(f"did not run: {', '.join(absent)} (reasons in compare.json)", fontsize=9, color="#a00000")
    figure.savefig(file)


def _draw_curves(result: dict[str, Any], rows: Sequence[Row], file: Path) -> None:
    """Held-out loss, or reward, of every row by step: a colour for each setting, a line for each seed, the best one
    thick."""
    from matplotlib import colormaps

    figure = new_figure(figsize=(9.0, 5.5))
    axes = figure.subplots()
    by_name = {row["name"]: row for row in rows}
    measure: Measure = result["ranked_by"]
    held_out = any(len(points_of(row, measure)) > 1 for row in rows)
    measure = measure if held_out else "loss"  # of training lines the loss alone is kept
    factor = 100 if measure == "reward_accuracy" else 1
    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    best = best_entry(result["ranking"])
    for place, entry in enumerate(result["ranking"]):
        for number, name in enumerate(entry["rows"]):
            row = by_name[name]
            points = points_of(row, measure) if held_out else list(enumerate(row["losses"], 1))
            axes.plot(
                [step for step, _ in points],
                [factor * value for _, value in points],
                color=colours[place % len(colours)],
                linewidth=2.6 if entry is best else 1.4,
                marker="o" if held_out else None,
                markersize=3.5,
                label=_legend(entry, result["ranked_by"]) if number == 0 else None,
            )
    axes.set_xlabel("optimizer step")
    unit = ", %" if measure == "reward_accuracy" else ""
    axes.set_ylabel(f"{'held-out' if held_out else 'training'} {MEASURE_WORDS[measure]}{unit}")
    where = where_it_ran(result, rows)
    axes.set_title(
        f"{Path(result['recipe']).stem}: {where}{'' if best is None else '; thick: the best'}", loc="left", fontsize=11
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    absent = [row["name"] for row in result["rows"] if not row["ok"]]
    if absent:
        figure.supxlabel(f"did not run: {', '.join(absent)} (reasons in compare.json)", fontsize=9, color="#a00000")
    figure.savefig(file)


def _legend(entry: dict[str, Any], measure: Measure) -> str:
    words = f"{entry['name']}: {_best_cell(entry, measure)}"
    if entry.get("too_far"):
        words += f", {entry['too_far'].partition(':')[0]}"
    return words


def _draw_memory(axes: Any, rows: Sequence[Row]) -> None:
    """Grouped bars: a phase's peak, pale, and in it what stays allocated at its end."""
    unit, size = unit_of(max(entry["peak_bytes"] for row in rows for entry in row["phases"].values()))
    width = 0.8 / len(SHOWN_PHASES)
    for position, phase in enumerate(SHOWN_PHASES):
        places = [index + (position - (len(SHOWN_PHASES) - 1) / 2) * width for index in range(len(rows))]
        entries = [row["phases"].get(phase, {"peak_bytes": 0, "allocated_bytes": 0}) for row in rows]
        peaks = [entry["peak_bytes"] / size for entry in entries]
        allocated = [entry["allocated_bytes"] / size for entry in entries]
        colour = PHASE_COLOURS[phase]
        axes.bar(places, peaks, width * 0.92, color=_pale(colour))
        axes.bar(places, allocated, width * 0.92, color=colour, label=phase)
        for place, peak in zip(places, peaks, strict=True):
            axes.annotate(
                _short(peak), (place, peak), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=8
            )
    _finish(axes, rows, f"{unit} on one rank", "Memory per phase: peak (pale) and allocated at the end (full)")
    axes.legend(ncols=len(SHOWN_PHASES), loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_seconds(axes: Any, rows: Sequence[Row]) -> None:
    values = [row["seconds_per_20_steps"] for row in rows]
    bars = axes.bar(range(len(rows)), values, 0.5, color="#72b7b2")
    axes.bar_label(bars, fmt="{:.2f}", padding=2, fontsize=8)
    _finish(axes, rows, "seconds", "Time of 20 steps")


def _draw_traffic(axes: Any, rows: Sequence[Row]) -> None:
    """Stacked bars: textbook bytes of one step, by phase."""
    unit, size = unit_of(max(moved_per_step(row) for row in rows))
    bottom = [0.0] * len(rows)
    for phase in MOVING:
        heights = [row["phases"][phase]["textbook_bytes"] / size for row in rows]
        axes.bar(range(len(rows)), heights, 0.5, bottom=bottom, color=PHASE_COLOURS[phase], label=phase)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    for index, (row, top) in enumerate(zip(rows, bottom, strict=True)):
        calls = sum(sum(row["phases"][phase]["collectives"].values()) for phase in MOVING)
        multiple = f" = {_multiple(row)} P" if _multiple(row) else ""
        text = f"{_short(top)}{multiple}\n{calls} collectives"
        axes.annotate(text, (index, top), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=8)
    _finish(axes, rows, f"{unit} of one rank", "Traffic of one step, textbook bytes (P: bytes of the weights)")
    axes.set_ylim(0, 1.3 * max(*bottom, 1e-9))  # matplotlib leaves no margin above a part of no height


def _finish(axes: Any, rows: Sequence[Row], unit: str, title: str) -> None:
    most = max(row["world_size"] for row in rows)
    names = [row["name"] if row["world_size"] == most else f"{row['name']}, 1 rank" for row in rows]
    axes.set_xticks(range(len(rows)), [_in_lines(name) for name in names])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylabel(unit)
    axes.set_title(title, loc="left", fontsize=11)
    axes.margins(y=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def _in_lines(name: str) -> str:
    """A row's name below its bars."""
    return textwrap.fill(name, TICK_CHARACTERS, break_on_hyphens=False)


def _pale(colour: str) -> tuple[float, ...]:
    """Between the colour and white; not transparent, so that no grid shows through."""
    from matplotlib.colors import to_rgb

    return tuple(0.4 * part + 0.6 for part in to_rgb(colour))
