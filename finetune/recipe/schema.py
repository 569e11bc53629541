"""The typed recipe, made from the sections in sections/. Every default lives here alone.

Keys carry Hugging Face's names if the meaning is the same. Nothing here imports torch, so checking a recipe stays
instant. Field descriptions give meaning, unit and frame of reference. docs/recipe.md and the JSON Schema are generated
from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from finetune.recipe.layouts import FORMAT_OF_OBJECTIVE, KnownFormat
from finetune.recipe.metric_names import METRICS
from finetune.recipe.mixed_precision import without_auto
from finetune.recipe.names import is_repository, name_mistakes
from finetune.recipe.sections.base import Count, CrossCheck, Interval, Local, Section, refuse, steps_between
from finetune.recipe.sections.data import Data, DataSet, EvalFraction, RowFormat
from finetune.recipe.sections.lora import Lora
from finetune.recipe.sections.model import Budget, Dtype, ModelSection, Quantization
from finetune.recipe.sections.preferences import Dpo, Kto
from finetune.recipe.sections.results import Evaluation, Generate, Hub, RunLimits, Samples
from finetune.recipe.sections.training import Scheduler, Training

__all__ = [
    "Budget", "Data", "DataSet", "Dpo", "Dtype", "EvalFraction", "Evaluation", "Generate", "Hub", "KnownFormat", "Kto",
    "Lora", "ModelSection", "Quantization", "Recipe", "RowFormat", "RunLimits", "Samples", "Scheduler", "Section",
    "Tracker", "Training",
]  # fmt: skip

Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow"]


class Recipe(Section):
    """One fine-tuning run."""

    budget: Budget = Field(default_factory=Budget, description="The machines that the recipe is made for.")
    accelerate_config: Local = Field("single", min_length=1, description="A file of accelerate_configs/, or a path.")
    model: ModelSection = Field(description="The base model.")
    quantization: Quantization | None = Field(None, description="Quantised base weights; null: none.")
    lora: Lora | None = Field(default_factory=Lora, description="Adapters; null: all weights are trained.")
    data: Data = Field(description="The training data.")
    training: Training = Field(default_factory=Training, description="The training itself.")
    dpo: Dpo = Field(default_factory=Dpo, description="Pairs of answers, with training.objective: dpo.")
    kto: Kto = Field(default_factory=Kto, description="Judged answers, with training.objective: kto.")
    samples: Samples = Field(default_factory=Samples, description="Answers before and after training.")
    eval: Evaluation = Field(default_factory=Evaluation, description="Answers that are scored.")
    logging_steps: Count = Field(1, description="Optimizer steps between two lines of metrics.")
    eval_steps: Interval = Field(0.1, description="Steps between two evaluations; below 1, a share of the run.")
    save_steps: Interval = Field(0.1, description="Steps between two checkpoints; below 1, a share of the run.")
    save_total_limit: Count = Field(2, description="Newest checkpoints kept, besides the best evaluation's.")
    timeout_seconds: int = Field(
        600, ge=5, description="A rank that shows no sign of life for so many seconds is frozen, and the run ends."
    )
    measure_phases: bool = Field(
        False, description="Measure each phase's memory, seconds and collectives; slows the run."
    )
    report_to: list[Tracker] = Field([], description="Trackers besides metrics.jsonl; wandb without a key: offline.")
    run: RunLimits = Field(default_factory=RunLimits, description="The run's limits.")
    hub: Hub = Field(default_factory=Hub, description="Where the result goes.")
    output_dir: Local | None = Field(None, min_length=1, description="Run folder; null: runs/ and the recipe's name.")

    @model_validator(mode="before")
    @classmethod
    def without_auto_formats(cls, values: Any) -> Any:
        """No Recipe holds `auto` for a number format."""
        if not isinstance(values, Mapping):
            return values
        names = ("budget", "model", "quantization", "training")
        sections = {name: values[name].model_dump() for name in names if isinstance(values.get(name), Section)}
        return without_auto({**values, **sections})

    @model_validator(mode="before")
    @classmethod
    def without_auto_layouts(cls, values: Any) -> Any:
        """Replace a data set's `format: auto` by the layout that the objective reads, so that every reader knows it.

        A value that does not fit the schema stays, and pydantic reports it.
        """
        if not isinstance(values, Mapping):
            return values
        training, data = (
            section.model_dump() if isinstance(section, Section) else section
            for section in (values.get("training"), values.get("data"))
        )
        if not isinstance(training, Mapping) or not isinstance(data, Mapping):
            return values
        layout = FORMAT_OF_OBJECTIVE.get(str(training.get("objective")))
        if layout is None:
            return values

        def with_layout(entries: Any) -> Any:
            if not isinstance(entries, list) or not all(isinstance(entry, Mapping | DataSet) for entry in entries):
                return entries
            plain = [entry.model_dump() if isinstance(entry, DataSet) else entry for entry in entries]
            return [{**entry, "format": layout} if entry.get("format", "auto") == "auto" else entry for entry in plain]

        return {**values, "data": {**data, **{key: with_layout(data[key]) for key in ("train", "eval") if key in data}}}

    @model_validator(mode="after")
    def sections_agree(self) -> Recipe:
        mistakes = [*_frozen_base_mistakes(self), *_training_mistakes(self), *_preference_mistakes(self)]
        refuse([*mistakes, *_hub_mistakes(self), *_name_mistakes(self)])
        return self

    @property
    def preferences(self) -> Dpo | Kto | None:
        """The objective's own section; None if it is supervised."""
        match self.training.objective:
            case "dpo":
                return self.dpo
            case "kto":
                return self.kto
            case "supervised":
                return None

    @property
    def reward_names(self) -> list[str]:
        """The rewards on held-out rows that metric_for_best_model may name; none if the objective is supervised."""
        return [] if self.preferences is None else ["eval_reward_accuracy", "eval_reward_margin"]

    @property
    def best_is_highest(self) -> bool:
        """Whether the best step has the highest value: of a score or a reward. A loss is best when it is lowest."""
        return self.best_by_score or self.training.metric_for_best_model in self.reward_names

    @property
    def score_names(self) -> list[str]:
        """The scores that metric_for_best_model may name: those that are generated in training."""
        if self.eval.generate.every is None:
            return []
        return [f"eval_{choice.name}" for choice in self.eval.generate.choices]

    @property
    def best_by_score(self) -> bool:
        """Whether a score finds the best step. A score is better when it is higher, a loss when it is lower."""
        return self.training.metric_for_best_model in self.score_names

    @property
    def deciding_steps(self) -> float:
        """The interval of the evaluations that find the best step."""
        if self.best_by_score:
            assert self.eval.generate.every is not None
            return self.eval.generate.every
        return self.eval_steps

    @property
    def storage(self) -> str | None:
        """The address of the place that keeps the run: run.storage, or hub.checkpoints' branch; None: there is none."""
        if self.hub.checkpoints is not None:
            return f"hf://{self.hub.repo_id}@{self.hub.checkpoints}"
        return self.run.storage

    @property
    def storage_key(self) -> str:
        """The key that names the storage, for messages."""
        return "run.storage" if self.hub.checkpoints is None else "hub.checkpoints"

    @property
    def run_dir(self) -> str:
        """The run folder; filled in by the loader when the recipe names none."""
        assert self.output_dir is not None, "load_recipe fills output_dir"
        return self.output_dir

    def unsaved_evaluations(self, total_steps: float) -> tuple[str, str] | None:
        """The problem and the remedy if the best evaluation may have no checkpoint; else None."""
        if not self.training.exports_best or (self.data.eval is None and not self.best_by_score):
            return None
        # Every 30 steps evaluated and every 20 saved: step 30 may be the best, and has no checkpoint.
        evaluated = steps_between(self.deciding_steps, total_steps)
        saved = steps_between(self.save_steps, total_steps)
        if evaluated >= total_steps or evaluated % saved == 0:  # the last step is always evaluated and saved
            return None
        total = "" if total_steps == math.inf else f" of {int(total_steps):,}"
        problem = (
            f"evaluations every {evaluated:,} steps{total} are not all saved by checkpoints every {saved:,}, and the "
            "best one's weights are to be exported (training.load_best_model_at_end)"
        )
        multiple = max(1, round(evaluated / saved)) * saved
        key = "eval.generate.every" if self.best_by_score else "eval_steps"
        remedy = f"write save_steps: {self.deciding_steps}, as {key} is, or {key}: {multiple}"
        return problem, remedy


def _frozen_base_mistakes(recipe: Recipe) -> Iterator[CrossCheck]:
    """Settings that need adapters, and adapters that a quantised base does not support."""
    base, lora, precision = recipe.quantization, recipe.lora, recipe.training.mixed_precision
    if recipe.model.adapter is not None and lora is None:
        remedy = "add lora: {} with the adapter's settings, or merge the adapter and name the result in name_or_path"
        yield CrossCheck("model.adapter", "all weights are trained, no adapter (lora is null)", remedy)
    if recipe.model.load_in_fp8:
        key = "model.load_in_fp8"
        if base is not None:
            yield CrossCheck(key, "quantization packs the same weights", "set it to false, or quantization: null")
        if lora is None:
            remedy = "set it to false, or lora: {}"
            yield CrossCheck(key, "all weights are trained, none is frozen (lora is null)", remedy)
        elif lora.use_dora:
            remedy = "set it to false, or lora.use_dora: false"
            yield CrossCheck(key, "DoRA reads the base's weights in 16 bits", remedy)
        if recipe.budget.gpus and precision != "bf16":
            problem = f"a GPU's products in float8 give bfloat16, and training.mixed_precision is {precision}"
            yield CrossCheck(key, problem, "set it to false, or training.mixed_precision: bf16")
    if base is None:
        return
    if lora is None:
        remedy = "add lora: {}, or quantization: null"
        yield CrossCheck("quantization", "quantised weights cannot be trained", remedy)
    elif lora.init_lora_weights == "orthogonal":
        problem = "orthogonal needs base weights that are not quantised"
        yield CrossCheck("lora.init_lora_weights", problem, "set it to true, or quantization: null")
    elif lora.use_dora and base.load_in_8bit:
        yield CrossCheck("lora.use_dora", "peft has no DoRA over 8-bit weights", "set quantization.load_in_4bit")
    if base.load_in_4bit and precision == "fp16" and base.bnb_4bit_compute_dtype == "bfloat16":
        key, problem = "quantization.bnb_4bit_compute_dtype", "is bfloat16 while the rest computes in fp16"
        yield CrossCheck(key, problem, "set it to float16")


def _training_mistakes(recipe: Recipe) -> Iterator[CrossCheck]:
    training = recipe.training
    if training.early_stopping_patience and recipe.data.eval is None:
        key, remedy = "training.early_stopping_patience", "add data.eval: {fraction: 0.05}"
        yield CrossCheck(key, "early stopping needs held-out rows", remedy)
    if training.load_best_model_at_end and recipe.data.eval is None:
        remedy = "add data.eval: {fraction: 0.05}, or set it to false"
        yield CrossCheck("training.load_best_model_at_end", "the best evaluation needs held-out rows", remedy)
    generate, measured = recipe.eval.generate, [*recipe.data.metrics, *recipe.score_names, *recipe.reward_names]
    if training.metric_for_best_model not in measured:
        problem = f"is {training.metric_for_best_model}, which no evaluation measures"
        remedy = f"write {' or '.join(measured)}"
        if training.metric_for_best_model.removeprefix("eval_") in METRICS:
            remedy = "name it in eval.generate.metrics, and set eval.generate.every"
        yield CrossCheck("training.metric_for_best_model", problem, remedy)
    if generate.every is not None and recipe.data.eval is None and generate.file is None:
        remedy = "add data.eval: {fraction: 0.05}, or name eval.generate.file"
        yield CrossCheck("eval.generate.every", "scores need held-out rows", remedy)
    # Without max_steps the rows decide how long the run is, and nobody has counted them yet. Intervals in steps can be
    # compared all the same: as in a run without an end.
    total_steps: float | None = training.max_steps
    if total_steps is None and isinstance(recipe.deciding_steps, int) and isinstance(recipe.save_steps, int):
        total_steps = math.inf
    if total_steps is not None and (unsaved := recipe.unsaved_evaluations(total_steps)):
        yield CrossCheck("save_steps", *unsaved)
    if training.pure_bf16 and training.mixed_precision != "bf16":
        key, remedy = "training.pure_bf16", "set mixed_precision: bf16, or pure_bf16: false"
        yield CrossCheck(key, "pure_bf16 needs mixed_precision: bf16", remedy)

    if training.mlp_tile_tokens is not None:
        key = "training.mlp_tile_tokens"
        if training.keeps_products:
            problem = "activation_checkpointing: selective keeps the products that tiles do without"
            yield CrossCheck(key, problem, "set activation_checkpointing: true, or leave it out")
        if recipe.lora is not None and recipe.lora.lora_dropout:
            remedy = "set lora.lora_dropout: 0, or leave it out"
            yield CrossCheck(key, "backward computes each tile anew, and dropout would draw another mask", remedy)


def _preference_mistakes(recipe: Recipe) -> Iterator[CrossCheck]:
    """Settings that belong to another objective, and rows of another kind than the objective reads."""
    objective = recipe.training.objective
    for name in ("dpo", "kto"):
        section = getattr(recipe, name)
        if objective != name and section != type(section)():  # a resolved recipe has the defaults of both
            yield CrossCheck(name, f"training.objective is {objective}", f"set it to {name}, or remove the section")
    layout = FORMAT_OF_OBJECTIVE.get(objective)
    for key, entries in (("train", recipe.data.train), ("eval", recipe.data.eval_sets)):
        for number, entry in enumerate(entries):
            place = f"data.{key}.{number}.format"
            if layout is not None and entry.format != layout:
                yield CrossCheck(place, f"{objective} trains on {layout} rows, not on {entry.format}", "remove it")
            elif layout is None and entry.format in FORMAT_OF_OBJECTIVE.values():
                wanted = next(name for name, each in FORMAT_OF_OBJECTIVE.items() if each == entry.format)
                yield CrossCheck(place, "these rows are for another objective", f"set training.objective: {wanted}")
    section = recipe.preferences
    if section is None:
        return
    if recipe.data.train_on != "assistant":
        problem = f"is {recipe.data.train_on}, and {objective} compares the answers after the prompt"
        yield CrossCheck("data.train_on", problem, "remove it")
    if section.reference == "adapter_off" and recipe.lora is None:
        problem = "all weights are trained, so there is no adapter to switch off"
        yield CrossCheck(f"{objective}.reference", problem, "set it to start, or name a model")
    if isinstance(section, Dpo):
        if section.label_smoothing and section.loss_type != "robust":
            problem = f"{section.loss_type} has no label smoothing"
            yield CrossCheck("dpo.label_smoothing", problem, "set dpo.loss_type: robust, or remove it")
        if section.loss_type == "robust" and not section.label_smoothing:
            problem = "robust needs the share of wrong labels"
            yield CrossCheck("dpo.label_smoothing", problem, "set it, 0.1 for example, or dpo.loss_type: sigmoid")
        if section.simpo_gamma is not None and section.loss_type != "simpo":
            yield CrossCheck("dpo.simpo_gamma", f"{section.loss_type} has no gamma", "remove it")
        if not section.needs_reference and section.reference != "start":
            yield CrossCheck("dpo.reference", f"{section.loss_type} compares with no reference", "remove it")
    elif recipe.training.global_batch_size < 2:
        problem = "is 1, and kto measures each answer of a step against another row's"
        yield CrossCheck("training.global_batch_size", problem, "set it to 2 or more, 16 for example")


def _hub_mistakes(recipe: Recipe) -> Iterator[CrossCheck]:
    hub = recipe.hub
    for key, needs_repository in (("hub.push", hub.push), ("hub.checkpoints", hub.checkpoints)):
        if needs_repository and hub.repo_id is None:
            yield CrossCheck(key, "hub.repo_id is not set", "add hub.repo_id: owner/name")
    if hub.checkpoints is not None and recipe.run.storage is not None:
        yield CrossCheck("run.storage", "hub.checkpoints names a place too", "remove one of the two")
    if recipe.budget.nodes > 1 and (recipe.run.storage or "").startswith("hf://buckets/"):
        problem = f"a Hub bucket does not keep two writers apart, and budget.nodes is {recipe.budget.nodes}"
        yield CrossCheck("run.storage", problem, "name an s3:// bucket, or a branch: hf://OWNER/NAME@BRANCH")
    if recipe.run.storage == f"hf://{hub.repo_id}@{hub.revision}":
        yield CrossCheck("run.storage", "is also hub.revision, the result's branch", "name another branch")
    if hub.checkpoints == hub.revision:
        problem = "is also hub.revision, the result's branch"
        yield CrossCheck("hub.checkpoints", problem, "name another, for example checkpoints")


def _name_mistakes(recipe: Recipe) -> Iterator[CrossCheck]:
    """Names for files, folders and repositories that a shell, a terminal or a disk cannot take."""
    names: list[tuple[str, str]] = [
        ("model.name_or_path", recipe.model.name_or_path),
        ("model.adapter", recipe.model.adapter or ""),
        ("output_dir", recipe.output_dir or ""),
        ("accelerate_config", recipe.accelerate_config),
    ]
    if "{" not in (template := recipe.data.chat_template or ""):  # else it is the template's text, not its file
        names.append(("data.chat_template", template))
    for section, entries in (("train", recipe.data.train), ("eval", recipe.data.eval_sets)):
        for number, entry in enumerate(entries):
            names.append((f"data.{section}.{number}.path", entry.path))
            files = entry.data_files or []
            for file in [files] if isinstance(files, str) else files:
                names.append((f"data.{section}.{number}.data_files", file))
    yield from name_mistakes(names)
    repository = recipe.hub.repo_id
    if repository and not is_repository(repository):
        remedy = "write owner/name of letters, digits, - _ and ., without -- .. or .git at its end"
        yield CrossCheck("hub.repo_id", "is not a repository name", remedy)
