"""One curve: however a step's rows are split, loss and gradient norm are those of one document at a time.

Eight chats of 20 to 300 tokens are all the data, and every step learns from all eight, so only the split differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from finetune.train import main
from tests.support.reference import IGNORE, Document, Step, reference_run
from tests.support.tiny import FAMILIES, save_tiny, write_chats

REPOSITORY = Path(__file__).resolve().parents[2]
LENGTHS = [300, 20, 170, 61, 222, 37, 128, 90]
STEPS, SEED = 6, 7
# Steps gentle enough that AdamW does not blow rounding up: at 2e-2 LoRA overshoots, and any two loops differ by 1e-4.
PEAK = {"full": 3e-3, "lora": 5e-3}
LORA = {"r": 4, "lora_alpha": 16.0, "target_modules": "all-linear"}
MAX_GRAD_NORM, WEIGHT_DECAY = 0.05, 0.1  # the norm is above 0.05 throughout, so every step is clipped
TOLERANCE = 1e-5

# What differs from the plain recipe: eight rows, all in one forward.
SPLITS: dict[str, dict[str, dict[str, Any]]] = {
    "whole batch": {},
    "accumulation 8x1": {"training": {"per_device_batch_size": 1}},
    "accumulation 3+3+2": {"training": {"per_device_batch_size": 3}},
    "packed into one row": {"data": {"packing": True}, "training": {"global_batch_size": 1}},
    "packed into three rows": {
        "data": {"packing": True, "max_length": 350},
        "training": {"global_batch_size": 3, "per_device_batch_size": 1},
    },
    "activation checkpointing": {"training": {"activation_checkpointing": True}},
    "every second layer, packed": {
        "data": {"packing": True},
        "training": {"global_batch_size": 1, "activation_checkpointing": 2},
    },
    "padded, sdpa": {"model": {"attention": "sdpa"}},
    "padded, eager, accumulated": {"model": {"attention": "eager"}, "training": {"per_device_batch_size": 3}},
}
RANKS: dict[str, dict[str, dict[str, Any]]] = {
    "two ranks": {"training": {"per_device_batch_size": 1}},
    "two ranks, one without a row at the end": SPLITS["packed into three rows"],
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


def documents(chats: Path, folder: Path) -> list[Document]:
    """Rendered, tokenised and labelled from the definition: the answer and its end-of-turn token are learned."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for line in chats.read_text("utf-8").splitlines():
        messages = json.loads(line)["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        end = text.rindex("<|im_end|>") + len("<|im_end|>")
        begin = text.rindex(messages[-1]["content"], 0, end)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        labels = [token if begin <= start < end else IGNORE for token, (start, _) in pairs]
        found.append(Document(encoded["input_ids"], labels))
    assert [len(document.input_ids) for document in found] == LENGTHS
    return found


def learning_rates(method: str) -> list[float]:
    """Linear to zero, without warmup."""
    return [PEAK[method] * (STEPS - step) / STEPS for step in range(STEPS)]


def base_model(folder: Path, method: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    if method == "lora":
        torch.manual_seed(SEED)
        return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
    return model


def reference(folder: Path, chats: Path, method: str) -> list[Step]:
    return reference_run(
        base_model(folder, method),
        [documents(chats, folder)] * STEPS,
        learning_rates=learning_rates(method),
        max_grad_norm=MAX_GRAD_NORM,
        weight_decay=WEIGHT_DECAY,
    )


@pytest.fixture(scope="module")
def curves(tiny_llama: Path, chats: Path) -> dict[str, list[Step]]:
    return {method: reference(tiny_llama, chats, method) for method in PEAK}


def write_recipe(folder: Path, model: Path, chats: Path, method: str, split: Mapping[str, Mapping[str, Any]]) -> Path:
    recipe: dict[str, Any] = {
        "accelerate_config": "single",
        "model": {"name_or_path": str(model), "dtype": "float32"},
        "lora": LORA if method == "lora" else None,
        "data": {
            "train": [{"path": "json", "data_files": str(chats)}],
            "packing": False,
            "max_length": sum(LENGTHS),
        },
        "training": {
            "global_batch_size": len(LENGTHS),
            "per_device_batch_size": len(LENGTHS),
            "max_steps": STEPS,
            "learning_rate": PEAK[method],
            "lr_scheduler_type": "linear",
            "warmup_steps": 0,
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": MAX_GRAD_NORM,
            "mixed_precision": "no",
            "activation_checkpointing": False,
            "seed": SEED,
        },
        "samples": {"count": 0},
        "output_dir": str(folder / "run"),
    }
    for section, changes in split.items():
        recipe[section] |= changes
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe), "utf-8")  # JSON is YAML
    return file


def curve_of(recipe: Path) -> list[Step]:
    lines = [json.loads(line) for line in (recipe.parent / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [Step(line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "train"]


def assert_same_curve(curve: list[Step], expected: list[Step]) -> None:
    assert len(curve) == len(expected) == STEPS
    for step, (found, wanted) in enumerate(zip(curve, expected, strict=True), start=1):
        assert tuple(found) == pytest.approx(tuple(wanted), rel=TOLERANCE), f"step {step}"


def test_the_curve_moves_and_is_clipped(curves: dict[str, list[Step]]) -> None:
    """Else the comparisons below would prove little."""
    for method, curve in curves.items():
        assert curve[-1].loss < 0.98 * curve[0].loss, method
        assert min(step.grad_norm for step in curve) > MAX_GRAD_NORM, method
    assert (len(SPLITS), len(RANKS), len(PEAK), len(FAMILIES)) == (9, 2, 2, 4)


@pytest.mark.parametrize("method", PEAK)
@pytest.mark.parametrize("split", SPLITS)
def test_one_process(
    split: str, method: str, curves: dict[str, list[Step]], tiny_llama: Path, chats: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, tiny_llama, chats, method, SPLITS[split])
    assert main([str(recipe)]) == 0
    assert_same_curve(curve_of(recipe), curves[method])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tied: bool, chats: Path, tmp_path: Path) -> None:
    """Two packed rows accumulated; Mistral with a window shorter than the documents."""
    window = {"sliding_window": 64} if family == "mistral" else {}
    model = save_tiny(tmp_path / "model", family, tie_word_embeddings=tied, **window)
    split = {"data": {"packing": True, "max_length": 560}, "training": {"global_batch_size": 2}}
    recipe = write_recipe(tmp_path, model, chats, "full", split)
    assert main([str(recipe)]) == 0
    assert_same_curve(curve_of(recipe), reference(model, chats, "full"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "method"), [("two ranks", "full"), ("two ranks, one without a row at the end", "lora")]
)
def test_two_ranks(
    split: str, method: str, curves: dict[str, list[Step]], tiny_llama: Path, chats: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, tiny_llama, chats, method, RANKS[split])
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", "accelerate_configs/cpu_2proc.yaml", "finetune/train.py", str(recipe)]
    command += ["accelerate_config=ddp"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_curve(curve_of(recipe), curves[method])
    receipt = json.loads((tmp_path / "run" / "receipt.json").read_text("utf-8"))
    assert (receipt["world_size"], receipt["strategy"]) == (2, "ddp")


@pytest.mark.parametrize("method", PEAK)
def test_transformers_trainer(method: str, tiny_llama: Path, chats: Path, tmp_path: Path) -> None:
    """Trainer pads, shuffles and accumulates over the same eight rows; its curve is ours."""
    recipe = write_recipe(tmp_path, tiny_llama, chats, method, SPLITS["packed into one row"])
    assert main([str(recipe)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=STEPS,
        learning_rate=PEAK[method],
        lr_scheduler_type="linear",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        logging_steps=1,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=base_model(tiny_llama, method),
        args=arguments,
        train_dataset=[document._asdict() for document in documents(chats, tiny_llama)],
        data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORE),
    )
    trainer.train()
    logged = [Step(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log]
    assert_same_curve(curve_of(recipe), logged)
