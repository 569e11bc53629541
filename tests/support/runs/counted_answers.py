"""Trainings as tests/support/runs/cells.py runs them; every rank writes its answers' cost beside the runs, as JSON."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn

from finetune.files import append_lines
from finetune.model.build import decoder_parts
from finetune.training import samples
from finetune.training.agreement import Agreed
from tests.support.runs.cells import main


def count(words: list[str]) -> int:
    """Train the recipes; RUN.answersN has a line for each batch of prompts that rank N answered."""
    genuine, decided, runs = samples.greedy_answers, samples.questions_of, [Path()]

    def of_run(agreed: Agreed, **options: Any) -> samples.Questions:
        runs.append(agreed.run_dir)
        return decided(agreed, **options)

    def counted(model: nn.Module, tokenizer: Any, prompts: Any, **options: Any) -> list[str]:
        forwards: list[int] = []
        handle = decoder_parts(model).register_forward_pre_hook(lambda *_: forwards.append(1))
        answers = genuine(model, tokenizer, prompts, **options)
        handle.remove()
        cost = {"prompts": len(prompts), "forwards": len(forwards)}
        append_lines(runs[-1].with_suffix(f".answers{os.environ.get('RANK', '0')}"), [cost])
        return answers

    with mock.patch.object(samples, "questions_of", of_run), mock.patch.object(samples, "greedy_answers", counted):
        return main(words)


if __name__ == "__main__":
    sys.exit(count(sys.argv[1:]))
