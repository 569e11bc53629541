"""Settings under which a model answers: no gradients, the library's attention, greedy, its own end tokens.

Training runs under an attention without a cache. Answering borrows the model for a while with transformers' own kernel,
and returns it unchanged. A greedy answer takes the likeliest token each time: of the base's generation settings only
the end tokens count, because beams, penalties and least lengths would give other answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune.architecture.attention import use_librarys
from finetune.model.build import decoder_parts

# None overrides what the model's own generation settings say of sampling.
GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
# Settings in a base's generation_config.json that change greedy answers, and the value with which they do not. A run is
# measured without them, and its exports are served without them.
PENALTIES = {"repetition_penalty": 1, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0, "num_beams": 1,
             "encoder_no_repeat_ngram_size": 0, "num_beam_groups": 1, "penalty_alpha": 0, "guidance_scale": 1,
             "min_length": 0, "min_new_tokens": 0} | dict.fromkeys(
    ("exponential_decay_length_penalty", "bad_words_ids", "force_words_ids", "suppress_tokens", "sequence_bias",
     "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "dola_layers"))  # fmt: skip


@contextmanager
def answering(model: nn.Module) -> Iterator[nn.Module]:
    """Within the block, the model is in evaluation mode and under transformers' own attention."""
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


def may_share_a_batch(probed: Mapping[str, Any]) -> bool:
    """Whether a probe's facts let prompts share a left-padded batch. Facts of a recipe without a probe do not."""
    padding = probed.get("padding")
    return isinstance(padding, Mapping) and padding.get("same") is True


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, int64 [prompts, longest], each prompt at the end of its row.

    A row is padded with its own first token, because the usual padding token is often the one that ends an answer.
    """
    longest = max(map(len, prompts))
    rows = [[prompt[0]] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    masks = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(rows, dtype=torch.int64, device=device),
        "attention_mask": torch.tensor(masks, dtype=torch.int64, device=device),
    }


@contextmanager
def without_settings(model: PreTrainedModel, **settings: Any) -> Iterator[None]:
    """Within the block, the model has `settings` alone for its generation settings. generate() reads a base's own ones
    for whatever its caller leaves out."""
    own = model.generation_config
    model.generation_config = GenerationConfig(**settings)
    try:
        yield
    finally:
        model.generation_config = own


def stop_on(decoder: PreTrainedModel, stops: Iterable[int]) -> list[int]:
    """Add the tokens that end the training's answers to the model's generation settings, which answers and exports
    follow, and take penalties out. Returns the tokens that the settings lacked."""
    settings = getattr(decoder, "generation_config", None)
    for name in penalties_of(decoder):
        setattr(settings, name, getattr(GenerationConfig(), name))
    listed = getattr(settings, "eos_token_id", None)
    own = [token for token in (listed if isinstance(listed, list) else [listed]) if token is not None]
    lacking = [token for token in stops if token not in own]
    if settings is not None and lacking:
        settings.eos_token_id = [*own, *lacking]
    return lacking


def penalties_of(decoder: PreTrainedModel) -> dict[str, Any]:
    """The model's generation settings that change greedy answers."""
    settings = vars(getattr(decoder, "generation_config", None) or GenerationConfig())
    return {name: value for name, value in settings.items() if _is_penalty(name, value)}


def without_penalties(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A generation_config.json's settings without those that change greedy answers."""
    return {name: value for name, value in settings.items() if not _is_penalty(name, value)}


def _is_penalty(name: str, value: Any) -> bool:
    return name in PENALTIES and value is not None and value != PENALTIES[name]


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end an answer, from the tokenizer and the model's generation settings."""
    return ends_by_settings(getattr(model, "generation_config", None), tokenizer)


def ends_by_settings(settings: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end an answer, from the tokenizer and generation settings."""
    listed = getattr(settings, "eos_token_id", None)
    ends = set(listed if isinstance(listed, list) else [listed]) | {tokenizer.eos_token_id}
    return sorted(token for token in ends if token is not None)
