"""What fits, what is spare, how far a size goes, what is picked: on the closed form in place of a trace, for speed."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from finetune.closed_form.estimate import estimate, unsupported
from finetune.closed_form.shape import FAMILIES, approximate_weights
from finetune.errors import FinetuneError
from finetune.model.known_configs import HUB_NAMES, full_config
from finetune.planner import candidates
from finetune.planner.arithmetic import explain_plan
from finetune.planner.remedies import (
    CLOSED_FORM,
    LENGTH,
    NEAR_LIMIT,
    ROWS,
    TRACE,
    TRACES,
    changed,
    fitting_lines,
    largest,
    last_fitting,
    remedies,
    spare,
)
from finetune.recipe.gpus import Gpus, parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.recipe.optimizers import Method, usual_rate
from finetune.recipe.schema import Recipe, Training

ROOT = Path(__file__).resolve().parents[2]
MODELS = [names[0] for names in HUB_NAMES.values() if full_config(names[0])[0]["model_type"] in FAMILIES]
SIZES = ("8GB", "12GB", "16GB", "24GB", "48GB", "80GB", "141GB")
BUDGETS = [f"{count}x{size}" for count, size in product((1, 2, 4, 8), SIZES)]


@dataclass(frozen=True)
class Plan:
    """A plan in the place of job.Plan."""

    needed: int
    fits: bool

    def fits_from(self) -> int:
        return self.needed


class Planner:
    """The closed form, and which recipes it was asked about."""

    def __init__(self) -> None:
        self.asked: list[Recipe] = []

    def __call__(self, recipe: Recipe, gpus: Gpus) -> Plan:
        self.asked.append(recipe)
        if why := unsupported(recipe, config_of(recipe), gpus):
            raise FinetuneError(why)
        needed = estimate(recipe, config_of(recipe), gpus).needed
        return Plan(needed, needed <= gpus.memory)


def config_of(recipe: Recipe) -> dict[str, Any]:
    return full_config(recipe.model.name_or_path)[0]


def load(name: str, *overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes" / f"{name}.yaml", overrides).recipe


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        ("llama3_full", "2x48GB"),
        ("llama3_8b_lora_1x24gb", "12GB"),
        ("llama3_ddp", "4x12GB"),
        ("llama3_8b_lora_1x80gb", "24GB"),
    ],
)
def test_changes_that_fit(name: str, gpus: str) -> None:
    """The cheapest is planned; the others are estimated, and are said to be."""
    recipe, room, plan = load(name), parse_gpus(gpus), Planner()
    assert not plan(recipe, room).fits
    found = remedies(recipe, config_of(recipe), room, plan)
    assert [each.planned_by for each in found] == [TRACE] + [CLOSED_FORM] * (len(found) - 1)
    assert [each.as_json()["planned_by"] for each in found] == [each.planned_by for each in found]
    assert plan.asked == [recipe, found[0].recipe]
    for remedy in found:
        pasted = load(name, *shlex.split(remedy.words))
        assert pasted.training.global_batch_size == recipe.training.global_batch_size
        assert estimate(pasted, config_of(pasted), room).needed == remedy.needed <= room.memory
        assert remedy.planned_by == TRACE or remedy.needed <= (1 - NEAR_LIMIT) * room.memory
    for first, second in pairwise(found):
        assert not second.changes.keys() >= first.changes.keys()
        assert first.cost <= second.cost
    heads = [line for line in fitting_lines(found) if not line.startswith(" ")]
    assert "each planned by a trace" in heads[0]
    assert len(found) == 1 or "by the closed form alone" in heads[-1]


def test_offloading_is_named_with_its_bytes() -> None:
    """Where all layers are recomputed and rows are long; 36 states of [65536, 4096] are in pinned memory."""
    name, room = "qwen3_8b_qlora_long_1x24gb", parse_gpus("24GB")
    recipe = load(name, "data.max_length=65536", "training.activation_offloading=false")
    found = {each.words: each for each in remedies(recipe, config_of(recipe), room, Planner())}
    remedy = found["training.activation_offloading=true"]
    assert remedy.says == ("hidden states wait in host memory", "18.0 GiB of pinned host memory a rank")
    assert 36 * 65_536 * 4096 * 2 == 18 * 2**30
    offloads = load(name, "data.max_length=2048")
    spared = {next(iter(each.changes)) for each in spare(offloads, config_of(offloads), room)}
    assert "training.activation_offloading" in spared
    assert "training.activation_checkpointing" not in spared, "it would be refused"


def test_traces_are_few_where_none_fits_and_the_closed_form_goes_on() -> None:
    recipe, room, asked = load("llama3_full"), parse_gpus("8x40GB"), list[Recipe]()

    def refuse(variant: Recipe, gpus: Gpus) -> Plan:
        asked.append(variant)
        return Plan(gpus.memory + 1, False)

    found = remedies(recipe, config_of(recipe), room, refuse)
    assert len(asked) == TRACES
    assert {each.planned_by for each in found} <= {CLOSED_FORM}
    assert not [each for each in found if each.recipe in asked], "refuted by its trace"


def test_what_spare_memory_could_buy() -> None:
    recipe, room = load("llama3_8b_lora_1x24gb"), parse_gpus("80GB")
    found = spare(recipe, config_of(recipe), room)
    assert {next(iter(remedy.changes)) for remedy in found} >= {"training.activation_checkpointing", LENGTH, ROWS}
    for remedy in found:
        pasted = load("llama3_8b_lora_1x24gb", *shlex.split(remedy.words))
        assert estimate(pasted, config_of(pasted), room).needed < remedy.needed <= room.memory
    assert spare(recipe, config_of(recipe), parse_gpus("19GB")) == []


@pytest.mark.parametrize(("name", "key"), [("max_length", LENGTH), ("training.per_device_batch_size", ROWS)])
def test_how_far_a_size_goes(name: str, key: str) -> None:
    recipe, room, plan = load("llama3_8b_lora_1x24gb"), parse_gpus("24GB"), Planner()
    found = largest(recipe, config_of(recipe), room, name, plan)
    grain = {LENGTH: 128, ROWS: 1}[key]
    (named, _, value), (_, _, after) = (found[word].partition("=") for word in ("change", "does_not_fit"))
    assert (named, found["granularity"], int(after) - int(value)) == (key, grain, grain)
    assert found["needed_bytes"] <= room.memory
    assert not plan(changed(recipe, {key: int(after)}), room).fits
    assert len(plan.asked) <= 3, "that value, maybe the next one, and this test's own"


def test_one_plan_is_enough_where_the_estimate_is_right() -> None:
    """The edge itself is planned; the next value is beyond the memory by the estimate, scaled to that plan."""
    for memory in range(8_000_000, 70_000_000, 1_234_567):
        line = Line(memory, 900_000, 500, 1.0049)
        asked = Asked(line)
        found = last_fitting(VALUES, memory, asked, line.bytes_of)
        assert found == by_bisection(line)
        assert VALUES[found] in asked.values
        assert len(asked.values) <= 2


def test_changes_that_let_longer_rows_fit() -> None:
    """The closed form's word for each: that length fits, and the next one does not."""
    recipe, room = load("llama3_qlora", "data.max_length=16384"), parse_gpus("24GB")
    found = largest(recipe, config_of(recipe), room, "max_length", Planner())
    longest = int(found["change"].partition("=")[2])
    by_change = {each["change"]: each["value"] for each in found["changes"]}
    assert by_change["training.mlp_tile_tokens=4096"] > 1.2 * longest
    for change, length in by_change.items():
        assert length >= 1.1 * longest
        pasted = load("llama3_qlora", *shlex.split(change), f"data.max_length={length}")
        assert 0.98 * room.memory < estimate(pasted, config_of(pasted), room).needed <= room.memory


def test_row_lengths_end_at_the_scaled_positions() -> None:
    scaling = "model.rope_scaling={rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}"
    recipe, room, plan = load("qwen3_4b_lora_tools_1x24gb", scaling), parse_gpus("8x141GB"), Planner()
    found = largest(recipe, config_of(recipe), room, "max_length", plan)
    assert (found["change"], found["does_not_fit"]) == ("data.max_length=131072", None)


def test_the_largest_there_is() -> None:
    recipe, room, plan = load("llama3_8b_lora_1x24gb"), parse_gpus("8x141GB"), Planner()
    found = largest(recipe, config_of(recipe), room, "per_device_batch_size", plan)
    assert (found["change"], found["does_not_fit"]) == (f"{ROWS}={recipe.training.global_batch_size}", None)
    assert len(plan.asked) == 1


@dataclass(frozen=True)
class Line:
    """Plans of values whose bytes grow by a line, with so much more in gaps."""

    memory: int
    fixed: int
    slope: int
    gaps: float = 1.0

    def bytes_of(self, value: int) -> int:
        return self.fixed + self.slope * value

    def fits_from(self, value: int) -> int:
        return int(self.gaps * self.bytes_of(value))


class Asked:
    """A plan of a value, and which values it was asked about."""

    def __init__(self, line: Line) -> None:
        self.line, self.values = line, list[int]()

    def __call__(self, value: int) -> LinePlan:
        self.values.append(value)
        return LinePlan(self.line, value)


@dataclass(frozen=True)
class LinePlan:
    line: Line
    value: int

    @property
    def needed(self) -> int:
        return self.line.bytes_of(self.value)

    @property
    def fits(self) -> bool:
        return self.fits_from() <= self.line.memory

    def fits_from(self) -> int:
        return self.line.fits_from(self.value)


VALUES = range(128, 128 * 1025, 128)


def by_bisection(line: Line) -> int:
    return sum(line.fits_from(value) <= line.memory for value in VALUES) - 1


@pytest.mark.parametrize("gaps", [1.0, 1.005, 1.1, 1.4])
def test_the_edge_is_that_of_bisection_in_two_or_three_plans(gaps: float) -> None:
    for memory in range(1_000_000, 70_000_000, 1_234_567):
        line = Line(memory, 900_000, 500, gaps)
        asked = Asked(line)
        assert last_fitting(VALUES, memory, asked, line.bytes_of) == by_bisection(line)
        assert len(asked.values) == len(set(asked.values)) <= 3
        asked = Asked(line)
        assert last_fitting(VALUES, memory, asked, start=31) == by_bisection(line), (
            "without a closed form, from the own value"
        )
        assert len(asked.values) == len(set(asked.values)) <= 5


@pytest.mark.parametrize("wrong", ["nothing", "far too much", "backwards"])
def test_a_wrong_closed_form_falls_back_to_bisection(wrong: str) -> None:
    estimates = {
        "nothing": lambda _: 1,
        "far too much": lambda value: 10**15 * value,
        "backwards": lambda v: 10**9 // v,
    }
    for memory in range(1_000_000, 70_000_000, 1_234_567):
        line = Line(memory, 900_000, 500, 1.01)
        asked = Asked(line)
        assert last_fitting(VALUES, memory, asked, estimates[wrong]) == by_bisection(line)
        assert len(asked.values) == len(set(asked.values)) <= 6 + 10, "the guesses, and a bisection of 1,024 values"


def test_sizes_that_cannot_be_searched() -> None:
    recipe, room = load("llama3_8b_lora_1x24gb"), parse_gpus("24GB")
    with pytest.raises(FinetuneError, match="max_length or per_device_batch_size"):
        largest(recipe, config_of(recipe), room, "learning_rate", Planner())
    with pytest.raises(FinetuneError, match="not even 128 fits"):
        largest(recipe, config_of(recipe), parse_gpus("8GB"), "max_length", Planner())


def hold_the_pick(model: str, budget: str) -> bool:
    """Whether a variant surely fits. If none does, one that fits by its tensors is tried, or there is none."""
    config, room = full_config(model)[0], parse_gpus(budget)
    fitting, smallest = candidates.fitting_recipes(candidates.for_model(model), config, room)
    assert bool(fitting) == (smallest <= room.memory), f"{model} on {budget}"
    if not fitting or estimate(fitting[0], config, room).upper > room.memory:
        return False
    assert fitting[0].budget.gpus == room.count
    return True


@pytest.mark.slow
def test_picks_of_a_sample() -> None:
    pairs = [*product(MODELS, BUDGETS)][::17]
    assert len(pairs) >= 15
    assert {hold_the_pick(*pair) for pair in pairs} == {True, False}


@pytest.mark.slow
def test_picks_of_all_models_and_budgets() -> None:
    pairs = list(product(MODELS, BUDGETS))
    assert len(pairs) >= 300
    assert sum(hold_the_pick(*pair) for pair in pairs) > len(pairs) // 2


@pytest.mark.sample(4, thorough=12)
@pytest.mark.parametrize("budget", ["8GB", "24GB", "2x24GB", "8x80GB"])
@pytest.mark.parametrize("model", ["meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.3-70B"])
def test_a_pick_by_plans_alone_fits_and_gives_up_no_more_than_it_must(model: str, budget: str) -> None:
    """As of a model that the closed form does not know; here it stands for the plans."""
    room, plan = parse_gpus(budget), Planner()
    found = candidates.by_plans(candidates.for_model(model), room, lambda recipe: plan(recipe, room).fits)
    assert len(plan.asked) <= 13
    if found is None:
        assert (
            candidates.fitting_recipes(candidates.for_model(model), full_config(model)[0], room)[1] > 0.8 * room.memory
        )
        return
    assert plan(found, room).fits
    assert found in plan.asked[:-1], "picked, and never planned"
    methods = [
        method_of(recipe)
        for recipe in candidates.candidates(candidates.for_model(model), room)
        if plan(recipe, room).fits
    ]
    if found.data.max_length >= 2048:
        assert method_of(found) == methods[0]


def method_of(recipe: Recipe) -> str:
    return "full" if recipe.lora is None else "qlora" if recipe.quantization else "lora"


def test_what_was_picked_is_a_recipe(tmp_path: Path) -> None:
    model, room = "meta-llama/Llama-3.1-8B-Instruct", parse_gpus("2x24GB")
    (picked, *_), _ = candidates.fitting_recipes(candidates.for_model(model), full_config(model)[0], room)
    file = tmp_path / "mine.yaml"
    file.write_text(candidates.commented(picked, 20 * 2**30, room))
    written = load_recipe(file).recipe
    differing = {key for key, value in picked if key != "output_dir" and getattr(written, key) != value}
    assert differing == set()
    assert all(len(line) <= 120 for line in file.read_text().splitlines())


def test_changes_where_there_is_no_closed_form() -> None:
    """Of a Gemma: single changes, each planned, and no arithmetic of a Llama."""
    recipe = load("llama3_8b_lora_1x24gb", "model.name_or_path=google/gemma-3-12b-it", "data.max_length=2048")
    room, asked = parse_gpus("24GB"), list[Recipe]()

    def plan(variant: Recipe, _: Gpus) -> Plan:
        asked.append(variant)
        return Plan(9, variant.quantization is not None)

    found = remedies(recipe, config_of(recipe), room, plan)
    assert [list(each.changes) for each in found] == [["quantization"]]
    assert len(asked) <= 6
    assert unsupported(recipe, config_of(recipe), room) == "the architecture gemma3_text"
    assert explain_plan(recipe, config_of(recipe), room).endswith("gemma3_text is planned by its trace.")


def test_the_explanation_is_of_this_recipe() -> None:
    recipe = load("llama3_8b_lora_1x24gb")
    text = explain_plan(recipe, config_of(recipe), parse_gpus("24GB"))
    for figure in ("8,030,261,248", "41,943,040", "16 bytes, 671 MB", "6.3 GB", "16.1 GB"):
        assert figure in text, figure
    assert "128,256 words are 525 million logits" in text
    whole = explain_plan(load("llama3_full"), config_of(recipe), parse_gpus("4x80GB"))
    # 16 bytes a weight in all: on four, 4 + 4 + 8 of 8.03e9 by stages.
    for figure in ("128.5 GB", "80.3 GB", "56.2 GB", "32.1 GB"):
        assert figure in whole, figure


@pytest.mark.parametrize(
    ("model", "method", "objective", "rate"),
    [
        ("meta-llama/Llama-3.2-1B", "lora", "supervised", 5e-4),
        ("meta-llama/Llama-3.2-1B", "full", "supervised", 2e-5),
        ("meta-llama/Llama-3.1-8B", "qlora", "supervised", 3e-4),
        ("openai/gpt-oss-20b", "lora", "supervised", 2e-4),
        ("Qwen/Qwen3-30B-A3B", "lora", "supervised", 1e-4),
        ("HuggingFaceTB/SmolLM2-135M", "lora", "supervised", 2e-3),
        ("meta-llama/Llama-3.1-8B", "lora", "dpo", 5e-6),
        ("HuggingFaceTB/SmolLM2-135M", "lora", "kto", 1e-4),
    ],
)
def test_the_usual_rate_is_that_of_docs_recipes(model: str, method: Method, objective: str, rate: float) -> None:
    weights = approximate_weights(full_config(model)[0])
    assert usual_rate(weights, method, objective) == rate
    assert usual_rate(None, "lora") == Training().learning_rate, (
        "safe for every size, so a recipe without the key has it"
    )


def test_recipes_have_the_usual_rate() -> None:
    """But for those whose header names another result that they repeat."""
    others = {"llama3_1b_lora_tulu_1x24gb", "llama3_3b_lora_gsm8k_1x24gb", "qwen3_4b_lora_dpo_1x24gb"}
    off = set()
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        recipe = load_recipe(path).recipe
        weights = approximate_weights(full_config(recipe.model.name_or_path)[0])
        usual = usual_rate(weights, "full" if recipe.lora is None else "lora", recipe.training.objective)
        if recipe.training.learning_rate != usual:
            off.add(path.stem)
    assert off == others


def test_weights_are_known_roughly() -> None:
    """The size in each model's name, to a third. Llama 4 Scout's name has the weights that a token passes."""
    found = {}
    for name in (names[0] for names in HUB_NAMES.values()):
        stated = re.search(r"(?<![A-Za-z])E?(\d+(?:\.\d+)?)([BM])", name, re.IGNORECASE)
        if stated is not None:
            billions = float(stated[1]) * {"b": 1, "m": 1e-3}[stated[2].lower()]
            found[name] = (approximate_weights(full_config(name)[0]) or 0) / 1e9 / billions - 1
    assert len(found) > 30
    assert {name for name, error in found.items() if abs(error) > 1 / 3} == {"meta-llama/Llama-4-Scout-17B-16E"}
