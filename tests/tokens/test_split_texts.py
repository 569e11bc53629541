"""truncation: split. Pieces of a long text are its own tokens, one after another; chats are never split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.cli.main import main
from finetune.data.sources import resolve
from finetune.errors import DataError
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.schema import Recipe
from finetune.report.preview import find_oddities
from finetune.tokens.cache import pieces_of
from finetune.tokens.dataset import Prepared, prepare, prepare_here
from finetune.tokens.encoder import IGNORE

LIMIT = 16
WORDS = [3, 200, 16, 31, 17, 1, 95]  # of each text


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


def recipe_of(model: Path, file: Path, **data: Any) -> Recipe:
    sets = [{"path": "json", "data_files": str(file)}]
    settings = {"train": sets, "max_length": LIMIT, "truncation": "split", **data}
    return Recipe.model_validate({"model": {"name_or_path": str(model)}, "data": settings})


def texts() -> list[dict[str, Any]]:
    names = ("old", "stone", "bridge", "over", "the", "river")
    return [{"text": " ".join(names[(row + word) % 6] for word in range(count))} for row, count in enumerate(WORDS)]


def documents(data: Prepared) -> list[tuple[np.ndarray, np.ndarray]]:
    return [data.pool.document(index) for index in range(len(data.pool.lengths))]


def test_the_pieces_are_the_text_token_by_token(tmp_path: Path, tiny_llama: Path) -> None:
    file = write(tmp_path, texts())
    split, whole = recipe_of(tiny_llama, file), recipe_of(tiny_llama, file, max_length=4096)
    data, uncut = (prepare(recipe, load_tokenizer(recipe)) for recipe in (split, whole))
    assert len(documents(uncut)) == len(WORDS)
    for row, (ids, _) in enumerate(documents(uncut)):
        of_row = np.flatnonzero(data.pool.source_rows == row)
        assert len(of_row) == max(1, -(-len(ids) // LIMIT))
        assert np.concatenate([documents(data)[index][0] for index in of_row]).tolist() == ids.tolist()
    for ids, labels in documents(data):
        assert 2 <= len(ids) <= LIMIT
        assert labels[0] == IGNORE
        assert labels[1:].tolist() == ids[1:].tolist()
    assert data.facts["truncated"] == data.facts["dropped"] == data.facts["tokens_cut"] == 0
    assert data.facts["tokens"] == uncut.facts["tokens"]
    longer = int((uncut.pool.lengths > LIMIT).sum())
    assert any(f"{len(WORDS)} texts, {longer} longer than data.max_length, are" in note for note in data.notes)
    begin = load_tokenizer(split).bos_token_id
    findings = [odd.text for odd in find_oddities(data, split.data, begin=begin)]
    assert not [text for text in findings if "truncated" in text or "end of turn" in text]


def test_a_last_token_is_never_alone() -> None:
    lengths = {count: [len(piece.input_ids) for piece in pieces_of([*range(count)], 8)] for count in range(9, 35)}
    assert lengths[17] == [8, 7, 2]
    assert lengths[16] == [8, 8]
    assert all(sum(sizes) == count and min(sizes) >= 2 and max(sizes) <= 8 for count, sizes in lengths.items())


def test_all_pieces_of_a_text_are_held_out_together(tmp_path: Path, tiny_llama: Path) -> None:
    rows = [{"text": f"{number} " + "old stone bridge " * 30} for number in range(8)]
    recipe = recipe_of(tiny_llama, write(tmp_path, rows), eval={"fraction": 0.25})
    data = prepare(recipe, load_tokenizer(recipe))
    held_out = {*data.pool.source_rows[data.split.held_out].tolist()}
    assert len(held_out) == 2
    assert not held_out & {*data.pool.source_rows[data.split.train].tolist()}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "old ", "completion": "stone bridge " * 40},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "old stone " * 40}]},
    ],
    ids=["completion", "chat"],
)
def test_others_are_refused_with_the_reason(tmp_path: Path, tiny_llama: Path, row: dict[str, Any]) -> None:
    recipe = recipe_of(tiny_llama, write(tmp_path, [row, row]))
    for refused in (lambda: prepare(recipe, load_tokenizer(recipe)), lambda: prepare_here(recipe)):
        with pytest.raises(DataError) as caught:
            refused()
        (mistake,) = caught.value.mistakes
        assert mistake.startswith(f"{resolve(recipe.data.train[0]).files[0]}:1, 2: ")
        assert mistake.endswith("data.truncation: right or drop, because only texts without a prompt are split")


def test_the_share_that_is_cut_is_named(tmp_path: Path, tiny_llama: Path) -> None:
    file = write(tmp_path, texts())
    cut, whole = recipe_of(tiny_llama, file, truncation="right"), recipe_of(tiny_llama, file, max_length=4096)
    data, uncut = (prepare(recipe, load_tokenizer(recipe)) for recipe in (cut, whole))
    lost = 1 - data.facts["tokens"] / uncut.facts["tokens"]
    assert lost > 0.5
    (note,) = [note for note in data.notes if "truncated" in note]
    assert f"{100 * lost:.0f} % of the tokens are cut; raise it, or for texts without a prompt set" in note
    slightly = recipe_of(tiny_llama, file, truncation="right", max_length=int(uncut.pool.lengths.max()) - 1)
    (note,) = prepare(slightly, load_tokenizer(slightly)).notes
    assert note == "1 document truncated at data.max_length: 0.3 % of the tokens are cut"


def test_init_splits_a_folder_of_long_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"{number} " + "The old stone bridge. " * 2000, "utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["init", "books", "--gpus", "cpu"]) == 0
    assert "longer than max_length: 3 rows; they are split into pieces, and no token is lost" in capsys.readouterr().out
    assert "\n  truncation: split  # " in Path("books.yaml").read_text("utf-8")
    assert main(["check", "books.yaml", "--data"]) == 0
