"""The recipes of recipes/ on a GPU that is the host: one of each group whose recipes are alike in what CUDA decides.

    python -m torch.distributed.run --nproc_per_node 2 tests/support/stand_ins/recipes_on_gpu.py JOB        (a rank of
    several)

A recipe is made small as `finetune rehearse` makes it; strategy, method, quantisation, precision, attention, optimizer,
accumulation and recomputation are its own. It trains, is stopped by a signal, and is resumed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import pytest

from finetune import train
from finetune.model.known_configs import decoder_config
from finetune.recipe.loader import load_recipe
from finetune.recipe.optimizers import OPTIMIZERS
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import read_strategy
from finetune.rehearse.changes import SAVED_AFTER, changes, processes_of
from finetune.rehearse.shrink import shrink_model
from finetune.training import run as training_run
from tests.support.runs.cells import free_ports
from tests.support.runs.one_rank import as_before, let_deepspeed_choose_the_cpu
from tests.support.runs.recipe_results import recipes
from tests.support.stand_ins.pretend_cuda import pretended_cuda
from tests.support.stand_ins.pretend_deepspeed import load_engine

# What a rehearsal changes because a CPU lacks it, and a GPU that is the host has.
OF_THE_GPU = ("budget.", "training.optim", "training.mixed_precision", "quantization.", "model.dtype")
# What a GPU that is the host lacks too, with the reason: the value of a key, which is replaced in the recipe's run.
_PAGES = "its pages are CUDA's managed memory, which bitsandbytes' compiled library allocates (functional.py get_paged)"
LACKING = {("training.optim", "paged_adamw_8bit"): _PAGES, ("training.optim", "paged_adamw_32bit"): _PAGES}
LONGEST_ROW = 128  # tokens
STEPS = 6  # a GPU's step is read when the next one has begun, so one that is stopped after two may make two more


class Group(NamedTuple):
    """What differs between recipes in the branches that CUDA takes."""

    strategy: str
    family: str  # its layers decide between attention kernels: windows, sinks, linear attention, experts
    method: str
    quantized: str
    weights: str
    precision: str
    attention: str
    optimizer: str
    recomputed: str


def group_of(recipe: Recipe) -> Group:
    """The group that the recipe belongs to."""
    training, base = recipe.training, recipe.quantization
    return Group(
        strategy=recipe.accelerate_config,
        family=decoder_config(recipe.model.name_or_path, recipe.model.revision)[0]["model_type"],
        method="full" if recipe.lora is None else "lora",
        quantized="" if base is None else json.dumps(base.model_dump(mode="json"), sort_keys=True),
        weights=recipe.model.dtype,
        precision=training.mixed_precision + (", pure" if training.pure_bf16 else ""),
        attention=recipe.model.attention,
        optimizer=training.optim,
        recomputed=str(training.activation_checkpointing),
    )


@dataclass(frozen=True)
class Job:
    """A recipe made small in a folder; each training has a port for its process group."""

    recipe: str
    words: Sequence[str]
    ranks: int
    folder: str
    ports: Sequence[int]

    @property
    def whole(self) -> Path:
        return Path(self.folder, "whole")

    @property
    def stopped(self) -> Path:
        return Path(self.folder, "stopped")


def make_small(name: str, folder: Path) -> Job:
    """Write the small model of a recipe into `folder`; what is to be trained."""
    path = recipes()[name]
    recipe = load_recipe(path).recipe
    strategy = read_strategy(recipe.accelerate_config)
    ranks = 1 if recipe.budget.gpus * recipe.budget.nodes < 2 else processes_of(strategy, 2)
    model = shrink_model(recipe.model.name_or_path, recipe.model.revision, recipe.data, folder / "model")
    made = changes(recipe, strategy, model, processes=ranks, folder=folder)
    settings = {key: value for change in made for key, value in change.settings.items()}
    settings = {key: value for key, value in settings.items() if not key.startswith(OF_THE_GPU)}
    settings["data.max_length"] = LONGEST_ROW
    settings["training.max_steps"] = STEPS
    settings |= {"budget.gpus": ranks, "budget.nodes": 1, "budget.gpu_memory_gb": 80}
    if ("training.optim", recipe.training.optim) in LACKING:
        settings["training.optim"] = OPTIMIZERS[recipe.training.optim].unpaged
    words = tuple(f"{key}={json.dumps(value)}" for key, value in settings.items())
    return Job(str(path), words, ranks, str(folder), tuple(free_ports(3)))


def play(job: Job) -> list[int]:
    """Train it whole; again, until a signal stops it; and from there. The exit code of each, on each rank."""
    cache = {"FINETUNE_CACHE": str(Path(job.folder, "cache"))}  # the probe is not remembered
    if read_strategy(load_recipe(job.recipe).recipe.accelerate_config).uses_engine:
        let_deepspeed_choose_the_cpu()
        load_engine()
    with mock.patch.dict(os.environ, cache), pytest.MonkeyPatch.context() as patches, pretended_cuda(patches):
        codes = [_train(job, job.whole, job.ports[0])]
        with mock.patch.object(training_run, "save", _stop_after(training_run.save)):
            codes.append(_train(job, job.stopped, job.ports[1]))
        return [*codes, _train(job, job.stopped, job.ports[2])]


def _train(job: Job, run_dir: Path, port: int) -> int:
    with as_before():
        if job.ranks > 1:  # the launcher's own store still knows the addresses of the group before
            os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        return train.main([job.recipe, *job.words, f"output_dir={run_dir}"])


def _stop_after(save: Any) -> Any:
    """As `save`, and the first checkpoint is followed by a signal to stop."""

    def saved(recipe: Recipe, parts: Any, state: Any, *others: Any) -> Any:
        save(recipe, parts, state, *others)
        if state.step == SAVED_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)

    return saved


def main(words: Sequence[str]) -> int:
    """A rank: the job of that file; rank 0 writes the exit codes beside it."""
    file = Path(words[0])
    codes = play(Job(**json.loads(file.read_text())))
    if os.environ["RANK"] == "0":
        file.with_suffix(".codes").write_text(json.dumps(codes))
    return 0


def write_job(job: Job) -> Path:
    """For the ranks of `main`."""
    file = Path(job.folder, "job.json")
    file.write_text(json.dumps(asdict(job)))
    return file


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
