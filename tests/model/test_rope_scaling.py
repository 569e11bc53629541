"""model.rope_scaling: the loss of plain transformers with the same configuration, exports, servers and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.errors import FinetuneError
from finetune.model.build import build_model, configuration
from finetune.model.rope_scaling import scaled_rope
from finetune.run_folder.base_parts import own_config
from finetune.training.batch_notes import positions_of
from tests.support.models.tiny import flat_batch, save_tiny
from tests.support.runs.recipes import least_recipe

CPU = torch.device("cpu")
TRAINED = 64  # positions of the tiny base; its heads rotate 8 pairs
LENGTHS = (150, 40)
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "yarn of more keys": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        **{"attention_factor": 1.2, "beta_fast": 16.0, "beta_slow": 2.0},
    },
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {
        **{"rope_type": "longrope", "factor": 4.0},
        **{"short_factor": [1.0] * 8, "long_factor": [1.0 + n / 2 for n in range(8)]},
    },
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"), max_position_embeddings=TRAINED)


def librarys(base: Path, scaling: dict[str, Any]) -> Any:
    """Plain transformers, with the recipe's keys written into config.json by hand."""
    config = AutoConfig.from_pretrained(base)
    rope: dict[str, Any] = {"rope_theta": config.rope_parameters["rope_theta"]} | scaling
    if scaling["rope_type"] in ("yarn", "llama3", "longrope"):
        rope.setdefault("original_max_position_embeddings", TRAINED)
        config.max_position_embeddings = 4 * TRAINED
    config.rope_parameters = rope
    return AutoModelForCausalLM.from_pretrained(base, config=config, attn_implementation="eager", dtype=torch.float32)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", SCALINGS)
def test_logits_and_loss_of_the_library(name: str, base: Path) -> None:
    scaling, batch = SCALINGS[name], flat_batch(LENGTHS)
    without, scaled = (
        build_model(least_recipe(base, model={"dtype": "float32", "rope_scaling": each}, lora=None), CPU).eval()
        for each in (None, scaling)
    )
    plain = librarys(base, scaling).eval()
    asked = {key: value for key, value in batch.items() if key not in ("shift_labels", "supervised")}
    with torch.no_grad():
        expected = torch.cat([plain(input_ids=ids).logits for ids in batch["input_ids"].split(LENGTHS, 1)], 1)
        assert (scaled(**asked).logits - expected).abs().max() < 1e-5
        assert (without(**asked).logits - expected).abs().max() > 1e-4, "the scaling changes nothing"
        summed = F.cross_entropy(expected[0], batch["shift_labels"][0], reduction="sum")
        assert float(scaled(**batch)) == pytest.approx(float(summed), rel=1e-6)


def test_the_bases_own_scaling_stays(tmp_path: Path) -> None:
    """Llama 3.1's. Another one takes its place, with its frequency."""
    own = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    own |= {"original_max_position_embeddings": 32, "rope_theta": 5e5}
    base = save_tiny(tmp_path, max_position_embeddings=256, rope_parameters=own)
    assert configuration(least_recipe(base)).rope_parameters == own
    assert positions_of(least_recipe(base)) == 256
    recipe = least_recipe(base, model={"rope_scaling": {"rope_type": "yarn", "factor": 16}})
    config = configuration(recipe)
    assert config.rope_parameters == {
        **{"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 32, "rope_theta": 5e5}
    }
    assert (config.max_position_embeddings, positions_of(recipe), positions_of(recipe, config)) == (512, 512, 512)
    for kind in ("linear", "dynamic"):  # which state the base's own number
        recipe = least_recipe(base, model={"rope_scaling": {"rope_type": kind, "factor": 16}})
        assert positions_of(recipe, configuration(recipe)) == positions_of(recipe) == 4096


@pytest.mark.parametrize(
    ("kind", "stated", "reached"), [("linear", 100, 250), ("dynamic", 100, 250), ("yarn", 250, 250)]
)
def test_stated_and_reached_positions(kind: str, stated: int, reached: int) -> None:
    found = scaled_rope({"max_position_embeddings": 100, "rope_theta": 1e4}, {"rope_type": kind, "factor": 2.5})
    assert found[1:] == (stated, reached)


@pytest.mark.parametrize("spelling", ["transformers 5", "earlier"])
def test_an_export_has_it_in_the_bases_spelling(spelling: str, base: Path, tmp_path: Path) -> None:
    own = json.loads((base / "config.json").read_text("utf-8"))
    if spelling == "earlier":
        own |= {"rope_theta": own.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    found = own_config(own, dtype=torch.float32, unties=False, rope_scaling=SCALINGS["yarn"])
    (tmp_path / "config.json").write_text(json.dumps(found), "utf-8")
    assert ("rope_parameters" in found) == (spelling == "transformers 5")
    read, expected = (
        AutoConfig.from_pretrained(tmp_path),
        configuration(least_recipe(base, model={"rope_scaling": SCALINGS["yarn"]})),
    )
    assert read.rope_parameters == expected.rope_parameters
    assert read.max_position_embeddings == expected.max_position_embeddings == 4 * TRAINED


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"factor": 4.0}, "rope_type is missing; write one of linear, dynamic, yarn, llama3, longrope"),
        ({"rope_type": "ntk", "factor": 2.0}, "rope_type is ntk; write one of linear"),
        ({"rope_type": "yarn"}, "factor is missing; write wanted over trained positions, 4.0 for example"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5; write wanted over"),
        ({"rope_type": "linear", "factor": True}, "factor is true; write wanted over"),
    ],
)
def test_kinds_and_factors_that_are_refused(scaling: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        least_recipe(model={"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "yarn", "factor": 2, "beta_quick": 3}, "Unrecognized keys .*beta_quick"),
        ({"rope_type": "llama3", "factor": 2}, "Missing required keys .*_freq_factor"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}, "beta_fast field must be a float"),
        (
            {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 3},
            "long_factor field must have length 8, got 3",
        ),
    ],
)
def test_keys_that_transformers_does_not_take(scaling: dict[str, Any], words: str, base: Path) -> None:
    """It warns, and goes on."""
    with pytest.raises(FinetuneError, match=rf"^model.rope_scaling: .*{words}") as refusal:
        configuration(least_recipe(base, model={"rope_scaling": scaling}))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("family", "words"), [("gpt2", "no"), ("gemma3_text", "several kinds of")])
def test_models_without_one_kind_of_positions(family: str, words: str, tmp_path: Path) -> None:
    from tests.support.models.architectures import save_shaken

    save_shaken(family, tmp_path)
    with pytest.raises(
        FinetuneError, match=f"^model.rope_scaling: {family} has {words} rotary positions; leave it out"
    ):
        configuration(least_recipe(tmp_path, model={"rope_scaling": SCALINGS["yarn"]}))
