"""Encodes rows as token ids and labels; the label of an unsupervised token is -100.

The template renders a chat, and the assistant's parts are supervised. A text stays as it is, between the tokenizer's
own start tokens and a supervised end-of-text token. Texts that spell control tokens stay texts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.base.location import own_end_tokens
from finetune.data.cells import BadRow
from finetune.data.chat import REASONING, Chat, Content, Judged, Pair, Passage, by_turn, documents_in, reasoning_of
from finetune.recipe.schema import Data, ModelSection
from finetune.tokens.assistant_spans import Rendered, SpanFinder
from finetune.tokens.chat_template import ChatTemplate, Form, read_source
from finetune.tokens.conversation import Conversation
from finetune.tokens.marks import OmittedFromHistory, ReasoningAfterClosedBlock, texts_of
from finetune.tokens.tokenizer import IGNORE, Document, Script, TextTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["IGNORE", "Document", "Encoder", "RowError", "SamplePrompt", "Script"]
TEXT_PROMPT_TOKENS = 32  # a plain text's first tokens, which stand for a prompt
_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
MOST_FINDERS = 16  # kept at once, because each row may have its own variables
RowError = BadRow
# A script's remarks: an earlier answer would have another text or prompt as the last turn; no answer has reasoning,
# although the template asks for it.
OTHERWISE, UNREASONED = "otherwise", "unreasoned"
REMARKS = (OTHERWISE, UNREASONED)
_EMPTY_BLOCK = re.compile(r"\s*<think>\s*</think>\s*")
# A message with one of these turns thinking off, even if a template variable turns it on.
_SWITCHES = ("/no_think", "/nothink")


class ReasoningLeftOut(RowError):
    """A supervised turn that lacks the reasoning in its row."""

    def __init__(self, index: int) -> None:
        super().__init__(
            f"the chat template leaves out the reasoning of turn {index + 1}, which is supervised; write it into the "
            "content as <think>...</think>, remove it from the row, or give data.chat_template one that writes it"
        )


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt for the model, as tokens and text, and the data's own answer if there is one."""

    prompt_ids: list[int]
    prompt: str
    reference: str | None
    reference_tokens: int = 0  # with the token that ends the answer


class Encoder:
    """Tokenises rows with one tokenizer and one data section. Needs neither model nor torch."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: Data, model: ModelSection | None = None) -> None:
        """Raises FinetuneError for a slow tokenizer.

        Args:
            model: Its settings say whether it ends an answer with the next turn's header. They are read if a template
                writes no other end.
        """
        self._tokenizer = tokenizer
        self._data = data
        self._model = model
        self.texts = TextTokenizer(tokenizer)
        self._template: ChatTemplate | None = None
        self._finders: dict[tuple[str, Form], SpanFinder] = {}  # by the template's variables
        self._asks: dict[str, bool] = {}  # by the template's variables: whether the template asks for reasoning
        self._reasoning_keys: list[str] | None = None  # the template reads these; None: not known yet
        self._splits_content = False  # whether the template itself takes a thinking block out of the content

    def examples(self, read: Content) -> list[Content]:
        """A row's examples: the row itself, or one chat for each supervised answer with train_on: each_turn.

        A preference pair gives two judged answers if the data set's rows are judged.
        """
        if isinstance(read, Pair) and self._data.unit == "judged":
            return [Judged(read.chosen, desirable=True), Judged(read.rejected, desirable=False)]
        if isinstance(read, Chat) and self._data.train_on == "each_turn":
            return [*by_turn(read)] or [read]
        return [read]

    def document(self, read: Content) -> Document:
        """Encode a row; for a pair, the chosen answer. Raises RowError."""
        return self.documents(read)[0]

    def documents(self, read: Content) -> list[Document]:
        """Encode a row: one document, or a pair's chosen and rejected one. Raises RowError."""
        documents = self.tokenised([self.scripts(read)])[0]
        if isinstance(documents, RowError):
            raise documents
        return documents

    def scripts(self, read: Content) -> tuple[Script, ...]:
        """The scripts for a row's documents: one, or a pair's chosen and rejected one. Raises RowError."""
        return tuple(self.script(document) for document in documents_in(read))

    def tokenised(self, rows: Sequence[Sequence[Script]]) -> list[list[Document] | RowError]:
        """Tokenise many rows' scripts. A row gives its documents or its mistake.

        One row's documents begin with the same prompt tokens. If the tokenizer would join the prompt's end with one
        answer's start, every document is split there before tokenising.
        """
        encoded = iter(self.texts.tokenise([script for scripts in rows for script in scripts]))
        result: list[list[Document] | RowError] = []
        for scripts in rows:
            documents: list[Document] = []
            mistake: RowError | None = None
            for document in islice(encoded, len(scripts)):
                if isinstance(document, RowError):
                    mistake = mistake or document
                else:
                    documents.append(document)
            if mistake is None and len({*map(_prompt_tokens, documents)}) > 1:
                documents = [self.texts.tokenise_cut(script) for script in scripts]
                if len({*map(_prompt_tokens, documents)}) > 1:
                    mistake = RowError(
                        "the two answers have different prompt tokens, so they cannot be compared; give both answers "
                        "the same form, or remove the row"
                    )
            result.append(mistake or documents)
        return result

    def script(self, read: Chat | Passage) -> Script:
        """A document's text and its supervised spans. Raises RowError."""
        if isinstance(read, Chat):
            script = self._chat_script(read)
        else:
            end = self._tokenizer.eos_token
            if not end:
                raise RowError("the tokenizer has no end-of-text token to supervise; use one that has an eos_token")
            # People add an end-of-text token by hand. With the tokenizer's own one it would be there twice.
            text = read.prompt + read.completion.removesuffix(end)
            span = (0 if self._data.train_on == "all" else len(read.prompt), len(text))
            literals, is_text = self.texts.literals(text), not read.prompt
            script = Script(text, [span], literals, is_text=is_text, affixes=True, stops=(end,))
        if not script.supervised:
            raise RowError("nothing in this row is supervised; give an assistant turn the weight 1, or remove the row")
        return script

    def prompt_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """A chat's tokens up to the assistant's answer. Raises RowError."""
        variables = self._data.chat_template_kwargs
        form = self.template.forms(variables, tools=False)[0]
        finder = self._finder(variables, form)
        text = self.template.render(messages, generation_prompt=True, variables=variables, form=form)
        return self.texts.tokenise_cut(Script(text, [], finder.find_literals(messages, None, text))).input_ids

    @property
    def has_template(self) -> bool:
        """Whether questions are asked as chats."""
        return bool(self._tokenizer.chat_template or self._data.chat_template)

    def sample_prompt(self, text: str, opening: Sequence[dict[str, Any]] = ()) -> SamplePrompt:
        """A user's message as a prompt, after the messages `opening`; as plain text without a chat template."""
        if self.has_template:
            ids = self.prompt_ids([*opening, {"role": "user", "content": text}])
        else:
            literals = self.texts.literals(text)
            ids = [*self.texts.start_ids, *self.texts.tokenise_cut(Script(text, [], literals)).input_ids]
        return SamplePrompt(ids, text, None)

    def prompt_of(self, ids: np.ndarray, labels: np.ndarray) -> SamplePrompt:
        """Split a document into a prompt and its last answer. A text without a prompt is split in its first half.

        With supervised tokens at 5, 6, 7, 20 and 21, the prompt is the tokens before 20, and the answer is 20 and 21.
        """
        supervised = np.flatnonzero(labels != IGNORE)
        gaps = np.flatnonzero(np.diff(supervised) > 1)
        start, end = int(supervised[0]), int(supervised[-1]) + 1
        if len(gaps):
            start = int(supervised[gaps[-1] + 1])
        if start <= 1:
            start = max(1, min(TEXT_PROMPT_TOKENS, len(ids) // 2))
        prompt = ids[:start].tolist()
        reference = self.texts.decode(ids[start:end].tolist(), skip_special_tokens=True)
        return SamplePrompt(prompt, self.texts.decode(prompt), reference, end - start)

    def token_ids(self, tokens: Iterable[str]) -> list[int]:
        """Control tokens' ids, ascending."""
        ids = self._tokenizer.convert_tokens_to_ids([*tokens])
        if isinstance(ids, list):
            return sorted(ids)
        return [ids]

    def conversation(self, stops: Iterable[int] | None = None, facts: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        """How chats are written.

        Args:
            stops: The ids that end the rows' answers; None: those of a probe's answer.
            facts: Of the training rows, by RowReader: whether they have tools, and which system messages.
        """
        templates: Mapping[str, str] = {}
        if self._data.chat_template:
            templates = {"default": read_source(self._data.chat_template)}
        elif own := self._tokenizer.chat_template:
            templates = own if isinstance(own, dict) else {"default": own}
        if stops is None:
            probe = Chat(_PROBE, None, [False, True], self._data.chat_template_kwargs)
            stops = self.token_ids(self.script(probe).stops) if templates else []
        ids = sorted({*stops})
        tokens = self._tokenizer.convert_ids_to_tokens(ids)
        stops_by_token = dict(zip(tokens, ids, strict=True))
        systems = {text for rows in facts for text in rows.get("systems", ())} or {""}
        return Conversation(
            templates,
            self._data.date_string,
            self._data.chat_template_kwargs,
            stops_by_token,
            system=systems.pop() if len(systems) == 1 else None,
            tools=any(rows.get("with_tools") for rows in facts),
        )

    def identity(self) -> dict[str, str]:
        """Digests of everything that decides tokens and masks, except data and settings."""
        self.texts.call([""])  # brings truncation and padding, which are part of the backend's text, into one state
        parts = {
            "tokenizer": self._tokenizer.backend_tokenizer.to_str(),
            "special": repr(sorted(self._tokenizer.special_tokens_map.items(), key=str)),
            "template": repr(self._data.chat_template and read_source(self._data.chat_template))
            + repr(self._tokenizer.chat_template),
        }
        if ends := self._ends_in_use():  # most templates write an end of their own
            parts["ends"] = repr(sorted(ends))
        return {name: hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for name, text in parts.items()}

    def _ends_in_use(self) -> list[str]:
        """The model's own end tokens, if the template ends a probe's answer with the next turn's header alone."""
        ends: list[str] = []

        def own_ends() -> list[str]:
            ends.extend(self._own_ends())
            return ends

        if self.has_template:
            form = self.template.forms(self._data.chat_template_kwargs, tools=False)[0]
            render = partial(self.template.render, variables=self._data.chat_template_kwargs, form=form)
            with suppress(RowError):  # the header is not among them, or the template wants another chat
                SpanFinder(render, self.texts.special, own_ends).find(_PROBE, None, [1])
        return ends

    def _chat_script(self, chat: Chat) -> Script:
        train_on = self._data.train_on
        answers = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        chosen = [index for index in answers if chat.supervised[index]]
        if train_on == "completion":
            chosen = [index for index in chosen if index == answers[-1]]
        if not chosen:
            return Script("", [], [])
        if train_on == "completion":
            # The turns after the answer are unsupervised, and may change how the template writes the answer.
            chat = replace(chat, messages=chat.messages[: chosen[-1] + 1])
        indices = answers if train_on == "all" else chosen
        messages = self._as_read_by_template(chat.messages)
        rendered = self._find_spans(messages, chat, indices)
        if changed := _without_second_blocks(messages, rendered, chosen):
            rendered = self._find_spans(changed, chat, indices)
        for index in chosen:
            self._check_reasoning(chat, index, rendered)
        remarks = []
        if any(index in rendered.differing for index in chosen):
            remarks.append(OTHERWISE)
        is_switched_off = any(switch in message["content"] for message in chat.messages for switch in _SWITCHES)
        has_reasoning = any(reasoning_of(chat.messages[index]).strip() for index in chosen)
        if not has_reasoning and not is_switched_off and self._thinking_changes(chat.template_kwargs, False):
            remarks.append(UNREASONED)
        supervised = [rendered.turns[index] for index in chosen]
        if train_on == "all":
            # All except the other turns: turns at 10 to 20 and 30 to 40 in 45 characters, the first one not chosen,
            # give (0, 10) and (20, 45).
            others = (span for index, span in rendered.turns.items() if index not in chosen)
            edges = [0, *chain.from_iterable(others), len(rendered.text)]
            supervised = [span for span in zip(edges[::2], edges[1::2], strict=True) if span[0] < span[1]]
        stops = tuple(sorted(rendered.stops))
        return Script(rendered.text, supervised, rendered.literals, remarks=tuple(remarks), stops=stops)

    def _find_spans(self, messages: list[dict[str, Any]], chat: Chat, indices: list[int]) -> Rendered:
        """Render the chat in the template's form, with its spans. Raises RowError."""
        refused: RowError | None = None
        forms = self.template.forms(chat.template_kwargs, tools=bool(chat.tools))
        if not any(message.get("tool_calls") for message in messages):
            forms = forms[:1]  # forms differ in the way they write calls
        for form in forms:
            try:
                return self._finder(chat.template_kwargs, form).find(messages, chat.tools, indices)
            except RowError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _check_reasoning(self, chat: Chat, index: int, rendered: Rendered) -> None:
        """Raises RowError if a supervised turn lacks the reasoning in its row."""
        start, end = rendered.turns[index]
        reasoning = reasoning_of(chat.messages[index])
        if _without_space(reasoning) in _without_space(rendered.text[start:end]):
            return
        if index + 1 < len(chat.messages):  # as at inference, templates write only the last turn's reasoning
            alone = replace(chat, messages=chat.messages[: index + 1], supervised=[False] * index + [True])
            try:
                self._chat_script(alone)
            except RowError:
                raise ReasoningLeftOut(index) from None
            raise OmittedFromHistory("leaves out the reasoning of", index)
        raise ReasoningLeftOut(index)

    def variables_for_server(self, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Template variables that a request to a server must name, so that it writes a chat as this encoder does.

        An exported template has the recipe's variables as defaults. But llama.cpp sets enable_thinking: true where a
        request does not name it.

        Args:
            own: The chat's; None: the recipe's.
        """
        usual = self._data.chat_template_kwargs
        own = usual if own is None else own
        variables = {} if own == usual else dict(own)
        if self._thinking_changes(own, True) and not self._thinking_changes(own, False):
            variables["enable_thinking"] = False
        return variables

    def _thinking_changes(self, variables: Mapping[str, Any], on: bool) -> bool:
        """Whether enable_thinking changes the template's prompt."""
        if not self.has_template or not self.template.takes("enable_thinking"):
            return False
        key = json.dumps([variables, on], sort_keys=True, default=str)
        if key not in self._asks:
            question = [{"role": "user", "content": "a"}]
            prompts = set()
            try:
                form = self.template.forms(variables, tools=False)[0]
                for changed in (variables, {**variables, "enable_thinking": on}):
                    prompts.add(self.template.render(question, generation_prompt=True, variables=changed, form=form))
            except BadRow:  # a template that wants more than a question
                prompts.clear()
            self._asks[key] = len(prompts) == 2
        return self._asks[key]

    @property
    def template(self) -> ChatTemplate:
        """The recipe's or the tokenizer's chat template. Raises DataError without one."""
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer, self._data.chat_template, self._data.date_string)
        return self._template

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raises RowError for a variable that the chat template lacks, or a text with a control token."""
        for name, value in variables.items():
            if not self.template.takes(name):
                raise RowError(
                    f"chat_template_kwargs: the chat template has no variable {name!r}; remove it, or give "
                    "data.chat_template one that has"
                )
            if token := next((part for part in texts_of(value) if self.texts.literals(part)), None):
                raise RowError(f"chat_template_kwargs: {name} spells a control token in {token[:40]!r}; remove it")

    def _finder(self, variables: Mapping[str, Any], form: Form) -> SpanFinder:
        """The span finder for the template with these variables."""
        key = json.dumps(variables, sort_keys=True, default=str), form
        if key not in self._finders:
            self.check_variables(variables)
            if len(self._finders) == MOST_FINDERS:
                self._finders.clear()
                self._asks.clear()
            render = partial(self.template.render, variables=variables, form=form)
            self._finders[key] = SpanFinder(render, self.texts.special, self._own_ends)
        return self._finders[key]

    def _own_ends(self) -> list[str]:
        """The tokens on which the model's own settings end an answer."""
        ids = own_end_tokens(self._model) if self._model else []
        return [token for token in self._tokenizer.convert_ids_to_tokens(ids) if token]

    def _as_read_by_template(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Move each message's reasoning to the key that the template reads, if it reads one."""
        if self._reasoning_keys is None:
            self._reasoning_keys = [key for key in REASONING if self.template.reads(key)]
            self._splits_content = self.template.mentions("</think>")
        read_keys, renamed = self._reasoning_keys, []
        if read_keys and not self._splits_content:
            messages = [_out_of_content(message) for message in messages]
        if not any(key in message for message in messages for key in REASONING):
            return messages
        for message in messages:
            message_key = next((key for key in REASONING if message.get(key)), None)
            others = {name: value for name, value in message.items() if name not in REASONING}
            if message_key is None:
                renamed.append(others)  # empty reasoning makes some templates write an empty thought
            elif read_keys and message_key not in read_keys:
                renamed.append(others | {read_keys[0]: message[message_key]})
            else:
                renamed.append(others | {message_key: message[message_key]})
        return renamed


def answer_of(ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    """The tokens from the first supervised one on."""
    start = next((place for place, label in enumerate(labels) if label != IGNORE), len(labels))
    return [*ids[start:]]


def _prompt_tokens(document: Document) -> tuple[int, ...]:
    """The tokens before the first supervised one."""
    supervised = (position for position, label in enumerate(document.labels) if label != IGNORE)
    return tuple(document.input_ids[: next(supervised, None)])


def _out_of_content(message: dict[str, Any]) -> dict[str, Any]:
    """Move the thinking block at the content's start to its own key.

    {"content": "<think>Hm</think>Hi"} becomes {"content": "Hi", "reasoning_content": "Hm"}.
    """
    before, end, answer = message["content"].partition("</think>")
    is_block = end and before.lstrip().startswith("<think>") and message["role"] == "assistant"
    if not is_block or any(message.get(key) for key in REASONING):
        return message
    return message | {"content": answer.lstrip(), REASONING[0]: reasoning_of(message).strip()}


def _without_second_blocks(
    messages: list[dict[str, Any]], rendered: Rendered, chosen: Sequence[int]
) -> list[dict[str, Any]] | None:
    """Remove the empty thinking block at a chosen turn's start if the prompt ends with one; None without such a turn.

    Raises BadRow for a second block with reasoning.
    """
    changed: dict[int, dict[str, Any]] = {}
    for index in chosen:
        start, end = rendered.turns[index]
        is_closed = rendered.text[max(0, start - 40) : start].rstrip().endswith("</think>")
        if not is_closed or not rendered.text[start:end].lstrip().startswith("<think>"):
            continue
        content = messages[index]["content"]
        block = _EMPTY_BLOCK.match(content)
        if block is None or reasoning_of(messages[index]).strip():
            raise ReasoningAfterClosedBlock(index)
        changed[index] = messages[index] | {"content": content[block.end() :]}
    if not changed:
        return None
    return [changed.get(index, message) for index, message in enumerate(messages)]


def _without_space(text: str) -> str:
    return "".join(text.split())
