"""An adapter's sums on parameters that are no layer's weight, such as a mixture's experts, by the files' tensors.

transformers 5 holds experts as one three-dimensional parameter and saves most of them as one matrix per expert. Its own
conversion turns an adapter's sum into the files' tensors. It only rearranges numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from finetune.errors import FinetuneError
from finetune.hand_over.weight_files import load_adapter
from finetune.model.adapters import silenced_peft
from finetune.model.quantization import as_quantized
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.lora import ends_of

WRAPPED = ".base_layer"  # peft puts one wrapper around another for each further parameter of a module
KEPT = 3  # deltas in memory: the files hold a layer's expert parameters in turns


@dataclass(frozen=True)
class AdaptedParameter:
    """A parameter with an adapter: its path, shape, and the names of its tensors in the adapter's file."""

    path: str
    shape: tuple[int, ...]
    transposed: bool  # [experts, inputs, outputs]
    keys: Mapping[str, str]  # peft's name in the wrapper -> key


def adapted_parameters(
    structure: PreTrainedModel, layers: Mapping[str, Mapping[str, str]], targets: list[str]
) -> dict[str, AdaptedParameter]:
    """The adapter's `layers` that are not linear layers or embeddings, by their name among the layers.

    `targets` are its `target_parameters`. The innermost wrapper has the module's first one. Example with parameters
    gate_up_proj and down_proj: `experts.base_layer` adapts gate_up_proj, and `experts` adapts down_proj.
    """
    by_name = {}
    for name, keys in layers.items():
        path = name.replace(WRAPPED, "")
        try:
            module: Any = structure.get_submodule(path)
        except AttributeError:  # an adapter for another base: plan_merge reports the missing tensors
            continue
        if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
            continue
        own = [member for member, _ in module.named_parameters(recurse=False)]
        adapted = [member for member in own if any(ends_of([f"{path}.{member}"], target) for target in targets)]
        index = len(adapted) - 1 - name.count(WRAPPED)
        if not 0 <= index < len(adapted):  # no such parameter: plan_merge reports this too
            continue
        parameter = adapted[index]
        shape = tuple(getattr(module, parameter).shape)
        transposed = bool(getattr(module, "is_transposed", False))
        by_name[name] = AdaptedParameter(f"{path}.{parameter}", shape, transposed, keys)
    return by_name


class FileTensors:
    """Parameters that are computed, by the names of their parts in the base's files. The last KEPT stay in memory.

    Args:
        shapes: The parameters, by path.
        compute: A parameter's numbers, by path.
        file_name: A name in the files.
    """

    def __init__(
        self,
        structure: PreTrainedModel,
        shapes: Mapping[str, tuple[int, ...]],
        compute: Callable[[str], Tensor],
        file_name: Callable[[str], str],
    ) -> None:
        self._structure, self._file_name = structure, file_name
        self._computed = lru_cache(KEPT)(lambda path: self.parts(path, compute(path)))
        empty = {path: torch.empty(shape, device="meta") for path, shape in shapes.items()}
        self._owner = {name: path for path, tensor in empty.items() for name in self.parts(path, tensor)}

    @property
    def names(self) -> set[str]:
        """The tensors in the base's files that are parts of such parameters."""
        return set(self._owner)

    def of(self, name: str) -> Tensor:
        """This tensor's numbers."""
        return self._computed(self._owner[name])[name]

    def parts(self, path: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """A parameter's tensors as the base's files have them."""
        with torch.no_grad():
            converted: Mapping[str, Tensor] = revert_weight_conversion(self._structure, {path: tensor})
        return {self._file_name(name): part for name, part in converted.items()}


def packed_parameters(
    structure: PreTrainedModel, recipe: Recipe, read: Callable[[str], Tensor], file_name: Callable[[str], str]
) -> FileTensors:
    """Experts that training had in 4 bits, dequantised.

    A parameter is quantised whole, because its scales are quantised by their mean over all experts.
    """
    modules: dict[str, Any] = dict(structure.named_modules())
    shapes = {path: module.finetune_experts for path, module in modules.items() if hasattr(module, "finetune_experts")}

    def rounded(path: str) -> Tensor:
        whole = torch.empty(shapes[path], dtype=getattr(torch, recipe.model.dtype))
        # Where each file's tensor lies in the parameter. transformers copies some parts, so views cannot tell.
        places = torch.arange(whole.numel(), dtype=torch.int32 if whole.numel() < 2**31 else torch.int64)
        for name, part in tensors.parts(path, places.view(whole.shape)).items():
            if part.numel() == whole.numel() and torch.equal(part.flatten(), places):
                whole.copy_(read(name).view(whole.shape))
            else:
                whole.view(-1)[part.flatten().long()] = read(name).flatten().to(whole.dtype)
        assert recipe.quantization is not None
        return as_quantized(whole.flatten(0, 1), recipe.quantization).view(whole.shape)

    tensors = FileTensors(structure, shapes, rounded, file_name)
    return tensors


def parameter_deltas(
    structure: PreTrainedModel,
    parameters: Iterable[AdaptedParameter],
    settings_of: Callable[[str], Mapping[str, Any]],
    read: Callable[[str], Tensor],
    file_name: Callable[[str], str],
) -> FileTensors:
    """The sums that an adapter adds to parameters, float32."""
    by_path = {parameter.path: parameter for parameter in parameters}

    def delta(path: str) -> Tensor:
        """By peft's own merging into zeros with the parameter's shape."""
        parameter, owner = by_path[path], nn.Module()
        owner.register_parameter("held", nn.Parameter(torch.zeros(parameter.shape), requires_grad=False))
        owner.is_transposed = parameter.transposed  # type: ignore[assignment]  # peft asks for it
        config = LoraConfig(target_modules=[], target_parameters=["owner.held"], **settings_of(path))
        with silenced_peft():
            adapted: Any = get_peft_model(nn.ModuleDict({"owner": owner}), config)
        loaded = load_adapter(adapted, path, {f"owner.lora_{name}": read(key) for name, key in parameter.keys.items()})
        assert not loaded.unexpected_keys, loaded.unexpected_keys
        numbers: Tensor = adapted.merge_and_unload().owner.held.detach()
        if not numbers.isfinite().all():
            raise FinetuneError(f"{path}: the adapter's numbers are not finite; nothing is merged")
        return numbers

    return FileTensors(structure, {path: parameter.shape for path, parameter in by_path.items()}, delta, file_name)
