"""Runs a stranger's computation in a child process first, with limits on time and memory.

An input that passed is trusted by its hash from then on: an empty file in the cache folder's `trusted/`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from finetune.files import cache_folder
from finetune.output_stream import one_line
from finetune.wording import counted

WALL_SECONDS = 120  # for a child that waits, on a busy machine
TRUST = 1  # part of each hash: raise it when a limit or a program changes
# Limits are set after the child's imports, in addition to their use. No core is dumped.
_PRELUDE = """
import json, math, os, resource, sys
asked = json.loads(sys.stdin.read())
sys.path[:] = asked.pop("sys.path")
def limit():
    pages = int(open("/proc/self/statm").read().split()[0])
    memory = pages * os.sysconf("SC_PAGE_SIZE") + asked["mebibytes"] * 2**20
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(usage.ru_utime + usage.ru_stime) + asked["seconds"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
def answer(word):
    print(word)
    sys.stdout.flush()
    os._exit(0)
"""
_found_here: dict[str, str | None] = {}  # this process's results, refusals too


def refused(
    kind: str, program: str, asked: dict[str, Any], *, seconds: int, mebibytes: int, known_by: str = ""
) -> str | None:
    """Run a program once on its input. None if it ends within its limits, else the reason for the refusal.

    Args:
        kind: The kind of input; part of the hash.
        program: Python that calls `limit()` after its imports, and `answer(word)`: "ok", or the reason for a refusal.
            "ok" makes the input trusted. If the program cannot run at all (no /proc, no such library), nothing is
            refused.
        asked: The input, as JSON, which the program finds in `asked`.
        known_by: The key that it is trusted by, instead of `asked`: a file's own hash.
    """
    key = hashlib.sha256(json.dumps([TRUST, kind, program, known_by or asked, seconds, mebibytes]).encode()).hexdigest()
    if key not in _found_here:
        _found_here[key] = None if is_trusted(key) else _tried(key, program, asked, seconds, mebibytes)
    return _found_here[key]


def _tried(key: str, program: str, asked: dict[str, Any], seconds: int, mebibytes: int) -> str | None:
    request = {**asked, "seconds": seconds, "mebibytes": mebibytes, "sys.path": sys.path}
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-c", _PRELUDE + program],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=WALL_SECONDS,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return f"does not end within {WALL_SECONDS} seconds"
    word = process.stdout.strip().splitlines()[-1:] or [""]
    if process.returncode == 0 and word[0] == "ok":
        trust(key)
        return None
    return one_line(word[0]) or _ended(process, seconds, mebibytes)


def _ended(process: subprocess.CompletedProcess[str], seconds: int, mebibytes: int) -> str | None:
    """Why a child ended without an answer; None if its own program could not run."""
    if process.returncode in (-9, -24):  # SIGKILL and SIGXCPU, from the limit on CPU time
        return f"does not end within {counted(seconds, 'second')}"
    if process.returncode < 0 or "MemoryError" in process.stderr or "memory allocation" in process.stderr:
        return f"needs more than {mebibytes:,} MiB, or breaks the library that reads it"
    return None


def is_trusted(key: str) -> bool:
    """Whether `trust` was called for this hash, by any process of the user."""
    return _file(key).exists()


def trust(key: str) -> None:
    """Remember that the input with this hash may run."""
    try:
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        _file(key).touch()
    except OSError:  # a cache that cannot be written: the next process looks again
        return


def _file(key: str) -> Path:
    return cache_folder() / "trusted" / key
