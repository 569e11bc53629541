"""Layers with adapters, computed by the kit: peft's numbers, what is kept of them, and what stays peft's own."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit  # type: ignore[attr-defined]  # which is typed in part
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from finetune.architecture.own_layers.compute import ADAPTERS, compute_layers, fast_modules, leave_to_library
from finetune.architecture.own_layers.lora_linear import (
    OWN,
    compute_adapters,
    computed_by,
    sharing_module,
    sharing_modules,
)
from finetune.model.quantization import unpacked_weight
from tests.support.models.adapted_block import INNER, INPUTS, RANK, Block, adapted

CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "scale of one": {"lora_alpha": RANK},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "dropout": {"lora_dropout": 0.3},
    "biases": {"lora_bias": True, "bias": "all"},
    "biases and dropout": {"lora_bias": True, "lora_dropout": 0.5},
}


def block(*, biased: bool = False, **settings: Any) -> Any:
    torch.manual_seed(0)
    return adapted(Block(biased), **settings)


def owned(model: Any) -> Any:
    """A copy whose adapters are computed by the kit."""
    made = copy.deepcopy(model)
    compute_adapters(made, unpacked_weight)
    return made


def given(dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(3, 7, INPUTS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return drawn.to(dtype).requires_grad_()


Found = dict[str, Tensor]


def learned(model: nn.Module, run: Callable[[Tensor], Tensor] | None = None, hidden: Tensor | None = None) -> Found:
    """Output, and gradients of the input and of everything that is trained."""
    hidden = given() if hidden is None else hidden
    torch.manual_seed(3)  # dropout
    output = (run or model)(hidden)
    output.double().square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert hidden.grad is not None
    return {"output": output.detach(), "input": hidden.grad, **found}  # type: ignore[dict-item]  # all have one


def furthest(found: Found, expected: Found) -> float:
    """The largest relative difference of a tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - each).norm() / each.norm()) for name, each in expected.items())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_output_and_gradients_are_pefts(case: dict[str, Any]) -> None:
    pefts = block(biased="lora_bias" in case, **case)
    own = owned(pefts)
    assert computed_by(own, cast=False) == [OWN] * 3
    expected = learned(pefts)
    assert furthest(learned(own), expected) < 1e-6
    assert len(expected) == 2 + 6 + 3 * ("lora_bias" in case) + 3 * (case.get("bias") == "all")


@pytest.mark.parametrize("case", [CASES["lora"], CASES["rslora"], CASES["biases"]], ids=["lora", "rslora", "biases"])
def test_under_autocast_it_is_no_further_from_float64_than_peft(case: dict[str, Any]) -> None:
    pefts = block(biased="lora_bias" in case, **case).to(torch.bfloat16)
    for parameter in pefts.parameters():  # as the kit has them: masters in float32 over a base in bfloat16
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    exact = learned(copy.deepcopy(pefts).double(), hidden=given(torch.bfloat16).detach().double().requires_grad_())
    errors = []
    for model in (owned(pefts), pefts):
        with torch.autocast("cpu", torch.bfloat16):
            found = learned(model, hidden=given(torch.bfloat16))
        assert found["output"].dtype == torch.bfloat16
        assert {each.dtype for name, each in found.items() if "lora_" in name} == {torch.float32}
        errors.append([float((found[name].double() - each).norm() / each.norm()) for name, each in exact.items()])
    own, by_peft = errors
    assert max(own) < 8 * 2**-8  # eight roundings to bfloat16
    assert sum(own) < 1.1 * sum(by_peft)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_frozen_input_gets_no_gradient(dropout: float) -> None:
    pefts = block(lora_dropout=dropout)
    found = []
    for model in (pefts, owned(pefts)):
        torch.manual_seed(3)
        model(given().detach()).square().sum().backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.requires_grad})
    assert furthest(found[1], found[0]) < 1e-6


def kept(run: Callable[[], Tensor]) -> dict[int, tuple[int, torch.dtype]]:
    """Bytes and number format of each storage that autograd keeps, without parameters."""
    storages: dict[int, tuple[int, torch.dtype]] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes(), tensor.dtype
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = run()
    assert held.requires_grad
    return storages


def test_layers_of_one_input_keep_it_once() -> None:
    model = owned(block()).to(torch.bfloat16)
    inner = model.base_model.model
    hidden = given(torch.bfloat16)
    storages = kept(lambda: torch.cat([inner.gate(hidden), inner.up(hidden)]))
    tokens = hidden.numel() // INPUTS
    assert sorted(storages.values()) == sorted(
        [(2 * tokens * INPUTS, torch.bfloat16), *[(2 * tokens * RANK, torch.bfloat16)] * 2]
    )


def test_under_autocast_no_input_is_kept_in_float32() -> None:
    model = block().to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    hidden, layer = given(torch.bfloat16), owned(model).base_model.model.gate
    with torch.autocast("cpu", torch.bfloat16):
        storages = kept(lambda: layer(hidden))
    tokens = hidden.numel() // INPUTS
    casts = [(2 * RANK * INPUTS, torch.bfloat16), (2 * RANK * INNER, torch.bfloat16)]
    expected = [(2 * tokens * INPUTS, torch.bfloat16), (2 * tokens * RANK, torch.bfloat16), *casts]
    assert sorted(storages.values()) == sorted(expected)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch annotates no constructor here
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@contextmanager
def products() -> Iterator[Operations]:
    with Operations() as operations:
        yield operations
    operations.names = [name for name in operations.names if "mm" in name]


@pytest.mark.parametrize("case", [CASES["lora"], CASES["biases and dropout"]], ids=["lora", "biases and dropout"])
def test_recomputed_it_is_the_same_to_the_bit(case: dict[str, Any]) -> None:
    own = owned(block(biased="lora_bias" in case, **case))
    again = copy.deepcopy(own)
    plain = learned(own)
    for name, each in learned(again, lambda hidden: checkpoint(again, hidden, use_reentrant=False)).items():
        assert torch.equal(each, plain[name]), name


def test_recomputation_ends_before_the_last_large_product() -> None:
    own = owned(block())
    output = checkpoint(own, given(), use_reentrant=False)
    with products() as backward:
        output.sum().backward()
    # Five of each layer's backward; again x A^T of all three, and of two the product with B and the large one.
    assert len(backward.names) == 3 * 5 + 3 + 2 * 2


def test_nothing_but_products_is_computed() -> None:
    """No scaling, no sum of two results and none of two gradients; peft has six for a layer."""
    own = owned(block()).base_model.model.gate
    hidden = given()
    with Operations() as operations:
        own(hidden).backward(torch.ones(3, 7, INNER))
    views = {
        "view",
        "t",
        "transpose",
        "permute",
        "expand",
        "detach",
        "alias",
        "new_empty",
        "ones",
        "empty",
        "_unsafe_view",
        "slice",
    }
    assert set(operations.names) - views == {"mm", "addmm", "addmm_"}


def test_a_graph_that_is_kept_gives_the_same_again_and_no_second_derivative() -> None:
    own, hidden = owned(block()), given()
    loss = own(hidden).square().sum()
    loss.backward(retain_graph=True)
    assert hidden.grad is not None
    once = hidden.grad.clone()
    loss.backward()
    assert torch.equal(hidden.grad, 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    (slope,) = torch.autograd.grad(own(hidden).square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.sum().backward()


def test_a_result_may_be_changed_in_place() -> None:
    """As some models do; autograd refuses it of a view that a function made."""
    own, hidden = owned(block()).base_model.model.gate, given()
    own(hidden).mul_(2).sum().backward()
    changed = hidden.grad
    other = given()
    (2 * own(other)).sum().backward()
    assert changed is not None
    assert other.grad is not None
    assert torch.equal(changed, other.grad)


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's compiler does so
@pytest.mark.parametrize("case", [CASES["lora"], CASES["dropout"]], ids=["lora", "dropout"])
def test_it_compiles_to_one_graph(case: dict[str, Any]) -> None:
    own = owned(block(**case))
    compiled = copy.deepcopy(own)
    torch.compiler.reset()
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    assert furthest(learned(compiled, lambda hidden: run(hidden)), learned(own)) < 1e-6


def test_a_packed_weight_is_unpacked_once_forward_and_once_backward() -> None:
    """By bitsandbytes' own product, and for the input's gradient; nothing of it is kept in between."""
    torch.manual_seed(0)
    base: Any = Block(True, partial(Linear4bit, compute_dtype=torch.float32)).to("cpu")
    base.is_loaded_in_4bit = True  # as transformers says it to peft
    pefts = adapted(base)
    own, unpacked = copy.deepcopy(pefts), []

    def unpack(layer: Any, dtype: torch.dtype) -> Tensor:
        unpacked.append(layer)
        return unpacked_weight(layer, dtype)

    compute_adapters(own, unpack)
    assert computed_by(own, cast=False) == [OWN] * 3
    storages = kept(lambda: own(given()))
    assert unpacked == []
    assert INNER * INPUTS not in {nbytes // 4 for nbytes, _ in storages.values()}
    with Operations() as operations:
        found = learned(own)
    assert operations.names.count("bitsandbytes::gemm_4bit") == 3
    assert len(unpacked) == len(set(unpacked)) == 3
    assert furthest(found, learned(pefts)) < 1e-6


# What stays peft's.


class Own(nn.Linear):
    """A layer whose forward is not nn.Linear's."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


def two_adapters() -> Any:
    model = block()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["gate"]))
    return model


def embedded() -> Any:
    base = nn.Sequential(nn.Embedding(5, INPUTS), nn.Linear(INPUTS, INNER))
    return get_peft_model(base, LoraConfig(r=2, target_modules=["0", "1"]))


def by_parameter() -> Any:
    return get_peft_model(Block(False), LoraConfig(r=2, target_modules=["up"], target_parameters=["gate.weight"]))


@pytest.mark.parametrize(
    ("make", "reasons"),
    [
        (lambda: block(use_dora=True), ["DoRA"] * 3),
        (lambda: block(init_lora_weights="mica"), ["MiCALinearVariant"] * 3),
        (two_adapters, ["2 adapters", OWN, OWN]),
        (lambda: adapted(Block(False, Own)), ["the forward of Own"] * 3),
        (embedded, ["Embedding", OWN]),
        (by_parameter, ["experts", OWN]),
        (
            lambda: adapted(nn.ModuleDict({"up": Conv1D(INNER, INPUTS)}), fan_in_fan_out=True),
            ["the forward of Conv1D"],
        ),
    ],
    ids=["dora", "variant", "two adapters", "own forward", "embedding", "parameters", "conv1d"],
)
def test_what_peft_alone_computes_stays_pefts(make: Callable[[], Any], reasons: list[str]) -> None:
    model = make()
    compute_adapters(model, unpacked_weight)
    assert sorted(computed_by(model, cast=True)) == sorted(reasons)


def test_a_reason_for_all_is_given_for_all() -> None:
    model = block()
    compute_adapters(model, unpacked_weight, by_peft="gathered inside")
    assert computed_by(model, cast=True) == ["gathered inside"] * 3
    assert "forward" not in vars(model.base_model.model.gate)


def test_two_number_formats_are_pefts_unless_they_are_cast() -> None:
    pefts = block().to(torch.bfloat16)
    for parameter in pefts.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    own = owned(pefts)
    assert computed_by(own, cast=False) == ["two number formats"] * 3
    assert computed_by(own, cast=True) == [OWN] * 3
    assert torch.equal(own(given(torch.bfloat16)), pefts(given(torch.bfloat16)))


def test_adapters_that_are_off_merged_or_chosen_by_row_are_pefts() -> None:
    pefts, own = block(), owned(block())
    rows = {"adapter_names": ["default", "__base__", "default"]}

    def everything(model: Any) -> list[Tensor]:
        layer = model.base_model.model.gate
        found = [layer(given()), layer(given(), **rows)]
        with model.disable_adapter():
            found.append(layer(given()))
        model.merge_adapter()
        found.append(layer(given()))
        model.unmerge_adapter()
        torch.manual_seed(4)
        model.add_adapter("second", LoraConfig(r=2, target_modules=["gate"], init_lora_weights=False))
        for active in (["second"], ["default", "second"]):
            model.base_model.set_adapter(active)
            found.append(layer(given()))
        model.base_model.set_adapter(["default"])
        return [*found, layer(given()), model.merge_and_unload()(given())]

    for found, expected in zip(everything(own), everything(pefts), strict=True):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_is_saved_and_loaded_again_as_pefts(tmp_path: Path) -> None:
    pefts = block()
    own = owned(pefts)
    assert own.state_dict().keys() == pefts.state_dict().keys()
    own.save_pretrained(tmp_path)
    torch.manual_seed(0)
    again = PeftModel.from_pretrained(Block(False), str(tmp_path), is_trainable=True)
    compute_adapters(again, unpacked_weight)
    assert computed_by(again, cast=False) == [OWN] * 3
    assert furthest(learned(again), learned(pefts)) < 1e-6


def test_a_layer_without_tokens_has_gradients_of_zero() -> None:
    """As an expert that no token chose."""
    own = owned(block())
    own(given()[:0]).sum().backward()
    gradients = [each.grad for each in own.parameters() if each.requires_grad]
    assert all(each is not None and not each.any() for each in gradients)


def test_evaluation_is_training_without_dropout() -> None:
    pefts = block(lora_dropout=0.3).eval()
    own = owned(pefts)
    with torch.no_grad():
        assert torch.allclose(own(given()), pefts(given()), rtol=1e-5, atol=1e-5)


# Layers with one input.


class Attention(nn.Module):
    """The names of transformers' attention and MLP, and what they compute of one input."""

    def __init__(self, make: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (make(INPUTS, INNER, bias=True) for _ in range(3))
        self.o_proj = make(INNER, INPUTS, bias=False)
        self.mlp = Gated(make)

    def forward(self, hidden: Tensor, other: Tensor | None = None) -> Tensor:
        keys = self.k_proj(hidden if other is None else other)
        result: Tensor = self.o_proj(self.q_proj(hidden) * torch.sigmoid(keys) + torch.tanh(self.v_proj(hidden)))
        return hidden + self.mlp(hidden + result)


class Gated(nn.Module):
    def __init__(self, make: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = make(INPUTS, INNER, bias=False), make(INPUTS, INNER, bias=False)
        self.down_proj, self.act_fn = make(INNER, INPUTS, bias=False), nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))
        return result


SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHARED: dict[str, tuple[dict[str, Any], list[int]]] = {  # settings, and how many layers each module shares among
    "all": ({}, [3, 2]),
    "q and v alone": ({"target_modules": ["q_proj", "v_proj", "up_proj"]}, [2]),
    "ranks": ({"rank_pattern": {"k_proj": 2, "up_proj": 8}, "lora_alpha": 3, "use_rslora": True}, [3, 2]),
    "one scale, several ranks": ({"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"k_proj": 1}}, [3, 2]),
    "biases": ({"lora_bias": True, "bias": "all", "target_modules": ["q_proj", "k_proj", "v_proj"]}, [3]),
    "dropout": ({"lora_dropout": 0.3}, []),
    "dora": ({"use_dora": True}, []),
}


def attention(make: Callable[..., nn.Module] = nn.Linear, **settings: Any) -> Any:
    torch.manual_seed(0)
    return adapted(Attention(make), **{"target_modules": SEVEN, "lora_alpha": 2} | settings)


def sharing(model: Any) -> Any:
    made = copy.deepcopy(model)
    compute_layers(made, unpacked_weight)
    return made


@pytest.mark.parametrize(("settings", "shared"), SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layers_that_share_products_compute_what_pefts_do(
    settings: dict[str, Any], shared: list[int], dtype: torch.dtype
) -> None:
    pefts = attention(**settings).to(dtype)
    own = sharing(pefts)
    assert [len(each.finetune_sharing) for each in sharing_modules(own)] == shared
    found, expected = learned(own, hidden=given(dtype)), learned(pefts, hidden=given(dtype))
    assert furthest(found, expected) < {torch.float64: 1e-14, torch.float32: 1e-6}[dtype]


@pytest.mark.thorough
@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch's compiler does so
@pytest.mark.parametrize("case", ["all", "ranks", "one scale, several ranks", "biases"])
def test_compiled_to_one_graph_they_compute_it_too(case: str) -> None:
    """With gradients side by side, and B on the diagonal of one matrix."""
    pefts = attention(**SHARED[case][0]).double()
    own = sharing(pefts)
    torch.compiler.reset()
    run = torch.compile(own, backend="aot_eager", fullgraph=True)
    found = learned(own, lambda hidden: run(hidden), given(torch.float64))
    assert furthest(found, learned(pefts, hidden=given(torch.float64))) < 1e-14


def test_they_have_47_products_instead_of_56() -> None:
    counts = []
    for prepare in (owned, sharing):
        model = prepare(attention())
        with products() as operations:
            model(given()).sum().backward()
        counts.append(len(operations.names))
    assert counts == [56, 47]


def test_under_autocast_sharing_is_no_further_from_float64_than_peft() -> None:
    errors: Counter[str] = Counter()
    for seed in range(3):
        pefts, draw = attention().to(torch.bfloat16), torch.Generator().manual_seed(seed)
        for parameter in pefts.parameters():
            drawn = 0.1 * torch.randn(parameter.shape, generator=draw).to(torch.bfloat16)
            parameter.data = drawn.float() if parameter.requires_grad else drawn
        exact = learned(copy.deepcopy(pefts).double(), hidden=given(torch.bfloat16).detach().double().requires_grad_())
        for name, model in (("own", sharing(pefts)), ("peft", pefts)):
            with torch.autocast("cpu", torch.bfloat16):
                found = learned(model, hidden=given(torch.bfloat16))
            assert {each.dtype for at, each in found.items() if "lora_" in at} == {torch.float32}
            errors[name] += sum(float((found[at].double() - each).norm() / each.norm()) for at, each in exact.items())
    assert errors["own"] < 1.05 * errors["peft"]


def test_packed_layers_share_products() -> None:
    torch.manual_seed(0)
    base: Any = Attention(partial(Linear4bit, compute_dtype=torch.float32)).to("cpu")
    base.is_loaded_in_4bit = True
    pefts = adapted(base, target_modules=SEVEN, lora_alpha=2)
    own = sharing(pefts)
    assert [len(each.finetune_sharing) for each in sharing_modules(own)] == [3, 2]
    with Operations() as operations:
        found = learned(own)
    assert operations.names.count("bitsandbytes::gemm_4bit") == 7
    assert furthest(found, learned(pefts)) < 1e-6


def test_recomputed_layers_that_share_are_the_same_to_the_bit() -> None:
    own = sharing(attention())
    again = copy.deepcopy(own)
    plain = learned(own)
    for name, each in learned(again, lambda hidden: checkpoint(again, hidden, use_reentrant=False)).items():
        assert torch.equal(each, plain[name]), name


def test_a_layer_with_another_input_computes_alone() -> None:
    pefts = attention()
    other = given().detach() + 1
    found = [learned(model, lambda hidden, of=model: of(hidden, other)) for model in (sharing(pefts), pefts)]
    assert furthest(*found) < 1e-6


def test_shared_inputs_and_products_are_kept_once_and_freed() -> None:
    model = sharing(attention()).to(torch.bfloat16)
    hidden, inner = given(torch.bfloat16), model.base_model.model
    tokens = hidden.numel() // INPUTS
    storages = kept(lambda: torch.cat(inner.finetune_products(hidden)))
    assert sorted(storages.values()) == sorted(
        [
            (2 * tokens * INPUTS, torch.bfloat16),
            (2 * tokens * 3 * RANK, torch.bfloat16),
            (2 * 3 * RANK * INPUTS, torch.bfloat16),  # all A, one below another
        ]
    )
    stand_in = sharing_module(inner)
    first = weakref.ref(stand_in.q_proj(hidden))
    assert first() is None
    assert set(stand_in.finetune_results) == {"k_proj", "v_proj"}


def test_layers_left_to_peft_or_merged_share_nothing() -> None:
    pefts = attention()
    own = sharing(pefts)
    kinds = [fast.attribute for fast in fast_modules(own) if fast.path == ADAPTERS]
    assert kinds == ["finetune_products"] * 2 + ["forward"] * 2
    with own.disable_adapter(), pefts.disable_adapter():
        assert torch.allclose(own(given()), pefts(given()), rtol=1e-5, atol=1e-5)
    leave_to_library(own, ADAPTERS)
    assert sharing_modules(own) == [] == [each for each in fast_modules(own) if each.path == ADAPTERS]
    assert torch.equal(own(given()), pefts(given()))
    merged = sharing(pefts).merge_and_unload()
    assert torch.allclose(merged(given()), pefts(given()), rtol=1e-4, atol=1e-4)


class Child(Attention):
    def forward(self, hidden: Tensor, other: Tensor | None = None) -> Tensor:
        return 2 * super().forward(hidden, other)


def test_a_forward_that_calls_its_parents_shares_nothing() -> None:
    pefts = adapted(Child(), target_modules=SEVEN, lora_alpha=2)
    own = sharing(pefts)
    assert [type(each).__name__ for each in sharing_modules(own)] == ["Gated"]
    assert furthest(learned(own), learned(pefts)) < 1e-6
