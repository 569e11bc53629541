"""Document-isolated attention, registered with transformers under the name "varlen".

A micro-batch is one row of tokens, its documents end to end. No mask function is registered under this name, so
transformers builds no mask (and makes no host read to look for one), and the forward's `cu_seq_lens` and `max_length`
reach this function, under activation checkpointing too. On CUDA it is torch's own variable-length flash attention,
which takes 16-bit numbers only and begins with Ampere; in float32 and on older GPUs, one scaled-dot-product call a
document; on a CPU that too, always in float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from finetune.errors import FinetuneError

NAME = "varlen"
AMPERE = (8, 0)  # compute capability: the first with bfloat16 and flash attention


def register() -> None:
    """Make `attn_implementation="varlen"` known to transformers; harmless when repeated."""
    AttentionInterface.register(NAME, varlen_attention)


def varlen_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, head_dim]
    key: Tensor,  # [1, kv_heads, tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens: Tensor | None = None,  # int32 [documents + 1], where each document begins, and the end
    document_lengths: tuple[int, ...] = (),
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document of a flat row. Returns [1, tokens, heads, head_dim] and no weights.

    `document_lengths` are the same lengths on the host, so that nothing is read back from the device.
    Padding-free equivalent of one forward per document (`tests/architecture/test_attention.py`).

    Raises FinetuneError where the layer asks for more than this function computes.
    """
    assert query.shape[0] == 1, "varlen attention takes one flat row of documents"
    assert not dropout, "attention dropout is refused when the model is built"
    refuse_unknown(module, attention_mask, cu_seq_lens, others)
    assert cu_seq_lens is not None
    if query.device.type == "cpu":
        output = _on_cpu(query, key, value, document_lengths, scaling, sliding_window)
    elif _computed_in(query) == torch.float32 or not has_flash(query.device):
        output = _by_document(query, key, value, document_lengths, scaling, sliding_window)
    else:
        output = _on_cuda(query, key, value, cu_seq_lens, max(document_lengths), scaling, sliding_window)
    return output, None


def refuse_unknown(
    module: nn.Module, attention_mask: Tensor | None, cu_seq_lens: Tensor | None, others: Mapping[str, Any]
) -> None:
    """Raise FinetuneError, in one line, where a layer hands over what `varlen_attention` would leave out.

    An argument that is None asks for nothing, so what a later release of transformers adds is refused from the first
    model on that uses it. position_ids have a value, and queries and keys are already rotated by them; use_cache and
    output_attentions are False in training; is_causal is what this attention is, unless it is False.
    """
    if cu_seq_lens is None:
        problem = "does not hand on where documents end (cu_seq_lens)"
    elif attention_mask is not None:
        problem = "brings a mask of its own"
    elif not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        problem = "is not causal"
    else:
        settled = ("position_ids", "is_causal")
        unknown = sorted(
            key for key, value in others.items() if key not in settled and not (value is None or value is False)
        )
        if not unknown:
            return
        problem = f"asks for {', '.join(unknown)}"
    raise FinetuneError(
        f"model.attention: {type(module).__name__} {problem}, which document-isolated attention does not compute; "
        "set model.attention: eager and data.packing: false"
    )


def _on_cpu(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float | None, window: int | None
) -> Tensor:
    """In float32 at least. 16-bit products go to oneDNN, which keeps 4 MB of kernels for each new document length and
    which documents of a hundred tokens keep busy with calls: 16 ms forward and backward, 8 in float32 (docs/log.md)."""
    result = _computed_in(query)  # read before autocast is off
    wide_query, wide_key, wide_value = (x.float() if x.itemsize < 4 else x for x in (query, key, value))
    with torch.autocast("cpu", enabled=False):
        return _by_document(wide_query, wide_key, wide_value, lengths, scaling, window).to(result)


def _by_document(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float | None, window: int | None
) -> Tensor:
    grouped = key.shape[1] != query.shape[1]
    if grouped and query.device.type != "cpu":
        # On some torch releases groups lead to plain matrix products, [heads, tokens, tokens] for each document.
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        grouped = False
    outputs = []
    for q, k, v in zip(*(torch.split(x, list(lengths), dim=2) for x in (query, key, value)), strict=True):
        tokens = q.shape[2]
        mask = None
        if window is not None and window < tokens:
            mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
            ).transpose(1, 2)
        )
    return torch.cat(outputs, dim=1)  # contiguous, as the library's own are: some models take a view of it


def _on_cuda(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (_as_autocast_would(x[0].transpose(0, 1)) for x in (query, key, value))  # [tokens, heads, head_dim]
    parameters = _varlen_parameters()
    if "enable_gqa" not in parameters and k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    width = v.shape[-1]
    if width != q.shape[-1]:  # latent attention; the kernel wants one width, and zeros add nothing
        v = F.pad(v, (0, q.shape[-1] - width))
    # (window - 1, 0): window - 1 tokens to the left of each, none to the right; (-1, 0) is plain causal.
    tokens_before = -1 if window is None or window >= longest else window - 1
    options: dict[str, Any] = {"scale": scaling}
    if "window_size" in parameters:
        options["window_size"] = (tokens_before, 0)
    else:
        assert tokens_before == -1, "this torch has no sliding window; refused when the model is built"
        options["is_causal"] = True
    if "enable_gqa" in parameters:
        options["enable_gqa"] = k.shape[1] != q.shape[1]
    output = varlen_attn(q, k, v, starts, starts, longest, longest, **options)
    assert isinstance(output, Tensor)
    return output[..., :width].unsqueeze(0)


def _as_autocast_would(tensor: Tensor) -> Tensor:
    """In autocast's number format, which it gives to torch's own attention and not to this one. Between float32
    weights RoPE makes queries and keys float32, and the kernel takes none."""
    return tensor.to(_computed_in(tensor))


def _computed_in(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


@cache
def has_flash(device: torch.device) -> bool:
    """Not on a T4 or V100, whose memory-efficient kernel takes a document at a time just as well."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= AMPERE


@cache
def _varlen_parameters() -> frozenset[str]:
    """The signature differs between torch releases (2.11 to 2.13), so it is asked for rather than assumed."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)
