"""DeepSpeed's own view of a GPU, on a GPU that is the host: its streams, events and pinned copies are torch.cuda's.

Its collectives are gloo's, and the one compiled part that recipes need, which reads and writes disks, is the host's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

DISKS = "AsyncIOBuilder"  # the one compiled part that the recipes need, and that has nothing of CUDA


def load_engine() -> None:
    """Import what torch compiles when the engine is made: it looks through torch.cuda, so before torch pretends."""
    import_module("deepspeed.runtime.zero.muon.muon_optimizer")


@contextmanager
def deepspeed_on_the_gpu() -> Iterator[None]:
    """Within, DeepSpeed takes this process for one of a GPU; to be entered where torch pretends to have some.

    It works where DeepSpeed is not installed too, and then does nothing.
    """
    try:
        from deepspeed.accelerator import get_accelerator, set_accelerator
    except ImportError:
        yield
        return
    before = get_accelerator()
    set_accelerator(_pretended(before))
    try:
        yield
    finally:
        set_accelerator(before)


def _pretended(host: Any) -> Any:
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    class Pretended(CUDA_Accelerator):
        """CUDA's, which asks torch.cuda, but for what is compiled."""

        def communication_backend_name(self) -> str:
            return "gloo"

        def create_op_builder(self, class_name: str) -> Any:
            return host.create_op_builder(class_name) if class_name == DISKS else None

        def get_op_builder(self, class_name: str) -> Any:
            return host.get_op_builder(class_name) if class_name == DISKS else None

        def available_memory(self, device_index: int | None = None) -> int:
            return int(self.total_memory(device_index) - self.memory_allocated(device_index))

        def lazy_call(self, callback: Any) -> None:
            callback()

        def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None: ...
        def range_pop(self, domain: Any = None) -> None: ...

    return Pretended()
