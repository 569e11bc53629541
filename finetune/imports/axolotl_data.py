"""axolotl's data sets and templates into the data section."""

from __future__ import annotations

from typing import Any

from finetune.imports.shared import data_set, named_template
from finetune.imports.templates import TEMPLATES
from finetune.imports.theirs import Theirs

_TRUNCATION = {"drop": "drop", "truncate": "right", "raise": "error"}
_NAMES = {"llama3": "llama3", "chatml": "chatml"}
# A row's type in their words -> ours; alpaca is a text with headings there, no chat.
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text", "chat_template": "messages"}
_COLUMNS = {"messages": "messages", "conversations": "sharegpt"}
# What says no more than our formats know by themselves: their own names of role and text, and of the learned turns.
_USUAL = {
    "message_property_mappings.role": ("role", "from"),
    "message_property_mappings.content": ("content", "value"),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "roles_to_train": (["assistant"], ["gpt"], ["gpt", "assistant"], ["assistant", "gpt"]),
    "train_on_eos": ("turn", "all"),
    "train_on_eot": ("turn", "all"),
    "roles.assistant": (["gpt"], ["assistant"], ["gpt", "model"], ["model"], ["gpt", "assistant"]),
    "roles.user": (["human"], ["user"], ["human", "user"]),
    "roles.system": (["system"],),
    "roles.tool": (["tool"],),
    "field": ("text",),
    "field_tools": ("tools",),
}


def data(theirs: Theirs) -> None:
    """The data section: rows, their length and packing, what is learned, the template. Raises RecipeError."""
    key = "datasets" if theirs.peek("datasets") else "pretraining_dataset"
    if not isinstance(theirs.peek(key), list):
        theirs.refuse("datasets", "a list of data sets is needed")
    theirs.write("data.train", _entries(theirs, key), key)
    if theirs.peek("test_datasets"):
        theirs.write("data.eval", _entries(theirs, "test_datasets"), "test_datasets")
    theirs.carry("data.max_length", "sequence_len", default=512)
    theirs.carry("data.packing", "sample_packing", default=False)
    strategy = theirs.get("excess_length_strategy")
    why = "excess_length_strategy" if strategy else "axolotl's default"
    theirs.write("data.truncation", _TRUNCATION.get(str(strategy or "drop").lower(), "error"), why)
    if theirs.get("train_on_inputs") is True:
        theirs.write("data.train_on", "all", "train_on_inputs")
    _template(theirs, key)


def _entries(theirs: Theirs, key: str) -> list[dict[str, Any]]:
    return [_entry(theirs, f"{key}.{index}") for index in range(len(theirs.peek(key)))]


def _entry(theirs: Theirs, at: str) -> dict[str, Any]:
    for name, usual in _USUAL.items():
        if theirs.peek(f"{at}.{name}") in usual:
            theirs.get(f"{at}.{name}")
    if theirs.get(f"{at}.path") is None:
        theirs.refuse(f"{at}.path", "a data set needs a path")
    kind = theirs.get(f"{at}.ds_type")
    files = theirs.get(f"{at}.data_files")
    if theirs.get(f"{at}.trust_remote_code"):
        theirs.leave(f"{at}.trust_remote_code", "look", "code of data sets is never run")
    return data_set(
        str(theirs.get(f"{at}.path")),
        files=files,
        kind=kind,
        name=theirs.get(f"{at}.name"),
        split=theirs.get(f"{at}.split"),
        revision=theirs.get(f"{at}.revision"),
        format=_format(theirs, at),
    )


def _format(theirs: Theirs, at: str) -> str:
    kind, column = theirs.get(f"{at}.type"), theirs.get(f"{at}.field_messages")
    word = "text" if at.startswith("pretraining") else str(kind).split(".")[0].split(":")[0]
    if isinstance(kind, dict):
        theirs.leave(f"{at}.type", "differs", "a prompt of its own; write rows with the columns prompt and completion")
        return "auto"
    ours = "text" if word == "text" else _FORMATS.get(word)
    if ours == "messages":
        ours = _COLUMNS.get(str(column or "messages"))
        if ours is None:
            theirs.leave(f"{at}.field_messages", "look", "rename the column messages, or conversations")
        for name in ("role", "content"):
            shown = theirs.peek(f"{at}.message_property_mappings.{name}") or theirs.peek(f"{at}.message_field_{name}")
            ours = "sharegpt" if shown in ("from", "value") else ours
    if ours is None and kind is not None and column is None:
        theirs.leave(f"{at}.type", "look", "the layout is found from the columns; look at it by: finetune preview")
    return ours or "auto"


def _template(theirs: Theirs, key: str) -> None:
    """Alpaca's rows are a text with headings; other rows follow the chat template that is named."""
    kinds = {str(theirs.peek(f"{key}.{index}.type")).split(".")[0] for index in range(len(theirs.peek(key)))}
    jinja, name = theirs.get("chat_template_jinja"), theirs.peek("chat_template")
    if "alpaca" in kinds:
        theirs.write("data.chat_template", TEMPLATES["alpaca"], "type: alpaca")
        reason = "rows with an input: it follows the instruction here, without the heading ### Input: and its sentence"
        theirs.leave(f"{key}.*.type", "look", reason, "alpaca")
        if len(kinds) > 1:
            theirs.leave(f"{key}.*.type", "differs", "all rows follow one template here, Alpaca's", sorted(kinds))
        if name or jinja:
            theirs.leave("chat_template" if name else "chat_template_jinja", "look", "Alpaca's headings are used")
    elif jinja:
        theirs.get("chat_template")
        theirs.write("data.chat_template", jinja, "chat_template_jinja")
    elif name:
        named_template(theirs, "chat_template", _NAMES)
