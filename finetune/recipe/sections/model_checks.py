"""Checks that values in `model` fit together: the new tokens are texts, each named once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from finetune.recipe.cross_checks import CrossCheck, refuse
from finetune.recipe.yaml_text import shown

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe
    from finetune.recipe.sections.model import ModelSection
    from finetune.recipe.strategy import Strategy


def check_new_tokens(section: ModelSection) -> None:
    """Whether the vocabulary has one of them already is known with the tokenizer: model/new_tokens.py."""
    refuse(_token_mistakes(section))


def refuses_new_rows(recipe: Recipe, strategy: Strategy) -> str | None:
    """The reason, with a remedy, why this strategy cannot train the new tokens' rows beside adapters; None if it can.

    peft 0.21 takes the rows out of sharded embeddings with a collective that only CUDA has (TrainableTokensLayer). No
    test of ours has seen it run.
    """
    if not recipe.model.new_tokens or recipe.lora is None or not (strategy.uses_engine and strategy.shards_parameters):
        return None
    return (
        f"peft does not train new rows under {strategy.name}, which shards embeddings; set accelerate_config: fsdp2, "
        "or train all weights (lora: null)"
    )


def _token_mistakes(section: ModelSection) -> Iterator[CrossCheck]:
    seen: set[str] = set()
    for key in ("add_tokens", "add_special_tokens"):
        for token in getattr(section, key):
            if not token.strip():
                yield CrossCheck(key, f"{shown(token)} is not a token", "name a text, or remove it")
            elif token in seen:
                yield CrossCheck(key, f"{shown(token)} is named twice", "keep one of them")
            seen.add(token)
    if seen and section.adapter is not None:
        problem = f"{shown(section.adapter)} has no rows of new tokens"
        remedy = "merge it and name the result in name_or_path, or remove the new tokens"
        yield CrossCheck("adapter", problem, remedy)
