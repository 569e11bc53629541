"""Hidden states of recomputed layers wait for their backward in host memory.

Between forward and backward a recomputed layer keeps its input, [T, hidden]: 8,192 bytes a token for Llama 8B, 262,144
in 32 layers. Here a second stream copies each input to pinned memory while its layer computes, and back one layer
ahead, so two are on the device at any time. On a CPU the copy in "host memory" is one more.

    present stream    layer 0   layer 1   layer 2  ...  layer 2   layer 1   layer 0
    copying stream    0 >       1 >       2 >           < 1       < 0

Streams wait for each other by events alone, so memory is used again in the present stream's order, as the plan has it.
`record_stream` would keep it for as long as the host is ahead of the device. A buffer's next copy follows its last one
on the copying stream.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import DoesNotFit, EnvironmentMismatch

_KEY = "training.activation_offloading"


class _State:
    """A layer's input in host memory, and on the device while a pass needs it there."""

    def __init__(self, hidden: Tensor, buffer: Tensor, earlier: weakref.ref[_State] | None) -> None:
        self.on_device: Tensor | None = hidden
        self.on_host = buffer[: hidden.nbytes].view(hidden.dtype).view(hidden.shape)
        self.device = hidden.device
        self.is_copied: Any = None  # an event after the latest copy, in either direction; None on a CPU
        self.earlier = earlier  # the state of the layer before, which backward needs next
        self.version = hidden._version  # counts changes in place; torch's notes on autograd name it
        self.is_saved = False


class StatesOnHost:
    """The hidden states of a model's layers. A state lives as long as autograd's graph; then its buffer is free for the
    next micro-batch's. A run begins with its longest rows, so later states need no larger buffers."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []  # buffers without a state
        self._running: _State | None = None  # of the layer whose forward runs
        self._latest: weakref.ref[_State] | None = None
        self._stream: Any = None  # copies
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def begin(self, layer: Any, args: tuple[Any, ...]) -> None:
        """Before a layer's forward: send its input to the host."""
        if not (layer.training and torch.is_grad_enabled()):
            return
        if not (args and isinstance(args[0], Tensor) and args[0].is_contiguous()):
            raise EnvironmentMismatch(f"{_KEY}: {type(layer).__name__} takes its input by name; set it to false")
        hidden = args[0].detach()
        if not (self._free and (buffer := self._free.pop()).nbytes >= hidden.nbytes):
            pinned = hidden.device.type != "cpu"
            try:
                buffer = torch.empty(hidden.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            except RuntimeError as error:
                size = f"{hidden.nbytes / 2**30:.2f} GiB of pinned host memory"
                raise DoesNotFit(f"{_KEY}: no room for {size}; set it to false, or lower data.max_length") from error
        state = _State(hidden, buffer, self._latest)
        weakref.finalize(state, self._free.append, buffer).atexit = False
        self._latest = weakref.ref(state)
        self._copy(state, state.on_host, hidden)
        self._hooks.__enter__()
        self._running = state

    def end(self, layer: Any, _: Any, output: Any) -> None:
        """After a layer's forward: let go of its input. A layer that fails has no output."""
        state, self._running = self._running, None
        if state is None or state.on_device is None:
            return
        self._hooks.__exit__()
        is_unchanged = state.on_device._version == state.version  # else the copy may have seen either
        if output is not None and not (state.is_saved and is_unchanged):
            raise EnvironmentMismatch(f"{_KEY}: {type(layer).__name__} does not keep its input; set it to false")
        self._wait_for_copy(state)
        state.on_device = None

    def _pack(self, tensor: Tensor) -> Tensor | _State:
        state = self._running
        hidden = state.on_device if state else None
        if state is None or hidden is None or tensor.shape != hidden.shape:
            return tensor
        if tensor.untyped_storage() is not hidden.untyped_storage():
            return tensor
        state.is_saved = True
        return state

    def _unpack(self, saved: Tensor | _State) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        hidden = self._fetched(saved)
        self._wait_for_copy(saved)
        if saved is not self._running:  # it is while a layer is compared with its compiled form, in forward
            saved.on_device = None  # autograd has it now
            if earlier := saved.earlier and saved.earlier():
                self._fetched(earlier)  # while this layer computes
        return hidden

    def _fetched(self, state: _State) -> Tensor:
        """The state on the device. The present stream may not use it before the copy is over."""
        if state.on_device is None:
            state.on_device = torch.empty_like(state.on_host, device=state.device)
            self._copy(state, state.on_device, state.on_host)
        return state.on_device

    def _copy(self, state: _State, target: Tensor, source: Tensor) -> None:
        module = copying_module(state.device)
        if module is None:
            target.copy_(source)
            return
        self._stream = self._stream or module.Stream(state.device)
        self._stream.wait_stream(module.current_stream(state.device))
        with module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            state.is_copied = self._stream.record_event()

    def _wait_for_copy(self, state: _State) -> None:
        if state.is_copied is not None:
            copying_module(state.device).current_stream(state.device).wait_event(state.is_copied)


def copying_module(device: torch.device) -> Any:
    """torch's module of streams for this device; None on a CPU, which copies at once."""
    return None if device.type == "cpu" else torch.get_device_module(device)


def _reach(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    """Have frozen embeddings' output require a gradient. transformers makes it a leaf, which the graph would hold until
    backward ends: [T, hidden]. Here an empty tensor is the leaf."""
    if output.requires_grad or not torch.is_grad_enabled():
        return output
    return torch.cat((output, output.new_empty(0, requires_grad=True)))


def offload_hidden_states(model: PreTrainedModel) -> None:
    """Keep the inputs of a model's recomputed layers in host memory until their backward. Hooks around a layer run
    once, because recomputation runs its forward alone (recomputation.py)."""
    states = StatesOnHost()
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {id(inner) for layer in layers for inner in layer.modules() if inner is not layer}
    for layer in layers:
        if id(layer) not in inside:
            layer.register_forward_pre_hook(states.begin)
            layer.register_forward_hook(states.end, always_call=True)
            layer.finetune_states_on_host = states
    model.disable_input_require_grads()
    model.get_input_embeddings().register_forward_hook(_reach)
