"""AdamW in bfloat16 with random rounding: unbiased, the same on every copy and shard, and it learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from finetune.model.optimizers import rounded_adamw
from finetune.model.optimizers.random_bits import key_of, random_bits
from finetune.model.optimizers.rounded_adamw import Range, RoundedAdamW, places_of

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def trained(values: Tensor, gradients: list[Tensor], seed: int = 1, **changes: Any) -> tuple[Tensor, Any]:
    """The weight after a step of each gradient, and its optimizer."""
    weight = nn.Parameter(values.clone())
    optimizer = RoundedAdamW([weight], seed=seed, **(SETTINGS | changes))
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach(), optimizer


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_bits_are_the_hash_of_key_and_index() -> None:
    """Against numpy's unsigned numbers, which wrap around by definition."""
    key = key_of(1, 2, 3)
    found = random_bits(key, 1000, 64, CPU).numpy().view(np.uint32)
    with np.errstate(over="ignore"):
        x = np.arange(1000, 1064, dtype=np.uint32) * np.uint32(key & 0xFFFFFFFF | 1) + np.uint32(key >> 32)
        x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
        x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
        x ^= x >> np.uint32(16)
    assert found.tolist() == x.tolist()


def test_a_key_is_of_all_its_numbers_in_order() -> None:
    keys = [key_of(*numbers) for numbers in ((1, 2), (2, 1), (1, 2, 0), (0, 1, 2), (1, 3), (1,))]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 1 << 64 for key in keys)


def test_every_bit_is_set_half_the_time_and_steps_are_independent() -> None:
    count = 1 << 16
    first, second = (random_bits(key_of(7, step), 0, count, CPU).numpy().view(np.uint32) for step in (1, 2))
    for bits in (first, second, first ^ second, first[1:] ^ first[:-1]):
        shares = [float((bits >> place & 1).mean()) for place in range(32)]
        assert max(abs(share - 0.5) for share in shares) < 0.01  # five standard deviations


def test_what_is_rounded_is_right_in_the_mean_and_a_neighbour() -> None:
    """One step from zero moments moves each weight by lr: 0.3 of what separates 1 from the next bfloat16 below it."""
    below = 2.0**-8
    weight, _ = trained(
        torch.ones(100_000, dtype=torch.bfloat16), [torch.ones(100_000).bfloat16()], lr=0.3 * below, weight_decay=0.0
    )
    assert set(weight.tolist()) == {1.0, 1 - below}
    assert float((1 - weight.double()).mean()) == pytest.approx(0.3 * below, rel=0.02)
    nearest, _ = torch_trained(torch.ones(4, dtype=torch.bfloat16), [torch.ones(4).bfloat16()], lr=0.3 * below)
    assert nearest.tolist() == [1.0] * 4, "torch's own loses it"


def torch_trained(values: Tensor, gradients: list[Tensor], **changes: Any) -> tuple[Tensor, Any]:
    weight = nn.Parameter(values.clone())
    optimizer = torch.optim.AdamW([weight], fused=True, **(SETTINGS | changes))
    for gradient in gradients:
        weight.grad = gradient.clone().to(weight.dtype)
        optimizer.step()
    return weight.detach(), optimizer


def test_in_float32_it_is_torchs() -> None:
    gradients = [some(30, 7, seed=seed, dtype=torch.float32) for seed in range(5)]
    ours, its = trained(some(30, 7, dtype=torch.float32), gradients)
    theirs, others = torch_trained(some(30, 7, dtype=torch.float32), gradients)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    for mine, other in zip(its.state.values(), others.state.values(), strict=True):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine[name], other[name], rtol=1e-6, atol=1e-9)


def test_each_step_is_float32s_rounded_once() -> None:
    """From the same bfloat16 state: every weight and moment is one of the two neighbours of what float32 gives."""
    values, gradient = some(1000), some(1000, seed=3)
    _, optimizer = trained(values, [some(1000, seed=2)])
    ((weight, state),) = optimizer.state.items()
    exact = {"weight": weight.detach().double(), **{name: state[name].double() for name in ("exp_avg", "exp_avg_sq")}}
    g = gradient.double()
    exact["exp_avg"] = 0.9 * exact["exp_avg"] + 0.1 * g
    exact["exp_avg_sq"] = 0.999 * exact["exp_avg_sq"] + 0.001 * g * g
    root = (exact["exp_avg_sq"] / (1 - 0.999**2)).sqrt() + 1e-8
    exact["weight"] = exact["weight"] * (1 - 1e-5) - 1e-3 * exact["exp_avg"] / (1 - 0.9**2) / root
    weight.grad = gradient
    optimizer.step()
    for name, found in {"weight": weight.detach(), **{key: state[key] for key in ("exp_avg", "exp_avg_sq")}}.items():
        off = (found.double() - exact[name]).abs() / exact[name].abs()
        assert float(off.max()) < 2.0**-7, name  # the distance of neighbours
        assert float(off.max()) > 2.0**-9, "rounded to the nearest"


def test_the_second_moment_shrinks() -> None:
    gradients = [torch.ones(4096).bfloat16()] + [torch.zeros(4096).bfloat16()] * 300
    for train, close in ((trained, True), (torch_trained, False)):
        _, optimizer = train(torch.ones(4096).bfloat16(), gradients)
        (state,) = optimizer.state.values()
        assert (float(state["exp_avg_sq"].double().mean()) == pytest.approx(0.001 * 0.999**300, rel=0.02)) == close


def test_the_same_seed_gives_the_same_bits_and_another_others() -> None:
    gradients = [some(500, seed=seed) for seed in range(3)]
    first, again, other = (trained(some(500), gradients, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_two_tensors_of_one_value_are_rounded_apart() -> None:
    weights = [nn.Parameter(torch.ones(500).bfloat16()) for _ in range(2)]
    optimizer = RoundedAdamW(weights, seed=1, **SETTINGS)
    for weight in weights:
        weight.grad = torch.ones(500).bfloat16()
    optimizer.step()
    assert not torch.equal(*weights)


def test_a_shard_is_rounded_as_the_full_tensor_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of eight, so that shards begin and end within one."""
    monkeypatch.setattr(rounded_adamw, "ROUNDED_CHUNK", 8)
    values, gradients = some(37), [some(37, seed=seed) for seed in range(3)]
    full, _ = trained(values, gradients)
    for start, end in ((0, 13), (13, 26), (26, 37), (5, 5)):
        part, _ = trained(
            values[start:end],
            [gradient[start:end] for gradient in gradients],
            local_part=lambda tensor, start=start: (tensor, start),
        )
        assert torch.equal(part, full[start:end])


def test_zero_gradients_at_rate_0_change_nothing() -> None:
    """How state is allocated before the first step."""
    weight, optimizer = trained(some(1000), [torch.zeros(1000).bfloat16()], lr=0.0)
    assert torch.equal(weight, some(1000))
    (state,) = optimizer.state.values()
    assert not state["exp_avg"].any()
    assert state["step"].device == CPU


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    idle, used = (nn.Parameter(some(10)) for _ in range(2))
    optimizer = RoundedAdamW([idle, used], seed=1, **SETTINGS)
    used.grad = some(10, seed=1)
    optimizer.step()
    assert torch.equal(idle.detach(), some(10))
    assert idle not in optimizer.state


def test_a_flat_tensor_of_several_weights_is_rounded_as_they_are() -> None:
    """An engine's partition: the end of one weight, the beginning of another, and padding."""
    weights = [nn.Parameter(some(30, seed=seed)) for seed in range(2)]
    gradients = [some(30, seed=seed) for seed in (2, 3)]
    optimizer = RoundedAdamW(weights, seed=1, **SETTINGS)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    flat = nn.Parameter(torch.cat([some(30)[20:], some(30, seed=1)[:12], torch.ones(5).bfloat16()]))
    flat.grad = torch.cat([gradients[0][20:], gradients[1][:12], torch.ones(5).bfloat16()])
    by_engine = RoundedAdamW(weights, seed=1, **SETTINGS)
    places = places_of(by_engine, nn.ParameterList(weights))
    by_engine.round_as([(flat, Range(places["0"], 20, 0, 10)), (flat, Range(places["1"], 0, 10, 22))])
    by_engine.param_groups[0]["params"] = [flat]
    optimizer.step()
    by_engine.step()
    assert torch.equal(flat.detach(), torch.cat([weights[0][20:], weights[1][:12], torch.ones(5).bfloat16()]))
