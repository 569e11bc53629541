"""vLLM's rules for adapters: each kind is accepted, converted or refused; a conversion is the trained model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from finetune.errors import FinetuneError
from finetune.finished_run.load import finished_run as open_run
from finetune.finished_run.serving_rules import RANKS, ServingVerdict, judge_for_vllm, whole_names
from finetune.finished_run.vllm_adapter import by_expert, converted, in_one_rank
from finetune.untrusted.safetensors_header import TensorFacts, read_header
from tests.support.models.multimodal import save_multimodal
from tests.support.models.tiny import save_tiny, tiny_model
from tests.support.runs.finished import finished_run

PREFIX = "base_model.model."
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapter(model: PreTrainedModel, folder: Path, **settings: Any) -> PeftModel:
    """A random adapter made and saved by peft."""
    adapted: Any = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": LINEAR, **settings}))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    result: PeftModel = adapted
    return result


def verdict_of(model: PreTrainedModel, folder: Path, **settings: Any) -> ServingVerdict:
    return judge(adapter(model, folder, **settings), folder)


def judge(adapted: PeftModel, folder: Path, **options: Any) -> ServingVerdict:
    config = adapted.get_base_model().config.to_dict() | {"architectures": [type(adapted.get_base_model()).__name__]}
    settings = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    return judge_for_vllm(settings, read_header(folder / "adapter_model.safetensors"), config, **options)


ACCEPTED: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "8"),
    "rsLoRA": ({"use_rslora": True}, "8"),
    "orthogonal": ({"init_lora_weights": "orthogonal"}, "8"),
    "gaussian": ({"init_lora_weights": "gaussian"}, "8"),
    "few layers": ({"target_modules": ["v_proj"], "layers_to_transform": [1]}, "8"),
    "rank 8": ({"r": 8}, "8"),
    "rank 9": ({"r": 9}, "16"),
    "rank 128": ({"r": 128}, "128"),
    "embeddings and head": ({"target_modules": ["embed_tokens", "lm_head", "q_proj"]}, "8"),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_accepted_as_it_is(kind: str, tmp_path: Path) -> None:
    settings, flag = ACCEPTED[kind]
    verdict = verdict_of(tiny_model(), tmp_path, **settings)
    assert (verdict.outcome, verdict.conversions, verdict.notes) == ("accepted", (), ())
    assert verdict.flags == ["--enable-lora", "--max-lora-rank", flag]


CONVERTED: dict[str, tuple[dict[str, Any], tuple[str, ...], int]] = {
    "rank_pattern": ({"rank_pattern": {"q_proj": 6, "v_proj": 2}}, ("one rank",), 6),
    "alpha_pattern": ({"alpha_pattern": {"layers.1.mlp.up_proj": 32}}, ("one rank",), 4),
    "both patterns": ({"rank_pattern": {"q_proj": 6}, "alpha_pattern": {"o_proj": 3}}, ("one rank",), 6),
}


@pytest.mark.parametrize("kind", CONVERTED)
def test_converted_first(kind: str, tmp_path: Path) -> None:
    settings, conversions, rank = CONVERTED[kind]
    verdict = verdict_of(tiny_model(), tmp_path, **settings)
    assert (verdict.outcome, verdict.conversions, verdict.rank) == ("converted", conversions, rank)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora: DoRA scales"),
    "trained in full": ({"modules_to_save": ["norm"]}, "modules_to_save: norm was trained in full"),
    "new tokens": ({"trainable_token_indices": {"embed_tokens": [500, 501]}}, "rows of new tokens were trained"),
    "biases": ({"bias": "lora_only"}, "biases were trained"),
    "LoRA's bias": ({"lora_bias": True, "target_modules": ["q_proj"]}, "biases were trained"),
    "too large": ({"r": 513, "target_modules": ["q_proj"]}, "its rank is 513, and vLLM's --max-lora-rank ends at 512"),
    "layers twice": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is not known"),
}


@pytest.mark.filterwarnings("ignore:Adapter 'default'. 2 LoRA tensor.s. have invalid shape")  # peft's, of LoRA's bias
@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: str, tmp_path: Path) -> None:
    settings, words = REFUSED[kind]
    # Llama's attention has no biases to train, Qwen2's has.
    wide = {"hidden_size": 640, "num_attention_heads": 40, "num_hidden_layers": 1} if "large" in kind else {}
    model = tiny_model("qwen2" if "bias" in kind else "llama", **wide)
    verdict = verdict_of(model, tmp_path, **settings)
    assert (verdict.outcome, verdict.conversions) == ("refused", ())
    assert len(verdict.refusals) == 1
    assert verdict.refusals[0].startswith(words)


def test_how_many_kinds_there_are() -> None:
    assert (len(ACCEPTED), len(CONVERTED), len(REFUSED)) == (9, 3, 7)


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("mixtral", {}, "target_parameters: mlp.experts.down_proj, mlp.experts.gate_up_proj: vLLM reads experts in"),
        ("qwen3_moe", {"target_parameters": EXPERTS[:1]}, "target_parameters: mlp.experts.gate_up_proj: vLLM takes"),
        ("qwen3_moe", {"alpha_pattern": {"q_proj": 2}}, "target_parameters beside a pattern have no form"),
    ],
)
def test_experts_that_are_refused(family: str, settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    sizes = MIXTURE if family == "qwen3_moe" else {"num_local_experts": 4}
    verdict = verdict_of(
        tiny_model(family, **sizes),
        tmp_path,
        **{"target_modules": ["q_proj"], "target_parameters": EXPERTS, **settings},
    )
    assert len(verdict.refusals) == 1
    assert verdict.refusals[0].startswith(words)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "olmoe"])
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "target_modules": ["q_proj", "v_proj"]}], ids=str)
def test_each_expert_by_its_name_is_the_trained_model(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """B A added to the checkpoint's own tensors, which have the names that vLLM's loader has."""
    sizes = MIXTURE | {"shared_expert_intermediate_size": 48} if family == "qwen2_moe" else MIXTURE
    if family == "olmoe":
        sizes = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    base = save_tiny(tmp_path / "base", family, **sizes)
    run = open_run(finished_run(tmp_path, base, lora={"r": 4, **settings, "target_parameters": EXPERTS}))
    found = json.loads((run.product / "adapter_config.json").read_text("utf-8"))
    config = json.loads((base / "config.json").read_text("utf-8"))
    verdict = judge_for_vllm(found, read_header(run.product / "adapter_model.safetensors"), config)
    assert (verdict.conversions, verdict.rank) == (("experts",), 4)
    tensors, plain = converted(run, found, verdict)
    assert plain["target_parameters"] is None
    assert sum(".experts." in key for key in tensors) == 2 * 4 * 3 * 2  # layers, experts, projections, A and B

    weights = load_file(base / "model.safetensors")
    scale = plain["lora_alpha"] / (plain["r"] ** 0.5 if plain["use_rslora"] else plain["r"])
    for key, a in tensors.items():
        path, _, part = key.removeprefix(PREFIX).partition(".lora_")
        if part == "A.weight":
            assert a.shape[0] == plain["r"]
            weights[f"{path}.weight"] += scale * tensors[key.replace("lora_A", "lora_B")] @ a
    served = Path(shutil.copytree(base, tmp_path / "served"))
    save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    trained = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(run.product)))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(served)), trained, rtol=1e-4, atol=1e-4)
    assert (trained - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-2


def test_tensors_of_experts_that_do_not_belong_together() -> None:
    key = f"{PREFIX}model.layers.0.mlp.experts"
    alone = {f"{key}.lora_A.weight": torch.zeros(8, 32), f"{key}.lora_B.weight": torch.zeros(64, 8)}
    with pytest.raises(FinetuneError, match="its tensors are not those of gate_up_proj and down_proj"):
        by_expert(alone, {"r": 2})


def test_a_quantised_base(tmp_path: Path) -> None:
    """An adapter is served over other weights, which a note says."""
    plain = judge(adapter(tiny_model(), tmp_path / "plain"), tmp_path / "plain", quantized=True)
    assert plain.outcome == "accepted"
    assert [note.partition(",")[0] for note in plain.notes] == ["it was trained over the quantised base"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "vLLM 0.32 has no adapters for GPT2LMHeadModel"),
        ({"architectures": ["Phi3ForCausalLM"]}, "vLLM 0.32 knows no layer q_proj in Phi3ForCausalLM"),
        ({"architectures": ["MistralForCausalLM"]}, "vLLM 0.32 has no adapter on embed_tokens for MistralForCausalLM"),
        ({"vocab_size": 258_049}, "vLLM 0.32 takes adapters for at most 258,048 tokens"),
    ],
    ids=["no adapters", "other layers", "embeddings", "vocabulary"],
)
def test_bases_that_take_no_such_adapter(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    adapted = adapter(tiny_model(), tmp_path, target_modules=["embed_tokens", "q_proj"])
    settings = json.loads((tmp_path / "adapter_config.json").read_text("utf-8"))
    config = adapted.get_base_model().config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    header = read_header(tmp_path / "adapter_model.safetensors")
    assert judge_for_vllm(settings, header, config).outcome == "accepted"
    verdict = judge_for_vllm(settings, header, config | change)
    assert [reason for reason in verdict.refusals if reason.startswith(words)] == list(verdict.refusals[-1:])


def test_other_initialisations_and_tensors_are_refused(tmp_path: Path) -> None:
    adapted = adapter(tiny_model(), tmp_path, target_modules=["q_proj"])
    settings = json.loads((tmp_path / "adapter_config.json").read_text("utf-8"))
    config = {"architectures": [type(adapted.get_base_model()).__name__]}
    header = read_header(tmp_path / "adapter_model.safetensors")
    for init in ("pissa", "olora", "corda", "loftq"):
        verdict = judge_for_vllm(settings | {"init_lora_weights": init}, header, config)
        assert verdict.refusals == (f"init_lora_weights: {init} changes the base when peft loads the adapter",)
    strange = {**header, f"{PREFIX}model.norm.weight": next(iter(header.values()))}
    assert judge_for_vllm(settings, strange, config).refusals == ("vLLM 0.32 does not know what model.norm.weight is",)
    assert judge_for_vllm(settings, {}, config).refusals == ("the adapter holds no LoRA tensor",)
    assert judge_for_vllm(settings | {"r": 8}, header, config).refusals == ("r is 8, and its tensors have rank 4",)
    flat = header | {f"{PREFIX}model.layers.0.mlp.up_proj.lora_A.weight": TensorFacts("F32", (4,))}
    assert judge_for_vllm(settings, flat, config).refusals[0].endswith("up_proj.lora_A.weight is no matrix")
    unknown = judge_for_vllm(settings, header, {"architectures": ["NewForCausalLM"]})
    assert (unknown.outcome, len(unknown.notes)) == ("accepted", 1)


def test_the_next_allowed_rank() -> None:
    flags = {rank: ServingVerdict((), (), rank, ()).flags[-1] for rank in (1, 2, 16, 17, 65, 129, 257, 321, 512)}
    expected = ["1", "8", "16", "32", "128", "256", "320", "512", "512"]
    assert list(flags.values()) == expected
    assert sorted(RANKS) == list(RANKS)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.eval()(input_ids=torch.arange(3, 67).reshape(2, 32), use_cache=False).logits
    return result


def added_by_hand(base: Any, tensors: dict[str, Tensor], settings: dict[str, Any]) -> Any:
    """The base with lora_alpha / r B A added to its weights: all that an engine without patterns computes."""
    weights = dict(base.named_parameters())
    with torch.no_grad():
        for key, a in tensors.items():
            path, _, part = key.removeprefix(PREFIX).partition(".lora_")
            if part in ("A.weight", "embedding_A"):
                assert a.shape[0] == settings["r"]
                product = tensors[key.replace(f"lora_{part}", f"lora_{part.replace('A', 'B', 1)}")] @ a
                scale = settings["lora_alpha"] / settings["r"]
                weights[f"{path}.weight"] += scale * (product.T if part == "embedding_A" else product)
    return base


CONVERSIONS: dict[str, dict[str, Any]] = {
    "ranks": {"rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 6}},
    "patterns": {"rank_pattern": {"q_proj": 2, "k_proj": 7}, "alpha_pattern": {"mlp.down_proj": 5, "q_proj": 2}},
    "rslora by pattern": {"use_rslora": True, "rank_pattern": {"^model.layers.0.self_attn.v_proj": 2}},
    "embeddings too": {"target_modules": ["embed_tokens", "v_proj"], "rank_pattern": {"embed_tokens": 2}},
}


@pytest.mark.filterwarnings("ignore:Using Rank-Stabilized LoRA with rank_pattern")  # plain peft's, of its own way
@pytest.mark.parametrize("kind", CONVERSIONS)
def test_a_conversion_is_the_trained_model(kind: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    run = open_run(finished_run(tmp_path, base, lora={"r": 4, **CONVERSIONS[kind]}))
    settings = json.loads((run.product / "adapter_config.json").read_text("utf-8"))
    config = json.loads((base / "config.json").read_text("utf-8"))
    verdict = judge_for_vllm(settings, read_header(run.product / "adapter_model.safetensors"), config)
    assert verdict.outcome == "converted"
    tensors, plain = converted(run, settings, verdict)
    assert (plain["rank_pattern"], plain["alpha_pattern"], plain["use_rslora"]) == ({}, {}, False)
    trained = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(run.product)))
    by_hand = logits(added_by_hand(AutoModelForCausalLM.from_pretrained(base), tensors, plain))
    torch.testing.assert_close(by_hand, trained, rtol=1e-4, atol=1e-4)
    assert (trained - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 1e-2


def test_folding_is_needed(tmp_path: Path) -> None:
    """Without it, an engine that does not know the patterns serves another model."""
    adapter(tiny_model(), tmp_path, alpha_pattern={"v_proj": 64})
    settings = json.loads((tmp_path / "adapter_config.json").read_text("utf-8"))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    folded, plain = in_one_rank(tensors, settings)
    ignored = logits(added_by_hand(tiny_model(), tensors, settings))
    assert (ignored - logits(added_by_hand(tiny_model(), folded, plain))).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "mistral3", "llama4"])
def test_a_text_part_keeps_the_whole_models_names(family: str, tmp_path: Path) -> None:
    base = save_multimodal(family, tmp_path / "base")
    targets = ["q_proj", "v_proj", "o_proj"]
    run = open_run(
        finished_run(tmp_path, base, lora={"r": 4, "target_modules": targets, "rank_pattern": {"q_proj": 2}})
    )
    settings = json.loads((run.product / "adapter_config.json").read_text("utf-8"))
    config = json.loads((base / "config.json").read_text("utf-8"))
    header = read_header(run.product / "adapter_model.safetensors")
    verdict = judge_for_vllm(settings, header, config)
    assert (verdict.outcome, verdict.conversions) == ("converted", ("one rank", "one name"))
    tensors, _ = converted(run, settings, verdict)
    assert 2 * len(tensors) == len(header)
    assert all("language_model." in key for key in tensors)
    assert whole_names(tensors) == list(tensors)
    modules = dict(AutoModelForImageTextToText.from_pretrained(base).named_modules())
    assert {key.removeprefix(PREFIX).partition(".lora_")[0] for key in tensors} <= modules.keys()
