"""CUDA's two decisions before a kernel runs: autocast's number formats, and the attention kernel.

Both are made here for the pretend device, because tensors depend on them. Autocast's lists are read from torch's own
header, which it ships for other makers' devices. Attention is chosen as `sdp_utils.cpp` chooses it on a GPU with
compute capability 8.0 or more: flash, then memory-efficient, then plain matrix products.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from finetune.architecture.varlen_kernel import FLASH_HEAD

HALF = (torch.bfloat16, torch.float16)
BIAS_MULTIPLE = 16  # elements; a mask's rows are padded to a multiple of these for the memory-efficient kernel

_keep: list[torch.library.Library] = []  # a registration lasts as long as its object


def register_dispatch(device: str) -> None:
    """Register both for the one device that a program may add to torch. Call it once in a process."""
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    # One kernel on CUDA; on another maker's device torch would compose it from seven others.
    aten.impl("silu_backward", lambda grad, _: torch.empty_like(grad), "PrivateUse1")
    _keep.extend((others, aten))
    casts = _Casts(device)
    for macro, wrap in (
        ("LOWER_PRECISION_FP", casts.lower),
        ("FP32", casts.float32),
        ("FP32_SET_OPT_DTYPE", casts.float32_result),
        ("PROMOTE", casts.widest),
    ):
        for name, overload in autocast_list(macro):
            packet = getattr(torch.ops.aten, name)
            if (overload or "default") in packet.overloads():
                full_name = f"{name}.{overload}" if overload else name
                aten.impl(full_name, wrap(getattr(packet, overload or "default")), "AutocastPrivateUse1")
    # Casts are kept while autocast is on. torch calls this function at the outermost block's end to drop its own.
    drop = torch.clear_autocast_cache

    def drop_all() -> None:
        casts.kept.clear()
        drop()

    torch.clear_autocast_cache = drop_all


def autocast_list(macro: str) -> list[tuple[str, str]]:
    """Operations and overloads in one of CUDA autocast's lists, from the installed torch's header."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    lines = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?[^\\])\n", header.read_text("utf-8"), re.DOTALL)
    assert lines is not None, macro
    return re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", lines.group(1))


class _Casts:
    """Kernels that cast their arguments and call the operation below autocast."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._key = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("AutocastPrivateUse1"))

    def lower(self, operation: Any) -> Callable[..., Any]:
        return self._casting(operation, lambda _: torch.get_autocast_dtype(self.device))

    def float32(self, operation: Any) -> Callable[..., Any]:
        return self._casting(operation, lambda _: torch.float32)

    def widest(self, operation: Any) -> Callable[..., Any]:
        return self._casting(operation, self._widest)

    def float32_result(self, operation: Any) -> Callable[..., Any]:
        """The operation casts inside its kernel, without a copy."""
        position = [argument.name for argument in operation._schema.arguments].index("dtype")

        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = args[position] if position < len(args) else kwargs.get("dtype")
            with self._below():
                if dtype is None and self._eligible(args[0]):
                    return operation(*args[:position], **kwargs | {"dtype": torch.float32})
                return operation(*args, **kwargs)

        return kernel

    def _casting(self, operation: Any, choose: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with self._below():
                dtype = choose(args)
                return operation(*(self._cast(value, dtype) for value in args), **kwargs)

        return kernel

    def _below(self) -> Any:
        # torch's own kernels begin with this guard; it has no public name in Python.
        return torch._C._ExcludeDispatchKeyGuard(self._key)

    def _eligible(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.device.type == self.device
            and value.is_floating_point()
            and value.dtype != torch.float64
        )

    def _widest(self, args: Any) -> torch.dtype:
        dtypes = {value.dtype for value in args if self._eligible(value)}
        if torch.float32 in dtypes:
            return torch.float32
        return torch.get_autocast_dtype(self.device)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return [self._cast(entry, dtype) for entry in value]
        if not self._eligible(value) or value.dtype == dtype:
            return value
        # As in cached_cast: weights alone, and only on the way down.
        is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        if not (is_weight and dtype != torch.float32 and torch.is_autocast_cache_enabled()):
            return value.to(dtype)
        if id(value) not in self.kept:
            self.kept[id(value)] = value, value.to(dtype)
        return self.kept[id(value)][1]


def _attention(
    query: torch.Tensor,  # [batch, heads, tokens, head_dim]
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` by the kernel that CUDA would choose."""
    aten: Any = torch.ops.aten
    head_size = query.shape[-1]
    if attn_mask is None and query.dtype in HALF and head_size <= FLASH_HEAD:
        scale = head_size**-0.5 if scale is None else scale
        padded = [query, key, value]
        if head_size % 8:
            padded = [F.pad(tensor, (0, -head_size % 8)) for tensor in padded]
        output = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
        return output[..., :head_size]  # type: ignore[no-any-return]
    if enable_gqa and key.shape[1] != query.shape[1]:
        options = {"scale": scale, "enable_gqa": True}
        return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )[0]
    bias = attn_mask
    if attn_mask is not None:  # in the query's format, rows padded, one view for all heads
        if attn_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill_(attn_mask.logical_not(), float("-inf"))  # [B, 1, T, T], freed at once
        columns = attn_mask.shape[-1]
        if columns % BIAS_MULTIPLE:
            attn_mask = F.pad(attn_mask, (0, -columns % BIAS_MULTIPLE))[..., :columns]
        bias = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, bias, keep, dropout_p, is_causal, scale=scale
    )[0]
