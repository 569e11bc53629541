"""YAML to recipe: strict, all mistakes at once, file:line:column, did-you-mean, overrides."""

from __future__ import annotations

import difflib
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import ValidationError

from finetune.errors import RecipeError
from finetune.recipe import Recipe
from finetune.recipe_mistakes import Mistake, explain, shown
from finetune.yaml_text import MAX_BYTES, Parsed, Path, Place, dotted, excerpt, parse

CONFIG_FOLDER = pathlib.Path(__file__).resolve().parent.parent / "accelerate_configs"
COMMAND_LINE = "command line"
# Accepted spellings of our keys.
ALIASES: dict[Path, Path] = {("training", "gradient_checkpointing"): ("training", "activation_checkpointing")}


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that is right, and where its values came from."""

    recipe: Recipe
    origins: dict[str, str]  # dotted key -> default | recipe | command line
    path: pathlib.Path


@dataclass
class _Source:
    """A recipe's text with the overrides put in, and the places to point at."""

    path: pathlib.Path
    text: str
    parsed: Parsed
    overridden: set[Path] = field(default_factory=set)
    mistakes: list[tuple[float, str]] = field(default_factory=list)  # line (the command line comes last) and text

    def report(self, path: Path, text: str, *, at_key: bool) -> None:
        """Add a mistake at a key of the recipe, or at the nearest section that stands in the file."""
        key = dotted(path)
        if any(path[: len(over)] == over or over[: len(path)] == path for over in self.overridden if over):
            self.add_override(key, text)
            return
        self.add(self._place(path, at_key=at_key), key, text)

    def add(self, place: Place, key: str, text: str) -> None:
        """Add a mistake at a place of the file."""
        head = f"{self.path}:{place.line}:{place.column}: " + (f"{key}: " if key else "")
        self.mistakes.append((place.line, "\n".join([head + text, *excerpt(self.text, place)])))

    def add_override(self, key: str, text: str) -> None:
        """Add a mistake of the command line."""
        self.mistakes.append((math.inf, f"{COMMAND_LINE}: {key}: {text}"))

    def error(self) -> RecipeError:
        """All mistakes, in the order of the file."""
        return RecipeError([text for _, text in sorted(self.mistakes, key=lambda mistake: mistake[0])])

    def _place(self, path: Path, *, at_key: bool) -> Place:
        order = (self.parsed.keys, self.parsed.values) if at_key else (self.parsed.values, self.parsed.keys)
        for places in order:
            if path in places:
                return places[path]
        while path:
            path = path[:-1]
            if path in self.parsed.keys:
                return self.parsed.keys[path]
        return Place(1, 1)


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe; `overrides` are `dotted.key=value` and win over the file.

    Raises RecipeError with every mistake, each as `file:line:column: key: what is wrong; remedy`, its source line and
    a caret; those of overrides as `command line: key: ...`.
    """
    file = pathlib.Path(path)
    source = _Source(file, text := _read(file), parse(text))
    for flaw in source.parsed.flaws:
        source.add(flaw.place, flaw.key, flaw.problem)
    value = source.parsed.value
    if not isinstance(value, dict):
        if not source.mistakes:
            what = "is empty" if value is None else f"is {shown(value)}"
            source.add(
                Place(1, 1), "", f"a recipe is a page of key: value, this one {what}; begin with model: and data:"
            )
        raise source.error()
    for override in overrides:
        _override(source, value, override)
    _rename_aliases(source, value)
    recipe = _validate(source, value)
    if recipe is None or source.mistakes:
        raise source.error()
    if recipe.output_dir is None:
        recipe = recipe.model_copy(update={"output_dir": f"runs/{file.stem}"})
    return LoadedRecipe(recipe, _origins(source, recipe), file)


def _read(file: pathlib.Path) -> str:
    try:
        if file.is_dir():
            raise RecipeError([f"{file}: is a folder; name a recipe in it{_neighbours(file)}"])
        if file.stat().st_size > MAX_BYTES:
            raise RecipeError([f"{file}: is larger than 1 MiB; a recipe is a page"])
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        close = difflib.get_close_matches(file.stem, [p.stem for p in _recipes_beside(file)], 1, 0.5)
        hint = f"did you mean {file.with_name(close[0] + '.yaml')}?" if close else "name a recipe file"
        raise RecipeError([f"{file}: no such recipe; {hint}"]) from None
    except UnicodeDecodeError as error:
        raise RecipeError([f"{file}: is not UTF-8 at byte {error.start}; save it as UTF-8"]) from None
    except (OSError, ValueError) as error:
        raise RecipeError([f"{file}: cannot be read: {error}; name a readable recipe"]) from None


def _recipes_beside(file: pathlib.Path) -> list[pathlib.Path]:
    folder = file.parent if file.parent.is_dir() else pathlib.Path("recipes")
    return sorted(folder.glob("*.yaml")) if folder.is_dir() else []


def _neighbours(folder: pathlib.Path) -> str:
    names = [path.name for path in sorted(folder.glob("*.yaml"))[:5]]
    return f": {', '.join(names)}" if names else ""


def _override(source: _Source, value: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    path: Path = tuple(int(part) if part.isdigit() else part for part in name.strip().split("."))
    if not equals or "" in path:
        source.add_override(override, "an override is written key=value, for example training.seed=1")
        return
    parsed = parse(text)
    if parsed.flaws:
        source.add_override(dotted(path), parsed.flaws[0].problem)
        return
    problem = _put(value, path, parsed.value)
    if problem:
        source.add_override(dotted(path), problem)
    else:
        source.overridden.add(path)


def _put(value: dict[str, Any], path: Path, new: Any) -> str | None:
    """Set the value at a path, making sections on the way; returns what is in the way, if anything."""
    current: Any = value
    for index, part in enumerate(path):
        last = index == len(path) - 1
        if isinstance(current, list):
            if not isinstance(part, int) or part >= len(current):
                return f"{dotted(path[:index])} is a list of {len(current)}; name one by number, from 0"
        elif not isinstance(current, dict):
            return f"{dotted(path[:index])} is {shown(current)}, no section; give the section first"
        elif not last and current.get(str(part)) is None:
            current[str(part)] = {}
        key = part if isinstance(current, list) else str(part)
        if last:
            current[key] = new
        else:
            current = current[key]
    return None


def _rename_aliases(source: _Source, value: dict[str, Any]) -> None:
    for alias, key in ALIASES.items():
        section = value.get(str(alias[0]))
        if not isinstance(section, dict) or alias[1] not in section:
            continue
        if key[1] in section:
            source.report(alias, f"is the same key as {dotted(key)}; keep one of them", at_key=True)
            del section[alias[1]]
            continue
        section[key[1]] = section.pop(alias[1])
        for places in (source.parsed.keys, source.parsed.values):
            if alias in places:
                places[key] = places[alias]
        if alias in source.overridden:
            source.overridden.add(key)


def _validate(source: _Source, value: dict[str, Any]) -> Recipe | None:
    recipe = None
    try:
        recipe = Recipe.model_validate(value)
        mistakes: list[Mistake] = []
    except ValidationError as error:
        mistakes = explain(error.errors(include_url=False), value)
    mistakes += _strategy_mistakes(value.get("accelerate_config", "single"))
    for mistake in mistakes:
        source.report(mistake.path, mistake.text, at_key=mistake.at_key)
    return recipe


def _strategy_mistakes(name: Any) -> Iterator[Mistake]:
    if not isinstance(name, str) or (CONFIG_FOLDER / f"{name}.yaml").is_file() or pathlib.Path(name).is_file():
        return
    known = sorted(path.stem for path in CONFIG_FOLDER.glob("*.yaml"))
    close = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    text = f"is {shown(name)}; {hint}choose one of {', '.join(known)}, or a path"
    yield Mistake(("accelerate_config",), text, at_key=False)


def _origins(source: _Source, recipe: Recipe) -> dict[str, str]:
    """For each leaf of the resolved recipe: who said it."""
    found = {}
    for path, _ in _leaves(recipe.model_dump(mode="json"), ()):
        if any(path[: len(over)] == over for over in source.overridden):
            found[dotted(path)] = COMMAND_LINE
        else:
            found[dotted(path)] = "recipe" if path in source.parsed.values else "default"
    return found


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, value


def resolved_yaml(loaded: LoadedRecipe) -> str:
    """The whole recipe, every key, with its origin as a comment; loads again as the same recipe."""
    return "\n".join(_written(loaded.recipe.model_dump(mode="json"), (), loaded.origins)) + "\n"


def _written(value: dict[str, Any], path: Path, origins: dict[str, str], item: bool = False) -> Iterator[str]:
    indent = "  " * sum(1 for part in path if isinstance(part, str)) + "  " * sum(isinstance(p, int) for p in path)
    for index, (key, inner) in enumerate(value.items()):
        here = (*path, key)
        lead = indent[:-2] + "- " if item and index == 0 else indent
        if isinstance(inner, dict) and inner:
            yield f"{lead}{key}:"
            yield from _written(inner, here, origins)
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            yield f"{lead}{key}:"
            for number, entry in enumerate(inner):
                yield from _written(entry, (*here, number), origins, item=True)
        else:
            text = yaml.safe_dump(inner, default_flow_style=True, width=10**6, allow_unicode=True)
            yield f"{lead}{key}: {text.removesuffix(chr(10)).removesuffix('...').strip()}  # {origins[dotted(here)]}"


def recipe_from_resolved(path: str | os.PathLike[str]) -> Recipe:
    """The recipe of a run folder's recipe.yaml."""
    return load_recipe(path).recipe
