"""LLaMA-Factory's configuration into a recipe. Its defaults are those of its arguments at ff6d4d1 (August 2026)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from finetune.importers import hf_trainer
from finetune.importers.foreign_config import ForeignConfig, as_count
from finetune.importers.shared import data_set, held_out, named_template, remote_code, renamed, unused
from finetune.paths import read_regular
from finetune.untrusted.json_files import MOST_JSON_BYTES

_NAMES = {
    "llama3": "llama3",
    "chatml": "chatml",
    "qwen3_nothink": "chatml",
    "alpaca": "alpaca_turns",
}
_ADAMW_IN_DISGUISE = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon")


def convert(foreign: ForeignConfig) -> None:
    """Convert every section; keys that are not read are listed as left out. Raises RecipeError."""
    stage = foreign.get("stage", "sft")
    if stage not in ("sft", "pt"):
        foreign.refuse("stage", "this kit does supervised fine-tuning of language models, and no other training")
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
    foreign.write("data.train", _sets(foreign, "dataset", pretraining), "dataset")
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
        named_template(foreign, "template", _NAMES)
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
    folder, most = foreign.get("dataset_dir", "data"), as_count(foreign.get("max_samples"))
    known = _known_sets(foreign, str(folder))
    if known is None:
        reason = f"{folder}/dataset_info.json was not found, so files and layouts are guesses; correct data.train"
        foreign.leave(key, "look", reason)
    if foreign.peek(key) is None:
        foreign.refuse(key, "a data set is needed")
    split = f"train[:{most}]" if most else None
    rows = [_set(foreign, key, name, (known or {}).get(name), str(folder), split) for name in _names(foreign.get(key))]
    return [_as_text(row) for row in rows] if pretraining else rows


def _as_text(row: dict[str, Any]) -> dict[str, Any]:
    """A data set of pretraining: the text is in the column that an instruction would be in."""
    others = {key: value for key, value in row.items() if key != "columns"}
    text = renamed(text=row.get("columns", {}).get("instruction"))
    return others | {"format": "text"} | ({"columns": text} if text else {})


def _known_sets(foreign: ForeignConfig, folder: str) -> Mapping[str, Any] | None:
    for path in (foreign.folder / folder, foreign.folder.parent.parent / folder):
        try:
            entries = json.loads(read_regular(path / "dataset_info.json", MOST_JSON_BYTES))
        except (OSError, ValueError):
            continue
        return entries if isinstance(entries, Mapping) else None
    return None


def _set(
    foreign: ForeignConfig, key: str, name: str, known: Mapping[str, Any] | None, folder: str, split: str | None
) -> dict[str, Any]:
    if known is None:
        return data_set(f"{folder}/{name}.json", split=split)
    tags, columns = known.get("tags") or {}, known.get("columns") or {}
    for strange in ("ranking", "images", "videos", "audios"):
        if known.get(strange) or strange in columns:
            foreign.leave(f"{key}: {name}", "differs", f"{strange} are not read", columns or True)
    shared = {"system": columns.get("system"), "tools": columns.get("tools")}
    if known.get("formatting", "alpaca") == "alpaca":
        pairs = {"instruction": "prompt", "input": "query", "output": "response", "history": "history"}
        format, mapped = "alpaca", renamed(**{ours: columns.get(theirs) for ours, theirs in pairs.items()}, **shared)
    else:
        format, turns = ("messages", "messages") if tags.get("content_tag") == "content" else _SHAREGPT
        mapped = renamed(**{turns: columns.get("messages", "conversations")}, **shared)
    if not {tags.get("role_tag"), tags.get("content_tag")} <= {None, "from", "value", "role", "content"}:
        foreign.leave(f"{key}: {name}", "differs", "turns are read by from and value, or role and content", tags)
    more: dict[str, Any] = {"format": format, "columns": mapped, "roles": _roles(tags)}
    if "hf_hub_url" in known:
        split = split or known.get("split")
        return data_set(known["hf_hub_url"], name=known.get("subset"), split=split, **more)
    return data_set(f"{folder}/{known.get('file_name', name + '.json')}", split=split, **more)


_SHAREGPT = ("sharegpt", "conversations")
_TAGS = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}
_KNOWN_ROLES = ("human", "user", "gpt", "assistant", "observation", "tool", "system")


def _roles(tags: Mapping[str, Any]) -> dict[str, str]:
    return {str(tags[tag]): role for tag, role in _TAGS.items() if tags.get(tag) not in (None, *_KNOWN_ROLES)}
