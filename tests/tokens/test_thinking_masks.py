"""Golden masks of templates for reasoning: what the model writes after its prompt is learned, and nothing else.

Each expected text is written out by hand; what is learned stands in ⟦ ⟧. The second part asks the library for the same
prompts.
"""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data.chat import Chat, read_row
from finetune.data.layout import RowLayout
from finetune.tokens.encoder import IGNORE, Encoder, RowError
from tests.support.models.chat_families import tokenizer_of
from tests.support.models.thinking_families import THINKING, thinking_tokenizer
from tests.support.rows.masks import data_section, shown

TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}]
CALL = [{"type": "function", "function": {"name": "get", "arguments": {"city": "Paris"}}}]
WRITTEN_CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Paris"}}\n</tool_call>'
OFF = {"enable_thinking": False}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, thought: str | None = None, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "reasoning_content": thought, **others}


ROWS: dict[str, dict[str, Any]] = {
    "single": {"messages": [user("Hello"), answer("Hi")]},
    "multi": {"messages": [user("Hello"), answer("Hi"), user("And?"), answer("So.")]},
    "single, thought": {"messages": [user("Hello"), answer("Hi", "Hm")]},
    "single, thought inside": {"messages": [user("Hello"), answer("<think>\nHm\n</think>\n\nHi")]},
    "multi, thoughts": {"messages": [user("Hello"), answer("Hi", "Hm"), user("And?"), answer("So.", "Well")]},
    "multi, thoughts inside": {
        "messages": [
            user("Hello"), answer("<think>\nHm\n</think>\nHi"), user("And?"), answer("<think>\nWell\n</think>\nSo.")
        ]
    },
    "tools": {
        "messages": [user("W?"), answer("", tool_calls=CALL), {"role": "tool", "content": "sun"}, answer("Sunny.")],
        "tools": TOOLS,
    },
    "tools, thoughts": {
        "messages": [
            user("W?"), answer("", "Ask", tool_calls=CALL), {"role": "tool", "content": "sun"}, answer("Sunny.", "Good")
        ],
        "tools": TOOLS,
    },
}  # fmt: skip


def examples(family: str, row: str, train_on: str, variables: dict[str, Any] | None = None) -> list[Chat]:
    read = read_row({**ROWS[row], "chat_template_kwargs": variables}, RowLayout("messages"))
    return Encoder(thinking_tokenizer(family), data_section(train_on=train_on)).examples(read)  # type: ignore[return-value]


def masks(family: str, row: str, train_on: str, variables: dict[str, Any] | None = None) -> list[str]:
    """The texts of a row's examples."""
    encoder = Encoder(thinking_tokenizer(family), data_section(train_on=train_on))
    read = examples(family, row, train_on, variables)
    return [shown(encoder.document(each), thinking_tokenizer(family)) for each in read]


def asked(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def harmony(text: str) -> str:
    return f"<|start|>user<|message|>{text}<|end|><|start|>assistant"


TOOL_TURN = "\n<|im_start|>user\n<tool_response>\nsun\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
HARMONY_CALL = ' to=functions.get<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
HARMONY_TOOL = '<|start|>functions.get to=assistant<|channel|>commentary<|message|>"sun"<|end|><|start|>assistant'
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"

GOLDEN: list[tuple[str, str, str, dict[str, Any] | None, list[str]]] = [
    # -- Qwen 3 ------------------------------------------------------------------------------------------------------
    ("qwen3", "single", "assistant", None, [asked("Hello") + "⟦<think>\n\n</think>\n\nHi<|im_end|>⟧\n"]),
    ("qwen3", "single", "assistant", OFF, [asked("Hello") + "<think>\n\n</think>\n\n⟦Hi<|im_end|>⟧\n"]),
    ("qwen3", "single, thought", "assistant", None, [asked("Hello") + "⟦<think>\nHm\n</think>\n\nHi<|im_end|>⟧\n"]),
    ("qwen3", "single, thought inside", "assistant", None,
     [asked("Hello") + "⟦<think>\nHm\n</think>\n\nHi<|im_end|>⟧\n"]),
    ("qwen3", "multi", "assistant", OFF,
     [asked("Hello") + "⟦Hi<|im_end|>⟧\n" + asked("And?") + "<think>\n\n</think>\n\n⟦So.<|im_end|>⟧\n"]),
    ("qwen3", "multi", "each_turn", OFF, [
        asked("Hello") + "<think>\n\n</think>\n\n⟦Hi<|im_end|>⟧\n",
        asked("Hello") + "Hi<|im_end|>\n" + asked("And?") + "<think>\n\n</think>\n\n⟦So.<|im_end|>⟧\n",
    ]),
    ("qwen3", "multi, thoughts", "each_turn", None, [
        asked("Hello") + "⟦<think>\nHm\n</think>\n\nHi<|im_end|>⟧\n",
        asked("Hello") + "Hi<|im_end|>\n" + asked("And?") + "⟦<think>\nWell\n</think>\n\nSo.<|im_end|>⟧\n",
    ]),
    ("qwen3", "multi, thoughts", "completion", None,
     [asked("Hello") + "Hi<|im_end|>\n" + asked("And?") + "⟦<think>\nWell\n</think>\n\nSo.<|im_end|>⟧\n"]),
    ("qwen3", "tools, thoughts", "assistant", None, [
        asked("W?") + f"⟦<think>\nAsk\n</think>\n\n{WRITTEN_CALL}<|im_end|>⟧"
        + TOOL_TURN + "⟦<think>\nGood\n</think>\n\nSunny.<|im_end|>⟧\n",
    ]),
    ("qwen3", "tools", "assistant", OFF,
     [asked("W?") + f"⟦{WRITTEN_CALL}<|im_end|>⟧" + TOOL_TURN + "<think>\n\n</think>\n\n⟦Sunny.<|im_end|>⟧\n"]),
    ("qwen3", "tools", "each_turn", OFF, [
        asked("W?") + f"<think>\n\n</think>\n\n⟦{WRITTEN_CALL}<|im_end|>⟧\n",
        asked("W?") + f"{WRITTEN_CALL}<|im_end|>" + TOOL_TURN + "<think>\n\n</think>\n\n⟦Sunny.<|im_end|>⟧\n",
    ]),
    # -- Qwen 3.5: the prompt opens the block, and the model closes it -----------------------------------------------
    ("qwen35", "single", "assistant", None, [asked("Hello") + "<think>\n⟦\n</think>\n\nHi<|im_end|>⟧\n"]),
    ("qwen35", "single", "assistant", OFF, [asked("Hello") + "<think>\n\n</think>\n\n⟦Hi<|im_end|>⟧\n"]),
    ("qwen35", "single, thought inside", "assistant", None,
     [asked("Hello") + "<think>\n⟦Hm\n</think>\n\nHi<|im_end|>⟧\n"]),
    ("qwen35", "multi", "assistant", None, [
        asked("Hello") + "⟦Hi<|im_end|>⟧\n" + asked("And?") + "<think>\n⟦\n</think>\n\nSo.<|im_end|>⟧\n",
    ]),
    ("qwen35", "multi, thoughts", "each_turn", None, [
        asked("Hello") + "<think>\n⟦Hm\n</think>\n\nHi<|im_end|>⟧\n",
        asked("Hello") + "Hi<|im_end|>\n" + asked("And?") + "<think>\n⟦Well\n</think>\n\nSo.<|im_end|>⟧\n",
    ]),
    ("qwen35", "tools, thoughts", "assistant", None, [
        asked("W?") + f"<think>\n⟦Ask\n</think>\n\n{WRITTEN_CALL}<|im_end|>⟧"
        + TOOL_TURN + "<think>\n⟦Good\n</think>\n\nSunny.<|im_end|>⟧\n",
    ]),
    # -- SmolLM3: reasoning is content, and stays --------------------------------------------------------------------
    ("smollm3", "single", "assistant", None, [asked("Hello") + "⟦Hi<|im_end|>⟧\n"]),
    ("smollm3", "single, thought inside", "assistant", None,
     [asked("Hello") + "⟦<think>\nHm\n</think>\n\nHi<|im_end|>⟧\n"]),
    ("smollm3", "multi, thoughts inside", "assistant", None, [
        asked("Hello") + "⟦<think>\nHm\n</think>\nHi<|im_end|>⟧\n"
        + asked("And?") + "⟦<think>\nWell\n</think>\nSo.<|im_end|>⟧\n",
    ]),
    ("smollm3", "multi", "assistant", None,
     [asked("Hello") + "⟦Hi<|im_end|>⟧\n" + asked("And?") + "⟦So.<|im_end|>⟧\n"]),
    ("smollm3", "multi", "assistant", OFF, [
        asked("Hello") + "<think>\n\n</think>\n⟦Hi<|im_end|>⟧\n"
        + asked("And?") + "<think>\n\n</think>\n⟦So.<|im_end|>⟧\n",
    ]),
    # -- DeepSeek-R1's distillates: the block that the prompt opens is closed, with and without reasoning ------------
    ("r1", "single", "assistant", None,
     ["<｜User｜>Hello<｜Assistant｜><think>\n⟦\n</think>\n\nHi<｜end▁of▁sentence｜>⟧"]),
    ("r1", "single, thought", "assistant", None,
     ["<｜User｜>Hello<｜Assistant｜><think>\n⟦Hm\n</think>\n\nHi<｜end▁of▁sentence｜>⟧"]),
    ("r1", "single, thought inside", "assistant", None,
     ["<｜User｜>Hello<｜Assistant｜><think>\n⟦Hm\n</think>\n\nHi<｜end▁of▁sentence｜>⟧"]),
    ("r1", "multi, thoughts inside", "each_turn", None, [
        "<｜User｜>Hello<｜Assistant｜><think>\n⟦Hm\n</think>\n\nHi<｜end▁of▁sentence｜>⟧",
        "<｜User｜>Hello<｜Assistant｜>\nHi<｜end▁of▁sentence｜><｜User｜>And?<｜Assistant｜><think>\n"
        "⟦Well\n</think>\n\nSo.<｜end▁of▁sentence｜>⟧",
    ]),
    ("r1", "multi", "assistant", None, [
        "<｜User｜>Hello<｜Assistant｜>⟦Hi<｜end▁of▁sentence｜>⟧<｜User｜>And?<｜Assistant｜><think>\n"
        "⟦\n</think>\n\nSo.<｜end▁of▁sentence｜>⟧",
    ]),
    # -- gpt-oss: channels -------------------------------------------------------------------------------------------
    ("gpt_oss", "single", "assistant", None, [harmony("Hello") + f"⟦{FINAL}Hi<|return|>⟧"]),
    ("gpt_oss", "single, thought", "assistant", None,
     [harmony("Hello") + f"⟦{ANALYSIS}Hm<|end|><|start|>assistant{FINAL}Hi<|return|>⟧"]),
    ("gpt_oss", "single, thought inside", "assistant", None,  # a foreign block is the analysis here
     [harmony("Hello") + f"⟦{ANALYSIS}Hm<|end|><|start|>assistant{FINAL}Hi<|return|>⟧"]),
    ("gpt_oss", "multi", "assistant", None,  # the model ends no turn with <|end|>
     [harmony("Hello") + f"⟦{FINAL}Hi⟧<|end|>" + harmony("And?") + f"⟦{FINAL}So.<|return|>⟧"]),
    ("gpt_oss", "multi, thoughts", "each_turn", None, [
        harmony("Hello") + f"⟦{ANALYSIS}Hm<|end|><|start|>assistant{FINAL}Hi<|return|>⟧",
        harmony("Hello") + f"{FINAL}Hi<|end|>"
        + harmony("And?") + f"⟦{ANALYSIS}Well<|end|><|start|>assistant{FINAL}So.<|return|>⟧",
    ]),
    ("gpt_oss", "tools", "assistant", None,
     [harmony("W?") + f"⟦{HARMONY_CALL}⟧" + HARMONY_TOOL + f"⟦{FINAL}Sunny.<|return|>⟧"]),
    ("gpt_oss", "tools, thoughts", "each_turn", None, [
        harmony("W?") + f"⟦{ANALYSIS}Ask<|end|><|start|>assistant{HARMONY_CALL}⟧",
        # The analysis before the call is in the prompt for the answer, though not in the finished chat.
        harmony("W?") + f"{ANALYSIS}Ask<|end|><|start|>assistant{HARMONY_CALL}"
        + HARMONY_TOOL + f"⟦{ANALYSIS}Good<|end|><|start|>assistant{FINAL}Sunny.<|return|>⟧",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "row", "train_on", "variables", "expected"),
    GOLDEN,
    ids=lambda value: None if isinstance(value, list) else str(value),
)
def test_golden_mask(
    family: str, row: str, train_on: str, variables: dict[str, Any] | None, expected: list[str]
) -> None:
    texts = masks(family, row, train_on, variables)
    assert len(texts) == len(expected)
    for text, wanted in zip(texts, expected, strict=True):
        assert text.endswith(wanted)
        assert "⟦" not in text.removesuffix(wanted)


def test_every_family_has_both_kinds() -> None:
    assert len(GOLDEN) >= 30
    for family in THINKING:
        rows = {(row.partition(",")[0], "thought" in row) for name, row, *_ in GOLDEN if name == family}
        assert rows >= {("single", False), ("single", True), ("multi", True), ("multi", False)}, family


# -- the library's own prompt ----------------------------------------------------------------------------------------


def as_given_to(family: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as somebody who knows the family gives them to the library."""
    given = []
    for message in messages:
        message = {key: value for key, value in message.items() if value is not None}
        if family == "gpt_oss" and "</think>" in message["content"]:
            thought, _, said = message["content"].removeprefix("<think>").partition("</think>")
            message |= {"content": said.strip(), "thinking": thought.strip()}
        if family == "gpt_oss" and "reasoning_content" in message:
            message["thinking"] = message.pop("reasoning_content")
        given.append(message)
    return given


CASES = [
    (family, row, variables)
    for family in THINKING
    for row in ROWS
    for variables in (None, OFF)
    if not (family in ("r1", "gpt_oss") and variables)  # which have no such variable
    and not (family in ("r1", "smollm3") and "tools" in ROWS[row])
    and not (family == "smollm3" and "thought" in row and "inside" not in row)
    and not (variables and "thought" in row)
]


def test_all_cases_are_there() -> None:
    assert len(CASES) == 42


@pytest.mark.parametrize(("family", "row", "variables"), CASES)
def test_each_answer_follows_the_librarys_own_prompt(family: str, row: str, variables: dict[str, Any] | None) -> None:
    tokenizer = thinking_tokenizer(family)
    encoder = Encoder(tokenizer, data_section(train_on="each_turn"))
    messages, tools = ROWS[row]["messages"], ROWS[row].get("tools")
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    read = examples(family, row, "each_turn", variables)
    assert len(read) == len(answers)
    for example, index in zip(read, answers, strict=True):
        document = encoder.document(example)
        prompt = tokenizer.apply_chat_template(
            as_given_to(family, messages[:index]), tools=tools, add_generation_prompt=True, **(variables or {}),
            chat_template=encoder.template.source(tools=bool(tools)), date_string="26 Jul 2024",
        )["input_ids"]  # fmt: skip
        learned = [label != IGNORE for label in document.labels]
        assert document.input_ids[: len(prompt)] == prompt
        assert learned.index(True) == len(prompt)
        last = len(learned) - 1 - learned[::-1].index(True)
        assert all(learned[len(prompt) : last + 1])
        ends = {"gpt_oss": ("<|return|>", "<|call|>")}.get(family, (THINKING[family][3],))
        assert tokenizer.convert_ids_to_tokens(document.input_ids[last]) in ends
        said = tokenizer.decode(document.input_ids[len(prompt) :])
        thought = messages[index]["reasoning_content"] or messages[index]["content"].partition("</think>")[0][8:]
        assert thought.strip() in said
        assert messages[index]["content"].rpartition("</think>")[2].strip() in said


# -- blocks where they do not belong ---------------------------------------------------------------------------------


def mask(family: str, messages: list[dict[str, Any]], *, variables: Any = None, **settings: Any) -> str:
    encoder = Encoder(thinking_tokenizer(family), data_section(**settings))
    read = read_row({"messages": messages, "chat_template_kwargs": variables}, RowLayout("messages"))
    return shown(encoder.document(read), thinking_tokenizer(family))


def test_an_empty_block_of_the_data_is_not_written_twice() -> None:
    row = [user("Hello"), answer("<think>\n\n</think>\n\nHi")]
    assert mask("smollm3", row, variables=OFF).endswith(asked("Hello") + "<think>\n\n</think>\n⟦Hi<|im_end|>⟧\n")
    assert mask("qwen3", row, variables=OFF).endswith(asked("Hello") + "<think>\n\n</think>\n\n⟦Hi<|im_end|>⟧\n")
    assert mask("gpt_oss", row).endswith(harmony("Hello") + f"⟦{FINAL}Hi<|return|>⟧")
    assert mask("gpt_oss", [user("Hello"), answer("Hi", "")]).endswith(harmony("Hello") + f"⟦{FINAL}Hi<|return|>⟧")


@pytest.mark.parametrize("family", ["qwen3", "qwen35", "smollm3"])
def test_reasoning_after_a_prompt_that_closes_its_block_is_refused(family: str) -> None:
    row = [user("Hello"), answer("<think>\nHm\n</think>\n\nHi")]
    with pytest.raises(RowError) as raised:
        mask(family, row, variables=OFF)
    assert str(raised.value) == (
        "turn 2 has reasoning, and the chat template's prompt for it holds a closed thinking block; set "
        "chat_template_kwargs: {enable_thinking: true}, or remove the reasoning"
    )
    assert "⟦Hi" in mask(family, [user("Hello"), answer("Hi")], variables=OFF)
    assert "⟦" in mask(family, row, variables={"enable_thinking": True})


def test_a_block_in_the_content_that_the_prompt_opens_is_not_learned_again() -> None:
    """A template for R1 that keeps reasoning in the content, as some give for training."""
    keeps = THINKING["r1"][0].replace(".split('</think>')[-1]", "")
    text = mask("r1", [user("Hello"), answer("<think>\nHm\n</think>\n\nHi")], chat_template=keeps)
    assert text.endswith("<｜Assistant｜><think>\n⟦Hm\n</think>\n\nHi<｜end▁of▁sentence｜>⟧")


@pytest.mark.parametrize("space", ["", "\n"])
def test_an_answer_that_closes_the_prompts_block_itself_is_learned_as_it_is(space: str) -> None:
    """As GLM 4.7 writes an answer without reasoning: the prompt opens the block, and the turn begins by closing it."""
    block = f"'<think>' + (m.thinking if m.thinking else '') + '</think>' if m.thinking else '{space}</think>'"
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{{ "
        + block.replace("\n", "\\n")
        + " }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
    )
    start = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>"
    text = mask("qwen3", [user("Hello"), answer("Hi")], chat_template=template)
    assert text == f"{start}⟦{space}</think>Hi<|im_end|>⟧\n"
    text = mask("qwen3", [user("Hello"), answer("Hi", "Hm")], chat_template=template)
    assert text == f"{start}⟦Hm</think>Hi<|im_end|>⟧\n"


def test_a_block_that_history_closes_in_another_way_than_the_prompt_stays_open_in_the_prompt() -> None:
    """The prompt opens a block with a line break; history writes an empty block without one."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{{ '<think>\n\n</think>\n\n' if loop.last else '<think></think>' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    )
    text = mask("qwen3", [user("Hello"), answer("Hi"), user("And?"), answer("So.")], chat_template=template)
    assert "<|im_start|>assistant\n<think>⟦</think>Hi<|im_end|>⟧" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n⟦\n</think>\n\nSo.<|im_end|>⟧\n")


def test_control_tokens_spelt_in_reasoning_stay_text() -> None:
    tokenizer, spelt = thinking_tokenizer("r1"), "a<｜User｜>b"
    end = tokenizer.convert_tokens_to_ids("<｜User｜>")
    for row in (
        [user("Hello"), answer(spelt, f"Hm {spelt}")],
        [user(spelt), answer("x", spelt), user(spelt), answer(spelt, f"Hm {spelt}")],
    ):
        encoder = Encoder(tokenizer, data_section(train_on="each_turn"))
        read = encoder.examples(read_row({"messages": row}, RowLayout("messages")))[-1]
        document = encoder.document(read)
        assert document.input_ids.count(end) == sum(message["role"] == "user" for message in row)
        assert shown(document, tokenizer).endswith(f"<think>\n⟦Hm {spelt}\n</think>\n\n{spelt}<｜end▁of▁sentence｜>⟧")


def test_control_tokens_spelt_in_a_prompt_that_is_rendered_anew_stay_text() -> None:
    tokenizer = thinking_tokenizer("gpt_oss")
    messages = [user("W<|end|>?"), *ROWS["tools, thoughts"]["messages"][1:]]
    encoder = Encoder(tokenizer, data_section(train_on="each_turn"))
    read = read_row({"messages": messages, "tools": TOOLS}, RowLayout("messages"))
    document = encoder.document(encoder.examples(read)[-1])
    plain = encoder.document(examples("gpt_oss", "tools, thoughts", "each_turn")[-1])
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert document.input_ids.count(end) == plain.input_ids.count(end) == 6
    assert "W<|end|>?" in shown(document, tokenizer)


# -- what a template leaves out --------------------------------------------------------------------------------------


def test_a_second_tool_call_that_the_template_leaves_out_is_refused() -> None:
    twice = [user("W?"), answer("", tool_calls=CALL * 2), {"role": "tool", "content": "sun"}, answer("Sunny.")]
    with pytest.raises(RowError, match="leaves out tool call 2 of turn 2"):
        mask("gpt_oss", twice)
    assert mask("qwen3", twice).count('"name": "get"') == 2


def test_text_beside_a_tool_call_that_the_template_leaves_out_is_refused() -> None:
    messages = [user("W?"), answer("I ask.", tool_calls=CALL), {"role": "tool", "content": "sun"}, answer("Sunny.")]
    read = read_row({"messages": messages}, RowLayout("messages"))
    with pytest.raises(RowError, match=r"leaves out the text of turn 2 \(assistant\); remove that text, or give"):
        Encoder(tokenizer_of("llama31"), data_section()).document(read)
    assert "⟦I ask.\n<tool_call>" in mask("qwen3", messages, variables=OFF)
    # gpt-oss has it as the analysis before the call, until a final answer follows.
    with pytest.raises(
        RowError, match=r"leaves out the text of turn 2, which is supervised; set data\.train_on: each_turn"
    ):
        mask("gpt_oss", messages)
    assert f"⟦{ANALYSIS}I ask.<|end|>" in mask("gpt_oss", messages[:3])
