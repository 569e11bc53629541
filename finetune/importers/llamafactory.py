"""LLaMA-Factory's configuration into a recipe. Its defaults are those of its arguments at ff6d4d1 (August 2026)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from finetune.importers import hf_trainer
from finetune.importers.foreign_config import ForeignConfig, whole
from finetune.importers.shared import data_set, held_out, named_template, remote_code, unused

_NAMES = {
    "llama3": "llama3",
    "chatml": "chatml",
    "qwen3_nothink": "chatml",
    "alpaca": "alpaca_turns",
}
_ADAMW_IN_DISGUISE = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon")


def convert(theirs: ForeignConfig) -> None:
    """Every section in turn; what is not read here ends in the list of what was left out. Raises RecipeError."""
    stage = theirs.get("stage", "sft")
    if stage not in ("sft", "pt"):
        theirs.refuse("stage", "this kit does supervised fine-tuning of language models, and no other training")
    theirs.carry("model.name_or_path", "model_name_or_path")
    theirs.carry("model.revision", "model_revision")
    remote_code(theirs)
    _method(theirs)
    _data(theirs, pretraining=stage == "pt")
    off = theirs.get("disable_gradient_checkpointing") is True
    if off:
        theirs.write("training.activation_checkpointing", False, "disable_gradient_checkpointing")
    usual = hf_trainer.DEFAULTS["learning_rate"]
    hf_trainer.training(theirs, learning_rate=usual, recompute=not off)
    form = hf_trainer.precision(theirs, "no")
    if form == "fp16":
        theirs.write("model.dtype", "float16", "fp16")
        if "quantization.load_in_4bit" in theirs.carried:
            theirs.write("quantization.bnb_4bit_compute_dtype", "float16", "fp16")
    if theirs.get("pure_bf16"):
        theirs.write("training.mixed_precision", "bf16", "pure_bf16")
        theirs.write("training.pure_bf16", True, "pure_bf16")
    theirs.carry("training.early_stopping_patience", "early_stopping_steps")
    for key in _ADAMW_IN_DISGUISE:
        if theirs.get(key):
            theirs.leave(key, "differs", "not offered; AdamW takes its place")


def _method(theirs: ForeignConfig) -> None:
    kind = theirs.get("finetuning_type", "lora")
    if kind == "full":
        theirs.write("lora", None, "finetuning_type: full")
        unused(theirs, "lora_", "no adapter is trained")
        return
    if kind != "lora":
        theirs.refuse("finetuning_type", "full and lora are known here")
    rank = theirs.carry("lora.r", "lora_rank", default=8, change=whole)
    theirs.carry("lora.lora_alpha", "lora_alpha", default=2 * rank if isinstance(rank, int) else 16)
    theirs.carry("lora.lora_dropout", "lora_dropout", default=0.0)
    theirs.carry("lora.target_modules", "lora_target", default="all-linear", change=_modules)
    theirs.carry("lora.modules_to_save", "additional_target", change=_names)
    theirs.carry("lora.use_rslora", "use_rslora")
    theirs.carry("lora.use_dora", "use_dora")
    if theirs.get("pissa_init"):
        theirs.write("lora.init_lora_weights", "pissa", "pissa_init")
        if theirs.get("pissa_iter", 16) != -1:
            theirs.leave(
                "pissa_iter", "differs", "the exact decomposition is taken: a random one cannot be loaded again"
            )
    _quantization(theirs)


def _quantization(theirs: ForeignConfig) -> None:
    bits, way = theirs.get("quantization_bit"), theirs.get("quantization_method", "bnb")
    if bits is None:
        return
    if bits not in (4, 8):
        theirs.refuse("quantization_bit", "4 and 8 are offered, by bitsandbytes")
    if way not in ("bnb", "bitsandbytes"):
        theirs.leave("quantization_method", "differs", "bitsandbytes quantises here")
    theirs.write(f"quantization.load_in_{bits}bit", True, "quantization_bit")
    theirs.carry("quantization.bnb_4bit_quant_type", "quantization_type", default="nf4")
    theirs.carry("quantization.bnb_4bit_use_double_quant", "double_quantization", default=True)


def _modules(named: Any) -> Any:
    return "all-linear" if named == "all" else _names(named)


def _names(named: Any) -> list[str]:
    return [name.strip() for name in named.split(",")] if isinstance(named, str) else named


def _data(theirs: ForeignConfig, *, pretraining: bool) -> None:
    theirs.write("data.train", _sets(theirs, "dataset", pretraining), "dataset")
    if theirs.peek("eval_dataset"):
        theirs.write("data.eval", _sets(theirs, "eval_dataset", pretraining), "eval_dataset")
    held_out(theirs, "val_size")
    theirs.carry("data.max_length", "cutoff_len", default=2048)
    _packing(theirs, pretraining)
    theirs.write("data.truncation", "right", "LLaMA-Factory's way; there of a long chat question and answer in turn")
    if theirs.get("train_on_prompt"):
        theirs.write("data.train_on", "all", "train_on_prompt")
    elif theirs.get("mask_history"):
        theirs.write("data.train_on", "completion", "mask_history")
    if theirs.peek("template"):
        named_template(theirs, "template", _NAMES)
    if theirs.get("mix_strategy", "concat") != "concat":
        theirs.leave("mix_strategy", "differs", "data sets are mixed by weight: how often each row is seen an epoch")


def _packing(theirs: ForeignConfig, pretraining: bool) -> None:
    """Their plain packing lets documents see each other; only neat_packing is what we do."""
    neat, said = theirs.get("neat_packing"), theirs.get("packing")
    packed = bool(neat or (pretraining if said is None else said))
    theirs.write(
        "data.packing", packed, "neat_packing" if neat else "packing" if said is not None else "LLaMA-Factory's default"
    )
    if packed and not neat:
        theirs.leave(
            "packing", "differs", "documents in one row do not see each other here, as with neat_packing", True
        )


def _sets(theirs: ForeignConfig, key: str, pretraining: bool) -> list[dict[str, Any]]:
    """Names of dataset_info.json, read from there where it is here."""
    folder, most = theirs.get("dataset_dir", "data"), whole(theirs.get("max_samples"))
    known = _known_sets(theirs, str(folder))
    if known is None:
        reason = f"{folder}/dataset_info.json is not here, so files and layouts are guesses; correct data.train"
        theirs.leave(key, "look", reason)
    if theirs.peek(key) is None:
        theirs.refuse(key, "a data set is needed")
    split = f"train[:{most}]" if most else None
    rows = [_set(theirs, key, name, (known or {}).get(name), str(folder), split) for name in _names(theirs.get(key))]
    return [row | ({"format": "text"} if pretraining else {}) for row in rows]


def _known_sets(theirs: ForeignConfig, folder: str) -> Mapping[str, Any] | None:
    for path in (theirs.folder / folder, theirs.folder.parent.parent / folder):
        try:
            found = json.loads((path / "dataset_info.json").read_text("utf-8"))
        except (OSError, ValueError):
            continue
        return found if isinstance(found, Mapping) else None
    return None


def _set(
    theirs: ForeignConfig, key: str, name: str, known: Mapping[str, Any] | None, folder: str, split: str | None
) -> dict[str, Any]:
    if known is None:
        return data_set(f"{folder}/{name}.json", split=split)
    layout = known.get("formatting", "alpaca")
    columns = known.get("columns") or {}
    named = {"messages": {"messages": "messages", "conversations": "sharegpt"}.get(columns.get("messages", ""))}
    ours = layout if layout == "alpaca" else named["messages"] or "sharegpt"
    if any(columns.get(field, field) != field for field in ("system", "tools")) or "prompt" in columns:
        theirs.leave(f"{key}: {name}", "look", f"rename its columns as format {ours} has them", columns)
    for strange in ("ranking", "images", "videos", "audios"):
        if known.get(strange) or strange in columns:
            theirs.leave(f"{key}: {name}", "differs", f"{strange} are not read here", columns or True)
    if "hf_hub_url" in known:
        return data_set(known["hf_hub_url"], name=known.get("subset"), split=split or known.get("split"), format=ours)
    return data_set(f"{folder}/{known.get('file_name', name + '.json')}", split=split, format=ours)
