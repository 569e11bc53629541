"""Train by TRL: the child process of `finetune import --prove`, a script that imports nothing of finetune.

Its input has one JSON object a line. The first is the setting: model, rows, configuration. Each later line asks for one
training with some changes, and gets a line with its curve. So a cause is tried by switching it off, and the libraries
are imported once.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any

CPU_SECONDS, GIBIBYTES = 1200, 16  # in addition to what the imports took
REFUSED = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.posix_spawn", "os.exec", "os.system")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log

    def answer(content: Mapping[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    setting = json.loads(sys.stdin.readline())
    try:
        import peft  # noqa: F401  all imports come before the limits
        import torch
        import trl

        trainer_and_config(setting["trainer"])
    except ImportError as error:
        answer({"error": str(error)})
        return
    torch.set_num_threads(1)
    shut_in()
    answer({"version": trl.__version__})
    for line in sys.stdin:
        try:
            answer(train_foreign(setting, json.loads(line)))
        except Exception as error:  # whatever the tool says about its configuration or its rows
            answer({"error": f"{type(error).__name__}: {error}"})


def shut_in() -> None:
    """From here on: no connection, no other program, limited time and memory."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in REFUSED:
            raise PermissionError(f"{event} is not allowed here")

    with open("/proc/self/statm") as file:
        memory = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + GIBIBYTES * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    sys.addaudithook(refuse)


def trainer_and_config(name: str) -> tuple[Any, Any]:
    """TRL's trainer and its configuration: SFT, DPO, KTO or CPO."""
    import trl

    place: Any = trl
    if name == "CPO":
        import trl.experimental.cpo as place
    elif name == "KTO" and not hasattr(trl, "KTOTrainer"):  # older versions
        import trl.experimental.kto as place
    return getattr(place, f"{name}Trainer"), getattr(place, f"{name}Config")


def train_foreign(setting: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """One training: its steps, the values in force, and on request the tokens of each row.

    `asked`: rows (their numbers, in order); config and lora (changed values); documents (a file with tokens instead of
    the rows'), rates (of each step), decay_matrices, all_rows (each step takes all of them), show (return tokens).
    """
    steps: list[dict[str, Any]] = []
    trainer, values = build_trainer(setting, asked, steps)
    if asked.get("all_rows"):
        accumulated = math.ceil(len(trainer.train_dataset) / trainer.args.per_device_train_batch_size)
        trainer, values = build_trainer(setting, asked, steps, gradient_accumulation_steps=accumulated)
    answer: dict[str, Any] = {"adapters": start_adapters(trainer.model, setting["adapter"]), "effective": values}
    if asked.get("show"):
        answer["documents"] = documents_of(build_trainer(setting, asked, [], packing=False)[0])
    trainer.train()
    unknown = sorted(key for key in setting["config"] if not hasattr(trainer.args, key) and key != "warmup_ratio")
    return answer | {"steps": steps, "unknown": unknown}


def build_trainer(
    setting: Mapping[str, Any], asked: Mapping[str, Any], steps: list[dict[str, Any]], **more: Any
) -> tuple[Any, dict[str, Any]]:
    """A trainer that takes the rows in order and adds to `steps`, and the configuration's values in force."""
    import torch
    import trl
    from datasets import Dataset
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import AutoModelForCausalLM, AutoTokenizer

    library: Any = trl  # its names are loaded when they are asked for
    trained_by, config_class = trainer_and_config(setting["trainer"])
    rates, micro_losses, step_rates = asked.get("rates"), [], []

    class Seen(trained_by):  # type: ignore[misc,valid-type]
        def training_step(self, *arguments: Any, **named: Any) -> Any:
            step_rates.append(self.optimizer.param_groups[0]["lr"])
            loss = super().training_step(*arguments, **named)
            micro_losses.append(float(loss))  # its share of the step's loss; `log` gets four digits
            return loss

        def log(self, logs: dict[str, float], *rest: Any) -> None:
            if "loss" in logs:
                norm = None if logs.get("grad_norm") is None else float(logs["grad_norm"])
                steps.append({"loss": sum(micro_losses), "grad_norm": norm, "learning_rate": step_rates[-1]})
                micro_losses.clear()
            super().log(logs, *rest)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if rates is None:
                return super().create_scheduler(num_training_steps, optimizer)
            factors = [*(rate / self.args.learning_rate for rate in rates), 0.0]
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: factors[min(step, len(rates))])
            return self.lr_scheduler

        def get_decay_parameter_names(self, model: Any) -> list[str]:
            if not asked.get("decay_matrices"):
                return list(super().get_decay_parameter_names(model))
            return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]

    config = setting["config"] | asked.get("config", {}) | setting["fixed"] | more
    known = config_class.__dataclass_fields__
    if "warmup_ratio" in config and "warmup_ratio" not in known:  # transformers 5: warmup_steps below 1 is a ratio
        config["warmup_steps"] = config.get("warmup_steps") or config["warmup_ratio"]
    args = config_class(**{key: value for key, value in config.items() if key in known and value is not None})
    args.learning_rate *= setting["rate_factor"]
    values = {key: getattr(args, key, None) for key in setting["effective"]}
    tokenizer = AutoTokenizer.from_pretrained(setting["model"])
    tokenizer.chat_template = setting["chat_template"] or tokenizer.chat_template
    with open(setting["rows"], encoding="utf-8") as file:
        every = [json.loads(line) for line in file]
    rows = [every[number] | {"row_number": number} for number in asked["rows"]]
    given: dict[str, Any] = {"args": args, "train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    models = [AutoModelForCausalLM.from_pretrained(setting["model"], dtype=torch.float32) for _ in range(2)]
    if setting["lora"] is not None:
        adapted: Any = library.ModelConfig(use_peft=True, **(setting["lora"] | asked.get("lora", {})))
        values |= {key: value for key, value in vars(adapted).items() if key in setting["effective"]}
        if getattr(args, "disable_dropout", False):
            values["lora_dropout"] = 0.0
        given["peft_config"] = library.get_peft_config(adapted)
        given["peft_config"].lora_dropout = 0.0  # its random numbers differ
    elif setting["trainer"] in ("DPO", "KTO"):
        given["ref_model"] = models[1]
    trainer = Seen(models[0], **given)
    if asked.get("documents"):
        with open(asked["documents"], encoding="utf-8") as file:
            documents = json.load(file)
        taken, size = [dict(documents[number]) for number in asked["rows"]], args.per_device_train_batch_size
        for place, document in enumerate(taken if setting["trainer"] == "KTO" else []):
            first = place - place % size  # as TRL: each prompt with the answer before it in the micro-batch
            other = place - 1 if place > first else min(first + size, len(taken)) - 1
            document["KL_completion_ids"] = taken[other]["completion_ids"]
        if setting["trainer"] == "CPO":
            taken = [in_columns_of_cpo(document) for document in taken]
        trainer.train_dataset = Dataset.from_list(taken)
    return trainer, values


def in_columns_of_cpo(document: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """A pair in the columns that the CPO trainer has kept from older versions of DPO's."""
    prompt = document["prompt_ids"]
    columns = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
    for side in ("chosen", "rejected"):
        ids = prompt + document[f"{side}_ids"]
        columns[f"{side}_input_ids"], columns[f"{side}_attention_mask"] = ids, [1] * len(ids)
        columns[f"{side}_labels"] = [-100] * len(prompt) + document[f"{side}_ids"]
    return columns


def start_adapters(model: Any, file: str | None) -> list[str]:
    """Begin with the recipe's adapters; returns the names and shapes that one side alone has."""
    if file is None:
        return []
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    start, own = load_file(file), get_peft_model_state_dict(model, save_embedding_layers=False)
    ours, theirs = ({f"{name} {list(value.shape)}" for name, value in side.items()} for side in (start, own))
    if ours == theirs:
        set_peft_model_state_dict(model, start)
    return sorted(ours ^ theirs)


def documents_of(trainer: Any) -> list[dict[str, Any]]:
    """Each row's documents, a pair's two: tokens, and whether each is supervised. Empty for unknown columns."""
    rows, cut = [], trainer.args.max_length
    for row in trainer.train_dataset:
        if "labels" in row:
            documents = [(row["input_ids"], [label != -100 for label in row["labels"]])]
        elif "chosen_labels" in row:
            sides = [(row[f"{side}_input_ids"], row[f"{side}_labels"]) for side in ("chosen", "rejected")]
            documents = [(ids, [label != -100 for label in labels]) for ids, labels in sides]
        elif "prompt_ids" in row:
            answers = [row[name] for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in row]
            prompt = row["prompt_ids"]
            documents = [(prompt + ids, [False] * len(prompt) + [True] * len(ids)) for ids in answers]
        elif "input_ids" in row:  # an earlier TRL: its collator makes the labels
            learned = [True] * len(row["input_ids"])
            answers_alone = getattr(trainer.data_collator, "completion_only_loss", False)
            for name in (*["completion_mask"] * bool(answers_alone), "assistant_masks"):
                learned = [before and bool(now) for before, now in zip(learned, row.get(name, learned), strict=True)]
            documents = [(row["input_ids"], learned)]
        else:
            return []
        rows.append({"row": row["row_number"], "documents": [(ids[:cut], mask[:cut]) for ids, mask in documents]})
    return rows


if __name__ == "__main__":
    main()
