"""The last line of an error counts mistakes, and not lines."""

from __future__ import annotations

import pytest
import typer

from finetune.cli.app import run_verb
from finetune.errors import DataError, RecipeError


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (["a.csv:2: x", "a.csv:3: x", "a.csv:4: y", "and 7 more"], "10 mistakes"),
        (["a.csv:7, 12, 19 and 4 more rows: empty", "a.csv:2: x"], "8 mistakes"),
        (["a.csv:7, 12: empty", "b, c: d"], "3 mistakes"),
        (["r.yaml:3:5: lora.r: is 0; write 8\n  r: 0\n     ^", "r.yaml:9:1: x"], "2 mistakes"),
        (["r.yaml:3:5: a:7, 8: y", "and 1,200 more"], "1,201 mistakes"),
        (["one"], ""),
    ],
)
def test_the_sum_is_of_mistakes(lines: list[str], count: str, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in (DataError, RecipeError):

        def work(kind: type[DataError | RecipeError] = kind) -> dict[str, object]:
            raise kind(lines)

        with pytest.raises(typer.Exit):
            run_verb(work, as_json=False)
        told = capsys.readouterr().err.rstrip().splitlines()[-1]
        assert (told if "mistakes" in told else "") == count
