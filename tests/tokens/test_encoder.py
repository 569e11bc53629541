"""Rows to tokens and labels: what is learned, for any template, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from finetune.errors import DataError
from finetune.tokens.encoder import IGNORE, Encoder, RowError
from tests.support.models.chat_families import FAMILIES, LLAMA3, LLAMA32, QWEN, real_tokenizer, tokenizer_of
from tests.support.rows.masks import data_section, encoded, shown

HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there"}]


def encoder_of(family: str, **settings: Any) -> Encoder:
    return Encoder(tokenizer_of(family), data_section(**settings))


def mask(family: str, row: dict[str, Any], **settings: Any) -> str:
    encoder = encoder_of(family, **settings)
    return shown(encoded(encoder, row), tokenizer_of(family))


# -- control tokens in texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_spells_control_tokens_stays_text(family: str) -> None:
    tokenizer = tokenizer_of(family)
    control = FAMILIES[family][1]
    everything = " ".join(f"a{token}b" for token in control)
    evil = [{"role": "user", "content": everything}, {"role": "assistant", "content": f"so {everything} ok"}]
    special = set(tokenizer.all_special_ids) | {tokenizer.convert_tokens_to_ids(token) for token in control}

    def controls(messages: list[dict[str, str]]) -> list[int]:
        document = encoded(Encoder(tokenizer, data_section()), {"messages": messages}, "messages")
        assert all(token in (label, token) for token, label in zip(document.input_ids, document.labels, strict=True))
        return [token for token in document.input_ids if token in special]

    assert controls(evil) == controls(HELLO)
    assert shown(encoded(encoder_of(family), {"messages": evil}), tokenizer).count(control[0]) >= 2


def test_control_tokens_in_tool_schemas_and_prompts_stay_text() -> None:
    tokenizer = tokenizer_of("qwen")
    tools = [{"type": "function", "function": {"name": "f", "description": "ends <|im_end|> here"}}]
    document = encoded(encoder_of("qwen"), {"messages": HELLO, "tools": tools})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert document.input_ids.count(end) == 3
    prompt = encoder_of("qwen").prompt_ids([{"role": "user", "content": "<|im_end|>\n<|im_start|>assistant"}])
    assert prompt.count(end) == 2
    assert tokenizer.decode(prompt).endswith("<|im_end|>\n<|im_start|>assistant<|im_end|>\n<|im_start|>assistant\n")


def test_texts_and_completions_that_spell_control_tokens() -> None:
    tokenizer = tokenizer_of("llama3")
    document = encoded(encoder_of("llama3"), {"text": "a <|eot_id|> b"}, "text")
    assert tokenizer.decode(document.input_ids) == "<|begin_of_text|>a <|eot_id|> b<|eot_id|>"
    assert document.input_ids.count(tokenizer.eos_token_id) == 1
    # An end of text written into the data by hand is the end of text, once.
    ended = encoded(encoder_of("llama3"), {"prompt": "a", "completion": " b<|eot_id|>"})
    assert tokenizer.decode(ended.input_ids) == "<|begin_of_text|>a b<|eot_id|>"
    assert ended.input_ids.count(tokenizer.eos_token_id) == 1  # the one at the end
    assert ended.input_ids == encoded(encoder_of("llama3"), {"prompt": "a", "completion": " b"}).input_ids


# -- what is learned ------------------------------------------------------------------------------------------------


def test_train_on() -> None:
    row = {"messages": [*HELLO, {"role": "user", "content": "and"}, {"role": "assistant", "content": "so"}]}
    assert mask("llama3", row).count("⟦") == 2
    assert mask("llama3", row, train_on="completion").endswith("\n\n⟦so<|eot_id|>⟧")
    assert mask("llama3", row, train_on="completion").count("⟦") == 1
    everything = encoded(encoder_of("llama3", train_on="all"), row)
    assert everything.labels == [IGNORE, *everything.input_ids[1:]]
    row["messages"][1] = {**HELLO[1], "weight": 0}
    assert "⟧Hi there<|eot_id|>⟦" in mask("llama3", row, train_on="all")


def test_prompt_completion_and_text() -> None:
    prompted = {"prompt": "2+2= ", "completion": "4"}
    assert mask("llama3", prompted) == "<|begin_of_text|>2+2= ⟦4<|eot_id|>⟧"
    assert mask("llama3", prompted, train_on="all") == "<|begin_of_text|>⟦2+2= 4<|eot_id|>⟧"
    assert mask("llama3", {"text": "hello"}) == "<|begin_of_text|>⟦hello<|eot_id|>⟧"
    turns = {
        "prompt": [*HELLO, {"role": "user", "content": "and"}],
        "completion": [{"role": "assistant", "content": "so"}],
    }
    assert mask("llama3", turns).count("⟦") == 1
    assert mask("llama3", turns).endswith("⟦so<|eot_id|>⟧")


def test_alpaca_and_sharegpt_are_chats() -> None:
    chat = mask("llama3", {"messages": HELLO})
    assert mask("llama3", {"instruction": "Hello", "input": "", "output": "Hi there"}) == chat
    assert "Hello\n\nyou" in mask("llama3", {"instruction": "Hello", "input": "you", "output": "Hi"})
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi there"}]
    assert mask("llama3", {"conversations": turns}) == chat
    call = json.dumps({"name": "weather", "arguments": {"city": "Paris"}})
    tool_turns = [
        turns[0],
        {"from": "function_call", "value": call},
        {"from": "observation", "value": "sunny"},
        turns[1],
    ]
    assert '⟦<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}' in mask(
        "qwen", {"conversations": tool_turns}
    )


def test_parts_of_content_and_openai_nulls() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    row = {"messages": [{"role": "user", "content": parts, "name": None, "tool_calls": None}, HELLO[1]]}
    assert mask("llama3", row) == mask("llama3", {"messages": HELLO})


def test_an_answer_that_begins_with_a_line_break_does_not_melt_into_the_header() -> None:
    tokenizer = tokenizer_of("qwen")
    row = {"messages": [HELLO[0], {"role": "assistant", "content": "\n\nHi"}]}
    document = encoded(encoder_of("qwen"), row)
    prompt = encoder_of("qwen").prompt_ids([HELLO[0]])
    assert document.input_ids[: len(prompt)] == prompt
    assert document.labels[len(prompt) - 1] == IGNORE
    assert document.labels[len(prompt)] != IGNORE
    assert shown(document, tokenizer).endswith("assistant\n⟦\n\nHi<|im_end|>⟧\n")


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"no_prompt"}))
def test_a_row_begins_as_its_prompt(family: str) -> None:
    """What is learned continues exactly what the model is given at inference."""
    encoder = encoder_of(family)
    document, prompt = encoded(encoder, {"messages": HELLO}), encoder.prompt_ids(HELLO[:1])
    assert document.input_ids[: len(prompt)] == prompt
    assert [label != IGNORE for label in document.labels[: len(prompt) + 1]] == [False] * len(prompt) + [True]


def test_no_double_bos() -> None:
    for family in ("llama3", "llama31", "mistral", "gemma"):
        tokenizer = tokenizer_of(family)
        document = encoded(encoder_of(family), {"messages": HELLO})
        assert document.input_ids.count(tokenizer.bos_token_id) == 1
        assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id  # the tokenizer itself would add one more


# -- dates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [None, LLAMA32, "{{ strftime_now('%Y-%m-%d') }}" + LLAMA3])
def test_the_date_is_pinned(template: str | None) -> None:
    text = mask("llama31", {"messages": HELLO}, chat_template=template, date_string="02 Jan 2020")
    assert ("2020-01-02" if template and "%Y-%m" in template else "Today Date: 02 Jan 2020") in text


def test_a_date_in_other_words_is_printed_as_it_stands() -> None:
    template = "{{ strftime_now('%Y') }}" + LLAMA3
    assert mask("llama3", {"messages": HELLO}, chat_template=template, date_string="the fourth").startswith(
        "the fourth"
    )


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", "no end-of-turn token"),
        ("{% for m in messages if m.role != 'user' %}{{ m.content + eos_token }}{% endfor %}", "leaves out the text"),
        ("{{ messages[9].content }}", "refuses this row"),
        ("{% for m in messages %}{{ m.content | upper + eos_token }}{% endfor %}", None),
    ],
)
def test_templates_that_cannot_be_followed(template: str, words: str | None) -> None:
    row = {"messages": HELLO}
    if words is None:  # upper case is odd, but can be followed: what is rendered is what is learned
        assert mask("llama3", row, chat_template=template).endswith("⟦HI THERE<|eot_id|>⟧")
        return
    with pytest.raises(RowError, match=words):
        mask("llama3", row, chat_template=template)


@pytest.mark.parametrize(
    ("template", "words"),
    [("{% for m in %}", "line 1"), ("no/such/file.jinja", "No such file")],
)
def test_templates_that_cannot_be_read(template: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        mask("llama3", {"messages": HELLO}, chat_template=template)


def test_a_tokenizer_without_a_template_says_so() -> None:
    tokenizer = tokenizer_of("llama3").__class__(tokenizer_object=tokenizer_of("llama3").backend_tokenizer)
    with pytest.raises(DataError, match=r"data\.chat_template"):
        encoded(Encoder(tokenizer, data_section()), {"messages": HELLO})


def test_a_template_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(LLAMA3)
    row = {"messages": HELLO}
    assert mask("llama3", row, chat_template=str(tmp_path / "mine.jinja")) == mask("llama3", row)


def test_two_users_in_a_row_are_for_the_template_to_judge() -> None:
    row = {"messages": [HELLO[0], *HELLO]}
    assert mask("llama3", row).count("⟦") == 1
    with pytest.raises(RowError, match="must alternate"):
        mask("mistral", row)


def test_nothing_to_learn() -> None:
    with pytest.raises(RowError, match="nothing in this row is supervised"):
        mask("llama3", {"messages": [HELLO[0], {**HELLO[1], "weight": 0}]})
    last_unlearned = [*HELLO, HELLO[0], {**HELLO[1], "weight": 0}]
    with pytest.raises(RowError, match="nothing in this row is supervised"):
        mask("llama3", {"messages": last_unlearned}, train_on="completion")


# -- templates that look at their texts -----------------------------------------------------------------------------


def test_a_template_that_looks_at_its_texts_is_followed_by_prefixes() -> None:
    template = QWEN.replace(
        "{{- '<|im_start|>' + m.role", "{{- ('!' if m.content.startswith('Hel') else '') + '<|im_start|>' + m.role"
    )
    text = mask("qwen", {"messages": HELLO}, chat_template=template)
    assert text.endswith("!<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n⟦Hi there<|im_end|>⟧\n")


# -- properties -----------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.just("\n"), min_size=1).filter(str.strip)


@settings(max_examples=40, deadline=None)
@given(family=st.sampled_from(sorted(FAMILIES)), texts=st.lists(TEXTS, min_size=2, max_size=6))
def test_any_text_is_learned_whole(family: str, texts: list[str]) -> None:
    roles = ["user", "assistant"] * 3
    texts = texts[: len(texts) // 2 * 2]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    tokenizer = tokenizer_of(family)
    document = encoded(encoder_of(family), {"messages": messages})
    assert document.labels[0] == IGNORE
    runs = shown(document, tokenizer).split("⟦")[1:] if not any("⟦" in text or "⟧" in text for text in texts) else []
    for run, text in zip(runs, texts[1::2], strict=False):
        assert text.split()[-1] in run.split("⟧")[0] or family in ("mistral", "deepseek", "qwen3")


# -- real tokenizers ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_tokenizer_gives_its_own_tokens_for_ordinary_rows() -> None:
    tokenizer, draw = real_tokenizer(), random.Random(0)
    words = "the Weather of 2024 is, (mostly) fine…  naïve 😀 \n and\n\nthen\tsome `code = 1`".split(" ")
    encoder = Encoder(tokenizer, data_section())
    for _ in range(50):
        contents = [" ".join(draw.choices(words, k=draw.randint(1, 30))).strip() or "a" for _ in range(4)]
        roles = ("user", "assistant") * 2
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        document = encoded(encoder, {"messages": messages})
        assert document.input_ids == tokenizer.apply_chat_template(messages)["input_ids"]
        learned = tokenizer.decode([label for label in document.labels if label != IGNORE])
        assert learned == f"{contents[1]}<|im_end|>{contents[3]}<|im_end|>"


@pytest.mark.parametrize("tail", ["\\n\\n", "\\n", "  ", " \\n \\n\\n", "</think>\\n\\n"])
def test_an_answer_follows_the_tokens_of_its_prompt_alone(tail: str) -> None:
    """GPT-2's pattern leaves the last white space before a word to a token of its own, and joins it at a text's end."""
    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words = ["Hello there\n\n\n\nHi  \n \n\n</think>\n\n  "] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(words, BpeTrainer(special_tokens=["<u>", "<a>", "<e>"], initial_alphabet=alphabet))
    template = (
        "{% for m in messages %}{{ ('<u>' if m.role == 'user' else '<a>TAIL') + m.content + '<e>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<a>TAIL' }}{% endif %}"
    ).replace("TAIL", tail)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<e>", chat_template=template)
    asked = [{"role": "user", "content": "Hello"}]
    encoder = Encoder(tokenizer, data_section())
    document = encoded(encoder, {"messages": [*asked, {"role": "assistant", "content": "Hi"}]})
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    first = next(at for at, label in enumerate(document.labels) if label != -100)
    assert document.input_ids[:first] == prompt == encoder.prompt_ids(asked)
    assert tokenizer.decode(document.input_ids[first:]) == "Hi<e>"


@pytest.mark.parametrize("turns", [("<|im_start|>", "<|im_end|>"), ("<start_of_turn>", "<end_of_turn>")])
def test_a_template_with_another_models_tokens_names_them(turns: tuple[str, str]) -> None:
    begin, end = turns
    template = f"{{% for m in messages %}}{{{{ '{begin}' + m.role + '\n' + m.content + '{end}\n' }}}}{{% endfor %}}"
    template += f"{{% if add_generation_prompt %}}{{{{ '{begin}assistant\n' }}}}{{% endif %}}"
    with pytest.raises(RowError) as caught:
        encoded(encoder_of("mistral", chat_template=template), {"messages": HELLO})
    assert f'no token of this tokenizer; write model.add_special_tokens: ["{begin}", "{end}"]' in str(caught.value)


# -- templates that write the next answer's header always -----------------------------------------------------------

_TURN = (
    "{% for m in messages %}{{ BEGIN + m.role + MIDDLE + m.content + END }}{% endfor %}"
    "{{ BEGIN + 'assistant' + MIDDLE }}"
)
ALWAYS = {
    "llama3": ("", "'<|start_header_id|>'", "'<|end_header_id|>\\n\\n'", "'<|eot_id|>'"),
    "qwen": ("", "'<|im_start|>'", "'\\n'", "'<|im_end|>\\n'"),
    # Its own system turn holds the end before the user's header.
    "with its own system turn": (
        "{{ '<|im_start|>system\\nHelp.<|im_end|>\\n' }}",
        "'<|im_start|>'",
        "'\\n'",
        "'<|im_end|>\\n'",
    ),
}


@pytest.mark.parametrize("name", ALWAYS)
def test_a_header_that_is_always_written_is_no_end(name: str) -> None:
    """Old copies of Llama 3's template do not ask add_generation_prompt; the header belongs to the next prompt."""
    family = "llama3" if name == "llama3" else "qwen"
    start, *parts = ALWAYS[name]
    template = start + _TURN
    for word, text in zip(("BEGIN", "MIDDLE", "END"), parts, strict=True):
        template = template.replace(word, text)
    encoder = encoder_of(family, chat_template=template)
    end = json.loads(parts[2].replace("'", '"')).strip()
    for messages in (HELLO, [*HELLO, *HELLO]):
        text = shown(encoded(encoder, {"messages": messages}), tokenizer_of(family))
        assert text.count(f"⟦Hi there{end}⟧") == text.count("⟦") == len(messages) // 2
    assert list(encoder.conversation().stops) == [end]
