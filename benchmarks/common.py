"""What the benchmarks share: a place for results with date, versions and device, and the parts of one of our runs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator

from benchmarks.records import RESULTS, STAMP, stamp
from finetune.architecture import attention
from finetune.measure.host_memory import usable_cores
from finetune.measure.metrics import Terminal
from finetune.measure.phases import Phases
from finetune.model.build import attention_name, build_model
from finetune.model.new_tokens import load_tokenizer
from finetune.model.optimizer import Schedule, make_optimizer
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import read_strategy
from finetune.run_folder.train_state import TrainState
from finetune.tokens.dataset import Prepared, prepare
from finetune.training.batch_plan import plan_batches
from finetune.training.cast_weights import cast_weights
from finetune.training.loop import take_steps
from finetune.training.objectives import objective_of
from finetune.training.run import Run, StepParts
from finetune.training.run_output import RunOutput

PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "trl")


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Write benchmarks/results/NAME.json: the figures, the code and the machine on which they were measured."""
    file = RESULTS / f"{name}.json"
    versions = {package: version for package in PACKAGES if (version := version_of(package))}
    facts = {**stamp(name, result), "device": device(), "versions": versions}
    figures = {key: value for key, value in result.items() if key not in STAMP}  # not those of an earlier record
    file.write_text(json.dumps(facts | figures, indent=2) + "\n", "utf-8")
    return file


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device() -> str:
    """The GPU's name, or the processor's with the cores that this process may use."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = usable_cores()
    return f"{names[0] if names else platform.processor()}, {cores} cores, {torch.get_num_threads()} threads used"


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder that is also the data cache, so that nothing is found from before; no planner runs beside."""
    with (
        TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"FINETUNE_CACHE": f"{folder}/cache"}),
    ):
        yield Path(folder)


def tiny_recipe(model: Path, chats: Path, *, data: dict[str, Any], training: dict[str, Any], **rest: Any) -> Recipe:
    """Full fine-tuning in float32 of the model in a folder on a file of chats."""
    plain = {"mixed_precision": "no", "activation_checkpointing": False, "learning_rate": 1e-4, "warmup_ratio": 0.0}
    sections = {
        "model": {"name_or_path": str(model), "dtype": "float32"},
        "lora": None,
        "data": {"train": [{"path": "json", "data_files": str(chats)}], **data},
        "training": plain | training,
    }
    return Recipe.model_validate(sections | rest)


def prepare_silenced(recipe: Recipe) -> Prepared:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return prepare(recipe, load_tokenizer(recipe))


def run_ours(recipe: Recipe, prepared: Prepared, write_metrics: Callable[[dict[str, Any]], None]) -> None:
    """The product's own loop from its first step to its last, without run folder, samples and checkpoints."""
    accelerator = Accelerator(mixed_precision=recipe.training.mixed_precision, cpu=not torch.cuda.is_available())
    flat = attention_name(recipe) == attention.NAME
    plan = plan_batches(recipe, len(prepared.train), world_size=1, rank=0, flat=flat)
    model: Any = build_model(recipe, accelerator.device)
    weights = cast_weights(recipe, read_strategy(recipe.accelerate_config), model)
    model, optimizer = accelerator.prepare(model, make_optimizer(model, recipe))
    parts = StepParts(
        accelerator=accelerator,
        model=model.train(),
        optimizer=optimizer,
        objective=objective_of(recipe),
        phases=Phases(accelerator.device, enabled=False),
        max_grad_norm=recipe.training.max_grad_norm,
        weights=weights,
    )
    output = RunOutput(recipe, plan.total_steps, writes=False)
    run = Run(
        recipe=recipe,
        plan=plan,
        parts=parts,
        train_rows=prepared.train,
        eval_rows=None,
        schedule=Schedule(recipe.training, plan.total_steps),
        output=output,
    )
    output.terminal = Terminal(plan.total_steps, silent=False, stream=io.StringIO())
    output.write_metrics = write_metrics  # type: ignore[method-assign]
    assert take_steps(run, TrainState())
