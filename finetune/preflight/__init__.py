"""Before you pay: rehearse a recipe, compare settings, examine this machine.

    report = rehearse(recipe, words, log=print)           the whole run, small, on the CPU
    comparison = plan_comparison(recipe, words, settings_of_rows(["accelerate_config=ddp,fsdp2"]), ...)
    result = run_and_report(comparison, quiet=False)      the same steps in each setting
    findings = list(examine_machine())                    libraries, devices, disk, token

Other packages import only this module. It imports nothing before a name is asked for.

May import: training and what is below it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.preflight.comparison import Comparison, compare, plan_comparison, run_and_report, settings_of_rows
    from finetune.preflight.disk import free_bytes
    from finetune.preflight.doctor import Finding, as_text, examine_machine
    from finetune.preflight.job import (
        StepFailed,
        TrainingJob,
        ended_by_signals,
        failure_reason,
        kill_all,
        relative_difference,
        started,
        train_lines,
        wait_for_end,
        with_two_copies,
    )
    from finetune.preflight.rehearsal import checklist_printer, rehearse
    from finetune.preflight.shrink import BUILT_IN, END_TOKENS, Shrunk, sample_texts, shrink_model, train_tokenizer

# Module -> the names that it gives.
_NAMES = {
    # The commands.
    "rehearsal": ("checklist_printer", "rehearse"),
    "comparison": ("Comparison", "compare", "plan_comparison", "run_and_report", "settings_of_rows"),
    "doctor": ("Finding", "as_text", "examine_machine"),
    # For lectures and benchmarks: a training as a job of its own, a small model with a tokenizer of the rows.
    "job": (
        *("StepFailed", "TrainingJob", "ended_by_signals", "failure_reason", "kill_all", "relative_difference"),
        *("started", "train_lines", "wait_for_end", "with_two_copies"),
    ),
    "shrink": ("BUILT_IN", "END_TOKENS", "Shrunk", "sample_texts", "shrink_model", "train_tokenizer"),
    "disk": ("free_bytes",),
}

__all__ = [
    "BUILT_IN",
    "END_TOKENS",
    "Comparison",
    "Finding",
    "Shrunk",
    "StepFailed",
    "TrainingJob",
    "as_text",
    "checklist_printer",
    "compare",
    "ended_by_signals",
    "examine_machine",
    "failure_reason",
    "free_bytes",
    "kill_all",
    "plan_comparison",
    "rehearse",
    "relative_difference",
    "run_and_report",
    "sample_texts",
    "settings_of_rows",
    "shrink_model",
    "started",
    "train_lines",
    "train_tokenizer",
    "wait_for_end",
    "with_two_copies",
]


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
