"""TRL's SFT configuration, and alignment-handbook's, into a recipe. Its defaults are those of SFTConfig 1.16."""

from __future__ import annotations

from typing import Any

from finetune.importers import hf_trainer
from finetune.importers.foreign_config import ForeignConfig
from finetune.importers.shared import data_set, only_linear_layers, quantised_by, remote_code, renamed, unused

# Defaults of SFTConfig and ModelConfig, besides those of transformers.
TRL_DEFAULTS: dict[str, Any] = {
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


def convert(foreign: ForeignConfig) -> None:
    """Convert every section; keys that are not read are listed as left out. Raises RecipeError."""
    if foreign.peek("loss_type") in ("nll", "chunked_nll"):  # two names for the next token's cross-entropy
        foreign.get("loss_type")
    foreign.carry("model.name_or_path", "model_name_or_path")
    foreign.carry("model.revision", "model_revision")
    remote_code(foreign)
    _adapter(foreign)
    _data(foreign)
    hf_trainer.training(
        foreign, learning_rate=TRL_DEFAULTS["learning_rate"], recompute=TRL_DEFAULTS["gradient_checkpointing"]
    )
    _formats(foreign)


def _adapter(foreign: ForeignConfig) -> None:
    bits = quantised_by(foreign)
    if not foreign.get("use_peft"):
        foreign.write("lora", None, "no use_peft")
        unused(foreign, "lora_", "no adapter is trained")
        if bits:
            foreign.leave(bits, "differs", "quantised weights are trained by adapters alone")
        return
    for recipe_key, key in (("r", "lora_r"), ("lora_alpha", "lora_alpha"), ("lora_dropout", "lora_dropout")):
        foreign.carry(f"lora.{recipe_key}", key, default=TRL_DEFAULTS[key])
    if foreign.carry("lora.target_modules", "lora_target_modules", change=_modules) is None:
        foreign.write("lora.target_modules", ["q_proj", "v_proj"], "peft's default for Llama")
    foreign.carry("lora.modules_to_save", "lora_modules_to_save")
    foreign.carry("lora.target_parameters", "lora_target_parameters")
    only_linear_layers(foreign)
    foreign.carry("lora.use_rslora", "use_rslora")
    foreign.carry("lora.use_dora", "use_dora")
    if bits:
        foreign.write(f"quantization.{bits}", True, bits)
        foreign.carry(
            "quantization.bnb_4bit_quant_type", "bnb_4bit_quant_type", default=TRL_DEFAULTS["bnb_4bit_quant_type"]
        )
        nested = "quantization.bnb_4bit_use_double_quant"
        foreign.carry(nested, "use_bnb_nested_quant", default=TRL_DEFAULTS["use_bnb_nested_quant"])
        foreign.carry("quantization.bnb_4bit_quant_storage", "bnb_4bit_quant_storage")


def _modules(named: Any) -> Any:
    return "all-linear" if named in ("all-linear", ["all-linear"]) else named


def _formats(foreign: ForeignConfig) -> None:
    """Number formats: TRL trains all weights in the format that they are loaded in."""
    form = hf_trainer.precision(foreign, "bf16")
    key, dtype = foreign.first("dtype", "torch_dtype")
    if dtype not in (*_DTYPES, None, "auto"):
        foreign.leave(key, "differs", "only bfloat16, float16 and float32 are offered")
    dtype = dtype if dtype in _DTYPES else "bfloat16" if dtype else TRL_DEFAULTS["dtype"]
    foreign.write("model.dtype", dtype, key if foreign.peek(key) else "TRL's default")
    quantised = bool({"quantization.load_in_4bit", "quantization.load_in_8bit"} & set(foreign.carried))
    if "quantization.load_in_4bit" in foreign.carried:
        compute = "float16" if form == "fp16" else dtype
        foreign.write("quantization.bnb_4bit_compute_dtype", compute, "as model.dtype")
    if form == "bf16" and (quantised or ("lora" in foreign.carried and dtype == "bfloat16")):
        why = (
            "TRL trains the adapters of a quantised base in bfloat16"
            if quantised
            else f"{key}: weights are trained in it"
        )
        foreign.write("training.pure_bf16", True, why)


def _data(foreign: ForeignConfig) -> None:
    text = renamed(text=foreign.get("dataset_text_field"))
    foreign.write("data.train", [entry | ({"columns": text} if text else {}) for entry in _sets(foreign)], "data sets")
    looked_at = foreign.peek("eval_strategy") or foreign.peek("evaluation_strategy") or "no"
    if looked_at != "no":
        _held_out(foreign)
    foreign.carry(
        "data.max_length", "max_length", "max_seq_length", "model_max_length", default=TRL_DEFAULTS["max_length"]
    )
    packed = foreign.carry("data.packing", "packing", default=TRL_DEFAULTS["packing"])
    if packed and foreign.get("packing_strategy", "bfd") != "bfd":
        foreign.leave("packing_strategy", "differs", "rows are filled with whole documents; none is split")
    foreign.write("data.truncation", "right", "truncation_mode" if foreign.get("truncation_mode") else "TRL's default")
    if foreign.peek("truncation_mode") == "keep_end":
        foreign.leave("truncation_mode", "differs", "a row that is too long keeps its beginning")
    _learned(foreign)
    key, template = foreign.first("chat_template", "chat_template_path")
    if template and key == "chat_template_path" and not str(template).endswith(".jinja"):
        foreign.leave(key, "look", "a tokenizer's folder; name a file of Jinja text")
    elif template:
        foreign.write("data.chat_template", template, key)


def _learned(foreign: ForeignConfig) -> None:
    """Chats and texts are learned whole unless it says otherwise; of a prompt and its completion, the completion."""
    if foreign.get("assistant_only_loss"):
        foreign.write("data.train_on", "assistant", "assistant_only_loss")
    elif foreign.get("completion_only_loss"):
        foreign.write("data.train_on", "completion", "completion_only_loss")
    else:
        is_set = foreign.peek("completion_only_loss") is False
        foreign.write("data.train_on", "all", "completion_only_loss" if is_set else "TRL's default for chats and texts")
        if not is_set:
            reason = "of rows with a prompt and a completion TRL learns the completion: then data.train_on: completion"
            foreign.leave("completion_only_loss", "look", reason, "not given")


def _sets(foreign: ForeignConfig) -> list[dict[str, Any]]:
    key = next((key for key in ("dataset_mixture.datasets", "datasets") if foreign.peek(key)), None)
    if key is not None:
        return [_mixed(foreign, f"{key}.{index}") for index in range(len(foreign.peek(key)))]
    if foreign.peek("dataset_mixer"):
        mixed = foreign.mapping("dataset_mixer")
        splits = foreign.names("dataset_splits") or ["train"]
        first = next((split for split in splits if "train" in split), splits[0])
        shares = {name: foreign.number(f"dataset_mixer.{name}") for name in mixed if "." not in name}
        return [data_set(name, split=first, weight=float(shares.get(name, share))) for name, share in mixed.items()]
    if foreign.peek("dataset_name") is None:
        foreign.refuse("dataset_name", "a data set is needed")
    split = foreign.get("dataset_train_split")
    return [data_set(foreign.get("dataset_name"), name=foreign.get("dataset_config"), split=split)]


def _mixed(foreign: ForeignConfig, at: str) -> dict[str, Any]:
    _, path = foreign.first(f"{at}.path", f"{at}.id")
    _, name = foreign.first(f"{at}.name", f"{at}.config")
    key, share = foreign.first(f"{at}.fraction", f"{at}.weight")
    if path is None:
        foreign.refuse(f"{at}.path", "a data set needs a path")
    foreign.get(f"{at}.columns")  # columns that no format knows are ignored
    files = foreign.get(f"{at}.data_files")
    if isinstance(files, dict):
        foreign.leave(f"{at}.data_files", "look", "one entry for each split; name its files there")
        files = next(iter(files.values()))
    weight = None if share is None else float(foreign.number(key))
    return data_set(str(path), files=files, name=name, split=foreign.get(f"{at}.split"), weight=weight)


def _held_out(foreign: ForeignConfig) -> None:
    key, size = foreign.first("test_split_size", "dataset_mixture.test_split_size")
    foreign.get("dataset_mixture.seed")
    if size:
        if isinstance(size, float) and size < 1:
            foreign.write("data.eval", {"fraction": size}, key)
        else:
            foreign.leave(key, "look", "a number of rows; write data.eval: {fraction: ...}")
        return
    split = foreign.get("dataset_test_split", "test")
    if foreign.peek("dataset_name"):
        config = foreign.get("dataset_config")
        entry = data_set(foreign.get("dataset_name"), name=config, split=split)
        foreign.write(
            "data.eval", [entry], f"dataset_test_split, eval_strategy {foreign.get('eval_strategy', '')}".strip()
        )
