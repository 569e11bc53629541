"""The moments at which forward or backward may be deepest, each with its bytes by component.

Where forward is in its first layer and in its last and where the loss is made; where backward begins, in its last and
its first layers, and where it ends at the embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator

from finetune.planner.closed_form.layer import FLOAT32, HALF
from finetune.planner.closed_form.rank import Job, Parts

CHUNK_BYTES = 256 * 2**20  # of float32 logits: loss.py
SORTED_TOKENS = 3072  # more tokens than these are sorted by the embeddings' backward


def _running(job: Job, *, gradients: int, activations: int, casts: int) -> Parts:
    """What is there at every moment of forward and backward."""
    rope = 2 * job.way.stream * job.tokens * job.shape.head
    return job.static | {
        "gradients": gradients,
        "activations": activations + rope + 32 * job.tokens,  # four tensors of a batch
        "cast weights": casts,
        "gathered layers": job.rest,
    }


def _add(parts: Parts, **more: int) -> Parts:
    found = dict(parts)
    for name, size in more.items():
        found[name.replace("_", " ")] = found.get(name.replace("_", " "), 0) + size
    return found


def _before_gradients(job: Job, *, activations: int, casts: int) -> Parts:
    """As `_running`, in the last micro-batch of a step, whose backward has made no gradient yet."""
    here = _running(job, gradients=job.gradients * job.again, activations=activations, casts=casts)
    if job.strategy.gradient_buckets and job.micro_steps > 1:
        here = _add(here, backward_workspace=job.gradients)
    return here


def forward(job: Job) -> Iterator[Parts]:
    """In the first layer and the last, at the head, and in the loss; of the last micro-batch of a step."""
    shape, way, last = job.shape, job.way, job.shape.layers - 1
    stream = way.stream * job.tokens * shape.hidden
    if job.sharded:  # the first layer is put together beside what the embeddings' table came in
        here = _before_gradients(job, activations=stream, casts=0)
        coming = HALF * shape.table + job.unit
        yield _add(here, gathered_layers=job.unit + job.unresharded(0), communication_buffers=coming)
    before, _ = job.stays(last)
    # Frames hold the layer's input and the embeddings' output; in float32 both are what norms keep of them.
    before += stream * (1 + (not job.every) if way.stream == HALF else job.recomputed(last))
    here = _before_gradients(job, activations=before, casts=job.casts * last)
    if job.sharded:
        here = _add(here, gathered_layers=job.unit + job.unresharded(last), communication_buffers=job.unit)
        # As it is put together, beside what it and the layer before it came in.
        yield _add(here, communication_buffers=job.unit)
    kept = casts = 0
    for step in job.steps:
        kept, casts = kept + step.kept, casts + step.casts
        # Of a layer that is recomputed this is no more than near: its recomputation is deeper anyway.
        alive = step.kept if job.recomputed(last) else kept
        yield _add(here, activations=alive + step.ahead, cast_weights=casts)
        if step.unpacked:
            yield _add(here, activations=alive + step.beside, quantisation_workspace=step.unpacked, cast_weights=casts)
    yield from _at_the_head(job)


def _at_the_head(job: Job) -> Iterator[Parts]:
    """Where it is put together, beside what it and the last layer came in; and the loss."""
    shape, layers = job.shape, job.shape.layers
    stream = job.way.stream * job.tokens * shape.hidden
    after, _ = job.stays(layers)
    norm = FLOAT32 * job.tokens * (shape.hidden + 1) + stream * job.full
    here = _before_gradients(job, activations=after + norm + stream, casts=job.casts * layers)
    if job.sharded:
        here = _add(here, gathered_layers=job.head + job.unresharded(layers), communication_buffers=job.head)
        yield _add(here, communication_buffers=job.unit)
        here = _add(here, communication_buffers=0 if job.head else job.unit)
    yield from (_add(here, logits_and_loss=stream + size) for size in _loss(job))


def _loss(job: Job) -> Iterator[int]:
    """Bytes beside the gradient of the hidden states: chunks of logits, and the head's gradient where it is trained."""
    shape = job.shape
    chunk = min(job.tokens, max(1, CHUNK_BYTES // (4 * shape.vocabulary)))
    logits = chunk * shape.vocabulary
    head = FLOAT32 * shape.table * job.full
    cast = HALF * shape.table * (job.way.stream == FLOAT32) + HALF * chunk * shape.hidden
    # Logits in float32 and their logarithms; or two chunks' logits in both formats, as the second one is made.
    second = min(chunk, job.tokens - chunk) * shape.vocabulary
    yield head + cast + max(8 * logits, 6 * (logits + second))
    if job.full:
        yield head + cast + 6 * logits + HALF * shape.table


def backward(job: Job) -> Iterator[Parts]:
    """Where it begins, in the last layers and the first, and at the embeddings."""
    layers, period = job.shape.layers, max(1, job.every)
    yield from _begins(job)
    for layer in sorted({*range(max(0, layers - 1 - period), layers), *range(min(period, layers))}):
        yield from _in_layer(job, layer)
    yield from _at_the_end(job)


def _begins(job: Job) -> Iterator[Parts]:
    """The head, which is reduced where it is a unit of its own, and the last norm."""
    shape, layers = job.shape, job.shape.layers
    stream = job.way.stream * job.tokens * shape.hidden
    activations, casts = job.stays(layers)
    norm = FLOAT32 * job.tokens * (shape.hidden + 1) + stream * job.full
    here = _before_gradients(job, activations=activations + norm, casts=casts)
    if job.sharded:
        coming = job.unit if job.strategy.reshard_after_forward else 0
        here = _add(here, gathered_layers=job.unresharded(layers), communication_buffers=coming)
    before = _add(here, logits_and_loss=stream)
    if job.head:
        yield _add(before, gathered_layers=job.head, unsharded_gradients=HALF * shape.table * job.full)
        yield _reduced(job, before)
    elif not shape.tied:  # added to the gradient that is there, or becomes it
        yield _add(before, logits_and_loss=job.head_gradient)
    here = _add(_with_gradient(job, here), communication_buffers=job.reducing(0))
    # As in a layer's norm: what is kept for its weight is gone by then.
    yield _add(here, activations=-stream * job.full, backward_workspace=5 * FLOAT32 * job.tokens * shape.hidden)


def _reduced(job: Job, parts: Parts) -> Parts:
    """A trained table's gradient as it is cut and added up over the ranks, in float32; then in its own format."""
    cut = job.cut(job.shape.vocabulary, job.shape.hidden) * job.full
    return _add(
        parts,
        unsharded_gradients=HALF * job.shape.table * job.full,
        communication_buffers=FLOAT32 * (job.shape.table * job.full + cut),
        backward_workspace=HALF * cut * (job.width == HALF),
    )


def _with_gradient(job: Job, parts: Parts) -> Parts:
    """The head's gradient where it stays: a tied one is to be added to the embeddings', a new one is the weight's."""
    if job.sharded:
        return _add(parts, unsharded_gradients=job.head_gradient)
    if job.shape.tied:
        return _add(parts, logits_and_loss=job.head_gradient)
    return parts if job.again else _add(parts, gradients=job.head_gradient)


def _in_layer(job: Job, layer: int) -> Iterator[Parts]:
    """Recomputation, where there is one, and backward, step by step."""
    shape, layers, stream = job.shape, job.shape.layers, job.way.stream * job.tokens * job.shape.hidden
    before, casts = job.stays(layer)
    before += stream * (job.recomputed(layer) and job.way.stream == HALF)  # its input; else counted in its first norm
    done = layers - 1 - layer  # layers whose backward is over
    gradients = job.gradients if job.again else job.width * job.done(done)
    here = _running(job, gradients=gradients, activations=before, casts=casts)
    here = _with_gradient(job, _add(here, backward_workspace=job.apart(layer + 1)))
    if job.sharded:
        coming = HALF * shape.table * (not shape.tied) if layer == 0 else job.unit
        here = _add(
            here,
            gathered_layers=job.unit + job.unresharded(layer),
            communication_buffers=job.reducing(done) + (coming if job.strategy.reshard_after_forward else 0),
        )
    yield from _steps_of(job, layer, here, stream)


def _steps_of(job: Job, layer: int, here: Parts, stream: int) -> Iterator[Parts]:
    kept = cast = 0
    for step in job.steps:
        kept, cast = kept + step.kept, cast + step.casts
        if not job.recomputed(layer):
            continue
        now = _add(here, cast_weights=cast, backward_workspace=stream)
        yield _add(now, activations=kept + (step.again or step.ahead))
        if step.unpacked:
            yield _add(now, activations=kept + step.beside, quantisation_workspace=step.unpacked)
    done = 0
    for step in reversed(job.steps):
        own = step.gradients
        wide = own * (2 if job.way.stream == FLOAT32 or job.way.wide else 0)
        sizes = {"unsharded_gradients": done + own} if job.sharded else {"backward_workspace": own + wide}
        now = _add(_add(here, activations=kept, cast_weights=cast, **sizes), backward_workspace=step.back)
        yield now
        if step.unpacked:  # the adapter's part is over by then
            yield _add(now, activations=-step.kept, quantisation_workspace=step.unpacked)
        kept, cast, done = kept - step.kept, cast - step.casts, done + own


def _at_the_end(job: Job) -> Iterator[Parts]:
    """Of trained embeddings the gradient, of which a table is made, and which is reduced under sharding."""
    if not job.full:
        return
    shape = job.shape
    work = job.way.stream * job.tokens * shape.hidden
    if job.tokens > SORTED_TOKENS:
        work += 32 * job.tokens + job.tokens * 11 // 10 * shape.hidden * FLOAT32
    here = _running(job, gradients=job.gradients, activations=0, casts=0)
    table = job.way.stream * shape.table
    if not job.sharded:
        here = _add(here, logits_and_loss=job.head_gradient * shape.tied)
        yield _add(here, backward_workspace=job.apart(0) + work + table * (job.again + shape.tied))
        if job.apart(0):  # of the first micro-batch, whose gradients are all apart by now
            yield _add(here, backward_workspace=job.gradients + max(work, table * shape.tied))
        return
    shared = job.reducing(shape.layers) - FLOAT32 * job.trained_of_layer
    last = _reduced(job, _add(here, communication_buffers=shared))
    here = _add(here, communication_buffers=job.reducing(shape.layers))
    if shape.tied:  # the head's gradient and the embeddings', and then their sum, of a unit that is whole no more
        both = _add(here, logits_and_loss=job.head_gradient, backward_workspace=table)
        yield _add(both, backward_workspace=work)
        yield _add(both, unsharded_gradients=table)
        yield _add(last, gathered_layers=-HALF * shape.table)
        return
    yield _add(here, gathered_layers=HALF * shape.table, unsharded_gradients=table, backward_workspace=work)
    yield last
