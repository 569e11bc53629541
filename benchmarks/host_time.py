"""Print the host's microseconds and calls for one decoder layer, forward and backward, with kernels that take no time.

python benchmarks/host_time.py [--calls]      (four minutes on two cores, no GPU)

A GPU waits for the host if a layer's launches take longer than its kernels: models of 1B and less. Here tensors are
tiny (8 tokens of width 64), so nearly all time is Python, autograd and torch's dispatcher. Compiled layers run without
any kernel: inductor's generated host code runs, and what it launches returns at once. Attention is two sums, because
its kernel is one launch. A layer's time is that of 10 layers less 2, over 8: processor time of one thread, the least of
150 steps.

A call is one of Python's or of a library's function, by Python's profiler; that number is always the same.
`--calls` also prints the ten in which a layer spends most time, without what they call.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AttentionInterface

from finetune.architecture.compiled.layers import CompiledLayers, compile_layers
from finetune.architecture.loss import put_loss_into_forward
from finetune.architecture.own_layers.compute import compute_layers
from finetune.architecture.recomputation import checkpoint_layers
from tests.support.memory.layer_traffic import nothing_computed
from tests.support.models.tiny import flat_batch, tiny_model


class Known(dict[Any, float]):
    """Every kind of layer was compared."""

    def __contains__(self, _: object) -> bool:
        return True


FEW, MANY, STEPS = 2, 10, 150
METHODS = ("lora", "full", "lora, recomputed")


def three_sums(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return (query + key + value).transpose(1, 2), None


def built(method: str, layers: int, *, compiled: bool) -> nn.Module:
    base = tiny_model("llama", num_hidden_layers=layers, num_key_value_heads=4, num_attention_heads=4)
    base.config.use_cache = False
    base.set_attn_implementation("three_sums")
    put_loss_into_forward(base)
    model: nn.Module = base
    if method.startswith("lora"):
        model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    model.to(torch.bfloat16)
    compute_layers(model, lambda *_: None)
    model.train()
    if "recomputed" in method:
        checkpoint_layers(base, 1)
    if compiled:
        # Without kernels nothing can be compared: compiled layers are taken for right.
        found = CompiledLayers(required=True, log=print)
        found.seconds = Known()
        compile_layers(base, found)
    return model


def seconds(model: nn.Module) -> float:
    """A step's processor seconds: the least, because other programs take caches away."""
    row, found = flat_batch([8]), []
    for _ in range(STEPS):
        began = time.process_time()
        model(**row).backward()
        found.append(time.process_time() - began)
        model.zero_grad()
    return min(found)


def profiled(model: nn.Module, steps: int) -> Any:
    """The profile of some steps, after one that compiles: (file, line, name) -> (_, calls, own seconds, ...)."""
    row, profile = flat_batch([8]), cProfile.Profile()
    model(**row).backward()
    for _ in range(steps):
        model.zero_grad()
        with profile:
            model(**row).backward()
    return pstats.Stats(profile).stats  # type: ignore[attr-defined]  # which typeshed does not have


def show(method: str, *, compiled: bool, calls: bool) -> None:
    """Print one layer's time and calls."""
    few, many = (built(method, layers, compiled=compiled) for layers in (FEW, MANY))
    time_of, calls_of = [], []
    for model in (few, many):
        calls_of.append(sum(count for _, count, *_ in profiled(model, 1).values()))
        time_of.append(seconds(model))
    each = MANY - FEW
    name = f"{method}, {'compiled' if compiled else 'as written'}"
    print(
        f"{name:30}{1e6 * (time_of[1] - time_of[0]) / each:>14.0f}{(calls_of[1] - calls_of[0]) / each:>8.0f}",
        flush=True,
    )
    if not calls:
        return
    rows = profiled(many, 20)
    for (file, line, function), (_, count, own, *_) in sorted(rows.items(), key=lambda row: -row[1][2])[:10]:
        at = f"{Path(file).name}:{line} {function}"
        print(f"    {1e6 * own / 20 / MANY:8.1f} us {count / 20 / MANY:8.1f} calls  {at}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    AttentionInterface.register("three_sums", three_sums)
    print(f"{'one layer':30}{'microseconds':>14}{'calls':>8}")
    for method in METHODS:
        show(method, compiled=False, calls=arguments.calls)
        torch.compiler.reset()
        with torch._inductor.config.patch(force_disable_caches=True), nothing_computed():
            show(method, compiled=True, calls=arguments.calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
