"""`finetune compare`: every row by what varies, figures from the jobs' own metrics, losses that agree."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune.cli.main import main
from finetune.errors import EnvironmentMismatch, FinetuneError, RecipeError
from finetune.model.base_identity import base_identity
from finetune.model.optimizer import Schedule
from finetune.preflight import compare_report
from finetune.preflight import comparison as comparison_module
from finetune.preflight.compare_report import draw, moved_per_step, print_tables, run_and_report
from finetune.preflight.compare_rows import rows_of_options
from finetune.preflight.comparison import (
    Comparison,
    best_entry,
    figures,
    job_command,
    loss_agreement,
    notes,
    plan_comparison,
    preference_verdict,
    ranking,
)
from finetune.preflight.job import failure_reason
from finetune.recipe.loader import load_recipe
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.preferences import preference_recipe
from tests.support.runs.recipes import tiny, write_recipe

GIB = 2**30
TORCHRUN = (
    "E1121 10:00:53.549000 8444 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 4)\n"
    "Traceback (most recent call last):\n  File x\nChildFailedError:\nFailures:\n[1]:\n  exitcode  : -15 (pid: 8447)\n"
    "Root Cause (first observed failure):\n[0]:\n  exitcode  : 4 (pid: 8448)\n"
)


@pytest.fixture
def recipe(tiny_llama: Path, tmp_path: Path) -> Path:
    """Four rows a step, one micro-step on two ranks; full fine-tuning in float32."""
    chats = write_chats(tmp_path / "chats.jsonl", [20, 30, 40, 50])
    content: dict[str, Any] = {
        "lora": None,
        "data": {"packing": False, "max_length": 64},
        "training": {"global_batch_size": 4, "per_device_batch_size": 2, "learning_rate": 1e-3},
        "output_dir": str(tmp_path / "run"),
    }
    return write_recipe(tmp_path, tiny(tiny_llama, chats, **content))


def comparison(recipe: Path, **changes: Any) -> Comparison:
    asked = rows_of_options(changes.pop("vary", []), changes.pop("strategies", "single,ddp"))
    options: dict[str, Any] = {"steps": 3, "processes": None, "folder": None}
    return plan_comparison(recipe, changes.pop("overrides", []), asked, **(options | changes))


def phase_line(phase: str, step: int, rank: int, peak: int, **moved: int) -> dict[str, Any]:
    return {
        "kind": "phase",
        "phase": phase,
        "step": step,
        "rank": rank,
        "seconds": 0.5,
        **{f"{key}_gib": peak / GIB for key in ("peak", "allocated", "host_peak", "host_allocated")},
        "collectives": dict.fromkeys(moved, 1),
        "bytes": moved,
        "ring_bytes": sum(moved.values()),
        "textbook_bytes": 2 * sum(moved.values()),
    }


def finished(strategy: str = "ddp", loss: float = 1.0, scale: int = 1, curve: int = 0) -> dict[str, Any]:
    """A row as a job with two ranks and two steps gives it."""
    lines: list[dict[str, Any]] = [phase_line("load", 0, 0, 100 * scale)]
    for step in (1, 2):
        lines.append({"kind": "train", "step": step, "loss": loss * 3 / step, "step_seconds": 10.0 / step**2})
        lines += [phase_line("forward", step, rank, scale * (1000 * step + rank)) for rank in (0, 1)]
        lines += [phase_line("backward", step, rank, 7 * scale, all_reduce=2 * step + rank) for rank in (0, 1)]
        lines += [phase_line("step", step, rank, 5 * scale) for rank in (0, 1)]
    parameters = {"trained": 100, "frozen": 0}
    receipt = {"world_size": 2, "parameters": parameters, "dtypes": {"master": "float32"}}
    row = {"name": strategy, "strategy": strategy, "curve": curve, "mixed_precision": "no"}
    return {**row, "ok": True, "reason": None, "log": "x", **figures(lines, receipt)}


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "recipe": "r.yaml",
        "varied": ["accelerate_config"],
        "device": "cpu",
        "processes": 2,
        "steps": 2,
        "rows": list(rows),
        "losses": loss_agreement(rows),
        "ranked_by": "loss",
        "notes": ["a note"],
    }


REASON = "zero9: there is [no] such thing; take zero3"
REFUSED = {"name": "zero9", "strategy": "zero9", "curve": 0, "ok": False, "reason": REASON, "log": "x"}


@pytest.mark.thorough
def test_a_schedule_longer_than_the_comparison_is_fitted_into_it(recipe: Path) -> None:
    words = [
        "training.lr_scheduler_type=warmup_stable_decay", "training.warmup_steps=100",
        "training.lr_scheduler_kwargs={num_stable_steps: 0, num_decay_steps: 2}",
    ]  # fmt: skip
    planned = comparison(recipe, overrides=words, strategies="single", steps=5)
    overrides = [word for word in job_command(planned, planned.rows[0]) if "=" in word]
    training = load_recipe(recipe, overrides).recipe.training
    rate = Schedule(training, 5).rate
    assert [rate(step) / 1e-3 for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert any("training.warmup_steps=5" in note for note in notes(planned))
    assert comparison(recipe).rows[0].shortened == ()


def test_figures_are_the_highest_of_ranks_and_the_last_step_s_traffic() -> None:
    row = finished()
    assert row["phases"]["forward"]["peak_bytes"] == 2001  # rank 1, step 2
    assert row["phases"]["backward"]["bytes"] == {"all_reduce": 5}  # rank 1, step 2
    assert moved_per_step(row) == 10
    assert row["seconds_per_20_steps"] == 50.0  # without the first step
    assert row["trained_bytes"] == 400
    assert row["losses"] == [3.0, 1.5]


def test_losses_must_agree() -> None:
    assert loss_agreement([finished(loss=1.0), finished(loss=1.00001)])["agree"]
    rows = [finished(loss=1.0), REFUSED, finished(loss=1.001)]
    assert not loss_agreement(rows)["agree"]
    assert loss_agreement([row | {"mixed_precision": "bf16"} for row in rows])["agree"]
    assert loss_agreement([REFUSED])["agree"]


def test_only_rows_that_learn_the_same_must_agree() -> None:
    rows = [finished("a"), finished("b", loss=2.0, curve=1), finished("c", loss=1.00001), finished("d", 2.2, curve=1)]
    losses = loss_agreement(rows)
    assert [group["rows"] for group in losses["groups"]] == [["a", "c"], ["b", "d"]]
    assert [group["agree"] for group in losses["groups"]] == [True, False]
    assert losses["worst_relative_difference"] == pytest.approx(0.1)
    assert loss_agreement(rows[:3])["agree"]


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "[x] [WARNING] nothing\naccelerate_config: fsdp9: no; take fsdp2\n" + TORCHRUN,
            "accelerate_config: fsdp9: no",
        ),
        ("a: b\nTraceback (most recent call last)\nsubprocess.CalledProcessError: x", "a: b"),
        ("Traceback (most recent call last)\n  File x\nValueError: odd\n" + TORCHRUN, "ValueError: odd"),
        (
            "Traceback (most recent call last)\nValueError: odd\n"
            "Traceback (most recent call last)\nCalledProcessError: y",
            "ValueError: odd",
        ),
        ("step 3/20\n" + TORCHRUN.replace("exitcode  : 4", "exitcode  : -9"), "killed by signal 9; .* step 3/20"),
        ("", "it printed nothing"),
    ],
)
def test_the_reason_of_a_failure(log: str, reason: str, tmp_path: Path) -> None:
    assert re.match(reason, failure_reason(tmp_path, log))
    assert "\n" not in failure_reason(tmp_path, log)
    (tmp_path / "run_state.json").write_text(json.dumps({"error": "NotFinite: x\ny", "phase": "training", "rank": 1}))
    assert failure_reason(tmp_path, log) == "NotFinite: x y (training, rank 1)"


def test_tables_name_every_row() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    long = [finished(name, scale=2**22) for name in ("zero2_offload", "zero3_offload")]
    print_tables(result(*long, REFUSED), console)
    text = console.export_text()
    for words in ("zero2_offload", "zero3_offload", REASON, "in GiB", "in B", "agree", "a note", "50.00"):
        assert words in " ".join(text.split()), words
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text


@pytest.mark.parametrize(
    ("sizes", "device", "expected"),
    [
        ([1, 1], "cpu", "1 process on the CPU, 2 steps"),
        ([2], "cpu", "2 processes on the CPU, 2 steps"),
        ([1, 4, 4], "NVIDIA L4", "1 and 4 processes on NVIDIA L4, 2 steps"),
    ],
)
def test_the_heading_counts_the_processes_that_ran(sizes: list[int], device: str, expected: str) -> None:
    """Not those that this machine could run: a recipe for one process runs in one."""
    rows = [finished(f"row{number}") | {"world_size": size} for number, size in enumerate(sizes)]
    console = Console(width=100, record=True, file=io.StringIO())
    print_tables(result(*rows) | {"device": device}, console)
    assert expected in console.export_text()


@pytest.mark.thorough
@pytest.mark.draws
def test_the_picture(tmp_path: Path) -> None:
    names = ["ddp", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "fsdp2"]
    draw(result(*[finished(name) for name in names], REFUSED), tmp_path / "compare.png")
    content = (tmp_path / "compare.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 20_000
    draw(result(REFUSED), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_differing_losses_end_in_an_error(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(rows: list[dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        return lambda *_: result(*rows)

    planned = comparison(recipe, folder=tmp_path / "compared")
    planned.folder.mkdir()
    monkeypatch.setattr(
        compare_report, "compare", run([finished("a"), finished("b", loss=1.1), finished("c", curve=1)])
    )
    with pytest.raises(EnvironmentMismatch, match=r"losses a 1\.500000, b 1\.650000$"):
        run_and_report(planned, quiet=False)
    assert "DIFFER" in capsys.readouterr().out
    monkeypatch.setattr(compare_report, "compare", run([REFUSED]))
    with pytest.raises(EnvironmentMismatch, match="no row ran"):
        run_and_report(planned, quiet=True)


def test_what_is_launched(recipe: Path) -> None:
    planned = comparison(recipe, strategies="single,zero3", processes=4)
    alone, four = (" ".join(job_command(planned, row)) for row in planned.rows)
    assert "single.yaml --num_processes 1" in alone
    assert "cpu_2proc.yaml --num_processes 4" in four
    assert "accelerate_config=zero3" in four
    assert "measure_phases=true" in four
    on_gpus = " ".join(job_command(replace(planned, device="NVIDIA H200"), planned.rows[1]))
    assert "--multi_gpu --main_process_port 0 --num_processes 4" in on_gpus
    assert "config_file" not in on_gpus


def test_mistakes_are_reported_before_anything_runs(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        comparison(recipe, overrides=["nonsense=1"])
    with pytest.raises(RecipeError, match="nonsense"):
        comparison(recipe, strategies="ddp,nonsense")
    with pytest.raises(FinetuneError, match="--strategies"):
        comparison(recipe, strategies=" , ")
    with pytest.raises(FinetuneError, match="not a comparison"):
        comparison(recipe, folder=tmp_path)  # the recipe is in it
    assert main(["compare", str(tmp_path / "missing.yaml")]) == 2


@pytest.mark.slow
def test_strategies_and_a_refusal(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "compared"
    words = ["compare", str(recipe), "--strategies", "single,ddp,fsdp2,hsdp", "--steps", "3", "-o", str(folder)]
    assert main([*words, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    written = json.loads((folder / "compare.json").read_text("utf-8"))
    assert result == {"ok": True, **written}
    single, ddp, fsdp2, hsdp = written["rows"]
    assert [row["ok"] for row in written["rows"]] == [True, True, True, False]
    assert "hsdp" in hsdp["reason"]
    assert written["losses"]["agree"]
    assert written["losses"]["worst_relative_difference"] < 1e-6
    assert [row["world_size"] for row in (single, ddp, fsdp2)] == [1, 2, 2]
    assert set(ddp["phases"]) == {"load", "forward", "backward", "step", "save"}
    weights = ddp["trained_bytes"]
    assert ddp["phases"]["backward"]["collectives"] == {"all_reduce": 1}
    assert ddp["phases"]["backward"]["textbook_bytes"] == 2 * weights
    assert moved_per_step(single) == 0
    # Backward begins where forward ended, with the head and the last norm: these are gathered once, the rest twice.
    head = 4 * (512 * 64 + 64)
    assert fsdp2["phases"]["forward"]["bytes"] == {"all_gather": weights}
    assert fsdp2["phases"]["backward"]["bytes"] == {"all_gather": weights - head, "reduce_scatter": weights}
    assert moved_per_step(fsdp2) == pytest.approx(3 * weights - head, rel=0.001)
    assert fsdp2["phases"]["step"]["allocated_bytes"] == pytest.approx(1.5 * weights, rel=0.05)
    assert single["phases"]["load"]["allocated_bytes"] == pytest.approx(weights, rel=0.01)
    assert single["phases"]["step"]["allocated_bytes"] == pytest.approx(3 * weights, rel=0.05)
    assert (folder / "compare.png").is_file()
    assert not list(folder.glob("jobs/*/checkpoints"))
    assert not list(folder.glob("jobs/*/model"))
    assert main([*words, "--steps", "1"]) == 0  # again into the same folder


@pytest.mark.slow
def test_zero_moves_what_the_textbook_says(recipe: Path, tmp_path: Path) -> None:
    """ZeRO-1 and 2 reduce P and gather P. ZeRO-3 gathers twice what it does not keep, and reduces P."""
    pytest.importorskip("deepspeed")
    model = save_tiny(tmp_path / "deep", num_hidden_layers=10)
    names = ["ddp", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"]
    folder, key = tmp_path / "compared", f"model.name_or_path={model}"
    words = ["compare", str(recipe), key, "--strategies", ",".join(names), "--steps", "3", "-o", str(folder)]
    assert main(words) == 0
    rows = {row["strategy"]: row for row in json.loads((folder / "compare.json").read_text("utf-8"))["rows"]}
    assert {name: row["reason"] for name, row in rows.items()} == dict.fromkeys(names)
    weights = rows["ddp"]["trained_bytes"]
    for name in ("zero1", "zero2", "zero2_offload"):
        phases = rows[name]["phases"]
        assert phases["forward"]["bytes"] == {}
        assert phases["backward"]["bytes"] == {"reduce": weights}
        assert phases["step"]["bytes"]["all_gather"] == pytest.approx(weights, rel=0.001)  # padded to the ranks
        assert moved_per_step(rows[name]) == pytest.approx(2 * weights, rel=0.001)
    # Two layers and the largest tensor stay gathered from forward to backward, as `buckets` in zero.py lets them.
    layer = 4 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3 + 2 * 64)
    gathered = 2 * layer + 4 * 512 * 64
    for name in ("zero3", "zero3_offload"):
        phases = rows[name]["phases"]
        assert phases["backward"]["bytes"]["reduce_scatter"] == pytest.approx(weights, rel=0.001)
        assert 3 * weights - 1.2 * gathered < moved_per_step(rows[name]) < 3.05 * weights
    assert rows["zero1"]["phases"]["step"]["allocated_bytes"] < rows["ddp"]["phases"]["step"]["allocated_bytes"]


def swept(rate: str, seed: int, held_out: list[list[float]]) -> dict[str, Any]:
    settings = {"training.learning_rate": rate, "training.seed": str(seed)}
    row = finished(f"learning_rate={rate} seed={seed}", curve=seed)
    return row | {"settings": settings, "held_out": held_out}


SWEPT = [
    swept("1e-3", 1, [[0, 4.0], [6, 3.0], [12, 2.5]]),
    swept("1e-3", 2, [[0, 4.0], [6, 3.1], [12, 2.7]]),
    swept("5e-3", 1, [[0, 4.0], [6, 2.2], [12, 2.4]]),
    swept("5e-3", 2, [[0, 4.0], [6, 2.0], [12, 2.6]]),
]


def test_rows_are_ranked_by_their_best_held_out_loss_over_seeds() -> None:
    best, second = ranking(SWEPT)
    assert (best["name"], best["step"]) == ("learning_rate=5e-3", 6)
    assert (best["best"], best["spread"]) == pytest.approx((2.1, 0.1))
    assert (second["best"], second["spread"]) == pytest.approx((2.6, 0.1))
    assert second["rows"] == ["learning_rate=1e-3 seed=1", "learning_rate=1e-3 seed=2"]


def rewarded(beta: str, accuracies: list[float], margins: list[float]) -> dict[str, Any]:
    """A row on preferences with an evaluation every sixth step."""
    points = {
        "reward_accuracy": [[6 * place, value] for place, value in enumerate(accuracies)],
        "reward_margin": [[6 * place, value] for place, value in enumerate(margins)],
    }
    final = {"reward_accuracy": accuracies[-1], "reward_margin": margins[-1]}
    row = swept("1e-3", 1, [[6 * place, 0.7 - 0.01 * place] for place in range(len(accuracies))])
    named = {"name": f"beta={beta}", "settings": {"dpo.beta": beta}}
    return row | named | {"held_out_rewards": points, "final_rewards": final}


def test_rows_on_preferences_are_ranked_by_the_highest_reward() -> None:
    rows = [rewarded("0.1", [0.0, 0.6, 0.7], [0.0, 0.5, 0.2]), rewarded("0.5", [0.0, 0.8, 0.5], [0.0, 0.1, 0.4])]
    best, second = ranking(rows, "reward_accuracy")
    assert (best["name"], best["best"], best["step"]) == ("beta=0.5", 0.8, 6)
    assert best["beside"] == {"loss": pytest.approx(0.69), "reward_margin": 0.1}
    assert [entry["name"] for entry in ranking(rows, "reward_margin")] == ["beta=0.1", "beta=0.5"]
    assert [entry["best"] for entry in ranking(rows, "loss")] == pytest.approx([0.68, 0.68])
    console = Console(file=io.StringIO(), width=120)
    summary = result(*rows) | {"ranking": [best, second], "ranked_by": "reward_accuracy", "varied": ["dpo.beta"]}
    print_tables(summary, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Best held-out reward accuracy, the highest first" in shown
    assert re.search(r"\n +beta +accuracy.*\n.*\n +0.5 +80.0% +0.6900 +0.1 +6 ", shown)
    nothing_held_out = [row | {"held_out": [], "held_out_rewards": {}} for row in rows]
    best, second = ranking(nothing_held_out, "reward_accuracy")
    assert (best["name"], best["best"], best["step"]) == ("beta=0.1", 0.7, None)


def far_row(rate: str, loss: float, kl: float | None, chosen: float = -0.5, seed: int = 1) -> dict[str, Any]:
    """A row on pairs with two evaluations: its KL by token at the second one is `kl`; None: SimPO has none."""
    points: dict[str, Any] = {"reward_accuracy": [[0, 0.0], [6, 1.0]], "logp_chosen_by_token": [[0, -0.4], [6, chosen]]}
    if kl is not None:
        points["kl_by_token"] = [[0, 0.0], [6, kl]]
    final = {name: values[-1][1] for name, values in points.items()}
    return swept(rate, seed, [[0, 0.69], [6, loss]]) | {"held_out_rewards": points, "final_rewards": final}


@pytest.mark.parametrize(
    ("rows", "best", "above"),
    [
        ([("5e-4", 0.001, 0.819), ("1e-4", 0.5, 0.1), ("1e-5", 0.6, 0.0)], "1e-4", 1),
        ([("5e-4", 0.001, 0.8), ("1e-4", 0.5, 0.1)], "5e-4", 0),  # the limit itself is allowed
        ([("5e-4", 0.9, 3.0), ("1e-4", 0.5, 0.1)], "1e-4", 0),  # ranks below the best anyway
        ([("5e-4", 0.1, 3.0), ("1e-4", 0.5, 0.9)], None, 2),
        ([("5e-4", 0.1, None), ("1e-4", 0.5, None)], "5e-4", 0),  # without a reference
        ([("5e-4", 0.1, -3.1), ("1e-4", 0.5, 0.1)], "5e-4", 0),
        ([("5e-4", 0.1, 0.2, -0.4, 1), ("5e-4", 0.1, 1.2, -0.4, 2), ("1e-4", 0.5, 0.1)], "1e-4", 1),  # one seed
        ([("5e-4", 0.001, 0.819), ("1e-4", 0.5, None)], "1e-4", 1),  # one figure is missing
    ],
)
def test_a_row_too_far_from_its_reference_is_not_the_best(
    rows: list[tuple[Any, ...]], best: str | None, above: int, tmp_path: Path
) -> None:
    """docs/preferences.md calls a KL by token over 0.8 bad, however low the loss is."""
    made = [far_row(*row) for row in rows]
    ranked = ranking(made)
    found = best_entry(ranked)
    assert (found and found["name"]) == (best and f"learning_rate={best}")
    lines = preference_verdict(ranked)
    assert len(lines) == (above and above + 1)
    assert [line.endswith(f"learning_rate={best}.") for line in lines[above:]] == [best is not None] * bool(above)
    summary = result(*made) | {"ranking": ranked, "varied": ["training.learning_rate"], "notes": [*lines, "a note"]}
    console = Console(file=io.StringIO(), width=80)
    print_tables(summary, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(line in " ".join(shown.split()) for line in lines)
    heading = next(line for line in shown.splitlines() if "loss  " in line)
    assert "chosen" in heading
    assert ("KL" in heading) == any(row[2] is not None for row in rows)
    assert re.search(r"^ +[15]e-[45] ", shown, re.MULTILINE)  # the key's name is above the column alone
    if best is None:
        draw(summary, tmp_path / "curves.png")


def test_a_comparison_has_a_bounded_number_of_rows() -> None:
    """10,000 values, or a product of 10^6, are one line at once, and not minutes of reading."""
    rates = ",".join(f"{number}e-6" for number in range(1, 1001))
    for ask in (
        lambda: rows_of_options([f"training.learning_rate={rates}"], None),
        lambda: rows_of_options([f"training.learning_rate={rates}", f"training.weight_decay={rates}"], None),
        lambda: rows_of_options(["training.weight_decay=0,1,2,3,4,5,6,7,8,9,10"], None, seeds=20),
    ):
        with pytest.raises(FinetuneError, match=r"[\d,]+ rows: a comparison has 200 at most"):
            ask()
    assert len(rows_of_options(["training.weight_decay=0,1,2,3,4,5,6,7,8,9"], None, seeds=20)) == 200


def test_rewards_of_a_job(tmp_path: Path) -> None:
    """A step of judged answers may have wanted ones alone: then the margin of the step before it is the last."""
    rewards = {"reward_accuracy": 1.0, "reward_margin": 0.5}
    lines: list[dict[str, Any]] = [
        {"kind": "eval", "step": 0, "loss": 0.7, "reward_accuracy": 0.0, "reward_margin": 0.0},
        {"kind": "train", "step": 1, "loss": 0.7, "step_seconds": 1.0, **rewards},
        {"kind": "train", "step": 2, "loss": 0.6, "step_seconds": 1.0, "reward_accuracy": 0.25},
    ]
    receipt = {"world_size": 1, "parameters": {"trained": 1, "frozen": 0}, "dtypes": {"master": "float32"}}
    row = figures(lines, receipt)
    assert row["final_rewards"] == {"reward_accuracy": 0.25, "reward_margin": 0.5}
    assert row["held_out_rewards"] == {"reward_accuracy": [[0, 0.0]], "reward_margin": [[0, 0.0]]}


@pytest.mark.parametrize(
    ("vary", "metric", "by"),
    [
        ("training.learning_rate=1e-6,1e-5", "eval_loss", "loss"),
        ("dpo.beta=0.1,0.5", "eval_loss", "reward_accuracy"),
        ("dpo.loss_type=sigmoid,ipo", "eval_loss", "reward_accuracy"),
        ("training.learning_rate=1e-6,1e-5", "eval_reward_margin", "reward_margin"),
    ],
)
def test_the_figure_that_ranks(tiny_llama: Path, tmp_path: Path, vary: str, metric: str, by: str) -> None:
    """Losses of two objectives cannot be compared; else the loss ranks, or what the recipe calls the best."""
    changes = {"data": {"eval": {"fraction": 0.25}}, "training": {"metric_for_best_model": metric}}
    recipe = preference_recipe(tmp_path / "dpo", tiny_llama, "dpo", changes)
    asked = {"vary": [vary], "strategies": None, "folder": tmp_path / "c"}
    assert comparison(recipe, **asked).ranked_by == by


@pytest.mark.draws
def test_a_sweep_shows_its_ranking_alone(tmp_path: Path) -> None:
    """With strategies in it, memory and traffic too."""
    console = Console(file=io.StringIO(), width=120)
    summary = result(*SWEPT) | {"ranking": ranking(SWEPT), "varied": ["training.learning_rate", "training.seed"]}
    print_tables(summary, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.index("5e-3") < shown.index("1e-3")
    assert "2.1000 ± 0.1000" in shown
    assert "Memory of a rank" not in shown
    assert "traffic" not in shown
    print_tables(summary | {"varied": ["accelerate_config", "training.seed"]}, console)
    assert "Memory of a rank" in console.file.getvalue()  # type: ignore[attr-defined]
    draw(summary, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_seeds_are_one_more_axis() -> None:
    rows = rows_of_options(["training.learning_rate=1e-3,2e-3"], None, seeds=2)
    assert [row.name for row in rows] == [
        "learning_rate=1e-3 seed=1", "learning_rate=1e-3 seed=2",
        "learning_rate=2e-3 seed=1", "learning_rate=2e-3 seed=2",
    ]  # fmt: skip


def test_a_comparison_that_was_stopped_repeats_nothing_that_is_finished(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def run(compared: Comparison, row: Any, progress: Any) -> dict[str, Any]:
        started.append(row.name)
        if len(started) == 2:
            raise KeyboardInterrupt
        (compared.job_folder(row) / "metrics.jsonl").parent.mkdir(parents=True, exist_ok=True)
        (compared.job_folder(row) / "metrics.jsonl").write_text("")
        receipt = {"base": base_identity(row.recipe.model)}
        (compared.job_folder(row) / "receipt.json").write_text(json.dumps(receipt))
        facts = finished(row.name) | {"settings": dict(row.settings), "key": comparison_module._key(compared, row)}
        return facts | {"held_out": [[3, 1.0]]}

    monkeypatch.setattr(comparison_module, "_run", run)
    vary = {"vary": ["training.learning_rate=1e-3,2e-3,4e-3"], "strategies": None, "folder": tmp_path / "c"}
    with pytest.raises(KeyboardInterrupt):
        comparison_module.compare(comparison(recipe, **vary), lambda name, step: None)
    summary = comparison_module.compare(comparison(recipe, **vary), lambda name, step: None)
    assert started == [f"learning_rate={rate}" for rate in ("1e-3", "2e-3", "2e-3", "4e-3")]
    assert [row["name"] for row in summary["rows"]] == [f"learning_rate={rate}" for rate in ("1e-3", "2e-3", "4e-3")]
    comparison_module.compare(comparison(recipe, **vary, steps=4), lambda name, step: None)
    assert len(started) == 7  # other steps are another comparison
    comparison_module.compare(comparison(recipe, **vary, steps=4), lambda name, step: None)
    assert len(started) == 7
    other = {"content": "of other weights under the same name"}
    monkeypatch.setattr(comparison_module, "base_identity", lambda model: base_identity(model) | other)
    comparison_module.compare(comparison(recipe, **vary, steps=4), lambda name, step: None)
    assert len(started) == 10


def test_the_tasks_of_a_job_array_make_one_comparison(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row alone, in any order, at the same time or again: compare.json has every row in the comparison's order."""
    started, fails = list[str](), {"learning_rate=2e-3"}

    def run(compared: Comparison, row: Any, progress: Any) -> dict[str, Any]:
        started.append(row.name)
        folder = compared.job_folder(row)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("")
        (folder / "receipt.json").write_text(json.dumps({"base": base_identity(row.recipe.model)}))
        facts = finished(row.name) | {"settings": dict(row.settings), "held_out": [[3, 1.0]]}
        if row.name in fails:
            return {"name": row.name, "settings": dict(row.settings), "ok": False, "reason": "out of memory"}
        return facts

    monkeypatch.setattr(comparison_module, "_run", run)
    rates = ["1e-3", "2e-3", "4e-3"]
    vary = {"vary": [f"training.learning_rate={','.join(rates)}"], "strategies": None, "folder": tmp_path / "c"}
    tasks = [
        threading.Thread(target=comparison_module.compare_one, args=(comparison(recipe, **vary), number, no_progress))
        for number in (3, 1, 2)
    ]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    stored = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert [(row["name"], row["ok"], row.get("reason")) for row in stored["rows"]] == [
        ("learning_rate=1e-3", True, None),
        ("learning_rate=2e-3", False, "out of memory"),
        ("learning_rate=4e-3", True, None),
    ]
    assert sorted(started) == [f"learning_rate={rate}" for rate in rates]
    fails.clear()
    for number in (1, 2):
        result = comparison_module.compare_one(comparison(recipe, **vary), number, no_progress)
    assert started[3:] == ["learning_rate=2e-3"]  # what has finished is not repeated
    assert [row["ok"] for row in result["rows"]] == [True, True, True]
    assert comparison_module.compare(comparison(recipe, **vary), no_progress)["rows"] == result["rows"]
    assert len(started) == 4
    # The recipe changes while tasks wait: their rows are not of one comparison.
    changed = comparison(recipe, **vary, overrides=["training.weight_decay=0.1"])
    result = comparison_module.compare_one(changed, 1, no_progress)
    assert [row["name"] for row in result["rows"]] == ["learning_rate=1e-3"]
    assert result["notes"][-1].endswith("row 1's: learning_rate=2e-3, learning_rate=4e-3.")
    with pytest.raises(FinetuneError, match=r"--only: 4: there are 3 rows"):
        comparison_module.compare_one(comparison(recipe, **vary), 4, no_progress)


@pytest.mark.parametrize("named", ["path", "data_files", "pattern", "folder", "scored", "adapter"])
def test_a_row_of_other_files_is_of_another_comparison(
    recipe: Path, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that the recipe names in any way is edited, and keeps its size."""
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    file = write_chats(Path("rows/one.jsonl"), [20, 30])
    entry = {
        "path": ["data.train=[{path: rows/one.jsonl}]"],
        "data_files": ["data.train=[{path: json, data_files: rows/one.jsonl}]"],
        "pattern": ["data.train=[{path: json, data_files: 'rows/*.jsonl'}]"],
        "folder": ["data.train=[{path: rows}]"],
        "scored": ["eval.generate.file=rows/one.jsonl"],
        "adapter": [],
    }[named]
    if named == "adapter":
        file = Path("rows/adapter_model.safetensors")
        file.write_bytes(b"weights")
    asked = {"vary": ["training.seed=1,2"], "strategies": None, "folder": tmp_path / "c", "overrides": entry}
    keys = []
    for time in (1, 1, 2):
        os.utime(file, (time, time))
        made = comparison(recipe, **asked)
        row = made.rows[0]
        if named == "adapter":
            model = row.recipe.model.model_copy(update={"adapter": "rows"})
            row = replace(row, recipe=row.recipe.model_copy(update={"model": model}))
        keys.append(comparison_module._key(made, row))
    assert keys[0] == keys[1] != keys[2]


def no_progress(name: str, step: int | None) -> None:
    """Nobody looks."""


def test_a_job_array_runs_each_row_of_the_command(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "a b.sh", tmp_path / "c d"
    words = [str(recipe), "training.learning_rate=1e-3", "--vary", "lora={r: 8},null", "--seeds", "2", "--steps", "4"]
    assert main(["compare", *words, "-o", str(folder), "--array", str(file)]) == 0
    assert "4 jobs" in capsys.readouterr().out
    assert not folder.exists()
    script = file.read_text()
    assert "#SBATCH --array=1-4\n" in script
    assert "gpus" not in script  # the recipe's budget is a CPU
    asked = list[tuple[Comparison, int]]()

    def note(compared: Comparison, *, quiet: bool, only: int) -> dict[str, Any]:
        asked.append((compared, only))
        return {}

    monkeypatch.setattr("finetune.preflight.compare_report.run_and_report", note)
    stub = tmp_path / "finetune"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "3"}
    task = subprocess.run(["bash", str(file)], capture_output=True, text=True, check=True, env=environment)
    assert main(task.stdout.splitlines()) == 0
    assert [(each.folder, each.steps, only) for each, only in asked] == [(folder, 4, 3)]
    assert [dict(row.settings)["lora"] for row in asked[0][0].rows] == ["{r: 8}", "{r: 8}", "null", "null"]
    assert {row.recipe.training.learning_rate for row in asked[0][0].rows} == {1e-3}
    assert main(["compare", *words, "--array", str(recipe)]) == 2
    assert "was not made by finetune" in capsys.readouterr().err
    assert main(["compare", *words, "--array", str(file), "--only", "1"]) == 2
    monkeypatch.undo()
    assert main(["compare", *words, "budget.gpus=4", "--array", str(file)]) == 0
    assert "#SBATCH --gpus-per-node=4\n" in file.read_text()
    assert "--processes 4 " in file.read_text()
    assert main(["compare", str(recipe), "--vary", "budget.gpus=1,2", "--array", str(file)]) == 0
    assert "#SBATCH --gpus-per-node=2\n" in file.read_text()  # every row has room
