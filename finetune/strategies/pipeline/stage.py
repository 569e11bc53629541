"""One stage: the library's own forward of the whole model, in which the layers of other stages do nothing.

So scales, positions, masks and the order of layers are the model's own, of any family. The first stage embeds; a later
one has what it received from the stage before handed to its first layer, whatever the modules before that made of the
tokens; the last one computes the loss; another one gives what its last layer gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from finetune.architecture.loss import decoder_of
from finetune.strategies.pipeline.layout import Parts

Given = Mapping[str, Any]  # tokens/batches.py, which is on this floor
LEARNED = ("shift_labels", "supervised")  # of a micro-batch, for the last stage alone


@dataclass
class Crossing:
    """What passes between this stage and its neighbours in one forward, [1, tokens, hidden]."""

    received: Tensor | None = None
    sent: Tensor | None = None


class Stage(nn.Module):
    """This rank's part of the model, called with what the stage before gave, for one micro-batch after another."""

    def __init__(
        self,
        decoder: PreTrainedModel,
        parts: Parts,
        layers: Sequence[range],
        index: int,
        autocast: Callable[[], AbstractContextManager[Any]],
        dtype: torch.dtype,
    ) -> None:
        """
        Args:
            decoder: With its loss in the forward; what other stages hold is on meta.
            layers: Those of each stage.
            dtype: Of the hidden states between stages.
        """
        super().__init__()
        self.decoder, self.index, self.dtype = decoder, index, dtype
        self.is_first, self.is_last = index == 0, index == len(layers) - 1
        self._batches: Iterator[tuple[int, Given]] = iter(())  # those to come, and their numbers
        self._before_each: Callable[[int], None] = lambda number: None
        self.loss: Tensor | None = None  # of the latest micro-batch, on the last stage
        self._autocast, self._crossing = autocast, Crossing()
        _leave_out(decoder, parts, layers[index], self._crossing, dtype)

    def expect(self, batches: Sequence[Given], before_each: Callable[[int], None] = lambda number: None) -> None:
        """The micro-batches of the coming forwards, which every schedule computes in this order. `before_each` is
        called with the number of each before its forward."""
        self._batches, self._before_each = iter(enumerate(batches)), before_each

    def forward(self, received: Tensor) -> Tensor:
        """received: [1, tokens, hidden]; the first stage ignores what it is given.

        Returns [1, tokens, hidden], the last stage the summed loss.
        """
        number, given = next(self._batches)
        batch: dict[str, Any] = dict(given)
        self._before_each(number)
        self._crossing.received = None if self.is_first else received
        with self._autocast():
            if self.is_last:
                loss: Tensor = self.decoder(**batch)
                self.loss = loss.detach()
                return loss
            for name in LEARNED:
                del batch[name]
            decoder_of(self.decoder)(**batch, use_cache=False)
        sent, self._crossing.sent, self._crossing.received = self._crossing.sent, None, None
        assert sent is not None
        assert sent.dtype == self.dtype, f"layers give {sent.dtype}, {self.dtype} was expected"
        return sent.contiguous()


def _leave_out(decoder: PreTrainedModel, parts: Parts, held: range, crossing: Crossing, dtype: torch.dtype) -> None:
    """Give the forwards of what other stages compute: of layers, embeddings, norm. Only instances change."""

    def entrance(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert crossing.received is not None
        return crossing.received

    def outlet(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        crossing.sent = hidden
        return hidden

    others = {held.start - 1: entrance, held.stop: outlet}
    for index, path in enumerate(parts.layers):
        if index not in held:
            _replace_forward(decoder, path, others.get(index, _as_it_came))
    if held.start > 0:
        for path, width in parts.before.items():
            _replace_forward(decoder, path, _Zeros(width, dtype))
    if held.stop < len(parts.layers):
        for path in parts.after:
            _replace_forward(decoder, path, _as_it_came)


def _replace_forward(decoder: PreTrainedModel, path: str, forward: Callable[..., Tensor]) -> None:
    module: Any = decoder.get_submodule(path)
    module.forward = forward


def _as_it_came(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return hidden


@dataclass(frozen=True)
class _Zeros:
    """In the place of embeddings: [batch, tokens, width], one element in memory. No layer of this stage sees it."""

    width: int
    dtype: torch.dtype

    def __call__(self, given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=given.device).expand(*given.shape[:2], self.width)
