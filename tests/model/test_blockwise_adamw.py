"""AdamW with moments of one byte: each update is the definition's, on a shard as on the full tensor."""

from __future__ import annotations

from typing import Any

import bitsandbytes.functional
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from finetune.model.optimizers import blockwise_adamw
from finetune.model.optimizers.blocks import block_length, book_on, decode, encode
from finetune.model.optimizers.blockwise_adamw import BlockwiseAdamW

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SHAPE = (64, 96)  # blocks of 96


def some(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(start: Tensor, gradients: list[Tensor], **changes: Any) -> tuple[Tensor, dict[str, Any]]:
    """The weight after a step of each gradient, and its state."""
    weight = nn.Parameter(start.clone())
    optimizer = BlockwiseAdamW([weight], **({"seed": 1, "in_float32": ()} | SETTINGS | changes))
    for gradient in gradients:
        weight.grad = gradient.clone().to(weight.dtype)
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


@pytest.mark.parametrize("signed", [True, False])
def test_the_book_is_bitsandbytes(signed: bool) -> None:
    theirs = bitsandbytes.functional.create_dynamic_map(signed=signed)
    torch.testing.assert_close(book_on(CPU, signed=signed).values, theirs, rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((4096, 4096), 256),
        ((576, 576), 192),
        ((4096, 16), 16),
        ((8, 64, 96), 96),  # experts [experts, outputs, inputs]
        ((4096,), 0),
        ((63, 64), 0),  # 4,032 elements
        ((64, 4), 0),
        ((4096, 4), 0),
        ((64, 257), 0),  # a prime: blocks of one element
    ],
)
def test_blocks_are_divisors_of_rows(shape: tuple[int, ...], block: int) -> None:
    assert block_length(shape) == block


def nearest(values: np.ndarray, *, signed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales by the definition, over all 256 candidates; of positive second moments 0 is none."""
    book = bitsandbytes.functional.create_dynamic_map(signed=signed).double().numpy()
    blocks = values.reshape(-1, SHAPE[1])
    scales = np.abs(blocks).max(1)
    distance = np.abs(blocks[:, :, None] / scales[:, None, None] - book)
    if not signed:
        distance[..., 0] = np.where(blocks > 0, np.inf, distance[..., 0])
    return distance.argmin(-1).reshape(values.shape), scales


def decoded(state: dict[str, Any], moment: int) -> np.ndarray:
    book = bitsandbytes.functional.create_dynamic_map(signed=moment == 1).double().numpy()
    codes, scales = state[f"state{moment}"].numpy(), state[f"absmax{moment}"].double().numpy()
    assert (codes.dtype, scales.shape) == (np.uint8, (SHAPE[0], 1))
    return book[codes] * scales


def test_an_update_is_the_definitions_in_float64() -> None:
    """Loshchilov and Hutter 2019, algorithm 2, and the nearest of all codes. A value within float32's rounding of the
    middle between two codes may be either: one of ten thousand, and one code apart."""
    gradients = [some(*SHAPE, seed=seed) * 10.0 ** some(1, SHAPE[1], seed=9) for seed in range(3)]
    start, before = trained(some(*SHAPE, seed=5), gradients[:2])
    weight, after = trained(some(*SHAPE, seed=5), gradients)
    gradient, expected = gradients[2].double().numpy(), start.double().numpy()
    mean = 0.9 * decoded(before, 1) + 0.1 * gradient
    square = 0.999 * decoded(before, 2) + 0.001 * gradient**2
    root = np.sqrt(square / (1 - 0.999**3)) + 1e-8
    expected = expected * (1 - 1e-2 * 0.1) - 1e-2 * mean / (1 - 0.9**3) / root
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-5, atol=1e-7)
    for moment, values in ((1, mean), (2, square)):
        codes, scales = nearest(values, signed=moment == 1)
        np.testing.assert_allclose(after[f"absmax{moment}"].numpy().ravel(), scales, rtol=1e-5)
        apart = np.abs(after[f"state{moment}"].numpy().astype(int) - codes)
        assert apart.max() <= 1
        assert apart.mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_is_updated_as_the_full_tensor_is(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, in chunks of 960 elements that begin and end within shards."""
    monkeypatch.setattr(blockwise_adamw, "ROUNDED_CHUNK", 1000)
    gradients = [some(*SHAPE, seed=seed).to(dtype) for seed in range(3)]
    start = some(*SHAPE, seed=5).to(dtype)
    weight, state = trained(start, gradients)
    for first, end in ((0, 13), (13, 50), (50, 64), (64, 64)):

        def rows(tensor: Tensor, first: int = first, end: int = end) -> tuple[Tensor, int]:
            return tensor[first:end], first * tensor.shape[1]

        part, part_state = trained(start, gradients, local_part=rows)
        assert torch.equal(part[first:end], weight[first:end])
        assert torch.equal(part[:first], start[:first]), "rows of another rank"
        for name in ("state1", "state2", "absmax1", "absmax2"):
            assert torch.equal(part_state[name][first:end], state[name][first:end]), name


def test_bfloat16_is_rounded_at_random_by_seed_and_place() -> None:
    """One step moves each weight by the rate: 0.3 of what separates 1 from the next bfloat16 below it."""
    below, ones = 2.0**-8, torch.ones(256, 256, dtype=torch.bfloat16)
    changes: dict[str, Any] = {"lr": 0.3 * below, "weight_decay": 0.0}
    weight, state = trained(ones, [ones], **changes)
    assert set(weight.unique().tolist()) == {1.0, 1 - below}
    assert float((1 - weight.double()).mean()) == pytest.approx(0.3 * below, rel=0.02)
    assert state["absmax1"].dtype == torch.float32
    assert torch.equal(weight, trained(ones, [ones], **changes)[0])
    assert not torch.equal(weight, trained(ones, [ones], seed=2, **changes)[0])


def test_a_small_second_moment_is_not_rounded_to_zero() -> None:
    """An element whose gradient is 1e-4 of its block's largest: 1e-8 in the square, below half the smallest code. Over
    a root of 0 the mean, which a byte does hold, would move the weight by 9e-7 / 1e-8 = 90 times the rate."""
    gradient = torch.full((64, 64), 1e-5)
    gradient[:, 0] = 0.1
    start = torch.zeros(64, 64)
    once, state = trained(start, [gradient], weight_decay=0.0)
    assert decode(state["state2"].view(-1), state["absmax2"].view(-1), 64, book_on(CPU, signed=False)).min() > 0
    twice, _ = trained(start, [gradient, torch.zeros_like(gradient)], weight_decay=0.0)
    assert float((twice - once).abs().max()) < 1e-2


def test_zero_gradients_at_rate_0_change_nothing() -> None:
    """How state is allocated before the first step."""
    weight, state = trained(some(*SHAPE, seed=1), [torch.zeros(SHAPE)], lr=0.0)
    assert torch.equal(weight, some(*SHAPE, seed=1))
    for moment, signed in ((1, True), (2, False)):
        assert not book_on(CPU, signed=signed).values[state[f"state{moment}"].long()].any(), "0 / 0 has another code"


def test_what_is_kept_in_float32_is_torchs() -> None:
    embedding, small = nn.Parameter(some(*SHAPE, seed=1)), nn.Parameter(some(30, 7, seed=2))
    copies = [nn.Parameter(each.detach().clone()) for each in (embedding, small)]
    ours = BlockwiseAdamW([embedding, small], seed=1, in_float32=[embedding], **SETTINGS)
    theirs = torch.optim.AdamW(copies, **SETTINGS)
    for seed in range(4):
        for parameter, copy in zip((embedding, small), copies, strict=True):
            parameter.grad = some(*parameter.shape, seed=seed)
            copy.grad = parameter.grad.clone()
        ours.step()
        theirs.step()
    for parameter, copy in zip((embedding, small), copies, strict=True):
        torch.testing.assert_close(parameter, copy, rtol=1e-6, atol=1e-7)
        assert set(ours.state[parameter]) == {"step", "state1", "state2"}


def test_decoded_moments_are_not_the_state() -> None:
    """The book has 1 and no -1: a block whose largest element is negative decodes to less than its scale, so moments
    saved in float32 would resume with other scales. Codes and scales are saved as they are."""
    book = book_on(CPU, signed=True)
    codes, scales = encode(torch.tensor([0.1, -1.0, 0.5, 0.25]), 4, book)
    _, again = encode(decode(codes.to(torch.uint8), scales, 4, book), 4, book)
    assert float(scales) == 1.0
    assert float(again) == pytest.approx(0.993, abs=1e-3)
