"""An engine that shards, on one gloo rank in this process: it gathers, reduces and keeps state as one of many does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.tensor import debug
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune.launch.launcher import Launch
from finetune.measure.phases import Phases
from finetune.planner.trace.stand_ins import engine_without_ranks
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import read_strategy
from finetune.strategies.accelerator import build_accelerator
from finetune.strategies.assemble import Assembled, assemble
from finetune.strategies.zero import release_engine
from finetune.training.cast_weights import cast_weights
from finetune.training.objectives.supervised import Supervised
from finetune.training.run import StepParts
from finetune.training.step import optimizer_step
from finetune.training.update import StepResult
from tests.support.runs.launching import ALONE
from tests.support.runs.recipes import least_recipe

CPU = torch.device("cpu")
LEARNING_RATE = 1e-3
HERE = replace(ALONE, on_cpu=True)


def half_recipe(base: Path, folder: Path, strategy: str) -> Recipe:
    """All weights, computed in bfloat16: what is gathered is not what the optimizer holds."""
    training = {"mixed_precision": "bf16", "activation_checkpointing": False}
    training |= {"learning_rate": LEARNING_RATE, "weight_decay": 0.0}
    place = {"output_dir": str(folder / "run"), "accelerate_config": strategy}
    return least_recipe(base, lora=None, training=training, **place)


@contextmanager
def as_before() -> Iterator[None]:
    """Environment, process group and Accelerate's one state a process are afterwards what they were."""
    environment = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
        unset_hf_deepspeed_config()
        forget_world_group()
        # torch remembers what an operation on shards gives by their mesh, of whose groups none is left; no public way.
        debug._clear_sharding_prop_cache()
        os.environ.clear()
        os.environ.update(environment)


def forget_world_group() -> None:
    """DeepSpeed 0.19.0 keeps the process group of the first training; newer ones let go of a destroyed one."""
    if groups := sys.modules.get("deepspeed.utils.groups"):
        groups._WORLD_GROUP = None


def let_deepspeed_choose_the_cpu() -> None:
    """DeepSpeed decides once a process what it computes on: to be called before torch pretends to have GPUs."""
    with suppress(ImportError), mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):
        from deepspeed.accelerator import get_accelerator

        get_accelerator()


class OneRank:
    """A recipe's accelerator and parts, ready to train."""

    def __init__(self, recipe: Recipe, launch: Launch = HERE) -> None:
        strategy = read_strategy(recipe.accelerate_config)
        self.recipe = recipe
        self.accelerator: Accelerator = build_accelerator(recipe, strategy, launch)
        self.parts: Assembled = assemble(recipe, strategy, self.accelerator, launch=None)
        self.parts.model.train()
        for group in self.parts.optimizer.param_groups:
            group["lr"] = LEARNING_RATE

    def step(
        self,
        batches: Sequence[Any],
        model: nn.Module | None = None,
        phases: Phases | None = None,
        *,
        keeps_gradients: bool = False,
    ) -> StepResult:
        """One optimizer step, without clipping; `model` stands before the one that is trained."""
        strategy = replace(read_strategy(self.recipe.accelerate_config), keeps_gradients=keeps_gradients)
        parts = StepParts(
            accelerator=self.accelerator,
            model=model or self.parts.model,
            optimizer=self.parts.optimizer,
            objective=Supervised(),
            phases=phases or Phases(CPU, enabled=False),
            max_grad_norm=None,
            strategy=strategy,
            weights=cast_weights(self.recipe, strategy, self.parts.unwrapped_model),
        )
        supervised = sum(len(batch["supervised"]) for batch in batches)
        return optimizer_step(
            parts, iter(batches), micro_steps=len(batches), planned_count=supervised, seed=0, stop=False
        ).result()


@contextmanager
def one_rank(recipe: Recipe, launch: Launch = HERE, timeout: timedelta | None = None) -> Iterator[OneRank]:
    """Built in a process group of its own, and let go of. With a `launch` of several ranks each of them calls it, in a
    process of its own; a collective waits for `timeout`."""
    folder = Path(recipe.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(as_before())
        if read_strategy(recipe.accelerate_config).zero_stage:
            stack.enter_context(engine_without_ranks(CPU))
        if launch.world_size > 1:
            os.environ |= {"RANK": str(launch.rank), "LOCAL_RANK": str(launch.rank), "MASTER_ADDR": "127.0.0.1"}
            os.environ |= {"WORLD_SIZE": str(launch.world_size), "MASTER_PORT": "0"}
        place = {"rank": launch.rank, "world_size": launch.world_size}
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", timeout=timeout, **place)
        built = OneRank(recipe, launch)
        stack.callback(release_engine, built.accelerator)
        stack.callback((folder / "store").unlink, missing_ok=True)
        yield built
