"""DeepSpeed's own keys that a strategy file may set in `deepspeed_config`, beside Accelerate's.

strategies/zero.py sets keys that a file leaves out, from the model. Our ranges are narrower than DeepSpeed's where it
accepts a value and fails later: a window of 0 divides by zero, a hysteresis of 0 never lowers the scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal

Where = Literal["zero_optimization", "fp16", "offload_optimizer", "offload_param"]


@dataclass(frozen=True)
class EngineKey:
    """One key: where DeepSpeed has it, its values, and the stages that read it."""

    where: Where
    kind: type[bool] | type[int] | type[float]
    least: float = 0
    most: float = inf
    stages: tuple[int, ...] = (1, 2, 3)
    even: bool = False
    deepspeed_name: str = ""  # if DeepSpeed's name is not the key itself

    @property
    def wants(self) -> str:
        """The key's values in words."""
        if self.kind is bool:
            return "true or false"
        number = "a number"
        if self.kind is int:
            number = "an even whole number" if self.even else "a whole number"
        text = f"{number} from {self.least:,.0f}"
        if isfinite(self.most):
            text += f" to {self.most:,.0f}"
        return text

    def read(self, value: Any) -> Any:
        """The value as DeepSpeed takes it; None if it takes no such value. YAML reads 5e8 as text."""
        if self.kind is bool and isinstance(value, bool):
            return value
        if self.kind is bool or isinstance(value, bool):
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            return None
        if not isfinite(number) or not self.least <= number <= self.most:
            return None
        if self.kind is float:
            return number
        if number != int(number) or (self.even and number % 2):
            return None
        return int(number)


ENGINE_KEYS: dict[str, EngineKey] = {
    "reduce_scatter": EngineKey("zero_optimization", bool),
    "allgather_partitions": EngineKey("zero_optimization", bool),
    "allgather_bucket_size": EngineKey("zero_optimization", int, least=2, even=True),
    "reduce_bucket_size": EngineKey("zero_optimization", int, least=1),
    "overlap_comm": EngineKey("zero_optimization", bool),
    "contiguous_gradients": EngineKey("zero_optimization", bool),
    "sub_group_size": EngineKey("zero_optimization", int, least=1, stages=(3,)),
    "loss_scale": EngineKey("fp16", float, most=2.0**32),
    "initial_scale_power": EngineKey("fp16", int, most=32),
    "loss_scale_window": EngineKey("fp16", int, least=1),
    "hysteresis": EngineKey("fp16", int, least=1),
    "min_loss_scale": EngineKey("fp16", int, least=1, most=2.0**32),
    "offload_optimizer_pin_memory": EngineKey("offload_optimizer", bool, deepspeed_name="pin_memory"),
    "offload_param_pin_memory": EngineKey("offload_param", bool, deepspeed_name="pin_memory"),
}
DYNAMIC = ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
_BESIDE = "write its keys beside zero_stage, as in docs/deepspeed_keys.md; remove the line"
# Keys of DeepSpeed's own configuration -> where to write their content.
OTHER_PLACES = dict.fromkeys(("deepspeed_config_file", "zero_optimization", "fp16"), _BESIDE)
INITIAL_SCALE_POWER = 16  # if a file names none; torch's GradScaler begins with it too


def engine_settings(section: Mapping[str, Any]) -> dict[Where, dict[str, Any]]:
    """The keys of a `deepspeed_config` in DeepSpeed's own sections, each value as DeepSpeed takes it."""
    keys: dict[Where, dict[str, Any]] = {}
    for name, key in ENGINE_KEYS.items():
        if name in section:
            keys.setdefault(key.where, {})[key.deepspeed_name or name] = key.read(section[name])
    return keys


def engine_mistakes(section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each wrong key in a `deepspeed_config`, and the problem with its value alone or beside the others."""
    values: dict[str, Any] = {}
    for name, key in ENGINE_KEYS.items():
        if name in section:
            values[name] = key.read(section[name])
            if values[name] is None:
                yield name, f"{section[name]!r}: write {key.wants}"
    for name, problem in _without_effect(values, section):
        yield name, f"{section[name]!r}: {problem}"


def _without_effect(values: Mapping[str, Any], section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Values without effect beside the others, and values that DeepSpeed 0.19 would silently replace."""
    stage = section.get("zero_stage")
    for name in values:
        if stage not in ENGINE_KEYS[name].stages:
            yield name, f"has no effect under zero_stage: {stage}; remove it"
    if values.get("allgather_partitions") is False:
        yield "allgather_partitions", "DeepSpeed gathers updated weights all the same; set true, or remove it"
    offloads = {what: section.get(f"offload_{what}_device") not in (None, "none") for what in ("optimizer", "param")}
    if values.get("contiguous_gradients") is False and offloads["optimizer"] and stage in (1, 2):
        yield "contiguous_gradients", "offload_optimizer_device needs contiguous gradients; set true, or remove it"
    for what, offloaded in offloads.items():
        if f"offload_{what}_pin_memory" in values and not offloaded:
            yield f"offload_{what}_pin_memory", f"has no effect without offload_{what}_device; remove one of them"
    if values.get("loss_scale"):
        for name in DYNAMIC:
            if name in values:
                yield name, "has no effect beside a static loss_scale; remove it, or set loss_scale: 0 (dynamic)"
    elif (values.get("min_loss_scale") or 0) > 2 ** (values.get("initial_scale_power") or INITIAL_SCALE_POWER):
        yield "min_loss_scale", "is above the first scale, 2 to the power of initial_scale_power; set it lower"


def engine_notes(section: Mapping[str, Any], mixed_precision: str) -> Iterator[str]:
    """A line for each group of keys that are right and change nothing in this run."""
    if "allgather_bucket_size" in section:
        yield "accelerate_config: allgather_bucket_size changes nothing: DeepSpeed gathers updated weights in one call"
    idle = [name for name, key in ENGINE_KEYS.items() if key.where == "fp16" and name in section]
    if idle and mixed_precision != "fp16":
        problem = f"only for training.mixed_precision: fp16; here it is {mixed_precision}"
        yield f"accelerate_config: {', '.join(idle)}: {problem}"
