"""A row by the layout of its data set: checked strictly, and brought into one of two forms.

Chat     messages as chat templates read them (messages, sharegpt, alpaca, prompt/completion of messages)
Passage  a prompt and what follows it, without a template (text, prompt/completion of texts)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.data.columns import REASONING_COLUMNS, RowLayout, in_yaml
from finetune.data.messages import (
    OTHER_ROLES,
    ToldOnce,
    calls_in,
    check_inside,
    checked_name,
    checked_text,
    is_learned,
    json_text,
    nearest,
    read_message,
    read_tools,
    role_of_tools,
    with_our_role,
)
from finetune.data.readers import BadRow, json_kind
from finetune.output_stream import printable
from finetune.recipe.cross_checks import OF_CHATS, ROW_COLUMNS, TEMPLATE_ARGUMENTS

SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "function_call",
}  # fmt: skip
SPEAKERS = ("human", "gpt", "system", "function_call", "observation")  # those that messages name


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as a template reads them, and which of them are learned."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    learned: list[bool]  # per message: an assistant's whose weight is not 0
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables for the template


@dataclass(frozen=True, slots=True)
class Passage:
    """A prompt and its continuation; plain text has an empty prompt."""

    prompt: str
    completion: str


def by_turn(chat: Chat) -> list[Chat]:
    """A chat for each learned turn, which is its last message and the only one that is learned."""
    return [
        replace(chat, messages=chat.messages[: index + 1], learned=[False] * index + [True])
        for index, learned in enumerate(chat.learned)
        if learned
    ]


def read_row(row: Mapping[str, Any], layout: RowLayout) -> Chat | Passage:
    """The row in its common form, checked strictly. Raises BadRow (mistake; remedy)."""
    view = layout.view(row)
    _check_columns(view, layout)
    match layout.format:
        case "messages":
            return _chat(view, view["messages"], "messages", layout)
        case "sharegpt":
            return _chat(view, _from_sharegpt(view["conversations"], layout), "conversations", layout)
        case "prompt_completion":
            return _prompt_completion(view, layout)
        case "alpaca":
            return _alpaca(view, layout)
        case "text":
            return Passage("", checked_text(view["text"], "text"))


def _check_columns(view: Mapping[str, Any], layout: RowLayout) -> None:
    for column in ROW_COLUMNS[layout.format]:
        theirs = layout.columns.get(column, column)
        if column not in view:
            near = nearest(theirs, [name for name in view if name not in ROW_COLUMNS[layout.format]])
            hint = f"{near!r} is there: rename it" if near else "add it, or remove the row"
            raise BadRow(f"the field {theirs!r} is missing; {hint}")
        if view[column] is None:
            raise BadRow(f"{theirs!r} is null; give it a value, or remove the row")


def _prompt_completion(view: Mapping[str, Any], layout: RowLayout) -> Chat | Passage:
    prompt, completion = view["prompt"], view["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        chat = _chat(view, [*prompt, *completion], "prompt and completion", layout)
        # The prompt's own assistant turns are examples to read, not to learn.
        before = len(chat.messages) - len(completion)
        inside = [index >= before and learned for index, learned in enumerate(chat.learned)]
        if not any(inside):
            raise BadRow("'completion' has no assistant turn to learn; add one")
        return replace(chat, learned=inside)
    if isinstance(prompt, list) or isinstance(completion, list):
        raise BadRow("'prompt' and 'completion' must both be texts or both lists of messages; change one")
    if column := next((column for column in (*OF_CHATS, "history", *REASONING_COLUMNS) if view.get(column)), None):
        theirs = [layout.columns.get(name, name) for name in ("prompt", "completion")]
        line = in_yaml(dict(zip(("instruction", "output"), theirs, strict=True)))
        raise BadRow(f"{column!r} has no place in texts without a chat template; as chats: columns: {line}")
    return Passage(checked_text(prompt, "prompt", may_be_empty=True), checked_text(completion, "completion"))


def _alpaca(view: Mapping[str, Any], layout: RowLayout) -> Chat:
    instruction = checked_text(view["instruction"], "instruction")
    context = checked_text(view.get("input") or "", "input", may_be_empty=True)
    answer = {"role": "assistant", "content": checked_text(view["output"], "output")}
    for column in REASONING_COLUMNS:
        if view.get(column) and "reasoning_content" not in answer:
            answer["reasoning_content"] = checked_text(view[column], column)
    question = f"{instruction}\n\n{context}" if context.strip() else instruction
    return _chat(view, [*_history(view), {"role": "user", "content": question}, answer], "turns", layout)


def _history(view: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Earlier turns of an Alpaca row, given as pairs of question and answer."""
    pairs = view.get("history") or []
    if isinstance(pairs, str):  # in tables
        pairs = json_text(pairs, "history") if pairs.strip() else []
    turns: list[dict[str, Any]] = []
    for index, pair in enumerate(pairs if isinstance(pairs, list) else [pairs]):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"history[{index}] is {json_kind(pair)}; write a list of pairs: [[question, answer], ...]")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append({"role": role, "content": checked_text(text, f"history[{index}]")})
    return turns


def _from_sharegpt(turns: Any, layout: RowLayout) -> list[dict[str, Any]]:
    if not isinstance(turns, list):
        raise BadRow(f"'conversations' must be a list of turns, this is {json_kind(turns)}; write [{{\"from\": ...}}]")
    return [_sharegpt_turn(turn, f"conversations[{index}]", layout) for index, turn in enumerate(turns)]


def _sharegpt_turn(turn: Any, where: str, layout: RowLayout) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadRow(f'{where} must be an object, this is {json_kind(turn)}; write {{"from": ..., "value": ...}}')
    if "role" in turn and "from" not in turn:
        return turn
    for key in ("from", "value"):
        if key not in turn:
            near = nearest(key, turn)
            raise BadRow(f"{where}: {key!r} is missing; " + (f"{near!r} is there: rename it" if near else "add it"))
    speaker, roles = turn["from"], {**SHAREGPT_ROLES, **layout.roles}
    if not isinstance(speaker, str) or speaker not in roles:
        checked_name(speaker, f"{where}: the speaker", SPEAKERS)
        role = OTHER_ROLES.get(speaker.lower()) or role_of_tools(speaker)
        near = None if role else nearest(speaker, roles)
        known = f"did you mean {near!r}?" if near else f"known are {', '.join(SPEAKERS)};"
        line = in_yaml({printable(speaker): role or (roles[near] if near else "user")})
        raise ToldOnce(f"{where}: unknown speaker {speaker!r}; {known} or add roles: {line}", speaker)
    message = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if roles[speaker] == "function_call":
        return message | calls_in(turn["value"], f"{where}: value")
    return message | {"role": roles[speaker], "content": turn["value"]}


def _chat(view: Mapping[str, Any], messages: Any, column: str, layout: RowLayout) -> Chat:
    if not isinstance(messages, list):
        raise BadRow(f'{column!r} must be a list of messages, this is {json_kind(messages)}; write [{{"role": ...}}]')
    if not messages:
        raise BadRow(f"{column!r} is an empty list; give it a user and an assistant turn")
    checked, learned = [], []
    for index, message in enumerate(messages):
        where = f"{column}[{index}]"
        ours = with_our_role(message, layout.roles, where)
        checked.append(read_message(ours, where))
        learned.append(is_learned(ours, where))
    if system := _system(view, checked):
        checked, learned = [system, *checked], [False, *learned]
    _check_turns(checked)
    return Chat(checked, read_tools(view.get("tools")), learned, _template_kwargs(view, layout))


def _system(view: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The system turn from the column of that name; None where there is none, or the messages begin with it."""
    text = checked_text(view.get("system") or "", "system", may_be_empty=True)
    if not text.strip():
        return None
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return {"role": "system", "content": text}
    if first["content"].strip() != text.strip():
        raise BadRow("the column 'system' and the system turn of the messages differ; keep one of them")
    return None


def _template_kwargs(view: Mapping[str, Any], layout: RowLayout) -> dict[str, Any]:
    """Variables for the template: the row's own, else the data set's."""
    own = view.get("chat_template_kwargs") or {}
    if isinstance(own, str):  # in tables
        own = json_text(own, "chat_template_kwargs") if own.strip() else {}
    if not isinstance(own, dict):
        raise BadRow(f"'chat_template_kwargs' must be an object, this is {json_kind(own)}; write {{\"name\": value}}")
    if given := [name for name in own if name in TEMPLATE_ARGUMENTS]:
        raise BadRow(f"chat_template_kwargs: {given[0]!r} is given to the template by this program; remove it")
    check_inside(own, "chat_template_kwargs")
    return {**layout.chat_template_kwargs, **own}


def _check_turns(messages: list[dict[str, Any]]) -> None:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise BadRow("no assistant turn, so nothing to learn; add one, or remove the row")
    if "user" not in roles[: roles.index("assistant")] and "tool" not in roles[: roles.index("assistant")]:
        raise BadRow("the assistant speaks first; begin with a user turn (after an optional system one)")
