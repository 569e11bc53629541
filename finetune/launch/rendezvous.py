"""How a run's ranks find each other: whether as many started as asked for, and over which network."""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psutil
import torch

from finetune.errors import EnvironmentMismatch, NoRendezvous
from finetune.launch.launcher import Launch
from finetune.launch.signals import on_signals
from finetune.paths import from_here
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import CONFIG_FOLDER
from finetune.wording import counted

_TIMEOUT_SECONDS = 1800  # gloo's default; NCCL's is 600
# How long the ranks wait while rank 0 downloads or reads: longer than it takes. If it dies, the watchdog ends the job.
TIME_FOR_RANK_0 = timedelta(days=7)
_HINT_SECONDS = 60  # until the user is told for whom a rank waits


def check_world(recipe: Recipe, launch: Launch, requested: int | None) -> None:
    """Refuse a launch with fewer processes or machines than were requested.

    `requested` counts all machines' processes, from the launcher's command line or config. Raises EnvironmentMismatch.
    """
    if requested is not None and requested > 1 and launch.world_size == 1:
        raise EnvironmentMismatch(
            f"launch: {requested} processes were asked for, but the launcher started one training of one process; on a "
            f"CPU use: accelerate launch --config_file {from_here(CONFIG_FOLDER / 'cpu_2proc.yaml')}"
        )
    if requested is not None and requested != launch.world_size:
        machines = counted(launch.nodes, "machine")
        raise EnvironmentMismatch(
            f"launch: {requested} processes were asked for, {launch.world_size} run on {machines}; "
            "accelerate's --num_processes counts all machines and must be a multiple of --num_machines"
        )
    if launch.by_accelerate:
        # `accelerate launch` silently ignores torchrun's variables (PET_NPROC_PER_NODE, ...). Refuse a contradiction.
        settings = dict(setting.split("=", 1) for setting in launch.settings)
        per_node, nodes = settings.get("PET_NPROC_PER_NODE", ""), settings.get("PET_NNODES", "1")
        if per_node.isdigit() and nodes.isdigit() and int(per_node) * int(nodes) != launch.world_size:
            machines = counted(int(nodes), "machine")
            processes = counted(int(per_node) * int(nodes), "process", "processes")
            raise EnvironmentMismatch(
                f"launch: PET_NPROC_PER_NODE={per_node} on {machines} asks for {processes}, but "
                f"`accelerate launch` does not read it and started {launch.world_size}; unset it, or write "
                f"--num_processes {int(per_node) * int(nodes)}, or start with torchrun"
            )
    if launch.nodes < recipe.budget.nodes and not launch.on_cpu and torch.cuda.is_available():
        raise EnvironmentMismatch(
            f"budget: the recipe is made for {recipe.budget.nodes} machines, {launch.nodes} takes part; launch it on "
            "each, or set budget.nodes=1"
        )


def choose_interface(launch: Launch) -> str | None:
    """Set GLOO_SOCKET_IFNAME to the interface that leads to rank 0, on several machines and if it is not set yet.

    Gloo uses the address to which the machine's host name resolves: 127.0.1.1 on Debian, or the loopback if it does
    not resolve. No other machine can reach either (torch 2.13). Returns the interface; None if nothing was set.
    """
    address = os.environ.get("MASTER_ADDR", "")
    if launch.nodes == 1 or not address or "GLOO_SOCKET_IFNAME" in os.environ:
        return None
    name = interface_towards(address)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name
    return name


def interface_towards(address: str) -> str | None:
    """The interface that this machine would use to reach `address`; None if it is the loopback."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            own_address = str(probe.getsockname()[0])
    except OSError:
        return None
    if ipaddress.ip_address(own_address.partition("%")[0]).is_loopback:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if any(entry.address == own_address for entry in entries)), None)


def collective_timeout(recipe: Recipe) -> timedelta:
    """The longest wait in a collective for the other ranks.

    It is longer than one rank may be busy alone, when it reads or writes 140 GB of weights. training/watchdog.py
    finds dead and frozen ranks.
    """
    return timedelta(seconds=max(_TIMEOUT_SECONDS, recipe.timeout_seconds))


@contextmanager
def rendezvous(launch: Launch) -> Iterator[None]:
    """Put this around the creation of the process group.

    After a minute it prints the address for which it waits. If there are several ranks, Ctrl-C ends each at once.

    Raises:
        NoRendezvous: the ranks did not find each other; the message names rank, address, reason and remedies.
    """
    hint = threading.Timer(_HINT_SECONDS, lambda: print(f"still waiting: {_rendezvous_hint(launch)}", file=sys.stderr))
    hint.daemon = True
    choose_interface(launch)
    if launch.world_size > 1 and launch.local_rank == 0:
        hint.start()
    try:
        # A rank that waits for the others inside a library runs none of Python's handlers. The launcher would kill it
        # after 30 s, or nobody would.
        with on_signals(signal.SIG_DFL, [signal.SIGINT] if launch.world_size > 1 else []):
            yield
    except (RuntimeError, ValueError) as error:
        # torch's ValueError about a missing MASTER_ADDR says "rendezvous". Any other is a mistake in the code inside.
        unrelated = isinstance(error, ValueError) and "rendezvous" not in str(error)
        if unrelated or launch.world_size == 1 or torch.distributed.is_initialized():
            raise
        reason = " ".join(re.sub(r"\[/[^\]]*\]", "", str(error)).split())[:200]
        raise NoRendezvous(f"{_rendezvous_hint(launch)} ({reason})") from error
    finally:
        hint.cancel()


def _rendezvous_hint(launch: Launch) -> str:
    place = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    interfaces = ", ".join(sorted(name for name in psutil.net_if_addrs() if name != "lo")) or "none"
    return (
        f"launch: rank {launch.rank} of {launch.world_size} on {socket.gethostname()} has not met the others at {place}"
        "; read what rank 0 says, start the command on every machine, each with its own number, let them reach each "
        "other's ports, and name the network between them: export GLOO_SOCKET_IFNAME=... NCCL_SOCKET_IFNAME=... "
        f"(here: {interfaces})"
    )
