"""What one decoder layer launches and moves in a training step, counted from a trace of the trainer's own.

- A kernel is an operation that reaches torch's dispatcher and computes or copies; views and allocations are free. A
  fused operation counts once, also where its library launches several kernels, and an operation that torch composes of
  others counts as those.
- Its bytes are its operands' and results', read or written once, in full: caches save nothing, kernels that read twice
  (softmax, reductions) cost no more, and an operand that is broadcast counts as large as it is seen.
- Matrix products (with those that dequantise 4 bits on the way) and attention are among the kernels, and their bytes
  are not among those here: they are bound by arithmetic.
- A step is one micro-batch, forward and backward, of one row. Gradients are made, not added to earlier ones.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from finetune.model.known_configs import full_config
from finetune.planner.depth.extrapolate import with_layers
from finetune.planner.trace import flops
from finetune.planner.trace.flops import Operation
from finetune.planner.trace.step_work import StepWork, per_step
from finetune.planner.trace.trace import STEPS, trace
from finetune.planner.trace.worst_batches import worst_batches
from finetune.recipe.schema import Data, DataSet, Lora, ModelSection, Quantization, Recipe, Training
from finetune.recipe.strategy import read_strategy

MODEL = "meta-llama/Llama-3.1-8B"
TOKENS = 4096
METHODS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"lora": Lora()},
    "qlora": {"lora": Lora(), "quantization": Quantization(load_in_4bit=True)},
    "full": {"lora": None},
    "full, pure_bf16": {"lora": None, "pure_bf16": True},
}
COLUMNS = ("forward kernels", "kernels", "other GB", "other bytes a token", "product TFLOP", "attention TFLOP")


def recipe_of(method: str, *, recomputed: bool, tokens: int = TOKENS) -> Recipe:
    """One process, one row of `tokens` tokens a step."""
    sections = dict(METHODS[method])
    training: dict[str, Any] = {"pure_bf16": sections.pop("pure_bf16", False), "activation_checkpointing": recomputed}
    return Recipe(
        accelerate_config="single",
        model=ModelSection(name_or_path=MODEL),
        data=Data(train=[DataSet(path="json", data_files="unused.jsonl")], max_length=tokens),
        # bf16, not auto, which asks this machine's processor.
        training=Training(global_batch_size=1, per_device_batch_size=1, mixed_precision="bf16", **training),
        **sections,
    )


def layer_step(recipe: Recipe) -> dict[str, Any]:
    """A layer's step under this recipe, by COLUMNS; TFLOP are 10^12 floating-point operations."""
    with tempfile.TemporaryDirectory() as folder:
        one, two = (_work(recipe, layers, Path(folder)) for layers in (1, 2))
    operations = Counter(two.operations)
    operations.subtract(one.operations)
    times: Counter[str] = Counter()
    for operation, count in operations.items():
        if operation.phase not in ("forward", "backward"):
            continue
        times["kernels"] += round(count)
        times["forward kernels"] += round(count) * (operation.phase == "forward")
        times[operation.kind] += round(count * (operation.nbytes if operation.kind == "other" else operation.flops))
    tokens = recipe.data.max_length
    figures = times["other"] / 1e9, times["other"] // tokens, times["product"] / 1e12, times["attention"] / 1e12
    return dict(zip(COLUMNS, (times["forward kernels"], times["kernels"], *figures), strict=True))


def largest_operations(recipe: Recipe, count: int = 8) -> dict[str, list[float]]:
    """Which operations of a layer's step move most outside of matrix products: name -> how often, and GB together."""
    with tempfile.TemporaryDirectory() as folder:
        tallies = []
        for layers in (1, 2):
            with _by_name() as tally:
                _work(recipe, layers, Path(folder))
            tallies.append(tally)
    one, two = tallies
    moved = {name: [(two[name][place] - one[name][place]) / STEPS for place in (0, 1)] for name in two}
    most = sorted(moved, key=lambda name: -moved[name][1])[:count]
    return {name: [round(moved[name][0]), round(moved[name][1] / 1e9, 3)] for name in most}


@contextmanager
def _by_name() -> Iterator[dict[str, list[int]]]:
    """Calls and bytes by name of the operations that a trace counts outside of products, in forward and backward."""
    tally: dict[str, list[int]] = {}
    latest, measured = "", flops._bytes

    def noting_name(func: Any, name: str, *rest: Any) -> int:
        nonlocal latest
        latest = name
        return measured(func, name, *rest)

    def noting_bytes(phase: str, kind: str, flop: int, nbytes: int, itemsize: int, place: str) -> Operation:
        if kind == "other" and phase in ("forward", "backward"):
            entry = tally.setdefault(latest, [0, 0])
            entry[0] += 1
            entry[1] += nbytes
        return Operation(phase, kind, flop, nbytes, itemsize, place)

    with mock.patch.object(flops, "_bytes", noting_name), mock.patch.object(flops, "Operation", noting_bytes):
        yield tally


def _work(recipe: Recipe, layers: int, folder: Path) -> StepWork:
    shallow = with_layers(recipe, full_config(MODEL)[0], layers, folder)
    traced = trace(shallow, read_strategy(recipe.accelerate_config), worst_batches(recipe, 1), gpu=True)
    return per_step(traced.operations, {}, steps=STEPS, micro_steps=1)
