"""One forward of an architecture on meta, without weights or memory, with every operation examined.

A micro-batch holds several documents in one row, so nothing in a decoder but its attention may mix positions, and
the attention must be the one that the kit puts in its place. That is a property of the computation: a model built anew
on meta runs one forward, and these are found, whatever the model is called:
- an operation that mixes positions outside of transformers' attention interface: a convolution, a recurrence,
  linear attention, an attention of the model's own, with position biases or without;
- positions that are not those of the batch;
- an attention that asks for what document-isolated attention does not compute, or whose window is only in a mask;
- logits that are not the head applied to the decoder's last hidden states.
The number of tokens is a prime that no axis of a model has, so an axis of that size is the axis of positions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # no public name; tests/architecture/test_families.py would turn red
)
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from finetune.architecture.attention import refuse_unknown

LENGTHS = (67, 46)  # of the documents
TOKENS = sum(LENGTHS)
TRIED = "finetune_trial"  # an attention without masks, as the kit's own is
MASKED = "finetune_trial_masked"  # one with masks, as the library's are
KINDS = {"full_attention", "sliding_attention"}
# Which argument, and which axis of it, a product sums over.
SUMMED = {"mm": (0, 1), "bmm": (0, 2), "addmm": (1, 1), "baddbmm": (1, 2), "mv": (0, 1), "dot": (0, 0)}
# These name an axis but do not mix what is along it. Experts get their tokens by gather, scatter and the like.
UNMIXED = {
    "unsqueeze",
    "squeeze",
    "transpose",
    "permute",
    "stack",
    "gather",
    "scatter",
    "scatter_add",
    "index_add",
    "index_select",
}
# From the last hidden states to the logits: a product with the head, and operations that change no value.
HEAD_OPERATIONS = {
    "slice",
    "alias",
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "detach",
    "expand",
    "clone",
    "mm",
    "addmm",
}


Architecture = Callable[[PreTrainedConfig], PreTrainedModel]  # its class


class Unsuitable(Exception):
    """The kit would compute something wrongly for this architecture; the text says what."""


def check_documents_isolated(kind: Architecture, config: PreTrainedConfig, *, isolated: bool) -> None:
    """Check that documents of one row do not see each other outside of transformers' attention.

    Args:
        isolated: Check the attention too: it is the kit's own, and computes all that the layers ask of it.
    """
    windows: list[int | None] = []

    def attend(
        module: nn.Module,
        query: Tensor,  # [1, heads, tokens, head_dim]
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cu_seq_lens: Tensor | None = None,
        document_lengths: tuple[int, ...] = (),
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        if isolated:
            refuse_unknown(module, attention_mask, cu_seq_lens, others)
        windows.append(sliding_window)
        return _answer(query, value), None

    AttentionInterface.register(TRIED, attend)
    model, batch = _structure(kind, config, TRIED), _batch()
    if isolated:
        ends = torch.tensor([0, LENGTHS[0], TOKENS], dtype=torch.int32, device="meta")
        batch |= {"cu_seq_lens": ends, "document_lengths": LENGTHS}
    positions = _UnmixedPositions(batch["position_ids"])
    with torch.no_grad(), _Watching(positions.look):
        assert isinstance(model.base_model(**batch, use_cache=False).last_hidden_state, Tensor)
    if not positions.read:
        raise Unsuitable("takes no positions, so those of a row's documents would be counted through")
    if isolated:
        _windows_known(config.get_text_config(), windows)


def _windows_known(config: PreTrainedConfig, windows: Sequence[int | None]) -> None:
    """Check that each window reaches its attention: one that is only in a mask would be left out."""
    kinds: list[str] = getattr(config, "layer_types", None) or []
    if unknown := sorted(set(kinds) - KINDS):
        raise Unsuitable(f"has layers of kind {unknown[0]}, which document-isolated attention does not compute")
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    windowed = sum(1 for each in windows if each is not None)
    if windowed != kinds.count("sliding_attention") if kinds else window and not windowed:
        raise Unsuitable(f"has a sliding window, which reaches {windowed} of its {len(windows)} attentions")


def check_masks_isolate(kind: Architecture, config: PreTrainedConfig) -> None:
    """Check that the masks that transformers makes for this architecture isolate the documents of a row: the model
    passes the positions to the mask function, which finds in them where documents begin, and then forbids to skip a
    causal mask."""

    def mask(*, batch_size: int, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **_: Any) -> Tensor:
        empty: Any = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        empty.isolates = not allow_is_causal_skip
        return empty  # type: ignore[no-any-return]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> tuple[Tensor, None]:
        if not getattr(attention_mask, "isolates", False):
            raise Unsuitable("makes masks by which documents of one row see each other")
        return _answer(query, value), None

    AttentionInterface.register(MASKED, attend)
    AttentionMaskInterface.register(MASKED, mask)
    model = _structure(kind, config, MASKED)
    with torch.no_grad(), _Watching():
        model.base_model(**_batch(), use_cache=False)


def check_head_is_last(kind: Architecture, config: PreTrainedConfig, implementation: str | None) -> None:
    """Check that the logits are the head applied to the decoder's last hidden states: one product, nothing after it.

    Args:
        implementation: transformers' name of the attention; None and the names of kernels that need a GPU: any.
    """

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return _answer(query, value), None

    AttentionInterface.register(TRIED, attend)
    model = _structure(kind, config, implementation if implementation in ("sdpa", "eager") else TRIED)
    for layer in model.modules():
        if getattr(layer, "is_causal", True) is False:  # perhaps of a vision tower, which text does not run
            layer.register_forward_pre_hook(_not_causal)
    operations = _AfterDecoder(padded=implementation is not None)
    for decoder in model.modules():  # OPT's head takes what the decoder inside of its base model gives
        if isinstance(decoder, PreTrainedModel) and decoder is not model:
            decoder.register_forward_hook(operations.decoder_ended)
    with torch.no_grad(), _Watching(operations.look):
        assert isinstance(model.base_model(**_batch(), use_cache=False).last_hidden_state, Tensor)
        logits = model(**_batch(), use_cache=False).logits
    head: Any = model.get_output_embeddings()
    products = sum(1 for name in operations.names if name in SUMMED)
    other = [name for name in operations.names if name not in HEAD_OPERATIONS]
    if other or products != 1 or tuple(logits.shape) != (1, TOKENS, head.weight.shape[0]):
        how = f" by {other[0]}" if other else ""
        raise Unsuitable(f"changes its logits{how}, which the fused loss does not know")


def _not_causal(module: nn.Module, _: Any) -> None:
    raise Unsuitable(f"sees what comes after a token ({type(module).__name__})")


def _structure(kind: Architecture, config: PreTrainedConfig, implementation: str) -> PreTrainedModel:
    """The architecture on meta. Not by from_config: under ZeRO-3 that would shard what is built."""
    config = copy.deepcopy(config)
    config._attn_implementation = implementation  # as from_config sets it; sections of the configuration take it over
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = kind(config)
    with suppress(ValueError):  # no experts; else not by a loop over those that were chosen, which is data
        model.set_experts_implementation("batched_mm")
    model.train()
    return model


def _batch() -> dict[str, Any]:
    ids, positions = (torch.empty(1, TOKENS, dtype=torch.int64, device="meta") for _ in range(2))
    return {"input_ids": ids, "position_ids": positions}


def _answer(query: Tensor, value: Tensor) -> Tensor:
    """An empty result of an attention: [rows, tokens, heads, head_dim]."""
    return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


class _Watching(TorchDispatchMode):
    """Passes every operation to `look`. A value that the model's code reads is 0; a search by `nonzero` finds none."""

    def __init__(self, look: Callable[..., None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            return torch.zeros((), dtype=args[0].dtype).item()
        if name == "nonzero":
            return args[0].new_empty((0, args[0].ndim), dtype=torch.int64)
        result = func(*args, **(kwargs or {}))
        if self.look is not None:
            self.look(name, func, args, kwargs or {}, result)
        return result


class _UnmixedPositions:
    """Raises Unsuitable at an operation that mixes positions."""

    def __init__(self, positions: Tensor) -> None:
        self.positions, self.read = positions, False

    def look(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.read |= any(argument is self.positions for argument in args)
        if name == "arange" and result.numel() == TOKENS:
            raise Unsuitable(f"counts positions of its own ({_place()})")
        if _mixes_positions(name, func, args, kwargs, result):
            raise Unsuitable(f"brings positions together outside of its attention ({_place()}: {name})")


class _AfterDecoder:
    """The operations after the decoder's forward, by name.

    Where rows are `padded`, raises Unsuitable at a comparison with the token that they are padded with, 0.
    """

    def __init__(self, padded: bool) -> None:
        self.padded, self.ended, self.names = padded, False, list[str]()

    def decoder_ended(self, *_: Any) -> None:
        self.ended, self.names = True, []

    def look(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        compares = name in ("eq", "ne") and not isinstance(args[1], Tensor) and args[1] == 0
        if self.padded and compares and args[0].dtype in (torch.int32, torch.int64) and args[0].numel() == TOKENS:
            raise Unsuitable(f"looks for token 0 ({_place()}), with which rows are padded")
        by_one = name in ("mul", "div") and not isinstance(args[1], Tensor) and args[1] == 1
        if self.ended and not by_one:
            self.names.append(name)


def _mixes_positions(name: str, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    if "convolution" in name or "scaled_dot_product" in name:
        return True
    if name in SUMMED:
        which, axis = SUMMED[name]
        return bool(args[which].shape[axis] == TOKENS)
    tensor = args[0][0] if args and isinstance(args[0], list | tuple) and args[0] else args[0] if args else None
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.ndim < 2:
        return False
    if name == "constant_pad_nd":
        padded = [tensor.ndim - 1 - index // 2 for index, width in enumerate(args[1]) if width]
        return any(tensor.shape[axis] == TOKENS for axis in padded)
    if name in UNMIXED or (name == "slice" and result.shape == tensor.shape):
        return False
    return any(tensor.shape[axis] == TOKENS for axis in _axes(func, args, kwargs) if axis < tensor.ndim)


def _axes(func: Any, args: Any, kwargs: Any) -> list[int]:
    """The axes that an operation works along."""
    axes: list[int] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("dim", "dims", "dimension"):
            value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            axes += [value] if isinstance(value, int) else list(value or ())
    return axes


def _place() -> str:
    """The class of the library's module whose forward is running."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not type(owner).__module__.startswith("torch."):
            return type(owner).__name__
        frame = frame.f_back
    return "its forward"
