"""A decoder layer's step launches and moves no more than it did: casts and copies that come back show here first.

- A kernel is an operation that reaches torch's dispatcher and computes or copies; views and allocations are free. A
  fused operation counts once.
- Its bytes are its operands' and results', read or written once, in full. Matrix products and attention are among the
  kernels, but their bytes are not counted: arithmetic bounds them.
- A step is one micro-batch of one row, forward and backward. Gradients are made, not added to earlier ones.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from finetune.model.known_configs import full_config
from finetune.planner.depth.extrapolate import with_layers
from finetune.planner.trace.step_work import StepWork, per_step
from finetune.planner.trace.trace import STEPS, trace
from finetune.planner.trace.worst_batches import worst_batches
from finetune.recipe.schema import Data, DataSet, Lora, ModelSection, Recipe, Training
from finetune.recipe.strategy import read_strategy

MODEL, TOKENS = "meta-llama/Llama-3.1-8B", 4096
H, KV, INNER = 4096, 1024, 14336  # hidden size, keys' and values', MLP's
# Kernels, and bytes a token outside of matrix products and attention. A step that needs fewer lowers its row.
MOST = {"lora": (163, 1_325_104), "full": (124, 2_058_580)}


def layer_step(method: str, folder: Path) -> Counter[str]:
    """Kernels, bytes of what is no product, and floating-point operations: two layers' step less one layer's."""
    recipe = Recipe(
        accelerate_config="single",
        model=ModelSection(name_or_path=MODEL),
        data=Data(train=[DataSet(path="json", data_files="unused.jsonl")], max_length=TOKENS),
        # bf16, not auto, which asks this machine's processor.
        training=Training(
            global_batch_size=1, per_device_batch_size=1, mixed_precision="bf16", activation_checkpointing=False
        ),
        lora=Lora() if method == "lora" else None,
    )
    operations: Counter[Any] = Counter(work_of(recipe, 2, folder).operations)
    operations.subtract(work_of(recipe, 1, folder).operations)
    found: Counter[str] = Counter()
    for operation, count in operations.items():
        if operation.phase in ("forward", "backward"):
            found["kernels"] += round(count)
            found[operation.kind] += round(count * (operation.nbytes if operation.kind == "other" else operation.flops))
    return found


def work_of(recipe: Recipe, layers: int, folder: Path) -> StepWork:
    shallow = with_layers(recipe, full_config(MODEL)[0], layers, folder)
    traced = trace(shallow, read_strategy(recipe.accelerate_config), worst_batches(recipe, 1), gpu=True)
    return per_step(traced.operations, {}, steps=STEPS, micro_steps=1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", MOST)
def test_no_more_kernels_and_bytes_than_there_were(method: str, tmp_path: Path) -> None:
    """One kernel more, or one more pass over a hidden state, and this is red."""
    found = layer_step(method, tmp_path)
    assert (found["kernels"] <= MOST[method][0], found["other"] // TOKENS <= MOST[method][1]) == (True, True)
    # A whole layer was counted: forward, the gradient of the input, and of the weights where they are trained.
    products = 2 * TOKENS * (2 * H * H + 2 * H * KV + 3 * H * INNER) * (3 if method == "full" else 2)
    assert found["product"] == pytest.approx(products, rel=0.02)
