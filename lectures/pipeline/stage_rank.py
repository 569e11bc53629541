"""One stage of the lecture: `python -m lectures.pipeline.stage_rank FOLDER RANK`; its figures as JSON."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from finetune.launch.launcher import Launch
from finetune.measure.phases import Phases
from finetune.planner import STEPS, worst_batches
from finetune.recipe.strategy import read_strategy
from finetune.strategies.accelerator import build_accelerator
from finetune.strategies.assemble import Assembled, assemble
from finetune.strategies.pipeline.timeline import Computation
from finetune.tokens.batches import MicroBatch, without_learning
from finetune.training.objectives.supervised import Supervised
from finetune.training.run import StepParts
from finetune.training.step import optimizer_step
from lectures.pipeline.played import PLAYED, PlayedStep, let_layers_sleep

_TIMEOUT = timedelta(seconds=120)


def main(words: list[str]) -> None:
    """Every schedule once, in the order that every rank has."""
    folder, rank = Path(words[0]), int(words[1])
    job = PlayedStep(**json.loads((folder / "job.json").read_text("utf-8")))
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.stages)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(job.stages), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job.stages, timeout=_TIMEOUT)
    sizes: dict[str, Any] = {"local_rank": rank, "local_world_size": job.stages}
    launch = Launch((), None, None, True, job.stages, rank, on_cpu=True, **sizes)
    accelerator = build_accelerator(job.recipe(PLAYED[0]), read_strategy(PLAYED[0]), launch)
    result = {schedule: run_schedule(job, schedule, accelerator, rank) for schedule in PLAYED}
    (folder / f"rank-{rank}.json").write_text(json.dumps(result), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run_schedule(job: PlayedStep, schedule: str, accelerator: Accelerator, rank: int) -> dict[str, Any]:
    """Two steps of a training, whose memory is tracked, and one with layers that sleep, which is timed."""
    recipe = job.recipe(schedule)
    batches = worst_batches(recipe, job.stages)
    if rank < job.stages - 1:
        batches = [without_learning(batch) for batch in batches]
    phases = Phases(accelerator.device, enabled=True)
    with phases("load"):
        parts = assemble(recipe, read_strategy(schedule), accelerator, launch=None)
    parts.model.train()
    steps = []
    for _ in range(STEPS):  # the second has the optimizer's state beside everything
        train_step(accelerator, parts, batches, phases)
        steps.append(phases.take()["backward"])
    peak, sent = max(step.peak_bytes for step in steps), steps[-1].collectives["send"].payload_bytes
    return {"peak_bytes": peak, "sent_bytes": sent, "spans": timed_step(job, parts, batches)}


def train_step(accelerator: Accelerator, parts: Assembled, batches: list[MicroBatch], phases: Phases) -> None:
    """An optimizer step, as the trainer makes it."""
    step = StepParts(
        accelerator=accelerator,
        model=parts.model,
        optimizer=parts.optimizer,
        objective=Supervised(),
        phases=phases,
        max_grad_norm=1.0,
        pipeline=parts.pipeline,
    )
    optimizer_step(
        step,
        iter(batches),
        micro_steps=len(batches),
        planned_count=_supervised(batches),
        seed=None,
        stop=False,
    ).result()


def timed_step(job: PlayedStep, parts: Assembled, batches: list[MicroBatch]) -> list[Computation]:
    """Forwards and backwards of one step, with layers that sleep: when each was, on the machine's clock."""
    assert parts.pipeline is not None
    recorder, off = parts.pipeline.record(), Phases(torch.device("cpu"), enabled=False)
    for sleeping in (False, True):  # the first makes torch's schedule, which talks to its neighbours
        if sleeping:
            let_layers_sleep(parts.unwrapped_model, job.seconds)
            dist.barrier()
        parts.pipeline.forward_and_backward(
            batches,
            divisor=_supervised(batches),
            loss_sum=torch.zeros((), dtype=torch.float64),
            before_each=lambda number: None,
            phases=off,
        )
    return recorder.spans


def _supervised(batches: list[MicroBatch]) -> int:
    return sum(batch["shift_labels"].numel() for batch in batches)


if __name__ == "__main__":
    main(sys.argv[1:])
