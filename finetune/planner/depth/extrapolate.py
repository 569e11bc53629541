"""A deep model from two shallow traces: decoder layers are alike, so what each of them adds is added again and again.

Each phase is cut into segments by the module that is running: the first layer, the last, those between, and what is
around them. The peak of a segment grows by the same bytes with each layer (or with each period of layers, where every
n-th is recomputed), component by component; the phase's peak is the largest segment at full depth.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from finetune.planner.constants import COMPONENTS
from finetune.planner.trace.timeline import LAYER, Peak, PhaseMemory, Timeline
from finetune.recipe.schema import Recipe

SHALLOW = 4  # the first, the last, and two between


def extrapolate(
    timeline_of: Callable[[int], Timeline], layers: int, device: str, *, period: int = 1, shallow: int = SHALLOW
) -> dict[str, PhaseMemory]:
    """Phases of a model with so many layers, from traces of two depths; of few layers, from one trace of them all.

    `period`: layers repeat after so many. `shallow`: the depth from which on each layer adds the same.
    """
    few, more = depths(layers, period, shallow)
    if layers <= more:
        return timeline_of(layers).phases(device)
    less, deeper = timeline_of(few), timeline_of(more)
    times = (layers - few) // period
    first, second = _segments(less, device, few), _segments(deeper, device, more)
    ends, more_ends = less.ends(device), deeper.ends(device)
    found = {}
    for phase, peaks in first.items():
        assert peaks.keys() == second[phase].keys(), f"{phase}: {peaks.keys() ^ second[phase].keys()}"
        grown = [_grown(peak, second[phase][name], times, layers) for name, peak in peaks.items()]
        end = _line(ends[phase], more_ends[phase], times)
        found[phase] = PhaseMemory(max(grown, key=lambda peak: peak.nbytes), end)
    return found


def depths(layers: int, period: int, shallow: int = SHALLOW) -> tuple[int, int]:
    """The two shallow models whose layers repeat as those of a model with so many do."""
    few = shallow + (layers - shallow) % period
    return few, few + period


def _segments(timeline: Timeline, device: str, layers: int) -> dict[str, dict[str, Peak]]:
    """The largest peak of each segment, under names that do not depend on the number of layers."""
    found: dict[str, dict[str, Peak]] = {}
    for phase, peaks in timeline.segments(device).items():
        named: dict[str, Peak] = {}
        for module, peak in peaks.items():
            name = _segment(module, layers)
            if name not in named or peak.nbytes > named[name].nbytes:
                named[name] = peak
        found[phase] = named
    return found


def _segment(module: str, layers: int) -> str:
    match = LAYER.search(module)
    if match is None:
        return module
    index = int(match.group(1))
    which = "first" if index == 0 else "last" if index == layers - 1 else "between"
    return module[: match.start()] + f".layers.{which}" + module[match.end() :]


def _grown(peak: Peak, deeper: Peak, times: int, layers: int) -> Peak:
    parts = _line(peak.parts, deeper.parts, times)
    match = LAYER.search(peak.module)
    module = peak.module
    if match is not None and int(match.group(1)) > 0 and deeper.module != peak.module:  # counted from the last layer
        behind = int(LAYER.search(deeper.module).group(1)) - int(match.group(1))  # type: ignore[union-attr]
        module = LAYER.sub(f".layers.{min(int(match.group(1)) + behind * times, layers - 1)}", module)
    return Peak(sum(parts.values()), parts, module)


def _line(here: dict[str, int], there: dict[str, int], times: int) -> dict[str, int]:
    grown = {name: here.get(name, 0) + times * (there.get(name, 0) - here.get(name, 0)) for name in COMPONENTS}
    return {name: nbytes for name, nbytes in grown.items() if nbytes}


def with_layers(recipe: Recipe, config: Mapping[str, Any], layers: int, folder: Path) -> Recipe:
    """The recipe for that model with so many layers, its config.json in `folder`; there are no weights."""
    changed = dict(config) | {"num_hidden_layers": layers}
    if kinds := config.get("layer_types"):
        changed["layer_types"] = [kinds[index % len(kinds)] for index in range(layers)]
    for key in ("quantization_config", "auto_map"):
        changed.pop(key, None)
    here = folder / f"layers-{layers}"
    here.mkdir(parents=True, exist_ok=True)
    (here / "config.json").write_text(json.dumps(changed), "utf-8")
    model = recipe.model.model_copy(update={"name_or_path": str(here), "revision": "main"})
    return recipe.model_copy(update={"model": model})


def layers_kept_gathered(config: Mapping[str, Any], packed: int = 1) -> int:
    """How many layers' worth of weights ZeRO-3 may keep whole at once (strategies/zero.py): two layers and the largest
    tensor, which is the embedding. A model with fewer is whole for a while, so its layers add more than later ones.

    `packed`: weights of a quantised layer to one element of its container.
    """
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    size = int(config.get("head_dim") or hidden // heads)
    attention = 2 * hidden * size * (heads + int(config.get("num_key_value_heads") or heads))
    layer = (attention + 3 * hidden * int(config["intermediate_size"])) // packed
    return 2 + math.ceil(int(config["vocab_size"]) * hidden / layer)
