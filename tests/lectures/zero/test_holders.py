"""The lecture `zero`: shares of what ranks hold, from a plan's parts; their table and their drawing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.closed_form.constants import STEP_PHASES
from finetune.errors import EnvironmentMismatch
from finetune.measure.collectives import CollectiveStats
from finetune.report.pictures import new_figure
from lectures.zero.holders import HELD_PARTS, RankHolding, holders_table, holding_of, sent_in_words
from lectures.zero.holders_picture import draw_holders, draw_holding

P = 1000  # bytes of the weights


def plan(parts: dict[str, int], sent: dict[str, int]) -> Any:
    """Equal in every phase."""
    phase = SimpleNamespace(peak=SimpleNamespace(parts=parts))
    collectives = {name: CollectiveStats(1, nbytes) for name, nbytes in sent.items()}
    return SimpleNamespace(
        phases=dict.fromkeys(STEP_PHASES, phase),
        host=dict.fromkeys(STEP_PHASES, 500),
        work=SimpleNamespace(collectives={"backward": collectives}),
    )


def test_shares_are_of_the_whole() -> None:
    parts = {"parameters": 250, "gathered layers": 750, "gradients": 250, "unsharded gradients": 100}
    parts |= {"optimizer state": 500, "masters": 250, "activations": 9000}
    found = holding_of("any", plan(parts, {"all_gather": 1000, "all_reduce": 1000, "reduce": 4}), P)
    assert found.own["step"] == {"weights": 0.25, "masters": 0.25, "gradients": 0.25, "moments": 0.25}
    assert found.passing["step"] == {"weights": 0.75, "masters": 0, "gradients": 0.1, "moments": 0}
    assert found.host == dict.fromkeys(STEP_PHASES, 0.5)
    assert found.sent == {"forward": {}, "backward": {"all_gather": 1, "all_reduce": 2}, "step": {}}
    assert sent_in_words(found, "backward") == "AG 1.00 AR 2.00"
    assert sent_in_words(found, "step") == "-"


def test_the_engines_buffers_are_gathered_weights_and_whole_gradients() -> None:
    """What is there in every phase is a bucket, and no weight."""
    parts = {"parameters": 250, "communication buffers": 400, "backward workspace": 1000}
    phases = {phase: SimpleNamespace(peak=SimpleNamespace(parts=parts)) for phase in STEP_PHASES}
    phases["forward"] = SimpleNamespace(peak=SimpleNamespace(parts=parts | {"communication buffers": 700}))
    phases["load"] = SimpleNamespace(peak=SimpleNamespace(parts={}))
    traced: Any = SimpleNamespace(phases=phases, host={}, work=SimpleNamespace(collectives={}))
    under_zero, other = (holding_of(name, traced, P).passing for name in ("zero3", "fsdp2"))
    assert [under_zero[phase]["weights"] for phase in STEP_PHASES] == [0.3, 0, 0]
    assert [under_zero[phase]["gradients"] for phase in STEP_PHASES] == [1, 1, 1]
    assert [other[phase][part] for phase in STEP_PHASES for part in HELD_PARTS] == [0] * 12


def test_a_strategy_that_is_not_traced_is_a_line() -> None:
    without = holding_of("zero1", EnvironmentMismatch("deepspeed is not installed"), P)
    lines = holders_table([holding_of("ddp", plan({"parameters": P}, {}), P), without]).lines
    assert "zero1: is not traced: deepspeed is not installed" in lines
    assert any(line.split()[:3] == ["ddp", "1.00", "-"] for line in lines)
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("number", [1, 3])
def test_the_drawing(number: int, tmp_path: Path) -> None:
    parts = {"parameters": 250, "gathered layers": 750, "gradients": 250, "optimizer state": 500}
    traced = [holding_of(f"row {each}", plan(parts, {"all_gather": P}), P) for each in range(number)]
    draw_holders([*traced, RankHolding("zero1", "not here")], tmp_path / "holders.png")
    assert (tmp_path / "holders.png").stat().st_size > 10_000


def test_a_bar_is_filled_as_far_as_rank_0_has_it() -> None:
    parts = {"parameters": 250, "gathered layers": 500, "gradients": 500, "optimizer state": 2000}
    axes = new_figure().subplots()
    draw_holding(axes, holding_of("fsdp2", plan(parts, {"all_gather": P}), P), "backward")
    bars = [(bar.get_y() + 0.37, bar.get_x(), bar.get_width(), bool(bar.get_hatch())) for bar in axes.patches]
    drawn = [tuple(round(float(each), 3) for each in bar) for bar in bars if bar[2] not in (0, 1) or bar[3]]
    weights, gradients = (list(HELD_PARTS).index(part) for part in ("weights", "gradients"))
    assert drawn == [(weights, 0, 0.25, 0), (weights, 0.25, 0.5, 1), (gradients, 0, 0.5, 0)]
    moments = [bar for bar in axes.patches if round(bar.get_y() + 0.37, 3) == list(HELD_PARTS).index("moments")]
    assert [bar.get_width() for bar in moments] == [1, 1]
    assert len({bar.get_facecolor() for bar in moments}) == 2, "all of it, over what others would have"
    assert "all_gather 1.00 P" in axes.texts[0].get_text()
