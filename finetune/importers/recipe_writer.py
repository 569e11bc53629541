"""A recipe's page from dotted keys: in the recipe's own order, each line with the key its value came from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from finetune.importers import LeftOut, Level
from finetune.output_stream import printable
from finetune.recipe.schema import Budget, Data, Dpo, Hub, Kto, Lora, ModelSection, Quantization, Recipe, Training
from finetune.recipe.yaml_text import plain_scalar, shorten

_WIDTH = 100  # a comment that would reach further gets its own line
_SECTIONS: dict[str, Any] = {
    "budget": Budget,
    "model": ModelSection,
    "quantization": Quantization,
    "lora": Lora,
    "data": Data,
    "training": Training,
    "dpo": Dpo,
    "kto": Kto,
    "hub": Hub,
}
HEADINGS: dict[Level, str] = {
    "differs": "Left out, and the training differs by it:",
    "look": "To look at:",
    "same": "Left out, without effect on the training:",
}


def page(title: Sequence[str], carried: Mapping[str, tuple[Any, str]], left_out: Sequence[LeftOut]) -> str:
    """The recipe: a header with `title` and the list of what was left out, then every line with its origin."""
    lines = [f"# {line}".rstrip() for line in (*title, *list_left_out(left_out))]
    for section in Recipe.model_fields:
        if section in carried:
            lines += _line("", section, *carried[section])
            continue
        names = getattr(_SECTIONS.get(section), "model_fields", ())
        present = [name for name in names if f"{section}.{name}" in carried]
        if present:
            lines.append(f"{section}:")
        for name in present:
            lines += _line("  ", name, *carried[f"{section}.{name}"])
    return "\n".join(lines) + "\n"


def list_left_out(left_out: Sequence[LeftOut]) -> Iterator[str]:
    """The keys left out, by effect on the training, the strongest first; keys without effect grouped by reason."""
    for level, heading in HEADINGS.items():
        entries = [entry for entry in left_out if entry.level == level]
        if entries:
            yield heading
        if level != "same":
            yield from (f"  {entry.key}: {_short(entry.value)} ({entry.reason})" for entry in entries)
            continue
        for reason in dict.fromkeys(entry.reason for entry in entries):
            yield f"  {reason}:"
            # As many entries on a line as fit; no entry is broken.
            line = ""
            for entry in entries:
                if entry.reason != reason:
                    continue
                text = f"{entry.key}: {_short(entry.value)}"
                if line and len(line) + len(text) > _WIDTH:
                    yield f"{line},"
                    line = ""
                line = f"{line}, {text}" if line else f"    {text}"
            yield line


def _short(value: Any) -> str:
    return shorten(printable(written(value)), 60)


def _line(indent: str, key: str, value: Any, origin: str) -> Iterator[str]:
    comment = f"# {printable(origin)}" if origin != key else ""
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
    if isinstance(value, float):  # YAML 1.1 reads 2e-05 as a text, and 2.0e-05 as a number
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
    if isinstance(value, int):
        return str(value)
    is_plain = re.fullmatch(r"[A-Za-z0-9_./~-][A-Za-z0-9_./@+-]*", value) and plain_scalar(value) == value
    text: str = value
    if is_plain and text.lower() not in ("yes", "no", "on", "off", "y", "n"):  # YAML 1.1 reads truth values
        return text
    return json.dumps(text, ensure_ascii=False)
