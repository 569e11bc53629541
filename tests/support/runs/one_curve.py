"""Six steps on eight chats: the recipe, its reference one document at a time, and the curve of its run.

Eight chats of 20 to 300 tokens are all the data, and every step learns from all eight, so only the split differs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from finetune.run_folder.checkpoint import newest_valid, read_checkpoint
from tests.support.runs.recipes import merged, tiny, write_recipe
from tests.support.runs.reference import IGNORE, Document, Step, reference_run

LENGTHS = [300, 20, 170, 61, 222, 37, 128, 90]
STEPS, SEED = 6, 7
# Steps gentle enough that AdamW does not blow rounding up: at 2e-2 LoRA overshoots, and any two loops differ by 1e-4.
PEAK = {"full": 3e-3, "lora": 5e-3}
LORA = {"r": 4, "lora_alpha": 16.0, "target_modules": "all-linear"}
MAX_GRAD_NORM, WEIGHT_DECAY = 0.05, 0.1  # the norm is above 0.05 throughout, so every step is clipped
TOLERANCE = 1e-5
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
    "hidden states in host memory": {"training": {"activation_checkpointing": True, "activation_offloading": True}},
    "selective recomputation": {"training": {"activation_checkpointing": "selective"}},
    "every second layer, packed": {
        "data": {"packing": True},
        "training": {"global_batch_size": 1, "activation_checkpointing": 2},
    },
    "padded, sdpa": {"model": {"attention": "sdpa"}},
    "padded, eager, accumulated": {"model": {"attention": "eager"}, "training": {"per_device_batch_size": 3}},
}


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


def write_curve_recipe(
    folder: Path, model: Path, chats: Path, method: str, *changes: Mapping[str, Any], **sections: Any
) -> Path:
    """`folder`/recipe.yaml: all rows in one forward, clipped steps; `changes` and `sections` go over that, in turn."""
    content: dict[str, Any] = {
        "accelerate_config": "single",
        "lora": LORA if method == "lora" else None,
        "data": {"packing": False, "max_length": sum(LENGTHS)},
        "training": {
            "global_batch_size": len(LENGTHS),
            "per_device_batch_size": len(LENGTHS),
            "max_steps": STEPS,
            "learning_rate": PEAK[method],
            "lr_scheduler_type": "linear",
            "warmup_steps": 0,
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": MAX_GRAD_NORM,
            "activation_checkpointing": False,
            "seed": SEED,
        },
        "samples": {"count": 0},
        "eval_steps": STEPS,
        "save_steps": STEPS,
        "output_dir": str(folder / "run"),
    }
    folder.mkdir(exist_ok=True)
    return write_recipe(folder, merged(tiny(model, chats, **content), *changes, sections))


def curve_of(recipe: Path) -> list[Step]:
    lines = [json.loads(line) for line in (recipe.parent / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [Step(line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "train"]


def checkpointed(run: Path) -> dict[str, torch.Tensor]:
    """The trained tensors of a run's newest checkpoint."""
    checkpoint, _ = newest_valid(run)
    assert checkpoint is not None
    return read_checkpoint(checkpoint)[0]["model"]
