"""axolotl's configuration into a recipe. Its defaults are those of its schema at 067b021 (July 2026)."""

from __future__ import annotations

from typing import Any

from finetune.imports.axolotl_data import data
from finetune.imports.shared import (
    batch,
    checkpointing,
    every,
    held_out,
    hub,
    optimizer,
    quantised_by,
    remote_code,
    scheduler,
    strategy,
    unused,
    warmup,
)
from finetune.imports.theirs import Theirs, positive_or_none, whole

_OTHER_TRAINING = ("rl", "reward_model", "process_reward_model", "qat", "num_labels")


def convert(theirs: Theirs) -> None:
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
    name = strategy(theirs)
    _adapter(theirs)
    data(theirs)
    held_out(theirs, "val_set_size")
    _training(theirs, name)
    _precision(theirs, name)


def _adapter(theirs: Theirs) -> None:
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


def _targets(theirs: Theirs) -> None:
    linear, named = theirs.get("lora_target_linear"), theirs.get("lora_target_modules")
    if linear:
        theirs.write("lora.target_modules", "all-linear", "lora_target_linear")
        if named:
            theirs.leave("lora_target_modules", "same", "lora_target_linear covers them")
    elif named:
        theirs.write("lora.target_modules", named, "lora_target_modules")
    else:
        theirs.write("lora.target_modules", ["q_proj", "v_proj"], "peft's default for Llama")


def _training(theirs: Theirs, strategy_name: str) -> None:
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
    optimizer(theirs, "optimizer", "adamw_torch_fused", sharded=strategy_name.startswith(("fsdp", "hsdp")))
    checkpointing(theirs, "gradient_checkpointing", default=False)
    theirs.carry("training.seed", "seed", default=42)
    theirs.carry("training.early_stopping_patience", "early_stopping_patience")
    theirs.carry("logging_steps", "logging_steps", change=whole)
    every(theirs, "eval_steps", "eval_steps")
    every(theirs, "save_steps", "save_steps")
    theirs.carry("save_total_limit", "save_total_limit", default=4)
    theirs.carry("output_dir", "output_dir", default="./model-out")
    hub(theirs, push=bool(theirs.peek("hub_model_id")))


def _schedule(theirs: Theirs) -> None:
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


def _precision(theirs: Theirs, strategy_name: str) -> None:
    """Weights are loaded in the format of the computation, and trained in it where no strategy keeps float32 ones."""
    said = {key: theirs.get(key) for key in ("bf16", "bfloat16", "fp16", "float16", "float32")}
    half = "fp16" if said["fp16"] or said["float16"] else "no"
    key = next((key for key, value in said.items() if value), "")
    usual = half == "no" and said["bf16"] in (None, "auto", "full", True)
    form = "bf16" if usual or said["bfloat16"] else half
    theirs.write("training.mixed_precision", form, key or "axolotl's default: bf16 where the GPU has it")
    whole_model = "lora" in theirs.carried  # as null
    if form == "bf16" and whole_model and strategy_name in ("single", "ddp"):
        theirs.write("training.pure_bf16", True, "axolotl trains all weights in the format it loads them in")
    if form != "bf16":
        dtype = "float16" if form == "fp16" else "float32"
        theirs.write("model.dtype", dtype, key)
        if "quantization.load_in_4bit" in theirs.carried:
            theirs.write("quantization.bnb_4bit_compute_dtype", dtype, key)
