"""Finds a data set's layout by its columns. If the columns are not clear, one message says which line to write.

The message names the columns, and gives the line for the data set's entry in the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.data.cells import BadRow, cell_of, flattened, json_kind, nearest, turns_in
from finetune.data.readings import PAIR_WORDS, in_quotes, in_yaml, known_columns, labels_in_yaml, profiles, readings
from finetune.recipe.layouts import FORMAT_OF_OBJECTIVE, LAYOUTS, KnownFormat, layouts_with, template_fields
from finetune.recipe.schema import DataSet

_BETTER_WORDS, _WORSE_WORDS = ({*words} for words in zip(*PAIR_WORDS, strict=True))
REASONING_COLUMNS = ("reasoning_content", "thinking")  # read without being named; `reasoning` may not be meant
TURN_COLUMNS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")  # may hold turns as text


@dataclass(frozen=True)
class RowLayout:
    """How a data set's rows are read."""

    format: KnownFormat
    columns: Mapping[str, str] = field(default_factory=dict)  # ours -> the data set's; other columns keep their names
    roles: Mapping[str, str] = field(default_factory=dict)  # the data set's -> ours
    template: Mapping[str, str] = field(default_factory=dict)  # ours -> a text with the data set's columns in braces
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, bool] = field(default_factory=dict)  # a label's value, lower case -> wanted
    is_guess: bool = False  # whether this program guessed `columns`; else the recipe names them

    def view(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row by our column names, with turns in a text as a list. Raises BadRow."""
        view = dict(row)
        if self.columns or self.template:
            view = {ours: cell_of(row, path) for ours, path in self.columns.items() if path in row or "." in path}
            for ours, text in self.template.items():
                cells = {}
                for name in template_fields(text):
                    value = row.get(name)
                    if isinstance(value, dict | list):
                        problem = f"the column {name!r} is {json_kind(value)}; fields take texts and numbers"
                        raise BadRow(f"template: {ours}: {problem}")
                    cells[name] = "" if value is None else str(value)
                is_empty = cells and not any(cell.strip() for cell in cells.values())
                view[ours] = "" if is_empty else text.format_map(cells)
            replaced = {*self.columns, *self.columns.values(), *self.template}
            view |= {name: value for name, value in row.items() if name not in replaced}
        for ours in TURN_COLUMNS:
            if ours in view and ours in LAYOUTS[self.format].all:
                always = ours in ("messages", "conversations")
                view[ours] = turns_in(view[ours], self.place(ours), always=always)
        return view

    def place(self, ours: str) -> str:
        """The data set's name for our column, for messages."""
        if ours in self.columns:
            return repr(self.columns[ours])
        if ours in self.template:
            return f"template: {ours}"
        return ours

    def unused(self, row: Mapping[str, Any]) -> list[str]:
        """The columns with a value in this row that are not read."""
        read = {*LAYOUTS[self.format].all} - {*self.columns, *self.template}
        read |= {*self.columns.values()} | {name for text in self.template.values() for name in template_fields(text)}
        if self.format == "alpaca":
            read |= {*REASONING_COLUMNS}
        read |= {path.partition(".")[0] for path in self.columns.values() if path not in row}
        return [name for name, value in row.items() if name not in read and value not in (None, "", [], {})]


def layout_of(entry: DataSet, rows: Sequence[Mapping[str, Any]]) -> RowLayout:
    """Find a data set's layout from its first rows. Raises BadRow, once for the data set."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    for ours, theirs in entry.columns.items():
        if theirs not in names and all(cell_of(row, theirs) is None for row in rows):
            hint = "name one of them"
            if near := nearest(theirs, [*names, *(path for row in rows[:1] for path in flattened(row))]):
                hint = f"did you mean columns: {in_yaml({ours: near})}?"
            raise BadRow(f"columns: {ours}: the data set has no column {theirs!r}, but {in_quotes(names)}; {hint}")

    for ours, text in entry.template.items():
        for name in template_fields(text):
            if name not in names:
                hint = "name one of them"
                if near := nearest(name, names):
                    hint = f"did you mean {{{near}}}?"
                raise BadRow(f"template: {ours}: the data set has no column {name!r}, but {in_quotes(names)}; {hint}")

    is_named = bool(entry.columns or entry.template)
    known = None if is_named else known_columns(profiles(rows), entry.format)
    # A recipe's objective decides about pairs and judged answers. `auto` does not mean them.
    if known is not None and entry.format == "auto" and known.objective != "supervised":
        known = None
    layout = RowLayout(
        "text",
        columns=known.columns if known is not None else entry.columns,
        roles=entry.roles,
        template=entry.template,
        chat_template_kwargs=entry.chat_template_kwargs,
        labels=entry.labels,
        is_guess=bool(known is not None and known.columns),
    )
    # Mapped the wrong way round, the model would learn to prefer the worse answers.
    if layout.columns.get("chosen") in _WORSE_WORDS and layout.columns.get("rejected") in _BETTER_WORDS:
        swapped = {**layout.columns, "chosen": layout.columns["rejected"], "rejected": layout.columns["chosen"]}
        raise BadRow(f"columns: {in_yaml(layout.columns)} prefers the worse answers; swap them: {in_yaml(swapped)}")
    formats: list[KnownFormat] = []
    if entry.format == "auto":
        named = layouts_with([*layout.columns, *layout.template])
        formats = [name for name in named if name not in FORMAT_OF_OBJECTIVE.values()]
    else:
        formats = [entry.format]
    if entry.format == "kto" and not {"chosen", "rejected"} - {*names, *layout.columns}:
        formats = ["preference"]  # each row is two judged answers
    for row in rows:
        view = layout.view(row)  # of texts: none is parsed yet
        whole = [name for name in formats if {*LAYOUTS[name].columns} <= view.keys()]
        if not whole:
            continue
        # A column that is null in this row may have a value in others.
        filled = (name for name in whole if all(view[column] is not None for column in LAYOUTS[name].columns))
        format = next(filled, whole[0])
        layout = replace(layout, format=format)
        with suppress(BadRow):  # the row itself is refused, with its place
            view = layout.view(row)
        answer = {"prompt_completion": "completion", "kto": "completion", "preference": "chosen"}.get(format, "")
        are_texts = isinstance(view.get("prompt"), str) and isinstance(view.get(answer), str)
        if entry.chat_template_kwargs and (format == "text" or are_texts):
            raise BadRow("chat_template_kwargs: these rows are texts, which no chat template renders; remove them")
        return layout
    if entry.format in FORMAT_OF_OBJECTIVE.values():
        raise BadRow(_answer_to_no_preferences(entry, rows, names))
    if entry.format != "auto" or is_named:
        needed = LAYOUTS[formats[0]].columns
        missing = next(column for column in needed if column not in {*names, *entry.columns})
        others = [name for name in names if name not in (*needed, *entry.columns.values())]
        problem, remedy = "", f"add it, or choose another data format than {formats[0]}"
        if near := nearest(missing, others):
            remedy = f"{near!r} is there: rename it, or write columns: {in_yaml({**entry.columns, missing: near})}"
        elif entry.columns:
            problem = f", the columns are {in_quotes(names)}"
            remedy = f"write columns: {in_yaml({**entry.columns, missing: '...'})}"
        raise BadRow(f"the field {missing!r} is missing{problem}; {remedy}")
    raise BadRow(_answer_to_unknown(entry, rows, names))


# -- messages about the columns, with the line to add ----------------------------------------------------------


def _answer_to_unknown(entry: DataSet, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """The message if the recipe says nothing, and no layout has these columns: the line that `finetune init` finds."""
    result = readings(entry.format, rows)
    expected = list(dict.fromkeys(column for layout in LAYOUTS.values() for column in layout.columns))
    for name in names if not result.plausible else ():
        if near := nearest(name, expected):
            return f"unknown column {name!r}; did you mean {near!r}? rename it, or add columns: {in_yaml({near: name})}"
    for layout in LAYOUTS.values() if len(result.plausible) > 1 or result.obstacle else ():
        columns = layout.columns
        missing = [column for column in columns if column not in names]
        if 0 < len(missing) < len(columns) and not any(column.kind == "list" for column in result.columns):
            present = next(column for column in columns if column != missing[0])
            return f"the field {missing[0]!r} is missing next to {present!r}; add it, or columns: {{{missing[0]}: ...}}"
    if result.obstacle:
        return f"no known layout: {result.obstacle}"
    first = result.plausible[0]
    if first.format == "preference":
        line = f"set training.objective: dpo{f' and columns: {in_yaml(first.columns)}' * bool(first.columns)}"
        name = first.columns.get("chosen", "chosen")
        chosen, prompt = rows[0].get(name), rows[0].get("prompt")
        question = first.columns.get("instruction") or ("instruction" if "instruction" in rows[0] else None)
        if isinstance(chosen, list):
            alone = {"messages": name}
            turn = chosen[0] if chosen else None
            if isinstance(prompt, list) and isinstance(turn, dict) and turn.get("role") == "assistant":
                alone = {"completion": name}
        else:
            alone = {"text": name} if question is None else {"instruction": question, "output": name}
        remedy = f"{line}; for the better answers alone columns: {in_yaml(alone)}"
        return f"preference rows ({in_quotes(names)}); {remedy}"
    if first.format == "kto":
        line = f"set training.objective: kto{f' and columns: {in_yaml(first.columns)}' * bool(first.columns)}"
        return f"judged answers ({in_quotes(names)}); {line}"
    lines = " or ".join(reading.in_words() for reading in result.plausible if reading.objective == "supervised")
    lines += ", or for plain text {text: ...}" * (len(result.plausible) > 1)
    return f"no known layout: the columns are {in_quotes(names)}; add to this data set: columns: {lines}"


def _answer_to_no_preferences(entry: DataSet, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """The message if the objective compares or judges answers, and the rows lack the columns for it."""
    assert entry.format != "auto"
    needed = LAYOUTS[entry.format].columns
    if entry.columns:
        missing = [column for column in needed if column not in {*names, *entry.columns}]
        if missing:
            line = in_yaml({**entry.columns, **dict.fromkeys(missing, "...")})
            return f"the field {missing[0]!r} is missing, the columns are {in_quotes(names)}; write columns: {line}"
    plausible = readings("auto", rows).plausible
    for reading in plausible:
        if reading.format == entry.format and reading.columns:
            line = f"columns: {in_yaml(reading.columns)}"
            if reading.labels or reading.unknown:
                line += f", and labels: {labels_in_yaml(reading)}"
            return f"the columns are {in_quotes(names)}; add to this data set: {line}"
    if entry.format == "preference":
        if any(reading.format == "kto" for reading in plausible):
            return (
                f"dpo compares two answers, and these rows ({in_quotes(names)}) judge one; set training.objective: kto"
            )
        lacks, line = "dpo needs a chosen and a rejected answer", "columns: {chosen: ..., rejected: ...}"
    else:
        lacks, line = "kto needs an answer and its label", "columns: {completion: ..., label: ...}"
    return f"{lacks}, the columns are {in_quotes(names)}; add {line}, or set training.objective: supervised"
