"""When FlashAttention 3 or 4 takes the place of torch's own kernel, with stand-ins for both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, LlamaConfig, PreTrainedModel

from finetune.architecture.flash_kernels import FlashKernel, choose_flash_kernel
from finetune.architecture.trial import attention_shapes
from tests.support.runs.recipes import least_recipe
from tests.support.stand_ins.flash_stand_in import install
from tests.support.stand_ins.pretend_cuda import pretended_cuda
from tests.support.stand_ins.varlen_stand_in import COMPUTED_BY, FACTORS

GPU, BFLOAT16 = torch.device("cuda", 0), torch.bfloat16
OWN = {"output": 1.0, "gradients": 1.0}
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def model_of(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def llama(**changes: Any) -> PreTrainedModel:
    return model_of(LlamaConfig(**SIZES, **HEADS, **changes))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with pretended_cuda(monkeypatch, capability=(9, 0)):
        yield monkeypatch


def chosen(trained: PreTrainedModel | None = None, dtype: torch.dtype = BFLOAT16, **changes: Any) -> FlashKernel:
    return choose_flash_kernel(least_recipe("x", **changes), trained or llama(), GPU, dtype)


def test_the_one_that_fits_is_on_for_steps_alone(hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install("FA4", tmp_path, hopper)
    install("FA3", tmp_path, hopper)
    kernel = chosen()
    assert (FACTORS, COMPUTED_BY[-2:]) == (OWN, [OWN, OWN | {"output": 1.005}])
    assert kernel.facts()["taken"] == "FlashAttention 3"
    assert 0 < kernel.difference < 0.01
    with kernel.active():
        assert FACTORS["output"] == 1.005
    assert FACTORS == OWN
    assert str(kernel).startswith("attention: FlashAttention 3 (flash_attn_interface) instead of torch's own kernel")


def test_the_fourth_is_next_and_alone_on_the_next_gpu(hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install("FA3", tmp_path, hopper, raises="built for\nanother torch")
    assert chosen().left_off == "FlashAttention 3 does not run here (ImportError: built for another torch)"
    install("FA4", tmp_path, hopper)
    assert chosen().facts()["taken"] == "FlashAttention 4"
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert chosen().facts()["taken"] == "FlashAttention 4"
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert str(chosen()) == (
        "attention: torch's own kernel, because FlashAttention 3 is not for a GPU of compute capability 8.6; "
        "FlashAttention 4 is not for a GPU of compute capability 8.6"
    )


def test_nothing_is_said_where_none_is_installed_or_asked_for(hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nothing = {"taken": None, "version": None, "difference": None, "left_off": None}
    nothing |= {"expands_keys": None, "by_document": False}
    assert (chosen().facts(), str(chosen())) == (nothing, "")
    install("FA3", tmp_path, hopper)
    assert chosen(model={"attention": "varlen"}).facts() == nothing
    assert choose_flash_kernel(least_recipe("x"), llama(), torch.device("cpu"), BFLOAT16).facts() == nothing
    assert COMPUTED_BY == []


@pytest.mark.parametrize("wrong", ["output", "gradients"])
@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_other_numbers_leave_it_off(wrong: str, factor: float, hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install("FA3", tmp_path, hopper, **{wrong: factor})
    kernel = chosen()
    assert kernel.taken is None
    said = "output" if wrong == "output" else "gradient of query"
    assert (kernel.left_off or "").startswith(f"FlashAttention 3 computes another {said}, by ")
    assert FACTORS == OWN


def test_what_it_does_not_compute_leaves_it_off(hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install("FA3", tmp_path, hopper)
    assert chosen(dtype=torch.float32).left_off == "FlashAttention 3 computes nothing in float32"
    assert chosen(llama(attention_dropout=0.1)).left_off == "FlashAttention 3 computes no dropout"
    deterministic = chosen(training={"deterministic": True}).left_off or ""
    assert deterministic.endswith("as training.deterministic: true asks")


def test_all_that_layers_ask_for_is_tried(hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Windows and sinks; one width of queries and another of values."""
    install("FA3", tmp_path, hopper)
    oss = GptOssConfig(**SIZES, **HEADS, num_local_experts=2, num_experts_per_tok=1, sliding_window=128)
    shapes = attention_shapes(type(model_of(oss)), oss)
    assert {(shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim) for shape in shapes} == {(4, 2, 16, 16)}
    assert {(shape.window, shape.sinks) for shape in shapes} == {(128, True), (None, True)}
    assert chosen(model_of(oss)).taken is not None
    assert len(COMPUTED_BY) == 4
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    deepseek = DeepseekV3Config(
        **SIZES, num_attention_heads=4, num_key_value_heads=4, first_k_dense_replace=2, **latent
    )
    assert chosen(model_of(deepseek)).taken is not None


def test_ranks_take_the_same(hopper: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install("FA3", tmp_path, hopper)
    kernel, other = chosen(), chosen()
    kernel.agree(lambda without: without, GPU)
    assert kernel.taken is not None
    other.agree(lambda without: without + 1, GPU)
    assert (other.taken, other.left_off) == (None, "FlashAttention 3: another rank cannot take it")
