"""axolotl's configuration into a recipe. Its defaults are those of its schema at 067b021 (July 2026)."""

from __future__ import annotations

import re
from typing import Any

from finetune.importers.foreign_config import ForeignConfig, as_count, positive_or_none
from finetune.importers.preferences import (
    carry_judged,
    carry_simpo,
    carry_supervised_part,
    carry_trl_losses,
    leave_lengths_of_parts,
    switch_off_dropout,
)
from finetune.importers.shared import (
    TEMPLATES,
    carry_batch_size,
    carry_checkpointing,
    carry_held_out,
    carry_hub,
    carry_named_template,
    carry_optimizer,
    carry_remote_code,
    carry_rope_scaling,
    carry_scheduler,
    carry_strategy,
    carry_trackers,
    carry_warmup,
    chosen_strategy,
    data_set_entry,
    find_quantisation_key,
    keep_to_linear_layers,
    leave_end_token,
    renamed_columns,
)
from finetune.recipe.sections.training import Objective

# Tracker -> other keys that turn it on in axolotl, besides its switch.
_TRACKERS = {
    "wandb": ("wandb_project",),
    "mlflow": ("mlflow_experiment_name", "mlflow_tracking_uri"),
    "trackio": ("trackio_project_name",),
    "tensorboard": (),
    "comet": ("comet_project_name",),
    "swanlab": ("swanlab_project",),
}
_TRUNCATION = {"drop": "drop", "truncate": "right", "raise": "error"}
_TEMPLATE_NAMES = {"llama3": "llama3", "chatml": "chatml"}
# A row's type in axolotl's words -> our layout. There, alpaca is a text with headings, not a chat.
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text", "chat_template": "messages"}
_COLUMNS = {"messages": "messages", "conversations": "sharegpt"}
_NO_LINEAR = re.compile(r"embed|head$|^w[tp]e$|^shared$")  # names of embeddings and of the output layer
_REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's keys that hold reasoning
# The end-of-turn tokens in templates that axolotl names. Here the tokenizer's own template replaces them.
_TURN_ENDS = {
    "qwen": "<|im_end|>", "chatml": "<|im_end|>", "llama3": "<|eot_id|>", "llama4": "<|eot|>", "gemma": "<end_of_turn>",
    "phi_3": "<|end|>", "phi_4": "<|im_end|>", "mistral": "</s>", "deepseek": "<｜end▁of▁sentence｜>",
    "command_a": "<|END_OF_TURN_TOKEN|>", "cohere": "<|END_OF_TURN_TOKEN|>", "falcon_h1": "<|im_end|>",
}  # fmt: skip
# Settings that our formats follow without being told: the usual names of role and text, and of the supervised turns.
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
_TURN_KEYS, _TURN_NAMES = ("property_mappings.", "field_"), ("role", "content", "from", "value")
_KNOWN_ROLES = {"messages": ("user", "assistant", "system", "tool"), "sharegpt": (
    "human", "user", "gpt", "assistant", "model", "chatgpt", "system", "tool", "observation",
)}  # fmt: skip


def convert(foreign: ForeignConfig) -> None:
    """Convert every section; keys that are not read are listed as left out. Raises RecipeError."""
    foreign.replace_nulls(bf16=False)
    foreign.carry("model.name_or_path", "base_model")
    foreign.carry("model.revision", "revision_of_model", "model_revision")
    carry_remote_code(foreign)
    overrides = "overrides_of_model_config"
    carry_rope_scaling(foreign, "rope_scaling", f"{overrides}.rope_parameters", f"{overrides}.rope_scaling")
    leave_end_token(foreign, "special_tokens.eos_token")
    for plugin in foreign.names("plugins"):
        if "liger" in plugin or "cut_cross_entropy" in plugin:
            foreign.leave("plugins", "same", "another way to compute the same", plugin)
        else:
            foreign.leave("plugins", "differs", "what it adds is not offered", plugin)
    carry_strategy(foreign)
    _adapter(foreign)
    rl = foreign.get("rl")
    objective: Objective = "supervised"
    if rl is not None:
        objective = "kto" if rl == "kto" else "dpo"
    _data(foreign, objective)
    carry_held_out(foreign, "val_set_size")
    _training(foreign)
    if objective != "supervised":
        _preferences(foreign, str(rl), objective)
    else:
        for beginning in ("rl_beta", "dpo_", "kto_", "simpo_", "cpo_", "precompute_ref"):
            foreign.leave_unused(beginning, "belongs to training with rl")
    _precision(foreign)


def _preferences(foreign: ForeignConfig, rl: str, objective: Objective) -> None:
    """training.objective with its section. axolotl hands these keys to TRL's trainers."""
    foreign.write("training.objective", objective, "rl")
    foreign.carry(f"{objective}.beta", "trl.beta", "rl_beta", "dpo_beta", default=0.1)
    match rl:
        case "kto":
            keys = {"desirable": "kto_desirable_weight", "undesirable": "kto_undesirable_weight"}
            carry_judged(foreign, **keys, micro_batch="micro_batch_size")
        case "simpo":
            carry_simpo(foreign, alpha="cpo_alpha")
        case "ipo":
            foreign.write("dpo.loss_type", "ipo", "rl: ipo")
        case _:
            carry_trl_losses(foreign, "dpo_loss_type", "dpo_loss_weights", "dpo_label_smoothing")
            if weight := foreign.get("rpo_alpha"):
                carry_supervised_part(foreign, "rpo_alpha", weight)
    leave_lengths_of_parts(foreign, ("max_prompt_len", "trl.max_completion_length"))
    switch_off_dropout(foreign, "TRL's disable_dropout")


def _adapter(foreign: ForeignConfig) -> None:
    """lora and quantization. A key that axolotl does not hand over has peft's own default."""
    adapter = foreign.get("adapter")
    bits = find_quantisation_key(foreign)
    if adapter is None:
        foreign.write("lora", None, "no adapter")
        foreign.leave_unused("lora_", "no adapter is trained")
        if bits:
            foreign.leave(bits, "differs", "quantised weights are trained by adapters alone")
        return
    if adapter not in ("lora", "qlora"):
        foreign.refuse("adapter", "only lora and qlora are offered")
    foreign.carry("lora.r", "lora_r", default=8)
    foreign.carry("lora.lora_alpha", "lora_alpha", default=8)
    foreign.carry("lora.lora_dropout", "lora_dropout", default=0.0)
    foreign.carry("model.adapter", "lora_model_dir")
    all_linear, modules = foreign.get("lora_target_linear"), foreign.get("lora_target_modules")
    if all_linear:
        foreign.write("lora.target_modules", "all-linear", "lora_target_linear")
        # axolotl takes both; peft's all-linear has neither embeddings nor the head.
        others = [name for name in foreign.names("lora_target_modules") if _NO_LINEAR.search(name)]
        if others:
            reason = "adapted there beside all linear layers, and not here; all-linear leaves them out"
            foreign.leave("lora_target_modules", "differs", reason, others)
        elif modules:
            foreign.leave("lora_target_modules", "same", "lora_target_linear covers them")
    elif modules:
        foreign.write("lora.target_modules", modules, "lora_target_modules")
    else:
        foreign.write("lora.target_modules", ["q_proj", "v_proj"], "peft's default for Llama")
    foreign.carry("lora.modules_to_save", "lora_modules_to_save")
    for key in ("target_parameters", "rank_pattern", "alpha_pattern"):
        foreign.carry(f"lora.{key}", f"lora_{key}")
    keep_to_linear_layers(foreign)
    foreign.carry("lora.loraplus_lr_ratio", "loraplus_lr_ratio")
    foreign.carry("lora.use_rslora", "peft_use_rslora")
    foreign.carry("lora.use_dora", "peft_use_dora")
    start = foreign.get("peft_init_lora_weights")
    if start in (None, True, False, "gaussian", "orthogonal"):
        foreign.carry("lora.init_lora_weights", "peft_init_lora_weights")
    else:
        foreign.leave("peft_init_lora_weights", "differs", "adapters start as peft starts them, and add nothing")
    if bits:
        foreign.write(f"quantization.{bits}", True, bits)
        for key in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage"):
            foreign.carry(f"quantization.{key}", f"bnb_config_kwargs.{key}")


def _training(foreign: ForeignConfig) -> None:
    micro_batch, global_batch = foreign.count("micro_batch_size", 1), foreign.count("batch_size")
    accumulation = None
    if global_batch and not foreign.peek("gradient_accumulation_steps"):
        accumulation = global_batch // micro_batch
    if accumulation == 0:
        foreign.refuse("batch_size", f"write at least micro_batch_size, {micro_batch}")
    parallel_keys = ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size")
    context, sequence, tensor = (foreign.count(key, 1) for key in parallel_keys)
    # The first two keys are one setting under an old and a new name.
    gpus_per_row = max(context, sequence) * tensor
    carry_batch_size(foreign, "micro_batch_size", 1, accumulation=accumulation, gpus_per_row=gpus_per_row)
    for key, size in zip(parallel_keys, (context, sequence, tensor), strict=True):
        if size > 1:
            foreign.leave(key, "same", "a row is not split over GPUs here; check by `finetune plan` that it fits")
    foreign.carry("training.num_train_epochs", "num_epochs", default=1.0)
    foreign.carry("training.max_steps", "max_steps", change=as_count)
    foreign.carry("training.learning_rate", "learning_rate")
    _schedule(foreign)
    foreign.carry("training.weight_decay", "weight_decay", default=0.0)
    foreign.carry("training.max_grad_norm", "max_grad_norm", default=1.0, change=positive_or_none)
    carry_optimizer(foreign, "optimizer", "adamw_torch_fused")
    carry_checkpointing(foreign, "gradient_checkpointing", default=False)
    if foreign.peek("tiled_mlp") and not foreign.peek("lora_dropout"):
        shards = foreign.count("tiled_mlp_num_shards")
        tokens = -(-foreign.count("sequence_len", 512) // shards) if shards else 4096
        foreign.write("training.mlp_tile_tokens", tokens, "tiled_mlp")
        foreign.get("tiled_mlp")
    foreign.carry("training.seed", "seed", default=42)
    foreign.carry("training.early_stopping_patience", "early_stopping_patience")
    foreign.carry("logging_steps", "logging_steps", change=as_count)

    # axolotl turns a number an epoch into a share of the run: 4 an epoch over 2 epochs is every 1/8 of the run.
    epochs = foreign.number("num_epochs", 1)
    for recipe_key, an_epoch in (("eval_steps", "evals_per_epoch"), ("save_steps", "saves_per_epoch")):
        foreign.carry(recipe_key, recipe_key, change=as_count)
        if foreign.get(an_epoch) == 0:
            continue
        times = foreign.number(an_epoch)
        if not times or recipe_key in foreign.carried:
            continue
        if times * epochs > 1:
            foreign.write(recipe_key, 1 / (times * epochs), f"{an_epoch} {times} x num_epochs {epochs:g}")
        else:
            foreign.leave(an_epoch, "same", "the last step is always evaluated and saved")

    # A tracker is on by its own switch, or by a project's name.
    trackers: dict[str, str] = {}
    for name, other_keys in _TRACKERS.items():
        for key in (f"use_{name}", *other_keys):
            if foreign.get(key) not in (None, False):
                trackers[name] = key
                break
    if "wandb" in trackers and foreign.peek("wandb_mode") == "disabled":
        del trackers["wandb"]
    carry_trackers(foreign, trackers)
    foreign.carry("save_total_limit", "save_total_limit", default=4)
    foreign.carry("output_dir", "output_dir", default="./model-out")
    carry_hub(foreign, push=bool(foreign.peek("hub_model_id")))


def _schedule(foreign: ForeignConfig) -> None:
    """A cosine with a floor is a schedule with another name; warm-up that is not set is 3 % of the steps."""
    floor = foreign.get("cosine_min_lr_ratio")
    carry_scheduler(foreign, "lr_scheduler", "cosine")
    shape, _ = foreign.carried.get("training.lr_scheduler_type", ("cosine", ""))
    if floor is not None and shape == "cosine":
        foreign.write("training.lr_scheduler_type", "cosine_with_min_lr", "cosine with cosine_min_lr_ratio")
        foreign.write("training.lr_scheduler_kwargs", {"min_lr_rate": floor}, "cosine_min_lr_ratio")
    elif floor is not None:
        foreign.leave("cosine_min_lr_ratio", "differs", f"{shape} has no floor")
    if foreign.peek("cosine_constant_lr_ratio") == 0:
        foreign.leave("cosine_constant_lr_ratio", "same", "0 changes nothing")
    carry_warmup(foreign, default_ratio=0.03)
    if foreign.peek("warmup_steps") is None and foreign.peek("warmup_ratio") is None:
        foreign.write("training.warmup_ratio", 0.03, "axolotl's default, there at most 100 steps")


def _precision(foreign: ForeignConfig) -> None:
    """Number formats. Weights are loaded in the format of the computation. They are also trained in it, unless the
    strategy keeps float32 weights."""
    values = {key: foreign.get(key) for key in ("bf16", "bfloat16", "fp16", "float16", "float32")}
    mixed_precision = "no"
    if values["fp16"] or values["float16"]:
        mixed_precision = "fp16"
    elif values["bf16"] in (None, "auto", "full", True):
        mixed_precision = "bf16"
    if values["bfloat16"]:
        mixed_precision = "bf16"
    key = next((key for key, value in values.items() if value), "bf16" if values["bf16"] is False else "")
    foreign.write("training.mixed_precision", mixed_precision, key or "axolotl's default: bf16 where the GPU has it")
    if mixed_precision == "bf16":
        trains_all_weights = "lora" in foreign.carried  # as null
        if trains_all_weights and not chosen_strategy(foreign).shards_optimizer_state:
            foreign.write("training.pure_bf16", True, "axolotl trains all weights in the format it loads them in")
        return
    dtype = "float16" if mixed_precision == "fp16" else "float32"
    foreign.write("model.dtype", dtype, key)
    if "quantization.load_in_4bit" in foreign.carried:
        foreign.write("quantization.bnb_4bit_compute_dtype", dtype, key)


def _data(foreign: ForeignConfig, objective: Objective) -> None:
    """The data section: rows, their length and packing, the supervised part, the template. Raises RecipeError."""
    key = "datasets" if foreign.peek("datasets") else "pretraining_dataset"
    if not _is_list_of_sections(foreign.peek(key)):
        foreign.refuse("datasets", "a list of data sets is needed")
    test_sets = foreign.peek("test_datasets")
    if test_sets is not None and not _is_list_of_sections(test_sets):
        foreign.refuse("test_datasets", "a list of data sets is needed")
    for name in ("chat_template", "chat_template_jinja"):  # a data set's own wins; if all have it, it is the recipe's
        first, *others = (foreign.peek(f"{key}.{index}.{name}") for index in range(len(foreign.peek(key))))
        if first and foreign.peek(name) is None and all(other == first for other in others):
            foreign.values = {**foreign.values, name: first}
    entries = [_entry(foreign, f"{key}.{index}", objective) for index in range(len(foreign.peek(key)))]
    foreign.write("data.train", entries, key)
    if len(entries) > 1 and foreign.peek("dataset_exact_deduplication"):
        foreign.leave("dataset_exact_deduplication", "look", "a row is compared with those of its own data set alone")
    if test_sets:
        held_out = [_entry(foreign, f"test_datasets.{index}", objective) for index in range(len(test_sets))]
        foreign.write("data.eval", held_out, "test_datasets")
    foreign.carry("data.max_length", "sequence_len", default=512)
    if objective == "supervised":
        foreign.carry("data.packing", "sample_packing", default=False)
    elif foreign.get("sample_packing") is not None:
        foreign.leave("sample_packing", "same", "a step's answers are packed, and do not see each other")
    excess, origin = foreign.get("excess_length_strategy"), foreign.origin("excess_length_strategy")
    truncation = _TRUNCATION.get(str(excess or "drop").lower(), "error")
    formats = {entry.get("format") for entry in entries}
    if key == "pretraining_dataset":
        truncation, origin = ("split" if foreign.peek("sample_packing") else "right"), key
        if truncation == "split":
            foreign.leave(key, "differs", "pieces of a text overlap by 256 tokens there, and not here", "long texts")
    elif formats == {"text"}:
        truncation, origin = "split", "type: completion"
    elif "text" in formats:
        reason = f"a long text is cut into pieces there; here {truncation} holds for all rows"
        foreign.leave(f"{key}.*.type", "differs", reason, "completion")
    foreign.write("data.truncation", truncation, origin)
    if objective != "supervised":
        foreign.get("train_on_inputs")  # answers alone are supervised there too
    elif foreign.get("train_on_inputs") is True:
        foreign.write("data.train_on", "all", "train_on_inputs")
    _template(foreign, key)


def _is_list_of_sections(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _entry(foreign: ForeignConfig, entry_key: str, objective: Objective) -> dict[str, Any]:
    """One entry of data.train or data.eval."""
    for name, usual in _USUAL.items():
        if foreign.peek(f"{entry_key}.{name}") in usual:
            foreign.get(f"{entry_key}.{name}")
    for name, theirs in foreign.mapping(f"{entry_key}.message_property_mappings").items():
        is_usual = theirs in (name, *_USUAL.get(f"message_property_mappings.{name}", ()))
        if not is_usual and not {name, theirs} <= {*_REASONING}:
            key = f"{entry_key}.message_property_mappings.{name}"
            foreign.leave(key, "differs", "read by its own name alone", theirs)
    places = (f"{entry_key}.message_{place}{part}" for place in _TURN_KEYS for part in ("role", "content"))
    turn_keys = {str(foreign.peek(place)): place for place in places if foreign.peek(place) is not None}
    has_turns = _FORMATS.get(str(foreign.peek(f"{entry_key}.type")).split(".")[0]) not in ("alpaca", "text")
    if has_turns and not ({*turn_keys} <= {"role", "content"} or {*turn_keys} <= {"from", "value"}):
        place = next((turn_keys[name] for name in turn_keys if name not in _TURN_NAMES), [*turn_keys.values()][-1])
        foreign.refuse(place, "a turn is read by role and content, or by from and value; rename its keys in the data")
    if foreign.peek(f"{entry_key}.conversation") == foreign.peek("chat_template"):
        foreign.get(f"{entry_key}.conversation")
    # In a recipe all data sets share one template: the configuration's or the tokenizer's.
    template, shared_template = foreign.get(f"{entry_key}.chat_template"), foreign.peek("chat_template")
    if template not in (None, shared_template or "tokenizer_default"):
        reason = "all data sets have one template here: data.chat_template"
        foreign.leave(f"{entry_key}.chat_template", "differs", reason)
    if foreign.get(f"{entry_key}.chat_template_jinja") not in (None, foreign.peek("chat_template_jinja")):
        reason = "all data sets have one template: data.chat_template"
        foreign.leave(f"{entry_key}.chat_template_jinja", "differs", reason)
    path, kind, files = (foreign.get(f"{entry_key}.{name}") for name in ("path", "ds_type", "data_files"))
    if path is None and files is None:
        foreign.refuse(f"{entry_key}.path", "a data set needs a path")
    if foreign.get(f"{entry_key}.trust_remote_code"):
        foreign.leave(f"{entry_key}.trust_remote_code", "look", "code of data sets is never run")
    if objective == "supervised":
        layout, columns = _layout(foreign, entry_key)
    else:
        layout, columns = "auto", _answer_columns(foreign, entry_key, objective)
    roles = foreign.get(f"{entry_key}.roles")
    speakers = {"user": foreign.get(f"{entry_key}.field_human"), "assistant": foreign.get(f"{entry_key}.field_model")}
    renames = {str(name): role for role, name in speakers.items() if name not in (None, *_KNOWN_ROLES["sharegpt"])}
    if isinstance(roles, dict):  # our role -> its names in the data set: a list, or a single one
        for role, names in roles.items():
            for name in names if isinstance(names, list) else [names]:
                if name not in _KNOWN_ROLES.get(layout, ()):
                    renames[str(name)] = role
    return data_set_entry(
        str(path or ""),
        files=files,
        kind=kind,
        name=foreign.get(f"{entry_key}.name"),
        split=foreign.first(f"{entry_key}.split", f"{entry_key}.train_on_split")[1],
        revision=foreign.get(f"{entry_key}.revision"),
        format=layout,
        columns=columns,
        roles=renames,
        drop=["duplicate"] if foreign.get("dataset_exact_deduplication") else None,
        chat_template_kwargs=foreign.get("chat_template_kwargs"),
    )


def _layout(foreign: ForeignConfig, entry_key: str) -> tuple[str, dict[str, str]]:
    """Format and columns of a data set."""
    kind, turns = foreign.get(f"{entry_key}.type"), foreign.get(f"{entry_key}.field_messages")
    shared = {"system": foreign.get(f"{entry_key}.field_system"), "tools": foreign.get(f"{entry_key}.field_tools")}
    if isinstance(kind, dict):
        reason = "a custom prompt; the chat template's turns take its place"
        foreign.leave(f"{entry_key}.type", "differs", reason)
        fields = {ours: kind.get(f"field_{ours}") for ours in ("instruction", "input", "output", "system")}
        return "alpaca", renamed_columns(**{**shared, **fields})
    word = str(kind).split(".")[0].split(":")[0]  # chat_template of chat_template.default
    layout = _FORMATS.get(word)
    if word == "text" or layout == "text" or entry_key.startswith("pretraining"):
        column = foreign.get(f"{entry_key}.text_column")
        return "text", renamed_columns(text=foreign.get(f"{entry_key}.field", column))
    if layout == "messages":
        layout = _COLUMNS.get(str(turns or "messages"), "messages")
        for name in ("role", "content"):
            mapped = foreign.peek(f"{entry_key}.message_property_mappings.{name}")
            if (mapped or foreign.peek(f"{entry_key}.message_field_{name}")) in ("from", "value"):
                layout = "sharegpt"
    if layout in ("messages", "sharegpt"):
        ours = "messages" if layout == "messages" else "conversations"
        return layout, renamed_columns(**{ours: turns, **shared})
    if layout is None and kind is not None and turns is None:
        reason = "the layout is found from the columns; look at it by: finetune preview"
        foreign.leave(f"{entry_key}.type", "look", reason)
    return layout or "auto", renamed_columns(**shared)


# The question's column in a row of a strategy's name: chatml.intel, llama3.icr. None: the answers are dialogues.
_QUESTIONS = {
    "intel": "question", "icr": "input", "prompt_pairs": "prompt", "ultra": "prompt", "default": "prompt",
    "argilla": "instruction", "argilla_chat": None,
}  # fmt: skip


def _answer_columns(foreign: ForeignConfig, entry_key: str, objective: Objective) -> dict[str, str]:
    """`columns` of a data set of pairs, or of judged answers, from its strategy and its fields."""
    type_key = f"{entry_key}.type"
    kind = foreign.get(type_key)
    answers = ("chosen", "rejected") if objective == "dpo" else ("completion", "label")
    if isinstance(kind, dict):
        foreign.leave(type_key, "differs", "custom texts around the fields; the chat template's turns take their place")
        fields = {ours: kind.get(f"field_{ours}") for ours in ("system", *answers)}
        return renamed_columns(instruction=kind.get("field_prompt", "prompt"), **fields)
    family, _, strategy = str(kind).partition(".")
    if family == "user_defined":
        for name in ("prompt", "chosen", "rejected", "completion"):
            if foreign.get(f"{entry_key}.{name}_format"):
                reason = "custom text around the field; the chat template's turns take its place"
                foreign.leave(f"{entry_key}.{name}_format", "differs", reason)
        fields = {name: foreign.get(f"{entry_key}.field_{name}") for name in ("system", *answers)}
        return renamed_columns(instruction=foreign.get(f"{entry_key}.field_prompt", "prompt"), **fields)
    if family == "chat_template" and strategy in ("", "default"):
        turns = foreign.get(f"{entry_key}.field_messages", "messages")
        fields = {name: foreign.get(f"{entry_key}.field_{name}") for name in answers}
        return renamed_columns(prompt=turns, system=foreign.get(f"{entry_key}.field_system"), **fields)
    if family in ("chatml", "llama3", "chat_template") and strategy in _QUESTIONS:
        question = _QUESTIONS[strategy]
        if objective == "dpo" and strategy in ("ultra", "argilla_chat"):
            return {}  # messages, of which the first ones are the prompt
        if strategy == "default":
            foreign.leave(type_key, "look", "there the question is in prompt, input, question or instruction")
        if objective == "dpo" and strategy == "argilla":
            return {"chosen": "chosen_response", "rejected": "rejected_response"}
        return renamed_columns(instruction=question)
    foreign.leave(type_key, "look", "the columns are read by their names; look at them by: finetune preview")
    return {}


def _template(foreign: ForeignConfig, key: str) -> None:
    """Alpaca's rows are a text with headings; other rows follow the chat template that is named."""
    entry_keys = [f"{key}.{index}" for index in range(len(foreign.peek(key)))]
    kinds = {str(foreign.peek(f"{entry_key}.type")).split(".")[0] for entry_key in entry_keys}
    jinja, name = foreign.get("chat_template_jinja"), foreign.peek("chat_template")
    template_key = "chat_template" if name else "chat_template_jinja"
    conversation = next((f"{k}.conversation" for k in entry_keys if foreign.peek(f"{k}.conversation")), None)
    own = [kind for kind in ("chatml", "llama3") if kind in kinds]
    are_chats = kinds & {"chat_template", "sharegpt"}
    if own and foreign.peek("rl"):  # these strategies write a template's tokens themselves
        foreign.write("data.chat_template", TEMPLATES[own[0]], f"type: {own[0]}")
        if len(kinds) > 1:
            foreign.leave(f"{key}.*.type", "differs", f"all rows follow one template here, {own[0]}", sorted(kinds))
        if name or jinja:
            foreign.leave(template_key, "look", "the strategy's own turns are used")
    elif "alpaca" in kinds and not are_chats:
        foreign.write("data.chat_template", TEMPLATES["alpaca"], "type: alpaca")
        reason = "rows with an input: it follows the instruction here, without the heading ### Input: and its sentence"
        foreign.leave(f"{key}.*.type", "look", reason, "alpaca")
        if len(kinds) > 1:
            foreign.leave(f"{key}.*.type", "differs", "all rows follow one template here, Alpaca's", sorted(kinds))
        if name or jinja:
            foreign.leave(template_key, "look", "Alpaca's headings are used")
    elif jinja:
        foreign.get("chat_template")
        foreign.write("data.chat_template", jinja, "chat_template_jinja")
    elif name:
        has_tools = any(foreign.peek(f"{entry_key}.field_tools") for entry_key in entry_keys)
        carry_named_template(foreign, "chat_template", _TEMPLATE_NAMES, tools=has_tools)
    elif conversation:  # of older versions
        carry_named_template(foreign, conversation, _TEMPLATE_NAMES)

    if "alpaca" in kinds and are_chats:
        reason = "all rows follow one template here, the chats'; for Alpaca's headings train its rows by themselves"
        foreign.leave(f"{key}.*.type", "differs", reason, sorted(kinds))

    # eot_tokens: nothing to do if the template ends a turn with these tokens anyway.
    tokens = foreign.names("eot_tokens")
    template, _ = foreign.carried.get("data.chat_template", ("", ""))
    if "{" in str(template or ""):
        others = [token for token in tokens if token not in str(template)]
        if others:
            foreign.leave("eot_tokens", "differs", "the template writes no such end of turn", others)
        return
    beginnings = [beginning for beginning in _TURN_ENDS if str(name).startswith(beginning)]
    usual_end = _TURN_ENDS[beginnings[0]] if beginnings else None
    if tokens and tokens != [usual_end]:
        foreign.leave("eot_tokens", "look", "the tokenizer's template ends turns; see it by: finetune preview")
