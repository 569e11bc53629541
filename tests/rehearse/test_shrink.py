"""The small model of a rehearsal: what its tokenizer takes of the recipe's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from finetune.data.rows import RowReader
from finetune.data.sources import resolve
from finetune.errors import FinetuneError
from finetune.probe.small_model import LARGEST
from finetune.recipe.schema import Data
from finetune.rehearse.shrink import sample_texts, shrink_model, template_variables, train_tokenizer
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


@pytest.mark.parametrize("layout", ["preference", "kto"])
def test_variables_of_preference_rows_are_taken_too(layout: str, tmp_path: Path) -> None:
    def turn(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    row: dict[str, Any] = {"prompt": turn("user", "Why?"), "chat_template_kwargs": {"effort": "high"}}
    if layout == "preference":
        row |= {"chosen": turn("assistant", "So."), "rejected": turn("assistant", "No.")}
    else:
        row |= {"completion": turn("assistant", "So."), "label": True}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    entry = {"path": "json", "data_files": str(tmp_path / "rows.jsonl"), "format": layout}
    assert template_variables(Data.model_validate({"train": [entry]})) == ["effort"]


@pytest.mark.parametrize(
    ("turn", "end", "added"),
    [
        ("<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>", "<|eot_id|>", ()),
        ("<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n", "<end_of_turn>", ()),
        ("{{ '<｜' + m.role + '｜>' + m.content }}<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ()),
        ("{{ m.role }}: {{ m.content }}</s>", "</s>", ()),
        ("{{ m.role }}: {{ m.content }}<|new|>", None, ("<|new|>",)),
    ],
)
def test_ends_of_turns_in_the_recipes_own_template(
    turn: str, end: str | None, added: tuple[str, ...], tiny_llama: Path, tmp_path: Path
) -> None:
    """A token that the recipe adds stays unknown until the training adds it."""
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (file := tmp_path / "chat.jinja").write_text(f"{{% for m in messages %}}{turn}{{% endfor %}}", "utf-8")
    entry = {"path": "json", "data_files": str(tmp_path / "rows.jsonl")}
    data = Data.model_validate({"train": [entry], "chat_template": str(file)})
    tokenizer = AutoTokenizer.from_pretrained(shrink_model(str(tiny_llama), "main", data, tmp_path, added).folder)
    (row,) = (line.read for line in RowReader(resolve(data.train[0])).rows())
    assert row is not None
    if end is None:
        with pytest.raises(RowError, match=r"writes no end-of-turn token|is no token of this tokenizer"):
            Encoder(tokenizer, data).script(row)
        return
    script = Encoder(tokenizer, data).script(row)
    assert script.text[slice(*script.supervised[0])].endswith(f"So.{end}")
    assert len(tokenizer(end, add_special_tokens=False).input_ids) == 1


def chats(folder: Path) -> Data:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "Why?"}]}) + "\n")
    return Data.model_validate({"train": [{"path": "json", "data_files": str(file)}]})


SLOW = ("exaone_moe", "deepseek_v3", "cwm")


@pytest.mark.sample(1)
# Sizes by other names, no heads, lists with an entry for each layer, settings by a layer's number, latent heads.
@pytest.mark.parametrize(
    "name",
    ["gpt2", "mamba", "gemma4_text", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
def test_any_architecture_is_made_small_and_runs(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_MAPPING[name]().to_dict(), default=str), "utf-8")
    shrunk = shrink_model(str(tmp_path), "main", chats(tmp_path), tmp_path / "small")
    model = AutoModelForCausalLM.from_pretrained(shrunk.folder)
    assert type(model).__name__ == shrunk.architecture
    assert shrunk.parameters == sum(parameter.numel() for parameter in model.parameters()) < LARGEST
    logits = model(input_ids=torch.arange(3, 20)[None], use_cache=False).logits
    assert logits.shape == (1, 17, shrunk.vocabulary)
    assert logits.isfinite().all()


def test_sizes_that_no_model_has_are_a_line(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["llama"]().to_dict() | {"hidden_size": 96, "num_attention_heads": 7}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(FinetuneError, match=r"num_attention_heads is 7, and must be a multiple of .*, 32; ") as raised:
        shrink_model(str(tmp_path), "main", chats(tmp_path), tmp_path / "small")
    assert "\n" not in str(raised.value)
