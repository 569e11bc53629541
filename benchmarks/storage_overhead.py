"""What run.storage costs a training: seconds of a step between saves, and of a save, with a storage and without.

    python benchmarks/storage_overhead.py --every 10 --pairs 5     (five minutes)

Needs the extra `storage` and moto[server]. A model of 2M parameters is trained fully, with a checkpoint of 20 MB
every so many steps, four in all. Runs without a storage, with a folder and with S3 on the loopback take turns in a
drawn order, each in a process of its own; the S3 server is another process, on the same cores. The figure is the median
over the turns of the ratio of median steps. `save seconds` is how long the training waits at a save: it is not in a
step's time. Writes benchmarks/results/storage_overhead.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import RESULTS, write_result
from finetune.files import read_lines
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.cells import free_ports
from tests.support.runs.recipes import tiny, write_recipe
from tests.support.runs.soak_resume import fork_ranks, import_before_forking

SAVES = 4


@contextmanager
def s3_server() -> Iterator[None]:
    """A loopback S3 in another process, with the bucket `runs`; this process's variables lead to it."""
    port = free_ports(1)[0]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        make = "import boto3; boto3.client('s3').create_bucket(Bucket='runs')"
        subprocess.run([sys.executable, "-c", make], check=True)
        yield
    finally:
        server.terminate()
        server.wait()


def train(folder: Path, recipe: Path, storage: str | None, every: int) -> dict[str, float]:
    """One training. Returns the median step, the mean save, and the process's seconds of CPU."""
    content = json.loads(recipe.read_text()) | {"run": {"storage": storage}}
    own = folder / "own.yaml"
    own.write_text(json.dumps(content))
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    waits = folder / "waits"
    waits.unlink(missing_ok=True)

    def armed(rank: int) -> None:
        from finetune.training.run import Checkpoints

        save = Checkpoints.save

        def timed(checkpoints: Checkpoints, state: Any) -> None:
            began = time.perf_counter()
            save(checkpoints, state)
            with open(waits, "a") as file:
                file.write(f"{time.perf_counter() - began}\n")

        Checkpoints.save = timed  # type: ignore[method-assign]

    (process,) = fork_ranks(own, run, 1, "single", armed)
    _, status, used = os.wait4(process, 0)
    assert status == 0, run.with_suffix(".rank0.log").read_text()[-2000:]
    lines = read_lines(run / "metrics.jsonl")
    # The first ones are slower, and a step after a save shares the processor with the writer of the checkpoint.
    steps = [line["step_seconds"] for line in lines if line["kind"] == "train" and line["step"] > every]
    saves = [float(line) for line in waits.read_text().split()]
    return {
        "step seconds": statistics.median(steps),
        "save seconds": statistics.median(saves),
        "CPU seconds": used.ru_utime + used.ru_stime,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    arguments = parser.parse_args()
    every, total = arguments.every, SAVES * arguments.every
    import_before_forking()
    with tempfile.TemporaryDirectory() as name, s3_server():
        folder = Path(name)
        base = save_tiny(folder / "base", hidden_size=192, intermediate_size=768, num_hidden_layers=3)
        chats = write_chats(folder / "chats.jsonl", [60, 45, 80, 60, 75] * 40)
        steps = {"max_steps": total, "global_batch_size": 2, "learning_rate": 1e-4, "activation_checkpointing": False}
        rest: dict[str, Any] = {"training": steps, "samples": {"count": 0}, "save_steps": every}
        rest |= {"logging_steps": 1, "measure_phases": False, "data": {"max_length": 256}}
        recipe = write_recipe(folder, tiny(base, chats, **rest))
        train(folder, recipe, None, every)  # tokenises
        runs: dict[str, list[dict[str, float]]] = {"off": [], "folder": [], "s3": []}
        for number in range(arguments.pairs):
            places = {"off": None, "folder": f"file://{folder}/store-{number}", "s3": f"s3://runs/overhead/{number}"}
            for kind, place in random.Random(number).sample(list(places.items()), len(places)):
                runs[kind].append(train(folder, recipe, place, every))
                print(number, kind, runs[kind][-1], flush=True)
    result: dict[str, Any] = {"runs": runs}
    for kind in ("folder", "s3"):
        for figure in ("step seconds", "CPU seconds"):
            ratios = [on[figure] / off[figure] for on, off in zip(runs[kind], runs["off"], strict=True)]
            result[f"{kind}, {figure}, median ratio"] = round(statistics.median(ratios), 4)
    for kind, each in runs.items():
        result[f"{kind}, save seconds"] = round(statistics.median(run["save seconds"] for run in each), 4)
    file = RESULTS / "storage_overhead.json"
    earlier = json.loads(file.read_text("utf-8"))["by_steps_between_saves"] if file.is_file() else {}
    write_result("storage_overhead", {"by_steps_between_saves": {**earlier, str(every): result}})
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
