"""A deep model's peaks from two shallow traces: decoder layers are alike, so each further layer adds the same bytes.

A phase runs once a micro-batch. Each run is divided into segments by the module that is running:

    front half    layers, counted from the first
    back half     layers, counted from the last
    others        the modules around the layers

With each layer a segment's peak grows by the same bytes, component by component. (It is each period if layers are of
several kinds or every n-th is recomputed.) The phase's peak is the largest segment at full depth. Runs are separate,
because the first alone has some buffers and only later ones have gradients, and these do not grow alike. From one layer
to the next a peak changes by the same bytes, so no layer that only the deeper model has can exceed all others.

    layers      4      5      6          32
    peak        10     12     14  ...    10 + (32 - 4) x 2 = 66
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.closed_form.constants import COMPONENTS
from finetune.closed_form.shape import layer_weights
from finetune.planner.depth.repeat_layers import FIRST
from finetune.planner.trace.timeline import LAYER, Peak, PhaseMemory, Timeline
from finetune.probe.small_model import decoder_layers, with_layers_alone
from finetune.recipe.schema import Recipe
from finetune.untrusted.config_sizes import MXFP4, stored_format

SHALLOW = 4  # where layers are alike: the first, the last, and two between


def kinds_of_layers(config: Mapping[str, Any]) -> list[Hashable]:
    """Each decoder layer's modules and parameter shapes, without windows and rotary angles, from a model on meta.

    If a timeline does not know the layers' names, each layer has its own kind.
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
            (name, type(module).__qualname__, tuple(parameter.shape for parameter in module.parameters(recurse=False)))
            for name, module in layer.named_modules()
        )
        for layer in layers
    ]


def period_and_depth(kinds: Sequence[Hashable], every: int) -> tuple[int, int]:
    """The period and a depth from which each period adds the same.

    The period is the number of layers after which kinds and recomputation repeat. As many layers as a replay keeps at
    either end (repeat_layers.py: FIRST) may have other kinds. The depth is all layers if nothing repeats, or if two
    shallow models would have as many layers as the full one.

    Args:
        every: Every n-th layer is recomputed in backward.
    """
    layers = len(kinds)
    for alike in range(1, layers):
        different = [at for at in range(layers - alike) if kinds[at] != kinds[at + alike]]
        if any(FIRST <= at < layers - alike - FIRST for at in different):
            continue
        period = math.lcm(alike, every)
        if alike == 1 and not different:
            return period, SHALLOW
        depth = 2 * period
        if different:
            depth += 2 * FIRST
        few = depth + (layers - depth) % period
        if 2 * few + period < layers:
            return (period, depth)
        return (every, layers)
    return every, layers


def extrapolate(
    timelines: Mapping[int, Timeline], layers: int, device: str, *, period: int = 1
) -> dict[str, PhaseMemory]:
    """Phases for a model with `layers` layers, from its own trace or from traces at two smaller depths.

    Args:
        timelines: By depth; `depths` names the two.
        period: The number of layers after which they repeat.
    """
    if layers in timelines:
        return timelines[layers].phases(device)
    few, more = sorted(timelines)
    shallow_timeline, deep_timeline = timelines[few], timelines[more]
    times = (layers - few) // period
    segments = _segments(shallow_timeline, device, few, few)
    deep_segments = _segments(deep_timeline, device, more, few)
    ends, deep_ends = shallow_timeline.ends(device), deep_timeline.ends(device)
    result = {}
    for phase, peaks in segments.items():
        deep_peaks = deep_segments[phase]
        assert peaks.keys() == deep_peaks.keys(), f"{phase}: {peaks.keys() ^ deep_peaks.keys()}"
        extrapolated = []
        for name, peak in peaks.items():
            parts = _added(peak.parts, peak.parts, deep_peaks[name].parts, times)
            module, match = peak.module, LAYER.search(peak.module)
            deep_module = deep_peaks[name].module
            if match is not None and int(match.group(1)) > 0 and deep_module != module:  # counted from the last layer
                index = int(match.group(1))
                shift = int(LAYER.search(deep_module).group(1)) - index  # type: ignore[union-attr]
                module = LAYER.sub(f".layers.{min(index + shift * times, layers - 1)}", module)
            extrapolated.append(Peak(sum(parts.values()), parts, module))
        end = _added(ends[phase], ends[phase], deep_ends[phase], times)
        result[phase] = PhaseMemory(max(extrapolated, key=lambda peak: peak.nbytes), end)
    return result


def depths(layers: int, period: int, shallow: int = SHALLOW) -> tuple[int, int]:
    """Two shallow models' depths, so that their layers repeat as they do in a model with `layers` layers."""
    few = shallow + (layers - shallow) % period
    return few, few + period


def _segments(timeline: Timeline, device: str, layers: int, few: int) -> dict[str, dict[tuple[int, str], Peak]]:
    """Each segment's largest peak, by phase and by (run, name). A name does not depend on the number of layers.

    Layers that the model with `few` layers lacks have no segment.
    """
    result: dict[str, dict[tuple[int, str], Peak]] = {}
    for phase, peaks in timeline.segments(device).items():
        named = result.setdefault(phase, {})
        for (run, module), peak in peaks.items():
            name, match = module, LAYER.search(module)
            if match is not None:
                index, front = int(match.group(1)), few // 2
                if front <= index < layers - (few - front):
                    continue
                position = f"{index}" if index < front else f"last-{layers - 1 - index}"
                name = module[: match.start()] + f".layers.{position}" + module[match.end() :]
            named[run, name] = max(named.get((run, name), peak), peak, key=lambda peak: peak.nbytes)
    return result


def _added(base: dict[str, int], few: dict[str, int], more: dict[str, int], times: float) -> dict[str, int]:
    """Bytes by component: `base`, and `times` times the difference `more` - `few`."""
    sums = {part: base.get(part, 0) + round(times * (more.get(part, 0) - few.get(part, 0))) for part in COMPONENTS}
    return {part: nbytes for part, nbytes in sums.items() if nbytes}


def with_more_of_the_same(
    phases: Mapping[str, PhaseMemory], first: Mapping[str, PhaseMemory], second: Mapping[str, PhaseMemory], times: float
) -> dict[str, PhaseMemory]:
    """Phases with peaks and ends to which the difference `second` - `first` is added `times` times."""
    result = {}
    for name, phase in phases.items():
        few, more = first[name], second[name]
        parts = _added(phase.peak.parts, few.peak.parts, more.peak.parts, times)
        peak = replace(phase.peak, nbytes=sum(parts.values()), parts=parts)
        result[name] = PhaseMemory(peak, _added(phase.end, few.end, more.end, times))
    return result


def with_layers(recipe: Recipe, config: Mapping[str, Any], layers: int, folder: Path) -> Recipe:
    """The recipe for a model with `layers` layers, with its config.json in `folder` and without weights.

    The layers are the full model's first and last ones. If more are asked than it has, its layers repeat.
    """
    full, front = int(config["num_hidden_layers"]), layers // 2
    if layers < full:
        chosen = [*range(front), *range(full - (layers - front), full)]
    else:
        chosen = [at % full for at in range(layers)]
    changed = with_layers_alone(config, full, chosen)
    changed.pop("auto_map", None)
    if recipe.quantization is None or stored_format(config) != MXFP4:  # whose experts stay as they are stored
        changed.pop("quantization_config", None)
    model_folder = folder / f"layers-{layers}"
    model_folder.mkdir(parents=True, exist_ok=True)
    (model_folder / "config.json").write_text(json.dumps(changed), "utf-8")
    model = recipe.model.model_copy(update={"name_or_path": str(model_folder), "revision": "main"})
    return recipe.model_copy(update={"model": model})


def layers_kept_gathered(config: Mapping[str, Any], packed: int = 1) -> int:
    """Twice the number of layers' weights that ZeRO-3 may keep gathered at once (strategies/zero.py).

    It keeps two layers and the largest tensor, the embedding. A model with fewer layers is all gathered for a while, so
    its layers add more bytes than later ones. Once that number was too few for 70B over 4 bits: with 11 layers each
    added its gathered bytes (45.7 GiB at full depth), with 18 or 26 its shard (22.3).

    Args:
        packed: A quantised layer's weights in one element of its container.
    """
    table = int(config["vocab_size"]) * int(config["hidden_size"])
    return 2 * (2 + math.ceil(table / layer_weights(config, packed)))
