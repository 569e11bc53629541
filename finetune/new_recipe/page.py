"""The recipe's text: at most 25 lines, with a comment where a reader would ask why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from finetune.data.readings import in_quotes_of_yaml, in_yaml
from finetune.new_recipe.hardware import EMBEDDED, ONLINE_SMOLLM, Choice
from finetune.recipe.gpus import budget_of
from finetune.recipe.schema import DataSet
from finetune.recipe.sections.data import Truncation
from finetune.recipe.sections.training import Objective
from finetune.wording import as_word, counted

MOST_LINES = 25
STRATEGY_WORDS = {
    "single": "one process",
    "ddp": "one process per GPU, each with all weights",
    "fsdp2": "one process per GPU, each with a share of the weights",
}
TRUNCATION_WORDS: dict[Truncation, str] = {
    "right": "cut a longer row's end; a row whose question alone is longer is left out",
    "split": "a longer text becomes several rows; no token is lost",
}


@dataclass(frozen=True)
class Counts:
    """How many rows a data set has, and how long they are."""

    rows: int  # for training and held out; estimated for a large file
    empty: int
    duplicate: int
    refused: int  # rows with a mistake
    problems: tuple[str, ...]
    mean_bytes: float
    longest_bytes: int
    with_tools: int = 0  # rows with tools or calls
    is_narrow: bool = False  # nearly all answers are short
    options: tuple[str, ...] = ()  # the distinct answers, if they are few and repeated
    tokens: int = 0  # of one epoch; 0: not counted
    longest: int = 0  # tokens; 0: not counted
    too_long: int = 0  # rows with more than max_length tokens
    beyond: float = 0.0  # share of all tokens that a cut at max_length takes
    unanswered: int = 0  # rows whose question alone is longer than max_length
    refusal: str = ""  # why training would refuse the rows
    uncounted: str = ""  # why not all tokens are counted


@dataclass(frozen=True)
class Settings:
    """Settings that follow from the number of rows and the machine."""

    max_length: int
    truncation: Truncation
    held_out: float  # 0: nothing
    global_batch_size: int
    epochs: int
    learning_rate: float
    max_steps: int | None
    steps: int  # about; 0: not counted
    objective: Objective = "supervised"


def recipe_text(entry: DataSet, counts: Counts, choice: Choice, settings: Settings, file: Path) -> str:
    """The recipe as YAML."""
    name = choice.model.rpartition("/")[2]
    if choice.model in (EMBEDDED, ONLINE_SMOLLM):
        name = "SmolLM2-135M"
    method = {"lora": "LoRA", "qlora": "QLoRA, LoRA over a 4-bit base,"}[choice.method]
    noun = {"supervised": "rows", "dpo": "pairs of answers", "kto": "judged answers"}[settings.objective]
    steps = f"       about {counted(settings.steps, 'step')}" * bool(settings.steps)
    lines = [
        f"# {name} learns {counts.rows:,} {noun} of {entry.short_name} by {method} on {choice.place}.",
        f"#   finetune preview {as_word(file)}     shows the rows; green: the model learns to write it",
        f"#   finetune train {as_word(file)}{steps}",
    ]
    if choice.gpus is None:
        dtype, rank = "auto", 8
        lines += ["budget: {gpus: 0}  # the CPU"]
    else:
        dtype, rank = "bfloat16", 16
        budget = budget_of(choice.gpus)
        nodes = f", nodes: {budget.nodes}" * (budget.nodes > 1)
        needs = f"  # {choice.memory}" * bool(choice.memory)
        lines += [f"budget: {{gpus: {budget.gpus}, gpu_memory_gb: {budget.gpu_memory_gb:g}{nodes}}}{needs}"]
    lines += [f"accelerate_config: {choice.strategy}  # {STRATEGY_WORDS[choice.strategy]}"]
    lines += [f"model: {{name_or_path: {_quoted(choice.model)}, dtype: {dtype}}}  # its weights stay as they are"]
    if choice.method == "qlora":
        lines += ["quantization: {load_in_4bit: true, bnb_4bit_quant_storage: bfloat16}  # a quarter of their memory"]
    lora = f"{{r: {rank}, lora_alpha: 32, target_modules: all-linear}}"
    lines += [f"lora: {lora}  # the small adapter that is trained", "data:", "  train:"]
    keys = [f"path: {_quoted(entry.path)}"]
    plain = {"data_files": entry.data_files, "encoding": entry.encoding, "sheet": entry.sheet}
    keys += [f"{key}: {_quoted(str(value))}" for key, value in plain.items() if value]
    if entry.split != "train":
        keys.append(f"split: {_quoted(entry.split)}")
    if entry.columns:
        keys.append(f"columns: {in_yaml(entry.columns)}  # this kit's name: your column")
    if entry.template:
        keys.append(f"template: {in_yaml(entry.template)}  # {{}}: your column, as text")
    if entry.labels:
        keys.append(f"labels: {in_yaml(entry.labels)}  # true: a wanted answer")
    if entry.drop:
        reasons = [f"{counts.empty:,} with an empty cell"] * ("empty" in entry.drop)
        reasons += [f"{counts.duplicate:,} equal to an earlier row"]
        keys.append(f"drop: [{', '.join(entry.drop)}]  # rows left out: {', '.join(reasons)}")
    if entry.chat_template_kwargs:
        keys.append("chat_template_kwargs: {enable_thinking: false}  # your answers come without reasoning")
    lines += ["    - " + keys[0], *("      " + key for key in keys[1:])]
    if settings.held_out:
        rows = counted(round(settings.held_out * counts.rows), "row")
        lines += [f"  eval: {{fraction: {settings.held_out:g}}}  # about {rows}: never trained on, used to measure"]
    longest = f"about {counts.longest:,}" if counts.longest else f"{counts.longest_bytes:,} bytes"
    lines += [
        f"  max_length: {settings.max_length}  # tokens; your longest row has {longest}",
        f"  truncation: {settings.truncation}  # {TRUNCATION_WORDS[settings.truncation]}",
        "training:",
    ]
    if settings.objective == "supervised":
        lines += [f"  global_batch_size: {settings.global_batch_size}  # rows in a step; short texts share a row"]
    else:
        why = {"dpo": "prefers the chosen answer to the rejected one", "kto": "wants answers whose label is true"}
        lines += [f"  objective: {settings.objective}  # {why[settings.objective]}"]
        lines += [f"  global_batch_size: {settings.global_batch_size}  # {noun} in a step"]
    if choice.gpus is not None:
        lines += ["  per_device_batch_size: auto  # as many rows at a time as fit"]
    epochs = counted(settings.epochs, "epoch")
    if settings.max_steps:
        lines += [
            f"  max_steps: {settings.max_steps}  # about five minutes on two cores; without it: {epochs}",
            f"  num_train_epochs: {settings.epochs}",
        ]
    else:
        lines += [f"  num_train_epochs: {settings.epochs}  # times that every row is seen"]
    rate = f"{settings.learning_rate:g}"
    if "." not in rate:  # YAML 1.1 reads 1e-05 as a text, and 1.0e-05 as a number
        rate = f"{settings.learning_rate:.1e}"
    lines += [f"  learning_rate: {rate}"]
    if settings.held_out and settings.epochs > 1:
        lines += ["  load_best_model_at_end: true  # the weights that did best on held-out rows"]
    if settings.objective != "supervised":
        lines += [f"{settings.objective}: {{beta: 0.1}}  # smaller: the model may move further from its start"]
    if counts.options and settings.objective == "supervised":
        options = ", ".join(map(in_quotes_of_yaml, counts.options))
        lines += [f"eval: {{options: [{options}]}}  # your answers; finetune eval scores each by its probability"]
    assert len(lines) <= MOST_LINES, f"{len(lines)} lines"
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A YAML scalar: plain if that is safe, else in quotes."""
    is_plain = text and text[0].isalpha() and all(letter.isalnum() or letter in "/._-" for letter in text)
    if is_plain and text.lower() not in ("true", "false", "null", "yes", "no", "on", "off"):
        return text
    return in_quotes_of_yaml(text)
