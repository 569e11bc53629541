"""Every template that TRL ships, by rows of every kind: what is learned is what the library's renderings say.

A case is right, or refused with a reason; none is wrong (tests/support/rendered_reference.py). The table is printed:
pytest -s.
"""

from __future__ import annotations

import pytest

from tests.support.rendered_reference import MODES, ROWS, assert_rows_are_independent, table
from tests.support.shipped_templates import shipped

if not shipped():
    pytest.skip("the installed TRL ships no chat templates", allow_module_level=True)


@pytest.mark.parametrize(
    "more",
    [pytest.param(False, id="usual"), pytest.param(True, id="more control tokens", marks=pytest.mark.slow)],
)
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


@pytest.mark.parametrize(
    "mode", [mode if mode == "completion" else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]
)
@pytest.mark.parametrize("name", shipped())
def test_a_row_does_not_depend_on_the_rows_before_it(name: str, mode: str) -> None:
    assert_rows_are_independent(shipped()[name], mode)
