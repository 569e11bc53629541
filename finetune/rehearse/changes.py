"""A rehearsal's changes to a recipe: each is a few overrides and a line that explains them.

Everything else stays: strategy, method, precision, packing, checkpointing, save path, schedule, seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import yaml

from finetune.data.sources import resolve
from finetune.files import json_lines
from finetune.launch.watched_job import with_two_copies
from finetune.paths import SHIPPED
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.resolved import LoadedRecipe
from finetune.recipe.schema import DataSet, Recipe, Training
from finetune.recipe.strategy import Strategy
from finetune.rehearse.shrink import LAYERS, Shrunk
from finetune.wording import counted

STEPS, SAVED_AFTER = 4, 2
LONGEST_ROW = 384  # tokens
FEW_ROWS = 400  # of each data set
MICRO_STEPS = 2  # so that accumulation is rehearsed
SAMPLE_CHAT = SHIPPED / "data" / "sample_chat.jsonl"
RESUMES_ON_A_GPU = (
    "training.deterministic: a CPU's kernels sum in one order, so the resumed run is compared bitwise; on a GPU its "
    "state is bitwise, its losses are to rounding, unless this is true"
)
# The file has 42 rows. Held-out rows must not be trained on.
STAND_IN_ROWS = {"data.train": "train[:36]", "data.eval": "train[36:]"}


@dataclass(frozen=True)
class RecipeChange:
    """Settings that differ from the recipe's, and a note that says so; an empty note means bookkeeping."""

    settings: dict[str, Any]
    note: str = ""


def processes_of(strategy: Strategy, requested: int) -> int:
    """Ranks of a rehearsal: one for single, copies of shards for HSDP, two stages or more for each pipeline.

    Five ranks requested for two pipelines: three each, so six.
    """
    copies = 1
    if strategy.pipelines:
        copies = strategy.pipelines.copies
    elif strategy.replicates:
        copies = 2
    in_each_copy = math.ceil(max(2 * copies, requested) / copies)
    return strategy.rank_count(in_each_copy * copies)


def layers_of(strategy: Strategy, ranks: int) -> int:
    """Layers of the small model: a pipeline has one or two for each stage."""
    if not strategy.pipelines:
        return LAYERS
    return max(LAYERS, strategy.stage_count(ranks) * strategy.pipelines.runs)


def changes(recipe: Recipe, strategy: Strategy, model: Shrunk, *, processes: int, folder: Path) -> list[RecipeChange]:
    """Everything that the rehearsal sets. It writes its files, except the model, into `folder`."""
    pushes = recipe.hub.push or recipe.hub.checkpoints is not None
    candidates = [
        *_device(recipe, strategy, processes, folder),
        *_model(recipe, model),
        *_data(recipe, folder),
        *_training(recipe, processes),
        RecipeChange({"hub.push": False, "hub.checkpoints": None}, "hub: nothing is pushed" if pushes else ""),
        RecipeChange({"run.storage": None}, "run.storage: nothing is sent" if recipe.run.storage else ""),
        RecipeChange({"report_to": []}, "report_to: nothing is tracked" if recipe.report_to else ""),
        *_schedule(recipe.training),
        RecipeChange({"logging_steps": 1, "eval_steps": SAVED_AFTER, "measure_phases": False}),
        RecipeChange({"save_steps": SAVED_AFTER, "save_total_limit": max(2, recipe.save_total_limit)}),
        RecipeChange({"timeout_seconds": max(300, recipe.timeout_seconds)}),  # ranks share a core here
    ]
    return [change for change in candidates if change.settings or change.note]


def formats_of_gpus(page: LoadedRecipe) -> list[RecipeChange]:
    """The format that `auto` means on the recipe's GPUs; on this CPU it may be another format."""
    if not page.recipe.budget.gpus or not page.auto_formats:
        return []
    values = {"training.mixed_precision": page.recipe.training.mixed_precision, "model.dtype": page.recipe.model.dtype}
    settings = {key: values[key] for key in page.auto_formats}
    chosen = ", ".join(f"{key}: {value}" for key, value in settings.items())
    return [RecipeChange(settings, f"{chosen}, which auto is on GPUs, whatever this CPU computes fastest")]


def overrides(recipe_changes: list[RecipeChange]) -> list[str]:
    """The changes as the command line takes them, `dotted.key=value`."""
    return [f"{key}={json.dumps(value)}" for change in recipe_changes for key, value in change.settings.items()]


def _device(recipe: Recipe, strategy: Strategy, processes: int, folder: Path) -> Iterator[RecipeChange]:
    budget = recipe.budget
    gpus = budget.gpus * budget.nodes
    device = "as many as are launched"
    if gpus == 1:
        device = "a GPU"
    elif gpus > 1:
        device = f"{gpus} GPUs over NCCL"
    ranks = "one process" if processes == 1 else f"{processes} processes over gloo"
    note = f"device: {ranks} on the CPU instead of {device}" if gpus or processes > 1 else ""
    yield RecipeChange({"budget.gpus": 0, "budget.nodes": 1}, note)
    if strategy.replicates:
        note = "accelerate_config: two copies, each sharded over half of the processes; else a copy is a node"
        yield RecipeChange({"accelerate_config": str(with_two_copies(strategy, folder))}, note)
    if "nvme" in strategy.offload_devices.values():
        # NVMe offload writes to the rehearsal's own folder.
        section = strategy.section("deepspeed_config")
        paths = [key for key in section if key.endswith("_nvme_path")]
        settings = {}
        if paths:
            config = folder / f"{strategy.name}.yaml"
            others = {key: value for key, value in section.items() if key not in paths}
            config.write_text(yaml.safe_dump(strategy.settings | {"deepspeed_config": others}), "utf-8")
            settings = {"accelerate_config": str(config)}
        yield RecipeChange(
            settings, "accelerate_config: NVMe offload writes to the temporary folder, which may be on another disk"
        )
    if budget.gpus and not recipe.training.deterministic:
        yield RecipeChange({}, RESUMES_ON_A_GPU)
    if recipe.training.non_blocking and budget.gpus:
        yield RecipeChange({}, "training.non_blocking: no pinned memory, no copies ahead; a CPU has nothing to copy to")


def _model(recipe: Recipe, model: Shrunk) -> Iterator[RecipeChange]:
    full, small = model.full, model.small
    yield RecipeChange(
        {"model.name_or_path": str(model.folder), "model.revision": "main", "model.trust_remote_code": False},
        f"model: {small['layers']} layers of {small['hidden_size']} with random weights instead of {full['layers']} of "
        f"{full['hidden_size']} ({model.source})",
    )
    template = "" if recipe.data.chat_template else ", a ChatML template,"
    tokens = f"{model.vocabulary} tokens learned from the rows{template}"
    yield RecipeChange({}, f"tokenizer: {tokens} instead of the model's own")
    if recipe.model.adapter is not None:
        note = f"model.adapter: new adapters instead of {recipe.model.adapter}, which fits the real model alone"
        yield RecipeChange({"model.adapter": None}, note)
    preferences = recipe.preferences
    if preferences is not None and preferences.reference not in ("start", "adapter_off"):
        key = f"{recipe.training.objective}.reference"
        note = f"{key}: start instead of {preferences.reference}, which fits the real model alone"
        yield RecipeChange({key: "start"}, note)
    attention = recipe.model.attention
    if attention.startswith("flash"):
        yield RecipeChange(
            {"model.attention": "auto"}, f"model.attention: documents by torch's own kernel, no {attention}"
        )
    elif attention == "auto" and recipe.budget.gpus:
        yield RecipeChange(
            {}, "model.attention: documents by torch's CPU kernel instead of variable-length flash attention"
        )


def _data(recipe: Recipe, folder: Path) -> Iterator[RecipeChange]:
    data = recipe.data
    yield from _data_sets("data.train", data.train, folder)
    yield from _data_sets("data.eval", data.eval_sets, folder)
    if data.max_length > LONGEST_ROW:
        note = f"data.max_length: rows of {LONGEST_ROW} tokens instead of {data.max_length:,}"
        yield RecipeChange({"data.max_length": LONGEST_ROW}, note)
    if data.truncation != "right":
        note = f"data.truncation: longer documents are cut, where the recipe says {data.truncation}"
        yield RecipeChange({"data.truncation": "right"}, note)


def _data_sets(key: str, entries: list[DataSet], folder: Path) -> Iterator[RecipeChange]:
    for index, entry in enumerate(entries):
        source = resolve(entry)
        if source.kind == "hub":
            stand_in = {
                "path": "json",
                "data_files": str(SAMPLE_CHAT),
                "split": STAND_IN_ROWS[key],
                "format": "messages",
                "weight": entry.weight,
            }
            rows = "data/sample_chat.jsonl"
            if entry.format in ("preference", "kto"):
                stand_in |= {"data_files": str(sample_preferences(entry.format, folder, index)), "format": entry.format}
                rows = f"data/sample_chat.jsonl, each last answer beside another chat's, as {entry.format} rows,"
            if entry.chat_template_kwargs:
                stand_in["chat_template_kwargs"] = entry.chat_template_kwargs
            yield RecipeChange({f"{key}.{index}": stand_in}, f"{key}: {rows} instead of {entry.path}")
        elif "[" not in entry.split and any(islice(source.rows(), FEW_ROWS, None)):
            settings = {f"{key}.{index}.split": f"{entry.split}[:{FEW_ROWS}]"}
            yield RecipeChange(settings, f"{key}: the first {FEW_ROWS} rows of {source.name}")


def sample_preferences(layout: Literal["preference", "kto"], folder: Path, index: int = 0) -> Path:
    """The sample chats as rows of preferences: a chat's own last answer is better than a later chat's.

    Args:
        index: Of the data set. Each has another answer beside a chat's own, so that no two data sets have equal rows.
    """
    chats = [json.loads(line)["messages"] for line in SAMPLE_CHAT.read_text("utf-8").splitlines()]
    rows: list[dict[str, Any]] = []
    for number, (*prompt, answer) in enumerate(chats):
        other = chats[(number + 1 + index) % len(chats)][-1]
        if layout == "preference":
            rows.append({"prompt": prompt, "chosen": [answer], "rejected": [other]})
        else:
            wanted = number % 2 == 0
            rows.append({"prompt": prompt, "completion": [answer if wanted else other], "label": wanted})
    file = folder / f"sample_{layout}_{index}.jsonl"
    file.write_text(json_lines(rows), "utf-8")
    return file


def _training(recipe: Recipe, processes: int) -> Iterator[RecipeChange]:
    training = recipe.training
    micro_batch = min(2, training.rows_at_once)
    rows = micro_batch * processes
    if training.global_batch_size > rows:
        rows *= MICRO_STEPS
    yield RecipeChange(
        {
            "training.max_steps": STEPS,
            "training.global_batch_size": rows,
            "training.per_device_batch_size": micro_batch,
            "training.early_stopping_patience": None,
            "training.load_best_model_at_end": training.exports_best,
            "training.resume": "auto",
            "samples.count": 1,
            "samples.prompts": recipe.samples.prompts[:1] if recipe.samples.prompts else None,
            "samples.max_new_tokens": 4,
        },
        f"training: {STEPS} steps of {counted(rows, recipe.data.row_noun)}, {micro_batch} at a time on each rank",
    )
    if training.activation_offloading:
        yield RecipeChange({}, "training.activation_offloading: hidden states are copied within this CPU's memory")
    if plain := OPTIMIZERS[training.optim].unpaged:
        note = f"training.optim: {plain} instead of {training.optim}, whose pages are CUDA's"
        yield RecipeChange({"training.optim": plain}, note)


def _schedule(training: Training) -> Iterator[RecipeChange]:
    """Shorten phases of the schedule, so that none outlasts the four steps or ends at rate 0 before them.

    Warmup and decay take one step each. The stable phase has no number then, so it takes the steps that are left.
    """
    arguments = dict(training.lr_scheduler_kwargs)
    stable = arguments.pop("num_stable_steps", None)
    steps = {name for name in ("num_decay_steps", "timescale") if name in arguments}
    settings: dict[str, Any] = {}
    if (training.warmup_steps or 0) > 1:
        settings["training.warmup_steps"] = 1
    if steps or stable is not None:
        settings["training.lr_scheduler_kwargs"] = arguments | dict.fromkeys(steps, 1)
    named = [key.rpartition(".")[2] for key in settings]
    if settings:
        yield RecipeChange(settings, f"training: {' and '.join(named)}: each number of steps is 1")
