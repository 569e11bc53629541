"""Copies of what a rank writes: of values, not of views, and in the memory of the copy before."""

from __future__ import annotations

import torch

from finetune.run_folder.background import HostCopies
from finetune.run_folder.checkpoint import OwnPieces, own_pieces
from finetune.strategies.pieces import Piece


def pieces() -> dict[str, OwnPieces]:
    flat = torch.arange(12.0)
    shared = torch.ones(4, 3)
    model = {"a": flat[:6].view(2, 3), "b": flat[6:], "tied": shared, "head": shared, "turned": shared.t()}
    return own_pieces({"model": model, "optimizer": {"a:exp_avg": Piece(torch.zeros(5), (9,), 4)}}, 0)


def test_names_of_one_tensor_are_written_once() -> None:
    own = pieces()["model"]
    assert list(own.tensors) == ["a", "b", "tied", "turned"]
    assert own.aliases == {"head": "tied"}
    assert own.entries["a"] == {"shape": (2, 3), "dtype": "float32", "start": 0, "n": 6}


def test_views_of_one_shape_in_one_storage_are_two_tensors() -> None:
    """As of gate and up in one parameter, or of two layers in a stack."""
    stack = torch.arange(12.0).view(2, 2, 3)
    own = own_pieces({"model": {"first": stack[0], "second": stack[1], "again": stack[1]}}, 0)["model"]
    assert own.aliases == {"again": "second"}
    copied = HostCopies().copied({"model": own})["model"].tensors
    assert {name: tensor.flatten().tolist() for name, tensor in copied.items()} == {
        "first": [0, 1, 2, 3, 4, 5],
        "second": [6, 7, 8, 9, 10, 11],
    }


def test_a_piece_that_the_next_step_changes_is_copied() -> None:
    """A stage's own weight, where a partition of ZeRO is a copy already."""
    live, made = torch.ones(3), torch.ones(3)
    found = own_pieces({"model": {"live": Piece(live, (3,), 0, live=True), "made": Piece(made, (3,), 0)}}, 1)
    assert found["model"].copies == {"made"}
    copied = HostCopies().copied(found)["model"].tensors
    live.zero_()
    assert copied["live"].tolist() == [1, 1, 1]
    assert copied["made"] is found["model"].tensors["made"]


def test_a_copy_has_the_values_in_storages_of_its_own() -> None:
    found = pieces()
    copied = HostCopies().copied(found)
    storages = set()
    for group, own in found.items():
        assert (copied[group].entries, copied[group].aliases) == (own.entries, own.aliases)
        for name, tensor in own.tensors.items():
            copy = copied[group].tensors[name]
            assert torch.equal(copy, tensor)
            assert copy.is_contiguous()
            storages.add(copy.untyped_storage().data_ptr())
            if name not in own.copies:
                assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr(), name
    assert len(storages) == 5


def test_pieces_that_are_copies_already_are_not_copied_again() -> None:
    found = pieces()["optimizer"]
    copied = HostCopies().copied({"optimizer": found})["optimizer"]
    assert copied.tensors["a:exp_avg"] is found.tensors["a:exp_avg"]
    assert HostCopies().bytes_to_allocate({"optimizer": found}) == 0


def test_memory_for_tensors_of_a_gpu_is_kept_and_rounded_up() -> None:
    """As on a GPU: what is pinned stays pinned. Without one nothing can be pinned, and other memory takes its place."""
    copies = HostCopies(on_gpu=lambda tensor: tensor.ndim > 0)
    weight, count = torch.ones(3, 100), torch.tensor(1.0)  # 1,200 bytes, 4 bytes
    found = own_pieces({"model": {"w": weight, "count": count}}, 0)
    assert copies.bytes_to_allocate(found) == 2048 + 4
    first = copies.copied(found)["model"].tensors
    assert copies.bytes_to_allocate(found) == 4
    weight.fill_(7.0)
    second = copies.copied(found)["model"].tensors
    assert second["w"].data_ptr() == first["w"].data_ptr()
    assert second["w"].eq(7.0).all()
    assert second["count"].data_ptr() != first["count"].data_ptr()
    larger = own_pieces({"model": {"w": torch.ones(5, 100)}}, 0)
    assert copies.copied(larger)["model"].tensors["w"].shape == (5, 100)
