"""What adapters reach: experts, ranks by pattern, what is left out, and names that mean nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel

from finetune.errors import FinetuneError
from finetune.model.adapter_targets import adapted_paths, describe_reach, reach
from finetune.model.build import build_model, decoder_parts, refuse_early
from finetune.recipe.schema import Lora, Recipe
from tests.support.models.architectures import save_shaken
from tests.support.models.multimodal import save_multimodal
from tests.support.models.tiny import save_tiny
from tests.support.rows.mixtures import MIXTURES, save_mixture
from tests.support.runs.finished import finished_run
from tests.support.runs.recipes import least_recipe

CPU = torch.device("cpu")
IDS = torch.arange(3, 35).reshape(2, 16)
# What each mixture's experts are called in a recipe, and how many matrices of layers there are besides them.
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ELSE = {"gpt_oss": 8, "mixtral": 8, "qwen3_moe": 8, "glm4_moe": 8 + 3 + 3}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {family: save_mixture(folder / family, family) for family in MIXTURES}


def recipe(base: Path, **lora: Any) -> Recipe:
    """With an attention that every architecture can be built with."""
    model, data = {"dtype": "float32", "attention": "eager"}, {"packing": False}
    return least_recipe(
        base, model=model, data=data, lora={"r": 4, **lora}, training={"activation_checkpointing": False}
    )


def built(base: Path, device: torch.device = CPU, **lora: Any) -> tuple[Any, dict[str, Any]]:
    model: Any = build_model(recipe(base, **lora), device)
    return model, reach(model, decoder_parts(model), lambda tensor: tensor.numel())


def plain(base: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    return model


def layers_matrices(model: nn.Module) -> dict[str, int]:
    """Counted another way: every parameter below a layer with two dimensions or more that is no bias."""
    named = ((name, tensor) for name, tensor in model.named_parameters() if ".layers." in name)
    return {name: tensor.numel() for name, tensor in named if tensor.ndim > 1 and not name.endswith("bias")}


@pytest.mark.sample(1, thorough=4)
@pytest.mark.parametrize("family", MIXTURES)
def test_all_linear_and_experts_by_name_reach_everything_but_routers(bases: dict[str, Path], family: str) -> None:
    model, found = built(bases[family], target_parameters=EXPERTS)
    every = layers_matrices(plain(bases[family]))
    routers = {name: size for name, size in every.items() if re.search(r"(gate|router)\.weight$", name)}
    assert found["reached_share"] == pytest.approx(1 - sum(routers.values()) / sum(every.values()))
    assert set(found["left_out"]) == {re.sub(r".*\.\d+\.", "", name) for name in routers}
    experts = {path for path in adapted_paths(model) if ".experts." in path}
    assert experts == {name for name in every if ".experts." in name}
    assert len(adapted_paths(model)) == ELSE[family] + len(experts)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.float32}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_without_experts_the_receipt_says_what_is_left_out_and_which_line_adds_it(
    bases: dict[str, Path], device: str
) -> None:
    _, found = built(bases["gpt_oss"], torch.device(device), target_parameters=[])
    every = layers_matrices(plain(bases["gpt_oss"]))
    attention = sum(size for name, size in every.items() if ".self_attn." in name)
    assert found["reached_share"] == pytest.approx(attention / sum(every.values()))
    added = found["adds_left_out"]
    assert added == "lora.target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj, mlp.router.weight]"
    first, second = describe_reach(found).splitlines()
    assert first.startswith("adapters on 8 layers: q_proj 2, k_proj 2, v_proj 2, o_proj 2; ")
    assert second.startswith("left out: mlp.experts.gate_up_proj ")
    assert f"; {added} adds them" in second
    line = json.loads(added.partition(": ")[2].replace("[", '["').replace(", ", '", "').replace("]", '"]'))
    _, with_them = built(bases["gpt_oss"], target_parameters=line)
    assert (with_them["reached_share"], with_them["left_out"]) == (1.0, {})


def test_a_list_leaves_out_what_all_linear_adds(tiny_llama: Path) -> None:
    _, found = built(tiny_llama, target_modules=["q_proj", "v_proj"])
    every = layers_matrices(plain(tiny_llama))
    chosen = sum(size for name, size in every.items() if "q_proj" in name or "v_proj" in name)
    assert found["reached_share"] == pytest.approx(chosen / sum(every.values()))
    assert found["adds_left_out"] == "lora.target_modules: all-linear"
    assert describe_reach(built(tiny_llama)[1]) == (
        "adapters on 14 layers: q_proj 2, k_proj 2, v_proj 2, o_proj 2, gate_proj 2, up_proj 2, down_proj 2; "
        "100% of the matrices' weights\n"
    )


def test_modules_trained_in_full_are_not_left_out(tiny_llama: Path) -> None:
    _, found = built(tiny_llama, target_modules=["q_proj"], modules_to_save=["down_proj"])
    assert "mlp.down_proj" not in found["left_out"]
    assert "mlp.up_proj" in found["left_out"]


def test_all_linear_and_excluded_modules(bases: dict[str, Path], tiny_llama: Path) -> None:
    model, _ = built(bases["qwen3_moe"], exclude_modules=["experts", "layers.1.self_attn.q_proj"])
    expected = {f"model.layers.{index}.self_attn.{name}_proj" for index in (0, 1) for name in "qkvo"}
    assert set(adapted_paths(model)) == expected - {"model.layers.1.self_attn.q_proj"}
    model, _ = built(tiny_llama, exclude_modules=r".*\.mlp\..*")
    assert {path.rpartition(".")[2] for path in adapted_paths(model)} == {f"{name}_proj" for name in "qkvo"}
    model, _ = built(bases["glm4_moe"])
    named = {path for path in adapted_paths(model) if ".mlp." in path}
    expected = {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert named == expected | {path.replace("0.mlp.", "1.mlp.shared_experts.") for path in expected}


def merged_by_hand(model: nn.Module, base: Mapping[str, Tensor], transposed: bool) -> dict[str, Tensor]:
    """Each base weight with its adapter, by the definition W + alpha / r x B A; of experts, for each of them apart."""
    own = dict(model.named_parameters())
    whole = {}
    for path in adapted_paths(model):
        name = path if path in base else f"{path}.weight"
        module, _, parameter = path.rpartition(".")
        prefix = f"base_model.model.{path}" if name != path else f"base_model.model.{module}"
        inner = f"{prefix}.base_layer"  # gate_up_proj is wrapped first
        prefix = inner if parameter == "gate_up_proj" else prefix
        a, b = (own[f"{prefix}.lora_{letter}.default.weight"] for letter in "AB")
        weight = base[name]
        if weight.ndim == 2:
            whole[name] = weight + 2.0 * (b @ a)  # lora_alpha 8, r 4; by the patterns 4 and 2
            continue
        count = weight.shape[0]
        rank = a.shape[0] // count
        deltas = [b[:, index::count] @ a[index * rank : (index + 1) * rank] for index in range(count)]
        whole[name] = weight + 2.0 * torch.stack([delta.T if transposed else delta for delta in deltas])
    return whole


@pytest.mark.sample(1, thorough=4)
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_learn_what_the_definition_says(bases: dict[str, Path], family: str) -> None:
    """Loss and gradients of the library's own forward with weights put together by hand."""
    down = r"down_proj(\.weight)?"
    patterns = {"rank_pattern": {down: 2}, "alpha_pattern": {down: 4}}
    model, _ = built(bases[family], lora_alpha=8, target_parameters=EXPERTS, **patterns)
    draw = torch.Generator().manual_seed(3)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    ranks = {path: model.get_parameter(path).shape[0] for path in trained if "lora_A" in path}
    assert {ranks[path] for path in ranks if "down_proj" in path} <= {2}
    assert {ranks[path] for path in ranks if path.endswith("mlp.experts.lora_A.default.weight")} == {4 * 2}
    base = plain(bases[family])
    whole = merged_by_hand(model, dict(base.named_parameters()), transposed=family == "gpt_oss")
    assert len(whole) == len(adapted_paths(model))
    expected = functional_call(base, whole, kwargs={"input_ids": IDS, "labels": IDS, "use_cache": False}).loss
    loss = decoder_parts(model)(input_ids=IDS, labels=IDS, use_cache=False).loss
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    names = list(trained)
    ours = torch.autograd.grad(loss, [trained[name] for name in names])
    theirs = torch.autograd.grad(expected, [trained[name] for name in names])
    for name, our, their in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.sample(1, thorough=4)
@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys did not match")  # peft looks among modules alone
@pytest.mark.parametrize("family", MIXTURES)
def test_an_export_is_loaded_back_by_plain_peft(tmp_path: Path, bases: dict[str, Path], family: str) -> None:
    sections = {"model": {"attention": "eager"}, "data": {"packing": False}}
    lora = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"experts.down_proj": 5}, "use_rslora": True}
    lora |= {"target_parameters": EXPERTS}
    run = finished_run(tmp_path, bases[family], lora=lora, **sections)
    loaded = PeftModel.from_pretrained(plain(bases[family]), run / "adapter")
    again = PeftModel.from_pretrained(plain(bases[family]), run / "adapter").eval()
    config = json.loads((run / "adapter" / "adapter_config.json").read_text("utf-8"))
    assert config["rank_pattern"] == {"q_proj": 2}
    assert config["target_parameters"] == sorted(config["target_parameters"])
    assert len(adapted_paths(loaded)) == ELSE[family] + (2 if family == "glm4_moe" else 4)
    with torch.no_grad():
        tuned, before = (model(input_ids=IDS).logits for model in (again, plain(bases[family]).eval()))
    assert (tuned - before).abs().max() > 0.1
    with torch.no_grad():
        merged = again.merge_and_unload()(input_ids=IDS).logits
    torch.testing.assert_close(merged, tuned, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(5, thorough=14)
@pytest.mark.parametrize(
    ("family", "lora", "words"),
    [
        (
            "gpt_oss",
            {"target_modules": ["q_proj", "down_proj"]},
            r"down_proj .*target_parameters: \[mlp.experts.down_proj",
        ),
        (
            "gpt_oss",
            {"target_parameters": ["experts.donw_proj"]},
            r"matches no parameter .*nearest are mlp.experts.down_p",
        ),
        ("gpt_oss", {"target_modules": ["router"]}, "lora: .*router.* not supported|lora: .*Router"),
        ("glm4_moe", {"lora_dropout": 0.1}, r"lora_dropout: is 0.1, .*shared_experts.*lora.target_parameters: \[\]"),
        ("glm4_moe", {"use_dora": True}, r"use_dora: is true, .*lora.target_parameters: \[\]"),
        (
            "glm4_moe",
            {"init_lora_weights": "orthogonal"},
            r"is orthogonal, .*lora.target_parameters: \[\]",
        ),
        ("mixtral", {"target_modules": ["gate"]}, r"in place of 2 layers .*target_parameters: \[mlp.gate.weight\]"),
        (
            "glm4_moe",
            {"target_modules": ["q_proj", "down_proj"]},
            r"in place of 2 layers .*shared_experts.down_proj.weight",
        ),
        ("qwen3_moe", {"target_parameters": ["lm_head.weight"]}, "the head cannot carry an adapter"),
        (
            "glm4_moe",
            {"rank_pattern": {"down_proj": 8}},
            r"down_proj does not .*\(down_proj\)\(\\\\.weight\)",
        ),
        ("qwen3_moe", {"rank_pattern": {"q_porj": 8}}, "lora.rank_pattern: q_porj matches none .* self_attn.q_proj"),
        ("qwen3_moe", {"alpha_pattern": {"w1": 8}}, "lora.alpha_pattern: w1 matches none of the adapters; there are"),
        (
            "qwen3_moe",
            {"exclude_modules": ["expert"]},
            "lora.exclude_modules: expert matches no module .*nearest are expe",
        ),
        ("qwen3_moe", {"exclude_modules": "k_proj"}, r"lora.exclude_modules: k_proj .*whole paths: write \[k_proj\]"),
    ],
    ids=str,
)
def test_what_reaches_nothing_or_another_thing_is_one_line(
    bases: dict[str, Path], family: str, lora: dict[str, Any], words: str
) -> None:
    with pytest.raises(FinetuneError, match=words) as caught:
        refuse_early(recipe(bases[family], **lora))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_packed_parameters_are_refused(tiny_llama: Path) -> None:
    asked = least_recipe(
        tiny_llama,
        lora={"target_parameters": ["q_proj.weight"]},
        quantization={"load_in_4bit": True},
    )
    with pytest.raises(FinetuneError, match=r"packed by the quantization; .* lora.target_modules: \[q_proj\]"):
        build_model(asked, torch.device("meta"))


def test_layers_that_kernels_read_past_an_adapter_are_left_out(tmp_path: Path) -> None:
    """Mamba's fused kernels take out_proj's weight; peft refuses it for some of the architectures that have it."""
    small = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
    base = save_tiny(tmp_path, "falcon_h1", **small, mamba_n_groups=1)
    _, found = built(base)
    assert found["adapted_modules"]["in_proj"] == 2
    assert list(found["left_out"]) == ["mamba.out_proj"]
    assert found["adds_left_out"] is None
    assert "; no adapter reaches them" in describe_reach(found)


def test_targets_on_a_vision_tower_are_refused(tmp_path: Path) -> None:
    save_multimodal("qwen2_5_vl", tmp_path)  # of which transformers has no text class
    meta = torch.device("meta")
    model, found = built(tmp_path, meta)
    assert {path.split(".")[1] for path in adapted_paths(model)} == {"language_model"}
    assert (len(adapted_paths(model)), found["reached_share"]) == (14, 1.0)
    with pytest.raises(
        FinetuneError, match=r"up_proj reaches 1 layers outside of the language model, first .*visual"
    ) as no:
        built(tmp_path, meta, target_modules=["up_proj"])
    pattern = str(no.value).rpartition(": ")[2]
    model, _ = built(tmp_path, meta, target_modules=pattern)
    assert len(adapted_paths(model)) == 2
    with pytest.raises(FinetuneError, match=r"qkv reaches 1 layers .*\.qkv; (the nearest are|there are) .*") as no:
        built(tmp_path, meta, target_modules=["qkv"])
    assert "visual" not in str(no.value).rpartition(";")[2]


def test_an_adapter_that_peft_would_not_load_again_is_refused(tmp_path: Path) -> None:
    """peft renames what it saved of Laguna's shared experts, and silently leaves them out of the loaded adapter."""
    save_shaken("laguna", tmp_path)
    with pytest.raises(FinetuneError, match=r"peft would load .* of an adapter on Laguna.* lora.exclude_modules") as no:
        built(tmp_path)
    assert "\n" not in str(no.value)


def test_names_of_single_layers_are_seen() -> None:
    for lora in ({"rank_pattern": {"layers.1.self_attn": 2}}, {"target_parameters": ["7.mlp.experts.down_proj"]}):
        assert Lora(**lora).names_single_layers, lora
    for modules in (r".*layers\.(0|1)\..*", r"model\.layers\.[0-3]\..*_proj"):
        assert Lora(target_modules=modules).names_single_layers, modules
    for modules in ("all-linear", ["w1", "dense_4h_to_h"], r".*layers\.\d+\..*_proj"):
        assert not Lora(target_modules=modules).names_single_layers, modules


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "gate_up_proj"])
def test_names_of_a_matrix_for_each_expert_are_answered_with_the_parameter_of_all(
    bases: dict[str, Path], name: str
) -> None:
    """transformers 4 had a layer for each expert, and many recipes still name gate_proj and up_proj."""
    line = f"{name} matches no module .*write lora.target_parameters: \\[mlp.experts.gate_up_proj\\]"
    with pytest.raises(FinetuneError, match=line):
        refuse_early(least_recipe(bases["gpt_oss"], lora={"target_modules": ["q_proj", name]}))
