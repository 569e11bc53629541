"""Micro-batches of preferences: pairs of answers, or judged answers, with what the objective needs beside the tokens.

Arrays and host facts alone: a plan makes such batches too, without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch

from finetune.tokens.batches import Documents, MicroBatch
from finetune.tokens.encoder import IGNORE
from finetune.training.batch_plan import BatchPlan

IdsAndLabels = tuple[np.ndarray, np.ndarray]  # input_ids and labels, int64, unshifted
# What the model's forward takes of a batch.
MODEL_INPUTS = (*("input_ids", "position_ids", "shift_labels", "supervised"),
                *("cu_seq_lens", "document_lengths", "answer_lengths"))  # fmt: skip


class AnswerBatch(MicroBatch, total=False):
    """A micro-batch of answers: `MicroBatch` with these. Answers are in the order of its documents."""

    units: int  # pairs or judged answers of this rank
    answer_lengths: tuple[int, ...]  # supervised tokens of each answer
    answer_tokens: torch.Tensor  # the same, float32 [answers]
    reference: torch.Tensor  # float32 [answers]: the reference's log-probability
    desirable: torch.Tensor  # bool [answers]: judged answers alone
    units_a_token: float  # the step's pairs for each chosen token of it
    mismatched: MicroBatch  # judged answers alone: the same prompts, each with another answer


def model_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the model's forward."""
    return {name: batch[name] for name in MODEL_INPUTS if name in batch}


@dataclass
class Groups:
    """Groups of places as rows: what is computed together. A group's documents are read once."""

    documents_of: Callable[[int], list[IdsAndLabels]]
    groups: Sequence[Sequence[int]]
    read: dict[int, list[IdsAndLabels]] = field(default_factory=dict)

    def documents(self, row: int) -> list[IdsAndLabels]:
        if row not in self.read:
            self.read[row] = [document for each in self.groups[row] for document in self.documents_of(each)]
        return self.read[row]


def answer_batches(
    plan: BatchPlan, documents_of: Callable[[int], list[IdsAndLabels]], groups: Sequence[Sequence[int]]
) -> list[tuple[AnswerBatch, list[int]]]:
    """This rank's micro-batches of these groups of places, and the places in each."""
    grouped = Groups(documents_of, groups)
    batches = plan.micro_batches(cast(Documents, grouped), np.arange(len(groups)))
    result = []
    for batch, numbers in zip(batches, plan.dealt(len(groups)), strict=True):
        documents = [document for number in numbers for document in grouped.documents(number)]
        lengths = tuple(int((labels[1:] != IGNORE).sum()) for _, labels in documents)
        places = [place for number in numbers for place in groups[number]]
        result.append((as_answers(batch, lengths, len(places)), places))
    return result


def as_answers(batch: MicroBatch, answer_lengths: tuple[int, ...], units: int) -> AnswerBatch:
    """The batch with the facts that every objective on answers needs."""
    facts = {"units": units, "answer_lengths": answer_lengths}
    tokens = torch.tensor(answer_lengths, dtype=torch.float32)
    return cast(AnswerBatch, {**batch, **facts, "answer_tokens": tokens})


def planned_answers(
    unit: Literal["pairs", "judged"], lengths: Sequence[int], made: Callable[[], MicroBatch]
) -> AnswerBatch:
    """A micro-batch of answers with these lengths whose tokens are all supervised, without data: for a plan.

    `made` makes the micro-batch of the documents, each time with tensors of its own.
    """
    answers = tuple(length - 1 for length in lengths)  # a document's last token predicts nothing
    batch = as_answers(made(), answers, len(lengths) // (2 if unit == "pairs" else 1))
    batch["reference"] = torch.zeros(len(lengths))
    if unit == "pairs":
        batch["units_a_token"] = 0.0
        return batch
    batch["desirable"] = torch.zeros(len(lengths), dtype=torch.bool)
    other = as_answers(made(), answers, len(lengths))
    other["reference"] = torch.zeros(len(lengths))
    batch["mismatched"] = other
    return batch


def prompt_tokens(document: IdsAndLabels) -> int:
    """The tokens before the first supervised one."""
    _, labels = document
    return int(np.argmax(labels != IGNORE))


def mismatched_document(asked: IdsAndLabels, answered: IdsAndLabels, max_length: int) -> IdsAndLabels:
    """One document's prompt with another's answer, cut at `max_length` tokens.

    Prompt a b and answer y z of the other: a b y z, of which y and z are supervised.
    """
    prompt, start = asked[0][: prompt_tokens(asked)], prompt_tokens(answered)
    ids = np.concatenate([prompt, answered[0][start:]])[:max_length]
    labels = np.concatenate([np.full(len(prompt), IGNORE), answered[1][start:]])[:max_length]
    return ids, labels
