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
# The values that a key with several kinds of value takes: a union in the schema.
EITHER = {
    "data.eval": "{fraction: 0.05}, a list of data sets, or null",
    "data_files": "a file or a list of files",
    "target_modules": "all-linear, a pattern, or a list of at least one layer name",
    "exclude_modules": "a pattern, or a list of names",
    "activation_checkpointing": "auto, true, false, selective, or n for every n-th layer",
    "compile": "true, false or auto",
    "init_lora_weights": "true, false, gaussian or orthogonal",
    "eval_steps": INTERVAL,
    "save_steps": INTERVAL,
    "every": INTERVAL,
}
# Examples for sections and keys. A message about a missing key shows its example.
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
# pydantic's kind of error -> our words for the kind of value.
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
# pydantic's kind of error -> the bound's name in its context, and our word.
BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
# Values that release 0.1.0 was the last to have: (key, value) -> the remedy.
_ANOTHER_START = "write true; for the adapter of a finished run: finetune merge RUN"
WITHDRAWN = {
    ("lora.init_lora_weights", "pissa"): _ANOTHER_START,
    ("lora.init_lora_weights", "olora"): _ANOTHER_START,
    ("training.mixed_precision", "fp8"): "write bf16",
}
MISSING = "is missing; "
IN_QUOTES = "put it in quotes:"
TRUTH_WORDS = {
    **dict.fromkeys(("yes", "on", "y", "1", "true"), "true"),
    **dict.fromkeys(("no", "off", "n", "0", "false"), "false"),
}


@dataclass(frozen=True)
class Mistake:
    """One mistake, and its value or key."""

    path: Path
    text: str  # what is wrong; remedy
    at_key: bool  # the key itself is wrong, not its value


def explain_mistake(errors: Sequence[ErrorDetails], value: Any) -> list[Mistake]:
    """One message for each mistake, in the order of the recipe's sections."""
    mistakes: dict[tuple[Path, str], Mistake] = {}  # pydantic reports a mistake once for each branch of a union
    for error in errors:
        path, branches = _recipe_path(error, value)
        for check in error.get("ctx", {}).get("found", ()):
            key_path = (*path, *check.key.split("."))
            mistakes[key_path, check.problem] = Mistake(key_path, f"{check.problem}; {check.remedy}", at_key=False)
        if error["type"] == "cross_check":
            continue
        union = path[: branches[0].depth] if branches else ()
        written = _value_at(value, path)
        if remedy := WITHDRAWN.get((dotted(path), str(written))):
            text = f"is {written}; 0.1.0 is the last release that trains and reads it; {remedy}"
            mistake = Mistake(path, text, at_key=False)
        elif branches and not _is_right_branch(branches[0], _value_at(value, union)):
            choices = EITHER.get(dotted(union)) or EITHER[str(union[-1])]
            text = _wanted_instead(union, choices, _value_at(value, union))
            mistake = Mistake(union, text, at_key=False)
        else:
            mistake = _mistake(error, path, value)
        mistakes.setdefault((mistake.path, mistake.text), mistake)
    # A union whose right branch has its own mistake needs no second message at the union itself.
    specific = [mistake.path for mistake in mistakes.values() if not _is_either(mistake)]
    kept = [
        mistake
        for mistake in mistakes.values()
        if not _is_either(mistake) or not any(path[: len(mistake.path)] == mistake.path for path in specific)
    ]
    # A misspelt key is reported as unknown. Do not report it as missing too.
    return [mistake for mistake in kept if not _is_misspelt_elsewhere(mistake, kept)]


def _is_misspelt_elsewhere(missing: Mistake, others: Sequence[Mistake]) -> bool:
    """Whether a missing key is present under a wrong name, which has a message of its own."""
    named = re.compile(rf"(did you mean|write) {re.escape(dotted(missing.path))}(?![.\w])")
    return missing.text.startswith(MISSING) and any(other.at_key and named.search(other.text) for other in others)


def unknown_key(path: Path) -> str:
    """The message about a key that this section does not have."""
    name, section = str(path[-1]), path[:-1]
    known, everywhere = keys_of(section), list(_all_paths(Recipe, ()))
    elsewhere = [dotted(p) for p in everywhere if p[-1] == name]
    answer = answer_for(name)
    if elsewhere:  # learning_rate outside training
        text = f"belongs elsewhere; write {' or '.join(elsewhere)}"
        if answer and not any(place in answer for place in elsewhere):
            text += f", or, as another tool means it, {answer}"
        return text
    if answer:
        return f"is another tool's key; {answer}"
    close = difflib.get_close_matches(name, known, 1, 0.55)
    if close:  # a misspelt key of this section
        return f"is unknown; did you mean {dotted((*section, close[0]))}?"
    far = difflib.get_close_matches(name, [str(p[-1]) for p in everywhere], 1, 0.75)
    if far:  # a misspelt key of another section
        place = next(p for p in everywhere if p[-1] == far[0])
        return f"is unknown; did you mean {dotted(place)}?"
    return f"is unknown; the keys here are {', '.join(known)}"


def keys_of(section: Path) -> list[str]:
    """The keys in the section at a recipe path."""
    return list(_section_at(section).model_fields)


def _section_at(path: Path) -> type[BaseModel]:
    """The section at a path. If a key takes a section or a list of sections, a number in the path means the list."""
    model: type[BaseModel] = Recipe
    for index, part in enumerate(path):
        if isinstance(part, str) and part in model.model_fields:
            inner = list(_models(model.model_fields[part].annotation))
            in_list = index + 1 < len(path) and isinstance(path[index + 1], int)
            fitting = [section for section in inner if (section is DataSet) == in_list]
            model = next(iter([*fitting, *inner]), model)
    return model


def section_models(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections inside a section; a list's are named like `data.train[]`."""
    for name, info in model.model_fields.items():
        for inner in list(_models(info.annotation))[:1]:
            yield f"{name}[]" if inner is DataSet else name, inner


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The section classes inside an annotation such as `EvalFraction | list[DataSet] | None`."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        if issubclass(annotation, BaseModel):
            yield annotation
        return
    for argument in typing.get_args(annotation):
        yield from _models(argument)


def _all_paths(model: type[BaseModel], above: Path) -> Iterator[Path]:
    """Every key in a section and in the sections below it; a list is shown by its first element."""
    for name, info in model.model_fields.items():
        path: Path = (*above, name)
        yield path
        for inner in list(_models(info.annotation))[:1]:
            if inner is DataSet:
                path = (*path, 0)
            yield from _all_paths(inner, path)


@dataclass(frozen=True)
class _Branch:
    """A union's branch in pydantic's location, and the depth of the union in the recipe."""

    label: str
    depth: int


def _recipe_path(error: ErrorDetails, value: Any) -> tuple[Path, list[_Branch]]:
    """pydantic's location without the names of union branches, because no recipe has them.

    `('data', 'eval', 'EvalFraction', 'fraction')` is data.eval.fraction, with the branch EvalFraction at depth 2.
    """
    path: list[str | int] = []
    branches: list[_Branch] = []
    current = value
    location = error["loc"]
    for index, part in enumerate(location):
        last_and_absent = index == len(location) - 1 and error["type"] == "missing"
        # pydantic names a union's branch directly after the union's own key.
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


def _is_right_branch(branch: _Branch, value: Any) -> bool:
    """Whether the value is of the branch's kind. Only then do the branch's own mistakes help."""
    if branch.label.startswith("list["):
        return isinstance(value, list)
    is_section = branch.label[:1].isupper()  # a class's name, such as EvalFraction
    return is_section and isinstance(value, dict) and "path" not in value  # with `path` a data set outside a list


def _value_at(value: Any, path: Path) -> Any:
    """The value at a path; None if there is none."""
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value


def _is_union(path: Sequence[str | int]) -> bool:
    return bool(path) and (dotted(tuple(path)) in EITHER or path[-1] in EITHER)


def _is_either(mistake: Mistake) -> bool:
    return any(f"must be {expected}" in mistake.text for expected in EITHER.values())


def _mistake(error: ErrorDetails, path: Path, value: Any) -> Mistake:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return Mistake(path, unknown_key(path), at_key=True)
    if kind == "missing":
        addition = EXAMPLES.get(dotted(path)) or EXAMPLES.get(str(path[-1]), "...")
        return Mistake(path, f"{MISSING}add {path[-1]}: {addition}", at_key=True)
    written = _value_at(value, path)
    if kind == "literal_error":
        return Mistake(path, _wrong_choice(written, re.findall(r"'([^']*)'", context["expected"])), at_key=False)
    if kind in BOUNDS:
        bound, word = BOUNDS[kind]
        return Mistake(path, f"is {shown(written)}; it must be {word} {in_digits(context[bound])}", at_key=False)
    if kind in ("too_short", "string_too_short"):
        return Mistake(path, "is empty; name at least one", at_key=False)
    expected = WANTED.get(kind, "another kind of value")
    example = EXAMPLES.get("row source" if isinstance(path[-1], int) else dotted(path))
    if example and kind in ("list_type", "model_type"):
        expected += f", such as {example}"
    return Mistake(path, _wanted_instead(path, expected, written), at_key=False)


def _wanted_instead(path: Path, expected: str, written: Any) -> str:
    """`is X; it must be Y`, with the text to write if that is clear."""
    if written is None:
        text = f"is empty; it must be {expected}"
        info = _section_at(path[:-1]).model_fields.get(str(path[-1]))
        if info is not None and not info.is_required():
            text += ", or remove the line for the default"
        return text
    text = f"is {shown(written)}; it must be {expected}"
    if hint := _hint(path, expected, written):
        text += f"; {hint}"
    return text


def _hint(path: Path, expected: str, written: Any) -> str | None:
    """The text to write instead of a wrongly typed value, if that is clear."""
    if expected.startswith("true") and str(written).lower() in TRUTH_WORDS:
        if isinstance(plain_scalar(str(written)), bool):  # "true"; but tRUE is a text without quotes too
            return "remove the quotes"
        return f"{shown(written)} is not a truth value, write {TRUTH_WORDS[str(written).lower()]}"
    if expected == "text" and isinstance(written, (bool, int, float)):  # revision: 1.0
        return f'{IN_QUOTES} "{shown(written)}"'
    if "number" in expected and isinstance(written, str):  # learning_rate: "2e-4"
        return number_trap(written) or "write digits, without units or expressions"
    if expected == "a whole number" and isinstance(written, float) and written.is_integer() and abs(written) < 1e15:
        return f"write {int(written)}"
    if "section" in expected and isinstance(written, bool):  # lora: true
        if written:
            return "write {} for the defaults"
        if dotted(path) in ("lora", "quantization"):
            return "write null for none"
    if expected in EITHER.values() and isinstance(written, str):
        for near in difflib.get_close_matches(written.lower(), re.findall(r"[a-z][\w-]+", expected), 1, 0.7):
            return f"did you mean {near}?"
    return None


def _wrong_choice(written: Any, choices: list[str]) -> str:
    if written is None:
        return f"is empty; choose one of {', '.join(choices)}"
    word = shown(written).lower()
    close = [*other_word_for(word, choices), *difflib.get_close_matches(word, choices, 1, 0.5)]
    suggestion = f"did you mean {close[0]}? " if close else ""
    return f"is {shown(written)}; {suggestion}choose one of {', '.join(choices)}"
