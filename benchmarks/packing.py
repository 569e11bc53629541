"""Useful tokens a second, packed over padded, on chats whose lengths have a long tail.

    python benchmarks/packing.py         (about two minutes)

The lengths are log-normal with the spread of real chats (99th percentile six times the median), the model a small
Llama in float32, and the loop the product's own, over the same chats once: packed into rows of MAX_LENGTH under
document-isolated attention, and padded to the longest of eight chats under "sdpa". Useful are the tokens of
documents, as opposed to padding; both ways learn from the same supervised ones.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.common import prepare_silenced, run_ours, scratch, tiny_recipe, write_result
from finetune.recipe.schema import Recipe
from finetune.tokens.dataset import Prepared
from finetune.training.batch_plan import plan_batches
from tests.support.models.tiny import save_tiny, write_chats

CHATS, MEDIAN, SPREAD, MAX_LENGTH, BATCH, TURNS = 192, 100, 0.77, 1024, 8, 5
MODEL = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "head_dim": 64}


def lengths() -> list[int]:
    """Tokens of each chat: exp(SPREAD * 2.33) = 6 times the median at the 99th percentile."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SPREAD, CHATS)
    return [int(tokens) for tokens in drawn.clip(20, MAX_LENGTH)]


def recipes(folder: Path) -> dict[str, Recipe]:
    model = save_tiny(folder / "model", **MODEL)
    chats = write_chats(folder / "chats.jsonl", lengths())
    ways: dict[str, dict[str, Any]] = {
        # About as many tokens a step in both: eight chats of 135 tokens are one row.
        "packed": {"data": {"packing": True}, "training": {"global_batch_size": 1}},
        "padded": {
            "data": {"packing": False},
            "training": {"global_batch_size": BATCH, "per_device_batch_size": BATCH},
            "attention": "sdpa",
        },
    }
    made = {}
    for name, way in ways.items():
        recipe = tiny_recipe(
            model, chats, data=way["data"] | {"max_length": MAX_LENGTH}, training=way["training"]
        ).model_dump()
        recipe["model"]["attention"] = way.get("attention", "auto")
        made[name] = Recipe.model_validate(recipe)
    return made


def padded_share(recipe: Recipe, prepared: Prepared) -> float:
    """Padding among the tokens that the padded way computes: what packing can save by itself."""
    plan = plan_batches(recipe, len(prepared.train), world_size=1, rank=0, flat=False)
    longest = [int(prepared.train.lengths[plan.rows_of(step)].max()) for step in range(plan.total_steps)]
    return 1 - int(prepared.train.lengths[:].sum()) / (BATCH * sum(longest))


def main() -> int:
    torch.set_num_threads(1)
    with scratch() as folder:
        ways = recipes(folder)
        prepared = {name: prepare_silenced(recipe) for name, recipe in ways.items()}
        padding = padded_share(ways["padded"], prepared["padded"])
        turns: list[dict[str, dict[str, float]]] = []
        for turn in range(TURNS):
            turns.append({})
            for name, recipe in ways.items():
                lines: list[dict[str, Any]] = []
                began = time.process_time()
                run_ours(recipe, prepared[name], lines.append)
                seconds = time.process_time() - began
                turns[-1][name] = {
                    "tokens": sum(line["tokens"] for line in lines),
                    "supervised": sum(line["supervised_tokens"] for line in lines),
                    "seconds": seconds,
                }
            print(f"turn {turn + 1}/{TURNS}", turns[-1], flush=True)
    counts = {(way["tokens"], way["supervised"]) for turn in turns for way in turn.values()}
    assert len(counts) == 1, f"both ways must learn from the same tokens: {counts}"
    ratios = sorted(turn["padded"]["seconds"] / turn["packed"]["seconds"] for turn in turns)
    sizes = lengths()
    result = {
        "what": "useful (non-padding) tokens a CPU second, one thread, whole training, packed over padded",
        "chats": CHATS,
        "length_percentiles_50_90_99": [int(np.percentile(sizes, q)) for q in (50, 90, 99)],
        "useful_tokens_per_second": {
            name: statistics.median(turn[name]["tokens"] / turn[name]["seconds"] for turn in turns) for name in ways
        },
        "padding_share_of_padded": padding,
        "packed_over_padded": {"median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]},
    }
    print(result["packed_over_padded"], write_result("packing", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
