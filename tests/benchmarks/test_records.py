"""Records name their code, and docs/measured.md says which are of other code than this."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import records

NAMES = sorted(file.stem for file in records.RESULTS.glob("*.json"))


def test_the_page_says_which_records_are_of_other_code() -> None:
    assert records.on_page(records.PAGE.read_text("utf-8")) == records.table(), "run python benchmarks/records.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_record_names_its_code_and_the_files_are_there(name: str) -> None:
    content = records.record(name)
    assert set(content) >= {"date", "commit", "files_sha256", "device"}
    assert re.fullmatch(r"[0-9a-f]{64}", content["files_sha256"])
    assert all((records.ROOT / path).exists() for path in records.depended_files(name))


def test_no_record_lacks_its_files() -> None:
    assert NAMES == sorted(name for name in records.DEPENDS if name in NAMES)
    assert len(NAMES) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_the_digest_is_that_of_its_commit(name: str) -> None:
    content = records.record(name)
    commit, changed, _ = content["commit"].partition(" and changes")
    if changed or commit == "not recorded":
        return
    try:
        records.git("cat-file", "-e", f"{commit}^{{commit}}")
    except Exception:
        pytest.skip("this checkout lacks the commit")
    # A folder that has come since is no part of the record.
    assert content["files_sha256"] == records.digest_at(name, commit)


def test_a_changed_file_changes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, folder in {"ROOT": tmp_path, "RESULTS": tmp_path}.items():
        monkeypatch.setattr(records, name, folder)
    monkeypatch.setattr(records, "DEPENDS", {"speed": ("code",)})
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "step.py").write_text("x = 1\n")
    (tmp_path / "speed.json").write_text(json.dumps({"date": "2026-11-29", "device": "a card", **records.stamp("speed")}))
    assert records.table().endswith("| `speed` | not recorded | 2026-11-29 | a card | no |\n")
    for name, text in (("step.py", "x = 2\n"), ("other.py", "x = 1\n")):
        (tmp_path / "code" / name).write_text(text)
        assert records.has_changed("speed")
    (tmp_path / "code" / "other.py").unlink()
    (tmp_path / "code" / "step.py").write_text("x = 1\n")
    assert not records.has_changed("speed")
    monkeypatch.undo()
    # git's digest of a commit and this folder's are one, where nothing has changed.
    if not records.git("status", "--porcelain", "--", *records.depended_files("tokenise")):
        assert records.digest_at("tokenise", "HEAD") == records.digest_now("tokenise")
