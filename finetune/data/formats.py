"""A row's layout: found from its columns, checked strictly, and brought into one of two forms.

Chat     messages as chat templates read them (messages, sharegpt, alpaca, prompt/completion of messages)
Passage  a prompt and what follows it, without a template (text, prompt/completion of texts)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.data.messages import checked_text, is_learned, json_text, nearest, read_message, read_tools
from finetune.data.readers import BadRow, json_kind
from finetune.recipe.schema import KnownFormat, RowFormat

# In the order of preference where a row has the columns of several: a chat holds more than its rendering.
COLUMNS: dict[KnownFormat, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL = ("tools", "system", "input")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as a template reads them, and which of them are learned."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    learned: list[bool]  # per message: an assistant's whose weight is not 0


@dataclass(frozen=True, slots=True)
class Passage:
    """A prompt and its continuation; plain text has an empty prompt."""

    prompt: str
    completion: str


def detect_format(row: Mapping[str, Any]) -> KnownFormat:
    """The layout that the row's columns show. Raises BadRow with the nearest right name."""
    for name, columns in COLUMNS.items():
        if all(row.get(column) is not None for column in columns):
            return name
    wanted = [column for columns in COLUMNS.values() for column in columns]
    for column in row:
        if column not in wanted and (near := nearest(column, wanted)):
            raise BadRow(f"unknown column {column!r}; did you mean {near!r}?")
    for columns in COLUMNS.values():
        missing = [column for column in columns if row.get(column) is None]
        if len(missing) < len(columns):
            raise BadRow(f"the field {missing[0]!r} is missing next to {_other(columns, missing[0])!r}; add it")
    has = ", ".join(map(repr, list(row)[:8])) or "none"
    raise BadRow(f"no known layout: the columns are {has}; name them messages, text, or prompt and completion")


def _other(columns: tuple[str, ...], missing: str) -> str:
    return next(column for column in columns if column != missing)


def read_row(row: Mapping[str, Any], layout: RowFormat) -> Chat | Passage:
    """The row in its common form, checked strictly. Raises BadRow (mistake; remedy)."""
    known = detect_format(row) if layout == "auto" else layout
    _check_columns(row, known)
    match known:
        case "messages":
            return _chat(row, row["messages"], "messages")
        case "sharegpt":
            return _chat(row, _from_sharegpt(row["conversations"]), "conversations")
        case "prompt_completion":
            return _prompt_completion(row)
        case "alpaca":
            return _alpaca(row)
        case "text":
            return Passage("", checked_text(row["text"], "text"))


def _check_columns(row: Mapping[str, Any], known: KnownFormat) -> None:
    expected = COLUMNS[known]
    for column in expected:
        if column not in row:
            others = [name for name in row if name not in expected]
            near = nearest(column, others)
            hint = f"{near!r} is there: rename it" if near else f"add it, or choose another data format than {known}"
            raise BadRow(f"the field {column!r} is missing; {hint}")
        if row[column] is None:
            raise BadRow(f"{column!r} is null; give it a value, or take the row away")
    known_names = [*expected, *OPTIONAL]
    for column in row:
        if column not in known_names and (near := nearest(column, OPTIONAL, cutoff=0.8)) and near not in row:
            raise BadRow(f"unknown column {column!r}; did you mean {near!r}?")


def _prompt_completion(row: Mapping[str, Any]) -> Chat | Passage:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        chat = _chat(row, [*prompt, *completion], "prompt and completion")
        # The prompt's own assistant turns are examples to read, not to learn.
        inside = [index >= len(prompt) and learned for index, learned in enumerate(chat.learned)]
        if not any(inside):
            raise BadRow("'completion' has no assistant turn to learn; add one")
        return Chat(chat.messages, chat.tools, inside)
    if isinstance(prompt, list) or isinstance(completion, list):
        raise BadRow("'prompt' and 'completion' must both be texts or both lists of messages; change one")
    return Passage(checked_text(prompt, "prompt", may_be_empty=True), checked_text(completion, "completion"))


def _alpaca(row: Mapping[str, Any]) -> Chat:
    instruction = checked_text(row["instruction"], "instruction")
    given = checked_text(row.get("input") or "", "input", may_be_empty=True)
    system = checked_text(row.get("system") or "", "system", may_be_empty=True)
    messages = [{"role": "system", "content": system}] if system.strip() else []
    messages.append({"role": "user", "content": f"{instruction}\n\n{given}" if given.strip() else instruction})
    messages.append({"role": "assistant", "content": checked_text(row["output"], "output")})
    return Chat(messages, None, [message["role"] == "assistant" for message in messages])


def _from_sharegpt(turns: Any) -> list[dict[str, Any]]:
    if not isinstance(turns, list):
        raise BadRow(f"'conversations' must be a list of turns, this is {json_kind(turns)}; write [{{\"from\": ...}}]")
    return [_sharegpt_turn(turn, f"conversations[{index}]") for index, turn in enumerate(turns)]


def _sharegpt_turn(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadRow(f'{where} must be an object, this is {json_kind(turn)}; write {{"from": ..., "value": ...}}')
    if "role" in turn and "from" not in turn:
        return turn
    for key in ("from", "value"):
        if key not in turn:
            near = nearest(key, turn)
            raise BadRow(f"{where}: {key!r} is missing; " + (f"{near!r} is there: rename it" if near else "add it"))
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        near = nearest(str(speaker), SHAREGPT_ROLES)
        hint = f"did you mean {near!r}?" if near else "known are human, gpt, system, function_call, observation"
        raise BadRow(f"{where}: unknown speaker {speaker!r}; {hint}")
    message = {"role": SHAREGPT_ROLES[speaker], "content": turn["value"]}
    if turn.get("weight") is not None:
        message["weight"] = turn["weight"]
    if speaker == "function_call":
        call = json_text(checked_text(turn["value"], f"{where}: value"), f"{where}: value")
        message |= {"content": "", "tool_calls": call if isinstance(call, list) else [call]}
    return message


def _chat(row: Mapping[str, Any], messages: Any, column: str) -> Chat:
    if not isinstance(messages, list):
        raise BadRow(f'{column!r} must be a list of messages, this is {json_kind(messages)}; write [{{"role": ...}}]')
    if not messages:
        raise BadRow(f"{column!r} is an empty list; give it a user and an assistant turn")
    checked, learned = [], []
    for index, message in enumerate(messages):
        where = f"{column}[{index}]"
        checked.append(read_message(message, where))
        learned.append(is_learned(message, where))
    _check_turns(checked)
    return Chat(checked, read_tools(row.get("tools")), learned)


def _check_turns(messages: list[dict[str, Any]]) -> None:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise BadRow("no assistant turn, so nothing to learn; add one, or take the row away")
    if "user" not in roles[: roles.index("assistant")] and "tool" not in roles[: roles.index("assistant")]:
        raise BadRow("the assistant speaks first; begin with a user turn (after an optional system one)")
