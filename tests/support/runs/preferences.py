"""Runs on preferences: rows of pairs and of judged answers, a tiny base, and a recipe for them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.models.tiny import CHATML, WORDS, tiny_model, tiny_tokenizer
from tests.support.runs.recipes import merged, write_recipe

STEPS, ROWS_A_STEP = 6, 4


def tokenizer_of_both() -> Any:
    """TRL would supervise what the template writes after an end of turn; here it writes nothing there."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML.replace("<|im_end|>\n", "<|im_end|>")
    return tokenizer


def words(generator: random.Random, most: int) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(generator.randint(2, most)))


def turn(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def preference_rows(kind: str, count: int = STEPS * ROWS_A_STEP) -> list[dict[str, Any]]:
    """Pairs (`dpo`), or judged answers (`kto`), two thirds of them wanted."""
    generator = random.Random(5)
    made = []
    for number in range(count):
        row: dict[str, Any] = {"prompt": turn("user", words(generator, 12))}
        if kind == "dpo":
            row |= {name: turn("assistant", words(generator, 20)) for name in ("chosen", "rejected")}
        else:
            row |= {"completion": turn("assistant", words(generator, 20)), "label": number % 3 != 0}
        made.append(row)
    return made


def write_base(folder: Path) -> Path:
    """A tiny model with its tokenizer."""
    tiny_model().save_pretrained(folder)
    tokenizer_of_both().save_pretrained(folder)
    return folder


def preference_recipe(folder: Path, base: Path, kind: str, *changes: Mapping[str, Any]) -> Path:
    """`folder`/recipe.yaml: one epoch in float32, without dropout, at one rate."""
    folder.mkdir(exist_ok=True)
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, preference_rows(kind))), "utf-8")
    recipe: dict[str, Any] = {
        "model": {"name_or_path": str(base), "dtype": "float32"},
        "lora": None,
        "data": {"train": [{"path": "json", "data_files": str(data)}], "max_length": 128},
        "training": {
            "objective": kind,
            "global_batch_size": ROWS_A_STEP,
            "num_train_epochs": 1,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
            "mixed_precision": "no",
        },
        "samples": {"count": 0},
        "output_dir": str(folder / "run"),
    }
    return write_recipe(folder, merged(recipe, *changes))


def lines_of(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of one kind."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    return [line for line in lines if line["kind"] == kind]
