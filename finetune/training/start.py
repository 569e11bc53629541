"""What is known of a run before its first process group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.hub.start_adapter import StartAdapter
from finetune.launch.launcher import Launch
from finetune.launch.signals import StopRequest
from finetune.recipe.number_formats import ChosenFormats
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.run_folder.folder import Claim
from finetune.tokens.dataset import Prepared
from finetune.training.batch_plan import BatchPlan


@dataclass(frozen=True)
class Start:
    """What is known before the first process group, and stays as it is."""

    recipe: Recipe
    launch: Launch
    strategy: Strategy
    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared
    plan: BatchPlan
    adapter: StartAdapter | None  # that a new run starts from
    claim: Claim | None  # of rank 0 alone
    stop: StopRequest
    probed: dict[str, Any]  # what the probe found of the model
    recomputation: dict[str, Any]  # the choice of `auto`, with its reason; empty if the recipe names it
    formats: ChosenFormats  # the choice of `auto`

    @property
    def run_dir(self) -> Path:
        return Path(self.recipe.run_dir)

    @property
    def writes(self) -> bool:
        """Whether this rank writes the run's folder: rank 0 of a run that is not finished."""
        return self.claim is not None and self.claim.status != "finished"
