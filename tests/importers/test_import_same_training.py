"""An imported recipe trains as the tool it came from: TRL's own trainer and ours, step by step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.cli.main import main
from finetune.model.optimizer import Schedule
from finetune.recipe.loader import load_recipe
from tests.support.models.tiny import write_chats

ROOT = Path(__file__).resolve().parents[2]
# All in one step, so that their order does not matter; two are longer than max_length.
LENGTHS = [22, 30, 45, 20, 90, 26, 70, 25]
pytestmark = pytest.mark.slow

THEIR_TRAINER = """
import json, sys
from datasets import load_dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model, rows, folder, values, rates = *sys.argv[1:4], json.loads(sys.argv[4]), json.loads(sys.argv[5])

class Trainer(SFTTrainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        if rates is None:
            return super().create_scheduler(num_training_steps, optimizer)
        at = lambda step: (rates + [0.0])[step] / values["learning_rate"]
        self.lr_scheduler = LambdaLR(optimizer or self.optimizer, at)
        return self.lr_scheduler

trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
    processing_class=AutoTokenizer.from_pretrained(model),
    args=SFTConfig(output_dir=folder, use_cpu=True, report_to="none", save_strategy="no", **values),
    train_dataset=load_dataset("json", data_files=rows, split="train"),
)
trainer.train()
lines = [line for line in trainer.state.log_history if "loss" in line]
print("CURVE " + json.dumps([(line["loss"], line["learning_rate"], line["grad_norm"]) for line in lines]))
"""


def run(words: list[str], folder: Path) -> str:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "FINETUNE_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hf"),
        "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    process = subprocess.run(
        [sys.executable, *words], env=environment, cwd=folder, capture_output=True, text=True, timeout=400, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


@pytest.mark.parametrize(
    "keys",
    [
        {"learning_rate": 5e-3},  # the rest is TRL's defaults: linear, no warming up, three epochs, clipped at 1
        {
            "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1,
            "max_grad_norm": 0.3, "num_train_epochs": 5, "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2, "seed": 7,
        },
    ],
    ids=["defaults", "everything"],
)  # fmt: skip
def test_the_imported_recipe_takes_trls_steps(keys: dict[str, Any], tiny_llama: Path, tmp_path: Path) -> None:
    rows = write_chats(tmp_path / "chats.jsonl", LENGTHS)
    values = keys | {"bf16": False, "max_length": 64, "logging_steps": 1}
    config, recipe = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    data = {"datasets": [{"path": "json", "data_files": str(rows)}], "output_dir": str(tmp_path / "run")}
    config.write_text(yaml.safe_dump({"model_name_or_path": str(tiny_llama)} | data | values))
    assert main(["import", str(config), "-o", str(recipe)]) == 0
    training, rates = load_recipe(recipe).recipe.training, None
    if "warmup_steps" in keys:  # transformers begins at rate 0, and trains nothing in the first step
        rate = Schedule(training, keys["num_train_epochs"]).rate
        rates = [rate(step) for step in range(keys["num_train_epochs"])]
    words = [str(tiny_llama), str(rows), str(tmp_path / "trl"), json.dumps(values), json.dumps(rates)]
    theirs = run(["-c", THEIR_TRAINER, *words], tmp_path)
    expected = json.loads(next(line for line in theirs.splitlines() if line.startswith("CURVE "))[6:])

    run([str(ROOT / "finetune" / "train.py"), str(recipe), "budget.gpus=0", "samples.count=0"], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    curve = [(line["loss"], line["learning_rate"], line["grad_norm"]) for line in lines if line["kind"] == "train"]

    assert len(curve) == len(expected) == keys.get("num_train_epochs", 3)
    for own, its in zip(curve, expected, strict=True):
        assert own[0] == pytest.approx(its[0], rel=2e-4), "TRL logs four digits"
        assert own[1] == pytest.approx(its[1], rel=1e-6)
        assert own[2] == pytest.approx(its[2], rel=1e-3)
    assert curve[0][0] > curve[-1][0]
