"""What benchmarks/gpu.py and plan_gpu.py show without a GPU: which runs they make, and that they measure them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, gpu, plan_gpu
from finetune.preflight.shrink import sample_texts, train_tokenizer
from finetune.recipe.loader import load_recipe
from finetune.training.planner_process import PLANNER_SWITCH


def test_the_recipes_are_those_for_one_gpu() -> None:
    actual = gpu.recipes()
    assert {"llama3_1b_lora_1x8gb", "llama3_8b_lora_1x24gb", "llama3_qlora", "llama3_8b_full_1x80gb"} <= set(actual)
    assert not {"llama3_70b_int8_1x141gb", "llama3_fsdp", "quickstart"} & set(actual)
    for path in actual.values():
        assert load_recipe(str(path), []).recipe.budget.gpus == 1


@pytest.mark.parametrize("max_length", [1024, 4096])
def test_rows_fill_what_was_asked_and_none_is_too_long(max_length: int, tmp_path: Path) -> None:
    file = gpu.write_rows(tmp_path / "rows.jsonl", tokens=20 * max_length, max_length=max_length)
    chats = [json.loads(line)["messages"] for line in file.read_text("utf-8").splitlines()]
    own = "data.train=[{path: json, data_files: data/sample_chat.jsonl}]"
    recipe = load_recipe(str(gpu.recipes()["llama3_1b_lora_1x8gb"]), [own]).recipe
    tokenizer = train_tokenizer(sample_texts(recipe.data))
    tokenizer.model_max_length = max_length
    lengths = [len(tokenizer.apply_chat_template(chat)["input_ids"]) for chat in chats]
    assert max(lengths) <= max_length
    assert sum(lengths) >= 20 * max_length


def test_speed_is_that_of_a_run_without_gauges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`measure_phases` looks at each operation from Python: it may measure memory, never speed."""
    runs: list[bool] = []

    def train(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        words = dict(word.split("=", 1) for word in command[command.index("finetune/train.py") + 2 :])
        measured = json.loads(words["measure_phases"])
        runs.append(measured)
        run_dir = Path(json.loads(words["output_dir"]))
        run_dir.mkdir(parents=True)
        each = {"kind": "train", "tokens_per_second": 1.0 if measured else 10.0, "step_seconds": 1.0, "loss": 2.0}
        lines = [each] * int(words["training.max_steps"])
        peaks = {"kind": "phase", "phase": "backward", "allocated_gib": 1.0}
        lines += [peaks | {"peak_gib": peak} for peak in (2.0, 3.0)] if measured else []
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        (run_dir / "receipt.json").write_text("{}", "utf-8")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(gpu, "random_model", lambda *_, **__: tmp_path / "model")
    monkeypatch.setattr(gpu.subprocess, "run", train)
    row = gpu.measure(gpu.recipes()["llama3_1b_lora_1x8gb"], tmp_path, shrunken=True)
    assert row["ok"]
    assert runs == [False, True]
    assert row["tokens_per_second"] == 10.0
    assert row["phases"] == {"backward": {"peak_gib": 3.0, "allocated_gib": 1.0}}


PROVED = {"name": "bf16", "claim": "the same curve", "state": "ok", "seconds": 7.4, "seen": "1e-4 apart"}


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results, on a machine with a GPU whose proofs and recipes take no time; one recipe fails."""
    names = list(gpu.recipes())
    peaks = {"forward": {"peak_gib": 1.5, "allocated_gib": 1.0}, "step": {"peak_gib": 2.25, "allocated_gib": 1.0}}
    good = {"ok": True, "tokens_per_second": 12_345.6, "step_seconds": 0.25, "phases": peaks}
    bad = {"ok": False, "reason": "out of memory"}
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "device", lambda: "a GPU")
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "prove_gpus", lambda say, machine: {"ok": True, "proofs": [PROVED]})
    monkeypatch.setattr(gpu, "measure", lambda path, *_, **__: bad if path.stem == names[1] else good)
    return tmp_path


def test_one_file_and_one_page_have_proofs_speed_and_memory(results: Path) -> None:
    first, second, *others = gpu.recipes()
    assert gpu.main([]) == 1, "one recipe failed"
    written = json.loads((results / "gpu.json").read_text("utf-8"))
    assert list(written["recipes"]) == [first, second, *others]
    assert written["proofs"]["proofs"] == [PROVED]
    page = (results / "gpu.md").read_text("utf-8").splitlines()
    assert page[0] == "# On one GPU: a GPU"
    assert "| bf16 | the same curve | ok | 7 | 1e-4 apart |" in page
    assert f"| {first} | 12,346 | 0.250 |" in page
    assert f"| {second} | out of memory | |" in page
    assert "| recipe | forward | step |" in page
    assert f"| {first} | 1.50 | 2.25 |" in page
    assert not [line for line in page if line.startswith(f"| {second} |") and "." in line]


def test_some_recipes_keep_the_rest(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = gpu.recipes()
    gpu.main([])
    monkeypatch.setattr(gpu, "prove_gpus", lambda *_: pytest.fail("recipes alone were asked for"))
    monkeypatch.setattr(gpu, "measure", lambda *_, **__: {"ok": False, "reason": "worse"})
    assert gpu.main([first]) == 1
    written = json.loads((results / "gpu.json").read_text("utf-8"))
    assert written["recipes"][first]["reason"] == "worse"
    assert len(written["recipes"]) == len(gpu.recipes())
    assert written["proofs"]["proofs"] == [PROVED]


def test_a_failed_proof_fails_the_script(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gpu, "measure", lambda *_, **__: {"ok": True, "tokens_per_second": 1.0, "step_seconds": 1.0, "phases": {}}
    )
    assert gpu.main([]) == 0
    monkeypatch.setattr(gpu, "prove_gpus", lambda say, machine: {"ok": False, "proofs": [PROVED | {"state": "failed"}]})
    assert gpu.main([]) == 1


def test_without_a_gpu_nothing_is_written(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines: list[Any] = []

    def prove(say: Any, machine: Any) -> dict[str, Any]:
        machines.append(machine)
        return {"ok": True, "proofs": []}

    monkeypatch.setattr(gpu, "prove_gpus", prove)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    gpu.main(["--shrunken"])
    assert [(machine.device, machine.count) for machine in machines] == [("cpu", 1)]
    assert not [*results.iterdir()]
    with pytest.raises(SystemExit):
        gpu.main([])


@pytest.mark.slow
def test_a_recipe_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "STEPS", gpu.SKIPPED + 1)
    name = "llama3_1b_lora_1x8gb"
    row = gpu.measure(gpu.recipes()[name], tmp_path, shrunken=True)
    assert row["ok"], row
    assert row["tokens_per_second"] > 0
    assert set(row["phases"]) == {"load", "forward", "backward", "step", "save"}
    assert row["phases"]["backward"]["peak_gib"] > row["phases"]["load"]["allocated_gib"] > 0
    assert row["receipt"]["world_size"] == 1


def test_the_plans_configurations_are_recipes_that_differ() -> None:
    every = plan_gpu.configurations()
    recipes = [load_recipe(str(plan_gpu.BASE), changes).recipe for changes in every.values()]
    assert len({recipe.model_dump_json() for recipe in recipes}) == len(every) == 27
    axes = {
        (recipe.lora is None, recipe.quantization is None, recipe.training.activation_checkpointing)
        for recipe in recipes
    }
    assert len(axes) == 6


@pytest.mark.slow
def test_a_plan_is_held_against_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLANNER_SWITCH, "wait")
    name = "Llama-3.2-1B lora 2048"
    row = plan_gpu.measure(plan_gpu.configurations()[name], tmp_path, shrunken=True)
    assert row["ok"], row
    assert set(row["phases"]) == {"forward", "backward", "step"}
    assert row["planned_bytes"] == row["measured_bytes"] > 0  # on a CPU to the byte
    assert plan_gpu.summary({name: row})["largest_error"] == 0
