"""Messages about an invalid recipe: place, key, problem, remedy.

pydantic finds the mistakes. Its messages name types and union branches; ours name the text to write.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from finetune.recipe.foreign_keys import answer_for, other_word_for
from finetune.recipe.schema import DataSet, Recipe
from finetune.recipe.yaml_text import Path, dotted, number_trap, plain_scalar, shown
from finetune.wording import in_digits

INTERVAL = "a whole number of steps, at least 1, or a share of the run between 0 and 1"
# The values that a key of several kinds takes.
EITHER = {
    "data.eval": "{fraction: 0.05}, a list of data sets, or null",
    "data_files": "a file or a list of files",
    "target_modules": "all-linear, a pattern, or a list of at least one layer name",
    "exclude_modules": "a pattern, or a list of names",
    "activation_checkpointing": "auto, true, false, selective, or n for every n-th layer",
    "compile": "true, false or auto",
    "init_lora_weights": "true, gaussian, orthogonal, olora or pissa",
    "eval_steps": INTERVAL,
    "save_steps": INTERVAL,
}
# Examples of certain sections and keys; also what to add where one is missing.
EXAMPLES = {
    "model": "{name_or_path: ...}",
    "model.name_or_path": "a Hub repository or a folder",
    "budget": "{gpus: 4, gpu_memory_gb: 24}",
    "quantization": "{load_in_4bit: true}",
    "lora": "{r: 16}",
    "lora.target_parameters": "[mlp.experts.down_proj]",
    "training": "{learning_rate: 2e-4}",
    "samples": "{count: 4}",
    "data": "{train: [{path: json, data_files: rows.jsonl}]}",
    "data.train": "[{path: json, data_files: rows.jsonl}]",
    "row source": "{path: json, data_files: rows.jsonl}",
    "path": "json, csv, parquet, a local folder, or a Hub data set",
    "fraction": "0.05",
}
WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a section of key: value",
    "model_type": "a section of key: value",
}
BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
MISSING = "is missing; "
IN_QUOTES = "put it in quotes:"
TRUTH_WORDS = {
    **dict.fromkeys(("yes", "on", "y", "1", "true"), "true"),
    **dict.fromkeys(("no", "off", "n", "0", "false"), "false"),
}


@dataclass(frozen=True)
class Mistake:
    """One mistake, and the value or key that it is about."""

    path: Path
    text: str  # what is wrong; remedy
    at_key: bool  # the key itself is wrong, not its value


def explain_mistake(errors: Sequence[ErrorDetails], value: Any) -> list[Mistake]:
    """One message for each mistake, in the order of the recipe's sections."""
    mistakes: dict[tuple[Path, str], Mistake] = {}
    for error in errors:
        path, branches = _real_path(error, value)
        for check in error.get("ctx", {}).get("found", ()):
            keyed = (*path, *check.key.split("."))
            mistakes[keyed, check.problem] = Mistake(keyed, f"{check.problem}; {check.remedy}", at_key=False)
        if error["type"] == "cross_check":
            continue
        if branches and not _right_branch(branches, _at(value, path[: branches[0].depth])):
            path = path[: branches[0].depth]
            mistake = Mistake(path, _wants(path, _either(path), _at(value, path)), at_key=False)
        else:
            mistake = _mistake(error, path, value)
        mistakes.setdefault((mistake.path, mistake.text), mistake)
    # A union whose right branch has its own mistake needs no second one at the union itself.
    own = [mistake.path for mistake in mistakes.values() if not _is_either(mistake)]
    result = [m for m in mistakes.values() if not (_is_either(m) and any(p[: len(m.path)] == m.path for p in own))]
    return [m for m in result if not _is_misspelt_elsewhere(m, result)]


def _is_misspelt_elsewhere(missing: Mistake, others: Sequence[Mistake]) -> bool:
    """Whether a missing key is there under a wrong name, which has a message of its own."""
    named = re.compile(rf"(did you mean|write) {re.escape(dotted(missing.path))}(?![.\w])")
    return missing.text.startswith(MISSING) and any(other.at_key and named.search(other.text) for other in others)


def unknown_key(path: Path) -> str:
    """The message about a key that this section does not have."""
    name, section = str(path[-1]), path[:-1]
    known, everywhere = keys_of(section), list(_all_paths(Recipe, ()))
    elsewhere = [dotted(p) for p in everywhere if p[-1] == name]
    answer = answer_for(name)
    if elsewhere:
        other = (
            f", or, as another tool means it, {answer}" if answer and not any(p in answer for p in elsewhere) else ""
        )
        return f"belongs elsewhere; write {' or '.join(elsewhere)}{other}"
    if answer:
        return f"is another tool's key; {answer}"
    close = difflib.get_close_matches(name, known, 1, 0.55)
    if close:
        return f"is unknown; did you mean {dotted((*section, close[0]))}?"
    far = difflib.get_close_matches(name, [str(p[-1]) for p in everywhere], 1, 0.75)
    if far:
        place = next(p for p in everywhere if p[-1] == far[0])
        return f"is unknown; did you mean {dotted(place)}?"
    return f"is unknown; the keys here are {', '.join(known)}"


def keys_of(section: Path) -> list[str]:
    """The keys in the section at a recipe path."""
    return list(_section_at(section).model_fields)


def _section_at(path: Path) -> type[BaseModel]:
    """The section at a path; where a key takes a section or a list of sections, the path's number decides."""
    model: type[BaseModel] = Recipe
    for index, part in enumerate(path):
        if isinstance(part, str) and part in model.model_fields:
            inner = list(_models(model.model_fields[part].annotation))
            numbered = index + 1 < len(path) and isinstance(path[index + 1], int)
            model = next((m for m in inner if (m is DataSet) == numbered), inner[0] if inner else model)
    return model


def section_models(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections inside a section; a list's are named like `data.train[]`."""
    for name, info in model.model_fields.items():
        for inner in list(_models(info.annotation))[:1]:
            yield (f"{name}[]" if inner is DataSet else name), inner


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section classes inside an annotation such as `EvalFraction | list[DataSet] | None`."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _models(argument)


def _all_paths(model: type[BaseModel], above: Path) -> Iterator[Path]:
    for name, info in model.model_fields.items():
        yield (*above, name)
        for inner in list(_models(info.annotation))[:1]:
            yield from _all_paths(inner, (*above, name, 0) if inner is DataSet else (*above, name))


@dataclass(frozen=True)
class _Branch:
    """A union's branch in pydantic's location, and the depth of the union in the recipe."""

    label: str
    depth: int


def _real_path(error: ErrorDetails, value: Any) -> tuple[Path, list[_Branch]]:
    """pydantic's location without union branch names, because no recipe has them."""
    path: list[str | int] = []
    branches: list[_Branch] = []
    current = value
    location = error["loc"]
    for index, part in enumerate(location):
        last_and_absent = index == len(location) - 1 and error["type"] == "missing"
        if _is_union(path) and (not branches or branches[-1].depth < len(path)):
            branches.append(_Branch(str(part), len(path)))
        elif isinstance(current, Mapping) and (part in current or last_and_absent):
            path.append(part)
            current = current.get(part)
        elif isinstance(current, list) and isinstance(part, int) and part < len(current):
            path.append(part)
            current = current[part]
        else:
            branches.append(_Branch(str(part), len(path)))
    return tuple(path), branches


def _right_branch(branches: list[_Branch], value: Any) -> bool:
    """Whether the value is of the kind that the branch is for: only then its own mistakes say something."""
    label = branches[0].label
    if label.startswith("list["):
        return isinstance(value, list)
    return isinstance(value, dict) and label[:1].isupper() and "path" not in value  # else a data set, not in a list


def _at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part] if _has(value, part) else None
    return value


def _has(value: Any, part: Any) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, dict) and part in value


def _is_union(path: Sequence[str | int]) -> bool:
    return bool(path) and (dotted(tuple(path)) in EITHER or path[-1] in EITHER)


def _either(path: Path) -> str:
    return EITHER.get(dotted(path)) or EITHER[str(path[-1])]


def _is_either(mistake: Mistake) -> bool:
    return any(f"must be {expected}" in mistake.text for expected in EITHER.values())


def _mistake(error: ErrorDetails, path: Path, value: Any) -> Mistake:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return Mistake(path, unknown_key(path), at_key=True)
    if kind == "missing":
        example = EXAMPLES.get(dotted(path)) or EXAMPLES.get(str(path[-1]), "...")
        return Mistake(path, f"{MISSING}add {path[-1]}: {example}", at_key=True)
    written = _at(value, path)
    if kind == "literal_error":
        return Mistake(path, _wrong_choice(written, re.findall(r"'([^']*)'", context["expected"])), at_key=False)
    if kind in BOUNDS:
        bound, word = BOUNDS[kind]
        return Mistake(path, f"is {shown(written)}; it must be {word} {in_digits(context[bound])}", at_key=False)
    if kind in ("too_short", "string_too_short"):
        return Mistake(path, "is empty; name at least one", at_key=False)
    expected = WANTED.get(kind, "another kind of value")
    if kind in ("list_type", "model_type"):
        sample = EXAMPLES.get("row source" if isinstance(path[-1], int) else dotted(path))
        expected += f", such as {sample}" if sample else ""
    return Mistake(path, _wants(path, expected, written), at_key=False)


def _wants(path: Path, expected: str, written: Any) -> str:
    """`is X; it must be Y`, with the text to write if that is clear."""
    if written is None:
        info = _section_at(path[:-1]).model_fields.get(str(path[-1]))
        default = "" if info is None or info.is_required() else ", or remove the line for the default"
        return f"is empty; it must be {expected}{default}"
    text = f"is {shown(written)}; it must be {expected}"
    hint = _hint(path, expected, written)
    return f"{text}; {hint}" if hint else text


def _hint(path: Path, expected: str, written: Any) -> str | None:
    """The text to write instead of a wrongly typed value."""
    if expected.startswith("true") and str(written).lower() in TRUTH_WORDS:
        if isinstance(plain_scalar(str(written)), bool):  # tRUE and fALSE are texts without quotes too
            return "remove the quotes"
        return f"{shown(written)} is not a truth value, write {TRUTH_WORDS[str(written).lower()]}"
    if expected == "text" and isinstance(written, (bool, int, float)):
        return f'{IN_QUOTES} "{shown(written)}"'
    if "number" in expected and isinstance(written, str):
        return number_trap(written) or "write digits, without units or expressions"
    if expected == "a whole number" and isinstance(written, float) and written.is_integer() and abs(written) < 1e15:
        return f"write {int(written)}"
    if "section" in expected and isinstance(written, bool):
        null = dotted(path) in ("lora", "quantization")
        return "write {} for the defaults" if written else ("write null for none" if null else None)
    if expected in EITHER.values() and isinstance(written, str):
        close = difflib.get_close_matches(written.lower(), re.findall(r"[a-z][\w-]+", expected), 1, 0.7)
        return f"did you mean {close[0]}?" if close else None
    return None


def _wrong_choice(written: Any, choices: list[str]) -> str:
    if written is None:
        return f"is empty; choose one of {', '.join(choices)}"
    word = shown(written).lower()
    close = [*other_word_for(word, choices), *difflib.get_close_matches(word, choices, 1, 0.5)]
    suggestion = f"did you mean {close[0]}? " if close else ""
    return f"is {shown(written)}; {suggestion}choose one of {', '.join(choices)}"
