"""Checkpoints written behind the training's back: one at a time, complete or not there, failures told."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.errors import EnvironmentMismatch, NotFinite
from finetune.run_folder import checkpoint
from finetune.run_folder.background import Saves, saves_in_background
from finetune.run_folder.checkpoint import checkpoint_steps, newest_valid, read_checkpoint, step_folder
from finetune.strategies.pieces import Piece, Ranks
from finetune.wording import GIB
from tests.support.runs.saving import ROOM, full, held_up
from tests.support.runs.stepping import float32_recipe
from tests.support.stand_ins.ranks import made_up_ranks

Said = list[str]


def saves_of(said: Said, room: tuple[int, int] = ROOM, ranks: Ranks = Ranks()) -> Saves:  # noqa: B008  # frozen
    return Saves(ranks, ranks, said.append, room=lambda: room)


def save(saves: Saves, run_dir: Path, step: int, weight: torch.Tensor, **more: Any) -> None:
    groups = {"model": {"w": weight}, "optimizer": {"w:step": torch.tensor(float(step))}}
    saves.save(run_dir, step, groups, {"step": step}, keep=2, best=None, **more)


def test_what_is_written_is_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte the checkpoint of a save in the foreground, though the weights have changed meanwhile."""
    weight = torch.randn(40, 3)
    foreground = Saves(Ranks(), Ranks(), print, background=False)
    save(foreground, tmp_path / "foreground", 1, weight.clone())
    saves = saves_of([])
    with held_up(monkeypatch) as go:
        save(saves, tmp_path / "run", 1, weight)
        weight.add_(1.0)
        assert checkpoint_steps(tmp_path / "run") == []
        go.set()
        saves.wait()
    files = sorted(step_folder(tmp_path / "foreground", 1).iterdir())
    assert len(files) == 4
    for file in files:
        assert (step_folder(tmp_path / "run", 1) / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_save_waits_for_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = saves_of([])
    second = threading.Thread(target=lambda: save(saves, tmp_path, 2, torch.ones(3)))
    with held_up(monkeypatch) as go:
        save(saves, tmp_path, 1, torch.ones(3))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        assert [thread.name for thread in threading.enumerate()].count("checkpoint") == 1
        go.set()
        second.join(60)
        assert checkpoint_steps(tmp_path)[:1] == [1], "complete before the next begins"
        saves.finish()
    assert checkpoint_steps(tmp_path) == [1, 2]


def test_then_is_called_when_the_checkpoint_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    saves = saves_of([])
    with held_up(monkeypatch) as go:
        save(saves, tmp_path, 1, torch.ones(3), then=lambda: seen.append(checkpoint_steps(tmp_path)))
        assert seen == []
        go.set()
        saves.finish()
    assert seen == [[1]]


@pytest.mark.parametrize(
    "waits", [Saves.wait, Saves.finish, lambda saves: save(saves, Path("unused"), 3, torch.ones(1))]
)
def test_a_failure_is_raised_by_whoever_waits(
    waits: Callable[[Saves], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = saves_of([])
    save(saves, tmp_path, 1, torch.ones(3))
    saves.wait()
    monkeypatch.setattr(checkpoint, "save_file", full)
    save(saves, tmp_path, 2, torch.ones(3))
    saves.join()
    assert saves.failed
    expected = r"step-00000002: could not be written: the disk is full .*earlier checkpoints are intact"
    with pytest.raises(EnvironmentMismatch, match=expected) as raised:
        waits(saves)
    assert raised.value.exit_code == 4
    assert not saves.failed, "raised once"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_what_is_not_finite_is_refused_before_it_is_copied(tmp_path: Path) -> None:
    saves = saves_of([])
    with pytest.raises(NotFinite, match="step 1: not finite: 1 of 2 tensors to be saved, first model: w"):
        save(saves, tmp_path, 1, torch.tensor([1.0, math.nan]))
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("room", "background"),
    [
        ((GIB + 12_004, 0), True),
        ((GIB + 12_003, 0), False),
        ((2 * GIB + 12_004, GIB), True),
        ((2 * GIB + 12_003, GIB), False),
    ],
)
def test_without_room_beside_the_training_s_peak_it_is_written_in_the_foreground(
    room: tuple[int, int], background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: Said = []
    writers: list[str] = []
    real = checkpoint.save_file

    def noting(tensors: Any, path: Path) -> None:
        writers.append(threading.current_thread().name)
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", noting)
    saves = saves_of(said, room)
    for step in (1, 2):
        save(saves, tmp_path, step, torch.ones(3000))  # 12,000 bytes, and 4 of the step count
        if not background:
            assert checkpoint_steps(tmp_path)[-1] == step, "complete when it returns"
    saves.finish()
    assert checkpoint_steps(tmp_path) == [1, 2]
    assert set(writers) == {"checkpoint" if background else threading.current_thread().name}
    assert len(said) == (0 if background else 1), "said once"
    assert all("training waits while a checkpoint is written" in line for line in said)


def together(count: int) -> list[Ranks]:
    """Ranks in threads of this process, which gather through a barrier."""
    barrier, things = threading.Barrier(count, timeout=60), [None] * count

    def gather(rank: int, thing: Any) -> list[Any]:
        barrier.wait()
        things[rank] = thing
        barrier.wait()
        found = list(things)
        barrier.wait()
        return found

    return [made_up_ranks(rank, count, lambda thing, rank=rank: gather(rank, thing)) for rank in range(count)]


class TestRanks:
    def each(self, act: Callable[[int], Any], count: int = 2) -> list[Any]:
        """What `act(rank)` returned or raised, of each rank at the same time."""

        def caught(rank: int) -> Any:
            try:
                return act(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(caught, range(count)))

    def test_a_machine_has_room_for_the_copies_of_all_its_ranks(self, tmp_path: Path) -> None:
        for left, expected in ((GIB + 4800 + 2 * 70, 0), (GIB + 4800 + 2 * 70 - 1, 1)):
            front, behind = together(2), together(2)
            said: list[Said] = [[], []]
            run = tmp_path / str(expected)

            def act(rank: int) -> None:
                saves = Saves(front[rank], behind[rank], said[rank].append, room=lambda: (left, 70))  # noqa: B023
                saves.save(run, 1, {"model": {"w": torch.ones(1200)}}, {}, keep=1, best=None)  # noqa: B023
                saves.finish()

            assert self.each(act) == [None, None]
            assert [len(lines) for lines in said] == [expected, expected]
            assert checkpoint_steps(run) == [1]

    @pytest.mark.parametrize(("broken", "where"), [(0, "its own pieces"), (1, "its own pieces"), (0, "the rest")])
    def test_a_failure_of_one_is_told_to_all(
        self, broken: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if where == "the rest":
            monkeypatch.setattr(checkpoint, "publish_folder", lambda temporary, folder: full([], temporary / "x"))
        real = checkpoint.save_file

        def save_file(tensors: Any, path: Path) -> None:
            fails = where == "its own pieces" and path.name == f"model-{broken:05d}.safetensors"
            (full if fails else real)(tensors, path)

        monkeypatch.setattr(checkpoint, "save_file", save_file)
        front, behind = together(2), together(2)

        def act(rank: int) -> None:
            saves = Saves(front[rank], behind[rank], print, room=lambda: ROOM)
            piece = Piece(torch.ones(600), (1200,), 600 * rank)
            saves.save(tmp_path, 1, {"model": {"w": piece}}, {}, keep=1, best=None)
            saves.finish()

        raised = self.each(act)
        assert [type(error) for error in raised] == [EnvironmentMismatch] * 2
        assert "the disk is full" in str(raised[broken])
        assert f"rank {broken} could not write: [Errno 28]" in str(raised[1 - broken])
        assert list((tmp_path / "checkpoints").iterdir()) == []


def save_and_raise(folder: Path, error: BaseException) -> None:
    with saves_in_background(float32_recipe(folder), print) as saves:
        save(saves, folder, 1, torch.ones(3))
        raise error


class TestTheBlock:
    def test_its_end_waits(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with held_up(monkeypatch) as go:
            threading.Timer(0.3, go.set).start()
            with saves_in_background(float32_recipe(tmp_path), print) as saves:
                save(saves, tmp_path, 1, torch.ones(3))
        assert checkpoint_steps(tmp_path) == [1]

    def test_a_failed_write_at_its_end_is_raised(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoint, "save_file", full)
        with (
            pytest.raises(EnvironmentMismatch, match="the disk is full"),
            saves_in_background(float32_recipe(tmp_path), print) as saves,
        ):
            save(saves, tmp_path, 1, torch.ones(3))

    def test_what_fails_in_it_lets_the_write_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with held_up(monkeypatch) as go:
            threading.Timer(0.3, go.set).start()
            with pytest.raises(NotFinite, match="step 9"):
                save_and_raise(tmp_path, NotFinite("step 9"))
        assert checkpoint_steps(tmp_path) == [1]

    def test_a_second_ctrl_c_breaks_the_write_off(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with held_up(monkeypatch) as go:
            threading.Timer(0.3, go.set).start()
            with pytest.raises(KeyboardInterrupt):
                save_and_raise(tmp_path, KeyboardInterrupt())
        assert list((tmp_path / "checkpoints").iterdir()) == [], "nothing half-written, and not the new one"

    def test_measured_phases_are_their_own(self, tmp_path: Path) -> None:
        recipe = float32_recipe(tmp_path).model_copy(update={"measure_phases": True})
        with saves_in_background(recipe, print) as saves:
            save(saves, tmp_path, 1, torch.ones(3))
            assert checkpoint_steps(tmp_path) == [1]


def test_a_resumed_value_is_the_one_of_the_step(tmp_path: Path) -> None:
    saves, weight = saves_of([]), torch.zeros(5)
    for step in (1, 2, 3):
        weight.fill_(float(step))
        save(saves, tmp_path, step, weight)
    weight.fill_(9.0)
    saves.finish()
    newest, _ = newest_valid(tmp_path)
    assert newest is not None
    assert read_checkpoint(newest)[0]["model"]["w"].eq(3).all()
