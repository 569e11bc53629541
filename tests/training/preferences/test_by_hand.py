"""The objectives' losses, metrics and mismatched answers against values by hand. No model and no process group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from finetune.recipe.sections.preferences import Dpo, Kto
from finetune.tokens.batches import Answers as AnswerFacts
from finetune.tokens.cache import StoredDocuments
from finetune.tokens.mixture import DocumentPool, Rows
from finetune.training.batch_plan import BatchPlan
from finetune.training.objectives import ChosenRows
from finetune.training.objectives.answers import ReferenceValues
from finetune.training.objectives.preferences import JudgedAnswers, Pairs

# Two pairs: minus the log-probabilities of chosen and rejected, their tokens, the reference's log-probabilities.
LOST, TOKENS, REFERENCE = (10.0, 20.0, 6.0, 3.0), (5, 4, 3, 2), (-12.0, -14.0, -7.0, -5.0)
# Ratios: 2 and -6, so the margin is 0.8 at beta 0.1; 1 and 2, so it is -0.1.
# log(1 + e^-0.8) = 0.371101, log(1 + e^0.8) = 1.171101; log(1 + e^0.1) = 0.744397, log(1 + e^-0.1) = 0.644397.
SIGMOID = 0.371101 + 0.744397
LOSSES: dict[str, tuple[dict[str, Any], float]] = {
    "sigmoid": ({}, SIGMOID),
    # (0.9 x 0.371101 - 0.1 x 1.171101) / 0.8 and (0.9 x 0.744397 - 0.1 x 0.644397) / 0.8
    "robust": ({"label_smoothing": 0.1}, 0.271101 + 0.756897),
    # (2/5 + 6/4 - 5)^2 and (1/3 - 2/2 - 5)^2
    "ipo": ({}, 9.61 + 32.111111),
    # 1 - s(0.2) + s(-0.6) and 1 - s(0.1) + s(0.2)
    "apo_zero": ({}, 0.450166 + 0.354344 + 0.475021 + 0.549834),
    # By the token: -2 and -5, -2 and -1.5. At beta 2, gamma 1: log(1 + e^-(6 - 1)), log(1 + e^(1 + 1))
    "simpo": ({"beta": 2.0, "simpo_gamma": 1.0}, 0.006715 + 2.126928),
}


class Answers(nn.Module):
    """Answers batch number n, which is its only token, with the n-th losses; notes the mode it was asked in."""

    def __init__(self, *losses: Sequence[float]) -> None:
        super().__init__()
        self.losses, self.modes = losses, list[bool]()

    def forward(self, input_ids: Tensor, answer_lengths: tuple[int, ...]) -> Tensor:
        self.modes.append(self.training)
        return torch.tensor(self.losses[int(input_ids)])


def answers(number: int = 0, units: int = 0, tokens: Sequence[int] = (), **facts: Any) -> Any:
    known = AnswerFacts(units, tuple(tokens), torch.tensor(tokens).float(), **({"reference": torch.empty(0)} | facts))
    return {"input_ids": torch.tensor([[number]]), "answers": known}


def pairs() -> Any:
    return answers(0, 2, TOKENS, reference=torch.tensor(REFERENCE), units_a_token=2 / 8)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_a_pairs_loss(loss_type: str) -> None:
    settings, expected = LOSSES[loss_type]
    found = Pairs(Dpo(loss_type=loss_type, **settings)).loss(Answers(LOST), pairs())  # type: ignore[arg-type]
    assert float(found.total) == pytest.approx(expected, abs=3e-6)
    assert found.count == 2


def test_the_supervised_part_is_of_the_chosen_answers_by_the_steps_token() -> None:
    """Chosen answers lose 10 and 6 over 8 tokens, 2 a token: for two pairs it counts 0.5 x 2 x 2."""
    found = Pairs(Dpo(sft_weight=0.5)).loss(Answers(LOST), pairs())
    assert float(found.total) == pytest.approx(SIGMOID + 2.0, abs=3e-6)


def test_a_pairs_metrics() -> None:
    objective = Pairs(Dpo())
    sums = objective.loss(Answers(LOST), pairs()).metrics
    means = objective.means(dict(zip(objective.metric_names, map(float, sums), strict=True)), 2)
    expected = {
        "reward_chosen": 0.15, "reward_rejected": -0.2, "reward_margin": 0.35, "reward_accuracy": 0.5,
        "logps_chosen": -8.0, "logps_rejected": -11.5,
        "logp_chosen_by_token": -2.0, "logp_rejected_by_token": -3.25,
        # 2/5, -6/4, 1/3 and 2/2: their mean, with the other sign
        "kl_by_token": -(0.4 - 1.5 + 1 / 3 + 1.0) / 4,
    }  # fmt: skip
    assert means == pytest.approx(expected, abs=1e-6)


def kto_after(lost: Sequence[Sequence[float]], reference: Sequence[Sequence[float]], others: Any) -> tuple[Any, Any]:
    """KTO after `before_step` on mismatched answers; `others`: the other ranks' sum of ratios, and their answers."""
    objective, model = JudgedAnswers(Kto(desirable_weight=1.5, undesirable_weight=0.5), 64), Answers(*lost)
    batches = [
        answers(units=len(values), mismatched=answers(number, reference=torch.tensor(values)))
        for number, values in enumerate(reference)
    ]
    objective.before_step(model, batches, lambda tally: tally + torch.tensor(others, dtype=tally.dtype))
    assert model.training
    assert not any(model.modes)
    return objective, model


def test_ktos_baseline_is_the_mean_over_all_ranks() -> None:
    """Here -1 + 3 = 2, -2 + 4 = 2 and -5 + 6 = 1; elsewhere 7 of two answers: 12 / 5."""
    objective, _ = kto_after([[1.0, 2.0], [5.0]], [[-3.0, -4.0], [-6.0]], [7.0, 2.0])
    # Ratios 3.4 and 1.4 stand 1 above and 1 below the baseline.
    judged = answers(units=2, reference=torch.tensor([-9.0, -8.0]), desirable=torch.tensor([True, False]))
    found = objective.loss(Answers([5.6, 6.6]), judged)
    assert float(found.total) == pytest.approx((1.5 + 0.5) * (1 - 1 / (1 + math.exp(-0.1))), abs=1e-6)
    sums = dict(zip(objective.metric_names, map(float, found.metrics), strict=True))
    assert objective.means(sums, 2) == pytest.approx(
        {"reward_accuracy": 1.0, "kl": 2.4, "reward_chosen": 0.34, "reward_rejected": 0.14, "logps_chosen": -5.6,
         "logps_rejected": -6.6, "reward_margin": 0.2}, abs=1e-6,
    )  # fmt: skip


def test_ktos_baseline_is_never_below_zero() -> None:
    objective, _ = kto_after([[4.0]], [[-1.0]], [0.0, 0.0])
    judged = answers(units=1, reference=torch.tensor([-2.0]), desirable=torch.tensor([True]))
    found = objective.loss(Answers([2.0]), judged)
    assert float(found.total) == pytest.approx(1.5 * 0.5)


def rows_of(*documents: tuple[Sequence[int], Sequence[int]]) -> Rows:
    """Judged answers, each a prompt and an answer; every second one is wanted."""
    ids = [np.asarray([*prompt, *answer], np.int32) for prompt, answer in documents]
    learned = [np.asarray([False] * len(prompt) + [True] * len(answer)) for prompt, answer in documents]
    number = np.arange(len(documents))
    supervised = np.asarray([len(answer) for _, answer in documents])
    store = StoredDocuments(
        np.concatenate(ids),
        np.concatenate(learned),
        np.cumsum([0, *map(len, ids)]),
        supervised,
        number.astype(np.uint64),
        number + 1,
        number * 0,
        number,
        ("rows.jsonl",),
        {},
        first=np.asarray([*map(len, ids)]),
        first_supervised=supervised,
        desirable=number % 2 == 0,
    )
    pool = DocumentPool([store])
    other = next(place for place, (_, answer) in enumerate(documents) if answer != documents[0][1])
    pool.two_answers = pool.document(0), pool.document(other)
    return pool.rows(number, None)


def plan_of(rows: int, rank: int = 0, world_size: int = 1, micro_batch: int = 1) -> BatchPlan:
    return BatchPlan(rows, rows, 1, rows, micro_batch, world_size, rank, 42, flat=False)


def mismatched(rows: Rows, indices: Sequence[int], first: int = 0, **plan: int) -> dict[int, tuple[list[int], float]]:
    """By place in the step: the tokens of the mismatched answer's document, and its reference."""
    stream = np.arange(100, dtype=np.float32)
    reference = ReferenceValues(np.zeros((len(rows.pool.lengths), 1), np.float32), stream, -stream)
    objective = JudgedAnswers(Kto(), 8, reference)
    chosen = ChosenRows(plan_of(len(rows), **plan), rows, np.asarray(indices), first)
    found = {}
    dealt = chosen.plan.dealt(len(indices))
    for batch, places in zip(objective.batches(chosen), dealt, strict=True):
        other: Any = batch["answers"].mismatched
        for row, place in enumerate(places):
            length = len(other["input_ids"][row]) - int((other["input_ids"][row] == 0).sum())
            found[place] = (other["input_ids"][row, :length].tolist(), float(other["answers"].reference[row]))
    return found


A, B, C = ([1], [11, 12]), ([2, 2], [21]), ([3], [31, 32, 33])


def test_each_prompt_gets_the_next_rows_answer_and_the_last_the_first_ones() -> None:
    assert mismatched(rows_of(A, B, C), [2, 0, 1], first=40) == {
        0: ([3, 11, 12], 40.0),
        1: ([1, 21], 41.0),
        2: ([2, 2, 31, 32, 33], 42.0),
    }


@pytest.mark.parametrize(
    ("documents", "indices", "expected"),
    [
        # A step of one row: the data's first answer, or for that answer the first other one.
        ((A, B, C), [1], [[2, 2, 11, 12]]),
        ((A, B, C), [0], [[1, 21]]),
        # One row twice in a step, where two epochs meet: neither gets its own answer.
        ((A, B, C), [2, 2, 0, 1], [[3, 11, 12], [3, 11, 12], [1, 21], [2, 2, 31, 32, 33]]),
        # Equal answers to other prompts, and equal rows.
        ((A, ([4], [11, 12]), B), [0, 1, 2], [[1, 21], [4, 21], [2, 2, 11, 12]]),
        ((A, A, B), [0, 1], [[1, 21], [1, 21]]),
        # Cut at 8 tokens, the second row's answer would be the first row's own.
        ((([9] * 6, [5, 5]), ([8], [5, 5, 5, 7]), C), [0, 1, 2], [[9] * 6 + [31, 32], [8, 31, 32, 33], [3, 5, 5]]),
    ],
)
def test_no_answer_is_measured_against_itself(documents: Any, indices: list[int], expected: list[list[int]]) -> None:
    found = mismatched(rows_of(*documents), indices)
    assert [found[place][0] for place in range(len(indices))] == expected


def test_ranks_and_micro_batches_do_not_change_it() -> None:
    rows = rows_of(A, B, C, ([4], [11, 12]), A)
    whole = mismatched(rows, [4, 3, 0, 1, 2], first=5, micro_batch=5)
    for ranks in (1, 2, 3, 5):
        for micro_batch in (1, 2):
            split: dict[int, Any] = {}
            for rank in range(ranks):
                split |= mismatched(rows, [4, 3, 0, 1, 2], 5, rank=rank, world_size=ranks, micro_batch=micro_batch)
            assert split == whole


def test_held_out_sets_each_have_their_own_reference() -> None:
    rows, values = rows_of(A, B, C), np.arange(5, dtype=np.float32)
    objective = JudgedAnswers(Kto(), 8, ReferenceValues(np.zeros((3, 1), np.float32), -values, values))
    (batch,) = objective.eval_batches(plan_of(3, micro_batch=3), rows.subset([0, 2]), first=3)
    other: Any = batch["answers"].mismatched
    assert other["answers"].reference.tolist() == [3.0, 4.0]
    assert other["input_ids"].tolist() == [[1, 31, 32, 33], [3, 11, 12, 0]]


def test_the_worst_step_keeps_its_longest_rows() -> None:
    """A stranger's shorter answer would need less memory than the run does."""
    longest = replace(rows_of(A, B, C).subset([2]), is_all_supervised=True)
    assert mismatched(longest, [0])[0][0] == [3, 31, 32, 33]
