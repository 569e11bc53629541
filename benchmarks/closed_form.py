"""The closed form against the trace on a grid of models, methods, strategies, lengths: how far apart, and how quick.

python benchmarks/closed_form.py [--points 240] [--again]      (half an hour on two cores, kept point by point)

Points are drawn with a fixed seed (tests/support/memory/closed_form_points.py). One that was traced before is not
traced again, unless --again says so, but its closed form is computed anew. `tests/closed_form/test_closed_form.py` does
so too and traces a few of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import RESULTS, write_result
from finetune.closed_form.estimate import unsupported
from finetune.model.known_configs import full_config
from tests.support.memory.closed_form_points import closed, key_of, points, recipe_of, traced

NAME = "closed_form"


def known() -> dict[str, dict[str, Any]]:
    try:
        return dict(json.loads((RESULTS / f"{NAME}.json").read_text("utf-8"))["points"])
    except (FileNotFoundError, ValueError):
        return {}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--points", type=int, default=240)
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    before = {} if arguments.again else known()
    found: dict[str, dict[str, Any]] = {}
    for point in points(arguments.points):
        recipe, gpus = recipe_of(point)
        if unsupported(recipe, full_config(point[0])[0], gpus) is not None:
            continue
        key = key_of(point)
        row = found[key] = (before.get(key) or traced(point)) | closed(point)
        off = row["closed_bytes"] / row["traced_bytes"] - 1
        print(f"{100 * off:+7.3f} %  {row['trace_seconds']:6.1f} s  {key}", flush=True)
        if key not in before:
            write(before | found)
    write(before | found)
    return 0


def write(found: dict[str, dict[str, Any]]) -> None:
    off = sorted(abs(row["closed_bytes"] / row["traced_bytes"] - 1) for row in found.values())
    summary = {"count": len(off), "worst": off[-1], "median": off[len(off) // 2]}
    write_result(NAME, {"what": "finetune plan: closed form against trace", **summary, "points": found})


if __name__ == "__main__":
    sys.exit(main())
