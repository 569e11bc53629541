"""Answers to held-out rows, generated and scored: in training (eval.generate.every) and by `finetune eval`.

Prompts are sorted by length, so that a batch has little padding. Each rank answers its own batches. Where weights are
sharded, all ranks make the same number of forwards, because each forward gathers weights. A pipeline's stages compute
all answers together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from finetune.data.chat import Judged
from finetune.data.rows import RowReader
from finetune.data.sources import asked_entry, resolve
from finetune.errors import DataError, FinetuneError
from finetune.model.generate import BATCH_TOKENS, Answer, answering, greedy_answers, prompt_batches
from finetune.recipe.schema import DataSet, Recipe
from finetune.scoring.metrics import Metric, Scored, fitting_metrics, scores_of
from finetune.strategies.accelerator import holds_on_all
from finetune.strategies.pieces import Ranks, all_ranks
from finetune.tokens.dataset import Prepared
from finetune.tokens.encoder import IGNORE, Encoder, RowError, SamplePrompt
from finetune.wording import counted

if TYPE_CHECKING:
    from finetune.strategies.assemble import Assembled
    from finetune.training.run import StepParts
    from finetune.training.run_output import RunOutput

MOST_NEW_TOKENS = 1024
SPARE_TOKENS = 8  # of an answer that is longer than every reference
MOST_ROWS_OF_FILE = 10**6


@dataclass(frozen=True)
class ScoredSet:
    """Prompts to answer, with references and metrics."""

    name: str  # for messages: held-out rows, or a file
    prompts: list[SamplePrompt]
    items: list[Scored]
    metrics: list[Metric]
    max_new_tokens: int
    notes: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Score the references against themselves. Raises DataError for those that a metric cannot read."""
        for metric in self.metrics:
            scores_of(metric, [item.reference for item in self.items], self.items)


def held_out_set(
    recipe: Recipe,
    encoder: Encoder,
    prepared: Prepared | None,
    *,
    file: str | None = None,
    metrics: Sequence[Metric] = (),
    limit: int | None = None,
    max_new_tokens: int | None = None,
) -> ScoredSet:
    """The first held-out rows with an answer each, or the rows of a file.

    Args:
        file, metrics, limit, max_new_tokens: Win over the recipe's eval.generate.

    Raises DataError if there is no row to answer, or a reference that a metric cannot read.
    """
    section = recipe.eval.generate
    chosen = [*metrics] or [Metric.of(choice) for choice in section.choices]
    most, file = limit or section.limit, file or section.file
    reads_rows = not chosen or any(metric.reads_the_row for metric in chosen)
    if file is not None:
        rows, notes = _rows_of_file(recipe.data.train[0], file, encoder, most)
        name = file
    else:
        if prepared is None or not len(prepared.split.held_out):
            raise FinetuneError("data.eval: no row is held out; add data.eval: {fraction: 0.05}, or name a data file")
        rows, notes = _held_out_rows(recipe, encoder, prepared, most, reads_rows=reads_rows)
        name = "held-out rows"
    if not rows:
        reason = "; ".join(notes) or "plain texts and train_on: all have no question"
        raise FinetuneError(f"{name}: no row has a question and an answer to score ({reason}); name other rows")
    items = [item for _, item, _ in rows]
    longest = max(tokens for _, _, tokens in rows)
    new_tokens = max_new_tokens or section.max_new_tokens or min(MOST_NEW_TOKENS, longest + longest // 4 + SPARE_TOKENS)
    found = ScoredSet(
        name, [prompt for prompt, _, _ in rows], items, chosen or fitting_metrics(items), new_tokens, notes
    )
    found.check()
    return found


ScoredRow = tuple[SamplePrompt, Scored, int]  # the int: tokens of the reference


def _held_out_rows(
    recipe: Recipe, encoder: Encoder, prepared: Prepared, most: int, *, reads_rows: bool
) -> tuple[list[ScoredRow], list[str]]:
    pool, longest = prepared.pool, recipe.data.max_length
    documents, notes = prepared.split.held_out, []
    if pool.desirable is not None:
        unwanted = int((~pool.desirable[documents]).sum())
        documents = documents[pool.desirable[documents]]
        notes += [f"{counted(unwanted, 'held-out answer')} left out as references: unwanted ones"] if unwanted else []
    whole = documents.tolist()
    if recipe.data.truncation == "right":
        # A document that was cut at max_length has lost the end of its answer. A pair's reference is the chosen one.
        whole = [index for index in whole if len(pool.document(index)[0]) < longest]
        cut = len(documents) - len(whole)
        notes += [f"{counted(cut, 'held-out row')} left out, cut at data.max_length"] if cut else []
    rows: list[ScoredRow] = []
    for index in whole:
        if len(rows) == most:
            break
        ids, labels = pool.document(index)
        if not has_prompt(labels):
            continue
        prompt = encoder.prompt_of(ids, labels)
        item = Scored(prompt.reference or "", pool.place(index))
        rows.append((prompt, item, len(ids) - len(prompt.prompt_ids)))
    if reads_rows:
        values = _values_at({item.place for _, item, _ in rows}, recipe.data.sets)
        rows = [(prompt, replace(item, row=values.get(item.place, {})), tokens) for prompt, item, tokens in rows]
    return rows, notes


def _values_at(places: set[str], entries: Sequence[DataSet]) -> dict[str, dict[str, Any]]:
    """The columns of the rows at these places."""
    values: dict[str, dict[str, Any]] = {}
    for entry in entries:
        for row in resolve(entry).rows():
            if row.place in places and row.values is not None:
                values[row.place] = row.values
            if len(values) == len(places):
                return values
    return values


def _rows_of_file(entry: DataSet, file: str, encoder: Encoder, most: int) -> tuple[list[ScoredRow], list[str]]:
    """The rows of a data file, read as `entry` is. Raises DataError with every mistake.

    A question that comes twice is asked twice. If `entry` drops rows with an empty cell, a note counts them.
    """
    reader = RowReader(resolve(asked_entry(entry, file)))
    rows: list[ScoredRow] = []
    mistakes: list[str] = []
    for found in reader.rows():
        if len(rows) == most or found.row.line > MOST_ROWS_OF_FILE:
            break
        if found.read is None:
            mistakes.append(f"{found.place}: {found.problem}")
            continue
        examples = [each for each in encoder.examples(found.read) if not isinstance(each, Judged) or each.desirable]
        if not examples:
            continue
        try:
            document = encoder.document(examples[-1])
        except RowError as error:
            mistakes.append(f"{found.place}: {error}")
            continue
        labels = np.asarray(document.labels)
        if not has_prompt(labels):
            continue
        prompt = encoder.prompt_of(np.asarray(document.input_ids), labels)
        item = Scored(prompt.reference or "", found.place, found.row.values or {})
        rows.append((prompt, item, len(document.input_ids) - len(prompt.prompt_ids)))
    if mistakes:
        raise DataError(mistakes[:5], len(mistakes), max(0, len(mistakes) - 5))
    empty = reader.facts()["dropped"].get("empty", 0)
    return rows, [f"{counted(empty, 'row')} with an empty cell left out"] if empty else []


def has_prompt(labels: np.ndarray) -> bool:
    """Whether a document has tokens before its supervised answer: a plain text has none, nor does train_on: all."""
    return bool((labels[:2] == IGNORE).all())


@dataclass(frozen=True)
class Answering:
    """How answers are computed together."""

    shared: bool  # prompts of different lengths may share a left-padded batch
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    sharded: bool = False  # each forward gathers weights, so all ranks make the same number of forwards
    staged: bool = False  # a pipeline: every rank computes every answer
    most_tokens: int = BATCH_TOKENS  # of one batch, with padding and answers


def generated_answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    asked: ScoredSet,
    how: Answering,
    show: Callable[[str], None] = lambda _: None,
) -> list[Answer]:
    """The model's greedy answers, in the order of the prompts, on every rank. `model` is unwrapped."""
    prompts, new_tokens = asked.prompts, asked.max_new_tokens
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].prompt_ids))
    lengths = [len(prompts[index].prompt_ids) for index in order]
    batches = [*prompt_batches(lengths, new_tokens, how.most_tokens if how.shared else 0)]
    mine = batches
    if not how.staged:
        mine = batches[how.ranks.rank :: how.ranks.world]
    if how.sharded:  # a rank without a batch of its own repeats one, so that nobody waits for its forwards
        rounds = -(-len(batches) // how.ranks.world)
        mine += batches[:1] * (rounds - len(mine))
    answers: dict[int, Answer] = {}
    with answering(model):
        for number, batch in enumerate(mine, 1):
            show(f"answers to {asked.name}: batch {number} of {len(mine)}")
            indices = [order[position] for position in batch]
            found = greedy_answers(
                model,
                tokenizer,
                [prompts[index].prompt_ids for index in indices],
                max_new_tokens=new_tokens,
                device=how.device,
                together=how.sharded and how.ranks.world > 1,
                cached=not how.staged,
            )
            answers |= zip(indices, found, strict=True)
    for others in how.ranks.gather(answers):
        answers |= others
    return [answers[index] for index in range(len(prompts))]


def scores_on_all(asked: ScoredSet, answers: Sequence[Answer], ranks: Ranks) -> dict[str, list[float]]:
    """Metric -> each row's score. Rank 0 scores; a mistake is raised on every rank."""
    outcome: dict[str, list[float]] | DataError | None = None
    if ranks.rank == 0:
        try:
            texts = [each.text for each in answers]
            outcome = {metric.name: scores_of(metric, texts, asked.items) for metric in asked.metrics}
        except DataError as error:
            outcome = error
    outcome = ranks.gather(outcome)[0]
    if isinstance(outcome, DataError):
        raise outcome
    assert outcome is not None
    return outcome


def score_line(step: int, scores: dict[str, list[float]]) -> dict[str, Any]:
    """The line of metrics.jsonl for one scored generation: each metric's mean over the rows."""
    means = {f"score_{name}": sum(values) / len(values) for name, values in scores.items()}
    return {"kind": "score", "step": step, "rows": len(next(iter(scores.values()))), **means}


def score_line_in_words(line: Mapping[str, Any]) -> str:
    """A line's scores for the terminal: exact 0.920, number 0.950 (200 answers)."""
    means = [(key.removeprefix("score_"), value) for key, value in line.items() if key.startswith("score_")]
    return ", ".join(f"{name} {mean:.3f}" for name, mean in means) + f" ({counted(line['rows'], 'answer')})"


@dataclass(frozen=True)
class RowScorer:
    """Answers and scores a run's held-out rows while it trains."""

    asked: ScoredSet
    tokenizer: PreTrainedTokenizerBase
    shared: bool  # the probe lets prompts share a left-padded batch
    sharded: bool  # each forward gathers weights
    parts: StepParts
    assembled: Assembled
    output: RunOutput

    def score(self, step: int) -> dict[str, Any]:
        """Answer with the weights after `step` steps, and write the line. Every rank calls it. Returns the line."""
        asked, accelerator, model = self.asked, self.parts.accelerator, self.assembled.unwrapped_model
        pipeline, terminal = self.assembled.pipeline, self.output.terminal
        how = Answering(
            shared=holds_on_all(accelerator, self.shared),
            device=accelerator.device,
            ranks=all_ranks(),
            sharded=self.sharded,
            staged=pipeline is not None,
        )
        with self.parts.weights.cast(), pipeline.answering(model) if pipeline else nullcontext():
            answers = generated_answers(model, self.tokenizer, asked, how, terminal.progress)
        line = score_line(step, scores_on_all(asked, answers, how.ranks))
        self.output.write_metrics(line)
        when = f"step {step}" if step else "before"
        terminal.log(f"{when}: {score_line_in_words(line)}")
        return line
