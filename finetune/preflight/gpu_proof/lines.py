"""The proofs as text: the plan, a line for each proof, and the sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.preflight.gpu_proof.machine import ProofMachine
from finetune.preflight.gpu_proof.plan import PROOF_STEPS, Proof
from finetune.wording import counted

NO_GPU = "torch sees no GPU here; run it on the machine that has one, after `finetune doctor` finds nothing bad there"
SECONDS_EACH = 20  # of one training


def plan_lines(machine: ProofMachine, proofs: Sequence[Proof]) -> list[str]:
    """What will be run, and what cannot be; without a GPU what would be."""
    runs = [proof for proof in proofs if not proof.missing]
    minutes = max(1, round(len(runs) * SECONDS_EACH / 60))
    where = f"{counted(machine.count, 'GPU')}, {machine.name}" if machine.count else machine.name
    trainings = f"{counted(len(runs), 'small training')}, {PROOF_STEPS} steps each"
    lines = [f"proofs on {where}: {trainings}; about {counted(minutes, 'minute')}, most of it imports"]
    for number, proof in enumerate(proofs, 1):
        bounds = "" if proof.bounds is None else f"; loss within {proof.bounds.loss:.0e}, norm {proof.bounds.norm:.0e}"
        not_run = f" (not run: {proof.missing})" if proof.missing else ""
        lines.append(f"{number:>4}  {proof.name:<21}{proof.claim}{bounds}{not_run}")
    return lines


def proof_line(outcome: Mapping[str, Any]) -> str:
    """One line: its state, seconds, name, and what was seen."""
    mark = "FAILED" if outcome["state"] == "failed" else outcome["state"]
    seconds = f"{outcome['seconds']:6.1f} s" if outcome["state"] != "not run" else f"{'':8}"
    return f"{mark:<8}{seconds}  {outcome['name']:<21}{outcome['seen']}"


def sum_line(report: Mapping[str, Any]) -> str:
    """How many proofs ended how, and where the logs of a failure are."""
    states = Counter(outcome["state"] for outcome in report["proofs"])
    ended = ", ".join(f"{states[state]} {state}" for state in ("ok", "failed", "not run") if states[state])
    logs = f"; each training's log: {report['folder']}/*/run.log" if report["folder"] else ""
    return f"{counted(len(report['proofs']), 'proof')}: {ended}, in {report['seconds']:.0f} s{logs}"
