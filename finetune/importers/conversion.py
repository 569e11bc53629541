"""From another tool's file to a recipe: read, find the tool, convert, list what is left out, check the result."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError
from finetune.importers import MARK, Imported, axolotl, llamafactory, trl
from finetune.importers.foreign_config import ForeignConfig
from finetune.importers.recipe_writer import page, written
from finetune.importers.shared import carry_best_model, fit_strategy
from finetune.output_stream import one_line, printable
from finetune.paths import read_regular
from finetune.recipe.foreign_keys import TOOL_TITLES, Tool, refuse_other_training, refuse_torchtune, tool_of
from finetune.recipe.gpus import budget_of, parse_gpus
from finetune.recipe.loader import MAX_MISTAKES, load_recipe
from finetune.recipe.schema import Budget
from finetune.recipe.yaml_text import MAX_BYTES, parse, shown
from finetune.redaction import hide_secrets, known_secrets
from finetune.wording import first_lines


def convert_file(file: Path, tool: Tool | None, gpus: str | None) -> Imported:
    """`finetune.importers.convert`."""
    values = _values_in(file)
    refuse_torchtune(file, values)
    others = (words for keys, words in _OTHER_FILES if keys <= values.keys())
    if tool_of(values) is None and (words := next(others, None)):  # a file that no tool reads as its configuration
        raise RecipeError([f"{file}: is {words}"])
    tool = tool or tool_of(values)
    if tool is None and {"model", "data"} <= values.keys():
        raise RecipeError([f"{file}: is already a recipe; check it by: {shlex.join(['finetune', 'check', str(file)])}"])
    if tool is None:
        titles = ", ".join(TOOL_TITLES.values())
        raise RecipeError([f"{file}: is not a configuration of {titles}; name the tool by --tool"])
    refuse_other_training(file, tool, values)

    budget, machine = Budget(gpus=1), "one GPU"
    if gpus is not None:
        budget, machine = budget_of(parse_gpus(gpus)), f"--gpus {gpus}"
    foreign = ForeignConfig(TOOL_TITLES[tool], values, max(1, budget.gpus * budget.nodes), budget.nodes, file.parent)
    try:
        match tool:
            case "axolotl":
                axolotl.convert(foreign)
            case "llamafactory":
                llamafactory.convert(foreign)
            case "trl":
                trl.convert(foreign)
        carry_best_model(foreign)
        fit_strategy(foreign)
    except RecipeError as error:
        raise RecipeError([f"{file}: {mistake}" for mistake in error.mistakes]) from None
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        # A section instead of a word, or a word instead of a number, in a place where no converter expects it.
        place = f"{file}: {foreign.last_read}: is {shown(foreign.peek(foreign.last_read))}"
        reason = f"{TOOL_TITLES[tool]} cannot read it ({one_line(error, 100)})"
        raise RecipeError([f"{place}; {reason}; correct it, or name its tool by --tool"]) from error
    foreign.leave_unread()
    foreign.write("budget", budget.model_dump(exclude_defaults=True) or {"gpus": 0}, machine)

    title = [
        f"{MARK.removeprefix('# ')}{file.name} ({TOOL_TITLES[tool]}), {machine}.",
        "Behind each line is the key it came from. Rows come in another order, from other random numbers.",
        "A warmup begins above a rate of 0.",
    ]
    text = page(title, foreign.carried, foreign.left_out)
    _check_recipe(file, text, foreign)
    return Imported(tool, text, foreign.carried, tuple(foreign.left_out))


# The keys of other files that lie beside a configuration: what each is, and what to do with it.
_OTHER_FILES = (
    ({"zero_optimization"}, "DeepSpeed's own file; name it as deepspeed in the tool's configuration, or see "
     "docs/deepspeed_keys.md for a recipe's"),
    ({"distributed_type"}, "Accelerate's own file; name it as accelerate_config in a recipe"),
    ({"peft_type"}, "an adapter's settings; name its folder as model.adapter in a recipe"),
    ({"architectures"}, "a model's config.json; name its folder as model.name_or_path in a recipe"),
    ({"nbformat"}, "a notebook; write its arguments as YAML: model_name_or_path, dataset_name and the others"),
)  # fmt: skip


def _values_in(file: Path) -> dict[str, Any]:
    """The file's YAML, a mapping. Raises RecipeError."""
    if file.is_dir():
        names = sorted(path.name for path in file.iterdir() if path.suffix in (".yaml", ".yml"))
        named = f": {', '.join(names[:3])}" if names else ""
        raise RecipeError([f"{file}: is a folder; name a tool's configuration in it{named}"])
    if file.suffix in (".py", ".sh"):
        remedy = "write its arguments as YAML: model_name_or_path, dataset_name and the others"
        raise RecipeError([f"{file}: is a script, which is never run; {remedy}, and import that"])
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
    return parsed.value


def _check_recipe(file: Path, text: str, foreign: ForeignConfig) -> None:
    """The recipe must be valid and hold what was carried. Raises RecipeError, which names the tool's own key."""
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
            if not error.found:
                raise RecipeError([line.replace(str(path), str(file)) for line in error.mistakes]) from None
            known, lines = known_secrets(), []
            for mistake in error.found:
                _, origin = foreign.carried.get(mistake.key, (None, ""))
                places = filter(None, (str(file), origin, printable(mistake.key)))
                lines.append(hide_secrets(": ".join((*places, mistake.text)), known))
            raise RecipeError(first_lines(lines, MAX_MISTAKES)) from None
    for key, (value, _) in foreign.carried.items():
        loaded: Any = recipe
        for part in key.split("."):
            loaded = loaded[part]
        is_same = loaded == value or str(loaded) == str(value)  # a name of digits alone, which a recipe takes as text
        assert isinstance(value, (dict, list)) or is_same, f"{key}: {written(value)} became {written(loaded)}"
