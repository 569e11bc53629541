"""A strategy, read strictly from an Accelerate config file: a misspelt key is an error.

Accelerate itself ignores unknown keys inside `fsdp_config` and `deepspeed_config`, and several keys that it knows have
no effect under FSDP2. So a key without effect here is refused, unless it repeats the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from finetune.errors import RecipeError
from finetune.output_stream import printable
from finetune.paths import SHIPPED, read_regular
from finetune.recipe.accelerate_file import meaning_of, type_of
from finetune.recipe.sections.engine_keys import ENGINE_KEYS, Where, engine_notes, engine_settings
from finetune.recipe.sections.pipelines import Pipelines, pipelines_named
from finetune.recipe.yaml_text import MAX_BYTES, parse, shorten, yaml_value
from finetune.wording import first_lines

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe

CONFIG_FOLDER = SHIPPED / "accelerate_configs"

Kind = Literal["single", "ddp", "fsdp", "deepspeed", "pipeline"]
KIND_OF_TYPE: dict[str, Kind] = {"NO": "single", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}
_OTHER_TYPES = {"MULTI_CPU": "for ranks on a CPU write distributed_type: MULTI_GPU and use_cpu: true"}


@dataclass(frozen=True)
class Strategy:
    """A strategy from an Accelerate config file, and its consequences.

    Code that depends on the strategy asks one of these properties. Only the code that builds an Accelerator and a model
    reads `kind` itself (strategies/accelerator.py, assemble.py). So a new kind answers here and is built there.
    """

    name: str
    path: Path
    kind: Kind
    only_where: bool  # says where to run (two CPU ranks), not how, so it agrees with any strategy
    num_processes: int | None
    settings: dict[str, Any]  # the decisive settings, by Accelerate's names: recipe/accelerate_file.py
    notes: tuple[str, ...] = ()  # settings in the file that the recipe overrules, or that change nothing
    # FSDP2: unsharded gradients stay until a step's last micro-batch, which reduces them. A run or a plan decides it
    # (closed_form/recomputation.py), no file does.
    keeps_gradients: bool = False

    @property
    def pipelines(self) -> Pipelines | None:
        """The schedule, and the number of pipelines that train side by side; None: no pipeline."""
        if self.kind != "pipeline":
            return None
        return pipelines_named(self.name)

    @property
    def schedule(self) -> str | None:
        """The order in which a pipeline computes micro-batches, one of SCHEDULES; None: no pipeline."""
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
        """Whether one rank is too few. Offload to host memory or disk helps a single GPU too."""
        return self.distributed and not self.offloaded

    @property
    def uses_engine(self) -> bool:
        """Whether DeepSpeed's engine runs backward and the update, with float32 masters and weights in one dtype."""
        return self.kind == "deepspeed"

    @property
    def shards_modules(self) -> bool:
        """Whether parameters are DTensors over a mesh of ranks, sharded by rows, for the optimizer too."""
        return self.kind == "fsdp"

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank holds only a shard of the weights: reading a full tensor needs every rank."""
        return self.shards_modules or self.zero_stage == 3

    @property
    def shards_optimizer_state(self) -> bool:
        """Whether a rank updates only a shard of the trained weights, and holds only that shard's state."""
        return self.shards_modules or self.uses_engine

    def casts_weights_once(self, recipe: Recipe) -> bool:
        """Whether each rank trains all weights in float32, and computes with 16-bit copies.

        Each optimizer step makes the copies once.
        """
        training = recipe.training
        in_16_bits = training.mixed_precision != "no" and not training.pure_bf16
        return in_16_bits and recipe.lora is None and not (self.shards_modules or self.uses_engine)

    @property
    def reduces_in_float32(self) -> bool:
        """Whether ranks sum gradients in float32, whatever the weights' number format."""
        return self.shards_modules or self.uses_engine

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced once an optimizer step, in its last micro-step."""
        return self.gradient_buckets or self.zero_stage == 1 or self.schedule is not None or self.keeps_gradients

    @property
    def gathers_once(self) -> bool:
        """Whether weights stay gathered from an optimizer step's first micro-step to its last backward."""
        return self.shards_modules and not self.reshard_after_forward

    @property
    def gradient_buckets(self) -> bool:
        """Whether gradients are views into DDP's buckets, which stay allocated for the whole run."""
        return self.kind == "ddp"

    @property
    def layers_repeat(self) -> bool:
        """Whether every layer gathers and frees alike. ZeRO-3 does not, because it prefetches across layers."""
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
    def unit_class(self) -> str | None:
        """FSDP2: the decoder layer class that the file names as unit; None: the model's own."""
        name = self.section("fsdp_config").get("fsdp_transformer_layer_cls_to_wrap")
        return None if name is None else str(name)

    @property
    def replicates(self) -> bool:
        """HSDP: whether there are several copies of the sharded model, which reduce their gradients together."""
        mesh = self.settings.get("parallelism_config")
        if not self.shards_modules or mesh is None:
            return False
        return mesh == {} or "parallelism_config_dp_replicate_size" in mesh  # empty: one copy on each node

    def rank_count(self, processes: int) -> int:
        """How many ranks train if `processes` could run."""
        return processes if self.distributed else 1

    def stage_count(self, ranks: int) -> int:
        """The number of stages that share the decoder layers; 1 without a pipeline."""
        if self.pipelines is None:
            return 1
        return max(1, ranks // self.pipelines.copies)  # 8 ranks under 1f1b_ddp2: 4 stages

    def data_rank_count(self, ranks: int) -> int:
        """How many of `ranks` have their own rows. A pipeline's stages compute the same rows."""
        return ranks // self.stage_count(ranks)

    def replica_count(self, ranks: int, per_node: int) -> int:
        """Copies of the sharded model, or 1.

        The file may set their number. Else each node, with `per_node` ranks, has one copy.
        """
        if not self.replicates:
            return 1
        # 16 ranks on nodes with 8: two copies, each over one node's 8 ranks.
        return int(self.section("parallelism_config").get("parallelism_config_dp_replicate_size") or ranks // per_node)

    def can_replicate(self, ranks: int, per_node: int) -> bool:
        """Whether HSDP makes two or more copies, each sharded over equally many ranks, two or more."""
        copies = self.replica_count(ranks, per_node)
        return copies > 1 and ranks % copies == 0 and ranks > copies

    def plugin_settings(self, ranks: int, per_node: int) -> dict[str, Any]:
        """The settings that decide how the weights are distributed: `section.key` -> value, defaults filled in."""
        if self.schedule:
            return {"the schedule, its name": self.name}
        if self.shards_modules:
            return {
                "fsdp_config.fsdp_reshard_after_forward": self.reshard_after_forward,
                "fsdp_config.fsdp_offload_params": self.offloaded,
                "parallelism_config.parallelism_config_dp_replicate_size": self.replica_count(ranks, per_node),
            }
        if not self.uses_engine:
            return {}
        section = self.section("deepspeed_config")
        settings: dict[str, Any] = {"zero_stage": self.zero_stage}
        settings |= {f"offload_{what}_device": device for what, device in self.offload_devices.items()}
        settings |= {key: value for key, value in section.items() if key.endswith("_nvme_path")}
        settings |= {name: key.read(section[name]) for name, key in ENGINE_KEYS.items() if name in section}
        return {f"deepspeed_config.{key}": value for key, value in settings.items()}

    def section(self, name: str) -> Mapping[str, Any]:
        """The file's section with this name, such as `fsdp_config`; empty if it has none."""
        return self.settings.get(name) or {}


def read_strategy(
    name_or_path: str, *, recipe: Recipe | None = None, strict: bool = True, named_by: str = "accelerate_config"
) -> Strategy:
    """Read an Accelerate config: by its name in accelerate_configs/, or by path.

    Raises RecipeError that names the file and, if strict, every key that is unknown, has no effect here or contradicts
    the recipe.

    Args:
        recipe: With a recipe, the file may repeat settings that the recipe decides.
        named_by: The key or option that names the file, for mistakes.
    """
    path = CONFIG_FOLDER / f"{name_or_path}.yaml"
    if not path.is_file():
        path = Path(name_or_path)
    try:
        settings = yaml_value(text := read_regular(path, MAX_BYTES).decode("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError([f"{named_by}: {path}: cannot be read: {reason}; name an existing file"]) from error
    distributed_type = type_of(settings) if isinstance(settings, dict) else ""
    kind = KIND_OF_TYPE.get(distributed_type)
    if kind is None:
        remedy = _OTHER_TYPES.get(distributed_type, "correct that file")
        known = ", ".join(KIND_OF_TYPE)
        raise RecipeError([f"{named_by}: {path}: distributed_type is not one of {known}; {remedy}"])
    if kind == "ddp" and pipelines_named(path.stem):  # a pipeline's file is a DDP file with a pipeline's name
        kind = "pipeline"
    meaning = meaning_of(settings, recipe)
    if strict and meaning.mistakes:
        line_numbers = {".".join(map(str, key)): f":{place.line}" for key, place in parse(text).keys.items()}
        messages = []
        for key, problem in meaning.mistakes:
            place = f"{path}{line_numbers.get(key, '')}: {printable(shorten(key, 100))}"
            messages.append(f"{named_by}: {place}: {problem}")
        raise RecipeError(first_lines(messages, 20), count=len(messages))
    notes = [*meaning.notes]
    if recipe is not None:
        notes += engine_notes(meaning.settings.get("deepspeed_config") or {}, recipe.training.mixed_precision)
    return Strategy(
        name=path.stem,
        path=path,
        kind=kind,
        # A file for a CPU without sharding says where to run. Any other file says how.
        only_where=bool(meaning.settings.get("use_cpu")) and kind in ("single", "ddp"),
        num_processes=meaning.settings.get("num_processes"),
        settings=meaning.settings,
        notes=tuple(notes),
    )


def strategy_of(recipe: Recipe) -> Strategy:
    """The recipe's strategy. Raises RecipeError as `read_strategy` does."""
    return read_strategy(recipe.accelerate_config, recipe=recipe)
