"""Golden masks: for each template family and kind of chat, the rendered text with what is learned in ⟦ ⟧.

To add a case, add a row to golden_masks/rows.json; the file that is then missing is printed, to be looked at and kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.tokens.encoder import IGNORE, Encoder, RowError
from tests.support.models.chat_families import FAMILIES, tokenizer_of
from tests.support.rows.masks import data_section, encoded, shown

GOLDEN = Path(__file__).parent / "golden_masks"
ROWS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "rows.json").read_text("utf-8"))
CASES = [(family, case) for family in FAMILIES for case in ROWS]
# What a template cannot say is refused, in these words.
REFUSED = {
    "tools": "does not write the row's tools",
    "system": "System role not supported",
    "thinking": "leaves out the reasoning of turn 4",
}
WRITES_TOOLS = {"llama31", "qwen", "mistral"}


def as_templates_want(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row's messages for the tokenizer's own apply_chat_template."""
    messages = json.loads(json.dumps(row["messages"]))
    for message in messages:
        message.pop("weight", None)
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


def refused(family: str, case: str) -> bool:
    return (
        (case == "tools" and family not in WRITES_TOOLS)
        or (case == "system" and family == "gemma")
        or (case == "thinking" and family not in ("qwen3", "deepseek"))
    )


@pytest.mark.parametrize(("family", "case"), CASES)
def test_golden_mask(family: str, case: str) -> None:
    tokenizer, row = tokenizer_of(family), ROWS[case]
    encoder = Encoder(tokenizer, data_section())
    if refused(family, case):
        with pytest.raises(RowError, match=REFUSED[case]):
            encoded(encoder, row)
        return
    document = encoded(encoder, row)
    golden = GOLDEN / f"{family}.{case}.txt"
    actual = shown(document, tokenizer)
    assert golden.is_file(), f"{golden.name} is missing; look at this and keep it:\n{actual}"
    assert actual == golden.read_text("utf-8")
    if family == "deepseek":  # whose last answer follows the prompt, which the finished chat does not hold
        return
    # An ordinary row has the very tokens that the tokenizer makes of it.
    plain = tokenizer.apply_chat_template(as_templates_want(row), tools=row.get("tools"), date_string="26 Jul 2024")
    assert document.input_ids == plain["input_ids"]


def test_no_golden_file_is_left_over() -> None:
    expected = {f"{family}.{case}.txt" for family, case in CASES if not refused(family, case)}
    assert expected == {file.name for file in GOLDEN.glob("*.txt")}
    assert len(expected) >= 28


@pytest.mark.parametrize("family", FAMILIES)
def test_every_learned_run_ends_with_the_end_of_turn(family: str) -> None:
    tokenizer = tokenizer_of(family)
    document = encoded(Encoder(tokenizer, data_section()), ROWS["multi_turn"])
    ends = [
        document.input_ids[at]
        for at in range(len(document.labels))
        if document.labels[at] != IGNORE and (document.labels[at + 1 :] or [IGNORE])[0] == IGNORE
    ]
    closing = {"gemma": "<end_of_turn>"}.get(family, tokenizer.eos_token)
    assert ends == [tokenizer.convert_tokens_to_ids(closing)] * 2
