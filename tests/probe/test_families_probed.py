"""Families of the installed transformers by their default configurations, of billions of weights: the probe says right
where a computation of the tests' own finds a tiny model of the family right, and refuses the others. None is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from finetune.errors import FinetuneError
from finetune.probe.probe import probe
from tests.support.models.architectures import Way, outcomes
from tests.support.runs.recipes import least_recipe

QUICK = {("llama", False), ("gemma3_text", True), ("gpt_oss", True)}  # right unpacked and packed, refused
FAMILIES = (
    "llama mistral qwen3 gemma3_text gemma2 phi3 olmo2 mixtral gpt_oss qwen3_next lfm2 falcon_h1 qwen3_moe glm4 granite"
).split()

WHOLE = {"lfm2": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 8}}  # the default has no convolution


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "packing"),
    [
        pytest.param(
            name,
            packing,
            id=f"{name}-{'packed' if packing else 'unpacked'}",
            marks=[] if (name, packing) in QUICK else pytest.mark.slow,
        )
        for name in FAMILIES
        for packing in (True, False)
    ],
)
def test_right_or_refused(name: str, packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    way = Way("auto", packing)
    computed = outcomes(name, tmp_path, [way])[way]
    assert computed.word in ("right", "refused")
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_text(
        json.dumps(CONFIG_MAPPING[name](**WHOLE.get(name, {})).to_dict(), default=str), "utf-8"
    )
    recipe = least_recipe(whole, lora=None, data={"packing": packing}, training={"per_device_batch_size": 2})
    if computed.word == "refused":
        with pytest.raises(FinetuneError) as raised:
            probe(recipe)
        assert "\n" not in str(raised.value)
        return
    found = probe(recipe).facts
    assert max(off for each in found["found"].values() for off in (each["loss"], each["gradients"])) <= 1e-5
    assert found["small"]["parameters"] <= 8_000_000
