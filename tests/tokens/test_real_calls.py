"""Real tool calls in the templates that TRL ships: the answer that the library renders is supervised. JSON and Llama's
form read as the row's own calls, other forms are unread.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from finetune.scoring.structured import tool_call
from finetune.tokens.encoder import Encoder, RowError
from tests.support.rows.masks import data_section, encoded, shown
from tests.support.rows.real_rows import calls_of, tool_rows
from tests.support.rows.shipped_templates import shipped

if not shipped():
    pytest.skip("the installed TRL ships no chat templates", allow_module_level=True)

# Forms: JSON, Python's, tags, and each maker's own. Two write one call of a turn. The first two are read.
TEMPLATES = ("llama3_1", "qwen3", "qwen3_5_nothink", "gemma4_v5", "lfm2_v2", "gptoss", "muse_glimmer")


@pytest.mark.sample(3, thorough=7)
@pytest.mark.parametrize("name", TEMPLATES)
def test_supervised_text_is_the_rendered_answer_and_reads_as_the_calls(name: str) -> None:
    if name not in shipped():
        pytest.skip("the installed TRL does not ship it")
    family = shipped()[name]
    tokenizer = family.tokenizer()
    encoder = Encoder(tokenizer, data_section())
    outcomes: Counter[str] = Counter()
    for row in tool_rows():
        calls = calls_of(row)
        try:
            text = shown(encoded(encoder, {key: row[key] for key in ("messages", "tools")}), tokenizer)
        except RowError:
            outcomes["refused"] += 1
            continue
        as_texts = [
            {"type": "function", "function": call | {"arguments": json.dumps(call["arguments"])}} for call in calls
        ]
        wanted = family.as_wanted(
            [*row["messages"][:-1], row["messages"][-1] | {"content": "", "tool_calls": as_texts}]
        )
        prompt, whole = (
            tokenizer.apply_chat_template(
                messages, tools=row["tools"], add_generation_prompt=asked, tokenize=False, date_string="26 Jul 2024"
            )
            for messages, asked in ((wanted[:-1], True), (wanted, False))
        )
        before, supervised = text.removesuffix("⟧").split("⟦")
        supervised, after = supervised.split("⟧") if "⟧" in supervised else (supervised, "")
        assert before + supervised + after == whole
        assert before == prompt
        assert supervised.endswith(family.stops[1] or "")
        score = tool_call(supervised, "\n".join(map(json.dumps, calls)))
        assert score == (1.0 if name in TEMPLATES[:2] else None), supervised
        outcomes["right"] += 1
    print(name, dict(outcomes))
    assert len(tool_rows()) == 41
    one_call = sum(len(calls_of(row)) == 1 for row in tool_rows())
    assert outcomes == ({"right": one_call, "refused": 41 - one_call} if family.one_call else {"right": 41})
