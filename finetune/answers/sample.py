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
import json
import os
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune.answers.by_ranks import batching_of, computing_ranks, models_by_ranks
from finetune.answers.endpoint import KeptAnswers, server_notes
from finetune.answers.kept_rows import answered, failures, kept_rows, sampled_figures
from finetune.answers.next_recipe import next_recipe
from finetune.answers.own_scorer import OwnScorer
from finetune.answers.requests import SampleRequest, SampleSource
from finetune.base.identity import base_identity, content_of
from finetune.data.chat import Chat, Passage
from finetune.errors import DataError, FinetuneError
from finetune.files import LOCK, append_lines, json_lines, lock, read_lines, write_json, write_text
from finetune.finished_run import (
    FinishedRun,
    answer_with_fewer_kernels,
    finished_run,
    fitting,
    hide_bars,
)
from finetune.generation.generate import MOST_BATCH_TOKENS, Answer, Sampling
from finetune.generation.held_out import (
    MOST_ROWS_OF_FILE,
    ScoredRow,
    ScoredSet,
    conversation,
    generated_answers,
    held_out_rows,
    held_out_set,
    rows_of_file,
)
from finetune.launch.launcher import Launch
from finetune.library_errors import library_errors
from finetune.model.new_tokens import load_tokenizer
from finetune.output_stream import one_line
from finetune.recipe.mixed_precision import FastestFormat
from finetune.recipe.schema import Recipe
from finetune.run_folder.checkpoint import sha256_of
from finetune.scoring.metrics import Metric, Unread, scores_of
from finetune.tokens.dataset import prepare
from finetune.training.batch_notes import positions_of
from finetune.untrusted.json_files import read_object
from finetune.wording import counted

RECORD, ANSWERS, HELD_OUT = "sample.json", "answers.jsonl", "held_out.jsonl"
SCORED_BY = ("checker", "rows")  # keys of the request whose change scores answers again, and draws none
KEPT_REPLIES = "endpoint.jsonl"  # a server's answers until all have come
FEWEST_FAILED = 3  # prompts whose scorer failed, before most of them end the command
PROMPTS_ALONE, PROMPTS_OF_RANK = 1, 4  # answered before their lines are written, by one process and by each rank
PROMPTS_OF_SERVER = 64  # likewise, by a server
WEAKER = ("tool_name", "json_valid")  # metrics that a wrong answer may pass
GRADES = ("chrf",)  # metrics that no answer but the reference passes
_Say = Callable[[str], None]
_Question = Chat | Passage


def sample_rows(
    source: SampleSource,
    model: SampleSource,
    request: SampleRequest,
    say: _Say,
    show: _Say,
    launch: Launch | None,
) -> dict[str, Any]:
    """Answer, score and keep. Returns sample.json with the files' names. Raises FinetuneError.

    Args:
        source: Its recipe says how rows are read and which are held out.
        model: Answers, unless the request names a server.
        say: Receives notes.
        show: Receives the progress.
        launch: This rank's launch, if there are several; every rank calls this function. Rank 0 alone writes and says.
    """
    with ExitStack() as stack:
        computing = stack.enter_context(computing_ranks(lambda: _in_formats(model), launch))
        ranks, device, endpoint = computing.ranks, computing.device, request.endpoint
        reads = _opened(source)
        writer = reads if model is source else _opened(model)
        prompts, dtype = _prompts(request, reads, writer, say), writer.recipe.model.dtype
        scored_set = prompts.scored_set

        # In float32 on a CPU only one prompt's answers share a batch, so that the bytes are the same in every run.
        # In 16 bits or on a GPU the batch changes roundings, so the author's line names it.
        is_exact = dtype == "float32" and device.type == "cpu"
        batching = batching_of(writer, computing, alone=is_exact)
        chunk = PROMPTS_ALONE if ranks.world == 1 else PROMPTS_OF_RANK * ranks.world
        if endpoint is not None:
            chunk = PROMPTS_OF_SERVER  # a scorer that fails ends the command early
        elif batching.shared:
            longest = max(len(scored_set.prompts[index].prompt_ids) for index in prompts.numbers)
            tokens = request.count * (longest + scored_set.max_new_tokens)
            chunk = max(1, MOST_BATCH_TOKENS // tokens) * ranks.world
        author: dict[str, Any] = {"model": model.author, "dtype": dtype}
        if endpoint is not None:
            author = {"model": endpoint.model, "endpoint": endpoint.url}
        elif not is_exact:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            author |= {"device": name, "prompts_together": chunk if batching.shared else 1, "ranks": ranks.world}

        checker = prompts.checker
        if request.scorer is not None and not ranks.rank:
            scorer = stack.enter_context(OwnScorer(request.scorer, request.scorer_seconds))
            checker = Metric(scorer.name, function=scorer.score)
        facts = _facts(request, writer, author, prompts, checker)
        file = _AnswersFile(request.folder, facts, author, prompts, checker, writer.tokenizer)
        ranks.rank_0_first(lambda: stack.enter_context(_locked(request.folder)))
        left = ranks.rank_0_first(lambda: file.begin(say))

        groups = [left[start : start + chunk] for start in range(0, len(left), chunk)]
        draws = [[(index, number) for index in group for number in range(request.count)] for group in groups]
        if endpoint is not None:
            kept, seeds = KeptAnswers(request.folder / KEPT_REPLIES, endpoint), Sampling(1.0, seed=request.seed)
            given, lengths = list[Answer](), list[int]()
            for group, of_group in zip(groups, draws, strict=True):
                questions = [(scored_set.items[index].place, prompts.questions[index]) for index, _ in of_group]
                numbers = [int(seeds.uniform(draw, 0) * 2**31) for draw in of_group]
                samplings = [Sampling(request.temperature, request.top_p, number) for number in numbers]
                answers = kept.answers(endpoint.model, questions, scored_set.max_new_tokens, show, samplings)
                ranks.rank_0_first(partial(file.append, group, answers))
                given += answers
                lengths += (len(scored_set.prompts[index].prompt_ids) for index, _ in of_group)
            for note in server_notes(given, lengths):
                say(note)
            kept.forget()
        elif left:
            sampling = Sampling(request.temperature, request.top_p, request.seed) if request.temperature else None
            for name, assembled in models_by_ranks(writer, computing, ("tuned",) if writer.trained else ("base",)):
                # In float32 adapters are not merged, so that every strategy computes the same sums.
                if name == "tuned" and computing.sharding is None and dtype != "float32":
                    answer_with_fewer_kernels(assembled.unwrapped_model)
                for group, of_group in zip(groups, draws, strict=True):

                    def show_prompt(text: str, number: int = prompts.numbers.index(group[0]) + 1) -> None:
                        show(f"prompt {number:,} of {len(prompts.numbers):,}: {text}")

                    with fitting(device, writer, ranks.world):
                        answers = generated_answers(
                            assembled.decoder,
                            writer.tokenizer,
                            scored_set,
                            batching,
                            show_prompt,
                            say,
                            sampling=sampling,
                            draws=of_group,
                        )
                    ranks.rank_0_first(partial(file.append, group, answers))
        return {} if ranks.rank else _written(request, reads, file, say, has_recipe=source.kind != "model")


@dataclass(frozen=True)
class _Prompts:
    """The file's rows, and those that are answered: not the held-out ones."""

    scored_set: ScoredSet
    questions: list[_Question]
    numbers: list[int]  # of the rows that are answered; draws depend on them
    checker: Metric  # says which answers are right: the one named, or the strictest that fits the references
    held_out: list[dict[str, Any]]  # the recipe's own held-out questions, as rows
    left_out: int  # prompts that are held out


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


def _prompts(request: SampleRequest, reads: FinishedRun, writer: FinishedRun, say: _Say) -> _Prompts:
    """Read the file's questions as the source reads rows, without those that its recipe holds out. They are written
    with the writer's template. Raises FinetuneError if none is left.
    """
    whole = held_out_set(
        reads.recipe,
        writer.encoder,
        None,
        file=request.entry or str(request.data),
        metrics=request.metrics if request.scorer is None else [Metric("exact")],  # reads every reference; not used
        limit=request.limit or MOST_ROWS_OF_FILE,
        max_new_tokens=request.max_new_tokens,
    )
    questions = [conversation(content, writer.encoder) for content in whole.contents]
    places: dict[tuple[str, ...], str] = {}
    rows = []
    for place, question, reference in _held_out(reads):
        places.setdefault(_key(question), place)
        rows.append(answered(_question_columns(question), reference))
    held_out = [index for index, question in enumerate(questions) if _key(question) in places]
    numbers = [index for index in range(len(questions)) if index not in {*held_out}]
    if held_out:
        first = f"{whole.items[held_out[0]].place} is {places[_key(questions[held_out[0]])]}"
        if not numbers:
            raise FinetuneError(f"{request.data}: every question is held out by the recipe ({first}); name other rows")
        say(f"{request.data}: {counted(len(held_out), 'prompt')} left out, held out by the recipe; the first: {first}")
    for note in whole.notes:
        say(f"{request.data}: {note}")
    positions = positions_of(writer.recipe) if request.endpoint is None else None
    most = (positions or sys.maxsize) - whole.max_new_tokens
    if beyond := [index for index in numbers if len(whole.prompts[index].prompt_ids) > most]:
        say(
            f"{whole.items[beyond[0]].place}: with {whole.max_new_tokens:,} new tokens beyond the model's "
            f"{positions:,} positions: {counted(len(beyond), 'prompt')}; shorten such prompts, or --max-new-tokens"
        )
    checker = whole.metrics[0]
    if not request.metrics and request.scorer is None:
        checker = next((metric for metric in whole.metrics if metric.name not in WEAKER), checker)
        if checker.name in GRADES and request.options.keep != "all":
            raise FinetuneError(
                f"{request.data}: its references are long texts, and {checker.name} calls no other answer right; name "
                "--metric, or --scorer FILE.py:FUNCTION"
            )
    return _Prompts(whole, questions, numbers, checker, rows, len(held_out))


def _held_out(reads: FinishedRun) -> Iterator[tuple[str, _Question, str]]:
    """Place, question and reference of each row that the recipe evaluates by: data.eval, and eval.generate.file."""
    recipe, file = reads.recipe, reads.recipe.eval.generate.file
    rows = list[ScoredRow]()
    if recipe.data.eval is not None:
        prepared = prepare(recipe, load_tokenizer(recipe))
        rows += held_out_rows(recipe, reads.encoder, prepared, MOST_ROWS_OF_FILE, contents=True)[0]
    if file is not None:
        rows += rows_of_file(recipe.data.train[0], file, reads.encoder, MOST_ROWS_OF_FILE)[0]
    for _, item, _, content in rows:
        yield item.place, conversation(content, reads.encoder), item.reference


def _key(question: _Question) -> tuple[str, ...]:
    """A question without case, spaces, system turn and layout, so that a row is found again in another file."""
    if isinstance(question, Passage):
        texts = [question.prompt]
    else:
        texts = [str(turn["content"]) for turn in question.messages if turn["role"] != "system"]
    return tuple(unicodedata.normalize("NFC", " ".join(text.split()).casefold()) for text in texts)


def _question_columns(question: _Question) -> dict[str, Any]:
    if isinstance(question, Passage):
        return {"prompt": question.prompt}
    columns = {"tools": question.tools, "chat_template_kwargs": question.template_kwargs}
    return {"messages": question.messages, **{name: value for name, value in columns.items() if value}}


def _facts(
    request: SampleRequest, writer: FinishedRun, author: Mapping[str, Any], prompts: _Prompts, checker: Metric
) -> dict[str, Any]:
    """The request in sample.json. Answers of another request are not taken for this one's."""
    scored_set, weights = prompts.scored_set, None
    items = [scored_set.items[index] for index in prompts.numbers]
    name = ":".join([checker.name, *(f"{key}={value}" for key, value in sorted(checker.options.items()))])
    if request.scorer is not None:
        code = Path(os.path.expanduser(request.scorer.rpartition(":")[0]))
        name = f"{request.scorer} ({hashlib.sha256(code.read_bytes()).hexdigest()[:12]})" if code.is_file() else ""
    # Weights are known by their content. A base that is not on this machine is known by name and revision.
    if request.endpoint is None and writer.trained:
        files = sorted(writer.product.glob("*.safetensors"))
        weights = content_of(writer.product) or _digest([(file.name, sha256_of(file)) for file in files])
    elif request.endpoint is None:
        base = base_identity(writer.recipe.model)
        weights = base["content"] or f"{base['name']} {base['revision']}"
    return {
        **{key: author.get(key) for key in ("model", "endpoint", "dtype")},
        "weights": weights,
        "prompts": _digest(prompts.numbers, [scored_set.prompts[index].prompt_ids for index in prompts.numbers]),
        "n": request.count,
        **{key: getattr(request, key) for key in ("temperature", "top_p", "seed")},
        "max_new_tokens": scored_set.max_new_tokens,
        "checker": name,
        "rows": _digest([(item.reference, item.row) for item in items]),  # which the checker reads
    }


def _digest(*values: Any) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder, and let no other command write there. Raises FinetuneError if it holds other files."""
    if not (folder / RECORD).is_file() and folder.is_dir() and {*os.listdir(folder)} - {LOCK}:
        raise FinetuneError(f"--output {folder}: holds other files; name another folder")
    for name in (ANSWERS, KEPT_REPLIES, LOCK):  # are written where they are
        if os.path.lexists(folder / name) and not stat.S_ISREG(os.lstat(folder / name).st_mode):
            raise FinetuneError(f"{folder / name}: is no plain file; remove it, or name another folder")
    with library_errors(writing=folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = lock(folder / LOCK, wait_seconds=0)
        except BlockingIOError as error:
            raise FinetuneError(
                f"--output {folder}: another command is writing here ({error.strerror}); name another folder"
            ) from None
    try:
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _AnswersFile:
    """answers.jsonl, which rank 0 writes: a line for each prompt, with its answers and their scores."""

    folder: Path
    facts: Mapping[str, Any]  # the request
    author: Mapping[str, Any]
    prompts: _Prompts
    checker: Metric
    tokenizer: Any
    lines: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, say: _Say) -> list[int]:
        """Read earlier answers, and score them again if the checker has changed or failed. Returns the prompts that
        have none. Raises FinetuneError if the folder has answers of another request.
        """
        file, record = self.folder / ANSWERS, self.folder / RECORD
        earlier = read_object(record).get("request") if record.is_file() else {}
        earlier = earlier if isinstance(earlier, dict) else {}
        for key, value in self.facts.items() if record.is_file() else ():
            if key not in SCORED_BY and earlier.get(key) != value:
                words = {"prompts": "other prompts", "weights": "other weights"}
                change = words.get(key, f"{key} {earlier.get(key)}, not {value}")
                raise FinetuneError(
                    f"--output {self.folder}: holds answers of another request ({change}); name another folder"
                )
        # A line that was torn, edited or deleted is of a prompt that is answered again, and a doubled one counts once.
        has_answers = record.is_file() and file.is_file()
        answered = {str(line.get("row")): line for line in read_lines(file)} if has_answers else {}
        left = []
        for index in self.prompts.numbers:
            line = answered.get(str(index), {})
            if _is_whole(line, index, _question_columns(self.prompts.questions[index]), self.facts["n"]):
                self.lines.append(line)
            else:
                left.append(index)
        changed = any(earlier.get(key) != self.facts[key] for key in SCORED_BY)
        again = [line for line in self.lines if changed or any(answer["score"] is None for answer in line["answers"])]
        if again and earlier.get("checker") != self.facts["checker"]:
            say(f"{file}: scored again by {self.facts['checker']}, before by {earlier.get('checker')}")
        elif again and changed:
            say(f"{file}: scored again, because references or columns of the rows have changed")
        self._score(again)
        write_text(file, json_lines(self.lines))
        write_json(record, {"request": dict(self.facts)})
        if self.lines:
            say(f"{file}: has {counted(len(self.lines), 'prompt')} already, of {len(self.prompts.numbers):,}")
        return left

    def append(self, indices: Sequence[int], answers: Sequence[Answer]) -> None:
        """Score these prompts' answers and write them. Raises FinetuneError if the scorer failed on most prompts."""
        special, count, lines = {*self.tokenizer.all_special_ids}, self.facts["n"], []
        for place, index in enumerate(indices):
            item = self.prompts.scored_set.items[index]
            line: dict[str, Any] = {
                "row": index,
                "place": item.place,
                "question": _question_columns(self.prompts.questions[index]),
                "reference": item.reference,
                "by": dict(self.author),
                "answers": [],
            }
            for answer in answers[place * count : (place + 1) * count]:
                tokens = answer.tokens or self.tokenizer(answer.text, add_special_tokens=False)["input_ids"]
                line["answers"].append({"text": answer.text, "tokens": len(tokens), "ended": answer.ended})
                if special & {*answer.tokens[: -1 if answer.ended else None]}:
                    line["answers"][-1]["control"] = True  # decoding left them out: the model wrote another text
            lines.append(line)
        self._score(lines)
        append_lines(self.folder / ANSWERS, lines)
        self.lines.extend(lines)
        self.refuse_failing(FEWEST_FAILED)

    def refuse_failing(self, fewest: int) -> None:
        """Raise FinetuneError if the scorer failed on most answers to most prompts, and to so many."""
        failed = [line for line in self.lines if 2 * len(failures(line)) > len(line["answers"])]
        if len(failed) >= fewest and 2 * len(failed) > len(self.lines):
            raise FinetuneError(
                f"{failed[0]['place']}: the scorer failed: {failures(failed[0])[0]}; so it did for {len(failed):,} of "
                f"{counted(len(self.lines), 'prompt')}; mend it, and run the same command again: the answers are kept"
            )

    def _score(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write a score into each answer, or the problem of a scorer that failed on it."""
        items = self.prompts.scored_set.items
        among = [items[index] for index in self.prompts.numbers]  # not the rows that are held out
        for line in lines:
            item, answers = items[line["row"]], line["answers"]
            line.pop("problem", None)  # an earlier release's, of the whole prompt
            line["reference"] = item.reference
            try:
                texts = [answer["text"] for answer in answers]
                scores = scores_of(self.checker, texts, [item] * len(texts), among)
            except DataError as error:
                scores = [Unread(one_line(str(error), 300)) for _ in answers]
            for answer, score in zip(answers, scores, strict=True):
                answer.pop("problem", None)
                answer |= {"score": score, "unread": isinstance(score, Unread)}
                if isinstance(score, Unread) and score.why:
                    answer |= {"score": None, "unread": False, "problem": score.why}


def _is_whole(line: Mapping[str, Any], number: int, question: Mapping[str, Any], count: int) -> bool:
    """Whether a line of answers.jsonl is as this command writes it: the prompt's, with all of its answers."""
    try:
        json.dumps(line, ensure_ascii=False, allow_nan=False).encode()
        answers = line["answers"]
        kinds = [tuple(type(answer[key]) for key in ("text", "tokens", "ended")) for answer in answers]
        scored = all(answer["score"] is None or 0 <= answer["score"] <= 1 for answer in answers)
        of_prompt = [line["row"], line["question"]] == [number, json.loads(json.dumps(question))]
        has_author = isinstance(line["by"]["model"] + line["place"], str)
        return of_prompt and has_author and scored and kinds == [(str, int, bool)] * count
    except (ValueError, TypeError, LookupError, RecursionError):
        return False


def _written(
    request: SampleRequest, reads: FinishedRun, file: _AnswersFile, say: _Say, *, has_recipe: bool
) -> dict[str, Any]:
    """Write rows, held-out questions, the next recipe and the figures. Returns the figures.

    Rows and a recipe that are there stay, because a run may have been trained on them.
    """
    file.refuse_failing(1)
    lines = sorted(file.lines, key=lambda line: int(line["row"]))
    folder, options, prompts = request.folder, request.options, file.prompts
    order = Sampling(1.0, seed=request.seed)
    rows, left_out = kept_rows(lines, options, lambda row, index: order.uniform((row, index), -1))
    figures = {"left_out_held_out": prompts.left_out, **sampled_figures(lines, options), "rows": len(rows)}
    figures |= {"left_out": left_out, "keep": options.keep}
    if problems := [problem for line in lines for problem in failures(line)]:
        figures["first_failure"] = problems[0]
    files = {"answers": str(folder / ANSWERS)}
    held_out = folder / HELD_OUT if prompts.held_out else None
    if held_out is not None:
        write_text(held_out, json_lines(prompts.held_out))
    if rows:
        text = json_lines(rows)
        for mark in ("", *(f"-{number}" for number in range(2, 2 + len(os.listdir(folder))))):
            # The first free place, or the one that holds these rows.
            path, recipe = folder / f"rows{mark}.jsonl", folder / f"recipe{mark}.yaml"
            if not os.path.lexists(path) or (path.is_file() and path.read_bytes() == text.encode()):
                break
        write_text(path, text)
        files |= {"rows": str(path), "recipe": str(recipe)}
        if recipe.exists():
            say(f"{recipe}: is there, and stays as it is; delete it to have it written anew")
        elif has_recipe:
            metric = None if request.scorer is not None else str(file.facts["checker"])
            write_text(recipe, next_recipe(reads, path, rows, options.keep, held_out, metric))
    write_json(folder / RECORD, {"request": dict(file.facts), "options": vars(options), "figures": figures})
    return {**figures, "files": files, "request": dict(file.facts)}
