"""A stage's run of layers: the library's own forward of the whole model, in which all other layers do nothing.

So scales, positions, masks and the order of layers are the model's own, for any family.
- The first run embeds the tokens.
- A later run replaces the embeddings by the hidden states it received.
- The last run computes the loss.
- Every other run returns its last layer's hidden states.

A stage has one run, or several that take turns with the same decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from finetune.architecture.loss import decoder_of
from finetune.strategies.pipeline.layout import Parts

Given = Mapping[str, Any]  # tokens/batches.py, which is on this floor
Forward = Callable[..., Tensor]
LEARNED = ("shift_labels", "supervised")  # of a micro-batch, for the last run alone
OF_THE_HEAD = ("logits_to_keep", "use_cache", "return_dict")  # what `generate` says to it, and what is always so here


@dataclass
class Crossing:
    """The tensors that pass between a run and its neighbours in one forward, [1, tokens, hidden]."""

    layers: range | None = None  # of the run whose forward this is; None between forwards: layers are recomputed
    received: Tensor | None = None
    sent: Tensor | None = None


class LayerRun(nn.Module):
    """One run on this rank, called with the previous run's output, for one micro-batch after another."""

    def __init__(
        self,
        decoder: PreTrainedModel,
        crossing: Crossing,
        layers: Sequence[range],
        index: int,
        autocast: Callable[[], AbstractContextManager[Any]],
        dtype: torch.dtype,
    ) -> None:
        """Args:
        decoder: With its loss in the forward. Other stages' weights are on meta, and `_leave_out` was called.
        layers: The layers in each run.
        dtype: The number format of hidden states between runs.
        """
        super().__init__()
        self.decoder, self.index, self.dtype = decoder, index, dtype
        self.is_first, self.is_last = index == 0, index == len(layers) - 1
        self._batches: Iterator[tuple[int, Given]] = iter(())  # those to come, and their numbers
        self._before_each: Callable[[int], None] = lambda number: None
        self.loss: Tensor | None = None  # of the latest micro-batch, on the last run
        self._layers, self._autocast, self._crossing = layers[index], autocast, crossing

    def expect(
        self, batches: Sequence[Given], before_each: Callable[[int], None] = lambda number: None, first: int = 0
    ) -> None:
        """Announce the coming forwards' micro-batches, in the order in which every schedule computes them.
        `before_each` is called with each one's number, from `first` on, before its forward.
        """
        self._batches, self._before_each = iter(enumerate(batches, first)), before_each

    def forward(self, received: Tensor) -> Tensor:
        """received: [1, tokens, hidden]; the first run ignores it.

        Returns [1, tokens, hidden]; the last run returns the summed loss.
        """
        number, given = next(self._batches)
        self._before_each(number)
        self._crossing.layers, self._crossing.received = self._layers, None if self.is_first else received
        try:
            with self._autocast():
                if self.is_last:
                    loss: Tensor = self.decoder(**given)
                    self.loss = loss.detach()
                    return loss
                return self._sent(dict(given))
        finally:
            self._crossing.layers = self._crossing.received = self._crossing.sent = None

    def answer(self, received: Tensor | None, given: Given, whole: Callable[..., Any]) -> Tensor:
        """Compute for `generate`, with any number of rows, without gradients and in the weights' own number formats.

        Args:
            received: [rows, tokens, hidden]; None in the first run.
            given: The arguments that `generate` gives a model.
            whole: The model's forward, with its head and without the loss.

        Returns [rows, tokens, hidden]; the last run returns the next token's scores, float32 [rows, 1, vocabulary].
        """
        self._crossing.layers, self._crossing.received = self._layers, received
        try:
            if self.is_last:
                scores: Tensor = whole(**given).logits[:, -1:].float()
                return scores
            return self._sent({key: value for key, value in given.items() if key not in OF_THE_HEAD})
        finally:
            self._crossing.layers = self._crossing.received = self._crossing.sent = None

    def _sent(self, batch: dict[str, Any]) -> Tensor:
        for name in LEARNED:
            batch.pop(name, None)
        decoder_of(self.decoder)(**batch, use_cache=False)
        sent = self._crossing.sent
        assert sent is not None
        assert sent.dtype == self.dtype, f"layers give {sent.dtype}, {self.dtype} was expected"
        return sent.contiguous()


def runs_of(
    decoder: PreTrainedModel,
    parts: Parts,
    layers: Sequence[range],
    indices: Sequence[int],
    autocast: Callable[[], AbstractContextManager[Any]],
    dtype: torch.dtype,
) -> list[LayerRun]:
    """The runs with these numbers. They are one stage and share its decoder, whose forwards are changed in place."""
    crossing = Crossing()
    _leave_out(decoder, parts, [layers[index] for index in indices], crossing, dtype)
    return [LayerRun(decoder, crossing, layers, index, autocast, dtype) for index in indices]


def _leave_out(
    decoder: PreTrainedModel, parts: Parts, held: Sequence[range], crossing: Crossing, dtype: torch.dtype
) -> None:
    """Change the forwards of layers, embeddings and norm that some run in this stage does not compute. Only instances
    change.
    """

    def between(index: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert crossing.layers is not None
        if index == crossing.layers.start - 1:
            assert crossing.received is not None
            return crossing.received
        if index == crossing.layers.stop:
            crossing.sent = hidden
        return hidden

    def zeros(width: int, given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Instead of embeddings: [batch, tokens, width], one element in memory. No layer in this run sees it."""
        return torch.zeros((), dtype=dtype, device=given.device).expand(*given.shape[:2], width)

    def contains_layer(index: int, run: range) -> bool:
        return index in run

    replace = partial(_replace_forward, decoder, held, crossing)
    for index, path in enumerate(parts.layers):
        replace(path, partial(contains_layer, index), partial(between, index))
    for path, width in parts.before.items():
        replace(path, partial(contains_layer, 0), partial(zeros, width))
    for path in parts.after:
        replace(path, partial(contains_layer, len(parts.layers) - 1), lambda hidden, *_, **__: hidden)


def _replace_forward(
    decoder: PreTrainedModel,
    held: Sequence[range],
    crossing: Crossing,
    path: str,
    computes: Callable[[range], bool],
    otherwise: Forward,
) -> None:
    """Let a module compute in the runs that have it. In this stage's other runs it does `otherwise`."""
    module: Any = decoder.get_submodule(path)
    having = [run for run in held if computes(run)]
    if len(having) == len(held):
        return
    own: Forward = module.forward

    def forward(given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Recomputation in backward runs a single layer, outside any run's forward.
        if crossing.layers is None or computes(crossing.layers):
            return own(given, *args, **kwargs)
        return otherwise(given, *args, **kwargs)

    module.forward = forward if having else otherwise
