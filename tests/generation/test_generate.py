"""Answers to several prompts in one left-padded batch: those of each prompt alone, each up to its own end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from finetune.generation import generate
from finetune.generation.generate import answer, computing_device, greedy_answers
from finetune.generation.settings import answering, left_padded, stop_on
from tests.support.models.tiny import tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
PROMPTS = [[7, 300, 41], [5, 6, 90, 411, 17, 23, 8, 499, 31, 77, 12], [350], [9, 8, 7, 6, 5, 4, 3]]
NEW = 8
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},  # learned positions, and no buffers
    "opt": {"ffn_dim": 128},  # positions counted from the mask
    "gemma2": {"sliding_window": 6, "eos_token_id": 2},  # windows shorter than a prompt
    "mistral": {"sliding_window": 6},
}


def shaken(family: str) -> Any:
    """Weights so large that answers differ and do not repeat one token."""
    model = tiny_model(family, **FAMILIES[family])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.3 * drawn) if parameter.ndim < 2 else parameter.copy_(
                drawn * 3 * parameter.shape[-1] ** -0.5
            )
    return model


def alone(model: nn.Module, tokenizer: Any) -> list[str]:
    return [answer(model, tokenizer, prompt, max_new_tokens=NEW) for prompt in PROMPTS]


def together(model: nn.Module, tokenizer: Any) -> list[str]:
    return [each.text for each in greedy_answers(model, tokenizer, PROMPTS, max_new_tokens=NEW, device=CPU)]


@pytest.fixture
def llama() -> Iterator[Any]:
    with answering(shaken("llama")) as model:
        yield model


@pytest.mark.sample(2, thorough=5)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gives_the_answers_of_each_prompt_alone(family: str) -> None:
    tokenizer = tiny_tokenizer()
    with answering(shaken(family)) as model:
        expected = alone(model, tokenizer)
        assert together(model, tokenizer) == expected
    assert len(set(expected)) == len(PROMPTS)
    assert max(map(len, expected)) > NEW


def forwards(model: nn.Module, work: Any) -> tuple[int, list[str]]:
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    result = work(model, tiny_tokenizer())
    handle.remove()
    return len(calls), result


def test_a_batch_makes_the_forwards_of_one_prompt(llama: Any) -> None:
    one_by_one, expected = forwards(llama, alone)
    at_once, answers = forwards(llama, together)
    assert (one_by_one, at_once) == (len(PROMPTS) * NEW, NEW)
    assert answers == expected


def test_each_prompt_ends_at_its_own_end(llama: Any) -> None:
    """And all of them at the end of the longest, which is before the limit."""
    output = llama.generate(**left_padded(PROMPTS, CPU), max_new_tokens=NEW, do_sample=False, eos_token_id=511)
    rows = output[:, -NEW:].tolist()
    ends = [rows[0][1], rows[1][4], rows[2][2], rows[3][3]]
    llama.generation_config.eos_token_id = ends
    tokenizer = tiny_tokenizer()
    lengths = [next(at for at, token in enumerate(row) if token in ends) + 1 for row in rows]
    assert len(set(lengths)) > 2, "they end at different places"
    made, answers = forwards(llama, together)
    assert made == max(lengths) < NEW
    assert answers == alone(llama, tokenizer)
    assert answers[0] == tokenizer.decode(rows[0][: lengths[0]], skip_special_tokens=True).strip()


@torch.no_grad()
def likeliest(model: nn.Module, prompt: list[int], ends: set[int]) -> list[int]:
    """One token after the other, by the model's logits alone."""
    ids = list(prompt)
    while len(ids) < len(prompt) + NEW:
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return ids[len(prompt) :]


SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 3.0},
    "num_beams": {"num_beams": 4},
    "min_new_tokens": {"min_new_tokens": NEW},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad words": {"suppress_tokens": list(range(100, 500))},
    "forced end": {"forced_eos_token_id": 7},
    "sampling": {"do_sample": True, "temperature": 5.0, "top_k": 3, "top_p": 0.5, "min_p": 0.01},
    "shorter": {"max_new_tokens": 2, "max_length": 4},
}


@pytest.mark.sample(3, thorough=8)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_greedy_answer_follows_no_setting_but_the_ends(llama: Any, name: str) -> None:
    tokenizer = tiny_tokenizer()
    first = likeliest(llama, PROMPTS[0], set())
    ends = {tokenizer.eos_token_id, first[4]}
    expected = [
        tokenizer.decode(likeliest(llama, prompt, ends), skip_special_tokens=True).strip() for prompt in PROMPTS
    ]
    llama.generation_config.eos_token_id = [*ends]
    llama.generation_config.update(**SETTINGS[name])
    before = llama.generation_config.to_dict()
    assert alone(llama, tokenizer) == together(llama, tokenizer) == expected
    assert llama.generation_config.to_dict() == before


def test_stop_on_adds_what_the_settings_lack(llama: Any) -> None:
    settings = llama.generation_config
    settings.eos_token_id = 2
    assert stop_on(llama, [2]) == []
    assert settings.eos_token_id == 2, "left as the base spells it"
    assert stop_on(llama, [2, 9, 5]) == [9, 5]
    assert settings.eos_token_id == [2, 9, 5]
    settings.eos_token_id = None
    assert stop_on(llama, [9]) == [9]
    assert settings.eos_token_id == [9]


def test_rows_are_padded_on_the_left_with_their_own_first_token() -> None:
    batch = left_padded([[7, 8], [1, 2, 3, 4]], CPU)
    assert batch["input_ids"].tolist() == [[7, 7, 7, 8], [1, 2, 3, 4]]
    assert batch["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_model_without_buffers_computes_where_its_weights_are(family: str) -> None:
    model = tiny_model(family, **FAMILIES[family])
    assert not list(model.buffers())
    assert computing_device(model) == CPU
    assert computing_device(model.to("meta")).type == "meta"


def test_a_model_with_buffers_computes_where_they_are() -> None:
    model: Any = tiny_model()
    for part in (model.model.embed_tokens, model.model.layers, model.model.norm, model.lm_head):
        part.to("meta")  # offloaded weights are elsewhere too
    assert computing_device(model) == CPU


def test_an_answer_that_was_cut_is_known_from_one_that_ended(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers, once with their third token as one that ends them."""
    tokenizer = tiny_tokenizer()
    cut = greedy_answers(llama, tokenizer, PROMPTS[:1], max_new_tokens=NEW, device=CPU)
    assert [each.ended for each in cut] == [False]
    ids = tokenizer(cut[0].text, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(generate, "end_tokens", lambda model, tokenizer: [ids[2]])
    (ended,) = greedy_answers(llama, tokenizer, PROMPTS[:1], max_new_tokens=NEW, device=CPU)
    assert ended.ended
    assert len(ended.text) < len(cut[0].text)
