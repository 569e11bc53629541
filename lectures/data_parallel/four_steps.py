"""DataParallel's four steps, one by one: scatter, replicate, forward and gather of `torch.nn.DataParallel.forward`.

On GPUs they are torch's own functions, on the devices that they are given. torch has none of them for a CPU, so there
they are played: threads run replicas, whose weights are copied from the master's in every step by an operation that
autograd knows. So backward sums the replicas' gradients into the master's, as it does on GPUs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents the class under this name alone

from finetune.measure.live_tensors import LiveTensors


@dataclass(frozen=True)
class PlayedReplica:
    """A module and the weights that it computes with; on the master the module's own."""

    module: nn.Module
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class FourSteps:
    """The steps for one module; the first replica is the master."""

    scatter: Callable[[Tensor], Sequence[Tensor]]  # [rows, tokens] -> a part of the rows for each replica
    replicate: Callable[[], Sequence[PlayedReplica]]
    forward: Callable[[Sequence[PlayedReplica], Sequence[Tensor]], Sequence[Tensor]]
    gather: Callable[[Sequence[Tensor]], Tensor]
    on_master: Callable[[], AbstractContextManager[Any]] = nullcontext  # around what the master computes alone


def on_gpus(module: nn.Module, devices: Sequence[int]) -> FourSteps:
    """torch's own, over these GPUs; the module is on the first."""
    from torch.nn.parallel import gather, parallel_apply, replicate, scatter

    def replicas() -> list[PlayedReplica]:
        # Weights of a replica are plain tensors, which torch keeps beside its parameters.
        made = replicate(module, devices)
        names = [name for name, _ in module.named_parameters()]
        return [PlayedReplica(each, {name: _attribute(each, name) for name in names}) for each in made]

    return FourSteps(
        scatter=lambda ids: [part for (part,) in scatter((ids,), devices)],
        replicate=replicas,
        forward=lambda replicas, parts: parallel_apply(
            [each.module for each in replicas], [(part,) for part in parts], devices=list(devices)
        ),
        gather=lambda outputs: gather(outputs, devices[0]),
    )


def _attribute(module: nn.Module, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


def played(module: nn.Module, count: int, ledgers: Sequence[LiveTensors] | None = None) -> FourSteps:
    """The same on a CPU, by threads over `count` replicas.

    Args:
        ledgers: One for each replica: they count the bytes of its own tensors, as if it were a device; slower.
    """
    structures = [module, *(_structure_of(module) for _ in range(count - 1))]

    def watched(replica: int) -> AbstractContextManager[Any]:
        return nullcontext() if ledgers is None else _Watched(ledgers[replica])

    def owned(replica: int, values: Any) -> None:
        if ledgers is not None:
            ledgers[replica].see(values)

    def scattered(ids: Tensor) -> list[Tensor]:
        parts = [part.clone() for part in ids.chunk(count)]
        for replica, part in enumerate(parts):
            owned(replica, part)
        return parts

    def replicated() -> list[PlayedReplica]:
        weights = dict(module.named_parameters())
        replicas = [PlayedReplica(module, weights)]
        for replica in range(1, count):
            copies = {name: weight.clone() for name, weight in weights.items()}
            owned(replica, copies)
            replicas.append(PlayedReplica(structures[replica], copies))
        return replicas

    def forward(replicas: Sequence[PlayedReplica], parts: Sequence[Tensor]) -> list[Tensor]:
        def run(replica: int) -> Tensor:
            each = replicas[replica]
            with watched(replica):
                output: Tensor = torch.func.functional_call(each.module, dict(each.weights), (parts[replica],))
            return output

        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(run, range(len(parts))))

    def gathered(outputs: Sequence[Tensor]) -> Tensor:
        with watched(0):
            return torch.cat(list(outputs))

    return FourSteps(scattered, replicated, forward, gathered, lambda: watched(0))


def _structure_of(module: nn.Module) -> nn.Module:
    """A module of the same structure, with buffers of its own and the very weights of the other."""
    return copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})


class _Watched(TorchDispatchMode):
    """Passes the tensors that operations make to a ledger; those that they are given belong to whoever made them."""

    def __init__(self, ledger: LiveTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no constructor here
        self._ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._ledger.see(result)
        return result


def bytes_of(values: Sequence[Tensor]) -> int:
    """Bytes of the elements of these tensors."""
    return sum(value.numel() * value.element_size() for value in values)


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Within, an operation has one core: a replica is to a thread what it is to a GPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
