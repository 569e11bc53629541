"""YAML to recipe: strict, all mistakes at once, file:line:column, did-you-mean, overrides."""

from __future__ import annotations

import difflib
import math
import os
import pathlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from finetune.errors import Mistake, RecipeError
from finetune.output_stream import printable
from finetune.paths import RECIPES, SHIPPED, open_regular
from finetune.recipe.adapter_config import folder_mistakes
from finetune.recipe.mixed_precision import KEYS
from finetune.recipe.resolved import LoadedRecipe, leaves
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import CONFIG_FOLDER, read_strategy
from finetune.recipe.strategy_fit import unfit
from finetune.recipe.yaml_text import MAX_BYTES, Parsed, Path, Place, dotted, excerpt, parse, shown
from finetune.redaction import cover_secrets, hide_secrets, known_secrets
from finetune.wording import as_word

COMMAND_LINE = "command line"
MAX_MISTAKES = 50  # shown at once
DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".xlsx", ".gz")


@dataclass
class _Source:
    """A recipe's text and overrides, the places to point at, and the mistakes found."""

    path: pathlib.Path
    text: str
    parsed: Parsed
    overridden: set[Path] = field(default_factory=set)
    set_keys: set[Path] = field(default_factory=set)  # all keys in the overrides' values
    unexplained: int = 0  # mistakes beyond the first 2 * MAX_MISTAKES
    mistakes: list[tuple[Place | None, Mistake]] = field(default_factory=list)  # an override's mistake has no place

    def report(self, mistake: Mistake, place: Place | None = None) -> None:
        """Add a mistake. Without a place: at its key, at the nearest section in the file, or in the command line."""
        path = mistake.path
        if place is None and any(path[: len(over)] == over or over[: len(path)] == path for over in self.overridden):
            if mistake.code == "string_type" and mistake.write:  # a shell takes one pair of quotes away
                mistake = replace(mistake, text=f"{mistake.text}; in a shell: '{mistake.key}=\"...\"'")
            self.mistakes.append((None, mistake))
        else:
            self.mistakes.append((place or self._place(path, at_key=mistake.at_key), mistake))

    def report_override(self, key: str, text: str) -> None:
        """Add a mistake in the command line."""
        self.mistakes.append((None, Mistake("override", (key,), text)))

    def error(self) -> RecipeError:
        """All mistakes, in the file's order, then the command line's. Secrets in them are hidden."""
        known = known_secrets()
        covered_text = cover_secrets(self.text, known)
        ordered = sorted(self.mistakes, key=lambda m: (m[0].line, m[0].column) if m[0] else (math.inf, 0))
        messages = []
        for place, mistake in ordered[:MAX_MISTAKES]:
            where = f"{self.path}:{place.line}:{place.column}" if place else COMMAND_LINE
            key = f"{printable(mistake.key)}: " if mistake.key else ""
            lines = [hide_secrets(f"{where}: {key}{mistake.text}", known)]
            if place is not None:
                lines += excerpt(covered_text, place)
            messages.append("\n".join(lines))
        more = len(ordered) - MAX_MISTAKES + self.unexplained
        if more > 0:
            messages.append(f"{self.path}: and {more} more mistakes")
        return RecipeError(messages, [mistake for _, mistake in ordered], count=len(ordered) + self.unexplained)

    def _place(self, path: Path, *, at_key: bool) -> Place:
        """Where the key or its value stands; if the file has neither, the nearest section's key."""
        keys, values = self.parsed.keys, self.parsed.values
        order = (keys, values) if at_key else (values, keys)
        for depth in range(len(path), 0, -1):
            for places in order:
                if path[:depth] in places:
                    return places[path[:depth]]
            order = (keys, values)
        return Place(1, 1)


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, here: bool = False) -> LoadedRecipe:
    """Read a recipe, its overrides and its defaults.

    Raises RecipeError with every mistake: `file:line:column: key: problem; remedy`, its source line and a caret; for
    overrides `command line: key: ...`.

    Args:
        path: A file, or a packaged recipe's name. A packaged recipe's files come from the package too.
        overrides: `dotted.key=value`; they win over the file.
        here: The recipe will be trained on this machine as it is. So its folders must exist here, and its strategy
            must be able to train it.
    """
    source = _Source(file := find_recipe(path), text := _read(file), parse(text))
    for flaw in source.parsed.flaws:
        source.report(Mistake("yaml", (flaw.key,) if flaw.key else (), flaw.problem), flaw.place)
    value = source.parsed.value if isinstance(source.parsed.value, dict) else {}
    # Another tool's file would have a mistake in every line; one message names the command that converts it.
    sections = (value.get("model"), value.get("data"))
    if not (value.keys() <= Recipe.model_fields.keys() and all(isinstance(section, dict) for section in sections)):
        from finetune.recipe.foreign_keys import refuse_configuration_of_a_tool

        refuse_configuration_of_a_tool(file, value)
    for override in overrides:
        _override(source, value, override)
    if not isinstance(source.parsed.value, dict):
        if not source.parsed.flaws:
            kind = "is empty" if source.parsed.value is None else f"is {shown(source.parsed.value)}"
            problem = f"a recipe is a page of key: value, this one {kind}; begin with model: and data:"
            source.report(Mistake("yaml", (), problem), source.parsed.values.get((), Place(1, 1)))
        raise source.error()
    # Rows that a packaged recipe names lie in the package, wherever the user is.
    if "data" in value and file.resolve().parent == RECIPES.resolve():
        value["data"] = _with_shipped_files(value["data"], ("data",), source.overridden)
    recipe = _validate(source, value)
    if recipe is not None and here:
        for key, problem in folder_mistakes(recipe):
            source.report(Mistake("folder", key, problem))
        if recipe.run.stop_after is not None:
            from finetune.recipe.stop_time import date_problem

            if (found := date_problem(recipe.run.stop_after)) is not None:
                problem = f"{shown(recipe.run.stop_after)} {found[0]}; {found[1]}"
                source.report(Mistake("stop_after", ("run", "stop_after"), problem))
        with suppress(RecipeError):  # a wrong strategy file is reported when it is used
            for misfit in unfit(recipe, read_strategy(recipe.accelerate_config, strict=False)):
                path_to_key = tuple(misfit.key.split("."))
                source.report(Mistake("unfit", path_to_key, f"{misfit.problem}; {misfit.remedy}"))
    if recipe is None or source.mistakes:
        raise source.error()
    if not recipe.output_dir:
        recipe = recipe.model_copy(update={"output_dir": f"runs/{file.stem}"})
    # `recipe` has no `auto` any more, so look at the file's text for the number formats that it leaves to the device.
    auto_formats = []
    for format_key in KEYS:
        section, name = format_key.split(".")
        if value.get(section, {}).get(name, "auto") == "auto":
            auto_formats.append(format_key)
    origins = {}
    for leaf, _ in leaves(recipe.model_dump(mode="json")):
        origin = "default"
        if any(leaf[: len(over)] == over for over in source.overridden):
            if leaf in source.set_keys:
                origin = COMMAND_LINE
        elif leaf in source.parsed.values:
            origin = "recipe"
        origins[dotted(leaf)] = origin
    return LoadedRecipe(recipe, origins, file, tuple(auto_formats))


def find_recipe(path: str | os.PathLike[str]) -> pathlib.Path:
    """The file at that path. A bare name that is no file selects the package's recipe with that name."""
    file = pathlib.Path(os.path.expanduser(path))
    shipped = RECIPES / f"{file.name}.yaml"
    is_name = file.parts == (file.name,) and len(file.name) < 200  # no file has a longer name
    is_file = os.path.exists(file) and not os.path.isdir(file)
    if is_name and not is_file and shipped.is_file():
        return shipped
    return file


def _with_shipped_files(value: Any, key: Path, overridden: set[Path]) -> Any:
    """A packaged recipe's section, with absolute paths to the package's files.

    Overridden values stay as the user typed them. In a checkout's own folder, paths stay as the recipe writes them.
    """
    if any(key[: len(over)] == over for over in overridden):
        return value
    if isinstance(value, dict):
        return {name: _with_shipped_files(inner, (*key, name), overridden) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_shipped_files(inner, (*key, index), overridden) for index, inner in enumerate(value)]
    if not isinstance(value, str) or os.path.isabs(value):
        return value
    shipped = os.path.join(SHIPPED, value)
    if not os.path.isfile(shipped) or (os.path.exists(value) and os.path.samefile(value, shipped)):
        return value
    return shipped


def _read(file: pathlib.Path) -> str:
    try:
        if file.is_dir():
            names = ", ".join(path.name for path in _recipes_in(file)[:5])
            raise RecipeError([f"{file}: is a folder; name a recipe in it" + (f": {names}" if names else "")])
        if file.suffix.lower() in DATA_SUFFIXES and file.is_file():
            raise RecipeError([_is_data(file)])
        with open_regular(file) as stream:
            content = stream.read(MAX_BYTES + 1)
        if file.suffix.lower() == ".json" and content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            raise RecipeError([_is_data(file)])
        if len(content) > MAX_BYTES:
            raise RecipeError([f"{file}: is larger than 1 MiB; a recipe is a page, data are named by data.train"])
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        recipes: dict[str, object] = {path.stem: path.stem for path in _recipes_in(RECIPES)}
        recipes |= {path.stem: path for folder in ("recipes", file.parent) for path in _recipes_in(folder)}
        hint = "name a recipe file"
        if close := difflib.get_close_matches(file.stem, recipes, 1, 0.5):
            hint = f"did you mean {recipes[close[0]]}?"
        raise RecipeError([f"{file}: no such recipe; {hint}"]) from None
    except UnicodeDecodeError as error:
        raise RecipeError([f"{file}: is not UTF-8 at byte {error.start}; save it as UTF-8"]) from None
    except OSError as error:
        raise RecipeError([f"{file}: cannot be read ({error.strerror}); name a readable recipe"]) from None
    except ValueError:  # a null character
        raise RecipeError([f"{printable(str(file))}: is not a file name; name a recipe file"]) from None


def _is_data(file: pathlib.Path) -> str:
    return f"{file}: is data, not a recipe; run finetune init {as_word(file)}, which writes a recipe for it"


def _recipes_in(folder: str | pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for suffix in ("yaml", "yml") for path in pathlib.Path(folder).glob(f"*.{suffix}"))


def _override(source: _Source, value: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    # Five digits: more rows than a recipe holds, and int() refuses thousands.
    path: Path = tuple(int(p) if p.isascii() and p.isdigit() and len(p) < 6 else p for p in name.strip().split("."))
    if not equals or "" in path:
        source.report_override(override, "is not an override; write key=value, for example training.seed=1")
        return
    parsed = parse(text)
    problem = parsed.flaws[0].problem if parsed.flaws else _put(value, path, parsed.value)
    if problem:
        source.report_override(dotted(path), problem)
        return
    # A later override of a section replaces the keys that earlier ones set in it.
    other_keys = {key for key in source.set_keys if key[: len(path)] != path}
    source.set_keys = other_keys | {(*path, *inner) for inner in parsed.values}
    source.overridden.add(path)


def _put(value: dict[str, Any], path: Path, new: Any) -> str | None:
    """Set the value at a path and create the sections above it. Returns the problem if that is not possible."""
    current: Any = value
    for index, part in enumerate(path):
        last = index == len(path) - 1
        if isinstance(current, list):  # data.train.0.path
            if not isinstance(part, int) or part >= len(current):
                return f"{dotted(path[:index])} is a list of {len(current)}; name one by number, from 0"
        elif not isinstance(current, dict):
            return f"{dotted(path[:index])} is {shown(current)}, not a section; give the section first"
        elif not last and current.get(str(part)) is None:
            current[str(part)] = {}
        key: Any = part if isinstance(current, list) else str(part)
        if last:
            current[key] = new
        current = current[key]
    return None


def _validate(source: _Source, value: dict[str, Any]) -> Recipe | None:
    """The typed recipe, or None; `source` gets the mistakes."""
    recipe, mistakes = None, []
    try:
        recipe = Recipe.model_validate(value)
    except ValidationError as error:
        from finetune.recipe.mistakes import explain_mistake

        errors = error.errors(include_url=False, include_input=False)
        mistakes = explain_mistake(errors[: 2 * MAX_MISTAKES], value)
        source.unexplained = len(errors[2 * MAX_MISTAKES :])
    name = value.get("accelerate_config", "single")
    files: list[str] = []  # the strategy's possible files; one must exist
    if isinstance(name, str) and name:
        files = [str(CONFIG_FOLDER / f"{name}.yaml"), os.path.expanduser(name)]
    # os.path, because pathlib raises on a name that is too long for any file.
    if files and not any(map(os.path.isfile, files)):
        names = sorted(path.stem for path in CONFIG_FOLDER.glob("*.yaml"))
        near = difflib.get_close_matches(name, names, 1, 0.5)
        hint = "".join(f"did you mean {each}? " for each in near)
        text = f"is {shown(name)}; {hint}choose one of {', '.join(names)}, or a path"
        mistakes.append(Mistake("literal_error", ("accelerate_config",), text, write=(*near,)))
    # A value that YAML cannot read has one mistake: pydantic's message about it would mislead.
    unreadable = [flaw.unreadable for flaw in source.parsed.flaws if flaw.unreadable is not None]
    for mistake in mistakes:
        if not any(mistake.path[: len(path)] == path for path in unreadable):
            source.report(mistake)
    return recipe


def recipe_from_resolved(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read a run folder's recipe.yaml."""
    return load_recipe(path, overrides).recipe
