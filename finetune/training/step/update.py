"""The update at the end of an optimizer step, where the device itself can clip the gradient and refuse the update.

torch's fused AdamW divides each gradient by its attribute `grad_scale` as it reads it, and leaves weights, moments and
step count as they are where `found_inf` is exactly 1. So no pass over the gradients clips them (8 bytes a weight: 64 GB
for 8B), and nothing waits for the host: a gradient that is not finite is refused before anyone has read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor

from finetune.model.optimizer import unwrap_optimizer

FACTS = 5  # of a step: loss sum, supervised tokens, stop flags, gradient norm; loss scale, or an earlier refusal


def updates_on_device(accelerator: Accelerator, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is torch's fused AdamW, over weights on the accelerator's device.

    DeepSpeed's engine clips by itself, fp16's scaler decides on the host, bitsandbytes and RoundedAdamW have kernels of
    their own. Where weights are in host memory the device's flag would have to be waited for there.
    """
    if accelerator.scaler is not None or accelerator.distributed_type == DistributedType.DEEPSPEED:
        return False
    inner = unwrap_optimizer(optimizer)
    return type(inner) is torch.optim.AdamW and all(
        group["fused"] and group["params"][0].device.type == accelerator.device.type for group in inner.param_groups
    )


def keep_refusal_flag(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Give the optimizer its flag, if it has none yet: 1 from the first refused step on, until the process ends."""
    inner = unwrap_optimizer(optimizer)
    if not hasattr(inner, "found_inf"):
        inner.found_inf = torch.zeros((), dtype=torch.float32, device=device)


def clip_and_update(
    optimizer: torch.optim.Optimizer,
    tally: Tensor,
    max_grad_norm: float | None,
    norm_of: Callable[[Any], Tensor] | None = None,
) -> Tensor:
    """One update, with the gradient's norm clipped; none where loss or gradient of any rank is not finite, nor after
    such a step. Frees the gradients; reads nothing to the host.

    Args:
        tally: float64 [3], over all ranks: loss sum, supervised tokens, stop flags.
        norm_of: The norm of the optimizer's gradients; None: `gradient_norm`.

    Returns:
        The step's facts, float64 [5]; the last is 1 where an earlier step was refused.
    """
    inner = unwrap_optimizer(optimizer)
    norm = (norm_of or gradient_norm)(inner).to(tally.device)
    keep_refusal_flag(inner, tally.device)
    facts = torch.cat([tally, norm.reshape(1), inner.found_inf.reshape(1)])
    # The sum is 0, or nan where a fact is not finite: it differs from a flag that is up, and nan differs from any.
    torch.ne((facts - facts).sum(), inner.found_inf, out=inner.found_inf)
    # torch's clip_grad_norm_ multiplies by max / (norm + 1e-6) where that is below 1.
    inner.grad_scale = None if max_grad_norm is None else norm.add(1e-6).div_(max_grad_norm).clamp_(min=1.0)
    inner.step()  # Accelerate's own would look for a library each time, and zero_grad inspect a signature
    inner.zero_grad()
    inner.grad_scale = None
    return facts


def gradient_norm(optimizer: Any) -> Tensor:
    """The norm over all gradients of all ranks, float32 []. Sharded gradients are reduced once for each mesh."""
    meshes: dict[Any, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter.grad)
    norms = [unsharded(torch.nn.utils.get_total_norm(gradients)) for gradients in meshes.values()]
    norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)
    return norm.float()


def unsharded(norm: Tensor) -> Tensor:
    """The gradient norm as a plain tensor: of sharded gradients it is a DTensor."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
