"""The line of a step: what of it is left on a narrow terminal, and what its memory is the memory of."""

from __future__ import annotations

import io
import os
from typing import Any

import pytest

from finetune.measure import metrics
from finetune.measure.metrics import FEWEST_BARS, Terminal


def line_of(step: int, **changes: Any) -> dict[str, Any]:
    line = {"kind": "train", "step": step, "loss": 2.3456 - 0.01 * step, "grad_norm": 0.8123, "step_seconds": 1.5}
    return line | {"tokens_per_second": 12345.6, "peak_memory_gib": 1.94, "data_wait_fraction": 0.001} | changes


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, width: int, steps: int = 40, **changes: Any) -> str:
    """The last line drawn on a terminal of `width` columns."""
    # With any arguments: under -v pytest itself asks for the width, before the patch is undone.
    monkeypatch.setattr(metrics.shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((width, 24)))
    stream, now = Tty(), [0.0]
    terminal = Terminal(1345, silent=False, stream=stream, clock=lambda: now[0])
    for step in range(1, steps + 1):
        now[0] += 1.5
        terminal.step(line_of(step, **changes))
    return stream.getvalue().rpartition("\x1b[2K")[2]


@pytest.mark.parametrize("changes", [{}, {"loss_scale": 65536.0, "skipped_steps": 2}, {"data_wait_fraction": 0.4}])
@pytest.mark.parametrize("width", [40, 60, 80, 100, 132, 200])
def test_the_eta_is_always_in_view(monkeypatch: pytest.MonkeyPatch, width: int, changes: dict[str, Any]) -> None:
    text = shown(monkeypatch, width, **changes)
    assert len(text) < width
    assert text.startswith("step 40/1345  loss 1.9456")
    assert text.endswith("  ETA 32:38")


def test_what_80_columns_show(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, 80)
    assert "  12,346 tok/s  process 1.9 GiB  ETA " in text
    bars = sum(letter in metrics.BARS for letter in text)
    assert FEWEST_BARS <= bars <= 24
    assert len(text) == 79, "the bars take the room that is left"
    slow = shown(monkeypatch, 80, data_wait_fraction=0.4)
    assert "data wait 40%" in slow, "data that hold up the step are worth more room than its memory"


def test_a_wide_terminal_shows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, 160)
    assert "  norm 0.812  12,346 tok/s  process 1.9 GiB  data wait 0%  ETA 32:38" in text
    assert sum(letter in metrics.BARS for letter in text) == 24


def test_a_file_gets_whole_lines_and_no_bars() -> None:
    stream = io.StringIO()
    terminal = Terminal(9, silent=False, stream=stream)
    terminal.memory_of = "tensors"
    terminal.step(line_of(1))
    assert stream.getvalue() == (
        "step 1/9  loss 2.3356  norm 0.812  12,346 tok/s  tensors 1.9 GiB  data wait 0%  ETA 12 s\n"
    )


def test_a_line_of_progress_makes_room_for_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((20, 24)))
    stream = Tty()
    terminal = Terminal(3, silent=False, stream=stream)
    terminal.progress("forward of micro-batch 1 of 2")
    assert stream.getvalue() == "\r\x1b[2Kforward of micro-ba"
    terminal.progress("backward")
    terminal.say("a line that stays")
    assert stream.getvalue().endswith("\r\x1b[2Kbackward\r\x1b[2Ka line that stays\n")
    terminal.progress("updating")
    terminal.step(line_of(1))
    terminal.say("the step stays above")
    assert stream.getvalue().count("\n") == 3
    assert "updating\r\x1b[2Kstep 1/3" in stream.getvalue()


@pytest.mark.parametrize("silent", [False, True])
def test_progress_is_for_terminals_alone(silent: bool) -> None:
    stream = Tty() if silent else io.StringIO()
    Terminal(3, silent=silent, stream=stream).progress("forward")
    assert stream.getvalue() == ""
