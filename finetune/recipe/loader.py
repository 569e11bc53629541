"""YAML to recipe: strict, all mistakes at once, file:line:column, did-you-mean, overrides."""

from __future__ import annotations

import difflib
import errno
import math
import os
import pathlib
import select
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from finetune.errors import RecipeError
from finetune.output_stream import printable
from finetune.paths import RECIPES, SHIPPED, in_home, open_regular
from finetune.recipe.adapter_config import folder_mistakes
from finetune.recipe.foreign_keys import refuse_configuration_of_a_tool
from finetune.recipe.mistakes import IN_QUOTES, Mistake, explain_mistake
from finetune.recipe.number_formats import KEYS
from finetune.recipe.resolved import LoadedRecipe, leaves
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.model_checks import refuses_new_rows
from finetune.recipe.strategy import CONFIG_FOLDER, read_strategy
from finetune.recipe.strategy_fit import Unfit, unfit
from finetune.recipe.yaml_text import (
    MAX_BYTES,
    Parsed,
    Path,
    Place,
    dotted,
    excerpt,
    parse,
    shown,
)
from finetune.redaction import cover_secrets, hide_secrets, known_secrets

COMMAND_LINE = "command line"
SILENT_SECONDS, ABSENT_SECONDS = 30, 2  # that the writer of a recipe may write nothing, or not be there
MAX_MISTAKES = 50  # shown at once
DATA_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".xlsx", ".gz")
# Other places and spellings of one key, accepted.
CHECKPOINTING: Path = ("training", "activation_checkpointing")
ALIASES: tuple[Path, ...] = (("gradient_checkpointing",), ("training", "gradient_checkpointing"))


@dataclass
class _Source:
    """A recipe's text with the overrides put in, and the places to point at."""

    path: pathlib.Path
    text: str
    parsed: Parsed
    overridden: set[Path] = field(default_factory=set)
    set_keys: set[Path] = field(default_factory=set)  # every key that an override's value holds
    unexplained: int = 0  # mistakes beyond those worth explaining
    mistakes: list[tuple[Place | None, str]] = field(default_factory=list)  # no place: an override's

    def report(self, path: Path, text: str, *, at_key: bool) -> None:
        """Add a mistake at a key of the recipe, or at the nearest section that is in the file."""
        if any(path[: len(over)] == over or over[: len(path)] == path for over in self.overridden):
            quoted = f"; in a shell: '{dotted(path)}=\"...\"'"  # a shell takes one pair of quotes away
            self.add_override(dotted(path), text + quoted * (IN_QUOTES in text))
        else:
            self.add(self._place(path, at_key=at_key), dotted(path), text)

    def add(self, place: Place, key: str, text: str) -> None:
        """Add a mistake at a place of the file."""
        head = f"{self.path}:{place.line}:{place.column}: " + (f"{printable(key)}: " if key else "")
        self.mistakes.append((place, head + text))

    def add_override(self, key: str, text: str) -> None:
        """Add a mistake of the command line."""
        self.mistakes.append((None, f"{COMMAND_LINE}: {printable(key)}: {text}"))

    def error(self) -> RecipeError:
        """All mistakes, in the file's order, then the command line's. Secrets in them are hidden."""
        known = known_secrets()
        source = cover_secrets(self.text, known)
        ordered = sorted(self.mistakes, key=lambda m: (m[0].line, m[0].column) if m[0] else (math.inf, 0))
        shown_mistakes = [
            "\n".join([hide_secrets(text, known), *(excerpt(source, place) if place else ())])
            for place, text in ordered[:MAX_MISTAKES]
        ]
        more = len(ordered) - MAX_MISTAKES + self.unexplained
        return RecipeError([*shown_mistakes, *([f"{self.path}: and {more} more mistakes"] if more > 0 else [])])

    def _place(self, path: Path, *, at_key: bool) -> Place:
        order = (self.parsed.keys, self.parsed.values) if at_key else (self.parsed.values, self.parsed.keys)
        for depth in range(len(path), 0, -1):
            for places in order:
                if path[:depth] in places:
                    return places[path[:depth]]
            order = (self.parsed.keys, self.parsed.values)  # of a section above, point at its key
        return Place(1, 1)


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, here: bool = False) -> LoadedRecipe:
    """Read a recipe; `overrides` are `dotted.key=value` and win over the file.

    `here`: the recipe will be trained on this machine as it is. So its folders must exist here, and its strategy must
    be able to train it. `path` may also be a packaged recipe's name; its files then come from the package too. Raises
    RecipeError with every mistake, each as `file:line:column: key: problem; remedy`, its source line and a caret; for
    overrides as `command line: key: ...`.
    """
    source = _Source(file := find_recipe(path), text := _read(file), parse(text))
    for flaw in source.parsed.flaws:
        source.add(flaw.place, flaw.key, flaw.problem)
    value = source.parsed.value if isinstance(source.parsed.value, dict) else {}
    refuse_configuration_of_a_tool(file, value)
    _rename_aliases(source, value)
    for override in overrides:
        _override(source, value, override)
    if not isinstance(source.parsed.value, dict):
        if not source.parsed.flaws:
            kind = "is empty" if source.parsed.value is None else f"is {shown(source.parsed.value)}"
            problem = f"a recipe is a page of key: value, this one {kind}; begin with model: and data:"
            source.add(source.parsed.values.get((), Place(1, 1)), "", problem)
        raise source.error()
    _rename_aliases(source, value)  # an override may be a whole section
    if "data" in value and _is_shipped(file):
        value["data"] = _with_shipped_files(value["data"], ("data",), source.overridden)
    recipe = _validate(source, value)
    if recipe is not None and here:
        for key, problem in folder_mistakes(recipe):
            source.report(key, problem, at_key=False)
        for each in _unfit_for_strategy(recipe):
            source.report(tuple(each.key.split(".")), f"{each.problem}; {each.remedy}", at_key=False)
    if recipe is None or source.mistakes:
        raise source.error()
    recipe = recipe if recipe.output_dir else recipe.model_copy(update={"output_dir": f"runs/{file.stem}"})
    return LoadedRecipe(recipe, _origins(source, recipe), file, _auto_formats(value))


def find_recipe(path: str | os.PathLike[str]) -> pathlib.Path:
    """The file at that path. A bare name that is no file selects the package's recipe with that name."""
    file = pathlib.Path(path).expanduser()
    shipped = RECIPES / f"{file.name}.yaml"
    is_name = file.parts == (file.name,) and len(file.name) < 200  # no file has a longer name
    is_file = os.path.exists(file) and not os.path.isdir(file)
    return shipped if is_name and not is_file and shipped.is_file() else file


def _is_shipped(file: pathlib.Path) -> bool:
    return file.resolve().parent == RECIPES.resolve()


def _with_shipped_files(value: Any, key: Path, overridden: set[Path]) -> Any:
    """A section from a recipe in the package: paths to the package's files become absolute.

    Overridden values stay as the user typed them. In a checkout's own folder the path stays as the recipe writes it.
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
            raise RecipeError([f"{file}: is a folder; name a recipe in it{_neighbours(file)}"])
        if file.suffix.lower() in DATA_SUFFIXES and file.is_file():
            raise RecipeError([_is_data(file)])
        read = _read_pipe(file) if file.is_fifo() else _read_file(file)
        if file.suffix.lower() == ".json" and read.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            raise RecipeError([_is_data(file)])
        if len(read) > MAX_BYTES:
            raise RecipeError([f"{file}: is larger than 1 MiB; a recipe is a page, data are named by data.train"])
        return read.decode("utf-8-sig")
    except FileNotFoundError:
        recipes: dict[str, object] = {path.stem: path.stem for path in _recipes_in(RECIPES)}
        recipes |= {path.stem: path for folder in ("recipes", file.parent) for path in _recipes_in(folder)}
        close = difflib.get_close_matches(file.stem, recipes, 1, 0.5)
        hint = f"did you mean {recipes[close[0]]}?" if close else "name a recipe file"
        raise RecipeError([f"{file}: no such recipe; {hint}"]) from None
    except UnicodeDecodeError as error:
        raise RecipeError([f"{file}: is not UTF-8 at byte {error.start}; save it as UTF-8"]) from None
    except OSError as error:
        raise RecipeError([f"{file}: cannot be read ({error.strerror}); name a readable recipe"]) from None
    except ValueError:
        raise RecipeError([f"{printable(str(file))}: is not a file name; name a recipe file"]) from None


def _is_data(file: pathlib.Path) -> str:
    return f"{file}: is data, not a recipe; run finetune init {file}, which writes a recipe for it"


def _read_file(file: pathlib.Path) -> bytes:
    with open_regular(file) as stream:
        return stream.read(MAX_BYTES + 1)


def _read_pipe(file: pathlib.Path) -> bytes:
    """Read `finetune check <(...)`: everything until the writer ends, or one byte more than a recipe may have. Raises
    OSError if nobody writes.
    """
    read, waited, descriptor = b"", False, os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while len(read) <= MAX_BYTES:
            try:
                part = os.read(descriptor, MAX_BYTES)
            except BlockingIOError:  # somebody has it open and has not written yet
                if not select.select([descriptor], [], [], SILENT_SECONDS)[0]:
                    raise OSError(errno.ETIMEDOUT, "is a pipe whose writer writes nothing") from None
                continue
            if not part and (read or waited):
                break
            if not part:  # nobody has it open: perhaps not yet
                waited = True
                select.select([descriptor], [], [], ABSENT_SECONDS)
            read += part
    finally:
        os.close(descriptor)
    if not read:
        raise OSError(errno.EPIPE, "is a pipe into which nobody writes")
    return read


def _recipes_in(folder: str | pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for suffix in ("yaml", "yml") for path in pathlib.Path(folder).glob(f"*.{suffix}"))


def _neighbours(folder: pathlib.Path) -> str:
    names = [path.name for path in _recipes_in(folder)[:5]]
    return f": {', '.join(names)}" if names else ""


def _override(source: _Source, value: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    # Five digits: more rows than a recipe holds, and int() refuses thousands.
    path: Path = tuple(int(p) if p.isascii() and p.isdigit() and len(p) < 6 else p for p in name.strip().split("."))
    if not equals or "" in path:
        source.add_override(override, "is not an override; write key=value, for example training.seed=1")
        return
    path = CHECKPOINTING if path in ALIASES else path
    parsed = parse(text)
    problem = parsed.flaws[0].problem if parsed.flaws else _put(value, path, parsed.value)
    if problem:
        source.add_override(dotted(path), problem)
        return
    others = {key for key in source.set_keys if key[: len(path)] != path}
    source.set_keys = others | {(*path, *inner) for inner in parsed.values}
    source.overridden.add(path)


def _put(value: dict[str, Any], path: Path, new: Any) -> str | None:
    """Set the value at a path and create the sections above it. Returns the obstacle, or None."""
    current: Any = value
    for index, part in enumerate(path):
        last = index == len(path) - 1
        if isinstance(current, list):
            if not isinstance(part, int) or part >= len(current):
                return f"{dotted(path[:index])} is a list of {len(current)}; name one by number, from 0"
        elif not isinstance(current, dict):
            return f"{dotted(path[:index])} is {shown(current)}, not a section; give the section first"
        elif not last and current.get(str(part)) is None:
            current[str(part)] = {}
        key = part if isinstance(current, list) else str(part)
        if last:
            current[key] = new
        current = current[key]
    return None


def _rename_aliases(source: _Source, value: dict[str, Any]) -> None:
    for alias in ALIASES:
        holder = value.get("training") if len(alias) > 1 else value
        training = value.get("training", {})
        if not isinstance(holder, dict) or alias[-1] not in holder or not isinstance(training, dict):
            continue
        setting = holder.pop(str(alias[-1]))
        if CHECKPOINTING[-1] in training:
            source.report(alias, f"is the same key as {dotted(CHECKPOINTING)}; keep one of them", at_key=True)
            continue
        value["training"] = {**training, "activation_checkpointing": setting}
        for places in (source.parsed.keys, source.parsed.values):
            if alias in places:
                places[CHECKPOINTING] = places[alias]
        source.set_keys |= {CHECKPOINTING} if alias in source.set_keys else set()


def _validate(source: _Source, value: dict[str, Any]) -> Recipe | None:
    recipe = None
    try:
        recipe = Recipe.model_validate(value)
        mistakes: list[Mistake] = []
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        mistakes = explain_mistake(errors[: 2 * MAX_MISTAKES], value)
        source.unexplained = len(errors[2 * MAX_MISTAKES :])
    mistakes += _strategy_mistakes(value.get("accelerate_config", "single"))
    mistakes += _refused_by_strategy(recipe) if recipe is not None else ()
    unreadable = [flaw.unreadable for flaw in source.parsed.flaws if flaw.unreadable is not None]
    for mistake in mistakes:
        if not any(mistake.path[: len(path)] == path for path in unreadable):
            source.report(mistake.path, mistake.text, at_key=mistake.at_key)
    return recipe


def _strategy_mistakes(name: Any) -> Iterator[Mistake]:
    # os.path, since pathlib raises on a name that is too long for any file.
    paths = (CONFIG_FOLDER / f"{name}.yaml", in_home(name)) if isinstance(name, str) and name else ()
    if not paths or any(os.path.isfile(path) for path in paths):
        return
    known = sorted(path.stem for path in CONFIG_FOLDER.glob("*.yaml"))
    hint = "".join(f"did you mean {near}? " for near in difflib.get_close_matches(name, known, 1, 0.5))
    text = f"is {shown(name)}; {hint}choose one of {', '.join(known)}, or a path"
    yield Mistake(("accelerate_config",), text, at_key=False)


def _refused_by_strategy(recipe: Recipe) -> Iterator[Mistake]:
    if not recipe.model.new_tokens:
        return
    with suppress(RecipeError):  # a wrong file is reported when it is used
        if reason := refuses_new_rows(recipe, read_strategy(recipe.accelerate_config, strict=False)):
            key = "add_tokens" if recipe.model.add_tokens else "add_special_tokens"
            yield Mistake(("model", key), reason, at_key=True)


def _auto_formats(value: dict[str, Any]) -> tuple[str, ...]:
    """The number-format keys that a valid recipe leaves to the device."""
    paths = (key.split(".") for key in KEYS)
    return tuple(f"{section}.{name}" for section, name in paths if value.get(section, {}).get(name, "auto") == "auto")


def _unfit_for_strategy(recipe: Recipe) -> list[Unfit]:
    with suppress(RecipeError):  # a wrong file is reported when it is used
        return list(unfit(recipe, read_strategy(recipe.accelerate_config, strict=False)))
    return []


def _origins(source: _Source, recipe: Recipe) -> dict[str, str]:
    """Where each value of the resolved recipe comes from."""
    origins = {}
    for path, _ in leaves(recipe.model_dump(mode="json")):
        overridden = any(path[: len(over)] == over for over in source.overridden)
        given, origin = (source.set_keys, COMMAND_LINE) if overridden else (source.parsed.values, "recipe")
        origins[dotted(path)] = origin if path in given else "default"
    return origins


def recipe_from_resolved(path: str | os.PathLike[str]) -> Recipe:
    """The recipe of a run folder's recipe.yaml."""
    return load_recipe(path).recipe
