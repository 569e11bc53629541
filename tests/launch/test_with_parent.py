"""A launcher that a verb starts ends with the verb, whoever kills it; more ranks than a machine holds are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from finetune.errors import FinetuneError
from finetune.launch import local_ranks
from finetune.launch.local_ranks import check_rank_count
from finetune.rehearse.rehearsal import rehearse

ROOT = Path(__file__).resolve().parents[2]
# A verb that starts a launcher, which starts a rank: each writes its process number and sleeps.
LAUNCHER = """
import os, subprocess, sys, time
open(sys.argv[1] + "/launcher", "w").write(str(os.getpid()))
time.sleep(120)
"""
VERB = f"""
import subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
from finetune.launch.with_parent import with_parent
subprocess.Popen(with_parent([sys.executable, "-c", sys.argv[2], sys.argv[1]]), start_new_session=True).wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGHUP])
def test_a_launcher_ends_with_the_verb_that_started_it(tmp_path: Path, number: signal.Signals) -> None:
    verb = subprocess.Popen([sys.executable, "-c", VERB, str(tmp_path), LAUNCHER])
    launcher = int(_appeared(tmp_path / "launcher"))
    assert psutil.pid_exists(launcher)
    verb.send_signal(number)
    verb.wait()
    end = time.monotonic() + 20
    while _lives(launcher):
        assert time.monotonic() < end, "the launcher outlived its verb"
        time.sleep(0.02)


def test_a_command_whose_parent_is_gone_does_not_start(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    file = Path(local_ranks.__file__).with_name("with_parent.py")
    words = [sys.executable, "-I", str(file), str(os.getppid()), sys.executable, "-c", f"open({str(mark)!r}, 'w')"]
    assert subprocess.run(words).returncode == 1
    assert not mark.exists()


@pytest.mark.parametrize("count", [100_000, 65, 10**12])
def test_more_ranks_than_a_cpu_holds_are_refused(count: int) -> None:
    with pytest.raises(FinetuneError, match=rf"^--processes: {count} is more than .* name at most [0-9]+$"):
        check_rank_count(count, gpus=0)


def test_memory_bounds_the_ranks_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Little:
        available = 2_600_000_000

    monkeypatch.setattr(local_ranks.psutil, "virtual_memory", Little)
    check_rank_count(5, gpus=0)
    with pytest.raises(FinetuneError, match=r"name at most 5$"):
        check_rank_count(6, gpus=0)


def test_gpus_bound_the_ranks() -> None:
    check_rank_count(4, gpus=4)
    with pytest.raises(FinetuneError, match="this machine has 4 GPUs; name at most 4"):
        check_rank_count(5, gpus=4)


def test_a_rehearsal_refuses_before_it_writes(tmp_path: Path) -> None:
    recipe = ROOT / "recipes" / "quickstart.yaml"
    with pytest.raises(FinetuneError, match="--processes: 100000"):
        rehearse(recipe, [], processes=100_000, log=lambda line: None)
    assert not list(tmp_path.iterdir())


def _appeared(path: Path) -> str:
    end = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end, f"{path.name} did not appear"
        time.sleep(0.02)
    return path.read_text()


def _lives(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
