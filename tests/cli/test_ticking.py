"""A long plan shows on a terminal that it goes on; elsewhere it writes whole lines."""

from __future__ import annotations

import os
import pty
import sys
import time
from contextlib import suppress

import pytest

from finetune.cli import app

PROGRAM = """
import time
from finetune.cli import app
app.TICK_SECONDS = 0.05
with app.ticking() as begin:
    begin("tracing")
    if not (child := __import__("os").fork()):
        time.sleep(0.3)
        __import__("os")._exit(0)
    time.sleep(0.3)
    begin("  fits")
"""


def test_seconds_move_on_a_terminal_and_nothing_is_left_of_them() -> None:
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM])
    shown = b""
    with suppress(OSError):  # the terminal's end
        while True:
            shown += os.read(terminal, 1024)
    os.waitpid(child, 0)
    assert shown.count(b"\r\x1b[2K  0 s") >= 3
    left = [line.rpartition(b"\x1b[2K")[2].strip(b"\r") for line in shown.split(b"\n")]
    assert left == [b"tracing", b"  fits", b""]


def test_whole_lines_elsewhere(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "TICK_SECONDS", 0.01)
    with app.ticking() as begin:
        begin("tracing")
        time.sleep(0.1)
    assert capfd.readouterr().err == "tracing\n"
