"""The fuzzer: a few cases of each input with one seed, that its findings are findings, and that limits are limits."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.fuzzing.inputs import INPUTS, case_of
from tests.support.fuzzing.judged import Verdict, judged, judged_apart
from tests.support.fuzzing.mutations import MOST_LETTERS, Raw, changed, dumped
from tests.support.rows.cases import case_named
from tests.support.rows.corpus_starts import make_starts

# Tokenizers are looked at in a child, half a second each, and reports are drawn.
CASES = {"recipe": 25, "rows": 20, "config": 10, "tokenizer": 4, "safetensors": 20, "index": 20, "manifests": 25}
SEED = 7

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> dict[str, Path]:
    return make_starts(tmp_path_factory.mktemp("starts"), tiny_llama)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", INPUTS)
def test_a_few_cases_of_each(name: str, starts: dict[str, Path], tmp_path: Path) -> None:
    ends: dict[str, list[int]] = {}
    for number in range(CASES.get(name, 5)):
        case = case_of(name, SEED, number, starts)
        ends.setdefault(judged(case, tmp_path / str(number), starts).shape, []).append(number)
    assert {shape: numbers for shape, numbers in ends.items() if shape.startswith("FOUND")} == {}
    assert len(ends) >= 3, ends  # else the changes reach one line of the program


@pytest.mark.thorough
def test_a_case_is_the_same_each_time(starts: dict[str, Path]) -> None:
    for name in INPUTS:
        cases = [json.dumps(case_of(name, 1, number, starts), sort_keys=True) for number in (0, 1, 0)]
        assert cases[0] == cases[2] != cases[1]


def test_a_finding_is_written_once_and_runs_again(
    starts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.fuzz import again, write_found

    case = case_of("config", 1, 0, starts) | {"do": "structure"}
    verdict = Verdict(None, "Traceback", "KeyError from model/build.py configuration")
    assert "KeyError" in write_found(tmp_path / "found", "config-1-0", case, verdict)
    written = case_named(str(tmp_path / "found" / "config-1-0.yaml"))
    assert {key: written[key] for key in case} == yaml.safe_load(yaml.safe_dump(case))
    monkeypatch.setattr("benchmarks.fuzz.judged_apart", lambda cases, *_: [verdict for _ in cases])
    assert again(str(tmp_path / "found" / "config-1-0.yaml"), tmp_path, starts) == 1


def test_a_case_of_the_corpus_runs_again(
    starts: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.fuzz import again

    assert again(f"{ROOT}/tests/corpus/models.yaml::index_pickle", tmp_path, starts) == 0
    assert "weight_map names 'p.bin'" in capsys.readouterr().out


def _with(act: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setitem(__import__("tests.support.rows.corpus", fromlist=["ACTS"]).ACTS, "odd", act)
    return {"do": "odd", "place": "FILE"}


@pytest.mark.parametrize(
    ("raised", "problem"),
    [
        (KeyError("a"), "KeyError from "),
        (RecursionError(), "RecursionError from "),
        ("FILE: wrong\x1b[2J; mend it", "a control character"),
        ("FILE: wrong\u2028; mend it", "a control character"),
        ("FILE: Traceback (most recent call last); mend it", "a library's words: Traceback"),
        ("it is wrong; mend it", "no place"),
        ("FILE", "no remedy"),
        ("FILE: wrong; " + "a" * 2_000, "a message of 1 lines"),
        ("FILE: wrong; mend it", ""),
    ],
)
def test_what_is_found(raised: Exception | str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune.errors import FinetuneError

    def act(case: Mapping[str, Any], folder: Path) -> None:
        raise FinetuneError(raised) if isinstance(raised, str) else raised

    verdict = judged(_with(act, monkeypatch), tmp_path / "case", {})
    assert verdict.problem.startswith(problem)
    assert bool(verdict.problem) == bool(problem)


@pytest.mark.slow
def test_what_is_repeated_over_and_over_is_cut_off() -> None:
    value: Any = "a"
    for _ in range(5):
        value = [value] * 1_000
    assert MOST_LETTERS <= len(dumped(value)) < 2 * MOST_LETTERS


def _spin(case: Mapping[str, Any], folder: Path, starts: Mapping[str, Path]) -> Verdict:
    while True:
        pass


def _take(case: Mapping[str, Any], folder: Path, starts: Mapping[str, Path]) -> Verdict:
    try:
        bytearray(8 * 2**30)
    except MemoryError:
        return Verdict(2, "", "MemoryError from here")
    return Verdict(0, "")


def _end(case: Mapping[str, Any], folder: Path, starts: Mapping[str, Path]) -> Verdict:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGSEGV)
    return Verdict(0, "")


def _pass(case: Mapping[str, Any], folder: Path, starts: Mapping[str, Path]) -> Verdict:
    return Verdict(0, "")


def _as_it_says(case: Mapping[str, Any], folder: Path, starts: Mapping[str, Path]) -> Verdict:
    verdict: Verdict = case["judge"](case, folder, starts)
    return verdict


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("judge", "problem"),
    [(_spin, "more than 1 s of processor time"), (_take, "MemoryError"), (_end, "ended by signal 11")],
)
def test_limits(judge: Any, problem: str, tmp_path: Path) -> None:
    began = time.monotonic()
    odd, fine = {"judge": judge}, {"judge": _pass}
    verdicts = judged_apart([fine, odd, fine], tmp_path / "case", {}, judge=_as_it_says, seconds=1.0)
    assert [bool(verdict.problem) for verdict in verdicts] == [False, True, False]
    assert problem in verdicts[1].problem
    assert time.monotonic() - began < 60
    assert list(tmp_path.iterdir()) == []


def test_changes_are_of_many_kinds() -> None:
    draw, valid = random.Random(1), {"a": [1, {"b": "text"}], "c": None}
    made = {dumped(changed(draw, valid)) for _ in range(500)}
    assert len(made) > 200
    for part in ('"a": [1, {"b"', "NaN", "1e400", "[[[[[", '"c": null, "c":', "\\u001b", "-9223372036854775808"):
        assert any(part in text for text in made), part
    assert dumped({"a": Raw("NaN"), "b": "é", "c": "\ud800"}) == '{"a": NaN, "b": "é", "c": "\\ud800"}'
    assert valid == {"a": [1, {"b": "text"}], "c": None}
