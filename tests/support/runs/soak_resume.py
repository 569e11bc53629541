"""Kills a training with SIGKILL at random moments and resumes it, until it ends; then compares it with a run that
nobody killed: metrics (but for measured times), samples, adapter, weights and optimizer state must be bitwise equal.

    python tests/support/runs/soak_resume.py --ways 2:ddp --kills 30              bitwise
    python tests/support/runs/soak_resume.py --ways 2:fsdp2,1:single --kills 5    on other ranks each time, to 1e-5
    python tests/support/runs/soak_resume.py --disk-seconds 0.3                   each file of a checkpoint takes that

The libraries are imported once and each training is a fork, so that a kill costs the training and not the imports.
Moments are drawn over the whole life of a run: loading, stepping, evaluating, saving, exporting. On a slow disk most
of them are in the middle of a checkpoint, which is written in the background.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# One thread a rank: two that wait for each other on a busy machine are twenty times slower.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
import transformers
from accelerate.state import AcceleratorState

from finetune.files import TEMPORARY_PREFIX, read_lines
from finetune.run_folder import checkpoint
from finetune.run_folder.facts import read_state
from finetune.train import main as train
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.cells import free_ports
from tests.support.runs.recipes import tiny, write_recipe
from tests.support.runs.saving import slow

# What a training imports, loaded before the forks.
HEAVY = "accelerate datasets peft finetune.tokens.batches finetune.run_folder.checkpoint finetune.model.build"
HEAVY += " finetune.model.optimizer finetune.strategies.receipt finetune.strategies.accelerator"
HEAVY += " finetune.run_folder.save_restore finetune.training.loop finetune.training.session"
WRITING = ", writing the next"
MEASURED = {"step_seconds", "tokens_per_second", "data_wait_fraction", "peak_memory_gib"}


def write_resume_recipe(folder: Path, *, steps: int, dropout: float, layers: int = 2) -> Path:
    """A tiny Llama with LoRA dropout, packed rows, recomputed layers, evaluations and samples."""
    base, chats = (
        save_tiny(folder / "base", num_hidden_layers=layers),
        write_chats(folder / "chats.jsonl", [20, 45, 30, 60, 25] * 5),
    )
    training = {"max_steps": steps, "global_batch_size": 4, "learning_rate": 1e-3, "activation_checkpointing": True}
    content: dict[str, Any] = {
        "lora": {"r": 4, "lora_dropout": dropout},
        "data": {"eval": {"fraction": 0.2}, "max_length": 128},
        "training": training,
        "samples": {"count": 1, "max_new_tokens": 4},
        "logging_steps": 2,
        "eval_steps": 4,
        "save_steps": 3,
    }
    return write_recipe(folder, tiny(base, chats, **content))


class How(NamedTuple):
    """How an attempt is launched."""

    ranks: int
    strategy: str


def fork_ranks(
    recipe: Path, run_dir: Path, ranks: int, strategy: str, armed: Callable[[int], None] = lambda rank: None
) -> list[int]:
    """Starts one training, as a launcher would, on this machine; returns its processes. Each calls `armed` first."""
    assert not hasattr(torch, "pretend"), "a planner's trace was here, with threads that a fork does not survive"
    port = free_ports(1)[0]
    return [_fork_rank(recipe, run_dir, rank, ranks, port, strategy, armed) for rank in range(ranks)]


def _fork_rank(
    recipe: Path, run_dir: Path, rank: int, ranks: int, port: int, strategy: str, armed: Callable[[int], None]
) -> int:
    process = os.fork()
    if process:
        return process
    try:
        AcceleratorState._reset_state(reset_partial_state=True)  # of a training that this process ran before
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
        log = os.open(run_dir.with_suffix(f".rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        armed(rank)
        code = train([str(recipe), f"output_dir={run_dir}", f"accelerate_config={strategy}"])
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_all(processes: Sequence[int], seconds: float, *, until_killed: bool = False) -> list[int] | None:
    """Exit codes of all, or None when they still ran after `seconds`; `until_killed`: or as soon as one was killed."""
    end = time.monotonic() + seconds
    codes: dict[int, int] = {}
    while time.monotonic() < end:
        for process in set(processes) - codes.keys():
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status)
        if until_killed and min(codes.values(), default=0) < 0:
            return None
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
    # No samples under a pipeline.
    files = sorted([*last.glob("*.safetensors"), *(run_dir / "adapter").glob("*"), *run_dir.glob("samples.jsonl")])
    hashes = {str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return {"metrics": lines, "files": hashes}


def run_killed(recipe: Path, run_dir: Path, how: Callable[[int], How], life: float, draw: random.Random) -> list[str]:
    """One run, killed again and again until it ends; returns where it was killed: the newest checkpoint, and WRITING
    where the next one was being written.

    `how` gives each attempt's ranks and strategy, `life` is the seconds of an attempt that nobody kills.
    """
    killed_at: list[str] = []
    while True:
        processes = fork_ranks(recipe, run_dir, *how(len(killed_at)))
        codes = wait_all(processes, draw.uniform(0.05, 0.9) * life)
        if codes is None:
            kill(processes)
            saved = sorted(path.name for path in run_dir.glob("checkpoints/step-*"))
            reached = saved[-1] if saved else "before the first checkpoint"
            reached += WRITING * any(run_dir.glob(f"checkpoints/{TEMPORARY_PREFIX}step-*"))
            again = killed_at and killed_at[-1].removesuffix(WRITING) == reached.removesuffix(WRITING)
            life *= 1.3 if again else 1  # or it would never end where the machine has become busy
            killed_at.append(reached)
            continue
        if set(codes) != {0}:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(run_dir.parent.glob(f"{run_dir.name}.rank*")))
            raise AssertionError(f"exit codes {codes} after {len(killed_at)} kills\n{logs}")
        return killed_at


def run_whole(recipe: Path, run_dir: Path, how: How) -> float:
    """A run that nobody kills; returns its seconds."""
    began = time.monotonic()
    codes = wait_all(fork_ranks(recipe, run_dir, *how), 300)
    assert codes == [0] * how.ranks, (codes, run_dir.with_suffix(".rank0.log").read_text())
    return time.monotonic() - began


def soak(folder: Path, *, ways: Sequence[How], kills: int, steps: int, seed: int) -> dict[str, Any]:
    """Kills and resumes until `kills` kills were made; raises AssertionError at the first difference.

    With several `ways` the attempts take them in turn. Then dropout is off, because its masks are each rank's own, and
    metrics are compared to 1e-5; else bitwise.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    bitwise = len(ways) == 1
    layers = 4 if any("interleaved" in way.strategy for way in ways) else 2  # each of two stages has two runs of them
    recipe = write_resume_recipe(folder, steps=steps, dropout=0.1 if bitwise else 0.0, layers=layers)
    began = time.monotonic()
    run_whole(recipe, folder / "whole", ways[0])
    life = run_whole(recipe, folder / "again", ways[-1])  # finds the data prepared, as the killed ones do
    expected = fingerprint(folder / "whole")
    same(fingerprint(folder / "again"), expected, bitwise=bitwise)
    draw = random.Random(seed)
    killed_at: list[str] = []
    runs = 0
    while len(killed_at) < kills:
        runs += 1
        run_dir = folder / f"killed-{runs}"
        killed_here = run_killed(recipe, run_dir, lambda attempt: ways[attempt % len(ways)], life, draw)
        killed_at += killed_here
        life *= 1 if killed_here else 0.8  # the machine has become idle: most runs would end before they are killed
        same(fingerprint(run_dir), expected, bitwise=bitwise)
    seconds = round(time.monotonic() - began, 1)
    told = [f"{way.ranks} x {Path(way.strategy).stem}" for way in ways]
    writing = sum(place.endswith(WRITING) for place in killed_at)
    counts = {"kills": len(killed_at), "kills_while_writing": writing, "runs": runs}
    return {"ways": told, **counts, "seconds": seconds, "killed_at": killed_at}


def same(found: dict[str, Any], expected: dict[str, Any], *, bitwise: bool) -> None:
    """Raises AssertionError where two runs differ."""
    if bitwise:
        for key in ("metrics", "files"):
            assert found[key] == expected[key], differences(found[key], expected[key])
        return
    assert len(found["metrics"]) == len(expected["metrics"])
    for left, right in zip(found["metrics"], expected["metrics"], strict=True):
        assert left.keys() == right.keys()
        for key, value in left.items():
            close = value == right[key] or math.isclose(value, right[key], rel_tol=1e-5)
            assert close, (left["step"], key, value, right[key])


def differences(found: Any, expected: Any) -> list[Any]:
    """What an assertion tells of two fingerprints."""
    if isinstance(found, dict):
        return [key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)]
    pairs = zip(found, expected, strict=False)
    return [pair for pair in pairs if pair[0] != pair[1]][:3] or [len(found), len(expected)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="1:single", help="RANKS:STRATEGY, and others after commas to take turns")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disk-seconds", type=float, default=0.0, help="of each file of a checkpoint")
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    pairs = [way.split(":", 1) for way in arguments.ways.split(",")]
    ways = [How(int(ranks), strategy) for ranks, strategy in pairs]
    import_before_forking()
    if arguments.disk_seconds:
        checkpoint.save_file = slow(arguments.disk_seconds)
    folder = arguments.folder or Path(tempfile.mkdtemp())
    print(json.dumps(soak(folder, ways=ways, kills=arguments.kills, steps=arguments.steps, seed=arguments.seed)))
    return 0


def import_before_forking() -> None:
    """What a training imports, once for all of them; and one thread, for more do not survive a fork."""
    torch.set_num_threads(1)
    for name in HEAVY.split():
        importlib.import_module(name)
    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    sys.exit(main())
