"""Useful tokens a second of LoRA on quickstart's model and data: ours, TRL's SFTTrainer, transformers' Trainer, bare.

    python benchmarks/throughput.py [--turns 3] [--steps 40] [--arms ours,trl_packed]     (fifteen minutes on two cores)

Each arm trains the adapter that recipes/quickstart.yaml describes, on its data, with about as many tokens a step, in a
process of its own; the arms take turns, and the figure is the median over the turns of the median step after warming
up. Useful are the tokens of documents, as opposed to padding. The arms:

- ours: the trainer's entrypoint with the recipe as written, but for the number of steps;
- ours_compiled: the same with training.compile=true; the seconds of its first graphs are a figure of their own;
- trl: SFTTrainer as it comes (it recomputes activations, and pads);
- trl_packed: the same with packing=True;
- trl_packed_kept: the same without recomputation, as the recipe has it;
- trainer: transformers' Trainer with peft, padded, without recomputation;
- bare: forward, backward, clip and fused AdamW over the Trainer's batches, nothing else.

The share of the peak is that of the products which this training cannot do without (2 operations a weight and token
forward, 2 backward through a frozen weight, 6 in all for an adapter's; the head's for supervised tokens alone), over
the best product of square bfloat16 matrices that this device showed beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from benchmarks.common import prepare_silenced, scratch, version_of, write_result
from finetune.base.location import resolve_model_path
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "quickstart.yaml"
WARMUP = 8  # steps
SQUARE, PRODUCTS = 2048, 12


def peak_flops() -> float:
    """Operations a second of the quickest of some products of two SQUARE x SQUARE bfloat16 matrices."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    left, right = (torch.randn(SQUARE, SQUARE, device=device).bfloat16() for _ in range(2))
    seconds = []
    for _ in range(PRODUCTS):
        began = now()
        left @ right
        seconds.append(now() - began)
    return float(2 * SQUARE**3 / min(seconds))


def now() -> float:
    """Wall-clock seconds, once the device has finished what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Steps:
    """When each step ended, and the tokens of documents in the batches handed out."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.tokens: list[int] = []

    def count(self, collate: Callable[[Any], dict[str, torch.Tensor]]) -> Callable[[Any], dict[str, torch.Tensor]]:
        def counted(rows: Any) -> dict[str, torch.Tensor]:
            batch = collate(rows)
            mask = batch.get("attention_mask")
            self.tokens.append(batch["input_ids"].numel() if mask is None else int(mask.sum()))
            return batch

        return counted

    def figures(self) -> dict[str, float]:
        """The median step's seconds, and the mean of its tokens, after warming up."""
        pairs = zip(self.ends[WARMUP - 1 :], self.ends[WARMUP:], strict=False)
        seconds = [end - begin for begin, end in pairs]
        return summary(seconds, self.tokens[WARMUP : WARMUP + len(seconds)])


def summary(seconds: list[float], tokens: list[int]) -> dict[str, float]:
    """Tokens a second by all of the steps: a long batch takes longer, so medians of either do not belong together."""
    return {
        "step_seconds": statistics.median(seconds),
        "tokens_per_step": statistics.mean(tokens),
        "tokens_per_second": sum(tokens) / sum(seconds),
    }


def ours(folder: Path, steps: int, *more: str) -> dict[str, float]:
    """The entrypoint, and its own metrics."""
    overrides = [
        f"training.max_steps={steps}",
        f"output_dir={folder / 'run'}",
        "samples.prompts=[]",
        f"eval_steps={steps}",
        f"save_steps={steps}",
        *more,
    ]
    command = [sys.executable, str(ROOT / "finetune" / "train.py"), str(RECIPE), *overrides]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:] or done.stdout[-2000:])
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines())
    train = [line for line in lines if line["kind"] == "train"]
    kept = train[WARMUP:]
    figures = summary([line["step_seconds"] for line in kept], [line["tokens"] for line in kept])
    receipt = json.loads((folder / "run" / "receipt.json").read_text("utf-8"))
    graphs = receipt["compiled"]["first_seconds"]  # in the worst step, before the first
    return figures | {"first_step_seconds": train[0]["step_seconds"], "graphs_seconds": graphs}


def theirs(arm: str, folder: Path, steps: int) -> dict[str, float]:
    """One of the other arms, in this process."""
    recipe = load_recipe(RECIPE).recipe
    stamps = Steps()
    if arm.startswith("trl"):
        run_trl(recipe, folder, steps, stamps, arm)
    elif arm == "trainer":
        run_trainer(recipe, folder, steps, stamps)
    else:
        run_bare(recipe, folder, steps, stamps)
    return stamps.figures()


def library_model(recipe: Recipe) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(resolve_model_path(recipe.model.name_or_path), dtype=torch.bfloat16)


def peft_config(recipe: Recipe) -> Any:
    from peft import LoraConfig

    assert recipe.lora is not None
    return LoraConfig(
        r=recipe.lora.r,
        lora_alpha=recipe.lora.lora_alpha,
        lora_dropout=recipe.lora.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def tokenizer_of(recipe: Recipe) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_model_path(recipe.model.name_or_path))


def documents(recipe: Recipe) -> list[dict[str, list[int]]]:
    """Our own tokens and labels, one document a row."""
    rows = prepare_silenced(recipe).train
    found = (rows.documents(row) for row in range(len(rows)))
    return [
        {"input_ids": ids.tolist(), "labels": labels.tolist(), "attention_mask": [1] * len(ids)}
        for row in found
        for ids, labels in row
    ]


def rows_a_step(recipe: Recipe, lengths: Iterable[int]) -> int:
    """As many documents as one packed row holds on average."""
    return max(1, round(recipe.data.max_length * recipe.training.global_batch_size / statistics.mean(lengths)))


def settings(recipe: Recipe, folder: Path, steps: int) -> dict[str, Any]:
    """What every Trainer is told alike."""
    return {
        "output_dir": str(folder / "trainer"),
        "max_steps": steps,
        "learning_rate": recipe.training.learning_rate,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }


def run_trl(recipe: Recipe, folder: Path, steps: int, stamps: Steps, arm: str) -> None:
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    data = load_dataset("json", data_files=str(ROOT / "data" / "devils_dictionary.jsonl"), split="train")
    packed = arm != "trl"
    lengths = (len(document["input_ids"]) for document in documents(recipe))
    batch = recipe.training.global_batch_size if packed else rows_a_step(recipe, lengths)
    options = {"packing": True, "max_length": recipe.data.max_length} if packed else {}
    if arm == "trl_packed_kept":
        options["gradient_checkpointing"] = False
    config = SFTConfig(**settings(recipe, folder, steps), per_device_train_batch_size=batch, **options)
    trainer = SFTTrainer(
        model=library_model(recipe),
        args=config,
        train_dataset=data,
        processing_class=tokenizer_of(recipe),
        peft_config=peft_config(recipe),
    )
    train(trainer, stamps)


def run_trainer(recipe: Recipe, folder: Path, steps: int, stamps: Steps) -> None:
    from peft import get_peft_model
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    rows = documents(recipe)
    arguments = TrainingArguments(
        **settings(recipe, folder, steps),
        bf16=True,
        per_device_train_batch_size=rows_a_step(recipe, (len(row["input_ids"]) for row in rows)),
    )
    model: Any = get_peft_model(library_model(recipe), peft_config(recipe))  # type: ignore[arg-type]
    collate = DataCollatorForSeq2Seq(tokenizer_of(recipe), label_pad_token_id=-100)
    train(Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate), stamps)


def train(trainer: Any, stamps: Steps) -> None:
    from transformers import TrainerCallback

    class Stamp(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stamps.ends.append(now())

    trainer.data_collator = stamps.count(trainer.data_collator)
    trainer.add_callback(Stamp())
    trainer.train()


def run_bare(recipe: Recipe, folder: Path, steps: int, stamps: Steps) -> None:
    from peft import get_peft_model
    from transformers import DataCollatorForSeq2Seq

    del folder
    rows = documents(recipe)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = get_peft_model(library_model(recipe), peft_config(recipe)).to(device)  # type: ignore[arg-type]
    size = rows_a_step(recipe, (len(row["input_ids"]) for row in rows))
    collate = stamps.count(DataCollatorForSeq2Seq(tokenizer_of(recipe), label_pad_token_id=-100))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.training.learning_rate, fused=True)
    model.train()
    for batch in _batches(rows, size, steps):
        inputs = {key: value.to(device) for key, value in collate(batch).items()}
        with torch.autocast(device, torch.bfloat16):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        stamps.ends.append(now())


def _batches(rows: list[Any], size: int, steps: int) -> Iterator[list[Any]]:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    for step in range(steps):
        yield [rows[order[(step * size + place) % len(rows)]] for place in range(size)]


def needed_flops(recipe: Recipe) -> dict[str, float]:
    """Operations of products that a token needs in the decoder's layers, and a supervised token in the head."""
    model = library_model(recipe)
    assert recipe.lora is not None
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    layers = [module for name, module in linears if "lm_head" not in name]
    base = sum(layer.weight.numel() for layer in layers)
    adapters = sum(recipe.lora.r * (layer.in_features + layer.out_features) for layer in layers)
    head = model.get_output_embeddings().weight.numel()  # type: ignore[operator,union-attr]
    return {"layers": 4.0 * base + 6.0 * adapters, "head": 4.0 * head}


def supervised_share(recipe: Recipe) -> float:
    """Supervised tokens over tokens."""
    labels = [label for document in documents(recipe) for label in document["labels"]]
    return sum(label != -100 for label in labels) / len(labels)


def measured(arm: str, steps: int) -> dict[str, float]:
    """One turn of an arm, in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", arm, "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arm}: {done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


OURS: dict[str, tuple[str, ...]] = {"ours": (), "ours_compiled": ("training.compile=true",)}
ARMS = [*OURS, "trl", "trl_packed", "trl_packed_kept", "trainer", "bare"]


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help=f"of a turn, {WARMUP} of them to warm up")
    parser.add_argument("--arms", default=",".join(arm for arm in ARMS if version_of("trl") or "trl" not in arm))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    asked = arguments_of(sys.argv[1:])
    if asked.one:
        with scratch() as folder:
            if (overrides := OURS.get(asked.one)) is not None:
                found = ours(folder, asked.steps, *overrides)
            else:
                found = theirs(asked.one, folder, asked.steps)
            print(json.dumps(found))
        return 0
    names = asked.arms.split(",")
    turns: list[dict[str, dict[str, float]]] = []
    peaks = []
    for turn in range(asked.turns):
        peaks.append(peak_flops())
        turns.append({arm: measured(arm, asked.steps) for arm in names})
        rates = {arm: round(figures["tokens_per_second"]) for arm, figures in turns[-1].items()}
        print(f"turn {turn + 1}/{asked.turns} {peaks[-1] / 1e9:.0f} GFLOP/s", rates, flush=True)
    result = {"what": "useful tokens a second, quickstart's LoRA", "steps_a_turn": asked.steps, "turns": asked.turns}
    print(write_result("throughput", result | judged(turns, peaks)))
    return 0


def judged(turns: list[dict[str, dict[str, float]]], peaks: list[float]) -> dict[str, Any]:
    """Medians over the turns, each of ours over each other arm turn by turn, and the share of the peak it reaches."""
    recipe = load_recipe(RECIPE).recipe
    arms = {
        arm: {key: statistics.median(turn[arm][key] for turn in turns) for key in turns[0][arm]} for arm in turns[0]
    }
    result: dict[str, Any] = {"arms": arms, "peak_gflops": max(peaks) / 1e9}
    needed = needed_flops(recipe)
    a_token = needed["layers"] + supervised_share(recipe) * needed["head"]
    result["needed_mflop_a_token"] = a_token / 1e6
    for mine in (arm for arm in OURS if arm in arms):
        result[f"{mine}_over"] = {arm: _median_ratio(turns, mine, arm) for arm in arms if arm != mine}
        result[f"{mine}_share_of_peak"] = arms[mine]["tokens_per_second"] * a_token / max(peaks)
    return result


def _median_ratio(turns: list[dict[str, dict[str, float]]], mine: str, other: str) -> float:
    return statistics.median(turn[mine]["tokens_per_second"] / turn[other]["tokens_per_second"] for turn in turns)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
