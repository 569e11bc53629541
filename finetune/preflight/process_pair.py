"""Two real processes add numbers together, as a run's ranks do: over NCCL with two GPUs, else over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from finetune.errors import EnvironmentMismatch
from finetune.launch.launcher import environment_for_child
from finetune.paths import CHECKOUT
from finetune.preflight.job import failure_reason, kill_all

ELEMENTS = 2**20  # float32: 4 MiB
ROUNDS = 5
PAIR_TIMEOUT_SECONDS = 120


def pair_test(*, gpus: int, timeout: float = PAIR_TIMEOUT_SECONDS) -> dict[str, Any]:
    """Backend and median seconds of one sum over two processes, started by torchrun.

    Raises EnvironmentMismatch with the reason, or after `timeout` seconds.
    """
    backend = "nccl" if gpus > 1 else "gloo"
    remedy = "name the network interface by GLOO_SOCKET_IFNAME" if backend == "gloo" else "look at NCCL_DEBUG=INFO"
    path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = environment_for_child(PYTHONPATH=path, OMP_NUM_THREADS="1")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen(
        [*launcher, "-m", "finetune.preflight.process_pair", backend],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            reason = f"two processes did not meet within {timeout:g} s"
            raise EnvironmentMismatch(f"{backend}: {reason}; {remedy}") from None
        finally:
            kill_all(process)
    if process.returncode:
        raise EnvironmentMismatch(f"{backend}: {failure_reason(None, errors)[:200]}; {remedy}")
    return {"backend": backend, **json.loads(output.splitlines()[-1])}


def main(backend: str) -> int:
    """One of the two processes. Rank 0 prints its seconds as JSON."""
    from datetime import timedelta

    import torch
    from torch import distributed

    from finetune.launch.gpu_environment import gpu_of_rank

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", gpu_of_rank(rank)) if backend == "nccl" else torch.device("cpu")
    distributed.init_process_group(backend, timeout=timedelta(seconds=60))
    seconds = []
    for _ in range(ROUNDS):
        numbers = torch.full((ELEMENTS,), rank + 1.0, device=device)
        began = time.perf_counter()
        distributed.all_reduce(numbers)
        total = float(numbers[-1])  # waits for the device
        seconds.append(time.perf_counter() - began)
        if total != 3.0:
            raise SystemExit(f"1 + 2 came out as {total}")
    if rank == 0:
        print(json.dumps({"seconds": sorted(seconds)[ROUNDS // 2], "bytes": 4 * ELEMENTS}), flush=True)
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
