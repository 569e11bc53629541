"""Identifies a run's base by the Hub's commit and a hash of the content. Reads no whole weights, imports no torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.base.location import folder_of
from finetune.errors import FinetuneError
from finetune.output_stream import one_line
from finetune.paths import open_regular
from finetune.recipe.schema import ModelSection, Recipe
from finetune.untrusted.json_files import read_object
from finetune.untrusted.safetensors_header import MOST_HEADER

COVERS = "config.json, and of every tensor the name, number format, shape and up to 4,096 bytes from its middle"
SAMPLE = 4096  # bytes of a tensor
# A 70B model has 723 tensors: under 0.1 s from a local disk. Models whose experts are tensors of their own have up to
# 140,000: of those every so-many-th is read.
MOST_SAMPLES = 16_384
MOST_RECORD = 32 * 2**20  # bytes of a receipt or an index
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Keys of config.json that writers change and that change no number of a forward in a number format that a recipe sets.
VOLATILE = ("_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype")
BASE_CONTENT = "finetune_base_content"  # in the metadata of an adapter's weight file
COMMIT = re.compile(r"[0-9a-f]{40}")


def base_identity(section: ModelSection) -> dict[str, str | None]:
    """The base as it is on this machine: name, revision, commit on the Hub, and content. None for unknown values.

    The content is unknown until all weight files are here, and for a base without safetensors.
    """
    folder, commit = folder_of(section.name_or_path, section.revision), None
    # The Hub's cache: models--OWNER--NAME/snapshots/COMMIT. A folder named by its path may lie there too.
    if folder is not None and folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name):
        commit = folder.name
    facts = {"name": section.name_or_path, "revision": section.revision, "commit": commit}
    return {**facts, "content": None if folder is None else content_of(folder)}


def content_of(folder: Path) -> str | None:
    """A hash of a model's folder (COVERS). Files may be named and sharded otherwise for an equal one. None: unknown."""
    try:
        config = read_object(folder / "config.json")
        files = [folder / SINGLE]
        if not files[0].is_file():
            listed = read_object(folder / INDEX, MOST_RECORD).get("weight_map")
            files = [folder / Path(name).name for name in sorted({*dict(listed or {}).values()})]
        tensors: dict[str, tuple[Path, int, Mapping[str, Any]]] = {}
        for file in files:
            with open_regular(file) as stream:
                length = int.from_bytes(stream.read(8), "little")
                if length > MOST_HEADER:
                    return None
                header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors |= {name: (file, 8 + length, entry) for name, entry in header.items()}
        settings = {key: value for key, value in config.items() if key not in VOLATILE}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        every = -(-len(tensors) // MOST_SAMPLES)
        sampled: dict[Path, list[tuple[int, int, int]]] = {}
        for place, (name, (file, start, entry)) in enumerate(sorted(tensors.items())):
            begin, end = entry["data_offsets"]
            digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            if place % every == 0:
                size = min(SAMPLE, end - begin)
                sampled.setdefault(file, []).append((place, start + begin + (end - begin - size) // 2, size))
        samples: dict[int, bytes] = {}
        for file, places in sampled.items():
            with open_regular(file) as stream:
                for place, at, size in places:
                    stream.seek(at)
                    samples[place] = hashlib.sha256(stream.read(size)).digest()
        for place in sorted(samples):
            digest.update(samples[place])
    except (FinetuneError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not a whole model: loading it says what is wrong
    return digest.hexdigest()[:32]


def is_same_base(before: object, now: object) -> bool | None:
    """Whether two identities are one base: by content, else by the Hub's commit. None: one of them does not say."""
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return None
    for key in ("content", "commit"):
        if before.get(key) and now.get(key):
            return bool(before[key] == now[key])
    return None


def base_in_words(base: Mapping[str, Any]) -> str:
    """The name and what is known of the content: m/llama (content 3f2a91c07b12, commit 0e9e39f)."""
    known = [f"{key} {one_line(base[key], 64)[:12]}" for key in ("content", "commit") if base.get(key)]
    return f"{one_line(base.get('name'), 100)} ({', '.join(known) or 'content unknown'})"


def recorded_base(run_dir: Path) -> dict[str, Any] | None:
    """The base in a run's receipt; None for a run of an earlier release, or one that built no model yet."""
    try:
        base = read_object(run_dir / "receipt.json", MOST_RECORD).get("base")
    except FinetuneError:
        return None
    return base if isinstance(base, dict) else None


def at_recorded_commit(recipe: Recipe, recorded: object) -> Recipe:
    """The recipe with the Hub's commit that the run began with as its revision, wherever a branch points now.

    Unchanged for another name, for a folder, and if only another commit is on this machine.
    """
    section = recipe.model
    known = recorded if isinstance(recorded, Mapping) else {}
    commit = str(known.get("commit"))
    if section.name_or_path != known.get("name") or not COMMIT.fullmatch(commit):
        return recipe
    here = folder_of(section.name_or_path, section.revision)
    if Path(section.name_or_path).is_dir() or (here is not None and folder_of(section.name_or_path, commit) is None):
        return recipe
    return recipe.model_copy(update={"model": section.model_copy(update={"revision": commit})})


def with_the_runs_base(recipe: Recipe, run_dir: Path) -> Recipe:
    """A finished run's recipe at its base's commit. Raises FinetuneError if an adapter's base is not the training's."""
    recorded = recorded_base(run_dir)
    recipe = at_recorded_commit(recipe, recorded)
    if recorded is None or recipe.lora is None:
        return recipe
    now = base_identity(recipe.model)
    if is_same_base(recorded, now) is False:
        remedy = "put those files back"
        if recorded.get("commit"):
            remedy = f"fetch that commit: hf download {recorded.get('name')} --revision {recorded['commit']}"
        raise FinetuneError(
            f"{run_dir}: its base is another one now: trained on {base_in_words(recorded)}, here is "
            f"{base_in_words(now)}; {remedy}, or, if this is meant, take `base` out of {run_dir / 'receipt.json'}"
        )
    return recipe
