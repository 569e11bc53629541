"""Strangers' files by their first bytes, and JSON files: regular, with bounded size and depth; else one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.library_errors import library_errors
from finetune.output_stream import one_line, printable
from finetune.paths import open_regular

# The longest first, where one begins another.
SIGNATURES = (
    (b"version https://git-lfs", "a git-lfs pointer, without the file's content (git lfs pull fetches it)"),
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\xfd7zXZ\x00", "compressed by xz"),
    (b"BZh", "compressed by bzip2"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"PAR1", "a Parquet file"),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"%PDF", "a PDF"),
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"<?xml", "an XML file"),
)


def kind_by_head(head: bytes) -> str | None:
    """The kind of file that begins with these bytes (32 or more if there are as many); None if unknown."""
    begins = head.lstrip().lower() if head.lstrip()[:1] == b"<" else head
    return next((name for signature, name in SIGNATURES if begins.startswith(signature)), None)


def not_rows(head: bytes) -> str | None:
    """The fault in a data file with this beginning, and the remedy; None if it may hold rows."""
    kind = kind_by_head(head)
    if kind is None:
        return None
    if kind.startswith("UTF-"):
        return f"the file is {kind}, not UTF-8; save it as UTF-8, or convert it: iconv -f {kind} -t UTF-8"
    if "compressed" in kind or "archive" in kind:
        return f"the file is {kind}; unpack it first, or let its name end with .gz if gzip made it"
    return f"the file is {kind}; name the data themselves, as JSON Lines, CSV or Parquet"


MOST_JSON_BYTES = 16 * 2**20  # a config.json has some kB, an index of 1,000 files 100 kB
MOST_DEPTH = 64
MOST_VALUES = 4_000_000  # Python takes about 100 bytes for each: 256 MiB of empty lists become 9 GiB


def unreadable(path: Path, what: str, remedy: str = "fetch the file again") -> FinetuneError:
    """The one-line error about a file that is refused."""
    return FinetuneError(f"{printable(str(path))}: {what}; {remedy}")


def read_bounded(path: Path, most: int = MOST_JSON_BYTES) -> bytes:
    """A file's bytes. Raises FinetuneError if it is not a regular file, or larger than `most`."""
    with library_errors(reading=path), open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise unreadable(path, f"is larger than {most / 2**20:,.0f} MiB", "no such file is; fetch it again")
    return content


def parse_document(path: Path, content: bytes, *, unique: bool = False) -> Any:
    """A file's JSON value, at most MOST_DEPTH levels deep; `unique`: no key twice in one object."""
    if sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise unreadable(path, f"holds more than {MOST_VALUES:,} values", "no such file does; fetch it again")
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_unique_keys if unique else None)
    except RecursionError:
        raise unreadable(path, f"is nested deeper than {MOST_DEPTH} levels") from None
    except _TwiceError as error:
        raise unreadable(path, f"has the key {one_line(error, 60)} twice") from None
    except ValueError as error:  # no JSON, no UTF-8, or an integer with thousands of digits
        what = kind_by_head(content[:64])
        raise unreadable(path, f"is {what}, not JSON" if what else f"is not JSON: {one_line(error, 120)}") from None
    if depth_of(value) > MOST_DEPTH:
        raise unreadable(path, f"is nested deeper than {MOST_DEPTH} levels")
    return value


def read_object(path: Path, most: int = MOST_JSON_BYTES, *, unique: bool = False) -> dict[str, Any]:
    """The JSON object in a file. Raises FinetuneError, in one line that begins with the path."""
    value = parse_document(path, read_bounded(path, most), unique=unique)
    if not isinstance(value, dict):
        raise unreadable(path, f"is not a JSON object but {kind_of_value(value)}")
    return value


def kind_of_value(value: Any) -> str:
    """A JSON value's kind in words."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def depth_of(value: Any) -> int:
    """Levels of nesting, counted without recursion."""
    depth, level = 0, [value]
    while level:
        depth, level = depth + 1, inner_values(level)
    return depth


def inner_values(level: list[Any]) -> list[Any]:
    """The values inside the objects and lists among these."""
    inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
    return [child for children in inner for child in children]


class _TwiceError(Exception):
    """A key that an object has twice."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        raise _TwiceError(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return values
