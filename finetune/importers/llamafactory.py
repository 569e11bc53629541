"""LLaMA-Factory's configuration into a recipe. Its defaults are those of its arguments at ff6d4d1 (August 2026)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from finetune.errors import RecipeError
from finetune.importers import hf_trainer
from finetune.importers.foreign_config import ForeignConfig, as_count
from finetune.importers.shared import (
    data_set,
    held_out,
    json_near,
    named_template,
    only_linear_layers,
    remote_code,
    renamed,
    unused,
)
from finetune.recipe.sections.base import MOST
from finetune.recipe.yaml_text import shown

_NAMES = {
    "llama3": "llama3",
    "chatml": "chatml",
    "alpaca": "alpaca_turns",
}
_ADAMW_IN_DISGUISE = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon")


def convert(foreign: ForeignConfig) -> None:
    """Convert every section; keys that are not read are listed as left out. Raises RecipeError."""
    stage = foreign.get("stage", "sft")
    foreign.carry("model.name_or_path", "model_name_or_path")
    foreign.carry("model.revision", "model_revision")
    remote_code(foreign)
    _method(foreign)
    _data(foreign, pretraining=stage == "pt")
    off = foreign.get("disable_gradient_checkpointing") is True
    if off:
        foreign.write("training.activation_checkpointing", False, "disable_gradient_checkpointing")
    usual = hf_trainer.TRAINER_DEFAULTS["learning_rate"]
    hf_trainer.training(foreign, learning_rate=usual, recompute=not off)
    form = hf_trainer.precision(foreign, "no")
    if form == "fp16":
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


def _method(foreign: ForeignConfig) -> None:
    kind = foreign.get("finetuning_type", "lora")
    if kind == "full":
        foreign.write("lora", None, "finetuning_type: full")
        unused(foreign, "lora_", "no adapter is trained")
        return
    if kind != "lora":
        foreign.refuse("finetuning_type", "only full and lora are offered")
    rank = foreign.carry("lora.r", "lora_rank", default=8, change=as_count)
    foreign.carry("lora.lora_alpha", "lora_alpha", default=2 * rank if isinstance(rank, int) else 16)
    foreign.carry("lora.lora_dropout", "lora_dropout", default=0.0)
    foreign.carry("lora.target_modules", "lora_target", default="all-linear", change=_modules)
    only_linear_layers(foreign)
    foreign.carry("lora.modules_to_save", "additional_target", change=_names)
    foreign.carry("lora.use_rslora", "use_rslora")
    foreign.carry("lora.use_dora", "use_dora")
    foreign.carry("lora.loraplus_lr_ratio", "loraplus_lr_ratio")
    if foreign.get("pissa_init"):
        foreign.write("lora.init_lora_weights", "pissa", "pissa_init")
        if foreign.get("pissa_iter", 16) != -1:
            foreign.leave(
                "pissa_iter", "differs", "the exact decomposition is taken: a random one cannot be loaded again"
            )
    _started_from(foreign)
    _quantization(foreign)


def _started_from(foreign: ForeignConfig) -> None:
    """Of several adapters LLaMA-Factory merges all but the last first, of a new one all."""
    names = _names(foreign.get("adapter_name_or_path", []))
    several = isinstance(names, list) and len(names) > 1
    if several or (names and foreign.peek("create_new_adapter")):
        foreign.leave("adapter_name_or_path", "differs", "one adapter is trained further; merge the others first")
    elif names:
        foreign.write("model.adapter", names[0] if isinstance(names, list) else names, "adapter_name_or_path")


def _quantization(foreign: ForeignConfig) -> None:
    bits, method = foreign.get("quantization_bit"), foreign.get("quantization_method", "bnb")
    if bits is None:
        return
    if bits not in (4, 8):
        foreign.refuse("quantization_bit", "4 and 8 are offered, by bitsandbytes")
    if method not in ("bnb", "bitsandbytes"):
        foreign.leave("quantization_method", "differs", "bitsandbytes quantises instead")
    foreign.write(f"quantization.load_in_{bits}bit", True, "quantization_bit")
    foreign.carry("quantization.bnb_4bit_quant_type", "quantization_type", default="nf4")
    foreign.carry("quantization.bnb_4bit_use_double_quant", "double_quantization", default=True)


def _modules(named: Any) -> Any:
    return "all-linear" if named == "all" else _names(named)


def _names(named: Any) -> list[str]:
    return [name.strip() for name in named.split(",")] if isinstance(named, str) else named


def _data(foreign: ForeignConfig, *, pretraining: bool) -> None:
    sets = _sets(foreign, "dataset", pretraining)
    foreign.write("data.train", sets, "dataset")
    if foreign.peek("eval_dataset"):
        foreign.write("data.eval", _sets(foreign, "eval_dataset", pretraining), "eval_dataset")
    held_out(foreign, "val_size")
    foreign.carry("data.max_length", "cutoff_len", default=2048)
    _packing(foreign, pretraining)
    foreign.write("data.truncation", "right", "LLaMA-Factory's, which shortens question and answer of a chat in turn")
    if foreign.get("train_on_prompt"):
        foreign.write("data.train_on", "all", "train_on_prompt")
    elif foreign.get("mask_history"):
        foreign.write("data.train_on", "completion", "mask_history")
    if foreign.peek("template"):
        named_template(foreign, "template", _NAMES, tools=any(_has_tools(entry) for entry in sets))
    if foreign.get("mix_strategy", "concat") != "concat":
        foreign.leave("mix_strategy", "differs", "data sets are mixed by weight: how often each row is seen an epoch")


def _packing(foreign: ForeignConfig, pretraining: bool) -> None:
    """Their plain packing lets documents see each other; only neat_packing is what we do."""
    neat, packing = foreign.get("neat_packing"), foreign.get("packing")
    packed = bool(neat or (pretraining if packing is None else packing))
    foreign.write(
        "data.packing",
        packed,
        "neat_packing" if neat else "packing" if packing is not None else "LLaMA-Factory's default",
    )
    if packed and not neat:
        foreign.leave(
            "packing", "differs", "documents in one row do not see each other here, as with neat_packing", True
        )


def _sets(foreign: ForeignConfig, key: str, pretraining: bool) -> list[dict[str, Any]]:
    """Data sets by their names in dataset_info.json, which is read where it is found."""
    folder, most = foreign.get("dataset_dir", "data"), foreign.count("max_samples")
    known = json_near(foreign.folder, f"{folder}/dataset_info.json", f"../../{folder}/dataset_info.json")
    if known is None:
        reason = f"{folder}/dataset_info.json was not found, so files and layouts are guesses; correct data.train"
        foreign.leave(key, "look", reason)
    if foreign.peek(key) is None:
        foreign.refuse(key, "a data set is needed")
    names = [name for each in foreign.names(key) for name in _names(each)]
    rows = [_set(foreign, key, name, _entry(known, name), str(folder), most) for name in names]
    return [_as_text(row) for row in rows] if pretraining else rows


def _entry(known: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    """A data set's entry in dataset_info.json; None if the file or the entry is missing. Raises RecipeError."""
    entry = (known or {}).get(name)
    if entry is None:
        return None
    place = f"dataset_info.json: {shown(name)}"
    if not isinstance(entry, Mapping):
        raise RecipeError([f"{place}: is {shown(entry)}; write an object"])
    for part in ("columns", "tags"):
        inner = entry.get(part) or {}
        if not isinstance(inner, Mapping) or not all(isinstance(each, str | None) for each in inner.values()):
            raise RecipeError([f"{place}: {part} is {shown(inner)}; write an object whose values are texts"])
    for part in ("file_name", "hf_hub_url", "split", "subset", "revision", "formatting"):
        if not isinstance(entry.get(part), str | None):
            raise RecipeError([f"{place}: {part} is {shown(entry[part])}; write a text"])
    return entry


def _has_tools(entry: Mapping[str, Any]) -> bool:
    """Whether a data set declares tools in its rows, by a column or by a role name for turns with calls."""
    return "tools" in entry.get("columns", {}) or "function_call" in entry.get("roles", {}).values()


def _as_text(row: dict[str, Any]) -> dict[str, Any]:
    """A data set of pretraining: the text is in the column that an instruction would be in."""
    others = {key: value for key, value in row.items() if key != "columns"}
    text = renamed(text=row.get("columns", {}).get("instruction"))
    return others | {"format": "text"} | ({"columns": text} if text else {})


def _set(
    foreign: ForeignConfig, key: str, name: str, known: Mapping[str, Any] | None, folder: str, most: int | None
) -> dict[str, Any]:
    """An entry for data.train. Settings in LLaMA-Factory's entry that it cannot express are listed as left out."""
    if known is None:
        return data_set(f"{folder}/{name}.json", split=f"train[:{most}]" if most else None)
    tags, columns = known.get("tags") or {}, known.get("columns") or {}
    at = f"{key}: {name}"
    _leave_strange_keys(foreign, at, known)
    mapped = {"system": columns.get("system"), "tools": columns.get("tools")}
    more: dict[str, Any] = {"format": "alpaca", "split": _first_rows(foreign, at, known, most)}
    if known.get("formatting", "alpaca") == "alpaca":
        pairs = {"instruction": "prompt", "input": "query", "output": "response", "history": "history"}
        mapped = {ours: columns.get(theirs) for ours, theirs in pairs.items()} | mapped
        if not columns or columns.get("query"):
            reason = "rows with an input: one line break before it there, a blank line here"
            foreign.leave(at, "look", reason, columns.get("query", "input"))
    else:
        more["format"], turns = ("messages", "messages") if tags.get("content_tag") == "content" else _SHAREGPT
        mapped = {turns: columns.get("messages", "conversations")} | mapped
        more["roles"] = _roles(tags, more["format"])
        if not {tags.get("role_tag"), tags.get("content_tag")} <= {None, "from", "value", "role", "content"}:
            foreign.leave(at, "differs", "turns are read by from and value, or role and content", dict(tags))
    more["columns"] = renamed(**mapped)
    if "hf_hub_url" in known:
        return data_set(known["hf_hub_url"], name=known.get("subset"), revision=known.get("revision"), **more)
    return data_set(f"{folder}/{known.get('file_name') or name + '.json'}", **more)


_READ = {"hf_hub_url", "file_name", "formatting", "columns", "tags", "subset", "split", "revision", "num_samples"}
_READ_COLUMNS = {"prompt", "query", "response", "history", "messages", "system", "tools"}
_OTHER_PLACES = {"ms_hub_url", "om_hub_url", "cloud_file_name"}  # other places with the same rows


def _leave_strange_keys(foreign: ForeignConfig, at: str, known: Mapping[str, Any]) -> None:
    """List the keys in an entry of dataset_info.json that nothing here reads."""
    here = "hf_hub_url" in known or "file_name" in known
    for key, value in known.items():
        if key not in _READ and value not in (None, False, "") and not (here and key in _OTHER_PLACES):
            foreign.leave(f"{at}: {key}", "differs", f"{key} is not read", value)
    for key, value in (known.get("columns") or {}).items():
        if key not in _READ_COLUMNS and value is not None:
            foreign.leave(f"{at}: columns.{key}", "differs", f"{key} are not read", value)
    for key, value in (known.get("tags") or {}).items():
        if key not in (*_TAGS, "role_tag", "content_tag") and value is not None:
            foreign.leave(f"{at}: tags.{key}", "differs", f"{key} is not read", value)


def _first_rows(foreign: ForeignConfig, at: str, known: Mapping[str, Any], most: int | None) -> str:
    """The split: the first rows, as many as the smaller number in num_samples and max_samples."""
    drawn = as_count(known.get("num_samples"))
    if drawn is not None and (isinstance(drawn, bool) or not isinstance(drawn, int) or not 0 < drawn <= MOST):
        raise RecipeError([f"dataset_info.json: {at}: num_samples is {shown(drawn)}; write a whole number above 0"])
    if drawn is not None:
        reason = "these rows are drawn at random there, some twice where there are fewer; here the first are taken once"
        foreign.leave(f"{at}: num_samples", "look", reason, drawn)
    split, counts = str(known.get("split") or "train"), [count for count in (drawn, most) if count is not None]
    if counts and "[" in split:
        reason = f"is a slice already, so it is not cut to its first {min(counts):,} rows"
        foreign.leave(f"{at}: split", "differs", reason, split)
        return split
    return f"{split}[:{min(counts)}]" if counts else split


_SHAREGPT = ("sharegpt", "conversations")
_TAGS = {
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


def _roles(tags: Mapping[str, Any], layout: str) -> dict[str, str]:
    named = {str(tags[tag]): role for tag, role in _TAGS.items() if tags.get(tag) is not None}
    return {name: role for name, role in named.items() if _KNOWN_ROLES[layout].get(name) != role}
