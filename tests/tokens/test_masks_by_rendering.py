"""Every template that TRL ships, by rows of every kind: the library's renderings say which part is supervised.

A case is right, or refused with a reason; none is wrong (tests/support/rows/rendered_reference.py). The table is
printed: pytest -s. By default each template has a third of the rows, drawn by its name.
"""

from __future__ import annotations

import pytest

from tests.support.rows.rendered_reference import MODES, ROWS, assert_rows_are_independent, sample_of_rows, table
from tests.support.rows.shipped_templates import shipped

if not shipped():
    pytest.skip("the installed TRL ships no chat templates", allow_module_level=True)


@pytest.mark.sample(6, thorough=14)
@pytest.mark.parametrize("name", shipped())
def test_a_sample_of_rows_is_right_or_refused(name: str) -> None:
    counts = table(name, shipped()[name], sample_of_rows(name))
    assert counts["right"] or name == "glm4moe"


@pytest.mark.slow
@pytest.mark.parametrize("more", [False, True], ids=["usual", "more control tokens"])
@pytest.mark.parametrize("name", shipped())
def test_every_row_is_right_or_refused(name: str, more: bool) -> None:
    family = shipped()[name].with_more_control_tokens() if more else shipped()[name]
    counts = table(name, family, list(ROWS))
    assert counts["right"] or name == "glm4moe"


def test_all_templates_and_rows_were_seen() -> None:
    assert len(shipped()) >= 41
    assert {row for name in shipped() for row in sample_of_rows(name)} == {*ROWS}
    cases = len(shipped()) * len(ROWS) * len(MODES)
    print(f"\n{len(shipped())} templates x {len(ROWS)} rows x {len(MODES)} settings = {cases} cases, twice")
    assert cases >= 4_000


@pytest.mark.sample(3, thorough=8)
@pytest.mark.parametrize("name", shipped())
def test_a_row_of_a_sample_does_not_depend_on_the_rows_before_it(name: str) -> None:
    assert_rows_are_independent(shipped()[name], "completion", sample_of_rows(name, 6))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", shipped())
def test_a_row_does_not_depend_on_the_rows_before_it(name: str, mode: str) -> None:
    assert_rows_are_independent(shipped()[name], mode, list(ROWS))
