"""FSDP2 in one process: what is read after an evaluation, and which rows of which tensor each of many ranks gets."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.distributed.tensor import DTensor

from finetune.errors import EnvironmentMismatch
from finetune.model.build import build_model, decoder_parts
from finetune.planner.trace.recorder import OnOperations
from finetune.recipe.strategy import read_strategy
from finetune.recipe.strategy_fit import ranks_problem
from finetune.run_folder.save_restore import checkpoint_tensors
from finetune.run_folder.trained_tensors import trained_checksums
from finetune.strategies import fsdp, pieces
from finetune.strategies.assemble import Assembled
from finetune.strategies.fsdp import make_mesh, shard_model
from finetune.strategies.pieces import all_ranks, covers, is_first_copy, piece_to_write, row_range
from finetune.training.batch_plan import plan_batches
from finetune.training.held_state import hold_state
from finetune.training.loop import evaluate
from finetune.training.objectives.supervised import Supervised
from tests.support.models.tiny import Documents, flat_batch, save_tiny
from tests.support.runs.one_rank import CPU, OneRank, as_before, half_recipe, one_rank
from tests.support.runs.recipes import least_recipe

SIZE_OF_COPIES = "parallelism_config_dp_replicate_size"


def look(rank: OneRank) -> None:
    """An evaluation."""
    rows = Documents([7, 12, 5])
    plan = plan_batches(rank.recipe, len(rows), world_size=1, rank=0, flat=True)
    assert math.isfinite(evaluate(rank.accelerator, rank.parts.model, rows, plan, Supervised())["loss"])


def gathered(rank: OneRank) -> list[str]:
    """The parameters that are whole now, and not those of the optimizer."""
    return [name for name, tensor in rank.parts.unwrapped_model.named_parameters() if not isinstance(tensor, DTensor)]


@pytest.mark.parametrize("name", ["LlamaDecoderLayer", "BertLayer", None])
def test_a_file_may_name_the_models_own_layers(tiny_llama: Path, tmp_path: Path, name: str | None) -> None:
    file = tmp_path / "mine.yaml"
    section = {"fsdp_version": 2} | ({} if name is None else {"fsdp_transformer_layer_cls_to_wrap": name})
    file.write_text(yaml.safe_dump({"distributed_type": "FSDP", "fsdp_config": section}))
    words = r"BertLayer: the model's layers are LlamaDecoderLayer; write that, or remove the line"
    refused = pytest.raises(EnvironmentMismatch, match=words) if name == "BertLayer" else nullcontext()
    with refused, one_rank(half_recipe(tiny_llama, tmp_path, str(file))) as rank:
        assert read_strategy(str(file)).unit_class == name
        assert any(isinstance(tensor, DTensor) for tensor in rank.parts.unwrapped_model.parameters())


@pytest.fixture
def sharded(tiny_llama: Path, tmp_path: Path) -> Iterator[OneRank]:
    with one_rank(half_recipe(tiny_llama, tmp_path, "fsdp2")) as rank:
        yield rank


def full_tensor(tensor: Any) -> Tensor:
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def checkpointed(parts: Assembled) -> dict[str, Tensor]:
    result = checkpoint_tensors(parts)
    return {f"{group} {name}": full_tensor(tensor) for group in result for name, tensor in result[group].items()}


def exported(parts: Assembled) -> dict[str, Tensor]:
    return {name: full_tensor(tensor) for name, tensor in parts.trained_weights(dtype=None, keep=True).items()}


def summed(parts: Assembled) -> dict[str, Tensor]:
    return {name: torch.tensor([*bytes.fromhex(checksum)]) for name, checksum in trained_checksums(parts).items()}


@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize("read", [checkpointed, exported, summed])
def test_what_is_read_after_an_evaluation_is_what_the_optimizer_holds(
    sharded: OneRank, read: Callable[[Assembled], dict[str, Tensor]]
) -> None:
    sharded.step([flat_batch(seed=0)])
    assert gathered(sharded) == []
    expected = read(sharded.parts)
    look(sharded)
    assert "lm_head.weight" in gathered(sharded), "else there is nothing to put back"
    actual = read(sharded.parts)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == actual[name].dtype
        assert torch.equal(tensor, actual[name]), name
    assert gathered(sharded) == []


def test_what_was_saved_is_read_back_after_an_evaluation(sharded: OneRank) -> None:
    sharded.step([flat_batch(seed=0)])
    held, expected = hold_state(sharded.recipe, sharded.parts, all_ranks(), on_host=True), checkpointed(sharded.parts)
    assert held.nbytes > 0
    sharded.step([flat_batch(seed=1)])
    look(sharded)
    held.restore()
    actual = checkpointed(sharded.parts)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_an_evaluation_between_steps_changes_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    steps, ends = [], []
    for looks in (False, True):
        with one_rank(half_recipe(tiny_llama, tmp_path / str(looks), "fsdp2")) as rank:
            steps.append([])
            for seed in range(3):
                if looks:
                    look(rank)
                steps[-1].append(rank.step([flat_batch(seed=seed)]))
                assert gathered(rank) == []
            ends.append(checkpointed(rank.parts))
    assert steps[0] == steps[1]
    assert steps[0][0].loss != steps[0][2].loss
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


class Scattered:
    """Rank 0's calls, kept for the ranks that come after it."""

    def __init__(self) -> None:
        self.parts: list[list[Tensor]] = []
        self.buffers: list[Tensor] = []

    @contextmanager
    def rank(self, rank: int, world: int) -> Iterator[None]:
        """This process is that rank, in a group whose other ranks are not there."""
        from torch.testing._internal.distributed.fake_pg import FakeStore  # torch has no public fake process group

        parts, buffers = iter(self.parts), iter(self.buffers)

        def scatter(into: Tensor, given: list[Tensor] | None, src: int) -> None:
            assert (src, given is None) == (0, rank > 0)
            if given is not None:
                assert len(given) == world
                self.parts.append([part.clone() for part in given])
            into.copy_(given[0] if given is not None else next(parts)[rank])

        def broadcast(tensor: Tensor, src: int) -> None:
            if rank == src == 0:
                self.buffers.append(tensor.clone())
            else:
                tensor.copy_(next(buffers))

        with as_before():
            dist.init_process_group(dist.Backend.FAKE, rank=rank, world_size=world, store=FakeStore())
            with mock.patch.object(dist, "scatter", scatter), mock.patch.object(dist, "broadcast", broadcast):
                yield


@pytest.mark.thorough
def test_weights_kept_between_micro_steps_are_those_of_the_update_before(tiny_llama: Path, tmp_path: Path) -> None:
    """Two steps of three micro-batches end in the same weights as where each micro-batch gathers them anew."""
    weights = []
    for instead in (fsdp.weights_kept, nullcontext):
        with (
            one_rank(half_recipe(tiny_llama, tmp_path, "fsdp2_grad_op")) as rank,
            mock.patch.object(fsdp, "weights_kept", instead),
        ):
            for step in range(2):
                rank.step([flat_batch(seed=3 * step + micro) for micro in range(3)])
                assert gathered(rank) == []
            weights.append(exported(rank.parts))
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("name", ["fsdp2", "fsdp2_grad_op"])
def test_gradients_kept_until_the_last_micro_batch(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    """A third of the reductions, and the same weights as with a reduction after each of three micro-batches.

    Both add gradients in float32, in the same order. Another step begins without any.
    """
    found: list[tuple[int, dict[str, Tensor]]] = []
    for keeps in (False, True):
        reductions = list[str]()

        def note(func: Any, _: Any, __: Any, run: Callable[[], Any], seen: list[str] = reductions) -> Any:
            if func.namespace == "fsdp" and "chunk_cat" in str(func):  # a unit's gradients, for its reduce-scatter
                seen.append(str(func))
            return run()

        with one_rank(half_recipe(tiny_llama, tmp_path, name)) as rank:
            for step in range(2):
                batches = [flat_batch(seed=3 * step + micro) for micro in range(3)]
                with OnOperations(note):
                    rank.step(batches, keeps_gradients=keeps)
            found.append((len(reductions), exported(rank.parts)))
    (each, first), (once, second) = found
    assert each == 3 * once > 0
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize(("world", "copies"), [(1, 1), (2, 1), (5, 1), (4, 2), (6, 2), (6, 3)])
def test_every_rank_gets_its_rows_and_each_row_is_written_once(world: int, copies: int, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "qwen3", tie_word_embeddings=copies > 1)
    requested, strategy = half_recipe(base, tmp_path, "fsdp2"), read_strategy("fsdp2")
    if copies > 1:
        sizes = {"parallelism_config": {SIZE_OF_COPIES: copies}}
        strategy = replace(strategy, settings=strategy.settings | sizes)
    shards, ranks = world // copies, Scattered()
    full = {name: tensor.detach() for name, tensor in build_model(requested, CPU).named_parameters()}
    written: dict[str, list[tuple[int, int]]] = {name: [] for name in full}
    for rank in range(world):
        with ranks.rank(rank, world):
            decoder = decoder_parts(build_model(requested, CPU if rank == 0 else torch.device("meta")))
            shard_model(decoder, strategy, make_mesh(strategy, CPU), CPU, torch.bfloat16)
            actual = dict(decoder.named_parameters())
            assert actual.keys() == full.keys()
            for name, parameter in actual.items():
                assert isinstance(parameter, DTensor)
                rows = -(-len(full[name]) // shards)  # as torch.chunk cuts
                rows_of_rank = full[name][rank % shards * rows : (rank % shards + 1) * rows]
                assert torch.equal(parameter.to_local(), rows_of_rank), f"rank {rank}: {name}"
                first, last = row_range(parameter)
                assert last - first == len(rows_of_rank)
                assert is_first_copy(parameter) == (rank < shards)
                if (piece := piece_to_write(parameter, rank)) is not None and piece.tensor.numel():
                    written[name].append((piece.start, piece.tensor.numel()))
    assert all(covers(written[name], full[name].numel()) for name in full)


def test_rank_0_frees_each_tensor_when_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the whole model stays in host memory until the last shard is sent."""
    requested = half_recipe(save_tiny(tmp_path / "base"), tmp_path, "fsdp2")
    strategy, alive = read_strategy("fsdp2"), list[int]()
    scattered = fsdp._scattered
    with Scattered().rank(0, 2):
        decoder = decoder_parts(build_model(requested, CPU))
        # A storage lives as long as any tensor that uses it.
        watched = [weakref.ref(parameter.untyped_storage()) for parameter in decoder.parameters()]

        def counting(*arguments: Any) -> Tensor:
            alive.append(sum(storage() is not None for storage in watched))
            return scattered(*arguments)

        monkeypatch.setattr(fsdp, "_scattered", counting)
        shard_model(decoder, strategy, make_mesh(strategy, CPU), CPU, torch.bfloat16)
    assert alive == list(range(len(watched), 0, -1))


@pytest.mark.parametrize(
    ("copies", "shape", "place"), [(2, (2, 4), (1, 1)), (4, (4, 2), (2, 1)), (0, (2, 4), (1, 1)), (None, (8,), (5,))]
)
def test_copies_are_the_outer_dimension(
    copies: int | None, shape: tuple[int, ...], place: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 5 of 8. 0 means one copy a node, of four ranks here."""
    strategy = read_strategy("fsdp2")
    sizes = {"parallelism_config": {SIZE_OF_COPIES: copies}}
    if copies is not None:
        strategy = replace(strategy, settings=strategy.settings | sizes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with Scattered().rank(5, 8):
        mesh = make_mesh(strategy, CPU)
        assert (mesh.shape, mesh.mesh_dim_names) == (shape, ("copies", "shards")[-len(shape) :])
        assert tuple(mesh.get_coordinate() or ()) == place


def test_ranks_of_a_copy_and_of_a_shard_wait_as_long_as_the_run_says() -> None:
    """NCCL's own groups give up after ten minutes."""
    strategy = read_strategy("fsdp2")
    strategy = replace(strategy, settings=strategy.settings | {"parallelism_config": {SIZE_OF_COPIES: 2}})
    patience = timedelta(seconds=7)
    with Scattered().rank(5, 8), mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        mesh = make_mesh(strategy, CPU, patience)
        own = [dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names or ()]
    assert own == [[1, 5], [4, 5, 6, 7]]
    assert [call.args[0] for call in made.call_args_list] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert {call.kwargs["timeout"] for call in made.call_args_list} == {patience}


@pytest.mark.parametrize("copies", [3, 8])
def test_ranks_that_make_no_copies_are_refused(copies: int) -> None:
    sizes = {"parallelism_config": {SIZE_OF_COPIES: copies}}
    strategy = read_strategy("fsdp2")
    strategy = replace(strategy, settings=strategy.settings | sizes)
    problem = ranks_problem(least_recipe(), strategy, 8, 8)
    assert problem is not None
    assert f"8 processes make {copies} such copies" in problem


@pytest.mark.thorough
def test_a_shard_is_rounded_by_its_place(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank holds all rows; where it is told that its first one is the third, other random bits are drawn."""

    def updated(folder: Path) -> list[Tensor]:
        asked = half_recipe(tiny_llama, folder, "fsdp2")
        pure = asked.training.model_copy(update={"pure_bf16": True})
        with one_rank(asked.model_copy(update={"training": pure})) as rank:
            rank.step([flat_batch()])
            return [parameter.full_tensor().detach() for parameter in rank.parts.model.parameters()]

    first, again = updated(tmp_path / "a"), updated(tmp_path / "b")
    assert all(map(torch.equal, first, again))
    monkeypatch.setattr(pieces, "row_range", lambda parameter: (2, 2 + parameter.shape[0]))
    assert not any(map(torch.equal, first, updated(tmp_path / "c")))
