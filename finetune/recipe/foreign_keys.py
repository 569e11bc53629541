"""Other tools' names for a recipe's settings: axolotl, LLaMA-Factory, TRL, transformers' Trainer, torchtune, unsloth.

A foreign key gets an error with our key. If it has no counterpart, the answer says what to use instead.

A table's name is the tool whose configurations have the key (transformers: its TrainingArguments, which other tools
take over; several: more than one tool; older: former versions only). `*` matches letters, digits and underscores. `.*`
at the end matches a section and everything below. The order of lines means nothing: if several lines match, the one
with the most characters besides its stars decides.
"""

from __future__ import annotations

import csv
import pathlib
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from finetune.errors import RecipeError
from finetune.paths import PACKAGE
from finetune.recipe.optimizers import OPTIMIZER_NAMES
from finetune.recipe.yaml_text import shown

# Tools whose whole configurations `finetune import` converts. Single keys of more tools are known below.
Tool = Literal["axolotl", "llamafactory", "trl"]
TOOL_TITLES: dict[Tool, str] = {"axolotl": "axolotl", "llamafactory": "LLaMA-Factory", "trl": "TRL"}
KEY_TABLES = PACKAGE / "recipe" / "other_tools"


class ForeignKey(NamedTuple):
    """A line of a table in other_tools/.

    `kind` says what `text` is: `ours` the key of ours to write, `instead` the answer where we have none, `refused` the
    training that the key asks for. `differs`, `look` and `same` are reasons why an import leaves the key out.
    """

    tool: str  # the table's name; `several` tools, or `older` versions
    key: str
    kind: str
    text: str


@cache
def foreign_keys() -> tuple[ForeignKey, ...]:
    """All lines of all tables. They are read when a key is not one of ours, or for an import."""
    lines = []
    for file in sorted(KEY_TABLES.glob("*.csv")):
        with file.open(encoding="utf-8", newline="") as page:
            _, *rows = csv.reader(page)
        lines += [ForeignKey(file.stem, *row) for row in rows]
    return tuple(lines)


def covers_key(known: ForeignKey, key: str) -> bool:
    """Whether a dotted key is this one, or one that its stars cover."""
    if "*" not in known.key:
        return known.key == key
    pattern = re.escape(known.key.removesuffix(".*")).replace(r"\*", r"\w*")
    if known.key.endswith(".*"):
        pattern += r"(\..*)?"
    return re.fullmatch(pattern, key) is not None


@cache
def known_keys() -> tuple[ForeignKey, ...]:
    """The keys that an import leaves out, the most specific ones first."""
    lines = [line for line in foreign_keys() if line.kind not in ("ours", "instead", "refused")]
    return tuple(sorted(lines, key=lambda known: -len(known.key.replace("*", ""))))


def line_of(key: str) -> ForeignKey | None:
    """The line that says why an import leaves this key out."""
    return next((known for known in known_keys() if covers_key(known, key)), None)


@cache
def answers(kind: str, tool: str | None = None) -> dict[str, str]:
    """Key -> text of one kind, of one tool or of all."""
    return {line.key: line.text for line in foreign_keys() if line.kind == kind and tool in (None, line.tool)}


def answer_for(key: str) -> str | None:
    """The text to write instead of another tool's key, or None if no tool has it."""
    if ours := answers("ours").get(key):
        return f"write {ours}"
    return answers("instead").get(key)


def key_for(key: str) -> str:
    """Our dotted key for another tool's key; empty without a counterpart."""
    return answers("ours").get(key, "").partition(" ")[0].removesuffix(":")


def owner_of(key: str) -> str:
    """Whose key it is, for a message."""
    is_trainers = key in {**answers("ours", "transformers"), **answers("instead", "transformers")}
    is_trainers |= (line := line_of(key)) is not None and line.tool == "transformers"
    return "Hugging Face's own name" if is_trainers else "another tool's key"


# Other words for our values. A word means the first of ours that the key takes.
OTHER_WORDS: dict[str, tuple[str, ...]] = {
    "false": ("no", "never"), "off": ("no", "never"), "none": ("no", "never"), "true": ("auto", "bf16"),
    "always": ("auto",), "half": ("float16", "fp16"), "fp16": ("float16",), "float16": ("fp16",),
    "bf16": ("bfloat16",), "bfloat16": ("bf16",), "fp32": ("float32", "no"), "float32": ("no",), "fp8": ("bf16",),
    "int8": ("uint8",), "flash": ("auto",), "flash_attn": ("auto",),
    "flash_attention_3": ("auto",), "flash_attention_4": ("auto",),  # where it is installed
    "xformers": ("varlen",), "chatml": ("messages",), "openai": ("messages",), "chat_template": ("messages",),
    "conversations": ("sharegpt",), "completion": ("text",), "instruction": ("alpaca",), "left": ("right",),
    "wsd": ("warmup_stable_decay",), "last": ("completion",), "inputs": ("all",),
    **{word: (name,) for word, name in OPTIMIZER_NAMES.items()},
}  # fmt: skip


def other_word_for(word: str, choices: Sequence[str]) -> list[str]:
    """The choice that people mean by another tool's word, if there is one."""
    return [choice for choice in OTHER_WORDS.get(word, ()) if choice in choices][:1]


def tool_of(values: Mapping[str, Any]) -> Tool | None:
    """The tool that reads a configuration, by keys that no other tool has; None for any other page."""
    if any(isinstance(values.get(section), Mapping) for section in ("model", "data")):
        return None  # a recipe, perhaps with a few keys of another tool
    if "base_model" in values:
        return "axolotl"
    if {"finetuning_type", "cutoff_len", "template", "dataset_dir"} & set(values):
        return "llamafactory"
    if {"model_name_or_path", "per_device_train_batch_size"} & set(values):
        return "trl"  # or transformers' Trainer, whose TrainingArguments are TRL's too
    return None


_REWARDS, _LOSS = "training by rewards", "another preference loss"
# With one of these values a key asks for training that a recipe offers, or for nothing.
_NO_TRAINING = (None, False, "", "sft", "pt", "dpo", "ipo", "kto", "simpo")


def other_training(tool: Tool, values: Mapping[str, Any]) -> tuple[str, str] | None:
    """The key that asks for another kind of training, and that kind; None for one that a recipe offers."""
    stage, loss_types = values.get("stage"), values.get("loss_type")
    if not isinstance(loss_types, list):
        loss_types = [loss_types]
    names = {name for name in loss_types if isinstance(name, str)} if tool == "trl" else set()
    # Trainers on preferences limit an answer's length by this key, too.
    is_preferences = names - _REWARD_LOSSES or _OF_PREFERENCES & {*values}
    for key, training in answers("refused", tool).items():
        if key == "max_completion_length" and is_preferences:
            continue
        if values.get(key) not in (*_NO_TRAINING, [], {}):
            return key, training
    if tool == "llamafactory" and stage not in _NO_TRAINING:
        return "stage", {"rm": "a reward model's training", "ppo": _REWARDS}.get(
            str(stage), "its own kind of preference training"
        )
    if tool == "llamafactory" and stage == "dpo" and values.get("pref_loss") in ("hinge", "orpo"):
        return "pref_loss", _LOSS
    for known, training in ((_REWARD_LOSSES, _REWARDS), (_OTHER_LOSSES, _LOSS)):
        if names & known:
            return "loss_type", training
    return None


# TRL's keys that trainers on preferences have, and none by rewards.
_OF_PREFERENCES = frozenset(
    "max_length label_smoothing truncation_mode precompute_ref_log_probs generate_during_eval loss_weights rpo_alpha "
    "f_divergence_type ld_alpha use_weighting desirable_weight undesirable_weight cpo_alpha gamma_beta_ratio".split()
)
# TRL's names for losses that are not offered.
_REWARD_LOSSES = frozenset("grpo dr_grpo dapo bnpo cispo sapo luspo vespo".split())
_OTHER_LOSSES = frozenset(
    "hinge exo_pair nca_pair bco_pair sppo_hard aot aot_pair aot_unpaired discopop apo_down sigmoid_norm "
    "apo_zero_unpaired alphapo".split()
)


# Files for a merge or for inference have none of these.
_OF_TRAINING = frozenset(
    "datasets dataset dataset_name dataset_mixer dataset_mixture train_file pretraining_dataset do_train max_steps "
    "learning_rate num_epochs num_train_epochs micro_batch_size per_device_train_batch_size".split()
)


def refuse_other_training(file: pathlib.Path, tool: Tool, values: Mapping[str, Any]) -> None:
    """Raise RecipeError if a configuration asks for a kind of training that no recipe offers."""
    if not _OF_TRAINING & {key for key, value in values.items() if value}:
        reason = "it names no data set and no setting of a training; import the file of the training"
        raise RecipeError([f"{file}: is no training's configuration: {reason}"])
    found = other_training(tool, values)
    if found is None:
        return
    key, training = found
    problem = "this kit trains on answers and on preferences (dpo, kto), and this file asks for"
    remedy = f"keep {TOOL_TITLES[tool]} for it, or choose a recipe by: finetune list"
    raise RecipeError([f"{file}: {key}: is {shown(values[key])}; {problem} {training}: {remedy}"])


def refuse_torchtune(file: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Raise RecipeError for a configuration of torchtune, which names a Python class as `_component_` of a section."""
    if any(isinstance(value, Mapping) and "_component_" in value for value in values.values()):
        remedy = "import it with that release, or write a recipe for its rows: finetune init ROWS"
        raise RecipeError(
            [f"{file}: is a configuration of torchtune, which 0.1.0 was the last release to read; {remedy}"]
        )


def refuse_configuration_of_a_tool(file: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Raise RecipeError for another tool's configuration, with the command that converts it."""
    refuse_torchtune(file, values)
    tool = tool_of(values)
    if tool is None:
        return
    refuse_other_training(file, tool, values)
    name, first = TOOL_TITLES[tool], ""
    if tool == "trl":
        name = "TRL or transformers' Trainer"
        if "model_name_or_path" not in values:  # TrainingArguments without the arguments of their script
            first = "add model_name_or_path and dataset_name, then "
    command = shlex.join(["finetune", "import", str(file), "-o", str(file.with_name(f"{file.stem}_recipe.yaml"))])
    remedy = "convert it, with --gpus 4x24GB or the like where it was written for more than one GPU"
    raise RecipeError([f"{file}: is a configuration of {name}, not a recipe; {first}{remedy}: {command}"])
