"""`finetune eval` by several ranks, for models that one GPU does not hold, and for more speed.

    finetune eval RUN --processes 8                              one machine
    torchrun --nnodes 2 ... -m finetune.cli.main eval RUN        several, on each of them

Where the training sharded the weights, its own strategy shards them again, and each answer is computed by all ranks'
weights. Else each rank loads the model. In both cases the ranks share the rows out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator

from finetune.architecture import attention
from finetune.errors import FinetuneError
from finetune.finished_run import BOTH, FinishedRun, best_device, models_of
from finetune.generation.held_out import Batching
from finetune.generation.settings import may_share_a_batch, stop_on
from finetune.launch.cpu_memory import give_back_freed_memory
from finetune.launch.launcher import RANK_0_SECONDS, Launch, speaks_for_ranks
from finetune.launch.rendezvous import TIME_FOR_RANK_0, rendezvous
from finetune.measure.phases import give_back_cached_memory
from finetune.model.build import attention_name
from finetune.model.dtypes import COMPUTE
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy, strategy_of
from finetune.recipe.strategy_fit import refuse_recipe
from finetune.strategies.accelerator import build_accelerator, use_all_cores
from finetune.strategies.assemble import Assembled, assemble
from finetune.strategies.machine import device_of, refuse_machine
from finetune.strategies.pieces import Ranks, all_ranks
from finetune.training.batch_plan import BatchPlan, plan_batches
from finetune.training.start_adapter import find_start_adapter, start_from
from finetune.training.watchdog import BROKEN

LOST_SECONDS = 2.0  # until the launcher has seen that another rank ended first


@dataclass(frozen=True)
class Computing:
    """The processes that compute an evaluation's losses and answers."""

    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    accelerator: Accelerator | None = None  # of several ranks
    launch: Launch | None = None
    sharding: Strategy | None = None  # None: each rank has the whole model

    def autocast(self, recipe: Recipe) -> AbstractContextManager[Any]:
        """The arithmetic of the training's evaluations. A sharding strategy's model computes in its own format."""
        compute = COMPUTE[recipe.training.mixed_precision]
        if compute is None or self.sharding is not None:
            return nullcontext()
        return torch.autocast(self.device.type, compute)

    def plan(self, recipe: Recipe, rows: int) -> BatchPlan:
        """The trainer's own batches of rows, shared out among these ranks."""
        flat, ranks = attention_name(recipe) == attention.NAME, self.ranks
        return plan_batches(recipe, rows, world_size=ranks.world, rank=ranks.rank, flat=flat)


@contextmanager
def computing_ranks(recipe: Callable[[], Recipe], launch: Launch | None) -> Iterator[Computing]:
    """This process alone, or the process group of an evaluation. Every rank enters it. Raises EnvironmentMismatch.

    Args:
        recipe: Gives the strategy that shards the weights.
    """
    if launch is None or launch.world_size == 1:
        yield Computing(best_device())
        return
    try:
        evaluated = _as_evaluated(recipe())
        strategy, device = refuse_recipe(evaluated), device_of(launch)
        refuse_machine(evaluated, strategy, launch)
        with rendezvous(launch):
            accelerator = build_accelerator(evaluated, strategy, launch)
        use_all_cores(launch, device, offloaded=strategy.offloaded)
        try:
            sharding = strategy if strategy.shards_parameters else None
            # Over gloo, and without an end: rank 0 may run a slow scorer while the others wait.
            waiting = dist.new_group(backend="gloo", timeout=TIME_FOR_RANK_0) if dist.is_initialized() else None
            yield Computing(accelerator.device, all_ranks(waiting), accelerator, launch, sharding)
        finally:
            if strategy.uses_engine:
                from finetune.strategies.zero import release_engine

                release_engine(accelerator)
            accelerator.end_training()
    # One rank says why it failed, and the launcher ends the others. A rank above 0 waits before it says so: if all
    # ranks have the error, rank 0 says it meanwhile. A rank whose connection to a failed rank breaks says nothing.
    except FinetuneError:
        if not speaks_for_ranks():
            time.sleep(RANK_0_SECONDS)
        raise
    except RuntimeError as error:
        if not BROKEN.search(str(error)):
            raise
        time.sleep(LOST_SECONDS)
        raise SystemExit(1) from error


def _as_evaluated(recipe: Recipe) -> Recipe:
    """The recipe under the strategy that shards its weights, or under ddp if the training did not shard them.

    A pipeline's weights are sharded by FSDP2.
    """
    strategy, changes = strategy_of(recipe), dict[str, Any](report_to=[])
    if strategy.schedule is not None:
        changes["accelerate_config"] = "fsdp2"
    elif not strategy.shards_parameters:
        changes["accelerate_config"] = "ddp"
    if not torch.cuda.is_available():
        changes["budget"] = recipe.budget.model_copy(update={"gpus": 0})
    return recipe.model_copy(update=changes)


def batching_of(run: FinishedRun, computing: Computing, *, alone: bool = False) -> Batching:
    """How the run's model answers prompts: together in batches if its probe allows padding, and not `alone`."""
    probed = run.facts.receipt.get("probe") if run.trained and not alone else None
    return Batching(may_share_a_batch(probed or {}), computing.device, computing.ranks, computing.sharding is not None)


def models_by_ranks(
    run: FinishedRun, computing: Computing, names: Sequence[str] = BOTH
) -> Iterator[tuple[str, Assembled]]:
    """("base", ...), then ("tuned", ...), as `models_of`. Every rank calls it."""
    if computing.sharding is None:
        for name, model in models_of(run, computing.device, with_loss=True, names=names):
            yield name, Assembled(model, model, None)
            del model  # before the next one is loaded
        return
    recipe = _as_evaluated(run.recipe)
    assert computing.accelerator is not None
    if recipe.lora is None:
        # The exported model's folder takes the base's place. Its files have the new tokens' rows.
        tuned = recipe.model.model_copy(
            update={"name_or_path": str(run.product), "revision": "main", "new_tokens": [], "adapter": None}
        )
        sections = {"base": recipe.model, "tuned": tuned}
        for name in names:
            yield name, _assembled(run, recipe.model_copy(update={"model": sections[name]}), computing)
            computing.accelerator.free_memory()
            give_back_freed_memory()
            give_back_cached_memory(computing.device)
        return
    # Build empty adapters, then load the exported weights into them.
    lora = recipe.lora.model_copy(update={"init_lora_weights": True})
    named = recipe.model.model_copy(update={"adapter": str(run.product), "adapter_revision": None})
    adapter = None
    if "tuned" in names:
        zero3: AbstractContextManager[None] = nullcontext()
        if computing.sharding.uses_engine:
            from finetune.strategies.zero import loading_unsharded

            zero3 = loading_unsharded(computing.accelerator.state.deepspeed_plugin)
        with zero3:  # the model that it is compared with is built without data
            adapter = find_start_adapter(recipe.model_copy(update={"lora": lora, "model": named}))
        assert adapter is not None
    section = recipe.model.model_copy(update={"adapter": None})
    assembled = _assembled(run, recipe.model_copy(update={"lora": lora, "model": section}), computing)
    if "base" in names:
        with cast("Any", assembled.unwrapped_model).disable_adapter():
            yield "base", assembled
    if adapter is not None:
        start_from(assembled, adapter)
        yield "tuned", assembled


def _assembled(run: FinishedRun, recipe: Recipe, computing: Computing) -> Assembled:
    assert computing.sharding is not None
    assert computing.accelerator is not None
    assembled = assemble(recipe, computing.sharding, computing.accelerator, launch=computing.launch)
    stop_on(assembled.decoder, run.conversation.stops.values())
    return assembled
