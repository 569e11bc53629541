"""Answers to held-out rows, generated and scored: in training (eval.generate.every) and by `finetune eval`.

Prompts are sorted by length, so that a batch has little padding, and batches are as large as free memory allows. Each
rank answers its own batches. Where weights are sharded, all ranks make the same number of forwards, because each
forward gathers weights. A pipeline's stages compute all answers together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune.architecture.by_document import first_parameter
from finetune.data.chat import Chat, Judged, Passage, documents_in
from finetune.data.rows import RowReader
from finetune.data.sources import asked_entry, resolve
from finetune.errors import DataError, FinetuneError
from finetune.generation.generate import (
    BATCH_TOKENS,
    MOST_BATCH_TOKENS,
    Answer,
    Sampling,
    decoded_answer,
    greedy_answers,
    kept_bytes,
    prompt_batches,
    round_ends,
)
from finetune.generation.settings import answering
from finetune.measure.out_of_memory import is_out_of_memory
from finetune.measure.phases import memory_of
from finetune.recipe.schema import DataSet, Recipe
from finetune.scoring.metrics import Metric, Scored, Unread, fitting_metrics, scores_of
from finetune.strategies.pieces import Ranks
from finetune.tokens.dataset import Prepared
from finetune.tokens.encoder import IGNORE, Encoder, RowError, SamplePrompt
from finetune.wording import counted

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
    contents: list[Chat | Passage] = field(default_factory=list)  # each prompt's row, if `held_out_set` returns them


def held_out_set(
    recipe: Recipe,
    encoder: Encoder,
    prepared: Prepared | None,
    *,
    file: str | DataSet | None = None,
    metrics: Sequence[Metric] = (),
    limit: int | None = None,
    max_new_tokens: int | None = None,
    contents: bool = False,
) -> ScoredSet:
    """The first held-out rows with an answer each, or the rows of a file.

    Args:
        file, metrics, limit, max_new_tokens: Win over the recipe's eval.generate.
        contents: Read held-out rows again, and return each row's chat or text. A file's rows always have theirs.

    Raises DataError if there is no row to answer, or a reference that a metric cannot read.
    """
    section = recipe.eval.generate
    chosen = [*metrics] or [Metric.of(choice) for choice in section.choices]
    most, file = limit or section.limit, file or section.file
    if file is not None:
        rows, notes = rows_of_file(recipe.data.train[0], file, encoder, most)
        name = file if isinstance(file, str) else file.path
    else:
        if prepared is None or not len(prepared.split.held_out):
            raise FinetuneError("data.eval: no row is held out; add data.eval: {fraction: 0.05}, or name a data file")
        columns = not chosen or any(metric.reads_the_row for metric in chosen)
        rows, notes = held_out_rows(recipe, encoder, prepared, most, columns=columns, contents=contents)
        name = "held-out rows"
    if not rows:
        reason = "; ".join(notes) or "plain texts and train_on: all have no question"
        raise FinetuneError(f"{name}: no row has a question and an answer to score ({reason}); name other rows")
    prompts, items, lengths, chats = (list(column) for column in zip(*rows, strict=True))
    longest = max(lengths)
    new_tokens = max_new_tokens or section.max_new_tokens or min(MOST_NEW_TOKENS, longest + longest // 4 + SPARE_TOKENS)
    chosen = chosen or fitting_metrics(items)
    # The references are scored against themselves. A function of the user's own is refused at the first one on which it
    # fails: it may hang on each.
    for metric in chosen:
        for part in [[item] for item in items] if metric.function is not None else [items]:
            (first, *_) = scores_of(metric, [item.reference for item in part], part)
            if isinstance(first, Unread) and first.why:
                raise DataError([f"{part[0].place}: metric {metric.name}: its reference as an answer: {first.why}"])
    return ScoredSet(name, prompts, items, chosen, new_tokens, notes, chats if contents or file is not None else [])


ScoredRow = tuple[SamplePrompt, Scored, int, Any]  # the int: tokens of the reference; last, its Chat or Passage


def held_out_rows(
    recipe: Recipe, encoder: Encoder, prepared: Prepared, most: int, *, columns: bool = False, contents: bool = False
) -> tuple[list[ScoredRow], list[str]]:
    """The first held-out rows with a prompt, and notes about others.

    With `columns` or `contents` the rows are read again. A row may have several examples. The prompt's tokens say which
    one is meant. Raises FinetuneError if `contents` are asked for and a row has changed since it was tokenised.
    """
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
    rows, places = list[ScoredRow](), dict[str, set[int]]()  # of rows that are not read again yet
    for index in whole:
        if len(rows) == most:
            break
        ids, labels = pool.document(index)
        if has_prompt(labels):
            prompt = encoder.prompt_of(ids, labels)
            item = Scored(prompt.reference or "", pool.place(index))
            places.setdefault(item.place, set()).add(len(rows))
            rows.append((prompt, item, len(ids) - len(prompt.prompt_ids), None))
    read_again = chain.from_iterable(RowReader(resolve(entry)).rows() for entry in recipe.data.sets)
    for row in read_again if places and (columns or contents) else ():
        if row.place not in places:
            continue
        examples: list[tuple[Chat | Passage, list[int]]] = []
        for example in encoder.examples(row.read) if contents and row.read is not None else ():
            with suppress(RowError):
                content = documents_in(example)[0]
                examples.append((content, encoder.document(content).input_ids))
        for index in [*places[row.place]]:
            prompt, item, new, _ = rows[index]
            begin = prompt.prompt_ids
            same = next((content for content, tokens in examples if tokens[: len(begin)] == begin), None)
            if same is not None or not contents:
                rows[index] = prompt, Scored(item.reference, item.place, row.row.values or {}), new, same
                places[row.place].remove(index)
        if not places[row.place]:
            del places[row.place]
        if not places:  # the rest of a large data set is not read
            break
    if places and contents:
        raise FinetuneError(f"{min(places)}: this row is not as it was when the data was tokenised; run it again")
    return rows, notes


def last_answer_turn(chat: Chat) -> int:
    """The place of the last supervised answer among the messages."""
    turns = enumerate(zip(chat.messages, chat.supervised, strict=True))
    return max(index for index, (turn, supervised) in turns if turn["role"] == "assistant" and supervised)


def conversation(content: Chat | Passage, encoder: Encoder) -> Chat | Passage:
    """A row's conversation up to its last supervised answer, as a server gets it."""
    if isinstance(content, Passage):
        return content
    last, variables = last_answer_turn(content), encoder.variables_for_server(content.template_kwargs)
    return Chat(content.messages[:last], content.tools, content.supervised[:last], variables)


def rows_of_file(entry: DataSet, file: str | DataSet, encoder: Encoder, most: int) -> tuple[list[ScoredRow], list[str]]:
    """The rows of a data file, read as `entry` is. Raises DataError with every mistake.

    A question that comes twice is asked twice. If `entry` drops rows with an empty cell, a note counts them.
    """
    reader = RowReader(resolve(asked_entry(entry, file)))
    rows: list[ScoredRow] = []
    mistakes: list[str] = []
    texts = 0
    for row in reader.rows():
        if len(rows) == most or row.row.line > MOST_ROWS_OF_FILE:
            break
        if row.read is None:
            mistakes.append(f"{row.place}: {row.problem}")
            continue
        examples = [
            example for example in encoder.examples(row.read) if not isinstance(example, Judged) or example.desirable
        ]
        if not examples:
            continue
        texts += isinstance(examples[-1], Passage)
        try:
            document = encoder.document(examples[-1])
        except RowError as error:
            mistakes.append(f"{row.place}: {error}")
            continue
        ids, labels = np.asarray(document.input_ids), np.asarray(document.labels)
        if has_prompt(labels):
            prompt = encoder.prompt_of(ids, labels)
            item = Scored(prompt.reference or "", row.place, row.row.values or {})
            rows.append((prompt, item, len(ids) - len(prompt.prompt_ids), documents_in(examples[-1])[0]))
    if mistakes:
        raise DataError(mistakes[:5], len(mistakes), max(0, len(mistakes) - 5))
    empty = reader.facts()["dropped"].get("empty", 0)
    notes = [f"{counted(empty, 'row')} with an empty cell left out"] if empty else []
    with suppress(DataError):  # the training's file may have gone since
        source = resolve(entry) if texts else None
        trained = islice(RowReader(source).rows(), 1) if source is not None and source.kind != "hub" else ()
        if any(isinstance(row.read, Chat) for row in trained):
            notes.append(
                f"{counted(texts, 'question')} asked as plain text, without the chat template that training rows have; "
                "write them as messages"
            )
    return rows, notes


def has_prompt(labels: np.ndarray) -> bool:
    """Whether a document has tokens before its supervised answer: with plain text or `train_on: all` it has none."""
    return bool((labels[:2] == IGNORE).all())


@dataclass
class Batching:
    """Decides which prompts share a batch, and which ranks compute it."""

    shared: bool  # prompts of different lengths may share a left-padded batch
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    sharded: bool = False  # each forward gathers weights, so all ranks make the same number of forwards
    staged: bool = False  # a pipeline: every rank computes every answer
    most_tokens: int = MOST_BATCH_TOKENS  # of one batch, with padding and answers; fewer after memory ran out


def tokens_that_fit(model: PreTrainedModel, device: torch.device, ranks: Ranks) -> int:
    """Tokens of one batch whose cache fills half of the free memory, on the rank with the least.

    With 8 GB free Llama-3.1-8B gets 4e9 / 131,072 = 30,517 tokens.
    """
    least: int = min(ranks.gather(memory_of(device).free // 2 // kept_bytes(model)))
    return max(BATCH_TOKENS, min(MOST_BATCH_TOKENS, least))


def generated_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    scored_set: ScoredSet,
    batching: Batching,
    show: Callable[[str], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
    *,
    sampling: Sampling | None = None,
    draws: Sequence[tuple[int, int]] = (),
) -> list[Answer]:
    """The model's answers, in the order of the prompts, on every rank: greedy, or drawn.

    Args:
        show: Receives the progress.
        say: Receives a line if memory runs out. It names the smaller batches that follow.
        sampling: None: greedy.
        draws: The prompts to answer, each by its row and the answer's number, which drawn tokens depend on; empty: all
            prompts. Without `batching.shared`, only a row's answers share a batch. They are equally long, so nothing
            is padded, and no other row changes their sums: in float32 they are the same bytes in every run.
    """
    ranks, answers = batching.ranks, dict[int, Answer]()
    questions = [scored_set.prompts[row] for row, _ in draws] if draws else scored_set.prompts
    gathers = batching.sharded and ranks.world > 1
    batched = batching.shared or bool(draws)
    rows = [] if batching.shared else [row for row, _ in draws]  # only prompts of one row share a batch
    ends = round_ends(scored_set.max_new_tokens) if batched else [scored_set.max_new_tokens]
    with answering(model):
        for before, end in zip([0, *ends], ends, strict=False):
            new, prompts = end - before, dict[int, list[int]]()
            for index, prompt in enumerate(questions):
                if not before:
                    prompts[index] = prompt.prompt_ids
                elif not answers[index].ended:
                    prompts[index] = prompt.prompt_ids + answers[index].tokens
            order = sorted(prompts, key=lambda index: len(prompts[index]))
            if not order:
                break
            most = BATCH_TOKENS if batched else 0
            if batched and not batching.staged:
                share = -(-len(order) // ranks.world) * (len(prompts[order[-1]]) + new)  # every rank gets rows
                room = tokens_that_fit(model, batching.device, ranks)
                most = min(room, max(BATCH_TOKENS, share), *ranks.gather(batching.most_tokens))
            batches = _batches(order, prompts, new, most, rows)
            if not batching.staged:
                batches = batches[ranks.rank :: ranks.world]
            own, done = dict[int, Answer](), 0  # this rank's answers, and its batches
            # Sharded weights are gathered by all ranks at once. So a rank without a batch of its own computes the
            # shortest prompt while others have one, and after each batch they agree who ran out of memory.
            while any(ranks.gather(bool(batches))) if gathers else batches:
                batch, *rest = batches or [order[:1]]
                place = f"answers to {scored_set.name}: batch {done + 1} of {done + max(1, len(batches))}"
                of_batch, full, alone = list[Answer](), 0, ""  # tokens that do not fit, and why where they are one row
                with layers_left_out(model) as failed:  # changes sharded layers alone

                    def show_token(token: int, place: str = place, before: int = before) -> bool:
                        show(f"{place}, token {before + token} of at most {scored_set.max_new_tokens}")
                        return bool(failed)

                    try:
                        of_batch = greedy_answers(
                            model,
                            tokenizer,
                            [prompts[index] for index in batch],
                            max_new_tokens=new,
                            device=batching.device,
                            synced=gathers,
                            cached=not batching.staged,
                            show=show_token,
                            sampling=sampling,
                            draws=[draws[index] for index in batch] if sampling else (),
                            drawn=before,
                        )
                    except Exception as error:
                        if gathers or batching.staged or len(batch) == 1 or not is_out_of_memory(error):
                            raise
                        failed.append(error.with_traceback(None))  # its frames hold the batch's tensors
                if failed:
                    full = len(batch) * (len(prompts[batch[-1]]) + new)
                    alone = str(failed[0]) if len(batch) == 1 else ""
                else:
                    own |= zip(batch, of_batch, strict=True)
                    batches, done = rest, done + 1
                if gathers:
                    full, alone = max(ranks.gather((full, alone)))
                if alone:
                    raise torch.OutOfMemoryError(alone)
                if full:
                    if batching.most_tokens == MOST_BATCH_TOKENS:
                        say(f"answers: a batch with {full:,} tokens does not fit; they go on with {full // 2:,}")
                    batching.most_tokens = full // 2
                    batches = _batches([*chain(*batches)], prompts, new, batching.most_tokens, rows)
            for of_rank in ranks.gather(own):
                own |= of_rank  # a repeated batch is there twice
            for index, answer in own.items():
                tokens = answers[index].tokens + answer.tokens if before else answer.tokens
                answers[index] = decoded_answer(tokens, tokenizer, ended=answer.ended)
    return [answers[index] for index in range(len(questions))]


@contextmanager
def layers_left_out(model: nn.Module) -> Iterator[list[Exception]]:
    """Within the block, once memory runs out in a sharded layer, no layer computes any more: each returns its input.

    FSDP2 gathers a layer's weights around its forward. So a rank without memory gathers as often as the others, and no
    rank waits for ever. Yields a list, with the error after memory ran out. ZeRO-3 gathers inside its layers: there the
    error is raised, and ends all ranks.
    """
    failed: list[Exception] = []

    def forward(layer: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not failed:
            try:
                return own(*args, **kwargs)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                failed.append(error.with_traceback(None))  # its frames hold the layer's tensors
            cache = kwargs.get("cache", kwargs.get("past_key_values"))  # the second: in transformers 5.17
            for kept in getattr(cache, "layers", ()):  # keep their shapes, free their bytes
                for name in ("keys", "values"):
                    if isinstance(tensor := getattr(kept, name, None), Tensor):
                        setattr(kept, name, tensor.new_zeros(1).expand(tensor.shape))
        return args[0] if args else kwargs[first_parameter(layer)]

    units = (module for module in model.modules() if isinstance(module, FSDPModule))
    layers: list[Any] = [unit for unit in units if isinstance(unit, GradientCheckpointingLayer)]
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = partial(forward, layer, layer.forward)
    try:
        yield failed
    finally:
        for layer, own in zip(layers, before, strict=True):
            del layer.forward
            if own is not None:
                layer.forward = own


def _batches(
    order: Sequence[int], prompts: Mapping[int, Sequence[int]], new: int, most: int, rows: Sequence[int]
) -> list[list[int]]:
    """Prompts, in order, in batches with at most `most` tokens. With `rows`, a batch has prompts of one row."""
    groups = [[*group] for _, group in groupby(order, key=rows.__getitem__)] if rows else [[*order]]
    return [
        [group[place] for place in batch]
        for group in groups
        for batch in prompt_batches([len(prompts[index]) for index in group], new, most)
    ]


def scores_on_all(scored_set: ScoredSet, answers: Sequence[Answer], ranks: Ranks) -> dict[str, list[float]]:
    """Metric -> each row's score. Rank 0 scores; a mistake is raised on every rank."""
    texts, metrics = [answer.text for answer in answers], scored_set.metrics
    return ranks.rank_0_first(lambda: {metric.name: scores_of(metric, texts, scored_set.items) for metric in metrics})
