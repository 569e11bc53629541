"""`finetune compare`: the same steps of one recipe under several strategies, one after another, each as its own job.

A strategy that fails, or that this machine refuses, is a row with its reason. What the jobs train is thrown away;
their figures and logs stay.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import read_lines, remove_folder, write_json
from finetune.measure.units import PHASES
from finetune.paths import TRAIN_SCRIPT
from finetune.preflight.job_failure import failure_reason
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Training
from finetune.recipe.strategy import CONFIG_FOLDER, read_strategy
from finetune.training.planner_process import PLANNER_SWITCH

MEMORY_KEYS = ("peak", "allocated", "host_peak", "host_allocated")
# Largest relative difference of final losses, by the number format of the computation: another order of summation in
# 20 steps of float32 stays below the first; of the other formats one rounding is 0.4 % (bf16), 0.05 % (fp16).
LOSS_TOLERANCE = {"no": 1e-4, "bf16": 2e-2, "fp8": 2e-2, "fp16": 1e-2}

Row = dict[str, Any]
StepCallback = Callable[[str, int | None], None]  # strategy and its finished steps; None: it ended


@dataclass(frozen=True)
class Comparison:
    """What is compared, where, and into which folder."""

    recipe: Path
    overrides: tuple[str, ...]
    strategies: tuple[str, ...]
    steps: int
    processes: int
    device: str  # "cpu", or the GPU's name
    mixed_precision: str
    folder: Path
    shortened: tuple[str, ...] = ()  # overrides that fit the schedule into so few steps

    def job_folder(self, strategy: str) -> Path:
        """The run folder of one strategy's job."""
        return self.folder / "jobs" / Path(strategy).stem

    def log(self, strategy: str) -> Path:
        """What one strategy's job printed."""
        return self.folder / "logs" / f"{Path(strategy).stem}.log"


def plan_comparison(
    recipe: Path,
    overrides: Sequence[str],
    *,
    strategies: str,
    steps: int,
    processes: int | None,
    folder: Path | None,
) -> Comparison:
    """Check the recipe and the folder before anything runs. Raises RecipeError, FinetuneError."""
    loaded = load_recipe(recipe, overrides).recipe
    names = tuple(dict.fromkeys(name.strip() for name in strategies.split(",") if name.strip()))
    if not names:
        raise FinetuneError("--strategies: names none; for example --strategies ddp,fsdp2")
    for name in names:
        read_strategy(name)  # a misspelt one is refused now, not after the jobs before it
    run_dir = Path(loaded.run_dir)
    folder = folder or run_dir.with_name(f"{run_dir.name}_compare")
    if folder.exists() and any(folder.iterdir()) and not (folder / "compare.json").is_file():
        raise FinetuneError(f"{folder}: is not a comparison's folder and not empty; name another folder with -o")
    device, count = _devices()
    precision = loaded.training.mixed_precision
    shortened = _shortened(loaded.training, steps)
    return Comparison(recipe, tuple(overrides), names, steps, processes or count, device, precision, folder, shortened)


def _shortened(training: Training, steps: int) -> tuple[str, ...]:
    """A warmup as long as the comparison at most; what is stable takes what warmup and decay leave."""
    settings = []
    if (training.warmup_steps or 0) > steps:
        settings.append(f"training.warmup_steps={steps}")
    if "num_stable_steps" in training.lr_scheduler_kwargs:
        arguments = {name: value for name, value in training.lr_scheduler_kwargs.items() if name != "num_stable_steps"}
        settings.append(f"training.lr_scheduler_kwargs={json.dumps(arguments)}")
    return tuple(settings)


def compare(comparison: Comparison, progress: StepCallback) -> dict[str, Any]:
    """Run every strategy and write compare.json; returns its content."""
    comparison.folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for strategy in comparison.strategies:
        _write(comparison, rows)  # also marks the folder as ours
        rows.append(_run(comparison, strategy, progress))
    return _write(comparison, rows)


def job_command(comparison: Comparison, strategy: str) -> list[str]:
    """The launch of one strategy's job: what a user would type, with the keys that make jobs comparable."""
    processes = read_strategy(strategy).rank_count(comparison.processes)
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    if comparison.device == "cpu":
        where = "single" if processes == 1 else "cpu_2proc"
        command += ["--config_file", str(CONFIG_FOLDER / f"{where}.yaml")]
    elif processes > 1:
        command += ["--multi_gpu"]
    command += ["--num_processes", str(processes), str(TRAIN_SCRIPT), str(comparison.recipe)]
    return [
        *command,
        *comparison.overrides,
        f"accelerate_config={strategy}",
        f"output_dir={comparison.job_folder(strategy)}",
        f"training.max_steps={comparison.steps}",
        *comparison.shortened,
        f"save_steps={comparison.steps}",
        f"eval_steps={comparison.steps}",
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


def _run(comparison: Comparison, strategy: str, progress: StepCallback) -> Row:
    folder, log = comparison.job_folder(strategy), comparison.log(strategy)
    if folder.exists():
        remove_folder(folder)
    log.parent.mkdir(parents=True, exist_ok=True)
    progress(strategy, 0)
    with open(log, "w", encoding="utf-8") as output:
        command = job_command(comparison, strategy)
        environment = os.environ | {"PYTHONWARNINGS": "ignore", PLANNER_SWITCH: "off"}  # no planner among what is timed
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as process:
            while (code := _wait(process)) is None:
                progress(strategy, _steps_done(folder))
    row: Row = {"strategy": strategy, "ok": code == 0, "reason": None, "log": str(log)}
    if code == 0:
        row |= figures(read_lines(folder / "metrics.jsonl"), json.loads((folder / "receipt.json").read_text("utf-8")))
    else:
        row["reason"] = failure_reason(folder, log.read_text("utf-8", errors="replace"))
    progress(strategy, _steps_done(folder))
    progress(strategy, None)
    for trained in ("checkpoints", "model", "adapter"):
        if (folder / trained).exists():
            remove_folder(folder / trained)
    return row


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
    """A row's numbers from a finished job: bytes and seconds as integers and floats, per rank the highest.

    Memory is the highest of all steps. Time is of the steps after the first, which compiles and warms up; traffic is of
    the last step, for DDP learns its buckets in the second.
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
        "phases": {name: _phase(records) for name, records in by_phase.items() if records},
    }


def _phase(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    last = [line for line in lines if line["step"] == lines[-1]["step"]]
    memory = {f"{key}_bytes": max(round(line[f"{key}_gib"] * 2**30) for line in lines) for key in MEMORY_KEYS}
    busiest = max(last, key=lambda line: line["ring_bytes"])
    moved = {key: busiest[key] for key in ("collectives", "bytes", "ring_bytes", "textbook_bytes")}
    return {**memory, "seconds": max(line["seconds"] for line in last), **moved}


def _write(comparison: Comparison, rows: list[Row]) -> dict[str, Any]:
    result = {
        "recipe": str(comparison.recipe),
        "overrides": list(comparison.overrides),
        "device": comparison.device,
        "processes": comparison.processes,
        "steps": comparison.steps,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": rows,
        "losses": loss_agreement(rows, comparison.mixed_precision),
        "notes": notes(comparison),
    }
    write_json(comparison.folder / "compare.json", result)
    return result


def loss_agreement(rows: Sequence[Row], mixed_precision: str) -> dict[str, Any]:
    """The worst relative difference of final losses to the first row that ran, and whether it is within bounds."""
    final = [row["final_loss"] for row in rows if row["ok"]]
    bound = LOSS_TOLERANCE[mixed_precision]
    worst = max((abs(loss - final[0]) / abs(final[0]) for loss in final), default=0.0)
    return {"worst_relative_difference": worst, "bound": bound, "agree": worst <= bound}


def notes(comparison: Comparison) -> list[str]:
    """What a reader of the figures must know."""
    lines = [
        "Memory: highest of all ranks and steps; peak within the phase / allocated at its end.",
        "Seconds: without the first step, with the gauges on, which cost about 20 us an operation.",
        "Traffic: of one rank in one step, in textbook bytes: an all_reduce counts twice.",
        "FSDP2 and ZeRO-2 and 3 move as much again for each further micro-step.",
        "FSDP2 gathers the head once, the rest twice; ZeRO-3 keeps two layers gathered.",
    ]
    if comparison.shortened:
        lines.append(f"The schedule is fitted into {comparison.steps} steps: {' '.join(comparison.shortened)}.")
    if comparison.device == "cpu":
        lines.append("On a CPU all memory is host memory: what is offloaded stays in the same figure.")
        lines.append("gloo carries out a reduce_scatter as an all_reduce: twice as much on the wire.")
    return lines
