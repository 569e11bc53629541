"""AdamW with one-byte moments, over full weights and over shards.

bitsandbytes' kernels (0.50) take no DTensors. torchao's 8-bit AdamW (0.18) does, but its blocks belong to a shard: its
state fits no other number of ranks, and a shard with other than a multiple of 256 elements has none. It also compiles
the update for each shape, without a choice, and wants the learning rate as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from finetune.model.optimizers.blocks import BLOCKWISE, Book, block_length, book_on, decode, encode
from finetune.model.optimizers.random_bits import key_of, random_bits
from finetune.model.optimizers.rounded_adamw import (
    ROUNDED_CHUNK,
    LocalPart,
    Range,
    UpdateRange,
    adamw_update,
    all_of,
    chunks,
    round_at_random,
)


class HeldMoment(NamedTuple):
    """This rank's elements of a moment, flat: float32 values, or codes with their blocks' scales."""

    held: Tensor
    scales: Tensor | None
    block: int
    book: Book

    def read(self, begin: int, end: int) -> Tensor:
        """float32; where they are held as such, their own memory."""
        if self.scales is None:
            return self.held[begin:end]
        return decode(self.held[begin:end], self._scales(self.scales, begin, end), self.block, self.book)

    def write(self, begin: int, end: int, values: Tensor) -> None:
        """Keep the values from `read`, updated in their memory."""
        if self.scales is None:
            return
        codes, scales = encode(values, self.block, self.book)
        self.held[begin:end].copy_(codes)
        self._scales(self.scales, begin, end).copy_(scales)

    def _scales(self, scales: Tensor, begin: int, end: int) -> Tensor:
        return scales[begin // self.block : end // self.block]


# Updates whole blocks of weight and moments, flat, in place: weight, moments, gradient, the range, the parameter group,
# the step's number, the seed.
UpdateBlocks = Callable[[Tensor, Sequence[HeldMoment], Tensor, Range, dict[str, Any], int, int], None]


class BlockwiseAdamW(torch.optim.Optimizer):
    """AdamW, computed in float32, that keeps moments in one byte with one scale per block (blocks.py).

    State by parameter, under bitsandbytes' names: `step` (a number), `state1` and `state2` like the parameter, uint8 or
    float32; for uint8 also `absmax1` and `absmax2`, float32 [..., rows, blocks per row]. All are sharded like the
    parameter. bfloat16 weights are rounded stochastically, as in RoundedAdamW.

    Args:
        seed, local_part: As in RoundedAdamW.
        in_float32: Parameters whose moments stay in float32. `block_length` may name more of them.
    """

    def __init__(
        self, params: Any, *, seed: int, in_float32: Iterable[Tensor], local_part: LocalPart = all_of, **settings: Any
    ) -> None:
        super().__init__(params, settings)
        self._seed, self._local_part = seed, local_part
        self._in_float32 = {id(parameter) for parameter in in_float32}
        self._books: dict[torch.device, list[Book]] = {}
        # In place of the update as written (fused_update.py): for moments in float32, and for those in one byte.
        self.update_range: UpdateRange | None = None
        self.update_blocks: UpdateBlocks | None = None

    @property
    def block_lengths(self) -> set[int]:
        """Elements per block, over all weights; 0 where some have float32 moments."""
        return {self._block(parameter) for group in self.param_groups for parameter in group["params"]}

    @torch.no_grad()
    def init_state(self, _group: dict[str, Any], parameter: Tensor, *_places: int) -> None:
        """Zero moments of a parameter; bitsandbytes' optimizers make theirs by the same name and arguments."""
        state, block = self.state[parameter], self._block(parameter)
        state["step"] = 0
        for moment, scales in BLOCKWISE:
            state[moment] = torch.zeros_like(parameter, dtype=torch.uint8 if block else torch.float32)
            if block:
                row = parameter.detach()[..., : parameter.shape[-1] // block]  # whose shape and shards they have
                state[scales] = torch.zeros_like(row, dtype=torch.float32, memory_format=torch.contiguous_format)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None, "a closure would compute gradients that were clipped already"
        place = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, place)
                place += 1

    def _update(self, parameter: Tensor, group: dict[str, Any], place: int) -> None:
        # By itself, so that a parameter's float32 values are freed before the next one's are made.
        if not self.state[parameter]:
            self.init_state(group, parameter)
        state, block, device = self.state[parameter], self._block(parameter) or 1, parameter.device
        state["step"] += 1
        step = state["step"]
        if device not in self._books:
            self._books[device] = [book_on(device, signed=signed) for signed in (True, False)]
        # The first and the second moment of this rank's elements.
        flat = {name: self._local_part(value)[0].view(-1) for name, value in state.items() if name != "step"}
        moments = [
            HeldMoment(flat[moment], flat.get(scales), self._block(parameter), book)
            for (moment, scales), book in zip(BLOCKWISE, self._books[device], strict=True)
        ]
        local, start = self._local_part(parameter)
        gradient = self._local_part(parameter.grad)[0].reshape(-1)  # type: ignore[arg-type]  # it has one
        weights, key = local.view(-1), key_of(self._seed, step, place)
        all_of_them = Range(place, start, 0, len(weights))
        if block == 1 and self.update_range is not None:
            held = [weights, *(moment.held for moment in moments)]
            self.update_range(held, gradient, all_of_them, group, step, self._seed)
            return
        if block > 1 and self.update_blocks is not None:
            self.update_blocks(weights, moments, gradient, all_of_them, group, step, self._seed)
            return
        whole_blocks = ROUNDED_CHUNK // block * block
        for chunk, first, begin, end in chunks(all_of_them, whole_blocks):
            part = weights[begin:end]
            values = [part.float(), *(moment.read(begin, end) for moment in moments)]
            adamw_update(values, gradient[begin:end].to(torch.float32, copy=True), group, step)
            if part.dtype == torch.bfloat16:
                round_at_random(values[0], random_bits(key_of(key, chunk, 0), first, end - begin, part.device))
                part.copy_(values[0])
            for moment, updated in zip(moments, values[1:], strict=True):
                moment.write(begin, end, updated)

    def _block(self, parameter: Tensor) -> int:
        if id(parameter) in self._in_float32:
            return 0
        return block_length(parameter.shape)
