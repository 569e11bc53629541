"""What DDP's reducer does with memory, in Python: the real one is C++ and reads addresses, which a trace has none of.

Read from torch 2.13, csrc/distributed/c10d/reducer.cpp, with `gradient_as_bucket_view`. Buckets as large as all
gradients are there from construction on. In a backward that reduces, each gradient is copied into its bucket when it
is ready, and becomes a view of it. In one that does not (`no_sync`), gradients are tensors of their own, beside the
buckets, until the next that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes; a bucket is full when it has reached them


class Replica(nn.Module):
    """Stands in a trace where `torch.nn.parallel.DistributedDataParallel` stands in a training."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        super().__init__()
        self.module = module
        self.reducing = True
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for together in _buckets(reversed(trained)):
            flat = together[0].new_empty(sum(parameter.numel() for parameter in together))
            for parameter, view in zip(together, flat.split([each.numel() for each in together]), strict=True):
                self._views[parameter] = view.view_as(parameter)
                parameter.register_post_accumulate_grad_hook(self._ready)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As DDP's: gradients stay this rank's."""
        self.reducing = False
        try:
            yield
        finally:
            self.reducing = True

    @torch.no_grad()
    def _ready(self, parameter: torch.Tensor) -> None:
        if self.reducing:
            assert parameter.grad is not None
            view = self._views[parameter]  # type: ignore[index]
            parameter.grad = view.copy_(parameter.grad)


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one number format together, up to a size."""
    full: dict[torch.dtype, int] = {}
    open_: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        together = open_.setdefault(parameter.dtype, [])
        together.append(parameter)
        if sum(each.numel() for each in together) * parameter.itemsize >= full.get(parameter.dtype, FIRST_BUCKET):
            full[parameter.dtype] = BUCKET
            yield open_.pop(parameter.dtype)
    yield from open_.values()
