"""One forward of an architecture on meta, without weights or memory, that examines every operation.

A micro-batch holds several documents in one row. So in a decoder only attention may mix positions, and it must be the
kit's attention. This is a property of the computation, so no list of names is needed. One forward of a new model on
meta finds:
- a module that mixes positions outside transformers' attention interface: a convolution, a recurrence, linear
  attention; if it can run on one document after another, it does (by_document.py);
- a model's own attention with a mask that the kit's layout does not have;
- positions that are not the batch's;
- an attention with a request that document-isolated attention does not support, or with a window only in a mask;
- the operations on the head's product: a scale or a soft cap, which the loss then computes, or anything else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.architecture.attention import ENDS, chunk_of, refuse_unknown
from finetune.architecture.attention import LENGTHS as DOCUMENT_LENGTHS
from finetune.architecture.by_document import Mixer, run_by_document
from finetune.architecture.loss import LogitTransform, decoder_of
from finetune.architecture.operations import (
    LENGTHS,
    SUMMED,
    TOKENS,
    Unsuitable,
    Watching,
    counts_positions,
    mixes_positions,
    nested_tensors,
    place,
    token_axes,
)

TRIED = "finetune_trial"  # an attention without masks, as the kit's own is
MASKED = "finetune_trial_masked"  # one with masks, as the library's are
LAYERS_BEFORE_HEAD = 2  # where the head is looked at, and not the layers
FULL = {"full_attention", "attention", "hybrid"}  # kinds of layers whose attention sees all of its document

Architecture = Callable[[PreTrainedConfig], PreTrainedModel]  # its class


def check_documents_isolated(kind: Architecture, config: PreTrainedConfig, *, isolated: bool) -> tuple[Mixer, ...]:
    """Check that documents in one row do not see each other outside transformers' attention.

    Args:
        isolated: Check the attention too: it is the kit's own and supports all that the layers ask for. Then returns
            the modules that mix positions and must run on one document after another.
    """
    calls: list[tuple[nn.Module, int | None]] = []

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
        s_aux: Tensor | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        if isolated:
            options: dict[str, Any] = {"sinks": s_aux is not None, "cap": softcap, "dropout": dropout}
            refuse_unknown(module, attention_mask, cu_seq_lens, others, **options)
        calls.append((module, sliding_window))
        return _attend(module, query, key, value)

    AttentionInterface.register(TRIED, attend)
    model, batch = _structure(kind, config, TRIED), _batch()
    if isolated:
        ends = torch.tensor([0, LENGTHS[0], TOKENS], dtype=torch.int32, device="meta")
        batch |= {ENDS: ends, DOCUMENT_LENGTHS: LENGTHS}
    seen = _run(model, batch)
    mixers = seen.mixers()
    if mixers and not isolated:
        raise Unsuitable(seen.first_problem())
    if isolated:
        _windows_known(config.get_text_config(), calls)
    if mixers:
        _refuse_masked(kind, config, seen)
        model = _structure(kind, config, TRIED)
        run_by_document(model, mixers)
        again = _run(model, batch, mixers)
        if again.mixing:
            raise Unsuitable(again.first_problem())
        seen.tables = again.tables  # without those that are counted inside of a document
    if seen.tables and not seen.positions_read:
        raise Unsuitable("takes no positions, so those of a row's documents would be counted through")
    return mixers


def _run(model: PreTrainedModel, batch: dict[str, Any], mixers: Sequence[Mixer] = ()) -> Positions:
    seen = Positions(model, batch["position_ids"], mixers)
    with torch.no_grad(), Watching(seen.look):
        assert isinstance(decoder_of(model)(**batch, use_cache=False).last_hidden_state, Tensor)
    return seen


def _windows_known(config: PreTrainedConfig, calls: Sequence[tuple[nn.Module, int | None]]) -> None:
    """Check that each window reaches its attention: one that is only in a mask would be left out.

    Args:
        calls: One for each call of the attention: its module, and the window passed to it.
    """
    kinds: list[str] = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    windowed = sum(1 for _, passed in calls if passed is not None)
    for module, _ in calls:
        layer = getattr(module, "layer_idx", None)
        named = [kinds[layer]] if kinds and layer is not None else kinds
        if unknown := sorted(set(named) - FULL - {"sliding_attention", "chunked_attention"}):
            raise Unsuitable(f"has layers of kind {unknown[0]}, which document-isolated attention does not compute")
        if "chunked_attention" in named and chunk_of(module) is None:
            raise Unsuitable("has chunks of attention that do not reach it")
    expected, is_wrong = len(calls), bool(window) and not windowed
    if kinds:
        expected = kinds.count("sliding_attention")
        is_wrong = windowed != expected
    if is_wrong:
        raise Unsuitable(f"has a sliding window in {expected} of its layers, and tells {windowed} of its attentions")
    if not kinds and getattr(config, "attention_chunk_size", None):
        raise Unsuitable("has chunks of attention that do not reach it")


def _refuse_masked(kind: Architecture, config: PreTrainedConfig, seen: Positions) -> None:
    """Refuse a model's own attention: in the library's layout it gets a mask, and here it would see later tokens. One
    that only counts positions takes them from the documents.
    """
    _register_masks(lambda *_: None)
    model = _structure(kind, config, MASKED)
    masked = _run(model, _batch())
    for path in seen.outermost():
        takes_mask = any(len(axes) > 1 for axes in masked.given.get(path, {}).values())
        if takes_mask and seen.mixing[path] != {COUNTED}:
            raise Unsuitable(seen.problem(path))


def check_masks_isolate(kind: Architecture, config: PreTrainedConfig) -> None:
    """Check that transformers' masks for this architecture isolate the documents in a row. The model must pass
    positions to the mask function, which finds there where documents begin, and then does not skip a causal mask.
    """

    def look(attention_mask: Tensor | None) -> None:
        if not getattr(attention_mask, "isolates", False):
            raise Unsuitable("makes masks that let documents of one row see each other")

    _register_masks(look)
    model = _structure(kind, config, MASKED)
    with torch.no_grad(), Watching():
        decoder_of(model)(**_batch(), use_cache=False)


def _register_masks(look: Callable[[Tensor | None], None]) -> None:
    """Register `MASKED`: an attention with masks, each of which is passed to `look`."""

    def mask(*, batch_size: int, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **_: Any) -> Tensor:
        empty: Any = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        empty.isolates = not allow_is_causal_skip
        return empty  # type: ignore[no-any-return]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> tuple[Tensor, None]:
        look(attention_mask)
        return _attend(module, query, key, value)

    AttentionInterface.register(MASKED, attend)
    AttentionMaskInterface.register(MASKED, mask)


def check_head_is_last(
    kind: Architecture, config: PreTrainedConfig, implementation: str | None, *, decoder_ran: bool = False
) -> LogitTransform:
    """Check that the logits are the head's product with the decoder's last hidden states, with nothing after it except
    the returned transform.

    Args:
        implementation: transformers' name for the attention; None and names of GPU kernels: any.
        decoder_ran: All layers have run (`check_documents_isolated`). A few are enough here, because 48 take a second.
    """
    if decoder_ran and implementation is None:
        with suppress(Exception):  # of a model that asks for all of its layers; and what is wrong the whole one says
            return _head_is_last(kind, config, implementation, layers=LAYERS_BEFORE_HEAD)
    return _head_is_last(kind, config, implementation)


def _head_is_last(
    kind: Architecture, config: PreTrainedConfig, implementation: str | None, *, layers: int | None = None
) -> LogitTransform:
    AttentionInterface.register(TRIED, _attend)
    model = _structure(kind, config, implementation if implementation in ("sdpa", "eager") else TRIED)
    for layer in model.modules():
        if getattr(layer, "is_causal", True) is False:  # perhaps of a vision tower, which text does not run
            assert layers is None, "run in full"
            layer.register_forward_pre_hook(_not_causal)
    operations = AfterDecoder(padded=implementation is not None)
    for decoder in list(model.modules()):  # OPT's head takes what the decoder inside of its base model gives
        if isinstance(decoder, PreTrainedModel) and decoder is not model:
            decoder.register_forward_hook(operations.decoder_ended)
        for name, child in list(decoder.named_children()) if layers is not None else ():
            if isinstance(child, nn.ModuleList) and all(isinstance(part, GradientCheckpointingLayer) for part in child):
                setattr(decoder, name, child[:layers])  # leave the first
    with torch.no_grad(), Watching(operations.look):
        if layers is None:
            assert isinstance(decoder_of(model)(**_batch(), use_cache=False).last_hidden_state, Tensor)
        logits = model(**_batch(), use_cache=False).logits
    head: Any = model.get_output_embeddings()
    return transform_of(operations.seen, head, logits)


class _CountsOnMeta(TorchFunctionMode):
    """transformers 5.17 counts each expert's tokens with torch.bincount, which torch 2.11 lacks on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.bincount and args[0].is_meta:
            return args[0].new_zeros((kwargs or {}).get("minlength", 0))
        return func(*args, **(kwargs or {}))


def experts_chosen(kind: Architecture, config: PreTrainedConfig) -> int:
    """The number of experts per token. Raises Unsuitable if transformers has no auxiliary loss for this architecture,
    or one with other sizes than the choice among each router's logits.
    """
    AttentionInterface.register(TRIED, _attend)
    model: Any = _structure(kind, config, TRIED)
    if not hasattr(config.get_text_config(), "output_router_logits"):
        raise Unsuitable("has no router of experts")
    with torch.no_grad(), Watching(), _CountsOnMeta():
        output = model(**_batch(), use_cache=False, output_router_logits=True)
    if not isinstance(getattr(output, "aux_loss", None), Tensor):
        raise Unsuitable("has no auxiliary loss of its router")
    experts, chosen = getattr(model, "num_experts", None), getattr(model, "num_experts_per_tok", None)
    shapes = {(logits.numel() // logits.shape[-1], logits.shape[-1]) for logits in output.router_logits}
    if shapes != {(TOKENS, experts)} or not isinstance(chosen, int):
        raise Unsuitable("has an auxiliary loss of its router that is not of one choice among all experts")
    return chosen


def _not_causal(module: nn.Module, _: Any) -> None:
    raise Unsuitable(f"sees what comes after a token ({type(module).__name__})")


def _structure(kind: Architecture, config: PreTrainedConfig, implementation: str) -> PreTrainedModel:
    """The architecture on meta. Not by from_config: under ZeRO-3 that would shard the new model."""
    config = copy.deepcopy(config)
    config._attn_implementation = implementation  # as from_config sets it; sections of the configuration take it over
    if getattr(config.get_text_config(), "output_router_logits", False):  # its auxiliary loss is looked at on its own
        config.get_text_config().output_router_logits = False
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = kind(config)
    with suppress(ValueError):  # no experts; else not by a loop over those that were chosen, which is data
        model.set_experts_implementation("batched_mm")
    model.train()
    return model


def _batch() -> dict[str, Any]:
    ids, positions = (torch.empty(1, TOKENS, dtype=torch.int64, device="meta") for _ in range(2))
    return {"input_ids": ids, "position_ids": positions}


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """An empty result of an attention: [rows, tokens, heads, head_dim]."""
    return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


# Operations that change no value.
LAYOUT = {"slice", "alias", "view", "_unsafe_view", "t", "transpose", "detach", "expand", "clone"}
SCALED = {"mul", "div"}
_Operation = tuple[str, Sequence[Any], Tensor]  # name, arguments, result


class AfterDecoder:
    """The operations after the decoder's forward.

    Where rows are `padded`, raises Unsuitable at a comparison with the token that they are padded with, 0.
    """

    def __init__(self, padded: bool) -> None:
        self.padded, self.ended, self.seen = padded, False, list[_Operation]()

    def decoder_ended(self, *_: Any) -> None:
        self.ended, self.seen = True, []

    def look(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        compares = name in ("eq", "ne") and not isinstance(args[1], Tensor) and args[1] == 0
        if self.padded and compares and args[0].dtype in (torch.int32, torch.int64) and args[0].numel() == TOKENS:
            raise Unsuitable(f"looks for token 0 ({place()}), with which rows are padded")
        if self.ended:
            self.seen.append((name, args, result))


def transform_of(operations: Iterable[_Operation], head: Any, logits: Tensor) -> LogitTransform:
    """Read the operations after the decoder as a scale or a cap on the head's product.

    They must be one line: each takes the previous result, and at most the head's weights. Raises Unsuitable for
    anything other than the product, a scale by a number or a tanh, and for another order than scale, tanh, scale.
    """
    views: list[Tensor] = []
    current: Tensor | None = None
    products, inner, outer = 0, 1.0, None
    for name, args, result in operations:
        values = [tensor for tensor in nested_tensors(args) if not isinstance(tensor, nn.Parameter)]
        values = [tensor for tensor in values if not any(tensor is view for view in views)]
        if not values and name in LAYOUT:
            views.append(result)
            continue
        if len(values) != 1 or (current is not None and values[0] is not current):
            raise _unknown(name)
        current = result
        if name in SUMMED and args[SUMMED[name][0]] is values[0]:
            products += 1
        elif (
            name in SCALED
            and values[0] is args[0]
            and isinstance(args[1], int | float)
            and (products or head.bias is None)
        ):
            number = float(args[1]) if name == "mul" else 1 / args[1]
            if outer is None:
                inner *= number
            else:
                outer *= number
        elif name == "tanh" and outer is None and products:
            outer = 1.0
        elif name not in LAYOUT:
            raise _unknown(name)
    if products != 1 or tuple(logits.shape) != (1, TOKENS, head.weight.shape[0]) or logits is not current:
        raise Unsuitable("changes its logits, which the fused loss does not know")
    return LogitTransform(inner, outer)


def _unknown(name: str) -> Unsuitable:
    return Unsuitable(f"changes its logits by {name}, which the fused loss does not know")


COUNTED = "counts positions"


class Positions:
    """The modules that mix positions, with each one's inputs and outputs."""

    def __init__(self, model: PreTrainedModel, positions: Tensor, mixers: Sequence[Mixer] = ()) -> None:
        """`mixers` are run document by document here, and cut and join rows for that."""
        self.cutting = {mixer.path for mixer in mixers}
        self.model, self.positions, self.positions_read, self.tables = model, positions, False, False
        self.mixing: dict[str, set[str]] = {}  # path of the innermost module -> operations
        self.given: dict[str, dict[str, tuple[int, ...]]] = {}
        self.returned: dict[str, dict[str, tuple[int, ...]]] = {}
        self.running: list[str] = []
        for path, module in model.named_modules():
            if path and not type(module).__module__.startswith("torch."):
                module.register_forward_pre_hook(partial(self._begin, path), with_kwargs=True)
                module.register_forward_hook(partial(self._end, path))

    def _begin(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running.append(path)
        self._keep(self.given, path, token_axes(args) | token_axes(kwargs))

    def _end(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.running.pop()
        self._keep(self.returned, path, token_axes(output))

    def _keep(self, where: dict[str, Any], path: str, axes: dict[str, tuple[int, ...]]) -> None:
        if where.setdefault(path, axes) != axes:  # a module that several layers share, and give different things
            where[path] = {"": ()}

    def look(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.positions_read |= any(tensor is self.positions for tensor in nested_tensors(args))
        self.tables |= counts_positions(name, args, result)
        if name == "arange" and result.numel() == TOKENS:
            self.mixing.setdefault(self._here(), set()).add(COUNTED)
        elif name in ("slice", "cat") and self._here() in self.cutting:
            return
        elif mixes_positions(name, func, args, kwargs, result):
            self.mixing.setdefault(self._here(), set()).add(name)

    def _here(self) -> str:
        if self.running:
            return self.running[-1]
        return ""

    def outermost(self) -> list[str]:
        """Paths of the modules that mix positions, without those inside another one."""

        def inside(path: str, other: str) -> bool:
            return path != other and (not other or path.startswith(f"{other}."))

        return [path for path in self.mixing if not any(inside(path, other) for other in self.mixing)]

    def mixers(self) -> tuple[Mixer, ...]:
        """The modules to be run document by document. Raises Unsuitable where one of them cannot be."""
        paths = self.outermost()
        for path in paths:
            whole = not path or isinstance(self.model.get_submodule(path), PreTrainedModel)
            output = self.returned.get(path, {})
            if whole or 1 not in map(len, output.values()) or any(len(axes) > 1 for axes in output.values()):
                raise Unsuitable(self.problem(path))
        return tuple(Mixer(path, self.given[path], self.returned[path]) for path in paths)

    def first_problem(self) -> str:
        return self.problem(self.outermost()[0])

    def problem(self, path: str) -> str:
        """A sentence about this module's fault."""
        kind = type(self.model.get_submodule(path)).__name__
        operations = sorted(self.mixing[path] - {COUNTED})
        if not operations:
            return f"counts positions of its own ({kind})"
        return f"brings positions together outside of its attention ({kind}: {operations[0]})"
