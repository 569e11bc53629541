"""Generates the JSON Schema for editors and the reference page from the typed recipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from finetune.errors import EnvironmentMismatch
from finetune.paths import CHECKOUT, PACKAGE
from finetune.recipe.foreign_keys import answer_for, answers
from finetune.recipe.mistakes import section_models
from finetune.recipe.schema import Recipe

SCHEMA_FILE = PACKAGE / "recipe.schema.json"
REFERENCE_FILE = CHECKOUT / "docs" / "recipe.md"
# Each key that `auto` is a value of, and the one function that decides it.
AUTO = {
    "model.dtype": "training.start.choose_formats",
    "model.attention": "model.build.attention_name",
    "data.train[].format": "data.layout.layout_of",
    "training.per_device_batch_size": "closed_form.recomputation.choose_recomputation",
    "training.mixed_precision": "training.start.choose_formats",
    "training.activation_checkpointing": "closed_form.recomputation.choose_recomputation",
    "training.compile": "architecture.compiled.layers.compile_as_asked",
    "training.resume": "run_folder.folder.claim_run_folder",
}
BOUND_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def json_schema() -> str:
    """The JSON Schema that editors read through the first line of a recipe."""
    schema = Recipe.model_json_schema()
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**head, **schema, "title": "finetune recipe"}, indent=2) + "\n"


REFERENCE_HEAD = """# Recipe reference

Generated from `finetune/recipe/schema.py` by `finetune check --schema`.

A recipe is one YAML page. `finetune check RECIPE` names every mistake in it by line and column, and
`finetune check RECIPE --resolved` prints every value and where it came from. `key=value` after the recipe's name wins
over the recipe: `training.seed=7`, `data.train.0.path=csv`, `lora=null`, `'data.eval={fraction: 0.1}'`.

Numbers may be written `2e-4`. Only `true` and `false` are truth values, so `mixed_precision: no` needs no quotes.
"""


def reference_page() -> str:
    """docs/recipe.md: every key with its values, default and meaning, and other tools' names."""
    foreign = [f"| `{key}` | {answer_for(key)} |" for key in sorted([*answers("ours"), *answers("instead")])]
    table = ["## Keys of other tools", "", "| theirs | here |", "|---|---|", *foreign, ""]
    return "\n".join([REFERENCE_HEAD, *_sections(Recipe, ""), *table])


def _sections(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """A table for the section, then those of its own sections."""
    yield f"## {prefix or 'Top level'}\n"
    yield f"{(model.__doc__ or '').strip()}\n"
    yield "| key | takes | default | meaning |\n|---|---|---|---|"
    properties = model.model_json_schema()["properties"]
    for name, info in model.model_fields.items():
        default = "required"
        if not info.is_required():
            text = "{}"  # a section: each of its keys has a default
            if "default" in properties[name]:
                text = yaml.safe_dump(properties[name]["default"], default_flow_style=True, width=10**6)
                text = text.removesuffix("\n").removesuffix("...").strip().replace("|", "\\|")
            default = f"`{text}`"
        meaning = info.description
        if place := AUTO.get(f"{prefix}.{name}"):
            meaning = f"{meaning} `auto` is decided by `{place}`."
        yield f"| `{name}` | {_takes(properties[name])} | {default} | {meaning} |"
    yield ""
    for name, inner in section_models(model):
        yield from _sections(inner, f"{prefix}.{name}" if prefix else name)


def _takes(schema: dict[str, Any]) -> str:
    """A key's values in words, from its JSON Schema."""
    if "anyOf" in schema:
        return ", or ".join(dict.fromkeys(map(_takes, schema["anyOf"])))
    if "enum" in schema:
        return " ".join(f"`{choice}`" for choice in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "pattern" in schema:
        return f"`{schema['pattern'].strip('^$')}`"
    if schema.get("type") == "array":
        return f"a list of {'sections' if '$ref' in schema['items'] else 'texts'}"
    words = {
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "null": "null",
        "string": "text",
    }
    # A reader learns nothing from 2**31 - 1.
    limits = {key: schema[key] for key in BOUND_SIGNS if abs(schema.get(key, 2**31)) < 2**31 - 1}
    bounds = [f"{BOUND_SIGNS[key]} {limit:g}" for key, limit in limits.items()]
    return " ".join([words.get(schema.get("type", ""), "section"), *bounds])


def write_generated() -> list[Path]:
    """Write both files again; returns their paths. Raises EnvironmentMismatch outside a checkout."""
    if not REFERENCE_FILE.parent.is_dir():
        raise EnvironmentMismatch(f"--schema: {REFERENCE_FILE.parent} is not there; run it in a checkout")
    for path, text in ((SCHEMA_FILE, json_schema()), (REFERENCE_FILE, reference_page())):
        path.write_text(text, encoding="utf-8")
    return [SCHEMA_FILE, REFERENCE_FILE]
