"""Sizes of a Llama-like decoder and its adapters, from a config.json alone. Counts are weights, not bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.closed_form.constants import FLOAT32
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.lora import ends_of

QUANTISED_BLOCK = 64  # weights to a scale


@dataclass(frozen=True)
class Family:
    """Facts about an architecture's layers that config.json does not state."""

    biased_inputs: bool = False  # q, k and v have biases, whatever the configuration says
    normed_heads: bool = False  # a norm over each head's queries and keys


# The architectures with layers as layer.py describes them: seven matrices, two norms, gated SiLU.
FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(biased_inputs=True),  # models/qwen2/modeling_qwen2.py, Qwen2Attention
    "qwen3": Family(normed_heads=True),
    "smollm3": Family(),
}


@dataclass(frozen=True)
class Linear:
    """One matrix of a layer, [outputs, inputs], and its adapter, [rank, inputs] and [outputs, rank]."""

    name: str
    inputs: int
    outputs: int
    rank: int  # the adapter's; 0: no adapter
    bias: bool = False

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs

    @property
    def adapter_weights(self) -> int:
        return self.rank * (self.inputs + self.outputs)

    def scale_bytes(self, double: bool) -> int:
        """A 4-bit matrix's QuantState (bitsandbytes/functional.py); `double`: scales are quantised too."""
        blocks = -(-self.weights // QUANTISED_BLOCK)
        if not double:
            return FLOAT32 * (blocks + 16)  # absmax [blocks] and code [16], float32
        # absmax [blocks] in one byte; float32: absmax's own absmax [blocks / 256], code [256], offset [1]; code [16].
        return blocks + FLOAT32 * (-(-blocks // 256) + 16 + 256 + 1)


@dataclass(frozen=True)
class Shape:
    """The sizes that decide how large a model's tensors are."""

    hidden: int
    inner: int  # the MLP's width
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    normed_heads: bool
    linears: dict[str, Linear]  # q, k, v, o, gate, up, down

    @property
    def query_size(self) -> int:
        return self.heads * self.head_size

    @property
    def key_size(self) -> int:
        """All keys of one token. Its values have as many numbers."""
        return self.key_value_heads * self.head_size

    @property
    def matrix_weights(self) -> int:
        """In one layer's seven matrices."""
        return sum(linear.weights for linear in self.linears.values())

    @property
    def vector_weights(self) -> int:
        """In one layer's norms and biases."""
        biases = sum(linear.outputs for linear in self.linears.values() if linear.bias)
        return 2 * self.hidden + 2 * self.head_size * self.normed_heads + biases

    @property
    def adapter_weights(self) -> int:
        """In one layer's adapters."""
        return sum(linear.adapter_weights for linear in self.linears.values())

    @property
    def embedding_weights(self) -> int:
        """[vocabulary, hidden], for the embeddings; the head has as many."""
        return self.vocabulary * self.hidden

    @property
    def total_weights(self) -> int:
        """In the model without adapters."""
        # Embeddings, an untied head as large as they are, and the last norm [hidden].
        ends = self.embedding_weights * (2 - self.tied) + self.hidden
        return self.layers * (self.matrix_weights + self.vector_weights) + ends


def layer_weights(config: Mapping[str, Any], packed: int = 1) -> int:
    """One dense layer's matrices, from the sizes that every decoder has.

    Args:
        packed: Weights in one element of a quantised layer's container.
    """
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_size = int(config.get("head_dim") or hidden // heads)
    # q and o are [heads x head size, h] each, k and v [key-value heads x head size, h] each.
    attention = 2 * hidden * head_size * (heads + int(config.get("num_key_value_heads") or heads))
    mlp = 8 * hidden * hidden  # GPT-2 and its like name no width: two matrices, four times as wide as the model
    if inner := config.get("intermediate_size"):
        mlp = 3 * hidden * int(inner)
    return (attention + mlp) // packed


def approximate_weights(config: Mapping[str, Any]) -> float | None:
    """Any decoder's weights to about a fifth, experts included; None if its config.json does not have the sizes."""
    config = config.get("text_config") or config
    try:
        hidden, layers, weights = config["hidden_size"], config["num_hidden_layers"], layer_weights(config)
        ends = config["vocab_size"] * hidden * (2 - bool(config.get("tie_word_embeddings")))
    except (KeyError, TypeError):
        return None
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        width = config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
        weights += 3 * hidden * width * (config.get(key) or 0)
    return float(ends + layers * weights)


def adapter_weights(recipe: Recipe, config: Mapping[str, Any]) -> int:
    """Adapter weights in all layers, each with its own path's rank, and rows for new tokens.

    Those rows are [tokens, hidden], in the embeddings and in an untied head.
    """
    if recipe.lora is None:
        return 0
    layers, shape = int(config["num_hidden_layers"]), shape_of(recipe, config)
    rows = len(recipe.model.new_tokens) * shape.hidden * (2 - shape.tied)
    if not recipe.lora.names_single_layers:
        return rows + layers * shape.adapter_weights
    return rows + sum(shape_of(recipe, config, layer).adapter_weights for layer in range(layers))


def shape_of(recipe: Recipe, config: Mapping[str, Any], layer: int = 0) -> Shape:
    """The sizes from config.json, with one layer's adapters.

    Raises KeyError if a key that every decoder has is missing.
    """
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    key_value_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_size, key_value_heads * head_size
    family = FAMILIES.get(config["model_type"], Family())
    bias = bool(config.get("attention_bias")) or family.biased_inputs
    output_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))

    def linear(name: str, inputs: int, outputs: int, bias: bool) -> Linear:
        # peft's rule for an adapter's rank (tuners/tuners_utils.py: check_target_module_exists). Targets are all linear
        # layers, a pattern that the whole name matches, or names' last words. Exclusions are the latter two.
        lora, path, rank = recipe.lora, f"model.layers.{layer}.{name}", 0
        if lora is not None and (lora.target_modules == "all-linear" or _matches(lora.target_modules, path)):
            rank = 0 if _matches(lora.exclude_modules, path) else lora.rank_of(path)
        return Linear(name, inputs, outputs, rank, bias)

    linears = {
        "q": linear("self_attn.q_proj", hidden, queries, bias),
        "k": linear("self_attn.k_proj", hidden, keys, bias),
        "v": linear("self_attn.v_proj", hidden, keys, bias),
        "o": linear("self_attn.o_proj", queries, hidden, output_bias),
        "gate": linear("mlp.gate_proj", hidden, inner, mlp_bias),
        "up": linear("mlp.up_proj", hidden, inner, mlp_bias),
        "down": linear("mlp.down_proj", inner, hidden, mlp_bias),
    }
    return Shape(
        hidden=hidden,
        inner=inner,
        layers=config["num_hidden_layers"],
        heads=heads,
        key_value_heads=key_value_heads,
        head_size=head_size,
        vocabulary=config["vocab_size"] + len(recipe.model.new_tokens),
        tied=bool(config.get("tie_word_embeddings")),
        normed_heads=family.normed_heads,
        linears=linears,
    )


def _matches(names: str | list[str], path: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(ends_of([path], name) for name in names)
