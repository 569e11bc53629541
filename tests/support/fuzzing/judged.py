"""One case in a process of its own, with limits on time and memory, and what is wrong with what came of it."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import re
import resource
import select
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from finetune.output_stream import has_controls
from tests.support.rows.corpus import lay_out, outcome_of, processor_seconds

SECONDS = 10  # of processor time, of a case and its children
WALL_SECONDS = 300  # of a case that waits, on a machine that has other work
MEBIBYTES = 2_048  # of addresses beside those that the process has before
LONGEST_LINE, MOST_LINES = 1_000, 200  # a recipe's every mistake is told, with its line
LIBRARY_WORDS = re.compile(
    r"Traceback|site-packages|panicked at|Input should be|MemoryError|bad_alloc|cannot allocate|object at 0x"
)
# A recipe's, a file's or a key's name, and what may stand before the remedy.
REMEDY = re.compile(r"[;:,] ")


@dataclass(frozen=True)
class Verdict:
    """How a case ended."""

    code: int | None  # None: it did not end by itself, or with an error that is none of the program's
    text: str
    problem: str = ""  # in words, and where it came from; empty: nothing is wrong

    @property
    def shape(self) -> str:
        """The outcome without what is this case's alone: names, numbers, what is quoted."""
        if self.problem:
            return f"FOUND {self.problem}"
        line = next((line for line in self.text.splitlines() if line.strip()), "")
        line = re.sub(r"'[^']*'|\"[^\"]*\"|/[\w./-]+/", "_", line)
        return f"{self.code} {re.sub(r'[0-9]+', '0', line)[:110]}"


Place = re.Pattern[str]


def judged(case: Mapping[str, Any], folder: Path, starts: Mapping[str, Path]) -> Verdict:
    """The case here, in this process, without limits: what the program printed and raised, and whether that is well."""
    folder.mkdir(parents=True)
    lay_out(case, folder, starts)
    before = os.getcwd()
    os.chdir(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = outcome_of(case, folder)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return Verdict(None, _tail(error), f"{type(error).__name__} from {_where(error)}")
    finally:
        os.chdir(before)
    text = outcome.text.replace(str(folder), "FOLDER")
    return Verdict(outcome.code, text, _problem(outcome.code, text, re.compile(case.get("place", ""))))


def _problem(code: int, text: str, place: Place) -> str:
    """What is wrong with an exit code and what was printed."""
    if problem := _not_ours(text):
        return problem
    if code == 0:
        return ""
    if text.startswith('{"ok": false'):
        text = "\n".join(json.loads(text)["mistakes"])
    lines = [line for line in text.splitlines() if line.strip()]
    if code not in (2, 3, 4):
        return f"exit code {code}"
    if not lines or not place.search(text):
        return "no place in the message"
    if not REMEDY.search(text):
        return "no remedy in the message"
    lines = [line for line in lines if line.startswith("error: ")] or lines  # a preview shows good rows before
    if len(lines) > MOST_LINES or max(map(len, lines)) > LONGEST_LINE:
        return f"a message of {len(lines)} lines, the longest of more than {max(map(len, lines)) // 100}00 characters"
    return ""


def _not_ours(text: str) -> str:
    """What of a text no message of the program has."""
    plain = re.sub(r"\x1b\[[0-9;]*[mAK]", "", text)
    if any(has_controls(line.replace("\t", " ")) for line in re.split(r"\r\n?|\n", plain)):
        return "a control character in what is printed"
    word = LIBRARY_WORDS.search(text)
    return f"a library's words: {word[0]}" if word else ""


def _where(error: BaseException) -> str:
    """The innermost function of the package that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/finetune/" in frame.filename and "site-packages" not in frame.filename]
    frame = (own or frames)[-1]
    return f"{frame.filename.rpartition('/finetune/')[2].rpartition('/tests/')[2]} {frame.name}"


def _tail(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-3_000:]


def judged_apart(
    cases: Sequence[Mapping[str, Any]],
    folder: Path,
    starts: Mapping[str, Path],
    judge: Callable[..., Verdict] = judged,
    seconds: float = SECONDS,
) -> list[Verdict]:
    """`judged` of each in a child that is forked here, within the limits; where one ends it, another child goes on.

    A fork takes ten times as long as most cases, so that several share a child.
    """
    folder.mkdir(parents=True)
    verdicts: list[Verdict] = []
    while len(verdicts) < len(cases):
        rest, child = cases[len(verdicts) :], _Child(folder)
        process = os.fork()
        if process == 0:
            _run_child(child, rest, lambda case, place: judge(case, place, starts), seconds)
        problem, status = _wait(process, child, seconds)
        verdicts += child.answers()
        if len(child.answers()) < len(rest):
            native = child.native()[-3_000:]
            last = re.findall(r'File "[^"]*/(?:finetune|site-packages)/([^"]+)", line \d+ in (\w+)', native)
            where = f" in {last[0][0]} {last[0][1]}" if last else ""
            ended = f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "ended without an answer"
            verdicts.append(Verdict(None, native, (problem or ended) + where))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    shutil.rmtree(folder)
    return verdicts


@dataclass(frozen=True)
class _Child:
    """The files of a forked child: what was printed past the program's streams, and a line for each verdict."""

    folder: Path

    @property
    def printed(self) -> Path:
        return self.folder / "printed"

    @property
    def answered(self) -> Path:
        return self.folder / "answers"

    def native(self) -> str:
        return self.printed.read_bytes().decode("utf-8", "replace") if self.printed.exists() else ""

    def answers(self) -> list[Verdict]:
        lines = self.answered.read_text("utf-8").splitlines() if self.answered.exists() else []
        return [Verdict(**json.loads(line)) for line in lines]


def _run_child(
    child: _Child,
    cases: Sequence[Mapping[str, Any]],
    work: Callable[[Mapping[str, Any], Path], Verdict],
    seconds: float,
) -> None:
    """The forked child: standard streams into a file, limits, each case and its verdict; never returns."""
    try:
        os.setsid()
        descriptor = os.open(child.printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        faulthandler.enable(2)
        faulthandler.register(signal.SIGUSR1, file=2)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        room = pages * os.sysconf("SC_PAGE_SIZE") + MEBIBYTES * 2**20
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # The soft limit alone: a child of the case has limits of its own.
        resource.setrlimit(resource.RLIMIT_AS, (room, resource.getrlimit(resource.RLIMIT_AS)[1]))
        for number, case in enumerate(cases):
            os.ftruncate(descriptor, 0)
            began = processor_seconds()
            verdict = work(case, child.folder / str(number))
            verdict = _with_native(verdict, child.native(), processor_seconds() - began, seconds)
            shutil.rmtree(child.folder / str(number), ignore_errors=True)
            with child.answered.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
    except BaseException:
        os.write(2, traceback.format_exc().encode("utf-8", "replace"))
    finally:
        os._exit(0)


def _with_native(verdict: Verdict, native: str, used: float, seconds: float) -> Verdict:
    """The verdict, with what was printed past the program's streams and the time that was used."""
    if verdict.problem:
        return verdict
    if used > seconds:
        return replace(verdict, problem=f"{used:.0f} s of processor time")
    problem = _not_ours(native)
    return replace(verdict, text=verdict.text + native, problem=f"{problem}, by a library") if problem else verdict


def _wait(process: int, child: _Child, seconds: float) -> tuple[str, int]:
    """(why it was ended, wait status); each case has its own time."""
    problem, done, began, before = "", 0, time.monotonic(), 0.0
    descriptor = os.pidfd_open(process)
    try:
        while not select.select([descriptor], [], [], 0.5)[0]:
            used = _processor_seconds(process)
            if (answers := len(child.answers())) > done:
                done, began, before = answers, time.monotonic(), used
            if time.monotonic() - began > WALL_SECONDS:
                problem = f"not done within {WALL_SECONDS} s"
            elif used - before > seconds:
                problem = f"more than {seconds:.0f} s of processor time"
            if problem:
                os.kill(process, signal.SIGUSR1)  # writes where it is
                time.sleep(0.2)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
                break
    finally:
        os.close(descriptor)
    _, status = os.waitpid(process, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # what it left running
    return problem, status


def _processor_seconds(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        used = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(each.user + each.system for each in used) + used[0].children_user + used[0].children_system
    return 0.0
