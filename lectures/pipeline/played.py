"""What every stage of the lecture trains: a small model whose layers also sleep, as long on each stage."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.recipe.schema import Data, DataSet, ModelSection, Recipe, Training
from finetune.strategies.pieces import Elsewhere

PLAYED = ("gpipe", "1f1b", "naive")  # those with one run of layers on each stage
LAYERS_A_STAGE = 1
TOKENS, WIDTH, VOCABULARY = 32, 32, 64  # small: what is really computed takes a few milliseconds
BACKWARD_TIMES = 2  # a backward sleeps as many times as long as a forward


@dataclass(frozen=True)
class PlayedStep:
    """What each rank is told."""

    model: str  # folder
    stages: int
    micro_batches: int
    seconds: float  # of one forward of a stage

    def recipe(self, schedule: str) -> Recipe:
        """All weights in float32, one row a micro-batch, nothing recomputed."""
        return Recipe(
            accelerate_config=schedule,
            model=ModelSection(name_or_path=self.model, dtype="float32"),
            lora=None,
            data=Data(train=[DataSet(path="json", data_files="unused.jsonl")], max_length=TOKENS),
            training=Training(
                global_batch_size=self.micro_batches,
                per_device_batch_size=1,
                mixed_precision="no",
                activation_checkpointing=False,
            ),
        )


def save_model(folder: Path, stages: int) -> None:
    """A Llama with as many layers for each stage, at random."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS_A_STAGE * stages,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def let_layers_sleep(model: nn.Module, seconds: float) -> None:
    """Have the layers that this rank holds sleep in forward and in backward: `seconds` of a forward of all of them."""
    held = [
        layer
        for layer in model.modules()
        if isinstance(layer, GradientCheckpointingLayer)
        and not any(isinstance(weight, Elsewhere) for weight in layer.parameters())
    ]
    each = seconds / len(held)

    def forward(*_: Any) -> None:
        time.sleep(each)

    def backward(*_: Any) -> None:
        time.sleep(BACKWARD_TIMES * each)

    for layer in held:
        layer.register_forward_hook(forward)
        layer.register_full_backward_hook(backward)
