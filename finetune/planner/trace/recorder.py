"""Fill a timeline while the trainer's step runs. An operation and a module decide each new storage's component."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents the class under this name alone

from finetune.architecture.operations import nested_tensors
from finetune.measure.live_tensors import NONE, LiveTensors, parts
from finetune.measure.phases import Phases
from finetune.planner.trace.fake_device import stream_in_use
from finetune.planner.trace.timeline import Event, Timeline, layer_of

# The components of results of these libraries' operations, whatever module calls them.
BY_NAMESPACE = {"fsdp": "communication buffers", "bitsandbytes": "quantisation workspace"}
COLLECTIVES = ("c10d", "_c10d_functional")
WEIGHT_COMPONENTS = ("parameters", "gathered layers")
# Takes an operation, its arguments, and a function that runs the operation on them.
AroundOperation = Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]


class Recorder:
    """Ledger, phases and dispatch mode that write one timeline.

    `phases` is the trainer's own. It runs the ledger, and the ledger calls `_changed` for each storage. A collective's
    argument without a certain component is a communication buffer. A storage that FSDP2 frees and refills is a gathered
    layer.
    """

    def __init__(self, device: torch.device, fake_mode: Any = None) -> None:
        self.timeline = Timeline()
        self.ledger = LiveTensors(callback=self._changed)
        self.ledger.fake_mode = fake_mode
        self.phases = Phases(device, enabled=True, ledger=self.ledger)
        self.operation: Any = None
        self.of_weights = False  # the running operation casts a weight
        self._fixed: set[int] = set()  # storages with a certain component
        self._unseen: dict[int, str] = {}  # components of storages not seen yet, by identity
        self._stack: list[str] = []  # modules that run forward, the innermost last
        self._latest = ""  # the module that was entered or left last
        self._place: dict[tuple[str, str], int] = {}
        self._names: dict[int, str] = {}
        self._head: str | None = None

    def mark(self, tensors: Iterable[torch.Tensor | None], component: str, *, certain: bool = True) -> None:
        """Set the component of these tensors' storages. Only a certain component replaces a certain one."""
        for tensor in tensors:
            if tensor is None:
                continue
            for part in parts(tensor):
                storage = part.untyped_storage()
                serial = self.ledger.serial(storage)
                if serial is None:
                    self._unseen[id(storage)] = component
                elif certain or serial not in self._fixed:
                    self.timeline.components[serial] = component
                    if certain:
                        self._fixed.add(serial)

    def place_in_layer(self, tensor: torch.Tensor, name: str) -> None:
        """Record a tensor's decoder layer, by its own name or its parameter's."""
        layer = layer_of(name)
        for part in parts(tensor):
            serial = self.ledger.serial(part.untyped_storage())
            if layer is not None and serial is not None:
                self.timeline.layers[serial] = layer

    def component(self, tensor: torch.Tensor) -> str | None:
        """The component of a tensor's storage; None if it was not seen yet."""
        for part in parts(tensor):
            serial = self.ledger.serial(part.untyped_storage())
            if serial is None:
                return None
            return self.timeline.components[serial]
        return None

    def begin_operation(self, operation: Any, args: tuple[Any, ...]) -> None:
        """Call this before an operation runs on these arguments, because they are live meanwhile."""
        self.operation, self.of_weights = operation, False
        self._unseen.clear()
        namespace = operation.namespace
        if namespace in COLLECTIVES:
            self.mark(nested_tensors(args), "communication buffers", certain=False)
        elif namespace == "fsdp" and "chunk_cat" in str(operation):
            self.mark(nested_tensors(args[0]), "unsharded gradients", certain=False)
        elif str(operation) == "aten._to_copy.default":
            self.of_weights = self.component(args[0]) in WEIGHT_COMPONENTS

    @contextmanager
    def modules(self, model: nn.Module, head: nn.Module | None) -> Iterator[None]:
        """Within the block, track the module that runs, forward and backward."""
        self._names = {id(module): name for name, module in model.named_modules()}
        if head is not None:
            self._head = self._names[id(head)]

        def entered(module: nn.Module, _: Any) -> None:
            self.ledger.book_ends()  # the caller lets go of a layer's input when the layer has returned
            outer = self._stack[-1] if self._stack else ""
            self._latest = self._names.get(id(module), outer)
            self._stack.append(self._latest)

        def exited(module: nn.Module, _: Any, output: Any) -> None:
            name = self._stack.pop()
            self._latest = self._stack[-1] if self._stack else name
            if self.phases.current == "forward":
                for tensor in nested_tensors(output):
                    if tensor.requires_grad:  # backward reaches the module where its output has a gradient
                        tensor.register_hook(partial(self._reached, name))

        hooks = [register_module_forward_pre_hook(entered), register_module_forward_hook(exited, always_call=True)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _reached(self, name: str, _: torch.Tensor) -> None:
        self._latest = name

    def _changed(self, serial: int, device: str, nbytes: int) -> None:
        timeline = self.timeline
        if serial == NONE:
            self._latest = ""
        elif serial == len(timeline.devices):
            timeline.devices.append(device)
            timeline.components.append(self._guess())
            if stream := stream_in_use():
                timeline.streams[serial] = stream
        elif nbytes and serial not in self._fixed:  # resized
            timeline.components[serial] = "gathered layers"
            self._fixed.add(serial)
        key = (self.phases.current, self._latest)
        if key not in self._place:
            self._place[key] = len(timeline.places)
            timeline.places.append(key)
        timeline.events.append(Event(serial, nbytes, self._place[key]))

    def _guess(self) -> str:
        phase = self.phases.current
        if self.operation is None or phase not in ("forward", "backward"):
            return "other"
        namespace = self.operation.namespace
        if namespace in BY_NAMESPACE:
            return BY_NAMESPACE[namespace]
        if namespace in COLLECTIVES:
            return "communication buffers"
        if self.of_weights:
            return "cast weights"
        if self._stack:  # a forward is running: the first, or its recomputation
            if self._stack[-1] == self._head:
                return "logits and loss"
            return "activations"
        if phase == "backward":
            return "backward workspace"
        return "other"


class OnOperations(TorchDispatchMode):
    """Calls functions around each operation while it is entered, the first one outermost.

    They share one mode, because each mode on torch's stack takes microseconds an operation.
    """

    def __init__(self, *functions: AroundOperation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no constructor here
        self._functions = functions

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):  # a wrapper; torch dispatches its parts again
            return NotImplemented
        return self._call(0, func, args, kwargs or {})

    def _call(self, at: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if at == len(self._functions):
            return func(*args, **kwargs)
        return self._functions[at](func, args, kwargs, partial(self._call, at + 1, func, args, kwargs))


def tagging(recorder: Recorder, *, gloo: bool) -> AroundOperation:
    """Pass each operation to the recorder. Enter it after the phases' own mode, so that it runs first.

    Args:
        gloo: The CPU ranks' backend, which reduces and scatters a copy of its input.
    """

    def tag(func: Any, args: tuple[Any, ...], _: dict[str, Any], run: Callable[[], Any]) -> Any:
        recorder.begin_operation(func, args)
        if gloo and str(func) == "c10d._reduce_scatter_base_.default":
            recorder.ledger.see(args[1].clone())
        return run()

    return tag
