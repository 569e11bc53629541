"""Metrics for answers that are JSON or call tools. What cannot be read is refused in a reference, and else unequal."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

MOST_NESTED = 50  # levels of lists and objects; a model may write ten thousand brackets
MOST_CALLS = 1000  # places where a call or a JSON value may begin; looking further would take seconds
_FENCE = re.compile(r"(```|~~~)[\w+-]*\s*")
_TAGGED = re.compile(
    r"<function=(?P<function>[^>\s]+)>"
    r"|<invoke name=\"(?P<invoke>[^\"]+)\">"
    r"|<tool_call>\s*(?P<glm>[\w.:/-]+)\s*(?=<arg_key>|</tool_call>)"
)
_NAMESPACE = re.compile(r"(?<=<)(/?)\w+:(?=(?:invoke|parameter)[ >])")  # <atem:invoke name="f"> is <invoke name="f">
_CLOSING = {"function": "</function>", "invoke": "</invoke>", "glm": "</tool_call>"}
_PARAMETER = re.compile(
    r"<parameter=([^>\s]+)>(.*?)</parameter>|<parameter name=\"([^\"]+)\">(.*?)</parameter>"
    r"|<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    re.DOTALL,
)
_PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_MARKS = re.compile(
    r"<\|python_tag\|>|<\|tool_call_(?:start|end)\|>|</?tool_call>|<\|eom_id\|>|```(?:tool_code|python)?"
)
_GEMMA = re.compile(r"\bcall:([\w.:-]+)(?=\{)")
# A name directly before an object: Mistral, DeepSeek, gpt-oss, with their special tokens or decoded without them
_NAMED = re.compile(
    r"(?:to=functions\.)?(?P<name>[A-Za-z_][\w.-]*)"
    r"(?:\[CALL_ID\]\w+)?(?:<\|channel\|>\w+)?(?:\[ARGS\]|<｜tool▁sep｜>|\s*(?:<\|constrain\|>)?json\s*(?:<\|message\|>)?|<\|message\|>)?"
    r"(?:\s*```json\s*|\s*)(?=\{)"
)
_GEMMA_TOKEN = re.compile(r"\s*(<\|\"\|>.*?<\|\"\|>|\"(?:[^\"\\]|\\.)*\"|[{}\[\],]|[^{}\[\],:]+|:)", re.DOTALL)


class Unread:
    """Arguments that are not understood; equal to nothing."""


UNREAD = Unread()
ToolCall = tuple[str, Any]


@dataclass(frozen=True)
class Unquoted:
    """A parameter's text between tags: 12 may be the number, or a text of two digits. True is what templates make of
    true."""

    text: str


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
        found = None
        for number, fence in enumerate(_FENCE.finditer(text)):
            if number == MOST_CALLS:
                break
            try:
                value, end = _DECODER.raw_decode(text, fence.end())
                _leaves(value)
            except _FAILURES:
                continue
            if not text[end:].strip() or text[end:].lstrip().startswith(fence[1]):
                found = (value,)
        if found is None:
            raise
        return found[0]


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
    """Equal as JSON: 1 and 1.0 are, true and 1 are not; texts in one Unicode form, without spaces around them."""
    if isinstance(given, str) and isinstance(expected, str):
        return unicodedata.normalize("NFC", given).strip() == unicodedata.normalize("NFC", expected).strip()
    if isinstance(given, bool) is not isinstance(expected, bool):
        return False
    return given is not UNREAD and bool(given == expected)


def tool_calls(text: str, *, bare: bool = True) -> list[ToolCall]:
    """(name, arguments) of each call that an answer writes, in order. Arguments that are not understood are UNREAD.

    It reads what the models' own templates write, with special tokens or decoded without them:

        {"name": "f", "arguments": {...}}     most; also parameters, function, tool_calls and OpenAI's text of JSON
        <function=f>{...}</function>          Llama 3.1; with <parameter=KEY> Qwen 3 Coder; <invoke name="f"> others
        <tool_call>f<arg_key>k</arg_key>...   GLM
        [f(key=value), g(1)]                  Llama 3.2 and 4, LFM 2; also without brackets where nothing else stands
        call:f{key:value}                     Gemma 4
        f{...}    f ```json {...}```          Mistral, DeepSeek, gpt-oss

    Args:
        bare: Take f(x) without brackets for a call, too.
    """
    text = _NAMESPACE.sub(r"\1", text)
    if _TAGGED.search(text):
        return _tagged_calls(text)
    python = _PYTHON.search(text)
    if python and "{" not in text[: python.start()] and (calls := _python_calls(text)):
        return calls
    if calls := _gemma_calls(text):
        return calls
    if calls := _json_calls(text):
        return calls
    rest = _MARKS.sub("\n", text).strip()
    if bare and re.match(r"[A-Za-z_][\w.]*\(.*\)$", rest, re.DOTALL):
        return _python_elements(f"[{','.join(line.rstrip(' ;,') for line in rest.splitlines() if line.strip())}]") or []
    return []


def is_tool_call(text: str) -> bool:
    """Whether a reference surely calls tools: {"name": "Ann"} and f(x) may be data and code."""
    calls = tool_calls(text, bare=False)
    return any(call[1] is not UNREAD for call in calls) and not re.fullmatch(r'\s*\{\s*"name"\s*:[^{}]*\}\s*', text)


def _tagged_calls(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    at = 0
    while (opening := _TAGGED.search(text, at)) is not None and len(calls) < MOST_CALLS:
        kind = str(opening.lastgroup)
        end = text.find(_CLOSING[kind], opening.end())
        other = _TAGGED.search(text, opening.end())
        body = text[opening.end() : len(text) if end < 0 else end]
        arguments: Any = UNREAD
        if other is None or 0 <= end < other.start():  # else the block is not closed before the next one
            pairs = [[part for part in match if part] for match in _PARAMETER.findall(body)]
            if not _PARAMETER.sub("", body).strip():
                arguments = {pair[0].strip(): Unquoted("".join(pair[1:]).strip()) for pair in pairs if pair}
                if len(arguments) < len(pairs):
                    arguments = UNREAD
            elif not pairs:
                arguments = _as_arguments(body)
                arguments = arguments if isinstance(arguments, dict) else UNREAD
        calls.append((opening[kind], arguments))
        at = opening.end() if end < 0 else end
    return calls


def _json_calls(text: str) -> list[ToolCall]:
    """JSON objects that are calls, or objects after a name."""
    calls: list[ToolCall] = []
    at, starts, text = text.find("{"), 0, text.replace("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n")
    while at >= 0 and starts < MOST_CALLS:
        starts += 1
        try:
            value, end = _DECODER.raw_decode(text, at)
        except _FAILURES:
            end = at + 1
        else:
            before = text[max(0, at - 200) : at]
            named = [match for match in _NAMED.finditer(before + "{") if match.end() == len(before)]
            if call := _call_in(value):
                calls.append(call)
            elif isinstance(value, dict) and named and not before[: named[0].start()].endswith(("`", ":", "~")):
                calls.append((named[0]["name"], value))
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


def _plain(text: str) -> Any:
    """A parameter's value: JSON where it is some, else text."""
    try:
        return _loads(text)
    except ValueError:
        return text.strip()


def _python_calls(text: str) -> list[ToolCall]:
    """The first list of calls in a text."""
    for number, start in enumerate(_PYTHON.finditer(text)):
        depth, quote, at = 0, "", start.start()
        while at < len(text):
            letter = text[at]
            if quote:
                at += letter == "\\"
                quote = "" if letter == quote else quote
            elif letter in "'\"":
                quote = letter
            else:
                depth += (letter in "[({") - (letter in "])}")
                if not depth:
                    break
            at += 1
        if calls := _python_elements(text[start.start() : at + 1]):
            return calls
        if number == 20:
            break
    return []


def _python_elements(text: str) -> list[ToolCall] | None:
    """The calls of a list in Python's syntax; None if it is none."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(tree, ast.List) or not tree.elts:
        return None
    calls: list[ToolCall] = []
    for call in tree.elts:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
            return None
        arguments: Any = {str(index): each for index, each in enumerate(map(_literal, call.args))}
        pairs: list[tuple[Any, Any]] = []
        for word in call.keywords:
            value = _literal(word.value)
            if word.arg is not None:
                pairs.append((word.arg, value))
            elif isinstance(value, dict):  # **{"key": value}
                pairs += value.items()
            else:
                pairs.append(("**", UNREAD))
        arguments |= dict(pairs)
        if len(arguments) < len(call.args) + len(pairs) or not _understood(arguments):
            arguments = UNREAD
        calls.append((ast.unparse(call.func), arguments))
    return calls


def _literal(node: ast.expr) -> Any:
    """A value as JSON has it; UNREAD for every other one."""
    match node:
        case ast.Constant(value=bool() | None | int() | str() as value):
            return value
        case ast.Constant(value=float() as value) if value - value == 0:
            return Decimal(repr(value))
        case ast.Name(id="true" | "false" | "null" as name):
            return {"true": True, "false": False, "null": None}[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if (
            type(value) is not bool
        ):
            return -_literal(node.operand) if value - value == 0 else UNREAD
        case ast.List(elts=inner) | ast.Tuple(elts=inner):
            return [_literal(each) for each in inner]
        case ast.Dict(keys=keys, values=values):
            names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if len(set(names)) == len(keys):
                return dict(zip(names, map(_literal, values), strict=True))
    return UNREAD


def _understood(value: Any) -> bool:
    try:
        return all(leaf is not UNREAD for leaf in _leaves(value).values())
    except ValueError:
        return False


def _gemma_calls(text: str) -> list[ToolCall]:
    """Gemma 4's call:f{key:<|"|>text<|"|>,other:1}, whose marks of texts may be lost in decoding."""
    calls: list[ToolCall] = []
    end = 0
    while (opening := _GEMMA.search(text, end)) is not None:
        tokens: list[str] = []
        depth = 0
        for token in _GEMMA_TOKEN.finditer(text, opening.end()):
            tokens.append(token[1])
            depth += (token[1] in "{[") - (token[1] in "}]")
            end = token.end()
            if not depth:
                break
        try:
            value, _ = _gemma_value(tokens, 0, 0)
        except (ValueError, IndexError):
            value = UNREAD
        calls.append((opening[1], value))
    return calls


def _gemma_value(tokens: list[str], at: int, depth: int) -> tuple[Any, int]:
    """The value at a token, and the place after it. Raises ValueError or IndexError."""
    token = tokens[at]
    if depth > MOST_NESTED or token in ":,}]":
        raise ValueError(token)
    if token == "{":
        pairs: list[tuple[str, Any]] = []
        at += 1
        while tokens[at] != "}":
            if pairs:
                if tokens[at] != ",":
                    raise ValueError(tokens[at])
                at += 1
            key, colon = str(_gemma_plain(tokens[at])), tokens[at + 1]
            if colon != ":" or tokens[at] in "{}[],:":
                raise ValueError(key)
            value, at = _gemma_value(tokens, at + 2, depth + 1)
            pairs.append((key, value))
        return _unique(pairs), at + 1
    if token == "[":
        values: list[Any] = []
        at += 1
        while tokens[at] != "]":
            if values:
                if tokens[at] != ",":
                    raise ValueError(tokens[at])
                at += 1
            value, at = _gemma_value(tokens, at, depth + 1)
            values.append(value)
        return values, at + 1
    at += 1
    while tokens[at] == ":":  # a colon in a text without marks: 12:30
        token, at = token + ":" + tokens[at + 1], at + 2
    return _gemma_plain(token), at


def _gemma_plain(token: str) -> Any:
    if token.startswith('<|"|>'):
        return token.removeprefix('<|"|>').removesuffix('<|"|>')
    return _plain(token)


def tool_name(answer: str, reference: str) -> float:
    """1 if the answer calls the same tools. One answer's calls are parallel, so their order does not count."""
    given, expected = tool_calls(answer), _expected_calls(reference)
    return float(sorted(name for name, _ in given) == sorted(name for name, _ in expected))


def tool_call(answer: str, reference: str) -> float:
    """1 if each call has its own equal call in the reference, in any order, and no other call is there."""
    given, expected = tool_calls(answer), _expected_calls(reference)
    if any(not _understood(arguments) for _, arguments in expected):
        raise ValueError(f"the reference {reference[:40]!r} has an argument that cannot be read; write it as JSON")
    if len(given) != len(expected):
        return 0.0
    for name, arguments in given:
        equal = (each for each in expected if each[0] == name and same_arguments(arguments, each[1]))
        if not _understood(arguments) or (found := next(equal, None)) is None:
            return 0.0
        expected.remove(found)
    return 1.0


def same_arguments(given: Any, expected: Any) -> bool:
    """Equal arguments by name. Between tags a value has no quotes: it is the text, the JSON or Python's value, as the
    other one has."""
    if not isinstance(given, dict) or not isinstance(expected, dict):
        return _same_json(given, expected)
    return given.keys() == expected.keys() and all(
        any(_same_json(ours, theirs) for ours in _meanings(given[key]) for theirs in _meanings(expected[key]))
        for key in expected
    )


def _meanings(value: Any) -> list[Any]:
    if not isinstance(value, Unquoted):
        return [value]
    try:
        python = _literal(ast.parse(value.text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        python = UNREAD
    return [value.text, _plain(value.text), python]


def _same_json(given: Any, expected: Any) -> bool:
    ours, theirs = _leaves(given), _leaves(expected)
    return ours.keys() == theirs.keys() and all(same_value(ours[path], theirs[path]) for path in theirs)


def _expected_calls(reference: str) -> list[ToolCall]:
    calls = tool_calls(reference)
    if not calls:
        raise ValueError(f"the reference {reference[:40]!r} calls no tool; take another metric")
    return calls
