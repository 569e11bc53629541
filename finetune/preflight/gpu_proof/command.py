"""`finetune doctor --gpu`: the plan, then a line for each proof of this machine's GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from finetune.preflight.gpu_proof.lines import NO_GPU, plan_lines, proof_line, sum_line
from finetune.preflight.gpu_proof.machine import ProofMachine, find_gpus
from finetune.preflight.gpu_proof.plan import Proof, plan_proofs
from finetune.preflight.gpu_proof.sequence import Outcome, not_run, prove


def prove_gpus(log: Callable[[str], None], machine: ProofMachine | None = None) -> dict[str, Any]:
    """Prove the GPUs of `machine`, else of this one, and return the report; `log` gets each line of text.

    The report's `ok` says whether something ran and nothing failed. Without a GPU the plan is all there is.
    """
    machine = machine or find_gpus()
    proofs = plan_proofs(machine)
    for line in plan_lines(machine, proofs):
        log(line)
    report = prove(machine, proofs, lambda outcome: log(proof_line(outcome))) if machine.count else _none(proofs)
    log(sum_line(report) if machine.count else NO_GPU)
    return report


def _none(proofs: list[Proof]) -> dict[str, Any]:
    outcomes: list[Outcome] = [not_run(proof, proof.missing or "needs a GPU") for proof in proofs]
    return {"ok": False, "device": None, "gpus": 0, "proofs": outcomes, "seconds": 0.0, "folder": None}
