"""Pairs of answers and judged answers: the columns of data sets that people train on, and how they are told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data.chat import Chat, Content, Judged, Pair, Passage
from finetune.data.readings import pair_of_answers, readings
from finetune.data.rows import RowReader, check_rows
from finetune.data.sources import resolve
from finetune.recipe.schema import Data, DataSet

ASKED = {"role": "user", "content": "Why?"}
SO, NO = {"role": "assistant", "content": "So."}, {"role": "assistant", "content": "No."}
BRIEF = {"role": "system", "content": "Be brief."}
HUMAN, GPT_SO, GPT_NO = (
    {"from": "human", "value": "Why?"},
    {"from": "gpt", "value": "So."},
    {"from": "gpt", "value": "No."},
)
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}],
}
RESULT = {"role": "tool", "content": "7"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def write(folder: Path, *rows: dict[str, Any], **entry: Any) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": "json", "data_files": str(file), **entry}


def read(folder: Path, *rows: dict[str, Any], format: str = "preference", **entry: Any) -> list[Content]:
    """The rows as the one reader of all verbs gives them."""
    source = resolve(DataSet.model_validate(write(folder, *rows, format=format, **entry)))
    found = list(RowReader(source).rows())
    assert not [row.problem for row in found if row.problem]
    return [row.read for row in found if row.read is not None]


def told(folder: Path, *rows: dict[str, Any], format: str = "preference", **entry: Any) -> list[str]:
    """What `check --data` tells of good rows, without the file's name."""
    source = write(folder, *rows, format=format, **entry)
    notes: list[str] = []
    check_rows(Data.model_validate({"train": [source]}), notes.append)
    return [note.removeprefix(f"{source['data_files']}: ") for note in notes]


# Name -> (columns as the data set's page states them, keys of its entry, messages before the answers, notes).
DATA_SETS: dict[str, tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]], list[str]]] = {
    "HuggingFaceH4/ultrafeedback_binarized": (
        {
            "prompt": "Why?", "prompt_id": "1f", "chosen": [ASKED, SO], "rejected": [ASKED, NO],
            "messages": [ASKED, SO], "score_chosen": 8.5, "score_rejected": 3.0,
        },
        {}, [ASKED], ["columns not used: 'prompt_id', 'messages', 'score_chosen', 'score_rejected'"],
    ),
    "Intel/orca_dpo_pairs": (
        {"system": "Be brief.", "question": "Why?", "chosen": "So.", "rejected": "No."},
        {"columns": {"instruction": "question"}}, [BRIEF, ASKED], [],
    ),
    "trl-lib/ultrafeedback_binarized": (
        {"chosen": [ASKED, SO], "rejected": [ASKED, NO], "score_chosen": 8.5}, {}, [ASKED],
        ["columns not used: 'score_chosen'"],
    ),
    "trl-lib/hh-rlhf-helpful-base": ({"prompt": [ASKED], "chosen": [SO], "rejected": [NO]}, {}, [ASKED], []),
    "llamafactory/DPO-En-Zh-20k": (
        {"conversations": [HUMAN], "chosen": GPT_SO, "rejected": GPT_NO}, {}, [ASKED],
        ["read as preference, columns: {prompt: conversations}"],
    ),
    "ShareGPT's dialogues": ({"chosen": [HUMAN, GPT_SO], "rejected": [HUMAN, GPT_NO]}, {}, [ASKED], []),
    "a question and dialogues": (
        {"prompt": "Why?", "chosen": [SO], "rejected": [NO]}, {}, [ASKED], [],
    ),
    "messages and texts": ({"prompt": [BRIEF, ASKED], "chosen": "So.", "rejected": "No."}, {}, [BRIEF, ASKED], []),
    "a system prompt as messages": (
        {"prompt": [BRIEF], "chosen": [ASKED, SO], "rejected": [ASKED, NO]}, {}, [BRIEF, ASKED], [],
    ),
    "a prompt that the dialogues repeat": (
        {"prompt": [ASKED], "chosen": [ASKED, SO], "rejected": [ASKED, NO]}, {}, [ASKED], [],
    ),
    "a question with its context": (
        {"q": "Why?", "c": "It rains.", "win": "So.", "lose": "No."},
        {"columns": {"instruction": "q", "input": "c", "chosen": "win", "rejected": "lose"}},
        [{"role": "user", "content": "Why?\n\nIt rains."}], [],
    ),
    "a question of a template": (
        {"q": "Why", "win": "So.", "lose": "No."},
        {"template": {"instruction": "{q}?"}, "columns": {"chosen": "win", "rejected": "lose"}}, [ASKED], [],
    ),
    "other roles": (
        {"chosen": [ASKED | {"role": "Human"}, SO | {"role": "Bot"}],
         "rejected": [ASKED | {"role": "Human"}, NO | {"role": "Bot"}]},
        {"roles": {"Human": "user", "Bot": "assistant"}}, [ASKED], [],
    ),
    "roles the other way round": (
        {"chosen": [ASKED | {"role": "assistant"}, SO | {"role": "user"}],
         "rejected": [ASKED | {"role": "assistant"}, NO | {"role": "user"}]},
        {"roles": {"user": "assistant", "assistant": "user"}}, [ASKED], [],
    ),
    "a prompt that is another dialogue's": (
        {"prompt": "What?", "chosen": [ASKED, SO], "rejected": [ASKED, NO]}, {}, [ASKED],
        ["rows with a prompt that is not in the dialogue of their answers: 2; the dialogue is read, the prompt is not"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA_SETS)
def test_the_columns_of_public_preference_data_are_read(name: str, tmp_path: Path) -> None:
    row, entry, before, notes = DATA_SETS[name]
    first, second = read(tmp_path, row, row, **entry)
    assert first == second
    assert isinstance(first, Pair)
    supervised = [False] * len(before) + [True]
    assert first == Pair(Chat([*before, SO], None, supervised), Chat([*before, NO], None, supervised))
    assert told(tmp_path, row, row, **entry) == notes
    # The same rows are two judged answers each if the objective is kto.
    assert read(tmp_path, row, format="kto", **entry) == [first]


def test_texts_stay_texts_and_the_note_reads_them_as_chats(tmp_path: Path) -> None:
    row = {"q": "Why? ", "chosen": "So.", "rejected": "No."}
    assert read(tmp_path, row, columns={"prompt": "q"}) == [Pair(Passage("Why? ", "So."), Passage("Why? ", "No."))]
    (note,) = told(tmp_path, row, columns={"prompt": "q"})
    assert note.endswith("read them as chats: columns: {instruction: q}")
    (pair,) = read(tmp_path, row, columns={"instruction": "q"})
    assert isinstance(pair, Pair)
    assert isinstance(pair.chosen, Chat)
    assert told(tmp_path, row, columns={"instruction": "q"}) == []


def test_the_common_beginning_is_the_prompt_tool_calls_included(tmp_path: Path) -> None:
    row = {"chosen": [ASKED, CALL, RESULT, SO], "rejected": [ASKED, CALL, RESULT, NO], "tools": json.dumps([TOOL])}
    (pair,) = read(tmp_path, row)
    assert isinstance(pair, Pair)
    assert isinstance(pair.chosen, Chat)
    assert pair.chosen.supervised == [False, False, False, True]
    assert pair.chosen.tools == [TOOL]
    # The answers differ from the call on, so the call is supervised too.
    (pair,) = read(tmp_path, {"chosen": [ASKED, CALL, RESULT, SO], "rejected": [ASKED, NO], "tools": [TOOL]})
    assert isinstance(pair, Pair)
    assert [pair.chosen.supervised, pair.rejected.supervised] == [[False, True, False, True], [False, True]]  # type: ignore[union-attr]


def test_equal_pairs_are_told_and_still_rows(tmp_path: Path) -> None:
    equal, pair = {"chosen": [ASKED, SO], "rejected": [ASKED, SO]}, {"chosen": [ASKED, SO], "rejected": [ASKED, NO]}
    first, second = read(tmp_path, equal, pair)
    assert isinstance(first, Pair)
    assert first.chosen == first.rejected == second.chosen  # type: ignore[union-attr]
    assert told(tmp_path, equal, pair) == ["pairs of two equal answers: 1; they are left out"]


LABELS = [(True, True), (1, True), (1.0, True), ("Yes", True), ("good", True), ("chosen", True), (False, False),
          (0, False), ("0", False), ("no", False), ("undesirable", False)]  # fmt: skip


@pytest.mark.parametrize(("label", "wanted"), LABELS)
def test_labels_that_mean_one_thing(label: Any, wanted: bool, tmp_path: Path) -> None:
    (judged,) = read(tmp_path, {"prompt": "Why? ", "completion": "So.", "label": label}, format="kto")
    assert judged == Judged(Passage("Why? ", "So."), wanted)


@pytest.mark.parametrize(
    ("row", "entry", "messages"),
    [
        ({"prompt": [ASKED], "completion": [SO]}, {}, [ASKED, SO]),
        ({"prompt": [ASKED], "completion": "So."}, {}, [ASKED, SO]),
        ({"prompt": "Why?", "completion": [SO]}, {}, [ASKED, SO]),
        ({"q": "Why?", "a": "So."}, {"columns": {"instruction": "q", "completion": "a"}}, [ASKED, SO]),
        ({"messages": [ASKED, NO, ASKED, SO]}, {}, [ASKED, NO, ASKED, SO]),
        ({"conversations": [HUMAN, GPT_SO]}, {}, [ASKED, SO]),
    ],
)
def test_judged_answers_are_read(
    row: dict[str, Any], entry: dict[str, Any], messages: list[dict[str, Any]], tmp_path: Path
) -> None:
    (judged,) = read(tmp_path, row | {"label": False}, format="kto", **entry)
    assert judged == Judged(Chat(messages, None, [False] * (len(messages) - 1) + [True]), desirable=False)


def test_answers_of_one_kind_alone_are_told(tmp_path: Path) -> None:
    rows = [{"prompt": [ASKED], "completion": [SO], "label": label} for label in (True, True, False)]
    assert told(tmp_path, *rows[:2], format="kto") == [
        "all answers are wanted; kto learns from the difference, so add some that are unwanted"
    ]
    assert told(tmp_path, *rows, format="kto") == []


def test_rows_with_an_empty_answer_are_dropped_if_asked(tmp_path: Path) -> None:
    blank = {"role": "assistant", "content": " "}
    good = {"prompt": "Why?", "chosen": [ASKED, SO], "rejected": [ASKED, NO]}
    rows = [good, good | {"rejected": [ASKED, blank]}, good | {"chosen": None}, good | {"prompt": None}]
    assert len(read(tmp_path, *rows, drop=["empty"])) == 2  # the dialogues hold the question
    texts = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}
    assert len(read(tmp_path, texts, texts | {"rejected": ""}, texts | {"prompt": ""}, drop=["empty"])) == 1
    assert len(read(tmp_path, good, good, drop=["duplicate"])) == 1


NAMES = {
    ("prompt", "chosen", "rejected", "score_chosen", "score_rejected"): ("chosen", "rejected"),
    ("question", "response_win", "response_lose"): ("response_win", "response_lose"),
    ("q", "preferred", "dispreferred"): ("preferred", "dispreferred"),
    ("q", "Accepted answer", "Rejected answer"): ("Accepted answer", "Rejected answer"),
    ("prompt", "chosen"): None,
    ("good_id", "text"): None,
}


def test_pairs_are_found_by_their_names() -> None:
    assert {names: pair_of_answers(names) for names in NAMES} == NAMES
    scores = {"prompt": "a", "score_chosen": 1.0, "score_rejected": 0.5}
    assert not [reading for reading in readings("auto", [scores]).plausible if reading.objective != "supervised"]
    row = {"system_prompt": "s", "prompt": "a", "win": "b", "lose": "c"}
    (reading,) = readings("auto", [row]).plausible
    assert reading.columns == {
        "system": "system_prompt", "instruction": "prompt", "chosen": "win", "rejected": "lose"
    }  # fmt: skip
