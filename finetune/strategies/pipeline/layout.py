"""Finds which parts of a model run before its decoder layers and which after.

One forward of the structure on meta shows it, for any family. The layers must be a line: each takes the previous
layer's output and nothing else that weights had a part in. Then a stage can begin at any layer with that one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import FinetuneError

_TOKENS = 8  # of the forward on meta
SEEN = "finetune_layout"  # an attention that has no mask, as the kit's own, and can be called on meta


@dataclass(frozen=True)
class Parts:
    """The modules of a decoder that have weights, by their paths."""

    layers: tuple[str, ...]
    before: Mapping[str, int]  # the embeddings among them; how wide is what each gives: [batch, tokens, width]
    after: tuple[str, ...]  # the head among them

    def place(self, name: str) -> int:
        """The index of a parameter's layer; -1 before the layers, the number of layers after them."""
        for path, index in self._places():
            if name.startswith(f"{path}."):
                return index
        raise AssertionError(f"{name} is in no part")

    def run_of(self, name: str, layers: Sequence[range]) -> int:
        """The run with a parameter's layer. The first run has what is before all layers, the last what is after."""
        index = self.place(name)
        if index < 0:
            return 0
        return next((run for run, held in enumerate(layers) if index in held), len(layers) - 1)

    def _places(self) -> Iterator[tuple[str, int]]:
        yield from ((path, index) for index, path in enumerate(self.layers))
        yield from ((path, -1) for path in self.before)
        yield from ((path, len(self.layers)) for path in self.after)


@dataclass
class _Seen:
    """The record of the forward on meta so far."""

    layers: int = 0
    gave: Any = None  # the layer before
    before: dict[str, int] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)


def parts_of(structure: PreTrainedModel) -> Parts:
    """The parts of a model on meta. The model has another attention afterwards.

    Raises FinetuneError if its layers are not a line.
    """
    layers = [path for path, module in structure.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    units = [
        path
        for path, module in structure.named_modules()
        if next(module.parameters(recurse=False), None) is not None and not _inside(path, layers)
    ]
    if not layers or any(_inside(layer, units) for layer in layers):
        raise _refused(structure, "has no list of layers that holds all weights between embeddings and head")
    AttentionInterface.register(SEEN, _attend)
    structure.set_attn_implementation(SEEN)
    seen = _Seen()

    def enter_layer(index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index != seen.layers or (index and not (args and args[0] is seen.gave)):
            raise _refused(structure, f"does not hand layer {index} what layer {index - 1} gave")
        others = pytree.tree_leaves((args[1:], kwargs))
        if index and any(isinstance(other, Tensor) and other.requires_grad for other in others):
            raise _refused(structure, f"hands layer {index} more than what layer {index - 1} gave")
        if any(isinstance(other, dict | list) for other in (*args, *kwargs.values())):
            raise _refused(structure, "has layers that share what they found")

    def leave_layer(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor) or output.shape[:2] != (1, _TOKENS):
            raise _refused(structure, "has layers that give more than one tensor of [batch, tokens, hidden]")
        seen.gave, seen.layers = output, seen.layers + 1

    def leave_unit(path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if 0 < seen.layers < len(layers) or (seen.layers == len(layers) and path in seen.before):
            raise _refused(structure, f"runs {path} between its layers")
        if seen.layers:
            seen.after.append(path)
        elif isinstance(output, Tensor) and output.shape[:2] == (1, _TOKENS) and output.ndim == 3:
            seen.before[path] = output.shape[-1]
        else:
            raise _refused(structure, f"makes of tokens, by {path}, what is not [batch, tokens, width]")

    hooks = []
    for index, path in enumerate(layers):
        layer = structure.get_submodule(path)
        hooks.append(layer.register_forward_pre_hook(partial(enter_layer, index), with_kwargs=True))
        hooks.append(layer.register_forward_hook(leave_layer))
    for path in units:
        hooks.append(structure.get_submodule(path).register_forward_hook(partial(leave_unit, path)))
    try:
        # One document of a few tokens, as the trainer's batches have them.
        tokens = torch.zeros((1, _TOKENS), dtype=torch.int64, device="meta")
        structure(
            input_ids=tokens,
            position_ids=torch.zeros_like(tokens),
            use_cache=False,
            cu_seq_lens=torch.zeros(2, dtype=torch.int32, device="meta"),
            document_lengths=(_TOKENS,),
        )
    finally:
        for hook in hooks:
            hook.remove()
    if seen.layers != len(layers):
        raise _refused(structure, f"runs {seen.layers} of its {len(layers)} layers")
    idle = [path for path in units if path not in seen.before and path not in seen.after]
    return Parts(tuple(layers), seen.before, (*seen.after, *idle))


def _inside(path: str, others: Sequence[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") or not other for other in others)


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """A tensor with attention's output shape, [batch, tokens, heads, width], that depends on its weights."""
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous(), None


def _refused(model: nn.Module, why: str) -> FinetuneError:
    return FinetuneError(
        f"accelerate_config: {type(model).__name__} {why}, so it cannot be split over the stages of a pipeline; set "
        "accelerate_config=fsdp2"
    )
