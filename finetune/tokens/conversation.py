"""How a run's chats are written and where its answers end: conversation.json in the run's folder.

It is written when rows are tokenised. Samples, scores, chat, eval and every export follow it, not the recipe's template
file or the base's settings.

    {"templates": {"default": "{% for ..."}, "date_string": "26 Jul 2024", "chat_template_kwargs": {},
     "stops": {"<|im_end|>": 2}, "system": "Answer briefly.", "tools": false}
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.tokens.chat_template import pin_date
from finetune.untrusted.json_files import read_object, unreadable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONVERSATION = "conversation.json"
REQUIRED = ("templates", "date_string", "chat_template_kwargs", "stops")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A run's chat templates with their arguments, and the tokens that end its answers."""

    templates: Mapping[str, str]  # name -> unchanged Jinja text: "default", and a tokenizer's others; empty without any
    date_string: str
    chat_template_kwargs: Mapping[str, Any]
    stops: Mapping[str, int]  # token -> its id
    system: str | None = ""  # the system message with which all training rows begin; None: they have several
    tools: bool = False  # whether training rows have tools or calls

    def opening(self, own: str | None = None) -> list[dict[str, str]]:
        """The messages with which a chat begins: the run's system message, or the user's `own` ("": none)."""
        text = self.system if own is None else own
        return [{"role": "system", "content": text}] if text else []

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def exported_template(self, name: str = "default") -> str:
        """A template that needs no arguments: any engine writes the training's prompts with it.

        The date is fixed, as in training: some engines pass today's. The other arguments are defaults, which a request
        may change. A template without arguments stays as it is.

            {%- set date_string = '26 Jul 2024' -%}{%- if enable_thinking is not defined -%}
            {%- set enable_thinking = False -%}{%- endif %}

        Engines remove the line break after the last tag (trim_blocks), as transformers does.
        """
        text = pin_date(self.templates[name], self.date_string)
        tags = ""
        if re.search(r"\bdate_string\b", text):
            tags = f"{{%- set date_string = {self.date_string!r} -%}}"
        for variable, value in self.chat_template_kwargs.items():  # repr: Jinja reads Python's literals
            tags += f"{{%- if {variable} is not defined -%}}{{%- set {variable} = {value!r} -%}}{{%- endif -%}}"
        if not tags:
            return text
        return f"{tags.removesuffix('-%}')}%}}\n{text}"

    def template_for_engines(self) -> str:
        """One template for engines that take one: the template for tools where a request has some, as transformers
        chooses, else the default."""
        default = self.exported_template()
        if "tool_use" not in self.templates:
            return default
        with_tools = self.exported_template("tool_use")
        texts = (text.removesuffix("\n") for text in (with_tools, default))  # Jinja leaves out a file's last line break
        return "{{% if tools %}}\n{}{{% else %}}\n{}{{% endif %}}".format(*texts)

    def applied_to(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
        """The tokenizer to export: a copy with the training's template as its own."""
        if not self.templates:
            return tokenizer
        result = copy.copy(tokenizer)
        exported = {name: self.exported_template(name) for name in self.templates}
        result.chat_template = exported if len(exported) > 1 else exported["default"]
        return result


def read_conversation(run_dir: Path) -> Conversation | None:
    """A run folder's conversation.json; None in the folder of an earlier release. Raises FinetuneError."""
    file = run_dir / CONVERSATION
    if not file.is_file():
        return None
    facts = read_object(file)
    templates, date, variables, stops = (facts.get(name) for name in REQUIRED)
    system, tools = facts.get("system", ""), facts.get("tools", False)  # an earlier release wrote neither
    problem = None
    are_texts = isinstance(templates, dict) and all(isinstance(text, str) for text in templates.values())
    if not are_texts or (templates and "default" not in templates):
        problem = "templates"
    elif not isinstance(date, str):
        problem = "date_string"
    elif not isinstance(variables, dict) or not all(map(_NAME.match, variables)):
        problem = "chat_template_kwargs"
    elif not isinstance(stops, dict) or not all(type(number) is int and number >= 0 for number in stops.values()):
        problem = "stops"
    elif not isinstance(system, str | None):
        problem = "system"
    elif not isinstance(tools, bool):
        problem = "tools"
    if problem:
        raise unreadable(file, f"{problem} is not as a training writes it", "resume the run, which writes it again")
    return Conversation(templates, date, variables, stops, system, tools)  # type: ignore[arg-type]  # each was checked
