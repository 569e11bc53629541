"""The best variant of a recipe for a model and GPUs, by the closed form, and its commented file.

Best means, in this order:

    1. rows with at least 2,048 tokens
    2. all weights in float32, before adapters, before adapters over a 4-bit base
    3. longer rows, up to 4,096 tokens
    4. less traffic, less recomputation, more rows at a time
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
TOKENS_A_STEP = 32_768  # about; more only if one micro-batch on every GPU is more
STRATEGIES = ("ddp", "fsdp2_grad_op", "fsdp2")
EPOCHS = 2
# Chats under the MIT licence, a tenth of them: a picked recipe trains something at once.
CHATS = schema.DataSet(path="HuggingFaceH4/ultrachat_200k", split="train_sft[:20000]")
HELD_OUT = schema.DataSet(path=CHATS.path, split="test_sft[:500]")


def candidates(model: str, gpus: Gpus) -> Iterator[Recipe]:
    """All variants for these GPUs, the best first."""
    ranks = gpus.count * gpus.nodes
    for long_rows, method in product((True, False), METHODS):
        lengths = [length for length in ROW_LENGTHS if (length >= 2048) == long_rows]
        settings = product(lengths, _strategies(gpus), RECOMPUTATIONS_IF_COMPILED, ROWS)
        for length, strategy, recomputation, rows in settings:
            if rows == 1 or rows * length <= TOKENS_AT_ONCE:
                most = max(1, TOKENS_A_STEP // (length * ranks))
                yield _variant(model, gpus, method, length, strategy, recomputation, min(rows, most))


def _strategies(gpus: Gpus) -> tuple[str, ...]:
    """The strategies for these GPUs, the one with the least traffic first."""
    if gpus.count * gpus.nodes > 1:
        return STRATEGIES
    return ("single",)


def _variant(
    model: str, gpus: Gpus, method: str, length: int, strategy: str, recomputation: Recomputation, rows: int
) -> Recipe:
    rows_at_once = rows * gpus.count * gpus.nodes
    lora = None if method == "full" else schema.Lora()
    quantization = None
    if method == "qlora":
        quantization = schema.Quantization(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")
    return Recipe(
        budget=schema.Budget(gpus=gpus.count, gpu_memory_gb=gpus.memory / 1e9, nodes=gpus.nodes),
        accelerate_config=strategy,
        model=schema.ModelSection(name_or_path=model),
        quantization=quantization,
        lora=lora,
        data=schema.Data(train=[CHATS], eval=[HELD_OUT], max_length=length, truncation="right"),
        training=Training(
            # A multiple of the rows at once that comes nearest to TOKENS_A_STEP.
            global_batch_size=rows_at_once * max(1, round(TOKENS_A_STEP / (rows_at_once * length))),
            per_device_batch_size=rows,
            num_train_epochs=EPOCHS,
            learning_rate=2e-5 if method == "full" else 2e-4,
            activation_checkpointing=recomputation,
        ),
    )


def adapters(model: str, gpus: Gpus) -> Recipe:
    """The recipe for a model without one: LoRA on rows with 2,048 tokens, with every layer recomputed.

    Weights are sharded if there are several GPUs.
    """
    return _variant(model, gpus, "lora", 2048, _strategies(gpus)[-1], True, 1)


def fitting_recipes(model: str, config: Mapping[str, Any], gpus: Gpus) -> Iterator[Recipe]:
    """Variants that certainly fit by the closed form, the best first: to be planned by trace until one fits."""
    for recipe in candidates(model, gpus):
        if unsupported(recipe, config, gpus) is None and estimate(recipe, config, gpus).upper <= gpus.memory:
            yield recipe


def by_plans(model: str, gpus: Gpus, fits: Callable[[Recipe], bool]) -> Recipe | None:
    """The best variant for a model that the closed form does not know, by `fits`, with one plan each.

    The first method with a smallest variant that fits is taken. Then one setting after another grows as far as it fits.
    None if no variant fits.
    """
    strategies = _strategies(gpus)
    for method, length in (*((method, 2048) for method in METHODS), ("qlora", 512)):
        chosen: dict[str, Any] = {"method": method, "length": length, "strategy": strategies[-1]}
        chosen |= {"recomputation": True, "rows": 1}
        if fits(_variant(model, gpus, **chosen)):
            break
    else:
        return None
    better: dict[str, tuple[Any, ...]] = {
        "length": (2 * chosen["length"],),
        "strategy": strategies[:-1],
        "recomputation": RECOMPUTATIONS_IF_COMPILED[:-1],
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
    method = "full"
    if recipe.lora is not None:
        method = "qlora" if recipe.quantization else "lora"
    return (
        f"{method}, {recipe.accelerate_config}, {training.per_device_batch_size} x {recipe.data.max_length:,} tokens, "
        f"activation_checkpointing: {plain(training.activation_checkpointing)}"
    )


def last_resorts(model: str, config: Mapping[str, Any], gpus: Gpus, count: int = 2) -> list[Recipe]:
    """If no variant certainly fits: the smallest ones, which fit if the allocator reserves nothing more.

    A plan replays the allocator with that little room.
    """
    return [recipe for needed, recipe in _by_need(model, config, gpus)[:count] if needed <= gpus.memory]


def offloaded(model: str, gpus: Gpus) -> Iterator[Recipe]:
    """Weights offloaded to host memory, if nothing else fits: a large and a small variant. Each takes a trace."""
    for length, method in ((2048, "lora"), (512, "qlora")):
        yield _variant(model, gpus, method, length, "fsdp2_offload", True, 1)


def smallest(model: str, config: Mapping[str, Any], gpus: Gpus) -> int:
    """Bytes that the smallest variant needs. Raises DoesNotFit if no variant can be estimated."""
    variants = _by_need(model, config, gpus)
    if not variants:
        raise DoesNotFit(f"--model: {model}: no variant of it can be estimated; plan a recipe of your own instead")
    return variants[0][0]


def _by_need(model: str, config: Mapping[str, Any], gpus: Gpus) -> list[tuple[int, Recipe]]:
    variants = [recipe for recipe in candidates(model, gpus) if unsupported(recipe, config, gpus) is None]
    return sorted(((estimate(recipe, config, gpus).needed, recipe) for recipe in variants), key=lambda pair: pair[0])


def commented(recipe: Recipe, needed: int, gpus: Gpus, host: int = 0) -> str:
    """A recipe's file, with a reason for each choice.

    Args:
        host: Rank 0's bytes in host memory, at most.
    """
    training, budget = recipe.training, recipe.budget
    ranks = gpus.count * gpus.nodes
    launcher = "--multi_gpu " if ranks > 1 else ""
    method = "every weight trained"
    if recipe.lora is not None:
        method = "LoRA over a 4-bit base" if recipe.quantization else "LoRA"
    every = training.recompute_every
    if not every:
        recomputes = "there is room for all activations"
    elif training.keeps_products:
        recomputes = "products and attention are kept, the rest is computed twice"
    elif every == 1:
        recomputes = "a third more compute, for memory"
    else:
        recomputes = f"one layer of {every} is computed twice"
    name = recipe.model.name_or_path.rpartition("/")[2]
    lines = [
        f"# {name}, {method}, on {ranks} x {gpus.name}; picked by finetune plan.",
        f"#   accelerate launch {launcher}--num_processes {ranks} finetune/train.py THIS_FILE",
        f"# Plan: {needed / 2**30:.1f} GiB of each GPU's {gpus.memory / 2**30:.1f}, by a trace; "
        "finetune plan THIS_FILE shows where.",
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
        f"  activation_checkpointing: {plain(training.activation_checkpointing)}  # {recomputes}",
    ]
    return "\n".join(lines) + "\n"


_WHY = {
    "single": "one process, one GPU",
    "ddp": "a copy on each GPU, one reduction a step",
    "fsdp2_grad_op": "weights gathered once a micro-batch",
    "fsdp2": "weights, gradients and AdamW's state sharded over the GPUs",
    "fsdp2_offload": "weights wait in host memory, which has to hold them; much slower",
}
