"""The pretend accelerator takes a GPU's branches: number formats, kernels, and what lies on device or host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.architecture import loss
from finetune.architecture.attention import varlen_attention
from finetune.closed_form.constants import CUBLAS_WORKSPACE
from finetune.planner.depth.extrapolate import depths, extrapolate, with_layers
from finetune.planner.trace.cuda_dispatch import autocast_list
from finetune.planner.trace.fake_device import DEVICE_NAME, pretend_device
from finetune.planner.trace.fake_model import no_data
from finetune.planner.trace.kernel_workspaces import WORKSPACES, deterministic_sums
from finetune.planner.trace.stand_ins import few_chunks
from finetune.planner.trace.timeline import PhaseMemory, Timeline
from finetune.planner.trace.trace import trace
from finetune.recipe.strategy import read_strategy
from tests.support.memory.planned import Case, models

DEVICE = pretend_device()
FLASHES = ("aten._scaled_dot_product_flash_attention", "torch_attn._varlen_attn")
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models(tmp_path_factory.mktemp("pretend"))


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def test_autocast_is_that_of_cuda() -> None:
    # https://docs.pytorch.org/docs/stable/amp.html, "CUDA Op-Specific Behavior"
    assert {"linear", "matmul", "scaled_dot_product_attention"} <= {
        name for name, _ in autocast_list("LOWER_PRECISION_FP")
    }
    with FakeTensorMode(), torch.autocast(DEVICE_NAME, dtype=BF16):
        half, full = tensor(4, 8), tensor(8, 8, dtype=F32)
        found = {
            "linear": F.linear(half, full),
            "matmul": full @ full,
            "pow": half.pow(2),
            "rsqrt": half.rsqrt(),
            "softmax": half.softmax(-1),
            "sum": half.sum(),
            "layer_norm": F.layer_norm(half, (8,)),
            "cross_entropy": F.cross_entropy(half, torch.zeros(4, dtype=torch.long, device=DEVICE)),
            "mul": half * half,
            "scatter_add": full.scatter_add(0, torch.zeros(4, 8, dtype=torch.long, device=DEVICE), half),
        }
    lower = {name for name, result in found.items() if result.dtype == BF16}
    assert lower == {"linear", "matmul", "mul"}


def test_autocast_keeps_a_weights_cast_until_it_ends() -> None:
    with FakeTensorMode():
        weight = torch.nn.Parameter(tensor(8, 8, dtype=F32))
        with torch.autocast(DEVICE_NAME, dtype=BF16):
            first, second = (F.linear(tensor(4, 8), weight).grad_fn for _ in range(2))
            assert cast_of(first) is cast_of(second)
        with torch.autocast(DEVICE_NAME, dtype=BF16):
            assert cast_of(F.linear(tensor(4, 8), weight).grad_fn) is not cast_of(first)


def cast_of(node: Any) -> Any:
    """The autograd node of the nearest cast."""
    while "ToCopy" not in node.name():
        node = next(below for below, _ in node.next_functions if below is not None)
    return node


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "masked", "kernel"),
    [
        (BF16, 4, False, "Flash"),
        (BF16, 2, False, "Flash"),
        (BF16, 4, True, "Efficient"),
        (F32, 4, False, "Efficient"),
        (F32, 2, False, "View"),  # plain matrix products: the others know no grouped queries
    ],
)
def test_attention_is_by_the_kernel_that_cuda_takes(
    dtype: torch.dtype, kv_heads: int, masked: bool, kernel: str
) -> None:
    with FakeTensorMode():
        query, key = tensor(1, 4, 24, 16, dtype=dtype).requires_grad_(), tensor(1, kv_heads, 24, 16, dtype=dtype)
        mask = torch.empty(1, 1, 24, 24, dtype=torch.bool, device=DEVICE) if masked else None
        output = F.scaled_dot_product_attention(query, key, key, mask, enable_gqa=kv_heads != 4)
        node: Any = output.grad_fn
        node = node.next_functions[0][0] if node.name().startswith("Alias") else node
        assert kernel in node.name()
        assert (output.shape, output.dtype) == (query.shape, dtype)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (64, {"torch_attn._varlen_attn.default": (8, 1, 64)}),
        (12, {"torch_attn._varlen_attn.default": (8, 1, 16)}),
        (200, {"torch_attn._varlen_attn.default": (8, 1, 232)}),
        (512, {"aten._scaled_dot_product_efficient_attention.default": (1, 4, 8, 512)}),
        (300, {"aten._scaled_dot_product_efficient_attention.default": (1, 4, 8, 304)}),
    ],
)
def test_packed_attention_is_planned_by_the_kernel_that_trains(
    width: int, expected: dict[str, tuple[int, ...]]
) -> None:
    """Its keys as the kernel is given them: shared by four heads of flash attention, under torch 2.11 too."""
    keys: dict[str, tuple[int, ...]] = {}

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "attn" in str(func) or "attention" in str(func):
                keys[str(func)] = tuple(args[1].shape)
            return func(*args, **kwargs or {})

    with FakeTensorMode(), Kernels():
        query, key = tensor(1, 4, 8, width), tensor(1, 1, 8, width)
        starts = torch.empty(2, dtype=torch.int32, device=DEVICE)
        ends: dict[str, Any] = {"cu_seq_lens": starts, "document_lengths": (8,)}
        output, _ = varlen_attention(torch.nn.Module(), query, key, key, None, **ends)
    assert output.shape == (1, 8, 4, width)
    assert keys == expected


@pytest.mark.parametrize("dtype", [F32, torch.float16])
def test_products_of_experts_are_planned_in_every_format(dtype: torch.dtype) -> None:
    """Forward and backward, of one shape with those in bfloat16: experts in full training are float32 masters."""

    def shapes(dtype: torch.dtype) -> list[tuple[Any, ...]]:
        with no_data(0.0, masks=False):
            tokens, experts = tensor(24, 16, dtype=dtype), tensor(4, 16, 32, dtype=dtype)
            ends = tensor(4, dtype=torch.int32)
            output = F.grouped_mm(tokens.requires_grad_(), experts.requires_grad_(), offs=ends)
            output.backward(torch.empty_like(output))
            found = [output, tokens.grad, experts.grad, F.grouped_mm(experts, experts.mT)]
            return [(each.shape, each.dtype == dtype, each.device) for each in found if each is not None]

    assert shapes(dtype) == shapes(BF16)
    assert len(shapes(dtype)) == 4


def test_workspaces_by_hand() -> None:
    """Llama 3 8B: 32 heads, 8 of keys, of 128; 4,000 tokens, of two documents."""

    def bytes_of(name: str, *args: Any) -> int:
        return WORKSPACES[name][0](*args)

    with FakeTensorMode():
        q, k = tensor(1, 32, 4000, 128), tensor(1, 8, 4000, 128)
        groups = 2 * 4000 * 32 * 128 * 2
        flash = 4096 * 32 * (128 + 1) * 4 + groups  # 4,000 rows are 32 blocks of 128
        assert bytes_of("aten._scaled_dot_product_flash_attention_backward.default", q, q, k, k) == flash
        flat, few, starts = tensor(4000, 32, 128), tensor(4000, 8, 128), tensor(3, dtype=torch.int32)
        varlen = (4000 + 2 * 128) * 32 * (128 + 1) * 4 + groups
        args = flat, flat, few, few, flat, flat, starts
        assert bytes_of("torch_attn._varlen_attn_backward.default", *args) == varlen
        efficient = 32 * (4032 * 128 + 4000) * 4
        assert bytes_of("aten._scaled_dot_product_efficient_attention_backward.default", q, q, q, q) == efficient
        weight = bytes_of("bitsandbytes.gemm_4bit.default", tensor(7, 4096), None, (14336, 4096), None, 64)
        assert weight == 14336 * 4096 * 2 + 14336 * 4096 // 64 * 4


def test_deterministic_kernels_keep_several_sums() -> None:
    """188 multiprocessors over sequences times heads, rounded up; one of these sums is in the table already."""
    query, starts = torch.empty(2, 32, 1000, 128, device="meta"), torch.empty(4, device="meta", dtype=torch.int32)
    flash, varlen = (f"{name}_backward.default" for name in FLASHES)
    assert deterministic_sums(flash, (query, query, query)) == (3 - 1) * 2 * 1024 * 32 * 128 * 4
    flat = torch.empty(4000, 24, 64, device="meta")
    operands = (flat, flat, flat, flat, flat, flat, starts)  # three documents
    assert deterministic_sums(varlen, operands) == (3 - 1) * (4000 + 3 * 128) * 24 * 64 * 4
    many = (*operands[:6], torch.empty(9, device="meta", dtype=torch.int32))
    assert deterministic_sums(varlen, many) == 0, "8 documents of 24 heads keep all multiprocessors busy"
    assert deterministic_sums("aten._scaled_dot_product_efficient_attention_backward.default", (query, query)) == 0


@pytest.mark.slow
def test_a_deterministic_training_is_traced_with_them(folder: Path) -> None:
    case = Case("lora", "bf16", 1, packed=True, tied=False, micro_steps=1)
    recipe = case.recipe(folder)
    training = recipe.training.model_copy(update={"deterministic": True})
    peaks = [
        trace(each, read_strategy("single"), case.batches(), gpu=True).timeline.phases(DEVICE_NAME)["backward"].peak
        for each in (recipe, recipe.model_copy(update={"training": training}))
    ]
    assert peaks[1].nbytes > peaks[0].nbytes


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_gpus_trace_has_the_same_weights_and_states(packed: bool, folder: Path) -> None:
    case = Case("full", "bf16", 1, packed=packed, tied=False, micro_steps=2)
    here, there = traced(case, folder, gpu=False), traced(case, folder, gpu=True)
    on_cpu, on_gpu, host = (
        timeline.phases(kind) for timeline, kind in ((here, "cpu"), (there, DEVICE_NAME), (there, "cpu"))
    )
    assert list(on_gpu) == list(on_cpu)
    for component in ("parameters", "gradients", "optimizer state"):
        assert on_gpu["step"].peak.parts[component] == on_cpu["step"].peak.parts[component]
    # Two workspaces: forward's thread and backward's.
    assert on_gpu["step"].peak.parts["other"] - on_cpu["step"].peak.parts["other"] == pytest.approx(
        2 * CUBLAS_WORKSPACE, abs=2048
    )
    # On the host are batches, in pinned memory and not, and what is written to disk.
    assert all(set(host[phase].peak.parts) <= {"other"} for phase in host)
    assert host["backward"].peak.nbytes < 20_000
    assert host["save"].peak.nbytes > on_gpu["step"].peak.parts["optimizer state"] // 4


def traced(case: Case, folder: Path, *, gpu: bool, strategy: str = "single", ranks: int = 1) -> Timeline:
    ways = read_strategy(strategy)
    return trace(case.recipe(folder), ways, case.batches(), ranks=ranks, gpu=gpu, cublas=CUBLAS_WORKSPACE).timeline


@pytest.mark.slow
def test_sharded_weights_come_from_the_host(folder: Path) -> None:
    case = Case("full", "bf16", 0, packed=True, tied=False, micro_steps=1)
    timeline = traced(case, folder, gpu=True, strategy="fsdp2", ranks=8)
    single = traced(case, folder, gpu=False).phases("cpu")["load"].end["parameters"]
    host, device = timeline.phases("cpu"), timeline.phases(DEVICE_NAME)
    assert host["load"].peak.nbytes == pytest.approx(single, rel=0.01)
    assert host["forward"].peak.nbytes < 20_000
    assert device["step"].peak.parts["parameters"] == pytest.approx(single / 8, rel=0.1)
    assert device["forward"].peak.parts["gathered layers"] > 0


@pytest.mark.slow
def test_a_sharded_update_reads_and_writes_its_share(folder: Path) -> None:
    """Not what DTensor asks of tensors as large as all ranks' together, the first time."""
    case = Case("full", "bf16", 1, packed=True, tied=False, micro_steps=1)

    def updated(strategy: str, ranks: int) -> int:
        traced = trace(case.recipe(folder), read_strategy(strategy), case.batches(), ranks=ranks, gpu=True)
        return sum(times * op.nbytes for op, times in traced.operations.items() if op.phase == "step")

    first, again, whole = updated("fsdp2", 8), updated("fsdp2", 8), updated("single", 1)
    assert first == again
    assert first == pytest.approx(whole / 8, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "strategy", "ranks"), [("lora", "single", 1), ("qlora", "fsdp2", 8)])
def test_deep_from_shallow_on_a_gpu(method: str, strategy: str, ranks: int, folder: Path, tmp_path: Path) -> None:
    case = Case(method, "bf16", 1, packed=True, tied=False, micro_steps=2)
    recipe = case.recipe(folder)
    config = json.loads(Path(recipe.model.name_or_path, "config.json").read_text())

    def timeline_of(layers: int) -> Timeline:
        smaller = with_layers(recipe, config, layers, tmp_path)
        return trace(smaller, read_strategy(strategy), case.batches(), ranks=ranks, gpu=True).timeline

    whole: dict[str, PhaseMemory] = timeline_of(9).phases(DEVICE_NAME)
    found = extrapolate({depth: timeline_of(depth) for depth in depths(9, 1)}, 9, DEVICE_NAME)
    del whole["load"]  # its largest tensor comes first in a shallow model, and is not the peak of a deep one
    for name, phase in whole.items():
        assert found[name].peak.nbytes == pytest.approx(phase.peak.nbytes, rel=1e-5), name


@pytest.mark.parametrize(("tokens", "seen"), [(100, [0]), (600, [0, 256, 512]), (2048, [0, 256, 1792])])
def test_a_search_traces_three_chunks_of_the_loss(tokens: int, seen: list[int]) -> None:
    with few_chunks():
        by_slice = loss.token_chunks(tokens, None, 256)
        by_index = loss.token_chunks(tokens, torch.arange(tokens), 256)
    assert [chunk.start for chunk in by_slice] == seen  # type: ignore[union-attr]
    assert [int(chunk[0]) for chunk in by_index] == seen  # type: ignore[index]
    assert len(list(loss.token_chunks(2048, None, 256))) == 8
