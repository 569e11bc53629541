"""Micro-batches of preferences: pairs of answers, or judged answers, with what the objective needs beside the tokens.

Arrays and host facts alone: a plan makes such batches too, without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from finetune.tokens.batches import Answers, Documents, MicroBatch
from finetune.tokens.encoder import IGNORE
from finetune.training.batch_plan import BatchPlan

IdsAndLabels = tuple[np.ndarray, np.ndarray]  # input_ids and labels, int64, unshifted


@dataclass(frozen=True)
class ReferenceValues:
    """A reference's log-probabilities, float32."""

    answers: np.ndarray  # [the pool's documents, answers of each]
    mismatched: np.ndarray | None = None  # KTO: [rows of the run], in the order in which the run takes them
    held_out: np.ndarray | None = None  # KTO: [held-out rows]


@dataclass(frozen=True)
class AnswerInputs:
    """This rank's micro-batch of answers, before an objective adds its facts."""

    batch: MicroBatch
    lengths: tuple[int, ...]  # supervised tokens of each answer
    places: list[int]  # of its pairs or judged answers, in the step

    def with_answers(self, reference: torch.Tensor, **facts: Any) -> MicroBatch:
        """The micro-batch that a step takes."""
        return with_answers(self.batch, self.lengths, len(self.places), reference, **facts)


def with_answers(
    batch: MicroBatch, lengths: tuple[int, ...], units: int, reference: torch.Tensor, **facts: Any
) -> MicroBatch:
    """The batch with its `Answers`; `facts` are those of one objective."""
    tokens = torch.tensor(lengths, dtype=torch.float32)
    return {**batch, "answers": Answers(units, lengths, tokens, reference, **facts)}


def model_inputs(batch: MicroBatch, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of the model's forward, which then returns minus the log-probability of each answer."""
    return {key: value for key, value in batch.items() if key != "answers"} | {"answer_lengths": lengths}


@dataclass(frozen=True)
class Groups:
    """Groups of rows that are computed together, each as one row. A group's documents are read once."""

    rows: Documents
    groups: Sequence[Sequence[int]]
    read: dict[int, list[IdsAndLabels]] = field(default_factory=dict)

    def documents(self, row: int) -> list[IdsAndLabels]:
        if row not in self.read:
            self.read[row] = [document for place in self.groups[row] for document in self.rows.documents(place)]
        return self.read[row]


def answer_batches(plan: BatchPlan, rows: Documents, groups: Sequence[Sequence[int]]) -> list[AnswerInputs]:
    """This rank's micro-batches of these groups of rows."""
    grouped = Groups(rows, groups)
    batches = plan.micro_batches(grouped, np.arange(len(groups)))
    result = []
    for batch, numbers in zip(batches, plan.dealt(len(groups)), strict=True):
        documents = [document for number in numbers for document in grouped.documents(number)]
        lengths = tuple(int((labels[1:] != IGNORE).sum()) for _, labels in documents)
        places = [place for number in numbers for place in groups[number]]
        result.append(AnswerInputs(batch, lengths, places))
    return result


def planned_answers(
    unit: Literal["pairs", "judged"], lengths: Sequence[int], made: Callable[[], MicroBatch]
) -> MicroBatch:
    """A micro-batch of answers with these lengths whose tokens are all supervised, without data: for a plan.

    `made` makes the micro-batch of the documents, each time with tensors of its own.
    """
    answers = tuple(length - 1 for length in lengths)  # a document's last token predicts nothing
    if unit == "pairs":
        return with_answers(made(), answers, len(lengths) // 2, torch.zeros(len(lengths)))
    desirable = torch.zeros(len(lengths), dtype=torch.bool)
    batch, other = made(), with_answers(made(), answers, len(lengths), torch.zeros(len(lengths)))
    reference = torch.zeros(len(lengths))
    return with_answers(batch, answers, len(lengths), reference, desirable=desirable, mismatched=other)


def prompt_tokens(document: IdsAndLabels) -> int:
    """The tokens before the first supervised one."""
    _, labels = document
    return int(np.argmax(labels != IGNORE))


def mismatched_document(own: IdsAndLabels, answered: IdsAndLabels, max_length: int) -> IdsAndLabels:
    """One document's prompt with another's answer, cut at `max_length` tokens.

    Prompt a b and answer y z of the other: a b y z, of which y and z are supervised.
    """
    prompt, start = own[0][: prompt_tokens(own)], prompt_tokens(answered)
    ids = np.concatenate([prompt, answered[0][start:]])[:max_length]
    labels = np.concatenate([np.full(len(prompt), IGNORE), answered[1][start:]])[:max_length]
    return ids, labels
