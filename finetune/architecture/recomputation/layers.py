"""Every n-th decoder layer is recomputed in backward.

Only a layer's forward is recomputed. A strategy's hooks around a layer run once, so no weight is gathered twice. From
torch 2.13 on, a compiled layer is one graph with its recomputation. transformers works this way since 5.24. Earlier
releases recompute the whole call with its hooks; `checkpoint_layers` brings the later way to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.architecture.by_document import Contexts, checkpoint_contexts
from finetune.architecture.recomputation.kept_products import keeping_and_returning
from finetune.errors import FinetuneError


def checkpoint_layers(model: PreTrainedModel, every: int, *, keep_products: bool = False) -> None:
    """Recompute every n-th decoder layer in backward, by torch's non-reentrant checkpoint.

    Args:
        keep_products: Keep matrix products and attention outputs, and recompute the rest.
    """
    # Renamed within transformers 5; the old name warns in the new releases.
    renamed = hasattr(model, "activation_checkpointing_enable")
    enable = model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
    with suppress(ValueError):  # a class that says it has none
        enable({"use_reentrant": False} | checkpoint_options(model, keep_products=keep_products))
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise FinetuneError(
            f"training.activation_checkpointing: {type(model).__name__} does not support it; set it to false"
        )
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % every == 0
        layer.finetune_keeps_products = keep_products
    for kind in {type(layer) for layer in layers}:
        _recompute_forward_alone(kind)


def _recompute_forward_alone(kind: Any) -> None:
    """Let layers of this class recompute their forward instead of their call, under transformers before 5.24.

    There the base class overrides `__call__` to checkpoint it. FSDP2 makes a subclass of `kind` for its shards, which
    inherits both methods from here.
    """
    if kind.__call__ is nn.Module.__call__:
        return
    forward: Callable[..., Any] = kind.forward

    @wraps(forward)
    def recomputed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(partial(forward, self, **kwargs), *args)
        return forward(self, *args, **kwargs)

    kind.forward, kind.__call__ = recomputed, nn.Module.__call__


def keeps_products(layer: nn.Module) -> bool:
    """Whether a layer is recomputed but for its products."""
    return bool(getattr(layer, "gradient_checkpointing", False) and getattr(layer, "finetune_keeps_products", False))


def checkpoint_options(model: nn.Module, *, keep_products: bool = False) -> dict[str, Any]:
    """Options for torch's checkpoint, so that a layer that runs again sees the same row and its kept products."""
    row = checkpoint_contexts(model)
    if not keep_products:
        if row is None:
            return {}
        return {"context_fn": row}
    return {"context_fn": keeping_and_returning if row is None else _both(row, keeping_and_returning)}


def _both(first: Callable[[], Contexts], second: Callable[[], Contexts]) -> Callable[[], Contexts]:
    def contexts() -> Contexts:
        outer, inner = first(), second()
        return _entered(outer[0], inner[0]), _entered(outer[1], inner[1])

    return contexts


@contextmanager
def _entered(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
