"""Pairs whose answers are equal, also only after rendering and the cut at max_length: left out, counted, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.errors import DataError
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.report.preview import preview
from finetune.tokens.cache import are_alike
from finetune.tokens.dataset import Prepared, prepare, prepare_here
from finetune.tokens.tokenizer import Document
from tests.support.runs.preferences import preference_recipe, write_base

LONG = "old stone bridge " * 20
TRIMMED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


def pair(chosen: str, rejected: str, prompt: str = "why", names: tuple[str, ...] = ()) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": [{"role": "user", "content": prompt}]}
    for place, (side, text) in enumerate({"chosen": chosen, "rejected": rejected}.items()):
        row[side] = [{"role": "assistant", "content": text}]
        if names:
            row[side][0]["name"] = names[place]
    return row


def recipe_of(folder: Path, base: Path, rows: list[dict[str, Any]], kind: str = "dpo", **data: Any) -> Recipe:
    recipe = preference_recipe(folder / "run", base, kind, {"data": {"max_length": 32, "truncation": "right", **data}})
    (folder / "run" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return load_recipe(recipe, []).recipe


def prepared(recipe: Recipe) -> Prepared:
    return prepare(recipe, load_tokenizer(recipe))


GOOD = [pair("old stone", "bridge", f"why {word}") for word in ("old", "bridge", "stone")]
# Name -> a pair, settings of data, and the fact that counts it.
EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "before": (pair("old", "old"), {}, "identical"),
    "a difference beyond the cut": (pair(LONG + "old", LONG + "stone"), {}, "identical_cut"),
    "the rejected answer goes on": (pair(LONG, LONG + "stone"), {}, "identical_cut"),
    "a long prompt": (pair("old " * 9 + "bridge", "old " * 9 + "stone", "old " * 20), {}, "identical_cut"),
    "spaces that the template trims": (pair("old", "old \n"), {"chat_template": TRIMMED}, "identical"),
    "names that it does not write": (pair("old", "old", names=("a", "b")), {}, "identical"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_pairs_are_left_out_and_counted(name: str, base: Path, tmp_path: Path) -> None:
    row, data, fact = EQUAL[name]
    recipe = recipe_of(tmp_path, base, [*GOOD, row, row], **data)
    found = prepared(recipe)
    assert found.facts["documents"] == 3
    assert found.facts[fact] == 2
    assert found.facts["truncated"] == found.facts["tokens_cut"] == 0, "nothing else was cut"
    (note,) = [note for note in found.notes if note.startswith("2 pairs left out: ")]
    assert ("beyond data.max_length" in note) == (fact == "identical_cut")
    seen = preview(recipe, 9)
    assert len(seen.rows) == 3
    assert note in [finding.text for finding in seen.findings]


@pytest.mark.parametrize("name", [*EQUAL][1:])  # columns that are equal are refused by the reader
def test_nothing_but_equal_pairs_is_refused_with_the_reason(name: str, base: Path, tmp_path: Path) -> None:
    row, data, fact = EQUAL[name]
    recipe = recipe_of(tmp_path, base, [row] * 4, **data)
    if fact == "identical_cut":
        said = "4 pairs whose answers differ only beyond data.max_length (32); raise data.max_length"
    else:
        said = "4 pairs with two equal answers; name pairs whose answers differ as the chat template writes them"
    for refuse in (prepared, prepare_here):
        with pytest.raises(DataError) as raised:
            refuse(recipe)
        assert str(raised.value) == f"data.train: holds no document: {said}"


def test_held_out_pairs_are_refused_alike(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "held_out.jsonl"
    file.write_text(json.dumps(pair(LONG, LONG + "stone")), "utf-8")
    recipe = recipe_of(tmp_path, base, GOOD, eval=[{"path": "json", "data_files": str(file)}])
    for refuse in (prepared, prepare_here):
        with pytest.raises(DataError, match=r"^data\.eval: holds no document: 1 pair whose answers differ only beyond"):
            refuse(recipe)


def test_an_answer_that_is_cut_away_is_dropped_with_its_pair(base: Path, tmp_path: Path) -> None:
    found = prepared(recipe_of(tmp_path, base, [*GOOD, pair("old", "stone", "why " * 40)]))
    assert (found.facts["documents"], found.facts["dropped"]) == (3, 2)
    with pytest.raises(
        DataError, match=r"alone is longer than data\.max_length \(32\); data\.max_length: 55 keeps all$"
    ):
        prepared(recipe_of(tmp_path / "run", base, [pair("old", "stone", "why " * 40)]))


@pytest.mark.parametrize(
    ("chosen", "rejected", "alike"),
    [
        (([1, 2, 3], [-100, 2, 3]), ([1, 2, 3], [-100, 2, 3]), True),
        (([1, 2, 3], [-100, 2, 3]), ([1, 2, 4], [-100, 2, 4]), False),
        (([1, 2, 3], [-100, 2, -100]), ([1, 2, 4], [-100, 2, -100]), True),  # nothing after the last one is compared
        (([1, 2, 3], [-100, 2, 3]), ([1, 2], [-100, 2]), False),
        (([1, 2, 3], [-100, -100, 3]), ([1, 5, 3], [-100, -100, 3]), False),
        (([1, 2], [-100, -100]), ([1, 3], [-100, -100]), False),  # another mistake
    ],
)
def test_pairs_are_compared_up_to_their_last_supervised_token(chosen: Any, rejected: Any, alike: bool) -> None:
    assert are_alike([Document(*chosen), Document(*rejected)]) == alike
    assert not are_alike([Document(*chosen)])


def judged(answer: str, prompt: str, label: bool = True) -> dict[str, Any]:
    sides = {"prompt": prompt, "completion": answer}
    roles = {"prompt": "user", "completion": "assistant"}
    return {"label": label, **{name: [{"role": roles[name], "content": text}] for name, text in sides.items()}}


def test_judged_answers_that_are_one_text_are_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of(tmp_path, base, [judged("old", "why"), judged("old", "why old", False)], "kto")
    for refuse in (prepared, prepare_here):
        with pytest.raises(DataError, match=r"^data\.train: every judged answer is one text, and kto measures"):
            refuse(recipe)
    assert main(["check", str(tmp_path / "run" / "recipe.yaml"), "training.global_batch_size=1"]) == 2
    assert "training.global_batch_size: is 1, and kto measures each answer" in " ".join(capsys.readouterr().err.split())


def test_a_judged_answer_that_is_cut_away_is_dropped(base: Path, tmp_path: Path) -> None:
    rows = [judged("old", "why"), judged("stone", "why " * 40), judged("bridge", "why")]
    found = prepared(recipe_of(tmp_path, base, rows, "kto"))
    assert (found.facts["documents"], found.facts["dropped"]) == (2, 1)
    answers = [[*ids[np_labels != -100]] for ids, np_labels in found.pool.two_answers]
    assert len(answers) == 2
    assert answers[0] != answers[1]
