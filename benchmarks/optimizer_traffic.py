"""Kernels and bytes of gradients and updates, before and after each change that took some away.

    python benchmarks/optimizer_traffic.py              (two minutes on one core; or one part: `head`, `update`,
                                                         `gradients`, `buckets`, `full_8b`)

    head        a trained head: bytes of its float32 gradient with one addition for each chunk, and for several
    update      RoundedAdamW and BlockwiseAdamW: operations, and bytes a weight, as written and as one kernel
    gradients   FSDP2 and HSDP: a step's reductions after each micro-batch, and once a step
    buckets     ZeRO-1 and 2: reductions of a backward, with 1/256 of the weights each, and as they are now
    full_8b     a step of llama3_8b_full_1x80gb by arithmetic, from a measured one

Counts are a plan's: the trainer's own step on tensors without data, each operation with its operands and results once.
Nothing is timed. Writes benchmarks/results/optimizer_traffic.json if all parts were asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmarks.common import write_result
from finetune.architecture import loss
from finetune.model.known_configs import full_config
from finetune.planner import Plan, plan
from finetune.recipe.gpus import gpus_of
from finetune.recipe.loader import load_recipe
from finetune.strategies import zero

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
FULL, SHARDED = "llama3_8b_full_1x80gb", "llama3_8b_full_fsdp2_grad_op_8x80gb"
VOCABULARY, HIDDEN, WEIGHTS = 128_256, 4096, 8_030_261_248  # Llama 3 8B's
TOKENS = 3154  # of a micro-batch in the measured run
LARGE = 1 << 16  # bytes of an operation that belongs to a weight, not to a few numbers


def planned(name: str, *words: str, **options: Any) -> Plan:
    recipe = load_recipe(RECIPES / f"{name}.yaml", ["training.mixed_precision=bf16", *words]).recipe
    return plan(recipe, gpus_of(recipe.budget), **options)


def head() -> dict[str, Any]:
    """A micro-batch of 4,096 tokens: additions to the head's gradient, and the loss's peak."""
    found: dict[str, Any] = {}
    gradient = 4 * VOCABULARY * HIDDEN
    each = mock.patch.object(loss, "gradient_rows", lambda vocabulary, _: loss.chunk_rows(vocabulary))
    for name, change in (("each chunk", each), ("several chunks", mock.patch.dict({}))):
        with change:
            full = planned(FULL)
        products = [op for op in full.work.operations if (op.phase, op.kind) == ("forward", "product")]
        additions = sum(full.work.operations[op] for op in products if op.nbytes >= 2 * gradient)
        found[name] = {
            "additions": round(additions),
            "bytes of the gradient": round(additions) * 2 * gradient,
            "bytes of all products": round(sum(full.work.operations[op] * op.nbytes for op in products)),
            "peak of forward": full.phases["forward"].peak.nbytes,
        }
    return found


def update() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, name, words in (
        ("RoundedAdamW", FULL, []),
        ("BlockwiseAdamW, float32 weights", SHARDED, ["training.optim=adamw_8bit"]),
        ("BlockwiseAdamW, bfloat16 weights", SHARDED, ["training.optim=adamw_8bit", "training.pure_bf16=true"]),
    ):
        for how, compiles in (("as written", "false"), ("one kernel", "auto")):
            full = planned(name, *words, f"training.compile={compiles}")
            # The norm of the gradients and their clipping are in both.
            step = {op: n for op, n in full.work.operations.items() if op.phase == "step" and op.nbytes >= LARGE}
            found.setdefault(key, {})[how] = {
                "operations": round(sum(step.values())),
                "bytes a weight": round(sum(op.nbytes * n for op, n in step.items()) * full.ranks / WEIGHTS, 1),
            }
    return found


def gradients() -> dict[str, Any]:
    """Reductions of a step in shipped recipes of FSDP2 and HSDP: calls and bytes of one rank."""
    found: dict[str, Any] = {}
    names = ("llama3_70b_qlora_fsdp2_4x24gb", "llama3_8b_lora_dpo_fsdp2_4x24gb", "smollm3_3b_full_apo_fsdp2_2x80gb")
    for name in (*names, "llama3_70b_lora_hsdp_2x8x80gb"):
        for keeps in (False, True):
            one = planned(name, keeps_gradients=keeps)
            times = 1 if keeps else one.layout.micro_steps
            sent = [each for key, each in one.work.collectives["backward"].items() if key != "all_gather"]
            found.setdefault(name, {"micro-steps": one.layout.micro_steps})["once" if keeps else "each"] = {
                "reductions": times * sum(each.calls for each in sent),
                "bytes": times * sum(each.payload_bytes for each in sent),
                "needed": one.needed,
                "fits": one.fits,
            }
    return found


class _Shape(nn.Module):
    """A Llama's trained weights without storage, in the order of its modules."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def buckets() -> dict[str, Any]:
    """Reductions of a backward, and elements of each of two buffers."""
    found = {}
    for name in ("meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.1-8B"):
        model = _Shape(full_config(name)[0])
        sizes = [each.numel() for each in model.parameters()][::-1]
        before, after = min(sum(sizes) // 256, 2**26), zero.buckets(model, 2)["reduce_bucket_size"]
        found[name] = {
            str(bucket): {"reductions": zero._reductions(sizes, bucket), "share": round(bucket / sum(sizes), 4)}
            for bucket in (before, after)
        }
    return found


def full_8b() -> dict[str, Any]:
    """Tokens a second on one H100, by arithmetic from a measured step (benchmarks/results/gpu_h100.json).

    The measured step: eight micro-batches of 3,154 tokens, every layer recomputed, the update as it is written.
    """
    tokens, copy = 8 * TOKENS, 3.01e12  # bytes/s, measured
    measured, written, fused = 4.831, 8.03 * 0.2113, 8.03 * 0.0121  # seconds: the step, its update, the fused one
    base = measured - written + fused
    gradient = 2 * 4 * VOCABULARY * HIDDEN / copy  # the head's float32 gradient, read and written
    touched = {name: -(-TOKENS // rows) for name, rows in (("before", 512), ("after", 2048))}
    head_saved = 8 * (touched["before"] - touched["after"]) * gradient
    # One of four units of the layers' products, attention's forward, and a quarter of the layers' other traffic.
    layer_products, attention, traffic = 0.253 - 0.0155, 0.032, 0.030
    recomputed = 8 * (layer_products / 4 + attention / 4.5 + traffic / 4)
    steps = {
        "fused update": base,
        "and the head's gradient for 2,048 tokens": base - head_saved,
        "and every second layer recomputed": base - head_saved - recomputed / 2,
    }
    return {name: {"seconds": round(each, 3), "tokens/s": round(tokens / each)} for name, each in steps.items()}


PARTS = {"head": head, "update": update, "gradients": gradients, "buckets": buckets, "full_8b": full_8b}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []])
    asked = parser.parse_args(words).parts or list(PARTS)
    result = {name: PARTS[name]() for name in asked}
    print(json.dumps(result, indent=2))
    if len(asked) == len(PARTS):
        print(write_result("optimizer_traffic", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
