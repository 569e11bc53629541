"""Read a data set's rows by its layout, check them all, and collect notes for the data's owner.

Checking, tokenising and previewing read rows here, so that all three agree about every row. `check_rows` finds every
mistake before anything heavy is loaded: file, line, what is wrong, remedy. Only a chat template or a tokenizer knows
some mistakes (a role order that it refuses, a length). Tokenising reports these in the same form.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

from finetune.data.cells import BadRow, is_blank, nearest
from finetune.data.chat import (
    MEDIA,
    REASONING,
    Chat,
    Content,
    Judged,
    Pair,
    Passage,
    ReportedOnce,
    documents_in,
    is_blank_turn,
    leaves_out_prompt,
    read_row,
)
from finetune.data.layout import RowLayout, layout_of
from finetune.data.readers import SourceRow
from finetune.data.readings import Reading, in_quotes, in_yaml, profiles, remarks
from finetune.data.sources import Source, asked_entry, resolve
from finetune.errors import DataError
from finetune.recipe.layouts import FORMAT_OF_OBJECTIVE, LAYOUTS
from finetune.recipe.schema import Data
from finetune.recipe.sections.results import Generate
from finetune.wording import counted

SHOWN_MISTAKES = 20  # different ones
SHOWN_PLACES = 3  # of one mistake
MOST_TRIED = 2_000  # training rows whose answers are read by the metrics; SQL takes 5 ms each
FIRST_NOTE_SECONDS, SECONDS_BETWEEN_NOTES = 2.0, 10.0  # a file of 91 kB may hold 30 million equal rows
READ_KEYS = ("role", "content", "tool_calls", "tool_call_id", *REASONING)  # message keys for templates or our checks
WRITTEN_BY = "written_by"  # the column of `finetune sample` that names an answer's author
MOST_NAMES = 1000  # columns and message keys that are noted by name; each row may have its identifier as a key
HEAD = 50  # rows from which the layout is found; a mapped column must be in one of them
# Chat templates' control tokens and begin-of-text tokens, as texts spell them. A row's texts are read as characters, so
# the control tokens of a rendered chat would be split into characters.
_WRITTEN_TOKEN = re.compile(
    r"<[|｜][^\s<>]{1,40}[|｜]>|<\|[a-z_]{1,40}>|<[a-z_]{1,40}\|>|<(?:start|end)_of_(?:turn|utterance)>"
    r"|\[/?INST\]|\[/?TOOL_\w+\]|<</?SYS>>"
)
# UTF-8 that a program read as cp1252 and saved as UTF-8 again: "MÃ¼nchen", "itâ€™s", "ÐŸÑ€Ð¸Ð²ÐµÑ‚". After a letter
# that stands for a first byte come the characters that stand for the bytes 80 to BF. Other letters than Â, Ã, â€
# count from the second on, because French writes "été…»".
_FOLLOWS = "[\x80-\xbf" + bytes(range(0x80, 0xA0)).decode("cp1252", "ignore") + "]"
_TWICE = re.compile(
    f"[ÂÃ]{_FOLLOWS}|â[€‚„]{_FOLLOWS}|(?:[ÄÅÎÏÐÑ×ØÙ]{_FOLLOWS}){{2,}}|(?:[à-ï]{_FOLLOWS}{{2}}){{2,}}|ðŸ{_FOLLOWS}{{2}}"
)
_BEGIN_OF_TEXT = re.compile(r"\s*(<s>|<bos>|<BOS_TOKEN>|<\|begin_of_text\|>|<\|startoftext\|>|<｜begin▁of▁sentence｜>)")


class ReadRow(NamedTuple):
    """A row in its common form, or the mistake in it."""

    row: SourceRow
    read: Content | None
    problem: str | None

    @property
    def place(self) -> str:
        return self.row.place


class RowReader:
    """Reads a data set's rows once. Afterwards `facts` names the unread columns and the odd texts."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._layout: RowLayout | None = None
        self._remarks: list[str] = []  # about the first rows' columns
        self._unused: dict[str, None] = {}  # unread columns, in the order of their first rows
        self._message_keys: dict[str, None] = {}  # keys beside READ_KEYS
        self._reported: set[str] = set()  # unknown roles, and columns or keys with images
        self._unanswered = 0
        self._read_only = 0  # answers that rows mark as not to be trained
        self._with_tools = 0
        self._odd_calls: Counter[str] = Counter()  # rows whose calls, results and tools do not belong together
        # The rows' system messages, "" for none; two are enough to know that they differ.
        self._systems: set[str] = set()
        self._run_together = 0
        self._written: list[Any] = [0, ""]  # rows that spell tokens of a chat template; the first token
        self._twice: list[Any] = [0, "", ""]  # rows in UTF-8 of UTF-8; the first such letters, and what they stand for
        self._begun: list[Any] = [0, ""]  # rows that begin with a begin-of-text token; the first token
        # For preferences: pairs with equal answers, answers by label, unread prompts, and rows of texts.
        self._answers = {"pairs": 0, "equal": 0, "wanted": 0, "unwanted": 0, "prompt_unread": 0, "texts": 0}
        self._dropped = dict.fromkeys(source.entry.drop, 0)
        self._written_by: dict[str, int] = {}  # rows of each author of sampled answers
        self._digests: set[bytes] = set()  # one for each row, if duplicates are dropped

    def rows(self, some: Iterator[SourceRow] | None = None) -> Iterator[ReadRow]:
        """Read every row, or `some` rows. If no layout has the columns, the one result is that mistake."""
        rows = self._source.rows() if some is None else some
        head: list[SourceRow] = []
        while self._layout is None:
            head = list(islice(rows, HEAD))
            if not head:
                return
            good = [row for row in head if row.values is not None]
            if not good:
                yield from (ReadRow(row, None, row.problem) for row in head)
                continue
            values = [row.values for row in good if row.values is not None]
            try:
                self._layout = layout_of(self._source.entry, values)
                reading = Reading(self._layout.format, self._layout.columns)
                self._remarks = remarks(reading, profiles(values))
            except BadRow as error:
                yield ReadRow(good[0], None, str(error))
                return
        last = head[-1]
        for row in chain(head, rows):
            last = row
            if row.values is None:
                yield ReadRow(row, None, row.problem)
                continue
            try:
                self._note_unused(row.values, self._layout)
                if "empty" in self._dropped:
                    view, format = self._layout.view(row.values), self._layout.format
                    needed = [view.get(column) for column in LAYOUTS[format].columns]
                    if format in ("preference", "kto"):
                        if isinstance(needed[0], str):  # a text answers a prompt; a dialogue may hold it itself
                            needed += [view[column] for column in ("prompt", "instruction") if column in view]
                        # If an answer is a list of messages, its last turn is compared.
                        needed = [cell[-1] if isinstance(cell, list) and cell else cell for cell in needed]
                    if any(
                        cell is None or (isinstance(cell, str) and is_blank(cell)) or is_blank_turn(cell)
                        for cell in needed
                    ):
                        self._dropped["empty"] += 1
                        continue
                read = read_row(row.values, self._layout)
            except ReportedOnce as error:
                if error.about not in self._reported:
                    self._reported.add(error.about)
                    yield ReadRow(row, None, str(error))
            except BadRow as error:
                yield ReadRow(row, None, str(error))
            else:
                if "duplicate" in self._dropped:
                    # By the converted row: identifiers and other unread columns make no difference.
                    digest = hashlib.blake2b(repr(read).encode(errors="replace"), digest_size=16).digest()
                    if digest in self._digests:
                        self._dropped["duplicate"] += 1
                        continue
                    self._digests.add(digest)
                self._note(read, row.values, self._layout)
                yield ReadRow(row, read, None)
        if self._answers["pairs"] and self._answers["pairs"] == self._answers["equal"]:
            chosen, rejected = (self._layout.place(name) for name in ("chosen", "rejected"))
            count = counted(self._answers["pairs"], "pair")
            remedy = "name two columns that differ: columns: {chosen: ..., rejected: ...}"
            yield ReadRow(last, None, f"{chosen} equals {rejected} in each of {count}; {remedy}")

    def _note_unused(self, values: dict[str, Any], layout: RowLayout) -> None:
        """Note unread columns. Raises BadRow for a column with images, or a name like an optional column's."""
        for name in layout.unused(values):
            if name == WRITTEN_BY:
                continue
            # `datasets` keeps an image or a sound in a table as {"bytes": ..., "path": ...}, or as a list of these.
            value = values[name]
            first = value
            if isinstance(value, list) and value:
                first = value[0]
            if name in MEDIA or (isinstance(first, dict) and {*first} == {"bytes", "path"}):
                remedy = "only text is trained on: take a data set of text alone, or remove the column"
                raise ReportedOnce(f"column {name!r} holds no text; {remedy}", name)
            if name in self._unused or len(self._unused) >= MOST_NAMES:
                continue
            self._unused[name] = None
            near = nearest(name, LAYOUTS[layout.format].optional, cutoff=0.8)
            if near and near not in values and near not in layout.columns:
                line = in_yaml({near: name})
                raise BadRow(f"unknown column {name!r}; did you mean {near!r}? rename it, or add columns: {line}")

    def _note(self, read: Content, values: Mapping[str, Any], layout: RowLayout) -> None:
        """Count the odd texts of a row, and a preference row's answers."""
        texts, runs_together, author = [], False, values.get(WRITTEN_BY)
        if isinstance(author, str) and (author in self._written_by or len(self._written_by) < MOST_NAMES):
            self._written_by[author] = self._written_by.get(author, 0) + 1
        for document in documents_in(read):
            if isinstance(document, Chat):
                texts += [message["content"] for message in document.messages]
                self._unanswered += document.messages[-1]["role"] != "assistant"
                first = document.messages[0]
                if len(self._systems) < 2:
                    self._systems.add(first["content"] if first["role"] in ("system", "developer") else "")
                self._odd_calls.update(_odd_calls(document))
                self._with_tools += bool(document.tools) or any("tool_calls" in turn for turn in document.messages)
                if layout.format in ("messages", "sharegpt"):
                    answers = sum(message["role"] == "assistant" for message in document.messages)
                    self._read_only += answers - sum(document.supervised)
                keys = (key for message in document.messages for key in message if key not in READ_KEYS)
                new_keys = dict.fromkeys(key for key in keys if key not in self._message_keys)
                self._message_keys |= dict.fromkeys(islice(new_keys, MOST_NAMES - len(self._message_keys)))
            else:
                texts.append(document.prompt + document.completion)
                if document.prompt:
                    end, start = document.prompt[-1], document.completion[0]
                    runs_together |= end.isascii() and not end.isspace() and start.isascii() and start.isalnum()
        self._run_together += runs_together
        # A row counts once: for its first begin-of-text token, or else for its first token of a chat template.
        if begun := next((match[1] for text in texts if (match := _BEGIN_OF_TEXT.match(text))), None):
            self._begun = [self._begun[0] + 1, self._begun[1] or begun]
        elif written := next((token for text in texts if (token := _written_token(text))), None):
            self._written = [self._written[0] + 1, self._written[1] or written]
        if twice := next((mended for text in texts if (mended := _encoded_twice(text))), None):
            self._twice = [self._twice[0] + 1, *(self._twice[1:] if self._twice[0] else twice)]
        match read:
            case Pair():
                self._answers["pairs"] += 1
                self._answers["equal"] += read.chosen == read.rejected
            case Judged():
                self._answers["wanted"] += read.desirable
                self._answers["unwanted"] += not read.desirable
            case _:
                return
        self._answers["texts"] += isinstance(documents_in(read)[0], Passage)
        self._answers["prompt_unread"] += leaves_out_prompt(values, layout, read)

    def facts(self, is_read: Callable[[str], bool] = lambda key: True) -> dict[str, Any]:
        """Facts about the rows read so far, for `notes_of`; `is_read`: whether the template reads a message key."""
        entry, layout = self._source.entry, self._layout
        read_as: list[str] | None = None
        if layout and layout.is_guess:
            read_as = [layout.format, in_yaml(layout.columns)]
        dialect = ""  # of the first CSV file
        if self._source.kind == "csv" and self._source.files:
            with suppress(OSError, DataError):
                from finetune.data.dialect import csv_dialect

                dialect = csv_dialect(self._source.files[0], entry.delimiter, entry.encoding).in_words()
        facts_of_answers: dict[str, Any] = {}
        if entry.format in FORMAT_OF_OBJECTIVE.values():
            # The `columns` that read rows of texts as chats.
            columns = dict(layout.columns) if layout else {}
            question = columns.pop("prompt", "prompt")
            as_chats = in_yaml({**columns, "instruction": question})
            facts_of_answers = {"answers": dict(self._answers), "as_chats": as_chats}
        if self._written_by:
            facts_of_answers[WRITTEN_BY] = self._written_by
        return {
            "read_as": read_as,
            "remarks": self._remarks,
            "unused_columns": [*self._unused],
            "unused_message_keys": [key for key in self._message_keys if not is_read(key)],
            "unanswered": self._unanswered,
            "read_only": self._read_only,
            "with_tools": self._with_tools,
            "odd_calls": dict(self._odd_calls),
            "systems": sorted(self._systems),
            "run_together": self._run_together,
            "written_tokens": self._written,
            "begins_of_text": self._begun,
            "encoded_twice": self._twice,
            "dropped": dict(self._dropped),
            "dialect": dialect,
            "told": dict(self._source.notes),
            **facts_of_answers,
        }


def _odd_calls(chat: Chat) -> Iterator[str]:
    """Name each way in which a row's calls, results and tools do not fit together."""
    called = [call["function"]["name"] for turn in chat.messages for call in turn.get("tool_calls", ())]
    declared = {(tool.get("function") or tool).get("name") for tool in chat.tools or ()}
    pairs = [*pairwise(chat.messages)]
    if called and not declared:
        yield "with calls and no tools"
    elif not declared.issuperset(called):
        yield "with a call of a tool that they do not declare"
    if any(
        turn["role"] == "tool" and before["role"] != "tool" and "tool_calls" not in before for before, turn in pairs
    ):
        yield "with a tool's result that answers no call"
    if any("tool_calls" in turn and after["role"] != "tool" for turn, after in pairs):
        yield "with a call that gets no result"


def _written_token(text: str) -> str | None:
    """The first chat template token that a text spells.

    A single token at the very end does not count, because people add an end-of-text token by hand.
    """
    if "<" not in text and "[" not in text:
        return None
    match = _WRITTEN_TOKEN.search(text)
    if match and text[match.end() :].strip():
        return match.group()
    return None


def _encoded_twice(text: str) -> tuple[str, str] | None:
    """The first letters of a text that are UTF-8 read as cp1252, and what they stand for."""
    if text.isascii():
        return None
    for match in _TWICE.finditer(text):
        with suppress(UnicodeError):
            # cp1252 has no letter for five bytes; programs keep them as control characters.
            nbytes = b"".join(letter.encode("latin-1" if letter < "\u0100" else "cp1252") for letter in match[0])
            return match[0][:20], nbytes.decode("utf-8")[:20]
    return None


def notes_on_reading(facts: dict[str, Any]) -> Iterator[str]:
    """The readers' notes on a file: cells read as empty, lines skipped, sheets not read."""
    for note, count in (facts.get("told") or {}).items():  # an older cache has none
        yield note + f": {count:,}" * bool(count)


def notes_of(name: str, facts: dict[str, Any]) -> Iterator[str]:
    """Notes for the data set's owner, a line each; `facts` are a reader's."""

    def listed(names: list[str]) -> str:
        if len(names) >= MOST_NAMES:
            return f"{in_quotes(names)} at least"
        return in_quotes(names)

    if facts["read_as"]:
        layout, columns = facts["read_as"]
        yield f"{name}: read as {layout}, columns: {columns}"
    if facts.get("dialect"):
        yield f"{name}: read as {facts['dialect']}"
    for line in notes_on_reading(facts):
        yield f"{name}: {line}"
    dropped = facts.get("dropped") or {}
    words = {"empty": "with an empty cell", "duplicate": "equal to an earlier one"}
    if reasons := [f"{counted(count, 'row')} {words[kind]}" for kind, count in dropped.items() if count]:
        yield f"{name}: left out: {' and '.join(reasons)}"
    if facts["unused_columns"]:
        yield f"{name}: columns not used: {listed(facts['unused_columns'])}"
    for remark in facts.get("remarks", ()):  # an older cache has none
        yield f"{name}: {remark}"
    if facts["unused_message_keys"]:
        yield f"{name}: keys of messages that the template does not read: {listed(facts['unused_message_keys'])}"
    if count := facts["unanswered"]:
        yield f"{name}: dialogues that end without an answer: {count:,}; nothing is supervised in their last turn"
    if odd := facts.get("odd_calls"):
        yield f"{name}: rows {', '.join(f'{kind}: {count:,}' for kind, count in odd.items())}"
    if count := facts.get("read_only", 0):  # an older cache has none
        yield f"{name}: answers that the rows mark as not to be trained (weight: 0, or loss, train or mask): {count:,}"
    count, letters, meant = facts.get("encoded_twice") or (0, "", "")  # an older cache has none
    if count:
        yield (
            f"{name}: rows with {letters!r}, which may stand for {meant!r}: {count:,}; if so, a program read UTF-8 as "
            "cp1252 and saved it again; export the file anew, or mend its texts: text.encode('cp1252').decode('utf-8')"
        )
    count, token = facts["begins_of_text"]
    if count:
        yield (
            f"{name}: rows that begin with {token}: {count:,}; it is read as characters, and the tokenizer or the chat "
            "template writes the token itself; remove it from the rows"
        )
    count, token = facts["written_tokens"]
    if count:
        yield (
            f"{name}: rows that write control tokens themselves, the first {token}: {count:,}; a row's texts are read "
            'as characters; give chats as {"messages": [{"role": "user", "content": "..."}, ...]}, and the template '
            "writes the tokens"
        )
    answers = facts.get("answers") or {}  # an older cache has none
    if sum(answers.get(kind, 0) > 0 for kind in ("wanted", "unwanted")) == 1:
        kind, other = "unwanted", "wanted"
        if answers["wanted"]:
            kind, other = other, kind
        yield f"{name}: all answers are {kind}; kto learns from the difference, so add some that are {other}"
    if count := answers.get("prompt_unread"):
        yield (
            f"{name}: rows with a prompt that is not in the dialogue of their answers: {count:,}; the dialogue is "
            "read, the prompt is not"
        )
    if count := answers.get("texts"):
        yield (
            f"{name}: rows of texts, read without a chat template: {count:,}; for a chat model read them as chats: "
            f"columns: {facts['as_chats']}"
        )
    elif count := facts["run_together"]:
        yield (
            f"{name}: prompts that run into their completion without a space or line break: {count:,}; end them with "
            "one, or read them as chats: columns: {instruction: ..., output: ...}"
        )


@dataclass
class _Group:
    """One mistake, and the places of its rows."""

    problem: str
    places: list[str]  # the first SHOWN_PLACES
    count: int = 1
    size: int = 0

    def line(self) -> str:
        """`faq.csv:7: problem`, or `faq.csv:7, 12, 19 and 4 more rows: problem`."""
        places = [place for place in self.places if place]
        if not places:
            return self.problem
        file = places[0].rpartition(":")[0]
        places = list(dict.fromkeys(places))  # a JSON array may be one line
        text = places[0]
        for place in places[1:]:
            text += f", {place.removeprefix(f'{file}:')}"
        if self.count > len(places):
            text += f" and {counted(self.count - len(places), 'more row')}"
        return f"{text}: {self.problem}"


class Mistakes:
    """Collects the first SHOWN_MISTAKES different mistakes, each with its first places, and counts all."""

    def __init__(self) -> None:
        self.count = 0
        self._more = 0  # without a line
        self._groups: dict[str, _Group] = {}

    def add(self, problem: str, place: str = "", *, kind: str | None = None, size: int = 0) -> None:
        """Count a mistake. Equal problems are one line.

        Args:
            place: `file:line`; empty for a mistake of the whole data set.
            kind: Problems of one kind are one line, even if their numbers differ.
            size: The problem with the largest size is shown for its kind.
        """
        self.count += 1
        group = self._groups.get(kind or problem)
        if group is None:
            if len(self._groups) < SHOWN_MISTAKES:
                self._groups[kind or problem] = _Group(problem, [place], size=size)
            else:
                self._more += 1
            return
        group.count += 1
        if size > group.size:
            group.problem, group.size = problem, size
        if len(group.places) < SHOWN_PLACES:
            group.places.append(place)

    def raise_if_any(self) -> None:
        """Raises DataError with a line for each different mistake, and a count of the mistakes that are not shown."""
        if not self.count:
            return
        raise DataError([group.line() for group in self._groups.values()], self.count, self._more)

    def take(self, error: DataError) -> None:
        """Add an error's mistakes, those that it does not show too."""
        for mistake in error.shown:
            self.add(mistake)
        self.count += error.count - len(error.shown)
        self._more += error.more


def check_rows(
    data: Data, say: Callable[[str], object] = lambda note: None, scored: Generate | None = None
) -> dict[str, int]:
    """Check every local row. Returns each data set's number of rows, and says notes for the data's owner.

    Args:
        scored: Its metrics read the references too, and its file is checked as well.

    Raises DataError with every mistake.
    """
    from finetune.scoring.metrics import Metric, Scored, scores_of  # a training reads rows without it

    mistakes = Mistakes()
    entries, metrics, items = [*data.sets], list[Metric](), list[Scored]()
    # Without rows of their own the references are a share of the training rows, which the seed draws.
    scored_sets, most = data.train if data.eval is not None else [], MOST_TRIED
    is_certain = False
    if scored is not None:
        metrics = [Metric.of(choice) for choice in scored.choices]
        if scored.file is not None:
            scored_sets = [asked_entry(data.train[0], scored.file)]
            entries += scored_sets
        elif isinstance(data.eval, list):
            scored_sets = data.eval
        if scored_sets is not data.train:
            most, is_certain = scored.limit, True
    counts: dict[str, int] = {}
    notes: list[str] = []
    for entry in entries:
        try:
            source = resolve(entry)
            if source.kind == "hub":
                continue
            reader = RowReader(source)
            counts[source.name] = 0
            next_note = time.monotonic() + FIRST_NOTE_SECONDS
            for number, row in enumerate(reader.rows(), start=1):
                if time.monotonic() > next_note:
                    next_note = time.monotonic() + SECONDS_BETWEEN_NOTES
                    print(f"checking {source.name}: {counted(number, 'row')}", file=sys.stderr, flush=True)
                if row.read is None:
                    mistakes.add(row.problem or "", row.place)
                    continue
                counts[source.name] += 1
                if metrics and len(items) < most and any(entry is scored_set for scored_set in scored_sets):
                    reference = reference_in(row.read)
                    if reference is not None:
                        items.append(Scored(reference, row.place, row.row.values or {}))
            facts = reader.facts()
            notes += notes_of(source.name, facts)
            if entry.format == "preference" and (equal := facts["answers"]["equal"]):  # `prepare` has its own note
                notes.append(f"{source.name}: pairs of two equal answers: {equal:,}; they are left out")
        except DataError as error:
            mistakes.take(error)
    for metric in metrics:
        try:
            scores_of(metric, [item.reference for item in items], items)
        except DataError as error:
            if is_certain:
                mistakes.take(error)
            else:
                notes.append(f"{error.mistakes[0]}; a run refuses such a row if it holds it out")
    mistakes.raise_if_any()
    for note in notes:
        say(note)
    return counts


def reference_in(content: Content) -> str | None:
    """A row's last answer as text; None if it is unwanted, has no question, or is a call, which a template writes."""
    match content:
        case Pair():
            return reference_in(content.chosen)
        case Judged():
            return reference_in(content.answer) if content.desirable else None
        case Passage():
            return content.completion if content.prompt else None
    last = content.messages[-1]
    is_text = content.supervised[-1] and not last.get("tool_calls")
    return str(last["content"]) if is_text else None
