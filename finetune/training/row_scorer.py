"""Held-out rows answered and scored while a run trains: `eval.generate.every`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from finetune.generation.generate import Answer
from finetune.generation.held_out import Batching, generated_answers, scores_on_all
from finetune.generation.settings import may_share_a_batch
from finetune.scoring.metrics import unread, unread_in_words
from finetune.strategies.accelerator import holds_on_all
from finetune.strategies.assemble import Assembled
from finetune.strategies.pieces import all_ranks
from finetune.training.agreement import Agreed
from finetune.training.run import StepParts
from finetune.training.run_output import RunOutput
from finetune.wording import counted


@dataclass(frozen=True)
class RowScorer:
    """Answers and scores a run's held-out rows while it trains."""

    agreed: Agreed
    parts: StepParts
    assembled: Assembled
    output: RunOutput

    def score(self, step: int) -> dict[str, Any]:
        """Answer with the weights after `step` steps, and write the line. Every rank calls it. Returns the line."""
        agreed, accelerator, model = self.agreed, self.parts.accelerator, self.assembled.decoder
        pipeline, terminal, scored_set = self.assembled.pipeline, self.output.terminal, agreed.scored
        assert scored_set is not None
        batching = Batching(
            shared=holds_on_all(accelerator, may_share_a_batch(agreed.probed)),
            device=accelerator.device,
            ranks=all_ranks(),
            sharded=agreed.strategy.shards_parameters,
            staged=pipeline is not None,
        )
        with self.parts.weights.cast(), pipeline.answering(model) if pipeline else nullcontext():
            answers = generated_answers(model, agreed.tokenizer, scored_set, batching, terminal.progress, terminal.say)
        line = score_line(step, scores_on_all(scored_set, answers, batching.ranks), answers)
        self.output.write_metrics(line)
        when = f"step {step}" if step else "before"
        terminal.say(f"{when}: {score_line_in_words(line)}")
        return line


def score_line(step: int, scores: dict[str, list[float]], answers: Sequence[Answer]) -> dict[str, Any]:
    """The line of metrics.jsonl for one scored generation: each metric's mean over the rows, and its unread answers."""
    not_read = {name: unread([answer.text for answer in answers], values) for name, values in scores.items()}
    means = {f"score_{name}": sum(values) / len(values) for name, values in scores.items()}
    return {"kind": "score", "step": step, "rows": len(answers), **means, "unread": not_read}


def score_line_in_words(line: Mapping[str, Any]) -> str:
    """A line's scores for the terminal: exact 0.920, number 0.950 (200 answers)."""
    means = [(key.removeprefix("score_"), value) for key, value in line.items() if key.startswith("score_")]
    not_read = [f"; {name} {unread_in_words(part)}" for name, part in line["unread"].items() if part["count"]]
    shown = ", ".join(f"{name} {mean:.3f}" for name, mean in means)
    return f"{shown} ({counted(line['rows'], 'answer')})" + "".join(not_read)
