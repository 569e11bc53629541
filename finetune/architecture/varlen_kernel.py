"""torch's variable-length flash attention on a GPU, with attention sinks, which it does not know.

A sink s joins the scores of a softmax whose log-sum-exp is L. The output o then becomes o * exp(L - M) with M =
log(exp(L) + exp(s)), so the kernel's result is corrected afterwards. The kernel's backward would ignore that the
correction depends on the scores. But it computes each probability as exp(score - log-sum-exp), and uses the output only
in a product with the gradient. So with the corrected output and M it returns the right gradients for attention with
sinks. The sink's gradient is minus its share of the softmax times that product.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from finetune.errors import EnvironmentMismatch

FLASH_HEAD = 256  # the widest head that flash attention takes, forward and backward; the planner reads it too
HEAD_MULTIPLE = 8  # elements: rows of 16 bytes, which memory-efficient attention needs too
# On GPUs with little shared memory (sm86, sm89, sm120) the backward for heads of 193 to 224 does not fit; the next
# kernel, for heads up to 256, does (check_requires_grad_and_head_dim_gt192 of torch's sdp_utils.cpp).
UNFIT_ABOVE, FIT_AGAIN = 192, 224
# Device type -> whether the kernel takes fewer key heads than query heads, although torch's function has no parameter
# for it (2.11). flash_kernels.py tries it on a GPU. Until then each query head gets its own copy of the keys. The
# planner's device runs no kernel; it counts the memory that a GPU is expected to use.
SHARED_KEYS: dict[str, bool] = {"cuda": False}


def fits_flash(head_dim: int, value_dim: int) -> bool:
    """Whether flash attention takes heads of this width. In Gemma 4's global layers it is 512."""
    return max(head_dim, value_dim) <= FLASH_HEAD


def largest_setting(config: Any, *names: str) -> int | None:
    """The largest of a configuration's settings with these names, over all layers; None if it has none.

    Gemma 4's `head_dim` is 256 or 512, by layer. transformers 5.24 raises an error for the attribute.
    """
    settings = config.to_dict()
    layers = [settings, *(settings.get("per_layer_config") or {}).values()]
    return max((value for layer in layers for name in names if isinstance(value := layer.get(name), int)), default=None)


def kernel_width(head_dim: int) -> int:
    """The kernel's head width for heads of this width: 12 becomes 16, and 200 becomes 232."""
    width = -(-head_dim // HEAD_MULTIPLE) * HEAD_MULTIPLE
    if UNFIT_ABOVE < width <= FIT_AGAIN:
        return FIT_AGAIN + HEAD_MULTIPLE
    return width


def widened(heads: Tensor, width: int) -> Tensor:
    """Heads padded with zeros at the end, [..., width]."""
    if heads.shape[-1] != width:
        return F.pad(heads, (0, width - heads.shape[-1]))
    return heads


def attend_on_cuda(
    query: Tensor,  # [1, heads, tokens, head_dim]
    key: Tensor,  # [1, kv_heads, tokens, head_dim]
    value: Tensor,
    starts: Tensor,  # int32 [documents + 1]
    longest: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,  # [heads]
) -> Tensor:
    """Causal attention in each document; [1, tokens, heads, head_dim]. Queries, keys and values of 16 bits."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, head_dim]
    parameters = _varlen_parameters()
    if not shares_by_parameter() and k.shape[1] != q.shape[1] and not SHARED_KEYS.get(q.device.type, True):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    value_width = v.shape[-1]
    # The kernel needs one width, and latent attention has two. Zeros do not change scores; the scale is an argument.
    width = kernel_width(max(q.shape[-1], value_width))
    q, k, v = (widened(x, width) for x in (q, k, v))
    # (window - 1, 0): window - 1 tokens to the left of each, none to the right; (-1, 0) is plain causal.
    # A compiled layer compares nothing with a number that differs from row to row: each outcome would be a graph.
    tokens_before = -1
    if window is not None and (torch.compiler.is_compiling() or window < longest):
        tokens_before = window - 1
    options: dict[str, Any] = {"scale": scale}
    if "window_size" in parameters:
        options["window_size"] = (tokens_before, 0)
    else:
        assert tokens_before == -1, "this torch has no sliding window; refused when the model is built"
        options["is_causal"] = True
    if "enable_gqa" in parameters:
        options["enable_gqa"] = k.shape[1] != q.shape[1]
    if sinks is None:
        result = _varlen()(q, k, v, starts, starts, longest, longest, **options)
    else:
        result = _WithSinks.apply(q, k, v, sinks, starts, longest, options)  # type: ignore[no-untyped-call]
    output = cast(Tensor, result)
    return output[..., :value_width].unsqueeze(0)


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,  # [tokens, heads, head_dim]
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        starts: Tensor,
        longest: int,
        options: dict[str, Any],
    ) -> Tensor:
        from torch.nn.attention.varlen import AuxRequest

        plain, lse = _varlen()(
            query, key, value, starts, starts, longest, longest, return_aux=AuxRequest(lse=True), **options
        )
        if lse.shape != (query.shape[1], query.shape[0]):  # torch 2.13's, float32 [heads, tokens]; its text says else
            raise EnvironmentMismatch(
                f"model.attention: this torch returns a log-sum-exp of shape {tuple(lse.shape)}, from which attention "
                "sinks cannot be computed; set model.attention: eager and data.packing: false"
            )
        with_sink = torch.logaddexp(lse, sinks.float().unsqueeze(1))
        output: Tensor = (plain * torch.exp(lse - with_sink).T.unsqueeze(-1)).to(plain.dtype)
        ctx.save_for_backward(query, key, value, sinks, starts, output, with_sink)
        ctx.longest, ctx.options = longest, options
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, starts, output, with_sink = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        product = (gradient.float() * output.float()).sum(-1)  # [tokens, heads]
        share = torch.exp(sinks.float().unsqueeze(1) - with_sink).T
        grad_sinks = -(share * product).sum(0).to(sinks.dtype)
        given = {
            **{"grad_out": gradient, "query": query, "key": key, "value": value, "out": output, "lse": with_sink},
            **{"cu_seq_q": starts, "cu_seq_k": starts, "max_q": ctx.longest, "max_k": ctx.longest},
            # No dropout, so no random state; made as the kernel's own forward makes it.
            "rng_state": torch.zeros(2, dtype=torch.uint64, device=query.device),
            "is_causal": ctx.options.get("is_causal", ctx.options.get("window_size") == (-1, 0)),
            "scale": ctx.options["scale"],
            "window_size": list(ctx.options.get("window_size", (-1, 0))),
        }
        # The operator that the public function's own backward calls. torch has no public name for it, and its arguments
        # differ between releases; tests/architecture/test_varlen_kernel.py turns red where one is unknown here.
        _varlen()  # which registers it
        operator: Any = torch.ops.torch_attn._varlen_attn_backward.default
        grads = operator(*(given[argument.name] for argument in operator._schema.arguments))
        return (*grads, grad_sinks, None, None, None)


def _varlen() -> Any:
    from torch.nn.attention.varlen import varlen_attn  # takes a moment to import, and torch 2.10 lacks it

    return varlen_attn


def shares_by_parameter() -> bool:
    """Whether torch's function has a parameter that lets query heads share keys."""
    return "enable_gqa" in _varlen_parameters()


@cache
def _varlen_parameters() -> frozenset[str]:
    """The signature differs between torch releases (2.11 to 2.13), so it is asked for rather than assumed."""
    return frozenset(inspect.signature(_varlen()).parameters)
