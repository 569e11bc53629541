"""Modules whose weights ZeRO-3 gathers together, before their forward and not inside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from finetune.architecture.by_document import first_parameter


def gather_at_once(modules: Iterable[nn.Module]) -> None:
    """Gather these modules' weights before their forward, not inside it. The inner forward runs once per document in a
    rank's row: ranks with different numbers of documents would wait for each other for ever.

    DeepSpeed then reduces their gradients when backward has passed their inputs. torch sees only inputs that are given
    by position and need a gradient. Without such an input, gradients would be reduced before they are computed.
    """
    from deepspeed.utils import set_z3_leaf_module

    for module in modules:
        set_z3_leaf_module(module, True)
        module.register_forward_pre_hook(_input_by_place, with_kwargs=True)


def _input_by_place(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Its hidden states as the first positional argument, with a gradient wherever one is computed."""
    hidden, *rest = args or (kwargs.pop(first_parameter(module)),)
    if torch.is_grad_enabled() and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    return (hidden, *rest), kwargs
