"""Which rank is which stage in which pipeline, and which ranks add up their gradients.

A pipeline's stages follow each other. With several pipelines, the next one's stages come after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

Stages = tuple[int, ...]  # that have one and the same weight
BUCKET_BYTES = 25 * 2**20  # gradients are sent together until they are so many, as DDP does by default


@dataclass(frozen=True)
class StagePlace:
    """This rank's stage and pipeline copy, and the number of each."""

    stage: int
    stages: int
    copy: int = 0
    copies: int = 1

    @classmethod
    def of(cls, rank: int, ranks: int, copies: int) -> StagePlace:
        """The place of one rank among this many."""
        copy, stage = divmod(rank, ranks // copies)
        return cls(stage, ranks // copies, copy, copies)

    def ranks_of(self, stages: Iterable[int]) -> list[int]:
        """The ranks that are one of these stages, in any copy."""
        some = sorted(stages)
        return [copy * self.stages + stage for copy in range(self.copies) for stage in some]

    @property
    def own_ranks(self) -> range:
        """The ranks of this copy, by stage."""
        return range(self.copy * self.stages, (self.copy + 1) * self.stages)

    def own_copy(self, timeout: timedelta | None) -> dist.ProcessGroup | None:
        """The ranks of this copy; None where they are all. Every rank calls it."""
        if self.copies == 1:
            return None
        firsts = range(0, self.copies * self.stages, self.stages)
        groups = [dist.new_group(list(range(first, first + self.stages)), timeout=timeout) for first in firsts]
        own: dist.ProcessGroup = groups[self.copy]
        return own


class GradientSums:
    """Adds up the gradients of a weight over the ranks that have it: two stages have a tied one, and each copy all."""

    def __init__(
        self,
        place: StagePlace,
        stages_of: Mapping[str, Stages],
        own: Mapping[str, nn.Parameter],
        timeout: timedelta | None,
    ) -> None:
        """Every rank calls it.

        Args:
            stages_of: The stages that have each trained weight, by name, in the same order on all ranks.
            own: This stage's trained weights, by name.
            timeout: How long ranks wait for each other.
        """
        self._summed: list[tuple[dist.ProcessGroup, list[nn.Parameter]]] = []
        for stages in dict.fromkeys(stages_of.values()):
            ranks = place.ranks_of(stages)
            if len(ranks) == 1:
                continue
            group = dist.new_group(ranks, timeout=timeout)  # every rank makes all
            if place.stage in stages:
                weights = [weight for name, weight in own.items() if stages_of[name] == stages]
                self._summed.append((group, weights))
        # Weights of this stage that an earlier one has too: their gradient is in that one's norm.
        self.counted_before = {id(weight) for name, weight in own.items() if stages_of[name][0] < place.stage}

    def add_up(self) -> None:
        """Make each gradient the sum over the ranks; the same bits on all of them."""
        for group, weights in self._summed:
            for weight in weights:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
            for bucket in _buckets([weight.grad for weight in weights if weight.grad is not None]):
                _sum_over(group, bucket)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Split in order into buckets with one number format, up to BUCKET_BYTES or one tensor."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        nbytes = sum(tensor.nbytes for tensor in (*bucket, gradient))
        if bucket and (nbytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _sum_over(group: dist.ProcessGroup, gradients: Sequence[Tensor]) -> None:
    """In place; several are copied into one tensor, sent, and copied back."""
    if len(gradients) == 1 and gradients[0].is_contiguous():
        dist.all_reduce(gradients[0], group=group)
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
