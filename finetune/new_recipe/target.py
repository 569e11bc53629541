"""Turns a file, a folder or a Hub name into an entry for `data.train`.

A file's first bytes decide its kind where its name does not.
"""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path

from finetune.data.dialect import WIDE_MARKS, is_binary
from finetune.data.sources import SUFFIXES, read_rows, refuse_packed
from finetune.errors import DataError
from finetune.library_errors import library_errors
from finetune.output_stream import one_line
from finetune.paths import open_regular
from finetune.recipe.schema import DataSet

LOOKED_AT = 64 * 1024
DOCUMENTS = (".txt", ".md")


def entry_of(target: str, encoding: str | None = None) -> DataSet:
    """The `data.train` entry for a path or a Hub name, read in this encoding if it is a text. Raises DataError."""
    path = Path(os.path.expanduser(target))
    if path.is_dir():
        return DataSet(path=str(path))
    if path.exists():
        return DataSet(path=_kind_of(path, encoding), data_files=str(path))
    looks_local = path.suffix in (*SUFFIXES, *DOCUMENTS, ".tsv", ".xlsx") or target.startswith((".", "/", "~"))
    if looks_local or target.count("/") > 1:
        raise DataError([f"{one_line(target)}: no such file; paths are relative to the working folder ({Path.cwd()})"])
    return DataSet(path=target)


def _kind_of(file: Path, encoding: str | None) -> str:
    """json, csv, parquet, excel or text. Raises DataError for a file without text rows."""
    suffix = file.suffix.lower()
    if suffix == ".gz":
        suffix = file.with_suffix("").suffix.lower()
    known = {".tsv": "csv", ".tab": "csv", ".xlsx": "excel"} | dict.fromkeys(DOCUMENTS, "text") | SUFFIXES
    with library_errors(reading=file, kind=DataError), open_regular(file) as stream:
        head = stream.read(LOOKED_AT)
    refuse_packed(file)
    if not head.strip():
        raise DataError([f"{file}: no rows: the file is empty; give it at least one row"])
    if suffix in (".xls", ".ods", ".numbers"):
        raise DataError([f"{file}: {suffix} is not read; save the sheet as .xlsx or as CSV"])
    if suffix in (".pdf", ".docx", ".doc"):
        raise DataError([f"{file}: {suffix} is not read; save it as plain text (.txt)"])
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"PK\x03\x04") and suffix == ".xlsx":
        return "excel"
    if file.suffix == ".gz":
        return known.get(suffix, "json")
    if encoding is None and is_binary(head) and suffix != ".arrow":
        remedy = "name a CSV, JSON, Parquet or text file"
        if head.count(b"\0") * 3 > len(head):  # every second byte
            remedy += "; or name its encoding, if it is a text: --encoding utf-16-le"
        raise DataError([f"{file}: is a binary file, not rows of text; {remedy}"])
    for mark, wide in WIDE_MARKS.items():
        if head.startswith(mark):
            head = head[: len(head) & ~3].decode(wide, "replace").encode()
            break
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if suffix in known and known[suffix] != "text":
        # A file called .csv that holds JSON is read for what it is, and the other way round.
        if known[suffix] == "csv" and start in (b"{", b"[") and _is_json(head):
            return "json"
        if known[suffix] == "json" and start not in (b"{", b"["):
            return "csv"
        return known[suffix]
    if start in (b"{", b"[") and _is_json(head):
        return "json"
    if suffix in known:
        return known[suffix]
    # An unknown suffix: it is a table if a delimiter divides the first row into two cells or more.
    rows = islice(read_rows(file, "csv", encoding=encoding), 1)
    first = next((row.values for row in rows if row.values), {})
    if len(first) > 1:
        return "csv"
    return "text"


def _is_json(head: bytes) -> bool:
    """Whether a file's head is JSON Lines, or begins a JSON array or object."""
    text = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if text.startswith("["):
        return text[1:].lstrip()[:1] in ("{", "[", '"', "]")
    try:
        json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError:
        return text[1:].lstrip()[:1] == '"'  # an object longer than the head
    return True
