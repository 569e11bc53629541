"""A scorer of the user's own in a process of its own, so that one answer on which it hangs or crashes costs one answer.

    with OwnScorer("check.py:score", seconds=10) as scorer:
        scorer.score("the answer", "the reference", {"column": 1})     # 1.0, or ValueError

A question is a pickle on the child's standard input, its answer a JSON line. What the function prints goes to standard
error without control codes, and what it reads from standard input is empty. Programs that it starts end with the child.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from finetune.errors import FinetuneError
from finetune.launch.with_parent import die_with_parent
from finetune.output_stream import without_controls
from finetune.paths import CHECKOUT
from finetune.scoring.function import call_function, load_function

IMPORT_SECONDS = 60.0  # of the user's imports


class OwnScorer:
    """Calls FILE.py:FUNCTION(answer, reference, row) in a child, which is started again after it was lost."""

    def __init__(self, text: str, seconds: float) -> None:
        """Start the child. Raises FinetuneError if the file or its function cannot be loaded."""
        if not 0 < seconds < threading.TIMEOUT_MAX:
            raise FinetuneError(f"--scorer-seconds {seconds:g}: write seconds above 0")
        self._text, self._seconds = text, seconds
        self.name = text.rpartition(":")[2]
        self._start()

    def __enter__(self) -> OwnScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def score(self, answer: str, reference: str, row: Mapping[str, Any]) -> float:
        """The function's score, from 0 to 1. Raises ValueError in one line for an answer that it does not score."""
        if self._child.poll() is not None:
            try:
                self._start()
            except FinetuneError as error:  # the file has changed since
                raise ValueError(str(error)) from None
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # the child is lost, and _reply says so
            pickle.dump((answer, reference, dict(row)), self._child.stdin)
            self._child.stdin.flush()
        reply = self._reply(self._seconds)
        if "score" in reply:
            return float(reply["score"])
        raise ValueError(reply["problem"])

    def _start(self) -> None:
        # -P: a json.py in the working folder is not this process's json. -u: prints come at once.
        code = f"import sys; sys.path.append({str(CHECKOUT)!r}); from {__name__} import main; main()"
        command = [sys.executable, "-P", "-u", "-c", code, self._text]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        self._printed = threading.Thread(target=_show_printed, args=(self._child.stderr,), daemon=True)
        self._printed.start()
        reply = self._reply(IMPORT_SECONDS)
        if "problem" in reply:
            self._end()
            raise FinetuneError(reply.get("message") or f"--scorer {self._text}: the file's import {reply['problem']}")

    def _end(self) -> None:
        if self._child.returncode is None:
            with suppress(ProcessLookupError):  # the child, and what its function started
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._printed.join(1.0)  # a program in a session of its own may hold the pipe
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _reply(self, seconds: float) -> dict[str, Any]:
        """The child's next line. If it ends or takes longer, it is killed, and `problem` says so."""
        assert self._child.stdout is not None
        output, line, until = self._child.stdout.fileno(), b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            if not select.select([output], [], [], max(0.0, until - time.monotonic()))[0]:
                self._end()
                return {"problem": f"took more than {seconds:g} s"}
            part = os.read(output, 2**16)
            if not part:
                self._end()
                code = self._child.returncode
                return {"problem": f"ended its process ({signal.Signals(-code).name if code < 0 else code})"}
            line += part
        reply: dict[str, Any] = json.loads(line)
        return reply


def _show_printed(pipe: IO[bytes]) -> None:
    """Pass on what the child prints, until it and all that it started have ended."""
    with pipe:
        while part := pipe.readline(2**12):
            sys.stderr.write(without_controls(part.decode("utf-8", "replace")))
            sys.stderr.flush()


def main() -> None:
    """The child: load the function, then answer questions until standard input ends."""
    text, own = sys.argv[1], os.getpid()
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    questions, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    def reply(**fields: Any) -> None:
        if os.getpid() != own:  # a process that the function forked has come back from it
            os._exit(0)
        replies.write(json.dumps(fields) + "\n")
        replies.flush()

    # As for `python FILE.py`, its modules lie beside it. The working folder comes last.
    sys.path[:] = [str(Path(os.path.expanduser(text.rpartition(":")[0])).resolve().parent), *sys.path, os.getcwd()]
    try:
        function = load_function(text)
    except FinetuneError as error:
        return reply(problem="", message=str(error))
    reply()
    with suppress(EOFError):
        while True:
            answer, reference, row = pickle.load(questions)  # the parent's
            try:
                reply(score=call_function(function, answer, reference, row))
            except ValueError as error:
                reply(problem=str(error))
            except BaseException as error:  # its text cannot be had
                reply(problem=f"the function raised {type(error).__name__}")
