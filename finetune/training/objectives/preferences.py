"""Preferences: DPO and its relatives on pairs of answers, KTO on judged answers.

Both compare the model's log-probability of an answer with a reference's, which is known before the first step
(training/reference.py). One forward computes both answers of a pair. Losses and names of metrics are TRL's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from finetune.recipe.sections.preferences import USUAL_MARGIN, Dpo, Kto
from finetune.tokens.batches import MicroBatch
from finetune.tokens.mixture import Rows
from finetune.training.batch_plan import BatchPlan
from finetune.training.objectives import ChosenRows, LossSum, Reduce
from finetune.training.objectives.answers import (
    AnswerInputs,
    IdsAndLabels,
    ReferenceValues,
    answer_batches,
    mismatched_document,
    model_inputs,
)

BY_ANSWER = ["reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy", "logps_chosen", "logps_rejected"]
BY_TOKEN = ["logp_chosen_by_token", "logp_rejected_by_token"]


class Pairs:
    """DPO, robust DPO, IPO, APO-zero and SimPO. Counts pairs."""

    unit: Literal["pairs"] = "pairs"
    needs_whole_step = False

    def __init__(self, settings: Dpo, reference: ReferenceValues | None = None) -> None:
        """`reference`: None stands for zeros, as in the worst step, which is undone. training/reference.py sets it."""
        self._settings, self.reference = settings, reference
        names = BY_ANSWER + BY_TOKEN
        if settings.needs_reference:
            names = [*names, "kl_by_token"]
        self.metric_names: tuple[str, ...] = tuple(names)

    def planned_count(self, rows: Rows, indices: np.ndarray) -> int:
        """A row is a pair."""
        return len(indices)

    def count(self, batch: MicroBatch) -> int:
        """This rank's pairs."""
        return batch["answers"].units

    def batches(self, chosen: ChosenRows) -> list[MicroBatch]:
        """This rank's micro-batches of a step's pairs; the documents of each pair are chosen, rejected."""
        chosen_tokens = chosen.rows.pool.first_supervised
        assert chosen_tokens is not None
        units = chosen.rows.units(chosen.indices)
        units_a_token = len(units) / int(chosen_tokens[units].sum())
        return [
            inputs.with_answers(self._reference_of(units[inputs.places]), units_a_token=units_a_token)
            for inputs in answer_batches(chosen.plan, chosen, chosen.grouped())
        ]

    def eval_batches(self, plan: BatchPlan, rows: Rows, first: int = 0) -> Iterator[MicroBatch]:
        """This rank's micro-batches of these held-out pairs."""
        return iter(self.batches(ChosenRows.held_out_rows(plan, rows, first)))

    def before_step(self, model: nn.Module, batches: Iterable[MicroBatch], reduce: Reduce) -> None:
        """Nothing: each pair's loss depends on its own two answers."""

    def loss(self, model: nn.Module, batch: MicroBatch) -> LossSum:
        """One forward for all pairs of the micro-batch."""
        answers, settings = batch["answers"], self._settings
        # [pairs, chosen and rejected]: minus the log-probability
        lost = model(**model_inputs(batch, answers.lengths)).view(-1, 2)
        tokens = answers.tokens.view(-1, 2)
        log_probability = -lost
        ratio = log_probability - answers.reference.view(-1, 2)
        by_token = log_probability / tokens
        rewards = settings.beta * (ratio if settings.needs_reference else by_token)
        margin = rewards[:, 0] - rewards[:, 1]
        total = self._losses(rewards, margin, ratio / tokens).sum()
        if settings.sft_weight:
            total = total + settings.sft_weight * answers.units_a_token * lost[:, 0].sum()
        with torch.no_grad():
            metrics = [rewards[:, 0], rewards[:, 1], margin, (margin > 0).float()]
            metrics += [log_probability[:, 0], log_probability[:, 1], by_token[:, 0], by_token[:, 1]]
            if settings.needs_reference:
                metrics.append(-(ratio / tokens).mean(dim=1))
            sums = tuple(metric.sum() for metric in metrics)
        return LossSum(total, answers.units, sums)

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Each metric's mean over pairs."""
        return {name: total / count for name, total in sums.items()}

    def _losses(self, rewards: Tensor, margin: Tensor, ratio_by_token: Tensor) -> Tensor:
        """Each pair's loss, [pairs]."""
        settings = self._settings
        match settings.loss_type:
            case "sigmoid":  # Rafailov et al., Direct Preference Optimization, 2023, eq. 7
                return -logsigmoid(margin)
            case "robust":  # Chowdhury et al., Provably Robust DPO, 2024, eq. 10
                wrong = settings.label_smoothing
                return (-(1 - wrong) * logsigmoid(margin) + wrong * logsigmoid(-margin)) / (1 - 2 * wrong)
            case "ipo":  # Azar et al., A General Theoretical Paradigm, 2023, eq. 17, by the token as its authors say
                return (ratio_by_token[:, 0] - ratio_by_token[:, 1] - 1 / (2 * settings.beta)) ** 2
            case "apo_zero":  # D'Oosterlinck et al., Anchored Preference Optimization, 2024, eq. 7
                return 1 - rewards[:, 0].sigmoid() + rewards[:, 1].sigmoid()
            case "simpo":  # Meng et al., SimPO, 2024, eq. 6; its beta is in the rewards
                gamma = USUAL_MARGIN if settings.simpo_gamma is None else settings.simpo_gamma
                return -logsigmoid(margin - gamma)

    def _reference_of(self, units: np.ndarray) -> Tensor:
        if self.reference is None or not self._settings.needs_reference:
            return torch.zeros(2 * len(units))
        return torch.from_numpy(self.reference.answers[units].reshape(-1))


@dataclass(frozen=True)
class Mismatched:
    """Each chosen row's prompt with another row's answer: the rows of KTO's baseline.

    The answer is the next row's in the step; after the last row comes the first one. An answer equal to the row's own
    is skipped, because it would measure the baseline on what the loss compares with it. If the step has no other, one
    of the training data's first two that differ takes its place. So rows alone decide, not the split.
    """

    chosen: ChosenRows
    max_length: int

    def documents(self, place: int) -> list[IdsAndLabels]:
        """The document of the row at this place; its own where no answer differs."""
        own, rows = self.chosen.documents(place)[0], len(self.chosen.indices)
        following = (self.chosen.documents((place + ahead) % rows)[0] for ahead in range(1, rows))
        for answered in chain(following, self.chosen.rows.two_answers):
            other = mismatched_document(own, answered, self.max_length)
            if not np.array_equal(other[0], own[0]):
                return [other]
        return [own]


class JudgedAnswers:
    """KTO. Counts judged answers. Its KL baseline is the mean over the step's mismatched answers on all ranks."""

    unit: Literal["rows"] = "rows"
    needs_whole_step = True
    # The last two count; the means are over wanted and over unwanted answers.
    metric_names: tuple[str, ...] = (
        "reward_chosen",
        "reward_rejected",
        "logps_chosen",
        "logps_rejected",
        "reward_accuracy",
        "kl",
        "chosen",
        "rejected",
    )

    def __init__(self, settings: Kto, max_length: int, reference: ReferenceValues | None = None) -> None:
        """`reference`: None stands for zeros, as in the worst step, which is undone. training/reference.py sets it."""
        self._settings, self._max_length, self.reference = settings, max_length, reference
        self._kl: Tensor | None = None  # float32 []

    def planned_count(self, rows: Rows, indices: np.ndarray) -> int:
        """A row is a judged answer."""
        return len(indices)

    def count(self, batch: MicroBatch) -> int:
        """This rank's judged answers."""
        return batch["answers"].units

    def batches(self, chosen: ChosenRows) -> list[MicroBatch]:
        """This rank's micro-batches of a step's answers, each with its prompts' mismatched ones."""
        chosen = replace(chosen, groups=chosen.grouped())
        units, desirable = chosen.rows.units(chosen.indices), chosen.rows.pool.desirable
        assert desirable is not None
        result: list[MicroBatch] = []
        own = answer_batches(chosen.plan, chosen, chosen.grouped())
        for inputs, others in zip(own, self.mismatched_batches(chosen), strict=True):
            numbers = units[inputs.places]
            reference = mismatched = torch.zeros(len(numbers))
            if self.reference is not None:
                reference = torch.from_numpy(self.reference.answers[numbers, 0])
                mismatched = torch.from_numpy(self._mismatched(self.reference, chosen, inputs.places))
            other = others.with_answers(mismatched)
            is_desirable = torch.from_numpy(desirable[numbers])
            result.append(inputs.with_answers(reference, desirable=is_desirable, mismatched=other))
        return result

    def mismatched_batches(self, chosen: ChosenRows) -> list[AnswerInputs]:
        """This rank's micro-batches of each row's prompt with another answer."""
        return answer_batches(chosen.plan, Mismatched(chosen, self._max_length), chosen.grouped())

    def eval_batches(self, plan: BatchPlan, rows: Rows, first: int = 0) -> Iterator[MicroBatch]:
        """This rank's micro-batches of these held-out answers."""
        return iter(self.batches(ChosenRows.held_out_rows(plan, rows, first)))

    def before_step(self, model: nn.Module, batches: Iterable[MicroBatch], reduce: Reduce) -> None:
        """The KL baseline: the mean of log p - log p of the reference over the mismatched answers, at least 0."""
        was_training = model.training
        model.eval()
        tally = torch.zeros(2, dtype=torch.float64)
        for batch in batches:
            answers, other = batch["answers"], batch["answers"].mismatched
            assert other is not None
            ratio = -model(**model_inputs(other, other["answers"].lengths)) - other["answers"].reference
            tally = tally.to(ratio.device)
            tally[0] += ratio.sum()
            tally[1] += answers.units
        model.train(was_training)
        total, count = reduce(tally)
        self._kl = (total / count).clamp(min=0).float()

    def loss(self, model: nn.Module, batch: MicroBatch) -> LossSum:
        """One forward for all answers of the micro-batch."""
        answers, settings, is_desirable = batch["answers"], self._settings, batch["answers"].desirable
        assert is_desirable is not None
        assert self._kl is not None, "before_step computes the baseline"
        log_probability = -model(**model_inputs(batch, answers.lengths))  # [answers]
        ratio = log_probability - answers.reference
        # Ethayarajh et al., KTO, 2024, eq. 8: the value of a wanted answer, and of an unwanted one.
        value = (settings.beta * torch.where(is_desirable, ratio - self._kl, self._kl - ratio)).sigmoid()
        weight = torch.where(is_desirable, settings.desirable_weight, settings.undesirable_weight)
        total = (weight * (1 - value)).sum()
        with torch.no_grad():
            rewards, chosen = settings.beta * ratio, is_desirable.float()
            right = ((ratio > self._kl) == is_desirable).float()
            sums = [(rewards * chosen).sum(), (rewards * (1 - chosen)).sum()]
            sums += [(log_probability * chosen).sum(), (log_probability * (1 - chosen)).sum()]
            sums += [right.sum(), self._kl * answers.units, chosen.sum(), (1 - chosen).sum()]
        return LossSum(total, answers.units, tuple(sums))

    def means(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Means of wanted and of unwanted answers. A kind that the step lacks is left out."""
        means = {name: sums[name] / count for name in ("reward_accuracy", "kl")}
        for kind in ("chosen", "rejected"):
            if sums[kind]:
                means |= {f"{name}_{kind}": sums[f"{name}_{kind}"] / sums[kind] for name in ("reward", "logps")}
        if sums["chosen"] and sums["rejected"]:
            means["reward_margin"] = means["reward_chosen"] - means["reward_rejected"]
        return means

    def _mismatched(self, known: ReferenceValues, chosen: ChosenRows, places: list[int]) -> np.ndarray:
        """The reference's log-probabilities of these rows' mismatched answers."""
        values = known.held_out if chosen.held_out else known.mismatched
        assert values is not None
        return np.asarray(values[[chosen.first + place for place in places]])
