"""`finetune eval`: held-out loss, scored answers and benchmarks of the base and the tuned model."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from finetune.architecture import attention
from finetune.errors import DataError, EnvironmentMismatch, FinetuneError, NotFinite
from finetune.finished_run.load import FinishedRun, fitting, load_adapted, load_run_tokenizer, load_whole
from finetune.finished_run.scores import (
    BASE_AND_TUNED,
    compared,
    general_in_words,
    refuse_unknown_thresholds,
    scores_in_words,
)
from finetune.measure.metrics import evaluation_in_words
from finetune.model.build import attention_name, load_tokenizer
from finetune.model.dtypes import COMPUTE
from finetune.model.generate import Answer, end_tokens, without_settings
from finetune.probe.padding import may_share_a_batch
from finetune.recipe.schema import Recipe
from finetune.run_folder.facts import read_run
from finetune.scoring.general import MAX_NEW_TOKENS as GENERAL_TOKENS
from finetune.scoring.general import GeneralRow, general_rows, general_scores
from finetune.scoring.metrics import Metric
from finetune.strategies.pieces import Ranks
from finetune.tokens.dataset import Prepared, prepare
from finetune.tokens.encoder import Encoder, RowError
from finetune.training.batch_plan import plan_batches
from finetune.training.loop import evaluate
from finetune.training.objectives import objective_of
from finetune.training.scored_answers import Answering, ScoredSet, generated_answers, held_out_set, scores_on_all
from finetune.wording import counted

WHY_NO_LOSS = "held-out loss: not measured again, because a loss of preferences compares with the run's own start"


@dataclass(frozen=True)
class Request:
    """What to measure."""

    metrics: Sequence[Metric] = ()  # empty: the recipe's, or those that fit the references
    file: str | None = None  # answered instead of the held-out rows
    limit: int | None = None
    max_new_tokens: int | None = None
    general: bool = False  # the general set too
    generate: bool = True
    fail_under: Mapping[str, float] = field(default_factory=dict)


def measure(
    run: FinishedRun, device: torch.device, request: Request, say: Callable[[str], None], show: Callable[[str], None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`held_out`, `scores` and `general` of the base and the tuned model, and the scored rows with both answers.

    The loss is the trainer's own evaluation: the mean over every supervised held-out token. Each model is loaded once.
    A loss of preferences compares with the run's own start, so it would say nothing about the base: the run's own
    figures are repeated. Raises FinetuneError if no rows are held out and no other rows are named.
    """
    recipe, prepared = run.recipe, None
    measures_loss = recipe.preferences is None
    if recipe.data.eval is not None:
        prepared = prepare(recipe, load_tokenizer(recipe))
    elif request.file is None and recipe.eval.generate.file is None and not request.general:
        remedy = "name rows: --data FILE, or --general or --tasks"
        raise FinetuneError(f"{run.folder}: its recipe holds no rows out (data.eval is null); {remedy}")
    tokenizer = load_run_tokenizer(run)
    encoder = Encoder(tokenizer, recipe.data, recipe.model)
    asked = None
    if request.generate:
        try:
            asked = held_out_set(
                recipe,
                encoder,
                prepared,
                file=request.file,
                metrics=request.metrics,
                limit=request.limit,
                max_new_tokens=request.max_new_tokens,
            )
        except FinetuneError as error:
            # Texts without answers have a loss, and nothing to generate. Only a wish for scores makes that a mistake.
            if request.metrics or request.file or request.fail_under or isinstance(error, DataError):
                raise
            say(f"no answers are scored: {error}")
    general = general_rows() if request.general else []
    measured = [metric.name for metric in asked.metrics] if asked else []
    refuse_unknown_thresholds(request.fail_under, [*measured, *(["general"] if general else [])])
    asked_general = _general_set(general, encoder) if general else None

    how = Answering(may_share_a_batch(read_run(run.folder, recipe).receipt.get("probe") or {}), device)
    losses: dict[str, float] = {}
    answers: dict[str, list[Answer]] = {}
    general_answers: dict[str, list[Answer]] = {}
    has_work = measures_loss or asked is not None or asked_general is not None
    # Loaded alike whether a loss is measured or not: in bfloat16 the kit's layers and the library's give logits that
    # differ by 0.44 (SmolLM2-135M), and the base's score would depend on the run that it is compared with.
    for name, model in models_of(run, device, with_loss=True) if has_work else ():

        def show_model(text: str, name: str = name) -> None:
            show(f"{name} model: {text}")

        with fitting(device):
            if measures_loss and prepared is not None and prepared.eval is not None:
                losses[name] = _held_out_loss(run, device, prepared, name, model, show_model)
            if asked is not None:
                answers[name] = generated_answers(model, tokenizer, asked, how, show_model)
            if asked_general is not None:
                general_answers[name] = generated_answers(model, tokenizer, asked_general, how, show_model)
    result: dict[str, Any] = {}
    if answers or general_answers or losses:
        result |= _started_from(recipe, say)
    if not measures_loss and prepared is not None:
        recorded = read_run(run.folder, recipe).exported_eval()
        wrote = f"; of these weights the run itself wrote {evaluation_in_words(recorded)}" if recorded else ""
        say(f"{WHY_NO_LOSS}{wrote}")
        if recorded:
            rewards = {name: recorded[name] for name in ("reward_accuracy", "reward_margin") if name in recorded}
            result["held_out"] = {"recorded": recorded["loss"], **rewards}
    if losses and prepared is not None and prepared.eval is not None:
        exported = read_run(run.folder, recipe).exported_eval()
        result["held_out"] = {
            "documents": prepared.facts["eval_documents"],
            "tokens": int(prepared.eval.supervised.sum()),
            # exp(710) overflows a double
            **{name: {"loss": loss, "perplexity": math.exp(min(loss, 700.0))} for name, loss in losses.items()},
            "recorded": exported["loss"] if exported else None,
        }
        say(held_out_in_words(result["held_out"]))
    rows: list[dict[str, Any]] = []
    if asked is not None:
        scores = {name: scores_on_all(asked, answers[name], Ranks()) for name in BASE_AND_TUNED}
        result["scores"] = {
            "data": asked.name,
            "rows": len(asked.items),
            "max_new_tokens": asked.max_new_tokens,
            "cut": {name: sum(not each.ended for each in answers[name]) for name in BASE_AND_TUNED},
            "notes": asked.notes,
            "metrics": {
                metric.name: {**metric.options, **compared(*(scores[name][metric.name] for name in BASE_AND_TUNED))}
                for metric in asked.metrics
            },
        }
        say(scores_in_words(result["scores"]))
        for index, (prompt, item) in enumerate(zip(asked.prompts, asked.items, strict=True)):
            cut = {name: asked.max_new_tokens for name in BASE_AND_TUNED if not answers[name][index].ended}
            rows.append(
                {
                    "place": item.place,
                    "prompt": prompt.prompt,
                    "reference": item.reference,
                    **{name: answers[name][index].text for name in BASE_AND_TUNED},
                    **({"cut": cut} if cut else {}),
                    "scores": {
                        metric.name: [scores[name][metric.name][index] for name in BASE_AND_TUNED]
                        for metric in asked.metrics
                    },
                }
            )
    if general:
        by_model = [general_scores(general, [each.text for each in general_answers[name]]) for name in BASE_AND_TUNED]
        kinds = list(dict.fromkeys(row.kind for row in general))
        chosen = {kind: [index for index, row in enumerate(general) if row.kind == kind] for kind in kinds}
        result["general"] = {
            "rows": len(general),
            "all": compared(*by_model),
            "kinds": {
                kind: compared(*([scores[index] for index in indices] for scores in by_model))
                for kind, indices in chosen.items()
            },
        }
        say(general_in_words(result["general"]))
    return result, rows


def _started_from(recipe: Recipe, say: Callable[[str], None]) -> dict[str, str]:
    """Says that the base is not the start of a training that went on with an adapter."""
    start = recipe.model.adapter
    if start is None:
        return {}
    say(
        f"base: without the adapter {start} that this training started from; differences are of both trainings together"
    )
    return {"started_from": start}


def _general_set(rows: Sequence[GeneralRow], encoder: Encoder) -> ScoredSet:
    """The general questions as prompts. Raises FinetuneError if the chat template refuses one."""
    try:
        prompts = [encoder.sample_prompt(row.prompt) for row in rows]
    except RowError as error:
        raise FinetuneError(f"--general: the chat template refuses a plain question: {error}") from None
    return ScoredSet("general questions", prompts, [row.item for row in rows], [], GENERAL_TOKENS)


def _held_out_loss(
    run: FinishedRun,
    device: torch.device,
    prepared: Prepared,
    name: str,
    model: nn.Module,
    show: Callable[[str], None],
) -> float:
    recipe = run.recipe
    assert prepared.eval is not None
    # The trainer's own plan and autocast, so that the figure equals the run's own one.
    accelerator = Accelerator(cpu=device.type == "cpu")
    flat = attention_name(recipe) == attention.NAME
    plan = plan_batches(recipe, len(prepared.train), world_size=1, rank=0, flat=flat)
    with _arithmetic(recipe.training.mixed_precision, device):
        try:
            return evaluate(accelerator, model, prepared.eval, plan, objective_of(recipe), show=show)["loss"]
        except NotFinite:  # its text is about a training
            raise NotFinite(
                f"{run.folder}: not finite: the held-out loss of the {name} model; look at its weights"
            ) from None
        finally:
            model.eval()


def models_of(run: FinishedRun, device: torch.device, *, with_loss: bool) -> Iterator[tuple[str, nn.Module]]:
    """("base", ...), then ("tuned", ...). Use each before you take the next: one is on the device at a time."""
    if not run.base_is_inside:
        yield "base", load_whole(run, device, tuned=False, with_loss=with_loss)
        gc.collect()  # models refer to themselves in circles, and the next one needs the memory
    if run.recipe.lora is None:
        yield "tuned", load_whole(run, device, tuned=True, with_loss=with_loss)
        return
    adapted: Any = load_adapted(run, device, with_loss=with_loss)
    if run.base_is_inside:  # one model serves as both
        with adapted.disable_adapter():
            yield "base", adapted
    yield "tuned", adapted


def _arithmetic(mixed_precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast of the training's own evaluations."""
    compute = COMPUTE[mixed_precision]
    if compute is None:
        return nullcontext()
    return torch.autocast(device.type, compute)


def held_out_in_words(figures: dict[str, Any]) -> str:
    """A table, and the run's own figure."""
    documents, tokens = counted(figures["documents"], "held-out document"), counted(figures["tokens"], "token")
    lines = [f"{documents}, {tokens} that would be learned:", f"{'':8}{'loss':>9}{'perplexity':>13}"]
    for name in ("base", "tuned"):
        lines.append(f"{name:8}{figures[name]['loss']:>9.4f}{figures[name]['perplexity']:>13.2f}")
    if figures["recorded"] is not None:
        lines.append(f"of these weights the run itself wrote {figures['recorded']:.4f}")
    return "\n".join(lines)


def task_figures(
    run: FinishedRun,
    device: torch.device,
    tasks: Sequence[str],
    *,
    include: Path | None,
    limit: int | None,
    chat_template: bool | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """base or tuned -> task -> metric -> value, with lm-eval's own metrics; and `chat_template`: task -> whether used.

    Tasks that generate an answer use the chat template, because a tuned model answers as it was trained. Tasks that
    compare likelihoods (multiple choice) do not: with a template, scores fall for reasons other than skill.

    Args:
        tasks: lm-eval's names; * matches any letters.
        include: A folder with the user's own task files.
        limit: Questions per task; None: all.
        chat_template: Use it for all tasks, or for none; None: as described. Few-shot examples are then turns.
        say: Receives a line about that choice.

    Raises:
        EnvironmentMismatch: lm-eval is not installed, or a task's data cannot be fetched.
        FinetuneError: lm-eval does not know a task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise EnvironmentMismatch(f"--tasks: {error}; install it with: pip install 'finetune[eval]'") from error
    manager = TaskManager(include_path=str(include) if include else None)
    for name in tasks:
        if not manager.match_tasks([name]):
            raise FinetuneError(
                f"--tasks: lm-eval does not know {name}; lm_eval ls tasks shows all, --include adds a folder"
            )
    tokenizer = load_run_tokenizer(run)

    def mistake(error: Exception) -> EnvironmentMismatch:  # most often a data set that is not on this machine
        reason = " ".join(str(error).split())[:300]
        return EnvironmentMismatch(f"--tasks: lm-eval could not run {', '.join(tasks)}: {reason}")

    try:
        loaded = manager.load(manager.match_tasks(list(tasks)))["tasks"]
    except (OSError, ValueError) as error:
        raise mistake(error) from error
    templated = {}
    for name, task in loaded.items():
        generates = task.OUTPUT_TYPE == "generate_until"
        templated[name] = bool(tokenizer.chat_template) and (generates if chat_template is None else chat_template)
    say(_template_in_words(templated))
    figures: dict[str, Any] = {"chat_template": templated}
    for which, model in models_of(run, device, with_loss=False):
        language_model = HFLM(pretrained=model, tokenizer=tokenizer, device=str(device))
        figures[which] = {}
        for uses_template in (True, False):
            names = [name for name, uses in templated.items() if uses is uses_template]
            if not names:
                continue
            ends = {"eos_token_id": end_tokens(model, tokenizer) or None, "pad_token_id": tokenizer.pad_token_id}
            with fitting(device), without_settings(model, **ends):
                try:
                    evaluation = simple_evaluate(
                        language_model,
                        tasks=names,
                        task_manager=manager,
                        limit=limit,
                        log_samples=False,
                        apply_chat_template=uses_template,
                        fewshot_as_multiturn=uses_template,
                    )
                except (OSError, ValueError) as error:
                    raise mistake(error) from error
            # lm-eval's keys are "metric,filter", with "none" for no filter: acc,none. Other keys hold names and counts.
            figures[which] |= {
                task: {
                    key.removesuffix(",none"): float(value)
                    for key, value in values.items()
                    if isinstance(value, int | float) and "," in key
                }
                for task, values in evaluation["results"].items()
            }
    return figures


def _template_in_words(templated: Mapping[str, bool]) -> str:
    """Which tasks use the chat template."""
    parts = []
    for uses, words in ((True, "used for"), (False, "not used for")):
        names = [name for name, each in templated.items() if each is uses]
        if names:
            shown = ", ".join(names[:4])
            if len(names) > 4:
                shown += f" and {len(names) - 4} more"
            parts.append(f"{words} {shown}")
    return f"chat template: {'; '.join(parts)} (--chat-template or --no-chat-template changes it)"


def tasks_in_words(figures: dict[str, Any]) -> str:
    """A line for each task and metric, base and tuned side by side."""
    lines = [f"{'task':24}{'metric':24}{'base':>10}{'tuned':>10}"]
    for task, metrics in figures["tuned"].items():
        for metric, value in metrics.items():
            lines.append(f"{task:24}{metric:24}{figures['base'][task][metric]:>10.4f}{value:>10.4f}")
    return "\n".join(lines)
