"""State of shards in host memory comes back there, though their mesh is one of GPUs.

A mesh that claims another device than its shards' is FSDP2 with offload, in small: `DTensor.from_local` moves what
it is given to the mesh's device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from finetune.run_folder.trained_tensors import load_model, load_optimizer, model_tensors, optimizer_tensors

HOST = torch.device("cpu")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


class Offloaded(nn.Module):
    """One sharded weight in host memory."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        values = torch.arange(24, dtype=torch.float32).view(6, 4)
        self.weight = nn.Parameter(DTensor.from_local(values, mesh, [Shard(0)], run_check=False))


def stepped(mesh: DeviceMesh) -> tuple[Offloaded, torch.optim.Optimizer]:
    model = Offloaded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.weight.grad = DTensor.from_local(torch.randn(6, 4), mesh, [Shard(0)], run_check=False)
    optimizer.step()
    return model, optimizer


def full_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in tensors.items()}


def test_resumed_state_of_an_offloaded_weight_is_beside_it(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, its_optimizer = stepped(mesh)
    saved = full_tensors(optimizer_tensors(trained, its_optimizer))
    weights = full_tensors(model_tensors(trained))
    resumed = Offloaded(mesh)
    optimizer = torch.optim.AdamW(resumed.parameters(), fused=True)
    monkeypatch.setattr(mesh, "_device_type", "meta")
    load_model(resumed, weights)
    load_optimizer(resumed, optimizer, saved)
    state = optimizer.state[resumed.weight]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    for name in ("exp_avg", "exp_avg_sq"):
        assert isinstance(state[name], DTensor)
        assert state[name].to_local().device == HOST
        assert state[name].to_local().equal(saved[f"weight:{name}"])
        assert state[name].placements == (Shard(0),)
    assert state["step"].device == HOST
