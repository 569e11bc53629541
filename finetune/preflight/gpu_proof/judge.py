"""Is a training what it should be? Compares its curve, its checkpoints and its export with those of another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.files import read_lines
from finetune.preflight.gpu_proof.plan import PROOF_SAVED_AFTER, PROOF_STEPS, Bounds
from finetune.preflight.job import StepFailed
from finetune.wording import counted

Verdict = dict[str, Any]  # `seen`, one line, and the figures that it says


def train_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of every optimizer step of a run. Raises StepFailed where they are not one for each step."""
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if line["kind"] == "train"]
    steps = [line["step"] for line in lines]
    if steps != list(range(1, PROOF_STEPS + 1)):
        raise StepFailed(f"its metrics are of the steps {steps}, it trained 1 to {PROOF_STEPS}")
    return lines


def check_device(run_dir: Path, *, device: str, offloaded: bool, ranks: int) -> None:
    """Raises StepFailed where the run's receipt shows another device, or another place of the weights."""
    receipt = json.loads((run_dir / "receipt.json").read_text("utf-8"))
    asked = {"device": device, "weights on": "cpu" if offloaded else device, "processes": ranks}
    weights = ", ".join(receipt["sharding"]["weights_on"])
    ran = {"device": receipt["device"], "weights on": weights, "processes": receipt["world_size"]}
    wrong = [
        f"{key}: {asked[key]} was asked for, its receipt says {ran[key]}" for key in asked if asked[key] != ran[key]
    ]
    if wrong:
        raise StepFailed("; ".join(wrong))


def judge_reference(run_dir: Path) -> Verdict:
    """A reference has to learn, else every curve is alike. Raises StepFailed."""
    losses = [line["loss"] for line in train_lines(run_dir)]
    seen = f"loss {losses[0]:.4f} to {losses[-1]:.4f}"
    if not losses[-1] < 0.95 * losses[0]:
        raise StepFailed(f"{seen}: it did not learn")
    return {"seen": seen, "first_loss": losses[0], "last_loss": losses[-1]}


def judge_curve(run_dir: Path, other: Path, bounds: Bounds | None, *, after: int = 0) -> Verdict:
    """The largest relative differences of two runs' losses and gradient norms, of the steps after `after`.

    `bounds` None: no bit may differ. Raises StepFailed with the first step that is out of bounds.
    """
    ours, theirs = train_lines(run_dir)[after:], train_lines(other)[after:]
    found = Bounds(_apart(ours, theirs, "loss"), _apart(ours, theirs, "grad_norm"))
    limits = bounds or Bounds(0.0, 0.0)
    figures = {"loss": found.loss, "loss_bound": limits.loss, "norm": found.norm, "norm_bound": limits.norm}
    if found.loss <= limits.loss and found.norm <= limits.norm:
        return {"seen": _within(found, bounds), **figures}
    for mine, other_line in zip(ours, theirs, strict=True):
        one = Bounds(_apart([mine], [other_line], "loss"), _apart([mine], [other_line], "grad_norm"))
        if one.loss > limits.loss or one.norm > limits.norm:
            values = f"loss {mine['loss']:.6g} and {other_line['loss']:.6g}, "
            values += f"gradient norm {mine['grad_norm']:.6g} and {other_line['grad_norm']:.6g}"
            raise ProofFailed(f"step {mine['step']}: {values}; {_within(found, bounds)}", figures)
    raise AssertionError("one step is as far apart as all of them")


class ProofFailed(StepFailed):
    """A proof whose figures are out of bounds."""

    def __init__(self, reason: str, figures: Verdict) -> None:
        super().__init__(reason)
        self.figures = figures


def _within(found: Bounds, bounds: Bounds | None) -> str:
    if bounds is None:
        apart = f"losses {found.loss:.1e} and norms {found.norm:.1e} apart where no bit may differ"
        return "bitwise" if found == (0.0, 0.0) else apart
    return f"losses {found.loss:.1e} apart (bound {bounds.loss:.0e}), norms {found.norm:.1e} (bound {bounds.norm:.0e})"


def _apart(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], key: str) -> float:
    """The largest relative difference; infinite where a number is not finite."""
    pairs = [(mine[key], other[key]) for mine, other in zip(ours, theirs, strict=True)]
    found = [abs(mine - other) / abs(other) for mine, other in pairs]
    return max(each if each == each else float("inf") for each in found)


def judge_resumed(run_dir: Path, whole: Path, bounds: Bounds | None) -> Verdict:
    """A run that was resumed after PROOF_SAVED_AFTER, against the uninterrupted one. Raises StepFailed."""
    _check_resumed(run_dir, whole, PROOF_SAVED_AFTER)
    verdict = judge_curve(run_dir, whole, bounds, after=PROOF_SAVED_AFTER)
    differing, total = _differing_tensors(run_dir, whole)
    verdict |= {"differing_tensors": differing, "tensors": total}
    if bounds is None and differing:
        raise ProofFailed(f"{differing} of {counted(total, 'tensor')} of the last checkpoint differ", verdict)
    same = f"{total - differing} of {counted(total, 'tensor')} of the last checkpoint bitwise"
    return verdict | {"seen": f"steps {PROOF_SAVED_AFTER + 1} to {PROOF_STEPS}: {verdict['seen']}; {same}"}


def judge_exported(run_dir: Path, whole: Path) -> Verdict:
    """A run that only had to export, against the uninterrupted one: the same files. Raises StepFailed."""
    _check_resumed(run_dir, whole, PROOF_STEPS)
    files = sorted((whole / "model").glob("*.safetensors"))
    if not files:
        raise StepFailed("the uninterrupted run exported no weights")
    for file in files:
        if (run_dir / "model" / file.name).read_bytes() != file.read_bytes():
            raise StepFailed(f"{file.name} of the two exports differ")
    return {"seen": f"{counted(len(files), 'file')} of weights, bitwise", "files": len(files)}


def _check_resumed(run_dir: Path, whole: Path, step: int) -> None:
    """Raises StepFailed where a run started over: it then measured the seconds of its first steps itself."""
    if train_lines(run_dir)[:step] != train_lines(whole)[:step]:
        raise StepFailed(f"it was to resume from step {step}, and trained the steps before it again")


def _differing_tensors(run_dir: Path, whole: Path) -> tuple[int, int]:
    """Of the newest checkpoints: tensors of model and optimizer that are not the same to the bit, and all of them."""
    import torch

    from finetune.run_folder.checkpoint import newest_valid, read_checkpoint  # with torch

    found = []
    for folder in (run_dir, whole):
        checkpoint, damaged = newest_valid(folder)
        if checkpoint is None or checkpoint.step != PROOF_STEPS:
            raise StepFailed(f"there is no whole checkpoint of step {PROOF_STEPS}{'; '.join(['', *damaged])}")
        groups, _ = read_checkpoint(checkpoint)
        found.append({(group, name): value for group, named in groups.items() for name, value in named.items()})
    mine, theirs = found
    if mine.keys() != theirs.keys():
        raise StepFailed(f"the checkpoints hold different tensors: {sorted(mine.keys() ^ theirs.keys())[0]}")
    return sum(not torch.equal(mine[key], theirs[key]) for key in mine), len(mine)
