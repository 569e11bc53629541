"""Settings that several tools configure with the same keys: optimizers, schedules, strategies, batches, data sets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, get_args

from pydantic import ValidationError

from finetune.errors import FinetuneError, RecipeError
from finetune.importers import Level
from finetune.importers.foreign_config import ForeignConfig, as_count, recipe_default
from finetune.importers.recipe_writer import written
from finetune.recipe.optimizers import DEFAULT, OPTIMIZER_NAMES
from finetune.recipe.schema import Recipe, Scheduler, Tracker
from finetune.recipe.sections.model import ROPE_TYPES
from finetune.recipe.sections.training import SCHEDULER_ARGUMENTS
from finetune.recipe.strategy import Strategy, read_strategy
from finetune.recipe.strategy_fit import unfit
from finetune.recipe.yaml_text import shown
from finetune.untrusted.json_files import read_object
from finetune.wording import counted

_SUFFIXES = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}

# -- the model and the optimizer ---------------------------------------------------------------------------------------


def carry_remote_code(foreign: ForeignConfig) -> None:
    """Name trust_remote_code, which many examples set by habit and few models need."""
    if foreign.get("trust_remote_code"):
        reason = "would run the repository's own Python; set model.trust_remote_code: true if the model needs it"
        foreign.leave("trust_remote_code", "look", reason)


def leave_end_token(foreign: ForeignConfig, key: str) -> None:
    """Compare an eos_token with the model's own, if the model is a folder on this machine."""
    token = foreign.get(key)
    if token is None:
        return
    name, _ = foreign.carried.get("model.name_or_path", ("", ""))
    settings: Mapping[str, Any] = {}
    if os.path.isdir(str(name)):
        settings = json_near(Path(str(name)), "tokenizer_config.json") or {}
    own = settings.get("eos_token")
    own = own.get("content") if isinstance(own, Mapping) else own
    if own == token:
        foreign.leave(key, "same", "the model's own tokenizer has it")
    elif own:
        reason = f"the tokenizer is used as it is, with {shown(own)}; change it beforehand and name its folder"
        foreign.leave(key, "differs", reason)
    else:
        reason = "the tokenizer is used as it is; if this is not its own end of text, change it and name its folder"
        foreign.leave(key, "look", reason)


def find_quantisation_key(foreign: ForeignConfig) -> str | None:
    """The key that is true: load_in_4bit or load_in_8bit."""
    values = {key: foreign.get(key) for key in ("load_in_4bit", "load_in_8bit")}
    return next((key for key, value in values.items() if value is True), None)


def keep_to_linear_layers(foreign: ForeignConfig) -> None:
    """Keep adapters on linear layers alone if all-linear was carried over: ours also adapts experts' parameters."""
    layers, origin = foreign.carried.get("lora.target_modules", (None, ""))
    if layers == "all-linear" and "lora.target_parameters" not in foreign.carried:
        foreign.write("lora.target_parameters", [], f"{origin}: linear layers, no experts' parameters")


def carry_optimizer(foreign: ForeignConfig, key: str, default: str) -> None:
    """training.optim and AdamW's constants. Call it after accelerate_config is written."""
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


def carry_scheduler(foreign: ForeignConfig, key: str, default: str) -> None:
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
    known = {argument: value for argument, value in arguments.items() if argument in SCHEDULER_ARGUMENTS[shape]}
    if known:
        foreign.write("training.lr_scheduler_kwargs", known, "lr_scheduler_kwargs")
    for argument in sorted(set(arguments) - set(known)):
        foreign.leave(f"lr_scheduler_kwargs.{argument}", "differs", f"{shape} has no such argument here")


def carry_warmup(foreign: ForeignConfig, *, default_ratio: float = 0.0) -> None:
    """training.warmup_steps or warmup_ratio. In transformers 5, a warmup_steps below 1 is a ratio."""
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


def carry_batch_size(
    foreign: ForeignConfig,
    micro_batch_key: str,
    default: int,
    *,
    accumulation: int | None = None,
    gpus_per_row: int = 1,
) -> None:
    """training.global_batch_size: the tool's rows of one optimizer step.

    With 2 rows a GPU, 4 accumulated micro-batches and 8 GPUs, two of them to a row: 2 x 4 x (8 / 2) = 32.
    """
    micro_batch = foreign.count(micro_batch_key, default)
    written_steps = foreign.get("gradient_accumulation_steps")
    steps = accumulation
    if not steps:
        steps = 1 if written_steps == "auto" else foreign.count("gradient_accumulation_steps", 1)
    replicas = max(1, foreign.gpus // gpus_per_row)
    machine = counted(replicas, "GPU")
    if gpus_per_row > 1:
        machine += f" ({foreign.gpus} / {gpus_per_row})"
    origin = f"{micro_batch_key} {micro_batch} x gradient_accumulation_steps {steps} x {machine}"
    foreign.write("training.global_batch_size", micro_batch * steps * replicas, origin)
    foreign.write("training.per_device_batch_size", micro_batch, micro_batch_key)


# axolotl's and TRL's name, LLaMA-Factory's and transformers'
OFFLOADS = ("activation_offloading", "use_unsloth_gc", "gradient_checkpointing_kwargs.offload")


def carry_checkpointing(foreign: ForeignConfig, *keys: str, default: bool) -> None:
    """training.activation_checkpointing, which FSDP's own section may turn on too, and training.activation_offloading,
    which leaves hidden states alone."""
    foreign.carry("training.activation_checkpointing", *keys, default=default, change=bool)
    for key in ("fsdp_config.activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing"):
        if foreign.get(key):
            foreign.write("training.activation_checkpointing", True, key)
    offloads = [key for key in OFFLOADS if foreign.get(key)]
    offloads += [key for key in keys if str(foreign.peek(key)).startswith("offload")]  # axolotl's older values
    if offloads:
        foreign.write("training.activation_checkpointing", True, offloads[0])
        foreign.write("training.activation_offloading", True, offloads[0])


# -- the strategy ------------------------------------------------------------------------------------------------------


def chosen_strategy(foreign: ForeignConfig) -> Strategy:
    """The strategy that was written as accelerate_config."""
    return read_strategy(foreign.carried["accelerate_config"][0])


def carry_strategy(foreign: ForeignConfig) -> str:
    """accelerate_config, from `deepspeed`, `fsdp` and `fsdp_config`; returns its name."""
    key = next((name for name in ("deepspeed", "fsdp_config", "fsdp") if foreign.peek(name)), None)
    deepspeed = _zero_name(foreign)
    name = deepspeed if key == "deepspeed" else "ddp"
    if key in ("fsdp_config", "fsdp"):
        name = _fsdp_name(foreign)
    gpus = counted(foreign.gpus, "GPU")
    if foreign.gpus == 1 and name not in ("zero2_offload", "zero3_offload"):
        if key and name != "ddp":
            reason = "one process has nothing to shard; write --gpus 4x80GB for the GPUs that it ran on"
            foreign.leave("accelerate_config", "look", reason, name)
        name = "single"
    if name == "hsdp" and foreign.nodes == 1:
        name = "fsdp2"
        reason = "each machine holds one copy of the sharded model; write --gpus 2x8x80GB for two"
        foreign.leave("accelerate_config", "look", reason, "hsdp")
    foreign.write("accelerate_config", name, f"{key} with {gpus}" if key else gpus)
    return name


def _zero_name(foreign: ForeignConfig) -> str:
    """The strategy of a DeepSpeed file, read from the file. Without the file it is guessed from the file's name."""
    config = foreign.get("deepspeed")
    settings = config if isinstance(config, Mapping) else json_near(foreign.folder, str(config or ""))
    offload = ""
    if settings is not None:
        zero = _section(settings, "zero_optimization")
        devices = [_section(zero, f"offload_{name}").get("device") for name in ("optimizer", "param")]
        stage = zero.get("stage") or 0
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            problem = f"zero_optimization.stage is {shown(stage)}; write 0, 1, 2 or 3"
            raise RecipeError([f"deepspeed: {problem}"])
        stage = int(stage)
        offload = next((device for device in ("nvme", "cpu") if device in devices), "")
    else:
        # zero3.json, ds_z2_offload_config.json
        match = re.search(r"z(?:ero)?[-_]?([0-3])(?!\d)", PurePosixPath(str(config)).name.lower())
        stage = int(match[1]) if match else 0
        guess = f"stage {stage}"
        if "offload" in str(config):
            offload = "cpu"
            guess += ", offloaded"
        if config:
            foreign.leave("deepspeed", "look", f"read from its name as {guess}")
    if not stage:
        return "ddp"
    if stage == 3 and offload == "nvme":
        return "zero3_nvme"
    if offload:
        return f"zero{max(stage, 2)}_offload"
    return f"zero{stage}"


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
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
    """The strategy of FSDP's settings; settings about how it is carried out are listed as left out."""
    words = str(foreign.peek("fsdp") or "")
    file = foreign.peek("fsdp_config")
    if isinstance(file, str):  # the file's content replaces its name
        settings = json_near(foreign.folder, file)
        if settings is None:
            reason = "this file is not here, so its settings are not read; the kit shards fully"
            foreign.leave("fsdp_config", "look", reason)
        else:
            foreign.values = {**foreign.values, "fsdp_config": dict(settings)}

    def setting(name: str) -> Any:
        return foreign.first(f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}")[1]

    sharding = f"{setting('sharding_strategy') or ''} {words}".lower()
    is_offloaded = setting("offload_params") is True or setting("cpu_offload") is True or "offload" in words
    keeps_gathered = setting("reshard_after_forward") is False or "shard_grad_op" in sharding
    if "no_shard" in sharding:
        return "ddp"
    if is_offloaded:
        return "fsdp2_offload"
    if keeps_gathered:
        return "fsdp2_grad_op"
    if "hybrid" in sharding:
        return "hsdp"
    return "fsdp2"


def fit_strategy(foreign: ForeignConfig) -> None:
    """Replace settings that the strategy cannot train with, and name each replacement. Call this last."""
    for _ in range(10):  # each pass replaces one setting that a strategy may refuse
        nested: dict[str, Any] = {}
        for key, (value, _) in foreign.carried.items():
            section, _, name = key.rpartition(".")
            if section:
                nested.setdefault(section, {})[name] = value
            else:
                nested[key] = value
        try:
            recipe = Recipe.model_validate(nested)
        except ValidationError:  # reported when the finished recipe is loaded
            return
        misfit = next(unfit(recipe, chosen_strategy(foreign)), None)
        if misfit is None:
            return
        for key, value in misfit.instead.items():
            before, origin = foreign.carried.get(key, (recipe_default(key), ""))
            strategy_name = foreign.carried["accelerate_config"][0]
            foreign.write(key, value, f"{written(before)} does not go with {strategy_name}")
            if key != "quantization.bnb_4bit_quant_storage":  # only the container changes, not the numbers
                level: Level = "look" if key == "accelerate_config" else "differs"
                # "optim: adamw_8bit" and "fsdp with 4 GPUs" name the tool's key before these separators.
                their_key = re.split(r": | with \d", origin)[0] if origin else key
                reason = f"{misfit.problem}; {key}: {written(value)} takes its place"
                foreign.leave(their_key, level, reason, before)


# -- data --------------------------------------------------------------------------------------------------------------


def data_set_entry(path: str, *, files: Any = None, kind: str | None = None, **more: Any) -> dict[str, Any]:
    """One entry of data.train: a local file by its kind, else a data set of the Hub; None and defaults are omitted.
    Files alone need no path."""
    if kind is None and files is None:
        kind = _SUFFIXES.get(PurePosixPath(path).suffix)
    if not path:
        name = files[0] if isinstance(files, list) else files
        path = kind or _SUFFIXES.get(PurePosixPath(str(name)).suffix, "json")
    entry: dict[str, Any] = {"path": path}
    if kind in ("json", "csv", "parquet") and path != kind:
        entry = {"path": kind, "data_files": files or path}
    elif files is not None:
        entry["data_files"] = files
    defaults = {"split": "train", "format": "auto", "weight": 1.0, "revision": "main"}
    return entry | {key: value for key, value in more.items() if value not in (None, {}, defaults.get(key))}


def renamed_columns(**columns: Any) -> dict[str, str]:
    """`columns` of a data set: our name -> theirs, without columns that are not given or have our name already."""
    return {ours: str(theirs) for ours, theirs in columns.items() if theirs and theirs != ours}


def carry_held_out(foreign: ForeignConfig, key: str) -> None:
    """data.eval from a share of the rows; a number of rows is left to the reader."""
    share = foreign.get(key)
    if not share:
        return
    if isinstance(share, (int, float)) and 0 < share < 1:
        foreign.write("data.eval", {"fraction": share}, key)
    else:
        foreign.leave(key, "look", "a number of rows; write data.eval: {fraction: ...}, or a split like train[:1000]")


def carry_named_template(foreign: ForeignConfig, key: str, names: Mapping[str, str], *, tools: bool = False) -> None:
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


# -- the run -----------------------------------------------------------------------------------------------------------


def carry_best_model(foreign: ForeignConfig) -> None:
    """training.load_best_model_at_end and its metric, here a held-out loss. Call it after data.eval and the steps."""
    metric, loads_best = foreign.get("metric_for_best_model"), foreign.get("load_best_model_at_end")
    if loads_best and "data.eval" not in foreign.carried:
        remedy = "add data.eval: {fraction: 0.05}, and training.load_best_model_at_end: true"
        foreign.leave("load_best_model_at_end", "look", f"needs held-out rows; {remedy}")
        loads_best = None
    if loads_best is not None:
        foreign.write("training.load_best_model_at_end", loads_best, "load_best_model_at_end")
    if metric not in (None, "loss", "eval_loss"):
        foreign.leave("metric_for_best_model", "differs", "the held-out loss over all rows decides here")
    patience, _ = foreign.carried.get("training.early_stopping_patience", (None, ""))
    if loads_best or (loads_best is None and patience):
        # transformers may evaluate more often than it saves, and takes the best saved model. A recipe saves at each
        # evaluation, so save_steps becomes eval_steps unless it divides them already: 100 divides 500.
        evaluated, _ = foreign.carried.get("eval_steps", (recipe_default("eval_steps"), ""))
        saved, _ = foreign.carried.get("save_steps", (recipe_default("save_steps"), ""))
        are_counts = isinstance(evaluated, int) and isinstance(saved, int) and saved > 0
        if evaluated != saved and not (are_counts and evaluated % saved == 0):
            foreign.write("save_steps", evaluated, "eval_steps: the best evaluation's checkpoint is exported")


# A tracker's own key -> the tracker, and the environment variable from which the tracker reads the same setting.
_TRACKER_VARIABLES = {
    "wandb_project": ("wandb", "WANDB_PROJECT"),
    "wandb_entity": ("wandb", "WANDB_ENTITY"),
    "wandb_mode": ("wandb", "WANDB_MODE"),
    "wandb_name": ("wandb", "WANDB_NAME"),
    "wandb_run_id": ("wandb", "WANDB_RUN_ID"),
    "run_name": ("wandb", "WANDB_NAME"),
    "mlflow_tracking_uri": ("mlflow", "MLFLOW_TRACKING_URI"),
}


def carry_trackers(foreign: ForeignConfig, trackers: Mapping[str, str]) -> None:
    """report_to, from trackers by the tool's names, each with the key that asks for it. Settings that this kit
    leaves to the environment are named."""
    offered = {name: key for name, key in trackers.items() if name in get_args(Tracker)}
    if offered:
        foreign.write("report_to", list(offered), ", ".join(dict.fromkeys(offered.values())))
    for name, key in trackers.items():
        if name not in offered:
            foreign.leave(key, "look", f"not offered; {', '.join(get_args(Tracker))} are", name)
    for key, (name, variable) in _TRACKER_VARIABLES.items():
        if name not in offered:
            continue
        value = foreign.get(key)
        if value is not None:
            foreign.leave(key, "look", f"set it in the environment: {variable}={shown(value)}")


def carry_hub(foreign: ForeignConfig, *, push: bool) -> None:
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


# -- chat templates that other tools call by a name, for tokenizers that have another template or none -----------------

_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)


def _for_each_message(turn: str, prompt: str, before: str = "{{ bos_token }}") -> str:
    turns = "{% for message in messages %}" + turn + "{% endfor %}"
    return before + turns + "{% if add_generation_prompt %}" + prompt + "{% endif %}"


def _alpaca(opening: str, end: str) -> str:
    return _for_each_message(
        "{% if message['role'] == 'user' %}" + opening + "### Instruction:\n{{ message['content'] }}\n\n### Response:\n"
        "{% elif message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}" + end + "{% else %}"
        "{{ message['content'] }}\n\n{% endif %}",
        "",
    )


TEMPLATES = {
    "llama3": _for_each_message(
        "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "chatml": _for_each_message(
        "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n", "<|im_start|>assistant\n", before=""
    ),
    "alpaca": _alpaca(_ALPACA, ""),
    # LLaMA-Factory says the opening once, as a system prompt.
    "alpaca_turns": _alpaca("{% if loop.first %}" + _ALPACA + "{% endif %}", "\n\n"),
}


def carry_rope_scaling(foreign: ForeignConfig, *keys: str) -> None:
    """model.rope_scaling, from transformers' mapping in its old or new spelling."""
    key, value = foreign.first(*keys)
    if value is None:
        return
    kind = (value.get("rope_type") or value.get("type")) if isinstance(value, Mapping) else None
    if kind in ROPE_TYPES:
        others = {name: setting for name, setting in value.items() if name not in ("type", "rope_type")}
        foreign.write("model.rope_scaling", {"rope_type": kind, **others}, key)
    else:
        foreign.leave(key, "differs", "write model.rope_scaling: {rope_type: yarn, factor: 4.0}, or another kind")
