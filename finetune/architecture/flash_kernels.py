"""How torch's own flash attention computes packed attention on this GPU.

Query heads that share keys and values need no copies of them, if the kernel's results match those with copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from finetune.architecture.attention import has_flash, kernel_left_off
from finetune.architecture.varlen_kernel import (
    SHARED_KEYS,
    attend_on_cuda,
    largest_setting,
    shares_by_parameter,
)
from finetune.library_errors import with_cause
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.model import FlashAttention
from finetune.trial_limit import limited

# Relative, of the norms. Two right kernels in bfloat16, with 8 bits of mantissa, differ by some thousandths; a window
# that is one token too wide, of TRIAL_WINDOW, by a sixth.
LARGEST_DIFFERENCE = 0.02
# Of the documents that are tried: one of more than two blocks of any kernel, one of a single token, one in between.
TRIAL_ENDS = 0, 300, 301, 512
TRIAL_LONGEST = 512  # that none exceeds: compiled layers are told the next power of two
TRIAL_WINDOW = 64
# Four query heads share two key heads: plain, and with the two extras that layers ask for, a window and sinks.
HEADS, KEY_HEADS, WIDTH = 4, 2, 64
CASES = (None, False), (TRIAL_WINDOW, True)
# Compute capabilities of torch's other kernels (torch/nn/attention/_fa3.py and _fa4.py), and their widest head here:
# FA4's backward for heads of 256 was wrong on some activations alone, which no trial finds (TransformerEngine#3216).
CAPABILITIES: dict[FlashAttention, tuple[int, ...]] = {"FA3": (9,), "FA4": (9, 10)}
WIDEST_HEAD = 128


@dataclass
class FlashKernel:
    """The kernel that computes packed attention in training steps on this GPU."""

    left_off: str | None = None  # why attention is computed document by document: the guard found a wrong result
    expands_keys: str | None = None  # why torch's kernel gets a copy of the keys for each query head
    asked: FlashAttention | None = None  # the kernel that replaces torch's own
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
            "flash_attention": self.asked if self.not_replaced is None else None,
            "not_replaced": self.not_replaced,
        }

    def __str__(self) -> str:
        if self.asked is not None:
            instead = f", but by torch's own kernel: {self.not_replaced}" if self.not_replaced else ""
            return f"attention: by {self.asked}{instead}"
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
    asked = recipe.model.flash_attention
    if recipe.model.attention in ("auto", "varlen") and device.type == "cuda" and dtype.itemsize == 2:
        kernel = FlashKernel(expands_keys=try_shared_keys(device, dtype), asked=asked)
        if asked is not None:
            kernel.not_replaced = try_other_kernel(asked, device, dtype, head_width)
        return kernel
    return FlashKernel(asked=asked, not_replaced=asked and "it needs a GPU, and 16 bits")


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
    problem: str | None = None
    try:
        with limited(f"model.flash_attention: {name}", "model.flash_attention: null"):
            expected = _results(None, False, device, dtype)
            activate_flash_attention_impl(name)
            problem = _difference(expected, _results(None, False, device, dtype))
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
    trial = limited("model.attention: torch's kernel", "model.attention: eager and data.packing: false")
    try:
        with trial:
            with _sharing(device.type, False):
                expected = [_results(window, sinks, device, dtype) for window, sinks in CASES]
            with _sharing(device.type, True):
                found = [_results(window, sinks, device, dtype) for window, sinks in CASES]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a kernel raises that was built for another torch, or another GPU
        return f"does not run here ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    for (window, sinks), expects, finds in zip(CASES, expected, found, strict=True):
        if problem := _difference(expects, finds):
            return f"{problem}, with window {window} and sinks {sinks}"
    SHARED_KEYS[device.type] = True
    return None


def _difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """The first result that differs too much, in words."""
    for name, numbers in expected.items():
        difference = float((found[name] - numbers).norm() / numbers.norm())
        if not difference <= LARGEST_DIFFERENCE:  # NaN too
            return f"computes another {name}, by {difference:.2%}"
    return None


@contextmanager
def _sharing(kind: str, shared: bool) -> Iterator[None]:
    before, SHARED_KEYS[kind] = SHARED_KEYS.get(kind, False), shared
    try:
        yield
    finally:
        SHARED_KEYS[kind] = before


def _results(window: int | None, sinks: bool, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of the documents that are tried, in float32."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    heads = {"query": HEADS, "key": KEY_HEADS, "value": KEY_HEADS}
    given = {name: drawn(1, count, TRIAL_ENDS[-1], WIDTH) for name, count in heads.items()}
    given |= {"sinks": drawn(HEADS)} if sinks else {}
    leaves = [each.requires_grad_() for each in given.values()]
    starts = torch.tensor(TRIAL_ENDS, dtype=torch.int32, device=device)
    output = attend_on_cuda(**given, starts=starts, longest=TRIAL_LONGEST, scale=WIDTH**-0.5, window=window)
    gradients = torch.autograd.grad(output, leaves, drawn(*output.shape))
    named = zip(given, gradients, strict=True)
    return {"output": output.detach().float()} | {f"gradient of {name}": each.float() for name, each in named}
