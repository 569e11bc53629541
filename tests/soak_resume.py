"""Kills a training with SIGKILL at random moments and resumes it, until it ends; then compares it with a run that
nobody killed: metrics (but for measured times), samples, adapter, weights and optimizer state must be bitwise equal.

    python tests/soak_resume.py --ranks 2 --kills 30

The libraries are imported once and each training is a fork, so that a kill costs the training and not the imports.
Moments are drawn over the whole life of a run: loading, stepping, evaluating, saving, exporting.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# One thread a rank: two that wait for each other on a busy machine are twenty times slower.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
import yaml

from finetune.durable import read_lines
from finetune.run_folder import read_state
from finetune.train import main as train
from tests.tiny import save_tiny, write_chats

# What a training imports, loaded before the forks.
HEAVY = "accelerate datasets peft finetune.batches finetune.checkpoint finetune.export finetune.loop finetune.model"
HEAVY += " finetune.optimizer finetune.receipt finetune.runtime"
MEASURED = {"step_seconds", "tokens_per_second", "data_wait_fraction", "peak_memory_gib"}


def write_recipe(folder: Path, *, steps: int, ranks: int) -> Path:
    """A tiny Llama with LoRA dropout, packed rows, recomputed layers, evaluations and samples."""
    recipe: dict[str, Any] = {
        "accelerate_config": "single" if ranks == 1 else "ddp",
        "model": {"name_or_path": str(save_tiny(folder / "base")), "dtype": "float32"},
        "lora": {"r": 4, "lora_dropout": 0.1},
        "data": {
            "train": [
                {"path": "json", "data_files": str(write_chats(folder / "chats.jsonl", [20, 45, 30, 60, 25] * 5))}
            ],
            "eval": {"fraction": 0.2},
            "max_length": 128,
        },
        "training": {
            "max_steps": steps,
            "global_batch_size": 4,
            "learning_rate": 1e-2,
            "mixed_precision": "no",
            "activation_checkpointing": True,
        },
        "samples": {"count": 1, "max_new_tokens": 4},
        "logging_steps": 2,
        "eval_steps": 4,
        "save_steps": 3,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def fork_ranks(recipe: Path, run_dir: Path, ranks: int) -> list[int]:
    """Starts one training, as a launcher would, on this machine; returns its processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [_fork_rank(recipe, run_dir, rank, ranks, port) for rank in range(ranks)]


def _fork_rank(recipe: Path, run_dir: Path, rank: int, ranks: int, port: int) -> int:
    process = os.fork()
    if process:
        return process
    try:
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
        log = os.open(run_dir.with_suffix(f".rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = train([str(recipe), f"output_dir={run_dir}"])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_all(processes: Sequence[int], seconds: float) -> list[int] | None:
    """Exit codes of all, or None when they still ran after `seconds`."""
    end = time.monotonic() + seconds
    codes: dict[int, int] = {}
    while time.monotonic() < end:
        for process in set(processes) - codes.keys():
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status)
        if len(codes) == len(processes):
            return [codes[process] for process in processes]
        time.sleep(0.002)
    return None


def kill(processes: Sequence[int]) -> None:
    """SIGKILL, all at once; those that have ended are no matter."""
    for process in processes:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for process in processes:
        try:
            os.waitpid(process, 0)
        except ChildProcessError:
            continue


def fingerprint(run_dir: Path) -> dict[str, Any]:
    """Everything of a finished run that must be bitwise equal."""
    lines = [
        {key: value for key, value in line.items() if key not in MEASURED}
        for line in read_lines(run_dir / "metrics.jsonl")
        if line["kind"] != "phase"
    ]
    state = read_state(run_dir)
    assert state is not None
    assert state["state"] == "finished", state
    last = max((run_dir / "checkpoints").glob("step-*"))
    files = sorted([*last.glob("*.safetensors"), *(run_dir / "adapter").glob("*"), run_dir / "samples.jsonl"])
    hashes = {str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return {"metrics": lines, "files": hashes}


def run_killed(recipe: Path, run_dir: Path, ranks: int, life: float, draw: random.Random) -> list[str]:
    """One run, killed again and again over its `life` in seconds until it ends; returns where it was killed."""
    killed_at: list[str] = []
    while True:
        processes = fork_ranks(recipe, run_dir, ranks)
        codes = wait_all(processes, draw.uniform(0.1 * life, life))
        if codes is None:
            kill(processes)
            saved = sorted(path.name for path in run_dir.glob("checkpoints/step-*"))
            killed_at.append(saved[-1] if saved else "before the first checkpoint")
            continue
        if codes != [0] * ranks:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(run_dir.parent.glob(f"{run_dir.name}.rank*")))
            raise AssertionError(f"exit codes {codes} after {len(killed_at)} kills\n{logs}")
        return killed_at


def soak(folder: Path, *, ranks: int, kills: int, steps: int, seed: int) -> dict[str, Any]:
    """Kills and resumes until `kills` kills were made; raises AssertionError at the first difference."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    recipe = write_recipe(folder, steps=steps, ranks=ranks)
    began = time.monotonic()
    codes = wait_all(fork_ranks(recipe, folder / "whole", ranks), 300)
    assert codes == [0] * ranks, (codes, (folder / "whole.rank0.log").read_text())
    began = time.monotonic()  # the second run finds the data prepared, as the killed ones do
    assert wait_all(fork_ranks(recipe, folder / "again", ranks), 300) == [0] * ranks
    life = time.monotonic() - began
    expected = fingerprint(folder / "whole")
    assert fingerprint(folder / "again") == expected, "two runs that nobody killed differ"
    draw = random.Random(seed)
    killed_at: list[str] = []
    runs = 0
    while len(killed_at) < kills:
        runs += 1
        run_dir = folder / f"killed-{runs}"
        killed_at += run_killed(recipe, run_dir, ranks, life, draw)
        found = fingerprint(run_dir)
        assert found["metrics"] == expected["metrics"], f"{run_dir}: metrics differ after {killed_at}"
        assert found["files"] == expected["files"], f"{run_dir}: files differ after {killed_at}"
    seconds = round(time.monotonic() - began, 1)
    return {"ranks": ranks, "kills": len(killed_at), "runs": runs, "seconds": seconds, "killed_at": killed_at}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in HEAVY.split():
        importlib.import_module(name)
    transformers.logging.set_verbosity_error()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    options = {"ranks": arguments.ranks, "kills": arguments.kills, "steps": arguments.steps, "seed": arguments.seed}
    print(json.dumps(soak(folder, **options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
