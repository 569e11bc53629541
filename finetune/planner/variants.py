"""Changes to a recipe, as `key=value` that can be pasted, the cheapest first; all keep `global_batch_size`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import Any

from pydantic import ValidationError

from finetune.closed_form.rank import cached_strategy
from finetune.recipe.gpus import Gpus
from finetune.recipe.optimizers import OPTIMIZERS, for_shards
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.training import RECOMPUTATIONS

Changes = dict[str, Any]  # dotted key -> value
SHORTEST = 512  # tokens; shorter rows are not proposed


@dataclass(frozen=True)
class Option:
    """One setting of one knob."""

    changes: tuple[tuple[str, Any], ...]
    cost: int  # relative; variants are ordered by the sum
    says: str  # what it costs or brings


@dataclass(frozen=True)
class Variant:
    """A recipe with some changes."""

    recipe: Recipe
    changes: Changes
    cost: int
    says: tuple[str, ...]

    def words(self) -> str:
        """As on the command line."""
        return " ".join(f"{key}={plain(value)}" for key, value in self.changes.items())


NOTHING = Option((), 0, "")


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with dotted keys set. Raises pydantic's ValidationError where they contradict each other."""
    values = recipe.model_dump(mode="python")
    for key, value in changes.items():
        *path, leaf = key.split(".")
        section = values
        for name in path:
            section[name] = dict(section[name] or {})
            section = section[name]
        section[leaf] = value
    return Recipe.model_validate(values)


def smaller_variants(recipe: Recipe, gpus: Gpus) -> list[Variant]:
    """Every combination of changes that lower a recipe's memory, the cheapest first; without the recipe itself."""
    knobs = [list(knob) for knob in _knobs(recipe, gpus)]
    result = []
    for options in product(*knobs):
        chosen = [option for option in options if option is not NOTHING]
        keys = [key for option in chosen for key, _ in option.changes]
        if len(keys) > len(set(keys)):  # two options set one key
            continue
        changes = {key: value for option in chosen for key, value in option.changes}
        if "lora" in changes and "quantization" in changes:
            changes["quantization"], changes["lora"] = changes.pop("quantization"), changes.pop("lora")
        if not chosen or (recipe.lora is None and "lora" not in changes and "quantization" in changes):
            continue
        try:
            variant = changed(recipe, changes)
        except ValidationError:
            continue
        cost = sum(option.cost for option in chosen)
        result.append(Variant(variant, changes, cost, tuple(option.says for option in chosen)))
    return sorted(result, key=lambda variant: (variant.cost, len(variant.changes)))


def _knobs(recipe: Recipe, gpus: Gpus) -> Iterator[list[Option]]:
    """The settings that can be changed. Costs put those that leave the training's result as it is before the others."""
    training, strategy = recipe.training, cached_strategy(recipe.accelerate_config)
    yield [NOTHING, *_batches(training.per_device_batch_size)]
    yield [NOTHING, *_recomputing(training.activation_checkpointing)]
    if gpus.count * gpus.nodes > 1:
        yield [NOTHING, *_sharding(recipe, strategy.name)]
    smaller = OPTIMIZERS[training.optim].smaller
    if smaller and recipe.lora is None and not strategy.uses_engine:
        title = OPTIMIZERS[training.optim].title
        yield [NOTHING, _set("training.optim", smaller, 7, f"{title}'s moments in 8 bits")]
    if recipe.quantization is None:
        yield [NOTHING, _four_bit(recipe)]
    if not training.pure_bf16 and training.mixed_precision == "bf16":
        says = "weights and their state in bfloat16, rounded at random"
        if OPTIMIZERS[training.optim].library(sharded=strategy.shards_modules) == "bitsandbytes":
            says = "weights in bfloat16, where small updates round away"
        yield [NOTHING, _set("training.pure_bf16", True, 14 if recipe.lora is None else 9, says)]
    if recipe.lora is None:
        yield [NOTHING, Option((("lora", {}), ("training.learning_rate", 2e-4)), 18, "adapters instead of all weights")]
    halves = [recipe.data.max_length // 2, recipe.data.max_length // 4]
    shorter = [_set("data.max_length", tokens, 24, "shorter rows") for tokens in halves if tokens >= SHORTEST]
    yield [NOTHING, *shorter[:1], *(replace(option, cost=48) for option in shorter[1:])]


def larger_variants(recipe: Recipe, gpus: Gpus, longest: int) -> Iterator[Variant]:
    """Uses of spare memory, one change each; of rows and lengths the largest first."""
    training, strategy = recipe.training, cached_strategy(recipe.accelerate_config)
    ranks = strategy.rank_count(gpus.count * gpus.nodes)
    most = -(-training.global_batch_size // ranks)
    options = [
        _set("training.activation_checkpointing", False, 0, "no recomputation: a quarter less compute"),
        _set("training.activation_checkpointing", "selective", 0, "products and attention are computed once"),
        _set("training.activation_checkpointing", 2, 0, "recomputation of every other layer alone"),
        *(_set("accelerate_config", name, 0, "less traffic") for name in ("ddp", "fsdp2_grad_op")),
        *(_set("training.per_device_batch_size", n, 0, "fewer, larger micro-batches") for n in _powers(most)),
        *(_set("data.max_length", n, 0, "longer rows") for n in _powers(longest)),
        _set("quantization", None, 0, "base weights that are not rounded"),
        _set("training.pure_bf16", False, 0, "trained weights and their state in float32"),
    ]
    for option in options:
        key, value = option.changes[0]
        before: Any = reduce(getattr, key.split("."), recipe)
        larger_number = isinstance(value, int) and not isinstance(value, bool) and key.endswith(("size", "length"))
        allowed = {
            "training.activation_checkpointing": _recomputed(value) < _recomputed(training.activation_checkpointing),
            "accelerate_config": strategy.name == "fsdp2" or (strategy.name == "fsdp2_grad_op" and value == "ddp"),
            "quantization": recipe.quantization is not None,
            "training.pure_bf16": training.pure_bf16,
        }
        if value != before and (value > before if larger_number else allowed[key]):
            yield Variant(changed(recipe, dict(option.changes)), dict(option.changes), 0, (option.says,))


def _recomputing(now: bool | int | str) -> Iterator[Option]:
    """More recomputation than now."""
    for value, cost, says in (
        ("selective", 3, "all but products and attention is computed twice"),
        (True, 4, "a third more compute"),
    ):
        if _recomputed(value) > _recomputed(now):
            yield _set("training.activation_checkpointing", value, cost, says)


def _recomputed(setting: bool | int | str) -> int:
    """The place of a setting among RECOMPUTATIONS; of any number of layers that of 2, of auto the last."""
    if setting == "auto" or int(setting == 1):
        return len(RECOMPUTATIONS) - 1
    return RECOMPUTATIONS.index(setting if setting in RECOMPUTATIONS else 2)


def _powers(most: int) -> list[int]:
    """Powers of two up to `most`, the largest first."""
    return [2**exponent for exponent in range(most.bit_length() - 1, -1, -1)]


def _sharding(recipe: Recipe, now: str) -> Iterator[Option]:
    """Weights sharded over the GPUs, or offloaded to host memory; with the settings that sharded strategies require."""
    along: list[tuple[str, Any]] = []
    if recipe.quantization is not None and recipe.quantization.load_in_4bit:
        along.append(("quantization.bnb_4bit_quant_storage", recipe.quantization.bnb_4bit_compute_dtype))
    if for_shards(recipe.training.optim) != recipe.training.optim:
        along.append(("training.optim", for_shards(recipe.training.optim)))
    if now != "fsdp2_offload":
        if now != "fsdp2":
            yield Option((("accelerate_config", "fsdp2"), *along), 5, "weights travel twice a micro-batch")
        yield Option(
            (("accelerate_config", "fsdp2_offload"), *along), 13, "weights wait in host memory, and AdamW runs there"
        )


def _batches(rows: int) -> list[Option]:
    """Half as many rows, down to one; each halving costs one more."""
    halves = [rows >> cost for cost in range(1, rows.bit_length())]
    why = "more, smaller micro-batches"
    return [_set("training.per_device_batch_size", half, cost, why) for cost, half in enumerate(halves, 1)]


def _four_bit(recipe: Recipe) -> Option:
    """Stored in the computation's number format, which sharded strategies require and others accept."""
    compute = "float16" if recipe.training.mixed_precision == "fp16" else "bfloat16"
    value = {"load_in_4bit": True, "bnb_4bit_compute_dtype": compute, "bnb_4bit_quant_storage": compute}
    return Option((("quantization", value),), 8, "base weights rounded to 4 bits")


def _set(key: str, value: Any, cost: int, says: str) -> Option:
    return Option(((key, value),), cost, says)


def plain(value: Any) -> str:
    """A value as in YAML, in one line."""
    if isinstance(value, dict):
        inner = ", ".join(f"{key}: {plain(each)}" for key, each in value.items())
        return "'{" + inner + "}'"
    return value if isinstance(value, str) else json.dumps(value)
