"""Tiny mixtures of experts, one for each way in which transformers 5 and peft 0.21 hold their experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.models.tiny import save_tiny

FOUR_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "initializer_range": 0.1}
MIXTURES: dict[str, dict[str, Any]] = {
    # [experts, inputs, outputs], and biases; files hold them as they are.
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2, "rope_parameters": None},
    # [experts, outputs, inputs]; files hold one matrix an expert.
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_local_experts": 4},
    # A dense first layer and shared experts are linear layers, whose names peft takes for experts of transformers 4.
    "glm4_moe": {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1},
}
# Further families whose experts are in 4 bits.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": {
        **{"num_experts": 4, "shared_expert_intermediate_size": 32, "layer_types": ["full_attention"] * 2},
    },
    "olmoe": {"num_experts": 4},
    "deepseek_v3": {
        **{"n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
        **{"num_key_value_heads": 4, "head_dim": 8},
    },
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 64, "attn_temperature_tuning": False},
    "granitemoe": {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
}


def save_mixture(folder: Path, family: str) -> Path:
    """Two layers of four experts each, two of them for each token, and a tokenizer."""
    return save_tiny(folder, family, **FOUR_EXPERTS | (MIXTURES | OTHERS)[family])
