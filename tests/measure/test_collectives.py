"""What the engines move is counted by torch's own dispatcher, and agrees with the textbook: 2P and 3P."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from finetune.measure.collectives import C10D, CALLS, FUNCTIONAL, WEIGHT, Traffic

REPOSITORY = Path(__file__).resolve().parents[2]
KB = 1024
# What torch registers besides collectives, and what no engine here uses.
NO_COLLECTIVES = {"check_for_nan", "wait_tensor", "batch_p2p_ops"}


def ranks(what: str, folder: Path, world: int = 2) -> list[Any]:
    """The figures of each gloo rank of tests/support/memory/traffic_worker.py."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=localhost:0", "-m", "tests.support.memory.traffic_worker", what, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in range(world)]


def test_every_collective_that_torch_registers_is_known() -> None:
    schemas = [schema.name for schema in torch._C._jit_get_all_schemas()]
    registered = {name for name in schemas if name.partition("::")[0] in CALLS}
    known = {f"{namespace}::{name}" for namespace, calls in CALLS.items() for name in calls}
    assert {name.partition("::")[2] for name in registered - known} <= NO_COLLECTIVES | {"_wrap_tensor_autograd"}
    assert registered >= {f"c10d::{name}" for name in C10D} - {"c10d::gather_into_tensor_"}  # since torch 2.14
    assert {call.collective for calls in CALLS.values() for call in calls.values()} == set(WEIGHT)
    assert len(FUNCTIONAL) == 15


def test_an_operation_that_is_none_counts_nothing() -> None:
    traffic = Traffic()
    traffic.see(torch.ops.aten.add.Tensor, (torch.ones(2), torch.ones(2)))
    assert traffic.take() == {}


def test_one_rank_moves_nothing(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = distributed.group.WORLD
        assert group is not None
        traffic = Traffic()
        traffic.see(torch.ops._c10d_functional.all_reduce.default, (torch.ones(256), "sum", group.group_name))
        moved = traffic.take()["all_reduce"]
    finally:
        distributed.destroy_process_group()
    assert (moved.calls, moved.payload_bytes, moved.ring_bytes, moved.textbook_bytes) == (1, KB, 0, 0)
    assert traffic.take() == {}


@pytest.mark.slow
def test_each_collective_in_its_units(tmp_path: Path) -> None:
    """One KiB a rank, three ranks: a ring sends 2/3 of the whole, an all_reduce twice that."""
    first, second, third = ranks("collectives", tmp_path, world=3)
    third_of = KB // 3
    assert first["all_reduce"] == figures(1, KB, 2 * KB * 2 // 3, 2 * KB)
    assert first["broadcast"] == first["reduce"] == figures(1, KB, 2 * third_of, KB)
    assert first["all_gather"] == figures(2, 6 * KB, 4 * KB, 6 * KB)
    assert first["reduce_scatter"] == first["all_to_all"] == figures(1, 3 * KB, 2 * KB, 3 * KB)
    assert first["scatter"] == figures(1, 3 * KB, 2 * KB, 3 * KB)
    assert second["scatter"] == figures(1, 0, 0, 0)
    assert first["send"] == figures(1, KB, KB, KB)
    assert second["recv"] == figures(1, KB, 0, 0)
    assert first["barrier"] == figures(1, 0, 0, 0)
    assert "send" not in third
    assert "recv" not in third


def figures(calls: int, payload: int, ring: int, textbook: int) -> dict[str, int]:
    return {"calls": calls, "payload_bytes": payload, "ring_bytes": ring, "textbook_bytes": textbook}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "multiple", "forward", "backward"),
    [
        ("ddp", 2, {}, {"all_reduce"}),
        ("fsdp2", 3, {"all_gather"}, {"all_gather", "reduce_scatter"}),
        ("fsdp2_grad_op", 2, {"all_gather"}, {"reduce_scatter"}),
    ],
)
def test_the_textbook(engine: str, multiple: int, forward: set[str], backward: set[str], tmp_path: Path) -> None:
    for rank in ranks(engine, tmp_path):
        parameters = rank["parameter_bytes"]
        step = {phase: rank[phase]["collectives"] for phase in ("forward", "backward")}
        assert {phase: set(moved) - {"broadcast"} for phase, moved in step.items()} == {
            "forward": set(forward),
            "backward": backward,
        }
        moved = [entry for phase in step.values() for name, entry in phase.items() if name != "broadcast"]
        assert sum(entry["textbook_bytes"] for entry in moved) == multiple * parameters
        assert sum(entry["ring_bytes"] for entry in moved) == multiple * parameters // 2  # (N-1)/N of it, on two ranks
        norm = rank["step"]["collectives"]  # the norm of sharded gradients, a few numbers
        assert sum(entry["textbook_bytes"] for entry in norm.values()) < 100
        # Half the weights and moments are here; between steps nothing else is.
        share = 1 if engine == "ddp" else 2
        persistent = 3 * parameters // share
        assert persistent <= rank["step"]["allocated_bytes"] < persistent + (parameters if engine == "ddp" else 0) + KB


@pytest.mark.slow
def test_groups_are_distinguished(tmp_path: Path) -> None:
    """HSDP, two copies of two shards: as FSDP2 within a copy, then an all_reduce of each half between copies."""
    for rank in ranks("hsdp", tmp_path, world=4):
        parameters = rank["parameter_bytes"]
        backward = rank["backward"]["collectives"]
        assert backward["reduce_scatter"]["ring_bytes"] == parameters // 2
        between = backward["all_reduce"]
        assert between["payload_bytes"] == parameters // 2
        assert (between["ring_bytes"], between["textbook_bytes"]) == (parameters // 2, parameters)
        assert rank["forward"]["collectives"]["all_gather"]["textbook_bytes"] == parameters
