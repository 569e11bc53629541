"""Metrics for answers that are JSON or call tools."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from finetune.scoring.texts import without_fence

MOST_NESTED = 50  # levels of lists and objects; a model may write ten thousand brackets
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)


def parsed_json(text: str) -> Any:
    """The one JSON value of an answer, which may be in a ``` block. Raises ValueError."""
    try:
        value = json.loads(without_fence(text))
        _leaves(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def json_valid(answer: str) -> float:
    try:
        parsed_json(answer)
    except ValueError:
        return 0.0
    return 1.0


def json_fields(answer: str, reference: str) -> float:
    """Equal fields, as a share of all fields that the reference or the answer has.

    {"a": 1, "b": [2, 3]} has the fields a, b[0] and b[1]. Against {"a": 1, "b": [2, 4]} the score is 2 of 3.
    """
    try:
        expected = _leaves(parsed_json(reference))
    except ValueError:
        raise ValueError(f"the reference {reference[:40]!r} is no JSON; take another metric") from None
    try:
        given = _leaves(parsed_json(answer))
    except ValueError:
        return 0.0
    paths = expected.keys() | given.keys()
    equal = sum(path in expected and path in given and same_value(given[path], expected[path]) for path in paths)
    return equal / len(paths)


def _leaves(value: Any, path: str = "", depth: int = 0) -> dict[str, Any]:
    """Path -> value. Empty objects and lists are values too, so every JSON value has a field."""
    if depth > MOST_NESTED:
        raise ValueError("nested too deeply")
    inner: Iterator[tuple[str, Any]] | None = None
    if isinstance(value, dict) and value:
        inner = ((f"{path}.{json.dumps(key)}", each) for key, each in value.items())
    elif isinstance(value, list) and value:
        inner = ((f"{path}[{index}]", each) for index, each in enumerate(value))
    if inner is None:
        return {path: value}
    leaves: dict[str, Any] = {}
    for each_path, each in inner:
        leaves |= _leaves(each, each_path, depth + 1)
    return leaves


def same_value(given: Any, expected: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are, true and 1 are not; texts without spaces around them."""
    if isinstance(given, str) and isinstance(expected, str):
        return given.strip() == expected.strip()
    if isinstance(given, bool) is not isinstance(expected, bool):
        return False
    return bool(given == expected)


def tool_calls(text: str) -> list[tuple[str, Any]]:
    """(name, arguments) of each call that an answer writes, in order.

    It reads JSON objects with a name and arguments (or parameters) wherever they stand, as most templates write them;
    <function=NAME><parameter=KEY>; and [name(key=value)], as Llama 3.2 and 4 do.
    """
    if found := _FUNCTION.findall(text):
        return [(name, {key: _plain(value) for key, value in _PARAMETER.findall(body)}) for name, body in found]
    calls = []
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            if call := _call_in(value):
                calls.append(call)
            else:  # an object around the call: {"type": "function", "function": {...}}
                end = at + 1
        at = text.find("{", end)
    return calls or _python_calls(text)


def _call_in(value: Any) -> tuple[str, Any] | None:
    arguments = next((value[key] for key in ("arguments", "parameters") if key in value), None)
    if not isinstance(value.get("name"), str) or arguments is None:
        return None
    if isinstance(arguments, str):  # OpenAI's form: JSON inside a text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return value["name"], arguments
    return value["name"], arguments


def _python_calls(text: str) -> list[tuple[str, Any]]:
    """Calls in the form [name(key=value), ...]."""
    start, end = text.find("["), text.rfind("]")
    if start < 0 or end < start:
        return []
    try:
        tree = ast.parse(text[start : end + 1], mode="eval").body
        elements = tree.elts if isinstance(tree, ast.List) else []
        return [
            (ast.unparse(call.func), {word.arg: ast.literal_eval(word.value) for word in call.keywords})
            for call in elements
            if isinstance(call, ast.Call)
        ]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _plain(text: str) -> Any:
    """A parameter's value: JSON where it is some, else text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.strip()


def tool_name(answer: str, reference: str) -> float:
    """1 if the answer calls the same tools in the same order."""
    given, expected = tool_calls(answer), _expected_calls(reference)
    return float([name for name, _ in given] == [name for name, _ in expected])


def tool_call(answer: str, reference: str) -> float:
    """1 if names and all arguments are equal, call by call."""
    given, expected = tool_calls(answer), _expected_calls(reference)
    if len(given) != len(expected):
        return 0.0
    for (name, arguments), (expected_name, expected_arguments) in zip(given, expected, strict=True):
        try:
            ours, theirs = _leaves(arguments), _leaves(expected_arguments)
        except ValueError:
            return 0.0
        if name != expected_name or ours.keys() != theirs.keys():
            return 0.0
        if not all(same_value(ours[path], theirs[path]) for path in theirs):
            return 0.0
    return 1.0


def _expected_calls(reference: str) -> list[tuple[str, Any]]:
    calls = tool_calls(reference)
    if not calls:
        raise ValueError(f"the reference {reference[:40]!r} calls no tool; take another metric")
    return calls
