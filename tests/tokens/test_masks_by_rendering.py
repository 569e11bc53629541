"""Every template that TRL ships, by rows of every kind: what is learned is what the library's renderings say.

A case is right, or refused with a reason; none is wrong (tests/support/rendered_reference.py). The table is printed:
pytest -s.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from finetune.tokens.encoder import Encoder, RowError
from tests.support.masks import data_section
from tests.support.rendered_reference import MODES, ROWS, masks, table
from tests.support.shipped_templates import shipped

if not shipped():
    pytest.skip("the installed TRL ships no chat templates", allow_module_level=True)


@pytest.mark.parametrize("more", [False, True], ids=["usual", "more control tokens"])
@pytest.mark.parametrize("name", shipped())
def test_every_row_is_right_or_refused(name: str, more: bool) -> None:
    family = shipped()[name].with_more_control_tokens() if more else shipped()[name]
    counts = table(name, family)
    assert counts["right"] or name == "glm4moe"


def test_all_templates_were_seen() -> None:
    assert len(shipped()) >= 41
    cases = len(shipped()) * len(ROWS) * len(MODES)
    print(f"\n{len(shipped())} templates x {len(ROWS)} rows x {len(MODES)} settings = {cases} cases, twice")
    assert cases >= 4_000


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", shipped())
def test_a_row_does_not_depend_on_the_rows_before_it(name: str, mode: str) -> None:
    tokenizer = shipped()[name].tokenizer()

    def all_masks(rows: list[str], *, fresh: bool) -> dict[str, Any]:
        found: dict[str, Any] = {}
        encoder = Encoder(tokenizer, data_section(train_on=mode))
        for row in rows:
            if fresh:
                encoder = Encoder(tokenizer, data_section(train_on=mode))
            try:
                found[row] = masks(encoder, row)
            except RowError as error:
                found[row] = str(error)
        return found

    rows = list(ROWS)
    alone = all_masks(rows, fresh=True)
    assert all_masks(rows[::-1], fresh=False) == alone
    random.Random(1).shuffle(rows)
    assert all_masks(rows, fresh=False) == alone
