"""Linear layers in decoder layers with float8 products: torchao's Float8Linear, by its public functions.

For a weight [outputs, inputs] and hidden states [tokens, inputs] in bfloat16, torchao's recipe ROWWISE_WITH_GW_HP does
this:
- forward: scale and round both to e4m3; each row (a token, an output) has its own scale;
- the input's gradient: scale and round the output's gradient the same way, the weight with one scale;
- the weight's gradient: a product in bfloat16.

So each token's output and input gradient depend on that token alone, and a step's loss and gradients on its rows,
however they are split into micro-batches and ranks. torchao's other recipes scale a whole micro-batch at once, or each
column, and need a multiple of 16 tokens. Packed rows of documents do not have that.

Weights, names, gradients and moments stay as they are, and so do checkpoints and exports. torchao saves input and
weight for backward as given, so memory is as in bfloat16.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import EnvironmentMismatch
from finetune.model.adapter_targets import expert_parameters, linear_layers
from finetune.model.float8.requirements import REMEDY, emulated

SCALING = "rowwise_with_gw_hp"  # by torchao's name
ALIGNED = 16  # inputs and outputs of a product of float8 are multiples of this


def compute_in_float8(model: PreTrainedModel) -> None:
    """Replace those linear layers in place. Their weights are the same parameters.

    Raises EnvironmentMismatch for a mixture of experts, because its experts are not linear layers.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    kind = type(model).__name__
    if expert_parameters(model):
        problem = f"training.mixed_precision: fp8: the experts of {kind} are not linear layers"
        raise EnvironmentMismatch(f"{problem}; {REMEDY}")
    ours = {id(layer) for layer in linear_layers(model).values()}
    chosen = {id(layer) for layer in _inside(model) if id(layer) in ours and is_aligned(layer)}
    if not chosen:
        raise EnvironmentMismatch(f"training.mixed_precision: fp8: no layer of {kind} is of a size for it; {REMEDY}")
    config = replace(Float8LinearConfig.from_recipe_name(SCALING), emulate=emulated())
    convert_to_float8_training(model, module_filter_fn=lambda module, _: id(module) in chosen, config=config)


def _inside(model: nn.Module) -> list[nn.Linear]:
    """The linear layers inside decoder layers, without the head, because the loss computes with that."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return [module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)]


def is_aligned(layer: nn.Linear) -> bool:
    """Whether the sizes of its weight are such that a GPU can multiply it in float8."""
    return layer.in_features % ALIGNED == 0 and layer.out_features % ALIGNED == 0


def computes_in_float8(layer: Any) -> bool:
    """Whether a layer is torchao's, read off the layer: its class has no public name, its settings' class has."""
    return isinstance(layer, nn.Linear) and type(getattr(layer, "config", None)).__name__ == "Float8LinearConfig"


def float8_facts(model: nn.Module) -> dict[str, Any] | None:
    """Facts for the receipt: how many layers compute in float8, by which scales, and how many linear layers do not.

    None if none does.
    """
    layers: list[Any] = list(_inside(model))
    found = [layer for layer in layers if computes_in_float8(layer)]
    if not found:
        return None
    return {
        "layers": len(found),
        "layers_in_16_bits": len(layers) - len(found),
        "scaling": SCALING,
        "emulated": all(layer.config.emulate for layer in found),
    }
