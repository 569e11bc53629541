"""Rotary frequencies that depend on a text's length (`longrope`, `dynamic`), chosen for each document on the host.

transformers uses the forward's longest position as the length. In a flat row this is the longest document's length, so
one long document would change the rotation of every short one. The library also reads that position back from the
device in each forward, and keeps the frequencies for later forwards. Here each document gets the frequencies that it
has alone, from the lengths that the host already knows.
"""

from __future__ import annotations

import inspect
from itertools import groupby
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.architecture.by_document import RowDocuments
from finetune.architecture.loss import decoder_of

MOST_KEPT = 64  # sets of frequencies that a module keeps on its device, a few hundred bytes each


def rotate_by_document(model: PreTrainedModel) -> None:
    """Give each document its own rotary frequencies, in rows that come with `document_lengths`.

    Changes only those module instances in `model` that choose frequencies by a text's length. Other forwards run the
    library's code.
    """
    modules: list[Any] = [module for module in model.modules() if any(map(_by_length, _kinds(module)))]
    if not modules:
        return
    row = RowDocuments()
    decoder_of(model).register_forward_pre_hook(row.of_forward, with_kwargs=True)
    for module in modules:
        module.finetune_row, module.finetune_frequencies = row, {}
        module.forward = MethodType(_forward, module)


def _kinds(module: Any) -> list[str]:
    """The library's names for its methods to compute frequencies: one, or one for each kind of layer."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, dict):
        return list(kinds.values())
    if isinstance(kinds, str):
        return [kinds]
    return []


def _by_length(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


@torch.no_grad()
def _forward(module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    given, name, kind, lengths = dict[str, Any](), "inv_freq", module.rope_type, module.finetune_row.lengths
    if layer_type is not None:
        given, name, kind = {"layer_type": layer_type}, f"{layer_type}_inv_freq", kind[layer_type]
    if not lengths or sum(lengths) != position_ids.shape[-1] or not _by_length(kind):
        return type(module).forward(module, x, position_ids, **given)
    rotate = inspect.unwrap(type(module).forward)  # without the decorator that looks up the length
    librarys, parts, start = getattr(module, name), [], 0
    counting = [(_length_that_counts(module, kind, layer_type, length), length) for length in lengths]
    try:
        for length, run in groupby(counting, key=lambda pair: pair[0]):  # neighbours with the same frequencies
            end = start + sum(tokens for _, tokens in run)
            setattr(module, name, _frequencies(module, kind, layer_type, length, x.device))
            parts.append(rotate(module, x, position_ids[..., start:end], **given))
            start = end
    finally:
        setattr(module, name, librarys)
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, dim=-2)
    return tuple(torch.cat(part, dim=-2) for part in zip(*parts, strict=True))


def _length_that_counts(module: Any, kind: str, layer_type: str | None, length: int) -> int | None:
    """The length that decides a document's frequencies; None: the frequencies that the model was built with."""
    parameters = module.config.rope_parameters
    if kind == "longrope":
        own = parameters if layer_type is None else parameters[layer_type]
        original = int(own["original_max_position_embeddings"])
        if length > original:
            return original + 1
        return None
    if length > module.original_max_seq_len:
        return length
    return None


def _frequencies(module: Any, kind: str, layer_type: str | None, length: int | None, device: torch.device) -> Tensor:
    """Frequencies on the device, [head_dim / 2] float32. The copy from pinned memory does not wait."""
    kept: dict[Any, Tensor] = module.finetune_frequencies
    key = layer_type, length, device
    if key not in kept:
        if length is None:
            prefix = "" if layer_type is None else f"{layer_type}_"
            frequencies: Tensor = getattr(module, f"{prefix}original_inv_freq")
        else:
            given = {} if layer_type is None else {"layer_type": layer_type}
            # A tensor, as in the library: Python would compute `dynamic`'s power in float64. longrope only compares.
            seq_len: Any = length if kind == "longrope" else torch.tensor(length)
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=seq_len, **given)
        if frequencies.device != device:
            frequencies = (frequencies.pin_memory() if device.type == "cuda" else frequencies).to(
                device, non_blocking=True
            )
        if len(kept) >= MOST_KEPT:
            kept.clear()
        kept[key] = frequencies
    return kept[key]
