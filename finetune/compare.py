"""`finetune compare`: one loop around `finetune train`, over settings of a recipe.

A row that fails, or that this machine refuses, keeps its reason. A row whose run folder says that it finished, with the
same recipe, base and data, is not run again. Trained weights are deleted; metrics and logs stay.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from finetune.base.identity import base_identity, is_same_base, recorded_base
from finetune.data.sources import resolve
from finetune.errors import EnvironmentMismatch, FinetuneError, RecipeError
from finetune.files import read_lines, remove_folder, write_json
from finetune.launch.watched_job import failure_reason
from finetune.launch.with_parent import with_parent
from finetune.output_stream import rich_console
from finetune.recipe.loader import COMMAND_LINE, load_recipe, recipe_from_resolved
from finetune.recipe.mixed_precision import BASE_FORMAT, PRECISION
from finetune.recipe.resolved import LoadedRecipe
from finetune.recipe.sections.preferences import too_far
from finetune.recipe.strategy import strategy_of
from finetune.report.pictures import Chart, Series, save_png
from finetune.run_folder.facts import read_state
from finetune.untrusted.json_files import read_object
from finetune.wording import PHASES

MOST_ROWS = 200  # each is a training of its own
EVALUATIONS = 6  # of each row
NOT_VARIED = {
    "strategy": "is no recipe key; write --vary accelerate_config=zero2,zero3,fsdp2",
    "output_dir": "each row has its own; name the comparison's folder by -o",
}
COMPARED_REWARDS = ("reward_accuracy", "reward_margin", "kl_by_token", "kl", "logp_chosen_by_token", "logps_chosen")
# A comparison sets these for every job. A recipe's own are overridden; the command line may not name them.
JOB_SETTINGS = {
    "training.early_stopping_patience": "null",
    "training.load_best_model_at_end": "false",
    "training.resume": "never",
    "logging_steps": "1",
    "measure_phases": "true",
    "samples.count": "0",
    "samples.prompts": "null",
    "hub.push": "false",
    "hub.checkpoints": "null",
    "run.storage": "null",
    "run.stop_after": "null",
}

Row = dict[str, Any]
RowSettings = Mapping[str, str]  # dotted key -> value, as on a command line


@dataclass(frozen=True)
class ComparedRow:
    """A row whose recipe was read and is right."""

    name: str
    settings: RowSettings
    folder: Path  # of its run
    log: Path
    words: tuple[str, ...]  # of its job's command line, after the recipe
    loaded: LoadedRecipe  # as its job reads it


@dataclass(frozen=True)
class Comparison:
    """The rows to compare, and the folder for the results."""

    recipe: Path
    overrides: tuple[str, ...]
    rows: tuple[ComparedRow, ...]
    steps: int
    folder: Path

    @property
    def ranked_by(self) -> str:
        """The held-out figure that ranks rows: the loss, or of preferences a reward. Another beta scales losses."""
        recipes = [row.loaded.recipe for row in self.rows]
        if any(recipe.preferences is None for recipe in recipes):
            return "loss"
        metric = recipes[0].training.metric_for_best_model.removeprefix("eval_")
        is_one_objective = len({repr(recipe.preferences) for recipe in recipes}) == 1
        return "reward_accuracy" if metric == "loss" and not is_one_objective else metric


def settings_of_rows(vary: Sequence[str], seeds: int = 1) -> dict[str, RowSettings]:
    """Each row's name and settings: the product of all `KEY=A,B` and of several seeds. Raises FinetuneError."""
    axes: dict[str, list[str]] = {}
    for word in [*vary, *[f"training.seed={','.join(map(str, range(1, seeds + 1)))}"] * (seeds > 1)]:
        key, _, text = (part.strip() for part in word.partition("="))
        values = list(dict.fromkeys(filter(None, _split_values(text))))
        if not key or not values or key in axes:
            raise FinetuneError(f"--vary: {word}: write each key once, as training.learning_rate=1e-4,5e-4")
        if key in NOT_VARIED:
            raise FinetuneError(f"--vary: {key}: {NOT_VARIED[key]}")
        axes[key] = values
    count = math.prod(map(len, axes.values()))
    if not axes or count > MOST_ROWS:
        problem = f"{count:,} rows: a comparison has {MOST_ROWS} at most" if axes else "nothing varies"
        raise FinetuneError(f"--vary: {problem}; for example --vary accelerate_config=zero2,zero3,fsdp2")
    ends = [key.rpartition(".")[2] for key in axes]
    shown = [end if ends.count(end) == 1 else key for end, key in zip(ends, axes, strict=True)]
    rows = [dict(zip(axes, chosen, strict=True)) for chosen in product(*axes.values())]
    return {" ".join(map("=".join, zip(shown, row.values(), strict=True))): row for row in rows}


def _split_values(text: str) -> list[str]:
    """Split at commas, but not within brackets or quotes, however deep: "{a: [1, 2]},null" has two values."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += 0 if quote else (letter in "{[") - (letter in "}]")
        if letter == "," and not quote and depth <= 0:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def plan_comparison(
    recipe: Path, overrides: Sequence[str], requested: Mapping[str, RowSettings], *, steps: int, folder: Path | None
) -> Comparison:
    """Read the recipe of every row, by name and settings, before anything runs. Raises RecipeError, FinetuneError."""
    run_dir = Path(load_recipe(recipe, overrides).recipe.run_dir)
    folder = folder or run_dir.with_name(f"{run_dir.name}_compare")
    if folder.exists() and any(folder.iterdir()) and not (folder / "compare.json").is_file():
        raise FinetuneError(f"{folder}: is not a comparison's folder and not empty; name another folder with -o")
    rows = []
    for number, (name, settings) in enumerate(requested.items(), 1):
        words = [*overrides, *(f"{key}={value}" for key, value in settings.items())]
        job = folder / "jobs" / f"{number:03d}_{re.sub('[^A-Za-z0-9_-]+', '_', name)[:60]}"
        try:
            own = _own_settings(load_recipe(recipe, words), steps)
            words += [f"{key}={value}" for key, value in own.items()] + [f"output_dir={job}"]
            loaded = load_recipe(recipe, words)
            strategy_of(loaded.recipe)
        except RecipeError as error:
            raise RecipeError([f"{name}: {mistake}" for mistake in error.mistakes]) from None
        rows.append(ComparedRow(name, settings, job, job.with_suffix(".log"), tuple(words), loaded))
    return Comparison(recipe, tuple(overrides), tuple(rows), steps, folder)


def _own_settings(row: LoadedRecipe, steps: int) -> dict[str, object]:
    """A comparison's settings of a job. The schedule is fitted into the steps. Raises FinetuneError."""
    own: dict[str, object] = {"training.max_steps": steps, "save_steps": steps, **JOB_SETTINGS}
    own["eval_steps"] = max(1, steps // EVALUATIONS)
    for key in (*own, "training.num_train_epochs"):
        if row.origins.get(key) == COMMAND_LINE:
            remedy = "leave it out; --steps names the steps"
            raise FinetuneError(f"{COMMAND_LINE}: {key}: is the same in every row of a comparison; {remedy}")
    training = row.recipe.training
    if (training.warmup_steps or 0) > steps:
        own["training.warmup_steps"] = steps
    # The stable phase takes the steps that warmup and decay leave.
    if "num_stable_steps" in training.lr_scheduler_kwargs:
        arguments = {key: value for key, value in training.lr_scheduler_kwargs.items() if key != "num_stable_steps"}
        own["training.lr_scheduler_kwargs"] = json.dumps(arguments)
    return own


def compare(comparison: Comparison, progress: Callable[[str, int], None]) -> dict[str, Any]:
    """Train every row that has not finished, and write compare.json after each; returns its content."""
    comparison.folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    result = _write(comparison, rows)  # marks the folder as ours
    for row in comparison.rows:
        progress(row.name, 0)
        reason = None if _is_finished(row) else _train(comparison.recipe, row, progress)
        progress(row.name, _steps_done(row.folder))
        facts = {"name": row.name, "strategy": row.loaded.recipe.accelerate_config, "settings": dict(row.settings)}
        rows.append({**facts, "ok": reason is None, "reason": reason, "log": str(row.log), "overrides": row.words})
        if reason is None:
            rows[-1] |= figures(read_lines(row.folder / "metrics.jsonl"), read_object(row.folder / "receipt.json"))
        result = _write(comparison, rows)
    return result


def _is_finished(row: ComparedRow) -> bool:
    """Whether the row's run folder says that it finished, with this recipe and base, and data not edited since."""
    try:
        if (state := read_state(row.folder)) is None or state["state"] != "finished":
            return False
        recorded = recipe_from_resolved(row.folder / "recipe.yaml")
        began = (row.folder / "recipe.yaml").stat().st_mtime
        files = [file for entry in recorded.data.sets for file in resolve(entry).files]
        files += [Path(name) for name in (recorded.eval.generate.file,) if name is not None]
        if recorded.model.adapter is not None and Path(recorded.model.adapter).is_dir():
            files += Path(recorded.model.adapter).glob("*.safetensors")
        edited = any(file.stat().st_mtime > began for file in files)
    except (FinetuneError, OSError):
        return False
    # The run chose the formats for `auto`.
    formats = {PRECISION: recorded.training.mixed_precision, BASE_FORMAT: recorded.model.dtype}
    asked = row.loaded.with_formats(formats, "")[0].recipe
    is_other_base = is_same_base(recorded_base(row.folder), base_identity(asked.model)) is False
    return recorded == asked and not edited and not is_other_base


def _train(recipe: Path, row: ComparedRow, progress: Callable[[str, int], None]) -> str | None:
    """Train one row; returns why it failed, or None."""
    if row.folder.exists():
        remove_folder(row.folder)
    row.log.parent.mkdir(parents=True, exist_ok=True)
    command = with_parent([sys.executable, "-m", "finetune.cli.main", "train", str(recipe), *row.words])
    with (
        open(row.log, "w", encoding="utf-8") as log,
        subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while process.poll() is None:
                progress(row.name, _steps_done(row.folder))
                time.sleep(0.5)
        except KeyboardInterrupt:  # it reaches the job too, which saves and ends
            process.wait()
            raise
    for trained in ("checkpoints", "model", "adapter"):
        if (row.folder / trained).exists():
            remove_folder(row.folder / trained)
    return failure_reason(row.folder, row.log.read_text("utf-8", errors="replace")) if process.returncode else None


def _steps_done(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return sum(line["kind"] == "train" for line in read_lines(file)) if file.is_file() else 0


def figures(lines: Sequence[dict[str, Any]], receipt: dict[str, Any]) -> Row:
    """A row's numbers from a finished job: bytes and seconds as integers and floats, each from its highest rank.

    Memory is the highest over all steps. Time is the mean after the first step, which compiles and warms up. Traffic is
    the last step's, because DDP arranges its buckets in the second.
    """
    train = [line for line in lines if line["kind"] == "train"]
    by_phase = {name: [line for line in lines if line.get("phase") == name] for name in PHASES}
    held_out = {
        name: [[line["step"], line[name]] for line in lines if line["kind"] == "eval" and line.get(name) is not None]
        for name in ("loss", *COMPARED_REWARDS)
    }
    return {
        "world_size": receipt["world_size"],
        "device": receipt["device"],
        "trained_bytes": receipt["parameters"]["trained"] * (2 if receipt["dtypes"]["master"] == "bfloat16" else 4),
        "seconds_per_20_steps": 20 * statistics.fmean(line["step_seconds"] for line in train[1:] or train),
        "losses": [line["loss"] for line in train],
        "final_loss": train[-1]["loss"],
        "held_out": held_out.pop("loss"),
        "held_out_rewards": {name: points for name, points in held_out.items() if points},
        # A step of judged answers may have wanted ones alone, and so no margin.
        "final_rewards": {name: line[name] for name in held_out for line in train if name in line},
        "phases": {name: _phase(records) for name, records in by_phase.items() if records},
    }


def _phase(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    last = [line for line in lines if line["step"] == lines[-1]["step"]]
    gauges = ("peak", "allocated", "host_peak", "host_allocated")
    memory = {f"{name}_bytes": max(round(line[f"{name}_gib"] * 2**30) for line in lines) for name in gauges}
    busiest = max(last, key=lambda line: line["ring_bytes"])
    moved = {key: busiest[key] for key in ("collectives", "bytes", "ring_bytes", "textbook_bytes")}
    return {**memory, "seconds": max(line["seconds"] for line in last), **moved}


def _write(comparison: Comparison, rows: Sequence[Row]) -> dict[str, Any]:
    result = {
        "recipe": str(comparison.recipe),
        "overrides": list(comparison.overrides),
        "varied": list(dict.fromkeys(key for row in comparison.rows for key in row.settings)),
        "device": next((row["device"] for row in rows if row["ok"]), None),
        "steps": comparison.steps,
        "rows": list(rows),
        "ranking": ranking(rows, comparison.ranked_by),
        "ranked_by": comparison.ranked_by,
    }
    write_json(comparison.folder / "compare.json", result)
    return result


def points_of(row: Row, measure: str) -> list[list[Any]]:
    """A row's held-out figures as [step, value]; if nothing is held out, the final training figure, at no step."""
    if measure == "loss":
        return row["held_out"] or [[None, row["final_loss"]]]
    return row["held_out_rewards"].get(measure) or [[None, row["final_rewards"].get(measure, -math.inf)]]


def ranking(rows: Sequence[Row], by: str = "loss") -> list[dict[str, Any]]:
    """Rows that differ only in their seed, together, the best held-out figure first; see `points_of`.

    An entry with a seed that is too far from its reference comes last, and `too_far` says why. Each entry: name, rows,
    `best` (mean), `spread` (half the range), `step` of the best (the first seed's), seconds of a step, final training
    loss, the highest peak, and the most textbook bytes of a step.
    """
    sign = 1 if by == "loss" else -1
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["ok"]:
            groups.setdefault(re.sub(r"(^| )seed=\S+", "", row["name"]).strip() or "as written", []).append(row)
    entries = []
    for name, group in groups.items():
        bests = [min(points_of(row, by), key=lambda point: sign * point[1]) for row in group]
        kls = [dict(points_of(row, "kl_by_token")).get(step) for row, (step, _) in zip(group, bests, strict=True)]
        best = [figure for _, figure in bests]
        entry = {
            "name": name,
            "rows": [row["name"] for row in group],
            "best": statistics.fmean(best),
            "spread": (max(best) - min(best)) / 2,
            "step": bests[0][0],
            "too_far": too_far({"kl_by_token": max((kl for kl in kls if kl is not None), default=None)}),
            "seconds": statistics.fmean(row["seconds_per_20_steps"] / 20 for row in group),
            "final_loss": statistics.fmean(row["final_loss"] for row in group),
            "peak_bytes": max(phase["peak_bytes"] for row in group for phase in row["phases"].values()),
            "moved_bytes": max(moved_per_step(row) for row in group),
        }
        entries.append(entry)
    # Rows that are equal in what the table shows stay in their order.
    return sorted(entries, key=lambda entry: (bool(entry["too_far"]), sign * round(entry["best"], 4)))


def moved_per_step(row: Row) -> int:
    """Textbook bytes that one rank moves in one step."""
    return sum(row["phases"][phase]["textbook_bytes"] for phase in ("forward", "backward", "step"))


def run_and_report(comparison: Comparison, *, quiet: bool) -> dict[str, Any]:
    """Run the comparison, show its progress on standard error, print the table and draw the picture.

    Raises EnvironmentMismatch after everything is written, if no row ran.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {row.name: bars.add_task(escape(row.name), total=comparison.steps) for row in comparison.rows}
        result = compare(comparison, lambda name, steps: bars.update(tasks[name], completed=steps))
    if not quiet:
        print_table(result, rich_console())
        if result["ranking"]:
            print(f"train with the first row's settings:\n  {next_command(comparison, result)}")
    if not result["ranking"]:
        raise EnvironmentMismatch("compare: no row ran; compare.json has the reasons, the logs are in jobs/")
    draw(result, comparison.folder / "compare.png")
    return result


def next_command(comparison: Comparison, result: dict[str, Any]) -> str:
    """The command that trains the recipe with the best row's settings; a seed is no setting to choose."""
    best = next(row for row in comparison.rows if row.name in result["ranking"][0]["rows"])
    settings = [f"{key}={value}" for key, value in best.settings.items() if key != "training.seed"]
    return shlex.join(["finetune", "train", str(comparison.recipe), *comparison.overrides, *settings])


def print_table(result: dict[str, Any], console: Console) -> None:
    """The ranking; then why a row did not run, or is too far from its reference."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("row", overflow="fold")
    for head in (
        _ranked_figure(result).replace(" ", "\n"),
        "at\nstep",
        "s a\nstep",
        "last\nloss",
        "peak\nMiB",
        "moved\nMiB",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for entry in result["ranking"]:
        table.add_row(
            escape(entry["name"]),
            f"{entry['best']:.4f}" + (f" ± {entry['spread']:.4f}" if len(entry["rows"]) > 1 else ""),
            str(entry["step"] or "-"),
            f"{entry['seconds']:.2f}",
            f"{entry['final_loss']:.5f}",
            f"{entry['peak_bytes'] / 2**20:,.1f}",
            f"{entry['moved_bytes'] / 2**20:,.1f}",
        )
    console.print(table)
    for row in result["rows"]:
        if not row["ok"]:
            console.print(f"{row['name']}: did not run: {row['reason']}", markup=False, highlight=False)
    for entry in result["ranking"]:
        if entry["too_far"]:
            console.print(f"{entry['name']}: {entry['too_far']} (docs/preferences.md).", markup=False, highlight=False)


def _ranked_figure(result: dict[str, Any]) -> str:
    is_held_out = any(entry["step"] is not None for entry in result["ranking"])
    return f"{'held-out' if is_held_out else 'last'} {result['ranked_by'].replace('_', ' ')}"


def draw(result: dict[str, Any], file: Path) -> None:
    """The picture: the held-out figure by step, or the training loss if nothing is held out; seeds as their mean."""
    rows, held_out = {row["name"]: row for row in result["rows"]}, result["ranking"][0]["step"] is not None
    series = []
    for entry in result["ranking"]:
        seeds = [rows[name] for name in entry["rows"]]
        curves = [points_of(row, result["ranked_by"]) if held_out else enumerate(row["losses"], 1) for row in seeds]
        points = [(at[0][0], statistics.fmean(value for _, value in at)) for at in zip(*curves, strict=False)]
        series.append(Series(f"{entry['name']}: {entry['best']:.4f}", points))
    save_png(Chart(f"{Path(result['recipe']).stem}: {_ranked_figure(result)}", series), file)
