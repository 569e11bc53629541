"""Decoder layers by torch.compile: norms, rotations, activations and sums between the products become a few kernels.

Layers of a kind share a graph, and its sizes are symbols, so that one graph serves rows of all lengths: what depends on
the documents reaches it as tensors and as one number that none of their lengths exceeds, rounded up to a power of two.
A graph is one layer with its recomputation, inside of the hooks by which a strategy gathers and frees weights.

Only layers that train run so. An evaluation, samples and rows of a single token run as the layer is written.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.architecture.attention import ENDS_ON_HOST, LENGTHS, LONGEST
from finetune.architecture.by_document import run_document_by_document
from finetune.errors import EnvironmentMismatch
from finetune.wording import counted

# torch counts graphs by code, and all kinds of layers, recomputed or not, share transformers' wrapper of their forward.
MOST_GRAPHS = 16


@dataclass
class CompiledLayers:
    """The layers of a model that are compiled, and what became of it."""

    required: bool  # a layer that cannot be compiled is an error; else it, and all others, run as they are written
    log: Callable[[str], None]  # a line for the user
    backend: Any = "inductor"
    seconds: dict[tuple[str, bool], float] = field(default_factory=dict)  # of the first forward and backward of a kind
    stopped: str | None = None  # why no layer is compiled, or none any more
    applied: bool = False  # the layers of a model have been given to it
    _functions: dict[type, Callable[..., Any]] = field(default_factory=dict)
    _last: tuple[tuple[int, ...], Tensor] | None = None  # the lengths of a row, and the ends of its documents

    def run(self, layer: Any, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output. Raises EnvironmentMismatch where `required` and its first forward or backward fails."""
        kind = layer.finetune_kind, hidden.requires_grad
        try:
            given = self._without_lengths(kwargs)
            if kind not in self.seconds:
                began = time.perf_counter()
                self._try(layer, args, given)
                self.seconds[kind] = time.perf_counter() - began
            return self._call(layer, args, given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of whatever class: torch has no public names for those of its compiler
            reason = _in_one_line(error)
            if self.required and kind not in self.seconds:
                raise EnvironmentMismatch(
                    f"training.compile: {type(layer).__name__} cannot be compiled here: {reason}; "
                    "set training.compile: auto, or false"
                ) from error
            self.stop(reason)
        return type(layer).forward(layer, *args, **kwargs)

    def stop(self, reason: str) -> None:
        """Run all layers as they are written from here on, and say so."""
        self.stopped = reason
        self.log(f"training.compile: layers run without it from here on: {reason}")

    def agree(self, total: Callable[[Tensor], Any], device: torch.device) -> None:
        """Stop on every rank where one has; every rank calls it. `total` sums a tensor over the ranks."""
        if not self.applied:
            return
        stopped = int(total(torch.tensor(int(self.stopped is not None), device=device)))
        if stopped and self.stopped is None:
            self.stop("another rank cannot compile them")

    def facts(self) -> dict[str, Any]:
        """For the receipt."""
        return {
            "layers": self.stopped is None and bool(self.seconds),
            "kinds_of_layers": len(self.seconds),
            "first_seconds": round(sum(self.seconds.values()), 1),
            "left_off": self.stopped,
        }

    def __str__(self) -> str:
        if self.stopped is not None or not self.seconds:
            return ""
        kinds = counted(len(self.seconds), "kind of layers", "kinds of layers")
        return f"compiled: {kinds}, forward and backward, in {sum(self.seconds.values()):.1f} s"

    def _call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in _tensors((args, kwargs)):
            # Every size is a symbol of its own: torch would take two that are equal in the first row, its tokens and
            # the width of the model, for the same, and compile again where they are not. torch's guide to dynamic
            # shapes has the function under this name.
            torch._dynamo.maybe_mark_dynamic(tensor, list(range(tensor.ndim)))
        function = self._functions.get(type(layer))
        if function is None:
            function = torch.compile(type(layer).forward, backend=self.backend, fullgraph=True, dynamic=True)
            self._functions[type(layer)] = function
        return function(layer, *args, **kwargs)

    def _try(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward and backward of this layer alone, thrown away: a failure in the backward of the whole model would
        come between the collectives of the other ranks."""
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            alone = tensor.detach().requires_grad_(tensor.requires_grad)
            leaves.extend([alone] if tensor.requires_grad else [])
            return alone

        device = next(iter(_tensors((args, kwargs)))).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the compiler about torch's own code and ours
            output = self._call(layer, _mapped(args, leaf), _mapped(kwargs, leaf))
            results = [each.sum() for each in _tensors(output) if each.requires_grad]
            wanted = leaves or [each for each in layer.parameters() if each.requires_grad][:1]
            if results:  # else nothing in it is trained, nor before it
                torch.autograd.grad(results, wanted, allow_unused=True)

    def _without_lengths(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        lengths = kwargs.get(LENGTHS)
        if not lengths:
            return dict(kwargs)
        if self._last is None or self._last[0] is not lengths:
            self._last = lengths, torch.tensor([0, *lengths]).cumsum(0)
        rounded_up = 1 << (max(lengths) - 1).bit_length()
        others = {name: value for name, value in kwargs.items() if name != LENGTHS}
        return others | {LONGEST: rounded_up, ENDS_ON_HOST: self._last[1]}


def compile_layers(model: nn.Module, compiled: CompiledLayers) -> None:
    """Have the decoder layers of `model` compiled when they are first run. Only instances change."""
    torch._dynamo.config.recompile_limit = max(MOST_GRAPHS, torch._dynamo.config.recompile_limit)
    # Under DDP torch would split each graph at the ends of DDP's buckets, as those of a whole model. It cannot split
    # layers that are recomputed. torch's notes on DDP have the setting under this name.
    torch._dynamo.config.optimize_ddp = False
    compiled.applied = True
    for layer in _layers(model):
        layer.finetune_kind = _kind(layer)
        layer.finetune_compiled = compiled
        layer.forward = MethodType(_forward, layer)


def why_not_compiled(model: PreTrainedModel) -> str | None:
    """Why the layers of this architecture cannot be one graph each; None where nothing is known against it."""
    layers = _layers(model)
    if not layers:
        return f"{type(model).__name__} has no layers that transformers knows as such"
    if mixers := run_document_by_document(model):
        return f"{type(mixers[0]).__name__} runs on one document after another"
    config: Any = model.config
    if getattr(config.get_text_config(), "attention_chunk_size", None) is not None:
        return "its layers attend in chunks"
    return None


def _layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _kind(layer: Any) -> str:
    """What tells layers of different graphs apart: their structure, kind of attention and recomputation."""
    attentions = [getattr(module, "sliding_window", None) for module in layer.modules()]
    return f"{layer!r} {attentions} {layer.gradient_checkpointing}"


def _forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    compiled: CompiledLayers = layer.finetune_compiled
    hidden = next(iter(_tensors((args, kwargs))))  # [rows, tokens, hidden_size]
    trains = layer.training and torch.is_grad_enabled()
    # A rank without a row gets one of a single token, which would be a graph of its own.
    if compiled.stopped is None and trains and hidden.shape[:2].numel() > 1:
        return compiled.run(layer, hidden, args, kwargs)
    return type(layer).forward(layer, *args, **kwargs)


def _tensors(value: Any) -> Iterable[Tensor]:
    """The tensors of nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(each, change) for each in value])
    return value


def _in_one_line(error: BaseException) -> str:
    """What was raised, and what it was raised from."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:200]
    cause = f" ({_in_one_line(error.__cause__)})" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {first}{cause}"
