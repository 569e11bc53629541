"""Checks over several values in a recipe, and of names. pydantic sees one value at a time.

A section calls its check when its own values are valid. Each check raises one pydantic error with every CrossCheck
found; mistakes.py places them in the file.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic_core import PydanticCustomError

from finetune.output_stream import has_controls, printable
from finetune.recipe.metric_names import METRICS, read_metric
from finetune.recipe.sections.base import MOST
from finetune.recipe.sections.preferences import Dpo
from finetune.recipe.yaml_text import shown

if TYPE_CHECKING:
    from finetune.recipe.schema import DataSet, Generate, ModelSection, Quantization, Recipe, Training
    from finetune.recipe.sections.lora import Lora

# Each schedule's arguments, by transformers' names.
SCHEDULER_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}

SHOWN_PATH = 300  # characters; a message shortens a longer path
# Limits that a disk, the Hub or a float sets.
LONGEST_NAME, LONGEST_PATH_BYTES = 255, 4096  # bytes, on Linux's disks
MOST_REPOSITORY = 96  # letters of a name on the Hub
REPOSITORY_PART = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
_MOST_CYCLES = 1000  # limit for a schedule's cycles and its power: 0.5 ** 1000 is 1e-301, near the smallest float
CURVE_SHAPES = ("linear", "cosine", "1-sqrt")  # values for warmup_type and decay_type

# Each layout's columns by our names: required ones, then optional ones.
ROW_COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "preference": ("chosen", "rejected"),
    "kto": ("completion", "label"),
}
# The layout that `auto` means where training.objective is not supervised. `auto` alone never means one of them.
FORMAT_OF_OBJECTIVE = {"dpo": "preference", "kto": "kto"}
OF_CHATS = ("system", "tools", "chat_template_kwargs")
# Before compared or judged answers: a text or messages, or a text that becomes a user's message.
PROMPTS = ("prompt", "instruction", "input", *OF_CHATS)
OPTIONAL_COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": OF_CHATS,
    "sharegpt": OF_CHATS,
    "prompt_completion": OF_CHATS,
    "alpaca": ("input", "history", "reasoning_content", *OF_CHATS),
    "text": (),
    "preference": PROMPTS,
    "kto": PROMPTS,
}
# Columns of ours that a row's template may make: each is one text.
TEMPLATED = (
    "instruction",
    "input",
    "output",
    "prompt",
    "completion",
    "text",
    "system",
    "reasoning_content",
    "chosen",
    "rejected",
)
LAYOUTS_IN_WORDS = "choose from " + ", or ".join(" and ".join(columns) for columns in ROW_COLUMNS.values())
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


@dataclass(frozen=True)
class CrossCheck:
    """Values that contradict each other. `key` is the dotted path to point at, below its section."""

    key: str
    problem: str
    remedy: str


def refuse(checks: Iterable[CrossCheck]) -> None:
    """Raise one error for the section with all of these; do nothing if there are none."""
    if failed := list(checks):
        text = "; ".join(f"{check.key}: {check.problem}; {check.remedy}" for check in failed)
        raise PydanticCustomError("cross_check", "{text}", {"text": text, "found": failed})


def check_width(quantization: Quantization) -> None:
    """Check that quantised weights have either 4 or 8 bits."""
    if quantization.load_in_4bit == quantization.load_in_8bit:
        problem = "exactly one of load_in_4bit and load_in_8bit must be true"
        refuse([CrossCheck("load_in_4bit", problem, "set one of them, or quantization: null for a 16-bit base")])


def check_new_tokens(section: ModelSection) -> None:
    """Check that new tokens are texts, each named once. model/new_tokens.py compares them with the vocabulary."""
    mistakes, seen = [], set()
    for key in ("add_tokens", "add_special_tokens"):
        for token in getattr(section, key):
            if not token.strip():
                mistakes.append(CrossCheck(key, f"{shown(token)} is not a token", "name a text, or remove it"))
            elif token in seen:
                mistakes.append(CrossCheck(key, f"{shown(token)} is named twice", "keep one of them"))
            seen.add(token)
    if seen and section.adapter is not None:
        problem = f"{shown(section.adapter)} has no rows of new tokens"
        remedy = "merge it and name the result in name_or_path, or remove the new tokens"
        mistakes.append(CrossCheck("adapter", problem, remedy))
    refuse(mistakes)


def check_data_set(entry: DataSet) -> None:
    """Check that the layout has the mapped columns, and that no template argument is one that this program sets."""
    refuse([*_column_mistakes(entry), *_row_template_mistakes(entry), *_template_argument_mistakes(entry)])


def check_metrics(section: Generate) -> None:
    """Check that each metric is known and named once."""
    mistakes, seen = [], set()
    for text in section.metrics:
        try:
            name = read_metric(text).name
        except ValueError as error:
            problem, _, remedy = str(error).partition("; ")
            mistakes.append(CrossCheck("metrics", problem, remedy))
            continue
        if name in seen:
            mistakes.append(CrossCheck("metrics", f"{name} is named twice", "keep one of them"))
        seen.add(name)
    refuse(mistakes)


def layouts_with(columns: Iterable[str]) -> list[str]:
    """The layouts that have all these columns, by our names, in order of preference. Rows for another objective than
    supervised come last; `auto` alone does not mean them."""
    return [name for name in ROW_COLUMNS if {*columns} <= {*ROW_COLUMNS[name], *OPTIONAL_COLUMNS[name]}]


def _column_mistakes(entry: DataSet) -> Iterator[CrossCheck]:
    known = list(dict.fromkeys([*sum(ROW_COLUMNS.values(), ()), *sum(OPTIONAL_COLUMNS.values(), ())]))
    unknown = [ours for ours in entry.columns if ours not in known]
    for ours in unknown:
        remedy = f"choose one of {', '.join(known)}"
        if entry.columns[ours] in known:
            remedy = f"our name comes first: write {entry.columns[ours]}: {ours}"
        elif near := difflib.get_close_matches(ours.lower(), known, 1, 0.6):
            remedy = f"did you mean {near[0]}?"
        yield CrossCheck(f"columns.{ours}", "is not a column of any layout", remedy)
    layouts = layouts_with(entry.columns)
    if "preference" in layouts:
        layouts.append("kto")  # a pair is two judged answers
    if not unknown and not layouts:
        yield CrossCheck("columns", f"no layout has all of {' and '.join(entry.columns)}", LAYOUTS_IN_WORDS)
    elif not unknown and entry.format != "auto" and entry.format not in layouts:
        columns = ", ".join([*ROW_COLUMNS[entry.format], *OPTIONAL_COLUMNS[entry.format]])
        problem = f"does not fit format {entry.format}, whose columns are {columns}"
        yield CrossCheck("columns", problem, "write format: auto")
    mapped: set[str] = set()  # their columns so far
    for ours, theirs in entry.columns.items():
        if theirs in mapped:
            yield CrossCheck(f"columns.{ours}", f"{theirs} is mapped twice", "keep one of them")
            break
        mapped.add(theirs)


def _row_template_mistakes(entry: DataSet) -> Iterator[CrossCheck]:
    """`template` has plain {column} fields only: no attribute, no index, no format, which would run code or change
    values."""
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


def _template_argument_mistakes(entry: DataSet) -> Iterator[CrossCheck]:
    for name, value in entry.chat_template_kwargs.items():
        key = f"chat_template_kwargs.{name}"
        parts = value if isinstance(value, list) else [value]
        if name in TEMPLATE_ARGUMENTS:
            remedy = "write data.date_string" if name == "date_string" else "remove it"
            yield CrossCheck(key, "is given to the template by this program", remedy)
        elif any(isinstance(part, dict | list) for part in parts):
            remedy = "write one; rows may have a column of their own"
            yield CrossCheck(key, "is not a value or a list of values", remedy)


def check_schedule(training: Training) -> None:
    """Check that the schedule knows its arguments, and has those that it needs."""
    refuse(_schedule_mistakes(training))


def _schedule_mistakes(training: Training) -> Iterator[CrossCheck]:
    shape, arguments = training.lr_scheduler_type, training.lr_scheduler_kwargs
    known = SCHEDULER_ARGUMENTS[shape]
    for name, value in arguments.items():
        key = f"lr_scheduler_kwargs.{name}"
        if name not in known:
            remedy = "it has none; remove them"
            if known:
                remedy = f"its arguments are {', '.join(known)}"
            yield CrossCheck(key, f"{shape} has no argument {name}", remedy)
        elif name.endswith("_type"):
            if value not in CURVE_SHAPES:
                yield CrossCheck(key, "is not a curve's shape", f"choose one of {', '.join(CURVE_SHAPES)}")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            yield CrossCheck(key, "is not a number", "write a number")
        elif remedy := _out_of_range(name, value, training):
            yield CrossCheck(key, f"is {shown(value)}", remedy)
    # Without these arguments transformers raises an error, but only after the model is loaded.
    if shape == "cosine_with_min_lr" and len({"min_lr", "min_lr_rate"} & set(arguments)) != 1:
        remedy = "add lr_scheduler_kwargs: {min_lr_rate: 0.1}"
        yield CrossCheck("lr_scheduler_type", "cosine_with_min_lr needs one of min_lr and min_lr_rate", remedy)
    if shape == "warmup_stable_decay" and "num_decay_steps" not in arguments:
        remedy = "add lr_scheduler_kwargs: {num_decay_steps: 100}"
        yield CrossCheck("lr_scheduler_type", "warmup_stable_decay needs num_decay_steps", remedy)


def _out_of_range(name: str, value: float, training: Training) -> str:
    """The remedy for a number that makes the rate negative, rising or impossible to compute; empty for other numbers.

    The limits are far beyond any useful value.
    """
    rate = training.learning_rate
    match name:
        case "num_cycles" | "power" if not 0 < value <= _MOST_CYCLES:
            return f"write a number above 0, at most {_MOST_CYCLES:,}"
        case "timescale" if not 1 <= value <= MOST:
            return "write the number of steps, 1 or more"
        case "num_decay_steps" | "num_stable_steps" if not 0 <= value <= MOST or value != int(value):
            return "write a whole number of steps, 0 or more"
        case "min_lr_rate" | "min_lr_ratio" if not 0 <= value <= 1:
            return "write a share of the learning rate, from 0 to 1"
        case "lr_end" if not 0 <= value < rate:
            return f"write a rate from 0 to below training.learning_rate, {rate:g}"
        case "min_lr" if not 0 <= value <= rate:
            return f"write a rate from 0 to training.learning_rate, {rate:g}"
    return ""


def check_sections(recipe: Recipe) -> None:
    """Check that values in different sections agree, and that names can be used."""
    mistakes = [*_frozen_base_mistakes(recipe), *_training_mistakes(recipe), *_preference_mistakes(recipe)]
    refuse([*mistakes, *_hub_mistakes(recipe), *_name_mistakes(recipe)])


def _frozen_base_mistakes(recipe: Recipe) -> Iterator[CrossCheck]:
    """Settings that need adapters, and adapters that a quantised base does not support."""
    base, lora = recipe.quantization, recipe.lora
    if recipe.model.adapter is not None and lora is None:
        remedy = "add lora: {} with the adapter's settings, or merge the adapter and name the result in name_or_path"
        yield CrossCheck("model.adapter", "all weights are trained, no adapter (lora is null)", remedy)
    if lora is not None and lora.on_top:
        yield from _on_top_mistakes(recipe, lora)
    if base is None:
        return
    if lora is None:
        remedy = "add lora: {}, or quantization: null"
        yield CrossCheck("quantization", "quantised weights cannot be trained", remedy)
    elif lora.init_lora_weights == "orthogonal":
        problem = "orthogonal needs base weights that are not quantised"
        yield CrossCheck("lora.init_lora_weights", problem, "set it to true, or quantization: null")
    elif lora.use_dora and base.load_in_8bit:
        yield CrossCheck("lora.use_dora", "peft has no DoRA over 8-bit weights", "set quantization.load_in_4bit")
    if base.load_in_4bit and recipe.training.mixed_precision == "fp16" and base.bnb_4bit_compute_dtype == "bfloat16":
        key, problem = "quantization.bnb_4bit_compute_dtype", "is bfloat16 while the rest computes in fp16"
        yield CrossCheck(key, problem, "set it to float16")


def _on_top_mistakes(recipe: Recipe, lora: Lora) -> Iterator[CrossCheck]:
    """Settings by which the sum of two adapters is no plain adapter."""
    key = "lora.on_top"
    if recipe.model.adapter is None:
        yield CrossCheck(key, "there is no adapter below", "name it in model.adapter, or set lora.on_top: false")
    in_the_way = [name for name in ("use_dora", "modules_to_save", "target_parameters") if getattr(lora, name)]
    for name in in_the_way:
        remedy = "leave it out, or merge the adapter into its base first and name the result in model.name_or_path"
        yield CrossCheck(key, f"the sum of two adapters cannot have lora.{name}", remedy)


def _training_mistakes(recipe: Recipe) -> Iterator[CrossCheck]:
    training = recipe.training
    if training.early_stopping_patience and recipe.data.eval is None:
        key, remedy = "training.early_stopping_patience", "add data.eval: {fraction: 0.05}"
        yield CrossCheck(key, "early stopping needs held-out rows", remedy)
    if training.load_best_model_at_end and recipe.data.eval is None:
        remedy = "add data.eval: {fraction: 0.05}, or set it to false"
        yield CrossCheck("training.load_best_model_at_end", "the best evaluation needs held-out rows", remedy)
    generate, measured = recipe.eval.generate, [*recipe.data.metrics, *recipe.score_names, *recipe.reward_names]
    if training.metric_for_best_model not in measured:
        problem = f"is {training.metric_for_best_model}, which no evaluation measures"
        remedy = f"write {' or '.join(measured)}"
        if training.metric_for_best_model.removeprefix("eval_") in METRICS:
            remedy = "name it in eval.generate.metrics, and set eval.generate.every"
        yield CrossCheck("training.metric_for_best_model", problem, remedy)
    if generate.every is not None and recipe.data.eval is None and generate.file is None:
        remedy = "add data.eval: {fraction: 0.05}, or name eval.generate.file"
        yield CrossCheck("eval.generate.every", "scores need held-out rows", remedy)
    # Without max_steps the rows decide how long the run is, and nobody has counted them yet. Intervals in steps can be
    # compared all the same: as in a run without an end.
    total_steps: float | None = training.max_steps
    if total_steps is None and isinstance(recipe.deciding_steps, int) and isinstance(recipe.save_steps, int):
        total_steps = math.inf
    if total_steps is not None and (unsaved := unsaved_evaluations(recipe, total_steps)):
        yield CrossCheck("save_steps", *unsaved)
    if training.pure_bf16 and training.mixed_precision != "bf16":
        key, remedy = "training.pure_bf16", "set mixed_precision: bf16, or pure_bf16: false"
        yield CrossCheck(key, "pure_bf16 needs mixed_precision: bf16", remedy)


def _preference_mistakes(recipe: Recipe) -> Iterator[CrossCheck]:
    """Settings that belong to another objective, and rows of another kind than the objective reads."""
    objective = recipe.training.objective
    for name in ("dpo", "kto"):
        section = getattr(recipe, name)
        if objective != name and section != type(section)():  # a resolved recipe has the defaults of both
            yield CrossCheck(name, f"training.objective is {objective}", f"set it to {name}, or remove the section")
    layout = FORMAT_OF_OBJECTIVE.get(objective)
    for key, entries in (("train", recipe.data.train), ("eval", recipe.data.eval_sets)):
        for number, entry in enumerate(entries):
            place = f"data.{key}.{number}.format"
            if layout is not None and entry.format != layout:
                yield CrossCheck(place, f"{objective} trains on {layout} rows, not on {entry.format}", "remove it")
            elif layout is None and entry.format in FORMAT_OF_OBJECTIVE.values():
                wanted = next(name for name, each in FORMAT_OF_OBJECTIVE.items() if each == entry.format)
                yield CrossCheck(place, "these rows are for another objective", f"set training.objective: {wanted}")
    section = recipe.preferences
    if section is None:
        return
    if recipe.data.train_on != "assistant":
        problem = f"is {recipe.data.train_on}, and {objective} compares the answers after the prompt"
        yield CrossCheck("data.train_on", problem, "remove it")
    if section.reference == "adapter_off" and recipe.lora is None:
        problem = "all weights are trained, so there is no adapter to switch off"
        yield CrossCheck(f"{objective}.reference", problem, "set it to start, or name a model")
    if isinstance(section, Dpo):
        yield from _pair_loss_mistakes(section)
    elif recipe.training.global_batch_size < 2:
        problem = "is 1, and kto measures each answer of a step against another row's"
        yield CrossCheck("training.global_batch_size", problem, "set it to 2 or more, 16 for example")


def _pair_loss_mistakes(section: Dpo) -> Iterator[CrossCheck]:
    if section.label_smoothing and section.loss_type != "robust":
        problem = f"{section.loss_type} has no label smoothing"
        yield CrossCheck("dpo.label_smoothing", problem, "set dpo.loss_type: robust, or remove it")
    if section.loss_type == "robust" and not section.label_smoothing:
        problem = "robust needs the share of wrong labels"
        yield CrossCheck("dpo.label_smoothing", problem, "set it, 0.1 for example, or dpo.loss_type: sigmoid")
    if section.simpo_gamma is not None and section.loss_type != "simpo":
        yield CrossCheck("dpo.simpo_gamma", f"{section.loss_type} has no gamma", "remove it")
    if not section.needs_reference and section.reference != "start":
        problem = f"{section.loss_type} compares with no reference"
        yield CrossCheck("dpo.reference", problem, "remove it")


def steps_between(interval: float, total_steps: float) -> int:
    """Steps from one evaluation, or checkpoint, to the next. A share is rounded up, as transformers does."""
    if interval < 1:
        return math.ceil(interval * total_steps)
    return int(interval)


def unsaved_evaluations(recipe: Recipe, total_steps: float) -> tuple[str, str] | None:
    """The problem and the remedy if the best evaluation may have no checkpoint; else None."""
    if not recipe.training.exports_best or (recipe.data.eval is None and not recipe.best_by_score):
        return None
    # Every 30 steps evaluated and every 20 saved: step 30 may be the best, and has no checkpoint.
    evaluated = steps_between(recipe.deciding_steps, total_steps)
    saved = steps_between(recipe.save_steps, total_steps)
    if evaluated >= total_steps or evaluated % saved == 0:  # the last step is always evaluated and saved
        return None
    total = "" if total_steps == math.inf else f" of {int(total_steps):,}"
    problem = (
        f"evaluations every {evaluated:,} steps{total} are not all saved by checkpoints every {saved:,}, and the "
        "best one's weights are to be exported (training.load_best_model_at_end)"
    )
    multiple = max(1, round(evaluated / saved)) * saved
    key = "eval.generate.every" if recipe.best_by_score else "eval_steps"
    remedy = f"write save_steps: {recipe.deciding_steps}, as {key} is, or {key}: {multiple}"
    return problem, remedy


def _hub_mistakes(recipe: Recipe) -> Iterator[CrossCheck]:
    hub = recipe.hub
    for key, needs_repository in (("hub.push", hub.push), ("hub.checkpoints", hub.checkpoints)):
        if needs_repository and hub.repo_id is None:
            yield CrossCheck(key, "hub.repo_id is not set", "add hub.repo_id: owner/name")
    if hub.checkpoints == hub.revision:
        problem = "is also hub.revision, the result's branch"
        yield CrossCheck("hub.checkpoints", problem, "name another, for example checkpoints")


def _name_mistakes(recipe: Recipe) -> Iterator[CrossCheck]:
    """Names for files, folders and repositories that a shell, a terminal or a disk cannot take."""
    names: list[tuple[str, str]] = [
        ("model.name_or_path", recipe.model.name_or_path),
        ("model.adapter", recipe.model.adapter or ""),
        ("output_dir", recipe.output_dir or ""),
        ("accelerate_config", recipe.accelerate_config),
    ]
    if "{" not in (template := recipe.data.chat_template or ""):  # else it is the template's text, not its file
        names.append(("data.chat_template", template))
    for section, entries in (("train", recipe.data.train), ("eval", recipe.data.eval_sets)):
        for number, entry in enumerate(entries):
            names.append((f"data.{section}.{number}.path", entry.path))
            files = entry.data_files or []
            for file in [files] if isinstance(files, str) else files:
                names.append((f"data.{section}.{number}.data_files", file))
    for key, name in names:
        if has_controls(name):
            yield CrossCheck(key, "holds a control character", "write a name that can be seen and typed")
        elif any(len(part.encode(errors="replace")) > LONGEST_NAME for part in name.split("/")):
            yield CrossCheck(key, f"has a part longer than {LONGEST_NAME} bytes, which no disk takes", "shorten it")
        elif len(name.encode(errors="replace")) > LONGEST_PATH_BYTES:
            yield CrossCheck(key, f"is longer than {LONGEST_PATH_BYTES:,} bytes, which no disk takes", "shorten it")
        elif key == "output_dir" and name.startswith("-"):  # the printed commands hold it
            yield CrossCheck(key, "begins with a dash, so commands take it for an option", f"write ./{name[:40]}")
    repository = recipe.hub.repo_id
    if repository and not is_repository(repository):
        remedy = "write owner/name of letters, digits, - _ and ., without -- .. or .git at its end"
        yield CrossCheck("hub.repo_id", "is not a repository name", remedy)


def is_repository(name: str) -> bool:
    """Whether the Hub takes this name, owner/name, by its rules."""
    parts = name.split("/")
    valid = len(parts) == 2 and all(REPOSITORY_PART.fullmatch(part) for part in parts)
    return valid and len(name) <= MOST_REPOSITORY and not name.endswith((".git", ".ipynb"))


def rows_of_run(training: Training, rows: int) -> int:
    """The rows that a whole run trains on, with repeats. `rows`: one epoch's."""
    if training.max_steps is not None:
        return training.max_steps * training.global_batch_size
    return math.ceil(training.num_train_epochs * rows)


def local_model_problem(name: str) -> str | None:
    """The problem with a model's folder; None if there is none, or if the name is a repository on the Hub.

    Only a folder's name has more than one slash, or a dot at its beginning.
    """
    if not (name.startswith((".", os.sep, "~")) or name.count("/") > 1 or os.path.isdir(name)):
        return None
    place = printable(name) if len(name) <= SHOWN_PATH else shown(name)
    remedy = "name a model's folder, or a repository of the Hub as owner/name"
    if os.path.isfile(os.path.join(name, "config.json")):
        return None
    if os.path.isfile(os.path.join(name, "adapter_config.json")):
        return f"{place} holds an adapter without its model; name the model that it was trained on"
    if os.path.isdir(name):
        return f"{place} has no config.json; {remedy}"
    if os.path.exists(name):
        return f"{place}: is a file; {remedy}"
    return f"{place}: no such folder (working folder: {os.getcwd()}); {remedy}"
