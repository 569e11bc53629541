"""Many short trainings under one strategy and one launch: the cells of the table that strategies are held to.

    accelerate launch --config_file accelerate_configs/cpu_2proc.yaml tests/support/runs/cells.py RECIPE [RECIPE ...]

Starting the ranks takes ten times as long as a training of six steps, so a launch runs many.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PORTS = "CELL_PORTS"  # one for each training's process group
PORT_RANGE = (12_000, 32_000)
SETTINGS_OF_AN_ENGINE = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "FSDP_CPU_RAM_EFFICIENT_LOADING")


def launch(
    recipes: Sequence[Path],
    *,
    ranks: int,
    words: Sequence[str] = (),
    timeout: float = 240,
    program: str = "tests/support/runs/cells.py",
) -> list[int]:
    """Train the recipes one after another on so many gloo ranks; the exit code of each."""
    launcher = [sys.executable]
    if ranks > 1:
        config = ["--config_file", "accelerate_configs/cpu_2proc.yaml", "--num_processes", str(ranks)]
        launcher += ["-m", "accelerate.commands.launch", *config]
    done = subprocess.run(
        [*launcher, program, *map(str, recipes), *words],
        cwd=ROOT,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        | {PORTS: ",".join(map(str, free_ports(len(recipes))))},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    codes = [int(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("cell ")]
    told = f"{len(codes)} of {len(recipes)} trained\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    assert len(codes) == len(recipes), told
    return codes


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, outside the range from which the system gives them to gloo's connections."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(*PORT_RANGE), 50 + 2 * count):
        with socket.socket() as each, suppress(OSError):
            each.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"only {len(found)} of {count} free ports in {PORT_RANGE}")


def main(words: Sequence[str]) -> int:
    """For the ranks: train each recipe as the entrypoint would, and forget it before the next."""
    from accelerate.state import AcceleratorState

    from finetune.train import main as train

    recipes = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    for recipe, port in zip(recipes, os.environ[PORTS].split(","), strict=True):
        # The launcher's own store still knows the addresses of the group before.
        os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}
        said = Path(f"{recipe}.rank{os.environ.get('RANK', '0')}.said")
        with said.open("w", encoding="utf-8") as file, redirect_stderr(file):  # DeepSpeed asks stderr for its number
            code = train([recipe, *overrides])
        sys.stderr.write(said.read_text("utf-8"))
        AcceleratorState._reset_state(reset_partial_state=True)  # as accelerate's own tests do
        for name in SETTINGS_OF_AN_ENGINE:
            os.environ.pop(name, None)
        if os.environ.get("RANK", "0") == "0":
            print(f"cell {recipe} {code}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
