"""Two hosts on one machine: network namespaces joined by a cable, each with a loopback and a host name of its own.

Files, memory and cores are shared, the network is not: a rank that publishes 127.0.0.1 is not found by the other host.
`put_on_own_disk` takes the files apart too.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from finetune.ranks import heartbeat


@dataclass(frozen=True)
class Host:
    """One end of the cable."""

    name: str  # what gethostname says there; in nobody's /etc/hosts, as on a cluster without a name service
    address: str
    namespace: str

    def command(self, words: Sequence[str]) -> list[str]:
        """`words` to be run on this host; the process that it starts is the one that the caller sees and signals."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh", *words]
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *named]


def why_not() -> str | None:
    """Why this machine cannot be two hosts; None where it can."""
    missing = [tool for tool in ("ip", "nsenter", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"two hosts need {', '.join(missing)} (Debian: iproute2, util-linux, hostname)"
    if os.geteuid() != 0:
        return "two hosts need root, for network namespaces"
    probe = f"finetune-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"two hosts need network namespaces: {made.stderr.strip()}"
    _ip("netns", "delete", probe)
    return None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Sets the hosts up; when the block is left, what still runs in them is killed and they are gone."""
    hosts = tuple(
        Host(f"host-{letter}", f"10.77.0.{number}", f"finetune-{os.getpid()}-{letter}")
        for number, letter in enumerate("ab", start=1)
    )
    left, right = hosts
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        _ip("link", "add", "cable", "netns", left.namespace, "type", "veth", "peer", "cable", "netns", right.namespace)
        for host in hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", host.namespace, "link", "set", device, "up")
        yield left, right
    finally:
        for host in hosts:
            if not os.path.exists(f"/run/netns/{host.namespace}"):
                continue
            inside = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True).stdout
            for process in inside.split():
                subprocess.run(["kill", "-KILL", process], check=False, capture_output=True)
            _ip("netns", "delete", host.namespace)


def put_on_own_disk(place: Path, disk: Path, machine: str) -> None:
    """From here on this process, which has one thread, is on another machine, for files: `place` is its folder `disk`.

    It needs root. The kernel counts as another one too.
    """
    new_mounts, private = 0x20000, 1 << 18 | 1 << 14  # CLONE_NEWNS, MS_PRIVATE | MS_REC
    libc = ctypes.CDLL(None, use_errno=True)
    for code in (libc.unshare(new_mounts), libc.mount(None, b"/", None, private, None)):
        if code:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    subprocess.run(["mount", "--bind", str(disk), str(place)], check=True)
    heartbeat._machine = f"kernel-of-{machine} processes"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
