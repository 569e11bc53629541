"""The proofs of `finetune doctor --gpu`: their order, and how far each may be from its reference.

A reference trains on the CPU, one document at a time. All trainings take the same eight documents in each of six steps.
So a proof and its reference differ only in the device, its kernels, and how the work is split.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from finetune.wording import counted

PROOF_STEPS, PROOF_SAVED_AFTER, PROOF_ROWS = 6, 3, 8
MOST_RANKS = 8  # a row each
SECONDS_EACH = 20  # of one training, for the estimate


class Bounds(NamedTuple):
    """Largest relative differences of the loss and of the gradient norm, over all steps."""

    loss: float
    norm: float


# Rounding of float32, summed in another order: 2e-5 between two splits on a CPU (docs/one_curve.md).
FLOAT32_BOUNDS = Bounds(1e-4, 1e-3)
# One rounding of bfloat16 is 0.4 %. Measured on a CPU against float32: 2e-4 and 9e-3. Documents that see each other
# are 6e-3 (step 1) to 4e-2 and 8e-2 to 3e-1 away, so they are found out.
HALF_BOUNDS = Bounds(2e-3, 4e-2)
# Activations too are rounded, to 1/127 of a row's largest, where two devices may round to either side.
INT8_BOUNDS = Bounds(5e-3, 8e-2)
# From the same weights by the same kernels; on a GPU some of them sum in any order, and three steps amplify it.
RESUMED_BOUNDS = Bounds(1e-3, 2e-2)

ProofKind = Literal["reference", "curve", "resume", "export"]


@dataclass(frozen=True)
class ProofMachine:
    """The devices that a proof may use.

    Tests play the sequence through with `device` "cpu": the same launches with the GPUs hidden, a process for each.
    """

    device: Literal["cuda", "cpu"]
    name: str  # of the first GPU
    count: int  # GPUs; 0 where there is none, and then nothing can run
    bfloat16: bool = True  # whether its kernels compute in bfloat16; before Ampere it is emulated

    @property
    def half(self) -> Literal["bfloat16", "float16"]:
        """The 16-bit number format that recipes for this machine compute in."""
        if self.bfloat16:
            return "bfloat16"
        return "float16"


def find_gpus() -> ProofMachine:
    """The GPUs that torch sees here; `count` is 0 where it sees none."""
    import torch

    from finetune.architecture.attention import AMPERE  # with torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return ProofMachine("cuda", "no GPU", 0)
    oldest = min(torch.cuda.get_device_capability(index) for index in range(count))
    return ProofMachine("cuda", torch.cuda.get_device_name(0), count, bfloat16=oldest >= AMPERE)


@dataclass(frozen=True)
class Proof:
    """One training and what it shows."""

    name: str
    kind: ProofKind
    claim: str  # a line of the plan
    of: str = ""  # the earlier proof whose training this one is compared with, or continues
    bounds: Bounds | None = None  # None where it must be the same to the bit
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the recipe: dotted key -> value
    strategy: str = "single"  # a file of accelerate_configs/
    ranks: int = 1
    missing: str = ""  # why it cannot run here

    @property
    def folder_name(self) -> str:
        return self.name.replace(" ", "_")


def plan_proofs(machine: ProofMachine) -> list[Proof]:
    """All proofs, those that this machine cannot run with the reason in `missing`."""
    # Two micro-batches, each of four documents in one flat row: attention has to keep them apart.
    flat = {"training.per_device_batch_size": 4}
    # All weights are trained in float32 and computed in 16 bits.
    bf16, fp16 = ({"training.mixed_precision": name} for name in ("bf16", "fp16"))
    if machine.bfloat16:
        whole, half, too_old = "bf16", bf16, ""
    else:
        whole, half, too_old = "fp16", fp16, "bfloat16 begins with compute capability 8.0 (Ampere)"
    back = f"{whole}, taken back"
    proofs = [
        Proof(
            "reference", "reference", "the CPU's curve in float32: six steps of a tiny Llama, one document at a time"
        ),
        Proof("float32", "curve", "the same curve in float32", "reference", FLOAT32_BOUNDS, flat),
        Proof(
            "bf16", "curve", "the same curve in bfloat16, documents in flat rows", "reference", HALF_BOUNDS,
            flat | bf16, missing=too_old,
        ),
        Proof(
            "fp16", "curve", "the same curve in float16, losses scaled, documents in padded rows (sdpa)", "reference",
            HALF_BOUNDS, flat | fp16 | {"model.attention": "sdpa"},
        ),
        Proof(
            "resume", "resume", f"{back} to step {PROOF_SAVED_AFTER} and resumed: the same steps again", whole,
            RESUMED_BOUNDS,
        ),
        Proof("checkpoint", "export", f"{back} before its export: weights from the checkpoint, bitwise", whole),
        Proof(
            "deterministic", "curve", "the same curve with training.deterministic=true", "reference", HALF_BOUNDS,
            {"training.deterministic": True} | flat | half,
        ),
        Proof("deterministic resume", "resume", "the same, taken back and resumed: bitwise the run", "deterministic"),
    ]  # fmt: skip

    # Against the CPU with equally quantised weights: one row at a time there, flat rows here.
    lacking = _missing_package("bitsandbytes", "qlora")
    four_bits = {"load_in_4bit": True, "bnb_4bit_compute_dtype": machine.half}
    for name, base, bounds, method in (
        ("nf4", four_bits, HALF_BOUNDS, "QLoRA: adapters on a 4-bit base (nf4)"),
        ("int8", {"load_in_8bit": True}, INT8_BOUNDS, "adapters on an 8-bit base"),
    ):
        adapters = {"lora": {"r": 8, "lora_alpha": 16}, "training.learning_rate": 1e-2}
        settings = {"model.dtype": machine.half, "quantization": base, **adapters, **half}
        reference = f"{name} reference"
        proofs += [
            Proof(reference, "reference", f"the CPU's curve of {method}", settings=settings, missing=lacking),
            Proof(
                name, "curve", f"the same curve of {method}", reference, bounds, settings | flat, missing=lacking
            ),
        ]  # fmt: skip

    proofs += [
        Proof(
            "offload", "curve", "weights and optimizer state in host memory (fsdp2_offload on one GPU)", "reference",
            HALF_BOUNDS, flat | half, "fsdp2_offload",
        ),
        Proof(
            "offload resume", "resume", "the same, taken back and resumed: in host memory again", "offload",
            RESUMED_BOUNDS, strategy="fsdp2_offload",
        ),
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
        proofs.append(
            Proof(
                strategy, "curve", f"{split}: the same curve on {ranks} GPUs", "reference", FLOAT32_BOUNDS,
                strategy=strategy, ranks=ranks, missing=lacking,
            )
        )  # fmt: skip
    return proofs


def _missing_package(package: str, extra: str) -> str:
    if importlib.util.find_spec(package) is not None:
        return ""
    return f"{package} is not installed: pip install 'finetune[{extra}]'"


def plan_lines(machine: ProofMachine, proofs: Sequence[Proof]) -> list[str]:
    """The proofs that will run, and those that cannot; without a GPU, those that would."""
    runs = [proof for proof in proofs if not proof.missing]
    minutes = max(1, round(len(runs) * SECONDS_EACH / 60))
    where = f"{counted(machine.count, 'GPU')}, {machine.name}" if machine.count else machine.name
    trainings = f"{counted(len(runs), 'small training')}, {PROOF_STEPS} steps each"
    lines = [f"proofs on {where}: {trainings}; about {counted(minutes, 'minute')}, most of it imports"]
    for number, proof in enumerate(proofs, 1):
        line = f"{number:>4}  {proof.name:<21}{proof.claim}"
        if proof.bounds is not None:
            line += f"; loss within {proof.bounds.loss:.0e}, norm {proof.bounds.norm:.0e}"
        if proof.missing:
            line += f" (not run: {proof.missing})"
        lines.append(line)
    return lines
