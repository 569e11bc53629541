"""Tiny models from a config and a tokenizer trained on the spot: 0.2 s, no download. Shared by all tests."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = """
a river carries the small boat down to sea while seven quiet birds watch from an old stone bridge and nobody knows
which of them will sing first when morning comes over hills that were green before any road was built here question
answer why because system user assistant one two three number please tell me what it is
"""
WORDS = TEXT.split()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 tokens with a ChatML template and no generation marks; pad and eos differ."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=512, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
        model_max_length=2048,
    )


def tiny_model(family: str = "llama", seed: int = 0, **config: Any) -> PreTrainedModel:
    """A float32 model of about 0.14M parameters with grouped-query attention; `config` overrides its settings."""
    settings: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings | config), dtype=torch.float32)
    torch.random.set_rng_state(generator_state)
    return model


def save_tiny(folder: Path, family: str = "llama", seed: int = 0, **config: Any) -> Path:
    """Model and tokenizer in `folder`, as safetensors, as a recipe's model.name_or_path takes them."""
    tiny_model(family, seed, **config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@cache
def words_of_one_token() -> list[str]:
    """Words that add one token to an answer, whatever stands before them."""
    tokenizer = tiny_tokenizer()
    return [word for word in sorted(set(WORDS)) if len(tokenizer.encode(" " + word, add_special_tokens=False)) == 1]


def chat_of(tokens: int, tokenizer: PreTrainedTokenizerFast, seed: int) -> dict[str, Any]:
    """One chat, user and assistant, whose rendering has exactly `tokens` tokens (at least 20)."""
    draw, words = random.Random(seed), words_of_one_token()
    question = " ".join(draw.choice(words) for _ in range(1 + tokens // 40))

    def chat(answer: str) -> dict[str, Any]:
        turns = {"user": question, "assistant": answer}
        return {"messages": [{"role": role, "content": content} for role, content in turns.items()]}

    def length(answer: str) -> int:
        return len(tokenizer.apply_chat_template(chat(answer)["messages"], return_dict=True)["input_ids"])

    answer = " ".join(["a", *(draw.choice(words) for _ in range(tokens - length("a")))])
    assert length(answer) == tokens, f"{tokens} tokens asked, {length(answer)} made"
    return chat(answer)


def write_chats(file: Path, lengths: Sequence[int], seed: int = 0) -> Path:
    """A JSONL file with one chat for each of `lengths` (in tokens of the rendered chat)."""
    tokenizer = tiny_tokenizer()
    rows = [chat_of(tokens, tokenizer, seed + index) for index, tokens in enumerate(lengths)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def flat_batch(lengths: Sequence[int] = (7, 12), seed: int = 0, vocabulary: int = 512) -> dict[str, Any]:
    """A micro-batch of random documents end to end in one row, as attention "varlen" takes it; all is learned."""
    tokens = torch.randint(3, vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    targets = [torch.cat([document[1:], torch.tensor([-100])]) for document in tokens.split(list(lengths))]
    return {
        "input_ids": tokens[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "shift_labels": torch.cat(targets)[None],
        "supervised": torch.cat(targets).ne(-100).nonzero().flatten(),
        "cu_seq_lens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        "document_lengths": tuple(lengths),
    }


class Documents:
    """Rows of one random document each, all of it learned, as the loop asks for them."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = np.array(lengths)
        self.supervised = self.lengths - 1  # nothing is learned of the first token

    def __len__(self) -> int:
        return len(self.lengths)

    def documents(self, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
        ids = np.random.default_rng(row).integers(3, 512, self.lengths[row])
        return [(ids, ids)]
