"""Serve a run with vLLM: its adapter if vLLM computes it as peft does, otherwise the merged model.

vLLM 0.32 serves plain LoRA on the layers of a model. It refuses some other adapters with an error, and ignores parts of
others without one: experts in peft's layout, names that its model does not have. The merged model is always right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from finetune.untrusted.safetensors_header import TensorFacts

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vllm/config/lora.py, MaxLoRARanks
# Initialisations after which a saved adapter is plain LoRA.
PLAIN_STARTS = ("true", "false", "gaussian", "orthogonal")
# Settings of adapter_config.json that make an adapter more than one low-rank sum of one rank and scale.
NOT_PLAIN = (
    "use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "rank_pattern", "alpha_pattern",
    "lora_bias", "layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens",
)  # fmt: skip


def why_merged(settings: Mapping[str, Any], tensors: Mapping[str, TensorFacts]) -> str | None:
    """Why vLLM gets the merged model instead of this adapter, as a clause; None if it gets the adapter.

    Args:
        settings: adapter_config.json.
        tensors: The header of adapter_model.safetensors.
    """
    for key in NOT_PLAIN:
        if settings.get(key):
            return f"the adapter has {key}"
    if settings.get("bias", "none") != "none":
        return "biases were trained"
    start = str(settings.get("init_lora_weights", True)).lower()
    if start not in PLAIN_STARTS:
        return f"init_lora_weights: {start} changes the base when peft loads the adapter"
    for key in tensors:
        if not key.endswith((".lora_A.weight", ".lora_B.weight")) or ".lm_head." in key:
            return f"the adapter has {key}"
    # A text part's adapter holds each tensor twice, the second time under the whole model's name.
    if any(key.replace("language_model.", "", 1) in tensors for key in tensors if "language_model." in key):
        return "the adapter names the layers of a multimodal model's text part twice"
    ranks = {facts.shape[0] for key, facts in tensors.items() if key.endswith(".lora_A.weight")}
    if ranks != {settings.get("r")}:
        return f"not every tensor has the rank r: {settings.get('r')}"
    if max(ranks) > RANKS[-1]:
        return f"vLLM's --max-lora-rank ends at {RANKS[-1]}"
    return None


def lora_options(name: str, path: str, rank: int) -> list[str]:
    """The options of `vllm serve` for one adapter."""
    allowed = next(allowed_rank for allowed_rank in RANKS if allowed_rank >= rank)
    return ["--enable-lora", "--max-lora-rank", str(allowed), "--lora-modules", lora_module(name, path)]


def lora_module(name: str, path: str) -> str:
    """The value of vLLM's --lora-modules: `name=path`, or JSON if that would be read in another way.

    vLLM takes text with "=" and without "," for the first form. 0.32 and earlier split it at every "=".
    """
    if re.search("[=,]", name + path) or name.startswith("-"):
        return json.dumps({"name": name, "path": path}, ensure_ascii=False)
    return f"{name}={path}"
