"""The sizes of the models that recipes train, from their published configurations: weights and adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.model.known_configs import full_config
from finetune.recipe.schema import Recipe

FUSED = ("phi3",)  # q, k and v are one matrix, and so are gate and up
ROUTED = ("num_experts", "num_local_experts")


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder; counts are of weights. Norms, biases and convolutions but Llama's are left out."""

    hidden: int
    inner: int  # of one expert in a mixture
    layers: int
    queries: int
    keys: int
    vocabulary: int
    tied: bool
    fused: bool = False
    experts: int = 0  # of a layer, 0 where it is no mixture
    recurrent: int = 0  # layers of gated delta rules instead of attention
    recurrent_in: tuple[int, ...] = ()  # widths of such a layer's matrices from the stream
    recurrent_out: int = 0  # and of the one back to it
    gated: bool = False  # q is as wide again, for a gate

    @property
    def _attention(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the matrices of one layer's attention."""
        wide = 2 * self.queries if self.gated else self.queries
        if self.fused:
            return (self.hidden, wide + 2 * self.keys), (self.queries, self.hidden)
        return (self.hidden, wide), (self.hidden, self.keys), (self.hidden, self.keys), (self.queries, self.hidden)

    @property
    def _recurrent(self) -> tuple[tuple[int, int], ...]:
        """Of one layer of gated delta rules."""
        return *((self.hidden, width) for width in self.recurrent_in), (self.recurrent_out, self.hidden)

    @property
    def _mlp(self) -> tuple[tuple[int, int], ...]:
        """Of one expert, or of the layer."""
        if self.fused or self.experts:
            return (self.hidden, 2 * self.inner), (self.inner, self.hidden)
        return (self.hidden, self.inner), (self.hidden, self.inner), (self.inner, self.hidden)

    @property
    def all_matrices(self) -> list[tuple[int, int]]:
        """Of all layers, those that `all-linear` adapts: inputs and outputs."""
        mlps = self._mlp * (self.layers * max(1, self.experts))
        attentions = self._attention * (self.layers - self.recurrent)
        return [*mlps, *attentions, *(self._recurrent * self.recurrent)]

    @property
    def linear(self) -> int:
        """Of one layer's matrices, in the mean where layers differ."""
        return sum(inputs * outputs for inputs, outputs in self.all_matrices) // self.layers

    @property
    def layer(self) -> int:
        return self.linear + (2 + self.experts) * self.hidden  # two norms, and a router

    @property
    def table(self) -> int:
        """Of the embeddings; of the head as well."""
        return self.vocabulary * self.hidden

    @property
    def ends(self) -> int:
        return self.table * (1 if self.tied else 2)

    @property
    def total(self) -> int:
        return self.layers * self.layer + self.ends + self.hidden

    @property
    def tensors(self) -> list[int]:
        """Elements of each weight of a dense model with equal layers, as the model lists them."""
        assert not self.experts
        assert not self.recurrent
        matrices = [inputs * outputs for inputs, outputs in (*self._attention, *self._mlp)]
        head = [] if self.tied else [self.table]
        return [self.table, *([*matrices, self.hidden, self.hidden] * self.layers), self.hidden, *head]

    def adapters(self, rank: int) -> int:
        """Of all adapters on all linear layers, and on each expert."""
        return rank * sum(inputs + outputs for inputs, outputs in self.all_matrices)


def shape_of(recipe: Recipe) -> Shape:
    """Of the recipe's model, whose configuration is one of finetune/model/configs."""
    config: dict[str, Any] = full_config(recipe.model.name_or_path)[0]
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    experts = next((config[key] for key in ROUTED if config.get(key)), 0)
    return Shape(
        hidden=hidden,
        inner=config.get("moe_intermediate_size") or config["intermediate_size"],
        layers=config["num_hidden_layers"],
        queries=heads * head_dim,
        keys=config["num_key_value_heads"] * head_dim,
        vocabulary=config["vocab_size"],
        tied=config["tie_word_embeddings"],
        fused=config["model_type"] in FUSED,
        experts=experts,
        gated=bool(config.get("attn_output_gate")),
        **_recurrent_layers(config),
    )


def _recurrent_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Gated delta rules: queries, keys and values by one matrix, a gate, and two numbers a head."""
    count = (config.get("layer_types") or []).count("linear_attention")
    if not count:
        return {}
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    heads = config["linear_num_value_heads"]
    values = heads * config["linear_value_head_dim"]
    return {"recurrent": count, "recurrent_in": (2 * keys + values, values, heads, heads), "recurrent_out": values}
