"""The modules and parameters that a recipe's `lora` section means in a model: names checked, resolved, and counted.

    refuse_unknown_names   a name that nothing has is refused, with the nearest names
    resolve_targets        all-linear becomes layers by path
    named_targets          the paths that peft will adapt
    reach                  what was adapted and what was left out, for the receipt

peft accepts a list in which only some names exist, and would train less than was asked for.

transformers 5 holds the experts of most mixtures as parameters of three dimensions, [experts, outputs, inputs] or
[experts, inputs, outputs]. peft reaches them by `target_parameters` and not by `target_modules`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune.errors import FinetuneError
from finetune.model.quantization import is_packed
from finetune.recipe.schema import Lora
from finetune.recipe.sections.lora import ends_of, without_adapters
from finetune.untrusted.config_sizes import expert_counts
from finetune.untrusted.model_folder import patterns_of
from finetune.untrusted.programs import refuse_slow_patterns
from finetune.wording import counted

NEW_ROWS = ".token_adapter"  # what peft puts around embeddings and head to train some of their rows
SHOWN_SHARE = 0.005  # of the matrices' weights; what is left out beyond it is printed, all of it is in the receipt


@dataclass(frozen=True)
class Targets:
    """peft's `target_modules` and `target_parameters`."""

    modules: str | list[str]
    parameters: list[str]


def resolve_targets(model: PreTrainedModel, lora: Lora) -> Targets:
    """peft's targets for `lora` in this model. all-linear becomes layers by path: attention, shared experts and dense
    layers, whose adapters every server has. Routed experts get one by name.

    peft's own all-linear is not used: it adds experts and routers for some architectures, and layers in vision towers.
    Raises FinetuneError if experts are reached that the other settings cannot adapt.
    """
    if lora.target_modules != "all-linear":
        return Targets(lora.target_modules, lora.target_parameters or [])
    layers = {path: layer for path, layer in linear_layers(model).items() if not is_excluded(lora, path)}
    renamed = _taken_for_experts(model, layers)
    parameters = lora.target_parameters or []
    if lora.target_parameters != []:
        plain = [f"{path}.weight" for path in layers if path in renamed]
        by_parameter = [path for path in plain if not is_packed(layers[path.removesuffix(".weight")])]
        if by_parameter and (setting := next(iter(without_adapters(lora)), None)):
            raise FinetuneError(
                f"lora.{setting[0]}: is {setting[1]}, which peft does not offer for the parameters that all-linear "
                f"reaches here, {', '.join(by_parameter)}; remove it, or leave them out: lora.target_parameters: []"
            )
        # Kinds where they mean these paths alone, else whole paths.
        every, shortest = [name for name, _ in model.named_parameters()], list[str]()
        for kind in dict.fromkeys(map(kind_of, plain)):
            own = [path for path in plain if kind_of(path) == kind]
            shortest += [kind] if {*ends_of(every, kind)} == {*own} else own
        parameters = [*shortest, *parameters]
    return Targets([path for path in layers if path not in renamed], parameters)


def linear_layers(model: PreTrainedModel) -> dict[str, Any]:
    """The language model's linear layers by path. Left out: the head, routers that return more than one tensor, and
    layers that kernels read without any adapter.
    """
    head, inside, past = model.get_output_embeddings(), language_paths(model), set(_read_by_kernels(model))
    layers = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D))
    return {
        path: module
        for path, module in layers
        if module is not head and inside(path) and path not in past and not _is_added(path) and _is_plain(module)
        if not hasattr(module, "finetune_experts")
    }


def _read_by_kernels(model: nn.Module) -> Iterator[str]:
    """Layers in Mamba mixers, the only modules with A_log and D. Their fused kernels read all weights except in_proj's
    directly, so an adapter beside such a layer would not be computed.
    """
    for path, mixer in model.named_modules():
        if hasattr(mixer, "A_log") and hasattr(mixer, "D"):
            yield from (f"{path}.{name}" for name, _ in mixer.named_children() if name != "in_proj")


def expert_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The language model's experts that are parameters of three dimensions, by path.

    The first dimension is then a number of experts in the configuration. A convolution's weight has three too.
    """
    inside, counts = language_paths(model), expert_counts(model.config.get_text_config().to_dict())
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if len(shape := _shape(parameter)) == 3 and shape[0] in counts and inside(path)
        if not isinstance(module, nn.Conv1d)
    }


def has_experts(config: PreTrainedConfig) -> bool:
    """Whether this is the configuration of a mixture of experts."""
    return max(expert_counts(config.get_text_config().to_dict()), default=0) > 1


def part_of(model: PreTrainedModel) -> str | None:
    """The multimodal model's kind if this is its text part; None for any other model."""
    config = getattr(model, "finetune_whole", None)
    if config is None:
        return None
    return str(config.model_type)


def language_paths(model: PreTrainedModel) -> Callable[[str], bool]:
    """Whether a path is in the language model; of a model that has no other part, every path is."""
    place = language_model_path(model)
    return lambda path: not place or path == place or path.startswith(f"{place}.")


def language_model_path(model: PreTrainedModel) -> str:
    """The path of a multimodal model's decoder; empty for a text model."""
    if model.config.get_text_config() is model.config:
        return ""
    decoder = model.get_decoder()
    return next((path for path, module in model.named_modules() if module is decoder), "")


def is_excluded(lora: Lora, path: str) -> bool:
    """Whether `lora.exclude_modules` or `lora.modules_to_save` takes this module from the adapters, by peft's rules."""
    excluded = lora.exclude_modules
    if isinstance(excluded, str):
        if re.fullmatch(excluded, path):
            return True
    elif any(ends_of([path], name) for name in excluded):
        return True
    return any(re.match(rf"(^|.*\.){name}($|\..*)", path) for name in lora.modules_to_save)


def kind_of(path: str) -> str:
    """A path below its layer's number: mlp.experts.down_proj."""
    return re.sub(r".*\.\d+\.(?=\D)", "", path)


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
        matches = {path for path in paths if re.fullmatch(targets.modules, path)}
    else:
        matches = {path for name in targets.modules for path in ends_of(paths, name)}
    # peft puts its ordinary layer around one that is packed, also where its weight is named.
    packed = {f"{path}.weight": path for path, module in model.named_modules() if is_packed(module)}
    parameters = [path for path, _ in model.named_parameters()]
    return matches | {packed.get(path, path) for name in targets.parameters for path in ends_of(parameters, name)}


def names_near(name: str, others: Iterable[str]) -> str:
    """A hint for a wrong name: similar names among `others`, or the first ones."""
    known = list(dict.fromkeys(others))
    last = {other.rpartition(".")[2]: other for other in reversed(known)}
    close = get_close_matches(name, known, n=3) or [
        last[near] for near in get_close_matches(name.rpartition(".")[2], list(last), n=3)
    ]
    if close:
        return f"the nearest are {', '.join(close)}"
    return f"there are {', '.join(known[:8])}"


def _names(lora: Lora) -> Iterator[tuple[str, str, str]]:
    """Place, name, and the pattern that peft matches with a module's path."""
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
    """Parameters of quantised layers, where a list can name the layer. peft would take packed bytes for numbers."""
    renamed = _taken_for_experts(model, linear_layers(model)) if lora.target_parameters else ()
    for name in lora.target_parameters or ():
        for path in ends_of([path for path, _ in model.named_parameters()], name):
            layer = path.rpartition(".")[0]
            if is_packed(model.get_submodule(layer)) and layer not in renamed:
                yield (
                    f"lora.target_parameters: {name} is packed by the quantization; name its layer instead: "
                    f"lora.target_modules: [{layer.rpartition('.')[2]}]"
                )
                break


def _beyond(model: PreTrainedModel, lora: Lora) -> Iterator[str]:
    """Targets outside the language model, because rows of text never train them."""
    place, inside = language_model_path(model), language_paths(model)
    targets = lora.target_modules
    if not place or targets == "all-linear":
        return
    for name in [targets] if isinstance(targets, str) else targets:
        pattern = name if isinstance(targets, str) else rf"(.*\.)?{re.escape(name)}"
        paths = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
        matches = [path for path in paths if re.fullmatch(pattern, path) and not is_excluded(lora, path)]
        outside = [path for path in matches if not inside(path) and model.get_submodule(path) is not _head(model)]
        if outside:
            names = name.rpartition(".")[2] if isinstance(targets, list) else "(q|k|v|o)_proj"
            remedy = f"write all-linear, or a pattern of whole paths: {re.escape(place)}\\..*\\.{names}"
            if not any(map(inside, matches)):
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
    """The text to write instead: the last part of a path, as lists of names have it."""
    inside, head = language_paths(model), _head(model)
    text = [(path, module) for path, module in model.named_modules() if path and (inside(path) or module is head)]
    kinds = {path.rpartition(".")[2]: module for path, module in text}
    named = [kind for kind in kinds if not kind.isdigit()]
    if name in named:  # a list's name where a pattern stands
        return f"a pattern matches whole paths: write [{name}]"
    last = {path.rpartition(".")[2] for path in expert_parameters(model)}
    near = get_close_matches(name, last, n=1, cutoff=0.7)  # gate_up_proj for gate_proj and up_proj of transformers 4
    experts = dict.fromkeys(map(kind_of, ends_of(expert_parameters(model), near[0] if near else name)))
    if experts:
        return f"it is a parameter of the experts: write lora.target_parameters: [{', '.join(experts)}]"
    if close := get_close_matches(name.rpartition(".")[2], named, n=3):
        return f"the nearest are {', '.join(close)}"
    linear = [kind for kind in named if isinstance(kinds[kind], nn.Linear)]
    return f"its linear layers are {', '.join(linear)}"


def adapted_paths(model: nn.Module) -> list[str]:
    """Each module and parameter with an active adapter, by its path in the model without adapters."""
    from peft.tuners.lora.layer import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = []
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.active_adapters and not path.endswith(NEW_ROWS):
            own = base_path(path)
            found.append(f"{own}.{module.parameter_name}" if isinstance(module, ParamWrapper) else own)
    return found


def base_path(path: str) -> str:
    """The path of a module or parameter in the model without adapters."""
    inside = path.removeprefix("base_model.model.")
    return re.sub(r"\.(base_layer|original_module)(?=\.|$)", "", inside)


def reach(model: nn.Module, base: PreTrainedModel, numel: Callable[[Tensor], int]) -> dict[str, Any]:
    """Facts for the receipt: adapted modules by name, their share of the matrix weights, and each left-out kind with
    its share.

    Args:
        model: With adapters, maybe sharded; `base` is the transformers model in it.
        numel: Counts the elements of an unpacked parameter, which an engine may hold in part.
    """
    adapted = adapted_paths(model)
    if not adapted:
        return {"adapted_modules": {}, "reached_share": 0.0, "left_out": {}, "adds_left_out": None}
    matrices = _matrices(base, numel)
    copied = {base_path(path) for path, _ in base.named_modules() if path.endswith(".original_module")}
    reached = copied | set(adapted) | {path.removesuffix(".weight") for path in adapted}
    total, left = sum(matrices.values()), Counter[str]()
    for path, weights in matrices.items():
        if path not in reached:
            left[kind_of(path)] += weights
    held = {kind: weights / total for kind, weights in left.most_common()}
    # The line of `lora` that adds adapters to the kinds that have none, if a line does.
    layers, past = linear_layers(base), {kind_of(base_path(path)) for path in _read_by_kernels(base)}
    linear = {kind_of(base_path(path)) for path in layers}
    named = {kind_of(base_path(name)) for name, _ in base.named_parameters()}
    whole = {kind_of(base_path(path)) for path, module in base.named_modules() if hasattr(module, "finetune_experts")}
    named = {kind for kind in named if kind.removesuffix(".weight") not in whole} | whole
    lacking, adds = [kind for kind in held if kind not in past], None
    if lacking and linear.issuperset(lacking) and not _taken_for_experts(base, layers):
        adds = "lora.target_modules: all-linear"
    elif lacking:
        parameters = [kind if kind in named else f"{kind}.weight" for kind in lacking]
        adds = f"lora.target_parameters: [{', '.join(parameters)}]"
    return {
        "adapted_modules": dict(Counter(map(_short, adapted))),
        "reached_share": 1 - sum(held.values()),
        "left_out": held,
        "adds_left_out": adds,
    }


def describe_reach(receipt: dict[str, Any]) -> str:
    """The receipt's reach as lines, each with its line break."""
    adapted = receipt["adapted_modules"]
    if not adapted:
        return ""
    kinds = ", ".join(f"{name} {count:,}" for name, count in adapted.items())
    count = counted(sum(adapted.values()), "layer")
    lines = [f"adapters on {count}: {kinds}; {receipt['reached_share']:.0%} of the matrices' weights"]
    left = {kind: part for kind, part in receipt["left_out"].items() if part >= SHOWN_SHARE}
    if left:
        parts, adding = ", ".join(f"{kind} {part:.0%}" for kind, part in left.items()), receipt["adds_left_out"]
        lines.append(f"left out: {parts}; {f'{adding} adds them' if adding else 'no adapter reaches them'}")
    return "".join(f"{line}\n" for line in lines)


def _short(path: str) -> str:
    """The last name. For a parameter the last two, because it has no module with its own name."""
    *before, last = path.split(".")
    parameter = last == "weight" or (bool(before) and "expert" in before[-1])
    if parameter:
        return ".".join([*before[-1:], last])
    return last


def _matrices(base: PreTrainedModel, numel: Callable[[Tensor], int]) -> dict[str, int]:
    """The number of weights in each matrix of the language model's layers, by its layer's or parameter's path."""
    parameters, inside = {}, language_paths(base)
    ends = {id(base.get_input_embeddings()), id(base.get_output_embeddings())}
    for path, module in base.named_modules():
        own = base_path(path)
        if isinstance(module, nn.Embedding | nn.Conv1d) or id(module) in ends or not inside(own) or _is_added(path):
            continue
        packed = is_packed(module)
        for name, parameter in module.named_parameters(recurse=False):
            if (not packed and len(_shape(parameter)) < 2) or name.endswith("bias"):
                continue
            weights = module.in_features * module.out_features if packed else numel(parameter)
            layer = (packed or isinstance(module, nn.Linear | Conv1D)) and name == "weight"
            parameters[own if layer else f"{own}.{name}"] = int(weights)
    return parameters


def _taken_for_experts(model: PreTrainedModel, layers: Iterable[str]) -> set[str]:
    """Layers that no list can name. If an architecture has experts, peft 0.21 reads names such as gate_proj as experts
    of transformers 4 and adapts the experts instead (utils/transformers_weight_conversion.py)."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    taken: set[str] = set()
    by_kind: dict[str, list[str]] = {}
    for path in layers:
        by_kind.setdefault(path.rpartition(".")[2], []).append(path)
    for paths in by_kind.values():
        config = LoraConfig(target_modules=paths)
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # one half of what became one parameter
            taken |= set(paths)
        else:
            taken |= set(paths) - set(config.target_modules or ())
    return taken


def _is_plain(layer: Any) -> bool:
    """Whether a linear layer answers one tensor of its outputs, as an adapter beside it does. Subclasses that route
    or regroup do not; one token tells."""
    kind = type(layer)
    if kind.forward in (nn.Linear.forward, Conv1D.forward) or kind.__module__.startswith(("bitsandbytes.", "peft.")):
        return True
    try:
        with torch.no_grad():
            answer = layer(layer.weight.new_zeros(1, 1, layer.in_features))
    except (RuntimeError, TypeError, ValueError):
        return False
    return isinstance(answer, Tensor) and answer.shape == (1, 1, layer.out_features)


def _is_added(path: str) -> bool:
    """Whether peft put this module there."""
    return ".lora_" in path or ".modules_to_save." in path or NEW_ROWS in path


def _shape(parameter: Tensor) -> tuple[int, ...]:
    """The unsharded parameter's shape: ZeRO-3 leaves an empty vector in its place."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
