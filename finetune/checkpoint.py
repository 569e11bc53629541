"""Checkpoints: tensors in safetensors, the rest in JSON, no pickle; complete and hashed, or absent.

    checkpoints/step-00000100/
        model.safetensors  optimizer.safetensors   one file for each group of tensors
        state.json                                  everything that is no tensor
        MANIFEST.json                               size and SHA-256 of each file, and its own

One process writes. A sharded strategy gathers its tensors first, then calls the same writer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from finetune.durable import ASIDE, disk_errors, publish_folder, remove_folder, sync, write_json
from finetune.errors import FinetuneError
from finetune.optimizer import allocate_state

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")

# Entries of an optimizer's state that have their parameter's shape: torch's names and bitsandbytes'.
MOMENTS = ("exp_avg", "exp_avg_sq", "state1", "state2")

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were found complete and unchanged."""

    path: Path
    step: int
    aliases: Mapping[str, Mapping[str, str]]  # group -> name -> the name whose tensor it shares


def step_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` finished optimizer steps lies."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def write_checkpoint(
    run_dir: Path, step: int, tensors: Mapping[str, Tensors], state: Mapping[str, Any], *, keep: int
) -> Path:
    """Saves a checkpoint and prunes older ones: at any moment of a crash the old or the new one is whole.

    A valid checkpoint of the same step is left as it is: the same step of a run has the same state.

    Args:
        run_dir: The run's folder; its metrics are synced first, so that they reach as far as the checkpoint.
        step: Finished optimizer steps.
        tensors: Group -> name -> tensor, of any device, shape (0-dim too) and layout; shared ones are stored once.
        state: What is no tensor, as JSON; no NaN or infinity.
        keep: Checkpoints to keep, at least 1; this one is always kept.

    Raises:
        EnvironmentMismatch: the disk is full or not writable; earlier checkpoints are untouched.
    """
    folder = step_folder(run_dir, step)
    if not (folder.exists() and isinstance(examine(folder), Checkpoint)):
        aside = folder.with_name(f"{ASIDE}{folder.name}")
        kept = "earlier checkpoints are intact; "
        with disk_errors(folder, kept):
            folder.parent.mkdir(parents=True, exist_ok=True)
            remove_folder(aside)
            try:
                _write_files(aside, step, tensors, {"step": step, **state})
            except Exception:
                remove_folder(aside)  # a full disk gets its space back
                raise
            for lines in sorted(run_dir.glob("*.jsonl")):
                sync(lines)
            publish_folder(aside, folder)
    _prune(run_dir, step, keep)
    return folder


def _write_files(aside: Path, step: int, tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> None:
    aside.mkdir()
    aliases: dict[str, dict[str, str]] = {}
    for group, named in tensors.items():
        unique, aliases[group] = _without_aliases(named)
        save_file(unique, aside / f"{group}.safetensors")
    write_json(aside / "state.json", state)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(aside.iterdir())}
    manifest = {"format": FORMAT, "step": step, "files": files, "aliases": aliases}
    write_json(aside / "MANIFEST.json", {**manifest, "sha256": _self_hash(manifest)})


def _without_aliases(named: Tensors) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Splits tensors into distinct ones, contiguous and unshared, and names of the very same tensor."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in named.items():
        tensor = tensor.detach()
        pointer = tensor.untyped_storage().data_ptr()
        key = (pointer, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        # safetensors refuses views that overlap; a copy of a view is as good.
        unique[name] = tensor.clone() if pointer in storages else tensor.contiguous()
        storages.add(pointer)
    return unique, aliases


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _self_hash(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _folders(run_dir: Path) -> list[Path]:
    """Folders with a checkpoint's name, newest first; whether they are whole is not looked at."""
    found = [path for path in (run_dir / "checkpoints").glob("step-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _prune(run_dir: Path, step: int, keep: int) -> None:
    """Deletes all but the `keep` newest checkpoints up to `step`, which was just written and is valid.

    Later ones can only be damaged ones that the run was resumed before; it will write them again.
    """
    for folder in [path for path in _folders(run_dir) if _step(path) <= step][max(keep, 1) :]:
        remove_folder(folder)


def examine(folder: Path) -> Checkpoint | str:
    """The checkpoint in `folder`, or what is wrong with it; reads and hashes every byte."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        return "its name is not step-NNNNNNNN"
    try:
        manifest = json.loads((folder / "MANIFEST.json").read_text(encoding="utf-8"))
        stated = manifest.pop("sha256")
        if stated != _self_hash(manifest) or manifest["format"] != FORMAT or manifest["step"] != int(match[1]):
            return "MANIFEST.json was changed or is of another version"
        for name, facts in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != facts["bytes"] or _sha256(path) != facts["sha256"]:
                return f"{name} is not the file that was written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable ({error})"
    return Checkpoint(folder, manifest["step"], manifest["aliases"])


def newest_valid(run_dir: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest whole checkpoint, if any, and one line for each newer one that is damaged."""
    damaged: list[str] = []
    for folder in _folders(run_dir):
        found = examine(folder)
        if isinstance(found, Checkpoint):
            return found, tuple(damaged)
        damaged.append(f"{folder}: damaged, not used: {found}")
    return None, tuple(damaged)


def read_checkpoint(checkpoint: Checkpoint) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors by group and name, on the CPU, and the state that `write_checkpoint` was given."""
    groups: dict[str, dict[str, Tensor]] = {}
    for group, aliases in checkpoint.aliases.items():
        named = load_file(checkpoint.path / f"{group}.safetensors")
        groups[group] = named | {name: named[kept] for name, kept in aliases.items()}
    state = json.loads((checkpoint.path / "state.json").read_text(encoding="utf-8"))
    return groups, state


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters by name; frozen ones come from the base model again. Give the unwrapped model."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_model(model: nn.Module, tensors: Tensors) -> None:
    """Copies saved parameters into the trained parameters of the unwrapped model, in place and bitwise.

    Raises:
        FinetuneError: missing, unexpected, wrong-shaped, wrong-typed or non-finite tensors, all of them named.
    """
    parameters = model_tensors(model)
    mistakes = [f"missing: {name}" for name in parameters.keys() - tensors.keys()]
    mistakes += [f"unexpected: {name}" for name in tensors.keys() - parameters.keys()]
    for name in parameters.keys() & tensors.keys():
        there, here = tensors[name], parameters[name]
        if (there.shape, there.dtype) != (here.shape, here.dtype):
            mistakes.append(f"{name}: {_kind(there)} in the checkpoint, {_kind(here)} in the model")
    _refuse("the checkpoint does not fit the model", [*sorted(mistakes), *_not_finite(tensors)])
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `parameter name:state key`, Python numbers as 0-dim tensors `...:int` or `...:float`.

    Parameter groups are not stored: the recipe and the schedule own their values. Accelerate's wrapper is fine.
    """
    named: dict[str, Tensor] = {}
    for name, parameter in _optimized(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                named[f"{name}:{key}"] = value
            elif isinstance(value, (int, float)):
                wide = torch.int64 if isinstance(value, int) else torch.float64
                named[f"{name}:{key}:{type(value).__name__}"] = torch.tensor(value, dtype=wide)
            else:
                raise AssertionError(f"optimizer state {key} of {name} is a {type(value).__name__}, no tensor")
    return named


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """Gives the optimizer the state that `optimizer_tensors` returned, bitwise; what it held before is dropped.

    Not through load_state_dict, which casts state to its parameter's number format.

    Raises:
        FinetuneError: state of a parameter that is not optimized here, of another shape, or not finite.
    """
    parameters = _optimized(model, optimizer)
    mistakes = []
    for key, value in tensors.items():
        parameter = parameters.get(key.partition(":")[0])
        if parameter is None:
            mistakes.append(f"unexpected: {key}")
        elif key.split(":")[1] in MOMENTS and value.shape != parameter.shape:
            mistakes.append(f"{key}: shape {tuple(value.shape)} in the checkpoint, {tuple(parameter.shape)} here")
    _refuse("the checkpoint does not fit the optimizer", [*sorted(mistakes), *_not_finite(tensors)])
    on_device = _step_on_device(optimizer)
    for parameter in parameters.values():
        optimizer.state.pop(parameter, None)
    allocate_state(optimizer, [parameters[name] for name in {key.partition(":")[0] for key in tensors}])
    for key, value in tensors.items():
        name, entry, *number = key.split(":")
        parameter = parameters[name]
        own = optimizer.state[parameter].get(entry)
        if isinstance(own, Tensor):  # in bitsandbytes' own pages and code books
            _refuse(key, [f"{_kind(value)} in the checkpoint, {_kind(own)} here"] * (_kind(value) != _kind(own)))
            own.copy_(value)
            continue
        stays = bool(number) or (entry == "step" and id(parameter) not in on_device)
        placed = value.clone() if stays else value.to(parameter.device, copy=True)
        optimizer.state[parameter][entry] = placed.item() if number else placed


def _optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in members}
    assert len(named) == len(members), "the optimizer holds parameters that are not the model's"
    return named


def _step_on_device(optimizer: torch.optim.Optimizer) -> set[int]:
    """Parameters whose step count torch wants beside them: fused and capturable kernels read it on the device."""
    groups = [group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")]
    return {id(parameter) for group in groups for parameter in group["params"]}


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _not_finite(tensors: Tensors) -> list[str]:
    floats = {name: value for name, value in tensors.items() if value.is_floating_point()}
    return sorted(f"not finite: {name}" for name, value in floats.items() if not bool(torch.isfinite(value).all()))


def _refuse(headline: str, mistakes: Iterable[str]) -> None:
    found = list(mistakes)
    if not found:
        return
    rest = f"\n  and {len(found) - 5} more" if len(found) > 5 else ""
    remedy = "\ntraining.resume=never starts over and keeps the old folder aside"
    raise FinetuneError(f"{headline}:\n  " + "\n  ".join(found[:5]) + rest + remedy)
