"""Two real processes add numbers together, as a run's ranks do: over NCCL with two GPUs, else over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from finetune.errors import EnvironmentMismatch
from finetune.paths import CHECKOUT

ELEMENTS = 2**20  # float32: 4 MiB
ROUNDS = 5
PAIR_TIMEOUT_SECONDS = 120


def pair_test(*, gpus: int, timeout: float = PAIR_TIMEOUT_SECONDS) -> dict[str, Any]:
    """Backend and median seconds of one sum over two processes.

    Raises EnvironmentMismatch with the last line of the first process that fails, or after `timeout` seconds.
    """
    backend = "nccl" if gpus > 1 else "gloo"
    package = str(CHECKOUT)
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="finetune-pair-") as folder, ExitStack() as files:
        words = [sys.executable, "-m", "finetune.preflight.process_pair", backend, folder]
        logs = [files.enter_context(open(Path(folder) / f"log-{rank}", "w+", encoding="utf-8")) for rank in (0, 1)]
        ranks = [
            subprocess.Popen([*words, str(rank)], env=environment, stdout=log, stderr=log, start_new_session=True)
            for rank, log in enumerate(logs)
        ]
        try:
            codes = _wait(ranks, time.monotonic() + timeout)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
            last_lines = [_last_line(log) for log in logs]
        if codes != [0, 0]:
            raise EnvironmentMismatch(_failure(backend, codes, last_lines, timeout))
        return {"backend": backend, **json.loads(last_lines[0])}


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """The exit codes; None for a process that still runs at the deadline, or ten seconds after the other one failed."""
    codes = [process.poll() for process in ranks]
    while None in codes and time.monotonic() < deadline:
        if any(codes):  # the other waits for it in vain
            deadline = min(deadline, time.monotonic() + 10)
        time.sleep(0.05)
        codes = [process.poll() for process in ranks]
    return codes


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    if lines:
        return lines[-1]
    return ""


def _failure(backend: str, codes: list[int | None], last_lines: list[str], timeout: float) -> str:
    remedy = "name the network interface by GLOO_SOCKET_IFNAME" if backend == "gloo" else "look at NCCL_DEBUG=INFO"
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is None:
        return f"{backend}: two processes did not meet within {timeout:g} s; {remedy}"
    return f"{backend}: process {failed} ended with {codes[failed]}: {last_lines[failed][:200]}; {remedy}"


def main(backend: str, folder: str, rank: int) -> int:
    """One of the two processes; prints its seconds as JSON."""
    from datetime import timedelta

    import torch
    from torch import distributed

    from finetune.launch.gpu_environment import gpu_of_rank

    device = torch.device("cuda", gpu_of_rank(rank)) if backend == "nccl" else torch.device("cpu")
    store = f"file://{folder}/store"
    distributed.init_process_group(backend, init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    seconds = []
    for _ in range(ROUNDS):
        numbers = torch.full((ELEMENTS,), rank + 1.0, device=device)
        began = time.perf_counter()
        distributed.all_reduce(numbers)
        total = float(numbers[-1])  # waits for the device
        seconds.append(time.perf_counter() - began)
        if total != 3.0:
            raise SystemExit(f"1 + 2 came out as {total}")
    print(json.dumps({"seconds": sorted(seconds)[ROUNDS // 2], "bytes": 4 * ELEMENTS}), flush=True)
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
