"""The auxiliary loss that keeps a mixture of experts balanced, computed for one document at a time.

transformers computes it over a whole batch: the number of experts times the sum over experts of (choices per token x
mean probability). A product of two means changes with the split of a batch. Here both means are over one document, its
tokens and all layers with a router, as the library's own function gives them for a batch with that document alone. A
step's loss is then a sum over documents like its cross-entropy, for any split:

    sum over documents d of (cross-entropy summed over d + coefficient x supervised(d) x auxiliary(d))
    divided by the sum of supervised(d)

supervised(d) is the number of supervised tokens in d. So this is the mean of the library's losses for single documents,
weighted by these tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RouterLoss:
    """Asked for with a coefficient; a token goes to `chosen` experts."""

    coefficient: float
    chosen: int

    def summed(
        self,
        router_logits: Sequence[Tensor],
        position_ids: Tensor,
        shift_labels: Tensor,
        document_lengths: Sequence[int] = (),
    ) -> Tensor:
        """Coefficient x sum over documents of learned(d) x auxiliary(d), a float32 scalar; nothing is read on the host.

        Args:
            router_logits: One tensor for each layer with a router: [tokens, experts] or [rows, tokens, experts].
            position_ids: [rows, tokens], from 0 in each document. A padded tail counts as a document without supervised
                tokens.
            shift_labels: [rows, tokens], -100 where nothing is learned.
            document_lengths: For a flat row. Without them the row may have as many documents as tokens.
        """
        begins = (position_ids == 0).reshape(-1)
        document = begins.cumsum(0) - 1  # [tokens], int64
        count = len(document_lengths) or len(begins)  # of documents, at most
        experts = router_logits[0].shape[-1]
        ones = torch.ones_like(document, dtype=torch.float32)
        lengths = ones.new_zeros(count).index_add(0, document, ones)
        learned = ones.new_zeros(count).index_add(0, document, (shift_labels.reshape(-1) >= 0).float())
        choices, probabilities = ones.new_zeros(count * experts), ones.new_zeros(count, experts)
        for logits in router_logits:
            weights = logits.reshape(-1, experts).softmax(-1)  # [tokens, experts]; backward keeps it, of every layer
            expert = weights.topk(self.chosen, dim=-1).indices  # [tokens, chosen]
            place = (document.unsqueeze(1) * experts + expert).reshape(-1)
            choices = choices.index_add(0, place, ones.repeat_interleave(self.chosen))
            probabilities = probabilities.index_add(0, document, weights.float())
        rows = lengths.clamp(min=1) * len(router_logits)
        auxiliary = experts * (choices.view(count, experts) * probabilities).sum(1) / rows.square()
        return self.coefficient * (learned * auxiliary).sum()


def keep_routers_from_autocast(model: nn.Module, settings: dict[str, Any]) -> None:
    """Let routers that cast by themselves multiply in their format: float32 in GLM 4.5 and DeepSeek V3.

    Autocast would round their logits to 16 bits. 5 of 1,000 tokens then go to other experts than under FSDP2, ZeRO and
    on a server, which have no autocast.

    Args:
        settings: The text part's configuration.
    """
    counts = {value for key, value in settings.items() if "expert" in key and type(value) is int}
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        known = isinstance(module, nn.Linear | nn.Embedding) or not isinstance(weight, nn.Parameter)
        if not known and weight.ndim == 2 and len(weight) in counts and _casts_by_itself(module):
            module.forward = MethodType(_route, module)


def _casts_by_itself(router: nn.Module) -> bool:
    """Whether it takes hidden states of another format than its weight's, which a product alone does not."""
    small: Any = copy.copy(router)
    for name in ("_parameters", "_buffers"):
        held = {key: value for key, value in getattr(router, name).items() if value is not None}
        empty = {key: torch.empty(value.shape, dtype=torch.float32, device="meta") for key, value in held.items()}
        setattr(small, name, getattr(router, name) | empty)
    try:
        type(router).forward(small, torch.empty(1, small.weight.shape[1], dtype=torch.bfloat16, device="meta"))
    except Exception:  # a model's own code may raise anything; torch raises RuntimeError for unlike formats
        return False
    return True


def _route(router: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(hidden.device.type, enabled=False):
        return type(router).forward(router, hidden, *args, **kwargs)
