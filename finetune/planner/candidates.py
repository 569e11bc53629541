"""The best variant of a recipe for a model and GPUs, by the closed form, and its commented file.

Best means, in this order:

    1. rows with at least 2,048 tokens
    2. all weights in float32, before adapters, before adapters over a 4-bit base
    3. longer rows, up to 4,096 tokens
    4. less traffic, less recomputation, more rows at a time
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product, takewhile
from typing import Any

import yaml

from finetune.closed_form.estimate import estimate, unsupported
from finetune.closed_form.shape import approximate_weights
from finetune.errors import DoesNotFit, FinetuneError
from finetune.model.known_configs import planned_config
from finetune.planner.remedies import plain
from finetune.probe.own_template import with_template
from finetune.recipe import schema
from finetune.recipe.gpus import Gpus
from finetune.recipe.optimizers import Method, usual_rate
from finetune.recipe.schema import Recipe, Training
from finetune.recipe.sections.training import RECOMPUTATIONS_IF_COMPILED, Recomputation
from finetune.wording import counted

ROW_LENGTHS = (4096, 2048, 1024, 512)
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
ROWS = (8, 4, 2, 1)
TOKENS_AT_ONCE = 8192  # more than these do not make a step faster
TOKENS_A_STEP = 32_768  # about; more only if one micro-batch on every GPU is more
TRIES, LAST_RESORTS = 3, 2  # variants that are planned: the best that certainly fit, and the smallest
STRATEGIES = ("ddp", "fsdp2_grad_op", "fsdp2")
EPOCHS = 2
# Chats under the MIT licence, a tenth of them: a picked recipe trains something at once.
CHATS = schema.DataSet(path="HuggingFaceH4/ultrachat_200k", split="train_sft[:20000]")
HELD_OUT = schema.DataSet(path=CHATS.path, split="test_sft[:500]")


@dataclass(frozen=True)
class Search:
    """The settings that a picked recipe keeps, and the variants to try."""

    recipe: Recipe  # its model, data and other settings are kept
    row_lengths: tuple[int, ...] = ROW_LENGTHS
    methods: tuple[Method, ...] = METHODS
    is_users: bool = False  # its batch and learning rate are kept too

    @property
    def model(self) -> str:
        return self.recipe.model.name_or_path

    @property
    def usual_length(self) -> int:
        return 2048 if 2048 in self.row_lengths else self.row_lengths[0]

    @cached_property
    def weights(self) -> float | None:
        """The model's, roughly; None if its configuration is not known."""
        try:
            return approximate_weights(planned_config(self.model, self.recipe.model.revision)[0])
        except FinetuneError:
            return None


def for_model(model: str) -> Search:
    """Any method and row length for a model, on public chats."""
    data = with_template(schema.Data(train=[CHATS], eval=[HELD_OUT], truncation="right"), model)
    training = Training(num_train_epochs=EPOCHS)
    # A budget with a GPU: number formats that are left to the device are a GPU's, whatever this machine computes in.
    budget, base = schema.Budget(gpus=1), schema.ModelSection(name_or_path=model)
    recipe = Recipe(budget=budget, model=base, data=data, training=training)
    return Search(recipe)


def for_recipe(recipe: Recipe) -> Search:
    """A user's recipe: its row length stays, and one that trains adapters keeps adapters."""
    methods = METHODS if recipe.lora is None else METHODS[1:]
    return Search(recipe, (recipe.data.max_length,), methods, is_users=True)


def candidates(search: Search, gpus: Gpus) -> Iterator[Recipe]:
    """All variants for these GPUs, the best first."""
    ranks = gpus.count * gpus.nodes
    for long_rows, method in product((True, False), search.methods):
        lengths = [length for length in search.row_lengths if (length >= 2048) == long_rows]
        settings = product(lengths, _strategies(gpus), RECOMPUTATIONS_IF_COMPILED, ROWS)
        for length, strategy, recomputation, rows in settings:
            row_tokens = search.recipe.data.answers_a_row * length
            if rows == 1 or rows * row_tokens <= TOKENS_AT_ONCE:
                most = max(1, TOKENS_A_STEP // (row_tokens * ranks))
                yield _variant(search, gpus, method, length, strategy, recomputation, min(rows, most))


def _strategies(gpus: Gpus) -> tuple[str, ...]:
    """The strategies for these GPUs, the one with the least traffic first."""
    if gpus.count * gpus.nodes > 1:
        return STRATEGIES
    return ("single",)


def _variant(
    search: Search, gpus: Gpus, method: Method, length: int, strategy: str, recomputation: Recomputation, rows: int
) -> Recipe:
    rows_at_once = rows * gpus.count * gpus.nodes
    start = search.recipe
    lora, quantization = start.lora or schema.Lora(), None
    if method == "qlora":
        quantization = schema.Quantization(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")
    training: dict[str, Any] = {"per_device_batch_size": rows, "activation_checkpointing": recomputation}
    # A multiple of the rows at once that comes nearest to the recipe's batch, or to TOKENS_A_STEP.
    aim = start.training.global_batch_size if search.is_users else TOKENS_A_STEP / length
    training["global_batch_size"] = rows_at_once * max(1, round(aim / rows_at_once))
    if not search.is_users or (method == "full") != (start.lora is None):
        training["learning_rate"] = usual_rate(search.weights, method, start.training.objective)
    return start.model_copy(
        update={
            "budget": schema.Budget(gpus=gpus.count, gpu_memory_gb=gpus.memory // 10**8 / 10, nodes=gpus.nodes),
            "accelerate_config": strategy,
            "quantization": quantization,
            "lora": None if method == "full" else lora,
            "data": start.data.model_copy(update={"max_length": length}),
            "training": start.training.model_copy(update=training),
        }
    )


def adapters(search: Search, gpus: Gpus) -> Recipe:
    """LoRA on rows with 2,048 tokens, with every layer recomputed: the recipe for a model without one.

    Weights are sharded if there are several GPUs.
    """
    return _variant(search, gpus, "lora", search.usual_length, _strategies(gpus)[-1], True, 1)


def fitting_recipes(search: Search, config: Mapping[str, Any], gpus: Gpus) -> tuple[list[Recipe], int]:
    """Variants to be planned by trace until one fits, by the closed form, and the bytes that the smallest one needs.

    Those that certainly fit come first, the best first. Then the smallest ones, which fit if the allocator reserves
    nothing more: a plan replays the allocator with that little room. Raises DoesNotFit if none can be estimated.
    """
    certain: list[Recipe] = []
    by_need: list[tuple[int, int, Recipe]] = []
    for place, recipe in enumerate(candidates(search, gpus)):
        if unsupported(recipe, config, gpus) is None:
            estimated = estimate(recipe, config, gpus)
            by_need.append((estimated.needed, place, recipe))
            if estimated.upper <= gpus.memory and len(certain) < TRIES:
                certain.append(recipe)
    if not by_need:
        raise DoesNotFit(
            f"--model: {search.model}: no variant of it can be estimated; plan a recipe of your own instead"
        )
    smallest = sorted(by_need)[:LAST_RESORTS]
    return certain + [recipe for needed, _, recipe in smallest if needed <= gpus.memory], smallest[0][0]


def by_plans(search: Search, gpus: Gpus, fits: Callable[[Recipe], bool]) -> Recipe | None:
    """The best variant for a model that the closed form does not know, by `fits`, with one plan each.

    The first method with a smallest variant that fits is taken. Then one setting after another grows as far as it fits.
    None if no variant fits.
    """
    strategies, lengths = _strategies(gpus), search.row_lengths
    for method, length in (*product(search.methods, (search.usual_length,)), ("qlora", lengths[-1])):
        chosen: dict[str, Any] = {"method": method, "length": length, "strategy": strategies[-1]}
        chosen |= {"recomputation": True, "rows": 1}
        if fits(_variant(search, gpus, **chosen)):
            break
    else:
        return None
    most_rows = TOKENS_AT_ONCE // (search.recipe.data.answers_a_row * length)
    for setting, values in (
        ("length", [longer for longer in lengths if longer == 2 * length]),
        ("strategy", strategies[:-1]),
        ("recomputation", RECOMPUTATIONS_IF_COMPILED[:-1]),
        ("rows", [rows for rows in ROWS if 1 < rows <= most_rows]),
    ):
        tried = (value for value in values if fits(_variant(search, gpus, **chosen | {setting: value})))
        chosen[setting] = next(tried, chosen[setting])
    return _variant(search, gpus, **chosen)


def offloaded(search: Search, gpus: Gpus) -> Iterator[Recipe]:
    """Weights offloaded to host memory, if nothing else fits: a large and a small variant. Each takes a trace."""
    yield _variant(search, gpus, "lora", search.usual_length, "fsdp2_offload", True, 1)
    yield _variant(search, gpus, "qlora", search.row_lengths[-1], "fsdp2_offload", True, 1)


def variant_in_words(recipe: Recipe) -> str:
    """A variant in a line, for the search's progress."""
    training, data = recipe.training, recipe.data
    method = "full"
    if recipe.lora is not None:
        method = "qlora" if recipe.quantization else "lora"
    rows = str(training.rows_at_once)
    if data.unit != "documents":
        rows = counted(training.rows_at_once, data.row_noun)
    return (
        f"{method}, {recipe.accelerate_config}, {rows} x {data.row_tokens:,} tokens, "
        f"activation_checkpointing: {plain(training.activation_checkpointing)}"
    )


def commented(recipe: Recipe, needed: int, gpus: Gpus, host: int = 0, start: str = "") -> str:
    """A recipe's file, with a reason for each choice.

    Args:
        host: Rank 0's bytes in host memory, at most.
        start: The text of the recipe that it was picked for. Its header stays.
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
        *_yaml_lines({"model": recipe.model.model_dump(mode="json", exclude_defaults=True)}),
    ]
    if header := list(takewhile(lambda line: line.startswith("#"), start.splitlines())):
        lines[3:3] = ["# Its recipe began:", *header]
    if recipe.accelerate_config == "fsdp2_offload":
        lines.insert(3, f"# In host memory: up to {host / 2**30:.0f} GiB of the first process, planned too.")
    if recipe.quantization:
        lines += [
            "quantization:",
            "  load_in_4bit: true  # half a byte a weight; in bfloat16 it did not fit",
            "  bnb_4bit_quant_storage: bfloat16  # as sharded strategies move it",
        ]
    if recipe.lora is None:
        lines.append("lora: null  # all are trained")
    elif recipe.lora == schema.Lora():
        lines.append("lora: {r: 16, lora_alpha: 32, target_modules: all-linear}")
    else:
        lines += _yaml_lines({"lora": recipe.lora.model_dump(mode="json", exclude_defaults=True)})
    if recipe.data.train != [CHATS]:  # a user's own: all settings stay
        kept = recipe.model_dump(mode="json", exclude_defaults=True)
        for written in ("budget", "accelerate_config", "model", "quantization", "lora"):
            kept.pop(written, None)
        return "\n".join([*lines, *_yaml_lines(kept)]) + "\n"
    template = []
    if recipe.data.chat_template is not None:
        template = ["  # a base model, by its name; leave it out if the tokenizer has a chat template"]
        template += [f"  chat_template: {json.dumps(recipe.data.chat_template)}"]
    lines += [
        "data:",
        "  train:",
        f'    - {{path: {CHATS.path}, split: "{CHATS.split}"}}  # chats (MIT); your own rows go here',
        "  eval:  # {fraction: 0.05} holds out rows of your own",
        f'    - {{path: {HELD_OUT.path}, split: "{HELD_OUT.split}"}}',
        f"  max_length: {recipe.data.max_length}",
        f"  truncation: {recipe.data.truncation}  # of longer documents, which are counted",
        *template,
        "training:",
        f"  global_batch_size: {training.global_batch_size}  # rows per optimizer step over all GPUs",
        f"  per_device_batch_size: {training.per_device_batch_size}",
        f"  num_train_epochs: {training.num_train_epochs:g}",
        f"  learning_rate: {training.learning_rate:g}",
        f"  activation_checkpointing: {plain(training.activation_checkpointing)}  # {recomputes}",
    ]
    return "\n".join(lines) + "\n"


def _yaml_lines(content: Mapping[str, Any]) -> list[str]:
    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=100).splitlines()


_WHY = {
    "single": "one process, one GPU",
    "ddp": "a copy on each GPU, one reduction a step",
    "fsdp2_grad_op": "weights gathered once a micro-batch",
    "fsdp2": "weights, gradients and AdamW's state sharded over the GPUs",
    "fsdp2_offload": "weights wait in host memory, which has to hold them; much slower",
}
