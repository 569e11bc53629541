"""Four skills that the embedded model learns on two CPU cores, with scores before and after: docs/results.md.

    python benchmarks/skills.py                 train and score what is not in runs/ yet, then write the page
    python benchmarks/skills.py --table         learning rates and ranks on dates too (twelve trainings)
    python benchmarks/skills.py --page          write docs/results.md from benchmarks/results/skills.json alone

Rows of three skills come from data/skills; the fourth is the quickstart. The page names each training's command.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, write_result

ROOT = Path(__file__).resolve().parents[1]

SKILLS = {
    "dates": ("benchmarks/skills/dates.yaml", "Dates in many spellings to ISO 8601"),
    "sql": ("benchmarks/skills/sql.yaml", "Questions about a table to SQL"),
    "tools": ("benchmarks/skills/tools.yaml", "Requests to tool calls"),
    "devil": ("recipes/quickstart.yaml", "The voice of The Devil's Dictionary"),
}
RATES, RANKS, TABLE_STEPS = ("2e-4", "5e-4", "1e-3", "2e-3"), (4, 8, 32), 40
ALPHA = 2  # lora_alpha over r, as in recipes/
TABLE_WORDS = [
    "5e-4 and 1e-3 are better than 2e-4 at every rank, in loss and in answers. At rank 32 the intervals overlap",
    "(2e-4: 73 to 88 %, 5e-4: 82 to 95 %). 2e-3 is too much for rank 32. A run of 40 steps favours high rates, so the",
    "recipes' rates rest on a published sweep of 780 steps too ([Recipes](recipes.md#learning-rates)).",
]
SHOWN_ANSWERS = 4
PAGE = ROOT / "docs" / "results.md"


def finetune(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "finetune.cli.main", *words], cwd=ROOT, check=True)


def run_skill(name: str, recipe: str) -> dict[str, Any]:
    """Train and score, unless the run's folder has both. Returns the figures."""
    run = ROOT / "runs" / name
    if not (run / "adapter").is_dir():
        finetune("train", recipe, f"output_dir={run}")
    if not (run / "eval.json").is_file():
        finetune("eval", str(run), *(["--loss-only"] if name == "devil" else []))
    return figures_of(run)


def figures_of(run: Path) -> dict[str, Any]:
    """What the page shows of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    evaluated = json.loads((run / "eval.json").read_text("utf-8"))
    answers = []
    if (run / "eval_answers.jsonl").is_file():
        rows = [json.loads(line) for line in (run / "eval_answers.jsonl").read_text("utf-8").splitlines()]
        answers = [{key: row[key] for key in ("reference", "base", "tuned")} for row in rows[:SHOWN_ANSWERS]]
    else:
        samples = [json.loads(line) for line in (run / "samples.jsonl").read_text("utf-8").splitlines()]
        for before in (line for line in samples if line["when"] == "before"):
            after = next(line for line in samples if line["when"] == "after" and line["prompt"] == before["prompt"])
            answers.append({"reference": before["prompt"], "base": before["answer"], "tuned": after["answer"]})
    return {
        "steps": steps[-1]["step"],
        "minutes": sum(line["step_seconds"] for line in steps) / 60,
        "tokens": sum(line["tokens"] for line in steps),
        "losses": [[line["step"], round(line["loss"], 4)] for line in lines if line["kind"] == "eval"],
        "scores": evaluated.get("scores"),
        "general": evaluated.get("general", {}).get("all"),
        "answers": answers,
    }


def table() -> list[dict[str, Any]]:
    """Held-out loss and exact answers of dates by learning rate and rank, after TABLE_STEPS steps."""
    rows = []
    for rate in RATES:
        for rank in RANKS:
            run = ROOT / "runs" / f"dates_{rate}_{rank}"
            if not (run / "eval.json").is_file():
                words = [f"training.learning_rate={rate}", f"lora.r={rank}", f"lora.lora_alpha={ALPHA * rank}"]
                short = [f"training.max_steps={TABLE_STEPS}", "samples.count=0", "eval_steps=0.5", "save_steps=0.5"]
                finetune("train", SKILLS["dates"][0], *words, *short, f"output_dir={run}")
                finetune("eval", str(run))
            found = figures_of(run)
            exact = found["scores"]["metrics"]["exact"]["tuned"]
            rows.append({"rate": rate, "rank": rank, "loss": found["losses"][-1][1], "exact": exact})
    return rows


def percent(interval: dict[str, float]) -> str:
    return f"{interval['mean']:.0%} ({interval['low']:.0%} to {interval['high']:.0%})"


def page(result: dict[str, Any]) -> str:
    """docs/results.md."""
    lines = [
        "# Results",
        "",
        "Four skills that SmolLM2-135M learns on two CPU cores, trained and scored by `python benchmarks/skills.py`.",
        "Rows are held out: no question was trained on. Answers are greedy. Intervals: 95 % bootstraps over 100 rows.",
        "Minutes are the steps' wall time. SQL and dates were trained beside other work, which about doubles it.",
        "",
        "| skill | metric | before | after | training |",
        "|---|---|---|---|---|",
    ]
    for name, (_, title) in SKILLS.items():
        if name not in result["skills"]:
            continue
        run = result["skills"][name]
        time = f"{run['steps']} steps, {run['minutes']:.1f} minutes"
        for metric, each in ((run["scores"] or {}).get("metrics") or {}).items():
            lines.append(f"| {title} | `{metric}` | {percent(each['base'])} | {percent(each['tuned'])} | {time} |")
        if not run["scores"]:
            before, after = run["losses"][0][1], run["losses"][-1][1]
            lines.append(f"| {title} | held-out loss | {before:.2f} | {after:.2f} | {time} |")
    for name, (recipe, title) in SKILLS.items():
        if name not in result["skills"]:
            continue
        run = result["skills"][name]
        lines += ["", f"## {title}", "", "```bash"]
        if name != "devil":
            lines.append("python -m data.skills runs/skills")
        lines += [f"finetune train {recipe} output_dir=runs/{name}", f"finetune eval runs/{name}", "```", ""]
        losses = ", ".join(f"{loss:.3f} (step {step})" for step, loss in run["losses"])
        lines += [f"![Loss of every step](pictures/skill_{name}.png)", ""]
        lines += [f"Held-out loss: {losses}. {run['tokens']:,} tokens.", ""]
        heading = "prompt" if not run["scores"] else "the data says"
        lines += [f"| {heading} | before | after |", "|---|---|---|"]
        for row in run["answers"]:
            lines.append(f"| {cell(row['reference'])} | {cell(row['base'])} | {cell(row['tuned'])} |")
    if result.get("table"):
        lines += [
            "",
            "## Learning rate and rank",
            "",
            f"Dates after {TABLE_STEPS} steps, `lora_alpha` twice the rank: exact answers and held-out loss.",
            "",
            "| learning rate | " + " | ".join(f"r {rank}" for rank in RANKS) + " |",
            "|---|" + "---|" * len(RANKS),
        ]
        for rate in RATES:
            found = [row for row in result["table"] if row["rate"] == rate]
            cells = [f"{row['exact']['mean']:.0%}, {row['loss']:.3f}" for row in found]
            lines.append(f"| {rate} | {' | '.join(cells)} |")
        lines += ["", *TABLE_WORDS]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """A text in a cell of a Markdown table."""
    shown = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return shown if len(shown) <= 160 else shown[:157] + "..."


def main() -> int:
    words = sys.argv[1:]
    if "--page" in words:
        result = json.loads((RESULTS / "skills.json").read_text("utf-8"))
    else:
        subprocess.run([sys.executable, "-m", "data.skills", "runs/skills"], cwd=ROOT, check=True)
        result = {"skills": {name: run_skill(name, recipe) for name, (recipe, _) in SKILLS.items()}}
        if "--table" in words:
            result["table"] = table()
        for name in SKILLS:
            shutil.copyfile(ROOT / "runs" / name / "loss.png", ROOT / "docs" / "pictures" / f"skill_{name}.png")
        print(write_result("skills", result))
    PAGE.write_text(page(result), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
