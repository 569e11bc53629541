"""Print what one decoder layer of Llama 3.1 8B launches and moves in a training step: kernels, products, other bytes.

python benchmarks/layer_traffic.py      (three minutes on two cores, no GPU)

For a change, run it in both checkouts. tests/support/memory/layer_traffic.py says what counts.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from tests.support.memory.layer_traffic import METHODS, TOKENS, compiled_step, layer_step


def main() -> int:
    print(f"{'':28}{'kernels':>10}{'products':>10}{'other bytes a token':>21}")
    for recomputed in (False, True):
        for method in METHODS:
            with tempfile.TemporaryDirectory() as folder:
                rows = {"as written": layer_step(method, Path(folder), recomputed=recomputed)}
            if method != "qlora":
                rows["compiled"] = compiled_step(method, recomputed=recomputed)
            for name, row in rows.items():
                label = f"{method}, {name}" + ", recomputed" * recomputed
                bytes_a_token = row["other"] // TOKENS
                print(f"{label:28}{row['kernels']:>10}{row['products']:>10}{bytes_a_token:>21,}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
