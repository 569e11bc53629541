"""What one decoder layer launches and moves in a training step: kernels, and bytes outside of its matrix products.

python benchmarks/layer_traffic.py [--tokens 4096]      (two minutes on two cores, no GPU)

A model of Llama 3.1 8B's shape is traced as `finetune plan` traces it: the trainer's own assembly and step, on tensors
without data that claim to be on a GPU, so with CUDA's autocast, and with attention by torch's variable-length kernel.
A trace of two layers less one of a single layer is a layer. So nothing of the loss, the embeddings or the update is
counted, and the layer is one between others, whose input needs a gradient.
What counts as a kernel and as its bytes: tests/support/layer_traffic.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from benchmarks.common import write_result
from tests.support.layer_traffic import COLUMNS, METHODS, MODEL, TOKENS, layer_step, recipe_of

RECOMPUTED = (False, True)


def rows(tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every method, without and with recomputation."""
    for method in METHODS:
        for recomputed in RECOMPUTED:
            name = f"{method}{', recomputed' if recomputed else ''}"
            yield name, layer_step(recipe_of(method, recomputed=recomputed, tokens=tokens))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    arguments = parser.parse_args()
    found = {}
    print(f"{'':28}" + "".join(f"{column:>20}" for column in COLUMNS))
    for name, row in rows(arguments.tokens):
        found[name] = row
        cells = (f"{value:.2f}" if isinstance(value, float) else f"{value:,}" for value in row.values())
        print(f"{name:28}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    what = f"one decoder layer of {MODEL}, forward and backward of {arguments.tokens} tokens, from eager operations"
    print(write_result("layer_traffic", {"what": what, "tokens": arguments.tokens, "layer": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
