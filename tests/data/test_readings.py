"""The columns of other people's tables: found by content, in any language, or one clear question."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune.data.readings import label_of, looks_like_data, readings


def rows(count: int = 40, **columns: Any) -> list[dict[str, Any]]:
    """Rows from one function of the row's number for each column."""
    return [{name: make(number) for name, make in columns.items()} for number in range(count)]


def question(number: int) -> str:
    return f"Wie viel kostet Gerät {number} am Tag?"


def answer(number: int) -> str:
    return f"Gerät {number} kostet {number + 5} Euro am Tag, und das Pfand beträgt {number * 10} Euro."


def statement(number: int) -> str:
    return f"Describe the machine called M{number} in a sentence or two, please"


def day(number: int) -> str:
    return f"{1 + number % 28:02}.11.2026"


CLEAR = {
    "answer first": (rows(antwort=answer, frage=question), {"instruction": "frage", "output": "antwort"}),
    "Korean": (
        rows(번호=str, 질문=lambda n: f"{n}번 장비는 얼마입니까?", 답변=lambda n: f"하루에 {n}유로입니다."),
        {"instruction": "질문", "output": "답변"},
    ),
    "Japanese without spaces": (
        rows(質問=lambda n: f"機械{n}はいくらですか？", 回答=lambda n: f"一日{n}ユーロです。"),
        {"instruction": "質問", "output": "回答"},
    ),
    "Russian": (
        rows(Вопрос=lambda n: f"Сколько стоит {n}?", Ответ=lambda n: f"{n} евро в день."),
        {"instruction": "Вопрос", "output": "Ответ"},
    ),
    "names say nothing, question marks do": (rows(a=question, b=answer), {"instruction": "a", "output": "b"}),
    "a table with numbers, dates and authors": (
        rows(id=str, datum=day, thema=lambda n: ["Preise", "Technik"][n % 2], frage=question, antwort=answer,
             autor=lambda n: "Meier"),
        {"instruction": "frage", "output": "antwort"},
    ),
    "prompt and completion, for a chat model": (
        rows(prompt=statement, completion=answer), {"instruction": "prompt", "output": "completion"}
    ),
    "text and label": (
        rows(text=statement, label=lambda n: ["good", "bad"][n % 2]), {"instruction": "text", "output": "label"}
    ),
    "a passage to read": (
        rows(context=lambda n: statement(n) * 9, question=question, answer=answer),
        {"instruction": "question", "input": "context", "output": "answer"},
    ),
    "text to SQL": (
        rows(query=lambda n: f"all orders of customer number {n}", sql=lambda n: f"SELECT * FROM o WHERE c = {n}"),
        {"instruction": "query", "output": "sql"},
    ),
    "cells are empty": (
        [*rows(frage=question, antwort=answer), {"frage": "", "antwort": ""}],
        {"instruction": "frage", "output": "antwort"},
    ),
    "OpenAI's under another name": (
        rows(dialog=lambda n: [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]),
        {"messages": "dialog"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAR)
def test_clear_columns_have_one_reading(name: str) -> None:
    table, columns = CLEAR[name]
    found = readings("auto", table).plausible
    assert [dict(reading.columns) for reading in found] == [columns]


@pytest.mark.parametrize(
    ("table", "first"),
    [
        (rows(en=lambda n: f"The machine number {n} is new.", de=lambda n: f"Die Maschine Nummer {n} ist neu."), "en"),
        (rows(title=lambda n: f"Machine {n} in use", body=answer), "title"),
        (rows(a=question, b=answer, c=lambda n: answer(n + 50)), "a"),
    ],
    ids=["two languages", "two texts", "two possible answers"],
)
def test_where_two_readings_are_plausible_all_are_offered(table: list[dict[str, Any]], first: str) -> None:
    found = readings("auto", table).plausible
    assert len(found) > 1
    assert found[0].columns["instruction"] == first


ASKED = [{"role": "user", "content": "Why?"}]
SAID = [{"role": "assistant", "content": "So."}]


@pytest.mark.parametrize(
    ("table", "format", "columns"),
    [
        (rows(prompt=question, chosen=answer, rejected=statement), "preference", {"instruction": "prompt"}),
        (rows(instruction=question, chosen=answer, rejected=statement), "preference", {}),
        (
            rows(frage=question, thema=lambda n: "Technik", antwort_win=answer, antwort_lose=statement),
            "preference", {"instruction": "frage", "chosen": "antwort_win", "rejected": "antwort_lose"},
        ),
        (
            rows(system=lambda n: "Be brief.", question=question, accepted=answer, rejected=statement, score=str),
            "preference", {"instruction": "question", "chosen": "accepted"},
        ),
        (
            rows(prompt=question, chosen=lambda n: ASKED + SAID, rejected=lambda n: ASKED + SAID, score_chosen=int),
            "preference", {},
        ),
        (
            rows(question=question, chosen=lambda n: SAID, rejected=lambda n: SAID),
            "preference", {"instruction": "question"},
        ),
        (rows(prompt=question, completion=answer, label=lambda n: n % 2 == 0), "kto", {"instruction": "prompt"}),
        (rows(prompt=lambda n: ASKED, completion=lambda n: SAID, label=lambda n: n % 2), "kto", {}),
        (rows(messages=lambda n: ASKED + SAID, kto_tag=lambda n: n < 5), "kto",
         {"completion": "messages", "label": "kto_tag"}),
        (rows(question=question, answer=answer, liked=lambda n: n < 5), "kto",
         {"instruction": "question", "completion": "answer", "label": "liked"}),
    ],
)  # fmt: skip
def test_pairs_and_judged_answers_are_found(table: list[dict[str, Any]], format: str, columns: dict[str, str]) -> None:
    (reading,) = readings("auto", table).plausible
    assert (reading.format, dict(reading.columns)) == (format, columns)
    assert reading.objective == {"preference": "dpo", "kto": "kto", "alpaca": "supervised"}[format]


def test_texts_inside_an_object_are_asked_about_beside_another_text() -> None:
    inside = {"question": question, "answer": answer}
    found = readings(
        "auto", rows(title="Machine {}".format, qa=lambda n: {name: make(n) for name, make in inside.items()})
    )
    assert [dict(reading.columns) for reading in found.plausible] == [
        {"instruction": "qa.question", "output": "qa.answer"},
        {"text": "title"},
    ]


def test_a_table_of_numbers_has_no_texts() -> None:
    assert "no column holds texts" in readings("auto", rows(a=str, b=lambda n: str(n * 2), c=day)).obstacle


@pytest.mark.parametrize(
    ("names", "is_data"),
    [
        (["frage", "antwort"], False),
        (["What is the question?", "The answer text"], False),
        (["Wie viel kostet Gerät 5 am Tag?", answer(5)], True),
        (["1", "2026-01-01", "Preise"], True),
    ],
)
def test_a_first_line_that_is_a_row_is_seen(names: list[str], is_data: bool) -> None:
    table = [dict(zip(names, [question(n), answer(n), "x"], strict=False)) for n in range(10)]
    assert looks_like_data(names, table) is is_data


# A column beside question and answer -> the labels that `init` asks about or proposes; None: not asked.
JUDGED: list[tuple[str, list[Any], dict[str, bool | None] | None]] = [
    ("result", ["pass", "fail"], {"pass": True, "fail": False}),
    ("status", ["ok", "nok"], {"ok": True, "nok": False}),
    ("check", ["✓", "✗"], {"✓": True, "✗": False}),
    ("rank", [1, 2], {"1": None, "2": None}),
    ("grade", ["A", "F"], {"a": None, "f": None}),
    ("state", ["open", "shut", "late"], {"open": None, "shut": None, "late": None}),
    ("is_error", [True, False], {"true": False, "false": True}),
    ("deleted", ["true", "false"], {"true": False, "false": True}),
    ("reportedByUser", [0, 1], {"0": True, "1": False}),
    ("edited", [True, False], {"true": None, "false": None}),
    ("langue", ["fr", "de"], None),
    ("Thema", ["Preise", "Technik"], None),
    ("num_turns", [1, 2, 3], None),
    ("nr", [*range(30)], None),
    ("seen", ["yes"], None),
]


@pytest.mark.parametrize(("name", "values", "says"), JUDGED)
def test_few_values_that_repeat_may_judge(name: str, values: list[Any], says: dict[str, bool | None] | None) -> None:
    found = readings(
        "auto", rows(question=question, answer=answer, **{name: lambda n: values[n % len(values)]})
    ).plausible
    if says is None:
        assert [reading.format for reading in found] == ["alpaca"]
        return
    supervised, judged = found
    assert (supervised.format, judged.format, judged.columns["label"]) == ("alpaca", "kto", name)
    told = {value: label_of(value, judged.labels) for value in says}
    assert told | dict.fromkeys(judged.unknown) == says


def test_a_transcript_in_one_text_is_refused_and_tools_are_no_answer() -> None:
    chat = "USER: Where is {0}?\n\n\nASSISTANT: It is in {0}. <|endoftext|>"
    found = readings("auto", rows(system=lambda n: "SYSTEM: Be kind.", chat=chat.format))
    assert "'chat' holds dialogues as one text" in found.obstacle
    tools = json.dumps([{"name": "look", "parameters": {}}])
    calls = rows(
        query=question, answers=lambda n: json.dumps([{"name": "look", "n": n}]), tools=lambda n: f"{tools} "[:-1]
    )
    assert [dict(reading.columns) for reading in readings("auto", calls).plausible] == [
        {"instruction": "query", "output": "answers"}
    ]
