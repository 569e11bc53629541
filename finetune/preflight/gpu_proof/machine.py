"""Where the proofs run: this machine's GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
        return "bfloat16" if self.bfloat16 else "float16"


def find_gpus() -> ProofMachine:
    """The GPUs that torch sees here; `count` is 0 where it sees none."""
    import torch

    from finetune.architecture.attention import AMPERE  # with torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return ProofMachine("cuda", "no GPU", 0)
    oldest = min(torch.cuda.get_device_capability(index) for index in range(count))
    return ProofMachine("cuda", torch.cuda.get_device_name(0), count, bfloat16=oldest >= AMPERE)
