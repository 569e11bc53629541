"""`finetune import`: another tool's configuration into a recipe; what cannot be carried over is listed."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from finetune.errors import FinetuneError, RecipeError
from finetune.files import write_text
from finetune.importers import axolotl, llamafactory, torchtune, trl
from finetune.importers.foreign_config import ForeignConfig, LeftOut
from finetune.importers.interpolation import interpolated
from finetune.importers.left_out import reason_for
from finetune.importers.recipe_writer import page, written
from finetune.importers.shared import best_model, fit_strategy
from finetune.output_stream import one_line
from finetune.paths import read_regular
from finetune.recipe.foreign_keys import TOOL_TITLES, Tool, refuse_other_training, tool_of
from finetune.recipe.gpus import budget_of, parse_gpus
from finetune.recipe.loader import MAX_MISTAKES, load_recipe
from finetune.recipe.schema import Budget
from finetune.recipe.yaml_text import MAX_BYTES, Parsed, parse, shown
from finetune.wording import first_lines

TOOLS = get_args(Tool)
_CONVERT: dict[Tool, Callable[[ForeignConfig], None]] = {
    "axolotl": axolotl.convert,
    "llamafactory": llamafactory.convert,
    "trl": trl.convert,
    "torchtune": torchtune.convert,
}
_MARK = "# Made by `finetune import` from "


@dataclass(frozen=True)
class Imported:
    """A recipe's text, the values it carries over and the keys that were left out."""

    tool: Tool
    text: str
    carried: Mapping[str, tuple[Any, str]]
    left_out: tuple[LeftOut, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "tool": self.tool,
            "recipe": self.text,
            "carried": {key: {"value": value, "from": why} for key, (value, why) in self.carried.items()},
            "left_out": [vars(entry) for entry in self.left_out],
        }


def convert(file: Path, *, tool: Tool | None = None, gpus: str | None = None) -> Imported:
    """The recipe that trains as `file` does on these GPUs (`4x80GB`, as every `--gpus`); None: on one of any size.

    Raises RecipeError for a file that cannot be read, is not a known tool's, or describes another kind of training.
    """
    parsed = _read(file)
    values: dict[str, Any] = parsed.value
    tool = tool or _tool_of(file, values)
    if tool == "torchtune":  # no other tool replaces ${...} by values
        values = interpolated(file, parsed)
    refuse_other_training(file, tool, values)
    budget = Budget(gpus=1) if gpus is None else budget_of(parse_gpus(gpus))
    machine = "one GPU" if gpus is None else f"--gpus {gpus}"
    foreign = ForeignConfig(TOOL_TITLES[tool], values, max(1, budget.gpus * budget.nodes), budget.nodes, file.parent)
    try:
        _CONVERT[tool](foreign)
        best_model(foreign)
        fit_strategy(foreign)
    except RecipeError as error:
        raise RecipeError([f"{file}: {mistake}" for mistake in error.mistakes]) from None
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        # A section instead of a word, or a word instead of a number, in a place where no converter expects it.
        place = f"{file}: {foreign.last_read}: is {shown(foreign.peek(foreign.last_read))}"
        text = f"{place}; {TOOL_TITLES[tool]} cannot read it ({one_line(error, 100)}); correct it, or name its tool by"
        raise RecipeError([f"{text} --tool"]) from error
    for key, value in foreign.unread():
        level, reason = reason_for(key, value)
        foreign.leave(key, level, reason, value)
    foreign.write("budget", budget.model_dump(exclude_defaults=True) or {"gpus": 0}, machine)
    text = page(_title(file, tool, machine), foreign.carried, foreign.left_out)
    _check(file, text, foreign)
    return Imported(tool, text, foreign.carried, tuple(foreign.left_out))


def known_tool(name: str | None) -> Tool | None:
    """The tool of this name, None for none. Raises FinetuneError."""
    match = next((tool for tool in TOOLS if name and tool == name.lower().replace("-", "").replace("_", "")), None)
    if name and match is None:
        raise FinetuneError(f"--tool: {name}: write one of {', '.join(TOOLS)}")
    return match


def _read(file: Path) -> Parsed:
    try:
        parsed = parse(read_regular(file, MAX_BYTES).decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise RecipeError([f"{file}: {reason}; name a tool's configuration"]) from None
    if parsed.flaws:
        mistakes = [f"{file}:{flaw.place.line}:{flaw.place.column}: {flaw.problem}" for flaw in parsed.flaws]
        raise RecipeError(first_lines(mistakes, MAX_MISTAKES))
    if not isinstance(parsed.value, dict):
        raise RecipeError([f"{file}: is not a mapping of key: value; name a tool's configuration"])
    return parsed


def _tool_of(file: Path, values: Mapping[str, Any]) -> Tool:
    """The tool that a configuration belongs to. Raises RecipeError where that cannot be told."""
    tool = tool_of(values)
    if tool is not None:
        return tool
    if "model" in values and "data" in values:
        command = shlex.join(["finetune", "check", str(file)])
        raise RecipeError([f"{file}: is already a recipe; check it by: {command}"])
    raise RecipeError([f"{file}: is not a configuration of {', '.join(TOOL_TITLES.values())}; name the tool by --tool"])


def _title(file: Path, tool: Tool, machine: str) -> list[str]:
    return [
        f"{_MARK.removeprefix('# ')}{file.name} ({TOOL_TITLES[tool]}), {machine}.",
        "Behind each line is the key it came from. Rows come in another order, from other random numbers.",
    ]


def _check(file: Path, text: str, foreign: ForeignConfig) -> None:
    """The recipe must be valid and hold what was carried; a refused value is reported by the tool's own key."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise RecipeError([f"{file}: a key holds half a character ({half}); write the character itself"]) from None
    with tempfile.TemporaryDirectory(prefix="finetune-import-") as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text, "utf-8")
        try:
            recipe = load_recipe(path).recipe.model_dump(mode="json")
        except RecipeError as error:
            mistakes = [
                _by_their_key(file, mistake.splitlines()[0].removeprefix(f"{path}:"), foreign)
                for mistake in error.mistakes
            ]
            raise RecipeError(mistakes) from None
    for key, (value, _) in foreign.carried.items():
        loaded: Any = recipe
        for part in key.split("."):
            loaded = loaded[part]
        same = loaded == value or str(loaded) == str(value)  # a name of digits alone, which a recipe takes as text
        assert isinstance(value, (dict, list)) or same, f"{key}: {written(value)} became {written(loaded)}"


def _by_their_key(file: Path, mistake: str, foreign: ForeignConfig) -> str:
    text = re.sub(r"^\d+:\d+: ", "", mistake)
    recipe_key = text.partition(": ")[0]
    why = foreign.carried.get(recipe_key, (None, ""))[1]
    return f"{file}: {f'{why}: ' if why else ''}{text}"


def write_recipe(path: Path, text: str) -> None:
    """Write the recipe; an existing file is replaced only if this verb made it.

    Raises FinetuneError, EnvironmentMismatch.
    """
    if path.exists() and not (path.is_file() and path.read_bytes().startswith(_MARK.encode())):
        raise FinetuneError(f"-o: {path}: exists and was not made by `finetune import`; name another")
    write_text(path, text)
