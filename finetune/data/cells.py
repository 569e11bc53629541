"""Values in a row: JSON or Python text as values, and texts that a tokenizer can take.

BadRow is a row's mistake, wherever it is found.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from finetune.output_stream import one_line, without_controls
from finetune.untrusted.json_files import depth_of

LONGEST_MISTAKE = 800  # characters
MAX_ROW_DEPTH = 64
TOO_DEEP = f"nested deeper than {MAX_ROW_DEPTH} levels; a row needs at most ten"
ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant", "model": "assistant"}
_SPEAKERS = {*ROLES, *OTHER_ROLES, "chatgpt", "observation", "function", "function_call", "function_response"}
_TURNS_IN_TEXT = re.compile(r"""\s*(?:array\()?\[?\s*\{\s*['"](?:role|from|content|value)['"]\s*:""")
_PYTHON_STRING = re.compile(r"""'[^'\\\n]*(?:\\.[^'\\\n]*)*'|"[^"\\\n]*(?:\\.[^"\\\n]*)*\"""", re.DOTALL)
_PYTHON_WORDS = [
    (re.compile(pattern), replaced)
    for pattern, replaced in (
        (r"\b(?:None|nan)\b", "null"), (r"\bTrue\b", "true"), (r"\bFalse\b", "false"),
        (r"\barray\(", ""), (r",\s*dtype=object\)", ""), (r"\}\s+\{", "}, {"),
    )
]  # fmt: skip
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Spaces that never break, soft hyphens, joiners, directions, fillers and byte order marks.
_INVISIBLE = dict.fromkeys(map(ord, "\u00a0\u00ad\u200b\u200c\u200d\u200e\u200f\u2028\u2029\u2060\u3164\ufeff"))


class BadRow(ValueError):
    """A row's mistake and its remedy, made short and printable. The reader adds the place."""

    def __init__(self, mistake: str) -> None:
        if len(mistake) > LONGEST_MISTAKE:
            mistake = mistake[:LONGEST_MISTAKE] + "..."
        super().__init__(without_controls(mistake))


class NotJson(BadRow):
    """A text that is no JSON at all."""


def parse_json(text: str) -> Any:
    """A JSON value, strictly: no duplicate keys, no NaN, no nesting beyond MAX_ROW_DEPTH. Raises BadRow."""
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise NotJson(explain_json(error)) from None
    except RecursionError:
        raise BadRow(TOO_DEEP) from None
    except BadRow:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise BadRow(not_a_number(error)) from None
    # Few brackets cannot nest deep, and counting them is quicker than a walk through the value.
    if text.count("{") + text.count("[") > MAX_ROW_DEPTH and depth_of(value) > MAX_ROW_DEPTH:
        raise BadRow(TOO_DEEP)
    return value


def not_a_number(error: ValueError) -> str:
    return f"not readable as JSON: {str(error).split(';')[0]}; correct the number"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRow(f"the key {one_line(repr(key), 60)} appears twice in one object; keep one")
            seen.add(key)
    return values


def _no_constant(name: str) -> NoReturn:
    raise BadRow(f"{name} is not JSON; write null, or remove the key")


def explain_json(error: json.JSONDecodeError) -> str:
    remedies = [
        ("property name enclosed in double quotes", "JSON wants double quotes around keys, and no comma before }"),
        ("Extra data", "write one JSON object a line, nothing after it"),
        ("Unterminated string", "close the string; a line break inside it is written \\n"),
        ("Invalid control character", "write control characters escaped: \\n, \\t, \\u0000"),
        ("Invalid \\escape", "write a backslash as \\\\"),
        ("Expecting value", "a value is missing or is not JSON (None, True, single quotes?)"),
        ("delimiter", "a comma or colon is missing, or a quote inside a string is not escaped"),
    ]
    remedy = next((remedy for part, remedy in remedies if part in error.msg), "correct the line")
    return f"not JSON: {error.msg} at column {error.colno}; {remedy}"


def json_kind(value: Any) -> str:
    """A value's JSON type, with the value if it is short: `text ("hi")`, `a number (3)`, `a list`."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    kind = kinds.get(type(value), f"a {type(value).__name__}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        kind = "a number"
    if value is None or isinstance(value, dict | list):
        return kind
    text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) <= 24:
        return f"{kind} ({text})"
    return kind


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: white space and invisible characters alone."""
    return not text.strip() or (not text.isascii() and not text.translate(_INVISIBLE).strip())


def turns_in(value: Any, place: str, *, always: bool = True) -> Any:
    """Parse turns that a table holds as JSON or Python text: a list or one object. Other values are returned unchanged.

    Args:
        always: Raise BadRow for a text that begins like turns but cannot be parsed: Excel cuts cells at 32,767
            characters. False, for a column of texts: a text is parsed only if every turn in it has a known speaker.
    """
    if not isinstance(value, str) or not _TURNS_IN_TEXT.match(value):
        return value
    try:
        parsed = json_text(value, place)
    except BadRow:
        if always:
            raise
        return value
    turns = parsed if isinstance(parsed, list) else [parsed]
    speakers = [turn.get("role", turn.get("from")) if isinstance(turn, dict) else None for turn in turns]
    if always or all(str(speaker).lower() in _SPEAKERS for speaker in speakers):
        return parsed
    return value


def parsed_cell(value: Any, place: str, *, empty: Any) -> Any:
    """The value, or `empty` for a blank text. Raises BadRow for a text that is neither JSON nor Python.

    Tables hold lists and objects as text, because their shape differs from row to row.
    """
    if not isinstance(value, str):
        return value
    if not value.strip():
        return empty
    return json_text(value, place)


def json_text(text: str, place: str) -> Any:
    """Parse a text that holds JSON, or Python's or numpy's way of writing the same value. Raises BadRow."""
    try:
        return parse_json(text)
    except BadRow as error:
        # Only single strings are evaluated as Python, so nothing nests and nothing runs.
        # [{'role': 'user', 'content': "It's"}\n {'role': ...}]   numpy writes no comma between objects
        parts, end = [], 0
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # an escape that Python does not know
                for match in _PYTHON_STRING.finditer(text):
                    parts += [text[end : match.start()], json.dumps(ast.literal_eval(match.group()))]
                    end = match.end()
            parts.append(text[end:])
            for index in range(0, len(parts), 2):  # between the strings
                for pattern, replaced in _PYTHON_WORDS:
                    parts[index] = pattern.sub(replaced, parts[index])
            return parse_json("".join(parts))
        except (BadRow, ValueError, SyntaxError, SyntaxWarning, DeprecationWarning):
            raise BadRow(f"{place}: {error}") from None


def check_inside(value: Any, place: str) -> None:
    """Check every text inside a JSON value. Raises BadRow."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            checked_text(item, place, may_be_empty=True)
        elif isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list):
            waiting += item


def checked_text(value: Any, place: str, *, may_be_empty: bool = False) -> str:
    """The value if it is text that a tokenizer can take. Raises BadRow for any other value."""
    if not isinstance(value, str):
        remedy = "write it as text"
        if isinstance(value, int | float):
            remedy += f', or in the recipe template: {{output: "{{{place.strip(chr(39))}}}"}}'
        elif isinstance(value, list) and len(value) == 2 and all(isinstance(item, str) for item in value):
            remedy = "write one text, or for training.objective: dpo two columns: chosen and rejected"
        elif isinstance(value, list | dict):
            remedy = "write one text, or the turns of a chat as messages: [...]"
        raise BadRow(f"{place} must be text, this is {json_kind(value)}; {remedy}")
    if not may_be_empty and not value.strip():
        raise BadRow(f"{place} is empty; give it a text, or remove the row")
    if "\x00" in value:
        raise BadRow(f"{place} holds the character NUL at position {value.index(chr(0))}; remove it")
    if not value.isascii() and (match := _LONE_SURROGATE.search(value)):
        raise BadRow(
            f"{place} holds half a character (\\u{ord(match.group()):04x}) at position {match.start()}; "
            "escape both halves of the pair, or write the character itself"
        )
    return value


def missing_hint(near: str | None, otherwise: str) -> str:
    """The remedy for a missing key: rename the key with a similar name, or `otherwise`."""
    if near:
        return f"{near!r} is there: rename it"
    return otherwise


def nearest(word: str, among: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The name most like `word`, for "did you mean"."""
    matches = difflib.get_close_matches(word.lower(), list(among), 1, cutoff)
    if matches:
        return matches[0]
    return None


def cell_of(row: Mapping[str, Any], path: str) -> Any:
    """A row's cell: of the column with this name, or of an object's key, `ticket.question`; None if it is not there."""
    column, dot, rest = path.partition(".")
    if path in row or not dot:
        return row.get(path)
    inner = row.get(column)
    return cell_of(inner, rest) if isinstance(inner, dict) else None


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with each object's keys as columns of their own: `ticket.question`."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat
