"""A deep model's peaks from two shallow traces: decoder layers are alike, so each further layer adds the same bytes.

Each run of a phase (one a micro-batch) is divided into segments by the module that is running: the layers of the front
half, counted from the first, those of the back half, counted from the last, and the modules around them. The peak of a
segment grows by the same bytes with each layer (or with each period of layers, where they are of several kinds or every
n-th is recomputed), component by component; the phase's peak is the largest segment at full depth. Runs are apart,
since buffers that only the first has and gradients that only later ones have do not grow alike. From one layer to the
next a peak changes by the same bytes, so none of the layers that only the deeper model has can have a larger peak than
all others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.closed_form.constants import COMPONENTS
from finetune.model.small import decoder_layers, with_layers_alone
from finetune.planner.depth.repeat_layers import FIRST
from finetune.planner.trace.timeline import LAYER, Peak, PhaseMemory, Timeline
from finetune.recipe.schema import Recipe

SHALLOW = 4  # where layers are alike: the first, the last, and two between


def kinds_of_layers(config: Mapping[str, Any]) -> list[Hashable]:
    """What takes memory in each decoder layer of the full model, built on meta: its modules and parameter shapes,
    without windows and rotary angles.

    Layers whose names a timeline does not know each have their own kind.
    """
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    depth = int(config["num_hidden_layers"])
    layers = decoder_layers(model, depth)
    names = [name for name, module in model.named_modules() if layers and module is layers[0]]
    if len(layers) != depth or not any(map(LAYER.search, names)):
        return list(range(depth))
    return [
        tuple(
            (name, type(module).__qualname__, tuple(each.shape for each in module.parameters(recurse=False)))
            for name, module in layer.named_modules()
        )
        for layer in layers
    ]


def period_and_depth(kinds: Sequence[Hashable], every: int) -> tuple[int, int]:
    """The number of layers after which kinds and recomputation repeat, and a depth from which each such period adds the
    same.

    As many irregular layers as a replay keeps at either end (repeat_layers.py: FIRST) may have other kinds. All layers
    if nothing repeats, or if two shallow models would have as many layers as the full one.

    Args:
        every: Every n-th layer is recomputed in backward.
    """
    layers = len(kinds)
    for alike in range(1, layers):
        differ = [at for at in range(layers - alike) if kinds[at] != kinds[at + alike]]
        if any(FIRST <= at < layers - alike - FIRST for at in differ):
            continue
        period = math.lcm(alike, every)
        if alike == 1 and not differ:
            return period, SHALLOW
        depth = 2 * (period + (FIRST if differ else 0))
        few = depth + (layers - depth) % period
        if 2 * few + period < layers:
            return (period, depth)
        return (every, layers)
    return every, layers


def extrapolate(
    timeline_of: Callable[[int], Timeline], layers: int, device: str, *, period: int = 1, shallow: int = SHALLOW
) -> dict[str, PhaseMemory]:
    """Phases for a model with `layers` layers, from traces at two depths; for few layers, from one trace at full depth.

    `period`: the number of layers after which they repeat. `shallow`: the depth from which each layer adds the same.
    """
    few, more = depths(layers, period, shallow)
    if layers <= more:
        return timeline_of(layers).phases(device)
    shallow_timeline, deep = timeline_of(few), timeline_of(more)
    times = (layers - few) // period
    first, second = _segments(shallow_timeline, device, few, few), _segments(deep, device, more, few)
    ends, deep_ends = shallow_timeline.ends(device), deep.ends(device)
    result = {}
    for phase, peaks in first.items():
        assert peaks.keys() == second[phase].keys(), f"{phase}: {peaks.keys() ^ second[phase].keys()}"
        extrapolated = [_extrapolated_peak(peak, second[phase][name], times, layers) for name, peak in peaks.items()]
        end = _extrapolated_parts(ends[phase], deep_ends[phase], times)
        result[phase] = PhaseMemory(max(extrapolated, key=lambda peak: peak.nbytes), end)
    return result


def depths(layers: int, period: int, shallow: int = SHALLOW) -> tuple[int, int]:
    """The depths of two shallow models whose layers repeat like those of a model with `layers` layers."""
    few = shallow + (layers - shallow) % period
    return few, few + period


def _segments(timeline: Timeline, device: str, layers: int, few: int) -> dict[str, dict[tuple[int, str], Peak]]:
    """Each segment's largest peak, under names that do not depend on the number of layers. Layers that the model with
    `few` layers lacks have none.
    """
    result: dict[str, dict[tuple[int, str], Peak]] = {}
    for phase, peaks in timeline.segments(device).items():
        named = result.setdefault(phase, {})
        for (run, module), peak in peaks.items():
            if (name := _segment(module, layers, few)) is None:
                continue
            named[run, name] = max(named.get((run, name), peak), peak, key=lambda peak: peak.nbytes)
    return result


def _segment(module: str, layers: int, few: int) -> str | None:
    match = LAYER.search(module)
    if match is None:
        return module
    index, front = int(match.group(1)), few // 2
    if front <= index < layers - (few - front):
        return None
    which = f"{index}" if index < front else f"last-{layers - 1 - index}"
    return module[: match.start()] + f".layers.{which}" + module[match.end() :]


def _extrapolated_peak(peak: Peak, deep: Peak, times: int, layers: int) -> Peak:
    parts = _extrapolated_parts(peak.parts, deep.parts, times)
    match = LAYER.search(peak.module)
    module = peak.module
    if match is not None and int(match.group(1)) > 0 and deep.module != peak.module:  # counted from the last layer
        behind = int(LAYER.search(deep.module).group(1)) - int(match.group(1))  # type: ignore[union-attr]
        module = LAYER.sub(f".layers.{min(int(match.group(1)) + behind * times, layers - 1)}", module)
    return Peak(sum(parts.values()), parts, module)


def _extrapolated_parts(shallow: dict[str, int], deep: dict[str, int], times: int) -> dict[str, int]:
    extrapolated = {
        name: shallow.get(name, 0) + times * (deep.get(name, 0) - shallow.get(name, 0)) for name in COMPONENTS
    }
    return {name: nbytes for name, nbytes in extrapolated.items() if nbytes}


def with_more_of_the_same(
    phases: Mapping[str, PhaseMemory],
    first: Mapping[str, PhaseMemory],
    second: Mapping[str, PhaseMemory],
    times: float,
) -> dict[str, PhaseMemory]:
    """Phases with peaks and ends to which the difference `second` - `first` is added `times` times."""

    def added(name: str, parts_of: Callable[[PhaseMemory], dict[str, int]]) -> dict[str, int]:
        base, few, more = (parts_of(each[name]) for each in (phases, first, second))
        sums = {part: base.get(part, 0) + round(times * (more.get(part, 0) - few.get(part, 0))) for part in COMPONENTS}
        return {part: nbytes for part, nbytes in sums.items() if nbytes}

    result = {}
    for name, phase in phases.items():
        parts = added(name, lambda each: each.peak.parts)
        peak = replace(phase.peak, nbytes=sum(parts.values()), parts=parts)
        result[name] = PhaseMemory(peak, added(name, lambda each: each.end))
    return result


def with_layers(recipe: Recipe, config: Mapping[str, Any], layers: int, folder: Path) -> Recipe:
    """The recipe for a model with `layers` layers, with its config.json in `folder` and without weights.

    They are the full model's first and last layers, or as many as it has, repeated.
    """
    full, front = int(config["num_hidden_layers"]), layers // 2
    chosen = [*range(front), *range(full - (layers - front), full)] if layers < full else [*range(full)]
    chosen += [at % full for at in range(full, layers)]
    changed = with_layers_alone(config, full, chosen)
    for key in ("quantization_config", "auto_map"):
        changed.pop(key, None)
    model_folder = folder / f"layers-{layers}"
    model_folder.mkdir(parents=True, exist_ok=True)
    (model_folder / "config.json").write_text(json.dumps(changed), "utf-8")
    model = recipe.model.model_copy(update={"name_or_path": str(model_folder), "revision": "main"})
    return recipe.model_copy(update={"model": model})


def layers_kept_gathered(config: Mapping[str, Any], packed: int = 1) -> int:
    """How many layers' worth of weights ZeRO-3 may keep gathered at once (strategies/zero.py), twice: two layers and
    the largest tensor, which is the embedding. A model with fewer layers is all gathered for a while, so its layers
    add more bytes than later ones. Once was too few for 70B over 4 bits: of 11 layers each added what it gathers (45.7
    GiB at the full depth), of 18 or 26 its shard (22.3).

    `packed`: weights of a quantised layer to one element of its container.
    """
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    size = int(config.get("head_dim") or hidden // heads)
    attention = 2 * hidden * size * (heads + int(config.get("num_key_value_heads") or heads))
    inner = config.get("intermediate_size")
    # GPT-2 and its like name no width: their MLP has two matrices, four times as wide as the model.
    mlp = 3 * hidden * int(inner) if inner else 2 * hidden * 4 * hidden
    layer = (attention + mlp) // packed
    return 2 * (2 + math.ceil(int(config["vocab_size"]) * hidden / layer))
