"""The data of a run: tokenised, held out, weighed and packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.data.check import Mistakes
from finetune.data.row_reader import notes_of
from finetune.data.sources import resolve
from finetune.errors import DataError
from finetune.recipe.schema import EvalFraction, Recipe
from finetune.tokens.cache import StoredDocuments, content_key, stored_documents
from finetune.tokens.encoder import OTHERWISE, UNREASONED, Encoder, RowError, SamplePrompt
from finetune.tokens.mixture import DocumentPool, Rows, Split, split_documents
from finetune.wording import counted, percent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MUCH = 0.1  # share of the tokens that are cut: from here on a remedy is named
SCANNED = 2**20  # tokens that are looked through at a time


@dataclass(frozen=True)
class Prepared:
    """The data of a run."""

    train: Rows
    eval: Rows | None
    eval_sets: dict[str, Rows]  # the rows of `eval` by data set, if data.eval names several; else empty
    fingerprint: str  # content address of data, tokenizer, template and settings
    facts: dict[str, Any]  # counts for receipt and terminal
    prompts: list[SamplePrompt]  # to be answered before and after training
    pool: DocumentPool  # every document, by which `split` counts
    split: Split

    def _truncated(self) -> str:
        """The fate of truncated documents, with the share of all tokens that is lost."""
        cut = int(self.facts["tokens_cut"])
        share = cut / (cut + int(self.pool.lengths.sum()))
        text = f"truncated at data.max_length: {percent(share)} of the tokens are cut"
        if share < MUCH:
            return text
        return f"{text}; raise it, or for texts without a prompt set data.truncation: split"

    @property
    def notes(self) -> list[str]:
        """Notes for the owner of the data, a line each; nothing goes missing silently."""
        notes = []
        for name, noun, fate in (
            ("dropped", "document", "dropped: longer than data.max_length, or without a supervised token"),
            ("truncated", "document", self._truncated()),
            ("identical", "pair", "left out: the chosen answer is the rejected one"),
            ("eval_duplicates_left_out", "held-out document", "left out: identical ones are trained on"),
            (
                "control_token_texts",
                "text",
                "with control tokens spelt out; they stay text, and the template writes its own",
            ),
        ):
            count = int(self.facts.get(name, 0))
            if count:
                notes.append(f"{counted(count, noun)} {fate}")
        unused_tokens = self.facts.get("new_tokens_unused")
        if unused_tokens:
            shown = ", ".join(unused_tokens[:5])
            if len(unused_tokens) > 5:
                shown += f" and {len(unused_tokens) - 5} more"
            notes.append(f"{counted(len(unused_tokens), 'new token')} in no document: {shown}")
        notes_of_sets = []
        for store in self.pool.stores:
            notes_of_sets += [*notes_of(store.names[0], store.facts["rows"]), *_template_notes(store)]
        return [*notes, *dict.fromkeys(notes_of_sets)]


def _template_notes(store: StoredDocuments) -> Iterator[str]:
    """Notes on the chat template's form of one data set's rows, a line each."""
    name, facts = store.names[0], store.facts
    documents = counted(facts["documents"], "document")
    if count := facts["texts_split"]:
        texts = f"{counted(facts['rows_read'], 'text')}, {count:,} longer than data.max_length"
        yield f"{name}: {texts}, are {documents}: they are split, and no token is lost (truncation: split)"
    elif facts["documents"] > facts["rows_read"]:
        why = "each answer is one (train_on: each_turn)"
        if store.desirable is not None:
            why = "each chosen answer is a wanted one, each rejected answer an unwanted one"
        yield f"{name}: {counted(facts['rows_read'], 'row')} are {documents}: {why}"
    if count := facts[OTHERWISE]:
        yield (
            f"{name}: rows with an answer that the chat template writes or asks for otherwise when it is the last: "
            f"{count:,}; data.train_on: each_turn supervises every answer as the model is asked for it"
        )
    if count := facts[UNREASONED]:
        yield (
            f"{name}: documents without reasoning, for which the chat template asks: {count:,}; so that the model does "
            "not unlearn it, add chat_template_kwargs: {enable_thinking: false}"
        )


def prepare(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Prepared:
    """Tokenise the data sets that are not in the cache, hold out, weigh and pack. Any number of processes may call it
    at once.

    Raises DataError with every mistake of the rows (file:line: mistake; remedy).
    """
    data, seed = recipe.data, recipe.training.seed
    encoder = Encoder(tokenizer, data)
    entries = data.sets
    keys: list[str] = []
    stores: list[StoredDocuments] = []
    mistakes = Mistakes()
    for entry in entries:
        try:
            key, store = stored_documents(resolve(entry), data, encoder)
        except DataError as error:
            mistakes.take(error)
            continue
        keys.append(key)
        stores.append(store)
    mistakes.raise_if_any()

    pool = DocumentPool(stores)
    split = split_documents(pool, entries, len(data.train), data.eval, seed)
    # A row of preferences is one pair or one judged answer. A step's micro-batches are packed, not the rows.
    capacity = data.max_length if data.packing and data.unit == "documents" else None
    train = pool.rows(split.train, capacity)
    # Several data sets of `eval` are packed by themselves, so that each has a loss of its own.
    eval_sets: dict[str, Rows] = {}
    if len(data.eval_sets) > 1:
        for index, name in enumerate(data.eval_names):
            documents = split.held_out[np.isin(split.held_out, pool.group(len(data.train) + index))]
            if len(documents):
                eval_sets[name] = pool.rows(documents, capacity)
    held_out = None
    if eval_sets:
        held_out = pool.join([*eval_sets.values()])
    elif len(split.held_out):
        held_out = pool.rows(split.held_out, capacity)
    _check_metric(recipe, held_out, eval_sets)

    facts = _facts(pool, split, train, held_out, capacity)
    if recipe.model.new_tokens:
        facts["new_tokens_unused"] = _unused_tokens(recipe.model.new_tokens, tokenizer, stores)
    eval_key = data.eval.fraction if isinstance(data.eval, EvalFraction) else None
    settings = [seed, data.packing, data.max_length, eval_key, [entry.weight for entry in entries]]
    return Prepared(
        train=train,
        eval=held_out,
        eval_sets=eval_sets,
        fingerprint=content_key({"documents": keys, "settings": settings, "training sets": len(data.train)}),
        facts=facts,
        prompts=_sample_prompts(recipe, encoder, pool, split),
        pool=pool,
        split=split,
    )


def _check_metric(recipe: Recipe, held_out: Rows | None, eval_sets: dict[str, Rows]) -> None:
    """Raises DataError if evaluations decide something and there is no held-out row to decide by."""
    training = recipe.training
    if not (training.exports_best or training.early_stopping_patience):
        return
    metric = training.metric_for_best_model
    if recipe.best_by_score and (held_out or recipe.eval.generate.file):
        return
    measured: set[str] = set()
    if held_out:
        measured = {"eval_loss", *(f"eval_{name}_loss" for name in eval_sets), *recipe.reward_names}
    if metric not in measured:
        remedy = "name other rows"
        if measured:
            remedy += f", or training.metric_for_best_model: {min(measured)}"
        raise DataError([f"data.eval: no held-out document is left for {metric}, which finds the best step; {remedy}"])


def _facts(
    pool: DocumentPool, split: Split, train: Rows, held_out: Rows | None, capacity: int | None
) -> dict[str, Any]:
    def total(name: str) -> int:
        return sum(int(store.facts.get(name, 0)) for store in pool.stores)  # an older cache lacks newer counts

    tokens = int(train.lengths.sum())
    return {
        "documents": len(split.train),  # of one epoch, copies by weight included
        "distinct_documents": len(np.unique(split.train)),
        "tokens": tokens,
        "supervised_tokens": int(train.supervised.sum()),
        "rows": len(train),
        # Unpacked rows are not filled up: the longest of them is what they would be padded to.
        "fill": tokens / (len(train) * (capacity or int(train.lengths.max()))),
        "eval_documents": len(split.held_out),
        "eval_tokens": int(held_out.lengths.sum()) if held_out else 0,
        "eval_duplicates_left_out": split.duplicates,
        "truncated": total("truncated"),
        "tokens_cut": total("tokens_cut"),
        "dropped": total("dropped"),
        **({"identical": identical} if (identical := total("identical")) else {}),
        "control_token_texts": total("control_token_texts"),
        "largest_token_id": max(int(store.facts["largest_token_id"]) for store in pool.stores),
    }


def _unused_tokens(
    tokens: list[str], tokenizer: PreTrainedTokenizerBase, stores: Sequence[StoredDocuments]
) -> list[str]:
    """The new tokens that no document has."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    missing = set(ids.values())
    for store in stores:
        for start in range(0, len(store.tokens), SCANNED):
            if not missing:
                return []
            missing -= set(np.intersect1d(store.tokens[start : start + SCANNED], [*missing]).tolist())
    return [token for token, number in ids.items() if number in missing]


def _sample_prompts(recipe: Recipe, encoder: Encoder, pool: DocumentPool, split: Split) -> list[SamplePrompt]:
    """The recipe's own prompts, or else the first held-out documents."""
    section = recipe.samples
    if section.prompts is not None:
        try:
            return [encoder.sample_prompt(text) for text in section.prompts]
        except RowError as error:
            raise DataError([f"samples.prompts: {error}"]) from None
    documents = split.held_out if len(split.held_out) else np.unique(split.train)
    prompts = []
    for index in documents[: section.count].tolist():
        prompt = encoder.prompt_of(*pool.document(index))
        if pool.desirable is not None and not pool.desirable[index]:  # no answer to compare with
            prompt = replace(prompt, reference=None)
        prompts.append(prompt)
    return prompts
