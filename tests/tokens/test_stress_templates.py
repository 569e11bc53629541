"""Templates written to break one rule each, by rows of every kind: right, or refused with a reason, none wrong."""

from __future__ import annotations

import pytest

from finetune.data.chat import read_row
from finetune.data.layout import RowLayout
from finetune.tokens.encoder import Encoder
from tests.support.rows.masks import data_section, shown
from tests.support.rows.rendered_reference import (
    MODES,
    ROWS,
    Family,
    assert_rows_are_independent,
    sample_of_rows,
    table,
)

_CONTROL = ("<s>", "<|eos|>", "<|user|>", "<|bot|>", "<|system|>", "<|tool|>", "<|end|>", "<|stop|>", "<|think|>",
            "<|/think|>", "<|call|>", "<|args|>", "<|/call|>", "<|result|>")  # fmt: skip
_TOOLS = "{% if tools %}{{ '<|system|>' + tools | tojson + '<|end|>' }}{% endif %}"
_OTHERS = "{% if m.role in ('user', 'system', 'tool') %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "{{ '<|call|>' + c.function.name + '<|args|>' + c.function.arguments | tojson + '<|/call|>' }}{% endfor %}"
)
_THOUGHT = "{% if m.reasoning_content %}{{ '<|think|>' + m.reasoning_content + '<|/think|>' }}{% endif %}"


def chat(answer: str, prompt: str = "<|bot|>", *, begin: str = "", end: str = "", others: str = _OTHERS) -> str:
    """A template whose assistant's turns are `answer`, after the texts of the others and before a prompt's."""
    return (
        f"{_TOOLS}{begin}{{% for m in messages %}}{others}{{% if m.role == 'assistant' %}}{answer}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}{end}"
    )


_PLAIN = "{{ '<|bot|>' }}" + _THOUGHT + "{{ m.content }}" + _CALLS + "{{ '<|end|>' }}"
_ENDS_OTHERWISE = _PLAIN.replace("'<|end|>'", "'<|stop|>' if loop.last else '<|end|>'")

# rule that is stressed -> template, stops, and what else is known of it
TEMPLATES: dict[str, Family] = {
    name: Family(template, _CONTROL, "<|eos|>", stops, **facts)
    for name, (template, stops, facts) in {
        "a call is closed by control tokens of its own": (chat(_PLAIN), ("<|end|>",) * 2, {}),
        "arguments before the name": (
            chat(_PLAIN.replace("c.function.name + '<|args|>' + c.function.arguments | tojson",
                                "c.function.arguments | tojson + '<|args|>' + c.function.name")),
            ("<|end|>",) * 2, {}),
        "calls before the text": (
            chat("{{ '<|bot|>' }}" + _THOUGHT + _CALLS + "{{ m.content + '<|end|>' }}"), ("<|end|>",) * 2, {}),
        "turns with calls end in another way": (
            chat(_PLAIN.replace("{{ '<|end|>' }}", "{{ '<|stop|>' if m.tool_calls else '<|end|>' }}")),
            ("<|end|>", "<|stop|>"), {}),
        "a call ends its turn with its own closing token": (
            chat(_PLAIN.replace("{{ '<|end|>' }}", "{{ '' if m.tool_calls else '<|end|>' }}")), ("<|end|>", None), {}),
        "the last answer ends in another way": (chat(_ENDS_OTHERWISE), ("<|stop|>",) * 2, {}),
        "every document ends with another token": (
            chat(_PLAIN, end="{% if not add_generation_prompt %}{{ '\\n' + eos_token }}{% endif %}"),
            ("<|end|>",) * 2, {}),
        "every document ends with words": (
            chat(_PLAIN, end="{% if not add_generation_prompt %}{{ '-- the end --' }}{% endif %}"),
            ("<|end|>",) * 2, {}),
        "no turn has an end": (chat(_PLAIN.replace("{{ '<|end|>' }}", "")), (None, None), {}),
        "only words end a turn": (chat(_PLAIN.replace("'<|end|>'", "'[end]'")), (None, None), {}),
        "words after the end of a turn": (chat(_PLAIN.replace("'<|end|>'", "'<|end|>[done]'")), ("<|end|>",) * 2, {}),
        "text and call are two turns": (
            chat("{% if m.content and m.tool_calls %}{{ '<|bot|>' + m.content + '<|end|>' }}{{ '<|bot|>' }}" + _CALLS
                 + "{{ '<|end|>' }}{% else %}" + _PLAIN + "{% endif %}"), ("<|end|>",) * 2, {}),
        "each call is a turn": (
            chat("{{ '<|bot|>' }}" + _THOUGHT + "{{ m.content }}{% for c in m.tool_calls or [] %}"
                 "{{ '' if loop.first else '<|bot|>' }}"
                 "{{ '<|call|>' + c.function.name + c.function.arguments | tojson }}"
                 "{{ '' if loop.last else '<|end|>' }}{% endfor %}{{ '<|end|>' }}"), ("<|end|>",) * 2, {}),
        "each call is a turn with an end of its own": (
            chat("{% if m.tool_calls %}{% for c in m.tool_calls %}{{ '<|bot|>' }}" + _THOUGHT + "{{ m.content }}"
                 "{{ '<|call|>' + c.function.name + c.function.arguments | tojson + '<|/call|>' }}{% endfor %}"
                 "{% else %}" + _PLAIN + "{% endif %}"), ("<|end|>", "<|/call|>"), {}),
        "the prompt ends with an empty thought": (chat(_PLAIN, "<|bot|><|think|><|/think|>"), ("<|end|>",) * 2, {}),
        "the prompt ends with words": (chat(_PLAIN, "<|bot|>[fast] "), ("<|end|>",) * 2, {}),
        "the prompt ends with a line break": (chat(_PLAIN, "<|bot|>\\n"), ("<|end|>",) * 2, {}),
        "the prompt opens a thought": (chat(_PLAIN, "<|bot|><|think|>"), ("<|end|>",) * 2, {}),
        "the prompt opens a block of another spelling": (
            chat(_PLAIN.replace("'<|think|>' + m.reasoning_content + '<|/think|>'",
                                "'<thought>\\n' + m.reasoning_content + '\\n</thought>\\n'"),
                 "<|bot|><thought>\\n"), ("<|end|>",) * 2, {}),
        "turns begin with words that the prompt does not have": (
            chat(_PLAIN.replace("'<|bot|>'", "'<|bot|>[' + loop.index0 | string + ']'")), ("<|end|>",) * 2, {}),
        "no generation prompt": (chat(_PLAIN, ""), ("<|end|>",) * 2, {}),
        "no generation prompt, and words as a header": (
            chat(_PLAIN.replace("'<|bot|>'", "'Bot: '"), ""), ("<|end|>",) * 2, {}),
        "the tail depends on the answer before": (
            chat(_PLAIN.replace("{{ '<|bot|>' }}", "{{ '<|bot|>' if loop.index0 == 0 or messages[loop.index0 - 1].role "
                                "!= 'tool' or messages[loop.index0 - 2].content else '' }}"),
                 "' + ('<|bot|>' if messages[-1].role != 'tool' or messages[-2].content else '') + '"),
            ("<|end|>",) * 2, {}),
        "history has no thoughts": (
            chat(_PLAIN.replace("m.reasoning_content %}", "m.reasoning_content and loop.last %}")),
            ("<|end|>",) * 2, {}),
        "history has no calls": (
            chat(_PLAIN.replace("m.tool_calls or []", "m.tool_calls or [] if loop.last else []")
                 .replace("{% for c in m.tool_calls or [] if loop.last else [] %}",
                          "{% for c in ((m.tool_calls or []) if loop.last else []) %}")), ("<|end|>",) * 2, {}),
        "history is shortened": (
            chat(_PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:6] }}")),
            ("<|end|>",) * 2, {}),
        "history is shortened at its beginning": (
            chat(_PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[6:] }}")),
            ("<|end|>",) * 2, {}),
        "history has first words": (
            chat(_PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split(' ')[0] }}")),
            ("<|end|>",) * 2,
            {},
        ),
        "history has last words": (
            chat(_PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split(' ')[-1] }}")),
            ("<|end|>",) * 2,
            {},
        ),
        "history has an empty block": (
            chat(_PLAIN.replace("{{ m.content }}", "{{ '' if loop.last else '<|think|><|/think|>' }}{{ m.content }}")),
            ("<|end|>",) * 2, {}),
        "the last answer has an empty block": (
            chat(_PLAIN.replace("{{ m.content }}", "{{ '<|think|><|/think|>' if loop.last and not m.reasoning_content "
                                "else '' }}{{ m.content }}")), ("<|end|>",) * 2, {}),
        "the answer is repeated at the end": (
            chat(_PLAIN, end="{% if not add_generation_prompt %}{{ '<|system|>' + messages[-1].content + '<|end|>' }}"
                             "{% endif %}"), (None, None), {}),
        "earlier answers are repeated in the next question": (
            chat(_PLAIN, others=_OTHERS.replace("+ m.content +", "+ (messages[loop.index0 - 1].content if loop.index0 "
                                                "and m.role == 'user' else '') + m.content +")),
            ("<|end|>",) * 2, {}),
        "the system turn moves to the last question": (
            chat(_PLAIN, others="{% if m.role in ('user', 'tool') %}{{ '<|' + m.role + '|>' + (messages[0].content + "
                                "'. ' if messages[0].role == 'system' and m == (messages | selectattr('role', "
                                "'equalto', 'user') | list)[-1] else '') + m.content + '<|end|>' }}{% endif %}"),
            ("<|end|>",) * 2, {}),
        "arguments are joined by +": (
            chat(_PLAIN.replace("c.function.arguments | tojson", "c.function.arguments")), ("<|end|>",) * 2,
            {"text_arguments": True}),
        "arguments are joined by ~": (
            chat(_PLAIN.replace("+ '<|args|>' + c.function.arguments | tojson + '<|/call|>'",
                                "~ '<|args|>' ~ c.function.arguments ~ '<|/call|>'")), ("<|end|>",) * 2,
            {"text_arguments": True}),
        "arguments are read as text or object": (
            chat(_PLAIN.replace("c.function.arguments | tojson", "(c.function.arguments if c.function.arguments is "
                                "string else c.function.arguments | tojson)")), ("<|end|>",) * 2, {}),
        "arguments as text beside no content": (
            chat("{% if m.content is not defined or m.content is none %}{{ '<|bot|>' }}"
                 + _CALLS.replace("c.function.arguments | tojson", "c.function.arguments")
                 + "{{ '<|end|>' }}{% else %}" + _PLAIN.replace(_CALLS, "") + "{% endif %}"), ("<|end|>",) * 2,
            {"text_arguments": True, "null_content": True}),
        "contents are lists of parts": (
            chat(_PLAIN.replace("m.content", "m.content[0].text"),
                 others=_OTHERS.replace("m.content", "m.content[0].text"))
            .replace("m.content[0].text }}" + _CALLS, "(m.content or [{'text': ''}])[0].text }}" + _CALLS),
            ("<|end|>",) * 2, {"parts": True}),
        "contents are JSON": (
            chat(_PLAIN.replace("{{ m.content }}", "{{ m.content | tojson }}")), ("<|end|>",) * 2, {}),
        "one call of a turn is written": (
            chat(_PLAIN.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")), ("<|end|>",) * 2,
            {"one_call": True}),
    }.items()
}  # fmt: skip
NONE_RIGHT = {name for name, family in TEMPLATES.items() if family.stops[0] is None}


@pytest.mark.sample(5, thorough=14)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_sample_of_rows_is_right_or_refused(name: str) -> None:
    counts = table(name, TEMPLATES[name], sample_of_rows(name))
    assert bool(counts["right"]) == (name not in NONE_RIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_row_is_right_or_refused(name: str) -> None:
    counts = table(name, TEMPLATES[name], list(ROWS))
    assert bool(counts["right"]) == (name not in NONE_RIGHT)
    assert counts["right"] >= 24 or name in NONE_RIGHT


@pytest.mark.sample(4, thorough=12)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name",
    [
        "the tail depends on the answer before",
        "history has no thoughts",
        "turns with calls end in another way",
        "the last answer ends in another way",
    ],
)
def test_a_row_does_not_depend_on_the_rows_before_it(name: str, mode: str) -> None:
    assert_rows_are_independent(TEMPLATES[name], mode, sample_of_rows(name))


def test_there_are_templates_for_each_rule() -> None:
    assert len(TEMPLATES) >= 35
    assert len({family.template for family in TEMPLATES.values()}) == len(TEMPLATES)


def supervised(name: str, messages: list[dict[str, object]], train_on: str = "each_turn") -> list[str]:
    encoder = Encoder(TEMPLATES[name].tokenizer(), data_section(train_on=train_on))
    read = read_row({"messages": messages}, RowLayout("messages"))
    return [shown(encoder.document(each), TEMPLATES[name].tokenizer()) for each in encoder.examples(read)]  # type: ignore[arg-type]


HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("the prompt ends with an empty thought", "<|bot|><|think|><|/think|>⟦Hi<|end|>⟧"),
        ("the prompt ends with words", "<|bot|>[fast] ⟦Hi<|end|>⟧"),
        ("the prompt ends with a line break", "<|bot|>\n⟦Hi<|end|>⟧"),
        ("no generation prompt", "⟦<|bot|>Hi<|end|>⟧"),
        ("every document ends with another token", "<|bot|>⟦Hi<|end|>⟧\n<|eos|>"),
        ("the last answer ends in another way", "<|bot|>⟦Hi<|stop|>⟧"),
    ],
)
def test_an_answer_follows_the_very_prompt(name: str, ending: str) -> None:
    """Written out by hand, for an answer alone and for the last of a dialogue."""
    (alone,) = supervised(name, HELLO)
    assert alone == f"<|user|>Hello<|end|>{ending}"
    assert supervised(name, [*HELLO, *HELLO])[1].endswith(f"<|user|>Hello<|end|>{ending}")
    (last,) = supervised(name, [*HELLO, *HELLO], "completion")
    assert last.count("⟦") == 1
    assert last.endswith(f"<|user|>Hello<|end|>{ending}")
