"""Three decisions of a run, made by the closed form with its margin: `activation_checkpointing: auto`,
`per_device_batch_size: auto`, and whether FSDP2 reduces gradients once a step.

Recomputation is the least that fits, and a micro-batch has the most rows that fit with it. If all gradients then still
fit unsharded, they are reduced once a step.

On a GPU layers are compiled unless the recipe says otherwise, so selective recomputation is not a candidate there.

On a CPU only host memory is known, and the closed form counts a GPU's bfloat16 activations. A CPU computes in
float32 at most, which takes twice the bytes, so estimates are doubled there. For SmolLM2-135M and Qwen3-0.6B, full and
adapters, traces on a CPU take 35 to 48 % of the estimate. Python and its libraries come on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from finetune.closed_form.estimate import estimate, unsupported
from finetune.closed_form.rank import cached_strategy
from finetune.measure.host_memory import available_bytes
from finetune.model.known_configs import config_if_known
from finetune.recipe.gpus import Gpus, gpus_of
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.training import RECOMPUTATIONS, RECOMPUTATIONS_IF_COMPILED, Recomputation
from finetune.recipe.strategy import Strategy
from finetune.wording import GIB, counted, recomputation_in_words

ON_HOST = 2  # a tensor's bytes on a CPU, as a multiple of its bytes on a GPU, at most


MOST_TOKENS_AT_ONCE = 16_384  # of a micro-batch that `auto` chooses: with more, a GPU's products are hardly faster
ROWS, RECOMPUTATION = "per_device_batch_size", "activation_checkpointing"


@dataclass(frozen=True)
class Chosen:
    """A recipe in which `auto` is replaced, and the reasons."""

    recipe: Recipe
    why: str | None = None  # of the recomputation; None: the recipe says so itself
    why_rows: str | None = None  # of the rows of a micro-batch
    other_rows: str = ""  # a clause, if the run that is resumed had more

    @property
    def facts(self) -> dict[str, Any]:
        """The recomputation, for the receipt and JSON; empty where nothing was chosen."""
        if self.why is None:
            return {}
        runs = self.recipe.training.activation_checkpointing
        line = f"activation checkpointing: {recomputation_in_words(runs)}, because {self.why}"
        return {"asked": "auto", "runs": runs, "why": self.why, "line": line}

    @property
    def rows_facts(self) -> dict[str, Any]:
        """The rows of a micro-batch, in the same way."""
        if self.why_rows is None:
            return {}
        facts = rows_facts(self.recipe.training.rows_at_once, self.why_rows)
        return facts | {"line": facts["line"] + self.other_rows}

    @property
    def line(self) -> str:
        """For the terminal; empty where nothing was chosen."""
        return "\n".join(facts["line"] for facts in (self.rows_facts, self.facts) if facts)


@dataclass(frozen=True)
class Reduction:
    """Whether FSDP2 adds up unsharded gradients over a step's micro-batches, and reduces them in the last one."""

    once: bool
    why: str

    @property
    def facts(self) -> dict[str, Any]:
        """For the receipt and JSON."""
        moment = "once a step" if self.once else "after each micro-batch"
        return {"once": self.once, "why": self.why, "line": f"gradients: reduced {moment}, because {self.why}"}


def choose_reduction(
    recipe: Recipe,
    config: Mapping[str, Any] | None,
    strategy: Strategy,
    gpus: Gpus | None,
    *,
    ranks: int,
    memory: int,
) -> Reduction | None:
    """Whether gradients are reduced once a step: they take 4 bytes for each trained weight until then.

    None where nothing is to decide: shards that one rank has alone or the host keeps, a step of one micro-batch, and
    other strategies.

    Args:
        config: The model's, as `planned_config` returns it; None: it is not known.
        gpus: None: a CPU, whose `memory` in all `ranks` share. Free memory would differ from start to start, and with
            it the order in which a resumed run adds gradients up.
    """
    room = gpus or Gpus(ranks, memory // ranks, "host memory")
    shards = strategy.shards_modules and not strategy.offloaded and room.count * room.nodes > 1
    per_step = recipe.training.rows_at_once * room.count * room.nodes
    if not shards or recipe.training.global_batch_size <= per_step:
        return None
    if config is None:
        return Reduction(False, "the configuration of the model is not known")
    estimated = _estimated(recipe, recipe.training.activation_checkpointing, gpus)
    if why := unsupported(estimated, config, room):
        return Reduction(False, f"there is no closed form for {why}")
    if recipe.preferences is not None and recipe.lora is None:  # its backward computes the head's logits once more
        return Reduction(False, "there is no closed form for pairs under all weights")
    plan = estimate(estimated, config, room, keeps_gradients=True)
    need = plan.upper if gpus else ON_HOST * plan.needed
    sizes = f"{need / GIB:.1f} of {room.memory / GIB:.1f} GiB"
    if need > room.memory:
        return Reduction(False, f"until the last one the plan may need {sizes}")
    return Reduction(True, f"the plan needs at most {sizes} with all of them unsharded")


def rows_facts(rows: int, why: str) -> dict[str, Any]:
    """The receipt's account of the rows of a micro-batch."""
    return {"asked": "auto", "runs": rows, "why": why, "line": f"{ROWS}: {rows}, because {why}"}


def choose_recomputation(
    recipe: Recipe,
    config: Mapping[str, Any] | None,
    gpus: Gpus | None,
    *,
    ranks: int = 1,
    rows_before: int = 0,
) -> Chosen:
    """The recipe with `auto` resolved for these GPUs: rows of a micro-batch, and recomputation. Other settings stay.

    As many rows as fit without recomputation. If one row does not fit, as many as fit with more of it, and so on.

    Args:
        config: The model's, as `planned_config` returns it; None: it is not known.
        gpus: None: a CPU, whose memory `ranks` share.
        rows_before: The resumed run's rows in a micro-batch; it keeps them if more would fit. 0: a new run.
    """
    training = recipe.training
    of_rows = training.per_device_batch_size == "auto"
    of_layers = training.activation_checkpointing == "auto"
    settings: Sequence[Recomputation] = (training.activation_checkpointing,)
    if of_layers and training.activation_offloading:
        settings = (True,)
    elif of_layers:
        compiles = gpus is not None and training.compile is not False
        without_selective = compiles or training.mlp_tile_tokens is not None
        settings = RECOMPUTATIONS_IF_COMPILED if without_selective else RECOMPUTATIONS
    room = gpus or Gpus(ranks, available_bytes() // ranks, "host memory")
    setting, rows, why = settings[-1], training.rows_at_once, ""
    if not of_rows and not of_layers:
        pass
    elif config is None:
        why = "the configuration of the model is not known"
    elif unknown := unsupported(_estimated(recipe, settings[0], gpus), config, room):
        why = f"there is no closed form for {unknown}"
    else:
        # From the least recomputation on, and from the most rows on. The last pair stays if none fits.
        counts = [rows]
        if of_rows:  # rows that split a rank's share of a step evenly
            strategy_ranks = cached_strategy(recipe.accelerate_config).rank_count(room.count * room.nodes)
            share = math.ceil(training.global_batch_size / strategy_ranks)
            most = max(1, min(share, MOST_TOKENS_AT_ONCE // recipe.data.row_tokens))
            steps_of_rank = range(math.ceil(share / most), share + 1)
            counts = sorted({math.ceil(share / steps) for steps in steps_of_rank}, reverse=True)
        tried: list[tuple[Recomputation, int, int]] = []
        for setting, rows in product(settings, counts):
            estimated = estimate(_estimated(recipe, setting, gpus, per_device_batch_size=rows), config, room)
            tried.append((setting, rows, estimated.upper if gpus else ON_HOST * estimated.needed))
            if tried[-1][2] <= room.memory:
                break
        need, memory = tried[-1][2], f"{room.memory / GIB:.1f} GiB{'' if gpus else ' of free host memory'}"
        why = f"the plan needs at most {need / GIB:.1f} of {memory}"
        if need > room.memory:
            why = f"even so the plan may need {need / GIB:.1f} of {memory}"
        elif len(tried) > 1:
            less, more, needed = tried[-2]
            words = recomputation_in_words(less) if less != setting else counted(more, recipe.data.row_noun)
            why += f", and {needed / GIB:.1f} with {words}"
    chosen = Chosen(
        _changed(recipe, setting, per_device_batch_size=rows),
        why if of_layers else None,
        why if of_rows else None,
        f"; it was {rows_before} before" if rows_before > rows else "",
    )
    if of_rows and 0 < rows_before < rows:  # as many as before, then, with the recomputation that these need
        fewer = _changed(recipe, training.activation_checkpointing, per_device_batch_size=rows_before)
        fewest = choose_recomputation(fewer, config, gpus, ranks=ranks)
        chosen = Chosen(fewest.recipe, fewest.why, f"the run in {recipe.run_dir} began with it")
    return chosen


def chosen_words(recipe: Path, overrides: Sequence[str]) -> list[str]:
    """A recipe file's overrides, with `auto` resolved for its own GPUs."""
    loaded = load_recipe(recipe, overrides).recipe
    chosen = choose_recomputation(loaded, config_if_known(loaded.model), gpus_of(loaded.budget))
    choices = {ROWS: chosen.rows_facts, RECOMPUTATION: chosen.facts}
    return [*overrides, *(f"training.{key}={str(facts['runs']).lower()}" for key, facts in choices.items() if facts)]


def _estimated(recipe: Recipe, setting: Recomputation, gpus: Gpus | None, **further: Any) -> Recipe:
    """The recipe with a setting, in formats that the closed form knows: on a CPU ON_HOST covers float32."""
    if gpus is not None:
        return _changed(recipe, setting, **further)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})})
    return _changed(recipe, setting, mixed_precision="bf16", **further)


def _changed(recipe: Recipe, setting: Recomputation, **further: Any) -> Recipe:
    changes = {"activation_checkpointing": setting, **further}
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=changes)})
