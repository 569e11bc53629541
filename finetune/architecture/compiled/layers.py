"""Decoder layers by torch.compile: norms, rotations, activations and sums between the products become a few kernels.

Layers of a kind share a graph. Its sizes are symbols, so one graph serves rows of all lengths. Everything that depends
on the documents reaches it as tensors, and as one number that no length exceeds, rounded up to a power of two.

A graph is one layer with its recomputation, inside the hooks with which a strategy gathers and frees weights. Before
torch 2.13 the graph is the layer alone, and torch's checkpoint runs it twice. There a graph would keep an
autograd.Function's results, such as the kit's adapters, although they are recomputed.

Before its first use each kind of layer is compared with the layer as written, in output and gradients. A compiler may
be wrong without an error: torch 2.11's gave adapters gradients that were exactly zero. Kept bytes are compared too,
because the plan counts on the written layer's. The guard (training/worst_step.py) does this on the longest rows before
the worst step, because the compiler chooses its kernels' blocks by the first sizes that it sees. A kind that the guard
did not meet is compared on its first row.

Training layers run compiled, and within `forwards` those of a long pass without gradients, each kind as a second graph.
An evaluation, samples and rows with a single token run the layer as written, and so does in training the first layer of
a model with adapters, whose input needs no gradient.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.architecture.attention import AMPERE, ENDS_ON_HOST, LENGTHS, LONGEST
from finetune.architecture.by_document import run_document_by_document
from finetune.architecture.families import router_coefficient
from finetune.architecture.guard import Discrepancy, compare_computations, compare_outputs
from finetune.architecture.operations import nested_tensors
from finetune.architecture.own_layers.norm_and_gate import tiled_mlps
from finetune.errors import EnvironmentMismatch
from finetune.files import cache_folder
from finetune.library_errors import with_cause
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.recipe.strategy_fit import not_compiled
from finetune.trial_limit import limited
from finetune.wording import counted

# torch counts graphs by code, and all kinds of layers, recomputed or not, share transformers' wrapper of their forward.
MOST_GRAPHS = 16
# Whether a graph computes again all that its recomputation covers. Seen: torch 2.11 does not, 2.13 and 2.14 do.
GRAPHS_RECOMPUTE = Version(torch.__version__) >= Version("2.13")
# Times the bytes that a layer as written keeps for backward, and bytes beside them. A compiler chooses for itself what
# to keep and what to compute again, and keeps less as a rule. Beside that it keeps scalars and generators' states.
MOST_KEPT, MOST_KEPT_BESIDES = 1.5, 1 << 16


@dataclass
class CompiledLayers:
    """A model's compiled layers, and the result of compiling them."""

    required: bool  # True: a layer that does not compile, or computes otherwise, is an error. False: all run uncompiled
    say: Callable[[str], None]  # a line for the user
    backend: Any = "inductor"
    seconds: dict[tuple[str, bool], float] = field(default_factory=dict)  # by kind: its first forward and backward
    stopped: str | None = None  # why compilation stopped; None while it is on
    applied: bool = False  # the layers of a model have been given to it
    differences: list[Discrepancy] = field(default_factory=list)  # from the layers as they are written, by kind
    graphs: Counter[str] = field(default_factory=Counter)  # `found` in the cache folder, and `made`
    input_needs_grad: bool | None = None  # whether the next layer's input does; None outside `comparing`
    forwards_too: bool = False  # layers in evaluation mode are compiled as well
    forward_seconds: dict[str, float] = field(default_factory=dict)  # of a kind's first forward without gradients
    _functions: dict[Any, Callable[..., Any]] = field(default_factory=dict)  # by a layer as it is written
    _last: tuple[tuple[int, ...], Tensor] | None = None  # the last row's document lengths, and their ends

    def run(self, layer: Any, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output. Raises EnvironmentMismatch where `required` and its first forward or backward fails."""
        needs_grad = hidden.requires_grad
        if not self._alone(layer, needs_grad) and self._may_run_compiled(layer, needs_grad, args, kwargs):
            try:
                return self._call(layer, args, self._without_lengths(kwargs))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of whatever class: torch has no public names for those of its compiler
                self.stop(with_cause(error))
        return _as_written(layer)(layer, *args, **kwargs)

    @contextmanager
    def forwards(self) -> Iterator[None]:
        """Within the block, layers in evaluation mode and without gradients run compiled too."""
        self.forwards_too = True
        try:
            yield
        finally:
            self.forwards_too = False

    def run_forward(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output without gradients. A kind's first one is compared with the layer as written."""

        def as_written() -> Any:
            return _as_written(layer)(layer, *args, **kwargs)

        def compiled() -> Any:
            # The first layer's input requires a gradient where layers are recomputed. Detach it: otherwise torch
            # compiles a second graph.
            given = _mapped(args, Tensor.detach)
            options = _mapped(self._without_lengths(kwargs), Tensor.detach)
            for tensor in nested_tensors((given, options)):
                torch._dynamo.maybe_mark_dynamic(tensor, list(range(tensor.ndim)))  # as in _call
            return self._function(_as_written(layer))(layer, *given, **options)

        if layer.finetune_kind in self.forward_seconds:
            return compiled()
        began, name = time.perf_counter(), type(layer).__name__
        try:
            with limited(f"training.compile: {name}", "training.compile: false"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # those of the compiler about torch's own code and ours
                hidden = next(nested_tensors((args, kwargs)))
                difference = compare_outputs(lambda _: compiled(), lambda _: as_written(), [hidden])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of whatever class: torch has no public names for those of its compiler
            self.stop(with_cause(error))
            return as_written()
        self.forward_seconds[layer.finetune_kind] = time.perf_counter() - began
        if difference.is_fault:
            self.stop(f"compiled without gradients, {name} computes something else: {difference}")
            return as_written()
        return compiled()

    @contextmanager
    def comparing(self, reached: bool) -> Iterator[None]:
        """Within the block, layers run as written, without gradients, and each kind is compared on its inputs.

        Args:
            reached: Whether the first layer's input needs a gradient.
        """
        self.input_needs_grad = reached
        try:
            yield
        finally:
            self.input_needs_grad = None

    def look(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer as written, and compare its kind if that is new. Use it within `comparing`."""
        output = _as_written(layer)(layer, *args, **kwargs)
        reached = bool(self.input_needs_grad)
        known = (layer.finetune_kind, reached) in self.seconds or self._alone(layer, reached)
        if self.stopped is None and not known:
            self._may_run_compiled(layer, reached, args, kwargs)
        self.input_needs_grad = reached or any(parameter.requires_grad for parameter in layer.parameters())
        return output

    @staticmethod
    def _alone(layer: Any, reached: bool) -> bool:
        """Whether this is the first layer with adapters, whose input needs no gradient. It would need its own graph,
        which compiles as long as the graph that all other layers share. It runs as written: 0.5 % of a step with 32
        layers."""
        return layer.finetune_trained and not reached

    def stop(self, reason: str) -> None:
        """Run all layers as they are written from here on, and say so."""
        self.stopped = reason
        self.say(f"training.compile: layers run without it from here on: {reason}")

    def agree(self, total: Callable[[Tensor], Any], device: torch.device) -> None:
        """If one rank has stopped, stop on all. Every rank calls it. `total` sums a tensor over the ranks.

        Raises EnvironmentMismatch on all of them where `required`.
        """
        if not self.applied:
            return
        stopped = int(total(torch.tensor(int(self.stopped is not None), device=device)))
        if stopped and self.stopped is None:
            self.stop("another rank has stopped, for its own reason")
        if stopped and self.required:
            raise EnvironmentMismatch(f"training.compile: true: {self.stopped}; set training.compile: auto, or false")

    def facts(self) -> dict[str, Any]:
        """For the receipt."""
        return {
            "layers": self.stopped is None and bool(self.seconds),
            "kinds_of_layers": len(self.seconds),
            "first_seconds": round(sum(self.seconds.values()), 1),
            "graphs": {"found": self.graphs["found"], "made": self.graphs["made"], "folder": _graph_folder()},
            "furthest": max((difference.relative for difference in self.differences), default=None),
            "left_off": self.stopped,
        }

    def __str__(self) -> str:
        if self.stopped is not None or not self.seconds:
            return ""
        kinds = counted(len(self.seconds), "kind of layers", "kinds of layers")
        graphs = f"graphs: {self.graphs['found']} found, {self.graphs['made']} made, in {_graph_folder()}"
        return f"compiled: {kinds}, forward and backward, in {sum(self.seconds.values()):.1f} s; {graphs}"

    def _call(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not getattr(layer, "gradient_checkpointing", False) or GRAPHS_RECOMPUTE:
            return self._function(_as_written(layer))(layer, *args, **kwargs)
        return layer._gradient_checkpointing_func(partial(self._run_inside_checkpoint, layer, **kwargs), *args)

    def _run_inside_checkpoint(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a layer that transformers recomputes outside its graph."""
        layer.gradient_checkpointing = False  # transformers' wrapper, which the graph includes, reads it
        try:
            return self._function(_as_written(layer))(layer, *args, **kwargs)
        finally:
            layer.gradient_checkpointing = True

    def _function(self, as_written: Any) -> Callable[..., Any]:
        function = self._functions.get(as_written)
        if function is None:
            # Dropout by torch's own kernels draws what the layer as it is written draws, so the two can be compared.
            options: Any = {"fallback_random": True} if self.backend == "inductor" else None
            function = torch.compile(as_written, backend=self.backend, fullgraph=True, dynamic=True, options=options)
            self._functions[as_written] = function
        return function

    def _may_run_compiled(self, layer: Any, reached: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the compiled layer may run: its kind was compared, or is compared now.

        This runs only this layer's forward and backward, and drops the results. A failure in the whole model's backward
        would come between the other ranks' collectives.
        """
        kind = layer.finetune_kind, reached
        if self.stopped is not None or kind in self.seconds:
            return self.stopped is None
        began, name, before = time.perf_counter(), type(layer).__name__, _cached_graphs()
        try:
            with limited(f"training.compile: {name}", "training.compile: false"):
                difference, too_much = self._compared(layer, reached, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of whatever class: torch has no public names for those of its compiler
            reason = with_cause(error)
            if self.required:
                raise EnvironmentMismatch(
                    f"training.compile: {name} cannot be compiled here: {reason}; set training.compile: auto, or false"
                ) from error
            self.stop(reason)
            return False
        self.seconds[kind] = time.perf_counter() - began
        self.graphs.update(_cached_graphs() - before)
        self.differences.append(difference)
        if difference.is_fault:
            self.stop(f"compiled, {name} computes something else: {difference}")
        elif too_much is not None:
            self.stop(f"compiled, {name} {too_much}")
        return self.stopped is None

    def _compared(
        self, layer: Any, reached: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Discrepancy, str | None]:
        """The layer compiled against the layer as it is written, on this input; and whether it keeps too much."""
        hidden, *others = nested_tensors((args, kwargs))
        inputs = [hidden.detach().requires_grad_(reached), *(tensor for tensor in others if tensor.requires_grad)]
        places = [id(hidden), *(id(tensor) for tensor in others if tensor.requires_grad)]

        def given(values: Any, leaves: Iterable[Tensor]) -> Any:
            by_place = dict(zip(places, leaves, strict=True))
            return _mapped(values, lambda tensor: by_place.get(id(tensor), tensor))

        def compiled(*leaves: Tensor) -> Any:
            values = given((args, self._without_lengths(kwargs)), leaves)
            for tensor in nested_tensors(values):
                # Mark every size dynamic. If the first row's length equals the model's width, torch assumes that they
                # are always equal, and compiles again for the next row. torch's guide to dynamic shapes names this
                # function. Only the first call compiles, so later ones need no marks, which cost the host a tenth of a
                # layer's time.
                torch._dynamo.maybe_mark_dynamic(tensor, list(range(tensor.ndim)))
            return self._call(layer, *values)

        def as_written(*leaves: Tensor) -> Any:
            again, options = given((args, kwargs), leaves)
            return _as_written(layer)(layer, *again, **options)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the compiler about torch's own code and ours
            difference = compare_computations(compiled, as_written, inputs, dict(layer.named_parameters()))
            return difference, _keeps_too_much(compiled, as_written, inputs)

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
    for layer in tiled_mlps(model) or _layers(model):
        # The key that tells layers with different graphs apart: structure, attention kind and recomputation.
        attentions = [getattr(module, "sliding_window", None) for module in layer.modules()]
        layer.finetune_kind = f"{layer!r} {attentions} {getattr(layer, 'gradient_checkpointing', False)}"
        layer.finetune_compiled = compiled
        layer.finetune_trained = any(parameter.requires_grad for parameter in layer.parameters())
        if hasattr(layer, "finetune_untiled"):
            layer.finetune_tile = MethodType(_forward, layer)
        else:
            layer.forward = MethodType(_forward, layer)


def why_not_compiled(model: PreTrainedModel) -> str | None:
    """Why the layers of this architecture cannot be one graph each; None where nothing is known against it."""
    layers = _layers(model)
    if not layers:
        return f"{type(model).__name__} has no layers that transformers knows as such"
    if any(hasattr(module, "finetune_transposed") for module in model.modules()):
        return "experts in 4 bits are unpacked inside layers, which is not tried with graphs"
    if mixers := run_document_by_document(model):
        return f"{type(mixers[0]).__name__} runs on one document after another"
    config: Any = model.config
    if getattr(config.get_text_config(), "attention_chunk_size", None) is not None:
        return "its layers attend in chunks"
    return None


def _layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _as_written(layer: Any) -> Callable[..., Any]:
    """A decoder layer's function; or that of a tile of an MLP, whose layer's graph would hold one number of tiles."""
    function: Callable[..., Any] = getattr(layer, "finetune_untiled", type(layer).forward)
    return function


def _keeps_too_much(
    compiled: Callable[..., Any], as_written: Callable[..., Any], inputs: Sequence[Tensor]
) -> str | None:
    """Why a compiled layer takes more memory until backward than the plan counts on; None where it does not."""
    with torch.enable_grad(), torch.random.fork_rng([inputs[0].device] if inputs[0].is_cuda else []):
        kept, expected = (_kept_for_backward(partial(call, *inputs)) for call in (compiled, as_written))
    allowed = round(MOST_KEPT * expected) + MOST_KEPT_BESIDES
    if kept <= allowed:
        return None
    return f"keeps {kept:,} bytes for backward, as it is written {expected:,}; {allowed:,} are allowed"


def _kept_for_backward(call: Callable[[], Any]) -> int:
    """Bytes that a forward keeps beside its output. Tensors that a second forward keeps too were there before: weights,
    inputs.
    """
    kept: list[dict[int, int]] = []
    held, outputs = list[Tensor](), list[Any]()  # until the end, so that no two storages have one address

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor)
        storage = tensor.untyped_storage()
        kept[-1][storage.data_ptr()] = storage.nbytes()
        return tensor

    for _ in range(2):
        kept.append({})
        torch.clear_autocast_cache()  # of the copies of weights, which the first would leave to the second
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs.append(call())
    first, second = kept
    free = second.keys() | {tensor.untyped_storage().data_ptr() for tensor in nested_tensors(outputs)}
    return sum(nbytes for at, nbytes in first.items() if at not in free)


def _forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    compiled: CompiledLayers = layer.finetune_compiled
    hidden = next(nested_tensors((args, kwargs)))  # [rows, tokens, hidden_size]; a tile is [tokens, hidden_size]
    # A rank without a row gets one of a single token, which would be a graph of its own.
    if hidden.shape[:-1].numel() > 1:
        if layer.training and compiled.input_needs_grad is not None:
            return compiled.look(layer, args, kwargs)
        if layer.training and compiled.stopped is None and torch.is_grad_enabled():
            return compiled.run(layer, hidden, args, kwargs)
        if compiled.forwards_too and compiled.stopped is None and not torch.is_grad_enabled():
            return compiled.run_forward(layer, args, kwargs)
    return _as_written(layer)(layer, *args, **kwargs)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(entry, change) for entry in value])
    return value


CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
SWITCHED_OFF = "training.compile: false"
# No flash kernel takes float32, so a compiled layer attends by one operator, which computes attention a second time in
# backward. Nobody has measured whether the rest of the layer makes up for that.
NOT_BY_AUTO = ("no",)
FLOAT32 = "in float32, where compiled attention is computed twice; training.compile: true compiles it"


def compile_as_asked(
    recipe: Recipe, strategy: Strategy, model: PreTrainedModel, device: torch.device, say: Callable[[str], None]
) -> CompiledLayers:
    """Have the layers of an assembled model compiled, where the recipe asks for it and it can be.

    Raises EnvironmentMismatch where `training.compile: true` cannot be.
    """
    setting = recipe.training.compile
    compiled = CompiledLayers(required=setting is True, say=say)
    if setting is False:
        compiled.stopped = SWITCHED_OFF
    elif setting == "auto" and device.type != "cuda":
        compiled.stopped = "on a CPU, where training.compile: auto compiles nothing"
    elif setting == "auto" and (older := torch.cuda.get_device_capability(device)) < AMPERE:
        # Triton supports compute capability 8.0 and later. Before, its compilers may end the process by a signal, which
        # nothing here can catch.
        compiled.stopped = (
            f"on a GPU of compute capability {older[0]}.{older[1]}; training.compile: auto compiles from 8.0 on"
        )
    elif reason := why_left_off(recipe, strategy, model):
        if setting is True:
            raise EnvironmentMismatch(f"training.compile: true: {reason}; set training.compile: false")
        compiled.stopped = reason
    else:
        keep_graphs()
        compile_layers(model, compiled)
    return compiled


def why_left_off(recipe: Recipe, strategy: Strategy, model: PreTrainedModel) -> str | None:
    """Why layers run as they are written on any GPU; None where nothing is known against compiling them."""
    if recipe.training.compile is False:
        return SWITCHED_OFF
    if recipe.training.compile == "auto" and recipe.training.mixed_precision in NOT_BY_AUTO:
        return FLOAT32
    reason = not_compiled(recipe, strategy) or why_not_compiled(model)
    if reason is None and router_coefficient(model.config, recipe):
        # transformers' hooks also collect routers' outputs in a layer's trial, whose graph is gone when the loss reads.
        reason = "the router's auxiliary loss reads routers inside of the layers"
    return reason


def keep_graphs(environment: MutableMapping[str, str] = os.environ) -> Path:
    """Have compiled graphs kept in the kit's cache folder, so that the next start of the same training finds them; in
    another folder where the user has named one."""
    return Path(environment.setdefault(CACHE_VARIABLE, str(cache_folder() / "compiled")))


def _graph_folder() -> str:
    return os.environ.get(CACHE_VARIABLE, "")


def _cached_graphs() -> Counter[str]:
    """How many forward and backward graphs this process found in the cache folder, and how many it made.

    torch counts both under names that are not documented; tests/architecture/test_compiled.py would turn red.
    """
    counts = torch._dynamo.utils.counters["inductor"]
    return Counter(
        found=counts["fxgraph_cache_hit"], made=counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"]
    )
