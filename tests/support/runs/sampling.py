"""A finished run whose answers often end by themselves, and questions for it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from finetune.files import write_json
from tests.support.models.tiny import CHATML, WORDS
from tests.support.runs.finished import finished_run

STOPS = {f"token {token}": token for token in range(300, 420)}  # almost a quarter of the vocabulary
SCORER = "def score(answer, reference, row):\n    return len(answer) % 3 == 0\n"


def sampled_run(folder: Path, base: Path, **sections: Any) -> Path:
    """The run, whose probe lets prompts share batches. Beside it are tasks.jsonl and check.py."""
    run = finished_run(folder, base, move=0.3, **sections)
    write_json(run / "receipt.json", {"probe": {"padding": {"same": True}}})
    conversation = {"templates": {"default": CHATML}, "date_string": "", "chat_template_kwargs": {}, "stops": STOPS}
    write_json(run / "conversation.json", conversation)
    draw = random.Random(0)
    rows = []
    for number in range(40):
        question = " ".join(draw.choices(WORDS, k=draw.randint(1, 9))) + f" {number}"
        turns = {"user": question, "assistant": draw.choice(WORDS)}
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns.items()]})
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (folder / "check.py").write_text(SCORER, "utf-8")
    return run
