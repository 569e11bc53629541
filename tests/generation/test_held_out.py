"""Answers that are scored in training: the same under every strategy, and a score may find the best step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli.main import main as finetune
from finetune.data.rows import ReadRow, RowReader
from finetune.files import read_lines
from finetune.generation.held_out import held_out_set
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.loader import load_recipe
from finetune.tokens.dataset import prepare
from finetune.tokens.encoder import Encoder
from finetune.train import main
from tests.support.models.tiny import save_tiny, write_chats
from tests.support.runs.cells import launch
from tests.support.runs.curve_table import skip_where_missing
from tests.support.runs.recipes import tiny_lora, write_recipe

pytestmark = pytest.mark.usefixtures("forget_the_last_run")

HELD_OUT = [30, 45, 60, 80, 25, 100, 40, 55, 70, 35, 65, 50, 28, 90, 33, 47]
PROGRAM = "tests/support/runs/scored_answers.py"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("rows")
    return write_chats(folder / "chats.jsonl", [40, 60, 50, 30]), write_chats(folder / "asked.jsonl", HELD_OUT, seed=9)


def scoring(folder: Path, base: Path, rows: tuple[Path, Path], **changes: Any) -> Path:
    folder.mkdir()
    recipe = tiny_lora(base, rows[0], output_dir=str(folder / "run"), samples={"count": 0})
    recipe["data"] = recipe["data"] | {"eval": [{"path": "json", "data_files": str(rows[1])}]}
    recipe["training"] = recipe["training"] | {"max_steps": 2, "global_batch_size": 2, "learning_rate": 1e-2}
    recipe["eval"] = {"generate": {"metrics": ["exact"], "every": 1, "max_new_tokens": 8}}
    for name, value in changes.items():
        recipe[name] = recipe.get(name, {}) | value if isinstance(value, dict) else value
    return write_recipe(folder, recipe)


def answers(recipe: Path, rank: int = 0) -> list[list[str]]:
    return [line["answers"] for line in read_lines(recipe.parent / f"run.scored{rank}")]


def test_a_score_before_and_at_its_steps(tiny_llama: Path, rows: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = scoring(tmp_path / "run", tiny_llama, rows)
    assert main([str(recipe)]) == 0
    lines = [line for line in read_lines(recipe.parent / "run" / "metrics.jsonl") if line["kind"] == "score"]
    assert [(line["step"], line["rows"]) for line in lines] == [(0, 16), (1, 16), (2, 16)]
    assert all(0 <= line["score_exact"] <= 1 for line in lines)


@pytest.mark.parametrize("contents", [False, True])
def test_rows_after_the_last_held_out_one_are_not_read_again(
    contents: bool, tiny_llama: Path, rows: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of sixteen held-out rows, which lie behind four rows to train on: seven rows are read for their columns."""
    recipe = load_recipe(scoring(tmp_path / "run", tiny_llama, rows, eval={"generate": {"limit": 3}})).recipe
    tokenizer = load_tokenizer(recipe)
    prepared, places, genuine = prepare(recipe, tokenizer), list[str](), RowReader.rows

    def counted(reader: RowReader, *arguments: Any) -> Iterator[ReadRow]:
        for row in genuine(reader, *arguments):
            places.append(row.place)
            yield row

    monkeypatch.setattr(RowReader, "rows", counted)
    encoder = Encoder(tokenizer, recipe.data, recipe.model)
    scored_set = held_out_set(recipe, encoder, prepared, contents=contents)
    assert [item.place for item in scored_set.items] == places[4:]
    assert len(places) == 7
    written = [row["messages"] for row in read_lines(rows[1])[:3]]
    assert [item.row["messages"] for item in scored_set.items] == written
    assert [content and content.messages for content in scored_set.contents] == (written if contents else [])


@pytest.mark.thorough
def test_the_best_step_by_a_score(
    tiny_llama: Path, rows: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of 0.25, 0.5 and 0.5 after the steps: the first of the highest is exported."""

    values = iter([0.0, 0.25, 0.5, 0.5])
    scores = lambda rows, *_: {"exact": [next(values)] * len(rows.items)}  # noqa: E731
    monkeypatch.setattr("finetune.training.row_scorer.scores_on_all", scores)
    best = {"metric_for_best_model": "eval_exact", "load_best_model_at_end": True, "max_steps": 3}
    recipe = scoring(tmp_path / "run", tiny_llama, rows, training=best, save_steps=1)
    assert main([str(recipe)]) == 0
    exported = json.loads((recipe.parent / "run" / "receipt.json").read_text("utf-8"))["export"]
    assert (exported["step"], exported["metric"], exported["loss"]) == (2, "eval_exact", 0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"metric_for_best_model": "eval_number"}}, "name it in eval.generate.metrics"),
        ({"eval": {"generate": {"metrics": ["exakt"]}}}, "eval.generate.metrics: unknown metric 'exakt'; known are"),
        ({"eval": {"generate": {"metrics": ["exact", "exact"]}}}, "exact is named twice; keep one of them"),
        ({"eval": {"generate": {"metrics": ["number"], "every": 1}}}, "metric number: the reference"),
        ({"data": {"eval": None}}, "eval.generate.every: scores need held-out rows"),
        (
            {"training": {"metric_for_best_model": "eval_exact", "load_best_model_at_end": True}, "save_steps": 2},
            "save_steps: evaluations every 1 steps of 2 are not all saved",
        ),
    ],
)
def test_what_cannot_be_scored_is_one_line_before_training(
    changes: dict[str, Any],
    message: str,
    tiny_llama: Path,
    rows: tuple[Path, Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    recipe = scoring(tmp_path / "run", tiny_llama, rows, **changes)
    assert main([str(recipe)]) == 2
    assert message in capfd.readouterr().err
    assert not (recipe.parent / "run" / "metrics.jsonl").exists()


def one_by_one(asked_rows: Path, base: Path) -> list[str]:
    """The base's greedy answers by transformers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    found = []
    for row in read_lines(asked_rows):
        *asked, _ = row["messages"]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            output = model.generate(**ids, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        found.append(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return found


@pytest.mark.slow
def test_answers_under_every_strategy_are_those_of_one_process(rows: tuple[Path, Path], tmp_path: Path) -> None:
    """16 prompts of unequal length; DDP's ranks share them out, sharded ranks answer together. All are in float32, and
    the base's are those of transformers, one prompt at a time."""
    base = save_tiny(tmp_path / "model", num_hidden_layers=4)
    strategies = ["ddp", "fsdp2", "zero3", "gpipe"]
    for name in strategies:
        skip_where_missing(name)
    alone = scoring(tmp_path / "single", base, rows)
    spread = [scoring(tmp_path / name, base, rows, accelerate_config=name) for name in strategies]
    assert launch([alone], ranks=1, program=PROGRAM) == [0]
    assert launch(spread, ranks=2, program=PROGRAM, timeout=500) == [0] * len(strategies)
    expected = answers(alone)
    assert expected[0] == one_by_one(rows[1], base)
    assert [len(each) for each in expected] == [16] * 3
    assert expected[0] != expected[2], "the steps change no answer"
    for recipe in spread:
        assert answers(recipe) == expected, recipe
        assert answers(recipe, rank=1) == expected, recipe


@pytest.mark.thorough
def test_eval_scores_both_models(
    tiny_llama: Path, rows: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = scoring(tmp_path / "run", tiny_llama, rows, eval={"generate": {"max_new_tokens": 8}})
    assert main([str(recipe)]) == 0
    run = recipe.parent / "run"
    scorer = tmp_path / "mine.py"
    scorer.write_text("def length(answer, reference, row):\n    return min(1, len(answer) / 1000)\n")
    words = ["eval", str(run), "--scorer", f"{scorer}:length", "--metric", "exact", "--limit", "5"]
    capsys.readouterr()
    assert finetune([*words, "--json", "--fail-under", "exact=0.99"]) == 5
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["scores"]["rows"]) == (False, 5)
    assert json.loads((run / "eval.json").read_text("utf-8"))["scores"] == result["scores"]
    lines = read_lines(run / "eval_answers.jsonl")
    assert len(lines) == 5
    for who, index in (("base", 0), ("tuned", 1)):
        by_hand = [min(1, len(line[who]) / 1000) for line in lines]
        assert [line["scores"]["length"][index] for line in lines] == by_hand
        assert result["scores"]["metrics"]["length"][who]["mean"] == pytest.approx(sum(by_hand) / 5)
    change = result["scores"]["metrics"]["length"]
    assert change["difference"]["mean"] == pytest.approx(change["tuned"]["mean"] - change["base"]["mean"])
    assert change["better"] + change["worse"] + change["equal"] == 5

    assert finetune([*words, "--fail-under", "exact=0"]) == 0
    printed = capsys.readouterr().out
    assert "5 answers to held-out rows, greedy, up to 8 tokens:" in printed
    assert result["scores"]["cut"] == {
        who: sum(who in line.get("cut", {}) for line in lines) for who in ("base", "tuned")
    }
    assert all({*line.get("cut", {}).values()} <= {8} for line in lines)
    assert f"Answers cut at 8 tokens: {result['scores']['cut']['base']} of the base model" in printed
    # The rows of another file, read as the training's.
    assert finetune(["eval", str(run), "--data", str(rows[0]), "--metric", "exact", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["data"] == str(rows[0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric", "exakt"], "--metric exakt: unknown metric 'exakt'; known are exact, "),
        (["--fail-under", "exact"], "--fail-under exact: write a metric and a number from 0 to 1, as exact=0.8"),
        (["--fail-under", "exact=2"], "--fail-under exact=2: write a metric and a number"),
        (
            ["--metric", "exact", "--fail-under", "sql=0.5"],
            "--fail-under sql: is not measured here; ",
        ),
        (["--scorer", "mine.txt"], "--scorer mine.txt: write a file and a function in it"),
        (["--data", "no_such_file.jsonl"], "no_such_file.jsonl"),
        (["--metric", "number"], "metric number: the reference"),
    ],
)
def test_eval_refuses_in_one_line(
    words: list[str], message: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune(["eval", str(finished), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (finished / "eval.json").exists()


@pytest.mark.thorough
def test_plain_texts_have_a_loss_and_no_score(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wish for a score is a mistake then; `finetune eval` alone is none."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"text": f"the river {n} sings over hills"}) + "\n" for n in range(12)), "utf-8"
    )
    recipe = scoring(
        tmp_path / "run", tiny_llama, (texts, texts), data={"eval": {"fraction": 0.3}}, eval={"generate": {}}
    )
    assert main([str(recipe)]) == 0
    run = recipe.parent / "run"
    capsys.readouterr()
    assert finetune(["eval", str(run), "--json"]) == 0
    assert {"held_out"} <= json.loads(capsys.readouterr().out).keys()
    assert "scores" not in json.loads((run / "eval.json").read_text("utf-8"))
    assert finetune(["eval", str(run), "--metric", "exact"]) == 2
    assert "no row has a question and an answer to score" in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, rows: tuple[Path, Path]) -> Path:
    recipe = scoring(tmp_path_factory.mktemp("finished") / "run", tiny_llama, rows, eval={"generate": {"metrics": []}})
    assert main([str(recipe)]) == 0
    return recipe.parent / "run"
