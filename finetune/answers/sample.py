"""`finetune sample`: several answers to each prompt, scored, and the training rows that a checker keeps of them.

    FOLDER/
        sample.json      the request, then the figures
        answers.jsonl    every answer, one line a prompt, appended as prompts are answered
        rows.jsonl       the training rows; other ones later: rows-2.jsonl
        held_out.jsonl   the recipe's held-out questions, for the next recipe's scores
        recipe.yaml      the next training; recipe-2.yaml

A command that was ended goes on after the last line. With another --keep, rows are made anew and no model is loaded.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import stat
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from finetune.answers.by_ranks import Computing, computing_ranks, models_by_ranks, one_rank_speaks, rank_0_first
from finetune.answers.endpoint import Drawn, KeptAnswers, conversations, endpoint_answers, server_notes
from finetune.answers.kept_rows import kept_rows, sampled_figures
from finetune.answers.next_recipe import json_lines, next_recipe
from finetune.answers.own_scorer import OwnScorer
from finetune.answers.sample_source import SampleRequest, SampleSource
from finetune.base.identity import base_identity, content_of
from finetune.data.chat import Chat, Passage
from finetune.errors import DataError, FinetuneError
from finetune.files import LOCK, append_lines, lock, read_lines, write_json, write_text
from finetune.finished_run import (
    FinishedRun,
    answer_with_fewer_kernels,
    best_device,
    finished_run,
    fitting,
    hide_bars,
    load_run_tokenizer,
)
from finetune.generation.generate import MOST_BATCH_TOKENS, Answer, Sampling, may_share_a_batch
from finetune.generation.held_out import (
    MOST_ROWS_OF_FILE,
    Answering,
    ScoredSet,
    generated_answers,
    held_out_set,
)
from finetune.launch.launcher import Launch
from finetune.library_errors import library_errors
from finetune.model.new_tokens import load_tokenizer
from finetune.output_stream import one_line
from finetune.recipe.mixed_precision import FastestFormat
from finetune.recipe.schema import Recipe
from finetune.run_folder.checkpoint import sha256_of
from finetune.run_folder.facts import read_run
from finetune.scoring.metrics import Metric, Scored, Unread, scores_of
from finetune.scoring.texts import without_thoughts
from finetune.tokens.dataset import prepare
from finetune.tokens.encoder import Encoder
from finetune.training.batch_notes import positions_of
from finetune.untrusted.json_files import read_object
from finetune.wording import counted

RECORD, ANSWERS, HELD_OUT = "sample.json", "answers.jsonl", "held_out.jsonl"
SCORED_BY = ("checker", "rows")  # keys of the request whose change scores answers again, and draws none
KEPT_REPLIES = "endpoint.jsonl"  # a server's answers until their prompts have all of theirs
FEWEST_FAILED = 3  # prompts whose scorer failed, before most of them end the command
PROMPTS_TO_SERVER = 64  # prompts whose answers are asked together
WEAKER = ("tool_name", "json_valid")  # metrics that a wrong answer may pass
GRADES = ("chrf",)  # metrics that no answer but the reference passes
_Say = Callable[[str], None]
_Question = Chat | Passage


@dataclass(frozen=True)
class _Prompts:
    """The prompts that are answered, after held-out ones were left out."""

    asked: ScoredSet
    questions: list[_Question]
    numbers: list[int]  # each prompt's number in the file, which its draws depend on
    held_out: list[dict[str, Any]]  # the recipe's own held-out questions, as rows
    left_out: int  # prompts that are held out


def sample_rows(
    request: SampleRequest, say: _Say, show: _Say = lambda _: None, launch: Launch | None = None
) -> dict[str, Any]:
    """Answer, score and keep. Returns sample.json with the files' names. Raises FinetuneError.

    Args:
        say: Receives notes.
        show: Receives the progress.
        launch: This rank's launch, if there are several; every rank calls this function. Rank 0 alone writes and says.
    """
    request.check()
    if launch is None or launch.world_size == 1:
        return _sampled(request, Computing(best_device()), say, show)
    source = request.other or request.source
    with one_rank_speaks(), computing_ranks(_in_formats(source), launch) as by:
        if launch.is_main:
            return _sampled(request, by, say, show)
        _sampled(request, by, lambda _: None, lambda _: None)
        return {}


def _sampled(request: SampleRequest, by: Computing, say: _Say, show: _Say) -> dict[str, Any]:
    reads = _opened(request.source)
    writer = reads if request.other is None else _opened(request.other)
    if request.other is not None:  # it answers the source's rows, by its own template
        data = writer.recipe.data.model_copy(update={"train": reads.recipe.data.train})
        writer = replace(writer, recipe=writer.recipe.model_copy(update={"data": data}))
    tokenizer = load_run_tokenizer(writer)
    prompts = _prompts(request, reads, writer, Encoder(tokenizer, writer.recipe.data, writer.recipe.model))
    asked = prompts.asked
    for note in asked.notes:
        say(f"{request.data}: {note}")
    positions = positions_of(writer.recipe) if request.endpoint is None else None
    most = (positions or math.inf) - asked.max_new_tokens
    if beyond := [index for index, prompt in enumerate(asked.prompts) if len(prompt.prompt_ids) > most]:
        say(
            f"{asked.items[beyond[0]].place}: with {asked.max_new_tokens:,} new tokens beyond the model's "
            f"{positions:,} positions: {counted(len(beyond), 'prompt')}; shorten such prompts, or --max-new-tokens"
        )
    checker = _checker(request, asked)
    how, together, author = _way(request, writer, by, asked)
    wanted = {
        **{key: author.get(key) for key in ("model", "endpoint", "dtype")},
        "weights": None if request.endpoint is not None else _weights(writer),
        "prompts": _digest(prompts.numbers, [prompt.prompt_ids for prompt in asked.prompts]),
        "n": request.count,
        **{name: getattr(request, name) for name in ("temperature", "top_p", "seed")},
        "max_new_tokens": asked.max_new_tokens,
        "checker": _checker_in_words(request, checker),
        "rows": _digest([(item.reference, item.row) for item in asked.items]),  # which the checker reads
    }
    scorer: AbstractContextManager[OwnScorer | None] = nullcontext()
    if request.scorer is not None and by.ranks.rank == 0:
        scorer = OwnScorer(request.scorer, request.scorer_seconds)
    with scorer as own, _Record(request.folder, wanted, prompts, checker, own) as record:
        left = rank_0_first(by, lambda: record.begin(say))
        chunks = [tuple(left[at : at + together]) for at in range(0, len(left), together)]
        for chunk, answers in _answers(request, writer, by, prompts, how, chunks, show, say):
            of_prompts = [answers[at : at + request.count] for at in range(0, len(answers), request.count)]
            new = [
                _line(prompts, index, texts, author, tokenizer) for index, texts in zip(chunk, of_prompts, strict=True)
            ]
            rank_0_first(by, lambda new=new: record.append(new))  # type: ignore[misc]
    if by.ranks.rank:
        return {}
    return _written(request, reads, prompts, record.whole(), wanted, say)


@dataclass
class _Record:
    """answers.jsonl, which rank 0 writes: a line for each prompt, with its answers and their scores."""

    folder: Path
    wanted: Mapping[str, Any]  # the request
    prompts: _Prompts
    checker: Metric
    own: OwnScorer | None
    lines: list[dict[str, Any]] = field(default_factory=list)
    locked: int | None = None  # a descriptor, from `begin` to the end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.locked is not None:
            os.close(self.locked)

    def begin(self, say: _Say) -> list[int]:
        """Look at earlier answers, and score them again if the checker has changed or failed. Returns the prompts that
        have none.

        Raises FinetuneError if another command writes here, or one has answered another request here.
        """
        folder, file = self.folder, self.folder / ANSWERS
        if not (folder / RECORD).is_file() and folder.is_dir() and {*os.listdir(folder)} - {LOCK}:
            raise FinetuneError(f"--output {folder}: holds other files; name another folder")
        for name in (ANSWERS, KEPT_REPLIES, LOCK):  # are written where they are
            if os.path.lexists(folder / name) and not stat.S_ISREG(os.lstat(folder / name).st_mode):
                raise FinetuneError(f"{folder / name}: is no plain file; remove it, or name another folder")
        with library_errors(writing=folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self.locked = lock(folder / LOCK, wait_seconds=0)
            except BlockingIOError as error:
                raise FinetuneError(
                    f"--output {folder}: another command is writing here ({error.strerror}); name another folder"
                ) from None
        earlier, checker = self._earlier(), self.wanted["checker"]
        changed = any(earlier.get(key) != self.wanted[key] for key in SCORED_BY)
        again = [line for line in self.lines if "problem" in line or changed]
        if again and earlier.get("checker") != checker:
            say(f"{file}: scored again by {checker}, before by {earlier.get('checker')}")
        elif again and changed:
            say(f"{file}: scored again, because references or columns of the rows have changed")
        self._score(again)
        written = json_lines(self.lines)
        if again or (file.exists() and file.read_bytes() != written.encode()):
            write_text(file, written)
        write_json(folder / RECORD, {"request": dict(self.wanted)})
        if self.lines:
            say(f"{file}: has {counted(len(self.lines), 'prompt')} already, of {len(self.prompts.numbers):,}")
        done = {line["row"] for line in self.lines}
        return [index for index, number in enumerate(self.prompts.numbers) if number not in done]

    def append(self, new: list[dict[str, Any]]) -> None:
        """Score these lines and write them. Raises FinetuneError if the scorer has failed on most prompts."""
        self._score(new)
        append_lines(self.folder / ANSWERS, new)
        self.lines.extend(new)
        _refuse_failing(self.lines, FEWEST_FAILED)

    def whole(self) -> list[dict[str, Any]]:
        """The lines of all prompts. Raises FinetuneError if the scorer failed on most of them."""
        _refuse_failing(self.lines, 1)
        return sorted(self.lines, key=lambda line: int(line["row"]))

    def _earlier(self) -> dict[str, Any]:
        """Read the lines that an earlier command wrote. Returns its request, {} if there was none."""
        if not (self.folder / RECORD).is_file():
            return {}
        recorded = read_object(self.folder / RECORD).get("request")
        recorded = recorded if isinstance(recorded, dict) else {}
        for key, value in self.wanted.items():
            if key not in SCORED_BY and recorded.get(key) != value:
                words = {"prompts": "other prompts", "weights": "other weights"}
                asked = words.get(key, f"{key} {recorded.get(key)}, not {value}")
                raise FinetuneError(
                    f"--output {self.folder}: holds answers of another request ({asked}); name another folder"
                )
        if (self.folder / ANSWERS).is_file():
            # A line that was torn, edited or deleted is of a prompt that is asked again, and a doubled one counts once.
            answered = {str(line.get("row")): line for line in read_lines(self.folder / ANSWERS)}
            for number, question in zip(self.prompts.numbers, self.prompts.questions, strict=True):
                line = answered.get(str(number), {})
                if _is_whole(line, number, _written_question(question), self.wanted["n"]):
                    self.lines.append(line)
        return recorded

    def _score(self, lines: Sequence[dict[str, Any]]) -> None:
        items = self.prompts.asked.items
        places = {number: place for place, number in enumerate(self.prompts.numbers)}
        for line in lines:
            _score(line, items[places[line["row"]]], items, self.checker, self.own)


def _is_whole(line: Mapping[str, Any], number: int, question: Mapping[str, Any], count: int) -> bool:
    """Whether a line of answers.jsonl is as this command writes it: the prompt's, with all of its answers."""
    try:
        json.dumps(line, ensure_ascii=False, allow_nan=False).encode()
        answers = line["answers"]
        kinds = [tuple(type(answer[key]) for key in ("text", "tokens", "ended")) for answer in answers]
        whole = kinds == [(str, int, bool)] * count
        whole = whole and ("problem" in line or all(0 <= answer["score"] <= 1 for answer in answers))
        of_prompt = [line["row"], line["question"]] == [number, json.loads(json.dumps(question))]
        return of_prompt and whole and isinstance(line["by"]["model"] + line["place"], str)
    except (ValueError, TypeError, LookupError, RecursionError):
        return False


def _opened(source: SampleSource) -> FinishedRun:
    """The run, or the recipe's or model's base in this machine's number format."""
    if source.kind == "run":
        return finished_run(source.folder)
    hide_bars()
    return FinishedRun(source.folder, _in_formats(source), trained=False)


def _in_formats(source: SampleSource) -> Recipe:
    """The recipe with `auto` settled: bfloat16 on a GPU, float32 elsewhere, where a seed then gives the same bytes."""
    precision = "bf16" if torch.cuda.is_available() else "no"
    return source.loaded.formats_for(FastestFormat(precision, ""))[0].recipe


def _prompts(request: SampleRequest, reads: FinishedRun, writer: FinishedRun, encoder: Encoder) -> _Prompts:
    """Read the file's questions. Raises DataError for those that the recipe holds out."""
    section = reads.recipe.eval.generate
    metrics = [request.metric] if request.metric is not None else [Metric.of(choice) for choice in section.choices]
    if request.scorer is not None:
        metrics = [Metric("exact")]  # reads every reference; not used
    asked = held_out_set(
        writer.recipe,
        encoder,
        None,
        file=request.entry or str(request.data),
        metrics=metrics,
        limit=request.limit or MOST_ROWS_OF_FILE,
        max_new_tokens=request.max_new_tokens or section.max_new_tokens,
    )
    questions = [
        question for _, question in conversations(writer.recipe, encoder, asked, request.entry or str(request.data))
    ]
    places: dict[Any, str] = {}
    rows = []
    for place, question, reference in _held_out(reads):
        places.setdefault(_key(question), place)
        written = _written_question(question)
        answer: Any = {"completion": reference}
        if "messages" in written:
            turns = [turn | ({"weight": 0} if turn["role"] == "assistant" else {}) for turn in written["messages"]]
            answer = {"messages": [*turns, {"role": "assistant", "content": reference}]}
        rows.append(written | answer)
    held = [index for index, question in enumerate(questions) if _key(question) in places]
    if held and not request.without_held_out:
        raise DataError(
            [
                f"{asked.items[index].place}: is held out by the recipe ({places[_key(questions[index])]}), and no "
                "score of it counts after training on it; remove it, or leave such rows out: --without-held-out"
                for index in held[:3]
            ],
            len(held),
            max(0, len(held) - 3),
        )
    kept = [index for index in range(len(questions)) if index not in {*held}]
    if not kept:
        raise FinetuneError(f"{request.data}: every question is held out by the recipe; name other rows")
    chosen = replace(asked, prompts=[asked.prompts[i] for i in kept], items=[asked.items[i] for i in kept])
    return _Prompts(chosen, [questions[index] for index in kept], kept, rows, len(held))


def _held_out(reads: FinishedRun) -> Iterator[tuple[str, _Question, str]]:
    """Place, question and reference of each row that the recipe evaluates by: data.eval, and eval.generate.file."""
    recipe, file = reads.recipe, reads.recipe.eval.generate.file
    encoder = Encoder(load_run_tokenizer(reads), recipe.data, recipe.model)
    generate = recipe.eval.generate.model_copy(update={"file": None})
    plain = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"generate": generate})})
    for name in ([None] if recipe.data.eval is not None else []) + ([file] if file is not None else []):
        prepared = prepare(recipe, load_tokenizer(recipe)) if name is None else None
        try:
            asked = held_out_set(
                plain, encoder, prepared, file=name, metrics=[Metric("exact")], limit=MOST_ROWS_OF_FILE
            )
        except DataError:
            raise
        except FinetuneError:  # plain texts have no questions
            continue
        for item, (place, question) in zip(asked.items, conversations(plain, encoder, asked, name), strict=True):
            yield place, question, item.reference


def _key(question: _Question) -> tuple[str, ...]:
    """A question without case, spaces, system turn and layout, so that a row is found again in another file."""
    texts = [question.prompt] if isinstance(question, Passage) else []
    if isinstance(question, Chat):
        texts = [str(turn["content"]) for turn in question.messages if turn["role"] != "system"]
    return tuple(unicodedata.normalize("NFC", " ".join(text.split()).casefold()) for text in texts)


def _written_question(question: _Question) -> dict[str, Any]:
    if isinstance(question, Passage):
        return {"prompt": question.prompt}
    found: dict[str, Any] = {"messages": question.messages}
    if question.tools:
        found["tools"] = question.tools
    if question.template_kwargs:
        found["chat_template_kwargs"] = question.template_kwargs
    return found


def _checker(request: SampleRequest, asked: ScoredSet) -> Metric:
    """The metric that says which answers are right: the one named, or the strictest that fits the references."""
    if request.metric is not None or request.scorer is not None:
        return asked.metrics[0]
    chosen = next((metric for metric in asked.metrics if metric.name not in WEAKER), asked.metrics[0])
    if chosen.name in GRADES and request.options.keep != "all":
        raise FinetuneError(
            f"{request.data}: its references are long texts, and {chosen.name} calls no other answer right; name "
            "--metric, or --scorer FILE.py:FUNCTION"
        )
    return chosen


def _checker_in_words(request: SampleRequest, checker: Metric) -> str:
    if request.scorer is not None:
        path = Path(os.path.expanduser(request.scorer.rpartition(":")[0]))
        if not path.is_file():
            return request.scorer  # OwnScorer refuses it
        return f"{request.scorer} ({hashlib.sha256(path.read_bytes()).hexdigest()[:12]})"
    return ":".join([checker.name, *(f"{key}={value}" for key, value in sorted(checker.options.items()))])


def _way(
    request: SampleRequest, writer: FinishedRun, by: Computing, asked: ScoredSet
) -> tuple[Answering, int, dict[str, Any]]:
    """How answers are computed, how many prompts are answered together, and who writes them."""
    author: dict[str, Any] = {"model": (request.other or request.source).writer}
    if request.endpoint is not None:
        author |= {"model": request.endpoint.model, "endpoint": request.endpoint.url}
        return Answering(False, by.device), PROMPTS_TO_SERVER, author
    sampling = Sampling(request.temperature, request.top_p, request.seed) if request.temperature else None
    dtype, shared, world = writer.recipe.model.dtype, False, by.ranks.world
    if writer.trained:
        shared = may_share_a_batch(read_run(writer.folder, writer.recipe).receipt.get("probe") or {})
    is_exact = dtype == "float32" and by.device.type == "cpu"
    how = Answering(shared, by.device, by.ranks, by.sharding is not None, sampling=sampling)
    how.apart = is_exact or not shared
    together = world if world == 1 else 4 * world
    if not how.apart:
        longest = max(len(prompt.prompt_ids) for prompt in asked.prompts) + asked.max_new_tokens
        together = max(1, MOST_BATCH_TOKENS // (request.count * longest)) * world
    author |= {"dtype": dtype}
    if not is_exact:
        device = torch.cuda.get_device_name(by.device) if by.device.type == "cuda" else by.device.type
        author |= {"device": device, "prompts_together": 1 if how.apart else together, "ranks": world}
    return how, together, author


def _answers(
    request: SampleRequest,
    writer: FinishedRun,
    by: Computing,
    prompts: _Prompts,
    how: Answering,
    chunks: Sequence[tuple[int, ...]],
    show: _Say,
    say: _Say,
) -> Iterator[tuple[tuple[int, ...], list[Answer]]]:
    """Each chunk of prompts with their answers, one prompt's after another's, on every rank."""
    asked, count = prompts.asked, request.count
    if not chunks:
        return

    def show_chunk(chunk: tuple[int, ...]) -> _Say:
        return lambda text: show(f"prompt {chunk[0] + 1:,} of {len(asked.prompts):,}: {text}")

    draws = {chunk: [(prompts.numbers[index], each) for index in chunk for each in range(count)] for chunk in chunks}
    if request.endpoint is not None:
        endpoint, hashed = request.endpoint, Sampling(1.0, seed=request.seed)
        kept = KeptAnswers(request.folder / KEPT_REPLIES, endpoint)
        replies, lengths = list[Answer](), list[int]()
        for chunk in chunks:
            questions = [(asked.items[i].place, prompts.questions[i]) for i in chunk for _ in range(count)]
            drawn = [
                Drawn(request.temperature, request.top_p, int(hashed.uniform(draw, 0) * 2**31)) for draw in draws[chunk]
            ]
            new = asked.max_new_tokens
            found = endpoint_answers(endpoint, endpoint.model, questions, new, show_chunk(chunk), kept, draws=drawn)
            replies += found
            lengths += [len(asked.prompts[i].prompt_ids) for i in chunk for _ in range(count)]
            yield chunk, found
        for note in server_notes(replies, lengths):
            say(note)
        kept.forget()
        return
    tokenizer = load_run_tokenizer(writer)
    for name, model in models_by_ranks(writer, by, ("tuned",) if writer.trained else ("base",)):
        # In float32 adapters are not merged, so that every strategy computes the same sums.
        if name == "tuned" and by.sharding is None and writer.recipe.model.dtype != "float32":
            answer_with_fewer_kernels(model.unwrapped_model)
        with fitting(by.device, writer, by.ranks.world):
            for chunk in chunks:
                how.draws = draws[chunk]
                batch = replace(asked, prompts=[asked.prompts[index] for index in chunk for _ in range(count)])
                yield (
                    chunk,
                    generated_answers(model.unwrapped_model, tokenizer, batch, how, show_chunk(chunk), say),
                )


def _line(
    prompts: _Prompts, index: int, answers: Sequence[Answer], author: Mapping[str, Any], tokenizer: Any
) -> dict[str, Any]:
    """A prompt's line of answers.jsonl, before it is scored."""
    item, special = prompts.asked.items[index], {*tokenizer.all_special_ids}
    line: dict[str, Any] = {
        "row": prompts.numbers[index],
        "place": item.place,
        "question": _written_question(prompts.questions[index]),
        "reference": item.reference,
        "by": dict(author),
        "answers": [],
    }
    for answer in answers:
        tokens = answer.tokens or tokenizer(answer.text, add_special_tokens=False)["input_ids"]
        found = {"text": answer.text, "tokens": len(tokens), "ended": answer.ended}
        if special & {*answer.tokens[: -1 if answer.ended else None]}:
            found["control"] = True  # decoding has left them out, so the text is not what the model wrote
        line["answers"].append(found)
    return line


def _score(line: dict[str, Any], item: Scored, among: Sequence[Scored], checker: Metric, own: OwnScorer | None) -> None:
    """Write each answer's score into the line, or the problem in place of all of them."""
    line.pop("problem", None)
    line["reference"] = item.reference
    texts = [answer["text"] for answer in line["answers"]]
    try:
        if own is None:
            scores = scores_of(checker, texts, [item] * len(texts), among)
        else:
            scores = [own.score(without_thoughts(text), without_thoughts(item.reference), item.row) for text in texts]
    except (DataError, ValueError) as error:
        line["problem"] = one_line(str(error), 300)
        scores = [None] * len(texts)  # type: ignore[list-item]
    for answer, score in zip(line["answers"], scores, strict=True):
        answer |= {"score": score, "unread": isinstance(score, Unread)}


def _refuse_failing(lines: Sequence[Mapping[str, Any]], fewest: int) -> None:
    """Raise FinetuneError if the scorer failed on most prompts, and on so many."""
    failed = [line for line in lines if "problem" in line]
    if len(failed) >= fewest and 2 * len(failed) > len(lines):
        raise FinetuneError(
            f"{failed[0]['place']}: the scorer failed: {failed[0]['problem']}; so it did for {len(failed):,} of "
            f"{counted(len(lines), 'prompt')}; mend it, and run the same command again: the answers are kept"
        )


def _weights(writer: FinishedRun) -> str:
    """The weights that answer, by their content. A base that is not on this machine is known by name and revision."""
    if not writer.trained:
        base = base_identity(writer.recipe.model)
        return base["content"] or f"{base['name']} {base['revision']}"
    files = sorted(writer.product.glob("*.safetensors"))
    return content_of(writer.product) or _digest([(file.name, sha256_of(file)) for file in files])


def _digest(*things: Any) -> str:
    return hashlib.sha256(repr(things).encode()).hexdigest()[:16]


def _written(
    request: SampleRequest,
    reads: FinishedRun,
    prompts: _Prompts,
    lines: Sequence[Mapping[str, Any]],
    wanted: Mapping[str, Any],
    say: _Say,
) -> dict[str, Any]:
    """Write rows, held-out questions, the next recipe and the figures. Returns the figures.

    Rows and a recipe that are there stay, because a run may have been trained on them.
    """
    folder, options = request.folder, request.options
    order = Sampling(1.0, seed=request.seed)
    rows, left_out = kept_rows(lines, options, lambda row, index: order.uniform((row, index), -1))
    figures = {"left_out_held_out": prompts.left_out, **sampled_figures(lines, options), "rows": len(rows)}
    figures |= {"left_out": left_out, "keep": options.keep}
    if failed := [line["problem"] for line in lines if "problem" in line]:
        figures["first_failure"] = failed[0]
    files = {"answers": str(folder / ANSWERS)}
    held_out = folder / HELD_OUT if prompts.held_out else None
    if held_out is not None:
        write_text(held_out, json_lines(prompts.held_out))
    if rows:
        text, marks = json_lines(rows), itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
        places = ((folder / f"rows{mark}.jsonl", folder / f"recipe{mark}.yaml") for mark in marks)
        # The first free place, or the one that holds these rows.
        file, recipe = next(
            pair
            for pair in places
            if not os.path.lexists(pair[0]) or (pair[0].is_file() and pair[0].read_bytes() == text.encode())
        )
        write_text(file, text)
        files |= {"rows": str(file), "recipe": str(recipe)}
        if recipe.exists():
            say(f"{recipe}: is there, and stays as it is; delete it to have it written anew")
        elif request.source.kind != "model":
            metric = None if request.scorer is not None else str(wanted["checker"])
            write_text(recipe, next_recipe(reads, file, rows, options.keep, held_out, metric))
    write_json(folder / RECORD, {"request": dict(wanted), "options": vars(options), "figures": figures})
    return {**figures, "files": files, "request": dict(wanted)}
