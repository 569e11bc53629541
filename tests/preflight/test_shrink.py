"""The small model of a rehearsal: what its tokenizer takes of the recipe's rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.data.row_reader import RowReader
from finetune.data.sources import resolve
from finetune.preflight.shrink import sample_texts, template_variables, train_tokenizer
from finetune.recipe.schema import Data
from finetune.tokens.encoder import Encoder, RowError


def test_what_rows_give_their_template_the_small_one_takes(tmp_path: Path) -> None:
    """Variables and reasoning, which the model's own template has, must not be refused by the rehearsal's."""
    answer = {"role": "assistant", "content": "So.", "thinking": "Hm"}
    row = {"messages": [{"role": "user", "content": "Why?"}, answer], "chat_template_kwargs": {"effort": "high"}}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    entry = {"path": "json", "data_files": str(file), "chat_template_kwargs": {"enable_thinking": False}}
    data = Data.model_validate({"train": [entry]})
    assert template_variables(data) == ["enable_thinking", "effort"]
    tokenizer = train_tokenizer(sample_texts(data), template_variables(data))
    (read,) = (each.read for each in RowReader(resolve(data.train[0])).rows())
    assert read is not None
    text = Encoder(tokenizer, data).script(read).text
    assert text == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>Hm</think>So.<|im_end|>\n"
    with pytest.raises(RowError, match="no variable 'enable_thinking'"):
        Encoder(train_tokenizer(sample_texts(data)), data).script(read)
