"""The recipe's text: at most 25 lines, with a comment where a reader would ask why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetune.data.columns import in_yaml
from finetune.new_recipe.hardware import EMBEDDED, ONLINE_SMOLLM, Choice
from finetune.recipe.gpus import budget_of
from finetune.recipe.schema import DataSet

MOST_LINES = 25


@dataclass(frozen=True)
class Counts:
    """The rows of a data set."""

    rows: int  # that are trained on or held out; estimated for a large file
    empty: int
    duplicate: int
    refused: int  # rows with a mistake
    problems: tuple[str, ...]
    mean_bytes: float
    longest_bytes: int
    is_whole: bool  # whether every row was read
    tokens: int = 0  # of one epoch
    longest: int = 0  # tokens
    too_long: int = 0  # rows with more than max_length tokens


@dataclass(frozen=True)
class Settings:
    """Settings that follow from the number of rows and the machine."""

    max_length: int
    held_out: float  # 0: nothing
    global_batch_size: int
    per_device_batch_size: int
    epochs: int
    learning_rate: float
    max_steps: int | None
    steps: int  # about


def recipe_text(entry: DataSet, counts: Counts, choice: Choice, settings: Settings, file: Path) -> str:
    """The recipe as YAML."""
    name = choice.model.rpartition("/")[2]
    if choice.model in (EMBEDDED, ONLINE_SMOLLM):
        name = "SmolLM2-135M"
    method = "LoRA" if choice.method == "lora" else "QLoRA, LoRA over a 4-bit base,"
    lines = [
        f"# {name} learns {counts.rows:,} rows of {entry.short_name} by {method} on {choice.place}.",
        f"#   finetune preview {file}     the supervised tokens in colour",
        f"#   finetune train {file}       about {settings.steps:,} steps",
    ]
    budget = budget_of(choice.gpus)
    if choice.gpus is None:
        lines += ["budget: {gpus: 0}"]
    else:
        nodes = f", nodes: {budget.nodes}" * (budget.nodes > 1)
        needs = f"  # {choice.memory}" * bool(choice.memory)
        lines += [f"budget: {{gpus: {budget.gpus}, gpu_memory_gb: {budget.gpu_memory_gb:g}{nodes}}}{needs}"]
    lines += [f"accelerate_config: {choice.strategy}"]
    dtype = "auto" if choice.gpus is None else "bfloat16"
    lines += [f"model: {{name_or_path: {_quoted(choice.model)}, dtype: {dtype}}}  # frozen; the adapter is float32"]
    if choice.method == "qlora":
        lines += ["quantization: {load_in_4bit: true, bnb_4bit_quant_storage: bfloat16}"]
    rank = "r: 8, lora_alpha: 32" if choice.gpus is None else "r: 16, lora_alpha: 32"
    lines += [f"lora: {{{rank}, target_modules: all-linear}}", "data:", "  train:"]
    lines += _entry_lines(entry, counts)
    if settings.held_out:
        share = round(settings.held_out * counts.rows)
        lines += [f"  eval: {{fraction: {settings.held_out:g}}}  # about {share:,} rows are held out, to measure by"]
    lines += [
        f"  max_length: {settings.max_length}  # tokens; the longest row has about {counts.longest:,}",
        "  truncation: right  # a longer row is cut, and counted",
        "training:",
        f"  global_batch_size: {settings.global_batch_size}  # packed rows of one step",
    ]
    if settings.per_device_batch_size > 1:
        lines += [f"  per_device_batch_size: {settings.per_device_batch_size}"]
    if settings.max_steps:
        lines += [f"  max_steps: {settings.max_steps}  # some five minutes on two cores; num_train_epochs: 3 is longer"]
    else:
        lines += [f"  num_train_epochs: {settings.epochs}"]
    lines += [f"  learning_rate: {settings.learning_rate:g}"]
    if settings.held_out and settings.epochs > 1:
        lines += ["  load_best_model_at_end: true  # small data are learned by heart in the end"]
    assert len(lines) <= MOST_LINES, f"{len(lines)} lines"
    return "\n".join(lines) + "\n"


def _entry_lines(entry: DataSet, counts: Counts) -> list[str]:
    """The data set's entry: one key a line."""
    lines = [f"path: {_quoted(entry.path)}"]
    if entry.data_files:
        lines.append(f"data_files: {_quoted(str(entry.data_files))}")
    if entry.split != "train":
        lines.append(f"split: {_quoted(entry.split)}")
    if entry.columns:
        lines.append(f"columns: {in_yaml(entry.columns)}  # ours: yours")
    if entry.drop:
        found = f"  # {counts.empty:,} and {counts.duplicate:,} rows" if len(entry.drop) > 1 else ""
        lines.append(f"drop: [{', '.join(entry.drop)}]{found}")
    if entry.chat_template_kwargs:
        lines.append("chat_template_kwargs: {enable_thinking: false}  # answers without a thought before")
    return [("    - " if index == 0 else "      ") + line for index, line in enumerate(lines)]


def _quoted(text: str) -> str:
    """A YAML scalar: plain if that is safe, else in quotes."""
    is_plain = text and text[0].isalpha() and all(letter.isalnum() or letter in "/._-" for letter in text)
    if is_plain and text.lower() not in ("true", "false", "null", "yes", "no", "on", "off"):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
