"""The sizes of a Llama-like decoder and of its adapters, from a config.json alone; counts are of weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.recipe.schema import Lora, Recipe

# Architectures whose layers are as `layer_terms` describes them: seven matrices, two norms, gated SiLU.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
NORMED_HEADS = ("qwen3",)  # a norm over each head's queries and keys


@dataclass(frozen=True)
class Linear:
    """One matrix of a layer."""

    name: str
    inputs: int
    outputs: int
    rank: int  # of its adapter; 0: none
    bias: bool = False

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    @property
    def adapter(self) -> int:
        return self.rank * (self.inputs + self.outputs)


@dataclass(frozen=True)
class Shape:
    """What decides how large a model's tensors are."""

    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int  # key-value heads
    head: int
    vocabulary: int
    tied: bool
    normed_heads: bool
    linears: dict[str, Linear]  # q, k, v, o, gate, up, down

    @property
    def queries(self) -> int:
        return self.heads * self.head

    @property
    def keys(self) -> int:
        return self.groups * self.head

    @property
    def matrices(self) -> int:
        return sum(linear.weights for linear in self.linears.values())

    @property
    def small(self) -> int:
        """Norms and biases of a layer."""
        biases = sum(linear.outputs for linear in self.linears.values() if linear.bias)
        return 2 * self.hidden + 2 * self.head * self.normed_heads + biases

    @property
    def adapters(self) -> int:
        """Of one layer."""
        return sum(linear.adapter for linear in self.linears.values())

    @property
    def table(self) -> int:
        """Of the embeddings; of the head too."""
        return self.vocabulary * self.hidden

    @property
    def total(self) -> int:
        """Of the model without adapters."""
        ends = self.table * (1 if self.tied else 2) + self.hidden
        return self.layers * (self.matrices + self.small) + ends


def shape_of(recipe: Recipe, config: Mapping[str, Any]) -> Shape:
    """From config.json's own keys. Raises KeyError where they are not those of a decoder."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    groups = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, groups * head
    # transformers' Qwen2 has these biases whatever its configuration says.
    bias = bool(config.get("attention_bias")) or config["model_type"] == "qwen2"
    sizes = {
        "q": ("self_attn.q_proj", hidden, queries, bias),
        "k": ("self_attn.k_proj", hidden, keys, bias),
        "v": ("self_attn.v_proj", hidden, keys, bias),
        "o": ("self_attn.o_proj", queries, hidden, bool(config.get("attention_bias"))),
        "gate": ("mlp.gate_proj", hidden, inner, bool(config.get("mlp_bias"))),
        "up": ("mlp.up_proj", hidden, inner, bool(config.get("mlp_bias"))),
        "down": ("mlp.down_proj", inner, hidden, bool(config.get("mlp_bias"))),
    }
    linears = {
        key: Linear(name, inputs, outputs, _rank(recipe.lora, name), has_bias)
        for key, (name, inputs, outputs, has_bias) in sizes.items()
    }
    return Shape(
        hidden=hidden,
        inner=inner,
        layers=config["num_hidden_layers"],
        heads=heads,
        groups=groups,
        head=head,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings")),
        normed_heads=config["model_type"] in NORMED_HEADS,
        linears=linears,
    )


def _rank(lora: Lora | None, name: str) -> int:
    """As peft chooses: all linear layers, names that end so, or a pattern of the whole name."""
    if lora is None:
        return 0
    wanted = lora.target_modules
    if wanted == "all-linear":
        return lora.r
    if isinstance(wanted, str):
        return lora.r if re.fullmatch(wanted, f"model.layers.0.{name}") else 0
    return lora.r if any(name == each or name.endswith(f".{each}") for each in wanted) else 0
