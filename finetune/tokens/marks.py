"""Marks in a chat's texts, private characters of Unicode, that show where a template wrote each of them.

A message has a pair of marks for its content, one for the name of each of its tool calls, and one for all else. A name
counts where it is written first: some templates write it again in the header of the tool's answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from finetune.data.messages import REASONING
from finetune.data.readers import BadRow

_PLANES = (0x100000, 0xF0000)  # Unicode's private planes 16 and 15; icon fonts use the latter
_PLANE_SIZE = 0xFFFE
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
FENCES = 3  # codes around a text that spells a control token, and one for tools; message codes follow
ELSE, CONTENT, CALLS = 0, 1, 2  # parts of a message; CALLS and up are those of its calls
Span = tuple[int, int]
Part = tuple[int, int]  # message, and which of its texts
Messages = Sequence[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class OmittedFromHistory(BadRow):
    """A supervised turn that the template writes incompletely because others follow. Told once for each data set."""

    def __init__(self, does: str, index: int) -> None:
        """`does`: what the template does to the turn, as in "leaves out the text of"."""
        super().__init__(
            f"the chat template {does} turn {index + 1}, which is learned; set data.train_on: "
            "each_turn (every answer an example of its own) or completion, or weight 0 on that turn"
        )


class ReasoningAfterClosedBlock(BadRow):
    """A turn with reasoning after a prompt that forbids it."""

    def __init__(self, index: int, remedy: str = "remove the reasoning") -> None:
        self.index = index
        super().__init__(
            f"turn {index + 1} has reasoning, and the chat template's prompt for it holds a closed thinking block; "
            f"{remedy}"
        )


@dataclass(slots=True)
class Marked:
    """The positions of each message's marks in the plain text."""

    text: str
    first: dict[int, int] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)  # messages whose text is there from its beginning
    last: dict[int, int] = field(default_factory=dict)
    begun: set[Part] = field(default_factory=set)  # parts with their beginning in the text
    ended: set[Part] = field(default_factory=set)  # parts with their end in the text
    has_tools: bool = False
    literals: list[Span] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)  # (position, message) of each mark, in order


class Marks:
    """The private characters of one chat."""

    def __init__(self, messages: Messages, tools: Tools, special: re.Pattern[str]) -> None:
        """Raises BadRow where the texts use nearly all private characters themselves."""
        self._messages, self._special = messages, special
        self._parts: list[Part] = [
            (index, part)
            for index, message in enumerate(messages)
            for part in range(CALLS + len(message.get("tool_calls", ())))
        ]
        self._size = FENCES + 2 * len(self._parts)
        self._block = free_block([messages, tools], self._size)

    def around_messages(self) -> list[dict[str, Any]]:
        """The messages with marks around their texts."""
        opening = {part: chr(self._block + FENCES + 2 * at) for at, part in enumerate(self._parts)}
        return [
            mark_message(message, partial(self._mark, [opening[index, part] for part in range(CALLS + calls)]))
            for index, message in enumerate(self._messages)
            for calls in [len(message.get("tool_calls", ()))]
        ]

    def around_tools(self, tools: Tools) -> Tools:
        """The tools with a mark after each name, and fences around text that spells a control token."""
        if not tools:
            return tools
        fenced: list[dict[str, Any]] = map_texts(tools, self._fenced)
        for tool in fenced:
            function = tool.get("function", tool)
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                function["name"] += chr(self._block + 2)
        return fenced

    def _fenced(self, text: str) -> str:
        return self._special.sub(chr(self._block) + r"\g<0>" + chr(self._block + 1), text)

    def _mark(self, opening: Sequence[str], text: str, part: int) -> str:
        core = text.strip()  # marks are inside of the space that many templates trim
        if not core:
            return text
        start, mark = text.index(core), opening[part]
        return f"{text[:start]}{mark}{self._fenced(core)}{chr(ord(mark) + 1)}{text[start + len(core) :]}"

    def take_out(self, marked: str) -> Marked:
        """The text without marks, and where they stood."""
        result, parts, position, copied, fence_from = Marked(""), [], 0, 0, 0
        seen: set[int] = set()
        for match in re.finditer(f"[{chr(self._block)}-{chr(self._block + self._size - 1)}]", marked):
            parts.append(marked[copied : match.start()])
            position += match.start() - copied
            copied = match.end()
            code = ord(match.group()) - self._block
            if code == 0:
                fence_from = position
            elif code == 1:
                result.literals.append((fence_from, position))
            elif code == 2:
                result.has_tools = True
            elif self._parts[(code - FENCES) // 2][1] < CALLS or code not in seen:
                seen.add(code)
                self._note(result, code - FENCES, position)
        result.text = "".join([*parts, marked[copied:]])
        return result

    def _note(self, result: Marked, code: int, position: int) -> None:
        index, part = self._parts[code // 2]
        (result.ended if code % 2 else result.begun).add((index, part))
        result.first.setdefault(index, position)
        if code % 2 == 0 and result.first[index] == position:
            result.opened.add(index)
        result.last[index] = position
        result.places.append((position, index))


def absent_part(messages: Messages, marked: Marked, wanted: Collection[int]) -> tuple[int, str] | None:
    """The first message of which a text or a call is not there (of those not `wanted`: nothing of it), and which."""
    for index, message in enumerate(messages):
        is_kept = index in marked.last
        if index in wanted:  # it must be complete; a thought at its beginning may be written elsewhere
            content = (index, CONTENT)
            is_kept = content in marked.ended and (content in marked.begun or "</think>" in message["content"])
        if message["content"].strip() and not is_kept:
            return index, "the text"
        names = [call["function"]["name"].strip() for call in message.get("tool_calls", ())]
        for call, name in enumerate(names):
            if name and (index, CALLS + call) not in marked.ended:
                return index, f"tool call {call + 1}" if names[1:] else "the tool call"
    return None


def mark_message(message: dict[str, Any], mark: Callable[[str, int], str]) -> dict[str, Any]:
    """mark(text, part) on content, reasoning, and the names and arguments of calls; ids and types stay as they are."""
    marked = dict(message)
    for key in ("content", *REASONING):
        if key in marked:
            marked[key] = mark(marked[key], CONTENT if key == "content" else ELSE)
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
    """Matches any of the tokens, the longest where one begins another; never when there are none."""
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with each text inside of it changed; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_texts(item, change) for item in value]
    return value


def texts_of(value: Any) -> list[str]:
    """Every text inside a JSON value."""
    texts: list[str] = []
    map_texts(value, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
    return texts


def free_block(value: Any, size: int) -> int:
    """First of `size` private characters in a row that the value's own texts do not use."""
    used = {ord(char) for text in texts_of(value) if not text.isascii() for char in _PRIVATE.findall(text)}
    for plane in _PLANES:
        for block in range(plane, plane + _PLANE_SIZE - size, size):
            if not used or not any(block <= code < block + size for code in used):
                return block
    raise BadRow("the row uses nearly all private characters of Unicode, which this program needs; remove some")
