"""Answers of a model to prompts: the samples before and after training, and what `finetune chat` streams.

Training runs under an attention without a cache; answering borrows the model for a while with transformers' own
kernel, and gives it back as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from finetune.architecture.attention import use_librarys
from finetune.model.build import decoder_parts


@contextmanager
def answering(model: nn.Module) -> Iterator[nn.Module]:
    """The model in evaluation mode and under an attention of transformers' own, for the time of the block."""
    inner = decoder_parts(model)
    trained_with, was_training = inner.config._attn_implementation, model.training
    use_librarys(inner)
    model.eval()
    try:
        with torch.no_grad():  # inference_mode's tensors cannot be sharded
            yield model
    finally:
        inner.set_attn_implementation(trained_with)
        model.train(was_training)


def answer(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    streamer: Any = None,
) -> str:
    """The model's answer to a prompt that ends where the assistant begins; greedy when `temperature` is 0."""
    device = next(model.buffers()).device  # parameters may be offloaded
    inputs = torch.tensor([list(prompt_ids)], device=device)
    options: dict[str, Any] = {"do_sample": temperature > 0, "use_cache": True, "max_new_tokens": max_new_tokens}
    # None overrides what the model's own generation settings say of sampling.
    options |= {"temperature": temperature} if temperature > 0 else dict.fromkeys(("temperature", "top_p", "top_k"))
    generate: Callable[..., torch.Tensor] = getattr(model, "generate")  # noqa: B009  # peft and transformers both have it
    output = generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        eos_token_id=end_tokens(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=streamer,
        **options,
    )
    return str(tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True)).strip()


def end_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end an answer: the tokenizer's and those of the model's generation settings."""
    config = getattr(decoder_parts(model), "generation_config", None)
    listed = getattr(config, "eos_token_id", None)
    ends = set(listed if isinstance(listed, list) else [listed]) | {tokenizer.eos_token_id}
    return sorted(token for token in ends if token is not None)
