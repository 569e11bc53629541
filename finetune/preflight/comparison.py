"""`finetune compare`: the same steps of one recipe, varied row by row, each row as its own job.

A row that fails, or that this machine refuses, keeps its reason. Trained weights are deleted; figures and logs stay.
The tasks of a job array share the folder: each runs one row, and gathers what all of them have finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from finetune.data.sources import resolve
from finetune.errors import DataError, FinetuneError
from finetune.files import exclusive, read_lines, remove_folder, write_json
from finetune.launch.local_ranks import check_rank_count
from finetune.launch.with_parent import with_parent
from finetune.measure.units import PHASES
from finetune.model.base_identity import base_identity, is_same_base, recorded_base
from finetune.paths import TRAIN_SCRIPT
from finetune.preflight.compare_rows import SEED_KEY, AskedRow, ComparedRow, check_compared
from finetune.preflight.job import failure_reason
from finetune.recipe.loader import load_recipe
from finetune.recipe.sections.preferences import too_far
from finetune.recipe.strategy import CONFIG_FOLDER, read_strategy
from finetune.untrusted.json_files import read_object
from finetune.wording import counted

MEMORY_KEYS = ("peak", "allocated", "host_peak", "host_allocated")
# Largest relative difference of final losses, by the format of the computation. Another order of summation over 20
# steps of float32 stays below the first. One rounding is 0.4 % in bf16, 0.05 % in fp16.
LOSS_TOLERANCE = {"no": 1e-4, "bf16": 2e-2, "fp16": 1e-2}

Measure = Literal[
    "loss", "reward_accuracy", "reward_margin", "kl_by_token", "kl", "logp_chosen_by_token", "logps_chosen"
]
MEASURES: tuple[Measure, ...] = get_args(Measure)
COMPARED_REWARDS = MEASURES[1:]
EVALUATIONS = 6  # of each row, where rows learn differently
LARGEST_RESULT = 64 * 2**20  # of compare.json
_ROW_FILE = "row.json"  # in its job's folder, of a row that a job array ran
_LOCK = ".compare.lock"

Row = dict[str, Any]
StepCallback = Callable[[str, int | None], None]  # a row's name and its finished steps; None: it ended


@dataclass(frozen=True)
class Comparison:
    """The rows to compare, the device, and the folder for the results."""

    recipe: Path
    overrides: tuple[str, ...]
    rows: tuple[ComparedRow, ...]
    steps: int
    processes: int
    device: str  # "cpu", or the GPU's name
    folder: Path

    def job_folder(self, row: ComparedRow) -> Path:
        """The run folder of one row's job."""
        return self.folder / "jobs" / row.folder

    def log(self, row: ComparedRow) -> Path:
        """The output of one row's job."""
        return self.folder / "logs" / f"{row.folder}.log"

    @property
    def learns_differently(self) -> bool:
        """Whether rows differ in what they learn, and not only in how it is computed: then their losses are ranked."""
        return len({row.curve for row in self.rows}) > 1

    @property
    def ranked_by(self) -> Measure:
        """The held-out figure that ranks rows: the loss, or of preferences a reward.

        Losses of preferences can be compared only between rows with one objective: another beta scales them.
        """
        recipes = [row.recipe for row in self.rows]
        if any(recipe.preferences is None for recipe in recipes):
            return "loss"
        match recipes[0].training.metric_for_best_model:
            case "eval_reward_accuracy":
                return "reward_accuracy"
            case "eval_reward_margin":
                return "reward_margin"
        return "loss" if len({repr(recipe.preferences) for recipe in recipes}) == 1 else "reward_accuracy"

    @property
    def eval_steps(self) -> int:
        """Steps between evaluations: one at the end, or EVALUATIONS where curves are compared."""
        return max(1, self.steps // EVALUATIONS) if self.learns_differently else self.steps

    @property
    def varied(self) -> tuple[str, ...]:
        """The keys that some row sets, in the order in which they were named."""
        return tuple(dict.fromkeys(key for row in self.rows for key, _ in row.settings))


def plan_comparison(
    recipe: Path,
    overrides: Sequence[str],
    asked: Sequence[AskedRow],
    *,
    steps: int,
    processes: int | None,
    folder: Path | None,
) -> Comparison:
    """Check the recipe, every row and the folder before anything runs. Raises RecipeError, FinetuneError."""
    rows = check_compared(recipe, overrides, asked, steps)
    run_dir = Path(load_recipe(recipe, overrides).recipe.run_dir)
    folder = folder or run_dir.with_name(f"{run_dir.name}_compare")
    foreign = folder.exists() and any(path.name != _LOCK for path in folder.iterdir())
    if foreign and not (folder / "compare.json").is_file():
        raise FinetuneError(f"{folder}: is not a comparison's folder and not empty; name another folder with -o")
    device, count = _devices()
    if processes is not None:
        check_rank_count(processes, gpus=0 if device == "cpu" else count)
    return Comparison(recipe, tuple(overrides), tuple(rows), steps, processes or count, device, folder)


def compare(comparison: Comparison, progress: StepCallback) -> dict[str, Any]:
    """Run every row's job and write compare.json; returns its content."""
    comparison.folder.mkdir(parents=True, exist_ok=True)
    keys = [_key(comparison, row) for row in comparison.rows]
    earlier = _finished_rows(comparison)
    rows: list[Row] = []
    for number, (row, key) in enumerate(zip(comparison.rows, keys, strict=True)):
        # Rows of an earlier call that are still to come stay in the file: this call may be stopped too.
        to_come = [earlier[each] for each in keys[number:] if each in earlier]
        _write(comparison, [*rows, *to_come])  # also marks the folder as ours
        if key in earlier:
            progress(row.name, comparison.steps)
            progress(row.name, None)
            rows.append(earlier[key])
        else:
            rows.append(_run(comparison, row, progress) | {"key": key})
    return _write(comparison, rows)


def compare_one(comparison: Comparison, number: int, progress: StepCallback) -> dict[str, Any]:
    """Run the row `number`, from 1, and write compare.json with every row that has run so far; returns its content.

    Other processes, on any machine that sees the folder, may run other rows meanwhile. Raises FinetuneError.
    """
    if number > len(comparison.rows):
        raise FinetuneError(f"--only: {number}: there are {counted(len(comparison.rows), 'row')}")
    comparison.folder.mkdir(parents=True, exist_ok=True)
    with exclusive(comparison.folder / _LOCK):
        if not (comparison.folder / "compare.json").is_file():
            _write(comparison, [])  # marks the folder as ours
    row = comparison.rows[number - 1]
    key = _key(comparison, row)
    ran = _finished_rows(comparison).get(key)
    if ran is None:
        ran = _run(comparison, row, progress) | {"key": key}
    write_json(comparison.job_folder(row) / _ROW_FILE, ran)
    with exclusive(comparison.folder / _LOCK):
        stored = _stored_rows(comparison)
        keys = [_key(comparison, each) for each in comparison.rows]
        rows = [stored[each] for each in keys if each in stored]
        others = {each["name"] for each in stored.values()} - {each["name"] for each in rows}
        words = f"recipe, data, device or command differ from row {number}'s"
        left_out = [f"Left out, because {words}: {', '.join(sorted(others))}."]
        return _write(comparison, rows, left_out if others else [])


def _key(comparison: Comparison, row: ComparedRow) -> str:
    """A hash of everything that decides a row's figures: recipe, command, device, data files, the start's adapter."""
    named, scored, adapter = list[Path](), row.recipe.eval.generate.file, row.recipe.model.adapter
    for entry in row.recipe.data.sets:
        with suppress(DataError):  # the job says it
            named += resolve(entry).files
    named += [Path(scored)] if scored is not None else []
    named += sorted(Path(adapter).glob("*.safetensors")) if adapter is not None else []
    files = []
    for name in named:
        with suppress(OSError):
            files.append([str(name), name.stat().st_size, name.stat().st_mtime_ns])
    # An earlier release's row may lack a figure: with other names it is run again.
    parts = [row.recipe.model_dump(mode="json"), job_command(comparison, row)[1:], comparison.device, files, MEASURES]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def _stored_rows(comparison: Comparison) -> dict[str, Row]:
    """Rows that ran in this folder, by `_key`; of two with one key, the job's own."""
    found: dict[str, Row] = {}
    files = [comparison.folder / "compare.json", *(comparison.job_folder(row) / _ROW_FILE for row in comparison.rows)]
    for file in files:
        with suppress(FinetuneError, KeyError, TypeError):
            content = read_object(file, LARGEST_RESULT)
            rows = content.get("rows", []) if file.name != _ROW_FILE else [content]
            found |= {row["key"]: row for row in rows if isinstance(row["ok"], bool)}
    return found


def _finished_rows(comparison: Comparison) -> dict[str, Row]:
    """Rows that an earlier call in this folder finished, by `_key`. Their job's folder is there, for `finetune report`,
    and their base is the same.
    """
    jobs = {row.name: row for row in comparison.rows}
    kept = {}
    for key, row in _stored_rows(comparison).items():
        job = jobs.get(row["name"])
        if job is None or not row["ok"]:
            continue
        folder = comparison.job_folder(job)
        same_base = is_same_base(recorded_base(folder), base_identity(job.recipe.model))
        if (folder / "metrics.jsonl").is_file() and same_base is not False:
            kept[key] = row
    return kept


def job_command(comparison: Comparison, row: ComparedRow) -> list[str]:
    """The launch of one row's job, as a user would type it, with the keys that make jobs comparable."""
    processes = read_strategy(row.strategy).rank_count(comparison.processes)
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    if comparison.device == "cpu":
        where = "single" if processes == 1 else "cpu_2proc"
        command += ["--config_file", str(CONFIG_FOLDER / f"{where}.yaml")]
    elif processes > 1:
        command += ["--multi_gpu", "--main_process_port", "0"]  # any free one: another row may run on this machine
    command += ["--num_processes", str(processes), str(TRAIN_SCRIPT), str(comparison.recipe)]
    return [
        *command,
        *comparison.overrides,
        *row.overrides,
        f"output_dir={comparison.job_folder(row)}",
        f"training.max_steps={comparison.steps}",
        f"save_steps={comparison.steps}",
        f"eval_steps={comparison.eval_steps}",
        "training.early_stopping_patience=null",
        "training.load_best_model_at_end=false",
        "training.resume=never",
        "logging_steps=1",
        "measure_phases=true",
        "samples.count=0",
        "samples.prompts=null",
        "hub.push=false",
    ]


def _devices() -> tuple[str, int]:
    """The kind of device, and how many processes it is natural to run."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), torch.cuda.device_count()
    return "cpu", 2


def _run(comparison: Comparison, compared: ComparedRow, progress: StepCallback) -> Row:
    folder, log = comparison.job_folder(compared), comparison.log(compared)
    if folder.exists():
        remove_folder(folder)
    log.parent.mkdir(parents=True, exist_ok=True)
    progress(compared.name, 0)
    with open(log, "w", encoding="utf-8") as output:
        command = job_command(comparison, compared)
        environment = os.environ | {"PYTHONWARNINGS": "ignore"}
        with subprocess.Popen(
            with_parent(command), stdout=output, stderr=subprocess.STDOUT, env=environment
        ) as process:
            while (code := _wait(process)) is None:
                progress(compared.name, _steps_done(folder))
    row: Row = _facts(comparison, compared) | {"ok": code == 0, "reason": None, "log": str(log)}
    if code == 0:
        row |= figures(read_lines(folder / "metrics.jsonl"), json.loads((folder / "receipt.json").read_text("utf-8")))
    else:
        row["reason"] = failure_reason(folder, log.read_text("utf-8", errors="replace"))
    progress(compared.name, _steps_done(folder))
    progress(compared.name, None)
    for trained in ("checkpoints", "model", "adapter"):
        if (folder / trained).exists():
            remove_folder(folder / trained)
    return row


def _facts(comparison: Comparison, row: ComparedRow) -> Row:
    """A row's name, its settings, and the number of its curve. Rows that learn the same share a curve."""
    curves = list(dict.fromkeys(each.curve for each in comparison.rows))
    facts = {"name": row.name, "strategy": row.strategy, "settings": dict(row.settings)}
    facts["overrides"] = [*comparison.overrides, *row.overrides]  # of the recipe, to run this row again
    return facts | {"curve": curves.index(row.curve), "mixed_precision": row.recipe.training.mixed_precision}


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code, or None when half a second has passed. Ctrl-C reaches the job too, which saves and ends."""
    try:
        return process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        return None
    except KeyboardInterrupt:
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _steps_done(folder: Path) -> int:
    try:
        return sum(line["kind"] == "train" for line in read_lines(folder / "metrics.jsonl"))
    except OSError:  # not there yet
        return 0


def figures(lines: Sequence[dict[str, Any]], receipt: dict[str, Any]) -> Row:
    """A row's numbers from a finished job: bytes and seconds as integers and floats, each from its highest rank.

    Memory is the highest over all steps. Time is the mean after the first step, which compiles and warms up. Traffic is
    the last step's, because DDP arranges its buckets in the second.
    """
    train = [line for line in lines if line["kind"] == "train"]
    seconds = statistics.fmean(line["step_seconds"] for line in train[1:] or train)
    by_phase = {name: [line for line in lines if line.get("phase") == name] for name in PHASES}
    trained = receipt["parameters"]["trained"] * (2 if receipt["dtypes"]["master"] == "bfloat16" else 4)
    return {
        "world_size": receipt["world_size"],
        "trained_bytes": trained,
        "all_trained": receipt["parameters"]["frozen"] == 0,
        "seconds_per_20_steps": 20 * seconds,
        "losses": [line["loss"] for line in train],
        "final_loss": train[-1]["loss"],
        "held_out": [[line["step"], line["loss"]] for line in lines if line["kind"] == "eval"],
        "held_out_rewards": {name: points for name in COMPARED_REWARDS if (points := _points(lines, name))},
        # A step of judged answers may have wanted ones alone, and so no margin.
        "final_rewards": {name: line[name] for name in COMPARED_REWARDS for line in train if name in line},
        "phases": {name: _phase(records) for name, records in by_phase.items() if records},
    }


def _points(lines: Sequence[dict[str, Any]], name: str) -> list[list[Any]]:
    return [[line["step"], line[name]] for line in lines if line["kind"] == "eval" and line.get(name) is not None]


def points_of(row: Row, measure: Measure) -> list[list[Any]]:
    """A row's held-out figures as [step, value]; empty if nothing is held out."""
    if measure == "loss":
        return list(row["held_out"])
    return list(row["held_out_rewards"].get(measure, []))


def _phase(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    last = [line for line in lines if line["step"] == lines[-1]["step"]]
    memory = {f"{key}_bytes": max(round(line[f"{key}_gib"] * 2**30) for line in lines) for key in MEMORY_KEYS}
    busiest = max(last, key=lambda line: line["ring_bytes"])
    moved = {key: busiest[key] for key in ("collectives", "bytes", "ring_bytes", "textbook_bytes")}
    return {**memory, "seconds": max(line["seconds"] for line in last), **moved}


def _write(comparison: Comparison, rows: list[Row], more_notes: Sequence[str] = ()) -> dict[str, Any]:
    ranked = ranking(rows, comparison.ranked_by) if comparison.learns_differently else []
    result = {
        "recipe": str(comparison.recipe),
        "overrides": list(comparison.overrides),
        "varied": list(comparison.varied),
        "device": comparison.device,
        "processes": comparison.processes,
        "steps": comparison.steps,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": rows,
        "losses": loss_agreement(rows),
        "ranking": ranked,
        "ranked_by": comparison.ranked_by,
        "notes": [*preference_verdict(ranked), *notes(comparison), *more_notes],
    }
    write_json(comparison.folder / "compare.json", result)
    return result


def loss_agreement(rows: Sequence[Row]) -> dict[str, Any]:
    """How far final losses are apart among rows that should learn the same.

    Each group of such rows is compared with its first row that ran. The group farthest from its bound comes on top.
    """
    ran = [row for row in rows if row["ok"]]
    groups = []
    for curve in dict.fromkeys(row["curve"] for row in ran):
        same = [row for row in ran if row["curve"] == curve]
        final, bound = [row["final_loss"] for row in same], LOSS_TOLERANCE[same[0]["mixed_precision"]]
        worst = max(abs(loss - final[0]) / abs(final[0]) for loss in final)
        figures = {"worst_relative_difference": worst, "bound": bound, "agree": worst <= bound}
        groups.append({"rows": [row["name"] for row in same], **figures})
    none = {"worst_relative_difference": 0.0, "bound": LOSS_TOLERANCE["no"], "agree": True}
    farthest = max(groups, key=lambda group: group["worst_relative_difference"] / group["bound"], default=none)
    return {key: farthest[key] for key in none} | {"groups": groups}


def ranking(rows: Sequence[Row], by: Measure = "loss") -> list[dict[str, Any]]:
    """Rows that differ only in their seed, together, ranked by their best held-out loss or reward; by the final
    training figure if nothing is held out.

    An entry whose farthest seed is too far from its reference keeps its place, and `too_far` says why it is not the
    best. Each entry: name, rows, `best` (mean), `spread` (half the range, 0 for one seed), `step` of the best (the
    first seed's), `seconds` of a step, and of preferences the other figures at the best step, `beside` (the first
    seed's; the KL is the largest).
    """
    best_of = min if by == "loss" else max
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["ok"]:
            settings = {key: value for key, value in row["settings"].items() if key != SEED_KEY}
            groups.setdefault(json.dumps(settings, sort_keys=True), []).append(row)
    ranked = []
    for group in groups.values():
        found = []
        for row in group:
            final = row["final_loss"] if by == "loss" else row["final_rewards"][by]
            found.append(best_of(points_of(row, by), key=lambda point: point[1], default=(None, final)))
        figures = [figure for _, figure in found]
        first, step = group[0], found[0][0]
        beside = {}
        if first.get("final_rewards"):
            beside = {measure: _at(first, measure, step) for measure in ("loss", *first["final_rewards"])}
            beside.pop(by, None)
        # One seed that is too far is enough.
        kls = [_at(row, "kl_by_token", at) for row, (at, _) in zip(group, found, strict=True)]
        farthest = max((kl for kl in kls if kl is not None), default=None)
        if "kl_by_token" in beside:
            beside["kl_by_token"] = farthest
        far = too_far({"kl_by_token": farthest})
        ranked.append(
            {
                "name": without_seed(group[0]["name"]) or group[0]["name"],
                "rows": [row["name"] for row in group],
                "best": statistics.fmean(figures),
                "spread": (max(figures) - min(figures)) / 2,
                "step": step,
                "seconds": statistics.fmean(row["seconds_per_20_steps"] / 20 for row in group),
                **({"beside": beside} if beside else {}),
                **({"too_far": far} if far else {}),
            }
        )
    return sorted(ranked, key=lambda entry: entry["best"], reverse=by != "loss")


def _at(row: Row, measure: Measure, step: int | None) -> float | None:
    """A row's figure at a step: held out, else of its last training line; None if it has none."""
    final = row["final_loss"] if measure == "loss" else row.get("final_rewards", {}).get(measure)
    return dict(points_of(row, measure)).get(step, final)


def best_entry(ranked: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The first entry that is not too far from its reference; None if all are."""
    return next((entry for entry in ranked if not entry.get("too_far")), None)


def preference_verdict(ranked: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each entry that ranks above the best one and is too far from its reference, and which one is best."""
    best = best_entry(ranked)
    above = ranked if best is None else ranked[: ranked.index(best)]
    lines = [f"{entry['name']}: {entry['too_far']} (docs/preferences.md)." for entry in above]
    if lines and best is not None:
        lines.append(f"Best below it: {best['name']}.")
    elif lines:
        lines.append("No row is below it: divide the learning rates by 4, or raise beta.")
    return lines


def without_seed(name: str) -> str:
    """A row's name without its seed."""
    return " ".join(word for word in name.split() if not word.startswith("seed="))


# Notes on the table of memory, and on the one of seconds, traffic and final losses.
MEMORY_NOTES = (
    "Memory: highest of all ranks and steps; peak within the phase / allocated at its end.",
    "On a CPU all memory is host memory: what is offloaded stays in the same figure.",
)
TRAFFIC_NOTES = (
    "Traffic: of one rank in one step, in textbook bytes: an all_reduce counts twice.",
    "FSDP2 and ZeRO-2 and 3 move as much again for each further micro-step.",
    "FSDP2 gathers the head once, the rest twice; ZeRO-3 keeps two layers gathered.",
    "Final losses are compared among rows that learn the same: that differ in how it is computed.",
    "gloo carries out a reduce_scatter as an all_reduce: twice as much on the wire.",
)


def notes(comparison: Comparison) -> list[str]:
    """Notes that a reader of the figures needs."""
    lines = [
        MEMORY_NOTES[0],
        "Seconds: the first step is left out. The gauges were on; they add about 20 us to each operation.",
        *TRAFFIC_NOTES[:3],
    ]
    if len({row.curve for row in comparison.rows}) > 1:
        lines.append(TRAFFIC_NOTES[3])
    for shortened in dict.fromkeys(row.shortened for row in comparison.rows if row.shortened):
        lines.append(f"The schedule is fitted into {comparison.steps} steps: {' '.join(shortened)}.")
    if comparison.device == "cpu":
        lines += [MEMORY_NOTES[1], TRAFFIC_NOTES[4]]
    return lines
