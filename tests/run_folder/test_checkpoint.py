"""Checkpoints hold every tensor bitwise, prune in the right order, and are never used when damaged."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.run_folder import checkpoint as checkpoints
from finetune.run_folder.checkpoint import (
    Checkpoint,
    newest_valid,
    read_checkpoint,
    step_folder,
    write_checkpoint,
)
from finetune.run_folder.trained_tensors import load_model, load_optimizer, model_tensors, optimizer_tensors
from finetune.strategies.pieces import Ranks


def simple(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((4, 3), value)}, "optimizer": {"w:step": torch.tensor(value)}}


def newest_step(run_dir: Path) -> int | None:
    newest, _ = newest_valid(run_dir)
    return newest.step if newest else None


def steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def bitwise(left: torch.Tensor, right: torch.Tensor) -> bool:
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and left.contiguous().view(-1).view(torch.uint8).equal(
        right.contiguous().view(-1).view(torch.uint8)
    )


def test_every_kind_of_tensor_comes_back_bitwise(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    tensors = {
        "plain": torch.randn(3, 5),
        "bfloat16": torch.randn(7).bfloat16(),
        "float16": torch.randn(7).half(),
        "negative_zero_and_tiny": torch.tensor([-0.0, 1e-45, 3.4e38]),
        "zero_dim": torch.tensor(3.5),
        "int64": torch.tensor([2**60, -1]),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(3, 5).t(),
        "strided": torch.arange(10.0)[::2],
        "expanded": torch.tensor([1.5]).expand(4),
        "tied": base,
        "tied_again": base,
        "overlapping_view": base[1:3],
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    write_checkpoint(tmp_path, 7, {"model": tensors, "none": {}}, {"loss": 0.1 + 0.2, "best": None}, keep=1)
    newest, damaged = newest_valid(tmp_path)
    assert newest is not None
    assert newest.step == 7
    assert damaged == ()
    groups, state = read_checkpoint(newest)
    assert state == {"step": 7, "loss": 0.1 + 0.2, "best": None}
    assert groups["none"] == {}
    assert groups["model"].keys() == tensors.keys()
    assert [name for name in tensors if not bitwise(groups["model"][name], tensors[name].detach())] == []
    assert groups["model"]["tied"] is groups["model"]["tied_again"]
    assert not list(step_folder(tmp_path, 7).glob("*.bin"))
    assert not list(step_folder(tmp_path, 7).glob("*.pt"))


def test_a_tied_tensor_is_stored_once(tmp_path: Path) -> None:
    weight = torch.zeros(1000, 10)
    write_checkpoint(tmp_path, 1, {"model": {"embed": weight, "head": weight}}, {}, keep=1)
    assert (step_folder(tmp_path, 1) / "model-00000.safetensors").stat().st_size < 41_000


def test_keeps_the_best_besides_the_newest(tmp_path: Path) -> None:
    """`keep` counts the newest; the best is one more where it is not among them, and goes when another is better."""
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2)):
        write_checkpoint(tmp_path, step, simple(step), {}, keep=2, best=best)
    assert steps(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    write_checkpoint(tmp_path, 6, simple(6), {}, keep=2, best=6)
    assert steps(tmp_path) == ["step-00000005", "step-00000006"]
    write_checkpoint(tmp_path, 7, simple(7), {}, keep=1, best=6)
    assert steps(tmp_path) == ["step-00000006", "step-00000007"]
    write_checkpoint(tmp_path, 8, simple(8), {}, keep=1, best=None)
    assert steps(tmp_path) == ["step-00000008"]


def test_keeps_the_newest_and_clears_older_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write_checkpoint(tmp_path, step, simple(step), {}, keep=2)
    assert steps(tmp_path) == ["step-00000003", "step-00000004"]


def test_the_same_step_twice_is_left_as_it_is(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path, 5, simple(5), {}, keep=2)
    before = first.stat().st_ino
    assert write_checkpoint(tmp_path, 5, simple(5), {}, keep=2).stat().st_ino == before
    (first / "state.json").write_text("{}")
    write_checkpoint(tmp_path, 5, simple(5), {}, keep=2)
    assert newest_step(tmp_path) == 5
    assert steps(tmp_path) == ["step-00000005"]


def test_a_damaged_later_checkpoint_does_not_push_out_a_valid_one(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step, simple(step), {}, keep=3)
    (step_folder(tmp_path, 30) / "model-00000.safetensors").write_bytes(b"")
    write_checkpoint(tmp_path, 25, simple(25), {}, keep=1)
    assert newest_step(tmp_path) == 25
    write_checkpoint(tmp_path, 30, simple(30), {}, keep=1)
    assert steps(tmp_path) == ["step-00000030"]
    assert newest_step(tmp_path) == 30


def flip(name: str, position: float) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(position * (len(content) - 1))] ^= 0x10
        (folder / name).write_bytes(content)

    return damage


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def delete(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def manifest(**changes: object) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "MANIFEST.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


FILES = ("model-00000.safetensors", "optimizer-00000.safetensors", "state.json", "MANIFEST.json")
DAMAGES = {
    **{f"flip {name} at {place}": flip(name, place) for name in FILES for place in (0.0, 0.5, 1.0)},
    **{f"cut {name}": cut(name) for name in FILES},
    **{f"delete {name}": delete(name) for name in FILES},
    "manifest without files": manifest(files={}),
    "manifest of another step": manifest(step=1),
    "manifest of another format": manifest(format=1),
    "manifest with aliases": manifest(aliases={"model": {"v": "w"}}),
    "manifest a list": lambda folder: (folder / "MANIFEST.json").write_text("[]"),
    "manifest empty": lambda folder: (folder / "MANIFEST.json").write_text(""),
    "renamed": lambda folder: folder.rename(folder.with_name("step-00000003")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, step, simple(step), {}, keep=2)
    damage(step_folder(tmp_path, 2))
    newest, damaged = newest_valid(tmp_path)
    assert len(damaged) == 1, "the damage was not seen"
    assert "step-0000000" in damaged[0]
    assert "\n" not in damaged[0]
    assert newest is not None
    assert newest.step == 1
    assert read_checkpoint(newest)[0]["model"]["w"].eq(1).all()


def test_the_damages_are_many() -> None:
    assert len(DAMAGES) >= 27


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["ENOSPC", "EDQUOT", "safetensors"],
)
def test_a_full_disk_is_one_line_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write_checkpoint(tmp_path, 1, simple(1), {}, keep=1)

    def full(tensors: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(EnvironmentMismatch, match=r"step-00000002: .*disk is full .*earlier checkpoints are intact"):
        write_checkpoint(tmp_path, 2, simple(2), {}, keep=1)
    assert newest_step(tmp_path) == 1
    assert steps(tmp_path) == ["step-00000001"]


def test_an_unwritable_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(tensors: object, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(checkpoints, "save_file", read_only)
    with pytest.raises(EnvironmentMismatch, match="Read-only file system"):
        write_checkpoint(tmp_path, 2, simple(2), {}, keep=1)


def test_state_with_nan_is_our_own_bug(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_checkpoint(tmp_path, 2, simple(2), {"best": float("nan")}, keep=1)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)


def test_model_tensors_are_the_trained_ones_once() -> None:
    assert list(model_tensors(Tied())) == ["embed.weight", "norm.weight", "norm.bias"]


def test_load_model_is_in_place_and_bitwise() -> None:
    saved, model = Tied(), Tied()
    address = model.embed.weight.data_ptr()
    load_model(model, model_tensors(saved))
    assert bitwise(model.head.weight, saved.embed.weight)
    assert model.embed.weight.data_ptr() == address
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("norm.bias"), "missing: norm.bias"),
        (lambda tensors: tensors.update(new=torch.ones(1)), "unexpected: new"),
        (lambda tensors: tensors.update({"norm.bias": torch.ones(5)}), r"norm.bias: float32 \(5,\) in the checkpoint"),
        (lambda tensors: tensors.update({"norm.bias": torch.ones(4).half()}), r"norm.bias: float16 \(4,\)"),
        (lambda tensors: tensors["norm.bias"].fill_(float("nan")), "not finite: norm.bias"),
        (lambda tensors: tensors["norm.bias"].fill_(float("inf")), "not finite: norm.bias"),
    ],
)
def test_load_model_refuses_what_does_not_fit(change: Callable[[dict[str, torch.Tensor]], object], words: str) -> None:
    model = Tied()
    tensors = {name: value.clone() for name, value in model_tensors(Tied()).items()}
    change(tensors)
    before = model.embed.weight.clone()
    with pytest.raises(FinetuneError, match=words):
        load_model(model, tensors)
    assert model.embed.weight.equal(before), "refused before anything was copied"


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def grouped(model: torch.nn.Module) -> torch.optim.AdamW:
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2 and parameter.requires_grad]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_continues_bitwise(tmp_path: Path, dtype: torch.dtype) -> None:
    model = Tied().to(dtype)
    optimizer = grouped(model)
    trained(model, optimizer, 3, seed=0)
    tensors = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
    assert {key.rpartition(":")[2] for key in tensors["optimizer"]} == {"step", "exp_avg", "exp_avg_sq"}
    write_checkpoint(tmp_path, 3, tensors, {}, keep=1)
    trained(model, optimizer, 3, seed=1)

    resumed = Tied().to(dtype)
    again = grouped(resumed)
    trained(resumed, again, 1, seed=9)  # what it held before is dropped
    newest, _ = newest_valid(tmp_path)
    assert isinstance(newest, Checkpoint)
    groups, _ = read_checkpoint(newest)
    load_model(resumed, groups["model"])
    load_optimizer(resumed, again, groups["optimizer"])
    trained(resumed, again, 3, seed=1)
    pairs = [(model_tensors(model), model_tensors(resumed))]
    pairs += [(optimizer_tensors(model, optimizer), optimizer_tensors(resumed, again))]
    for left, right in pairs:
        assert left.keys() == right.keys()
        assert all(bitwise(left[name], right[name]) for name in left)


def test_an_optimizer_that_never_stepped_has_nothing_to_save() -> None:
    model = Tied()
    optimizer = grouped(model)
    assert optimizer_tensors(model, optimizer) == {}
    trained(model, optimizer, 1, seed=0)
    load_optimizer(model, optimizer, {})
    assert optimizer_tensors(model, optimizer) == {}


def test_numbers_of_an_optimizer_come_back_as_numbers() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight] = {"step": 3, "scale": 0.1, "exp_avg": torch.ones(2, 2)}
    tensors = optimizer_tensors(model, optimizer)
    load_optimizer(model, optimizer, tensors)
    state = optimizer.state[model.weight]
    assert state["step"] == 3
    assert type(state["step"]) is int
    assert state["scale"] == 0.1


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("gone.weight:exp_avg", torch.ones(2), "unexpected: gone.weight:exp_avg"),
        ("weight:exp_avg", torch.ones(3), r"weight:exp_avg: shape \(3,\)"),
        ("weight:exp_avg_sq", torch.full((2, 2), float("nan")), "not finite: weight:exp_avg_sq"),
    ],
)
def test_load_optimizer_refuses_what_does_not_fit(key: str, value: torch.Tensor, words: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(FinetuneError, match=words):
        load_optimizer(model, torch.optim.AdamW(model.parameters()), {key: value})


def test_an_optimizer_of_another_model_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="not the model's"):
        optimizer_tensors(torch.nn.Linear(2, 2), torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()))


@pytest.mark.parametrize(
    "name", [".tmp-step-00000003", "step-00000003", ".tmp-old-step-00000003", ".tmp-gone-step-00000001"]
)
@pytest.mark.parametrize("kind", ["pipe", "link", "lost link", "file"])
def test_what_is_in_the_place_of_a_checkpoint_does_not_stop_a_run(tmp_path: Path, name: str, kind: str) -> None:
    write_checkpoint(tmp_path, 1, simple(1), {}, keep=1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    path = tmp_path / "checkpoints" / name
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "file":
            path.write_text("")
        case "link":
            path.symlink_to(elsewhere)
        case _:
            path.symlink_to(tmp_path / "nowhere")
    write_checkpoint(tmp_path, 3, simple(3), {}, keep=1)
    assert newest_step(tmp_path) == 3
    assert step_folder(tmp_path, 3).is_dir()
    assert not step_folder(tmp_path, 3).is_symlink()
    assert (elsewhere / "kept").read_text() == "kept"


def test_a_piece_that_changed_on_its_way_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 compares what it received with the hash that the other machine's rank took of its own file."""
    part = {"file": "model-00001.safetensors", "bytes": 3, "sha256": "as written"}
    ranks = Ranks(rank=0, world=2, apart={1: 1})
    for arrived in ("as written", "changed"):
        moved = {part["file"]: arrived}
        monkeypatch.setattr("finetune.ranks.transfers.move_files", lambda *_, moved=moved: moved)
        if arrived == "as written":
            checkpoints._collect(tmp_path, [{}, {"model": part}], ranks)
            continue
        with pytest.raises(OSError, match=r"model-00001\.safetensors is not what rank 1 wrote"):
            checkpoints._collect(tmp_path, [{}, {"model": part}], ranks)
