"""After a run: chat, evaluate, merge and export. Other packages import this module only.

Each function takes a run's folder, and a checkpoint's step or None for the run's result. Functions import what they
need when they are called, so importing this module loads no torch.

May import: everything below planner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "answer",
    "converse",
    "evaluate",
    "export",
    "export_plain",
    "hand_over_gguf",
    "merge",
    "run_at",
    "write_gguf",
]

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
    *,
    include: Path | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """`held_out`: loss and perplexity of base and tuned model; `tasks`: lm-eval's figures. `say` gets each at once.

    With tasks and a recipe that holds no rows out, `held_out` is left out. Raises FinetuneError.
    """
    from finetune.finished_run.evaluation import held_out_figures, held_out_in_words, task_figures, tasks_in_words
    from finetune.finished_run.load import best_device, finished_run

    opened, device = finished_run(run_at(run, step)), best_device()
    result: dict[str, Any] = {}
    # Tasks bring their own data, so with them a recipe without held-out rows is no mistake.
    if not tasks or opened.recipe.data.eval is not None:
        result["held_out"] = held_out_figures(opened, device)
        say(held_out_in_words(result["held_out"]))
    if tasks:
        result["tasks"] = task_figures(opened, device, list(tasks), include=include, limit=limit)
        say(tasks_in_words(result["tasks"]))
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


def hand_over_gguf(run: Path, engine: Literal["ollama", "llama.cpp"], say: Say) -> dict[str, Any]:
    """Write a q8_0 GGUF for an engine. Returns folder, file, and the command that serves it. Raises FinetuneError."""
    from finetune.finished_run.gguf import hand_over_gguf as hand_over

    return hand_over(run, engine, say)


def export(run: Path, step: int, folder: Path | None, say: Say) -> dict[str, Any]:
    """Make a finished run's folder from a checkpoint, with its answers and report. Raises FinetuneError."""
    from finetune.finished_run.export_step import describe_export, export_step, write_answers_and_report

    facts = export_step(run, step, folder)
    say(describe_export(facts))
    write_answers_and_report(Path(facts["folder"]), step, say)
    return facts


def export_plain(run: Path, step: int | None, folder: Path | None, say: Say) -> dict[str, Any]:
    """Write a PiSSA or OLoRA adapter as plain LoRA with twice the rank. Raises FinetuneError."""
    from finetune.finished_run.plain_adapter import describe_plain
    from finetune.finished_run.plain_adapter import export_plain as write_plain

    facts = write_plain(run_at(run, step), folder)
    say(describe_plain(facts))
    return facts
