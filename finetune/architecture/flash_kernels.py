"""FlashAttention 3 and 4 in place of torch's own flash attention, if they are installed.

torch's variable-length attention is FlashAttention 2. torch has a public switch that lets another implementation answer
instead. torch calls both prototypes (torch/nn/attention/_fa3.py and _fa4.py in 2.13, which also list their GPUs). So
one is used only after it has matched torch's own kernel, forward and backward, on everything the model's layers ask
for. It is on in training steps only, because the switch also changes `scaled_dot_product_attention`, which generates
answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import (
    activate_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)
from transformers import PreTrainedModel

from finetune.architecture.attention import has_flash, kernel_left_off
from finetune.architecture.trial import attention_shapes
from finetune.architecture.varlen_kernel import (
    SHARED_KEYS,
    AttentionShape,
    attend_on_cuda,
    fits_flash,
    shares_by_parameter,
)
from finetune.recipe.schema import Recipe
from finetune.trial_limit import limited

# Relative, of the norms. Two right kernels in bfloat16, with 8 bits of mantissa, differ by some thousandths; a window
# that is one token too wide, of TRIAL_WINDOW, by a sixth.
LARGEST_DIFFERENCE = 0.02
# Of the documents that are tried: one of more than two blocks of any kernel, one of a single token, one in between.
TRIAL_ENDS = 0, 300, 301, 512
TRIAL_LONGEST = 512  # that none exceeds: compiled layers are told the next power of two
TRIAL_WINDOW = 64
# Four query heads share two key heads: plain, and with the two extras that layers ask for.
SHARING = tuple(AttentionShape(4, 2, 64, 64, window, sinks, 0.0) for window, sinks in ((None, False), (1024, True)))


@dataclass(frozen=True)
class Implementation:
    """One that torch's switch knows."""

    name: str  # torch's
    title: str
    module: str  # that torch imports
    packages: tuple[str, ...]  # that bring it
    capabilities: tuple[int, ...]  # first numbers of the compute capabilities of its GPUs


IMPLEMENTATIONS = (
    Implementation("FA3", "FlashAttention 3", "flash_attn_interface", ("flash-attn-3",), (9,)),
    Implementation("FA4", "FlashAttention 4", "flash_attn.cute.interface", ("flash-attn-4", "flash-attn"), (9, 10)),
)


@dataclass
class FlashKernel:
    """The kernel that computes packed attention in training steps on this GPU."""

    taken: Implementation | None = None  # None: torch's own
    difference: float = 0.0  # relative, of its results from those of torch's own
    left_off: str | None = None  # why one that is installed is not taken
    expands_keys: str | None = None  # why torch's kernel gets a copy of the keys for each query head
    by_document: bool = False  # no kernel at all, because the guard found a wrong result

    def leave_off(self, reason: str) -> None:
        """Compute attention document by document, with `scaled_dot_product_attention`."""
        self.taken, self.by_document, self.left_off = None, True, reason

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, torch's flash attention is the one that was taken."""
        if self.by_document:
            with kernel_left_off():
                yield
            return
        if self.taken is None:
            yield
            return
        with _active(self.taken):
            yield

    def agree(self, total: Callable[[Tensor], Any], device: torch.device) -> None:
        """Take torch's own on every rank where one does; every rank calls it. `total` sums a tensor over the ranks."""
        if device.type != "cuda":
            return
        without = int(total(torch.tensor(int(self.taken is None), device=device)))
        if without and self.taken is not None:
            self.left_off = f"{self.taken.title}: another rank cannot take it"
            self.taken = None

    def facts(self) -> dict[str, Any]:
        """For the receipt."""
        return {
            "taken": self.taken and self.taken.title,
            "version": self.taken and _version(self.taken),
            "difference": self.difference if self.taken else None,
            "left_off": self.left_off,
            "expands_keys": self.expands_keys,
            "by_document": self.by_document,
        }

    def __str__(self) -> str:
        lines = []
        if self.taken is not None:
            lines.append(
                f"attention: {self.taken.title} ({_version(self.taken)}) instead of torch's own kernel, from which it "
                f"differs by {self.difference:.2%} in a trial; model.attention: varlen keeps torch's own"
            )
        elif self.left_off:
            lines.append(f"attention: torch's own kernel, because {self.left_off}")
        if self.expands_keys:
            lines.append(
                "attention: keys and values are copied for each head that shares them, which takes more memory than "
                f"planned, because torch's kernel {self.expands_keys}"
            )
        return "\n".join(lines)


def choose_flash_kernel(
    recipe: Recipe, model: PreTrainedModel, device: torch.device, dtype: torch.dtype
) -> FlashKernel:
    """The first implementation that is installed, made for this GPU, and right; otherwise torch's own.

    Args:
        dtype: The format that attention is computed in.
    """
    reasons, expands = [], None
    if recipe.model.attention in ("auto", "varlen") and device.type == "cuda" and dtype.itemsize == 2:
        expands = try_shared_keys(device, dtype)
    if recipe.model.attention == "auto" and device.type == "cuda":
        for candidate in filter(_installed, IMPLEMENTATIONS):
            found = _unfit(candidate, recipe, device, dtype) or _tried(candidate, model, device, dtype)
            if isinstance(found, float):
                return FlashKernel(candidate, found, expands_keys=expands)
            reasons.append(f"{candidate.title} {found}")
    return FlashKernel(left_off="; ".join(reasons) or None, expands_keys=expands)


def try_shared_keys(device: torch.device, dtype: torch.dtype) -> str | None:
    """Let query heads share keys and values in torch's kernel, if its results match those with a copy for each head.

    Returns the problem if they differ. Runs once a process. With copies, 8B keeps 50 MB more a layer for backward in a
    row of 4,096 tokens. From torch 2.13 on the function has a parameter for this, so nothing is tried.
    """
    if shares_by_parameter() or not has_flash(device):
        return None
    largest: float | str = 0.0
    if not SHARED_KEYS.get(device.type):
        largest = _difference(SHARING, device, dtype, _sharing(device.type, False), _sharing(device.type, True))
        SHARED_KEYS[device.type] = isinstance(largest, float)
    if isinstance(largest, str):
        return largest
    return None


@contextmanager
def _sharing(kind: str, shared: bool) -> Iterator[None]:
    before, SHARED_KEYS[kind] = SHARED_KEYS.get(kind, False), shared
    try:
        yield
    finally:
        SHARED_KEYS[kind] = before


def _installed(candidate: Implementation) -> bool:
    """Whether its file is there. Nothing is imported, because that may take seconds, or fail."""
    package, *inner = candidate.module.split(".")
    spec = util.find_spec(package)
    if spec is None or not inner:
        return spec is not None
    folders = spec.submodule_search_locations or ()
    return any(Path(folder, *inner).with_suffix(".py").is_file() for folder in folders)


def _version(candidate: Implementation) -> str:
    for package in candidate.packages:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return candidate.module


def _unfit(candidate: Implementation, recipe: Recipe, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why it is not even tried."""
    major, minor = torch.cuda.get_device_capability(device)
    if major not in candidate.capabilities:
        return f"is not for a GPU of compute capability {major}.{minor}"
    if candidate.name not in list_flash_attention_impls():
        return f"is unknown to torch {torch.__version__}"
    if recipe.training.deterministic:
        return "is not known to sum in one order, as training.deterministic: true asks"
    if dtype.itemsize != 2:
        return f"computes nothing in {str(dtype).removeprefix('torch.')}"
    return None


def _tried(candidate: Implementation, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> float | str:
    """The largest difference from torch's own kernel, or the fault."""
    shapes = attention_shapes(type(model), model.config)
    if any(shape.dropout for shape in shapes):
        return "computes no dropout"
    asked = [shape for shape in shapes if fits_flash(shape.head_dim, shape.value_dim)]
    if not asked:
        return "would compute no layer of this model"
    return _difference(asked, device, dtype, nullcontext(), _active(candidate))


def _difference(
    shapes: Iterable[AttentionShape],
    device: torch.device,
    dtype: torch.dtype,
    expected_within: AbstractContextManager[Any],
    tried_within: AbstractContextManager[Any],
) -> float | str:
    """The largest relative difference between two ways to compute attention, in outputs and gradients.

    Returns a problem instead if the second way fails.
    """
    largest, shapes = 0.0, list(shapes)
    try:
        with limited("model.attention: a flash kernel", "model.attention: eager and data.packing: false"):
            with expected_within:
                expected = [_results(shape, device, dtype) for shape in shapes]
            with tried_within:
                found = [_results(shape, device, dtype) for shape in shapes]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a package raises that was built for another torch, or another GPU
        return f"does not run here ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    for shape, expects, finds in zip(shapes, expected, found, strict=True):
        for name, numbers in expects.items():
            difference = float((finds[name] - numbers).norm() / numbers.norm())
            if not difference <= LARGEST_DIFFERENCE:  # NaN too
                return f"computes another {name}, by {difference:.2%}, of {shape}"
            largest = max(largest, difference)
    return largest


@contextmanager
def _active(candidate: Implementation) -> Iterator[None]:
    activate_flash_attention_impl(candidate.name)
    try:
        yield
    finally:
        restore_flash_attention_impl()


def _results(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients of the documents that are tried, in float32."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    given = {
        "query": drawn(1, shape.heads, TRIAL_ENDS[-1], shape.head_dim),
        "key": drawn(1, shape.kv_heads, TRIAL_ENDS[-1], shape.head_dim),
        "value": drawn(1, shape.kv_heads, TRIAL_ENDS[-1], shape.value_dim),
    }
    given |= {"sinks": drawn(shape.heads)} if shape.sinks else {}
    leaves = [each.requires_grad_() for each in given.values()]
    starts = torch.tensor(TRIAL_ENDS, dtype=torch.int32, device=device)
    window = None if shape.window is None else min(shape.window, TRIAL_WINDOW)
    output = attend_on_cuda(**given, starts=starts, longest=TRIAL_LONGEST, scale=shape.head_dim**-0.5, window=window)
    gradients = torch.autograd.grad(output, leaves, drawn(*output.shape))
    named = zip(given, gradients, strict=True)
    return {"output": output.detach().float()} | {f"gradient of {name}": each.float() for name, each in named}
