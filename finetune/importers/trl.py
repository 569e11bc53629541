"""TRL's SFT configuration, and alignment-handbook's, into a recipe. Its defaults are those of SFTConfig 1.16."""

from __future__ import annotations

from typing import Any

from finetune.importers import hf_trainer
from finetune.importers.foreign_config import ForeignConfig
from finetune.importers.shared import data_set, quantised_by, remote_code, unused

# What SFTConfig and ModelConfig do where nothing is said, beside transformers' own defaults.
DEFAULTS: dict[str, Any] = {
    "learning_rate": 2e-5,
    "max_length": 1024,
    "packing": False,
    "gradient_checkpointing": True,
    "dtype": "float32",
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": False,
}
_DTYPES = ("bfloat16", "float16", "float32")


def convert(theirs: ForeignConfig) -> None:
    """Every section in turn; what is not read here ends in the list of what was left out. Raises RecipeError."""
    if theirs.peek("beta") or theirs.peek("reward_model_path"):
        theirs.refuse("beta" if theirs.peek("beta") else "reward_model_path", "only SFT's configuration is known here")
    theirs.carry("model.name_or_path", "model_name_or_path")
    theirs.carry("model.revision", "model_revision")
    remote_code(theirs)
    _adapter(theirs)
    _data(theirs)
    hf_trainer.training(theirs, learning_rate=DEFAULTS["learning_rate"], recompute=DEFAULTS["gradient_checkpointing"])
    _formats(theirs)


def _adapter(theirs: ForeignConfig) -> None:
    bits = quantised_by(theirs)
    if not theirs.get("use_peft"):
        theirs.write("lora", None, "no use_peft")
        unused(theirs, "lora_", "no adapter is trained")
        if bits:
            theirs.leave(bits, "differs", "quantised weights are trained by adapters alone")
        return
    for ours, key in (("r", "lora_r"), ("lora_alpha", "lora_alpha"), ("lora_dropout", "lora_dropout")):
        theirs.carry(f"lora.{ours}", key, default=DEFAULTS[key])
    if theirs.carry("lora.target_modules", "lora_target_modules", change=_modules) is None:
        theirs.write("lora.target_modules", ["q_proj", "v_proj"], "peft's default for Llama")
    theirs.carry("lora.modules_to_save", "lora_modules_to_save")
    theirs.carry("lora.use_rslora", "use_rslora")
    theirs.carry("lora.use_dora", "use_dora")
    if bits:
        theirs.write(f"quantization.{bits}", True, bits)
        theirs.carry("quantization.bnb_4bit_quant_type", "bnb_4bit_quant_type", default=DEFAULTS["bnb_4bit_quant_type"])
        nested = "quantization.bnb_4bit_use_double_quant"
        theirs.carry(nested, "use_bnb_nested_quant", default=DEFAULTS["use_bnb_nested_quant"])
        theirs.carry("quantization.bnb_4bit_quant_storage", "bnb_4bit_quant_storage")


def _modules(named: Any) -> Any:
    return "all-linear" if named in ("all-linear", ["all-linear"]) else named


def _formats(theirs: ForeignConfig) -> None:
    """Number formats: TRL trains all weights in the format that they are loaded in."""
    form = hf_trainer.precision(theirs, "bf16")
    key, dtype = theirs.first("dtype", "torch_dtype")
    if dtype not in (*_DTYPES, None, "auto"):
        theirs.leave(key, "differs", "bfloat16, float16 and float32 are known here")
    dtype = dtype if dtype in _DTYPES else "bfloat16" if dtype else DEFAULTS["dtype"]
    theirs.write("model.dtype", dtype, key if theirs.peek(key) else "TRL's default")
    quantised = bool({"quantization.load_in_4bit", "quantization.load_in_8bit"} & set(theirs.carried))
    if "quantization.load_in_4bit" in theirs.carried:
        compute = "float16" if form == "fp16" else dtype
        theirs.write("quantization.bnb_4bit_compute_dtype", compute, "as model.dtype")
    if form == "bf16" and (quantised or ("lora" in theirs.carried and dtype == "bfloat16")):
        why = (
            "TRL trains the adapters of a quantised base in bfloat16"
            if quantised
            else f"{key}: weights are trained in it"
        )
        theirs.write("training.pure_bf16", True, why)


def _data(theirs: ForeignConfig) -> None:
    theirs.write("data.train", _sets(theirs), "data sets")
    looked_at = theirs.peek("eval_strategy") or theirs.peek("evaluation_strategy") or "no"
    if looked_at != "no":
        _held_out(theirs)
    theirs.carry("data.max_length", "max_length", "max_seq_length", "model_max_length", default=DEFAULTS["max_length"])
    packed = theirs.carry("data.packing", "packing", default=DEFAULTS["packing"])
    if packed and theirs.get("packing_strategy", "bfd") != "bfd":
        theirs.leave("packing_strategy", "differs", "a row is filled with whole documents, none is split")
    theirs.write("data.truncation", "right", "truncation_mode" if theirs.get("truncation_mode") else "TRL's default")
    if theirs.peek("truncation_mode") == "keep_end":
        theirs.leave("truncation_mode", "differs", "a long row keeps its beginning here")
    _learned(theirs)
    key, template = theirs.first("chat_template", "chat_template_path")
    if template and key == "chat_template_path" and not str(template).endswith(".jinja"):
        theirs.leave(key, "look", "a tokenizer's folder; name a file of Jinja text")
    elif template:
        theirs.write("data.chat_template", template, key)
    if theirs.get("dataset_text_field", "text") != "text":
        theirs.leave("dataset_text_field", "look", "rename the column text")


def _learned(theirs: ForeignConfig) -> None:
    """Chats and texts are learned whole unless it says otherwise; of a prompt and its completion, the completion."""
    if theirs.get("assistant_only_loss"):
        theirs.write("data.train_on", "assistant", "assistant_only_loss")
    elif theirs.get("completion_only_loss"):
        theirs.write("data.train_on", "completion", "completion_only_loss")
    else:
        said = theirs.peek("completion_only_loss") is False
        theirs.write("data.train_on", "all", "completion_only_loss" if said else "TRL's default for chats and texts")
        if not said:
            reason = "of rows with a prompt and a completion TRL learns the completion: then data.train_on: completion"
            theirs.leave("completion_only_loss", "look", reason, "not given")


def _sets(theirs: ForeignConfig) -> list[dict[str, Any]]:
    key = next((key for key in ("dataset_mixture.datasets", "datasets") if theirs.peek(key)), None)
    if key is not None:
        return [_mixed(theirs, f"{key}.{index}") for index in range(len(theirs.peek(key)))]
    if theirs.peek("dataset_mixer"):
        mixed = theirs.get("dataset_mixer")
        splits = theirs.get("dataset_splits", ["train"])
        first = next((split for split in splits if "train" in split), splits[0])
        return [data_set(name, split=first, weight=float(share)) for name, share in mixed.items()]
    if theirs.peek("dataset_name") is None:
        theirs.refuse("dataset_name", "a data set is needed")
    split = theirs.get("dataset_train_split")
    return [data_set(theirs.get("dataset_name"), name=theirs.get("dataset_config"), split=split)]


def _mixed(theirs: ForeignConfig, at: str) -> dict[str, Any]:
    _, path = theirs.first(f"{at}.path", f"{at}.id")
    _, name = theirs.first(f"{at}.name", f"{at}.config")
    _, share = theirs.first(f"{at}.fraction", f"{at}.weight")
    if path is None:
        theirs.refuse(f"{at}.path", "a data set needs a path")
    theirs.get(f"{at}.columns")  # those that no format knows are passed over here
    files = theirs.get(f"{at}.data_files")
    if isinstance(files, dict):
        theirs.leave(f"{at}.data_files", "look", "one entry for each split; name its files there")
        files = next(iter(files.values()))
    weight = None if share is None else float(share)
    return data_set(str(path), files=files, name=name, split=theirs.get(f"{at}.split"), weight=weight)


def _held_out(theirs: ForeignConfig) -> None:
    key, size = theirs.first("test_split_size", "dataset_mixture.test_split_size")
    theirs.get("dataset_mixture.seed")
    if size:
        if isinstance(size, float) and size < 1:
            theirs.write("data.eval", {"fraction": size}, key)
        else:
            theirs.leave(key, "look", "a number of rows; write data.eval: {fraction: ...}")
        return
    split = theirs.get("dataset_test_split", "test")
    if theirs.peek("dataset_name"):
        config = theirs.get("dataset_config")
        entry = data_set(theirs.get("dataset_name"), name=config, split=split)
        theirs.write(
            "data.eval", [entry], f"dataset_test_split, eval_strategy {theirs.get('eval_strategy', '')}".strip()
        )
