"""The training that every strategy must equal, written from its definition: one document at a time, nothing shared.

This file imports nothing of `finetune`. No packing, no padding, no fused loss, no Accelerator: eager attention, all
logits held, gradients summed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

IGNORE = -100


class Document(NamedTuple):
    """Tokens and, at the same positions, the tokens to learn (IGNORE elsewhere)."""

    input_ids: list[int]
    labels: list[int]


class Step(NamedTuple):
    """What the loop reports of an optimizer step."""

    loss: float  # mean over the step's supervised tokens
    grad_norm: float  # before clipping


def reference_run(
    model: nn.Module,
    steps: Sequence[Sequence[Document]],
    *,
    learning_rates: Sequence[float],
    max_grad_norm: float | None = 1.0,
    weight_decay: float = 0.0,
) -> list[Step]:
    """Train a transformers model, in place, on the documents of each step; one learning rate a step.

    loss = sum over the step's supervised tokens of -log p(token | tokens before it) / their number; its gradient,
    clipped to a global norm; AdamW (Loshchilov and Hutter 2019) with decay on matrices alone.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.999), eps=1e-8)
    model.train()
    curve = []
    for documents, rate in zip(steps, learning_rates, strict=True):
        loss, gradients = loss_and_gradients(model, trained, documents)
        norm = float(sum(gradient.square().sum() for gradient in gradients) ** 0.5)
        # torch's clip_grad_norm_ adds 1e-6 to the norm; the curve after a clipped step shows it at 1e-6.
        factor = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = (gradient * factor).to(parameter.dtype)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        curve.append(Step(loss, norm))
    return curve


def loss_and_gradients(
    model: nn.Module, trained: Sequence[nn.Parameter], documents: Sequence[Document]
) -> tuple[float, list[torch.Tensor]]:
    """Mean loss over all supervised tokens of `documents`, and its gradients, both in float64."""
    tokens = sum(label != IGNORE for document in documents for label in document.labels[1:])
    total = 0.0
    gradients = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in trained]
    for document in documents:
        logits = model(input_ids=torch.tensor([document.input_ids]), use_cache=False).logits[0]  # [tokens, vocabulary]
        targets = torch.tensor(document.labels[1:])  # position t predicts token t + 1
        loss = cross_entropy(logits[:-1].float(), targets, ignore_index=IGNORE, reduction="sum")
        total += loss.item()
        for gradient, part in zip(gradients, torch.autograd.grad(loss, trained), strict=True):
            gradient += part / tokens
    return total / tokens, gradients
