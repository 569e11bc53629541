"""Memory that torchtitan measured on H100s, against our trace of its step: Llama 3.1 8B under FSDP2, whole training.

Points: torchtitan at b5bcd76, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3 without Float8: 8 and 128
ranks, two rows of 8,192 tokens each, selective recomputation, eager and compiled; the largest `memory_reserved` of the
training's loop. Facts of its step at that time (9dec370, December 2024), which the model and the step here repeat:

- weights are float32 shards, gathered in bfloat16; gradients are reduced in float32; the last layer stays gathered
  after forward;
- RMSNorm in float32, rotary angles by complex numbers in float32, keys and values repeated to all heads, flash
  attention, SwiGLU;
- selective recomputation keeps attention's output and every second matrix product of a layer: wq, wv, w1, w2;
- float32 logits of all tokens and torch's cross entropy; the 16-bit logits are freed before backward;
- clipping and AdamW by torch's foreach loops; expandable segments.

`compiled` is each layer as one graph, and not run here. Of its effects the trace has one: a product that backward does
not need (w2's) is not kept. What a layer allocates while it is computed is not at the peak, which is the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # torch has no public fake process group
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from finetune.closed_form.constants import CUBLAS_WORKSPACE_HOPPER
from finetune.planner.depth.caching_allocator import CachingAllocator
from finetune.planner.depth.repeat_layers import StorageChange, repeat_layers
from finetune.planner.trace.fake_device import DEVICE_NAME, pretend_device
from finetune.planner.trace.fake_model import no_data
from finetune.planner.trace.kernel_workspaces import workspaces
from finetune.planner.trace.recorder import OnOperations, Recorder, tagging
from finetune.planner.trace.timeline import Timeline
from finetune.wording import GIB

WIDTH, HIDDEN, HEADS, KEY_HEADS, HEAD, VOCABULARY = 4096, 14336, 32, 8, 128, 128256
ROWS, TOKENS = 2, 8192
LAYERS, DEEP = 6, 32


@dataclass(frozen=True)
class Point:
    """One row of their tables; `reserved` in GiB."""

    ranks: int
    compiled: bool
    reserved: float


Rows = dict[str, dict[str, Any]]
POINTS = {
    "8 ranks, eager": Point(8, False, 82.4),
    "8 ranks, compiled": Point(8, True, 77.0),
    "128 ranks, eager": Point(128, False, 67.0),
    "128 ranks, compiled": Point(128, True, 62.0),
}


class Norm(nn.Module):
    """Root mean square in float32, then the weight in the input's format."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """[rows, tokens, heads, HEAD], each pair of numbers turned by complex64 angles [1, tokens, 1, HEAD / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


def repeated(x: torch.Tensor) -> torch.Tensor:
    """[rows, tokens, KEY_HEADS, HEAD] for all HEADS."""
    rows, tokens, heads, size = x.shape
    return x[:, :, :, None].expand(rows, tokens, heads, HEADS // KEY_HEADS, size).reshape(rows, tokens, HEADS, size)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(), Norm()
        sizes = {"wq": (WIDTH, WIDTH), "wk": (WIDTH, KEY_HEADS * HEAD), "wv": (WIDTH, KEY_HEADS * HEAD)}
        sizes |= {"wo": (WIDTH, WIDTH), "w1": (WIDTH, HIDDEN), "w3": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}
        for name, (wide, out) in sizes.items():
            setattr(self, name, nn.Linear(wide, out, bias=False))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), angles)
        return h + self.feed_forward(self.ffn_norm(h))

    def attention(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        query, key, value = (each(x).view(rows, tokens, -1, HEAD) for each in (self.wq, self.wk, self.wv))
        query, key = rotated(query, angles), rotated(key, angles)
        key, value = repeated(key), repeated(value)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(output.transpose(1, 2).contiguous().view(rows, tokens, -1))  # type: ignore[no-any-return]

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    """A layer whose backward computes again what `selective` does not keep; FSDP2 gathers it outside of this."""

    def __init__(self, layer: Layer, compiled: bool) -> None:
        super().__init__()
        self.layer, self.compiled = layer, compiled

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(self.layer, *inputs, context_fn=selective(self.compiled), **options)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, layers: int, compiled: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("angles", torch.empty(1, TOKENS, 1, HEAD // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(Recomputed(Layer(), compiled) for _ in range(layers))
        self.norm, self.output = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.angles)
        return self.output(self.norm(h))  # type: ignore[no-any-return]


def selective(compiled: bool) -> Callable[[], Any]:
    """The contexts of one layer's forward and recomputation. Compiled, the seventh product, w2's, is not kept."""

    def contexts() -> Any:
        counts = {False: 0, True: 0}

        def policy(ctx: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            aten = torch.ops.aten
            if operation == aten._scaled_dot_product_flash_attention.default:
                return CheckpointPolicy.MUST_SAVE
            if operation == aten.mm.default:
                counts[ctx.is_recompute] += 1
                if counts[ctx.is_recompute] % 2 and not (compiled and counts[ctx.is_recompute] == 7):
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


class Outer(nn.Module):
    """Names the layers `model.layers.N`, as the timeline's modules are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def sharded(point: Point, mesh: DeviceMesh, layers: int, device: torch.device) -> Transformer:
    """The model as torchtitan prepares it, its shards on `device`."""
    with torch.device("meta"):
        model = Transformer(layers, point.compiled)
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for index, layer in enumerate(model.layers):
        fully_shard(layer, **settings, reshard_after_forward=index < layers - 1)
    fully_shard(model, **settings, reshard_after_forward=True)
    model.to_empty(device=device)
    return model


@contextmanager
def pretended_ranks(ranks: int, device: torch.device) -> Iterator[None]:
    """Rank 0 of so many, which do not communicate."""
    devices = dist.Backend.backend_capability[dist.Backend.FAKE]
    if device.type not in devices:
        devices.append(device.type)
    dist.init_process_group(dist.Backend.FAKE, rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def timeline_of(point: Point, layers: int = LAYERS, steps: int = 2) -> Timeline:
    """Their training's first steps."""
    device = pretend_device()
    with pretended_ranks(point.ranks, device), ExitStack() as inside:
        mesh = init_device_mesh(device.type, (point.ranks,))  # of real numbers
        mode = inside.enter_context(no_data(1.0, masks=False))
        recorder = Recorder(device, mode)
        inside.enter_context(
            OnOperations(tagging(recorder, gloo=False), workspaces(recorder, device, CUBLAS_WORKSPACE_HOPPER))
        )
        with recorder.phases("load"):
            model = sharded(point, mesh, layers, device)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        with recorder.modules(Outer(model), None):
            for _ in range(steps):
                step(model, optimizer, device, recorder)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            recorder.place_in_layer(tensor, f"model.{name}")
            for value in optimizer.state.get(tensor, {}).values():
                recorder.place_in_layer(value, f"model.{name}")
    return recorder.timeline


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, recorder: Recorder) -> None:
    """One step of theirs."""
    ids = torch.ones(ROWS, TOKENS, dtype=torch.long, device=device)
    labels = ids.clone()
    optimizer.zero_grad()
    with recorder.phases("forward"):
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        del logits
    with recorder.phases("backward"):
        loss.backward()
    with recorder.phases("step"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()


def peaks(changes: list[StorageChange]) -> tuple[float, float]:
    """GiB allocated and reserved at most, with segments that grow."""
    allocator = CachingAllocator(expandable=True)
    for storage, nbytes, _, stream in changes:
        if storage is not None:
            allocator.free(storage)
            allocator.malloc(storage, nbytes, stream)
    return allocator.peak_allocated / GIB, allocator.peak_reserved / GIB


def planned(point: Point) -> tuple[float, float]:
    """GiB allocated and reserved at most, at full depth."""
    return peaks(list(repeat_layers(timeline_of(point), DEVICE_NAME, LAYERS, DEEP)))


def compared() -> Rows:
    """GiB measured and planned, and the error in percent, by point."""
    found: Rows = {}
    for name, sharded in POINTS.items():
        reserved = planned(sharded)[1]
        error = round(100 * (reserved / sharded.reserved - 1), 2)
        found[f"torchtitan, 8B, {name}"] = {
            "measured_gib": sharded.reserved,
            "planned_gib": round(reserved, 2),
            "error": error,
        }
    return found


def table(found: Rows) -> Iterator[str]:
    """The page's rows."""
    yield "| point | measured, GiB | planned | error |"
    yield "|---|---|---|---|"
    for name, row in found.items():
        yield f"| {name} | {row['measured_gib']:.1f} | {row['planned_gib']:.1f} | {row['error']:+.1f} % |"
