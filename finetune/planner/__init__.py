"""Will it fit, and how fast will it be? The trainer's own step, run on tensors without data.

May import: training and what is below it. Only this module is imported from elsewhere; it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.planner.audit import AuditRow

PLAN_OF_RUN_SECONDS = 600  # a plan of the largest recipes takes about two minutes


def plan_of_run(
    run: Path, note: Callable[[str], None] = lambda line: None, timeout: float = PLAN_OF_RUN_SECONDS
) -> tuple[Mapping[str, Any] | None, str | None]:
    """The JSON of a run's plan, or None and the reason. The first call stores the plan in the run's folder.

    Never raises for a plan that cannot be made.

    Args:
        note: Receives one line before a plan is made, because that takes seconds to minutes.
        timeout: Seconds to wait for a new plan.
    """
    from finetune.planner import run_plans

    return run_plans.plan_of_run(run, note, timeout)


def audited(run: Path, receipt: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[AuditRow]:
    """One row for each phase that was both planned and measured, from a run's folder, its receipt and its plan."""
    from finetune.planner import audit

    return audit.audited(run, receipt, plan)


def audit_in_words(runs: Sequence[Path], note: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    """`finetune plan --audit`: the table of planned and measured bytes, as JSON and as text.

    Raises FinetuneError for a folder that is not a run.
    """
    from finetune.planner import audit

    return audit.audit_in_words(runs, note)
