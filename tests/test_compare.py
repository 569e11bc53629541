"""`finetune compare`: rows from what varies, one training each, figures from the runs' own metrics, a ranking."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finetune import compare as module
from finetune.base.identity import base_identity
from finetune.cli.main import main
from finetune.compare import (
    Comparison,
    compare,
    draw,
    figures,
    moved_per_step,
    next_command,
    plan_comparison,
    print_table,
    ranking,
    settings_of_rows,
)
from finetune.errors import FinetuneError
from finetune.launch.watched_job import failure_reason
from finetune.model.optimizer import Schedule
from finetune.recipe.resolved import resolved_yaml
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


def planned(recipe: Path, *vary: str, overrides: list[str] | None = None, **changes: Any) -> Comparison:
    asked = settings_of_rows(vary or ["accelerate_config=single,ddp"], changes.pop("seeds", 1))
    return plan_comparison(recipe, overrides or [], asked, **({"steps": 3, "folder": None} | changes))


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


def finished(name: str = "ddp", loss: float = 1.0, scale: int = 1) -> dict[str, Any]:
    """A row as a run with two ranks and two steps gives it."""
    lines: list[dict[str, Any]] = [phase_line("load", 0, 0, 100 * scale)]
    for step in (1, 2):
        lines.append({"kind": "train", "step": step, "loss": loss * 3 / step, "step_seconds": 10.0 / step**2})
        lines += [phase_line("forward", step, rank, scale * (1000 * step + rank)) for rank in (0, 1)]
        lines += [phase_line("backward", step, rank, 7 * scale, all_reduce=2 * step + rank) for rank in (0, 1)]
        lines += [phase_line("step", step, rank, 5 * scale) for rank in (0, 1)]
    parameters = {"trained": 100, "frozen": 0}
    receipt = {"world_size": 2, "device": "cpu", "parameters": parameters, "dtypes": {"master": "float32"}}
    return {"name": name, "ok": True, "reason": None, **figures(lines, receipt)}


REASON = "zero9: there is [no] such thing; take zero3"
REFUSED = {"name": "zero9", "ok": False, "reason": REASON}


def result(*rows: dict[str, Any], by: str = "loss") -> dict[str, Any]:
    return {"recipe": "r.yaml", "rows": list(rows), "ranked_by": by, "ranking": ranking(rows, by)}


def printed(*rows: dict[str, Any], by: str = "loss", width: int = 80) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    print_table(result(*rows, by=by), console)
    return console.export_text()


# -- rows --------------------------------------------------------------------------------------------------------------


def test_what_varies_is_the_product_and_seeds_are_one_more_axis() -> None:
    rows = settings_of_rows(["accelerate_config=ddp,fsdp2", "training.mixed_precision=no,bf16"])
    assert list(rows) == [
        f"accelerate_config={strategy} mixed_precision={precision}"
        for strategy in ("ddp", "fsdp2")
        for precision in ("no", "bf16")
    ]
    assert list(settings_of_rows(["training.learning_rate=1e-3"], 2)) == [
        "learning_rate=1e-3 seed=1",
        "learning_rate=1e-3 seed=2",
    ]
    assert list(settings_of_rows(["model.revision=main", "data.train.0.revision=main"])) == [
        "model.revision=main data.train.0.revision=main"
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a,b", ["a", "b"]),
        ("{r: 8, lora_alpha: 16},null", ["{r: 8, lora_alpha: 16}", "null"]),
        ("[a, b],[c]", ["[a, b]", "[c]"]),
        ("{a: {b: 1, c: 2}, d: 3},null", ["{a: {b: 1, c: 2}, d: 3}", "null"]),
        ("[[a, b], c],d", ["[[a, b], c]", "d"]),
        ('{k: "}, {", l: 1},x', ['{k: "}, {", l: 1}', "x"]),
        ("\"x, y\",'z'", ['"x, y"', "'z'"]),
        (" a , ,b,a", ["a", "b"]),
    ],
)
def test_commas_within_brackets_and_quotes_part_nothing(text: str, values: list[str]) -> None:
    assert [row["lora"] for row in settings_of_rows([f"lora={text}"]).values()] == values


@pytest.mark.parametrize(
    ("vary", "seeds", "words"),
    [
        (["output_dir=a,b"], 1, "output_dir: each row has its own; name the comparison's folder by -o"),
        (["strategy=ddp"], 1, "strategy: is no recipe key; write --vary accelerate_config=zero2,zero3,fsdp2"),
        (["seed"], 1, "seed: write each key once"),
        (["=1"], 1, "write each key once"),
        (["training.seed= , "], 1, "write each key once"),
        (["training.seed=1", "training.seed=2"], 1, "write each key once"),
        ([], 1, "nothing varies"),
        ([f"training.weight_decay={','.join(map(str, range(1000)))}"], 1, "1,000 rows: a comparison has 200 at most"),
        (["training.weight_decay=0,1,2,3,4,5,6,7,8,9,10"], 20, "220 rows: a comparison has 200 at most"),
    ],
)
def test_an_option_that_means_nothing(vary: list[str], seeds: int, words: str) -> None:
    with pytest.raises(FinetuneError) as caught:
        settings_of_rows(vary, seeds)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mistakes_are_reported_before_anything_runs(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a training was started"))
    for vary, line in (
        ("training.mixed_precison=no,bf16", "training.mixed_precison: is unknown; did you mean"),
        ("training.mixed_precision=fp17,no", "training.mixed_precision: is fp17; did you mean fp16?"),
        ("accelerate_config=ddp,nonsense", "accelerate_config: is nonsense; choose one of"),
        ("quantization={load_in_4bit: true}", "quantization: quantised weights cannot be trained"),
    ):
        assert main(["compare", str(recipe), "--vary", vary]) == 2
        (printed_line,) = capsys.readouterr().err.splitlines()
        assert line in printed_line
    with pytest.raises(FinetuneError, match="not a comparison"):
        planned(recipe, folder=tmp_path)  # the recipe is in it
    assert main(["compare", str(tmp_path / "missing.yaml"), "--vary", "training.seed=1,2"]) == 2
    for option in (["--strategies", "ddp"], ["--array", "x.sh"], ["--only=1"], ["--processes", "2"]):
        assert main(["compare", str(recipe), *option]) == 2
        assert "is not there any more; " in capsys.readouterr().err


@pytest.mark.parametrize(
    "override",
    [
        *("training.max_steps=5", "training={max_steps: 5}", "save_steps=7", "training.resume=never"),
        *(
            "hub={push: true, repo_id: me/x}",
            "run.storage=file:///tmp/runs",
            "run.stop_after=1h",
            "training.num_train_epochs=2",
        ),
    ],
)
def test_an_override_that_a_comparison_would_not_obey_is_refused(override: str, recipe: Path) -> None:
    with pytest.raises(
        FinetuneError, match=r"^command line: [\w.]+: is the same in every row of a comparison; leave it"
    ):
        planned(recipe, overrides=[override])


def test_a_row_sends_nothing_anywhere_and_takes_the_comparisons_steps(recipe: Path, tmp_path: Path) -> None:
    """A row that inherited run.storage wrote its two steps into the place of the real run."""
    content = json.loads(recipe.read_text("utf-8"))
    content |= {"run": {"storage": f"file://{tmp_path}/store", "stop_after": "2h"}, "save_steps": 7}
    content |= {"hub": {"push": True, "repo_id": "me/devils"}}
    write_recipe(recipe.parent, content)
    row = planned(recipe, overrides=[f"output_dir={tmp_path}/other", "training.weight_decay=0.5"]).rows[1]
    read = row.loaded.recipe
    assert (read.storage, read.run.stop_after, read.hub.push, read.hub.checkpoints) == (None, None, False, None)
    assert (read.training.max_steps, read.save_steps, read.training.weight_decay) == (3, 3, 0.5)
    assert read.accelerate_config == "ddp"
    assert read.run_dir == str(tmp_path / "other_compare" / "jobs" / "002_accelerate_config_ddp")


@pytest.mark.thorough
def test_a_schedule_longer_than_the_comparison_is_fitted_into_it(recipe: Path) -> None:
    words = [
        "training.lr_scheduler_type=warmup_stable_decay", "training.warmup_steps=100",
        "training.lr_scheduler_kwargs={num_stable_steps: 0, num_decay_steps: 2}",
    ]  # fmt: skip
    training = planned(recipe, overrides=words, steps=5).rows[0].loaded.recipe.training
    rate = Schedule(training, 5).rate
    assert [rate(step) / 1e-3 for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


# -- figures -----------------------------------------------------------------------------------------------------------


def test_figures_are_the_highest_of_ranks_and_the_last_step_s_traffic() -> None:
    row = finished()
    assert row["phases"]["forward"]["peak_bytes"] == 2001  # rank 1, step 2
    assert row["phases"]["backward"]["bytes"] == {"all_reduce": 5}  # rank 1, step 2
    assert moved_per_step(row) == 10
    assert row["seconds_per_20_steps"] == 50.0  # without the first step
    assert row["trained_bytes"] == 400
    assert row["losses"] == [3.0, 1.5]


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


def swept(rate: str, seed: int, held_out: list[list[float]]) -> dict[str, Any]:
    return finished(f"learning_rate={rate} seed={seed}") | {"held_out": held_out}


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
    assert "2.1000 ± 0.1000" in printed(*SWEPT)
    assert second["rows"] == ["learning_rate=1e-3 seed=1", "learning_rate=1e-3 seed=2"]


def rewarded(beta: str, accuracies: list[float], margins: list[float]) -> dict[str, Any]:
    """A row on preferences with an evaluation every sixth step."""
    points = {
        "reward_accuracy": [[6 * place, value] for place, value in enumerate(accuracies)],
        "reward_margin": [[6 * place, value] for place, value in enumerate(margins)],
    }
    final = {"reward_accuracy": accuracies[-1], "reward_margin": margins[-1]}
    row = swept("1e-3", 1, [[6 * place, 0.7 - 0.01 * place] for place in range(len(accuracies))])
    return row | {"name": f"beta={beta}"} | {"held_out_rewards": points, "final_rewards": final}


def test_the_next_command_has_the_best_rows_settings_and_no_seed(recipe: Path, tmp_path: Path) -> None:
    comparison = planned(recipe, "lora={r: 4},null", seeds=2, overrides=["training.weight_decay=0.5"])
    losses = dict(zip((row.name for row in comparison.rows), (3.0, 3.0, 1.0, 2.0), strict=True))
    rows = [finished(name, loss) for name, loss in losses.items()]
    words = ["finetune", "train", str(recipe), "training.weight_decay=0.5", "lora=null"]
    assert shlex.split(next_command(comparison, result(*rows))) == words


def test_rows_on_preferences_are_ranked_by_the_highest_reward() -> None:
    rows = [rewarded("0.1", [0.0, 0.6, 0.7], [0.0, 0.5, 0.2]), rewarded("0.5", [0.0, 0.8, 0.5], [0.0, 0.1, 0.4])]
    best, _ = ranking(rows, "reward_accuracy")
    assert (best["name"], best["best"], best["step"]) == ("beta=0.5", 0.8, 6)
    assert [entry["name"] for entry in ranking(rows, "reward_margin")] == ["beta=0.1", "beta=0.5"]
    assert [entry["best"] for entry in ranking(rows, "loss")] == pytest.approx([0.68, 0.68])
    shown = " ".join(printed(*rows, by="reward_accuracy").split())
    assert shown.index("beta=0.5") < shown.index("beta=0.1")
    nothing_held_out = [row | {"held_out": [], "held_out_rewards": {}} for row in rows]
    best, _ = ranking(nothing_held_out, "reward_accuracy")
    assert (best["name"], best["best"], best["step"]) == ("beta=0.1", 0.7, None)


def far_row(rate: str, loss: float, kl: float | None, chosen: float = -0.5, seed: int = 1) -> dict[str, Any]:
    """A row on pairs with two evaluations: its KL by token at the second one is `kl`; None: SimPO has none."""
    points: dict[str, Any] = {"reward_accuracy": [[0, 0.0], [6, 1.0]], "logp_chosen_by_token": [[0, -0.4], [6, chosen]]}
    if kl is not None:
        points["kl_by_token"] = [[0, 0.0], [6, kl]]
    final = {name: values[-1][1] for name, values in points.items()}
    return swept(rate, seed, [[0, 0.69], [6, loss]]) | {"held_out_rewards": points, "final_rewards": final}


@pytest.mark.parametrize(
    ("rows", "first", "far"),
    [
        ([("5e-4", 0.001, 0.819), ("1e-4", 0.5, 0.1), ("1e-5", 0.6, 0.0)], "1e-4", 1),
        ([("5e-4", 0.001, 0.8), ("1e-4", 0.5, 0.1)], "5e-4", 0),  # the limit itself is allowed
        ([("5e-4", 0.1, 3.0), ("1e-4", 0.5, 0.9)], "5e-4", 2),
        ([("5e-4", 0.1, None), ("1e-4", 0.5, None)], "5e-4", 0),  # without a reference
        ([("5e-4", 0.1, 0.2, -0.4, 1), ("5e-4", 0.1, 1.2, -0.4, 2), ("1e-4", 0.5, 0.1)], "1e-4", 1),  # one seed
        ([("5e-4", 0.001, 0.819), ("1e-4", 0.5, None)], "1e-4", 1),  # one figure is missing
    ],
)
def test_a_row_too_far_from_its_reference_comes_last(rows: list[tuple[Any, ...]], first: str, far: int) -> None:
    """docs/preferences.md calls a KL by token over 0.8 bad, however low the loss is."""
    made = [far_row(*row) for row in rows]
    ranked = ranking(made)
    assert ranked[0]["name"] == f"learning_rate={first}"
    assert [bool(entry["too_far"]) for entry in ranked] == sorted(bool(entry["too_far"]) for entry in ranked)
    assert sum(bool(entry["too_far"]) for entry in ranked) == far
    assert printed(*made).count("(docs/preferences.md)") == far


def test_rewards_of_a_job() -> None:
    """A step of judged answers may have wanted ones alone: then the margin of the step before it is the last."""
    rewards = {"reward_accuracy": 1.0, "reward_margin": 0.5}
    lines: list[dict[str, Any]] = [
        {"kind": "eval", "step": 0, "loss": 0.7, "reward_accuracy": 0.0, "reward_margin": 0.0},
        {"kind": "train", "step": 1, "loss": 0.7, "step_seconds": 1.0, **rewards},
        {"kind": "train", "step": 2, "loss": 0.6, "step_seconds": 1.0, "reward_accuracy": 0.25},
    ]
    receipt = {
        "world_size": 1,
        "device": "cpu",
        "parameters": {"trained": 1, "frozen": 0},
        "dtypes": {"master": "float32"},
    }
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
    assert planned(recipe, vary, folder=tmp_path / "c").ranked_by == by


# -- the table and the picture -----------------------------------------------------------------------------------------


def test_the_table_names_every_row() -> None:
    text = printed(*(finished(name, scale=2**22) for name in ("zero2_offload", "zero3_offload")), REFUSED)
    for words in ("zero2_offload", "zero3_offload", REASON, "peak", "moved", "2.50", "1.50000"):
        assert words in " ".join(text.split()), words
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text


@pytest.mark.thorough
@pytest.mark.draws
def test_the_picture(tmp_path: Path) -> None:
    draw(result(*(finished(name) for name in ("ddp", "zero1", "zero2", "fsdp2")), REFUSED), tmp_path / "compare.png")
    draw(result(*SWEPT), tmp_path / "swept.png")
    for name in ("compare.png", "swept.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert len(content) > 10_000


# -- one loop ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trainings that take no time and leave what a finished run leaves; one of a rate of 4e-3 fails."""
    names: list[str] = []

    def train(recipe: Path, row: Any, progress: Any) -> str | None:
        names.append(row.name.partition("=")[2])
        row.folder.mkdir(parents=True, exist_ok=True)
        (row.folder / "recipe.yaml").write_text(resolved_yaml(row.loaded), "utf-8")
        state = "failed" if names[-1] == "4e-3" else "finished"
        facts = {"state": state, "step": 3, "command": "", "identity": {}}
        (row.folder / "run_state.json").write_text(json.dumps(facts))
        (row.folder / "metrics.jsonl").write_text(
            "".join(
                f"{json.dumps({'kind': 'train', 'step': step, 'loss': 1.0, 'step_seconds': 1.0})}\n" for step in (1, 2)
            )
            + "".join(f"{json.dumps(phase_line(name, 1, 0, 9))}\n" for name in ("forward", "backward", "step"))
        )
        receipt = {"world_size": 1, "device": "cpu", "parameters": {"trained": 1}, "dtypes": {"master": "float32"}}
        (row.folder / "receipt.json").write_text(json.dumps(receipt | {"base": base_identity(row.loaded.recipe.model)}))
        return "out of memory" if state == "failed" else None

    monkeypatch.setattr(module, "_train", train)
    return names


def test_a_comparison_that_was_stopped_repeats_nothing_that_is_finished(
    recipe: Path, tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**changes: Any) -> tuple[list[str], dict[str, Any]]:
        trained.clear()
        made = planned(recipe, "training.learning_rate=1e-3,2e-3,4e-3", folder=tmp_path / "c", **changes)
        summary = compare(made, lambda name, step: None)
        return list(trained), summary

    began, summary = run()
    assert began == ["1e-3", "2e-3", "4e-3"]
    assert [(row["ok"], row["reason"]) for row in summary["rows"]] == [(True, None)] * 2 + [(False, "out of memory")]
    assert json.loads((tmp_path / "c" / "compare.json").read_text("utf-8")) == json.loads(json.dumps(summary))
    assert run()[0] == ["4e-3"], "a row that failed is tried again"
    assert run(steps=4)[0] == ["1e-3", "2e-3", "4e-3"], "other steps are other rows"
    assert run(steps=4, overrides=["training.weight_decay=0.1"])[0] == ["1e-3", "2e-3", "4e-3"]
    began, _ = run(steps=4, overrides=["training.weight_decay=0.1"])
    assert began == ["4e-3"]
    os.utime(tmp_path / "chats.jsonl", (2e9, 2e9))  # edited since, and of the same size
    assert len(run(steps=4, overrides=["training.weight_decay=0.1"])[0]) == 3
    os.utime(tmp_path / "chats.jsonl", (1e9, 1e9))
    other = {"content": "of other weights under the same name"}
    monkeypatch.setattr(module, "base_identity", lambda model: base_identity(model) | other)
    assert len(run(steps=4, overrides=["training.weight_decay=0.1"])[0]) == 3


@pytest.mark.slow
def test_strategies_and_a_refusal(recipe: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "compared"
    words = [
        "compare",
        str(recipe),
        "--vary",
        "accelerate_config=single,ddp,fsdp2,hsdp",
        "--steps",
        "3",
        "-o",
        str(folder),
    ]
    assert main([*words, "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    written = json.loads((folder / "compare.json").read_text("utf-8"))
    assert result == {"ok": True, **written}
    single, ddp, fsdp2, hsdp = written["rows"]
    assert [row["ok"] for row in written["rows"]] == [True, True, True, False]
    assert "hsdp" in hsdp["reason"]
    assert [row["final_loss"] for row in (ddp, fsdp2)] == pytest.approx([single["final_loss"]] * 2, rel=1e-6)
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
    words = [
        "compare",
        str(recipe),
        key,
        "--vary",
        f"accelerate_config={','.join(names)}",
        "--steps",
        "3",
        "-o",
        str(folder),
    ]
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
