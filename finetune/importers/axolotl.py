"""axolotl's configuration into a recipe. Its defaults are those of its schema at 067b021 (July 2026)."""

from __future__ import annotations

from typing import Any

from finetune.importers.foreign_config import ForeignConfig, Level, as_count, positive_or_none
from finetune.importers.shared import (
    batch,
    checkpointing,
    chosen_strategy,
    data_set,
    every,
    held_out,
    hub,
    named_template,
    only_linear_layers,
    optimizer,
    quantised_by,
    remote_code,
    renamed,
    scheduler,
    strategy,
    trackers,
    unused,
    warmup,
)
from finetune.importers.templates import TEMPLATES


def convert(foreign: ForeignConfig) -> None:
    """Convert every section; keys that are not read are listed as left out. Raises RecipeError."""
    foreign.carry("model.name_or_path", "base_model")
    foreign.carry("model.revision", "revision_of_model")
    remote_code(foreign)
    for plugin in foreign.names("plugins"):
        kernels = "liger" in plugin or "cut_cross_entropy" in plugin
        reason = "another way to compute the same" if kernels else "what it adds is not offered"
        foreign.leave("plugins", "same" if kernels else "differs", reason, plugin)
    strategy(foreign)
    _adapter(foreign)
    data(foreign)
    held_out(foreign, "val_set_size")
    _training(foreign)
    _precision(foreign)


def _adapter(foreign: ForeignConfig) -> None:
    """lora and quantization; peft's own defaults where axolotl hands nothing over."""
    kind = foreign.get("adapter")
    bits = quantised_by(foreign)
    if kind is None:
        foreign.write("lora", None, "no adapter")
        unused(foreign, "lora_", "no adapter is trained")
        if bits:
            foreign.leave(bits, "differs", "quantised weights are trained by adapters alone")
        return
    if kind not in ("lora", "qlora"):
        foreign.refuse("adapter", "only lora and qlora are offered")
    foreign.carry("lora.r", "lora_r", default=8)
    foreign.carry("lora.lora_alpha", "lora_alpha", default=8)
    foreign.carry("lora.lora_dropout", "lora_dropout", default=0.0)
    foreign.carry("model.adapter", "lora_model_dir")
    _targets(foreign)
    foreign.carry("lora.modules_to_save", "lora_modules_to_save")
    for key in ("target_parameters", "rank_pattern", "alpha_pattern"):
        foreign.carry(f"lora.{key}", f"lora_{key}")
    only_linear_layers(foreign)
    foreign.carry("lora.loraplus_lr_ratio", "loraplus_lr_ratio")
    foreign.carry("lora.use_rslora", "peft_use_rslora")
    foreign.carry("lora.use_dora", "peft_use_dora")
    foreign.carry("lora.init_lora_weights", "peft_init_lora_weights")
    if bits:
        foreign.write(f"quantization.{bits}", True, bits)
        for key in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage"):
            foreign.carry(f"quantization.{key}", f"bnb_config_kwargs.{key}")


def _targets(foreign: ForeignConfig) -> None:
    linear, named = foreign.get("lora_target_linear"), foreign.get("lora_target_modules")
    if linear:
        foreign.write("lora.target_modules", "all-linear", "lora_target_linear")
        if named:
            foreign.leave("lora_target_modules", "same", "lora_target_linear covers them")
    elif named:
        foreign.write("lora.target_modules", named, "lora_target_modules")
    else:
        foreign.write("lora.target_modules", ["q_proj", "v_proj"], "peft's default for Llama")


def _training(foreign: ForeignConfig) -> None:
    micro, total = foreign.count("micro_batch_size", 1), foreign.count("batch_size")
    steps = total // micro if total and not foreign.peek("gradient_accumulation_steps") else None
    if steps == 0:
        foreign.refuse("batch_size", f"write at least micro_batch_size, {micro}")
    shared = ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size")
    sizes = [foreign.count(key, 1) for key in shared]
    batch(foreign, "micro_batch_size", 1, accumulation=steps, split_by=max(sizes[:2]) * sizes[2])
    for key, size in zip(shared, sizes, strict=True):
        if size > 1:
            foreign.leave(key, "same", "a row is not split over GPUs here; check by `finetune plan` that it fits")
    foreign.carry("training.num_train_epochs", "num_epochs", default=1.0)
    foreign.carry("training.max_steps", "max_steps", change=as_count)
    foreign.carry("training.learning_rate", "learning_rate")
    _schedule(foreign)
    foreign.carry("training.weight_decay", "weight_decay", default=0.0)
    foreign.carry("training.max_grad_norm", "max_grad_norm", default=1.0, change=positive_or_none)
    optimizer(foreign, "optimizer", "adamw_torch_fused")
    checkpointing(foreign, "gradient_checkpointing", default=False)
    foreign.carry("training.seed", "seed", default=42)
    foreign.carry("training.early_stopping_patience", "early_stopping_patience")
    foreign.carry("logging_steps", "logging_steps", change=as_count)
    _intervals(foreign)
    trackers(foreign, _trackers(foreign))
    foreign.carry("save_total_limit", "save_total_limit", default=4)
    foreign.carry("output_dir", "output_dir", default="./model-out")
    hub(foreign, push=bool(foreign.peek("hub_model_id")))


def _intervals(foreign: ForeignConfig) -> None:
    """eval_steps and save_steps; axolotl makes a share of the run of a number an epoch, over num_epochs."""
    epochs = foreign.number("num_epochs", 1)
    for recipe_key, an_epoch in (("eval_steps", "evals_per_epoch"), ("save_steps", "saves_per_epoch")):
        every(foreign, recipe_key, recipe_key)
        times = foreign.number(an_epoch) if foreign.get(an_epoch) != 0 else None
        if not times or recipe_key in foreign.carried:
            continue
        if times * epochs > 1:
            foreign.write(recipe_key, 1 / (times * epochs), f"{an_epoch} {times} x num_epochs {epochs:g}")
        else:
            foreign.leave(an_epoch, "same", "the last step is always evaluated and saved")


def _trackers(foreign: ForeignConfig) -> dict[str, str]:
    """The trackers that are on, each with the key that turns it on: its own switch, or a project's name."""
    found: dict[str, str] = {}
    for name, named_by in _TRACKERS.items():
        key = next((key for key in (f"use_{name}", *named_by) if foreign.get(key) not in (None, False)), None)
        if key is not None:
            found[name] = key
    if "wandb" in found and foreign.peek("wandb_mode") == "disabled":
        del found["wandb"]
    return found


# Tracker -> other keys that turn it on in axolotl, besides its switch.
_TRACKERS = {
    "wandb": ("wandb_project",),
    "mlflow": ("mlflow_experiment_name", "mlflow_tracking_uri"),
    "trackio": ("trackio_project_name",),
    "tensorboard": (),
    "comet": ("comet_project_name",),
    "swanlab": ("swanlab_project",),
}


def _schedule(foreign: ForeignConfig) -> None:
    """A cosine with a floor is a schedule with another name; warm-up that is not set is 3 % of the steps."""
    floor = foreign.get("cosine_min_lr_ratio")
    scheduler(foreign, "lr_scheduler", "cosine")
    shape: Any = foreign.carried.get("training.lr_scheduler_type", ("cosine", ""))[0]
    if floor is not None and shape == "cosine":
        foreign.write("training.lr_scheduler_type", "cosine_with_min_lr", "cosine with cosine_min_lr_ratio")
        foreign.write("training.lr_scheduler_kwargs", {"min_lr_rate": floor}, "cosine_min_lr_ratio")
    elif floor is not None:
        foreign.leave("cosine_min_lr_ratio", "differs", f"{shape} has no floor")
    if foreign.peek("cosine_constant_lr_ratio") == 0:
        foreign.leave("cosine_constant_lr_ratio", "same", "0 changes nothing")
    warmup(foreign, default_ratio=0.03)
    if foreign.peek("warmup_steps") is None and foreign.peek("warmup_ratio") is None:
        foreign.write("training.warmup_ratio", 0.03, "axolotl's default, there at most 100 steps")


def _precision(foreign: ForeignConfig) -> None:
    """Weights are loaded in the format of the computation, and trained in it where no strategy keeps float32 ones."""
    values = {key: foreign.get(key) for key in ("bf16", "bfloat16", "fp16", "float16", "float32")}
    half = "fp16" if values["fp16"] or values["float16"] else "no"
    key = next((key for key, value in values.items() if value), "")
    usual = half == "no" and values["bf16"] in (None, "auto", "full", True)
    form = "bf16" if usual or values["bfloat16"] else half
    foreign.write("training.mixed_precision", form, key or "axolotl's default: bf16 where the GPU has it")
    whole_model = "lora" in foreign.carried  # as null
    if form == "bf16" and whole_model and not chosen_strategy(foreign).shards_optimizer_state:
        foreign.write("training.pure_bf16", True, "axolotl trains all weights in the format it loads them in")
    if form != "bf16":
        dtype = "float16" if form == "fp16" else "float32"
        foreign.write("model.dtype", dtype, key)
        if "quantization.load_in_4bit" in foreign.carried:
            foreign.write("quantization.bnb_4bit_compute_dtype", dtype, key)


_TRUNCATION = {"drop": "drop", "truncate": "right", "raise": "error"}
_NAMES = {"llama3": "llama3", "chatml": "chatml"}
# A row's type in their words -> ours; alpaca is a text with headings there, not a chat.
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text", "chat_template": "messages"}
_COLUMNS = {"messages": "messages", "conversations": "sharegpt"}
_REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's keys that hold reasoning
# The end-of-turn tokens in templates that axolotl names. Here the tokenizer's own template replaces them.
_TURN_ENDS = {
    "qwen": "<|im_end|>", "chatml": "<|im_end|>", "llama3": "<|eot_id|>", "llama4": "<|eot|>", "gemma": "<end_of_turn>",
    "phi_3": "<|end|>", "phi_4": "<|im_end|>", "mistral": "</s>", "deepseek": "<｜end▁of▁sentence｜>",
    "command_a": "<|END_OF_TURN_TOKEN|>", "cohere": "<|END_OF_TURN_TOKEN|>", "falcon_h1": "<|im_end|>",
}  # fmt: skip
# What says no more than our formats know by themselves: their own names of role and text, and of the learned turns.
_USUAL = {
    "message_property_mappings.role": ("role", "from"),
    "message_property_mappings.content": ("content", "value"),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "roles_to_train": (["assistant"], ["gpt"], ["gpt", "assistant"], ["assistant", "gpt"]),
    "train_on_eos": ("turn", "all"),
    "train_on_eot": ("turn", "all"),
    "field_thinking": _REASONING,
    "template_thinking_key": _REASONING,
    "split_thinking": (False,),
    "drop_system_message": (False,),
}
_KNOWN_ROLES = {"messages": ("user", "assistant", "system", "tool"), "sharegpt": (
    "human", "user", "gpt", "assistant", "model", "chatgpt", "system", "tool", "observation",
)}  # fmt: skip


def data(foreign: ForeignConfig) -> None:
    """The data section: rows, their length and packing, what is learned, the template. Raises RecipeError."""
    key = "datasets" if foreign.peek("datasets") else "pretraining_dataset"
    for each in (key, "test_datasets"):
        sets = foreign.peek(each)
        if (each == key or sets is not None) and not (
            isinstance(sets, list) and all(isinstance(s, dict) for s in sets)
        ):
            foreign.refuse("datasets" if each == key else each, "a list of data sets is needed")
    foreign.write("data.train", _entries(foreign, key), key)
    if foreign.peek("test_datasets"):
        foreign.write("data.eval", _entries(foreign, "test_datasets"), "test_datasets")
    foreign.carry("data.max_length", "sequence_len", default=512)
    foreign.carry("data.packing", "sample_packing", default=False)
    strategy = foreign.get("excess_length_strategy")
    why = "excess_length_strategy" if strategy else "axolotl's default"
    foreign.write("data.truncation", _TRUNCATION.get(str(strategy or "drop").lower(), "error"), why)
    if foreign.get("train_on_inputs") is True:
        foreign.write("data.train_on", "all", "train_on_inputs")
    _template(foreign, key)


def _entries(foreign: ForeignConfig, key: str) -> list[dict[str, Any]]:
    return [_entry(foreign, f"{key}.{index}") for index in range(len(foreign.peek(key)))]


def _entry(foreign: ForeignConfig, at: str) -> dict[str, Any]:
    for name, usual in _USUAL.items():
        if foreign.peek(f"{at}.{name}") in usual:
            foreign.get(f"{at}.{name}")
    for name, theirs in foreign.mapping(f"{at}.message_property_mappings").items():
        level = _mapped(name, theirs)
        if level is not None:
            foreign.leave(f"{at}.message_property_mappings.{name}", level, "read by its own name alone", theirs)
    _own_template(foreign, at)
    if foreign.get(f"{at}.path") is None:
        foreign.refuse(f"{at}.path", "a data set needs a path")
    kind = foreign.get(f"{at}.ds_type")
    files = foreign.get(f"{at}.data_files")
    if foreign.get(f"{at}.trust_remote_code"):
        foreign.leave(f"{at}.trust_remote_code", "look", "code of data sets is never run")
    layout, columns = _layout(foreign, at)
    return data_set(
        str(foreign.get(f"{at}.path")),
        files=files,
        kind=kind,
        name=foreign.get(f"{at}.name"),
        split=foreign.get(f"{at}.split"),
        revision=foreign.get(f"{at}.revision"),
        format=layout,
        columns=columns,
        roles=_roles(foreign, at, layout),
        chat_template_kwargs=foreign.get("chat_template_kwargs"),
    )


def _mapped(name: str, theirs: Any) -> Level | None:
    """The effect of another name for a message's key; None if the key is read under that name too."""
    if theirs in (name, *_USUAL.get(f"message_property_mappings.{name}", ())):
        return None
    return None if {name, theirs} <= {*_REASONING} else "differs"


def _own_template(foreign: ForeignConfig, at: str) -> None:
    """A data set's own template. Here all data sets share one: the configuration's or the tokenizer's."""
    own, whole = foreign.get(f"{at}.chat_template"), foreign.peek("chat_template") or "tokenizer_default"
    if own not in (None, whole):
        foreign.leave(f"{at}.chat_template", "differs", "all data sets have one template here: data.chat_template")
    jinja = foreign.get(f"{at}.chat_template_jinja")
    if jinja not in (None, foreign.peek("chat_template_jinja")):
        foreign.leave(f"{at}.chat_template_jinja", "differs", "all data sets have one template: data.chat_template")


def _roles(foreign: ForeignConfig, at: str, layout: str) -> dict[str, str]:
    """Their names of roles, without those that the layout knows."""
    given = foreign.get(f"{at}.roles")
    if not isinstance(given, dict):
        return {}
    known = _KNOWN_ROLES.get(layout, ())
    lists = {ours: names if isinstance(names, list) else [names] for ours, names in given.items()}
    return {str(name): ours for ours, names in lists.items() for name in names if name not in known}


def _layout(foreign: ForeignConfig, at: str) -> tuple[str, dict[str, str]]:
    """Format and columns of a data set."""
    kind, turns = foreign.get(f"{at}.type"), foreign.get(f"{at}.field_messages")
    shared = {"system": foreign.get(f"{at}.field_system"), "tools": foreign.get(f"{at}.field_tools")}
    if isinstance(kind, dict):
        reason = "a custom prompt; the chat template's turns take its place"
        foreign.leave(f"{at}.type", "differs", reason)
        named = {ours: kind.get(f"field_{ours}") for ours in ("instruction", "input", "output", "system")}
        return "alpaca", renamed(**{**shared, **named})
    word = "text" if at.startswith("pretraining") else str(kind).split(".")[0].split(":")[0]
    layout = "text" if word == "text" else _FORMATS.get(word)
    if layout == "text":
        column = foreign.get(f"{at}.text_column")
        return layout, renamed(text=foreign.get(f"{at}.field", column))
    if layout == "messages":
        layout = _COLUMNS.get(str(turns or "messages"), "messages")
        for name in ("role", "content"):
            field = foreign.peek(f"{at}.message_property_mappings.{name}") or foreign.peek(f"{at}.message_field_{name}")
            layout = "sharegpt" if field in ("from", "value") else layout
    if layout in ("messages", "sharegpt"):
        ours = "messages" if layout == "messages" else "conversations"
        return layout, renamed(**{ours: turns, **shared})
    if layout is None and kind is not None and turns is None:
        foreign.leave(f"{at}.type", "look", "the layout is found from the columns; look at it by: finetune preview")
    return layout or "auto", renamed(**shared)


def _template(foreign: ForeignConfig, key: str) -> None:
    """Alpaca's rows are a text with headings; other rows follow the chat template that is named."""
    kinds = {str(foreign.peek(f"{key}.{index}.type")).split(".")[0] for index in range(len(foreign.peek(key)))}
    jinja, name = foreign.get("chat_template_jinja"), foreign.peek("chat_template")
    if "alpaca" in kinds:
        foreign.write("data.chat_template", TEMPLATES["alpaca"], "type: alpaca")
        reason = "rows with an input: it follows the instruction here, without the heading ### Input: and its sentence"
        foreign.leave(f"{key}.*.type", "look", reason, "alpaca")
        if len(kinds) > 1:
            foreign.leave(f"{key}.*.type", "differs", "all rows follow one template here, Alpaca's", sorted(kinds))
        if name or jinja:
            foreign.leave("chat_template" if name else "chat_template_jinja", "look", "Alpaca's headings are used")
    elif jinja:
        foreign.get("chat_template")
        foreign.write("data.chat_template", jinja, "chat_template_jinja")
    elif name:
        with_tools = any(foreign.peek(f"{key}.{index}.field_tools") for index in range(len(foreign.peek(key))))
        named_template(foreign, "chat_template", _NAMES, tools=with_tools)
    _turn_ends(foreign)


def _turn_ends(foreign: ForeignConfig) -> None:
    """eot_tokens: nothing to do if the template ends a turn with these tokens anyway."""
    tokens = foreign.names("eot_tokens")
    text = str(foreign.carried.get("data.chat_template", ("", ""))[0] or "")
    if "{" in text:
        others = [token for token in tokens if token not in text]
        if others:
            foreign.leave("eot_tokens", "differs", "the template writes no such end of turn", others)
        return
    name = str(foreign.peek("chat_template"))
    usual = next((end for beginning, end in _TURN_ENDS.items() if name.startswith(beginning)), None)
    if tokens and tokens != [usual]:
        foreign.leave("eot_tokens", "look", "the tokenizer's template ends turns; see it by: finetune preview")
