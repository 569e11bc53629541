"""What the Hub demands of a model card's metadata: the rules of its public specification that a card of ours meets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

NAME = re.compile(r"[\w.-]+/[\w.-]+")
TASKS = ("text-generation", "text-classification", "feature-extraction")


def card_mistakes(content: str) -> list[str]:
    """What is wrong with the metadata at the head of a README.md; nothing when all is right."""
    try:
        values = card_values(content)
    except yaml.YAMLError as error:
        return [f"the metadata is no YAML: {error}"]
    return list(_mistakes(values)) if isinstance(values, dict) else ["the metadata must be a mapping"]


def card_values(content: str) -> Any:
    """The metadata at the head of a README.md."""
    found = re.match(r"\A---\r?\n(.*?)\r?\n---\r?\n", content, re.DOTALL)
    return (yaml.safe_load(found[1]) or {}) if found else {}


def _mistakes(values: dict[str, Any]) -> Iterator[str]:
    for key in ("base_model", "datasets"):
        for name in _texts(values.get(key)):
            if not isinstance(name, str) or (key == "base_model" and not NAME.fullmatch(name)):
                yield f'"{key}" with value {name!r} is not valid. It must be an id of the Hub.'
    for key in ("license", "license_name", "license_link", "library_name", "pipeline_tag"):
        if key in values and not isinstance(values[key], str):
            yield f'"{key}" must be a string'
    if values.get("license") == "other" and "license_name" not in values:
        yield '"license_name" is required where "license" is other'
    if "pipeline_tag" in values and values["pipeline_tag"] not in TASKS:
        yield f'"pipeline_tag" must be one of {", ".join(TASKS)}'
    if not all(isinstance(entry, str) for entry in values.get("tags", [])):
        yield '"tags" must be an array of strings'
    for model in values.get("model-index", []):
        yield from _index_mistakes(model)


def _texts(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _index_mistakes(model: dict[str, Any]) -> Iterator[str]:
    if not isinstance(model.get("name"), str):
        yield '"model-index[0].name" must be a string'
    for result in model.get("results", []):
        if not result.get("task", {}).get("type"):
            yield '"model-index[0].results[0].task.type" is required'
        if not {"type", "name"} <= set(result.get("dataset", {})):
            yield '"model-index[0].results[0].dataset" needs type and name'
        for metric in result.get("metrics", []):
            if not {"type", "value"} <= set(metric):
                yield '"model-index[0].results[0].metrics[0]" needs type and value'
