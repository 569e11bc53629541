"""Check a row strictly by its data set's layout, and convert it to one of four forms.

Chat     messages as chat templates read them (messages, sharegpt, alpaca, prompt/completion as messages)
Passage  a prompt and its continuation, without a template (text, prompt/completion as texts)
Pair     a chosen and a rejected answer to one prompt, two Chats or two Passages (preference)
Judged   an answer that is wanted or not, a Chat or a Passage (kto)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.data.columns import REASONING_COLUMNS, RowLayout, in_yaml
from finetune.data.messages import (
    OTHER_ROLES,
    ReportedOnce,
    calls_in,
    check_inside,
    checked_name,
    checked_text,
    is_supervised,
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
SPEAKERS = ("human", "gpt", "system", "function_call", "observation")  # the speakers that messages name


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as a template reads them, and which of them are supervised."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    supervised: list[bool]  # per message: an assistant's whose weight is not 0
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables for the template


@dataclass(frozen=True, slots=True)
class Passage:
    """A prompt and its continuation; plain text has an empty prompt."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt. Both begin with the prompt, and only what follows it is supervised."""

    chosen: Chat | Passage
    rejected: Chat | Passage


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer that is wanted or not. Only what follows the prompt is supervised."""

    answer: Chat | Passage
    desirable: bool


Content = Chat | Passage | Pair | Judged


def documents_in(content: Content) -> tuple[Chat | Passage, ...]:
    """What a row holds: one chat or text, or a pair's chosen and rejected one."""
    match content:
        case Pair():
            return content.chosen, content.rejected
        case Judged():
            return (content.answer,)
        case _:
            return (content,)


def by_turn(chat: Chat) -> list[Chat]:
    """A chat for each supervised turn, which is its last message and its only supervised one."""
    return [
        replace(chat, messages=chat.messages[: index + 1], supervised=[False] * index + [True])
        for index, supervised in enumerate(chat.supervised)
        if supervised
    ]


def read_row(row: Mapping[str, Any], layout: RowLayout) -> Content:
    """The row in its common form, checked strictly. Raises BadRow (mistake; remedy)."""
    view = layout.view(row)
    for column in ROW_COLUMNS[layout.format]:
        theirs = layout.columns.get(column, column)
        if column not in view:
            near = nearest(theirs, [name for name in view if name not in ROW_COLUMNS[layout.format]])
            hint = f"{near!r} is there: rename it" if near else "add it, or remove the row"
            raise BadRow(f"the field {theirs!r} is missing; {hint}")
        if view[column] is None:
            raise BadRow(f"{theirs!r} is null; give it a value, or leave such rows out: drop: [empty]")
    match layout.format:
        case "messages":
            return _chat(view, view["messages"], "messages", layout)
        case "sharegpt":
            turns = view["conversations"]
            if not isinstance(turns, list):
                kind = json_kind(turns)
                raise BadRow(f"'conversations' must be a list of turns, this is {kind}; write [{{\"from\": ...}}]")
            messages = [_sharegpt_turn(turn, f"conversations[{index}]", layout) for index, turn in enumerate(turns)]
            return _chat(view, messages, "conversations", layout)
        case "prompt_completion":
            return _prompt_completion(view, layout)
        case "alpaca":
            return _alpaca(view, layout)
        case "text":
            return Passage("", _needed_text(view, "text", layout))
        case "preference":
            return _pair(view, layout)
        case "kto":
            return _judged(view, layout)


def _pair(view: Mapping[str, Any], layout: RowLayout) -> Pair:
    """Two answers after one prompt. Without a prompt column it is the common beginning of both lists of messages."""
    chosen, rejected, prompt = view["chosen"], view["rejected"], view.get("prompt")
    lists = [isinstance(answer, list) for answer in (chosen, rejected)]
    if lists[0] != lists[1]:
        raise BadRow("'chosen' and 'rejected' must both be texts or both lists of messages; change one")
    if not lists[0]:
        if isinstance(prompt, list):  # texts that answer a chat
            answers = [[{"role": "assistant", "content": _needed_text(view, name, layout)}] for name in _ANSWERS]
            return _pair_of_lists(view, prompt, answers, layout)
        if prompt is None:
            raise BadRow("'prompt' is missing beside answers that are texts; add it, or columns: {prompt: ...}")
        text = checked_text(prompt, layout.place("prompt"), may_be_empty=True)
        return Pair(*(Passage(text, _needed_text(view, name, layout)) for name in _ANSWERS))
    common = 0
    for ours, theirs in zip(chosen, rejected, strict=False):
        if ours != theirs:
            break
        common += 1
    if not chosen or not rejected:
        raise BadRow(f"{'chosen' if not chosen else 'rejected'!r} is an empty list; give it an assistant turn")
    if common == len(chosen) or common == len(rejected):
        common = min(len(chosen), len(rejected)) - 1  # equal answers: the last turn is the answer
    begins = chosen[:common]
    if isinstance(prompt, list) and begins[: len(prompt)] != prompt:
        begins = [*prompt, *begins]  # the answers hold only what follows the prompt
    return _pair_of_lists(view, begins, [chosen[common:], rejected[common:]], layout)


_ANSWERS = ("chosen", "rejected")


def _pair_of_lists(view: Mapping[str, Any], prompt: list[Any], answers: Sequence[list[Any]], layout: RowLayout) -> Pair:
    chats = [_answered(view, prompt, answer, name, layout) for name, answer in zip(_ANSWERS, answers, strict=True)]
    return Pair(*chats)


def _answered(view: Mapping[str, Any], prompt: list[Any], answer: list[Any], name: str, layout: RowLayout) -> Chat:
    """A prompt's chat with an answer, whose assistant turns alone are supervised. Raises BadRow."""
    place = layout.place(name)
    if not answer:
        raise BadRow(f"{place} has no answer after the prompt; add an assistant turn, or remove the row")
    chat = _chat(view, [*prompt, *answer], name, layout)
    before = len(chat.messages) - len(answer)
    if chat.messages[-1]["role"] != "assistant":
        role = chat.messages[-1]["role"]
        raise BadRow(f"{place} ends with a {role} turn; an answer ends with an assistant turn")
    if not any(message["content"].strip() or message.get("tool_calls") for message in chat.messages[before:]):
        raise BadRow(f"{place} is empty; give it a text, or remove the row")
    supervised = [index >= before and chat.supervised[index] for index in range(len(chat.messages))]
    return replace(chat, supervised=supervised)


def _judged(view: Mapping[str, Any], layout: RowLayout) -> Judged:
    """An answer with its label: true or false, or 1 or 0."""
    prompt, completion, label = view["prompt"], view["completion"], view["label"]
    words = {"true": True, "1": True, "false": False, "0": False}
    wanted = label if isinstance(label, bool) else words.get(str(label).strip().lower())
    if wanted is None:
        raise BadRow(f"{layout.place('label')} is {str(label)[:40]!r}; write true for a wanted answer, else false")
    if isinstance(prompt, list):
        if not isinstance(completion, list):
            completion = [{"role": "assistant", "content": _needed_text(view, "completion", layout)}]
        return Judged(_answered(view, prompt, completion, "completion", layout), wanted)
    if isinstance(completion, list):
        raise BadRow("'prompt' and 'completion' must both be texts or both lists of messages; change one")
    text = checked_text(prompt, layout.place("prompt"), may_be_empty=True)
    return Judged(Passage(text, _needed_text(view, "completion", layout)), wanted)


def _prompt_completion(view: Mapping[str, Any], layout: RowLayout) -> Chat | Passage:
    prompt, completion = view["prompt"], view["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        chat = _chat(view, [*prompt, *completion], "prompt and completion", layout)
        # The prompt's own assistant turns are context, and not supervised.
        prompt_messages = len(chat.messages) - len(completion)
        supervised = [index >= prompt_messages and chat.supervised[index] for index in range(len(chat.messages))]
        if not any(supervised):
            raise BadRow("'completion' has no assistant turn to supervise; add one")
        return replace(chat, supervised=supervised)
    if isinstance(prompt, list) or isinstance(completion, list):
        raise BadRow("'prompt' and 'completion' must both be texts or both lists of messages; change one")
    for column in (*OF_CHATS, "history", *REASONING_COLUMNS):
        if view.get(column):
            columns = {
                "instruction": layout.columns.get("prompt", "prompt"),
                "output": layout.columns.get("completion", "completion"),
            }
            line = in_yaml(columns)
            raise BadRow(f"{column!r} has no place in texts without a chat template; as chats: columns: {line}")
    prompt_text = checked_text(prompt, layout.place("prompt"), may_be_empty=True)
    return Passage(prompt_text, _needed_text(view, "completion", layout))


def _needed_text(view: Mapping[str, Any], column: str, layout: RowLayout) -> str:
    """A column's text, which must not be empty. Messages name the data set's column. Raises BadRow."""
    value, place = view[column], layout.place(column)
    if isinstance(value, str) and not value.strip():
        raise BadRow(f"{place} is empty; give it a text, or leave such rows out: drop: [empty]")
    return checked_text(value, place)


def _alpaca(view: Mapping[str, Any], layout: RowLayout) -> Chat:
    question = _needed_text(view, "instruction", layout)
    context = checked_text(view.get("input") or "", layout.place("input"), may_be_empty=True)
    if context.strip():
        question = f"{question}\n\n{context}"
    answer = {"role": "assistant", "content": _needed_text(view, "output", layout)}
    for column in REASONING_COLUMNS:
        if view.get(column) and "reasoning_content" not in answer:
            answer["reasoning_content"] = checked_text(view[column], layout.place(column))

    # Earlier turns are pairs of question and answer.
    pairs = view.get("history") or []
    if isinstance(pairs, str):  # in tables
        pairs = json_text(pairs, "history") if pairs.strip() else []
    turns: list[dict[str, Any]] = []
    for index, pair in enumerate(pairs if isinstance(pairs, list) else [pairs]):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"history[{index}] is {json_kind(pair)}; write a list of pairs: [[question, answer], ...]")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append({"role": role, "content": checked_text(text, f"history[{index}]")})
    return _chat(view, [*turns, {"role": "user", "content": question}, answer], "turns", layout)


def _sharegpt_turn(turn: Any, place: str, layout: RowLayout) -> dict[str, Any]:
    """A ShareGPT turn as a message."""
    if not isinstance(turn, dict):
        raise BadRow(f'{place} must be an object, this is {json_kind(turn)}; write {{"from": ..., "value": ...}}')
    if "role" in turn and "from" not in turn:
        return turn
    for key in ("from", "value"):
        if key not in turn:
            near = nearest(key, turn)
            hint = f"{near!r} is there: rename it" if near else "add it"
            raise BadRow(f"{place}: {key!r} is missing; {hint}")
    speaker, roles = turn["from"], {**SHAREGPT_ROLES, **layout.roles}
    if not isinstance(speaker, str) or speaker not in roles:
        checked_name(speaker, f"{place}: the speaker", SPEAKERS)
        role = OTHER_ROLES.get(speaker.lower()) or role_of_tools(speaker)
        known = f"known are {', '.join(SPEAKERS)};"
        near = None if role else nearest(speaker, roles)
        if near:
            role, known = roles[near], f"did you mean {near!r}?"
        line = in_yaml({printable(speaker): role or "user"})
        raise ReportedOnce(f"{place}: unknown speaker {speaker!r}; {known} or add roles: {line}", speaker)
    message = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if roles[speaker] == "function_call":
        return message | calls_in(turn["value"], f"{place}: value")
    return message | {"role": roles[speaker], "content": turn["value"]}


def _chat(view: Mapping[str, Any], messages: Any, column: str, layout: RowLayout) -> Chat:
    """The chat of a row's messages, with its system column, tools and template variables."""
    if not isinstance(messages, list):
        raise BadRow(f'{column!r} must be a list of messages, this is {json_kind(messages)}; write [{{"role": ...}}]')
    if not messages:
        raise BadRow(f"{column!r} is an empty list; give it a user and an assistant turn")
    checked, supervised = [], []
    for index, message in enumerate(messages):
        place = f"{column}[{index}]"
        message = with_our_role(message, layout.roles, place)
        checked.append(read_message(message, place))
        supervised.append(is_supervised(message, place))

    system = checked_text(view.get("system") or "", layout.place("system"), may_be_empty=True)
    if system.strip():
        if checked[0]["role"] not in ("system", "developer"):
            checked, supervised = [{"role": "system", "content": system}, *checked], [False, *supervised]
        elif checked[0]["content"].strip() != system.strip():
            raise BadRow("the column 'system' and the system turn of the messages differ; keep one of them")

    roles = [message["role"] for message in checked]
    if "assistant" not in roles:
        raise BadRow("no assistant turn, so nothing is supervised; add one, or remove the row")
    if not {"user", "tool"} & {*roles[: roles.index("assistant")]}:
        raise BadRow("the assistant speaks first; begin with a user turn (after an optional system one)")
    return Chat(checked, read_tools(view.get("tools")), supervised, _template_kwargs(view, layout))


def _template_kwargs(view: Mapping[str, Any], layout: RowLayout) -> dict[str, Any]:
    """Variables for the template: the row's own, else the data set's."""
    variables = view.get("chat_template_kwargs") or {}
    if isinstance(variables, str):  # in tables
        variables = json_text(variables, "chat_template_kwargs") if variables.strip() else {}
    if not isinstance(variables, dict):
        kind = json_kind(variables)
        raise BadRow(f"'chat_template_kwargs' must be an object, this is {kind}; write {{\"name\": value}}")
    for name in variables:
        if name in TEMPLATE_ARGUMENTS:
            raise BadRow(f"chat_template_kwargs: {name!r} is given to the template by this program; remove it")
    check_inside(variables, "chat_template_kwargs")
    return {**layout.chat_template_kwargs, **variables}
