"""Shared by all verbs of `finetune`: the application, its arguments, and how a user's mistake is reported."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune.errors import FinetuneError
from finetune.files import finite_values
from finetune.output_stream import wrapped
from finetune.paths import in_home

ERASED, TICK_SECONDS = b"\r\x1b[2K", 1.0
app = typer.Typer(
    name="finetune",
    help="Fine-tune language models: one YAML recipe, every strategy, the same curve.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def user_path(text: str) -> Path:
    """A path as typed. Shells do not expand the ~ in `--output=~/page`, so this does."""
    try:
        return Path(in_home(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


RecipeFile = Annotated[
    Path,
    typer.Argument(
        parser=user_path, metavar="RECIPE", help="A recipe file, or a name of `finetune list`.", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Win over the recipe.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output and nothing else.")]
RunFolder = Annotated[
    Path, typer.Argument(parser=user_path, metavar="RUN", help="A finished run's folder.", show_default=False)
]

AtStep = Annotated[
    int | None, typer.Option("--step", min=0, help="A checkpoint's step, exported first.", show_default=False)
]


def one_of(option: str, value: str | None, choices: Sequence[str]) -> None:
    """Raise typer's own error if the value is not one of the choices. None: no value was given."""
    if value is not None and value not in choices:
        raise typer.BadParameter(f"{value} is not one of {', '.join(choices)}", param_hint=option)


def name_next(*commands: Sequence[str | Path]) -> None:
    """Name the commands that usually follow, on a terminal's standard error; scripts and logs do not get this line."""
    if sys.stdout.isatty():
        typer.echo(f"next: {', or '.join(shlex.join(map(str, command)) for command in commands)}", err=True)


def say(text: str, *, err: bool = False) -> None:
    """Print lines on standard output, or on standard error. A terminal gets them broken between words."""
    typer.echo(wrapped(text, sys.stderr if err else sys.stdout), err=err)


def say_begun(doing: str) -> None:
    """On a terminal's standard error, say at once what a verb does that takes more than some seconds."""
    if sys.stderr.isatty():
        typer.echo(f"{doing} ...", err=True)


@contextmanager
def ticking() -> Iterator[Callable[[str], None]]:
    """Yield a function that says on standard error what begins. On a terminal, its seconds move below it."""
    if not sys.stderr.isatty() or not hasattr(signal, "setitimer"):
        yield partial(say, err=True)
        return
    began = time.monotonic()

    def begin(line: str) -> None:
        nonlocal began
        os.write(2, ERASED)
        say(line, err=True)
        began = time.monotonic()

    def tick(*_: object) -> None:  # os.write, because this may interrupt a write to sys.stderr
        os.write(2, ERASED + f"  {time.monotonic() - began:.0f} s".encode())

    # A timer and no thread: the work forks.
    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
    try:
        yield begin
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.write(2, ERASED)


def run_verb(work: Callable[[], dict[str, Any]], *, as_json: bool) -> None:
    """Do the work and exit with its `exit_code`, if any.

    A user's mistake becomes its text and exit code, never a traceback.
    """
    # They warn about missing optional kernels, and about a home folder that cannot be written.
    for library in ("bitsandbytes", "matplotlib"):
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        result = work()
    except FinetuneError as error:
        mistakes = list(getattr(error, "mistakes", [str(error)]))
        if as_json:
            typer.echo(json.dumps({"ok": False, "exit_code": error.exit_code, "mistakes": mistakes}))
        else:
            typer.echo(str(error), err=True)
            if (count := getattr(error, "count", 1)) > 1:
                typer.echo(f"{count:,} mistakes", err=True)
        raise typer.Exit(error.exit_code) from None
    except UnicodeEncodeError as error:
        if sys.getfilesystemencoding() != "ascii":
            raise
        typer.echo(f"this shell's LC_ALL or LANG cannot say {error.object!a}; unset it, or set PYTHONUTF8=1", err=True)
        raise typer.Exit(4) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None  # 128 + SIGINT, as shells report it
    if as_json:
        typer.echo(json.dumps(finite_values(result)))
    if code := result.get("exit_code"):
        raise typer.Exit(code)
