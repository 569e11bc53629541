"""Configurations of preference training: TRL's and alignment-handbook's, axolotl's, LLaMA-Factory's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.cli.main import main
from finetune.errors import RecipeError
from finetune.importers import Imported, convert
from finetune.importers.shared import TEMPLATES
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe

Values = dict[str, Any]
# recipes/zephyr-7b-beta/dpo/config_qlora.yaml and recipes/smollm3/dpo/apo.yaml of alignment-handbook.
ZEPHYR: Values = {
    "model_name_or_path": "alignment-handbook/zephyr-7b-sft-qlora", "torch_dtype": "bfloat16",
    "attn_implementation": "flash_attention_2", "use_peft": True, "load_in_4bit": True, "lora_r": 128,
    "lora_alpha": 128, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"],
    "dataset_mixer": {"HuggingFaceH4/ultrafeedback_binarized": 1.0}, "dataset_splits": ["train_prefs", "test_prefs"],
    "dataset_num_proc": 12, "bf16": True, "beta": 0.01, "do_eval": True, "eval_strategy": "steps", "eval_steps": 100,
    "gradient_accumulation_steps": 4, "gradient_checkpointing": True, "learning_rate": 5e-6,
    "lr_scheduler_type": "cosine", "max_length": 1024, "max_prompt_length": 512, "num_train_epochs": 1,
    "optim": "paged_adamw_32bit", "per_device_train_batch_size": 4, "seed": 42, "warmup_ratio": 0.1,
}  # fmt: skip
SMOLLM3: Values = {
    "model_name_or_path": "HuggingFaceTB/SmolLM3-3B-checkpoints", "model_revision": "it-SFT",
    "torch_dtype": "bfloat16",
    "dataset_mixture": {"datasets": [
        {"id": "HuggingFaceTB/smoltalk2", "config": "Preference", "split": "tulu_no_think",
         "columns": ["chosen", "rejected", "prompt", "chat_template_kwargs"], "weight": 0.5},
    ]},
    "bf16": True, "eval_strategy": "no", "gradient_accumulation_steps": 2, "learning_rate": 1e-6,
    "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "max_grad_norm": 0.2,
    "beta": 0.05, "loss_type": "apo_zero", "max_length": 24576, "num_train_epochs": 1,
    "per_device_train_batch_size": 1, "padding_free": True, "use_liger_kernel": True, "warmup_ratio": 0.1,
}  # fmt: skip
# examples/train_lora/qwen3_lora_dpo.yaml of LLaMA-Factory.
FACTORY: Values = {
    "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507", "stage": "dpo", "do_train": True, "finetuning_type": "lora",
    "lora_rank": 8, "lora_target": "all", "pref_beta": 0.2, "pref_loss": "sigmoid", "dataset": "mine",
    "template": "qwen3_nothink", "cutoff_len": 2048, "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8, "learning_rate": 5e-6, "num_train_epochs": 3.0, "bf16": True,
}  # fmt: skip
AXOLOTL: Values = {
    "base_model": "NousResearch/Meta-Llama-3-8B", "rl": "dpo", "adapter": "lora", "lora_r": 16, "lora_alpha": 16,
    "lora_dropout": 0.05, "lora_target_linear": True, "datasets": [{"path": "a/b", "type": "chatml.intel"}],
    "sequence_len": 2048, "micro_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 2e-4,
}  # fmt: skip
TRL: Values = {"model_name_or_path": "Qwen/Qwen3-0.6B", "dataset_name": "trl-lib/ultrafeedback_binarized"}


def imported(folder: Path, values: Values) -> Imported:
    (file := folder / "theirs.yaml").write_text(yaml.safe_dump(values), "utf-8")
    return convert(file)


def recipe_of(result: Imported, folder: Path) -> Recipe:
    (file := folder / "ours.yaml").write_text(result.text, "utf-8")
    return load_recipe(file).recipe


def levels(result: Imported) -> dict[str, str]:
    return {entry.key: entry.level for entry in result.left_out}


def differing(result: Imported) -> set[str]:
    return {key for key, level in levels(result).items() if level == "differs"}


def test_alignment_handbooks_dpo(tmp_path: Path) -> None:
    result = imported(tmp_path, ZEPHYR)
    recipe = recipe_of(result, tmp_path)
    assert (recipe.training.objective, recipe.dpo.loss_type, recipe.dpo.beta) == ("dpo", "sigmoid", 0.01)
    assert recipe.dpo.reference == "start"
    assert (recipe.training.learning_rate, recipe.training.num_train_epochs) == (5e-6, 1)
    assert (recipe.training.global_batch_size, recipe.training.per_device_batch_size) == (16, 4)
    assert recipe.lora is not None
    assert recipe.lora.lora_dropout == 0  # disable_dropout is on by default, and covers adapters
    assert [(entry.path, entry.split, entry.format) for entry in recipe.data.sets] == [
        ("HuggingFaceH4/ultrafeedback_binarized", split, "preference") for split in ("train_prefs", "test_prefs")
    ]
    assert (recipe.data.max_length, recipe.data.truncation, recipe.data.train_on) == (1024, "right", "assistant")
    assert differing(result) == {"max_prompt_length"}

    result = imported(tmp_path, SMOLLM3)
    recipe = recipe_of(result, tmp_path)
    assert (recipe.dpo.loss_type, recipe.dpo.beta, recipe.lora) == ("apo_zero", 0.05, None)
    assert recipe.data.train[0].weight == 0.5
    assert not differing(result)


@pytest.mark.parametrize(
    ("keys", "section", "named"),
    [
        ({"beta": 0.1}, {"loss_type": "sigmoid"}, set()),
        # Former versions of TRL smooth these labels, today's does not.
        ({"loss_type": ["sigmoid"], "label_smoothing": 0.1}, {"loss_type": "sigmoid", "label_smoothing": 0.0},
         {"label_smoothing"}),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, {"loss_type": "ipo", "label_smoothing": 0.0}, set()),
        ({"loss_type": "robust", "label_smoothing": 0.1}, {"loss_type": "robust", "label_smoothing": 0.1}, set()),
        ({"loss_type": "robust"}, {"loss_type": "sigmoid"}, set()),
        ({"loss_type": "ipo", "beta": 0.5}, {"loss_type": "ipo", "beta": 0.5}, set()),
        ({"loss_type": ["sigmoid", "sft"]}, {"sft_weight": 1.0}, {"loss_type"}),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2]}, {"sft_weight": 0.2}, {"loss_weights"}),
        ({"loss_type": ["apo_zero", "sft"], "loss_weights": [0.5, 0.25]},
         {"loss_type": "apo_zero", "sft_weight": 0.5}, {"loss_weights"}),
        ({"beta": 0.1, "rpo_alpha": 0.3}, {"sft_weight": 0.3}, {"rpo_alpha"}),
        ({"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.2, "beta": 2.0},
         {"loss_type": "simpo", "simpo_gamma": 1.2, "beta": 2.0, "sft_weight": 0.0}, {"loss_type"}),
        ({"loss_type": "simpo"}, {"loss_type": "simpo", "sft_weight": 1.0}, {"loss_type", "cpo_alpha"}),
        # SimPO's authors: their gamma is a share of beta, their loss_type is the sigmoid in SimPO's loss.
        ({"beta": 2.5, "gamma_beta_ratio": 0.5, "loss_type": "sigmoid", "sft_weight": 0.0},
         {"loss_type": "simpo", "beta": 2.5, "simpo_gamma": 1.25, "sft_weight": 0.0}, set()),
        ({"beta": 0.1, "sync_ref_model": True, "f_divergence_type": "js_divergence", "ld_alpha": 0.5,
          "use_weighting": True}, {}, {"sync_ref_model", "f_divergence_type", "ld_alpha", "use_weighting"}),
        ({"beta": 0.1, "precompute_ref_log_probs": True, "truncation_mode": "keep_end"}, {}, {"truncation_mode"}),
    ],
)  # fmt: skip
def test_trls_pair_losses(keys: Values, section: Values, named: set[str], tmp_path: Path) -> None:
    result = imported(tmp_path, TRL | keys)
    recipe = recipe_of(result, tmp_path)
    assert recipe.training.objective == "dpo"
    assert {key: getattr(recipe.dpo, key) for key in section} == section
    assert differing(result) == named
    assert recipe.training.learning_rate == 1e-6
    if recipe.dpo.sft_weight:
        assert "a mean over the step's chosen tokens here" in result.text


def test_trls_kto(tmp_path: Path) -> None:
    kto = {"desirable_weight": 1.0, "undesirable_weight": 1.5, "beta": 0.2, "per_device_train_batch_size": 4}
    result = imported(tmp_path, TRL | kto)
    recipe = recipe_of(result, tmp_path)
    assert (recipe.training.objective, recipe.data.train[0].format) == ("kto", "kto")
    assert (recipe.kto.beta, recipe.kto.undesirable_weight) == (0.2, 1.5)
    assert differing(result) == {"per_device_train_batch_size"}
    assert recipe_of(imported(tmp_path, TRL | {"loss_type": "kto"}), tmp_path).kto.beta == 0.1


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (TRL | {"loss_type": ["sigmoid", "ipo"]}, "loss_type: is a list; one of sigmoid, robust, ipo, apo_zero"),
        (TRL | {"loss_type": "made_up"}, "loss_type: is made_up; one of sigmoid, robust, ipo, apo_zero is offered"),
        (TRL | {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "write a number for each loss, 2 of them"),
        (TRL | {"loss_type": "sft"}, "loss_type: is sft; one of sigmoid"),
        (TRL | {"loss_type": "sigmoid", "cpo_alpha": 1.0}, "cpo_alpha: is 1.0; of TRL's CPO trainer, loss_type: simpo"),
        (TRL | {"desirable_weight": 1.0, "loss_type": "bco"}, "loss_type: is bco; kto is offered for judged answers"),
        (TRL | {"loss_type": "simpo", "cpo_alpha": "much"}, "cpo_alpha: is much; write a number from 0 up"),
        (FACTORY | {"pref_loss": "made_up"}, "pref_loss: is made_up; sigmoid, ipo, simpo and kto_pair are offered"),
        (AXOLOTL | {"dpo_loss_type": ["hinge"]}, "dpo_loss_type: is a list; one of sigmoid, robust, ipo, apo_zero"),
    ],
)
def test_what_is_not_offered_is_one_line(values: Values, line: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as raised:
        imported(tmp_path, values)
    (mistake,) = raised.value.mistakes
    assert line in mistake


def factory(folder: Path, entry: Values, **more: Any) -> Imported:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"mine": entry}), "utf-8")
    return imported(folder, FACTORY | more)


TURNS = {"formatting": "sharegpt", "columns": {"messages": "conversations"}}
PAIRS = {"chosen": "chosen", "rejected": "rejected"}
OPENAI = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
ROWS: dict[str, tuple[Values, Values, dict[str, str]]] = {
    "turns before two answers": (
        {"ranking": True, "formatting": "sharegpt", "columns": {"messages": "conversations", **PAIRS}}, {},
        {"prompt": "conversations"},
    ),
    "texts": (
        {"ranking": True, "columns": {"prompt": "instruction", "query": "input", **PAIRS}}, {}, {},
    ),
    "texts of other names": (
        {"ranking": True, "columns": {"prompt": "q", "chosen": "good", "rejected": "bad", "system": "s"}}, {},
        {"instruction": "q", "chosen": "good", "rejected": "bad", "system": "s"},
    ),
    "judged dialogues": (
        {"formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"}, "tags": OPENAI},
        {"stage": "kto"}, {"completion": "messages"},
    ),
    "judged texts": (
        {"columns": {"prompt": "q", "response": "a", "kto_tag": "good"}}, {"stage": "kto"},
        {"instruction": "q", "completion": "a", "label": "good"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_llamafactorys_rows(name: str, tmp_path: Path) -> None:
    entry, more, columns = ROWS[name]
    result = factory(tmp_path, {"file_name": "m.json"} | entry, **more)
    recipe = recipe_of(result, tmp_path)
    objective = more.get("stage", "dpo")
    assert recipe.training.objective == objective
    assert recipe.data.train[0].columns == columns
    assert recipe.data.train[0].roles == {}
    assert (recipe.dpo.beta if objective == "dpo" else recipe.kto.beta) == 0.2
    assert differing(result) == ({"per_device_train_batch_size"} if objective == "kto" else set())


@pytest.mark.parametrize(
    ("more", "section", "named"),
    [
        ({"pref_loss": "simpo", "simpo_gamma": 0.7}, {"loss_type": "simpo", "simpo_gamma": 0.7}, set()),
        ({"pref_loss": "ipo"}, {"loss_type": "ipo"}, set()),
        ({"pref_ftx": 0.3}, {"sft_weight": 0.3}, {"pref_ftx"}),
        ({"dpo_label_smoothing": 0.1, "pref_bco_weight": 0.5}, {"label_smoothing": 0.0},
         {"dpo_label_smoothing", "pref_bco_weight"}),
        ({"ref_model": "a/ref"}, {"reference": "a/ref"}, set()),
        ({"ref_model": "a/ref", "ref_model_adapters": "b"}, {"reference": "a/ref"}, {"ref_model_adapters"}),
        ({"adapter_name_or_path": "saves/sft"}, {"reference": "adapter_off"}, set()),
    ],
)  # fmt: skip
def test_llamafactorys_losses_and_reference(more: Values, section: Values, named: set[str], tmp_path: Path) -> None:
    result = factory(tmp_path, {"file_name": "m.json"} | TURNS | {"ranking": True}, **more)
    recipe = recipe_of(result, tmp_path)
    assert {key: getattr(recipe.dpo, key) for key in section} == section
    assert differing(result) == named
    assert ("adapter_name_or_path" in levels(result)) == ("adapter_name_or_path" in more)


def test_llamafactorys_pairs_by_kto(tmp_path: Path) -> None:
    entry = {"file_name": "m.json", "ranking": True, "columns": {"prompt": "q", **PAIRS}}
    result = factory(tmp_path, entry, pref_loss="kto_pair")
    recipe = recipe_of(result, tmp_path)
    assert (recipe.training.objective, recipe.data.train[0].columns) == ("kto", {"instruction": "q"})
    assert differing(result) == {"pref_loss", "per_device_train_batch_size"}


@pytest.mark.parametrize(
    ("data", "columns", "template"),
    [
        ({"type": "chatml.intel"}, {"instruction": "question"}, "chatml"),
        ({"type": "llama3.icr"}, {"instruction": "input"}, "llama3"),
        ({"type": "chatml.ultra"}, {}, "chatml"),
        ({"type": "chatml.prompt_pairs"}, {"instruction": "prompt"}, "chatml"),
        ({"type": "chatml.argilla"}, {"chosen": "chosen_response", "rejected": "rejected_response"}, "chatml"),
        ({"type": "llama3.argilla_chat"}, {}, "llama3"),
        ({"type": "chat_template.default", "field_messages": "conversation", "field_chosen": "good"},
         {"prompt": "conversation", "chosen": "good"}, None),
        ({"type": {"field_prompt": "q", "field_chosen": "c", "prompt_format": "[INST] {prompt}"}},
         {"instruction": "q", "chosen": "c"}, None),
        ({"type": "user_defined.default", "field_prompt": "q", "field_chosen": "c", "field_system": "s"},
         {"instruction": "q", "chosen": "c", "system": "s"}, None),
        ({"type": "user_defined.default", "field_rejected": "r"}, {"instruction": "prompt", "rejected": "r"}, None),
    ],
)  # fmt: skip
def test_axolotls_pairs(data: Values, columns: dict[str, str], template: str | None, tmp_path: Path) -> None:
    result = imported(tmp_path, AXOLOTL | {"datasets": [{"path": "a/b", "split": "train"} | data]})
    recipe = recipe_of(result, tmp_path)
    assert recipe.data.train[0].columns == columns
    assert recipe.data.chat_template == (template and TEMPLATES[template])
    assert (recipe.training.objective, recipe.dpo.beta, recipe.dpo.loss_type) == ("dpo", 0.1, "sigmoid")
    assert recipe.lora is not None
    assert recipe.lora.lora_dropout == 0
    assert differing(result) == ({"datasets.0.type"} if isinstance(data["type"], dict) else set())


@pytest.mark.parametrize(
    ("keys", "objective", "section", "named"),
    [
        ({"rl": "ipo", "rl_beta": 0.3}, "dpo", {"loss_type": "ipo", "beta": 0.3}, set()),
        ({"rl": "dpo", "trl": {"beta": 0.4}}, "dpo", {"beta": 0.4}, set()),
        ({"dpo_loss_type": ["robust"], "dpo_label_smoothing": 0.2}, "dpo",
         {"loss_type": "robust", "label_smoothing": 0.2}, set()),
        ({"dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 0.5]}, "dpo", {"sft_weight": 0.5},
         {"dpo_loss_weights"}),
        ({"rl": "simpo", "cpo_alpha": 0, "simpo_gamma": 0.9}, "dpo", {"loss_type": "simpo", "simpo_gamma": 0.9}, set()),
        ({"rl": "simpo"}, "dpo", {"sft_weight": 1.0}, {"cpo_alpha"}),
        ({"rl": "dpo", "dpo_use_weighting": True}, "dpo", {}, {"dpo_use_weighting"}),
        ({"rpo_alpha": 0.3}, "dpo", {"loss_type": "sigmoid", "sft_weight": 0.3}, {"rpo_alpha"}),
        ({"dpo_label_smoothing": 0.1}, "dpo", {"label_smoothing": 0.0}, {"dpo_label_smoothing"}),
        ({"rl": "kto", "rl_beta": 0.5, "kto_desirable_weight": 0.2, "remove_unused_columns": False}, "kto",
         {"beta": 0.5, "desirable_weight": 0.2}, {"micro_batch_size"}),
    ],
)  # fmt: skip
def test_axolotls_losses(keys: Values, objective: str, section: Values, named: set[str], tmp_path: Path) -> None:
    result = imported(tmp_path, AXOLOTL | keys)
    recipe = recipe_of(result, tmp_path)
    assert recipe.training.objective == objective
    assert {key: getattr(getattr(recipe, objective), key) for key in section} == section
    assert differing(result) == named


def test_a_preference_configuration_is_led_to_the_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, values in enumerate((ZEPHYR, FACTORY, AXOLOTL)):
        (file := tmp_path / f"theirs{number}.yaml").write_text(yaml.safe_dump(values), "utf-8")
        assert main(["check", str(file)]) == 2
        assert "convert it" in capsys.readouterr().err
        assert main(["import", str(file), "-o", str(tmp_path / f"ours{number}.yaml")]) == 0
        assert main(["check", str(tmp_path / f"ours{number}.yaml")]) == 0
        capsys.readouterr()


@pytest.mark.parametrize(
    ("keys", "objective", "said"),
    [
        # alignment-handbook's ORPO: nothing in it but names tells that it is no DPO.
        ({"beta": 0.05, "max_prompt_length": 1792, "output_dir": "data/zephyr-orpo-141b"}, "dpo",
         "taken for TRL's DPO: for beta, max_prompt_length, which KTO, ORPO and CPO have too, with other meanings; "
         "its names speak of ORPO"),
        ({"beta": 0.1, "dataset_name": "trl-lib/kto-mix-14k"}, "dpo", "its names speak of KTO"),
        ({"loss_type": "sigmoid"}, "dpo", "taken for TRL's DPO: for loss_type, which"),
        ({"precompute_ref_log_probs": True}, "dpo", "taken for TRL's DPO: for precompute_ref_log_probs, which"),
        ({}, "supervised", "taken for TRL's SFT: no key is another trainer's"),
        # These keys belong to one trainer.
        ({"packing": True}, "supervised", None),
        ({"loss_type": "nll"}, "supervised", None),
        ({"beta": 0.1, "desirable_weight": 1.0}, "kto", None),
        ({"beta": 0.1, "rpo_alpha": 1.0}, "dpo", None),
        ({"beta": 2.0, "loss_type": "simpo"}, "dpo", None),
    ],
)  # fmt: skip
def test_a_file_that_names_no_trainer_says_what_it_is_taken_for(
    keys: Values, objective: str, said: str | None, tmp_path: Path
) -> None:
    result = imported(tmp_path, {"model_name_or_path": "a/b", "dataset_name": "c/d"} | keys)
    assert recipe_of(result, tmp_path).training.objective == objective
    reasons = [entry.reason for entry in result.left_out if entry.key == "trainer"]
    assert len(reasons) == (said is not None)
    assert all(str(said) in reason for reason in reasons)
    if said and "speak" not in said:
        assert "speak" not in reasons[0]


def test_kto_never_has_a_step_of_one_row(tmp_path: Path) -> None:
    result = factory(tmp_path, {"file_name": "m.json", "columns": {"kto_tag": "l"}}, stage="kto",
                     gradient_accumulation_steps=1)  # fmt: skip
    assert recipe_of(result, tmp_path).training.global_batch_size == 2
    assert "a step has two rows here" in result.text


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_earlier_turns_of_ranked_rows_are_named(stage: str, tmp_path: Path) -> None:
    columns = {"prompt": "q", "history": "hist"} | (PAIRS if stage == "dpo" else {"kto_tag": "label"})
    result = factory(tmp_path, {"file_name": "m.json", "columns": columns}, stage=stage)
    assert "dataset: mine: columns.history" in differing(result)
    supervised = factory(tmp_path, {"file_name": "m.json", "columns": {"prompt": "q", "history": "hist"}}, stage="sft")
    assert recipe_of(supervised, tmp_path).data.train[0].columns["history"] == "hist"
    assert not differing(supervised)


def test_a_new_adapter_over_an_earlier_one_is_refused(tmp_path: Path) -> None:
    """LLaMA-Factory merges the adapter first, so the new one's start is its reference."""
    entry = {"file_name": "m.json"} | TURNS | {"ranking": True}
    result = factory(tmp_path, entry, adapter_name_or_path="saves/sft", create_new_adapter=False)
    carried = {key: value for key, (value, _) in result.carried.items()}
    assert (carried["model.adapter"], carried["dpo.reference"]) == ("saves/sft", "adapter_off")
    with pytest.raises(RecipeError, match=r"create_new_adapter: .*merge the adapter first"):
        factory(tmp_path, entry, adapter_name_or_path="saves/sft", create_new_adapter=True)


@pytest.mark.parametrize(
    ("types", "template", "named"),
    [
        (["chatml.intel", "llama3.icr"], "chatml", {"datasets.*.type"}),
        (["chatml.intel", "chat_template.default"], "chatml", {"datasets.*.type"}),
        (["llama3.icr", "llama3.ultra"], "llama3", set()),
    ],
)
def test_two_strategies_in_one_file_are_named(types: list[str], template: str, named: set[str], tmp_path: Path) -> None:
    sets = [{"path": f"a/{number}", "type": kind} for number, kind in enumerate(types)]
    result = imported(tmp_path, AXOLOTL | {"datasets": sets})
    assert recipe_of(result, tmp_path).data.chat_template == TEMPLATES[template]
    assert differing(result) == named
