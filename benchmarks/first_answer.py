"""A stopwatch: from a table of questions and answers to a tuned answer, by the commands that a user types.

python benchmarks/first_answer.py [FILE]        (six minutes on two quiet cores; default: data/faq_de.csv)

`finetune init FILE`, `finetune train`, `finetune chat --prompt`, each in a process of its own: wall and CPU seconds,
the held-out loss before and after, and how many held-out answers changed.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import scratch, write_result
from finetune.files import read_lines

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "Wie schwer ist die Stichsäge?"


def timed(words: list[str], folder: Path) -> dict[str, float | str]:
    """Run `finetune WORDS` in `folder`."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "finetune.cli.main", *words]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"command": " ".join(["finetune", words[0]]), "seconds": time.perf_counter() - began, "cpu_seconds": cpu}


def main() -> int:
    file = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "data" / "faq_de.csv").resolve()
    with scratch() as folder:
        steps = [timed(["init", str(file)], folder)]
        recipe = next(folder.glob("*.yaml"))
        steps.append(timed(["train", recipe.name], folder))
        run = next((folder / "runs").iterdir())
        steps.append(timed(["chat", str(run), "--prompt", QUESTION], folder))
        losses = [line["loss"] for line in read_lines(run / "metrics.jsonl") if line["kind"] == "eval"]
        answers: dict[str, dict[str, str]] = {}
        for line in read_lines(run / "samples.jsonl"):
            answers.setdefault(line["prompt"], {})[line["when"]] = line["answer"]
        exported = json.loads((run / "receipt.json").read_text("utf-8"))["export"]["loss"]
    result = {
        "what": "from a file to a tuned answer on the embedded model",
        "file": file.name,
        "steps": steps,
        "seconds": sum(float(step["seconds"]) for step in steps),
        "cpu_seconds": sum(float(step["cpu_seconds"]) for step in steps),
        "held_out_loss": {"before": losses[0], "after": exported},
        "answers_changed": sum(both["before"] != both["after"] for both in answers.values()),
        "answers": len(answers),
    }
    print(json.dumps(result, indent=2), write_result("first_answer", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
