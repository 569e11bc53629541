"""The small model of the lecture, and what is tracked of a training on it: bytes of each part, in this process.

As a program, one way to train: `python -m lectures.qlora.small_model FOLDER 0`; its figures as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.closed_form.constants import GRADIENTS, OPTIMIZER_STATE, STEP_PHASES
from finetune.launch.launcher import Launch
from finetune.measure.phases import Phases
from finetune.model.optimizer import unwrap_optimizer
from finetune.planner import STEPS, Plan, worst_batches
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import strategy_of
from finetune.strategies.accelerator import build_accelerator
from finetune.strategies.assemble import assemble
from finetune.training.cast_weights import cast_weights
from finetune.training.objectives.supervised import Supervised
from finetune.training.run import StepParts
from finetune.training.step import optimizer_step

RECIPE_FILE = "recipe.json"
LAYERS, WIDTH, VOCABULARY, TOKENS = 6, 512, 8192, 256


@dataclass(frozen=True)
class PartBytes:
    """Bytes of a training's parts, and of all tensors at its peak."""

    weights: int  # base and adapters, as they are kept
    gradients: int
    states: int  # of the optimizer
    left: int  # by a forward for its backward: activations, the loss's gradient, 16-bit copies of float32 weights
    peak: int


def save_small_llama(folder: Path) -> int:
    """A Llama of 6 layers, at random, in bfloat16; the number of its weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=11 * WIDTH // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def planned_parts(planned: Plan) -> PartBytes:
    """By the plan's own names for tensors."""
    ends = {name: planned.phases[name].end for name in STEP_PHASES}
    return PartBytes(
        planned.phases["load"].end_bytes,
        ends["backward"].get(GRADIENTS, 0),
        ends["step"].get(OPTIMIZER_STATE, 0),
        planned.phases["forward"].end_bytes - planned.phases["step"].end_bytes,
        max(planned.phases[name].peak.nbytes for name in STEP_PHASES),
    )


def tracked_parts(recipe: Recipe) -> PartBytes:
    """Train two steps of the largest micro-batch: gradients and states are counted one by one on the tensors
    themselves, the rest by the bytes of live tensors."""
    strategy = strategy_of(recipe)
    accelerator = build_accelerator(recipe, strategy, Launch((), None, None, True, 1, 0, on_cpu=True))
    batches = worst_batches(recipe, 1)
    phases = Phases(accelerator.device, enabled=True)
    with phases("load"):
        parts = assemble(recipe, strategy, accelerator, launch=None)
    parts.model.train()
    inner, gradients = unwrap_optimizer(parts.optimizer), [0]
    inner.register_step_pre_hook(lambda optimizer, *_: gradients.append(_gradient_bytes(optimizer)))
    step = StepParts(
        accelerator=accelerator,
        model=parts.model,
        optimizer=parts.optimizer,
        objective=Supervised(),
        phases=phases,
        max_grad_norm=recipe.training.max_grad_norm,
        weights=cast_weights(recipe, strategy, parts.unwrapped_model),
    )
    tokens = sum(batch["shift_labels"].numel() for batch in batches)
    for _ in range(STEPS):  # the second has the optimizer's state beside everything
        optimizer_step(
            step, iter(batches), micro_steps=len(batches), planned_count=tokens, seed=None, stop=False
        ).result()
    found = phases.take()
    return PartBytes(
        found["load"].allocated_bytes,
        gradients[-1],
        _nbytes(each for state in inner.state.values() for each in state.values()),
        found["forward"].allocated_bytes - found["step"].allocated_bytes,
        max(found[name].peak_bytes for name in STEP_PHASES),
    )


def _gradient_bytes(optimizer: Any) -> int:
    return _nbytes(weight.grad for group in optimizer.param_groups for weight in group["params"])


def _nbytes(values: Iterable[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def main(words: list[str]) -> None:
    """Track the training of the recipe in FOLDER."""
    folder = Path(words[0])
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # logs missing optional kernels
    torch.set_num_threads(1)
    recipe = Recipe.model_validate_json((folder / RECIPE_FILE).read_text("utf-8"))
    (folder / "rank-0.json").write_text(json.dumps(vars(tracked_parts(recipe))), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
