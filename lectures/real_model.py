"""A recipe's model with its first batches in this process, and short runs of the recipe in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.architecture import attention
from finetune.errors import EnvironmentMismatch
from finetune.files import cache_folder, read_lines, remove_folder
from finetune.launch.watched_job import StepFailed, TrainingJob, ended_by_signals, started, wait_for_end
from finetune.model.build import attention_name, build_model
from finetune.model.new_tokens import load_tokenizer
from finetune.output_stream import silenced
from finetune.recipe.schema import Recipe
from finetune.tokens.batches import MicroBatch
from finetune.tokens.dataset import prepare
from finetune.training.batch_plan import plan_batches

TIMEOUT_SECONDS = 1800.0  # of one run: half a minute where nothing else runs
# A short run: every step logged, nothing evaluated, sampled or pushed, one save at its end.
SHORT = (
    "logging_steps=1",
    "training.resume=never",
    "training.early_stopping_patience=null",
    "training.load_best_model_at_end=false",
    "data.eval=null",
    "samples.count=0",
    "samples.prompts=null",
    "hub.push=false",
    "budget={gpus: 0}",
    "accelerate_config=single",
)


@dataclass(frozen=True)
class RealModel:
    """A recipe's model on the CPU, and the micro-batches of its first steps."""

    model: nn.Module
    steps: Sequence[Sequence[MicroBatch]]

    def mean_loss(self, batch: MicroBatch) -> torch.Tensor:
        """The loss of a micro-batch, a mean over its supervised tokens."""
        loss: torch.Tensor = self.model(**batch)
        return loss / len(batch["supervised"])


def real_model(recipe: Recipe, steps: int = 1) -> RealModel:
    """Weights, tokenizer and data are read as a run reads them. Raises FinetuneError."""
    with silenced():
        prepared = prepare(recipe, load_tokenizer(recipe))
        flat = attention_name(recipe) == attention.NAME
        plan = plan_batches(recipe, len(prepared.train), world_size=1, rank=0, flat=flat)
        batches = [plan.micro_batches(prepared.train, plan.rows_of(step)) for step in range(steps)]
        model = build_model(recipe, torch.device("cpu"))
    return RealModel(model.train(), batches)


def short_runs(
    recipe: Path,
    overrides: Sequence[str],
    rows: Mapping[str, Sequence[str]],
    folder: Path,
    *,
    steps: int,
    at_once: int = 1,
    note: Callable[[str], None],
) -> dict[str, list[dict[str, Any]]]:
    """The lines of metrics.jsonl of a run of `steps` steps for each row, which is a name and its own overrides.

    Args:
        at_once: How many run beside each other, each with one thread; 1 where seconds are compared.

    Raises EnvironmentMismatch with the row and its reason where one fails.
    """
    cache = cache_folder()
    length = (f"training.max_steps={steps}", f"save_steps={steps}", f"eval_steps={steps}")
    jobs = {
        name: TrainingJob(
            recipe,
            (*SHORT, *overrides, *length, *own),
            1,
            folder / "jobs" / name,
            timeout=TIMEOUT_SECONDS,
            shared_cache=cache,
        )
        for name, own in rows.items()
    }
    result: dict[str, list[dict[str, Any]]] = {}
    waiting = list(jobs.items())
    while waiting:
        now, waiting = waiting[:at_once], waiting[at_once:]
        note(f"running {recipe.stem}, {steps} steps: {' and '.join(name for name, _ in now)}")
        result |= _run(now)
    return result


def _run(jobs: Sequence[tuple[str, TrainingJob]]) -> dict[str, list[dict[str, Any]]]:
    """These jobs at once. Their run folders are deleted, their logs stay."""
    with ended_by_signals(), ExitStack() as stack:
        for _, job in jobs:
            if job.folder.exists():
                remove_folder(job.folder)
            job.folder.mkdir(parents=True)
        processes = [stack.enter_context(started(job)) for _, job in jobs]
        for (name, job), process in zip(jobs, processes, strict=True):
            try:
                wait_for_end(job, process)
            except StepFailed as error:
                raise EnvironmentMismatch(f"{name}: {error}; {job.log} has all that it printed") from None
    lines = {name: read_lines(job.run_dir / "metrics.jsonl") for name, job in jobs}
    for _, job in jobs:
        remove_folder(job.run_dir)
    return lines
