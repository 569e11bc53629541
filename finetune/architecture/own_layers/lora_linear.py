"""A linear layer and its adapter as one step of autograd: y = x W^T + b + s drop(x) A^T B^T.

peft 0.21 computes five steps. It casts x to the adapter's float32, which autocast casts back, and keeps a copy of x for
each of q, k and v. It multiplies the adapter's result by s, adds it to the base's, and adds two gradients of x. At
4,096 tokens those passes over memory take a third of a decoder layer's time beside its matrix products.

Here x is kept as it came, and layers with the same input share it. Each product adds to the one before (`addmm`). W is
frozen, so it has no gradient. The numbers are the same up to rounding, with fewer roundings.

Only instances change, so saving, merging and peft see the classes they know. peft still computes everything that
`computed_by` names, and any call with several adapters, a merged or a disabled one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Unpack = Callable[[Any, torch.dtype], Tensor]  # the weight [outputs, inputs] of a packed layer, in that format
# Adds a packed layer's gradient of the input [tokens, inputs] to the first tensor, from that of its output.
AddGradient = Callable[[Tensor, Tensor], Tensor]

OWN = "own"  # what computes a layer: this module, or peft for a reason


def compute_adapters(model: nn.Module, unpack: Unpack, *, by_peft: str | None = None) -> None:
    """Let this module compute every layer in `model` whose adapter allows it.

    Args:
        unpack: For layers with 4-bit weights.
        by_peft: The reason why all stay peft's; None: there is none.
    """
    for layer in _adapted(model):
        layer.finetune_computed_by = by_peft or _only_peft(layer) or OWN
        if layer.finetune_computed_by == OWN:
            (name,) = layer.lora_A
            layer.finetune_adapter = name, _packed_gradient(layer.base_layer, unpack) if _is_packed(layer) else None
            layer.forward = MethodType(_forward, layer)


def own_adapters(model: nn.Module) -> list[Any]:
    """The layers with adapters that are computed here."""
    return [layer for layer in _adapted(model) if getattr(layer, "finetune_computed_by", None) == OWN]


def leave_to_peft(model: nn.Module, reason: str) -> None:
    """From now on peft computes all adapters."""
    for layer in own_adapters(model):
        layer.finetune_computed_by, layer.finetune_adapter = reason, None


def computed_by(model: nn.Module, *, cast: bool) -> list[str]:
    """Of each layer with an adapter: OWN, or why peft computes it.

    Args:
        cast: Whether all weights are cast to one number format, by autocast or where they are gathered.
    """
    return [
        "two number formats"
        if layer.finetune_computed_by == OWN and not (cast or _formats_agree(layer))
        else layer.finetune_computed_by
        for layer in _adapted(model)
        if hasattr(layer, "finetune_computed_by")
    ]


def _formats_agree(layer: Any) -> bool:
    """Whether adapter and base have one number format. Packed weights count as the format they were packed from."""
    base, (down,) = layer.base_layer, layer.lora_A.values()
    packing = getattr(base, "packing", None) or vars(getattr(base.weight, "quant_state", base.weight))
    return bool(down.weight.dtype == packing.get("dtype", base.weight.dtype))


def _adapted(model: nn.Module) -> list[Any]:
    """peft's LoRA layers, experts and embeddings too."""
    return [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer")]


def _is_packed(layer: Any) -> bool:
    """Whether the base has 4-bit weights, as bitsandbytes packs them, or weights in float8."""
    return hasattr(layer.base_layer.weight, "quant_state") or hasattr(layer.base_layer, "weight_scale")


def _packed_gradient(base: Any, unpack: Unpack) -> AddGradient:
    if hasattr(base, "weight_scale"):
        from finetune.architecture.own_layers.float8_linear import add_input_gradient

        return partial(add_input_gradient, base)
    return partial(_add_unpacked, partial(unpack, base))


def _add_unpacked(unpack: Callable[[torch.dtype], Tensor], result: Tensor, slope: Tensor) -> Tensor:
    return result.addmm_(slope, unpack(slope.dtype))


def _only_peft(layer: Any) -> str | None:
    """Why peft alone computes this layer; None: it need not."""
    base = layer.base_layer
    if hasattr(layer, "parameter_name"):
        return "experts"
    if hasattr(getattr(base, "weight", None), "SCB"):  # the scales of bitsandbytes' 8-bit weights
        return "int8"
    if isinstance(base, nn.Embedding):
        return "Embedding"
    if any(layer.use_dora.values()):
        return "DoRA"
    if layer.lora_variant:
        return ", ".join(sorted(type(variant).__name__ for variant in layer.lora_variant.values()))
    if len(layer.lora_A) != 1:
        return f"{len(layer.lora_A)} adapters"
    if _is_packed(layer):
        if base.bias is not None and base.bias.requires_grad:
            return "a trained bias"
        return None
    if type(base).forward is not nn.Linear.forward or "forward" in vars(base):
        return f"the forward of {type(base).__name__}"
    if base.weight.requires_grad:
        return "a trained base"
    return None


def _forward(layer: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """[..., inputs] to [..., outputs]."""
    if layer.finetune_adapter is None:
        by_peft: Tensor = type(layer).forward(layer, hidden, *args, **kwargs)
        return by_peft
    name, unpack = layer.finetune_adapter
    dtype = _product_dtype(hidden)
    base, down, up = layer.base_layer, layer.lora_A[name], layer.lora_B[name]
    as_peft = args or kwargs or layer.merged or layer.disable_adapters or layer.active_adapters != [name]
    if as_peft or not _one_format(hidden, dtype, down.weight, None if unpack is not None else base.weight):
        result: Tensor = type(layer).forward(layer, hidden, *args, **kwargs)
        return result
    dropout, scale = layer.lora_dropout[name], layer.scaling[name]
    dropped = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    bias = None if base.bias is None or unpack is not None else base.bias.to(dtype)  # a packed layer adds its own
    if up.bias is not None:
        own = scale * up.bias.to(dtype)
        bias = own if bias is None else bias + own
    flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)  # [tokens, inputs]
    adapter = _Adapter(down.weight.to(dtype), up.weight.to(dtype), scale, dropped)
    product = _adapted_product(flat, base, unpack, adapter, bias)
    return product.view(*hidden.shape[:-1], product.shape[-1])


def _product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _one_format(hidden: Tensor, dtype: torch.dtype, down: Tensor, weight: Tensor | None) -> bool:
    """Whether all products are of one number format, as under autocast; peft computes in two where they are not.

    A packed layer answers in its input's format.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        return weight is not None or hidden.dtype == dtype
    return down.dtype == dtype and (weight is None or weight.dtype == dtype)


class _Adapter(NamedTuple):
    down: Tensor  # A [rank, inputs]
    up: Tensor  # B [outputs, rank]
    scale: float
    dropped: float  # the share of inputs that dropout sets to zero


def _adapted_product(
    flat: Tensor, base: Any, unpack: AddGradient | None, adapter: _Adapter, bias: Tensor | None
) -> Tensor:
    """[tokens, inputs] to [tokens, outputs].

    Everything that backward needs is saved before the large product, and apart from it:

        saved:    x, A, B  ->  x A^T            (step 1, small)
        product:  x W^T + (x A^T) B^T           (step 2, large, saves nothing)
        joint:    one element, expanded to the result's shape, links step 2's gradient to step 1

    torch's non-reentrant checkpoint recomputes a layer until all saved tensors are there again, then stops. Nothing is
    saved in step 2, so a layer's last product, a quarter of Llama's forward, is not computed again.
    """
    weight = None if unpack is not None else base.weight
    with torch.no_grad():
        seen, mask = flat, None
        if adapter.dropped:  # where peft draws it: after the layers before, by the generator of the device
            seen, mask = torch.native_dropout(flat, adapter.dropped, train=True)
        inner = _scaled(seen, adapter.down.T, adapter.scale)  # [tokens, rank]
        del seen
    joint = _KeptForBackward.apply(  # type: ignore[no-untyped-call]  # torch annotates no Function
        flat, adapter.down, adapter.up, bias, inner, mask, weight, unpack, adapter.scale, 1 - adapter.dropped
    )
    known = [None if each is None else each.detach() for each in (flat, inner, adapter.up, bias, weight)]
    return cast(Tensor, _Product.apply(joint, *known, base))  # type: ignore[no-untyped-call]


class _KeptForBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        down: Tensor,
        up: Tensor,
        bias: Tensor | None,
        inner: Tensor,
        mask: Tensor | None,
        weight: Tensor | None,
        unpack: AddGradient | None,
        scale: float,
        kept: float,
    ) -> Tensor:
        ctx.save_for_backward(flat, down, up, inner, mask, weight)
        ctx.unpack, ctx.scale, ctx.kept = unpack, scale, kept
        return inner.new_empty(()).expand(len(flat), len(up))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        flat, down, up, inner, mask, weight = ctx.saved_tensors
        of_flat, of_down, of_up, of_bias, *rest = ctx.needs_input_grad
        through = _scaled(slope, up, ctx.scale) if of_flat or of_down else None  # [tokens, rank]
        grad_flat = grad_down = None
        if of_down:
            assert through is not None
            grad_down = _scaled(through.T, flat if mask is None else flat * mask, 1 / ctx.kept)
        if of_flat:
            assert through is not None
            grad_flat = _scaled(through, down, 1 / ctx.kept)  # [tokens, inputs]
            if mask is not None:
                grad_flat.mul_(mask)
            if ctx.unpack is None:
                grad_flat.addmm_(slope, weight.to(slope.dtype))
            else:
                grad_flat = ctx.unpack(grad_flat, slope)
        grad_up = slope.T @ inner if of_up else None
        grad_bias = slope.sum(0) if of_bias else None
        return grad_flat, grad_down, grad_up, grad_bias, *(None for _ in rest)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        joint: Tensor,
        flat: Tensor,
        inner: Tensor,
        up: Tensor,
        bias: Tensor | None,
        weight: Tensor | None,
        base: Any,
    ) -> Tensor:
        if weight is None:  # the packed layer's own kernel, which unpacks the weight for one product
            result = _plus_product(base(flat), inner, up.T)
            if bias is None:
                return result
            return _plus(result, bias)
        # The small product first: it is bound by memory, and the large one adds to it at no further pass.
        result = inner @ up.T if bias is None else torch.addmm(bias, inner, up.T)
        return _plus_product(result, flat, weight.to(flat.dtype).T)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return slope, None, None, None, None, None, None


# torch 2.11's compiler silently gives no gradient to a Function that changes its result in place in forward. A compiled
# layer needs no in-place operation: the compiler decides where results are written.


def _plus_product(result: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """result + left @ right, in place in `result` unless it is compiled."""
    if torch.compiler.is_compiling():
        return torch.addmm(result, left, right)
    return result.addmm_(left, right)


def _plus(result: Tensor, bias: Tensor) -> Tensor:
    """result + bias, in place in `result` unless it is compiled."""
    if torch.compiler.is_compiling():
        return result + bias
    return result.add_(bias)


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """scale * left @ right, scaled before it is rounded and without a pass of its own; with beta=0 nothing is added."""
    if scale == 1:
        return left @ right
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scale)
