"""lora.on_top: a new adapter over a frozen one, under every strategy, exported as the sum of both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.cli.main import main as cli
from finetune.files import read_lines
from finetune.run_folder.checkpoint import Checkpoint, checkpoint_steps, examine, step_folder
from finetune.train import main
from tests.support.models.tiny import save_tiny
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import skip_where_missing
from tests.support.runs.exports import contents
from tests.support.runs.preferences import preference_recipe, write_base
from tests.training.test_start_adapter import evals, write

# Each with other layers, ranks and scales than the one above it.
BELOW: dict[str, dict[str, Any]] = {
    "the same layers": {"lora": {"r": 8, "lora_alpha": 8}},
    "other layers": {"lora": {"target_modules": ["v_proj", "down_proj"], "rank_pattern": {"layers.1.*v_proj": 3}}},
    "rank-stabilized": {"lora": {"use_rslora": True, "alpha_pattern": {"q_proj": 3.5}}},
}
ABOVE: dict[str, dict[str, Any]] = {
    "the same layers": {},
    "other layers": {"lora": {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}},
    "rank-stabilized": {"lora": {"use_rslora": True, "rank_pattern": {"o_proj": 2}}},
}
LONGER = {"training": {"max_steps": 12}, "eval_steps": 12}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return trained(tmp_path_factory.mktemp("first"), base)


def trained(folder: Path, base: Path, *changes: dict[str, Any]) -> Path:
    """The adapter of a run."""
    assert main([str(write(folder, base, *changes))]) == 0
    return folder / "run" / "adapter"


def on_top(folder: Path, base: Path, below: Path, *changes: dict[str, Any]) -> Path:
    """A recipe that trains a new adapter on top of the one in `below`."""
    return write(folder, base, {"model": {"adapter": str(below)}, "lora": {"on_top": True}}, LONGER, *changes)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", BELOW)
def test_the_export_is_the_sum_of_both(
    kind: str, tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    below = trained(tmp_path / "first", base, BELOW[kind])
    recipe = on_top(tmp_path / "second", base, below, ABOVE[kind])
    frozen = load_file(below / "adapter_model.safetensors")
    assert main([str(recipe)]) == 0
    run = tmp_path / "second" / "run"
    ended = evals(tmp_path / "first" / "run")
    began = evals(run)
    assert began[0] == pytest.approx(ended[-1], rel=1e-5)
    assert abs(began[0] - began[-1]) > 5e-4, "else it would prove little"
    exported = load_file(run / "adapter" / "adapter_model.safetensors")
    for name, tensor in frozen.items():
        if ".lora_A." in name:
            assert torch.equal(exported[name][: len(tensor)], tensor), name
    capsys.readouterr()
    assert cli(["eval", str(run), "--loss-only", "--json"]) == 0  # by plain peft, from the exported folder
    loss = json.loads(capsys.readouterr().out)["held_out"]["tuned"]["loss"]
    assert loss == pytest.approx(began[-1], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3", "gpipe"])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_every_strategy_gives_one_curve(strategy: str, method: str, tmp_path: Path, base: Path, first: Path) -> None:
    skip_where_missing(strategy)
    gently = {"training": {"learning_rate": 1e-3}}
    closeness, changes = 2e-5, dict[str, Any]()
    if method == "qlora":
        dtype = "float32"
        if strategy.startswith("zero"):  # which takes no quantised weights beside float32
            dtype, closeness = "bfloat16", 2e-3
        stored = {"load_in_4bit": True, "bnb_4bit_compute_dtype": dtype, "bnb_4bit_quant_storage": dtype}
        changes = {"quantization": stored, "training": {"mixed_precision": "no" if dtype == "float32" else "bf16"}}
    recipe = on_top(tmp_path, base, first, gently, changes)
    assert launch([recipe], ranks=2, words=[f"accelerate_config={strategy}"]) == [0]
    assert launch([on_top(tmp_path / "alone", base, first, gently, changes)], ranks=1) == [0]
    assert evals(tmp_path / "run") == pytest.approx(evals(tmp_path / "alone" / "run"), rel=closeness)


@pytest.mark.slow
def test_a_resumed_run_ends_bitwise_alike(
    tmp_path: Path, base: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    below = tmp_path / "below"  # changed at the end
    shutil.copytree(first, below)
    recipe = on_top(tmp_path, base, below, {"save_steps": 2, "save_total_limit": 9})
    assert main([str(recipe)]) == 0
    run = tmp_path / "run"
    whole = contents(run / "adapter")
    for step in (4, 6, 8, 10, 12):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    state = json.loads((run / "run_state.json").read_text())
    (run / "run_state.json").write_text(json.dumps(state | {"state": "stopped", "step": 2}))
    assert main([str(recipe)]) == 0
    assert contents(run / "adapter") == whole
    assert cli(["export", str(run), "--step", "12", "--to", str(tmp_path / "again")]) == 0
    tensors = load_file(tmp_path / "again" / "adapter" / "adapter_model.safetensors")
    for name, tensor in load_file(run / "adapter" / "adapter_model.safetensors").items():
        assert torch.equal(tensors[name], tensor), name
    file = below / "adapter_model.safetensors"
    save_file({name: value * 2 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    capsys.readouterr()
    assert cli(["export", str(run), "--step", "2", "--to", str(tmp_path / "other")]) == 2
    assert f"model.adapter: {below} has changed since this run began" in capsys.readouterr().err


@pytest.mark.thorough
def test_it_is_merged(tmp_path: Path, base: Path, first: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(on_top(tmp_path, base, first))]) == 0
    capsys.readouterr()
    assert cli(["merge", str(tmp_path / "run")]) == 0
    assert "81 answer tokens of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["model.adapter=null"],
            "lora.on_top: there is no adapter below; name it in model.adapter, or set lora.on_top",
        ),
        (["lora.use_dora=true"], "the sum of two adapters cannot have lora.use_dora; leave it out, or merge"),
        (["lora.modules_to_save=[lm_head]"], "cannot have lora.modules_to_save;"),
        (["lora=null"], "all weights are trained, no adapter (lora is null)"),
    ],
)
def test_what_cannot_be_summed_is_refused(
    words: list[str], said: str, tmp_path: Path, base: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["check", str(on_top(tmp_path, base, first)), *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_adapter_below_that_is_no_plain_one(
    tmp_path: Path, base: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(first, tmp_path / "below")
    file = tmp_path / "below" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    assert cli(["check", str(on_top(tmp_path, base, tmp_path / "below"))]) == 2
    assert "has use_dora, so nothing can be trained on top of it; merge it into its base first" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["start", "adapter_off"])
def test_preferences_on_top_of_a_supervised_adapter(reference: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    adapters = {"lora": {"r": 4, "target_modules": "all-linear"}, "training": {"learning_rate": 1e-2}}
    assert main([str(preference_recipe(tmp_path / "first", base, "dpo", adapters))]) == 0
    below = tmp_path / "first" / "run" / "adapter"
    above = {"model": {"adapter": str(below)}, "lora": {"on_top": True}, "dpo": {"reference": reference}}
    held_out = {"data": {"eval": {"fraction": 0.2}}, "eval_steps": 2}
    assert main([str(preference_recipe(tmp_path / "second", base, "dpo", adapters, above, held_out))]) == 0
    run = tmp_path / "second" / "run"
    margins = [line["reward_margin"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "eval"]
    assert (abs(margins[0]) < 1e-6) == (reference == "start")
    assert margins[-1] != margins[0]
    checkpoint = examine(step_folder(run, checkpoint_steps(run)[-1]))
    assert isinstance(checkpoint, Checkpoint)
    assert not [name for name in checkpoint.groups["model"] if ".start." in name], "the adapter below would be trained"
    frozen = load_file(below / "adapter_model.safetensors")
    for name, tensor in load_file(run / "adapter" / "adapter_model.safetensors").items():
        if ".lora_A." in name:
            assert torch.equal(tensor[:4], frozen[name]), "the adapter below was trained"
