"""A dense MLP in tiles of tokens: backward holds one tile's wide tensors, not the row's.

Tokens do not see each other in an MLP. In a recomputed layer of Llama 8B its wide tensors take 57 kB a token, and
their gradients 86 kB more: 19 GB for 131,072 tokens, 0.6 for a tile of 4,096. Two linked steps of autograd:

    _Kept    saves x, and in backward computes each tile again, with its gradients
    _Output  computes mlp(x) tile by tile and saves nothing, so the layer's recomputation stops before it

Products run twice for each token, as without tiles; with torch's checkpoint for each tile they would run a third time.
They do too where a norm behind the MLP keeps its input, as in Gemma 3. Weights' gradients leave backward once, summed
in float32, so DDP and FSDP2 see each parameter once. No tile gathers a weight, so ranks with other lengths do not wait.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.architecture.own_layers.lora_linear import product_dtype
from finetune.errors import FinetuneError


def tile_mlps(model: nn.Module, tokens: int) -> None:
    """Let every decoder layer's own gated MLP run over `tokens` tokens at a time. Experts stay as they are.

    After `compute_norms_and_gates`, whose trial shows that an MLP computes each token alone. Only instances change.
    Raises FinetuneError if no layer has such an MLP.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    mlps: list[Any] = [child for layer in layers for child in layer.children() if "finetune_gate" in vars(child)]
    for mlp in mlps:
        mlp.finetune_untiled = mlp.forward.__func__
        mlp.finetune_tile = MethodType(mlp.finetune_untiled, mlp)
        mlp.finetune_tile_tokens, mlp.forward = tokens, MethodType(_forward, mlp)
    if not mlps:
        raise FinetuneError(
            f"training.mlp_tile_tokens: {tokens}: no layer of this model has a dense gated MLP that the kit knows; "
            "leave it out"
        )


def _forward(mlp: Any, hidden: Tensor) -> Tensor:
    """[..., width] to [..., width]."""
    flat = hidden.reshape(-1, hidden.shape[-1])  # [tokens, width]
    trained = [weight for weight in mlp.parameters() if weight.requires_grad]
    if not torch.is_grad_enabled() or not (flat.requires_grad or trained):
        return _run_tiles(mlp, flat).view(hidden.shape)
    kept = _Kept.apply(mlp, product_dtype(flat), flat, *trained)  # type: ignore[no-untyped-call]
    output: Tensor = _Output.apply(kept, flat.detach(), mlp)  # type: ignore[no-untyped-call]
    return output.view(hidden.shape)


def _run_tiles(mlp: Any, flat: Tensor) -> Tensor:
    output = flat.new_empty(flat.shape, dtype=product_dtype(flat))
    for result, tile in zip(*(rows.split(mlp.finetune_tile_tokens) for rows in (output, flat)), strict=True):
        result.copy_(mlp.finetune_tile(tile).detach())
    return output


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mlp: Any, dtype: torch.dtype, flat: Tensor, *trained: Tensor) -> Tensor:
        device = flat.device.type
        ctx.mlp, ctx.casting = mlp, (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.save_for_backward(flat)
        return flat.new_empty((), dtype=dtype).expand(flat.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (flat,), mlp = ctx.saved_tensors, ctx.mlp
        trained = [weight for weight in mlp.parameters() if weight.requires_grad]
        grad_flat = torch.empty_like(flat) if ctx.needs_input_grad[2] else None
        # In float32, or the weight's own format if that is wider: there may be 100 tiles.
        formats = [torch.promote_types(weight.dtype, torch.float32) for weight in trained]
        sums = [torch.zeros_like(weight, dtype=wide) for weight, wide in zip(trained, formats, strict=True)]
        with torch.enable_grad(), torch.autocast(*ctx.casting):
            for start in range(0, flat.shape[0], mlp.finetune_tile_tokens):
                rows = slice(start, start + mlp.finetune_tile_tokens)
                tile = flat[rows].detach().requires_grad_(grad_flat is not None)
                leaves = trained if grad_flat is None else [tile, *trained]
                # The output has no name, so it ends with its gradients.
                gradients: Any = torch.autograd.grad(
                    mlp.finetune_tile(tile), leaves, grad_output[rows], allow_unused=True
                )
                if grad_flat is not None:
                    grad_flat[rows], *gradients = gradients
                for total, gradient in zip(sums, gradients, strict=True):
                    if gradient is not None:
                        total.add_(gradient)
                del gradients, gradient, tile
        return None, None, grad_flat, *(total.to(weight.dtype) for total, weight in zip(sums, trained, strict=True))


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: Tensor, flat: Tensor, mlp: Any) -> Tensor:
        # As backward computes each tile. A recomputed layer's hooks must not keep what a tile saves.
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved), torch.enable_grad():
            return _run_tiles(mlp, flat.detach().requires_grad_())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output, None, None
