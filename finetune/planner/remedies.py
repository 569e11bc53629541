"""Changes that make a recipe fit, uses of spare memory, and the largest value of one size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from finetune.errors import FinetuneError
from finetune.planner.closed_form.estimate import estimate, unsupported
from finetune.planner.variants import Changes, Variant, changed, larger_variants, smaller_variants
from finetune.recipe.gpus import Gpus
from finetune.recipe.schema import Recipe

LENGTH, ROWS = "data.max_length", "training.per_device_batch_size"
GROWING = {"max_length": LENGTH, "per_device_batch_size": ROWS}
REFINEMENTS = 4  # plans that a guess needs at most
GRAIN = {LENGTH: 128, ROWS: 1}  # a proposed value is a multiple of this


class PlanVerdict(Protocol):
    """The part of plan_recipe.Planned that is read here."""

    @property
    def needed(self) -> int: ...

    @property
    def fits(self) -> bool: ...


PlanFunction = Callable[[Recipe, Gpus], PlanVerdict]


@dataclass(frozen=True)
class Remedy:
    """A change, the bytes needed with it, and what it costs or brings."""

    words: str  # key=value ..., to be pasted
    changes: Changes
    needed: int
    says: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {"change": self.words, "needed_bytes": self.needed, "means": list(self.says)}


def remedies(
    recipe: Recipe, config: Mapping[str, Any], gpus: Gpus, plan: PlanFunction, *, count: int = 3, tries: int = 6
) -> list[Remedy]:
    """Changes that make it fit, the cheapest first, each planned by `plan`; the closed form selects which are planned.
    Where it does not know the recipe, single changes are planned and no combinations.

    No result contains another. `count`: results at most. `tries`: plans at most, for each takes seconds.
    """
    result: list[Remedy] = []
    blind = unsupported(recipe, config, gpus) is not None
    for variant in smaller_variants(recipe, gpus):
        if len(result) == count or not tries:
            break
        contains_one = any(variant.changes.keys() >= shown.changes.keys() for shown in result)
        worth_a_plan = len(variant.says) == 1 if blind else _may_fit(variant, config, gpus)
        if contains_one or not worth_a_plan:
            continue
        tries -= 1
        try:
            planned = plan(variant.recipe, gpus)
        except FinetuneError:  # the trainer would refuse it
            continue
        if planned.fits:
            result.append(Remedy(variant.words(), variant.changes, planned.needed, variant.says))
    return result


def spare(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus) -> list[Remedy]:
    """Uses of spare memory, by the closed form with its margin: one change each, at most one for each key."""
    longest = int(config.get("max_position_embeddings") or recipe.data.max_length)
    result: dict[str, Remedy] = {}
    for variant in larger_variants(recipe, gpus, longest):
        (key,) = variant.changes
        if key not in result and unsupported(variant.recipe, config, gpus) is None:
            upper = estimate(variant.recipe, config, gpus).upper
            if upper <= gpus.memory:
                result[key] = Remedy(variant.words(), variant.changes, upper, variant.says)
    return list(result.values())


def _may_fit(variant: Variant, config: Mapping[str, Any], gpus: Gpus) -> bool:
    return (
        unsupported(variant.recipe, config, gpus) is None
        and estimate(variant.recipe, config, gpus).needed <= gpus.memory
    )


def largest(
    recipe: Recipe, config: Mapping[str, Any], gpus: Gpus | None, name: str, plan: PlanFunction
) -> tuple[str, int, int]:
    """The largest `max_length` or `per_device_batch_size` that fits: key, value, and bytes needed, planned by `plan`.

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
        if value not in plans:
            plans[value] = plan(changed(recipe, {key: value}), room)
        return plans[value]

    values = _values(recipe, config, gpus, key)
    guess = _guess(recipe, config, room, key, values, planned)
    best = last_fitting_near(values, guess, lambda value: planned(value).fits)
    if best < 0:
        raise FinetuneError(f"{key}: not even {values[0]} fits; plan without --max to see changes that do")
    return key, values[best], planned(values[best]).needed


def _guess(
    recipe: Recipe,
    config: Mapping[str, Any],
    gpus: Gpus,
    key: str,
    values: Sequence[int],
    planned: Callable[[int], PlanVerdict],
) -> int:
    """Index of the last value that should fit: by the closed form, scaled by the ratio of a plan near the edge to it
    (the allocator's part); by plans alone where there is no closed form."""
    if unsupported(recipe, config, gpus) is not None:
        return _last_fitting(values, lambda value: planned(value).fits)

    def estimated(value: int) -> int:
        return estimate(changed(recipe, {key: value}), config, gpus).needed

    factor, best = 1.0, -1
    for _ in range(REFINEMENTS):
        previous, best = best, _last_fitting(values, lambda value: estimated(value) * factor <= gpus.memory)  # noqa: B023
        if best in (previous, -1):
            break
        plan = planned(values[best])
        factor = getattr(plan, "upper", plan.needed) / estimated(values[best])
    return max(best, 0)


def _values(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus, key: str) -> Sequence[int]:
    if key == ROWS:
        return range(1, recipe.training.global_batch_size + 1)
    longest = int(config.get("max_position_embeddings") or 131_072)
    return range(GRAIN[key], longest + 1, GRAIN[key])


def _last_fitting(values: Sequence[int], fits: Callable[[int], bool]) -> int:
    """Index of the last value that fits, by bisection; -1: none does."""
    low, high = -1, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(values[middle]) else (low, middle)
    return low


def last_fitting_near(values: Sequence[int], guess: int, fits: Callable[[int], bool]) -> int:
    """Index of the last value that fits, -1 for none, searched from a guess: in steps that double until the edge is
    passed, then by bisection."""
    low, high, at, step = -1, len(values), guess, 1
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        if fits(values[at]):
            low, at = at, at + step if high == len(values) else (at + high) // 2
        else:
            high, at = at, at - step if low < 0 else (low + at) // 2
        step *= 2
    return low


def lines(result: Iterable[Remedy]) -> list[str]:
    """Two lines for each: the change; the memory it needs and what it means."""
    shown = [(f"  {each.words}", f"      {each.needed / 2**30:.1f} GiB; {', '.join(each.says)}") for each in result]
    return [line for pair in shown for line in pair]
