"""Which rank is which stage of which pipeline, and in what portions gradients are sent."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from finetune.recipe.schema import Recipe
from finetune.strategies.pipeline import ranks
from finetune.strategies.pipeline.ranks import GradientSums, StagePlace
from finetune.training.batch_plan import plan_batches
from tests.support.runs.recipes import least_recipe


@pytest.mark.parametrize(("world", "copies"), [(2, 1), (4, 1), (4, 2), (6, 2), (6, 3), (16, 4)])
def test_places(world: int, copies: int) -> None:
    """Each rank is one stage of one pipeline, and its batches are those of that place."""
    places = [StagePlace.of(rank, world, copies) for rank in range(world)]
    stages = world // copies
    assert [(place.copy, place.stage) for place in places] == list(itertools.product(range(copies), range(stages)))
    for rank, place in enumerate(places):
        assert place.ranks_of([place.stage]) == [rank % stages + copy * stages for copy in range(copies)]
        assert rank in place.ranks_of([place.stage])
        plan = plan_batches(recipe(), 10, world_size=world, rank=rank, flat=True, stages=stages)
        assert (plan.rank, plan.world_size, plan.stage, plan.stages) == (place.copy, copies, place.stage, stages)
    both_ends = places[0].ranks_of([0, stages - 1])
    assert both_ends == sorted(both_ends)
    assert len(both_ends) == 2 * copies


def recipe() -> Recipe:
    return least_recipe(training={"global_batch_size": 4})


def test_gradients_are_sent_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one number format, up to so many bytes or of one tensor; each gradient is summed once, into itself. The
    all-reduce of this test doubles: as of two ranks that have the same gradients."""
    weights = {f"w{index}": nn.Parameter(torch.zeros(numel)) for index, numel in enumerate((3, 4, 20, 2, 5))}
    weights["half"] = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    weights["unused"] = nn.Parameter(torch.zeros(4))
    for index, (name, weight) in enumerate(weights.items()):
        if name != "unused":
            weight.grad = torch.full_like(weight, index + 1)
    sent: list[tuple[int, torch.dtype]] = []

    def all_reduce(tensor: torch.Tensor, group: object) -> None:
        assert group == (1, 3)
        sent.append((tensor.numel(), tensor.dtype))
        tensor.mul_(2)

    monkeypatch.setattr(ranks, "BUCKET_BYTES", 40)
    monkeypatch.setattr(ranks.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(ranks.dist, "new_group", lambda some, timeout: tuple(some))
    stages_of = dict.fromkeys(weights, (1,)) | {"another's": (0,)}
    sums = GradientSums(StagePlace.of(3, 4, 2), stages_of, weights, None)
    sums.add_up()
    single, half = torch.float32, torch.bfloat16
    assert sent == [(7, single), (20, single), (7, single), (2, half), (4, single)]
    for index, (name, weight) in enumerate(weights.items()):
        assert weight.grad is not None
        expected = 0.0 if name == "unused" else 2.0 * (index + 1)
        assert weight.grad.tolist() == [expected] * weight.numel()


def test_one_pipeline_sums_what_two_stages_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tied embeddings the first stage and the last; of two pipelines all four at once. Their norm is the first's."""
    groups: list[tuple[int, ...]] = []

    def new_group(some: list[int], timeout: None) -> tuple[int, ...]:
        groups.append(tuple(some))
        return groups[-1]

    monkeypatch.setattr(ranks.dist, "new_group", new_group)
    tied = nn.Parameter(torch.zeros(1))
    stages_of = {"embeddings": (0, 2), "first": (0,), "middle": (1,)}
    for copies, expected in ((1, [(0, 2)]), (2, [(0, 2, 3, 5), (0, 3), (1, 4)])):
        groups.clear()
        last = GradientSums(StagePlace.of(2, 3 * copies, copies), stages_of, {"embeddings": tied}, None)
        assert groups == expected  # on every rank, its own or not
        assert last.counted_before == {id(tied)}
        first = GradientSums(StagePlace.of(0, 3 * copies, copies), stages_of, {"embeddings": tied}, None)
        assert first.counted_before == set()
