"""The soak that aims: its moments fit the run, and a run that is killed at them ends as one that nobody killed."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.runs.aimed_kills import PLACES, Schedule, draw_aim
from tests.support.runs.cells import ROOT

SCHEDULE = Schedule(steps=14, save_steps=3, eval_steps=4, calls=(21, 1))


def test_moments_are_of_the_steps_that_are_left() -> None:
    draw = random.Random(0)
    aims = [(newest, draw_aim(draw, SCHEDULE, newest)) for newest in (0, 3, 12, 14) for _ in range(500)]
    assert {aim.place for _, aim in aims} == PLACES.keys()
    for newest, aim in aims:
        assert aim.step == 0 or newest < aim.step <= 14
        assert newest < 14 or aim.place == "end"
        assert aim.place != "save" or aim.step in (3, 6, 9, 12, 14)
        assert aim.place != "evaluate" or aim.step in (4, 8, 12, 14)
        assert aim.call < SCHEDULE.calls[aim.rank]
    calls = Counter(aim.call for _, aim in aims if aim.place == "save" and aim.rank == 0)
    assert calls.keys() == set(range(21))


@pytest.mark.slow
def test_killed_at_each_of_them_it_is_the_same_run(tmp_path: Path) -> None:
    script = (
        "import json, sys; from pathlib import Path; from benchmarks import soak; soak.import_before_forking(); "
        "print(json.dumps(soak.soak(Path(sys.argv[1]), soak.How(1, 'single'), 6, 2)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"kills": 6' in done.stdout
    assert '"bitwise": true' in done.stdout
