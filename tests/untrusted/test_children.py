"""What a stranger's file computes runs in a child once: within its limits it is trusted, beyond them refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.errors import FinetuneError
from finetune.untrusted import programs as children
from finetune.untrusted.programs import is_simple, refuse_slow_patterns, refused, template_problem

LIMITS: dict[str, Any] = {"seconds": 1, "mebibytes": 64}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(children, "_found_here", {})
    return tmp_path / "trusted"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process."""
    monkeypatch.setattr(children, "_found_here", {})


def test_what_ends_is_trusted_by_its_hash(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"limit()\nopen({str(tmp_path / 'ran')!r}, 'a').write('x')\nanswer('ok')"
    for _ in range(3):
        assert refused("a", program, {"n": 1}, **LIMITS) is None
        forget(monkeypatch)
    assert (tmp_path / "ran").read_text() == "x"
    assert len(list(own_cache.iterdir())) == 1
    assert refused("a", program, {"n": 2}, **LIMITS) is None  # another file
    assert refused("b", program, {"n": 2}, known_by="x", **LIMITS) is None
    assert refused("b", program, {"n": 3}, known_by="x", **LIMITS) is None  # the same one, elsewhere
    assert (tmp_path / "ran").read_text() == "xxx"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("program", "why"),
    [
        pytest.param("limit()\nwhile True: pass", "does not end within 1 second", marks=pytest.mark.thorough),
        ("limit()\nx = bytearray(2**30)", "needs more than 64 MiB"),
        ("limit()\nx = 'x' * 2**31", "needs more than 64 MiB"),
        ("import os, signal\nlimit()\nos.kill(os.getpid(), signal.SIGSEGV)", "breaks the library"),
        ("limit()\nanswer('is odd')", "is odd"),
    ],
)
def test_what_does_not_is_refused_each_time(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    for _ in range(2):
        problem = refused("a", program, {}, **LIMITS)
        assert problem is not None
        assert why in problem
        forget(monkeypatch)
    assert not own_cache.exists()


def test_a_program_that_cannot_run_refuses_nothing(own_cache: Path) -> None:
    assert refused("a", "import no_such_library", {}, **LIMITS) is None
    assert not own_cache.exists()


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "file"))
    assert refused("a", "limit()\nanswer('ok')", {}, **LIMITS) is None


def test_a_template_without_jinja_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a child"))
    assert template_problem("plain") is None
    refuse_slow_patterns("lora", ["q_proj", r".*\.layers\.\d+\.mlp.*"], ["a.b"])


@pytest.mark.parametrize("when", ["add_generation_prompt", "tools", "messages|length > 2", "messages|length < 2"])
def test_a_template_is_tried_with_every_kind_of_chat(when: str) -> None:
    large = "{{ (messages[0].role * 2**29)|length }}"
    assert template_problem(f"{{% if {when} %}}{large}{{% endif %}}") == "needs more than 256 MiB"


@pytest.mark.parametrize(
    ("pattern", "simple"),
    [
        ("q_proj", True),
        (r"model\.layers\.\d+\.(q|k)_proj", True),
        (r".*(up|down)_proj.*x+", True),
        (r".*.*.*.*", False),
        (r"(a+)+b", False),
        (r"(a|a)*b", False),
        (r"(a{2,}){3}", False),
        (r"(a)\1", False),
        (r"(?=a)b", False),
        ("a" * 10_001, False),
    ],
)
def test_patterns_that_cannot_take_long(pattern: str, simple: bool) -> None:
    assert is_simple(pattern) == simple


@pytest.mark.slow
def test_the_line_names_place_and_pattern() -> None:
    with pytest.raises(
        FinetuneError, match=r"^lora: matching the model's names by .*\(a\+\)\+b.* does not end within 1 s"
    ):
        refuse_slow_patterns("lora", ["(a+)+b"], ["a" * 60])
    refuse_slow_patterns("lora", ["(a+)+b"], ["aab"])
    refuse_slow_patterns("lora", ["(a+"], ["aab"])  # no pattern at all: said elsewhere
