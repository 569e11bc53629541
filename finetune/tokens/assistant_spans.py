"""Finds the supervised parts of a rendered chat by rendering, for any chat template.

Three renderings show the model's text in turn i, because inference renders in the same way:

    prompt = render(messages[:i], add_generation_prompt=True)   the model's input
    turn   = render(messages[:i + 1])                           the input and the answer
    whole  = render(messages)                                   the row: its tokens come from this text

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    `------------------- prompt ------------------´`- supervised -´

The answer is the part of `turn` after `prompt`. It ends with the token on which the model stops, the last control
token of the turn. Some templates write one more token at the end of every document (Phi-3: end-of-text); that token is
not part of the turn. The model does not stop on a token that also stands between two calls of one answer.

The last message's answer always follows its exact prompt. Some templates begin a finished turn in another way than
their prompt ends (DeepSeek-R1's prompt opens a thinking block). Then the answer is put after the prompt, or the row is
refused.

An earlier answer lies in `whole`. If `whole` begins with that answer's turn, its place is known. Otherwise the template
writes history in another way (Qwen3 drops reasoning). Then marks, private characters around each message's texts, show
where the turn is (marks.py), and the turn's closing text is compared with the one in `turn`.

Marks also show the texts that a template leaves out, and control tokens that are only spelt in the texts. No row uses
anything remembered from another row: a row's tokens and mask depend on that row alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from finetune.data.messages import REASONING, reasoning_of
from finetune.data.readers import BadRow
from finetune.tokens.marks import (
    Marked,
    Marks,
    Messages,
    OmittedFromHistory,
    ReasoningAfterClosedBlock,
    Span,
    Tools,
    absent_part,
    any_of,
    texts_of,
)

# A thinking block, opened, or empty and closed. A generation prompt may end with it although a finished turn lacks it.
_BLOCK = re.compile(r"<think>\s*(</think>\s*)?\Z")
_OWN_BLOCK = re.compile(r"<think>(.*?)</think>\s*", re.DOTALL)
_PROBE = "\U000f0000"  # a text that no template contains
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
_PROBE_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "a"}}}


class Renderer(Protocol):
    """ChatTemplate.render."""

    def __call__(self, messages: Messages, tools: Tools, *, generation_prompt: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered chat: its text, the part that each assistant turn wrote, and texts that look like control tokens."""

    text: str
    turns: dict[int, Span]  # index of the assistant's message -> characters that the model writes
    literals: list[Span]
    otherwise: Collection[int] = ()  # turns with another text or prompt when they are the last
    stops: Collection[str] = ()  # the control tokens that end these turns


@dataclass(frozen=True, slots=True)
class _Chat:
    """A chat, or the beginning of one, as the template writes it."""

    messages: Messages
    text: str
    marked: Marked | None  # None: marks change what the template writes
    literals: list[Span]


@dataclass(frozen=True, slots=True)
class _Answer:
    """A chat's last turn, after its prompt."""

    text: str
    begin: int  # where the texts of the message before it end
    prompt: int  # the prompt's length in characters
    stop: int  # end of the token on which the model stops
    token: str  # that token
    literals: list[Span]
    is_plain: bool  # whether the template itself writes this text


@dataclass(frozen=True, slots=True)
class _Habits:
    """Habits of a template in every chat. They are found by rendering probe chats, never from rows."""

    stop: str | None  # the token on which an answer in words ends
    closing: str  # text after a document's last turn
    between: frozenset[str]  # tokens between the calls of one answer


class SpanFinder:
    """Finds the assistant's spans with one template."""

    def __init__(self, render: Renderer, special_tokens: Collection[str]) -> None:
        self._render = render
        self.special = any_of(special_tokens)
        self._habits_of: dict[bool, _Habits] = {}  # by whether there are tools

    def find(self, messages: Messages, tools: Tools, wanted: Collection[int]) -> Rendered:
        """Render a chat and find the assistant's text in the messages with the indices `wanted`.

        Raises BadRow when the template cannot be followed.
        """
        whole = self._chat(messages, tools)
        self._check_tools_kept(whole, tools)
        self._check_kept(whole, tools, wanted)
        last, turns, otherwise, stops = len(messages) - 1, {}, set(), set()
        for index in sorted(wanted):
            if index == last:
                continue
            turns[index], is_same, stop = self._earlier(whole, tools, index)
            stops.add(stop)
            if not is_same:
                otherwise.add(index)
        if last not in wanted:
            return Rendered(whole.text, turns, whole.literals, otherwise, stops)
        answer = self._answer(whole, tools, self._render(messages[:-1], tools, generation_prompt=True))
        text, literals, span = answer.text, answer.literals, (answer.prompt, answer.stop)
        if turns and not text.startswith(whole.text[: turns[max(turns)][1]]):
            # The prompt for the last answer writes earlier turns in another way than the finished chat, and the
            # finished chat's form is supervised. Keep that history, and put only the prompt's end before the answer.
            begin = self._begin(whole, last)
            shift = begin - answer.begin
            text = whole.text[:begin] + text[answer.begin :]
            literals = [at for at in whole.literals if at[1] <= begin]
            literals += [(first + shift, end + shift) for first, end in answer.literals if first >= answer.begin]
            span = (span[0] + shift, span[1] + shift)
        turns[last] = span
        return Rendered(text, turns, literals, otherwise, stops | {answer.token})

    def find_literals(self, messages: Messages, tools: Tools, prompt: str) -> list[Span]:
        """Texts in a rendered prompt that only look like control tokens. Raises BadRow."""
        if not self._spelt(messages, tools):
            return []
        marked = self._mark_and_render(messages, tools, generation_prompt=True)
        if marked is None or marked.text != prompt:
            self._refuse_literals(messages, tools)
        return marked.literals if marked else []

    # -- rendering ---------------------------------------------------------------------------------------------------

    def _chat(self, messages: Messages, tools: Tools, *, generation_prompt: bool = False, text: str = "") -> _Chat:
        """The chat rendered plain and with marks. Pass `text` if the plain text is already known."""
        text = text or self._render(messages, tools, generation_prompt=generation_prompt)
        marked = self._mark_and_render(messages, tools, generation_prompt=generation_prompt)
        if marked is None or marked.text != text:
            self._refuse_literals(messages, tools)
            return _Chat(messages, text, None, [])
        return _Chat(messages, text, marked, marked.literals)

    def _mark_and_render(self, messages: Messages, tools: Tools, *, generation_prompt: bool = False) -> Marked | None:
        marks = Marks(messages, tools, self.special)
        with_marks, marked_tools = marks.around_messages(), marks.around_tools(tools)
        try:
            rendered = self._render(with_marks, marked_tools, generation_prompt=generation_prompt)
        except BadRow:  # the plain texts rendered, so the template refuses the marks
            return None
        return marks.take_out(rendered)

    def _spelt(self, messages: Messages, tools: Tools) -> re.Match[str] | None:
        return next((token for part in texts_of([messages, tools]) if (token := self.special.search(part))), None)

    def _refuse_literals(self, messages: Messages, tools: Tools) -> None:
        if spelt := self._spelt(messages, tools):
            raise BadRow(
                f"the text spells the control token {spelt.group()!r}, and the chat template changes it on its way; "
                "remove it from the row"
            )

    # -- the last turn -----------------------------------------------------------------------------------------------

    def _answer(self, chat: _Chat, tools: Tools, prompt: str) -> _Answer:
        """The chat's last turn, after its prompt. Raises BadRow."""
        index = len(chat.messages) - 1
        if chat.text.startswith(prompt):
            begin, own = (chat.marked.last.get(at, 0) if chat.marked else 0 for at in (index - 1, index))
            token = self._stop(chat, chat.text, chat.literals, len(prompt), own, tools)
            return _Answer(chat.text, begin, len(prompt), token.end(), token.group(), chat.literals, is_plain=True)
        before = self._chat(chat.messages[:-1], tools, generation_prompt=True, text=prompt)
        begin = self._begin(before, index)
        text, literals, own = self._after_prompt(before, chat, tools)
        token = self._stop(chat, text, literals, len(prompt), own, tools)
        return _Answer(text, begin, len(prompt), token.end(), token.group(), literals, is_plain=False)

    def _stop(
        self, chat: _Chat, text: str, literals: Collection[Span], start: int, own: int, tools: Tools
    ) -> re.Match[str]:
        """The token on which the model stops: it ends text[start:], after the answer's own texts (up to `own`)."""
        habits, number = self._habits(tools), len(chat.messages)
        has_calls = bool(chat.messages[-1].get("tool_calls"))
        for end in dict.fromkeys([text.removesuffix(habits.closing), text]):
            tokens = [token for token in self.special.finditer(end, start) if token.span() not in literals]
            if not tokens or end[tokens[-1].end() :].strip() or tokens[-1].start() < own:
                continue
            if has_calls and tokens[-1].group() in habits.between:
                continue
            inside = {token.group() for token in tokens[:-1]} & {tokens[-1].group(), habits.stop}
            if inside:
                raise BadRow(
                    f"the chat template writes {inside.pop()}, on which the model stops, inside turn {number}; change "
                    "the turn, or give data.chat_template one that writes it at the end alone"
                )
            return tokens[-1]
        raise BadRow(
            "the chat template writes no end-of-turn token after the assistant's text, so the model would not "
            f"learn to stop (turn {number}); give data.chat_template one that does, for example {{{{ eos_token }}}}"
        )

    def _after_prompt(self, before: _Chat, chat: _Chat, tools: Tools) -> tuple[str, list[Span], int]:
        """The last turn after a prompt that its finished form does not begin with.

        Returns the text, the literals, and the end of the turn's own texts. Raises BadRow.
        """
        index, message = len(chat.messages) - 1, chat.messages[-1]
        prompt, tail, begin = before.text, before.text[self._begin(before, index) :], self._begin(chat, index)
        assert chat.marked is not None
        own = chat.marked.first.get(index)
        if own is None:
            raise self._no_header(chat, begin, index)
        matched = min(self._agreement(tail, chat.text, begin), own - begin)
        thought, start = "", begin + matched
        unsaid = tail[matched:]
        block = _BLOCK.search(tail)
        if not unsaid:  # the prompt only writes the history in another way
            pass
        elif block and matched >= block.start():
            closed, at = "</think>" in block.group(), begin + block.start()
            own_block = _OWN_BLOCK.match(chat.text, at)
            if closed and reasoning_of(message).strip():
                raise ReasoningAfterClosedBlock(index)
            if own_block is None:
                start = at
                if not closed:  # the model closes the block
                    thought = f"{reasoning_of(message).strip()}\n</think>\n\n"
                    start += len(chat.text[at:]) - len(chat.text[at:].lstrip("\n"))
            elif closed:
                start = own_block.end()
            else:
                start = at + len("<think>")
                start += len(chat.text[start:]) - len(chat.text[start:].lstrip())
        elif (opened := self._as_reasoning(before, chat, tools)) is not None:
            return opened
        elif not chat.text[start:own].strip() and index in chat.marked.opened:
            start = own
        else:
            start = self._header_end(chat, tools, begin, matched, index)
        shift = len(prompt) + len(thought) - start
        literals = [*before.literals]
        literals += [(len(prompt) + at.start(), len(prompt) + at.end()) for at in self.special.finditer(thought)]
        literals += [(first + shift, last + shift) for first, last in chat.literals if first >= start]
        return prompt + thought + chat.text[start:], literals, chat.marked.last[index] + shift

    def _as_reasoning(self, before: _Chat, chat: _Chat, tools: Tools) -> tuple[str, list[Span], int] | None:
        """The turn with an empty thought, if the prompt ends in the way that the template begins a thought."""
        index, message = len(chat.messages) - 1, chat.messages[-1]
        if reasoning_of(message).strip():
            return None
        for key in REASONING:
            try:
                thinks = self._chat([*chat.messages[:-1], message | {key: _PROBE}], tools)
            except BadRow:
                continue
            at = thinks.text.find(_PROBE)
            if thinks.marked is None or not thinks.text.startswith(before.text) or at < len(before.text):
                continue
            shifted = [(first - (first > at), last - (first > at)) for first, last in thinks.literals]
            return thinks.text.replace(_PROBE, "", 1), shifted, thinks.marked.last[index] - 1
        return None

    def _header_end(self, chat: _Chat, tools: Tools, begin: int, matched: int, index: int) -> int:
        """Where a turn's header ends: as before an answer in words, if the prompt holds the whole header."""
        follows = [{"role": "user", "content": "a"}] if index + 1 < len(chat.messages) else []
        words = self._chat([*chat.messages[:index], {"role": "assistant", "content": "a"}, *follows], tools)
        if words.marked is None or index not in words.marked.first:
            raise self._no_header(chat, begin + matched, index)
        header = words.text[self._begin(words, index) : words.marked.first[index]]
        if not chat.text.startswith(header, begin) or header[matched:].strip():
            raise self._no_header(chat, begin + matched, index)
        return begin + len(header)

    def _no_header(self, chat: _Chat, at: int, index: int) -> BadRow:
        return BadRow(
            f"cannot find where the chat template's header ends before {chat.text[at : at + 40]!r} in turn {index + 1};"
            " give data.chat_template one whose generation prompt is how its assistant turns begin"
        )

    def _begin(self, chat: _Chat, index: int) -> int:
        """Where the texts before message `index` end in a chat; 0 where that is not marked."""
        if chat.marked is None:
            raise BadRow(
                f"cannot find turn {index + 1} in the chat template's text; change the row, or give "
                "data.chat_template another"
            )
        return chat.marked.last.get(index - 1, 0)

    # -- earlier turns -----------------------------------------------------------------------------------------------

    def _earlier(self, whole: _Chat, tools: Tools, index: int) -> tuple[Span, bool, str]:
        """A turn that others follow. Raises BadRow.

        Returns its characters in the whole chat, whether it has the same text and prompt when it is the last turn, and
        the token on which it ends.
        """
        beginning = whole.messages[: index + 1]
        prompt = self._render(beginning[:-1], tools, generation_prompt=True)
        try:
            text = self._render(beginning, tools)
        except BadRow:  # a template that needs another message after it
            return self._unended(whole, tools, index, prompt)
        own = whole.marked.last.get(index, 0) if whole.marked else 0
        if text.startswith(prompt) and own <= len(text) and whole.text.startswith(text[:own]):
            token = self._stop(_Chat(beginning, text, None, []), text, whole.literals, len(prompt), own, tools)
            if whole.text.startswith(text[: token.end()]):
                return (len(prompt), token.end()), True, token.group()
        alone = self._chat(beginning, tools, text=text)
        answer = self._answer(alone, tools, prompt)
        if answer.is_plain and whole.text.startswith(text[: answer.stop]):
            return (answer.prompt, answer.stop), True, answer.token
        return self._in_history(whole, alone, answer, tools, index), False, answer.token

    def _in_history(self, whole: _Chat, alone: _Chat, answer: _Answer, tools: Tools, index: int) -> Span:
        """The place in the whole chat of a turn that the template writes in another way when it is the last."""
        begin = self._begin(whole, index)
        self._begin(alone, index)
        assert whole.marked is not None
        assert alone.marked is not None
        own = whole.marked.first.get(index)
        if own is None or index not in alone.marked.last:
            raise self._no_header(whole, begin, index)
        tail = answer.text[answer.begin : answer.prompt]
        matched = min(self._agreement(tail, whole.text, begin), own - begin)
        start, block = begin + matched, _BLOCK.search(tail)
        if matched == len(tail):
            pass
        elif block and matched >= block.start():  # history has no block, or closes it in another way than the prompt
            if not whole.text.startswith("<think>", begin + block.start()):
                start = begin + block.start()
        elif index in whole.marked.opened and not whole.text[start:own].strip():
            start = own
        else:
            start = self._header_end(whole, tools, begin, matched, index)
        start = min(start, own)
        shift = len(answer.text) - len(alone.text)
        closing = answer.text[alone.marked.last[index] + shift : answer.stop]
        last = whole.marked.last[index]
        stop = last + len(closing)
        if not whole.text.startswith(closing, last):  # the template ends it with a token that the model does not write
            stop = last + self._common_pieces(closing, whole.text[last:])
        self._check_alone(whole, index, (start, stop))
        return start, stop

    def _common_pieces(self, closing: str, text: str) -> int:
        """How many characters two texts share at their start, without a part of a control token."""
        length = 0
        for token in re.split(f"({self.special.pattern})", closing):
            if not text.startswith(token, length):
                break
            length += len(token)
        return length

    def _agreement(self, tail: str, text: str, begin: int) -> int:
        """Length of the common prefix of `tail` and text[begin:]. It never ends inside a control token."""
        length = _common(tail, text, begin)
        for written, start in ((tail, 0), (text, begin)):
            for token in self.special.finditer(written, start, start + length + 40):
                if token.start() < start + length < token.end():
                    length = token.start() - start
        return length

    def _unended(self, whole: _Chat, tools: Tools, index: int, prompt: str) -> tuple[Span, bool, str]:
        """A turn at which the template cannot end a chat. It ends with the token that ends an answer in words."""
        stop = self._habits(tools).stop
        if whole.marked is None or not whole.text.startswith(prompt) or stop is None:
            raise self._no_header(whole, len(prompt), index)
        last = max(len(prompt), whole.marked.last.get(index, 0))
        token = self.special.search(whole.text, last)
        if token is None or token.group() != stop:
            raise self._no_header(whole, len(prompt), index)
        span = (len(prompt), token.end())
        self._check_alone(whole, index, span)
        return span, True, stop

    # -- checks ------------------------------------------------------------------------------------------------------

    def _check_alone(self, whole: _Chat, index: int, span: Span) -> None:
        """Raises if a span holds another message's text, or lacks a part of its own."""
        start, stop = span
        for position, message in whole.marked.places if whole.marked else ():
            if message == index and not start <= position <= stop:
                raise OmittedFromHistory("writes in several places", index)
            if message != index and start < position < stop:
                raise OmittedFromHistory("writes other messages inside", index)

    def _check_kept(self, whole: _Chat, tools: Tools, wanted: Collection[int]) -> None:
        """Raises if the template leaves out a message's text or call."""
        if whole.marked is None:
            written = "".join(whole.text.split()).casefold()
            for index in wanted:
                message = whole.messages[index]
                said = "".join(message["content"].split()).casefold()
                if said not in written:
                    raise self._left_out(whole.messages, index, "the text")
                if any(call["function"]["name"] not in whole.text for call in message.get("tool_calls", ())):
                    raise self._left_out(whole.messages, index, "a tool call")
            return
        absent = absent_part(whole.messages, whole.marked, wanted)
        if absent is None:
            return
        index, what = absent
        if index in wanted and index + 1 < len(whole.messages):
            alone = self._mark_and_render(whole.messages[: index + 1], tools)
            if alone is not None and absent_part(whole.messages[: index + 1], alone, [index]) is None:
                raise OmittedFromHistory(f"leaves out {what} of", index)
        raise self._left_out(whole.messages, index, what)

    def _left_out(self, messages: Messages, index: int, what: str) -> BadRow:
        beside_call = what == "the text" and messages[index].get("tool_calls")
        return BadRow(
            f"the chat template leaves out {what} of turn {index + 1} ({messages[index]['role']}); "
            f"remove {'that text' if beside_call else 'the turn'}, or give data.chat_template one that writes it"
        )

    def _check_tools_kept(self, whole: _Chat, tools: Tools) -> None:
        if not tools or (whole.marked and whole.marked.has_tools):
            return
        if self._render(whole.messages, None) == whole.text:
            raise BadRow(
                "the chat template does not write the row's tools; remove them, or give data.chat_template one"
            )

    # -- the template's habits ---------------------------------------------------------------------------------------

    def _habits(self, tools: Tools) -> _Habits:
        has_tools = bool(tools)
        if has_tools not in self._habits_of:
            self._habits_of[has_tools] = self._find_habits([_PROBE_TOOL] if has_tools else None)
        return self._habits_of[has_tools]

    def _find_habits(self, tools: Tools) -> _Habits:
        question: dict[str, Any] = {"role": "user", "content": "a"}
        answer: dict[str, Any] = {"role": "assistant", "content": _PROBE}
        stop, closing, between = None, "", frozenset[str]()
        try:
            ended = self._render([question, answer], tools).rpartition(_PROBE)[2]
            tokens = self.special.findall(ended)
            stop = tokens[-1] if tokens else None
            followed = self._render([question, answer, question], tools).rpartition(_PROBE)[2]
            turn = ended[: self._common_pieces(ended, followed)]
            if own := [*self.special.finditer(turn)]:  # else a token of its own ends the last turn
                stop, closing = own[-1].group(), ended[own[-1].end() :]
        except BadRow:  # a template that needs another kind of chat
            pass
        try:
            calls = [question, {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL, _PROBE_CALL]}]
            prompt = self._render(calls[:1], tools, generation_prompt=True)
            header = prompt[_common(self._render(calls[:1], tools), prompt, 0) :].strip()
            text = self._render(calls, tools)[len(prompt) :].removesuffix(closing)
            # A token before another header ends a turn: such templates write each call as a turn of its own.
            between = frozenset(
                token.group()
                for token in [*self.special.finditer(text)][:-1]
                if not header or not text[token.end() :].lstrip().startswith(header)
            ) - {stop}
        except BadRow:
            pass
        return _Habits(stop, closing if self.special.search(closing) or closing.strip() else "", between)


def _common(tail: str, text: str, start: int) -> int:
    """Length of the common prefix of `tail` and text[start:]."""
    if text.startswith(tail, start):
        return len(tail)
    length = 0
    while length < len(tail) and start + length < len(text) and tail[length] == text[start + length]:
        length += 1
    return length
