"""Which architectures are trained rightly: writes docs/families.md and benchmarks/results/families.json.

python benchmarks/families.py

Each architecture as a tiny model with random weights, in each of six ways: right (loss and gradients are those of the
library's eager forward on one document at a time, to 1e-5) or refused in a line. tests/architecture/test_families.py
holds the page to what is found.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import transformers

from benchmarks.common import write_result
from tests.support.architectures import ARCHITECTURES, outcomes
from tests.support.families_page import HEAD, PAGE, line_of


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
