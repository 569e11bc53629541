"""finetune/train.py on a host of `two_hosts` that pulls its cable at a chosen moment: a phase, and one of its steps.

    python tests/support/stand_ins/cut_network.py RECIPE ...        with CUT_NETWORK=forward:5

The moment is rank 1's; of a save rank 0's, which alone writes under DDP. The cable stays unplugged: both hosts live,
and neither hears of the other. A collective waits for `timeout_seconds`, where it otherwise waits for half an hour at
least.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from finetune.launch import rendezvous
from finetune.train import process_main
from tests.support.runs.aimed_kills import Aim, Armed

CUT = "CUT_NETWORK"  # the environment variable with the phase and the step
CALL = 2  # of a save, after which the cable is pulled: in the middle of it


class Cutter(Armed):
    """Pulls the cable where `Armed` would kill, before the phase goes on."""

    def reached(self, phase: str) -> None:
        """A phase begins; if it is this one, its cable is pulled."""
        self.phase, aim = phase, self.aim
        if aim is not None and aim.place == phase != "save" and aim.step in (0, self.step):
            self.aim = None
            self.die()

    def die(self, call: int | None = None) -> None:
        """Say where, and pull it."""
        self.say({"cut": True, "phase": self.phase if call is None else "save", "step": self.step})
        subprocess.run(["ip", "link", "set", "cable", "down"], check=True)


def main() -> None:
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    place, _, step = os.environ[CUT].partition(":")
    aim = Aim(0 if place == "save" else 1, place, int(step or 0), call=CALL, before=False)
    run_dir = next(word.removeprefix("output_dir=") for word in sys.argv if word.startswith("output_dir="))
    rendezvous._TIMEOUT_SECONDS = 0
    Cutter(aim, rank, Path(f"{run_dir}.cut")).install()
    sys.exit(process_main())


if __name__ == "__main__":
    main()
