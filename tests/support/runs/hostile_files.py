"""Files that a stranger may put in place of a run's: reading one as it is may never end, or takes all memory."""

from __future__ import annotations

import os
from pathlib import Path

KINDS = ("pipe", "endless", "huge", "deep", "folder")


def put_hostile(kind: str, file: Path) -> None:
    """Replace `file` by one of KINDS, or by a `link` to a file elsewhere."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "endless":
            file.symlink_to("/dev/zero")
        case "huge":  # a terabyte, of which none is on the disk
            file.touch()
            os.truncate(file, 2**40)
        case "deep":
            file.write_text("[" * 100_000)
        case "folder":
            file.mkdir()
        case "link":
            file.symlink_to(__file__)
        case _:
            raise ValueError(kind)
