"""The homework's figures beside their explanation: memory to 1 %, seconds by a model whose arithmetic is done again."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.closed_form.constants import STEP_PHASES
from finetune.planner.roofline import not_overlapped
from lectures.zero.notes import HOMEWORK
from lectures.zero.times import copied, modelled, rates_of_the_notes, sent

PAGE = Path(__file__).resolve().parents[3] / "docs" / "zero_table.md"
PARAMETERS, LAYERS = 774_030_080, 36
SECONDS = {
    "zero1": 28.5,
    "zero2": 104.3,
    "zero2 + offload": 109.1,
    "zero3": 102.3,
    "zero3 + offload": 139.8,
    "zero3 + fp16": 59.0,
}


def test_the_figures_are_those_of_the_page() -> None:
    found = re.findall(r"\| seed004-(\d)-(\w+) \| ([\d.]+) \| ([\d.]+) \|", PAGE.read_text("utf-8"))
    rows = {(int(number), phase): (read, explained) for number, phase, read, explained in found}
    assert len(rows) == 18
    for number, row in enumerate(HOMEWORK, 1):
        for phase, read in zip(STEP_PHASES, row.gib, strict=True):
            assert (f"{read:.3f}", f"{row.explained_gib(phase):.3f}") == rows[number, phase]
            assert row.explained_gib(phase) == pytest.approx(read, rel=0.01)
    assert {row.name: row.seconds for row in HOMEWORK} == SECONDS


def pipelined(communication: float, computing: float, layers: int) -> float:
    """Seconds of layers that are sent one after another, each computed when it is there; the wire never waits."""
    there = [communication / layers * (layer + 1) for layer in range(layers)]
    done = 0.0
    for arrival in there:
        done = max(done, arrival) + computing / layers
    return done


@pytest.mark.parametrize(("communication", "computing"), [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0), (3.0, 0.1)])
def test_what_is_not_overlapped_is_what_a_pipeline_takes_longer(communication: float, computing: float) -> None:
    assert not_overlapped(communication, computing, LAYERS) == pytest.approx(
        pipelined(communication, computing, LAYERS) - computing
    )


def test_each_row_by_hand() -> None:
    """20 micro-steps of 1.425 s, a third of it forward; 4, or in fp16 2, bytes a weight, 7/8 of them sent."""
    piece, part = 4 * PARAMETERS * 7 / 8, 4 * PARAMETERS / 8
    forward, backward = 1.425 / 3, 2 * 1.425 / 3
    link = 2 * piece / (104.3 / 20 - 1.425 + backward * 35 / 36)
    stage_2 = 20 * (forward + pipelined(2 * piece / link, backward, LAYERS))
    stage_3 = 20 * (pipelined(piece / link, forward, LAYERS) + pipelined(piece / link, backward, LAYERS))
    expected = {
        "zero1": 28.5,
        "zero2": stage_2,
        "zero2 + offload": stage_2 + (20 + 19) * part / 16e9,
        "zero3": stage_3,
        "zero3 + offload": stage_3 + 20 * 4 * part / 16e9 + 20 * 44 * PARAMETERS / 8 / 9e9,
        "zero3 + fp16": stage_3 / 2,
    }
    rates = rates_of_the_notes()
    assert rates.link == pytest.approx(link)
    for row in HOMEWORK:
        assert modelled(row, rates).seconds == pytest.approx(expected[row.name]), row.name


def test_the_model_orders_the_rows_and_is_within_forty_percent() -> None:
    rates = rates_of_the_notes()
    found = {row.name: modelled(row, rates).seconds for row in HOMEWORK}
    assert sorted(found, key=found.__getitem__) == sorted(SECONDS, key=SECONDS.__getitem__)
    off = {name: abs(seconds / SECONDS[name] - 1) for name, seconds in found.items()}
    assert max(off.values()) < 0.25
    assert sum(each < 1e-9 for each in off.values()) == 2, "the two rows that the rates are read from"


def test_what_is_sent_and_copied() -> None:
    rows = {row.name: row for row in HOMEWORK}
    assert sent(rows["zero1"]) == {"forward": 0.0, "backward": 0.0}
    assert sent(rows["zero2"])["backward"] == 2 * sent(rows["zero3"])["backward"]
    assert sent(rows["zero3 + fp16"])["forward"] == sent(rows["zero3"])["forward"] / 2
    assert [copied(row) for row in HOMEWORK if "offload" not in row.name] == [0.0] * 4
    whole = replace(rows["zero3 + offload"], job=replace(rows["zero3 + offload"].job, param_bytes=2))
    assert copied(whole) == copied(rows["zero3 + offload"]) / 2
