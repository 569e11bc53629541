"""From a data set to a recipe: sample, columns, counts, machine, settings, text.

The settings follow from the number of rows. A small set gets three epochs and small batches, so that a run has about
thirty steps or more. A large set gets one epoch.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import yaml

from finetune.base.location import resolve_model_path
from finetune.closed_form.shape import approximate_weights
from finetune.data.chat import Chat, Content, Passage, documents_in, last_answer
from finetune.data.dialect import csv_dialect
from finetune.data.readings import (
    Reading,
    Readings,
    in_quotes,
    in_yaml,
    judgement_of,
    label_of,
    labels_in_yaml,
    listed,
    looks_like_data,
    readings,
    remarks,
)
from finetune.data.rows import Mistakes, RowReader, notes_on_reading
from finetune.data.sources import Source, files_below, resolve
from finetune.errors import DataError, DoesNotFit, FinetuneError, UnclearFile
from finetune.files import check_output
from finetune.model.known_configs import config_here
from finetune.new_recipe.hardware import EMBEDDED, ONLINE_SMOLLM, Choice, choose, gpus_here
from finetune.new_recipe.page import Counts, Settings, recipe_text
from finetune.new_recipe.sample import Sample, read_sample
from finetune.new_recipe.target import entry_of
from finetune.output_stream import has_controls, one_line
from finetune.recipe.gpus import Gpus, parse_gpus
from finetune.recipe.layouts import COLUMNS, LAYOUTS, KnownFormat
from finetune.recipe.optimizers import usual_rate
from finetune.recipe.schema import DataSet, Recipe
from finetune.recipe.sections.data import Truncation
from finetune.recipe.sections.training import Objective
from finetune.scoring.metrics import MOST_OPTIONS, options_among
from finetune.tokens.dataset import Prepared, prepare_here
from finetune.wording import counted, percent

SHOWN = 5  # rows
SUFFIXES_TO_REMOVE = (".gz", ".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx", ".txt", ".md")
TOKEN_BYTES = 3.0  # by which max_length is chosen before a tokenizer counts: English has 4, German 3
TOKENS_AROUND_TOOLS = 256  # that templates write beside the tools themselves: Qwen3-Coder's has 250
SMALLEST_SPLIT = 10
CPU_TOKENS = 30_000  # of SmolLM2-135M, trained in three to five minutes on two cores
ROW_SIZES = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
USUAL_ROWS = 4096
MOST_ON_CPU = 1024
SHORT_ANSWER, NARROW_SHARE = 40, 0.9  # letters, and the share of rows whose answers are no longer: a narrow task


@dataclass(frozen=True)
class Options:
    """The command line's options."""

    columns: dict[str, str] = field(default_factory=dict)
    labels: dict[str, bool] = field(default_factory=dict)
    model: str | None = None
    gpus: str | None = None  # None: this machine's
    output: Path | None = None  # None: the data's name
    encoding: str | None = None  # None: UTF-8, or what a byte order mark says
    sheet: str | None = None  # None: the first one with a table


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
            "longest_tokens": self.counts.longest or None,
            "model": self.choice.model,
            "method": self.choice.method,
            "steps": self.settings.steps or None,
            "recipe": self.text,
        }


def read_columns(text: str | None) -> dict[str, str]:
    """Read `--columns`: `instruction=frage,output=antwort` or YAML. Raises FinetuneError."""
    columns = _read_mapping("--columns", text, form := "write --columns instruction=frage,output=antwort")
    for key in columns:
        if key not in COLUMNS:
            raise FinetuneError(f"--columns: {one_line(repr(key), 60)} is none of our columns; {form}, or text=NAME")
    if len({*columns.values()}) < len(columns):
        raise FinetuneError(f"--columns: one column is named twice; {form}")
    if columns and _format_of(columns) is None:
        needs = "needs instruction and output, messages, or text alone"
        if {"prompt", "chosen", "rejected", "completion", "label"} & {*columns}:
            needs = "needs chosen and rejected, or completion and label, beside the question's column"
        raise FinetuneError(f"--columns: {needs}; {form}")
    return columns


def read_labels(text: str | None) -> dict[str, bool]:
    """Read `--labels`: `up=true,down=false` or YAML. Raises FinetuneError."""
    labels = _read_mapping("--labels", text, form := "write --labels up=true,down=false")
    for label, word in labels.items():
        if word.lower() not in ("true", "false"):
            raise FinetuneError(f"--labels: {one_line(label, 60)} is true (wanted) or false (not); {form}")
    return {label.lower(): word.lower() == "true" for label, word in labels.items()}


def _read_mapping(option: str, text: str | None, form: str) -> dict[str, str]:
    if text is None:
        return {}
    pairs: list[tuple[str, str]] = []
    if not text.lstrip().startswith("{"):
        pairs = [(key.strip(), name.strip()) for key, _, name in (part.partition("=") for part in text.split(","))]
    else:
        with suppress(yaml.YAMLError, RecursionError, ValueError):
            value = yaml.safe_load(text)
            if isinstance(value, dict) and not any(isinstance(name, dict | list) for name in value.values()):
                pairs = [(str(key), str(name)) for key, name in value.items()]
    if not pairs or not all(name for _, name in pairs):
        raise FinetuneError(f"{option}: {one_line(repr(text), 100)} is not a mapping; {form}")
    return dict(pairs)


def _format_of(columns: Mapping[str, str]) -> KnownFormat | None:
    """The layout that `--columns` names; None if none is whole."""
    # Two answers or a label before a prompt and its completion, which are texts or turns.
    layouts = sorted(LAYOUTS.items(), key=lambda item: item[1].objective == "supervised")
    return next((name for name, layout in layouts if {*layout.columns} <= {*columns} <= {*layout.all}), None)


def propose(target: str, options: Options, choose_one: Callable[[Sequence[str]], int] | None) -> Proposal:
    """See `finetune.new_recipe.propose`."""
    for option, text in (("--model", options.model), ("--output", str(options.output))):
        if text is not None and has_controls(text):
            raise FinetuneError(f"{option}: {one_line(repr(text))} holds a line break or a control; name another")
    entry = entry_of(target, options.encoding)
    given = {"encoding": options.encoding, "sheet": options.sheet}
    entry = entry.model_copy(update={key: value for key, value in given.items() if value is not None})
    file = options.output
    if file is None:
        stem = Path(target).name
        while Path(stem).suffix.lower() in SUFFIXES_TO_REMOVE:
            stem = Path(stem).stem
        file = Path(f"{DataSet(path=stem or 'data').short_name}.yaml")  # letters, digits, dots and dashes
    check_output(file, "--output")
    if file.exists():
        raise FinetuneError(f"{file}: is there already; name another file with -o, or delete it")
    source = resolve(entry)
    try:
        sample = read_sample(source)
    except UnclearFile as error:
        if choose_one is None:
            raise
        ways = [f"{word}   ({error.key}: {name})" for name, word in error.readings]
        entry = entry.model_copy(update={error.key: error.readings[choose_one(ways)][0]})
        sample = read_sample(source := resolve(entry))
    names = [str(name) for name in sample.values[0]]
    if source.kind in ("csv", "excel") and not options.columns and looks_like_data(names, sample.values):
        header = ["question", "answer", *(f"column{number}" for number in range(3, len(names) + 1))][: len(names)]
        delimiter = " | "
        if source.kind == "csv":
            delimiter = csv_dialect(source.files[0], encoding=entry.encoding).delimiter
        problem = f"the first line looks like data, not like column names ({in_quotes(names)})"
        remedy = f"put a line with names before it: {delimiter.join(header)}"
        raise DataError([f"{source.files[0]}:1: {problem}; {remedy}"])
    result = readings(entry.format, sample.values)
    reading = _choose_reading(target, result, options, choose_one)
    changes: dict[str, Any] = {"columns": dict(reading.columns), "drop": ["empty", "duplicate"]}
    if reading.labels:
        changes["labels"] = dict(reading.labels)
    numbers = [column.name for column in result.columns if column.kind == "number"]
    answer = reading.columns.get("output", "output")
    if reading.format == "alpaca" and answer in numbers:  # a template makes texts of them
        if not re.fullmatch(r"\w[\w ]*", answer):
            raise DataError(
                [f"{one_line(target)}: {answer!r} holds numbers; write them as texts, or rename the column"]
            )
        changes["columns"].pop("output", None)
        changes["template"] = {"output": f"{{{answer}}}"}
    if reading.format in ("messages", "sharegpt", "prompt_completion"):
        changes["drop"] = ["duplicate"]
    if reading.objective != "supervised":
        changes["format"] = reading.format  # rows are read below, before a recipe's objective decides it
    entry = DataSet.model_validate(entry.model_dump(exclude_defaults=True) | changes)
    counts, examples, notes = _count_rows(entry, sample)
    gpus = parse_gpus(options.gpus) if options.gpus else gpus_here()
    truncation: Truncation = "split" if reading.format == "text" else "right"
    read, length, longer = counts, 0, counts.longest_bytes / TOKEN_BYTES * 1.2 + 32
    longer += TOKENS_AROUND_TOOLS * (counts.with_tools > 0)
    # By bytes first. If training's own encoder finds longer rows, with the next size that model and method allow.
    while True:
        shorter, (length, choice) = length, _choose_length_and_model(longer, gpus, options.model, reading.objective)
        if choice.model.startswith("Qwen/Qwen3-") and reading.format != "text":
            entry = entry.model_copy(update={"chat_template_kwargs": {"enable_thinking": False}})
        if length == shorter:
            break
        settings, counts = _choose_settings(entry, read, choice, length, truncation, reading.objective)
        if not counts.too_long or truncation == "split":
            break
        longer = length + 1
    text = recipe_text(entry, counts, choice, settings, file)
    Recipe.model_validate(yaml.safe_load(text))  # our own text must be a valid recipe
    lines = _findings(source, sample, result, reading, entry, counts, length, examples)
    lines[1:1] = notes
    if counts.with_tools and choice.model in (EMBEDDED, ONLINE_SMOLLM):
        lines.append(
            "rows with tools: SmolLM2's chat template does not write them, so training would refuse these rows; choose "
            "--model Qwen/Qwen3-0.6B, or name a template that does: data.chat_template (example, in a checkout: "
            "data/skills/tools.jinja)"
        )
    return Proposal(entry, reading, counts, choice, settings, examples, tuple(lines), file, text)


def _choose_reading(
    target: str, result: Readings, options: Options, choose_one: Callable[[Sequence[str]], int] | None
) -> Reading:
    """How the rows are read. Raises DataError if it is not clear and nobody can be asked."""
    target, plausible = one_line(target), result.plausible
    if options.columns:
        names = {column.name: column for column in result.columns}
        # A path into an object is looked up when the rows are counted.
        missing = [
            theirs for theirs in options.columns.values() if {theirs, theirs.partition(".")[0]}.isdisjoint(names)
        ]
        if missing:
            listed = in_quotes(sorted(names))
            raise DataError([f"--columns: {target} has no column {one_line(repr(missing[0]), 60)}, but {listed}"])
        named = Reading(cast(KnownFormat, _format_of(options.columns)), options.columns, options.labels)
        if "label" in options.columns and not options.labels:
            judged = judgement_of([names[options.columns["label"]]])
            if judged is not None:
                labels = {value: verdict for value, verdict in judged[1].items() if label_of(value) is not verdict}
                named = replace(named, unknown=tuple(labels))
        plausible = [named]
    elif result.obstacle:
        as_it_is = ""
        if plausible and plausible[0].format != "text":
            as_it_is = f"; or as it is: --columns {shlex.quote(plausible[0].in_words())}"
        raise DataError([f"{target}: {result.obstacle}{as_it_is}"])
    index = 0
    lines = []
    for reading in plausible:
        line = reading.in_words()
        if reading.labels or reading.unknown:
            line += f" --labels {shlex.quote(labels_in_yaml(reading))}"
        if len({other.objective for other in plausible}) > 1:
            meaning = {"supervised": "all answers: supervised", "kto": "judged answers: kto", "dpo": "pairs: dpo"}
            line += f" ({meaning[reading.objective]})"
        lines.append(line)
    if len(plausible) > 1:
        if choose_one is None:
            problem = f"the columns may be read in {len(lines)} ways: {' or '.join(lines)}"
            raise DataError([f"{target}: {problem}; say which: --columns {shlex.quote(plausible[0].in_words())}"])
        index = choose_one(lines)
    reading = plausible[index]
    if options.labels:
        reading = replace(reading, labels=options.labels, unknown=())
    if reading.unknown:
        line = f"--columns {shlex.quote(reading.in_words())} --labels {shlex.quote(labels_in_yaml(reading))}"
        values = in_quotes(reading.unknown)
        label = reading.columns["label"]
        raise DataError([f"{target}: {label!r} has {values}; say which are wanted (true) and which not: {line}"])
    return reading


def _count_rows(entry: DataSet, sample: Sample) -> tuple[Counts, tuple[Content, ...], list[str]]:
    """Count the sample's rows as training reads them. Also the first rows, to show, and the reader's notes."""
    source = resolve(entry)
    source.notes.update(sample.notes)  # its rows are not read again
    reader = RowReader(source)
    examples: list[Content] = []
    problems: list[str] = []
    mistakes = Mistakes()
    good, nbytes, longest, with_tools, short = 0, 0, 0, 0, 0
    answers_by_text: Counter[str] = Counter()
    for row in reader.rows(iter(sample.rows)):
        if row.read is None:
            problems.append(f"{row.place}: {row.problem}")
            mistakes.add(str(row.problem), row.place)
        else:
            good += 1
            has_tools, replies = False, []  # its supervised answers to a question; a plain text has no question
            for document in documents_in(row.read):
                if isinstance(document, Passage):
                    texts = [document.prompt, document.completion]
                    replies += [document.completion] if document.prompt else []
                else:
                    texts = [str(value) for message in document.messages for value in message.values()]
                    texts += map(str, document.tools or ())
                    calls = [message.get("tool_calls") for message in document.messages]
                    has_tools |= bool(document.tools) or any(calls)
                    turns = zip(document.messages, document.supervised, calls, strict=True)
                    replies += [turn["content"] for turn, supervised, call in turns if supervised and not call]
                # The template's own bytes are not among them. An unsupervised key may contain half a letter.
                size = sum(len(text.encode(errors="replace")) for text in texts)
                nbytes, longest = nbytes + size, max(longest, size)
            with_tools += has_tools
            if isinstance(row.read, Chat | Passage):
                short += bool(replies) and all(len(reply) <= SHORT_ANSWER for reply in replies)
                if len(answers_by_text) <= MOST_OPTIONS:
                    answers_by_text[last_answer(row.read)] += 1
            if len(examples) < SHOWN:
                examples.append(row.read)
    if not good:
        mistakes.raise_if_any()
    facts = reader.facts()
    answers = facts.get("answers")  # only for preference rows
    if answers and answers["pairs"] and answers["pairs"] == answers["equal"]:
        raise DataError(problems[-1:])  # nothing to prefer, in any row
    rows = good
    if not sample.is_whole and sample.total:
        rows = max(good, round(sample.total * good / len(sample.rows)))
    counts = Counts(
        rows=rows,
        empty=facts["dropped"].get("empty", 0),
        duplicate=facts["dropped"].get("duplicate", 0),
        refused=len(problems),
        problems=tuple(problems[:3]),
        mean_bytes=nbytes / good,
        longest_bytes=longest,
        with_tools=with_tools,
        is_narrow=short >= NARROW_SHARE * good,
        options=tuple(options_among(answers_by_text)),
    )
    return counts, tuple(examples), list(notes_on_reading(facts))


def _choose_length_and_model(
    tokens: float, gpus: Gpus | None, model: str | None, objective: Objective
) -> tuple[int, Choice]:
    """Choose max_length, the model and the method. max_length is the smallest size for so many tokens.

    More than USUAL_ROWS tokens are chosen only if the model and the method stay the same.
    """
    sizes = [size for size in ROW_SIZES if gpus is not None or size <= MOST_ON_CPU]
    limit = next((size for size in sizes if size >= tokens), sizes[-1])
    usual = min(limit, USUAL_ROWS)
    choice = choose(gpus, model, usual, objective)
    # The longest size first. The first one that keeps the model and the method is taken.
    for longer in sorted((size for size in sizes if usual < size <= limit), reverse=True):
        with suppress(DoesNotFit):
            longer_choice = choose(gpus, model, longer, objective)
            if longer_choice.memory and (longer_choice.model, longer_choice.method) == (choice.model, choice.method):
                return longer, longer_choice
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
    probe = Recipe.model_validate(
        {
            "model": {"name_or_path": choice.model},
            "data": {
                "train": [entry.model_dump(exclude_defaults=True)],
                "eval": {"fraction": held_out} if held_out else None,
                "max_length": length,
                "truncation": truncation,
            },
            "training": {"objective": objective},
        }
    )
    if choice.model == EMBEDDED:
        with suppress(FinetuneError):  # the next command names it
            resolve_model_path(choice.model)  # converts it once, as the next command would
    prepared: Prepared | None = None
    try:
        prepared, uncounted = prepare_here(probe)
        counts = replace(counts, uncounted=uncounted)
    except DataError as error:
        unanswered = counts.rows * ("holds no document" in str(error))
        counts = replace(counts, refusal=error.mistakes[0], too_long=unanswered, unanswered=unanswered)
    except FinetuneError:  # a cache that cannot be written, or a damaged tokenizer: the next command says so
        pass
    packed = counts.rows  # of one epoch
    if prepared is None:  # the batch follows from the bytes
        if objective == "supervised":
            packed = math.ceil(counts.rows * (counts.mean_bytes / TOKEN_BYTES + 12) / length)
    else:
        facts, read = prepared.facts, prepared.pool.stores[0].facts
        cut, unanswered = facts["tokens_cut"], facts.get("unanswered", 0)
        scale = counts.rows / read["rows_read"] if counts.uncounted else 1  # from the encoded rows to all
        counts = replace(
            counts,
            tokens=round(scale * facts["tokens"]),
            longest=max(int(prepared.pool.longest().max()), facts.get("longest_unanswered", 0)),
            too_long=round(scale * (facts["truncated"] + unanswered + read["texts_split"])),
            beyond=cut / (cut + int(prepared.pool.lengths.sum())),
            unanswered=round(scale * unanswered),
        )
        packed = math.ceil(scale * facts["rows"])

    least = 2 if objective == "kto" else 1  # rows in a step
    rate = usual_rate(approximate_weights(config_here(choice.model) or {}), choice.method, objective)
    epochs = 3
    if objective != "supervised" or counts.rows >= 20_000:  # each pair is seen once
        epochs = 1
    elif counts.rows >= 2000:
        epochs = 2
    max_steps: int | None = None
    if choice.gpus is None:
        # A packed row is full of documents; a pair is two documents, so a step takes several pairs.
        batch, tokens_a_row = 1, length
        if objective != "supervised":
            batch, tokens_a_row = max(least, min(8, packed // 10)), math.ceil(counts.tokens / packed) or length
        most = max(1, CPU_TOKENS // (batch * tokens_a_row))
        if choice.model in (EMBEDDED, ONLINE_SMOLLM) and math.ceil(epochs * packed / batch) > most:
            max_steps = most
    else:  # about thirty steps an epoch, with at most 64 rows each, as many on each GPU
        at_once = choice.ranks
        batch = at_once * max(math.ceil(least / at_once), min(64 // at_once, packed // (30 * at_once)))
    steps = max_steps or max(1, math.ceil(epochs * packed / batch)) * bool(counts.tokens)
    return Settings(length, truncation, held_out, batch, epochs, rate, max_steps, steps, objective), counts


def _findings(
    source: Source,
    sample: Sample,
    result: Readings,
    reading: Reading,
    entry: DataSet,
    counts: Counts,
    length: int,
    examples: Sequence[Content],
) -> list[str]:
    """Findings, a line each."""
    kind = {"csv": "CSV", "json": "JSON", "parquet": "Parquet", "excel": "Excel", "text": "text", "hub": "on the Hub"}
    name = kind.get(source.kind, source.kind)
    if source.kind == "csv":
        dialect = csv_dialect(source.files[0], encoding=source.entry.encoding)
        name += f", separated by {dialect.separator}, {dialect.encoding}"
        name += "".join(f", {part}" for part in dialect.quotes_in_words())
    if sample.total is None:
        rows = f"{len(sample.values):,} rows read"
    elif sample.is_whole:
        rows = f"{sample.total:,} rows"
    else:
        rows = f"about {sample.total:,} rows (sampled)"
    names = list(dict.fromkeys(name for row in sample.values[:100] for name in row))
    lines = [f"{source.name}: {name}; {rows}; columns {in_quotes(names)}"]
    folder = Path(source.entry.path)
    others: list[str] = []
    if folder.is_dir() and source.kind != "hub":
        others = [str(file.relative_to(folder)) for file in files_below(folder)[0] if file not in source.files]
    if others:
        more = f" and {len(others) - 3} more" * (len(others) > 3)
        lines.append(f"files that are not used: {in_quotes(others[:3])}{more}; data.train and data.eval name files")
    unused = result.unused(reading)
    line = f"read as {in_yaml(reading.columns) if reading.columns else reading.format}"
    if reading.labels:
        line += f", labels {in_yaml(reading.labels)}"
    lines.append(line + f"; not used: {listed([column.in_words() for column in unused])}" * bool(unused))
    if "output" in entry.template:
        lines.append(f"answers that are numbers, or true and false, become texts: template: {in_yaml(entry.template)}")
    lines += remarks(reading, result.columns)
    if reading.objective != "supervised":
        lines.append(
            f"training.objective: {reading.objective} moves a model that answers already; after supervised training on "
            "such questions, name that run's adapter or model: model.adapter, or model.name_or_path"
        )
        prompt = reading.columns.get("prompt", "prompt")
        if any(isinstance(document, Passage) and document.prompt for row in examples for document in documents_in(row)):
            lines.append(
                f"{prompt!r} is a text, which the model sees without its chat template; for questions to a chat model "
                f"write instruction: {prompt} in place of prompt"
            )
    if counts.is_narrow:
        lines.append(
            f"short answers: {percent(NARROW_SHARE)} or more have at most {SHORT_ANSWER} letters; for a task so narrow "
            "a model forgets others: lower the rate, add the model's own answers to other questions to data.train "
            "(finetune sample MODEL --keep all), and look: finetune eval RUN --general"
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
    if counts.refusal and not (counts.refused or counts.with_tools):
        lines.append(f"training would refuse these rows: {counts.refusal}")
    elif counts.unanswered:
        lines.append(
            f"a question longer than max_length ({length:,} tokens): {counted(counts.unanswered, 'row')}; no answer is "
            f"left after the cut, so they are left out; max_length: {counts.longest} keeps them"
        )
    lines += [counts.uncounted] * bool(counts.uncounted)
    if counts.too_long > counts.unanswered:
        fate = f"they are cut, which loses about {percent(counts.beyond)} of the tokens"
        if reading.format == "text":
            fate = "they are split into pieces, and no token is lost"
        lines.append(f"longer than max_length: {counted(counts.too_long - counts.unanswered, 'row')}; {fate}")
    return lines
