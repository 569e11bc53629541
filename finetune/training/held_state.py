"""Weights and optimizer state before the worst step, which goes back to them to the bit.

Each rank copies its own shards to host memory, and nothing is written. The disk still proves that it has room for a
checkpoint: posix_fallocate reserves the bytes without writing them. If a machine has no memory for the copies, or the
file system cannot reserve, a temporary checkpoint on the disk takes their place.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.files import TEMPORARY_PREFIX, remove_folder
from finetune.library_errors import library_errors
from finetune.measure.host_memory import available_bytes, bytes_below_peak
from finetune.measure.units import GIB
from finetune.recipe.optimizers import checkpoint_bytes
from finetune.recipe.schema import Recipe
from finetune.run_folder.background import machine_without_room
from finetune.run_folder.checkpoint import act_on_every_rank, own_pieces, refuse_not_finite, write_checkpoint
from finetune.run_folder.save_restore import checkpoint_tensors, fill_from, on_every_machine
from finetune.run_folder.trained_tensors import model_tensors
from finetune.strategies.assemble import Assembled
from finetune.strategies.pieces import Ranks, Stored, local_part, reshard

# If the step itself takes host memory (on a CPU, and with offload), gradients and two moments take three times the
# weights' bytes. As much again is left to activations.
COPIES_BESIDE_A_STEP = 8
SAMPLE_BYTES = 64 * 2**20  # whose writing tells the disk's speed


@dataclass(frozen=True)
class Held:
    """The state before the worst step: copies in host memory, or a temporary checkpoint."""

    parts: Assembled
    ranks: Ranks
    nbytes: int = 0  # of this rank's copies in host memory, which live until the step is over; 0: it is on the disk
    folder: Path | None = None  # of the temporary checkpoint
    weights: Mapping[str, Any] = field(default_factory=dict)  # copies; under ZeRO `Stored` pieces
    states: Mapping[Any, Any] = field(default_factory=dict)  # of the optimizer, by parameter; under ZeRO by name

    def restore(self) -> None:
        """Fill weights and optimizer from it. Every rank calls it."""
        if self.folder is not None:
            with on_every_machine(self.folder, self.ranks):
                fill_from(self.parts, self.folder, hashes=self.ranks.rank == 0 or self.ranks.rank in self.ranks.apart)
            self.ranks.gather(None)  # the files may be deleted only after every rank has read them
        elif self.parts.engine is not None:
            from finetune.strategies.zero_state import load_pieces

            load_pieces(self.parts.engine, self.weights, self.states)
        else:
            reshard(self.parts.unwrapped_model)
            optimizer = self.parts.optimizer.state
            with torch.no_grad():
                for name, weight in model_tensors(self.parts.unwrapped_model).items():
                    local_part(weight)[0].copy_(self.weights[name])
                for parameter in [*optimizer]:
                    if parameter not in self.states:
                        del optimizer[parameter]
                        continue
                    for key, value in self.states[parameter].items():
                        if isinstance(value, Tensor):
                            local_part(optimizer[parameter][key])[0].copy_(value)
                        else:
                            optimizer[parameter][key] = value


def hold_state(recipe: Recipe, parts: Assembled, ranks: Ranks, *, on_host: bool) -> Held:
    """Keep the present weights and optimizer state. Every rank calls it.

    Args:
        ranks: As the run's saves have them.
        on_host: The step itself takes host memory.

    Raises:
        NotFinite: a tensor on any rank holds a NaN or an infinity.
        EnvironmentMismatch: the disk has no room for a checkpoint, or cannot be written.
    """
    tensors = checkpoint_tensors(parts)
    refuse_not_finite(0, tensors, ranks)  # on the tensors' device
    groups = own_pieces(tensors, ranks.rank)
    pieces = [tensor for own in groups.values() for tensor in own.tensors.values()]
    live = _live_tensors(parts)
    nbytes = sum(tensor.nbytes for tensor in (pieces if parts.engine is not None else live))
    needed = nbytes * (COPIES_BESIDE_A_STEP if on_host else 1)
    if parts.engine is not None:
        needed -= nbytes  # its pieces are copies already
    # A new run's optimizer has no state yet, but its checkpoints will.
    later = checkpoint_bytes(recipe.training, sum(tensor.numel() for tensor in groups["model"].tensors.values()))
    reserved = _disk_reserves(temporary_folder(recipe), max(later, sum(piece.nbytes for piece in pieces)), ranks)
    if reserved and machine_without_room(ranks, needed + bytes_below_peak(), available_bytes()) is None:
        if parts.engine is None:
            return Held(parts, ranks, nbytes, None, *_live_copies(parts))
        # Rank 0 alone has the step counts, which every rank reads.
        steps = ranks.gather({name: piece for name, piece in tensors["optimizer"].items() if name.endswith(":step")})[0]
        held = [
            {name: Stored.in_memory(name, piece) for name, piece in named.items()}
            for named in (tensors["model"], {**tensors["optimizer"], **steps})
        ]
        return Held(parts, ranks, nbytes, None, *held)
    folder = write_checkpoint(temporary_folder(recipe), 0, tensors, {}, keep=1, ranks=ranks)
    return Held(parts, ranks, folder=folder)


@dataclass(frozen=True)
class PlannedSave:
    """A checkpoint's writing beside the time that a signal leaves for it."""

    checkpoint_bytes: int  # of all ranks
    seconds: float  # at the speed that was just measured
    grace_seconds: float
    killer: str  # ends the process afterwards

    def facts(self) -> dict[str, float | str]:
        """For the receipt."""
        rounded = {"seconds": round(self.seconds, 1), "grace_seconds": self.grace_seconds}
        return {"checkpoint_bytes": self.checkpoint_bytes, **rounded, "killer": self.killer}

    @property
    def warning(self) -> str:
        """One line if a checkpoint takes longer than the grace period; else empty."""
        if self.seconds <= self.grace_seconds:
            return ""
        return (
            f"stop: a checkpoint of {self.checkpoint_bytes / GIB:,.1f} GiB takes about {self.seconds:,.0f} s on this "
            f"disk, and {self.killer} ends the run {self.grace_seconds:,.0f} s after a signal, so a signal would lose "
            "the steps since the last save; lengthen that period, or set run.stop_after to a time before it"
        )


def planned_save(run_dir: Path, checkpoint_bytes: int, grace_seconds: float, killer: str) -> PlannedSave:
    """How long a checkpoint takes, from the time that a sample of at most SAMPLE_BYTES takes, written and synced."""
    file, size = run_dir / f"{TEMPORARY_PREFIX}speed", max(1, min(SAMPLE_BYTES, checkpoint_bytes))
    with library_errors(writing=run_dir):
        try:
            sample, began = os.urandom(size), time.perf_counter()
            with open(file, "wb") as stream:
                stream.write(sample)
                stream.flush()
                os.fsync(stream.fileno())
            seconds = time.perf_counter() - began
        finally:
            file.unlink(missing_ok=True)
    return PlannedSave(checkpoint_bytes, seconds * checkpoint_bytes / size, grace_seconds, killer)


def temporary_folder(recipe: Recipe) -> Path:
    """Where the disk's room is proven. No start takes what is in it for a checkpoint."""
    return Path(recipe.run_dir) / f"{TEMPORARY_PREFIX}worst-step"


def _disk_reserves(folder: Path, nbytes: int, ranks: Ranks) -> bool:
    """Whether every rank can reserve its bytes on the disk, all at once. Raises EnvironmentMismatch if it is full.

    glibc writes one byte into each block if the file system has no such call.
    """
    own = folder / f"room-{ranks.rank:05d}"

    def reserve() -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        with open(own, "wb") as file:
            if not hasattr(os, "posix_fallocate"):  # macOS
                return False
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, nbytes))
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                    return False
                raise
        return True

    with library_errors(writing=folder, kept="earlier checkpoints are intact; "):
        try:
            return all(act_on_every_rank(ranks, folder, reserve))
        finally:
            own.unlink(missing_ok=True)


def _live_tensors(parts: Assembled) -> list[Tensor]:
    reshard(parts.unwrapped_model)
    states = [value for state in parts.optimizer.state.values() for value in state.values()]
    tensors = [
        *model_tensors(parts.unwrapped_model).values(),
        *(value for value in states if isinstance(value, Tensor)),
    ]
    return [local_part(tensor)[0] for tensor in tensors]


def _live_copies(parts: Assembled) -> tuple[dict[str, Tensor], dict[Any, dict[str, Any]]]:
    """Copies of weights and optimizer state in host memory."""

    def copy(value: Any) -> Any:
        return local_part(value.detach())[0].to("cpu", copy=True) if isinstance(value, Tensor) else value

    weights = {name: copy(weight) for name, weight in model_tensors(parts.unwrapped_model).items()}
    optimizer = parts.optimizer.state
    states = {parameter: {key: copy(value) for key, value in state.items()} for parameter, state in optimizer.items()}
    return weights, states


def remove_temporary(recipe: Recipe) -> None:
    """Delete what is left on the disk, complete or not. One rank calls it."""
    remove_folder(temporary_folder(recipe))
