"""Checkpoints: tensors in safetensors, everything else in JSON, no pickle; complete and hashed, or absent.

    checkpoints/step-00000100/
        model-00000.safetensors  optimizer-00000.safetensors   a file for each group and each rank with tensors
        state.json                                              everything that is not a tensor
        MANIFEST.json                                           the elements in each file; each file's size and
                                                                SHA-256; the manifest's own hash; a mark that all
                                                                numbers are finite

Each rank writes the pieces it holds (strategies/pieces.py). Rank 0 writes everything else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from finetune.errors import EnvironmentMismatch, FinetuneError, NotFinite
from finetune.files import TEMPORARY_PREFIX, disk_errors, publish_folder, remove_folder, sync, write_json
from finetune.output_stream import one_line
from finetune.run_folder.saving.manifest import (
    MANIFEST_BYTES,
    STATE_FILE,
    known_aliases,
    listed_files,
    self_hash,
    sha256_of,
    stored_groups,
)
from finetune.run_folder.saving.own_pieces import OwnPieces, Tensors, own_pieces, unshared
from finetune.run_folder.tensor_checks import first_not_finite, not_finite
from finetune.run_folder.train_state import state_problem
from finetune.strategies.pieces import Ranks, Stored, covers
from finetune.untrusted.json_files import read_object
from finetune.untrusted.library_words import words_of

FORMAT = 2  # the manifest's version; `examine` refuses others
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with complete and unchanged files."""

    path: Path
    step: int
    groups: Mapping[str, Mapping[str, Stored]]  # group -> name -> the elements' places
    aliases: Mapping[str, Mapping[str, str]]  # group -> name -> the name whose tensor it shares


def step_folder(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` finished optimizer steps."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def write_checkpoint(
    run_dir: Path,
    step: int,
    tensors: Mapping[str, Tensors],
    state: Mapping[str, Any],
    *,
    keep: int,
    best: int | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008  # frozen
) -> Path:
    """Save a checkpoint and prune older ones. After a crash at any time, the old or the new one is complete.

    A valid checkpoint for this step is left as it is, because one step of a run has one state. Every rank calls this.
    It returns when the checkpoint exists.

    Args:
        run_dir: The run's folder, which every rank sees. Its metrics are synced first, so that they reach as far as
            the checkpoint.
        step: Finished optimizer steps.
        tensors: Group -> name -> tensor, on any device, with any shape (0-dim too) and layout, or this rank's piece.
            Shared tensors are stored once.
        state: Everything that is not a tensor, as JSON; no NaN or infinity.
        keep: Newest checkpoints to keep, at least 1; this one is always kept.
        best: The step of one more checkpoint to keep.

    Raises:
        NotFinite: a tensor on any rank holds a NaN or an infinity. Nothing is written, and every rank raises.
        EnvironmentMismatch: the disk is full or not writable, on any rank. Earlier checkpoints are untouched.
    """
    refuse_not_finite(step, tensors, ranks)
    return write_pieces(run_dir, step, own_pieces(tensors, ranks.rank), state, keep=keep, best=best, ranks=ranks)


def refuse_not_finite(step: int, tensors: Mapping[str, Tensors], ranks: Ranks) -> None:
    """Raise NotFinite, on every rank, if a tensor on any rank holds a NaN or an infinity."""
    own = [f"{group}: {name}" for group, named in tensors.items() for name in not_finite(named, ranks.rank)]
    bad = sorted({name for names in ranks.gather(own) for name in names})  # ranks may hold pieces of one tensor
    if bad:
        total = sum(len(named) for named in tensors.values())
        raise NotFinite(
            f"step {step}: not finite: {len(bad)} of {total} tensors to be saved, first {bad[0]}; no checkpoint of "
            "this step is written, earlier ones are intact; lower training.learning_rate, or lengthen the warmup"
        )


def write_pieces(
    run_dir: Path,
    step: int,
    pieces: Mapping[str, OwnPieces],
    state: Mapping[str, Any],
    *,
    keep: int,
    best: int | None,
    ranks: Ranks,
) -> Path:
    """`write_checkpoint` for pieces that are known to be finite. When one rank fails, all of them raise."""
    folder = step_folder(run_dir, step)
    temporary = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}")
    is_rank_0 = ranks.rank == 0

    def prepare() -> bool:
        """Make the temporary folder. True if the checkpoint exists already."""
        if not is_rank_0:
            return False
        if folder.exists() and isinstance(examine(folder), Checkpoint):
            return True
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_folder(temporary)
        temporary.mkdir()
        return False

    # Three phases. Each ends when every rank has finished it, and no rank begins the next if one has failed:
    #   rank 0: make the temporary folder
    #   all:    write own pieces there
    #   rank 0: write state and manifest, then rename the folder to its final name
    with disk_errors(folder, "earlier checkpoints are intact; "):
        try:
            if not _gathered(ranks, temporary, prepare)[0]:
                written = _gathered(ranks, temporary, lambda: _write_own(temporary, pieces, ranks.rank))
                publish = partial(_publish, temporary, folder, {"step": step, **state}, written)
                _gathered(ranks, temporary, publish if is_rank_0 else _do_nothing)
        except Exception:
            if is_rank_0:
                remove_folder(temporary)  # a full disk gets its space back
            raise
    with disk_errors(folder.parent, f"the checkpoint of step {step} is complete; "):
        prune = partial(_prune, run_dir, step, keep, best)
        _gathered(ranks, temporary, prune if is_rank_0 else _do_nothing)
    return folder


def _gathered(ranks: Ranks, temporary: Path, act: Callable[[], Any]) -> list[Any]:
    """Call `act` on every rank, and return all results on every rank.

    If one rank fails, all raise. The failed rank raises its own error.
    """
    failure, result = None, None
    try:
        result = act()
    except Exception as error:
        failure = error
    # Gather before raising: the other ranks wait in this collective.
    everyone = ranks.gather((result, failure and str(failure)))
    if failure is not None:
        raise failure
    for rank, (_, reason) in enumerate(everyone):
        if reason is not None:
            problem = f"rank {rank} could not write: {reason}"
            raise EnvironmentMismatch(f"{temporary}: {problem}; earlier checkpoints are intact")
    return [result for result, _ in everyone]


def _do_nothing() -> None:
    """The other ranks' part while rank 0 does its own."""


def _write_own(temporary: Path, pieces: Mapping[str, OwnPieces], rank: int) -> dict[str, dict[str, Any]]:
    """Write this rank's pieces, a file per group. Returns their manifest entries by group."""
    entries: dict[str, dict[str, Any]] = {}
    for group, own in pieces.items():
        entries[group] = {"pieces": own.entries, "aliases": own.aliases}
        # Rank 0 writes a file even without tensors, so that every group has one. Other ranks write none.
        if own.tensors or rank == 0:
            path = temporary / f"{group}-{rank:05d}.safetensors"
            save_file(unshared(own.tensors), path)
            entries[group] |= {"file": path.name, "sha256": sha256_of(path)}
    return entries


def _publish(temporary: Path, folder: Path, state: Mapping[str, Any], written: list[dict[str, Any]]) -> None:
    """Rank 0's part, after every rank has written its own: state and manifest, then the final name.

    `written` holds each rank's `_write_own`. Raises AssertionError if pieces do not cover their tensors.
    """
    write_json(temporary / "state.json", state)
    group_parts = [group_part for ranks_part in written for group_part in ranks_part.values()]
    hashes = {group_part["file"]: group_part["sha256"] for group_part in group_parts if "file" in group_part}
    hashes["state.json"] = sha256_of(temporary / "state.json")
    files = {name: {"bytes": (temporary / name).stat().st_size, "sha256": hashes[name]} for name in sorted(hashes)}
    # Join the ranks' pieces to one entry per tensor. A part is [file, first element, elements]: a [4, 3] tensor on two
    # ranks has the parts [..-00000.., 0, 6] and [..-00001.., 6, 6].
    groups: dict[str, dict[str, Any]] = {group: {} for group in written[0]}
    for ranks_part in written:
        for group, group_part in ranks_part.items():
            for name, piece in group_part["pieces"].items():
                entry = groups[group].setdefault(name, {"shape": piece["shape"], "dtype": piece["dtype"], "parts": []})
                entry["parts"].append([group_part["file"], piece["start"], piece["n"]])
    for group, named in groups.items():
        for name, entry in named.items():
            entry["parts"].sort(key=lambda part: (part[1], part[2]))
            complete = covers([(start, count) for _, start, count in entry["parts"]], math.prod(entry["shape"]))
            assert complete, f"{group}: {name}: {entry} is not the whole tensor"
    aliases = {group: group_part["aliases"] for group, group_part in written[0].items()}
    manifest = {
        "format": FORMAT,
        "step": state["step"],
        "finite": True,
        "files": files,
        "groups": groups,
        "aliases": aliases,
    }
    write_json(temporary / "MANIFEST.json", {**manifest, "sha256": self_hash(manifest)})
    # The metrics must reach as far as the checkpoint, so they are on the disk before it gets its name.
    for lines in sorted(folder.parents[1].glob("*.jsonl")):
        sync(lines)
    publish_folder(temporary, folder)


def _folders(run_dir: Path) -> list[Path]:
    """Folders with a checkpoint's name, newest first. Their content is not examined."""
    paths = [path for path in (run_dir / "checkpoints").glob("step-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(paths, key=_step, reverse=True)


def checkpoint_steps(run_dir: Path) -> list[int]:
    """The steps of complete checkpoints in a run's folder, in order. Contents are not hashed."""
    return sorted(_step(path) for path in _folders(run_dir) if isinstance(examine(path, hashes=False), Checkpoint))


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _prune(run_dir: Path, step: int, keep: int, best: int | None) -> None:
    """Delete checkpoints up to `step`, except the `keep` newest good ones and `best`.

    The checkpoint after `step` was just written and is valid. Bad ones do not count towards `keep`. Checkpoints from
    later steps can only be bad: the run passed over them when it resumed, and will write them again.
    """
    # Sizes are enough here: hashing would read every checkpoint at every save.
    earlier = [path for path in _folders(run_dir) if _step(path) <= step]
    good = [path for path in earlier if isinstance(examine(path, hashes=False), Checkpoint)]
    kept = [*good[: max(keep, 1)], *(path for path in good if _step(path) == best)]
    for folder in set(earlier) - set(kept):
        remove_folder(folder)


def examine(folder: Path, *, hashes: bool = True) -> Checkpoint | str:
    """The checkpoint in `folder`, or its fault. Without `hashes` only file sizes are compared."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        return "its name is not step-NNNNNNNN"
    try:
        manifest = read_object(folder / "MANIFEST.json", MANIFEST_BYTES)
        stated = manifest.pop("sha256")
        if stated != self_hash(manifest) or manifest["format"] != FORMAT or manifest["step"] != int(match[1]):
            return "MANIFEST.json was changed or is of another version"
        for name, facts in listed_files(manifest).items():
            path = folder / name
            if path.stat().st_size != facts["bytes"] or (hashes and sha256_of(path) != facts["sha256"]):
                return f"{name} is not the file that was written"
        groups = stored_groups(folder, manifest)
        aliases = known_aliases(manifest, groups)
        if hashes and (problem := state_problem(read_object(folder / STATE_FILE))):
            return f"{STATE_FILE}: {problem}"
    # A crash, a damaged disk or a stranger wrote the content, so each mistake becomes a text, whatever its type.
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except FinetuneError as error:
        absent = [name for name in ("MANIFEST.json", STATE_FILE) if not (folder / name).exists()]
        if absent:
            return f"{absent[0]} is missing"
        return f"unreadable ({str(error).removeprefix(f'{folder}/')})"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"unreadable ({words_of(error)})"
    if "finite" not in manifest:  # written by an earlier release, which did not check
        for name in sorted(manifest["files"]):
            if name.endswith(".safetensors") and (bad := first_not_finite(folder / name)):
                return f"not finite: {bad}"
    return Checkpoint(folder, manifest["step"], groups, aliases)


def newest_valid(run_dir: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest valid checkpoint, if any, and a line for each newer one that is damaged."""
    damaged: list[str] = []
    for folder in _folders(run_dir):
        checkpoint = examine(folder)
        if isinstance(checkpoint, Checkpoint):
            return checkpoint, tuple(damaged)
        damaged.append(f"{folder}: damaged, not used: {one_line(checkpoint)}")
    return None, tuple(damaged)


def read_checkpoint(checkpoint: Checkpoint) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The unsharded tensors by group and name, on the CPU, and the state that `write_checkpoint` was given."""
    groups: dict[str, dict[str, Tensor]] = {}
    for group, stored in checkpoint.groups.items():
        named = {name: entry.read_all() for name, entry in stored.items()}
        # Tied tensors were stored once; both names get the same tensor.
        groups[group] = named | {name: named[stored_name] for name, stored_name in checkpoint.aliases[group].items()}
    return groups, read_state_of(checkpoint)


def read_state_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The state that `write_checkpoint` was given."""
    state: dict[str, Any] = json.loads((checkpoint.path / "state.json").read_text(encoding="utf-8"))
    return state
