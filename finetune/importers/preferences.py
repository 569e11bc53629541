"""Preference training in other tools' words: losses, their settings, and what is computed otherwise here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from finetune.importers.foreign_config import ForeignConfig
from finetune.recipe.sections.preferences import USUAL_MARGIN, PairLoss

_OFFERED = get_args(PairLoss)
# TRL's losses that read label_smoothing; of these, robust alone is offered.
_SMOOTHED = ("robust",)


def carry_trl_losses(foreign: ForeignConfig, losses: str, weights: str, smoothing: str) -> None:
    """The section dpo from TRL's list of losses and their weights, by the tool's names for these keys.

    With loss_type: [sigmoid, sft] and loss_weights: [0.8, 0.4], loss_type is sigmoid and sft_weight 0.4 / 0.8.
    """
    names = foreign.names(losses) or ["sigmoid"]
    shares = foreign.get(weights, [1.0] * len(names))
    are_numbers = isinstance(shares, list) and all(
        isinstance(share, (int, float)) and not isinstance(share, bool) and share >= 0 for share in shares
    )
    if not are_numbers or len(shares) != len(names):
        foreign.refuse(weights, f"write a number for each loss, {len(names)} of them")
    compared = {name: share for name, share in zip(names, shares, strict=True) if name != "sft"}
    if len(compared) != 1 or not {*compared} < {*_OFFERED, ""} - {"simpo"}:
        offered = ", ".join(name for name in _OFFERED if name != "simpo")
        foreign.refuse(losses, f"one of {offered} is offered, with sft beside it; keep {foreign.tool} for others")
    ((name, share),) = compared.items()
    if not share:
        foreign.refuse(weights, f"the weight of {name} must be above 0")
    level = foreign.get(smoothing)
    if level and name == "sigmoid":
        reason = "conservative DPO in former versions of TRL, which is not offered, and without effect in TRL 1.16"
        foreign.leave(smoothing, "differs", f"{reason}; dpo.loss_type: robust is another loss for wrong labels")
    elif level and name not in _SMOOTHED:
        foreign.leave(smoothing, "same", f"{name} does not read it in TRL; robust does")
    elif level:
        foreign.write("dpo.label_smoothing", level, smoothing)
    elif name == "robust":
        foreign.write("dpo.loss_type", "sigmoid", f"{losses}: robust without {smoothing} is sigmoid")
    if name != "robust" or level:
        foreign.write("dpo.loss_type", name, foreign.origin(losses))
    if share != 1:
        reason = f"the weight of {name} is 1 here, and others count beside it; clipping alone sees the difference"
        foreign.leave(weights, "differs", reason)
    supervised = sum(weight for loss, weight in zip(names, shares, strict=True) if loss == "sft")
    if supervised:
        carry_supervised_part(foreign, weights if foreign.peek(weights) else losses, supervised / share)


def carry_supervised_part(foreign: ForeignConfig, key: str, weight: float, mean: str = "of a micro-batch") -> None:
    """dpo.sft_weight, and the line that says how its mean differs."""
    foreign.write("dpo.sft_weight", float(weight), key)
    reason = f"the supervised part is a mean over the step's chosen tokens here, there over those {mean}"
    foreign.leave(key, "differs", reason)


def carry_simpo(foreign: ForeignConfig, *, gamma: str = "simpo_gamma", alpha: str | None = None) -> None:
    """The section dpo for SimPO. `alpha`: TRL's key for the supervised part, which is 1 if it is not given."""
    foreign.write("dpo.loss_type", "simpo", "simpo")
    foreign.carry("dpo.simpo_gamma", gamma, default=USUAL_MARGIN)
    if alpha is None:
        return
    weight = foreign.get(alpha, 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or weight < 0:
        foreign.refuse(alpha, "write a number from 0 up")
    if weight:
        carry_supervised_part(foreign, alpha, weight)


def carry_judged(foreign: ForeignConfig, *, desirable: str, undesirable: str, micro_batch: str) -> None:
    """The section kto, and the line that says how its baseline differs."""
    foreign.carry("kto.desirable_weight", desirable, default=1.0)
    foreign.carry("kto.undesirable_weight", undesirable, default=1.0)
    reason = "the KL baseline is a mean over the step's rows here, each with the next row's answer; there over these"
    foreign.leave(micro_batch, "differs", reason, foreign.peek(micro_batch) or "not given")
    rows, origin = foreign.carried["training.global_batch_size"]
    if rows == 1:
        foreign.write("training.global_batch_size", 2, f"{origin}; kto takes two or more")
        foreign.leave(micro_batch, "differs", "a step has two rows here, so that each has another row's answer", 1)


def switch_off_dropout(foreign: ForeignConfig, origin: str) -> None:
    """lora.lora_dropout as trained: preference trainers switch all dropout off, adapters' too."""
    dropout, key = foreign.carried.get("lora.lora_dropout", (0.0, ""))
    if dropout:
        foreign.write("lora.lora_dropout", 0.0, origin)
        foreign.leave(key if foreign.peek(key) else "lora_dropout", "same", "all dropout is off there", dropout)


def leave_lengths_of_parts(foreign: ForeignConfig, keys: Sequence[str]) -> None:
    """Limits for a prompt or an answer alone, which are not offered."""
    for key in keys:
        if foreign.get(key):
            foreign.leave(key, "differs", "not limited by itself; data.max_length is prompt and answer together")
