"""A plan by arithmetic: no torch, a few milliseconds, so that thousands of variants can be looked through.

The same phases and components as the trace, which `tests/test_closed.py` holds it to. Each phase's peak is the largest
of a few moments: where forward is deepest and where the loss is made; where backward begins, in its last and its first
layer, and where it ends at the embeddings; the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.plan.gpus import Gpus
from finetune.plan.layer_terms import FLOAT32, HALF
from finetune.plan.rank_terms import Job, Parts, read_strategy
from finetune.plan.shape import FAMILIES
from finetune.recipe import Recipe

CHUNK_BYTES = 256 * 2**20  # of float32 logits: loss.py
SORTED_TOKENS = 3072  # more tokens than these are sorted by the embeddings' backward
CONTEXT, NCCL = 500_000_000, 700_000_000  # job.py
# What the allocator may hold beside what is needed: the largest share that its replay gave over the recipes of
# recipes/, rounded up. Sharding frees and takes large buffers of different sizes all the time.
RESERVED = {"single": 0.09, "ddp": 0.09, "fsdp": 0.30}


@dataclass(frozen=True)
class Estimate:
    """What a recipe takes on one rank's GPU: bytes by component at the peak of each phase."""

    phases: dict[str, Parts]
    outside: Parts
    reserved: float = 0.0  # of what is needed, beside it, at most

    @property
    def peaks(self) -> dict[str, int]:
        return {name: sum(parts.values()) for name, parts in self.phases.items()}

    @property
    def needed(self) -> int:
        """Bytes of tensors at the largest peak, and what lies beside them."""
        return max(self.peaks.values()) + sum(self.outside.values())

    @property
    def upper(self) -> int:
        """What surely suffices: what is needed, and what the allocator may hold beside it."""
        return int(self.needed * (1 + self.reserved))


def unknown(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus | None) -> str | None:
    """Why there is no closed form for this recipe; None where there is one."""
    strategy, training, lora = read_strategy(recipe.accelerate_config), recipe.training, recipe.lora
    if gpus is None:
        return "on a CPU"
    if config.get("model_type") not in FAMILIES:
        return f"the architecture {config.get('model_type')}"
    if strategy.kind == "deepspeed" or strategy.offloaded:
        return f"accelerate_config: {strategy.name}"
    if training.mixed_precision == "no":
        return "training.mixed_precision: no"
    if recipe.model.attention != "auto":
        return f"model.attention: {recipe.model.attention}"
    if training.optim != "adamw":
        return f"training.optim: {training.optim}"
    if recipe.quantization is not None and recipe.quantization.load_in_8bit:
        return "quantization.load_in_8bit"
    if lora is not None and (lora.use_dora or lora.lora_dropout or lora.modules_to_save):
        return "lora: DoRA, dropout or modules_to_save"
    if lora is not None and recipe.model.dtype == "float32":
        return "model.dtype: float32 under lora"
    return None


def estimate(recipe: Recipe, config: Mapping[str, Any], gpus: Gpus) -> Estimate:
    """Estimate one rank. Only for recipes of which `unknown` says None."""
    job = Job(recipe, config, gpus)
    phases = {
        "load": _load(job),
        "forward": _largest(_forward(job)),
        "backward": _largest(_backward(job)),
        "step": job.static | {"gradients": job.gradients} | job.left,
        "save": job.static,
    }
    outside = {"CUDA context": CONTEXT} | ({"NCCL": NCCL} if job.ranks > 1 else {})
    held = {name: {part: size for part, size in parts.items() if size} for name, parts in phases.items()}
    return Estimate(held, outside, RESERVED[job.strategy.kind])


def _largest(moments: Iterator[Parts]) -> Parts:
    return max(moments, key=lambda parts: sum(parts.values()))


def _load(job: Job) -> Parts:
    shape = job.shape
    if not job.sharded:
        return {"parameters": job.parameters} | job.buckets
    # Each tensor lies whole on rank 0's GPU while it is cut: embeddings first, the head last.
    width = job.width if job.full else HALF
    first = width * job.cut(shape.vocabulary, shape.hidden)
    last = shape.linears["down"].weights // (4 if job.four_bit else 1) if shape.tied else shape.table
    moments = [
        {"parameters": first, "communication buffers": width * shape.table},
        {"parameters": job.parameters, "communication buffers": width * last},
    ]
    return _largest(iter(moments))


def _running(job: Job, *, gradients: int, activations: int, casts: int) -> Parts:
    """What is there at every moment of forward and backward."""
    rope = 2 * job.way.stream * job.tokens * job.shape.head
    rest = HALF * (job.shape.table + job.shape.hidden) * job.sharded
    return job.static | {
        "gradients": gradients,
        "activations": activations + rope + 24 * job.tokens,
        "cast weights": casts,
        "gathered layers": rest,
    }


def _add(parts: Parts, **more: int) -> Parts:
    found = dict(parts)
    for name, size in more.items():
        found[name.replace("_", " ")] = found.get(name.replace("_", " "), 0) + size
    return found


def _before_forward(job: Job, *, activations: int, casts: int) -> Parts:
    """As `_running`, in the forward of the last micro-batch of a step."""
    here = _running(job, gradients=job.gradients * job.again, activations=activations, casts=casts)
    if job.micro_steps == 1:
        return here
    if job.strategy.kind == "ddp":
        here = _add(here, backward_workspace=job.gradients)
    return {name: here.get(name, 0) + job.left.get(name, 0) for name in {*here, *job.left}}


def _forward(job: Job) -> Iterator[Parts]:
    """The last layer, and the loss."""
    shape, way, last = job.shape, job.way, job.shape.layers - 1
    before, _ = job.stays(last)
    here = _before_forward(job, activations=before, casts=job.casts * last)
    if job.sharded:
        here = _add(here, gathered_layers=job.unit + job.unresharded(last), communication_buffers=job.unit)
        # As it is put together, beside what it and the layer before it came in.
        yield _add(here, communication_buffers=job.unit, activations=way.stream * job.tokens * shape.hidden)
    kept = casts = 0
    for step in job.steps:
        kept, casts = kept + step.kept, casts + step.casts
        alive = step.kept if job.recomputed(last) else kept
        yield _add(here, activations=alive + step.ahead, cast_weights=casts)
        if step.unpacked:
            yield _add(here, activations=alive + step.beside, quantisation_workspace=step.unpacked, cast_weights=casts)
    if job.sharded and not shape.tied:
        # The embeddings, and the unit of the head, each as it came and put together.
        here = _before_forward(job, activations=0, casts=0)
        table = HALF * shape.table
        yield _add(here, gathered_layers=table, communication_buffers=2 * table)
    stream = way.stream * job.tokens * shape.hidden
    after, _ = job.stays(shape.layers)
    norm = FLOAT32 * job.tokens * (shape.hidden + 1) + stream * job.full
    here = _before_forward(job, activations=after + norm + stream, casts=job.casts * shape.layers)
    if job.sharded:
        here = _add(here, gathered_layers=job.unresharded(shape.layers), communication_buffers=job.unit)
    yield from (_add(here, logits_and_loss=stream + size) for size in _loss(job))


def _loss(job: Job) -> Iterator[int]:
    """Bytes beside the gradient of the hidden states: chunks of logits, and the head's gradient where it is trained."""
    shape = job.shape
    chunk = min(job.tokens, max(1, CHUNK_BYTES // (4 * shape.vocabulary)))
    logits = chunk * shape.vocabulary
    head = FLOAT32 * shape.table * job.full
    cast = HALF * shape.table * (job.way.stream == FLOAT32)
    # Logits in float32 and their logarithms; or two chunks' logits in both formats, as the second one is made.
    second = min(chunk, job.tokens - chunk) * shape.vocabulary
    yield head + cast + max(8 * logits, 6 * (logits + second))
    if job.full:
        yield head + cast + 6 * logits + HALF * shape.table


def _backward(job: Job) -> Iterator[Parts]:
    """Its beginning, its last layers and its first, and the embeddings."""
    shape, way, layers = job.shape, job.way, job.shape.layers
    stream = way.stream * job.tokens * shape.hidden
    again = job.again
    head = 0 if not job.full else (HALF if job.sharded or job.width == HALF else FLOAT32) * shape.table
    activations, casts = job.stays(layers)
    norm = FLOAT32 * job.tokens * (shape.hidden + 1) + stream * job.full
    start = _running(job, gradients=job.gradients * again, activations=activations + norm, casts=casts)
    start = _with_gradient(job, start, head)
    if job.strategy.kind == "ddp" and job.micro_steps > 1:
        start = _add(start, backward_workspace=job.gradients)
    if job.sharded:
        start = _add(start, gathered_layers=job.unresharded(layers), communication_buffers=job.unit)
    yield _add(start, backward_workspace=5 * FLOAT32 * job.tokens * shape.hidden)
    period = max(1, job.every)
    for layer in sorted({*range(max(0, layers - 1 - period), layers), *range(min(period, layers))}):
        yield from _in_layer(job, layer, head)
    yield from _at_the_end(job, head)


def _with_gradient(job: Job, parts: Parts, whole: int) -> Parts:
    """A weight's whole gradient: on its way under a strategy that shards, else the weight's own, new or added."""
    if job.sharded:
        return _add(parts, unsharded_gradients=whole)
    if job.shape.tied:
        return _add(parts, logits_and_loss=whole)
    return _add(parts, **{"backward_workspace" if job.again else "gradients": whole})


def _in_layer(job: Job, layer: int, head: int) -> Iterator[Parts]:
    """Recomputation, where there is one, and backward, step by step."""
    shape, layers, stream = job.shape, job.shape.layers, job.way.stream * job.tokens * job.shape.hidden
    before, casts = job.stays(layer)
    before += stream * (job.recomputed(layer) and job.way.stream == HALF)  # its input; else counted in its first norm
    done = layers - 1 - layer  # layers whose backward is over
    again = job.again
    gradients = job.gradients if again else 0
    if not again:
        gradients = done * job.trained_of_layer * job.width // job.shards
    here = _running(job, gradients=gradients, activations=before, casts=casts)
    here = _add(here, backward_workspace=job.apart(layer + 1))
    if job.sharded:
        reducing = FLOAT32 * job.trained_of_layer * (layer < layers - 1)
        coming = HALF * shape.table * (not shape.tied) if layer == 0 else job.unit
        here = _add(
            here,
            unsharded_gradients=head,
            gathered_layers=job.unit + job.unresharded(layer),
            communication_buffers=reducing + (coming if job.strategy.reshard_after_forward else 0),
        )
    elif shape.tied:
        here = _add(here, logits_and_loss=head)  # waits for the embeddings' gradient, to be added to it
    elif not again:
        here = _add(here, gradients=head)
    yield from _steps_of(job, layer, here, stream)


def _steps_of(job: Job, layer: int, here: Parts, stream: int) -> Iterator[Parts]:
    kept = cast = 0
    for step in job.steps:
        kept, cast = kept + step.kept, cast + step.casts
        if not job.recomputed(layer):
            continue
        now = _add(here, cast_weights=cast, backward_workspace=stream)
        yield _add(now, activations=kept + step.again)
        if step.unpacked:
            yield _add(now, activations=kept + step.beside, quantisation_workspace=step.unpacked)
    done = 0
    for step in reversed(job.steps):
        own = step.gradients
        wide = own * (2 if job.way.stream == FLOAT32 or job.way.wide else 0)
        sizes = {"unsharded_gradients": done + own} if job.sharded else {"backward_workspace": own + wide}
        now = _add(here, activations=kept, cast_weights=cast, quantisation_workspace=step.unpacked, **sizes)
        yield _add(now, backward_workspace=step.back)
        kept, cast, done = kept - step.kept, cast - step.casts, done + own


def _at_the_end(job: Job, head: int) -> Iterator[Parts]:
    """Of trained embeddings the gradient, of which a table is made; under sharding it and the head are reduced."""
    if not job.full:
        return
    shape, again = job.shape, job.again
    stream = job.way.stream * job.tokens * shape.hidden
    work = stream
    if job.tokens > SORTED_TOKENS:
        work += 32 * job.tokens + job.tokens * 11 // 10 * shape.hidden * FLOAT32
    here = _running(job, gradients=job.gradients, activations=0, casts=0)
    table = (FLOAT32 if job.way.stream == FLOAT32 else HALF) * shape.table
    if not job.sharded:
        here = _add(here, logits_and_loss=head * shape.tied, backward_workspace=job.apart(0))
        yield _add(here, backward_workspace=work + table * (again + shape.tied))
        return
    whole = FLOAT32 * (shape.table + job.cut(shape.vocabulary, shape.hidden))
    before = FLOAT32 * job.trained_of_layer
    narrowed = HALF * job.cut(shape.vocabulary, shape.hidden) * (job.width == HALF)
    if shape.tied:  # the head's gradient and the embeddings', and then their sum, of a unit that is whole no more
        both = _add(here, logits_and_loss=head, communication_buffers=before, backward_workspace=table)
        yield _add(both, backward_workspace=work)
        yield _add(both, unsharded_gradients=table)
        here = _add(here, gathered_layers=-HALF * shape.table, unsharded_gradients=table)
        yield _add(here, communication_buffers=whole, backward_workspace=narrowed)
        return
    here = _add(here, unsharded_gradients=head + table)
    yield _add(here, gathered_layers=HALF * shape.table, communication_buffers=before, backward_workspace=work)
    yield _add(here, communication_buffers=whole, backward_workspace=narrowed)
