"""RoundedAdamW's and BlockwiseAdamW's updates as one kernel each, made by torch.compile: the same random bits.

As written (`update_in_chunks`), RoundedAdamW's update is 66 kernels that read and write 576 bytes a weight. Here
everything between reading a weight and writing it back stays in registers. Per launch the kernel reads bfloat16 weight,
gradient and two moments, and writes three of them back: 14 bytes. BlockwiseAdamW's moments are one byte each and a
scale for 256: 10 bytes. Its kernel has a block in each row, whose largest magnitudes it needs.

There is one graph for each pair of number formats (weight's, gradient's), and for each length of blocks. All numbers
that change from step to step or from weight to weight are tensors: keys, first index, factors. The number of rows is a
symbol. So nothing is compiled again during a run.

    elements      0 .. 15 | 16 .. 31 | ... | a rest below one row
                  `rows` rows, at least 2 (torch.compile makes a graph of its own for 1)
    rest          copied into a row of its own, updated there by the same graph, copied back

Rows are 16 elements long, so that a compiler knows that it may load 16 bytes at a time. A range that does not begin at
a multiple of 16 bytes also goes through copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from finetune.errors import EnvironmentMismatch
from finetune.library_errors import with_cause
from finetune.model.optimizers.blocks import SMALLEST
from finetune.model.optimizers.blockwise_adamw import BlockwiseAdamW, HeldMoment
from finetune.model.optimizers.random_bits import hashed, key_of, multiplier_and_offset
from finetune.model.optimizers.rounded_adamw import ROUNDED_CHUNK, Range, RoundedAdamW, chunks
from finetune.recipe.schema import Recipe
from finetune.trial_limit import limited

ROW = 16  # elements
FEWEST_ROWS = 2
# Chunks of ROUNDED_CHUNK elements in one launch, at most. 2^27 elements take a GPU half a millisecond, several times
# what a launch costs the host.
CHUNKS = 16
VECTOR_BYTES = 16
# Lengths of blocks, with none (moments in float32). Most models have three: 256, 16 (adapters' second matrices), none.
MOST_LENGTHS = 4
# By default inductor writes a value that several others need to memory, from so many operations on. Rounding needs
# some twice: torch 2.11 made three temporaries of 4 bytes a weight. These limits keep all in one kernel's registers.
IN_ONE_KERNEL = {
    "realize_opcount_threshold": 1 << 20,
    "realize_reads_threshold": 1 << 20,
    "assert_indirect_indexing": False,  # keys are indexed by a shifted position, which cannot be outside
}
# A trial's weight lies on the edge of a chunk, and its last elements fill no row.
TRIAL_ELEMENTS, TRIAL_BEFORE_EDGE = 4096 + 5, 1000
# The share of a trial's elements that may be rounded to the other neighbour. A float32 result that differs in its last
# bit crosses a random threshold once in 2^15.
MOST_OTHERS = 0.005
# Bytes that a trial's update may allocate: keys, factors and the rest's copies, in blocks of 512. A temporary of 4
# bytes an element would be 16 KiB more.
MOST_ALLOCATED = 8192

Compute = Callable[..., Any]


def update_rows(
    weight: Tensor, average: Tensor, square: Tensor, gradient: Tensor, keys: Tensor, first: Tensor, factors: Tensor
) -> None:
    """AdamW's update of some rows in place, computed in float32; bfloat16 results are stochastically rounded.

    Args:
        weight, average, square, gradient: [rows, ROW].
        keys: int32 [CHUNKS + 1, 3, 2], of each chunk and each tensor that is rounded: `multiplier_and_offset`.
        first: int32 [], the first element's index, counted from the first chunk that `keys` has.
        factors: float32 [7], as `update_factors` has them.
    """
    decay, to_average, keep_square, to_square, correction, epsilon, rate = factors.unbind()
    slope = gradient.float()
    mean = average.float()
    mean = mean + to_average * (slope - mean)
    variance = square.float() * keep_square + to_square * slope * slope
    denominator = variance.sqrt() / correction + epsilon
    value = weight.float() * decay + rate * mean / denominator
    place = first + torch.arange(weight.numel(), dtype=torch.int32, device=weight.device).view_as(weight)
    key, index = keys[place >> ROUNDED_CHUNK.bit_length() - 1], place & ROUNDED_CHUNK - 1
    for use, (tensor, result) in enumerate(((weight, value), (average, mean), (square, variance))):
        if tensor.dtype == torch.bfloat16:
            bits = hashed(index * key[..., use, 0] + key[..., use, 1])
            result = ((result.view(torch.int32) + (bits & 0xFFFF)) & -0x10000).view(torch.float32)
        tensor.copy_(result)


def update_factors(group: dict[str, Any], step: int) -> list[float]:
    """The numbers that an update multiplies by, in float64, as torch's scalar operations take them."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    corrected_rate, correction = -rate / (1 - beta1**step), (1 - beta2**step) ** 0.5
    return [1 - rate * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, correction, group["eps"], corrected_rate]


def update_block_rows(
    weight: Tensor,
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    gradient: Tensor,
    books: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: Tensor,
    first: Tensor,
    factors: Tensor,
) -> None:
    """BlockwiseAdamW's update of some blocks in place, computed in float32, by the arithmetic of blocks.py.

    Args:
        weight, codes, gradient: [blocks, elements of a block]; codes of both moments, uint8.
        scales: float32 [blocks], of both moments.
        books: Values and edges of the first moment's book, then of the second's.
        keys: int32 [CHUNKS + 1, 2], of each chunk: `multiplier_and_offset`.
        first: int32 [], the first block's number, counted from the first chunk that `keys` has.
        factors: float32 [7], as `update_factors` has them.
    """
    decay, to_average, keep_square, to_square, correction, epsilon, rate = factors.unbind()
    slope = gradient.float()
    mean = books[0][codes[0].int()] * scales[0][:, None]
    mean = mean + to_average * (slope - mean)
    variance = books[2][codes[1].int()] * scales[1][:, None]
    variance = variance * keep_square + to_square * slope * slope
    denominator = variance.sqrt() / correction + epsilon
    value = weight.float() * decay + rate * mean / denominator
    if weight.dtype == torch.bfloat16:
        block = weight.shape[1]
        number = first + torch.arange(weight.shape[0], dtype=torch.int32, device=weight.device)
        chunk = number // (ROUNDED_CHUNK // block)
        begin = (number - chunk * (ROUNDED_CHUNK // block)) * block
        index = begin[:, None] + torch.arange(block, dtype=torch.int32, device=weight.device)
        bits = hashed(index * keys[chunk, 0][:, None] + keys[chunk, 1][:, None])
        value = ((value.view(torch.int32) + (bits & 0xFFFF)) & -0x10000).view(torch.float32)
    weight.copy_(value)
    for held, scale, edges, moment in zip(codes, scales, (books[1], books[3]), (mean, variance), strict=True):
        largest = moment.abs().amax(1).clamp_min(SMALLEST)
        scale.copy_(largest)
        held.copy_(torch.bucketize(moment / largest[:, None], edges, out_int32=True))


class FusedBlocks:
    """Updates a weight's blocks as BlockwiseAdamW does, in one call of `compute` for up to CHUNKS chunks.

    Args:
        compute: `update_block_rows`, compiled. The planner has a stand-in.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def __call__(
        self,
        weights: Tensor,
        moments: Sequence[HeldMoment],
        gradient: Tensor,
        range_: Range,
        group: dict[str, Any],
        step: int,
        seed: int,
    ) -> None:
        device, key, block = gradient.device, key_of(seed, step, range_.place), moments[0].block
        chunk_blocks = ROUNDED_CHUNK // block
        books = [tensor for moment in moments for tensor in moment.book]
        factors = torch.tensor(update_factors(group, step), dtype=torch.float32).to(device, non_blocking=True)
        for launch, first, begin, end in chunks(range_, CHUNKS * chunk_blocks * block):
            numbers = (key_of(key, launch * CHUNKS + chunk, 0) for chunk in range(CHUNKS + 1))
            keys = torch.tensor([multiplier_and_offset(number) for number in numbers], dtype=torch.int32)
            parts = [weights, *(moment.held for moment in moments), gradient]
            parts = [part[begin:end].view(-1, block).data for part in parts]
            scales = [
                moment.scales[begin // block : end // block].data for moment in moments if moment.scales is not None
            ]
            few = len(parts[0]) < FEWEST_ROWS  # one block: torch.compile would make a graph of its own
            held = [*parts[:3], *scales]
            if few:
                parts, scales = ([torch.cat([tensor, tensor]) for tensor in some] for some in (parts, scales))
            self._compute(
                parts[0],
                (parts[1], parts[2]),
                (scales[0], scales[1]),
                parts[3],
                tuple(books),
                keys.to(device, non_blocking=True),
                torch.tensor(first // block, dtype=torch.int32),
                factors,
            )
            if few:
                for tensor, updated in zip(held, [*parts[:3], *scales], strict=True):
                    tensor.copy_(updated[:1])


class FusedUpdate:
    """Updates a range as `update_in_chunks` does, in one call of `compute` for up to CHUNKS chunks.

    Args:
        compute: `update_rows`, compiled. The planner has a stand-in.
    """

    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def __call__(
        self, tensors: Sequence[Tensor], gradient: Tensor, range_: Range, group: dict[str, Any], step: int, seed: int
    ) -> None:
        device, key = gradient.device, key_of(seed, step, range_.place)
        factors = torch.tensor(update_factors(group, step), dtype=torch.float32).to(device, non_blocking=True)
        for launch, first, begin, end in chunks(range_, CHUNKS * ROUNDED_CHUNK):
            held = range(first // ROUNDED_CHUNK, (first + end - begin - 1) // ROUNDED_CHUNK + 1)
            table = [[[0, 0]] * 3] * (CHUNKS + 1)  # copies fill their last row, so they may reach one chunk further
            for chunk in held:
                keys_of_chunk = (key_of(key, launch * CHUNKS + chunk, use) for use in range(3))
                table[chunk] = [list(multiplier_and_offset(each)) for each in keys_of_chunk]
            keys = torch.tensor(table, dtype=torch.int32).to(device, non_blocking=True)
            parts = [tensor[begin:end] for tensor in (*tensors, gradient)]
            rows = 0
            if all(part.storage_offset() * part.itemsize % VECTOR_BYTES == 0 for part in parts):
                rows = (end - begin) // ROW
            if rows >= FEWEST_ROWS:
                self._rows([part[: rows * ROW] for part in parts], keys, first, factors)
                parts, first = [part[rows * ROW :] for part in parts], first + rows * ROW
            # Copies of at most one chunk: in bfloat16 four of 16 MiB.
            for at in range(0, len(parts[0]), ROUNDED_CHUNK):
                self._copied([part[at : at + ROUNDED_CHUNK] for part in parts], keys, first + at, factors)

    def _copied(self, parts: Sequence[Tensor], keys: Tensor, first: int, factors: Tensor) -> None:
        # By itself, so that a chunk's copies are freed before the next chunk's are made.
        count = len(parts[0])
        rows = max(FEWEST_ROWS, -(-count // ROW))
        copies = [part.new_zeros(rows * ROW) for part in parts]
        for part, copy in zip(parts, copies, strict=True):
            copy[:count].copy_(part)
        self._rows(copies, keys, first, factors)
        for part, copy in zip(parts[:3], copies, strict=False):
            part.copy_(copy[:count])

    def _rows(self, flat: Sequence[Tensor], keys: Tensor, first: int, factors: Tensor) -> None:
        # torch.compile would look at the tensor behind a view, and make a graph for each size of that. `data` is none.
        rows = [tensor.view(-1, ROW).data for tensor in flat]
        self._compute(*rows, keys, torch.tensor(first, dtype=torch.int32), factors)


def compiled_update(backend: Any = "inductor") -> Compute:
    """`update_rows` compiled, one graph for any number of rows."""
    return _compiled(update_rows, backend)


def compiled_blocks(backend: Any = "inductor") -> Compute:
    """`update_block_rows` compiled, one graph for any number of blocks of a length."""
    return _compiled(update_block_rows, backend)


def _compiled(update: Callable[..., None], backend: Any) -> Compute:
    options: Any = IN_ONE_KERNEL if backend == "inductor" else None
    compiled = torch.compile(update, backend=backend, fullgraph=True, options=options)

    def compute(*given: Any) -> None:
        for tensor in given[:4]:  # weight, moments and gradient, or codes and scales of moments
            for rows in tensor if isinstance(tensor, tuple) else (tensor,):
                torch._dynamo.mark_dynamic(rows, 0)  # torch documents both under these names
                if rows.dim() > 1:  # else a third length gets a graph for any length, whose blocks fit no row
                    torch._dynamo.mark_static(rows, 1)
        compiled(*given)

    return compute


@dataclass
class UpdateKernel:
    """A run's RoundedAdamW or BlockwiseAdamW, and whether its update is one kernel: decided once, for all steps."""

    optimizer: RoundedAdamW | BlockwiseAdamW
    required: bool  # what cannot be compiled, or not rightly, is an error
    stopped: str | None = None  # why the update runs as written
    seconds: float = 0.0  # of compiling and comparing
    others: float = 0.0  # the share of a trial's elements that are rounded to the other neighbour
    formats: list[str] = field(default_factory=list)

    def agree(self, total: Callable[[Tensor], Any], device: torch.device) -> None:
        """Update as written on every rank where one does, because copies of a weight have to stay equal. Every rank
        calls it. `total` sums a tensor over the ranks.
        """
        stopped = int(total(torch.tensor(int(self.stopped is not None), device=device)))
        if stopped and self.stopped is None:
            self.stopped = "another rank cannot, for its own reason"
            self.optimizer.update_range = None
            if isinstance(self.optimizer, BlockwiseAdamW):
                self.optimizer.update_blocks = None
        if stopped and self.required:
            raise EnvironmentMismatch(
                f"training.compile: true: the optimizer's update: {self.stopped}; set training.compile: auto, or false"
            )

    def facts(self) -> dict[str, Any]:
        """For the receipt."""
        fused = self.stopped is None
        return {
            "fused": fused,
            "left_off": self.stopped,
            "seconds": round(self.seconds, 1) if fused else None,
            "rounded_otherwise": self.others if fused else None,
            "formats": self.formats,
        }

    def __str__(self) -> str:
        if self.stopped is not None:
            return f"optimizer: its update is not one kernel: {self.stopped}"
        return f"optimizer: its update is one kernel, compiled and compared in {self.seconds:.0f} s"


def choose_update(
    recipe: Recipe, optimizer: torch.optim.Optimizer, device: torch.device, backend: Any = "inductor"
) -> UpdateKernel | None:
    """Fuse the update of RoundedAdamW or BlockwiseAdamW, where the recipe allows it, on a GPU, after it has matched the
    update as written.

    None for other optimizers, which have kernels of their own.

    Args:
        backend: torch.compile's.
    """
    if not isinstance(optimizer, RoundedAdamW | BlockwiseAdamW):
        return None
    chosen = UpdateKernel(optimizer, required=recipe.training.compile is True and device.type == "cuda")
    lengths = {0}
    if isinstance(optimizer, BlockwiseAdamW):
        lengths = optimizer.block_lengths
    if device.type != "cuda":
        chosen.stopped = "on a CPU"
    elif recipe.training.compile is False:
        chosen.stopped = "training.compile: false"
    elif len(lengths) > MOST_LENGTHS:  # each would be compiled and compared for seconds
        chosen.stopped = f"moments in blocks of {len(lengths)} lengths, more than {MOST_LENGTHS}"
    if chosen.stopped is not None:
        return chosen
    began, update = time.perf_counter(), FusedUpdate(compiled_update(backend))
    blocks = FusedBlocks(compiled_blocks(backend))
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    dtypes = sorted({weight.dtype for weight in weights}, key=str)
    try:
        with limited("training.compile: the optimizer's update", "training.compile: false"):
            for dtype, length in product(dtypes, sorted(lengths)):
                in_blocks = f" in blocks of {length}" if length else ""
                chosen.formats.append(str(dtype).removeprefix("torch.") + in_blocks)
                if length:
                    others = compare_updates(blocks, dtype, device, length)
                else:
                    others = compare_updates(update, dtype, device)
                chosen.others = max(chosen.others, others)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of whatever class: torch has no public names for those of its compiler
        chosen.stopped = with_cause(error)
        return chosen
    chosen.seconds = time.perf_counter() - began
    optimizer.update_range = update
    if isinstance(optimizer, BlockwiseAdamW):
        optimizer.update_blocks = blocks
    return chosen


def compare_updates(
    update: FusedUpdate | FusedBlocks, dtype: torch.dtype, device: torch.device, block: int = 0
) -> float:
    """The share of elements of a weight and its moments that `update` rounds to the other neighbour.

    Raises ValueError where anything else differs from the update as written, or where memory is allocated for it.

    Args:
        block: Elements that share a scale, of moments in one byte; 0: the moments have the weight's format.
    """
    as_written, _ = _updated(None, dtype, device, block)
    _updated(update, dtype, device, block)  # compiles it
    fused, allocated = _updated(update, dtype, device, block)
    if allocated > MOST_ALLOCATED:
        raise ValueError(f"compiled, it allocates {allocated:,} bytes for {fused['the weight'].numel():,} elements")
    others = 0.0
    for name, expected in as_written.items():
        computed, given = fused[name].double(), expected.dtype
        expected = expected.double()
        # Neighbours are 2^-8 to 2^-7 apart. Where terms cancel, the last bit of a term is more than that.
        allowed = expected.abs() * (2.0**-7 if given == torch.bfloat16 else 1e-5) + 1e-6 * expected.abs().max()
        if given == torch.uint8:
            allowed = torch.ones_like(expected)  # the next code
        if not bool(((computed - expected).abs() <= allowed).all()):
            furthest = float((computed - expected).abs().max())
            raise ValueError(f"compiled, {name} in {given} differs by up to {furthest:.2g}")
        if given in (torch.bfloat16, torch.uint8):
            others = max(others, float((computed != expected).double().mean()))
    if others > MOST_OTHERS:
        raise ValueError(f"compiled, {others:.1%} of the elements are rounded otherwise")
    return others


def allocated_bytes(device: torch.device) -> int:
    """All bytes that were allocated so far on a GPU, given back or not; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("allocated_bytes.all.allocated", 0))


def _updated(
    update: FusedUpdate | FusedBlocks | None, dtype: torch.dtype, device: torch.device, block: int
) -> tuple[dict[str, Tensor], int]:
    """A weight and its state after two steps, and bytes that the second one allocated. `update` computes that."""
    generator = torch.Generator().manual_seed(0)
    shape = (-(-TRIAL_ELEMENTS // block), block) if block else (TRIAL_ELEMENTS,)
    start = ROUNDED_CHUNK - TRIAL_BEFORE_EDGE
    if block:
        start = (ROUNDED_CHUNK // block - TRIAL_BEFORE_EDGE // block) * block

    def drawn() -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    weight = nn.Parameter(drawn())
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "seed": 1}
    settings["local_part"] = lambda tensor: (tensor, start)
    optimizer: Any = RoundedAdamW([weight], **settings)
    if block:
        optimizer = BlockwiseAdamW([weight], in_float32=(), **settings)
    for chosen in (None, update):
        setattr(optimizer, "update_blocks" if block else "update_range", chosen)
        weight.grad = drawn()
        before = allocated_bytes(device)
        optimizer.step()
    allocated, state = allocated_bytes(device) - before, optimizer.state[weight]
    names = {"exp_avg": "the first moment", "exp_avg_sq": "the second moment"}
    names |= {"state1": "the first moment", "state2": "the second moment"}
    names |= {"absmax1": "the first moment's scales", "absmax2": "the second moment's scales"}
    held = {names[key]: value for key, value in state.items() if key in names}
    return {"the weight": weight.detach()} | held, allocated
