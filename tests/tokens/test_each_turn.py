"""Rows of dialogues as one example for each answer, and what of templates for reasoning is told once for a data set."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.data.sources import Source, resolve
from finetune.errors import DataError
from finetune.recipe.schema import Recipe
from finetune.tokens.cache import VERSION, documents_keys, stored_documents
from finetune.tokens.dataset import Prepared, prepare
from finetune.tokens.encoder import IGNORE, Encoder
from tests.support.models.thinking_families import thinking_tokenizer

OFF = {"enable_thinking": False}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def dialogue(number: int, turns: int, thought: str | None = "Hm") -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"q{number}.{turn}"})
        messages.append({"role": "assistant", "content": f"a{number}.{turn}", "reasoning_content": thought})
    return {"messages": messages}


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def recipe_of(*files: Path, entries: list[dict[str, Any]] | None = None, **data: Any) -> Recipe:
    sets = [
        {"path": "json", "data_files": str(file), **extra}
        for file, extra in zip(files, entries or [{} for _ in files], strict=True)
    ]
    settings = {"train_on": "each_turn", "max_length": 256, **data}
    return Recipe.model_validate({"model": {"name_or_path": "none"}, "data": {"train": sets, **settings}})


def prepared(recipe: Recipe, family: str = "qwen3") -> Prepared:
    return prepare(recipe, thinking_tokenizer(family))


def learned_texts(data: Prepared, family: str = "qwen3") -> list[str]:
    """What each document of the pool teaches."""
    tokenizer, texts = thinking_tokenizer(family), []
    for index in range(len(data.pool.lengths)):
        ids, labels = data.pool.document(index)
        texts.append(tokenizer.decode(ids[labels != IGNORE].tolist()))
    return texts


# -- examples --------------------------------------------------------------------------------------------------------


def test_a_row_is_an_example_for_each_answer_in_order(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [dialogue(0, 3), dialogue(1, 1), dialogue(2, 2)])
    data = prepared(recipe_of(file))
    assert learned_texts(data) == [
        f"<think>\nHm\n</think>\n\na{row}.{turn}<|im_end|>"
        for row, turn in [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    ]
    assert data.facts["documents"] == 6
    assert [data.pool.place(index).rsplit(":", 1)[1] for index in range(6)] == ["1", "1", "1", "2", "3", "3"]
    assert f"{file}: 3 rows are 6 documents: each answer is one (train_on: each_turn)" in data.notes
    again = prepared(recipe_of(file))
    assert again.fingerprint == data.fingerprint
    assert [again.train.members(row) for row in range(len(again.train))] == [
        data.train.members(row) for row in range(len(data.train))
    ]


def test_answers_that_are_not_learned_make_no_example(tmp_path: Path) -> None:
    row = dialogue(0, 3)
    row["messages"][1]["weight"] = 0
    data = prepared(recipe_of(write(tmp_path / "rows.jsonl", [row])))
    assert [text[-14:] for text in learned_texts(data)] == ["a0.1<|im_end|>", "a0.2<|im_end|>"]


def test_texts_are_one_example(tmp_path: Path) -> None:
    data = prepared(recipe_of(write(tmp_path / "rows.jsonl", [{"prompt": "a ", "completion": "one"}] * 2)))
    assert learned_texts(data) == ["one<|im_end|>"] * 2
    assert not data.notes


def test_each_example_is_held_to_max_length(tmp_path: Path) -> None:
    """Of a dialogue whose second example is too long, the first is kept."""
    long = dialogue(0, 2)
    long["messages"][2]["content"] = "why " * 60
    file = write(tmp_path / "rows.jsonl", [long, dialogue(1, 2)])
    whole = prepared(recipe_of(file))
    limit = int(whole.pool.lengths[1]) - 1
    assert limit > whole.pool.lengths[[0, 2, 3]].max()
    kept = prepared(recipe_of(file, max_length=limit, truncation="drop"))
    assert kept.pool.lengths.tolist() == whole.pool.lengths[[0, 2, 3]].tolist()
    assert kept.facts["dropped"] == 1
    with pytest.raises(DataError) as raised:
        prepared(recipe_of(file, max_length=limit))
    (mistake,) = raised.value.mistakes
    assert mistake.startswith(f"{file}:1: {limit + 1} tokens are more than data.max_length {limit}; ")


def test_the_setting_is_part_of_the_address(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [dialogue(0, 2)])
    keys = set()
    for train_on in ("each_turn", "completion"):
        data = recipe_of(file, train_on=train_on).data
        encoder = Encoder(thinking_tokenizer("qwen3"), data)
        keys.add(documents_keys(resolve(data.train[0]), data, encoder)[VERSION])
    assert len(keys) == 2


def test_addresses_of_this_and_earlier_versions_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of earlier releases are resumed by them. The file is hashed once for all."""
    file = write(tmp_path / "rows.jsonl", [dialogue(0, 2)])
    data, hashed = recipe_of(file).data, list[Path]()
    encoder, key = Encoder(thinking_tokenizer("qwen3"), data), Source.key
    monkeypatch.setattr(Source, "key", lambda source: hashed.extend(source.files) or key(source))
    identity = {"tokenizer": "0a", "template": "1b", "ends": "2c"}  # ends: where a template writes none of its own
    monkeypatch.setattr(Encoder, "identity", lambda encoder: dict(identity))
    addresses = documents_keys(resolve(data.train[0]), data, encoder)
    assert hashed == [file]
    digest = hashlib.blake2b(file.read_bytes()).hexdigest()[:32]
    entry = data.train[0]
    parts: dict[str, Any] = {"source": {"kind": "json", "files": [digest], "split": "all"}}
    parts |= {name: getattr(data, name) for name in ("max_length", "train_on", "truncation", "date_string")}
    reading = {name: getattr(entry, name) for name in ("format", "columns", "roles", "chat_template_kwargs")}
    for version in (9, 8, 7):
        if version < 9:
            identity.pop("ends", None)
        whole = {**parts, "reading": reading, "version": version, "encoder": identity}
        text = json.dumps(whole, sort_keys=True, default=lambda section: section.model_dump())
        assert addresses[version] == hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    assert len({*addresses.values()}) == len(addresses) == 3


@pytest.mark.parametrize("one_line", [False, True])
def test_examples_of_a_row_are_held_out_together(tmp_path: Path, one_line: bool) -> None:
    """A later turn holds the answers of the earlier ones: they may not be on both sides. One line of JSON may hold all
    rows, so lines do not tell them apart."""
    rows = [dialogue(number, 3) for number in range(20)]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows) if one_line else "[" + ",\n".join(map(json.dumps, rows)) + "]")
    data = prepared(recipe_of(file, eval={"fraction": 0.25}))
    row_of = np.arange(60) // 3
    trained, held_out = set(row_of[data.split.train].tolist()), set(row_of[data.split.held_out].tolist())
    assert len(held_out) == 5
    assert len(data.split.held_out) == 15
    assert not trained & held_out
    assert trained | held_out == set(range(20))


def test_one_row_cannot_be_split(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [dialogue(0, 3)])
    with pytest.raises(DataError, match=r"data\.eval: one document cannot be split"):
        prepared(recipe_of(file, eval={"fraction": 0.5}))


# -- what is told ----------------------------------------------------------------------------------------------------


def test_reasoning_that_is_left_out_is_told_once_with_a_count(tmp_path: Path) -> None:
    rows = [dialogue(0, 1), dialogue(1, 2), dialogue(2, 3), dialogue(3, 2)]
    file = write(tmp_path / "rows.jsonl", rows)
    data = recipe_of(file, train_on="assistant").data
    encoder = Encoder(thinking_tokenizer("qwen3"), data)
    with pytest.raises(DataError) as raised:
        stored_documents(resolve(data.train[0]), data, encoder)
    assert raised.value.mistakes == (
        f"{file}:2, 3, 4: the chat template leaves out the reasoning of turn 2, which is supervised; set "
        "data.train_on: each_turn (every answer an example of its own) or completion, or weight 0 on that turn",
    )
    assert raised.value.exit_code == 2
    assert prepared(recipe_of(file, train_on="completion")).facts["documents"] == 4
    assert prepared(recipe_of(file)).facts["documents"] == 8


OTHERWISE = "rows whose earlier answers the chat template writes differently from the last one: {}; data.train_on"


@pytest.mark.sample(2, thorough=6)
@pytest.mark.parametrize(
    ("family", "kwargs", "count"),
    [("qwen3", {}, 2), ("qwen3", OFF, 2), ("qwen35", {}, 2), ("gpt_oss", {}, 2), ("r1", {}, 2), ("smollm3", OFF, 0)],
)
def test_answers_that_are_written_otherwise_are_counted(
    tmp_path: Path, family: str, kwargs: dict[str, Any], count: int
) -> None:
    file = write(tmp_path / "rows.jsonl", [dialogue(0, 1, None), dialogue(1, 2, None), dialogue(2, 3, None)])
    entries = [{"chat_template_kwargs": kwargs}]
    told = [note for note in prepared(recipe_of(file, entries=entries, train_on="assistant"), family).notes if
            "differently" in note]  # fmt: skip
    expected = f"{file}: {OTHERWISE.format(count)}"
    assert [note[: len(expected)] for note in told] == [expected] * bool(count)
    for train_on in ("each_turn", "completion"):
        data = prepared(recipe_of(file, entries=entries, train_on=train_on), family)
        assert not any("differently" in note for note in data.notes)


def test_rows_without_reasoning_are_counted_where_the_template_asks_for_it(tmp_path: Path) -> None:
    switched = dialogue(3, 1, None)
    switched["messages"][0]["content"] += " /no_think"
    file = write(tmp_path / "rows.jsonl", [dialogue(0, 1), dialogue(1, 1, None), dialogue(2, 1, None), switched])

    def told(family: str, **kwargs: Any) -> list[str]:
        entries = [{"chat_template_kwargs": kwargs}]
        notes = prepared(recipe_of(file, entries=entries, train_on="assistant"), family).notes
        return [note.removeprefix(f"{file}: ") for note in notes]

    asks = (
        "documents without reasoning although the chat template asks for it: 2; to keep the model's reasoning, add "
        "chat_template_kwargs: {enable_thinking: false}"
    )
    assert told("qwen3") == told("qwen35") == told("qwen3", enable_thinking=True) == [asks]
    assert told("r1") == []  # has no such variable
    write(file, [dialogue(1, 1, None), dialogue(2, 1, None)])
    assert told("qwen3", **OFF) == told("smollm3", **OFF) == []


# -- variables of data sets ------------------------------------------------------------------------------------------


def test_each_data_set_has_its_own_variables(tmp_path: Path) -> None:
    """One that thinks and one that does not, in one training, and a row of the second with a variable of its own."""
    thinks = write(tmp_path / "thinks.jsonl", [dialogue(0, 1)])
    own = {**dialogue(2, 1), "chat_template_kwargs": {"enable_thinking": True}}
    plain = write(tmp_path / "plain.jsonl", [dialogue(1, 1, None), own])
    entries: list[dict[str, Any]] = [{}, {"chat_template_kwargs": OFF}]
    data = prepared(recipe_of(thinks, plain, entries=entries, train_on="assistant"))
    assert learned_texts(data) == [
        "<think>\nHm\n</think>\n\na0.0<|im_end|>", "a1.0<|im_end|>", "<think>\nHm\n</think>\n\na2.0<|im_end|>",
    ]  # fmt: skip
    assert not data.notes
