"""Files of the kit's own that a stranger has replaced, folders that two processes make, and home folders in paths."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.files import append_lines, exclusive, is_locked, lock, making, publish_folder, read_lines
from finetune.hand_over.own_folder import refuse_foreign, write_record
from finetune.paths import in_home, read_regular
from tests.support.runs.hostile_files import put_hostile

REPOSITORY = Path(__file__).resolve().parents[1]


def locked(path: Path) -> None:
    os.close(lock(path, wait_seconds=0))


def in_turn(path: Path) -> None:
    with exclusive(path):
        pass


@pytest.mark.parametrize("write", [locked, in_turn, lambda path: append_lines(path, [{}])])
@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "link"])
def test_nothing_is_written_through_a_link_or_into_a_pipe(
    write: Callable[[Path], None], kind: str, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("mine")
    put_hostile(kind, tmp_path / "file")
    if kind == "link":
        (tmp_path / "file").unlink()
        (tmp_path / "file").symlink_to("mine")
    with pytest.raises((OSError, FinetuneError), match=r"(?i)is a (link|pipe|directory)|No such device"):
        write(tmp_path / "file")
    assert not is_locked(tmp_path / "file")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_sparse_file_is_measured_before_it_is_read(tmp_path: Path) -> None:
    put_hostile("huge", tmp_path / "lines")
    for read in (lambda path: read_regular(path, 10**9), read_lines):
        with pytest.raises((OSError, FinetuneError), match="is larger than"):
            read(tmp_path / "lines")
    assert read_lines(tmp_path / "lines", last_bytes=100) == []


def test_one_process_makes_a_folder_and_a_killed_ones_rest_does_not_matter(tmp_path: Path) -> None:
    target = tmp_path / "above" / "product"
    program = f"from finetune.files import making; from pathlib import Path\nwith making(Path({str(target)!r})):\n  "
    words = [sys.executable, "-c", program + "print('began', flush=True); input()"]
    other = subprocess.Popen(words, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "began\n"
    with pytest.raises(FinetuneError, match=rf"product: process {other.pid} on .* is writing it; wait until it has"):
        making(target).__enter__()
    other.kill()
    other.communicate()
    (target.parent / ".tmp-product" / ".tmp-adapter").mkdir(parents=True)  # of an export that was killed
    with making(target) as temporary:
        temporary.mkdir()
        write_record(temporary, "record.json", {"run": "x"})
        publish_folder(temporary, target)
    (target / ".tmp-123-eval.json").write_text("of an evaluation that was killed")
    refuse_foreign(target, "record.json", below=tmp_path)
    assert sorted(path.name for path in target.parent.iterdir()) == ["product"]


def test_an_edit_that_keeps_a_files_size_is_seen(tmp_path: Path) -> None:
    (tmp_path / "product" / "deep").mkdir(parents=True)
    for name in ("a.txt", "deep/b.txt"):
        (tmp_path / "product" / name).write_text("as exported")
    write_record(tmp_path / "product", "record.json", {"run": "x"})
    refuse_foreign(tmp_path / "product", "record.json", below=tmp_path)
    for name in ("a.txt", "deep/b.txt"):
        (tmp_path / "product" / name).write_text("as I edited")
        with pytest.raises(FinetuneError, match=f"{name}: was changed after the export"):
            refuse_foreign(tmp_path / "product", "record.json", below=tmp_path)
        (tmp_path / "product" / name).write_text("as exported")


def test_a_file_system_without_locks_makes_folders_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("finetune.files.fcntl.lockf", lockf)
    with making(tmp_path / "product") as temporary:
        temporary.mkdir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["~nosuchuser/x", "~nosuchuser", "~$table.xlsx"])
def test_nobodys_home_folder_is_one_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No folder named `~nosuchuser` is made here, and no verb shows a traceback."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is no user's home folder here; write the whole path, or"):
        in_home(text)
    lines = {
        ("status", text): "is no user's home folder here",
        ("init", text, "-o", "r.yaml"): "no such file",
        ("init", "rows.jsonl", "-o", text): "is no user's home folder here",
        ("check", "smollm2_1.7b_lora_1x8gb", f"output_dir={text}"): f"output_dir: is {text}; it must be a whole path",
        ("check", "smollm2_1.7b_lora_1x8gb", f"model.name_or_path={text}"): f"is {text}; it must be a whole path",
        ("sample", text, "--data", "rows.jsonl", "--metric", "exact", "-o", "o"): "",
    }
    for words, line in lines.items():
        assert main([*words]) in (2, 4), words
        told = capsys.readouterr().err
        assert line in told
        assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []


def test_a_template_in_the_recipe_is_no_path(tmp_path: Path) -> None:
    assert main(["check", "smollm2_1.7b_lora_1x8gb", "data.chat_template=~{{ messages }}"]) != 1
