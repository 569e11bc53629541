"""A run's pages, kept up to date while it trains. What fails here is told and never disturbs the run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.pages.curves import read_runs
from finetune.pages.pictures import draw_loss, draw_memory
from finetune.pages.report import NAME, write_report

PICTURES = {"loss.png": draw_loss, "memory.png": draw_memory}


def write_page(run_dir: Path, say: Callable[[str], None]) -> None:
    """report.html of a run that goes on: 25 ms for a thousand steps."""
    with _told(say):
        write_report(read_runs([run_dir]), run_dir / NAME)


def write_pages(run_dir: Path, say: Callable[[str], None]) -> None:
    """report.html, and its pictures where matplotlib is installed."""
    with _told(say):
        runs = read_runs([run_dir])
        write_report(runs, run_dir / NAME)
        if importlib.util.find_spec("matplotlib") is not None:
            for name, draw in PICTURES.items():
                draw(runs, run_dir / name)
        say(f"report: {run_dir / NAME}")


@contextmanager
def _told(say: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever it is, hours of training are worth more than their picture
        say(f"the report was not written: {type(error).__name__}: {error}")
