"""Plans of the lecture on ZeRO, made by the trace: their time with offload, those that are kept, the whole command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from finetune.paths import CHECKOUT
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.loader import load_recipe
from lectures.__main__ import main
from lectures.command import LECTURES
from lectures.output import LectureRequest
from lectures.zero.holders import HOLDING_RANKS, TRACED_ON, trace_holders
from lectures.zero.notes import HOMEWORK
from lectures.zero.planned import identity_of, kept_plans, plan_row
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import tiny, write_recipe


@pytest.fixture
def recipe(tiny_llama: Path, tmp_path: Path) -> Path:
    chats = write_chats(tmp_path / "chats.jsonl", [20, 30, 40, 50])
    content: Mapping[str, Any] = {"lora": None, "data": {"max_length": 64}, "output_dir": str(tmp_path / "run")}
    return write_recipe(tmp_path, tiny(tiny_llama, chats, **content))


@pytest.mark.slow
def test_offload_is_planned_with_its_time(recipe: Path) -> None:
    pytest.importorskip("deepspeed")
    gpus = parse_gpus("2xA100")
    assert gpus is not None
    rows = {row.name: row for row in HOMEWORK}
    loaded = load_recipe(recipe).recipe
    without, offloaded = (plan_row(rows[name], loaded, gpus) for name in ("zero2", "zero2 + offload"))
    assert (without.reason, offloaded.reason) == (None, None)
    assert without.host == 0.0
    assert offloaded.host > 0.0
    assert offloaded.copies > without.copies
    assert offloaded.end_bytes["step"] < without.end_bytes["step"]


@pytest.mark.slow
def test_a_kept_plan_is_what_the_planner_says() -> None:
    pytest.importorskip("deepspeed")
    of_zero = LECTURES["zero"]
    recipe = load_recipe(CHECKOUT / "recipes" / of_zero.recipe, of_zero.overrides).recipe
    gpus = parse_gpus(of_zero.settings["gpus"])
    assert gpus is not None
    rows, kept = {row.name: row for row in HOMEWORK}, kept_plans(identity_of(recipe, gpus))
    for name in ("zero1", "zero2 + offload"):
        assert plan_row(rows[name], recipe, gpus) == kept[name]


@pytest.mark.slow
def test_who_holds_what_is_as_each_strategy_says(recipe: Path, tiny_llama: Path, tmp_path: Path) -> None:
    """All of the weights, gradients and moments, or a rank's share of them; and what moves: DDP sums 2 P of gradients,
    ZeRO-2 reduces 1 P, whole shards gather the weights before forward and before backward."""
    pytest.importorskip("deepspeed")
    asked = LectureRequest(recipe, ("training.mixed_precision=no",), {}, tmp_path, lambda _: None)
    found = {each.strategy: each for each in trace_holders(asked, tiny_llama)}
    assert {name: each.reason for name, each in found.items()} == dict.fromkeys(TRACED_ON, "")
    one, shard = 1.0, 1 / HOLDING_RANKS
    expected = {  # weights, gradients, moments of the update
        "ddp": (one, one, one),
        "zero1": (one, None, shard),
        "zero2": (one, None, shard),
        "zero3": (shard, None, shard),
        "fsdp2": (shard, shard, shard),
        "fsdp2_grad_op": (None, shard, shard),
        "hsdp": (2 * shard, 2 * shard, 2 * shard),
    }
    for name, shares in expected.items():
        own = found[name].own["step"]
        for part, share in zip(("weights", "gradients", "moments"), shares, strict=True):
            assert share is None or own[part] == pytest.approx(share, rel=0.03), (name, part)
    for name in ("zero2_offload", "zero3_offload", "fsdp2_offload"):
        assert found[name].own["step"]["moments"] == 0
        assert found[name].host["step"] >= 2 * shard
    assert found["ddp"].sent["backward"] == {"all_reduce": pytest.approx(2, rel=0.01)}
    assert found["zero2"].sent["backward"] == {"reduce": pytest.approx(1, rel=0.01)}
    assert found["fsdp2"].sent["forward"] == {"all_gather": pytest.approx(1, rel=0.03)}
    assert found["fsdp2"].sent["backward"]["reduce_scatter"] == pytest.approx(1, rel=0.03)
    assert "all_gather" not in found["fsdp2_grad_op"].sent["backward"]


@pytest.mark.slow
def test_the_whole_lecture(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("deepspeed")
    folder = tmp_path / "held"
    assert main(["zero", str(recipe), "gpus=2xA100", "-o", str(folder), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    runs = {each["name"]: each for each in facts["measured"]["runs"]}
    assert {name: each["reason"] for name, each in runs.items()} == dict.fromkeys(row.name for row in HOMEWORK)
    micro = facts["measured"]["micro_steps"]
    assert runs["zero1"]["in_weights"]["backward"] == pytest.approx(1.0, rel=0.01)
    for name in ("zero2", "zero2 + offload"):
        assert runs[name]["in_weights"]["backward"] == pytest.approx(micro, rel=0.01)
    assert runs["zero3"]["in_weights"]["forward"] > 0.5 * micro
    assert runs["zero3 + fp16"]["in_weights"]["forward"] == pytest.approx(
        runs["zero3"]["in_weights"]["forward"] / 2, rel=0.01
    )
    assert (folder / "zero.png").is_file()
    assert (folder / "zero_holders.png").is_file()
    assert [each["strategy"] for each in facts["holders"]] == list(TRACED_ON)
    assert (folder / "measured" / "compare.json").is_file()
