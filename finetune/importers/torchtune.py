"""torchtune's configuration into a recipe. Its defaults are those of its builders at bd2a0fc (April 2026)."""

from __future__ import annotations

import re
from typing import Any

from finetune.importers.foreign_config import ForeignConfig, as_count, positive_or_none
from finetune.importers.shared import batch, data_set, renamed, trackers
from finetune.importers.templates import TEMPLATES
from finetune.recipe.optimizers import DEFAULT, OPTIMIZER_NAMES

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
_TRACKERS = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard", "CometLogger": "comet"}


def convert(foreign: ForeignConfig) -> None:
    """Convert every section; keys that are not read are listed as left out. Raises RecipeError."""
    foreign.write("model.name_or_path", _model_folder(foreign), "checkpointer.checkpoint_dir")
    builder = _last(foreign.get("model._component_"))
    _adapter(foreign, builder)
    _data(foreign)
    _training(foreign)
    _formats(foreign)


def _last(component: Any) -> str:
    return str(component).rpartition(".")[2]


def _model_folder(foreign: ForeignConfig) -> Any:
    folder = foreign.get("checkpointer.checkpoint_dir")
    if folder is None:
        foreign.refuse("checkpointer.checkpoint_dir", "the model's folder is needed")
    if "Meta" in _last(foreign.get("checkpointer._component_")):
        foreign.leave("checkpointer._component_", "look", "Meta's own layout; name the same model in Hugging Face's")
    return str(folder).rstrip("/")


def _adapter(foreign: ForeignConfig, builder: str) -> None:
    if not re.match(r"q?(lora|dora)_", builder):
        foreign.write("lora", None, f"model: {builder}")
        return
    foreign.carry("lora.r", "model.lora_rank", default=8, change=as_count)
    foreign.carry("lora.lora_alpha", "model.lora_alpha", default=16)
    foreign.carry("lora.lora_dropout", "model.lora_dropout", default=0.0)
    modules = [_LAYERS.get(name, name) for name in foreign.names("model.lora_attn_modules")]
    modules += _MLP * bool(foreign.get("model.apply_lora_to_mlp"))
    modules += ["lm_head"] * bool(foreign.get("model.apply_lora_to_output"))
    foreign.write("lora.target_modules", modules, "lora_attn_modules, apply_lora_to_mlp, apply_lora_to_output")
    if foreign.get("model.use_dora") or "dora" in builder:
        foreign.write("lora.use_dora", True, "model.use_dora")
    if foreign.get("model.quantize_base") or builder.startswith("q"):
        foreign.write("quantization.load_in_4bit", True, f"model: {builder}")  # torchao's NF4, of double quantisation


def _data(foreign: ForeignConfig) -> None:
    for each in ("model", "checkpointer", "tokenizer", "optimizer", "lr_scheduler", "loss", "metric_logger"):
        section = foreign.peek(each)
        if section is not None and not isinstance(section, dict):
            foreign.refuse(each, "write a section with _component_")
    several = isinstance(foreign.peek("dataset"), list)
    keys = [f"dataset.{index}" for index in range(len(foreign.peek("dataset")))] if several else ["dataset"]
    if foreign.peek("dataset") is None:
        foreign.refuse("dataset", "a data set is needed")
    whole_rows = [_learns_all(foreign, key) for key in keys]
    foreign.write("data.train", [_set(foreign, key) for key in keys], "dataset")
    if foreign.peek("run_val_every_n_steps"):
        foreign.write("eval_steps", foreign.get("run_val_every_n_steps"), "run_val_every_n_steps")
        foreign.write("data.eval", [_set(foreign, "dataset_val")], "dataset_val")
    elif foreign.peek("dataset_val"):
        foreign.leave("dataset_val", "same", "run_val_every_n_steps is null, so it is not evaluated")
    _length(foreign)
    foreign.carry("data.packing", f"{keys[0]}.packed", default=False)
    foreign.write("data.train_on", "all" if whole_rows[0] else "assistant", "train_on_input, or the builder's default")
    if len(set(whole_rows)) > 1:
        foreign.leave("dataset", "differs", "one data.train_on for all data sets")
    if any("alpaca" in str(foreign.peek(f"{key}._component_")) for key in keys):
        foreign.write("data.chat_template", TEMPLATES["llama3_alpaca"], "Alpaca's words inside of Llama 3's turns")
        reason = "rows with an input: it follows the instruction here, without the heading ### Input: and its sentence"
        foreign.leave("dataset._component_", "look", reason)
    elif "llama3" in str(foreign.peek("tokenizer._component_")):
        foreign.write("data.chat_template", TEMPLATES["llama3"], "torchtune's, without a system prompt and a date")


def _length(foreign: ForeignConfig) -> None:
    limit = foreign.get("tokenizer.max_seq_len")
    if limit is not None:
        foreign.write("data.max_length", limit, "tokenizer.max_seq_len")
        foreign.write("data.truncation", "right", "as torchtune")
    else:
        foreign.write("data.max_length", _NO_LIMIT, "tokenizer.max_seq_len: null; a longer row is an error")


def _learns_all(foreign: ForeignConfig, at: str) -> bool:
    usual = _SETS.get(_last(foreign.peek(f"{at}._component_")), (None, "auto", False))[2]
    train_on_input, strategy = foreign.get(f"{at}.train_on_input"), foreign.get(f"{at}.masking_strategy")
    if strategy is not None:
        return str(strategy) == "train_on_all"
    return usual if train_on_input is None else bool(train_on_input)


def _set(foreign: ForeignConfig, at: str) -> dict[str, Any]:
    builder = _last(foreign.get(f"{at}._component_"))
    source, layout, _ = _SETS.get(builder, (None, "auto", False))
    if builder not in _SETS:
        foreign.leave(f"{at}._component_", "look", "a builder unknown here; name path and format of its rows")
    source = foreign.get(f"{at}.source", source)
    column, style = foreign.get(f"{at}.conversation_column"), foreign.get(f"{at}.conversation_style")
    if style in ("sharegpt", "openai"):
        layout = "sharegpt" if style == "sharegpt" else "messages"
    columns = _columns(foreign, at, builder, layout)
    if column is not None:
        columns = renamed(**{"conversations" if layout == "sharegpt" else "messages": column})
    if layout == "auto" and not columns:
        foreign.leave(f"{at}._component_", "look", "rows need known columns: messages, or prompt and completion")
    for key in ("train_on_input", "masking_strategy", "packed"):
        foreign.get(f"{at}.{key}")
    name, files = foreign.get(f"{at}.name"), foreign.get(f"{at}.data_files")
    kind = source if source in ("json", "csv", "parquet") else None
    split = foreign.get(f"{at}.split")
    more: dict[str, Any] = {"split": split, "format": layout, "columns": columns}
    return data_set(str(source or builder), files=files, kind=kind, name=name, **more)


# The columns that a builder reads where its data set has other names; of inputs and outputs, by instruct_dataset's.
_COLUMN_OF_TEXT = {"wikitext_dataset": "page", "cnn_dailymail_articles_dataset": "article"}


def _columns(foreign: ForeignConfig, at: str, builder: str, layout: str) -> dict[str, str]:
    """A data set's columns by our names."""
    given, text = foreign.get(f"{at}.column_map", {}), foreign.get(f"{at}.column", _COLUMN_OF_TEXT.get(builder))
    if not isinstance(given, dict):
        return {}
    if layout == "alpaca":
        return renamed(**{ours: given.get(ours) for ours in ("instruction", "input", "output")})
    if builder == "instruct_dataset":
        return renamed(instruction=given.get("input", "input"), output=given.get("output", "output"))
    return renamed(text=text)


def _training(foreign: ForeignConfig) -> None:
    sharded = foreign.gpus > 1
    offloaded = sharded and bool(foreign.get("fsdp_cpu_offload") or foreign.get("fsdp.cpu_offload"))
    name = "fsdp2_offload" if offloaded else "fsdp2" if sharded else "single"
    foreign.write("accelerate_config", name, "torchtune shards by FSDP2" if sharded else "one GPU")
    tensor_parallel = foreign.count("tensor_parallel_dim", 1)
    if tensor_parallel > 1:
        foreign.leave("tensor_parallel_dim", "same", "layers are not split over GPUs here; check by `finetune plan`")
    batch(foreign, "batch_size", 1, split_by=tensor_parallel)
    epochs, steps = foreign.count("epochs", 1), foreign.count("max_steps_per_epoch")
    if steps:
        foreign.write("training.max_steps", steps * epochs, f"max_steps_per_epoch x epochs {epochs}")
    else:
        foreign.write("training.num_train_epochs", float(epochs), "epochs")
    _optimizer(foreign)
    _schedule(foreign)
    clip = foreign.get("clip_grad_norm")
    foreign.write("training.max_grad_norm", positive_or_none(clip) if clip != "inf" else None, "clip_grad_norm")
    foreign.carry("training.activation_checkpointing", "enable_activation_checkpointing", default=False)
    if foreign.get("shuffle", True) is not True:
        foreign.leave("shuffle", "differs", "rows are always shuffled")
    foreign.carry("training.seed", "seed", change=as_count)
    foreign.carry("logging_steps", "log_every_n_steps", change=as_count)
    foreign.carry("output_dir", "output_dir")
    foreign.carry("save_total_limit", "checkpointer.keep_last_n_checkpoints")
    logger = _last(foreign.get("metric_logger._component_", ""))
    tracker = _TRACKERS.get(logger)
    if logger and tracker is None and logger not in ("DiskLogger", "StdoutLogger"):
        foreign.leave("metric_logger._component_", "look", "an unknown tracker; report_to: [wandb] or another")
    trackers(foreign, {tracker: "metric_logger._component_"} if tracker else {})


def _optimizer(foreign: ForeignConfig) -> None:
    name = _last(foreign.get("optimizer._component_", "torch.optim.AdamW"))
    offered = OPTIMIZER_NAMES.get(name)
    if offered is None:
        foreign.leave("optimizer._component_", "differs", "not offered; AdamW takes its place")
    foreign.write("training.optim", offered or DEFAULT, f"optimizer._component_: {name}")
    foreign.carry("training.learning_rate", "optimizer.lr", default=1e-3)
    foreign.carry("training.weight_decay", "optimizer.weight_decay", default=0.01)
    if "lora" in foreign.carried and foreign.carried.get("training.weight_decay", (0,))[0]:
        reason = "decays biases and norms there, matrices alone here"
        foreign.leave("optimizer.weight_decay", "differs", reason, foreign.carried["training.weight_decay"][0])
    foreign.get("optimizer.fused")
    betas = foreign.get("optimizer.betas")
    if betas:
        if not isinstance(betas, list) or len(betas) != 2:
            foreign.refuse("optimizer.betas", "write two numbers: [0.9, 0.95]")
        for constant, value in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            foreign.write(f"training.{constant}", value, "optimizer.betas")
    foreign.carry("training.adam_epsilon", "optimizer.eps")


def _schedule(foreign: ForeignConfig) -> None:
    name = _last(foreign.get("lr_scheduler._component_", ""))
    if not name:
        foreign.write("training.lr_scheduler_type", "constant", "no lr_scheduler")
        foreign.write("training.warmup_ratio", 0.0, "no lr_scheduler")
        return
    shape = _SCHEDULES.get(name)
    if shape is None:
        foreign.leave("lr_scheduler._component_", "differs", "no such schedule here; cosine takes its place")
    foreign.write("training.lr_scheduler_type", shape or "cosine", f"lr_scheduler: {name}")
    foreign.write("training.warmup_steps", foreign.get("lr_scheduler.num_warmup_steps", 0), "num_warmup_steps")
    cycles = foreign.get("lr_scheduler.num_cycles")
    if cycles not in (None, 0.5) and shape == "cosine":
        foreign.write("training.lr_scheduler_kwargs", {"num_cycles": cycles}, "lr_scheduler.num_cycles")


def _formats(foreign: ForeignConfig) -> None:
    """torchtune stores and computes everything in `dtype`, optimizer state and adapters too."""
    dtype = str(foreign.get("dtype", "fp32"))
    if dtype == "bf16":
        foreign.write("training.mixed_precision", "bf16", "dtype")
        foreign.write("training.pure_bf16", True, "dtype: weights, adapters and optimizer state have it")
    else:
        if dtype != "fp32":
            foreign.leave("dtype", "differs", "only bf16 and fp32 are offered")
        foreign.write("training.mixed_precision", "no", "dtype")
        foreign.write("model.dtype", "float32", "dtype")
