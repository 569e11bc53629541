"""Tiny checkpoints of models for images and text, as the Hub has them: the whole class, random weights, a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Llama4ForConditionalGeneration,
    PreTrainedModel,
)

from tests.support.models.tiny import tiny_tokenizer

TEXT: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512},
    **{"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0},
}
VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8},
    **{"image_size": 28, "patch_size": 14},
}
QWEN_VISION: dict[str, Any] = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32},
    **{"patch_size": 14, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}
QWEN_TOKENS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}

# What each family needs beside TEXT and a vision tower; a key of both replaces TEXT's.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
        "vision_config": VISION,
        **{"mm_tokens_per_image": 4, "image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502},
    },
    "gemma4": {
        "text_config": {
            **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "global_head_dim": 8},
            **{"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 8},
        },
        "vision_config": VISION | {"num_key_value_heads": 2, "position_embedding_size": 16},
        "audio_config": None,
        **{"image_token_id": 500, "boi_token_id": 501, "eoi_token_id": 502, "video_token_id": 503},
        **{"audio_token_id": 504, "boa_token_id": 505, "eoa_token_index": 506},
    },
    "mistral3": {
        "text_config": {"model_type": "mistral"},
        "vision_config": {"model_type": "pixtral", **VISION},
        **{"image_token_index": 500, "tie_word_embeddings": False},  # its default, True, is not what the Hub's have
    },
    "llama4": {
        "text_config": {
            **{"intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 7, "floor_scale": 4},
            **{"interleave_moe_layer_step": 2, "no_rope_layers": [1, 0]},
        },
        "vision_config": VISION | {"projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16},
        **{"image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502},
    },
    "qwen3_5": {
        "text_config": {
            **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2},
            **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
            **{"rope_parameters": MROPE["rope_parameters"] | {"partial_rotary_factor": 1.0}},
        },
        "vision_config": QWEN_VISION,
        **QWEN_TOKENS,
    },
    "qwen2_5_vl": {"text_config": MROPE, "vision_config": QWEN_VISION, **QWEN_TOKENS},
    "qwen3_vl": {"text_config": MROPE, "vision_config": QWEN_VISION, **QWEN_TOKENS},
}
WITH_TEXT_CLASS = ("gemma3", "gemma4", "mistral3", "llama4", "qwen3_5")


def save_multimodal(family: str, folder: Path) -> Path:
    """Weights far from those that training starts from, so that what a family has of its own shows."""
    settings = dict(FAMILIES[family])
    config = AutoConfig.for_model(family, **settings | {"text_config": TEXT | settings["text_config"]})
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter += 0.1 * drawn
            else:
                parameter.copy_(drawn / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def answering(model: Any) -> Any:
    """`model`, peft's too; of Llama 4 its text model, for transformers 5.24's forward of the whole raises."""
    whole = model.get_base_model() if isinstance(model, PeftModel) else model
    return whole.language_model if isinstance(whole, Llama4ForConditionalGeneration) else model
