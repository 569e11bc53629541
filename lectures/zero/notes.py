"""What the homework measured: six runs of GPT-2 Large under DeepSpeed on 8 GPUs, and the terms of their memory.

A step of its log is one micro-batch of one rank: ZeRO-1 shows no optimizer state at step 10 and shows it at step 40,
and an update takes 32 micro-batches (512 rows, 8 ranks, 2 rows each). Under ZeRO-3 the state is there after the first
step, so these runs updated at each.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.closed_form.constants import FLOAT32
from finetune.wording import GIB
from lectures.zero.terms import Gpt2Step, ZeroJob, zero_terms

GPT2_LARGE, GPT2_LAYERS = 774_030_080, 36  # parameters, layers
_HIDDEN, _HEADS, _VOCABULARY, _TOKENS = 1280, 20, 50_257, 1024
_LARGEST = _VOCABULARY * _HIDDEN  # elements of the embedding, the largest parameter
HOMEWORK_RANKS, _ROWS = 8, 2  # ranks, rows of a micro-batch
LOGGED_STEPS = 20  # of which the seconds are
_HALF = 2  # bytes of an fp16 number


@dataclass(frozen=True)
class HomeworkRow:
    """One of the six runs: what it was, its memory at step 10, and its seconds for 20 steps."""

    name: str
    strategy: str  # of accelerate_configs/
    job: ZeroJob
    updated: bool  # before step 10's reading: its moments are there
    gib: tuple[float, float, float]  # after forward, backward and step, as printed
    seconds: float  # of 20 logged steps

    @property
    def precision(self) -> str:
        """As a recipe says it."""
        return "fp16" if self.job.param_bytes == _HALF else "no"

    @property
    def settings(self) -> dict[str, str]:
        """The row as `compare` varies it."""
        return {"accelerate_config": self.strategy, "training.mixed_precision": self.precision}

    def explained(self, phase: str) -> dict[str, int]:
        """Bytes by term after a phase of step 10."""
        whole = {"forward": GPT2_LARGE, "backward": _LARGEST, "step": 0}[phase] if self.job.stage == 3 else 0
        after_forward, width = phase == "forward", self.job.param_bytes
        model = Gpt2Step(GPT2_LAYERS, _HIDDEN, _HEADS, _VOCABULARY, _TOKENS, _ROWS, _TOKENS, param_bytes=width)
        terms = zero_terms(self.job, updated=self.updated, gathered=whole, prefetched=after_forward) | model.retained()
        return terms | (model.saved() if after_forward else {})

    def explained_gib(self, phase: str) -> float:
        return sum(self.explained(phase).values()) / GIB


def _job(stage: int, *, offload: bool = False, width: int = FLOAT32) -> ZeroJob:
    return ZeroJob(stage, GPT2_LARGE, _LARGEST, HOMEWORK_RANKS, param_bytes=width, offload=offload)


HOMEWORK = (
    HomeworkRow("zero1", "zero1", _job(1), False, (18.866, 9.481, 9.481), 28.5),
    HomeworkRow("zero2", "zero2", _job(2), False, (14.486, 5.101, 5.101), 104.3),
    HomeworkRow("zero2 + offload", "zero2_offload", _job(2, offload=True), False, (13.997, 4.613, 4.613), 109.1),
    HomeworkRow("zero3", "zero3", _job(3), True, (17.603, 5.405, 5.160), 102.3),
    HomeworkRow("zero3 + offload", "zero3_offload", _job(3, offload=True), True, (15.804, 3.600, 3.355), 139.8),
    HomeworkRow("zero3 + fp16", "zero3", _job(3, width=_HALF), False, (8.744, 2.562, 2.438), 59.0),
)
