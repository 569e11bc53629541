"""README's picture: the curves of a finished run, and its answers before and after.

`python benchmarks/readme_picture.py runs/quickstart` writes docs/pictures/quickstart.png.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "quickstart.png"
SMOOTHED_STEPS = 9  # the drawn training loss is a mean over so many steps, weighted by supervised tokens


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def smoothed(steps: list[dict[str, Any]]) -> list[float]:
    """The training loss: the mean of the last SMOOTHED_STEPS steps, by supervised token."""
    result = []
    for last in range(1, len(steps) + 1):
        window = steps[max(0, last - SMOOTHED_STEPS) : last]
        tokens = sum(step["supervised_tokens"] for step in window)
        result.append(sum(step["loss"] * step["supervised_tokens"] for step in window) / tokens)
    return result


def draw(run: Path) -> None:
    """Write the picture. Left: loss by step. Right: the first three prompts' answers."""
    metrics = lines_of(run / "metrics.jsonl")
    steps = [line for line in metrics if line["kind"] == "train"]
    evaluations = [line for line in metrics if line["kind"] == "eval"]
    figure, (curves, answers) = plt.subplots(1, 2, figsize=(11, 3.9), width_ratios=(1, 1.25), layout="constrained")
    curves.plot([step["step"] for step in steps], smoothed(steps), color="#4c78a8", label="training")
    curves.plot(
        [line["step"] for line in evaluations],
        [line["loss"] for line in evaluations],
        "o-",
        color="#f58518",
        label="held out",
    )
    for line in (evaluations[0], evaluations[-1]):
        curves.annotate(f"{line['loss']:.2f}", (line["step"], line["loss"]), (4, 6), textcoords="offset points")
    curves.set(xlabel="step", ylabel="loss per supervised token")
    curves.legend(frameon=False)
    curves.spines[["top", "right"]].set_visible(False)
    answers.axis("off")
    samples = lines_of(run / "samples.jsonl")
    prompts = list(dict.fromkeys(sample["prompt"] for sample in samples))[:3]
    height = 1.0
    for prompt in prompts:
        answers.text(0, height, prompt, weight="bold", va="top", fontsize=12)
        height -= 0.09
        for when, colour in (("before", "#777777"), ("after", "#f58518")):
            answer = next(each["answer"] for each in samples if each["prompt"] == prompt and each["when"] == when)
            wrapped = textwrap.wrap(f"{when}: {answer}", 66, max_lines=3, placeholder=" …")
            answers.text(0, height, "\n".join(wrapped), color=colour, va="top", fontsize=11)
            height -= 0.075 * len(wrapped) + 0.02
        height -= 0.05
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    print(PICTURE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    draw(parser.parse_args().run)
