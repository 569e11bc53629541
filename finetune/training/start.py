"""What is known of a run before its first process group."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from finetune.hub.checkpoints import CheckpointPusher
from finetune.launch.launcher import Launch
from finetune.launch.signals import StopRequest
from finetune.recipe.schema import Recipe
from finetune.recipe.strategy import Strategy
from finetune.run_folder.folder import Claim
from finetune.tokens.dataset import Prepared
from finetune.training.planner_process import PlannerProcess
from finetune.training.run import BatchPlan
from finetune.training.trackers import Trackers


@dataclass(frozen=True)
class Start:
    """What is known before the first process group."""

    recipe: Recipe
    launch: Launch
    strategy: Strategy
    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared
    plan: BatchPlan
    claim: Claim | None  # of rank 0 alone
    stop: StopRequest
    foretold: PlannerProcess = field(default_factory=PlannerProcess)  # what the planner says; asked by rank 0
    trackers: Trackers | None = None  # of rank 0 alone
    pusher: CheckpointPusher | None = None  # of rank 0 alone

    @property
    def run_dir(self) -> Path:
        return Path(self.recipe.run_dir)
