"""Mark a chat's texts with private Unicode characters, which show where a template wrote each text.

A message has a pair of marks for its content, one for each tool call's name, and one for everything else. Only a
name's first place counts, because some templates write it again in the header of the tool's answer.

    rendered with marks     <user>[Hi]<end><bot>(Hello)<end>      [ ] and ( ) stand for private characters
    taken out               <user>Hi<end><bot>Hello<end>          and the positions where Hi and Hello stand
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.data.cells import BadRow
from finetune.data.chat import REASONING

_PLANES = (0x100000, 0xF0000)  # Unicode's private planes 16 and 15; icon fonts use the latter
_PLANE_SIZE = 0xFFFE
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
# A chat's private characters, counted from the first: a pair of fences around a text that spells a control token, one
# mark after each tool's name, then a pair for each part of each message.
FENCE_BEGIN, FENCE_END, TOOL, FIRST_PART = 0, 1, 2, 3
ELSE, CONTENT, CALLS = 0, 1, 2  # a message's parts; its calls are the parts from CALLS on
Span = tuple[int, int]
Part = tuple[int, int]  # the message's index, and ELSE, CONTENT, or CALLS + the call's number
Messages = Sequence[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class OmittedFromHistory(BadRow):
    """A supervised turn that the template writes incompletely in history. Reported once for a data set."""

    def __init__(self, does: str, index: int) -> None:
        """`does`: the template's action on the turn, as in "leaves out the text of"."""
        super().__init__(
            f"the chat template {does} turn {index + 1}, which is supervised; set data.train_on: "
            "each_turn (every answer an example of its own) or completion, or weight 0 on that turn"
        )


class ReasoningAfterClosedBlock(BadRow):
    """A turn with reasoning after a prompt that forbids it."""

    def __init__(self, index: int) -> None:
        super().__init__(
            f"turn {index + 1} has reasoning, and the chat template's prompt for it holds a closed thinking block; set "
            "chat_template_kwargs: {enable_thinking: true}, or remove the reasoning"
        )


@dataclass(slots=True)
class Marked:
    """Where each message's marks stood in the plain text."""

    text: str
    first: dict[int, int] = field(default_factory=dict)
    # Messages whose first mark is an opening one: nothing is cut off there.
    opened: set[int] = field(default_factory=set)
    last: dict[int, int] = field(default_factory=dict)
    begun: set[Part] = field(default_factory=set)  # parts with their beginning in the text
    ended: set[Part] = field(default_factory=set)  # parts with their end in the text
    has_tools: bool = False
    literals: list[Span] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)  # each mark's (position, message), in order


class Marks:
    """One chat's marks: private characters that its texts do not use."""

    def __init__(self, messages: Messages, tools: Tools, special: re.Pattern[str]) -> None:
        """Raises BadRow if the texts use nearly all private characters themselves."""
        self._messages, self._special = messages, special
        self._parts: list[Part] = [
            (index, part)
            for index, message in enumerate(messages)
            for part in range(CALLS + len(message.get("tool_calls", ())))
        ]
        self._size = FIRST_PART + 2 * len(self._parts)
        self._block = free_block([messages, tools], self._size)

    def around_messages(self) -> list[dict[str, Any]]:
        """The messages with marks around their texts."""
        openings = {part: self._block + FIRST_PART + 2 * number for number, part in enumerate(self._parts)}

        def marked(index: int, message: dict[str, Any]) -> dict[str, Any]:
            def mark(text: str, part: int) -> str:
                # Many templates trim white space, so the marks stand inside it: " Hi " becomes " [Hi] ".
                core = text.strip()
                if not core:
                    return text
                start, opening = text.index(core), openings[index, part]
                before, after = text[:start], text[start + len(core) :]
                return f"{before}{chr(opening)}{self._fenced(core)}{chr(opening + 1)}{after}"

            return mark_message(message, mark)

        return [marked(index, message) for index, message in enumerate(self._messages)]

    def around_tools(self, tools: Tools) -> Tools:
        """The tools with a mark after each name. Text that equals a control token gets a fence before and after it."""
        if not tools:
            return tools
        fenced: list[dict[str, Any]] = map_texts(tools, self._fenced)
        for tool in fenced:
            function = tool.get("function", tool)
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                function["name"] += chr(self._block + TOOL)
        return fenced

    def _fenced(self, text: str) -> str:
        return self._special.sub(chr(self._block + FENCE_BEGIN) + r"\g<0>" + chr(self._block + FENCE_END), text)

    def take_out(self, marked: str) -> Marked:
        """Take the marks out, and note the positions where they stood."""
        result, pieces, position, copied, fence_begin = Marked(""), [], 0, 0, 0
        seen: set[int] = set()
        for match in re.finditer(f"[{chr(self._block)}-{chr(self._block + self._size - 1)}]", marked):
            pieces.append(marked[copied : match.start()])
            position += match.start() - copied
            copied = match.end()
            code = ord(match.group()) - self._block
            if code == FENCE_BEGIN:
                fence_begin = position
                continue
            if code == FENCE_END:
                result.literals.append((fence_begin, position))
                continue
            if code == TOOL:
                result.has_tools = True
                continue
            # A pair of codes for each part: even opens it, odd closes it.
            number, is_closing = divmod(code - FIRST_PART, 2)
            index, part = self._parts[number]
            if part >= CALLS and code in seen:  # the template writes a call's name again
                continue
            seen.add(code)
            if is_closing:
                result.ended.add((index, part))
            else:
                result.begun.add((index, part))
            result.first.setdefault(index, position)
            if not is_closing and result.first[index] == position:
                result.opened.add(index)
            result.last[index] = position
            result.places.append((position, index))
        result.text = "".join([*pieces, marked[copied:]])
        return result


def absent_part(messages: Messages, marked: Marked, supervised: Collection[int]) -> tuple[int, str] | None:
    """The first message with a text or a call that the template left out, and the part.

    The text of a message that is not `wanted` counts as written if one of its marks is there.
    """
    for index, message in enumerate(messages):
        is_kept = index in marked.last
        if index in supervised:  # it must be complete; only a thought at its start may be written elsewhere
            content = (index, CONTENT)
            is_kept = content in marked.ended and (content in marked.begun or "</think>" in message["content"])
        if message["content"].strip() and not is_kept:
            return index, "the text"
        names = [call["function"]["name"].strip() for call in message.get("tool_calls", ())]
        for number, name in enumerate(names):
            if name and (index, CALLS + number) not in marked.ended:
                if len(names) == 1:
                    return index, "the tool call"
                return index, f"tool call {number + 1}"
    return None


def mark_message(message: dict[str, Any], mark: Callable[[str, int], str]) -> dict[str, Any]:
    """Apply mark(text, part) to content, reasoning, and calls' names and arguments; ids and types stay as they are."""
    marked = dict(message)
    for key, part in (("content", CONTENT), *((key, ELSE) for key in REASONING)):
        if key in marked:
            marked[key] = mark(marked[key], part)
    if "tool_calls" in marked:
        marked["tool_calls"] = [
            call | {"function": call["function"] | {
                "name": mark(call["function"]["name"], part),
                "arguments": map_texts(call["function"]["arguments"], lambda text: mark(text, ELSE)),
            }}
            for part, call in enumerate(marked["tool_calls"], CALLS)
        ]  # fmt: skip
    return marked


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the tokens; the longest wins. Without tokens it matches nothing."""
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Change each text inside a JSON value; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_texts(item, change) for item in value]
    return value


def texts_of(value: Any) -> list[str]:
    """Every text inside a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [text for item in value for text in texts_of(item)]


def free_block(value: Any, size: int) -> int:
    """The first character in a block with `size` private characters, all unused by the value's own texts."""
    used = {ord(character) for text in texts_of(value) if not text.isascii() for character in _PRIVATE.findall(text)}
    for plane in _PLANES:
        for block in range(plane, plane + _PLANE_SIZE - size, size):
            if not used or not any(block <= code < block + size for code in used):
                return block
    raise BadRow("the row uses nearly all private characters of Unicode, which this program needs; remove some")
