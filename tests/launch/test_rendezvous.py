"""Ranks that do not find each other print what to look at."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest
import torch

from finetune.errors import EnvironmentMismatch, NoRendezvous
from finetune.launch import rendezvous as rendezvous_module
from finetune.launch.launcher import Launch
from finetune.launch.rendezvous import check_world, collective_timeout, interface_towards, rendezvous
from tests.support.runs.cells import free_ports
from tests.support.runs.launching import ALONE
from tests.support.runs.recipes import least_recipe

recipe = partial(least_recipe, lora=None)
TWO_HOSTS = replace(ALONE, world_size=2, rank=1, nodes=2, on_cpu=True)
GLOO = (
    "Gloo connectFullMesh failed with [/__w/pytorch/pair.cc:152] timed out connecting: SO_ERROR: Connection refused, "
    "remote=[127.0.0.1]:31659"
)


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.77.0.1")
    monkeypatch.setenv("MASTER_PORT", "29511")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_a_failed_meeting_names_rank_place_and_remedy() -> None:
    with pytest.raises(NoRendezvous) as caught, rendezvous(TWO_HOSTS):
        raise RuntimeError(GLOO)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert "\n" not in message
    assert "pair.cc" not in message
    for words in ("rank 1 of 2", "10.77.0.1:29511", "GLOO_SOCKET_IFNAME", "remote=[127.0.0.1]:31659"):
        assert words in message


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="memory"), rendezvous(ALONE):
        raise RuntimeError("out of memory")
    with pytest.raises(EnvironmentMismatch, match="precision"), rendezvous(TWO_HOSTS):
        raise EnvironmentMismatch("precision")


def test_a_long_wait_gets_a_hint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rendezvous_module, "_HINT_SECONDS", 0.01)
    with rendezvous(TWO_HOSTS):
        time.sleep(0.3)
    assert "still waiting" in capsys.readouterr().err
    for quiet in (ALONE, replace(TWO_HOSTS, local_rank=1)):
        with rendezvous(quiet):
            time.sleep(0.1)
    assert capsys.readouterr().err == ""


WAITS = """
import torch
from datetime import timedelta
from finetune.launch.launcher import read_launch
from finetune.launch.rendezvous import rendezvous
with rendezvous(read_launch()):
    print("waits", flush=True)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
"""


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_interrupt_ends_a_rank_that_waits_for_another(rank: str) -> None:
    (port,) = free_ports(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [sys.executable, "-c", WAITS]
    with subprocess.Popen(words, env=os.environ | ranks | place, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        time.sleep(1)  # until it is inside of torch
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT


def test_afterwards_an_interrupt_is_pythons_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    for launch, within in ((TWO_HOSTS, signal.SIG_DFL), (ALONE, before)):
        with rendezvous(launch):
            assert signal.getsignal(signal.SIGINT) == within
        assert signal.getsignal(signal.SIGINT) == before


def test_the_interface_that_leads_there() -> None:
    assert interface_towards("127.0.0.1") is None
    assert interface_towards("no such host") is None
    for name, entries in psutil.net_if_addrs().items():
        own = [entry.address for entry in entries if entry.family == socket.AF_INET]
        for address in own if name != "lo" else []:
            assert interface_towards(address) in psutil.net_if_addrs()


@pytest.mark.parametrize(
    ("launch", "chosen", "expected"),
    [(TWO_HOSTS, None, "eth7"), (TWO_HOSTS, "eth1", "eth1"), (replace(TWO_HOSTS, nodes=1), None, None)],
)
def test_the_interface_is_chosen_for_several_machines_alone(
    monkeypatch: pytest.MonkeyPatch, launch: Launch, chosen: str | None, expected: str | None
) -> None:
    monkeypatch.setattr(rendezvous_module, "interface_towards", lambda address: "eth7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    if chosen:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    with rendezvous(launch):
        assert rendezvous_module.os.environ.get("GLOO_SOCKET_IFNAME") == expected


@pytest.mark.parametrize(
    ("changes", "requested", "words"),
    [
        ({"world_size": 1, "nodes": 1}, 2, ["2 processes", "one process"]),
        ({}, 3, ["3 processes", "2 run on 2 machines", "multiple of --num_machines"]),
        ({"settings": ("PET_NPROC_PER_NODE=4",)}, 2, ["PET_NPROC_PER_NODE=4", "4 processes", "--num_processes 4"]),
        ({"settings": ("PET_NNODES=2", "PET_NPROC_PER_NODE=4")}, None, ["8 processes", "torchrun"]),
    ],
)
def test_fewer_than_asked_for_are_refused(changes: dict[str, Any], requested: int | None, words: list[str]) -> None:
    with pytest.raises(EnvironmentMismatch) as caught:
        check_world(recipe(), replace(TWO_HOSTS, **changes), requested)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_as_many_as_asked_for_pass() -> None:
    for settings in ((), ("PET_NPROC_PER_NODE=2",), ("PET_NPROC_PER_NODE=auto",), ("PET_MASTER_PORT=1",)):
        check_world(recipe(), replace(TWO_HOSTS, settings=settings), 2)
    check_world(recipe(), replace(TWO_HOSTS, words=("torchrun",), settings=("PET_NPROC_PER_NODE=1",)), 2)


def test_fewer_machines_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    made_for_two = recipe(budget={"gpus": 8, "nodes": 2, "gpu_memory_gb": 80})
    check_world(made_for_two, TWO_HOSTS, 2)
    check_world(made_for_two, replace(TWO_HOSTS, nodes=1), 2)  # a rehearsal on a CPU
    check_world(made_for_two, replace(TWO_HOSTS, nodes=1, on_cpu=False), 2)  # where there is no GPU anyway
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(EnvironmentMismatch, match=r"2 machines, 1 takes part.*budget\.nodes"):
        check_world(made_for_two, replace(TWO_HOSTS, nodes=1, on_cpu=False), 2)


def test_patience_is_at_least_half_an_hour() -> None:
    assert collective_timeout(recipe()).total_seconds() == 1800
    assert collective_timeout(recipe(timeout_seconds=7200)).total_seconds() == 7200
