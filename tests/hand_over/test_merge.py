"""finetune merge: the merged model equals its base with the adapter, by plain peft and plain transformers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from finetune.cli.main import main
from finetune.errors import DoesNotFit, FinetuneError
from finetune.finished_run import finished_run as opened
from finetune.finished_run import fitting, load_adapted
from finetune.hand_over import agreement
from finetune.hand_over import merged_weights as merging
from finetune.hand_over.agreement import Agreement, computing_in_float32
from finetune.hand_over.merge import describe_merge, merge_run
from finetune.model.build import load_base
from finetune.recipe.loader import load_recipe, recipe_from_resolved
from tests.support.hub import running_hub
from tests.support.hub.server import TOKEN
from tests.support.models.multimodal import FAMILIES, answering, save_multimodal
from tests.support.models.ties import EMBEDDINGS, HEAD, changed_base, head_alone
from tests.support.models.tiny import save_tiny, tiny_model, tiny_tokenizer
from tests.support.rows.mixtures import MIXTURES, save_mixture
from tests.support.runs.finished import finished_run

ROOT = Path(__file__).resolve().parents[2]
NF4 = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "one layer": {"target_modules": ["v_proj"]},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "head in full": {"modules_to_save": ["lm_head"]},
    "embeddings in full": {"modules_to_save": ["embed_tokens"]},
    "norms in full": {"modules_to_save": ["norm", "input_layernorm"]},
    "embeddings adapted": {"target_modules": ["embed_tokens", "v_proj"]},
    "by pattern": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.mlp.up_proj": 5}, "use_rslora": True},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {
        "untied": save_tiny(folder / "untied"),
        "tied": save_tiny(folder / "tied", tie_word_embeddings=True),
        "qwen2": save_tiny(folder / "qwen2", "qwen2"),  # biases
        "qwen3": save_tiny(folder / "qwen3", "qwen3", tie_word_embeddings=True),
    }


def plain(folder: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 163).reshape(4, 40)
    with torch.no_grad():
        result: torch.Tensor = answering(model)(input_ids=ids, use_cache=False).logits
    return result


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_a_model_without_buffers_is_merged(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "opt", ffn_dim=128)
    run = finished_run(tmp_path, base)
    assert not list(plain(base).buffers())
    facts = merge_run(run, dtype=None, base=None, prompts=3, say=print)
    assert facts["agreement"]["candidates"]["own"]["top1"] == 1.0
    assert facts["agreement"]["candidates"]["own"]["kl"] < 1e-6


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("kind", ["untied", "tied"])
@pytest.mark.parametrize("method", METHODS)
def test_the_merged_model_is_the_base_with_its_adapter(
    tmp_path: Path, bases: dict[str, Path], kind: str, method: str
) -> None:
    run = finished_run(tmp_path, bases[kind], lora=METHODS[method])
    facts = merge_run(run, dtype=None, base=None, prompts=3, say=print)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases[kind]), str(run / "adapter")).eval()
    expected, actual = logits(adapted), logits(plain(run / "merged"))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, logits(plain(bases[kind])), rtol=1e-2, atol=1e-2)
    agreed = facts["agreement"]["candidates"]["own"]
    assert agreed["top1"] == 1.0
    assert agreed["kl"] < 1e-8
    assert agreed["largest_logit_difference"] < 1e-4
    assert facts["agreement"]["base"]["kl"] > 1e-4
    assert facts["agreement"]["held_out"]


def run_of_0_1(folder: Path, base: Path, init: str, **sections: Any) -> Path:
    """A run of release 0.1.0, whose adapter began as a part of its base and was then moved at random."""
    run = finished_run(folder, base, lora={"r": 4, "init_lora_weights": "gaussian"}, **sections)
    model = load_base(recipe_from_resolved(run / "recipe.yaml"), torch.device("cpu"))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=init))
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    adapted.save_pretrained(str(run / "adapter"))
    text = (run / "recipe.yaml").read_text("utf-8")
    (run / "recipe.yaml").write_text(text.replace("init_lora_weights: gaussian", f"init_lora_weights: {init}"), "utf-8")
    return run


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize(
    ("init", "quantization"), [("pissa", None), ("olora", None), pytest.param("olora", NF4, marks=pytest.mark.slow)]
)
def test_an_adapter_that_0_1_moved_out_of_its_base_is_merged(
    init: str, quantization: Any, tmp_path: Path, bases: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every other verb names the release that reads the run, and `finetune merge`."""
    run = run_of_0_1(tmp_path, bases["untied"], init, quantization=quantization)
    for verb in (["eval"], ["chat", "--prompt", "why"], ["export", "--for", "vllm"], ["push", "me/mine", "--dry-run"]):
        assert main([verb[0], str(run), *verb[1:]]) == 2
        said = capsys.readouterr().err
        assert f"lora.init_lora_weights: is {init}; 0.1.0 is the last release that trains and reads it;" in said
        assert said.count("finetune merge RUN") == 1
    facts = merge_run(run, dtype=None, base=None, prompts=3, say=print)
    agreed = facts["agreement"]["candidates"][facts["base"]]
    assert (agreed["top1"], facts["base"]) == (1.0, "own" if quantization is None else "dequantized")
    assert agreed["kl"] < 1e-8 < 1e-4 < facts["agreement"]["base"]["kl"]
    if quantization is None:
        base = AutoModelForCausalLM.from_pretrained(bases["untied"])
        expected = logits(PeftModel.from_pretrained(base, str(run / "adapter")).eval())
        torch.testing.assert_close(logits(plain(run / "merged")), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    "method", ["lora", "head in full", "embeddings in full", "embeddings adapted", "head in full, one matrix"]
)
def test_a_base_whose_files_and_configuration_disagree(tmp_path: Path, method: str) -> None:
    """The merged model has the matrices that the files hold or the adapter makes, and its config.json says so."""
    way, one, _ = method.partition(", one matrix")
    base = changed_base(tmp_path / "base", tied=True, change=head_alone if one else bool)
    run = finished_run(tmp_path, base, lora=METHODS[way])
    facts = merge_run(run, dtype=None, base=None, prompts=3, say=print)
    assert facts["agreement"]["candidates"]["own"]["top1"] == 1.0
    assert facts["agreement"]["candidates"]["own"]["largest_logit_difference"] < 1e-4
    merged_model = plain(run / "merged")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(run / "adapter")).eval()
    torch.testing.assert_close(logits(merged_model), logits(adapted), rtol=1e-4, atol=1e-4)
    assert merged_model.config.tie_word_embeddings is False
    assert load_file(run / "merged" / "model.safetensors").keys() >= {HEAD, EMBEDDINGS}


@pytest.mark.slow
def test_a_base_with_one_matrix_under_the_heads_name(tmp_path: Path) -> None:
    base = changed_base(tmp_path / "base", tied=True, change=head_alone)
    run = finished_run(tmp_path, base)
    facts = merge_run(run, dtype=None, base=None, prompts=3, say=print)
    assert facts["agreement"]["candidates"]["own"]["largest_logit_difference"] < 1e-4
    merged_model = plain(run / "merged")
    assert merged_model.lm_head.weight is merged_model.model.embed_tokens.weight


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families(tmp_path: Path, bases: dict[str, Path], family: str) -> None:
    run = finished_run(tmp_path, bases[family])
    facts = merge_run(run, dtype="float32", base=None, prompts=3, say=print)
    assert facts["agreement"]["candidates"]["own"]["top1"] == 1.0


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match")  # peft looks among modules alone
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_merged_into_the_files_of_their_base(tmp_path: Path, family: str) -> None:
    """One matrix an expert or one parameter of all, as the base's files have them; routers too."""
    base = save_mixture(tmp_path / "base", family)
    router = "mlp.router.weight" if family == "gpt_oss" else "mlp.gate.weight"
    targets = [router, "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = {"target_modules": ["q_proj"], "target_parameters": targets, "rank_pattern": {"experts.down_proj": 2}}
    run = finished_run(tmp_path, base, lora=lora, model={"attention": "eager"}, data={"packing": False})
    plan = merging.plan_merge(load_recipe(run / "recipe.yaml").recipe, run, torch.device("cpu"))
    merging.write_merged(plan, run / "merged", torch.float32, dequantized=False, say=print)
    assert load_file(run / "merged" / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(run / "adapter")).eval()
    torch.testing.assert_close(logits(plain(run / "merged")), logits(adapted), rtol=1e-4, atol=1e-4)
    assert (logits(adapted) - logits(plain(base))).abs().max() > 0.1
    if family == "mixtral":
        shutil.rmtree(run / "merged")  # which no verb wrote
        facts = merge_run(run, dtype=None, base=None, prompts=3, say=print)
        assert facts["agreement"]["candidates"]["own"]["top1"] == 1.0


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    "family",
    [
        each if each in ("gemma3", "llama4", "qwen2_5_vl") else pytest.param(each, marks=pytest.mark.slow)
        for each in FAMILIES
    ],
)
def test_the_text_part_is_merged_into_the_whole_multimodal_model(tmp_path: Path, family: str) -> None:
    """Whose files have other names than its classes (Gemma 3, Qwen 2.5 VL) and experts (Llama 4)."""
    base = save_multimodal(family, tmp_path / "base")
    (base / "preprocessor_config.json").write_text('{"size": 28}')
    run = finished_run(tmp_path, base, lora={"modules_to_save": ["embed_tokens"]})
    facts = merge_run(run, dtype=None, base=None, prompts=3, say=print)
    assert facts["agreement"]["candidates"]["own"]["largest_logit_difference"] < 1e-4
    folder = run / "merged"
    before, after = load_file(base / "model.safetensors"), load_file(folder / "model.safetensors")
    assert after.keys() - before.keys() <= {"language_model.lm_head.weight", "lm_head.weight"}  # of its own now
    assert all(torch.equal(after[name], before[name]) for name in before if "vision" in name or "visual" in name)
    whole, info = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    tuned = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), str(run / "adapter"))
    # In float64, for in float32 a delta rule (Qwen 3.5) rounds by more than this on some CPUs.
    merged, beside = (logits(model.eval().double()) for model in (whole, tuned))
    torch.testing.assert_close(merged, beside, rtol=1e-4, atol=1e-4)
    assert (folder / "preprocessor_config.json").is_file()


@pytest.mark.slow
def test_ranks_by_whole_paths_of_the_text_part_are_found_when_it_is_merged(tmp_path: Path) -> None:
    """The pattern is of the trained part's paths, and the base's files have others."""
    base = save_multimodal("gemma3", tmp_path / "base")
    ranks = {"^model.layers.0.self_attn.q_proj": 2, "^model.layers.1.mlp.up_proj": 6}
    scales = {"^model.layers.1.self_attn.v_proj": 3}
    run = finished_run(tmp_path, base, lora={"rank_pattern": ranks, "alpha_pattern": scales})
    facts = merge_run(run, dtype=None, base=None, prompts=3, say=print)
    assert facts["agreement"]["candidates"]["own"]["largest_logit_difference"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"target_modules": ["v_proj"]}], ids=str)
@pytest.mark.parametrize("tied", ["untied", "tied"])
def test_over_a_4_bit_base_the_weights_that_training_saw_are_merged(
    tmp_path: Path, bases: dict[str, Path], lora: dict[str, Any], tied: str
) -> None:
    run = finished_run(tmp_path, bases[tied], lora=lora, quantization=NF4)
    facts = merge_run(run, dtype=None, base=None, prompts=3, say=print)
    dequantized = facts["agreement"]["candidates"]["dequantized"]
    assert facts["base"] == "dequantized"
    assert dequantized["top1"] == 1.0
    assert not list(run.glob(".tmp-*"))
    assert "quantization_config" not in json.loads((run / "merged" / "config.json").read_text())
    chosen = merge_run(run, dtype=None, base="own", prompts=3, say=print)
    assert chosen["base"] == "own"
    own = chosen["agreement"]["candidates"]["own"]
    assert dequantized["kl"] < 1e-8 < 1e-5 < own["kl"] < facts["agreement"]["base"]["kl"]


@pytest.mark.thorough
@pytest.mark.sample(3)
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "glm4_moe"])
def test_experts_in_4_bits_are_merged_as_training_saw_them(tmp_path: Path, family: str) -> None:
    base = save_mixture(tmp_path / "base", family)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    sections: dict[str, Any] = {"model": {"dtype": "float32", "attention": "eager"}, "data": {"packing": False}}
    quantization = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
    run = finished_run(tmp_path, base, lora={"target_parameters": targets}, quantization=quantization, **sections)
    adapted = load_adapted(opened(run), torch.device("cpu"))
    facts = merge_run(run, dtype="float32", base=None, prompts=3, say=print)
    assert facts["agreement"]["candidates"]["dequantized"]["top1"] == 1.0
    torch.testing.assert_close(logits(plain(run / "merged")), logits(adapted), rtol=1e-4, atol=1e-4)
    assert (logits(adapted) - logits(plain(base))).abs().max() > 0.1


def test_over_an_int8_base(tmp_path: Path, bases: dict[str, Path]) -> None:
    run = finished_run(tmp_path, bases["untied"], quantization={"load_in_8bit": True})
    facts = merge_run(run, dtype=None, base=None, prompts=3, say=print)
    assert facts["base"] == "dequantized"
    assert facts["agreement"]["candidates"]["dequantized"]["kl"] < 1e-3  # LLM.int8() rounds its inputs too


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, bases: dict[str, Path]) -> Path:
    return finished_run(tmp_path_factory.mktemp("run"), bases["tied"])


@pytest.mark.slow
def test_rounded_weights_agree_less_and_get_a_note(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(run), "--dtype", "bfloat16", "--verify", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    rounded = facts["agreement"]["candidates"]["own"]
    assert 1e-9 < rounded["kl"] < facts["agreement"]["base"]["kl"] / 10
    assert json.loads((run / "merged" / "merge.json").read_text())["dtype"] == "bfloat16"
    config = json.loads((run / "merged" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    model = plain(run / "merged")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(run / "merged").chat_template
    worse = facts | {"agreement": facts["agreement"] | {"base": rounded}}
    assert "100% of what the adapter changed is lost in bfloat16" in describe_merge(worse)
    assert "is lost" not in describe_merge(facts)


def test_what_bfloat16_could_not_hold_is_added_in_float32(tmp_path: Path) -> None:
    """An adapter so small that a bfloat16 weight plus its change is the weight; `--dtype float32` keeps it."""
    folder = tmp_path / "base"
    tiny_model().bfloat16().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    run = finished_run(tmp_path, folder, move=1e-5, model={"dtype": "bfloat16"}, lora={"r": 4, "lora_alpha": 8})
    merge_run(run, dtype="float32", base=None, prompts=0, say=print)
    base, merged = load_file(folder / "model.safetensors"), load_file(run / "merged" / "model.safetensors")
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    layers = [name.removesuffix(".lora_A.weight") for name in adapter if name.endswith(".lora_A.weight")]
    assert len(layers) == 14
    for layer in layers:
        change = 2.0 * adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
        name = f"{layer.removeprefix('base_model.model.')}.weight"
        weight = base[name].float()
        unchanged = (weight + change).bfloat16() == base[name]
        assert unchanged.float().mean() > 0.95, "the change is too large for this test"
        torch.testing.assert_close(merged[name] - weight, change, rtol=0, atol=1e-7)
        assert change.abs().max() > 5e-6


def test_the_verb_shows_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(run), "--verify", "2"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"[\d,]+ answer tokens of 2 held-out documents, computed in float32:\n", output)
    assert re.search(r"^merged +100\.00% +\d\.\d\de-\d\d +\d\.\d\de-\d\d +\d\.\d{4}$", output, re.MULTILINE)
    assert re.search(r"^the base +\d+\.\d\d% ", output, re.MULTILINE)
    assert main(["merge", str(run), "--verify", "0"]) == 0
    assert "not compared with the adapter" in capsys.readouterr().out


@pytest.mark.slow
def test_many_shards_are_one_model(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merge_run(run, dtype=None, base=None, prompts=0, say=print)
    one_shard = plain(run / "merged").state_dict()
    monkeypatch.setattr(merging, "SHARD_BYTES", 100_000)
    facts = merge_run(run, dtype=None, base=None, prompts=2, say=print)
    files = sorted((run / "merged").glob("*.safetensors"))
    assert facts["files"] == len(files) > 3
    assert not (run / "merged" / "model.safetensors").exists()
    sizes = []
    for path in files:
        with safe_open(path, framework="pt") as file:
            sizes.append(sum(file.get_tensor(name).nbytes for name in file.keys()))  # noqa: SIM118
    index = json.loads((run / "merged" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    embeddings = 512 * 64 * 4  # larger than a shard may be: alone in its file
    assert sorted(sizes)[-1] == embeddings
    assert sorted(sizes)[-2] <= 100_000
    again = plain(run / "merged").state_dict()
    assert one_shard.keys() == again.keys()
    assert all(one_shard[name].equal(again[name]) for name in one_shard)


def test_what_cannot_be_merged_is_one_line(tmp_path: Path, bases: dict[str, Path], run: Path) -> None:
    def refused(folder: Path, words: str, **options: Any) -> None:
        with pytest.raises(FinetuneError, match=words) as caught:
            merge_run(folder, **({"dtype": None, "base": None, "prompts": 0, "say": print} | options))
        assert "\n" not in str(caught.value)

    refused(tmp_path, "not a run folder")
    full = finished_run(tmp_path / "full", bases["untied"], lora=None)
    refused(full, "is the whole model already")
    refused(run, "was not quantised", base="dequantized")
    other = finished_run(tmp_path / "other", save_tiny(tmp_path / "small"))
    tiny_model(hidden_size=32, intermediate_size=64).save_pretrained(tmp_path / "small")
    refused(other, "does not fit this base")
    tiny_model("mistral", num_hidden_layers=1).save_pretrained(tmp_path / "small")
    refused(other, "changes 7 tensors that the base's files do not have, first model.layers.1")
    (tmp_path / "small" / "model.safetensors").write_bytes(b"torn")
    refused(other, "is not a complete safetensors file")
    (tmp_path / "small" / "model.safetensors").unlink()
    refused(other, "has no model.safetensors; merging needs safetensors")
    assert not list(other.glob(".tmp-*"))
    assert not (other / "merged").exists()


@pytest.mark.parametrize("kind", ["file", "pipe", "link", "lost link"])
def test_a_target_that_is_no_folder_is_refused_before_any_work(run: Path, kind: str) -> None:
    target, said = run / "merged", []
    shutil.rmtree(target, ignore_errors=True)  # of another test
    match kind:
        case "file":
            target.write_text("mine")
        case "pipe":
            os.mkfifo(target)
        case _:
            target.symlink_to(run if kind == "link" else run / "nowhere")
    with pytest.raises(FinetuneError, match="merged") as caught:
        merge_run(run, dtype=None, base=None, prompts=0, say=said.append)
    assert "\n" not in str(caught.value)
    assert said == []
    target.unlink()


def test_merged_is_replaced_if_it_is_what_merge_wrote(tmp_path: Path, bases: dict[str, Path]) -> None:
    run = finished_run(tmp_path, bases["tied"])
    merged = run / "merged"

    def refused(words: str) -> None:
        before = {path: path.read_bytes() for path in merged.rglob("*") if path.is_file()}
        with pytest.raises(FinetuneError, match=words):
            merge_run(run, dtype=None, base=None, prompts=0)
        assert before == {path: path.read_bytes() for path in merged.rglob("*") if path.is_file()}

    merged.mkdir()
    (merged / "notes.txt").write_text("mine", "utf-8")
    refused(r"merged: is there and is not an earlier export; move .*merged to another place$")
    (merged / "notes.txt").unlink()
    merge_run(run, dtype=None, base=None, prompts=0)
    merge_run(run, dtype="bfloat16", base=None, prompts=0)
    (merged / "notes.txt").write_text("mine", "utf-8")
    refused(r"merged: holds notes\.txt, which no export wrote; move it, or move .*merged to another place$")
    (merged / "notes.txt").unlink()
    (merged / "generation_config.json").write_text("{}", "utf-8")
    refused(r"generation_config\.json: was changed after the export")
    record = json.loads((merged / "merge.json").read_text("utf-8"))
    del record["written"]
    (merged / "merge.json").write_text(json.dumps(record), "utf-8")
    refused(r"its merge\.json does not list what was exported; delete the folder, or move ")


def test_agreement_by_hand() -> None:
    expected = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    actual = torch.tensor([[0.0, 0.0], [0.5, 1.0]])
    sums = Agreement()
    sums.add(expected, actual, torch.tensor([0, 1]))
    figures = sums.as_json()
    p, q = expected.softmax(-1), actual.softmax(-1)
    assert figures["kl"] == pytest.approx(float((p * (p / q).log()).sum(-1).mean()))
    assert figures["loss"] == pytest.approx(float(-(q[0, 0].log() + q[1, 1].log()) / 2))
    assert figures["largest_logit_difference"] == 2.0
    assert figures["top1"] == 1.0
    sums.add(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    assert sums.as_json()["top1"] == pytest.approx(2 / 3)


def test_questions_are_spread_over_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    ids, labels = np.arange(20), np.full(20, -100)
    labels[5:15] = ids[5:15]
    document = agreement.compared_document(ids, labels, 4)
    assert document.positions.tolist() == [4, 7, 10, 13]  # the first and the last answer token among them
    assert document.targets.tolist() == [5, 8, 11, 14]
    assert document.ids.tolist() == [list(range(14))]
    assert agreement.compared_document(ids, labels, 100).positions.tolist() == list(range(4, 14))


def test_a_parameter_that_moves_while_its_module_computes_is_float32() -> None:
    """As peft's ParamWrapper does it for `target_parameters`: it registers a parametrization around the call."""

    class Half(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            nn.utils.parametrize.register_parametrization(self.base, "weight", Half(), unsafe=True)
            try:
                output: torch.Tensor = self.base(hidden)
            finally:
                nn.utils.parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)
            return output

    model, hidden = Wrapper(), torch.randn(2, 4)
    expected = hidden @ (2 * model.base.weight.detach().float()).T
    with computing_in_float32(model):
        assert torch.equal(model(hidden), expected)
    assert model.base.weight.dtype == torch.bfloat16


def test_layers_compute_in_float32_and_are_as_before_afterwards() -> None:
    model = tiny_model().bfloat16().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wide = tiny_model().bfloat16().float().eval()
    with computing_in_float32(model):
        actual = logits(model)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(actual, logits(wide))
    assert not torch.equal(logits(model).float(), actual)
    after = model.state_dict()
    assert all(value.equal(after[name]) and value.dtype == after[name].dtype for name, value in before.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sections", "layers"),
    [
        ("own", {}, 3),
        ("own", {"lora": {"use_dora": True}}, 5),
        ("dequantized", {"quantization": NF4}, 3.5),
    ],
    ids=["lora", "dora", "nf4"],
)
def test_one_shard_and_one_layer_are_held(tmp_path: Path, kind: str, sections: dict[str, Any], layers: float) -> None:
    """`layers` counts a layer's float32 weight: the frozen one, the update, their sum, and peft's own copies."""
    base = save_tiny(
        tmp_path / "base",
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=6,
    )
    run = finished_run(tmp_path, base, **sections)
    # glibc keeps what is freed of blocks up to a size that grows; so it gives all of them back.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "PYTHONPATH": str(ROOT)}
    words = [
        sys.executable,
        str(ROOT / "tests" / "support" / "memory" / "merge_memory.py"),
        str(run),
        "float32",
        "40000000",
        kind,
    ]
    process = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=300)
    sizes = json.loads(process.stdout)
    print(sizes)
    assert sizes["model"] > 8 * sizes["shard"]
    assert sizes["held"] < sizes["shard"] + layers * sizes["layer"]
    assert sizes["held"] > sizes["shard"] / 2  # else the watching saw nothing


@pytest.mark.thorough
def test_a_base_in_many_files_and_its_config_as_it_stands(tmp_path: Path, bases: dict[str, Path]) -> None:
    run = finished_run(tmp_path, bases["untied"])
    merge_run(run, dtype="float16", base=None, prompts=0, say=print)
    one_file = plain(run / "merged").state_dict()
    shutil.copytree(bases["untied"], tmp_path / "many")
    (tmp_path / "many" / "model.safetensors").unlink()
    tiny_model().save_pretrained(tmp_path / "many", max_shard_size="100KB")
    config = json.loads((tmp_path / "many" / "config.json").read_text())
    del config["dtype"]
    old = config | {"torch_dtype": "float32", "rope_theta_of_old": 1, "_name_or_path": "acme/base"}
    (tmp_path / "many" / "config.json").write_text(json.dumps(old))
    recipe = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(recipe.replace(str(bases["untied"]), str(tmp_path / "many")))
    merge_run(run, dtype="float16", base=None, prompts=0, say=print)
    many = plain(run / "merged").state_dict()
    assert all(value.equal(many[name]) for name, value in one_file.items())
    written = json.loads((run / "merged" / "config.json").read_text())
    # Readers of old files look for the old name; unknown keys stay.
    assert written == config | {"torch_dtype": "float16", "rope_theta_of_old": 1}
    (tmp_path / "many" / "config.json").write_text(json.dumps(old | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(FinetuneError, match="is stored quantised"):
        merge_run(run, dtype=None, base=None, prompts=0, say=print)


@pytest.mark.slow
def test_a_base_on_the_hub_is_fetched(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a fresh process, because the client reads HF_ENDPOINT when it is imported."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    run = finished_run(tmp_path, tiny_llama)
    recipe = (run / "recipe.yaml").read_text()
    with running_hub() as hub:
        hub.add("me/tiny", private=True)
        HfApi(endpoint=hub.url, token=TOKEN).upload_folder(repo_id="me/tiny", folder_path=tiny_llama)
        (run / "recipe.yaml").write_text(recipe.replace(str(tiny_llama), "me/tiny"))
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(ROOT),
        }
        words = [sys.executable, "-m", "finetune.cli.main", "merge", str(run), "--verify", "2", "--json"]
        process = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
        assert process.returncode == 0, process.stdout + process.stderr
        assert json.loads(process.stdout)["agreement"]["candidates"]["own"]["top1"] == 1.0
    del environment["HF_ENDPOINT"]
    again = subprocess.run([*words[:-3], "--verify", "0"], env=environment | {"HF_HUB_OFFLINE": "1"}, timeout=200)
    assert again.returncode == 0  # from the cache


@pytest.mark.parametrize(
    ("strategy", "words"),
    [("ddp", "CUDA_VISIBLE_DEVICES= takes"), ("fsdp2", "--processes 2 spreads it over GPUs; CUDA_")],
)
def test_a_full_gpu_is_one_line(strategy: str, words: str, tmp_path: Path, tiny_llama: Path) -> None:
    run = opened(finished_run(tmp_path, tiny_llama, accelerate_config=strategy))
    words = f"does not fit into the memory of cuda:0; {words}"
    with pytest.raises(DoesNotFit, match=words), fitting(torch.device("cuda:0"), run):
        raise torch.OutOfMemoryError("CUDA out of memory")
