"""The bytes that one rank holds all through a training, and those that each of its layers leaves for backward.

To add a tensor that lives all through a training (a buffer, a copy of the weights): give `RankSizes` a property that
names its shape, and add it to `static`. A tensor that a layer makes belongs to layer.py. One that lives at a certain
moment in a step belongs to peaks.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

from finetune.closed_form import constants as c
from finetune.closed_form.constants import CUBLAS_WORKSPACE_HOPPER, FLOAT32, HALF
from finetune.closed_form.layer import LayerNumerics, LayerStep, layer_steps
from finetune.closed_form.shape import shape_of
from finetune.recipe.gpus import Gpus
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import read_strategy

cached_strategy = lru_cache(read_strategy)  # of a few names, thousands of times


class Bytes(Counter[str]):
    """Bytes by component, one of closed_form/constants.py."""

    def plus(self, more: Mapping[str, int]) -> Bytes:
        """A copy with these bytes added; negative ones are subtracted."""
        result = Bytes(self)
        result.update(more)
        return result


class RankSizes:
    """The tensors of one recipe on one rank: how many weights, and how many bytes."""

    def __init__(self, recipe: Recipe, config: Mapping[str, Any], gpus: Gpus, *, keeps_gradients: bool = False) -> None:
        training, strategy = recipe.training, cached_strategy(recipe.accelerate_config)
        self.recipe, self.strategy, self.shape = recipe, strategy, shape_of(recipe, config)
        self.sharded = strategy.shards_parameters
        self.data_parallel = strategy.gradient_buckets  # DDP: a copy of the model on each rank
        self.ranks = strategy.rank_count(gpus.count * gpus.nodes)
        copies = strategy.replica_count(self.ranks, gpus.count)
        self.shards = self.ranks // copies if self.sharded else 1  # ranks that share one copy of the model
        self.base_trained = recipe.lora is None
        self.casts_once = strategy.casts_weights_once(recipe)  # bfloat16 copies of all weights, for a whole step
        self.four_bit = recipe.quantization is not None
        self.float8 = recipe.model.load_in_fp8
        # Bytes that a trained weight takes. Its gradient and each AdamW moment take as many.
        self.trained_weight_bytes = HALF if training.pure_bf16 else FLOAT32
        self.tokens = training.rows_at_once * recipe.data.row_tokens  # of a micro-batch
        self.micro_steps = math.ceil(training.global_batch_size / (training.rows_at_once * self.ranks))
        # Whether gradients are allocated before backward makes them: by an earlier micro-batch or in DDP's buckets.
        self.gradients_exist = self.micro_steps > 1 or self.data_parallel
        # Whether later micro-batches find all weights gathered.
        self.weights_kept = self.micro_steps > 1 and strategy.gathers_once
        # Whether FSDP2 keeps unsharded gradients until the last micro-batch.
        self.keeps_gradients = keeps_gradients and self.sharded and self.micro_steps > 1
        # Whether gradients that are reduced over shards are reduced again over HSDP's replicas, in buffers that stay
        # until backward ends. A weight's first float32 gradient is this buffer itself.
        adds_to_shards = self.micro_steps > 1 and not self.keeps_gradients
        self.keeps_all_reduce_buffers = strategy.replicates and (adds_to_shards or training.pure_bf16)
        self.recompute_period = training.recompute_every  # every n-th layer, in backward; 0: none
        self.keeps_products = training.keeps_products  # of recomputed layers

    # One layer.

    @cached_property
    def numerics(self) -> LayerNumerics:
        """A layer's tokens and number formats.

        FSDP2 casts sharded weights before it gathers them. Elsewhere all weights are cast once a step, and autocast
        casts float32 adapters at each use.
        """
        return LayerNumerics(
            tokens=self.tokens,
            documents=self.recipe.training.rows_at_once * self.recipe.data.answers_a_row,
            base_trained=self.base_trained,
            adapters_cast=self.trained_weight_bytes == FLOAT32 and not (self.sharded or self.base_trained),
            four_bit=self.four_bit,
            float8=self.float8,
            tile=self.recipe.training.mlp_tile_tokens,
        )

    @cached_property
    def layer_steps(self) -> list[LayerStep]:
        return layer_steps(self.shape, self.numerics)

    @cached_property
    def saved_layer_bytes(self) -> int:
        """Activations that one layer saves for backward."""
        return sum(step.saved_for_backward for step in self.layer_steps)

    @cached_property
    def kept_layer_bytes(self) -> int:
        """A recomputed layer's tensors besides its input: products and attention's output, where it keeps those."""
        if self.keeps_products:
            return sum(step.kept_when_selective for step in self.layer_steps)
        return 0

    @cached_property
    def cast_layer_bytes(self) -> int:
        """One layer's adapters as bfloat16 copies, which autocast keeps until backward."""
        return sum(step.cast_weights for step in self.layer_steps)

    @cached_property
    def residual_bytes(self) -> int:
        """[T, hidden] bfloat16: the hidden states between two layers."""
        return HALF * self.tokens * self.shape.hidden

    @cached_property
    def last_norm_bytes(self) -> int:
        """The last norm saves its input [T, h], and roots [T, 1] in float32."""
        return self.residual_bytes + FLOAT32 * self.tokens

    @cached_property
    def trained_layer_weights(self) -> int:
        """One layer's trained weights, unsharded."""
        base = self.shape.matrix_weights + self.shape.vector_weights
        if self.base_trained:
            return base
        return self.shape.adapter_weights

    def recomputed(self, layer: int) -> bool:
        return bool(self.recompute_period) and layer % self.recompute_period == 0

    def saved_by_layers(self, layers: int) -> tuple[int, int]:
        """Bytes that the first `layers` layers leave for backward: activations, and cast weights."""
        if self.recipe.training.activation_offloading:
            # Beside a running layer's input one more is on the device: the first layer's, to which the model's forward
            # refers, or in backward the next one's, which is fetched meanwhile.
            return self.residual_bytes * (0 < layers < self.shape.layers), 0
        recomputed = 0
        if self.recompute_period:  # layers 0, period, 2 * period: rounded up
            recomputed = -(-layers // self.recompute_period)
        others = layers - recomputed
        # Each layer leaves its input [T, hidden]; a recomputed one its products too, where it keeps them.
        activations = (
            layers * self.residual_bytes + recomputed * self.kept_layer_bytes + others * self.saved_layer_bytes
        )
        if layers and not self.base_trained and not self.recompute_period:
            # The first layer's input needs no gradient where the embeddings are frozen, so its norm saves nothing:
            # neither [T, hidden] nor [T, 1] float32.
            activations -= self.residual_bytes + FLOAT32 * self.tokens
        return activations, others * self.cast_layer_bytes

    # Weights of this rank. "sharded" means rank 0's share.

    def shard_of(self, rows: int, columns: int) -> int:
        """Rank 0's weights in a [rows, columns] tensor. FSDP2 shards rows, and rounds rank 0's up."""
        return -(-rows // self.shards) * columns

    @cached_property
    def sharded_end_weights(self) -> int:
        """Embeddings and head [vocabulary, hidden], counted once where they are tied, and the last norm [hidden]."""
        shape = self.shape
        return self.shard_of(shape.vocabulary, shape.hidden) * (2 - shape.tied) + self.shard_of(shape.hidden, 1)

    @cached_property
    def sharded_matrix_weights(self) -> int:
        """One layer's matrices [outputs, inputs]."""
        return sum(self.shard_of(linear.outputs, linear.inputs) for linear in self.shape.linears.values())

    @cached_property
    def sharded_vector_weights(self) -> int:
        """One layer's biases [outputs], two norms [hidden] and two norms of heads [head_size]."""
        shape = self.shape
        biases = sum(self.shard_of(linear.outputs, 1) for linear in shape.linears.values() if linear.bias)
        return biases + 2 * self.shard_of(shape.hidden, 1) + 2 * self.shard_of(shape.head_size, 1) * shape.normed_heads

    @cached_property
    def trained_weights(self) -> int:
        """The whole model's trained weights on this rank."""
        if self.base_trained:
            layer = self.sharded_matrix_weights + self.sharded_vector_weights
            return self.shape.layers * layer + self.sharded_end_weights
        return self.shape.layers * sum(
            self.shard_of(linear.rank, linear.inputs) + self.shard_of(linear.outputs, linear.rank)
            for linear in self.shape.linears.values()
        )

    @cached_property
    def frozen_layer_bytes(self) -> int:
        """One layer's base weights under adapters: bfloat16, or packed 4-bit matrices and their scales."""
        vectors = HALF * self.sharded_vector_weights
        if self.float8:  # never sharded: one byte a weight, and a float32 scale for each output
            return vectors + sum(linear.weights + FLOAT32 * linear.outputs for linear in self.shape.linears.values())
        if not self.four_bit:
            return vectors + HALF * self.sharded_matrix_weights
        assert self.recipe.quantization is not None
        double = self.recipe.quantization.bnb_4bit_use_double_quant
        # Two weights a byte, sharded; scales are not parameters, so every rank has them all.
        return vectors + sum(
            -(-linear.weights // 2 // self.shards) + linear.scale_bytes(double)
            for linear in self.shape.linears.values()
        )

    @cached_property
    def parameter_bytes(self) -> int:
        """The whole model's weights and buffers on this rank."""
        inverse_frequencies = FLOAT32 * self.shape.head_size  # the rotary embedding's two [head_size / 2] float32
        trained = self.trained_weight_bytes * self.trained_weights
        if self.base_trained:
            return trained + inverse_frequencies
        frozen = HALF * self.sharded_end_weights + self.shape.layers * self.frozen_layer_bytes
        return frozen + trained + inverse_frequencies

    @cached_property
    def static(self) -> dict[str, int]:
        """Memory that lives all through a training: weights, the optimizer's moments, workspaces, DDP's buckets.

        cuBLAS has a workspace for each thread that multiplies matrices: forward's and backward's.
        """
        moments = OPTIMIZERS[self.recipe.training.optim].state_bytes(self.trained_weight_bytes) * self.trained_weights
        workspaces = 2 * CUBLAS_WORKSPACE_HOPPER
        return {c.PARAMETERS: self.parameter_bytes, c.OPTIMIZER_STATE: moments, c.OTHER: workspaces} | self.ddp_buckets

    # Gathered weights.

    @cached_property
    def gathered_layer_bytes(self) -> int:
        """One unsharded layer in bfloat16; 4-bit matrices take half a byte a weight."""
        shape = self.shape
        if self.base_trained:
            return HALF * self.trained_layer_weights
        matrices = HALF * shape.matrix_weights
        if self.four_bit:
            matrices = shape.matrix_weights // 2
        return matrices + HALF * (shape.vector_weights + shape.adapter_weights)

    @cached_property
    def gathered_head_bytes(self) -> int:
        """The unsharded head [vocabulary, hidden] bfloat16, if FSDP2 gathers it by itself; 0 if it is tied."""
        return HALF * self.shape.embedding_weights * (self.sharded and not self.shape.tied)

    @cached_property
    def always_gathered_bytes(self) -> int:
        """The last norm [hidden] and tied embeddings [vocabulary, hidden], bfloat16: gathered during the whole step."""
        return HALF * (self.shape.hidden + self.shape.embedding_weights * self.shape.tied) * self.sharded

    def unresharded_bytes(self, layers: int) -> int:
        """`layers` layers and untied embeddings, if forward leaves them gathered for backward; else 0."""
        if self.strategy.reshard_after_forward:
            return 0
        return layers * self.gathered_layer_bytes + HALF * self.shape.embedding_weights * (not self.shape.tied)

    # Gradients.

    @cached_property
    def gradient_bytes(self) -> int:
        """The whole model's gradients on this rank, as the optimizer reads them."""
        return self.trained_weight_bytes * self.trained_weights

    @cached_property
    def unsharded_gradient_bytes(self) -> int:
        """The whole model's unsharded gradients in float32, which FSDP2 adds up until a step's last micro-batch."""
        weights = self.trained_layer_weights * self.shape.layers
        if self.base_trained:
            weights = self.shape.total_weights
        return FLOAT32 * weights * self.keeps_gradients

    @cached_property
    def ddp_buckets(self) -> dict[str, int]:
        """DDP's buckets. Gradients are views into them, so they live from beginning to end."""
        if self.data_parallel:
            return {c.GRADIENTS: self.gradient_bytes}
        return {}

    def ddp_private_gradient_bytes(self, layers: int) -> int:
        """Gradients outside DDP's buckets, for `layers` layers and the embeddings.

        A micro-batch without reduction makes its own tensors. The reducing backward copies them into the buckets, the
        last layer first.
        """
        if not self.data_parallel or self.micro_steps == 1:
            return 0
        embeddings = self.shape.embedding_weights * self.base_trained
        return self.trained_weight_bytes * (self.trained_layer_weights * layers + embeddings)

    @cached_property
    def head_gradient_bytes(self) -> int:
        """The head's gradient [vocabulary, hidden], unsharded until backward ends; 0 if it is reduced at once."""
        if not self.base_trained or self.gathered_head_bytes:
            return 0
        if self.sharded or self.casts_once:
            return HALF * self.shape.embedding_weights
        return self.trained_weight_bytes * self.shape.embedding_weights

    def reduced_weights(self, layers: int) -> int:
        """This rank's weights that have gradients after backward for an untied head and `layers` layers."""
        head = self.shape.embedding_weights * bool(self.base_trained and self.gathered_head_bytes)
        return (head + layers * self.trained_layer_weights) // self.shards

    def reduction_buffer_bytes(self, layers: int) -> int:
        """After backward for `layers` layers: the latest reduce-scatter's float32 input, and HSDP's buffers."""
        latest = self.trained_layer_weights
        if not layers:  # the head's, as far as it is reduced by itself
            latest = self.reduced_weights(0) * self.shards
        return FLOAT32 * (latest + self.reduced_weights(layers) * self.keeps_all_reduce_buffers) * self.sharded
