"""A strategy as an Accelerate config file states it, read strictly: a misspelt key is an error.

Accelerate itself ignores unknown keys inside `fsdp_config` and `deepspeed_config`, and several that it knows have no
effect under FSDP2. So a key that has no effect here is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from finetune.errors import RecipeError
from finetune.output_stream import printable
from finetune.paths import CHECKOUT, read_regular
from finetune.recipe.sections.engine_keys import ENGINE_KEYS, OTHER_PLACES, Where, engine_mistakes, engine_settings
from finetune.recipe.sections.pipelines import Pipelines, pipelines_named
from finetune.recipe.yaml_text import MAX_BYTES, parse, shorten, yaml_value
from finetune.wording import first_lines

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe

CONFIG_FOLDER = CHECKOUT / "accelerate_configs"

Kind = Literal["single", "ddp", "fsdp", "deepspeed", "pipeline"]
KIND_OF_TYPE: dict[str, Kind] = {"NO": "single", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}

# The keys that a file may have, by section; where a set is given, the value must be in it.
# `accelerate config` writes some that say what is so anyway; they may stay.
_LAUNCH_KEYS = (
    "compute_environment distributed_type num_processes num_machines machine_rank main_process_ip main_process_port "
    "main_training_function gpu_ids rdzv_backend same_network enable_cpu_affinity use_cpu debug fsdp_config "
    "deepspeed_config parallelism_config"
).split()
ANY: frozenset[Any] = frozenset()
_TOP: dict[str, frozenset[Any]] = dict.fromkeys(_LAUNCH_KEYS, ANY) | {
    "mixed_precision": frozenset({None}),
    "dynamo_backend": frozenset({"no", "NO", False}),
    "downcast_bf16": frozenset({"no", False}),
    "tpu_env": ANY,
    "tpu_use_cluster": frozenset({False}),
    "tpu_use_sudo": frozenset({False}),
}
_BOOLEAN = frozenset({True, False})
_FSDP: dict[str, frozenset[Any]] = {
    "fsdp_version": frozenset({2}),
    "fsdp_reshard_after_forward": _BOOLEAN,
    "fsdp_offload_params": _BOOLEAN,
    "fsdp_cpu_ram_efficient_loading": frozenset({True}),
    "fsdp_auto_wrap_policy": frozenset({"TRANSFORMER_BASED_WRAP"}),
    "fsdp_state_dict_type": frozenset({"SHARDED_STATE_DICT"}),
    "fsdp_activation_checkpointing": frozenset({False}),
}
_ZERO: dict[str, frozenset[Any]] = {
    "zero_stage": frozenset({1, 2, 3}),
    "offload_optimizer_device": frozenset({"none", "cpu", "nvme"}),
    "offload_param_device": frozenset({"none", "cpu", "nvme"}),
    "offload_optimizer_nvme_path": ANY,
    "offload_param_nvme_path": ANY,
    "zero3_init_flag": _BOOLEAN,
    "zero3_save_16bit_model": frozenset({False}),
    "gradient_accumulation_steps": frozenset({1}),
    "deepspeed_multinode_launcher": frozenset({"standard"}),
} | dict.fromkeys(ENGINE_KEYS, ANY)
_MESH: dict[str, frozenset[Any]] = {"parallelism_config_dp_replicate_size": ANY}
_SECTIONS = {"fsdp_config": _FSDP, "deepspeed_config": _ZERO, "parallelism_config": _MESH}
_REQUIRED = {"fsdp": ("fsdp_config", "fsdp_version"), "deepspeed": ("deepspeed_config", "zero_stage")}
_REASONS = {  # why a value is refused, where the key alone does not show it
    "mixed_precision": "the recipe owns it: training.mixed_precision; remove the line",
    "fsdp_version": "this kit shards by FSDP2; set fsdp_version: 2",
    "fsdp_activation_checkpointing": "the recipe owns it: training.activation_checkpointing; set false",
    "gradient_accumulation_steps": "the recipe owns it: training.global_batch_size; remove the line",
}


@dataclass(frozen=True)
class Strategy:
    """A strategy as an Accelerate config file states it, and what follows from it.

    Whoever depends on the strategy asks one of these properties. `kind` itself is for those who build an Accelerator
    and a model by it (strategies/accelerator.py, assemble.py), so that a new kind answers here and is built there.
    """

    name: str
    path: Path
    kind: Kind
    only_where: bool  # says where to run (two CPU ranks), not how: agrees with any strategy
    num_processes: int | None
    settings: dict[str, Any]

    @property
    def pipelines(self) -> Pipelines | None:
        """The schedule, and how many pipelines train beside each other; None: there is none."""
        return pipelines_named(self.name) if self.kind == "pipeline" else None

    @property
    def schedule(self) -> str | None:
        """In what order a pipeline computes micro-batches, one of SCHEDULES; None: there is no pipeline."""
        return self.pipelines and self.pipelines.schedule

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's stage; 0 under other strategies."""
        return int(self.section("deepspeed_config").get("zero_stage", 0))

    @property
    def distributed(self) -> bool:
        """Whether ranks of a process group train together; else one process trains alone."""
        return self.kind != "single"

    @property
    def needs_ranks(self) -> bool:
        """Whether one rank is too few: offload to host memory or disk is of use to a single GPU too."""
        return self.distributed and not self.offloaded

    @property
    def uses_engine(self) -> bool:
        """Whether DeepSpeed's engine runs backward and the update, with float32 masters and weights in one dtype."""
        return self.kind == "deepspeed"

    @property
    def shards_modules(self) -> bool:
        """Whether parameters are DTensors over a mesh of ranks, sharded by rows, which the optimizer sees too."""
        return self.kind == "fsdp"

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank holds only a shard of the weights: reading a full tensor needs every rank."""
        return self.shards_modules or self.zero_stage == 3

    @property
    def shards_optimizer_state(self) -> bool:
        """Whether a rank updates only a shard of the trained weights, and holds the state of that."""
        return self.shards_modules or self.uses_engine

    def casts_weights_once(self, recipe: Recipe) -> bool:
        """Whether each rank has all weights in float32, trains them, and computes with 16-bit copies that are made once
        an optimizer step."""
        training = recipe.training
        in_16_bits = training.mixed_precision != "no" and not training.pure_bf16
        return in_16_bits and recipe.lora is None and not (self.shards_modules or self.uses_engine)

    @property
    def reduces_in_float32(self) -> bool:
        """Whether gradients are summed over the ranks in float32, whatever the number format of the weights."""
        return self.shards_modules or self.uses_engine

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced in the last micro-step of an optimizer step alone, not in each."""
        return self.gradient_buckets or self.zero_stage == 1 or self.schedule is not None

    @property
    def gathers_once(self) -> bool:
        """Whether weights stay gathered from the first micro-step of an optimizer step to its last backward."""
        return self.shards_modules and not self.reshard_after_forward

    @property
    def gradient_buckets(self) -> bool:
        """Whether gradients are views of DDP's buckets, which are allocated from the beginning to the end."""
        return self.kind == "ddp"

    @property
    def layers_repeat(self) -> bool:
        """Whether each layer gathers and frees what the one before it did; ZeRO-3 prefetches across layers."""
        return self.zero_stage != 3

    @property
    def offload_devices(self) -> dict[str, str]:
        """DeepSpeed: `optimizer` and `param` -> none, cpu or nvme."""
        section = self.section("deepspeed_config")
        return {what: section.get(f"offload_{what}_device") or "none" for what in ("optimizer", "param")}

    @property
    def engine_settings(self) -> dict[Where, dict[str, Any]]:
        """DeepSpeed's own keys that the file sets, in DeepSpeed's sections."""
        return engine_settings(self.section("deepspeed_config"))

    @property
    def offloaded(self) -> bool:
        """Whether weights or optimizer state live in host memory or on disk."""
        by_fsdp = bool(self.section("fsdp_config").get("fsdp_offload_params"))
        return by_fsdp or any(device != "none" for device in self.offload_devices.values())

    @property
    def reshard_after_forward(self) -> bool:
        """FSDP2: free gathered weights after forward and gather them again in backward."""
        return bool(self.section("fsdp_config").get("fsdp_reshard_after_forward", True))

    @property
    def replicates(self) -> bool:
        """HSDP: whether there are several copies of the sharded model, whose gradients are reduced over the copies."""
        return "parallelism_config" in self.settings

    def rank_count(self, processes: int) -> int:
        """Ranks where `processes` could run."""
        return processes if self.distributed else 1

    def stage_count(self, ranks: int) -> int:
        """Stages that share the decoder layers: under a pipeline each of `ranks`, or of its copy's."""
        return max(1, ranks // self.pipelines.copies) if self.pipelines else 1

    def data_rank_count(self, ranks: int) -> int:
        """How many of `ranks` have rows of their own: the stages of a pipeline compute the same rows."""
        return ranks // self.stage_count(ranks)

    def replica_count(self, ranks: int, per_node: int) -> int:
        """Copies of the sharded model, or 1; as many as nodes of `per_node` ranks unless the file sets a number."""
        if not self.replicates:
            return 1
        return int(self.section("parallelism_config").get("parallelism_config_dp_replicate_size") or ranks // per_node)

    def can_replicate(self, ranks: int, per_node: int) -> bool:
        """Whether HSDP makes two or more copies, each sharded over the same number of ranks, two or more."""
        copies = self.replica_count(ranks, per_node)
        return copies > 1 and ranks % copies == 0 and ranks > copies

    def plugin_settings(self) -> dict[str, Any]:
        """The settings that decide how the weights are distributed: `section.key` -> value."""
        named = {"the schedule, its name": self.name} if self.schedule else {}
        return named | {f"{name}.{key}": value for name in _SECTIONS for key, value in self.section(name).items()}

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the file, as `fsdp_config`; empty where the file has none."""
        return self.settings.get(name) or {}


def read_strategy(name_or_path: str, *, strict: bool = True) -> Strategy:
    """Read a file of accelerate_configs/ by name, or any Accelerate config by path.

    Raises RecipeError naming the file and, when strict, every key that is unknown or has no effect here.
    """
    path = CONFIG_FOLDER / f"{name_or_path}.yaml"
    if not path.is_file():
        path = Path(name_or_path)
    try:
        settings = yaml_value(text := read_regular(path, MAX_BYTES).decode("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError([f"accelerate_config: {path}: cannot be read: {reason}; name an existing file"]) from error
    kind = KIND_OF_TYPE.get(str(settings.get("distributed_type", "NO")) if isinstance(settings, dict) else "")
    if kind is None:
        known = ", ".join(KIND_OF_TYPE)
        raise RecipeError([f"accelerate_config: {path}: distributed_type is not one of {known}; correct that file"])
    if kind == "ddp" and pipelines_named(path.stem):
        kind = "pipeline"
    if mistakes := list(_mistakes(settings, kind)) if strict else []:
        lines = {".".join(map(str, key)): f":{place.line}" for key, place in parse(text).keys.items()}
        named = [(f"{path}{lines.get(key, '')}: {printable(shorten(key, 100))}", problem) for key, problem in mistakes]
        raise RecipeError(first_lines([f"accelerate_config: {place}: {problem}" for place, problem in named], 20))
    return Strategy(
        name=path.stem,
        path=path,
        kind=kind,
        only_where=bool(settings.get("use_cpu")),
        num_processes=settings.get("num_processes"),
        settings=settings,
    )


def _mistakes(settings: Mapping[str, Any], kind: Kind) -> Iterator[tuple[str, str]]:
    """Each key that is wrong, from the top, and what is wrong with it."""
    yield from _in_section("", settings, _TOP)
    for name, allowed in _SECTIONS.items():
        section = settings.get(name)
        if isinstance(section, dict):
            yield from _in_section(f"{name}.", section, allowed)
        elif section is not None and section != {}:
            yield name, "is not a section; write its keys below it"
    if kind in _REQUIRED:
        section, key = _REQUIRED[kind]
        if not isinstance(settings.get(section), dict) or key not in settings[section]:
            yield f"{section}.{key}", "is missing; add it"
        elif kind == "deepspeed":
            yield from ((f"{section}.{wrong}", problem) for wrong, problem in engine_mistakes(settings[section]))


def _in_section(
    prefix: str, section: Mapping[str, Any], allowed: Mapping[str, frozenset[Any]]
) -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        values = allowed.get(key)
        if values is None:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            remedy = OTHER_PLACES.get(key) or (f"did you mean {near[0]}?" if near else "remove it")
            yield f"{prefix}{key}", f"has no effect here; {remedy}"
        elif values and (isinstance(value, (dict, list)) or value not in values):
            yield (
                f"{prefix}{key}",
                f"{shorten(repr(value), 60)}: " + (_REASONS.get(key) or f"one of {_listed(values)} works here; set it"),
            )


def _listed(values: frozenset[Any]) -> str:
    return ", ".join(sorted(yaml.safe_dump(value).split("\n")[0] for value in values))
