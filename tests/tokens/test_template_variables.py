"""What rows and data sets give their chat template: variables and reasoning, used or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from finetune.data.chat import read_row
from finetune.data.layout import RowLayout
from finetune.data.sources import resolve
from finetune.errors import DataError
from finetune.recipe.schema import Data
from finetune.tokens.cache import stored_documents
from finetune.tokens.encoder import Encoder, RowError
from tests.support.models.chat_families import QWEN3, tokenizer_of
from tests.support.rows.masks import data_section, shown

HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
AGAIN = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "So."}]
# As Qwen3's own: every last answer has a thinking block; without thinking the prompt already holds the empty one.
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
SWITCHED = QWEN3.replace(
    "{{ '<|im_start|>assistant\n' }}{% endif %}", "{{ '<|im_start|>assistant\n' }}" + SWITCH + "{% endif %}"
)
LLAMA_LIKE = "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"


def thinking(**keys: str) -> list[dict[str, str]]:
    return [HELLO[0], HELLO[1] | keys]


def mask(messages: list[dict[str, Any]], family: str = "qwen3", *, variables: Any = None, **settings: Any) -> str:
    """The text with what is learned in ⟦ ⟧; `variables`: the row's own."""
    row = {"messages": messages, "chat_template_kwargs": variables}
    document = Encoder(tokenizer_of(family), data_section(**settings)).document(read_row(row, RowLayout("messages")))
    return shown(document, tokenizer_of(family))


# -- variables ------------------------------------------------------------------------------------------------------


def test_a_variable_moves_the_empty_thinking_block_into_the_prompt() -> None:
    assert SWITCHED != QWEN3
    open_end = mask(HELLO, chat_template=SWITCHED)
    closed = mask(HELLO, chat_template=SWITCHED, variables={"enable_thinking": False})
    assert open_end.endswith("assistant\n⟦<think>\n\n</think>\n\nHi<|im_end|>⟧\n")
    assert closed.endswith("assistant\n<think>\n\n</think>\n\n⟦Hi<|im_end|>⟧\n")


OPENED = "{{ '<think>\\n' if enable_thinking is defined and enable_thinking else '<think>\\n\\n</think>\\n\\n' }}"


@pytest.mark.parametrize(
    ("switch", "usual", "own", "named"),
    [
        (SWITCH, {}, None, {}),  # thinks unless it is told not to
        (SWITCH, {"enable_thinking": False}, None, {"enable_thinking": False}),
        (SWITCH, {"enable_thinking": False}, {"enable_thinking": True}, {"enable_thinking": True}),
        (SWITCH, {}, {"enable_thinking": False}, {"enable_thinking": False}),
        (OPENED, {}, None, {"enable_thinking": False}),  # thinks if it is told to
        (OPENED, {"enable_thinking": True}, None, {}),
        ("{{ enable_thinking | string }}", {}, None, {}),  # false would be another prompt too
        ("", {}, None, {}),
    ],
)
def test_variables_that_a_request_to_a_server_names(switch: str, usual: Any, own: Any, named: Any) -> None:
    """A server that has the recipe's variables, and enable_thinking: true where a request does not name it."""
    template = SWITCHED.replace(SWITCH, switch)
    data = data_section(chat_template=template)
    data = data.model_copy(update={"train": [data.train[0].model_copy(update={"chat_template_kwargs": usual})]})
    encoder = Encoder(tokenizer_of("qwen3"), data)
    found = encoder.variables_for_server(own)
    assert found == named

    def prompt(variables: dict[str, Any]) -> str:
        text = tokenizer_of("qwen3").apply_chat_template(
            HELLO[:1], chat_template=template, tokenize=False, add_generation_prompt=True, **variables
        )
        return str(text)

    if "string" not in switch:
        trained = prompt(usual if own is None else own)
        assert prompt({"enable_thinking": True, **(usual if own is None else {}), **found}) == trained


def test_rows_with_other_variables_do_not_share_what_was_found() -> None:
    encoder = Encoder(tokenizer_of("qwen3"), data_section(chat_template=SWITCHED))
    masks = []
    for value in (False, True, False, True):
        row = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": value}}
        masks.append(shown(encoder.document(read_row(row, RowLayout("messages"))), tokenizer_of("qwen3")))
    assert masks[0] == masks[2] != masks[1] == masks[3]
    assert masks[0].count("⟦Hi") == masks[1].count("⟦<think>") == 1


def test_many_different_variables_are_not_kept() -> None:
    encoder = Encoder(tokenizer_of("llama3"), data_section(chat_template="{{ note }}" + LLAMA_LIKE))
    for number in range(40):
        read = read_row({"messages": HELLO, "chat_template_kwargs": {"note": number}}, RowLayout("messages"))
        assert shown(encoder.document(read), tokenizer_of("llama3")).startswith(f"{number}user")
    assert len(encoder._finders) <= 16


def test_prompts_are_given_what_all_training_sets_give() -> None:
    def prompt(*values: bool | None) -> str:
        entries = [
            {"path": "x", "chat_template_kwargs": {} if value is None else {"enable_thinking": value}}
            for value in values
        ]
        data = Data.model_validate({"train": entries, "chat_template": SWITCHED})
        encoder = Encoder(tokenizer_of("qwen3"), data)
        assert encoder.sample_prompt("Hello").prompt_ids == encoder.prompt_ids(HELLO[:1])
        return tokenizer_of("qwen3").decode(encoder.prompt_ids(HELLO[:1]))

    assert prompt(False).endswith("assistant\n<think>\n\n</think>\n\n")
    assert prompt(False, False) == prompt(False)
    assert prompt(None) == prompt(True) == prompt(False, None) == prompt(True, False)
    assert prompt(None).endswith("assistant\n")


def test_a_variable_that_the_template_does_not_have_is_refused() -> None:
    with pytest.raises(RowError, match=r"the chat template has no variable 'enable_thinking'; remove it, or give"):
        mask(HELLO, "llama3", variables={"enable_thinking": False})
    with pytest.raises(RowError, match="has no variable 'thinking'"):  # not the end of another name
        mask(HELLO, chat_template=SWITCHED, variables={"thinking": False})


def test_a_variable_that_spells_a_control_token_is_refused() -> None:
    template = "{{ note }}" + LLAMA_LIKE
    assert "calmuser" in mask(HELLO, "llama3", chat_template=template, variables={"note": "calm"})
    with pytest.raises(RowError, match=r"note spells a control token in 'a<\|eot_id\|>'"):
        mask(HELLO, "llama3", chat_template=template, variables={"note": "a<|eot_id|>"})


def test_a_data_set_with_a_variable_that_is_not_there_is_answered_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "rows.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 3)
    entry = {"path": "json", "data_files": str(file), "chat_template_kwargs": {"enable_thinking": False}}
    data = Data.model_validate({"train": [entry]})
    with pytest.raises(DataError) as raised:
        stored_documents(resolve(data.train[0]), data, Encoder(tokenizer_of("llama3"), data))
    assert raised.value.exit_code == 2
    (mistake,) = raised.value.mistakes
    assert mistake.startswith(f"{file}: chat_template_kwargs: the chat template has no variable 'enable_thinking'; ")


# -- reasoning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_reaches_the_key_that_the_template_reads(key: str) -> None:
    assert mask(thinking(**{key: "Hm"})).endswith("assistant\n⟦<think>\nHm\n</think>\n\nHi<|im_end|>⟧\n")
    assert mask(thinking(**{key: ""})).endswith("assistant\n⟦<think>\n\n</think>\n\nHi<|im_end|>⟧\n")


@pytest.mark.parametrize("read", ["thinking", "reasoning"])  # transformers itself fills in the first and no other
def test_a_template_that_reads_another_key_gets_that_one(read: str) -> None:
    template = QWEN3.replace("m.reasoning_content", f"m.{read}")
    for key in ("reasoning_content", "thinking", "reasoning"):
        assert "⟦<think>\nHm\n</think>" in mask(thinking(**{key: "Hm"}), chat_template=template)


@pytest.mark.parametrize("family", ["llama3", "qwen", "mistral", "gemma"])
def test_reasoning_that_the_template_leaves_out_is_refused(family: str) -> None:
    words = "leaves out the reasoning of turn 2, which is supervised; write it into the content"
    with pytest.raises(RowError, match=words):
        mask(thinking(reasoning_content="Hm"), family)


def test_a_thinking_block_that_the_template_strips_is_refused() -> None:
    block = [HELLO[0], {"role": "assistant", "content": "<think>\nHm\n</think>\n\nHi"}]
    assert "⟦<think>\nHm\n</think>\n\nHi<|im_end|>⟧" in mask(block)
    assert "⟦<think>\nHm\n</think>\n\nHi<|eot_id|>⟧" in mask(block, "llama3")
    assert "<think>\n⟦Hm\n</think>\n\nHi<｜end▁of▁sentence｜>⟧" in mask(block, "deepseek")  # its prompt opens the block
    strips = LLAMA_LIKE.replace("m.content", "m.content.split('</think>')[-1]")
    with pytest.raises(RowError, match=r"reasoning of turn 2, which is supervised; .*remove it from the row"):
        mask(block, "llama3", chat_template=strips)
    # Text that only speaks of the tag has nothing before it that is lost.
    assert "about </think>" in mask([HELLO[0], {"role": "assistant", "content": "about </think>"}], "llama3")


def test_reasoning_of_earlier_turns_is_left_out_where_they_are_not_learned() -> None:
    dialogue = [*thinking(thinking="Hm"), AGAIN[0], AGAIN[1] | {"thinking": "Well"}]
    words = (
        "reasoning of turn 2, which is supervised; set data.train_on: each_turn (every answer an example of its own) or"
    )
    with pytest.raises(RowError, match=re.escape(words)):
        mask(dialogue)
    last = mask(dialogue, train_on="completion")
    assert last.count("⟦") == 1
    assert last.endswith("⟦<think>\nWell\n</think>\n\nSo.<|im_end|>⟧\n")
    assert "Hm" not in last
    weighed = [dialogue[0], dialogue[1] | {"weight": 0}, *dialogue[2:]]
    assert mask(weighed) == last


def test_reasoning_of_a_user_is_refused() -> None:
    with pytest.raises(RowError, match=r"messages\[0\]: thinking on a user turn; only the assistant's is supervised"):
        mask([HELLO[0] | {"thinking": "Hm"}, HELLO[1]])
