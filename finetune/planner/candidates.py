"""The best variant of a recipe for a model and GPUs, by the closed form, and its commented file.

Best means, in this order: rows with at least 2,048 tokens; all weights in float32 before adapters, adapters before
adapters over a 4-bit base; longer rows up to 4,096; less traffic, less recomputation, more rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

from finetune.closed_form.estimate import estimate, unsupported
from finetune.errors import DoesNotFit
from finetune.planner.remedies import plain
from finetune.recipe import schema
from finetune.recipe.gpus import Gpus
from finetune.recipe.schema import Recipe, Training
from finetune.recipe.sections.training import RECOMPUTATIONS_IF_COMPILED, Recomputation

ROW_LENGTHS = (4096, 2048, 1024, 512)
METHODS = ("full", "lora", "qlora")
ROWS = (8, 4, 2, 1)
TOKENS_AT_ONCE = 8192  # more than these do not make a step faster
TOKENS_A_STEP = 32_768  # about; more only where one micro-batch on every GPU is more
STRATEGIES = ("ddp", "fsdp2_grad_op", "fsdp2")
EPOCHS = 2
# Chats under the MIT licence, a tenth of them: a picked recipe trains something at once.
CHATS = schema.DataSet(path="HuggingFaceH4/ultrachat_200k", split="train_sft[:20000]")
HELD_OUT = schema.DataSet(path=CHATS.path, split="test_sft[:500]")


def candidates(model: str, gpus: Gpus) -> Iterator[Recipe]:
    """All variants for these GPUs, the best first."""
    ranks = gpus.count * gpus.nodes
    strategies = STRATEGIES if ranks > 1 else ("single",)
    for long_rows, method in product((True, False), METHODS):
        lengths = [length for length in ROW_LENGTHS if (length >= 2048) == long_rows]
        for length, strategy, every, rows in product(lengths, strategies, RECOMPUTATIONS_IF_COMPILED, ROWS):
            if rows == 1 or rows * length <= TOKENS_AT_ONCE:
                most = max(1, TOKENS_A_STEP // (length * ranks))
                yield _variant(model, gpus, method, length, strategy, every, min(rows, most))


def _variant(
    model: str, gpus: Gpus, method: str, length: int, strategy: str, every: Recomputation, rows: int
) -> Recipe:
    at_once = rows * gpus.count * gpus.nodes
    four_bit = schema.Quantization(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16") if method == "qlora" else None
    return Recipe(
        budget=schema.Budget(gpus=gpus.count, gpu_memory_gb=gpus.memory / 1e9, nodes=gpus.nodes),
        accelerate_config=strategy,
        model=schema.ModelSection(name_or_path=model),
        quantization=four_bit,
        lora=None if method == "full" else schema.Lora(),
        data=schema.Data(train=[CHATS], eval=[HELD_OUT], max_length=length, truncation="right"),
        training=Training(
            global_batch_size=at_once * max(1, round(TOKENS_A_STEP / (at_once * length))),
            per_device_batch_size=rows,
            num_train_epochs=EPOCHS,
            learning_rate=2e-5 if method == "full" else 2e-4,
            activation_checkpointing=every,
        ),
    )


def adapters(model: str, gpus: Gpus) -> Recipe:
    """LoRA on rows with 2,048 tokens, every layer recomputed, weights sharded over several GPUs: the plan for a model
    without a recipe.
    """
    strategy = "fsdp2" if gpus.count * gpus.nodes > 1 else "single"
    return _variant(model, gpus, "lora", 2048, strategy, True, 1)


def fitting_recipes(model: str, config: Mapping[str, Any], gpus: Gpus) -> Iterator[Recipe]:
    """Variants that certainly fit by the closed form, the best first: to be planned by trace until one fits."""
    for recipe in candidates(model, gpus):
        if unsupported(recipe, config, gpus) is None and estimate(recipe, config, gpus).upper <= gpus.memory:
            yield recipe


def by_plans(model: str, gpus: Gpus, fits: Callable[[Recipe], bool]) -> Recipe | None:
    """The best variant for a model that the closed form does not know, by `fits`, one plan each. It takes the first
    method whose smallest variant fits, then one setting after another, each as far as it fits. None if none fits.
    """
    strategies = STRATEGIES if gpus.count * gpus.nodes > 1 else ("single",)
    for method, length in (*((method, 2048) for method in METHODS), ("qlora", 512)):
        chosen: dict[str, Any] = {"method": method, "length": length, "strategy": strategies[-1]}
        chosen |= {"every": True, "rows": 1}
        if fits(_variant(model, gpus, **chosen)):
            break
    else:
        return None
    better: dict[str, tuple[Any, ...]] = {
        "length": (4096,) if chosen["length"] == 2048 else (1024,),
        "strategy": strategies[:-1],
        "every": RECOMPUTATIONS_IF_COMPILED[:-1],
        "rows": tuple(rows for rows in ROWS if 1 < rows <= TOKENS_AT_ONCE // chosen["length"]),
    }
    for setting, values in better.items():
        for value in values:
            if fits(_variant(model, gpus, **chosen | {setting: value})):
                chosen[setting] = value
                break
    return _variant(model, gpus, **chosen)


def variant_in_words(recipe: Recipe) -> str:
    """A variant in a line, for the search's progress."""
    training = recipe.training
    method = "qlora" if recipe.quantization else "lora" if recipe.lora else "full"
    return (
        f"{method}, {recipe.accelerate_config}, {training.per_device_batch_size} x {recipe.data.max_length:,} tokens, "
        f"activation_checkpointing: {plain(training.activation_checkpointing)}"
    )


def last_resorts(model: str, config: Mapping[str, Any], gpus: Gpus, count: int = 2) -> list[Recipe]:
    """Where no variant certainly fits: the smallest that fit if the allocator reserves nothing more. A plan replays the
    allocator with that little room."""
    return [recipe for needed, recipe in _by_need(model, config, gpus)[:count] if needed <= gpus.memory]


def offloaded(model: str, gpus: Gpus) -> Iterator[Recipe]:
    """Where none of the others fits: weights offloaded to host memory, a large and a small variant; a trace each."""
    for length, method in ((2048, "lora"), (512, "qlora")):
        yield _variant(model, gpus, method, length, "fsdp2_offload", True, 1)


def smallest(model: str, config: Mapping[str, Any], gpus: Gpus) -> int:
    """Bytes that the smallest variant needs. Raises DoesNotFit where no variant can be estimated."""
    variants = _by_need(model, config, gpus)
    if not variants:
        raise DoesNotFit(f"--model: {model}: no variant of it can be estimated; plan a recipe of your own instead")
    return variants[0][0]


def _by_need(model: str, config: Mapping[str, Any], gpus: Gpus) -> list[tuple[int, Recipe]]:
    known = [recipe for recipe in candidates(model, gpus) if unsupported(recipe, config, gpus) is None]
    return sorted(((estimate(recipe, config, gpus).needed, recipe) for recipe in known), key=lambda pair: pair[0])


def commented(recipe: Recipe, needed: int, gpus: Gpus, host: int = 0) -> str:
    """A recipe's file, with a reason for each choice. `host`: bytes of rank 0 in host memory, at most."""
    training, budget = recipe.training, recipe.budget
    ranks, gib = gpus.count * gpus.nodes, needed / 2**30
    how = "--multi_gpu " if ranks > 1 else ""
    method = "LoRA over a 4-bit base" if recipe.quantization else "LoRA" if recipe.lora else "every weight trained"
    name = recipe.model.name_or_path.rpartition("/")[2]
    room = gpus.memory / 2**30
    lines = [
        f"# {name}, {method}, on {ranks} x {gpus.name}; picked by finetune plan.",
        f"#   accelerate launch {how}--num_processes {ranks} finetune/train.py THIS_FILE",
        f"# Plan: {gib:.1f} GiB of each GPU's {room:.1f}, by a trace; finetune plan THIS_FILE shows where.",
        f"budget: {{gpus: {budget.gpus}, gpu_memory_gb: {budget.gpu_memory_gb:g}, nodes: {budget.nodes}}}",
        f"accelerate_config: {recipe.accelerate_config}  # {_WHY[recipe.accelerate_config]}",
        "model:",
        f"  name_or_path: {recipe.model.name_or_path}",
    ]
    if recipe.accelerate_config == "fsdp2_offload":
        lines.insert(3, f"# In host memory: up to {host / 2**30:.0f} GiB of the first process, planned too.")
    if recipe.quantization:
        lines += [
            "quantization:",
            "  load_in_4bit: true  # half a byte a weight; in bfloat16 it did not fit",
            "  bnb_4bit_quant_storage: bfloat16  # as sharded strategies move it",
        ]
    lines += [
        "lora: {r: 16, lora_alpha: 32, target_modules: all-linear}" if recipe.lora else "lora: null  # all are trained",
        "data:",
        "  train:",
        f'    - {{path: {CHATS.path}, split: "{CHATS.split}"}}  # chats (MIT); your own rows go here',
        "  eval:  # {fraction: 0.05} holds out rows of your own",
        f'    - {{path: {HELD_OUT.path}, split: "{HELD_OUT.split}"}}',
        f"  max_length: {recipe.data.max_length}",
        f"  truncation: {recipe.data.truncation}  # of longer documents, which are counted",
        "training:",
        f"  global_batch_size: {training.global_batch_size}  # rows per optimizer step over all GPUs",
        f"  per_device_batch_size: {training.per_device_batch_size}",
        f"  num_train_epochs: {training.num_train_epochs:g}",
        f"  learning_rate: {training.learning_rate:g}",
        f"  activation_checkpointing: {plain(training.activation_checkpointing)}  # {_recomputes(training)}",
    ]
    return "\n".join(lines) + "\n"


def _recomputes(training: Training) -> str:
    every = training.recompute_every
    if not every:
        return "there is room for all activations"
    if training.keeps_products:
        return "products and attention are kept, the rest is computed twice"
    if every == 1:
        return "a third more compute, for memory"
    return f"one layer of {every} is computed twice"


_WHY = {
    "single": "one process, one GPU",
    "ddp": "a copy on each GPU, one reduction a step",
    "fsdp2_grad_op": "weights gathered once a micro-batch",
    "fsdp2": "weights, gradients and AdamW's state cut over the GPUs",
    "fsdp2_offload": "weights wait in host memory, which has to hold them; much slower",
}
