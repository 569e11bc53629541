"""What is generated from the typed recipe: the JSON Schema for editors and the reference page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from finetune.recipe import Recipe
from finetune.recipe_mistakes import section_models

ROOT = Path(__file__).resolve().parent
SCHEMA_FILE = ROOT / "recipe.schema.json"
REFERENCE_FILE = ROOT.parent / "docs" / "recipe.md"


def json_schema() -> str:
    """The JSON Schema that editors read through the first line of a recipe."""
    schema = Recipe.model_json_schema()
    training = schema["$defs"]["Training"]["properties"]
    same = {"description": "The same key as activation_checkpointing."}
    training["gradient_checkpointing"] = {**training["activation_checkpointing"], **same}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**head, **schema, "title": "finetune recipe"}, indent=2) + "\n"


def reference_page() -> str:
    """docs/recipe.md: every key with its default and meaning."""
    lines = ["# Recipe reference", "", "Generated from `finetune/recipe.py` by `finetune check --schema`.", ""]
    return "\n".join([*lines, *_sections(Recipe, "")])


def _sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    yield f"## {prefix or 'Top level'}\n"
    yield f"{(model.__doc__ or '').strip()}\n"
    yield "| key | default | meaning |\n|---|---|---|"
    properties = model.model_json_schema()["properties"]
    for name, info in model.model_fields.items():
        default = "required" if info.is_required() else _written(properties[name].get("default", "its section's"))
        yield f"| `{name}` | `{default}` | {info.description} |"
    yield ""
    for name, inner in section_models(model):
        yield from _sections(inner, f"{prefix}.{name}" if prefix else name)


def _written(value: Any) -> str:
    """A default as a recipe would write it."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("...").strip().replace("|", "\\|")


def write_generated() -> list[Path]:
    """Write both files again; returns their paths."""
    for path, text in ((SCHEMA_FILE, json_schema()), (REFERENCE_FILE, reference_page())):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [SCHEMA_FILE, REFERENCE_FILE]
