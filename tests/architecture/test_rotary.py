"""Rotary frequencies by a text's length: each document's own in a flat row, and no host read for them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
)

from finetune.architecture import attention
from finetune.architecture.rotary import rotate_by_document

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32}
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + each for each in range(8)],
    "original_max_position_embeddings": 16,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LAYERS = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": DYNAMIC}
FAMILIES = {
    "phi3-longrope": (Phi3Config, LONG_ROPE, {"pad_token_id": 0, "original_max_position_embeddings": 16}),
    "llama-longrope": (LlamaConfig, LONG_ROPE, {}),
    "llama-dynamic": (LlamaConfig, DYNAMIC, {}),
    "qwen2-dynamic": (Qwen2Config, DYNAMIC, {}),
    "mistral-dynamic": (MistralConfig, DYNAMIC, {"sliding_window": None}),
    "gemma3-of-two-kinds": (Gemma3TextConfig, LAYERS, {"layer_types": [*LAYERS], "sliding_window": 64}),
}
# Short ones alone; long ones before, between and behind short ones; two long ones of different lengths.
ROWS = [(5, 7), (40, 5), (5, 50, 6), (33, 45, 3), (17,), (32, 16, 33)]


class HostReads(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


def model_of(family: str) -> PreTrainedModel:
    kind, rope, others = FAMILIES[family]
    config = kind(**SIZES | others, rope_parameters=copy.deepcopy(rope))
    attention.register()
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    return model.train()


def row_of(lengths: tuple[int, ...]) -> dict[str, Any]:
    return {
        "input_ids": torch.arange(sum(lengths))[None] * 7 % 64,
        "position_ids": torch.cat([torch.arange(each) for each in lengths])[None],
        "cu_seq_lens": torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        "document_lengths": lengths,
        "use_cache": False,
    }


def alone(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The library's numbers for one document, by a model that has seen no other."""
    fresh = copy.deepcopy(model)
    fresh.set_attn_implementation("eager")
    logits: Tensor = fresh(input_ids=ids, use_cache=False).logits
    return logits


@pytest.mark.sample(2, thorough=6)
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_rotated_as_alone_without_a_host_read(family: str) -> None:
    """One model takes all rows, so that what one leaves behind would be seen in the next."""
    untouched, model = model_of(family), model_of(family)
    rotate_by_document(model)
    for lengths in ROWS:
        row = row_of(lengths)
        with HostReads() as reads:
            found = model(**row).logits
        assert reads.count == 0, lengths
        ids = row["input_ids"].split(list(lengths), dim=1)
        expected = torch.cat([alone(untouched, each) for each in ids], dim=1)
        assert torch.allclose(found, expected, rtol=1e-4, atol=2e-5), lengths


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_one_document_are_the_librarys_to_the_bit(family: str) -> None:
    model = model_of(family)
    for length in (5, 40):
        expected = copy.deepcopy(model)(**row_of((length,))).logits
        found = copy.deepcopy(model)
        rotate_by_document(found)
        assert torch.equal(found(**row_of((length,))).logits, expected)


def test_other_forwards_run_the_librarys_code() -> None:
    """Answers are generated without a row of documents, with a cache."""
    model, untouched = model_of("llama-dynamic"), model_of("llama-dynamic")
    rotate_by_document(model)
    model(**row_of((40, 5)))
    for each in (model, untouched):
        each.set_attn_implementation("eager")
    ids = torch.arange(40)[None]
    assert torch.equal(model(input_ids=ids).logits, untouched(input_ids=ids).logits)


def test_models_of_one_set_of_frequencies_are_left_as_they_are() -> None:
    attention.register()
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation=attention.NAME)
    rotate_by_document(model)
    assert not [each for each in model.modules() if "forward" in vars(each)]
    assert not model.model._forward_pre_hooks
