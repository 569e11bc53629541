"""The proofs one after another, each as a training of its own by the user's own entrypoint."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import FinetuneError
from finetune.files import remove_folder
from finetune.output_stream import silenced
from finetune.preflight.gpu_proof.judge import (
    ProofFailed,
    Verdict,
    check_device,
    judge_curve,
    judge_exported,
    judge_reference,
    judge_resumed,
)
from finetune.preflight.gpu_proof.machine import ProofMachine
from finetune.preflight.gpu_proof.material import write_proof_recipe
from finetune.preflight.gpu_proof.plan import PROOF_SAVED_AFTER, PROOF_STEPS, Proof
from finetune.preflight.job import StepFailed, TrainingJob, ended_by_signals, started, wait_for_end
from finetune.recipe.strategy import read_strategy
from finetune.redaction import redact

PROOF_TIMEOUT_SECONDS = 1800  # for one training: against a hang alone, for a tiny model takes seconds to train
EXPORTED = ("model", "adapter")

Outcome = dict[str, Any]  # name, claim, state (ok, failed, not run), seconds, seen, figures


def prove(machine: ProofMachine, proofs: Sequence[Proof], log: Callable[[Outcome], None]) -> dict[str, Any]:
    """Run the proofs and return the report; `log` gets each outcome of it when it is known.

    A proof whose reference failed is not run. The folder of all trainings is deleted, or named in the report where a
    proof failed, with a log of each.
    """
    began, outcomes = time.monotonic(), list[Outcome]()
    folder = Path(tempfile.mkdtemp(prefix="finetune-gpu-"))
    try:
        with ended_by_signals(), silenced():
            bench = ProofBench(machine, write_proof_recipe(folder), {proof.name: proof for proof in proofs})
        with ended_by_signals():
            for proof in proofs:
                without = {done["name"] for done in outcomes if done["state"] != "ok"}
                lacking = f"there is no {proof.of} to compare with" if proof.of in without else ""
                outcomes.append(bench.outcome(proof, proof.missing or lacking))
                log(outcomes[-1])
    except BaseException:
        remove_folder(folder)
        raise
    states = [outcome["state"] for outcome in outcomes]
    failed = "failed" in states
    if not failed:
        remove_folder(folder)
    return {
        "ok": not failed and "ok" in states,
        "device": machine.name,
        "gpus": machine.count,
        "proofs": outcomes,
        "seconds": round(time.monotonic() - began, 1),
        "folder": redact(str(folder)) if failed else None,
    }


@dataclass(frozen=True)
class ProofBench:
    """Where the trainings of the proofs lie, and on which machine they run."""

    machine: ProofMachine
    recipe: Path
    proofs: dict[str, Proof]

    def outcome(self, proof: Proof, missing: str) -> Outcome:
        """Run one proof, unless something is `missing` that it needs. Failures are outcomes, never raised."""
        if missing:
            return not_run(proof, missing)
        began, figures = time.monotonic(), dict[str, Any]()
        try:
            verdict = self._perform(proof)
            seen, state = verdict.pop("seen"), "ok"
            figures = verdict
        except (StepFailed, FinetuneError) as error:
            seen, state = str(error), "failed"
            if isinstance(error, ProofFailed):
                figures = error.figures
        seconds = round(time.monotonic() - began, 1)
        ended = {"state": state, "seconds": seconds, "seen": redact(seen), "figures": figures}
        return not_run(proof, "") | ended

    def job(self, proof: Proof) -> TrainingJob:
        """The proof's training; one that resumes has the settings of the training that it continues."""
        settings = (self.proofs[proof.of] if proof.kind in ("resume", "export") else proof).settings
        on_gpu = self.machine.device == "cuda" and proof.kind != "reference"
        folder = self.recipe.parent / proof.name.replace(" ", "_")
        folder.mkdir(exist_ok=True)
        config = self._strategy_file(proof, folder)
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        words.append(f"accelerate_config={config}")
        return TrainingJob(
            self.recipe, tuple(words), proof.ranks, folder, launcher=_launcher(proof, config), on_gpus=on_gpu,
            timeout=PROOF_TIMEOUT_SECONDS, shared_cache=self.recipe.parent / "cache",
        )  # fmt: skip

    def _perform(self, proof: Proof) -> Verdict:
        """Train and judge. Raises StepFailed, FinetuneError."""
        job = self.job(proof)
        whole = self.recipe.parent / proof.of.replace(" ", "_") / job.run_dir.name
        if proof.kind in ("resume", "export"):
            rewind(whole, job.run_dir, PROOF_SAVED_AFTER if proof.kind == "resume" else PROOF_STEPS)
        with started(job) as process:
            wait_for_end(job, process)
        device = "cpu" if proof.kind == "reference" else self.machine.device
        offloaded = read_strategy(proof.strategy).offloaded
        check_device(job.run_dir, device=device, offloaded=offloaded, ranks=proof.ranks)
        match proof.kind:
            case "reference":
                return judge_reference(job.run_dir)
            case "curve":
                return judge_curve(job.run_dir, whole, proof.bounds)
            case "resume":
                return judge_resumed(job.run_dir, whole, proof.bounds)
            case "export":
                return judge_exported(job.run_dir, whole)

    def _strategy_file(self, proof: Proof, folder: Path) -> Path:
        """The strategy's own file; HSDP's says that there are two copies, else a copy is a machine."""
        strategy = read_strategy(proof.strategy)
        if not strategy.replicates:
            return strategy.path
        mesh = {"parallelism_config": {"parallelism_config_dp_replicate_size": 2}}
        file = folder / strategy.path.name
        file.write_text(yaml.safe_dump(strategy.settings | mesh), "utf-8")
        return file


def not_run(proof: Proof, why: str) -> Outcome:
    """The outcome of a proof that could not be run."""
    return {"name": proof.name, "claim": proof.claim, "state": "not run", "seconds": 0.0, "seen": why, "figures": {}}


def _launcher(proof: Proof, config: Path) -> tuple[str, ...]:
    """Options of `accelerate launch`: those at the top of the strategy's file, at any free port."""
    if proof.kind == "reference":
        return ("--config_file", str(config), "--cpu")
    port = () if proof.strategy == "single" else ("--main_process_port", "0")
    return ("--config_file", str(config), "--num_processes", str(proof.ranks), *port)


def rewind(finished: Path, run_dir: Path, step: int) -> None:
    """A copy of a finished run as SIGKILL would have left it after the checkpoint of `step` was written."""
    from finetune.run_folder.checkpoint import checkpoint_steps, step_folder  # with torch
    from finetune.run_folder.folder import mark_run

    shutil.copytree(finished, run_dir, dirs_exist_ok=True)
    for later in (each for each in checkpoint_steps(run_dir) if each > step):
        remove_folder(step_folder(run_dir, later))
    for name in EXPORTED:
        if (run_dir / name).exists():
            remove_folder(run_dir / name)
    mark_run(run_dir, "running", step=step)
