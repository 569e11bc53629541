"""Which weights a stage holds, which of these it writes, and how an export collects all of them. With several
pipelines, the first one writes.

A stage keeps the whole structure. Other stages' weights are on meta, under the same names, and take no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from finetune.strategies.fsdp import Late, replace_tensor, ties_kept
from finetune.strategies.pieces import Elsewhere, Piece
from finetune.strategies.pipeline.ranks import StagePlace, Stages

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Holding:
    """The trained weights by the names of the model that the recipe builds, and the stages that hold them."""

    stages: Mapping[str, Stages]  # of each trained weight, in the model's order; tied ones have two
    aliases: Mapping[str, str]  # further names of tied weights, trained or not -> their first name
    place: StagePlace

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.place.stage

    def of_this_stage(self, saved: Mapping[str, Thing]) -> dict[str, Thing]:
        """Select the saved tensors that this stage owns. Keys are `name` or `name:moment`."""
        return {key: value for key, value in saved.items() if self.stage in self._stages_of(key, (self.stage,))}

    def pieces(self, named: Mapping[str, Tensor]) -> dict[str, Tensor | Piece]:
        """The tensors that this stage writes, each in full. The first stage that has a tensor writes it."""
        if self.place.copy:
            return {}
        written = {key: value for key, value in named.items() if self._stages_of(key, ())[0] == self.stage}
        return {key: Piece(value.detach(), tuple(value.shape), 0, live=True) for key, value in written.items()}

    def trained_weights(self, model: nn.Module, *, dtype: torch.dtype | None, keep: bool) -> dict[str, Tensor]:
        """All trained weights, in host memory of the first stage's rank, one sent after another; every rank calls it.

        A tensor under two names stays one tensor. Floating-point tensors are cast to `dtype` unless it is None.
        """
        if self.place.copy:
            return {}
        parameters = dict(model.named_parameters())
        result: dict[str, Tensor] = {}
        for name, stages in self.stages.items():
            parameter, owner = parameters[name], stages[0]
            full = parameter.detach()
            if owner and self.stage == owner:
                dist.send(full.contiguous(), dst=0)
            elif owner and self.stage == 0:
                assert isinstance(parameter, Elsewhere)
                full = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.stage_device)
                dist.recv(full, src=owner)
            if self.stage == 0 and keep:
                result[name] = full.to("cpu", dtype if full.is_floating_point() else None)
        return result | {alias: result[name] for alias, name in self.aliases.items() if name in result}

    def _stages_of(self, key: str, unknown: Stages) -> Stages:
        return self.stages.get(key.partition(":")[0], unknown)


def place_stage(
    model: nn.Module,
    decoder: PreTrainedModel,
    run_of: Mapping[str, int],
    place: StagePlace,
    device: torch.device,
    late: Mapping[str, Late] | None = None,
) -> tuple[Holding, dict[str, nn.Parameter]]:
    """Put this stage's weights on `device` and all others on meta, in place.

    Args:
        run_of: Each parameter's run of layers, by the decoder's name; the stages have the runs in turn.
        late: 4-bit weights by name that are quantised when their turn comes, with their buffers.

    Returns which stage holds what, and this stage's trained weights by name.
    """
    paths = {id(parameter): name for name, parameter in model.named_parameters()}
    stages: dict[int, set[int]] = {}
    for name, parameter in decoder.named_parameters(remove_duplicate=False):
        stages.setdefault(id(parameter), set()).add(run_of[name] % place.stages)
    held_by = {paths[which]: tuple(sorted(where)) for which, where in stages.items()}
    every = list(model.named_parameters(remove_duplicate=False))
    trained = {name: held_by[name] for name, parameter in model.named_parameters() if parameter.requires_grad}
    aliases = {name: paths[id(parameter)] for name, parameter in every if paths[id(parameter)] != name}
    aliases = {name: first for name, first in aliases.items() if first in trained}
    with ties_kept(model):
        for name, parameter in list(model.named_parameters()):
            if place.stage not in held_by[name]:
                replace_tensor(model, name, Elsewhere.of(parameter, device))
                continue
            make = late.get(name) if late else None
            values = make(device) if make else {name: parameter.detach().to(device)}
            moved = nn.Parameter(values.pop(name), requires_grad=parameter.requires_grad)
            for part, tensor in (values | {name: moved}).items():
                replace_tensor(model, part, tensor)
    # Another stage's 4-bit layers, whose scales are buffers. A planner's weights are of no class of ours.
    packed = [(path, layer) for path, layer in model.named_modules() if hasattr(layer, "packing")]
    elsewhere = {f"{path}." for path, layer in packed if layer.weight.is_meta}
    for name, buffer in list(model.named_buffers()):
        of_others = name.removesuffix(name.rpartition(".")[2]) in elsewhere
        replace_tensor(model, name, torch.empty_like(buffer, device="meta") if of_others else buffer.to(device))
    own = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    return Holding(trained, aliases, place), own
