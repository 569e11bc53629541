"""The exported template writes the training's prompts without arguments, and the record reads back or is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer

from finetune.data.chat import Chat
from finetune.errors import FinetuneError
from finetune.recipe.schema import Data, ModelSection
from finetune.tokens.chat_template import pin_date
from finetune.tokens.conversation import CONVERSATION, Conversation, read_conversation
from finetune.tokens.encoder import Encoder, RowError
from tests.support.models.chat_families import FAMILIES, byte_level_tokenizer, tokenizer_of

CHAT = [{"role": "user", "content": "Hello"}]
# Each begins or ends in white space that a careless prefix would eat or add.
THINKS = "  {% if enable_thinking is defined and not enable_thinking %}off{% endif %}{{ messages[0].content }}"
TEMPLATES = {
    "date": "\n{{ date_string }}|{{ messages[0].content }}\n",
    "a default date": "{% if date_string is not defined %}{% set date_string = 'today' %}{% endif %}{{ date_string }}",
    "the clock": "  {{ strftime_now('%Y-%m-%d') }}|{{ messages[0].content }}",
    "the clock in a macro": "{% macro day() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ day() }}",
    "a variable": THINKS,
    "text": "\n\n{{ persona }}|{{ messages[0].content }}",
    "an object": "{% for key, value in (limits | default({})).items() %}{{ key }}={{ value }};{% endfor %}",
    "nothing": "  {{ messages[0].content }}\n",
}
VARIABLES: dict[str, dict[str, Any]] = {
    "a variable": {"enable_thinking": False},
    "text": {"persona": 'It\'s "so"\n{{ x }} 海\\'},
    "an object": {"limits": {"a": None, "b": [1, 2.5, True]}},
}


def engine(template: str, **variables: Any) -> str:
    """As transformers and vLLM compile a template, by jinja2 alone. The clock is another day's."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["strftime_now"] = lambda form: f"TODAY {form}"
    return environment.from_string(template).render(messages=CHAT, add_generation_prompt=True, **variables)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_engine_needs_no_arguments(name: str) -> None:
    text, variables = TEMPLATES[name], VARIABLES.get(name, {})
    conversation = Conversation({"default": text}, "26 Jul 2024", variables, {})
    trained = engine(pin_date(text, "26 Jul 2024"), date_string="26 Jul 2024", **variables)
    exported = conversation.exported_template()
    assert engine(exported) == trained
    if name == "nothing":
        assert exported == text
    else:
        assert engine(text) != trained
    # An engine that gives today's date (llama.cpp for Llama 3) still writes the training's.
    assert engine(exported, date_string="27 Nov 2026") == trained


def test_a_request_may_change_a_variable() -> None:
    conversation = Conversation({"default": TEMPLATES["a variable"]}, "", {"enable_thinking": False}, {})
    assert engine(conversation.exported_template()) == "offHello"
    assert engine(conversation.exported_template(), enable_thinking=True) == "Hello"


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_exports_the_prompts_of_its_encoder(family: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(family)
    data = Data.model_validate({"train": [{"path": "json"}]})
    encoder = Encoder(tokenizer, data)
    conversation = encoder.conversation()
    assert list(conversation.stops) == ["<end_of_turn>" if family == "gemma" else tokenizer.eos_token]
    conversation.applied_to(tokenizer).save_pretrained(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    ids = exported.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == encoder.prompt_ids(CHAT)
    assert tokenizer.chat_template == tokenizer_of(family).chat_template


def test_a_tokenizer_keeps_its_other_templates() -> None:
    tokenizer = tokenizer_of("llama31")
    plain = tokenizer.chat_template
    several = copy.copy(tokenizer)
    several.chat_template = {"default": plain, "tool_use": "{{ date_string }}" + plain}
    data = Data.model_validate({"train": [{"path": "json"}]})
    exported = Encoder(several, data).conversation([2]).applied_to(several).chat_template
    assert set(exported) == {"default", "tool_use"}
    assert all("26 Jul 2024" in text for text in exported.values())


def test_the_record_reads_back(tmp_path: Path) -> None:
    assert read_conversation(tmp_path) is None
    conversation = Conversation({"default": "{{ x }}"}, "1 Jan 2020", {"x": [1, None]}, {"<|im_end|>": 2})
    (tmp_path / CONVERSATION).write_text(json.dumps(conversation.as_json()), "utf-8")
    assert read_conversation(tmp_path) == conversation


GOOD = {"templates": {"default": "{{ x }}"}, "date_string": "d", "chat_template_kwargs": {}, "stops": {"a": 1}}
BAD = {
    "templates": [None, ["a"], {"default": 1}, {"tool_use": "{{ x }}"}],
    "date_string": [None, 1],
    "chat_template_kwargs": [None, [], {"a-b": 1}, {"x %}{{": 1}],
    "stops": [None, [1], {"a": -1}, {"a": True}, {"a": "2"}],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in BAD.items() for value in values])
def test_a_strangers_record_is_refused_in_one_line(key: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / CONVERSATION).write_text(json.dumps(GOOD | {key: value}), "utf-8")
    with pytest.raises(
        FinetuneError, match=rf"conversation.json: {key} is not as a training writes it; resume"
    ) as error:
        read_conversation(tmp_path)
    assert "\n" not in str(error.value)


# ---- a turn that only the next turn's header ends

HEADERS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONTROL = ("<eos>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")


def header_encoder(folder: Path, ends: Any, name: str = "generation_config.json") -> Encoder:
    (folder / name).write_text(json.dumps({"eos_token_id": ends}), "utf-8")
    tokenizer = byte_level_tokenizer(HEADERS, CONTROL, None, "<eos>")
    data = Data.model_validate({"train": [{"path": "json"}]})
    return Encoder(tokenizer, data, ModelSection(name_or_path=str(folder)))


def supervised(encoder: Encoder, chat: Chat) -> list[str]:
    script = encoder.script(chat)
    return [script.text[start:end] for start, end in script.supervised]


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_the_next_header_ends_an_answer_if_the_model_stops_on_it(tmp_path: Path, name: str) -> None:
    encoder = header_encoder(tmp_path, [0, 1, 4], name)
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {}}}
    result = {"role": "tool", "content": "seen", "tool_call_id": "call00001", "name": "look"}
    assert supervised(encoder, Chat([*CHAT, says("Hi")], None, [False, True])) == ["Hi<|user|>"]
    several = Chat([*CHAT, says("Hi"), *CHAT, says("Again")], None, [False, True, False, True])
    assert supervised(encoder, several) == ["Hi<|user|>", "Again<|user|>"]
    assert encoder.script(several).stops == ("<|user|>",)
    called = Chat([*CHAT, says("") | {"tool_calls": [call]}, result, says("So")], None, [False, True, False, True])
    assert supervised(encoder, called) == ["<call>look</call><|tool|>", "So<|user|>"]
    last = Chat([*CHAT, says("") | {"tool_calls": [call]}], None, [False, True])
    assert supervised(encoder, last) == ["<call>look</call><|tool|>"]
    assert encoder.conversation().stops == {"<|user|>": 1}


@pytest.mark.parametrize("ends", [0, [0, 2], None, "1"])
def test_a_header_on_which_the_model_does_not_stop_is_refused(tmp_path: Path, ends: Any) -> None:
    with pytest.raises(RowError, match=r"next turn's <\|user\|> alone, .*add it to eos_token_id"):
        header_encoder(tmp_path, ends).script(Chat([*CHAT, says("Hi")], None, [False, True]))


def test_the_models_ends_are_part_of_the_address_where_the_template_needs_them(tmp_path: Path) -> None:
    """Two models of one tokenizer: the rows of one may be refused, so they are not read from the other's cache."""
    needs = [header_encoder(tmp_path, ends).identity() for ends in ([0, 1], [0], [0, 1])]
    assert needs[0] == needs[2] != needs[1]
    ended = Data.model_validate(
        {"train": [{"path": "json"}], "chat_template": HEADERS.replace("m.content }}", "m.content + eos_token }}")}
    )
    tokenizer = byte_level_tokenizer(HEADERS, CONTROL, None, "<eos>")
    missing = ModelSection(name_or_path=str(tmp_path / "without settings"))  # which are not asked for
    assert Encoder(tokenizer, ended, missing).identity() == Encoder(tokenizer, ended).identity()


def test_a_text_that_spells_the_header_stays_text(tmp_path: Path) -> None:
    encoder = header_encoder(tmp_path, [0, 1])
    document = encoder.document(Chat([*CHAT, says("Hi <|user|> there")], None, [False, True]))
    assert document.input_ids.count(1) == 2  # the question's header, and the end
    assert document.labels[-1] == document.input_ids[-1] == 1
