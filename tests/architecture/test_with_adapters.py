"""Families that need more than plain attention, with adapters: loss and gradients against plain peft and transformers.

On an adapter that is no longer zero, packed by the kit's own batches, with and without recomputed layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from finetune.model.build import build_model
from finetune.tokens.batches import micro_batches
from tests.support.models.architectures import (
    Rows,
    Trained,
    Way,
    difference,
    documents,
    largest_difference,
    save_shaken,
)
from tests.support.runs.recipes import least_recipe

FAMILIES = "gpt_oss gemma2 cohere llama4_text qwen3_5_text qwen3_next lfm2 falcon_h1 granitemoehybrid seed_oss".split()
QUICK = ("gpt_oss", "gemma2", "qwen3_next", "llama4_text")
TOKENS = ["<date>", "<time>"]
LORA: dict[str, Any] = {"r": 2, "lora_alpha": 4.0, "target_modules": "all-linear"}


def shake(model: nn.Module) -> None:
    """Matrices B begin at zero, where A has no gradient."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
                assert "lora_" in name or "trainable_tokens_delta" in name


def gradients(model: nn.Module) -> Trained:
    return 0.0, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


Width = Callable[[nn.Module], nn.Module]


def librarys(folder: Path, adapters: Any, width: Width) -> Trained:
    """With the same adapters, each put in by peft."""
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    if adapters.trainable_token_indices:
        base.resize_token_embeddings(97 + len(TOKENS), mean_resizing=False)
    model = get_peft_model(base, copy.deepcopy(adapters)).train()
    shake(model)
    model, total = width(model), torch.zeros(())
    for ids, labels in documents():
        logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits[:-1], torch.from_numpy(labels[1:]), ignore_index=-100, reduction="sum")
    total.backward()
    return total.item(), gradients(model)[1]


def built(folder: Path, *, checkpointing: bool, tokens: Sequence[str] = ()) -> Any:
    training = {"activation_checkpointing": checkpointing, "per_device_batch_size": 2}
    model = {"dtype": "float32", "add_tokens": [*tokens]}
    recipe = least_recipe(folder, model=model, data={"packing": True}, lora=LORA, training=training)
    return build_model(recipe, torch.device("cpu")).train()


def ours(model: nn.Module, width: Width) -> Trained:
    shake(model)
    model = width(model)
    model.zero_grad()
    rows = Rows(Way("auto", packing=True))
    (batch,) = micro_batches(rows, range(2), rank=0, world_size=1, per_device_batch_size=2, flat=True)
    loss = model(**batch)
    loss.backward()
    return loss.item(), gradients(model)[1]


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_adapters_learn_the_same(family: str, tmp_path: Path) -> None:
    save_shaken(family, tmp_path)
    models = [built(tmp_path, checkpointing=checkpointing) for checkpointing in (False, True)]
    expected = partial(librarys, tmp_path, models[0].peft_config["default"])
    assert len(expected(nn.Module.train)[1]) >= 16
    for model in models:
        assert difference(partial(ours, model), expected) <= 1


def documents_with_new_tokens() -> list[tuple[np.ndarray, np.ndarray]]:
    made = documents_without()
    for ids, labels in made:
        ids[1:5:3] = (97, 98)[: len(ids[1:5:3])]
        labels[labels != -100] = ids[labels != -100]
    return made


documents_without = documents


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_new_rows_learn_the_same(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside adapters, in models with a head of its own, and with tied, scaled embeddings and caps or scales after
    them; against peft's own forward, which puts the whole head together."""
    for place in ("tests.support.models.architectures", __name__):
        monkeypatch.setattr(f"{place}.documents", documents_with_new_tokens)
    save_shaken(family, tmp_path)
    model = built(tmp_path, checkpointing=True, tokens=TOKENS)
    expected = librarys(tmp_path, model.peft_config["default"], nn.Module.train)
    rows = [name for name in expected[1] if "trainable_tokens_delta" in name]
    assert len(rows) == (2 if family == "llama" else 1)
    assert all(gradient is not None and bool(gradient.any()) for gradient in map(expected[1].get, rows))
    assert largest_difference(ours(model, nn.Module.train), expected) <= 1
