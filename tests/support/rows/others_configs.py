"""Configurations that other tools ship as examples for Llama 3, by key and value: what `finetune import` must read.

What they say of logging and of paths is shortened; every key of each is here. For each: how many GPUs it is run on, the
lines that its recipe must have, and the keys that must be listed as changing the training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Values = dict[str, Any]
ABSENT = object()  # this line must not be in the recipe: ours does the same without it


@dataclass(frozen=True)
class Example:
    """One configuration, and what must become of it."""

    tool: str
    values: Values
    gpus: str
    recipe: Values
    differs: frozenset[str] = field(default_factory=frozenset)
    look: frozenset[str] = field(default_factory=frozenset)


WANDB: Values = dict.fromkeys("wandb_project wandb_entity wandb_watch wandb_name wandb_log_model".split())
AXOLOTL: Values = WANDB | {
    "num_epochs": 4, "lr_scheduler": "cosine", "bf16": "auto", "tf32": False, "gradient_checkpointing": True,
    "resume_from_checkpoint": None, "logging_steps": 1, "attn_implementation": "flash_attention_2",
    "warmup_ratio": 0.1, "evals_per_epoch": 4, "saves_per_epoch": 1, "weight_decay": 0.0,
    "dataset_prepared_path": None, "special_tokens": {"pad_token": "<|end_of_text|>"},
}  # fmt: skip
FSDP: Values = {
    "fsdp": ["full_shard", "auto_wrap"],
    "fsdp_config": {
        "fsdp_limit_all_gathers": True, "fsdp_sync_module_states": True, "fsdp_offload_params": True,
        "fsdp_use_orig_params": False, "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_sharding_strategy": "FULL_SHARD",
    },
}  # fmt: skip
LORA: Values = {
    "lora_model_dir": None,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
}
LIGER: Values = {
    "plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rope": True, "liger_rms_norm": True,
    "liger_glu_activation": True, "liger_fused_linear_cross_entropy": True,
}  # fmt: skip
SEVEN = ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"]
AXOLOTL_LORA_8B: Values = AXOLOTL | LORA | {
    "base_model": "NousResearch/Meta-Llama-3-8B", "model_type": "LlamaForCausalLM", "tokenizer_type": "AutoTokenizer",
    "load_in_8bit": True, "load_in_4bit": False, "datasets": [{"path": "mhenrichsen/alpaca_2k_test", "type": "alpaca"}],
    "val_set_size": 0.05, "output_dir": "./outputs/lora-out", "sequence_len": 4096, "sample_packing": True,
    "eval_sample_packing": False, "adapter": "lora", "lora_modules_to_save": ["embed_tokens", "lm_head"],
    "gradient_accumulation_steps": 4, "micro_batch_size": 2, "optimizer": "adamw_bnb_8bit", "learning_rate": 2e-4,
}  # fmt: skip
AXOLOTL_QLORA: Values = AXOLOTL | LORA | {
    "base_model": "NousResearch/Meta-Llama-3-8B", "model_type": "AutoModelForCausalLM",
    "tokenizer_type": "AutoTokenizer", "load_in_8bit": False, "load_in_4bit": True,
    "datasets": [{"path": "aaditya/alpaca_subset_1", "type": "alpaca"}], "val_set_size": 0,
    "output_dir": "./outputs/qlora-out", "adapter": "qlora", "sequence_len": 4096, "sample_packing": True,
    "gradient_accumulation_steps": 4, "micro_batch_size": 2, "optimizer": "paged_adamw_32bit", "learning_rate": 2e-4,
}  # fmt: skip
AXOLOTL_FULL: Values = AXOLOTL | LIGER | FSDP | {
    "base_model": "NousResearch/Meta-Llama-3.1-8B", "chat_template": "llama3",
    "datasets": [
        {
            "path": "mlabonne/FineTome-100k", "type": "chat_template", "split": "train[:20%]",
            "field_messages": "conversations", "message_property_mappings": {"role": "from", "content": "value"},
        }
    ],
    "dataset_prepared_path": "last_run_prepared", "val_set_size": 0.02, "output_dir": "./outputs/out",
    "sequence_len": 4096, "sample_packing": True, "gradient_accumulation_steps": 4, "micro_batch_size": 2,
    "num_epochs": 1, "optimizer": "adamw_torch_fused", "learning_rate": 2e-5, "evals_per_epoch": 2,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "special_tokens": {"pad_token": "<|finetune_right_pad_id|>", "eos_token": "<|eot_id|>"},
}  # fmt: skip
AXOLOTL_70B: Values = AXOLOTL | LORA | FSDP | {
    "base_model": "casperhansen/llama-3-70b-fp16", "model_type": "LlamaForCausalLM", "tokenizer_type": "AutoTokenizer",
    "load_in_8bit": False, "load_in_4bit": True, "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
    "dataset_prepared_path": "last_run_prepared", "val_set_size": 0.05, "output_dir": "./outputs/out/qlora-llama3-70b",
    "adapter": "qlora", "sequence_len": 512, "sample_packing": False, "lora_r": 8, "gradient_accumulation_steps": 4,
    "micro_batch_size": 1, "optimizer": "adamw_torch_fused", "learning_rate": 0.00001,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}  # fmt: skip
AXOLOTL_FP8: Values = WANDB | LIGER | {
    "base_model": "meta-llama/Llama-3.2-3B", "load_in_8bit": False, "load_in_4bit": False, "strict": False,
    "liger_layer_norm": True, "datasets": [{"path": "yahma/alpaca-cleaned", "type": "alpaca"}],
    "output_dir": "./outputs/fp8_out/", "sample_packing": True, "pad_to_sequence_len": True, "sequence_len": 512,
    "attn_implementation": "flex_attention",
    "flex_attn_compile_kwargs": {"dynamic": False, "mode": "max-autotune-no-cudagraphs"}, "torch_compile": True,
    "gradient_accumulation_steps": 1, "micro_batch_size": 16, "num_epochs": 1, "optimizer": "adamw_torch_fused",
    "cosine_constant_lr_ratio": 0, "cosine_min_lr_ratio": 1.0, "learning_rate": 2e-5, "save_only_model": True,
    "fp8": True, "fp8_enable_fsdp_float8_all_gather": True, "resume_from_checkpoint": None, "logging_steps": 1,
    "evals_per_epoch": 1, "saves_per_epoch": 1, "warmup_steps": 10, "weight_decay": 0.0, "fsdp_version": 2,
    "fsdp_config": {
        "offload_params": False, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "state_dict_type": "FULL_STATE_DICT",
        "sharding_strategy": "FULL_SHARD", "reshard_after_forward": True, "activation_checkpointing": False,
    },
    "special_tokens": {"pad_token": "<|end_of_text|>"},
}  # fmt: skip
AXOLOTL_1B: Values = AXOLOTL | {
    "base_model": "NousResearch/Llama-3.2-1B", "datasets": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}],
    "dataset_prepared_path": "last_run_prepared", "val_set_size": 0.1, "output_dir": "./outputs/lora-out",
    "adapter": "lora", "lora_model_dir": None, "sequence_len": 2048, "sample_packing": True, "lora_r": 16,
    "lora_alpha": 32, "lora_target_modules": SEVEN, "lora_mlp_kernel": True, "lora_qkv_kernel": True,
    "lora_o_kernel": True, "gradient_accumulation_steps": 2, "micro_batch_size": 2, "num_epochs": 1,
    "optimizer": "adamw_8bit", "learning_rate": 2e-4, "loss_watchdog_threshold": 5.0, "loss_watchdog_patience": 3,
}  # fmt: skip

FACTORY: Values = {
    "trust_remote_code": True, "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 8,
    "lora_target": "all", "dataset": "identity,alpaca_en_demo", "cutoff_len": 2048, "max_samples": 1000,
    "preprocessing_num_workers": 16, "dataloader_num_workers": 4, "logging_steps": 10, "save_steps": 500,
    "plot_loss": True, "overwrite_output_dir": True, "save_only_model": False, "report_to": "none",
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1e-4,
    "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True,
    "ddp_timeout": 180000000,
}  # fmt: skip
FACTORY_LLAMA: Values = FACTORY | {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B-Instruct", "template": "llama3", "overwrite_cache": True,
    "output_dir": "saves/llama3-8b/lora/sft",
}  # fmt: skip
FACTORY_QLORA: Values = FACTORY_LLAMA | {"quantization_bit": 4}
FACTORY_PISSA: Values = FACTORY_LLAMA | {"pissa_init": True, "pissa_iter": 16, "pissa_convert": True}
FACTORY_GALORE: Values = {key: value for key, value in FACTORY_LLAMA.items() if not key.startswith(("lora", "bf16"))}
FACTORY_GALORE |= {
    "finetuning_type": "full", "use_galore": True, "galore_layerwise": True, "galore_target": "all",
    "galore_rank": 128, "galore_scale": 2.0, "gradient_accumulation_steps": 1, "learning_rate": 1e-5,
    "pure_bf16": True, "output_dir": "saves/llama3-8b/full/sft",
}  # fmt: skip
FACTORY_ZERO3: Values = {key: value for key, value in FACTORY.items() if not key.startswith("lora")} | {
    "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507", "finetuning_type": "full", "template": "qwen3_nothink",
    "deepspeed": "examples/deepspeed/ds_z3_config.json", "gradient_accumulation_steps": 2, "learning_rate": 1e-5,
    "resume_from_checkpoint": None, "output_dir": "saves/qwen3-4b/full/sft",
}  # fmt: skip

HANDBOOK: Values = {
    "model_revision": "main", "torch_dtype": "bfloat16", "attn_implementation": "flash_attention_2",
    "dataset_num_proc": 12, "bf16": True, "do_eval": True, "eval_strategy": "epoch", "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False}, "hub_strategy": "every_save", "log_level": "info",
    "logging_steps": 5, "logging_strategy": "steps", "lr_scheduler_type": "cosine", "max_steps": -1,
    "overwrite_output_dir": True, "push_to_hub": True, "seed": 42, "warmup_ratio": 0.1,
}  # fmt: skip
TURNS = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ULTRACHAT: Values = {
    "id": "HuggingFaceH4/ultrachat_200k", "config": "default", "split": "train_sft", "columns": ["messages"],
    "weight": 1.0,
}  # fmt: skip
TRL_QLORA: Values = HANDBOOK | {
    "model_name_or_path": "mistralai/Mistral-7B-v0.1", "load_in_4bit": True, "use_peft": True, "lora_r": 16,
    "lora_alpha": 16, "lora_dropout": 0.05, "lora_target_modules": SEVEN, "chat_template": TURNS,
    "dataset_mixture": {"datasets": [ULTRACHAT, ULTRACHAT | {"split": "test_sft"}], "test_split_size": 1000, "seed": 0},
    "gradient_accumulation_steps": 2, "hub_model_id": "zephyr-7b-sft-qlora", "learning_rate": 2e-4,
    "max_seq_length": 2048, "num_train_epochs": 1, "output_dir": "data/zephyr-7b-sft-qlora",
    "per_device_eval_batch_size": 8, "per_device_train_batch_size": 4, "report_to": ["tensorboard"],
    "save_strategy": "steps", "save_steps": 100, "save_total_limit": 1,
}  # fmt: skip
TRL_FULL: Values = HANDBOOK | {
    "model_name_or_path": "HuggingFaceTB/SmolLM2-1.7B", "chat_template": TURNS,
    "dataset_name": "HuggingFaceTB/smoltalk", "dataset_config": "all",
    "dataset_train_split": "train", "dataset_test_split": "test",
    "gradient_accumulation_steps": 4, "hub_model_id": "smollm2-1.7B-sft", "learning_rate": 3e-4,
    "max_seq_length": 8192, "num_train_epochs": 2, "output_dir": "data/smollm2-1.7B-sft",
    "per_device_eval_batch_size": 4, "per_device_train_batch_size": 4, "remove_unused_columns": True,
    "report_to": ["tensorboard", "wandb"], "save_strategy": "no",
}  # fmt: skip
TRL_SHORT: Values = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "stanfordnlp/imdb", "report_to": "none",
    "learning_rate": 0.0001, "lr_scheduler_type": "cosine",
}  # fmt: skip

INPUT = frozenset({"datasets.*.type"})
FACTORY_LOOK = frozenset({"dataset", "trust_remote_code"})
DEMO = [
    {"path": "json", "data_files": f"data/{name}.json", "split": "train[:1000]"}
    for name in ("identity", "alpaca_en_demo")
]
EXAMPLES: dict[str, Example] = {
    "axolotl lora-8b": Example(
        "axolotl", AXOLOTL_LORA_8B, "2x24GB",
        {
            "budget": {"gpus": 2, "gpu_memory_gb": 24.0}, "accelerate_config": "ddp", "lora.r": 32,
            "lora.target_modules": "all-linear", "lora.modules_to_save": ["embed_tokens", "lm_head"],
            "quantization.load_in_8bit": True, "data.eval": {"fraction": 0.05}, "data.max_length": 4096,
            "data.packing": True, "data.truncation": "drop", "training.global_batch_size": 16,
            "training.per_device_batch_size": 2, "training.num_train_epochs": 4, "training.optim": "adamw_8bit",
            "training.warmup_ratio": 0.1, "training.pure_bf16": ABSENT, "save_total_limit": 4,
            "eval_steps": 0.0625, "save_steps": 0.25,
        },
        look=INPUT,
    ),
    "axolotl qlora": Example(
        "axolotl", AXOLOTL_QLORA, "80GB",
        {
            "accelerate_config": "single", "quantization.load_in_4bit": True, "data.eval": ABSENT,
            "quantization.bnb_4bit_use_double_quant": ABSENT, "training.optim": "paged_adamw_32bit",
            "training.global_batch_size": 8, "data.train_on": ABSENT,
        },
        look=INPUT,
    ),
    "axolotl fft-8b-liger-fsdp": Example(
        "axolotl", AXOLOTL_FULL, "4x80GB",
        {
            "accelerate_config": "fsdp2_offload", "lora": None, "training.global_batch_size": 32,
            "data.train": [{"path": "mlabonne/FineTome-100k", "split": "train[:20%]", "format": "sharegpt"}],
            "training.pure_bf16": ABSENT, "training.optim": "adamw", "training.learning_rate": 2e-5,
        },
        look=frozenset({"special_tokens.eos_token"}),
    ),
    "axolotl fft-8b-liger on one GPU": Example(
        "axolotl", AXOLOTL_FULL, "80GB", {"accelerate_config": "single", "training.pure_bf16": True},
        look=frozenset({"special_tokens.eos_token", "accelerate_config"}),
    ),
    "axolotl qlora-fsdp-70b": Example(
        "axolotl", AXOLOTL_70B, "2x80GB",
        {
            "accelerate_config": "fsdp2_offload", "quantization.bnb_4bit_quant_storage": "bfloat16",
            "data.packing": False, "data.max_length": 512, "training.global_batch_size": 8,
        },
        look=INPUT,
    ),
    "axolotl 3b-fp8-fsdp2": Example(
        "axolotl", AXOLOTL_FP8, "8x80GB",
        {
            "accelerate_config": "fsdp2", "training.lr_scheduler_type": "cosine_with_min_lr",
            "training.lr_scheduler_kwargs": {"min_lr_rate": 1.0}, "training.warmup_steps": 10,
            "training.global_batch_size": 128, "training.activation_checkpointing": False,
        },
        differs=frozenset({"fp8", "fp8_enable_fsdp_float8_all_gather"}), look=INPUT,
    ),
    "axolotl lora-1b-kernels": Example(
        "axolotl", AXOLOTL_1B, "80GB", {"lora.target_modules": SEVEN, "lora.lora_dropout": ABSENT},
        look=INPUT | {"loss_watchdog_threshold"},
    ),
    "LLaMA-Factory llama3_lora_sft": Example(
        "llamafactory", FACTORY_LLAMA, "80GB",
        {
            "model.trust_remote_code": ABSENT, "lora.r": 8, "lora.lora_alpha": 16, "lora.target_modules": "all-linear",
            "data.train": DEMO, "data.packing": False, "data.max_length": 2048, "data.truncation": "right",
            "training.global_batch_size": 8, "training.activation_checkpointing": True,
            "training.learning_rate": 1e-4, "training.num_train_epochs": 3.0, "save_steps": 500,
        },
        look=FACTORY_LOOK,
    ),
    "LLaMA-Factory fsdp_qlora": Example(
        "llamafactory", FACTORY_QLORA, "2x80GB",
        {
            "quantization.load_in_4bit": True, "quantization.bnb_4bit_use_double_quant": ABSENT,
            "training.global_batch_size": 16, "accelerate_config": "ddp",
        },
        look=FACTORY_LOOK,
    ),
    "LLaMA-Factory pissa": Example(
        "llamafactory", FACTORY_PISSA, "80GB", {"lora.init_lora_weights": ABSENT},
        differs=frozenset({"pissa_init"}), look=FACTORY_LOOK,
    ),
    "LLaMA-Factory galore": Example(
        "llamafactory", FACTORY_GALORE, "80GB", {"lora": None, "training.pure_bf16": True, "training.optim": ABSENT},
        differs=frozenset({"use_galore", "galore_layerwise", "galore_target", "galore_rank", "galore_scale"}),
        look=FACTORY_LOOK,
    ),
    "LLaMA-Factory qwen3_full_sft": Example(
        "llamafactory", FACTORY_ZERO3, "4x80GB",
        {"accelerate_config": "zero3", "training.global_batch_size": 8, "training.pure_bf16": ABSENT},
        look=FACTORY_LOOK | {"deepspeed", "template"},
    ),
    "TRL zephyr qlora": Example(
        "trl", TRL_QLORA, "8x80GB",
        {
            "model.dtype": "bfloat16", "lora.lora_alpha": 16, "lora.target_modules": SEVEN, "data.chat_template": TURNS,
            "data.train": [
                {"path": "HuggingFaceH4/ultrachat_200k", "name": "default", "split": f"{split}_sft"}
                for split in ("train", "test")
            ],
            "data.packing": False, "data.train_on": "all", "data.max_length": 2048, "training.pure_bf16": True,
            "quantization.bnb_4bit_use_double_quant": False, "training.global_batch_size": 64,
            "training.max_steps": ABSENT, "hub.repo_id": ABSENT, "hub.push": ABSENT,
        },
        look=frozenset({"dataset_mixture.test_split_size", "completion_only_loss"}),
    ),
    "TRL smollm2": Example(
        "trl", TRL_FULL, "8x80GB",
        {
            "lora": None, "training.pure_bf16": True, "training.global_batch_size": 128,
            "data.train": [{"path": "HuggingFaceTB/smoltalk", "name": "all"}],
            "data.eval": [{"path": "HuggingFaceTB/smoltalk", "name": "all", "split": "test"}],
        },
        look=frozenset({"completion_only_loss"}),
    ),
    "TRL example_config": Example(
        "trl", TRL_SHORT, "80GB",
        {
            "model.dtype": "float32", "training.pure_bf16": ABSENT, "training.num_train_epochs": 3.0,
            "training.global_batch_size": 8, "training.per_device_batch_size": 8, "training.warmup_ratio": 0.0,
            "data.max_length": 1024, "data.packing": False, "data.train_on": "all", "save_steps": 500,
            "training.learning_rate": 0.0001, "training.mixed_precision": "bf16",
        },
        look=frozenset({"completion_only_loss", "trainer"}),
    ),
}  # fmt: skip
