"""A run that loses its machine again and again, and goes on in an empty folder from its storage alone.

    python benchmarks/soak_storage.py                     (resumable: run it again to go on; --fresh begins anew)
    python benchmarks/soak_storage.py --rounds 20 --minutes 10

Each round is one run of 14 steps in a chain of machines. A machine ends at a drawn moment, by SIGKILL or by the signal
that an engine sends (SIGTERM), and its folder is deleted. The next one starts in an empty folder. Uploads are slowed
down, so that most ends come while a checkpoint is on its way. After each end every checkpoint that the storage lists
is fetched and examined, byte by byte. The finished run must be bitwise the one that nobody ended; rounds on other ranks
and another strategy (`mixed`) to 1e-5. With the extra `storage` and moto[server] installed, `s3` is the same as
`same` on a loopback S3. In each round of `writers` two machines train at once: one must end with one line. Writes
benchmarks/results/soak_storage.json after each round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import RESULTS, write_result
from benchmarks.storage_overhead import s3_server
from finetune.errors import FinetuneError, Stopped
from finetune.files import read_lines
from finetune.run_folder.checkpoint import Checkpoint, examine
from finetune.storage import backends, journal
from finetune.storage.journal import newest_entry
from tests.support.runs.soak_resume import (
    How,
    fingerprint,
    fork_ranks,
    import_before_forking,
    run_whole,
    same,
    wait_all,
    write_resume_recipe,
)

STEPS = 14
ENDS_OF_A_RUN = 5
FILES = 12  # of a checkpoint and its run's records
SINGLE, OTHERS = [How(1, "single")], [How(1, "single"), How(2, "fsdp2"), How(2, "ddp")]
TAKEN = "has taken over this run", "writes there", "began at the same moment"


def slow_uploads(seconds: float) -> Callable[[int], None]:
    """In each rank that is started: each object takes `seconds` to arrive."""

    def slow(kind: Any) -> None:
        put = kind.put

        def slow_put(storage: Any, path: str, source: Path | bytes) -> None:
            if not path.startswith("lease"):
                time.sleep(seconds)
            put(storage, path, source)

        kind.put = slow_put

    def armed(rank: int) -> None:
        slow(backends.FolderStorage)
        slow(backends.ObjectStorage)

    return armed


def sends(url: str) -> bool:
    """Whether a checkpoint is on its way: the storage has files that belong to no entry yet."""
    names = backends.open_storage(url).names()
    entries = [name for name in names if name.endswith(".json") and not name.startswith("lease")]
    folders = [name for name in names if "." not in name]
    return bool(folders) and max(folders) > max(entries, default="")


def examine_storage(url: str, folder: Path) -> int:
    """The newest step that can be loaded; 0: none is listed. Raises AssertionError for a listed checkpoint that cannot
    be loaded."""
    storage = backends.open_storage(url)
    entry = newest_entry(storage)
    if entry is None:
        return 0
    for saved in entry.checkpoints:
        target = folder / f"step-{saved.step:08d}"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in saved.files:
            storage.get(saved.path(name), target / name)
        found = examine(target)
        assert isinstance(found, Checkpoint), (saved, found)
    return max((saved.step for saved in entry.checkpoints), default=0)


def wait_until(
    processes: list[int], codes: dict[int, int], seconds: float, condition: Callable[[], bool] = lambda: False
) -> bool:
    """Wait for all processes to end, or for a condition, or `seconds`. Adds exit codes; returns whether all ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not condition():
        for process in set(processes) - codes.keys():
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status)
        if len(codes) == len(processes):
            return True
        time.sleep(0.002)
    return False


def reached(run_dir: Path) -> int:
    """The last step in metrics.jsonl."""
    file = run_dir / "metrics.jsonl"
    lines = read_lines(file) if file.is_file() else []
    return max((line["step"] for line in lines), default=0)


def one_run(
    recipe: Path, folder: Path, url: str, ways: list[How], life: float, draw: random.Random, pace: float
) -> Counter[str]:
    """Train on one machine after another until the run is finished, in `folder`/last. Counts what happened.

    One in five ends comes at a drawn time, and one up to half a second after a drawn step. The other three come while
    a checkpoint is on its way.
    """
    counts = Counter[str]()
    text = json.loads(recipe.read_text()) | {"run": {"storage": url}}
    own, machine, newest = folder / "recipe.yaml", folder / "last", 0
    folder.mkdir()
    own.write_text(json.dumps(text))
    while True:
        shutil.rmtree(machine, ignore_errors=True)
        processes = fork_ranks(own, machine, *ways[counts["starts"] % len(ways)], slow_uploads(pace))
        counts["starts"] += 1
        codes = dict[int, int]()
        if counts["ends"] >= ENDS_OF_A_RUN:
            over = wait_until(processes, codes, 300.0)
        elif (kind := draw.random()) < 0.2:
            over = wait_until(processes, codes, draw.uniform(0.1, 0.8) * life)
        else:
            step = min(newest + draw.randint(1, 5), STEPS)
            over = wait_until(processes, codes, 300.0, lambda: reached(machine) >= step)  # noqa: B023  # called at once
            if kind < 0.4:
                over = over or wait_until(processes, codes, draw.uniform(0.0, 0.5))
            else:
                over = over or wait_until(processes, codes, 300.0, lambda: sends(url))
                over = over or wait_until(processes, codes, draw.uniform(0.0, FILES) * pace)
        if not over:
            number, sending = draw.choice((signal.SIGKILL, signal.SIGTERM)), sends(url)
            for process in set(processes) - codes.keys():
                os.kill(process, number)
            assert wait_until(processes, codes, 60.0), "it did not end"
            counts["ends"] += 1
            counts[number.name] += 1
            counts[f"{number.name} while sending"] += sending
            step = examine_storage(url, folder / "examined")
            assert step >= newest, (step, newest)
            newest = step
            counts["before the first checkpoint"] += step == 0
        found = set(codes.values())
        if found == {0}:
            return counts
        if over or not found <= {0, Stopped.exit_code, 1, -signal.SIGTERM, -signal.SIGKILL}:
            raise AssertionError(f"{found}\n" + "\n".join(log.read_text()[-1500:] for log in folder.glob("*.log")))


def two_writers(recipe: Path, folder: Path, pause: float, pace: float) -> Counter[str]:
    """Two machines train one run, the second from `pause` seconds after the first. One ends with one line."""
    folder.mkdir()
    own = folder / "recipe.yaml"
    own.write_text(json.dumps(json.loads(recipe.read_text()) | {"run": {"storage": f"file://{folder}/store"}}))
    first = fork_ranks(own, folder / "first", 1, "single", slow_uploads(pace))
    time.sleep(pause)
    second = fork_ranks(own, folder / "second", 1, "single", slow_uploads(pace))
    codes = wait_all([*first, *second], 300)
    assert codes is not None
    logs = {name: (folder / f"{name}.rank0.log").read_text() for name in ("first", "second")}
    if sorted(codes) == [0, 0]:  # the first had ended before the second asked
        return Counter({"no overlap": 1})
    assert sorted(codes) == [0, FinetuneError.exit_code], (codes, logs)
    loser = "first" if codes[0] else "second"
    told = [line for line in logs[loser].splitlines() if any(words in line for words in TAKEN)]
    assert len(told) == 1, logs[loser][-2000:]
    assert "Traceback" not in logs[loser]
    return Counter({"one ended with one line": 1})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="of `same`; half as many of the other kinds")
    parser.add_argument("--minutes", type=float, default=60.0, help="no round begins later")
    parser.add_argument("--seed", type=int, default=58)
    parser.add_argument("--fresh", action="store_true")
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    journal.RENEW_SECONDS, journal.WATCH_SECONDS = 0.3, 1.2  # 50 watches of 45 s would be most of the time
    import_before_forking()
    file, rounds = RESULTS / "soak_storage.json", dict[str, Mapping[str, int]]()
    if file.is_file() and not arguments.fresh:
        rounds = json.loads(file.read_text())["rounds"]
    began = time.monotonic()
    kinds = {"same": arguments.rounds, "mixed": arguments.rounds // 2, "writers": arguments.rounds // 2}
    if importlib.util.find_spec("s3fs") and importlib.util.find_spec("moto"):
        kinds["s3"] = arguments.rounds // 2
    planned = [(kind, number) for number in range(max(kinds.values())) for kind in kinds if number < kinds[kind]]
    with tempfile.TemporaryDirectory() as name, s3_server() if "s3" in kinds else nullcontext():
        folder, whole = Path(name), dict[str, tuple[Path, dict[str, Any], float]]()
        for kind, number in planned:
            if f"{kind} {number}" in rounds or time.monotonic() - began > 60 * arguments.minutes:
                continue
            mixed = kind == "mixed"
            if str(mixed) not in whole:
                (base := folder / f"base-{mixed}").mkdir()
                recipe = write_resume_recipe(base, steps=STEPS, dropout=0.0 if mixed else 0.1)
                run_whole(recipe, base / "whole", How(1, "single"))
                life = run_whole(recipe, base / "again", How(1, "single"))
                whole[str(mixed)] = recipe, fingerprint(base / "whole"), life
            recipe, expected, life = whole[str(mixed)]
            draw, place = random.Random(f"{arguments.seed} {kind} {number}"), folder / f"{kind}-{number}"
            pace = draw.choice((0.02, 0.05, 0.1))
            if kind == "writers":
                counts = two_writers(recipe, place, draw.uniform(0.0, life), pace)
            else:
                url = f"s3://runs/{number}-{time.time_ns()}" if kind == "s3" else f"file://{place}/store"
                counts = one_run(recipe, place, url, OTHERS if mixed else SINGLE, life, draw, pace)
                same(fingerprint(place / "last"), expected, bitwise=not mixed)
            rounds[f"{kind} {number}"] = dict(counts)
            totals = {
                kind: sum((Counter(found) for name, found in rounds.items() if name.startswith(kind)), Counter())
                for kind in kinds
            }
            shutil.rmtree(place)
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            write_result("soak_storage", {"totals": totals, "rounds": rounds})
            print(f"{kind} {number}: {dict(counts)}; {used.ru_utime + used.ru_stime:.0f} s of CPU", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
