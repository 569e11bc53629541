"""A run's limits and results: answers to look at, and where the result goes."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from finetune.recipe.metric_names import MetricChoice, WrongMetric, read_metric
from finetune.recipe.sections.base import Count, CrossCheck, Interval, Local, Section, WholeNumber, refuse
from finetune.recipe.yaml_text import shown


class RunLimits(Section):
    """The run's limits, and where its state outlives the machine."""

    stop_after: str | None = Field(
        None,
        min_length=1,
        description="Save, and end with exit code 130, at the first step after this time from the start, 3h50m, or "
        "after a date with its zone, 2026-11-28T18:00+01:00. Each start counts anew. null: no limit.",
    )

    storage: str | None = Field(
        None,
        min_length=1,
        description="Where the newest checkpoint and the run's records are copied in the background, and from where a "
        "start on an empty machine continues: s3://BUCKET/PREFIX, hf://OWNER/NAME@BRANCH, "
        "hf://buckets/OWNER/NAME/PREFIX, file:///FOLDER. One place for each run. null: nowhere.",
    )

    @field_validator("storage")
    @classmethod
    def without_last_slash(cls, storage: str | None) -> str | None:
        """The address as a console copies it ends with a slash."""
        if storage is None:
            return None
        from finetune.recipe.storage_address import storage_address

        return storage_address(storage)

    @model_validator(mode="after")
    def storage_is_an_address(self) -> RunLimits:
        """Check the address's form. A start asks the storage itself."""
        if self.storage is None:
            return self
        from finetune.recipe.storage_address import storage_problem

        if (problem := storage_problem(self.storage)) is not None:
            refuse([CrossCheck("storage", f"{shown(self.storage)} {problem[0]}", problem[1])])
        return self

    @model_validator(mode="after")
    def time_is_one(self) -> RunLimits:
        """Check the text's form. The loader checks zone and past where the recipe is trained."""
        if self.stop_after is None:
            return self
        from finetune.recipe.stop_time import form_problem

        if (problem := form_problem(self.stop_after)) is not None:
            refuse([CrossCheck("stop_after", f"{shown(self.stop_after)} {problem[0]}", problem[1])])
        return self


USUAL, LONGEST = 64, 256  # new tokens in an answer: without references, and with long ones
FEWER = 16  # new tokens if every forward gathers the model: 131 GiB for each new token of Llama-3.1-70B in bf16


class Samples(Section):
    """Answers before and after training, to be looked at."""

    count: WholeNumber = Field(4, description="Held-out prompts to answer if prompts is null; 0: none.")
    prompts: list[str] | None = Field(None, description="User messages to answer; null: the first held-out rows'.")
    max_new_tokens: Count | None = Field(
        None,
        description="An answer's length in tokens; null: the longest reference's, to 256 (64 without references), or "
        "16 if each forward gathers sharded weights or passes through a pipeline. Answers cut there are marked.",
    )

    def length(self, longest: int, *, sharded: bool) -> int:
        """An answer's most new tokens.

        Args:
            longest: The longest reference's tokens; 0: there is none.
            sharded: Weights are sharded, or in a pipeline's stages.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if sharded:
            return FEWER
        return min(longest, LONGEST) if longest else USUAL


class Generate(Section):
    """Answers that are generated and scored: how good is the model at its task?"""

    metrics: list[str] = Field(
        [],
        description="exact, normalized, contains, number, choice, json_valid, json_fields, tool_name, tool_call, sql, "
        "regex, chrf; with an option: number:tolerance=0.01. Empty: those that fit the references.",
    )
    file: Local | None = Field(
        None, min_length=1, description="A data file to answer, read as data.train's first set; null: held-out rows."
    )
    limit: Count = Field(200, description="Rows to answer at most: the first ones.")
    max_new_tokens: Count | None = Field(
        None, description="An answer's length in tokens; null: the longest reference's and a quarter more, up to 1,024."
    )
    every: Interval | None = Field(
        None,
        description="Optimizer steps between two scores in training; below 1, a share of the run. null: only "
        "`finetune eval` scores.",
    )

    @property
    def choices(self) -> list[MetricChoice]:
        """The chosen metrics; none if those that fit the references are meant."""
        return [read_metric(text) for text in self.metrics]

    @model_validator(mode="after")
    def known_metrics(self) -> Generate:
        """Check that each metric is known and named once."""
        mistakes, seen = [], set()
        for text in self.metrics:
            try:
                name = read_metric(text).name
            except WrongMetric as error:
                mistakes.append(CrossCheck("metrics", error.problem, error.remedy))
                continue
            if name in seen:
                mistakes.append(CrossCheck("metrics", f"{name} is named twice", "keep one of them"))
            seen.add(name)
        refuse(mistakes)
        return self


class Evaluation(Section):
    """Evaluation beside the held-out loss."""

    generate: Generate = Field(default_factory=Generate, description="Answers that are generated and scored.")
    options: list[str] = Field(
        [],
        description="The answers to choose from. `finetune eval` scores each by its probability; []: the held-out "
        "answers themselves, if they are few and repeated.",
    )

    @model_validator(mode="after")
    def distinct_options(self) -> Evaluation:
        """Check that there is a choice: two options or more, none empty, none named twice."""
        mistakes = [CrossCheck("options", "an answer is empty", "remove it")] * ("" in map(str.strip, self.options))
        if len(self.options) == 1:
            mistakes.append(CrossCheck("options", "one answer is no choice", "name the others, or remove the key"))
        for option in {option: None for option in self.options if self.options.count(option) > 1}:
            mistakes.append(CrossCheck("options", f"{shown(option)} is named twice", "keep one of them"))
        refuse(mistakes)
        return self


class Hub(Section):
    """Where the result goes."""

    repo_id: str | None = Field(None, description="owner/name on the Hub; the repository is made if missing.")
    push: bool = Field(False, description="Push the result when training is finished; needs repo_id.")
    private: bool = Field(True, description="Only you see it; false is needed to push to a public repository too.")
    revision: str = Field("main", min_length=1, description="Branch to push to; made if missing.")
    checkpoints: str | None = Field(None, min_length=1, description="Branch of repo_id as run.storage; null: none.")
