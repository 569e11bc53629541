"""The reference: the start and not the base, the same live and kept, found again by a resumed run."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from finetune.files import cache_folder, read_sealed, write_sealed
from finetune.measure.phases import Memory
from finetune.train import main as train
from finetune.training import reference
from finetune.wording import GIB
from tests.support.models.tiny import tiny_model
from tests.support.runs.cells import launch
from tests.support.runs.preferences import (
    lines_of,
    preference_recipe,
    preference_rows,
    tokenizer_of_both,
    write_base,
)

ROOT = Path(__file__).resolve().parents[3]
LORA: dict[str, Any] = {"lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def write_adapter(folder: Path, seed: int) -> Path:
    """An adapter that adds something."""
    torch.manual_seed(seed)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = get_peft_model(tiny_model(), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05)
    adapted.save_pretrained(folder)
    return folder


def log_probabilities(model: Any) -> dict[str, float]:
    """By TRL's definition, one answer at a time: the sum of the answer's tokens' log-probabilities, as a mean."""
    tokenizer, sums = tokenizer_of_both(), dict[str, float]()
    for name in ("chosen", "rejected"):
        total = 0.0
        for row in preference_rows("dpo"):
            prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
            text = tokenizer.apply_chat_template(row["prompt"] + row[name], tokenize=False)
            start = len(tokenizer(prompt, add_special_tokens=False).input_ids)
            ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
            with torch.no_grad():
                log_softmax = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
            total += float(log_softmax.gather(1, ids[0, 1:, None])[start - 1 :].sum())
        sums[name] = total / len(preference_rows("dpo"))
    return sums


def after_one_step(folder: Path, base: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    """The first step's line, with all rows in it: its rewards are those of the start."""
    whole = {"training": {"global_batch_size": 24, "max_steps": 1}}
    assert train([str(preference_recipe(folder, base, "dpo", whole, *changes))]) == 0
    return lines_of(folder / "run")[0]


@pytest.mark.thorough
@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize("reference", ["start", "adapter_off", "a second model"])
def test_rewards_are_counted_from_the_reference(reference: str, base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", 1)
    other = tmp_path / "other"
    tiny_model(seed=3).save_pretrained(other)
    tokenizer_of_both().save_pretrained(other)
    named = str(other) if reference == "a second model" else reference
    line = after_one_step(tmp_path, base, LORA, {"model": {"adapter": str(adapter)}, "dpo": {"reference": named}})
    start = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    own = log_probabilities(start)
    theirs = {
        "start": own,
        "adapter_off": log_probabilities(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)),
        "a second model": log_probabilities(AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)),
    }[reference]
    for name in ("chosen", "rejected"):
        assert line[f"logps_{name}"] == pytest.approx(own[name], rel=1e-6)
        assert line[f"reward_{name}"] == pytest.approx(0.1 * (own[name] - theirs[name]), abs=1e-5)
        assert reference == "start" or abs(line[f"reward_{name}"]) > 1e-3


@pytest.mark.thorough
def test_a_reference_is_computed_without_dropout(base: Path, tmp_path: Path) -> None:
    """The start adapter adds something, so that dropout would change every log-probability."""
    adapter = write_adapter(tmp_path / "adapter", 1)
    start = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    lora = {"lora": LORA["lora"] | {"lora_dropout": 0.3}}
    changes = {"model": {"adapter": str(adapter)}, "training": {"max_steps": 1}}
    assert train([str(preference_recipe(tmp_path / "dpo", base, "dpo", lora, changes))]) == 0
    content = read_sealed(tmp_path / "dpo" / "run" / "reference.json")
    assert content is not None
    kept = np.frombuffer(base64.b64decode(content["answers"]), "<f4").reshape(-1, 2).mean(axis=0)
    expected = log_probabilities(start)
    assert kept.tolist() == pytest.approx([expected["chosen"], expected["rejected"]], rel=1e-5)


def test_a_kept_reference_is_a_live_one_and_another_adapter_has_another(base: Path, tmp_path: Path) -> None:
    receipts = []
    for name, seed in (("first", 1), ("again", 1), ("another", 2)):
        adapter = write_adapter(tmp_path / f"adapter{seed}", seed)
        after_one_step(tmp_path / name, base, LORA, {"model": {"adapter": str(adapter)}})
        receipts.append(json.loads((tmp_path / name / "run" / "receipt.json").read_text("utf-8"))["reference"])
    first, again, another = receipts
    assert (first["from"], again["from"], another["from"]) == ("computed", "the cache", "computed")
    assert first["key"] == again["key"] != another["key"]
    lines = [lines_of(tmp_path / name / "run")[0] for name in ("first", "again")]
    assert lines[0]["loss"] == lines[1]["loss"]
    assert lines[1]["reward_chosen"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.thorough
def test_other_weights_under_the_same_name_are_noticed(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kept reference that some other program wrote under this key."""
    after_one_step(tmp_path / "first", base)
    key = json.loads((tmp_path / "first" / "run" / "receipt.json").read_text("utf-8"))["reference"]["key"]
    file = cache_folder() / "references" / f"{key}.json"
    content = read_sealed(file)
    content["answers"] = "A" * len(content["answers"])  # zeros
    write_sealed(file, content)
    line = after_one_step(tmp_path / "second", base)
    assert "it is computed again" in capsys.readouterr().out
    assert line["reward_chosen"] == pytest.approx(0.0, abs=1e-6)


class Reads(TorchFunctionMode):
    """Counts copies to the host and reads of numbers."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(function, "__name__", "") in ("cpu", "item", "tolist", "numpy", "__bool__", "__float__")
        return function(*args, **(kwargs or {}))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_the_pass_reads_once_and_takes_four_times_the_rows(
    kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are those of a training step's micro-batches, to float32's last bits, and as fewer memory allows."""
    small = {"training": {"per_device_batch_size": 1, "max_steps": 2}, "data": {"eval": {"fraction": 0.2}}}
    computed, taken, reads, found = reference._computed, list[int](), list[int](), list[np.ndarray]()
    genuine = reference.prefetch

    def counted(batches: Any, *arguments: Any) -> Any:
        taken[-1] += len(batches)
        return genuine(batches, *arguments)

    def counting(*arguments: Any) -> Any:
        with Reads() as counter:
            values = computed(*arguments)
        reads.append(counter.count)
        return values

    monkeypatch.setattr(reference, "prefetch", counted)
    monkeypatch.setattr(reference, "_computed", counting)
    for name, most, free in (("one", 1, GIB), ("four", 4, GIB), ("tight", 4, 0)):
        monkeypatch.setattr(reference, "MORE_ROWS", most)
        monkeypatch.setattr(reference, "memory_of", lambda _, free=free: Memory(GIB, GIB - free, 0))
        monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / name / "cache"))
        taken.append(0)
        assert train([str(preference_recipe(tmp_path / name, base, kind, small))]) == 0
        content = read_sealed(tmp_path / name / "run" / "reference.json")
        assert content is not None
        names = ["answers"] if kind == "dpo" else ["answers", "mismatched", "held_out"]
        found.append(np.concatenate([np.frombuffer(base64.b64decode(content[each]), "<f4") for each in names]))
    one, four, tight = taken
    assert tight == one
    assert four == 2 if kind == "dpo" else four <= one / 2, "KTO's steps are short"
    assert (found[0] == found[2]).all()
    assert np.abs(found[0] - found[1]).max() <= 1e-6 * np.abs(found[0]).max()
    assert max(reads) <= 8, "one read, and one of each array's sum over ranks"


@pytest.mark.thorough
def test_a_run_says_where_its_reference_is_from(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Computed by the first run; from the cache in another folder; from the run's folder where a run goes on."""
    adapter = write_adapter(tmp_path / "adapter", 7)
    told = []
    for folder, steps in (("first", 1), ("again", 1), ("again", 2)):
        changes = LORA, {"model": {"adapter": str(adapter)}, "training": {"max_steps": steps}}
        assert train([str(preference_recipe(tmp_path / folder, base, "dpo", *changes))]) == 0
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("reference: "))
        told.append(line.partition("48 answers, ")[2].partition(" (")[0])
    assert told == ["computed", "from the cache", "from the run folder"]


def test_a_resumed_run_needs_its_reference(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = preference_recipe(tmp_path, base, "dpo", {"training": {"max_steps": 2}})
    assert train([str(recipe)]) == 0
    (tmp_path / "run" / "reference.json").unlink()
    assert train([str(recipe), "training.max_steps=4"]) == 2
    assert "the reference of this run's start is not there" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_an_earlier_releases_reference_counts_for_dpo_alone(
    kind: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its KTO put other answers beside the prompts."""
    recipe = preference_recipe(tmp_path, base, kind, {"training": {"max_steps": 1}})
    assert train([str(recipe)]) == 0
    file = tmp_path / "run" / "reference.json"
    content = read_sealed(file)
    assert content is not None
    del content["format"]
    write_sealed(file, content)
    capsys.readouterr()
    assert train([str(recipe), "output_dir=" + str(tmp_path / "run")]) == 0  # finished: nothing is read
    assert train([str(recipe), "training.num_train_epochs=2", "training.max_steps=null"]) == (2 if kind == "kto" else 0)
    assert ("or (KTO) an earlier release's" in capsys.readouterr().err) == (kind == "kto")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_killed_run_goes_on_bitwise(kind: str, base: Path, tmp_path: Path) -> None:
    changes = {"training": {"num_train_epochs": 20}, "save_steps": 10, "data": {"eval": {"fraction": 0.2}}}
    whole = preference_recipe(tmp_path / "whole", base, kind, changes)
    assert train([str(whole)]) == 0
    killed = preference_recipe(tmp_path / "killed", base, kind, changes)
    command = [sys.executable, str(ROOT / "finetune" / "train.py"), str(killed)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    metrics, run = tmp_path / "killed" / "run" / "metrics.jsonl", tmp_path / "killed" / "run"
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (metrics.exists() and len(lines_of(run)) > 25):
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert lines_of(run)[-1]["step"] < lines_of(tmp_path / "whole" / "run")[-1]["step"]
    assert train([str(killed)]) == 0
    for line in ("train", "eval"):
        pairs = zip(lines_of(run, line), lines_of(tmp_path / "whole" / "run", line), strict=True)
        for ours, theirs in pairs:
            assert {key: ours[key] for key in ours if key == "loss" or "reward" in key or "logp" in key} == {
                key: theirs[key] for key in theirs if key == "loss" or "reward" in key or "logp" in key
            }
    weights = [load_file(each / "model" / "model.safetensors") for each in (run, tmp_path / "whole" / "run")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_it_goes_on_with_another_number_of_ranks(kind: str, base: Path, tmp_path: Path) -> None:
    changes = {"training": {"num_train_epochs": 3}, "save_steps": 6, "save_total_limit": 9}
    whole = preference_recipe(tmp_path / "whole", base, kind, changes)
    assert train([str(whole)]) == 0
    stopped = preference_recipe(tmp_path / "stopped", base, kind, changes)
    assert launch([stopped], ranks=1) == [0]  # this process would keep the folder's lock
    run = tmp_path / "stopped" / "run"
    for checkpoint in sorted((run / "checkpoints").iterdir())[1:]:  # as if it had been killed before these
        shutil.rmtree(checkpoint)
    state = json.loads((run / "run_state.json").read_text("utf-8"))
    (run / "run_state.json").write_text(json.dumps(state | {"state": "running"}), "utf-8")
    first = next((run / "checkpoints").iterdir()).name
    assert launch([stopped], ranks=2, words=["accelerate_config=ddp"]) == [0]
    again = [line for line in lines_of(run) if line["step"] > int(first.rpartition("-")[2])]
    theirs = {line["step"]: line for line in lines_of(tmp_path / "whole" / "run")}
    assert len(again) > 5
    for line in again:
        for name in ("loss", "grad_norm", "reward_chosen", "logps_chosen"):
            assert line[name] == pytest.approx(theirs[line["step"]][name], rel=1e-5, abs=1e-5), (name, line["step"])
