"""Mistakes in a recipe: a code, the key, the problem, and the text to write instead.

pydantic finds the mistakes of single keys, and its kind of error is the code. Its messages name types and union
branches; ours name the text to write. A check of several keys brings its own words: schema.py, sections/ and names.py.
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

from finetune.errors import Mistake
from finetune.recipe.foreign_keys import answer_for, covers_key, key_for, line_of, other_word_for, owner_of
from finetune.recipe.schema import DataSet, Recipe
from finetune.recipe.yaml_text import Path, dotted, number_trap, plain_scalar, shown
from finetune.wording import in_digits


@dataclass(frozen=True)
class Either:
    """The values of a key that takes several kinds: a union in the schema."""

    text: str
    words: tuple[str, ...] = ()  # the plain words among the values
    takes_number: bool = False


INTERVAL = Either("a whole number of steps, at least 1, or a share of the run between 0 and 1", takes_number=True)
EITHER = {
    "data.eval": Either("{fraction: 0.05}, a list of data sets, or null"),
    "data_files": Either("a file or a list of files"),
    "target_modules": Either("all-linear, a pattern, or a list of at least one layer name", ("all-linear",)),
    "exclude_modules": Either("a pattern, or a list of names"),
    "activation_checkpointing": Either(
        "auto, true, false, selective, or n for every n-th layer", ("auto", "true", "false", "selective")
    ),
    "per_device_batch_size": Either("a whole number of rows, at least 1, or auto", ("auto",), takes_number=True),
    "compile": Either("true, false or auto", ("true", "false", "auto")),
    "init_lora_weights": Either("true, false, gaussian or orthogonal", ("true", "false", "gaussian", "orthogonal")),
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
    "value_error": "a whole path, because nobody here has the home folder that this ~ names",  # of `in_home`
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
NUMBERS = ("int_type", "int_from_float", "float_type", "finite_number")
TRUTH_WORDS = {
    **dict.fromkeys(("yes", "on", "y", "1", "true"), "true"),
    **dict.fromkeys(("no", "off", "n", "0", "false"), "false"),
}


def explain_mistake(errors: Sequence[ErrorDetails], value: Any) -> list[Mistake]:
    """One message for each mistake, in the order of the recipe's sections."""
    mistakes: list[Mistake] = []
    for error in errors:
        path, branches = _recipe_path(error, value)
        if error["type"] == "cross_check":
            for check in error["ctx"]["found"]:
                text = f"{check.problem}; {check.remedy}"
                mistakes.append(Mistake("cross_check", (*path, *check.key.split(".")), text))
            continue
        union = path[: branches[0].depth] if branches else ()
        written = _value_at(value, path)
        if remedy := WITHDRAWN.get((dotted(path), str(written))):
            text = f"is {written}; 0.1.0 is the last release that trains and reads it; {remedy}"
            mistakes.append(Mistake("withdrawn", path, text))
        elif branches and not _is_right_branch(branches[0], _value_at(value, union)):
            mistakes.append(_wrong_kind("either", union, _either(union).text, _value_at(value, union)))
        else:
            mistakes.append(_mistake(error, path, value))
    # pydantic reports a mistake once for each branch of a union. A union whose right branch has its own mistake needs
    # no second message at the union itself. A misspelt key is unknown, and is not missing too.
    specific = [mistake.path for mistake in mistakes if mistake.code != "either"]
    renamed = {key for mistake in mistakes if mistake.at_key for key in mistake.write}
    return [
        mistake
        for mistake in dict.fromkeys(mistakes)
        if not (mistake.code == "either" and any(path[: len(mistake.path)] == mistake.path for path in specific))
        and not (mistake.code == "missing" and mistake.key in renamed)
    ]


def unknown_key(path: Path) -> Mistake:
    """The mistake in a key that this section does not have."""
    name, section = str(path[-1]), path[:-1]
    known, everywhere = keys_of(section), list(_all_paths(Recipe, ()))
    elsewhere = [dotted(p) for p in everywhere if p[-1] == name]
    answer = answer_for(name)
    if elsewhere:  # learning_rate outside training
        text = f"belongs elsewhere; write {' or '.join(elsewhere)}"
        if answer and key_for(name) not in elsewhere:
            text += f", or, as another tool means it, {answer}"
        return Mistake("misplaced", path, text, at_key=True, write=(*elsewhere,))
    if answer:
        ours = key_for(name)
        write = (ours,) if ours else ()
        return Mistake("foreign", path, f"is {owner_of(name)}; {answer}", at_key=True, write=write)
    paths = [*((*section, key) for key in known), *everywhere]
    names = [str(p[-1]) for p in paths]
    # A line that covers a key of ours, as save_* covers save_steps, would hide misspelt ones.
    line = line_of(name)
    if line and not any(covers_key(line, ours) for ours in names):
        return Mistake("foreign", path, f"is {owner_of(name)}; {line.text}; remove the key", at_key=True)
    # A key of this section that is much like it (gpu: gpus), or that alone has it as a part (precision), else a key of
    # any section that is much like it (logging_step in training), else one of this section that is less like it.
    whole = [key for key in known if f"_{name}_" in f"_{key}_"]
    near = difflib.get_close_matches(name, known, 1, 0.75) or whole * (len(whole) == 1)
    near = near or difflib.get_close_matches(name, names, 1, 0.75) or difflib.get_close_matches(name, known, 1, 0.55)
    if near:
        meant = dotted(next(p for p in paths if p[-1] == near[0]))
        return Mistake("unknown", path, f"is unknown; did you mean {meant}?", at_key=True, write=(meant,))
    return Mistake("unknown", path, f"is unknown; the keys here are {', '.join(known)}", at_key=True)


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
        is_union = bool(path) and (dotted(tuple(path)) in EITHER or path[-1] in EITHER)
        if is_union and (not branches or branches[-1].depth < len(path)):
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


def _either(path: Path) -> Either:
    return EITHER.get(dotted(path)) or EITHER[str(path[-1])]


def _mistake(error: ErrorDetails, path: Path, value: Any) -> Mistake:
    code, context, written = error["type"], error.get("ctx", {}), _value_at(value, path)
    if code == "extra_forbidden":
        return unknown_key(path)
    if code == "missing":
        example = EXAMPLES.get(dotted(path)) or EXAMPLES.get(str(path[-1]), "...")
        return Mistake(code, path, f"is missing; add {path[-1]}: {example}", at_key=True)
    if code == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        listed = f"choose one of {', '.join(choices)}"
        if written is None:
            return Mistake(code, path, f"is empty; {listed}")
        word = shown(written).lower()
        close = [*other_word_for(word, choices), *difflib.get_close_matches(word, choices, 1, 0.5)][:1]
        suggestion = f"did you mean {close[0]}? " if close else ""
        return Mistake(code, path, f"is {shown(written)}; {suggestion}{listed}", write=(*close,))
    if code in BOUNDS:
        bound, word = BOUNDS[code]
        return Mistake(code, path, f"is {shown(written)}; it must be {word} {in_digits(context[bound])}")
    if code in ("too_short", "string_too_short"):
        return Mistake(code, path, "is empty; name at least one")
    expected = WANTED.get(code, "another kind of value")
    example = EXAMPLES.get("row source" if isinstance(path[-1], int) else dotted(path), "")
    if example and code in ("list_type", "model_type"):
        expected += f", such as {example}"
    return _wrong_kind(code, path, expected, written)


def _wrong_kind(code: str, path: Path, expected: str, written: Any) -> Mistake:
    """`is X; it must be Y`, with the text to write if that is clear."""
    if written is None:
        text = f"is empty; it must be {expected}"
        info = _section_at(path[:-1]).model_fields.get(str(path[-1]))
        if info is not None and not info.is_required():
            text += ", or remove the line for the default"
        return Mistake(code, path, text)
    hint, *write = _hint(code, path, written)
    return Mistake(
        code, path, f"is {shown(written)}; it must be {expected}" + f"; {hint}" * bool(hint), write=(*write,)
    )


def _hint(code: str, path: Path, written: Any) -> tuple[str, ...]:
    """The remedy for a value of a wrong kind, and the value to write; an empty remedy if that is not clear."""
    either = _either(path) if code == "either" else Either("")
    word = str(written).lower()
    if word in TRUTH_WORDS and (code == "bool_type" or "true" in either.words):
        truth = TRUTH_WORDS[word]
        if isinstance(plain_scalar(str(written)), bool):  # "true"; but tRUE is a text without quotes too
            return "remove the quotes", truth
        return f"{shown(written)} is not a truth value, write {truth}", truth
    if code == "string_type" and isinstance(written, (bool, int, float)):  # revision: 1.0
        return f'put it in quotes: "{shown(written)}"', f'"{shown(written)}"'
    if isinstance(written, str) and (code in NUMBERS or either.takes_number):  # learning_rate: "2e-4"
        return (number_trap(written) or "write digits, without units or expressions",)
    is_whole = isinstance(written, float) and written.is_integer() and abs(written) < 1e15
    if is_whole and code in ("int_type", "int_from_float"):
        return f"write {int(written)}", str(int(written))
    if code in ("dict_type", "model_type") and written is True:  # lora: true
        return "write {} for the defaults", "{}"
    if code in ("dict_type", "model_type") and written is False and dotted(path) in ("lora", "quantization"):
        return "write null for none", "null"
    if isinstance(written, str) and (near := difflib.get_close_matches(word, either.words, 1, 0.7)):
        return f"did you mean {near[0]}?", near[0]
    return ("",)
