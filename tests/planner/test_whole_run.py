"""The first lines of a plan: time, steps, tokens and cost of the whole run, against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.planner.command import run_in_words, whole_run
from finetune.recipe.gpus import parse_gpus
from tests.support.runs.recipes import half_recipe

SPEED = {"ranks": 4, "step_seconds": 12.0, "tokens_per_second": 5461.3}


def plan(speed: dict[str, Any] | None, **batches: Any) -> dict[str, Any]:
    return {"speed": speed, "batches": {"steps": None, "tokens_per_step": None, **batches}}


def test_cost_is_hours_by_gpus_by_price() -> None:
    """600 steps of 12 s are 2 hours; 4 GPUs at 1.50 an hour cost 12."""
    run = whole_run(half_recipe(), plan(SPEED, steps=600, tokens_per_step=65_536.0), 1.5)
    assert run == {"steps": 600, "tokens": 39_321_600, "seconds": 7200.0, "cost": 12.0}
    gpus = parse_gpus("4xL4")
    assert run_in_words(run, plan(SPEED), gpus) == (
        "the run: 600 steps (39.3 M tokens); at least 2 h 0 min; 12 s a step of full rows, at most 5,461 tokens/s; "
        "from 12.00 for all 4 GPUs, in the price's currency"
    )


def test_max_steps_are_known_without_the_data() -> None:
    run = whole_run(half_recipe(training={"max_steps": 30}), plan(SPEED), None)
    assert (run["steps"], run["seconds"], run["cost"]) == (30, 360.0, None)


@pytest.mark.parametrize(
    ("speed", "gpus", "says"),
    [
        (
            None,
            "4x24GB",
            "the number of rows is not known here; training.max_steps=N gives steps, and on a named GPU time and cost; "
            "a GPU's name, --gpus L4, adds",
        ),
        (None, "cpu", "its time on a CPU is not planned"),
    ],
)
def test_what_is_missing_is_said(speed: dict[str, Any] | None, gpus: str, says: str) -> None:
    found = plan(speed)
    assert says in run_in_words(whole_run(half_recipe(), found, 2.0), found, parse_gpus(gpus))


@pytest.mark.parametrize(("tokens", "share"), [(6_554.0, 0.1), (32_768.0, 0.5), (65_536.0, 1.0), (64_000.0, 1.0)])
def test_the_tokens_that_are_printed_are_priced(tokens: float, share: float) -> None:
    """Of 12 s, 2 are the update's. A tenth of the tokens takes a tenth of the other 10, and of attention less."""
    speed = SPEED | {"update_seconds": 2.0}
    found = plan(speed, steps=10, tokens_per_step=tokens) | {"arithmetic": {"attention_share": 0.2}}
    run = whole_run(half_recipe(), found, 3600.0)
    computing = 10.0 * share * 0.8 if share < 1 else 10.0
    assert run["seconds"] == pytest.approx(10 * (2 + computing), rel=1e-3)
    assert run["cost"] == pytest.approx(4 * run["seconds"], rel=1e-3)  # an hour's price is 3,600: one a second
    assert run["seconds"] <= 10 * 12  # a bound from below, whatever the rows hold


def test_a_bound_from_below_is_not_rounded_up() -> None:
    gpus = parse_gpus("4xL4")
    for steps, says in ((1, "at least 12 s;"), (9, "at least 1 min;"), (299, "at least 59 min;")):
        found = plan(SPEED, steps=steps, tokens_per_step=65_536.0)
        assert says in run_in_words(whole_run(half_recipe(), found, None), found, gpus)
    found = plan(SPEED)
    assert "at least 6 min if rows are full;" in run_in_words(
        whole_run(half_recipe(training={"max_steps": 30}), found, None), found, gpus
    )
