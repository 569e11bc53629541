"""`model.rope_scaling`: rotary positions beyond the base's, for training, planner, probe, exports and hand-over."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from finetune.errors import FinetuneError

OF_BASE = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")  # stay with any scaling
BY_ORIGINAL = ("yarn", "llama3", "longrope")  # these count from original_max_position_embeddings


def scaled_rope(text: Mapping[str, Any], scaling: Mapping[str, Any]) -> tuple[dict[str, Any], int, int]:
    """rope_parameters and max_position_embeddings of the text part's configuration, and the positions that they reach.

    Example: 32,768 positions and {rope_type: yarn, factor: 4} state and reach 131,072. Linear and dynamic scaling state
    the base's number: `dynamic` counts from it, and servers multiply it by the factor.
    """
    own = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope = {key: value for key, value in own.items() if key in OF_BASE} | dict(scaling)
    stated, factor = int(text["max_position_embeddings"]), float(scaling["factor"])
    if scaling["rope_type"] not in BY_ORIGINAL:
        return rope, stated, int(factor * stated)
    original = text.get("original_max_position_embeddings") or own.get("original_max_position_embeddings") or stated
    reached = int(factor * rope.setdefault("original_max_position_embeddings", original))
    return rope, reached, reached


def scale_rope(config: Any, scaling: Mapping[str, Any]) -> None:
    """Set a recipe's scaling in a loaded configuration. Raises FinetuneError, with transformers' words for its keys."""
    text, place, said = config.get_text_config(), "model.rope_scaling", list[str]()
    rope = getattr(text, "rope_parameters", None) or {}
    if not rope or any(isinstance(value, dict) for value in rope.values()):
        problem = f"{text.model_type} has {'several kinds of' if rope else 'no'} rotary positions"
        raise FinetuneError(f"{place}: {problem}; leave it out, or write it into a copy of the base's config.json")
    text.rope_parameters, text.max_position_embeddings, _ = scaled_rope(text.to_dict(), scaling)
    if hasattr(text, "original_max_position_embeddings") and scaling["rope_type"] in BY_ORIGINAL:
        text.original_max_position_embeddings = text.rope_parameters["original_max_position_embeddings"]

    def listen(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False

    logger = logging.getLogger("transformers.modeling_rope_utils")  # where transformers warns, and goes on
    logger.addFilter(listen)
    try:
        text.validate_rope()
    except Exception as error:  # a KeyError for a missing key, others for values of another kind
        said.append(str(error.args[0] if error.args else error))
    finally:
        logger.removeFilter(listen)
    if said:
        raise FinetuneError(f"{place}: {said[0].strip()}; see transformers' rope_parameters for {scaling['rope_type']}")


def scaled_settings(text: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of an export's config.json with this scaling, in the base's spelling."""
    rope, stated, _ = scaled_rope(text, scaling)
    settings: dict[str, Any] = {"max_position_embeddings": stated}
    settings |= {key: rope[key] for key in ("original_max_position_embeddings",) if key in rope and key in text}
    if "rope_parameters" in text:
        return settings | {"rope_parameters": rope}
    settings |= {key: rope.pop(key) for key in ("rope_theta",) if key in rope}  # earlier releases: beside the scaling
    return settings | {"rope_scaling": rope}
