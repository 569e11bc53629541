"""A whole run with `hub.push: true`, started as a user does, against the loopback Hub: two ranks, other processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import Hub
from tests.support.hub.processes import run_python
from tests.support.hub.server import TOKEN
from tests.support.models.tiny import save_tiny, write_chats

pytestmark = pytest.mark.slow
LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_2proc.yaml"]
READ = """
import sys, torch
from peft import AutoPeftModelForCausalLM, PeftModel
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer
base, run = sys.argv[1:]
tokens = AutoTokenizer.from_pretrained("me/devils")("a quiet river", return_tensors="pt")
logits = [
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), name).eval()(**tokens).logits
    for name in ("me/devils", f"{run}/adapter")
]
assert torch.equal(*logits)
card = ModelCard.load("me/devils")
card.validate()
print(card.data.base_model, card.data.license, card.data.datasets)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A base that knows its name and licence, a few rows, and a recipe that pushes."""
    base = save_tiny(tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"_name_or_path": "acme/tiny"}))
    write_chats(tmp_path / "chats.jsonl", [40] * 24)
    path = tmp_path / "pushing.yaml"
    path.write_text(
        f"model: {{name_or_path: {base}, dtype: float32}}\n"
        f"data: {{train: [{{path: json, data_files: {tmp_path}/chats.jsonl}}], eval: {{fraction: 0.2}}}}\n"
        "training: {max_steps: 2, global_batch_size: 4, mixed_precision: 'no'}\n"
        "samples: {count: 1, max_new_tokens: 4}\n"
        f"output_dir: {tmp_path}/run\n"
        "hub: {repo_id: me/devils, push: true}\n"
    )
    return path


def everything_written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_it_arrives_and_a_fresh_process_gets_the_same_logits(recipe: Path, hub: Hub, tmp_path: Path) -> None:
    process = run_python(hub, [*LAUNCH, "finetune/train.py", str(recipe), "accelerate_config=ddp"], tmp_path)
    assert process.returncode == 0, process.stderr
    assert f"pushed: {hub.url}/me/devils (private, " in process.stdout
    assert hub.calls().count("commit") == 1, "one rank pushes"
    calls = [call for call in hub.calls() if call != "harnesses"]
    assert calls[:2] == ["whoami", "info"], "asked before the training"
    assert "unknown" not in calls
    read = run_python(hub, ["-c", READ, str(tmp_path / "base"), str(tmp_path / "run")], tmp_path)
    assert read.returncode == 0, read.stderr
    assert read.stdout.strip() == "acme/tiny apache-2.0 None"
    text = process.stdout + process.stderr + everything_written(tmp_path / "run").decode(errors="replace")
    sent = b"".join(request.body for request in hub.log).decode(errors="replace")
    for secret in (TOKEN, "a-key-of-another-house"):
        assert secret not in text
        assert secret not in sent


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda hub: hub.users.clear(), "hub.push: the Hub answered 401"),
        (lambda hub: hub.add("me/devils", private=False), "hub.push: me/devils: is public"),
        (lambda hub: hub.users[TOKEN].update(name="other"), "not for me"),
    ],
    ids=["token", "public", "owner"],
)
def test_what_cannot_work_is_reported_before_the_training(
    recipe: Path, hub: Hub, tmp_path: Path, prepare: Any, text: str
) -> None:
    hub.users[TOKEN] = dict(hub.users[TOKEN])
    prepare(hub)
    process = run_python(hub, ["finetune/train.py", str(recipe)], tmp_path)
    assert process.returncode in (2, 4)
    assert text in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "run").exists()


def test_offline_is_reported_before_the_training(recipe: Path, hub: Hub, tmp_path: Path) -> None:
    process = run_python(hub, ["finetune/train.py", str(recipe)], tmp_path, HF_HUB_OFFLINE="1")
    assert (process.returncode, process.stderr.strip().splitlines()[-1][:14]) == (4, "HF_HUB_OFFLINE")
    assert hub.log == []
