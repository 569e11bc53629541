"""The arithmetic behind the `about N GB (arithmetic)` of every recipe's header: bytes on one GPU, part by part.

Closed forms, with each part at its own peak and all of them added: they err on the safe side. Published shapes come
from finetune/model/configs; what is not here (fragmentation, cuBLAS workspaces) is what the spare tenth is for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from finetune.closed_form.recomputation import choose_recomputation
from finetune.recipe.gpus import gpus_of
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy, read_strategy
from tests.support.models.model_shapes import Shape, shape_of

GB = 1e9
HALF = 2  # bytes of a number between two layers, and within one
CHUNK = 2 * 256 * 2**20  # a chunk of float32 logits and its logarithms: loss.py
# Bytes that a layer of gated delta rules keeps of a token for each of its values, by transformers' own code: 84.3 was
# counted by torch's hooks on saved tensors, of one layer of Qwen3.5-4B over 256 and 512 tokens.
RECURRENT = 85
ALONE = ("single", "ddp", "pipeline")  # kinds whose weights no engine brings in 16 bits
CUDA, COMMUNICATOR, PYTHON = 0.5 * GB, 0.7 * GB, 1.0 * GB


def parts(recipe: Recipe) -> dict[str, float]:
    """Bytes on one GPU, or of the process on a CPU, by what they are for; `auto` recomputes as it chooses."""
    recipe = choose_recomputation(recipe, gpus_of(recipe.budget)).recipe
    strategy, shape = read_strategy(recipe.accelerate_config), shape_of(recipe)
    weights = _trained_whole(recipe, strategy, shape) if recipe.lora is None else _adapted(recipe, strategy, shape)
    found = weights | _gathered(recipe, strategy, shape) | _activations(recipe, strategy, shape)
    if strategy.pipelines:
        found = _of_a_stage(recipe, strategy, shape, found)
    found["loss"] = CHUNK + HALF * _tokens(recipe) * shape.hidden
    if recipe.lora is None:
        found["loss"] += 8 * shape.table  # the head's float32 gradient, and one product and one copy in bf16
    if not recipe.budget.gpus:
        found["Python and libraries"] = PYTHON
    else:
        groups = 0 if recipe.budget.gpus * recipe.budget.nodes == 1 else 2 if strategy.replicates else 1
        found["CUDA"] = CUDA + groups * COMMUNICATOR
    return {name: size for name, size in found.items() if size}


def _of_a_stage(recipe: Recipe, strategy: Strategy, shape: Shape, whole: dict[str, float]) -> dict[str, float]:
    """Of a stage under 1F1B over a frozen base: its layers, and embeddings or head. The first of p stages keeps the
    activations of p micro-batches in a p-th of the layers, as much as one in all. Each stage has room for all messages
    of a step, hidden states [tokens, hidden] and their gradients."""
    pipelines, training = strategy.pipelines, recipe.training
    assert pipelines is not None
    assert (pipelines.schedule, pipelines.copies, recipe.lora is None, shape.tied) == ("1f1b", 1, False, False)
    stages = strategy.stage_count(recipe.budget.gpus * recipe.budget.nodes)
    message = HALF * _tokens(recipe) * shape.hidden
    table = 2.0 * shape.table
    return whole | {
        "base": (whole["base"] - 2 * table) / stages + table,
        "adapters": whole["adapters"] / stages,
        "messages": 2.0 * message * training.global_batch_size / training.per_device_batch_size,
    }


def host_bytes(recipe: Recipe) -> float:
    """Bytes in the host memory of one node that offloading a full training takes for good; pinned tensors are rounded.

    FSDP2 pins each shard of a weight, and each gradient that it receives. ZeRO-2 pins flat masters, gradients and
    16-bit weights, and a buffer for the largest gradient. ZeRO-3 pins the 16-bit weights twice, one by one as it loads
    them and then flat; torch keeps the first for good. It pins gradients twice too, flat and by the groups that are
    updated at once. Moments are not pinned.
    """
    strategy, shape = read_strategy(recipe.accelerate_config), shape_of(recipe)
    if not strategy.offloaded:
        return 0
    assert recipe.lora is None, "no recipe offloads adapters"
    devices, ranks = strategy.offload_devices, recipe.budget.gpus
    assert recipe.budget.nodes == 1
    own = [size / ranks for size in shape.tensors]  # elements of a rank's part of each
    each, largest = sum(own), max(shape.tensors)
    if strategy.kind == "fsdp":
        return ranks * (2 * sum(_pinned(4 * size) for size in own) + 8 * each)
    if strategy.zero_stage == 2:
        return ranks * (2 * _pinned(4 * each) + _pinned(HALF * each) + _pinned(HALF * largest) + 8 * each)
    weights = _pinned(HALF * each) + sum(_pinned(HALF * size) for size in own)
    groups = _groups(own, largest)
    if devices["optimizer"] == "nvme":
        # Gradients of one group, and DeepSpeed's four buffers for a group's master and moments, locked as they are.
        return ranks * (weights + _pinned(4 * each) + (1 + 4) * 4 * max(groups))
    return ranks * (weights + _pinned(4 * each) + sum(_pinned(4 * size) for size in groups) + 12 * each)


def host_bytes_at_save(recipe: Recipe) -> float:
    """The same while a checkpoint is written: ZeRO's masters and moments are copied for it, 12 bytes a parameter."""
    strategy = read_strategy(recipe.accelerate_config)
    copied = 12 * shape_of(recipe).total if strategy.kind == "deepspeed" and strategy.offloaded else 0
    return host_bytes(recipe) + copied


def _pinned(size: float) -> float:
    """Bytes that torch's allocator of pinned memory takes for so many: the next power of two."""
    return 2.0 ** math.ceil(math.log2(size))


def _groups(own: Sequence[float], least: float) -> list[float]:
    """Elements of the groups that ZeRO-3 updates at once: weights in order, closed when one has `least`."""
    groups = [0.0]
    for size in own:
        if groups[-1] >= least:
            groups.append(0.0)
        groups[-1] += size
    return groups


def disk_bytes(recipe: Recipe) -> float:
    """Bytes on the disk of one node: masters and two moments."""
    nvme = read_strategy(recipe.accelerate_config).offload_devices["optimizer"] == "nvme"
    return 12 * shape_of(recipe).total / recipe.budget.nodes if nvme else 0


def _shards(recipe: Recipe, strategy: Strategy) -> int:
    """Over how many GPUs what is sharded is cut."""
    nodes = 1 if strategy.replicates else recipe.budget.nodes
    return max(1, recipe.budget.gpus * nodes)


def _tokens(recipe: Recipe) -> int:
    return recipe.training.per_device_batch_size * recipe.data.row_tokens


def _trained_whole(recipe: Recipe, strategy: Strategy, shape: Shape) -> dict[str, float]:
    """All weights are trained: they, their gradients and AdamW's state."""
    every, shards = shape.total, _shards(recipe, strategy)
    width = 2 if recipe.training.pure_bf16 else 4
    if strategy.kind == "deepspeed":
        return _under_zero(strategy, every, every, shards)
    if strategy.kind == "fsdp":
        return {} if strategy.offloaded else {"weights, gradients, Adam": 4 * width * every / shards}
    state = 2.0 * width * every
    if recipe.training.optim.endswith("8bit"):
        state = 2 * (every - shape.table) + 8 * shape.table  # embeddings keep float32
    found = {"weights": width * every, "gradients": width * every, "Adam": state}
    return found | ({"bf16 copies": 2.0 * every} if width == 4 else {})


def _under_zero(
    strategy: Strategy, base: float, trained: float, shards: int, base_bytes: float = 2
) -> dict[str, float]:
    """DeepSpeed's 16-bit weights, float32 gradients (kept, and copied for the step), masters and moments."""
    devices, stage = strategy.offload_devices, strategy.zero_stage
    weights = base_bytes * base / (shards if stage == 3 else 1)
    found = {"weights": 0.0 if devices["param"] != "none" else weights}
    if devices["optimizer"] == "none":
        gradients = 4 * trained + 4 * trained / shards if stage == 1 else 8 * trained / shards
        found |= {"gradients": gradients, "masters, Adam": 12 * trained / shards}
    elif stage < 3:  # summed up on the GPU, and sent to the host at the end of a step
        found["gradients"] = 4 * trained / shards
    return found


def _base(recipe: Recipe, shape: Shape) -> tuple[float, float]:
    """Bytes of the frozen base that a strategy cuts, and of the scales that each rank holds whole."""
    matrices = shape.layers * shape.linear
    rest = 2.0 * (shape.total - matrices)
    if recipe.quantization is None:
        return 2.0 * matrices + rest, 0
    if recipe.quantization.load_in_8bit:
        return matrices + rest, 0
    return matrices / 2 + rest, matrices / 64 * (1 + 4 / 256)


def _adapted(recipe: Recipe, strategy: Strategy, shape: Shape) -> dict[str, float]:
    """A frozen base, and adapters in float32 with gradient and state."""
    assert recipe.lora is not None
    (base, scales), adapters = _base(recipe, shape), shape.adapters(recipe.lora.r)
    shards = _shards(recipe, strategy)
    again = {"dequantised": 4.0 * shape.hidden * shape.inner} if recipe.quantization else {}
    if shape.experts:  # of the layer in use [experts, inputs, outputs] in bf16: with adapters added, and its gradient
        again["experts again"] = 4.0 * shape.expert_weights
    if strategy.kind == "deepspeed":
        found = _under_zero(strategy, base, adapters, shards, base_bytes=1)
        adam = found.pop("gradients", 0) + found.pop("masters, Adam", 0) + 2 * adapters
        return {"base": found["weights"] + scales, "adapters": adam} | again
    if strategy.kind == "fsdp":
        held = 0 if strategy.offloaded else base / shards
        return {"base": held + scales, "adapters": 0 if strategy.offloaded else 16 * adapters / shards} | again
    state = 2 if recipe.training.optim.endswith("8bit") else 8
    return {"base": base + scales, "adapters": (8 + state + 2) * adapters} | again


def _gathered(recipe: Recipe, strategy: Strategy, shape: Shape) -> dict[str, float]:
    """What is whole for a while: layers in use and fetched ahead, the head, gradients on their way.

    Untied embeddings are gathered when forward starts and backward ends, beside no activations.
    """
    full, four_bit = recipe.lora is None, recipe.quantization is not None
    layer = shape.linear / 2 if four_bit else 2.0 * shape.layer
    reduced = shape.layer if full else shape.adapters(recipe.lora.r) / shape.layers if recipe.lora else 0
    if strategy.kind == "fsdp":
        # A gathering is a flat buffer first, then the layer: three at once, all of them under fsdp2_grad_op.
        layers = 3 * layer if strategy.reshard_after_forward else (shape.layers + 1) * layer
        return {"gathered": layers + 2.0 * shape.table, "reducing": 10.0 * reduced}
    if strategy.zero_stage == 3:
        return {
            "gathered": 2 * layer + 2.0 * shape.table,
            "reducing": 6.0 * reduced + _sub_group(recipe, strategy, shape),
        }
    return {"reducing": 6.0 * reduced} if strategy.kind == "deepspeed" else {}


def _sub_group(recipe: Recipe, strategy: Strategy, shape: Shape) -> float:
    """Gradients of the part of the state that is updated at once, on the GPU."""
    trained = shape.total if recipe.lora is None else shape.adapters(recipe.lora.r)
    return 0 if strategy.offloaded else 4 * min(max(shape.table, 2**26), trained / _shards(recipe, strategy))


def _activations(recipe: Recipe, strategy: Strategy, shape: Shape) -> dict[str, float]:
    """What backward needs of forward, and the gradients of one layer's activations."""
    tokens, inner = _tokens(recipe), shape.active * shape.inner
    # Norms: their input and output. Where transformers computes them also the input in float32, and the normed input.
    saved = (8 if shape.own_norms else 16) * shape.hidden
    saved += 4 * shape.queries + 4 * shape.keys + 4 * shape.heads
    # Gate, up, and their product. Where transformers computes it also the gate's activation.
    saved += (6 if shape.own_gates else 8) * inner + 8
    # Casts at each use are kept too: half as much again (float32 adapters under peft).
    whole_layer = tokens * saved * (1.5 if strategy.kind in ALONE and recipe.lora is not None else 1)
    whole_layer += tokens * RECURRENT * shape.recurrent_out
    working = tokens * (6.0 * inner + 8 * shape.hidden)
    every = recipe.training.recompute_every
    if not every:
        return {"activations": shape.layers * whole_layer + working}
    kept = HALF * tokens * shape.hidden * -(-shape.layers // every)
    not_recomputed = shape.layers - -(-shape.layers // every)
    return {"activations": kept + not_recomputed * whole_layer, "recomputed": whole_layer + working}


def total(recipe: Recipe) -> float:
    """Bytes on one GPU."""
    return sum(parts(recipe).values())
