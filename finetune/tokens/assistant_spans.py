"""Which parts of a rendered chat are trained on, for any chat template, found by rendering.

Templates with generation marks are rare, and wrong ones not, so marks are not used. Instead each message's texts are
wrapped in private characters, the chat is rendered once more, and the characters show where every text went:

    <|im_start|>user\\n[Hi]<|im_end|>\\n<|im_start|>assistant\\n[Hello]<|im_end|>\\n
                         `------------- tail -------------´`---------------´  learned: answer and end of turn

The tail, from the end of the message before to where an answer begins, is what the template writes as its generation
prompt: what the model is given at inference. What it writes itself is learned, up to and with the first special token
after the answer. When marked and plain rendering differ (a template that looks at its texts), prefixes of the chat
are rendered instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from finetune.data.messages import REASONING
from finetune.data.readers import BadRow

_PLANES = (0x100000, 0xF0000)  # Unicode's private planes 16 and 15; icon fonts use the latter
_PLANE_SIZE = 0xFFFE
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
Span = tuple[int, int]
Messages = Sequence[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class Renderer(Protocol):
    """ChatTemplate.render."""

    def __call__(self, messages: Messages, tools: Tools, *, generation_prompt: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered chat: its text, what each assistant turn wrote, and texts that only look like control tokens."""

    text: str
    turns: dict[int, Span]  # index of the assistant's message -> characters that the model writes
    literals: list[Span]


@dataclass(slots=True)
class _Marked:
    """The positions of each message's marks in the plain text."""

    text: str
    first: dict[int, int] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)  # messages whose text is there from its beginning
    last: dict[int, int] = field(default_factory=dict)
    literals: list[Span] = field(default_factory=list)


class SpanFinder:
    """Finds the assistant's spans with one template; remembers the tails it has seen."""

    def __init__(self, render: Renderer, special_tokens: Collection[str]) -> None:
        self._render = render
        self.special = any_of(special_tokens)
        self._ends_of_headers = tuple(special_tokens)
        self._tails: dict[tuple[str, bool], str] = {}
        self._writes_tools: bool | None = None  # not known before the first row that has tools

    def find(self, messages: Messages, tools: Tools) -> Rendered:
        """Render a chat and find what its assistant wrote. Raises BadRow when the template cannot be followed."""
        text = self._render(messages, tools)
        marked = self._mark_and_render(messages, tools)
        followed = marked is not None and marked.text == text
        if not followed:
            self._refuse_literals(messages, tools)
        if tools:
            self._check_tools_kept(messages, tools, text)
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if marked is None or not followed:
            by_prefix = {index: self._turn_by_prefix(messages, tools, index, text) for index in answers}
            return Rendered(text, by_prefix, [])
        _check_kept(messages, marked)
        return Rendered(text, {index: self._turn(messages, tools, index, marked) for index in answers}, marked.literals)

    def _check_tools_kept(self, messages: Messages, tools: Tools, text: str) -> None:
        if self._writes_tools is None:
            self._writes_tools = self._render(messages, None) != text
        if not self._writes_tools:
            raise BadRow(
                "the chat template does not write the row's tools; remove them, or give data.chat_template one"
            )

    def find_literals(self, messages: Messages, tools: Tools, prompt: str) -> list[Span]:
        """Texts in a rendered prompt that only look like control tokens. Raises BadRow."""
        if not any(self.special.search(part) for part in texts_of([messages, tools])):
            return []
        marked = self._mark_and_render(messages, tools, generation_prompt=True)
        if marked is None or marked.text != prompt:
            self._refuse_literals(messages, tools)
        return marked.literals if marked else []

    def _refuse_literals(self, messages: Messages, tools: Tools) -> None:
        spelt = next((token for part in texts_of([messages, tools]) if (token := self.special.search(part))), None)
        if spelt:
            raise BadRow(
                f"the text spells the control token {spelt.group()!r}, and the chat template changes it on its way; "
                "remove it from the row"
            )

    def _mark_and_render(self, messages: Messages, tools: Tools, *, generation_prompt: bool = False) -> _Marked | None:
        size = 2 * len(messages) + 4
        block = _free_block([messages, tools], size)
        fence = chr(block) + r"\g<0>" + chr(block + 1)

        def marker(index: int) -> Callable[[str], str]:
            opening, closing = chr(block + 2 * index + 4), chr(block + 2 * index + 5)

            def mark(text: str) -> str:
                core = text.strip()  # marks are inside of the space that many templates trim
                if not core:
                    return text
                start = text.index(core)
                fenced = self.special.sub(fence, core)
                return f"{text[:start]}{opening}{fenced}{closing}{text[start + len(core) :]}"

            return mark

        with_marks = [_mark_message(message, marker(index)) for index, message in enumerate(messages)]
        fenced_tools = tools and _maptexts_of(tools, lambda text: self.special.sub(fence, text))
        try:
            rendered = self._render(with_marks, fenced_tools, generation_prompt=generation_prompt)
        except BadRow:  # the plain texts rendered, so it is the marks that the template does not take
            return None
        return _unmark(rendered, block, size)

    def _turn(self, messages: Messages, tools: Tools, index: int, marked: _Marked) -> Span:
        """Characters that the assistant writes in its turn: answer and end-of-turn token."""
        if index not in marked.last or index - 1 not in marked.last:
            return self._turn_by_prefix(messages, tools, index, marked.text, marked.literals)
        start = self._start(messages, tools, index, marked)
        return start, self._end(marked.text, marked.last[index], marked.first.get(index + 1))

    def _start(self, messages: Messages, tools: Tools, index: int, marked: _Marked) -> int:
        before, own = marked.last[index - 1], marked.first[index]
        key = (messages[index - 1]["role"], bool(tools))
        tail, matched = self._tails.get(key), 0
        if tail is not None:
            matched = _common(tail, marked.text, before)
        if tail is None or matched < min(len(tail), own - before):  # not all of the header: the row has another tail
            tail = self._tails[key] = self._tail(messages, tools, index)
            matched = _common(tail, marked.text, before)
        if matched == len(tail):
            return min(before + matched, own)
        # The generation prompt continues where a finished turn does not (DeepSeek-R1 opens a thinking block there), so
        # the header is what they share, unless there is more text before the answer that is not the answer's own.
        start = min(before + matched, own)
        is_own = index not in marked.opened and marked.text[:start].endswith(self._ends_of_headers)
        if marked.text[start:own].strip() and not is_own:
            raise BadRow(
                f"cannot find where the chat template's header ends before {marked.text[own : own + 40]!r}; "
                "give data.chat_template one whose generation prompt is how its assistant turns begin"
            )
        return start

    def _tail(self, messages: Messages, tools: Tools, index: int) -> str:
        """What the template writes after message index-1 when it asks for an answer."""
        mark = chr(_free_block([messages, tools], 2))
        last = _mark_message(messages[index - 1], lambda text: f"{text.rstrip()}{mark}{text[len(text.rstrip()) :]}")
        prompt = self._prompt([*messages[: index - 1], last], tools)
        return prompt[prompt.rfind(mark) + 1 :]

    def _prompt(self, head: Messages, tools: Tools) -> str:
        """The text that asks for an answer to `head`: with the generation prompt, or with the header that a template
        without one writes before an answer."""
        prompt = self._render(head, tools, generation_prompt=True)
        if prompt != self._render(head, tools):
            return prompt
        mark = chr(_free_block([head, tools], 2) + 1)
        answered = self._render([*head, {"role": "assistant", "content": mark}], tools)
        header = answered[len(prompt) : answered.find(mark)] if answered.startswith(prompt) else ""
        return prompt + header if header.strip() else prompt

    def _end(self, text: str, after: int, limit: int | None) -> int:
        match = self.special.search(text, after)
        if match is None or (limit is not None and match.start() >= limit):
            raise BadRow(
                "the chat template writes no end-of-turn token after the assistant's text, so the model would not "
                "learn to stop; give data.chat_template one that does, for example {{ eos_token }}"
            )
        return match.end()

    def _turn_by_prefix(
        self, messages: Messages, tools: Tools, index: int, text: str, literals: Sequence[Span] = ()
    ) -> Span:
        """From the end of the prompt for an answer to the last special token of the chat that ends with it."""
        prompt, turn = self._prompt(messages[:index], tools), self._render(messages[: index + 1], tools)
        if not (text.startswith(prompt) and text.startswith(turn)):
            raise BadRow(
                f"cannot find turn {index + 1} in the chat template's text; "
                "change the row, or give data.chat_template another"
            )
        closing = [match.end() for match in self.special.finditer(turn, len(prompt)) if match.span() not in literals]
        return len(prompt), closing[-1] if closing else self._end(text, len(turn), None)


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest where one begins another; never when there are none."""
    longest_first = sorted(tokens, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _check_kept(messages: Messages, marked: _Marked) -> None:
    for index, message in enumerate(messages):
        if index not in marked.last and (message["content"].strip() or "tool_calls" in message):
            what = "text" if message["content"].strip() else "tool call"
            raise BadRow(
                f"the chat template leaves out the {what} of turn {index + 1} ({message['role']}); "
                "remove the turn, or give data.chat_template one that writes it"
            )


def _unmark(marked: str, block: int, size: int) -> _Marked:
    """The text without marks, and where they stood. Relative codes 0 and 1 fence literals, 4 up are messages'."""
    result, parts, position, copied, fence_from = _Marked(""), [], 0, 0, 0
    for match in re.finditer(f"[{chr(block)}-{chr(block + size - 1)}]", marked):
        parts.append(marked[copied : match.start()])
        position += match.start() - copied
        copied = match.end()
        code = ord(match.group()) - block
        if code == 0:
            fence_from = position
        elif code == 1:
            result.literals.append((fence_from, position))
        else:
            result.first.setdefault((code - 4) // 2, position)
            if code % 2 == 0 and result.first[(code - 4) // 2] == position:
                result.opened.add((code - 4) // 2)
            result.last[(code - 4) // 2] = position
    result.text = "".join([*parts, marked[copied:]])
    return result


def _mark_message(message: dict[str, Any], mark: Callable[[str], str]) -> dict[str, Any]:
    """Marks on content, reasoning, and the names and arguments of tool calls; ids and types stay as they are."""
    marked = dict(message)
    for key in ("content", *REASONING):
        if key in marked:
            marked[key] = mark(marked[key])
    if "tool_calls" in marked:
        marked["tool_calls"] = [
            call | {"function": call["function"] | {
                "name": mark(call["function"]["name"]), "arguments": _maptexts_of(call["function"]["arguments"], mark)
            }}
            for call in marked["tool_calls"]
        ]  # fmt: skip
    return marked


def _maptexts_of(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _maptexts_of(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_maptexts_of(item, change) for item in value]
    return value


def texts_of(value: Any) -> list[str]:
    """Every text inside a JSON value."""
    texts: list[str] = []
    _maptexts_of(value, lambda text: texts.append(text) or text)  # type: ignore[func-returns-value]
    return texts


def _free_block(value: Any, size: int) -> int:
    """First of `size` private characters in a row that the value's own texts do not use."""
    used = {ord(char) for text in texts_of(value) if not text.isascii() for char in _PRIVATE.findall(text)}
    for plane in _PLANES:
        for block in range(plane, plane + _PLANE_SIZE - size, size):
            if not used or not any(block <= code < block + size for code in used):
                return block
    raise BadRow("the row uses nearly all private characters of Unicode, which this program needs; remove some")


def _common(tail: str, text: str, start: int) -> int:
    """Length of the common prefix of `tail` and text[start:]."""
    if text.startswith(tail, start):
        return len(tail)
    length = 0
    while length < len(tail) and start + length < len(text) and tail[length] == text[start + length]:
        length += 1
    return length
