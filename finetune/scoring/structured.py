"""Metrics for answers that are JSON or call tools. A reference that cannot be read is refused; an answer scores 0."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice, zip_longest
from typing import Any

MOST_NESTED = 50  # levels of lists and objects; a model may write ten thousand brackets
MOST_LISTS = 20  # lists of calls in Python's form that are tried
MOST_CALLS = 1000  # places where a call or a JSON value may begin; looking further would take seconds
_FENCE = re.compile(r"(```|~~~)[\w+-]*\s*")
# A block with a name: Llama 3.1 and Qwen 3 Coder, GLM
_TAGGED = re.compile(r"<function=(?P<function>[^>\s]+)>|<tool_call>\s*(?P<glm>[\w.:/-]+)\s*(?=<arg_key>|</tool_call>)")
_CLOSING = {"function": "</function>", "glm": "</tool_call>"}
_PARAMETER = re.compile(
    r"<parameter=([^>\s]+)>(.*?)</parameter>|<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL
)
_PYTHON = re.compile(r"\[\s*[A-Za-z_][\w.]*\(")
_MARKS = re.compile(
    r"<\|python_tag\|>|<\|tool_call_(?:start|end)\|>|</?tool_call>|<\|eom_id\|>|```(?:tool_code|python)?"
)
# A name directly before an object: Mistral, DeepSeek, gpt-oss, with their special tokens or decoded without them
_NAMED = re.compile(
    r"(?:to=functions\.)?(?P<name>[A-Za-z_][\w.-]*)"
    r"(?:\[CALL_ID\]\w+)?(?:\[ARGS\]|<｜tool▁sep｜>|\s*(?:<\|constrain\|>)?json\s*(?:<\|message\|>)?|<\|message\|>)?"
    r"(?:\s*```json\s*|\s*)(?=\{)"
)
# Gemma 4: a mark, a key, a text, or anything else, whose text marks may be lost in decoding
_GEMMA = re.compile(r"\bcall:([\w.:-]+)(?=\{)")
_GEMMA_TOKEN = re.compile(
    r"\s*(?:(?P<mark>[{}\[\],])|(?<=[{,])(?P<key>[^{}\[\],:<]+):|<\|\"\|>(?P<text>.*?)<\|\"\|>|(?P<plain>[^{}\[\],]+))",
    re.DOTALL,
)
UNREAD = object()  # arguments that are not understood; equal to nothing
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
    return bool(given == expected)


def tool_calls(text: str, *, bare: bool = True) -> list[ToolCall]:
    """(name, arguments) of each call that an answer writes, in order. Arguments that are not understood are UNREAD.

    It reads what the models' own templates write, with special tokens or decoded without them:

        {"name": "f", "arguments": {...}}     most; also parameters, function, tool_calls and OpenAI's text of JSON
        <function=f>{...}</function>          Llama 3.1; with <parameter=KEY> Qwen 3 Coder
        <tool_call>f<arg_key>k</arg_key>...   GLM
        [f(key=value), g(1)]                  Llama 3.2 and 4, LFM 2; also without brackets if nothing else is there
        call:f{key:value}                     Gemma 4
        f{...}    f ```json {...}```          Mistral, DeepSeek, gpt-oss

    Args:
        bare: Take f(x) without brackets for a call, too.
    """
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
        return _python_elements(f"[{','.join(line.rstrip(' ;,') for line in rest.splitlines() if line.strip())}]")
    return []


def is_tool_call(text: str) -> bool:
    """Whether a reference surely calls tools: {"name": "Ann"} and f(x) may be data and code."""
    calls = tool_calls(text, bare=False)
    return any(call[1] is not UNREAD for call in calls) and not re.fullmatch(r'\s*\{\s*"name"\s*:[^{}]*\}\s*', text)


def _tagged_calls(text: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    openings = [*islice(_TAGGED.finditer(text), MOST_CALLS)]
    for opening, following in zip_longest(openings, openings[1:]):
        body, closing, _ = text[opening.end() : following and following.start()].partition(
            _CLOSING[str(opening.lastgroup)]
        )
        arguments: Any = UNREAD
        if closing or not following:
            pairs = [[part for part in match if part] for match in _PARAMETER.findall(body)]
            if not _PARAMETER.sub("", body).strip():
                arguments = {pair[0].strip(): _plain("".join(pair[1:])) for pair in pairs if pair}
                if len(arguments) < len(pairs):
                    arguments = UNREAD
            elif not pairs and isinstance(value := _as_arguments(body), dict):
                arguments = value
        calls.append((opening[str(opening.lastgroup)], arguments))
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
    return _plain(text) if text.strip() else {}


def _plain(text: str) -> Any:
    """A parameter's value: JSON if it is some, else text."""
    try:
        return _loads(text)
    except ValueError:
        return text.strip()


def _python_calls(text: str) -> list[ToolCall]:
    """The first list of calls in a text."""
    for start in islice(_PYTHON.finditer(text), MOST_LISTS):
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
    return []


def _python_elements(text: str) -> list[ToolCall]:
    """The calls of a list in Python's syntax; none if it is another text."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    if not isinstance(tree, ast.List):
        return []
    calls: list[ToolCall] = []
    for call in tree.elts:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
            return []
        arguments: Any
        try:
            pairs = [(str(index), _literal(value)) for index, value in enumerate(call.args)]
            for word in call.keywords:
                value = _literal(word.value)
                pairs += [(word.arg, value)] if word.arg is not None else value.items()  # **{"key": value}
            arguments = _unique(pairs)
        except (ValueError, TypeError, AttributeError, RecursionError):
            arguments = UNREAD
        calls.append((ast.unparse(call.func), arguments))
    return calls


class _JsonNames(ast.NodeTransformer):
    """Replaces JSON's names by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


def _literal(node: ast.expr) -> Any:
    """A value as JSON has it. Raises ValueError or TypeError for any other one."""
    return _loads(json.dumps(ast.literal_eval(_JsonNames().visit(node)), allow_nan=False))


def _gemma_calls(text: str) -> list[ToolCall]:
    """call:f{key:<|"|>text<|"|>,other:1}, by the JSON that means the same."""
    calls: list[ToolCall] = []
    end = 0
    while (opening := _GEMMA.search(text, end)) is not None:
        written, depth = "", 0
        for token in _GEMMA_TOKEN.finditer(text, opening.end()):
            if token["mark"]:
                written += token["mark"]
                depth += (token["mark"] in "{[") - (token["mark"] in "}]")
            elif token["key"]:
                written += f"{json.dumps(token['key'].strip())}:"
            elif token["text"] is not None or isinstance(_plain(token["plain"]), str):
                written += json.dumps(token["text"] if token["text"] is not None else _plain(token["plain"]))
            else:
                written += token["plain"]
            end = token.end()
            if not depth:
                break
        try:
            calls.append((opening[1], _loads(written)))
        except ValueError:
            calls.append((opening[1], UNREAD))
    return calls


def tool_name(answer: str, reference: str) -> float:
    """1 if the answer calls the same tools in the same order."""
    given, expected = tool_calls(answer), _expected_calls(reference)
    return float([name for name, _ in given] == [name for name, _ in expected])


def tool_call(answer: str, reference: str) -> float:
    """1 if names and all arguments are equal, call by call."""
    given, expected = tool_calls(answer), _expected_calls(reference)
    wanted = [_argument_leaves(arguments) for _, arguments in expected]
    if None in wanted:
        raise ValueError(f"the reference {reference[:40]!r} has an argument that cannot be read; write it as JSON")
    if [name for name, _ in given] != [name for name, _ in expected]:
        return 0.0
    for (_, arguments), theirs in zip(given, wanted, strict=True):
        ours = _argument_leaves(arguments)
        if ours is None or theirs is None or ours.keys() != theirs.keys():
            return 0.0
        if not all(same_value(ours[path], theirs[path]) for path in theirs):
            return 0.0
    return 1.0


def _argument_leaves(arguments: Any) -> dict[str, Any] | None:
    """A call's arguments by path; None if they are not understood."""
    if arguments is UNREAD:
        return None
    try:
        return _leaves(arguments)
    except ValueError:
        return None


def _expected_calls(reference: str) -> list[ToolCall]:
    calls = tool_calls(reference)
    if not calls:
        raise ValueError(f"the reference {reference[:40]!r} calls no tool; take another metric")
    return calls
