"""The head: one product with the last hidden states, and at most a scale or a soft cap after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from finetune.architecture.loss import LogitTransform
from finetune.architecture.operations import SUMMED, TOKENS, Unsuitable, place, placed_tensors

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
        values = [tensor for _, tensor in placed_tensors(args) if not _is_weight(tensor, views)]
        if not values and name in LAYOUT:
            views.append(result)
            continue
        if len(values) != 1 or (current is not None and values[0] is not current):
            raise _unknown(name)
        current = result
        if name in SUMMED and args[SUMMED[name][0]] is values[0]:
            products += 1
        elif name in SCALED and values[0] is args[0] and _is_number(args[1]) and (products or head.bias is None):
            number = float(args[1]) if name == "mul" else 1 / args[1]
            inner, outer = (inner * number, None) if outer is None else (inner, outer * number)
        elif name == "tanh" and outer is None and products:
            outer = 1.0
        elif name not in LAYOUT:
            raise _unknown(name)
    if products != 1 or tuple(logits.shape) != (1, TOKENS, head.weight.shape[0]) or logits is not current:
        raise Unsuitable("changes its logits, which the fused loss does not know")
    return LogitTransform(inner, outer)


def _is_weight(tensor: Tensor, views: Iterable[Tensor]) -> bool:
    return isinstance(tensor, nn.Parameter) or any(tensor is view for view in views)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _unknown(name: str) -> Unsuitable:
    return Unsuitable(f"changes its logits by {name}, which the fused loss does not know")
