"""LLaMA-Factory's configuration into a recipe. Its defaults are those of its arguments at ff6d4d1 (August 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.errors import RecipeError
from finetune.importers import hf_trainer
from finetune.importers.foreign_config import ForeignConfig, as_count
from finetune.importers.preferences import carry_judged, carry_simpo, carry_supervised_part, switch_off_dropout
from finetune.importers.shared import (
    carry_held_out,
    carry_named_template,
    carry_remote_code,
    data_set_entry,
    json_near,
    keep_to_linear_layers,
    renamed_columns,
)
from finetune.recipe.sections.base import MOST
from finetune.recipe.sections.training import Objective
from finetune.recipe.yaml_text import shown

_TEMPLATE_NAMES = {"llama3": "llama3", "chatml": "chatml", "alpaca": "alpaca_turns"}
_ADAMW_IN_DISGUISE = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon")
# The keys that are read in an entry of dataset_info.json.
_ENTRY_KEYS = {
    "hf_hub_url", "file_name", "formatting", "columns", "tags", "subset", "split", "revision", "num_samples",
}  # fmt: skip
_ENTRY_COLUMNS = {"prompt", "query", "response", "history", "messages", "system", "tools"}
_OTHER_PLACES = {"ms_hub_url", "om_hub_url", "cloud_file_name"}  # other places with the same rows
# A tag names the speaker of a turn in the data set's words.
_ROLE_OF_TAG = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}
# Role names that one of our layouts knows with the same meaning as the tag.
_KNOWN_ROLES = {
    "messages": {role: role for role in ("user", "assistant", "tool", "system")},
    "sharegpt": {
        "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "observation": "tool",
        "tool": "tool", "system": "system", "function_call": "function_call",
    },
}  # fmt: skip


def convert(foreign: ForeignConfig) -> None:
    """Convert every section; keys that are not read are listed as left out. Raises RecipeError."""
    stage = foreign.get("stage", "sft")
    foreign.replace_nulls(max_grad_norm=0.0)
    foreign.carry("model.name_or_path", "model_name_or_path")
    foreign.carry("model.revision", "model_revision")
    carry_remote_code(foreign)
    if kind := foreign.get("rope_scaling"):  # a name alone, whose factor LLaMA-Factory finds in the base's files
        reason = (
            f"write model.rope_scaling: {{rope_type: {kind}, factor: N}}; N is cutoff_len over the base's positions"
        )
        foreign.leave("rope_scaling", "look", reason)
    _method(foreign)
    objectives: dict[Any, Objective] = {"dpo": "dpo", "kto": "kto"}
    objective = objectives.get(stage, "supervised")
    if objective == "dpo" and foreign.peek("pref_loss") == "kto_pair":
        objective = "kto"
    _data(foreign, objective, pretraining=stage == "pt")
    recomputes = foreign.get("disable_gradient_checkpointing") is not True
    if not recomputes:
        foreign.write("training.activation_checkpointing", False, "disable_gradient_checkpointing")
    learning_rate = hf_trainer.TRAINER_DEFAULTS["learning_rate"]
    hf_trainer.carry_training(foreign, learning_rate=learning_rate, recompute=recomputes)
    if objective != "supervised":
        _preferences(foreign, objective)
    else:
        for beginning in ("pref_", "dpo_", "kto_", "simpo_", "ref_model", "ld_alpha"):
            foreign.leave_unused(beginning, "belongs to another stage")
    if hf_trainer.carry_precision(foreign, "no") == "fp16":
        foreign.write("model.dtype", "float16", "fp16")
        if "quantization.load_in_4bit" in foreign.carried:
            foreign.write("quantization.bnb_4bit_compute_dtype", "float16", "fp16")
    if foreign.get("pure_bf16"):
        foreign.write("training.mixed_precision", "bf16", "pure_bf16")
        foreign.write("training.pure_bf16", True, "pure_bf16")
    foreign.carry("training.early_stopping_patience", "early_stopping_steps")
    for key in _ADAMW_IN_DISGUISE:
        if foreign.get(key):
            foreign.leave(key, "differs", "not offered; AdamW takes its place")


def _preferences(foreign: ForeignConfig, objective: Objective) -> None:
    """training.objective with its section."""
    foreign.write("training.objective", objective, "stage")
    foreign.carry(f"{objective}.beta", "pref_beta", default=0.1)
    loss = foreign.get("pref_loss", "sigmoid")
    if objective == "kto":
        if loss == "kto_pair":
            foreign.leave("pref_loss", "differs", "a pair is two judged answers here, and each has its own loss")
        keys = {"desirable": "kto_chosen_weight", "undesirable": "kto_rejected_weight"}
        carry_judged(foreign, **keys, micro_batch="per_device_train_batch_size")
        if foreign.get("pref_ftx"):
            foreign.leave("pref_ftx", "differs", "kto has no supervised part here")
    elif loss == "simpo":
        carry_simpo(foreign)
    elif loss in ("sigmoid", "ipo"):
        foreign.write("dpo.loss_type", loss, foreign.origin("pref_loss"))
        if foreign.get("dpo_label_smoothing"):
            foreign.leave("dpo_label_smoothing", "differs", "sigmoid has none here; dpo.loss_type: robust has another")
    else:
        foreign.refuse("pref_loss", "sigmoid, ipo, simpo and kto_pair are offered; keep LLaMA-Factory for others")
    weight = foreign.get("pref_ftx") if objective == "dpo" else None
    if weight:
        carry_supervised_part(foreign, "pref_ftx", weight, "of each answer, then over answers")
    switch_off_dropout(foreign, "LLaMA-Factory switches dropout off")

    reference = foreign.get("ref_model")
    is_read = objective == "kto" or loss != "simpo"
    if reference and is_read:
        foreign.write(f"{objective}.reference", reference, "ref_model")
        for key in ("ref_model_adapters", "ref_model_quantization_bit"):
            if foreign.get(key):
                foreign.leave(key, "differs", "the reference is loaded as ref_model's files say; merge adapters first")
    elif is_read and "model.adapter" in foreign.carried:
        foreign.write(f"{objective}.reference", "adapter_off", "LLaMA-Factory's, whose reference is the base alone")
        reason = "the reference there is the base without this adapter; reference: start counts from what it has learnt"
        foreign.leave("adapter_name_or_path", "look", reason)


def _method(foreign: ForeignConfig) -> None:
    """The lora and quantization sections."""
    method = foreign.get("finetuning_type", "lora")
    if method == "full":
        foreign.write("lora", None, "finetuning_type: full")
        foreign.leave_unused("lora_", "no adapter is trained")
        return
    if method != "lora":
        foreign.refuse("finetuning_type", "only full and lora are offered")
    rank = foreign.carry("lora.r", "lora_rank", default=8, change=as_count)
    foreign.carry("lora.lora_alpha", "lora_alpha", default=2 * rank if isinstance(rank, int) else 16)
    foreign.carry("lora.lora_dropout", "lora_dropout", default=0.0)
    modules = foreign.get("lora_target")
    if modules is None:
        foreign.default("lora.target_modules", "all-linear")
    else:
        foreign.write("lora.target_modules", "all-linear" if modules == "all" else _names(modules), "lora_target")
    keep_to_linear_layers(foreign)
    foreign.carry("lora.modules_to_save", "additional_target", change=_names)
    foreign.carry("lora.use_rslora", "use_rslora")
    foreign.carry("lora.use_dora", "use_dora")
    foreign.carry("lora.loraplus_lr_ratio", "loraplus_lr_ratio")

    # LLaMA-Factory first merges all adapters but the last one; with create_new_adapter it merges all of them.
    adapters = _names(foreign.get("adapter_name_or_path", []))
    if isinstance(adapters, list) and len(adapters) > 1:
        foreign.leave("adapter_name_or_path", "differs", "one adapter is trained further; merge the others first")
    elif adapters:
        adapter = adapters[0] if isinstance(adapters, list) else adapters
        foreign.write("model.adapter", adapter, "adapter_name_or_path")
        if foreign.get("create_new_adapter"):
            foreign.refuse("create_new_adapter", "merge the adapter first, and name the result in model_name_or_path")

    bits, library = foreign.get("quantization_bit"), foreign.get("quantization_method", "bnb")
    if bits is None:
        return
    if bits not in (4, 8):
        foreign.refuse("quantization_bit", "4 and 8 are offered, by bitsandbytes")
    if library not in ("bnb", "bitsandbytes"):
        foreign.leave("quantization_method", "differs", "bitsandbytes quantises instead")
    foreign.write(f"quantization.load_in_{bits}bit", True, "quantization_bit")
    foreign.carry("quantization.bnb_4bit_quant_type", "quantization_type", default="nf4")
    foreign.carry("quantization.bnb_4bit_use_double_quant", "double_quantization", default=True)


def _names(value: Any) -> list[str]:
    """`a, b` as a list. Anything but text stays as it is."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",")]
    unchanged: list[str] = value
    return unchanged


def _data(foreign: ForeignConfig, objective: Objective, *, pretraining: bool) -> None:
    entries = _data_sets(foreign, "dataset", pretraining, objective)
    foreign.write("data.train", entries, "dataset")
    if foreign.peek("eval_dataset"):
        foreign.write("data.eval", _data_sets(foreign, "eval_dataset", pretraining, objective), "eval_dataset")
    carry_held_out(foreign, "val_size")
    foreign.carry("data.max_length", "cutoff_len", default=2048)

    # With plain packing, documents in one row attend to each other. Only neat_packing is the packing of this kit.
    neat, packing = foreign.get("neat_packing"), foreign.get("packing")
    origin = "LLaMA-Factory's default"
    if neat:
        origin = "neat_packing"
    elif packing is not None:
        origin = "packing"
    is_packed = bool(neat or (pretraining if packing is None else packing))
    if objective != "supervised":  # a step's answers are packed, and do not see each other
        is_packed = False
    else:
        foreign.write("data.packing", is_packed, origin)
    if is_packed and not neat:
        reason = "documents in one row do not see each other here, as with neat_packing"
        foreign.leave("packing", "differs", reason, True)

    if pretraining and is_packed:
        foreign.write("data.truncation", "split", "LLaMA-Factory joins texts and cuts them")
    else:
        reason = "LLaMA-Factory's, which shortens question and answer of a chat in turn"
        foreign.write("data.truncation", "right", reason)
    if objective != "supervised":
        foreign.leave_unused("train_on_prompt", "answers alone are supervised")
        foreign.leave_unused("mask_history", "answers alone are supervised")
    elif foreign.get("train_on_prompt"):
        foreign.write("data.train_on", "all", "train_on_prompt")
    elif foreign.get("mask_history"):
        foreign.write("data.train_on", "completion", "mask_history")
    if foreign.peek("template"):
        # Rows declare tools in a column, or by a role name for turns with calls.
        has_tools = any(
            "tools" in entry.get("columns", {}) or "function_call" in entry.get("roles", {}).values()
            for entry in entries
        )
        carry_named_template(foreign, "template", _TEMPLATE_NAMES, tools=has_tools)
    if foreign.get("mix_strategy", "concat") != "concat":
        foreign.leave("mix_strategy", "differs", "data sets are mixed by weight: how often each row is seen an epoch")


def _data_sets(foreign: ForeignConfig, key: str, pretraining: bool, objective: Objective) -> list[dict[str, Any]]:
    """Data sets by their names in dataset_info.json, which is read if it is on this machine."""
    folder, most_rows = foreign.get("dataset_dir", "data"), foreign.count("max_samples")
    known_sets = json_near(foreign.folder, f"{folder}/dataset_info.json", f"../../{folder}/dataset_info.json")
    if known_sets is None:
        reason = f"{folder}/dataset_info.json was not found, so files and layouts are guesses; correct data.train"
        foreign.leave(key, "look", reason)
    if foreign.peek(key) is None:
        foreign.refuse(key, "a data set is needed")
    entries = []
    for name in [name for names in foreign.names(key) for name in _names(names)]:
        known = _checked_entry(known_sets or {}, name)
        entry = _data_set(foreign, f"{key}: {name}", name, known, str(folder), most_rows, objective)
        if pretraining:  # the text is in the column that an instruction would be in
            text = renamed_columns(text=entry.pop("columns", {}).get("instruction"))
            entry["format"] = "text"
            if text:
                entry["columns"] = text
        entries.append(entry)
    return entries


def _checked_entry(known_sets: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """A data set's entry in dataset_info.json; None if the file or the entry is missing. Raises RecipeError."""
    entry = known_sets.get(name)
    if entry is None:
        return None
    place = f"dataset_info.json: {shown(name)}"
    if not isinstance(entry, Mapping):
        raise RecipeError([f"{place}: is {shown(entry)}; write an object"])
    for part in ("columns", "tags"):
        inner = entry.get(part) or {}
        if not isinstance(inner, Mapping) or not all(isinstance(value, str | None) for value in inner.values()):
            raise RecipeError([f"{place}: {part} is {shown(inner)}; write an object whose values are texts"])
    for part in ("file_name", "hf_hub_url", "split", "subset", "revision", "formatting"):
        if not isinstance(entry.get(part), str | None):
            raise RecipeError([f"{place}: {part} is {shown(entry[part])}; write a text"])
    return entry


def _data_set(
    foreign: ForeignConfig,
    place: str,
    name: str,
    known: Mapping[str, Any] | None,
    folder: str,
    most_rows: int | None,
    objective: Objective,
) -> dict[str, Any]:
    """An entry for data.train. Settings in LLaMA-Factory's entry that it cannot express are listed as left out."""
    if known is None:
        return data_set_entry(f"{folder}/{name}.json", split=f"train[:{most_rows}]" if most_rows else None)
    tags, columns = known.get("tags") or {}, known.get("columns") or {}
    _leave_unknown_keys(foreign, place, known, objective)
    renames = {"system": columns.get("system"), "tools": columns.get("tools")}
    more: dict[str, Any] = {"format": "alpaca", "split": _first_rows(foreign, place, known, most_rows)}
    if known.get("formatting", "alpaca") == "alpaca":
        pairs = {"instruction": "prompt", "input": "query", "output": "response", "history": "history"}
        renames = {ours: columns.get(theirs) for ours, theirs in pairs.items()} | renames
        if not columns or columns.get("query"):
            reason = "rows with an input: one line break before it there, a blank line here"
            foreign.leave(place, "look", reason, columns.get("query", "input"))
    else:
        layout, turns = "sharegpt", "conversations"
        if tags.get("content_tag") == "content":
            layout, turns = "messages", "messages"
        renames = {turns: columns.get("messages", "conversations")} | renames
        roles = {str(tags[tag]): role for tag, role in _ROLE_OF_TAG.items() if tags.get(tag) is not None}
        more["format"] = layout
        more["roles"] = {name: role for name, role in roles.items() if _KNOWN_ROLES[layout].get(name) != role}
        turn_keys = (tags.get("role_tag") or "from", tags.get("content_tag") or "value")
        if turn_keys not in (("from", "value"), ("role", "content")):
            remedy = "a turn is read by from and value, or by role and content; rename its keys in the data"
            raise RecipeError(
                [f"dataset_info.json: {place}: role_tag and content_tag are {shown(turn_keys)}; {remedy}"]
            )
    if objective != "supervised":
        more["format"], roles = "auto", _KNOWN_ROLES["sharegpt"] | _KNOWN_ROLES["messages"]
        more["roles"] = {name: role for name, role in more.get("roles", {}).items() if roles.get(name) != role}
        renames = _answer_columns(renames, columns, objective)
    more["columns"] = renamed_columns(**renames)
    if "hf_hub_url" in known:
        return data_set_entry(known["hf_hub_url"], name=known.get("subset"), revision=known.get("revision"), **more)
    return data_set_entry(f"{folder}/{known.get('file_name') or name + '.json'}", **more)


def _answer_columns(
    renames: Mapping[str, str | None], columns: Mapping[str, str], objective: Objective
) -> dict[str, str | None]:
    """The columns of pairs or judged answers, from those that supervised rows would have.

    Turns are the prompt of a pair, and of a judged answer the whole dialogue. Texts become chats.
    """
    turns = next((theirs for ours, theirs in renames.items() if ours in ("messages", "conversations")), None)
    kept = {ours: renames.get(ours) for ours in ("system", "tools")}
    if objective == "dpo" or {"chosen", "rejected"} <= {*columns}:
        kept |= {"chosen": columns.get("chosen"), "rejected": columns.get("rejected")}
        if turns:
            return {"prompt": turns, **kept}
        return {"instruction": renames.get("instruction"), "input": renames.get("input"), **kept}
    kept["label"] = columns.get("kto_tag")
    if turns:
        return {"completion": turns, **kept}
    question = {"instruction": renames.get("instruction"), "input": renames.get("input")}
    return {**question, "completion": renames.get("output") or "output", **kept}


def _leave_unknown_keys(foreign: ForeignConfig, place: str, known: Mapping[str, Any], objective: Objective) -> None:
    """List the keys in an entry of dataset_info.json that nothing here reads."""
    read, read_columns = set(_ENTRY_KEYS), set(_ENTRY_COLUMNS)
    if objective != "supervised":
        read_columns.remove("history")  # a prompt of turns is one column: messages
        read.add("ranking")
        read_columns |= {"chosen", "rejected", "kto_tag"}
    if "hf_hub_url" in known or "file_name" in known:
        read |= _OTHER_PLACES
    for key, value in known.items():
        if key not in read and value not in (None, False, ""):
            foreign.leave(f"{place}: {key}", "differs", f"{key} is not read", value)
    for key, value in (known.get("columns") or {}).items():
        if key not in read_columns and value is not None:
            reason = f"{key} is not read"
            if key == "history":
                reason = "the earlier turns are not read; write them and the question as one column of messages"
            foreign.leave(f"{place}: columns.{key}", "differs", reason, value)
    for key, value in (known.get("tags") or {}).items():
        if key not in (*_ROLE_OF_TAG, "role_tag", "content_tag") and value is not None:
            foreign.leave(f"{place}: tags.{key}", "differs", f"{key} is not read", value)


def _first_rows(foreign: ForeignConfig, place: str, known: Mapping[str, Any], most_rows: int | None) -> str:
    """The split with its first rows, as many as the smaller number in num_samples and max_samples: train[:500]."""
    drawn = as_count(known.get("num_samples"))
    if drawn is not None and (isinstance(drawn, bool) or not isinstance(drawn, int) or not 0 < drawn <= MOST):
        raise RecipeError([f"dataset_info.json: {place}: num_samples is {shown(drawn)}; write a whole number above 0"])
    if drawn is not None:
        reason = "these rows are drawn at random there, some twice where there are fewer; here the first are taken once"
        foreign.leave(f"{place}: num_samples", "look", reason, drawn)
    split = str(known.get("split") or "train")
    counts = [count for count in (drawn, most_rows) if count is not None]
    if not counts:
        return split
    if "[" in split:
        reason = f"is a slice already, so it is not cut to its first {min(counts):,} rows"
        foreign.leave(f"{place}: split", "differs", reason, split)
        return split
    return f"{split}[:{min(counts)}]"
