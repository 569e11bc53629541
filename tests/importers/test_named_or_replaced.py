"""What an import carries over, replaces by name, or refuses: nothing that changes the training goes unmentioned."""

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
from tests.support.rows.others_configs import AXOLOTL_LORA_8B, FACTORY_LLAMA, TRL_SHORT, Values

BARE_AXOLOTL = {key: value for key, value in AXOLOTL_LORA_8B.items() if not key.startswith("wandb")}
CHATS = {"datasets": [{"path": "a/b", "type": "chat_template"}]}


def imported(folder: Path, values: Values, gpus: str | None = None) -> Imported:
    (file := folder / "theirs.yaml").write_text(yaml.safe_dump(values), "utf-8")
    return convert(file, gpus=gpus)


def at(result: Imported, key: str) -> Any:
    value: Any = yaml.safe_load(result.text)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def levels(result: Imported) -> dict[str, str]:
    return {entry.key: entry.level for entry in result.left_out}


def entry_of(folder: Path, entry: Values, **more: Any) -> Imported:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"mine": entry}), "utf-8")
    return imported(folder, {k: v for k, v in FACTORY_LLAMA.items() if k != "max_samples"} | {"dataset": "mine"} | more)


OWN_NAMES = {
    "role_tag": "from", "content_tag": "value", "user_tag": "Human", "assistant_tag": "bot", "observation_tag": "obs",
    "function_tag": "call", "system_tag": "sys",
}  # fmt: skip
OF_MESSAGES = {
    "role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
    "observation_tag": "observation", "function_tag": "function_call", "system_tag": "system",
}  # fmt: skip


def test_every_tag_of_dataset_info_is_a_role(tmp_path: Path) -> None:
    result = entry_of(tmp_path, {"file_name": "m.json", "formatting": "sharegpt", "tags": OWN_NAMES})
    roles = {"Human": "user", "bot": "assistant", "obs": "tool", "call": "function_call", "sys": "system"}
    assert at(result, "data.train")[0]["roles"] == roles
    result = entry_of(tmp_path, {"file_name": "m.json", "formatting": "sharegpt", "tags": OF_MESSAGES})
    assert at(result, "data.train")[0]["roles"] == {"observation": "tool", "function_call": "function_call"}
    usual = {"file_name": "m.json", "formatting": "sharegpt", "tags": {"function_tag": "function_call"}}
    assert "roles" not in at(entry_of(tmp_path, usual), "data.train")[0]


@pytest.mark.parametrize(
    ("entry", "more", "split"),
    [
        ({"num_samples": 50}, {}, "train[:50]"),
        ({"num_samples": 50}, {"max_samples": 20}, "train[:20]"),
        ({"num_samples": 20}, {"max_samples": 50}, "train[:20]"),
        ({"num_samples": 50, "split": "test"}, {}, "test[:50]"),
        ({"split": "test"}, {"max_samples": 7}, "test[:7]"),
        ({}, {}, None),
    ],
)
def test_the_number_of_samples(entry: Values, more: Values, split: str | None, tmp_path: Path) -> None:
    result = entry_of(tmp_path, {"file_name": "m.json"} | entry, **more)
    assert at(result, "data.train")[0].get("split", "train") == (split or "train")
    assert ("dataset: mine: num_samples" in levels(result)) == ("num_samples" in entry)


@pytest.mark.parametrize("key", ["ranking", "folder", "images", "made_up"])
def test_a_key_of_dataset_info_that_is_not_read_is_named(key: str, tmp_path: Path) -> None:
    assert levels(entry_of(tmp_path, {"file_name": "m.json", key: "x"}))[f"dataset: mine: {key}"] == "differs"


@pytest.mark.parametrize("template", ["qwen3_nothink", "chatml", "llama3", "alpaca"])
def test_rows_with_tools_keep_a_template_with_a_place_for_them(template: str, tmp_path: Path) -> None:
    for entry in (
        {"formatting": "sharegpt", "columns": {"messages": "m", "tools": "t"}},
        {"formatting": "sharegpt", "tags": OWN_NAMES},
    ):
        result = entry_of(tmp_path, {"file_name": "m.json"} | entry, template=template)
        assert at(result, "data.chat_template") is None
        assert levels(result)["template"] == "look"


@pytest.mark.parametrize(
    "values",
    [
        AXOLOTL_LORA_8B | {"lora_target_linear": True, "lora_target_modules": None},
        FACTORY_LLAMA | {"lora_target": "all"},
        TRL_SHORT | {"use_peft": True, "lora_target_modules": "all-linear"},
        TRL_SHORT | {"use_peft": True, "lora_target_modules": ["all-linear"]},
    ],
)
def test_all_linear_layers_are_no_experts(values: Values, tmp_path: Path) -> None:
    result = imported(tmp_path, values)
    assert at(result, "lora.target_modules") in ("all-linear", None)
    assert at(result, "lora.target_parameters") == []


@pytest.mark.parametrize(
    ("values", "expected", "named"),
    [
        (BARE_AXOLOTL | {"wandb_project": "p"}, ["wandb"], ["wandb_project"]),
        (BARE_AXOLOTL | {"use_wandb": True, "wandb_entity": "e"}, ["wandb"], ["wandb_entity"]),
        (BARE_AXOLOTL | {"wandb_project": "p", "wandb_mode": "disabled"}, None, []),
        (BARE_AXOLOTL | {"wandb_project": "", "use_wandb": False}, None, []),
        (BARE_AXOLOTL | {"use_tensorboard": True}, ["tensorboard"], []),
        (BARE_AXOLOTL | {"use_mlflow": True, "mlflow_tracking_uri": "http://a"}, ["mlflow"], ["mlflow_tracking_uri"]),
        (BARE_AXOLOTL | {"trackio_project_name": "p"}, ["trackio"], []),
        (BARE_AXOLOTL | {"use_comet": True}, None, ["use_comet"]),
        (FACTORY_LLAMA | {"report_to": "wandb"}, ["wandb"], []),
        (FACTORY_LLAMA | {"report_to": ["WandB", "tensorboard"]}, ["wandb", "tensorboard"], []),
        (FACTORY_LLAMA | {"report_to": "all"}, None, ["report_to"]),
        (FACTORY_LLAMA | {"report_to": "none"}, None, []),
        (TRL_SHORT | {"report_to": ["neptune", "mlflow"]}, ["mlflow"], ["report_to"]),
    ],
)  # fmt: skip
def test_trackers(values: Values, expected: list[str] | None, named: list[str], tmp_path: Path) -> None:
    result = imported(tmp_path, values)
    assert at(result, "report_to") == expected
    words = ("wandb", "mlflow", "trackio", "comet", "tensorboard", "report_to")
    looked_at = [key for key, level in levels(result).items() if level != "same" and key.split("_")[-1] != "none"]
    assert [key for key in looked_at if any(word in key for word in words)] == named


@pytest.mark.parametrize(
    ("keys", "expected", "named"),
    [
        ({"optim": "paged_adamw_8bit", "deepspeed": "ds_z2_config.json"}, {"training.optim": "adamw"}, "optim"),
        ({"optim": "adamw_bnb_8bit", "deepspeed": "ds_z3_config.json"}, {"training.optim": "adamw"}, "optim"),
        ({"optim": "paged_adamw_32bit", "fsdp": "full_shard"}, {"training.optim": "adamw"}, "optim"),
        ({"optim": "paged_adamw_8bit", "fsdp": "full_shard"}, {"training.optim": "adamw_8bit"}, "optim"),
        ({"optim": "paged_adamw_8bit"}, {"training.optim": "paged_adamw_8bit"}, None),
        ({"quantization_bit": 8, "fsdp": "full_shard"}, {"accelerate_config": "ddp"}, "fsdp"),
        ({"quantization_bit": 8, "deepspeed": "ds_z3_config.json"}, {"accelerate_config": "zero2"}, "deepspeed"),
        ({"quantization_bit": 4, "use_dora": True, "fsdp": "full_shard"}, {"accelerate_config": "ddp"}, "fsdp"),
    ],
)
def test_what_the_strategy_cannot_train_is_replaced_and_named(
    keys: Values, expected: Values, named: str | None, tmp_path: Path
) -> None:
    result = imported(tmp_path, FACTORY_LLAMA | keys, gpus="4x24GB")
    for key, value in expected.items():
        assert at(result, key) == value
    takes_its_place = [entry.key for entry in result.left_out if "takes its place" in entry.reason]
    assert takes_its_place == ([named] if named else [])
    (recipe := tmp_path / "ours.yaml").write_text(result.text, "utf-8")
    assert main(["check", str(recipe)]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["training.optim=paged_adamw_8bit", "accelerate_config=zero2"],
        ["training.optim=adamw_8bit", "accelerate_config=zero3"],
        ["training.optim=paged_adamw_32bit", "accelerate_config=fsdp2"],
        ["quantization={load_in_8bit: true}", "accelerate_config=fsdp2"],
        ["training.compile=true", "accelerate_config=zero3"],
        ["training.mixed_precision=fp16", "accelerate_config=1f1b"],
    ],
    ids=" ".join,
)
def test_check_refuses_what_the_strategy_cannot_train(
    words: list[str], tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = "data: {train: [{path: json, data_files: rows.jsonl}]}"
    (recipe := tmp_path / "recipe.yaml").write_text(
        f"model: {{name_or_path: {tiny_llama}}}\n{data}\nlora: {{}}\n", "utf-8"
    )
    assert main(["check", str(recipe), *words]) == 2
    line = " ".join(capsys.readouterr().err.split())
    key = words[0].split("=")[0]
    assert key in line
    assert "; " in line


@pytest.mark.parametrize(
    ("values", "level"),
    [
        (AXOLOTL_LORA_8B | CHATS | {"chat_template": "qwen3", "eot_tokens": ["<|im_end|>"]}, None),
        (AXOLOTL_LORA_8B | CHATS | {"chat_template": "gemma3", "eot_tokens": ["<end_of_turn>"]}, None),
        (AXOLOTL_LORA_8B | CHATS | {"chat_template": "llama3", "eot_tokens": ["<|eot_id|>"]}, None),
        (AXOLOTL_LORA_8B | CHATS | {"chat_template": "llama3", "eot_tokens": ["<|end|>"]}, "differs"),
        (AXOLOTL_LORA_8B | CHATS | {"chat_template_jinja": "{{ x }}<|e|>", "eot_tokens": ["<|e|>"]}, None),
        (AXOLOTL_LORA_8B | CHATS | {"chat_template_jinja": "{{ x }}<|e|>", "eot_tokens": ["<|f|>"]}, "differs"),
        (AXOLOTL_LORA_8B | CHATS | {"chat_template": "tokenizer_default", "eot_tokens": ["<|im_end|>"]}, "look"),
    ],
)
def test_ends_of_turns_that_the_template_has_are_no_difference(
    values: Values, level: str | None, tmp_path: Path
) -> None:
    assert levels(imported(tmp_path, values)).get("eot_tokens") == level


@pytest.mark.parametrize("key", ["field_thinking", "template_thinking_key"])
@pytest.mark.parametrize(
    ("name", "told"), [("thinking", False), ("reasoning_content", False), ("reasoning", False), ("thoughts", True)]
)
def test_keys_of_reasoning(key: str, name: str, told: bool, tmp_path: Path) -> None:
    values = AXOLOTL_LORA_8B | {"datasets": [{"path": "a/b", "type": "chat_template", key: name}]}
    assert (f"datasets.0.{key}" in levels(imported(tmp_path, values))) == told


@pytest.mark.sample(2, thorough=9)
@pytest.mark.parametrize(
    "values",
    [
        AXOLOTL_LORA_8B | {"rl": "orpo"}, AXOLOTL_LORA_8B | {"rl": "grpo"}, AXOLOTL_LORA_8B | {"reward_model": True},
        FACTORY_LLAMA | {"stage": "dpo", "pref_loss": "hinge"}, FACTORY_LLAMA | {"stage": "rm"},
        TRL_SHORT | {"loss_type": "grpo"}, TRL_SHORT | {"loss_type": "sigmoid_norm"},
        TRL_SHORT | {"num_generations": 8}, TRL_SHORT | {"loss_type": ["ipo", "nca_pair"]},
    ],
)  # fmt: skip
def test_another_training_is_one_line_that_sends_nobody_in_a_circle(
    values: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "theirs.yaml").write_text(yaml.safe_dump(values), "utf-8")
    told = []
    for verb in ("check", "import", "plan", "train"):
        assert main([verb, str(file)]) == 2
        told.append(" ".join(capsys.readouterr().err.split()))
    assert len(set(told)) == 1
    assert "this kit trains on answers and on preferences" in told[0]
    assert "finetune import" not in told[0]
    assert "finetune check" not in told[0]


def test_supervised_training_by_another_word_is_taken(tmp_path: Path) -> None:
    for same in (AXOLOTL_LORA_8B | {"rl": None}, FACTORY_LLAMA | {"stage": "pt"}, TRL_SHORT | {"loss_type": "nll"}):
        imported(tmp_path, same)
    for unused, key in (
        (AXOLOTL_LORA_8B | {"rl_beta": 0.1}, "rl_beta"),
        (FACTORY_LLAMA | {"pref_beta": 1}, "pref_beta"),
    ):
        assert levels(imported(tmp_path, unused))[key] == "same"


ALPACA, DIALOGUES = {"path": "a/b", "type": "alpaca"}, {"path": "c/d", "type": "chat_template"}


@pytest.mark.parametrize(
    ("sets", "keys", "template", "named"),
    [
        ([ALPACA], {}, "alpaca", set()),
        ([ALPACA, DIALOGUES], {"chat_template": "llama3"}, "llama3", {"datasets.*.type"}),
        ([DIALOGUES, ALPACA], {"chat_template": "chatml"}, "chatml", {"datasets.*.type"}),
        ([ALPACA, DIALOGUES], {}, None, {"datasets.*.type"}),
        ([ALPACA, {"path": "e/f", "type": "sharegpt"}], {"chat_template": "chatml"}, "chatml", {"datasets.*.type"}),
        ([DIALOGUES], {"chat_template": "llama3"}, "llama3", set()),
    ],
)
def test_dialogues_beside_alpacas_rows_keep_their_template(
    sets: list[Values], keys: Values, template: str | None, named: set[str], tmp_path: Path
) -> None:
    result = imported(tmp_path, {"base_model": "a/b", "datasets": sets, "learning_rate": 1e-4} | keys)
    assert at(result, "data.chat_template") == (TEMPLATES[template] if template else None)
    assert {key for key, level in levels(result).items() if level == "differs"} == named


RUN_CLM: Values = {"model_name_or_path": "a/b", "dataset_name": "c/d", "per_device_train_batch_size": 2}


def test_run_clms_own_keys(tmp_path: Path) -> None:
    result = imported(tmp_path, RUN_CLM | {"dataset_config_name": "wiki", "block_size": 512, "eval_strategy": "steps"})
    assert at(result, "data.train") == [{"path": "c/d", "name": "wiki"}]
    assert at(result, "data.eval") == [{"path": "c/d", "name": "wiki", "split": "test"}]
    settings = {key: at(result, f"data.{key}") for key in ("max_length", "packing", "truncation")}
    assert settings == {"max_length": 512, "packing": True, "truncation": "split"}
    assert levels(result)["block_size"] == "differs"
    files = {"model_name_or_path": "a/b", "train_file": "t.jsonl", "validation_file": "v.csv", "eval_strategy": "epoch"}
    result = imported(tmp_path, files)
    assert at(result, "data.train") == [{"path": "json", "data_files": "t.jsonl"}]
    assert at(result, "data.eval") == [{"path": "csv", "data_files": "v.csv"}]


@pytest.mark.parametrize(
    ("own", "level"), [("</s>", "same"), ({"content": "</s>"}, "same"), ("<|end|>", "differs"), (None, "look")]
)
@pytest.mark.parametrize("tool", ["trl", "axolotl"])
def test_an_end_token_is_compared_with_the_models_own(tool: str, own: Any, level: str, tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": own} if own else {}))
    key, values = "eos_token", RUN_CLM | {"model_name_or_path": str(model), "eos_token": "</s>"}
    if tool == "axolotl":
        key = "special_tokens.eos_token"
        values = {"base_model": str(model), "datasets": [DIALOGUES], "special_tokens": {"eos_token": "</s>"}}
    assert levels(imported(tmp_path, values))[key] == level


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("train.py", "model = load(name='a/b')", "is a script, which is never run; write its arguments as YAML"),
        ("run.sh", "accelerate launch train.py", "is a script, which is never run"),
        ("a.ipynb", '{"cells": [], "nbformat": 4}', "is a notebook; write its arguments as YAML"),
        ("zero3.json", '{"zero_optimization": {"stage": 3}}', "is DeepSpeed's own file; name it as deepspeed in"),
        ("fsdp.yaml", "distributed_type: FSDP", "is Accelerate's own file; name it as accelerate_config"),
        ("adapter_config.json", '{"peft_type": "LORA"}', "is an adapter's settings; name its folder as model.adapter"),
        ("config.json", '{"architectures": ["A"]}', "is a model's config.json; name its folder as model.name_or_path"),
    ],
)
def test_other_files_are_answered_with_what_they_are(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError) as raised:
        convert(tmp_path / name)
    (mistake,) = raised.value.mistakes
    assert mistake.startswith(f"{tmp_path / name}: {said}")


def test_a_folder_is_answered_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("")
    with pytest.raises(RecipeError, match=r"is a folder; name a tool's configuration in it: b\.yaml$"):
        convert(tmp_path)


def test_others_code_is_named_and_not_carried(tmp_path: Path) -> None:
    result = imported(tmp_path, RUN_CLM | {"trust_remote_code": True})
    assert "model.trust_remote_code" not in result.carried
    assert levels(result)["trust_remote_code"] == "look"
    result = imported(tmp_path, RUN_CLM | {"report_to": "wandb", "run_name": "one"})
    assert "set it in the environment: WANDB_NAME=one" in result.text


PAIRS = {"rl": "dpo", "datasets": [{"path": "p.jsonl", "type": "chat_template.default"}]}
BOOK = {"path": "b.jsonl", "type": "completion"}
TEXTS = {"pretraining_dataset": [{"path": "c/d"}], "datasets": None}
SHAREGPT = {"path": "c/d", "type": "sharegpt"}
TRUE_LINEAR = AXOLOTL_LORA_8B | {"lora_target_linear": True}
TRL_DPO = TRL_SHORT | {"loss_type": "sigmoid", "use_peft": True}
ENTRY = {"path": "a/b", "format": "messages", "drop": ["duplicate"]}
OFFLOADING = "training.activation_offloading"
LONG, KIND, ROWS = "data.truncation", "datasets.*.type", "data.train"


@pytest.mark.parametrize(
    ("values", "carried", "told"),
    [
        (AXOLOTL_LORA_8B | PAIRS | {"dpo_beta": 0.7}, {"dpo.beta": 0.7}, {"dpo_beta": None}),
        (AXOLOTL_LORA_8B | PAIRS | {"dpo_beta": 0.7, "rl_beta": 0.3}, {"dpo.beta": 0.3}, {"dpo_beta": "look"}),
        (AXOLOTL_LORA_8B | {"model_revision": "v2"}, {"model.revision": "v2"}, {"model_revision": None}),
        # Texts that the tool cuts into pieces.
        (AXOLOTL_LORA_8B | {"datasets": [BOOK]}, {LONG: "split"}, {KIND: None}),
        (AXOLOTL_LORA_8B | {"datasets": [BOOK, *CHATS["datasets"]]}, {LONG: "drop"}, {KIND: "differs"}),
        (AXOLOTL_LORA_8B | TEXTS | {"sample_packing": True}, {LONG: "split"}, {"pretraining_dataset": "differs"}),
        (AXOLOTL_LORA_8B | TEXTS | {"sample_packing": False}, {LONG: "right"}, {"pretraining_dataset": None}),
        (FACTORY_LLAMA | {"stage": "pt"}, {LONG: "split"}, {}),
        (FACTORY_LLAMA | {"stage": "pt", "packing": False}, {LONG: "right"}, {}),
        # Nulls with a meaning.
        (BARE_AXOLOTL | CHATS | {"bf16": None}, {"training.mixed_precision": "no", "model.dtype": "float32"}, {}),
        (FACTORY_LLAMA | {"max_grad_norm": None}, {"training.max_grad_norm": None}, {}),
        (TRL_SHORT | {"gradient_checkpointing": None}, {"training.activation_checkpointing": False}, {}),
        (TRL_DPO | {"disable_dropout": None}, {"lora.lora_dropout": 0.05}, {}),
        (TRL_DPO | {"max_length": None}, {LONG: "error"}, {"max_length": "look"}),
        (TRL_SHORT | {"max_length": None}, {LONG: "error"}, {"max_length": "look"}),
        # Layers that all-linear leaves out.
        (TRUE_LINEAR | {"lora_target_modules": ["embed_tokens", "q_proj"]}, {}, {"lora_target_modules": "differs"}),
        (TRUE_LINEAR | {"lora_target_modules": "lm_head"}, {}, {"lora_target_modules": "differs"}),
        (TRUE_LINEAR | {"lora_target_modules": ["q_proj", "gate"]}, {}, {"lora_target_modules": "same"}),
        # Former spellings.
        (AXOLOTL_LORA_8B | {"datasets": [{"ds_type": "json", "data_files": ["x"], "type": "completion"}]},
         {ROWS: [{"path": "json", "data_files": ["x"], "format": "text"}]}, {}),
        (AXOLOTL_LORA_8B | {"datasets": [{"data_files": "x.csv", "type": "completion"}]},
         {ROWS: [{"path": "csv", "data_files": "x.csv", "format": "text"}]}, {}),
        (AXOLOTL_LORA_8B | {"datasets": [SHAREGPT | {"train_on_split": "dev", "conversation": "chatml"}]},
         {ROWS: [{"path": "c/d", "split": "dev", "format": "sharegpt"}], "data.chat_template": TEMPLATES["chatml"]},
         {"datasets.0.conversation": None}),
        (AXOLOTL_LORA_8B | {"chat_template": "llama3", "datasets": [SHAREGPT | {"conversation": "chatml"}]},
         {"data.chat_template": TEMPLATES["llama3"]}, {"datasets.0.conversation": "look"}),
        (AXOLOTL_LORA_8B | {"datasets": [SHAREGPT | {"field_human": "asker", "field_model": "gpt"}]},
         {ROWS: [{"path": "c/d", "format": "sharegpt", "roles": {"asker": "user"}}]}, {"datasets.0.field_model": None}),
        # A template of the data sets: the recipe's, if all have it.
        (AXOLOTL_LORA_8B | {"datasets": 2 * [DIALOGUES | {"chat_template": "llama3"}]},
         {"data.chat_template": TEMPLATES["llama3"]}, {"datasets.0.chat_template": None}),
        (AXOLOTL_LORA_8B | {"datasets": [DIALOGUES, DIALOGUES | {"chat_template": "llama3"}]},
         {"data.chat_template": "absent"}, {"datasets.1.chat_template": "differs"}),
        (TRL_SHORT | {"max_seq_length": 4096, "max_length": 1024}, {"data.max_length": 4096}, {"max_length": "look"}),
        (FACTORY_LLAMA | {"max_length": 512, "top_p": 0.7}, {"data.max_length": 2048},
         {"max_length": "look", "top_p": "same"}),
        (AXOLOTL_LORA_8B | {"optim_args": {"eps": 1e-6}}, {}, {"optim_args.eps": "look"}),
        (FACTORY_LLAMA | {"new_special_tokens": "<a>"}, {}, {"new_special_tokens": "differs"}),
        (TRL_DPO | {"max_completion_length": 256}, {"training.objective": "dpo"}, {"max_completion_length": "differs"}),
        # One more step of theirs.
        (AXOLOTL_LORA_8B | {"activation_offloading": "hidden_states", "gradient_checkpointing": None},
         {"training.activation_checkpointing": True, OFFLOADING: True}, {"activation_offloading": None}),
        (AXOLOTL_LORA_8B | {"gradient_checkpointing": "offload"},
         {"training.activation_checkpointing": True, OFFLOADING: True}, {"gradient_checkpointing": None}),
        (AXOLOTL_LORA_8B | {"activation_offloading": False}, {OFFLOADING: "absent"}, {"activation_offloading": None}),
        (TRL_SHORT | {"activation_offloading": True, "gradient_checkpointing": False},
         {"training.activation_checkpointing": True, OFFLOADING: True}, {"activation_offloading": None}),
        (TRL_SHORT | {"gradient_checkpointing_kwargs": {"offload": True}}, {OFFLOADING: True},
         {"gradient_checkpointing_kwargs.offload": None}),
        (FACTORY_LLAMA | {"use_unsloth_gc": True}, {OFFLOADING: True}, {"use_unsloth_gc": None}),
        (AXOLOTL_LORA_8B | CHATS | {"dataset_exact_deduplication": True}, {ROWS: [ENTRY]}, {KIND: None}),
        (AXOLOTL_LORA_8B | {"datasets": 2 * CHATS["datasets"], "dataset_exact_deduplication": True},
         {ROWS: [ENTRY, ENTRY]}, {"dataset_exact_deduplication": "look"}),
        (AXOLOTL_LORA_8B | {"loss_watchdog_threshold": 5.0}, {}, {"loss_watchdog_threshold": "look"}),
    ],
)  # fmt: skip
def test_keys_that_the_tool_reads_in_its_own_way(values: Values, carried: Values, told: Values, tmp_path: Path) -> None:
    result = imported(tmp_path, values)
    assert {key: result.carried.get(key, ("absent", ""))[0] for key in carried} == carried
    assert {key: levels(result).get(key) for key in told} == told


@pytest.mark.parametrize(
    ("kind", "names", "key"),
    [
        ("chat_template", {"message_property_mappings": {"role": "speaker", "content": "content"}},
         "message_property_mappings.role: is speaker"),
        ("chat_template", {"message_field_content": "text"}, "message_field_content: is text"),
        ("sharegpt", {"message_property_mappings": {"role": "from", "content": "content"}},
         "message_property_mappings.content: is content"),
        ("alpaca", {"message_field_content": "text"}, None),
    ],
)  # fmt: skip
def test_keys_of_a_turn_that_no_row_is_read_by(kind: str, names: Values, key: str | None, tmp_path: Path) -> None:
    values = AXOLOTL_LORA_8B | {"datasets": [{"path": "a/b", "type": kind, **names}]}
    if key is None:
        imported(tmp_path, values)
        return
    with pytest.raises(RecipeError, match=rf"datasets\.0\.{key}; a turn is read by role and content"):
        imported(tmp_path, values)


def test_tags_of_a_turn_that_no_row_is_read_by(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"mine: role_tag and content_tag are .*; a turn is read by from and value"):
        entry_of(tmp_path, {"file_name": "m.json", "formatting": "sharegpt", "tags": {"role_tag": "speaker"}})
