"""Reads an Accelerate config file: each key as Accelerate reads it, and whether this kit does the same.

`accelerate config` writes every key that it knows, and writes one meaning in several ways: `'no'`, `false`, `null`, or
no line. So a file is read key by key. Each value is converted as Accelerate converts it, and a key that repeats the
default is dropped. Two files with one meaning then have equal settings.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from finetune.recipe.sections.engine_keys import ENGINE_KEYS, OTHER_PLACES, engine_mistakes
from finetune.recipe.yaml_text import shorten

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe

UNREADABLE: Any = object()
_TRUE, _FALSE = ("y", "yes", "t", "true", "on", "1"), ("n", "no", "f", "false", "off", "0")  # Accelerate's str_to_bool
# Indexed by the strategy's number in torch's ShardingStrategy.
_SHARDING = ("", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_RESHARD = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


def _text(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)):
        return str(value)
    return UNREADABLE


def _word(value: Any) -> Any:
    """A choice: Accelerate takes any case. YAML reads an unquoted `no` as false."""
    if value is False:
        return "no"
    if isinstance(value, str):
        return value.lower()
    return UNREADABLE


def _whole_number(value: Any) -> Any:
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal() and len(value) < 20:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return UNREADABLE


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        return UNREADABLE
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return UNREADABLE


def _truth_value(value: Any) -> Any:
    if not isinstance(value, (bool, int, str)) or str(value).lower() not in _TRUE + _FALSE:
        return UNREADABLE
    return str(value).lower() in _TRUE


def _reshard(value: Any) -> Any:
    """true or false under FSDP2. In FSDP1's files this is one of five strategies, by name or number."""
    name = str(value).upper()
    if not isinstance(value, bool) and name.isdecimal() and 1 < int(name) < len(_SHARDING):
        name = _SHARDING[int(name)]
    if name in _RESHARD:
        return _RESHARD[name]
    if name in _SHARDING[1:]:
        return name  # stays a name, for a message of its own: _OTHER_SHARDING
    return _truth_value(value)


def _upper(value: Any) -> Any:
    if isinstance(value, (str, int)):
        return str(value).upper()
    return UNREADABLE


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class AccelerateKey:
    """One key of a section."""

    read: Callable[[Any], Any] = _as_it_is
    works: tuple[Any, ...] = ()  # values that this kit can follow; empty: all
    same: Any = None  # the default in Accelerate and here; it changes nothing
    remedy: str = ""  # for other values; empty: name the values that work
    keeps: bool = False  # stays in the settings even at its default
    drops: bool = False  # never enters the settings, because this kit has only one way
    owner: Callable[[Recipe], Any] | None = None  # the recipe's value, if the recipe decides it
    owner_key: str = ""  # the recipe's key for it


def _launcher(read: Callable[[Any], Any] = _as_it_is, **options: Any) -> AccelerateKey:
    return AccelerateKey(read, keeps=True, **options)


# The tables follow the sections of a file that `accelerate config` writes. A key that is in no table is a mistake.
_COMPILING = "the recipe owns it: training.compile; set 'no'"
_ABSENT = AccelerateKey(lambda _: UNREADABLE, remedy="has no effect here; remove it")
_TOP: dict[str, AccelerateKey] = {
    **dict.fromkeys(
        "main_process_ip main_process_port machine_rank main_training_function gpu_ids rdzv_backend same_network "
        "enable_cpu_affinity debug distributed_type".split(),
        _launcher(),
    ),
    "num_processes": AccelerateKey(_whole_number, same=-1, remedy="write a whole number"),  # -1: the launcher decides
    "num_machines": _launcher(_whole_number, remedy="write a whole number"),
    "use_cpu": _launcher(_truth_value, works=(True, False)),
    "compute_environment": _launcher(_text, works=("LOCAL_MACHINE",)),
    "mixed_precision": AccelerateKey(
        _word,
        works=("no", "fp16", "bf16"),
        same="no",
        owner=lambda recipe: recipe.training.mixed_precision,
        owner_key="training.mixed_precision",
    ),
    "fp16": AccelerateKey(
        _truth_value, works=(False,), remedy="the recipe owns it: training.mixed_precision; remove the line"
    ),
    "dynamo_backend": AccelerateKey(_word, works=("no",), same="no", remedy=_COMPILING),
    "downcast_bf16": AccelerateKey(_truth_value, works=(False,), same=False, remedy="is for TPUs; set 'no'"),
    "tpu_use_cluster": AccelerateKey(_truth_value, works=(False,), same=False),
    "tpu_use_sudo": AccelerateKey(_truth_value, works=(False,), same=False),
    **dict.fromkeys("tpu_env tpu_name tpu_zone tpu_vm command_file commands".split(), _ABSENT),
    **dict.fromkeys(("megatron_lm_config", "mpirun_config"), _ABSENT),
}
# Keys of FSDP1 that change nothing under FSDP2 are accepted at the value that FSDP2 follows.
_FSDP: dict[str, AccelerateKey] = {
    "fsdp_version": AccelerateKey(
        _whole_number, works=(2,), keeps=True, remedy="this kit shards by FSDP2; set fsdp_version: 2"
    ),
    "fsdp_reshard_after_forward": AccelerateKey(_reshard, works=(True, False), same=True),
    "fsdp_sharding_strategy": AccelerateKey(
        _reshard,
        works=(True,),
        drops=True,
        remedy="has no effect here: FSDP2 takes fsdp_reshard_after_forward, which is false for SHARD_GRAD_OP; write "
        "that instead",
    ),
    "fsdp_offload_params": AccelerateKey(_truth_value, works=(True, False), same=False),
    "fsdp_cpu_ram_efficient_loading": AccelerateKey(_truth_value, works=(True,), same=True),
    "fsdp_sync_module_states": AccelerateKey(_truth_value, works=(True,), same=True),
    "fsdp_use_orig_params": AccelerateKey(_truth_value, works=(True,), same=True),
    "fsdp_forward_prefetch": AccelerateKey(
        _truth_value, works=(False,), same=False, remedy="has no effect here; remove it"
    ),
    "fsdp_backward_prefetch": AccelerateKey(
        _upper,
        works=("BACKWARD_PRE", "1"),
        drops=True,
        remedy="has no effect here: FSDP2 always gathers the next weights in backward; remove it",
    ),
    "fsdp_auto_wrap_policy": AccelerateKey(_upper, works=("TRANSFORMER_BASED_WRAP",), drops=True),
    "fsdp_transformer_layer_cls_to_wrap": AccelerateKey(
        lambda value: value if isinstance(value, str) and "," not in value else UNREADABLE,
        remedy="a unit is a decoder layer here; name its class alone, or remove the line",
    ),
    **dict.fromkeys(("fsdp_min_num_params", "fsdp_ignored_modules"), _ABSENT),
    "fsdp_state_dict_type": AccelerateKey(_upper, works=("SHARDED_STATE_DICT",), drops=True),
    "fsdp_activation_checkpointing": AccelerateKey(
        _truth_value,
        works=(True, False),
        same=False,
        owner=lambda recipe: recipe.training.activation_checkpointing,
        owner_key="training.activation_checkpointing",
    ),
    "fsdp_activation_checkpointing_offload": AccelerateKey(_truth_value, works=(False,), same=False),
}
_DEVICES = ("none", "cpu", "nvme")
# DeepSpeed's own keys are checked together, by engine_mistakes.
_ZERO: dict[str, AccelerateKey] = {
    "zero_stage": AccelerateKey(_whole_number, works=(1, 2, 3), keeps=True),
    "offload_optimizer_device": AccelerateKey(_word, works=_DEVICES, same="none"),
    "offload_param_device": AccelerateKey(_word, works=_DEVICES, same="none"),
    "offload_optimizer_nvme_path": AccelerateKey(_text),
    "offload_param_nvme_path": AccelerateKey(_text),
    "zero3_init_flag": AccelerateKey(_truth_value, works=(True, False), drops=True),
    "zero3_save_16bit_model": AccelerateKey(_truth_value, works=(False,), same=False),
    "gradient_accumulation_steps": AccelerateKey(
        _whole_number, works=(1,), same=1, remedy="the recipe owns it: training.global_batch_size; remove the line"
    ),
    "gradient_clipping": AccelerateKey(
        _number,
        remedy="write a number, or remove the line",
        owner=lambda recipe: recipe.training.max_grad_norm or 0.0,
        owner_key="training.max_grad_norm",
    ),
    **dict.fromkeys(
        (f"deepspeed_{name}" for name in ("hostfile", "exclusion_filter", "inclusion_filter", "moe_layer_cls_names")),
        _ABSENT,
    ),
    "deepspeed_multinode_launcher": AccelerateKey(_word, works=("standard",), same="standard"),
    **dict.fromkeys(ENGINE_KEYS, AccelerateKey(keeps=True)),
}
_ONE = AccelerateKey(_whole_number, works=(1,), same=1, remedy="there is no such parallelism here; set 1")
_OF_LARGER_SIZES = (
    "cp_backend cp_comm_strategy sp_backend sp_seq_length sp_seq_length_is_variable sp_attn_implementation"
)
# HSDP: copies (replicate) of the model, each over so many ranks (shard).
_MESH: dict[str, AccelerateKey] = {
    "parallelism_config_dp_replicate_size": AccelerateKey(_whole_number, same=1, remedy="write a whole number"),
    "parallelism_config_dp_shard_size": AccelerateKey(_whole_number, remedy="write a whole number"),
    **dict.fromkeys((f"parallelism_config_{name}_size" for name in ("tp", "cp", "sp")), _ONE),
    **dict.fromkeys((f"parallelism_config_{name}" for name in _OF_LARGER_SIZES), AccelerateKey(drops=True)),
}
_DYNAMO: dict[str, AccelerateKey] = {
    "dynamo_backend": AccelerateKey(_word, works=("no",), same="no", remedy=_COMPILING),
    # Settings of a backend: without a backend they have no effect.
    **dict.fromkeys(
        (f"dynamo_{name}" for name in "mode use_fullgraph use_dynamic use_regional_compilation".split()),
        AccelerateKey(drops=True),
    ),
}


@dataclass(frozen=True)
class _Table:
    keys: Mapping[str, AccelerateKey]
    prefix: str = ""  # `accelerate launch` puts this before a key that lacks it
    read_under: str = ""  # Accelerate reads the section under this distributed_type alone; empty: under every type


SECTIONS = {
    "fsdp_config": _Table(_FSDP, "fsdp_", "FSDP"),
    "deepspeed_config": _Table(_ZERO, "", "DEEPSPEED"),
    "parallelism_config": _Table(_MESH, "", "FSDP"),
    "dynamo_config": _Table(_DYNAMO, "dynamo_"),
}
# distributed_type -> the section and key that its file must have.
_REQUIRED = {"FSDP": ("fsdp_config", "fsdp_version"), "DEEPSPEED": ("deepspeed_config", "zero_stage")}
# FSDP1's sharding strategies that FSDP2 expresses in other keys.
_OTHER_SHARDING = {
    "NO_SHARD": "is DDP; set distributed_type: MULTI_GPU and remove fsdp_config",
    "HYBRID_SHARD": "keeps copies of the sharded model; set true, and add parallelism_config: {}",
    "HYBRID_SHARD_ZERO2": "keeps copies of the sharded model; set false, and add parallelism_config: {}",
}


@dataclass
class Meaning:
    """A file's settings by Accelerate's names, without settings that change nothing, and the file's mistakes."""

    settings: dict[str, Any] = field(default_factory=dict)
    mistakes: list[tuple[str, str]] = field(default_factory=list)  # the key as the file writes it, and the problem
    notes: list[str] = field(default_factory=list)  # settings of the file that the recipe overrules


def type_of(file: Mapping[str, Any]) -> str:
    """The `distributed_type`; YAML reads an unquoted NO as false."""
    value = file.get("distributed_type", "NO")
    return "NO" if value is False else str(value)


def meaning_of(file: Mapping[str, Any], recipe: Recipe | None = None) -> Meaning:
    """Read a file key by key. Without a recipe, a value that recipes decide is a mistake unless it is the default."""
    meaning, kind = Meaning(), type_of(file)
    top = {name: value for name, value in file.items() if name not in (*SECTIONS, "fp8_config")}
    meaning.settings = _read_keys(meaning, "", top, _Table(_TOP), recipe) | {"distributed_type": kind}
    if file.get("fp8_config"):
        meaning.mistakes.append(("fp8_config", "products in float8 are not offered; remove it"))
    for name, table in SECTIONS.items():
        section = file.get(name)
        if not isinstance(section, dict):
            if section is not None:
                meaning.mistakes.append((name, "is not a section; write its keys below it"))
            continue
        if section and table.read_under not in ("", kind):
            text = f"has no effect under distributed_type: {kind}; remove it, or set {table.read_under} there"
            meaning.mistakes.append((name, text))
            continue
        settings = _read_keys(meaning, f"{name}.", section, table, recipe)
        # An empty parallelism_config asks for HSDP. If all its sizes are 1, it asks for nothing.
        if settings or (section == {} and name == "parallelism_config" and kind == "FSDP"):
            meaning.settings[name] = settings

    # Keys that depend on each other; and paths without their offload are dropped.
    if kind in _REQUIRED:
        name, key = _REQUIRED[kind]
        section = file.get(name)
        spellings = (key, key.removeprefix(SECTIONS[name].prefix))
        if not isinstance(section, dict) or all(section.get(spelling) is None for spelling in spellings):
            meaning.mistakes.append((f"{name}.{key}", "is missing; add it"))
        elif kind == "DEEPSPEED" and key in meaning.settings.get(name, {}):
            mistakes = engine_mistakes(meaning.settings.get(name, {}))
            meaning.mistakes += [(f"{name}.{engine_key}", problem) for engine_key, problem in mistakes]
    if zero := meaning.settings.get("deepspeed_config"):
        for what in ("optimizer", "param"):
            if zero.get(f"offload_{what}_device") != "nvme":  # the path has no effect
                zero.pop(f"offload_{what}_nvme_path", None)
    mesh, ranks = meaning.settings.get("parallelism_config", {}), meaning.settings.get("num_processes")
    shards = mesh.get("parallelism_config_dp_shard_size")
    copies = mesh.get("parallelism_config_dp_replicate_size") or 1
    if shards is not None and ranks is not None and shards * copies != ranks:  # 2 copies x 4 shards are 8 ranks
        place = "parallelism_config.parallelism_config_dp_shard_size"
        text = f"{shards}: {copies} x {shards} ranks are not num_processes: {ranks}; remove the line"
        meaning.mistakes.append((place, text))
    return meaning


def _read_keys(
    meaning: Meaning, prefix: str, section: Mapping[str, Any], table: _Table, recipe: Recipe | None
) -> dict[str, Any]:
    """The settings that a section's keys change. Mistakes and notes are added to `found`."""
    settings: dict[str, Any] = {}
    for written, raw in section.items():
        name = written if written in table.keys else f"{table.prefix}{written}"
        key, place = table.keys.get(name), f"{prefix}{written}"
        if key is None:
            candidates = [*table.keys] if prefix else [*table.keys, *SECTIONS]
            near = difflib.get_close_matches(str(written), candidates, n=1)
            remedy = f"did you mean {near[0]}?" if near else "remove it"
            meaning.mistakes.append((place, f"has no effect here; {OTHER_PLACES.get(written) or remedy}"))
            continue
        if name not in ENGINE_KEYS and (raw in (None, "", [], {}) or str(raw).lower() == "none"):
            continue  # no value: the default holds
        value = key.read(raw)
        if value is UNREADABLE or (key.works and value not in key.works):
            choices = ", ".join(sorted(yaml.safe_dump(choice).split("\n")[0] for choice in key.works))
            problem = key.remedy or f"one of {choices} works here; set it"
            if isinstance(value, str):
                problem = _OTHER_SHARDING.get(value, problem)
            meaning.mistakes.append((place, f"{shorten(repr(raw), 60)}: {problem}"))
        elif key.owner is not None:
            _compare_with_owner(meaning, place, raw, key, value, recipe)
        elif not key.drops and (key.keeps or value != key.same):
            settings[name] = value
    return settings


def _compare_with_owner(
    meaning: Meaning, place: str, raw: Any, key: AccelerateKey, value: Any, recipe: Recipe | None
) -> None:
    """The recipe's value wins. The file may repeat the value, or write Accelerate's default."""
    assert key.owner is not None
    own_value = None if recipe is None else key.owner(recipe)
    if value == key.same:
        if key.owner_key == "training.mixed_precision" and own_value not in (None, value):
            meaning.notes.append(f"accelerate_config: {place}: {raw!r} changes nothing: {key.owner_key} is {own_value}")
        return
    if recipe is None:
        meaning.mistakes.append((place, f"{raw!r}: the recipe owns it: {key.owner_key}; remove the line"))
    elif own_value != value:
        written = value or "null"  # no clipping is 0 in Accelerate's file and null in a recipe
        if value is True:
            written = "true"
        text = f"the recipe owns it: {key.owner_key} is {own_value}; remove the line, or set {key.owner_key}={written}"
        meaning.mistakes.append((place, f"{raw!r}: {text}"))
