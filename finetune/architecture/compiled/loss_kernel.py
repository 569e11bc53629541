"""A chunk's loss and slope as one kernel on a GPU, made by torch.compile.

As written (`loss.py`) it is 13 kernels. With each operand and result counted once, they move 22 bytes an element of the
logits, 2.8 MB a token of Llama 3's 128,256 words. One kernel moves 4 bytes, or 8 if its three passes read from memory
again: 0.5 to 1.0 MB. It has one graph for any number of tokens, and allocates nothing but the losses.
benchmarks/layer_traffic.py counts both.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from finetune.architecture import loss
from finetune.architecture.attention import AMPERE
from finetune.errors import EnvironmentMismatch
from finetune.library_errors import with_cause
from finetune.recipe.schema import Recipe
from finetune.trial_limit import limited

# By default inductor keeps what several others read in memory: float32 logits, 262 MB a chunk.
NOTHING_KEPT = {"realize_opcount_threshold": 1 << 20, "realize_reads_threshold": 1 << 20}
TRIAL_ROWS = 32


def loss_in_one_kernel(product: Tensor, target: Tensor, inner: float) -> Tensor:
    """Each token's loss, float32 [chunk, 1]; its slope overwrites the product.

    Args:
        product: [chunk, vocabulary], 16 bits.
        target: int64 [chunk].
        inner: The logits' factor.
    """
    logits = product.float() * inner
    highest = logits.amax(1, keepdim=True)
    total = highest + (logits - highest).exp().sum(1, keepdim=True).log()  # log-sum-exp
    learned = torch.arange(product.shape[1], device=product.device) == target[:, None]
    lost = total - torch.where(learned, logits, 0.0).sum(1, keepdim=True)
    product.copy_(((logits - total).exp() - learned.float()) * inner)
    return lost


def compiled_loss(backend: Any = "inductor") -> Any:
    """`loss_in_one_kernel` compiled, one graph for any number of tokens from two on."""
    options: Any = NOTHING_KEPT if backend == "inductor" else None
    compiled = torch.compile(loss_in_one_kernel, backend=backend, fullgraph=True, options=options)

    def compute(product: Tensor, target: Tensor, inner: float) -> Tensor:
        product = product.data  # of a view torch.compile would make a graph for each size of the tensor behind it
        for tensor in (product, target):
            torch._dynamo.mark_dynamic(tensor, 0)  # torch documents both under these names
        torch._dynamo.mark_static(product, 1)
        lost: Tensor = compiled(product, target, inner)
        return lost

    return compute


def use_loss_kernel(
    recipe: Recipe, vocabulary: int, device: torch.device, dtype: torch.dtype, backend: Any = "inductor"
) -> dict[str, Any]:
    """Compute losses by one kernel where it matches the loss as written; facts for the receipt.

    Raises EnvironmentMismatch where `training.compile: true` and it does not.
    """
    loss.ONE_KERNEL.pop(device.type, None)
    if torch.cuda.get_device_capability(device) < AMPERE:
        return {"one_kernel": False, "left_off": "on a GPU before compute capability 8.0", "seconds": None}
    began, compute, problem = time.perf_counter(), compiled_loss(backend), None
    try:
        with limited("training.compile: the loss", "training.compile: false"):
            problem = compare_with_written(compute, vocabulary, device, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of whatever class: torch has no public names for those of its compiler
        problem = with_cause(error)
    if problem is None:
        loss.ONE_KERNEL[device.type] = compute
    elif recipe.training.compile is True:
        raise EnvironmentMismatch(f"training.compile: true: the loss: {problem}; set training.compile: auto, or false")
    seconds = round(time.perf_counter() - began, 1)
    return {"one_kernel": problem is None, "left_off": problem, "seconds": seconds}


def compare_with_written(compute: Any, vocabulary: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `compute` is not the loss as written, on random logits with ties and with answers that are nearly sure."""
    generator = torch.Generator().manual_seed(0)
    products = 3 * torch.randn((TRIAL_ROWS, vocabulary), generator=generator)
    targets = torch.randint(vocabulary, (TRIAL_ROWS,), generator=generator)
    products[:2] = 1.0  # all the same
    products[2, targets[2]], products[3, targets[3]] = 30.0, -30.0
    targets, products = targets.to(device), products.to(device, dtype)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        slope, room = products.clone(), torch.empty_like(products, dtype=torch.float32)
        lost, _ = loss.loss_and_slope(slope, room, targets, loss.AS_IT_IS, all_learned=True, learn=True)
        losses = compute(products, targets, 1.0)
    eps = torch.finfo(dtype).eps
    for name, ours, theirs, bound in (("loss", losses, lost, 1e-5), ("gradient", products, slope, eps)):
        excess = (ours.double() - theirs.double()).abs() - bound * theirs.double().abs()
        if not float(excess.max()) <= 1e-5:  # NaN too
            return f"compiled, its {name} differs by {float(excess.max()):.2g}"
    return None
