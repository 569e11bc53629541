"""The half of `refuse` that a recipe decides on any machine: settings and ranks that its strategy cannot train.

For such a setting `check`, `launch` and `plan` refuse the recipe, training refuses the run, and `import` writes a value
that can run. strategies/machine.py has the other half. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.errors import EnvironmentMismatch, RecipeError
from finetune.paths import from_here
from finetune.recipe.optimizers import DEFAULT, OPTIMIZERS, for_shards
from finetune.recipe.sections.pipelines import can_interleave
from finetune.recipe.strategy import CONFIG_FOLDER, Strategy, strategy_of
from finetune.redaction import known_secrets, secret_key
from finetune.wording import counted

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe

NO_FLOAT8 = "model.load_in_fp8: float8 begins with compute capability 8.9 (Ada, Hopper), {card}; set it to false"
_COMPUTE = {"bf16": "bfloat16", "fp16": "float16"}  # mixed_precision -> the weights' format under DeepSpeed


@dataclass(frozen=True)
class Unfit:
    """A setting that the strategy cannot train with, and values (recipe key -> value) that it can train with."""

    key: str
    problem: str
    remedy: str
    instead: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}; {self.remedy}"


def refuse_recipe(recipe: Recipe) -> Strategy:
    """The recipe's strategy, which can train its settings.

    Raises RecipeError with each mistake in the strategy's file, and EnvironmentMismatch for the first unfit setting.
    """
    strategy = strategy_of(recipe)
    for misfit in unfit(recipe, strategy):
        raise EnvironmentMismatch(str(misfit))
    return strategy


def refuse_secrets(recipe: Recipe) -> None:
    """Raise RecipeError for a token: a job or the run folder would keep it, and a push would publish it."""
    # Secret environment variables count only before an upload: they may hold a plain word that the recipe needs.
    known = known_secrets() if recipe.hub.push or recipe.storage else ()
    if secret := secret_key(recipe.model_dump(mode="json"), known):
        raise RecipeError([f"{secret[0]}: holds {secret[1]}; remove it, and revoke it if it was ever shown"])


def unfit(recipe: Recipe, strategy: Strategy) -> Iterator[Unfit]:
    """The recipe's settings that this strategy cannot train with; none if it can train the recipe."""
    optimizer = recipe.training.optim
    if strategy.uses_engine:
        yield from _under_engine(recipe, strategy)
    elif strategy.shards_optimizer_state and not OPTIMIZERS[optimizer].works_on_shards:
        instead = for_shards(optimizer)
        remedy = f"set training.optim={instead}, whose state is sharded too, or accelerate_config=ddp"
        problem = f"{optimizer} updates full tensors, this strategy has shards"
        yield Unfit("training.optim", problem, remedy, {"training.optim": instead})
    if recipe.model.load_in_fp8 and strategy.kind not in ("single", "ddp"):
        problem = f"{strategy.name} spreads weights, and no strategy but single and ddp knows those in float8"
        remedy = "set it to false, or accelerate_config=ddp"
        yield Unfit("model.load_in_fp8", problem, remedy, {"model.load_in_fp8": False})
    if recipe.training.mlp_tile_tokens is not None and strategy.shards_parameters and not strategy.shards_modules:
        problem = f"{strategy.name} gathers weights inside the MLP, once for each tile"
        remedy = "leave it out, or take accelerate_config=fsdp2"
        yield Unfit("training.mlp_tile_tokens", problem, remedy, {"training.mlp_tile_tokens": None})
    if strategy.shards_modules:
        yield from _sharded_quantization(recipe)
    if strategy.schedule is not None:
        yield from _under_pipeline(recipe, strategy)
    if recipe.training.activation_offloading and recipe.training.activation_checkpointing not in (True, "auto"):
        key, offloading = "training.activation_checkpointing", "training.activation_offloading"
        problem = f"layers that keep more than their input would keep it on the GPU, and {offloading} is true"
        yield Unfit(key, problem, f"set it to true, or {offloading}: false", {key: True})
    if recipe.training.compile is True and (reason := not_compiled(recipe, strategy)):
        problem, remedy = f"true: {reason}", "set training.compile: false"
        yield Unfit("training.compile", problem, remedy, {"training.compile": False})


def _under_engine(recipe: Recipe, strategy: Strategy) -> Iterator[Unfit]:
    """Settings that DeepSpeed would refuse with a traceback, or compute in another number format."""
    training, name = recipe.training, f"accelerate_config: {strategy.name}"
    number_format, precision = training.mixed_precision, "training.mixed_precision"
    if training.optim != DEFAULT:  # strategies/zero_state.py knows only this optimizer's state
        problem = f"{training.optim}: ZeRO shards state by elements, not by blocks"
        yield Unfit("training.optim", problem, f"set {DEFAULT}", {"training.optim": DEFAULT})
    if training.pure_bf16 and strategy.offloaded:
        problem, remedy = f"{name} keeps float32 state in host memory", "set training.pure_bf16=false"
        yield Unfit("training.pure_bf16", problem, remedy, {"training.pure_bf16": False})
    if recipe.model.new_tokens and recipe.lora is not None and strategy.shards_parameters:
        # peft 0.21 takes the rows out of sharded embeddings with a collective that only CUDA has
        # (TrainableTokensLayer). No test of ours has seen it run.
        key = "model.add_tokens" if recipe.model.add_tokens else "model.add_special_tokens"
        problem = f"peft does not train new rows under {strategy.name}, which shards embeddings"
        remedy = "set accelerate_config: fsdp2, or train all weights (lora: null)"
        yield Unfit(key, problem, remedy, {"accelerate_config": "fsdp2"})
    section = recipe.preferences
    if section is not None and section.needs_reference and section.reference not in ("start", "adapter_off"):
        key = f"{training.objective}.reference"
        problem, remedy = f"{section.reference}: the engine holds one model", "set start, or accelerate_config: fsdp2"
        yield Unfit(key, problem, remedy, {"accelerate_config": "fsdp2"})
    if number_format == "no" and recipe.lora and recipe.model.dtype != "float32":
        problem, remedy = "no: the engine has one number format", "set bf16, or model.dtype: float32"
        yield Unfit(precision, problem, remedy, {"model.dtype": "float32"})
    if recipe.quantization is None:
        return
    if number_format == "no":
        problem = "no: the engine takes no quantised weights beside float32"
        yield Unfit(precision, problem, "set bf16", {precision: "bf16"})
    if recipe.quantization.load_in_8bit and strategy.shards_parameters:
        problem, remedy = f"{strategy.name} cannot cut int8 weights", "set accelerate_config=zero2"
        yield Unfit("quantization.load_in_8bit", problem, remedy, {"accelerate_config": "zero2"})
    compute_dtype, storage = _COMPUTE.get(number_format), "quantization.bnb_4bit_quant_storage"
    sharded = recipe.quantization.load_in_4bit and strategy.shards_parameters
    if sharded and compute_dtype and recipe.quantization.bnb_4bit_quant_storage != compute_dtype:
        problem = "weights are sharded in the dtype of the computation"
        yield Unfit(storage, problem, f"set {compute_dtype}", {storage: compute_dtype})
    if sharded and recipe.lora is not None and recipe.lora.use_dora:
        yield DORA_IN_4_BITS


DORA_IN_4_BITS = Unfit(
    "lora.use_dora",
    "DoRA reads a layer's 4-bit weights, and this strategy has them only in the layer's forward",
    "set it to false, or accelerate_config=ddp",
    {"accelerate_config": "ddp"},
)


def _sharded_quantization(recipe: Recipe) -> Iterator[Unfit]:
    """Quantised weights that FSDP cannot shard over ranks.

    Packed bytes are stored in a tensor with a floating-point dtype. Under mixed precision an engine converts every
    floating-point weight that is not in the compute dtype, so it would treat packed bytes as numbers (seen with FSDP2
    and float32).
    """
    quantization = recipe.quantization
    if quantization is None:
        return
    if quantization.load_in_8bit:
        problem = "int8 layers keep their weights outside of the parameters that a sharded strategy cuts"
        remedy = "set load_in_4bit, or accelerate_config=ddp"
        yield Unfit("quantization.load_in_8bit", problem, remedy, {"accelerate_config": "ddp"})
        return
    if recipe.lora is not None and recipe.lora.use_dora:
        yield DORA_IN_4_BITS
        return
    storage, compute = quantization.bnb_4bit_quant_storage, quantization.bnb_4bit_compute_dtype
    if storage != compute:
        key = "quantization.bnb_4bit_quant_storage"
        problem = f"{storage}, but a sharded strategy moves weights in the compute dtype, {compute}"
        yield Unfit(key, problem, f"set {key}={compute}", {key: compute})


def _under_pipeline(recipe: Recipe, strategy: Strategy) -> Iterator[Unfit]:
    """Settings that no pipeline stage supports yet."""
    name, precision = strategy.name, "training.mixed_precision"
    if recipe.quantization is not None and not recipe.quantization.load_in_4bit:
        problem, remedy = f"{name} does not split int8 weights yet", "set load_in_4bit, or take ddp"
        yield Unfit("quantization.load_in_8bit", problem, remedy, {"accelerate_config": "ddp"})
    if recipe.quantization is not None and recipe.lora is not None and recipe.lora.use_dora:
        yield DORA_IN_4_BITS
    if recipe.training.mixed_precision == "fp16":
        problem = f"the stages of {name} do not agree on fp16's loss scale"
        yield Unfit(precision, problem, "set bf16", {precision: "bf16"})
    if recipe.model.attention not in ("auto", "varlen"):
        problem = f"{name} sends rows of one length between stages, flat ones"
        yield Unfit("model.attention", problem, "set model.attention: auto", {"model.attention": "auto"})
    if recipe.preferences is not None:
        problem = f"{recipe.training.objective}: the last stage of {name} has a loss for supervised tokens alone"
        remedy = "take accelerate_config=fsdp2"
        yield Unfit("training.objective", problem, remedy, {"accelerate_config": "fsdp2"})
    if recipe.training.activation_offloading:
        key, problem = "training.activation_offloading", f"is not tried with {name}'s order of micro-batches"
        yield Unfit(key, problem, "set it to false, or take fsdp2", {key: False})
    if recipe.model.new_tokens:
        problem, remedy = f"{name} does not train rows of new tokens yet", "take accelerate_config=fsdp2"
        yield Unfit("model.add_tokens", problem, remedy, {"accelerate_config": "fsdp2"})


def pages_problem(recipe: Recipe) -> str:
    """The reason, with a remedy, why a CPU cannot hold the optimizer's state in pages; empty if it has none.

    Pages are CUDA's managed memory: on a CPU bitsandbytes would take its plain classes, with one warning.
    """
    name = recipe.training.optim
    if not OPTIMIZERS[name].paged:
        return ""
    return (
        f"training.optim: {name} pages its state between GPU and host, a CPU has no such pages; "
        f"set training.optim={OPTIMIZERS[name].unpaged}"
    )


def ranks_problem(recipe: Recipe, strategy: Strategy, ranks: int, per_node: int, machines: str = "") -> str | None:
    """The reason, with a remedy, why so many ranks cannot train the recipe; None if they can.

    Args:
        machines: In words, for `launch` and `plan`, which are given them. Empty: each rank asks for its own launch.
    """
    place, started = f"accelerate_config: {strategy.name}", f"{machines} are" if machines else "the launcher started"
    if not strategy.distributed and ranks > 1:
        return f"{place} runs one process, {started} {ranks}; set accelerate_config=ddp, or start one process"
    if strategy.needs_ranks and ranks == 1:
        more = "take more GPUs"
        if not machines:
            processes = max(2, recipe.budget.gpus * recipe.budget.nodes)
            more = (
                f"start it by `finetune train`, or by `accelerate launch --multi_gpu --num_processes {processes}`, on "
                f"a CPU with `--config_file {from_here(CONFIG_FOLDER / 'cpu_2proc.yaml')}`"
            )
        return f"{place} runs on several processes, {started} one; {more}, or set accelerate_config=single"
    copies = strategy.replica_count(ranks, per_node)
    machines = machines or counted(ranks, "process", "processes")
    if strategy.replicates and not strategy.can_replicate(ranks, per_node):
        return (
            f"{place} shards within a node and repeats between nodes, {machines} make "
            f"{counted(copies, 'such copy', 'such copies')}; take "
            "several nodes of several GPUs, set parallelism_config_dp_replicate_size, or take accelerate_config=fsdp2"
        )
    shards = strategy.section("parallelism_config").get("parallelism_config_dp_shard_size")
    if shards is not None and shards * copies != ranks:
        return (
            f"accelerate_config: {strategy.path}: parallelism_config_dp_shard_size is {shards}, but {ranks} ranks in "
            f"{counted(copies, 'copy', 'copies')} are {ranks // copies} each; launch {shards * copies}, or remove the "
            "line"
        )
    pipelines = strategy.pipelines
    if pipelines is None:
        return None
    # The ranks may not divide into pipelines of two stages or more, or the schedule may not fit the micro-batches.
    if (misfit := pipelines.misfit(ranks)) is not None:
        return f"{place} {misfit}"
    stages, training = strategy.stage_count(ranks), recipe.training
    # 10 rows a step in micro-batches of 2, through 2 pipelines of 4 stages: 3 micro-batches in each pipeline, which is
    # too few. 4 of them, 16 rows a step, keep every stage busy.
    rows = training.rows_at_once * pipelines.copies
    micro_batches = -(-training.global_batch_size // rows)
    fitting = stages * -(-micro_batches // stages) * rows
    step = "a step in each pipeline" if pipelines.copies > 1 else "a step"
    if pipelines.schedule in ("1f1b", "interleaved_1f1b") and micro_batches < stages:
        return (
            f"training.global_batch_size: {counted(micro_batches, 'micro-batch', 'micro-batches')} {step} are "
            f"fewer than the {stages} stages that {pipelines.schedule} fills; set training.global_batch_size={fitting},"
            " lower training.per_device_batch_size, or take accelerate_config=gpipe"
        )
    if pipelines.runs > 1 and not can_interleave(stages, micro_batches):
        return (
            f"training.global_batch_size: {pipelines.schedule} needs rounds of equal size, each with {stages} "
            f"micro-batches or more; {micro_batches} {step} make none; set training.global_batch_size={fitting}, "
            "or take accelerate_config=1f1b"
        )
    return None


def not_compiled(recipe: Recipe, strategy: Strategy) -> str | None:
    """Why the recipe's layers cannot be compiled on any architecture; None if there is no known reason."""
    quantization = recipe.quantization
    if recipe.training.activation_checkpointing == "selective":
        return "activation_checkpointing: selective looks at each product, and a graph is a single operation"
    if strategy.shards_parameters and not strategy.shards_modules:
        return f"{strategy.name} gathers weights inside layers, which one graph cannot hold"
    if strategy.schedule is not None:
        return f"{strategy.name} replaces layers by a stage's own, which is not tried with graphs"
    if quantization is not None and quantization.load_in_8bit:
        return "8-bit layers read their inputs on the host, which one graph cannot hold"
    return None
