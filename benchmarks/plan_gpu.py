"""What `finetune plan` says of a GPU against what its allocator measures: 27 configurations on one GPU.

    python benchmarks/plan_gpu.py               (a minute each; `--shrunken` tries the script itself without a GPU)

Llama 3.2 1B and 3B and 3.1 8B with random weights; adapters, adapters over 4 bits, and all weights; 2,048 tokens a row
kept whole, 8,192 and 32,768 recomputed. Each is trained for a few steps. Its run asks the planner beforehand, as every
run does, for the rows of its own largest step, and its receipt has both. Writes benchmarks/results/plan_gpu.json after
each, and keeps what it has of the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import gpu_recipes
from benchmarks.common import RESULTS, write_result
from finetune.closed_form.constants import STEP_PHASES

MODELS = ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B")
METHODS = {
    "full": ["lora=null", "training.pure_bf16=true", "training.learning_rate=1e-5"],
    "lora": [],
    "qlora": ["quantization.load_in_4bit=true"],
}
ROWS = {2048: False, 8192: True, 32768: True}  # tokens: whether layers are recomputed
STEPS = 3
BASE = gpu_recipes.ROOT / "recipes" / "llama3_8b_lora_1x80gb.yaml"


def configurations() -> dict[str, list[str]]:
    """By name, what makes BASE each of them, as key=value."""
    found = {}
    for model, method, (tokens, again) in product(MODELS, METHODS, ROWS.items()):
        changes = [
            f"model.name_or_path=meta-llama/{model}-Instruct",
            f"data.max_length={tokens}",
            "training.per_device_batch_size=1",
            f"training.activation_checkpointing={str(again).lower()}",
        ]
        found[f"{model} {method} {tokens}"] = [*METHODS[method], *changes]
    return found


def measure(changes: Sequence[str], machine: gpu_recipes.Machine) -> dict[str, Any]:
    """One configuration: bytes at the peak of each phase, planned and measured, and what the allocator reserved."""
    row = gpu_recipes.measure(BASE, machine, [*changes, "measure_phases=true"], steps=STEPS)
    if not row["ok"]:
        return {"ok": False, "reason": row["reason"]}
    phases = {name: each for name, each in row["phases"].items() if each["planned_bytes"] is not None}
    if not phases:
        return {"ok": False, "reason": f"not planned: {row['not_planned']}"}
    planned, measured = (max(each[key] for each in phases.values()) for key in ("planned_bytes", "measured_bytes"))
    return {
        "ok": True,
        "planned_bytes": planned,
        "measured_bytes": measured,
        "error": planned / measured - 1,
        "phases": {
            name: [each["planned_bytes"], each["measured_bytes"]]
            for name, each in phases.items()
            if name in STEP_PHASES
        },
        "reserved_bytes": row["reserved_bytes"],
    }


def summary(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Over all that were measured: how far the plan was off, and below."""
    errors = [row["error"] for row in found.values() if row["ok"]]
    if not errors:
        return {"count": 0}
    return {
        "count": len(errors),
        "median_error": statistics.median(map(abs, errors)),
        "largest_error": max(errors, key=abs),
        "furthest_under": min(errors),
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CONFIGURATION", help='as "Llama-3.2-1B lora 2048"; default: all')
    parser.add_argument("--shrunken", action="store_true", help="small models on the CPU; prints, writes nothing")
    arguments = parser.parse_args(words)
    every = configurations()
    if unknown := [name for name in arguments.names if name not in every]:
        parser.error(f"no such configuration: {', '.join(unknown)}")
    if not arguments.shrunken and not torch.cuda.is_available():
        parser.error("no GPU here; --shrunken tries the script without one")
    gpu_gb = 0.0 if arguments.shrunken else gpu_recipes.card_gb()
    file = RESULTS / "plan_gpu.json"
    found = json.loads(file.read_text("utf-8"))["points"] if file.is_file() and not arguments.shrunken else {}
    asked = arguments.names or list(every)
    with tempfile.TemporaryDirectory() as folder:
        for name in asked:
            machine = gpu_recipes.Machine(Path(folder), gpu_gb)
            found[name] = row = measure(every[name], machine)
            print(f"{name}: {format(row['error'], '+.2%') if row['ok'] else row['reason']}", flush=True)
            if not arguments.shrunken:
                points = {key: found[key] for key in every if key in found}
                write_result("plan_gpu", {**summary(points), "points": points})
    return 0 if all(found[name]["ok"] for name in asked) else 1


if __name__ == "__main__":
    sys.exit(main())
