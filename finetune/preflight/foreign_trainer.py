"""Train TRL's way: the child process of `finetune import --prove`. It runs as a script and imports nothing of finetune.

Its standard input has one JSON object a line. The first is the setting: model, rows, configuration. Each later line asks
for one training of it with some changes, and gets a line back with the curve of that training. So a cause is tried by
switching it off, and the libraries are imported once.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

CPU_SECONDS, GIBIBYTES = 1200, 16  # beside what the imports took
NOT_ALLOWED = ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.posix_spawn", "os.exec", "os.system")
Lines = list[dict[str, Any]]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    setting = json.loads(sys.stdin.readline())
    try:
        import peft  # noqa: F401  imported before the limits
        import torch
        import trl
        from transformers import Trainer  # noqa: F401

        trainer_class(setting["trainer"])
        torch.set_num_threads(1)
        print(json.dumps({"version": trl.__version__}), file=answers, flush=True)
    except ImportError as error:
        print(json.dumps({"error": f"cannot be imported: {error}"}), file=answers, flush=True)
        return
    shut_in()
    for line in sys.stdin:
        try:
            answer = train(setting, json.loads(line))
        except Exception as error:  # whatever the tool says about its configuration or its rows
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)


def shut_in() -> None:
    """From here on: no connection, no other program, limited time and memory."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event in NOT_ALLOWED:
            raise PermissionError(f"{event} is not allowed here")

    pages = int(open("/proc/self/statm").read().split()[0])
    memory = pages * os.sysconf("SC_PAGE_SIZE") + GIBIBYTES * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    sys.addaudithook(refuse)


def trainer_class(name: str) -> tuple[Any, Any]:
    """TRL's trainer and its configuration: SFT, DPO, KTO or CPO."""
    import trl

    place: Any = trl
    if name == "CPO":
        import trl.experimental.cpo as place
    elif name == "KTO" and not hasattr(trl, "KTOTrainer"):  # TRL before 1.1
        import trl.experimental.kto as place
    return getattr(place, f"{name}Trainer"), getattr(place, f"{name}Config")


def train(setting: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """One training; its losses, gradient norms and rates by step, and what the tool made of the configuration.

    `asked`: config and lora (changed values), rows (their numbers in order), documents (tokens instead of rows), rates
    (of each step), decay_matrices, all_rows (each step takes all of them), show (return the tokens of each row).
    """
    with open(setting["rows"], encoding="utf-8") as file:
        every = [json.loads(line) for line in file]
    rows = [every[number] | {"row_number": number} for number in asked["rows"]]
    trainer, steps = build(setting, asked, rows, {})
    if asked.get("all_rows"):
        micro_batches = math.ceil(len(trainer.train_dataset) / trainer.args.per_device_train_batch_size)
        trainer, steps = build(setting, asked, rows, {"gradient_accumulation_steps": micro_batches})
    adapters = start_adapters(trainer.model, setting.get("adapter"))
    answer: dict[str, Any] = {"adapters": adapters, "documents": []}
    if asked.get("show"):
        answer["documents"] = documents_of(build(setting, asked, rows, {"packing": False})[0])
    trainer.train()
    values = {key: getattr(trainer.args, key, None) for key in setting["effective"]}
    answer["effective"] = {key: getattr(value, "value", value) for key, value in values.items()}
    known = vars(trainer.args)
    return answer | {"steps": steps, "unknown": sorted(key for key in setting["config"] if key not in known)}


def build(
    setting: Mapping[str, Any], asked: Mapping[str, Any], rows: Lines, more: Mapping[str, Any]
) -> tuple[Any, Lines]:
    """A trainer that takes the rows in order, and the list that its steps will be written to."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained_by, config_class = trainer_class(setting["trainer"])
    rates, steps, micro_losses, step_rates = asked.get("rates"), [], [], []

    class Seen(trained_by):  # type: ignore[misc]
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
            highest = self.args.learning_rate
            factor = [*(rate / highest for rate in rates), 0.0]
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: factor[min(step, len(rates))])
            return self.lr_scheduler

        def get_decay_parameter_names(self, model: Any) -> list[str]:
            if not asked.get("decay_matrices"):
                return list(super().get_decay_parameter_names(model))
            return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]

    config = setting["config"] | asked.get("config", {}) | setting["fixed"] | more
    known = config_class.__dataclass_fields__
    if "warmup_ratio" in config and "warmup_ratio" not in known:  # transformers 5: warmup_steps below 1 is a ratio
        config = {"warmup_steps": config["warmup_ratio"]} | config
    args = config_class(**{key: value for key, value in config.items() if key in known and value is not None})
    args.learning_rate *= setting["rate_factor"]
    model, reference = (AutoModelForCausalLM.from_pretrained(setting["model"], dtype=torch.float32) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(setting["model"])
    if setting.get("chat_template"):
        tokenizer.chat_template = setting["chat_template"]
    given: dict[str, Any] = {"args": args, "train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    if setting.get("lora"):
        given["peft_config"] = LoraConfig(task_type="CAUSAL_LM", **(setting["lora"] | asked.get("lora", {})))
    elif setting["trainer"] in ("DPO", "KTO"):
        given["ref_model"] = reference
    trainer = Seen(model, **given)
    if asked.get("documents"):
        with open(asked["documents"], encoding="utf-8") as file:
            documents = json.load(file)
        taken = [documents[number] for number in asked["rows"]]
        size = args.per_device_train_batch_size
        for first in range(0, len(taken), size) if setting["trainer"] == "KTO" else ():
            answers = [document["completion_ids"] for document in taken[first : first + size]]
            for document, other in zip(taken[first : first + size], [answers[-1], *answers[:-1]], strict=True):
                document["KL_completion_ids"] = other
        trainer.train_dataset = Dataset.from_list(taken)
    return trainer, steps


def start_adapters(model: Any, file: str | None) -> dict[str, list[str]]:
    """Begin with the recipe's adapters; returns names with shapes that only one side has."""
    if file is None:
        return {}
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    start, own = load_file(file), get_peft_model_state_dict(model, save_embedding_layers=False)
    theirs, ours = ({f"{name} {list(value.shape)}" for name, value in each.items()} for each in (own, start))
    if theirs == ours:
        set_peft_model_state_dict(model, start)
        return {}
    return {"theirs": sorted(theirs - ours), "ours": sorted(ours - theirs)}


def documents_of(trainer: Any) -> Lines:
    """The tokens of each row and which are supervised; a pair has two. Empty for columns of another version."""
    documents: Lines = []
    cut: int | None = trainer.args.max_length
    for row in trainer.train_dataset:
        if "labels" in row:
            found = [(row["input_ids"], [label != -100 for label in row["labels"]])]
        elif "prompt_ids" in row:
            names: Sequence[str] = [name for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in row]
            prompt = row["prompt_ids"]
            found = [(prompt + row[name], [False] * len(prompt) + [True] * len(row[name])) for name in names]
        else:
            return []
        pairs = [{"ids": ids[:cut], "supervised": supervised[:cut]} for ids, supervised in found]
        documents.append({"row": row["row_number"], "documents": pairs})
    return documents


if __name__ == "__main__":
    main()
