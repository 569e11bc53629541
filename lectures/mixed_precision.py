"""The lecture `mixed-precision`: its six steps traced on a real model, and an overflow that the loss scale survives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from finetune.model.dtypes import dtype_name
from finetune.model.optimizer import make_optimizer
from finetune.planner import changed
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.report.pictures import COLOURS, new_figure
from finetune.training.cast_weights import CastWeights
from lectures.output import Chapter, LectureRequest, LectureResult, columns, whole_number
from lectures.real_model import RealModel, real_model

SIXTEEN_BITS = torch.float16
MOST_TRIES = 40  # a scale of 2^40 is halved to 1 in as many


@dataclass(frozen=True)
class Seen:
    """One weight in one of the six steps."""

    step: str
    tensor: str
    dtype: str
    value: float


@dataclass(frozen=True)
class Try:
    """One forward and backward under one loss scale."""

    scale: float
    loss: float
    infinite: int  # of the 16-bit gradients, those that are infinite or NaN
    gradients: int  # all of them
    skipped: bool
    scale_after: float
    weight_moved: bool


class Trace:
    """A model that is trained in float16 with float32 masters, and what one weight is in each step."""

    def __init__(self, real: RealModel, recipe: Recipe, scale: float) -> None:
        self.real, self.recipe = real, recipe
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        self.optimizer = make_optimizer(real.model, recipe)
        self.halves: dict[str, Tensor] = {}  # 16-bit gradients of the last backward, by the weight's name
        self.copies: dict[str, Tensor] = {}
        self._casts = CastWeights(real.model, SIXTEEN_BITS, self._noted)

    def _noted(self, name: str, copy: Tensor) -> None:
        self.copies[name] = copy
        copy.register_hook(partial(self._keep, name))

    def _keep(self, name: str, gradient: Tensor) -> None:
        self.halves[name] = gradient.detach().clone()

    def forward_and_backward(self) -> tuple[Tensor, Tensor]:
        """Steps 2 to 4: loss and scaled loss; 16-bit gradients are kept, float32 ones are in `.grad`."""
        with self._casts.cast():
            with torch.autocast("cpu", SIXTEEN_BITS):
                loss = self.real.mean_loss(self.real.steps[0][0])
            scaled = self.scaler.scale(loss)
            scaled.backward()
        return loss.detach(), scaled.detach()

    def update(self) -> bool:
        """Steps 5 and 6: unscale and update in float32; returns whether the scaler skipped the update."""
        self.scaler.unscale_(self.optimizer)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.scaler.get_scale() < before

    @property
    def count(self) -> int:
        """The 16-bit gradients of the last backward."""
        return sum(each.numel() for each in self.halves.values())

    @property
    def infinite(self) -> int:
        """Those of them that are infinite or NaN."""
        return sum(int((~each.isfinite()).sum()) for each in self.halves.values())

    @property
    def zeros(self) -> int:
        """Those of them that are 0."""
        return sum(int((each == 0).sum()) for each in self.halves.values())


def mixed_precision_lecture(asked: LectureRequest) -> LectureResult:
    """Raises FinetuneError, of the recipe; what loading its model raises."""
    power = whole_number(asked.settings, "scale")
    plain = {"lora": None, "quantization": None, "training.mixed_precision": "fp16", "training.pure_bf16": False}
    plain |= {"training.activation_checkpointing": False, "model.adapter": None, "training.optim": "adamw"}
    recipe = changed(load_recipe(asked.recipe, asked.overrides, here=True).recipe, plain)
    asked.note("reading the model")
    trace = Trace(real_model(recipe), recipe, 2.0**power)
    tries = _tries(trace, asked)
    seen, name = _six_steps(trace)
    lost = _lost_updates(trace, recipe.training.learning_rate)
    without = _without_scale(trace)
    facts = {
        "recipe": str(asked.recipe),
        "overrides": list(asked.overrides),
        "weight": name,
        "steps": [asdict(each) for each in seen],
        "tries": [asdict(each) for each in tries],
        "updates_lost": lost,
        "zero_without_scale": without,
    }
    sections = [_steps_section(seen, name), _overflow_section(tries), _why_section(lost, without, trace)]
    return LectureResult(sections, facts, partial(_draw, tries, seen))


def _tries(trace: Trace, asked: LectureRequest) -> list[Try]:
    """Steps on one batch until the scale is small enough and one update has been made."""
    tries: list[Try] = []
    parameter = next(iter(trace.real.model.parameters()))
    while not tries or (tries[-1].skipped and len(tries) < MOST_TRIES):
        scale, before = trace.scaler.get_scale(), parameter.detach().clone()
        asked.note(f"forward and backward with the loss times {scale:,.0f}")
        loss, _ = trace.forward_and_backward()
        infinite, count = trace.infinite, trace.count
        skipped = trace.update()
        moved = not torch.equal(before, parameter.detach())
        tries.append(Try(scale, loss.item(), infinite, count, skipped, trace.scaler.get_scale(), moved))
    return tries


def _six_steps(trace: Trace) -> tuple[list[Seen], str]:
    """The next step of the same model, watched at the weight whose 16-bit gradient is largest."""
    loss, scaled = trace.forward_and_backward()
    layers = {name: each for name, each in trace.halves.items() if ".layers." in name and each.dim() == 2}
    name = max(layers, key=lambda each: float(layers[each].abs().max()))
    place = int(layers[name].abs().argmax())
    master = trace.real.model.get_parameter(name)
    scale = trace.scaler.get_scale()

    def seen(step: str, tensor: str, of: Tensor) -> Seen:
        return Seen(step, tensor, dtype_name(of.dtype), of.detach().flatten()[place if of.dim() else 0].item())

    rows = [
        seen("1 master weight", "what the optimizer has", master),
        seen("2 16-bit copy", "what layers compute with", trace.copies[name]),
        seen("3 loss", "mean over supervised tokens", loss),
        seen(f"3 loss x {scale:,.0f}", "what backward begins with", scaled),
        seen("4 scaled gradient", "of the copy", trace.halves[name]),
    ]
    assert master.grad is not None
    rows.append(seen("4 the same, kept", "of the master", master.grad))
    trace.scaler.unscale_(trace.optimizer)
    rows.append(seen("5 unscaled gradient", f"divided by {scale:,.0f}", master.grad))
    trace.scaler.step(trace.optimizer)
    trace.scaler.update()
    moments = trace.optimizer.state[master]
    rows.append(seen("6 AdamW's moments", "running mean", moments["exp_avg"]))
    rows.append(seen("6 updated master", "what the optimizer has", master))
    trace.optimizer.zero_grad()
    return rows, name


def _lost_updates(trace: Trace, rate: float) -> dict[str, float]:
    """Share of weights that an update of `rate` would leave as they are, by the format they were kept in. AdamW's
    first updates are of about that size, whatever the gradient."""
    formats = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    count, lost = 0, dict.fromkeys(formats, 0)
    for parameter in trace.real.model.parameters():
        weight = parameter.detach()
        count += weight.numel()
        for name, dtype in formats.items():
            kept = weight.to(dtype)
            lost[name] += int(((kept.float() - rate).to(dtype) == kept).sum())
    return {name: each / count for name, each in lost.items()}


def _without_scale(trace: Trace) -> float:
    """Share of the 16-bit gradients that are 0 when the loss is not scaled."""
    trace.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    trace.forward_and_backward()
    trace.optimizer.zero_grad()
    return trace.zeros / trace.count


def _steps_section(seen: Sequence[Seen], name: str) -> Chapter:
    rows = [(each.step, each.tensor, each.dtype, f"{each.value:.6g}") for each in seen]
    lines = columns(("step", "tensor", "dtype", "value"), rows, left=3)
    return Chapter(f"The six steps, at one weight of {name}", lines, measured=True)


def _overflow_section(tries: Sequence[Try]) -> Chapter:
    rows = [
        (
            f"{number}",
            f"{each.scale:,.0f}",
            f"{each.loss:.4f}",
            f"{each.infinite:,}",
            "skipped" if each.skipped else "made",
            "yes" if each.weight_moved else "no",
            f"{each.scale_after:,.0f}",
        )
        for number, each in enumerate(tries, 1)
    ]
    head = ("try", "loss scale", "loss", "gradients not finite", "update", "weights moved", "next scale")
    return Chapter(
        "An overflow: the same batch until the scale fits",
        [*columns(head, rows), f"Of {tries[0].gradients:,} gradients."],
        measured=True,
    )


def _why_section(lost: Mapping[str, float], without: float, trace: Trace) -> Chapter:
    rate = trace.recipe.training.learning_rate
    rows = [(name, f"{100 * share:.1f}") for name, share in lost.items()]
    lines = [
        *columns((f"weights kept in; an update of {rate:g}", "is lost for, % of them"), rows),
        f"Without a loss scale {100 * without:.2f} % of the 16-bit gradients are 0.",
    ]
    return Chapter("Why masters are float32, and why the loss is scaled", lines, measured=True)


def _draw(tries: Sequence[Try], seen: Sequence[Seen], file: Path) -> None:
    """The six steps as boxes with their dtypes, and the tries under each scale."""
    figure = new_figure(figsize=(9.0, 6.5))
    top, bottom = figure.subplots(2, 1)
    for place, each in enumerate(seen):
        box = {"boxstyle": "round,pad=0.5", "fc": "white", "lw": 2}
        box["ec"] = COLOURS[1] if each.dtype == dtype_name(SIXTEEN_BITS) else COLOURS[0]
        text = f"{each.step}\n{each.tensor}\n{each.dtype}: {each.value:.4g}"
        top.text(place % 3, 2 - place // 3, text, ha="center", va="center", fontsize=10, bbox=box)
    top.set_xlim(-0.5, 2.5)
    top.set_ylim(-0.5, 2.6)
    top.axis("off")
    top.set_title("One weight through a step (orange: float16, blue: float32)", loc="left", fontsize=11)
    colours = [COLOURS[3] if each.skipped else COLOURS[2] for each in tries]
    bottom.set_yscale("symlog", linthresh=1)
    bars = bottom.bar(range(1, len(tries) + 1), [each.infinite for each in tries], 0.6, color=colours)
    bottom.bar_label(
        bars, [f"{each.infinite:,}\n{'skipped' if each.skipped else 'updated'}" for each in tries], fontsize=9
    )
    bottom.set_xticks(range(1, len(tries) + 1), [f"{each.scale:,.0f}" for each in tries], fontsize=8)
    bottom.set_xlabel("loss scale of the try")
    bottom.set_ylabel("gradients not finite")
    bottom.set_title("An overflow is found, its update skipped, the scale halved", loc="left", fontsize=11)
    bottom.margins(y=0.25)
    bottom.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)
