"""CPU milliseconds that a training loop adds to a step: ours, transformers' Trainer, TRL's SFTTrainer.

    python benchmarks/overhead.py        (about a minute; needs `pip install trl`, else that column is left out)

One row of 64 tokens a step on a model of 0.14M parameters in float32, where the loop's own work shows. Each loop is
compared with a bare one (forward, backward, clip, read the loss, fused AdamW, nothing else) through the same forward
on the same rows in the same process; every loop logs every step. The loops take turns, and the figure is the median
over the turns of the difference of median steps, in CPU time of the process with one thread.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback

from benchmarks.common import prepare_silenced, run_ours, scratch, tiny_recipe, version_of, write_result
from finetune.architecture.own_layers.compute import compute_layers
from finetune.files import append_lines
from finetune.model.build import build_model
from finetune.model.quantization import unpacked_weight
from finetune.recipe.schema import Recipe
from finetune.tokens.batches import micro_batches
from finetune.tokens.dataset import Prepared
from tests.support.models.tiny import save_tiny, write_chats

STEPS, WARMUP, TURNS, TOKENS, ROWS = 200, 20, 9, 64, 128

Stamp = Callable[[], None]
Arm = Callable[[Stamp], None]


class StampEachStep(TrainerCallback):
    def __init__(self, stamp: Stamp) -> None:
        self.stamp = stamp

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.stamp()


def step_milliseconds(arm: Arm) -> float:
    """CPU time of the arm's median step, after warming up."""
    stamps: list[float] = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        arm(lambda: stamps.append(time.process_time()))
    assert len(stamps) == STEPS, len(stamps)
    return 1e3 * statistics.median(b - a for a, b in zip(stamps[WARMUP:], stamps[WARMUP + 1 :], strict=False))


def bare_loop(model: nn.Module, batches: Sequence[dict[str, Any]], loss_of: Callable[[Any], Any], stamp: Stamp) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    model.train()
    for step in range(STEPS):
        loss = loss_of(model(**batches[step % len(batches)]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loss.item()
        optimizer.step()
        optimizer.zero_grad()
        stamp()


class Arms:
    """The loops, each on its own copy of the same model and the same rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = save_tiny(folder / "model")
        chats = write_chats(folder / "chats.jsonl", [TOKENS] * ROWS)
        training = {"global_batch_size": 1, "max_steps": STEPS}
        self.recipe: Recipe = tiny_recipe(
            self.model, chats, data={"packing": False, "max_length": TOKENS}, training=training
        )
        self.prepared: Prepared = prepare_silenced(self.recipe)
        rows = self.prepared.train
        options = {"rank": 0, "world_size": 1, "per_device_batch_size": 1, "flat": True}
        self.batches = [batch for row in range(ROWS) for batch in micro_batches(rows, [row], **options)]
        self.rows = [
            {"input_ids": ids.tolist(), "labels": labels.tolist()}
            for row in range(ROWS)
            for ids, labels in rows.documents(row)
        ]

    def library_model(self) -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)

    def bare_ours(self, stamp: Stamp) -> None:
        model = build_model(self.recipe, torch.device("cpu"))
        compute_layers(model, unpacked_weight)
        bare_loop(model, self.batches, lambda loss: loss / TOKENS, stamp)

    def ours(self, stamp: Stamp) -> None:
        file = self.folder / "metrics.jsonl"

        def write(line: dict[str, Any]) -> None:
            append_lines(file, [line])
            stamp()

        run_ours(self.recipe, self.prepared, write)

    def bare_library(self, stamp: Stamp) -> None:
        tensors = [{key: torch.tensor([value]) for key, value in row.items()} for row in self.rows]
        bare_loop(
            self.library_model(), [batch | {"use_cache": False} for batch in tensors], lambda out: out.loss, stamp
        )

    def settings(self) -> dict[str, Any]:
        return {
            "output_dir": str(self.folder / "trainer"),
            "per_device_train_batch_size": 1,
            "max_steps": STEPS,
            "learning_rate": 1e-4,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
        }

    def trainer(self, stamp: Stamp) -> None:
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        self.train(
            Trainer(
                model=self.library_model(),
                args=TrainingArguments(**self.settings()),
                train_dataset=self.rows,
                data_collator=DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
            ),
            stamp,
        )

    def trl(self, stamp: Stamp) -> None:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(
            **self.settings(),
            bf16=False,
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            max_length=TOKENS,
        )
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        data = Dataset.from_list(self.rows)
        model = self.library_model()
        self.train(SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer), stamp)

    @staticmethod
    def train(trainer: Trainer, stamp: Stamp) -> None:
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(StampEachStep(stamp))
        trainer.train()


def main() -> int:
    torch.set_num_threads(1)
    with scratch() as folder:
        arms = Arms(folder)
        names = ["bare_ours", "ours", "bare_library", "trainer"] + (["trl"] if version_of("trl") else [])
        turns: list[dict[str, float]] = []
        for turn in range(TURNS):
            turns.append({name: step_milliseconds(getattr(arms, name)) for name in names})
            print(f"turn {turn + 1}/{TURNS}", {name: round(value, 2) for name, value in turns[-1].items()}, flush=True)
    result: dict[str, Any] = {
        "what": f"CPU ms a step, {TOKENS} tokens, 0.14M parameters, float32, logging every step",
        "turns": TURNS,
        "steps_a_turn": STEPS,
        "step_ms": {name: statistics.median(turn[name] for turn in turns) for name in names},
    }
    for name in names:
        if not name.startswith("bare"):
            bare = "bare_ours" if name == "ours" else "bare_library"
            over = sorted(turn[name] - turn[bare] for turn in turns)
            figures = {"median": statistics.median(over), "least": over[0], "most": over[-1]}
            result.setdefault("over_bare_ms", {})[name] = figures
    print(result["over_bare_ms"], write_result("overhead", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
