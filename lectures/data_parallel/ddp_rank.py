"""The ranks beside DataParallel: torch's DistributedDataParallel over the same rows, a process for each rank."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lectures.data_parallel.training import PLAYED_RATE, Clock, Job, Logits, Trained, next_token_loss
from lectures.local_ranks import figures_of_ranks


def train_ddp(job: Job, *, gpus: bool) -> Trained:
    """Train on as many ranks as there are replicas. Raises EnvironmentMismatch with a failed rank's last line."""
    with tempfile.TemporaryDirectory(prefix="finetune-ddp-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(asdict(job) | {"model": str(job.model), "gpus": gpus}), "utf-8")
        found = figures_of_ranks("ddp", "lectures.data_parallel.ddp_rank", folder, job.replicas, on_gpus=gpus)
    return _together(found)


def _together(ranks: Sequence[Mapping[str, Any]]) -> Trained:
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
