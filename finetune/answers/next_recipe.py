"""The recipe that trains on sampled rows, made from the recipe that the answers come from."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from finetune.answers.kept_rows import ROW_FORMATS, Keep
from finetune.data.rows import RowReader
from finetune.data.sources import resolve
from finetune.finished_run import FinishedRun
from finetune.recipe.optimizers import usual_rate
from finetune.recipe.schema import Recipe
from finetune.recipe.sections.training import Objective
from finetune.recipe.stop_time import seconds_of
from finetune.tokens.encoder import Encoder, RowError
from finetune.training.batch_notes import positions_of
from finetune.wording import counted

OBJECTIVES: dict[Keep, Objective] = {"right": "supervised", "all": "supervised", "pairs": "dpo", "judged": "kto"}


def next_recipe(
    reads: FinishedRun,
    file: Path,
    rows: Sequence[Mapping[str, Any]],
    keep: Keep,
    held_out: Path | None,
    metric: str | None,
) -> str:
    """The recipe's text. `file` holds `rows`, and data.max_length is raised to the longest one.

    An adapter goes on learning from where it is (`model.adapter`). All weights go on from the run's model. The held-out
    questions stay the same: `eval` scores the answers to `held_out`.
    """
    recipe, objective = reads.recipe, OBJECTIVES[keep]
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    values.pop("hub", None)
    run = values.pop("run", {})
    run.pop("storage", None)  # it holds the earlier run
    if seconds_of(run.get("stop_after", "")) is not None:  # a date is that run's
        values["run"] = {"stop_after": run["stop_after"]}
    training = values.setdefault("training", {})
    # These keys fit other data, or rows held out by data.eval.
    of_other_data = ("max_steps", "warmup_steps", "early_stopping_patience", "load_best_model_at_end")
    for key in (*of_other_data, "metric_for_best_model"):
        training.pop(key, None)
    if objective != recipe.training.objective:
        for key in ("dpo", "kto"):
            values.pop(key, None)
        rate = usual_rate(None, "full" if recipe.lora is None else "lora", objective)
        training |= {"objective": objective, "learning_rate": rate}
    batch = recipe.training.global_batch_size
    if len(rows) < batch and recipe.training.per_device_batch_size in (1, "auto"):
        training["global_batch_size"] = max(2, len(rows) // 4)
    entry: dict[str, Any] = {"path": str(file), "format": ROW_FORMATS[keep]}
    if keep in ("right", "all") and "messages" not in rows[0]:
        entry["format"] = "prompt_completion"
    if recipe.data.chat_template_kwargs:
        entry["chat_template_kwargs"] = recipe.data.chat_template_kwargs
    data = values["data"]
    data["train"] = [entry]
    data.pop("eval", None)
    if objective != "supervised":
        data.pop("train_on", None)
    generate = values.setdefault("eval", {}).setdefault("generate", {})
    generate.pop("every", None)
    generate.pop("file", None)
    if held_out is not None:
        generate["file"] = str(held_out)
        if metric is not None:
            generate.setdefault("metrics", [metric])
    if not generate:
        values.pop("eval")
    model = values["model"]
    if reads.trained and recipe.lora is not None:
        model.pop("adapter_revision", None)
        model["adapter"] = str(reads.product)
        values.get("lora", {}).pop("init_lora_weights", None)
    elif reads.trained:
        for key in ("revision", "new_tokens", "add_tokens", "add_special_tokens"):
            model.pop(key, None)
        model["name_or_path"] = str(reads.product)
    folder = Path("runs", f"{file.parent.resolve().name}-{keep}")
    number = 2
    while folder.exists():
        folder = folder.with_name(f"{file.parent.resolve().name}-{keep}-{number}")
        number += 1
    values["output_dir"] = str(folder)
    made = Recipe.model_validate(values)  # our own text must be a valid recipe
    head = f"# Trains on {counted(len(rows), 'row')} of {file.name}, which finetune sample kept.\n"
    encoder, longest = Encoder(reads.tokenizer, made.data, made.model), 0
    for row in RowReader(resolve(made.data.train[0])).rows():
        with suppress(RowError):  # the training says so
            documents = encoder.documents(row.read) if row.read is not None else []
            longest = max([longest, *(len(document.input_ids) for document in documents)])
    longest = min(longest, positions_of(recipe) or sys.maxsize)
    if longest > recipe.data.max_length:
        data["max_length"] = longest
        head += f"# data.max_length: the longest row's; the answers' recipe has {recipe.data.max_length:,}.\n"
    if recipe.run.storage is not None:
        head += "# run.storage is left out: each run needs a place of its own.\n"
    return head + str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
