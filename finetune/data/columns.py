"""Which layout the rows of a data set have, by which of its columns, and what to write where that is not clear.

A data set that cannot be read as it is gets one answer: the columns found, and the line for its entry in the recipe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from finetune.data.messages import nearest
from finetune.data.readers import BadRow
from finetune.recipe.cross_checks import OPTIONAL_COLUMNS, ROW_COLUMNS, layouts_with
from finetune.recipe.schema import DataSet, KnownFormat
from finetune.wording import counted

SHOWN_CHARACTERS = 90  # of a list of columns
# What data sets call a question, what belongs to it, and its answer; the first that a row has is taken.
QUESTIONS = ("instruction", "question", "prompt", "query", "problem", "input", "user", "human")
ANSWERS = ("output", "answer", "response", "completion", "solution", "target", "assistant", "summary", "sql")
CONTEXTS = ("input", "context", "passage")
REASONS = ("reasoning_content", "thinking", "reasoning")
REASONING_COLUMNS = REASONS[:2]  # read without being named: others may hold what is not meant to be learned
SYSTEMS = ("system", "system_prompt", "system_message")
TEXTS = ("content", "body", "document", "article", "story", "code")


@dataclass(frozen=True)
class RowLayout:
    """How the rows of a data set are read."""

    format: KnownFormat
    columns: Mapping[str, str] = field(default_factory=dict)  # ours -> the data set's; others keep their names
    roles: Mapping[str, str] = field(default_factory=dict)  # the data set's -> ours
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_guess: bool = False  # whether `columns` are this program's and not the recipe's

    def view(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row by our column names."""
        if not self.columns:
            return dict(row)
        taken = {*self.columns, *self.columns.values()}
        mapped = {ours: row[theirs] for ours, theirs in self.columns.items() if theirs in row}
        return mapped | {name: value for name, value in row.items() if name not in taken}

    def unused(self, row: Mapping[str, Any]) -> list[str]:
        """The data set's columns that hold something in this row and are not read."""
        read = {*ROW_COLUMNS[self.format], *OPTIONAL_COLUMNS[self.format]} - {*self.columns}
        read |= {*self.columns.values(), *(REASONING_COLUMNS if self.format == "alpaca" else ())}
        return [name for name, value in row.items() if name not in read and value not in (None, "", [], {})]


def layout_of(entry: DataSet, rows: Sequence[Mapping[str, Any]]) -> RowLayout:
    """The layout of a data set, from its first rows. Raises BadRow, once for the data set."""
    _check_mapped(entry.columns, rows)
    guessed = _known_names(entry, rows)
    layout = RowLayout("text", guessed or entry.columns, entry.roles, entry.chat_template_kwargs, bool(guessed))
    for row in rows:
        view = layout.view(row)
        if found := _detect(view, entry, layouts_with(layout.columns)):
            if entry.chat_template_kwargs and (found == "text" or isinstance(view.get("prompt"), str)):
                raise BadRow("chat_template_kwargs: these rows are texts, which no chat template renders; remove them")
            return replace(layout, format=found)
    raise BadRow(_answer(entry, rows))


def _detect(view: Mapping[str, Any], entry: DataSet, layouts: Sequence[str]) -> KnownFormat | None:
    """The first of these layouts whose columns the row has, or the recipe's own."""
    names = layouts if entry.format == "auto" else [entry.format]
    for held in (True, False):  # a column without a value in this row may have one in others
        for name in names:
            if all(view.get(column) is not None if held else column in view for column in ROW_COLUMNS[name]):
                return cast(KnownFormat, name)
    return None


def _check_mapped(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises BadRow where the data set lacks a column that the recipe names."""
    found = _names(rows)
    for ours, theirs in columns.items():
        if theirs not in found:
            near = nearest(theirs, found)
            hint = f"did you mean columns: {in_yaml({ours: near})}?" if near else "name one of them"
            raise BadRow(f"columns: {ours}: the data set has no column {theirs!r}, but {in_quotes(found)}; {hint}")


def _known_names(entry: DataSet, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The columns of layouts under names that are known: Dolly's, and ShareGPT's turns in a column `messages`."""
    found = _names(rows)
    if entry.columns:
        return {}
    turns = next((row["messages"] for row in rows if isinstance(row.get("messages"), list) and row["messages"]), [None])
    if entry.format in ("auto", "sharegpt") and "conversations" not in found and _has_keys(turns, "from", "value"):
        return {"conversations": "messages"}
    is_dolly = {"instruction", "response"} <= {*found} and not {"output", "messages", "conversations"} & {*found}
    if entry.format in ("auto", "alpaca") and is_dolly:
        return ({"input": "context"} if "context" in found and "input" not in found else {}) | {"output": "response"}
    return {}


def _has_keys(turns: Any, *keys: str) -> bool:
    """Whether a value is a list of objects of which the first has these keys."""
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and {*keys} <= {*turns[0]}


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _answer(entry: DataSet, rows: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong with the columns, and the line to add."""
    row, found = rows[0], _names(rows)
    if entry.format != "auto" or entry.columns:
        return _missing(entry, found)
    if "chosen" in found:
        pairs = f"preference rows ({in_quotes(found)}) are not trained on as pairs"
        return f"{pairs}; to learn what was chosen add columns: {in_yaml(_chosen(row))}"
    if suggested := _suggestion(row):
        return (
            f"no known layout: the columns are {in_quotes(found)}; add to this data set: columns: {in_yaml(suggested)}"
        )
    expected = list(dict.fromkeys(column for columns in ROW_COLUMNS.values() for column in columns))
    for name in found:
        if name not in expected and (near := nearest(name, expected)):
            return f"unknown column {name!r}; did you mean {near!r}? rename it, or add columns: {in_yaml({near: name})}"
    for columns in ROW_COLUMNS.values():
        missing = [column for column in columns if column not in found]
        if len(missing) < len(columns):
            other = next(column for column in columns if column != missing[0])
            return f"the field {missing[0]!r} is missing next to {other!r}; add it, or columns: {{{missing[0]}: ...}}"
    ours = "columns: {text: ...}, or {prompt: ..., completion: ...}, or {messages: ...}"
    return f"no known layout: the columns are {in_quotes(found) or 'none'}; name those to learn from by {ours}"


def _missing(entry: DataSet, found: Sequence[str]) -> str:
    """The columns that the recipe asks for are not all there."""
    names = layouts_with(entry.columns) if entry.format == "auto" else [entry.format]
    ours = next(name for name in ROW_COLUMNS[names[0]] if name not in {*found, *entry.columns})
    others = [name for name in found if name not in (*ROW_COLUMNS[names[0]], *entry.columns.values())]
    if near := nearest(ours, others):
        line = in_yaml({**entry.columns, ours: near})
        return f"the field {ours!r} is missing; {near!r} is there: rename it, or write columns: {line}"
    if entry.columns:
        line = in_yaml({**entry.columns, ours: "..."}).replace('"..."', "...")
        return f"the field {ours!r} is missing, the columns are {in_quotes(found)}; write columns: {line}"
    return f"the field {ours!r} is missing; add it, or choose another data format than {names[0]}"


def _suggestion(row: Mapping[str, Any]) -> dict[str, str]:
    """The columns that these names and values probably are; empty where that is not clear."""
    named = {name.lower(): name for name, value in row.items() if isinstance(value, str)}
    system = _first(SYSTEMS, named)
    for name, value in row.items():
        if _has_keys(value, "role", "content") or _has_keys(value, "from", "value"):
            ours = "messages" if "role" in value[0] else "conversations"
            return {ours: name} | ({"system": named[system]} if system and named[system] != "system" else {})
    question, answer = _first(QUESTIONS, named), _first(ANSWERS, named)
    if question and answer:
        context = _first([name for name in CONTEXTS if name != question], named)
        reason = _first(REASONS, named)
        pairs = {"system": system, "instruction": question, "input": context, "reasoning_content": reason}
        pairs |= {"output": answer}
        return {ours: named[name] for ours, name in pairs.items() if name and named[name] != ours}
    text = _first(TEXTS, named)
    return {"text": named[text]} if text else {}


def _first(words: Iterable[str], among: Mapping[str, str]) -> str | None:
    return next((word for word in words if word in among), None)


def _chosen(row: Mapping[str, Any]) -> dict[str, str]:
    """The columns by which a preference row's better answer is learned."""
    chosen, prompt = row.get("chosen"), row.get("prompt")
    if isinstance(chosen, list):
        answers_alone = isinstance(prompt, list) and bool(chosen) and chosen[0].get("role") == "assistant"
        return {"completion": "chosen"} if answers_alone else {"messages": "chosen"}
    question = _first(QUESTIONS, dict.fromkeys(row, ""))
    if question is None:
        return {"text": "chosen"}
    return ({"instruction": question} if question != "instruction" else {}) | {"output": "chosen"}


def in_quotes(names: Sequence[str]) -> str:
    """Names in quotes, as many as fit into a message, and the number of the others."""
    text = ""
    for shown, name in enumerate(names):
        part = f", {name!r}" if text else repr(name)
        if len(text) + len(part) > SHOWN_CHARACTERS:
            return f"{text} and {len(names) - shown:,} more" if text else f"{counted(len(names), 'name')}"
        text += part
    return text


def in_yaml(mapping: Mapping[str, str]) -> str:
    """A mapping in one line of YAML."""
    return "{" + ", ".join(f"{_quoted(key)}: {_quoted(value)}" for key, value in mapping.items()) + "}"


def _quoted(name: str) -> str:
    plain = re.fullmatch(r"[A-Za-z_][\w-]*", name, re.ASCII)
    is_value = name.lower() in ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
    return name if plain and not is_value else json.dumps(name, ensure_ascii=False)
