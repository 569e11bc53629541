"""The checklist of a rehearsal on the terminal, a line when it is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text


@contextmanager
def show(*, quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that prints each line of a rehearsal; the block's end prints the sum. Quiet: prints nothing."""
    console, began = Console(quiet=quiet, soft_wrap=True), time.monotonic()
    failed: list[str] = []

    def tell(line: dict[str, Any]) -> None:
        if "differs" in line:
            console.print(Text(f"         differs: {line['differs']}", style="dim"))
            return
        mark, style = ("ok", "green") if line["ok"] else ("FAILED", "red")
        text = Text.assemble((f"{mark:>6} ", style), f"{line['seconds']:6.1f} s  {line['name']:<20}  {line['seen']}")
        console.print(text)
        if not line["ok"]:
            failed.append(line["name"])

    yield tell
    seconds = time.monotonic() - began
    console.print(f"rehearsed in {seconds:.0f} s" if not failed else f"failed in {seconds:.0f} s: {failed[0]}")
