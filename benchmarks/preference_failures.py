"""How preference runs go wrong: four short DPO runs of the embedded model, drawn side by side for docs/preferences.md.

    python benchmarks/preference_failures.py            train what is not in runs/ yet, then draw
    python benchmarks/preference_failures.py --draw     draw from benchmarks/results/preference_failures.json alone

All go on from runs/answers (benchmarks/skills/answers.yaml) on the pairs of benchmarks/skills/shorter.yaml.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, write_result

from finetune.report.pictures import new_figure

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "preference_failures.png"
STEPS, PAIRS = 12, 48
# Run: what differs from the recipe, the label, the colour.
RUNS = {
    "right": ((), "learning rate 5e-5", "#2a7f4f"),
    "low": (("training.learning_rate=2e-6",), "2e-6: too low", "#888888"),
    "high": (("training.learning_rate=5e-4",), "5e-4: too high", "#b4451f"),
    "adapter_off": (("dpo.reference=adapter_off",), "5e-5, reference: adapter_off", "#3f6fb5"),
}
SHOWN = {
    "reward_margin": "margin",
    "logp_chosen_by_token": "log-probability of chosen answers, by token",
    "kl_by_token": "KL by token, from the reference",
}


def curve(name: str) -> list[dict[str, float]]:
    """The steps of one run, which is trained unless it is there."""
    run = ROOT / "runs" / f"preference_{name}"
    if not (run / "adapter").is_dir():
        words = [f"data.train.0.split=train[:{PAIRS}]", "data.eval=null", "samples.count=0", "save_steps=12"]
        command = [sys.executable, "-m", "finetune.cli.main", "train", "benchmarks/skills/shorter.yaml"]
        subprocess.run([*command, *words, *RUNS[name][0], f"output_dir={run}"], cwd=ROOT, check=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [
        {"step": line["step"], **{key: round(line[key], 4) for key in SHOWN}}
        for line in lines
        if line["kind"] == "train"
    ]


def draw(runs: dict[str, Any]) -> None:
    """The picture: a chart for each metric, a line for each run."""
    figure = new_figure(figsize=(11, 3.6))
    for place, (key, title) in enumerate(SHOWN.items(), 1):
        axes = figure.add_subplot(1, len(SHOWN), place)
        for name, (_, label, color) in RUNS.items():
            axes.plot(*zip(*((row["step"], row[key]) for row in runs[name]), strict=True), color=color, label=label)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    for axes, linear, ticks in ((figure.axes[0], 0.5, (-10, -1, 0, 1, 10)), (figure.axes[2], 0.1, (-1, 0, 0.1, 1))):
        axes.set_yscale("symlog", linthresh=linear)  # so that 0.35 is seen beside -17
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(PICTURE, dpi=110)


def main() -> int:
    if "--draw" in sys.argv[1:]:
        draw(json.loads((RESULTS / "preference_failures.json").read_text("utf-8"))["runs"])
        return 0
    runs = {name: curve(name) for name in RUNS}
    print(write_result("preference_failures", {"steps": STEPS, "pairs": PAIRS, "runs": runs}))
    draw(runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
