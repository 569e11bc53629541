"""The planner as a child process: `python -m finetune.planner`, a request on standard input, answers as JSON lines.

launch/plan_request.py starts it. A failure is an answer too, because no run or report may fail for its plan.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from finetune.launch.with_parent import die_with_parent
from finetune.planner.run_plans import fitting_changes, planned, read_request

TIGHT_SHARE = 0.5  # of the memory; if the plan needs less, no changes that lower it are planned


def main() -> int:
    """Print the plan; then, if the request says so, the plan with the changes that fit. Returns 0."""
    die_with_parent(signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries that print must not print among the answers
    facts = json.load(sys.stdin)
    wants_changes = facts.pop("changes", False)
    request = read_request(facts)
    plan, why, needed = planned(request)
    print(json.dumps({"plan": plan, "why": why, "changes": None}), file=answers, flush=True)
    if plan is not None and wants_changes:
        changes = []
        if needed > TIGHT_SHARE * request.memory:
            changes = fitting_changes(request)
        print(json.dumps({"plan": plan, "why": why, "changes": changes}), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
