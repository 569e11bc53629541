"""What it saves to apply the head to supervised positions alone: forward and backward of quickstart's rows, both ways.

python benchmarks/head.py [--rows 2] [--times 21]      (three minutes on two cores)

One micro-batch of each of a few stretches of rows is told which positions are learned, and then not; the ratio is of
the medians, taken in turn in one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmarks.common import write_result
from finetune.model.build import build_model, load_tokenizer
from finetune.recipe.loader import load_recipe
from finetune.tokens.batches import micro_batches
from finetune.tokens.dataset import prepare

CPU = torch.device("cpu")


def seconds(model: nn.Module, batch: dict[str, Any]) -> float:
    began = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(**batch).backward()
    model.zero_grad()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--times", type=int, default=21)
    arguments = parser.parse_args()
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", []).recipe
    rows = prepare(recipe, load_tokenizer(recipe)).train
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "per_device_batch_size": arguments.rows, "flat": True}
    (batch,) = micro_batches(rows, range(arguments.rows), **options)
    told: dict[str, Any] = dict(batch)
    untold = {key: value for key, value in told.items() if key != "supervised"}
    model = build_model(recipe, CPU).train()
    for way in (told, untold):  # the first takes longer
        seconds(model, way)
    pairs = [(seconds(model, told), seconds(model, untold)) for _ in range(arguments.times)]
    quick, slow = (statistics.median(column) for column in zip(*pairs, strict=True))
    found = {
        "what": "quickstart's forward and backward: head on supervised positions, and on all",
        "tokens": batch["input_ids"].numel(),
        "supervised": len(batch["supervised"]),
        "seconds": round(quick, 3),
        "seconds_with_all": round(slow, 3),
        "times_as_quick": round(slow / quick, 3),
    }
    print(found)
    write_result("head", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
