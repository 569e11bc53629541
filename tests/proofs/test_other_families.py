"""Families that need more than plain attention, trained with adapters: one curve, resumed, and what is handed over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from finetune.train import main
from tests.support.models.architectures import config_of
from tests.support.models.tiny import tiny_tokenizer, write_chats
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import SPLITS, TOLERANCE, receipt_of, skip_where_missing, worst
from tests.support.runs.exports import contents
from tests.support.runs.one_curve import (
    LENGTHS,
    LORA,
    MAX_GRAD_NORM,
    SEED,
    STEPS,
    WEIGHT_DECAY,
    checkpointed,
    curve_of,
    documents,
    learning_rates,
    write_curve_recipe,
)
from tests.support.runs.reference import reference_run

FAMILIES = "gpt_oss gemma2 cohere llama4_text qwen3_5_text qwen3_next lfm2 falcon_h1 granitemoehybrid".split()
QUICK = ("lfm2",)
# Under ZeRO-3 those that carry something which a row's documents must not share: ranks' rows have different numbers of
# them, and weights are gathered by all ranks at once.
RANKS = {"ddp": FAMILIES, "fsdp2": FAMILIES, "zero3": ["gpt_oss", "qwen3_next", "lfm2"]}
TARGETS = ["q_proj", "v_proj", "o_proj", "in_proj", "in_proj_qkv", "in_proj_qkvz", "down_proj", "w1"]
OTHER_TARGETS = {
    # Its mixers' in_proj has gradients near the rounding, which AdamW blows up.
    "granitemoehybrid": ["out_proj", "input_linear", "output_linear"],
    # peft takes its shared expert's down_proj for the experts'.
    "qwen3_next": ["q_proj", "v_proj", "o_proj", "in_proj_qkvz", "out_proj"],
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", LENGTHS)


def save_model(family: str, folder: Path) -> Path:
    config = config_of(family)
    config.vocab_size, config.max_position_embeddings = 512, 2048
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def lora_of(model: Path) -> dict[str, Any]:
    """Those of the names that the model has, as a recipe must."""
    base = AutoModelForCausalLM.from_pretrained(model)
    names = OTHER_TARGETS.get(base.config.model_type, TARGETS)
    linear = {path.rpartition(".")[2] for path, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    return LORA | {"target_modules": [name for name in names if name in linear]}


def expected_curve(model: Path, chats: Path, lora: dict[str, Any]) -> list[Any]:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(SEED)
    return reference_run(
        get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **lora)),
        [documents(chats, model)] * STEPS,
        learning_rates=learning_rates("lora"),
        max_grad_norm=MAX_GRAD_NORM,
        weight_decay=WEIGHT_DECAY,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_one_process(family: str, chats: Path, tmp_path: Path) -> None:
    """The curve is that of one document at a time; a resumed run is bitwise the run; plain peft loads the adapter."""
    model = save_model(family, tmp_path / "model")
    lora = lora_of(model)
    recipe = write_curve_recipe(tmp_path, model, chats, "lora", SPLITS["packed"], {"lora": lora}, save_steps=3)
    assert main([str(recipe)]) == 0
    assert worst(curve_of(recipe), expected_curve(model, chats, lora)) <= TOLERANCE
    run, trained = tmp_path / "run", checkpointed(tmp_path / "run")
    before = contents(run / "adapter")
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    state = json.loads((run / "run_state.json").read_text("utf-8")) | {"state": "running"}
    (run / "run_state.json").write_text(json.dumps(state), "utf-8")
    assert main([str(recipe)]) == 0
    assert contents(run / "adapter") == before
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, run / "adapter", is_trainable=True)
    loaded = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name].detach(), trained[name]) for name in trained)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", RANKS)
def test_two_ranks(strategy: str, chats: Path, tmp_path: Path) -> None:
    skip_where_missing(strategy)
    recipes, expected = [], []
    for family in RANKS[strategy]:
        model = save_model(family, tmp_path / family / "model")
        lora = lora_of(model)
        recipes.append(write_curve_recipe(tmp_path / family, model, chats, "lora", SPLITS["packed"], {"lora": lora}))
        expected.append(expected_curve(model, chats, lora))
    words = [f"accelerate_config={strategy}", "training.activation_checkpointing=true"]
    assert launch(recipes, ranks=2, words=words, timeout=600) == [0] * len(recipes)
    for recipe, curve in zip(recipes, expected, strict=True):
        assert receipt_of(recipe)["world_size"] == 2
        assert worst(curve_of(recipe), curve) <= TOLERANCE, recipe.parent.name
