"""A run's model card: metadata for the Hub and facts for a reader, all from the run's folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from finetune.hub.base_model import BaseFacts
from finetune.recipe.adapter_config import names_a_folder
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import DataSet
from finetune.recipe.sections.preferences import LOSSES, Dpo, Kto, is_own_reference, objective_in_words
from finetune.recipe.yaml_text import shorten
from finetune.run_folder.facts import RunFacts, score_rows

LOCAL_KINDS = ("json", "csv", "parquet", "text")
CARD_SAMPLES = 4
CARD_AUTHORS = 8  # models that wrote answers
SAMPLE_LETTERS = 600  # of a prompt or an answer; longer ones end in an ellipsis
PRECISIONS = {"bf16": "bf16 mixed", "fp16": "fp16 mixed, with loss scaling", "no": "float32"}
LEARNED_FROM = {"assistant": "the assistant's turns", "completion": "the last answer", "all": "all tokens",
                "each_turn": "every answer of the assistant, as an example of its own"}  # fmt: skip
TASK = "text-generation"


class Paper(NamedTuple):
    """The publication of an objective. Its page on arXiv has the entry for a list of references."""

    title: str
    arxiv: str


PAPERS = {
    "sigmoid": Paper("Direct Preference Optimization: Your Language Model is Secretly a Reward Model", "2305.18290"),
    "robust": Paper("Provably Robust DPO: Aligning Language Models with Noisy Feedback", "2403.00409"),
    "ipo": Paper("A General Theoretical Paradigm to Understand Learning from Human Preferences", "2310.12036"),
    "apo_zero": Paper(
        "Anchored Preference Optimization and Contrastive Revisions: Addressing Underspecification in Alignment",
        "2408.06266",
    ),
    "simpo": Paper("SimPO: Simple Preference Optimization with a Reference-Free Reward", "2405.14734"),
    "kto": Paper("KTO: Model Alignment as Prospect Theoretic Optimization", "2402.01306"),
}
CARD_TEMPLATE = "model_card.md.jinja"


def card_text(
    repo_id: str,
    run: RunFacts,
    base: BaseFacts,
    *,
    is_chat: bool = True,
    has_settings: bool = False,
    opening: Sequence[Mapping[str, str]] = (),
) -> str:
    """Render README.md: this module collects the facts, model_card.md.jinja holds the text.

    With `is_chat` the tokenizer has a chat template, which the example uses. With `has_settings` an adapter has a
    generation_config.json of its own. `opening` are the messages before a question. The metadata pass
    `huggingface_hub.ModelCard`'s parsing and the Hub's own validation.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"cell": _cell, "fenced": _fenced}
    lora, adapter = run.recipe.lora, None
    if lora:
        adapter = f"LoRA adapter (rank {lora.r})"

    # A multimodal base needs the class that loads all its parts. An adapter trained on the text part fits that too.
    auto_class = "AutoModelForCausalLM"
    architecture = str(run.receipt.get("architecture"))
    if lora and (run.receipt.get("text_part_of") or architecture.endswith("ForConditionalGeneration")):
        auto_class = "AutoModelForImageTextToText"

    base_link = f"`{base.name}`, a model that is not on the Hub"
    if base.repository:
        base_link = f"[{base.name}](https://huggingface.co/{base.repository})"

    data_lines = []
    for data_set in run.recipe.data.train:
        split = f"split `{data_set.split}`"
        if data_set.weight != 1:
            split += f", seen {data_set.weight:g} times a pass"
        if _is_on_hub(data_set):
            data_lines.append(f"[{data_set.path}](https://huggingface.co/datasets/{data_set.path}), {split}")
        else:
            data_lines.append(f"{_data_name(data_set)}, {split} (a local file, not published here)")
    authors = (run.receipt.get("data") or {}).get("written_by")
    if isinstance(authors, dict) and authors:
        names = sorted(authors, key=lambda name: -authors[name])[:CARD_AUTHORS]
        listed = "; ".join(f"{shorten(name, 100)} ({authors[name]:,})" for name in names)
        data_lines.append(f"Answers written by {listed}")

    eval_documents = run.receipt.get("data", {}).get("eval_documents")
    evaluated_rows = f"{eval_documents:,}" if eval_documents else "the"
    if run.recipe.preferences is None:
        evaluated_rows += " held-out documents, over the tokens that would be learned"
    else:
        evaluated_rows += f" held-out {run.recipe.data.row_noun}s"

    # The first prompts that were answered both before and after training.
    samples = [(prompt, answers) for prompt, answers in run.samples_by_prompt().items()
               if {"before", "after"} <= answers.keys()]  # fmt: skip
    return environment.get_template(CARD_TEMPLATE).render(
        repo_id=repo_id,
        name=repo_id.split("/")[1],
        run=run,
        base=base,
        metadata=_metadata(repo_id, run, base),
        base_link=base_link,
        auto_class=auto_class,
        adapter=adapter,
        is_chat=is_chat,
        has_settings=has_settings,
        opening=[json.dumps(message["content"], ensure_ascii=False) for message in opening],
        question=json.dumps((run.recipe.samples.prompts or ["Hello! What can you do?"])[0], ensure_ascii=False),
        template_settings="".join(
            f", {name}={value!r}" for name, value in run.recipe.data.chat_template_kwargs.items()
        ),
        hyperparameters=[(name, value) for name, value in _hyperparameters(run) if value is not None],
        data_sets=data_lines,
        samples=samples[:CARD_SAMPLES],
        evaluations=_evaluations(run),
        evaluated_rows=evaluated_rows,
        **_preference_facts(run),
        scores=score_rows(run),
        versions=_versions(run),
    )


def _metadata(repo_id: str, run: RunFacts, base: BaseFacts) -> str:
    """The YAML at the card's head, without its fences."""
    from huggingface_hub import EvalResult, ModelCardData

    recipe, lora = run.recipe, run.recipe.lora
    library, relation = "transformers", "finetune"
    if run.is_adapter:
        library, relation = "peft", "adapter"
    methods = ["lora"] if lora else ["full-fine-tuning"]
    if lora and lora.use_dora:
        methods.append("dora")
    if recipe.quantization is not None:
        methods.append("qlora")

    # A model-index holds these results. `.eval_results/` is for the Hub's own benchmarks, and these rows are none.
    results, exported = [], run.exported_eval() or {}
    evaluated = (recipe.data.eval_sets or recipe.data.train)[0]
    for metric in ("loss", "perplexity", "reward_accuracy"):
        if exported.get(metric) is not None:
            result = EvalResult(
                task_type=TASK,
                dataset_type=evaluated.path,
                dataset_name=f"held-out rows of {_data_name(evaluated)}",
                dataset_split=evaluated.split,
                metric_type=metric,
                metric_name=f"held-out {metric.replace('_', ' ')}",
                metric_value=round(float(exported[metric]), 6),
            )
            results.append(result)

    # None leaves a key out of the YAML. `base_model_relation` without `base_model` would point nowhere.
    data = ModelCardData(
        license=base.licence.get("license"),
        license_name=base.licence.get("license_name"),
        license_link=base.licence.get("license_link"),
        base_model=base.repository,
        base_model_relation=relation if base.repository else None,
        library_name=library,
        pipeline_tag=TASK,
        # dict.fromkeys drops repeated names and keeps the recipe's order.
        datasets=list(dict.fromkeys(entry.path for entry in recipe.data.sets if _is_on_hub(entry))) or None,
        tags=["finetune", recipe.training.objective.replace("supervised", "sft"), *methods, "transformers"],
        model_name=repo_id.split("/")[1],
        eval_results=results or None,
    )
    return str(data.to_yaml(line_break="\n"))


def _is_on_hub(entry: DataSet) -> bool:
    return entry.path not in LOCAL_KINDS and not Path(entry.path).exists() and not os.path.isabs(entry.path)


def _data_name(entry: DataSet) -> str:
    """The file names without their folders, or the data set's name on the Hub."""
    if not entry.data_files:
        return entry.path
    files = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files
    return ", ".join(Path(file).name for file in files)


def _hyperparameters(run: RunFacts) -> Iterator[tuple[str, object]]:
    """(name, value) for each row of the card's table. The caller drops rows with None."""
    recipe, training, receipt = run.recipe, run.recipe.training, run.receipt
    if run.exported:
        # An exported checkpoint names its own step among the run's.
        steps = str(run.exported["step"])
        if total := receipt.get("batch", {}).get("total_steps"):
            steps += f" of {total}"
        yield "optimizer steps", f"{steps}, exported"
    elif trained_lines := run.trained():
        yield "optimizer steps", trained_lines[-1]["step"]
    if (export := receipt.get("export", {})).get("best"):
        yield "weights of step", f"{export['step']}, the best evaluation by {export['metric']}"
    if section := recipe.preferences:
        yield "objective", objective_in_words(section)
        yield "loss type", section.loss_type if isinstance(section, Dpo) else None
        if reference := receipt.get("reference"):
            yield "reference", f"{reference.get('kind')}, log-probabilities with the hash {reference.get('key')}"
    yield f"{recipe.data.row_noun}s per step", training.global_batch_size
    yield "tokens per row, at most" if section is None else "tokens per answer, at most", recipe.data.max_length
    yield "packing", "whole documents, which do not see each other" if recipe.data.packing else "none"
    if section is None:
        yield "learned from", LEARNED_FROM[recipe.data.train_on]
    if variables := recipe.data.chat_template_kwargs:
        yield "chat template, variables", ", ".join(f"{key}: {json.dumps(value)}" for key, value in variables.items())
    if recipe.model.new_tokens:
        yield "new tokens", ", ".join(map(json.dumps, recipe.model.new_tokens))
    yield "learning rate", f"{training.learning_rate:g}, {training.lr_scheduler_type}"
    if training.warmup_steps is not None:
        yield "warm-up", training.warmup_steps
    else:
        yield "warm-up", f"{training.warmup_ratio:.0%}"
    betas = f"betas {training.adam_beta1:g} and {training.adam_beta2:g}, epsilon {training.adam_epsilon:g}"
    yield "optimizer", f"{training.optim}, {betas}, weight decay {training.weight_decay:g}"
    yield "gradient norm, at most", training.max_grad_norm
    if lora := recipe.lora:
        yield "LoRA", f"r {lora.r}, alpha {lora.lora_alpha:g}, dropout {lora.lora_dropout:g}"
        if lora.rank_pattern:
            yield "ranks by pattern", ", ".join(f"{key}: {rank}" for key, rank in lora.rank_pattern.items())
        if lora.alpha_pattern:
            yield "alphas by pattern", ", ".join(f"{key}: {alpha:g}" for key, alpha in lora.alpha_pattern.items())
        yield "learning rate of B over A's (LoRA+)", lora.loraplus_lr_ratio
        yield "adapted layers", receipt.get("adapted_layers")
    if adapter := recipe.model.adapter:
        if names_a_folder(adapter):
            origin = f"{adapter} (a local folder)"
        else:
            origin = f"[{adapter}](https://huggingface.co/{adapter}), revision {recipe.model.adapter_revision}"
        yield "started from the adapter", origin
    if recipe.quantization:
        bits = recipe.quantization.bnb_4bit_quant_type if recipe.quantization.load_in_4bit else "8 bits"
        yield "base weights quantised to", bits
    if "trained" in (parameters := receipt.get("parameters", {})):
        yield "parameters trained", f"{parameters['trained']:,}"
    precision = PRECISIONS[training.mixed_precision]
    if master := receipt.get("dtypes", {}).get("master"):
        precision += f", master weights {master}"
    yield "precision", precision
    yield "strategy", receipt.get("strategy")
    device, devices = receipt.get("device"), run.environment.get("devices")
    if device == "cuda" and devices:
        device = devices[0]["name"]
    if processes := receipt.get("world_size"):
        yield "hardware", f"{processes} x {device}"
    yield "seed", training.seed


def _fenced(text: object) -> str:
    """A code block that nothing in the text can end; unprintable characters become the replacement character."""
    letters = shorten(str(text), SAMPLE_LETTERS, " …")
    printable = "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in letters)
    longest_run = max((len(backticks) for backticks in re.findall("`+", printable)), default=0)
    fence = "`" * max(3, longest_run + 1)
    return f"{fence}text\n{printable}\n{fence}"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _preference_facts(run: RunFacts) -> dict[str, Any]:
    """The columns of `_evaluations`, the method and its publication, and how to read rewards."""
    section = run.recipe.preferences
    if section is None:
        columns = ["when", "step", "loss", "perplexity"]
        return {"evaluation_head": columns, "objective": None, "paper": None, "rewards": ""}
    reward = "A reward is beta times the log-probability that an answer has gained against the reference."
    if isinstance(section, Kto):
        objective, paper = "KTO on judged answers", PAPERS["kto"]
        share = "answers whose reward is on the right side of the KL baseline"
    else:
        objective, paper = f"{LOSSES[section.loss_type]} on pairs of answers", PAPERS[section.loss_type]
        share = "pairs whose chosen answer has the higher reward"
        if not section.needs_reference:
            reward = "A reward is beta times an answer's log-probability by token."
    return {
        "evaluation_head": ["when", "step", "loss", "reward accuracy", "reward margin"],
        "objective": objective,
        "paper": paper,
        "rewards": f"{reward} Accuracy is the share of {share}.",
    }


def _evaluations(run: RunFacts) -> list[tuple[object, ...]]:
    """(when, step, loss, perplexity), or rewards for perplexity, for each row of the card's table.

    The rows are: before training, the lowest loss, the exported weights, and after training.
    """
    exported = run.exported_eval()
    if exported is None:
        return []
    evals = run.evals()
    last, lowest, rows = evals[-1], min(evals, key=lambda line: line["loss"]), []
    if evals[0]["step"] == 0:
        rows.append(("before training", evals[0]))
    if lowest["step"] not in (0, last["step"], exported["step"]):
        rows.append(("lowest loss", lowest))
    if exported is not last:
        rows.append(("these weights, the best evaluation", exported))
    rows.append(("these weights" if run.exported and exported is last else "after training", last))
    return [(when, line["step"], f"{line['loss']:.4f}", *_figures_beside_loss(line)) for when, line in rows]


def _figures_beside_loss(line: Mapping[str, Any]) -> list[str]:
    """An evaluation's perplexity, or its rewards; a dash where the model is still its own reference."""
    if "reward_accuracy" not in line:
        perplexity = line.get("perplexity")
        return ["-" if perplexity is None else f"{perplexity:.2f}"]
    if is_own_reference(line):
        return ["-", "-"]
    accuracy, margin = line["reward_accuracy"], line.get("reward_margin")
    return ["-" if accuracy is None else f"{accuracy:.1%}", "-" if margin is None else f"{margin:.3g}"]


def _versions(run: RunFacts) -> list[tuple[str, object]]:
    """Python and the libraries that the run used; empty if the run recorded none."""
    recipe, rows = run.recipe, []
    for library, version in run.environment.get("versions", {}).items():
        used = True
        if library == "bitsandbytes":
            # Receipts of earlier releases do not say which library the optimizer came from.
            default = OPTIMIZERS[recipe.training.optim].library(sharded=False)
            used = recipe.quantization is not None or run.receipt.get("optimizer", {}).get("by", default) == library
        elif library == "deepspeed":
            used = str(run.receipt.get("strategy", "")).startswith("zero")
        elif library == "peft":
            used = recipe.lora is not None
        if version and used:
            rows.append((library, version))
    return [("python", run.environment.get("python")), *rows] if rows else []
