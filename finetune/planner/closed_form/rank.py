"""What one rank holds all through a training, and what each of its layers leaves for backward: bytes, by arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from finetune.planner.closed_form.layer import FLOAT32, HALF, Step, Way, layer_steps
from finetune.planner.closed_form.shape import Shape, shape_of
from finetune.recipe.gpus import Gpus
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.recipe.strategy import read_strategy as _read

CUBLAS = 2 * 32 * 2**20  # workspaces of the two threads that multiply
Parts = dict[str, int]

read_strategy = lru_cache(_read)  # of a few names, thousands of times


@dataclass(frozen=True)
class Job:
    """One recipe on one rank."""

    recipe: Recipe
    config: Mapping[str, Any]
    gpus: Gpus
    strategy: Strategy = field(init=False)
    shape: Shape = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strategy", read_strategy(self.recipe.accelerate_config))
        object.__setattr__(self, "shape", shape_of(self.recipe, self.config))

    @cached_property
    def sharded(self) -> bool:
        return self.strategy.shards_parameters

    @cached_property
    def ranks(self) -> int:
        return self.strategy.rank_count(self.gpus.count * self.gpus.nodes)

    @cached_property
    def shards(self) -> int:
        return self.ranks // self.strategy.replica_count(self.ranks, self.gpus.count) if self.sharded else 1

    @cached_property
    def copied(self) -> bool:
        """Whether reduced gradients are reduced again over copies, in buffers that stay until backward is over. A
        float32 gradient that is a tensor's first is this buffer itself."""
        return self.strategy.replicates and (self.micro_steps > 1 or self.width == HALF)

    @cached_property
    def full(self) -> bool:
        return self.recipe.lora is None

    @cached_property
    def four_bit(self) -> bool:
        return self.recipe.quantization is not None

    @cached_property
    def width(self) -> int:
        """Bytes of a trained weight."""
        return HALF if self.recipe.training.pure_bf16 else FLOAT32

    @cached_property
    def tokens(self) -> int:
        return self.recipe.training.per_device_batch_size * self.recipe.data.max_length

    @cached_property
    def micro_steps(self) -> int:
        training = self.recipe.training
        return math.ceil(training.global_batch_size / (training.per_device_batch_size * self.ranks))

    @cached_property
    def way(self) -> Way:
        apart = self.full and self.width == FLOAT32 and not self.sharded
        return Way(
            tokens=self.tokens,
            rows=self.recipe.training.per_device_batch_size,
            stream=FLOAT32 if apart else HALF,
            trained=self.full,
            wide=not self.full and self.width == FLOAT32 and not self.sharded,
            four_bit=self.four_bit,
            whole_gradients=self.sharded,
        )

    @cached_property
    def steps(self) -> list[Step]:
        return layer_steps(self.shape, self.way)

    @cached_property
    def kept(self) -> int:
        return sum(step.kept for step in self.steps)

    @cached_property
    def casts(self) -> int:
        return sum(step.casts for step in self.steps)

    @cached_property
    def every(self) -> int:
        return int(self.recipe.training.activation_checkpointing)

    def unresharded(self, layers: int) -> int:
        """Bytes of so many layers, and of embeddings that are a unit, where forward leaves them gathered."""
        if self.strategy.reshard_after_forward:
            return 0
        return layers * self.unit + HALF * self.shape.table * (not self.shape.tied)

    def recomputed(self, layer: int) -> bool:
        return bool(self.every) and layer % self.every == 0

    def cut(self, rows: int, columns: int) -> int:
        """Weights of a matrix that rank 0 holds."""
        return -(-rows // self.shards) * columns

    @cached_property
    def trained_of_layer(self) -> int:
        """Weights of a layer that are trained, whole."""
        return self.shape.matrices + self.shape.small if self.full else self.shape.adapters

    @cached_property
    def trained(self) -> int:
        """Weights that are trained, of this rank."""
        shape, rank = self.shape, 0
        if self.full:
            ends = self.cut(shape.vocabulary, shape.hidden) * (1 if shape.tied else 2) + self.cut(shape.hidden, 1)
            return shape.layers * self._base_of_layer() + ends
        for linear in shape.linears.values():
            rank += self.cut(linear.rank, linear.inputs) + self.cut(linear.outputs, linear.rank)
        return shape.layers * rank

    def _base_of_layer(self) -> int:
        shape = self.shape
        matrices = sum(self.cut(linear.outputs, linear.inputs) for linear in shape.linears.values())
        biases = sum(self.cut(linear.outputs, 1) for linear in shape.linears.values() if linear.bias)
        return matrices + biases + 2 * self.cut(shape.hidden, 1) + 2 * self.cut(shape.head, 1) * shape.normed_heads

    @cached_property
    def parameters(self) -> int:
        """Bytes of weights and buffers, of this rank."""
        shape = self.shape
        if self.full:
            return self.width * self.trained + FLOAT32 * shape.head
        ends = self.cut(shape.vocabulary, shape.hidden) * (1 if shape.tied else 2) + self.cut(shape.hidden, 1)
        base = HALF * ends + shape.layers * self._frozen_of_layer()
        return base + self.width * self.trained + FLOAT32 * shape.head

    def _frozen_of_layer(self) -> int:
        if not self.four_bit:
            return HALF * self._base_of_layer()
        shape = self.shape
        found = HALF * (self._base_of_layer() - sum(self.cut(x.outputs, x.inputs) for x in shape.linears.values()))
        for linear in shape.linears.values():
            found += -(-linear.weights // 2 // self.shards) + _scales(self.recipe, linear.weights)
        return found

    @cached_property
    def unit(self) -> int:
        """Bytes of a layer put together from its shards, in the computation's format."""
        shape = self.shape
        if self.full:
            return HALF * self.trained_of_layer
        matrices = shape.matrices // 2 if self.four_bit else HALF * shape.matrices
        return matrices + HALF * (shape.small + shape.adapters)

    @cached_property
    def head(self) -> int:
        """Bytes of the head put together, where it is a unit of its own."""
        return HALF * self.shape.table * (self.sharded and not self.shape.tied)

    @cached_property
    def rest(self) -> int:
        """Bytes of what is put together all the while: the last norm, and a table that is head and embeddings."""
        return HALF * (self.shape.hidden + self.shape.table * self.shape.tied) * self.sharded

    @cached_property
    def head_gradient(self) -> int:
        """Bytes of the head's gradient that stays whole till backward ends; none of a head that is reduced at once."""
        if not self.full or self.head:
            return 0
        return (HALF if self.sharded else self.width) * self.shape.table

    def done(self, layers: int) -> int:
        """Weights of this rank whose gradients are there after backward of a head of its own and of so many layers."""
        head = self.shape.table * bool(self.full and self.head)
        return (head + layers * self.trained_of_layer) // self.shards

    def reducing(self, layers: int) -> int:
        """Bytes of gradients under way after so many layers: what was cut last, and what copies share."""
        latest = self.trained_of_layer if layers else self.done(0) * self.shards
        return FLOAT32 * (latest + self.done(layers) * self.copied) * self.sharded

    @cached_property
    def gradients(self) -> int:
        return self.width * self.trained

    @cached_property
    def again(self) -> bool:
        """Whether gradients are there before backward makes them: of the micro-batch before, or DDP's buckets."""
        return self.micro_steps > 1 or self.strategy.gradient_buckets

    @cached_property
    def buckets(self) -> Parts:
        """DDP's, of which gradients are views: there from the beginning to the end."""
        return {"gradients": self.gradients} if self.strategy.gradient_buckets else {}

    def apart(self, layers: int) -> int:
        """Bytes of gradients beside DDP's buckets: those of micro-batches that are not reduced are tensors of their
        own until the one that is copies them in. `layers` are those it has not come to, and the embeddings with them.
        """
        if not self.strategy.gradient_buckets or self.micro_steps == 1:
            return 0
        return self.width * (self.trained_of_layer * layers + self.shape.table * self.full)

    @cached_property
    def static(self) -> Parts:
        state = OPTIMIZERS[self.recipe.training.optim].state_bytes(self.width) * self.trained
        return {"parameters": self.parameters, "optimizer state": state, "other": CUBLAS} | self.buckets

    def stays(self, layers: int) -> tuple[int, int]:
        """Activations and casts of weights that the first so many layers leave for backward."""
        entering = self.way.stream * self.tokens * self.shape.hidden
        again = -(-layers // self.every) if self.every else 0
        whole = layers - again
        # What the first layer is given needs no gradient where the embeddings are frozen and nothing is recomputed.
        spared = 0 if self.full or self.every or not layers else FLOAT32 * self.tokens * (self.shape.hidden + 1)
        return again * entering + whole * self.kept - spared, whole * self.casts


def _scales(recipe: Recipe, weights: int) -> int:
    """Bytes of what undoes the packing of a 4-bit matrix."""
    assert recipe.quantization is not None
    blocks = -(-weights // 64)
    if not recipe.quantization.bnb_4bit_use_double_quant:
        return FLOAT32 * (blocks + 16)
    return blocks + FLOAT32 * (-(-blocks // 256) + 16 + 256 + 1)
