"""The guard sees faults that are planted in what stands for a library's module, and none where there is none."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from finetune.architecture import attention
from finetune.architecture.compiled import layers
from finetune.architecture.compiled.layers import CompiledLayers, compile_layers
from finetune.architecture.guard import Guard, _compare_attention, compare_computations
from finetune.architecture.loss import put_loss_into_forward
from finetune.architecture.own_layers.compute import ADAPTERS, GATES, NORMS, compute_layers, leave_to_library
from finetune.architecture.own_layers.lora_linear import computed_by
from finetune.architecture.own_layers.norm_and_gate import norms_and_gates
from finetune.architecture.recomputation import checkpoint_layers
from tests.support.models.tiny import flat_batch, tiny_model
from tests.support.stand_ins.compiling import Counting, nothing_compiled
from tests.support.stand_ins.planted import FAULTS, Faulty, plant_in_own
from tests.support.stand_ins.varlen_stand_in import FACTORS

assert nothing_compiled
pytestmark = pytest.mark.usefixtures("nothing_compiled")
BFLOAT16 = torch.bfloat16


def built(
    family: str = "llama", *, lora: bool = False, dropout: float = 0.0, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, PreTrainedModel]:
    """As a run begins: with adapters as peft draws them, lora_B zero."""
    attention.register()
    base = tiny_model(family, num_hidden_layers=2).to(dtype)
    base.config.use_cache = False
    base.set_attn_implementation(attention.NAME)
    put_loss_into_forward(base)
    model: nn.Module = base
    if lora:
        torch.manual_seed(0)
        model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout)).to(dtype)
    compute_layers(model, lambda *_: pytest.fail("no layer is packed"))
    return model.train(), base


def guarded(
    model: nn.Module, base: PreTrainedModel, backend: Any = None, *, autocast: bool = False, reached: bool = True
) -> tuple[Guard, CompiledLayers]:
    """Two forwards, as before a worst step."""
    guard, said = Guard(), list[str]()
    compiled = CompiledLayers(required=False, say=said.append, backend=backend)
    if backend is not None:
        compile_layers(base, compiled)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    casting = torch.autocast("cpu", BFLOAT16) if autocast else nullcontext()
    with torch.no_grad(), casting, guard.watching(model):
        model(**flat_batch([7, 20, 1, 12]))
    if backend is not None and not guard.left_off:
        with torch.no_grad(), casting, compiled.comparing(reached):
            model(**flat_batch([7, 20, 1, 12]))
    assert all(torch.equal(each, before[name]) and each.grad is None for name, each in model.named_parameters())
    assert len(said) == (compiled.stopped is not None)
    return guard, compiled


FORMATS = [(torch.float32, False), (BFLOAT16, False), (torch.float32, True)]


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(("dtype", "autocast"), FORMATS, ids=["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_nothing_is_left_off_where_all_is_right(lora: bool, family: str, dtype: torch.dtype, autocast: bool) -> None:
    model, base = built(family, lora=lora, dropout=0.1, dtype=dtype)
    guard, compiled = guarded(model, base, Counting(), autocast=autocast)
    assert (guard.left_off, compiled.stopped) == ({}, None)
    assert guard.compared[NORMS] >= 1
    assert guard.compared[GATES] == 1
    adapted = [module.base_layer for module in model.modules() if hasattr(module, "base_layer")]
    kinds = {(layer.weight.shape, layer.bias is None) for layer in adapted}
    assert guard.compared.get(ADAPTERS, 0) == len(kinds)
    assert len(kinds) >= 3 * lora
    assert len(compiled.differences) >= 1
    assert "finetune_gate" in vars(next(module for module in model.modules() if hasattr(module, "finetune_gate")))
    second, _ = guarded(model, base)
    assert second.compared == guard.compared, "nothing that watches is left"


@pytest.mark.sample(8)
@pytest.mark.parametrize("fault", [*FAULTS, "output"])
@pytest.mark.parametrize(("where", "path"), [("adapters", ADAPTERS), ("norms", NORMS), ("gates", GATES)])
@pytest.mark.parametrize(("dtype", "autocast"), FORMATS, ids=["float32", "bfloat16", "autocast"])
def test_a_fault_of_the_kits_own_autograd_is_seen(
    where: str, path: str, fault: str, dtype: torch.dtype, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_own(where, fault, monkeypatch)
    model, base = built(lora=True, dtype=dtype)
    guard, _ = guarded(model, base, autocast=autocast)
    assert list(guard.left_off) == [path]
    leave_to_library(model, path)
    again, _ = guarded(model, base, autocast=autocast)
    assert again.left_off == {}
    assert path not in again.compared
    counts = norms_and_gates(model)
    assert (counts["norms"] == 0) == (path == NORMS)
    assert (counts["gates"] == 0) == (path == GATES)
    assert ("own" not in computed_by(model, cast=True)) == (path == ADAPTERS)


@pytest.mark.parametrize("name", ["grad_down", "grad_up", "grad_flat"])
def test_a_fault_in_one_tensor_of_an_adapter_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of lora_A too, which is zero for the library as long as lora_B is."""
    from finetune.architecture.own_layers import lora_linear

    backward = lora_linear._KeptForBackward.backward

    def wrong(ctx: Any, *slopes: Tensor) -> Any:
        found = list(backward(ctx, *slopes))
        at = {"grad_flat": 1, "grad_down": 4, "grad_up": 4 + len(slopes)}[name]
        found[at] = 0.9 * found[at]
        return tuple(found)

    monkeypatch.setattr(lora_linear._KeptForBackward, "backward", staticmethod(wrong))
    model, base = built(lora=True)
    guard, _ = guarded(model, base)
    tensor = {"grad_down": "lora_A", "grad_up": "lora_B", "grad_flat": "the input"}[name]
    assert tensor in guard.left_off[ADAPTERS]
    assert "differs by 10.00%, 0.0001 is allowed" in guard.left_off[ADAPTERS]


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "backend",
    [
        *(Faulty(fault) for fault in FAULTS),
        Faulty("zero", first_alone=True),
        Faulty("halved", axes=3),
        Faulty("output"),
    ],
    ids=[*FAULTS, "one tensor alone", "the input", "output"],
)
def test_a_fault_of_the_compiler_is_seen(backend: Faulty, lora: bool) -> None:
    model, base = built(lora=lora)
    guard, compiled = guarded(model, base, backend)
    assert guard.left_off == {}
    assert compiled.stopped is not None
    assert compiled.stopped.startswith("compiled, LlamaDecoderLayer computes something else: ")
    row = flat_batch([7, 20])
    found = model(**row)
    assert torch.equal(found, built(lora=lora)[0](**row)), "it goes on as it is written"


@pytest.mark.slow
def test_a_fault_in_16_bits_alone_is_seen_there_alone() -> None:
    for autocast in (False, True):
        model, base = built()
        _, compiled = guarded(model, base, Faulty("halved", dtype=BFLOAT16), autocast=autocast)
        assert (compiled.stopped is not None) == autocast


@pytest.mark.slow
def test_a_fault_in_one_kind_of_layer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recomputed one, which comes second."""

    class OfTheSecond(Faulty):
        graphs = 0

        def __call__(self, graph: Any, inputs: Any) -> Any:
            self.graphs += 1
            return graph.forward if self.graphs == 1 else super().__call__(graph, inputs)

    monkeypatch.setattr(layers, "GRAPHS_RECOMPUTE", True)  # so that each kind has a graph of its own
    model, base = built()
    checkpoint_layers(base, 1)
    base.model.layers[0].gradient_checkpointing = False
    _, compiled = guarded(model, base, OfTheSecond("zero"))
    assert [each.is_fault for each in compiled.differences] == [False, True]


@pytest.mark.slow
def test_a_kind_that_the_guard_did_not_meet_is_compared_when_it_runs() -> None:
    model, base = built(lora=True)
    compiled = CompiledLayers(required=False, say=lambda _: None, backend=Faulty("zero"))
    compile_layers(base, compiled)
    row = flat_batch([7, 20])
    model(**row).backward()
    assert compiled.stopped is not None
    found = {name: each.grad for name, each in model.named_parameters() if each.requires_grad}
    plain, _ = built(lora=True)
    plain(**row).backward()
    assert all(torch.equal(found[name], each.grad) for name, each in plain.named_parameters() if each.requires_grad)


@pytest.mark.parametrize("factors", [{"output": 1.1}, {"gradients": 0.5}, {"gradients": float("nan")}, {}])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_fault_of_the_flash_kernel_is_seen(
    factors: dict[str, float], sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, factor in factors.items():
        monkeypatch.setitem(FACTORS, name, factor)
    lengths, generator = (5, 20, 1, 13), torch.Generator().manual_seed(0)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    shapes = {"query": (1, 4, 39, 8), "key": (1, 2, 39, 8), "value": (1, 2, 39, 8)}
    given: dict[str, Any] = {
        name: torch.randn(shape, generator=generator).to(BFLOAT16) for name, shape in shapes.items()
    }
    given |= {"starts": starts, "longest": 20, "scale": 0.35, "window": 6}
    given["sinks"] = torch.randn(4, generator=generator).to(BFLOAT16) if sinks else None

    def by_document(q: Tensor, k: Tensor, v: Tensor, s: Tensor | None) -> Tensor:
        return attention._by_document(q, k, v, attention.Attended(lengths, 0.35, 6, s, None, 0.0))

    assert _compare_attention(given, by_document).is_fault == bool(factors)


def test_a_gradient_of_rounding_alone_is_no_fault() -> None:
    """That of a bias on keys is zero but for rounding: a softmax does not change when all its scores do."""
    draw = torch.Generator().manual_seed(0)
    hidden, query = torch.randn(64, 16, generator=draw), torch.randn(64, 16, generator=draw)
    bias = nn.Parameter(torch.randn(16, generator=draw))

    def attend(times: float, hidden: Tensor) -> Tensor:
        return (times * (query @ (hidden + bias).T) / times).softmax(-1) @ hidden

    found = compare_computations(partial(attend, 3.0), partial(attend, 1.0), [hidden.requires_grad_()], {"bias": bias})
    assert not found.is_fault
    wrong = compare_computations(lambda h: attend(1.0, h) + 1e-3 * bias, partial(attend, 1.0), [hidden], {"bias": bias})
    assert wrong.is_fault


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (lambda h, w: h @ w, False),
        (lambda h, w: (h @ w) * float("nan"), True),
        (lambda h, w: h.detach() @ w, True),
        (lambda h, w: h @ w.detach(), True),
        (lambda h, w: h @ w + 0 * w.sum() * float("inf"), True),
        (lambda h, w: h @ w.T, True),
    ],
)
def test_what_counts_as_a_difference(found: Any, fault: bool) -> None:
    weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    difference = compare_computations(lambda h: found(h, weight), lambda h: h @ weight, [hidden], {"weight": weight})
    assert difference.is_fault == fault


def test_where_the_library_overflows_too_it_is_no_difference() -> None:
    hidden = torch.full((4, 8), 300.0, dtype=torch.float16).requires_grad_()
    assert not compare_computations(lambda h: h * h, lambda h: h.square(), [hidden], {}).is_fault


def test_both_draw_the_same_dropout_and_the_run_draws_what_it_would() -> None:
    hidden = torch.randn(50, 8).requires_grad_()
    dropout = nn.Dropout(0.5)
    torch.manual_seed(3)
    assert not compare_computations(lambda h: dropout(h), lambda h: dropout(h), [hidden], {}).is_fault
    first = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), first)
