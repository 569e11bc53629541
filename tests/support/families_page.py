"""docs/families.md: its head and a line of its table. `benchmarks/families.py` writes it, a test holds it."""

from __future__ import annotations

import re

from tests.support.architectures import WAYS, Outcome, Way
from tests.support.cells import ROOT

PAGE = ROOT / "docs" / "families.md"
HEAD = f"""# Architectures

Written by `benchmarks/families.py` with transformers {{version}}; `tests/architecture/test_families.py` holds it to
what is found.

An architecture is trained rightly or refused in a line, before its weights are read. Right: tiny models with random
weights have the loss and the gradients of the library's own eager forward, one document at a time, to 1e-5 in float32.
What is refused is found by a trial of the architecture itself (`finetune/architecture/trial.py`), so it holds for
architectures that are not listed here and for other settings of those that are. *auto* is document-isolated attention,
with sinks, soft caps, windows, chunks and dropout; layers with a state (convolutions, gated delta rules, state spaces)
run on one document after another.

| architecture | {" | ".join(way.title for way in WAYS)} | why the first is refused, and what to set |
|---|{"---|" * len(WAYS)}---|
"""


def line_of(name: str, found: dict[Way, Outcome]) -> str:
    """The architecture's line of the table."""
    reason = (found[WAYS[0]].refusal or "").replace("|", "\\|")
    reason = re.sub(r"^model\.name_or_path: \w+ ", "", reason)
    return f"| {name} | {' | '.join(found[way].word for way in WAYS)} | {reason} |\n"
