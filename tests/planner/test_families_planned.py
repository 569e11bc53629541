"""Adapters on each architecture of docs/families.md are planned, with the model's own weights, or refused in a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.architecture_columns import planned
from tests.support.models.architectures import ARCHITECTURES, WAYS, save_shaken
from tests.support.models.families_page import recorded

QUICK = ("gpt2",)  # sizes by other names; more are planned in the tests beside this one


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(ARCHITECTURES)]
)
def test_planned_with_the_models_own_weights(name: str, tmp_path: Path) -> None:
    entry = recorded()["architectures"][name]
    way = next((way for way in WAYS if entry["ways"][way.title]["word"] == "right"), None)
    assert (way is None) == ("plan" not in entry["columns"])
    if way is None:
        return
    save_shaken(name, tmp_path)
    found = planned(tmp_path, way)
    assert [found.shown, found.why] == entry["columns"]["plan"]
    assert found.shown in ("planned", "refused")
    assert "\n" not in found.why
