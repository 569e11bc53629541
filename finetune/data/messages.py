"""Checks a chat's message strictly, and converts it to the form that chat templates read (OpenAI's keys)."""

from __future__ import annotations

import ast
import difflib
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from finetune.data.readers import BadRow, json_kind, parse_json
from finetune.output_stream import printable

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "ai": "assistant", "model": "assistant"}
REASONING = ("reasoning_content", "thinking", "reasoning")
# Columns, message keys and kinds of content parts that hold no text.
MEDIA = ("image", "images", "image_url", "video", "videos", "video_url", "audio", "audios", "audio_url", "input_audio")
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "weight", *REASONING)
LONGEST_ROLE = 100  # characters
COMPARED_KEYS = 20  # a message's unknown keys that are compared with ours, in case they are misspelt
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


class ReportedOnce(BadRow):
    """A data set's mistake, such as an unknown role or images: reported once, not for each row."""

    def __init__(self, mistake: str, about: str) -> None:
        super().__init__(mistake)
        self.about = about


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning before an assistant's answer: from its own key, or the content before </think>."""
    for key in REASONING:
        if message.get(key):
            return str(message[key])
    before, end, _ = message["content"].partition("</think>")
    if end:
        return str(before.lstrip().removeprefix("<think>"))
    return ""


def is_supervised(message: Mapping[str, Any], place: str) -> bool:
    """Whether a message is supervised: an assistant turn without weight 0. Raises BadRow."""
    weight = message.get("weight")
    if weight is None:
        return bool(message["role"] == "assistant")
    if isinstance(weight, bool) or weight not in (0, 1):  # True equals 1 in Python
        raise BadRow(f"{place}: weight is {json_kind(weight)}; write 0 (read only) or 1 (supervised)")
    if weight and message["role"] != "assistant":
        raise BadRow(f"{place}: weight 1 on a {message['role']} turn; only assistant turns are supervised: remove it")
    return bool(weight)


def read_message(message: Any, place: str) -> dict[str, Any]:
    """A message with the keys that templates read: no nulls, no weight, tool calls' arguments as objects."""
    if not isinstance(message, dict):
        raise BadRow(f'{place} must be an object, this is {json_kind(message)}; write {{"role": ...}}')
    role = _checked_role(message, place)
    result = {key: value for key, value in message.items() if value is not None and key != "weight"}
    for key in result:
        if key in MEDIA and result[key]:
            raise ReportedOnce(f"{place}: {key!r} on a message; only text is trained on: remove it, or the row", key)
    for key in islice((key for key in result if key not in MESSAGE_KEYS), COMPARED_KEYS):
        near = _our_key(key)
        if near and near not in message:
            raise BadRow(f"{place}: unknown key {key!r}; did you mean {near!r}?")
    if not result.get("tool_calls"):
        result.pop("tool_calls", None)  # an empty list makes some templates write an empty call
    elif role != "assistant":
        raise BadRow(f"{place}: tool_calls on a {role} turn; only the assistant calls tools")
    else:
        result["tool_calls"] = _checked_calls(result["tool_calls"], f"{place}.tool_calls")
    for key in REASONING:
        if key not in result:
            continue
        if role != "assistant" and result[key]:
            raise BadRow(f"{place}: {key} on a {role} turn; only the assistant's is supervised: move or remove it")
        result[key] = checked_text(result[key], f"{place}.{key}", may_be_empty=True)
    return result | {"content": _checked_content(message, place, may_be_empty="tool_calls" in result or role == "tool")}


@lru_cache(maxsize=1024)  # a comparison takes 13 us, and most messages of a data set have the same keys
def _our_key(key: str) -> str | None:
    return nearest(key, MESSAGE_KEYS, cutoff=0.75)


def _checked_role(message: Mapping[str, Any], place: str) -> str:
    if "role" not in message:
        hint = "add it: user, assistant, system or tool"
        if near := nearest("role", message):
            hint = f"{near!r} is there: rename it"
        if "from" in message:
            hint = "'from' is there: this is format: sharegpt; write columns: {conversations: messages}"
        raise BadRow(f"{place}: 'role' is missing; {hint}")
    role = message["role"]
    if not isinstance(role, str) or role not in ROLES:
        checked_name(role, f"{place}: the role", ROLES)
        near = OTHER_ROLES.get(role.lower()) or role_of_tools(role) or nearest(role, ROLES)
        known = f"known are {', '.join(ROLES)};"
        if near in ROLES:
            known = f"did you mean {near!r}?"
        quoted = printable(json.dumps(role, ensure_ascii=False))
        line = f"roles: {{{quoted}: {near or 'user'}}}"
        raise ReportedOnce(f"{place}: unknown role {quoted}; {known} or add {line}", quoted)
    return role


_CALLS = re.compile(r"(?:^|[-_ ]|tool|function)(?:call|use$|invo[ck]|action)", re.IGNORECASE)
_TOOL_WORDS = re.compile(r"tool|function|observ|ipython|interpreter|environment|plugin|^api|_api", re.IGNORECASE)
_RESULT_WORDS = re.compile(r"result|response|output|return|repl[yi]|observ", re.IGNORECASE)


def role_of_tools(name: str) -> str | None:
    """function_call if a role's name means tool calls, tool if it means tool results; None for any other name.

    Results are tried first, because tool_call_result names a result. Training on a result as an answer is worse than
    refusing it.

        tool_call         -> function_call
        tool_call_result  -> tool
        observation       -> tool
        narrator          -> None
    """
    is_call, is_about_tools = _CALLS.search(name), _TOOL_WORDS.search(name)
    is_result = _RESULT_WORDS.search(name) and (is_about_tools or is_call)
    if is_result or (is_about_tools and not is_call):
        return "tool"
    if is_call:
        return "function_call"
    return None


def calls_in(text: Any, place: str) -> dict[str, Any]:
    """An assistant turn from its calls as JSON text: {"name": ..., "arguments": {...}}, or a list of such objects.

    Raises BadRow.
    """
    calls = json_text(checked_text(text, place), place)
    if not isinstance(calls, list):
        calls = [calls]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def checked_name(value: Any, subject: str, known: Iterable[str]) -> None:
    """Raises BadRow if a value cannot be a role's or speaker's name: no text, or a text of another field."""
    if not isinstance(value, str):
        raise BadRow(f"{subject} must be text, this is {json_kind(value)}; write one of {', '.join(known)}")
    if len(value) > LONGEST_ROLE:
        raise BadRow(f"{subject} is a text of {len(value):,} characters; write one of {', '.join(known)}")


def with_our_role(message: Any, roles: Mapping[str, str], place: str) -> Any:
    """Rename a message's role by the recipe's `roles`. Raises BadRow for a call that cannot be read."""
    if not isinstance(message, dict):
        return message
    role = message.get("role")
    if not isinstance(role, str) or role not in roles:
        return message
    if roles[role] != "function_call":
        return {**message, "role": roles[role]}
    if message.get("tool_calls"):
        return {**message, "role": "assistant"}
    return {**message, **calls_in(message.get("content"), f"{place}.content")}


def _checked_content(message: Mapping[str, Any], place: str, *, may_be_empty: bool) -> str:
    if "content" not in message and not may_be_empty:
        near = nearest("content", [key for key in message if key not in MESSAGE_KEYS], cutoff=0.6)
        near = near or next((key for key in ("value", "text") if key in message), None)
        raise BadRow(f"{place}: 'content' is missing; {missing_hint(near, 'add it')}")
    content = message.get("content")
    if content is None and may_be_empty:
        return ""
    if isinstance(content, list):  # of parts: [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
        for index, part in enumerate(content):
            kind, description = None, json_kind(part)
            if isinstance(part, dict):
                kind = part.get("type")
                description = repr(kind)
                if kind == "text" and isinstance(part.get("text"), str):
                    continue
            mistake = f"{place}.content[{index}]: {description} instead of a text part"
            mistake += "; only text is trained on: remove it"
            if kind in MEDIA:
                raise ReportedOnce(mistake, str(kind))
            raise BadRow(mistake)
        content = "".join(part["text"] for part in content)
    return checked_text(content, f"{place}.content", may_be_empty=may_be_empty)


def _checked_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRow(f'{place} must be a list, this is {json_kind(calls)}; write [{{"type": "function", ...}}]')
    result = []
    for index, call in enumerate(calls):
        function = None
        if isinstance(call, dict):
            function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRow(f'{place}[{index}]: a call needs a function name; write {{"function": {{"name": ...}}}}')
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):  # as OpenAI; templates want the object
            arguments = json_text(arguments or "{}", f"{place}[{index}]: arguments")
        if not isinstance(arguments, dict):
            raise BadRow(f"{place}[{index}]: arguments must be an object, not {json_kind(arguments)}; write {{...}}")
        check_inside(arguments, f"{place}[{index}]: arguments")
        checked_text(function["name"], f"{place}[{index}]: name")
        others = {key: value for key, value in call.items() if key not in ("name", "arguments") and value is not None}
        result.append({"type": "function", **others, "function": {**function, "arguments": arguments}})
    return result


def read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """A row's tool schemas, given as a list or as its JSON text; None without tools. Raises BadRow."""
    tools = parsed_cell(tools, "tools", empty=None)
    if not tools and (tools is None or isinstance(tools, list)):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"'tools' must be a list of JSON schemas, this is {json_kind(tools)}; write [{{\"type\": ...}}]")
    check_inside(tools, "tools")
    return tools


def parsed_cell(value: Any, place: str, *, empty: Any) -> Any:
    """The value, or `empty` for a blank text. Raises BadRow for a text that is neither JSON nor Python.

    Tables hold lists and objects as text, because their shape differs from row to row.
    """
    if not isinstance(value, str):
        return value
    if not value.strip():
        return empty
    return json_text(value, place)


def turns_in(value: Any, place: str, *, always: bool = True) -> Any:
    """The turns that a table holds as JSON or Python text, as a list or one object; any other value is unchanged.

    Args:
        always: Raise BadRow for a text that only begins like turns: Excel cuts cells at 32,767 characters. False: in a
            column of texts, only a text whose every turn has a known speaker is not what it seems.
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


def json_text(text: str, place: str) -> Any:
    """Parse a text that holds JSON, or Python's or numpy's way of writing the same value. Raises BadRow."""
    try:
        return parse_json(text)
    except BadRow as error:
        try:
            return parse_json(_python_as_json(text))
        except (BadRow, ValueError, SyntaxError, SyntaxWarning, DeprecationWarning):
            raise BadRow(f"{place}: {error}") from None


def _python_as_json(text: str) -> str:
    """A Python value's text as JSON. Only single strings are evaluated, so nothing nests and nothing runs.

    [{'role': 'user', 'content': "It's"}\n {'role': ...}]   numpy writes no comma between objects
    """
    parts, end = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an escape that Python does not know
        for match in _PYTHON_STRING.finditer(text):
            parts += [text[end : match.start()], json.dumps(ast.literal_eval(match.group()))]
            end = match.end()
    parts.append(text[end:])
    for place in range(0, len(parts), 2):  # between the strings
        for pattern, replaced in _PYTHON_WORDS:
            parts[place] = pattern.sub(replaced, parts[place])
    return "".join(parts)


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
        elif isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value):
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
