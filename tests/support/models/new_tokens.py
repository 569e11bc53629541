"""New tokens for tests: chats that hold them, bases with and without room for them, and what their rows begin as."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.models.tiny import save_tiny, tiny_tokenizer, write_chats

# The last one is in no chat: only a template writes control tokens.
TOKENS: dict[str, Any] = {"add_tokens": ["<date>", "quiet birds"], "add_special_tokens": ["<|tool|>"]}
TEXTS = [*TOKENS["add_tokens"], *TOKENS["add_special_tokens"]]
KNOWN = len(tiny_tokenizer())
# Rows of a base by how they meet the tokenizer's: as many, more, or fewer, as of a text model that was one for images.
ROOM = {"none": KNOWN, "some": KNOWN + 50, "less than none": KNOWN - 3}
IDS = [KNOWN, KNOWN + 1, KNOWN + 2]


def save_base(folder: Path, room: str = "none", family: str = "llama", **config: Any) -> Path:
    return save_tiny(folder, family, vocab_size=ROOM[room], **config)


def chats_with_tokens(file: Path, lengths: Sequence[int]) -> Path:
    """Chats in which the two ordinary tokens stand, in questions and in answers."""
    text = write_chats(file, lengths).read_text("utf-8")
    replaced = text.replace("seven", TEXTS[0]).replace("river", TEXTS[1])
    assert all(token in replaced for token in TOKENS["add_tokens"])
    file.write_text(replaced, "utf-8")
    return file


def rows_that_begin(base: Path) -> dict[str, Tensor]:
    """Embeddings and head [rows, hidden] of the base with the new rows, by numpy from the files of the base alone."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    ends = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    found = {}
    for name, module in ends.items():
        old = module.weight.detach().numpy()
        rows = [old[row] for row in range(len(old))]
        rows += [old.mean(0)] * (IDS[-1] + 1 - len(rows))  # those that no text tells of
        for row, text in zip(IDS, TEXTS, strict=True):
            pieces = tokenizer.encode(text, add_special_tokens=False)
            assert len(pieces) > 1
            rows[row] = old[[piece for piece in pieces if piece < len(old)]].mean(0)
        found[name] = torch.stack([torch.as_tensor(row) for row in rows])
    return found
