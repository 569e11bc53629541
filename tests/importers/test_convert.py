"""`finetune import`: real configurations of three other tools become recipes, and nothing they say is dropped."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from finetune.cli.main import main
from finetune.data.chat import read_row
from finetune.data.layout import RowLayout
from finetune.errors import RecipeError
from finetune.importers import Imported, Level, convert, hf_trainer, known_tool, trl
from finetune.importers.foreign_config import UNKNOWN, reason_for, recipe_default
from finetune.importers.recipe_writer import written
from finetune.importers.shared import TEMPLATES
from finetune.recipe.foreign_keys import TOOL_TITLES, covers_key, foreign_keys, known_keys
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Data, DataSet
from finetune.recipe.yaml_text import parse
from finetune.tokens.encoder import Encoder
from tests.support.models.tiny import tiny_tokenizer
from tests.support.rows.others_configs import (
    ABSENT,
    AXOLOTL_FULL,
    AXOLOTL_LORA_8B,
    EXAMPLES,
    FACTORY_LLAMA,
    TRL_SHORT,
    Values,
)

BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
# What is so anyway, in their words: taking it away must change nothing.
SO_ANYWAY: dict[str, tuple[Any, ...]] = {
    "load_in_4bit": (False,), "load_in_8bit": (False,), "val_set_size": (0,), "field_messages": ("conversations",),
    "role": ("from",), "content": ("value",), "micro_batch_size": (1,), "gradient_accumulation_steps": (1,),
    "stage": ("sft",), "finetuning_type": ("lora",), "pissa_iter": (16,), "columns": ("messages",), "weight": (1.0,),
    "max_steps": (-1,), "save_strategy": ("steps",), "dataset_train_split": ("train",), "dataset_test_split": ("test",),
    "seed": (0,),
    "activation_checkpointing": (False,), "offload_params": (False,), "reshard_after_forward": (True,),
    "sharding_strategy": ("FULL_SHARD",), "report_to": ("none",), "fsdp_sharding_strategy": ("FULL_SHARD",),
}  # fmt: skip


def imported(tmp_path: Path, values: Values, *, gpus: str | None = None, tool: str | None = None) -> Imported:
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False), "utf-8")
    return convert(file, tool=known_tool(tool), gpus=gpus)


def value(result: Imported, key: str) -> Any:
    return result.carried[key][0] if key in result.carried else ABSENT


def test_as_many_real_configurations_as_promised() -> None:
    assert len(EXAMPLES) >= 10
    assert {example.tool for example in EXAMPLES.values()} == {"axolotl", "llamafactory", "trl"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_real_configuration_becomes_this_recipe(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = EXAMPLES[name]
    result = imported(tmp_path, example.values, gpus=example.gpus)
    assert result.tool == example.tool, "found by its keys"
    assert {key: value(result, key) for key in example.recipe} == example.recipe
    levels: dict[str, set[str]] = {"differs": set(), "look": set(), "same": set()}
    for entry in result.left_out:
        levels[entry.level].add(entry.key)
    assert levels["differs"] == example.differs
    assert levels["look"] == example.look
    file = tmp_path / "ours.yaml"
    file.write_text(result.text, "utf-8")
    assert main(["check", str(file)]) == 0, capsys.readouterr().err


def leaves(values: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(values, (dict, list)) and values:
        for key, inner in values.items() if isinstance(values, dict) else enumerate(values):
            yield from leaves(inner, (*path, key))
    elif values not in (None, "", [], {}):
        yield path


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_that_they_say_is_dropped(name: str, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    full_text = imported(tmp_path, example.values, gpus=example.gpus).text
    checked = 0
    for path in leaves(example.values):
        without = copy.deepcopy(example.values)
        holder: Any = without
        for part in path[:-1]:
            holder = holder[part]
        dropped, name = holder.pop(path[-1]), next(str(part) for part in reversed(path) if isinstance(part, str))
        try:
            shorter = imported(tmp_path, without, gpus=example.gpus, tool=example.tool).text
        except RecipeError:
            continue  # a recipe needs it
        checked += 1
        assert shorter != full_text or dropped in SO_ANYWAY.get(name, ()), f"{path} leaves no trace"
    assert checked >= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_whatever_stands_in_a_value_the_answer_is_a_recipe_or_one_line(name: str, tmp_path: Path) -> None:
    example, draw = EXAMPLES[name], random.Random(name)
    refused: list[str] = []
    odd: list[Any] = [[1], {"a": 1}, "x", "a,b", -1, 0, 0.5, 1e9, True]
    for path in leaves(example.values):
        strange = copy.deepcopy(example.values)
        holder: Any = strange
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = draw.choice(odd)
        try:
            imported(tmp_path, strange, gpus=example.gpus, tool=example.tool)
        except RecipeError as error:
            refused += error.mistakes
    assert refused
    assert not [mistake for mistake in refused if "\n" in mistake or "theirs.yaml" not in mistake]


def test_the_recipe_says_what_its_comments_say(tmp_path: Path) -> None:
    text = imported(tmp_path, AXOLOTL_LORA_8B, gpus="4x80GB").text
    assert "global_batch_size: 32  # micro_batch_size 2 x gradient_accumulation_steps 4 x 4 GPUs" in text
    assert "truncation: drop  # axolotl's default" in text
    assert "eval_steps: 0.0625  # evals_per_epoch 4 x num_epochs 4\n" in text
    assert "#   another way to compute the same:\n#     tf32: false\n" in text


@pytest.mark.slow
def test_the_defaults_written_out_are_those_of_the_installed_libraries() -> None:
    from transformers import TrainingArguments
    from trl import ModelConfig, SFTConfig

    installed = {name: TrainingArguments.__dataclass_fields__[name].default for name in hf_trainer.TRAINER_DEFAULTS}
    assert installed == hf_trainer.TRAINER_DEFAULTS
    both = {**ModelConfig.__dataclass_fields__, **SFTConfig.__dataclass_fields__}
    assert {name: both[name].default for name in trl.TRL_DEFAULTS} == trl.TRL_DEFAULTS


def test_each_line_of_the_table_decides_about_its_own_key() -> None:
    """Whatever the order of lines: where two match, as log_* and the key itself, the more specific one decides."""
    for known in known_keys():
        key = known.key.replace(".*", ".x").replace("*", "x")
        assert reason_for(key, value=True) == (known.kind, known.text), key


def test_each_table_has_each_key_once_in_an_order() -> None:
    lines, kinds = foreign_keys(), ("ours", "instead", "refused")
    for asked in (kinds[:2], *[(kind,) for kind in kinds], get_args(Level)):
        keys = [line.key for line in lines if line.kind in asked]
        assert len(set(keys)) == len(keys), [key for key in keys if keys.count(key) > 1]
    assert len([line for line in lines if line.kind in get_args(Level)]) > 250
    assert {line.kind for line in lines} == {*kinds, *get_args(Level)}
    assert {line.tool for line in lines} == {*TOOL_TITLES, "transformers", "torchtune", "unsloth", "several", "older"}


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["transformers", "trl"])
def test_the_installed_libraries_still_have_their_keys(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line whose key was renamed upstream turns red, and then belongs to `older`."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from transformers import TrainingArguments
    from trl import DPOConfig, KTOConfig, ModelConfig, ScriptArguments, SFTConfig
    from trl.experimental.cpo import CPOConfig

    of_trl = [SFTConfig, DPOConfig, KTOConfig, CPOConfig, ModelConfig, ScriptArguments]
    kinds = [TrainingArguments] if tool == "transformers" else of_trl
    names = {name for kind in kinds for name in kind.__dataclass_fields__}
    lines = [known for known in known_keys() if known.tool == tool]
    assert len(lines) > 10
    missing = [
        known.key
        for known in lines
        if not any(covers_key(known, name) or covers_key(known, f"{name}.x") for name in names)
    ]
    assert missing == []


@pytest.mark.slow
def test_every_argument_of_the_installed_trl_is_read_or_has_its_reason(tmp_path: Path) -> None:
    from trl import DPOConfig, KTOConfig, ModelConfig, ScriptArguments, SFTConfig

    trainers = {SFTConfig: {}, DPOConfig: {"loss_type": "sigmoid"}, KTOConfig: {"loss_type": "kto"}}
    arguments = [
        (TRL_SHORT | own, name)
        for trainer, own in trainers.items()
        for name in sorted(
            {name for kind in (trainer, ModelConfig, ScriptArguments) for name in kind.__dataclass_fields__}
        )
    ]
    assert len(arguments) > 400
    unknown = set()
    for values, name in arguments:
        if name in TRL_SHORT:
            continue
        try:
            result = imported(tmp_path, values | {name: "7"}, tool="trl")
        except RecipeError:
            continue  # read, and no number
        unknown |= {entry.key for entry in result.left_out if entry.reason == UNKNOWN}
    assert unknown == set()


@pytest.mark.parametrize(
    ("gpus", "keys", "expected"),
    [
        ("80GB", {}, "single"),
        ("4x80GB", {}, "ddp"),
        ("4x80GB", {"deepspeed": "deepspeed_configs/zero1.json"}, "zero1"),
        ("4x80GB", {"deepspeed": "ds_z2_offload_config.json"}, "zero2_offload"),
        ("4x80GB", {"deepspeed": "zero3_bf16_cpuoffload_all.json"}, "zero3_offload"),
        ("80GB", {"deepspeed": "zero3_bf16_cpuoffload_all.json"}, "zero3_offload"),
        ("80GB", {"deepspeed": "zero3_bf16.json"}, "single"),
        ("4x80GB", {"deepspeed": "examples/deepspeed/ds_z0_config.json"}, "ddp"),
        (
            "4x80GB",
            {"deepspeed": {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}},
            "zero3_nvme",
        ),
        ("4x80GB", {"fsdp": "full_shard auto_wrap"}, "fsdp2"),
        ("4x80GB", {"fsdp": ["full_shard", "offload"]}, "fsdp2_offload"),
        *(
            ("4x80GB", {"fsdp_config": {key: True}}, "fsdp2_offload")
            for key in ("cpu_offload", "fsdp_cpu_offload", "offload_params", "fsdp_offload_params")
        ),
        ("4x80GB", {"fsdp": "full_shard", "fsdp_config": {"cpu_offload": False}}, "fsdp2"),
        ("4x80GB", {"fsdp_config": {"reshard_after_forward": False}}, "fsdp2_grad_op"),
        ("4x80GB", {"fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, "ddp"),
        ("2x8x80GB", {"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, "hsdp"),
        ("8x80GB", {"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}, "fsdp2"),
    ],
)
def test_the_strategy(gpus: str, keys: Values, expected: str, tmp_path: Path) -> None:
    result = imported(tmp_path, FACTORY_LLAMA | keys, gpus=gpus)
    assert value(result, "accelerate_config") == expected


def test_a_deepspeed_file_that_is_here_is_read(tmp_path: Path) -> None:
    settings = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    result = imported(tmp_path, FACTORY_LLAMA | {"deepspeed": "mine.json"}, gpus="4x80GB")
    assert value(result, "accelerate_config") == "zero2_offload"
    assert "deepspeed" not in {entry.key for entry in result.left_out}


def test_llama_factorys_list_of_data_sets_is_read(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    listed = {
        "identity": {"file_name": "identity.json"},
        "alpaca_en_demo": {"hf_hub_url": "org/chats", "formatting": "sharegpt", "columns": {"messages": "messages"}},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(listed))
    result = imported(tmp_path, FACTORY_LLAMA)
    files = {"path": "json", "data_files": "data/identity.json", "split": "train[:1000]", "format": "alpaca"}
    chats = {"path": "org/chats", "split": "train[:1000]", "format": "sharegpt"}
    chats |= {"columns": {"conversations": "messages"}}  # their turns have from and value where no tags say otherwise
    assert value(result, "data.train") == [files, chats]
    assert "dataset" not in {entry.key for entry in result.left_out}


def factory_set(folder: Path, known: Values, **keys: Any) -> Any:
    """The entry of data.train for one data set of LLaMA-Factory's dataset_info.json."""
    (folder / "data").mkdir()
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"mine": {"hf_hub_url": "org/mine", **known}}))
    (entry,) = value(imported(folder, FACTORY_LLAMA | {"dataset": "mine", "max_samples": None, **keys}), "data.train")
    return entry


@pytest.mark.parametrize(
    ("known", "keys", "expected"),
    [
        (
            {"columns": {"prompt": "q", "query": "c", "response": "a", "system": "s", "history": "h"}}, {},
            {"format": "alpaca", "columns": {
                "instruction": "q", "input": "c", "output": "a", "history": "h", "system": "s"}},
        ),
        ({"columns": {"prompt": "instruction", "history": "history"}}, {}, {"format": "alpaca"}),
        ({"columns": {"prompt": "content"}}, {"stage": "pt"}, {"format": "text", "columns": {"text": "content"}}),
        (
            {"formatting": "sharegpt", "columns": {"messages": "turns"}, "tags": {
                "role_tag": "role", "content_tag": "content", "user_tag": "Q", "assistant_tag": "assistant"}},
            {}, {"format": "messages", "columns": {"messages": "turns"}, "roles": {"Q": "user"}},
        ),
        ({"formatting": "sharegpt", "columns": {"tools": "functions"}}, {},
         {"format": "sharegpt", "columns": {"tools": "functions"}}),
    ],
)  # fmt: skip
def test_llama_factorys_columns_and_tags(known: Values, keys: Values, expected: Values, tmp_path: Path) -> None:
    assert factory_set(tmp_path, known, **keys) == {"path": "org/mine", **expected}


@pytest.mark.parametrize(
    ("their_set", "expected"),
    [
        (
            {"type": "chat_template", "field_messages": "dialog", "field_system": "persona",
             "roles": {"user": ["human", "asker"], "assistant": ["assistant"]}},
            {"format": "messages", "columns": {"messages": "dialog", "system": "persona"},
             "roles": {"human": "user", "asker": "user"}},
        ),
        (
            {"type": "chat_template", "field_messages": "messages", "message_field_role": "from",
             "message_field_content": "value", "roles": {"user": ["human"], "assistant": ["gpt", "bot"]}},
            {"format": "sharegpt", "columns": {"conversations": "messages"}, "roles": {"bot": "assistant"}},
        ),
        ({"type": "completion", "field": "body"}, {"format": "text", "columns": {"text": "body"}}),
        (
            {"type": {"field_instruction": "q", "field_output": "a", "format": "[INST] {instruction} [/INST]"}},
            {"format": "alpaca", "columns": {"instruction": "q", "output": "a"}},
        ),
    ],
)  # fmt: skip
def test_axolotls_columns_and_roles(their_set: Values, expected: Values, tmp_path: Path) -> None:
    values = AXOLOTL_LORA_8B | {"datasets": [{"path": "org/mine", **their_set}]}
    assert value(imported(tmp_path, values), "data.train") == [{"path": "org/mine", **expected}]
    given = imported(tmp_path, values | {"chat_template_kwargs": {"enable_thinking": False}})
    entry = {"path": "org/mine", **expected, "chat_template_kwargs": {"enable_thinking": False}}
    assert value(given, "data.train") == [entry]


def test_trls_text_column(tmp_path: Path) -> None:
    result = imported(tmp_path, TRL_SHORT | {"dataset_text_field": "body"})
    assert all(entry["columns"] == {"text": "body"} for entry in value(result, "data.train"))


def test_each_tools_own_defaults_where_the_file_says_nothing(tmp_path: Path) -> None:
    """By their sources, at the versions that the converters name; ours are others."""
    left_out = {
        "axolotl": (AXOLOTL_LORA_8B, ("lora_r", "lora_alpha", "lora_dropout"), (8, 8, 0.0)),
        "LLaMA-Factory": (FACTORY_LLAMA, ("lora_rank", "lora_alpha", "lora_dropout"), (8, 16, 0.0)),
        "TRL": (TRL_SHORT | {"use_peft": True}, ("lora_r", "lora_alpha", "lora_dropout"), (16, 32, 0.05)),
    }
    for tool, (values, keys, expected) in left_out.items():
        result = imported(tmp_path, values | dict.fromkeys(keys))
        found = [value(result, f"lora.{key}") for key in ("r", "lora_alpha", "lora_dropout")]
        ours = [recipe_default(f"lora.{key}") for key in ("r", "lora_alpha", "lora_dropout")]
        assert [own if each is ABSENT else each for each, own in zip(found, ours, strict=True)] == [*expected], tool


@pytest.mark.parametrize(
    ("values", "more", "key", "expected"),
    [
        (AXOLOTL_LORA_8B, {"train_on_inputs": True}, "data.train_on", "all"),
        (AXOLOTL_LORA_8B, {"excess_length_strategy": "raise"}, "data.truncation", "error"),
        (AXOLOTL_LORA_8B, {"max_grad_norm": 0.0}, "training.max_grad_norm", None),
        (AXOLOTL_LORA_8B, {"bf16": False, "fp16": True}, "model.dtype", "float16"),
        (AXOLOTL_LORA_8B, {"warmup_ratio": None}, "training.warmup_ratio", 0.03),
        (AXOLOTL_LORA_8B, {"context_parallel_size": 2}, "training.global_batch_size", 16),
        (AXOLOTL_LORA_8B, {"optimizer": "lion_8bit"}, "training.optim", "adamw"),
        (AXOLOTL_LORA_8B, {"hub_model_id": "me/mine"}, "hub.push", True),
        (AXOLOTL_LORA_8B, {"lora_model_dir": "./earlier"}, "model.adapter", "./earlier"),
        (FACTORY_LLAMA, {"adapter_name_or_path": "me/earlier"}, "model.adapter", "me/earlier"),
        (AXOLOTL_FULL, {"chat_template": "chatml"}, "data.chat_template", TEMPLATES["chatml"]),
        (FACTORY_LLAMA, {"mask_history": True}, "data.train_on", "completion"),
        (FACTORY_LLAMA, {"warmup_ratio": None, "warmup_steps": 0.2}, "training.warmup_ratio", 0.2),
        (FACTORY_LLAMA, {"lora_target": "q_proj, v_proj"}, "lora.target_modules", ["q_proj", "v_proj"]),
        (FACTORY_LLAMA, {"lora_rank": 64}, "lora.lora_alpha", 128),
        (FACTORY_LLAMA, {"disable_gradient_checkpointing": True}, "training.activation_checkpointing", False),
        (FACTORY_LLAMA, {"packing": True}, "data.packing", True),
        (TRL_SHORT, {"assistant_only_loss": True}, "data.train_on", "assistant"),
        (TRL_SHORT, {"completion_only_loss": True}, "data.train_on", "completion"),
        (TRL_SHORT, {"bf16": False}, "training.mixed_precision", "no"),
        (TRL_SHORT, {"fp16": True}, "training.mixed_precision", "fp16"),
        (TRL_SHORT, {"use_peft": True, "load_in_8bit": True}, "training.pure_bf16", True),
        (FACTORY_LLAMA, {"adam_beta1": 0.8}, "training.adam_beta1", 0.8),
        (AXOLOTL_LORA_8B, {"adam_beta2": 0.95}, "training.adam_beta2", 0.95),
        (AXOLOTL_LORA_8B, {"adam_epsilon": 1e-5}, "training.adam_epsilon", 1e-5),
        (AXOLOTL_LORA_8B, {"saves_per_epoch": 2}, "save_steps", 0.125),
        (AXOLOTL_LORA_8B, {"evals_per_epoch": 1, "num_epochs": 1}, "eval_steps", ABSENT),
        (FACTORY_LLAMA, {"eval_steps": 0.2}, "eval_steps", 0.2),
        (FACTORY_LLAMA, {"val_size": 0.1} | BEST, "training.load_best_model_at_end", True),
        (FACTORY_LLAMA, {"val_size": 0.1, "eval_steps": 50} | BEST, "save_steps", 50),
        (FACTORY_LLAMA, {"val_size": 0.1, "early_stopping_steps": 3, "eval_steps": 50}, "save_steps", 50),
    ],
)
def test_one_key_more(values: Values, more: Values, key: str, expected: Any, tmp_path: Path) -> None:
    if id(values) not in WITHOUT_MORE:
        WITHOUT_MORE[id(values)] = imported(tmp_path, values, gpus="4x80GB")
    assert value(WITHOUT_MORE[id(values)], key) != expected
    assert value(imported(tmp_path, values | more, gpus="4x80GB"), key) == expected


# Imports of configurations to which one key is added, by their identity.
WITHOUT_MORE: dict[int, Imported] = {}


@pytest.mark.parametrize(
    ("values", "more", "text"),
    [
        (AXOLOTL_LORA_8B, {"rl": "grpo"}, "rl: is grpo; this kit trains on answers and on preferences"),
        (AXOLOTL_LORA_8B, {"datasets": None}, "datasets: is None; a list of data sets is needed"),
        (AXOLOTL_LORA_8B, {"datasets": "rows.json"}, "a list of data sets is needed"),
        (AXOLOTL_LORA_8B, {"lora_r": -3}, "lora_r: lora.r: "),
        (AXOLOTL_LORA_8B, {"learning_rate": "fast"}, "learning_rate: training.learning_rate: "),
        (AXOLOTL_LORA_8B, {"micro_batch_size": "two"}, "micro_batch_size: is two; write a whole number above 0"),
        (FACTORY_LLAMA, {"stage": "ppo"}, "stage: is ppo; this kit trains on answers"),
        (FACTORY_LLAMA, {"finetuning_type": "freeze"}, "only full and lora are offered"),
        (FACTORY_LLAMA, {"quantization_bit": 3}, "quantization_bit: is 3; 4 and 8 are offered"),
        (FACTORY_LLAMA, {"lora_rank": {"a": 1}}, "lora_rank: lora.r: "),
        (TRL_SHORT, {"dataset_name": None}, "dataset_name: is None; a data set is needed"),
        (TRL_SHORT, {"lr_scheduler_kwargs": "half"}, "lr_scheduler_kwargs: is half; write a section"),
        ({"model": {}, "data": {}}, {}, "is already a recipe; check it by: finetune check"),
        ({"learning_rate": 1.0}, {}, "name the tool by --tool"),
        (
            {"model_name_or_path": "a/b", "template": "qwen", "export_dir": "x"},
            {},
            "is no training's configuration: it ",
        ),
        ({"base_model": "a/b", "merge_method": "slerp"}, {}, "names no data set and no setting of a training; import"),
    ],
)
def test_a_mistake_is_one_line(
    values: Values, more: Values, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(values | more))
    assert main(["import", str(file)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert text in output.err
    assert str(file) in output.err
    assert len(output.err.splitlines()) == 1


def test_two_mistakes_show_no_secret_and_no_file_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "hf_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eFgH"
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(AXOLOTL_LORA_8B | {"learning_rate": secret, "lora_r": -3}))
    assert main(["import", str(file)]) == 2
    lines = capsys.readouterr().err
    assert "learning_rate: training.learning_rate: " in lines
    assert "lora_r: lora.r: " in lines
    assert secret not in lines
    assert "recipe.yaml" not in lines


@pytest.mark.parametrize(
    ("more", "level", "reason"),
    [
        ({"load_best_model_at_end": True}, "look", "needs held-out rows; add data.eval: {fraction: 0.05}, and"),
        ({"val_size": 0.1, "metric_for_best_model": "accuracy"}, "differs", "the held-out loss over all rows decides"),
    ],
)
def test_a_best_that_nothing_here_measures(more: Values, level: Level, reason: str, tmp_path: Path) -> None:
    left_out = {entry.key: entry for entry in imported(tmp_path, FACTORY_LLAMA | more).left_out}
    entry = left_out[list(more)[-1]]
    assert (entry.level, entry.reason.startswith(reason)) == (level, True)


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "", "a: 1\na: 2\n"])
def test_what_is_no_page_of_keys(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(text)
    assert main(["import", str(file)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["import", str(tmp_path / "gone.yaml")]) == 2
    assert main(["import", str(file), "--tool", "unsloth"]) == 2
    assert "write one of axolotl" in capsys.readouterr().err


def test_json_is_one_object_with_the_whole_account(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(AXOLOTL_FULL))
    assert main(["import", str(file), "--gpus", "4x80GB", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["tool"] == "axolotl"
    assert result["carried"]["training.global_batch_size"]["value"] == 32
    assert {"key", "value", "level", "reason"} == set(result["left_out"][0])


def test_the_written_recipe_replaces_only_one_of_its_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, recipe = tmp_path / "theirs.yaml", tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(TRL_SHORT))
    for _ in range(2):
        assert main(["import", str(file), "-o", str(recipe)]) == 0
    assert "completion_only_loss" in capsys.readouterr().out
    assert load_recipe(recipe).recipe.training.learning_rate == 0.0001
    recipe.write_text("# my own\n")
    assert main(["import", str(file), "-o", str(recipe)]) == 2
    assert recipe.read_text() == "# my own\n"


def test_quantised_weights_fit_the_strategy(tmp_path: Path) -> None:
    sharded = FACTORY_LLAMA | {"fsdp": "full_shard", "quantization_bit": 4}
    storage = "quantization.bnb_4bit_quant_storage"
    assert value(imported(tmp_path, sharded, gpus="4x80GB"), storage) == "bfloat16"
    assert value(imported(tmp_path, sharded | {"bf16": False, "fp16": True}, gpus="4x80GB"), storage) == "float16"
    assert value(imported(tmp_path, sharded), storage) is ABSENT
    result = imported(tmp_path, sharded | {"quantization_bit": 8}, gpus="4x80GB")
    assert value(result, "accelerate_config") == "ddp", "int8 weights are not sharded"
    assert "fsdp" in {entry.key for entry in result.left_out if entry.level == "look"}


def test_the_guides_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "guide.md").read_text("utf-8")
    lines = [line for line in guide.splitlines() if line.startswith("finetune import ")]
    commands = [line.split("#")[0].split() for line in lines]
    assert (len(commands), len(lines)) == (2, 2)
    monkeypatch.chdir(tmp_path)
    Path("axolotl.yml").write_text(yaml.safe_dump(AXOLOTL_LORA_8B))
    for words in commands:
        assert main(words[1:]) == 0
    output = capsys.readouterr().out
    for line in guide[guide.index("finetune import ") :].split("```")[2].strip().splitlines()[1:]:
        assert line in output


def test_a_token_of_theirs_is_not_shown(tmp_path: Path) -> None:
    converted = imported(
        tmp_path, FACTORY_LLAMA | {"hf_hub_token": "hf_aaaaaaaaaaaaaaaaaaaaaaaa", "swanlab_api_key": "k3y"}
    )
    assert "hf_hub_token" in converted.text
    assert "hf_aaaa" not in converted.text + json.dumps(converted.as_json())
    assert "k3y" not in converted.text


def test_packing_that_splits_documents_is_another_training(tmp_path: Path) -> None:
    for packing, level in (("bfd", set()), ("wrapped", {"differs"})):
        result = imported(tmp_path, TRL_SHORT | {"packing": True, "packing_strategy": packing})
        assert {entry.level for entry in result.left_out if entry.key == "packing_strategy"} == level


def test_a_key_that_no_tool_has(tmp_path: Path) -> None:
    result = imported(tmp_path, AXOLOTL_LORA_8B | {"surprise": 1})
    assert [entry.reason for entry in result.left_out if entry.key == "surprise"] == [UNKNOWN]
    assert reason_for("surprise", 1)[0] == "differs"
    assert reason_for("surprise", False)[0] == "look"


@pytest.mark.parametrize("thing", [2e-05, 1e5, "no", "1e-4", "a: b", "#", "{{ x }}\n", "", None, True, [1, "on"]])
def test_values_are_written_so_that_they_are_read_again(thing: Any) -> None:
    text = written(thing)
    assert "\n" not in text
    assert parse(f"k: {text}").value == {"k": thing}
    assert yaml.safe_load(f"k: {text}") == {"k": thing}


ASKED = "### Instruction:\nWhat is it?\n\n### Response:"
OPENING = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
USER = "<|start_header_id|>user<|end_header_id|>\n\n"
ASSISTANT = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
ROWS = {
    "llama3": (f"{USER}What is it?{ASSISTANT}", "<|eot_id|>"),
    "chatml": ("<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
    "alpaca": (f"{OPENING}{ASKED}\n", "<|im_end|>"),
    "alpaca_turns": (f"{OPENING}{ASKED}\n", "<|im_end|>"),
    "llama3_alpaca": (f"{USER}{OPENING}{ASKED}{ASSISTANT}", "<|eot_id|>"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_their_templates_and_what_is_learned_in_them(name: str) -> None:
    (prompt, end), answer = ROWS[name], "a boat"
    data = Data(train=[DataSet(path="-")], chat_template=TEMPLATES[name])
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]}
    )
    row = read_row({"instruction": "What is it?", "output": answer}, RowLayout("alpaca"))
    script = Encoder(tokenizer, data).script(row)
    assert script.text.startswith(prompt + answer + end)
    start, stop = script.supervised[0]
    assert script.text[start:stop] == answer + end
    assert len(script.supervised) == 1


def test_recipe_defaults_are_the_recipes() -> None:
    assert recipe_default("training.learning_rate") == 2e-4
    assert recipe_default("lora.lora_alpha") == 32


@pytest.mark.parametrize(
    ("theirs", "remedy"),
    [("tRUE", "tRUE is not a truth value, write true"), ("Yes", "Yes is not a truth value, write true")],
)
def test_a_truth_value_that_yaml_does_not_know_names_its_remedy(theirs: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"sample_packing: data\.packing: is {theirs}; .*{remedy}$"):
        imported(tmp_path, AXOLOTL_LORA_8B | {"sample_packing": theirs})
    assert value(imported(tmp_path, AXOLOTL_LORA_8B | {"sample_packing": True}), "data.packing") is True
