"""RoundedAdamW's update as one kernel: the bits and results of the update as written, one graph for all of a run."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from finetune import trial_limit
from finetune.errors import EnvironmentMismatch
from finetune.model.optimizers import blockwise_adamw, fused_update, rounded_adamw
from finetune.model.optimizers.blockwise_adamw import BlockwiseAdamW
from finetune.model.optimizers.fused_update import (
    ROW,
    FusedBlocks,
    FusedUpdate,
    UpdateKernel,
    choose_update,
    compare_updates,
    compiled_blocks,
    compiled_update,
    update_block_rows,
    update_rows,
)
from finetune.model.optimizers.random_bits import hashed, key_of, multiplier_and_offset, random_bits
from finetune.model.optimizers.rounded_adamw import ROUNDED_CHUNK, Range, RoundedAdamW
from tests.support.runs.stepping import float32_recipe
from tests.support.stand_ins.compiling import Counting

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
MOMENTS = "exp_avg", "exp_avg_sq"
# One for a module that is too short to have a whole row, one with a rest, one of whole rows, a matrix.
SHAPES = (5,), (100,), (64,), (33, 48)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Each test's graphs are its own."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights_of(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    return [nn.Parameter(some(*shape, seed=seed, dtype=dtype)) for seed, shape in enumerate(SHAPES)]


def train(optimizer: RoundedAdamW, steps: range, rate: float = 1e-3) -> None:
    for step in steps:
        optimizer.param_groups[0]["lr"] = rate / (1 + step)
        for place, weight in enumerate(optimizer.param_groups[0]["params"]):
            weight.grad = some(*weight.shape, seed=1000 * step + place, dtype=weight.dtype)
        optimizer.step()


def everything(optimizer: RoundedAdamW) -> list[Tensor]:
    weights = optimizer.param_groups[0]["params"]
    return [each.detach() for each in weights] + [optimizer.state[each][name] for each in weights for name in MOMENTS]


def trained(compute: Any, steps: int = 3, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> list[Tensor]:
    """Weights and moments after these steps; `compute` None: by the update as written."""
    optimizer = RoundedAdamW(weights_of(dtype), seed=1, **(SETTINGS | changes))
    optimizer.update_range = None if compute is None else FusedUpdate(compute)
    train(optimizer, range(steps))
    return everything(optimizer)


def assert_neighbours(found: list[Tensor], expected: list[Tensor]) -> None:
    """In bfloat16 equal, or rounded to the other neighbour in few elements."""
    unequal = total = 0
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2.0**-7, atol=1e-6)
        unequal, total = unequal + int((ours != theirs).sum()), total + ours.numel()
    assert total > 5000
    assert unequal / total < 0.005


def test_the_bits_are_those_of_the_update_as_written() -> None:
    key = key_of(1, 2, 3)
    multiplier, offset = multiplier_and_offset(key)
    index = torch.arange(1000, 9000, dtype=torch.int32)
    assert torch.equal(hashed(index * multiplier + offset), random_bits(key, 1000, 8000, CPU))


@pytest.mark.parametrize("settings", [{}, {"betas": (0.9, 0.95), "weight_decay": 0.0}])
def test_uncompiled_it_computes_the_update_as_written(settings: dict[str, Any]) -> None:
    assert_neighbours(trained(update_rows, **settings), trained(None, **settings))


def test_rounding_decisions_are_equal_where_the_arithmetic_is_exact() -> None:
    """Moments of gradients 1 to 2 with betas 1/2 and 3/4 have at most 20 bits: float32 rounds none of them, so only
    the random bits decide.
    """
    found = []
    for compute in (None, update_rows):
        weight = nn.Parameter(torch.zeros(100_003).bfloat16())
        optimizer = RoundedAdamW([weight], seed=3, **(SETTINGS | {"betas": (0.5, 0.75)}))
        optimizer.update_range = None if compute is None else FusedUpdate(compute)
        for step in range(12):
            weight.grad = (1 + torch.arange(len(weight)).add(37 * step) % 128 / 128).bfloat16()
            optimizer.step()
        found.append([optimizer.state[weight][name] for name in MOMENTS])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
        assert len(ours[::128].unique()) > 1, "nothing was rounded"


def test_in_float32_it_is_torchs() -> None:
    expected = RoundedAdamW(weights_of(torch.float32), seed=1, **SETTINGS)
    train(expected, range(3))
    found = trained(update_rows, dtype=torch.float32)
    torch.testing.assert_close(found, everything(expected), rtol=1e-5, atol=1e-7)


def test_a_shard_is_rounded_as_the_full_tensor_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of four chunks of 64, so that shards begin and end within chunks, launches and rows."""
    for module in (rounded_adamw, fused_update):
        monkeypatch.setattr(module, "ROUNDED_CHUNK", 64)
    monkeypatch.setattr(fused_update, "CHUNKS", 4)
    values, gradients = some(1000), [some(1000, seed=seed) for seed in (1, 2)]

    def result(start: int, end: int, compute: Any) -> Tensor:
        weight = nn.Parameter(values[start:end].clone())
        optimizer = RoundedAdamW([weight], seed=1, local_part=lambda tensor: (tensor, start), **SETTINGS)
        optimizer.update_range = None if compute is None else FusedUpdate(compute)
        for gradient in gradients:
            weight.grad = gradient[start:end].clone()
            optimizer.step()
        return weight.detach()

    full = result(0, 1000, update_rows)
    assert float((full != result(0, 1000, None)).double().mean()) < 0.005
    shards = ((0, 13), (13, 300), (300, 311), (311, 1000), (5, 5))
    for start, end in shards:
        assert torch.equal(result(start, end, update_rows), full[start:end])


def test_ranges_that_are_not_aligned_go_through_copies_and_padding_is_left_alone() -> None:
    """An engine's partition: the end of one weight, the whole of another from an odd place, and padding."""
    values = torch.cat([some(130)[90:], some(1000, seed=1), torch.ones(5).bfloat16()])
    gradients = torch.cat([some(130, seed=2)[90:], some(1000, seed=3), torch.ones(5).bfloat16()])
    ranges = [Range(0, 90, 0, 40), Range(1, 0, 40, 1040)]
    found = []
    for compute in (None, update_rows):
        flat = nn.Parameter(values.clone())
        flat.grad = gradients.clone()
        optimizer = RoundedAdamW([flat], seed=1, **SETTINGS)
        optimizer.round_as((flat, each) for each in ranges)
        optimizer.update_range = None if compute is None else FusedUpdate(compute)
        optimizer.step()
        found.append(flat.detach())
    assert torch.equal(found[1][1040:], torch.ones(5).bfloat16())
    assert float((found[0] != found[1]).double().mean()) < 0.005


def test_one_graph_serves_all_weights_and_all_steps() -> None:
    """Of all lengths, at any place in a flat tensor, with any rate, gradients as views: nothing is compiled again."""
    counting = Counting()
    compute = compiled_update(counting)
    assert_neighbours(trained(compute, steps=4), trained(None, steps=4))
    flat = nn.Parameter(some(5000))
    flat.grad = some(6000, seed=1)[48:5048]
    optimizer = RoundedAdamW([flat], seed=1, **SETTINGS)
    optimizer.round_as([(flat, Range(7, 0, 0, 4001)), (flat, Range(8, 77, 4001, 4900))])
    optimizer.update_range = FusedUpdate(compute)
    optimizer.step()
    assert counting.graphs == 1
    trained(compute, dtype=torch.float32)
    trained(compute, dtype=torch.float32)
    assert counting.graphs == 2, "a graph for each number format"


def test_a_resumed_run_is_bitwise_the_run() -> None:
    compute = compiled_update("aot_eager")
    whole = trained(compute, steps=5)
    optimizer = RoundedAdamW(weights_of(), seed=1, **SETTINGS)
    optimizer.update_range = FusedUpdate(compute)
    train(optimizer, range(2))
    resumed = RoundedAdamW(
        [nn.Parameter(each.detach().clone()) for each in everything(optimizer)[: len(SHAPES)]], seed=1, **SETTINGS
    )
    resumed.load_state_dict(optimizer.state_dict())
    resumed.update_range = FusedUpdate(compute)
    train(resumed, range(2, 5))
    for ours, theirs in zip(everything(resumed), whole, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_inductor_makes_one_kernel_without_temporaries() -> None:
    """Compiled by inductor for the CPU, the update is what it is as written, rounded without bias, in one kernel."""
    from torch._inductor.utils import run_and_get_code  # not public: only a test looks at the code

    optimizer = RoundedAdamW(weights_of(), seed=1, **SETTINGS)
    optimizer.update_range = FusedUpdate(compiled_update())
    _, codes = run_and_get_code(lambda: train(optimizer, range(3)))
    assert len(codes) == 1
    assert codes[0].count("async_compile.cpp_pybinding(") == 1
    assert "empty_strided_cpu((" not in codes[0], "the kernel has temporaries"
    assert_neighbours(everything(optimizer), trained(None))

    below = 2.0**-8  # the distance from 1 to the next bfloat16 below it
    weight = nn.Parameter(torch.ones(100_000).bfloat16())
    weight.grad = torch.ones_like(weight)
    unbiased = RoundedAdamW([weight], seed=1, **(SETTINGS | {"lr": 0.3 * below, "weight_decay": 0.0}))
    unbiased.update_range = optimizer.update_range
    unbiased.step()
    assert set(weight.tolist()) == {1.0, 1 - below}
    assert float((1 - weight.detach().double()).mean()) == pytest.approx(0.3 * below, rel=0.02)
    assert compare_updates(optimizer.update_range, torch.bfloat16, CPU) < 0.001


def wrong_bits(weight: Tensor, *others: Tensor) -> None:
    update_rows(weight, *others[:3], others[3] ^ 1 << 20, *others[4:])


def biased(weight: Tensor, *others: Tensor) -> None:
    update_rows(weight, *others)
    weight.mul_(1.02)


@pytest.mark.parametrize(("compute", "says"), [(wrong_bits, "rounded otherwise"), (biased, "the weight in torch.bf")])
def test_a_wrong_kernel_is_found(compute: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compare_updates(FusedUpdate(compute), torch.bfloat16, CPU)


def test_one_that_allocates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(0, 1 << 30, 16384))
    monkeypatch.setattr(fused_update, "allocated_bytes", lambda _: next(counts))
    with pytest.raises(ValueError, match="allocates 16,384 bytes for 4,101 elements"):
        compare_updates(FusedUpdate(update_rows), torch.bfloat16, CPU)


def choose(folder: Path, monkeypatch: pytest.MonkeyPatch, backend: Any, asked: Any = "auto") -> UpdateKernel:
    """As on a GPU, whose trial the host computes."""
    monkeypatch.setattr(fused_update, "compare_updates", lambda update, dtype, _: compare_updates(update, dtype, CPU))
    recipe = float32_recipe(folder, compile=asked)
    chosen = choose_update(recipe, RoundedAdamW(weights_of(), seed=1), GPU, backend)
    assert chosen is not None
    return chosen


@pytest.mark.thorough
def test_a_gpu_gets_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(tmp_path, monkeypatch, "aot_eager")
    chosen.agree(lambda own: own, CPU)
    assert isinstance(chosen.optimizer.update_range, FusedUpdate)
    facts = chosen.facts()
    assert (facts["fused"], facts["left_off"], facts["formats"]) == (True, None, ["bfloat16"])
    assert "one kernel, compiled and compared in" in str(chosen)


def failing(*_: Any) -> Any:
    raise RuntimeError("no compiler here")


@pytest.mark.thorough
def test_where_it_cannot_be_compiled_all_steps_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(tmp_path, monkeypatch, failing)
    assert chosen.optimizer.update_range is None
    chosen.agree(lambda own: own, CPU)
    assert str(chosen).startswith("optimizer: its update is not one kernel: ")
    assert "no compiler here" in str(chosen)
    assert "\n" not in str(chosen)
    required = choose(tmp_path, monkeypatch, failing, asked=True)
    with pytest.raises(EnvironmentMismatch, match=r"the optimizer's update: .*no compiler here"):
        required.agree(lambda own: own, CPU)


def test_all_ranks_run_as_written_where_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose(tmp_path, monkeypatch, "eager")
    chosen.agree(lambda own: own + 1, CPU)
    assert chosen.optimizer.update_range is None
    assert "another rank" in str(chosen)


def test_a_trial_that_does_not_end_in_time_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[str]()

    def slow(graph: Any, inputs: Any) -> Any:
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
        raise ValueError("too late")

    monkeypatch.setattr(trial_limit, "TRIAL_SECONDS", 0.01)
    with trial_limit.trials_end_process(ended.append):
        choose(tmp_path, monkeypatch, slow)
    (line,) = ended
    assert line.startswith("training.compile: the optimizer's update: ")
    assert line.endswith("; set training.compile: false")


def test_a_cpu_and_a_recipe_without_compiling_keep_the_update_as_written(tmp_path: Path) -> None:
    for device, asked in ((CPU, "auto"), (CPU, True), (GPU, False)):
        optimizer = RoundedAdamW(weights_of(), seed=1)
        chosen = choose_update(float32_recipe(tmp_path, compile=asked), optimizer, device, failing)
        assert chosen is not None
        chosen.agree(lambda own: own, CPU)
        assert optimizer.update_range is None
        assert chosen.facts()["left_off"] == ("on a CPU" if device == CPU else "training.compile: false")
    others = torch.optim.AdamW(weights_of())
    assert choose_update(float32_recipe(tmp_path), others, GPU, failing) is None


# A book's 256 codes at 16 bits a scale: a block of 256, of 192, of 16, and vectors with float32 moments.
BLOCK_SHAPES = (16, 512), (32, 192), (512, 16), (100,)


def blockwise(compute: Any, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> BlockwiseAdamW:
    """An optimizer of BLOCK_SHAPES, whose update is as written if `compute` is None."""
    weights = [nn.Parameter(some(*shape, seed=seed, dtype=dtype)) for seed, shape in enumerate(BLOCK_SHAPES)]
    optimizer = BlockwiseAdamW(weights, seed=1, in_float32=(), **(SETTINGS | changes))
    if compute is not None:
        optimizer.update_blocks, optimizer.update_range = FusedBlocks(compute), FusedUpdate(update_rows)
    return optimizer


def blocks_of(optimizer: BlockwiseAdamW, steps: range) -> list[Tensor]:
    """Weights, codes and scales after these steps."""
    train(optimizer, steps)
    weights = optimizer.param_groups[0]["params"]
    states = [optimizer.state[each] for each in weights]
    names = "state1", "state2", "absmax1", "absmax2"
    return [each.detach() for each in weights] + [state[name] for state in states for name in names if name in state]


def assert_same_blocks(found: list[Tensor], expected: list[Tensor]) -> None:
    """Codes at most one apart, in few elements; bfloat16 as in `assert_neighbours`; scales in float32."""
    codes = [(a, b) for a, b in zip(found, expected, strict=True) if a.dtype == torch.uint8]
    apart = torch.cat([(a.int() - b.int()).abs().view(-1) for a, b in codes])
    assert len(codes) == 6
    assert int(apart.max()) <= 1
    assert float(apart.double().mean()) < 0.005
    halves = [(a, b) for a, b in zip(found, expected, strict=True) if a.dtype == torch.bfloat16]
    if halves:
        assert_neighbours([a for a, _ in halves], [b for _, b in halves])
    for a, b in zip(found, expected, strict=True):
        if a.dtype == torch.float32:
            # A code that is one apart is up to 2 % of its block's largest, and the next step's moment has it.
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_uncompiled_are_the_update_as_written(dtype: torch.dtype) -> None:
    expected = blocks_of(blockwise(None, dtype), range(2))
    assert_same_blocks(blocks_of(blockwise(update_block_rows, dtype), range(2)), expected)


def test_blocks_of_a_shard_are_those_of_the_full_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, in launches of four chunks of five blocks of 192; a shard of a single block goes through copies."""
    for module in (fused_update, blockwise_adamw):
        monkeypatch.setattr(module, "ROUNDED_CHUNK", 1000)
    monkeypatch.setattr(fused_update, "CHUNKS", 4)
    values, gradients = some(64, 192), [some(64, 192, seed=seed) for seed in (1, 2)]

    def result(first: int, end: int) -> list[Tensor]:
        weight = nn.Parameter(values.clone())
        local = lambda tensor: (tensor[first:end], first * tensor.shape[1])  # noqa: E731
        optimizer = BlockwiseAdamW([weight], seed=1, in_float32=(), local_part=local, **SETTINGS)
        optimizer.update_blocks = FusedBlocks(update_block_rows)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        state = optimizer.state[weight]
        return [each[first:end] for each in (weight.detach(), state["state1"], state["state2"], state["absmax2"])]

    full = result(0, 64)
    for first, end in ((0, 13), (13, 14), (14, 50), (50, 64), (64, 64)):
        for ours, theirs in zip(result(first, end), full, strict=True):
            assert torch.equal(ours, theirs[first:end]), (first, end)


@pytest.mark.thorough
def test_one_graph_serves_all_blocks_of_a_length() -> None:
    counting = Counting()
    compute = compiled_blocks(counting)
    expected = blocks_of(blockwise(None), range(3))
    assert_same_blocks(blocks_of(blockwise(compute), range(3)), expected)
    assert counting.graphs == 3, "of 256, 192 and 16"


@pytest.mark.thorough
def test_blocks_resume_bitwise() -> None:
    compute = compiled_blocks("aot_eager")
    whole = blocks_of(blockwise(compute), range(5))
    optimizer = blockwise(compute)
    blocks_of(optimizer, range(2))
    resumed = blockwise(compute)
    for ours, theirs in zip(resumed.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True):
        ours.data.copy_(theirs)
        resumed.state[ours] = copy.deepcopy(optimizer.state[theirs])
    assert all(torch.equal(a, b) for a, b in zip(blocks_of(resumed, range(2, 5)), whole, strict=True))


def wrong_scale(*given: Any) -> None:
    update_block_rows(*given)
    given[2][1].mul_(1.01)


@pytest.mark.parametrize("length", [16, 192, 256])
def test_a_wrong_kernel_of_blocks_is_found(length: int) -> None:
    assert compare_updates(FusedBlocks(update_block_rows), torch.bfloat16, CPU, length) < 0.005
    with pytest.raises(ValueError, match=r"the second moment's scales in torch\.float32 differs"):
        compare_updates(FusedBlocks(wrong_scale), torch.bfloat16, CPU, length)


@pytest.mark.thorough
def test_a_gpu_gets_the_kernel_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = lambda update, dtype, _, block=0: compare_updates(update, dtype, CPU, block)  # noqa: E731
    monkeypatch.setattr(fused_update, "compare_updates", on_host)
    chosen = choose_update(float32_recipe(tmp_path, compile="auto"), blockwise(None), GPU, "eager")
    assert chosen is not None
    kinds = ["bfloat16", *(f"bfloat16 in blocks of {length}" for length in (16, 192, 256))]
    assert (chosen.stopped, chosen.formats) == (None, kinds)
    optimizer = chosen.optimizer
    assert isinstance(optimizer, BlockwiseAdamW)
    assert isinstance(optimizer.update_blocks, FusedBlocks)
    chosen.agree(lambda own: own + 1, CPU)
    assert (optimizer.update_blocks, optimizer.update_range) == (None, None)


def test_many_lengths_of_blocks_are_not_compiled(tmp_path: Path) -> None:
    weights = [nn.Parameter(some(8192 // length, length)) for length in (8, 16, 32, 64, 128)]
    optimizer = BlockwiseAdamW(weights, seed=1, in_float32=(), **SETTINGS)
    chosen = choose_update(float32_recipe(tmp_path, compile="auto"), optimizer, GPU, failing)
    assert chosen is not None
    assert chosen.stopped == "moments in blocks of 5 lengths, more than 4"


def test_chunks_are_as_the_kernel_counts_them() -> None:
    assert 1 << ROUNDED_CHUNK.bit_length() - 1 == ROUNDED_CHUNK
    assert ROUNDED_CHUNK % ROW == 0
    assert fused_update.CHUNKS * ROUNDED_CHUNK + 2 * ROW < 1 << 31, "positions are int32"
