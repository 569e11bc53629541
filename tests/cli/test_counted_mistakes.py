"""The last line of an error counts mistakes, and not lines."""

from __future__ import annotations

import pytest
import typer

from finetune.cli.app import run_verb
from finetune.data.rows import Mistakes
from finetune.errors import DataError, FinetuneError, RecipeError


def rows(*problems: str) -> DataError:
    mistakes = Mistakes()
    for line, problem in enumerate(problems, 1):
        mistakes.add(problem, f"a.csv:{line}")
    with pytest.raises(DataError) as caught:
        mistakes.raise_if_any()
    return caught.value


@pytest.mark.parametrize(
    ("error", "count"),
    [
        (rows("empty", "empty", "empty", "empty", "empty", "x"), "6 mistakes"),
        (rows(*(f"problem {number}" for number in range(30))), "30 mistakes"),
        (RecipeError(["r.yaml:3:5: lora.r: is 0\n  r: 0", "r.yaml:9:1: x"]), "2 mistakes"),
        (RecipeError(["x", "and 1,200 more mistakes"], count=1201), "1,201 mistakes"),
        (DataError(["one"]), ""),
    ],
)
def test_the_sum_is_of_mistakes(error: FinetuneError, count: str, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> dict[str, object]:
        raise error

    with pytest.raises(typer.Exit):
        run_verb(work, as_json=False)
    last = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert (last if last.endswith(" mistakes") else "") == count
