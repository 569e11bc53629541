"""A row becomes a chat, a passage, a pair or a judged answer.

Chat     messages as chat templates read them (messages, ShareGPT, Alpaca, prompt and completion as messages)
Passage  a prompt and its continuation, without a template (text, prompt and completion as texts)
Pair     a chosen and a rejected answer to one prompt, two Chats or two Passages (preference)
Judged   a wanted or unwanted answer, a Chat or a Passage (kto)

Each row is checked strictly. Each layout has its function; `_make_chat` and `read_message` check what they share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from typing import Any

from finetune.data.cells import (
    OTHER_ROLES,
    ROLES,
    BadRow,
    check_inside,
    checked_text,
    is_blank,
    json_kind,
    json_text,
    missing_hint,
    nearest,
    parsed_cell,
    turns_in,
)
from finetune.data.layout import REASONING_COLUMNS, RowLayout
from finetune.data.readings import QUESTION_WORDS, in_yaml, label_of
from finetune.output_stream import printable
from finetune.recipe.layouts import LAYOUTS, OF_CHATS
from finetune.recipe.sections.data import TEMPLATE_ARGUMENTS

REASONING = ("reasoning_content", "thinking", "reasoning")
# Columns, message keys and kinds of content parts that hold no text.
MEDIA = ("image", "images", "image_url", "video", "videos", "video_url", "audio", "audios", "audio_url", "input_audio")
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "weight", *REASONING)
# A message's own key for its weight, in other tools too -> whether true means supervised.
TURN_WEIGHTS = {"weight": True, "loss": True, "loss_mask": True, "train": True, "training": True, "trainable": True,
           "mask": False, "masked": False}  # fmt: skip
# A call's arguments, by OpenAI's name and by those of Llama, LangChain, Anthropic and others.
ARGUMENTS = ("arguments", "parameters", "args", "params", "kwargs", "input", "tool_input", "action_input")
CALL_KEYS = ("name", "type", "id", "index", "call_id", "function")  # the others that a call may have
SCHEMAS = ("parameters", "input_schema", "inputSchema")  # a tool's schema, by OpenAI's name, Anthropic's and MCP's
LONGEST_ROLE = 100  # characters
COMPARED_KEYS = 20  # a message's unknown keys that are compared with ours, in case they are misspelt
_CALLS = re.compile(r"(?:^|[-_ ]|tool|function)(?:call|use$|invo[ck]|action)", re.IGNORECASE)
_TOOL_WORDS = re.compile(r"tool|function|observ|ipython|interpreter|environment|plugin|^api|_api", re.IGNORECASE)
_RESULT_WORDS = re.compile(r"result|response|output|return|repl[yi]|observ", re.IGNORECASE)
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "function_call",
}  # fmt: skip
SPEAKERS = ("human", "gpt", "system", "function_call", "observation")  # the speakers that messages name


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as a template reads them, with a supervised flag for each."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    supervised: list[bool]  # per message: an assistant turn without weight 0
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables for the template


@dataclass(frozen=True, slots=True)
class Passage:
    """A prompt and its continuation; plain text has an empty prompt."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt. Both begin with the prompt; only the turns or text after it are supervised."""

    chosen: Chat | Passage
    rejected: Chat | Passage


@dataclass(frozen=True, slots=True)
class Judged:
    """A wanted or unwanted answer. Only the turns or text after the prompt are supervised."""

    answer: Chat | Passage
    desirable: bool


Content = Chat | Passage | Pair | Judged


def documents_in(content: Content) -> tuple[Chat | Passage, ...]:
    """A row's documents: one chat or text, or a pair's chosen and rejected one."""
    match content:
        case Pair():
            return content.chosen, content.rejected
        case Judged():
            return (content.answer,)
        case _:
            return (content,)


def last_answer(document: Chat | Passage) -> str:
    """The last supervised answer as it is written; empty for a tool call, and for a text without a question."""
    if isinstance(document, Passage):
        return document.completion if document.prompt else ""
    turns = zip(document.messages, document.supervised, strict=True)
    answers = [message for message, supervised in turns if supervised and message["role"] == "assistant"]
    content = answers[-1].get("content") if answers and not answers[-1].get("tool_calls") else ""
    return content if isinstance(content, str) else ""


def by_turn(chat: Chat) -> list[Chat]:
    """One chat for each supervised turn. The turn is the chat's last message, and no other is supervised."""
    return [
        replace(chat, messages=chat.messages[: index + 1], supervised=[False] * index + [True])
        for index, supervised in enumerate(chat.supervised)
        if supervised
    ]


def read_row(row: Mapping[str, Any], layout: RowLayout) -> Content:
    """Check a row strictly, and convert it. Raises BadRow (mistake; remedy)."""
    view = layout.view(row)
    for column in LAYOUTS[layout.format].columns:
        theirs = layout.columns.get(column, column)
        if column not in view:
            near = nearest(theirs, [name for name in view if name not in LAYOUTS[layout.format].columns])
            raise BadRow(f"the field {theirs!r} is missing; {missing_hint(near, 'add it, or remove the row')}")
        if view[column] is None:
            raise BadRow(f"{theirs!r} is null; give it a value, or leave such rows out: drop: [empty]")
    match layout.format:
        case "messages":
            return _make_chat(view, view["messages"], "messages", layout)
        case "sharegpt":
            turns = view["conversations"]
            if not isinstance(turns, list):
                kind = json_kind(turns)
                raise BadRow(f"'conversations' must be a list of turns, this is {kind}; write [{{\"from\": ...}}]")
            messages = [
                _read_sharegpt_turn(turn, f"conversations[{index}]", layout) for index, turn in enumerate(turns)
            ]
            return _make_chat(view, messages, "conversations", layout)
        case "prompt_completion":
            return _read_prompt_completion(view, layout)
        case "alpaca":
            return _read_alpaca(view, layout)
        case "text":
            return Passage("", _needed_text(view, "text", layout))
        case "preference":
            return _read_pair(view, layout)
        case "kto":
            return _read_judged(view, layout)


_ANSWERS = ("chosen", "rejected")
OTHER_SPEAKERS = tuple(role for role in ROLES if role != "assistant")


def _read_pair(view: Mapping[str, Any], layout: RowLayout) -> Pair:
    """Two answers after one prompt. Two whole dialogues have their common beginning as prompt.

    prompt       chosen                    read as
    text         text                      passages, without a template
    instruction  text                      chats: a user's message and the answer
    messages     text, or messages         chats: the prompt's messages and the answer
    text         messages                  chats: the dialogue, or the text as a user's message before the answer
    none         messages                  chats: the dialogue
    """
    are_texts = [isinstance(view[name], str) for name in _ANSWERS]
    if are_texts[0] != are_texts[1]:
        ours, theirs = (layout.place(name) for name in _ANSWERS)
        kinds = " and ".join(json_kind(view[name]) for name in _ANSWERS)
        raise BadRow(f"{ours} and {theirs} are {kinds}; write both as texts, or both as lists of messages")
    prompt = _prompt_before(view, layout, answers_are_texts=are_texts[0])
    if isinstance(prompt, str):
        return Pair(*(Passage(prompt, _needed_text(view, name, layout)) for name in _ANSWERS))
    chosen, rejected = (_read_dialogue(view, name, layout) for name in _ANSWERS)
    common = 0
    for turn, other_turn in zip(chosen, rejected, strict=False):
        if turn != other_turn:
            break
        common += 1
    # If both dialogues are equal, the last turn is the answer. `prepare` leaves such a pair out, and counts it.
    common = min(common, len(chosen) - 1, len(rejected) - 1)
    for name, dialogue, other in (("chosen", chosen, "rejected"), ("rejected", rejected, "chosen")):
        role = dialogue[common].get("role")
        if role in OTHER_SPEAKERS:
            place = f"{layout.place(name)}[{common}]"
            raise BadRow(
                f"{place} is a {role} turn that {layout.place(other)} does not have; give both answers one prompt, and "
                "begin them with an assistant turn"
            )
    prompt = _prompt_unless_repeated(view, prompt, chosen[:common], "chosen", layout)
    return Pair(
        _chat_with_answer(view, prompt, chosen, common, "chosen", layout),
        _chat_with_answer(view, prompt, rejected, common, "rejected", layout),
    )


def _read_judged(view: Mapping[str, Any], layout: RowLayout) -> Judged:
    """An answer with its label. In a whole dialogue, the answer is the turns after the last user turn."""
    label = view["label"]
    verdict = label_of(label, layout.labels)
    if verdict is None:
        shown = printable(str(label)[:40])
        raise BadRow(
            f"{layout.place('label')} is {shown!r}, neither wanted nor unwanted; write true for a wanted answer, false "
            f"for another, or say it in the recipe: labels: {in_yaml({shown: '...'})}"
        )
    prompt = _prompt_before(view, layout, answers_are_texts=isinstance(view["completion"], str))
    if isinstance(prompt, str):
        return Judged(Passage(prompt, _needed_text(view, "completion", layout)), verdict)
    completion = _read_dialogue(view, "completion", layout)
    replies = [index + 1 for index, turn in enumerate(completion) if turn.get("role") == "user"]
    common = min(max(replies, default=0), len(completion) - 1)
    prompt = _prompt_unless_repeated(view, prompt, completion[:common], "completion", layout)
    return Judged(_chat_with_answer(view, prompt, completion, common, "completion", layout), verdict)


def _read_dialogue(view: Mapping[str, Any], name: str, layout: RowLayout) -> list[dict[str, Any]]:
    """An answer as turns. A text becomes one assistant turn. Raises BadRow."""
    if isinstance(view[name], str):
        return [{"role": "assistant", "content": _needed_text(view, name, layout)}]
    return _read_turns(view[name], name, layout)


def _prompt_unless_repeated(
    view: Mapping[str, Any], prompt: list[dict[str, Any]], begins: list[dict[str, Any]], name: str, layout: RowLayout
) -> list[dict[str, Any]]:
    """The prompt; empty if the dialogue holds the question itself. Raises BadRow.

    Args:
        begins: The dialogue's turns before the answer.
    """
    if all(turn.get("role") in ("system", "developer", "assistant") for turn in [*prompt, *begins]):
        raise BadRow(
            f"'prompt' is missing, and {layout.place(name)} holds no question; add it, or columns: {{prompt: ...}}"
        )
    if begins[: len(prompt)] == prompt:
        return []
    if not any(turn.get("role") in ("user", "tool") for turn in begins):
        return prompt
    if not isinstance(view.get("prompt"), list):
        return []  # the prompt is a text; `leaves_out_prompt` says whether it differs from the dialogue's question
    if all(turn.get("role") in ("system", "developer") for turn in prompt):
        return prompt
    ours, theirs = layout.place("prompt"), layout.place(name)
    raise BadRow(f"{ours} and the turns that {theirs} begins with differ; give {theirs} only what follows {ours}")


def leaves_out_prompt(row: Mapping[str, Any], layout: RowLayout, read: Pair | Judged) -> bool:
    """Whether a row's text prompt is not read, because its answers are dialogues with another question."""
    view = layout.view(row)
    text = view.get("instruction") or view.get("prompt")
    document = documents_in(read)[0]
    if not isinstance(text, str) or not isinstance(document, Chat):
        return False
    return bool(text.strip()) and not any(text.strip() in message["content"] for message in document.messages)


def _read_turns(value: Any, column: str, layout: RowLayout) -> list[dict[str, Any]]:
    """Messages with OpenAI's keys, from OpenAI's or ShareGPT's turns, or from one turn alone. Raises BadRow."""
    if isinstance(value, dict):
        value = [value]
    place = layout.place(column)
    if not isinstance(value, list):
        raise BadRow(f'{place} is {json_kind(value)}; write a text, or a list of messages: [{{"role": ...}}]')
    if not value:
        raise BadRow(f"{place} is an empty list; give it a turn, or remove the row")
    turns = []
    for index, turn in enumerate(value):
        if not isinstance(turn, dict):
            raise BadRow(
                f'{place}[{index}] is {json_kind(turn)}; write one answer: a text, or messages like {{"role": ...}}'
            )
        if "from" in turn:
            turns.append(_read_sharegpt_turn(turn, f"{place}[{index}]", layout))
        else:
            turns.append(with_our_role(turn, layout.roles, f"{place}[{index}]"))
    return turns


def _prompt_before(
    view: Mapping[str, Any], layout: RowLayout, *, answers_are_texts: bool
) -> str | list[dict[str, Any]]:
    """The prompt of the answers: a text without a template, or messages; empty if the answers are whole dialogues."""
    prompt, named = view.get("prompt"), {"prompt", "instruction"} & {*layout.columns, *layout.template}
    if view.get("instruction") is not None and named != {"prompt"}:
        if prompt is not None and named != {"instruction"}:
            raise BadRow("'prompt' and 'instruction' are both there; name the one to read: columns: {instruction: ...}")
        return [{"role": "user", "content": _question(view, layout)}]
    if view.get("input"):
        line = in_yaml({"instruction": layout.columns.get("prompt", "prompt")})
        raise BadRow(f"{layout.place('input')} belongs to a question that becomes a chat; write columns: {line}")
    if prompt is None:
        if not answers_are_texts:
            return []
        answer = next(name for name in (*_ANSWERS, "completion") if name in view)
        others = [name for name, value in view.items() if isinstance(value, str) and name not in (*_ANSWERS, answer)]
        question = next((name for name in (*QUESTION_WORDS, *others) if name in others), "...")
        line = in_yaml({**layout.columns, "instruction": question})
        raise BadRow(f"'prompt' is missing beside answers that are texts; add it, or columns: {line}")
    if isinstance(prompt, list | dict):
        turns = _read_turns(prompt, "prompt", layout)
        if turns[-1].get("role") == "assistant":
            raise BadRow(f"{layout.place('prompt')} ends with an assistant turn; end it with the turn that is answered")
        return turns
    text = checked_text(prompt, layout.place("prompt"), may_be_empty=True)
    if answers_are_texts:
        for column in (*OF_CHATS, *REASONING_COLUMNS):
            if view.get(column):
                line = in_yaml({"instruction": layout.columns.get("prompt", "prompt")})
                raise BadRow(f"{column!r} has no place in texts without a chat template; as chats: columns: {line}")
        return text
    if not text.strip():
        return []
    return [{"role": "user", "content": text}]


def is_blank_turn(turn: Any) -> bool:
    """Whether a turn has no text and no calls."""
    if not isinstance(turn, dict) or turn.get("tool_calls") or not {"content", "value"} & {*turn}:
        return False
    text = turn.get("content", turn.get("value"))
    return text is None or (isinstance(text, str) and is_blank(text))


def _chat_with_answer(
    view: Mapping[str, Any],
    prompt: Sequence[dict[str, Any]],
    dialogue: Sequence[dict[str, Any]],
    common: int,
    name: str,
    layout: RowLayout,
) -> Chat:
    """A prompt and a dialogue as one chat. The dialogue's assistant turns from `common` on are supervised."""
    place = layout.place(name)
    if is_blank_turn(dialogue[-1]):
        raise BadRow(f"{place} is empty; give it a text, or leave such rows out: drop: [empty]")
    # No roles: `_turns` has renamed them already.
    chat = _make_chat(view, [*prompt, *dialogue], place.strip("'"), replace(layout, roles={}), before=len(prompt))
    last = chat.messages[-1]["role"]
    if last != "assistant":
        raise BadRow(f"{place} ends with a {last} turn; an answer ends with an assistant turn")
    problem = f"{place} has no supervised assistant turn; remove its weight 0, or remove the row"
    return _supervised_from(chat, len(dialogue) - common, problem)


def _supervised_from(chat: Chat, last: int, problem: str) -> Chat:
    """The chat with only its `last` messages supervised. Raises BadRow(problem) if none of them is an answer."""
    context = len(chat.messages) - last
    supervised = [False] * context + chat.supervised[context:]
    if not any(supervised):
        raise BadRow(problem)
    return replace(chat, supervised=supervised)


def _read_prompt_completion(view: Mapping[str, Any], layout: RowLayout) -> Chat | Passage:
    prompt, completion = view["prompt"], view["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):  # a text beside turns is one turn
        if not isinstance(prompt, list):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(completion, list):
            completion = [{"role": "assistant", "content": completion}]
        chat = _make_chat(view, [*prompt, *completion], "prompt and completion", layout)
        # The prompt's own assistant turns are context, and not supervised.
        return _supervised_from(chat, len(completion), "'completion' has no assistant turn to supervise; add one")
    for column in (*OF_CHATS, "history", *REASONING_COLUMNS):
        if view.get(column):
            names = {"instruction": "prompt", "output": "completion"}
            line = in_yaml({ours: layout.columns.get(name, name) for ours, name in names.items()})
            raise BadRow(f"{column!r} has no place in texts without a chat template; as chats: columns: {line}")
    prompt_text = checked_text(prompt, layout.place("prompt"), may_be_empty=True)
    return Passage(prompt_text, _needed_text(view, "completion", layout))


def _needed_text(view: Mapping[str, Any], column: str, layout: RowLayout) -> str:
    """A column's text, which must not be empty. Messages name the data set's column. Raises BadRow."""
    value, place = view[column], layout.place(column)
    if isinstance(value, str) and is_blank(value):
        raise BadRow(f"{place} is empty; give it a text, or leave such rows out: drop: [empty]")
    if isinstance(turns_in(value, place, always=False), list):
        line = in_yaml({"messages": layout.columns.get(column, column)})
        raise BadRow(f"{place} holds turns as text; read them as a chat: columns: {line}")
    return checked_text(value, place)


def _question(view: Mapping[str, Any], layout: RowLayout) -> str:
    """Alpaca's question: the instruction, then an empty line and the input if there is one. Raises BadRow."""
    question = _needed_text(view, "instruction", layout)
    context = checked_text(view.get("input") or "", layout.place("input"), may_be_empty=True)
    if context.strip():
        return f"{question}\n\n{context}"
    return question


def _read_alpaca(view: Mapping[str, Any], layout: RowLayout) -> Chat:
    question = _question(view, layout)
    answer = {"role": "assistant", "content": _needed_text(view, "output", layout)}
    for column in REASONING_COLUMNS:
        if view.get(column) and "reasoning_content" not in answer:
            answer["reasoning_content"] = checked_text(view[column], layout.place(column))

    # Earlier turns are pairs of question and answer.
    pairs = parsed_cell(view.get("history") or [], "history", empty=[])
    if not isinstance(pairs, list):
        pairs = [pairs]  # refused below, by name
    turns: list[dict[str, Any]] = []
    for index, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2:
            raise BadRow(f"history[{index}] is {json_kind(pair)}; write a list of pairs: [[question, answer], ...]")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            turns.append({"role": role, "content": checked_text(text, f"history[{index}]")})
    return _make_chat(view, [*turns, {"role": "user", "content": question}, answer], "turns", layout)


def _read_sharegpt_turn(turn: Any, place: str, layout: RowLayout) -> dict[str, Any]:
    """A ShareGPT turn as a message."""
    if not isinstance(turn, dict):
        raise BadRow(f'{place} must be an object, this is {json_kind(turn)}; write {{"from": ..., "value": ...}}')
    if "role" in turn and "from" not in turn:
        return turn
    for key in ("from", "value"):
        if key not in turn:
            raise BadRow(f"{place}: {key!r} is missing; {missing_hint(nearest(key, turn), 'add it')}")
    speaker, roles = turn["from"], {**SHAREGPT_ROLES, **layout.roles}
    if not isinstance(speaker, str) or speaker not in roles:
        checked_name(speaker, f"{place}: the speaker", SPEAKERS)
        role = OTHER_ROLES.get(speaker.lower()) or role_of_tools(speaker)
        known = f"known are {', '.join(SPEAKERS)};"
        if not role and (near := nearest(speaker, roles)):
            role, known = roles[near], f"did you mean {near!r}?"
        line = in_yaml({printable(speaker): role or "user"})
        raise ReportedOnce(f"{place}: unknown speaker {speaker!r}; {known} or add roles: {line}", speaker)
    message = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if roles[speaker] == "function_call":
        return message | calls_in(turn["value"], f"{place}: value")
    return message | {"role": roles[speaker], "content": turn["value"]}


def _make_chat(view: Mapping[str, Any], messages: Any, column: str, layout: RowLayout, *, before: int = 0) -> Chat:
    """A row's messages as a chat, with its system column, tools and template variables.

    Args:
        before: How many messages come from the column `prompt`; the others come from `column`.
    """
    if not isinstance(messages, list):
        raise BadRow(f'{column!r} must be a list of messages, this is {json_kind(messages)}; write [{{"role": ...}}]')
    if not messages:
        raise BadRow(f"{column!r} is an empty list; give it a user and an assistant turn")
    checked, supervised = [], []
    for index, message in enumerate(messages):
        place = f"{column}[{index - before}]"
        if index < before:
            place = f"prompt[{index}]"
        message = with_our_role(message, layout.roles, place)
        checked.append(read_message(message, place))
        supervised.append(is_supervised(message, place))

    # A `system` column may repeat the system turn, but not contradict it.
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
    tools = read_tools(view.get("tools"))
    variables = parsed_cell(view.get("chat_template_kwargs") or {}, "chat_template_kwargs", empty={})
    if not isinstance(variables, dict):
        kind = json_kind(variables)
        raise BadRow(f"'chat_template_kwargs' must be an object, this is {kind}; write {{\"name\": value}}")
    for name in variables:
        if name in TEMPLATE_ARGUMENTS:
            raise BadRow(f"chat_template_kwargs: {name!r} is given to the template by this program; remove it")
    check_inside(variables, "chat_template_kwargs")
    # The row's variables override the data set's.
    return Chat(checked, tools, supervised, {**layout.chat_template_kwargs, **variables})


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
    """Whether a message is supervised: an assistant turn without weight 0, or another tool's key for it.

    {"weight": 0}, {"loss": false}, {"trainable": false} and {"mask": true} mean the same. Raises BadRow.
    """
    weights: dict[bool, str] = {}  # supervised or not -> the key that says so
    for key, meaning in TURN_WEIGHTS.items():
        value = message.get(key)
        if value is None:
            continue
        # True equals 1 in Python. `weight` itself takes numbers alone.
        if value not in (0, 1) or (key == "weight" and isinstance(value, bool)):
            read_only = int(not meaning)
            remedy = f"write {read_only} (read only) or {1 - read_only} (supervised)"
            raise BadRow(f"{place}: {key} is {json_kind(value)}; {remedy}")
        weights[bool(value) is meaning] = key
    if len(weights) == 2:
        raise BadRow(f"{place}: {weights[True]} and {weights[False]} contradict each other; keep one of them")
    if True in weights and message["role"] != "assistant":
        key, role = weights[True], message["role"]
        mark = f"{key} {int(TURN_WEIGHTS[key])}"
        raise BadRow(f"{place}: {mark} on a {role} turn; only assistant turns are supervised: remove it")
    return bool(message["role"] == "assistant") and False not in weights


def read_message(message: Any, place: str) -> dict[str, Any]:
    """Check and convert a message: no nulls, no weights, each call's arguments as an object. Raises BadRow."""
    if not isinstance(message, dict):
        raise BadRow(f'{place} must be an object, this is {json_kind(message)}; write {{"role": ...}}')
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
    result = {key: value for key, value in message.items() if value is not None and key not in TURN_WEIGHTS}
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
    may_be_empty = "tool_calls" in result or role == "tool"
    if "content" not in message and not may_be_empty:
        near = nearest("content", [key for key in message if key not in MESSAGE_KEYS], cutoff=0.6)
        near = near or next((key for key in ("value", "text") if key in message), None)
        raise BadRow(f"{place}: 'content' is missing; {missing_hint(near, 'add it')}")
    content = message.get("content")
    if content is None and may_be_empty:
        content = ""
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
    result["content"] = checked_text(content, f"{place}.content", may_be_empty=may_be_empty)
    return result


@lru_cache(maxsize=1024)  # a comparison takes 13 us, and most messages of a data set have the same keys
def _our_key(key: str) -> str | None:
    return nearest(key, MESSAGE_KEYS, cutoff=0.75)


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


def _checked_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Calls in OpenAI's form, their arguments as objects. They stand beside the name, or beside `function`.

    {"name": "look", "args": {"at": 1}} becomes {"type": "function", "function": {"name": "look", "arguments": ...}}.
    A call without a key for them has no arguments. If it has unknown keys instead, they may be meant. Raises BadRow.
    """
    if not isinstance(calls, list):
        raise BadRow(f'{place} must be a list, this is {json_kind(calls)}; write [{{"type": "function", ...}}]')
    result = []
    for index, call in enumerate(calls):
        function = None
        if isinstance(call, dict):
            function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRow(f'{place}[{index}]: a call needs a function name; write {{"function": {{"name": ...}}}}')
        checked_text(function["name"], f"{place}[{index}]: name")
        # A table gives every row the columns of the others, with nulls.
        given = {key: value for key, value in {**call, **function}.items() if value is not None}
        names = [key for key in ARGUMENTS if key in given]
        unknown = [key for key in given if key not in ARGUMENTS and key not in CALL_KEYS]
        if len(names) > 1:
            raise BadRow(f"{place}[{index}]: {names[0]!r} and {names[1]!r} are both there; give the arguments once")
        if not names and unknown:
            problem = f"'arguments' is missing, and {unknown[0]!r} is unknown; rename it, or add arguments: {{}}"
            raise BadRow(f"{place}[{index}]: {problem}")
        arguments = given[names[0]] if names else {}
        if isinstance(arguments, str):  # as OpenAI; templates want the object
            arguments = json_text(arguments or "{}", f"{place}[{index}]: {names[0]}")
        if not isinstance(arguments, dict):
            kind = json_kind(arguments)
            raise BadRow(f"{place}[{index}]: {names[0]} must be an object, not {kind}; write {{...}}")
        check_inside(arguments, f"{place}[{index}]: arguments")
        outside = {key: value for key, value in call.items() if value is not None and key not in ("name", *ARGUMENTS)}
        inside = {"name": function["name"]}
        if function is not call:
            inside = {key: value for key, value in function.items() if key not in ARGUMENTS}
        elif outside.get("type") != "custom":  # tool_call, tool_use, function_call: the same in other tools
            outside["type"] = "function"
        result.append({"type": "function", **outside, "function": {**inside, "arguments": arguments}})
    return result


def read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """A row's tool schemas, given as a list or as its JSON text; None without tools. Raises BadRow.

    Servers send each tool as {"type": "function", "function": {"name", "description", "parameters"}}. A tool that
    stands bare in the row gets this envelope, so that a template writes the same text when the model is served.
    """
    tools = parsed_cell(tools, "tools", empty=None)
    if not tools and (tools is None or isinstance(tools, list)):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"'tools' must be a list of JSON schemas, this is {json_kind(tools)}; write [{{\"type\": ...}}]")
    check_inside(tools, "tools")
    result = []
    for tool in tools:
        if isinstance(tool.get("function"), dict):
            tool = {"type": "function", **tool}
        elif isinstance(tool.get("name"), str) and tool.get("type", "function") == "function":
            schema = next((key for key in SCHEMAS if key in tool), None)
            function = {"parameters" if key == schema else key: value for key, value in tool.items() if key != "type"}
            tool = {"type": "function", "function": function}
        result.append(tool)  # one that is no function stays as it is: {"type": "web_search"}
    return result
