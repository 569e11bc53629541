"""Prepares a run's data: tokenised, held out, weighed and packed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.base.location import tokenizer_file
from finetune.data.rows import WRITTEN_BY, Mistakes, RowReader, notes_of
from finetune.data.sources import read_split, resolve
from finetune.errors import DataError, FinetuneError
from finetune.output_stream import one_line
from finetune.recipe.schema import DataSet, EvalFraction, Recipe
from finetune.tokens.cache import (
    EARLIER_VERSIONS,
    ONE_ANSWER,
    VERSION,
    StoredDocuments,
    content_key,
    nothing_left,
    stored_documents,
)
from finetune.tokens.conversation import Conversation
from finetune.tokens.encoder import IGNORE, OTHERWISE, UNREASONED, Encoder, RowError, SamplePrompt, answer_of
from finetune.tokens.mixture import DocumentPool, Rows, Split, split_documents
from finetune.wording import counted, percent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MUCH = 0.1  # from this share of cut tokens on, the note names a remedy
SCANNED = 2**20  # tokens that are searched at a time
MOST_COMPARED = 100_000  # documents whose questions are compared, in about a second
MOST_ENCODED_BYTES = 16 * 2**20  # of all data sets that are encoded whole before a run; about ten seconds
FIRST_ROWS = 1000  # of each larger data set; about two seconds


@dataclass(frozen=True)
class Prepared:
    """A run's data."""

    train: Rows
    eval: Rows | None
    eval_sets: dict[str, Rows]  # the rows of `eval` by data set, if data.eval names several; else empty
    fingerprint: str  # content address for data, tokenizer, template and settings
    earlier_fingerprints: tuple[str, ...]  # as earlier releases made it, for runs that they began
    facts: dict[str, Any]  # counts for receipt and terminal
    prompts: list[SamplePrompt]  # to be answered before and after training
    conversation: Conversation  # how chats are written, and the tokens that end the answers
    pool: DocumentPool  # every document; `split` holds indices into it
    split: Split

    @property
    def notes(self) -> list[str]:
        """Notes for the data's owner, a line each; nothing goes missing silently."""
        cut = int(self.facts["tokens_cut"])
        share = cut / (cut + int(self.pool.lengths.sum()))
        truncated = f"truncated at data.max_length: {percent(share)} of the tokens are cut"
        if share >= MUCH:
            truncated += "; raise it, or for texts without a prompt set data.truncation: split"
        notes = []
        for name, noun, fate in (
            ("too_long", "document", "dropped: longer than data.max_length"),
            (
                "unanswered",
                "document",
                "dropped: the question alone is longer than data.max_length, so no answer is left; data.max_length: "
                f"{self.facts.get('longest_unanswered', 0)} keeps all of them",
            ),
            ("truncated", "document", truncated),
            ("identical", "pair", "left out: the chosen answer is the rejected one"),
            ("identical_cut", "pair", "left out: the answers differ only beyond data.max_length; raise it"),
            ("eval_duplicates_left_out", "held-out document", "left out: identical ones are trained on"),
            (
                "eval_questions_trained_on",
                "held-out document",
                "with a question that is trained on too; their loss says little about new questions: name "
                "rows of other questions in data.eval",
            ),
            (
                "control_token_texts",
                "text",
                "with control tokens spelt out; they stay text, and the template writes its own",
            ),
        ):
            count = int(self.facts.get(name, 0))
            if name == "too_long":
                count = int(self.facts["dropped"]) - int(self.facts.get("unanswered", 0))
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
    """Notes on the documents that a data set's rows became, a line each."""
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
            f"{name}: rows whose earlier answers the chat template writes differently from the last one: "
            f"{count:,}; data.train_on: each_turn supervises every answer after its own prompt"
        )
    if count := facts[UNREASONED]:
        yield (
            f"{name}: documents without reasoning although the chat template asks for it: {count:,}; to keep the "
            "model's reasoning, add chat_template_kwargs: {enable_thinking: false}"
        )


def prepare(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Prepared:
    """Tokenise the data sets that the cache lacks, hold out, weigh and pack.

    Any number of processes may call it at once. Raises DataError with every row's mistake (file:line: mistake; remedy).
    """
    data, seed = recipe.data, recipe.training.seed
    encoder = Encoder(tokenizer, data, recipe.model)
    entries = data.sets
    addresses: list[dict[int, str]] = []  # each data set's, by the cache's version
    stores: list[StoredDocuments] = []
    mistakes = Mistakes()
    for entry in entries:
        try:
            source = resolve(entry)
            keys, store = stored_documents(source, data, encoder)
        except DataError as error:
            mistakes.take(error)
            continue
        addresses.append(keys)
        stores.append(store)
    mistakes.raise_if_any()

    pool = DocumentPool(stores)
    train_sets = len(data.train)
    for key, part in (("train", stores[:train_sets]), ("eval", stores[train_sets:])):
        if part and not any(map(len, part)):
            counts = [store.facts for store in part]
            raise DataError([nothing_left(f"data.{key}", counts, data.max_length)])
    split = split_documents(pool, entries, train_sets, data.eval, seed)
    if data.unit == "judged":
        read = (pool.document(int(index)) for index in np.unique(split.train))
        first = next(read)
        answer = answer_of(*(part.tolist() for part in first))
        second = next((other for other in read if answer_of(*(part.tolist() for part in other)) != answer), None)
        if second is None:
            raise DataError([ONE_ANSWER])
        pool.two_answers = (first, second)
    capacity: int | None = None  # one document a row
    if data.packing and data.unit == "documents":
        capacity = data.max_length  # a preference row stays one pair or one judged answer: its micro-batches are packed
    train = pool.rows(split.train, capacity)
    # Each of several `eval` data sets is packed by itself, so that it has its own loss.
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
    if isinstance(data.eval, EvalFraction) and len(pool.lengths) <= MOST_COMPARED:
        facts["eval_questions_trained_on"] = _questions_in_both(pool, split)
    if recipe.model.new_tokens:
        ids: dict[str, Any] = {token: tokenizer.convert_tokens_to_ids(token) for token in recipe.model.new_tokens}
        unused = unused_ids(ids.values(), (store.tokens for store in stores))
        facts["new_tokens_unused"] = [token for token, number in ids.items() if number in unused]
    ends = (stop for store in stores for stop in store.facts["stops"])
    conversation = encoder.conversation(ends, [store.facts["rows"] for store in stores[:train_sets]])
    eval_key = data.eval.fraction if isinstance(data.eval, EvalFraction) else None
    chosen = [seed, data.packing, data.max_length, eval_key, [entry.weight for entry in entries]]
    settings = {"settings": chosen, "training sets": len(data.train)}
    fingerprint, *earlier_fingerprints = (
        content_key({"documents": [keys[version] for keys in addresses], **settings})
        for version in (VERSION, *EARLIER_VERSIONS)
    )
    return Prepared(
        train=train,
        eval=held_out,
        eval_sets=eval_sets,
        fingerprint=fingerprint,
        earlier_fingerprints=tuple(earlier_fingerprints),
        facts=facts,
        prompts=_sample_prompts(recipe, encoder, pool, split, conversation.opening()),
        conversation=conversation,
        pool=pool,
        split=split,
    )


def prepare_here(recipe: Recipe) -> tuple[Prepared | None, str]:
    """Prepare the data before a run as the run does. Nothing is downloaded, and no code from a model's folder runs.

    Returns the data and an empty line if all rows were encoded. Else a line says why not. Then the data are each local
    data set's first rows, or None if no row was encoded. Raises DataError with every mistake.
    """
    sources = [resolve(entry) for entry in recipe.data.sets]
    nbytes = sum(file.stat().st_size for source in sources for file in source.files)
    is_whole = nbytes <= MOST_ENCODED_BYTES and all(source.kind != "hub" for source in sources)
    train = recipe.data.train if is_whole else _first_rows(recipe.data.train)
    local = tokenizer_here(recipe) if train else None
    if local is None:
        if not is_whole:
            return None, "data: not counted: the data are on the Hub, or large; `finetune preview` counts them"
        rows = sum(content is not None for source in sources for _, content, _ in RowReader(source).rows())
        why = "may run code of its own" if recipe.model.trust_remote_code else "is not on this machine"
        tokenizer = f"the tokenizer of {one_line(recipe.model.name_or_path)} {why}"
        line = f"data: {counted(rows, 'row')}; tokens are not counted: {tokenizer}; `finetune preview` loads it"
        return None, f"{line} and counts them"
    if is_whole:
        return prepare(*local), ""
    changes: dict[str, object] = {"train": train}
    if isinstance(recipe.data.eval, list):
        changes["eval"] = _first_rows(recipe.data.eval) or None
    head = local[0].model_copy(update={"data": recipe.data.model_copy(update=changes)})
    encoded = f"the first {counted(FIRST_ROWS, 'row')} of each local data set were encoded"
    line = f"data: {encoded}: the data are on the Hub, or large; `finetune preview` counts all"
    return prepare(head, local[1]), line


def tokenizer_here(recipe: Recipe) -> tuple[Recipe, PreTrainedTokenizerBase] | None:
    """The recipe with its model's folder on this machine as its model, and the tokenizer in that folder.

    None if it is not on this machine, or may run code of its own.
    """
    section = recipe.model
    file = tokenizer_file(section.name_or_path, section.revision)
    if file is None or section.trust_remote_code:
        return None
    from finetune.model.new_tokens import load_tokenizer  # imports transformers, which takes two seconds

    local = recipe.model_copy(update={"model": section.model_copy(update={"name_or_path": str(file.parent)})})
    try:
        return local, load_tokenizer(local)
    except FinetuneError:
        if Path(section.name_or_path).is_dir():
            raise
        return None  # the Hub's cache may hold only some files, and training fetches the others


def _first_rows(entries: Sequence[DataSet]) -> list[DataSet]:
    """The local data sets' first rows; a part that the recipe chose stays as it is."""
    local = [entry for entry in entries if resolve(entry).kind != "hub"]
    return [
        entry
        if read_split(entry.split).is_sliced
        else entry.model_copy(update={"split": f"{entry.split}[:{FIRST_ROWS}]"})
        for entry in local
    ]


def _questions_in_both(pool: DocumentPool, split: Split) -> int:
    """Held-out documents whose tokens before the first answer begin a training document too. Texts have none."""

    def question(index: int) -> bytes:
        ids, labels = pool.document(index)
        answer_start = int(np.argmax(labels != IGNORE))
        return ids[:answer_start].tobytes() if answer_start > 1 else b""

    trained = {question(index) for index in np.unique(split.train).tolist()} - {b""}
    return sum(question(index) in trained for index in split.held_out.tolist())


def _check_metric(recipe: Recipe, held_out: Rows | None, eval_sets: dict[str, Rows]) -> None:
    """Raises DataError if an evaluation metric decides something, and no held-out row measures it."""
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
    """Counts for the receipt and the terminal."""

    def total(name: str) -> int:
        return sum(int(store.facts.get(name, 0)) for store in pool.stores)  # an older cache lacks newer counts

    eval_tokens = 0
    if held_out:
        eval_tokens = int(held_out.lengths.sum())
    counts: dict[str, Any] = {}
    if unanswered := total("unanswered"):
        longest = max(int(store.facts.get("longest_unanswered", 0)) for store in pool.stores)
        counts |= {"unanswered": unanswered, "longest_unanswered": longest}
    for name in ("identical", "identical_cut"):
        if count := total(name):
            counts[name] = count
    authors: Counter[str] = Counter()
    for store in pool.stores:
        authors.update(store.facts["rows"].get(WRITTEN_BY) or {})
    if authors:
        counts[WRITTEN_BY] = dict(authors)
    tokens = int(train.lengths.sum())
    return {
        "documents": len(split.train),  # in one epoch, with copies by weight
        "distinct_documents": len(np.unique(split.train)),
        "tokens": tokens,
        "supervised_tokens": int(train.supervised.sum()),
        "rows": len(train),
        # Unpacked rows would be padded to the longest row.
        "fill": tokens / (len(train) * (capacity or int(train.lengths.max()))),
        "eval_documents": len(split.held_out),
        "eval_tokens": eval_tokens,
        "eval_duplicates_left_out": split.duplicates,
        "truncated": total("truncated"),
        "tokens_cut": total("tokens_cut"),
        "dropped": total("dropped"),
        **counts,
        "control_token_texts": total("control_token_texts"),
        "largest_token_id": max(int(store.facts["largest_token_id"]) for store in pool.stores),
    }


def unused_ids(ids: Iterable[int], parts: Iterable[np.ndarray]) -> set[int]:
    """The token ids that are in no part of the data."""
    unused = {*ids}
    for tokens in parts:
        for start in range(0, len(tokens), SCANNED):
            if not unused:
                return unused
            unused -= {*np.intersect1d(tokens[start : start + SCANNED], [*unused]).tolist()}
    return unused


def _sample_prompts(
    recipe: Recipe, encoder: Encoder, pool: DocumentPool, split: Split, opening: list[dict[str, str]]
) -> list[SamplePrompt]:
    """The recipe's prompts, each after the rows' system message. Without prompts: held-out or training documents."""
    section = recipe.samples
    if section.prompts is not None:
        try:
            return [encoder.sample_prompt(text, opening) for text in section.prompts]
        except RowError as error:
            raise DataError([f"samples.prompts: {error}"]) from None
    documents = split.held_out
    if not len(documents):
        documents = np.unique(split.train)
    prompts = []
    for index in documents[: section.count].tolist():
        prompt = encoder.prompt_of(*pool.document(index))
        if pool.desirable is not None and not pool.desirable[index]:  # do not compare with an unwanted answer
            prompt = replace(prompt, reference=None)
        prompts.append(prompt)
    return prompts
