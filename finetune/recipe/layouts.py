"""The layouts that a row may have: one table for the recipe's checks, for reading rows and for `finetune init`."""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from finetune.recipe.sections.training import Objective

KnownFormat = Literal["messages", "prompt_completion", "text", "alpaca", "sharegpt", "preference", "kto"]


@dataclass(frozen=True)
class LayoutColumns:
    """A layout's columns, by our names."""

    columns: tuple[str, ...]  # each row has them
    optional: tuple[str, ...] = ()
    objective: Objective = "supervised"

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.columns, *self.optional)


OF_CHATS = ("system", "tools", "chat_template_kwargs")
# Before compared or judged answers: a text or messages, or a text that becomes a user's message.
_PROMPTS = ("prompt", "instruction", "input", *OF_CHATS)
# In the order of preference, if several fit.
LAYOUTS: dict[KnownFormat, LayoutColumns] = {
    "messages": LayoutColumns(("messages",), OF_CHATS),
    "sharegpt": LayoutColumns(("conversations",), OF_CHATS),
    "prompt_completion": LayoutColumns(("prompt", "completion"), OF_CHATS),
    "alpaca": LayoutColumns(("instruction", "output"), ("input", "history", "reasoning_content", *OF_CHATS)),
    "text": LayoutColumns(("text",)),
    "preference": LayoutColumns(("chosen", "rejected"), _PROMPTS, "dpo"),
    "kto": LayoutColumns(("completion", "label"), _PROMPTS, "kto"),
}
# The layout that `auto` means if training.objective is not supervised. Otherwise `auto` never means one of these.
FORMAT_OF_OBJECTIVE: dict[str, KnownFormat] = {
    layout.objective: name for name, layout in LAYOUTS.items() if layout.objective != "supervised"
}
_NEEDED = [name for layout in LAYOUTS.values() for name in layout.columns]
COLUMNS = tuple(dict.fromkeys([*_NEEDED, *(name for layout in LAYOUTS.values() for name in layout.optional)]))
# Columns that a data set's `template` may make: each is one text.
TEMPLATED = tuple("instruction input output prompt completion text system reasoning_content chosen rejected".split())
LAYOUTS_IN_WORDS = "choose from " + ", or ".join(" and ".join(layout.columns) for layout in LAYOUTS.values())


def layouts_with(columns: Iterable[str]) -> list[KnownFormat]:
    """The layouts that have all these columns, in the table's order."""
    return [name for name, layout in LAYOUTS.items() if {*columns} <= {*layout.all}]


def template_fields(text: str) -> list[str]:
    """The columns that a row's template names. Raises ValueError for anything but plain {column} fields."""
    fields = []
    for _, name, form, conversion in string.Formatter().parse(text):
        if name is None:
            continue
        if form or conversion:
            raise ValueError(f"has a format in {{{name}}}")
        if not name.strip() or any(sign in name for sign in ".[]"):
            raise ValueError(f"{{{name}}} is not a plain column")
        fields.append(name)
    return fields
