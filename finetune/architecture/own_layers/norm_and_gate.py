"""RMSNorm and gated MLPs as one step of autograd each: fewer passes over memory, and less kept for backward.

transformers writes both one operation after another. Of a norm autograd then keeps the input in float32, and the normed
input where the weight is trained; of a gate act(g) besides g and u. Here the input is kept as it came, which is the
residual stream and is there anyway, and act(g) is computed once more. Forward rounds where transformers does, so in 16
bits it returns the same bits but where a mean square, summed in another order, is on the edge between two.

Only instances change, and only those of a class whose forward is, instruction by instruction, that of a norm in
WRITTEN or of LlamaMLP: seven of eight RMSNorms of transformers are. A compiled layer runs as it is written, torch's
compiler fuses both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

FORMATS = (torch.float32, torch.bfloat16, torch.float16)


class Written(NamedTuple):
    """How a norm of transformers is written."""

    original: type[nn.Module]
    epsilon: str  # the attribute
    offset: float | None  # what is added to the weight, and the product rounded once; None: as Llama's, before it


WRITTEN = (
    Written(LlamaRMSNorm, "variance_epsilon", None),
    Written(Olmo2RMSNorm, "variance_epsilon", 0.0),
    Written(GemmaRMSNorm, "eps", 1.0),
    Written(Gemma3nRMSNorm, "eps", 0.0),  # Gemma 4's too
)


class Activation(NamedTuple):
    """What a gate's first factor goes through."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[..., Tensor]  # of the gradient and the input, into `grad_input`


def _gelu(approximate: str) -> Activation:
    backward = partial(torch.ops.aten.gelu_backward.grad_input, approximate=approximate)
    return Activation(partial(F.gelu, approximate=approximate), backward)


ACTIVATIONS = {
    "silu": Activation(F.silu, torch.ops.aten.silu_backward.grad_input),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
}


def compute_norms_and_gates(model: nn.Module) -> None:
    """Have every RMSNorm and gated MLP of `model` that is written as one that is known here computed by this module."""
    for module in model.modules():
        if "forward" in vars(module):
            continue
        known: Any = module
        written = next((each for each in WRITTEN if _runs_as(module, each.original)), None)
        if written is not None and isinstance(getattr(module, "weight", None), Tensor):  # some have none
            known.finetune_norm, known.forward = written, MethodType(_norm, module)
        elif _runs_as(module, LlamaMLP) and (activation := _activation(known.act_fn)) is not None:
            known.finetune_gate, known.forward = partial(_gate, activation), MethodType(_gated, module)


def norms_and_gates(model: nn.Module) -> dict[str, int]:
    """How many norms and gates of `model` are computed here."""
    return {"norms": len(own_norms(model)), "gates": len(own_gates(model))}


def own_norms(model: nn.Module) -> list[Any]:
    """The norms that are computed here."""
    return [module for module in model.modules() if getattr(module, "finetune_norm", None) is not None]


def own_gates(model: nn.Module) -> list[Any]:
    """The gated MLPs that are computed here. In each one `finetune_gate` joins the two factors."""
    return [module for module in model.modules() if getattr(module, "finetune_gate", None) is not None]


def librarys_gate(module: Any, gate: Tensor, up: Tensor) -> Tensor:
    """The library's form of `finetune_gate`, as in LlamaMLP."""
    product: Tensor = module.act_fn(gate) * up
    return product


def _activation(module: Any) -> str | None:
    """Its name among ACTIVATIONS; None: it is none of them."""
    if isinstance(module, (nn.SiLU, type(ACT2FN["silu"]))):
        return "silu"
    computed = getattr(module, "act", None)  # transformers has the formula in Python too, which rounds otherwise
    if isinstance(module, type(ACT2FN["gelu"])) and computed is F.gelu:
        return "gelu"
    if isinstance(module, type(ACT2FN["gelu_pytorch_tanh"])) and isinstance(computed, partial):
        return "gelu_tanh"
    return None


def _runs_as(module: nn.Module, original: type[nn.Module]) -> bool:
    """Whether a module's forward has the instructions of another class's, whatever its variables are called, and so
    has what that forward calls of its own class."""
    names = [name for name in ("forward", "_norm") if hasattr(original, name)]
    return all(_same_instructions(getattr(type(module), name, None), getattr(original, name)) for name in names)


def _same_instructions(function: Any, original: Any) -> bool:
    if getattr(function, "__code__", None) is None or _instructions(function) != _instructions(original):
        return False
    return function.__closure__ is None and function.__globals__.get("torch", torch) is torch


def _instructions(function: Any) -> tuple[Any, ...]:
    code = function.__code__
    constants = code.co_consts
    if constants and constants[0] is function.__doc__:
        constants = constants[1:]
    return code.co_code, code.co_names, constants, code.co_argcount


def _norm(module: Any, hidden: Tensor) -> Tensor:
    """[..., width] to [..., width]."""
    if torch.compiler.is_compiling() or hidden.dtype not in FORMATS or module.finetune_norm is None:
        result: Tensor = type(module).forward(module, hidden)
        return result
    written: Written = module.finetune_norm
    epsilon = getattr(module, written.epsilon)
    normed: Tensor = _Norm.apply(hidden, module.weight, epsilon, written.offset)  # type: ignore[no-untyped-call]
    return normed


def _gated(module: Any, hidden: Tensor) -> Tensor:
    """[..., width] to [..., width]."""
    if torch.compiler.is_compiling() or module.finetune_gate is None:
        result: Tensor = type(module).forward(module, hidden)
        return result
    # No name for the factors: they would live on beside the product of a layer that keeps nothing.
    product: Tensor = module.down_proj(module.finetune_gate(module.gate_proj(hidden), module.up_proj(hidden)))
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
            return wide.mul_(factor) if wide.dtype == hidden.dtype else _times(wide, factor, like=hidden)
        normed = _times(hidden, root)
        return normed.mul_(weight) if normed.dtype == torch.result_type(normed, weight) else normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, root = ctx.saved_tensors
        of_hidden, of_weight, *_ = ctx.needs_input_grad
        grad_weight = None
        if of_weight:
            normed = _times(hidden, root) if ctx.offset is None else hidden * root
            grad_weight = (normed * slope).flatten(0, -2).sum(0).to(weight.dtype)
            del normed
        if not of_hidden:
            return None, grad_weight, None, None
        inner = (slope * weight).to(hidden.dtype) if ctx.offset is None else slope * _wide(weight, ctx.offset)
        wide = inner.float().mul_(hidden) if inner.dtype != torch.float32 else inner * hidden
        along = wide.sum(-1, keepdim=True).mul_(root).mul_(root).div_(-hidden.shape[-1])  # [..., 1] float32
        torch.addcmul(inner, hidden, along, out=wide)
        del inner  # before the result is there
        return _times(wide, root, like=hidden), grad_weight, None, None


def _wide(weight: Tensor, offset: float) -> Tensor:
    return weight.float() + offset if offset else weight.float()


class _Gate(torch.autograd.Function):
    """act(g) * u."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.name = name
        return ACTIVATIONS[name].forward(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        activation = ACTIVATIONS[ctx.name]
        grad_up = activation.forward(gate).mul_(slope)
        grad_gate = slope * up
        return activation.backward(grad_gate, gate, grad_input=grad_gate), grad_up, None


def _times(values: Tensor, factor: Tensor, like: Tensor | None = None) -> Tensor:
    """The product, computed in float32 and rounded once, to the number format of `like` (None: of `values`)."""
    return torch.mul(values, factor, out=torch.empty_like(values if like is None else like))
