"""A terminal obeys this program's own sequences and nothing else."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from finetune.output_stream import PlainStream, has_controls, lasting, obeyed_by_none, one_line, plain_output
from finetune.paths import leaves_folder, open_regular

OURS = ["\x1b[1;32mgreen\x1b[0m", "\r\x1b[2Kstep 3", "a\tb\nc", "\x1b[?25l", "ünïcode 中 😀 नमस्ते", "a\r\nb", "\x1b[A"]
OTHERS = [
    "\x1b]0;t\x07",
    "\x1b[2J",
    "\x1b[5;1H",
    "\x9b1m",
    "\x1bc",
    "\x1bP1$q\x1b\\",
    "\x85",
    "\u2029",
    "\u202e",
    "\ud800",
]


@pytest.mark.parametrize("text", OURS)
def test_our_own_passes(text: str) -> None:
    assert obeyed_by_none(text) == text


@pytest.mark.parametrize("text", OTHERS)
def test_others_are_shown(text: str) -> None:
    assert not set(obeyed_by_none(f"a{text}b")) & set("\x1b\x07\x9b\x85\u2029\u202e\ud800")
    assert has_controls(text)
    assert not has_controls(one_line(text))
    for stream in (PlainStream(io.StringIO()), lasting(io.StringIO())):
        stream.write(text)
        assert "\N{REPLACEMENT CHARACTER}" in stream.getvalue()  # type: ignore[union-attr]


def test_words_of_any_length_take_one_short_line() -> None:
    assert one_line("ab\n" * 9, 10) == "ab ab a..."
    assert one_line("ab\n" * 9, 26) == "ab ab ab ab ab ab ab ab ab"


def test_streams_are_given_back() -> None:
    before = sys.stdout, sys.stderr
    with plain_output():
        assert isinstance(sys.stdout, PlainStream)
    assert (sys.stdout, sys.stderr) == before


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"a"
    for path, reason in ((tmp_path / "pipe", "a pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "directory")):
        with pytest.raises(OSError, match=reason):
            open_regular(path)


def test_links_that_leave_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run" / "inside").mkdir(parents=True)
    (tmp_path / "run" / "out").symlink_to("/etc")
    (tmp_path / "run" / "in").symlink_to("inside")
    (tmp_path / "other").symlink_to("run")
    names = {"out": True, "out/hostname": True, "in": False, "inside/a": False, "../run/in": False}
    for run in (tmp_path / "run", tmp_path / "other"):
        assert {name: leaves_folder(run / name, run) for name in names} == names
