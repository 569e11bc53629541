"""`model.rope_scaling`: rotary positions beyond those that the base was trained with.

The recipe's mapping has transformers 5's names for `rope_parameters`. It takes the place of the base's own scaling, if
there is one; the base's frequency (`rope_theta`) and the part of a head that rotates stay. All readers of a configuration
ask here: training, planner, probe, exports, and the lines for servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from finetune.errors import FinetuneError
from finetune.recipe.sections.model import ROPE_KEYS, ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SCALING_KEYS = {"rope_type", "type"}.union(*(needed + others for needed, others in ROPE_KEYS.values()))
BY_ORIGINAL = ("yarn", "llama3", "longrope")  # these count from original_max_position_embeddings


def scaled_rope(text: Mapping[str, Any], scaling: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """rope_parameters, and max_position_embeddings, of the text part's configuration with this scaling.

    Example: 32,768 positions and {rope_type: yarn, factor: 4} make 131,072. Linear and dynamic scaling leave the number:
    `dynamic` counts from it, and servers multiply it by the factor.
    """
    own = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope = {key: value for key, value in own.items() if key not in SCALING_KEYS} | dict(scaling)
    positions = int(text["max_position_embeddings"])
    if scaling["rope_type"] in BY_ORIGINAL:
        stated = text.get("original_max_position_embeddings") or own.get("original_max_position_embeddings")
        original = rope.setdefault("original_max_position_embeddings", stated or positions)
        positions = int(rope["factor"] * original)
    return rope, positions


def scale_rope(config: PreTrainedConfig, section: ModelSection) -> None:
    """Set the recipe's scaling in a loaded configuration. Raises FinetuneError if the model cannot take it."""
    text: Any = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    place = "model.rope_scaling"
    if not isinstance(rope, dict) or not isinstance(getattr(text, "max_position_embeddings", None), int):
        raise FinetuneError(f"{place}: {text.model_type} has no rotary positions to scale; leave it out")
    if kinds := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise FinetuneError(
            f"{place}: the layers of {text.model_type} have several kinds of positions ({', '.join(kinds)}), and one "
            "mapping scales one kind; leave it out, or write it into a copy of the base's config.json"
        )
    text.rope_parameters, text.max_position_embeddings = scaled_rope(text.to_dict(), section.rope_scaling or {})
    if hasattr(text, "original_max_position_embeddings") and "original_max_position_embeddings" in text.rope_parameters:
        text.original_max_position_embeddings = text.rope_parameters["original_max_position_embeddings"]
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pairs = int(head * text.rope_parameters.get("partial_rotary_factor", 1.0)) // 2
    for key in ("short_factor", "long_factor"):
        if (count := len(text.rope_parameters.get(key, [0] * pairs))) != pairs:
            raise FinetuneError(f"{place}: {key} has {count} numbers, and a head of this model rotates {pairs} pairs")


def scaled_settings(text: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of an export's config.json with this scaling, in the base's spelling."""
    rope, positions = scaled_rope(text, scaling)
    original = rope.get("original_max_position_embeddings")
    found: dict[str, Any] = {"max_position_embeddings": positions}
    if original and "original_max_position_embeddings" in text:
        found["original_max_position_embeddings"] = original
    if "rope_parameters" in text:
        return found | {"rope_parameters": rope}
    if "rope_theta" in rope:  # earlier releases have it beside the scaling
        found["rope_theta"] = rope.pop("rope_theta")
    return found | {"rope_scaling": rope}
