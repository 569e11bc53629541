"""Finds a rendered chat's supervised parts by rendering, for any chat template.

Three renderings show the model's text in turn i, because inference renders in the same way:

    prompt = render(messages[:i], add_generation_prompt=True)   the model's input
    turn   = render(messages[:i + 1])                           the input and the answer
    whole  = render(messages)                                   the row: its tokens come from this text

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    `------------------- prompt ------------------´`- supervised -´

The answer is `turn` after `prompt`. It ends with the stop token, the turn's last control token. Some templates write
one more token after every document (Phi-3: end-of-text); that token is not part of the turn. A token that also stands
between one answer's calls is not a stop token. In a few templates (GLM 4 MoE) nothing ends a turn but the next turn's
header. If the model's own settings end an answer on that header's token, it is the stop token, after the last turn too.

The last message's answer always follows its exact prompt. In some templates a finished turn does not begin as the
prompt ends (DeepSeek-R1's prompt opens a thinking block). Then the answer is put after the prompt, or the row is
refused.

An earlier answer lies in `whole`. If `whole` begins with that answer's turn, its place is known. Otherwise the template
writes history in another way (Qwen3 drops reasoning). Then marks show the turn's place (marks.py): private characters
around each message's texts. The turn's closing text is compared with the one in `turn`.

Marks also show texts that a template leaves out, and control tokens that the texts only spell. Nothing is remembered
between rows: a row's tokens and mask depend on that row alone.

The examples below shorten <|im_start|>user\\n to <user>, <|im_start|>assistant\\n to <bot>, and <|im_end|> to <end>.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from finetune.data.cells import BadRow
from finetune.data.chat import reasoning_of
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

# An open or an empty thinking block. A generation prompt may end with it although a finished turn lacks it.
_BLOCK = re.compile(r"<think>\s*(</think>\s*)?\Z")
_OWN_BLOCK = re.compile(r"<think>(.*?)</think>\s*", re.DOTALL)
_PROBE = "\U000f0000"  # a text that no template contains
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
_PROBE_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "a"}}}
_LIKE_TOKEN = re.compile(r"<[|｜][^<>\s]{1,40}[|｜]>|<(?:start|end)_of_turn>")  # as chat templates write control tokens
_LONGEST_TOKEN = 40  # characters in which a control token that begins before a position may end


class Renderer(Protocol):
    """ChatTemplate.render."""

    def __call__(self, messages: Messages, tools: Tools, *, generation_prompt: bool = False) -> str: ...


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered chat: its text, each assistant turn's span, and texts that look like control tokens."""

    text: str
    turns: dict[int, Span]  # index of the assistant's message -> characters that the model writes
    literals: list[Span]
    differing: Collection[int] = ()  # turns with another text or prompt when they are the last turn
    stops: Collection[str] = ()  # the turns' stop tokens


@dataclass(frozen=True, slots=True)
class _Chat:
    """A chat or its first messages, as the template writes them."""

    messages: Messages
    text: str
    marked: Marked | None  # None: marks change what the template writes
    literals: list[Span]

    def texts_end(self, index: int) -> int:
        """Where message `index`'s texts end; 0 if they are not marked."""
        if self.marked:
            return self.marked.last.get(index, 0)
        return 0

    def turn_begin(self, index: int) -> int:
        """Where the texts before message `index` end. The turn's header follows. Raises BadRow.

        <user>Hi<end><bot>Hello<end>: for message 1 the place after Hi.
        """
        if self.marked is None:
            raise BadRow(
                f"cannot find turn {index + 1} in the chat template's text; change the row, or give "
                "data.chat_template another"
            )
        return self.texts_end(index - 1)


@dataclass(frozen=True, slots=True)
class _Answer:
    """A chat's last turn, after its prompt: <user>Hi<end><bot>Hello<end>."""

    text: str
    begin: int  # where the previous message's texts end: after Hi
    prompt: int  # the prompt's length in characters: up to Hello
    stop: int  # where the stop token ends: after the last <end>
    token: str  # the stop token: <end>
    literals: list[Span]
    is_plain: bool  # whether the template itself writes this text
    added: int  # characters at its end that the template writes only if another turn follows: the next header's token


@dataclass(frozen=True, slots=True)
class _Habits:
    """A template's habits in every chat, found by rendering probe chats, never from rows."""

    stop: str | None  # an answer's stop token
    closing: str  # text after a document's last turn
    between: frozenset[str]  # tokens between one answer's calls
    headers: tuple[str, str]  # text up to the next turn's control token, after an answer in words and one with calls


class SpanFinder:
    """Finds the assistant's spans with one template."""

    def __init__(
        self, render: Renderer, special_tokens: Collection[str], own_ends: Callable[[], Collection[str]] = tuple
    ) -> None:
        """`own_ends` reads the tokens on which the model's own settings end an answer."""
        self._render = render
        self._own_ends = own_ends
        self.special = any_of(special_tokens)
        self._habits_of: dict[bool, _Habits] = {}  # by whether there are tools

    def find(self, messages: Messages, tools: Tools, supervised: Collection[int]) -> Rendered:
        """Render a chat, and find the assistant's spans for the messages `wanted`.

        Raises BadRow if the template cannot be followed.
        """
        whole = self._render_chat(messages, tools)
        tools_are_marked = whole.marked is not None and whole.marked.has_tools
        if tools and not tools_are_marked and self._render(messages, None) == whole.text:
            raise BadRow(
                "the chat template does not write the row's tools; remove them, or give data.chat_template one"
            )
        self._check_kept(whole, tools, supervised)
        last, turns, differing, stops = len(messages) - 1, {}, set(), set()
        for index in sorted(supervised):
            if index == last:
                continue
            turns[index], is_same, stop = self._find_earlier(whole, tools, index)
            stops.add(stop)
            if not is_same:
                differing.add(index)
        if last not in supervised:
            return Rendered(whole.text, turns, whole.literals, differing, stops)
        answer = self._find_answer(whole, tools, self._render(messages[:-1], tools, generation_prompt=True))
        text, literals, span = answer.text, answer.literals, (answer.prompt, answer.stop)
        if turns and not text.startswith(whole.text[: turns[max(turns)][1]]):
            # The prompt for the last answer writes earlier turns in another way than the finished chat, and the
            # finished chat's form is supervised. Keep that history, and put only the prompt's end before the answer:
            #
            #   whole   <user>Hi<end><bot>Hello<end><user>And?            |<end><bot>So.<end>
            #   answer  <user>Hi<end><bot>[thought]Hello<end><user>And?   |<end><bot><think>...So.<end>
            #   result  whole up to the bar, and answer from the bar
            begin = whole.turn_begin(last)
            shift = begin - answer.begin
            text = whole.text[:begin] + text[answer.begin :]
            literals = [literal for literal in whole.literals if literal[1] <= begin]
            literals += [(first + shift, end + shift) for first, end in answer.literals if first >= answer.begin]
            span = (span[0] + shift, span[1] + shift)
        turns[last] = span
        return Rendered(text, turns, literals, differing, stops | {answer.token})

    def find_literals(self, messages: Messages, tools: Tools, prompt: str) -> list[Span]:
        """Texts in a rendered prompt that only look like control tokens. Raises BadRow.

        The user's message "What is <end>?" gives this <end>'s span, and no span for the template's own <end>.
        """
        if not self._spelt_token(messages, tools):
            return []
        marked = self._mark_and_render(messages, tools, generation_prompt=True)
        if marked is None or marked.text != prompt:
            self._refuse_literals(messages, tools)
        if marked:
            return marked.literals
        return []

    # -- rendering ---------------------------------------------------------------------------------------------------

    def _render_chat(
        self, messages: Messages, tools: Tools, *, generation_prompt: bool = False, text: str = ""
    ) -> _Chat:
        """Render the chat plain and with marks. Pass `text` if the plain text is already known."""
        text = text or self._render(messages, tools, generation_prompt=generation_prompt)
        marked = self._mark_and_render(messages, tools, generation_prompt=generation_prompt)
        if marked is None or marked.text != text:
            self._refuse_literals(messages, tools)
            return _Chat(messages, text, None, [])
        return _Chat(messages, text, marked, marked.literals)

    def _mark_and_render(self, messages: Messages, tools: Tools, *, generation_prompt: bool = False) -> Marked | None:
        """Render the chat with marks, and take them out; None if the template refuses them.

        Brackets stand for marks. <user>(Hi)<end><bot>[Hello]<end> gives the text without them, and the positions where
        Hi and Hello stand in it.
        """
        marks = Marks(messages, tools, self.special)
        marked_messages, marked_tools = marks.around_messages(), marks.around_tools(tools)
        try:
            rendered = self._render(marked_messages, marked_tools, generation_prompt=generation_prompt)
        except BadRow:  # the plain texts rendered, so the template refuses the marks
            return None
        return marks.take_out(rendered)

    def _spelt_token(self, messages: Messages, tools: Tools) -> str | None:
        """The first control token that the row's own texts spell."""
        matches = (self.special.search(text) for text in texts_of([messages, tools]))
        return next((match.group() for match in matches if match), None)

    def _refuse_literals(self, messages: Messages, tools: Tools) -> None:
        """Raises BadRow if the texts spell a control token: without marks it looks like the template's own."""
        if token := self._spelt_token(messages, tools):
            raise BadRow(
                f"the text spells the control token {token!r}, and the chat template changes it on its way; "
                "remove it from the row"
            )

    # -- the last turn -----------------------------------------------------------------------------------------------

    def _find_answer(self, chat: _Chat, tools: Tools, prompt: str) -> _Answer:
        """The chat's last turn, after its prompt. Raises BadRow.

        With the prompt <user>Hi<end><bot>, the chat <user>Hi<end><bot>Hello<end> begins with it, and Hello<end> is the
        answer. If the chat does not begin with its prompt, the answer is put after the prompt.
        """
        index = len(chat.messages) - 1
        text, literals, texts_end = chat.text, chat.literals, chat.texts_end(index)
        begin, is_plain = chat.texts_end(index - 1), text.startswith(prompt)
        if not is_plain:
            before = self._render_chat(chat.messages[:-1], tools, generation_prompt=True, text=prompt)
            begin = before.turn_begin(index)
            text, literals, texts_end = self._put_after_prompt(before, chat)
        token = self._find_stop(chat.messages, text, literals, len(prompt), texts_end, tools)
        added = max(0, token.end() - len(text))
        if added:
            text = token.string
        return _Answer(text, begin, len(prompt), token.end(), token.group(), literals, is_plain, added)

    def _find_stop(
        self, messages: Messages, text: str, literals: Collection[Span], start: int, texts_end: int, tools: Tools
    ) -> re.Match[str]:
        """The stop token: it ends text[start:], after the answer's own texts. The match's string is the text up to it
        or longer. Raises BadRow.

        Hello<end>\\n                      -> <end>
        Hello<|end|>\\n<|endoftext|>       -> <|end|>, if every document ends with \\n<|endoftext|> (Phi-3)
        Hello                             -> <user> in Hello<user>, if the model's own settings end an answer on it
        Hello                             -> else refused: the model would not stop
        Hel<end>lo<end>                   -> refused: the model would stop too early
        """
        habits, number = self._habits(tools), len(messages)
        has_calls = bool(messages[-1].get("tool_calls"))
        header = habits.headers[has_calls]
        for ended in dict.fromkeys([text.removesuffix(habits.closing), text, text + header]):
            tokens = [token for token in self.special.finditer(ended, start) if token.span() not in literals]
            if not tokens or ended[tokens[-1].end() :].strip() or tokens[-1].start() < texts_end:
                continue
            if has_calls and tokens[-1].group() in habits.between:
                continue
            if tokens[-1].end() > len(text) and tokens[-1].group() not in self._own_ends():
                raise BadRow(
                    f"the chat template ends an answer with the next turn's {tokens[-1].group()} alone, on which the "
                    f"model's own settings do not stop (turn {number}); add it to eos_token_id in the model's "
                    "generation_config.json, or give data.chat_template one that ends its turns"
                )
            inside = {token.group() for token in tokens[:-1]} & {tokens[-1].group(), habits.stop}
            if inside:
                raise BadRow(
                    f"the chat template writes {inside.pop()}, on which the model stops, inside turn {number}; change "
                    "the turn, or give data.chat_template one that writes it at the end alone"
                )
            return tokens[-1]
        if foreign := list(dict.fromkeys(_LIKE_TOKEN.findall(text[texts_end:]))):
            listed = ", ".join(f'"{token}"' for token in dict.fromkeys([*_LIKE_TOKEN.findall(text[:start]), *foreign]))
            raise BadRow(
                f"the chat template ends turn {number} with {foreign[0]}, which is no token of this tokenizer; write "
                f"model.add_special_tokens: [{listed}], or give data.chat_template one for this model"
            )
        raise BadRow(
            "the chat template writes no end-of-turn token after the assistant's text, so the model would not "
            f"learn to stop (turn {number}); give data.chat_template one that does, for example {{{{ eos_token }}}}"
        )

    def _put_after_prompt(self, before: _Chat, chat: _Chat) -> tuple[str, list[Span], int]:
        """Put the last turn after its prompt, if the chat does not begin with the prompt. Raises BadRow.

        Returns the text, its literals, and where the turn's own texts end.

            prompt                chat                       result
            <bot><think>\\n        <bot>Hello<end>            <bot><think>\\n + \\n</think>\\n\\n + Hello<end>
            <bot><think></think>  <bot>Hello<end>            <bot><think></think> + Hello<end>
            <bot>[fast]           <bot>Hello<end>            <bot>[fast] + Hello<end>
            <bot>                 <user>Hi!<end><bot>Hello   the prompt's own history, and Hello
        """
        index, message = len(chat.messages) - 1, chat.messages[-1]
        prompt, begin = before.text, chat.turn_begin(index)
        tail = prompt[before.turn_begin(index) :]  # the prompt after the last message's texts: <end><bot><think>\n
        assert chat.marked is not None
        texts_start = chat.marked.first.get(index)
        if texts_start is None:
            raise self._no_header(chat, begin, index)
        matched = min(self._common_length(tail, chat.text, begin), texts_start - begin)
        # The result is prompt + thought + chat.text[start:].
        thought, start = "", begin + matched
        block = _BLOCK.search(tail)
        if matched == len(tail):  # the prompt only writes the history in another way
            pass
        elif block and matched >= block.start():
            is_closed, place = "</think>" in block.group(), begin + block.start()
            closes_itself = chat.text[place:].lstrip().startswith("</think>")  # GLM 4.7: <bot></think>Hello<end>
            own_block = _OWN_BLOCK.match(chat.text, place)
            if is_closed and reasoning_of(message).strip():
                raise ReasoningAfterClosedBlock(index)
            if own_block is None:
                start = place
                if closes_itself and not is_closed:
                    thought = reasoning_of(message).strip()
                elif not is_closed:  # the model closes the block
                    thought = f"{reasoning_of(message).strip()}\n</think>\n\n"
                    start = _skip(chat.text, place, "\n")
            elif is_closed:
                start = own_block.end()
            else:
                start = _skip(chat.text, place + len("<think>"))
        elif not chat.text[start:texts_start].strip() and index in chat.marked.opened:
            start = texts_start
        else:
            raise self._no_header(chat, begin + matched, index)
        literals = [*before.literals]
        literals += [
            (len(prompt) + token.start(), len(prompt) + token.end()) for token in self.special.finditer(thought)
        ]
        shift = len(prompt) + len(thought) - start
        literals += [(first + shift, last + shift) for first, last in chat.literals if first >= start]
        return prompt + thought + chat.text[start:], literals, chat.marked.last[index] + shift

    def _no_header(self, chat: _Chat, place: int, index: int) -> BadRow:
        return BadRow(
            f"cannot find where the chat template's header ends before {chat.text[place : place + 40]!r} in turn "
            f"{index + 1}; give data.chat_template one whose generation prompt is how its assistant turns begin"
        )

    # -- earlier turns -----------------------------------------------------------------------------------------------

    def _find_earlier(self, whole: _Chat, tools: Tools, index: int) -> tuple[Span, bool, str]:
        """A turn that is not the last one. Raises BadRow.

        Returns its span in the whole chat, whether its text and prompt would be the same as a last turn, and its stop
        token.

            whole            <user>Hi<end><bot>Hello<end><user>And?<end>...
            alone, usually   <user>Hi<end><bot>Hello<end>                  whole begins with it: Hello<end>, True
            alone, Qwen3     <user>Hi<end><bot><think></think>Hello<end>   Hello<end> in whole, False
        """
        beginning = whole.messages[: index + 1]
        prompt = self._render(beginning[:-1], tools, generation_prompt=True)
        text = self._render(beginning, tools)
        texts_end = whole.texts_end(index)
        if text.startswith(prompt) and texts_end <= len(text) and whole.text.startswith(text[:texts_end]):
            token = self._find_stop(beginning, text, whole.literals, len(prompt), texts_end, tools)
            if whole.text.startswith(token.string[: token.end()]):
                return (len(prompt), token.end()), True, token.group()
        alone = self._render_chat(beginning, tools, text=text)
        answer = self._find_answer(alone, tools, prompt)
        if answer.is_plain and whole.text.startswith(text[: answer.stop]):
            return (answer.prompt, answer.stop), True, answer.token
        return self._find_in_history(whole, alone, answer, index), False, answer.token

    def _find_in_history(self, whole: _Chat, alone: _Chat, answer: _Answer, index: int) -> Span:
        """A turn's span in the whole chat, if the template writes the last turn in another way.

        The span begins after the part of the prompt that history has too. It ends as the answer alone ends:

            answer   ...Hi<end><bot><think>\\n | thought</think>Hello<end>      the prompt up to the bar
            whole    ...Hi<end><bot>Hello<end><user>...                         the span is Hello<end>
        """
        begin = whole.turn_begin(index)
        alone.turn_begin(index)  # raises if the turn alone has no marks
        assert whole.marked is not None
        assert alone.marked is not None
        texts_start = whole.marked.first.get(index)
        if texts_start is None or index not in alone.marked.last:
            raise self._no_header(whole, begin, index)
        tail = answer.text[answer.begin : answer.prompt]  # the prompt after the message before: <end><bot><think>\n
        matched = min(self._common_length(tail, whole.text, begin), texts_start - begin)
        start, block = begin + matched, _BLOCK.search(tail)
        if matched == len(tail):
            pass
        elif block and matched >= block.start():  # history has no block, or closes it in another way than the prompt
            if not whole.text.startswith("<think>", begin + block.start()):
                start = begin + block.start()
        else:
            raise self._no_header(whole, begin + matched, index)
        start = min(start, texts_start)
        # The closing text, from the answer's own texts to its stop <end>, must follow the texts in history too.
        shift = len(answer.text) - answer.added - len(alone.text)
        closing = answer.text[alone.marked.last[index] + shift : answer.stop]
        texts_end = whole.marked.last[index]
        stop = texts_end + len(closing)
        if not whole.text.startswith(closing, texts_end):  # history closes the turn with another token than the model
            stop = texts_end + self._common_pieces(closing, whole.text[texts_end:])
        for position, message in whole.marked.places:
            if message == index and not start <= position <= stop:
                raise OmittedFromHistory("writes in several places", index)
            if message != index and start < position < stop:
                raise OmittedFromHistory("writes other messages inside", index)
        return start, stop

    def _common_pieces(self, closing: str, text: str) -> int:
        """The common prefix's length in whole pieces: control tokens, and the texts between them.

        "<end>\\n", "<end>\\n<user>And?"   -> all 6
        "\\n<end>", "\\n<stop>"            -> 1, the line break
        """
        length = 0
        for piece in re.split(f"({self.special.pattern})", closing):
            if not text.startswith(piece, length):
                break
            length += len(piece)
        return length

    def _common_length(self, tail: str, text: str, begin: int) -> int:
        """The common prefix's length for `tail` and text[begin:]. It never ends inside a control token.

        <end><bot><think> and <end><bot>Hello share <end><bot>. <|im_start|> and <|im_end|> share nothing.
        """
        length = _common_prefix(tail, text, begin)
        for written, start in ((tail, 0), (text, begin)):
            for token in self.special.finditer(written, start, start + length + _LONGEST_TOKEN):
                if token.start() < start + length < token.end():
                    length = token.start() - start
        return length

    # -- checks ------------------------------------------------------------------------------------------------------

    def _check_kept(self, whole: _Chat, tools: Tools, supervised: Collection[int]) -> None:
        """Raises BadRow if the template leaves out a message's text or call."""
        if whole.marked is None:
            # Without marks only the wanted messages are checked, by their letters without space.
            written = "".join(whole.text.split()).casefold()
            for index in supervised:
                message = whole.messages[index]
                if "".join(message["content"].split()).casefold() not in written:
                    raise self._left_out(whole.messages, index, "the text")
                if any(call["function"]["name"] not in whole.text for call in message.get("tool_calls", ())):
                    raise self._left_out(whole.messages, index, "a tool call")
            return
        absent = absent_part(whole.messages, whole.marked, supervised)
        if absent is None:
            return
        index, part = absent
        if index in supervised and index + 1 < len(whole.messages):
            beginning = whole.messages[: index + 1]
            alone = self._mark_and_render(beginning, tools)
            if alone is not None and absent_part(beginning, alone, [index]) is None:
                raise OmittedFromHistory(f"leaves out {part} of", index)
        raise self._left_out(whole.messages, index, part)

    def _left_out(self, messages: Messages, index: int, part: str) -> BadRow:
        removed = "the turn"
        if part == "the text" and messages[index].get("tool_calls"):
            removed = "that text"
        return BadRow(
            f"the chat template leaves out {part} of turn {index + 1} ({messages[index]['role']}); "
            f"remove {removed}, or give data.chat_template one that writes it"
        )

    def _header_after(self, ended: str, followed: str) -> str:
        """The text that a following turn begins with, up to its control token; empty if it begins with words."""
        rest = followed.removeprefix(ended)
        token = self.special.search(rest)
        if not followed.startswith(ended) or token is None or rest[: token.start()].strip():
            return ""
        return rest[: token.end()]

    # -- the template's habits ---------------------------------------------------------------------------------------

    def _habits(self, tools: Tools) -> _Habits:
        """The template's habits in chats with tools, or without. They are found once.

            <bot>PROBE<end>\\n<eos>                 a document's last turn
            <bot>PROBE<end>\\n<user>a<end>...       the same turn, followed

        Both have <end>\\n: <end> is the stop, and \\n<eos> closes the document.
        """
        has_tools = bool(tools)
        if has_tools in self._habits_of:
            return self._habits_of[has_tools]
        probe_tools = [_PROBE_TOOL] if has_tools else None
        question: dict[str, Any] = {"role": "user", "content": "a"}
        answer: dict[str, Any] = {"role": "assistant", "content": _PROBE}
        stop, closing, between, headers = None, "", frozenset[str](), ["", ""]
        try:
            ended = self._render([question, answer], probe_tools).rpartition(_PROBE)[2]
            tokens = self.special.findall(ended)
            if tokens:
                stop = tokens[-1]
            followed = self._render([question, answer, question], probe_tools).rpartition(_PROBE)[2]
            headers[0] = self._header_after(ended, followed)
            turn_end = ended[: self._common_pieces(ended, followed)]
            own_tokens = [*self.special.finditer(turn_end)]
            if ended[len(turn_end) :].strip() and self._render([question, answer], None) == self._render(
                [question, answer], None, generation_prompt=True
            ):
                # The common part goes on into the next header: <end>\\n<bot> and <end>\\n<user> share <.
                own_tokens = own_tokens[:1]
            if own_tokens:  # else the last turn has a stop token of its own
                stop, closing = own_tokens[-1].group(), ended[own_tokens[-1].end() :]
        except BadRow:  # the template needs another kind of chat
            pass
        try:
            calls = [question, {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL, _PROBE_CALL]}]
            prompt = self._render(calls[:1], probe_tools, generation_prompt=True)
            header = prompt[_common_prefix(self._render(calls[:1], probe_tools), prompt, 0) :].strip()
            text = self._render(calls, probe_tools)[len(prompt) :].removesuffix(closing)
            # A token before another header ends a turn: such templates write each call as its own turn.
            between = frozenset(
                token.group()
                for token in [*self.special.finditer(text)][:-1]
                if not header or not text[token.end() :].lstrip().startswith(header)
            ) - {stop}
            called = [question, {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}]
            result = {"role": "tool", "content": "a", "tool_call_id": _PROBE_CALL["id"], "name": "look"}
            ended, followed = (self._render(chat, probe_tools) for chat in (called, [*called, result]))
            headers[1] = self._header_after(ended, followed)
        except BadRow:
            pass
        if not self.special.search(closing) and not closing.strip():
            closing = ""
        self._habits_of[has_tools] = _Habits(stop, closing, between, (headers[0], headers[1]))
        return self._habits_of[has_tools]


def _skip(text: str, place: int, characters: str | None = None) -> int:
    """The first place from `place` on without these characters; None means white space."""
    return len(text) - len(text[place:].lstrip(characters))


def _common_prefix(tail: str, text: str, start: int) -> int:
    """The common prefix's length for `tail` and text[start:]: 2 for "abc", "xxabd", 2."""
    if text.startswith(tail, start):
        return len(tail)
    length = 0
    while length < len(tail) and start + length < len(text) and tail[length] == text[start + length]:
        length += 1
    return length
