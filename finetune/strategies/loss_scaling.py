"""fp16 with dynamic loss scaling: Accelerate's GradScaler, its scale on the device, its state in JSON.

float16 ends at 65,504 and begins at 6e-8, so the loss is multiplied by a scale before backward and the gradients are
divided by it before they are clipped. Where a gradient overflows the update is skipped and the scale halved; after
2,000 steps without one it is doubled. Without fp16 there is no scaler and everything here is idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

# A scale below 1 would only push small gradients out of float16: gradients that overflow at 1 overflow at any scale.
FLOOR = 1.0


def scale_losses_on_cpu(accelerator: Accelerator) -> None:
    """Give fp16 on a CPU the autocast and the scaler that a GPU gets.

    accelerate 1.15 accepts mixed_precision="fp16" on a CPU and reports it, but silently computes in float32
    without a scaler. DeepSpeed has its own scaler and refuses a CPU.
    """
    if accelerator.mixed_precision != "fp16" or accelerator.device.type != "cpu":
        return
    if accelerator.distributed_type != DistributedType.DEEPSPEED and accelerator.scaler is None:
        accelerator.native_amp = True  # what prepare() looks at before it wraps forward
        accelerator.scaler = torch.amp.GradScaler("cpu")


def loss_scale(accelerator: Accelerator) -> torch.Tensor:
    """The scale in force, float64 [1] on the device, not read to the host; 1 without scaling."""
    one = torch.ones(1, dtype=torch.float64, device=accelerator.device)
    if accelerator.scaler is None:
        return one
    scale: torch.Tensor = accelerator.scaler.scale(one)
    return scale


def kind_of_scaling(accelerator: Accelerator) -> str | None:
    """`dynamic`, `static` (a strategy file's loss_scale), or None without scaling."""
    if accelerator.scaler is None:
        return None
    if getattr(accelerator.scaler, "static", False):
        return "static"
    return "dynamic"


def lowest_scale(accelerator: Accelerator) -> float:
    """The scaler's lowest scale. A static scale is its own lowest."""
    return float(getattr(accelerator.scaler, "floor", FLOOR))


def scaler_state(accelerator: Accelerator) -> dict[str, Any] | None:
    """Scale and growth count for a checkpoint, as JSON; None without scaling. Waits for the device."""
    if accelerator.scaler is None:
        return None
    state: dict[str, Any] = accelerator.scaler.state_dict()
    return state


def load_scaler_state(accelerator: Accelerator, saved: Mapping[str, Any] | None) -> None:
    """Continue with the scale that `scaler_state` gave."""
    if accelerator.scaler is not None and saved is not None:
        accelerator.scaler.load_state_dict(dict(saved))
