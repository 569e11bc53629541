"""Document-isolated attention, registered with transformers under the name "varlen".

A micro-batch is one row of tokens, its documents end to end. No mask function is registered under this name, so
transformers builds no mask (and makes no host read to look for one), and the forward's `cu_seq_lens` and `max_length`
reach this function, under activation checkpointing too. On CUDA it calls torch's variable-length flash attention, or
the kernel that replaces it (flash_kernels.py). Flash attention needs 16-bit numbers, heads of at most 256, and an
Ampere GPU or a newer one. In float32, for wider heads, on older GPUs and with dropout, it makes one
scaled-dot-product call a document. A CPU does this too, always in float32. Neither kernel caps scores (Gemma 2), so
capped scores are computed a block of queries at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from finetune.architecture.compiled.document_operator import document_operator
from finetune.architecture.varlen_kernel import HEAD_MULTIPLE, attend_on_cuda, fits_flash, widened
from finetune.errors import FinetuneError

NAME = "varlen"
LIBRARYS = ("sdpa", "eager")  # the library's own, which run on every device
# What says where documents end. A module that gets it gets each document's own, where it runs on one after another.
ENDS, LENGTHS = "cu_seq_lens", "document_lengths"
# What compiled layers are given in place of the lengths, each of which would make a graph of its own.
LONGEST, ENDS_ON_HOST = "longest_document", "document_ends"
AMPERE = (8, 0)  # compute capability: the first with bfloat16 and flash attention
# Float32 scores of one block of queries, [heads, queries, keys]; their gradient and the probabilities are as large.
BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Attended:
    """A layer's request to attention, beside queries, keys and values."""

    lengths: tuple[int, ...]  # of the documents, or of what is attended to inside of them
    scale: float
    window: int | None  # tokens that each one sees, itself included
    sinks: Tensor | None  # [heads], a score that takes its share of each softmax and gives no value
    cap: float | None  # scores become cap * tanh(score / cap)
    dropout: float
    ends: Tensor | None = None  # of the documents, in host memory, where they take the place of their lengths


class _Kernel:
    """Whether this process uses a GPU's kernel, and who observes it."""

    left_off = False
    observer: Callable[[Mapping[str, Any], Callable[..., Tensor]], None] | None = None


def register() -> None:
    """Make `attn_implementation="varlen"` known to transformers; harmless when repeated."""
    AttentionInterface.register(NAME, varlen_attention)


@contextmanager
def kernel_left_off() -> Iterator[None]:
    """Inside this context attention runs document by document instead of in a GPU's kernel."""
    before, _Kernel.left_off = _Kernel.left_off, True
    try:
        yield
    finally:
        _Kernel.left_off = before


@contextmanager
def observed(observer: Callable[[Mapping[str, Any], Callable[..., Tensor]], None]) -> Iterator[None]:
    """Inside this context `observer` is called before each attention in a GPU's kernel, except in compiled layers.

    It gets the arguments of `attend_on_cuda`, and a function that computes the same attention document by document from
    queries, keys, values and sinks.
    """
    before, _Kernel.observer = _Kernel.observer, observer
    try:
        yield
    finally:
        _Kernel.observer = before


def use_librarys(model: PreTrainedModel) -> None:
    """Give the model the fastest of transformers' own attentions that any machine has: those with sinks or soft caps
    have eager alone."""
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        model.set_attn_implementation("eager")


def varlen_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, tokens, head_dim]
    key: Tensor,  # [1, kv_heads, tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens: Tensor | None = None,  # int32 [documents + 1], where each document begins, and the end
    document_lengths: tuple[int, ...] = (),
    longest_document: int = 0,
    document_ends: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document of a flat row. Returns [1, tokens, heads, head_dim] and no weights.

    `document_lengths` are the same lengths on the host, so that nothing is read back from the device; a compiled layer
    gets `longest_document`, a number that none exceeds, and `document_ends`, the ends on the host. `s_aux` are
    attention sinks, one score for each head. Padding-free equivalent of one forward per document
    (`tests/architecture/test_attention.py`).

    Raises FinetuneError where the layer asks for more than this function computes.
    """
    assert query.shape[0] == 1, "varlen attention takes one flat row of documents"
    refuse_unknown(module, attention_mask, cu_seq_lens, others, sinks=s_aux is not None, cap=softcap, dropout=dropout)
    assert cu_seq_lens is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    chunk = chunk_of(module)
    lengths = document_lengths
    if chunk is not None:  # (5, 20) in chunks with 8 tokens is (5, 8, 8, 4)
        lengths = tuple(min(chunk, length - start) for length in lengths for start in range(0, length, chunk))
    request = Attended(lengths, scale, sliding_window, s_aux, softcap, dropout, document_ends)
    not_by_flash = softcap or dropout or not fits_flash(query.shape[-1], value.shape[-1])
    if query.device.type == "cpu":
        output = _on_cpu(query, key, value, request)
    elif not_by_flash or _computed_in(query) == torch.float32 or not has_flash(query.device) or _Kernel.left_off:
        output = _by_document(query, key, value, request)
    else:
        starts = cu_seq_lens
        if lengths != document_lengths:
            starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            starts = starts.to(query.device, non_blocking=True)
        # What autocast would make of them: it knows torch's own attention, and not this one. Between float32 weights
        # RoPE makes queries and keys float32, and the kernel takes none.
        q, k, v = (x.to(_computed_in(x)) for x in (query, key, value))
        given: dict[str, Any] = {"query": q, "key": k, "value": v, "starts": starts, "sinks": s_aux}
        given |= {"longest": longest_document or max(lengths), "scale": scale, "window": sliding_window}
        if not torch.compiler.is_compiling() and _Kernel.observer is not None:

            def by_document(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
                return _by_document(query, key, value, replace(request, sinks=sinks))

            _Kernel.observer(given, by_document)
        output = attend_on_cuda(q, k, v, starts, given["longest"], scale, sliding_window, s_aux)
    return output, None


def refuse_unknown(
    module: nn.Module,
    attention_mask: Tensor | None,
    cu_seq_lens: Tensor | None,
    others: Mapping[str, Any],
    *,
    sinks: bool = False,
    cap: float | None = None,
    dropout: float = 0.0,
) -> None:
    """Raise FinetuneError, in one line, if a layer hands over an argument that `varlen_attention` would leave out.

    None asks for nothing. So an argument that a later transformers adds is refused with the first model that uses it.
    Some arguments may have a value: position_ids, because queries and keys are already rotated by them; use_cache and
    output_attentions, which are False in training; is_causal unless it is False, because this attention is causal;
    output_router_logits, which is for experts' routers.
    """
    if cu_seq_lens is None:
        problem = "does not hand on where documents end (cu_seq_lens)"
    elif attention_mask is not None:
        problem = "brings a mask of its own"
    elif not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        problem = "is not causal"
    elif cap and (sinks or dropout):
        problem = f"asks for a soft cap together with {'sinks' if sinks else 'dropout'}"
    else:
        settled = ("position_ids", "is_causal", "output_router_logits")
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


def chunk_of(module: nn.Module) -> int | None:
    """The tokens of a chunk, where this layer attends inside chunks alone (Llama 4); None elsewhere.

    Its configuration says so; a mask would else be all that the attention is told.
    """
    config = getattr(module, "config", None)
    if getattr(config, "attention_chunk_size", None) is None:  # nothing more is read, that layers share their graph
        return None
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and layer is not None and kinds[layer] == "chunked_attention":
        return int(config.attention_chunk_size)  # type: ignore[union-attr]  # a model's configuration has any names
    return None


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, request: Attended) -> Tensor:
    """Compute in float32 at least. oneDNN takes 16-bit products, keeps 4 MB of kernels for each new document length,
    and spends most of a short document's time on calls: 16 ms forward and backward, 8 in float32 (docs/log.md).
    """
    result = _computed_in(query)  # read before autocast is off
    wide_query, wide_key, wide_value = (x.float() if x.itemsize < 4 else x for x in (query, key, value))
    with torch.autocast("cpu", enabled=False):
        return _by_document(wide_query, wide_key, wide_value, request).to(result)


def _by_document(query: Tensor, key: Tensor, value: Tensor, request: Attended) -> Tensor:
    if request.ends is not None:
        if request.dropout:
            raise FinetuneError("training.compile: no dropout in compiled attention; set training.compile: false")
        q, k, v = (x.to(_computed_in(x)) for x in (query, key, value))
        return _operator(q, k, v, request.sinks, request.ends, request.scale, request.window, request.cap)
    grouped = key.shape[1] != query.shape[1]
    if grouped and (query.device.type != "cpu" or request.cap):
        # On some torch releases groups lead to plain matrix products, [heads, tokens, tokens] for each document.
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        grouped = False
    attend = _plain
    if request.cap:
        attend = _capped
    elif request.sinks is not None:
        attend = _with_sinks
    width = value.shape[-1]
    if query.device.type != "cpu" and not request.cap:
        # The memory-efficient kernel needs rows in multiples of 16 bytes; else torch allocates [heads, tokens, tokens].
        query, key, value = (widened(x, x.shape[-1] + -x.shape[-1] % HEAD_MULTIPLE) for x in (query, key, value))
    documents = zip(*(torch.split(x, list(request.lengths), dim=2) for x in (query, key, value)), strict=True)
    outputs = [attend(q, k, v, request, grouped).transpose(1, 2) for q, k, v in documents]
    joined = torch.cat(outputs, dim=1)  # contiguous, as in the library: some models take a view
    if joined.shape[-1] == width:
        return joined
    return joined[..., :width].contiguous()


def _until(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, ends: Tensor, *rest: Any) -> Tensor:
    lengths = tuple(ends.diff().tolist())
    scale, window, cap = rest
    return _by_document(query, key, value, Attended(lengths, scale, window, sinks, cap, 0.0))


_operator = document_operator("attention_by_document", _until)


def _plain(query: Tensor, key: Tensor, value: Tensor, request: Attended, grouped: bool) -> Tensor:
    """One document, [1, heads, tokens, head_dim]."""
    mask = _window_mask(query, request.window)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=request.dropout,
        is_causal=mask is None,
        scale=request.scale,
        enable_gqa=grouped,
    )


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, request: Attended, grouped: bool) -> Tensor:
    """Attend within one document whose softmax also has the head's sink.

    The sink becomes one more token before the first. Its key meets only one more column of the queries, which holds the
    sink's score over the scale; its value is zero. So the kernel needs no sinks, and their gradient is the column's
    gradient. There are eight more columns rather than one, for kernels that want rows in 16 bytes.
    """
    assert request.sinks is not None
    tokens, width = query.shape[2], value.shape[-1]
    column = (request.sinks.to(query.dtype) / request.scale).view(1, -1, 1, 1).expand(1, -1, tokens + 1, 1)
    queries = F.pad(torch.cat([F.pad(query, (0, 0, 1, 0)), column], dim=-1), (0, 7))
    first = F.pad(key.new_ones(1, key.shape[1], 1, 1), (key.shape[-1], 7))
    keys = torch.cat([first, F.pad(key, (0, 8))], dim=2)
    mask = _window_mask(query, request.window)
    if mask is not None:
        mask = F.pad(mask, (1, 0, 1, 0), value=True)  # every token sees the sink; what the first line gives is dropped
    output = F.scaled_dot_product_attention(
        queries,
        keys,
        F.pad(value, (0, 8, 1, 0)),
        attn_mask=mask,
        dropout_p=request.dropout,
        is_causal=mask is None,
        scale=request.scale,
        enable_gqa=grouped,
    )
    return output[:, :, 1:, :width]


def _window_mask(query: Tensor, window: int | None) -> Tensor | None:
    """The keys that each query sees, [tokens, tokens], if the window is shorter than the document."""
    tokens = query.shape[2]
    if window is None or window >= tokens:
        return None
    return torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril().triu(1 - window)


def _capped(query: Tensor, key: Tensor, value: Tensor, request: Attended, grouped: bool) -> Tensor:
    """Attend within one document with capped scores, one block of queries at a time, computed again in backward. So
    only one block's scores are held, never [heads, tokens, tokens].
    """
    heads, tokens = query.shape[1:3]
    step = max(1, BLOCK_BYTES // (4 * heads * tokens))
    blocks = []
    for start in range(0, tokens, step):
        end = min(start + step, tokens)
        first = max(0, start + 1 - (request.window or tokens))
        part = query[:, :, start:end], key[:, :, first:end], value[:, :, first:end]
        blocks.append(
            checkpoint(_capped_block, *part, start - first, request, use_reentrant=False, preserve_rng_state=False)
        )
    return torch.cat(blocks, dim=2)


def _capped_block(query: Tensor, key: Tensor, value: Tensor, offset: int, request: Attended) -> Tensor:
    """`offset`: the number of keys before the first query's."""
    assert request.cap is not None
    capped = request.cap * torch.tanh((query @ key.transpose(2, 3)).float() * (request.scale / request.cap))
    seen = torch.ones(capped.shape[2:], dtype=torch.bool, device=query.device).tril(offset)
    if request.window is not None:
        seen = seen.triu(offset + 1 - request.window)
    return capped.masked_fill(~seen, float("-inf")).softmax(-1).to(value.dtype) @ value


def _computed_in(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


@cache
def has_flash(device: torch.device) -> bool:
    """Not on a T4 or V100: their memory-efficient kernel takes one document at a time just as well."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= AMPERE
