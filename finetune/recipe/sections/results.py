"""A run's results: answers to look at, and where the result goes."""

from __future__ import annotations

from pydantic import Field

from finetune.recipe.sections.base import Count, Section, WholeNumber

USUAL = 64  # new tokens in an answer
FEWER = 16  # new tokens if every forward gathers the model: 131 GiB for each new token of Llama-3.1-70B in bf16


class Samples(Section):
    """Answers before and after training, to be looked at."""

    count: WholeNumber = Field(4, description="Held-out prompts to answer if prompts is null; 0: none.")
    prompts: list[str] | None = Field(None, description="User messages to answer; null: the first held-out rows'.")
    max_new_tokens: Count | None = Field(
        None,
        description="An answer's length in tokens; null: 64, or 16 if each forward gathers sharded weights or passes "
        "through a pipeline.",
    )

    def length(self, *, sharded: bool) -> int:
        """An answer's most new tokens. `sharded`: weights are sharded, or in a pipeline's stages."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return FEWER if sharded else USUAL


class Hub(Section):
    """Where the result goes."""

    repo_id: str | None = Field(None, description="owner/name on the Hub; the repository is made if missing.")
    push: bool = Field(False, description="Push the result when training is finished; needs repo_id.")
    private: bool = Field(True, description="Only you see it; false is needed to push to a public repository too.")
    revision: str = Field("main", min_length=1, description="Branch to push to; made if missing.")
    checkpoints: str | None = Field(None, min_length=1, description="Branch for the newest checkpoint; null: none.")
