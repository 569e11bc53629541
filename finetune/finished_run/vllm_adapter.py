"""An adapter rewritten for vLLM: the same change to each weight, in a form that its loader takes.

The tensors stay alpha / r B A. Only zeros are added, and a layer's own scale moves into its B:

    layer with rank 2, alpha 8, in an adapter of rank 4, alpha 16    A [2, in], B [out, 2], scale 4
    written with rank 4, alpha 4                                     A' = [A ; 0]  B' = [4 B , 0], scale 1
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from finetune.errors import FinetuneError
from finetune.finished_run.load import FinishedRun
from finetune.finished_run.merging import plan_merge
from finetune.finished_run.plain_adapter import plain_tensors
from finetune.finished_run.serving_rules import ServingVerdict, whole_names
from finetune.model.text_part import PEFT_PREFIX
from finetune.recipe.sections.lora import by_pattern
from finetune.untrusted.model_folder import ADAPTER_WEIGHTS


def converted(
    run: FinishedRun, settings: Mapping[str, Any], verdict: ServingVerdict
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The run's adapter after the verdict's conversions: tensors under peft's names, and adapter_config.json.

    Writes nothing. Raises FinetuneError if the adapter does not fit its base.
    """
    if "plain" in verdict.conversions:
        tensors, result = plain_tensors(plan_merge(run.recipe, run.folder, torch.device("cpu")), run.product)
    else:
        tensors, result = load_file(run.product / ADAPTER_WEIGHTS), dict(settings)
    if "one rank" in verdict.conversions:
        tensors, result = in_one_rank(tensors, result)
    if "one name" in verdict.conversions:
        tensors = {key: tensors[key] for key in whole_names(tensors)}
    return tensors, result


def in_one_rank(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The adapter without rank_pattern and alpha_pattern: every layer has the largest rank, and scale 1."""
    ranks, scales = settings.get("rank_pattern") or {}, settings.get("alpha_pattern") or {}
    largest = max(tensor.shape[0] for key, tensor in tensors.items() if _part(key) in ("A.weight", "embedding_A"))
    folded = {}
    for key, tensor in tensors.items():
        path = key.removeprefix(PEFT_PREFIX).partition(".lora_")[0]
        rank = by_pattern(ranks, path, settings["r"])
        alpha = by_pattern(scales, path, settings["lora_alpha"])
        first = _part(key) in ("A.weight", "embedding_A")
        if tensor.shape[0 if first else 1] != rank:
            raise FinetuneError(f"{key}: is not of rank {rank}, which adapter_config.json states; export the run again")
        if first:  # [rank, in]
            folded[key] = pad(tensor, (0, 0, 0, largest - rank))
        else:  # [out, rank]
            scale = alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank
            folded[key] = pad(scale * tensor.float(), (0, largest - rank))
    plain = {"r": largest, "lora_alpha": largest, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    return folded, {**settings, **plain}


def _part(key: str) -> str:
    """A.weight, B.weight, embedding_A or embedding_B."""
    return key.rpartition(".lora_")[2]
