"""What one decoder layer launches and moves in a training step: kernels, and bytes outside of its matrix products.

python benchmarks/layer_traffic.py [--tokens 4096]      (five minutes on two cores, no GPU)

A model of Llama 3.1 8B's shape is traced as `finetune plan` traces it: the trainer's own assembly and step, on tensors
without data that claim to be on a GPU, so with CUDA's autocast, and with attention by torch's variable-length kernel.
A trace of two layers less one of a single layer is a layer. So nothing of the loss, the embeddings or the update is
counted, and the layer is one between others, whose input needs a gradient.
What counts as a kernel and as its bytes: tests/support/memory/layer_traffic.py.

Then the same layer compiled, from the graphs that inductor has fused, for a CPU:
tests/support/memory/compiled_traffic.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from benchmarks.common import write_result
from tests.support.memory.compiled_traffic import (
    COMPILED_COLUMNS,
    COMPILED_METHODS,
    by_column,
    compiled_kernels,
    largest_kernels,
    with_copies,
)
from tests.support.memory.layer_traffic import (
    COLUMNS,
    METHODS,
    MODEL,
    TOKENS,
    largest_operations,
    layer_step,
    recipe_of,
)

RECOMPUTED = (False, True)


def rows(tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every method, without and with recomputation."""
    for method in METHODS:
        for recomputed in RECOMPUTED:
            name = f"{method}{', recomputed' if recomputed else ''}"
            yield name, layer_step(recipe_of(method, recomputed=recomputed, tokens=tokens))


def compiled_rows(
    tokens: int, eager: Mapping[str, dict[str, Any]], largest: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What of it is compiled, without and with recomputation. `largest` is filled with what moves most."""
    for method in COMPILED_METHODS:
        for recomputed in RECOMPUTED:
            ending = ", recomputed" if recomputed else ""
            kernels = compiled_kernels(method, recomputed=recomputed, tokens=tokens)
            row, largest[f"{method}{ending}, compiled"] = by_column(kernels), largest_kernels(kernels)
            yield method + ending, row
            if method == "full, pure_bf16":
                yield "full" + ending, with_copies(row, eager["full" + ending], eager[method + ending])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    arguments = parser.parse_args()
    layer = shown(COLUMNS, rows(arguments.tokens))
    largest: dict[str, Any] = {
        method: largest_operations(recipe_of(method, recomputed=False, tokens=arguments.tokens)) for method in METHODS
    }
    compiled = shown(COMPILED_COLUMNS, compiled_rows(arguments.tokens, layer, largest))
    what = f"one decoder layer of {MODEL}, forward and backward of {arguments.tokens} tokens: "
    what += "layer from eager operations, compiled from inductor's graphs for a CPU"
    result = {"what": what, "tokens": arguments.tokens, "layer": layer, "compiled": compiled, "largest": largest}
    print(write_result("layer_traffic", result))
    return 0


def shown(columns: Sequence[str], found: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """All rows, printed one by one."""
    table = {}
    print(f"{'':28}" + "".join(f"{column:>20}" for column in columns))
    for name, row in found:
        table[name] = row
        cells = (f"{value:.2f}" if isinstance(value, float) else f"{value:,}" for value in row.values())
        print(f"{name:28}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    return table


if __name__ == "__main__":
    sys.exit(main())
