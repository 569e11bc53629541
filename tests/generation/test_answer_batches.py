"""Batches of answers as large as free memory allows: decode steps counted, answers those of each prompt alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, Cache

from finetune.generation import held_out as scored_answers
from finetune.generation.generate import (
    BATCH_TOKENS,
    MOST_BATCH_TOKENS,
    Answer,
    answer,
    greedy_answers,
    kept_bytes,
    prompt_batches,
    round_ends,
)
from finetune.generation.held_out import Batching, ScoredSet, generated_answers, layers_left_out, tokens_that_fit
from finetune.generation.settings import answering
from finetune.measure.phases import Memory, memory_of
from finetune.scoring.metrics import Scored
from finetune.strategies.pieces import Ranks
from finetune.tokens.encoder import SamplePrompt
from tests.support.models.tiny import tiny_model, tiny_tokenizer
from tests.support.stand_ins.ranks import made_up_ranks

CPU = torch.device("cpu")
GB = 10**9
LENGTHS = [random.Random(1000 + index).randint(60, 400) for index in range(1000)]
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "dtype": "bfloat16",
}  # fmt: skip


def of_8b() -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA_8B), dtype=torch.bfloat16)


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(scored_answers, "memory_of", lambda _: Memory(2 * free, free, 0))


def decode_steps(model: Any, new: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Forwards after each batch's first one, if no row ends before the limit: the worst case, without a computation."""
    steps, tokens = list[int](), list[int]()

    def never_ending(model: Any, tokenizer: Any, prompts: Any, *, max_new_tokens: int, **_: Any) -> list[Answer]:
        steps.append(max_new_tokens)
        tokens.append(len(prompts) * (max(map(len, prompts)) + max_new_tokens))
        return [Answer("", False, [7] * max_new_tokens) for _ in prompts]

    monkeypatch.setattr(scored_answers, "greedy_answers", never_ending)
    prompts = [SamplePrompt([5] * length, "", None) for length in LENGTHS]
    asked = ScoredSet("rows", prompts, [Scored("", "place")] * len(prompts), [], new)
    found = generated_answers(model, tiny_tokenizer(), asked, Batching(True, CPU))
    assert [len(each.tokens) for each in found] == [new] * len(prompts)
    assert max(tokens) <= tokens_that_fit(model, CPU, Ranks())
    return sum(steps)


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize(("free", "tokens", "below"), [(60 * GB, MOST_BATCH_TOKENS, 2500), (8 * GB, 30_517, 5000)])
def test_decode_steps_of_a_thousand_prompts(
    free: int, tokens: int, below: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = of_8b()
    assert kept_bytes(model) == 2 * 32 * 8 * 128 * 2
    with_free(monkeypatch, free)
    assert tokens_that_fit(model, CPU, Ranks()) == tokens
    steps = decode_steps(model, 256, monkeypatch)
    print(f"{free / GB:.0f} GB free: {steps:,} decode steps")
    assert steps < below
    assert len(prompt_batches(sorted(LENGTHS), 256, BATCH_TOKENS)) * 256 > 65_000, "as before"


def test_the_fullest_rank_decides_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_8b()
    with_free(monkeypatch, 60 * GB)
    assert tokens_that_fit(model, CPU, made_up_ranks(0, 2, lambda mine: [mine, 5000])) == 5000
    assert tokens_that_fit(model, CPU, made_up_ranks(0, 2, lambda mine: [mine, 7])) == BATCH_TOKENS
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert memory_of(CPU).sharing == 16
    monkeypatch.setattr(scored_answers, "memory_of", lambda _: Memory(60 * GB, 0, 0, sharing=16))
    assert tokens_that_fit(model, CPU, Ranks()) == 30 * GB // 16 // 131_072


def test_a_long_reference_leaves_batches_large() -> None:
    """The limit is 1,024 tokens, and a batch needs room for 128 at first."""
    assert round_ends(1024) == [128, 256, 512, 1024]
    assert round_ends(600) == [128, 256, 512, 600]
    assert round_ends(20) == [20]
    assert len(prompt_batches(sorted(LENGTHS), round_ends(1024)[0], 30_517)) < 14


def shaken() -> Any:
    """Weights so large that answers differ."""
    model = tiny_model("llama")
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * 3 * parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> ScoredSet:
    monkeypatch.setattr("finetune.generation.generate.FIRST_ROUND", 3)
    draw = random.Random(3)
    prompts = [[draw.randrange(5, 500) for _ in range(draw.randint(1, 12))] for _ in range(11)]
    items = [Scored("", "place")] * len(prompts)
    return ScoredSet("rows", [SamplePrompt(ids, "", None) for ids in prompts], items, [], 20)


def alone(model: Any, asked: ScoredSet) -> list[str]:
    with answering(model):
        return [answer(model, tiny_tokenizer(), each.prompt_ids, max_new_tokens=20) for each in asked.prompts]


def test_answers_are_those_of_each_prompt_alone_and_rows_leave_where_they_end(
    asked: ScoredSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shaken()
    with answering(model):
        free = answer(model, tiny_tokenizer(), asked.prompts[0].prompt_ids, max_new_tokens=20)
    found = generated_answers(model, tiny_tokenizer(), asked, Batching(True, CPU))
    assert found[0].text == free
    # Tokens that some answers have early and others never.
    model.generation_config.eos_token_id = [found[0].tokens[1], found[3].tokens[7], found[5].tokens[15]]
    rows: list[int] = []
    genuine = greedy_answers

    def counted(*given: Any, **named: Any) -> Any:
        rows.append(len(given[2]))
        return genuine(*given, **named)

    monkeypatch.setattr(scored_answers, "greedy_answers", counted)
    found = generated_answers(model, tiny_tokenizer(), asked, Batching(True, CPU))
    assert [each.text for each in found] == alone(model, asked)
    assert rows[0] == 11
    assert 11 > rows[1] > rows[-1]
    assert {each.ended for each in found} == {True, False}
    assert all(len(each.tokens) == 20 for each in found if not each.ended)


@pytest.mark.thorough
def test_a_batch_that_does_not_fit_is_halved_and_told_once(asked: ScoredSet, monkeypatch: pytest.MonkeyPatch) -> None:
    model, said, sizes = shaken(), list[str](), list[int]()
    genuine = greedy_answers

    def full(model: Any, tokenizer: Any, prompts: Any, **options: Any) -> Any:
        if len(prompts) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        sizes.append(len(prompts))
        return genuine(model, tokenizer, prompts, **options)

    monkeypatch.setattr(scored_answers, "greedy_answers", full)
    how = Batching(True, CPU)
    found = generated_answers(model, tiny_tokenizer(), asked, how, say=said.append)
    assert [each.text for each in found] == alone(model, asked)
    assert max(sizes) == 3
    assert len(said) == 1
    assert said[0].startswith("answers: a batch with 154 tokens does not fit; they go on with 77")
    generated_answers(model, tiny_tokenizer(), asked, how, say=said.append)
    assert len(said) == 1, "the next model starts with the smaller batches"
    monkeypatch.setattr(scored_answers, "greedy_answers", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generated_answers(model, tiny_tokenizer(), asked, how)


def test_a_layer_without_memory_gives_the_cache_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2's layers go on without computing; the keys and values that they have kept are freed."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny_model()
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        prompt, kept = torch.tensor([[7, 30, 41, 9]]), list[Any]()

        def no_memory(*arguments: Any, **options: Any) -> Any:
            kept.extend(value.layers[0] for value in options.values() if isinstance(value, Cache))
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(model.model.layers[1].self_attn, "forward", no_memory)
        with torch.no_grad(), layers_left_out(model) as failed:
            model(input_ids=prompt, use_cache=True)
        assert isinstance(failed[0], torch.OutOfMemoryError)
        assert kept[0].keys.shape[-2] == 4
        assert [each.untyped_storage().nbytes() for each in (kept[0].keys, kept[0].values)] == [4, 4]
    finally:
        dist.destroy_process_group()


def test_heads_that_differ_from_layer_to_layer_are_counted_with_the_widest() -> None:
    """Gemma 4's: 5 layers of 256 and one of 512, 4 heads of keys, in bfloat16."""
    config = AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=6, head_dim=256, global_head_dim=512, num_key_value_heads=4, vocab_size=64,
        hidden_size=64, intermediate_size=64, num_attention_heads=8, hidden_size_per_layer_input=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert kept_bytes(model) == 2 * 6 * 4 * 512 * 2
