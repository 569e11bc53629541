"""From a data set to a recipe: sample, columns, counts, machine, settings, text.

The settings follow from the number of rows. A small set gets three epochs and small batches, so that a run has about
thirty steps or more. A large set gets one epoch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from finetune.data.check import Mistakes
from finetune.data.columns import in_quotes, in_yaml
from finetune.data.dialect import csv_dialect
from finetune.data.formats import Chat, Content, documents_in
from finetune.data.readers import SourceRow
from finetune.data.row_reader import RowReader
from finetune.data.sources import Source, resolve
from finetune.errors import DataError, DoesNotFit, FinetuneError
from finetune.new_recipe.columns import Reading, looks_like_data, readings
from finetune.new_recipe.hardware import EMBEDDED, ONLINE_SMOLLM, Choice, choose, gpus_here
from finetune.new_recipe.html_note import html_note
from finetune.new_recipe.page import Counts, Settings, recipe_text
from finetune.new_recipe.sample import WHOLE_BELOW, Sample, read_sample
from finetune.new_recipe.target import entry_of
from finetune.recipe.cross_checks import OPTIONAL_COLUMNS, ROW_COLUMNS
from finetune.recipe.gpus import Gpus, parse_gpus
from finetune.recipe.schema import DataSet, Recipe
from finetune.recipe.sections.data import Truncation
from finetune.recipe.sections.training import Objective
from finetune.tokens.estimate import estimated_rows, text_of
from finetune.wording import counted, percent

SHOWN = 5  # rows
SUFFIXES_TO_REMOVE = (".gz", ".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx", ".txt", ".md")
COUNTING_SECONDS, COUNTING_SECONDS_IF_LARGE = 20.0, 3.0
ASSUMED_TOKEN_BYTES = 3.0  # without a tokenizer: English has 4, German 3
SMALLEST_SPLIT = 10
CPU_TOKENS = 30_000  # of SmolLM2-135M, trained in three to five minutes on two cores
ROW_SIZES = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
USUAL_ROWS = 4096
MOST_ON_CPU = 1024


@dataclass(frozen=True)
class Options:
    """The command line's options."""

    columns: dict[str, str] = field(default_factory=dict)
    model: str | None = None
    gpus: str | None = None  # None: this machine's
    output: Path | None = None  # None: the data's name


@dataclass(frozen=True)
class Proposal:
    """The recipe, and the findings behind it."""

    entry: DataSet
    reading: Reading
    counts: Counts
    choice: Choice
    settings: Settings
    examples: tuple[Content, ...]
    lines: tuple[str, ...]  # findings in words
    file: Path
    text: str

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "file": str(self.file),
            "data": self.entry.model_dump(mode="json", exclude_defaults=True),
            "format": self.reading.format,
            "objective": self.reading.objective,
            "rows": self.counts.rows,
            "empty": self.counts.empty,
            "duplicate": self.counts.duplicate,
            "refused": self.counts.refused,
            "longest_tokens": self.counts.longest,
            "model": self.choice.model,
            "method": self.choice.method,
            "steps": self.settings.steps,
            "recipe": self.text,
        }


def read_columns(text: str | None) -> dict[str, str]:
    """Read `--columns`: `instruction=frage,output=antwort` or YAML. Raises FinetuneError."""
    if text is None:
        return {}
    form = "write --columns instruction=frage,output=antwort"
    pairs = []
    if text.lstrip().startswith("{"):
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise FinetuneError(f"--columns: {text!r} is not a mapping; {form}") from None
        if isinstance(value, dict):
            pairs = [(str(key), str(name)) for key, name in value.items()]
    else:
        pairs = [(key.strip(), name.strip()) for key, _, name in (part.partition("=") for part in text.split(","))]
    judged = {"prompt", "chosen", "rejected", "completion", "label"}
    ours = {"instruction", "input", "output", "system", "reasoning_content", "text"} | judged
    if not pairs or not all(name for _, name in pairs):
        raise FinetuneError(f"--columns: {text!r} is not a mapping; {form}")
    for key, _ in pairs:
        if key not in ours:
            raise FinetuneError(f"--columns: {key!r} is none of our columns; {form}, or text=NAME")
    columns = dict(pairs)
    if {"chosen", "rejected"} <= {*columns} or {"completion", "label"} <= {*columns}:
        return columns
    if judged & {*columns}:
        raise FinetuneError(
            "--columns: needs chosen and rejected, or completion and label, beside the question's column"
        )
    is_chat = "text" not in columns and {"instruction", "output"} <= {*columns}
    if not is_chat and {*columns} != {"text"}:
        raise FinetuneError(f"--columns: needs instruction and output, or text alone; {form}")
    return columns


def propose(target: str, options: Options, choose_one: Callable[[Sequence[str]], int] | None) -> Proposal:
    """See `finetune.new_recipe.propose`."""
    entry = entry_of(target)
    source = resolve(entry)
    sample = read_sample(source)
    names = [str(name) for name in sample.rows[0]]
    if source.kind == "csv" and not options.columns and looks_like_data(names, sample.rows):
        header = ["question", "answer", *(f"column{number}" for number in range(3, len(names) + 1))][: len(names)]
        line = csv_dialect(source.files[0]).delimiter.join(header)
        raise DataError(
            [
                f"{source.files[0]}:1: the first line looks like data, not like column names ({in_quotes(names)}); "
                f"put a line with names before it: {line}"
            ]
        )
    reading = _choose_reading(target, entry, sample, options, choose_one)
    changes: dict[str, Any] = {"columns": dict(reading.columns), "drop": ["empty", "duplicate"]}
    if reading.format in ("messages", "sharegpt", "prompt_completion"):
        changes["drop"] = ["duplicate"]
    if reading.objective != "supervised":
        changes["format"] = reading.format  # rows are read below, before a recipe's objective decides it
    entry = DataSet.model_validate(entry.model_dump(exclude_defaults=True) | changes)
    counts, examples = _count_rows(entry, sample)
    gpus = parse_gpus(options.gpus) if options.gpus else gpus_here()
    length, choice = _choose_length_and_model(counts.longest_bytes, gpus, options.model, reading.objective)
    if choice.model.startswith("Qwen/Qwen3-") and reading.format != "text":
        entry = entry.model_copy(update={"chat_template_kwargs": {"enable_thinking": False}})
    truncation: Truncation = "split" if reading.format == "text" else "right"
    settings, counts = _choose_settings(entry, counts, choice, length, truncation, reading.objective)
    file = options.output
    if file is None:
        stem = Path(target).name
        while Path(stem).suffix.lower() in SUFFIXES_TO_REMOVE:
            stem = Path(stem).stem
        file = Path(f"{DataSet(path=stem or 'data').short_name}.yaml")  # letters, digits, dots and dashes
    text = recipe_text(entry, counts, choice, settings, file)
    Recipe.model_validate(yaml.safe_load(text))  # our own text must be a valid recipe
    lines = [*_findings(source, sample, reading, counts), *html_note(sample.rows)]
    if counts.with_tools and choice.model in (EMBEDDED, ONLINE_SMOLLM):
        lines.append(
            "rows with tools: SmolLM2's chat template does not write them, so training would refuse these rows; choose "
            "--model Qwen/Qwen3-0.6B, or name a template that does: data.chat_template (example, in a checkout: "
            "data/skills/tools.jinja)"
        )
    return Proposal(entry, reading, counts, choice, settings, examples, tuple(lines), file, text)


def _choose_reading(
    target: str,
    entry: DataSet,
    sample: Sample,
    options: Options,
    choose_one: Callable[[Sequence[str]], int] | None,
) -> Reading:
    """How the rows are read. Raises DataError if it is not clear and nobody can be asked."""
    if options.columns:
        names = {name for row in sample.rows for name in row}
        missing = [theirs for theirs in options.columns.values() if theirs not in names]
        if missing:
            raise DataError([f"--columns: {target} has no column {missing[0]!r}, but {in_quotes(sorted(names))}"])
        named = {*options.columns}
        if {"chosen", "rejected"} <= named:
            return Reading("preference", options.columns)
        if "label" in named:
            return Reading("kto", options.columns)
        if "text" in named:
            return Reading("text", options.columns)
        return Reading("alpaca", options.columns)
    plausible = readings(entry, sample.rows)
    if len(plausible) == 1:
        return plausible[0]
    lines = [each.in_words() for each in plausible]
    if choose_one is not None:
        return plausible[choose_one(lines)]
    alternatives = " or ".join(lines)
    raise DataError(
        [f"{target}: the columns may be read in {len(lines)} ways: {alternatives}; say which: --columns '{lines[0]}'"]
    )


class _TimedRows:
    """A source's rows, for some seconds. The time also ends for a reader that drops every row."""

    def __init__(self, seconds: float) -> None:
        self.is_whole = True
        self.read = 0
        self._end = time.monotonic() + seconds

    def rows(self, source: Source) -> Iterator[SourceRow]:
        """Yield rows until the time is over; then `is_whole` says whether all rows came."""
        for row in source.rows():
            self.read += 1
            yield row
            if time.monotonic() > self._end:
                self.is_whole = False
                return


def _count_rows(entry: DataSet, sample: Sample) -> tuple[Counts, tuple[Content, ...]]:
    """Count every row, or the head if the data set is large, as training reads them. Also the first rows, to show."""
    source = resolve(entry)
    reader = RowReader(source)
    examples: list[Content] = []
    problems: list[str] = []
    mistakes = Mistakes()
    good, nbytes, longest, with_tools = 0, 0, 0, 0
    timed_rows = _TimedRows(COUNTING_SECONDS if sample.nbytes <= WHOLE_BELOW else COUNTING_SECONDS_IF_LARGE)
    for row in reader.rows(timed_rows.rows(source)):
        if row.read is None:
            problems.append(f"{row.place}: {row.problem}")
            mistakes.add(str(row.problem), row.place)
        else:
            good += 1
            sizes = [len(text_of(document).encode(errors="replace")) for document in documents_in(row.read)]
            nbytes, longest = nbytes + sum(sizes), max(longest, *sizes)
            chats = [document for document in documents_in(row.read) if isinstance(document, Chat)]
            with_tools += any(
                chat.tools or any(message.get("tool_calls") for message in chat.messages) for chat in chats
            )
            if len(examples) < SHOWN:
                examples.append(row.read)
    if not good:
        mistakes.raise_if_any()
    facts = reader.facts()
    answers = facts.get("answers")  # only for preference rows
    if answers and answers["pairs"] and answers["pairs"] == answers["equal"]:
        raise DataError(problems[-1:])  # nothing to prefer, in any row
    rows = good
    if not timed_rows.is_whole and sample.total:
        rows = max(good, round(sample.total * good / timed_rows.read))
    counts = Counts(
        rows=rows,
        empty=facts["dropped"].get("empty", 0),
        duplicate=facts["dropped"].get("duplicate", 0),
        refused=len(problems),
        problems=tuple(problems[:3]),
        mean_bytes=nbytes / good,
        longest_bytes=longest,
        is_whole=timed_rows.is_whole,
        with_tools=with_tools,
    )
    return counts, tuple(examples)


def _choose_length_and_model(
    longest_bytes: int, gpus: Gpus | None, model: str | None, objective: Objective
) -> tuple[int, Choice]:
    """Choose max_length, the model and the method. max_length is the smallest size for the longest row's bytes.

    More than USUAL_ROWS tokens are chosen only if the model and the method stay the same.
    """
    tokens = longest_bytes / ASSUMED_TOKEN_BYTES * 1.2 + 32
    sizes = [size for size in ROW_SIZES if gpus is not None or size <= MOST_ON_CPU]
    wanted = next((size for size in sizes if size >= tokens), sizes[-1])
    usual = min(wanted, USUAL_ROWS)
    choice = choose(gpus, model, usual, objective)
    # The longest size first. The first one that keeps the model and the method is taken.
    for longer in sorted((size for size in sizes if usual < size <= wanted), reverse=True):
        with suppress(DoesNotFit):
            found = choose(gpus, model, longer, objective)
            if found.memory and (found.model, found.method) == (choice.model, choice.method):
                return longer, found
    return usual, choice


def _choose_settings(
    entry: DataSet, counts: Counts, choice: Choice, length: int, truncation: Truncation, objective: Objective
) -> tuple[Settings, Counts]:
    """Batch, epochs, learning rate and held-out share for this many rows, and the counts completed by tokens."""
    held_out = 0.1
    if counts.rows <= SMALLEST_SPLIT:
        held_out = 0.0
    elif counts.rows > 5000:
        held_out = max(float(f"{500 / counts.rows:.1g}"), 1e-4)  # about 500 rows
    counts, packed = _count_tokens(entry, counts, choice.model, length, truncation, objective, held_out)

    rate, rate_on_cpu, epochs = 2e-4, 2e-3, 3
    if objective != "supervised":
        # Preferences move a model that answers already: a twentieth of the rate, and each pair is seen once.
        rate, rate_on_cpu, epochs = 1e-5, 1e-4, 1
    elif counts.rows >= 20_000:
        epochs = 1
    elif counts.rows >= 2000:
        epochs = 2
    if choice.gpus is None:
        # A packed row is full of documents; a pair is two documents, so a step takes several pairs.
        batch, tokens_a_row = 1, length
        if objective != "supervised":
            batch, tokens_a_row = max(1, min(8, packed // 10)), math.ceil(counts.tokens / packed)
        steps = math.ceil(epochs * packed / batch)
        max_steps: int | None = None
        if choice.model in (EMBEDDED, ONLINE_SMOLLM):
            most = max(1, CPU_TOKENS // (batch * tokens_a_row))
            if steps > most:
                max_steps = most
        settings = Settings(
            length, truncation, held_out, batch, 1, epochs, rate_on_cpu, max_steps, max_steps or steps, objective
        )
        return settings, counts
    at_once = choice.rows * choice.ranks
    # About thirty steps an epoch, with at most 64 rows each. Each GPU's micro-batches are full.
    micro_batches = max(1, min(64 // at_once, packed // (30 * at_once)))
    batch = at_once * micro_batches
    steps = max(1, math.ceil(epochs * packed / batch))
    return Settings(length, truncation, held_out, batch, choice.rows, epochs, rate, None, steps, objective), counts


def _count_tokens(
    entry: DataSet,
    counts: Counts,
    model: str,
    length: int,
    truncation: Truncation,
    objective: Objective,
    held_out: float,
) -> tuple[Counts, int]:
    """The counts with their tokens, and the packed rows of one epoch: by the tokenizer, or by bytes without one."""
    probe = Recipe.model_validate(
        {
            "model": {"name_or_path": model},
            "data": {
                "train": [entry.model_dump(exclude_defaults=True)],
                "eval": {"fraction": held_out} if held_out else None,
                "max_length": length,
                "truncation": truncation,
            },
            "training": {"objective": objective},
        }
    )
    measured = estimated_rows(probe) if counts.is_whole else None
    if measured is None:
        tokens = round(counts.rows * (counts.mean_bytes / ASSUMED_TOKEN_BYTES + 12))
        longest = round(counts.longest_bytes / ASSUMED_TOKEN_BYTES + 12)
        packed = counts.rows
        if objective == "supervised":
            packed = math.ceil(tokens / length)
        return replace(counts, tokens=tokens, longest=longest), packed
    too_long = 0
    bytes_a_token = counts.mean_bytes * counts.rows * (1 - held_out) / max(1, measured.tokens)
    longest = round(counts.longest_bytes / bytes_a_token)
    if measured.too_long:
        too_long, longest = measured.too_long[0], measured.too_long[2]
    counts = replace(counts, tokens=measured.tokens, longest=longest, too_long=too_long, beyond=measured.beyond)
    return counts, measured.rows


def _findings(source: Source, sample: Sample, reading: Reading, counts: Counts) -> list[str]:
    """Findings, a line each."""
    kind = {"csv": "CSV", "json": "JSON", "parquet": "Parquet", "excel": "Excel", "text": "text", "hub": "on the Hub"}
    name = kind.get(source.kind, source.kind)
    if source.kind == "csv":
        dialect = csv_dialect(source.files[0])
        name += f", separated by {dialect.separator}, {dialect.encoding}"
    if sample.total is None:
        rows = f"{len(sample.rows):,} rows read"
    elif sample.is_whole:
        rows = f"{sample.total:,} rows"
    else:
        rows = f"about {sample.total:,} rows (sampled)"
    names = list(dict.fromkeys(name for row in sample.rows[:100] for name in row))
    lines = [f"{source.name}: {name}; {rows}; columns {in_quotes(names)}"]
    folder = Path(source.entry.path)
    if folder.is_dir() and source.kind != "hub":
        files = sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
        if others := [str(file.relative_to(folder)) for file in files if file not in source.files]:
            more = f" and {len(others) - 3} more" * (len(others) > 3)
            lines.append(f"files that are not used: {in_quotes(others[:3])}{more}; data.train and data.eval name files")
    if reading.columns:
        by_name = {*ROW_COLUMNS[reading.format], *OPTIONAL_COLUMNS[reading.format]} - {*reading.columns}
        unused = [name for name in names if name not in {*reading.columns.values(), *by_name}]
        lines.append(f"read as {in_yaml(reading.columns)}" + f"; not used: {in_quotes(unused)}" * bool(unused))
    else:
        lines.append(f"read as {reading.format}")
    if reading.objective != "supervised":
        lines.append(
            f"training.objective: {reading.objective} moves a model that answers already; after supervised training on "
            "such questions, name that run's adapter or model: model.adapter, or model.name_or_path"
        )
        prompt = reading.columns.get("prompt", "prompt")
        if "instruction" not in reading.columns and isinstance(sample.rows[0].get(prompt), str):
            lines.append(
                f"{prompt!r} is a text, which the model sees without its chat template; for questions to a chat model "
                f"write instruction: {prompt} in place of prompt"
            )
    dropped = [f"{counts.empty:,} with an empty cell"] * (counts.empty > 0)
    dropped += [f"{counts.duplicate:,} that are there already"] * (counts.duplicate > 0)
    if dropped:
        lines.append(f"left out: {' and '.join(dropped)}; {counts.rows:,} rows remain")
    if counts.refused:
        lines.append(f"wrong rows: {counts.refused:,}; training will refuse them: {counts.problems[0]}")
    if counts.rows <= SMALLEST_SPLIT:
        few = f"{counted(counts.rows, 'row')}: too few to hold some out and measure by them"
        if reading.format != "text":
            few += "; a hundred are a beginning"
        lines.append(few)
    if counts.too_long:
        fate = f"they are cut, which loses about {percent(counts.beyond)} of the tokens"
        if reading.format == "text":
            fate = "they are split into pieces, and no token is lost"
        lines.append(f"longer than max_length: {counted(counts.too_long, 'row')}; {fate}")
    return lines
