"""RMSNorm and gated MLPs as one step of autograd each: fewer passes over memory, and less kept for backward.

transformers writes both one operation after another. Autograd then keeps a norm's input in float32, and the normed
input if the weight is trained. For a gate act(g) * u it keeps act(g) beside g and u. Here the input is kept as it came:
it is the residual stream, which is there anyway. act(g) is computed again. Forward rounds where transformers rounds. In
16 bits results match to the bit, except for rare one-ulp differences from a mean square's summation order.

Numbers decide which modules are computed here, not names: `recognise_norm` and `recognise_gate` run a module's own
forward on small inputs and compare it with the formula. A compiled layer runs as written; torch's compiler fuses both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from finetune.architecture.own_layers.lora_linear import sharing_module

FORMATS = (torch.float32, torch.bfloat16, torch.float16)
EPSILONS = ("variance_epsilon", "eps")  # the attributes that transformers' norms keep theirs in
# Added to the weight, and the product rounded once: 1.0 as in Gemma, 0.0 as in OLMo 2 and Gemma 4. None as in Llama:
# the normed input is rounded before it is multiplied.
OFFSETS = (None, 0.0, 1.0)
# Of the 16-bit results of the right formula, at most one in 1,000 differs. Rounding in another place changes about one
# in four.
EQUAL_SHARE = 0.98


class KnownNorm(NamedTuple):
    """How a norm computes."""

    epsilon: str  # the attribute
    offset: float | None  # one of OFFSETS


class Activation(NamedTuple):
    """The function of a gate's first factor."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[..., Tensor]  # takes gradient and input, writes into `grad_input`


_GELU_BACKWARD = torch.ops.aten.gelu_backward.grad_input
ACTIVATIONS = {
    "silu": Activation(F.silu, torch.ops.aten.silu_backward.grad_input),
    "gelu": Activation(F.gelu, _GELU_BACKWARD),
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh"), partial(_GELU_BACKWARD, approximate="tanh")),
}


def compute_norms_and_gates(model: nn.Module) -> None:
    """Let this module compute every RMSNorm and gated MLP in `model` whose numbers it knows.

    Only instances change. An instance with a replaced forward stays as it is.
    """
    # A thread has no dispatch mode: the planner builds models under one that makes tensors without data.
    with ThreadPoolExecutor(1) as thread:
        kinds: dict[tuple[Any, ...], Any] = {}  # one trial for each class with the same settings
        for module in list(model.modules()):
            known: Any = module
            # One that takes more than hidden states (Mamba 2's norm has a gate) computes something else with them.
            if "forward" in vars(module) or len(signature(type(module).forward).parameters) != 2:
                continue
            if isinstance(getattr(module, "weight", None), Tensor) and not list(module.children()):
                epsilon = next((name for name in EPSILONS if isinstance(vars(module).get(name), float)), None)
                if epsilon is None:
                    continue
                key = (*_settings(module), epsilon, known.weight.ndim)
                if key not in kinds:
                    kinds[key] = thread.submit(recognise_norm, module, epsilon).result()
                if kinds[key] is not None:
                    known.finetune_norm, known.forward = kinds[key], MethodType(_norm, module)
            elif all(isinstance(getattr(module, name, None), nn.Module) for name in GATE_PARTS):
                gate_key = (*_settings(module), type(known.act_fn), repr(known.act_fn))
                if gate_key not in kinds:
                    kinds[gate_key] = thread.submit(recognise_gate, module).result()
                if kinds[gate_key] is not None:
                    known.finetune_gate, known.forward = partial(_gate, kinds[gate_key]), MethodType(_gated, module)


GATE_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """What a module's own forward may depend on: its class and plain attributes.

    Gemma 3n's MLPs, for example, are one class, and each has its own activation_sparsity.
    """
    plain = (bool, int, float, str, type(None), torch.dtype)
    values = {name: value for name, value in vars(module).items() if name != "training" and isinstance(value, plain)}
    return type(module), repr(sorted(values.items()))


def recognise_norm(module: nn.Module, epsilon: str) -> KnownNorm | None:
    """The formula that gives the results of `module`'s own forward; None: no known one does.

    The trial's weights are random and its inputs small, so that offset and epsilon matter: mean squares are 1e-6 and 1,
    and epsilon is the module's own, then 0.1.
    """
    generator = torch.Generator().manual_seed(0)
    width = 64
    weight = torch.randn(width, generator=generator)
    inputs = torch.randn(32, width, generator=generator)
    candidates = [KnownNorm(epsilon, offset) for offset in OFFSETS]
    for dtype in (torch.float32, torch.bfloat16):
        for scale, value in ((1e-3, vars(module)[epsilon]), (1.0, 0.1)):
            trial: Any = copy.copy(module)
            trial.__dict__ |= {"_parameters": {}, "weight": weight.to(dtype), epsilon: value}
            hidden = (inputs * scale).to(dtype)
            try:
                with torch.no_grad():
                    expected = type(module).forward(trial, hidden)
            except Exception:  # a stranger's forward may raise anything; it is not a norm as we know them
                return None
            if not isinstance(expected, Tensor) or expected.shape != hidden.shape or expected.dtype != dtype:
                return None
            candidates = [
                norm for norm in candidates if _agree(_formula(hidden, trial.weight, value, norm.offset), expected)
            ]
    return next(iter(candidates), None)


def _formula(hidden: Tensor, weight: Tensor, epsilon: float, offset: float | None) -> Tensor:
    """A norm, written as the textbook has it."""
    normed = hidden.float() * torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + epsilon)
    if offset is None:
        return weight * normed.to(hidden.dtype)
    return (normed * (weight.float() + offset)).to(hidden.dtype)


def _agree(result: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by the order of a sum alone."""
    if result.dtype == torch.float32:
        return torch.allclose(result, expected, rtol=1e-5, atol=0.0)
    equal = float((result == expected).float().mean()) >= EQUAL_SHARE
    return equal and torch.allclose(result.float(), expected.float(), rtol=2**-7, atol=0.0)  # one ulp of bfloat16


def recognise_gate(module: nn.Module) -> str | None:
    """The name in ACTIVATIONS for which down(act(gate(x)) * up(x)) equals `module`'s forward to the bit, or None.

    The trial replaces the three projections with small random matrices.
    """
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(16, 16, generator=generator) for _ in range(3))
    names = list(ACTIVATIONS)
    for dtype in (torch.float32, torch.bfloat16):
        hidden = torch.randn(32, 16, generator=generator).to(dtype)
        matrices = {"gate_proj": gate.to(dtype), "up_proj": up.to(dtype), "down_proj": down.to(dtype)}
        trial: Any = copy.copy(module)
        others = {name: child for name, child in module.named_children() if name not in matrices}
        trial.__dict__ |= {"_modules": others, **{name: matrix.__rmatmul__ for name, matrix in matrices.items()}}
        try:
            with torch.no_grad():
                expected = type(module).forward(trial, hidden)
        except Exception:  # as above
            return None
        if not isinstance(expected, Tensor) or expected.shape != hidden.shape:
            return None
        first, second = hidden @ matrices["gate_proj"], hidden @ matrices["up_proj"]
        names = [
            name
            for name in names
            if torch.equal((ACTIVATIONS[name].forward(first) * second) @ matrices["down_proj"], expected)
        ]
    return next(iter(names), None)


def norms_and_gates(model: nn.Module) -> dict[str, int]:
    """The numbers of norms and gates in `model` that are computed here."""
    return {"norms": len(own_norms(model)), "gates": len(own_gates(model))}


def own_norms(model: nn.Module) -> list[Any]:
    """The norms that are computed here."""
    return [module for module in model.modules() if getattr(module, "finetune_norm", None) is not None]


def own_gates(model: nn.Module) -> list[Any]:
    """The gated MLPs that are computed here. In each one `finetune_gate` joins the two factors."""
    return [module for module in model.modules() if getattr(module, "finetune_gate", None) is not None]


def tiled_mlps(model: nn.Module) -> list[Any]:
    """The gated MLPs that run in tiles of tokens (tiled_mlp.py)."""
    return [module for module in model.modules() if hasattr(module, "finetune_tile_tokens")]


def librarys_gate(module: Any, gate: Tensor, up: Tensor) -> Tensor:
    """The library's form of `finetune_gate`, as in LlamaMLP."""
    product: Tensor = module.act_fn(gate) * up
    return product


def _norm(module: Any, hidden: Tensor) -> Tensor:
    """[..., width] to [..., width]."""
    if torch.compiler.is_compiling() or hidden.dtype not in FORMATS or module.finetune_norm is None:
        result: Tensor = type(module).forward(module, hidden)
        return result
    known: KnownNorm = module.finetune_norm
    epsilon = getattr(module, known.epsilon)
    normed: Tensor = _Norm.apply(hidden, module.weight, epsilon, known.offset)  # type: ignore[no-untyped-call]
    return normed


def _gated(module: Any, hidden: Tensor) -> Tensor:
    """[..., width] to [..., width]."""
    own = sharing_module(module)
    if torch.compiler.is_compiling() or module.finetune_gate is None:
        result: Tensor = type(module).forward(own, hidden)
        return result
    # Do not bind gate and up to names: that would keep both [tokens, ffn] tensors alive during down_proj.
    product: Tensor = module.down_proj(module.finetune_gate(own.gate_proj(hidden), own.up_proj(hidden)))
    return product


def _gate(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    product: Tensor = _Gate.apply(gate, up, activation)  # type: ignore[no-untyped-call]
    return product


class _Norm(torch.autograd.Function):
    """x * r * w, r = 1 / sqrt(mean(x^2) + epsilon), in float32, rounded to the number format of x. Without an offset,
    x * r is rounded before it is multiplied by w."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float, offset: float | None) -> Tensor:
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        root = length.square_().div_(hidden.shape[-1]).add_(epsilon).rsqrt_()  # [..., 1] float32
        ctx.save_for_backward(hidden, weight, root)
        ctx.offset = offset
        if offset is not None:
            wide, factor = hidden * root, _wide(weight, offset)
            if wide.dtype == hidden.dtype:
                product: Tensor = wide.mul_(factor)
                return product
            return _times(wide, factor, like=hidden)
        normed = _times(hidden, root)
        if normed.dtype == torch.result_type(normed, weight):
            return normed.mul_(weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, root = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_weight = None
        if needs_weight:
            normed = _times(hidden, root) if ctx.offset is None else hidden * root
            grad_weight = (normed * grad_output).flatten(0, -2).sum(0).to(weight.dtype)
            del normed
        if not needs_hidden:
            return None, grad_weight, None, None
        inner = (
            (grad_output * weight).to(hidden.dtype) if ctx.offset is None else grad_output * _wide(weight, ctx.offset)
        )
        wide = inner.float().mul_(hidden) if inner.dtype != torch.float32 else inner * hidden
        along = wide.sum(-1, keepdim=True).mul_(root).mul_(root).div_(-hidden.shape[-1])  # [..., 1] float32
        torch.addcmul(inner, hidden, along, out=wide)
        del inner  # before the result is there
        return _times(wide, root, like=hidden), grad_weight, None, None


def _wide(weight: Tensor, offset: float) -> Tensor:
    if offset:
        return weight.float() + offset
    return weight.float()


class _Gate(torch.autograd.Function):
    """act(g) * u."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.name = name
        return ACTIVATIONS[name].forward(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        activation = ACTIVATIONS[ctx.name]
        grad_up = activation.forward(gate).mul_(grad_output)
        grad_gate = grad_output * up
        return activation.backward(grad_gate, gate, grad_input=grad_gate), grad_up, None


def _times(values: Tensor, factor: Tensor, like: Tensor | None = None) -> Tensor:
    """The product, computed in float32 and rounded once to `like`'s number format (None: to `values`')."""
    return torch.mul(values, factor, out=torch.empty_like(values if like is None else like))
