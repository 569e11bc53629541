"""What several tools configure with the same keys: optimizers, schedules, strategies, batches, data sets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from pydantic import ValidationError

from finetune.errors import FinetuneError, RecipeError
from finetune.importers.foreign_config import ForeignConfig, Level, as_count, recipe_default
from finetune.importers.recipe_writer import written
from finetune.importers.templates import TEMPLATES
from finetune.recipe.cross_checks import SCHEDULER_ARGUMENTS
from finetune.recipe.optimizers import DEFAULT, OPTIMIZER_NAMES
from finetune.recipe.schema import Recipe, Scheduler, Tracker
from finetune.recipe.strategy import Strategy, read_strategy
from finetune.recipe.strategy_fit import Unfit, unfit
from finetune.recipe.yaml_text import shown
from finetune.untrusted.json_files import read_object
from finetune.wording import counted

_SUFFIXES = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}


def chosen_strategy(foreign: ForeignConfig) -> Strategy:
    """The strategy that was written as accelerate_config."""
    return read_strategy(foreign.carried["accelerate_config"][0])


def optimizer(foreign: ForeignConfig, key: str, default: str) -> None:
    """training.optim and AdamW's constants; after accelerate_config."""
    name = foreign.get(key)
    offered = OPTIMIZER_NAMES.get(str(name or default))
    if offered is None:
        foreign.leave(key, "differs", "not offered; AdamW takes its place")
        foreign.write("training.optim", DEFAULT, f"{key}: {name} is not offered")
    elif name:
        foreign.write("training.optim", offered, f"{key}: {name}")
    else:
        foreign.default("training.optim", offered)
    for constant in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        foreign.carry(f"training.{constant}", constant)


def remote_code(foreign: ForeignConfig) -> None:
    """model.trust_remote_code; examples say it by habit, and few models need it."""
    if foreign.carry("model.trust_remote_code", "trust_remote_code"):
        foreign.leave(
            "trust_remote_code", "look", "runs the model repository's own Python; remove it if the model needs none"
        )


def quantised_by(foreign: ForeignConfig) -> str | None:
    """load_in_4bit or load_in_8bit, whichever is true."""
    values = {key: foreign.get(key) for key in ("load_in_4bit", "load_in_8bit")}
    return next((key for key, value in values.items() if value is True), None)


def unused(foreign: ForeignConfig, beginning: str, reason: str) -> None:
    """Leave out keys with this beginning, which have no effect in the tool either."""
    for key, value in list(foreign.unread()):
        if key.startswith(beginning):
            foreign.leave(key, "same", reason, value)


def scheduler(foreign: ForeignConfig, key: str, default: str) -> None:
    """training.lr_scheduler_type and its arguments."""
    name = foreign.get(key)
    shape = str(name or default)
    if shape not in get_args(Scheduler):
        foreign.leave(key, "differs", "no such schedule here; cosine takes its place")
        foreign.write("training.lr_scheduler_type", "cosine", f"{key}: {name} is not offered")
        return
    if name:
        foreign.write("training.lr_scheduler_type", shape, key)
    else:
        foreign.default("training.lr_scheduler_type", shape)
    arguments = foreign.mapping("lr_scheduler_kwargs")
    known = {name: value for name, value in arguments.items() if name in SCHEDULER_ARGUMENTS[shape]}
    if known:
        foreign.write("training.lr_scheduler_kwargs", known, "lr_scheduler_kwargs")
    for name in sorted(set(arguments) - set(known)):
        foreign.leave(f"lr_scheduler_kwargs.{name}", "differs", f"{shape} has no such argument here")


def warmup(foreign: ForeignConfig, *, default_ratio: float = 0.0) -> None:
    """training.warmup_steps or warmup_ratio; transformers 5 writes a ratio as a fraction of a step."""
    steps, ratio = foreign.get("warmup_steps"), foreign.get("warmup_ratio")
    if isinstance(steps, float) and 0 < steps < 1:
        foreign.write("training.warmup_ratio", steps, "warmup_steps, a share of the steps")
    elif steps:
        foreign.write("training.warmup_steps", as_count(steps), "warmup_steps")
        if ratio:
            foreign.leave("warmup_ratio", "same", "warmup_steps wins over it")
    elif ratio is not None:
        foreign.write("training.warmup_ratio", ratio, "warmup_ratio")
    elif steps is not None:
        foreign.write("training.warmup_ratio", 0.0, "warmup_steps: 0")
    else:
        foreign.default("training.warmup_ratio", default_ratio)


def batch(foreign: ForeignConfig, micro_key: str, default: int, *, accumulation: Any = None, split_by: int = 1) -> None:
    """training.global_batch_size: their rows of one optimizer step. `split_by`: GPUs that share one row."""
    micro = foreign.count(micro_key, default)
    accumulated = 1 if foreign.get("gradient_accumulation_steps") == "auto" else None
    steps = accumulation or accumulated or foreign.count("gradient_accumulation_steps", 1)
    replicas = max(1, foreign.gpus // split_by)
    by = _counted(replicas) + (f" ({foreign.gpus} / {split_by})" if split_by > 1 else "")
    why = f"{micro_key} {micro} x gradient_accumulation_steps {steps} x {by}"
    foreign.write("training.global_batch_size", micro * steps * replicas, why)
    foreign.write("training.per_device_batch_size", micro, micro_key)


def _counted(gpus: int) -> str:
    return counted(gpus, "GPU")


def strategy(foreign: ForeignConfig) -> str:
    """accelerate_config, from `deepspeed`, `fsdp` and `fsdp_config`; returns its name."""
    key = next((name for name in ("deepspeed", "fsdp_config", "fsdp") if foreign.peek(name)), None)
    name = {None: "ddp", "deepspeed": zero_name(foreign)}.get(key) or _fsdp_name(foreign)
    alone = foreign.gpus == 1 and name not in ("zero2_offload", "zero3_offload")
    if key and alone and name != "ddp":
        reason = "one process has nothing to shard; write --gpus 4x80GB for the GPUs that it ran on"
        foreign.leave("accelerate_config", "look", reason, name)
    name = "single" if alone else name
    if name == "hsdp" and foreign.nodes == 1:
        name = "fsdp2"
        foreign.leave(
            "accelerate_config",
            "look",
            "each machine holds one copy of the sharded model; write --gpus 2x8x80GB for two",
            "hsdp",
        )
    foreign.write("accelerate_config", name, f"{key} with {_counted(foreign.gpus)}" if key else _counted(foreign.gpus))
    return name


def fit_strategy(foreign: ForeignConfig) -> None:
    """Replace settings that the strategy cannot train with, and name each replacement. Call this last."""
    for _ in range(_MOST_REPLACEMENTS):
        found = _first_unfit(foreign)
        if found is None:
            return
        for key, value in found.instead.items():
            before, why = foreign.carried.get(key, (recipe_default(key), ""))
            strategy = foreign.carried["accelerate_config"][0]
            foreign.write(key, value, f"{written(before)} does not go with {strategy}")
            if key != "quantization.bnb_4bit_quant_storage":  # only the container changes, not the numbers
                level: Level = "look" if key == "accelerate_config" else "differs"
                theirs = re.split(r": | with \d", why)[0] if why else key
                reason = f"{found.problem}; {key}: {written(value)} takes its place"
                foreign.leave(theirs, level, reason, before)


_MOST_REPLACEMENTS = 10  # each replaces one setting that a strategy may refuse


def _first_unfit(foreign: ForeignConfig) -> Unfit | None:
    """The first setting that the recipe's strategy cannot train with. None if there is none, or if the recipe is not
    valid; a later check reports an invalid recipe."""
    nested: dict[str, Any] = {}
    for key, (value, _) in foreign.carried.items():
        section, _, name = key.rpartition(".")
        if section:
            nested.setdefault(section, {})[name] = value
        else:
            nested[key] = value
    try:
        recipe = Recipe.model_validate(nested)
    except ValidationError:
        return None
    return next(unfit(recipe, chosen_strategy(foreign)), None)


def zero_name(foreign: ForeignConfig) -> str:
    """The strategy of a DeepSpeed file, read from it or, where it is not found, guessed from its name."""
    config = foreign.get("deepspeed")
    settings = config if isinstance(config, Mapping) else json_near(foreign.folder, str(config or ""))
    if settings is not None:
        zero = _section_of(foreign, settings, "zero_optimization")
        devices = [_section_of(foreign, zero, f"offload_{what}").get("device") for what in ("optimizer", "param")]
        stage, offload = zero.get("stage") or 0, "nvme" if "nvme" in devices else "cpu" if "cpu" in devices else ""
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            problem = f"zero_optimization.stage is {shown(stage)}; write 0, 1, 2 or 3"
            raise RecipeError([f"deepspeed: {problem}"])
        stage = int(stage)
    else:
        match = re.search(r"z(?:ero)?[-_]?([0-3])(?!\d)", PurePosixPath(str(config)).name.lower())
        stage, offload = int(match[1]) if match else 0, "cpu" if "offload" in str(config) else ""
        if config:
            foreign.leave("deepspeed", "look", f"read from its name as stage {stage}{', offloaded' if offload else ''}")
    if not stage:
        return "ddp"
    if stage == 3 and offload == "nvme":
        return "zero3_nvme"
    return f"zero{max(stage, 2)}_offload" if offload else f"zero{stage}"


def _section_of(foreign: ForeignConfig, settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section in a DeepSpeed file, empty if it is missing. Raises RecipeError for anything else."""
    section = settings.get(name) or {}
    if not isinstance(section, Mapping):
        raise RecipeError([f"deepspeed: {name} is {shown(section)}; write a section of key: value"])
    return section


def json_near(folder: Path, *names: str) -> Mapping[str, Any] | None:
    """The JSON object in the first of these files that exists in `folder` or in the working folder; None without one.
    Raises RecipeError for a file that holds no JSON object."""
    for path in (place for name in names if name for place in (folder / name, Path(name))):
        if os.path.exists(path):  # some of pathlib's checks raise on a name that is too long
            try:
                return read_object(path)
            except FinetuneError as error:
                raise RecipeError([f"{str(error).rpartition('; ')[0]}; correct the file, or take it away"]) from None
    return None


def _fsdp_name(foreign: ForeignConfig) -> str:
    """The strategy of FSDP's settings; those about how it is carried out are listed as left out."""
    words = str(foreign.peek("fsdp") or "")
    if isinstance(foreign.peek("fsdp_config"), str):
        _read_fsdp_file(foreign)

    def of(name: str) -> Any:
        return foreign.first(f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}")[1]

    sharding = f"{of('sharding_strategy') or ''} {words}".lower()
    offloaded = of("offload_params") is True or of("cpu_offload") is True or "offload" in words
    whole_between = of("reshard_after_forward") is False or "shard_grad_op" in sharding
    if "no_shard" in sharding:
        return "ddp"
    if offloaded:
        return "fsdp2_offload"
    return "fsdp2_grad_op" if whole_between else "hsdp" if "hybrid" in sharding else "fsdp2"


def _read_fsdp_file(foreign: ForeignConfig) -> None:
    """Replace the file name in fsdp_config by the file's content; a missing file is listed as left out."""
    name = foreign.peek("fsdp_config")
    settings = json_near(foreign.folder, name)
    if settings is None:
        foreign.leave(
            "fsdp_config", "look", "this file is not here, so its settings are not read; the kit shards fully"
        )
        return
    foreign.values = {**foreign.values, "fsdp_config": dict(settings)}


def checkpointing(foreign: ForeignConfig, *keys: str, default: bool) -> None:
    """training.activation_checkpointing, which FSDP's own section may turn on too."""
    foreign.carry("training.activation_checkpointing", *keys, default=default, change=bool)
    for key in ("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing"):
        if foreign.get(key):
            foreign.write("training.activation_checkpointing", True, key)


def data_set(path: str, *, files: Any = None, kind: str | None = None, **more: Any) -> dict[str, Any]:
    """One entry of data.train: a local file by its kind, else a data set of the Hub; None and defaults are omitted."""
    if kind is None and files is None:
        kind = _SUFFIXES.get(PurePosixPath(path).suffix)
    entry: dict[str, Any] = {"path": path}
    if kind in ("json", "csv", "parquet") and path != kind:
        entry = {"path": kind, "data_files": files or path}
    elif files is not None:
        entry["data_files"] = files
    usual = {"split": "train", "format": "auto", "weight": 1.0, "revision": "main"}
    return entry | {key: value for key, value in more.items() if value not in (None, {}, usual.get(key))}


def renamed(**columns: Any) -> dict[str, str]:
    """`columns` of a data set: ours -> theirs, without those that are not given or have our name already."""
    return {ours: str(theirs) for ours, theirs in columns.items() if theirs and theirs != ours}


def held_out(foreign: ForeignConfig, key: str) -> None:
    """data.eval from a share of the rows; a number of rows is left to the reader."""
    share = foreign.get(key)
    if not share:
        return
    if isinstance(share, (int, float)) and 0 < share < 1:
        foreign.write("data.eval", {"fraction": share}, key)
    else:
        foreign.leave(key, "look", "a number of rows; write data.eval: {fraction: ...}, or a split like train[:1000]")


def named_template(foreign: ForeignConfig, key: str, names: Mapping[str, str], *, tools: bool = False) -> None:
    """data.chat_template from a template's name: the text of one of ours, else the tokenizer's own template. Rows with
    tools need the tokenizer's template, because ours cannot write tools."""
    name = str(foreign.get(key))
    if name in names and tools:
        reason = "the tokenizer's own template is used, for rows with tools; compare by: finetune preview"
        foreign.leave(key, "look", reason)
    elif name in names:
        foreign.write("data.chat_template", TEMPLATES[names[name]], f"{key}: {name}")
    elif name not in ("tokenizer_default", "None"):
        foreign.leave(key, "look", "the tokenizer's own template is used; compare by: finetune preview")


def only_linear_layers(foreign: ForeignConfig) -> None:
    """Keep adapters on linear layers alone if all-linear was carried over: ours also adapts experts' parameters."""
    layers, why = foreign.carried.get("lora.target_modules", (None, ""))
    if layers == "all-linear" and "lora.target_parameters" not in foreign.carried:
        foreign.write("lora.target_parameters", [], f"{why}: linear layers, no experts' parameters")


def every(foreign: ForeignConfig, recipe_key: str, key: str) -> None:
    """eval_steps or save_steps: steps, or below 1 a share of the run, there as here."""
    foreign.carry(recipe_key, key, change=as_count)


def best_model(foreign: ForeignConfig) -> None:
    """training.load_best_model_at_end and its metric, which is a held-out loss here; after data.eval and steps."""
    metric, wanted = foreign.get("metric_for_best_model"), foreign.get("load_best_model_at_end")
    if wanted and "data.eval" not in foreign.carried:
        remedy = "add data.eval: {fraction: 0.05}, and training.load_best_model_at_end: true"
        foreign.leave("load_best_model_at_end", "look", f"needs held-out rows; {remedy}")
        wanted = None
    if wanted is not None:
        foreign.write("training.load_best_model_at_end", wanted, "load_best_model_at_end")
    if metric not in (None, "loss", "eval_loss"):
        foreign.leave("metric_for_best_model", "differs", "the held-out loss over all rows decides here")
    patience = foreign.carried.get("training.early_stopping_patience", (None,))[0]
    if wanted or (wanted is None and patience):
        _save_each_evaluation(foreign)


def _save_each_evaluation(foreign: ForeignConfig) -> None:
    """transformers evaluates more often than it saves, and takes the best of what was saved; here each is saved."""
    evaluated, saved = (foreign.carried.get(key, (recipe_default(key), ""))[0] for key in ("eval_steps", "save_steps"))
    whole = isinstance(evaluated, int) and isinstance(saved, int) and saved > 0
    if evaluated != saved and not (whole and evaluated % saved == 0):
        foreign.write("save_steps", evaluated, "eval_steps: the best evaluation's checkpoint is exported")


# A tracker's own key -> the tracker, and the environment variable from which the tracker reads the same setting.
_TRACKER_VARIABLES = {
    "wandb_project": ("wandb", "WANDB_PROJECT"),
    "wandb_entity": ("wandb", "WANDB_ENTITY"),
    "wandb_mode": ("wandb", "WANDB_MODE"),
    "mlflow_tracking_uri": ("mlflow", "MLFLOW_TRACKING_URI"),
    "metric_logger.project": ("wandb", "WANDB_PROJECT"),
    "metric_logger.entity": ("wandb", "WANDB_ENTITY"),
    "metric_logger.mode": ("wandb", "WANDB_MODE"),
}


def trackers(foreign: ForeignConfig, wanted: Mapping[str, str]) -> None:
    """report_to, from trackers by the tool's names, each with the key that asks for it. Settings that this kit
    leaves to the environment are named."""
    ours = {name: key for name, key in wanted.items() if name in get_args(Tracker)}
    if ours:
        foreign.write("report_to", list(ours), ", ".join(dict.fromkeys(ours.values())))
    for name, key in wanted.items():
        if name not in ours:
            foreign.leave(key, "look", f"not offered; {', '.join(get_args(Tracker))} are", name)
    for key, (name, variable) in _TRACKER_VARIABLES.items():
        value = foreign.get(key) if name in ours else None
        if value is not None:
            foreign.leave(key, "look", f"set it in the environment: {variable}={shown(value)}")


def hub(foreign: ForeignConfig, *, push: bool) -> None:
    """hub.repo_id and hub.push; always private, as the recipe's default is."""
    name = foreign.get("hub_model_id")
    if name and re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)):
        foreign.write("hub.repo_id", name, "hub_model_id")
        if push:
            foreign.write("hub.push", True, "push_to_hub" if foreign.peek("push_to_hub") else "hub_model_id")
    else:
        if name:
            foreign.leave("hub_model_id", "same", "names no owner; set hub.repo_id: owner/name")
        if foreign.get("push_to_hub"):
            foreign.leave("push_to_hub", "same", "set hub.repo_id: owner/name and hub.push: true")
    if foreign.get("hub_private_repo") is False:
        foreign.leave("hub_private_repo", "same", "repositories are private; set hub.private: false yourself")
