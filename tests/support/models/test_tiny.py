"""The tiny models themselves: every family saves, loads and answers, and chats have the length asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.models.tiny import FAMILIES, save_tiny, tiny_tokenizer, write_chats


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_tiny_models_load(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path, family))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.model_type == family
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    tokens = tokenizer("hello <|im_end|>", return_tensors="pt").input_ids
    assert tokens[0, -1] == tokenizer.eos_token_id == model.config.eos_token_id
    assert torch.isfinite(model(input_ids=tokens).logits).all()


def test_chats_have_the_lengths_asked_for(tmp_path: Path) -> None:
    lengths = [20, 33, 300]
    rows = [json.loads(line) for line in write_chats(tmp_path / "chats.jsonl", lengths).read_text().splitlines()]
    tokenizer = tiny_tokenizer()
    assert [len(tokenizer.apply_chat_template(row["messages"])["input_ids"]) for row in rows] == lengths
