"""The allowed content of a checkpoint's MANIFEST.json: plain file names in its folder, and pieces inside these files.

A manifest's hash shows that it was not damaged, but not who wrote it: a stranger's run folder has right hashes too.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from finetune.errors import FinetuneError
from finetune.output_stream import one_line
from finetune.paths import open_regular
from finetune.strategies.pieces import Stored, covers
from finetune.untrusted.json_files import kind_of_value
from finetune.untrusted.model_folder import is_plain_name
from finetune.untrusted.safetensors_header import TensorFacts, read_header

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
