"""Killed at drawn steps and phases, and at each kind of disk call within a save, under every strategy, and resumed.

    python benchmarks/soak.py                            (half an hour on two cores)
    python benchmarks/soak.py --strategies ddp --kills 9 --seed 1

Each kill is a SIGKILL to one rank at a drawn moment: while it loads, in a step's forward, backward or update, in an
evaluation, at a call to the file system within a save (a file half written, a rename not done), or after the last step.
The other ranks are killed up to 0.3 s later, as a launcher would. The attempts take turns with a system clock that is
right, a day late, and a day early. A run is killed eight times, then left to end: its metrics, samples, adapter,
weights and optimizer state must be bitwise those of a run that nobody killed. Writes benchmarks/results/soak.json after
each strategy, and keeps what it has of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import RESULTS, write_result
from finetune.run_folder.checkpoint import checkpoint_steps
from tests.support.runs.aimed_kills import PLACES, Aim, Armed, Schedule, calls_of_saves, draw_aim, kills_of
from tests.support.runs.curve_table import RANKS, config_of
from tests.support.runs.soak_resume import (
    How,
    differences,
    fingerprint,
    fork_ranks,
    import_before_forking,
    kill,
    wait_all,
    write_resume_recipe,
)

STEPS, SAVE_STEPS, EVAL_STEPS = 14, 3, 4  # those of write_resume_recipe
KILLS_OF_A_RUN = 8
DAY = 86400.0
CLOCKS = (0.0, -DAY, DAY)
WAYS = {name: ranks for name, ranks in RANKS.items() if name not in ("fsdp2_grad_op", "zero3_nvme")} | {"1f1b": 2}


class Soak:
    """The runs of one strategy, in one folder."""

    def __init__(self, folder: Path, how: How, seed: int) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        self.folder, self.how, self.draw = folder, how, random.Random(seed)
        self.recipe = write_resume_recipe(folder, steps=STEPS, dropout=0.1)
        assert self._attempt("whole", None, 0.0), self._said("whole")
        self.expected = fingerprint(folder / "whole")
        calls = calls_of_saves(self._kills_file("whole"), how.ranks)
        self.schedule = Schedule(STEPS, SAVE_STEPS, EVAL_STEPS, calls)

    def run(self, name: str, kills: int) -> list[dict[str, Any]]:
        """One run, killed so often and then left to end; returns where. Raises AssertionError where it is another."""
        for attempt in range(4 * kills):
            found = kills_of(self._kills_file(name))
            aim = None
            if len(found) < kills:
                newest = max(checkpoint_steps(self.folder / name), default=0)
                aim = draw_aim(self.draw, self.schedule, newest)
            if self._attempt(name, aim, CLOCKS[attempt % len(CLOCKS)]):
                break
        ended = fingerprint(self.folder / name)
        for key in ("metrics", "files"):
            assert ended[key] == self.expected[key], (name, differences(ended[key], self.expected[key]))
        return kills_of(self._kills_file(name))

    def _attempt(self, name: str, aim: Aim | None, clock: float) -> bool:
        """Train until a rank is killed, or to the end: whether the end was reached."""
        run_dir = self.folder / name
        killed_before = len(kills_of(self._kills_file(name)))
        processes = fork_ranks(self.recipe, run_dir, *self.how, armed=self._armed(name, aim, clock))
        codes = wait_all(processes, 300, until_killed=True)
        time.sleep(self.draw.uniform(0, 0.3) if codes is None else 0)
        kill(processes)
        if codes is None:
            assert len(kills_of(self._kills_file(name))) > killed_before, f"{name} {aim}: not by its aim"
            return False
        assert set(codes) == {0}, (name, aim, codes, self._said(name))
        return True

    def _armed(self, name: str, aim: Aim | None, clock: float) -> Callable[[int], None]:
        def arm(rank: int) -> None:
            if clock:
                right = time.time
                time.time = lambda: right() + clock
            Armed(aim, rank, self._kills_file(name)).install()

        return arm

    def _kills_file(self, name: str) -> Path:
        return self.folder / f"{name}.kills"

    def _said(self, name: str) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob(f"{name}.rank*.log")))


def soak(folder: Path, how: How, kills: int, seed: int) -> dict[str, Any]:
    """Runs of one strategy until so many kills were made; each must end as one that nobody killed."""
    began = time.monotonic()
    runs, found = Soak(folder, how, seed), []
    count = 0
    while len(found) < kills:
        count += 1
        found += runs.run(f"run-{count}", min(KILLS_OF_A_RUN, kills - len(found)))
    phases = Counter(place["phase"] for place in found)
    order = [*PLACES, *sorted(phases.keys() - PLACES.keys())]
    return {
        "ranks": how.ranks,
        "runs": count,
        "kills": len(found),
        "before_the_last_step": sum(place["step"] < STEPS for place in found),
        "by_phase": {phase: phases[phase] for phase in order if phase in phases},
        "disk_calls_of_a_save": list(runs.schedule.calls),
        "disk_calls_hit": len({(place["rank"], place["call"]) for place in found if "call" in place}),
        "bitwise": True,
        "seconds": round(time.monotonic() - began, 1),
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=",".join(WAYS))
    parser.add_argument("--kills", type=int, default=28, help="of each strategy")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    import_before_forking()
    file = RESULTS / "soak.json"
    found = json.loads(file.read_text("utf-8"))["strategies"] if file.is_file() else {}
    for strategy in arguments.strategies.split(","):
        with tempfile.TemporaryDirectory() as name:
            how = How(WAYS[strategy], config_of(strategy, Path(name)))
            found[strategy] = soak(Path(name), how, arguments.kills, arguments.seed)
        print(strategy, json.dumps(found[strategy]), flush=True)
        found = {key: found[key] for key in WAYS if key in found}
        totals = {key: sum(row[key] for row in found.values()) for key in ("kills", "before_the_last_step", "runs")}
        totals["in_a_save"] = sum(row["by_phase"].get("save", 0) for row in found.values())
        write_result("soak", {"seed": arguments.seed, "totals": totals, "strategies": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
