"""FA3 and FA4 by torch's own switch, with a stand-in for the package: used where it matches, else torch's own stays."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn import attention
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl, varlen
from transformers import AutoConfig

from finetune.architecture.flash_kernels import choose_flash_kernel, widest_head
from finetune.recipe.schema import Recipe
from tests.support.runs.recipes import least_recipe
from tests.support.stand_ins.pretend_cuda import pretended_cuda

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Handle:
    """What a package's registration returns."""

    def remove(self) -> None:
        pass


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both are registered as a package would, and any kernel that stays active ends with the test."""
    registry = attention._registry
    monkeypatch.setattr(registry, "_FLASH_ATTENTION_IMPLS", dict(registry._FLASH_ATTENTION_IMPLS))
    for name in ("FA3", "FA4"):
        register_flash_attention_impl(name, register_fn=Handle)
    yield
    if current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def asks(name: str | None) -> Recipe:
    return least_recipe("x", model={"name_or_path": "x", "flash_attention": name})


def chosen(monkeypatch: pytest.MonkeyPatch, name: str = "FA4", width: int | None = 128, major: int = 9) -> Any:
    with pretended_cuda(monkeypatch, capability=(major, 0)):
        return choose_flash_kernel(asks(name), GPU, torch.bfloat16, width)


@pytest.mark.parametrize(("name", "major"), [("FA3", 9), ("FA4", 9), ("FA4", 10)])
def test_a_kernel_that_matches_replaces_torchs(name: str, major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = chosen(monkeypatch, name, major=major)
    assert (kernel.facts()["flash_attention"], kernel.not_replaced) == (name, None)
    assert current_flash_attention_impl() == name
    assert str(kernel) == f"attention: by {name}"
    kernel.leave_off("the guard found another gradient")
    assert current_flash_attention_impl() is None, "documents are computed by torch's own kernels"


@pytest.mark.parametrize("wrong", ["output", "gradients", "nan", "raises", "missing"])
def test_torchs_own_stays_where_the_other_differs(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = varlen.varlen_attn

    def varlen_attn(*given: Any, **options: Any) -> Any:
        output = genuine(*given, **options)
        if current_flash_attention_impl() is None:
            return output
        if wrong == "raises":
            raise RuntimeError("FA4 flash_attention forward unsupported: inputs must share device")
        if wrong == "gradients":
            return output * 1.1 - (output * 0.1).detach()
        return output * (float("nan") if wrong == "nan" else 1.1)

    varlen_attn.__signature__ = inspect.signature(genuine)  # type: ignore[attr-defined]
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    if wrong == "missing":

        def no_package() -> Any:
            raise ModuleNotFoundError("No module named 'flash_attn'")

        register_flash_attention_impl("FA4", register_fn=no_package)
    kernel = chosen(monkeypatch)
    said = {"raises": "RuntimeError: FA4 flash_attention", "missing": "ModuleNotFoundError: No module named"}
    assert (kernel.not_replaced or "").startswith(said.get(wrong, "computes another "))
    assert current_flash_attention_impl() is None
    assert kernel.facts()["flash_attention"] is None
    assert str(kernel).startswith("attention: by FA4, but by torch's own kernel: ")


@pytest.mark.parametrize(
    ("name", "width", "major", "why"),
    [
        ("FA3", 128, 10, "this GPU's compute capability is 10.0"),
        ("FA4", 128, 8, "this GPU's compute capability is 8.0"),
        ("FA4", 128, 12, "this GPU's compute capability is 12.0"),
        ("FA4", 256, 9, "heads are 256, wider than 128"),
        ("FA4", None, 9, "heads are of unknown width, wider than 128"),
    ],
)
def test_where_it_is_not_tried(
    name: str, width: int | None, major: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(monkeypatch, name, width, major).not_replaced == why
    assert current_flash_attention_impl() is None


def test_nothing_is_replaced_unasked_or_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_cuda(monkeypatch, capability=(9, 0)):
        assert choose_flash_kernel(asks(None), GPU, torch.bfloat16, 128).facts()["flash_attention"] is None
    assert current_flash_attention_impl() is None
    kernel = choose_flash_kernel(asks("FA4"), CPU, torch.bfloat16, 128)
    assert str(kernel) == "attention: by FA4, but by torch's own kernel: it needs a GPU, and 16 bits"


def test_another_attention_has_no_kernel_to_replace() -> None:
    with pytest.raises(ValidationError, match="FA4 replaces the kernel of attention: auto and varlen alone"):
        least_recipe("x", model={"name_or_path": "x", "flash_attention": "FA4", "attention": "sdpa"})


@pytest.mark.parametrize(
    ("model_type", "settings", "width"),
    [
        ("llama", {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128}, 128),
        ("llama", {"hidden_size": 2048, "num_attention_heads": 32}, 64),
        ("gemma2", {"hidden_size": 3584, "num_attention_heads": 16, "head_dim": 256}, 256),
        ("gemma4_text", {"head_dim": 256, "global_head_dim": 512}, 512),
    ],
)
def test_the_widest_head(model_type: str, settings: dict[str, int], width: int) -> None:
    assert widest_head(AutoConfig.for_model(model_type, **settings)) == width
