"""Small trainings that prove this machine's GPUs: `python benchmarks/gpu.py proofs` runs them (gpu_checks.py).

Each proof is a training by the user's own entrypoint. A reference trains on the CPU, one document at a time. All
trainings take the same eight documents in each of six steps. So a proof and its reference differ only in the device,
its kernels, and how the work is split. Their curves must agree within bounds; a resumed run must repeat its steps.
"""

from __future__ import annotations

import importlib.util
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from finetune.errors import FinetuneError
from finetune.launch.watched_job import (
    StepFailed,
    TrainingJob,
    relative_difference,
    started,
    train_lines,
    wait_for_end,
    with_two_copies,
)
from finetune.recipe.strategy import read_strategy
from finetune.redaction import redact
from finetune.rehearse.shrink import BUILT_IN, END_TOKENS, train_tokenizer
from finetune.wording import install_command
from tests.support.runs.killed import rewind

PROOF_STEPS, PROOF_SAVED_AFTER, PROOF_ROWS = 6, 3, 8
MOST_RANKS = 8  # a row each
PROOF_TIMEOUT_SECONDS = 1800  # for one training: against a hang alone, because a tiny model takes seconds to train

Outcome = dict[str, Any]  # name, claim, state (ok, failed, not run), seconds, seen, figures


# The proofs: their order, and how far each may be from its reference.


class Bounds(NamedTuple):
    """Largest relative differences of the loss and of the gradient norm, over all steps."""

    loss: float
    norm: float


BITWISE = Bounds(0.0, 0.0)
# Rounding of float32, summed in another order: 2e-5 between two splits on a CPU (docs/one_curve.md).
FLOAT32_BOUNDS = Bounds(1e-4, 1e-3)
# One rounding of bfloat16 is 0.4 %. Measured on a CPU against float32: 2e-4 and 9e-3. Documents that see each other
# differ by 6e-3 (step 1) to 4e-2 and 8e-2 to 3e-1, so they are found out.
HALF_BOUNDS = Bounds(2e-3, 4e-2)
# Activations too are rounded, to 1/127 of a row's largest, where two devices may round to either side.
INT8_BOUNDS = Bounds(5e-3, 8e-2)
# The same weights and kernels. On a GPU some kernels sum in any order, and three steps amplify it.
RESUMED_BOUNDS = Bounds(1e-3, 2e-2)


@dataclass(frozen=True)
class ProofMachine:
    """The devices that a proof may use.

    Tests play the sequence through with `device` "cpu": the same launches with the GPUs hidden, a process for each.
    """

    device: Literal["cuda", "cpu"]
    name: str  # of the first GPU
    count: int  # GPUs; 0 where there is none, and then nothing can run
    bfloat16: bool = True  # whether its kernels compute in bfloat16; before Ampere it is emulated


@dataclass(frozen=True)
class Proof:
    """One training and what it shows."""

    name: str
    kind: Literal["reference", "curve", "resume"]
    claim: str  # a line of the plan
    of: str = ""  # the earlier proof whose training this one is compared with, or continues
    bounds: Bounds = BITWISE
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the recipe: dotted key -> value
    strategy: str = "single"  # a file of accelerate_configs/
    ranks: int = 1
    missing: str = ""  # why it cannot run here

    @property
    def folder_name(self) -> str:
        return self.name.replace(" ", "_")


def find_gpus() -> ProofMachine:
    """The GPUs that torch sees here; `count` is 0 where it sees none."""
    import torch

    from finetune.architecture.attention import AMPERE  # with torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return ProofMachine("cuda", "no GPU", 0)
    oldest = min(torch.cuda.get_device_capability(index) for index in range(count))
    return ProofMachine("cuda", torch.cuda.get_device_name(0), count, bfloat16=oldest >= AMPERE)


def plan_proofs(machine: ProofMachine) -> list[Proof]:
    """All proofs, those that this machine cannot run with the reason in `missing`."""
    # Two micro-batches, each of four documents in one flat row: attention has to keep them apart.
    flat = {"training.per_device_batch_size": 4}
    whole, dtype, too_old = "bf16", "bfloat16", ""
    if not machine.bfloat16:
        whole, dtype, too_old = "fp16", "float16", "bfloat16 begins with compute capability 8.0 (Ampere)"
    half = {"training.mixed_precision": whole}  # all weights are trained in float32 and computed in 16 bits
    bf16, fp16 = {"training.mixed_precision": "bf16"}, {"training.mixed_precision": "fp16", "model.attention": "sdpa"}
    again = f"continued from step {PROOF_SAVED_AFTER}"
    exact = flat | half | {"training.deterministic": True}
    proofs = [
        Proof("reference", "reference", "the CPU's curve in float32: a tiny Llama, one document at a time"),
        Proof("float32", "curve", "the same curve in float32", "reference", FLOAT32_BOUNDS, flat),
        Proof("bf16", "curve", "in bfloat16, documents in flat rows", "reference", HALF_BOUNDS, flat | bf16,
              missing=too_old),
        Proof("fp16", "curve", "in float16, losses scaled, documents in padded rows (sdpa)", "reference", HALF_BOUNDS,
              flat | fp16),
        Proof("resume", "resume", f"{whole}, {again}: the same steps again", whole, RESUMED_BOUNDS),
        Proof("deterministic", "curve", "with training.deterministic=true", "reference", HALF_BOUNDS, exact),
        Proof("deterministic resume", "resume", f"the same, {again}: bitwise the run", "deterministic"),
    ]  # fmt: skip

    # Against the CPU with equally quantised weights: one row at a time there, flat rows here.
    lacking = _missing_package("bitsandbytes", "qlora")
    four_bits = {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype}
    for name, base, bounds in (("nf4", four_bits, HALF_BOUNDS), ("int8", {"load_in_8bit": True}, INT8_BOUNDS)):
        settings: dict[str, Any] = {
            "model.dtype": dtype,
            "quantization": base,
            "lora": {"r": 8, "lora_alpha": 16},
            **half,
        }
        settings["training.learning_rate"] = 1e-2
        claim, reference = f"the CPU's curve of adapters on a base in {name}", f"{name} reference"
        proofs += [
            Proof(reference, "reference", claim, settings=settings, missing=lacking),
            Proof(name, "curve", "the same curve", reference, bounds, settings | flat, missing=lacking),
        ]
    proofs += [
        Proof("offload", "curve", "weights and optimizer state in host memory (fsdp2_offload on one GPU)", "reference",
              HALF_BOUNDS, flat | half, "fsdp2_offload"),
        Proof("offload resume", "resume", f"the same, {again}: in host memory again", "offload", RESUMED_BOUNDS,
              strategy="fsdp2_offload"),
    ]  # fmt: skip

    # Several GPUs, in float32, whose bound is the tightest; each rank takes one row at a time.
    most = max((count for count in (2, 4, MOST_RANKS) if count <= machine.count), default=2)
    engine = _missing_package("deepspeed", "deepspeed")
    for strategy, least, lacking, split in (
        ("ddp", 2, "", "a copy of the model on each GPU"),
        ("fsdp2", 2, "", "weights sharded"),
        ("hsdp", 4, "", "two copies, each sharded"),
        ("zero2", 2, engine, "gradients and optimizer state sharded"),
        ("zero3", 2, engine, "weights sharded by DeepSpeed"),
    ):
        ranks = max(most, least)
        if machine.count < least:
            lacking = f"needs {least} GPUs"
        claim = f"{split}: the same curve on {ranks} GPUs"
        proofs.append(Proof(strategy, "curve", claim, "reference", FLOAT32_BOUNDS, {}, strategy, ranks, lacking))
    return proofs


def _missing_package(package: str, extra: str) -> str:
    if importlib.util.find_spec(package) is not None:
        return ""
    return f"{package} is not installed; in the checkout: {install_command(extra)}"


# The sequence.


def _outcome(
    proof: Proof, state: str, seen: str, seconds: float = 0.0, figures: Mapping[str, float] | None = None
) -> Outcome:
    facts = {"name": proof.name, "claim": proof.claim, "state": state, "seconds": seconds}
    return {**facts, "seen": redact(seen), "figures": dict(figures or {})}


@dataclass(frozen=True)
class ProofBench:
    """Where the proofs' trainings lie, and on which machine they run."""

    machine: ProofMachine
    recipe: Path
    proofs: dict[str, Proof]

    def outcome(self, proof: Proof, ok: set[str]) -> Outcome:
        """Train and judge one proof, after those in `ok` were right. Failures are outcomes, never raised."""
        lacking = f"there is no {proof.of} to compare with" if proof.of and proof.of not in ok else ""
        if proof.missing or lacking:
            return _outcome(proof, "not run", proof.missing or lacking)
        began = time.monotonic()
        try:
            seen, figures = self._train_and_judge(proof)
        except (StepFailed, FinetuneError) as error:
            return _outcome(proof, "failed", str(error), round(time.monotonic() - began, 1))
        return _outcome(proof, "ok", seen, round(time.monotonic() - began, 1), figures)

    def job(self, proof: Proof) -> TrainingJob:
        """The proof's training. A training that resumes has the settings of the run that it continues."""
        settings = self.proofs[proof.of].settings if proof.kind == "resume" else proof.settings
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

    def _train_and_judge(self, proof: Proof) -> tuple[str, dict[str, float]]:
        """The line about a training that is right, with its figures. Raises StepFailed, FinetuneError."""
        job = self.job(proof)
        other = self.recipe.parent / self.proofs[proof.of].folder_name / "run" if proof.of else Path()
        if proof.kind == "resume":
            rewind(other, job.run_dir, PROOF_SAVED_AFTER)
        with started(job) as process:
            wait_for_end(job, process)
        device = "cpu" if proof.kind == "reference" else self.machine.device
        check_receipt(job.run_dir, device, proof)
        if proof.kind == "reference":
            return judge_reference(job.run_dir)
        after = 0
        if proof.kind == "resume":
            after = PROOF_SAVED_AFTER
            # A run that started over measured the seconds of its first steps itself.
            if all_train_lines(job.run_dir)[:after] != all_train_lines(other)[:after]:
                raise StepFailed(f"it was to resume from step {after}, and trained the steps before it again")
        return judge_curve(job.run_dir, other, proof.bounds, after)


# Judging: is a training what it should be?


def check_receipt(run_dir: Path, device: str, proof: Proof) -> None:
    """Raises StepFailed if the run's receipt shows another device, or other memory for the weights."""
    receipt = json.loads((run_dir / "receipt.json").read_text("utf-8"))
    weights_on = "cpu" if read_strategy(proof.strategy).offloaded else device
    for key, asked, ran in (
        ("device", device, receipt["device"]),
        ("weights on", weights_on, ", ".join(receipt["sharding"]["weights_on"])),
        ("processes", proof.ranks, receipt["world_size"]),
    ):
        if asked != ran:
            raise StepFailed(f"{key}: {asked} was asked for, its receipt says {ran}")


def all_train_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of every optimizer step of a run. Raises StepFailed if they are not one for each step."""
    lines = train_lines(run_dir)
    steps = [line["step"] for line in lines]
    if steps != list(range(1, PROOF_STEPS + 1)):
        raise StepFailed(f"its metrics are of the steps {steps}, it trained 1 to {PROOF_STEPS}")
    return lines


def judge_reference(run_dir: Path) -> tuple[str, dict[str, float]]:
    """A reference has to learn, else every curve is alike. Raises StepFailed."""
    losses = [line["loss"] for line in all_train_lines(run_dir)]
    seen = f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
    if not losses[-1] < 0.95 * losses[0]:
        raise StepFailed(f"{seen}: it did not learn")
    return seen, {"first_loss": losses[0], "last_loss": losses[-1]}


def judge_curve(run_dir: Path, other: Path, bounds: Bounds, after: int = 0) -> tuple[str, dict[str, float]]:
    """The largest relative differences of two runs' losses and gradient norms, in the steps after `after`.

    Raises StepFailed with the first step that is out of bounds.
    """
    pairs = list(zip(all_train_lines(run_dir)[after:], all_train_lines(other)[after:], strict=True))
    apart = [
        Bounds(*(relative_difference(ours[key], theirs[key]) for key in ("loss", "grad_norm")))
        for ours, theirs in pairs
    ]
    largest = Bounds(max(step.loss for step in apart), max(step.norm for step in apart))
    seen = f"losses {largest.loss:.1e} apart (bound {bounds.loss:.0e}), "
    seen += f"norms {largest.norm:.1e} (bound {bounds.norm:.0e})"
    if bounds == BITWISE:
        seen = f"steps {after + 1} to {PROOF_STEPS} bitwise"
        if largest != BITWISE:
            seen = f"losses {largest.loss:.1e} and norms {largest.norm:.1e} apart where no bit may differ"
    for (ours, theirs), step in zip(pairs, apart, strict=True):
        if step.loss > bounds.loss or step.norm > bounds.norm:
            values = f"loss {ours['loss']:.6g} and {theirs['loss']:.6g}, "
            values += f"gradient norm {ours['grad_norm']:.6g} and {theirs['grad_norm']:.6g}"
            raise StepFailed(f"step {ours['step']}: {values}; {seen}")
    figures = {"loss": largest.loss, "loss_bound": bounds.loss, "norm": largest.norm, "norm_bound": bounds.norm}
    return seen, figures


# The training that all proofs share.


def write_proof_recipe(folder: Path) -> Path:
    """`folder`/recipe.yaml, and beside it a tiny Llama and eight chats: a full fine-tuning in float32 on one device.

    The chats have 10 to 160 words. An answer says its first half twice, which attention can find.
    """
    draw, words = random.Random(0), " ".join(BUILT_IN).split()
    halves = [" ".join(draw.choices(words, k=length // 2)) for length in (160, 10, 110, 40, 140, 25, 80, 60)]
    assert len(halves) == PROOF_ROWS
    chats = [
        [{"role": "user", "content": "Say it twice."}, {"role": "assistant", "content": f"{half} {half}"}]
        for half in halves
    ]
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
        # Five times a new model's, so that attention is not nearly uniform: documents that see each other then change
        # the first loss by 6e-3 instead of 2e-5.
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        **END_TOKENS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
