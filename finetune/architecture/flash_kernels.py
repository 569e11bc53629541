"""How torch's own flash attention computes packed attention on this GPU.

Query heads that share keys and values need no copies of them, if the kernel's results match those with copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl, restore_flash_attention_impl

from finetune.architecture.attention import has_flash, kernel_left_off
from finetune.architecture.guard import compare_computations
from finetune.architecture.varlen_kernel import SHARED_KEYS, attend_on_cuda, largest_setting, shares_by_parameter
from finetune.library_errors import with_cause
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.model import FlashAttention
from finetune.trial_limit import limited

# Of the documents that are tried: one of more than two blocks of any kernel, one of a single token, one in between.
TRIAL_ENDS = 0, 300, 301, 512
TRIAL_LONGEST = 512  # that none exceeds: compiled layers are told the next power of two
TRIAL_WINDOW = 64  # one that is a token too wide changes the output by a sixth
# Four query heads share two key heads: plain, and with the two extras that layers ask for, a window and sinks.
HEADS, KEY_HEADS, WIDTH = 4, 2, 64
# Compute capabilities of torch's other kernels (torch/nn/attention/_fa3.py and _fa4.py), and their widest head here:
# FA4's backward for heads of 256 was wrong on some activations alone, which no trial finds (TransformerEngine#3216).
CAPABILITIES: dict[FlashAttention, tuple[int, ...]] = {"FA3": (9,), "FA4": (9, 10)}
WIDEST_HEAD = 128


@dataclass
class FlashKernel:
    """The kernel that computes packed attention in training steps on this GPU."""

    left_off: str | None = None  # why attention is computed document by document: the guard found a wrong result
    expands_keys: str | None = None  # why torch's kernel gets a copy of the keys for each query head
    requested: FlashAttention | None = None  # the kernel that replaces torch's own
    not_replaced: str | None = None  # why torch's own computes all the same

    def leave_off(self, reason: str) -> None:
        """Compute attention document by document, with `scaled_dot_product_attention`."""
        self.left_off = reason
        _use_torchs_own()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, attention is computed as it was chosen."""
        if self.left_off is None:
            yield
            return
        with kernel_left_off():
            yield

    def facts(self) -> dict[str, Any]:
        """For the receipt."""
        return {
            "by_document": self.left_off is not None,
            "left_off": self.left_off,
            "expands_keys": self.expands_keys,
            "flash_attention": self.requested if self.not_replaced is None else None,
            "not_replaced": self.not_replaced,
        }

    def __str__(self) -> str:
        if self.requested is not None:
            instead = f", but by torch's own kernel: {self.not_replaced}" if self.not_replaced else ""
            return f"attention: by {self.requested}{instead}"
        if not self.expands_keys:
            return ""
        return (
            "attention: keys and values are copied for each head that shares them, which takes more memory than "
            f"planned, because torch's kernel {self.expands_keys}"
        )


def choose_flash_kernel(
    recipe: Recipe, device: torch.device, dtype: torch.dtype, head_width: int | None = None
) -> FlashKernel:
    """Try the kernel on what heads share, then the one that the recipe wants in its place.

    Args:
        dtype: The format that attention is computed in.
        head_width: The widest head's; None: not known.
    """
    requested = recipe.model.flash_attention
    if recipe.model.attention in ("auto", "varlen") and device.type == "cuda" and dtype.itemsize == 2:
        kernel = FlashKernel(expands_keys=try_shared_keys(device, dtype), requested=requested)
        if requested is not None:
            kernel.not_replaced = try_other_kernel(requested, device, dtype, head_width)
        return kernel
    return FlashKernel(requested=requested, not_replaced=requested and "it needs a GPU, and 16 bits")


def widest_head(config: Any) -> int | None:
    """The widest head in a model's configuration; None where it does not say."""
    text = config.get_text_config()
    hidden, heads = (largest_setting(text, name) for name in ("hidden_size", "num_attention_heads"))
    named = largest_setting(text, "head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
    return named or (hidden // heads if hidden and heads else None)


def try_other_kernel(
    name: FlashAttention, device: torch.device, dtype: torch.dtype, head_width: int | None
) -> str | None:
    """Replace torch's flash kernel by FA3 or FA4, if its results match. Returns the problem if they do not; torch's own
    then stays. The guard compares the replaced kernel on the model's own queries."""
    _use_torchs_own()
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in CAPABILITIES[name]:
        return f"this GPU's compute capability is {capability[0]}.{capability[1]}"
    if head_width is None or head_width > WIDEST_HEAD:
        return f"heads are {head_width or 'of unknown width'}, wider than {WIDEST_HEAD}"
    if not has_flash(device):
        return "torch's flash attention does not run here"
    try:
        with limited(f"model.flash_attention: {name}", "model.flash_attention: null"):
            problem = _difference(partial(activate_flash_attention_impl, name), _use_torchs_own, False, device, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the package is missing, or whatever a kernel raises
        problem = with_cause(error)
    if problem is not None:
        _use_torchs_own()
    return problem


def _use_torchs_own() -> None:
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def try_shared_keys(device: torch.device, dtype: torch.dtype) -> str | None:
    """Let query heads share keys and values in torch's kernel, if its results match those with a copy for each head.

    Returns the problem if they differ. Runs once a process. With copies, 8B keeps 50 MB more a layer for backward in a
    row of 4,096 tokens. From torch 2.13 on the function has a parameter for this, so nothing is tried.
    """
    if shares_by_parameter() or not has_flash(device) or SHARED_KEYS.get(device.type):
        return None
    share, copy = (partial(SHARED_KEYS.__setitem__, device.type, shared) for shared in (True, False))
    try:
        with limited("model.attention: torch's kernel", "model.attention: eager and data.packing: false"):
            problem = _difference(share, copy, False, device, dtype) or _difference(share, copy, True, device, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a kernel raises that was built for another torch, or another GPU
        problem = f"does not run here ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    SHARED_KEYS[device.type] = problem is None
    return problem


def _difference(
    switch: Callable[[], Any], switch_back: Callable[[], Any], extras: bool, device: torch.device, dtype: torch.dtype
) -> str | None:
    """The result that differs most after `switch` from that after `switch_back`, if it differs too much, in words.

    Args:
        extras: With a window and sinks.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype).requires_grad_()

    query, *others = (drawn(1, count, TRIAL_ENDS[-1], WIDTH) for count in (HEADS, KEY_HEADS, KEY_HEADS))
    given, window = dict(zip(("key", "value"), others, strict=True)), None
    if extras:
        given["sinks"], window = drawn(HEADS), TRIAL_WINDOW
    starts = torch.tensor(TRIAL_ENDS, dtype=torch.int32, device=device)

    def attend(first: Callable[[], Any], query: Tensor) -> Tensor:
        first()  # backward runs before the other call
        return attend_on_cuda(query, **given, starts=starts, longest=TRIAL_LONGEST, scale=WIDTH**-0.5, window=window)

    worst = compare_computations(partial(attend, switch), partial(attend, switch_back), [query], given)
    if not worst.is_fault:
        return None
    with_extras = f", with window {window} and sinks {extras}" if extras else ""
    return f"computes another {worst.tensor}, by {worst.relative:.2%}{with_extras}"
