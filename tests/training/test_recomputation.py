"""`activation_checkpointing: auto` in a run: chosen before it, said in terminal and receipt, and free to change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune.closed_form import recomputation
from finetune.model.known_configs import config_if_known
from finetune.recipe.loader import load_recipe
from finetune.recipe.mixed_precision import ChosenFormats
from finetune.recipe.resolved import LoadedRecipe
from finetune.recipe.strategy import strategy_of
from finetune.train import main
from finetune.training import agreement, worst_step
from finetune.training.agreement import Agreed, own_choices, settle_choices
from finetune.training.batch_plan import plan_batches
from finetune.training.start import Checked, Choices, Start, receipt_of_run
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
        config, batch = config_if_known(began.model), receipt_of_run(began)["batch"]
        chosen = recomputation.choose_recomputation(began, config, None, rows_before=batch["per_device_batch_size"])
        assert chosen.recipe.training.rows_at_once == chosen.rows_facts["runs"] == 1
        assert kept in chosen.rows_facts["line"]


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


def started(setting: Any, folder: Path, *, rows: int = 4, plugin: str = "ddp", **chosen: Any) -> Start:
    """A rank's own start, of two ranks: `chosen` is what `auto` says of the recomputation."""
    recipe = least_recipe(folder, training={"activation_checkpointing": setting}, accelerate_config=plugin)
    of_choices: dict[str, Any] = dict.fromkeys(Choices.__dataclass_fields__)
    facts = {"runs": rows} if rows != 4 else {}
    checked = Checked(
        loaded=LoadedRecipe(recipe, {}, folder),
        launch=ALONE,
        strategy=strategy_of(recipe),
        device=torch.device("cpu"),
        formats=ChosenFormats((), {}, ""),
        command="",
    )
    choices = Choices(**of_choices | {"checked": checked, "recipe": recipe, "recomputation": chosen, "rows": facts})
    plan = plan_batches(recipe, 8, world_size=2, rank=0, flat=True)
    given: dict[str, Any] = dict.fromkeys(Start.__dataclass_fields__)
    return Start(**given | {"choices": choices, "plan": replace(plan, per_device_batch_size=rows)})


def agreed_with(start: Start, **other: Any) -> Agreed:
    """As on the first of two ranks, whose other one has these choices."""
    own = own_choices(start)
    return settle_choices(start, [own, own._replace(**other)], "run")


@pytest.mark.parametrize(
    ("own", "other", "agreed"), [(False, 1, "selective"), (False, 3, True), ("selective", 0, "selective")]
)
def test_ranks_recompute_what_the_one_with_least_memory_has_to(
    own: Any, other: int, agreed: Any, tmp_path: Path
) -> None:
    start = started(own, tmp_path, asked="auto", runs=own, why="there is room", line="a line")
    found = agreed_with(start, recomputation=other)
    assert found.recipe.training.activation_checkpointing == found.recomputation["runs"] == agreed
    line = "a line"
    if agreed != own:
        line = "activation checkpointing: "
        assert found.recomputation["line"].endswith("because another rank's device has less memory")
    assert found.recomputation["line"].startswith(line)
    changed = found.recipe.training.model_copy(update={"activation_checkpointing": own})
    assert found.recipe.model_copy(update={"training": changed, "output_dir": "x"}) == (
        start.choices.recipe.model_copy(update={"output_dir": "x"})
    )
    assert found.run_dir == Path("run")


def test_ranks_take_the_rows_of_the_one_with_least_memory(tmp_path: Path) -> None:
    found = agreed_with(started(False, tmp_path, rows=3), rows=2)
    rows = found.plan.per_device_batch_size, found.recipe.training.rows_at_once, found.rows["runs"]
    assert rows == (2, 2, 2)
    assert found.rows["line"].endswith("another rank's device has less memory")
    found = agreed_with(started(False, tmp_path, rows=3), rows=8)
    assert (found.plan.per_device_batch_size, found.rows) == (3, {"runs": 3})


@pytest.mark.parametrize(
    ("own", "other", "agreed"), [(True, True, True), (True, False, False), (False, True, False), (None, False, None)]
)
def test_ranks_reduce_once_a_step_only_where_all_have_room(
    own: bool | None, other: bool, agreed: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that reduces at another time than the others hangs, or adds up other micro-batches."""
    told: list[bool] = []

    def gather(mine: bool) -> list[bool]:
        told.append(mine)
        return [mine, other]

    chosen = None if own is None else recomputation.Reduction(own, "its own reason")
    monkeypatch.setattr(recomputation, "choose_reduction", lambda *given, **more: chosen)
    monkeypatch.setattr(agreement, "all_ranks", lambda: SimpleNamespace(gather=gather))
    found = agreed_with(started(False, tmp_path, plugin="fsdp2"))
    assert told == [own is True]
    if agreed is None:
        assert (found.strategy.keeps_gradients, found.reduction) == (False, {})
        return
    assert (found.strategy.keeps_gradients, found.reduction["once"]) == (agreed, agreed)
    assert ("another rank's device" in found.reduction["why"]) == (own is True and not agreed)


def test_what_the_recipe_says_is_not_discussed(tmp_path: Path) -> None:
    found = agreed_with(started(False, tmp_path), recomputation=3, rows=1)
    assert (found.recipe.training.activation_checkpointing, found.recomputation, found.rows) == (False, {}, {})
    assert found.plan.per_device_batch_size == 4
