"""The lines before a run on preferences: pairs and judged answers, not rows, and rates of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig

from finetune.architecture.families import router_coefficient
from finetune.cli.main import main
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.loader import load_recipe
from finetune.recipe.optimizers import PREFERENCE_RATE_LIMITS, far_rate
from finetune.recipe.schema import Recipe
from finetune.strategies.receipt import describe_batch
from finetune.tokens.dataset import prepare
from finetune.training.batch_notes import (
    batch_notes,
    beyond_positions,
    notes_before_launch,
    positions_of,
    router_left_out,
)
from finetune.training.batch_plan import BatchPlan, plan_batches
from tests.support.models.tiny import save_tiny
from tests.support.runs.preferences import preference_recipe, write_base
from tests.support.runs.recipes import SETTING

NOUNS = {"dpo": "pair", "kto": "judged answer"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def recipe_of(folder: Path, base: Path, kind: str, *words: str) -> Recipe:
    return load_recipe(preference_recipe(folder / "run", base, kind), list(words)).recipe


def plan_of(recipe: Recipe, rows: int) -> BatchPlan:
    return plan_batches(recipe, rows, world_size=1, rank=0, flat=True)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("packing", ["true", "false"])
def test_the_first_line_counts_in_the_objectives_unit(base: Path, tmp_path: Path, kind: str, packing: str) -> None:
    recipe, noun = recipe_of(tmp_path, base, kind, f"data.packing={packing}"), NOUNS[kind]
    prepared = prepare(recipe, load_tokenizer(recipe))
    told, few, _rate = batch_notes(recipe, prepared, plan_of(recipe, len(prepared.train)), positions_of(recipe))
    longest, tokens = prepared.train.lengths.max(), int(prepared.train.lengths.sum())
    assert told == (
        f"data: 24 {noun}s of up to {longest} tokens ({tokens:,} tokens); 6 steps of 4 {noun}s, about "
        f"{round(tokens / 6)} tokens each, 0 of them warming up"
    )
    settings = "set training.global_batch_size=1"
    if kind == "kto":  # whose step has two rows or more
        settings = f"add {noun}s, or set training.global_batch_size=2 training.num_train_epochs=2"
    assert f"6 steps are few: 24 {noun}s x 1 epoch, 4 {noun}s a step; for 20 or more {settings}" in few
    assert notes_before_launch(recipe)["steps"] == 6


@pytest.mark.parametrize(
    ("kind", "packing", "last"),
    [
        ("dpo", "true", "batch: 1 rank x at most 4 micro-steps x 1 row of pairs, up to 256 tokens"),
        ("dpo", "false", "batch: 1 rank x 4 micro-steps x 1 pair"),
        ("kto", "true", "batch: 1 rank x at most 4 micro-steps x 1 row of judged answers, up to 128 tokens"),
        ("kto", "false", "batch: 1 rank x 4 micro-steps x 1 judged answer"),
    ],
)
def test_the_receipts_lines(base: Path, tmp_path: Path, kind: str, packing: str, last: str) -> None:
    recipe = recipe_of(tmp_path, base, kind, f"data.packing={packing}")
    prepared = prepare(recipe, load_tokenizer(recipe))
    plan = plan_of(recipe, len(prepared.train))
    assert plan.micro_steps_of(prepared.train, plan.rows_of(0)) <= 4
    data, batch = describe_batch({"batch": plan.facts(prepared.train), "data": prepared.facts}).splitlines()
    assert data == f"data: 24 {NOUNS[kind]}s, {prepared.facts['supervised_tokens']:,} tokens in answers"
    assert batch == last


def test_positions_are_those_of_one_answer(base: Path, tmp_path: Path) -> None:
    """A pair's tokens are two documents', each with positions of its own."""
    recipe = recipe_of(tmp_path, base, "dpo", "data.max_length=64")
    prepared = prepare(recipe, load_tokenizer(recipe))
    documents = [ids for row in range(len(prepared.train)) for ids, _ in prepared.train.documents(row)]
    longest = max(map(len, documents))
    assert longest < prepared.train.lengths.max()
    assert list(beyond_positions(recipe, prepared, 64)) == []
    (line,) = beyond_positions(recipe, prepared, longest - 1)
    assert line.startswith(f"data.max_length: 1 pair is longer than the model's {longest - 1} positions, the longest")
    (line,) = beyond_positions(recipe, prepared, longest)
    assert "positions begin anew in each answer and the longest has" in line


@pytest.mark.parametrize("kind", ["dpo", "kto"])
@pytest.mark.parametrize("method", ["full training", "LoRA"])
def test_rates_of_preferences(base: Path, tmp_path: Path, kind: str, method: str) -> None:
    least, most = PREFERENCE_RATE_LIMITS["adapters" if method == "LoRA" else "full"]
    for rate, fits in ((least, True), (most, True), (2 * most, False), (least / 2, False)):
        words = [f"training.learning_rate={rate:.9f}", *(["lora={}"] if method == "LoRA" else [])]
        notes = list(far_rate(recipe_of(tmp_path, base, kind, *words)))
        assert bool(notes) != fits
        for note in notes:
            assert f"what {kind.upper()} by {method} takes" in note
            assert list(far_rate(recipe_of(tmp_path, base, kind, *words, *SETTING.findall(note)))) == []


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_routers_balance_loss_is_not_left_out_silently(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_tiny(tmp_path / "mixtral", "mixtral", output_router_logits=True, **EXPERTS)
    recipe, config = recipe_of(tmp_path, base, kind), AutoConfig.from_pretrained(base)
    supervised = recipe.model_copy(update={"training": recipe.training.model_copy(update={"objective": "supervised"})})
    assert router_coefficient(config, supervised) > 0
    assert router_coefficient(config, recipe) == 0
    (line,) = router_left_out(recipe)
    assert line == (
        f"objective {kind}: the router's balance loss is not added: the model's configuration asks for it; if that is "
        "right, set model.router_aux_loss_coef: 0"
    )
    assert list(router_left_out(supervised)) == []
    assert list(router_left_out(recipe_of(tmp_path, base, kind, "model.router_aux_loss_coef=0"))) == []
    (asked,) = router_left_out(recipe_of(tmp_path, base, kind, "model.router_aux_loss_coef=0.02"))
    assert asked.endswith("is not added: model.router_aux_loss_coef is 0.02; set it to 0")
    prepared = prepare(recipe, load_tokenizer(recipe))
    plan = plan_of(recipe, len(prepared.train))
    assert line in batch_notes(recipe, prepared, plan, positions_of(recipe))  # the start of a run
    assert line in notes_before_launch(recipe)["notes"]  # plan, and check --data
    for words in ([], ["--data"]):
        assert main(["check", str(tmp_path / "run" / "recipe.yaml"), *words]) == 0
        assert "the router's balance loss is not added" in " ".join(capsys.readouterr().out.split())


def test_models_that_ask_for_no_balance_loss_have_no_line(base: Path, tmp_path: Path) -> None:
    experts = save_tiny(tmp_path / "mixtral", "mixtral", **EXPERTS)
    for model in (base, experts):
        assert list(router_left_out(recipe_of(tmp_path, model, "dpo"))) == []


def test_simpos_beta_is_another_scale(base: Path, tmp_path: Path) -> None:
    for words, told in (([], 0), (["dpo.loss_type=simpo"], 1), (["dpo.loss_type=simpo", "dpo.beta=2"], 0)):
        recipe = recipe_of(tmp_path, base, "dpo", *words)
        lines = [line for line in far_rate(recipe) if line.startswith("dpo.beta: 0.1 is a beta for DPO")]
        assert len(lines) == told
