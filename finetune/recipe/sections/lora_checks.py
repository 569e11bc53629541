"""Checks that values in `lora` fit together, and how its patterns find a path: peft's own rules, without peft."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from finetune.recipe.cross_checks import CrossCheck, refuse

if TYPE_CHECKING:
    from finetune.recipe.sections.lora import Lora

Value = TypeVar("Value")


def check_lora(lora: Lora) -> None:
    """Targets are names or patterns, and target_parameters go with the rest of the section."""
    refuse([*_target_mistakes(lora), *_pattern_mistakes(lora), *_parameter_mistakes(lora)])


def by_pattern(patterns: Mapping[str, Value], path: str, default: Value) -> Value:
    """The value of the first pattern that fits the end of `path`: peft's get_pattern_key (peft/utils/other.py)."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", path)), default)


def without_adapters(lora: Lora) -> Iterator[tuple[str, str]]:
    """Settings, with their values, that peft has for layers and not for parameters (tuners/lora/layer.py: ParamWrapper;
    its initialisations from the base read a layer's weight)."""
    if lora.lora_dropout:
        yield "lora_dropout", f"{lora.lora_dropout:g}"
    if lora.use_dora:
        yield "use_dora", "true"
    if lora.init_lora_weights in ("orthogonal", "olora", "pissa"):
        yield "init_lora_weights", str(lora.init_lora_weights)


def takes_from_the_base(init: str) -> bool:
    """Whether peft's initialisation with that name moves a part of the base into the adapter."""
    return init.startswith(("pissa", "olora"))


def names_single_layers(lora: Lora) -> bool:
    """A number that stands alone in a name or pattern: 7.mlp.experts, layers.(0|1), [0-3]; not w1 and not dense_4h."""
    names: list[str] = [*lora.rank_pattern, *lora.alpha_pattern, *(lora.target_parameters or [])]
    for value in (lora.target_modules, lora.exclude_modules):
        names += [value] if isinstance(value, str) else value
    return any(re.search(r"(?<!\w)\d", name) for name in names)


def _target_mistakes(lora: Lora) -> Iterator[CrossCheck]:
    """A misspelt all-linear would be a pattern that matches no layer."""
    targets = lora.target_modules
    if targets != "all-linear" and re.fullmatch(r"all[-_ ]?linear", str(targets), re.I):
        yield CrossCheck("target_modules", f"is {targets}, the name of no layer", "write all-linear")
    if not targets and not lora.target_parameters:
        remedy = "write all-linear, a pattern, or a list of at least one layer name"
        yield CrossCheck("target_modules", "names no layer", remedy)


def _pattern_mistakes(lora: Lora) -> Iterator[CrossCheck]:
    """Invalid regular expressions. The two patterns' keys are such, names in lists are not."""
    excluded = [("exclude_modules", lora.exclude_modules)] if isinstance(lora.exclude_modules, str) else []
    ranks = [("rank_pattern", key) for key in lora.rank_pattern]
    for place, pattern in (*excluded, *ranks, *(("alpha_pattern", key) for key in lora.alpha_pattern)):
        try:
            re.compile(pattern)
        except re.error as error:
            yield CrossCheck(place, f"{pattern} is not a pattern ({error})", "write a name, or correct the pattern")


def _parameter_mistakes(lora: Lora) -> Iterator[CrossCheck]:
    for key, value in without_adapters(lora) if lora.target_parameters else ():
        wanted = "true" if key == "init_lora_weights" else "false" if key == "use_dora" else "0"
        problem = f"is {value}, which peft does not offer for lora.target_parameters"
        yield CrossCheck(key, problem, f"set it to {wanted}, or target_parameters: []")


def ends_of(paths: Iterable[str], name: str) -> list[str]:
    """The paths that a list's name matches: the name itself, or a path that ends with a dot and the name."""
    return [path for path in paths if path == name or path.endswith(f".{name}")]
