"""Where the parts of this checkout are that are not Python modules."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent  # recipes/, accelerate_configs/ and data/ are here, unless the package was installed alone
TRAIN_SCRIPT = PACKAGE / "train.py"  # what `accelerate launch` is given
