"""A loaded recipe: where its values came from, its leaves with their paths, and its text with every key."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import yaml

from finetune.recipe.mixed_precision import BASE_FORMAT, PRECISION, ChosenFormats, FastestFormat, without_auto
from finetune.recipe.schema import Recipe
from finetune.recipe.yaml_text import Path, dotted, plain_scalar

# The lists whose elements are leaves, or hold some. Another list is itself a leaf.
OpenedLists = Literal["none", "with mappings", "all"]


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe, and where its values came from."""

    recipe: Recipe
    origins: dict[str, str]  # dotted key -> default | recipe | command line
    path: pathlib.Path
    auto_formats: tuple[str, ...] = ()  # number-format keys set to auto; the recipe holds the values that replace it

    def formats_for(self, fastest: FastestFormat) -> tuple[LoadedRecipe, ChosenFormats]:
        """The recipe without `auto`, for a device, and the choice."""
        if not self.auto_formats:
            return self, ChosenFormats((), {}, "")
        values: dict[str, Any] = self.recipe.model_dump()
        for key in self.auto_formats:
            section, name = key.split(".")
            values[section][name] = "auto"
        chosen = without_auto(values, fastest.precision)
        formats = {PRECISION: chosen["training"]["mixed_precision"], BASE_FORMAT: chosen["model"]["dtype"]}
        why = fastest.why
        if PRECISION in self.auto_formats and formats[PRECISION] != fastest.precision:
            why = "of training.pure_bf16" if self.recipe.training.pure_bf16 else "of quantization"
        return self.with_formats(formats, why)

    def with_formats(
        self, values: Mapping[str, str], why: str, *, kept: bool = False
    ) -> tuple[LoadedRecipe, ChosenFormats]:
        """The recipe with these formats instead of `auto`, and the choice."""
        recipe, chosen = self.recipe, {key: values[key] for key in self.auto_formats}
        if PRECISION in chosen:
            training = recipe.training.model_copy(update={"mixed_precision": chosen[PRECISION]})
            recipe = recipe.model_copy(update={"training": training})
        if BASE_FORMAT in chosen:
            model = recipe.model.model_copy(update={"dtype": chosen[BASE_FORMAT]})
            recipe = recipe.model_copy(update={"model": model})
        return replace(self, recipe=recipe), ChosenFormats(self.auto_formats, chosen, why, kept)


def leaves(value: Any, path: Path = (), *, lists: OpenedLists = "with mappings") -> Iterator[tuple[Path, Any]]:
    """Every leaf in a nested value with its path of keys and indices, in order. An empty value is a leaf."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list):
        holds_mapping = any(isinstance(element, Mapping) for element in value)
        if lists == "all" or (lists == "with mappings" and holds_mapping):
            entries = list(enumerate(value))
    if not entries:
        yield path, value
    for key, inner in entries:
        yield from leaves(inner, (*path, key), lists=lists)


def resolved_yaml(loaded: LoadedRecipe) -> str:
    """The whole recipe, every key, with its origin as a comment; loads again as the same recipe."""
    origins, values = dict(loaded.origins), loaded.recipe.model_dump(mode="json")
    for key in loaded.auto_formats:
        origins[key] += ": auto"
    return "\n".join(_section_lines(values, (), origins)) + "\n"


def _section_lines(value: dict[str, Any], path: Path, origins: dict[str, str], item: bool = False) -> Iterator[str]:
    """A section's lines. `item`: it is a list's element, so its first line has a dash."""
    for index, (key, inner) in enumerate(value.items()):
        inner_path, lead = (*path, key), "  " * len(path)
        if item and index == 0:
            lead = lead[:-2] + "- "
        lead += _in_one_line(key)
        if isinstance(inner, dict) and inner:
            yield f"{lead}:"
            yield from _section_lines(inner, inner_path, origins)
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            yield f"{lead}:"
            for number, entry in enumerate(inner):
                yield from _section_lines(entry, (*inner_path, number), origins, item=True)
        else:
            yield f"{lead}: {_in_one_line(inner)}  # {origins[dotted(inner_path)]}"


def _in_one_line(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Writer, default_flow_style=True, width=2**30, allow_unicode=True)
    return str(text).removesuffix("\n").removesuffix("...").strip()


class _Writer(yaml.SafeDumper):
    """Writes values in one line, and quotes text that PyYAML takes for text and we for a number (1e5)."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        plain = plain_scalar(text) == text and not re.search("[\n\r\x85\u2028\u2029]", text)
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Writer.add_representer(str, _Writer.represent_text)
