"""Summed token cross-entropy that never holds all logits.

Llama 3's head turns 8,192 tokens into 4.2 GB of float32 logits, and their gradient takes as much again. Here the head
is applied to a few hundred tokens at a time. The same pass computes the gradients that backward needs, for the hidden
states and the head. So no logits outlive their chunk, and nothing is recomputed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from finetune.architecture.router_loss import RouterLoss

# One chunk's float32 logits stay near this size: 512 tokens of Llama 3's vocabulary, enough for a matrix product to be
# bound by arithmetic rather than by reading the head, and 32 times less than 16k tokens would need at once.
CHUNK_BYTES = 256 * 2**20
# A GPU computes a product in tiles of 128 or 256 rows, and a tile that is not full takes as long: 523 rows cost as much
# as 640 or 768.
TILE = 256
BLOCKS = (256, 192, 128, 64)  # columns; the vocabularies of models are multiples of one, as a rule
# Tokens for which a trained head's float32 gradient is read and written once, at most. By arithmetic an H100 reads and
# writes Llama 3 8B's 2.1 GB in 1.4 ms. The product takes it 0.7 ms for 512 tokens, 2.8 ms for 2,048.
GRADIENT_TOKENS = 2048
# Device type -> what computes a chunk's losses, whose slopes overwrite the product (compiled/loss_kernel.py). Rows of
# 16-bit logits are then multiples of 16 bytes. Empty: all is computed as written.
ONE_KERNEL: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {}
ALIGNED = 8  # words


@dataclass(frozen=True)
class LogitTransform:
    """A model's change to its head's product z: `inner * z`, or `outer * tanh(inner * z)` if it is capped.

    A scale is `inner` (Granite, Cohere). A soft cap c is (1/c, c) (Gemma 2).
    """

    inner: float = 1.0
    outer: float | None = None

    def apply_(self, logits: Tensor) -> Tensor:
        """Turn the head's float32 product into logits, in place. With a cap the tanh stays there."""
        if self.inner != 1:
            logits.mul_(self.inner)
        if self.outer is None:
            return logits
        return logits.tanh_() * self.outer

    def chain_(self, slope: Tensor, overwritten: Tensor) -> Tensor:
        """d loss / d product from d loss / d logits, both [chunk, vocabulary]. It overwrites one argument;
        `overwritten` is what `apply_` left in its argument's place.
        """
        if self.outer is not None:
            slope = overwritten.square_().neg_().add_(1).mul_(slope).mul_(self.outer)
        if self.inner == 1:
            return slope
        return slope.mul_(self.inner)


AS_IT_IS = LogitTransform()


class OwnRows(NamedTuple):
    """Rows of a head that are trained while the others are frozen."""

    ids: Tensor  # int64 [rows]: where they stand in the head
    weight: Tensor  # [rows, hidden_size]


def summed_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    supervised: Tensor | None = None,
    transform: LogitTransform = AS_IT_IS,
    own: OwnRows | None = None,
    answer_lengths: Sequence[int] | None = None,
) -> Tensor:
    """Sum over supervised positions of -log softmax(transform(hidden @ weight.T + bias))[target].

    Args:
        hidden: [..., hidden_size].
        weight: [vocabulary, hidden_size].
        targets: [...], already shifted; -100 where a position is not supervised.
        supervised: int64, the flattened positions that are not -100. The head is applied to these alone: in a
            conversation, to the answers.
        own: Rows that replace rows of `weight`, without the bias, and without a copy of the whole.
        answer_lengths: How many supervised positions each document has, in order, on the host. Each document then has
            its own sum, in the order of its tokens. So the documents beside it do not change the sum.

    Returns a float32 scalar, or [documents] with `answer_lengths`. If the head is trained, backward then computes the
    logits a second time, since how much each document counts is not known before. Matrix products run in autocast's
    dtype if autocast is on, else in `hidden`'s. Softmax, sum and the head's gradient accumulate in float32.

    Gradients are for one backward: neither `retain_graph` nor higher derivatives work. torch 2.13's chunked
    `linear_cross_entropy` has the same idea, but torch 2.11 lacks it, and its sum in bf16 is up to 3.8 % off.
    """
    if answer_lengths is not None:
        assert supervised is not None
        if not torch.is_grad_enabled():
            passed = _pass(hidden, weight, bias, own, targets, supervised, transform, (False,) * 4, by_token=True)
            return _sums(passed.lost, answer_lengths)
        ids, rows = own or (None, None)
        counts = tuple(answer_lengths)
        sums = _ByDocument.apply(hidden, weight, bias, rows, ids, targets, supervised, counts, transform)  # type: ignore[no-untyped-call]
        return cast(Tensor, sums)
    if torch.is_grad_enabled():
        ids, rows = own or (None, None)
        applied = _ChunkedCrossEntropy.apply(hidden, weight, bias, rows, ids, targets, supervised, transform)  # type: ignore[no-untyped-call]
        return cast(Tensor, applied)
    return _pass(hidden, weight, bias, own, targets, supervised, transform, (False,) * 4).loss


def _sums(lost: Tensor, counts: Sequence[int]) -> Tensor:
    """The sum of each stretch of `lost`, float32 [stretches]. There are no atomics, so equal inputs give equal sums."""
    if not counts:
        return lost.new_zeros(0)
    return torch.stack([stretch.sum() for stretch in lost.split(list(counts))])


def chunk_rows(vocabulary: int) -> int:
    """Tokens that the head is applied to at a time: as many tiles as fit CHUNK_BYTES, at least one."""
    return max(1, CHUNK_BYTES // (4 * vocabulary * TILE)) * TILE


def gradient_rows(vocabulary: int, hidden_size: int) -> int:
    """Tokens whose slopes wait for one addition to a trained head's float32 gradient, in 16 bits: one chunk or several.

    They cost no memory. Behind the last chunk the gradient is copied to 16 bits, [vocabulary, hidden_size]. The slopes
    [tokens, vocabulary] in 16 bits and one chunk's float32 logits are freed before, and take no more.

    Llama 3 8B: 2,048 slopes, and 512 logits of twice the bytes, are 3,072 rows of a vocabulary. The copy has 4,096.
    """
    chunk = chunk_rows(vocabulary)
    most = min(GRADIENT_TOKENS, hidden_size - 2 * chunk)
    return max(1, most // chunk) * chunk


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model below the head. Its forward gives the last hidden states."""
    base = model.base_model
    if base is model:  # Llama 4's text model has its family's prefix and a name of its own
        base = next((child for child in model.children() if isinstance(child, PreTrainedModel)), base)
    return cast("PreTrainedModel", base)


def put_loss_into_forward(
    model: PreTrainedModel, transform: LogitTransform = AS_IT_IS, router: RouterLoss | None = None
) -> None:
    """Teach `model.forward` and its head `shift_labels` and `supervised`: a scalar loss, and no logits in between.

    With `answer_lengths` the loss is one sum for each document, [documents], and none of its router.

    The auxiliary loss of its router is added in training; a held-out loss is the cross-entropy alone.

    The head computes the loss in its own forward because under ZeRO-3 and FSDP its weight is gathered only there. Only
    the instance changes, so saving, generation and peft see the class they know.
    """
    library_forward = model.forward

    @functools.wraps(library_forward)  # generation reads the signature
    def forward(
        *args: Any,
        shift_labels: Tensor | None = None,
        supervised: Tensor | None = None,
        answer_lengths: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Any:
        if shift_labels is None:
            return library_forward(*args, **kwargs)
        arguments = {key: value for key, value in kwargs.items() if value is not None}
        balances, options = None, {}
        if router is not None and model.training and answer_lengths is None:
            balances, options = router, {"output_router_logits": True}
        decoded = decoder_of(model)(*args, use_cache=False, **arguments, **options)
        hidden = decoded.last_hidden_state  # [batch, tokens, hidden]
        loss = model.get_output_embeddings()(hidden, shift_labels, supervised, transform, answer_lengths)
        if balances is None:
            return loss
        documents = arguments["position_ids"], shift_labels, arguments.get("document_lengths", ())
        return loss + balances.summed(decoded.router_logits, *documents)

    model.forward = forward
    head = model.get_output_embeddings()
    # A bound method, not a closure: peft copies the head for modules_to_save, and the copy must use its own weight.
    head.forward = MethodType(_head_forward, head)


def _head_forward(
    head: nn.Linear,
    hidden: Tensor,
    shift_labels: Tensor | None = None,
    supervised: Tensor | None = None,
    transform: LogitTransform = AS_IT_IS,
    answer_lengths: Sequence[int] | None = None,
) -> Tensor:
    if shift_labels is None:
        return nn.Linear.forward(head, hidden)
    return summed_cross_entropy(
        hidden, head.weight, shift_labels, head.bias, supervised, transform, answer_lengths=answer_lengths
    )


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor | None,
        ids: Tensor | None,
        targets: Tensor,
        supervised: Tensor | None,
        transform: LogitTransform,
    ) -> Tensor:
        own = None if rows is None or ids is None else OwnRows(ids, rows)
        passed = _pass(hidden, weight, bias, own, targets, supervised, transform, ctx.needs_input_grad)
        ctx.save_for_backward(*passed.gradients)
        return passed.loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a second copy of the head's gradient would be 2.1 GB for Llama 3 8B.
        return (*(None if g is None else g.mul_(upstream[0]) for g in ctx.saved_tensors), None, None, None, None)


class _ByDocument(torch.autograd.Function):
    """Sums by document. Their slopes come in backward, one for each document."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor | None,
        ids: Tensor | None,
        targets: Tensor,
        supervised: Tensor,
        counts: tuple[int, ...],
        transform: LogitTransform,
    ) -> Tensor:
        own = None if rows is None or ids is None else OwnRows(ids, rows)
        ctx.counts, ctx.transform, ctx.dtype = counts, transform, _compute_dtype(hidden)
        ctx.again = any(ctx.needs_input_grad[1:4])  # a frozen head: one gradient for each token, scaled in backward
        wants = (ctx.needs_input_grad[0] and not ctx.again, False, False, False)
        passed = _pass(hidden, weight, bias, own, targets, supervised, transform, wants, by_token=True)
        if ctx.again:
            ctx.save_for_backward(hidden, weight, bias, rows, ids, targets, supervised)
        else:
            ctx.save_for_backward(passed.gradients[0], supervised)
        return _sums(passed.lost, counts)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0].new_zeros(0)
        if ctx.counts:  # the value of each token's document, [tokens]
            scale = torch.cat([value.expand(count) for value, count in zip(upstream[0], ctx.counts, strict=True)])
        if not ctx.again:
            gradient, supervised = ctx.saved_tensors
            if gradient is not None:
                flat = gradient.view(-1, gradient.shape[-1])
                flat.mul_(scale.new_zeros(len(flat)).index_copy_(0, supervised, scale).unsqueeze(1))
            return gradient, *(None,) * 8
        hidden, weight, bias, rows, ids, targets, supervised = ctx.saved_tensors
        own = None if rows is None else OwnRows(ids, rows)
        wants = ctx.needs_input_grad[:4]
        passed = _pass(
            hidden, weight, bias, own, targets, supervised, ctx.transform, wants, scale=scale, dtype=ctx.dtype
        )
        return *passed.gradients, *(None,) * 5


class _Passed(NamedTuple):
    """A pass's results."""

    lost: Tensor  # float32 [tokens that the head was applied to]: each one's loss; empty unless asked for
    loss: Tensor  # float32 []: their sum
    gradients: tuple[Tensor | None, ...]  # for hidden, weight, bias and own rows


def _pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    own: OwnRows | None,
    targets: Tensor,
    supervised: Tensor | None,
    transform: LogitTransform,
    wants: Sequence[bool],
    *,
    by_token: bool = False,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> _Passed:
    """One pass over chunks of tokens: the loss, and the gradients that are wanted for hidden, weight, bias and own
    rows.

    Args:
        by_token: Keep each token's loss.
        scale: float32 [supervised], d result / d loss of each token; None: 1.
        dtype: The products' number format; None: autocast decides.
    """
    dtype, size = dtype or _compute_dtype(hidden), chunk_rows(weight.shape[0])
    flat, target = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)  # [tokens, hidden_size], [tokens]
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.zeros_like(flat) if wants[0] else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants[2] else None
    cast_weight, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = None if own is None else _Rows(own, dtype, learn=wants[3])
    # Float32 logits [chunk, vocabulary] of one chunk after another, beside a product in 16 bits.
    tokens = len(flat) if supervised is None else len(supervised)
    head = _HeadGradient(weight, dtype, tokens) if wants[1] else None
    room = None if dtype == torch.float32 else weight.new_empty((min(size, tokens), len(weight)), dtype=torch.float32)
    options = {"all_learned": supervised is not None, "learn": any(wants[:4])}
    lost_of_chunks = []
    scales = iter(()) if scale is None else iter(scale.split(size))
    with torch.autocast(hidden.device.type, enabled=False):
        for now in token_chunks(len(flat), supervised, size):
            part = flat[now].to(dtype)
            room_of_product = None if head is None else head.room_for(part)
            product = _linear(part, cast_weight, cast_bias, room_of_product)  # [chunk, vocabulary]
            if rows is not None:
                rows.put_products(part, product)
            lost, slope = loss_and_slope(product, room, target[now], transform, scale=next(scales, None), **options)
            loss += lost.sum()
            if by_token:
                lost_of_chunks.append(lost.squeeze(1))
            del lost
            del product, room_of_product  # frees it before the next chunk allocates its own
            if slope is None:
                continue
            through_rows = None if rows is None else rows.take_slope_(slope, part)
            if grad_bias is not None:
                grad_bias += slope.sum(0)
            if grad_hidden is not None:
                through = slope @ cast_weight
                if through_rows is not None:
                    through = through_rows + through
                grad_hidden[now] = through.to(flat.dtype)
            if head is not None:
                head.add(slope, part)
            del slope
    grad_weight = None if head is None else head.finished()
    del room, head  # before gradients are copied to the weights' format
    gradients = grad_hidden, grad_weight, grad_bias, None if rows is None else rows.gradient
    likes = hidden, weight, bias, None if own is None else own.weight
    results = (
        None if gradient is None or like is None else gradient.to(like.dtype).view(like.shape)
        for gradient, like in zip(gradients, likes, strict=True)
    )
    lost_by_token = torch.cat(lost_of_chunks) if lost_of_chunks else loss.new_zeros(0)
    return _Passed(lost_by_token, loss, tuple(results))


class _HeadGradient:
    """A trained head's float32 gradient in a pass over chunks.

    In 16 bits several chunks' slopes wait, and one product adds them all:

        slopes  | chunk 1 | chunk 2 | chunk 3 | chunk 4 |  [2,048, vocabulary]: each product's own memory
        states  |    1    |    2    |    3    |    4    |  [2,048, hidden_size]
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, tokens: int) -> None:
        self._total = torch.zeros_like(weight, dtype=torch.float32)
        self._slopes: Tensor | None = None
        self._states, self._waiting = weight.new_empty(0), 0
        # A float32 head gets its gradient without a copy, so there is no room that is free until then.
        at_once = min(gradient_rows(*weight.shape), tokens)
        if weight.dtype == dtype and dtype.itemsize == 2 and at_once > chunk_rows(len(weight)):
            self._slopes, self._states = (weight.new_empty((at_once, width), dtype=dtype) for width in weight.shape)

    def room_for(self, part: Tensor) -> Tensor | None:
        """Memory for a chunk's product [chunk, vocabulary], which its slope overwrites; None: the chunk's own."""
        if self._slopes is None:
            return None
        if self._waiting + len(part) > len(self._slopes):
            self._add_waiting(self._slopes)
        return self._slopes[self._waiting : self._waiting + len(part)]

    def add(self, slope: Tensor, part: Tensor) -> None:
        """slope: [chunk, vocabulary], in the memory of `room_for`; part: [chunk, hidden_size]."""
        if self._slopes is None:
            _add_product(self._total, slope, part)
            return
        self._states[self._waiting : self._waiting + len(part)] = part
        self._waiting += len(part)

    def finished(self) -> Tensor:
        """The gradient, float32 [vocabulary, hidden_size]. Nothing waits any more."""
        if self._slopes is not None:
            self._add_waiting(self._slopes)
        self._slopes, self._states = None, self._states.new_empty(0)
        return self._total

    def _add_waiting(self, slopes: Tensor) -> None:
        if self._waiting:
            _add_product(self._total, slopes[: self._waiting], self._states[: self._waiting])
        self._waiting = 0


class _Rows:
    """Own rows in a pass over chunks: their products replace the head's, and each chunk's gradient is added."""

    def __init__(self, own: OwnRows, dtype: torch.dtype, *, learn: bool) -> None:
        self._ids, self._weight = own.ids, own.weight.to(dtype)
        self.gradient = torch.zeros_like(own.weight, dtype=torch.float32) if learn else None

    def put_products(self, part: Tensor, product: Tensor) -> None:
        """part: [chunk, hidden_size]; product: [chunk, vocabulary], changed in place."""
        product.index_copy_(1, self._ids, F.linear(part, self._weight))

    def take_slope_(self, slope: Tensor, part: Tensor) -> Tensor:
        """The hidden states' gradient through these rows, [chunk, hidden_size]; nothing of it is left in `slope`."""
        own = slope[:, self._ids]  # [chunk, rows]
        slope.index_fill_(1, self._ids, 0)
        if self.gradient is not None:
            _add_product(self.gradient, own, part)
        return own @ self._weight


def token_chunks(tokens: int, supervised: Tensor | None, size: int) -> Iterable[Tensor | slice]:
    """Positions, a chunk at a time."""
    if supervised is not None:
        return cast("tuple[Tensor, ...]", supervised.split(size))
    return (slice(start, start + size) for start in range(0, tokens, size))


def _linear(given: Tensor, weight: Tensor, bias: Tensor | None, result: Tensor | None) -> Tensor:
    """`F.linear`, into the memory of `result` if there is some."""
    if result is None:
        return F.linear(given, weight, bias)
    if bias is None:
        return torch.mm(given, weight.T, out=result)
    return torch.addmm(bias, given, weight.T, out=result)


def _add_product(total: Tensor, slope: Tensor, part: Tensor) -> None:
    """Add slope.T @ part to a float32 `total`, in place.

    slope: [chunk, rows]; part: [chunk, hidden_size]. It is added inside of the product, except on a CPU in 16 bits,
    where a product has 16 bits too.
    """
    if slope.dtype == total.dtype:
        total.addmm_(slope.T, part)
    elif total.device.type == "cpu":
        total += slope.T @ part
    else:  # 1 GB less for Llama 3 8B's head, which would be written and read for every chunk
        torch.addmm(total, slope.T, part, out_dtype=total.dtype, out=total)


def loss_and_slope(
    product: Tensor,
    room: Tensor | None,
    target: Tensor,
    transform: LogitTransform,
    *,
    all_learned: bool,
    learn: bool,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Each token's loss [chunk, 1], and with `learn` d loss / d product, which overwrites the product.

    product: [chunk, vocabulary]; target: [chunk]; room: float32 [chunk or more, vocabulary] for its logits, None if the
    product is float32 itself; scale: float32 [chunk], a factor for each token's slope. Loss and gradient share one
    softmax, computed in place.
    """
    kernel, (tokens, words) = ONE_KERNEL.get(product.device.type), product.shape
    plain = all_learned and learn and scale is None and transform.outer is None and room is not None
    # torch.compile would make a graph of its own for one token.
    if kernel is not None and plain and tokens > 1 and words % ALIGNED == 0:
        return kernel(product, target, transform.inner), product
    wide = product if room is None else room[: len(product)].copy_(product)
    logits = transform.apply_(wide)  # one more such tensor where there is a cap
    # The log-sum-exp of logits z follows from their softmax p at any token, as z - log p; at the highest, p is not 0.
    highest, where = _highest(product if transform == AS_IT_IS else logits)
    at = target.clamp(min=0).unsqueeze(1)
    below = highest.float() - logits.gather(1, at)
    slope = torch.softmax(logits, dim=1, out=logits)
    lost = below - slope.gather(1, where).log()  # [chunk, 1]
    learned = None if all_learned else (target >= 0).unsqueeze(1)
    if learned is not None:
        lost = lost.where(learned, 0)
    if not learn:
        return lost, None
    slope.scatter_add_(1, at, slope.new_full(at.shape, -1.0))
    if learned is not None:
        slope.mul_(learned)
    if scale is not None:
        slope.mul_(scale.unsqueeze(1))
    slope = transform.chain_(slope, wide)
    return lost, slope if room is None else product.copy_(slope)


def _highest(values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value in each row of [rows, columns], and one of its places, [rows, 1] each.

    torch's maximum with indices takes one value at a time. So the rows' blocks give their maxima without indices, which
    is one pass over all values, and the indices are those of one block: 501 blocks of 256 for Llama 3's vocabulary.
    """
    rows, columns = values.shape
    width = next((size for size in BLOCKS if columns % size == 0 and columns >= 100 * size), None)
    if width is None:
        return values.max(dim=1, keepdim=True)
    blocks = values.view(rows, columns // width, width)
    block = blocks.amax(dim=2).argmax(dim=1).view(rows, 1, 1)
    highest, inside = blocks.gather(1, block.expand(rows, 1, width)).squeeze(1).max(dim=1, keepdim=True)
    return highest, inside + width * block.squeeze(1)
