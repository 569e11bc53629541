"""Train and read runs from Python, in a notebook for example: `finetune.fit` and `finetune.load`.

    import finetune

    run = finetune.fit("mine.yaml", **{"training.max_steps": 50})
    run.metrics.plot(x="step", y="loss")
    print(run.chat("Was kostet der Bohrhammer am Tag?"))

`fit` runs the command `finetune train` in a process of its own. So the caller's signal handlers, threads and GPU memory
stay as they were, and a training from Python is the training of the command. No torch here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from finetune.errors import STOPPED, DoesNotFit, EnvironmentMismatch, FinetuneError, RankLost, RecipeError, Stopped
from finetune.launch.with_parent import with_parent
from finetune.output_stream import silenced
from finetune.paths import CHECKOUT
from finetune.recipe.loader import load_recipe
from finetune.recipe.resolved import leaves
from finetune.recipe.schema import Recipe
from finetune.recipe.yaml_text import dotted
from finetune.run_folder.facts import read_run, require_run_folder

if TYPE_CHECKING:
    import pandas

ENDINGS = {error.exit_code: error for error in (FinetuneError, DoesNotFit, EnvironmentMismatch, RankLost, Stopped)}


@dataclass(frozen=True)
class TrainedRun:
    """A run's folder: what it wrote, and its model to talk to."""

    folder: Path

    @property
    def adapter(self) -> Path | None:
        """The folder of the adapter; None if all weights were trained, or the run has not ended yet."""
        return folder if (folder := self.folder / "adapter").is_dir() else None

    @property
    def model(self) -> Path | None:
        """The folder of the whole model; None if an adapter was trained, or the run has not ended yet."""
        return folder if (folder := self.folder / "model").is_dir() else None

    @property
    def metrics(self) -> pandas.DataFrame:
        """A row for each line of metrics.jsonl. `kind` is train, eval or score; docs/evaluation.md names the rest."""
        import pandas

        return pandas.DataFrame(self._facts.metrics)

    @property
    def answers(self) -> pandas.DataFrame:
        """Answers to held-out questions that the run wrote: when, prompt, answer, and the reference if there is one."""
        import pandas

        return pandas.DataFrame(self._facts.samples)

    def chat(self, text: str, *, max_new_tokens: int = 256, temperature: float = 0.0) -> str:
        """The tuned model's answer, after what was said before. The first call loads the model.

        Raises FinetuneError if the run has not ended yet.
        """
        from finetune.answers.chat import GenerationSettings

        settings = GenerationSettings(max_new_tokens, temperature)
        return str(self._session.reply(self._session.tuned, text, settings))

    @cached_property
    def _session(self) -> Any:
        from finetune.answers.chat import open_run

        with silenced():
            return open_run(self.folder)

    @property
    def _facts(self) -> Any:
        return read_run(self.folder, load_recipe(require_run_folder(self.folder)).recipe)


def fit(recipe: str | os.PathLike[str] | Mapping[str, Any] | Recipe, **overrides: Any) -> TrainedRun:
    """Train a recipe on this machine, as `finetune train` does. Progress is printed. An interrupt saves the run.

    Args:
        recipe: A file, the name of a recipe in `finetune list`, the content of such a file, or a `Recipe`.
        overrides: Keys and sections that win over the recipe: `training={"max_steps": 50}`, or
            `**{"training.max_steps": 50}`. A list replaces the recipe's list.

    Raises FinetuneError with the words that the command prints: RecipeError, DoesNotFit, EnvironmentMismatch, or
    Stopped after an interrupt, when the same call continues the run.
    """
    chosen = leaves(json.loads(_as_json(overrides)), lists="none") if overrides else ()  # a list replaces the recipe's
    words = [f"{dotted(path)}={json.dumps(value)}" for path, value in chosen]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "fit.yaml")
        if isinstance(recipe, Recipe):
            recipe = recipe.model_dump(mode="json", exclude_defaults=True)
        if isinstance(recipe, Mapping):
            content = json.loads(_as_json(recipe))
            file.write_text(yaml.safe_dump(content, allow_unicode=True, sort_keys=False), "utf-8")
        else:
            file = Path(recipe)
        loaded = load_recipe(file, words, here=True)
        _run_command("train", str(file), *words)
    return TrainedRun(Path(loaded.recipe.run_dir))


def load(run: str | os.PathLike[str]) -> TrainedRun:
    """A run by its folder, which a recipe calls output_dir. Raises FinetuneError for another folder."""
    require_run_folder(folder := Path(os.path.expanduser(run)))
    return TrainedRun(folder)


def _as_json(content: Mapping[str, Any]) -> str:
    """Values as a recipe's file has them: paths and dates as text, numpy's numbers as numbers.

    Raises RecipeError for others, with their keys.
    """
    mistakes: list[str] = []

    def plain(value: Any, path: tuple[str | int, ...]) -> Any:
        if hasattr(value, "tolist"):  # a number or an array of numpy or torch
            value = value.tolist()
        if isinstance(value, Mapping):
            return {str(key): plain(inner, (*path, str(key))) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [plain(inner, (*path, index)) for index, inner in enumerate(value)]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, date):
            return value.isoformat()
        if value is not None and not isinstance(value, str | int | float):
            mistakes.append(f"{dotted(path)}: is of Python's type {type(value).__name__}; give a text or a number")
        return value

    content = plain(content, ())
    if mistakes:
        raise RecipeError(mistakes)
    return json.dumps(content)


def _run_command(*words: str) -> None:
    """Run `finetune` with these words and print what it prints. Raises FinetuneError with what it says of its failure.

    The child leads a group of its own: an interrupt reaches it once, from here, also where no terminal sends it. When
    this process is killed, as a notebook's kernel may be, the run saves and gives its GPU memory back.
    """
    program = f"import sys; sys.path.append({str(CHECKOUT)!r}); from finetune.cli.main import main; sys.exit(main())"
    command = with_parent([sys.executable, "-P", "-c", program, *words])
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as child,
    ):
        assert child.stdout is not None
        while True:
            try:
                for line in child.stdout:
                    print(line, end="", flush=True)
                break
            except KeyboardInterrupt:  # the run saves; a second one ends it at once, as in a terminal
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGINT)
        child.wait()
        errors.seek(0)
        said = errors.read().strip()
    if child.returncode:
        raise ENDINGS.get(child.returncode, FinetuneError)(said or STOPPED)
    if said:
        print(said, file=sys.stderr)
