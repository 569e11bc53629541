"""Killed with SIGKILL at random moments and resumed, under every strategy: is it still the run that nobody killed?

    python benchmarks/resume.py            (half an hour on two cores; `--strategies fsdp2,zero3` for some)

Under each strategy five kills on the same ranks, which must leave metrics, samples, adapter, weights and optimizer
state bitwise the same; and two with the ranks changing at each attempt, from 2 to 1 and from 1 to 2, to 1e-5. Writes
benchmarks/results/resume.json after each strategy, and keeps what it has of the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import RESULTS, write_result
from tests.support.runs.curve_table import KILLED, config_of
from tests.support.runs.soak_resume import How, import_before_forking, soak

KILLS, KILLS_OF_OTHERS, STEPS = 5, 2, 14


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=",".join(KILLED))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    import_before_forking()
    file = RESULTS / "resume.json"
    found = json.loads(file.read_text("utf-8"))["strategies"] if file.is_file() else {}
    for strategy in arguments.strategies.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            own = How(KILLED[strategy], config_of(strategy, folder))
            kinds = {"same_ranks": ([own], KILLS)}
            if own.ranks > 1:
                kinds["other_ranks"] = ([own, How(1, "single")], KILLS_OF_OTHERS)
            results = {}
            for kind, (ways, kills) in kinds.items():
                place = folder / kind
                place.mkdir()
                results[kind] = soak(place, ways=ways, kills=kills, steps=STEPS, seed=arguments.seed)
        found[strategy] = results
        print(strategy, json.dumps(results), flush=True)
        write_result("resume", {"strategies": {key: found[key] for key in KILLED if key in found}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
