"""How a run's ranks meet in its folder: which of them see rank 0's, and how they hear from each other.

    every rank sees it       heartbeats are files there (heartbeat.py)
    some machines do not     heartbeats go over the network (network_heartbeat.py), and such a machine has a folder of
                             its own beside output_dir while the run lasts

Rank 0's folder alone is the run's.
"""

from __future__ import annotations

import os
import random
import re
import socket
import time
from pathlib import Path

import psutil

from finetune.errors import NoRendezvous
from finetune.files import LOCK, TEMPORARY_PREFIX, lock, remove_folder
from finetune.launch.launcher import Launch
from finetune.ranks.heartbeat import Heartbeat, Meeting, clear_heartbeats, last_heartbeat, this_machine
from finetune.ranks.network_heartbeat import NetworkHeartbeat, accept_all, connect, listen
from finetune.strategies.pieces import Ranks, all_ranks

SHARED_SECONDS = 30.0  # until another machine sees a new file
CONNECT_SECONDS = 30.0
# File systems that only one running kernel mounts.
OF_ONE_MACHINE = frozenset("apfs bcachefs btrfs ext2 ext3 ext4 f2fs jfs overlay ramfs reiserfs tmpfs xfs zfs".split())


def meet(run_dir: Path, launch: Launch, phase: str, step: int) -> Meeting:
    """Find out which of several ranks see rank 0's folder. Every rank calls it; then each finds those it watches.

    Rank 0 draws a token for this start and sends it to all ranks. The token tells its files from an earlier start's.

    Args:
        run_dir: Rank 0 has claimed its folder and cleared the heartbeats there.

    Raises NoRendezvous, on every rank, if a machine has no folder of its own, or a rank does not reach rank 0.
    """
    ranks, token, file = all_ranks(), 0, None

    def first_heartbeat() -> Heartbeat:
        heartbeat = Heartbeat(run_dir, launch.rank, token)
        heartbeat.write("running", phase, step, sync=True)
        return heartbeat

    if launch.is_main:
        token = random.SystemRandom().randrange(1, 2**62)
        file = first_heartbeat()
    token, machine = ranks.gather((token, this_machine()))[0]
    deadline = time.monotonic() + SHARED_SECONDS
    while file is None:
        if last_heartbeat(run_dir, 0, token) is not None:
            file = first_heartbeat()
        elif time.monotonic() > deadline or not _may_be_shared(run_dir, machine):
            break
        else:
            time.sleep(0.1)
    sightings = ranks.gather((file is not None, f"{this_machine()} {socket.gethostname()}"))
    apart = {
        rank: sightings.index((False, machine_there))
        for rank, (sees, machine_there) in enumerate(sightings)
        if not sees
    }
    if file is not None and not apart:
        return Meeting(run_dir, file)

    own_lock = None
    if file is None:
        host = re.sub(r"[^\w.-]", "_", socket.gethostname())
        run_dir = run_dir.absolute().with_name(f"{TEMPORARY_PREFIX}{run_dir.name}-on-{host}")
    problem = None
    if apart.get(launch.rank) == launch.rank:
        try:
            # This machine's own folder, without files of an earlier start.
            run_dir.mkdir(parents=True, exist_ok=True)
            own_lock = lock(run_dir / LOCK, wait_seconds=10.0)
            for path in run_dir.iterdir():
                if path.name != LOCK:
                    remove_folder(path)
            clear_heartbeats(run_dir)
        except OSError as error:
            problem = f"{run_dir}: this machine's own folder cannot be used: {error.strerror}"
    _refuse(ranks, problem)
    if file is None and not (run_dir / LOCK).exists():
        problem = f"{run_dir}: ranks on one machine do not see one folder"
    _refuse(ranks, problem)

    listener = listen() if launch.is_main else None
    port = ranks.gather(listener and listener.getsockname()[1])[0]
    connections: dict[int, socket.socket] = {}
    address = os.environ.get("MASTER_ADDR", "localhost")
    if listener is not None:
        connections = accept_all(listener, launch.world_size, token, CONNECT_SECONDS)
    else:
        try:
            connections = {0: connect(address, port, launch.rank, token, CONNECT_SECONDS)}
        except OSError as error:
            problem = f"{address}:{port}: not reached: {error.strerror or error}; open all ports between the machines"
    if launch.is_main and (missing := sorted({*range(1, launch.world_size)} - connections.keys())):
        problem = f"{address}:{port}: rank {missing[0]} has not connected; open all ports between the machines"
    _refuse(ranks, problem)
    heartbeat = NetworkHeartbeat(launch.rank, token, connections, file)
    heartbeat.write("running", phase, step, sync=True)
    return Meeting(run_dir, heartbeat, apart, own_lock)


def _may_be_shared(run_dir: Path, machine: str) -> bool:
    """Whether what rank 0 writes on its `machine` may still become visible in this rank's folder."""
    if machine.split()[0] == this_machine().split()[0]:  # containers may mount one folder
        return True
    place = str(next(parent for parent in (run_dir.absolute(), *run_dir.absolute().parents) if parent.exists()))
    mounts = [part for part in psutil.disk_partitions(all=True) if Path(place).is_relative_to(part.mountpoint)]
    kind = max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""
    return kind not in OF_ONE_MACHINE


def _refuse(ranks: Ranks, problem: str | None) -> None:
    """Raise NoRendezvous on every rank if one of them has a problem."""
    answers = list(enumerate(ranks.gather((socket.gethostname(), problem))))
    for rank, (host, text) in reversed(answers):  # a rank above 0 knows more than that it did not connect
        if text is not None:
            raise NoRendezvous(
                f"output_dir: not every machine sees rank 0's folder, and rank {rank} on {host} says: {text}; or put "
                "output_dir on storage that every machine mounts under this name"
            )
