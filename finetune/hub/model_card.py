"""A run's model card: metadata for the Hub and facts for a reader, all from the run's folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.hub.base_model import BaseFacts
from finetune.recipe.adapter_config import names_a_folder
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import DataSet, Lora, ModelSection
from finetune.recipe.yaml_text import shorten
from finetune.run_folder.facts import RunFacts

LOCAL_KINDS = ("json", "csv", "parquet", "text")
CARD_SAMPLES = 4
SAMPLE_LETTERS = 600  # of a prompt or an answer; longer ones end in an ellipsis
PRECISIONS = {"bf16": "bf16 mixed", "fp16": "fp16 mixed, with loss scaling", "fp8": "bf16 mixed, products in float8",
              "no": "float32"}  # fmt: skip
LEARNED_FROM = {"assistant": "the assistant's turns", "completion": "the last answer", "all": "all tokens",
                "each_turn": "every answer of the assistant, as an example of its own"}  # fmt: skip
TASK = "text-generation"
CARD_TEMPLATE = "model_card.md.jinja"


def card_text(repo_id: str, run: RunFacts, base: BaseFacts) -> str:
    """The whole README.md: the facts here, its text in model_card.md.jinja.

    The metadata pass `huggingface_hub.ModelCard`'s parsing and the Hub's own validation.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"cell": _cell, "fenced": _fenced}
    lora = run.recipe.lora
    return environment.get_template(CARD_TEMPLATE).render(
        repo_id=repo_id,
        name=repo_id.split("/")[1],
        run=run,
        base=base,
        metadata=_metadata(repo_id, run, base),
        base_link=_base_link(base),
        auto_class=_auto_class(run),
        adapter=f"LoRA adapter (rank {lora.r})" if lora else None,
        hyperparameters=[(name, value) for name, value in _hyperparameters(run) if value is not None],
        data_sets=[_data_line(entry) for entry in run.recipe.data.train],
        samples=_samples(run),
        evaluations=_evaluations(run),
        versions=_versions(run),
    )


def _auto_class(run: RunFacts) -> str:
    """The class that loads the base, or the merged model. For a multimodal model it is the whole, which the adapter
    fits too.
    """
    kind = str(run.receipt.get("architecture"))
    whole = run.receipt.get("text_part_of") or kind.endswith("ForConditionalGeneration")
    return "AutoModelForImageTextToText" if whole and run.recipe.lora else "AutoModelForCausalLM"


def _metadata(repo_id: str, run: RunFacts, base: BaseFacts) -> str:
    from huggingface_hub import ModelCardData

    recipe, lora = run.recipe, run.recipe.lora
    method = ["lora"] if lora else ["full-fine-tuning"]
    method += ["dora"] if lora and lora.use_dora else []
    method += ["qlora"] if recipe.quantization is not None else []
    data = ModelCardData(
        license=base.licence.get("license"),
        license_name=base.licence.get("license_name"),
        license_link=base.licence.get("license_link"),
        base_model=base.repository,
        base_model_relation=("adapter" if run.is_adapter else "finetune") if base.repository else None,
        library_name="peft" if run.is_adapter else "transformers",
        pipeline_tag=TASK,
        datasets=list(dict.fromkeys(entry.path for entry in recipe.data.sets if _on_hub(entry))) or None,
        tags=["finetune", "sft", *method, "transformers"],
        model_name=repo_id.split("/")[1],
        eval_results=_eval_results(run) or None,
    )
    return str(data.to_yaml(line_break="\n"))


def _on_hub(entry: DataSet) -> bool:
    return entry.path not in LOCAL_KINDS and not Path(entry.path).exists() and not os.path.isabs(entry.path)


def _eval_results(run: RunFacts) -> list[Any]:
    """The results as a model-index. `.eval_results/` is for the Hub's own benchmarks, and these rows are none."""
    from huggingface_hub import EvalResult

    exported = run.exported_eval()
    if exported is None:
        return []
    entry = (run.recipe.data.eval_sets or run.recipe.data.train)[0]
    return [
        EvalResult(
            task_type=TASK,
            dataset_type=entry.path,
            dataset_name=f"held-out rows of {_data_name(entry)}",
            dataset_split=entry.split,
            metric_type=key,
            metric_name=f"held-out {key}",
            metric_value=round(float(exported[key]), 6),
        )
        for key in ("loss", "perplexity")
        if exported.get(key) is not None
    ]


def _data_name(entry: DataSet) -> str:
    files = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files
    return ", ".join(Path(file).name for file in files) if files else entry.path


def _base_link(base: BaseFacts) -> str:
    if base.repository:
        return f"[{base.name}](https://huggingface.co/{base.repository})"
    return f"`{base.name}`, a model that is not on the Hub"


def _data_line(entry: DataSet) -> str:
    link = f"[{entry.path}](https://huggingface.co/datasets/{entry.path})" if _on_hub(entry) else _data_name(entry)
    weight = f", seen {entry.weight:g} times a pass" if entry.weight != 1 else ""
    return f"{link}, split `{entry.split}`{weight}" + ("" if _on_hub(entry) else " (a local file, not published here)")


def _hyperparameters(run: RunFacts) -> Iterator[tuple[str, object]]:
    recipe, training, receipt = run.recipe, run.recipe.training, run.receipt
    trained = receipt.get("parameters", {})
    yield "optimizer steps", _steps(run)
    if (export := receipt.get("export", {})).get("best"):
        yield "weights of step", f"{export['step']}, the best evaluation by {export['metric']}"
    yield "rows per step", training.global_batch_size
    yield "tokens per row, at most", recipe.data.max_length
    yield "packing", "whole documents, which do not see each other" if recipe.data.packing else "none"
    yield (
        "learned from",
        LEARNED_FROM[recipe.data.train_on],
    )
    given = recipe.data.chat_template_kwargs
    yield "chat template, variables", ", ".join(f"{name}: {json.dumps(value)}" for name, value in given.items()) or None
    yield "new tokens", ", ".join(map(json.dumps, recipe.model.new_tokens)) or None
    yield "learning rate", f"{training.learning_rate:g}, {training.lr_scheduler_type}"
    yield "warm-up", training.warmup_steps if training.warmup_steps is not None else f"{training.warmup_ratio:.0%}"
    betas = f"betas {training.adam_beta1:g} and {training.adam_beta2:g}, epsilon {training.adam_epsilon:g}"
    yield "optimizer", f"{training.optim}, {betas}, weight decay {training.weight_decay:g}"
    yield "gradient norm, at most", training.max_grad_norm
    if recipe.lora:
        yield from _adapters(recipe.lora, receipt)
        if run.is_adapter and recipe.lora.takes_from_the_base:
            kind = recipe.lora.init_lora_weights
            yield "loaded by", f"peft alone: {kind} took a part of the base, to whose rest the adapter is added"
    if recipe.model.adapter:
        yield "started from the adapter", _started_from(recipe.model)
    if recipe.quantization:
        bits = recipe.quantization.bnb_4bit_quant_type if recipe.quantization.load_in_4bit else "8 bits"
        yield "base weights quantised to", bits
    yield "parameters trained", f"{trained['trained']:,}" if "trained" in trained else None
    master = receipt.get("dtypes", {}).get("master")
    yield "precision", PRECISIONS[training.mixed_precision] + (f", master weights {master}" if master else "")
    yield "strategy", receipt.get("strategy")
    yield "hardware", _hardware(run)
    yield "seed", training.seed


def _adapters(lora: Lora, receipt: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "LoRA", f"r {lora.r}, alpha {lora.lora_alpha:g}, dropout {lora.lora_dropout:g}"
    yield "ranks by pattern", ", ".join(f"{key}: {rank}" for key, rank in lora.rank_pattern.items()) or None
    yield "alphas by pattern", ", ".join(f"{key}: {alpha:g}" for key, alpha in lora.alpha_pattern.items()) or None
    yield "learning rate of B over A's (LoRA+)", lora.loraplus_lr_ratio
    yield "adapted layers", receipt.get("adapted_layers")


def _started_from(section: ModelSection) -> str:
    if names_a_folder(section.adapter or ""):
        return f"{section.adapter} (a local folder)"
    return f"[{section.adapter}](https://huggingface.co/{section.adapter}), revision {section.adapter_revision}"


def _steps(run: RunFacts) -> str | int | None:
    """Of a checkpoint that was exported, its own of the run's."""
    if run.exported:
        total = run.receipt.get("batch", {}).get("total_steps")
        return f"{run.exported['step']}" + (f" of {total}" if total else "") + ", exported"
    return run.trained()[-1]["step"] if run.trained() else None


def _hardware(run: RunFacts) -> str | None:
    count, devices = run.receipt.get("world_size"), run.environment.get("devices") or []
    name = devices[0]["name"] if devices and run.receipt.get("device") == "cuda" else run.receipt.get("device")
    return f"{count} x {name}" if count else None


def _samples(run: RunFacts) -> list[tuple[str, dict[str, Mapping[str, Any]]]]:
    """The first prompts that were answered both before and after training."""
    answered = [item for item in run.samples_by_prompt().items() if {"before", "after"} <= item[1].keys()]
    return answered[:CARD_SAMPLES]


def _fenced(text: object) -> str:
    """A code block that nothing in the text can end; unprintable characters become the replacement character."""
    letters = shorten(str(text), SAMPLE_LETTERS, " …")
    printable = "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in letters)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", printable)), default=0))
    return f"{fence}text\n{printable}\n{fence}"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _evaluations(run: RunFacts) -> list[tuple[str, int, str, str]]:
    """(when, step, loss, perplexity) before training, of these weights, at the lowest loss, and after training."""
    evals, exported = run.evals(), run.exported_eval()
    if exported is None:
        return []
    last, lowest = evals[-1], min(evals, key=lambda line: line["loss"])
    rows = [("before training", evals[0])] if evals[0]["step"] == 0 else []
    rows += [("lowest loss", lowest)] if lowest["step"] not in (0, last["step"], exported["step"]) else []
    rows += [("these weights, the best evaluation", exported)] if exported is not last else []
    rows += [("these weights" if run.exported and exported is last else "after training", last)]
    return [(when, line["step"], f"{line['loss']:.4f}", f"{line['perplexity']:.2f}") for when, line in rows]


def _versions(run: RunFacts) -> list[tuple[str, object]]:
    versions = run.environment.get("versions", {})
    used = [(name, version) for name, version in versions.items() if version and _was_used(name, run)]
    return [("python", run.environment.get("python")), *used] if used else []


def _was_used(library: str, run: RunFacts) -> bool:
    if library == "bitsandbytes":
        spec = OPTIMIZERS[run.recipe.training.optim]
        by = run.receipt.get("optimizer", {}).get("by", spec.library(sharded=False))  # receipts of earlier releases
        return run.recipe.quantization is not None or by == library
    if library == "deepspeed":
        return str(run.receipt.get("strategy", "")).startswith("zero")
    return library != "peft" or run.recipe.lora is not None
