"""The typed recipe, made from the sections in sections/. Every default lives here alone.

Keys carry Hugging Face's names if the meaning is the same. Nothing here imports torch, so checking a recipe stays
instant. Field descriptions give meaning, unit and frame of reference. docs/recipe.md and the JSON Schema are generated
from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from finetune.recipe import cross_checks
from finetune.recipe.number_formats import fastest_for, settled_formats
from finetune.recipe.sections.base import Count, Interval, Local, Section
from finetune.recipe.sections.data import Data, DataSet, EvalFraction, KnownFormat, RowFormat
from finetune.recipe.sections.lora import Lora
from finetune.recipe.sections.model import Budget, Dtype, ModelSection, Quantization
from finetune.recipe.sections.preferences import Dpo, Kto
from finetune.recipe.sections.results import Evaluation, Generate, Hub, Samples
from finetune.recipe.sections.training import Scheduler, Training

__all__ = [
    "Budget",
    "Data",
    "DataSet",
    "Dpo",
    "Dtype",
    "EvalFraction",
    "Evaluation",
    "Generate",
    "Hub",
    "KnownFormat",
    "Kto",
    "Lora",
    "ModelSection",
    "Quantization",
    "Recipe",
    "RowFormat",
    "Samples",
    "Scheduler",
    "Section",
    "Tracker",
    "Training",
]

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
    hub: Hub = Field(default_factory=Hub, description="Where the result goes.")
    output_dir: Local | None = Field(None, min_length=1, description="Run folder; null: runs/ and the recipe's name.")

    @model_validator(mode="before")
    @classmethod
    def formats_settled(cls, values: Any) -> Any:
        """Replace `auto` by the number formats that it means, so that no Recipe holds `auto`.

        A value that does not fit the schema stays, and pydantic reports it.
        """
        if not isinstance(values, Mapping) or "model" not in values:
            return values
        sections: dict[str, Any] = {}
        for name in ("budget", "model", "quantization", "training"):
            section = values.get(name, None if name == "quantization" else {})
            if name == "quantization" and section is None:
                continue
            if isinstance(section, Section):  # validated before: a copy of a recipe
                section = section.model_dump()
            if not isinstance(section, Mapping):
                return values
            sections[name] = section
        model, training, gpus = sections["model"], sections["training"], sections["budget"].get("gpus", 0)
        precision, base = training.get("mixed_precision", "auto"), model.get("dtype", "auto")
        if "auto" not in (precision, base) or not isinstance(precision, str) or not isinstance(base, str):
            return values
        precision, base = settled_formats(
            precision,
            base,
            fastest=fastest_for(gpus if isinstance(gpus, int) else 0).precision,
            adapters=values.get("lora", True) is not None,
            pure_bf16=training.get("pure_bf16") is True,
            quantization=sections.get("quantization"),
        )
        return {**values, "model": {**model, "dtype": base}, "training": {**training, "mixed_precision": precision}}

    @model_validator(mode="before")
    @classmethod
    def layouts_settled(cls, values: Any) -> Any:
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
        layout = cross_checks.FORMAT_OF_OBJECTIVE.get(str(training.get("objective")))
        if layout is None:
            return values

        def settled(entries: Any) -> Any:
            if not isinstance(entries, list) or not all(isinstance(entry, Mapping | DataSet) for entry in entries):
                return entries
            plain = [entry.model_dump() if isinstance(entry, DataSet) else entry for entry in entries]
            return [{**entry, "format": layout} if entry.get("format", "auto") == "auto" else entry for entry in plain]

        return {**values, "data": {**data, **{key: settled(data[key]) for key in ("train", "eval") if key in data}}}

    @model_validator(mode="after")
    def sections_agree(self) -> Recipe:
        cross_checks.check_sections(self)
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
    def run_dir(self) -> str:
        """The run folder; filled in by the loader when the recipe names none."""
        assert self.output_dir is not None, "load_recipe fills output_dir"
        return self.output_dir
