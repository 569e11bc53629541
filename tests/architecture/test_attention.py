"""Packed documents do not see each other: loss and gradients equal those of one document at a time."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from finetune.architecture import attention
from finetune.architecture.loss import put_loss_into_forward
from finetune.errors import FinetuneError
from finetune.model.build import checkpoint_layers
from tests.support.tiny import flat_batch

LENGTHS = (5, 20, 1, 13)
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "mistral-window": MistralConfig(**SMALL, sliding_window=6),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2-window": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": Qwen3Config(**SMALL),
    # A scale that differs, 1/sqrt(24) where the head's width would give 1/sqrt(8); a window in one layer of two.
    "gemma3-scale": Gemma3TextConfig(
        **SMALL,
        query_pre_attn_scalar=24,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
    ),
}


def build(config: PreTrainedConfig, implementation: str) -> PreTrainedModel:
    torch.manual_seed(3)
    config = copy.deepcopy(config)  # else models share it, and the attention named last is that of all
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    with torch.no_grad():  # fresh weights are so small that attention is nearly even, whatever its scale
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape) if parameter.ndim == 1 else 6 * parameter
    put_loss_into_forward(model)
    return model.train()


def one_at_a_time(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    total = torch.zeros(())
    for document in tokens.split(LENGTHS):
        logits = model(input_ids=document[None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits[:-1], document[1:], reduction="sum") if len(document) > 1 else total
    return total


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_equal_to_one_document_at_a_time(family: str, checkpointing: bool) -> None:
    calls: list[str] = []

    def spied(module: torch.nn.Module, *arguments: Any, **others: Any) -> Any:
        calls.append(type(module).__name__)
        return attention.varlen_attention(module, *arguments, **others)

    AttentionInterface.register(attention.NAME, spied)
    batch = flat_batch(LENGTHS, vocabulary=97)
    tokens = batch["input_ids"][0]
    packed, alone = build(FAMILIES[family], attention.NAME), build(FAMILIES[family], "eager")
    if checkpointing:
        checkpoint_layers(packed, every=1)
    assert packed.config._attn_implementation == attention.NAME
    assert alone.config._attn_implementation == "eager"
    loss = packed(**batch)
    assert len(calls) == 2  # a layer each
    expected = one_at_a_time(alone, tokens)
    assert len(calls) == 2
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    for (name, ours), theirs in zip(packed.named_parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm() + 1e-7, name


HARMLESS = {"s_aux": None, "softcap": None, "position_ids": torch.arange(3)[None], "use_cache": False, "later": None}
ENDS = {"cu_seq_lens": torch.tensor([0, 3], dtype=torch.int32), "document_lengths": (3,)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"s_aux": torch.ones(2)}, "asks for s_aux"),
        ({"softcap": 50.0}, "asks for softcap"),
        ({"some_later_argument": 0}, "asks for some_later_argument"),
        ({"is_causal": False}, "is not causal"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "a mask of its own"),
        ({"cu_seq_lens": None}, "cu_seq_lens"),
    ],
    ids=lambda arguments: next(iter(arguments)) if isinstance(arguments, dict) else "",
)
def test_what_this_attention_does_not_compute_is_an_error(arguments: dict[str, Any], words: str) -> None:
    class SomeAttention(torch.nn.Module):
        is_causal = True

    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    plain: dict[str, Any] = {"attention_mask": None, **ENDS}
    expected, _ = attention.varlen_attention(SomeAttention(), query, key, key, **plain)
    actual, _ = attention.varlen_attention(SomeAttention(), query, key, key, **plain, **HARMLESS, is_causal=True)
    assert torch.equal(actual, expected)
    with pytest.raises(FinetuneError, match=f"^model.attention: SomeAttention .*{words}.*set model.attention: eager"):
        attention.varlen_attention(SomeAttention(), query, key, key, **plain | arguments)
    SomeAttention.is_causal = False
    with pytest.raises(FinetuneError, match="is not causal"):
        attention.varlen_attention(SomeAttention(), query, key, key, **plain)


def test_a_document_does_not_feel_its_neighbour() -> None:
    attention.register()
    model = build(FAMILIES["llama"], attention.NAME).eval()
    batch = flat_batch(LENGTHS, vocabulary=97)
    del batch["shift_labels"]
    other = batch["input_ids"].clone()
    other[0, :5] = (other[0, :5] + 1) % 97
    changed = batch | {"input_ids": other}
    with torch.no_grad():
        first, second = model(**batch, use_cache=False).logits, model(**changed, use_cache=False).logits
    assert not torch.equal(first[0, :5], second[0, :5])
    assert torch.equal(first[0, 5:], second[0, 5:])


def test_generation_still_works_after_the_loss_moved_in() -> None:
    model = build(FAMILIES["llama"], "sdpa").eval()
    output = model.generate(
        torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 3), max_new_tokens=3, min_new_tokens=3
    )
    assert output.shape == (1, 6)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_cpu_16_bit_numbers_are_attended_in_float32(autocast: bool, window: int | None) -> None:
    """The same as in float64, rounded once."""
    query, key, value = (torch.randn(1, heads, sum(LENGTHS), 8).bfloat16() for heads in (4, 2, 2))
    if autocast:
        query, key = query.float(), key.float()  # as RoPE leaves them between float32 weights
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, _ = attention.varlen_attention(
            torch.nn.Module(),
            query,
            key,
            value,
            None,
            cu_seq_lens=ends,
            document_lengths=LENGTHS,
            sliding_window=window,
        )
    assert output.dtype == torch.bfloat16
    documents = []
    for start, end in pairwise(ends.tolist()):
        q, k, v = (x[0, :, start:end].double() for x in (query, key, value))
        k, v = (x.repeat_interleave(2, dim=0) for x in (k, v))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (distance >= 0) & (distance < (window or end))
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(~seen, float("-inf"))
        documents.append((scores.softmax(-1) @ v).transpose(0, 1))
    expected = torch.cat(documents)
    assert torch.allclose(output[0].double(), expected, rtol=2**-8, atol=1e-6)  # half a unit of bfloat16's last place


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_that_knows_16_bits_alone_is_not_asked_in_float32(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Away from the CPU: tensors on meta take the place of those on a GPU."""
    calls: list[torch.dtype] = []

    def kernel(query: Tensor, *_: object) -> Tensor:
        calls.append(query.dtype)
        return query.transpose(1, 2)

    monkeypatch.setattr(attention, "_on_cuda", kernel)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # which does not take meta
    query, key = (torch.empty(1, heads, sum(LENGTHS), 8, dtype=dtype, device="meta") for heads in (4, 2))
    starts = torch.empty(len(LENGTHS) + 1, dtype=torch.int32, device="meta")
    output, _ = attention.varlen_attention(
        torch.nn.Module(), query, key, key, None, cu_seq_lens=starts, document_lengths=LENGTHS
    )
    assert output.shape == (1, sum(LENGTHS), 4, 8)
    assert calls == ([] if dtype == torch.float32 else [dtype])
