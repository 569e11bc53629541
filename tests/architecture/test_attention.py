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
from finetune.architecture.recomputation import checkpoint_layers
from finetune.errors import FinetuneError
from tests.support.models.tiny import flat_batch

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


HARMLESS = {
    "s_aux": None,
    "softcap": None,
    "dropout": 0.0,
    "position_ids": torch.arange(3)[None],
    "use_cache": False,
    "later": None,
}
ENDS = {"cu_seq_lens": torch.tensor([0, 3], dtype=torch.int32), "document_lengths": (3,)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"softcap": 50.0, "s_aux": torch.ones(4)}, "asks for a soft cap together with sinks"),
        ({"softcap": 50.0, "dropout": 0.1}, "asks for a soft cap together with dropout"),
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

    monkeypatch.setattr(attention, "attend_on_cuda", kernel)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # which does not take meta
    query, key = (torch.empty(1, heads, sum(LENGTHS), 8, dtype=dtype, device="meta") for heads in (4, 2))
    starts = torch.empty(len(LENGTHS) + 1, dtype=torch.int32, device="meta")
    output, _ = attention.varlen_attention(
        torch.nn.Module(), query, key, key, None, cu_seq_lens=starts, document_lengths=LENGTHS
    )
    assert output.shape == (1, sum(LENGTHS), 4, 8)
    assert calls == ([] if dtype == torch.float32 else [dtype])


class Layer(torch.nn.Module):
    """What an attention reads of the module that calls it."""

    def __init__(self, kind: str = "full_attention") -> None:
        super().__init__()
        self.config, self.layer_idx = LlamaConfig(), 0
        self.config.layer_types, self.config.attention_chunk_size = [kind], 7


@pytest.mark.parametrize("asked", [{}, {"s_aux": True}, {"softcap": 2.0}], ids=["plain", "sinks", "cap"])
@pytest.mark.parametrize("reach", ["all", "window", "chunk"])
@pytest.mark.parametrize("block_bytes", [attention.BLOCK_BYTES, 4 * 4 * 20 * 3])  # three queries of the longest
def test_equal_to_plain_sums(
    asked: dict[str, Any], reach: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and gradients, the sinks' too, against scores written out in float64."""
    monkeypatch.setattr(attention, "BLOCK_BYTES", block_bytes)
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), 8), (4,)
    query, key, value, sinks = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    window = 6 if reach == "window" else None
    output, _ = attention.varlen_attention(
        Layer("chunked_attention" if reach == "chunk" else "full_attention"),
        query,
        key,
        value,
        None,
        cu_seq_lens=torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        document_lengths=LENGTHS,
        scaling=0.7,
        sliding_window=window,
        s_aux=sinks if "s_aux" in asked else None,
        softcap=asked.get("softcap"),
    )
    at = torch.cat([torch.arange(length) for length in LENGTHS])
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    seen = (document[:, None] == document) & (at[:, None] >= at) & (at[:, None] - at < (window or 99))
    if reach == "chunk":
        seen &= at[:, None] // 7 == at // 7
    keys, values = (x[0].double().repeat_interleave(2, dim=0) for x in (key, value))
    scores = 0.7 * query[0].double() @ keys.mT
    if "softcap" in asked:
        scores = 2 * torch.tanh(scores / 2)
    scores = scores.masked_fill(~seen, float("-inf"))
    if "s_aux" in asked:
        scores = torch.cat([scores, sinks.double().view(4, 1, 1).expand(4, sum(LENGTHS), 1)], dim=-1)
    expected = (scores.softmax(-1)[..., : sum(LENGTHS)] @ values).transpose(0, 1)[None]
    assert torch.allclose(output.double(), expected, rtol=1e-5, atol=1e-6)
    leaves = [query, key, value, *([sinks] if "s_aux" in asked else [])]
    slope = torch.randn(output.shape, generator=generator)
    theirs = torch.autograd.grad((expected * slope).sum(), leaves)
    for our, their in zip(torch.autograd.grad((output * slope).sum(), leaves), theirs, strict=True):
        assert (our - their).norm() <= 1e-5 * their.norm()


def test_away_from_the_cpu_chunks_are_documents_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's arguments; a stand-in for it computes in tests/architecture/test_varlen_kernel.py."""
    given: list[Any] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, *rest: Any) -> Tensor:
        given.extend([starts, longest, *rest])
        return query.transpose(1, 2)

    monkeypatch.setattr(attention, "attend_on_cuda", kernel)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # which does not take meta
    query, key = (torch.empty(1, heads, 25, 8, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    starts, sinks = torch.empty(3, dtype=torch.int32, device="meta"), torch.empty(4, device="meta")
    ends: dict[str, Any] = {"cu_seq_lens": starts, "document_lengths": (5, 20)}
    attention.varlen_attention(Layer(), query, key, key, None, **ends, scaling=0.7, sliding_window=6, s_aux=sinks)
    assert given[0] is starts
    assert given[1:4] == [20, 0.7, 6]
    assert given[4] is sinks
    given.clear()
    attention.varlen_attention(Layer("chunked_attention"), query, key, key, None, **ends)
    assert given[0].shape == (5,)  # (5, 7, 7, 6)
    assert given[1:] == [7, 8**-0.5, None, None]


def test_dropout_is_that_of_the_library_drawn_in_the_same_order() -> None:
    """One layer, so that documents draw in the same order: the same numbers, the same probabilities dropped."""
    config = LlamaConfig(**SMALL | {"num_hidden_layers": 1, "num_key_value_heads": 4}, attention_dropout=0.4)
    attention.register()
    packed, alone = build(config, attention.NAME), build(config, "eager")
    batch = flat_batch(LENGTHS, vocabulary=97)
    torch.manual_seed(5)
    loss = packed(**batch)
    torch.manual_seed(5)
    expected = one_at_a_time(alone, batch["input_ids"][0])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss.item() != pytest.approx(packed(**batch).item(), rel=1e-3)
    packed.eval()
    assert packed(**batch).item() == packed(**batch).item()
