"""`finetune doctor --gpu`: small trainings that prove this machine's GPUs.

Each proof is a training by the user's own entrypoint. It must have the CPU's curve, resume and export as it should.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import remove_folder
from finetune.output_stream import silenced
from finetune.preflight.gpu_proof_plan import (
    PROOF_ROWS,
    PROOF_SAVED_AFTER,
    PROOF_STEPS,
    Bounds,
    Proof,
    ProofMachine,
    find_gpus,
    plan_lines,
    plan_proofs,
)
from finetune.preflight.job import (
    StepFailed,
    TrainingJob,
    ended_by_signals,
    relative_difference,
    started,
    train_lines,
    wait_for_end,
    with_two_copies,
)
from finetune.preflight.shrink import BUILT_IN, END_TOKENS, train_tokenizer
from finetune.recipe.strategy import read_strategy
from finetune.redaction import redact
from finetune.wording import counted

PROOF_TIMEOUT_SECONDS = 1800  # for one training: against a hang alone, because a tiny model takes seconds to train
NO_GPU = "torch sees no GPU here; run it on the machine that has one, after `finetune doctor` finds nothing bad there"
# Weights five times as large as a new model's, so that attention is not nearly uniform: documents that see each other
# then change the first loss by 6e-3 instead of 2e-5.
SPREAD = 0.1
LONGEST_CHAT = 160  # words

Verdict = dict[str, Any]  # `seen`, one line, and the figures that it says
Outcome = dict[str, Any]  # name, claim, state (ok, failed, not run), seconds, seen, figures


class ProofFailed(StepFailed):
    """A proof whose figures are out of bounds."""

    def __init__(self, reason: str, figures: Verdict) -> None:
        super().__init__(reason)
        self.figures = figures


def prove_gpus(log: Callable[[str], None], machine: ProofMachine | None = None) -> dict[str, Any]:
    """Prove the GPUs of `machine`, else of this one, and return the report; `log` gets each line of text.

    The report's `ok` says whether something ran and nothing failed. Without a GPU the plan is all there is.
    """
    machine = machine or find_gpus()
    proofs = plan_proofs(machine)
    for line in plan_lines(machine, proofs):
        log(line)
    if machine.count == 0:
        outcomes = [not_run(proof, proof.missing or "needs a GPU") for proof in proofs]
        log(NO_GPU)
        return {"ok": False, "device": None, "gpus": 0, "proofs": outcomes, "seconds": 0.0, "folder": None}

    def log_outcome(outcome: Outcome) -> None:
        state, seconds = outcome["state"], f"{outcome['seconds']:6.1f} s"
        if state == "not run":
            seconds = " " * 8
        mark = state.upper() if state == "failed" else state
        log(f"{mark:<8}{seconds}  {outcome['name']:<21}{outcome['seen']}")

    report = prove(machine, proofs, log_outcome)
    states = Counter(outcome["state"] for outcome in report["proofs"])
    ended = ", ".join(f"{states[state]} {state}" for state in ("ok", "failed", "not run") if states[state])
    logs = f"; each training's log: {report['folder']}/*/run.log" if report["folder"] else ""
    log(f"{counted(len(report['proofs']), 'proof')}: {ended}, in {report['seconds']:.0f} s{logs}")
    return report


def prove(machine: ProofMachine, proofs: Sequence[Proof], log: Callable[[Outcome], None]) -> dict[str, Any]:
    """Run the proofs one after another and return the report; `log` gets each outcome as soon as it is known.

    A proof whose reference failed is not run. If a proof failed, the folder of all trainings stays, and the report
    names it; each training has a log there. Else the folder is deleted.
    """
    began, outcomes = time.monotonic(), list[Outcome]()
    folder = Path(tempfile.mkdtemp(prefix="finetune-gpu-"))
    try:
        with ended_by_signals(), silenced():
            bench = ProofBench(machine, write_proof_recipe(folder), {proof.name: proof for proof in proofs})
        with ended_by_signals():
            for proof in proofs:
                not_ok = {done["name"] for done in outcomes if done["state"] != "ok"}
                lacking = f"there is no {proof.of} to compare with" if proof.of in not_ok else ""
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


def not_run(proof: Proof, reason: str) -> Outcome:
    """The outcome of a proof that could not be run."""
    return {"name": proof.name, "claim": proof.claim, "state": "not run", "seconds": 0.0, "seen": reason, "figures": {}}


@dataclass(frozen=True)
class ProofBench:
    """Where the proofs' trainings lie, and on which machine they run."""

    machine: ProofMachine
    recipe: Path
    proofs: dict[str, Proof]

    def outcome(self, proof: Proof, missing: str) -> Outcome:
        """Run one proof, unless it needs something that is `missing`. Failures are outcomes, never raised."""
        if missing:
            return not_run(proof, missing)
        began = time.monotonic()
        state, figures = "ok", dict[str, Any]()
        try:
            figures = self._train_and_judge(proof)
            seen = figures.pop("seen")
        except (StepFailed, FinetuneError) as error:
            state, seen = "failed", str(error)
            figures = error.figures if isinstance(error, ProofFailed) else {}
        seconds = round(time.monotonic() - began, 1)
        ended = {"state": state, "seconds": seconds, "seen": redact(seen), "figures": figures}
        return not_run(proof, "") | ended

    def job(self, proof: Proof) -> TrainingJob:
        """The proof's training; one that resumes has the settings of the training that it continues."""
        continues = proof.kind in ("resume", "export")
        settings = self.proofs[proof.of].settings if continues else proof.settings
        folder = self.recipe.parent / proof.folder_name
        folder.mkdir(exist_ok=True)
        strategy = read_strategy(proof.strategy)
        config = with_two_copies(strategy, folder) if strategy.replicates else strategy.path
        launcher = ["--config_file", str(config)]
        if proof.kind == "reference":
            launcher.append("--cpu")
        else:
            launcher += ["--num_processes", str(proof.ranks)]
            if proof.strategy != "single":
                launcher += ["--main_process_port", "0"]  # any free one
        words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        return TrainingJob(
            self.recipe, (*words, f"accelerate_config={config}"), proof.ranks, folder, launcher=tuple(launcher),
            on_gpus=self.machine.device == "cuda" and proof.kind != "reference",
            timeout=PROOF_TIMEOUT_SECONDS, shared_cache=self.recipe.parent / "cache",
        )  # fmt: skip

    def _train_and_judge(self, proof: Proof) -> Verdict:
        """Raises StepFailed, FinetuneError."""
        job = self.job(proof)
        other = self.recipe.parent / self.proofs[proof.of].folder_name / "run" if proof.of else Path()
        if proof.kind in ("resume", "export"):
            rewind(other, job.run_dir, PROOF_SAVED_AFTER if proof.kind == "resume" else PROOF_STEPS)
        with started(job) as process:
            wait_for_end(job, process)
        check_device(job.run_dir, proof, "cpu" if proof.kind == "reference" else self.machine.device)
        match proof.kind:
            case "reference":
                return judge_reference(job.run_dir)
            case "curve":
                return judge_curve(job.run_dir, other, proof.bounds)
            case "resume":
                return judge_resumed(job.run_dir, other, proof.bounds)
            case "export":
                return judge_exported(job.run_dir, other)


def rewind(finished: Path, run_dir: Path, step: int) -> None:
    """A copy of a finished run as SIGKILL would have left it after the checkpoint of `step` was written."""
    from finetune.run_folder.checkpoint import checkpoint_steps, step_folder  # with torch
    from finetune.run_folder.folder import mark_run

    shutil.copytree(finished, run_dir, dirs_exist_ok=True)
    later = [step_folder(run_dir, saved) for saved in checkpoint_steps(run_dir) if saved > step]
    for folder in (*later, run_dir / "model", run_dir / "adapter"):
        if folder.exists():
            remove_folder(folder)
    mark_run(run_dir, "running", step=step)


# Judging: is a training what it should be?


def check_device(run_dir: Path, proof: Proof, device: str) -> None:
    """Raises StepFailed where the run's receipt shows another device, or another place of the weights."""
    receipt = json.loads((run_dir / "receipt.json").read_text("utf-8"))
    weights_on = "cpu" if read_strategy(proof.strategy).offloaded else device
    asked = {"device": device, "weights on": weights_on, "processes": proof.ranks}
    ran = {
        "device": receipt["device"],
        "weights on": ", ".join(receipt["sharding"]["weights_on"]),
        "processes": receipt["world_size"],
    }
    wrong = [
        f"{key}: {asked[key]} was asked for, its receipt says {ran[key]}" for key in asked if asked[key] != ran[key]
    ]
    if wrong:
        raise StepFailed("; ".join(wrong))


def all_train_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of every optimizer step of a run. Raises StepFailed if they are not one for each step."""
    lines = train_lines(run_dir)
    steps = [line["step"] for line in lines]
    if steps != list(range(1, PROOF_STEPS + 1)):
        raise StepFailed(f"its metrics are of the steps {steps}, it trained 1 to {PROOF_STEPS}")
    return lines


def judge_reference(run_dir: Path) -> Verdict:
    """A reference has to learn, else every curve is alike. Raises StepFailed."""
    losses = [line["loss"] for line in all_train_lines(run_dir)]
    seen = f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
    if not losses[-1] < 0.95 * losses[0]:
        raise StepFailed(f"{seen}: it did not learn")
    return {"seen": seen, "first_loss": losses[0], "last_loss": losses[-1]}


def judge_curve(run_dir: Path, other: Path, bounds: Bounds | None, *, after: int = 0) -> Verdict:
    """The largest relative differences of two runs' losses and gradient norms, in the steps after `after`.

    `bounds` None: no bit may differ. Raises StepFailed with the first step that is out of bounds.
    """
    pairs = list(zip(all_train_lines(run_dir)[after:], all_train_lines(other)[after:], strict=True))
    apart = [
        Bounds(*(relative_difference(ours[key], theirs[key]) for key in ("loss", "grad_norm")))
        for ours, theirs in pairs
    ]
    largest = Bounds(max(step.loss for step in apart), max(step.norm for step in apart))
    limits = bounds or Bounds(0.0, 0.0)
    figures = {"loss": largest.loss, "loss_bound": limits.loss, "norm": largest.norm, "norm_bound": limits.norm}
    if bounds is not None:
        seen = f"losses {largest.loss:.1e} apart (bound {bounds.loss:.0e}), "
        seen += f"norms {largest.norm:.1e} (bound {bounds.norm:.0e})"
    elif largest == (0.0, 0.0):
        seen = "bitwise"
    else:
        seen = f"losses {largest.loss:.1e} and norms {largest.norm:.1e} apart where no bit may differ"
    for (ours, theirs), step in zip(pairs, apart, strict=True):
        if step.loss > limits.loss or step.norm > limits.norm:
            values = f"loss {ours['loss']:.6g} and {theirs['loss']:.6g}, "
            values += f"gradient norm {ours['grad_norm']:.6g} and {theirs['grad_norm']:.6g}"
            raise ProofFailed(f"step {ours['step']}: {values}; {seen}", figures)
    return {"seen": seen, **figures}


def judge_resumed(run_dir: Path, whole: Path, bounds: Bounds | None) -> Verdict:
    """A run that was resumed after PROOF_SAVED_AFTER, against the uninterrupted one. Raises StepFailed."""
    _check_resumed(run_dir, whole, PROOF_SAVED_AFTER)
    verdict = judge_curve(run_dir, whole, bounds, after=PROOF_SAVED_AFTER)
    differing, total = _count_differing_tensors(run_dir, whole)
    verdict |= {"differing_tensors": differing, "tensors": total}
    if bounds is None and differing:
        raise ProofFailed(f"{differing} of {counted(total, 'tensor')} of the last checkpoint differ", verdict)
    same = f"{total - differing} of {counted(total, 'tensor')} of the last checkpoint bitwise"
    return verdict | {"seen": f"steps {PROOF_SAVED_AFTER + 1} to {PROOF_STEPS}: {verdict['seen']}; {same}"}


def judge_exported(run_dir: Path, whole: Path) -> Verdict:
    """A run that only had to export, against the uninterrupted one: the same files. Raises StepFailed."""
    _check_resumed(run_dir, whole, PROOF_STEPS)
    files = sorted((whole / "model").glob("*.safetensors"))
    if not files:
        raise StepFailed("the uninterrupted run exported no weights")
    for file in files:
        if (run_dir / "model" / file.name).read_bytes() != file.read_bytes():
            raise StepFailed(f"{file.name} of the two exports differ")
    return {"seen": f"{counted(len(files), 'file')} of weights, bitwise", "files": len(files)}


def _check_resumed(run_dir: Path, whole: Path, step: int) -> None:
    """Raises StepFailed if a run started over: it then measured the seconds of its first steps itself."""
    if all_train_lines(run_dir)[:step] != all_train_lines(whole)[:step]:
        raise StepFailed(f"it was to resume from step {step}, and trained the steps before it again")


def _count_differing_tensors(run_dir: Path, whole: Path) -> tuple[int, int]:
    """Compare model and optimizer of the newest checkpoints: tensors that are not bitwise the same, and all tensors."""
    import torch

    from finetune.run_folder.checkpoint import newest_valid, read_checkpoint  # with torch

    tensors = []
    for folder in (run_dir, whole):
        checkpoint, damaged = newest_valid(folder)
        if checkpoint is None or checkpoint.step != PROOF_STEPS:
            raise StepFailed(f"there is no whole checkpoint of step {PROOF_STEPS}{'; '.join(['', *damaged])}")
        groups, _ = read_checkpoint(checkpoint)
        tensors.append({(group, name): value for group, named in groups.items() for name, value in named.items()})
    ours, theirs = tensors
    if ours.keys() != theirs.keys():
        raise StepFailed(f"the checkpoints hold different tensors: {sorted(ours.keys() ^ theirs.keys())[0]}")
    return sum(not torch.equal(ours[key], theirs[key]) for key in ours), len(ours)


# The training that all proofs share.


def write_proof_recipe(folder: Path) -> Path:
    """`folder`/recipe.yaml, and beside it a tiny Llama and eight chats: a full fine-tuning in float32 on one device."""
    chats = _chats()
    rows = folder / "chats.jsonl"
    rows.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), "utf-8")
    _write_model(folder / "model", [turn["content"] for chat in chats for turn in chat])
    content: Mapping[str, Any] = {
        "model": {"name_or_path": str(folder / "model"), "dtype": "float32"},
        "lora": None,
        "data": {"train": [{"path": "json", "data_files": str(rows)}], "packing": False, "max_length": 1024},
        "training": {
            "global_batch_size": PROOF_ROWS,
            "max_steps": PROOF_STEPS,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "linear",
            "warmup_steps": 0,
            "mixed_precision": "no",
        },
        "samples": {"count": 0},
        "save_steps": PROOF_SAVED_AFTER,
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(content), "utf-8")  # JSON is YAML
    return recipe


def _chats() -> list[list[dict[str, str]]]:
    """Chats of 10 to LONGEST_CHAT words. An answer says its first half twice, which attention can find."""
    draw = random.Random(0)
    words = " ".join(BUILT_IN).split()
    lengths = [LONGEST_CHAT, 10, 110, 40, 140, 25, 80, 60]
    assert len(lengths) == PROOF_ROWS
    chats = []
    for length in lengths:
        half = " ".join(draw.choices(words, k=length // 2))
        chats.append([{"role": "user", "content": "Say it twice."}, {"role": "assistant", "content": f"{half} {half}"}])
    return chats


def _write_model(folder: Path, texts: Sequence[str]) -> None:
    """Two layers of 64 with two query heads to a key-value head of 32; 0.2 M float32 weights, and their tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = train_tokenizer([*BUILT_IN, *texts])
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=SPREAD,
        tie_word_embeddings=False,
        bos_token_id=None,
        **END_TOKENS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
