"""Renders chat templates reproducibly: the library renders, and today's date is pinned."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from finetune.data.cells import BadRow
from finetune.errors import DataError
from finetune.library_errors import library_errors, words_of
from finetune.output_stream import one_line
from finetune.paths import open_regular
from finetune.untrusted.programs import template_problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TEMPLATE_BYTES = 2**20  # the longest known template has 20 kB
MOST_FORMS = 64  # remembered at once; each row may have its own variables
_HALF = re.compile("[\ud800-\udfff]")
_FORMAT = re.compile(r"""["']([^"'\n]*%[a-zA-Z-][^"'\n]*)["']""")


# Words in the probes of `forms`: a template writes them unchanged, and no template contains them itself.
_QUESTION, _ANSWER, _TOOL_NAME, _VALUE = "xqasked", "xqsaid", "xqlook", "xqvalue"
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _TOOL_NAME, "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class Form:
    """A template's form for messages."""

    parts: bool = False  # contents are lists of parts, as templates with images need them
    text_arguments: bool = False  # call arguments are JSON text, as in OpenAI's responses
    null_content: bool = False  # the content beside calls is None, not ""

    def of(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages in this form."""
        if self == DEFAULT_FORM:
            return list(messages)
        converted = []
        for message in messages:
            result, calls = dict(message), message.get("tool_calls")
            if calls and self.text_arguments:
                result["tool_calls"] = [
                    call | {"function": call["function"] | {
                        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)
                    }}
                    for call in calls
                ]  # fmt: skip
            if calls and self.null_content and not message["content"]:
                result["content"] = None
            elif self.parts:
                result["content"] = [{"type": "text", "text": message["content"]}]
            converted.append(result)
        return converted


DEFAULT_FORM = Form()


class ChatTemplate:
    """Renders messages with the tokenizer's template, or the recipe's, on the same day every day."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str | None, date_string: str) -> None:
        """`source` is Jinja text or a file's name; None: the tokenizer's own. Raises DataError."""
        self._tokenizer = tokenizer
        self._date = date_string
        self._own = read_source(source) if source is not None else None
        if self._own is None and not tokenizer.chat_template:
            raise DataError(
                ["data.chat_template: the tokenizer has no chat template; name one (Jinja text or a file), or choose "
                 "data of format text or prompt_completion"]
            )  # fmt: skip
        self._pinned: dict[bool, str] = {}
        self._forms: dict[tuple[str, bool], list[Form]] = {}

    def source(self, *, tools: bool = False) -> str:
        """The template's text with the date pinned; some tokenizers have another template for rows with tools."""
        if tools in self._pinned:
            return self._pinned[tools]
        text = self._own
        if not text:
            place = "data.chat_template: the tokenizer's chat template cannot be read"
            with library_errors(lambda error: DataError([f"{place}: {words_of(error, 120)}; name one"])):
                text = self._tokenizer.get_chat_template(None, tools=[{}] if tools else None)
                if not isinstance(text, str):
                    raise TypeError(f"it is not text but {type(text).__name__}")
        if problem := template_problem(text):
            raise DataError([f"data.chat_template: the chat template {problem}; choose another template"])
        self._pinned[tools] = pin_date(text, self._date)
        return self._pinned[tools]

    def reads(self, key: str) -> bool:
        """Whether the template reads this message key: m.key, m['key'], or 'key' in m."""
        word = re.escape(key)
        return self._mentions(rf"\.{word}\b|['\"]{word}['\"]")

    def mentions(self, text: str) -> bool:
        """Whether the template contains the text."""
        return self._mentions(re.escape(text))

    def takes(self, variable: str) -> bool:
        """Whether the template has a variable with this name."""
        return self._mentions(rf"\b{re.escape(variable)}\b")

    def _mentions(self, pattern: str) -> bool:
        return any(re.search(pattern, self.source(tools=tools)) for tools in (False, True))

    def forms(self, variables: Mapping[str, Any], *, tools: bool) -> list[Form]:
        """Find the template's form for messages by rendering a probe chat.

        If no form renders the probe, returns all forms, so that the caller can try a chat with calls in each.
        """
        key = (json.dumps(variables, sort_keys=True, default=str), tools)
        if key in self._forms:
            return self._forms[key]
        if len(self._forms) >= MOST_FORMS:
            self._forms.clear()
        question: dict[str, Any] = {"role": "user", "content": _QUESTION}

        probe_tools = [_PROBE_TOOL] if tools else None

        def written(form: Form, answer: dict[str, Any]) -> str:
            messages = [question, {"role": "assistant", **answer}]
            try:
                return self.render(messages, probe_tools, variables=variables, form=form)
            except BadRow:
                return ""

        in_words = {"content": _ANSWER}
        takes_texts = _ANSWER in written(DEFAULT_FORM, in_words)
        parts = not takes_texts and _ANSWER in written(Form(parts=True), in_words)
        arguments = {"at": {_VALUE: [None, True]}, "of": _VALUE}
        call = {"id": "call00001", "type": "function", "function": {"name": _TOOL_NAME, "arguments": arguments}}
        forms = [
            Form(parts, text_arguments, null_content)
            for null_content in (False, True)
            for text_arguments in (False, True)
        ]
        for form in forms:
            text = written(form, {"content": "", "tool_calls": [call]})
            # A template that joins arguments to text with `~` writes an object in Python's form, not as JSON.
            if _TOOL_NAME in text and text.count(_VALUE) >= 2 and str(arguments) not in text:
                forms = [form]
                break
        self._forms[key] = forms
        return forms

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        form: Form = DEFAULT_FORM,
        generation_prompt: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """A chat's text. Raises BadRow with the template's own message.

        Args:
            messages: In the default form.
            form: The template's form.
            variables: The template's own variables.
        """
        from jinja2 import TemplateError, TemplateSyntaxError

        source = self.source(tools=bool(tools))  # outside the try, because a bad template is not this row's mistake
        try:
            text = self._tokenizer.apply_chat_template(
                form.of(messages),
                tools=None if tools is None else [*tools],
                chat_template=source,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                date_string=self._date,
                **variables,
            )
        except TemplateSyntaxError as error:
            mistake = f"data.chat_template: line {error.lineno}: {one_line(error.message)}; correct the template"
            raise DataError([mistake]) from None
        except Exception as error:  # a template is a stranger's program and may raise anything
            reason = words_of(error, 160)
            if isinstance(error, TemplateError):
                reason = one_line(error, 160).rstrip(".")
            raise BadRow(
                f"the chat template refuses this row: {reason}; change the row, or data.chat_template"
            ) from None
        assert isinstance(text, str)
        if not text.isascii() and (half := _HALF.search(text)):  # from an unchecked value: a name, an identifier
            code = f"\\u{ord(half[0]):04x}"
            raise BadRow(f"the chat holds half a character ({code}) once rendered; escape both halves of the pair")
        return text


def read_source(source: str) -> str:
    """Jinja text as it is, or the named file's text. Raises DataError."""
    if "{" in source:
        return source
    try:
        with open_regular(source) as file:
            content = file.read(MOST_TEMPLATE_BYTES + 1)
        if len(content) > MOST_TEMPLATE_BYTES:
            raise OSError(errno.EFBIG, f"is larger than {MOST_TEMPLATE_BYTES // 2**20} MiB", source)
        return content.decode("utf-8")
    except (OSError, ValueError) as error:
        reason: str | None = "not UTF-8"
        if isinstance(error, OSError):
            reason = error.strerror
        mistake = f"data.chat_template: {one_line(source)}: {reason}; name a file of Jinja text, or write the text"
        raise DataError([mistake]) from None


def pin_date(source: str, date_string: str) -> str:
    """Replace a template's `strftime_now` by the pinned day, in each format that the template uses.

    A macro with that name hides the library's function (Llama 3.2's templates call it; 3.1 takes `date_string`). The
    macro is on the template's first line, so line numbers in errors stay right:

        macro strftime_now(format): if format == '%Y-%m-%d': 2024-07-26, else: 26 Jul 2024
    """
    if "strftime_now" not in source:
        return source
    branches = ""
    for form in dict.fromkeys(_FORMAT.findall(source)):
        day = date_string
        with suppress(ValueError):  # a pinned text that is not a day in Llama's own format stays as it is
            day = datetime.strptime(date_string, "%d %b %Y").strftime(form)
        branches += f"{{%- elif format == {form!r} -%}}{{{{- {day!r} -}}}}"
    otherwise = f"{{%- else -%}}{{{{- {date_string!r} -}}}}"
    choice = f"{{%- if false -%}}{branches}{otherwise}{{%- endif -%}}"
    return f"{{%- macro strftime_now(format) -%}}{choice}{{%- endmacro -%}}{source}"
