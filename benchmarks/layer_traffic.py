"""Print what one decoder layer of Llama 3.1 8B launches and moves in a training step: kernels, products, other bytes.
Last its loss and slope, a chunk of tokens at a time.

python benchmarks/layer_traffic.py      (three minutes on two cores, no GPU)

For a change, run it in both checkouts. tests/support/memory/layer_traffic.py says what counts.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from tests.support.memory.layer_traffic import METHODS, TOKENS, compiled_step, layer_step, loss_step

VOCABULARY, ROWS = 128_256, 64  # of Llama 3, and tokens of a chunk


def main() -> int:
    print(f"{'':28}{'kernels':>10}{'products':>10}{'other bytes a token':>21}")
    # All traces first: autograd looks for the trace's device once, in the first backward.
    for method in METHODS:
        for recomputed in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                show(f"{method}, as written", recomputed, layer_step(method, Path(folder), recomputed=recomputed))
    for method in METHODS:
        for recomputed in (False, True):
            if method != "qlora":
                show(f"{method}, compiled", recomputed, compiled_step(method, recomputed=recomputed))
    for one_kernel in (False, True):
        row = loss_step(one_kernel=one_kernel, vocabulary=VOCABULARY, rows=ROWS)
        name = f"loss of {VOCABULARY:,} words, {'one kernel' if one_kernel else 'as written'}"
        print(f"{name:38}{row['kernels']:>10}{row['bytes'] // ROWS:>21,}", flush=True)
    return 0


def show(name: str, recomputed: bool, row: Counter[str]) -> None:
    label = name + ", recomputed" * recomputed
    print(f"{label:28}{row['kernels']:>10}{row['products']:>10}{row['other'] // TOKENS:>21,}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
