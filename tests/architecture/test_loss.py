"""The chunked loss against torch's own, in float64, for heads of every kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from finetune.architecture import loss as loss_module
from finetune.architecture.loss import AS_IT_IS, LogitTransform, OwnRows, chunk_rows, summed_cross_entropy
from finetune.architecture.operations import nested_tensors
from finetune.measure.phases import Phases
from finetune.planner.trace.recorder import OnOperations
from finetune.tokens.tokenizer import IGNORE
from tests.support.stand_ins import addmm_stand_in
from tests.support.stand_ins.pretend_cuda import pretended_cuda

VOCABULARY, HIDDEN = 97, 32
ALL, SUPERVISED = 100, 91  # positions in `inputs`


def inputs(dtype: torch.dtype, *, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(2, 50, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    offset = torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, VOCABULARY, (2, 50), generator=generator)
    targets[0, :9] = IGNORE
    return hidden, weight, offset, targets


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform = AS_IT_IS
) -> tuple[Tensor, list[Tensor]]:
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    logits = transform.inner * F.linear(leaves[0], leaves[1], leaves[2] if bias is not None else None)
    logits = logits if transform.outer is None else transform.outer * logits.tanh()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss, list(torch.autograd.grad(loss * 0.3, leaves))


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs).norm() / theirs.norm())


def positions(targets: Tensor) -> Tensor:
    return (targets.flatten() != IGNORE).nonzero().flatten()


@pytest.mark.parametrize("indexed", [False, True], ids=["all positions", "supervised alone"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", [1, 8, 100, 1000])  # 8: the last chunk is not a whole one
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bound: float, tokens_per_chunk: int, bias: bool, indexed: bool
) -> None:
    monkeypatch.setattr(loss_module, "chunk_rows", lambda vocabulary: tokens_per_chunk)
    hidden, weight, offset, targets = inputs(dtype, bias=bias)
    assert (targets.numel(), len(positions(targets))) == (ALL, SUPERVISED)
    expected, gradients = reference(hidden, weight, offset, targets)
    loss = summed_cross_entropy(hidden, weight, targets, offset, positions(targets) if indexed else None)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert abs(loss.item() / expected.item() - 1) < (1e-6 if dtype == torch.float32 else 1e-3)
    (loss * 0.3).backward()
    for ours, theirs in zip([x for x in (hidden, weight, offset) if x is not None], gradients, strict=True):
        assert ours.grad is not None
        assert relative(ours.grad, theirs) < bound


@pytest.mark.parametrize(
    "transform", [LogitTransform(0.25), LogitTransform(-0.5), LogitTransform(1 / 3, 3.0), LogitTransform(2.0, 0.7)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_scaled_and_capped_logits(monkeypatch: pytest.MonkeyPatch, transform: LogitTransform, bias: bool) -> None:
    monkeypatch.setattr(loss_module, "chunk_rows", lambda vocabulary: 8)
    hidden, weight, offset, targets = inputs(torch.float32, bias=bias)
    expected, gradients = reference(hidden, weight, offset, targets, transform)
    assert expected.item() != pytest.approx(reference(hidden, weight, offset, targets)[0].item(), rel=0.01)
    loss = summed_cross_entropy(hidden, weight, targets, offset, positions(targets), transform)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    with torch.no_grad():
        evaluated = summed_cross_entropy(hidden, weight, targets, offset, None, transform)
    assert evaluated.item() == pytest.approx(expected.item(), rel=1e-6)
    (loss * 0.3).backward()
    for ours, theirs in zip([x for x in (hidden, weight, offset) if x is not None], gradients, strict=True):
        assert ours.grad is not None
        assert relative(ours.grad, theirs) < 1e-6


@pytest.mark.parametrize("transform", [AS_IT_IS, LogitTransform(1 / 3, 3.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("tokens_per_chunk", [8, 1000])
def test_rows_that_stand_in_the_heads(
    monkeypatch: pytest.MonkeyPatch, tokens_per_chunk: int, transform: LogitTransform
) -> None:
    """Against a head that is put together first; those rows are targets too, and the head itself learns nothing."""
    monkeypatch.setattr(loss_module, "chunk_rows", lambda vocabulary: tokens_per_chunk)
    hidden, weight, _, targets = inputs(torch.float32, bias=False)
    ids = torch.tensor([3, 95, 40])
    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    targets[1, ::7] = 95
    leaves = [hidden.detach().double().requires_grad_(), rows.double().requires_grad_()]
    logits = transform.inner * F.linear(leaves[0], weight.detach().double().index_copy(0, ids, leaves[1]))
    logits = logits if transform.outer is None else transform.outer * logits.tanh()
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    gradients = torch.autograd.grad(expected * 0.3, leaves)
    frozen, own = weight.detach(), OwnRows(ids, rows.requires_grad_())
    loss = summed_cross_entropy(hidden, frozen, targets, None, positions(targets), transform, own)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    with torch.no_grad():
        evaluated = summed_cross_entropy(hidden, frozen, targets, None, None, transform, own)
    assert evaluated.item() == pytest.approx(expected.item(), rel=1e-6)
    (loss * 0.3).backward()
    for ours, theirs in zip((hidden, rows), gradients, strict=True):
        assert ours.grad is not None
        assert relative(ours.grad, theirs) < 1e-6


def test_a_chunk_size_leaves_a_rest_in_both_counts() -> None:
    assert ALL % 8
    assert SUPERVISED % 8


@pytest.mark.parametrize("indexed", [False, True], ids=["all positions", "supervised alone"])
def test_nothing_learned_is_zero(indexed: bool) -> None:
    hidden, weight, _, targets = inputs(torch.float32, bias=False)
    none = torch.full_like(targets, IGNORE)
    loss = summed_cross_entropy(hidden, weight, none, None, positions(none) if indexed else None)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert hidden.grad.abs().max() == 0
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize("indexed", [False, True], ids=["all positions", "supervised alone"])
def test_autocast_multiplies_in_its_own_dtype(indexed: bool) -> None:
    hidden, weight, _, targets = inputs(torch.float32, bias=False)
    where = positions(targets) if indexed else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = summed_cross_entropy(hidden, weight, targets, None, where)
    rounded = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    expected = summed_cross_entropy(rounded[0], rounded[1], targets, None, where)
    assert loss.item() == expected.item()
    loss.backward()
    expected.backward()
    for ours, theirs in zip((hidden, weight), rounded, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == torch.float32
        assert torch.equal(ours.grad.bfloat16(), theirs.grad)


def test_the_head_is_applied_to_what_is_learned_alone() -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16, bias=False)  # torch's counter knows no product in place
    targets[1, 5:] = IGNORE
    products = 2 * HIDDEN * VOCABULARY * 3  # forward, the gradient of hidden, that of the head
    for supervised, count in ((None, 100), (positions(targets), 41 + 5)):
        with FlopCounterMode(display=False) as counter:
            summed_cross_entropy(hidden, weight, targets, None, supervised).backward()
        assert counter.get_total_flops() == products * count


def test_every_vocabulary_has_a_chunk_of_whole_tiles() -> None:
    for vocabulary in range(2, 400_000, 977):
        rows = chunk_rows(vocabulary)
        assert rows % 256 == 0
        assert rows == 256 or rows * vocabulary * 4 <= 256 * 2**20 < (rows + 256) * vocabulary * 4


@pytest.mark.parametrize("indexed", [False, True], ids=["all positions", "supervised alone"])
@pytest.mark.parametrize("transform", [AS_IT_IS, LogitTransform(1 / 3, 3.0)], ids=["plain", "capped"])
def test_each_gradient_alone_and_with_any_other(
    monkeypatch: pytest.MonkeyPatch, transform: LogitTransform, indexed: bool
) -> None:
    monkeypatch.setattr(loss_module, "chunk_rows", lambda vocabulary: 8)
    given = inputs(torch.float32, bias=True)
    expected, gradients = reference(*given, transform)
    targets = given[3]
    for wanted in product((False, True), repeat=3):
        leaves = [each.detach().requires_grad_(wants) for each, wants in zip(given[:3], wanted, strict=True)]
        where = positions(targets) if indexed else None
        loss = summed_cross_entropy(leaves[0], leaves[1], targets, leaves[2], where, transform)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        assert loss.requires_grad == any(wanted)
        if any(wanted):
            (loss * 0.3).backward()
        for leaf, gradient, wants in zip(leaves, gradients, wanted, strict=True):
            assert (leaf.grad is not None) == wants
            assert leaf.grad is None or relative(leaf.grad, gradient) < 1e-6


@pytest.mark.parametrize("largest", [30.0, 300.0, 3e4])
def test_a_target_that_has_no_probability_left(largest: float) -> None:
    """Its softmax is 0 in float32; the loss is the distance of its logit to the highest."""
    hidden, weight, _, targets = inputs(torch.float32, bias=False)
    hidden = (hidden.detach() * largest / 6).requires_grad_()
    expected, gradients = reference(hidden, weight, None, targets)
    assert expected.item() > largest
    loss = summed_cross_entropy(hidden, weight, targets, None, positions(targets))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    (loss * 0.3).backward()
    for ours, theirs in zip((hidden, weight), gradients, strict=True):
        assert ours.grad is not None
        assert relative(ours.grad, theirs) < 1e-6 * largest  # of float32 logits that are rounded to 2^-24 of `largest`


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_the_loss(value: float) -> None:
    hidden, weight, _, targets = inputs(torch.float32, bias=False)
    spoilt = hidden.detach().clone()
    spoilt[1, 3, 0] = value
    assert targets[1, 3] != IGNORE
    assert not summed_cross_entropy(spoilt, weight.detach(), targets).isfinite()
    spoilt = hidden.detach().clone()
    spoilt[0, 3] = value
    assert targets[0, 3] == IGNORE
    assert summed_cross_entropy(spoilt, weight.detach(), targets).isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_adds_the_heads_gradient_inside_of_the_product(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """In float32: nothing is rounded to 16 bits between one chunk and the next."""
    monkeypatch.setattr(loss_module, "chunk_rows", lambda vocabulary: 8)
    given = inputs(torch.float32, bias=False)
    hidden, weight, targets = given[0].detach().to(dtype), given[1].detach().to(dtype), given[3]
    ids, rows = torch.tensor([3, 95, 40]), torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    where = positions(targets)
    found = []
    for on_gpu in (False, True):
        addmm_stand_in.calls.clear()
        leaves = [hidden.clone().requires_grad_(), weight.float().requires_grad_(), rows.clone().requires_grad_()]
        if on_gpu:
            with pretended_cuda(monkeypatch), torch.autocast("cuda", dtype=dtype):
                assert hidden.device.type == "cuda"
                loss = summed_cross_entropy(
                    leaves[0], leaves[1], targets, None, where, AS_IT_IS, OwnRows(ids, leaves[2])
                )
                loss.backward()
        else:
            with torch.autocast("cpu", dtype=dtype):
                loss = summed_cross_entropy(
                    leaves[0], leaves[1], targets, None, where, AS_IT_IS, OwnRows(ids, leaves[2])
                )
            loss.backward()
        found.append((loss, *(leaf.grad for leaf in leaves)))
        chunks = -(-SUPERVISED // 8)
        shapes = [(3, HIDDEN), (VOCABULARY, HIDDEN)] * chunks
        assert addmm_stand_in.calls == (shapes if on_gpu else [])
    # The same slopes, [91, 97] in 16 bits: multiplied at once in float32 they give the head's gradient.
    (loss, through, head, own), (loss_on_gpu, through_on_gpu, head_on_gpu, own_on_gpu) = found
    assert loss_on_gpu.item() == loss.item()
    assert torch.equal(through_on_gpu, through)
    for ours, cpus in ((head_on_gpu, head), (own_on_gpu, own)):
        assert 1e-4 < relative(cpus, ours.double()) < 4e-3  # a CPU rounds each chunk's part


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("indexed", [False, True], ids=["all positions", "supervised alone"])
def test_several_chunks_are_added_to_the_heads_gradient_at_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, indexed: bool
) -> None:
    """A bfloat16 head with chunks of 8 tokens and 16 slopes: each product takes two chunks, the last one the rest."""
    monkeypatch.setattr(loss_module, "chunk_rows", lambda vocabulary: 8)
    assert loss_module.gradient_rows(VOCABULARY, HIDDEN) == 16
    products = list[int]()
    add = loss_module._add_product

    def noted(total: Tensor, slope: Tensor, part: Tensor) -> None:
        products.append(len(part))
        add(total, slope.float(), part.float())  # a GPU's product is added in float32

    monkeypatch.setattr(loss_module, "_add_product", noted)
    hidden, weight, _, targets = inputs(dtype, bias=False)
    where = positions(targets) if indexed else None
    expected, gradients = reference(hidden, weight, None, targets)
    loss = summed_cross_entropy(hidden, weight, targets, None, where)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    tokens = SUPERVISED if indexed else ALL
    assert products == [16] * (tokens // 16) + [tokens % 16]
    (loss * 0.3).backward()
    for ours, theirs in zip((hidden, weight), gradients, strict=True):
        assert ours.grad is not None
        assert relative(ours.grad, theirs) < 5e-3


def test_slopes_wait_where_the_copy_of_the_gradient_will_be() -> None:
    """The slopes of all that wait and one chunk's float32 logits, against the head's gradient in 16 bits."""
    several = 0
    for vocabulary in (32_000, 49_152, 128_256, 151_936, 262_144):
        for hidden in (576, 1024, 2048, 3072, 4096, 5120, 8192):
            rows, chunk = loss_module.gradient_rows(vocabulary, hidden), chunk_rows(vocabulary)
            assert rows % chunk == 0
            assert rows == chunk or 2 * rows * vocabulary + 4 * chunk * vocabulary <= 2 * vocabulary * hidden
            assert chunk <= rows <= max(chunk, 2048)
            several += rows > chunk
    assert several > 10
    assert [loss_module.gradient_rows(128_256, hidden) for hidden in (1024, 2048, 4096)] == [512, 1024, 2048]


def peak_in_forward(dtype: torch.dtype, transform: LogitTransform = AS_IT_IS) -> float:
    """Bytes a logit of a chunk that are live at once, of five chunks; without what is as long as the hidden states."""
    vocabulary, rows, size = 4096, 64, 8
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(loss_module, "chunk_rows", lambda _: rows)
        hidden = torch.zeros(5 * rows, size, dtype=dtype, requires_grad=True)
        weight, targets = torch.zeros(vocabulary, size, dtype=dtype), torch.zeros(5 * rows, dtype=torch.int64)
        phases = Phases(torch.device("cpu"), enabled=True)
        with phases("forward"):
            summed_cross_entropy(hidden, weight, targets, None, torch.arange(5 * rows), transform)
    inputs_bytes = (3 * hidden.numel() + weight.numel()) * dtype.itemsize + 3 * 8 * len(targets)
    return (phases.take()["forward"].peak_bytes - inputs_bytes) / (rows * vocabulary)


@pytest.mark.parametrize(
    ("dtype", "transform", "each"),
    [
        (torch.bfloat16, AS_IT_IS, 6),  # in 16 bits, where their gradient goes, and in float32
        (torch.float32, AS_IT_IS, 4),
        (torch.bfloat16, LogitTransform(0.5), 6),
        (torch.bfloat16, LogitTransform(1 / 3, 3.0), 10),  # and the tanh of the capped ones
        (torch.float32, LogitTransform(1 / 3, 3.0), 8),
    ],
)
def test_bytes_a_logit(dtype: torch.dtype, transform: LogitTransform, each: int) -> None:
    assert each - 0.05 < peak_in_forward(dtype, transform) < each + 0.05


def test_slopes_that_waited_are_freed_before_the_gradient_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained head's peak is its float32 gradient and the copy in 16 bits. A GPU's product needs no memory."""
    vocabulary, size, chunk = 4096, 64, 16
    monkeypatch.setattr(loss_module, "chunk_rows", lambda _: chunk)
    monkeypatch.setattr(loss_module, "_add_product", lambda *_: None)
    hidden = torch.zeros(5 * chunk, size, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(vocabulary, size, dtype=torch.bfloat16, requires_grad=True)
    assert loss_module.gradient_rows(vocabulary, size) == 2 * chunk
    phases = Phases(torch.device("cpu"), enabled=True)
    with phases("forward"):
        summed_cross_entropy(hidden, weight, torch.zeros(5 * chunk, dtype=torch.int64), None, torch.arange(5 * chunk))
    beside = phases.take()["forward"].peak_bytes - (2 + 4 + 2) * weight.numel()
    assert beside < 8 * hidden.nbytes < 2 * chunk * vocabulary


def test_float32_logits_are_written_twice_and_read_twice() -> None:
    """As they are made, by the softmax in place, and by the cast of their gradient. The highest are of 16 bits."""
    whole = 8 * VOCABULARY
    seen = list[tuple[str, int, int]]()

    def note(func: Any, args: tuple[Any, ...], _: dict[str, Any], run: Callable[[], Any]) -> Any:
        result = run()
        name = func._schema.name.partition("::")[2]
        read = sum(each.nbytes for each in nested_tensors(args[name == "copy_" :]) if each.numel() == whole)
        written = sum(each.nbytes for each in nested_tensors([result]) if each.numel() == whole)
        few = name in ("gather", "scatter_add_", "new_full", "new_empty")
        if read + written and not (func.is_view or few or name == "mm"):
            seen.append((name, read // whole, written // whole))
        return result

    hidden, weight = (x.detach().bfloat16() for x in inputs(torch.float32, bias=False)[:2])
    hidden, targets = hidden.view(-1, HIDDEN)[:8].requires_grad_(), torch.arange(8)
    with OnOperations(note):
        summed_cross_entropy(hidden, weight, targets, None, torch.arange(8))
    assert seen == [("copy_", 2, 4), ("max", 2, 0), ("softmax", 4, 4), ("copy_", 4, 2)]


@pytest.mark.parametrize(("columns", "width"), [(6400, 64), (12_800, 128), (6401, 6401)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_highest_logit_is_found_by_blocks(columns: int, width: int, dtype: torch.dtype) -> None:
    """Rows with the highest in the first, a middle and the last place, with two that are equal, with infinities and
    with no number. Places are looked for in `width` values of a row."""
    searched = list[int]()

    def note(func: Any, args: tuple[Any, ...], _: dict[str, Any], run: Callable[[], Any]) -> Any:
        if func._schema.name == "aten::max":
            searched.append(args[0].shape[1])
        return run()

    rows = torch.randn(8, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    for row, place in enumerate((0, columns // 2, columns - 1)):
        rows[row, place] = 100.0
    rows[3, [70, 5000]] = 200.0
    rows[4] = -torch.inf
    rows[5, 300] = torch.inf
    rows[6, 4321] = torch.nan
    with OnOperations(note):
        highest, where = loss_module._highest(rows)
    assert searched == [width]
    assert torch.equal(highest.nan_to_num(7.0), rows.amax(1, keepdim=True).nan_to_num(7.0))
    assert torch.equal(rows.gather(1, where).nan_to_num(7.0), highest.nan_to_num(7.0))


def test_a_large_vocabulary_has_the_same_loss_and_gradients() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, HIDDEN, generator=draw, dtype=torch.float64).requires_grad_()
    weight = torch.randn(6400, HIDDEN, generator=draw, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 6400, (40,), generator=draw)
    summed_cross_entropy(hidden, weight, targets).backward()
    found = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum").backward()
    for each, expected in zip(found, (hidden.grad, weight.grad), strict=True):
        assert each is not None
        torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-5)
