"""Trainings by one tool, watched: `python benchmarks/parity_peer.py JOB.json ...`, called by parity.py.

It runs in that tool's environment and imports nothing of this project, unless the tool is this project. Every job is a
process of its own, forked once the libraries are loaded. A job names the tool, the tool's own settings, the model, an
adapter to start from, and a file of chats or pairs in the order of training. The tool's own command or trainer does the
work. Three methods of its libraries are wrapped to look; they change nothing unless the job names `edits`:

    Trainer.train                 before: edits; after: the adapter is saved
    Trainer.training_step         the batch that the model sees; the micro-batch's loss
    Accelerator.clip_grad_norm_   the gradient's norm in full precision; one call is one optimizer step

FOLDER/record.json gets each step's loss, norm and tokens, the first rows, times and peak memory.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import resource
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

KEPT_ROWS = 8  # rows whose tokens are recorded
PACKAGES = ("torch", "transformers", "peft", "accelerate", "trl", "axolotl", "llamafactory")
IGNORE = -100


class Record:
    """The steps of one training."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.rows: list[dict[str, list[int]]] = []  # input_ids and labels of a row, without padding
        self.tokens, self.supervised, self.losses = 0, 0, [0.0]

    def micro_batch(self, inputs: dict[str, Any]) -> None:
        """Count documents' tokens in a batch, and keep its first rows."""
        ids, mask, labels = (inputs.get(name) for name in ("input_ids", "attention_mask", "labels"))
        assert ids is not None
        self.tokens += ids.numel() if mask is None or mask.dim() != 2 else int((mask != 0).sum())
        if labels is None:
            return
        self.supervised += int((labels[:, 1:] != IGNORE).sum())
        for row in range(len(ids)):
            if len(self.rows) < KEPT_ROWS:
                real = slice(None) if mask is None or mask.dim() != 2 else mask[row] != 0
                self.rows.append({"input_ids": ids[row][real].tolist(), "labels": labels[row][real].tolist()})

    def step(self, norm: float) -> None:
        """The micro-batches since the last call were one optimizer step."""
        self.steps.append(
            {
                "loss": sum(self.losses),
                "grad_norm": norm,
                "tokens": self.tokens,
                "supervised": self.supervised,
                "cpu_seconds": time.process_time(),
            }
        )
        self.tokens, self.supervised, self.losses = 0, 0, [0.0]


def watch(record: Record, job: dict[str, Any]) -> None:
    """Wrap the three methods that every one of these tools trains by."""
    from accelerate import Accelerator
    from transformers import Trainer

    train, training_step, clip = Trainer.train, Trainer.training_step, Accelerator.clip_grad_norm_

    def watched_train(self: Any, *args: Any, **kwargs: Any) -> Any:
        for edit in job.get("edits", []):
            EDITS[edit](self, job)
        result = train(self, *args, **kwargs)
        self.accelerator.unwrap_model(self.model).save_pretrained(f"{job['folder']}/adapter")
        return result

    def watched_step(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        record.micro_batch(inputs)
        loss = training_step(self, model, inputs, *args, **kwargs)
        record.losses.append(float(loss))
        return loss

    def watched_clip(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm = clip(self, *args, **kwargs)
        record.step(float(norm))
        return norm

    Trainer.train, Trainer.training_step, Accelerator.clip_grad_norm_ = watched_train, watched_step, watched_clip


def forget_after_end(trainer: Any, job: dict[str, Any]) -> None:
    """Take what follows an answer's end-of-turn token out of the labels (the template's line break)."""
    collate, end = trainer.data_collator, job["end_token"]

    def edited(*args: Any, **kwargs: Any) -> Any:
        batch = collate(*args, **kwargs)
        after_end = batch["input_ids"].roll(1, dims=1) == end
        if "labels" in batch:
            batch["labels"][after_end] = IGNORE
        else:  # pairs
            batch["completion_mask"][after_end] = 0
        return batch

    trainer.data_collator = edited


def forget_added_end(trainer: Any, job: dict[str, Any]) -> None:
    """Take a second end-of-turn token, two tokens after the first, out of the labels."""
    collate, end = trainer.data_collator, job["end_token"]

    def edited(*args: Any, **kwargs: Any) -> Any:
        batch = collate(*args, **kwargs)
        ids = batch["input_ids"]
        batch["labels"][(ids == end) & (ids.roll(2, dims=1) == end)] = IGNORE
        return batch

    trainer.data_collator = edited


def learn_the_end(trainer: Any, job: dict[str, Any]) -> None:
    """Put the end-of-turn token of each answer into the labels: one that follows a supervised token."""
    collate, end = trainer.data_collator, job["end_token"]

    def edited(*args: Any, **kwargs: Any) -> Any:
        batch = collate(*args, **kwargs)
        ends = (batch["input_ids"] == end) & (batch["labels"].roll(1, dims=1) != IGNORE)
        batch["labels"][ends] = end
        return batch

    trainer.data_collator = edited


def mean_per_micro_batch(trainer: Any, job: dict[str, Any]) -> None:
    """Average each micro-batch by itself, as transformers did before 4.46."""
    trainer.model_accepts_loss_kwargs = False


EDITS = {each.__name__: each for each in (forget_after_end, forget_added_end, learn_the_end, mean_per_micro_batch)}


def peft_model(job: dict[str, Any]) -> Any:
    """The base in float32 with the job's adapter, or with a new one by the settings in `lora`."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, set_seed

    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    if job.get("adapter"):
        return PeftModel.from_pretrained(model, job["adapter"], is_trainable=True)
    set_seed(job["settings"].get("seed", 42))
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **job["lora"]))


def shared_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """A Trainer's arguments besides the job's settings: its folder, and no reports to any service."""
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return {"output_dir": f"{job['folder']}/trainer", **quiet, **job["settings"]}


def run_trl(job: dict[str, Any]) -> None:
    """SFTTrainer on prompts and completions: its defaults supervise the answers alone.

    With `layout: messages` it takes whole chats and supervises every token. With `layout: text` the template has
    rendered them before, as many scripts do.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer, rows = AutoTokenizer.from_pretrained(job["model"]), read_rows(job["rows"])
    match job.get("layout"):
        case "text":
            rows = [{"text": tokenizer.apply_chat_template(row["messages"], tokenize=False)} for row in rows]
        case "text_without_bos":
            texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
            rows = [{"text": text.removeprefix(tokenizer.bos_token)} for text in texts]
        case None:
            rows = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
    trainer = SFTTrainer(
        model=peft_model(job),
        args=SFTConfig(**shared_arguments(job)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()


def run_trl_dpo(job: dict[str, Any]) -> None:
    """DPOTrainer on pairs with a common prompt."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        model=peft_model(job),
        args=DPOConfig(**shared_arguments(job)),
        train_dataset=Dataset.from_list(read_rows(job["rows"])),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    )
    trainer.train()


def run_trainer(job: dict[str, Any]) -> None:
    """transformers' Trainer with peft. It renders nothing itself, so rows come with tokens and labels, as a user makes
    them: the answer and its end-of-turn token are supervised. With `layout: whole_chats`, the labels come from
    DataCollatorForLanguageModeling."""
    from datasets import Dataset
    from transformers import (
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(job["model"], **job.get("tokenizer", {}))
    rows = []
    for row in read_rows(job["rows"]):
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        last = row["messages"][-1]["content"]
        begin = text.rindex(last)
        end = begin + len(last) + len(job["end_of_turn"])
        assert text[begin + len(last) : end] == job["end_of_turn"]
        pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        labels = [token if begin <= start < end else IGNORE for token, (start, _) in pairs]
        rows.append({"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"], "labels": labels})
    collate: Any = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=IGNORE)
    if job.get("layout") == "whole_chats":
        rows = [{key: row[key] for key in ("input_ids", "attention_mask")} for row in rows]
        collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    arguments = TrainingArguments(**shared_arguments(job))
    Trainer(model=peft_model(job), args=arguments, train_dataset=Dataset.from_list(rows), data_collator=collate).train()


def run_axolotl(job: dict[str, Any]) -> None:
    """`axolotl train config.yaml`."""
    import yaml
    from axolotl.cli.train import do_cli

    folder = Path(job["folder"])
    dataset = {"path": job["rows"], "ds_type": "json", "type": "chat_template", "field_messages": "messages"}
    values = {
        "base_model": job["model"],
        "lora_model_dir": job.get("adapter"),
        "datasets": [dataset | job.get("dataset", {})],
        "dataset_prepared_path": str(folder / "prepared"),
        "output_dir": str(folder / "trainer"),
        **job["settings"],
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}), "utf-8")
    sys.argv = ["axolotl"]
    do_cli(str(file))


def run_llamafactory(job: dict[str, Any]) -> None:
    """`llamafactory-cli train config.yaml`."""
    from llamafactory.train.tuner import run_exp

    folder = Path(job["folder"])
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    rows = {
        "file_name": job["rows"],
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": tags | {"system_tag": "system"},
    }
    (folder / "dataset_info.json").write_text(json.dumps({"rows": rows}), "utf-8")
    values = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": job["model"],
        "adapter_name_or_path": job.get("adapter"),
        "dataset": "rows",
        "dataset_dir": str(folder),
        "output_dir": str(folder / "trainer"),
        "overwrite_output_dir": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        **job["settings"],
    }
    run_exp({key: value for key, value in values.items() if value is not None})


def run_ours(job: dict[str, Any]) -> None:
    """`finetune train recipe.yaml`. Its own metrics are in full precision."""
    import yaml

    from finetune.train import main
    from finetune.training.run_output import RunOutput

    folder, write = Path(job["folder"]), RunOutput.write_metrics
    seconds: list[float] = []

    def timed(self: Any, line: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if line["kind"] == "train":
            seconds.append(time.process_time())
        return write(self, line, *args, **kwargs)

    RunOutput.write_metrics = timed  # type: ignore[method-assign]
    recipe = {"output_dir": str(folder / "run"), **job["settings"]}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    code = main([str(folder / "recipe.yaml")])
    if code:
        raise SystemExit(code)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    for line, second in zip((line for line in lines if line["kind"] == "train"), seconds, strict=True):
        job["record"].steps.append(
            {
                "loss": line["loss"],
                "grad_norm": line["grad_norm"],
                "tokens": line["tokens"],
                "supervised": line["supervised_tokens"],
                "cpu_seconds": second,
            }
        )
    shutil.copytree(folder / "run" / "adapter", folder / "adapter")


RUN = {
    "ours": run_ours,
    "trl": run_trl,
    "trl_dpo": run_trl_dpo,
    "trainer": run_trainer,
    "axolotl": run_axolotl,
    "llamafactory": run_llamafactory,
}


def read_rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()]


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# Loaded before the first fork.
LIBRARIES = {
    "ours": ("finetune.train", "finetune.training.session", "finetune.training.start"),
    "trl": ("trl.trainer.sft_trainer", "datasets", "peft"),
    "trl_dpo": ("trl.trainer.dpo_trainer", "datasets", "peft"),
    "trainer": ("datasets", "peft"),
    "axolotl": ("axolotl.train", "axolotl.common.datasets", "axolotl.core.builders"),
    "llamafactory": ("llamafactory.train.tuner",),
}


def one(file: str) -> None:
    """Train one job, and write its record."""
    job = json.loads(Path(file).read_text("utf-8"))
    record = job["record"] = Record()
    if job["tool"] != "ours":
        watch(record, job)
    began = time.process_time()
    RUN[job["tool"]](job)
    result = {
        "steps": record.steps,
        "rows": record.rows,
        "cpu_seconds": time.process_time() - began,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": {package: found for package in PACKAGES if (found := version(package))},
    }
    (Path(job["folder"]) / "record.json").write_text(json.dumps(result), "utf-8")


def main(files: list[str]) -> int:
    first = json.loads(Path(files[0]).read_text("utf-8"))
    for library in ("torch", "transformers", *LIBRARIES[first["tool"]]):
        importlib.import_module(library)
    for file in files:
        child = os.fork()
        if child == 0:
            try:
                one(file)
            except BaseException:
                words = traceback.format_exc()
                print(words, file=sys.stderr)
                (Path(file).parent / "error.txt").write_text(words.strip().splitlines()[-1], "utf-8")
                os._exit(1)
            os._exit(0)
        os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    os.environ |= {"DO_NOT_TRACK": "1", "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_DISABLED": "true", "HF_HUB_OFFLINE": "1"}
    sys.exit(main(sys.argv[1:]))
