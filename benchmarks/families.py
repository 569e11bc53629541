"""Which architectures are trained rightly: writes docs/families.md and benchmarks/results/families.json.

python benchmarks/families.py

Each architecture as a tiny model with random weights, in each of six ways: right (loss and gradients are those of the
library's eager forward on one document at a time, to 1e-5) or refused in a line. tests/model/test_families.py holds the
page to what is found.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import transformers

from benchmarks.common import write_result
from tests.support.architectures import ARCHITECTURES, WAYS, Outcome, Way, outcomes

PAGE = Path(__file__).resolve().parent.parent / "docs/families.md"
HEAD = f"""# Architectures

Written by `benchmarks/families.py` with transformers {{version}}; `tests/model/test_families.py` holds it to what is
found.

An architecture is trained rightly or refused in a line, before its weights are read. Right: tiny models with random
weights have the loss and the gradients of the library's own eager forward, one document at a time, to 1e-5 in float32.
What is refused is found by a trial of the architecture itself (`finetune/model/trial.py`), so it holds for
architectures that are not listed here and for other settings of those that are. *auto* is document-isolated attention.

| architecture | {" | ".join(way.title for way in WAYS)} | why the first is refused, and what to set |
|---|{"---|" * len(WAYS)}---|
"""


def line_of(name: str, found: dict[Way, Outcome]) -> str:
    """The architecture's line of the table."""
    reason = (found[WAYS[0]].refusal or "").replace("|", "\\|")
    reason = re.sub(r"^model\.name_or_path: \w+ ", "", reason)
    return f"| {name} | {' | '.join(found[way].word for way in WAYS)} | {reason} |\n"


def main() -> int:
    lines, worst = [], {}
    for name in sorted(ARCHITECTURES):
        with tempfile.TemporaryDirectory() as folder:
            found = outcomes(name, Path(folder))
        lines.append(line_of(name, found))
        worst[name] = {way.title: outcome.word if outcome.refusal else outcome.worst for way, outcome in found.items()}
        print(lines[-1], end="", flush=True)
    PAGE.write_text(HEAD.format(version=transformers.__version__) + "".join(lines), "utf-8")
    write_result("families", {"transformers": transformers.__version__, "differences in 1e-5": worst})
    return 0


if __name__ == "__main__":
    sys.exit(main())
