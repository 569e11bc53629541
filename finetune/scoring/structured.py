"""Metrics for answers that are JSON or call tools. A reference that cannot be read is refused, an answer is unread."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

MOST_NESTED = 50  # levels of lists and objects; a model may write ten thousand brackets
MOST_CALLS = 1000  # places where a call or a JSON value may begin; looking further would take seconds
_FENCE = re.compile(r"(```|~~~)[\w+-]*\s*")
_CALLED = re.compile(r"<function=([^>\s]+)>\s*$")  # Llama 3.1, before an object
_MARKS = re.compile(r"<\|python_tag\|>|<\|python_(?:start|end)\|>|<\|eom_id\|>|<\|eot(?:_id)?\|>")
# Other dialects, whose arguments may hold an object that looks like a call.
_OTHER = re.compile(r"<function=[^>\s]+>(?!\s*\{)|<(?:\w+:)?(?:parameter|invoke)\b|<arg_key>|\bcall:[\w.:-]+\{")
_OTHER_BEFORE = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")  # the first object
_NAMED = re.compile(r"(?<![`\w.-])[\w.-]+\s*$")  # directly before an object
ToolCall = tuple[str, Any]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = {unicodedata.normalize("NFC", key): value for key, value in pairs}
    if len(values) < len(pairs):
        raise ValueError("an object has a key twice")
    return values


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# As the reader of rows does, NaN, Infinity and doubled keys are refused. Decimal: 0.1 keeps all its digits.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=Decimal)
_FAILURES = (ValueError, RecursionError, ArithmeticError)


def _loads(text: str) -> Any:
    """Raises ValueError."""
    try:
        value = _DECODER.decode(text.strip().removeprefix("\ufeff"))
        _leaves(value)
    except (RecursionError, ArithmeticError):
        raise ValueError("nested too deeply, or a number too large") from None
    return value


def parsed_json(text: str) -> Any:
    """The one JSON value of an answer: the whole text, or the last ``` block with JSON. Raises ValueError."""
    try:
        return _loads(text)
    except ValueError:
        parsed = None
        for number, fence in enumerate(_FENCE.finditer(text)):
            if number == MOST_CALLS:
                break
            try:
                value, end = _DECODER.raw_decode(text, fence.end())
                _leaves(value)
            except _FAILURES:
                continue
            if not text[end:].strip() or text[end:].lstrip().startswith(fence[1]):
                parsed = (value,)
        if parsed is None:
            raise
        return parsed[0]


def is_object(text: str) -> bool:
    try:
        return isinstance(parsed_json(text), dict | list)
    except ValueError:
        return False


def json_valid(answer: str) -> float:
    try:
        parsed_json(answer)
    except ValueError:
        return 0.0
    return 1.0


def json_fields(answer: str, reference: str) -> float | None:
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
        return None
    paths = expected.keys() | given.keys()
    equal = sum(path in expected and path in given and same_value(given[path], expected[path]) for path in paths)
    return equal / len(paths)


def _leaves(value: Any, path: str = "", depth: int = 0) -> dict[str, Any]:
    """Path -> value. Empty objects and lists are values too, so every JSON value has a field."""
    if depth > MOST_NESTED:
        raise ValueError("nested too deeply")
    inner: Iterator[tuple[str, Any]] | None = None
    if isinstance(value, dict) and value:
        inner = ((f"{path}.{json.dumps(key)}", child) for key, child in value.items())
    elif isinstance(value, list) and value:
        inner = ((f"{path}[{index}]", child) for index, child in enumerate(value))
    if inner is None:
        return {path: value}
    leaves: dict[str, Any] = {}
    for child_path, child in inner:
        leaves |= _leaves(child, child_path, depth + 1)
    return leaves


def same_value(given: Any, expected: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are, true and 1 are not; texts in one Unicode form, without spaces around them."""
    if isinstance(given, str) and isinstance(expected, str):
        return unicodedata.normalize("NFC", given).strip() == unicodedata.normalize("NFC", expected).strip()
    if isinstance(given, bool) is not isinstance(expected, bool):
        return False
    return bool(given == expected)


def tool_calls(text: str) -> list[ToolCall]:
    """(name, arguments) of each call that an answer writes, in order; none if it is unread.

    {"name": "f", "arguments": {...}}     most models, with tags around it or without; also parameters, function,
                                          tool_calls and OpenAI's text of JSON
    <function=f>{...}</function>          Llama 3.1
    [f(key=value), g(key=1)]              Llama 3.2 and 4, if nothing else stands there
    """
    if calls := _python_calls(_MARKS.sub("", text).strip()):
        return calls
    if _OTHER.search(text) or _OTHER_BEFORE.search(text.partition("{")[0]):
        return []
    return _json_calls(text)


def is_tool_call(text: str) -> bool:
    """Whether a reference surely calls tools: {"name": "Ann"} may be data."""
    return bool(tool_calls(text)) and not re.fullmatch(r'\s*\{\s*"name"\s*:[^{}]*\}\s*', text)


def _json_calls(text: str) -> list[ToolCall]:
    """JSON objects that are calls, or objects after Llama's tag."""
    calls: list[ToolCall] = []
    at, starts = text.find("{"), 0
    while at >= 0 and starts < MOST_CALLS:
        starts += 1
        try:
            value, end = _DECODER.raw_decode(text, at)
        except _FAILURES:
            end = at + 1
        else:
            before = text[max(0, at - 200) : at]
            if called := _CALLED.search(before):
                calls.append((called[1], value))
            elif call := _call_in(value):
                calls.append(call)
            elif _NAMED.search(before):  # another dialect's call
                return []
            else:  # an object around the call: {"type": "function", "function": {...}}
                end = at + 1
        at = text.find("{", end)
    return calls


def _call_in(value: Any) -> ToolCall | None:
    names = [value[key] for key in ("name", "function", "tool_name", "tool") if isinstance(value.get(key), str)]
    given = [value[key] for key in ("arguments", "parameters", "args") if key in value]
    if len(names) != 1 or not names[0] or len(given) > 1:
        return None
    if not given:  # a tool without arguments
        return (names[0], {}) if value.keys() <= {"name", "function", "id", "type"} and "tool" not in value else None
    return names[0], _as_arguments(given[0]) if isinstance(given[0], str) else ({} if given[0] is None else given[0])


def _as_arguments(text: str) -> Any:
    """Arguments that are JSON inside a text, as OpenAI writes them; another text is compared as it is."""
    try:
        return _loads(text) if text.strip() else {}
    except ValueError:
        return text.strip()


def _python_calls(text: str) -> list[ToolCall]:
    """The calls of a text that is a list of calls in Python's syntax, with arguments by name."""
    if not text.startswith("["):
        return []
    calls = []
    try:
        for call in getattr(ast.parse(text, mode="eval").body, "elts", ()):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute) or call.args:
                return []
            calls.append((ast.unparse(call.func), _unique([(word.arg or "", _value(word)) for word in call.keywords])))
    except (SyntaxError, TypeError, *_FAILURES, MemoryError):
        return []
    return calls


def _value(word: ast.keyword) -> Any:
    """An argument as JSON has it. Raises ValueError or TypeError for **, and for what JSON has not."""
    for node in ast.walk(word):
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)] if isinstance(node, ast.Dict) else []
        if word.arg is None or (isinstance(node, ast.Dict) and len({*keys}) < len(node.keys)):
            raise ValueError(word.arg)
    return _loads(json.dumps(ast.literal_eval(word.value), allow_nan=False))


def tool_name(answer: str, reference: str) -> float | None:
    """1 if the answer calls the same tools. One answer's calls are parallel, so their order does not count."""
    given, expected = tool_calls(answer), _expected_calls(reference)
    if not given:
        return None
    return float(sorted(name for name, _ in given) == sorted(name for name, _ in expected))


def tool_call(answer: str, reference: str) -> float | None:
    """1 if each call has its own equal call in the reference, in any order, and no other call is there."""
    given, expected = tool_calls(answer), _expected_calls(reference)
    if not given:
        return None
    if len(given) != len(expected):
        return 0.0
    for name, arguments in given:
        equal = (call for call in expected if call[0] == name and same_arguments(arguments, call[1]))
        if (match := next(equal, None)) is None:
            return 0.0
        expected.remove(match)
    return 1.0


def same_arguments(given: Any, expected: Any) -> bool:
    """Equal arguments by name, as JSON."""
    try:
        ours, theirs = _leaves(given), _leaves(expected)
    except ValueError:
        return False
    return ours.keys() == theirs.keys() and all(same_value(ours[path], theirs[path]) for path in theirs)


def _expected_calls(reference: str) -> list[ToolCall]:
    calls = tool_calls(reference)
    if not calls:
        raise ValueError(f"the reference {reference[:40]!r} calls no tool; take another metric")
    return calls
