"""What changes the training is carried over or named, and what cannot run with the strategy is replaced and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.cli.main import main
from finetune.data.chat import SHAREGPT_ROLES, Chat, read_row, role_of_tools
from finetune.data.layout import RowLayout
from finetune.importers import Imported, convert
from finetune.recipe.loader import load_recipe
from tests.support.rows.others_configs import (
    AXOLOTL_LORA_8B,
    EXAMPLES,
    FACTORY_LLAMA,
    TRL_SHORT,
    Values,
)


def imported(folder: Path, values: Values, gpus: str | None = None) -> Imported:
    (file := folder / "theirs.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return convert(file, gpus=gpus)


def value(result: Imported, key: str) -> Any:
    return result.carried.get(key, (None, ""))[0]


def named(result: Imported, level: str) -> set[str]:
    return {entry.key for entry in result.left_out if entry.level == level}


def test_axolotls_default_scale_is_8(tmp_path: Path) -> None:
    values = {key: each for key, each in AXOLOTL_LORA_8B.items() if key != "lora_alpha"}
    assert value(imported(tmp_path, values), "lora.lora_alpha") == 8


@pytest.mark.parametrize("key", ["offload_params", "fsdp_offload_params", "cpu_offload", "fsdp_cpu_offload"])
@pytest.mark.parametrize("base", [FACTORY_LLAMA, AXOLOTL_LORA_8B | {"load_in_8bit": False}], ids=["factory", "axolotl"])
def test_weights_in_host_memory_stay_there(key: str, base: Values, tmp_path: Path) -> None:
    values = base | {"fsdp": "full_shard", "fsdp_config": {key: True}}
    assert value(imported(tmp_path, values, "4x80GB"), "accelerate_config") == "fsdp2_offload"
    values |= {"fsdp_config": {key: False}}
    assert value(imported(tmp_path, values, "4x80GB"), "accelerate_config") == "fsdp2"


UNFIT: dict[str, tuple[Values, str, str, Any]] = {
    "8-bit state, ZeRO-2": (TRL_SHORT | {"optim": "paged_adamw_8bit", "deepspeed": "zero2.json"}, "optim",
                            "training.optim", "adamw"),
    "8-bit state, ZeRO-3": (FACTORY_LLAMA | {"optim": "adamw_bnb_8bit", "deepspeed": "ds_z3_config.json"}, "optim",
                            "training.optim", "adamw"),
    "pages, FSDP": (FACTORY_LLAMA | {"optim": "paged_adamw_8bit", "fsdp": "full_shard"}, "optim", "training.optim",
                    "adamw_8bit"),
    "int8, FSDP": (AXOLOTL_LORA_8B | {"fsdp": "full_shard"}, "fsdp", "accelerate_config", "ddp"),
    "int8, ZeRO-3": (AXOLOTL_LORA_8B | {"optimizer": "adamw_torch", "deepspeed": "zero3.json"}, "deepspeed",
                     "accelerate_config", "zero2"),
    "bfloat16 state in host memory": (
        FACTORY_LLAMA | {"finetuning_type": "full", "pure_bf16": True, "deepspeed": "ds_z3_offload_config.json"},
        "pure_bf16", "training.pure_bf16", False),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_run_is_replaced_and_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values, theirs, key, instead = UNFIT[name]
    result = imported(tmp_path, values, "4x80GB")
    assert value(result, key) == instead
    (entry,) = [entry for entry in result.left_out if entry.key == theirs and "takes its place" in entry.reason]
    assert entry.level == ("look" if key == "accelerate_config" else "differs")
    (recipe := tmp_path / "ours.yaml").write_text(result.text)
    load_recipe(recipe, here=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("strategy", "words", "place"),
    [
        ("zero2", ["training.optim=paged_adamw_8bit"], "training.optim"),
        ("fsdp2", ["training.optim=paged_adamw_32bit"], "training.optim"),
        ("fsdp2", ["quantization={load_in_8bit: true}"], "quantization.load_in_8bit"),
        ("zero3", ["quantization={load_in_4bit: true}"], "quantization.bnb_4bit_quant_storage"),
        ("gpipe", ["training.mixed_precision=fp16"], "training.mixed_precision"),
        ("zero3", ["training.compile=true"], "training.compile"),
        ("zero2_offload", ["training.pure_bf16=true"], "training.pure_bf16"),
    ],
)
def test_check_refuses_what_training_would(
    strategy: str, words: list[str], place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "recipe.yaml").write_text("model: {name_or_path: a/b}\ndata: {train: [{path: c/d}]}\n")
    assert main(["check", str(file), f"accelerate_config={strategy}", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"command line: {place}: ")
    assert main(["check", str(file), "accelerate_config=ddp", *words[:0]]) == 0


OTHERS: list[Values] = [
    TRL_SHORT | {"loss_type": "hinge"}, TRL_SHORT | {"loss_type": ["sigmoid", "bco_pair"]},
    TRL_SHORT | {"num_generations": 8}, TRL_SHORT | {"beta": 0.04, "max_completion_length": 256},
    FACTORY_LLAMA | {"stage": "dpo", "pref_loss": "orpo"}, FACTORY_LLAMA | {"stage": "ppo"},
    AXOLOTL_LORA_8B | {"rl": "orpo"}, AXOLOTL_LORA_8B | {"reward_model": True},
]  # fmt: skip


@pytest.mark.parametrize("verb", ["check", "import", "train"])
@pytest.mark.parametrize("values", OTHERS, ids=range(len(OTHERS)))
def test_another_training_leads_nobody_in_a_circle(
    verb: str, values: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "theirs.yaml").write_text(yaml.safe_dump(values))
    assert main([verb, str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "this kit trains on answers and on preferences" in line
    assert "finetune import" not in line


def test_no_supervised_example_is_taken_for_another_training(tmp_path: Path) -> None:
    for example in EXAMPLES.values():
        imported(tmp_path, example.values, example.gpus)
    assert "loss_type" not in {entry.key for entry in imported(tmp_path, TRL_SHORT | {"loss_type": "nll"}).left_out}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (AXOLOTL_LORA_8B | {"wandb_project": "mine"}, ["wandb"]),
        (AXOLOTL_LORA_8B | {"wandb_project": "mine", "wandb_mode": "disabled"}, None),
        (AXOLOTL_LORA_8B | {"use_tensorboard": True, "mlflow_experiment_name": "x"}, ["mlflow", "tensorboard"]),
        (FACTORY_LLAMA | {"report_to": "wandb"}, ["wandb"]),
        (TRL_SHORT | {"report_to": ["tensorboard", "trackio"]}, ["tensorboard", "trackio"]),
        (TRL_SHORT, None),
    ],
)
def test_trackers(values: Values, expected: list[str] | None, tmp_path: Path) -> None:
    assert value(imported(tmp_path, values), "report_to") == expected


def test_trackers_that_are_not_offered_are_named(tmp_path: Path) -> None:
    assert "report_to" in named(imported(tmp_path, TRL_SHORT | {"report_to": "comet_ml"}), "look")
    assert "report_to" in named(imported(tmp_path, TRL_SHORT | {"report_to": "all"}), "look")
    assert "wandb_project" in named(imported(tmp_path, AXOLOTL_LORA_8B | {"wandb_project": "mine"}), "look")


@pytest.mark.parametrize(
    "values",
    [AXOLOTL_LORA_8B, FACTORY_LLAMA, TRL_SHORT | {"use_peft": True, "lora_target_modules": "all-linear"}],
    ids=["axolotl", "factory", "trl"],
)
def test_linear_layers_are_no_experts(values: Values, tmp_path: Path) -> None:
    assert value(imported(tmp_path, values), "lora.target_parameters") == []


CHATS = [{"path": "org/x", "type": "chat_template"}]


@pytest.mark.parametrize(
    ("more", "alarmed"),
    [
        ({"datasets": [CHATS[0] | {"field_thinking": "thinking"}]}, False),
        ({"datasets": [CHATS[0] | {"chat_template": "tokenizer_default"}]}, False),
        ({"datasets": [CHATS[0] | {"message_property_mappings": {"role": "role", "tool_calls": "tool_calls"}}]}, False),
        ({"datasets": [CHATS[0] | {"message_property_mappings": {"tool_calls": "calls"}}]}, True),
        ({"datasets": CHATS, "chat_template": "llama3", "eot_tokens": ["<|eot_id|>"]}, False),
        ({"datasets": CHATS, "chat_template": "chatml", "eot_tokens": ["<|im_end|>"]}, False),
        ({"datasets": CHATS, "chat_template": "qwen3", "eot_tokens": ["<|im_end|>"]}, False),
        ({"datasets": CHATS, "chat_template": "llama3", "eot_tokens": ["<|im_end|>"]}, True),
        ({"fix_untrained_tokens": False}, False),
    ],
)
def test_false_alarms(more: Values, alarmed: bool, tmp_path: Path) -> None:
    assert bool(named(imported(tmp_path, AXOLOTL_LORA_8B | more), "differs")) == alarmed


@pytest.mark.parametrize("key", ["label_smoothing_factor", "neftune_noise_alpha"])
def test_what_is_0_changes_nothing(key: str, tmp_path: Path) -> None:
    assert key not in named(imported(tmp_path, TRL_SHORT | {key: 0}), "differs")
    assert key in named(imported(tmp_path, TRL_SHORT | {key: 0.1}), "differs")


def factory(folder: Path, entry: Values, **more: Any) -> Imported:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"mine": {"hf_hub_url": "org/mine", **entry}}))
    return imported(folder, FACTORY_LLAMA | {"dataset": "mine", "max_samples": None, **more})


def test_counts_and_splits_of_dataset_info(tmp_path: Path) -> None:
    def split(entry: Values, **more: Any) -> Any:
        return value(factory(tmp_path, entry, **more), "data.train")[0].get("split")

    assert split({"num_samples": 50}) == "train[:50]"
    assert split({"num_samples": 50}, max_samples=20) == "train[:20]"
    assert split({"split": "train_sft"}, max_samples=20) == "train_sft[:20]"
    assert "dataset: mine: num_samples" in named(factory(tmp_path, {"num_samples": 50}), "look")
    assert "dataset: mine: folder" in named(factory(tmp_path, {"folder": "x"}), "differs")
    assert "dataset: mine: columns.kto_tag" in named(factory(tmp_path, {"columns": {"kto_tag": "x"}}), "differs")


TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant",
        "observation_tag": "observation", "function_tag": "call_it"}  # fmt: skip


def test_roles_of_tools_in_dataset_info(tmp_path: Path) -> None:
    result = factory(
        tmp_path, {"formatting": "sharegpt", "columns": {"messages": "messages", "tools": "tools"}, "tags": TAGS}
    )
    (entry,) = value(result, "data.train")
    assert entry["roles"] == {"observation": "tool", "call_it": "function_call"}
    assert value(result, "data.chat_template") is None, "the written one has no place for tools"
    assert "template" in named(result, "look")
    assert value(factory(tmp_path, {}, template="qwen3_nothink"), "data.chat_template") is None


CALL = '{"name": "f", "arguments": {"a": 1}}'
ROLES = {
    "tool_call": "function_call", "tool_calls": "function_call", "toolUse": "function_call", "function": "tool",
    "observation": "tool", "ipython": "tool", "tool_response": "tool", "tool_call_result": "tool",
    "function-output": "tool", "code_interpreter": "tool", "Mensch": None, "capital": None, "transaction": None,
}  # fmt: skip


@pytest.mark.parametrize("name", ROLES)
def test_the_remedy_for_a_role_of_tools_works(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    role = ROLES[name]
    assert role_of_tools(name) == role
    if role is None:
        return
    # Half of the names are a speaker's in ShareGPT; some are known to it already.
    column, who, what = "messages", "role", "content"
    if name not in SHAREGPT_ROLES and list(ROLES).index(name) % 2:
        column, who, what = "conversations", "from", "value"
    row = {column: [{who: "user", what: "q"}, {who: name, what: CALL}, {who: "assistant", what: "a"}]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    recipe = tmp_path / "recipe.yaml"
    files = f"path: json, data_files: {rows}"
    recipe.write_text(f"model: {{name_or_path: a/b}}\ndata: {{train: [{{{files}}}]}}\n")
    assert main(["check", str(recipe), "--data"]) == 2
    remedy = capsys.readouterr().err.split("add roles: ")[1].strip().splitlines()[0]
    assert yaml.safe_load(remedy) == {name: role}
    recipe.write_text(f"model: {{name_or_path: a/b}}\ndata: {{train: [{{{files}, roles: {remedy}}}]}}\n")
    assert main(["check", str(recipe), "--data"]) == 0


def test_a_call_of_another_name_is_a_call() -> None:
    layout = RowLayout("messages", roles={"tool_call": "function_call"})
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "tool_call", "content": CALL}]}
    chat = read_row(row, layout)
    assert isinstance(chat, Chat)
    assert chat.messages[1]["role"] == "assistant"
    assert chat.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"rope_scaling": YARN}, "rope_scaling"),
        ({"overrides_of_model_config": {"rope_scaling": YARN}}, "overrides_of_model_config.rope_scaling"),
        (
            {"overrides_of_model_config": {"rope_parameters": {**YARN, "rope_type": "yarn"}}},
            "overrides_of_model_config.rope_parameters",
        ),
    ],
)
def test_rope_scaling_is_carried(values: Values, key: str, tmp_path: Path) -> None:
    """axolotl's places; both spellings of transformers."""
    result = imported(tmp_path, AXOLOTL_LORA_8B | values)
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert result.carried["model.rope_scaling"] == (expected, key)
    assert not [each for each in result.left_out if "rope" in each.key and "liger" not in each.key]


def test_rope_scaling_of_trl_and_of_a_kind_alone(tmp_path: Path) -> None:
    """LLaMA-Factory's factor depends on the base's files."""
    carried = imported(tmp_path, TRL_SHORT | {"model_init_kwargs": {"rope_scaling": YARN}})
    assert value(carried, "model.rope_scaling")["rope_type"] == "yarn"
    named = imported(tmp_path, FACTORY_LLAMA | {"rope_scaling": "yarn"})
    assert "model.rope_scaling" not in named.carried
    (line,) = [each for each in named.left_out if each.key == "rope_scaling"]
    assert (line.level, line.value) == ("look", "yarn")
    assert "model.rope_scaling: {rope_type: yarn, factor: N}" in line.reason


@pytest.mark.parametrize(
    ("values", "tokens"),
    [({}, 4096), ({"tiled_mlp_num_shards": 8, "sequence_len": 65_537}, 8193), ({"lora_dropout": 0.05}, None)],
)
def test_tiled_mlp_is_carried(values: Values, tokens: int | None, tmp_path: Path) -> None:
    """Not beside dropout, with which there are no tiles here; it is another way to compute the same."""
    result = imported(tmp_path, {**AXOLOTL_LORA_8B, "lora_dropout": 0.0, "tiled_mlp": True, **values})
    assert result.carried.get("training.mlp_tile_tokens", (None,))[0] == tokens
