"""Checks that training changed the trained tensors: the end's checksums against the start's, from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from finetune.errors import NothingTrained
from finetune.run_folder.tensor_checks import checksums
from finetune.run_folder.trained_tensors import model_tensors
from finetune.strategies.assemble import Assembled
from finetune.strategies.pieces import all_ranks, reshard


def trained_checksums(parts: Assembled) -> dict[str, str]:
    """A checksum over each trained tensor's bits, equal for any number of ranks. Every rank calls it."""
    if parts.engine is not None:
        from finetune.strategies.zero_state import trained_masters

        return checksums(trained_masters(parts.engine), all_ranks())
    reshard(parts.unwrapped_model)
    return checksums(parts.to_write(model_tensors(parts.unwrapped_model)), all_ranks())


def unchanged_tensors(parts: Assembled, start: Mapping[str, str]) -> list[str] | None:
    """The trained tensors with the same bits as at the run's start. Every rank calls it.

    None if this is not known: a run that an earlier release began has no checksums. Raises NothingTrained if all are
    unchanged.
    """
    if not start:
        return None
    return refuse_unchanged(trained_checksums(parts), start)


def refuse_unchanged(now: Mapping[str, str], start: Mapping[str, str]) -> list[str]:
    """The names with the start's checksums. Raises NothingTrained if these are all names."""
    unchanged = sorted(name for name, checksum in now.items() if start.get(name) == checksum)
    # A single tensor may rightly stay, for example an expert that no token reached. All of them may not.
    if start and len(unchanged) == len(start):
        raise NothingTrained(
            f"training: its steps changed no bit of the {len(start)} trained tensors, first {unchanged[0]}; nothing is "
            "exported or pushed; look at grad_norm and learning_rate in metrics.jsonl, and raise "
            "training.learning_rate, or train weights in float32 (training.pure_bf16: false)"
        )
    return unchanged


def describe_change(unchanged: list[str] | None, start: Mapping[str, str]) -> str:
    """A line that names the unchanged tensors, or says that they are not known; empty if all changed."""
    if unchanged is None:
        return "which tensors training changed is not known: an earlier release began this run, without checksums"
    if not unchanged:
        return ""
    names = ", ".join(unchanged[:3])
    if len(unchanged) > 3:
        names += f" and {len(unchanged) - 3} more"
    return f"unchanged by training: {len(unchanged)} of {len(start)} trained tensors: {names}"
