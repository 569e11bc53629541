"""Frozen layers in float8: the rounding and both products by definition, adapters beside them, what stays as it is."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from finetune.architecture.own_layers import float8_linear
from finetune.architecture.own_layers.float8_linear import (
    FLOAT8,
    input_gradient,
    quantise_rows,
    use_float8,
)
from finetune.architecture.own_layers.lora_linear import OWN, compute_adapters, computed_by, leave_to_peft
from finetune.errors import EnvironmentMismatch
from finetune.model.quantization import float8_layers, unpacked_weight
from tests.support.models.adapted_block import INNER, INPUTS, Block, adapted

CPU = torch.device("cpu")


def codes() -> np.ndarray:
    """All finite numbers of e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa; 1111.111 is NaN."""
    positive = [
        (mantissa / 8 if exponent == 0 else 1 + mantissa / 8) * 2.0 ** (max(exponent, 1) - 7)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    ]
    return np.array(sorted({*positive, *(-number for number in positive)}))


def nearest(numbers: np.ndarray) -> np.ndarray:
    """Each number as the nearest of e4m3's. A number in the middle may be either: random ones are not."""
    known = codes()
    at = np.clip(np.searchsorted(known, numbers), 1, len(known) - 1)
    below, above = known[at - 1], known[at]
    return np.where(numbers - below < above - numbers, below, above)


def by_definition(matrix: Tensor) -> np.ndarray:
    """What a matrix's rows are after quantisation, in float64."""
    numbers = matrix.detach().double().numpy()
    scale = np.float32(np.abs(numbers).max(axis=1, keepdims=True)) / np.float32(448)
    return nearest((matrix.detach().numpy() / scale).astype(np.float64)) * scale.astype(np.float64)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rows_are_rounded_to_the_nearest_number_of_e4m3() -> None:
    matrix = random(40, 300) * torch.logspace(-6, 3, 40)[:, None]
    quantised, scale = quantise_rows(matrix)
    assert (quantised.dtype, scale.dtype, tuple(scale.shape)) == (FLOAT8, torch.float32, (40, 1))
    found = quantised.double().numpy() * scale.double().numpy()
    np.testing.assert_allclose(found, by_definition(matrix), rtol=1e-12)
    assert quantised.float().abs().amax(dim=1).tolist() == [448.0] * 40
    assert len(codes()) == 2 * 126 + 1


def test_a_row_of_zeros_stays_one_and_what_is_not_finite_spoils_its_row_alone() -> None:
    matrix = random(4, 32)
    matrix[0] = 0
    matrix[1, 3], matrix[2, 5] = torch.inf, torch.nan
    quantised, scale = quantise_rows(matrix)
    found = quantised.float() * scale
    assert not found[0].any()
    assert not found[1].isfinite().all()
    assert not found[2].isfinite().all()
    assert found[3].isfinite().all()
    layer = in_float8(nn.Linear(32, 16, bias=False))
    result = layer(matrix)
    assert [bool(row.isfinite().all()) for row in result] == [True, False, False, True]


def in_float8(layer: Any) -> Any:
    holder = nn.Sequential(layer.requires_grad_(False))
    use_float8(holder, CPU)
    return holder[0]


@pytest.mark.parametrize("bias", [False, True])
def test_both_products_are_those_of_the_quantised_numbers(bias: bool) -> None:
    """The forward's weight and the gradient's are one matrix: the scales of outputs go into the gradient's rows."""
    plain = nn.Linear(96, 64, bias=bias)
    layer = in_float8(copy.deepcopy(plain))
    hidden = random(7, 96, seed=1).requires_grad_()
    slope = random(7, 64, seed=2)
    result = layer(hidden)
    (gradient,) = torch.autograd.grad(result, hidden, slope)
    weight = by_definition(plain.weight)
    expected = by_definition(hidden) @ weight.T
    if bias:
        expected += plain.bias.detach().double().numpy()
    np.testing.assert_allclose(result.detach().double().numpy(), expected, rtol=1e-5, atol=1e-5)
    scale = np.float32(plain.weight.detach().abs().amax(dim=1).numpy()) / np.float32(448)
    of_products = by_definition(slope * torch.from_numpy(scale)) @ (weight / scale[:, None].astype(np.float64))
    np.testing.assert_allclose(gradient.double().numpy(), of_products, rtol=1e-4, atol=1e-5)
    # Three bits of mantissa: 2^-4 at most for a number, and a few hundredths for a sum of them.
    exact = slope.double() @ plain.weight.detach().double()
    assert float((gradient.double() - exact).norm() / exact.norm()) < 0.05
    assert float((gradient.double() - exact).norm() / exact.norm()) > 0.005


def test_a_tokens_result_does_not_depend_on_the_tokens_beside_it() -> None:
    layer = in_float8(nn.Linear(64, 48))
    hidden = random(9, 64)
    hidden[4] *= 1e4
    whole = layer(hidden)
    for at in range(9):
        alone = layer(hidden[at : at + 1])[0]
        assert float((alone - whole[at]).abs().max()) < 1e-6 * float(whole[at].abs().max()), at


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_adapters_beside_it_are_pefts(bias: bool, dropout: float) -> None:
    """peft's forward asks the float8 layer; the kit's adds to its products. Outputs and all gradients agree."""
    model = adapted(Block(bias), lora_dropout=dropout)
    use_float8(model, CPU)
    assert len(list(float8_layers(model))) == 3
    compute_adapters(model, unpacked_weight)
    assert computed_by(model, cast=False) == [OWN] * 3
    ours = results(model)
    leave_to_peft(model, "to compare")
    theirs = results(model)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 + 6
    for name, each in theirs.items():
        # A sum in another order may be rounded to the other neighbour in float8, so a few elements differ.
        difference = float((ours[name] - each).norm() / each.norm())
        assert difference < 2e-3, (name, difference)


def results(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(0)
    hidden = random(11, INPUTS, seed=3).requires_grad_()
    output = model(hidden)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    gradients = torch.autograd.grad(output, [hidden, *trained.values()], random(*output.shape, seed=4))
    return dict(zip(("output", "input", *trained), (output.detach(), *gradients), strict=True))


def test_recomputed_is_bitwise_kept() -> None:
    model = adapted(Block(False))
    use_float8(model, CPU)
    compute_adapters(model, unpacked_weight)
    hidden = random(11, INPUTS, seed=3).requires_grad_()
    kept = torch.autograd.grad(model(hidden).sum(), hidden)
    again = torch.autograd.grad(checkpoint(model, hidden, use_reentrant=False).sum(), hidden)
    assert torch.equal(kept[0], again[0])


def test_what_stays_as_it_is() -> None:
    class Mixer(nn.Module):
        """Reads its layer's weight past the forward, as state-space models do."""

        def __init__(self) -> None:
            super().__init__()
            self.A_log, self.dt_proj = nn.Parameter(torch.zeros(1)), nn.Linear(32, 32)

    class Other(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return F.linear(hidden, 2 * self.weight)

    model = nn.ModuleDict(
        {
            "plain": nn.Linear(32, 48), "odd": nn.Linear(32, 40), "trained": nn.Linear(32, 32), "mixer": Mixer(),
            "other": Other(32, 32), "embedding": nn.Embedding(32, 32), "head": nn.Linear(32, 64),
        }
    ).requires_grad_(False)  # fmt: skip
    model["trained"].requires_grad_(True)
    use_float8(model, CPU, without=model["head"])
    assert list(float8_layers(model)) == [model["plain"]]


@pytest.mark.parametrize("device", [CPU, torch.device("meta")])
def test_a_weight_takes_a_byte_and_an_output_four(device: torch.device) -> None:
    with device:
        model = nn.Sequential(nn.Linear(INPUTS, INNER, bias=False, dtype=torch.bfloat16)).requires_grad_(False)
    use_float8(model, device)
    weight, scale = model[0].weight, model[0].weight_scale
    assert (weight.dtype, weight.device.type, weight.nbytes) == (torch.uint8, device.type, INPUTS * INNER)
    assert (scale.dtype, scale.device.type, scale.nbytes) == (torch.float32, device.type, 4 * INNER)
    assert not weight.requires_grad
    assert "0.weight_scale" not in model.state_dict()


def test_a_gpus_product_is_the_librarys_public_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for its kernel, which a CPU has not, by torch's documented meaning."""

    def scaled_mm(
        left: Tensor, right: Tensor, left_scale: Any, left_by: Any, right_scale: Any, right_by: Any, **more: Any
    ) -> Tensor:
        assert left_by == right_by == F.ScalingType.RowWise
        assert (left.stride(1), right.stride(0)) == (1, 1)  # both with the summed side last in memory
        assert (tuple(left_scale.shape), tuple(right_scale.shape)) == ((len(left), 1), (1, right.shape[1]))
        assert right_scale.is_contiguous()
        seen.append(more)
        return ((left.float() * left_scale) @ (right.float() * right_scale)).to(more["output_dtype"])

    seen: list[dict[str, Any]] = []
    layer = in_float8(nn.Linear(96, 64, bias=False))
    hidden, slope = random(7, 96, seed=1), random(7, 64, seed=2)
    expected = layer(hidden), input_gradient(slope, layer.weight, layer.weight_scale)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)

    def on_gpu(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: Any, fast: bool) -> Tensor:
        return float8_linear.scaled_product(left, right, left_scale, right_scale, fast).to(dtype)

    monkeypatch.setattr(float8_linear, "_multiplied", on_gpu)
    found = layer(hidden), input_gradient(slope, layer.weight, layer.weight_scale)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-8, atol=1e-3)  # rounded to bfloat16
    assert [each["use_fast_accum"] for each in seen] == [True, False]
    assert {each["output_dtype"] for each in seen} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("fault", "refused"),
    [(lambda y: y, False), (lambda y: y * 1.05, True), (lambda y: y.flip(0), True), (lambda y: y * float("nan"), True)],
    ids=["right", "a scale", "rows", "NaN"],
)
def test_a_gpus_product_that_is_wrong_is_refused(fault: Any, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, fast: bool) -> Tensor:
        return fault((left.float() * left_scale) @ (right.float() * right_scale.T).T).bfloat16()

    monkeypatch.setattr(float8_linear, "scaled_product", product)
    layer = in_float8(nn.Linear(96, 64, bias=False))
    with pytest.raises(EnvironmentMismatch, match=r"product of \[64, 96\]") if refused else nullcontext():
        float8_linear.check_product(layer.weight, layer.weight_scale)


def test_torch_takes_these_shapes_and_formats() -> None:
    """Its own checks of `scaled_mm`, on tensors without data."""
    with torch.device("meta"):
        left, right = torch.empty(7, 96, dtype=FLOAT8), torch.empty(64, 96, dtype=FLOAT8)
        left_scale, right_scale = torch.empty(7, 1), torch.empty(1, 64)
    result = F.scaled_mm(
        left, right.t(), left_scale, F.ScalingType.RowWise, right_scale, F.ScalingType.RowWise,
        output_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
    fake = float8_linear.scaled_product(left, right, left_scale, right_scale, True)
    assert (fake.shape, fake.dtype) == (result.shape, result.dtype) == ((7, 64), torch.bfloat16)
    whole = float8_linear._multiplied(left, right, left_scale, right_scale, torch.float32, True)
    assert (whole.shape, whole.dtype, whole.device.type) == ((7, 64), torch.float32, "meta")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
def test_a_compiled_block_computes_the_same() -> None:
    model = adapted(Block(False))
    use_float8(model, CPU)
    compute_adapters(model, unpacked_weight)
    expected = results(model)
    # As decoder layers are compiled. Then dynamo makes a symbol of a module's float.
    found = results(torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True))
    for name, each in expected.items():
        name = name if name in found else f"_orig_mod.{name}"
        torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-4)
