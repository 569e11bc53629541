"""Tiny bases as their makers published them with transformers 4: its keys, its tokenizer classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.models.tiny import save_tiny

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.2, "original_max_position_embeddings": 64}
LONGROPE = {"type": "longrope", "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], "short_factor": [1.0] * 8}
# Name -> family, settings of its class, keys that the maker's config.json has beside them, tokenizer class.
BASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "llama 3.1": ("llama", {}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}, "PreTrainedTokenizerFast"),
    "qwen 3": ("qwen3", {}, {"rope_theta": 1e6, "rope_scaling": None}, "Qwen2Tokenizer"),
    "yarn": ("qwen2", {}, {"rope_theta": 1e6, "rope_scaling": YARN}, "Qwen2Tokenizer"),
    "linear": ("llama", {}, {"rope_scaling": {"type": "linear", "factor": 4.0}}, "LlamaTokenizerFast"),
    "dynamic": ("llama", {}, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "PreTrainedTokenizerFast"),
    "longrope": (
        "phi3",
        {},
        {"rope_theta": 2e4, "rope_scaling": LONGROPE, "original_max_position_embeddings": 32},
        "LlamaTokenizerFast",
    ),
    "partial": (
        "stablelm",
        {},
        {"rope_theta": 3e4, "partial_rotary_factor": 0.5},
        "PreTrainedTokenizerFast",
    ),
    "local": (
        "gemma3_text",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "PreTrainedTokenizerFast",
    ),
    "mixture": (
        "mixtral",
        {"num_local_experts": 2},
        {"rope_theta": 1e6},
        "PreTrainedTokenizerFast",
    ),
    "no rope": (
        "opt",
        {"ffn_dim": 128, "word_embed_proj_dim": 64},
        {"task_specific_params": {"x": {"y": 1}}},
        "GPT2Tokenizer",
    ),
}
WRITTEN_BY_5 = ("rope_parameters", "dtype", "transformers_version", "standardize_rope_params")


def as_published(folder: Path, changes: Mapping[str, Any], tokenizer_class: str) -> Path:
    """Rewrite a folder that transformers 5 saved in the spelling of transformers 4."""
    config = json.loads((folder / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in WRITTEN_BY_5}
    config |= {"torch_dtype": "float32", "transformers_version": "4.43.0.dev0", "use_cache": True, "my_own_key": [1]}
    (folder / "config.json").write_text(json.dumps(config | dict(changes)))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    template = folder / "chat_template.jinja"
    named = {
        "added_tokens_decoder": {str(each["id"]): {k: v for k, v in each.items() if k != "id"} for each in added},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": tokenizer_class,
        "chat_template": template.read_text(),
    }
    settings.pop("backend")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | named))
    template.unlink()
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    greedy = {"do_sample": True, "temperature": 0.6, "eos_token_id": [2, 0], "transformers_version": "4.42.3"}
    (folder / "generation_config.json").write_text(json.dumps(greedy))
    return folder


def save_published(folder: Path, name: str, **more: Any) -> Path:
    """One of BASES."""
    family, settings, changes, tokenizer_class = BASES[name]
    return as_published(save_tiny(folder, family, **settings, **more), changes, tokenizer_class)
