"""`finetune preview`: rows as the model sees them, and every oddity planted in the data is found."""

from __future__ import annotations

import dataclasses
import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from finetune.cli.main import main
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.loader import load_recipe
from finetune.report.preview import Oddity, doubled_begin, length_histogram, pieces, preview, unfinished
from finetune.report.preview_views import as_page, facts_lines, print_preview
from finetune.tokens.cache import StoredDocuments
from finetune.tokens.encoder import Encoder
from tests.support.models.tiny import SPECIAL_TOKENS, save_tiny
from tests.support.rows.masks import encoded

pytestmark = pytest.mark.draws
QUESTION = {"role": "user", "content": "which seven birds sing?"}


def chat(answer: str, *before: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*before, QUESTION, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("preview"))


def write(folder: Path, model: Path, rows: list[dict[str, Any]], **data: Any) -> Path:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    recipe = {
        "model": {"name_or_path": str(model)},
        "data": {"train": [{"path": "json", "data_files": str(folder / "rows.jsonl")}], "max_length": 64} | data,
        "training": {"global_batch_size": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    return folder / "recipe.yaml"


def test_tokens_joined_are_the_text_and_the_supervised_ones_the_answer(tmp_path: Path, model: Path) -> None:
    answer = "naïve 東京 🐦 birds"
    view = preview(load_recipe(write(tmp_path, model, [chat(answer)])).recipe, 3)
    (row,) = view.rows
    assert "".join(piece.text for piece in row.pieces) == (
        f"<|im_start|>user\n{QUESTION['content']}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    )
    assert "".join(piece.text for piece in row.pieces if piece.learned) == f"{answer}<|im_end|>"
    assert [piece.text for piece in row.pieces if piece.special] == SPECIAL_TOKENS[1:] * 2
    assert row.roles == view.roles == {"user": 1, "assistant": 1}
    assert row.learned < row.tokens


def test_facts_are_those_of_training(tmp_path: Path, model: Path) -> None:
    rows = [chat("one " * count) for count in (1, 5, 9, 20)] * 2 + [chat("two", {"role": "system", "content": "three"})]
    view = preview(load_recipe(write(tmp_path, model, rows, packing=False)).recipe, 0)
    assert (view.facts["documents"], view.facts["rows"], view.facts["steps_per_epoch"]) == (9, 9, 5)
    assert view.roles == {"system": 1, "user": 9, "assistant": 9}
    assert sum(count for *_, count in view.histogram) == 9
    assert view.histogram[-1][1] == 65
    assert view.longest[0][0].endswith("rows.jsonl:4")
    assert [finding.text for finding in view.findings] == ["4 training documents with the same tokens as another one"]
    assert [place.rsplit(":", 1)[1] for place in view.findings[0].places] == ["5", "6", "7"]
    assert view.ok


def test_each_answer_is_shown_as_the_example_that_it_is(tmp_path: Path, model: Path) -> None:
    rows = [chat("two", QUESTION, {"role": "assistant", "content": "one"}), chat("three")]
    view = preview(load_recipe(write(tmp_path, model, rows, train_on="each_turn")).recipe, 9)
    assert [(row.place.rsplit(":", 1)[1], row.roles) for row in view.rows] == [
        ("1, example 1 of 2", {"user": 1, "assistant": 1}),
        ("1, example 2 of 2", {"user": 2, "assistant": 2}),
        ("2", {"user": 1, "assistant": 1}),
    ]
    learned = ["".join(piece.text for piece in row.pieces if piece.learned) for row in view.rows]
    assert learned == ["one<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    assert view.facts["documents"] == 3
    (note,) = [finding for finding in view.findings if finding.severity == "note"]
    assert note.text.endswith("rows.jsonl: 2 rows are 3 documents: each answer is one (train_on: each_turn)")


def test_a_mixture_shows_what_each_data_set_gives(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shares are counted by hand from the documents of each set alone."""
    entries, tokens = [], []
    for name, rows in (("short", [chat(f"one {n}") for n in range(4)]), ("long", [chat("two " * 20)])):
        folder = tmp_path / name
        folder.mkdir()
        recipe = write(folder, model, rows)
        (entry,) = yaml.safe_load(recipe.read_text())["data"]["train"]
        entries.append(entry)
        alone = preview(load_recipe(recipe).recipe, 9)
        tokens.append(sum(row.tokens for row in alone.rows))
        assert "%" not in "".join(facts_lines(alone)[3:])
    entries[0] |= {"weight": 0.5}
    entries[1] |= {"weight": 3.0, "split": "train[:1]"}
    recipe = write(tmp_path, model, [chat("x")], train=entries)
    short, long = preview(load_recipe(recipe).recipe, 0).facts["data_sets"]
    of_short, of_long = tokens[0] // 2, 3 * tokens[1]  # the four short chats are as long as each other
    assert short == {
        "name": str(tmp_path / "short" / "rows.jsonl"), "weight": 0.5, "documents": 2, "tokens": of_short,
        "share": pytest.approx(of_short / (of_short + of_long)),
    }  # fmt: skip
    assert long["name"] == f"{tmp_path / 'long' / 'rows.jsonl'} train[:1]"
    assert (long["documents"], long["tokens"]) == (3, of_long)
    assert short["share"] + long["share"] == pytest.approx(1)
    assert main(["preview", str(recipe), "-n", "0"]) == 0
    output = capsys.readouterr().out.replace("\n", " ")
    assert f"{short['share']:.1%} {short['name']}" in output
    assert f"3 documents, {of_long} tokens, weight 3" in output.replace("  ", " ")


def test_what_was_not_used_of_the_rows_is_a_note(tmp_path: Path, model: Path) -> None:
    rows = [chat(answer) | {"source": "x"} for answer in ("one", "two")]
    rows[0]["messages"].append(QUESTION)
    view = preview(load_recipe(write(tmp_path, model, rows)).recipe, 0)
    assert [(finding.severity, finding.text.partition(": ")[2]) for finding in view.findings] == [
        ("note", "columns not used: 'source'"),
        ("note", "dialogues that end without an answer: 1; nothing is supervised in their last turn"),
    ]


def test_answers_truncated_at_the_row_are_found(tmp_path: Path, model: Path) -> None:
    rows = [chat("short"), chat("very " * 100)]
    view = preview(load_recipe(write(tmp_path, model, rows, truncation="right")).recipe, 0)
    texts = {finding.severity: finding for finding in view.findings}
    assert "answer truncated at data.max_length" in texts["warning"].text
    assert texts["warning"].places[0].endswith("rows.jsonl:2")
    assert texts["note"].text.startswith("1 document truncated at data.max_length: 75 % of the tokens are cut;")


def test_refused_rows_are_errors_and_the_good_ones_are_shown(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = {"messages": [QUESTION, {"role": "assistant", "content": "no", "weight": 0}]}
    recipe = write(tmp_path, model, [silent, chat("yes"), {"messages": "nothing"}])
    assert main(["preview", str(recipe), "--json"]) == 2
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is False
    assert [finding["severity"] for finding in result["findings"]] == ["error", "error"]
    assert "rows.jsonl:1: nothing in this row is supervised" in result["findings"][0]["text"]
    assert [row["place"].rsplit(":", 1)[1] for row in result["rows"]] == ["2"]


def store(documents: list[list[int]], learned: list[list[bool]]) -> StoredDocuments:
    lengths = [len(document) for document in documents]
    zeros = np.zeros(len(documents), dtype=np.int64)
    return StoredDocuments(
        tokens=np.concatenate(documents).astype(np.int32),
        is_supervised=np.concatenate(learned).astype(bool),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        supervised=np.array([sum(some) for some in learned]),
        digests=zeros.astype(np.uint64),
        lines=zeros,
        files=zeros.astype(np.int32),
        rows=np.arange(len(documents)),
        names=("rows",),
        facts={},
    )


def test_two_begins_are_found() -> None:
    documents = [[1, 1, 5], [1, 5, 1], [5, 1, 1], [1]]
    assert doubled_begin(store(documents, [[False] * len(some) for some in documents]), begin=1).tolist() == [0]


def test_an_answer_without_a_supervised_end_is_found() -> None:
    end = 9
    documents = [[1, 5, end], [1, 5, end], [1, 5, end, 6, 7, end], [1, 5, 5, 5, 5, 5], [1, 5, 8, 6, 7, end]]
    learned = [[0, 1, 1], [0, 1, 0], [0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 1, 1], [0, 1, 0, 0, 1, 1]]
    cut, silent = unfinished(store(documents, learned), {end}, max_length=6)  # type: ignore[arg-type]
    assert cut.tolist() == [3]
    # Document 2: its first answer ends well, its second does not. Document 4: the template ends its first otherwise.
    assert silent.tolist() == [1, 2]


def test_histogram_counts_each_once() -> None:
    lengths = np.array([0, 1, 8, 9, 16])
    bins = length_histogram(lengths, 16, bins=2)
    assert bins == [(0, 8, 2), (8, 17, 3)]
    assert sum(count for *_, count in length_histogram(lengths, 16, bins=40)) == 5


def test_page_and_terminal_show_the_same_rows(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write(tmp_path, model, [chat("a < b & c")])
    page = tmp_path / "preview.html"
    assert main(["preview", str(recipe), "--html", str(page)]) == 0
    output = capsys.readouterr().out
    assert "⟦a < b & c<|im_end|>⟧" in output
    html = page.read_text("utf-8")
    assert "&lt;|im_end|&gt;" in html
    assert "<script" not in html
    assert "http" not in html.replace("http-equiv", "")


def test_nothing_of_the_data_becomes_markup(tmp_path: Path, model: Path) -> None:
    evil = "</pre><script>x</script>{{ title }}"
    view = preview(load_recipe(write(tmp_path, model, [chat(evil)])).recipe, 1)
    place = Oddity("warning", evil, (evil,))
    html = as_page(dataclasses.replace(view, findings=[place]), evil)
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 4  # title twice, finding, place; the row's tokens are cut smaller
    assert "".join(re.findall(r'<span class="t[^>]*>([^<]*)</span>', html)).count("{{ title }}") == 1


def test_the_lengths_are_drawn_once_each(tmp_path: Path, model: Path) -> None:
    view = preview(load_recipe(write(tmp_path, model, [chat("one " * count) for count in (1, 5, 9)])).recipe, 0)
    html = as_page(view, "r")
    assert html.count("<svg") == 1
    assert f"max_length {view.max_length}" in html
    for low, _, count in view.histogram:
        assert f">{low}</text>" in html
        assert count == 0 or f">{count}</text>" in html


def test_words_keep_their_spaces_where_decoding_one_token_drops_them(model: Path, tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, model, [chat("x")])).recipe
    encoder = Encoder(load_tokenizer(recipe), recipe.data)
    document = encoded(encoder, chat("old stone bridge"), "messages")
    tokens = list(pieces(encoder.texts, document))
    assert len(tokens) == len(document.input_ids)
    assert encoder.texts.decode(document.input_ids) == "".join(piece.text for piece in tokens)


# -- preferences -------------------------------------------------------------------------------------------------------


def answered(chosen: str, rejected: str) -> dict[str, Any]:
    turns = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
    return {"prompt": [QUESTION], "chosen": turns[0], "rejected": turns[1]}


def write_preferences(folder: Path, model: Path, rows: list[dict[str, Any]], objective: str, **data: Any) -> Path:
    recipe = yaml.safe_load(write(folder, model, rows, **data).read_text())
    recipe["training"]["objective"] = objective
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    return folder / "recipe.yaml"


def test_a_pair_is_one_prompt_and_two_answers(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_preferences(
        tmp_path,
        model,
        [answered("one 東京", "two"), answered("same", "same"), answered("three", "four five six")],
        "dpo",
    )
    view = preview(load_recipe(recipe).recipe, 9)
    assert len(view.rows) == 2  # the equal pair is no pair
    row = view.rows[0]
    prompt = f"<|im_start|>user\n{QUESTION['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert "".join(piece.text for piece in row.pieces) == prompt
    assert not any(piece.learned for piece in row.pieces)
    texts = {answer.name: "".join(piece.text for piece in answer.pieces) for answer in row.answers}
    assert texts == {"chosen": "one 東京<|im_end|>\n", "rejected": "two<|im_end|>\n"}
    learned = ["".join(piece.text for piece in answer.pieces if piece.learned) for answer in row.answers]
    assert learned == ["one 東京<|im_end|>", "two<|im_end|>"]
    assert row.learned == sum(answer.learned for answer in row.answers)
    assert view.facts["documents"] == 2
    assert sum(count for *_, count in view.histogram) == 4  # documents of two pairs
    assert view.facts["tokens_longest"] == view.longest[0][1] < max(shown.tokens for shown in view.rows)
    assert facts_lines(view)[0].startswith("2 pairs, ")
    means = [sum(row.answers[side].learned for row in view.rows) / 2 for side in (0, 1)]
    assert [view.facts["chosen_tokens_mean"], view.facts["rejected_tokens_mean"]] == means
    assert f"chosen {means[0]:,.0f}, rejected {means[1]:,.0f}" in "\n".join(facts_lines(view))
    assert [finding.text for finding in view.findings] == ["1 pair left out: the chosen answer is the rejected one"]

    printed = {}
    for width in (120, 60):
        console = Console(width=width, file=StringIO())
        print_preview(view, console)
        printed[width] = console.file.getvalue()  # type: ignore[attr-defined]
    assert main(["preview", str(recipe), "-n", "1"]) == 0
    assert re.search(r"⟦one 東京<\|im_end\|>⟧\n+rejected:", capsys.readouterr().out)
    assert re.search(r"chosen: \d+ supervised +rejected: \d+ supervised *\n", printed[120])
    assert re.search(r"⟦one 東京.*⟧ *⟦two<\|im_end\|>⟧", printed[120])
    assert re.search(r"chosen: \d+ supervised\n⟦one 東京<\|im_end\|>⟧\n+rejected: \d+ supervised\n⟦two", printed[60])
    page = as_page(view, "recipe.yaml")
    assert page.count(">rejected: ") == 2
    assert main(["preview", str(recipe), "-n", "1", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["rows"]
    assert [answer["name"] for answer in shown["answers"]] == ["chosen", "rejected"]


def test_judged_answers_are_shown_with_their_label(tmp_path: Path, model: Path) -> None:
    rows = [
        {"prompt": [QUESTION], "completion": [{"role": "assistant", "content": text}], "label": text == "good"}
        for text in ("good", "bad")
    ]
    for made, places in ((rows, ["1", "2"]), ([answered("good", "bad")], ["1, example 1 of 2", "1, example 2 of 2"])):
        view = preview(load_recipe(write_preferences(tmp_path, model, made, "kto")).recipe, 9)
        assert [row.label for row in view.rows] == ["wanted", "unwanted"]
        assert [row.place.rsplit(":", 1)[1] for row in view.rows] == places
        assert not any(row.answers for row in view.rows)
        assert facts_lines(view)[0].startswith("2 judged answers, ")


def test_an_answer_that_is_cut_or_has_no_end_is_found_in_either_half(tmp_path: Path, model: Path) -> None:
    rows = [answered("very " * 100, "short"), answered("short", "very " * 100), answered("one", "two")]
    view = preview(load_recipe(write_preferences(tmp_path, model, rows, "dpo", truncation="right")).recipe, 0)
    (warning,) = [finding for finding in view.findings if finding.severity == "warning"]
    assert warning.text.startswith("2 pairs of ")
    assert "an answer truncated at data.max_length teaches no end" in warning.text
    assert [place.rsplit(":", 1)[1] for place in warning.places] == ["1", "2"]
