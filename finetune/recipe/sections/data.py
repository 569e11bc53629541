"""The training data: data sets, how their rows are read, and how they become tokens."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from finetune.recipe.layouts import (
    COLUMNS,
    LAYOUTS,
    LAYOUTS_IN_WORDS,
    TEMPLATED,
    KnownFormat,
    layouts_with,
    template_fields,
)
from finetune.recipe.sections.base import CrossCheck, Local, Section, refuse

MOST_TOKENS = 2**20  # in a row; few models known in 2026 have more positions
RowFormat = Literal["auto", KnownFormat]
Role = Literal["system", "user", "assistant", "tool", "function_call"]
TrainOn = Literal["assistant", "completion", "each_turn", "all"]
Truncation = Literal["error", "right", "drop", "split"]
Drop = Literal["empty", "duplicate"]
# The chat template gets these from the tokenizer's arguments and from this program.
TEMPLATE_ARGUMENTS = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "date_string",
)


class DataSet(Section):
    """One data set: load_dataset's arguments, plus how to read a row and how often."""

    path: Local = Field(
        min_length=1, description="json, csv, parquet, arrow, excel, text, a local file or folder, or a Hub data set."
    )
    name: str | None = Field(None, description="Configuration of a Hub data set.")
    data_files: Local | list[Local] | None = Field(None, description="Local files, relative to the working folder.")
    split: str = Field("train", min_length=1, description="Split, slices allowed: train[:1000].")
    revision: str = Field("main", min_length=1, description="Branch, tag or commit on the Hub.")
    format: RowFormat = Field("auto", description="A row's layout; auto looks at the columns.")
    columns: dict[str, str] = Field(
        {},
        description="Our column: the data set's. {prompt: question, completion: answer}. Others keep their names; a "
        "dot leads into an object.",
    )
    template: dict[str, str] = Field(
        {},
        description="Our column to a text with the data set's in braces: {instruction: 'Question: {question}', "
        "output: '{answer}'}; {{ is a brace.",
    )
    drop: list[Drop] = Field(
        [],
        description="Rows to leave out, counted: empty (no value in a column that is trained on or asked), duplicate "
        "(read as an earlier row of this data set).",
    )
    delimiter: str | None = Field(
        None, min_length=1, max_length=1, description="Between the columns of a CSV file; null: found."
    )
    encoding: str | None = Field(
        None,
        min_length=1,
        description="Of a CSV or text file: cp1252, cp949; null: utf-8, or what a byte order mark says.",
    )
    sheet: str | None = Field(
        None, min_length=1, description="Of an Excel file: its name; null: the one that holds a table."
    )
    roles: dict[str, Role] = Field(
        {},
        description="The data set's role: ours. {Human: user}. Roles of messages and sharegpt are known. "
        "function_call: the assistant's calls, as JSON in its content.",
    )
    labels: dict[str, bool] = Field(
        {},
        description="For objective kto: a label to whether it wants the answer. {5: true, 1: false}. Words like true, "
        "yes, up and good are known, and their opposites.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Variables for the chat template: {enable_thinking: false}; a row's own column wins."
    )
    weight: float = Field(1.0, gt=0, le=1000, description="Times each row is seen an epoch. 0.5: half the rows.")

    @field_validator("labels", mode="before")
    @classmethod
    def labels_are_texts(cls, value: Any) -> Any:
        """YAML reads 1 and true as a number and a truth value. Rows' labels are compared as texts in lower case."""
        if isinstance(value, dict):
            return {str(label).strip().lower(): answer for label, answer in value.items()}
        return value

    @model_validator(mode="after")
    def known_columns(self) -> DataSet:
        refuse(_entry_mistakes(self))
        return self

    @property
    def short_name(self) -> str:
        """The first file's stem, or the path's last part: letters, digits, dots and dashes."""
        files = [self.data_files] if isinstance(self.data_files, str) else self.data_files
        name = PurePath(self.path).name
        if files:
            name = PurePath(files[0]).stem
        return re.sub(r"[^\w.-]+", "_", name).strip("_") or "set"


class EvalFraction(Section):
    """Held-out share of the training rows."""

    fraction: float = Field(gt=0, lt=1, description="Share of the training rows held out.")


class Data(Section):
    """The training data."""

    train: list[DataSet] = Field(min_length=1, description="Data sets, mixed by weight.")
    eval: EvalFraction | list[DataSet] | None = Field(None, description="{fraction: 0.05}, data sets, or null.")
    max_length: int = Field(2048, ge=8, le=MOST_TOKENS, description="Tokens in one row, packed or not.")
    packing: bool = Field(True, description="Fill rows with whole documents; they do not see each other.")
    train_on: TrainOn = Field(
        "assistant",
        description="Supervised tokens. assistant: its turns. completion: the last answer. each_turn: every answer, "
        "as an example of its own; for templates that write earlier answers differently. all: every token.",
    )
    truncation: Truncation = Field(
        "error",
        description="For documents longer than max_length. right: cut their end. drop: leave them out. split: cut "
        "texts without a prompt into consecutive pieces, which keeps every token; other documents are refused.",
    )
    chat_template: Local | None = Field(None, description="Jinja text or a file; null: the tokenizer's own.")
    date_string: str = Field("26 Jul 2024", description="The date that templates print as today's.")

    @property
    def eval_sets(self) -> list[DataSet]:
        """The data sets with held-out rows; none if `eval` is null or a share of the training rows."""
        if isinstance(self.eval, list):
            return self.eval
        return []

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """The template's variables when the model is prompted: the training sets' own, or none if they differ."""
        first = self.train[0].chat_template_kwargs
        if all(entry.chat_template_kwargs == first for entry in self.train):
            return first
        return {}

    @property
    def eval_names(self) -> list[str]:
        """The `eval_sets`' names in metrics. Equal names make all of them end with their place in the list."""
        names = [entry.short_name for entry in self.eval_sets]
        if len(set(names)) == len(names):
            return names
        return [f"{name}_{place}" for place, name in enumerate(names, 1)]

    @property
    def metrics(self) -> list[str]:
        """The values for metric_for_best_model: the loss over all held-out rows, then over each data set if several."""
        names = self.eval_names if len(self.eval_sets) > 1 else []
        return ["eval_loss", *(f"eval_{name}_loss" for name in names)]

    @property
    def unit(self) -> Literal["documents", "pairs", "judged"]:
        """A row becomes documents, a pair of answers to one prompt, or answers that are wanted or not."""
        units: dict[str, Literal["pairs", "judged"]] = {"preference": "pairs", "kto": "judged"}
        return units.get(self.train[0].format, "documents")

    @property
    def row_noun(self) -> str:
        """A row in messages: the unit of global_batch_size."""
        return {"pairs": "pair", "judged": "judged answer"}.get(self.unit, "row")

    @property
    def answers_a_row(self) -> int:
        """The documents of one row, of max_length tokens each: two in a pair."""
        return 2 if self.unit == "pairs" else 1

    @property
    def row_tokens(self) -> int:
        """The most tokens of one row that is not packed with others."""
        return self.answers_a_row * self.max_length

    @property
    def sets(self) -> list[DataSet]:
        """All data sets, training sets first."""
        return [*self.train, *self.eval_sets]


def _entry_mistakes(entry: DataSet) -> Iterator[CrossCheck]:
    unknown = [ours for ours in entry.columns if ours not in COLUMNS]
    for ours in unknown:
        remedy = f"choose one of {', '.join(COLUMNS)}"
        if entry.columns[ours] in COLUMNS:
            remedy = f"our name comes first: write {entry.columns[ours]}: {ours}"
        elif near := difflib.get_close_matches(ours.lower(), COLUMNS, 1, 0.6):
            remedy = f"did you mean {near[0]}?"
        yield CrossCheck(f"columns.{ours}", "is not a column of any layout", remedy)
    layouts = layouts_with(entry.columns)
    if "preference" in layouts:
        layouts.append("kto")  # a pair is two judged answers
    if not unknown and not layouts:
        yield CrossCheck("columns", f"no layout has all of {' and '.join(entry.columns)}", LAYOUTS_IN_WORDS)
    elif not unknown and entry.format != "auto" and entry.format not in layouts:
        columns = ", ".join(LAYOUTS[entry.format].all)
        problem = f"does not fit format {entry.format}, whose columns are {columns}"
        yield CrossCheck("columns", problem, "write format: auto")
    mapped: set[str] = set()  # their columns so far
    for ours, theirs in entry.columns.items():
        if theirs in mapped:
            yield CrossCheck(f"columns.{ours}", f"{theirs} is mapped twice", "keep one of them")
            break
        mapped.add(theirs)

    # Plain {column} fields only: no attribute, no index, no format, which would run code or change values.
    for ours, text in entry.template.items():
        key = f"template.{ours}"
        if ours not in TEMPLATED:
            yield CrossCheck(key, "is not a text column of any layout", f"choose one of {', '.join(TEMPLATED)}")
        if ours in entry.columns:
            yield CrossCheck(key, "is in columns too", "keep one of them")
        try:
            template_fields(text)
        except ValueError as error:
            yield CrossCheck(key, str(error), "write plain fields like {question}, and {{ for a brace")
    if entry.template and not layouts_with([*entry.columns, *entry.template]):
        names = " and ".join([*entry.columns, *entry.template])
        yield CrossCheck("template", f"{names} belong to no one layout", LAYOUTS_IN_WORDS)

    for name, value in entry.chat_template_kwargs.items():
        key = f"chat_template_kwargs.{name}"
        parts = value if isinstance(value, list) else [value]
        if name in TEMPLATE_ARGUMENTS:
            remedy = "write data.date_string" if name == "date_string" else "remove it"
            yield CrossCheck(key, "is given to the template by this program", remedy)
        elif any(isinstance(part, dict | list) for part in parts):
            remedy = "write one; rows may have a column of their own"
            yield CrossCheck(key, "is not a value or a list of values", remedy)
