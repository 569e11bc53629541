"""Products in float8: of operands rounded as stated, the same however rows are split; its refusals and
receipt. Its plan: tests/planner/test_float8_planned.py.

On a CPU they are emulated: rounded to float8, multiplied in float32.
"""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from finetune.architecture.compiled import choice
from finetune.architecture.compiled.layers import CompiledLayers
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.model.build import build_model
from finetune.model.float8.layers import computes_in_float8, float8_facts
from finetune.model.float8.requirements import EMULATION_SWITCH
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import read_strategy
from finetune.strategies.accelerator import check_combination, check_launch
from finetune.train import main
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.rows.mixtures import save_mixture
from tests.support.runs.cells import launch
from tests.support.runs.launching import ALONE
from tests.support.runs.one_curve import LENGTHS, checkpointed, curve_of, write_curve_recipe
from tests.support.runs.recipes import least, least_recipe, write_recipe
from tests.support.runs.reference import Step

FP8: dict[str, Any] = {"mixed_precision": "fp8"}
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed: pip install 'finetune[lowbit]'"
)
# Relative, of losses and gradient norms over six steps: what float8's rounding makes of bfloat16's curve, and what the
# order of bfloat16's sums makes of one split's curve in another.
LOSS_OF_BF16, NORM_OF_BF16 = 2e-3, 5e-2
LOSS_OF_SPLITS, NORM_OF_SPLITS = 5e-4, 4e-3


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EMULATION_SWITCH, "emulate")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


def full(base: Path | str = "x", **training: Any) -> Recipe:
    return least_recipe(base, lora=None, training=FP8 | training)


def rounded(values: Tensor, dim: int | None) -> Tensor:
    """To 4 bits of exponent and 3 of mantissa, whose largest number is 448, after a scale that is a power of two."""
    largest = values.float().abs().amax(dim, keepdim=True) if dim is not None else values.float().abs().max()
    scale = torch.exp2(torch.floor(torch.log2(448 / largest)))
    return (values.float() * scale).to(torch.float8_e4m3fn).float() / scale


@needs_torchao
@pytest.mark.usefixtures("emulated")
class TestLayers:
    def test_products_are_those_of_rounded_operands(self, tmp_path: Path) -> None:
        model: Any = build_model(full(save_tiny(tmp_path)), torch.device("cpu")).bfloat16()
        layer = model.model.layers[0].mlp.down_proj
        torch.manual_seed(0)
        given = torch.randn(1, 21, layer.in_features).bfloat16().requires_grad_()
        answer = layer(given)
        slope = torch.randn_like(answer)
        answer.backward(slope)
        x, weight, dy = given.detach()[0], layer.weight.detach(), slope[0]
        expected = rounded(x, 1) @ rounded(weight, 1).T
        assert torch.equal(answer.detach()[0], expected.bfloat16())
        assert given.grad is not None
        assert torch.equal(given.grad[0], (rounded(dy, 1) @ rounded(weight, None)).bfloat16())
        assert torch.equal(layer.weight.grad, dy.T @ x)
        assert not torch.allclose(expected, x.float() @ weight.float().T, rtol=1e-2)

    def test_they_are_the_linear_layers_of_decoder_layers(self, tmp_path: Path) -> None:
        base = save_tiny(tmp_path, intermediate_size=120)  # of which 16 is no divisor
        plain = build_model(least_recipe(base, lora=None), torch.device("cpu"))
        model = build_model(full(base), torch.device("cpu"))
        found = {name for name, layer in model.named_modules() if computes_in_float8(layer)}
        attention = ("q_proj", "k_proj", "v_proj", "o_proj")
        assert found == {f"model.layers.{n}.self_attn.{name}" for n in range(2) for name in attention}
        facts = float8_facts(model)
        assert facts is not None
        assert (facts["layers"], facts["layers_in_16_bits"], facts["emulated"]) == (8, 6, True)
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]

    def test_no_layer_of_a_size_for_it_is_an_error(self, tmp_path: Path) -> None:
        sizes = {"hidden_size": 56, "intermediate_size": 120}
        with pytest.raises(EnvironmentMismatch, match=r"no layer of LlamaForCausalLM is of a size for it; set"):
            build_model(full(save_tiny(tmp_path, **sizes)), torch.device("meta"))

    def test_a_mixture_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(EnvironmentMismatch, match="fp8: the experts of Qwen3MoeForCausalLM are not linear layers"):
            build_model(full(save_mixture(tmp_path / "m", "qwen3_moe")), torch.device("meta"))


SPLITS: dict[str, dict[str, dict[str, Any]]] = {
    "3+3+2, recomputed": {"training": {"per_device_batch_size": 3, "activation_checkpointing": True}},
    "packed into three rows": {
        "data": {"packing": True, "max_length": 350},
        "training": {"global_batch_size": 3, "per_device_batch_size": 1},
    },
}
TWO_RANKS = {"training": {"per_device_batch_size": 1}}


def close(curve: list[Step], other: list[Step], loss: float, norm: float) -> None:
    assert len(curve) == len(other) == 6
    for step, (here, there) in enumerate(zip(curve, other, strict=True), start=1):
        assert here.loss == pytest.approx(there.loss, rel=loss), f"step {step}"
        assert here.grad_norm == pytest.approx(there.grad_norm, rel=norm), f"step {step}"


@needs_torchao
@pytest.mark.usefixtures("emulated")
class TestTraining:
    def curve(self, folder: Path, base: Path, chats: Path, *changes: Any, **training: Any) -> list[Step]:
        recipe = write_curve_recipe(folder, base, chats, "full", *changes, {"training": FP8 | training})
        assert main([str(recipe)]) == 0
        return curve_of(recipe)

    def test_one_curve(self, tiny_llama: Path, chats: Path, tmp_path: Path) -> None:
        whole = self.curve(tmp_path / "whole", tiny_llama, chats)
        for name, split in SPLITS.items():
            found = self.curve(tmp_path / name[:3], tiny_llama, chats, split)
            close(found, whole, LOSS_OF_SPLITS, NORM_OF_SPLITS)
        half = self.curve(tmp_path / "half", tiny_llama, chats, mixed_precision="bf16")
        close(whole, half, LOSS_OF_BF16, NORM_OF_BF16)
        assert whole != half, "float8 rounds"
        receipt = json.loads((tmp_path / "whole" / "run" / "receipt.json").read_text("utf-8"))
        facts = {"layers": 14, "layers_in_16_bits": 0, "scaling": "rowwise_with_gw_hp", "emulated": True}
        assert (receipt["float8"], receipt["dtypes"]["compute"]) == (facts, "bfloat16")

    def test_a_resumed_run_is_bitwise_the_run(self, tiny_llama: Path, chats: Path, tmp_path: Path) -> None:
        runs = []
        for name, stops in {"whole": (6,), "resumed": (2, 6)}.items():
            shape = {"lr_scheduler_type": "constant"}
            saved = {"save_steps": 2, "eval_steps": 2}
            recipe = write_curve_recipe(tmp_path / name, tiny_llama, chats, "full", {"training": FP8 | shape}, saved)
            for steps in stops:
                assert main([str(recipe), f"training.max_steps={steps}"]) == 0
            runs.append((checkpointed(recipe.parent / "run"), curve_of(recipe)))
        (whole, curve), (resumed, again) = runs
        assert curve == again
        assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2_grad_op"])
    def test_on_two_ranks(self, strategy: str, tiny_llama: Path, chats: Path, tmp_path: Path) -> None:
        whole = self.curve(tmp_path / "whole", tiny_llama, chats)
        here = {"accelerate_config": strategy}
        recipe = write_curve_recipe(tmp_path / "two", tiny_llama, chats, "full", TWO_RANKS, here, {"training": FP8})
        assert launch([recipe], ranks=2) == [0]
        close(curve_of(recipe), whole, LOSS_OF_SPLITS, NORM_OF_SPLITS)

    def test_compiled(self, tiny_llama: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By torch's own backend that traces forward and backward and makes no code."""
        monkeypatch.setattr(choice, "CompiledLayers", partial(CompiledLayers, backend="aot_eager"))
        packed = SPLITS["packed into three rows"]
        plain = self.curve(tmp_path / "plain", tiny_llama, chats, packed)
        found = self.curve(tmp_path / "compiled", tiny_llama, chats, packed, compile=True)
        close(found, plain, LOSS_OF_SPLITS, NORM_OF_SPLITS)
        receipt = json.loads((tmp_path / "compiled" / "run" / "receipt.json").read_text("utf-8"))
        assert receipt["compiled"]["layers"]


class TestRefusals:
    def refused(self, folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
        recipe = write_recipe(folder, least(save_tiny(folder / "model"), lora=None, training=FP8))
        capsys.readouterr()
        code = main([str(recipe), *words])
        (line,) = capsys.readouterr().err.splitlines()
        return code, line

    def test_on_a_cpu(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, line = self.refused(tmp_path, capsys)
        assert (code, line.partition(";")[0]) == (4, "training.mixed_precision: fp8: a CPU has no products of float8")
        assert "set training.mixed_precision: bf16" in line

    @pytest.mark.parametrize("word", ["lora={}", "training.activation_checkpointing=selective"])
    def test_what_contradicts_it(self, word: str, tmp_path: Path) -> None:
        recipe = write_recipe(tmp_path, least("x", lora=None, training=FP8))
        with pytest.raises(FinetuneError, match="fp8") as caught:
            load_recipe(recipe, [word])
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize("strategy", ["zero2", "zero3"])
    @pytest.mark.usefixtures("emulated")
    def test_by_an_engine(self, strategy: str) -> None:
        with pytest.raises(EnvironmentMismatch, match=r"fp8: .* one number format; set bf16, or accelerate"):
            check_combination(full(), read_strategy(strategy), on_cpu=True)

    def test_without_torchao(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(EnvironmentMismatch, match=r"torchao is not installed; .*pip install 'finetune\[lowbit\]'"):
            check_combination(full(), read_strategy("single"), on_cpu=False)

    @pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
    def test_on_a_card_that_has_none(self, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A Card")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        with pytest.raises(EnvironmentMismatch, match=rf"8\.9 \(Ada, Hopper\), A Card has 8\.{capability[1]}; set"):
            check_launch(full(), ALONE)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
        check_launch(full(), ALONE)
