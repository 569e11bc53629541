"""A recipe trained on one GPU for its speed and memory: a part of gpu.py.

Random weights of the recipe's own shape and rows that fill `max_length`: memory and speed depend on nothing else. This
module imports no torch. The model is made by another process (gpu_checks.py), so that no CUDA context of a parent, half
a GB, stands beside the training that is measured.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from finetune.doctor import free_bytes
from finetune.files import read_lines
from finetune.launch.launcher import environment_for_child
from finetune.launch.watched_job import failure_reason, kill_all
from finetune.planner import audited, plan_of_run
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import read_strategy

ROOT = Path(__file__).resolve().parent.parent
CHECKS = ROOT / "benchmarks" / "gpu_checks.py"
# Weights of each model. The mixture gets LAYERS of its 48 layers, because all 48 take 61 GB.
MODELS = {"Llama-3.2-1B": 1_235_814_400, "Llama-3.1-8B": 8_030_261_248, "Qwen3-8B": 8_190_735_360}
MODELS["Qwen3-30B-A3B"] = 8_099_779_584
LAYERS = {"Qwen3-30B-A3B": 12}
EAGER = ":eager"  # after a recipe's name: the same with training.compile=false
# Other settings by an ending: rows and recomputation as the card has room for, and a frozen base in float8.
SETTINGS = {
    "auto": ("training.per_device_batch_size=auto", "training.activation_checkpointing=auto"),
    "fp8": ("model.load_in_fp8=true",),
    "fa4": ("model.flash_attention=FA4",),  # where flash-attn-4 is installed
}
PROFILE, AGAIN = ":profile", ":again"  # two steps under torch.profiler; a second start with the first one's caches
DPO, DPO_RECIPE = "dpo", "llama3_8b_lora_1x80gb"
# 32 pairs of about 850 tokens, four in a micro-batch: UltraFeedback's shape.
DPO_CHANGES = (
    *("training.objective=dpo", "data.max_length=1024", "data.packing=false", "data.truncation=drop"),
    *("training.global_batch_size=32", "training.per_device_batch_size=4", "training.learning_rate=5e-6"),
)
STEPS, SKIPPED = 6, 2  # the first steps warm caches and the allocator
SPARE = 3e9  # bytes of disk and of host memory: logs, compiled graphs, Python and CUDA's own
ADAPTERS = 0.3e9  # bytes of the largest checkpoint of adapters, with their moments: 42 M weights in float32
POLL_SECONDS = 0.2
PLAN_SECONDS = 120  # at most, for the plan of a training that has ended
OUT_OF_TIME = "not finished in time"
OF_THE_RECEIPT = (
    *("attention", "change", "compiled", "dtypes", "flash_kernel", "guard", "loss_kernel", "optimizer_update", "probe"),
    *("recomputation", "reference", "worst_step_first"),
)


@cache
def recipes() -> dict[str, Path]:
    """The recipes for one GPU and one of the two models."""
    found = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.yaml"))}
    return {name: path for name, path in found.items() if _is_for_one_gpu(load_recipe(str(path), []).recipe)}


def _is_for_one_gpu(recipe: Recipe) -> bool:
    name = recipe.model.name_or_path
    return recipe.budget.gpus == recipe.budget.nodes == 1 and any(model in name for model in MODELS)


@dataclass(frozen=True)
class Way:
    """A recipe and how it is run."""

    path: Path
    changes: tuple[str, ...] = ()
    profiles: bool = False  # two steps under torch.profiler
    again: bool = False  # twice, with caches of its own

    @property
    def recipe(self) -> Recipe:
        return load_recipe(str(self.path), self.changes).recipe


def find_way(name: str) -> Way | None:
    """The way that a step's name says: RECIPE or `dpo`, then any of :eager, :auto, :fp8, :fa4, :profile, :again and
    :rows=N. None: no such recipe or ending. Raises RecipeError where the recipe refuses N."""
    first, *endings = name.split(":")
    path = recipes().get(DPO_RECIPE if first == DPO else first)
    if path is None or len(set(endings)) < len(endings):
        return None
    changes = [*DPO_CHANGES] if first == DPO else []
    for ending in endings:
        rows = ending.removeprefix("rows=")
        if rows != ending and rows.isascii() and rows.isdigit():
            changes.append(f"training.per_device_batch_size={rows}")
        elif ending in SETTINGS:
            changes += SETTINGS[ending]
        elif f":{ending}" == EAGER:
            changes.append("training.compile=false")
        elif f":{ending}" not in (PROFILE, AGAIN):
            return None
    way = Way(path, tuple(changes), PROFILE[1:] in endings, AGAIN[1:] in endings)
    assert way.recipe
    return way


@dataclass(frozen=True)
class Machine:
    """What a training may use. `gpu_gb` 0: a CPU in the GPU's place, on small models."""

    folder: Path  # of all that trainings write; deleted at the end
    gpu_gb: float  # of the card, 1e9 bytes
    packages: frozenset[str] = frozenset()  # of those that recipes need and that may be missing

    @property
    def shrunken(self) -> bool:
        return self.gpu_gb == 0


def weights_of(recipe: Recipe) -> int:
    """How many weights its model has."""
    return next((count for name, count in MODELS.items() if name in recipe.model.name_or_path), 3_212_749_824)


def model_folder(recipe: Recipe, machine: Machine) -> Path:
    """Where its random model is, or will be."""
    return machine.folder / (Path(recipe.model.name_or_path).name + "-shrunken" * machine.shrunken)


def estimate(recipe: Recipe, machine: Machine) -> float:
    """Seconds of one training on an H100, its model's making included: arithmetic, with what was measured on an H200 of
    what arithmetic does not know. 1B LoRA took 122 seconds, 8B LoRA 116. All weights of 8B took 149 to the first step
    when the worst step wrote and read 48 GB on disk; now it copies them to host memory and back, at 2 GB/s by guess. A
    training that takes longer goes on for as long as there is time."""
    weights, full = weights_of(recipe), recipe.lora is None
    made = 0.0 if model_folder(recipe, machine).is_dir() else 5 + 2 * weights / 0.9e9
    read, copied = 2 * weights / 2e9, 6 * weights / 2e9 if full else 4.0  # weights and two moments, 16 bits each
    tokens = recipe.training.global_batch_size * recipe.data.max_length
    passes = (6 if full else 4) + 2 * bool(recipe.training.activation_checkpointing)
    steps = STEPS * (tokens * weights * passes / 350e12 + (2.0 if full else 0.2))
    quantised = 10.0 if recipe.quantization is not None else 0.0
    again = 35.0 if recipe.training.activation_checkpointing else 0.0  # as it is traced, and twice as much to compile
    compiled = 0.0 if recipe.training.compile is False else 40.0 + again
    compiled += 25.0 if recipe.preferences is not None else 0.0  # the reference
    return round(20 + made + read + copied + quantised + steps + compiled, 1)  # 20: imports, probe, export


def why_not(recipe: Recipe, machine: Machine) -> str | None:
    """Why this machine cannot run it, in a line with the figures; None where nothing is known against it."""
    if recipe.quantization is not None and "bitsandbytes" not in machine.packages:
        return "bitsandbytes is not installed"
    if machine.shrunken:
        return None
    asked = recipe.budget.gpu_memory_gb
    if asked is not None and 0.95 * asked > machine.gpu_gb:
        return f"the recipe is for a GPU of {asked:g} GB, this one has {machine.gpu_gb:g}"
    disk, host = needs(recipe, machine)
    free, memory = free_bytes(machine.folder), psutil.virtual_memory().available
    if disk > free:
        return f"{disk / 1e9:.0f} GB of disk needed, {free / 1e9:.0f} GB free in {machine.folder}"
    if host > memory:
        return f"{host / 1e9:.0f} GB of host memory needed, {memory / 1e9:.0f} GB available"
    return None


def needs(recipe: Recipe, machine: Machine) -> tuple[float, float]:
    """Bytes of disk that it will write, and of host memory that it will take.

    A full training writes its weights once, in the worst step, for no last checkpoint and no export is waited for.
    Offloaded, it keeps float32 weights and gradients pinned, whose allocator rounds each tensor up to a power of two
    (a tenth more in all), and two moments: 33 + 33 + 59.8 GiB at 8B.
    """
    weights, full = weights_of(recipe), recipe.lora is None
    width = 2 if recipe.training.pure_bf16 else 4
    base = 0 if model_folder(recipe, machine).is_dir() else 2 * weights
    disk = base + (width * weights if full else 2 * ADAPTERS)
    host = width * weights if full else ADAPTERS
    if read_strategy(recipe.accelerate_config).offloaded:
        host = 2 * 1.1 * 4 * weights + 2 * 4 * weights
    # Saving the random model takes its weights through host memory once.
    return disk + SPARE, max(host, base) + SPARE


def write_rows(file: Path, *, tokens: int, max_length: int, pairs: bool = False) -> Path:
    """Chats of random words, nearly all of them learned, a sixth to nearly all of `max_length` long.

    Args:
        pairs: Each row has two answers of such lengths, chosen and rejected.
    """
    draw = random.Random(0)
    words = ["the", "river", "turns", "a", "wheel", "that", "was", "built", "by", "hand", "in", "spring"]
    prompt = [{"role": "user", "content": "Tell me."}]
    with file.open("w", encoding="utf-8") as out:
        while tokens > 0:
            answers = []
            for _ in range(1 + pairs):
                length = draw.randint(max_length // 6, max_length * 4 // 9)
                content = " ".join(draw.choices(words, k=length))  # a word is one token or two here
                answers.append([{"role": "assistant", "content": content}])
                tokens -= length
            row = {"messages": prompt + answers[0]}
            if pairs:
                row = {"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}
            out.write(json.dumps(row) + "\n")
    return file


def measure(
    way: Way,
    machine: Machine,
    *,
    steps: int = STEPS,
    limit: float | None = None,
    measured: Callable[[dict[str, Any]], None] = lambda row: None,
    log: Path | None = None,
    cache: Path | None = None,
) -> dict[str, Any]:
    """One recipe's figures: a row of the results. `ok` False comes with the `phase` that failed and the `reason`, and
    with the figures that were known before.

    Args:
        limit: Seconds after which it is ended, and the row has `out_of_time`. None: none.
        measured: Called with the row so far as soon as its speed is known; what fails later changes that no more.
        log: Where to keep what it printed.
        cache: Its caches' folder; None: that of all trainings, or `way.again`'s own.
    """
    run = Training(way, machine, steps, log or machine.folder / "run.log", cache)
    ends = time.monotonic() + (limit or 1e9)
    row: dict[str, Any] = {}
    if way.again:
        shutil.rmtree(run.cache, ignore_errors=True)
        first = measure(replace(way, again=False), machine, steps=steps, limit=limit, log=log, cache=run.cache)
        row["first_start"] = start_seconds(first)
        if not first["ok"]:
            return {**first, **row}
    if reason := run.make_model(ends):
        return run.failure(reason, ends, "making the random model")

    def ended() -> bool:
        """Whether all is known that the training is run for."""
        if "tokens_per_second" not in row and len(run.lines("train")) >= steps:
            row.update(run.figures())
            measured({"ok": True, **row})
        return "tokens_per_second" in row and run.full

    reason = run.train(ends, ended)
    if len(run.lines("train")) > min(SKIPPED, steps - 1):
        row |= run.figures(*plan_of_run(run.run_dir, timeout=PLAN_SECONDS))
    if way.profiles:
        row["profile"] = json.loads(run.profile.read_text("utf-8")) if run.profile.is_file() else None
        if reason is None and row["profile"] is None:
            reason = "no profile was written"
    return {**row, **({"ok": True} if reason is None else run.failure(reason, ends))}


def start_seconds(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a start cost, from a training's row."""
    receipt = row.get("receipt") or {}
    worst, compiled = receipt.get("worst_step_first") or {}, receipt.get("compiled") or {}
    return {
        "first_step_after_seconds": row.get("first_step_after_seconds"),
        "compile_seconds": compiled.get("first_seconds"),
        "worst_step_seconds": worst.get("step_seconds"),
        "worst_save_seconds": worst.get("save_seconds"),
    }


class Training:
    """A recipe's training as a process of its own, in a folder of its own."""

    def __init__(self, way: Way, machine: Machine, steps: int, log: Path, cache: Path | None = None) -> None:
        self.way, self.machine, self.steps, self.log = way, machine, steps, log
        self.path, self.changes, self.recipe = way.path, way.changes, way.recipe
        self.run_dir, self.profile = machine.folder / "run", machine.folder / "profile.json"
        self.cache = cache or machine.folder / ("cache-again" if way.again else "cache")
        # A full training is ended when its speed is known: its checkpoint, 48 GB at 8B, and its export say nothing of
        # speed or memory. Adapters are saved and exported in a second, and the receipt then says whether all changed.
        self.full = self.recipe.lora is None
        self.first_step_after: float | None = None  # seconds

    def make_model(self, ends: float) -> str | None:
        """Make its random model, unless it is there; why that failed, if it did."""
        place = model_folder(self.recipe, self.machine)
        if place.is_dir():
            return None
        words = [str(self.path), str(place), *self.changes, *(["--shrunken"] if self.machine.shrunken else [])]
        code = run_checks("model", words, self.log, ends)
        if code == 0 and place.is_dir():
            return None
        shutil.rmtree(place, ignore_errors=True)
        return OUT_OF_TIME if code is None else f"exit code {code}: {last_line(self.log)}"

    def train(self, ends: float, ended: Callable[[], bool]) -> str | None:
        """Train until it ends, or `ended` says so, which is asked several times a second. Why it failed, if it did."""
        shutil.rmtree(self.run_dir, ignore_errors=True)
        began = time.monotonic()
        self.profile.unlink(missing_ok=True)
        environment = environment_for_child(
            HF_HUB_OFFLINE="1", FINETUNE_CACHE=str(self.cache), GPU_PROFILE=str(self.profile)
        )
        with running(self.command(), environment, self.log) as process:
            while process.poll() is None:
                if self.first_step_after is None and self.lines("train"):
                    self.first_step_after = round(time.monotonic() - began, 1)
                if ended():
                    return None
                if time.monotonic() > ends:
                    return OUT_OF_TIME
                time.sleep(POLL_SECONDS)
        ended()  # it may have been quicker than the last look
        if process.returncode:
            return failure_reason(self.run_dir, self.log.read_text("utf-8", errors="replace"))
        return None

    def command(self) -> list[str]:
        """What a user would type: the recipe with `accelerate launch`, on rows that fill it."""
        shrunken, length = self.machine.shrunken, self.recipe.data.max_length
        batch = self.recipe.training.global_batch_size
        if shrunken:  # a row of a GPU's length takes seconds on a CPU
            batch, length = 2 * self.recipe.training.rows_at_once, length // 8
        pairs = self.recipe.preferences is not None
        rows = write_rows(self.machine.folder / "rows.jsonl", tokens=batch * length, max_length=length, pairs=pairs)
        budget = {"budget.gpus": 0} if shrunken else {"budget.gpu_memory_gb": self.machine.gpu_gb}
        asked = {
            "output_dir": str(self.run_dir),
            "model.name_or_path": str(model_folder(self.recipe, self.machine)),
            "data.train": [{"path": "json", "data_files": str(rows)}],
            "data.eval": None,
            "data.max_length": length,
            "training.global_batch_size": batch,
            "training.max_steps": 1000 if self.full else self.steps,
            "training.warmup_steps": 0,
            "training.warmup_ratio": 0,
            "training.early_stopping_patience": None,
            "training.load_best_model_at_end": None,
            "samples.count": 0,
            "logging_steps": 1,
            "save_steps": 1000,
            **budget,
        }
        words = [*self.changes, *(f"{key}={json.dumps(value)}" for key, value in asked.items())]
        launch = ["--cpu"] if shrunken else []
        launcher = [sys.executable, "-m", "accelerate.commands.launch", *launch, "--num_processes", "1"]
        script = "benchmarks/gpu_profile.py" if self.way.profiles else "finetune/train.py"
        return [*launcher, script, str(self.path), *words]

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Its metrics of one kind so far."""
        file = self.run_dir / "metrics.jsonl"
        return [line for line in read_lines(file) if line["kind"] == kind] if file.is_file() else []

    def receipt(self) -> dict[str, Any]:
        """Its receipt so far."""
        file = self.run_dir / "receipt.json"
        receipt: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        return receipt

    def figures(self, plan: Mapping[str, Any] | None = None, why: str | None = None) -> dict[str, Any]:
        """Median speed after the first steps, memory against the plan, and what the receipt says of the layers."""
        train, receipt = self.lines("train"), self.receipt()
        timed = train[min(SKIPPED, self.steps - 1) :]
        memory = receipt.get("memory") or {}
        measured = memory.get("measured") or {}
        phases = {
            name: {"measured_bytes": phase["peak_bytes"], "planned_bytes": None}
            for name, phase in (measured.get("phases") or {}).items()
        }
        for row in audited(self.run_dir, receipt, plan) if plan else ():
            phases[row.phase] = {"measured_bytes": row.measured_bytes, "planned_bytes": row.planned_bytes}
        preferences: dict[str, Any] = {}
        if self.recipe.preferences is not None:
            preferences = {
                "reference_seconds": (receipt.get("reference") or {}).get("seconds"),
                "first_rewards": {key: value for key, value in train[0].items() if key.startswith("reward_")},
            }
        return preferences | {
            "tokens_per_second": statistics.median(line["tokens_per_second"] for line in timed),
            "step_seconds": statistics.median(line["step_seconds"] for line in timed),
            "steps_timed": len(timed),
            "first_step_after_seconds": self.first_step_after,
            "losses": [line["loss"] for line in train],
            "peak_memory_gib": max(line["peak_memory_gib"] for line in train),
            "phases": phases,
            "reserved_bytes": {
                "measured": measured.get("reserved_bytes"),
                "planned": (plan or {}).get("reserved_bytes"),
            },
            "outside_bytes": measured.get("outside_bytes"),  # CUDA's context with all kernels of the run
            "not_planned": why,
            "receipt": {key: receipt.get(key) for key in OF_THE_RECEIPT},
        }

    def failure(self, reason: str, ends: float, phase: str = "") -> dict[str, Any]:
        """How it failed, and in which phase of the run."""
        state = self.run_dir / "run_state.json"
        recorded = json.loads(state.read_text("utf-8")) if state.is_file() else {}
        reached = "training" if self.lines("train") else "starting"
        row = {"ok": False, "phase": phase or recorded.get("phase", reached), "reason": reason}
        return row | ({"out_of_time": True} if reason == OUT_OF_TIME else {})


def run_checks(
    kind: str, words: Sequence[str], log: Path, ends: float, watch: Callable[[], object] = lambda: None
) -> int | None:
    """The exit code of a process of gpu_checks.py; None where it was ended at the time `ends`."""
    command = [sys.executable, str(CHECKS), kind, *words]
    with running(command, environment_for_child(HF_HUB_OFFLINE="1"), log) as process:
        while process.poll() is None and time.monotonic() < ends:
            watch()
            time.sleep(POLL_SECONDS)
        code = process.poll()
    watch()
    return code


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in its own session, its output in `log`; none of its processes outlives the block."""
    with open(log, "wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        kill_all(process)


def last_line(log: Path) -> str:
    """The last line that a process printed."""
    lines = [line for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"
