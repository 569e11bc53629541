"""The moments at which forward or backward may reach its peak, each with its bytes by component.

Forward: in the first layer and in the last, at the head, and in the loss. Backward: where it begins, in its last layers
and its first, and at the embeddings. estimate.py takes each phase's largest moment.

To add a tensor that lives at such a moment: find the function that yields it, and add `{COMPONENT: bytes}` with a
comment that gives the tensor's shape. The peak is at another moment in another recipe, so add the tensor to every
moment at which it lives.
"""

from __future__ import annotations

from collections.abc import Iterator

from finetune.closed_form import constants as c
from finetune.closed_form.constants import FLOAT32, HALF, SORTED_TOKENS, loss_chunk_rows, loss_gradient_rows
from finetune.closed_form.layer import NORMS, LayerStep
from finetune.closed_form.rank import Bytes, RankSizes


def _always_live(rank: RankSizes, *, gradients: int, activations: int, casts: int) -> Bytes:
    """The bytes at every moment in forward and backward."""
    rope = 2 * HALF * rank.tokens * rank.shape.head_size  # cos and sin [T, head_size]
    batch = 32 * rank.tokens  # input_ids, position_ids, shift_labels and supervised [T] int64
    copies = HALF * rank.trained_weights * rank.casts_once  # from a step's first forward to its last backward
    live = {
        c.GRADIENTS: gradients,
        c.ACTIVATIONS: activations + rope + batch,
        c.CAST_WEIGHTS: casts + copies,
        c.GATHERED_LAYERS: rank.always_gathered_bytes,
    }
    return Bytes(rank.static | live)


def _before_backward(rank: RankSizes, *, activations: int, casts: int) -> Bytes:
    """The bytes in a step's last micro-batch, before its backward makes a gradient."""
    gradients = rank.gradient_bytes * (rank.gradients_exist and not rank.keeps_gradients)
    live = _always_live(rank, gradients=gradients, activations=activations, casts=casts)
    live = live.plus({c.UNSHARDED_GRADIENTS: rank.unsharded_gradient_bytes})
    if rank.data_parallel and rank.micro_steps > 1:
        # Earlier micro-batches' gradients, which are not views of DDP's buckets.
        live = live.plus({c.BACKWARD_WORKSPACE: rank.gradient_bytes})
    return live


def forward(rank: RankSizes) -> Iterator[Bytes]:
    """In the first layer and the last, at the head, and in the loss."""
    if not rank.weights_kept:
        yield from _forward(rank)
        return
    # The first micro-batch gathers, and there are no gradients; later ones find all weights gathered.
    for moment in _forward(rank):
        none_yet = {c.GRADIENTS: -rank.gradient_bytes}
        if rank.keeps_gradients:
            none_yet = {c.UNSHARDED_GRADIENTS: -rank.unsharded_gradient_bytes}
        yield moment.plus(none_yet)
    everything = rank.unresharded_bytes(rank.shape.layers) + rank.gathered_head_bytes
    for moment in _forward(rank):
        yield Bytes(moment | {c.GATHERED_LAYERS: rank.always_gathered_bytes + everything, c.COMMUNICATION_BUFFERS: 0})


def _forward(rank: RankSizes) -> Iterator[Bytes]:
    shape, last, layer = rank.shape, rank.shape.layers - 1, rank.gathered_layer_bytes
    residual = rank.residual_bytes  # [T, h]
    if rank.sharded:
        live = _before_backward(rank, activations=residual, casts=0)
        # The first layer's all-gather, besides the output of the embeddings' [vocabulary, h] bfloat16.
        buffers = HALF * shape.embedding_weights + layer
        yield live.plus({c.GATHERED_LAYERS: layer + rank.unresharded_bytes(0), c.COMMUNICATION_BUFFERS: buffers})
    saved, cast = rank.saved_by_layers(last)
    # The layer's input [T, h], and the embeddings' output [T, h], to which the model's forward refers where neither
    # checkpointing nor the first norm saves it.
    saved += residual
    if not rank.recompute_period and not rank.base_trained:
        saved += residual
    live = _before_backward(rank, activations=saved, casts=cast)
    if rank.sharded:
        live = live.plus({c.GATHERED_LAYERS: layer + rank.unresharded_bytes(last), c.COMMUNICATION_BUFFERS: layer})
        yield live.plus({c.COMMUNICATION_BUFFERS: layer})  # its all-gather's output, besides that of the layer before
    saved_in_layer = casts_in_layer = kept_in_layer = norm_bytes = 0
    for step in rank.layer_steps:
        saved_in_layer += step.saved_for_backward
        casts_in_layer += step.cast_weights
        activations, casts = saved_in_layer, casts_in_layer
        if rank.recomputed(last):
            # Approximate: a step's tensors live a little longer than the step, and a norm's tensors (the stream beside
            # it, and its output) up to the next norm. If products are kept, q, k and v are counted twice up to
            # attention. The layer's recomputation takes more in any case.
            if step.name in NORMS:
                norm_bytes = 0
            activations = step.saved_for_backward + norm_bytes + kept_in_layer
            casts = step.cast_weights
            if step.name in NORMS:
                norm_bytes = step.saved_for_backward
            kept_in_layer += step.kept_when_selective * rank.keeps_products
        yield from _in_step(step, live.plus({c.ACTIVATIONS: activations, c.CAST_WEIGHTS: casts}))
    # The head's all-gather, beside its own and the last layer's buffers; and the loss.
    saved, casts = rank.saved_by_layers(last + 1)
    # The norm's output [T, h] is the head's input.
    live = _before_backward(rank, activations=saved + rank.last_norm_bytes + residual, casts=casts)
    if rank.sharded:
        head = rank.gathered_head_bytes
        live = live.plus({c.GATHERED_LAYERS: head + rank.unresharded_bytes(last + 1), c.COMMUNICATION_BUFFERS: head})
        yield live.plus({c.COMMUNICATION_BUFFERS: layer})
        if not head:
            live = live.plus({c.COMMUNICATION_BUFFERS: layer})
    # architecture/loss.py computes the hidden states' gradient [T, h] in forward.
    yield from (live.plus({c.LOGITS_AND_LOSS: residual + size}) for size in _loss(rank))


def _in_step(step: LayerStep, live: Bytes) -> Iterator[Bytes]:
    """At a step's end, and while its weights are dequantised."""
    yield live.plus({c.ACTIVATIONS: step.forward_transient})
    if step.dequantised_weights:
        dequantised = {c.QUANTISATION_WORKSPACE: step.dequantised_weights}
        yield live.plus({c.ACTIVATIONS: step.dequantise_transient} | dequantised)


def _loss(rank: RankSizes) -> Iterator[int]:
    """Bytes besides the hidden states' gradient, by architecture/loss.py.

    They are a chunk's logits [chunk, vocabulary], and the head's gradient [vocabulary, h] where it is trained.
    """
    shape = rank.shape
    chunk = min(rank.tokens, loss_chunk_rows(shape.vocabulary))
    logits, table = chunk * shape.vocabulary, shape.embedding_weights
    head_gradient = FLOAT32 * table * rank.base_trained  # [vocabulary, h] float32
    # The hidden states [chunk, h] bfloat16, their gradient, and the chunk before's gradient.
    states = HALF * chunk * shape.hidden
    live_states = (2 + (rank.tokens > chunk)) * states
    # The logits in bfloat16 and in float32, [chunk, vocabulary] each; the gradient of both takes the former's place.
    at_once = HALF * logits
    rows = min(rank.tokens, loss_gradient_rows(shape.vocabulary, shape.hidden))
    if rank.base_trained and rows > chunk:  # bfloat16 [rows, vocabulary], and the hidden states [rows, h]
        at_once = HALF * rows * (shape.vocabulary + shape.hidden)
    yield head_gradient + live_states + at_once + FLOAT32 * logits
    if rank.base_trained:  # the head's gradient [vocabulary, h] in bfloat16
        yield head_gradient + HALF * table + 2 * states


def backward(rank: RankSizes) -> Iterator[Bytes]:
    """Where it begins, in the last layers and the first, and at the embeddings."""
    layers, period = rank.shape.layers, max(1, rank.recompute_period)
    yield from _at_the_beginning(rank)
    for layer in sorted({*range(max(0, layers - 1 - period), layers), *range(min(period + 1, layers))}):
        yield from _in_layer(rank, layer)
    yield from _at_the_end(rank)


def _at_the_beginning(rank: RankSizes) -> Iterator[Bytes]:
    """The head, with its gradient reduced if FSDP2 gathers it separately, and the last norm."""
    shape, layers, residual = rank.shape, rank.shape.layers, rank.residual_bytes
    activations, casts = rank.saved_by_layers(layers)
    live = _before_backward(rank, activations=activations + rank.last_norm_bytes, casts=casts)
    if rank.sharded:
        # The last layer's all-gather, which runs ahead of its backward.
        prefetched = rank.gathered_layer_bytes * rank.strategy.reshard_after_forward
        live = live.plus({c.GATHERED_LAYERS: rank.unresharded_bytes(layers), c.COMMUNICATION_BUFFERS: prefetched})
    at_head = live.plus({c.LOGITS_AND_LOSS: residual})  # the hidden states' gradient [T, h]
    if rank.gathered_head_bytes:
        gradient = HALF * shape.embedding_weights * rank.base_trained  # [vocabulary, h] bfloat16
        yield at_head.plus({c.GATHERED_LAYERS: rank.gathered_head_bytes, c.UNSHARDED_GRADIENTS: gradient})
        # By then the head is resharded, but not before the last micro-batch where weights are kept.
        yield _reducing_table(rank, at_head).plus({c.GATHERED_LAYERS: rank.gathered_head_bytes * rank.weights_kept})
    elif not shape.tied:  # added to the gradient that exists, or becomes it
        cast = FLOAT32 * shape.embedding_weights * rank.casts_once  # [vocabulary, h] float32
        yield at_head.plus({c.LOGITS_AND_LOSS: rank.head_gradient_bytes, c.BACKWARD_WORKSPACE: cast})
    at_norm = _with_head_gradient(rank, live).plus({c.COMMUNICATION_BUFFERS: rank.reduction_buffer_bytes(0)})
    # As in LayerStep of a norm: the gradient of its output, the same times the weight, and one [T, h] float32.
    yield at_norm.plus({c.BACKWARD_WORKSPACE: 2 * residual + FLOAT32 * rank.tokens * shape.hidden})


def _reducing_table(rank: RankSizes, live: Bytes) -> Bytes:
    """The reduce-scatter of a trained [vocabulary, h] gradient: bfloat16 in, summed in float32, then cast."""
    unsharded = rank.shape.embedding_weights * rank.base_trained
    shard = rank.shard_of(rank.shape.vocabulary, rank.shape.hidden) * rank.base_trained
    return live.plus(
        {
            # [vocabulary, h] bfloat16; where gradients are kept, it has been added to the float32 one.
            c.UNSHARDED_GRADIENTS: HALF * unsharded * (not rank.keeps_gradients),
            c.COMMUNICATION_BUFFERS: FLOAT32 * (unsharded + shard),  # the collective's input, and its output
            c.BACKWARD_WORKSPACE: HALF * shard * (rank.trained_weight_bytes == HALF),  # the output, cast
        }
    )


def _with_head_gradient(rank: RankSizes, live: Bytes) -> Bytes:
    """Add the head's gradient [vocabulary, h], where it stays.

    A tied head's gradient is added to the embeddings' at the end. An untied head's becomes the weight's own.
    """
    if rank.sharded:
        return live.plus({c.UNSHARDED_GRADIENTS: rank.head_gradient_bytes})
    if rank.shape.tied:
        return live.plus({c.LOGITS_AND_LOSS: rank.head_gradient_bytes})
    if rank.gradients_exist:
        return live
    return live.plus({c.GRADIENTS: rank.trained_weight_bytes * rank.shape.embedding_weights * rank.base_trained})


def _in_layer(rank: RankSizes, layer: int) -> Iterator[Bytes]:
    """Recomputation, where there is one, and backward, step by step."""
    activations, casts = rank.saved_by_layers(layer)
    activations += rank.residual_bytes  # its input [T, h]
    finished = rank.shape.layers - 1 - layer  # layers behind this one: their backward is over
    gradients, reduced = rank.gradient_bytes, rank.reduced_weights(finished)
    if not rank.gradients_exist or rank.keeps_gradients:
        gradients = rank.trained_weight_bytes * reduced
    live = _always_live(rank, gradients=gradients, activations=activations, casts=casts)
    if rank.keeps_gradients:  # of layers whose backward is still to come, in the last micro-batch
        waiting = rank.unsharded_gradient_bytes - FLOAT32 * reduced * rank.shards
        live = live.plus({c.UNSHARDED_GRADIENTS: waiting})
    live = live.plus({c.BACKWARD_WORKSPACE: rank.ddp_private_gradient_bytes(layer + 1)})
    live = _with_head_gradient(rank, live)
    if rank.sharded:
        # The next all-gather in backward: the layer before, or after layer 0 untied embeddings [vocabulary, h].
        prefetched = rank.gathered_layer_bytes
        if layer == 0:
            prefetched = HALF * rank.shape.embedding_weights * (not rank.shape.tied)
        prefetched *= rank.strategy.reshard_after_forward
        kept = rank.gathered_layer_bytes + rank.unresharded_bytes(layer)
        if rank.weights_kept:  # until the last micro-batch
            kept = rank.unresharded_bytes(rank.shape.layers) + rank.gathered_head_bytes
        live = live.plus({c.GATHERED_LAYERS: kept})
        live = live.plus({c.COMMUNICATION_BUFFERS: rank.reduction_buffer_bytes(finished) + prefetched})
    saved = casts = 0
    kept = rank.kept_layer_bytes  # by steps that are not recomputed yet
    for step in rank.layer_steps if rank.recomputed(layer) else ():
        saved, casts = saved + step.saved_for_backward, casts + step.cast_weights
        kept -= step.kept_when_selective * rank.keeps_products
        # Beside the gradient [T, h] that waits for backward.
        in_layer = live.plus({c.BACKWARD_WORKSPACE: rank.residual_bytes})
        in_layer = in_layer.plus({c.ACTIVATIONS: saved + kept, c.CAST_WEIGHTS: casts})
        if rank.keeps_products:  # no product runs, and so no 4-bit weight is dequantised
            yield in_layer.plus({c.ACTIVATIONS: step.recompute_transient or step.forward_transient})
        elif step.recompute_transient:
            yield in_layer.plus({c.ACTIVATIONS: step.recompute_transient})
        else:
            yield from _in_step(step, in_layer)
    # The steps in backward's order. A step's saved tensors are freed after it.
    saved, casts, layer_gradients = rank.saved_layer_bytes, rank.cast_layer_bytes, 0
    # A step's weight gradients are bfloat16. If its weights were cast, there are float32 copies of these: 2 + 4 bytes.
    gradient_copies = 3 if rank.numerics.adapters_cast or rank.casts_once else 1
    for step in reversed(rank.layer_steps):
        in_step = live.plus({c.ACTIVATIONS: saved, c.CAST_WEIGHTS: casts})
        in_step = in_step.plus({c.BACKWARD_WORKSPACE: step.backward_transient})
        if rank.sharded:  # bfloat16 gradients of the layer's weights as far as backward has come
            in_step = in_step.plus({c.UNSHARDED_GRADIENTS: layer_gradients + step.weight_gradients})
        else:
            in_step = in_step.plus({c.BACKWARD_WORKSPACE: step.weight_gradients * gradient_copies})
        yield in_step
        if step.dequantised_weights:
            workspace = step.dequantised_weights if step.backward_workspace is None else step.backward_workspace
            yield in_step.plus({c.QUANTISATION_WORKSPACE: workspace})
        saved, casts = saved - step.saved_for_backward, casts - step.cast_weights
        layer_gradients += step.weight_gradients


def _at_the_end(rank: RankSizes) -> Iterator[Bytes]:
    """Trained embeddings' gradient [vocabulary, h], made from their output's gradient [T, h]."""
    if not rank.base_trained:
        return
    shape = rank.shape
    workspace = rank.residual_bytes
    if rank.tokens > SORTED_TOKENS:  # as kernel_workspaces.py: token ids [T] int64 four times, partial sums [1.1 T, h]
        workspace += 32 * rank.tokens + rank.tokens * 11 // 10 * shape.hidden * FLOAT32
    live = _always_live(rank, gradients=rank.gradient_bytes, activations=0, casts=0)
    table = HALF * shape.embedding_weights  # [vocabulary, h] bfloat16
    if rank.keeps_gradients:
        if rank.micro_steps > 2:  # a micro-batch between the first and the last
            between = {c.GRADIENTS: -rank.gradient_bytes, c.UNSHARDED_GRADIENTS: rank.unsharded_gradient_bytes + table}
            yield live.plus({**between, c.BACKWARD_WORKSPACE: workspace, c.GATHERED_LAYERS: table * (not shape.tied)})
        live = live.plus({c.UNSHARDED_GRADIENTS: 2 * table})  # the embeddings' [vocabulary, h] float32
    if rank.sharded:
        yield from _sharded_embeddings(rank, live, workspace, table)
        if rank.weights_kept:  # in a micro-batch before the last
            everything = rank.unresharded_bytes(rank.shape.layers) + rank.gathered_head_bytes
            kept = live.plus({c.GATHERED_LAYERS: everything})
            yield from _sharded_embeddings(rank, kept, workspace, table)
        return
    live = live.plus({c.LOGITS_AND_LOSS: rank.head_gradient_bytes * shape.tied})
    private = rank.ddp_private_gradient_bytes(0)
    if rank.casts_once:
        # The bfloat16 copy's gradient is made, or made and added to the head's; then it is cast to float32.
        live = live.plus({c.BACKWARD_WORKSPACE: private})
        in_float32 = FLOAT32 * shape.embedding_weights  # [vocabulary, h]; a second one if a gradient exists
        not_yet_made = in_float32 * (not rank.gradients_exist)
        yield live.plus({c.BACKWARD_WORKSPACE: table + max(workspace, table * shape.tied), c.GRADIENTS: -not_yet_made})
        casting = live.plus({c.LOGITS_AND_LOSS: -rank.head_gradient_bytes * shape.tied})
        yield casting.plus({c.BACKWARD_WORKSPACE: table + in_float32 * rank.gradients_exist})
        return
    # A new table [vocabulary, h] where one exists to which it is added, and one more where the head is tied.
    tables = table * (rank.gradients_exist + shape.tied)
    yield live.plus({c.BACKWARD_WORKSPACE: private + workspace + tables})
    if private:  # the first micro-batch, whose gradients are all outside DDP's buckets by now
        yield live.plus({c.BACKWARD_WORKSPACE: rank.gradient_bytes + max(workspace, table * shape.tied)})


def _sharded_embeddings(rank: RankSizes, live: Bytes, workspace: int, table: int) -> Iterator[Bytes]:
    """The embeddings' gradient under FSDP2: made unsharded, then reduced and scattered."""
    shape = rank.shape
    gathered = HALF * shape.embedding_weights  # [vocabulary, h] bfloat16
    buffers = rank.reduction_buffer_bytes(shape.layers)
    # By the time the table is reduced the last layer's reduce-scatter is over.
    without_layer = live.plus({c.COMMUNICATION_BUFFERS: buffers - FLOAT32 * rank.trained_layer_weights})
    reducing = _reducing_table(rank, without_layer)
    live = live.plus({c.COMMUNICATION_BUFFERS: buffers})
    if not shape.tied:
        yield live.plus({c.GATHERED_LAYERS: gathered, c.UNSHARDED_GRADIENTS: table, c.BACKWARD_WORKSPACE: workspace})
        yield reducing
        return
    # The head's gradient and the embeddings', then their sum; the weights are resharded before it is reduced.
    both = live.plus({c.LOGITS_AND_LOSS: rank.head_gradient_bytes, c.BACKWARD_WORKSPACE: table})
    yield both.plus({c.BACKWARD_WORKSPACE: workspace})
    yield both.plus({c.UNSHARDED_GRADIENTS: table})
    yield reducing.plus({c.GATHERED_LAYERS: -gathered})
