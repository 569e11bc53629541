"""Every case of the corpus (tests/support/rows/corpus.py): a stranger's file, or a bad moment, becomes one line,
soon."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from finetune.output_stream import has_controls
from tests.support.rows.cases import cases_in
from tests.support.rows.corpus import SECONDS, lay_out, outcome_of, processor_seconds
from tests.support.rows.corpus_starts import make_starts

FOLDER = Path(__file__).resolve().parent
CASES = [
    (f"{file.stem}-{name}", case) for file in sorted(FOLDER.glob("*.yaml")) for name, case in cases_in(file).items()
]
LONGEST_LINE = 700
LIBRARY_WORDS = ("Traceback", "site-packages", "Input should be", "panicked at")
# The numbers of the failures that cases are examples of; those of training alone have tests of their own.
CLASSES = {1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> dict[str, Path]:
    return make_starts(tmp_path_factory.mktemp("starts"), tiny_llama)


def test_every_case_is_seen() -> None:
    assert len(CASES) >= 150
    counted = Counter(case["class"] for _, case in CASES)
    assert counted.keys() == CLASSES
    assert min(counted.values()) >= 5, counted


@pytest.mark.sample(25, thorough=40)
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES])
@pytest.mark.filterwarnings("ignore")
def test_case(
    case: dict[str, Any],
    tmp_path: Path,
    starts: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    folder = tmp_path / "case"
    folder.mkdir()
    monkeypatch.setenv(
        "FINETUNE_CACHE", str(request.getfixturevalue("tmp_path_factory").getbasetemp() / "corpus-cache")
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(folder)
    lay_out(case, folder, starts)
    began = processor_seconds()
    outcome = outcome_of(case, folder)
    assert processor_seconds() - began < SECONDS
    assert outcome.code == case.get("code", 2), outcome.text
    says = case.get("says", [])
    for part in [says] if isinstance(says, str) else says:
        assert part in outcome.text, outcome.text
    assert case.get("keeps", "\0") not in outcome.text, outcome.text
    if outcome.code:
        refusal = [line for line in outcome.text.splitlines() if line.strip()]
        assert not [word for word in LIBRARY_WORDS if word in outcome.text], outcome.text
        assert refusal
        assert len(refusal) <= case.get("lines", 4), outcome.text
        assert max(map(len, refusal)) <= LONGEST_LINE, outcome.text
        assert re.search(r"[;:,] ", outcome.text), f"neither place nor remedy: {outcome.text}"
    coloured = re.sub(r"\x1b\[[0-9;]*m", "", outcome.text)
    assert not [line for line in coloured.splitlines() if has_controls(line.replace("\t", " "))], repr(outcome.text)
