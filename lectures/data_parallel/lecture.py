"""The lecture `data-parallel`: seconds, bytes and memory of DataParallel's steps, and the same steps under DDP."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune.closed_form.constants import FLOAT32
from finetune.errors import FinetuneError
from finetune.model.known_configs import planned_config
from finetune.output_stream import silenced
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.rehearse.shrink import Shrunk, shrink_model
from finetune.report.pictures import COLOURS, new_figure
from finetune.wording import GIB
from lectures.data_parallel.ddp_rank import train_ddp
from lectures.data_parallel.training import STEP_TIMES, Job, Trained, train_data_parallel
from lectures.output import Chapter, LectureRequest, LectureResult, columns, whole_number

_MIB = 2**20
_WIDTH = 116
_FULL_SIZE = (2, 4, 8)  # GPUs of the table at full size
_LEAST = {"replicas": 2, "rows": 1, "tokens": 2, "steps": 2}  # of the settings
_MOVED = ("scatter", "replicate", "gather", "reduce")


def data_parallel_lecture(asked: LectureRequest) -> LectureResult:
    """Train small under both. Raises FinetuneError for a wrong recipe or setting, and where a rank fails."""
    recipe = load_recipe(asked.recipe, asked.overrides).recipe
    gpus = torch.cuda.device_count() > 1
    # One replica has nothing to scatter, one token none after it, and the first step is not timed.
    replicas, rows, tokens, steps = (whole_number(asked.settings, name, least=least) for name, least in _LEAST.items())
    _check(replicas, rows, gpus=gpus)
    section = recipe.model
    with silenced():
        small = shrink_model(section.name_or_path, section.revision, recipe.data, asked.folder / "model")
    job = Job(small.folder, replicas, rows, tokens, steps)
    asked.note(f"training {steps} steps under DataParallel, {replicas} replicas")
    with silenced():
        alone = train_data_parallel(job, gpus=gpus)
    asked.note(f"training {steps} steps under DDP, {replicas} ranks")
    ranks = train_ddp(job, gpus=gpus)
    where = f"{replicas} GPUs" if gpus else f"{replicas} threads of a CPU, each with one core"
    sections = [
        _what_runs(small, job, where, gpus=gpus),
        _seconds(alone, ranks, job),
        _bytes(alone, ranks),
        _memory(alone, ranks, gpus=gpus),
        _at_full_size(recipe),
        Chapter("What to notice", [*_words(alone, ranks, job, gpus=gpus)], measured=True),
    ]
    facts = {
        "recipe": str(asked.recipe),
        "overrides": list(asked.overrides),
        "job": vars(job) | {"model": small.architecture, "parameters": small.parameters},
        "device": "cuda" if gpus else "cpu",
        "data_parallel": alone.as_json(),
        "ddp": ranks.as_json(),
        "worst_loss_difference": loss_difference(alone, ranks),
    }
    return LectureResult(sections, facts, partial(_draw, alone, ranks, where))


def _check(replicas: int, rows: int, *, gpus: bool) -> None:
    if rows % replicas:
        raise FinetuneError(f"rows: {rows}: do not divide among {replicas} replicas; write rows={4 * replicas}")
    if gpus and replicas > torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise FinetuneError(f"replicas: {replicas}: this machine has {found} GPUs; write replicas={found}")


def loss_difference(alone: Trained, ranks: Trained) -> float:
    """The worst relative difference of a step's losses."""
    return max(abs(one / other - 1) for one, other in zip(alone.losses, ranks.losses, strict=True))


def _what_runs(small: Shrunk, job: Job, where: str, *, gpus: bool) -> Chapter:
    text = [
        f"{small.architecture} of {small.parameters:,} parameters in float32, {job.steps} steps of {job.rows} rows of "
        f"{job.tokens} tokens, on {where}; logits are gathered and the loss is the master's, as DataParallel is taught."
    ]
    if not gpus:
        text.append(
            "torch's DataParallel needs GPUs. Its four steps are played here: threads run replicas, whose weights are "
            "copied from the master's in each step; autograd sums their gradients into the master's. A copy within "
            "host memory stands for one between GPUs, so its seconds are of this memory and not of a bus."
        )
    return Chapter("What runs", textwrap.wrap(" ".join(text), _WIDTH, break_on_hyphens=False))


def _seconds(alone: Trained, ranks: Trained, job: Job) -> Chapter:
    """Milliseconds of a step by part."""
    head = ("ms of a step", *STEP_TIMES, "sum")
    rows = []
    for name, each in (("DataParallel", alone), ("DDP", ranks)):
        cells = [f"{1000 * each.seconds[part]:.2f}" if part in each.seconds else "-" for part in STEP_TIMES]
        rows.append((name, *cells, f"{1000 * each.step_seconds:.2f}"))
    lines = [
        *columns(head, rows),
        f"The mean of {job.steps - 1} steps; of DDP the slowest rank's. backward has the reduction in it.",
    ]
    return Chapter("Seconds", lines, measured=True)


def _bytes(alone: Trained, ranks: Trained) -> Chapter:
    """Bytes of a step through the busiest device."""
    weights = alone.parameter_bytes
    master, ring = sum(alone.sent.values()), sum(ranks.sent.values())
    none = ["-"] * len(_MOVED)
    rows = [
        ("DataParallel's master", *(f"{alone.sent[part] / _MIB:.3f}" for part in _MOVED), "-", *_sums(master, weights)),
        ("DDP, each rank", *none, f"{ring / _MIB:.3f}", *_sums(ring, weights)),
    ]
    head = ("MiB of a step", *_MOVED, "all_reduce", "sum", "in P")
    last = f"P: the weights' {weights:,} bytes. In and out together; DDP's in a ring."
    lines = [*columns(head, rows), last]
    return Chapter("Bytes into and out of the busiest device", lines)


def _sums(nbytes: int, weights: int) -> tuple[str, str]:
    return f"{nbytes / _MIB:.3f}", f"{nbytes / weights:.2f}"


def _memory(alone: Trained, ranks: Trained, *, gpus: bool) -> Chapter:
    """Memory of the master, of another replica and of a rank."""
    rows = []
    devices = {"DataParallel, master": (alone, 0), "DataParallel, another": (alone, 1), "DDP, a rank": (ranks, 0)}
    shown = ("forward", "gather", "loss", "step")
    for name, (each, number) in devices.items():
        cells = [f"{each.memory[part][number] / _MIB:.2f}" if part in each.memory else "-" for part in shown]
        rows.append((name, *cells))
    lines = columns(("MiB after", *shown), rows)
    if not gpus:
        lines.append("Of tensors, by the thread that made them; the host's memory holds all of it.")
    return Chapter("Memory", lines)


def _at_full_size(recipe: Recipe) -> Chapter:
    """What the bytes come to for the recipe's own model, by arithmetic."""
    from lectures.memory import parameter_count

    count = parameter_count(recipe)
    config = planned_config(recipe.model.name_or_path, recipe.model.revision)[0]
    weights = FLOAT32 * count
    rows = []
    for number in _FULL_SIZE:
        micro = recipe.training.rows_at_once * recipe.data.max_length
        logits = FLOAT32 * number * micro * int(config["vocab_size"])
        master, ring = master_bytes(weights, number), ring_bytes(weights, number)
        cells = (f"{master / GIB:.2f}", f"{ring / GIB:.2f}", f"{master / ring:.1f}", f"{logits / GIB:.2f}")
        rows.append((f"{number} GPUs", *cells))
    head = ("GiB of a step", "DataParallel's master", "DDP, each rank", "times", "logits on the master")
    title = f"At full size, by arithmetic: {recipe.model.name_or_path}, {count:,} parameters in float32"
    lines = [
        *columns(head, rows),
        "Of N GPUs the master sends weights to N - 1 others and receives their gradients, 2 (N-1) P; a rank of DDP",
        "sends 2 (N-1)/N P in a ring and receives as much: N/2 times less, and no rank more than another.",
        "Logits: each GPU has the recipe's micro-batch, and the master all of theirs, in float32.",
    ]
    return Chapter(title, lines)


def master_bytes(weights: int, replicas: int) -> int:
    """Weights to every other replica, and their gradients back."""
    return 2 * (replicas - 1) * weights


def ring_bytes(weights: int, replicas: int) -> float:
    """What a rank sends and receives in an all-reduce."""
    return 4 * (replicas - 1) / replicas * weights


def _words(alone: Trained, ranks: Trained, job: Job, *, gpus: bool) -> Iterator[str]:
    """In lines that break at the same words whatever the figures are."""
    extra = sum(alone.seconds[part] for part in ("scatter", "replicate", "gather"))
    master, other = (alone.memory["gather"][number] for number in (0, 1))
    yield f"Scatter, replicate and gather take {extra / alone.step_seconds:.1%} of DataParallel's step;"
    yield "DDP has none of them."
    yield f"The loss of all {job.rows} rows is the master's alone: {1000 * alone.seconds['loss']:.2f} ms,"
    yield f"of a rank of DDP {1000 * ranks.seconds['loss']:.2f} ms."
    yield f"When the logits are gathered, the master holds {master / _MIB:.2f} MiB,"
    yield f"another replica {other / _MIB:.2f} MiB: moments and all logits are the master's, and soon the gradients."
    yield "With a batch that fills the master,"
    yield f"the other GPUs are {1 - other / master:.0%} emptier."
    yield "All replicas are threads of one process: between two kernels each needs Python's one lock."
    if not gpus:
        yield "Here they wait for the lock and for the memory that they share."
    yield f"Both learn the same: losses of {job.steps} steps differ by {loss_difference(alone, ranks):.1e} at most."


def _draw(alone: Trained, ranks: Trained, where: str, file: Path) -> None:
    """Time of a step by part, bytes through the busiest device, memory after the gathering."""
    figure = new_figure(figsize=(11.0, 4.8))
    seconds, moved, memory = figure.subplots(1, 3, width_ratios=[1.2, 1, 1.2])
    figure.suptitle(f"One step under DataParallel and under DDP: {where}", fontweight="bold")
    names = ("DataParallel", "DDP")
    _stack(
        seconds, names, {part: [1000 * each.seconds.get(part, 0.0) for each in (alone, ranks)] for part in STEP_TIMES}
    )
    seconds.set_title("milliseconds by part", loc="left", fontsize=11)
    sent: dict[str, Any] = {part: [alone.sent[part] / _MIB, 0.0] for part in _MOVED}
    _stack(moved, ("master", "DDP rank"), sent | {"all_reduce": [0.0, sum(ranks.sent.values()) / _MIB]})
    moved.set_title("MiB in and out of the busiest device", loc="left", fontsize=11)
    places = ("master", "another", "DDP rank")
    after = {"forward": "forward", "loss": "loss", "step": "step"}
    groups = {part: [alone.memory[key][0], alone.memory[key][1], ranks.memory[key][0]] for part, key in after.items()}
    width = 0.8 / len(groups)
    for number, (part, values) in enumerate(groups.items()):
        spots = [index + (number - 1) * width for index in range(len(places))]
        bars = memory.bar(spots, [value / _MIB for value in values], width * 0.9, label=part, color=COLOURS[number])
        memory.bar_label(bars, fmt="{:.1f}", fontsize=8, padding=2)
    memory.set_xticks(range(len(places)), places)
    memory.set_title("MiB held after", loc="left", fontsize=11)
    for axes in (seconds, moved, memory):
        axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.15)
    figure.savefig(file)


def _stack(axes: Any, names: tuple[str, ...], parts: Mapping[str, list[float]]) -> None:
    bottoms = [0.0] * len(names)
    for number, (part, heights) in enumerate(parts.items()):
        axes.bar(names, heights, 0.55, bottom=bottoms, label=part, color=COLOURS[number % len(COLOURS)])
        bottoms = [below + height for below, height in zip(bottoms, heights, strict=True)]
    for index, top in enumerate(bottoms):
        axes.annotate(f"{top:.1f}", (index, top), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    axes.set_ylim(0, 1.15 * max(bottoms))  # matplotlib leaves no margin above a part of no height
