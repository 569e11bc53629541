"""axolotl's configuration into a recipe. Its defaults are those of its schema at 067b021 (July 2026)."""

from __future__ import annotations

from typing import Any

from finetune.importers.foreign_config import ForeignConfig, positive_or_none, whole
from finetune.importers.shared import (
    batch,
    checkpointing,
    chosen_strategy,
    data_set,
    every,
    held_out,
    hub,
    named_template,
    optimizer,
    quantised_by,
    remote_code,
    scheduler,
    strategy,
    unused,
    warmup,
)
from finetune.importers.templates import TEMPLATES

_OTHER_TRAINING = ("rl", "reward_model", "process_reward_model", "qat", "num_labels")


def convert(theirs: ForeignConfig) -> None:
    """Every section in turn; what is not read here ends in the list of what was left out. Raises RecipeError."""
    for key in _OTHER_TRAINING:
        if theirs.peek(key):
            theirs.refuse(key, "this kit does supervised fine-tuning of language models, and no other training")
    theirs.carry("model.name_or_path", "base_model")
    theirs.carry("model.revision", "revision_of_model")
    remote_code(theirs)
    for plugin in theirs.get("plugins", []):
        kernels = "liger" in plugin or "cut_cross_entropy" in plugin
        reason = "another way to compute the same" if kernels else "what it adds is not done here"
        theirs.leave("plugins", "same" if kernels else "differs", reason, plugin)
    strategy(theirs)
    _adapter(theirs)
    data(theirs)
    held_out(theirs, "val_set_size")
    _training(theirs)
    _precision(theirs)


def _adapter(theirs: ForeignConfig) -> None:
    """lora and quantization; peft's own defaults where axolotl hands nothing over."""
    kind = theirs.get("adapter")
    bits = quantised_by(theirs)
    if kind is None:
        theirs.write("lora", None, "no adapter")
        unused(theirs, "lora_", "no adapter is trained")
        if bits:
            theirs.leave(bits, "differs", "quantised weights are trained by adapters alone")
        return
    if kind not in ("lora", "qlora"):
        theirs.refuse("adapter", "lora and qlora are known here")
    theirs.carry("lora.r", "lora_r", default=8)
    theirs.carry("lora.lora_alpha", "lora_alpha", default=8)
    theirs.carry("lora.lora_dropout", "lora_dropout", default=0.0)
    _targets(theirs)
    theirs.carry("lora.modules_to_save", "lora_modules_to_save")
    theirs.carry("lora.use_rslora", "peft_use_rslora")
    theirs.carry("lora.use_dora", "peft_use_dora")
    theirs.carry("lora.init_lora_weights", "peft_init_lora_weights")
    if bits:
        theirs.write(f"quantization.{bits}", True, bits)
        for key in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage"):
            theirs.carry(f"quantization.{key}", f"bnb_config_kwargs.{key}")


def _targets(theirs: ForeignConfig) -> None:
    linear, named = theirs.get("lora_target_linear"), theirs.get("lora_target_modules")
    if linear:
        theirs.write("lora.target_modules", "all-linear", "lora_target_linear")
        if named:
            theirs.leave("lora_target_modules", "same", "lora_target_linear covers them")
    elif named:
        theirs.write("lora.target_modules", named, "lora_target_modules")
    else:
        theirs.write("lora.target_modules", ["q_proj", "v_proj"], "peft's default for Llama")


def _training(theirs: ForeignConfig) -> None:
    micro, total = theirs.peek("micro_batch_size") or 1, theirs.get("batch_size")
    steps = total // micro if total and not theirs.peek("gradient_accumulation_steps") else None
    shared = ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size")
    sizes = [theirs.get(key, 1) for key in shared]
    batch(theirs, "micro_batch_size", 1, accumulation=steps, split_by=max(1, max(sizes[:2]) * sizes[2]))
    for key, size in zip(shared, sizes, strict=True):
        if size > 1:
            theirs.leave(key, "same", "a row is not split over GPUs here; check by `finetune plan` that it fits")
    theirs.carry("training.num_train_epochs", "num_epochs", default=1.0)
    theirs.carry("training.max_steps", "max_steps", change=whole)
    theirs.carry("training.learning_rate", "learning_rate")
    _schedule(theirs)
    theirs.carry("training.weight_decay", "weight_decay", default=0.0)
    theirs.carry("training.max_grad_norm", "max_grad_norm", default=1.0, change=positive_or_none)
    optimizer(theirs, "optimizer", "adamw_torch_fused")
    checkpointing(theirs, "gradient_checkpointing", default=False)
    theirs.carry("training.seed", "seed", default=42)
    theirs.carry("training.early_stopping_patience", "early_stopping_patience")
    theirs.carry("logging_steps", "logging_steps", change=whole)
    every(theirs, "eval_steps", "eval_steps")
    every(theirs, "save_steps", "save_steps")
    theirs.carry("save_total_limit", "save_total_limit", default=4)
    theirs.carry("output_dir", "output_dir", default="./model-out")
    hub(theirs, push=bool(theirs.peek("hub_model_id")))


def _schedule(theirs: ForeignConfig) -> None:
    """A cosine with a floor is a shape of its own; without a word on warming up it is 3 % of the steps."""
    floor = theirs.get("cosine_min_lr_ratio")
    scheduler(theirs, "lr_scheduler", "cosine")
    shape: Any = theirs.carried.get("training.lr_scheduler_type", ("cosine", ""))[0]
    if floor is not None and shape == "cosine":
        theirs.write("training.lr_scheduler_type", "cosine_with_min_lr", "cosine with cosine_min_lr_ratio")
        theirs.write("training.lr_scheduler_kwargs", {"min_lr_rate": floor}, "cosine_min_lr_ratio")
    elif floor is not None:
        theirs.leave("cosine_min_lr_ratio", "differs", f"{shape} has no floor")
    if theirs.peek("cosine_constant_lr_ratio") == 0:
        theirs.leave("cosine_constant_lr_ratio", "same", "0 changes nothing")
    warmup(theirs, default_ratio=0.03)
    if theirs.peek("warmup_steps") is None and theirs.peek("warmup_ratio") is None:
        theirs.write("training.warmup_ratio", 0.03, "axolotl's default, there at most 100 steps")


def _precision(theirs: ForeignConfig) -> None:
    """Weights are loaded in the format of the computation, and trained in it where no strategy keeps float32 ones."""
    said = {key: theirs.get(key) for key in ("bf16", "bfloat16", "fp16", "float16", "float32")}
    half = "fp16" if said["fp16"] or said["float16"] else "no"
    key = next((key for key, value in said.items() if value), "")
    usual = half == "no" and said["bf16"] in (None, "auto", "full", True)
    form = "bf16" if usual or said["bfloat16"] else half
    theirs.write("training.mixed_precision", form, key or "axolotl's default: bf16 where the GPU has it")
    whole_model = "lora" in theirs.carried  # as null
    if form == "bf16" and whole_model and not chosen_strategy(theirs).shards_optimizer_state:
        theirs.write("training.pure_bf16", True, "axolotl trains all weights in the format it loads them in")
    if form != "bf16":
        dtype = "float16" if form == "fp16" else "float32"
        theirs.write("model.dtype", dtype, key)
        if "quantization.load_in_4bit" in theirs.carried:
            theirs.write("quantization.bnb_4bit_compute_dtype", dtype, key)


_TRUNCATION = {"drop": "drop", "truncate": "right", "raise": "error"}
_NAMES = {"llama3": "llama3", "chatml": "chatml"}
# A row's type in their words -> ours; alpaca is a text with headings there, no chat.
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text", "chat_template": "messages"}
_COLUMNS = {"messages": "messages", "conversations": "sharegpt"}
# What says no more than our formats know by themselves: their own names of role and text, and of the learned turns.
_USUAL = {
    "message_property_mappings.role": ("role", "from"),
    "message_property_mappings.content": ("content", "value"),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "roles_to_train": (["assistant"], ["gpt"], ["gpt", "assistant"], ["assistant", "gpt"]),
    "train_on_eos": ("turn", "all"),
    "train_on_eot": ("turn", "all"),
    "roles.assistant": (["gpt"], ["assistant"], ["gpt", "model"], ["model"], ["gpt", "assistant"]),
    "roles.user": (["human"], ["user"], ["human", "user"]),
    "roles.system": (["system"],),
    "roles.tool": (["tool"],),
    "field": ("text",),
    "field_tools": ("tools",),
}


def data(theirs: ForeignConfig) -> None:
    """The data section: rows, their length and packing, what is learned, the template. Raises RecipeError."""
    key = "datasets" if theirs.peek("datasets") else "pretraining_dataset"
    if not isinstance(theirs.peek(key), list):
        theirs.refuse("datasets", "a list of data sets is needed")
    theirs.write("data.train", _entries(theirs, key), key)
    if theirs.peek("test_datasets"):
        theirs.write("data.eval", _entries(theirs, "test_datasets"), "test_datasets")
    theirs.carry("data.max_length", "sequence_len", default=512)
    theirs.carry("data.packing", "sample_packing", default=False)
    strategy = theirs.get("excess_length_strategy")
    why = "excess_length_strategy" if strategy else "axolotl's default"
    theirs.write("data.truncation", _TRUNCATION.get(str(strategy or "drop").lower(), "error"), why)
    if theirs.get("train_on_inputs") is True:
        theirs.write("data.train_on", "all", "train_on_inputs")
    _template(theirs, key)


def _entries(theirs: ForeignConfig, key: str) -> list[dict[str, Any]]:
    return [_entry(theirs, f"{key}.{index}") for index in range(len(theirs.peek(key)))]


def _entry(theirs: ForeignConfig, at: str) -> dict[str, Any]:
    for name, usual in _USUAL.items():
        if theirs.peek(f"{at}.{name}") in usual:
            theirs.get(f"{at}.{name}")
    if theirs.get(f"{at}.path") is None:
        theirs.refuse(f"{at}.path", "a data set needs a path")
    kind = theirs.get(f"{at}.ds_type")
    files = theirs.get(f"{at}.data_files")
    if theirs.get(f"{at}.trust_remote_code"):
        theirs.leave(f"{at}.trust_remote_code", "look", "code of data sets is never run")
    return data_set(
        str(theirs.get(f"{at}.path")),
        files=files,
        kind=kind,
        name=theirs.get(f"{at}.name"),
        split=theirs.get(f"{at}.split"),
        revision=theirs.get(f"{at}.revision"),
        format=_format(theirs, at),
    )


def _format(theirs: ForeignConfig, at: str) -> str:
    kind, column = theirs.get(f"{at}.type"), theirs.get(f"{at}.field_messages")
    word = "text" if at.startswith("pretraining") else str(kind).split(".")[0].split(":")[0]
    if isinstance(kind, dict):
        theirs.leave(f"{at}.type", "differs", "a prompt of its own; write rows with the columns prompt and completion")
        return "auto"
    ours = "text" if word == "text" else _FORMATS.get(word)
    if ours == "messages":
        ours = _COLUMNS.get(str(column or "messages"))
        if ours is None:
            theirs.leave(f"{at}.field_messages", "look", "rename the column messages, or conversations")
        for name in ("role", "content"):
            shown = theirs.peek(f"{at}.message_property_mappings.{name}") or theirs.peek(f"{at}.message_field_{name}")
            ours = "sharegpt" if shown in ("from", "value") else ours
    if ours is None and kind is not None and column is None:
        theirs.leave(f"{at}.type", "look", "the layout is found from the columns; look at it by: finetune preview")
    return ours or "auto"


def _template(theirs: ForeignConfig, key: str) -> None:
    """Alpaca's rows are a text with headings; other rows follow the chat template that is named."""
    kinds = {str(theirs.peek(f"{key}.{index}.type")).split(".")[0] for index in range(len(theirs.peek(key)))}
    jinja, name = theirs.get("chat_template_jinja"), theirs.peek("chat_template")
    if "alpaca" in kinds:
        theirs.write("data.chat_template", TEMPLATES["alpaca"], "type: alpaca")
        reason = "rows with an input: it follows the instruction here, without the heading ### Input: and its sentence"
        theirs.leave(f"{key}.*.type", "look", reason, "alpaca")
        if len(kinds) > 1:
            theirs.leave(f"{key}.*.type", "differs", "all rows follow one template here, Alpaca's", sorted(kinds))
        if name or jinja:
            theirs.leave("chat_template" if name else "chat_template_jinja", "look", "Alpaca's headings are used")
    elif jinja:
        theirs.get("chat_template")
        theirs.write("data.chat_template", jinja, "chat_template_jinja")
    elif name:
        named_template(theirs, "chat_template", _NAMES)
