"""Questions with given answers: each option is scored by its probability. No answer is generated, and no text is read.

    s = sum of the log-probabilities of the option's tokens and of the end of the turn, after the prompt
    p = exp(s) / sum over the options of exp(s)

With options yes and no and s of -0.3 and -1.7, p is 0.80 and 0.20. Brier's score (1950) of a row whose right answer is
yes is (0.8 - 1)^2 + (0.2 - 0)^2 = 0.08: 0 is best, 2 is worst.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from finetune.answers.by_ranks import Computing
from finetune.answers.scores import QuestionResult, compared, score_verdict
from finetune.data.chat import Chat, Passage, last_answer
from finetune.errors import NotFinite
from finetune.finished_run import FinishedRun
from finetune.generation.held_out import ScoredSet, last_answer_turn
from finetune.scoring.intervals import interval
from finetune.scoring.metrics import options_among
from finetune.strategies.assemble import Assembled
from finetune.tokens.batches import prefetch
from finetune.tokens.encoder import IGNORE, RowError
from finetune.tokens.packing import pack
from finetune.training.objectives.answers import IdsAndLabels, answer_batches, model_inputs
from finetune.wording import counted

BINS = 10  # of the reliability curve, equally wide


@dataclass(frozen=True)
class OptionScores:
    """Every option of every row as a document. `ask` gives their probabilities."""

    run: FinishedRun
    computing: Computing
    name: str  # of the rows
    options: Sequence[str]
    right: Sequence[int]  # each row's right option
    encoded: Sequence[IdsAndLabels]  # row by row, its options in order
    key = "options"

    def documents(self, place: int) -> list[IdsAndLabels]:
        """One option of one row."""
        return [self.encoded[place]]

    def ask(self, model: Assembled, name: str, show: Callable[[str], None]) -> np.ndarray:
        """One model's log-probabilities, float64 [rows, options], on every rank. Raises NotFinite."""
        recipe, ranks = self.run.recipe, self.computing.ranks
        lengths = np.asarray([len(ids) for ids, _ in self.encoded])
        plan = self.computing.plan(recipe, len(lengths))
        groups = [[place] for place in range(len(lengths))]
        if plan.flat:
            groups = pack(lengths, max(recipe.data.max_length, int(lengths.max())))
        batches = answer_batches(replace(plan, per_device_batch_size=1), self, groups)
        sums = np.zeros(len(lengths))
        with torch.no_grad(), self.computing.autocast(recipe):
            on_device = prefetch([inputs.batch for inputs in batches], self.computing.device, True)
            for number, (batch, inputs) in enumerate(zip(on_device, batches, strict=True), 1):
                show(f"given answers: micro-batch {number} of {len(batches)}")
                sums[inputs.places] = -model.model(**model_inputs(batch, inputs.lengths)).float().cpu().numpy()
        totals: np.ndarray = np.sum(ranks.gather(sums), axis=0)  # each place is one rank's
        if not np.isfinite(totals).all():
            raise NotFinite(
                f"{self.run.folder}: not finite: log-probabilities of the {name} model; look at its weights"
            )
        return totals.reshape(-1, len(self.options))

    def compare(self, base: np.ndarray, tuned: np.ndarray) -> QuestionResult:
        """Figures for eval.json, and their words."""
        right = np.asarray(self.right)
        models = {"base": probabilities(base), "tuned": probabilities(tuned)}
        mass = {"base": float(np.exp(base).sum(axis=1).mean()), "tuned": float(np.exp(tuned).sum(axis=1).mean())}
        hits = {name: (shares.argmax(axis=1) == right).astype(float).tolist() for name, shares in models.items()}
        figures: dict[str, Any] = {
            "data": self.name,
            "rows": len(right),
            "options": list(self.options),
            "accuracy": compared(hits["base"], hits["tuned"]),
            **{name: probability_figures(shares, right) | {"mass": mass[name]} for name, shares in models.items()},
        }
        lines = [
            f"{counted(len(right), 'question')} of {self.name} with {len(self.options)} given answers, by their "
            "probability:",
            f"{'':8}{'right':>7}{'95 %':>17}{'Brier':>9}{'95 %':>17}{'calibration error':>20}{'mass':>7}",
        ]
        for name in models:
            hit, brier, error = figures["accuracy"][name], figures[name]["brier"], figures[name]["calibration_error"]
            lines.append(
                f"{name:8}{hit['mean']:>7.3f}   [{hit['low']:.3f}, {hit['high']:.3f}]{brier['mean']:>9.3f}   "
                f"[{brier['low']:.3f}, {brier['high']:.3f}]{error:>20.3f}{mass[name]:>7.0%}"
            )
        lines.append(score_verdict("right", figures["accuracy"], len(right)))
        return QuestionResult(figures, "\n".join(lines))


def probabilities(sums: np.ndarray) -> np.ndarray:
    """The softmax over the options of log-probabilities [rows, options]."""
    shares = np.exp(sums - sums.max(axis=1, keepdims=True))
    result: np.ndarray = shares / shares.sum(axis=1, keepdims=True)
    return result


def probability_figures(shares: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """Brier's score with its interval, and the calibration, of probabilities [rows, options].

    A bin of the reliability curve holds the rows whose highest probability lies in it. The calibration error is the
    mean difference between that probability and the share of right answers, over bins by their rows (Naeini 2015).
    """
    rows = np.arange(len(right))
    truth = np.zeros_like(shares)
    truth[rows, right] = 1.0
    brier = ((shares - truth) ** 2).sum(axis=1)
    of_halves = interval((brier / 2).tolist())  # intervals are of scores from 0 to 1
    sure, hit = shares.max(axis=1), shares.argmax(axis=1) == right
    numbers = np.minimum((sure * BINS).astype(int), BINS - 1)
    curve = [
        {
            "low": number / BINS,
            "rows": int((numbers == number).sum()),
            "probability": float(sure[numbers == number].mean()),
            "right": interval(hit[numbers == number].astype(float).tolist()).as_json(),
        }
        for number in sorted({*numbers.tolist()})
    ]
    error = sum(part["rows"] * abs(part["probability"] - part["right"]["mean"]) for part in curve) / len(right)
    return {
        "brier": {key: 2 * value for key, value in of_halves.as_json().items()},
        "calibration_error": error,
        "curve": curve,
    }


def given_options(
    run: FinishedRun,
    computing: Computing,
    scored_set: ScoredSet,
    leave_out: Callable[[str], None],
) -> OptionScores | None:
    """The options of these rows: those of eval.options, or their own answers if those are few, short and repeated.

    None if there are none. None, with a line to `leave_out`, if a row has another answer, is too long with an option,
    or two options are the same tokens.
    """
    answers = [last_answer(content) for content in scored_set.contents]
    options = [*run.recipe.eval.options]
    if options:
        wrong = [item.place for item, answer in zip(scored_set.items, answers, strict=True) if answer not in options]
        if wrong:
            leave_out(f"given answers: not scored by probability; {wrong[0]}: its answer is none of eval.options")
            return None
    else:
        options = options_among(Counter(answers))
        if not options:
            return None
    encoder, encoded = run.encoder, list[IdsAndLabels]()
    for content in scored_set.contents:
        # The row with each option in the place of its answer. Only the option and the end of its turn are supervised.
        if isinstance(content, Passage):
            rows: list[Chat | Passage] = [Passage(content.prompt, option) for option in options]
        else:
            last = last_answer_turn(content)
            turns = [[*content.messages[:last], content.messages[last] | {"content": option}] for option in options]
            rows = [replace(content, messages=messages, supervised=[False] * last + [True]) for messages in turns]
        # Together, so that all of them begin with the same tokens.
        try:
            documents = encoder.tokenised([[encoder.script(row) for row in rows]])[0]
        except RowError as error:
            documents = error
        if isinstance(documents, RowError):  # an option makes the row longer than data.max_length
            leave_out(f"given answers: not scored by probability; {documents}")
            return None
        option_of: dict[tuple[int, ...], str] = {}
        for option, document in zip(options, documents, strict=True):
            ids, labels = np.asarray(document.input_ids), np.asarray(document.labels)
            same = option_of.setdefault(tuple(document.input_ids), option)
            if same != option:  # a template strips white space; each of the two would have half of the probability
                leave_out(f"given answers: not scored by probability; {same!r} and {option!r} are the same tokens")
                return None
            labels[: len(encoder.prompt_of(ids, labels).prompt_ids)] = IGNORE
            encoded.append((ids, labels))
    right = [options.index(answer) for answer in answers]
    return OptionScores(run, computing, scored_set.name, options, right, encoded)
