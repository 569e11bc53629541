"""torchtune's configuration into a recipe. Its defaults are those of its builders at bd2a0fc (April 2026)."""

from __future__ import annotations

import re
from typing import Any

from finetune.importers.foreign_config import ForeignConfig, positive_or_none, whole
from finetune.importers.shared import batch, chosen_strategy, data_set
from finetune.importers.templates import TEMPLATES
from finetune.recipe.optimizers import DEFAULT, OPTIMIZER_NAMES, OPTIMIZERS

_LAYERS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]
# Builder of a data set -> its source, the layout of its rows, and whether all of a row is learned by default.
_SETS: dict[str, tuple[str | None, str, bool]] = {
    "alpaca_dataset": ("tatsu-lab/alpaca", "alpaca", True),
    "alpaca_cleaned_dataset": ("yahma/alpaca-cleaned", "alpaca", True),
    "slimorca_dataset": ("Open-Orca/SlimOrca-Dedup", "sharegpt", False),
    "chat_dataset": (None, "auto", False),
    "instruct_dataset": (None, "auto", False),
    "text_completion_dataset": (None, "text", True),
    "wikitext_dataset": ("EleutherAI/wikitext_document_level", "auto", True),
    "samsum_dataset": ("Samsung/samsum", "auto", False),
    "grammar_dataset": ("liweili/c4_200m", "auto", False),
    "cnn_dailymail_articles_dataset": ("ccdv/cnn_dailymail", "auto", True),
}
_SCHEDULES = {
    "get_cosine_schedule_with_warmup": "cosine",
    "get_constant_schedule_with_warmup": "constant_with_warmup",
    "get_linear_schedule_with_warmup": "linear",
}
_NO_LIMIT = 8192
_OTHER = ("teacher_model", "kd_loss", "quantizer", "ref_checkpointer", "prompt", "tasks", "enable_kv_cache")


def convert(theirs: ForeignConfig) -> None:
    """Every section in turn; what is not read here ends in the list of what was left out. Raises RecipeError."""
    for key in _OTHER:
        if theirs.peek(key):
            theirs.refuse(key, "this kit does supervised fine-tuning of language models, and nothing else")
    if "rlhf" in str(theirs.peek("loss._component_")):
        theirs.refuse("loss._component_", "this kit does supervised fine-tuning of language models")
    theirs.write("model.name_or_path", _model_folder(theirs), "checkpointer.checkpoint_dir")
    builder = _last(theirs.get("model._component_"))
    _adapter(theirs, builder)
    _data(theirs)
    _training(theirs)
    _formats(theirs)


def _last(component: Any) -> str:
    return str(component).rpartition(".")[2]


def _model_folder(theirs: ForeignConfig) -> Any:
    folder = theirs.get("checkpointer.checkpoint_dir")
    if folder is None:
        theirs.refuse("checkpointer.checkpoint_dir", "the model's folder is needed")
    if "Meta" in _last(theirs.get("checkpointer._component_")):
        theirs.leave("checkpointer._component_", "look", "Meta's own layout; name the same model in Hugging Face's")
    return str(folder).rstrip("/")


def _adapter(theirs: ForeignConfig, builder: str) -> None:
    if not re.match(r"q?(lora|dora)_", builder):
        theirs.write("lora", None, f"model: {builder}")
        return
    theirs.carry("lora.r", "model.lora_rank", default=8, change=whole)
    theirs.carry("lora.lora_alpha", "model.lora_alpha", default=16)
    theirs.carry("lora.lora_dropout", "model.lora_dropout", default=0.0)
    modules = [_LAYERS.get(name, name) for name in theirs.get("model.lora_attn_modules", [])]
    modules += _MLP * bool(theirs.get("model.apply_lora_to_mlp"))
    modules += ["lm_head"] * bool(theirs.get("model.apply_lora_to_output"))
    theirs.write("lora.target_modules", modules, "lora_attn_modules, apply_lora_to_mlp, apply_lora_to_output")
    if theirs.get("model.use_dora") or "dora" in builder:
        theirs.write("lora.use_dora", True, "model.use_dora")
    if theirs.get("model.quantize_base") or builder.startswith("q"):
        theirs.write("quantization.load_in_4bit", True, f"model: {builder}")  # torchao's NF4, of double quantisation


def _data(theirs: ForeignConfig) -> None:
    several = isinstance(theirs.peek("dataset"), list)
    keys = [f"dataset.{index}" for index in range(len(theirs.peek("dataset")))] if several else ["dataset"]
    if theirs.peek("dataset") is None:
        theirs.refuse("dataset", "a data set is needed")
    whole_rows = [_learns_all(theirs, key) for key in keys]
    theirs.write("data.train", [_set(theirs, key) for key in keys], "dataset")
    if theirs.peek("run_val_every_n_steps"):
        theirs.write("eval_steps", theirs.get("run_val_every_n_steps"), "run_val_every_n_steps")
        theirs.write("data.eval", [_set(theirs, "dataset_val")], "dataset_val")
    elif theirs.peek("dataset_val"):
        theirs.leave("dataset_val", "same", "run_val_every_n_steps is null, so nobody looks at it")
    _length(theirs)
    theirs.carry("data.packing", f"{keys[0]}.packed", default=False)
    theirs.write("data.train_on", "all" if whole_rows[0] else "assistant", "train_on_input, or the builder's default")
    if len(set(whole_rows)) > 1:
        theirs.leave("dataset", "differs", "one data.train_on for all data sets")
    if any("alpaca" in str(theirs.peek(f"{key}._component_")) for key in keys):
        theirs.write("data.chat_template", TEMPLATES["llama3_alpaca"], "Alpaca's words inside of Llama 3's turns")
        reason = "rows with an input: it follows the instruction here, without the heading ### Input: and its sentence"
        theirs.leave("dataset._component_", "look", reason)
    elif "llama3" in str(theirs.peek("tokenizer._component_")):
        theirs.write("data.chat_template", TEMPLATES["llama3"], "torchtune's, without a system prompt and a date")


def _length(theirs: ForeignConfig) -> None:
    limit = theirs.get("tokenizer.max_seq_len")
    if limit is not None:
        theirs.write("data.max_length", limit, "tokenizer.max_seq_len")
        theirs.write("data.truncation", "right", "torchtune's way")
    else:
        theirs.write("data.max_length", _NO_LIMIT, "tokenizer.max_seq_len: null; a longer row is an error, not cut")


def _learns_all(theirs: ForeignConfig, at: str) -> bool:
    usual = _SETS.get(_last(theirs.peek(f"{at}._component_")), (None, "auto", False))[2]
    said, strategy = theirs.get(f"{at}.train_on_input"), theirs.get(f"{at}.masking_strategy")
    if strategy is not None:
        return str(strategy) == "train_on_all"
    return usual if said is None else bool(said)


def _set(theirs: ForeignConfig, at: str) -> dict[str, Any]:
    builder = _last(theirs.get(f"{at}._component_"))
    source, layout, _ = _SETS.get(builder, (None, "auto", False))
    if builder not in _SETS:
        theirs.leave(f"{at}._component_", "look", "a builder unknown here; name path and format of its rows")
    source = theirs.get(f"{at}.source", source)
    column, style = theirs.get(f"{at}.conversation_column"), theirs.get(f"{at}.conversation_style")
    if style in ("sharegpt", "openai"):
        layout = "sharegpt" if style == "sharegpt" else "messages"
    if column not in (None, {"sharegpt": "conversations", "messages": "messages"}.get(layout)):
        theirs.leave(f"{at}.conversation_column", "look", f"rename the column as format {layout} has it")
    if layout == "auto" and theirs.peek(f"{at}.column_map") is None:
        theirs.leave(f"{at}._component_", "look", "rows need known columns: messages, or prompt and completion")
    for key in ("train_on_input", "masking_strategy", "packed"):
        theirs.get(f"{at}.{key}")
    name, files = theirs.get(f"{at}.name"), theirs.get(f"{at}.data_files")
    kind = source if source in ("json", "csv", "parquet") else None
    split = theirs.get(f"{at}.split")
    return data_set(str(source or builder), files=files, kind=kind, name=name, split=split, format=layout)


def _training(theirs: ForeignConfig) -> None:
    sharded = theirs.gpus > 1
    offloaded = sharded and bool(theirs.get("fsdp_cpu_offload") or theirs.get("fsdp.cpu_offload"))
    name = "fsdp2_offload" if offloaded else "fsdp2" if sharded else "single"
    theirs.write("accelerate_config", name, f"--gpus {theirs.gpus}; torchtune shards by FSDP2")
    tensor_parallel = theirs.get("tensor_parallel_dim", 1)
    if tensor_parallel > 1:
        theirs.leave("tensor_parallel_dim", "same", "layers are not split over GPUs here; check by `finetune plan`")
    batch(theirs, "batch_size", 1, split_by=tensor_parallel)
    epochs, steps = theirs.get("epochs", 1), theirs.get("max_steps_per_epoch")
    if steps:
        theirs.write("training.max_steps", steps * epochs, f"max_steps_per_epoch x epochs {epochs}")
    else:
        theirs.write("training.num_train_epochs", float(epochs), "epochs")
    _optimizer(theirs)
    _schedule(theirs)
    clip = theirs.get("clip_grad_norm")
    theirs.write("training.max_grad_norm", positive_or_none(clip) if clip != "inf" else None, "clip_grad_norm")
    theirs.carry("training.activation_checkpointing", "enable_activation_checkpointing", default=False)
    if theirs.get("shuffle", True) is not True:
        theirs.leave("shuffle", "differs", "rows are always shuffled")
    theirs.carry("training.seed", "seed", change=whole)
    theirs.carry("logging_steps", "log_every_n_steps", change=whole)
    theirs.carry("output_dir", "output_dir")
    theirs.carry("save_total_limit", "checkpointer.keep_last_n_checkpoints")


def _optimizer(theirs: ForeignConfig) -> None:
    name = _last(theirs.get("optimizer._component_", "torch.optim.AdamW"))
    ours = OPTIMIZER_NAMES.get(name)
    kept = ours and (OPTIMIZERS[ours].works_on_shards or not chosen_strategy(theirs).shards_modules)
    if not kept:
        reason = "not offered; AdamW takes its place" if ours is None else "knows no shards; adamw is sharded too"
        theirs.leave("optimizer._component_", "differs", reason)
    theirs.write("training.optim", ours if kept else DEFAULT, f"optimizer: {name}")
    theirs.carry("training.learning_rate", "optimizer.lr", default=1e-3)
    theirs.carry("training.weight_decay", "optimizer.weight_decay", default=0.01)
    if "lora" in theirs.carried and theirs.carried.get("training.weight_decay", (0,))[0]:
        reason = "decays biases and norms there, matrices alone here"
        theirs.leave("optimizer.weight_decay", "differs", reason, theirs.carried["training.weight_decay"][0])
    theirs.get("optimizer.fused")
    for key, usual in (("betas", [0.9, 0.999]), ("eps", 1e-8)):
        if theirs.get(f"optimizer.{key}", usual) != usual:
            theirs.leave(f"optimizer.{key}", "differs", f"AdamW's constant is {usual} here")


def _schedule(theirs: ForeignConfig) -> None:
    name = _last(theirs.get("lr_scheduler._component_", ""))
    if not name:
        theirs.write("training.lr_scheduler_type", "constant", "no lr_scheduler")
        theirs.write("training.warmup_ratio", 0.0, "no lr_scheduler")
        return
    shape = _SCHEDULES.get(name)
    if shape is None:
        theirs.leave("lr_scheduler._component_", "differs", "no such schedule here; cosine takes its place")
    theirs.write("training.lr_scheduler_type", shape or "cosine", f"lr_scheduler: {name}")
    theirs.write("training.warmup_steps", theirs.get("lr_scheduler.num_warmup_steps", 0), "num_warmup_steps")
    cycles = theirs.get("lr_scheduler.num_cycles")
    if cycles not in (None, 0.5) and shape == "cosine":
        theirs.write("training.lr_scheduler_kwargs", {"num_cycles": cycles}, "lr_scheduler.num_cycles")


def _formats(theirs: ForeignConfig) -> None:
    """Everything lies and is computed in `dtype` there, optimizer state and adapters too."""
    dtype = str(theirs.get("dtype", "fp32"))
    if dtype == "bf16":
        theirs.write("training.mixed_precision", "bf16", "dtype")
        theirs.write("training.pure_bf16", True, "dtype: weights, adapters and optimizer state lie in it")
    else:
        if dtype != "fp32":
            theirs.leave("dtype", "differs", "bf16 and fp32 are known here")
        theirs.write("training.mixed_precision", "no", "dtype")
        theirs.write("model.dtype", "float32", "dtype")
