"""What several tools say in the same words: optimizers, schedules, strategies, batches, data sets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from finetune.importers.foreign_config import ForeignConfig, whole
from finetune.importers.templates import TEMPLATES
from finetune.recipe.cross_checks import SCHEDULER_ARGUMENTS
from finetune.recipe.optimizers import DEFAULT, OPTIMIZER_NAMES, OPTIMIZERS
from finetune.recipe.schema import Scheduler
from finetune.recipe.strategy import Strategy, read_strategy

_SUFFIXES = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}
_CONSTANTS = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}


def chosen_strategy(theirs: ForeignConfig) -> Strategy:
    """The strategy that was written as accelerate_config."""
    return read_strategy(theirs.carried["accelerate_config"][0])


def optimizer(theirs: ForeignConfig, key: str, default: str) -> None:
    """training.optim, and the constants of AdamW that a recipe has no keys for; after accelerate_config."""
    name = theirs.get(key)
    ours = OPTIMIZER_NAMES.get(str(name or default))
    if ours is None:
        theirs.leave(key, "differs", "not offered; AdamW takes its place")
        theirs.write("training.optim", DEFAULT, f"{key}: {name} is not offered")
    elif chosen_strategy(theirs).shards_modules and not OPTIMIZERS[ours].works_on_shards:
        theirs.leave(
            key, "differs", "bitsandbytes updates whole tensors, this strategy has shards; adamw is sharded too"
        )
        theirs.write("training.optim", DEFAULT, "sharded like the weights")
    elif name:
        theirs.write("training.optim", ours, f"{key}: {name}")
    else:
        theirs.default("training.optim", ours)
    for constant, usual in _CONSTANTS.items():
        value = theirs.get(constant)
        if value is not None and value != usual:
            theirs.leave(constant, "differs", f"AdamW's constant is {usual:g} here")


def remote_code(theirs: ForeignConfig) -> None:
    """model.trust_remote_code; examples say it by habit, and few models need it."""
    if theirs.carry("model.trust_remote_code", "trust_remote_code"):
        theirs.leave(
            "trust_remote_code", "look", "runs the model repository's own Python; take it away if none is needed"
        )


def quantised_by(theirs: ForeignConfig) -> str | None:
    """load_in_4bit or load_in_8bit, whichever is true."""
    said = {key: theirs.get(key) for key in ("load_in_4bit", "load_in_8bit")}
    return next((key for key, value in said.items() if value is True), None)


def unused(theirs: ForeignConfig, beginning: str, reason: str) -> None:
    """Keys with this beginning, none of which has an effect there."""
    for key, value in list(theirs.unread()):
        if key.startswith(beginning):
            theirs.leave(key, "same", reason, value)


def scheduler(theirs: ForeignConfig, key: str, default: str) -> None:
    """training.lr_scheduler_type and its arguments."""
    name = theirs.get(key)
    shape = str(name or default)
    if shape not in get_args(Scheduler):
        theirs.leave(key, "differs", "no such schedule here; cosine takes its place")
        theirs.write("training.lr_scheduler_type", "cosine", f"{key}: {name} is not offered")
        return
    if name:
        theirs.write("training.lr_scheduler_type", shape, key)
    else:
        theirs.default("training.lr_scheduler_type", shape)
    arguments = theirs.get("lr_scheduler_kwargs", {})
    known = {name: value for name, value in arguments.items() if name in SCHEDULER_ARGUMENTS[shape]}
    if known:
        theirs.write("training.lr_scheduler_kwargs", known, "lr_scheduler_kwargs")
    for name in sorted(set(arguments) - set(known)):
        theirs.leave(f"lr_scheduler_kwargs.{name}", "differs", f"{shape} has no such argument here")


def warmup(theirs: ForeignConfig, *, default_ratio: float = 0.0) -> None:
    """training.warmup_steps or warmup_ratio; transformers 5 writes a ratio as a fraction of a step."""
    steps, ratio = theirs.get("warmup_steps"), theirs.get("warmup_ratio")
    if isinstance(steps, float) and 0 < steps < 1:
        theirs.write("training.warmup_ratio", steps, "warmup_steps, a share of the steps")
    elif steps:
        theirs.write("training.warmup_steps", whole(steps), "warmup_steps")
        if ratio:
            theirs.leave("warmup_ratio", "same", "warmup_steps wins over it")
    elif ratio is not None:
        theirs.write("training.warmup_ratio", ratio, "warmup_ratio")
    elif steps is not None:
        theirs.write("training.warmup_ratio", 0.0, "warmup_steps: 0")
    else:
        theirs.default("training.warmup_ratio", default_ratio)


def batch(theirs: ForeignConfig, micro_key: str, default: int, *, accumulation: Any = None, split_by: int = 1) -> None:
    """training.global_batch_size: their rows of one optimizer step. `split_by`: GPUs that share one row."""
    micro = whole(theirs.get(micro_key, default))
    asked = theirs.get("gradient_accumulation_steps")
    steps = accumulation or (1 if asked in (None, "auto") else whole(asked))
    if not all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in (micro, steps)):
        theirs.refuse(micro_key if steps == asked else "gradient_accumulation_steps", "write a number above 0")
    replicas = max(1, theirs.gpus // split_by)
    by = f"{replicas} GPU{'s' * (replicas > 1)}" + (f" ({theirs.gpus} / {split_by})" if split_by > 1 else "")
    why = f"{micro_key} {micro} x gradient_accumulation_steps {steps} x {by}"
    theirs.write("training.global_batch_size", micro * steps * replicas, why)
    theirs.write("training.per_device_batch_size", micro, micro_key)


def strategy(theirs: ForeignConfig) -> str:
    """accelerate_config, from `deepspeed`, `fsdp` and `fsdp_config`; returns its name."""
    key = next((name for name in ("deepspeed", "fsdp_config", "fsdp") if theirs.peek(name)), None)
    name = {None: "ddp", "deepspeed": zero_name(theirs)}.get(key) or _fsdp_name(theirs)
    alone = theirs.gpus == 1 and name not in ("zero2_offload", "zero3_offload")
    if key and alone and name != "ddp":
        reason = "one process has nothing to share; say --gpus N, the number of their ranks"
        theirs.leave("accelerate_config", "look", reason, name)
    name = "single" if alone else name
    if name == "hsdp" and theirs.nodes == 1:
        name = "fsdp2"
        theirs.leave(
            "accelerate_config", "look", "copies of a sharded model lie one a machine; say --gpus 2x8x80GB", "hsdp"
        )
    theirs.write("accelerate_config", name, f"{key} with {theirs.gpus} GPUs" if key else f"--gpus {theirs.gpus}")
    return name


def fit_quantization(theirs: ForeignConfig) -> None:
    """What a strategy asks of quantised weights: 4 bits in shards lie in the compute dtype; int8 has no shards."""
    chosen = chosen_strategy(theirs)
    if chosen.shards_modules and "quantization.load_in_4bit" in theirs.carried:
        dtype = theirs.carried.get("quantization.bnb_4bit_compute_dtype", ("bfloat16",))[0]
        theirs.write("quantization.bnb_4bit_quant_storage", dtype, "shards need the compute dtype here")
    if chosen.shards_parameters and "quantization.load_in_8bit" in theirs.carried:
        reason = "int8 weights are not cut into shards here; take accelerate_config: ddp, or 4 bits"
        theirs.leave("quantization.load_in_8bit", "look", reason, True)


def zero_name(theirs: ForeignConfig) -> str:
    """The strategy that a DeepSpeed file stands for, from what is in it or, where it is not here, from its name."""
    said = theirs.get("deepspeed")
    settings = said if isinstance(said, Mapping) else _json_near(theirs.folder, str(said or ""))
    if settings is not None:
        zero = settings.get("zero_optimization") or {}
        devices = [(zero.get(f"offload_{what}") or {}).get("device", "none") for what in ("optimizer", "param")]
        stage, away = int(zero.get("stage") or 0), "nvme" if "nvme" in devices else "cpu" if "cpu" in devices else ""
    else:
        found = re.search(r"z(?:ero)?[-_]?([0-3])", PurePosixPath(str(said)).name.lower())
        stage, away = int(found[1]) if found else 0, "cpu" if "offload" in str(said) else ""
        if said:
            theirs.leave("deepspeed", "look", f"read from its name as stage {stage}{', offloaded' if away else ''}")
    if not stage:
        return "ddp"
    if stage == 3 and away == "nvme":
        return "zero3_nvme"
    return f"zero{max(stage, 2)}_offload" if away else f"zero{stage}"


def _json_near(folder: Path, name: str) -> Mapping[str, Any] | None:
    for path in (folder / name, Path(name)):
        if name and path.is_file():
            try:
                settings = json.loads(path.read_text("utf-8"))
            except (OSError, ValueError):
                return None
            return settings if isinstance(settings, Mapping) else None
    return None


def _fsdp_name(theirs: ForeignConfig) -> str:
    """The strategy that FSDP's settings stand for; what else they say is about how, and is listed."""
    words = str(theirs.peek("fsdp") or "")

    def of(name: str) -> Any:
        return theirs.first(f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}")[1]

    sharding = f"{of('sharding_strategy') or ''} {words}".lower()
    offloaded = of("offload_params") is True or of("cpu_offload") is True or "offload" in words
    whole_between = of("reshard_after_forward") is False or "shard_grad_op" in sharding
    if "no_shard" in sharding:
        return "ddp"
    if offloaded:
        return "fsdp2_offload"
    return "fsdp2_grad_op" if whole_between else "hsdp" if "hybrid" in sharding else "fsdp2"


def checkpointing(theirs: ForeignConfig, *keys: str, default: bool) -> None:
    """training.activation_checkpointing, which FSDP's own section may turn on too."""
    theirs.carry("training.activation_checkpointing", *keys, default=default, change=bool)
    for key in ("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing"):
        if theirs.get(key):
            theirs.write("training.activation_checkpointing", True, key)


def data_set(path: str, *, files: Any = None, kind: str | None = None, **more: Any) -> dict[str, Any]:
    """One entry of data.train: a local file by its kind, else a data set of the Hub; what says nothing is left out."""
    if kind is None and files is None:
        kind = _SUFFIXES.get(PurePosixPath(path).suffix)
    entry: dict[str, Any] = {"path": path}
    if kind in ("json", "csv", "parquet") and path != kind:
        entry = {"path": kind, "data_files": files or path}
    elif files is not None:
        entry["data_files"] = files
    usual = {"split": "train", "format": "auto", "weight": 1.0, "revision": "main"}
    return entry | {key: value for key, value in more.items() if value is not None and value != usual.get(key)}


def held_out(theirs: ForeignConfig, key: str) -> None:
    """data.eval from a share of the rows; a number of rows is left to the reader."""
    share = theirs.get(key)
    if not share:
        return
    if isinstance(share, (int, float)) and 0 < share < 1:
        theirs.write("data.eval", {"fraction": share}, key)
    else:
        theirs.leave(key, "look", "a number of rows; write data.eval: {fraction: ...}, or a split like train[:1000]")


def named_template(theirs: ForeignConfig, key: str, names: Mapping[str, str]) -> None:
    """data.chat_template from a template's name: written out where it is one of ours, else the tokenizer's own."""
    name = str(theirs.get(key))
    if name in names:
        theirs.write("data.chat_template", TEMPLATES[names[name]], f"{key}: {name}")
    elif name not in ("tokenizer_default", "None"):
        theirs.leave(key, "look", "the tokenizer's own template is used; compare by: finetune preview")


def every(theirs: ForeignConfig, ours: str, key: str) -> None:
    """eval_steps or save_steps, where they are steps; a share of the run is left to the reader."""
    steps = theirs.get(key)
    if isinstance(steps, float) and 0 < steps < 1:
        theirs.leave(key, "look", f"a share of the run; set {ours} when `finetune preview` has counted its steps")
    elif steps is not None:
        theirs.write(ours, whole(steps), key)


def hub(theirs: ForeignConfig, *, push: bool) -> None:
    """hub.repo_id and hub.push; always private, as the recipe's default is."""
    name = theirs.get("hub_model_id")
    if name and re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        theirs.write("hub.repo_id", name, "hub_model_id")
        if push:
            theirs.write("hub.push", True, "push_to_hub" if theirs.peek("push_to_hub") else "hub_model_id")
    else:
        if name:
            theirs.leave("hub_model_id", "same", "names no owner; set hub.repo_id: owner/name")
        if theirs.get("push_to_hub"):
            theirs.leave("push_to_hub", "same", "set hub.repo_id: owner/name and hub.push: true")
    if theirs.get("hub_private_repo") is False:
        theirs.leave("hub_private_repo", "same", "private unless you say so yourself: hub.private: false")
