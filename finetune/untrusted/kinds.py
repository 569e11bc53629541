"""Tells a file's kind by its first bytes, if it is not what its name says."""

from __future__ import annotations

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
