"""Hidden states of recomputed layers wait for their backward in host memory.

Between forward and backward a recomputed layer keeps its input, [T, hidden]: 8,192 bytes a token and layer for Llama
8B, 262,144 in 32 layers. Here each one is copied to host memory while its layer computes, and is brought back one layer
ahead. On a GPU a stream of its own copies, from and to pinned memory. On a CPU the copy in "host memory" is one more.

    forward    compute    layer 0   layer 1   layer 2         backward    layer 2   layer 1   layer 0
               copy       0 >       1 >       2 >                         < 1       < 0

Two layers' states are on the device at any time: in forward the running layer's and its output, in backward the running
layer's and the next one's. The model's own forward refers to the first layer's until it ends.

Present and copying stream wait for each other by events alone. So memory is freed and used again in the present
stream's order, as the plan has it. `record_stream` would keep memory for as long as the host is ahead of the device.

    layer ends          the present stream waits for the copy; then the input's memory is free
    state is fetched    the copying stream waits for what the present stream did with that memory before
    buffer is reused    its next copy follows its last one on the copying stream
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import DoesNotFit, EnvironmentMismatch

KEY = "training.activation_offloading"


class _State:
    """A layer's input, in host memory, on the device, or in both."""

    def __init__(self, hidden: Tensor, buffer: Tensor, earlier: weakref.ref[_State] | None) -> None:
        self.on_device: Tensor | None = hidden
        self.on_host = buffer[: hidden.nbytes].view(hidden.dtype).view(hidden.shape)
        self.device = hidden.device
        self.is_copied: torch.Event | None = None  # the latest copy, in either direction; None on a CPU
        self.earlier = earlier  # the state of the layer before, which backward needs next
        self.version = hidden._version  # torch's notes on autograd name it: it counts changes in place
        self.is_saved = False


class StatesOnHost:
    """The hidden states of a model's layers, from each layer's forward to its backward.

    A state lives as long as autograd's graph. Then its buffer is free for a state of the next micro-batch. A run begins
    with its longest rows, so later states need no larger buffers.
    """

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
            raise EnvironmentMismatch(f"{KEY}: {type(layer).__name__} takes its input by name; set it to false")
        hidden = args[0].detach()
        buffer = self._buffer(hidden)
        state = self._running = _State(hidden, buffer, self._latest)
        weakref.finalize(state, self._free.append, buffer).atexit = False
        self._latest = weakref.ref(state)
        self._copy(state, state.on_host, hidden)
        self._hooks.__enter__()

    def end(self, layer: Any, _: Any, output: Any) -> None:
        """After a layer's forward: let go of its input. A layer that fails has no output."""
        state, self._running = self._running, None
        if state is None or state.on_device is None:
            return
        self._hooks.__exit__()
        is_unchanged = state.on_device._version == state.version  # else the copy may have seen either
        if output is not None and not (state.is_saved and is_unchanged):
            raise EnvironmentMismatch(f"{KEY}: {type(layer).__name__} does not keep its input; set it to false")
        self._wait_for_copy(state)
        state.on_device = None

    def _pack(self, tensor: Tensor) -> Tensor | _State:
        state = self._running
        if state is None or state.on_device is None or tensor.shape != state.on_device.shape:
            return tensor
        if tensor.untyped_storage() is not state.on_device.untyped_storage():
            return tensor
        state.is_saved = True
        return state

    def _unpack(self, saved: Tensor | _State) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        hidden = self._fetched(saved)
        self._wait_for_copy(saved)
        if saved is self._running:  # a layer that is compared with its compiled form, in forward
            return hidden
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

    def _buffer(self, hidden: Tensor) -> Tensor:
        if self._free and (buffer := self._free.pop()).nbytes >= hidden.nbytes:
            return buffer
        try:
            pinned = hidden.device.type != "cpu"
            return torch.empty(hidden.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            room = f"no room in pinned host memory for a layer's {hidden.nbytes / 2**30:.2f} GiB"
            raise DoesNotFit(f"{KEY}: {room}; set it to false, or shorten data.max_length") from error

    def _copy(self, state: _State, target: Tensor, source: Tensor) -> None:
        if state.device.type == "cpu":
            target.copy_(source)
            return
        module: Any = torch.get_device_module(state.device)
        self._stream = self._stream or module.Stream(state.device)
        self._stream.wait_stream(module.current_stream(state.device))
        with module.stream(self._stream):
            target.copy_(source, non_blocking=True)
            state.is_copied = self._stream.record_event()

    def _wait_for_copy(self, state: _State) -> None:
        if state.is_copied is not None:
            module: Any = torch.get_device_module(state.device)
            module.current_stream(state.device).wait_event(state.is_copied)


class _Reached(torch.autograd.Function):
    """Frozen embeddings' output as one that requires a gradient, so that backward computes the first layer's.

    transformers makes it a leaf, which the graph holds until backward's end, and with it [T, hidden].
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, anchor: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None]:
        return None, None


def _reach(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    if output.requires_grad or not torch.is_grad_enabled():
        return output
    reached: Tensor = _Reached.apply(output, torch.empty(0, device=output.device, requires_grad=True))  # type: ignore[no-untyped-call]
    return reached


def offload_hidden_states(model: PreTrainedModel) -> StatesOnHost:
    """Keep the inputs of a model's recomputed layers in host memory until their backward.

    Hooks around a layer run once: recomputation runs its forward alone (recomputation.py).
    """
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
    return states


def states_on_host(layer: nn.Module) -> bool:
    """Whether a layer's input waits in host memory."""
    return hasattr(layer, "finetune_states_on_host")
