"""Each check of the receipt refuses: what is built is spoilt in one place, and the line of that place is expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.errors import EnvironmentMismatch
from finetune.model.build import build_model, decoder_parts
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy, read_strategy
from finetune.strategies import fsdp
from finetune.strategies.assemble import Assembled
from finetune.strategies.receipt import Receipt, receipt_checks, receipt_content
from tests.support.runs.recipes import half_recipe

CPU = torch.device("cpu")
LORA = {"r": 4, "target_modules": "all-linear"}


class Built:
    """A run as it is after assembling, every part of it as the recipe asks; to be spoilt."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.recipe = half_recipe(folder, **{"lora": LORA} | changes)
        self.strategy: Strategy = read_strategy("single")
        self.unwrapped_model: nn.Module = build_model(self.recipe, CPU)
        self.scaler: object | None = None
        self.autocast: Callable[[], AbstractContextManager[Any]] = lambda: torch.autocast("cpu", torch.bfloat16)
        self.gathered_in: torch.dtype | None = None

    def receipt(self) -> dict[str, Any]:
        accelerator: Any = SimpleNamespace(
            num_processes=1, device=CPU, scaler=self.scaler, autocast=lambda: self.autocast()
        )
        parts = Assembled(self.unwrapped_model, self.unwrapped_model, None, gathered_in=self.gathered_in)
        return receipt_content(self.recipe, accelerator, parts, self.strategy)

    def asks(self, **changes: Any) -> None:
        self.recipe = Recipe.model_validate(self.recipe.model_dump() | changes)

    def training(self, **changes: Any) -> None:
        self.asks(training=self.recipe.training.model_dump() | changes)

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.unwrapped_model.parameters() if parameter.requires_grad]

    def layers(self) -> list[GradientCheckpointingLayer]:
        return [module for module in self.unwrapped_model.modules() if isinstance(module, GradientCheckpointingLayer)]


def no_autocast(built: Built) -> None:
    built.autocast = lambda: torch.autocast("cpu", enabled=False)


def other_autocast(built: Built) -> None:
    built.autocast = lambda: torch.autocast("cpu", torch.float16)


def scaled(built: Built) -> None:
    built.scaler = object()


def not_scaled(built: Built) -> None:
    built.training(mixed_precision="fp16")
    other_autocast(built)


def other_attention(built: Built) -> None:
    decoder_parts(built.unwrapped_model).config._attn_implementation = "eager"


def half_masters(built: Built) -> None:
    for parameter in built.trained():
        parameter.data = parameter.data.to(torch.bfloat16)


def one_half_master(built: Built) -> None:
    first = built.trained()[0]
    first.data = first.data.to(torch.bfloat16)


def adapters_asleep(built: Built) -> None:
    for module in built.unwrapped_model.modules():
        if isinstance(module, BaseTunerLayer):
            module._active_adapter = []


def adapters_unasked(built: Built) -> None:
    built.asks(lora=None)


def all_frozen(built: Built) -> None:
    built.unwrapped_model.requires_grad_(False)


def not_sharded(built: Built) -> None:
    built.strategy = read_strategy("fsdp2")


def not_in_stages(built: Built) -> None:
    built.strategy = read_strategy("gpipe")


def not_beside_another(built: Built) -> None:
    built.strategy = read_strategy("gpipe_ddp2")


def not_quantised(built: Built) -> None:
    built.asks(quantization={"load_in_4bit": True})


def another_quantisation(built: Built) -> None:
    built.asks(quantization={"load_in_8bit": True})


def one_layer_kept(built: Built) -> None:
    built.layers()[0].gradient_checkpointing = False


def none_keeps_products(built: Built) -> None:
    built.training(activation_checkpointing="selective")


def one_keeps_products(built: Built) -> None:
    built.layers()[0].finetune_keeps_products = True


def none_offloads(built: Built) -> None:
    built.training(activation_checkpointing=True, activation_offloading=True)


def one_offloads(built: Built) -> None:
    built.layers()[0].finetune_states_on_host = object()


def none_tiled(built: Built) -> None:
    built.training(activation_checkpointing=True, mlp_tile_tokens=16)


def none_kept(built: Built) -> None:
    built.training(activation_checkpointing=False)


@dataclass(frozen=True)
class Case:
    """What is spoilt, and the line that reports it."""

    spoil: Callable[[Built], None]
    line: str


CASES = (
    Case(no_autocast, "training.mixed_precision: number format of the computation: asked bfloat16, runs float32"),
    Case(other_autocast, "training.mixed_precision: number format of the computation: asked bfloat16, runs float16"),
    Case(scaled, "training.mixed_precision: loss scaling: asked False, runs True"),
    Case(not_scaled, "training.mixed_precision: loss scaling: asked True, runs False"),
    Case(other_attention, "model.attention: asked varlen, runs eager"),
    Case(half_masters, "training.pure_bf16: number format of trained weights: asked float32, runs bfloat16"),
    Case(
        one_half_master, "training.pure_bf16: number format of trained weights: asked float32, runs float32, bfloat16"
    ),
    Case(adapters_asleep, "lora: layers with an adapter: asked True, runs False"),
    Case(adapters_unasked, "lora: layers with an adapter: asked False, runs True"),
    Case(all_frozen, "lora.target_modules: weights are trained: asked True, runs False"),
    Case(not_sharded, "accelerate_config: weights sharded: asked True, runs False"),
    Case(not_in_stages, "accelerate_config: schedule of the pipeline: asked gpipe, runs None"),
    Case(not_beside_another, "accelerate_config: pipelines beside each other: asked 2, runs 0"),
    Case(not_quantised, "quantization: kinds of quantised layers: asked ['Linear4bit'], runs []"),
    Case(one_layer_kept, "training.activation_checkpointing: layers recomputed: asked 2, runs 1"),
    Case(
        none_keeps_products,
        "training.activation_checkpointing: recomputed layers that keep their products: asked 2, runs 0",
    ),
    Case(
        one_keeps_products,
        "training.activation_checkpointing: recomputed layers that keep their products: asked 0, runs 1",
    ),
    Case(none_kept, "training.activation_checkpointing: layers recomputed: asked 0, runs 2"),
    Case(none_offloads, "training.activation_offloading: layers: asked 2, runs 0"),
    Case(one_offloads, "training.activation_offloading: layers: asked 0, runs 1"),
    Case(none_tiled, "training.mlp_tile_tokens: asked 16, runs None"),
)
REDUCTION = "training.mixed_precision: number format of the reduction"


@pytest.fixture
def built(tiny_llama: Path) -> Built:
    model = {"name_or_path": str(tiny_llama), "dtype": "float32"}
    return Built(tiny_llama, model=model, training={"activation_checkpointing": True})


@pytest.mark.sample(6, thorough=20)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.spoil.__name__)
def test_what_differs_from_the_recipe_is_refused(case: Case, built: Built) -> None:
    assert built.receipt()["layers"] == 2
    case.spoil(built)
    with pytest.raises(EnvironmentMismatch) as caught:
        built.receipt()
    assert case.line in str(caught.value).splitlines()


def test_other_quantised_layers_are_refused(tiny_llama: Path) -> None:
    built = Built(tiny_llama, quantization={"load_in_4bit": True})
    assert built.receipt()["quantized_layers"] == {"Linear4bit": 14}
    another_quantisation(built)
    with pytest.raises(EnvironmentMismatch, match=r"asked \['Linear8bitLt'\], runs \['Linear4bit'\]"):
        built.receipt()


def test_every_check_has_a_case(built: Built) -> None:
    places = [place for place, _, _ in receipt_checks(built.recipe, built.strategy, built.receipt())]
    assert len(places) == len(set(places)) == 15
    seen = {place for place in places if any(case.line.startswith(f"{place}: asked ") for case in CASES)}
    assert seen | {REDUCTION} == set(places)


@pytest.mark.parametrize("reduce", ["as built", torch.bfloat16, None])
def test_gradients_reduced_in_another_format_are_refused(
    reduce: Any, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read off the units' own policies: by their weights alone the reduction would always be in float32."""
    if reduce != "as built":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        monkeypatch.setattr(fsdp, "MixedPrecisionPolicy", lambda **_: policy)
    built.strategy, built.gathered_in = read_strategy("fsdp2"), torch.bfloat16
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shards",))
        fsdp.shard_model(decoder_parts(built.unwrapped_model), built.strategy, mesh, CPU, torch.bfloat16)
        if reduce == "as built":
            assert built.receipt()["dtypes"]["reduce"] == "float32"
            return
        with pytest.raises(EnvironmentMismatch) as caught:
            built.receipt()
        assert f"{REDUCTION}: asked float32, runs bfloat16" in str(caught.value).splitlines()
    finally:
        distributed.destroy_process_group()


@pytest.mark.sample(3, thorough=9)
@pytest.mark.parametrize(
    ("optim", "pure", "elements", "line"),
    [
        ("adamw", False, {"float32": 10}, None),
        ("adamw", False, {"bfloat16": 10}, "state of adamw in float32 was asked for, it is bfloat16"),
        ("adamw", False, {"float32": 9, "bfloat16": 1}, "it is float32, bfloat16"),
        ("adamw", False, {}, "it is none"),
        ("adamw", True, {"bfloat16": 10}, None),
        ("adamw", True, {"float32": 10}, "state of adamw in bfloat16 was asked for, it is float32"),
        ("adamw_8bit", False, {"uint8": 9, "float32": 1}, None),
        ("adamw", False, {"uint8": 10}, "it is uint8"),
        ("paged_adamw_32bit", False, {"uint8": 10}, "it is uint8"),
    ],
)
def test_state_in_another_format_is_refused(
    optim: str, pure: bool, elements: dict[str, int], line: str | None, built: Built
) -> None:
    built.training(optim=optim, pure_bf16=pure)
    receipt = Receipt(built.recipe, built.strategy, content_of(trained=5), writes=False)
    if line is None:
        receipt.add_optimizer_state(Counter(elements))
        assert receipt.content["sharding"]["optimizer_share"] == 1
        return
    with pytest.raises(EnvironmentMismatch, match=line):
        receipt.add_optimizer_state(Counter(elements))


def content_of(trained: int, ranks: int = 1) -> dict[str, Any]:
    parts: dict[str, Any] = {"dtypes": {}, "sharding": {}, "optimizer": {}}
    return {"parameters": {"trained": trained}, "world_size": ranks, **parts}


def test_state_that_is_not_cut_is_refused(built: Built) -> None:
    def add(strategy: Strategy, elements: int, ranks: int) -> None:
        receipt = Receipt(built.recipe, strategy, content_of(100, ranks), writes=False)
        receipt.add_optimizer_state(Counter(float32=elements))

    for name in ("zero1", "zero2", "zero3"):
        zero = read_strategy(name)
        with pytest.raises(EnvironmentMismatch, match=f"{name} shards optimizer state, this rank holds 100%"):
            add(zero, 200, 2)
        add(zero, 100, 2)
        add(zero, 200, 1)  # alone it holds all
    add(built.strategy, 200, 2)
