"""`finetune eval`: held-out loss, scored answers and benchmarks of the base and the tuned model.

`evaluate_finished` loads each model once and asks it the questions of the request: HeldOutLoss, OptionScores, Scores.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from finetune.answers.by_ranks import Computing, batching_of, computing_ranks, models_by_ranks
from finetune.answers.endpoint import KeptAnswers, server_notes
from finetune.answers.lm_eval_tasks import task_figures
from finetune.answers.options import OptionScores, given_options
from finetune.answers.own_scorer import OwnScorer
from finetune.answers.requests import EvalRequest
from finetune.answers.scores import (
    BELOW_THRESHOLD,
    QuestionResult,
    below,
    compared,
    general_in_words,
    keeps_earlier,
    scores_in_words,
    write_eval,
)
from finetune.data.chat import Chat, Passage
from finetune.errors import DataError, FinetuneError, NotFinite
from finetune.finished_run import (
    FinishedRun,
    answer_with_fewer_kernels,
    finished_run,
    fitting,
    recipe_of_run,
)
from finetune.generation.generate import Answer
from finetune.generation.held_out import (
    Batching,
    ScoredSet,
    conversation,
    generated_answers,
    held_out_set,
    scores_on_all,
)
from finetune.hand_over.export_step import run_at
from finetune.launch.launcher import Launch
from finetune.measure.metrics import evaluation_in_words
from finetune.model.new_tokens import load_tokenizer
from finetune.run_folder.facts import EVAL_KEPT, require_run_folder
from finetune.scoring.general import MAX_NEW_TOKENS as GENERAL_TOKENS
from finetune.scoring.general import general_rows, general_scores
from finetune.scoring.metrics import Metric, Scored
from finetune.strategies.assemble import Assembled
from finetune.tokens.dataset import Prepared, prepare
from finetune.tokens.encoder import RowError
from finetune.training.loop import evaluate
from finetune.training.objectives import objective_of
from finetune.wording import counted

_Say = Callable[[str], None]


def evaluate_finished(
    run_dir: Path,
    request: EvalRequest,
    say: _Say,
    show: _Say = lambda _: None,
    *,
    step: int | None = None,
    launch: Launch | None = None,
) -> dict[str, Any]:
    """Measure the base and the tuned model, and write eval.json and eval_answers.jsonl into the run's folder.

    Returns eval.json: `held_out` (loss and perplexity), `scores` (answers to held-out rows or `file`), `general` and
    `tasks` (lm-eval's figures), and `exit_code` 5 if a threshold is missed. If there are tasks and the recipe
    holds no rows out, `held_out` and `scores` are missing. Raises FinetuneError.

    Args:
        say: Receives each result at once.
        show: Receives the progress.
        step: The checkpoint of this step is exported first and measured; None: the run's own export.
        launch: This rank's launch, if there are several; every rank calls this function. Rank 0 alone writes and
            returns figures; the caller prints on rank 0 alone.
    """
    if not request.generate and (request.metrics or request.scorer or request.file):
        raise FinetuneError("--loss-only: generates no answers, which --metric, --scorer and --data need; leave it out")
    if request.endpoint is not None and (request.tasks or not request.generate):
        remedy = "lm-eval asks servers itself (--model local-chat-completions)" if request.tasks else "leave it out"
        raise FinetuneError(f"{'--tasks' if request.tasks else '--loss-only'}: needs the model, not a server; {remedy}")
    with ExitStack() as stack:
        computing = stack.enter_context(computing_ranks(lambda: recipe_of_run(require_run_folder(run_dir)), launch))
        folder = computing.ranks.rank_0_first(lambda: run_at(run_dir, step))
        run = finished_run(folder)
        if request.scorer is not None:
            scorer = stack.enter_context(OwnScorer(request.scorer, request.scorer_seconds))
            request = replace(request, metrics=[*request.metrics, Metric(scorer.name, function=scorer.score)])
        result: dict[str, Any] = {}
        rows: list[dict[str, Any]] = []
        # Tasks bring their own data, so with them a recipe without held-out rows is no mistake.
        if not request.tasks or run.recipe.data.eval is not None or request.file is not None or request.general:
            result, rows = measure(run, computing, request, say, show)
    if computing.ranks.rank:
        return {}
    if request.tasks:
        result["tasks"] = task_figures(run, computing.device, request, say)
    if kept := keeps_earlier(folder, result, request.limit):
        say(kept)
    elif (file := write_eval(folder, result, rows)) is not None:
        say(f"every answer: {file}; side by side: {shlex.join(['finetune', 'report', str(folder)])}")
    if missed := below(request.fail_under, result):
        say("\n".join(missed))
        result |= {"ok": False, "exit_code": BELOW_THRESHOLD}
    return result


def measure(
    run: FinishedRun, computing: Computing, request: EvalRequest, say: _Say, show: _Say
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The figures for eval.json by question, and the rows with both models' answers. Each model is loaded once.

    Every rank calls it.
    """
    recipe, holds_rows_out = run.recipe, run.recipe.data.eval is not None
    if not holds_rows_out and request.file is None and recipe.eval.generate.file is None and not request.general:
        remedy = "name rows: --data FILE, or --general or --tasks"
        raise FinetuneError(f"{run.folder}: its recipe holds no rows out (data.eval is null); {remedy}")
    not_scored = list[str]()

    def leave_out(line: str) -> None:
        not_scored.append(line)
        say(line)

    questions = _questions(run, computing, request, say, leave_out)
    kept = None  # a server's answers, until they are scored
    if request.endpoint is not None and questions:
        kept = KeptAnswers(run.folder / EVAL_KEPT, request.endpoint)
        answers = _server_answers(run, questions, kept, say, show)
        result: dict[str, Any] = {
            "endpoint": {"model": request.endpoint.model, "base_model": request.endpoint.base_model}
        }
    else:
        answers, result = _model_answers(run, computing, questions, show), {}
        if questions and (start := recipe.model.adapter) is not None:
            trainings = "that this training started from; differences are of both trainings together"
            say(f"base: without the adapter {start} {trainings}")
            result["started_from"] = start
        # A loss of preferences compares with the run's own start, so it would say nothing about the base.
        if recipe.preferences is not None and holds_rows_out:
            recorded = run.facts.exported_eval()
            wrote = f"; of these weights the run itself wrote {evaluation_in_words(recorded)}" if recorded else ""
            no_loss = "not measured again, because a loss of preferences compares with the run's own start"
            say(f"held-out loss: {no_loss}{wrote}")
            if recorded:
                rewards = {name: recorded[name] for name in ("reward_accuracy", "reward_margin") if name in recorded}
                result["held_out"] = {"recorded": recorded["loss"], **rewards}
    rows: list[dict[str, Any]] = []
    for question in questions:
        outcome = question.compare(**answers[question.key])
        result[question.key] = outcome.figures
        rows += outcome.rows
        say(outcome.words)
    if kept is not None:
        kept.forget()
    if not_scored:
        result["not_scored"] = not_scored
    return result, rows


def _model_answers(
    run: FinishedRun, computing: Computing, questions: Sequence[Question], show: _Say
) -> dict[str, dict[str, Any]]:
    """Question -> model -> its loss or answers. Each model is loaded once."""
    answers: dict[str, dict[str, Any]] = {question.key: {} for question in questions}
    # Loaded alike whether a loss is measured or not: in bfloat16 the kit's layers and the library's give logits
    # that differ by 0.44 (SmolLM2-135M), and the base's score would depend on the run it is compared with.
    for name, model in models_by_ranks(run, computing) if questions else ():

        def show_model(text: str, name: str = name) -> None:
            show(f"{name} model: {text}")

        with fitting(computing.device, run, computing.ranks.world):
            for question in questions:
                if name == "tuned" and isinstance(question, Scores) and computing.sharding is None:
                    answer_with_fewer_kernels(model.unwrapped_model)
                answers[question.key][name] = question.ask(model, name, show_model)
        del model  # the next one takes its place on the device
    return answers


def _server_answers(
    run: FinishedRun, questions: Sequence[Any], kept: KeptAnswers, say: _Say, show: _Say
) -> dict[str, dict[str, Any]]:
    """As `_model_answers`, by a server. Only the tokenizer is loaded, which finds the rows."""
    say("held-out loss: not measured; a server gives no loss: finetune eval without --endpoint measures it")
    if kept.endpoint.base_model is None:
        say("base: not asked, so there are no differences; name it with --base-model")
    answers: dict[str, dict[str, Any]] = {question.key: {"base": None} for question in questions}
    for question in questions:
        scored_set = question.scored_set
        rows = zip(scored_set.items, scored_set.contents, strict=True)
        requests = [(item.place, conversation(content, run.encoder)) for item, content in rows]
        for name, model in kept.endpoint.models().items():

            def show_model(text: str, name: str = name, rows: str = scored_set.name) -> None:
                show(f"{name} model, {rows}: {text}")

            replies = kept.answers(model, requests, scored_set.max_new_tokens, show_model)
            for stop in run.conversation.stops:
                if count := sum(reply.text.endswith(stop) for reply in replies):
                    say(
                        f"{name}: {counted(count, 'answer')} end with {stop}, which the server shows as text; "
                        "they are scored so"
                    )
            for note in server_notes(replies, [len(prompt.prompt_ids) for prompt in scored_set.prompts]):
                say(f"{name}: {note}")
            answers[question.key][name] = replies
    return answers


def _questions(
    run: FinishedRun, computing: Computing, request: EvalRequest, say: _Say, leave_out: _Say
) -> list[Question]:
    """The questions of this request, in the order of eval.json. Raises FinetuneError for one that cannot be asked.

    Args:
        leave_out: Says why answers are not scored, or not by probability, and keeps it for eval.json.
    """
    recipe, questions, measured = run.recipe, list[Question](), list[str]()
    prepared = None if recipe.data.eval is None else prepare(recipe, load_tokenizer(recipe))
    encoder, batching = run.encoder, batching_of(run, computing)
    if request.endpoint is None and recipe.preferences is None and prepared is not None and prepared.eval is not None:
        questions.append(HeldOutLoss(run, computing, prepared))
    if request.generate:
        try:
            scored_set = held_out_set(
                recipe,
                encoder,
                prepared,
                file=None if request.file is None else request.entry or str(request.file),
                metrics=request.metrics,
                limit=request.limit,
                max_new_tokens=request.max_new_tokens,
                contents=True,
            )
            options = given_options(run, computing, scored_set, leave_out) if request.endpoint is None else None
            if options is not None:
                questions.append(options)
                measured.append(options.key)
            questions.append(Scores("scores", run.tokenizer, batching, scored_set, say))
            measured += [metric.name for metric in scored_set.metrics]
        except FinetuneError as error:
            # Texts without answers have a loss, and nothing to generate. Only a wish for scores makes that a mistake.
            if (
                request.metrics
                or request.file
                or request.fail_under
                or isinstance(error, DataError)
                or (request.endpoint is not None and not request.general)
            ):
                raise
            leave_out(f"no answers are scored: {error}")
    if request.general:
        rows = general_rows()
        try:
            prompts = [encoder.sample_prompt(row.prompt) for row in rows]
        except RowError as error:
            raise FinetuneError(f"--general: the chat template refuses a plain question: {error}") from None
        items, contents = [Scored(row.item.reference, row.prompt) for row in rows], list[Chat | Passage]()
        for row in rows:  # as a server is asked
            turns = [{"role": "user", "content": row.prompt}, {"role": "assistant", "content": ""}]
            chat = Chat(turns, None, [False, True], recipe.data.chat_template_kwargs)
            contents.append(chat if encoder.has_template else Passage(row.prompt, ""))
        general = ScoredSet("general questions", prompts, items, [], GENERAL_TOKENS, [], contents)
        questions.append(Scores("general", run.tokenizer, batching, general, say))
        measured.append("general")
    if unknown := [name for name in request.fail_under if name not in measured]:
        names = ", ".join(measured) or "none"
        raise FinetuneError(f"--fail-under {unknown[0]}: is not measured here; measured are {names}")
    return questions


@dataclass(frozen=True)
class HeldOutLoss:
    """The trainer's own evaluation: the mean loss over every supervised held-out token."""

    run: FinishedRun
    computing: Computing
    prepared: Prepared
    key = "held_out"

    def ask(self, model: Assembled, name: str, show: _Say) -> float:
        recipe, rows, computing = self.run.recipe, self.prepared.eval, self.computing
        assert rows is not None
        # The trainer's own plan and autocast, so that the figure equals the run's own one.
        accelerator = computing.accelerator or Accelerator(cpu=computing.device.type == "cpu")
        plan = computing.plan(recipe, len(self.prepared.train))
        with computing.autocast(recipe):
            try:
                return evaluate(accelerator, model.model, rows, plan, objective_of(recipe), show=show)["loss"]
            except NotFinite:  # its text is about a training
                raise NotFinite(
                    f"{self.run.folder}: not finite: the held-out loss of the {name} model; look at its weights"
                ) from None
            finally:
                model.unwrapped_model.eval()

    def compare(self, base: float, tuned: float) -> QuestionResult:
        prepared, exported = self.prepared, self.run.facts.exported_eval()
        assert prepared.eval is not None
        figures: dict[str, Any] = {
            "documents": prepared.facts["eval_documents"],
            "tokens": int(prepared.eval.supervised.sum()),
            # exp(710) overflows a double.
            "base": {"loss": base, "perplexity": math.exp(min(base, 700.0))},
            "tuned": {"loss": tuned, "perplexity": math.exp(min(tuned, 700.0))},
            "recorded": exported["loss"] if exported else None,
        }
        documents, tokens = counted(figures["documents"], "held-out document"), figures["tokens"]
        lines = [f"{documents}, {counted(tokens, 'supervised token')}:", f"{'':8}{'loss':>9}{'perplexity':>13}"]
        for name in ("base", "tuned"):
            lines.append(f"{name:8}{figures[name]['loss']:>9.4f}{figures[name]['perplexity']:>13.2f}")
        if figures["recorded"] is not None:
            lines.append(f"of these weights the run itself wrote {figures['recorded']:.4f}")
        return QuestionResult(figures, "\n".join(lines))


@dataclass(frozen=True)
class Scores:
    """Scored answers to held-out rows, to the rows of a file, or to general questions: what was forgotten?"""

    key: Literal["scores", "general"]
    tokenizer: PreTrainedTokenizerBase
    batching: Batching
    scored_set: ScoredSet
    say: _Say

    def ask(self, model: Assembled, name: str, show: _Say) -> list[Answer]:
        return generated_answers(model.decoder, self.tokenizer, self.scored_set, self.batching, show, self.say)

    def compare(self, base: list[Answer] | None, tuned: list[Answer]) -> QuestionResult:
        """Without the base's answers, the tuned model's scores alone."""
        scored_set, answers = self.scored_set, {"tuned": tuned} if base is None else {"base": base, "tuned": tuned}
        texts = [[answer.text for answer in replies] for replies in answers.values()]
        if self.key == "general":
            questions = general_rows()
            shares = [general_scores(questions, of_model) for of_model in texts]
            kinds = {}
            for kind in dict.fromkeys(row.kind for row in questions):
                places = [place for place, row in enumerate(questions) if row.kind == kind]
                kinds[kind] = compared(*([scores[place] for place in places] for scores in shares))
            figures = {"rows": len(questions), "all": compared(*shares, answers=texts), "kinds": kinds}
            return QuestionResult(figures, general_in_words(figures))
        scored = {name: scores_on_all(scored_set, replies, self.batching.ranks) for name, replies in answers.items()}
        metrics = {}
        for metric in scored_set.metrics:
            by_model = [scores[metric.name] for scores in scored.values()]
            metrics[metric.name] = {**metric.options, **compared(*by_model, answers=texts)}
        figures = {
            "data": scored_set.name,
            "rows": len(scored_set.items),
            "max_new_tokens": scored_set.max_new_tokens,
            "cut": {name: sum(not answer.ended for answer in replies) for name, replies in answers.items()},
            "notes": scored_set.notes,
            "metrics": metrics,
        }
        rows = []
        for index, (prompt, item) in enumerate(zip(scored_set.prompts, scored_set.items, strict=True)):
            scores = {name: [of_model[name][index] for of_model in scored.values()] for name in metrics}
            row: dict[str, Any] = {"place": item.place, "prompt": prompt.prompt, "reference": item.reference}
            row |= {name: replies[index].text for name, replies in answers.items()}
            if cut := [name for name, replies in answers.items() if not replies[index].ended]:
                row["cut"] = dict.fromkeys(cut, scored_set.max_new_tokens)
            rows.append({**row, "scores": scores})
        return QuestionResult(figures, scores_in_words(figures), rows)


Question = HeldOutLoss | OptionScores | Scores
