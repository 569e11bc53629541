"""Signals finish the step; a launcher's death reaches the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from finetune.errors import STOPPED
from finetune.launch import signals, with_parent
from finetune.launch.launcher import environment_for_child
from finetune.launch.signals import StopRequest, die_with_launcher, stop_on_signals

TRAINER = """
import os, sys, time
from pathlib import Path
from finetune.launch.signals import StopRequest, die_with_launcher, stop_on_signals
out = Path(sys.argv[1])
stop = StopRequest()
with stop_on_signals(stop):
    tied = die_with_launcher()
    (out / "aside").write_text(f"{os.getpid()} {tied}")
    (out / "aside").rename(out / "started")
    try:
        with stop.finishes_step():
            for step in range(600):
                time.sleep(0.05)
                if stop:
                    time.sleep(float(sys.argv[2]))  # a step and its checkpoint
                    (out / "aside").write_text(f"saved after {stop.signal_name}")
                    (out / "aside").rename(out / "ended")
                    sys.exit(130)
    except KeyboardInterrupt:
        (out / "ended").write_text("broken off")
        sys.exit(1)
"""

REPOSITORY = str(Path(__file__).resolve().parents[2])
LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, *sys.argv[1:]]).wait()
"""


def wait_for(path: Path, seconds: float = 20) -> str:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not appear"
        time.sleep(0.02)
    return path.read_text()


@contextmanager
def started(command: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": REPOSITORY} | environment,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    (tmp_path / "trainer.py").write_text(TRAINER)
    return [str(tmp_path / "trainer.py"), str(tmp_path)]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_finishes_the_step(tmp_path: Path, script: list[str], name: str) -> None:
    with started([sys.executable, *script, "0"]) as trainer:
        wait_for(tmp_path / "started")
        trainer.send_signal(getattr(signal, name))
        assert trainer.wait(20) == 130
    assert wait_for(tmp_path / "ended") == f"saved after {name}"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("sent", "end"),
    [
        (["SIGINT", "SIGINT"], "broken off"),
        (["SIGINT", "SIGTERM", "SIGTERM"], "saved after SIGINT"),
        (["SIGTERM", "SIGINT"], "saved after SIGTERM"),
        (["SIGTERM", "SIGINT", "SIGINT"], "broken off"),
    ],
)
def test_only_a_second_interrupt_breaks_off(tmp_path: Path, script: list[str], sent: list[str], end: str) -> None:
    with started([sys.executable, *script, "1"]) as trainer:
        wait_for(tmp_path / "started")
        for name in sent:
            trainer.send_signal(getattr(signal, name))
            time.sleep(0.2)
        trainer.wait(20)
    assert wait_for(tmp_path / "ended") == end


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_the_launchers_death_saves(tmp_path: Path, script: list[str], name: str) -> None:
    with started([sys.executable, "-c", LAUNCHER, *script, "0"], ACCELERATE_MIXED_PRECISION="no") as launcher:
        assert wait_for(tmp_path / "started").endswith("True")
        launcher.send_signal(getattr(signal, name))
        launcher.wait(20)
        assert wait_for(tmp_path / "ended") == "saved after SIGTERM"


def test_without_a_launcher_the_parents_death_is_nothing(tmp_path: Path, script: list[str]) -> None:
    with started([sys.executable, "-c", LAUNCHER, *script, "0"]) as launcher:
        process, tied = wait_for(tmp_path / "started").split()
        assert tied == "False"
        launcher.kill()
        launcher.wait()
        time.sleep(0.5)
        assert not (tmp_path / "ended").exists()
        os.kill(int(process), signal.SIGTERM)
        wait_for(tmp_path / "ended")


def test_a_launcher_that_died_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(signals, "PARENT_AT_START", 1 if os.getppid() != 1 else 2)
    monkeypatch.setattr(with_parent, "die_with_parent", lambda _: True)
    stop = StopRequest()
    with stop_on_signals(stop, announce=False), stop.finishes_step():
        assert die_with_launcher()
        assert stop.signal_name == "SIGTERM"


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "name"), [(1, "SIGINT"), (1, "SIGKILL"), (2, "SIGINT"), (2, "SIGKILL")])
def test_real_launchers(tmp_path: Path, script: list[str], name: str, processes: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    if processes == 1:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    with started([*command, *script, "0"]) as launcher:
        wait_for(tmp_path / "started", 60)
        time.sleep(1)
        if name == "SIGINT" and processes == 1:
            os.killpg(launcher.pid, signal.SIGINT)  # what a terminal does
        else:
            launcher.send_signal(getattr(signal, name))
        launcher.wait(60)
        assert wait_for(tmp_path / "ended").startswith("saved after SIG")


def test_handlers_come_back_and_nohup_stays() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        stop = StopRequest()
        with stop_on_signals(stop, announce=False), stop.finishes_step():
            assert signal.getsignal(signal.SIGTERM) != handlers[signal.SIGTERM]
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop
        assert handlers == {number: signal.getsignal(number) for number in handlers}
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("environment", "again"),
    [
        ({}, True),
        ({"FINETUNE_RANKS": "2"}, True),
        ({"TORCHELASTIC_RUN_ID": "x"}, False),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, False),
    ],
)
def test_a_second_interrupt_is_offered_where_it_arrives(
    environment: dict[str, str], again: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with stop_on_signals(stop := StopRequest()), stop.finishes_step():
        os.kill(os.getpid(), signal.SIGTERM)
    line = capfd.readouterr().err.strip()
    assert line.startswith("stopping after this step, then saving")
    assert ("Ctrl-C again" in line) is again
    assert len(line) < 80, "one line of a terminal"


def test_outside_the_main_thread_the_flag_stays_down() -> None:
    seen: list[bool] = []

    def body() -> None:
        stop = StopRequest()
        with stop_on_signals(stop):
            seen.append(bool(stop))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [False]


@pytest.mark.sample(2, thorough=4)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT])
def test_a_start_that_is_stopped_ends_with_130_and_a_word(number: signal.Signals) -> None:
    """While it reads and tokenises: nothing is to be saved yet."""
    program = (
        "import sys, time, types; from finetune import train\n"
        "train.load_recipe = lambda *_, **__: types.SimpleNamespace(recipe=None)\n"
        "train.announce = lambda _: [print('started', flush=True), time.sleep(60)]\n"
        "sys.exit(train.process_main(['r.yaml']))"
    )
    environment = environment_for_child()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors.strip()) == (130, STOPPED)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGQUIT])
def test_slurms_warning_and_quit_save_and_stop(number: signal.Signals) -> None:
    stop, before = StopRequest(), signal.getsignal(number)  # ignored where a shell started the tests behind its back
    with stop_on_signals(stop, announce=False), stop.finishes_step():
        os.kill(os.getpid(), number)
        assert stop.signal_name == number.name
    assert signal.getsignal(number) == before


WITHOUT_STEPS = """
import sys, time
from finetune.launch.signals import Interrupted, StopRequest, stop_on_signals
try:
    with stop_on_signals(StopRequest()):
        print("started", flush=True)
        {work}
except Interrupted:
    print("left", flush=True)
    sys.exit(130)
"""
SLEEPS = "time.sleep(60)"
# One call into a library, during which Python runs no handler: it waits for a lock that it has.
COMPUTES = "from ctypes import *; c, m = CDLL(None), create_string_buffer(64); [c.pthread_mutex_lock(m) for _ in '12']"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("work", "leaves_itself"), [(SLEEPS, True), (COMPUTES, False)])
def test_outside_the_steps_a_signal_ends_the_process_in_time(
    number: signal.Signals, work: str, leaves_itself: bool
) -> None:
    environment = environment_for_child()
    with subprocess.Popen(
        [sys.executable, "-c", WITHOUT_STEPS.format(work=work)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(0.3)
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert (output, errors.strip()) == (("left\n", "") if leaves_itself else ("", STOPPED))


def test_after_a_signal_in_a_step_the_save_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SECONDS_TO_LEAVE", 0.1)
    stop = StopRequest()
    with stop_on_signals(stop, announce=False):
        with stop.finishes_step():
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    assert stop.signal_name == "SIGTERM"
