"""A frozen linear layer whose products are computed in float8 (e4m3: 3 bits of mantissa, largest number 448).

The weight is quantised once, with a scale for each output. Inputs and output gradients are quantised as they come, with
a scale for each token, so a token's result does not depend on the tokens beside it:

    weight      W[o, i]   = s[o] * W8[o, i]          s = largest of the row / 448, float32
    forward     y[t, o]   = a[t] * s[o] * sum_i x8[t, i] W8[o, i]
    backward    dx[t, i]  = b[t] * sum_o h8[t, o] W8[o, i]            with h = dy * s, so that W8 needs no other scales

Backward treats the rounding of x as the identity. A GPU computes the product of two float8 matrices by
`torch.nn.functional.scaled_mm`, whose kernels take both with the summed side last in memory. So backward copies W8
transposed: 2 bytes a weight of traffic, while a second copy kept would cost as much memory as bfloat16 does. A CPU has
no such product. It multiplies the quantised numbers in float32.

Memory: one byte a weight and four an output. The bytes are a parameter in uint8, because gloo sends no float8.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from finetune.errors import EnvironmentMismatch

FLOAT8 = torch.float8_e4m3fn
LARGEST_PRODUCT_DIFFERENCE = 1e-2  # of a product, relative: bfloat16's rounding is 2e-3, 14-bit sums add as much
MULTIPLE = 16  # of both sides of a weight: the kernels' own condition


def quantise_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [rows, columns] in float8, and the scale of each row, float32 [rows, 1]. Infinities become NaN.

    A row (-1, 2) has the scale 2 / 448. Its numbers become -224 and 448.
    """
    largest = matrix.abs().amax(dim=1, keepdim=True).float()
    # torch.finfo(FLOAT8).max, and a scale for a row of zeros. Literals: with dynamic shapes dynamo makes a symbol of a
    # module's float, which an autograd.Function cannot take in.
    scale = (largest / 448.0).clamp(min=2.0**-100)
    # A quotient is 448 and a rounding of float32 at most. The conversion makes 448 of all below 464, and NaN of others.
    return (matrix / scale).to(FLOAT8), scale


def use_float8(model: nn.Module, device: torch.device, without: nn.Module | None = None) -> None:
    """Quantise the frozen linear layers of a model, in place, on `device`; on meta the structure alone.

    A layer stays as it is if its forward is not torch's or a side is no multiple of 16. A state-space mixer's layers
    stay too, because the mixer reads their weights without calling their forward.

    Args:
        without: The head. It stays too, because its loss computes products of its own.

    Raises EnvironmentMismatch if a GPU's product is wrong.
    """
    checked: set[torch.Size] = set()
    for owner in list(model.modules()):
        for layer in owner.children():
            known: Any = layer
            if type(layer) is not nn.Linear or "forward" in vars(layer) or layer.weight.requires_grad:
                continue
            if layer is without or hasattr(owner, "A_log") or any(side % MULTIPLE for side in layer.weight.shape):
                continue
            weight = known.weight.detach()
            quantised, scale = quantise_rows(weight.to("meta" if weight.is_meta else device))
            known.weight = nn.Parameter(quantised.view(torch.uint8), requires_grad=False)
            known.register_buffer("weight_scale", scale, persistent=False)
            known.packing = {"dtype": weight.dtype}  # the format it was made from
            known.forward = MethodType(_forward, known)
            if known.weight.device.type == "cuda" and known.weight.shape not in checked:
                checked.add(known.weight.shape)
                check_product(known.weight, known.weight_scale)


def check_product(weight: Tensor, scale: Tensor) -> None:
    """Compare a GPU's product with the same numbers multiplied in float32, once for each shape of a weight.

    Both ways of a guard's comparison use this product, so the guard would not see that it is wrong. Raises
    EnvironmentMismatch.
    """
    draw = torch.Generator(weight.device).manual_seed(0)
    hidden = torch.randn(48, weight.shape[1], generator=draw, device=weight.device)
    (left, left_scale), right = quantise_rows(hidden.bfloat16()), weight.view(FLOAT8)
    expected = (left.float() * left_scale) @ (right.float() * scale).T
    product = scaled_product(left, right, left_scale, scale.T, True)
    difference = float((product.float() - expected).norm() / expected.norm())
    if not difference <= LARGEST_PRODUCT_DIFFERENCE:  # NaN too
        raise EnvironmentMismatch(
            f"model.load_in_fp8: this GPU's product of {list(weight.shape)} in float8 differs by {difference:.2g} from "
            "the same numbers multiplied in float32; set it to false, or install another torch"
        )


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    """[..., inputs] to [..., outputs]."""
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    flat = hidden.reshape(-1, hidden.shape[-1])
    result = cast(Tensor, _Product.apply(flat, layer.weight, layer.weight_scale))  # type: ignore[no-untyped-call]
    if layer.bias is not None:
        result = result + layer.bias.to(result.dtype)
    return result.view(*hidden.shape[:-1], result.shape[-1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(weight, scale)
        left, left_scale = quantise_rows(flat)
        return _multiplied(left, weight.view(FLOAT8), left_scale, scale.T, flat.dtype, True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return input_gradient(slope, *ctx.saved_tensors), None, None


def input_gradient(slope: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The gradient of the input [tokens, inputs] from that of the output [tokens, outputs].

    Args:
        weight: uint8 [outputs, inputs], the bytes of W8.
        scale: float32 [outputs, 1].
    """
    left, left_scale = quantise_rows(slope * scale.T.to(slope.dtype))
    ones = torch.ones(1, weight.shape[1], dtype=torch.float32, device=slope.device)
    return _multiplied(left, weight.T.contiguous().view(FLOAT8), left_scale, ones, slope.dtype, False)


def add_input_gradient(layer: Any, result: Tensor, slope: Tensor) -> Tensor:
    """`result` with a layer's `input_gradient` added in place."""
    return result.add_(input_gradient(slope, layer.weight, layer.weight_scale))


def _multiplied(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: Any, fast: bool) -> Tensor:
    """left [rows, sums] times right [columns, sums] transposed, both float8, with their scales [rows, 1], [1, columns].

    Args:
        fast: On Hopper, sum in the tensor cores' own accumulators, with 14 bits. torchao's choice for a forward alone.
    """
    if left.device.type == "cpu":
        return ((left.float() * left_scale) @ (right.float() * right_scale.T).T).to(dtype)
    product: Tensor = scaled_product(left, right, left_scale, right_scale, fast)
    return product.to(dtype)


@torch.library.custom_op("finetune::float8_product", mutates_args=())
def scaled_product(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, fast: bool) -> Tensor:
    """The product on a GPU, in bfloat16. An operator of its own, because torch 2.11's compiler has no rule for
    `scaled_mm`."""
    by_row = F.ScalingType.RowWise
    result: Tensor = F.scaled_mm(
        left,
        right.t(),
        left_scale,
        by_row,
        right_scale.contiguous(),
        by_row,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return result


@scaled_product.register_fake
def _(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, fast: bool) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[0], dtype=torch.bfloat16)
