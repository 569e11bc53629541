"""AdamW for bfloat16 weights and moments with stochastic rounding, so that small updates count on average.

bfloat16 has 8 significant bits. An update below 1/512 of its weight rounds to none, and at a learning rate of 1e-5 most
do. A second moment with beta2 = 0.999 changes by a thousandth per step and would never shrink. Rounding up with a
probability equal to the cut-off part makes the mean right (Gupta et al., Deep Learning with Limited Numerical
Precision, 2015). The bits come from random_bits.py, so copies stay equal and resumes are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from finetune.model.optimizers.random_bits import key_of, random_bits

# Elements that are computed in float32 at a time, counted from the start of the full tensor. Six such tensors live
# at once: 192 MiB, on a GPU enough to hide what starting a kernel costs. A power of two, for fused_update.py.
ROUNDED_CHUNK = 1 << 23
_LOW, _HIGH = 0xFFFF, -0x10000  # the bits of a float32 that bfloat16 lacks, and those that it has

LocalPart = Callable[[Tensor], tuple[Tensor, int]]


class Range(NamedTuple):
    """One weight's elements within a flat tensor that holds several weights."""

    place: int  # of the weight, among all that are trained
    start: int  # in the flattened weight
    begin: int  # in the flat tensor
    end: int


# Updates a range of weight, first and second moment, flat, in place: tensors, gradient, range, the parameter group, the
# step's number, the seed.
UpdateRange = Callable[[Sequence[Tensor], Tensor, Range, dict[str, Any], int, int], None]


def all_of(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor that no rank has a shard of."""
    return tensor, 0


def places_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    """The place of each parameter among all that an optimizer has, by the parameter's name in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return {names[id(parameter)]: place for place, parameter in enumerate(every)}


class RoundedAdamW(torch.optim.AdamW):
    """torch's AdamW, computed in float32. Weights and moments in bfloat16 are rounded stochastically.

    State by parameter: `step` (in host memory), `exp_avg` and `exp_avg_sq` like the parameter. Weights in float32 are
    not rounded: torch's own AdamW updates them the same way.

    Args:
        seed: With a parameter's step count and its place among all parameters it decides how elements are rounded.
        local_part: Takes a parameter or its state. Returns this rank's elements, and the index of the first of them in
            the flattened full tensor.
    """

    def __init__(self, params: Any, *, seed: int, local_part: LocalPart = all_of, **settings: Any) -> None:
        super().__init__(params, **settings, foreach=False)
        self._seed, self._local_part = seed, local_part
        self._ranges: dict[int, list[Range]] = {}
        self.update_range: UpdateRange | None = None  # in place of `update_in_chunks`: fused_update.py

    def round_as(self, ranges: Iterable[tuple[Tensor, Range]]) -> None:
        """Round each range of these flat tensors like the weight it belongs to. An engine has put them in the
        parameters' place. Elements outside any range are padding and are not updated.
        """
        for flat, span in ranges:
            self._ranges.setdefault(id(flat), []).append(span)

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
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        step = int(state["step"])
        local, start = self._local_part(parameter)
        held = [local, *(self._local_part(state[name])[0] for name in ("exp_avg", "exp_avg_sq"))]
        gradient = self._local_part(parameter.grad)[0].reshape(-1)  # type: ignore[arg-type]  # it has one
        flat = [tensor.view(-1) for tensor in held]
        update = self.update_range or update_in_chunks
        for span in self._ranges.get(id(parameter), [Range(place, start, 0, local.numel())]):
            update(flat, gradient, span, group, step, self._seed)


def update_in_chunks(
    tensors: Sequence[Tensor], gradient: Tensor, range_: Range, group: dict[str, Any], step: int, seed: int
) -> None:
    """Update one range of weight, first and second moment, flat, in place, by torch's own operations."""
    key = key_of(seed, step, range_.place)
    for chunk, first, begin, end in chunks(range_, ROUNDED_CHUNK):
        parts = [tensor[begin:end] for tensor in tensors]
        slope = gradient[begin:end].to(torch.float32, copy=True)  # it is overwritten
        values = adamw_update([part.float() for part in parts], slope, group, step)
        for use, (part, value) in enumerate(zip(parts, values, strict=True)):
            if part.dtype == torch.bfloat16:
                round_at_random(value, random_bits(key_of(key, chunk, use), first, end - begin, value.device))
            part.copy_(value)


def chunks(range_: Range, size: int) -> Iterator[tuple[int, int, int, int]]:
    """For each chunk that has some of these elements: its number, the first one's index in it, and their begin and end
    in the flat tensor. Chunks have `size` elements of the full weight, on every rank.

    With size 100, elements [150, 320) at the tensor's start are: chunk 1 from index 50, [0, 50); chunk 2 from 0, [50,
    150); chunk 3 from 0, [150, 170).
    """
    begin = range_.begin
    while begin < range_.end:
        chunk, first = divmod(range_.start + begin - range_.begin, size)
        end = min(range_.end, begin + size - first)
        yield chunk, first, begin, end
        begin = end


def adamw_update(values: Sequence[Tensor], gradient: Tensor, group: dict[str, Any], step: int) -> Sequence[Tensor]:
    """Weight and moments after a step, float32 [elements] each, in their own memory (Loshchilov and Hutter, Decoupled
    Weight Decay Regularization, 2019, algorithm 2)."""
    weight, average, square = values
    beta1, beta2 = group["betas"]
    average.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    # The gradient is done with: its memory holds the denominator.
    denominator = torch.sqrt(square, out=gradient).div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.addcdiv_(average, denominator, value=-group["lr"] / (1 - beta1**step))
    return values


def round_at_random(values: Tensor, bits: Tensor) -> None:
    """Round float32 stochastically to bfloat16's values: away from zero with the cut-off part's probability.

    The low 16 random bits are added to the number's bits, then the low half is cut off. A carry into the exponent is
    right.

        1.0 + 3/4 of a bfloat16 step = 0x3F80C000; adding 0x0000 to 0xFFFF carries in three cases of four.
    """
    values.view(torch.int32).add_(bits.bitwise_and_(_LOW)).bitwise_and_(_HIGH)
