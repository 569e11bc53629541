"""`finetune eval --tasks`: benchmarks of EleutherAI's lm-eval."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from finetune.answers.requests import EvalRequest
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.finished_run import FinishedRun, fitting, models_of
from finetune.generation.settings import end_tokens, without_settings
from finetune.library_errors import library_errors
from finetune.model.build import decoder_parts
from finetune.wording import install_command


def task_figures(
    run: FinishedRun, device: torch.device, request: EvalRequest, say: Callable[[str], None]
) -> dict[str, Any]:
    """base or tuned -> task -> metric -> value, with lm-eval's own metrics; and `chat_template`: task -> whether used.

    Tasks that generate an answer use the chat template, because a tuned model answers as it was trained. Tasks that
    compare likelihoods (multiple choice) do not: with a template, scores fall for reasons other than skill.

    Args:
        say: Receives a line about the chat template, and the figures. Few-shot examples are turns under a template.

    Raises:
        EnvironmentMismatch: lm-eval is not installed, or it could not run: most often a task's data cannot be fetched.
        FinetuneError: lm-eval does not know a task.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise EnvironmentMismatch(f"--tasks: {error}; install it in the checkout: {install_command('eval')}") from error
    tasks = list(request.tasks)
    manager = TaskManager(include_path=str(request.include) if request.include else None)
    for name in tasks:
        if not manager.match_tasks([name]):
            raise FinetuneError(
                f"--tasks: lm-eval does not know {name}; lm_eval ls tasks shows all, --include adds a folder"
            )
    tokenizer = run.tokenizer

    def mistake(error: Exception) -> EnvironmentMismatch:  # most often a data set that is not on this machine
        reason = " ".join(str(error).split())[:300]
        return EnvironmentMismatch(f"--tasks: lm-eval could not run {', '.join(tasks)}: {reason}")

    with library_errors(mistake):
        loaded = manager.load(manager.match_tasks(tasks))["tasks"]
    templated = {}
    for name, task in loaded.items():
        generates = task.OUTPUT_TYPE == "generate_until"
        uses = generates if request.chat_template is None else request.chat_template
        templated[name] = bool(tokenizer.chat_template) and uses
    parts = []
    for uses, words in ((True, "used for"), (False, "not used for")):
        if names := [name for name, used in templated.items() if used is uses]:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            parts.append(f"{words} {', '.join(names[:4])}{more}")
    say(f"chat template: {'; '.join(parts)} (--chat-template or --no-chat-template changes it)")
    figures: dict[str, Any] = {"chat_template": templated}
    for which, model in models_of(run, device, with_loss=False):
        language_model = HFLM(pretrained=model, tokenizer=tokenizer, device=str(device))
        figures[which], decoder = {}, decoder_parts(model)
        for uses_template in (True, False):
            names = [name for name, uses in templated.items() if uses is uses_template]
            if not names:
                continue
            ends = {"eos_token_id": end_tokens(decoder, tokenizer) or None, "pad_token_id": tokenizer.pad_token_id}
            with fitting(device, run), without_settings(decoder, **ends), library_errors(mistake):
                evaluation = simple_evaluate(
                    language_model,
                    tasks=names,
                    task_manager=manager,
                    limit=request.limit,
                    log_samples=False,
                    apply_chat_template=uses_template,
                    fewshot_as_multiturn=uses_template,
                )
            # lm-eval's keys are "metric,filter", with "none" for no filter: acc,none. Other keys hold names and counts.
            figures[which] |= {
                task: {
                    key.removesuffix(",none"): float(value)
                    for key, value in values.items()
                    if isinstance(value, int | float) and "," in key
                }
                for task, values in evaluation["results"].items()
            }
        del model, decoder, language_model  # the next one takes its place on the device
    lines = [f"{'task':24}{'metric':24}{'base':>10}{'tuned':>10}"]
    for task, metrics in figures["tuned"].items():
        for metric, value in metrics.items():
            lines.append(f"{task:24}{metric:24}{figures['base'][task][metric]:>10.4f}{value:>10.4f}")
    say("\n".join(lines))
    return figures
