"""Changes that make a recipe fit, uses for spare memory, and the largest value of one size."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import Any, Protocol

from pydantic import ValidationError

from finetune.closed_form.estimate import estimate, unsupported
from finetune.closed_form.rank import cached_strategy
from finetune.errors import FinetuneError
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
    """A setting's place among RECOMPUTATIONS. Any number of layers counts as 2, auto as the last."""
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
    """4 bits stored in the computation's number format, which sharded strategies require and others accept."""
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
    if isinstance(value, str):
        return value
    return json.dumps(value)


LENGTH, ROWS = "data.max_length", "training.per_device_batch_size"
GROWING = {"max_length": LENGTH, "per_device_batch_size": ROWS}
GRAIN = {LENGTH: 128, ROWS: 1}  # a value that is searched is a multiple of this
GUESSES = 6  # plans that `largest` places by a guess; the further ones halve what is left
EDGE = 0.02  # an estimate this near to the GPU's size says nothing: a trace does
TRACE, CLOSED_FORM = "trace", "closed form"  # what a remedy's bytes are by


class PlanVerdict(Protocol):
    """The part of plan_recipe.Plan that is read here."""

    @property
    def needed(self) -> int: ...

    @property
    def fits(self) -> bool: ...

    def fits_from(self) -> int:
        """Bytes of a GPU from which on it fits."""


PlanFunction = Callable[[Recipe, Gpus], PlanVerdict]


@dataclass(frozen=True)
class Remedy:
    """A change, the bytes needed with it, and its cost or gain."""

    words: str  # key=value ..., to be pasted
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
    """Changes that make it fit, the cheapest first; the closed form selects which are planned by `plan`. Where it does
    not know the recipe, single changes are planned and no combinations.

    No result contains another.

    Args:
        count: Results at most.
        tries: Plans at most, for each takes seconds.
        traced: As many results are planned, the others are estimated by the closed form. None: all are planned.
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
    """Variants that may fit, the cheapest first, each with the bytes that it needs by the closed form; single changes
    with None where it does not know the recipe."""
    blind = unsupported(recipe, config, gpus) is not None
    for variant in smaller_variants(recipe, gpus):
        if blind:
            if len(variant.says) == 1:
                yield variant, None
        elif unsupported(variant.recipe, config, gpus) is None:
            needed = estimate(variant.recipe, config, gpus).needed
            if needed <= gpus.memory:
                yield variant, needed


def _fits_by(estimated: int, recipe: Recipe, gpus: Gpus) -> bool:
    """Whether the estimate is clear, and the trainer would not refuse the recipe, as a plan says by an error."""
    if estimated > (1 - EDGE) * gpus.memory:
        return False
    from finetune.recipe.strategy import strategy_of
    from finetune.strategies.accelerator import check_combination  # imports torch

    try:
        check_combination(recipe, strategy_of(recipe), on_cpu=False)
    except FinetuneError:
        return False
    return True


def spare(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus) -> list[Remedy]:
    """Uses of spare memory, by the closed form with its margin: one change each, at most one for each key."""
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
    """The largest value of a size that fits, and the bytes that it needs. The next one, where there is one, was planned
    too, and does not fit."""

    key: str
    value: int
    needed: int
    grain: int  # values are multiples of it
    next_value: int | None  # None: the largest that there is

    def as_json(self) -> dict[str, Any]:
        facts = {"change": f"{self.key}={self.value}", "needed_bytes": self.needed, "granularity": self.grain}
        return facts | {"does_not_fit": None if self.next_value is None else f"{self.key}={self.next_value}"}


def largest(
    recipe: Recipe,
    config: Mapping[str, Any],
    gpus: Gpus | None,
    name: str,
    plan: PlanFunction,
) -> Largest:
    """The largest `max_length` or `per_device_batch_size` that fits, by `plan`, as the one after it that does not.

    Raises FinetuneError for another name, where no GPU is named, and where not even the smallest fits.
    """
    key = GROWING.get(name.rpartition(".")[2])
    if key is None:
        raise FinetuneError(f"--max: {name}: is not a size that can be searched; write {' or '.join(GROWING)}")
    if gpus is None:
        raise FinetuneError(f"--max: {name}: needs a GPU; add --gpus 4x24GB")
    room = gpus
    plans: dict[int, PlanVerdict] = {}

    def planned(value: int) -> PlanVerdict:
        plans[value] = plan(changed(recipe, {key: value}), room)
        return plans[value]

    def estimated(value: int) -> int:
        return estimate(changed(recipe, {key: value}), config, room).needed

    values = _values(recipe, config, key)
    known = unsupported(recipe, config, gpus) is None
    own = {LENGTH: recipe.data.max_length, ROWS: recipe.training.per_device_batch_size}[key]
    start = bisect_right(values, own) - 1
    best = edge(values, gpus.memory, planned, estimated if known else None, start)
    if best < 0:
        raise FinetuneError(f"{key}: not even {values[0]} fits; plan without --max to see changes that do")
    after = values[best + 1] if best + 1 < len(values) else None
    return Largest(key, values[best], plans[values[best]].needed, GRAIN[key], after)


def edge(
    values: Sequence[int],
    memory: int,
    planned: Callable[[int], PlanVerdict],
    estimated: Callable[[int], int] | None = None,
    start: int = 0,
) -> int:
    """Index of the last value that fits, -1 for none, in few plans: that value was planned, and the one after it.

    Each plan says how much memory it needs with the gaps between tensors, and so where the next one should be. What
    GUESSES of these leave is halved.

    Args:
        estimated: Bytes that a value needs. None: bytes are taken to grow by a line through the nearest two plans.
        start: Index of the first guess, without an estimate.
    """
    low, high = -1, len(values)
    points: list[tuple[int, int]] = []  # of each plan: its value, and the bytes from which on it fits
    while high - low > 1:
        at = (low + high) // 2
        if len(points) < GUESSES:
            if estimated is not None:
                guess = _by_estimate(values, memory, points, estimated)
            else:
                guess = _on_a_line(values, memory, points, start)
            at = min(max(guess, low + 1), high - 1)
        found = planned(values[at])
        points.append((values[at], found.fits_from()))
        low, high = (at, high) if found.fits else (low, at)
    return low


def _by_estimate(
    values: Sequence[int], memory: int, points: Sequence[tuple[int, int]], estimated: Callable[[int], int]
) -> int:
    """Index of the last value whose estimate fits, as many times larger as the latest plan is than its own."""
    value, nbytes = points[-1] if points else (values[0], estimated(values[0]))
    factor = nbytes / estimated(value)
    return bisect_right(values, memory, key=lambda each: int(estimated(each) * factor)) - 1


def _on_a_line(values: Sequence[int], memory: int, points: Sequence[tuple[int, int]], start: int) -> int:
    if not points:
        return start
    (value, nbytes), *others = sorted(points, key=lambda point: abs(point[1] - memory))
    other, fewer = others[0] if others else (0, 0)
    slope = (nbytes - fewer) / (value - other)  # bytes a token, or a row
    if slope > 0:
        return bisect_right(values, value + (memory - nbytes) / slope) - 1
    return start


def _values(recipe: Recipe, config: Mapping[str, Any], key: str) -> Sequence[int]:
    if key == ROWS:
        return range(1, recipe.training.global_batch_size + 1)
    longest = int(config.get("max_position_embeddings") or 131_072)
    return range(GRAIN[key], longest + 1, GRAIN[key])


def lines(result: Iterable[Remedy]) -> list[str]:
    """Two lines for each: the change; the memory it needs and what it means."""
    shown = [(f"  {each.words}", f"      {each.needed / 2**30:.1f} GiB; {', '.join(each.says)}") for each in result]
    return [line for pair in shown for line in pair]


def fitting_lines(result: Sequence[Remedy]) -> Iterator[str]:
    """The lines of changes that make a recipe fit, under what their bytes are by."""
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
