"""Folders and files of this checkout that are used by their path; paths as a user writes them."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent  # recipes/, accelerate_configs/ and data/ are here, unless the package was installed alone
TRAIN_SCRIPT = PACKAGE / "train.py"  # what `accelerate launch` is given


def in_home(text: str) -> str:
    """`~/models/x` with the user's home folder, which no shell puts in for a recipe; other texts stay as they are."""
    return os.path.expanduser(text) if text.startswith("~") and "{" not in text else text
