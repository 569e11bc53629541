"""An adapter rewritten for vLLM: the same change to each weight, in a form that its loader takes.

The tensors stay alpha / r B A. Only zeros are added, and a layer's own scale moves into its B:

    layer with rank 2, alpha 8, in an adapter of rank 4, alpha 16    A [2, in], B [out, 2], scale 4
    written with rank 4, alpha 4                                     A' = [A ; 0]  B' = [4 B , 0], scale 1
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from finetune.errors import FinetuneError
from finetune.finished_run.load import FinishedRun
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
    if "experts" in verdict.conversions:
        tensors, result = by_expert(load_file(run.product / ADAPTER_WEIGHTS), settings)
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


def by_expert(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The adapter with layers for each expert's gate, up and down projection, as the model's checkpoint names them.

    peft stacks a mixture's experts along the rank: expert e has A's rows [e r, (e + 1) r), and B's columns e, e + E,
    e + 2E, ... With 4 experts, rank 2, hidden size 64 and expert size 32:

        gate_up_proj    A [8, 64], B [64, 8]  -> per expert A_e [2, 64], B_e [64, 2]: gate has B_e's upper half, up its
                                                 lower half, and both have A_e
        down_proj       A [8, 32], B [64, 8]  -> per expert A_e [2, 32], B_e [64, 2]

    Raises FinetuneError if a mixture's tensors are not two such pairs.
    """
    rank, layers = settings["r"], dict[str, Tensor]()
    pairs: dict[str, dict[str, dict[str, Tensor]]] = {}  # mixture -> "" or ".base_layer" -> A or B
    for key, tensor in tensors.items():
        found = re.fullmatch(r"(.*\.experts)(|\.base_layer)\.lora_([AB])\.weight", key)
        if found is None:
            layers[key] = tensor
        else:
            pairs.setdefault(found[1], {}).setdefault(found[2], {})[found[3]] = tensor
    for mixture, both in pairs.items():
        # The order of target_parameters decides which wrapper is the inner one, so sizes tell them apart.
        gate_up = [each for each in both.values() if len(each) == 2 and _is_gate_and_up(each, [*both.values()])]
        if len(both) != 2 or len(gate_up) != 1:
            raise FinetuneError(
                f"{mixture}: its tensors are not those of gate_up_proj and down_proj; export the run again"
            )
        down = next(each for each in both.values() if each is not gate_up[0])
        experts = gate_up[0]["A"].shape[0] // rank
        for expert in range(experts):
            first, second = _of_expert(gate_up[0], expert, experts)
            gate, up = second.chunk(2)
            for name, pair in {
                "gate_proj": (first, gate),
                "up_proj": (first, up),
                "down_proj": _of_expert(down, expert, experts),
            }.items():
                for part, tensor in zip("AB", pair, strict=True):
                    layers[f"{mixture}.{expert}.{name}.lora_{part}.weight"] = tensor.clone().contiguous()
    modules = settings.get("target_modules") or []
    if isinstance(modules, list):
        modules = sorted({*modules, "gate_proj", "up_proj", "down_proj"})
    return layers, {**settings, "target_parameters": None, "target_modules": modules}


def _is_gate_and_up(pair: Mapping[str, Tensor], both: list[dict[str, Tensor]]) -> bool:
    """gate_up_proj gives two numbers for each one that down_proj takes, and takes as many as that gives."""
    return any(
        pair["B"].shape[0] == 2 * other["A"].shape[1] and pair["A"].shape[1] == other["B"].shape[0]
        for other in both
        if other is not pair and len(other) == 2
    )


def _of_expert(pair: Mapping[str, Tensor], expert: int, experts: int) -> tuple[Tensor, Tensor]:
    """One expert's A [r, in] and B [out, r]."""
    first, second = pair["A"], pair["B"]
    return (
        first.reshape(experts, -1, first.shape[1])[expert],
        second.reshape(second.shape[0], -1, experts)[:, :, expert],
    )


def _part(key: str) -> str:
    """A.weight, B.weight, embedding_A or embedding_B."""
    return key.rpartition(".lora_")[2]
