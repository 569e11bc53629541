"""Changes that make a recipe fit, uses for spare memory, and the largest value of one size."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import product
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError

from finetune.closed_form.estimate import estimate, unsupported
from finetune.closed_form.rank import cached_strategy
from finetune.closed_form.shape import approximate_weights
from finetune.closed_form.states_on_host import host_state_bytes
from finetune.errors import FinetuneError
from finetune.model.rope_scaling import scaled_rope
from finetune.recipe.gpus import Gpus
from finetune.recipe.optimizers import OPTIMIZERS, for_shards, usual_rate
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.training import RECOMPUTATIONS
from finetune.recipe.strategy_fit import unfit

Changes = dict[str, Any]  # dotted key -> value
LENGTH, ROWS = "data.max_length", "training.per_device_batch_size"
RECOMPUTATION, STRATEGY = "training.activation_checkpointing", "accelerate_config"
OFFLOADING = "training.activation_offloading"
MLP_TILE = 4096  # tokens of an MLP's tile; rows of two tiles or more gain by it
SHORTEST = 512  # tokens; shorter rows are not proposed
SHOWN, TRACES = 3, 6  # changes that make a recipe fit; traces at most until one of them fits by its trace
GUESSES = 6  # plans that `largest` places by a guess; further plans halve the rest
CACHED, MOST_CACHED = 1.005, 1.5  # a plan with the allocator's gaps over its estimate: as a rule, and at most
NEAR_LIMIT = 0.02  # an estimate this near to the GPU's size says nothing: a trace does
TRACE, CLOSED_FORM = "trace", "closed form"  # the source of a variant's bytes


class Option(NamedTuple):
    """One setting of a knob, or several that belong together."""

    changes: Changes
    cost: int  # relative; variants are ordered by the sum
    says: str  # its cost or gain


@dataclass(frozen=True)
class Variant:
    """A recipe with some changes, and the bytes of one GPU that it needs, once these are known."""

    recipe: Recipe
    changes: Changes
    cost: int
    says: tuple[str, ...]
    needed: int = 0
    planned_by: str = CLOSED_FORM

    @property
    def words(self) -> str:
        """The changes as on the command line: key=value ..."""
        return " ".join(f"{key}={plain(value)}" for key, value in self.changes.items())

    def as_json(self) -> dict[str, Any]:
        facts = {"change": self.words, "needed_bytes": self.needed, "means": list(self.says)}
        return facts | {"planned_by": self.planned_by}


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


def smaller_variants(recipe: Recipe, gpus: Gpus, weights: float | None) -> Iterator[Variant]:
    """Every combination of changes that lower a recipe's memory, the cheapest first; without the recipe itself.

    Args:
        weights: The model's, roughly, for a rate; None: not known.
    """
    combinations: list[tuple[int, int, Changes, tuple[str, ...]]] = []
    for options in product(*([None, *knob] for knob in _knobs(recipe, gpus, weights))):
        chosen = [option for option in options if option is not None]
        changes = {key: value for option in chosen for key, value in option.changes.items()}
        if len(changes) < sum(len(option.changes) for option in chosen):  # two options set one key
            continue
        if "lora" in changes and "quantization" in changes:  # written in a recipe's order
            changes["quantization"], changes["lora"] = changes.pop("quantization"), changes.pop("lora")
        if not chosen or (recipe.lora is None and "lora" not in changes and "quantization" in changes):
            continue  # full training needs weights that are not quantised
        cost, says = sum(option.cost for option in chosen), tuple(option.says for option in chosen)
        combinations.append((cost, len(changes), changes, says))
    for cost, _, changes, says in sorted(combinations, key=lambda combination: combination[:2]):
        with suppress(ValidationError):  # the changes contradict each other
            yield Variant(changed(recipe, changes), changes, cost, says)


def _knobs(recipe: Recipe, gpus: Gpus, weights: float | None) -> Iterator[list[Option]]:
    """The settings that can be changed. Costs put those that leave the training's result as it is before the others."""
    training, strategy = recipe.training, cached_strategy(recipe.accelerate_config)
    # Half as many rows, down to one; each halving costs one more.
    rows, says = training.rows_at_once, "more, smaller micro-batches"
    yield [Option({ROWS: rows >> halvings}, halvings, says) for halvings in range(1, rows.bit_length())]
    recomputation = [
        Option({RECOMPUTATION: "selective"}, 3, "all but products and attention is computed twice"),
        Option({RECOMPUTATION: True}, 4, "a third more compute"),
    ]
    now = _recomputed(training.activation_checkpointing)
    recomputation = [option for option in recomputation if _recomputed(option.changes[RECOMPUTATION]) > now]
    if not training.activation_offloading and strategy.schedule is None:
        offloaded: Changes = {RECOMPUTATION: True} if training.recompute_every != 1 or training.keeps_products else {}
        recomputation.append(Option(offloaded | {OFFLOADING: True}, 6, "hidden states wait in host memory"))
    yield recomputation
    if training.mlp_tile_tokens is None and recipe.training.rows_at_once * recipe.data.row_tokens >= 2 * MLP_TILE:
        yield [Option({"training.mlp_tile_tokens": MLP_TILE}, 4, "the MLP's wide tensors for one tile at a time")]
    if gpus.count * gpus.nodes > 1 and strategy.name != "fsdp2_offload":
        required: Changes = {}  # settings that sharded strategies require
        if recipe.quantization is not None and recipe.quantization.load_in_4bit:
            required["quantization.bnb_4bit_quant_storage"] = recipe.quantization.bnb_4bit_compute_dtype
        if for_shards(training.optim) != training.optim:
            required["training.optim"] = for_shards(training.optim)
        sharding = [Option({STRATEGY: "fsdp2"} | required, 5, "weights travel twice a micro-batch")]
        says = "weights wait in host memory, and AdamW runs there"
        yield [*sharding * (strategy.name != "fsdp2"), Option({STRATEGY: "fsdp2_offload"} | required, 13, says)]
    smaller, title = OPTIMIZERS[training.optim].smaller, OPTIMIZERS[training.optim].title
    if smaller and recipe.lora is None and not strategy.uses_engine:
        yield [Option({"training.optim": smaller}, 7, f"{title}'s moments in 8 bits")]
    if recipe.quantization is None:
        # Stored in the computation's number format, which sharded strategies require and others accept.
        compute = "float16" if training.mixed_precision == "fp16" else "bfloat16"
        four_bit = {"load_in_4bit": True, "bnb_4bit_compute_dtype": compute, "bnb_4bit_quant_storage": compute}
        yield [Option({"quantization": four_bit}, 8, "base weights rounded to 4 bits")]
    if not training.pure_bf16 and training.mixed_precision == "bf16":
        says = "weights and their state in bfloat16, stochastically rounded"
        if OPTIMIZERS[training.optim].library(sharded=strategy.shards_modules) == "bitsandbytes":
            says = "weights in bfloat16, where small updates round away"
        yield [Option({"training.pure_bf16": True}, 14 if recipe.lora is None else 9, says)]
    if recipe.lora is None:
        rate = usual_rate(weights, "lora", training.objective)
        yield [Option({"lora": {}, "training.learning_rate": rate}, 18, "adapters instead of all weights")]
    shorter = {recipe.data.max_length // 2: 24, recipe.data.max_length // 4: 48}
    yield [Option({LENGTH: tokens}, cost, "shorter rows") for tokens, cost in shorter.items() if tokens >= SHORTEST]


def larger_variants(recipe: Recipe, gpus: Gpus, longest: int) -> Iterator[Variant]:
    """Uses for spare memory, one change each; for rows and lengths the largest first."""
    training, strategy = recipe.training, cached_strategy(recipe.accelerate_config)
    ranks = strategy.rank_count(gpus.count * gpus.nodes)
    most = -(-training.global_batch_size // ranks)
    options: list[tuple[str, Any, str]] = [
        (RECOMPUTATION, False, "no recomputation: a quarter less compute"),
        (RECOMPUTATION, "selective", "products and attention are computed once"),
        (RECOMPUTATION, 2, "recomputation of every other layer alone"),
        *((STRATEGY, name, "less traffic") for name in ("ddp", "fsdp2_grad_op")),
        *((ROWS, number, "fewer, larger micro-batches") for number in _powers(most)),
        *((LENGTH, tokens, "longer rows") for tokens in _powers(longest)),
        (OFFLOADING, False, "hidden states stay on the GPU: no copies"),
        ("quantization", None, "base weights that are not rounded"),
        ("training.pure_bf16", False, "trained weights and their state in float32"),
    ]
    for key, value, says in options:
        current: Any = reduce(getattr, key.split("."), recipe)
        if key in (ROWS, LENGTH):
            allowed = value > current
        elif key == RECOMPUTATION:
            allowed = _recomputed(value) < _recomputed(current) and not training.activation_offloading
        elif key == STRATEGY:
            allowed = strategy.name == "fsdp2" or (strategy.name == "fsdp2_grad_op" and value == "ddp")
        else:  # quantization and pure_bf16 can be taken away
            allowed = bool(current)
        if allowed and value != current:
            yield Variant(changed(recipe, {key: value}), {key: value}, 0, (says,))


def _recomputed(setting: bool | int | str) -> int:
    """A setting's place among RECOMPUTATIONS. Any number of layers counts as 2, auto as the last."""
    if setting in ("auto", 1):
        return len(RECOMPUTATIONS) - 1
    return RECOMPUTATIONS.index(setting if setting in RECOMPUTATIONS else 2)


def _powers(most: int) -> list[int]:
    """Powers of two up to `most`, the largest first."""
    return [2**exponent for exponent in range(most.bit_length() - 1, -1, -1)]


def plain(value: Any) -> str:
    """A value as in YAML, in one line."""
    if isinstance(value, dict):
        inner = ", ".join(f"{key}: {plain(entry)}" for key, entry in value.items())
        return "'{" + inner + "}'"
    if isinstance(value, str):
        return value
    return json.dumps(value)


class PlanVerdict(Protocol):
    """The part of plan_recipe.Plan that this file reads."""

    @property
    def needed(self) -> int: ...

    @property
    def fits(self) -> bool: ...

    def fits_from(self) -> int:
        """The smallest GPU memory that fits, in bytes."""


PlanFunction = Callable[[Recipe, Gpus], PlanVerdict]


def remedies(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus, plan: PlanFunction) -> list[Variant]:
    """Changes that make the recipe fit, the cheapest first. No result contains another.

    The closed form selects them, and the first result is planned: no other has a trace's word. If the closed form does
    not know the recipe, single changes are planned until one fits.
    """
    result: list[Variant] = []
    traces, has_closed_form = 0, unsupported(recipe, config, gpus) is None
    for variant in smaller_variants(recipe, gpus, approximate_weights(config)):
        if len(result) == SHOWN:
            break
        if any(variant.changes.keys() >= shown.changes.keys() for shown in result):
            continue
        if variant.recipe.training.activation_offloading:
            says = f"{host_state_bytes(variant.recipe, config) / 2**30:.1f} GiB of pinned host memory a rank"
            variant = replace(variant, says=(*variant.says, says))
        needed = 0
        if has_closed_form:
            if unsupported(variant.recipe, config, gpus) is not None:
                continue
            needed = estimate(variant.recipe, config, gpus).needed
        elif len(variant.says) > 1:
            continue
        if needed > gpus.memory:
            continue
        if traces < TRACES and not any(fitting.planned_by == TRACE for fitting in result):
            traces += 1
            with suppress(FinetuneError):  # the trainer would refuse it
                planned = plan(variant.recipe, gpus)
                if planned.fits:
                    result.append(replace(variant, needed=planned.needed, planned_by=TRACE))
        elif 0 < needed <= (1 - NEAR_LIMIT) * gpus.memory and _is_trained(variant.recipe):
            result.append(replace(variant, needed=needed))
    return result


def _is_trained(recipe: Recipe) -> bool:
    """Whether the trainer takes the recipe. A plan would find it too."""
    return not any(unfit(recipe, cached_strategy(recipe.accelerate_config)))


def spare(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus) -> list[Variant]:
    """Uses for spare memory, by the closed form with its margin: one change each, at most one for each key."""
    longest = int(config.get("max_position_embeddings") or recipe.data.max_length)
    result: dict[str, Variant] = {}
    for variant in larger_variants(recipe, gpus, longest):
        (key,) = variant.changes
        if key not in result and unsupported(variant.recipe, config, gpus) is None:
            upper = estimate(variant.recipe, config, gpus).upper
            if upper <= gpus.memory:
                result[key] = replace(variant, needed=upper)
    return list(result.values())


def largest(
    recipe: Recipe, config: Mapping[str, Any], gpus: Gpus | None, name: str, plan: PlanFunction
) -> dict[str, Any]:
    """The largest `max_length` or `per_device_batch_size` that fits, by `plan`, as JSON.

    `does_not_fit` is the next value, a `granularity` further; None if there is no larger one. `next_by` says what found
    that it does not fit: its own plan, or the closed form, scaled to the plan of the value that fits. `changes` are
    uses of other settings for still larger values, by the closed form.

    Raises FinetuneError for another name, without a GPU, and if not even the smallest value fits.
    """
    key = {"max_length": LENGTH, "per_device_batch_size": ROWS}.get(name.rpartition(".")[2], "")
    if not key:
        raise FinetuneError(
            f"--max: {name}: is not a size that can be searched; write max_length or per_device_batch_size"
        )
    if gpus is None:
        raise FinetuneError(f"--max: {name}: needs a GPU; add --gpus 4x24GB")
    plans: dict[int, PlanVerdict] = {}

    def planned(value: int) -> PlanVerdict:
        plans[value] = plan(changed(recipe, {key: value}), gpus)
        return plans[value]

    def estimated(of: Recipe, value: int) -> int:
        return estimate(changed(of, {key: value}), config, gpus).needed

    values: Sequence[int] = range(1, recipe.training.global_batch_size + 1)
    current = recipe.training.rows_at_once
    if key == LENGTH:
        current = recipe.data.max_length
        most, scaling = int(config.get("max_position_embeddings") or 131_072), recipe.model.rope_scaling
        most = most if scaling is None else scaled_rope(config, scaling)[2]
        # 128 tokens apart up to 8,192, and from there on 64 to 128 steps for each doubling.
        lengths, length = [], 0
        while (length := length + max(128, 1 << max(0, length.bit_length() - 7))) <= most:
            lengths.append(length)
        values = lengths
    has_closed_form = unsupported(recipe, config, gpus) is None
    start = bisect_right(values, current) - 1
    best = last_fitting(values, gpus.memory, planned, partial(estimated, recipe) if has_closed_form else None, start)
    if best < 0:
        raise FinetuneError(f"{key}: not even {values[0]} fits; plan without --max to see changes that do")
    facts: dict[str, Any] = {"change": f"{key}={values[best]}", "needed_bytes": plans[values[best]].needed}
    facts |= {"granularity": 0, "does_not_fit": None, "next_by": None}
    if has_closed_form:
        facts["changes"] = []  # those that let values fit that are larger by a tenth
        knobs = _knobs(changed(recipe, {key: values[best]}), gpus, approximate_weights(config))
        for option in sorted((option for knob in knobs for option in knob), key=lambda option: option.cost):
            with suppress(ValidationError):
                other = changed(recipe, option.changes)
                if unsupported(other, config, gpus) is None and {LENGTH, ROWS}.isdisjoint(option.changes):
                    last = bisect_right(values, gpus.memory / CACHED, key=partial(estimated, other)) - 1
                    if last > best and values[last] >= 1.1 * values[best] and _is_trained(other):
                        change = Variant(other, option.changes, option.cost, (option.says,)).words
                        facts["changes"] += [{"change": change, "value": values[last], "means": option.says}]
    if best + 1 < len(values):
        following = values[best + 1]
        facts |= {"granularity": following - values[best], "does_not_fit": f"{key}={following}"}
        facts["next_by"] = TRACE if following in plans else CLOSED_FORM
    return facts


def last_fitting(
    values: Sequence[int],
    memory: int,
    planned: Callable[[int], PlanVerdict],
    estimated: Callable[[int], int] | None = None,
    start: int = 0,
) -> int:
    """Index of the last value that fits, -1 for none, in few plans. That value is planned. The next one is planned too,
    unless an estimate, scaled to a plan, says that it does not fit: one plan is enough as a rule.

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
            guess = start
            if estimated is not None:  # scaled to the latest plan
                factor = points[-1][1] / estimated(points[-1][0]) if points else CACHED
                guess = bisect_right(values, memory / factor, key=estimated) - 1
            elif points:  # a line through the two plans nearest to the memory; a single plan's goes through zero
                nearest = [*sorted(points, key=lambda point: abs(point[1] - memory)), (0, 0)]
                (value, nbytes), (other_value, other_bytes) = nearest[:2]
                slope = (nbytes - other_bytes) / (value - other_value)  # bytes a token, or a row
                guess = bisect_right(values, value + (memory - nbytes) / slope) - 1 if slope > 0 else start
            latest = guess == low >= 0 and points[-1][0] == values[low]
            if latest and estimated is not None and 1 <= points[-1][1] / estimated(values[low]) <= MOST_CACHED:
                break  # the estimate can be trusted
            index = min(max(guess, low + 1), high - 1)
        verdict = planned(values[index])
        points.append((values[index], verdict.fits_from()))
        if verdict.fits:
            low = index
        else:
            high = index
    return low


def lines(result: Iterable[Variant]) -> list[str]:
    """Two lines for each: the change; the memory it needs and what it means."""
    shown = [
        (f"  {variant.words}", f"      {variant.needed / 2**30:.1f} GiB; {', '.join(variant.says)}")
        for variant in result
    ]
    return [line for pair in shown for line in pair]


def fitting_lines(result: Sequence[Variant]) -> Iterator[str]:
    """The lines for changes that make a recipe fit, under the source of their bytes."""
    if not result:
        yield "no change that the planner knows makes it fit; use more GPUs, larger ones, or a smaller model"
    heads = {
        TRACE: "changes that make it fit at the same global_batch_size, the cheapest first, each planned by a trace:",
        CLOSED_FORM: "by the closed form alone these need less too; plan one to be sure that it fits:",
    }
    for planned_by, head in heads.items():
        if chosen := [variant for variant in result if variant.planned_by == planned_by]:
            yield head
            yield from lines(chosen)
