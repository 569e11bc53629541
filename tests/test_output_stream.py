"""Output that cannot be written never ends a training."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.measure.metrics import Terminal
from finetune.output_stream import LastingStream, lasting, wrapped
from tests.support.models.tiny import write_chats

ROOT = Path(__file__).resolve().parent.parent
LINE = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "tokens_per_second": 1.0, "peak_memory_gib": 1.0}
LINE |= {"data_wait_fraction": 0.0, "step_seconds": 1.0}


class Failing(io.StringIO):
    """A stream whose every call ends in this error."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error

    def isatty(self) -> bool:
        raise self.error


FAULTS = [
    BrokenPipeError(errno.EPIPE, "Broken pipe"),
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EIO, "Input/output error"),
    ValueError("I/O operation on closed file"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault).split("] ")[-1])
def test_the_terminal_goes_on(fault: Exception) -> None:
    terminal = Terminal(2, silent=False, stream=Failing(fault))
    terminal.say("a line")
    terminal.step(LINE)


def test_what_cannot_be_encoded_is_written_with_question_marks() -> None:
    raw = io.BytesIO()
    stream = lasting(io.TextIOWrapper(raw, encoding="ascii"))
    stream.write("loss \u2581\u2588 ok\n")
    stream.flush()
    assert raw.getvalue() == b"loss ?? ok\n"


def test_a_process_without_streams_prints_nothing() -> None:
    stream = LastingStream(None)
    print("a line", file=stream, flush=True)
    assert not stream.isatty()
    stream.flush()


def test_a_stream_that_works_is_passed_through() -> None:
    inner = io.StringIO()
    stream = lasting(inner)
    assert lasting(stream) is stream
    print("a line", file=stream)
    assert inner.getvalue() == "a line\n"
    assert stream.closed is False


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def closed_pipe() -> int:
    """What `| head -1` leaves behind once it has its line."""
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stdout", "both"),
    [
        (closed_pipe, True),
        pytest.param(full_disk, True, marks=pytest.mark.slow),
        pytest.param(closed_pipe, False, marks=pytest.mark.slow),
    ],
)
def test_a_training_reaches_its_end(stdout: Callable[[], int], both: bool, tiny_llama: Path, tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", [30, 45, 60, 80])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{name_or_path: {tiny_llama}, dtype: float32}}\n"
        f"data: {{train: [{{path: json, data_files: {chats}}}], max_length: 128, eval: {{fraction: 0.3}}}}\n"
        "training: {max_steps: 3, global_batch_size: 2, mixed_precision: 'no'}\n"
        f"samples: {{count: 0}}\nlora: {{target_modules: all-linear}}\noutput_dir: {tmp_path}/run\n"
    )
    out, log = stdout(), tmp_path / "stderr.log"
    try:
        with open(log, "wb") as err:
            where = out if both else err
            words = [sys.executable, "finetune/train.py", str(recipe)]
            code = subprocess.run(words, cwd=ROOT, stdout=out, stderr=where, timeout=200).returncode
    finally:
        os.close(out)
    assert code == 0
    assert "BrokenPipeError" not in log.read_text(), "nor does Python speak of it when it leaves"
    assert json.loads((tmp_path / "run" / "run_state.json").read_text())["state"] == "finished"
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_on_a_terminal_lines_break_between_words_and_commands_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    notice = "auto chose bfloat16, because this processor has bfloat16 arithmetic"
    command = "talk to it: finetune chat /a/folder/with/a/long/name/of/a/run"
    indented = "  accelerate launch finetune/train.py recipes/llama3_fsdp.yaml"
    text = f"{notice}\n{command}\n{indented}"
    assert wrapped(text, io.StringIO()) == text

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = wrapped(text, Screen()).split("\n")
    assert lines[-2:] == [command, indented]
    assert " ".join(lines[:-2]) == notice
    assert max(map(len, lines[:-2])) <= 40


STARTED = """
import os, sys
from finetune.output_stream import open_missing_streams
open_missing_streams()
print("out", flush=True)
print("err", file=sys.stderr, flush=True)
assert sys.stdin.read() == ""
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2
    os.system("echo a child")
"""


@pytest.mark.parametrize("closed", [(1,), (1, 2), (0, 1, 2), (0,), (2,), (0, 2)])
def test_a_process_without_streams_gets_the_null_device(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """By a shell that closes them, as a daemon's parent does: `finetune train R >&- 2>&-`."""
    code, file = tmp_path / "started.py", tmp_path / "file"
    code.write_text(STARTED)
    shell = " ".join(f"{number}<&-" if number == 0 else f"{number}>&-" for number in closed)
    process = subprocess.run(
        ["sh", "-c", f'"$0" -S "$@" {shell}', sys.executable, str(code), str(file)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.returncode == 0, process.stderr
    assert file.read_text() == "", "a child's line went into a file"
    assert process.stdout == ("" if 1 in closed else "out\na child\n")
    assert process.stderr == ("" if 2 in closed else "err\n")
