"""A linear layer and its adapter as one step of autograd: y = x W^T + b + s drop(x) A^T B^T.

peft 0.21 computes five steps. It casts x to the adapter's float32, which autocast casts back, and keeps a copy of x for
each of q, k and v. It multiplies the adapter's result by s, adds it to the base's, and adds two gradients of x. At
4,096 tokens those passes over memory take a third of a decoder layer's time beside its matrix products.

Here x is kept as it came, and layers with the same input share it. Each product adds to the one before (`addmm`). W is
frozen, so it has no gradient. The numbers are the same up to rounding, with fewer roundings.

Layers that share their input also share products of the small factors: q, k and v, and a gated MLP's gate and up. With
ranks r, their R = 3r columns are one product each of x A^T, of A's gradient, and of the input's gradient through A:

    x A^T          [tokens, inputs] by [A_q; A_k; A_v]^T        ->  [tokens, R]
    through        [g_q B_q, g_k B_k, g_v B_v]                   ->  [tokens, R]
    gradient of A  through^T x                                   ->  [R, inputs]
    gradient of x  through [A_q; A_k; A_v] + g_q W_q + g_k W_k + g_v W_v

A decoder layer of Llama has 47 products instead of 56. A compiled layer has 41: the compiler writes g_q, g_k and g_v
side by side, so `through` and B's gradients are one product each, by a matrix with B_q, B_k and B_v on its diagonal.

Only instances change, so saving, merging and peft see the classes they know. peft still computes everything that
`computed_by` names, and any call with several adapters, a merged or a disabled one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import unwrap
from itertools import accumulate
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Unpack = Callable[[Any, torch.dtype], Tensor]  # the weight [outputs, inputs] of a packed layer, in that format
# Adds a packed layer's gradient of the input [tokens, inputs] to the first tensor, from that of its output.
AddGradient = Callable[[Tensor, Tensor], Tensor]

OWN = "own"  # what computes a layer: this module, or peft for a reason
PACKED = "own, over 4 bits"  # model/packed_experts.py
# Layers of one module that get the same input, by transformers' names. A layer that gets another one computes alone.
SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def compute_adapters(model: nn.Module, unpack: Unpack, *, by_peft: str | None = None) -> None:
    """Let this module compute every layer in `model` whose adapter allows it.

    Args:
        unpack: For layers with 4-bit weights.
        by_peft: The reason why all stay peft's; None: there is none.
    """
    for layer in _adapted(model):
        layer.finetune_computed_by = by_peft or _only_peft(layer) or OWN
        if layer.finetune_computed_by == OWN:
            (name,), base, add_gradient = layer.lora_A, layer.base_layer, None
            if hasattr(base, "weight_scale"):
                from finetune.architecture.own_layers.float8_linear import add_input_gradient

                add_gradient = partial(add_input_gradient, base)
            elif hasattr(base, "quant_state"):
                add_gradient = partial(_add_unpacked, unpack, base)
            layer.finetune_adapter = name, add_gradient
            layer.forward = MethodType(_forward, layer)


def share_inputs(model: nn.Module) -> None:
    """Let layers with one input share products, in every module that has several of SHARING.

    After `compute_norms_and_gates`: the forward of a gated MLP asks `sharing_module` itself.
    """
    for module in model.modules():
        known: Any = module
        children = dict(module.named_children())
        for names in SHARING:
            sharing = tuple(name for name in names if _shares(children.get(name)))
            if len(sharing) < 2:
                continue
            if not hasattr(known, "finetune_gate"):
                forward = unwrap(type(known).forward)
                # `super()` takes no stand-in. Another forward of this instance is not ours to replace.
                if "forward" in vars(known) or "__class__" in forward.__code__.co_freevars:
                    continue
                known.forward = MethodType(_sharing_forward, known)
            known.finetune_sharing, known.finetune_products = sharing, MethodType(_shared_products, known)


def sharing_modules(model: nn.Module) -> list[Any]:
    """The modules whose layers share products."""
    shared: list[Any] = [module for module in model.modules() if "finetune_sharing" in vars(module)]
    return [module for module in shared if all(map(_shares, sharing_layers(module)))]


def sharing_layers(module: Any) -> list[Any]:
    """The layers in this module that share products."""
    return [getattr(module, name) for name in module.finetune_sharing]


def _shares(layer: Any) -> bool:
    """Whether a layer may share products: with dropout each layer sees other inputs."""
    if getattr(layer, "finetune_adapter", None) is None:
        return False
    dropout = layer.lora_dropout[layer.finetune_adapter[0]]
    return not (isinstance(dropout, nn.Dropout) and dropout.p)


def own_adapters(model: nn.Module) -> list[Any]:
    """The layers with adapters that are computed here."""
    return [layer for layer in _adapted(model) if getattr(layer, "finetune_computed_by", None) == OWN]


def leave_to_peft(model: nn.Module, reason: str) -> None:
    """From now on peft computes all adapters."""
    for layer in own_adapters(model):
        layer.finetune_computed_by, layer.finetune_adapter = reason, None


def computed_by(model: nn.Module, *, cast: bool) -> list[str]:
    """For each layer with an adapter: OWN, or why peft computes it.

    Args:
        cast: Whether all weights are cast to one number format, by autocast or where they are gathered.
    """
    computed = []
    for layer in _adapted(model):
        reason = getattr(layer, "finetune_computed_by", None)
        if reason == OWN and not cast:  # packed weights count as the format they were packed from
            base, (down,) = layer.base_layer, layer.lora_A.values()
            packing = getattr(base, "packing", None) or vars(getattr(base.weight, "quant_state", base.weight))
            if down.weight.dtype != packing.get("dtype", base.weight.dtype):
                reason = "two number formats"
        computed += [reason] if reason else []
    return computed


def _adapted(model: nn.Module) -> list[Any]:
    """peft's LoRA layers, experts and embeddings too."""
    return [module for module in model.modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer")]


def _add_unpacked(unpack: Unpack, base: Any, result: Tensor, grad_output: Tensor) -> Tensor:
    return result.addmm_(grad_output, unpack(base, grad_output.dtype))


def _only_peft(layer: Any) -> str | None:
    """Why peft alone computes this layer; None: it need not."""
    base = layer.base_layer
    if hasattr(layer, "parameter_name"):
        return PACKED if getattr(layer, "finetune_packed", False) else "experts"
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
    if hasattr(base, "quant_state") or hasattr(base, "weight_scale"):  # 4 bits, float8
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
    adapter = None if args or kwargs else _adapter_now(layer, hidden)
    if adapter is None:
        by_peft: Tensor = type(layer).forward(layer, hidden, *args, **kwargs)
        return by_peft
    (product,) = _adapted_products(hidden, [adapter])
    return product


def _shared_products(module: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    """The results of `sharing_layers`, each [..., outputs], of one input [..., inputs]."""
    layers = sharing_layers(module)
    adapters = [_adapter_now(layer, hidden) for layer in layers]
    known = [adapter for adapter in adapters if adapter is not None and not adapter.dropped]
    if len(known) == len(layers) and len({adapter.scale for adapter in known}) == 1:
        return _adapted_products(hidden, known)
    return tuple(layer(hidden) for layer in layers)


def sharing_module(module: Any) -> Any:
    """A stand-in for `module` in one call of its forward: layers with the same input share products."""
    if hasattr(module, "finetune_sharing"):
        return _Sharing(module)
    return module


def _sharing_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(sharing_module(module), *args, **kwargs)


class _Sharing:
    """Stands for a module as `self` in one call of its forward. All is the module's, except layers that share products:
    the first one that is called computes all of them, and the others return theirs if they get the same tensor.

    It is made anew in each call, so a compiled or recomputed layer changes nothing outside of itself.
    """

    def __init__(self, module: Any) -> None:
        self.finetune_module = module
        self.finetune_input: Tensor | None = None
        self.finetune_results: dict[str, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        if name in self.finetune_module.finetune_sharing:
            return partial(_product_of, self, name)
        return getattr(self.finetune_module, name)


def _product_of(sharing: Any, name: str, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The result of the layer called `name`. No result stays after it was asked for."""
    module, results = sharing.finetune_module, sharing.finetune_results
    if sharing.finetune_input is None and not args and not kwargs:
        sharing.finetune_input = hidden
        for layer, product in zip(module.finetune_sharing, module.finetune_products(hidden), strict=True):
            results[layer] = product
    if sharing.finetune_input is hidden and name in results and not args and not kwargs:
        shared: Tensor = results.pop(name)
        return shared
    alone: Tensor = getattr(module, name)(hidden, *args, **kwargs)
    return alone


class _Adapter(NamedTuple):
    """A layer's adapter, as it computes in one call."""

    base: Any
    add_gradient: AddGradient | None  # for packed weights
    down: Tensor  # A [rank, inputs], as it is trained
    up: Tensor  # B [outputs, rank]
    bias: Tensor | None  # the sum of both, in the products' number format
    scale: float
    dropped: float  # the share of inputs that dropout sets to zero


def _adapter_now(layer: Any, hidden: Tensor) -> _Adapter | None:
    """The layer's adapter for this input; None: peft computes it."""
    if getattr(layer, "finetune_adapter", None) is None:
        return None
    name, add_gradient = layer.finetune_adapter
    dtype = product_dtype(hidden)
    base, down, up = layer.base_layer, layer.lora_A[name], layer.lora_B[name]
    if layer.merged or layer.disable_adapters or layer.active_adapters != [name]:
        return None
    # Products in two formats are peft's. A packed layer answers in its input's format.
    one_format = down.weight.dtype == dtype and (add_gradient is not None or base.weight.dtype == dtype)
    if torch.is_autocast_enabled(hidden.device.type):
        one_format = add_gradient is None or hidden.dtype == dtype
    if not one_format:
        return None
    dropout, scale = layer.lora_dropout[name], layer.scaling[name]
    dropped = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    bias = None if base.bias is None or add_gradient is not None else base.bias.to(dtype)  # a packed layer adds its own
    if up.bias is not None:
        own = scale * up.bias.to(dtype)
        bias = own if bias is None else bias + own
    return _Adapter(base, add_gradient, down.weight, up.weight, bias, scale, dropped)


def product_dtype(hidden: Tensor) -> torch.dtype:
    """The number format of a product with these inputs: autocast's, or their own."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _adapted_products(hidden: Tensor, adapters: Sequence[_Adapter]) -> tuple[Tensor, ...]:
    """[..., inputs] to [..., outputs] of each adapter. Several have one scale and no dropout.

    Everything that backward needs is saved before the large products, and apart from them:

        saved:     x, A, B  ->  x A^T            (step 1, small)
        products:  x W^T + (x A^T) B^T           (step 2, large, saves nothing)
        joints:    one element, expanded to each result's shape, links step 2's gradient to step 1

    torch's non-reentrant checkpoint recomputes a layer until all saved tensors are there again, then stops. Nothing is
    saved in step 2, so a layer's last product, a quarter of Llama's forward, is not computed again.
    """
    dtype = product_dtype(hidden)
    flat = hidden.reshape(-1, hidden.shape[-1]).to(dtype)  # [tokens, inputs]
    scale, dropped = adapters[0].scale, adapters[0].dropped
    downs, ups = [adapter.down for adapter in adapters], [adapter.up for adapter in adapters]
    biases = [adapter.bias for adapter in adapters]
    weights = [adapter.base.weight if adapter.add_gradient is None else None for adapter in adapters]
    with torch.no_grad():
        seen, mask = flat, None
        if dropped:  # where peft draws it: after the layers before, by the generator of the device
            seen, mask = torch.native_dropout(flat, dropped, train=True)
        down = downs[0].to(dtype) if len(downs) == 1 else torch.cat([matrix.to(dtype) for matrix in downs])
        cast_ups = [matrix.to(dtype) for matrix in ups]
        inner = _scaled(seen, down.T, scale)  # [tokens, ranks]
        del seen
    ranks, outputs = [matrix.shape[0] for matrix in downs], [matrix.shape[0] for matrix in ups]
    settings = _Settings(ranks, outputs, [adapter.add_gradient for adapter in adapters], scale, 1 - dropped)
    casts = [None if cast is own else cast for cast, own in zip((down, *cast_ups), (downs[0], *ups), strict=True)]
    joints = _KeptForBackward.apply(  # type: ignore[no-untyped-call]  # torch annotates no Function
        settings, flat, inner, mask, *downs, *ups, *biases, *casts, *weights
    )
    products, parts, unlinked = [], _split(inner, ranks, 1), flat.detach()
    for adapter, joint, part, up, weight in zip(adapters, joints, parts, cast_ups, weights, strict=True):
        bias = None if adapter.bias is None else adapter.bias.detach()
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            joint, unlinked, part, up.detach(), bias, weight, adapter.base
        )
        products.append(product.view(*hidden.shape[:-1], product.shape[-1]))
    return tuple(products)


class _Settings(NamedTuple):
    """What `_KeptForBackward` needs besides tensors."""

    ranks: list[int]
    outputs: list[int]
    add_gradients: list[AddGradient | None]
    scale: float
    kept: float  # the share of inputs that dropout keeps


class _KeptForBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        settings: _Settings,
        flat: Tensor,
        inner: Tensor,  # x A^T, scaled
        mask: Tensor | None,
        *of_adapters: Any,  # each A, B and bias; all A and each B in the products' format (None: as they are); each W
    ) -> tuple[Tensor, ...]:
        count = len(settings.ranks)
        downs, ups, casts = of_adapters[:count], of_adapters[count : 2 * count], of_adapters[3 * count : 4 * count + 1]
        factors = [own if cast is None else cast for own, cast in zip((downs[0], *ups), casts, strict=True)]
        ctx.settings, ctx.formats = settings, [matrix.dtype for matrix in (*downs, *ups)]
        ctx.save_for_backward(flat, inner, mask, *factors, *of_adapters[4 * count + 1 :])
        tokens = flat.shape[0]
        return tuple([inner.new_empty(()).expand(tokens, outputs) for outputs in settings.outputs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        ranks, outputs, add_gradients, scale, kept = ctx.settings
        count = len(ranks)
        flat, inner, mask, down, *rest = ctx.saved_tensors
        ups, weights = rest[:count], rest[count:]
        of_flat, of_adapters = ctx.needs_input_grad[1], ctx.needs_input_grad[4:]
        of_downs, of_ups, of_biases = (of_adapters[at * count : (at + 1) * count] for at in range(3))
        grad_flat = None
        grad_downs: Sequence[Tensor | None] = [None] * count
        grad_ups: Sequence[Tensor | None] = [None] * count
        grad_biases = [grad.sum(0) if trained else None for grad, trained in zip(grad_outputs, of_biases, strict=True)]
        beside = None
        if count > 1 and torch.compiler.is_compiling():
            beside = torch.cat(grad_outputs, 1)  # [tokens, all outputs]
            grad_outputs = tuple(_split(beside, outputs, 1))
        if of_flat or any(of_downs):
            if beside is not None:
                through = _scaled(beside, _diagonal(ups), scale, ups[0])  # [tokens, ranks]
            else:
                parts = [_scaled(grad_output, up, scale) for grad_output, up in zip(grad_outputs, ups, strict=True)]
                through = parts[0] if count == 1 else torch.cat(parts, 1)
                del parts
            if any(of_downs):
                seen = flat if mask is None else flat * mask
                grad_downs = _split(_scaled(through.T, seen, 1 / kept).to(ctx.formats[0]), ranks)
                del seen
            if of_flat:
                grad_flat = _scaled(through, down, 1 / kept)  # [tokens, inputs]
                if mask is not None:
                    grad_flat.mul_(mask)
                del through
                for grad_output, weight, add_gradient in zip(grad_outputs, weights, add_gradients, strict=True):
                    if add_gradient is None:
                        grad_flat.addmm_(grad_output, weight.to(grad_output.dtype))
                    else:
                        grad_flat = add_gradient(grad_flat, grad_output)
        if any(of_ups):
            if beside is not None:
                blocks = _split(beside.T @ inner, outputs)  # of [all outputs, ranks]
                sums = [_split(block, ranks, 1)[at] for at, block in enumerate(blocks)]
            else:
                sums = [grad.T @ part for grad, part in zip(grad_outputs, _split(inner, ranks, 1), strict=True)]
            grad_ups = [total.to(dtype) for total, dtype in zip(sums, ctx.formats[count:], strict=True)]
        pairs = zip((*grad_downs, *grad_ups, *grad_biases), (*of_downs, *of_ups, *of_biases), strict=True)
        gradients = [gradient if trained else None for gradient, trained in pairs]
        return None, grad_flat, None, None, *gradients, *(None,) * (2 * count + 1)


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
            return result + bias if torch.compiler.is_compiling() else result.add_(bias)
        # The small product first: it is bound by memory, and the large one adds to it at no further pass.
        result = inner @ up.T if bias is None else torch.addmm(bias, inner, up.T)
        return _plus_product(result, flat, weight.to(flat.dtype).T)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output, None, None, None, None, None, None


# torch 2.11's compiler silently gives no gradient to a Function that changes its result in place in forward. A compiled
# layer needs no in-place operation: the compiler decides where results are written.


def _plus_product(result: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """result + left @ right, in place in `result` unless it is compiled."""
    if torch.compiler.is_compiling():
        return torch.addmm(result, left, right)
    return result.addmm_(left, right)


def _split(matrix: Tensor, sizes: Sequence[int], dim: int = 0) -> Sequence[Tensor]:
    """Its stretches of rows or columns: views. A single one is the matrix, which spares the host a call."""
    if len(sizes) == 1:
        return (matrix,)
    return torch.split(matrix, list(sizes), dim)


def _diagonal(matrices: Sequence[Tensor]) -> Tensor:
    """Each [outputs, rank] as a block on the diagonal of [all outputs, ranks].

    The compiler makes one kernel for each matrix; of `torch.block_diag` it makes five for two and eleven for three.
    """
    ranks = [matrix.shape[1] for matrix in matrices]
    ends = list(accumulate(ranks))
    places = zip(matrices, ranks, ends, strict=True)
    return torch.cat([F.pad(matrix, (end - rank, ends[-1] - end)) for matrix, rank, end in places])


def _scaled(left: Tensor, right: Tensor, scale: float, unread: Tensor | None = None) -> Tensor:
    """scale * left @ right, scaled before it is rounded and without a pass of its own; with beta=0 nothing is added.

    The compiler makes a kernel of its own for an empty tensor, and for an element of a result that it has fused. So
    what is not added is an element of a matrix that is in memory: of `right`, or of `unread`.
    """
    if scale == 1:
        return left @ right
    return torch.addmm((right if unread is None else unread)[:1, :1], left, right, beta=0, alpha=scale)
