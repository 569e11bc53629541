"""Real tool calls and numbers: every form of a right answer is right, and a wrong one is wrong."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.real_rows import JSON_TYPES, as_json_schema, first_values, possible
from finetune.scoring.metrics import Metric, Scored, fitting_metrics, scores_of
from finetune.scoring.structured import tool_call, tool_name
from tests.support.rows.real_rows import NUMBERS, calls_of, real_rows, tool_rows

Calls = list[dict[str, Any]]


def as_json(calls: Calls) -> str:
    return "\n".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)


def as_python(calls: Calls) -> str:
    written = (
        f"{call['name']}({', '.join(f'{key}={value!r}' for key, value in call['arguments'].items())})" for call in calls
    )
    return f"[{', '.join(written)}]"


def as_tags(calls: Calls) -> str:
    """Llama 3.1's form."""
    return "\n".join(f"<function={call['name']}>{json.dumps(call['arguments'])}</function>" for call in calls)


FORMS: dict[str, Callable[[Calls], str]] = {"JSON": as_json, "Python": as_python, "tags": as_tags}


def test_the_rows_are_what_these_tests_need() -> None:
    rows = tool_rows()
    assert len(rows) == 41
    assert sum(len(calls_of(row)) > 1 for row in rows) == 21
    values = [value for row in rows for call in calls_of(row) for value in call["arguments"].values()]
    assert {type(value) for value in values} == {str, int, float, bool, list, dict}


@pytest.mark.parametrize("reference", FORMS)
@pytest.mark.parametrize("form", FORMS)
def test_a_call_in_any_form_and_order_is_right(form: str, reference: str) -> None:
    for row in tool_rows():
        calls = calls_of(row)
        expected = FORMS[reference](calls)
        for written in (calls, calls[::-1]):
            answer = FORMS[form](written)
            assert (tool_name(answer, expected), tool_call(answer, expected)) == (1.0, 1.0), answer


@pytest.mark.parametrize("form", FORMS)
def test_another_value_or_number_of_calls_is_wrong(form: str) -> None:
    changed = 0
    for row in tool_rows():
        calls = calls_of(row)
        assert not tool_call(FORMS[form](calls[1:]), as_json(calls))  # None where no call is left
        assert tool_call(FORMS[form]([*calls, calls[0]]), as_json(calls)) == 0.0
        for place, call in enumerate(calls):
            for key, value in call["arguments"].items():
                other = {**call["arguments"], key: f"{value} or more" if isinstance(value, str) else "another"}
                answer = FORMS[form]([*calls[:place], {"name": call["name"], "arguments": other}, *calls[place + 1 :]])
                assert tool_call(answer, as_json(calls)) == 0.0, answer
                changed += 1
    assert changed > 150


def test_every_possible_value_is_right_by_the_scorer_of_possible_values() -> None:
    seen, strict = 0, 0
    for row in tool_rows():
        calls = calls_of(row)
        assert possible(as_json(calls[::-1]), "", row)
        assert not possible(as_json(calls[1:]), "", row)
        wrong = {**calls[0], "arguments": {**calls[0]["arguments"], "no_such_argument": 1}}
        assert not possible(as_json([wrong, *calls[1:]]), "", row)
        for place, ((name, values),) in enumerate(call.items() for call in row["possible"]):
            for key, some in values.items():
                for value in some:
                    given = {
                        **calls[place]["arguments"],
                        key: first_values(value) if isinstance(value, dict) else value,
                    }
                    if value == "":
                        given.pop(key)
                    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
                        continue
                    answer = as_json([*calls[:place], {"name": name, "arguments": given}, *calls[place + 1 :]])
                    assert possible(answer, "", row), answer
                    seen += 1
                    strict += tool_call(answer, as_json(calls)) == 0.0
                if "" not in some:
                    given = {other: each for other, each in calls[place]["arguments"].items() if other != key}
                    answer = as_json([*calls[:place], {"name": name, "arguments": given}, *calls[place + 1 :]])
                    assert not possible(answer, "", row), answer
    assert seen > 200
    assert strict > 50  # right answers that differ from the row's own


def test_the_schemas_are_json_schema() -> None:
    kinds = set()

    def look(value: Any) -> None:
        if isinstance(value, dict):
            kinds.update([value["type"]] if isinstance(value.get("type"), str) else [])
            for each in value.values():
                look(each)
        elif isinstance(value, list):
            for each in value:
                look(each)

    for row in tool_rows():
        look(row["tools"])
    assert kinds == {"function", "object", "string", "integer", "number", "array", "boolean"}
    assert not kinds & {*JSON_TYPES}
    written = {"type": "dict", "properties": {"type": {"type": "float"}, "at": {"type": "any", "description": "dict"}}}
    found = {"type": "object", "properties": {"type": {"type": "number"}, "at": {"description": "dict"}}}
    assert as_json_schema(written) == found


def test_numbers_are_right_by_arithmetic() -> None:
    operators = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return int(operators[type(node.op)](value(node.left), value(node.right)))  # type: ignore[index]
        assert isinstance(node, ast.Constant)
        return int(node.value)  # type: ignore[arg-type]

    rows = [row for name in NUMBERS for row in real_rows(name)]
    assert len(rows) == 16
    items = [Scored(row["messages"][-1]["content"], str(index)) for index, row in enumerate(rows)]
    assert [metric.name for metric in fitting_metrics(items)] == ["number", "exact"]
    for row, item in zip(rows, items, strict=True):
        result = value(ast.parse(row["messages"][-2]["content"].removesuffix(" ="), mode="eval").body)
        assert item.reference == str(result)
        answers = [f"The answer is {result}.", f"The answer is {result + 1}."]
        assert scores_of(Metric("number"), answers, [item] * 2) == [1.0, 0.0]
