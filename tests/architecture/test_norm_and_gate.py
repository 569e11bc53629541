"""Norms and gates computed by the kit: transformers' numbers, what is kept of them, and which classes they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralMLP, MistralRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP, Phi3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from finetune.architecture.own_layers.norm_and_gate import compute_norms_and_gates, norms_and_gates
from tests.support.models.tiny import tiny_model

ROWS, TOKENS, WIDTH, INNER = 3, 17, 64, 96
FORMATS = [torch.float32, torch.bfloat16, torch.float16]
KINDS: list[Any] = [LlamaRMSNorm, Olmo2RMSNorm, Gemma3RMSNorm, Gemma4RMSNorm]  # one as each is written
ACTIVATIONS = ["silu", "swish", "gelu", "gelu_pytorch_tanh"]


def norm(dtype: torch.dtype = torch.float32, kind: Any = LlamaRMSNorm) -> nn.Module:
    made: nn.Module = kind(WIDTH, eps=1e-5)
    made.weight.data = drawn(WIDTH).abs().add(0.1 - offset_of(made)).to(dtype)  # type: ignore[union-attr,operator]
    return made


def offset_of(made: nn.Module) -> int:
    return int(type(made) in (Gemma3RMSNorm, Qwen3_5RMSNorm))


def gate(dtype: torch.dtype = torch.float32, kind: Any = LlamaMLP, act: str = "silu") -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = kind(LlamaConfig(hidden_size=WIDTH, intermediate_size=INNER, hidden_act=act)).to(dtype)
    return made


def owned(module: nn.Module) -> nn.Module:
    made = nn.ModuleList([copy.deepcopy(module)])
    compute_norms_and_gates(made)
    return made[0]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def learned(module: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Output, and gradients of the input and of all weights."""
    hidden = (2 * drawn(ROWS, TOKENS, WIDTH)).to(dtype).requires_grad_()
    output = module(hidden)
    output.backward(drawn(*output.shape, seed=2).to(output.dtype))
    assert hidden.grad is not None
    found = {"output": output.detach(), "input": hidden.grad}
    return found | {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


def by_hand(of: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """A norm's output and gradients in float64, from its formula."""
    weight: Tensor = of.weight.detach()  # type: ignore[operator,assignment]
    hidden, slope = (2 * drawn(ROWS, TOKENS, WIDTH)).to(dtype).double(), drawn(ROWS, TOKENS, WIDTH, seed=2)
    given = torch.result_type(hidden.to(dtype), weight) if type(of) is LlamaRMSNorm else dtype
    slope, weight = slope.to(given).double(), weight.double() + offset_of(of)
    root = (hidden.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    along = (slope * weight * hidden).mean(-1, keepdim=True)
    return {
        "output": weight * hidden * root,
        "input": root * (slope * weight - hidden * root**2 * along),
        "weight": (slope * hidden * root).sum((0, 1)),
    }


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == exact.keys()
    return {name: float((found[name].double() - each).norm() / each.norm()) for name, each in exact.items()}


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_is_no_further_from_its_formula_than_transformers(
    kind: Any, dtype: torch.dtype, weights: torch.dtype
) -> None:
    theirs = norm(weights, kind)
    exact = by_hand(theirs, dtype)
    found, librarys = learned(owned(theirs), dtype), learned(theirs, dtype)
    assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in librarys.items()}
    margin = 2e-8  # a float32 sum in another order
    errors, limits = error(found, exact), error(librarys, exact)
    assert all(errors[name] <= 1.01 * limits[name] + margin for name in exact), (errors, limits)


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_a_norm_has_transformers_bits(kind: Any) -> None:
    theirs = norm(torch.bfloat16, kind)
    found, librarys = learned(owned(theirs), torch.bfloat16), learned(theirs, torch.bfloat16)
    for name, expected in librarys.items():
        assert (found[name] != expected).double().mean() < 0.002, name


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_gate_has_transformers_bits(dtype: torch.dtype, act: str) -> None:
    theirs = gate(dtype, act=act)
    found, librarys = learned(owned(theirs), dtype), learned(theirs, dtype)
    assert found.keys() == librarys.keys()
    assert all(torch.equal(found[name], expected) for name, expected in librarys.items())
    assert len(librarys) == 2 + 3
    assert norms_and_gates(owned(theirs)) == {"norms": 0, "gates": 1}


def test_under_autocast_too() -> None:
    for theirs in (*(norm(torch.bfloat16, kind) for kind in KINDS), gate(torch.bfloat16)):
        with torch.autocast("cpu", torch.bfloat16):
            found, librarys = learned(owned(theirs), torch.bfloat16), learned(theirs, torch.bfloat16)
        for name, expected in librarys.items():
            assert found[name].dtype == expected.dtype
            assert (found[name] != expected).double().mean() < 0.002, name


@pytest.mark.parametrize("kind", [*KINDS, MistralRMSNorm, Qwen3RMSNorm, Phi3RMSNorm, GptOssRMSNorm, Qwen3_5RMSNorm])
def test_norms_of_these_classes_are(kind: Any) -> None:
    assert norms_and_gates(owned(norm(kind=kind))) == {"norms": 1, "gates": 0}


@pytest.mark.parametrize("kind", [LlamaMLP, MistralMLP, Qwen3MLP])
def test_gates_of_these_classes_are(kind: Any) -> None:
    assert norms_and_gates(owned(gate(kind=kind))) == {"norms": 0, "gates": 1}


def test_gemmas_gate_is() -> None:
    made = Gemma3MLP(Gemma3TextConfig(hidden_size=WIDTH, intermediate_size=INNER))  # type: ignore[no-untyped-call]
    assert norms_and_gates(owned(made)) == {"norms": 0, "gates": 1}


class Doubled(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(3).mean(-1, keepdim=True)  # another power, nothing else
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class Narrower(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float16)  # another name, nothing else
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class OfItsOwn(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        """The same, by a stranger who calls things otherwise."""
        kind = x.dtype
        x = x.to(torch.float32)
        square = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(square + self.variance_epsilon)
        return self.weight * x.to(kind)


class OfAnotherRoot(Gemma3RMSNorm):
    """Its forward is the one it inherits."""

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps)


def test_instructions_decide_and_no_name() -> None:
    assert norms_and_gates(owned(OfItsOwn(WIDTH))) == {"norms": 1, "gates": 0}
    for other in (Doubled, Narrower, OfAnotherRoot):
        assert norms_and_gates(owned(other(WIDTH))) == {"norms": 0, "gates": 0}, other  # type: ignore[arg-type]
    others = [Gemma4RMSNorm(WIDTH, with_scale=False)]
    others += [gate(act="gelu_new"), gate(act="gelu_python"), gate(act="gelu_python_tanh"), gate(act="relu")]
    others += [Phi3MLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=INNER))]  # type: ignore[arg-type]
    assert all(norms_and_gates(owned(other)) == {"norms": 0, "gates": 0} for other in others)


def test_a_forward_that_somebody_else_has_replaced_stays() -> None:
    module = norm()
    module.forward = lambda hidden: hidden  # type: ignore[method-assign,assignment]
    assert norms_and_gates(owned(module)) == {"norms": 0, "gates": 0}


@contextmanager
def kept() -> Iterator[list[Tensor]]:
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_keeps_its_input_as_it_came_and_a_root_for_each_token(kind: Any) -> None:
    own, hidden = owned(norm(torch.bfloat16, kind)), drawn(ROWS, TOKENS, WIDTH).bfloat16().requires_grad_()
    with kept() as tensors:
        own(hidden)
    assert [each.data_ptr() for each in tensors[:2]] == [hidden.data_ptr(), own.weight.data_ptr()]  # type: ignore[operator]
    assert [(tuple(each.shape), each.dtype) for each in tensors[2:]] == [((ROWS, TOKENS, 1), torch.float32)]


def test_a_norm_of_what_needs_no_gradient_keeps_nothing() -> None:
    own = owned(norm(torch.bfloat16)).requires_grad_(False)
    with kept() as tensors:
        own(drawn(ROWS, TOKENS, WIDTH).bfloat16())
    assert tensors == []


def test_a_gate_keeps_its_two_factors() -> None:
    own, hidden = owned(gate()).requires_grad_(False), drawn(ROWS, TOKENS, WIDTH).float().requires_grad_()
    with kept() as tensors:
        own(hidden)
    assert sum(each.shape == (ROWS, TOKENS, INNER) for each in tensors) == 2


@pytest.mark.parametrize(("family", "of_a_layer"), [("qwen3", 4), ("gemma3_text", 6)])
def test_a_models_loss_and_gradients_are_the_librarys(family: str, of_a_layer: int) -> None:
    theirs = tiny_model(family)
    own = copy.deepcopy(theirs)
    compute_norms_and_gates(own)
    assert norms_and_gates(own) == {"norms": 2 * of_a_layer + 1, "gates": 2}
    own = copy.deepcopy(own)  # as peft copies what it trains in full
    ids = torch.arange(2 * TOKENS).reshape(2, TOKENS) * 7 % 512
    found = {}
    for name, model in (("own", own), ("library's", theirs)):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found[name] = {"loss": loss.detach()} | {each: weight.grad for each, weight in model.named_parameters()}
    exact = {name: each.double() for name, each in found["library's"].items()}
    assert max(error(found["own"], exact).values()) < 2e-6


@pytest.mark.parametrize(
    "module",
    [norm(torch.bfloat16), norm(torch.bfloat16, Gemma3RMSNorm), gate(torch.bfloat16)],
    ids=["norm", "Gemma's", "gate"],
)
def test_recomputed_they_have_the_same_bits(module: nn.Module) -> None:
    own = owned(module)
    plain = learned(own, torch.bfloat16)
    own.zero_grad()
    run = own.forward
    again = nn.Module()
    again.held = own
    again.forward = lambda hidden: checkpoint(run, hidden, use_reentrant=False)  # type: ignore[method-assign,assignment]
    recomputed = {name.removeprefix("held."): each for name, each in learned(again, torch.bfloat16).items()}
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], each) for name, each in recomputed.items())


@pytest.mark.parametrize("kind", KINDS)
def test_in_float64_a_norm_is_transformers_own(kind: Any) -> None:
    theirs = norm(torch.float64, kind)
    found, librarys = learned(owned(theirs), torch.float64), learned(theirs, torch.float64)
    assert all(torch.equal(found[name], each) for name, each in librarys.items())


def test_layers_of_one_class_with_other_settings_are_each_recognised_for_themselves() -> None:
    from transformers import Gemma3nTextConfig
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

    config = Gemma3nTextConfig(hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2)
    config.activation_sparsity_pattern = [0.0, 0.95]
    torch.manual_seed(0)
    theirs = nn.ModuleList([Gemma3nTextMLP(config, layer_idx=layer) for layer in range(2)])
    own = copy.deepcopy(theirs)
    compute_norms_and_gates(own)
    assert norms_and_gates(own) == {"norms": 0, "gates": 1}  # the layer without sparsity
    hidden = drawn(ROWS, TOKENS, WIDTH).float()
    for mine, library in zip(own, theirs, strict=True):
        torch.testing.assert_close(mine(hidden), library(hidden))


def test_a_norm_with_a_gate_beside_its_input_keeps_its_own_forward() -> None:
    class GatedNorm(LlamaRMSNorm):  # as Mamba 2's
        def forward(self, hidden: Tensor, gate_input: Tensor | None = None) -> Tensor:
            normed: Tensor = super().forward(hidden)
            return normed if gate_input is None else normed * nn.functional.silu(gate_input)

    own = owned(GatedNorm(WIDTH, eps=1e-5))
    assert norms_and_gates(own)["norms"] == 0
    hidden, gate_input = drawn(ROWS, WIDTH).float(), drawn(ROWS, WIDTH, seed=3).float()
    torch.testing.assert_close(own(hidden, gate_input), GatedNorm(WIDTH, eps=1e-5)(hidden, gate_input))
