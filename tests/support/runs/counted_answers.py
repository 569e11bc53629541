"""Trainings as tests/support/runs/cells.py runs them; every rank writes its answers' cost beside the runs, as JSON."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from torch import nn

from finetune.files import append_lines
from finetune.generation import held_out
from finetune.model.build import decoder_parts
from finetune.training import samples, session
from finetune.training.agreement import Agreed
from tests.support.runs.cells import main


def count(words: list[str]) -> int:
    """Train the recipes; RUN.answersN has a line for each batch of prompts that rank N answered."""
    genuine, written, runs = held_out.greedy_answers, session.write_samples, [Path()]

    def of_run(agreed: Agreed, *arguments: Any, **options: Any) -> None:
        runs.append(agreed.run_dir)
        written(agreed, *arguments, **options)

    def counted(model: nn.Module, tokenizer: Any, prompts: Any, **options: Any) -> list[str]:
        forwards: list[int] = []
        handle = decoder_parts(model).register_forward_pre_hook(lambda *_: forwards.append(1))
        answers = genuine(model, tokenizer, prompts, **options)
        handle.remove()
        cost = {"prompts": len(prompts), "forwards": len(forwards)}
        append_lines(runs[-1].with_suffix(f".answers{os.environ.get('RANK', '0')}"), [cost])
        return answers

    with (
        mock.patch.object(samples, "write_samples", of_run),
        mock.patch.object(session, "write_samples", of_run),
        mock.patch.object(held_out, "greedy_answers", counted),
    ):
        return main(words)


if __name__ == "__main__":
    sys.exit(count(sys.argv[1:]))
