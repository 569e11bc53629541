"""Heartbeats over the network, for ranks whose machines do not see one folder: a connection shows death, a message a
freeze.

    rank 1 --.
    rank 2 ----> rank 0     each sends its heartbeats to rank 0, and rank 0 its own to each
    rank 3 --'              rank 0 watches all, the others watch rank 0

The kernel closes a connection with its process, as it drops a lock. Whoever ends passes on the first failure, so every
rank names the same one. torch's TCPStore is no substitute: a client waits for ever if the process that serves it is
stopped, whatever its timeout (torch 2.11 and 2.13), and a store does not show which clients are gone.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from finetune.ranks.heartbeat import Heartbeat, HeartbeatRecord, RankState, heartbeat_of, record_now

SECONDS_BETWEEN_STEPS = 1.0  # that are sent: rank 0 sends its own to every rank
HELLO_SECONDS = 5.0  # for a new connection to say which rank it is
MESSAGE_BYTES = 2**16  # of one message
MOST_REASON = 4000  # characters of a failure's text


class NetworkHeartbeat:
    """This rank's heartbeats and the ones that it hears. Has the methods of `Heartbeat`.

    Args:
        connections: Rank -> the connection to it: every other rank on rank 0, rank 0 on the others.
        in_folder: Writes this rank's heartbeats into rank 0's folder too, for `finetune status`; None: not seen here.
    """

    def __init__(
        self, rank: int, token: int, connections: Mapping[int, socket.socket], in_folder: Heartbeat | None
    ) -> None:
        self._rank, self._token, self._connections, self._in_folder = rank, token, dict(connections), in_folder
        self._own = record_now(rank, token, "running", "load", 0, 0)
        self._sent = time.monotonic()
        self._heard: dict[int, HeartbeatRecord] = {}
        self._unread = dict.fromkeys(connections, b"")
        self._one_at_a_time = threading.RLock()
        self.failure: dict[str, Any] | None = None  # the first that this rank heard of
        for connection in connections.values():
            connection.setblocking(False)
            # Else a message waits for the one before to be acknowledged, and is lost if this process ends meanwhile.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def watched(self, world_size: int) -> list[int]:
        """The ranks that this one watches."""
        return sorted(self._connections)

    def write(self, state: RankState, phase: str, step: int, *, sync: bool = False) -> None:
        """Note a heartbeat, and send it if `sync` asks for that or SECONDS_BETWEEN_STEPS are over."""
        with self._one_at_a_time:
            if self.failure is not None and state == "running":
                state = "left"  # it is about to end
            self._own = record_now(self._rank, self._token, state, phase, step, self._own.count + 1)
            if sync or time.monotonic() - self._sent >= SECONDS_BETWEEN_STEPS:
                self._send()
        if self._in_folder is not None:
            self._in_folder.write(state, phase, step, sync=sync)

    def last(self, rank: int) -> HeartbeatRecord | None:
        """A rank's latest heartbeat; None if there is no connection to it."""
        self._receive(rank)
        return self._heard.get(rank)

    def holds_lock(self, rank: int) -> bool:
        """Whether the connection to that rank's process is open."""
        self._receive(rank)
        return rank in self._connections

    def tell(self, failure: Mapping[str, Any]) -> None:
        """Keep the first failure and send it to the ranks that this one has a connection to."""
        with self._one_at_a_time:
            if self.failure is None:
                self.failure = dict(failure) | {"error": str(failure["error"])[:MOST_REASON]}
                self._own = replace(self._own, state="left" if self._own.state == "running" else self._own.state)
                self._send()

    def _send(self) -> None:
        self._sent = time.monotonic()
        line = json.dumps({"heartbeat": asdict(self._own), "failure": self.failure}).encode() + b"\n"
        for connection in self._connections.values():
            with suppress(OSError):  # closed, or its process has read nothing for hours
                connection.send(line)

    def _receive(self, rank: int) -> None:
        """Read what a rank has sent so far. Rank 0 sends a failure on to all at once."""
        with self._one_at_a_time:
            connection = self._connections.get(rank)
            while connection is not None:
                try:
                    read = connection.recv(MESSAGE_BYTES)
                except BlockingIOError:
                    return
                except OSError:
                    read = b""
                if not read:
                    del self._connections[rank]
                    connection.close()
                    return
                *lines, rest = (self._unread[rank] + read).split(b"\n")
                self._unread[rank] = rest[-MESSAGE_BYTES:]
                for line in lines:
                    with suppress(ValueError, TypeError, KeyError, RecursionError):
                        message = json.loads(line)
                        record = heartbeat_of(message["heartbeat"])
                        if (record.rank, record.token) == (rank, self._token):
                            self._heard[rank] = record
                            if message["failure"] is not None:
                                self.tell(message["failure"])


def listen() -> socket.socket:
    """Rank 0's socket, on a free port of every interface."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=4096)


def accept_all(listener: socket.socket, world_size: int, token: int, seconds: float) -> dict[int, socket.socket]:
    """Rank -> its connection, of the ranks above 0 that connect within `seconds`. Others' connections are closed."""
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    while len(connections) < world_size - 1 and (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            break
        connection.settimeout(min(HELLO_SECONDS, left))
        hello = b""
        with suppress(OSError):
            while not hello.endswith(b"\n") and len(hello) < 100 and (read := connection.recv(100)):
                hello += read
        said, _, rank = hello.strip().partition(b" ")
        number = int(rank) if rank.isdigit() else 0
        if said == str(token).encode() and 0 < number < world_size and number not in connections:
            connections[number] = connection
        else:
            connection.close()
    listener.close()
    return connections


def connect(address: str, port: int, rank: int, token: int, seconds: float) -> socket.socket:
    """This rank's connection to rank 0. Raises OSError."""
    connection = socket.create_connection((address, port), timeout=seconds)
    connection.sendall(f"{token} {rank}\n".encode())
    return connection
