"""TRL's SFT, DPO, KTO and SimPO configurations, and alignment-handbook's, into a recipe. Its defaults are those of
SFTConfig, DPOConfig, KTOConfig and the experimental CPOConfig in TRL 1.16."""

from __future__ import annotations

import re
from typing import Any

from finetune.importers import hf_trainer
from finetune.importers.foreign_config import ForeignConfig
from finetune.importers.preferences import (
    carry_judged,
    carry_simpo,
    carry_supervised_part,
    carry_trl_losses,
    leave_lengths_of_parts,
    switch_off_dropout,
)
from finetune.importers.shared import (
    carry_remote_code,
    carry_rope_scaling,
    data_set_entry,
    find_quantisation_key,
    keep_to_linear_layers,
    renamed_columns,
)
from finetune.recipe.resolved import leaves
from finetune.recipe.sections.training import Objective

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
PREFERENCE_RATE = 1e-6
# Keys of one trainer alone, former ones too.
_OF_SFT = (
    "packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "max_seq_length", "block_size",
)  # fmt: skip
_OF_DPO = (
    "ref_model_sync_steps", "sync_ref_model", "f_divergence_type", "rpo_alpha", "ld_alpha", "loss_weights",
    "use_weighting", "reference_free",
)  # fmt: skip
_OF_KTO = ("desirable_weight", "undesirable_weight")
_OF_CPO = ("cpo_alpha", "simpo_gamma", "gamma_beta_ratio")
# Keys that DPO, KTO, ORPO and CPO share, and no supervised training has.
_OF_ANY = ("beta", "precompute_ref_log_probs", "max_prompt_length", "generate_during_eval")
_OTHERS = re.compile(r"(?<![a-z])(orpo|cpo|kto|simpo|dpo|grpo|sft)(?![a-z])", re.IGNORECASE)
_SUPERVISED_LOSSES = ("nll", "chunked_nll", "dft")
_DTYPES = ("bfloat16", "float16", "float32")


def convert(foreign: ForeignConfig) -> None:
    """Convert every section; keys that are not read are listed as left out. Raises RecipeError."""
    foreign.replace_nulls(gradient_checkpointing=False, max_grad_norm=0.0, disable_dropout=False)
    objective = _objective(foreign)
    _say_trainer(foreign, objective)
    if foreign.peek("loss_type") in ("nll", "chunked_nll"):  # two names for the next token's cross-entropy
        foreign.get("loss_type")
    foreign.carry("model.name_or_path", "model_name_or_path")
    foreign.carry("model.revision", "model_revision")
    carry_remote_code(foreign)
    carry_rope_scaling(foreign, "rope_scaling", "model_init_kwargs.rope_parameters", "model_init_kwargs.rope_scaling")
    _adapter(foreign)
    _data(foreign, objective)
    rate = TRL_DEFAULTS["learning_rate"] if objective == "supervised" else PREFERENCE_RATE
    hf_trainer.carry_training(foreign, learning_rate=rate, recompute=TRL_DEFAULTS["gradient_checkpointing"])
    if objective != "supervised":
        _preferences(foreign, objective)
    _number_formats(foreign)


def _objective(foreign: ForeignConfig) -> Objective:
    """training.objective, from the keys of TRL's trainers: a configuration does not name its trainer."""
    losses = foreign.peek("loss_type")
    names = [losses] if isinstance(losses, str) else losses or []
    if "kto" in names or _given(foreign, _OF_KTO):
        return "kto"
    others = [name for name in names if name not in _SUPERVISED_LOSSES]
    if others or _given(foreign, (*_OF_DPO, *_OF_ANY, *_OF_CPO)):
        return "dpo"
    return "supervised"


def _is_simpo(foreign: ForeignConfig) -> bool:
    """Whether the file is CPOConfig's with loss_type simpo, or of SimPO's authors, whose loss_type is sigmoid."""
    return foreign.peek("loss_type") in ("simpo", ["simpo"]) or foreign.peek("gamma_beta_ratio") is not None


def _given(foreign: ForeignConfig, keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if foreign.peek(key) is not None]


def _say_trainer(foreign: ForeignConfig, objective: Objective) -> None:
    """A line to look at, unless a key belongs to one trainer alone: TRL's scripts name the trainer, not its files."""
    losses = foreign.peek("loss_type")
    if objective == "kto" or (objective == "supervised" and (losses or _given(foreign, _OF_SFT))):
        return
    if _is_simpo(foreign) or (objective == "dpo" and (_given(foreign, _OF_DPO) or losses in ("robust", "apo_zero"))):
        return
    taken, reason = "SFT", "no key is another trainer's"
    if objective == "dpo":
        keys = ", ".join(_given(foreign, (*_OF_ANY, "loss_type")))
        taken, reason = "DPO", f"for {keys}, which KTO, ORPO and CPO have too, with other meanings"
    texts = [str(value) for _, value in leaves(foreign.values) if isinstance(value, str)]
    named = sorted({word.upper() for text in texts for word in _OTHERS.findall(text)} - {taken})
    hint = f"; its names speak of {' and '.join(named)}" if named else ""
    look = "keep TRL for ORPO and CPO, or set training.objective: kto for KTO"
    reason = f"the file does not name its trainer; taken for TRL's {taken}: {reason}{hint}; {look}"
    foreign.leave("trainer", "look", reason, "not named")


def _preferences(foreign: ForeignConfig, objective: Objective) -> None:
    """training.objective with its section, from DPOConfig, KTOConfig or CPOConfig."""
    is_simpo = _is_simpo(foreign)
    trainer = {"dpo": "TRL's DPO", "kto": "TRL's KTO"}[objective]
    foreign.write("training.objective", objective, "TRL's CPO with loss_type simpo" if is_simpo else trainer)
    foreign.carry(f"{objective}.beta", "beta", default=0.1)
    if objective == "kto":
        if foreign.get("loss_type", "kto") not in ("kto", ["kto"]):
            foreign.refuse("loss_type", "kto is offered for judged answers; keep TRL for others")
        keys = {"desirable": "desirable_weight", "undesirable": "undesirable_weight"}
        carry_judged(foreign, **keys, micro_batch="per_device_train_batch_size")
    elif is_simpo:
        foreign.get("loss_type")
        if foreign.get("alpha"):
            foreign.leave("alpha", "differs", "AlphaPO's rewards are not offered; SimPO's take their place")
        if foreign.get("label_smoothing"):
            foreign.leave("label_smoothing", "differs", "SimPO's loss has none here")
        if (ratio := foreign.number("gamma_beta_ratio")) is None:
            carry_simpo(foreign, alpha="cpo_alpha")
            reason = "CPOTrainer adds an end token to an answer that its template ended; here the template's ends it"
            foreign.leave("loss_type", "differs", reason)
        else:
            if foreign.peek("loss_type") not in ("simpo", "sigmoid", None):
                foreign.refuse("loss_type", "of SimPO's losses, sigmoid is offered")
            carry_simpo(foreign)
            beta = float(foreign.number("beta", 2.0))
            foreign.write("dpo.beta", beta, "beta" if foreign.peek("beta") else "SimPO's default")
            foreign.write("dpo.simpo_gamma", ratio * beta, "gamma_beta_ratio x beta")
            if weight := foreign.get("sft_weight"):
                carry_supervised_part(foreign, "sft_weight", weight)
    else:
        for key in ("cpo_alpha", "simpo_gamma"):
            if foreign.peek(key) is not None:
                foreign.refuse(key, "of TRL's CPO trainer, loss_type: simpo is offered")
        carry_trl_losses(foreign, "loss_type", "loss_weights", "label_smoothing")
        if weight := foreign.get("rpo_alpha"):
            carry_supervised_part(foreign, "rpo_alpha", weight)
    if foreign.get("f_divergence_type", "reverse_kl") != "reverse_kl":
        foreign.leave("f_divergence_type", "differs", "rewards are log-ratios, as with reverse_kl")
    leave_lengths_of_parts(foreign, ("max_prompt_length", "max_completion_length"))
    if foreign.get("disable_dropout", True):
        switch_off_dropout(foreign, "disable_dropout")
    elif "lora.lora_dropout" not in foreign.carried:
        foreign.leave("disable_dropout", "same", "models of today have no dropout")


def _adapter(foreign: ForeignConfig) -> None:
    bits = find_quantisation_key(foreign)
    if not foreign.get("use_peft"):
        foreign.write("lora", None, "no use_peft")
        foreign.leave_unused("lora_", "no adapter is trained")
        if bits:
            foreign.leave(bits, "differs", "quantised weights are trained by adapters alone")
        return
    for recipe_key, key in (("r", "lora_r"), ("lora_alpha", "lora_alpha"), ("lora_dropout", "lora_dropout")):
        foreign.carry(f"lora.{recipe_key}", key, default=TRL_DEFAULTS[key])
    modules = foreign.get("lora_target_modules")
    if modules is None:
        foreign.write("lora.target_modules", ["q_proj", "v_proj"], "peft's default for Llama")
    else:
        if modules == ["all-linear"]:
            modules = "all-linear"
        foreign.write("lora.target_modules", modules, "lora_target_modules")
    foreign.carry("lora.modules_to_save", "lora_modules_to_save")
    foreign.carry("lora.target_parameters", "lora_target_parameters")
    keep_to_linear_layers(foreign)
    foreign.carry("lora.use_rslora", "use_rslora")
    foreign.carry("lora.use_dora", "use_dora")
    if bits:
        foreign.write(f"quantization.{bits}", True, bits)
        for recipe_key, key in (
            ("bnb_4bit_quant_type", "bnb_4bit_quant_type"),
            ("bnb_4bit_use_double_quant", "use_bnb_nested_quant"),
        ):
            foreign.carry(f"quantization.{recipe_key}", key, default=TRL_DEFAULTS[key])
        foreign.carry("quantization.bnb_4bit_quant_storage", "bnb_4bit_quant_storage")


def _number_formats(foreign: ForeignConfig) -> None:
    """TRL trains all weights in the number format that they are loaded in."""
    mixed_precision = hf_trainer.carry_precision(foreign, "bf16")
    key, dtype = foreign.first("dtype", "torch_dtype")
    if dtype not in (*_DTYPES, None, "auto"):
        foreign.leave(key, "differs", "only bfloat16, float16 and float32 are offered")
    if dtype not in _DTYPES:
        dtype = "bfloat16" if dtype else TRL_DEFAULTS["dtype"]
    foreign.write("model.dtype", dtype, foreign.origin(key))
    if "quantization.load_in_4bit" in foreign.carried:
        compute_dtype = "float16" if mixed_precision == "fp16" else dtype
        foreign.write("quantization.bnb_4bit_compute_dtype", compute_dtype, "as model.dtype")
    if mixed_precision != "bf16":
        return
    if {"quantization.load_in_4bit", "quantization.load_in_8bit"} & set(foreign.carried):
        origin = "TRL trains the adapters of a quantised base in bfloat16"
        foreign.write("training.pure_bf16", True, origin)
    elif "lora" in foreign.carried and dtype == "bfloat16":
        foreign.write("training.pure_bf16", True, f"{key}: weights are trained in it")


def _data(foreign: ForeignConfig, objective: Objective) -> None:
    text = renamed_columns(text=foreign.get("dataset_text_field"))
    entries = _data_sets(foreign)
    if text:
        entries = [entry | {"columns": text} for entry in entries]
    foreign.write("data.train", entries, "data sets")
    if (foreign.peek("eval_strategy") or foreign.peek("evaluation_strategy") or "no") != "no":
        _held_out(foreign)
    lengths = ("max_seq_length", "max_length", "model_max_length", "block_size")
    foreign.carry("data.max_length", *lengths, default=TRL_DEFAULTS["max_length"])
    foreign.write("data.truncation", "right", foreign.origin("truncation_mode"))
    if foreign.get("truncation_mode") == "keep_end":
        foreign.leave("truncation_mode", "differs", "a row that is too long keeps its beginning")
    if foreign.is_null("max_length"):
        foreign.write("data.truncation", "error", "max_length")
        foreign.leave("max_length", "look", "nothing is cut there; set data.max_length to your longest row")
    if objective != "supervised":
        # Answers are supervised after their prompt, and micro-batches are packed without a document seeing another.
        _template(foreign)
        _look_after_end_of_turn(foreign)
        return
    if foreign.peek("block_size"):
        foreign.write("data.packing", True, "block_size")
        foreign.write("data.truncation", "split", "block_size")
        reason = "texts fill rows of this length, and do not see each other; there they are joined and cut"
        foreign.leave("block_size", "differs", reason)
        _template(foreign)
        return
    is_packed = foreign.carry("data.packing", "packing", default=TRL_DEFAULTS["packing"])
    if is_packed and foreign.get("packing_strategy", "bfd") != "bfd":
        reason = "rows are filled with whole documents; data.truncation: split cuts long ones, if all rows are texts"
        foreign.leave("packing_strategy", "differs", reason)

    # TRL supervises chats and texts whole, and of a prompt with a completion the completion, unless a key says more.
    if foreign.get("assistant_only_loss"):
        foreign.write("data.train_on", "assistant", "assistant_only_loss")
    elif foreign.get("completion_only_loss"):
        foreign.write("data.train_on", "completion", "completion_only_loss")
        _look_after_end_of_turn(foreign)
        reason = "plain texts are tokenised together there: a space at a prompt's end belongs to the answer's start"
        foreign.leave("completion_only_loss", "look", reason)
    elif foreign.peek("completion_only_loss") is False:
        foreign.write("data.train_on", "all", "completion_only_loss")
    else:
        foreign.write("data.train_on", "all", "TRL's default for chats and texts")
        reason = "if your rows have a prompt and a completion, set data.train_on: completion, as TRL trains those"
        foreign.leave("completion_only_loss", "look", reason, "not given")

    _template(foreign)


def _template(foreign: ForeignConfig) -> None:
    key, template = foreign.first("chat_template", "chat_template_path")
    if template and key == "chat_template_path" and not str(template).endswith(".jinja"):
        foreign.leave(key, "look", "a tokenizer's folder; name a file of Jinja text")
    elif template:
        foreign.write("data.chat_template", template, key)


def _look_after_end_of_turn(foreign: ForeignConfig) -> None:
    """TRL supervises a completion to the template's last character: under ChatML a line break too."""
    reason = "a line break that the template writes after an answer's end of turn is supervised there, and not here"
    foreign.leave("chat_template", "look", reason, "after an answer")


def _data_sets(foreign: ForeignConfig) -> list[dict[str, Any]]:
    """The entries of data.train, from the spelling that the configuration uses."""
    for key in ("dataset_mixture.datasets", "datasets"):
        if foreign.peek(key):
            return [_mixed_data_set(foreign, f"{key}.{index}") for index in range(len(foreign.peek(key)))]
    if foreign.peek("dataset_mixer"):
        mixed = foreign.mapping("dataset_mixer")
        splits = foreign.names("dataset_splits") or ["train"]
        train_split = next((split for split in splits if "train" in split), splits[0])
        # A name with a dot looks like a section's key to `number`.
        shares = {name: foreign.number(f"dataset_mixer.{name}") for name in mixed if "." not in name}
        return [
            data_set_entry(name, split=train_split, weight=float(shares.get(name, share)))
            for name, share in mixed.items()
        ]
    if foreign.peek("dataset_name") is None and (file := foreign.get("train_file")):  # transformers' run_clm
        return [data_set_entry(str(file))]
    if foreign.peek("dataset_name") is None:
        foreign.refuse("dataset_name", "a data set is needed")
    _, name = foreign.first("dataset_config", "dataset_config_name")
    return [data_set_entry(foreign.get("dataset_name"), name=name, split=foreign.get("dataset_train_split"))]


def _mixed_data_set(foreign: ForeignConfig, entry_key: str) -> dict[str, Any]:
    _, path = foreign.first(f"{entry_key}.path", f"{entry_key}.id")
    _, name = foreign.first(f"{entry_key}.name", f"{entry_key}.config")
    share_key, share = foreign.first(f"{entry_key}.fraction", f"{entry_key}.weight")
    if path is None:
        foreign.refuse(f"{entry_key}.path", "a data set needs a path")
    foreign.get(f"{entry_key}.columns")  # columns that no format knows are ignored
    files = foreign.get(f"{entry_key}.data_files")
    if isinstance(files, dict):
        foreign.leave(f"{entry_key}.data_files", "look", "one entry for each split; name its files there")
        files = next(iter(files.values()))
    weight = None if share is None else float(foreign.number(share_key))
    return data_set_entry(str(path), files=files, name=name, split=foreign.get(f"{entry_key}.split"), weight=weight)


def _held_out(foreign: ForeignConfig) -> None:
    key, size = foreign.first("test_split_size", "dataset_mixture.test_split_size")
    foreign.get("dataset_mixture.seed")
    if size and isinstance(size, float) and size < 1:
        foreign.write("data.eval", {"fraction": size}, key)
        return
    if size:
        foreign.leave(key, "look", "a number of rows; write data.eval: {fraction: ...}")
        return
    splits = foreign.names("dataset_splits")
    held_out = [split for split in splits if "test" in split]
    if foreign.peek("dataset_mixer") and held_out:
        entries = [data_set_entry(name, split=held_out[0]) for name in foreign.mapping("dataset_mixer")]
        foreign.write("data.eval", entries, "dataset_splits")
        return
    if file := foreign.get("validation_file"):
        foreign.write("data.eval", [data_set_entry(str(file))], "validation_file")
        return
    split = foreign.get("dataset_test_split", "test")
    if foreign.peek("dataset_name"):
        _, name = foreign.first("dataset_config", "dataset_config_name")
        entry = data_set_entry(foreign.get("dataset_name"), name=name, split=split)
        origin = f"dataset_test_split, eval_strategy {foreign.get('eval_strategy', '')}".strip()
        foreign.write("data.eval", [entry], origin)
