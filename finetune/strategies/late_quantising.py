"""4-bit weights that are quantised one by one, on a rank's device, just before each is sharded.

Rank 0 alone has the base's weights (`build_on_rank_0`, which FSDP2 calls for plain weights too). It maps the files into
memory, and 4-bit layers hold the files' values. When an engine shards a weight, it is read, moved to the device and
quantised there, whole, because double quantisation subtracts the mean over all scales. So host memory holds one weight
at a time: for 70B 0.5 GB in bfloat16 instead of 35 GB packed. And no rank waits in a collective for longer than one
weight takes.

Pages of a mapped file count as the process's while any tensor from that file is not yet sharded, although the kernel
takes them back when it needs them. Some weights are read into host memory at once: those not stored in the recipe's
`model.dtype`, and those that transformers joins from several.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Conv1D, PreTrainedModel

from finetune.errors import FinetuneError
from finetune.launch.launcher import Launch
from finetune.launch.rendezvous import TIME_FOR_RANK_0
from finetune.model.adapter_targets import has_experts
from finetune.model.build import (
    bitsandbytes_config,
    check_quantized,
    configuration,
    decoder_parts,
    load_base,
)
from finetune.model.quantization import (
    correct_on_cpu,
    hollow_weight,
    named_quantized_layers,
    packing_settings,
    plain_quantized_weights,
    quantize_structure,
    state_tensors,
)
from finetune.recipe.schema import Recipe
from finetune.strategies.fsdp import Late, replace_tensor, ties_kept


@dataclass(frozen=True)
class Unquantised:
    """The weight of a 4-bit layer as its file has it, [out, in], and how bitsandbytes is to quantise it."""

    values: Tensor
    settings: dict[str, Any]  # of bitsandbytes' parameter

    def quantised(self, device: torch.device) -> Any:
        """bitsandbytes' parameter on `device`, packed, with its QuantState; quantised there, as transformers does."""
        return self._parameter(self.values, bnb_quantized=False).to(device)

    def plain(self, path: str, device: torch.device) -> dict[str, Tensor]:
        """The packed weight and its QuantState's tensors on `device`, by their names in the layer at this path."""
        weight = self.quantised(device)
        state = {f"{path}.{buffer}": tensor for buffer, tensor in state_tensors(weight.quant_state)}
        return {f"{path}.weight": weight.detach().as_subclass(Tensor), **state}

    def on_meta(self) -> Any:
        """The parameter that ranks have that read nothing."""
        return self._parameter(self.values.to("meta"), bnb_quantized=False)

    def stand_in(self) -> Any:
        """A parameter that passes for the packed one, [packed, 1], while adapters are made; one element in memory."""
        packed = hollow_weight(self.on_meta())
        one = torch.zeros(1, 1, dtype=packed.dtype)
        return self._parameter(one.expand(packed.shape), bnb_quantized=True)

    def _parameter(self, data: Tensor, *, bnb_quantized: bool) -> Any:
        from bitsandbytes.nn import Params4bit  # type: ignore[attr-defined]  # which is typed in part

        return Params4bit(data, requires_grad=False, bnb_quantized=bnb_quantized, **self.settings)


def load_unquantised(
    recipe: Recipe, device: torch.device, *, dtype: torch.dtype | None = None, quantise_on: torch.device | None = None
) -> PreTrainedModel:
    """`load_base` for a host: the base has its 4-bit layers, and their weights are quantised when they are sharded.

    A base that is stored in 4 bits is loaded as it is. A mixture is quantised while it is loaded, one parameter after
    another on `quantise_on`, because transformers joins most mixtures' experts in host memory. Raises what `load_base`
    raises.
    """
    assert recipe.quantization is not None
    config = configuration(recipe)
    if getattr(config, "quantization_config", None) or has_experts(config):
        return load_base(recipe, device, dtype=dtype, quantise_on=quantise_on)
    model = load_base(recipe.model_copy(update={"quantization": None}), device, dtype=dtype)
    stored = {name: tensor.detach() for name, tensor in model.named_parameters()}
    quantize_structure(model, bitsandbytes_config(recipe.quantization, model.config))
    for path, layer in named_quantized_layers(model):
        values = stored[f"{path}.weight"]
        # GPT-2's layers have theirs the other way round.
        values = values.T if issubclass(layer.source_cls, Conv1D) else values
        waiting = Unquantised(values, packing_settings(layer.weight))
        layer.unquantised, layer.weight = waiting, waiting.stand_in()
        if layer.bias is not None:
            layer.bias = nn.Parameter(stored[f"{path}.bias"], requires_grad=False)
    check_quantized(model, _ready)
    return model


def _ready(module: nn.Module) -> nn.Module:
    """A copy of one module with its layers quantised."""
    made = copy.deepcopy(module)
    for _, layer in named_quantized_layers(made):
        layer.weight = layer.unquantised.quantised(torch.device("cpu"))
    correct_on_cpu(made)
    return made


def build_on_rank_0(
    recipe: Recipe, build: Callable[..., nn.Module], launch: Launch | None, quantise_on: torch.device, **options: Any
) -> nn.Module:
    """The model, with its weights on rank 0 and without elsewhere, and rank 0's generation settings on all.

    When rank 0 fails, so do all.
    """
    model, failure = None, None
    if recipe.quantization is not None:
        options["load"] = partial(load_unquantised, quantise_on=quantise_on)
    with waiting_for_rank_0(recipe, launch) as group:
        try:
            model = build(recipe, torch.device("cpu" if dist.get_rank() == 0 else "meta"), **options)
        except FinetuneError as error:
            failure = error
        refusal = _broadcast_from_rank_0(None if failure is None else (type(failure), str(failure)), group)
    if refusal is not None:
        kind, text = refusal
        raise kind(text)
    if failure is not None:
        raise failure
    assert model is not None
    decoder = decoder_parts(model)
    decoder.generation_config = _broadcast_from_rank_0(getattr(decoder, "generation_config", None))
    return model


@contextmanager
def waiting_for_rank_0(recipe: Recipe, launch: Launch | None) -> Iterator[dist.ProcessGroup | None]:
    """A group to wait in while rank 0 opens a base that will be quantised.

    That takes seconds, because no weight is read then. It takes minutes if the files have another number format than
    the recipe, and the ranks' own group may give up. Gloo waits without spinning on a core.
    """
    if recipe.quantization is None or launch is None:
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=TIME_FOR_RANK_0)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _broadcast_from_rank_0(thing: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Rank 0's object, on every rank; pickled, but only between ranks of one program."""
    things = [thing]
    dist.broadcast_object_list(things, src=0, group=group)
    return things[0]


def make_plain(model: nn.Module) -> dict[str, Late]:
    """Make 4-bit weights plain (model/quantization.py), in place. Call it after peft.

    Returns these weights by name. If a weight waits to be quantised, its function does so, and returns the packed
    weight and its buffers, by name. None: it is packed already, or only rank 0 has it. Empty for a planner, whose
    weights are plain from the start.
    """
    late: dict[str, Late] = {}
    for path, layer in named_quantized_layers(model):
        if hasattr(layer, "packing"):
            continue
        waiting = layer.__dict__.pop("unquantised", None)
        if waiting is not None:
            layer.weight = waiting.on_meta()
        late[f"{path}.weight"] = waiting and partial(waiting.plain, path)
    plain_quantized_weights(model)
    return late


def filled_one_by_one(
    model: nn.Module, late: dict[str, Late], device: torch.device, dtype: torch.dtype
) -> Iterator[nn.Parameter]:
    """The model's frozen parameters, filled one at a time, for an engine that shards each parameter as it gets it.

    Every rank iterates. Only rank 0 has weights, in host memory; other ranks have meta tensors. A frozen parameter is
    yielded on `device`, with rank 0's values there and any values elsewhere, because the engine broadcasts what it
    shards. Trained parameters and buffers are the same on every rank afterwards, trained ones in host memory.

    Args:
        late: From `make_plain`. It is empty afterwards, so that nothing keeps the weights' sources.
        dtype: For weights that are neither packed nor trained.
    """
    with ties_kept(model):
        for name, parameter in list(model.named_parameters()):
            if parameter.requires_grad:
                replace_tensor(model, name, nn.Parameter(_broadcast(parameter.detach(), device).cpu()))
                continue
            _fill_frozen(model, name, late, device, dtype)
            yield model.get_parameter(name)
    for name, buffer in list(model.named_buffers()):
        replace_tensor(model, name, _broadcast(buffer, device))


def _fill_frozen(model: nn.Module, name: str, late: dict[str, Late], device: torch.device, dtype: torch.dtype) -> None:
    """Put one frozen parameter on the device, quantised now if it waits. A function by itself, so that no name keeps
    the values that the engine shards."""
    values = model.get_parameter(name).detach()
    if name in late or values.dtype in (torch.uint8, torch.int8):
        dtype = values.dtype
    if (make := late.pop(name, None)) is not None:
        buffers = make(device)
        values = buffers.pop(name)
        for place, tensor in buffers.items():
            replace_tensor(model, place, tensor)
    replace_tensor(model, name, nn.Parameter(_moved(values, device, dtype), requires_grad=False))


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The tensor on `device`, in `dtype`. A meta tensor has no values, so the result has none either."""
    if tensor.device.type == "meta":
        return torch.empty_like(tensor, dtype=dtype, device=device)
    return tensor.to(device).to(dtype)


def _broadcast(tensor: Tensor, device: torch.device) -> Tensor:
    """Rank 0's values, on the device of each rank."""
    values = _moved(tensor, device, tensor.dtype).contiguous()
    dist.broadcast(values, src=0)
    return values
