"""What a GPU alone runs, on a CPU with a stand-in for the kernel: the formulas, and the operator's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from finetune.architecture import varlen_kernel
from finetune.architecture.attention import register, varlen_attention
from finetune.architecture.flash_kernels import choose_flash_kernel, try_shared_keys
from finetune.architecture.varlen_kernel import attend_on_cuda
from finetune.errors import EnvironmentMismatch
from tests.support.runs.recipes import least_recipe
from tests.support.stand_ins import varlen_stand_in
from tests.support.stand_ins.pretend_cuda import pretended_cuda
from tests.support.stand_ins.varlen_stand_in import KEY_HEADS, SAYS_SHARED

LENGTHS = (5, 20, 1, 13)
SCALE = 0.3
GPU = torch.device("cuda", 0)


def drawn() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), 8), (1, 2, sum(LENGTHS), 8), (4,)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def starts() -> Tensor:
    return torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def plainly(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int | None) -> Tensor:
    """As transformers' eager attention: one more score in each softmax, whose share is thrown away."""
    documents = []
    for start, end in pairwise(starts().tolist()):
        q, k, v = (x[0, :, start:end].double() for x in (query, key, value))
        k, v = (x.repeat_interleave(2, dim=0) for x in (k, v))
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (distance >= 0) & (distance < (window or end))
        scores = (q @ k.mT * SCALE).masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, end - start, 1)], dim=-1)
        documents.append((scores.softmax(-1)[..., : end - start] @ v).transpose(0, 1))
    return torch.cat(documents)[None]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_sinks_forward_and_backward(with_sinks: bool, window: int | None) -> None:
    *inputs, sinks = drawn()
    leaves = [*inputs, sinks] if with_sinks else inputs
    output = attend_on_cuda(
        *inputs, starts=starts(), longest=20, scale=SCALE, window=window, sinks=sinks if with_sinks else None
    )
    expected = plainly(*inputs, sinks if with_sinks else None, window)
    assert torch.allclose(output.double(), expected, rtol=1e-5, atol=1e-6)
    slope = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((output * slope).sum(), leaves)
    theirs = torch.autograd.grad((expected * slope).sum(), leaves)
    for name, our, their in zip(("query", "key", "value", "sinks"), ours, theirs, strict=False):
        assert (our - their).norm() <= 1e-5 * their.norm(), name


def test_sinks_in_16_bits_are_rounded_once() -> None:
    *inputs, sinks = (x.detach().bfloat16() for x in drawn())
    output = attend_on_cuda(*inputs, starts=starts(), longest=20, scale=SCALE, window=None, sinks=sinks)
    assert output.dtype == torch.bfloat16
    assert torch.allclose(output.double(), plainly(*inputs, sinks, None), rtol=2**-6, atol=2**-7)


def test_a_log_sum_exp_of_another_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(
        query: Tensor, *_: Any, scale: float, window_size: Any, return_aux: Any, enable_gqa: bool = False
    ) -> Any:  # torch 2.11's has no enable_gqa
        return query, torch.zeros(query.shape[:2])  # as torch's text has it

    *inputs, sinks = drawn()
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    with pytest.raises(EnvironmentMismatch, match=r"log-sum-exp of shape \(39, 4\)"):
        attend_on_cuda(*inputs, starts=starts(), longest=20, scale=SCALE, window=None, sinks=sinks)


def test_the_operator_has_the_arguments_that_are_known() -> None:
    assert varlen_stand_in
    operator = torch.ops.torch_attn._varlen_attn_backward.default
    known = "grad_out query key value out lse cu_seq_q cu_seq_k max_q max_k is_causal rng_state scale window_size"
    assert [argument.name for argument in operator._schema.arguments] == known.split()


def plain(query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
    """Attention of one document, [heads, tokens, width], in float64."""
    q, k, v = (x[0].double() for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    scores = (q @ k.mT * SCALE).masked_fill((distance < 0) | (distance >= (window or 999)), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)[None]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"),
    [(12, 12), (20, 20), (80, 80), (200, 200), (224, 224), (256, 256), (24, 16), (16, 24), (50, 30), (4, 4)],
)
def test_heads_of_any_width_up_to_256(head_dim: int, value_dim: int, sinks: bool) -> None:
    """The stand-in refuses what the kernel refuses: one that is not a multiple of 8, or fits few GPUs, or differs."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, 9, head_dim), (1, 2, 9, head_dim), (1, 2, 9, value_dim)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    # A sink of minus thousand takes nothing of a softmax.
    given = {"sinks": torch.full((4,), -1000.0)} if sinks else {}
    ends = torch.tensor([0, 9], dtype=torch.int32)
    output = attend_on_cuda(*inputs, starts=ends, longest=9, scale=SCALE, window=None, **given)
    expected = plain(*inputs)
    assert output.shape == (1, 9, 4, value_dim)
    assert torch.allclose(output.double(), expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(output.shape, generator=generator)
    ours = torch.autograd.grad((output * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for name, our, their in zip(("query", "key", "value"), ours, theirs, strict=True):
        assert our.shape == their.shape
        assert (our - their).norm() <= 1e-5 * their.norm(), name


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    ("widths", "by_flash"),
    [((512, 512), False), ((256, 256), True), ((264, 264), False), ((192, 512), False), ((576, 512), False)],
)
def test_heads_that_flash_attention_does_not_take_are_computed_by_document(
    widths: tuple[int, int], by_flash: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits on an Ampere GPU, which Gemma 4's global layers, 512 wide, run on."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, 9, widths[0]), (1, 2, 9, widths[0]), (1, 2, 9, widths[1])
    query, key, value = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    KEY_HEADS.clear()
    with pretended_cuda(monkeypatch, capability=(8, 6)):
        ends = {"cu_seq_lens": torch.tensor([0, 4, 9], dtype=torch.int32), "document_lengths": (4, 5)}
        found, _ = varlen_attention(
            torch.nn.Module(), query, key, value, None, **ends, scaling=SCALE, sliding_window=window
        )
    assert bool(KEY_HEADS) == by_flash
    parts = [plain(*(x[:, :, at] for x in (query, key, value)), window) for at in (slice(0, 4), slice(4, 9))]
    expected = torch.cat(parts, dim=1)
    assert torch.allclose(found.double(), expected, rtol=2**-6, atol=2**-6)


def test_a_model_with_both_kinds_of_layers_trains_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4 with its own widths of heads, 256 and 512."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    layers = ["sliding_attention", "full_attention"]
    config = Gemma4TextConfig(
        **sizes,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        layer_types=layers,
        sliding_window=8,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=64,
        num_kv_shared_layers=0,
    )
    register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="varlen", dtype=torch.bfloat16)
    ids = torch.arange(12)[None] % 64
    places = torch.cat([torch.arange(7), torch.arange(5)])[None]
    ends = {"cu_seq_lens": torch.tensor([0, 7, 12], dtype=torch.int32), "document_lengths": (7, 5)}
    KEY_HEADS.clear()
    with pretended_cuda(monkeypatch, capability=(9, 0)):
        output = model(input_ids=ids, position_ids=places, use_cache=False, **ends).logits
        output.float().square().sum().backward()
    assert len(KEY_HEADS) == 1  # of the sliding layer
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    on_cpu = model(input_ids=ids, position_ids=places, use_cache=False, **ends).logits
    assert torch.allclose(output.float(), on_cpu.float(), rtol=0.05, atol=0.05)
    on_cpu.float().square().sum().backward()
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            assert (gradients[name] - weight.grad).norm() <= 0.1 * weight.grad.norm(), name


@pytest.mark.parametrize("width", [12, 50, 264, 300])
@pytest.mark.parametrize("sinks", [False, True])
def test_memory_efficient_attention_gets_rows_of_16_bytes(
    width: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For others torch takes plain matrix products on a GPU, with all of a document's scores in memory."""
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def sdpa(*given: Tensor, **options: Any) -> Tensor:
        seen.extend(x.shape[-1] for x in given)
        return real(*given, **options)

    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, width, generator=generator) for heads in (4, 2, 2))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    with pretended_cuda(monkeypatch, capability=(8, 0)):  # float32, which flash attention does not take
        ends = {"cu_seq_lens": torch.tensor([0, 9], dtype=torch.int32), "document_lengths": (9,)}
        options = {"s_aux": torch.full((4,), -1000.0)} if sinks else {}
        found, _ = varlen_attention(torch.nn.Module(), query, key, value, None, **ends, scaling=SCALE, **options)
    assert len(seen) == 3
    assert {each % 8 for each in seen} == {0}
    assert torch.allclose(found.double(), plain(query, key, value), rtol=1e-5, atol=1e-5)


def function_of_211(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """torch 2.11's `varlen_attn`: no `enable_gqa`, and no check of the numbers of heads."""
    operator = torch.ops.torch_attn._varlen_attn.default
    given = [query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size == (-1, 0), scale, list(window_size)]
    output, lse, _ = operator(*given, *([query.shape[1] != key.shape[1]] if SAYS_SHARED else []))
    return (output, lse) if return_aux is not None and return_aux.lse else output


@pytest.fixture
def torch_211(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(varlen, "varlen_attn", function_of_211)
    monkeypatch.setitem(varlen_kernel.SHARED_KEYS, "cuda", False)
    varlen_kernel._varlen_parameters.cache_clear()
    KEY_HEADS.clear()
    yield monkeypatch
    varlen_kernel._varlen_parameters.cache_clear()


def test_torch_211_gets_keys_as_they_are_once_that_was_tried(torch_211: pytest.MonkeyPatch) -> None:
    with pretended_cuda(torch_211, capability=(9, 0)):
        expected = heads_of_a_run()
        assert KEY_HEADS == [4]
        KEY_HEADS.clear()
        assert try_shared_keys(GPU, torch.bfloat16) is None
        assert KEY_HEADS == [4, 4, 2, 4, 4, 2]  # copied, rounded otherwise, shared: plain, and with sinks and a window
        KEY_HEADS.clear()
        found = heads_of_a_run()
        assert KEY_HEADS == [2]
        assert try_shared_keys(GPU, torch.bfloat16) is None
        assert KEY_HEADS == [2]  # tried once
    for name, numbers in expected.items():
        assert (found[name] - numbers).norm() <= 2**-7 * numbers.norm(), name


def heads_of_a_run() -> dict[str, Tensor]:
    """Output and gradients in bfloat16, of layers whose heads share keys."""
    *inputs, _ = (x.detach().to(GPU, torch.bfloat16).requires_grad_() for x in drawn())
    output = attend_on_cuda(*inputs, starts=starts(), longest=20, scale=SCALE, window=None)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    return dict(zip(("output", "query", "key", "value"), (output.detach(), *gradients), strict=True))


@pytest.mark.sample(2, thorough=5)
@pytest.mark.parametrize("wrong", ["refused", "output", "gradients", "nan", "backward"])
def test_keys_are_copied_where_the_kernel_does_not_share_them(wrong: str, torch_211: pytest.MonkeyPatch) -> None:
    """A kernel that raises, in forward or in backward, or gives other numbers where it is given fewer heads of keys."""

    def fewer(*given: Any, **options: Any) -> Any:
        query, key, *_ = given
        shares = key.shape[1] != query.shape[1]
        if shares and wrong == "refused":
            raise RuntimeError("k must have shape (total_k, num_heads, head_size)")
        result = function_of_211(*given, **options)
        if not shares:
            return result
        output, *rest = result if isinstance(result, tuple) else (result,)
        if wrong == "backward":
            output = Broken.apply(output)
        elif wrong == "gradients":  # the same output, other gradients
            output = output * 1.1 - (output * 0.1).detach()
        else:
            output = output * (float("nan") if wrong == "nan" else 1.1)
        return (output, *rest) if rest else output

    fewer.__signature__ = inspect.signature(function_of_211)  # type: ignore[attr-defined]
    torch_211.setattr(varlen, "varlen_attn", fewer)
    varlen_kernel._varlen_parameters.cache_clear()
    with pretended_cuda(torch_211, capability=(9, 0)):
        kernel = choose_flash_kernel(least_recipe("x"), GPU, torch.bfloat16)
        KEY_HEADS.clear()
        heads_of_a_run()
    assert KEY_HEADS == [4]
    said = {"refused": "does not run here", "backward": "does not run here"}.get(wrong, "computes another ")
    assert (kernel.expands_keys or "").startswith(said)
    assert str(kernel).startswith("attention: keys and values are copied for each head that shares them")
    assert kernel.facts()["expands_keys"] == kernel.expands_keys


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise RuntimeError("no backward for shared keys")


def test_the_planner_counts_keys_as_they_are(torch_211: pytest.MonkeyPatch) -> None:
    """No kernel runs on its device; a GPU is expected to share keys."""
    *inputs, _ = drawn()
    attend_on_cuda(*inputs, starts=starts(), longest=20, scale=SCALE, window=None)
    assert KEY_HEADS == [2]


def test_no_trial_where_torch_has_the_parameter_or_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    KEY_HEADS.clear()
    assert choose_flash_kernel(least_recipe("x"), torch.device("cpu"), torch.bfloat16).expands_keys is None
    if SAYS_SHARED:
        with pretended_cuda(monkeypatch, capability=(9, 0)):
            assert try_shared_keys(GPU, torch.bfloat16) is None
    assert KEY_HEADS == []
