"""Exports in the spelling of their base, with its code and with its tensors that transformers does not load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from finetune.finished_run import finished_run as open_run
from finetune.hand_over.merge import merge_run
from finetune.run_folder.base_parts import own_config, untrained_in_words
from tests.support.models.architectures import save_shaken
from tests.support.models.earlier_release import BASES, save_published
from tests.support.models.multimodal import save_multimodal
from tests.support.models.own_model import separate_modules
from tests.support.models.ties import changed_base, rewrite
from tests.support.models.tiny import save_tiny, tiny_tokenizer
from tests.support.runs.finished import finished_run

EAGER: dict[str, Any] = {"model": {"attention": "eager"}, "data": {"packing": False}}


def settings_in(folder: Path, name: str = "config.json") -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / name).read_text("utf-8"))
    return read


def without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in names}


@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize("name", BASES)
def test_every_product_keeps_the_keys_of_a_base_written_by_transformers_4(name: str, tmp_path: Path) -> None:
    """Nothing changes but the weights' format: neither rotary numbers nor use_cache nor keys that nobody knows."""
    base = save_published(tmp_path / "base", name)
    full = finished_run(tmp_path / "full", base, **EAGER, lora=None) / "model"
    lora = finished_run(tmp_path / "lora", base, **EAGER)
    merge_run(lora, dtype="bfloat16", base=None, prompts=0, say=print)
    written = settings_in(base)
    assert settings_in(full) == written | {"torch_dtype": "float32"}
    assert settings_in(lora / "merged") == written | {"torch_dtype": "bfloat16"}
    for folder in (full, lora / "adapter", lora / "merged"):
        assert settings_in(folder, "tokenizer_config.json") == settings_in(base, "tokenizer_config.json")
        assert settings_in(folder, "special_tokens_map.json") == settings_in(base, "special_tokens_map.json")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.backend_tokenizer.to_str() == AutoTokenizer.from_pretrained(base).backend_tokenizer.to_str()
    for folder in (full, lora / "merged"):
        assert settings_in(folder, "generation_config.json") == settings_in(base, "generation_config.json")


def test_a_base_written_by_transformers_5_stays_so(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", "qwen3")
    run = finished_run(tmp_path, base, lora=None)
    assert settings_in(run / "model") == settings_in(base)
    assert settings_in(run / "model", "tokenizer_config.json") == settings_in(base, "tokenizer_config.json")


@pytest.mark.thorough
def test_new_tokens_are_stated_where_the_base_states_its_own(tmp_path: Path) -> None:
    base = save_published(tmp_path / "base", "llama 3.1")
    (base / "added_tokens.json").write_text('{"<|im_end|>": 2}')
    model = {"add_tokens": ["<date>"], "add_special_tokens": ["<end>"]}
    lora = finished_run(tmp_path / "lora", base, model=model)
    full = finished_run(tmp_path / "full", base, model=model, lora=None)
    merge_run(lora, dtype=None, base=None, prompts=0, say=print)
    for folder in (lora / "merged", full / "model"):
        read = AutoTokenizer.from_pretrained(folder)
        first, second = read.convert_tokens_to_ids(["<date>", "<end>"])
        decoder = settings_in(folder, "tokenizer_config.json")["added_tokens_decoder"]
        assert (decoder[str(first)]["content"], decoder[str(first)]["special"]) == ("<date>", False)
        assert (decoder[str(second)]["content"], decoder[str(second)]["special"]) == ("<end>", True)
        assert settings_in(folder, "added_tokens.json") == {"<|im_end|>": 2, "<date>": first, "<end>": second}
        assert settings_in(folder)["vocab_size"] == 512  # there was room


def test_a_class_that_needs_config_json_is_replaced_where_there_is_none(tmp_path: Path) -> None:
    """Phi 3's configuration says that the named class is wrong. The adapter's folder has no configuration."""
    base = save_published(tmp_path / "base", "longrope")
    settings = settings_in(base, "tokenizer_config.json") | {"tokenizer_class": "GemmaTokenizerFast"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = AutoTokenizer.from_pretrained(base)
    run = finished_run(tmp_path, base, **EAGER)
    adapter = AutoTokenizer.from_pretrained(run / "adapter")
    assert adapter("it's 12 boats").input_ids == expected("it's 12 boats").input_ids
    assert settings_in(run / "adapter", "tokenizer_config.json")["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_base_without_tokenizer_settings_gets_names_that_both_releases_read(tmp_path: Path) -> None:
    base = save_published(tmp_path / "base", "llama 3.1")
    (base / "tokenizer_config.json").unlink()
    run = finished_run(tmp_path, base, lora={"r": 4}, data=TEXTS)
    settings = settings_in(run / "adapter", "tokenizer_config.json")
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not settings.keys() & {"is_local", "local_files_only", "extra_special_tokens", "backend"}


TEXTS = {"chat_template": None}


def test_loading_arguments_in_a_bases_settings_go_no_further(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    settings = settings_in(base, "tokenizer_config.json")
    left_over = {"is_local": True, "local_files_only": True}
    (base / "tokenizer_config.json").write_text(json.dumps(settings | left_over))
    run = finished_run(tmp_path, base)
    assert settings_in(run / "adapter", "tokenizer_config.json") == settings


def test_values_that_training_changed() -> None:
    base = {
        "torch_dtype": "bfloat16",
        "vocab_size": 10,
        "_name_or_path": "x",
        "time_step_limit": [0.0, float("inf")],
        "text_config": {"vocab_size": 10, "torch_dtype": "bfloat16", "tie_word_embeddings": True},
        "vision_config": {"torch_dtype": None, "vocab_size": 3},
    }
    assert own_config(base, dtype=torch.float16, unties=True, vocabulary=12) == {
        "torch_dtype": "float16",
        "vocab_size": 12,
        "time_step_limit": [0.0, float("inf")],
        "tie_word_embeddings": False,
        "text_config": {"vocab_size": 12, "torch_dtype": "float16", "tie_word_embeddings": False},
        "vision_config": {"torch_dtype": None, "vocab_size": 3},
    }
    assert own_config({}, dtype=torch.float16, unties=False) == {"torch_dtype": "float16"}
    of_5 = {"transformers_version": "5.0.0"}
    assert own_config(of_5, dtype=torch.float16, unties=False) == of_5 | {"dtype": "float16"}
    assert own_config({"dtype": None, "rope_scaling": None}, dtype=torch.float16, unties=False) == {
        "dtype": "float16",
        "rope_scaling": None,
    }


def test_two_matrices_under_a_configuration_that_ties_them(tmp_path: Path) -> None:
    base = changed_base(tmp_path / "base", tied=True)
    run = finished_run(tmp_path, base, lora=None)
    assert settings_in(run / "model") == settings_in(base) | {"tie_word_embeddings": False}


# ---- tensors that transformers does not load


def logits(folder: Path) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        result: torch.Tensor = model.eval()(torch.arange(3, 43)[None], use_cache=False).logits
    return result


def add_head(tensors: dict[str, torch.Tensor], prefix: str = "mtp.") -> None:
    """A head's tensors in several number formats."""
    draw = torch.Generator().manual_seed(1)
    tensors[f"{prefix}fc.weight"] = torch.randn(8, 16, generator=draw).bfloat16()
    tensors[f"{prefix}layers.0.norm.weight"] = torch.randn(8, generator=draw)
    tensors[f"{prefix}embed_tokens.weight"] = torch.randn(512, 8, generator=draw).half()
    tensors[f"{prefix}step"] = torch.arange(3)


def copied(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        read = load_file(file)
        assert not read.keys() & tensors.keys()
        tensors |= read
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        assert settings_in(folder, index.name)["weight_map"].keys() == tensors.keys()
        size = settings_in(folder, index.name)["metadata"]["total_size"]
        assert size == sum(tensor.nbytes for tensor in tensors.values())
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one)


def shake_corrections(tensors: dict[str, torch.Tensor]) -> None:
    """A router's correction of scores is a buffer, so it is among no trained weights."""
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(2))


MTP = {  # family -> how its maker's files name a head
    "qwen3_next": "mtp.",
    "deepseek_v3": "model.layers.61.",
    "glm4_moe": "model.layers.46.",
    "exaone_moe": "mtp.",
    "ernie4_5_moe": "model.mtp_block.",
}


@pytest.mark.thorough
@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "many files"])
def test_a_head_that_transformers_passes_over_is_in_every_whole_export(tmp_path: Path, sharded: bool) -> None:
    base = save_multimodal("qwen3_5", tmp_path / "base")
    rewrite(base, add_head)
    head = copied(base, "mtp.")
    assert len(head) == 4
    if sharded:
        tensors = load_file(base / "model.safetensors")
        (base / "model.safetensors").unlink()
        names = sorted(tensors)
        parts = [names[::3], names[1::3], names[2::3]]
        places = {name: f"model-{n + 1:05d}-of-00003.safetensors" for n, part in enumerate(parts) for name in part}
        for number, part in enumerate(parts, start=1):
            save_file({name: tensors[name] for name in part}, base / f"model-{number:05d}-of-00003.safetensors")
        (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    run = finished_run(tmp_path / "full", base, **EAGER, lora=None)
    assert_same_bits(copied(run / "model", "mtp."), head)
    assert not copied(run / "model", "model.visual.")
    logits(run / "model")
    section = open_run(run).recipe.model
    (line,) = untrained_in_words(section)
    assert line.startswith("copied from the base as they are: 4 tensors that transformers does not load, first mtp.")


@pytest.mark.thorough
def test_merging_copies_it_bit_for_bit_in_any_format(tmp_path: Path) -> None:
    base = save_multimodal("qwen3_5", tmp_path / "base")
    rewrite(base, add_head)
    run = finished_run(tmp_path, base, **EAGER)
    said: list[str] = []
    merge_run(run, dtype="bfloat16", base=None, prompts=0, say=said.append)
    assert_same_bits(copied(run / "merged", "mtp."), copied(base, "mtp."))
    assert any("4 tensors that transformers does not load" in line for line in said)


@pytest.mark.slow
@pytest.mark.parametrize("family", MTP)
def test_heads_of_other_families(family: str, tmp_path: Path) -> None:
    base, prefix = tmp_path / "base", MTP[family]
    save_shaken(family, base)
    tiny_tokenizer().save_pretrained(base)
    before = logits(rewrite(base, shake_corrections))
    rewrite(base, lambda tensors: add_head(tensors, prefix))
    run = finished_run(tmp_path, base, **EAGER, lora=None, move=0.0)
    assert_same_bits(copied(run / "model", prefix), copied(base, prefix))
    assert torch.equal(logits(run / "model"), before)


def test_a_base_that_is_loaded_whole_has_one_file_and_no_line(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", tie_word_embeddings=True)
    run = finished_run(tmp_path, base, lora=None)
    assert not (run / "model" / "model.safetensors.index.json").exists()
    assert not list(untrained_in_words(open_run(run).recipe.model))


# ---- code that comes with the base


CONFIGURATION = """
from transformers import LlamaConfig
from .constants import MODEL_TYPE
class TinyConfig(LlamaConfig):
    model_type = MODEL_TYPE
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_tiny import TinyConfig
class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig
"""


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base with three modules of its own, one of which only the others import."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FINETUNE_TRUST_REMOTE_CODE", "1")
    separate_modules(monkeypatch, tmp_path / "modules")
    base = save_tiny(tmp_path / "base")
    names = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    changes = {"model_type": "tiny_custom", "architectures": ["TinyForCausalLM"], "auto_map": names}
    (base / "config.json").write_text(json.dumps(settings_in(base) | changes))
    (base / "configuration_tiny.py").write_text(CONFIGURATION)
    (base / "modeling_tiny.py").write_text(MODELING)
    (base / "constants.py").write_text("MODEL_TYPE = 'tiny_custom'\n")
    (base / "train_me.py").write_text("raise SystemExit\n")
    return base


@pytest.mark.thorough
def test_a_base_with_code_of_its_own_merges_and_exports_with_it(tmp_path: Path, own_code: Path) -> None:
    model = {"trust_remote_code": True}
    lora = finished_run(tmp_path / "lora", own_code, **EAGER | {"model": EAGER["model"] | model})
    full = finished_run(tmp_path / "full", own_code, **EAGER | {"model": EAGER["model"] | model}, lora=None)
    facts = merge_run(lora, dtype=None, base=None, prompts=2, say=print)
    assert facts["agreement"]["candidates"]["own"]["top1"] == 1.0
    for folder in (lora / "merged", full / "model"):
        assert settings_in(folder)["auto_map"] == settings_in(own_code)["auto_map"]
        assert {path.name for path in folder.glob("*.py")} == {
            "configuration_tiny.py",
            "modeling_tiny.py",
            "constants.py",
        }
        alone = shutil.copytree(folder, tmp_path / "elsewhere" / folder.name)
        config = AutoConfig.from_pretrained(alone, trust_remote_code=True)
        assert type(config).__name__ == "TinyConfig"
        assert AutoModelForCausalLM.from_pretrained(alone, trust_remote_code=True)
    assert open_run(lora).tokenizer
