"""From a checker to a better model: SmolLM2-135M's own right answers to real questions, against answers kept at random.

    python benchmarks/checker.py               all tasks and seeds; goes on where it stopped
    python benchmarks/checker.py sums 1        one task's seed
    python benchmarks/checker.py --page        write results/checker.json and docs/results.md from runs/checker

A seed is three commands, and the same twice more: `sample --keep right`, `train`, `eval`. The control trains on as many
answers, kept at random from the same ones. Pairs of a right and a wrong answer follow, drawn by the model that learned
the right ones. General questions show what is forgotten: once for each kind of rows, and once with 5 % other rows.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import write_result
from finetune.cli.main import main as main_of_finetune
from finetune.scoring.intervals import interval, paired_interval
from finetune.wording import counted

ROOT = Path(__file__).resolve().parents[1]
RUNS = "runs/checker"
ROWS = "runs/real"
TASKS = {
    "sums": "Sums and differences of two numbers below 100",
    "three": "Sums and differences of three digits",
    "products": "Products of two numbers below 100",
}
SEEDS = (1, 2, 3)
ANSWERS, NEW_TOKENS = 8, 10  # to each prompt
TEMPERATURE = 0.7  # at 1 a model this small loses the thread
OTHER_SHARE = 0.05  # of other rows, in the mixed training
OTHER = "data/devils_dictionary.jsonl"
GENERAL_SEED = 1  # whose trainings answer the general questions
KINDS = ("right", "random", "pairs")  # a run's folder for each kind of rows


def finetune(*words: str) -> None:
    """A command, whose CPU seconds are added to RUNS/cpu_seconds.jsonl. A training gets a process of its own."""
    before = cpu_seconds()
    if words[0] == "train":
        subprocess.run([sys.executable, "-m", "finetune.cli.main", *words], cwd=ROOT, check=True)
    elif code := main_of_finetune(words):
        raise SystemExit(code)
    with (ROOT / RUNS / "cpu_seconds.jsonl").open("a", encoding="utf-8") as file:
        line = {"command": " ".join(["finetune", *words]), "cpu_seconds": round(cpu_seconds() - before, 1)}
        file.write(json.dumps(line) + "\n")


def cpu_seconds() -> float:
    """CPU seconds of this process and of its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def recipe_of(task: str) -> str:
    """The task's recipe, made from that of sums."""
    file = f"{RUNS}/{task}.yaml"
    text = (ROOT / "benchmarks/skills/checker.yaml").read_text("utf-8")
    (ROOT / file).write_text(text.replace(f"{ROWS}/sums", f"{ROWS}/{task}"), "utf-8")
    return file


def sample(source: str, data: str, folder: str, seed: int, *words: str) -> int:
    """Draw and keep. Returns the number of rows."""
    drawn = [
        "--n",
        str(ANSWERS),
        "--max-new-tokens",
        str(NEW_TOKENS),
        "--seed",
        str(seed),
        "--temperature",
        str(TEMPERATURE),
    ]
    finetune("sample", source, "--data", data, *drawn, *words, "-o", folder)
    return int(json.loads((ROOT / folder / "sample.json").read_text("utf-8"))["figures"]["rows"])


def train_and_score(recipe: str, run: str, seed: int, *words: str, general: bool = False) -> None:
    """Train and answer the held-out questions, unless the run's folder has both."""
    if not (ROOT / run / "adapter").is_dir():
        finetune("train", recipe, f"training.seed={seed}", f"output_dir={run}", *words)
    scored = ROOT / run / "eval.json"
    if not scored.is_file() or (general and "general" not in json.loads(scored.read_text("utf-8"))):
        finetune("eval", run, "--max-new-tokens", str(NEW_TOKENS), *(["--general"] if general else []))


def learn_right_ones(task: str, seed: int) -> None:
    """Draw answers, train on the right ones, and on as many at random."""
    recipe, at, prompts = recipe_of(task), f"{RUNS}/{task}_{seed}", f"{ROWS}/{task}.jsonl"
    count = sample(recipe, prompts, f"{at}/rows", seed)
    train_and_score(f"{at}/rows/recipe.yaml", f"{at}/right", seed)
    if not (ROOT / at / "control").is_dir():
        shutil.copytree(ROOT / at / "rows", ROOT / at / "control")
    sample(recipe, prompts, f"{at}/control", seed, "--keep", "all", "--per-prompt", "1")
    entry = {"path": f"{at}/control/rows.jsonl", "format": "messages", "split": f"train[:{count}]"}
    train_and_score(f"{at}/control/recipe.yaml", f"{at}/random", seed, f"data.train={json.dumps([entry])}")


def learn_pairs(task: str, seed: int) -> None:
    """The model that learned right answers draws new ones to other prompts, and learns from pairs."""
    at = f"{RUNS}/{task}_{seed}"
    sample(f"{at}/right", f"{ROWS}/{task}_second.jsonl", f"{at}/second", seed, "--keep", "pairs")
    train_and_score(f"{at}/second/recipe.yaml", f"{at}/pairs", seed)


def look_for_forgetting(task: str) -> None:
    """General questions, and a training with some other rows mixed in."""
    at = f"{RUNS}/{task}_{GENERAL_SEED}"
    count = int(json.loads((ROOT / at / "rows" / "sample.json").read_text("utf-8"))["figures"]["rows"])
    train_and_score(f"{at}/rows/recipe.yaml", f"{at}/right", GENERAL_SEED, general=True)
    rows = {"path": f"{at}/rows/rows.jsonl", "format": "messages"}
    other = {"path": OTHER, "format": "messages", "split": f"train[:{max(1, round(OTHER_SHARE * count))}]"}
    words = f"data.train={json.dumps([rows, other])}"
    train_and_score(f"{at}/rows/recipe.yaml", f"{at}/mixed", GENERAL_SEED, words, general=True)


def figures(task: str) -> dict[str, Any] | None:
    """A task's figures over its finished seeds. None if no seed has finished."""
    seeds, scores, before = [], {kind: [] for kind in KINDS}, []
    for seed in SEEDS:
        at = ROOT / RUNS / f"{task}_{seed}"
        done = [kind for kind in KINDS if (at / kind / "eval.json").is_file()]
        if not {"right", "random"} <= {*done}:
            continue
        found: dict[str, Any] = {"seed": seed}
        for kind in done:
            lines = [json.loads(line) for line in (at / kind / "eval_answers.jsonl").read_text("utf-8").splitlines()]
            right = [line["scores"]["number"][1] for line in lines]
            scores[kind].append(right)
            before = [line["scores"]["number"][0] for line in lines]
            found[kind] = sum(right) / len(right)
        for name, folder in (("drawn", "rows"), ("drawn_again", "second")):
            record = at / folder / "sample.json"
            drawn = json.loads(record.read_text("utf-8")).get("figures") if record.is_file() else None
            if drawn is not None:  # else its answers are still being written
                found[name] = {"rows": drawn["rows"], "pass_at": drawn["pass_at"]}
        seeds.append(found)
    if not seeds:
        return None
    # Each question's share over the seeds; resampled over questions, so another seed's draw is not in the interval.
    means = {kind: [sum(each) / len(some) for each in zip(*some, strict=True)] for kind, some in scores.items() if some}
    general = {}
    for kind in ("right", "mixed"):
        file = ROOT / RUNS / f"{task}_{GENERAL_SEED}" / kind / "eval.json"
        if file.is_file() and "general" in (found := json.loads(file.read_text("utf-8"))):
            general[kind] = found["general"]
    used = [json.loads(line) for line in (ROOT / RUNS / "cpu_seconds.jsonl").read_text("utf-8").splitlines()]
    return {
        "questions": len(before),
        "before": interval(before).as_json(),
        "seeds": seeds,
        "after": {kind: sum(each) / len(before) for kind, each in means.items()},
        "gained": paired_interval(before, means["right"]).as_json(),
        "checker": paired_interval(means["random"], means["right"]).as_json(),
        "pairs": pairs_gain(scores),
        "general": general,
        "cpu_minutes": sum(line["cpu_seconds"] for line in used if f"/{task}_" in line["command"]) / 60,
    }


def pairs_gain(scores: dict[str, list[list[float]]]) -> dict[str, Any] | None:
    """The gain of pairs over right answers, over the seeds that have both. None if no seed has both."""
    seeds = len(scores["pairs"])  # the first ones
    if not seeds:
        return None
    before, after = (
        [sum(each) / seeds for each in zip(*scores[kind][:seeds], strict=True)] for kind in ("right", "pairs")
    )
    return {"seeds": seeds, **paired_interval(before, after).as_json()}


def points(interval: dict[str, float]) -> str:
    """A difference of shares in points, with its interval."""
    mean, low, high = (100 * interval[key] for key in ("mean", "low", "high"))
    return f"{mean:+.0f} points ({low:+.0f} to {high:+.0f})"


def share(value: float) -> str:
    return f"{value:.0%}"


def sections(result: dict[str, Any]) -> list[str]:
    """The part of docs/results.md on rounds by a checker."""
    lines = [
        "",
        "## From a checker to a better model",
        "",
        f"SmolLM2-135M answers questions of reasoning-gym {ANSWERS} times at temperature {TEMPERATURE}, and trains on",
        "its own right answers ([how](checker.md)). The control trains on as many of the same answers, kept at random:",
        "a model that only learns the form of an answer gains by both. Pairs go on from the right answers, with new",
        "draws to other questions. Scores are of greedy answers to held-out questions (`number`). Differences are",
        "paired by question, with a 95 % bootstrap over questions of the seeds' mean. Seeds differ too: each is shown.",
        "Temperature and the example turn were chosen on training questions. Two others gave few usable answers.",
        "",
        "```bash",
        f"python benchmarks/real_rows.py {ROWS}     # questions, pinned by hash",
        "python benchmarks/checker.py             # goes on where it stopped",
        "```",
        "",
        "| task | start | right answers | control | by the checker | pairs add |",
        "|---|---|---|---|---|---|",
    ]
    for task, run in result["tasks"].items():
        added = "not run"
        if run["pairs"] is not None:
            added = points(run["pairs"]) + (
                f", {run['pairs']['seeds']} seeds" * (run["pairs"]["seeds"] < len(run["seeds"]))
            )
        before = f"{share(run['before']['mean'])} ({share(run['before']['low'])} to {share(run['before']['high'])})"
        lines.append(
            f"| {TASKS[task]} | {before} | {share(run['after']['right'])} | {share(run['after']['random'])} | "
            f"{points(run['checker'])} | {added} |"
        )
    for task, run in result["tasks"].items():
        lines += [
            "",
            f"{TASKS[task]}: {run['questions']} held-out questions, {run['cpu_minutes']:.0f} CPU minutes for "
            f"{counted(len(run['seeds']), 'seed')}. Against the start right answers gain {points(run['gained'])}.",
            "",
            f"| seed | pass@1 | pass@{ANSWERS} | rows | right answers | control | pairs | then |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for each in run["seeds"]:
            shown = [share(each["drawn"]["pass_at"][key]["mean"]) for key in ("1", str(ANSWERS))]
            shown += [str(each["drawn"]["rows"]), share(each["right"]), share(each["random"])]
            shown += [str(each["drawn_again"]["rows"]) if "drawn_again" in each else "-"]
            shown += [share(each["pairs"]) if "pairs" in each else "-"]
            lines.append(f"| {each['seed']} | {' | '.join(shown)} |")
        for kind, words in (("right", "After right answers"), ("mixed", f"With {share(OTHER_SHARE)} other rows")):
            if kind in run["general"]:
                asked = run["general"][kind]
                base, tuned = (round(asked["all"][model]["mean"] * asked["rows"]) for model in ("base", "tuned"))
                lines += [
                    "",
                    f"{words} (seed {GENERAL_SEED}): {tuned} of {asked['rows']} general questions, {base} before.",
                ]
    return lines


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    (ROOT / RUNS).mkdir(parents=True, exist_ok=True)
    if "--page" not in sys.argv:
        seeds = [int(word) for word in words if word.isdigit()] or SEEDS
        for task in [word for word in words if word in TASKS] or TASKS:
            for part in (learn_right_ones, learn_pairs):
                for seed in seeds:
                    part(task, seed)
            if GENERAL_SEED in seeds:
                look_for_forgetting(task)
    found = {task: each for task in TASKS if (each := figures(task)) is not None}
    print(write_result("checker", {"tasks": found}))
    return subprocess.run([sys.executable, "benchmarks/skills.py", "--page"], cwd=ROOT, check=True).returncode


if __name__ == "__main__":
    sys.exit(main())
