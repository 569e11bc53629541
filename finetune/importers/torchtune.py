"""torchtune's configuration into a recipe. Its defaults are those of its builders at bd2a0fc (April 2026).

Its files name other values of themselves, as in ${output_dir}/logs; OmegaConf replaces these references, and so does
`interpolated`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError
from finetune.importers.foreign_config import ForeignConfig, as_count, positive_or_none
from finetune.importers.shared import TEMPLATES, carry_batch_size, carry_trackers, data_set_entry, renamed_columns
from finetune.recipe.optimizers import DEFAULT, OPTIMIZER_NAMES
from finetune.recipe.yaml_text import MAX_BYTES, Parsed, dotted, shown

_LAYERS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]
# Builder of a data set -> its source, the layout of its rows, and whether all of a row is supervised by default.
_BUILDERS: dict[str, tuple[str | None, str, bool]] = {
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
# The text column that a builder reads if the configuration names none.
_TEXT_COLUMNS = {"wikitext_dataset": "page", "cnn_dailymail_articles_dataset": "article"}
_SCHEDULES = {
    "get_cosine_schedule_with_warmup": "cosine",
    "get_constant_schedule_with_warmup": "constant_with_warmup",
    "get_linear_schedule_with_warmup": "linear",
}
_NO_LIMIT = 8192  # tokens of a row if the configuration sets no limit
_TRACKERS = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard", "CometLogger": "comet"}


def convert(foreign: ForeignConfig) -> None:
    """Convert every section; keys that are not read are listed as left out. Raises RecipeError."""
    folder = foreign.get("checkpointer.checkpoint_dir")
    if folder is None:
        foreign.refuse("checkpointer.checkpoint_dir", "the model's folder is needed")
    if "Meta" in _class_name(foreign.get("checkpointer._component_")):
        foreign.leave("checkpointer._component_", "look", "Meta's own layout; name the same model in Hugging Face's")
    foreign.write("model.name_or_path", str(folder).rstrip("/"), "checkpointer.checkpoint_dir")
    _adapter(foreign, _class_name(foreign.get("model._component_")))
    _data(foreign)
    _training(foreign)

    # torchtune stores and computes everything in `dtype`, optimizer state and adapters too.
    dtype = str(foreign.get("dtype", "fp32"))
    if dtype == "bf16":
        foreign.write("training.mixed_precision", "bf16", "dtype")
        foreign.write("training.pure_bf16", True, "dtype: weights, adapters and optimizer state have it")
        return
    if dtype != "fp32":
        foreign.leave("dtype", "differs", "only bf16 and fp32 are offered")
    foreign.write("training.mixed_precision", "no", "dtype")
    foreign.write("model.dtype", "float32", "dtype")


def _class_name(component: Any) -> str:
    """AdamW of torch.optim.AdamW."""
    return str(component).rpartition(".")[2]


def _adapter(foreign: ForeignConfig, builder: str) -> None:
    if not re.match(r"q?(lora|dora)_", builder):
        foreign.write("lora", None, f"model: {builder}")
        return
    foreign.carry("lora.r", "model.lora_rank", default=8, change=as_count)
    foreign.carry("lora.lora_alpha", "model.lora_alpha", default=16)
    foreign.carry("lora.lora_dropout", "model.lora_dropout", default=0.0)
    modules = [_LAYERS.get(name, name) for name in foreign.names("model.lora_attn_modules")]
    if foreign.get("model.apply_lora_to_mlp"):
        modules += _MLP
    if foreign.get("model.apply_lora_to_output"):
        modules.append("lm_head")
    foreign.write("lora.target_modules", modules, "lora_attn_modules, apply_lora_to_mlp, apply_lora_to_output")
    if foreign.get("model.use_dora") or "dora" in builder:
        foreign.write("lora.use_dora", True, "model.use_dora")
    if foreign.get("model.quantize_base") or builder.startswith("q"):
        foreign.write("quantization.load_in_4bit", True, f"model: {builder}")  # torchao's NF4, of double quantisation


def _data(foreign: ForeignConfig) -> None:
    for section in ("model", "checkpointer", "tokenizer", "optimizer", "lr_scheduler", "loss", "metric_logger"):
        value = foreign.peek(section)
        if value is not None and not isinstance(value, dict):
            foreign.refuse(section, "write a section with _component_")
    keys = ["dataset"]
    if isinstance(foreign.peek("dataset"), list):
        keys = [f"dataset.{index}" for index in range(len(foreign.peek("dataset")))]
    if foreign.peek("dataset") is None:
        foreign.refuse("dataset", "a data set is needed")
    are_whole = [_supervises_whole_rows(foreign, key) for key in keys]
    foreign.write("data.train", [_data_set(foreign, key) for key in keys], "dataset")
    if foreign.peek("run_val_every_n_steps"):
        foreign.write("eval_steps", foreign.get("run_val_every_n_steps"), "run_val_every_n_steps")
        foreign.write("data.eval", [_data_set(foreign, "dataset_val")], "dataset_val")
    elif foreign.peek("dataset_val"):
        foreign.leave("dataset_val", "same", "run_val_every_n_steps is null, so it is not evaluated")
    limit = foreign.get("tokenizer.max_seq_len")
    if limit is None:
        foreign.write("data.max_length", _NO_LIMIT, "tokenizer.max_seq_len: null; a longer row is an error")
    else:
        foreign.write("data.max_length", limit, "tokenizer.max_seq_len")
        foreign.write("data.truncation", "right", "as torchtune")
    foreign.carry("data.packing", f"{keys[0]}.packed", default=False)
    foreign.write("data.train_on", "all" if are_whole[0] else "assistant", "train_on_input, or the builder's default")
    if len(set(are_whole)) > 1:
        foreign.leave("dataset", "differs", "one data.train_on for all data sets")
    if any("alpaca" in str(foreign.peek(f"{key}._component_")) for key in keys):
        foreign.write("data.chat_template", TEMPLATES["llama3_alpaca"], "Alpaca's words inside of Llama 3's turns")
        reason = "rows with an input: it follows the instruction here, without the heading ### Input: and its sentence"
        foreign.leave("dataset._component_", "look", reason)
    elif "llama3" in str(foreign.peek("tokenizer._component_")):
        foreign.write("data.chat_template", TEMPLATES["llama3"], "torchtune's, without a system prompt and a date")


def _supervises_whole_rows(foreign: ForeignConfig, entry_key: str) -> bool:
    _, _, default = _BUILDERS.get(_class_name(foreign.peek(f"{entry_key}._component_")), (None, "auto", False))
    train_on_input, strategy = foreign.get(f"{entry_key}.train_on_input"), foreign.get(f"{entry_key}.masking_strategy")
    if strategy is not None:
        return str(strategy) == "train_on_all"
    if train_on_input is None:
        return default
    return bool(train_on_input)


def _data_set(foreign: ForeignConfig, entry_key: str) -> dict[str, Any]:
    builder = _class_name(foreign.get(f"{entry_key}._component_"))
    source, layout, _ = _BUILDERS.get(builder, (None, "auto", False))
    if builder not in _BUILDERS:
        foreign.leave(f"{entry_key}._component_", "look", "a builder unknown here; name path and format of its rows")
    source = foreign.get(f"{entry_key}.source", source)
    column, style = foreign.get(f"{entry_key}.conversation_column"), foreign.get(f"{entry_key}.conversation_style")
    if style in ("sharegpt", "openai"):
        layout = "sharegpt" if style == "sharegpt" else "messages"
    columns = _columns(foreign, entry_key, builder, layout)
    if column is not None:
        columns = renamed_columns(**{"conversations" if layout == "sharegpt" else "messages": column})
    if layout == "auto" and not columns:
        reason = "rows need known columns: messages, or prompt and completion"
        foreign.leave(f"{entry_key}._component_", "look", reason)
    for key in ("train_on_input", "masking_strategy", "packed"):
        foreign.get(f"{entry_key}.{key}")
    return data_set_entry(
        str(source or builder),
        files=foreign.get(f"{entry_key}.data_files"),
        kind=source if source in ("json", "csv", "parquet") else None,
        name=foreign.get(f"{entry_key}.name"),
        split=foreign.get(f"{entry_key}.split"),
        format=layout,
        columns=columns,
    )


def _columns(foreign: ForeignConfig, entry_key: str, builder: str, layout: str) -> dict[str, str]:
    """A data set's columns by our names."""
    column_map = foreign.get(f"{entry_key}.column_map", {})
    text = foreign.get(f"{entry_key}.column", _TEXT_COLUMNS.get(builder))
    if not isinstance(column_map, dict):
        return {}
    if layout == "alpaca":
        return renamed_columns(**{ours: column_map.get(ours) for ours in ("instruction", "input", "output")})
    if builder == "instruct_dataset":
        return renamed_columns(instruction=column_map.get("input", "input"), output=column_map.get("output", "output"))
    return renamed_columns(text=text)


def _training(foreign: ForeignConfig) -> None:
    name, origin = "single", "one GPU"
    if foreign.gpus > 1:
        is_offloaded = foreign.get("fsdp_cpu_offload") or foreign.get("fsdp.cpu_offload")
        name, origin = "fsdp2_offload" if is_offloaded else "fsdp2", "torchtune shards by FSDP2"
    foreign.write("accelerate_config", name, origin)
    tensor_parallel = foreign.count("tensor_parallel_dim", 1)
    if tensor_parallel > 1:
        foreign.leave("tensor_parallel_dim", "same", "layers are not split over GPUs here; check by `finetune plan`")
    carry_batch_size(foreign, "batch_size", 1, gpus_per_row=tensor_parallel)
    epochs, steps = foreign.count("epochs", 1), foreign.count("max_steps_per_epoch")
    if steps:
        foreign.write("training.max_steps", steps * epochs, f"max_steps_per_epoch x epochs {epochs}")
    else:
        foreign.write("training.num_train_epochs", float(epochs), "epochs")
    _optimizer(foreign)
    _schedule(foreign)
    clip = foreign.get("clip_grad_norm")
    foreign.write("training.max_grad_norm", None if clip == "inf" else positive_or_none(clip), "clip_grad_norm")
    foreign.carry("training.activation_checkpointing", "enable_activation_checkpointing", default=False)
    if foreign.get("shuffle", True) is not True:
        foreign.leave("shuffle", "differs", "rows are always shuffled")
    foreign.carry("training.seed", "seed", change=as_count)
    foreign.carry("logging_steps", "log_every_n_steps", change=as_count)
    foreign.carry("output_dir", "output_dir")
    foreign.carry("save_total_limit", "checkpointer.keep_last_n_checkpoints")
    logger = _class_name(foreign.get("metric_logger._component_", ""))
    tracker = _TRACKERS.get(logger)
    if logger and tracker is None and logger not in ("DiskLogger", "StdoutLogger"):
        foreign.leave("metric_logger._component_", "look", "an unknown tracker; report_to: [wandb] or another")
    carry_trackers(foreign, {tracker: "metric_logger._component_"} if tracker else {})


def _optimizer(foreign: ForeignConfig) -> None:
    name = _class_name(foreign.get("optimizer._component_", "torch.optim.AdamW"))
    offered = OPTIMIZER_NAMES.get(name)
    if offered is None:
        foreign.leave("optimizer._component_", "differs", "not offered; AdamW takes its place")
    foreign.write("training.optim", offered or DEFAULT, f"optimizer._component_: {name}")
    foreign.carry("training.learning_rate", "optimizer.lr", default=1e-3)
    foreign.carry("training.weight_decay", "optimizer.weight_decay", default=0.01)
    weight_decay, _ = foreign.carried.get("training.weight_decay", (0, ""))
    if "lora" in foreign.carried and weight_decay:  # lora is carried as null: all weights are trained
        reason = "decays biases and norms there, matrices alone here"
        foreign.leave("optimizer.weight_decay", "differs", reason, weight_decay)
    foreign.get("optimizer.fused")
    betas = foreign.get("optimizer.betas")
    if betas:
        if not isinstance(betas, list) or len(betas) != 2:
            foreign.refuse("optimizer.betas", "write two numbers: [0.9, 0.95]")
        for constant, value in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            foreign.write(f"training.{constant}", value, "optimizer.betas")
    foreign.carry("training.adam_epsilon", "optimizer.eps")


def _schedule(foreign: ForeignConfig) -> None:
    name = _class_name(foreign.get("lr_scheduler._component_", ""))
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


# -- ${output_dir}: the value of another key of the same file ----------------------------------------------------------

_REFERENCE = re.compile(r"\$\{([^${}]{0,200})\}")
_MOST_STEPS = 8  # references in a row; each value has at most 20 levels, so recursion stays shallow
_VALUE_WEIGHT = 8  # characters that a number or a bracket counts as


def interpolated(file: Path, parsed: Parsed) -> dict[str, Any]:
    """A file's values with every ${key} replaced. Each value is built once. Together they may have as many characters
    as a file may have.

    Raises RecipeError, with line and column, for a missing key, for keys that name each other, and for text that grows
    beyond this limit.
    """
    return _Interpolation(file, parsed).all()


class _Interpolation:
    """Replaces references in one file. The methods return a value with its weight: an upper bound of its characters.

    Ten lists that each name the one before ten times would make 10^10 values. Their weights are added up before a value
    is built again, so such a file is refused at 1 MiB.
    """

    def __init__(self, file: Path, parsed: Parsed) -> None:
        self._file, self._parsed = file, parsed
        self._top: Mapping[str, Any] = parsed.value
        self._done: dict[str, tuple[Any, int]] = {}  # top-level key -> value, and its weight in characters
        self._open: list[str] = []  # the top-level keys that lead to the present one

    def all(self) -> dict[str, Any]:
        values, total = {}, 0
        for key in self._top:
            values[key], weight = self._top_level(key, (key,))
            total = self._bounded(total + weight, (key,))
        return values

    def _top_level(self, key: str, path: tuple[str | int, ...]) -> tuple[Any, int]:
        if key in self._open:
            raise self._mistake(path, f"${{{key}}} leads back to itself; write the value out")
        if len(self._open) > _MOST_STEPS:
            raise self._mistake(path, f"${{...}} leads through more than {_MOST_STEPS} keys; write the value out")
        if key not in self._done:
            self._open.append(key)
            self._done[key] = self._nested(self._top[key], (key,))
            self._open.pop()
        return self._done[key]

    def _nested(self, value: Any, path: tuple[str | int, ...]) -> tuple[Any, int]:
        if isinstance(value, str):
            return self._text(value, path)
        if not isinstance(value, dict | list):
            return value, _VALUE_WEIGHT
        keys: list[Any] = [*value] if isinstance(value, dict) else [*range(len(value))]
        results, total = [], _VALUE_WEIGHT
        for key in keys:
            result, weight = self._nested(value[key], (*path, key))
            results.append(result)
            total = self._bounded(total + weight + len(str(key)), path)
        if isinstance(value, dict):
            return dict(zip(keys, results, strict=True)), total
        return results, total

    def _text(self, text: str, path: tuple[str | int, ...]) -> tuple[Any, int]:
        match = _REFERENCE.fullmatch(text)
        if match:
            return self._referenced(match[1], path)
        parts, total, end = [], 0, 0
        for match in _REFERENCE.finditer(text):
            value, weight = self._referenced(match[1], path)
            total = self._bounded(total + weight + match.start() - end, path)
            parts += [text[end : match.start()], str(value)]
            end = match.end()
        return "".join([*parts, text[end:]]), total + len(text) - end

    def _referenced(self, name: str, path: tuple[str | int, ...]) -> tuple[Any, int]:
        """The value at a dotted name. A part of a section gets the whole section's weight, an upper bound."""
        first, *rest = name.strip().split(".")
        if first not in self._top:
            kind = "value" if ":" in name else "key"
            raise self._mistake(path, f"${{{shown(name)}}} is no {kind} of this file; write the value out")
        value, weight = self._top_level(first, path)
        for part in rest:
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                raise self._mistake(path, f"${{{shown(name)}}} is no key of this file; write the value out")
        return value, weight

    def _bounded(self, weight: int, path: tuple[str | int, ...]) -> int:
        if weight > MAX_BYTES:
            raise self._mistake(path, "${...} makes more than 1 MiB of it; write the value out")
        return weight

    def _mistake(self, path: tuple[str | int, ...], problem: str) -> RecipeError:
        place = self._parsed.values.get(path)
        position = f":{place.line}:{place.column}" if place else ""
        return RecipeError([f"{self._file}{position}: {shown(dotted(path))}: {problem}"])
