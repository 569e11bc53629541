"""The general set: right by its own metrics, every source with its licence, and made again byte for byte."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import finetune
from benchmarks import general_set

FOLDER = Path(finetune.__file__).parent / "scoring"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in (FOLDER / "general.jsonl").read_text("utf-8").splitlines()]
WORDNET = Path("/usr/share/wordnet")


def plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", "", text.lower()).split())


def test_there_are_enough_questions_in_a_small_file() -> None:
    assert 200 <= len(ROWS) <= 250
    assert (FOLDER / "general.jsonl").stat().st_size <= 120_000
    assert len({row["prompt"] for row in ROWS}) == len(ROWS)
    assert all(row.keys() == {"prompt", "reference", "metric", "kind", "source"} for row in ROWS)
    kinds = Counter(row["kind"] for row in ROWS)
    assert kinds.keys() == {"knowledge", "geography", "science", "words", "arithmetic", "format"}
    assert min(kinds.values()) >= 20


@pytest.mark.parametrize("metric", ["exact", "normalized", "number", "choice", "contains"])
def test_a_reference_can_be_right_by_its_metric(metric: str) -> None:
    rows = [row for row in ROWS if row["metric"] == metric]
    assert len(rows) >= 6
    for row in rows:
        prompt, reference = row["prompt"], row["reference"]
        match metric:
            case "exact":
                assert reference == reference.strip() != ""
            case "normalized":
                assert json.loads(reference), row
            case "number":
                float(reference)
            case "choice":
                letters = re.findall(r"^([A-D])\) \w+$", prompt, re.MULTILINE)
                assert letters == ["A", "B", "C", "D"]
                assert reference in letters
            case "contains":  # a repeated question is no answer, and an article alone would be none
                assert len(plain(reference)) >= 3, row
                assert plain(reference) not in plain(prompt), row


def test_the_letters_of_right_options_are_mixed() -> None:
    letters = Counter(row["reference"] for row in ROWS if row["metric"] == "choice")
    assert letters.keys() == {"A", "B", "C", "D"}
    assert max(letters.values()) <= sum(letters.values()) / 2


def test_the_sums_are_right() -> None:
    sums = [re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", row["prompt"]) for row in ROWS]
    rows = [(match, row) for match, row in zip(sums, ROWS, strict=True) if match]
    assert len(rows) == 32
    for match, row in rows:
        left, right = int(match[1]), int(match[3])
        assert int(row["reference"]) == {"+": left + right, "-": left - right, "*": left * right}[match[2]]


def test_every_source_names_its_licence_and_has_its_notice() -> None:
    notices = (FOLDER / "general_licences.txt").read_text("utf-8")
    sources = {row["source"] for row in ROWS}
    assert len(sources) == 7
    for source in sources:
        package, licence = source.split(", ", 1)
        assert re.match(r"(MIT|BSD-3-Clause|Apache-2\.0|WordNet 3\.0 License)", licence), source
        assert package == "finetune" or package in notices


def test_the_script_writes_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    for package in general_set.VERSIONS:
        pytest.importorskip(package.replace("-", "_"))
    if not WORDNET.is_dir():
        pytest.skip("needs Debian's wordnet-base")
    assert general_set.main(str(WORDNET)) == 0
    assert capsys.readouterr().out == (FOLDER / "general.jsonl").read_text("utf-8")


def test_another_version_of_a_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(general_set.VERSIONS, "pytest", "0.1")
    with pytest.raises(SystemExit, match=r"pytest: version \S+ instead of 0\.1; pip install pytest==0\.1"):
        general_set.folder_of("pytest")
