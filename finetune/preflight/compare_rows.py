"""The rows of a comparison, from `--vary`, `--strategies` and `--seeds`.

Every row's recipe is read before the first job runs, so a wrong key or value of any row is reported then.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from pathlib import Path

from finetune.errors import FinetuneError, RecipeError
from finetune.output_stream import printable
from finetune.recipe.loader import COMMAND_LINE, MAX_MISTAKES, load_recipe
from finetune.recipe.schema import Recipe, Training
from finetune.recipe.strategy import strategy_of
from finetune.recipe.yaml_text import shorten
from finetune.redaction import hide_secrets, known_secrets

STRATEGY, STRATEGY_KEY = "strategy", "accelerate_config"
SEED_KEY = "training.seed"
PLACE_KEY = "output_dir"  # beside it is the comparison's folder, where -o names none
# Keys that a comparison sets for every job, and what to write instead.
OWN_KEYS = {
    PLACE_KEY: "name the folder by -o",
    "training.max_steps": "name the steps by --steps",
    "training.num_train_epochs": "name the steps by --steps",
    **dict.fromkeys(
        (
            *("save_steps", "eval_steps", "logging_steps", "measure_phases", "training.resume", "hub.push"),
            *("training.early_stopping_patience", "training.load_best_model_at_end"),
            *("samples", "samples.count", "samples.prompts"),
        ),
        "leave it out",
    ),
}
NAME_CHARACTERS = 60  # of a row's folder
MOST_ROWS = 200  # each is a training of its own
_OPENS, _CLOSES = "[{", "]}"


@dataclass(frozen=True)
class AskedRow:
    """A row as it was asked for: its name, and the settings by which it differs from the others."""

    name: str
    settings: tuple[tuple[str, str], ...]  # dotted key and value; the strategy's key is accelerate_config
    place: str  # where it was asked for, as messages name it


@dataclass(frozen=True)
class ComparedRow:
    """A row whose recipe was read and is right."""

    name: str
    folder: str  # of its job, below jobs/
    settings: tuple[tuple[str, str], ...]
    recipe: Recipe  # as its job reads it
    shortened: tuple[str, ...]  # overrides that fit the schedule into the comparison's steps

    @property
    def strategy(self) -> str:
        """The name of its file in accelerate_configs/, or a path."""
        return self.recipe.accelerate_config

    @property
    def overrides(self) -> tuple[str, ...]:
        """The row's settings as words of a command line. The schedule's settings come last."""
        return (*(f"{key}={value}" for key, value in self.settings), *self.shortened)

    @property
    def curve(self) -> str:
        """A text of everything that the loss curve depends on: rows with equal texts learn the same."""
        from finetune.run_folder.folder import curve_identity  # with torch

        return json.dumps(curve_identity(self.recipe), sort_keys=True)


def rows_of_options(vary: Sequence[str], strategies: str | None, seeds: int = 1) -> list[AskedRow]:
    """One row for each combination of values. Raises FinetuneError.

    Args:
        strategies: One more list of values, with commas between.
        seeds: Above 1, each combination is run with the seeds 1 to `seeds`.
    """
    options = [("--vary", word) for word in vary]
    if seeds > 1:
        options.append(("--seeds", f"{SEED_KEY}={','.join(map(str, range(1, seeds + 1)))}"))
    if strategies is not None:
        options.insert(0, ("--strategies", f"{STRATEGY}={strategies}"))
    axes: dict[str, list[str]] = {}
    for option, word in options:
        key, values = _axis(option, word)
        if key in axes:
            raise FinetuneError(f"{option}: {key}: is varied twice; name all its values once: {key}=A,B")
        axes[key] = values
    count = math.prod(map(len, axes.values()))
    if count > MOST_ROWS:
        raise FinetuneError(
            f"{options[-1][0]}: {count:,} rows: a comparison has {MOST_ROWS} at most, because each is a training of "
            "its own; name fewer values"
        )
    names = _short_names(axes)
    rows = []
    for chosen in product(*axes.values()):
        settings = tuple(zip(axes, chosen, strict=True))
        name = " ".join(_label(key, names[key], value) for key, value in settings)
        rows.append(AskedRow(name, settings, "--vary" if vary else "--strategies"))
    return rows


def _axis(option: str, word: str) -> tuple[str, list[str]]:
    """The key that varies, and its values, each once."""
    key, equals, text = word.partition("=")
    key = key.strip()
    if key == STRATEGY:
        key = STRATEGY_KEY
    if not equals or not key:
        raise FinetuneError(f"{option}: {word}: is not key=A,B; for example --vary training.mixed_precision=fp16,bf16")
    values = list(dict.fromkeys(value for value in split_values(text) if value))
    if not values:
        raise FinetuneError(f"{option}: {key}: has no value; for example --strategies ddp,fsdp2")
    _refuse_own(option, key)
    return key, values


def _refuse_own(place: str, key: str) -> None:
    if key in OWN_KEYS:
        raise FinetuneError(f"{place}: {key}: is the same in every row of a comparison; {OWN_KEYS[key]}")


def split_values(text: str) -> list[str]:
    """Values with commas between; a comma inside of brackets or quotes belongs to its value."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _OPENS + _CLOSES:
            depth += 1 if character in _OPENS else -1
        if character == "," and depth <= 0 and not quote:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def _short_names(keys: Sequence[str] | dict[str, list[str]]) -> dict[str, str]:
    """Each key's last part, or all of it where two keys end alike."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: end if last.count(end) == 1 else key for key, end in zip(keys, last, strict=True)}


def _label(key: str, name: str, value: str) -> str:
    """`name=value`; for a strategy the value alone, because it is a name."""
    if key == STRATEGY_KEY:
        return value
    return f"{name}={shorten(' '.join(value.split()), 40)}"


def check_compared(recipe: Path, overrides: Sequence[str], asked: Sequence[AskedRow], steps: int) -> list[ComparedRow]:
    """Read every row's recipe. Raises RecipeError with each mistake of the rows once, in one line."""
    origins = load_recipe(recipe, overrides).origins  # its own mistakes are the recipe's
    for key in OWN_KEYS:
        if key != PLACE_KEY and origins.get(key) == COMMAND_LINE:
            _refuse_own(COMMAND_LINE, key)
    rows: list[ComparedRow] = []
    mistakes: list[str] = []
    folders: list[str] = []
    for row in asked:
        words = [*overrides, *(f"{key}={value}" for key, value in row.settings)]
        try:
            shortened = _shortened(load_recipe(recipe, words).recipe.training, steps)
            read = load_recipe(recipe, [*words, *shortened]).recipe
            strategy_of(read)
        except RecipeError as error:
            mistakes += _of_row(error, row)
            continue
        folders.append(_folder(row, folders))
        rows.append(ComparedRow(row.name or read.accelerate_config, folders[-1], row.settings, read, shortened))
    if mistakes:
        raise RecipeError(list(dict.fromkeys(mistakes)))
    return rows


def _of_row(error: RecipeError, row: AskedRow) -> Iterator[str]:
    """The row's mistakes. A mistake in the row's settings names the row. One in the recipe names the settings too."""
    own, secrets = [key for key, _ in row.settings], known_secrets()
    for line, mistake in zip_longest(error.mistakes, error.found[:MAX_MISTAKES]):
        if mistake is not None and any(f"{mistake.key}.".startswith(f"{key}.") for key in own):
            yield hide_secrets(f"{row.place}: {printable(mistake.key)}: {mistake.text}", secrets)
        else:
            first = line.partition("\n")[0]  # without the recipe's line and a caret
            yield f"{row.place}: {first} (with {' '.join(f'{key}={value}' for key, value in row.settings)})"


def _folder(row: AskedRow, taken: Sequence[str]) -> str:
    """A folder name made from the row's name. A strategy's path is shortened to the file's name."""
    strategy, words = dict(row.settings).get(STRATEGY_KEY, ""), row.name
    if "/" in strategy:
        words = words.replace(strategy, Path(strategy).stem)
    name = re.sub(r"[^\w.-]+", "_", words.replace("=", "-")).strip("_.")[:NAME_CHARACTERS] or "recipe"
    number, unique = 2, name
    while unique in taken:
        number, unique = number + 1, f"{name}-{number}"
    return unique


def _shortened(training: Training, steps: int) -> tuple[str, ...]:
    """Limit the warmup to the comparison's steps. The stable phase takes the steps that warmup and decay leave."""
    settings = []
    if (training.warmup_steps or 0) > steps:
        settings.append(f"training.warmup_steps={steps}")
    if "num_stable_steps" in training.lr_scheduler_kwargs:
        arguments = {name: value for name, value in training.lr_scheduler_kwargs.items() if name != "num_stable_steps"}
        settings.append(f"training.lr_scheduler_kwargs={json.dumps(arguments)}")
    return tuple(settings)
