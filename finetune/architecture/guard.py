"""Compares every path that is chosen for speed with the library's path, once, before a run's first step.

A run may compute its layers by torch's compiler, its adapters, norms and gates by the kit's own autograd, and its
attention by a flash kernel. The user asked for none of them, and a wrong gradient shows in no loss until much later. So
one forward over a few tokens runs through the model before the worst step. In it, each kind of fast module computes its
output and all gradients beside the library's module, from the same inputs, random numbers and output gradient:

    compiled layer       the layer without compiling
    own adapters         peft's forward
    own norms, gates     transformers' forward
    flash attention      one scaled-dot-product attention for each document

A path that differs is turned off: at once on the rank that sees it, and on all ranks after they have agreed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from finetune.architecture import attention
from finetune.architecture.operations import nested_tensors
from finetune.architecture.own_layers.compute import FastModule, fast_modules
from finetune.architecture.varlen_kernel import attend_on_cuda
from finetune.trial_limit import limited

# The largest relative difference of a tensor, by norms. Two right ways to compute a layer in bfloat16, which has 8
# bits, differ by some thousandths; in float32, by some millionths.
LARGEST_IN_16_BITS, LARGEST_IN_FLOAT32 = 2e-2, 1e-4
# A gradient may be small because large terms cancel, as that of a bias on keys. Rounding alone then changes much of it.
# How much is measured: by the library's own way with an input that is rounded otherwise. Other places that round, and
# there are several in a layer, may add up to so many times that.
TIMES_ROUNDING = 4
ATTENTION = "flash attention"
COMPARED_TOKENS = 512  # activations and gradients of one layer stay far below a training step's


@dataclass(frozen=True)
class Discrepancy:
    """The tensor that differs most, of all that were compared."""

    tensor: str
    relative: float
    allowed: float

    @property
    def is_fault(self) -> bool:
        """NaN is one too."""
        return not self.relative <= self.allowed

    def __str__(self) -> str:
        return f"{self.tensor} differs by {self.relative:.2%}, {self.allowed:.2g} is allowed"


Call = Callable[..., Any]


def compare_computations(
    fast: Call, expected: Call, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]
) -> Discrepancy:
    """Compare outputs and gradients of two ways to compute one thing.

    Args:
        fast, expected: Called with `inputs`; each returns a tensor, or tensors in tuples, lists and dictionaries.
        inputs: If an input requires a gradient, its gradient is compared too.
        parameters: Used by both, by name; the trained ones' gradients are compared.

    A trained parameter that is exactly zero would hide other gradients: with lora_B = 0, lora_A's is zero however it is
    computed. So these parameters have random values during the comparison.
    """
    trained = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
    with torch.enable_grad(), _without_zeros(trained.values()):
        expects = _results(expected, inputs, trained)
        eps, limit = _precision(inputs, parameters)
        # Each number in the first input half a unit in the last place larger or smaller.
        first, generator = inputs[0], torch.Generator().manual_seed(1)
        moved = torch.randint(2, first.shape, generator=generator).to(first.device, torch.float32) * 2 - 1
        moved = (first.detach().float() * (1 + eps / 2 * moved)).to(first.dtype).requires_grad_(first.requires_grad)
        rounded = _results(expected, [moved, *inputs[1:]], trained)
        rounding = {name: _distance(rounded[name], tensor) for name, tensor in expects.items()}
        del rounded, moved  # before the fast call holds its own outputs and gradients
        finds = _results(fast, inputs, trained)
    worst = Discrepancy("output", 0.0, limit)
    for name, tensor in expects.items():
        length = float(tensor.float().norm())
        difference = _relative(_distance(finds[name], tensor), length)
        allowed = max(limit, _relative(TIMES_ROUNDING * rounding[name], length))
        if not difference / allowed <= worst.relative / worst.allowed:
            worst = Discrepancy(name, difference, allowed)
        if worst.is_fault:
            break
    return worst


def compare_outputs(fast: Call, expected: Call, inputs: Sequence[Tensor]) -> Discrepancy:
    """Compare the outputs alone of two ways to compute one thing, without gradients."""
    with torch.no_grad():
        expects, finds = (list(nested_tensors(call(*inputs))) for call in (expected, fast))
    worst = Discrepancy("output", 0.0, _precision(inputs, {})[1])
    for expect, find in zip(expects, finds, strict=True):
        difference = _relative(_distance(find, expect), float(expect.float().norm()))
        if not difference <= worst.relative:
            worst = Discrepancy("output", difference, worst.allowed)
    return worst


def _results(call: Call, inputs: Sequence[Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients, by name. Every call draws the same random numbers, and leaves the generators alone."""
    device = inputs[0].device
    leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        outputs = [tensor for tensor in nested_tensors(call(*leaves)) if tensor.requires_grad]
        results = {f"output {place + 1}".removesuffix(" 1"): tensor.detach() for place, tensor in enumerate(outputs)}
        sources = {
            f"gradient of the input {place + 1}".removesuffix(" 1"): leaf
            for place, leaf in enumerate(leaves)
            if leaf.requires_grad
        }
        sources |= {f"gradient of {name}": parameter for name, parameter in trained.items()}
        if not outputs or not sources:
            return results
        slopes = []  # gradients of the outputs, drawn on the host: the same on each call
        for output in outputs:
            drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
            slopes.append(drawn.to(output.device, output.dtype))
        gradients = torch.autograd.grad(outputs, list(sources.values()), slopes, allow_unused=True)
    for (name, source), gradient in zip(sources.items(), gradients, strict=True):
        results[name] = torch.zeros_like(source) if gradient is None else gradient
    return results


def _precision(inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> tuple[float, float]:
    """A unit in the last place of the products, and the difference that is allowed: in the narrowest format among the
    tensors, as far as it can be told."""
    kind = inputs[0].device.type
    formats = [tensor.dtype for tensor in (*inputs, *parameters.values()) if tensor.is_floating_point()]
    if torch.is_autocast_enabled(kind):
        formats.append(torch.get_autocast_dtype(kind))
    eps = max((torch.finfo(dtype).eps for dtype in formats if dtype.itemsize > 1), default=0.125)
    return eps, LARGEST_IN_FLOAT32 if eps < 2**-16 else LARGEST_IN_16_BITS


def _distance(computed: Tensor, expects: Tensor) -> float:
    """The norm of the difference; NaN where one is finite and the other is not."""
    if computed.shape != expects.shape:
        return float("nan")
    difference = computed.float() - expects.float()
    distance = float(difference.norm())
    if math.isfinite(distance):  # so is every number in both
        return distance
    if not torch.equal(computed.isfinite(), expects.isfinite()):
        return float("nan")
    return float(difference.nan_to_num(0.0, 0.0, 0.0).norm())


def _relative(distance: float, length: float) -> float:
    if distance == 0:
        return 0.0
    if length > 0:
        return distance / length
    if distance > 0:
        return float("inf")
    return distance


@contextmanager
def _without_zeros(parameters: Any) -> Iterator[None]:
    """Give parameters that are exactly zero random values within the block, like a linear layer's, then restore them.

    Writing through `.data` hides the change from autograd.
    """
    changed: list[tuple[Tensor, Tensor]] = []
    generator = torch.Generator().manual_seed(2)
    try:
        for parameter in parameters:
            if parameter.numel() and not parameter.any():
                changed.append((parameter, parameter.detach().clone()))
                drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
                parameter.data.copy_(drawn)
        yield
    finally:
        for parameter, before in changed:
            parameter.data.copy_(before)


@dataclass
class Guard:
    """The comparisons that were made, and the paths that were turned off."""

    compared: dict[str, int] = field(default_factory=dict)  # kinds of modules, by path
    furthest: dict[str, float] = field(default_factory=dict)  # the largest difference, by path
    left_off: dict[str, str] = field(default_factory=dict)  # why, by path

    def see(self, path: str, what: str, difference: Discrepancy) -> None:
        """Note a comparison, and leave the path off where it differs."""
        self.compared[path] = self.compared.get(path, 0) + 1
        if difference.is_fault:
            self.left_off.setdefault(path, f"{what}: {difference}")
        elif path not in self.left_off:
            self.furthest[path] = max(self.furthest.get(path, 0.0), difference.relative)

    def facts(self) -> dict[str, Any]:
        """For the receipt."""
        return {"compared": self.compared, "furthest": self.furthest, "left_off": self.left_off}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Within the block, the first call of each kind of fast module, and of each attention, is compared."""
        watched: dict[tuple[nn.Module, str], Any] = {}  # what computes it, by module and attribute
        seen: set[Any] = set()

        def end(module: nn.Module, attribute: str) -> None:
            setattr(module, attribute, watched.pop((module, attribute)))

        def first_call(fast: FastModule, own: Call, *args: Any, **kwargs: Any) -> Any:
            place = fast.module, fast.attribute
            if place in watched and len(args) == fast.tensors and not kwargs and args[0].numel():
                end(*place)
                rows = [tensor.detach().flatten(0, -2)[:COMPARED_TOKENS].requires_grad_() for tensor in args]
                difference = compare_computations(own, fast.librarys, rows, fast.parameters())
                self.see(fast.path, type(fast.module).__name__, difference)
            return own(*args, **kwargs)

        def attend(given: Mapping[str, Any], by_document: Call) -> None:
            kind = (*(given[name].shape[1::2] for name in ("query", "key", "value")), given["window"])
            if kind in seen:
                return
            seen.add(kind)
            with limited("model.attention: torch's kernel", "model.attention: eager and data.packing: false"):
                self.see(ATTENTION, "torch's kernel", _compare_attention(given, by_document))

        for fast in fast_modules(model):
            if fast.kind not in seen:
                seen.add(fast.kind)
                watched[fast.module, fast.attribute] = own = getattr(fast.module, fast.attribute)
                setattr(fast.module, fast.attribute, partial(first_call, fast, own))
        try:
            with attention.observed(attend):
                yield
        finally:
            for place in list(watched):
                end(*place)


def _compare_attention(given: Mapping[str, Any], by_document: Call) -> Discrepancy:
    """The kernel's queries, keys and values, and sinks, against one call a document."""
    named = {name: given[name] for name in ("query", "key", "value", "sinks") if given[name] is not None}
    rest: dict[str, Any] = {name: tensor for name, tensor in given.items() if name not in named}
    leaves = [tensor.detach().requires_grad_() for tensor in named.values()]

    def kernel(*tensors: Tensor) -> Tensor:
        tensors_by_name: dict[str, Any] = dict(zip(named, tensors, strict=True))
        return attend_on_cuda(**tensors_by_name, **rest)

    def plain(*tensors: Tensor) -> Any:
        return by_document(*tensors, *[None] * (4 - len(tensors)))

    return compare_computations(kernel, plain, leaves, {})
