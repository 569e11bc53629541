"""A GPU for tests on a machine that has none: torch.cuda answers for one, and what it is given is computed on the host.

Whole runs take the branches that they take on a GPU: streams and pinned copies, the varlen kernel (by its formulas),
16-bit products that are added in float32, CUDA's autocast and scaler, its allocator's figures. Not a GPU's: the kernels
themselves, their rounding, their order of summing, NCCL, memory that is full.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

import tests.support.stand_ins.addmm_stand_in
import tests.support.stand_ins.varlen_stand_in
from finetune.training import session
from tests.support.runs.one_rank import let_deepspeed_choose_the_cpu
from tests.support.stand_ins.pretend_deepspeed import deepspeed_on_the_gpu

# All were needed before torch pretends: libraries look for kernels when they are imported.
assert session
assert torch._dynamo
assert tests.support.stand_ins.addmm_stand_in
assert tests.support.stand_ins.varlen_stand_in

GPU, HOST = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), torch.device("cpu")
MEMORY = 80 << 30
_DEVICE_OF: Any = Tensor.device.__get__  # type: ignore[attr-defined]
_IS_CUDA: Any = Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class OnTheHost(TorchFunctionMode):
    """Tensors asked for on the GPU are made on the host, and say that they are on the GPU.

    What is asked for on the host is marked so, with what is computed of such tensors alone; what torch makes inside of
    an operation is the GPU's.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.device, torch._C._nn._parse_to):  # which Module.to asks what it was given
            return func(*args, **kwargs)
        if func == _DEVICE_OF:
            device = func(*args)
            return GPU if device == HOST and not _on_host(args[0]) else device
        if func == _IS_CUDA:
            return not args[0].is_meta and not _on_host(args[0])
        if func is torch.histc and not args[0].is_floating_point():  # CUDA's kernel takes integers, a CPU's does not
            args = args[0].float(), *args[1:]
        asked = _asked_for(func, (*args, *kwargs.values()))
        pinned = kwargs.pop("pin_memory", False)
        given = list(_tensors((*args, *kwargs.values())))
        if func in (Tensor.cuda, Tensor.pin_memory):
            result = args[0]
        else:
            result = func(*map(_here, args), **{name: _here(value) for name, value in kwargs.items()})
        if type(result) not in (Tensor, torch.nn.Parameter, DTensor) or result.is_meta:
            return result
        host = asked == HOST or pinned or func is Tensor.pin_memory
        if asked is None:
            host = host or all(map(_on_host, given))
        moved = given and asked is not None and any(_storage(each) is _storage(result) for each in given)
        if moved and _on_host(result) != host:
            result = result.detach().clone().requires_grad_(result.requires_grad) if result.is_leaf else result.clone()
        if host and (moved or not any(_storage(each) is _storage(result) for each in given)):
            _storage(result).on_host = True
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    """Those among the arguments, and in lists of them, as torch.cat takes one."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _storage(tensor: Any) -> Any:
    """What two views of the same memory have in common; of a sharded tensor, this rank's part's."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def _on_host(tensor: Tensor) -> bool:
    return not tensor.is_meta and getattr(_storage(tensor), "on_host", False)


def _asked_for(func: Any, given: Any) -> torch.device | None:
    """The device that a call names."""
    if func in (Tensor.cuda, Tensor.cpu):
        return GPU if func is Tensor.cuda else HOST
    for value in given:
        if isinstance(value, torch.device):
            return value
        if isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu"):
            return torch.device(value)
    return None


def _here(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return HOST
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class _Stream:
    """Everything given to it is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def is_capturing(self) -> bool:  # which torch 2.14's optimizers ask
        return False

    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


@contextlib.contextmanager
def pretended_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> Iterator[OnTheHost]:
    """Within, this process has one GPU."""
    let_deepspeed_choose_the_cpu()
    properties = SimpleNamespace(
        name="Card 0", total_memory=MEMORY, major=capability[0], minor=capability[1], multi_processor_count=1
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "device_count": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "current_device": int(os.environ.get("LOCAL_RANK", "0")),
        "get_device_capability": capability,
        "get_device_name": "Card 0",
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "mem_get_info": (MEMORY, MEMORY),
        "memory_allocated": 1 << 30,
        "max_memory_allocated": 2 << 30,
        "memory_reserved": 3 << 30,
        "max_memory_reserved": 3 << 30,
        "memory_stats": {},
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache", "ipc_collect"):
        monkeypatch.setattr(torch.cuda, name, _nothing)
    for name in ("reset_peak_memory_stats", "init", "_lazy_init", "set_rng_state", "set_rng_state_all"):
        monkeypatch.setattr(torch.cuda, name, _nothing)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", _nothing, raising=False)  # not in torch 2.11
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: answers["current_device"])
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: _Stream())
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    for name in ("current_stream", "default_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: _Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    began = torch.amp.autocast.__init__

    def autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        began(self, _here(device_type), *args, **kwargs)

    monkeypatch.setattr(torch.amp.autocast, "__init__", autocast)
    # torch leaves the mode for the whole of a backward, in which checkpointed layers are computed again.
    engine = torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        with OnTheHost():
            return engine(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", backward)
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *kind, real=real: real(*map(_here, kind)))
    groups = dist.init_process_group

    def by_gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        groups("gloo", *args, **kwargs | {"device_id": None})

    monkeypatch.setattr(dist, "init_process_group", by_gloo)
    # Layers are given what compiled ones are, and run as they are written: torch compiles none under this mode.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(Tensor, "record_stream", _nothing)  # which looks at the kind of a stream before it asks a mode
    # What a checkpoint keeps is looked at inside of operations too, where the mode is not.
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    monkeypatch.setitem(checks, "default", lambda tensor: {"shape": tensor.shape, "dtype": tensor.dtype})
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # another thread is not under this one's mode
    with OnTheHost() as mode, deepspeed_on_the_gpu():
        yield mode


if __name__ == "__main__":  # a rank of a launcher
    from finetune.train import main

    with pytest.MonkeyPatch.context() as patches, pretended_cuda(patches):
        sys.exit(main())
