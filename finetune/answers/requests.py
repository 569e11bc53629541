"""The requests of `finetune eval` and `finetune sample`, and sample's source (RUN, RECIPE or MODEL). No torch here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finetune.answers.kept_rows import KeepOptions
from finetune.base.location import published_name, refuse_unreachable
from finetune.errors import FinetuneError
from finetune.files import check_output
from finetune.output_stream import one_line
from finetune.recipe.loader import find_recipe, load_recipe, recipe_from_resolved
from finetune.recipe.metric_names import read_metric
from finetune.recipe.mixed_precision import KEYS
from finetune.recipe.names import is_repository
from finetune.recipe.resolved import LoadedRecipe
from finetune.recipe.schema import DataSet, Recipe
from finetune.recipe.sections.model import PREFIX
from finetune.scoring.metrics import Metric

if TYPE_CHECKING:
    from finetune.answers.endpoint import Endpoint

MOST_ANSWERS = 1024  # to one prompt


@dataclass(frozen=True)
class EvalRequest:
    """The command line of `finetune eval`."""

    metrics: Sequence[Metric] = ()  # empty: the recipe's, or those that fit the references
    file: Path | None = None  # answered instead of the held-out rows
    limit: int | None = None  # rows to answer, and questions of each task
    max_new_tokens: int | None = None  # None: as the references need
    general: bool = False  # the general set too
    generate: bool = True  # False: the loss alone
    fail_under: Mapping[str, float] = field(default_factory=dict)  # metric -> the least mean score of the tuned model
    tasks: Sequence[str] = ()  # lm-eval's names; * matches any letters
    include: Path | None = None  # a folder with the user's own task files
    chat_template: bool | None = None  # for all tasks, or for none; None: for those that generate
    endpoint: Endpoint | None = None  # a server that answers; no model is loaded
    scorer: str | None = None  # FILE.py:FUNCTION, a metric more
    scorer_seconds: float = 10.0  # of one answer
    entry: DataSet | None = None  # how `file` is read; None: as the run's rows


def chosen_metrics(names: Sequence[str], scorer: str | None = None) -> list[Metric]:
    """The metrics of the command line; `scorer`, FILE.py:FUNCTION, has another name. Raises FinetuneError."""
    metrics = []
    for text in names:
        try:
            metrics.append(Metric.of(read_metric(text)))
        except ValueError as error:
            raise FinetuneError(f"--metric {text}: {error}") from None
    taken = [metric.name for metric in metrics] + ([] if scorer is None else [scorer.rpartition(":")[2]])
    if repeated := [name for name in taken if taken.count(name) > 1]:
        raise FinetuneError(f"--metric: {repeated[0]} is named twice; keep one of them")
    return metrics


def thresholds(texts: Sequence[str]) -> dict[str, float]:
    """`exact=0.8` as a metric and the least mean of the tuned model. Raises FinetuneError."""
    least_scores = {}
    for text in texts:
        name, equals, value = text.partition("=")
        least_scores[name] = -1.0
        with suppress(ValueError):
            least_scores[name] = float(value)
        if not equals or not 0 <= least_scores[name] <= 1:
            raise FinetuneError(f"--fail-under {text}: write a metric and a number from 0 to 1, as exact=0.8")
    return least_scores


@dataclass(frozen=True)
class SampleSource:
    """The source of rows, template and held-out rows. Its model answers unless another model is named."""

    kind: Literal["run", "recipe", "model"]
    text: str  # as typed
    loaded: LoadedRecipe
    folder: Path  # the run's; else it need not exist

    @property
    def name(self) -> str:
        """For a folder's name and for the rows: quickstart, SmolLM2-135M."""
        names = {"run": self.folder.resolve().name, "recipe": self.loaded.path.stem}
        return names.get(self.kind, Path(self.text.rpartition(":")[2]).name)

    @property
    def author(self) -> str:
        """Who wrote the answers, without a folder of this machine."""
        base = published_name(self.loaded.recipe.model.name_or_path)
        if Path(base).is_dir():
            base = Path(base).resolve().name
        return f"{self.name}, trained from {base}" if self.kind == "run" else base


def source_of(text: str, data: Path) -> SampleSource:
    """RUN: a folder with recipe.yaml. RECIPE: a file, or a name of `finetune list`. MODEL: a folder or a Hub name.

    Raises FinetuneError.
    """
    folder = Path(os.path.expanduser(text))
    is_folder = False
    with suppress(OSError, ValueError):  # a name that no file can have
        is_folder = folder.is_dir()
    if is_folder and (folder / "recipe.yaml").is_file():
        return SampleSource("run", text, LoadedRecipe(recipe_from_resolved(folder / "recipe.yaml"), {}, folder), folder)
    is_model = text.startswith(PREFIX) or (is_folder and (folder / "config.json").is_file())
    if not is_model and (folder.suffix.lower() in (".yaml", ".yml") or folder.is_file() or find_recipe(text) != folder):
        loaded = load_recipe(text, here=True)
        model = loaded.recipe.model
        if model.adapter is not None:
            raise FinetuneError(
                f"{text}: model.adapter: starts from an adapter; name the run that trained it, or write null"
            )
        refuse_unreachable(model.name_or_path, model.revision)
        return SampleSource("recipe", text, loaded, Path(loaded.recipe.run_dir))
    if not is_model and (is_folder or not is_repository(text) or folder.parent.is_dir()):
        raise FinetuneError(
            f"{one_line(text, 100)}: is no run, recipe or model here; name a run's folder, a recipe's file, or a model "
            "as owner/name"
        )
    refuse_unreachable(text, "main")
    recipe = Recipe.model_validate({"model": {"name_or_path": text}, "data": {"train": [{"path": str(data)}]}})
    return SampleSource("model", text, LoadedRecipe(recipe, {}, data, KEYS), folder)


@dataclass(frozen=True)
class SampleRequest:
    """The options of `finetune sample`."""

    data: Path
    entry: DataSet | None  # how `data` is read; None: as the source's rows
    folder: Path  # for all files
    options: KeepOptions
    count: int  # answers to each prompt
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int | None = None
    limit: int | None = None
    metrics: Sequence[Metric] = ()  # one; empty: the strictest that fits the references
    scorer: str | None = None
    scorer_seconds: float = 10.0
    endpoint: Endpoint | None = None  # a server that answers; no model is loaded

    def check(self) -> None:
        """Raises FinetuneError for options that do not fit together."""
        options = self.options
        mistakes = {
            f"--n {self.count}: is more than {MOST_ANSWERS:,} answers; name fewer": self.count > MOST_ANSWERS,
            "--temperature 0: every answer would be the same; write --n 1, or a temperature above 0": (
                self.temperature == 0 and self.count > 1
            ),
            f"--temperature {self.temperature:g}: is no number above 0; write 1.0": (
                not 0 <= self.temperature < math.inf
            ),
            f"--top-p {self.top_p:g}: is a share above 0, up to 1; write 0.95": not 0 < self.top_p <= 1,
            f"--at-least {options.at_least:g}: is a score above 0, up to 1": not 0 < options.at_least <= 1,
            "--keep pairs: needs a right and a wrong answer to a prompt; write --n 8": (
                options.keep == "pairs" and self.count == 1
            ),
            "--metric, --scorer: one of them says what is right; keep one": (
                bool(self.metrics) and self.scorer is not None
            ),
        }
        if wrong := [message for message, is_wrong in mistakes.items() if is_wrong]:
            raise FinetuneError(wrong[0])
        check_output(self.folder, "--output", folder=True)
