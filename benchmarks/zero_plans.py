"""The plans that `python -m lectures zero` shows: six rows of GPT-2 Large on eight A100, each by a trace.

    python benchmarks/zero_plans.py            (minutes on two cores: ZeRO-3's layers are traced many at a time)

Writes lectures/zero/plans.json. Run it again when a change of the planner moves a figure.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from finetune.paths import CHECKOUT
from finetune.recipe.gpus import parse_gpus
from finetune.recipe.loader import load_recipe
from lectures.command import LECTURES
from lectures.zero.planned import PLANS, write_plans


def main() -> int:
    lecture = LECTURES["zero"]
    recipe = load_recipe(CHECKOUT / "recipes" / lecture.recipe, lecture.overrides).recipe
    gpus = parse_gpus(lecture.settings["gpus"])
    assert gpus is not None
    write_plans(recipe, gpus, lambda row: print(row, flush=True))
    print(PLANS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
