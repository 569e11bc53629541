"""Before weights are read: does this recipe train this very configuration rightly?

Two checks must pass. A trial without data (`refuse_early`) runs on the whole model. Then numbers decide: the model is
made small, and the kit's loss and gradients are compared with the library's own class on one document at a time. The
result is remembered, so the probe costs once.
"""

from __future__ import annotations

import gc
import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from finetune.architecture import attention
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.library_errors import class_and_words, library_errors, not_loaded
from finetune.model.adapter_targets import describe_reach, reach
from finetune.model.build import attention_name, configuration, decoder_parts, refuse_early
from finetune.model.stored_structure import refuse_files, stored_structure
from finetune.output_stream import silenced
from finetune.probe.remembered import one_at_a_time, precision_on, probe_key, remember
from finetune.recipe.schema import Recipe

CPU = torch.device("cpu")
ANYWHERE = (attention.NAME, *attention.LIBRARYS)  # attentions that run on every device


@dataclass(frozen=True)
class ProbeResult:
    """The probe's facts about a recipe that trains rightly."""

    facts: dict[str, Any]
    remembered: bool = False

    def as_json(self) -> dict[str, Any]:
        return self.facts | {"remembered": self.remembered}

    def line(self) -> str:
        """For the terminal."""
        facts, differences, note = self.facts, self.facts["found"], self.facts["note"]
        lines = []
        if differences:
            worst = max(max(off["loss"], off["gradients"]) for off in differences.values())
            line = (
                f"model: {facts['architecture']}, made small: loss and gradients are the library's own of one document "
                f"at a time to {worst:.0e}, in {facts['precision']} on {facts['device']}"
            )
            lines.append(f"{line} ({note})" if note else line)
        elif note:
            lines.append(f"model: {facts['architecture']}, {note}")
        if facts["adapters"]:
            lines.append(describe_reach(facts["adapters"]).rstrip())
        return "\n".join(lines)


def probe(
    recipe: Recipe,
    device: torch.device = CPU,
    config: PreTrainedConfig | None = None,
    *,
    offline: bool = False,
    compute: torch.dtype | None = None,
) -> ProbeResult:
    """Probe the recipe's model, or recall an earlier result.

    Args:
        device: Where the run computes. A probe on a CPU says nothing about a GPU's kernels, nor the other way round.
        config: The model's configuration; None: `checked_configuration` reads it.
        offline: Take the configuration from this machine, a shipped one too, and download nothing.
        compute: The format to compute in; None: float32 on a CPU, the recipe's own on a GPU.

    Raises EnvironmentMismatch if loss or gradients differ from the library's; its line names a setting that is right.
    Raises FinetuneError for everything that `refuse_early` refuses.
    """
    with tempfile.TemporaryDirectory(prefix="finetune-probe-") as name, _undisturbed(device):
        folder = Path(name)
        if offline:
            recipe = _on_this_machine(recipe, folder / "config")
        if config is None:
            config = checked_configuration(recipe)
        compute = compute or precision_on(recipe, device)
        key = probe_key(recipe, config, device, compute)
        with one_at_a_time(key) as known:
            result = known or _result(recipe, config, device, compute, folder / "model", offline=offline)
            if known is None:
                remember(key, result)
    if "refusal" in result:
        raise EnvironmentMismatch(result["refusal"])
    return ProbeResult(result["facts"], remembered=known is not None)


def _result(
    recipe: Recipe,
    config: PreTrainedConfig,
    device: torch.device,
    compute: torch.dtype | None,
    folder: Path,
    *,
    offline: bool,
) -> dict[str, Any]:
    """What is remembered: `facts` about the model, or the line of a `refusal`.

    Args:
        folder: Where small models are saved.
        offline: Do without numbers if the attention needs a GPU's kernels: some facts are known without them.

    Raises what `refuse_early` raises, and EnvironmentMismatch if no small model runs.
    """
    # A remembered result needs none of these modules.
    from finetune.probe.compare import Differs, NotFiniteHere, judge
    from finetune.probe.padding import compare_padded
    from finetune.probe.small_model import CannotShrink, small_models

    note = None
    runs_here = not offline or device.type != "cpu" or attention_name(recipe) in ANYWHERE
    if not runs_here:
        note = f"not probed here: model.attention: {recipe.model.attention} runs on a GPU alone"
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"attention": "eager"})})
    try:
        base, adapted = refuse_early(recipe, config)
        adapters = None if recipe.lora is None else reach(adapted, decoder_parts(adapted), Tensor.numel)
    except FinetuneError:
        raise
    except Exception as error:  # whatever the model's own code raises: the user gets one line
        raise cannot_probe(recipe.model.name_or_path, class_and_words(error)) from error
    architecture = type(base).__name__
    facts: dict[str, Any] = {"architecture": architecture, "device": device.type, "adapters": adapters, "note": note}
    facts |= {"precision": None, "bound": None, "found": {}, "padding": None}
    if not runs_here:
        return {"facts": facts}
    reason = ""
    try:
        for small in small_models(base, folder):  # the first one that runs
            try:
                ours, note = judge(recipe, small, device, compute)
            except Differs as refusal:
                return {"refusal": str(refusal)}
            except NotFiniteHere as error:
                reason = f"made small, {error}"
            except Exception as error:  # sizes that do not go together: the next ones are larger
                if type(error) is FinetuneError:
                    raise
                reason = f"made small, {class_and_words(error)}"
            else:
                facts |= {"note": note, "precision": ours.library.precision, "bound": ours.library.bound}
                facts |= {"found": {layers: asdict(off) for layers, off in ours.differences.items()}}
                facts |= {"padding": compare_padded(recipe, small, device)}
                sizes = {"layers": small.layers, "kinds": small.kinds, "parameters": small.parameters}
                return {"facts": facts | {"small": sizes}}
    except CannotShrink as error:
        reason = reason or str(error)
    raise cannot_probe(architecture, reason)


def cannot_probe(name: str, reason: str) -> EnvironmentMismatch:
    """The one-line error for a model that the probe has no answer for."""
    return EnvironmentMismatch(
        f"model.name_or_path: {name} could not be probed for wrong losses and gradients: {reason}; choose another "
        "model, or correct its code"
    )


def checked_configuration(recipe: Recipe) -> PreTrainedConfig:
    """The base's configuration. Raises FinetuneError if it cannot be read, or if the base's files do not fit it."""
    name, trusted = recipe.model.name_or_path, recipe.model.trust_remote_code

    def refusal(error: Exception) -> FinetuneError:
        if trusted and not isinstance(error, OSError | ValueError | ImportError):  # of code that came with the model
            return cannot_probe(name, class_and_words(error))
        return not_loaded("configuration", name, error)

    with _undisturbed(CPU), library_errors(refusal):
        config = configuration(recipe)
        refuse_files(recipe, stored_structure(recipe.model))
    return config


def _on_this_machine(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with its model replaced by a folder that has the known configuration."""
    section = recipe.model
    if Path(section.name_or_path).is_dir():
        return recipe
    from finetune.model.known_configs import full_config

    config, _ = full_config(section.name_or_path, section.revision)
    if "auto_map" in config and section.trust_remote_code:  # by its own code, from the Hub or its cache
        return recipe
    config.pop("auto_map", None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")  # a limit may be infinite
    local = section.model_copy(update={"name_or_path": str(folder), "revision": "main"})
    return recipe.model_copy(update={"model": local})


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Keep random numbers, the default format and the libraries' messages unchanged; free the GPU's memory."""
    gpus = [device] if device.type == "cuda" else []
    disabled, collected = logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.WARNING)
    gc.disable()  # thousands of modules are made: it would look through all that is imported, again and again
    try:
        with silenced(), torch.random.fork_rng(devices=gpus), torch.enable_grad():
            yield
    finally:
        logging.disable(disabled)
        if collected:
            gc.enable()
        if gpus:
            torch.cuda.empty_cache()
