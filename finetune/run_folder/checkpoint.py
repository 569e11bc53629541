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

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from finetune.errors import EnvironmentMismatch, FinetuneError, NotFinite
from finetune.files import TEMPORARY_PREFIX, publish_folder, remove_folder, sync, write_json
from finetune.library_errors import library_errors, words_of
from finetune.model.dtypes import dtype_name
from finetune.output_stream import one_line
from finetune.paths import open_regular
from finetune.run_folder.tensor_checks import first_not_finite, not_finite
from finetune.run_folder.train_state import state_problem
from finetune.strategies.pieces import Piece, Ranks, Stored, covers, piece_to_write
from finetune.untrusted.json_files import kind_of_value, read_object
from finetune.untrusted.model_folder import is_plain_name
from finetune.untrusted.safetensors_header import TensorFacts, read_header

# MANIFEST.json may name plain files in its folder, and pieces inside them. Its hash shows that it was not damaged, but
# not who wrote it: a stranger's run folder has right hashes too.
STATE_FILE = "state.json"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
MANIFEST_BYTES = 512 * 2**20  # the largest that is read


def sha256_of(path: Path) -> str:
    """A file's SHA-256, hexadecimal."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def self_hash(manifest: Mapping[str, Any]) -> str:
    """A manifest's hash over its content without the hash."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def listed_files(manifest: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Each file with its size and hash. Raises ValueError for a name that is not a plain one in the folder."""
    files = manifest["files"]
    for name, facts in files.items():
        if name != STATE_FILE and not is_plain_name(name):
            raise ValueError(f"it names {one_line(name, 80)!r}, which is not a file of this folder")
        if type(facts["bytes"]) is not int or not isinstance(facts["sha256"], str):
            raise ValueError(f"{name} has no size and hash")
    return files  # type: ignore[no-any-return]


def stored_groups(folder: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, Stored]]:
    """Group -> name -> the elements' places. Raises ValueError if the files do not have them all."""
    # Compare the manifest with each file's own header, so that no piece lies outside its file.
    headers: dict[str, Mapping[str, TensorFacts]] = {}
    for file in manifest["files"]:
        if file != STATE_FILE:
            try:
                headers[file] = read_header(folder / file)
            except FinetuneError as error:
                raise ValueError(str(error).removeprefix(f"{folder / file}: ")) from None
    return {
        str(group): {name: _stored(folder, name, entry, headers) for name, entry in named.items()}
        for group, named in manifest["groups"].items()
    }


def known_aliases(manifest: Mapping[str, Any], groups: Mapping[str, Mapping[str, Stored]]) -> dict[str, dict[str, str]]:
    """Group -> other name of a tensor -> its stored name. Raises ValueError for an unknown name."""
    aliases = {group: dict(named) for group, named in manifest["aliases"].items()}
    unknown = [name for group, named in aliases.items() for name in named.values() if name not in groups.get(group, {})]
    if unknown or aliases.keys() != groups.keys():
        raise ValueError("it names tensors that share one which is not there")
    return aliases


def _stored(
    folder: Path, name: str, entry: Mapping[str, Any], headers: Mapping[str, Mapping[str, TensorFacts]]
) -> Stored:
    shape, dtype = tuple(entry["shape"]), DTYPES.get(entry["dtype"])
    if dtype is None or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{one_line(name, 80)} has no shape and number format")
    parts = tuple(_parts(folder, name, entry["parts"], headers))
    if not covers([(start, count) for _, start, count in parts], math.prod(shape)):
        raise ValueError(f"the pieces of {one_line(name, 80)} are not the whole tensor")
    return Stored(name, shape, dtype, parts)


def _parts(
    folder: Path, name: str, parts: Any, headers: Mapping[str, Mapping[str, TensorFacts]]
) -> Iterator[tuple[Path, int, int]]:
    for file, start, count in parts:
        if type(start) is not int or type(count) is not int:
            raise ValueError(f"a piece of {one_line(name, 80)} begins at {kind_of_value(start)}")
        facts = headers.get(file, {}).get(name)
        if facts is None or math.prod(facts.shape) != count:
            raise ValueError(f"{one_line(file, 80)} does not have the piece of {one_line(name, 80)}")
        yield folder / file, start, count


FORMAT = 2  # the manifest's version; `examine` refuses others
_NAME = re.compile(r"step-([0-9]{8,18})")


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
        run_dir: The run's folder, or on `ranks.apart` their machine's own. The run's metrics are synced first, so that
            they reach as far as the checkpoint.
        step: Finished optimizer steps.
        tensors: Group -> name -> tensor, on any device, of any shape (0-dim too): whole, sharded, or this rank's piece.
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

    # Phases. Each ends when every rank has finished it, and no rank begins the next if one has failed:
    #   rank 0: make the temporary folder
    #   all:    write own pieces there. Machines that do not see it write into their own folder, and send them
    #   rank 0: write state and manifest, then rename the folder to its final name
    with library_errors(writing=folder, kept="earlier checkpoints are intact; "):
        try:
            if not act_on_every_rank(ranks, temporary, prepare)[0]:
                written = act_on_every_rank(ranks, temporary, lambda: _write_own(temporary, pieces, ranks))
                if ranks.apart:
                    act_on_every_rank(ranks, temporary, lambda: _collect(temporary, written, ranks))
                publish = partial(_publish, temporary, folder, {"step": step, **state}, written)
                act_on_every_rank(ranks, temporary, publish if is_rank_0 else _do_nothing)
        except Exception:
            if is_rank_0:
                remove_folder(temporary)  # a full disk gets its space back
            raise
    with library_errors(writing=folder.parent, kept=f"the checkpoint of step {step} is complete; "):
        prune = partial(_prune, run_dir, step, keep, best)
        act_on_every_rank(ranks, temporary, prune if is_rank_0 else _do_nothing)
    return folder


def act_on_every_rank(ranks: Ranks, temporary: Path, act: Callable[[], Any]) -> list[Any]:
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


def _write_own(temporary: Path, pieces: Mapping[str, OwnPieces], ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Write this rank's pieces, a file per group. Returns their manifest entries by group."""
    rank = ranks.rank
    if rank in ranks.apart:
        temporary.mkdir(parents=True, exist_ok=True)
    entries: dict[str, dict[str, Any]] = {}
    for group, own in pieces.items():
        entries[group] = {"pieces": own.entries, "aliases": own.aliases}
        # Rank 0 writes a file even without tensors, so that every group has one. Other ranks write none.
        if own.tensors or rank == 0:
            path = temporary / f"{group}-{rank:05d}.safetensors"
            save_file(unshared(own.tensors), path)
            entries[group] |= {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}
    return entries


def _collect(temporary: Path, written: list[dict[str, Any]], ranks: Ranks) -> None:
    """Move the files of `ranks.apart` into rank 0's folder. Every rank calls it. Raises OSError."""
    from finetune.ranks.transfers import move_files

    parts = [(rank, part) for rank in sorted(ranks.apart) for part in written[rank].values() if "file" in part]
    received = move_files(temporary, [(part["file"], part["bytes"], rank, 0) for rank, part in parts], ranks)
    for rank, part in parts:
        if rank == ranks.rank:
            (temporary / part["file"]).unlink()
        elif ranks.rank == 0 and received[part["file"]] != part["sha256"]:
            raise OSError(f"{part['file']} is not what rank {rank} wrote")


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


def newest_valid(run_dir: Path, before: int | None = None) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest valid checkpoint, if any, and a line for each newer one that is damaged.

    Args:
        before: Look only at steps before this one.
    """
    damaged: list[str] = []
    for folder in _folders(run_dir):
        if before is not None and _step(folder) >= before:
            continue
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


Tensors = Mapping[str, Tensor | Piece]


@dataclass(frozen=True)
class OwnPieces:
    """This rank's pieces of one tensor group."""

    tensors: Mapping[str, Tensor]  # name -> the elements; a tensor with several names has one entry
    entries: Mapping[str, dict[str, Any]]  # name -> the unsharded shape, dtype, first element, number of elements
    aliases: Mapping[str, str]  # another name for a tensor -> its name in `tensors`
    copies: frozenset[str]  # names of tensors that are copies already: no step changes them


def own_pieces(groups: Mapping[str, Tensors], rank: int) -> dict[str, OwnPieces]:
    """This rank's pieces by group. Tensors are views, except those that `copies` names.

    Args:
        groups: Group -> name -> tensor, on any device, of any shape (0-dim too): whole, sharded, or this rank's piece.
    """
    return {group: _group_pieces(named, rank) for group, named in groups.items()}


def _group_pieces(named: Tensors, rank: int) -> OwnPieces:
    pieces = {name: piece for name, value in named.items() if (piece := piece_to_write(value, rank)) is not None}
    distinct: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[tuple[object, ...], str] = {}
    # Tied weights are one tensor with two names: the same storage, place in it, shape and strides.
    for name, piece in pieces.items():
        tensor = piece.tensor.detach()
        pointer = tensor.untyped_storage().data_ptr()
        key = (pointer, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and key in first_names:  # empty tensors all have pointer 0
            aliases[name] = first_names[key]
            continue
        first_names[key] = name
        distinct[name] = tensor
    entries = {
        name: {
            "shape": pieces[name].shape,
            "dtype": dtype_name(tensor.dtype),
            "start": pieces[name].start,
            "n": tensor.numel(),
        }
        for name, tensor in distinct.items()
    }
    copies = frozenset(name for name in distinct if isinstance(named[name], Piece) and not pieces[name].live)
    return OwnPieces(distinct, entries, aliases, copies)


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, contiguous, each in its own storage: safetensors refuses views into one storage."""
    result: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in storages:
            result[name] = tensor.clone()
        else:
            result[name] = tensor.contiguous()
        storages.add(pointer)
    return result
