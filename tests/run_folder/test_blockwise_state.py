"""Moments of one byte move between bitsandbytes' blocks and blocks of rows: to the bit where these are the same."""

from __future__ import annotations

from pathlib import Path

import bitsandbytes.functional
import pytest
import torch
from torch import Tensor, nn

from finetune.errors import FinetuneError
from finetune.model.optimizer import make_optimizer
from finetune.model.optimizers.blockwise_adamw import BlockwiseAdamW
from finetune.run_folder import trained_tensors
from finetune.run_folder.trained_tensors import load_optimizer, optimizer_tensors
from tests.support.runs.stepping import float32_recipe

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
PRIME = 257  # a row without a divisor: one byte for bitsandbytes, float32 for us


class Network(nn.Module):
    """Matrices whose rows are a block of 256, not a multiple of it, and none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.same = nn.Linear(512, 16, bias=False)
        self.other = nn.Linear(96, 64, bias=False)
        self.prime = nn.Linear(PRIME, 17, bias=False)
        self.norm = nn.LayerNorm(64, bias=False)


def by_rows(network: Network) -> torch.optim.Optimizer:
    return BlockwiseAdamW(network.parameters(), seed=1, in_float32=[network.norm.weight], **SETTINGS)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    draws = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for parameter in network.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draws)
        optimizer.step()


def decoded(state: dict[str, Tensor], moment: int, row: int) -> Tensor:
    """Values by the definition: the book's, times the scale of the block that the element's index falls into."""
    codes = state[f"state{moment}"]
    if codes.dtype == torch.float32:
        return codes.reshape(-1).double()
    scales = state[f"absmax{moment}"]
    block = 256 if scales.ndim == 1 else row // scales.shape[1]
    book = bitsandbytes.functional.create_dynamic_map(signed=moment == 1).double()
    of_block = torch.arange(codes.numel()) // block
    return book[codes.reshape(-1).long()] * scales.reshape(-1).double()[of_block]


@pytest.mark.parametrize("towards", ["rows", "bitsandbytes"])
def test_state_moves_between_the_two(towards: str, tmp_path: Path) -> None:
    """Encoded again, a value moves by half of the widest step of its code at most: 0.9 / 64 / 2 of the first moment's
    scale, half as much of the second's."""
    recipe = float32_recipe(tmp_path, optim="adamw_8bit")
    one, other = Network(), Network()
    before, after = by_rows(one), make_optimizer(other, recipe)
    if towards == "rows":
        before, after = make_optimizer(one, recipe), by_rows(other)
    train(one, before, 3)
    load_optimizer(other, after, optimizer_tensors(one, before))
    for name, parameter in one.named_parameters():
        old, new = before.state[parameter], after.state[other.get_parameter(name)]
        assert old["step"] == new["step"] == 3
        assert ("qmap1" in new) == (towards == "bitsandbytes" and "absmax1" in new), "its book, which is ours too"
        if name == "norm.weight":
            assert torch.equal(old["state1"], new["state1"])
            continue
        for moment, step in ((1, 0.9 / 64), (2, 0.9 / 128)):
            values, found = (decoded(state, moment, parameter.shape[-1]) for state in (old, new))
            if name == "same.weight":
                assert torch.equal(old[f"state{moment}"], new[f"state{moment}"])
                assert torch.equal(old[f"absmax{moment}"].view(-1), new[f"absmax{moment}"].view(-1))
            else:
                assert float((values - found).abs().max()) <= 0.501 * step * float(values.abs().max())
                assert float((values - found).abs().max()) > 0 or name == "prime.weight"
    kinds = {
        optimizer.state[model.prime.weight]["state1"].dtype for model, optimizer in ((one, before), (other, after))
    }
    assert kinds == {torch.uint8, torch.float32}
    train(other, after, 1)


def test_a_shard_takes_its_rows_of_flat_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 3 to 10 of 96 elements begin within bitsandbytes' second block of 256."""
    one, full, other = Network(), Network(), Network()
    before = make_optimizer(one, float32_recipe(tmp_path, optim="adamw_8bit"))
    train(one, before, 2)
    saved = {key: value for key, value in optimizer_tensors(one, before).items() if key.startswith("other.")}
    whole, part = by_rows(full), by_rows(other)
    load_optimizer(full, whole, saved)
    monkeypatch.setattr(
        trained_tensors,
        "local_part",
        lambda tensor: (tensor[3:11], 3 * tensor.shape[1]) if tensor.ndim == 2 else (tensor, 0),
    )
    load_optimizer(other, part, saved)
    for entry in ("state1", "absmax1", "state2", "absmax2"):
        expected, found = whole.state[full.other.weight][entry], part.state[other.other.weight][entry]
        assert torch.equal(found[3:11], expected[3:11]), entry
        assert not found[:3].any(), entry


def test_scales_of_other_blocks_are_refused(tmp_path: Path) -> None:
    one, other = Network(), Network()
    before, after = by_rows(one), by_rows(other)
    train(one, before, 1)
    tensors = optimizer_tensors(one, before)
    tensors["same.weight:absmax2"] = tensors["same.weight:absmax2"][:7]
    with pytest.raises(FinetuneError, match=r"same\.weight:absmax2: shape \(7, 2\) does not fit"):
        load_optimizer(other, after, tensors)
