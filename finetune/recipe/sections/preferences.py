"""Training on preferences: which of two answers is better, or which answers are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from finetune.recipe.sections.base import Local, Section

PairLoss = Literal["sigmoid", "robust", "ipo", "apo_zero", "simpo"]
NO_MARGIN = 1e-3  # between the rewards of one model, which other batches may round otherwise
USUAL_MARGIN = 0.5  # simpo_gamma, as in TRL
MOST_KL = 0.8  # by token, from the reference; docs/preferences.md says what was seen above it
AT_ONCE, NO_CHANCE = 5, 20  # training lines after the first, and pairs in them: none is wrong by chance
REFERENCE = (
    "Whose log-probabilities rewards are counted from. start: the model that this run starts from. adapter_off: the "
    "base without adapters. Else a model's name or folder."
)


class Dpo(Section):
    """Direct preference optimisation on pairs (Rafailov et al., 2023)."""

    loss_type: PairLoss = Field(
        "sigmoid",
        description="sigmoid: DPO. robust: some labels are wrong. ipo: a margin to reach, by the token. apo_zero: the "
        "chosen answers are better than the model's own. simpo: log-probability by the token, without a reference.",
    )
    beta: float = Field(0.1, gt=0, description="Weight of the distance to the reference; simpo: scale of the margin.")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="robust: the share of pairs whose label is wrong.")
    sft_weight: float = Field(
        0.0, ge=0, description="Weight of the chosen answers' cross-entropy, a mean over the step's chosen tokens."
    )
    simpo_gamma: float | None = Field(None, ge=0, description="simpo: the margin between two rewards; null: 0.5.")
    reference: Local = Field("start", min_length=1, description=REFERENCE)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference's log-probabilities."""
        return self.loss_type != "simpo"


class Kto(Section):
    """Kahneman-Tversky optimisation on judged answers (Ethayarajh et al., 2024)."""

    beta: float = Field(0.1, gt=0, description="Weight of the distance to the reference.")
    desirable_weight: float = Field(1.0, ge=0, description="Weight of answers whose label is true.")
    undesirable_weight: float = Field(1.0, ge=0, description="Weight of answers whose label is false.")
    reference: Local = Field("start", min_length=1, description=REFERENCE)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference's log-probabilities: always."""
        return True


def names_second_model(section: Dpo | Kto) -> bool:
    """Whether the reference is a model of its own, neither the start nor the base without adapters."""
    return section.needs_reference and section.reference not in ("start", "adapter_off")


LOSSES = {"sigmoid": "DPO", "robust": "robust DPO", "ipo": "IPO", "apo_zero": "APO-zero", "simpo": "SimPO"}
REFERENCES = {"start": "the model that the run started from", "adapter_off": "the base without adapters"}


def objective_in_words(section: Dpo | Kto) -> str:
    """The objective and its settings: DPO on pairs of answers, beta 0.1, against the base without adapters."""
    match section:
        case Dpo():
            words = f"{LOSSES[section.loss_type]} on pairs of answers, beta {section.beta:g}"
            if section.label_smoothing:
                words += f", label smoothing {section.label_smoothing:g}"
            if section.sft_weight:
                words += f", supervised loss of the chosen answers with weight {section.sft_weight:g}"
            if section.loss_type == "simpo":
                gamma = USUAL_MARGIN if section.simpo_gamma is None else section.simpo_gamma
                return f"{words}, gamma {gamma:g}, without a reference"
        case Kto():
            words = f"KTO on judged answers, beta {section.beta:g}"
            if (section.desirable_weight, section.undesirable_weight) != (1, 1):
                words += f", weights {section.desirable_weight:g} (wanted), {section.undesirable_weight:g} (unwanted)"
    return f"{words}, against {REFERENCES.get(section.reference, section.reference)}"


def is_own_reference(line: Mapping[str, Any]) -> bool:
    """Whether an evaluation before the first step found no reward, because the model is still its own reference."""
    return bool(line["step"] == 0) and abs(line.get("reward_margin") or 0.0) < NO_MARGIN


def too_far(line: Mapping[str, Any]) -> str:
    """A warning if these figures are farther from the reference than docs/preferences.md allows; else empty."""
    kl = line.get("kl_by_token")
    if kl is None or not kl > MOST_KL:
        return ""
    return f"KL by token {kl:.2f} is over {MOST_KL}: far from the reference, where other skills are lost"


def warnings_of(
    trained: Sequence[Mapping[str, Any]], exported: Mapping[str, Any] | None, rows: int = NO_CHANCE
) -> Iterator[str]:
    """Warnings of docs/preferences.md, from a run's training lines and its exported weights' evaluation.

    Args:
        rows: A step's rows; a line stands for one step or more.
    """
    last = exported or (trained[-1] if trained else {})
    if far := too_far(last):
        yield f"{far}. Divide the learning rate by 4, or raise beta."
    lines = max(AT_ONCE, -(-NO_CHANCE // rows))
    early = [line["reward_accuracy"] for line in trained[1 : 1 + lines] if line.get("reward_accuracy") is not None]
    if len(early) == lines and min(early) == 1:
        yield (
            f"Reward accuracy was 100 % from step {trained[1]['step']} on: the two sides may differ in something "
            "trivial, such as length or template. Compare them: finetune preview."
        )
    baselines = [line["kl"] for line in trained[1:] if "kl" in line]
    if len(baselines) >= AT_ONCE and not any(baselines):
        yield "The KL baseline was 0 in every step: every answer became less probable. Divide the learning rate by 4."
