"""Selective recomputation: the same bits, no product computed twice, and what is kept of a layer."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.architecture.own_layers.compute import compute_layers
from finetune.architecture.recomputation import keeping_and_returning
from finetune.measure.live_tensors import LiveTensors
from finetune.model.build import build_model
from finetune.model.quantization import unpacked_weight
from tests.support.models.architectures import save_shaken
from tests.support.models.tiny import flat_batch, save_tiny
from tests.support.runs.recipes import least_recipe

CPU = torch.device("cpu")
METHODS: dict[str, dict[str, Any]] = {
    "full": {"lora": None},
    "lora": {"lora": {"r": 4}},
    "lora, dropout": {"lora": {"r": 4, "lora_dropout": 0.3}},
    "4 bits": {"lora": {"r": 4, "lora_dropout": 0.2}, "quantization": {"load_in_4bit": True}},
    "8 bits": {"lora": {"r": 4}, "quantization": {"load_in_8bit": True}},
}
FAMILIES = ("llama", "gemma3_text")  # whose layers end in a product, and in a norm
Setting = bool | int | str


def model_of(folder: Path, method: str, setting: Setting) -> nn.Module:
    training = {"activation_checkpointing": setting}
    recipe = least_recipe(folder, model={"dtype": "float32"}, training=training, **METHODS[method])
    model = build_model(recipe, CPU).train()
    compute_layers(model, unpacked_weight)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw)
    return model


def trained(model: nn.Module, *, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = model(**flat_batch(vocabulary=97))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.detach(), gradients


def assert_same_bits(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys() != set()
    assert [name for name, gradient in found[1].items() if not torch.equal(gradient, expected[1][name])] == []


CASES = [(family, method, method in ("full", "lora, dropout")) for family in FAMILIES for method in METHODS]


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize(("family", "method", "autocast"), CASES)
def test_bitwise_as_without_recomputation(tmp_path: Path, family: str, method: str, autocast: bool) -> None:
    folder = save_tiny(tmp_path, family)
    expected = trained(model_of(folder, method, False), autocast=autocast)
    model = model_of(folder, method, "selective")
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert [layer.gradient_checkpointing for layer in layers] == [True, True]
    assert_same_bits(trained(model, autocast=autocast), expected)


@pytest.mark.parametrize("setting", [True, "selective"])
def test_hooks_around_a_layer_run_once(tmp_path: Path, setting: Setting) -> None:
    """As those by which FSDP2 gathers weights. transformers before 5.24 would run them again in backward."""
    model, ran, inside = model_of(save_tiny(tmp_path), "full", setting), Counter[str](), Counter[str]()
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(lambda *_, name=name: ran.update([name]))
        elif name.endswith("input_layernorm"):
            module.register_forward_pre_hook(lambda *_, name=name: inside.update([name]))
    trained(model)
    assert sorted(ran.values()) == [1, 1]
    assert sorted(inside.values()) == [2, 2], "the layer itself is computed again"
    model.eval()
    trained(model)
    assert sorted(inside.values()) == [3, 3]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["lfm2", "mixtral", "gemma2"])
def test_layers_of_other_kinds(tmp_path: Path, name: str) -> None:
    """Run document by document, with experts, and with capped scores."""
    save_shaken(name, tmp_path)
    assert_same_bits(trained(model_of(tmp_path, "full", "selective")), trained(model_of(tmp_path, "full", False)))


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def calls(folder: Path, method: str, setting: Setting) -> Counter[str]:
    model = model_of(folder, method, setting)
    with Counted() as counted:
        trained(model)
    return counted.calls


# bitsandbytes' products on a CPU; of 8 bits they are torch's there.
OF_METHOD = {"4 bits": {"gemm_4bit"}}
QUANTISED = {"gemm_4bit", "gemv_4bit"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["full", "lora", "4 bits"])
def test_no_product_and_no_attention_runs_twice(tmp_path: Path, method: str) -> None:
    folder = save_tiny(tmp_path)
    never, selective, always = (calls(folder, method, setting) for setting in (False, "selective", True))
    if method not in OF_METHOD:
        # transformers has the input of checkpointed layers require a gradient, to which adapters of q, k and v add.
        more = 3 if method == "lora" else 0
        assert (selective["mm"], selective["addmm_"]) == (never["mm"] + more, never["addmm_"] + more)
        assert selective["addmm"] == never["addmm"]
    for name in ("_scaled_dot_product_flash_attention_for_cpu", *QUANTISED):
        assert selective[name] == never[name], name
    assert {name for name in QUANTISED if always[name] > never[name]} == OF_METHOD.get(method, set())
    assert always["mm"] + always["addmm"] > selective["mm"] + selective["addmm"]
    assert selective["rsqrt_"] == always["rsqrt_"] > never["rsqrt_"]  # the norms run again
    assert selective["silu"] == always["silu"] > never["silu"]


TOKENS = 19  # of the batch


def left_for_backward(folder: Path, method: str, setting: Setting) -> int:
    """Bytes that one more layer leaves after forward."""
    found = []
    for layers in (2, 3):
        model = model_of(save_tiny(folder / f"{layers}-{setting}", num_hidden_layers=layers), method, setting)
        gc.collect()
        ledger = LiveTensors([*model.parameters(), *model.buffers()])
        before = ledger.live("cpu")
        with Watched(ledger):
            loss = model(**flat_batch())
        found.append(ledger.live("cpu") - before)
        del loss
    return found[1] - found[0]


class Watched(TorchDispatchMode):
    def __init__(self, ledger: LiveTensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ledger.see([result])
        return result


@pytest.mark.slow
@pytest.mark.parametrize(("method", "adapters"), [("full", 0), ("lora", 7 * 4)])
def test_what_a_layer_keeps(tmp_path: Path, method: str, adapters: int) -> None:
    """Its input, q, k, v, attention's output and log-sums of each document, o, gate and up: not down, which backward
    does not ask for; with adapters seven [tokens, rank]."""
    hidden, queries, keys, inner, heads = 64, 64, 32, 128, 4
    kept = hidden + queries + 2 * keys + queries + heads + hidden + 2 * inner + adapters
    assert left_for_backward(tmp_path, method, "selective") == 4 * TOKENS * kept
    assert left_for_backward(tmp_path, method, True) == 4 * TOKENS * hidden
    assert left_for_backward(tmp_path, method, False) > 4 * TOKENS * kept


def in_place_unread(x: Tensor, weight: Tensor) -> Tensor:
    return torch.sigmoid((x @ weight).view(-1, 8).add_(x).mul_(2.0)) * x


def in_place_after_a_read(x: Tensor, weight: Tensor) -> Tensor:
    product = x @ weight
    seen = torch.tanh(product)
    product.add_(1.0)
    return seen * torch.sigmoid(product)


def in_place_after_a_product(x: Tensor, weight: Tensor) -> Tensor:
    product = x @ weight
    other = product @ weight.T
    product.mul_(3.0)
    return torch.sigmoid(other) * torch.sigmoid(product)


def written_by_out(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        product = x @ weight
        torch.add(product, x, out=product)
    return torch.sigmoid(product * x) @ weight


def a_product_by_out(x: Tensor, weight: Tensor) -> Tensor:
    with torch.no_grad():
        product = torch.empty_like(x)
        torch.mm(x, weight, out=product)
    return torch.sigmoid(product * x) @ weight


@torch.library.custom_op("finetune_tests::attention_with_dropout", mutates_args=())
def attention_with_dropout(rows: Tensor, dropout_p: float) -> Tensor:
    """Stands for the kernels of a GPU, which draw random numbers themselves; a CPU's does not."""
    return rows * (torch.rand_like(rows) > dropout_p)


attention_with_dropout.register_autograd(lambda context, slope: (slope, None))


def dropped_attention(x: Tensor, weight: Tensor) -> Tensor:
    rows = (x @ weight).view(1, 1, -1, 8)
    attended = attention_with_dropout(rows, 0.5)
    return F.dropout(torch.sigmoid(attended), 0.5) * x


def a_product_of_batches(x: Tensor, weight: Tensor) -> Tensor:
    scores = torch.bmm(x[None], x.T[None]).softmax(-1)
    return torch.sigmoid(torch.bmm(scores, (x @ weight)[None]))[0] * x


def a_product_at_the_end(x: Tensor, weight: Tensor) -> Tensor:
    return x + torch.sigmoid(x @ weight) @ weight


BLOCKS = (
    in_place_unread,
    in_place_after_a_read,
    in_place_after_a_product,
    written_by_out,
    a_product_by_out,
    dropped_attention,
    a_product_of_batches,
    a_product_at_the_end,
)


def computed(block: Callable[[Tensor, Tensor], Tensor], **options: Any) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 8, generator=draw).requires_grad_() for size in (40, 8))
    torch.manual_seed(1)
    run = partial(checkpoint, block, use_reentrant=False, **options) if options else block
    result = run(run(x, weight), weight)
    result.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [result.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("block", BLOCKS)
def test_results_that_are_overwritten_or_random(block: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Plain recomputation of the whole block is the reference, since autograd refuses what some of these overwrite."""
    expected = computed(block, context_fn=lambda: (nullcontext(), nullcontext()))
    for found, reference in zip(computed(block, context_fn=keeping_and_returning), expected, strict=True):
        assert torch.equal(found, reference)


def test_scores_are_not_kept() -> None:
    """[tokens, tokens] of each head; their product with the values is, as much as each of its factors."""
    with Counted() as never:
        computed(a_product_of_batches)
    with Counted() as selective:
        computed(a_product_of_batches, context_fn=keeping_and_returning)
    assert selective.calls["bmm"] == never.calls["bmm"] + 2  # of two blocks
    assert selective.calls["mm"] == never.calls["mm"]


def test_a_second_backward_computes_what_the_first_has_taken() -> None:
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    result = checkpoint(in_place_unread, x, weight, use_reentrant=False, context_fn=keeping_and_returning).sum()
    result.backward(retain_graph=True)
    first = weight.grad.clone()
    result.backward()
    assert torch.equal(weight.grad, 2 * first)
