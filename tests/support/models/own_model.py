"""A decoder that no library knows, with code of its own (trust_remote_code): once right, and in ways that are wrong.

Its token mixer is transformers' attention interface. It may also read the token before each one, by its number, as
models with hashed n-grams do: that token may belong to another document.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest


def separate_modules(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let transformers keep the code of models in `folder`, and import it from there.

    The package `transformers_modules` that another test of this process imported would look in that test's folder.
    """
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


CODE = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb, eager_attention_forward


class OwnConfig(PreTrainedConfig):
    model_type = "own_decoder"

    def __init__(self, hidden_size=512, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=12,
                 vocab_size=4096, max_position_embeddings=512, rope_parameters=None, way="right", every=3, **others):
        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads
        self.num_key_value_heads, self.num_hidden_layers = num_key_value_heads, num_hidden_layers
        self.max_position_embeddings, self.vocab_size = max_position_embeddings, vocab_size
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
        self.way, self.every = way, every
        super().__init__(**others)


class OwnAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling, self.attention_dropout = self.head_dim**-0.5, 0.0
        inner = config.num_key_value_heads * self.head_dim
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key, self.value = nn.Linear(config.hidden_size, inner), nn.Linear(config.hidden_size, inner)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, rotary, mask, **others):
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        q, k, v = (each(hidden).view(shape).transpose(1, 2) for each in (self.query, self.key, self.value))
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        mixed, _ = attend(self, q, k, v, mask, scaling=self.scaling, **others)
        return self.out(mixed.reshape(*hidden.shape[:-1], -1).contiguous())


class OwnLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.gated = layer_idx % config.every == config.every - 1
        self.attention = OwnAttention(config, layer_idx)
        self.norm = nn.LayerNorm(config.hidden_size)
        if self.gated:
            self.gate = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, rotary, mask, **others):
        mixed = self.attention(self.norm(hidden), rotary, mask, **others)
        return hidden + (mixed * self.gate(hidden).sigmoid() if self.gated else mixed)


class OwnPreTrained(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flex_attn = _supports_attention_backend = True


class OwnModel(OwnPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.previous = nn.Embedding(config.vocab_size, config.hidden_size) if "previous" in config.way else None
        self.layers = nn.ModuleList(OwnLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.rotary = LlamaRotaryEmbedding(config)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, use_cache=None,
                **others):
        hidden = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        if self.previous is not None:
            before = torch.cat([torch.zeros_like(input_ids[:, :1]), input_ids[:, :-1]], dim=1)
            if self.config.way == "previous, within a document":
                before = before * (position_ids > 0)
            elif self.config.way == "previous":
                before = before * (torch.ones_like(position_ids).cumsum(1) > 1)
            hidden = hidden + self.previous(before)
        if self.config.way == "noise":
            hidden = hidden + 0.1 * torch.randn_like(hidden) * self.training
        mask = create_causal_mask(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask,
                                  past_key_values=None, position_ids=position_ids)
        rotary = self.rotary(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotary, mask, **others)
        if self.config.way == "chaotic":
            hidden = torch.sin(3000 * hidden)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class OwnForCausalLM(OwnPreTrained, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        if config.way == "does not build":
            raise RuntimeError("this model has a bad day\\nand says so at length")
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, **others):
        others.pop("logits_to_keep", None)
        hidden = self.model(input_ids, **others).last_hidden_state
        if self.config.way == "scaled states":
            hidden = hidden * 0.5
        return CausalLMOutputWithPast(logits=self.lm_head(hidden))
"""


def save_own_model(folder: Path, way: str = "right", **settings: Any) -> Path:
    """Configuration and code in `folder`, without weights, as a repository on the Hub has them.

    Args:
        way: right; previous (the token before each one is read, across documents); previous, within a document;
            scaled states (of the logits alone); chaotic (rounding is multiplied); noise (drawn in training);
            does not build.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "modeling_own.py").write_text(CODE, "utf-8")
    references = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    content = {"model_type": "own_decoder", "way": way, "auto_map": references, "architectures": ["OwnForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(content | settings), "utf-8")
    return folder
