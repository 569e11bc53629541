"""Checks the sizes in a config.json before a model is built: whole numbers, from 1 to the largest that any model has.

Without it a billion layers would be built one by one, for days.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from finetune.output_stream import one_line
from finetune.untrusted.json_files import inner_values, kind_of_value, read_object, unreadable

# The largest allowed. The largest models known in 2026 have 126 layers, 2^18 tokens, 53,248 inner features.
LAYERS, HEADS, WIDTH, VOCABULARY, EXPERTS, POSITIONS = 1_000, 2**14, 2**20, 2**24, 2**14, 2**40
MODEL_SIZES: dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "num_heads"), HEADS),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "d_ff", "dim", "ffn_dim"), WIDTH
    ),
    **dict.fromkeys(("head_dim", "kv_channels", "moe_intermediate_size", "embedding_size", "d_kv", "mlp_dim"), WIDTH),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "padded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), EXPERTS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "sliding_window"), POSITIONS),
}
MXFP4 = "mxfp4"
# A model may have none of these.
MAY_BE_ZERO = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "sliding_window")
MOST_PARAMETERS = 10**14  # a hundred times the largest known model
PARTS = ("text_config", "vision_config", "audio_config")
SECTION_KEYS = (*PARTS, "quantization_config", "rope_scaling", "rope_parameters")
TEXT_KEYS = ("model_type", "hidden_act", "torch_dtype", "dtype", "attn_implementation")
MOST_ENTRIES = 50_000  # in all lists and sections of a config.json


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json and check its sizes. Raises FinetuneError, in one line that begins with the path, for the first
    value that no model can have."""
    config = read_object(path)
    count, level = 0, [config]
    while level:
        count += len(level)
        if count > MOST_ENTRIES:
            raise unreadable(path, f"holds more than {MOST_ENTRIES:,} values, which no configuration does")
        level = inner_values(level)
    for place, section in _sections(config):
        for wrong in _wrong(section):
            raise unreadable(path, f"{place}{wrong}", "correct the file, or fetch it again")
        if (parameters := _parameters(section)) > MOST_PARAMETERS:
            raise unreadable(path, f"{place}its sizes make {parameters:.0e} weights, more than any model has")
    return config


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", config
    for name in PARTS:
        if isinstance(section := config.get(name), dict):
            yield f"{name}: ", section


def _wrong(section: Mapping[str, Any]) -> Iterator[str]:
    for names, kind, words in ((SECTION_KEYS, dict, "a section"), (TEXT_KEYS, str, "text")):
        for name in names:
            if section.get(name) is not None and not isinstance(section[name], kind):
                yield f"{name} is {kind_of_value(section[name])}, and must be {words}"
    classes = section.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        yield "architectures is not a list of names"
    for name, most in MODEL_SIZES.items():
        for value in _values(section.get(name)):
            if type(value) is not int:
                shown = kind_of_value(value) if isinstance(value, dict | list | str) else one_line(value, 30)
                yield f"{name} is {shown}, and must be a whole number"
            least = 0 if name in MAY_BE_ZERO else 1
            if type(value) is int and not least <= value <= most:
                number = f"{value:,}" if abs(value) < 10**30 else "a number of more than 30 digits"
                yield f"{name} is {one_line(number, 40)}, and must be from {least} to {most:,}"
    heads, shared = section.get("num_attention_heads"), section.get("num_key_value_heads")
    if type(heads) is int and type(shared) is int and heads % shared:
        yield f"num_attention_heads is {heads}, and must be a multiple of num_key_value_heads, {shared}"


def _values(value: Any) -> list[Any]:
    """One size for all layers, or a list with one for each (OpenELM, Gemma 3n)."""
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]


def _parameters(section: Mapping[str, Any]) -> float:
    """The approximate number of weights in a decoder with these sizes."""

    def largest(*names: str) -> float:
        return max((float(value) for name in names for value in _values(section.get(name))), default=0.0)

    hidden = largest("hidden_size", "n_embd", "d_model", "dim")
    layers = largest("num_hidden_layers", "n_layer", "n_layers")
    inner = largest("intermediate_size", "n_inner", "d_ff", "ffn_dim", "moe_intermediate_size")
    attention = largest("head_dim") * largest("num_attention_heads", "n_head")
    experts = max(1.0, largest("num_experts", "num_local_experts", "n_routed_experts"))
    every_layer = 3 * hidden * inner * experts + 4 * hidden * max(attention, 1.0)
    return layers * every_layer + 2 * largest("vocab_size") * hidden


def expert_counts(config: Mapping[str, Any]) -> set[int]:
    """The numbers under keys that speak of experts, in this section of a configuration and in those below it."""
    below = (value for value in config.values() if isinstance(value, dict))
    here = {value for key, value in config.items() if "expert" in str(key) and type(value) is int}
    return here.union(*map(expert_counts, below))


def stored_format(config: Mapping[str, Any]) -> str | None:
    """The number format with scales that a base's files have."""
    stored = config.get("quantization_config") or {}
    method: str | None = stored.get("quant_method", "bitsandbytes" if stored.get("load_in_4bit") else None)
    return method
