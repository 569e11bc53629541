"""Folders and files of this checkout that are used by their path."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent  # recipes/, accelerate_configs/ and data/ are here, unless the package was installed alone
TRAIN_SCRIPT = PACKAGE / "train.py"  # what `accelerate launch` is given
