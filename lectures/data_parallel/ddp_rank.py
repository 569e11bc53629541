"""The ranks beside DataParallel: torch's DistributedDataParallel over the same rows, a process for each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from finetune.errors import EnvironmentMismatch
from finetune.paths import CHECKOUT
from lectures.data_parallel.training import PLAYED_RATE, Clock, Job, Logits, Trained, next_token_loss

_TIMEOUT_SECONDS = 150


def train_ddp(job: Job, *, gpus: bool) -> Trained:
    """Train on as many ranks as there are replicas. Raises EnvironmentMismatch with a failed rank's last line."""
    package = str(CHECKOUT)
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="finetune-ddp-") as name, ExitStack() as files:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(asdict(job) | {"model": str(job.model), "gpus": gpus}), "utf-8")
        command = [sys.executable, "-m", "lectures.data_parallel.ddp_rank", str(folder)]
        paths = [folder / f"log-{rank}" for rank in range(job.replicas)]
        logs = [files.enter_context(open(path, "w", encoding="utf-8")) for path in paths]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, stdout=log, stderr=log, start_new_session=True)
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [process.wait(_TIMEOUT_SECONDS) for process in ranks]
        except subprocess.TimeoutExpired:
            raise EnvironmentMismatch(
                f"ddp: not finished after {_TIMEOUT_SECONDS} s; make rows or tokens fewer"
            ) from None
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        for rank, code in enumerate(codes):
            if code != 0:
                lines = paths[rank].read_text("utf-8", errors="replace").strip().splitlines()
                raise EnvironmentMismatch(f"ddp: rank {rank} ended with {code}: {lines[-1] if lines else 'no line'}")
        found = [json.loads((folder / f"rank-{rank}.json").read_text("utf-8")) for rank in range(job.replicas)]
    return _together(found)


def _together(ranks: list[dict[str, Any]]) -> Trained:
    """The losses' mean, the slowest rank's seconds, the busiest rank's bytes, and each rank's memory."""
    losses = [sum(step) / len(ranks) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    seconds = {part: max(rank["seconds"][part] for rank in ranks) for part in ranks[0]["seconds"]}
    sent = {"all_reduce": 2 * max(rank["ring_bytes"] for rank in ranks)}  # and as much received
    memory = {part: [rank["memory"][part] for rank in ranks] for part in ranks[0]["memory"]}
    return Trained(losses, seconds, sent, memory, ranks[0]["parameter_bytes"])


def rank_main(folder: Path, rank: int) -> None:
    """One rank: the timed steps, then one that is watched for its memory and its collectives."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from finetune.launch.gpu_environment import gpu_of_rank
    from finetune.measure.phases import Phases
    from lectures.data_parallel.four_steps import bytes_of, one_thread_each

    settings = json.loads((folder / "job.json").read_text("utf-8"))
    gpus = settings.pop("gpus")
    job = Job(**settings | {"model": Path(settings["model"])})
    device = torch.device("cuda", gpu_of_rank(rank)) if gpus else torch.device("cpu")
    store = f"file://{folder}/store"
    distributed.init_process_group("nccl" if gpus else "gloo", init_method=store, rank=rank, world_size=job.replicas)
    module = Logits(job.model).to(device)
    options: dict[str, Any] = {"device_ids": [device]} if gpus else {}
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, broadcast_buffers=False, **options)
    optimizer = torch.optim.AdamW(model.parameters(), PLAYED_RATE)

    def step(number: int, timed: Any, noted: Any) -> float:
        ids = job.ids(number, module.vocabulary).chunk(job.replicas)[rank].to(device)
        with timed("forward"):
            logits = model(ids)
        noted("forward")
        with timed("loss"):
            loss = next_token_loss(logits, ids)
        noted("loss")
        with timed("backward"):
            loss.backward()
        del logits
        with timed("step"):
            optimizer.step()
            value = float(loss.detach())
            del loss
            optimizer.zero_grad()
        noted("step")
        return value

    clock, memory = Clock(device), {}
    with one_thread_each():
        losses = [step(number, clock, lambda _: None) for number in range(job.steps)]
        states = [each for state in optimizer.state.values() for each in state.values()]
        phases = Phases(device, enabled=True, existing=[*model.parameters(), *states])

        def noted(part: str) -> None:
            memory[part] = phases.seen[part].allocated_bytes

        step(job.steps, phases, noted)
    ring = sum(stats.ring_bytes for phase in phases.seen.values() for stats in phase.collectives.values())
    result = {"losses": losses, "seconds": clock.mean(), "memory": memory, "ring_bytes": ring}
    result["parameter_bytes"] = bytes_of(list(module.parameters()))
    (folder / f"rank-{rank}.json").write_text(json.dumps(result), "utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), int(sys.argv[2]))
