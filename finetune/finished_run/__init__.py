"""After a run: chat, evaluate, sample, merge and export. Other packages import this module only.

    folder = run_at(run, step)                        the run, or the export of a checkpoint
    evaluate_finished(folder, EvalRequest(...), print)  eval.json
    merge_run(folder, ...)                            merged/
    write_gguf(folder, "q4_k_m", print)               gguf/, with a Modelfile for Ollama
    sample_rows(SampleRequest(...), print)            answers.jsonl, rows.jsonl and a recipe for them
    export_with_report(run, step, None, print)       a checkpoint as a finished run
    export_for(folder, "vllm", None, print)           serving/ or gguf/, and the command that serves it

It imports nothing before a name is asked for, so importing this module loads no torch.

May import: everything below planner.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.finished_run.chat import GenerationSettings as GenerationSettings
    from finetune.finished_run.chat import answers_to as answers_to
    from finetune.finished_run.chat import converse as converse
    from finetune.finished_run.chat import open_run as open_run
    from finetune.finished_run.endpoint import open_endpoint as open_endpoint
    from finetune.finished_run.eval_request import EvalRequest as EvalRequest
    from finetune.finished_run.eval_request import chosen_metrics as chosen_metrics
    from finetune.finished_run.eval_request import thresholds as thresholds
    from finetune.finished_run.evaluation import evaluate_finished as evaluate_finished
    from finetune.finished_run.export_step import export_with_report as export_with_report
    from finetune.finished_run.export_step import run_at as run_at
    from finetune.finished_run.gguf import describe_gguf as describe_gguf
    from finetune.finished_run.gguf import write_gguf as write_gguf
    from finetune.finished_run.hand_over import export_for as export_for
    from finetune.finished_run.kept_rows import KeepOptions as KeepOptions
    from finetune.finished_run.kept_rows import summary_in_words as summary_in_words
    from finetune.finished_run.merge_command import describe_merge as describe_merge
    from finetune.finished_run.merge_command import merge_run as merge_run
    from finetune.finished_run.sample import sample_rows as sample_rows
    from finetune.finished_run.sample_source import SampleRequest as SampleRequest
    from finetune.finished_run.sample_source import source_of as source_of

ENGINES = ("transformers", "peft", "vllm", "llama.cpp", "ollama")  # of `finetune export --for`

# Module -> the names that it gives.
_NAMES = {
    "chat": ("GenerationSettings", "answers_to", "converse", "open_run"),
    "endpoint": ("open_endpoint",),
    "eval_request": ("EvalRequest", "chosen_metrics", "thresholds"),
    "evaluation": ("evaluate_finished",),
    "export_step": ("export_with_report", "run_at"),
    "gguf": ("describe_gguf", "write_gguf"),
    "hand_over": ("export_for",),
    "kept_rows": ("KeepOptions", "summary_in_words"),
    "merge_command": ("describe_merge", "merge_run"),
    "sample": ("sample_rows",),
    "sample_source": ("SampleRequest", "source_of"),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
