"""Low-rank adapters: the layers that get one, its rank, and its initial values.

A pattern finds a path by peft's own rules, without peft.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from finetune.recipe.sections.base import Count, CrossCheck, Section, refuse

INITS = "peft's initialisation: true, false, gaussian or orthogonal."
Scale = Annotated[float, Field(gt=0)]
Value = TypeVar("Value")


class Lora(Section):
    """Low-rank adapters; the keys are peft's own."""

    r: Count = Field(16, description="Rank.")
    lora_alpha: float = Field(32, gt=0, description="Scale; the update is multiplied by lora_alpha / r.")
    rank_pattern: dict[str, Count] = Field(
        {}, description="Other ranks by name or pattern: {q_proj: 8}. The first that fits a path's end counts."
    )
    alpha_pattern: dict[str, Scale] = Field({}, description="Other lora_alpha by name or pattern.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: str | list[str] = Field(
        "all-linear", description="Layers that get an adapter: all-linear, a pattern, or a list of names."
    )
    target_parameters: list[str] | None = Field(
        None, description="Parameters too: a mixture's experts as [mlp.experts.gate_up_proj, mlp.experts.down_proj]."
    )
    exclude_modules: str | list[str] = Field([], description="Layers that get none: a pattern, or a list of names.")
    modules_to_save: list[str] = Field([], description="More modules, trained in full and saved with the adapter.")
    use_rslora: bool = Field(False, description="Scale by lora_alpha / sqrt(r).")
    use_dora: bool = Field(False, description="Train magnitude and direction separately (DoRA).")
    init_lora_weights: bool | Literal["gaussian", "orthogonal"] = Field(True, description=INITS)
    loraplus_lr_ratio: float | None = Field(
        None, ge=1, description="LoRA+: B's learning rate as a multiple of A's, learning_rate; null: one rate."
    )

    @model_validator(mode="after")
    def layers_by_name(self) -> Lora:
        refuse(_lora_mistakes(self))
        return self

    def rank_of(self, path: str) -> int:
        """The adapter's rank on the module or parameter with this path."""
        return by_pattern(self.rank_pattern, path, self.r)

    @property
    def names_single_layers(self) -> bool:
        """Whether some name holds a number, so that layers may get different adapters.

        The number stands alone: 7.mlp.experts, layers.(0|1), [0-3]; not w1 and not dense_4h.
        """
        names: list[str] = [*self.rank_pattern, *self.alpha_pattern, *(self.target_parameters or [])]
        for value in (self.target_modules, self.exclude_modules):
            names += [value] if isinstance(value, str) else value
        return any(re.search(r"(?<!\w)\d", name) for name in names)


def by_pattern(patterns: Mapping[str, Value], path: str, default: Value) -> Value:
    """The value of the first pattern that fits the end of `path`. Source: peft/utils/other.py, get_pattern_key."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default


def ends_of(paths: Iterable[str], name: str) -> list[str]:
    """The paths that a list's name matches: the name itself, or a path that ends with a dot and the name."""
    return [path for path in paths if path == name or path.endswith(f".{name}")]


def without_adapters(lora: Lora) -> Iterator[tuple[str, str]]:
    """Settings, with their values, that peft offers for layers but not for parameters.

    Source: tuners/lora/layer.py, ParamWrapper.
    """
    if lora.lora_dropout:
        yield "lora_dropout", f"{lora.lora_dropout:g}"
    if lora.use_dora:
        yield "use_dora", "true"
    if lora.init_lora_weights == "orthogonal":
        yield "init_lora_weights", "orthogonal"


def _lora_mistakes(lora: Lora) -> Iterator[CrossCheck]:
    """Targets and patterns that cannot be valid, and settings that target_parameters do not have."""
    targets = lora.target_modules
    # A misspelt all-linear would be a pattern that matches no layer.
    if targets != "all-linear" and re.fullmatch(r"all[-_ ]?linear", str(targets), re.I):
        yield CrossCheck("target_modules", f"is {targets}, which names no layer", "write all-linear")
    if not targets and not lora.target_parameters:
        remedy = "write all-linear, a pattern, or a list of at least one layer name"
        yield CrossCheck("target_modules", "names no layer", remedy)
    # The keys of both patterns are regular expressions. Names in lists are not.
    patterns = [("rank_pattern", key) for key in lora.rank_pattern]
    patterns += [("alpha_pattern", key) for key in lora.alpha_pattern]
    if isinstance(lora.exclude_modules, str):
        patterns.insert(0, ("exclude_modules", lora.exclude_modules))
    for place, pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            yield CrossCheck(place, f"{pattern} is not a pattern ({error})", "write a name, or correct the pattern")
    if lora.target_parameters:
        defaults = {"init_lora_weights": "true", "use_dora": "false", "lora_dropout": "0"}
        for key, value in without_adapters(lora):
            problem = f"is {value}, which peft does not offer for lora.target_parameters"
            yield CrossCheck(key, problem, f"set it to {defaults[key]}, or target_parameters: []")
