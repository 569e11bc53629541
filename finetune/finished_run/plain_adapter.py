"""`finetune export --plain`: write an adapter that began as a part of its base as plain LoRA on the whole base.

PiSSA and OLoRA split each weight W into an adapter and a rest: W = rest + s B0 A0. Training changes this to
rest + s B A. An engine that adds s B A to W has another model. Training changed W by s (B A - B0 A0). This is LoRA with
twice the rank and no scale:

    A' = [A ; A0]  [2r, in]      B' = [s B , -s B0]  [out, 2r]      lora_alpha' / r' = 1

A0 and B0 are computed again from W, as peft computes them when it loads the adapter.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from finetune.errors import FinetuneError
from finetune.files import TEMPORARY_PREFIX, disk_errors, publish_folder, remove_folder, write_json
from finetune.finished_run.load import finished_run
from finetune.finished_run.merging import NOT_THE_MODELS, Merge, plan_merge
from finetune.finished_run.own_folder import refuse_foreign, write_record
from finetune.model.text_part import PEFT_PREFIX
from finetune.recipe.plain_lora import why_not_plain
from finetune.recipe.schema import Recipe
from finetune.untrusted.model_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS

PLAIN = "adapter-plain"  # in a run's folder
PLAIN_RECORD = "plain.json"


def export_plain(run_dir: Path, to: Path | None = None) -> dict[str, Any]:
    """Write the run's adapter as plain LoRA into `to`, completely or not at all. Returns plain.json and the folder.

    The result is exact in float32. In narrower formats training rounded each base weight's rest. The whole base has no
    such rounding. Raises FinetuneError if the adapter is plain already, or cannot be written as plain LoRA.
    """
    run, folder = finished_run(run_dir), to or run_dir / PLAIN
    _refuse(run_dir, run.recipe)
    refuse_foreign(folder, PLAIN_RECORD, below=run_dir)
    merge = plan_merge(run.recipe, run_dir, torch.device("cpu"))
    tensors, settings = plain_tensors(merge, run.product)
    record = {"run": run_dir.resolve().name, "init_lora_weights": merge.adapter.init, "r": settings["r"]}
    temporary = folder.with_name(f"{TEMPORARY_PREFIX}{folder.name}")
    with disk_errors(folder, "the run is untouched; "):
        remove_folder(temporary)
        try:
            shutil.copytree(run.product, temporary, ignore=shutil.ignore_patterns(*NOT_THE_MODELS))
            save_file(tensors, temporary / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            write_json(temporary / ADAPTER_CONFIG, settings)
            write_record(temporary, PLAIN_RECORD, record)
            publish_folder(temporary, folder)
        finally:
            remove_folder(temporary)
    return {"folder": str(folder), **record}


def describe_plain(facts: Mapping[str, Any]) -> str:
    """The verb's output."""
    return f"exported as plain LoRA of rank {facts['r']}, from {facts['init_lora_weights']}: {facts['folder']}"


def _refuse(run_dir: Path, recipe: Recipe) -> None:
    if recipe.lora is None:
        raise FinetuneError(f"{run_dir}: all weights were trained: {run_dir / 'model'} is the whole model already")
    if not recipe.lora.takes_from_the_base:
        raise FinetuneError(
            f"{run_dir}: the adapter is not of PiSSA or OLoRA, so nothing was taken from its base; use "
            f"{run_dir / 'adapter'} as it is, or merge it: {shlex.join(['finetune', 'merge', str(run_dir)])}"
        )
    if reason := why_not_plain(recipe):
        raise FinetuneError(
            f"{run_dir}: cannot be written as plain LoRA, because {reason}; merge it: "
            f"{shlex.join(['finetune', 'merge', str(run_dir)])}"
        )


def plain_tensors(merge: Merge, product: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The adapter as plain LoRA: its tensors under peft's names, and adapter_config.json."""
    adapter = merge.adapter
    with safe_open(adapter.path, framework="pt") as file:
        tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a dict
    for layer, parts in adapter.layers.items():
        weight = merge.base.read(f"{layer}.weight").to(getattr(torch, merge.recipe.model.dtype), copy=True)
        doubled = adapter.doubled(layer, weight)
        for part, key in parts.items():
            # A text part's adapter holds each tensor under the whole model's name too (text_part.name_for_both).
            for name in {key, PEFT_PREFIX + merge.names.of(key.removeprefix(PEFT_PREFIX))}:
                tensors[name] = doubled[part].clone()
    settings = json.loads((product / ADAPTER_CONFIG).read_text("utf-8"))
    ranks = {key: 2 * rank for key, rank in (settings.get("rank_pattern") or {}).items()}
    # lora_alpha = r in every layer makes the scale 1, so it is in B' already.
    settings |= {"r": 2 * settings["r"], "lora_alpha": 2 * settings["r"], "use_rslora": False}
    settings |= {"init_lora_weights": True, "rank_pattern": ranks, "alpha_pattern": dict(ranks)}
    return tensors, settings
