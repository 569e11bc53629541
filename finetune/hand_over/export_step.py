"""`finetune export`: a run's checkpoint as the folder of a run that ended at its step.

    FOLDER/
        adapter/ or model/   bitwise what the training would have exported at that step
        recipe.yaml  receipt.json  environment.json
        metrics.jsonl  samples.jsonl   up to that step
        export.json          the run, the step, and the checkpoint's hash
        report.html  loss.png  memory.png  rewards.png (preferences)

So chat, eval, merge and push read it like any finished run. One process on a CPU exports a step from any strategy and
any number of ranks, because a checkpoint's pieces are ranges of unsharded tensors. From the base the export reads only
the configuration, and whether its files tie head and embeddings.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from finetune.base.location import resolve_model_path
from finetune.errors import FinetuneError
from finetune.files import cut_lines, making, publish_folder, read_lines, write_json
from finetune.finished_run import recipe_of_run
from finetune.hand_over.own_folder import refuse_foreign, write_record
from finetune.library_errors import library_errors
from finetune.model.build import build_model, decoder_parts
from finetune.model.new_tokens import load_tokenizer
from finetune.paths import leaves_folder
from finetune.recipe.schema import Recipe
from finetune.report.run_page import PAGE_NAME, PICTURES, write_pages
from finetune.run_folder.base_parts import untrained_in_words
from finetune.run_folder.checkpoint import (
    MANIFEST_BYTES,
    Checkpoint,
    checkpoint_steps,
    examine,
    read_state_of,
    step_folder,
)
from finetune.run_folder.facts import (
    EVAL_ANSWERS,
    EVAL_KEPT,
    EVAL_RECORD,
    EXPORT_RECORD,
    EXPORTED_RECORDS,
    EXPORTS,
    MOST_RECORD_BYTES,
    is_as_written,
    require_run_folder,
)
from finetune.run_folder.folder import HANDED_OVER
from finetune.run_folder.save_restore import export_dtype, export_weights, refuse_unexportable
from finetune.run_folder.tensor_checks import checksums, not_finite
from finetune.run_folder.trained_tensors import refuse_unchanged
from finetune.strategies.pieces import Ranks
from finetune.untrusted.json_files import read_object

# The verbs write these into a run's folder, so also into an export of it. They belong to its weights.
OF_A_RUN = (*EXPORTED_RECORDS, *HANDED_OVER, PAGE_NAME, *PICTURES, EVAL_RECORD, EVAL_ANSWERS, EVAL_KEPT, "gguf")


def run_at(run_dir: Path, step: int | None) -> Path:
    """The folder that other verbs read: the run itself, or with `step` its export, made if it does not exist."""
    if step is None:
        return run_dir
    folder = run_dir / EXPORTS / f"step-{step:08d}"
    exported, checkpoint = _fact(folder / EXPORT_RECORD, "checkpoint"), step_folder(run_dir, step)
    # A run that started over has another checkpoint at this step. A deleted one cannot contradict its export.
    if exported and (not checkpoint.is_dir() or exported == _fact(checkpoint / "MANIFEST.json", "sha256")):
        return folder
    export_step(run_dir, step, folder)
    return folder


def export_with_report(run_dir: Path, step: int, to: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """`export_step`, then its report. Raises FinetuneError."""
    facts = export_step(run_dir, step, to)
    say("\n".join([f"exported step {step}: {facts['product']}", *facts["notes"]]))
    write_pages(Path(facts["folder"]), say)
    return facts


def export_step(run_dir: Path, step: int, to: Path | None = None) -> dict[str, Any]:
    """Write the checkpoint after `step` steps into `to`, complete or not at all. Returns export.json and the folder.

    Raises FinetuneError if there is no such checkpoint, it is damaged or not finite, or `to` holds other files.
    """
    folder = to or run_dir / EXPORTS / f"step-{step:08d}"
    resolved = require_run_folder(run_dir)
    refuse_foreign(folder, EXPORT_RECORD, below=run_dir, later=OF_A_RUN)  # before minutes of hashing and building
    checkpoint = _checkpoint_at(run_dir, step)
    recipe = recipe_of_run(resolved)
    # export_weights writes into its recipe's output_dir. Point that to the temporary folder, so the run stays as it is.
    with library_errors(writing=folder, kept="the run is untouched; "), making(folder) as temporary:
        temporary.mkdir()
        _copy_record(run_dir, temporary, step)
        product, notes = _write_product(recipe.model_copy(update={"output_dir": str(temporary)}), checkpoint)
        manifest_hash = _fact(checkpoint.path / "MANIFEST.json", "sha256")
        record = {"run": run_dir.resolve().name, "step": step, "checkpoint": manifest_hash}
        write_record(temporary, EXPORT_RECORD, record)
        publish_folder(temporary, folder)
    return {"folder": str(folder), "product": str(folder / product.name), "notes": notes, **record}


def _fact(file: Path, name: str) -> str:
    """A fact of a JSON file; empty if it has none. A manifest's own hash covers every file of its checkpoint."""
    try:
        return str(read_object(file, MANIFEST_BYTES).get(name, ""))
    except FinetuneError:
        return ""


def _checkpoint_at(run_dir: Path, step: int) -> Checkpoint:
    """The checkpoint, after a check of every byte. Raises FinetuneError that names the existing steps."""
    folder = step_folder(run_dir, step)
    if not folder.is_dir():
        steps = ", ".join(map(str, checkpoint_steps(run_dir))) or "none"
        raise FinetuneError(
            f"{run_dir}: has no checkpoint of step {step}; name one of those it has: {steps} "
            "(save_total_limit says how many are kept)"
        )
    checkpoint = examine(folder)
    if isinstance(checkpoint, str):
        others = ", ".join(str(other) for other in checkpoint_steps(run_dir) if other != step)
        remedy = f"name another step: {others}" if others else "it is the only one: resume or repeat the run"
        raise FinetuneError(f"{folder}: damaged, not exported: {checkpoint}; {remedy}")
    return checkpoint


def _write_product(recipe: Recipe, checkpoint: Checkpoint) -> tuple[Path, list[str]]:
    """Write adapter/ or model/ in the recipe's run folder, by the code that ends a training; with notes about it."""
    model: Any = build_model(recipe, torch.device("meta"))
    if recipe.lora is None:
        # The base's own generation config, as `from_pretrained` reads it. Without one, the model derives it from
        # config.json.
        with suppress(OSError):
            path = resolve_model_path(recipe.model.name_or_path)
            generation_config = GenerationConfig.from_pretrained(path, revision=recipe.model.revision)
            decoder_parts(model).generation_config = generation_config
    else:
        # On meta every adapter is built with peft's default initialisation; adapter_config.json names the recipe's.
        model.peft_config["default"].init_lora_weights = recipe.lora.init_lora_weights
    # The checkpoint's weights by the model's names, in the export's number format. Tied ones are one tensor.
    stored, dtype = checkpoint.groups["model"], export_dtype(recipe)
    first_names: dict[int, str] = {}
    weights: dict[str, Tensor] = {}
    sums: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        # The checkpoint holds a tied tensor under its first name.
        first = first_names.setdefault(id(parameter), name)
        if first not in weights:
            if first not in stored or stored[first].shape != tuple(parameter.shape):
                raise FinetuneError(f"{checkpoint.path}: {first} is not as the model has it; recipe.yaml was changed")
            weight = stored[first].read_all()
            sums |= checksums({first: weight}, Ranks())  # over the bits before the conversion, as at the start
            weights[first] = weight if dtype is None else weight.to(dtype)
        weights[name] = weights[first]
    if unexpected := sorted(stored.keys() - {*first_names.values()}):
        raise FinetuneError(
            f"{checkpoint.path}: has a {unexpected[0]} of its own, which the model of recipe.yaml has not. "
            "If the base's weights are no longer on this machine, fetch them again: they decide "
            "whether head and embeddings are one matrix"
        )
    refuse_unchanged(sums, read_state_of(checkpoint).get("start_checksums", {}))
    refuse_unexportable(recipe, not_finite(weights, 0))
    product = export_weights(recipe, model, weights, load_tokenizer(recipe))
    return product, [] if recipe.lora else [*untrained_in_words(recipe.model, model)]


def _copy_record(run_dir: Path, folder: Path, step: int) -> None:
    """Copy the run's records up to the step, and nothing about its last weights."""
    for name in EXPORTED_RECORDS:
        if leaves_folder(run_dir / name, run_dir):
            raise FinetuneError(f"{run_dir / name}: is a link that leaves the run's folder; put the file there")
        if (run_dir / name).is_file():
            shutil.copyfile(run_dir / name, folder / name)
    for name in ("metrics.jsonl", "samples.jsonl"):
        cut_lines(folder / name, step)
    receipt = folder / "receipt.json"
    if receipt.is_file():
        facts = read_object(receipt, MOST_RECORD_BYTES)
        facts.pop("change", None)  # which tensors training changed by its end
        metrics = folder / "metrics.jsonl"
        lines = read_lines(metrics) if metrics.is_file() else []
        evals = (line for line in lines if line.get("kind") == "eval" and is_as_written(line))
        loss = next((line.get("loss") for line in evals if line["step"] == step), None)
        facts["export"] = {"step": step, "best": False, "metric": "eval_loss", "loss": loss}
        write_json(receipt, facts)
