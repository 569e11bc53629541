"""An adapter's sums on parameters that are no layer's weight, such as a mixture's experts, by the files' tensors.

transformers 5 holds experts as one three-dimensional parameter and saves most of them as one matrix per expert. Its own
conversion turns an adapter's sum into the files' tensors. It only rearranges numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from finetune.errors import FinetuneError
from finetune.model.adapters import silenced_peft
from finetune.model.quantization import as_quantized
from finetune.recipe.schema import Quantization
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


class PackedParameters:
    """Experts that training had in 4 bits, dequantised, by the names in the base's files. The last KEPT stay in memory.

    A parameter is quantised whole, because its scales are quantised by their mean over all experts.
    """

    def __init__(
        self,
        structure: PreTrainedModel,
        quantization: Quantization | None,
        read: Callable[[str], Tensor],
        file_name: Callable[[str], str],
    ) -> None:
        self._structure, self._quantization, self._read, self._file_name = structure, quantization, read, file_name
        self._kept: OrderedDict[str, Mapping[str, Tensor]] = OrderedDict()
        shapes = {path: getattr(module, "finetune_experts", None) for path, module in structure.named_modules()}
        self._shapes = {path: shape for path, shape in shapes.items() if shape is not None}
        self._owner = {
            name: path
            for path, shape in self._shapes.items()
            for name in in_files(structure, path, torch.empty(shape, device="meta"), file_name)
        }

    @property
    def names(self) -> set[str]:
        """The tensors in the base's files that are parts of such parameters."""
        return set(self._owner)

    def of(self, name: str) -> Tensor:
        """This tensor's numbers after quantisation."""
        path = self._owner[name]
        if path not in self._kept:
            parts = {own_name: self._read(own_name) for own_name, owner in self._owner.items() if owner == path}
            whole = torch.empty(self._shapes[path], dtype=next(iter(parts.values())).dtype)
            places = in_files(self._structure, path, whole, self._file_name)
            for own_name, part in parts.items():
                places[own_name].copy_(part)  # a view, which its next line proves
                assert places[own_name].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), own_name
            assert self._quantization is not None
            rounded = as_quantized(whole.flatten(0, 1), self._quantization).view(whole.shape)
            self._kept[path] = in_files(self._structure, path, rounded, self._file_name)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[path][name]


def in_files(
    structure: PreTrainedModel, path: str, tensor: Tensor, file_name: Callable[[str], str]
) -> Mapping[str, Tensor]:
    """A parameter's tensors as the base's files have them."""
    with torch.no_grad():
        converted: Mapping[str, Tensor] = revert_weight_conversion(structure, {path: tensor})
    return {file_name(name): part for name, part in converted.items()}


class ParameterDeltas:
    """The sums that an adapter adds to parameters, by the names in the base's files. The last KEPT stay in memory."""

    def __init__(
        self,
        structure: PreTrainedModel,
        parameters: Mapping[str, AdaptedParameter],
        settings_of: Callable[[str], Mapping[str, Any]],
        read: Callable[[str], Tensor],
        file_name: Callable[[str], str],
    ) -> None:
        self._structure, self._settings_of, self._read = structure, settings_of, read
        self._file_name = file_name
        self._kept: OrderedDict[str, Mapping[str, Tensor]] = OrderedDict()
        self._owner: dict[str, AdaptedParameter] = {}
        for parameter in parameters.values():
            empty = torch.empty(parameter.shape, device="meta")
            self._owner |= dict.fromkeys(self._in_files(parameter, empty), parameter)

    @property
    def names(self) -> set[str]:
        """The tensors in the base's files that change."""
        return set(self._owner)

    def of(self, name: str) -> Tensor:
        """This tensor's sum, float32."""
        parameter = self._owner[name]
        if parameter.path not in self._kept:
            self._kept[parameter.path] = self._in_files(parameter, self._delta(parameter))
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return self._kept[parameter.path][name]

    def _in_files(self, parameter: AdaptedParameter, tensor: Tensor) -> Mapping[str, Tensor]:
        return in_files(self._structure, parameter.path, tensor, self._file_name)

    def _delta(self, parameter: AdaptedParameter) -> Tensor:
        """The parameter's sum, by peft's own merging into zeros with the parameter's shape."""
        holder, owner = nn.Module(), nn.Module()
        owner.register_parameter("held", nn.Parameter(torch.zeros(parameter.shape), requires_grad=False))
        owner.is_transposed = parameter.transposed  # type: ignore[assignment]  # peft asks for it
        holder.owner = owner
        settings = dict(self._settings_of(parameter.path))
        config = LoraConfig(target_modules=[], target_parameters=["owner.held"], **settings)
        with silenced_peft():
            adapted: Any = get_peft_model(holder, config)
        state = {f"base_model.model.owner.lora_{name}": self._read(key) for name, key in parameter.keys.items()}
        try:
            result: Any = set_peft_model_state_dict(adapted, state)
        except (RuntimeError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise FinetuneError(
                f"{parameter.path}: the adapter does not fit this base: {reason}; name its own base"
            ) from error
        assert not result.unexpected_keys, result.unexpected_keys
        delta: Tensor = adapted.merge_and_unload().owner.held.detach()
        if not delta.isfinite().all():
            raise FinetuneError(f"{parameter.path}: the adapter's numbers are not finite; nothing is merged")
        return delta
