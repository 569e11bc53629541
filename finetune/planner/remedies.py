"""Changes that make a recipe fit, uses for spare memory, and the largest value of one size."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any, Protocol

from pydantic import ValidationError

from finetune.closed_form.estimate import estimate, unsupported
from finetune.closed_form.rank import cached_strategy
from finetune.errors import FinetuneError
from finetune.recipe.gpus import Gpus
from finetune.recipe.optimizers import OPTIMIZERS, PREFERENCE_RATES, for_shards
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.training import RECOMPUTATIONS

Changes = dict[str, Any]  # dotted key -> value
SHORTEST = 512  # tokens; shorter rows are not proposed


@dataclass(frozen=True)
class Option:
    """One setting of one knob."""

    changes: tuple[tuple[str, Any], ...]
    cost: int  # relative; variants are ordered by the sum
    says: str  # its cost or gain


@dataclass(frozen=True)
class Variant:
    """A recipe with some changes."""

    recipe: Recipe
    changes: Changes
    cost: int
    says: tuple[str, ...]

    def words(self) -> str:
        """The changes as on the command line."""
        return " ".join(f"{key}={plain(value)}" for key, value in self.changes.items())


NOTHING = Option((), 0, "")


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with dotted keys set. Raises pydantic's ValidationError if they contradict each other."""
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
        if "lora" in changes and "quantization" in changes:  # written in a recipe's order
            changes["quantization"], changes["lora"] = changes.pop("quantization"), changes.pop("lora")
        if not chosen or (recipe.lora is None and "lora" not in changes and "quantization" in changes):
            continue  # full training needs weights that are not quantised
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
    # Half as many rows, down to one; each halving costs one more.
    rows = training.per_device_batch_size
    knob = [NOTHING]
    for halvings in range(1, rows.bit_length()):
        why = "more, smaller micro-batches"
        knob.append(_set("training.per_device_batch_size", rows >> halvings, halvings, why))
    yield knob

    # More recomputation than now.
    knob = [NOTHING]
    for setting, cost, says in (
        ("selective", 3, "all but products and attention is computed twice"),
        (True, 4, "a third more compute"),
    ):
        if _recomputed(setting) > _recomputed(training.activation_checkpointing):
            knob.append(_set("training.activation_checkpointing", setting, cost, says))
    yield knob

    if gpus.count * gpus.nodes > 1:
        yield [NOTHING, *_sharding(recipe, strategy.name)]
    smaller = OPTIMIZERS[training.optim].smaller
    if smaller and recipe.lora is None and not strategy.uses_engine:
        title = OPTIMIZERS[training.optim].title
        yield [NOTHING, _set("training.optim", smaller, 7, f"{title}'s moments in 8 bits")]
    if recipe.quantization is None:
        # Stored in the computation's number format, which sharded strategies require and others accept.
        compute = "float16" if training.mixed_precision == "fp16" else "bfloat16"
        four_bit = {"load_in_4bit": True, "bnb_4bit_compute_dtype": compute, "bnb_4bit_quant_storage": compute}
        yield [NOTHING, _set("quantization", four_bit, 8, "base weights rounded to 4 bits")]
    if not training.pure_bf16 and training.mixed_precision == "bf16":
        says = "weights and their state in bfloat16, stochastically rounded"
        if OPTIMIZERS[training.optim].library(sharded=strategy.shards_modules) == "bitsandbytes":
            says = "weights in bfloat16, where small updates round away"
        yield [NOTHING, _set("training.pure_bf16", True, 14 if recipe.lora is None else 9, says)]
    if recipe.lora is None:
        rate = 2e-4 if recipe.preferences is None else PREFERENCE_RATES["LoRA"][1]
        adapters: tuple[tuple[str, Any], ...] = (("lora", {}), ("training.learning_rate", rate))
        yield [NOTHING, Option(adapters, 18, "adapters instead of all weights")]
    knob = [NOTHING]
    for tokens, cost in ((recipe.data.max_length // 2, 24), (recipe.data.max_length // 4, 48)):
        if tokens >= SHORTEST:
            knob.append(_set("data.max_length", tokens, cost, "shorter rows"))
    yield knob


def larger_variants(recipe: Recipe, gpus: Gpus, longest: int) -> Iterator[Variant]:
    """Uses for spare memory, one change each; for rows and lengths the largest first."""
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
        current: Any = reduce(getattr, key.split("."), recipe)
        if key in GROWING.values():
            allowed = value > current
        elif key == "training.activation_checkpointing":
            allowed = _recomputed(value) < _recomputed(current)
        elif key == "accelerate_config":
            allowed = strategy.name == "fsdp2" or (strategy.name == "fsdp2_grad_op" and value == "ddp")
        else:  # quantization and pure_bf16 can be taken away
            allowed = bool(current)
        if allowed and value != current:
            yield Variant(changed(recipe, dict(option.changes)), dict(option.changes), 0, (option.says,))


def _recomputed(setting: bool | int | str) -> int:
    """A setting's place among RECOMPUTATIONS. Any number of layers counts as 2, auto as the last."""
    if setting in ("auto", 1):
        return len(RECOMPUTATIONS) - 1
    return RECOMPUTATIONS.index(setting if setting in RECOMPUTATIONS else 2)


def _powers(most: int) -> list[int]:
    """Powers of two up to `most`, the largest first."""
    return [2**exponent for exponent in range(most.bit_length() - 1, -1, -1)]


def _sharding(recipe: Recipe, current: str) -> Iterator[Option]:
    """Weights sharded over the GPUs, or offloaded to host memory; with the settings that sharded strategies require."""
    required: list[tuple[str, Any]] = []
    if recipe.quantization is not None and recipe.quantization.load_in_4bit:
        required.append(("quantization.bnb_4bit_quant_storage", recipe.quantization.bnb_4bit_compute_dtype))
    if for_shards(recipe.training.optim) != recipe.training.optim:
        required.append(("training.optim", for_shards(recipe.training.optim)))
    if current != "fsdp2_offload":
        if current != "fsdp2":
            yield Option((("accelerate_config", "fsdp2"), *required), 5, "weights travel twice a micro-batch")
        says = "weights wait in host memory, and AdamW runs there"
        yield Option((("accelerate_config", "fsdp2_offload"), *required), 13, says)


def _set(key: str, value: Any, cost: int, says: str) -> Option:
    return Option(((key, value),), cost, says)


def plain(value: Any) -> str:
    """A value as in YAML, in one line."""
    if isinstance(value, dict):
        inner = ", ".join(f"{key}: {plain(each)}" for key, each in value.items())
        return "'{" + inner + "}'"
    if isinstance(value, str):
        return value
    return json.dumps(value)


LENGTH, ROWS = "data.max_length", "training.per_device_batch_size"
GROWING = {"max_length": LENGTH, "per_device_batch_size": ROWS}
GRAIN = {LENGTH: 128, ROWS: 1}  # a searched value is a multiple of this
GUESSES = 6  # plans that `largest` places by a guess; further plans halve the rest
NEAR_LIMIT = 0.02  # an estimate this near to the GPU's size says nothing: a trace does
TRACE, CLOSED_FORM = "trace", "closed form"  # the source of a remedy's bytes


class PlanVerdict(Protocol):
    """The part of plan_recipe.Plan that this file reads."""

    @property
    def needed(self) -> int: ...

    @property
    def fits(self) -> bool: ...

    def fits_from(self) -> int:
        """The smallest GPU memory that fits, in bytes."""


PlanFunction = Callable[[Recipe, Gpus], PlanVerdict]


@dataclass(frozen=True)
class Remedy:
    """A change, the bytes needed with it, and its cost or gain."""

    words: str  # key=value ..., to be pasted into a command
    changes: Changes
    needed: int
    says: tuple[str, ...]
    planned_by: str = TRACE

    def as_json(self) -> dict[str, Any]:
        facts = {"change": self.words, "needed_bytes": self.needed, "means": list(self.says)}
        return facts | {"planned_by": self.planned_by}


def remedies(
    recipe: Recipe,
    config: Mapping[str, Any],
    gpus: Gpus,
    plan: PlanFunction,
    *,
    count: int = 3,
    tries: int = 6,
    traced: int | None = None,
) -> list[Remedy]:
    """Changes that make the recipe fit, the cheapest first. No result contains another.

    The closed form selects the changes that are worth a plan. If it does not know the recipe, single changes are
    planned and no combinations.

    Args:
        count: Results at most.
        tries: Plans at most, because each takes seconds.
        traced: As many results are planned; the closed form estimates the others. None: all are planned.
    """
    result: list[Remedy] = []
    for variant, estimated in _worth_a_plan(recipe, config, gpus):
        if len(result) == count:
            break
        if any(variant.changes.keys() >= shown.changes.keys() for shown in result):
            continue
        if tries and (traced is None or sum(each.planned_by == TRACE for each in result) < traced):
            tries -= 1
            try:
                planned = plan(variant.recipe, gpus)
            except FinetuneError:  # the trainer would refuse it
                continue
            if planned.fits:
                result.append(Remedy(variant.words(), variant.changes, planned.needed, variant.says))
        elif traced is not None and estimated is not None and _fits_by(estimated, variant.recipe, gpus):
            result.append(Remedy(variant.words(), variant.changes, estimated, variant.says, CLOSED_FORM))
    return result


def _worth_a_plan(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus) -> Iterator[tuple[Variant, int | None]]:
    """Variants that may fit, the cheapest first, each with its needed bytes by the closed form.

    If the closed form does not know the recipe, these are single changes, with None.
    """
    has_closed_form = unsupported(recipe, config, gpus) is None
    for variant in smaller_variants(recipe, gpus):
        if not has_closed_form:
            if len(variant.says) == 1:
                yield variant, None
        elif unsupported(variant.recipe, config, gpus) is None:
            needed = estimate(variant.recipe, config, gpus).needed
            if needed <= gpus.memory:
                yield variant, needed


def _fits_by(estimated: int, recipe: Recipe, gpus: Gpus) -> bool:
    """Whether the estimate clearly fits, and the trainer would not refuse the recipe. A plan would find both."""
    if estimated > (1 - NEAR_LIMIT) * gpus.memory:
        return False
    from finetune.recipe.strategy import strategy_of
    from finetune.strategies.accelerator import check_combination  # imports torch

    try:
        check_combination(recipe, strategy_of(recipe), on_cpu=False)
    except FinetuneError:
        return False
    return True


def spare(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus) -> list[Remedy]:
    """Uses for spare memory, by the closed form with its margin: one change each, at most one for each key."""
    longest = int(config.get("max_position_embeddings") or recipe.data.max_length)
    result: dict[str, Remedy] = {}
    for variant in larger_variants(recipe, gpus, longest):
        (key,) = variant.changes
        if key not in result and unsupported(variant.recipe, config, gpus) is None:
            upper = estimate(variant.recipe, config, gpus).upper
            if upper <= gpus.memory:
                result[key] = Remedy(variant.words(), variant.changes, upper, variant.says, CLOSED_FORM)
    return list(result.values())


@dataclass(frozen=True)
class Largest:
    """A size's largest value that fits, and its needed bytes. The next value was planned too, and does not fit."""

    key: str
    value: int
    needed: int
    grain: int  # values are multiples of it
    next_value: int | None  # None: there is no larger value

    def as_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"change": f"{self.key}={self.value}", "needed_bytes": self.needed}
        facts |= {"granularity": self.grain, "does_not_fit": None}
        if self.next_value is not None:
            facts["does_not_fit"] = f"{self.key}={self.next_value}"
        return facts


def largest(
    recipe: Recipe,
    config: Mapping[str, Any],
    gpus: Gpus | None,
    name: str,
    plan: PlanFunction,
) -> Largest:
    """The largest `max_length` or `per_device_batch_size` that fits, by `plan`. The next value does not fit.

    Raises FinetuneError for another name, without a GPU, and if not even the smallest value fits.
    """
    key = GROWING.get(name.rpartition(".")[2])
    if key is None:
        raise FinetuneError(f"--max: {name}: is not a size that can be searched; write {' or '.join(GROWING)}")
    if gpus is None:
        raise FinetuneError(f"--max: {name}: needs a GPU; add --gpus 4x24GB")
    plans: dict[int, PlanVerdict] = {}

    def planned(value: int) -> PlanVerdict:
        plans[value] = plan(changed(recipe, {key: value}), gpus)
        return plans[value]

    def estimated(value: int) -> int:
        return estimate(changed(recipe, {key: value}), config, gpus).needed

    if key == ROWS:
        current, most = recipe.training.per_device_batch_size, recipe.training.global_batch_size
    else:
        current, most = recipe.data.max_length, int(config.get("max_position_embeddings") or 131_072)
    values = range(GRAIN[key], most + 1, GRAIN[key])
    start = bisect_right(values, current) - 1
    has_closed_form = unsupported(recipe, config, gpus) is None
    best = last_fitting(values, gpus.memory, planned, estimated if has_closed_form else None, start)
    if best < 0:
        raise FinetuneError(f"{key}: not even {values[0]} fits; plan without --max to see changes that do")
    next_value = None
    if best + 1 < len(values):
        next_value = values[best + 1]
    return Largest(key, values[best], plans[values[best]].needed, GRAIN[key], next_value)


def last_fitting(
    values: Sequence[int],
    memory: int,
    planned: Callable[[int], PlanVerdict],
    estimated: Callable[[int], int] | None = None,
    start: int = 0,
) -> int:
    """Index of the last value that fits, -1 for none, in few plans. That value is planned, and the next one.

    Each plan returns its memory with the gaps between tensors, and so places the next plan. After GUESSES plans the
    rest is halved.

    Args:
        estimated: Bytes that a value needs. None: bytes are taken to grow by a line through the nearest two plans.
        start: Index of the first guess, without an estimate.
    """
    low, high = -1, len(values)
    points: list[tuple[int, int]] = []  # each plan's value, and the smallest memory that fits it
    while high - low > 1:
        index = (low + high) // 2
        if len(points) < GUESSES:
            if estimated is not None:
                guess = _by_estimate(values, memory, points, estimated)
            else:
                guess = _on_a_line(values, memory, points, start)
            index = min(max(guess, low + 1), high - 1)
        found = planned(values[index])
        points.append((values[index], found.fits_from()))
        if found.fits:
            low = index
        else:
            high = index
    return low


def _by_estimate(
    values: Sequence[int], memory: int, points: Sequence[tuple[int, int]], estimated: Callable[[int], int]
) -> int:
    """Index of the last value with an estimate that fits, scaled by the latest plan's bytes over its estimate."""
    factor = 1.0
    if points:
        value, nbytes = points[-1]
        factor = nbytes / estimated(value)
    return bisect_right(values, memory, key=lambda each: int(estimated(each) * factor)) - 1


def _on_a_line(values: Sequence[int], memory: int, points: Sequence[tuple[int, int]], start: int) -> int:
    """Index of the last value that fits by a line through the two plans nearest to the memory; first `start`."""
    if not points:
        return start
    (value, nbytes), *others = sorted(points, key=lambda point: abs(point[1] - memory))
    other_value, other_bytes = 0, 0  # a single plan's line goes through zero
    if others:
        other_value, other_bytes = others[0]
    slope = (nbytes - other_bytes) / (value - other_value)  # bytes a token, or a row
    if slope > 0:
        return bisect_right(values, value + (memory - nbytes) / slope) - 1
    return start


def lines(result: Iterable[Remedy]) -> list[str]:
    """Two lines for each: the change; the memory it needs and what it means."""
    shown = [(f"  {each.words}", f"      {each.needed / 2**30:.1f} GiB; {', '.join(each.says)}") for each in result]
    return [line for pair in shown for line in pair]


def fitting_lines(result: Sequence[Remedy]) -> Iterator[str]:
    """The lines for changes that make a recipe fit, under the source of their bytes."""
    if not result:
        yield "no change that the planner knows makes it fit; use more GPUs, larger ones, or a smaller model"
    heads = {
        TRACE: "changes that make it fit at the same global_batch_size, the cheapest first, each planned by a trace:",
        CLOSED_FORM: "by the closed form alone these need less too; plan one to be sure that it fits:",
    }
    for planned_by, head in heads.items():
        if chosen := [each for each in result if each.planned_by == planned_by]:
            yield head
            yield from lines(chosen)
