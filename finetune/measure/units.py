"""The unit and the phases that measurements, plans and reports share. No torch here."""

from __future__ import annotations

GIB = 2**30  # bytes
PHASES = ("load", "forward", "backward", "step", "save")  # of a training, in their order
