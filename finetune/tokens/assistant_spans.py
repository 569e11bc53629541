"""Which parts of a rendered chat are trained on, for any chat template, found by rendering.

Templates with generation marks are rare, and wrong ones not, so marks are not used. Instead each message's texts are
wrapped in private characters, the chat is rendered once more, and the characters show where every text went:

    <|im_start|>user\\n[Hi]<|im_end|>\\n<|im_start|>assistant\\n[Hello]<|im_end|>\\n
                         `------------- tail -------------´`---------------´  learned: answer and end of turn

The tail, from the end of the message before to where an answer begins, is what the template writes as its generation
prompt: what the model is given at inference. What it writes itself is learned, up to and with the first special token
after the answer. When marked and plain rendering differ (a template that looks at its texts), prefixes of the chat
are rendered instead.

Templates for reasoning write an answer otherwise once others follow it, and prompt for one with more than they write
before a finished one. So the last answer follows the prompt itself, and an earlier answer's end of turn is learned only
if the model ends its own turn with it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from finetune.data.messages import reasoning_of
from finetune.data.readers import BadRow
from finetune.tokens.marks import (
    Marked,
    Marks,
    Messages,
    OmittedFromHistory,
    Span,
    Tools,
    absent_part,
    any_of,
    contradiction,
    free_block,
    mark_message,
    texts_of,
)

MOST_SHAPES = 4096  # of chats whose endings are remembered
# What a generation prompt may end with and a finished turn not have: a thinking block, opened, or empty and closed.
_BLOCK = re.compile(r"<think>\s*(</think>\s*)?\Z")


class Renderer(Protocol):
    """ChatTemplate.render."""

    def __call__(self, messages: Messages, tools: Tools, *, generation_prompt: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered chat: its text, what each assistant turn wrote, and texts that only look like control tokens."""

    text: str
    turns: dict[int, Span]  # index of the assistant's message -> characters that the model writes
    literals: list[Span]
    otherwise: Collection[int] = ()  # turns that are written otherwise when they are the last, or prompted otherwise


class SpanFinder:
    """Finds the assistant's spans with one template; remembers the tails and the endings that it has seen."""

    def __init__(self, render: Renderer, special_tokens: Collection[str]) -> None:
        self._render = render
        self.special = any_of(special_tokens)
        self._ends_of_headers = tuple(special_tokens)
        self._tails: dict[tuple[str, bool], str] = {}
        self._endings: dict[Hashable, str | None] = {}
        self._writes_tools: bool | None = None  # not known before the first row that has tools

    def find(self, messages: Messages, tools: Tools, wanted: Collection[int]) -> Rendered:
        """Render a chat and find what its assistant wrote in the messages `wanted`, by index.

        Raises BadRow when the template cannot be followed.
        """
        text = self._render(messages, tools)
        marked = self._mark_and_render(messages, tools)
        followed = marked is not None and marked.text == text
        if not followed:
            self._refuse_literals(messages, tools)
        if tools:
            self._check_tools_kept(messages, tools, text)
        if marked is not None and followed:
            self._check_kept(messages, tools, wanted, marked)
            return self._by_marks(messages, tools, wanted, marked)
        return Rendered(text, {index: self._turn_by_prefix(messages, tools, index, text) for index in wanted}, [])

    def _by_marks(self, messages: Messages, tools: Tools, wanted: Collection[int], marked: Marked) -> Rendered:
        turns, otherwise, unsaid = {}, set(), ""
        for index in wanted:
            turns[index], unsaid = self._turn(messages, tools, index, marked)
            if index + 1 < len(messages):
                turns[index], is_same = self._as_last(messages, tools, index, marked.text, turns[index])
                if unsaid or not is_same:
                    otherwise.add(index)
        rendered = Rendered(marked.text, turns, marked.literals, otherwise)
        return self._after_prompt(messages, tools, rendered, unsaid) if len(messages) - 1 in turns else rendered

    def _check_kept(self, messages: Messages, tools: Tools, wanted: Collection[int], marked: Marked) -> None:
        absent = absent_part(messages, marked, wanted)
        if absent is None:
            return
        index, what = absent
        alone = self._mark_and_render(messages[: index + 1], tools) if index in wanted else None
        if alone is not None and absent_part(messages[: index + 1], alone, [index]) is None:
            raise OmittedFromHistory(what, index)
        raise BadRow(
            f"the chat template leaves out {what} of turn {index + 1} ({messages[index]['role']}); "
            "remove the turn, or give data.chat_template one that writes it"
        )

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

    def _mark_and_render(self, messages: Messages, tools: Tools, *, generation_prompt: bool = False) -> Marked | None:
        marks = Marks(messages, tools, self.special)
        with_marks, fenced_tools = marks.around_messages(), marks.around_literals(tools)
        try:
            rendered = self._render(with_marks, fenced_tools, generation_prompt=generation_prompt)
        except BadRow:  # the plain texts rendered, so it is the marks that the template does not take
            return None
        return marks.take_out(rendered)

    def _turn(self, messages: Messages, tools: Tools, index: int, marked: Marked) -> tuple[Span, str]:
        """Characters that the assistant writes in its turn, answer and end-of-turn token; and what its prompt has more
        than the text before them."""
        if index not in marked.last or index - 1 not in marked.last:
            return self._turn_by_prefix(messages, tools, index, marked.text, marked.literals), ""
        start, unsaid = self._start(messages, tools, index, marked)
        return (start, self._end(marked.text, marked.last[index], marked.first.get(index + 1))), unsaid

    def _start(self, messages: Messages, tools: Tools, index: int, marked: Marked) -> tuple[int, str]:
        before, own = marked.last[index - 1], marked.first[index]
        key = (messages[index - 1]["role"], bool(tools))
        tail, matched = self._tails.get(key), 0
        if tail is not None:
            matched = _common(tail, marked.text, before)
        if tail is None or matched < min(len(tail), own - before):  # not all of the header: the row has another tail
            tail = self._tails[key] = self._tail(messages, tools, index)
            matched = _common(tail, marked.text, before)
        if matched == len(tail):  # an answer may begin with the prompt's end, as <think> written into the content
            return min(before + matched, marked.last[index]), ""
        # The generation prompt continues where a finished turn does not (DeepSeek-R1 opens a thinking block there), so
        # the header is what they share, unless there is more text before the answer that is not the answer's own.
        block = _BLOCK.search(tail)
        if block and matched >= block.start():
            if not marked.text.startswith("<think>", before + block.start()):
                return min(before + block.start(), own), block.group()
            if "</think>" in block.group():
                raise contradiction(index)
            return min(before + matched, own), tail[matched:]
        start = min(before + matched, own)
        is_own = index not in marked.opened and marked.text[:start].endswith(self._ends_of_headers)
        if marked.text[start:own].strip() and not is_own:
            raise BadRow(
                f"cannot find where the chat template's header ends before {marked.text[own : own + 40]!r}; "
                "give data.chat_template one whose generation prompt is how its assistant turns begin"
            )
        return start, tail[matched:]

    def _tail(self, messages: Messages, tools: Tools, index: int) -> str:
        """What the template writes after message index-1 when it asks for an answer."""
        mark = chr(free_block([messages, tools], 2))
        last = mark_message(messages[index - 1], lambda text, _: f"{text.rstrip()}{mark}{text[len(text.rstrip()) :]}")
        prompt = self._prompt([*messages[: index - 1], last], tools)
        return prompt[prompt.rfind(mark) + 1 :]

    def _prompt(self, head: Messages, tools: Tools) -> str:
        """The text that asks for an answer to `head`: with the generation prompt, or with the header that a template
        without one writes before an answer."""
        prompt = self._render(head, tools, generation_prompt=True)
        if prompt != self._render(head, tools):
            return prompt
        mark = chr(free_block([head, tools], 2) + 1)
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

    def _as_last(self, messages: Messages, tools: Tools, index: int, text: str, span: Span) -> tuple[Span, bool]:
        """An earlier turn without an end of turn that the model does not write, and whether the template writes all up
        to there in the same way when nothing follows. Chats of the same shape are taken to be alike."""
        key = (index, bool(tools), *map(_shape, messages))
        if key not in self._endings:
            if len(self._endings) == MOST_SHAPES:
                self._endings.clear()
            self._endings[key] = self._ending(messages[: index + 1], tools, text[: span[1]])
        ending = self._endings[key]
        if ending is None or text.endswith(ending, 0, span[1]):
            return span, ending is None
        *_, end = self.special.finditer(text, *span)
        return (span[0], end.start()), False

    def _ending(self, messages: Messages, tools: Tools, followed: str) -> str | None:
        """The token that ends the last of these turns; None where their text begins as when others follow."""
        try:
            if self._render(messages, tools).startswith(followed):
                return None
        except BadRow:  # a template that wants something after it: there is nothing to compare with
            return None
        marked = self._mark_and_render(messages, tools)
        if marked is None or len(messages) - 1 not in marked.last:
            return ""
        end = self.special.search(marked.text, marked.last[len(messages) - 1])
        return end.group() if end else ""

    def _after_prompt(self, messages: Messages, tools: Tools, rendered: Rendered, unsaid: str) -> Rendered:
        """The chat with its last answer after the very text that asks for it.

        A thinking block that the prompt opens, and that the template does not write into finished turns, is closed by
        the model: reasoning, if there is any, </think>, and the answer.
        """
        index = len(messages) - 1
        start, end = rendered.turns[index]
        prompt, literals = rendered.text[:start], [span for span in rendered.literals if span[0] < start]
        if list(rendered.turns) == [index] and any(message["role"] == "assistant" for message in messages[:-1]):
            prompt = self._prompt(messages[:-1], tools)
            literals = self.find_literals(messages[:-1], tools, prompt)
            prompt = prompt.removesuffix(unsaid)
        thought = ""
        if not unsaid.strip() or _BLOCK.match(unsaid):
            prompt += unsaid
        if _BLOCK.match(unsaid) and "</think>" not in unsaid:
            thought = f"{reasoning_of(messages[index]).strip()}\n</think>\n\n"
        if prompt == rendered.text[:start]:
            return rendered
        answer = rendered.text[start:]
        if thought:
            answer = answer.lstrip("\n")
        shift = len(prompt) + len(thought) + len(answer) - len(rendered.text)
        literals += [(len(prompt) + at.start(), len(prompt) + at.end()) for at in self.special.finditer(thought)]
        literals += [(first + shift, last + shift) for first, last in rendered.literals if first >= start]
        turns = rendered.turns | {index: (len(prompt), end + shift)}
        return Rendered(prompt + thought + answer, turns, literals, rendered.otherwise)


def _shape(message: dict[str, Any]) -> Hashable:
    """What of a message may decide how templates write others."""
    has_text = bool(message["content"].strip())
    return message["role"], has_text, bool(reasoning_of(message).strip()), len(message.get("tool_calls", ()))


def _common(tail: str, text: str, start: int) -> int:
    """Length of the common prefix of `tail` and text[start:]."""
    if text.startswith(tail, start):
        return len(tail)
    length = 0
    while length < len(tail) and start + length < len(text) and tail[length] == text[start + length]:
        length += 1
    return length
