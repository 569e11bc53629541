"""What DeepSpeed's own keys change in memory: by arithmetic, and planned equals tracked, to the byte."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.memory.planned import Case, differences, models, planned, tracked_on_ranks

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
CASE = Case("full", "float32", 0, packed=True, tied=False, micro_steps=2)
WHOLE = 176_576 * 4  # bytes of the bucket that the kit gives so small a model: all of its weights
BUCKET = {"reduce_bucket_size": 20_000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models(tmp_path_factory.mktemp("planned"))


def strategy_file(folder: Path, stage: int, keys: dict[str, Any]) -> str:
    file = folder / f"zero{stage}_{'_'.join(keys) or 'plain'}.yaml"
    file.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": stage} | keys}))
    return str(file)


def peaks(folder: Path, stage: int, **keys: Any) -> dict[str, int]:
    found = planned(CASE, folder, strategy_file(folder, stage, keys), ranks=2)
    return {phase: peak for phase, (peak, _) in found.items()}


@pytest.mark.slow
def test_two_small_buckets_instead_of_one_large(folder: Path) -> None:
    """ZeRO-1 allocates them before forward."""
    before = peaks(folder, 1)["forward"]
    assert before - peaks(folder, 1, **BUCKET, overlap_comm=True)["forward"] == WHOLE - 2 * 20_000 * 4


@pytest.mark.slow
def test_each_key_changes_what_the_page_says(folder: Path) -> None:
    first, second, third = (peaks(folder, stage) for stage in (1, 2, 3))
    assert peaks(folder, 1, contiguous_gradients=False)["forward"] == first["forward"] - WHOLE
    assert peaks(folder, 1, allgather_bucket_size=1000) == first
    assert peaks(folder, 2, overlap_comm=True)["backward"] == second["backward"] + WHOLE
    assert peaks(folder, 3, **BUCKET)["forward"] == third["forward"] - WHOLE + 20_000 * 4
    assert peaks(folder, 3, contiguous_gradients=False)["forward"] == third["forward"] - WHOLE
    assert peaks(folder, 3, overlap_comm=True) == third
    assert peaks(folder, 3, sub_group_size=20_000)["step"] < third["step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "keys"),
    [
        (1, BUCKET | {"overlap_comm": True}),
        (2, {"reduce_scatter": False}),
        (2, {"contiguous_gradients": False}),
        (3, BUCKET | {"sub_group_size": 20_000, "reduce_scatter": False}),
    ],
)
def test_planned_is_tracked(stage: int, keys: dict[str, Any], folder: Path) -> None:
    strategy = strategy_file(folder, stage, keys)
    (real,) = tracked_on_ranks([CASE], folder, strategy)
    assert list(differences(planned(CASE, folder, strategy, 2), real, ("load", "save"))) == []
