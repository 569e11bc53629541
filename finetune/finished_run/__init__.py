"""After a run: chat, evaluate, merge and export. Other packages import this module only.

Each function takes a run's folder, and a checkpoint's step or None for the run's result. Functions import what they
need when they are called, so importing this module loads no torch.

May import: everything below planner.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "ENGINES",
    "answer",
    "converse",
    "evaluate",
    "export",
    "export_for",
    "merge",
    "run_at",
    "write_gguf",
]
ENGINES = ("transformers", "peft", "vllm", "llama.cpp", "ollama")  # of `finetune export --for`

Who = Literal["base", "tuned", "both"]
Say = Callable[[str], None]


def run_at(run: Path, step: int | None) -> Path:
    """The folder with the run's result, or with the run at `step`, exported first. Raises FinetuneError."""
    from finetune.finished_run.export_step import run_at as at

    return at(run, step)


def answer(
    run: Path,
    step: int | None,
    prompts: Sequence[str],
    who: Who,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int | None,
) -> list[dict[str, str]]:
    """One dictionary per prompt: the prompt, and the answers of base and tuned model. Raises FinetuneError."""
    from finetune.finished_run.chat import WHO, GenerationSettings, answers_to, open_run

    settings = GenerationSettings(max_new_tokens, temperature, seed)
    return answers_to(open_run(run_at(run, step)), prompts, WHO[f"/{who}"], settings)


def converse(
    run: Path,
    step: int | None,
    prompts: Sequence[str],
    who: Who,
    say: Say,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int | None,
) -> None:
    """Answer the prompts, or typed lines if there are none, through `say`. Raises FinetuneError."""
    from finetune.finished_run.chat import HELP, WHO, GenerationSettings, chat_loop, open_run, typed_lines

    session = open_run(run_at(run, step))
    if not prompts:
        say(HELP)
    settings = GenerationSettings(max_new_tokens, temperature, seed)
    chat_loop(session, prompts or typed_lines(), WHO[f"/{who}"], settings, say)


def evaluate(
    run: Path,
    step: int | None,
    tasks: Sequence[str],
    say: Say,
    show: Say = lambda _: None,
    *,
    metrics: Sequence[str] = (),
    scorer: str | None = None,
    file: Path | None = None,
    max_new_tokens: int | None = None,
    general: bool = False,
    generate: bool = True,
    fail_under: Sequence[str] = (),
    include: Path | None = None,
    limit: int | None = None,
    chat_template: bool | None = None,
) -> dict[str, Any]:
    """Measure the base and the tuned model, and write eval.json and eval_answers.jsonl into the run's folder.

    Returns eval.json: `held_out` (loss and perplexity), `scores` (answers to held-out rows or `file`), `general` and
    `tasks` (lm-eval's figures), and with a missed threshold `exit_code` 5. With tasks and a recipe that holds no rows
    out, the first two are left out. Raises FinetuneError.

    Args:
        say: Receives each result at once.
        show: Receives the progress.
        metrics: As in eval.generate.metrics.
        scorer: PATH.py:FUNCTION, a metric of the user's own.
        file: A data file to answer instead of the held-out rows.
        generate: False: the loss alone.
        fail_under: METRIC=VALUE, the least mean score of the tuned model.
        limit: Rows to answer, and questions of each task.
        chat_template: Whether tasks use it; None: those that generate do.
    """
    from finetune.errors import FinetuneError
    from finetune.finished_run.evaluation import Request, measure, task_figures, tasks_in_words
    from finetune.finished_run.load import best_device, finished_run
    from finetune.finished_run.scores import (
        BELOW_THRESHOLD,
        below,
        chosen_metrics,
        keeps_earlier,
        thresholds,
        write_eval,
    )

    wanted = thresholds(fail_under)
    chosen = chosen_metrics(metrics, scorer)
    if not generate and (chosen or file):
        given = "--metric" if metrics else "--scorer" if scorer else "--data"
        raise FinetuneError(f"--loss-only: generates no answers, which {given} needs; leave one of them out")
    folder = run_at(run, step)
    opened, device = finished_run(folder), best_device()
    result: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    # Tasks bring their own data, so with them a recipe without held-out rows is no mistake.
    if not tasks or opened.recipe.data.eval is not None or file is not None or general:
        request = Request(chosen, str(file) if file else None, limit, max_new_tokens, general, generate, wanted)
        result, rows = measure(opened, device, request, say, show)
    if tasks:
        result["tasks"] = task_figures(
            opened, device, list(tasks), include=include, limit=limit, chat_template=chat_template, say=say
        )
        say(tasks_in_words(result["tasks"]))
    if kept := keeps_earlier(folder, result, limit):
        say(kept)
    elif (file := write_eval(folder, result, rows)) is not None:
        say(f"every answer: {file}; side by side: {shlex.join(['finetune', 'report', str(folder)])}")
    if missed := below(wanted, result):
        say("\n".join(missed))
        result |= {"ok": False, "exit_code": BELOW_THRESHOLD}
    return result


def merge(
    run: Path, step: int | None, say: Say, *, dtype: str | None = None, base: str | None = None, prompts: int = 64
) -> dict[str, Any]:
    """Write merged/ and compare it with the adapter over `prompts` held-out documents. Raises FinetuneError.

    Args:
        dtype: bfloat16, float16 or float32; None: the recipe's model.dtype.
        base: Under a quantised base: own or dequantized; None: the one that agrees best.
    """
    from finetune.finished_run.merge_command import in_words, merge_run

    facts = merge_run(run_at(run, step), dtype=dtype, base=base, prompts=prompts, log=say)  # type: ignore[arg-type]
    say(in_words(facts))
    return facts


def write_gguf(run: Path, step: int | None, quantization: str, say: Say, *, prompts: int = 64) -> dict[str, Any]:
    """Write the merged model as gguf/NAME-QUANTIZATION.gguf, with a Modelfile for Ollama. Raises FinetuneError.

    Args:
        quantization: f16, q8_0 or q4_k_m.
        prompts: As `merge` takes them, if merged/ has to be made.
    """
    from finetune.finished_run.gguf import describe_gguf
    from finetune.finished_run.gguf import write_gguf as write

    facts = write(run_at(run, step), quantization, say, prompts=prompts)  # type: ignore[arg-type]
    say(describe_gguf(facts))
    return facts


def export(run: Path, step: int, folder: Path | None, say: Say) -> dict[str, Any]:
    """Make a finished run's folder from a checkpoint, with its answers and report. Raises FinetuneError."""
    from finetune.finished_run.export_step import describe_export, export_step, write_answers_and_report

    facts = export_step(run, step, folder)
    say(describe_export(facts))
    write_answers_and_report(Path(facts["folder"]), step, say)
    return facts


def export_for(run: Path, step: int | None, engine: str, folder: Path | None, say: Say) -> dict[str, Any]:
    """Write the folder that one of ENGINES reads, and say the command that serves it. Raises FinetuneError."""
    if engine in ("ollama", "llama.cpp"):
        from finetune.errors import FinetuneError
        from finetune.finished_run.gguf import hand_over_gguf

        if folder is not None:
            raise FinetuneError(f"--to: --for {engine} writes gguf/ in the run's folder; leave --to out")
        written = hand_over_gguf(run_at(run, step), engine, say)  # type: ignore[arg-type]  # one of the two
        text = f"for {engine}, in 8 bits: {written['file']}\nserve it:\n  {written['command']}"
        if engine == "ollama":
            text += f"\nask it:\n  ollama run {written['command'].split()[2]} 'your question'"
        say(text)
        return written
    from finetune.finished_run.hand_over import describe_hand_over, hand_over

    facts = hand_over(run_at(run, step), engine, folder, say)  # type: ignore[arg-type]  # the verb checked it
    say(describe_hand_over(facts))
    return facts
