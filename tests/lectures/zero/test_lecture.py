"""`python -m lectures zero`: tables, sentences and a picture from figures; one slow run of the whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.closed_form.constants import STEP_PHASES
from finetune.errors import FinetuneError
from finetune.paths import CHECKOUT
from finetune.planner.remedies import changed
from finetune.recipe.gpus import Gpus, parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from lectures.command import LECTURES
from lectures.output import LectureRequest
from lectures.zero import lecture
from lectures.zero import planned as planned_rows
from lectures.zero.holders import HELD_PARTS, RankHolding
from lectures.zero.measured import Measured, MeasuredRun, memory_by_step
from lectures.zero.notes import HOMEWORK
from lectures.zero.picture import draw_zero
from lectures.zero.planned import PlannedRun, identity_of, kept_plans, plan_rows
from lectures.zero.words import differences
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import tiny, write_recipe

GIB, MIB = 2**30, 2**20


def run(name: str, forward: float, backward: float, step: float) -> MeasuredRun:
    memory = {at: dict.fromkeys(STEP_PHASES, MIB * at) for at in (10, 20)}
    calls: dict[str, dict[str, int]] = {"forward": {"all_gather": 5}, "backward": {"reduce": 7}, "step": {}}
    sent = dict(zip(STEP_PHASES, (forward, backward, step), strict=True))
    return MeasuredRun(name, None, 2.5, memory, calls, sent)


def measured() -> Measured:
    figures = {
        "zero1": (0.0, 1.0, 1.0),
        "zero2": (0.0, 4.0, 1.0),
        "zero2 + offload": (0.0, 4.0, 1.0),
        "zero3": (4.0, 7.5, 0.0),
        "zero3 + offload": (4.0, 7.5, 0.0),
    }
    runs = [run(name, *sent) for name, sent in figures.items()]
    return Measured([*runs, MeasuredRun("zero3 + fp16", "no such thing here")], "GPT of 2 layers", "cpu", 2)


def planned(name: str, gib: float, **times: float) -> PlannedRun:
    ends = {phase: int(gib * GIB) for phase in STEP_PHASES}
    figures = {"computation": 3.0, "communication": 1.0, "exposed": 0.25, "update": 0.5} | times
    return PlannedRun(name, None, ends, 32, 1e13, **figures)


def plans() -> list[PlannedRun]:
    return [
        planned("zero1", 9.0),
        planned("zero2", 5.0, communication=32.0, exposed=8.0),
        planned("zero2 + offload", 3.5, communication=32.0, exposed=8.0, copies=0.5, host=2.0),
        planned("zero3", 2.0, communication=96.0, exposed=16.0),
        planned("zero3 + offload", 1.0, communication=96.0, exposed=16.0, copies=1.5, host=3.0),
        PlannedRun("zero3 + fp16", "not on this GPU"),
    ]


def holders() -> list[RankHolding]:
    shares = dict.fromkeys(STEP_PHASES, dict.fromkeys(HELD_PARTS, 0.25))
    host, sent = dict.fromkeys(STEP_PHASES, 0.0), {phase: {"all_gather": 1.0} for phase in STEP_PHASES}
    return [RankHolding("fsdp2", "", shares, shares, host, sent)]


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def text_of(words: Any) -> str:
    return in_one_line(" ".join(words))


def test_the_sentences_are_made_from_the_figures() -> None:
    text = text_of(differences(measured(), plans(), homework=True))
    for words in (
        "In 4 micro-steps ZeRO-1's backward sent 1.00 P, once; ZeRO-2's 4.00 P, 1.00 P in each; ZeRO-3 gathered and "
        "scattered 11.50 P.",
        "a step of 32 micro-steps communicates for 1.00 s under ZeRO-1, 32.00 s under ZeRO-2 and 96.00 s under ZeRO-3",
        "ZeRO-1 sent nothing and took 28.5 s, ZeRO-2 sent 20 x 5.42 GB a rank and took 75.8 s longer, 3.66 times as "
        "long.",
        "A micro-step computes 10.0 TFLOP on a rank, so zero1's row is 7.0 TFLOP/s; were its steps updates of 32, it "
        "would be 225, which no GPU has in float32 without TF32.",
        "frees 1.50 GiB of a GPU under ZeRO-2 and costs 2.50 s a step: 0.50 s of copies that are not overlapped, 2.00 "
        "s of the host.",
        "ZeRO-2 with offload took 4.8 s longer: 15.1 GB over the bus are 0.9 s, and no update falls into them; 3.9 s "
        "are not explained by bytes.",
        "ZeRO-3 with offload took 37.5 s longer: 31.0 GB over the bus are 1.9 s and 9.5 s of AdamW on the host; 26.1 s",
        "fp16. It did not run here: no such thing here",
        "its memory was 0.50, 0.47, 0.47 of float32's after forward, backward, step, its time 0.58 of 102.3 s",
        "the notes read 5.41 GiB, this kit plans 2.00. Of the notes' 1.86 GiB are a bucket of 5e8 elements",
    ):
        assert words in text, words
    other = text_of(differences(measured(), plans(), homework=False))
    assert "notes" not in other
    assert "1.00 P in each" in other


def test_other_figures_make_other_sentences() -> None:
    runs = measured()
    changed = [run("zero2", 0.0, 8.0, 1.0) if each.name == "zero2" else each for each in runs.runs]
    halves = [run("zero3 + fp16", 2.0, 5.75, 0.0) if each.name == "zero3 + fp16" else each for each in changed]
    text = text_of(differences(Measured(halves, "m", "cpu", 2), plans(), homework=False))
    assert "ZeRO-2's 8.00 P, 2.00 P in each" in text
    assert "Here it sent 7.75 P where float32 sent 11.50 P, 0.67 of it" in text


def test_memory_is_the_highest_of_ranks_at_every_tenth_step() -> None:
    lines = [
        {"kind": "phase", "step": step, "rank": rank, "phase": phase, "allocated_gib": (step + rank) / 1024}
        for step in (1, 10, 11, 20)
        for rank in (0, 1)
        for phase in STEP_PHASES
    ]
    lines.append({"kind": "train", "step": 10})
    assert memory_by_step(lines) == {step: dict.fromkeys(STEP_PHASES, (step + 1) * MIB) for step in (10, 20)}


def held(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, gpus: str = "8xA100") -> Any:
    monkeypatch.setattr(lecture, "measure", lambda _: measured())
    monkeypatch.setattr(lecture, "plan_rows", lambda _: plans())
    monkeypatch.setattr(lecture, "trace_holders", lambda *_: holders())
    return lecture.zero_lecture(LectureRequest(recipe, (), {"gpus": gpus}, tmp_path, lambda _: None))


@pytest.fixture
def recipe(tiny_llama: Path, tmp_path: Path) -> Path:
    chats = write_chats(tmp_path / "chats.jsonl", [20, 30, 40, 50])
    content: Mapping[str, Any] = {"lora": None, "data": {"max_length": 64}, "output_dir": str(tmp_path / "run")}
    return write_recipe(tmp_path, tiny(tiny_llama, chats, **content))


def test_the_tables(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = held(recipe, tmp_path, monkeypatch)
    text = in_one_line(result.text())
    assert "zero3 + fp16: did not run: no such thing here" in text
    assert "zero3 + fp16: is not planned: not on this GPU" in text
    assert "fsdp2 0.25 0.25 0.25 0.25 - AG 1.00 AG 1.00 AG 1.00" in text
    assert "zero2 2.50 0.00 (5) 4.00 (7) 1.00 (0) 5.00" in text
    assert "zero2 + offload 280.0 60.0 160.0 10.0 40.0 10.0" in text  # 20 steps of 14 s
    assert "notes" not in text
    assert result.facts["notes"] is None
    monkeypatch.setattr(lecture, "HOMEWORK_MODEL", json.loads(recipe.read_text("utf-8"))["model"]["name_or_path"])
    whole = held(recipe, tmp_path, monkeypatch).text()
    text = in_one_line(whole)
    assert "zero2, backward 5.101 5.093 -0.15% 5.00" in text
    order = "zero1, zero3 + fp16, zero3, zero2, zero2 + offload, zero3 + offload"
    assert f"The model orders the rows as the notes do: {order}." in text
    assert max(len(line) for line in whole.splitlines()) <= 120


def test_gpus_without_a_data_sheet_are_refused(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus in ("8x80GB", "cpu"):
        with pytest.raises(FinetuneError, match=f"gpus: {gpus}: the plan's time needs GPUs by name"):
            held(recipe, tmp_path, monkeypatch, gpus=gpus)


def test_the_picture(tmp_path: Path) -> None:
    for homework in (True, False):
        draw_zero(measured(), plans(), "8xA100", homework, tmp_path / "zero.png")
        assert (tmp_path / "zero.png").read_bytes().startswith(b"\x89PNG")


def homework() -> tuple[Recipe, Gpus]:
    """What `--lecture zero` plans where nothing else is named."""
    lecture_of_zero = LECTURES["zero"]
    recipe = load_recipe(CHECKOUT / "recipes" / lecture_of_zero.recipe, lecture_of_zero.overrides).recipe
    gpus = parse_gpus(lecture_of_zero.settings["gpus"])
    assert gpus is not None
    return recipe, gpus


def test_the_kept_plans_are_of_the_homework() -> None:
    recipe, gpus = homework()
    kept = kept_plans(identity_of(recipe, gpus))
    assert [*kept] == [row.name for row in HOMEWORK]
    assert {name: plan.reason for name, plan in kept.items()} == dict.fromkeys(kept)
    assert {plan.micro_steps for plan in kept.values()} == {32}
    # 6 operations a weight and token of matrix products, attention, and the head of tied embeddings.
    assert kept["zero1"].flops == pytest.approx(6 * 774_030_080 * 2048, rel=0.08)
    other = changed(recipe, {"training.per_device_batch_size": 1})
    assert kept_plans(identity_of(other, gpus)) == {}
    assert kept_plans(identity_of(recipe, replace(gpus, count=4))) == {}


def test_rows_of_another_recipe_are_planned(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_rows, "plan_row", lambda row, *_: PlannedRun(row.name, "seen"))
    found = plan_rows(LectureRequest(recipe, (), {"gpus": "2xA100"}, tmp_path, lambda _: None))
    assert [(each.name, each.reason) for each in found] == [(row.name, "seen") for row in HOMEWORK]
