"""Checkpoints written during training: copied to host memory, then written, hashed and synced by a thread.

    training thread:  step | copy | step | step | step ...
    writer thread:          write, hash, sync, rename

One checkpoint is written at a time. A save and the run's end wait for the write before them, and raise its error.
`failed` is a reason to stop, so that no step comes in between. A crash during a write leaves the older checkpoint,
because a checkpoint gets its name when it is complete (checkpoint.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from finetune.launch.rendezvous import collective_timeout
from finetune.measure.host_memory import available_bytes, bytes_below_peak, pinned_bytes
from finetune.measure.units import GIB
from finetune.ranks.heartbeat import this_machine
from finetune.recipe.schema import Recipe
from finetune.run_folder.checkpoint import OwnPieces, Tensors, own_pieces, refuse_not_finite, write_pieces
from finetune.strategies.pieces import Ranks, all_ranks

SPARE_BYTES = GIB  # host memory that a copy leaves free on each machine
BREAK_OFF_SECONDS = 5.0  # a second Ctrl-C waits so long for the files being written


@contextmanager
def saves_in_background(
    recipe: Recipe, say: Callable[[str], None], receivers: Mapping[int, int] = MappingProxyType({})
) -> Iterator[Saves]:
    """A run's saves. At the end of the block the last one is complete, or its failure is raised.

    Every rank enters it at the same time. `receivers` is `Ranks.apart`. If the block fails, the present checkpoint is
    still finished, because it may be the newest good one. With measure_phases every save is in the foreground: then
    no save runs during another phase.
    """
    group = None
    if dist.is_initialized():  # the thread's collectives must not mix with the training's
        group = dist.new_group(backend="gloo", timeout=collective_timeout(recipe))
    behind = all_ranks(group, receivers)
    # NCCL sends no host memory. Both threads may use one group: the training's waits for the write before it.
    ranks = behind if receivers else all_ranks()
    saves = Saves(ranks, behind, say, background=not recipe.measure_phases)
    try:
        yield saves
        saves.finish()
    except Exception:
        saves.join()
        raise
    except BaseException:  # a second Ctrl-C does not wait
        saves.break_off()
        raise


class Saves:
    """Writes checkpoints one at a time, in the background if the host has room for a copy.

    Args:
        ranks: For collectives on the training's thread.
        behind: The same ranks, for collectives on the writer's thread.
        say: Called once if the host has no room.
        background: False: every save is in the foreground.
        room: Returns the bytes that this machine has left, and the bytes that its training may still take.
    """

    def __init__(
        self,
        ranks: Ranks,
        behind: Ranks,
        say: Callable[[str], None],
        *,
        background: bool = True,
        room: Callable[[], tuple[int, int]] = lambda: (available_bytes(), bytes_below_peak()),
    ) -> None:
        self.ranks, self._say, self._background, self._room = ranks, say, background, room
        self._broken_off = threading.Event()
        # Each phase of a write ends in a collective, so a write stops between two phases.
        self._behind = replace(behind, broken_off=self._broken_off)
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the latest write has failed. Then the next `save` or `wait` on every rank raises."""
        return self._failure is not None

    def save(
        self,
        run_dir: Path,
        step: int,
        tensors: Mapping[str, Tensors],
        state: Mapping[str, Any],
        *,
        keep: int,
        best: int | None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Call `write_checkpoint` when the write before it is complete. Every rank calls it.

        It returns when no step can change the written values. `then` is called when the checkpoint exists, perhaps on
        another thread. Raises NotFinite, and EnvironmentMismatch if the write before it failed, on every rank.
        """

        def write(pieces: Mapping[str, OwnPieces], ranks: Ranks) -> None:
            write_pieces(run_dir, step, pieces, state, keep=keep, best=best, ranks=ranks)
            if then is not None:
                then()

        # One write at a time: a second one would need a second copy in host memory.
        self.wait()
        _finish_kernels()
        refuse_not_finite(step, tensors, self.ranks)
        pieces = own_pieces(tensors, self.ranks.rank)
        if not self._has_room(self._copies.bytes_to_allocate(pieces)):
            write(pieces, self.ranks)
            return
        copies = self._copies.copied(pieces)
        _finish_kernels()  # the copies are asynchronous, and the next step changes their sources

        def write_behind() -> None:
            try:
                write(copies, self._behind)
            except BaseException as error:  # raised by the training's thread, in `wait`
                self._failure = error

        self._thread = threading.Thread(target=write_behind, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when no checkpoint is being written; raise the latest write's error."""
        self.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """`wait` after the last save, and give pinned memory back."""
        self.wait()
        self._copies = HostCopies()
        empty = getattr(torch.accelerator, "empty_host_cache", None)  # not in torch 2.11
        if empty is not None and torch.cuda.is_initialized():
            empty()

    def join(self) -> None:
        """Return when no checkpoint is being written, whether it failed or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def break_off(self) -> None:
        """Stop the thread after its present phase. Wait for that, BREAK_OFF_SECONDS at most."""
        self._broken_off.set()
        if self._thread is not None:
            self._thread.join(BREAK_OFF_SECONDS)

    def _has_room(self, nbytes: int) -> bool:
        """Whether every machine has room for its ranks' copies beside their training's peak."""
        if not self._background:
            return False
        left, growth = self._room()
        shortage = machine_without_room(self.ranks, nbytes + growth, left)
        if shortage is None:
            return True
        self._say(
            f"checkpoints: a copy in host memory beside the training's peak needs {shortage[0] / GIB:.1f} GiB of a "
            f"machine, {shortage[1] / GIB:.1f} are left: training waits while a checkpoint is written"
        )
        self._say = lambda _: None  # once is enough
        return False


def machine_without_room(ranks: Ranks, needed: int, left: int) -> tuple[int, int] | None:
    """The bytes that a machine's ranks need and those that it has left, of a machine that has too few; None: none has.

    Every rank calls it with its own need, and with the bytes that it sees.
    """
    machines: dict[str, list[tuple[int, int]]] = {}
    for machine, *figures in ranks.gather((this_machine(), needed, left)):
        machines.setdefault(machine, []).append((figures[0], figures[1]))
    for of_ranks in machines.values():
        # All ranks of a machine see the same free memory at slightly different times, and their needs add up.
        total, least = sum(need for need, _ in of_ranks) + SPARE_BYTES, min(seen for _, seen in of_ranks)
        if total > least:
            return total, least
    return None


def _finish_kernels() -> None:
    """Wait for the GPU: the host reads pinned copies, and the paged state of 8-bit optimizers."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class HostCopies:
    """Copies of a rank's pieces in host memory.

    GPU tensors' copies are in pinned memory. It is allocated at the first copy and reused, because pinning takes longer
    than copying. Copies of tensors in host memory live as long as the result.

    Args:
        on_gpu: Whether a tensor is on a GPU.
    """

    def __init__(self, on_gpu: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda) -> None:
        self._on_gpu = on_gpu
        self._pinned: dict[tuple[str, str], Tensor] = {}

    def bytes_to_allocate(self, pieces: Mapping[str, OwnPieces]) -> int:
        """Host memory in bytes that `copied` would allocate."""
        total = 0
        for group, own in pieces.items():
            for name, tensor in own.tensors.items():
                if name in own.copies or self._reusable(group, name, tensor) is not None:
                    continue
                # torch rounds pinned allocations up.
                total += pinned_bytes(tensor.nbytes) if self._on_gpu(tensor) else tensor.nbytes
        return total

    def copied(self, pieces: Mapping[str, OwnPieces]) -> dict[str, OwnPieces]:
        """Copies of the pieces, which no step changes. A GPU's copies are complete when its present kernels are."""
        return {
            group: replace(own, tensors={name: self._copy(group, name, own) for name in own.tensors})
            for group, own in pieces.items()
        }

    def _copy(self, group: str, name: str, own: OwnPieces) -> Tensor:
        tensor = own.tensors[name]
        if name in own.copies:
            return tensor
        copy = self._reusable(group, name, tensor)
        if copy is None and self._on_gpu(tensor):
            try:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            except RuntimeError:  # WSL pins half of the memory at most. A copy to other memory is slower.
                copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._pinned[group, name] = copy
        elif copy is None:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        return copy.copy_(tensor, non_blocking=True)

    def _reusable(self, group: str, name: str, tensor: Tensor) -> Tensor | None:
        """An earlier copy's pinned memory, if it fits."""
        earlier = self._pinned.get((group, name))
        if earlier is not None and (earlier.shape, earlier.dtype) == (tensor.shape, tensor.dtype):
            return earlier
        return None
