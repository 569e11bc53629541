"""The names that a recipe's `lora` section gives, compared with the modules and parameters of the model.

peft accepts a list in which only some names exist, and trains less than was asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from torch import nn
from transformers import PreTrainedModel

from finetune.errors import FinetuneError
from finetune.model.adapter_reach import (
    Targets,
    expert_parameters,
    is_excluded,
    is_packed,
    kind_of,
    language_model_path,
    language_paths,
)
from finetune.model.text_part import part_of
from finetune.recipe.schema import Lora
from finetune.recipe.sections.lora_checks import ends_of
from finetune.untrusted.model_folder import patterns_of
from finetune.untrusted.programs import refuse_slow_patterns


def refuse_unknown_names(model: PreTrainedModel, lora: Lora) -> None:
    """Raise FinetuneError, a line for each name that nothing has, with the names that come nearest, and for each that
    reaches beyond the language model."""
    paths, whole = [path for path, _ in model.named_modules() if path], part_of(model)
    refuse_slow_patterns("lora", patterns_of(lora.model_dump()), paths)
    trained = type(model).__name__ + (f", the text part of {whole}, which alone is trained" if whole else "")
    mistakes = [
        f"{place}: {name} matches no module of {trained}; {_remedy(name, model)}"
        for place, name, matches in _names(lora)
        if not any(re.fullmatch(matches, path) for path in paths)
    ]
    parameters = [path for path, _ in model.named_parameters()]
    mistakes += [
        f"lora.target_parameters: {name} matches no parameter of {type(model).__name__}; "
        f"{names_near(name, map(kind_of, parameters))}"
        for name in lora.target_parameters or ()
        if not ends_of(parameters, name)
    ]
    mistakes += [*_packed(model, lora), *_beyond(model, lora)]
    if mistakes:
        raise FinetuneError("\n".join(mistakes))


def named_targets(model: PreTrainedModel, lora: Lora, targets: Targets) -> set[str]:
    """The paths of the modules and parameters that are to get an adapter, by peft's rules."""
    paths = [path for path, _ in model.named_modules() if path and not is_excluded(lora, path)]
    if isinstance(targets.modules, str):
        found = {path for path in paths if re.fullmatch(targets.modules, path)}
    else:
        names = set(targets.modules)
        found = {path for path in paths if names & set(_ends(path))}
    parameters = [path for path, _ in model.named_parameters()]
    return found | {path for name in targets.parameters for path in ends_of(parameters, name)}


def names_near(name: str, others: Iterable[str]) -> str:
    """What to write in place of a name: those of `others` that are like it, else the first of them."""
    known = list(dict.fromkeys(others))
    last = {other.rpartition(".")[2]: other for other in reversed(known)}
    close = get_close_matches(name, known, n=3) or [
        last[each] for each in get_close_matches(name.rpartition(".")[2], list(last), n=3)
    ]
    return f"the nearest are {', '.join(close)}" if close else f"there are {', '.join(known[:8])}"


def _ends(path: str) -> Iterator[str]:
    """self_attn.q_proj, q_proj: all that a list may call this path."""
    parts = path.split(".")
    return (".".join(parts[index:]) for index in range(len(parts)))


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
    excluded = lora.exclude_modules
    if isinstance(excluded, str):
        yield "lora.exclude_modules", excluded, excluded
    else:
        for name in excluded:
            yield "lora.exclude_modules", name, rf"(.*\.)?{re.escape(name)}"


def _packed(model: PreTrainedModel, lora: Lora) -> Iterator[str]:
    """Parameters of quantised layers, whose packed bytes peft would take for numbers."""
    for name in lora.target_parameters or ():
        for path in ends_of([path for path, _ in model.named_parameters()], name):
            layer = path.rpartition(".")[0]
            if is_packed(model.get_submodule(layer)):
                yield (
                    f"lora.target_parameters: {name} is packed by the quantization; name its layer instead: "
                    f"lora.target_modules: [{layer.rpartition('.')[2]}]"
                )
                break


def _beyond(model: PreTrainedModel, lora: Lora) -> Iterator[str]:
    """Targets outside of the language model, which rows of text never train."""
    place, inside = language_model_path(model), language_paths(model)
    targets = lora.target_modules
    if not place or targets == "all-linear":
        return
    for name in [targets] if isinstance(targets, str) else targets:
        pattern = name if isinstance(targets, str) else rf"(.*\.)?{re.escape(name)}"
        paths = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
        found = [path for path in paths if re.fullmatch(pattern, path) and not is_excluded(lora, path)]
        outside = [path for path in found if not inside(path) and model.get_submodule(path) is not _head(model)]
        if outside:
            names = name.rpartition(".")[2] if isinstance(targets, list) else "(q|k|v|o)_proj"
            remedy = f"write all-linear, or a pattern of whole paths: {re.escape(place)}\\..*\\.{names}"
            if not any(map(inside, found)):
                own = {path.rpartition(".")[2]: None for path in paths if inside(path)}
                remedy = names_near(name, own)
            yield (
                f"lora.target_modules: {name} reaches {len(outside)} layers outside of the language model, first "
                f"{outside[0]}; {remedy}"
            )


def _head(model: PreTrainedModel) -> nn.Module | None:
    head: nn.Module | None = model.get_output_embeddings()
    return head


def _remedy(name: str, model: PreTrainedModel) -> str:
    """What to write instead: the last part of a path, as lists of names have it."""
    inside, head = language_paths(model), _head(model)
    text = [(path, module) for path, module in model.named_modules() if path and (inside(path) or module is head)]
    kinds = {path.rpartition(".")[2]: module for path, module in text}
    named = [kind for kind in kinds if not kind.isdigit()]
    if name in named:  # a list's name where a pattern stands
        return f"a pattern matches whole paths: write [{name}]"
    experts = dict.fromkeys(map(kind_of, ends_of(expert_parameters(model), name)))
    if experts:
        return f"it is a parameter of the experts: write lora.target_parameters: [{', '.join(experts)}]"
    if close := get_close_matches(name.rpartition(".")[2], named, n=3):
        return f"the nearest are {', '.join(close)}"
    linear = [kind for kind in named if isinstance(kinds[kind], nn.Linear)]
    return f"its linear layers are {', '.join(linear)}"
