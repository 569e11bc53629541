"""`finetune plan`: verdict, table, JSON and exit codes, from a shipped configuration alone."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finetune import planner
from finetune.architecture import loss
from finetune.cli.main import main
from finetune.closed_form.estimate import estimate
from finetune.errors import DoesNotFit
from finetune.model.known_configs import full_config
from finetune.planner.candidates import candidates, for_model
from finetune.planner.plan_recipe import plan_recipe
from finetune.recipe.gpus import Gpus, parse_gpus
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.recipes import half_recipe, tiny_lora, write_recipe

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def plan_output(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["plan", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(
    ("name", "package", "told"),
    [
        ("llama3_qlora", "bitsandbytes", "; the closed form, which needs no package, says 7.4 of 11.2 GiB\n"),
        ("llama3_70b_int8_1x141gb", "bitsandbytes", "pip install -e '.[qlora]'\n"),  # no closed form
        ("llama3_zero2", "deepspeed", "pip install -e '.[deepspeed]'\n"),
    ],
)
def test_without_a_package_the_closed_form_answers(
    name: str, package: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module, *rest: None if module == package else real(module))
    code, out, err = plan_output([str(ROOT / "recipes" / f"{name}.yaml")], capsys)
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert "is not installed" in err
    assert err.endswith(told)


@pytest.mark.slow
def test_lora_of_8b_on_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "recipes" / "llama3_8b_lora_1x24gb.yaml")
    code, out, _ = plan_output([recipe, "--json"], capsys)
    told = json.loads(out)
    assert (code, told["ok"], told["exit_code"], told["ranks"]) == (0, True, 0, 1)
    # 8,030,261,248 weights of two bytes, adapters of rank 16 in float32, and nothing cut.
    assert told["phases"]["step"]["parts"]["parameters"] > 2 * 8_030_261_248
    for phase in told["phases"].values():
        assert sum(phase["parts"].values()) == phase["peak_bytes"] <= told["needed_bytes"]
    weights = 8_030_261_248 - 128_256 * 4_096  # that are multiplied: all but the embedding
    arithmetic = told["arithmetic"]
    forward, backward = (arithmetic[f"{phase}_flops_per_token"] for phase in ("forward", "backward"))
    share = 1 - arithmetic["attention_share"]
    # LoRA is 4N, not 6N: no gradient of a base weight; and 2N more where layers are computed twice, but for the head
    # and each layer's last product.
    once = 128_256 * 4_096 + 32 * 14_336 * 4_096
    assert share * (forward + backward) == pytest.approx(6 * weights - 2 * once, rel=0.01)
    assert told["speed"] is None, "24 GB name no GPU"
    code, out, _ = plan_output([recipe, "--gpus", "12GB"], capsys)
    assert code == 3
    assert out.startswith("does not fit 1 x 12 GB: needs ")


@pytest.mark.slow
def test_fsdp2_of_8b(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "recipes" / "llama3_fsdp.yaml")
    four, eight = (json.loads(plan_output([recipe, "--gpus", f"{n}x24GB", "--json"], capsys)[1]) for n in (4, 8))
    halved = [told["phases"]["step"]["parts"]["parameters"] for told in (four, eight)]
    assert halved[1] == pytest.approx(halved[0] / 2, rel=1e-3)
    assert four["phases"]["load"]["peak_bytes"] < 8 * GIB  # whole weights are in host memory
    sent = eight["communication"]
    assert sent["forward"]["all_gather"]["bytes"] == four["communication"]["forward"]["all_gather"]["bytes"]
    assert sent["forward"]["all_gather"]["bytes"] == pytest.approx(2 * 8_030_261_248, rel=0.01)
    _, out, _ = plan_output([recipe, "--gpus", "H100:8", "--details"], capsys)
    assert "an upper bound from vendors' peak figures: 989 TFLOP/s" in out
    assert ["1", "2", "4", "8", "16", "32", "64", "128", "256", "512"] in [
        line.split()[1:] for line in out.splitlines()
    ]
    said = next(line for line in out.splitlines() if line.startswith("adapters alone over NVLink: "))
    assert "accelerate_config=ddp fits too; FSDP2 copies 29.1 GiB of gathered weights a micro-step" in said
    assert "adapters alone" not in plan_output([recipe, "--gpus", "A10G:8"], capsys)[1]


def test_what_the_trainer_refuses_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "recipes" / "llama3_fsdp.yaml")
    code, _, err = plan_output([recipe, "training.optim=paged_adamw_8bit"], capsys)
    assert code == 4
    assert "training.optim: paged_adamw_8bit updates full tensors" in err


def test_one_machine_under_hsdp_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its copies of the shards are machines. The layout of one copy was an assertion of ours once."""
    monkeypatch.setattr("finetune.probe.probe.probe", lambda *_, **__: None)  # it would run beside the plan
    recipe = str(ROOT / "recipes" / "llama3_70b_lora_hsdp_2x8x80gb.yaml")
    assert main(["plan", recipe, "--gpus", "8x80GB", "--json"]) == 4
    (line,) = json.loads(capsys.readouterr().out)["mistakes"]
    assert line.startswith("accelerate_config: hsdp shards within a node and repeats between nodes, 1 x 8 GPUs make 1 ")
    assert line.endswith("or take accelerate_config=fsdp2")


def test_several_recipes_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the closed form is clear nothing is traced."""
    recipes = [str(ROOT / "recipes" / f"{name}.yaml") for name in ("llama3_full", "llama3_8b_lora_1x24gb")]
    code, out, _ = plan_output([*recipes, "--gpus", "4x32GB", "--json"], capsys)
    rows = {row["recipe"]: row for row in json.loads(out)["recipes"]}
    assert code == 0
    assert {name: (row["fits"], row["planned_by"]) for name, row in rows.items()} == {
        "llama3_full": (False, "closed form"),
        "llama3_8b_lora_1x24gb": (True, "closed form"),
    }
    code, out, _ = plan_output([*recipes, "lora.r=64", "--gpus", "4x32GB"], capsys)
    assert [line.split()[0] for line in out.splitlines()] == ["recipe", "llama3_full", "llama3_8b_lora_1x24gb"]


@pytest.mark.parametrize(("gpus", "nodes"), [("1x24GB", 1), ("3x24GB", 1), ("8x80GB", 1), ("8x80GB", 4)])
def test_what_is_picked_from_takes_about_32_thousand_tokens_a_step(gpus: str, nodes: int) -> None:
    found = list(candidates(for_model("any"), parse_gpus(gpus, nodes)))
    assert len(found) > 50
    for recipe in found:
        training, length = recipe.training, recipe.data.max_length
        at_once = training.per_device_batch_size * recipe.budget.gpus * nodes
        assert training.global_batch_size % at_once == 0
        if at_once * length > 32_768:
            assert (training.global_batch_size, training.per_device_batch_size) == (at_once, 1), "no more than it must"
        else:
            assert training.global_batch_size * length == pytest.approx(32_768, rel=1 / 3)


@dataclass(frozen=True)
class Estimated:
    """A plan by the closed form in the place of a traced one, for speed."""

    recipe: Recipe
    gpus: Gpus
    memory_alone: bool = False

    @property
    def needed(self) -> int:
        config = full_config(self.recipe.model.name_or_path)[0]
        return estimate(self.recipe, config, self.gpus).needed

    @property
    def fits(self) -> bool:
        return self.needed <= self.gpus.memory

    def fits_from(self) -> int:
        return self.needed


@pytest.mark.parametrize(("gpus", "setting"), [("24GB", "true"), ("40GB", "2"), ("80GB", "false")])
def test_auto_is_resolved_for_the_gpus_that_are_asked_about(
    gpus: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the closed form, in a table of two."""
    recipes = [str(ROOT / "recipes" / f"llama3_8b_lora_{name}.yaml") for name in ("1x24gb", "1x80gb")]
    found = []
    for asked in ("auto", setting):
        words = [f"training.activation_checkpointing={asked}", "--gpus", gpus, "--json"]
        code, out, _ = plan_output([*recipes, *words], capsys)
        assert code == 0
        found.append(json.loads(out)["recipes"])
    assert found[0] == found[1]
    assert {row["planned_by"] for row in found[0]} == {"closed form"}


def test_the_largest_size_is_searched_with_all_layers_recomputed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "plan", Estimated)
    recipe = str(ROOT / "recipes" / "llama3_fsdp.yaml")
    words = ["training.activation_checkpointing=auto", "--max", "max_length"]
    _, _, err = plan_output([recipe, *words], capsys)
    assert err.splitlines()[0].endswith("activation_checkpointing: true")


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_progress_is_beside_the_result(
    as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "plan", Estimated)
    recipe = str(ROOT / "recipes" / "llama3_fsdp.yaml")
    code, out, err = plan_output([recipe, "--max", "max_length", *(["--json"] if as_json else [])], capsys)
    assert code == 0
    first, verdict, second, nearer = err.splitlines()
    assert re.fullmatch(r"tracing lora, fsdp2, 2 x [\d,]+ tokens, activation_checkpointing: true", first)
    assert re.fullmatch(r"  22\.\d GiB of 22\.4", verdict)
    assert second.startswith("tracing ")
    assert re.fullmatch(r"  22\.\d GiB of 22\.4", nearer), "nearer to the edge than the first"
    if not as_json:
        line, head, *larger = out.splitlines()
        assert re.fullmatch(
            r"data.max_length=\d+  needs 22.\d GiB of 22.4 a GPU; \d+ does not fit, by the closed form", line
        )
        assert head.startswith("larger with one change more, by the closed form, the cheapest first")
        assert len(larger) == 3
        assert all(re.fullmatch(r" +[\d,]+ █+ +[a-z_.]+=.+  \(.+\)", each) for each in larger)
        return
    told = json.loads(out)
    assert told.keys() == {
        *("ok", "change", "needed_bytes", "gpu_bytes", "granularity", "does_not_fit", "next_by", "changes")
    }
    value, after = (int(told[key].partition("=")[2]) for key in ("change", "does_not_fit"))
    assert after - value == told["granularity"] == 256, "a 64th of 16,384"
    assert told["next_by"] == "closed form"
    assert f"2 x {value:,} tokens" in second


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "RECIPE: is missing"),
        (["--pick"], "--pick: needs a model and GPUs"),
        (["--pick", "--model", "meta-llama/Llama-3.1-8B"], "--pick: needs a model and GPUs"),
        ([str(ROOT / "recipes" / "llama3_fsdp.yaml"), "--max", "learning_rate"], "write max_length or"),
        ([str(ROOT / "recipes" / "quickstart.yaml"), "--max", "max_length"], "needs a GPU"),
    ],
)
def test_what_is_asked_wrongly(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = plan_output(words, capsys)
    assert code == 2
    assert told in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpus", "expandable", "told"),
    [
        ("Llama-3.2-1B", "1GB", True, "which has 0.9. Use more"),
        ("Llama-3.1-70B", "2x8GB", False, " of 7.5 GiB for tensors. Torch's allocator"),
    ],
)
def test_nothing_fits(
    model: str,
    gpus: str,
    expandable: bool,
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one would, by an allocator whose segments grow."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{expandable}")
    code, _, err = plan_output(["--pick", "--model", f"meta-llama/{model}", "--gpus", gpus], capsys)
    assert code == 3
    needed, size = map(float, re.findall(r"needs ([0-9.]+) (?:GiB of each GPU, which has|of) ([0-9]+\.[0-9])", err)[0])
    assert (needed > size) == told.startswith("which has")
    assert told in err


@pytest.mark.slow
def test_weights_wait_in_host_memory_where_nothing_else_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan_output(["--pick", "--model", "meta-llama/Llama-3.1-8B", "--gpus", "5GB"], capsys)
    assert code == 0
    assert "accelerate_config: fsdp2_offload" in out
    assert "# In host memory: up to" in out


@pytest.mark.slow
def test_what_must_fit_is_refused_early_with_the_same_bytes() -> None:
    """`--pick` has half a plan of what does not fit."""
    recipe = load_recipe(ROOT / "recipes" / "llama3_1b_lora_1x8gb.yaml", []).recipe
    whole = plan_recipe(recipe, parse_gpus("2GB"))
    assert not whole.fits
    with pytest.raises(DoesNotFit) as caught:
        plan_recipe(recipe, parse_gpus("2GB"), must_fit=True)
    assert caught.value.needed == pytest.approx(whole.needed, rel=1e-3)
    assert plan_recipe(recipe, parse_gpus("8GB"), must_fit=True) == plan_recipe(recipe, parse_gpus("8GB"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "fsdp2_grad_op", "zero3"])
@pytest.mark.parametrize("method", ["qlora", "full"])
def test_a_search_plans_the_same_memory(strategy: str, method: str, tmp_path: Path) -> None:
    """By one short micro-batch at first and three of eight chunks of the loss. Tensors are the same, but for a few
    bytes that a foreach kernel makes for each. The allocator may cache other gaps."""
    base = save_tiny(tmp_path / "model", num_hidden_layers=7, vocab_size=65_536)
    sections: dict[str, Any] = {"accelerate_config": strategy, "data": {"max_length": 8192}}
    sections |= {"training": {"global_batch_size": 6, "per_device_batch_size": 1, "activation_checkpointing": True}}
    if method == "qlora":
        four_bits = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "bfloat16"}
        sections |= {"lora": {"r": 4}, "quantization": four_bits}
    recipe, gpus = half_recipe(base, **sections), parse_gpus("1x8GB" if strategy == "single" else "2x8GB")
    assert 7 * loss.chunk_rows(65_536) < 8192
    whole, searched = (plan_recipe(recipe, gpus, memory_alone=alone) for alone in (False, True))
    assert searched.needed == pytest.approx(whole.needed, abs=2**16)
    assert searched.upper == pytest.approx(whole.upper, rel=0.01)
    assert searched.fits_from() == pytest.approx(whole.fits_from(), abs=22 * 2**20)
    for name, phase in whole.phases.items():
        assert searched.phases[name].peak.nbytes == pytest.approx(phase.peak.nbytes, abs=2**16), name


@pytest.mark.slow
def test_no_library_speaks_beside_the_plan(tiny_llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    data = {"train": [{"path": "json", "data_files": str(write_chats(tmp_path / "chats.jsonl", [20]))}]}
    recipe.write_text(json.dumps({"model": {"name_or_path": str(tiny_llama)}, "data": data | {"max_length": 64}}))
    command = [
        sys.executable,
        "-m",
        "finetune.cli.main",
        "plan",
        str(recipe),
        "accelerate_config=fsdp2",
        "--gpus=2x8GB",
        "--details",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    progress = "tracing lora, fsdp2, 1 x 64 tokens, activation_checkpointing: false; and probing the model"
    assert (done.returncode, done.stderr.splitlines()) == (0, [progress])
    assert done.stdout.startswith("fits 2 x ")  # all of it is there, though the process ends at once
    lines = [line for line in done.stdout.splitlines() if line.startswith(("data: ", "training.", "data.train: "))]
    assert lines[0].startswith("data: 1 row of up to 64 tokens")
    assert lines[0].endswith("; 1 of 2 ranks idle")
    assert "1 step is few" in lines[1]


@pytest.mark.slow
def test_what_was_picked_was_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    asked = ["--pick", "--model", "meta-llama/Llama-3.2-1B-Instruct", "--gpus", "8GB", "-o", str(file), "--json"]
    code, out, err = plan_output(asked, capsys)
    picked = json.loads(out)
    assert (code, picked["file"]) == (0, str(file))
    progress = r"\w+, single, \d x [\d,]+ tokens, activation_checkpointing: \w+: [\d.]+ GiB(, does not fit)?"
    assert all(re.fullmatch(progress, line) for line in err.splitlines())
    assert f"{picked['needed_bytes'] / 2**30:.1f} GiB" in err.splitlines()[-1]
    code, out, _ = plan_output([str(file), "--json"], capsys)
    assert (code, json.loads(out)["needed_bytes"]) == (0, picked["needed_bytes"])


@pytest.mark.slow
def test_a_pick_keeps_a_recipes_data_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", [30, 40, 50])
    content = tiny_lora(tmp_path, chats, output_dir=str(tmp_path / "run")) | {"logging_steps": 3}
    content["model"] = {"name_or_path": "meta-llama/Llama-3.2-1B-Instruct"}
    content["training"] |= {"learning_rate": 3e-4, "num_train_epochs": 3, "global_batch_size": 4}
    asked, file = write_recipe(tmp_path, content), tmp_path / "picked.yaml"
    code, _, _ = plan_output([str(asked), "--pick", "--gpus", "8GB", "-o", str(file)], capsys)
    assert code == 0
    mine, picked = load_recipe(asked).recipe, load_recipe(file).recipe
    assert picked.data == mine.data
    assert (picked.lora, picked.model.name_or_path) == (mine.lora, mine.model.name_or_path)
    assert (picked.training.learning_rate, picked.training.num_train_epochs) == (3e-4, 3)
    assert (picked.logging_steps, picked.output_dir) == (3, mine.output_dir)
    assert (picked.budget.gpus, picked.training.global_batch_size) == (1, 4)
    code, _, err = plan_output([str(asked), "--pick", "--gpus", "1GB"], capsys)
    assert code == DoesNotFit.exit_code
    assert "full, " not in err, "a recipe that trains adapters keeps adapters"


@pytest.mark.slow
def test_changes_are_shown_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(ROOT / "recipes" / "llama3_8b_lora_1x24gb.yaml")
    code, out, err = plan_output([recipe, "--gpus", "12GB", "--json"], capsys)
    told = json.loads(out)
    assert code == 3
    assert told["changes"]
    assert [change["planned_by"] for change in told["changes"]].count("trace") == 1
    assert 2 <= err.count("tracing ") <= 4, "itself, and three changes at most"
    for change in told["changes"]:
        assert change["needed_bytes"] <= told["gpu_bytes"]
        assert "quantization" in change["change"], "a bfloat16 base of 16 GB is on no 12 GB card"
        assert change["change"] in "\n".join(told["advice"]), "the text's lines are in the JSON too"


@pytest.mark.slow
def test_the_model_is_probed_in_a_child(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    recipe = str(write_recipe(tmp_path, tiny_lora(tiny_llama, write_chats(tmp_path / "chats.jsonl", [30, 40]))))
    code, out, _ = plan_output([recipe, "--json"], capsys)
    assert code == 0
    assert set(json.loads(out)["probe"]["found"]) == {"kept", "recomputed"}
    genuine = loss.loss_and_slope  # the child has what this process has

    def steeper(*given: Any, **options: Any) -> tuple[Any, Any]:
        lost, slope = genuine(*given, **options)
        return lost, None if slope is None else slope.mul_(1.01)

    monkeypatch.setattr(loss, "loss_and_slope", steeper)
    code, out, told = plan_output([recipe, "lora=null"], capsys)
    assert (code, out) == (4, "")
    assert "the loss differs" in told


@pytest.mark.slow
def test_a_job_on_the_hub_ends_some_time_after_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--on", "hf-jobs", "--image", "registry.example/finetune:1.0", "hub.push=true", "hub.repo_id=me/tuned"]
    assert main(["launch", "llama3_1b_lora_1x8gb", *job, "training.max_steps=10"]) == 0
    (minutes,) = re.findall(r" --timeout (\d+)m ", capsys.readouterr().out)
    assert 30 < int(minutes) < 60
