"""A model's answers to prompts: the samples before and after training, and the stream in `finetune chat`."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from finetune.architecture.varlen_kernel import largest_setting
from finetune.generation.settings import GREEDY, end_tokens, left_padded, without_settings

# Tokens of one batch, padding included, at least and at most: 256 MiB and 16 GiB of keys and values in the cache of
# Llama-3.1-8B in bf16, [2, 32 layers, tokens, 8 heads, 128].
BATCH_TOKENS, MOST_BATCH_TOKENS = 2048, 131_072
PICKED_ROWS = 64
FIRST_ROUND = 128  # new tokens of each row before those that ended leave their batch


@dataclass(frozen=True)
class Answer:
    """A generated answer, and whether its last token ends it; else it was cut at the most new tokens.

    A server's answer has the server's own word for its ending, and how many tokens of the prompt the server read.
    """

    text: str
    ended: bool
    tokens: list[int] = field(default_factory=list, compare=False)
    ending: str = field(default="", compare=False)
    prompt_tokens: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn: by numbers of its own, which neither its batch nor its rank decides."""

    temperature: float  # above 0; a server is greedy at 0
    top_p: float = 1.0  # the likeliest tokens that together have this share
    seed: int | None = 0  # None: a server draws by its own

    def uniform(self, draw: tuple[int, int], token: int) -> float:
        """The number in [0, 1) that picks a token: 53 bits of a hash of seed, row, answer and the token's place."""
        text = f"{self.seed} {draw[0]} {draw[1]} {token}"
        return (int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 11) * 2.0**-53

    def picked(self, logits: Tensor, uniforms: Sequence[float]) -> Tensor:
        """Each row's token, int64 [rows], by inverting the distribution in float64. `logits` are [rows, vocabulary].

        A few rows at a time: with a vocabulary of 152k, a row's shares, their order and the copies of a sort are 6 MB.
        """

        def picked(some: Tensor, numbers: Sequence[float]) -> Tensor:  # by itself, so that no name keeps a sort
            shares = torch.softmax(some.double() / self.temperature, -1)
            if self.top_p < 1:
                ranked, order = shares.sort(dim=-1, descending=True, stable=True)
                left_out = ranked.cumsum(-1) - ranked >= self.top_p  # never the first
                shares = shares.masked_fill(left_out.scatter(-1, order, left_out), 0.0)
            reached = shares.cumsum(-1)
            of_rows = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
            # Right of equal values: a token without a share is never picked.
            return torch.searchsorted(reached, of_rows[:, None] * reached[:, -1:], right=True)[:, 0]

        parts = [slice(start, start + PICKED_ROWS) for start in range(0, len(logits), PICKED_ROWS)]
        picks = torch.cat([picked(logits[part], uniforms[part]) for part in parts])
        return picks.clamp(max=logits.shape[-1] - 1)


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    streamer: Any = None,
) -> str:
    """The model's answer to a prompt that ends where the assistant begins; greedy when `temperature` is 0."""
    options: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature > 0 else dict(GREEDY)
    batch = left_padded([prompt_ids], computing_device(model))
    options |= {"max_new_tokens": max_new_tokens, "streamer": streamer, "use_cache": True}
    return _answers(model, tokenizer, batch, **options)[0].text


def greedy_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    device: torch.device,
    synced: bool = False,
    cached: bool = True,
    show: Callable[[int], bool | None] | None = None,
    sampling: Sampling | None = None,
    draws: Sequence[tuple[int, int]] = (),
    drawn: int = 0,
) -> list[Answer]:
    """The model's greedy answers to several prompts as one left-padded batch: as many forwards as the longest needs.

    Use it for models whose rows may be padded, as `probe/padding.py` finds out. Each answer then equals `answer`'s, up
    to rounding.

    Args:
        device: Computes the answers; weights may be in host memory.
        synced: All ranks run forwards until the last one has its answers.
        cached: Keys and values are kept; otherwise each new token computes all tokens again.
        show: Called with the number of new tokens after each one; True ends all rows there.
        sampling, draws: Tokens are drawn instead; `draws` are each prompt's row and answer number.
        drawn: Tokens that end each prompt and were drawn before.
    """
    batch = left_padded(prompts, device)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "synced_gpus": synced, "use_cache": cached, **GREEDY}
    if show is not None:

        def show_and_go_on(tokens: Tensor, scores: Any, **_: Any) -> Tensor:
            ends = bool(show(tokens.shape[1] - batch["input_ids"].shape[1]))
            return torch.full((len(tokens),), ends, device=tokens.device)

        options["stopping_criteria"] = StoppingCriteriaList([show_and_go_on])
    if sampling is not None:

        def leave_the_picked(tokens: Tensor, logits: Tensor) -> Tensor:
            """All others get no share, so that the likeliest token is the drawn one."""
            place = drawn + tokens.shape[1] - batch["input_ids"].shape[1]
            picked = sampling.picked(logits, [sampling.uniform(draw, place) for draw in draws])
            return torch.full_like(logits, -torch.inf).scatter(-1, picked[:, None], 0.0)

        options["logits_processor"] = LogitsProcessorList([leave_the_picked])
    return _answers(model, tokenizer, batch, **options)


def prompt_batches(lengths: Sequence[int], new: int, most: int) -> list[range]:
    """Prompts with these lengths, in order, in batches with at most `most` tokens including padding and `new` answer
    tokens each. A prompt that is longer by itself is a batch too.

    Lengths (10, 12, 40) with new = 8 and most = 64 give batches [0, 1] (2 x 20 = 40 tokens) and [2] (48).
    """
    batches: list[range] = []
    first = 0
    for end in range(1, len(lengths) + 1):
        tokens = (end + 1 - first) * (max(lengths[first : end + 1]) + new)
        if end == len(lengths) or tokens > most:
            batches.append(range(first, end))
            first = end
    return batches


def kept_bytes(model: PreTrainedModel) -> int:
    """Bytes that a token occupies while its row is answered: its keys and values in all layers, or a layer's widest
    activations if those are more.

    Llama-3.1-8B in bf16: 2 x 32 layers x 8 heads x 128 x 2 bytes = 131,072. A model whose configuration does not say
    how many heads its cache has is counted with all of them.
    """
    config = model.config.get_text_config()
    heads = largest_setting(config, "num_attention_heads") or 1
    width = largest_setting(config, "head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
    width = width or -(-(largest_setting(config, "hidden_size") or 1) // heads)
    cached_heads, layers = largest_setting(config, "num_key_value_heads"), largest_setting(config, "num_hidden_layers")
    return max(2 * (layers or 1) * (cached_heads or heads) * width * _element_size(model), activation_bytes(model))


def activation_bytes(model: PreTrainedModel) -> int:
    """Bytes that a token occupies in a layer where nothing is kept for backward: four times its widest activation."""
    config = model.config.get_text_config()
    widest = largest_setting(config, "intermediate_size") or 4 * (largest_setting(config, "hidden_size") or 1)
    return 4 * widest * _element_size(model)


def _element_size(model: PreTrainedModel) -> int:
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    return embedding.element_size()


def round_ends(new: int) -> list[int]:
    """Numbers of new tokens at which rows that ended leave, up to `new`: 600 gives 128, 256, 512, 600.

    The others are batched again, each after its answer so far. So a batch needs room for the round alone, not for the
    longest answer of all.
    """
    ends: list[int] = []
    while FIRST_ROUND << len(ends) < new:
        ends.append(FIRST_ROUND << len(ends))
    return [*ends, new]


def computing_device(model: nn.Module) -> torch.device:
    """An unsharded model's device: its buffers', or its weights' if it has no buffers (GPT-2, OPT)."""
    return next(chain(model.buffers(), model.parameters())).device


def _answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: dict[str, Tensor], **options: Any
) -> list[Answer]:
    """Each row's answer, up to the token that ends it. Later tokens only pad a row that ended before the others."""
    generate: Callable[..., Tensor] = getattr(model, "generate")  # noqa: B009  # PreTrainedModel is not annotated with it
    ends = end_tokens(model, tokenizer)
    with warnings.catch_warnings(), nullcontext() if options.get("do_sample") else without_settings(model):
        # The warning is about weights in host memory. Each forward gathers them on the GPU.
        warnings.filterwarnings(
            "ignore", message=r"You are calling \.generate\(\) with the `input_ids` being on a device"
        )
        output = generate(
            **batch,
            eos_token_id=ends or None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **options,
        )
    answers = []
    for row in output[:, batch["input_ids"].shape[1] :].tolist():
        length = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
        answers.append(decoded_answer(row[:length], tokenizer, ended=row[length - 1] in ends))
    return answers


def decoded_answer(tokens: list[int], tokenizer: PreTrainedTokenizerBase, *, ended: bool) -> Answer:
    """An answer's tokens, decoded."""
    return Answer(str(tokenizer.decode(tokens, skip_special_tokens=True)).strip(), ended, tokens)
