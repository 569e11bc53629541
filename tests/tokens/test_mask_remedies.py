"""Remedies for refused rows work; and the form in which each template takes calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data.chat import read_row
from finetune.data.layout import RowLayout
from finetune.recipe.schema import Recipe
from finetune.report.preview import find_oddities
from finetune.tokens.dataset import prepare
from finetune.tokens.encoder import Encoder, RowError
from tests.support.models.thinking_families import thinking_tokenizer
from tests.support.rows.masks import data_section, shown
from tests.support.rows.rendered_reference import Family, calls, result, says, user
from tests.support.rows.shipped_templates import shipped

_CONTROL = ("<|eos|>", "<|user|>", "<|bot|>", "<|tool|>", "<|end|>", "<|stop|>")
_OTHERS = "{% if m.role != 'assistant' %}{{ '<|user|>' + m.content + '<|end|>' }}{% else %}"
_BLOCK = "{{ '<think>' + m.reasoning_content + '</think>' }}"


def template(answer: str, prompt: str = "<|bot|>") -> str:
    return (
        f"{{% for m in messages %}}{_OTHERS}{{{{ '<|bot|>' }}}}{answer}{{{{ '<|end|>' }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}"
    )


# how a template treats reasoning -> its text
REASONING = {
    "none is written": template("{{ m.content.split('</think>')[-1] }}"),
    "only a block in the content": template("{{ m.content }}"),
    "a key that is looked at and not written": template(
        "{% if m.reasoning_content %}{% endif %}{{ m.content.split('</think>')[-1] }}"
    ),
    "a key beside calls alone": template(
        "{% if m.tool_calls and m.reasoning_content %}" + _BLOCK + "{% endif %}{{ m.content }}"
    ),
    "another key of two": template(
        "{% if m.thinking and m.tool_calls %}{{ m.thinking }}{% endif %}{% if m.reasoning_content %}"
        + _BLOCK
        + "{% endif %}{{ m.content }}"
    ),
    "after a closed block": template(
        "{% if m.reasoning_content %}" + _BLOCK + "{% endif %}{{ m.content }}", "<|bot|><think></think>"
    ),
}


def mask(family: Family, messages: list[dict[str, Any]], **settings: Any) -> str:
    read = read_row({"messages": messages}, RowLayout("messages"))
    encoder = Encoder(family.tokenizer(), data_section(**settings))
    return shown(encoder.document(encoder.examples(read)[-1]), family.tokenizer())


@pytest.mark.parametrize("name", REASONING)
@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "in the content"])
def test_reasoning_is_supervised_or_refused_with_a_remedy_that_works(name: str, key: str) -> None:
    family = Family(REASONING[name], _CONTROL, "<|eos|>", ("<|end|>",) * 2)
    answer = says("<think>\nHm\n</think>\n\nHi") if key == "in the content" else says("Hi") | {key: "Hm"}
    try:
        text = mask(family, [user("Hello"), answer])
    except RowError as error:
        told = str(error)
        assert "turn 2" in told
        assert "remove" in told
        assert "Hi<|end|>⟧" in mask(family, [user("Hello"), says("Hi")])
    else:
        assert "Hm" in text.partition("⟦")[2]


@pytest.mark.parametrize("train_on", ["each_turn", "completion"])
def test_what_is_told_of_history_works(train_on: str) -> None:
    """Also where a question follows that nobody answers."""
    tokenizer = thinking_tokenizer("qwen3")
    row = [user("Hello"), says("Hi", "Hm"), user("And?")]
    read = read_row({"messages": row}, RowLayout("messages"))
    with pytest.raises(RowError, match=r"set data\.train_on: each_turn .* or completion, or weight 0"):
        Encoder(tokenizer, data_section()).document(read)
    encoder = Encoder(tokenizer, data_section(train_on=train_on))
    (example,) = encoder.examples(read)
    assert "⟦<think>\nHm\n</think>\n\nHi<|im_end|>⟧" in shown(encoder.document(example), tokenizer)


# -- the form of calls -------------------------------------------------------------------------------------------------

OPENAI = [
    user("Ask."),
    {"role": "assistant", "content": None, "tool_calls": calls({"city": "Paris", "near": None})["tool_calls"]},
    result("Result."),
    says("Sunny."),
]
WRITTEN = '{"city": "Paris", "near": null}'


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("joined", ["'C' + c.function.arguments", "'C' ~ c.function.arguments",
                                    "'C' + (c.function.arguments | tojson)", "c.function.arguments | safe",
                                    "'C%s' | format(c.function.arguments)",
                                    "['C', c.function.arguments] | join(' ')"])  # fmt: skip
def test_each_template_gets_arguments_in_the_form_that_it_can_write(joined: str, as_object: bool) -> None:
    source = template(f"{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}{{{{ c.function.name }}}}"
                      f"{{{{ {joined} }}}}{{% endfor %}}")  # fmt: skip
    family = Family(source, _CONTROL, "<|eos|>", ("<|end|>",) * 2)
    rows = json.loads(json.dumps(OPENAI))
    if as_object:
        function = rows[1]["tool_calls"][0]["function"]
        function["arguments"] = json.loads(function["arguments"])
    text = mask(family, rows)
    assert text.count(WRITTEN) == 1
    assert "{'city'" not in text
    assert text.count("⟦") == 2


@pytest.mark.skipif("deepseekv3" not in shipped(), reason="the installed TRL ships no chat templates")
def test_a_row_of_openais_is_taken_by_a_template_that_joins_texts() -> None:
    text = mask(shipped()["deepseekv3"], OPENAI)
    assert f"```json\n{WRITTEN}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>⟧" in text


# -- the finding about an end that is not supervised -----------------------------------------------------------------


def test_an_end_that_is_not_the_turns_own_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss ends earlier answers with a control token that the model does not write."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    rows = [
        [user("Hello"), says("Hi")],
        [user("Hello"), says("Hi"), user("And?"), says("So.") | {"weight": 0}],
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    data = {"train": [{"path": "json", "data_files": str(file)}], "max_length": 256}
    recipe = Recipe.model_validate({"model": {"name_or_path": "none"}, "data": data})
    prepared = prepare(recipe, thinking_tokenizer("gpt_oss"))
    found = [
        odd for odd in find_oddities(prepared, recipe.data, begin=None) if "end of turn is not supervised" in odd.text
    ]
    assert [odd.places for odd in found] == [(f"{file}:2",)]
