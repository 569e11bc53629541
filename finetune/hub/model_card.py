"""The model card of a run: metadata that the Hub reads, and what a reader must know, all from the run's folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.hub.base_model import BaseFacts
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import DataSet, Recipe
from finetune.run_folder.facts import RunFacts

LOCAL_KINDS = ("json", "csv", "parquet", "text")
SAMPLES_SHOWN = 4
SAMPLE_LETTERS = 600  # of a prompt or an answer; longer ones end in an ellipsis
PRECISIONS = {"bf16": "bf16 mixed", "fp16": "fp16 mixed, with loss scaling", "no": "float32"}
TASK = "text-generation"
BUILT_WITH_LLAMA = "Built with Llama. The licence of Llama asks for this line, and that the name begins with Llama."


def card_text(repo_id: str, run: RunFacts, base: BaseFacts) -> str:
    """The whole README.md. The metadata pass `huggingface_hub.ModelCard`'s parsing and the Hub's own validation."""
    sections = (
        _opening(repo_id, run, base),
        _use(repo_id, run, base),
        _training(run),
        _samples(run),
        _evaluation(run),
        _not_evaluated(run),
        _versions(run),
        _licence(base),
    )
    body = "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)
    return f"---\n{_metadata(repo_id, run, base)}\n---\n\n{body}\n"


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
        datasets=list(dict.fromkeys(entry.path for entry in _data_sets(recipe) if _on_hub(entry))) or None,
        tags=["finetune", "sft", *method, "transformers"],
        model_name=repo_id.split("/")[1],
        eval_results=_eval_results(run) or None,
    )
    return str(data.to_yaml(line_break="\n"))


def _data_sets(recipe: Recipe) -> list[DataSet]:
    held_out = recipe.data.eval if isinstance(recipe.data.eval, list) else []
    return [*recipe.data.train, *held_out]


def _on_hub(entry: DataSet) -> bool:
    return entry.path not in LOCAL_KINDS and not Path(entry.path).exists() and not os.path.isabs(entry.path)


def _eval_results(run: RunFacts) -> list[Any]:
    """As a model-index; `.eval_results/` is for the benchmarks that the Hub lists, which these rows are not."""
    from huggingface_hub import EvalResult

    evals = run.evals()
    if not evals:
        return []
    entry = next(iter(run.recipe.data.eval if isinstance(run.recipe.data.eval, list) else run.recipe.data.train))
    return [
        EvalResult(
            task_type=TASK,
            dataset_type=entry.path,
            dataset_name=f"held-out rows of {_data_name(entry)}",
            dataset_split=entry.split,
            metric_type=key,
            metric_name=f"held-out {key}",
            metric_value=round(float(evals[-1][key]), 6),
        )
        for key in ("loss", "perplexity")
        if evals[-1].get(key) is not None
    ]


def _data_name(entry: DataSet) -> str:
    files = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files
    return ", ".join(Path(file).name for file in files) if files else entry.path


def _opening(repo_id: str, run: RunFacts, base: BaseFacts) -> Iterator[str]:
    lora, where = run.recipe.lora, f"[{base.shown}](https://huggingface.co/{base.repository})"
    name = where if base.repository else f"`{base.shown}`, a model that is not on the Hub"
    adapter = f"LoRA adapter (rank {lora.r})" if lora else None
    kind = f"A {adapter} for" if run.is_adapter else "All weights of"
    more = "" if run.is_adapter else f", with a {adapter} merged into them" if adapter else ", fine-tuned"
    yield f"# {repo_id.split('/')[1]}"
    yield ""
    yield f"{kind} {name}{more}. `recipe.yaml` in this repository is the whole recipe, every value resolved."
    if _llama(base):
        yield ""
        yield BUILT_WITH_LLAMA


def _llama(base: BaseFacts) -> bool:
    return f"{base.licence.get('license')} {base.licence.get('license_name')}".lower().count("llama") > 0


def _use(repo_id: str, run: RunFacts, base: BaseFacts) -> Iterator[str]:
    yield "## How to use it"
    yield ""
    yield "```python"
    if run.is_adapter:
        revision = f', revision="{base.revision}"' if base.revision != "main" else ""
        yield "from peft import PeftModel"
        yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
        yield ""
        yield f'base = AutoModelForCausalLM.from_pretrained("{base.shown}"{revision})'
        yield f'model = PeftModel.from_pretrained(base, "{repo_id}")'
    else:
        yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
        yield ""
        yield f'model = AutoModelForCausalLM.from_pretrained("{repo_id}", dtype="auto")'
    yield f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")'
    yield "```"


def _training(run: RunFacts) -> Iterator[str]:
    yield "## How it was trained"
    yield ""
    yield from _table(("what", "value"), [(name, value) for name, value in _hyperparameters(run) if value is not None])
    if "loss.png" in run.pictures:
        yield ""
        yield "![The loss of every step](loss.png)"
    yield ""
    yield "Data:"
    yield ""
    for entry in run.recipe.data.train:
        yield f"- {_data_line(entry)}"
    data = run.receipt.get("data", {})
    if data:
        learned = f"{data['supervised_tokens']:,} of {data['tokens']:,} tokens are learned"
        yield f"- {data['documents']:,} documents in all; {learned} in one pass"


def _data_line(entry: DataSet) -> str:
    link = f"[{entry.path}](https://huggingface.co/datasets/{entry.path})" if _on_hub(entry) else _data_name(entry)
    weight = f", seen {entry.weight:g} times a pass" if entry.weight != 1 else ""
    return f"{link}, split `{entry.split}`{weight}" + ("" if _on_hub(entry) else " (a local file, not published here)")


def _hyperparameters(run: RunFacts) -> Iterator[tuple[str, object]]:
    recipe, training, receipt = run.recipe, run.recipe.training, run.receipt
    trained = receipt.get("parameters", {})
    yield "optimizer steps", run.trained()[-1]["step"] if run.trained() else None
    yield "rows per step", training.global_batch_size
    yield "tokens per row, at most", recipe.data.max_length
    yield "packing", "whole documents, which do not see each other" if recipe.data.packing else "none"
    yield (
        "learned from",
        {"assistant": "the assistant's turns", "completion": "the last answer"}.get(recipe.data.train_on, "all tokens"),
    )
    yield "learning rate", f"{training.learning_rate:g}, {training.lr_scheduler_type}"
    yield "warm-up", training.warmup_steps if training.warmup_steps is not None else f"{training.warmup_ratio:.0%}"
    yield "optimizer", f"{training.optim}, weight decay {training.weight_decay:g}"
    yield "gradient norm, at most", training.max_grad_norm
    if recipe.lora:
        yield "LoRA", f"r {recipe.lora.r}, alpha {recipe.lora.lora_alpha:g}, dropout {recipe.lora.lora_dropout:g}"
        yield "adapted layers", receipt.get("adapted_layers")
    if recipe.quantization:
        bits = recipe.quantization.bnb_4bit_quant_type if recipe.quantization.load_in_4bit else "8 bits"
        yield "base weights quantised to", bits
    yield "parameters trained", f"{trained['trained']:,}" if "trained" in trained else None
    master = receipt.get("dtypes", {}).get("master")
    yield "precision", PRECISIONS[training.mixed_precision] + (f", master weights {master}" if master else "")
    yield "strategy", receipt.get("strategy")
    yield "hardware", _hardware(run)
    yield "seed", training.seed


def _hardware(run: RunFacts) -> str | None:
    count, devices = run.receipt.get("world_size"), run.environment.get("devices") or []
    name = devices[0]["name"] if devices and run.receipt.get("device") == "cuda" else run.receipt.get("device")
    return f"{count} x {name}" if count else None


def _samples(run: RunFacts) -> Iterator[str]:
    answers: dict[str, dict[str, Mapping[str, Any]]] = {}
    for line in run.samples:
        answers.setdefault(str(line.get("prompt")), {})[str(line.get("when"))] = line
    pairs = [(prompt, said) for prompt, said in answers.items() if {"before", "after"} <= said.keys()]
    if not pairs:
        return
    yield "## Before and after"
    yield ""
    yield "The first prompts that were asked, not the best ones. Answers are greedy and may be cut off by their length."
    for prompt, said in pairs[:SAMPLES_SHOWN]:
        yield from _quoted("Prompt", prompt)
        for when in ("before", "after"):
            yield from _quoted(when.capitalize(), str(said[when]["answer"]))


def _quoted(name: str, text: str) -> Iterator[str]:
    """A fence that nothing in the text can end; letters that are none are shown as such."""
    cut = text if len(text) <= SAMPLE_LETTERS else text[:SAMPLE_LETTERS] + " …"
    shown = "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in cut)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    yield from ("", f"{name}:", "", f"{fence}text")
    yield shown
    yield fence


def _evaluation(run: RunFacts) -> Iterator[str]:
    evals = run.evals()
    if not evals:
        return
    documents = run.receipt.get("data", {}).get("eval_documents")
    last, best = evals[-1], min(evals, key=lambda line: line["loss"])
    rows = [("before training", evals[0])] if evals[0]["step"] == 0 else []
    rows += [("lowest loss", best)] if best["step"] not in (0, last["step"]) else []
    rows += [("after training", last)]
    yield "## Evaluation"
    yield ""
    yield f"On {f'{documents:,}' if documents else 'the'} held-out documents, over the tokens that would be learned:"
    yield ""
    numbers = [(what, line["step"], f"{line['loss']:.4f}", f"{line['perplexity']:.2f}") for what, line in rows]
    yield from _table(("when", "step", "loss", "perplexity"), numbers)
    if run.merged:
        yield ""
        yield from _merged(run.merged)


def _merged(facts: Mapping[str, Any]) -> Iterator[str]:
    """How far the merged weights are from what was evaluated."""
    found = facts.get("agreement")
    if not found:
        yield f"This was measured with the adapter; the merged weights ({facts['dtype']}) were not compared with it."
        return
    figures = found["candidates"][facts["base"]]
    documents = f"{found['documents']} {'held-out' if found['held_out'] else 'training'} documents"
    yield "This was measured with the adapter beside its base. The merged weights were compared with it over"
    yield f"{found['tokens']:,} answer tokens of {documents}: the same most likely token at {figures['top1']:.2%}, mean"
    yield f"KL divergence {figures['kl']:.1e} nats, loss {figures['loss']:.4f} (with the adapter"
    yield f"{found['adapter']['loss']:.4f}, the base {found['base']['loss']:.4f})."


def _not_evaluated(run: RunFacts) -> Iterator[str]:
    held_out = "beyond the held-out loss above" if run.evals() else "at all: no rows were held out"
    yield "## What was not evaluated"
    yield ""
    yield f"Nothing was measured {held_out}. In particular there was no benchmark, no comparison with other models and"
    yield "no human judgement, and truthfulness, safety, bias, other languages than the data's and longer texts than"
    yield "the training's were not looked at. What is known of the base model's limits holds for this model too."


def _versions(run: RunFacts) -> Iterator[str]:
    versions = run.environment.get("versions", {})
    used = [(name, version) for name, version in versions.items() if version and _was_used(name, run)]
    if used:
        yield "## Versions"
        yield ""
        yield from _table(("library", "version"), [("python", run.environment.get("python")), *used])


def _was_used(library: str, run: RunFacts) -> bool:
    if library == "bitsandbytes":
        spec = OPTIMIZERS[run.recipe.training.optim]
        return run.recipe.quantization is not None or spec.bitsandbytes_class is not None
    if library == "deepspeed":
        return str(run.receipt.get("strategy", "")).startswith("zero")
    return library != "peft" or run.recipe.lora is not None


def _licence(base: BaseFacts) -> Iterator[str]:
    yield "## Licence"
    yield ""
    name = base.licence.get("license_name") or base.licence.get("license")
    if name is None:
        yield f"The licence of {base.shown} is not known here; it holds for this model as well. Look it up before use."
    else:
        link = base.licence.get("license_link", "")
        shown = f"[{name}]({link})" if link.startswith("https://") else name
        yield f"That of the base model: {shown}. The data may have terms of their own."


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        cells = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        yield f"| {' | '.join(cells)} |"
