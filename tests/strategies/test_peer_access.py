"""GPUs that cannot reach each other's memory: NCCL is told before Accelerate raises an error that names settings."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from finetune.strategies.accelerator import go_around_peers
from tests.support.runs import launching

SETTINGS = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.setenv(name, "0")  # so that it is put back
        monkeypatch.delenv(name)


def machine(monkeypatch: pytest.MonkeyPatch, card: str, driver: str, count: int = 2) -> None:
    """What nvidia-smi answers to Accelerate."""
    monkeypatch.setattr("accelerate.utils.environment.get_gpu_info", lambda: ([card] * count, count))
    monkeypatch.setattr("accelerate.utils.environment.get_driver_version", lambda: driver)


@pytest.mark.usefixtures("nccl")
def test_cards_under_an_old_driver_go_through_the_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, "NVIDIA GeForce RTX 4090", "535.104.05")
    go_around_peers(replace(launching.ALONE, world_size=2, rank=1, local_rank=1))
    assert [os.environ[name] for name in SETTINGS] == ["1", "1"]
    assert capsys.readouterr().err == ""  # rank 0 alone says it
    for name in SETTINGS:
        del os.environ[name]
    go_around_peers(replace(launching.ALONE, world_size=2))
    said = capsys.readouterr().err
    assert [os.environ[name] for name in SETTINGS] == ["1", "1"]
    assert "NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 set" in said
    assert said.count("\n") == 1


@pytest.mark.usefixtures("nccl")
def test_what_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine(monkeypatch, "NVIDIA GeForce RTX 4090", "535.104.05")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    go_around_peers(replace(launching.ALONE, world_size=2))
    assert [os.environ[name] for name in SETTINGS] == ["0", "1"]
    assert "NCCL_IB_DISABLE=1 set" in capsys.readouterr().err


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize(
    ("card", "driver", "count"),
    [
        ("NVIDIA GeForce RTX 4090", "550.54.14", 2),
        ("NVIDIA GeForce RTX 4090", "535.104.05", 1),
        ("NVIDIA H100 80GB HBM3", "535.104.05", 8),
    ],
)
def test_others_reach_each_other(
    card: str, driver: str, count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, card, driver, count)
    go_around_peers(replace(launching.ALONE, world_size=count))
    assert not set(SETTINGS) & set(os.environ)
    assert capsys.readouterr().err == ""
