"""`check --data` reads references with the recipe's metrics, as `eval` and a training's start do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.answers.evaluation import evaluate_finished
from finetune.answers.requests import EvalRequest, chosen_metrics
from finetune.cli.main import main
from finetune.data.chat import Chat, Content, Judged, Pair, Passage
from finetune.data.rows import check_rows, reference_in
from finetune.data.sources import asked_entry
from finetune.errors import DataError
from finetune.generation.held_out import held_out_set
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Data, DataSet
from finetune.recipe.sections.results import Generate
from finetune.scoring.metrics import Metric
from finetune.tokens.encoder import Encoder
from tests.support.runs.by_heart import PAIRS
from tests.support.runs.finished import finished_run
from tests.support.runs.recipes import tiny, write_recipe

GOOD = {"number": "12.5", "choice": "B", "json_fields": '{"a": 1}', "tool_name": '[f(a="b")]', "sql": "select 1"}
BAD = {"number": "12 - 5", "choice": "none", "json_fields": "{'a': 1}", "tool_name": "words", "sql": "selec 1"}


def rows_file(file: Path, answers: list[str]) -> Path:
    rows = [
        {"instruction": f"Question {at}?", "output": each, "db": "create table t(a);"}
        for at, each in enumerate(answers)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return file


@pytest.mark.parametrize("where", ["file", "eval"])
@pytest.mark.parametrize("metric", BAD)
def test_a_reference_that_no_metric_can_read(tmp_path: Path, metric: str, where: str) -> None:
    train = rows_file(tmp_path / "train.jsonl", [GOOD[metric]] * 3 + [BAD[metric]])
    asked = rows_file(tmp_path / "asked.jsonl", [GOOD[metric]] * 4 + [BAD[metric]])
    entry = {"path": "json", "format": "alpaca"}
    content: dict[str, Any] = {"train": [{**entry, "data_files": str(train)}]}
    scored = Generate(metrics=[metric])
    if where == "file":
        scored = Generate(metrics=[metric], file=str(asked))
    else:
        content["eval"] = [{**entry, "data_files": str(asked)}]
    with pytest.raises(DataError) as raised:
        check_rows(Data.model_validate(content), scored=scored)
    [line] = raised.value.mistakes
    assert line.startswith(f"{asked}:5: metric {metric}: ")
    # As before a training, and in `eval`.
    check_rows(Data.model_validate(content), scored=scored.model_copy(update={"limit": 4}))
    check_rows(Data.model_validate(content), scored=Generate(file=scored.file))


def test_a_share_of_the_training_rows_is_a_note(tmp_path: Path) -> None:
    """The seed draws the held-out rows, so a row may never be a reference."""
    train = rows_file(tmp_path / "train.jsonl", ["1", "two", "3"])
    content: dict[str, Any] = {"train": [{"path": str(train)}], "eval": {"fraction": 0.5}}
    notes: list[str] = []
    check_rows(Data.model_validate(content), notes.append, Generate(metrics=["number"]))
    [note] = [note for note in notes if "metric number" in note]
    assert note.startswith(f"{train}:2: metric number: ")
    assert note.endswith("; a run refuses such a row if it holds it out")
    check_rows(Data.model_validate(content | {"eval": None}), notes.append, Generate(metrics=["number"]))
    assert len([note for note in notes if "metric number" in note]) == 1


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
ANSWERED = Chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], None, [False, True])
REFERENCES: list[tuple[Content, str | None]] = [
    (ANSWERED, "b"),
    (Passage("a", "b"), "b"),
    (Passage("", "b"), None),
    (Pair(ANSWERED, Passage("a", "c")), "b"),
    (Judged(ANSWERED, True), "b"),
    (Judged(ANSWERED, False), None),
    (Chat([{"role": "user", "content": "a"}, CALL], None, [False, True]), None),
    (Chat([{"role": "user", "content": "a"}], None, [False]), None),
]


@pytest.mark.parametrize(("content", "reference"), REFERENCES)
def test_what_a_reference_is(content: Content, reference: str | None) -> None:
    assert reference_in(content) == reference


@pytest.mark.thorough
def test_the_check_a_start_and_eval_say_one_line(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = rows_file(tmp_path / "asked.jsonl", ["1", "two"])
    file = rows_file(tmp_path / "rows.jsonl", [*PAIRS.values()])
    generate = {"metrics": ["number"], "file": str(asked), "every": 1}
    content = tiny(tiny_llama, file, eval={"generate": generate}, output_dir=str(tmp_path / "run"))
    recipe = write_recipe(tmp_path, content)
    said = []
    for command in ("check --data", "train"):
        verb, *options = command.split()
        assert main([verb, str(recipe), *options]) == 2
        printed = capsys.readouterr()
        said.append([line for line in (printed.out + printed.err).splitlines() if "metric number" in line])
    assert said[0] == said[1]
    assert len(said[0]) == 1
    assert not (tmp_path / "run").exists()
    run = finished_run(tmp_path / "finished", tiny_llama)
    with pytest.raises(DataError, match=r"asked\.jsonl:2: metric number: "):
        evaluate_finished(run, EvalRequest(metrics=chosen_metrics(["number"], None), file=asked), print)


def test_rows_that_drop_leaves_out_are_counted(tmp_path: Path, tiny_llama: Path) -> None:
    """A question that comes twice is asked twice; a row with an empty cell is left out, and a note counts it."""
    asked = rows_file(tmp_path / "asked.jsonl", ["1", "", "1", "  ", "2"])
    rows = [json.loads(line) for line in asked.read_text("utf-8").splitlines()]
    asked.write_text("".join(json.dumps(row | {"instruction": "Which?"}) + "\n" for row in rows), "utf-8")
    train = {"path": str(asked), "format": "alpaca", "drop": ["empty", "duplicate"]}
    recipe = load_recipe(write_recipe(tmp_path, tiny(tiny_llama, asked, data={"train": [train]}))).recipe
    encoder = Encoder(load_tokenizer(recipe), recipe.data, recipe.model)
    found = held_out_set(recipe, encoder, None, file=str(asked), metrics=[Metric("exact")])
    assert [item.place for item in found.items] == [f"{asked}:{line}" for line in (1, 3, 5)]
    assert found.notes == ["2 rows with an empty cell left out"]


@pytest.mark.parametrize("trained", ["chats", "texts"])
def test_questions_without_the_template_that_training_rows_have_are_counted(
    trained: str, tiny_llama: Path, tmp_path: Path
) -> None:
    asked, rows = tmp_path / "asked.jsonl", tmp_path / "rows.jsonl"
    texts = [{"prompt": f"Say {number}: ", "completion": f"{number}"} for number in range(3)]
    asked.write_text("".join(json.dumps(row) + "\n" for row in texts), "utf-8")
    rows.write_text(json.dumps({"messages": TURNS} if trained == "chats" else texts[0]) + "\n", "utf-8")
    train = {"path": str(rows)}
    recipe = load_recipe(write_recipe(tmp_path, tiny(tiny_llama, rows, data={"train": [train]}))).recipe
    encoder = Encoder(load_tokenizer(recipe), recipe.data, recipe.model)
    found = held_out_set(recipe, encoder, None, file=str(asked), metrics=[Metric("exact")])
    assert [prompt.prompt for prompt in found.prompts] == ["Say 0: ", "Say 1: ", "Say 2: "]
    told = "3 questions asked as plain text, without the chat template that training rows have; write them as messages"
    assert found.notes == ([told] if trained == "chats" else [])


CHATS = {"format": "messages"}
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("entry", "row", "columns", "template"),
    [
        (CHATS, {"messages": TURNS}, None, {}),
        (
            CHATS,
            {"question": "How many are {}?", "answer": "dog {}"},
            {"instruction": "question", "output": "answer"},
            {},
        ),
        (CHATS, {"question": "How many are {}?", "answer": 7}, {"instruction": "question"}, {"output": "{answer}"}),
        ({"columns": {"instruction": "frage", "output": "a"}}, {"messages": TURNS}, {}, {}),
        ({"columns": {"instruction": "frage", "output": "a"}}, {"frage": "Wo?", "a": "da"}, None, {}),
        ({"template": {"instruction": "{q}", "output": "{a}"}}, {"q": "Where?", "a": "here"}, None, {}),
        ({"format": "preference"}, {"messages": TURNS}, {}, {}),
    ],
)
def test_a_file_to_answer_is_read_by_its_own_columns_where_it_lacks_the_entrys(
    entry: dict[str, Any], row: dict[str, Any], columns: dict[str, str] | None, template: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "asked.jsonl"
    lines = (json.dumps(row).replace("{}", str(number)).replace("7", str(number)) for number in range(9))
    file.write_text("\n".join(lines) + "\n", "utf-8")
    made = DataSet.model_validate({"path": "train.jsonl", **entry})
    asked = asked_entry(made, str(file))
    assert asked.path == str(file)
    if columns is None:
        assert (asked.format, asked.columns, asked.template) == (made.format, made.columns, made.template)
    else:
        assert (asked.format, asked.columns, asked.template) == ("auto", columns, template)
    assert asked_entry(made, asked) == asked


def test_a_file_to_answer_that_is_missing_is_told_with_other_mistakes(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"messages": 3}\n', "utf-8")
    data = Data.model_validate({"train": [{"path": str(tmp_path / "train.jsonl"), **CHATS}]})
    with pytest.raises(DataError) as caught:
        check_rows(data, lambda _: None, Generate(metrics=["exact"], file=str(tmp_path / "nowhere.jsonl")))
    assert "train.jsonl:1: " in str(caught.value)
    assert "nowhere.jsonl: no such file" in str(caught.value)


def test_a_file_to_answer_whose_columns_may_be_read_in_several_ways(tmp_path: Path) -> None:
    file, words = tmp_path / "asked.jsonl", ["cat sat on the mat", "dogs have gone away", "birds fly over the river"]
    rows = [{name: f"the {each} {number}" for name, each in zip("abc", words, strict=True)} for number in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    with pytest.raises(
        DataError, match=r"may be read in 4 ways: .*; rename them, or say which: --columns '{instruction"
    ):
        asked_entry(DataSet.model_validate({"path": "train.jsonl", **CHATS}), str(file))
