"""Other tools' names for a recipe's settings: axolotl, LLaMA-Factory, TRL, transformers' Trainer, torchtune, unsloth.

A foreign key gets an error with our key. If it has no counterpart, the answer says what to use instead.
"""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from finetune.errors import RecipeError
from finetune.recipe.optimizers import OPTIMIZER_NAMES
from finetune.recipe.yaml_text import shown

# Tools whose whole configurations `finetune import` converts. Single keys of more tools are known below.
Tool = Literal["axolotl", "llamafactory", "trl"]
TOOL_TITLES: dict[Tool, str] = {
    "axolotl": "axolotl",
    "llamafactory": "LLaMA-Factory",
    "trl": "TRL",
}

# Their key -> our dotted key.
RENAMED: dict[str, str] = {
    # axolotl
    "base_model": "model.name_or_path",
    "micro_batch_size": "training.per_device_batch_size",
    "num_epochs": "training.num_train_epochs",
    "sequence_len": "data.max_length",
    "sample_packing": "data.packing",
    "val_set_size": "data.eval: {fraction: ...}",
    "datasets": "data.train",
    "test_datasets": "data.eval",
    "adapter": "lora (a section, or null for full fine-tuning)",
    "lora_r": "lora.r",
    "lora_target_modules": "lora.target_modules",
    "lora_target_linear": "lora.target_modules: all-linear",
    "lora_modules_to_save": "lora.modules_to_save",
    "lora_target_parameters": "lora.target_parameters",
    "lora_rank_pattern": "lora.rank_pattern",
    "lora_alpha_pattern": "lora.alpha_pattern",
    "peft_use_rslora": "lora.use_rslora",
    "peft_use_dora": "lora.use_dora",
    "peft_init_lora_weights": "lora.init_lora_weights",
    "optimizer": "training.optim",
    "lr_scheduler": "training.lr_scheduler_type",
    "cosine_min_lr_ratio": "training.lr_scheduler_kwargs: {min_lr_rate: ...} with cosine_with_min_lr",
    "flash_attention": "model.attention",
    "sdp_attention": "model.attention: sdpa",
    "flex_attention": "model.attention: flex_attention",
    "chat_template_jinja": "data.chat_template",
    "type": "data.train: [{format: ...}]",
    "train_on_inputs": "data.train_on",
    "roles_to_train": "data.train_on",
    "load_in_4bit": "quantization.load_in_4bit",
    "load_in_8bit": "quantization.load_in_8bit",
    "load_in_fp8": "model.load_in_fp8",
    "gradient_checkpointing": "training.activation_checkpointing",
    "torch_compile": "training.compile",
    "fsdp_config": "accelerate_config: fsdp2",
    "saves_per_epoch": "save_steps: a share of the run, 1 / (saves_per_epoch x num_epochs)",
    "evals_per_epoch": "eval_steps: a share of the run, 1 / (evals_per_epoch x num_epochs)",
    "tokenizer_config": "model.name_or_path",
    "special_tokens": "data.chat_template",
    "tokens": "model.add_tokens",
    # LLaMA-Factory
    "model_name_or_path": "model.name_or_path",
    "finetuning_type": "lora (a section, or null for full fine-tuning)",
    "lora_rank": "lora.r",
    "lora_target": "lora.target_modules",
    "additional_target": "lora.modules_to_save",
    "cutoff_len": "data.max_length",
    "template": "data.chat_template",
    "dataset": "data.train",
    "dataset_dir": "data.train: [{data_files: ...}]",
    "eval_dataset": "data.eval",
    "val_size": "data.eval: {fraction: ...}",
    "max_samples": "data.train: [{split: 'train[:1000]'}]",
    "interleave_probs": "data.train: [{weight: ...}]",
    "quantization_bit": "quantization.load_in_4bit",
    "quantization_type": "quantization.bnb_4bit_quant_type",
    "double_quantization": "quantization.bnb_4bit_use_double_quant",
    "flash_attn": "model.attention",
    "mask_history": "data.train_on: completion",
    "plot_loss": "report",
    # TRL and transformers' Trainer
    "per_device_train_batch_size": "training.per_device_batch_size",
    "per_device_eval_batch_size": "training.per_device_batch_size",
    "auto_find_batch_size": "training.per_device_batch_size",
    "max_seq_length": "data.max_length",
    "model_max_length": "data.max_length",
    "dataset_name": "data.train: [{path: ...}]",
    "dataset_config": "data.train: [{name: ...}]",
    "assistant_only_loss": "data.train_on: assistant",
    "completion_only_loss": "data.train_on: completion",
    "padding_free": "model.attention: varlen",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "use_peft": "lora (a section, or null for full fine-tuning)",
    "model_revision": "model.revision",
    "bf16": "training.mixed_precision: bf16",
    "fp16": "training.mixed_precision: fp16",
    "fp8": "training.mixed_precision: bf16",
    "warmup_proportion": "training.warmup_ratio",
    "gradient_clipping": "training.max_grad_norm",
    "deepspeed": "accelerate_config",
    "fsdp": "accelerate_config: fsdp2",
    "ddp_timeout": "timeout_seconds",
    "dataloader_pin_memory": "training.non_blocking",
    "logging_dir": "output_dir",
    "resume_from_checkpoint": "training.resume: auto",
    "overwrite_output_dir": "training.resume: never",
    "early_stopping": "training.early_stopping_patience",
    "data_seed": "training.seed",
    "random_seed": "training.seed",
    "random_state": "training.seed",
    # torchtune
    "checkpointer": "model.name_or_path",
    "lora_attn_modules": "lora.target_modules",
    "apply_lora_to_mlp": "lora.target_modules: all-linear",
    "max_seq_len": "data.max_length",
    "packed": "data.packing",
    "batch_size": "training.per_device_batch_size",
    "epochs": "training.num_train_epochs",
    "max_steps_per_epoch": "training.max_steps",
    "clip_grad_norm": "training.max_grad_norm",
    "enable_activation_checkpointing": "training.activation_checkpointing",
    "log_every_n_steps": "logging_steps",
    "lr": "training.learning_rate",
    "num_warmup_steps": "training.warmup_steps",
    # unsloth
    "use_gradient_checkpointing": "training.activation_checkpointing",
    "dataset_text_field": "data.train: [{columns: {text: ...}}]",
    "field_messages": "data.train: [{columns: {messages: ...}}]",
    "field_system": "data.train: [{columns: {system: ...}}]",
    "column_map": "data.train: [{columns: {...}}]",
    "enable_thinking": "data.train: [{chat_template_kwargs: {enable_thinking: ...}}]",
    "full_finetuning": "lora: null",
    "max_completion_length": "samples.max_new_tokens",
    # preferences
    "rl": "training.objective: dpo or kto",
    "rl_beta": "dpo.beta",
    "pref_beta": "dpo.beta",
    "pref_loss": "dpo.loss_type",
    "pref_ftx": "dpo.sft_weight",
    "rpo_alpha": "dpo.sft_weight",
    "cpo_alpha": "dpo.sft_weight",
    "loss_weights": "dpo.sft_weight (the weight of sft where the other loss has 1)",
    "ref_model": "dpo.reference",
    "kto_chosen_weight": "kto.desirable_weight",
    "kto_rejected_weight": "kto.undesirable_weight",
    # the Hub, as Trainer and axolotl call it
    "push_to_hub": "hub.push",
    "hub_model_id": "hub.repo_id",
    "hub_private_repo": "hub.private",
    "hub_revision": "hub.revision",
}

# Their key -> the answer where no key of ours has its meaning.
REPLACED: dict[str, str] = {
    "gradient_accumulation_steps": "accumulation is derived: set training.global_batch_size, the rows of one step",
    "group_by_length": "rows are packed instead: data.packing: true",
    "pad_to_sequence_len": "nothing is padded: rows hold documents end to end",
    "device_map": "the strategy places the model: accelerate_config",
    "resize_vocab": "the vocabulary grows by itself: model.add_tokens",
    "strict": "a recipe is always strict; remove the key",
    "wandb_project": "write report_to: [wandb]; the project is WANDB_PROJECT in the environment",
    "tf32": "number formats follow training.mixed_precision; remove the key",
    "dataloader_num_workers": "tokenised rows are read from memory-mapped files; remove the key",
    "preprocessing_num_workers": "rows are tokenised once, into a cache; remove the key",
    "remove_unused_columns": "columns that no format reads are named and not used; remove the key",
    "neftune_noise_alpha": "noise on embeddings is not offered; remove the key",
    "stage": "the training is named by training.objective: supervised, dpo or kto",
    "precompute_ref_log_probs": "the reference's log-probabilities are always computed once; remove the key",
    "max_prompt_length": "data.max_length is prompt and answer together; remove the key",
    "do_train": "the command says what is done; remove the key",
    "do_eval": "data.eval turns evaluation on; remove the key",
}


def answer_for(key: str) -> str | None:
    """The text to write instead of another tool's key, or None if no tool has it."""
    if key in RENAMED:
        return f"write {RENAMED[key]}"
    return REPLACED.get(key)


def key_for(key: str) -> str:
    """Our dotted key for another tool's key; empty without a counterpart."""
    return RENAMED.get(key, "").partition(" ")[0].removesuffix(":")


# Other words for our values. A word means the first of ours that the key takes.
OTHER_WORDS: dict[str, tuple[str, ...]] = {
    "false": ("no", "never"),
    "off": ("no", "never"),
    "none": ("no", "never"),
    "true": ("auto", "bf16"),
    "always": ("auto",),
    "half": ("float16", "fp16"),
    "fp16": ("float16",),
    "float16": ("fp16",),
    "bf16": ("bfloat16",),
    "bfloat16": ("bf16",),
    "fp32": ("float32", "no"),
    "float32": ("no",),
    "fp8": ("bf16",),
    "int8": ("uint8",),
    "flash": ("auto",),
    "flash_attn": ("auto",),
    "flash_attention_3": ("auto",),  # where it is installed
    "flash_attention_4": ("auto",),
    "xformers": ("varlen",),
    "chatml": ("messages",),
    "openai": ("messages",),
    "chat_template": ("messages",),
    "conversations": ("sharegpt",),
    "completion": ("text",),
    "instruction": ("alpaca",),
    "left": ("right",),
    "wsd": ("warmup_stable_decay",),
    "last": ("completion",),
    "inputs": ("all",),
    **{word: (name,) for word, name in OPTIMIZER_NAMES.items()},
}


def other_word_for(word: str, choices: Sequence[str]) -> list[str]:
    """The choice that people mean by another tool's word, if there is one."""
    return [choice for choice in OTHER_WORDS.get(word, ()) if choice in choices][:1]


def tool_of(values: Mapping[str, Any]) -> Tool | None:
    """The tool that reads a configuration, by keys that no other tool has; None for any other page."""
    if any(isinstance(values.get(section), Mapping) for section in ("model", "data")):
        return None  # a recipe, perhaps with a few keys of another tool
    if "base_model" in values:
        return "axolotl"
    if {"finetuning_type", "cutoff_len", "template", "dataset_dir"} & set(values):
        return "llamafactory"
    if {"model_name_or_path", "per_device_train_batch_size"} & set(values):
        return "trl"  # or transformers' Trainer, whose TrainingArguments are TRL's too
    return None


# Key -> the training that the key asks for. No tool's supervised fine-tuning uses these keys.
_PREFERENCES, _LOSS = "its own kind of preference training", "another preference loss"
_REWARDS = "training by rewards"
_OTHER_TRAINING: dict[Tool, dict[str, str]] = {
    "axolotl": {
        "rl": "training by rewards or by odds ratios",
        "reward_model": "a reward model's training",
        "process_reward_model": "a reward model's training",
        "qat": "training for quantised weights",
        "num_labels": "a classifier's training",
    },
    "llamafactory": {},
    "trl": dict.fromkeys(
        "reward_model_path reward_funcs reward_weights num_generations max_completion_length scale_rewards "
        "steps_per_generation reward_clip_range use_vllm".split(),
        _REWARDS,
    )
    | {"center_rewards_coefficient": "a reward model's training"},
}
# With one of these values a key asks for training that a recipe offers, or for nothing.
_NO_TRAINING = (None, False, "", "sft", "pt", "dpo", "ipo", "kto", "simpo")


def other_training(tool: Tool, values: Mapping[str, Any]) -> tuple[str, str] | None:
    """The key that asks for another kind of training, and that kind; None for one that a recipe offers."""
    is_simpo = "simpo" in str(values.get("loss_type"))  # that TRL's trainer may limit the answer's length for
    for key, training in _OTHER_TRAINING[tool].items():
        if key == "max_completion_length" and is_simpo:
            continue
        if values.get(key) not in (*_NO_TRAINING, [], {}):
            return key, training
    stage, loss_types = values.get("stage"), values.get("loss_type")
    if tool == "llamafactory" and stage not in _NO_TRAINING:
        return "stage", {"rm": "a reward model's training", "ppo": _REWARDS}.get(str(stage), _PREFERENCES)
    if tool == "llamafactory" and stage == "dpo" and values.get("pref_loss") in ("hinge", "orpo"):
        return "pref_loss", _LOSS
    if not isinstance(loss_types, list):
        loss_types = [loss_types]
    names = {name for name in loss_types if isinstance(name, str)} if tool == "trl" else set()
    for known, training in ((_REWARD_LOSSES, _REWARDS), (_OTHER_LOSSES, _LOSS)):
        if names & known:
            return "loss_type", training
    return None


# TRL's names for losses that are not offered.
_REWARD_LOSSES = frozenset("grpo dr_grpo dapo bnpo cispo sapo luspo vespo".split())
_OTHER_LOSSES = frozenset(
    "hinge exo_pair nca_pair bco_pair sppo_hard aot aot_pair aot_unpaired discopop apo_down sigmoid_norm "
    "apo_zero_unpaired alphapo".split()
)


def refuse_other_training(file: pathlib.Path, tool: Tool, values: Mapping[str, Any]) -> None:
    """Raise RecipeError if a configuration asks for a kind of training that no recipe offers."""
    found = other_training(tool, values)
    if found is None:
        return
    key, training = found
    raise RecipeError(
        [
            f"{file}: {key}: is {shown(values[key])}; this kit trains on answers and on preferences (dpo, kto), and "
            f"this file asks for {training}: keep {TOOL_TITLES[tool]} for it, or choose a recipe by: finetune list"
        ]
    )


def refuse_torchtune(file: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Raise RecipeError for a configuration of torchtune, which names a Python class as `_component_` of a section."""
    if any(isinstance(value, Mapping) and "_component_" in value for value in values.values()):
        raise RecipeError(
            [
                f"{file}: is a configuration of torchtune, which 0.1.0 was the last release to read; import it with "
                "that release, or write a recipe for its rows: finetune init ROWS"
            ]
        )


def refuse_configuration_of_a_tool(file: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Raise RecipeError for another tool's configuration, with the command that converts it."""
    refuse_torchtune(file, values)
    tool = tool_of(values)
    if tool is None:
        return
    refuse_other_training(file, tool, values)
    name, first = TOOL_TITLES[tool], ""
    if tool == "trl":
        name = "TRL or transformers' Trainer"
        if "model_name_or_path" not in values:  # TrainingArguments without the arguments of their script
            first = "add model_name_or_path and dataset_name, then "
    command = shlex.join(["finetune", "import", str(file), "-o", str(file.with_name(f"{file.stem}_recipe.yaml"))])
    raise RecipeError(
        [
            f"{file}: is a configuration of {name}, not a recipe; {first}convert it, with --gpus 4x24GB or the like "
            f"where it was written for more than one GPU: {command}"
        ]
    )
