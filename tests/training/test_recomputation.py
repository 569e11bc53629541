"""`activation_checkpointing: auto` in a run: chosen before it, said in terminal and receipt, and free to change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from finetune.closed_form import recomputation
from finetune.recipe.loader import load_recipe
from finetune.recipe.strategy import strategy_of
from finetune.train import main
from finetune.training import worst_step
from finetune.training.batch_plan import plan_batches
from finetune.training.session import agree_on_recomputation, agree_on_reduction, agree_on_rows
from finetune.training.start import Start, own_split
from tests.support.models.tiny import write_chats
from tests.support.runs.launching import ALONE
from tests.support.runs.recipes import least_recipe, tiny, write_recipe

pytestmark = pytest.mark.usefixtures("forget_the_last_run")
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, tiny_llama: Path) -> Write:
    """Writes a recipe of that name, whose run folder is next to it."""

    def written(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        content: dict[str, Any] = {
            "training": {"activation_checkpointing": "auto", "global_batch_size": 2, "max_steps": 2},
            "samples": {"count": 0},
            "logging_steps": 1,
            "output_dir": str(folder / "run"),
        }
        return write_recipe(folder, tiny(tiny_llama, write_chats(folder / "chats.jsonl", [30, 45, 60, 25]), **content))

    return written


def free_memory(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(recomputation, "available_bytes", lambda: int(gib * 2**30))


def curve(recipe: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (recipe.parent / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "train"]


@pytest.mark.thorough
def test_it_is_chosen_by_memory_and_said(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name, gib, runs, words, recomputed in (
        ("much", 1000.0, False, "none, because the plan needs at most", 0),
        ("little", 0.1, True, "all layers, because even so the plan may need", 2),
    ):
        free_memory(monkeypatch, gib)
        recipe = write(name)
        assert main([str(recipe)]) == 0
        (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("activation checkpointing")]
        assert line.startswith(f"activation checkpointing: {words}")
        receipt = json.loads((recipe.parent / "run" / "receipt.json").read_text("utf-8"))
        assert receipt["checkpointed_layers"] == recomputed
        assert receipt["recomputation"] == {
            "asked": "auto",
            "runs": runs,
            "why": line.split("because ")[1],
            "line": line,
        }
        found[name] = curve(recipe)
        assert "activation_checkpointing: auto" in (recipe.parent / "run" / "recipe.yaml").read_text("utf-8")
    assert found["much"] == found["little"]
    # Another setting is the same run.
    assert main([str(recipe), "training.activation_checkpointing=selective"]) == 0


@pytest.mark.thorough
def test_the_rows_of_a_micro_batch_are_chosen_kept_and_planned_to_the_byte(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the curve is that of every other choice."""
    curves = {}
    for asked, rows in (("auto", 2), ("1", 1), ("2", 2)):
        free_memory(monkeypatch, 1000.0)
        recipe = write(asked)
        words = [str(recipe), f"training.per_device_batch_size={asked}"]
        assert main(words) == 0
        out = capsys.readouterr().out
        receipt = json.loads((recipe.parent / "run" / "receipt.json").read_text("utf-8"))
        assert receipt["batch"]["per_device_batch_size"] == rows
        assert ("per_device_batch_size: 2, because the plan needs at most" in out) == (asked == "auto")
        assert (receipt["rows"].get("runs") == 2) == (asked == "auto")
        curves[asked] = [each for pair in curve(recipe) for each in pair]
    assert curves["auto"] == curves["2"] == pytest.approx(curves["1"], rel=1e-5)
    loaded = load_recipe(words[0], ["training.per_device_batch_size=auto"]).recipe
    for before, gib, kept in ((1, 1000.0, "began with it"), (2, 0.01, "; it was 2 before")):
        free_memory(monkeypatch, gib)
        began = loaded.model_copy(update={"output_dir": str(recipe.parent.parent / str(before) / "run")})
        chosen, _, facts = own_split(began, ALONE, None)
        assert chosen.training.rows_at_once == facts["runs"] == 1
        assert kept in facts["line"]


@pytest.mark.slow
def test_where_its_choice_does_not_fit_the_message_names_it(
    write: Write, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    free_memory(monkeypatch, 1000.0)
    recipe = write("run")
    monkeypatch.setattr(worst_step, "optimizer_step", out_of_memory)
    assert main([str(recipe)]) == 3
    assert "training.activation_checkpointing: auto chose none: " in capfd.readouterr().err


def started(setting: Any, folder: Path, **chosen: Any) -> Start:
    recipe = least_recipe(folder, training={"activation_checkpointing": setting})
    given: dict[str, Any] = dict.fromkeys(Start.__dataclass_fields__)
    return Start(**given | {"recipe": recipe, "recomputation": chosen})


class Ranks:
    """An accelerator whose other rank has this place among the choices."""

    device = torch.device("cpu")

    def __init__(self, other: int) -> None:
        self.other = other

    def gather(self, own: Tensor) -> Tensor:
        return torch.cat([own, torch.tensor([self.other])])


@pytest.mark.parametrize(
    ("own", "other", "agreed"), [(False, 1, "selective"), (False, 3, True), ("selective", 0, "selective")]
)
def test_ranks_recompute_what_the_one_with_least_memory_has_to(
    own: Any, other: int, agreed: Any, tmp_path: Path
) -> None:
    start = started(own, tmp_path, asked="auto", runs=own, why="there is room", line="a line")
    found = agree_on_recomputation(Ranks(other), start)  # type: ignore[arg-type]
    assert found.recipe.training.activation_checkpointing == found.recomputation["runs"] == agreed
    if agreed == own:
        assert found == start
    else:
        assert found.recomputation["line"].endswith("because another rank's device has less memory")
        assert replace(found, recipe=start.recipe, recomputation=start.recomputation) == start


def test_ranks_take_the_rows_of_the_one_with_least_memory(tmp_path: Path) -> None:
    start = started(False, tmp_path)
    plan = plan_batches(start.recipe, 8, world_size=2, rank=0, flat=True)
    start = replace(start, plan=replace(plan, per_device_batch_size=4), rows={"runs": 4})
    found = agree_on_rows(Ranks(2), start)  # type: ignore[arg-type]
    rows = found.plan.per_device_batch_size, found.recipe.training.rows_at_once, found.rows["runs"]
    assert rows == (2, 2, 2)
    assert found.rows["line"].endswith("another rank's device has less memory")
    assert agree_on_rows(Ranks(8), start) is start  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "other", "agreed"), [(True, True, True), (True, False, False), (False, True, False), (None, False, None)]
)
def test_ranks_reduce_once_a_step_only_where_all_have_room(
    own: bool | None, other: bool, agreed: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that reduces at another time than the others hangs, or adds up other micro-batches."""

    class Two:
        device, num_processes = torch.device("cpu"), 2

        def reduce(self, count: Tensor, reduction: str) -> Tensor:
            return count + int(other)

    chosen = None if own is None else recomputation.Reduction(own, "its own reason")
    monkeypatch.setattr(recomputation, "choose_reduction", lambda *given, **more: chosen)
    recipe = least_recipe(tmp_path, accelerate_config="fsdp2")
    start = replace(started(False, tmp_path), recipe=recipe, strategy=strategy_of(recipe), launch=ALONE)
    found = agree_on_reduction(Two(), start)  # type: ignore[arg-type]
    if agreed is None:
        assert found is start
        return
    assert (found.strategy.keeps_gradients, found.reduction["once"]) == (agreed, agreed)
    assert ("another rank's device" in found.reduction["why"]) == (own is True and not agreed)


def test_what_the_recipe_says_is_not_discussed(tmp_path: Path) -> None:
    start = started(False, tmp_path)
    assert agree_on_recomputation(Ranks(3), start) is start  # type: ignore[arg-type]
