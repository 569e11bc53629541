"""A rank of tests/measure/test_collectives.py: trains two layers and prints what its phases moved, as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from finetune.measure.phases import Phases

CPU = torch.device("cpu")
WIDTH = 64


def sharded(model: nn.Sequential, *, keep: bool, copies: int) -> nn.Module:
    world = distributed.get_world_size()
    names = ("copies", "shards")
    mesh = init_device_mesh("cpu", (copies, world // copies), mesh_dim_names=names)
    mesh = mesh if copies > 1 else mesh["shards"]
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keep)
    return fully_shard(model, mesh=mesh, reshard_after_forward=not keep)


def train(engine: str, steps: int = 2) -> dict[str, object]:
    """The last step's figures by phase."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    phases = Phases(CPU, enabled=True)
    with phases("load"):
        whole = nn.parallel.DistributedDataParallel(model) if engine == "ddp" else None
        engine_model = whole or sharded(model, keep=engine == "fsdp2_grad_op", copies=2 if engine == "hsdp" else 1)
        optimizer = torch.optim.AdamW(engine_model.parameters())
    figures: dict[str, object] = {"load": phases.take()["load"]}
    for _ in range(steps):
        with phases("forward"):
            loss = engine_model(torch.ones(4, WIDTH)).sum()
        with phases("backward"):
            loss.backward()
        with phases("step"):
            norm = nn.utils.clip_grad_norm_(engine_model.parameters(), 1.0)
            if engine != "ddp":
                norm = norm.full_tensor()
            optimizer.step()
            optimizer.zero_grad()
        figures |= phases.take()
    lines = phases.lines(0)  # a collective; nothing is left to tell
    assert lines == []
    return {"parameter_bytes": parameters, **{name: asdict(phase) for name, phase in figures.items()}}


def every_collective() -> dict[str, object]:
    """Each of torch's collectives once, on one KiB a rank."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    part, whole = torch.ones(256), torch.ones(256 * world)
    phases = Phases(CPU, enabled=True)
    with phases("it"):
        distributed.all_reduce(part)
        distributed.broadcast(part, src=0)
        distributed.reduce(part, dst=0)
        distributed.all_gather_into_tensor(whole, part)
        distributed.all_gather([torch.ones(256) for _ in range(world)], part)
        distributed.reduce_scatter_tensor(part, whole)
        distributed.all_to_all_single(torch.empty_like(whole), whole)
        distributed.scatter(part, list(whole.chunk(world)) if rank == 0 else None, src=0)
        distributed.gather(part, [torch.ones(256) for _ in range(world)] if rank == 0 else None, dst=0)
        if rank == 0:
            distributed.send(part, dst=1)
        if rank == 1:
            distributed.recv(part, src=0)
        distributed.barrier()
    return {name: asdict(stats) for name, stats in phases.take()["it"].collectives.items()}


def main() -> None:
    """torchrun-started: the engine's name on the command line; each rank writes its figures to FOLDER/RANK.json."""
    engine, folder = sys.argv[1:]
    distributed.init_process_group("gloo")
    figures = every_collective() if engine == "collectives" else train(engine)
    with open(f"{folder}/{distributed.get_rank()}.json", "w", encoding="utf-8") as file:
        json.dump(figures, file)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
