"""Model and optimizer, built, sharded where the strategy shards, and prepared by Accelerate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from finetune.architecture.own_layers.compute import compute_layers
from finetune.errors import FinetuneError
from finetune.launch.launcher import Launch
from finetune.launch.rendezvous import TIME_FOR_RANK_0, collective_timeout
from finetune.model.build import build_model, decoder_parts
from finetune.model.dtypes import COMPUTE
from finetune.model.optimizer import make_optimizer
from finetune.model.quantization import unpacked_weight
from finetune.model.stored_structure import (
    StoredStructure,
    agree,
    fetch_weights,
    refuse_files,
    stored_structure,
)
from finetune.output_stream import one_line
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.strategies.pieces import Piece, all_ranks, full_shape, gathered, local_part, reshard

if TYPE_CHECKING:
    from finetune.strategies.pipeline.layout import Parts
    from finetune.strategies.pipeline.schedule import Pipeline


@dataclass(frozen=True)
class Assembled:
    """The parts that training works with."""

    model: Any  # called by the loop: wrapped, or sharded
    unwrapped_model: nn.Module  # with adapters and original parameter names: saved, exported, and used for generation
    optimizer: Any
    gathered_in: torch.dtype | None = None  # dtype of gathered weights, where their masters have another
    engine: Any = None  # DeepSpeed's, which holds the masters
    pipeline: Pipeline | None = None  # of which this rank is a stage; `model` is the same

    @property
    def decoder(self) -> PreTrainedModel:
        """The transformers model inside an adapter's wrapping, or the model itself."""
        return decoder_parts(self.unwrapped_model)

    def of_this_stage(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Select the saved tensors that this stage owns. Keys are `name` or `name:moment`."""
        if self.pipeline is None:
            return saved
        return self.pipeline.holding.of_this_stage(saved)

    def to_write(self, named: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor | Piece]:
        """The tensors for a checkpoint that this rank has, as pieces if other ranks have other ones."""
        if self.pipeline is None:
            return named
        return self.pipeline.holding.pieces(named)

    def trained_weights(self, *, dtype: torch.dtype | None, keep: bool) -> dict[str, torch.Tensor]:
        """The trained weights, unsharded and in host memory, on the ranks with `keep`; every rank calls it."""
        if self.engine is not None:
            from finetune.strategies.zero_state import full_weights

            return full_weights(self.engine, dtype=dtype, keep=keep)
        if self.pipeline is not None:
            return self.pipeline.holding.trained_weights(self.unwrapped_model, dtype=dtype, keep=keep)
        reshard(self.unwrapped_model)  # gathered parameters are in the format of the computation
        named = self.unwrapped_model.named_parameters(remove_duplicate=False)
        return gathered([(name, tensor) for name, tensor in named if tensor.requires_grad], dtype=dtype, keep=keep)


def assemble(
    recipe: Recipe,
    strategy: Strategy,
    accelerator: Accelerator,
    build: Callable[..., nn.Module] = build_model,
    mesh: DeviceMesh | None = None,
    parts: Parts | None = None,
    *,
    launch: Launch | None,
) -> Assembled:
    """A run's model and optimizer, before any checkpoint. Raises what `build_model` raises, on all ranks.

    The planner passes its own `build`, which returns the same model on fake tensors. It also passes the ranks' `mesh`
    or a pipeline's `parts`, because fake tensors cannot make them. `launch`: None where no ranks wait for each other.
    """
    if launch is not None and launch.world_size > 1:
        agree_on_structure(recipe)
    if strategy.shards_modules:
        from finetune.strategies.fsdp import make_mesh, shard_model
        from finetune.strategies.late_quantising import build_on_rank_0, make_plain

        mesh = mesh or make_mesh(strategy, accelerator.device, collective_timeout(recipe))
        unwrapped = build_on_rank_0(recipe, build, launch, accelerator.device)
        # The loop calls the decoder inside peft's model, because peft's own call would skip the hooks that gather
        # weights.
        decoder = decoder_parts(unwrapped)
        late = make_plain(decoder)
        compute_layers(unwrapped, unpacked_weight, mlp_tile_tokens=recipe.training.mlp_tile_tokens)
        compute = COMPUTE[recipe.training.mixed_precision]
        shard_model(decoder, strategy, mesh, accelerator.device, compute, late)
        optimizer = make_optimizer(unwrapped, recipe, local_part)
        groups = [list(group["params"]) for group in optimizer.param_groups]
        model, prepared = prepare_silenced(accelerator, decoder, optimizer)
        # Accelerate finds an optimizer's parameters again by address, which is 0 for every shard without a row.
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        return Assembled(model, unwrapped, prepared, gathered_in=compute)
    if strategy.uses_engine:
        from finetune.strategies.zero import build_under_zero

        unwrapped, engine, optimizer = build_under_zero(recipe, strategy, accelerator, build, launch)
        compute = COMPUTE[recipe.training.mixed_precision]
        return Assembled(engine, unwrapped, optimizer, gathered_in=compute, engine=engine)
    if strategy.schedule is not None:
        from finetune.strategies.pipeline.build import staged

        unwrapped, pipeline, optimizer = staged(recipe, strategy, accelerator, build, parts)
        return Assembled(pipeline, unwrapped, optimizer, pipeline=pipeline)
    unwrapped = build(recipe, accelerator.device)
    compute_layers(unwrapped, unpacked_weight, mlp_tile_tokens=recipe.training.mlp_tile_tokens)
    model, optimizer = prepare_silenced(accelerator, unwrapped, make_optimizer(unwrapped, recipe))
    return Assembled(model, unwrapped, optimizer)


def check_vocabulary(decoder: PreTrainedModel, largest: int) -> None:
    """Refuse data whose largest token id has no row in the embeddings. Raises FinetuneError."""
    embeddings: Any = decoder.get_input_embeddings()
    embeddings = getattr(embeddings, "original_module", embeddings)  # peft's wrapper computes its own weight
    rows = full_shape(embeddings.weight)[0]
    if largest >= rows:
        raise FinetuneError(
            f"model.name_or_path: the tokenizer makes token {largest}, the model has {rows} embeddings; "
            "use the tokenizer that belongs to the model"
        )


def agree_on_structure(recipe: Recipe) -> None:
    """Make every rank build the structure in rank 0's files (model/stored_structure.py), even if it sees no files.

    Raises FinetuneError on all ranks if files are incomplete, or if two machines have different files.
    """
    section, group = recipe.model, dist.new_group(backend="gloo", timeout=TIME_FOR_RANK_0)
    ranks, structure, refusal = all_ranks(group), None, ""
    try:
        if ranks.rank == 0:
            fetch_weights(section)
            structure, refusal = _structure_seen(recipe)
        shared, refusal = ranks.gather((structure, refusal))[0]
        if not refusal and ranks.rank != 0:
            structure, refusal = _structure_seen(recipe)
            if not refusal and structure is not None and shared is not None and structure.digest != shared.digest:
                refusal = (
                    f"model.name_or_path: {one_line(section.name_or_path)}: its files here have other tensors than "
                    "those that rank 0 sees; give all machines the same files"
                )
        refusals: list[str] = ranks.gather(refusal)
    finally:
        dist.destroy_process_group(group)
    if first := next(filter(None, refusals), None):
        where = f" (on rank {refusals.index(first)})" if refusals.index(first) else ""
        raise FinetuneError(first + where)
    if shared is not None:
        agree(section, shared.tied)


def _structure_seen(recipe: Recipe) -> tuple[StoredStructure | None, str]:
    """The structure in this rank's files, or why they give none."""
    try:
        structure = stored_structure(recipe.model)
        refuse_files(recipe, structure)
    except FinetuneError as error:
        return None, str(error)
    return structure, ""


def prepare_silenced(accelerator: Accelerator, *parts: Any) -> Any:
    """`accelerator.prepare`, without a deprecation warning that a user cannot act on."""
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers; 2.11 knows only this name, and buffers here never change.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
        return accelerator.prepare(*parts)
