"""Ray Train: one worker of the file that `finetune launch --on ray` writes.

A worker starts the trainer as a process of its own. Ray runs a worker's function in a thread, which gets no signal, and
in a process that has joined Ray's process group already.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from finetune.errors import RankLost
from finetune.launch.launcher import RANK_0_SECONDS, environment_for_child
from finetune.launch.with_parent import with_parent

_LINES = 12  # of a failed rank's standard error, for the driver's message


def train_rank(settings: Mapping[str, Any]) -> None:
    """Train as the rank that Ray gave this worker; its variables are set. Raises RankLost with the trainer's message.

    Args:
        settings: `folder` to train in, `words` for Python, `machines`, and whether
            it trains `alone`, as no rank.
    """
    import torch.distributed as dist

    variables, rank = dict[str, str](), dist.get_rank()
    if not settings["alone"]:
        # Ray's group has the port of MASTER_PORT.
        port: list[Any] = [None]
        if rank == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                port = [free.getsockname()[1]]
        dist.broadcast_object_list(port)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
        variables |= {name: os.environ[name] for name in names}
        variables |= {"MASTER_PORT": str(port[0]), "GROUP_RANK": os.environ["NODE_RANK"]}
        variables |= {"GROUP_WORLD_SIZE": str(settings["machines"])}
    process = subprocess.Popen(
        with_parent([sys.executable, *settings["words"]]),
        cwd=settings["folder"],
        env=environment_for_child(**variables),
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert process.stderr is not None
    last: deque[str] = deque(maxlen=_LINES)
    for line in process.stderr:
        sys.stderr.write(line)
        last.append(line)
    if process.wait() == 0:
        return
    if rank != 0:  # Ray ends all workers when one fails, and rank 0 says why
        time.sleep(RANK_0_SECONDS)
    raise RankLost(f"rank {rank} ended with exit code {process.returncode}:\n{''.join(last).strip()}")


def trainers_message(error: Exception) -> str:
    """The message of a training that Ray calls failed: the trainer's own, if a rank ended with one."""
    # Ray joins the workers' tracebacks, each below [Rank 0 Error Snippet]; one ends with the exception's message.
    _, ours, message = str(error).partition(f"{RankLost.__name__}: ")
    if not ours:
        return str(error)
    return message.partition("\n[Rank ")[0].strip()
