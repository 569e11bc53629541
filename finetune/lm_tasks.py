"""Benchmarks of base and tuned model by EleutherAI's lm-eval, the extra `eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.held_out import models_of
from finetune.tuned import FinishedRun, fitting


def task_figures(
    run: FinishedRun, device: torch.device, tasks: Sequence[str], *, include: Path | None, limit: int | None
) -> dict[str, Any]:
    """name -> task -> metric -> value, `name` being base and tuned; lm-eval's own settings and metrics.

    Args:
        tasks: lm-eval's names; * stands for any letters.
        include: A folder with task files of the user's own.
        limit: Questions of each task; None: all of them.

    Raises:
        EnvironmentMismatch: lm-eval is not there, or a task's data cannot be had.
        FinetuneError: there is no such task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise EnvironmentMismatch(f"--tasks: {error}; install it with: pip install 'finetune[eval]'") from error
    manager = TaskManager(include_path=str(include) if include else None)
    for name in tasks:
        if not manager.match_tasks([name]):
            raise FinetuneError(
                f"--tasks: lm-eval knows no {name}; lm_eval ls tasks shows all, --include adds a folder"
            )
    tokenizer = AutoTokenizer.from_pretrained(run.product)
    figures = {}
    for which, model in models_of(run, device, with_loss=False):
        asked = HFLM(pretrained=model, tokenizer=tokenizer, device=str(device))
        with fitting(device):
            try:
                found = simple_evaluate(
                    asked, tasks=manager.match_tasks(list(tasks)), task_manager=manager, limit=limit, log_samples=False
                )
            except (OSError, ValueError) as error:
                reason = " ".join(str(error).split())[:300]
                raise EnvironmentMismatch(f"--tasks: lm-eval could not ask {', '.join(tasks)}: {reason}") from error
        figures[which] = {task: _numbers(values) for task, values in found["results"].items()}
    return figures


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """metric,filter -> value; a filter called none is left out."""
    return {
        key.removesuffix(",none"): float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and "," in key
    }


def in_words(figures: dict[str, Any]) -> str:
    """A line for each task and metric, base and tuned side by side."""
    lines = [f"{'task':24}{'metric':24}{'base':>10}{'tuned':>10}"]
    for task, metrics in figures["tuned"].items():
        for metric, value in metrics.items():
            lines.append(f"{task:24}{metric:24}{figures['base'][task][metric]:>10.4f}{value:>10.4f}")
    return "\n".join(lines)
