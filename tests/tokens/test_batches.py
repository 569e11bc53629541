"""Rows, their order and micro-batches: nothing lost, nothing doubled, the same for any number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.errors import DataError
from finetune.recipe.schema import Recipe
from finetune.tokens.batches import MicroBatch, micro_batches, prefetch, rows_of_step
from finetune.tokens.cache import StoredDocuments
from finetune.tokens.dataset import Prepared, prepare
from finetune.tokens.encoder import IGNORE
from finetune.tokens.mixture import DocumentPool, Rows
from tests.support.models.chat_families import tokenizer_of

FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def pool_of(documents: list[list[int]]) -> DocumentPool:
    """A pool of documents of given tokens; a token is learned when it is odd, a document's first never."""
    lengths = [len(tokens) for tokens in documents]
    learned = [token % 2 == 1 and at > 0 for tokens in documents for at, token in enumerate(tokens)]
    ends = np.cumsum([0, *lengths])
    store = StoredDocuments(
        tokens=np.array([token for tokens in documents for token in tokens], np.int32),
        is_supervised=np.array(learned),
        offsets=ends.astype(np.int64),
        supervised=np.array([sum(learned[a:b]) for a, b in pairwise(ends)], np.int64),
        digests=np.arange(len(documents), dtype=np.uint64),
        lines=np.arange(1, len(documents) + 1),
        files=np.zeros(len(documents), np.int32),
        rows=np.arange(len(documents)),
        names=("rows.jsonl",),
        facts={},
    )
    return DocumentPool([store])


def rows_of(documents: list[list[int]], capacity: int | None) -> Rows:
    return pool_of(documents).rows(np.arange(len(documents)), capacity)


# -- the order ------------------------------------------------------------------------------------------------------


@FEW
@given(rows=st.integers(1, 50), batch=st.integers(1, 70), epochs=st.floats(0.1, 3.5), seed=st.integers(0, 2**70))
def test_every_row_once_an_epoch(rows: int, batch: int, epochs: float, seed: int) -> None:
    total = max(1, round(rows * epochs))
    arguments: dict[str, Any] = {"rows": rows, "global_batch_size": batch, "seed": seed, "total_rows": total}
    steps = [rows_of_step(step, **arguments) for step in range(-(-total // batch))]
    stream = np.concatenate(steps).tolist()
    assert len(stream) == total
    assert all(len(step) == batch for step in steps[:-1])
    for epoch in range(0, total, rows):
        seen = stream[epoch : epoch + rows]
        assert len(set(seen)) == len(seen)
        assert set(seen) <= set(range(rows))
    other = [rows_of_step(step, **arguments | {"global_batch_size": 1}) for step in range(total)]
    assert np.concatenate(other).tolist() == stream


def test_the_order_is_this_one_for_ever() -> None:
    """A run must find its rows again after any upgrade."""
    actual = rows_of_step(0, rows=8, global_batch_size=12, seed=42, total_rows=100).tolist()
    assert actual == [6, 0, 2, 7, 3, 1, 4, 5, 4, 5, 1, 2]
    assert rows_of_step(0, rows=8, global_batch_size=8, seed=43, total_rows=8).tolist() != actual[:8]


# -- micro-batches --------------------------------------------------------------------------------------------------

DOCUMENTS = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=12), min_size=1, max_size=14)


def documents_in(batch: MicroBatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(tokens, targets) of each document, separated where positions begin at 0."""
    result = []
    for ids, positions, targets in zip(
        *(batch[key] for key in ("input_ids", "position_ids", "shift_labels")), strict=True
    ):
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(positions)]
        for start, end in pairwise(starts):
            assert positions[start:end].tolist() == list(range(end - start))
            result.append((tuple(ids[start:end].tolist()), tuple(targets[start:end].tolist())))
    return [document for document in result if any(document[0])]  # padding and the empty rank's token are zeros


@FEW
@given(
    documents=DOCUMENTS,
    packed=st.booleans(),
    world=st.integers(1, 5),
    share=st.integers(1, 4),
    flat=st.booleans(),
)
def test_no_token_is_lost_or_doubled(
    documents: list[list[int]], packed: bool, world: int, share: int, flat: bool
) -> None:
    rows = rows_of(documents, 16 if packed else None)
    step = rows_of_step(0, rows=len(rows), global_batch_size=len(rows), seed=1, total_rows=len(rows))
    by_rank = [
        micro_batches(rows, step, rank=rank, world_size=world, per_device_batch_size=share, flat=flat)
        for rank in range(world)
    ]
    assert {len(batches) for batches in by_rank} == {-(-len(rows) // (world * share))}
    result = Counter(document for batches in by_rank for batch in batches for document in documents_in(batch))
    expected = Counter(
        (tuple(ids), (*(token if token % 2 else IGNORE for token in ids[1:]), IGNORE)) for ids in documents
    )
    assert result == expected
    targets = sum(int((batch["shift_labels"] != IGNORE).sum()) for batches in by_rank for batch in batches)
    assert targets == rows.supervised.sum()
    assert rows.lengths.sum() == sum(map(len, documents))


@FEW
@given(documents=DOCUMENTS, share=st.integers(1, 4))
def test_flat_batches_say_where_documents_lie(documents: list[list[int]], share: int) -> None:
    rows = rows_of(documents, 16)
    for batch in micro_batches(rows, range(len(rows)), rank=0, world_size=1, per_device_batch_size=share, flat=True):
        ends, positions = batch["cu_seq_lens"], batch["position_ids"][0]
        assert ends.dtype == torch.int32
        assert batch["input_ids"].shape[0] == 1
        assert ends[-1] == batch["input_ids"].shape[1]
        assert ends[:-1].tolist() == torch.nonzero(positions == 0).flatten().tolist()
        assert batch["document_lengths"] == tuple(ends.diff().tolist())


def test_shapes_and_padding() -> None:
    rows = rows_of([[1, 2, 3], [5, 7]], None)
    (batch,) = micro_batches(rows, [0, 1], rank=0, world_size=1, per_device_batch_size=2, flat=False)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [5, 7, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2], [0, 1, 0]]
    assert batch["shift_labels"].tolist() == [[IGNORE, 3, IGNORE], [7, IGNORE, IGNORE]]
    assert batch["supervised"].tolist() == [1, 3]
    assert set(batch) == {"input_ids", "position_ids", "shift_labels", "supervised"}
    assert {value.dtype for value in batch.values() if isinstance(value, torch.Tensor)} == {torch.int64}
    (empty,) = micro_batches(rows, [0], rank=1, world_size=2, per_device_batch_size=2, flat=True)
    assert empty["shift_labels"].tolist() == [[IGNORE]]
    assert empty["supervised"].tolist() == []
    assert empty["cu_seq_lens"].tolist() == [0, 1]


def test_one_width() -> None:
    """What is missing is one more document, which sees itself alone and of which nothing is learned."""
    rows = rows_of([[2, 3, 5], [7, 8, 9, 11, 13], [4, 15]], None)
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "per_device_batch_size": 2, "flat": True}
    plain = micro_batches(rows, [0, 1, 2], **options)
    padded = micro_batches(rows, [0, 1, 2], **options, width=8)
    assert [batch["input_ids"].shape for batch in padded] == [(1, 8), (1, 8)]
    assert [batch["document_lengths"] for batch in padded] == [(3, 5), (2, 6)]
    for batch, before in zip(padded, plain, strict=True):
        tokens = before["input_ids"].shape[1]
        for name in ("input_ids", "position_ids", "shift_labels"):
            assert torch.equal(batch[name][:, :tokens], before[name])  # type: ignore[literal-required]
        assert torch.equal(batch["supervised"], before["supervised"])
        assert set(batch["shift_labels"][:, tokens:].flatten().tolist()) <= {IGNORE}
        assert batch["position_ids"][0, tokens:].tolist() == list(range(8 - tokens))
        assert batch["cu_seq_lens"][-1] == 8
    with pytest.raises(AssertionError, match="of 7"):
        micro_batches(rows, [0, 1, 2], **options, width=7)


def test_prefetch_on_a_cpu_passes_through() -> None:
    batches = micro_batches(rows_of([[1, 2, 3]], None), [0], rank=0, world_size=1, per_device_batch_size=1, flat=True)
    (moved,) = prefetch(iter(batches), "cpu", non_blocking=True)
    assert moved["input_ids"] is batches[0]["input_ids"]
    assert moved["document_lengths"] == (3,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_prefetch_on_a_gpu() -> None:
    documents = [[index + 1] * 2000 for index in range(50)]
    batches = micro_batches(
        rows_of(documents, None), range(50), rank=0, world_size=1, per_device_batch_size=1, flat=True
    )
    sums = [batch["input_ids"].double().mul(2).sum() for batch in prefetch(iter(batches), "cuda", non_blocking=True)]
    assert [float(total) for total in sums] == [2 * 2000 * (index + 1) for index in range(50)]


# -- prepare --------------------------------------------------------------------------------------------------------


def write_rows(file: Path, texts: list[str]) -> dict[str, Any]:
    file.write_text("".join(json.dumps({"prompt": f"{text} ", "completion": text}) + "\n" for text in texts))
    return {"path": "json", "data_files": str(file)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def prepared(*train: dict[str, Any], seed: int = 42, samples: dict[str, Any] | None = None, **data: Any) -> Prepared:
    recipe = Recipe.model_validate(
        {
            "model": {"name_or_path": "none"},
            "data": {"train": list(train), "max_length": 64, **data},
            "training": {"seed": seed},
            "samples": samples or {},
        }
    )
    return prepare(recipe, tokenizer_of("llama3"))


def texts_of(rows: Rows) -> list[str]:
    """The learned text of each document."""
    tokenizer = tokenizer_of("llama3")
    result = [labels for row in range(len(rows)) for _, labels in rows.documents(row)]
    return [tokenizer.decode(labels[labels != IGNORE], skip_special_tokens=True) for labels in result]


def test_held_out_documents_are_not_trained_on(cache: Path, tmp_path: Path) -> None:
    texts = [f"text {index}" for index in range(40)]
    entry = write_rows(tmp_path / "a.jsonl", texts) | {"weight": 2.5}
    data = prepared(entry, eval={"fraction": 0.1})
    assert data.eval is not None
    held_out, trained = texts_of(data.eval), Counter(texts_of(data.train))
    assert len(held_out) == 4
    assert set(held_out) | set(trained) == set(texts)
    assert not set(held_out) & set(trained)
    assert Counter(trained.values()) == {2: 18, 3: 18}
    assert data.facts["documents"] == 90
    assert data.facts["distinct_documents"] == 36
    assert data.facts["eval_documents"] == 4
    other = prepared(entry, eval={"fraction": 0.1}, seed=43)
    assert other.fingerprint != data.fingerprint
    assert other.eval is not None
    assert set(texts_of(other.eval)) != set(held_out)


@pytest.mark.parametrize(("fraction", "held_out"), [(0.001, 1), (0.5, 2), (0.999, 3)])
def test_at_least_one_is_held_out_and_one_trained_on(
    cache: Path, tmp_path: Path, fraction: float, held_out: int
) -> None:
    data = prepared(write_rows(tmp_path / "a.jsonl", ["a", "b", "c", "d"]), eval={"fraction": fraction})
    assert data.facts["eval_documents"] == held_out
    assert data.facts["documents"] == 4 - held_out


def test_duplicates_are_kept_out_of_evaluation(cache: Path, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "a.jsonl", ["a", "b", "c"])
    listed = prepared(train, eval=[write_rows(tmp_path / "b.jsonl", ["c", "d"])])
    assert listed.eval is not None
    assert texts_of(listed.eval) == ["d"]
    assert listed.facts["eval_duplicates_left_out"] == 1
    split = prepared(
        write_rows(tmp_path / "c.jsonl", ["same"] * 9 + [f"t{n}" for n in range(11)]), eval={"fraction": 0.5}
    )
    assert split.eval is not None
    assert not set(texts_of(split.eval)) & set(texts_of(split.train))
    assert split.facts["eval_documents"] + split.facts["eval_duplicates_left_out"] == 10
    with pytest.raises(DataError, match="every held-out document is also a training one"):
        prepared(train, eval=[write_rows(tmp_path / "d.jsonl", ["a"])])
    with pytest.raises(DataError, match="one document cannot be split"):
        prepared(write_rows(tmp_path / "e.jsonl", ["a"]), eval={"fraction": 0.5})


def test_several_data_sets_with_weights(cache: Path, tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.jsonl", [f"a{n}" for n in range(10)])
    second = write_rows(tmp_path / "b.jsonl", [f"b{n}" for n in range(10)]) | {"weight": 0.3}
    data = prepared(first, second)
    counts = Counter(text[0] for text in texts_of(data.train))
    assert counts == {"a": 10, "b": 3}
    assert texts_of(data.train) == texts_of(prepared(first, second).train)
    assert data.train.places(0)[0].startswith(str(tmp_path))
    with pytest.raises(DataError, match="weights leave no document"):
        prepared(second | {"weight": 0.01})


def test_truncation(cache: Path, tmp_path: Path) -> None:
    fits, cut, gone = "a", "b " * 60, "c " * 200
    file = tmp_path / "a.jsonl"
    rows = [("p", fits), ("p", cut), (gone, "answer")]
    file.write_text("".join(json.dumps({"prompt": prompt, "completion": text}) + "\n" for prompt, text in rows))
    entry = {"path": "json", "data_files": str(file)}
    with pytest.raises(DataError) as raised:
        prepared(entry)
    assert [mistake.split(": ")[0] for mistake in raised.value.mistakes] == [f"{file}:2, 3"]
    right = prepared(entry, truncation="right")
    assert {key: right.facts[key] for key in ("documents", "truncated", "dropped")} == {
        "documents": 2, "truncated": 1, "dropped": 1,
    }  # fmt: skip
    assert right.train.lengths.max() == 64
    *cut, run_together = right.notes
    assert "prompts that run into their completion without a space or line break: 2" in run_together
    assert [note.split()[0:3] for note in cut] == [["1", "document", "dropped:"], ["1", "document", "truncated"]]
    dropped = prepared(entry, truncation="drop")
    assert {key: dropped.facts[key] for key in ("documents", "truncated", "dropped")} == {
        "documents": 1, "truncated": 0, "dropped": 2,
    }  # fmt: skip
    file.write_text(json.dumps({"prompt": gone, "completion": "answer"}) + "\n")
    for truncation, reason in ("right", "whose question alone is longer than"), ("drop", "longer than"):
        with pytest.raises(DataError) as raised:
            prepared(entry, truncation=truncation)
        (line,) = raised.value.mistakes
        told = f"data.train: holds no document: 1 document {reason} data.max_length (64); data.max_length: "
        assert line.startswith(told)
        longest = int(line.removeprefix(told).removesuffix(" keeps all"))
        prepared(entry, truncation=truncation, max_length=longest)


def test_questions_that_are_held_out_and_trained_on_are_counted(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": f"colour {n // 3} ", "completion": f"it is {n}"} for n in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = {"path": "json", "data_files": str(file)}
    data = prepared(entry, eval={"fraction": 0.3})
    groups = [{int(index) // 3 for index in part} for part in (data.split.train, data.split.held_out)]
    both = sum(int(index) // 3 in groups[0] & groups[1] for index in data.split.held_out)
    assert both == data.facts["eval_questions_trained_on"] > 0
    assert any(f"{both} held-out documents with a question that is trained on too" in note for note in data.notes)
    texts = prepared(write_rows(file, [f"the same begin {n}" for n in range(20)]), eval={"fraction": 0.3})
    assert texts.facts["eval_questions_trained_on"] == 0


def test_packed_and_unpacked_rows_hold_the_same_documents(cache: Path, tmp_path: Path) -> None:
    entry = write_rows(tmp_path / "a.jsonl", [f"text {index} " * (index % 4 + 1) for index in range(30)])
    packed, unpacked = prepared(entry), prepared(entry, packing=False)
    assert sorted(texts_of(packed.train)) == sorted(texts_of(unpacked.train))
    assert len(unpacked.train) == 30 > len(packed.train)
    assert packed.train.lengths.max() <= 64
    assert packed.facts["fill"] > unpacked.facts["fill"]
    assert packed.facts["supervised_tokens"] == unpacked.facts["supervised_tokens"] == packed.train.supervised.sum()
    assert packed.fingerprint != unpacked.fingerprint


def test_prompts_to_answer(cache: Path, tmp_path: Path) -> None:
    entry = write_rows(tmp_path / "a.jsonl", ["one", "two", "three", "four"])
    data = prepared(entry, eval={"fraction": 0.5}, samples={"count": 1})
    assert data.eval is not None
    (prompt,) = data.prompts
    assert prompt.reference in texts_of(data.eval)
    assert prompt.prompt == f"<|begin_of_text|>{prompt.reference} "
    own = prepared(entry, samples={"prompts": ["hello"]}).prompts
    assert [(prompt.prompt, prompt.reference) for prompt in own] == [("hello", None)]
    assert tokenizer_of("llama3").decode(own[0].prompt_ids).endswith("assistant<|end_header_id|>\n\n")
    with pytest.raises(DataError, match=r"samples\.prompts: .*refuses"):
        prepared(entry, samples={"prompts": ["hello"]}, chat_template="{{ raise_exception('no') }}")
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a long enough text to be cut in two"}\n')
    (plain,) = prepared({"path": "json", "data_files": str(text)}, samples={"count": 4}).prompts
    assert plain.prompt.startswith("<|begin_of_text|>a long")
    assert plain.reference is not None
    assert plain.reference.endswith("two")
