"""The names that a recipe's `lora` section gives, compared with the modules of the model.

peft accepts a list in which only some names exist, and trains less than was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from torch import nn

from finetune.errors import FinetuneError
from finetune.recipe.schema import Lora


def refuse_unknown_names(model: nn.Module, lora: Lora) -> None:
    """Raise FinetuneError, a line for each name that no module has, with the names that come nearest."""
    paths = [path for path, _ in model.named_modules() if path]
    mistakes = [
        f"{place}: {name} matches no module of {type(model).__name__}; {_nearest(name, model)}"
        for place, name, matches in _names(lora)
        if not any(re.fullmatch(matches, path) for path in paths)
    ]
    if mistakes:
        raise FinetuneError("\n".join(mistakes))


def _names(lora: Lora) -> Iterator[tuple[str, str, str]]:
    """Place, name, and the pattern by which peft looks for it in the path of a module."""
    targets = lora.target_modules
    if isinstance(targets, list):
        for name in targets:
            yield "lora.target_modules", name, rf"(.*\.)?{re.escape(name)}"
    elif targets != "all-linear":
        try:
            re.compile(targets)
        except re.error as error:
            raise FinetuneError(
                f"lora.target_modules: {targets} is not a pattern ({error}); write a list of names"
            ) from None
        yield "lora.target_modules", targets, targets
    for name in lora.modules_to_save:
        yield "lora.modules_to_save", name, rf".*{re.escape(name)}"


def _nearest(name: str, model: nn.Module) -> str:
    """What to write instead: the last part of a path, as lists of names have it."""
    kinds = {path.rpartition(".")[2]: module for path, module in model.named_modules() if path}
    named = [kind for kind in kinds if not kind.isdigit()]
    if name in named:  # a list's name where a pattern stands
        return f"a pattern matches whole paths: write [{name}]"
    if close := get_close_matches(name.rpartition(".")[2], named, n=3):
        return f"the nearest are {', '.join(close)}"
    linear = [kind for kind in named if isinstance(kinds[kind], nn.Linear)]
    return f"its linear layers are {', '.join(linear)}"
