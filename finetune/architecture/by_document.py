"""Layers that carry a state from token to token run on one document after another.

A short convolution, a gated delta rule or a state-space layer would carry its state from one document into the next.
Kernels that take the documents' ends exist only on GPUs and have different names. Running the same layer on each
document is right everywhere. The trial (trial.py) finds these modules, and the position axes among their inputs and
outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from finetune.architecture.attention import ENDS, LENGTHS
from finetune.architecture.loss import decoder_of
from finetune.errors import FinetuneError

# Of a checkpointed layer's forward, and of the same forward in backward.
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mixer:
    """A module that is run document by document. Axes of positions by an argument's place: `.0`, `.position_ids`."""

    path: str
    inputs: Mapping[str, tuple[int, ...]]
    output: Mapping[str, tuple[int, ...]]


class RowDocuments:
    """The documents of the row in this forward."""

    lengths: tuple[int, ...] | None = None

    def __deepcopy__(self, memo: object) -> RowDocuments:
        """peft copies a module that it trains in full, and the copy sees the same row."""
        return self

    def of_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.lengths = kwargs.get(LENGTHS)

    def contexts(self) -> Contexts:
        """In backward another row may be here."""
        return nullcontext(), self._as_it_was(self.lengths)

    @contextmanager
    def _as_it_was(self, lengths: tuple[int, ...] | None) -> Iterator[None]:
        present, self.lengths = self.lengths, lengths
        try:
            yield
        finally:
            self.lengths = present


def run_by_document(model: PreTrainedModel, mixers: Sequence[Mixer]) -> None:
    """Run these modules on each document in a row that comes with `document_lengths`.

    Only instances change, so saving, generation and peft see the classes they know.
    """
    if not mixers:
        return
    row = RowDocuments()
    decoder_of(model).register_forward_pre_hook(row.of_forward, with_kwargs=True)
    for mixer in mixers:
        module: Any = model.get_submodule(mixer.path)
        module.finetune_documents = mixer, row
        # A bound method, not a closure: peft copies modules that are trained in full.
        module.forward = MethodType(_forward, module)


def run_document_by_document(model: nn.Module) -> list[nn.Module]:
    """The modules that `run_by_document` was applied to."""
    return [module for module in model.modules() if hasattr(module, "finetune_documents")]


def checkpoint_contexts(model: nn.Module) -> Callable[[], Contexts] | None:
    """For torch's checkpoint: in these a layer that runs again sees the row that it saw. None: it needs none."""
    modules: list[Any] = run_document_by_document(model)
    if not modules:
        return None
    contexts: Callable[[], Contexts] = modules[0].finetune_documents[1].contexts
    return contexts


def first_parameter(module: nn.Module) -> str:
    """The name of the first argument in its class's forward, after the module itself."""
    return list(inspect.signature(type(module).forward).parameters)[1]


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    mixer: Mixer
    mixer, row = module.finetune_documents
    forward: Any = type(module).forward
    if args and ".0" not in mixer.inputs:  # tried with names alone; ZeRO-3 gives the first by its place
        args, kwargs = args[1:], {first_parameter(module): args[0], **kwargs}
    lengths = row.lengths
    if lengths is None or len(lengths) == 1:
        return forward(module, *args, **kwargs)
    results, start = [], 0
    for index, length in enumerate(lengths):
        part_args, part_kwargs = (_cut(given, mixer, start, length, sum(lengths)) for given in (args, kwargs))
        if LENGTHS in kwargs:
            part_kwargs[LENGTHS] = (length,)
        if kwargs.get(ENDS) is not None:
            part_kwargs[ENDS] = kwargs[ENDS][index : index + 2] - kwargs[ENDS][index]
        results.append(forward(module, *part_args, **part_kwargs))
        start += length
    return _joined(results, mixer.output)


def _cut(value: Any, mixer: Mixer, start: int, length: int, tokens: int, place: str = "") -> Any:
    """The part of a nested value that belongs to one document."""
    if isinstance(value, Tensor):
        if place not in mixer.inputs:
            raise FinetuneError(
                f"model.name_or_path: {mixer.path} is given {place.lstrip('.')}, which it was not when it was tried; "
                "set data.packing: false and model.attention: sdpa"
            )
        for axis in mixer.inputs[place]:
            assert value.shape[axis] == tokens, (mixer.path, place, value.shape, tokens)
            value = value.narrow(axis, start, length)
        return value
    if isinstance(value, dict):
        return {key: _cut(entry, mixer, start, length, tokens, f"{place}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        parts = [_cut(entry, mixer, start, length, tokens, f"{place}.{index}") for index, entry in enumerate(value)]
        return type(value)(parts)
    return value


def _joined(parts: Sequence[Any], axes: Mapping[str, tuple[int, ...]], place: str = "") -> Any:
    """Join the documents' outputs into the whole row's output."""
    first = parts[0]
    if isinstance(first, Tensor):
        # The state at the end of a row is that of no document, and the trial would have failed where it is used.
        if axes[place]:
            return torch.cat(list(parts), dim=axes[place][0])
        return None
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts], axes, f"{place}.{key}") for key in first}
    if isinstance(first, list | tuple):
        entries = enumerate(zip(*parts, strict=True))
        return type(first)(_joined(entry, axes, f"{place}.{index}") for index, entry in entries)
    if first is None or isinstance(first, bool | int | float | str):
        return first
    raise TypeError(f"a {type(first).__name__} of several documents cannot be joined")  # in the trial already
