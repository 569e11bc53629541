"""Print the host's microseconds for one decoder layer, forward and backward, with kernels that take no time.

python benchmarks/host_time.py [--calls]      (four minutes on two cores, no GPU)

A GPU waits for the host if a layer's launches take longer than its kernels: models of 1B and less. Here tensors are
tiny (8 tokens of width 64), so nearly all time is Python, autograd and torch's dispatcher. Compiled layers run
without any kernel: inductor's generated host code runs, and what it launches returns at once. Attention is two sums,
because its kernel is one launch. A layer's time is that of 12 layers less 4, over 8; the median of many steps of one
thread.

`--calls` also prints the ten Python functions in which a compiled layer spends most time, without what they call.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
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

FEW, MANY, STEPS = 4, 12, 60
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
        found._tried = lambda *_: True  # type: ignore[method-assign]
        compile_layers(base, found)
    return model


def seconds(model: nn.Module) -> float:
    """The median of a step's seconds."""
    row, found = flat_batch([8]), []
    for _ in range(STEPS):
        began = time.perf_counter()
        model(**row).backward()
        found.append(time.perf_counter() - began)
        model.zero_grad()
    return statistics.median(found[STEPS // 4 :])


def microseconds(method: str, *, compiled: bool) -> float:
    """One layer's time."""
    few, many = (seconds(built(method, layers, compiled=compiled)) for layers in (FEW, MANY))
    return 1e6 * (many - few) / (MANY - FEW)


def print_calls(method: str) -> None:
    model, profile = built(method, MANY, compiled=True), cProfile.Profile()
    seconds(model)
    with profile:
        seconds(model)
    print(f"{method}, compiled: the ten dearest calls, microseconds a layer under the profiler")
    rows: Any = pstats.Stats(profile).stats  # type: ignore[attr-defined]  # which typeshed does not have
    for (file, line, name), (_, count, own, *_) in sorted(rows.items(), key=lambda row: -row[1][2])[:10]:
        each = STEPS * MANY
        print(f"  {1e6 * own / each:8.1f}  {count / each:6.1f} calls  {Path(file).name}:{line} {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    AttentionInterface.register("three_sums", three_sums)
    with torch._inductor.config.patch(force_disable_caches=True):
        print(f"{'microseconds a layer':24}{'as written':>12}{'compiled':>12}")
        for method in METHODS:
            as_written = microseconds(method, compiled=False)
            torch.compiler.reset()
            with nothing_computed():
                compiled = microseconds(method, compiled=True)
                print(f"{method:24}{as_written:>12.0f}{compiled:>12.0f}", flush=True)
                if arguments.calls:
                    print_calls(method)
    return 0


if __name__ == "__main__":
    sys.exit(main())
