"""Memory that torchtune measured on an A100, against our trace of its step: Llama 3.2 3B, whole training in bfloat16.

Points: torchtune at bd2a0fc, README's table of techniques added one after another, of November 2024: two rows of 4,096
tokens, packed; the largest number of active bytes. Facts of its recipe then (full_finetune_single_device) which the
model and the step here repeat:

- weights, gradients and AdamW's moments in bfloat16; torch's fused AdamW; no clipping; head and embeddings are one;
- RMSNorm and rotary angles in float32, keys and values repeated to all heads, SwiGLU;
- "+ Packed Dataset": float32 logits of all tokens and torch's cross entropy; the 16-bit ones are freed before;
- "+ Chunked Cross Entropy": 16-bit logits in eight chunks, each chunk's loss one compiled graph, which keeps the chunk
  and a number a token;
- "+ Activation Checkpointing": every layer is computed again in backward;
- "+ Fuse optimizer step into backward": each weight is updated, and its gradient freed, when it has one.

Packed rows go through flex attention, which keeps what flash attention does, and is traced as that. Where layers are
compiled and not computed again there is no trace: what a graph keeps of them is inductor's choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from finetune.closed_form.constants import CUBLAS_WORKSPACE
from finetune.planner.depth.repeat_layers import repeat_layers
from finetune.planner.trace.fake_device import DEVICE_NAME, pretend_device
from finetune.planner.trace.fake_model import no_data
from finetune.planner.trace.kernel_workspaces import workspaces
from finetune.planner.trace.recorder import OnOperations, Recorder, tagging
from finetune.planner.trace.timeline import Timeline
from tests.support.memory.titan_memory import Outer, peaks

WIDTH, HIDDEN, HEADS, KEY_HEADS, HEAD, VOCABULARY, POSITIONS = 3072, 8192, 24, 8, 128, 128256, 131072
ROWS, TOKENS, CHUNKS = 2, 4096, 8
LAYERS, DEEP = 6, 28


@dataclass(frozen=True)
class Point:
    """One row of their table; `active` in GiB."""

    active: float
    recomputed: bool = False
    chunked: bool = False
    updates_in_backward: bool = False


POINTS = {
    "packed": Point(60.0),
    "activation checkpointing": Point(24.9, recomputed=True, chunked=True),
    "optimizer in backward": Point(23.1, recomputed=True, chunked=True, updates_in_backward=True),
}
COMPILED = "not traced: layers as compiled graphs, of which inductor chooses what to keep"
REASONS = {
    "baseline": (25.5, "not traced: the lengths of its unpacked rows are not known"),
    "compile": (51.0, COMPILED),
    "chunked cross entropy": (42.9, COMPILED),
}


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * self.scale).to(x.dtype)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """[rows, tokens, heads, HEAD] by float32 (cosine, sine) [rows, tokens, 1, HEAD / 2, 2]."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    first = pairs[..., 0] * angles[..., 0] - pairs[..., 1] * angles[..., 1]
    second = pairs[..., 1] * angles[..., 0] + pairs[..., 0] * angles[..., 1]
    return torch.stack([first, second], -1).flatten(3).type_as(x)


def repeated(x: torch.Tensor) -> torch.Tensor:
    """[rows, KEY_HEADS, tokens, HEAD] for all HEADS."""
    rows, heads, _, size = x.shape
    return x.unsqueeze(2).expand(rows, heads, HEADS // KEY_HEADS, -1, size).flatten(1, 2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sa_norm, self.mlp_norm = Norm(), Norm()
        keys = KEY_HEADS * HEAD
        self.q_proj, self.output_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, keys, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.sa_norm(x), cache, positions)
        wide = self.mlp_norm(h)
        return h + self.w2(F.silu(self.w1(wide)) * self.w3(wide))  # type: ignore[no-any-return]

    def attention(self, x: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        angles = (rows, tokens, 1, HEAD // 2, 2)
        query = rotated(self.q_proj(x).view(rows, tokens, -1, HEAD), cache[positions].view(angles))
        key, value = (each(x).view(rows, tokens, -1, HEAD) for each in (self.k_proj, self.v_proj))
        key = rotated(key, cache[positions].view(angles))
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        key, value = repeated(key), repeated(value)
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output_proj(output.transpose(1, 2).contiguous().view(rows, tokens, -1))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, layers: int, point: Point) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(layers)), Norm()
        self.register_buffer("cache", torch.empty(POSITIONS, HEAD // 2, 2, dtype=torch.float32))
        self.point = point

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Logits: eight chunks in 16 bits, or all in float32."""
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            inputs = h, self.cache, positions
            h = checkpoint(layer, *inputs, use_reentrant=False) if self.point.recomputed else layer(*inputs)
        h = self.norm(h)
        if self.point.chunked:
            return [F.linear(chunk, self.tok_embeddings.weight) for chunk in h.chunk(CHUNKS, dim=1)]
        return [F.linear(h, self.tok_embeddings.weight).float()]


class CompiledLoss(torch.autograd.Function):
    """What the graph of a chunk's float32 cross entropy allocates: a number a token, and the gradient in 16 bits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        normalizers = torch.empty(len(logits), device=logits.device)
        ctx.save_for_backward(logits, labels, normalizers)
        return normalizers.sum()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return torch.empty_like(ctx.saved_tensors[0]), None


def loss_of(logits: list[torch.Tensor], labels: torch.Tensor) -> Any:
    """Of chunks, the sum of their graphs'; they are freed by the caller."""
    if len(logits) == 1:
        return F.cross_entropy(logits[0].reshape(-1, VOCABULARY), labels.reshape(-1))
    chunks = zip(logits, labels.chunk(CHUNKS, dim=1), strict=True)
    return sum(CompiledLoss.apply(chunk.reshape(-1, VOCABULARY), each.reshape(-1)) for chunk, each in chunks)


def optimizers_of(model: nn.Module, point: Point) -> list[torch.optim.Optimizer]:
    """One; or one a weight, which updates it in backward."""
    if not point.updates_in_backward:
        return [torch.optim.AdamW(model.parameters(), fused=True)]
    made = []
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], fused=True)

        def update(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
        made.append(optimizer)
    return made


@contextmanager
def numbers_in(dtype: torch.dtype) -> Iterator[None]:
    """New tensors are of this format."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def timeline_of(point: Point, layers: int = LAYERS, steps: int = 2) -> Timeline:
    """Their training's first steps."""
    device = pretend_device()
    with ExitStack() as inside:
        mode = inside.enter_context(no_data(1.0, masks=False))
        recorder = Recorder(device, mode)
        inside.enter_context(
            OnOperations(tagging(recorder, gloo=False), workspaces(recorder, device, CUBLAS_WORKSPACE))
        )
        with recorder.phases("load"):
            with device, numbers_in(torch.bfloat16):
                model = Decoder(layers, point)
            optimizers = optimizers_of(model, point)
        with recorder.modules(Outer(model), None):
            for _ in range(steps):
                step(model, optimizers, point, device, recorder)
        states = {key: value for optimizer in optimizers for key, value in optimizer.state.items()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            recorder.place_in_layer(tensor, f"model.{name}")
            for value in states.get(tensor, {}).values() if isinstance(tensor, nn.Parameter) else ():
                recorder.place_in_layer(value, f"model.{name}")
    return recorder.timeline


def step(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], point: Point, device: torch.device, recorder: Recorder
) -> None:
    """One step of theirs."""
    ids = torch.ones(ROWS, TOKENS, dtype=torch.long, device=device)
    positions, labels = torch.ones_like(ids), ids.clone()
    with recorder.phases("forward"):
        logits = model(ids, positions)
        loss = loss_of(logits, labels)
        del logits
    with recorder.phases("backward"):
        loss.backward()
    with recorder.phases("step"):
        for optimizer in () if point.updates_in_backward else optimizers:
            optimizer.step()
            optimizer.zero_grad()


def planned(point: Point) -> float:
    """GiB allocated at most, at full depth."""
    return peaks(list(repeat_layers(timeline_of(point), DEVICE_NAME, LAYERS, DEEP)))[0]
