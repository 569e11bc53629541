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
from finetune.architecture.own_layers.norm_and_gate import tiled_mlps
from finetune.errors import FinetuneError


def tile_mlps(model: nn.Module, tokens: int) -> None:
    """Let every decoder layer's own gated MLP run over `tokens` tokens at a time. Experts stay as they are.

    After `compute_norms_and_gates`, whose trial shows that an MLP computes each token alone. Only instances change.
    Raises FinetuneError if no layer has such an MLP.
    """
    for layer in model.modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        for child in layer.children():
            mlp: Any = child
            if "finetune_gate" in vars(mlp):
                mlp.finetune_untiled = mlp.forward.__func__
                mlp.finetune_tile = MethodType(mlp.finetune_untiled, mlp)
                mlp.finetune_tile_tokens, mlp.forward = tokens, MethodType(_forward, mlp)
    if not tiled_mlps(model):
        raise FinetuneError(
            f"training.mlp_tile_tokens: {tokens}: no layer of this model has a dense gated MLP that the kit knows; "
            "leave it out"
        )


def _forward(mlp: Any, hidden: Tensor) -> Tensor:
    """[..., width] to [..., width]."""
    flat = hidden.reshape(-1, hidden.shape[-1])  # [tokens, width]
    trained = [each for each in mlp.parameters() if each.requires_grad]
    if torch.is_grad_enabled() and (flat.requires_grad or trained):
        kept = _Kept.apply(mlp, product_dtype(flat), flat, *trained)  # type: ignore[no-untyped-call]
        output: Tensor = _Output.apply(kept, flat.detach(), mlp)  # type: ignore[no-untyped-call]
    else:
        output = _run_tiles(mlp, flat)
    return output.view(hidden.shape)


def _run_tiles(mlp: Any, flat: Tensor) -> Tensor:
    output: Tensor | None = None
    for start in range(0, flat.shape[0], mlp.finetune_tile_tokens):
        tile = mlp.finetune_tile(flat[start : start + mlp.finetune_tile_tokens])
        if output is None:
            output = tile.new_empty(flat.shape)
        output[start : start + tile.shape[0]] = tile.detach()
        del tile  # before the next one is there
    assert output is not None  # a micro-batch has a token
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
        trained = [each for each in mlp.parameters() if each.requires_grad]
        grad_flat = torch.empty_like(flat) if ctx.needs_input_grad[2] else None
        # In float32, or the weight's own format if that is wider: there may be 100 tiles.
        sums = [torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in trained]
        device, dtype, enabled = ctx.casting
        with torch.enable_grad(), torch.autocast(device, dtype, enabled):
            for start in range(0, flat.shape[0], mlp.finetune_tile_tokens):
                rows = slice(start, start + mlp.finetune_tile_tokens)
                tile = flat[rows].detach().requires_grad_(grad_flat is not None)
                wanted = [tile, *trained] if grad_flat is not None else trained
                output = mlp.finetune_tile(tile)
                gradients = list(torch.autograd.grad(output, wanted, grad_output[rows], allow_unused=True))
                del output
                if grad_flat is not None:
                    grad_flat[rows] = gradients.pop(0)
                for total, gradient in zip(sums, gradients, strict=True):
                    if gradient is not None:
                        total.add_(gradient)
                del gradients, tile
        found = [total.to(each.dtype) for total, each in zip(sums, trained, strict=True)]
        return None, None, grad_flat, *found


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: Tensor, flat: Tensor, mlp: Any) -> Tensor:
        # As backward computes each tile. A recomputed layer's hooks must not keep what a tile saves.
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved), torch.enable_grad():
            return _run_tiles(mlp, flat.detach().requires_grad_())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return grad_output, None, None
