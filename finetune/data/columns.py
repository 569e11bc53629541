"""Finds a data set's layout by its columns. If the columns are not clear, one message says which line to write.

The message names the columns, and gives the line for the data set's entry in the recipe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from finetune.data.messages import nearest
from finetune.data.readers import BadRow, json_kind
from finetune.recipe.cross_checks import (
    FORMAT_OF_OBJECTIVE,
    OPTIONAL_COLUMNS,
    ROW_COLUMNS,
    layouts_with,
    template_fields,
)
from finetune.recipe.schema import DataSet, KnownFormat
from finetune.wording import counted

SHOWN_CHARACTERS = 90  # of a list of columns
# Usual column names for a question, its answer, and so on. The first name that a row has is taken.
QUESTIONS = ("instruction", "question", "prompt", "query", "problem", "input", "user", "human")
ANSWERS = ("output", "answer", "response", "completion", "solution", "target", "assistant", "summary", "sql")
CONTEXTS = ("input", "context", "passage")
REASONS = ("reasoning_content", "thinking", "reasoning")
REASONING_COLUMNS = REASONS[:2]  # read without being named; a column `reasoning` may not be meant for training
SYSTEMS = ("system", "system_prompt", "system_message")
TEXTS = ("content", "body", "document", "article", "story", "code")


@dataclass(frozen=True)
class RowLayout:
    """How a data set's rows are read."""

    format: KnownFormat
    columns: Mapping[str, str] = field(default_factory=dict)  # ours -> the data set's; other columns keep their names
    roles: Mapping[str, str] = field(default_factory=dict)  # the data set's -> ours
    template: Mapping[str, str] = field(default_factory=dict)  # ours -> a text with the data set's columns in braces
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_guess: bool = False  # whether this program guessed `columns`; else the recipe names them

    def view(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row by our column names."""
        if not self.columns and not self.template:
            return dict(row)
        mapped = {ours: row[theirs] for ours, theirs in self.columns.items() if theirs in row}
        mapped |= {ours: _fill_template(ours, text, row) for ours, text in self.template.items()}
        replaced = {*self.columns, *self.columns.values(), *self.template}
        return mapped | {name: value for name, value in row.items() if name not in replaced}

    def place(self, ours: str) -> str:
        """The data set's name for our column, for messages."""
        if ours in self.columns:
            return repr(self.columns[ours])
        if ours in self.template:
            return f"template: {ours}"
        return ours

    def unused(self, row: Mapping[str, Any]) -> list[str]:
        """The columns with a value in this row that are not read."""
        read = {*ROW_COLUMNS[self.format], *OPTIONAL_COLUMNS[self.format]} - {*self.columns, *self.template}
        read |= {*self.columns.values()} | {name for text in self.template.values() for name in template_fields(text)}
        if self.format == "alpaca":
            read |= {*REASONING_COLUMNS}
        return [name for name, value in row.items() if name not in read and value not in (None, "", [], {})]


def _fill_template(ours: str, text: str, row: Mapping[str, Any]) -> str:
    """Put a row's cells into a template; empty if all cells are. Raises BadRow for a list or an object."""
    cells = {}
    for name in template_fields(text):
        value = row.get(name)
        if isinstance(value, dict | list):
            raise BadRow(f"template: {ours}: the column {name!r} is {json_kind(value)}; fields take texts and numbers")
        cells[name] = "" if value is None else str(value)
    if cells and not any(cell.strip() for cell in cells.values()):
        return ""
    return text.format_map(cells)


def layout_of(entry: DataSet, rows: Sequence[Mapping[str, Any]]) -> RowLayout:
    """Find a data set's layout from its first rows. Raises BadRow, once for the data set."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    for ours, theirs in entry.columns.items():
        if theirs not in names:
            hint = "name one of them"
            if near := nearest(theirs, names):
                hint = f"did you mean columns: {in_yaml({ours: near})}?"
            raise BadRow(f"columns: {ours}: the data set has no column {theirs!r}, but {in_quotes(names)}; {hint}")

    for ours, text in entry.template.items():
        for name in template_fields(text):
            if name not in names:
                hint = "name one of them"
                if near := nearest(name, names):
                    hint = f"did you mean {{{near}}}?"
                raise BadRow(f"template: {ours}: the data set has no column {name!r}, but {in_quotes(names)}; {hint}")

    is_told = bool(entry.columns or entry.template)
    guessed = {} if is_told else _columns_of_known_sets(entry, rows, names)
    layout = RowLayout(
        "text",
        columns=guessed or entry.columns,
        roles=entry.roles,
        template=entry.template,
        chat_template_kwargs=entry.chat_template_kwargs,
        is_guess=bool(guessed),
    )
    # Mapped the wrong way round, the model would learn to prefer the worse answers.
    if layout.columns.get("chosen") in _WORSE_WORDS and layout.columns.get("rejected") in _BETTER_WORDS:
        swapped = {**layout.columns, "chosen": layout.columns["rejected"], "rejected": layout.columns["chosen"]}
        raise BadRow(f"columns: {in_yaml(layout.columns)} prefers the worse answers; swap them: {in_yaml(swapped)}")
    formats: Sequence[str] = [entry.format]
    if entry.format == "auto":
        named = layouts_with([*layout.columns, *layout.template])
        formats = [name for name in named if name not in FORMAT_OF_OBJECTIVE.values()]
    elif entry.format == "kto" and not {"chosen", "rejected"} - {*names, *layout.columns}:
        formats = ["preference"]  # each row is two judged answers
    for row in rows:
        view = layout.view(row)
        format = _format_with_columns(view, formats)
        if format is None:
            continue
        answer = {"prompt_completion": "completion", "kto": "completion", "preference": "chosen"}.get(format, "")
        are_texts = isinstance(view.get("prompt"), str) and isinstance(view.get(answer), str)
        if entry.chat_template_kwargs and (format == "text" or are_texts):
            raise BadRow("chat_template_kwargs: these rows are texts, which no chat template renders; remove them")
        return replace(layout, format=format)
    if entry.format in FORMAT_OF_OBJECTIVE.values():
        raise BadRow(_answer_to_no_preferences(entry, rows[0], names))
    if entry.format != "auto" or is_told:
        raise BadRow(_answer_to_missing(entry, formats[0], names))
    raise BadRow(_answer_to_unknown(rows[0], names))


def _format_with_columns(view: Mapping[str, Any], formats: Sequence[str]) -> KnownFormat | None:
    """The first format whose columns the row has; formats whose columns have values in this row come first."""
    for name in formats:
        if all(view.get(column) is not None for column in ROW_COLUMNS[name]):
            return cast(KnownFormat, name)
    for name in formats:  # a column that is null in this row may have a value in others
        if all(column in view for column in ROW_COLUMNS[name]):
            return cast(KnownFormat, name)
    return None


def _columns_of_known_sets(entry: DataSet, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, str]:
    """`columns` of known layouts under other names: ShareGPT's turns in `messages`, Dolly, preferences."""
    lists = [row["messages"] for row in rows if isinstance(row.get("messages"), list) and row["messages"]]
    may_be_sharegpt = entry.format in ("auto", "sharegpt") and "conversations" not in names
    if may_be_sharegpt and lists and _is_list_of_objects_with(lists[0], "from", "value"):
        return {"conversations": "messages"}
    if entry.format in FORMAT_OF_OBJECTIVE.values():
        return _columns_of_known_preferences(rows, names)
    # Without `output`, Dolly's `response` is the answer, and its `context` the input.
    is_dolly = {"instruction", "response"} <= {*names} and not {"output", "messages", "conversations"} & {*names}
    if entry.format in ("auto", "alpaca") and is_dolly:
        if "context" in names and "input" not in names:
            return {"input": "context", "output": "response"}
        return {"output": "response"}
    return {}


def _columns_of_known_preferences(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, str]:
    """`columns` of LLaMA-Factory's layouts, with the turns in `conversations` or `messages`.

    The turns come before two answers that are turns too, or beside a label for the last turn.
    """
    turns = next((name for name in ("conversations", "messages") if name in names), None)
    if turns is None:
        return {}
    if {"chosen", "rejected"} <= {*names}:
        answers_alone = all(isinstance(row.get("chosen"), dict | str) for row in rows)
        if answers_alone and "prompt" not in names:
            return {"prompt": turns}
        return {}
    if "completion" in names or not {"label", "kto_tag"} & {*names}:
        return {}
    if "label" in names:
        return {"completion": turns}
    return {"completion": turns, "label": "kto_tag"}


def _is_list_of_objects_with(value: Any, *keys: str) -> bool:
    """Whether a list's first element is an object with these keys."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and {*keys} <= {*value[0]}


# -- messages about the columns, with the line to add ----------------------------------------------------------


def _answer_to_missing(entry: DataSet, format: str, names: Sequence[str]) -> str:
    """The message if the recipe names columns, and one is missing."""
    missing = next(column for column in ROW_COLUMNS[format] if column not in {*names, *entry.columns})
    others = [name for name in names if name not in (*ROW_COLUMNS[format], *entry.columns.values())]
    if near := nearest(missing, others):
        line = in_yaml({**entry.columns, missing: near})
        return f"the field {missing!r} is missing; {near!r} is there: rename it, or write columns: {line}"
    if entry.columns:
        line = in_yaml({**entry.columns, missing: "..."})
        return f"the field {missing!r} is missing, the columns are {in_quotes(names)}; write columns: {line}"
    return f"the field {missing!r} is missing; add it, or choose another data format than {format}"


def _answer_to_unknown(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """The message if the recipe says nothing, and no layout has these columns."""
    if (mapped := columns_of_pairs(row, names)) is not None:
        dpo = "training.objective: dpo"
        if mapped:
            dpo += f" and columns: {in_yaml(mapped)}"
        alone = in_yaml(_columns_of_chosen(row, mapped))
        return f"preference rows ({in_quotes(names)}); set {dpo}; for the better answers alone columns: {alone}"
    # From the likeliest cause to the least likely: other names, a misspelt name, a missing column.
    if suggested := _probable_columns(row):
        return (
            f"no known layout: the columns are {in_quotes(names)}; add to this data set: columns: {in_yaml(suggested)}"
        )
    expected = list(dict.fromkeys(column for columns in ROW_COLUMNS.values() for column in columns))
    for name in names:
        if name not in expected and (near := nearest(name, expected)):
            return f"unknown column {name!r}; did you mean {near!r}? rename it, or add columns: {in_yaml({near: name})}"
    for columns in ROW_COLUMNS.values():
        missing = [column for column in columns if column not in names]
        if len(missing) < len(columns):
            present = next(column for column in columns if column != missing[0])
            return f"the field {missing[0]!r} is missing next to {present!r}; add it, or columns: {{{missing[0]}: ...}}"
    texts = {name: len(value) for name, value in row.items() if isinstance(value, str)}
    longest = sorted(texts, key=lambda name: -texts[name])[:2]  # numbers, dates and categories are short
    question, answer = [*(name for name in texts if name in longest), "...", "..."][:2]
    chat = in_yaml({"instruction": question, "output": answer})
    plain = in_yaml({"prompt": question, "completion": answer})
    return (
        f"no known layout: the columns are {in_quotes(names) or 'none'}; for a chat model add columns: {chat}; "
        f"without its chat template: {plain}, or {{text: ...}}"
    )


def _probable_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """`columns` that these names and values suggest; empty if nothing is clear."""
    texts = {name.lower(): name for name, value in row.items() if isinstance(value, str)}
    system = _first(SYSTEMS, texts)
    for name, value in row.items():
        if _is_list_of_objects_with(value, "role", "content"):
            columns = {"messages": name}
        elif _is_list_of_objects_with(value, "from", "value"):
            columns = {"conversations": name}
        else:
            continue
        if system and texts[system] != "system":
            columns["system"] = texts[system]
        return columns
    question, answer = _first(QUESTIONS, texts), _first(ANSWERS, texts)
    if question and answer:
        columns_of_chat = {
            "system": system,
            "instruction": question,
            "input": _first([name for name in CONTEXTS if name != question], texts),
            "reasoning_content": _first(REASONS, texts),
            "output": answer,
        }
        return {ours: texts[name] for ours, name in columns_of_chat.items() if name and texts[name] != ours}
    text = _first(TEXTS, texts)
    if text:
        return {"text": texts[text]}
    return {}


def _first(words: Iterable[str], among: Mapping[str, str]) -> str | None:
    return next((word for word in words if word in among), None)


# Words in the column names of two answers: `response_chosen` and `response_rejected` are a pair.
PAIR_WORDS = (
    ("chosen", "rejected"), ("win", "lose"), ("winner", "loser"), ("winning", "losing"), ("preferred", "dispreferred"),
    ("preferred", "rejected"), ("accepted", "rejected"), ("better", "worse"), ("good", "bad"), ("best", "worst"),
    ("positive", "negative"), ("wanted", "unwanted"), ("desirable", "undesirable"),
)  # fmt: skip
_BETTER_WORDS, _WORSE_WORDS = ({*words} for words in zip(*PAIR_WORDS, strict=True))


def pair_of_answers(names: Sequence[str]) -> tuple[str, str] | None:
    """Find the columns with a better and a worse answer by their names; None without such a pair.

    chosen, rejected            -> these
    answer_win, answer_lose     -> these
    chosen, score_chosen, ...   -> chosen and rejected: the shortest names
    """
    found = []
    for name in names:
        parts = re.split(r"([\W_]+)", name)
        for place, part in enumerate(parts):
            for better, worse in PAIR_WORDS:
                if part.lower() != better:
                    continue
                other = "".join([*parts[:place], worse, *parts[place + 1 :]])
                found += [(name, each) for each in names if each.lower() == other.lower()]
    return min(found, key=lambda pair: len(pair[0]), default=None)


def columns_of_pairs(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, str] | None:
    """`columns` that read a row as two answers, and texts as chats. Empty: no mapping is needed. None: no such pair.

    Answers are texts or messages. So the numbers in score_chosen and score_rejected do not count.
    """
    texts = [name for name in names if isinstance(row.get(name), str | list | dict)]
    pair = pair_of_answers(texts)
    if pair is None:
        return None
    columns = {ours: theirs for ours, theirs in zip(("chosen", "rejected"), pair, strict=True) if ours != theirs}
    answer = row[pair[0]]
    first = answer
    if isinstance(answer, list) and answer:
        first = answer[0]
    if isinstance(first, dict) and (first.get("role") or first.get("from")) not in ("assistant", "gpt"):
        return columns  # dialogues that hold the question
    if {"prompt", "conversations"} & {*names} and not isinstance(answer, str):
        return columns  # turns, and their question is in a column that is read by its name
    others = {name.lower(): name for name in texts if isinstance(row[name], str) and name not in pair}
    question, system = _first(QUESTIONS, others), _first(SYSTEMS, others)
    before = {}
    if system and others[system] != "system":
        before["system"] = others[system]
    if question and others[question] != "instruction" and not isinstance(row.get("prompt"), list):
        before["instruction"] = others[question]
    return before | columns


def _columns_of_chosen(row: Mapping[str, Any], mapped: Mapping[str, str]) -> dict[str, str]:
    """`columns` that train on a preference row's better answer alone."""
    name = mapped.get("chosen", "chosen")
    chosen, prompt = row.get(name), row.get("prompt")
    if isinstance(chosen, list):
        first = chosen[0] if chosen else None
        if isinstance(prompt, list) and isinstance(first, dict) and first.get("role") == "assistant":
            return {"completion": name}  # the answer alone
        return {"messages": name}
    question = mapped.get("instruction") or ("instruction" if "instruction" in row else None)
    if question is None:
        return {"text": name}
    if question == "instruction":
        return {"output": name}
    return {"instruction": question, "output": name}


def _answer_to_no_preferences(entry: DataSet, row: Mapping[str, Any], names: Sequence[str]) -> str:
    """The message if the objective compares or judges answers, and the rows lack the columns for it."""
    needed = ROW_COLUMNS[entry.format]
    if entry.columns:
        missing = [column for column in needed if column not in {*names, *entry.columns}]
        if missing:
            line = in_yaml({**entry.columns, **dict.fromkeys(missing, "...")})
            return f"the field {missing[0]!r} is missing, the columns are {in_quotes(names)}; write columns: {line}"
    if mapped := columns_of_pairs(row, names):
        return f"the columns are {in_quotes(names)}; add to this data set: columns: {in_yaml(mapped)}"
    is_judged = "label" in names and {"completion", "messages", "conversations"} & {*names}
    if entry.format == "preference":
        if is_judged:
            return (
                f"dpo compares two answers, and these rows ({in_quotes(names)}) judge one; set training.objective: kto"
            )
        lacks = "dpo needs a chosen and a rejected answer"
        line = "columns: {chosen: ..., rejected: ...}"
    else:
        lacks = "kto needs an answer and its label"
        line = "columns: {completion: ..., label: ...}"
    near = {
        ours: near
        for ours in needed
        if ours not in names and (near := nearest(ours, [name for name in names if name not in ROW_COLUMNS["kto"]]))
    }
    if near:
        line = f"columns: {in_yaml(near)}"
    return f"{lacks}, the columns are {in_quotes(names)}; add {line}, or set training.objective: supervised"


def in_quotes(names: Sequence[str]) -> str:
    """Names in quotes, as many as fit into a message, and a count of the others."""
    text = ""
    for shown, name in enumerate(names):
        part = ", " * bool(text) + repr(name)
        if len(text) + len(part) > SHOWN_CHARACTERS:
            if text:
                return f"{text} and {len(names) - shown:,} more"
            return counted(len(names), "name")
        text += part
    return text


def in_yaml(mapping: Mapping[str, str]) -> str:
    """A mapping in one line of YAML. The value "..." stays plain, because the reader fills it in."""

    def quoted(name: str) -> str:
        is_word = re.fullmatch(r"[A-Za-z_][\w-]*", name, re.ASCII)
        if name == "...":
            return name
        if is_word and name.lower() not in ("y", "n", "yes", "no", "on", "off", "true", "false", "null"):
            return name
        return json.dumps(name, ensure_ascii=False)

    return "{" + ", ".join(f"{quoted(key)}: {quoted(value)}" for key, value in mapping.items()) + "}"
