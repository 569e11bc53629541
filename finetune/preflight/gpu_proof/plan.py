"""Which proofs there are, in their order, and how far from its reference each may be.

A reference trains on the CPU, one document at a time. All trainings take the same eight documents in each of six steps,
so what differs between a proof and its reference is the device, its kernels, and how the work is split.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from finetune.preflight.gpu_proof.machine import ProofMachine

PROOF_STEPS, PROOF_SAVED_AFTER, PROOF_ROWS = 6, 3, 8
MOST_RANKS = 8  # a row each


class Bounds(NamedTuple):
    """Largest relative difference, of any step, of the loss and of the gradient norm."""

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
class Proof:
    """One training and what is shown by it."""

    name: str
    kind: ProofKind
    claim: str  # a line of the plan
    of: str = ""  # the earlier proof whose training this one is compared with, or continues
    bounds: Bounds | None = None  # None where it must be the same to the bit
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the recipe: dotted key -> value
    strategy: str = "single"  # a file of accelerate_configs/
    ranks: int = 1
    missing: str = ""  # why it cannot run here


def plan_proofs(machine: ProofMachine) -> list[Proof]:
    """All proofs, those that this machine cannot run with the reason in `missing`."""
    return [*_on_one_gpu(machine), *_quantised(machine), *_offloaded(machine), *_on_several_gpus(machine)]


def _in_format(dtype: str) -> dict[str, Any]:
    """All weights trained in float32, computed in `dtype`: bfloat16 or float16."""
    return {"training.mixed_precision": {"bfloat16": "bf16", "float16": "fp16"}[dtype]}


# Two micro-batches, each of four documents in one flat row: attention has to keep them apart.
_FLAT = {"training.per_device_batch_size": 4}


def _on_one_gpu(machine: ProofMachine) -> Iterator[Proof]:
    old = "" if machine.bfloat16 else "bfloat16 begins with compute capability 8.0 (Ampere)"
    yield Proof(
        "reference", "reference", "the CPU's curve in float32: six steps of a tiny Llama, one document at a time"
    )
    yield Proof("float32", "curve", "the same curve in float32", of="reference", bounds=FLOAT32_BOUNDS, settings=_FLAT)
    yield Proof(
        "bf16", "curve", "the same curve in bfloat16, documents in flat rows", of="reference", bounds=HALF_BOUNDS,
        settings=_FLAT | _in_format("bfloat16"), missing=old,
    )  # fmt: skip
    yield Proof(
        "fp16", "curve", "the same curve in float16, losses scaled, documents in padded rows (sdpa)", of="reference",
        bounds=HALF_BOUNDS, settings=_FLAT | _in_format("float16") | {"model.attention": "sdpa"},
    )  # fmt: skip
    whole = "bf16" if machine.bfloat16 else "fp16"
    yield Proof(
        "resume", "resume", f"{whole}, taken back to step {PROOF_SAVED_AFTER} and resumed: the same steps again",
        of=whole, bounds=RESUMED_BOUNDS,
    )  # fmt: skip
    yield Proof(
        "checkpoint", "export", f"{whole}, taken back before its export: weights from the checkpoint, bitwise",
        of=whole,
    )  # fmt: skip
    yield Proof(
        "deterministic", "curve", "the same curve with training.deterministic=true", of="reference",
        bounds=HALF_BOUNDS, settings={"training.deterministic": True} | _FLAT | _in_format(machine.half),
    )  # fmt: skip
    yield Proof(
        "deterministic resume", "resume", "the same, taken back and resumed: bitwise the run", of="deterministic"
    )


def _quantised(machine: ProofMachine) -> Iterator[Proof]:
    """Against the CPU with the same quantised weights: one row at a time there, flat rows here."""
    missing = "" if _installed("bitsandbytes") else "bitsandbytes is not installed: pip install 'finetune[qlora]'"
    four_bits = {"load_in_4bit": True, "bnb_4bit_compute_dtype": machine.half}
    for name, base, bounds, what in (
        ("nf4", four_bits, HALF_BOUNDS, "QLoRA: adapters on a 4-bit base (nf4)"),
        ("int8", {"load_in_8bit": True}, INT8_BOUNDS, "adapters on an 8-bit base"),
    ):
        settings = {
            "model.dtype": machine.half,
            "quantization": base,
            "lora": {"r": 8, "lora_alpha": 16},
            "training.learning_rate": 1e-2,
            **_in_format(machine.half),
        }
        yield Proof(f"{name} reference", "reference", f"the CPU's curve of {what}", settings=settings, missing=missing)
        yield Proof(
            name, "curve", f"the same curve of {what}", of=f"{name} reference", bounds=bounds,
            settings=settings | _FLAT, missing=missing,
        )  # fmt: skip


def _offloaded(machine: ProofMachine) -> Iterator[Proof]:
    yield Proof(
        "offload", "curve", "weights and optimizer state in host memory (fsdp2_offload on one GPU)", of="reference",
        bounds=HALF_BOUNDS, settings=_FLAT | _in_format(machine.half), strategy="fsdp2_offload",
    )  # fmt: skip
    yield Proof(
        "offload resume", "resume", "the same, taken back and resumed: in host memory again", of="offload",
        bounds=RESUMED_BOUNDS, strategy="fsdp2_offload",
    )  # fmt: skip


def _on_several_gpus(machine: ProofMachine) -> Iterator[Proof]:
    """In float32, whose bound is the tightest; a row each at a time."""
    ranks = max((count for count in (2, 4, MOST_RANKS) if count <= machine.count), default=2)
    engine = "" if _installed("deepspeed") else "deepspeed is not installed: pip install 'finetune[deepspeed]'"
    for strategy, least, package, what in (
        ("ddp", 2, "", "a copy of the model on each GPU"),
        ("fsdp2", 2, "", "weights sharded"),
        ("hsdp", 4, "", "two copies, each sharded"),
        ("zero2", 2, engine, "gradients and optimizer state sharded"),
        ("zero3", 2, engine, "weights sharded by DeepSpeed"),
    ):
        few = f"needs {least} GPUs" if machine.count < least else ""
        yield Proof(
            strategy, "curve", f"{what}: the same curve on {max(ranks, least)} GPUs", of="reference",
            bounds=FLOAT32_BOUNDS, strategy=strategy, ranks=max(ranks, least), missing=few or package,
        )  # fmt: skip


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
