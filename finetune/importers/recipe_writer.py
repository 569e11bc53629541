"""A recipe's page from dotted keys: in the recipe's own order, each line with where its value came from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finetune.importers.foreign_config import LeftOut, Level
from finetune.output_stream import printable
from finetune.recipe.schema import Budget, Data, Hub, Lora, ModelSection, Quantization, Recipe, Training
from finetune.recipe.yaml_text import plain_scalar, shorten

_WIDTH = 100  # a comment that would reach further gets its own line
_SECTIONS: dict[str, Any] = {
    "budget": Budget,
    "model": ModelSection,
    "quantization": Quantization,
    "lora": Lora,
    "data": Data,
    "training": Training,
    "hub": Hub,
}
HEADINGS: dict[Level, str] = {
    "differs": "Left out, and the training differs by it:",
    "look": "To look at:",
    "same": "Left out, without effect on what is learned:",
}


def page(title: Sequence[str], carried: Mapping[str, tuple[Any, str]], left_out: Sequence[LeftOut]) -> str:
    """The recipe: a header with `title` and the list of what was left out, then every line with its origin."""
    lines = [f"# {line}".rstrip() for line in (*title, *listed(left_out))]
    for name in Recipe.model_fields:
        if name in carried:
            value, why = carried[name]
            lines += _line("", name, value, why)
            continue
        section = [f"{name}.{key}" for key in getattr(_SECTIONS.get(name), "model_fields", ())]
        inner = [key for key in section if key in carried]
        if inner:
            lines.append(f"{name}:")
        for key in inner:
            lines += _line("  ", key.partition(".")[2], *carried[key])
    return "\n".join(lines) + "\n"


def listed(left_out: Sequence[LeftOut]) -> Iterator[str]:
    """The keys left out, by effect on the training, the strongest first; those without effect grouped by reason."""
    for level, heading in HEADINGS.items():
        entries = [entry for entry in left_out if entry.level == level]
        if entries:
            yield heading
        if level != "same":
            yield from (f"  {entry.key}: {_short(entry.value)} ({entry.reason})" for entry in entries)
            continue
        for reason in dict.fromkeys(entry.reason for entry in entries):
            yield f"  {reason}:"
            keys = [f"{entry.key}: {_short(entry.value)}" for entry in entries if entry.reason == reason]
            yield from _filled(keys)


def _filled(words: Sequence[str]) -> Iterator[str]:
    """The words in lines, as many in each as fit, none of them broken."""
    line = ""
    for word in words:
        if line and len(line) + len(word) > _WIDTH:
            yield f"{line},"
            line = ""
        line = f"{line}, {word}" if line else f"    {word}"
    yield line


def _short(value: Any) -> str:
    return shorten(printable(written(value)), 60)


def _line(indent: str, key: str, value: Any, why: str) -> Iterator[str]:
    comment = f"# {printable(why)}" if why != key else ""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        yield f"{indent}{key}:  {comment}"
        yield from (f"{indent}  - {written(entry)}" for entry in value)
        return
    text = f"{indent}{key}: {written(value)}"
    if not comment:
        yield text
    elif len(text) + len(comment) + 2 > _WIDTH:
        yield f"{indent}{comment}"
        yield text
    else:
        yield f"{text}  {comment}"


def written(value: Any) -> str:
    """A value in one line of YAML that every reader takes for the same."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{written(str(key))}: {written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(written(inner) for inner in value) + "]"
    if isinstance(value, float):  # YAML 1.1 reads 2e-05 as a text
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
    if isinstance(value, int):
        return str(value)
    plain = re.fullmatch(r"[A-Za-z0-9_./~-][A-Za-z0-9_./@+-]*", value) and plain_scalar(value) == value
    plain = plain and value.lower() not in ("yes", "no", "on", "off", "y", "n")  # YAML 1.1 reads truth values
    return value if plain else json.dumps(value, ensure_ascii=False)
