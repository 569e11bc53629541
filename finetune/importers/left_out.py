"""Why a key of theirs is not in the recipe, for the keys that are known; the rest is listed as unknown."""

from __future__ import annotations

import re

from finetune.importers.foreign_config import Level
from finetune.recipe.foreign_keys import REPLACED

# A pattern of whole keys -> whether the training is another one without it, and why it is left out.
_REASONS: tuple[tuple[str, Level, str], ...] = (
    (r"report_to|(wandb|trackio|swanlab|comet|mlflow)_\w+|use_(wandb|swanlab|tensorboard|mlflow|comet)|run_name|project"
     r"|metric_logger\..*|logging_dir|log_\w+|logging_(strategy|first_step|nan_inf_filter)|disable_tqdm|plot_loss"
     r"|include_\w+|(use_)?otel_\w+|print_param_status|profiler(\..*|_\w+)|enable_torch_profiler|debug|\w*_memory_metrics",
     "same", "a run keeps metrics.jsonl and a report; nothing is learned from it"),
    (r"\w*num_(proc|workers)|dataset_processes|dataloader_(?!drop_last)\w+|preprocessing_\w+|overwrite_cache|cache_dir"
     r"|dataset_prepared_path|tokenized_path|dataset_keep_in_memory|skip_prepare_dataset|\w*shared_file_system"
     r"|(dataset|preprocess)_shard\w*|num_dataset_shards_to_save|streaming|dataset_streaming|buffer_size",
     "same", "rows are tokenised once, into a cache, and read from memory-mapped files"),
    (r"tf32|(use_)?liger\w*|enable_liger_kernel|lora_(mlp|qkv|o|embedding)_kernel|flash_attn_\w+|use_kernels"
     r"|torch_compile\w*|compile|flex_attn_compile_kwargs(\..*)?|cut_cross_entropy|chunked_cross_entropy\w*|use_unsloth(_gc)?"
     r"|use_v1_kernels|(gradient|activation)_checkpointing_kwargs(\..*)?|use_reentrant_gc|torch_empty_cache_steps|gc_\w+|sdpa_varlen|large_head_attention|batch_flattening|padding_free"
     r"|enable_activation_offloading|activation_offloading|memory_efficient_fsdp_wrap|liger_kernel_config(\..*)?|layer_offloading|optimizer_in_bwd|tiled_mlp\w*",
     "same", "another way to compute the same"),
    (r"flash_attn|attn_implementation|(flash|sdp|flex|eager|xformers|sage)_attention|use_cache|shift_attn",
     "same", "model.attention: auto computes the same attention, documents apart"),
    (r"pad_to_(sequence_len|multiple_of)|eval_sample_packing|eval_packing|sample_packing_\w+|packing_strategy"
     r"|\w*special_tokens\.pad_token|special_tokens\.unk_token|pad_token|group_by_length|length_column_name"
     r"|train_sampling_strategy|ignore_pad_token_for_loss",
     "same", "rows are filled with whole documents, not padded, and no token is masked by its id"),
    (r"low_cpu_(mem_usage|ram)|device(_map)?"
     r"|max_memory|gpu_memory_limit|lora_on_cpu|qlora_sharded_model_loading|offload_folder|local_rank|world_size|ddp"
     r"|ddp_\w+|fsdp_version|fsdp_final_state_dict_type|accelerator_config(\..*)?|custom_sharded_layers|ray_\w+"
     r"|parallelism_config(\..*)?|ignore_bias_buffers|fsdp(_config)?(\..*)?|deepspeed|fsdp_\w+_cls_to_wrap|use_ray|dp_\w+_size|no_cuda|use_cpu"
     r"|tensor_parallel_plan.*|save_on_each_node|backend|trl|accelerate_config|num_processes|data_parallel_\w+_dim",
     "same", "the strategy places and spreads the model: accelerate_config"),
    (r"save_(safetensors|only_model|on_each_node|first_step|adapter_weights_only)|load_best_model_at_end"
     r"|metric_for_best_model|greater_is_better|resume_from_checkpoint|auto_resume_from_checkpoints|overwrite_output_dir"
     r"|ignore_data_skip|checkpointer\..*|push_dataset_to_hub|hub_(strategy|always_push|token|revision)"
     r"|hf_(hub_token|use_auth_token)|merge_\w+|save_strategy|restore_callback_states_from_checkpoint"
     r"|enable_jit_checkpoint|tokenizer_save_jinja_files",
     "same", "a run resumes by itself from its newest checkpoint; the end is the adapter or the model"),
    (r"do_(train|eval|predict|bench_eval|causal_lm_eval)|eval_(strategy|batch_size|delay|on_start|table_size"
     r"|max_new_tokens|accumulation_steps|causal_lm_metrics|do_concat_batches|use_gather_object|on_each_dataset)"
     r"|per_device_eval_batch_size|batch_size_val|predict_with_generate|generation_\w+|generate_samples"
     r"|num_generation_samples|bench_\w+|compute_accuracy|prediction_loss_only|\w+_full_eval|label_names|batch_eval_metrics"
     r"|max_new_tokens|dataset_test_split|run_val_every_n_steps|evaluation_strategy",
     "same", "data.eval and eval_steps say what is held out and when it is looked at"),
    (r"model_type|tokenizer_(type|use_fast|legacy|config)|base_model_config|cls_model_config|use_fast_tokenizer"
     r"|is_\w+_derived_model|infer_\w+|lora_task_type|pissa_convert|lora_fan_in_fan_out|tokenizer\.(_component_|path|merges_file|vocab_path|merges_path)"
     r"|loss\._component_|remove_unused_columns|strict|experimental_skip_move_to_device|model_kwargs|tool_format",
     "same", "the model's own files say it"),
    (r"use_rslora|use_dora|bnb_4bit_\w+|use_bnb_nested_quant", "same", "nothing of that kind is trained"),
    (r"evals_per_epoch", "look", "set eval_steps when `finetune preview` has counted the steps of an epoch"),
    (r"saves_per_epoch", "same", "checkpoints are written every save_steps, so that a run can go on"),
    (r"disable_shuffling|shuffle(_merged_datasets|_before_merging_datasets|_dataset)?|data_seed|dataloader_drop_last"
     r"|full_determinism|curriculum_sampling",
     "look", "which rows make a step depends on data, seed and global_batch_size alone, always shuffled"),
    (r"dataset_exact_deduplication", "look", "duplicates are shown by `finetune preview`, not taken away"),
    (r"loss_watchdog_\w+", "same", "a loss that is not finite ends the run"),
    (r"neftune_noise_alpha", "differs", "noise on embeddings is not offered"),
    (r"fp8\w*|mixed_precision|half_precision_backend", "differs", "computed in bf16, fp16 or float32 here"),
    (r"label_smoothing_factor|loss_type|use_(dft|asft|eaft)\w*|(asft|eaft)_\w+|router_aux_loss_coef|moe_aux_loss_coef",
     "differs", "the loss is the cross-entropy of the next token"),
    (r"auto_find_batch_size", "look", "the plan finds it: finetune plan"),
    (r"dataset_(kwargs|mixture)(\..*)?|dataset_split\w*", "look", "rows are read by their columns"),
    (r"model_init_kwargs(\..*)?|rope_scaling|overrides_of_model_config(\..*)?|model_config(\..*)?",
     "differs", "the model is loaded as its files say"),
    (r"default_system(_message)?|enable_thinking|preserve_thinking|chat_template_kwargs(\..*)?",
     "look", "the template decides; compare by: finetune preview"),
    (r"image_\w+|video_\w+|audio_\w+|media_dir|processor_\w+|model\.(image|encoder|decoder|fusion)\w*|collate_fn"
     r"|tokenizer\.(image_size|max_num_tiles)|crop_to_patches", "differs", "texts alone are learned here"),
    (r"(galore|apollo|badam|adam_mini|muon|dion|qgalore)_\w+", "differs", "another optimizer's; AdamW takes its place"),
    (r"special_tokens(\..*)?|tokens(\..*)?|added_tokens_overrides|add_tokens|add_special_tokens|new_special_tokens_config"
     r"|resize_(vocab|token_embeddings\w*)|eos_token|eot_tokens|init_special_tokens|fix_untrained_tokens",
     "differs", "the tokenizer is used as it comes; change it beforehand and name its folder"),
    (r"lora_model_dir|adapter_name_or_path|adapter_folder|create_new_adapter",
     "differs", "training begins from a new adapter; merge the old one first"),
    (r"loraplus_\w+|embedding_lr\w*|lr_groups\w*|optim_args|optim_target_modules|lora_(rank|alpha)_pattern"
     r"|peft_layers_\w+|layers_to_transform|lora_target_parameters|unfrozen_parameters|freeze_\w+",
     "differs", "one learning rate and one rank for all that is trained"),
)  # fmt: skip
UNKNOWN = "nothing here corresponds to it"
_PATTERNS = tuple((re.compile(pattern), level, reason) for pattern, level, reason in _REASONS)


def reason_for(key: str, value: object) -> tuple[Level, str]:
    """Why this key is left out; one that nobody knows counts as changing the training, unless it is false."""
    for pattern, level, reason in _PATTERNS:
        if pattern.fullmatch(key):
            return level, reason
    if key in REPLACED:
        return "look", REPLACED[key].removesuffix("; take the key away")
    return "look" if value is False else "differs", UNKNOWN
