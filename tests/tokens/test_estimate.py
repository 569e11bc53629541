"""Rows estimated without torch, against the rows that training makes of the same files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.model.build import load_tokenizer
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.tokens import estimate
from finetune.tokens.dataset import prepare
from finetune.tokens.estimate import RowCounts, estimated_rows
from finetune.training.batch_notes import notes_before_launch
from tests.support.models.tiny import write_chats
from tests.support.runs.recipes import least, write_recipe


def recipe_of(folder: Path, model: Path | str, file: Path, **data: Any) -> Recipe:
    entry = {"path": "json", "data_files": str(file)}
    content = least(model, data={"train": [entry | data.pop("entry", {})], "max_length": 128} | data)
    return load_recipe(write_recipe(folder, content)).recipe


def estimated(recipe: Recipe) -> RowCounts:
    counts = estimated_rows(recipe)
    assert counts is not None
    return counts


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = [20 + 7 * (index % 13) for index in range(300)]
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", lengths)


@pytest.mark.sample(2, thorough=5)
@pytest.mark.parametrize(
    "data",
    [
        {},
        {"packing": False},
        {"eval": {"fraction": 0.3}},
        {"entry": {"weight": 2.5}},
        {"truncation": "drop", "max_length": 66},
    ],
    ids=lambda data: ",".join(data) or "packed",
)
def test_the_estimate_is_near_what_training_counts(
    tmp_path: Path, tiny_llama: Path, chats: Path, data: dict[str, Any]
) -> None:
    recipe = recipe_of(tmp_path, tiny_llama, chats, **data)
    actual, counts = prepare(recipe, load_tokenizer(recipe)), estimated(recipe)
    assert counts.estimated_by == "the model's tokenizer"
    near = 0.15 if "truncation" in data else 0.06  # single documents are estimated less well than all of them
    assert counts.rows == pytest.approx(len(actual.train), rel=near)
    assert counts.tokens == pytest.approx(actual.facts["tokens"], rel=near)


def test_each_answer_is_counted_with_what_is_before_it(tmp_path: Path, tiny_llama: Path) -> None:
    """Reasoning of earlier turns, which templates leave out, is not."""
    words, rows = "old stone bridge over the river ", []
    for number in range(60):
        messages = []
        for turn in range(1 + number % 4):
            messages.append({"role": "user", "content": words * (1 + turn)})
            messages.append({"role": "assistant", "content": f"<think>{words * 20}</think>{words}{number}"})
        rows.append({"messages": messages})
    file = tmp_path / "dialogues.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    template = model / "chat_template.jinja"
    kept = "m.content if loop.last else m.content.split('</think>')[-1]"
    template.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (" + kept + ") + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "utf-8",
    )
    recipe = recipe_of(tmp_path, model, file, packing=False, train_on="each_turn", max_length=2048)
    actual, counts = prepare(recipe, load_tokenizer(recipe)), estimated(recipe)
    assert counts.rows == len(actual.train) == 150
    assert counts.tokens == pytest.approx(actual.facts["tokens"], rel=0.06)


def test_each_answer_of_a_pair_is_compared_by_itself(tmp_path: Path, tiny_llama: Path) -> None:
    """Every fifth pair has one answer that is too long beside a short one: the two together would fit two rows."""
    words, file = "old stone bridge over the river ", tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"river {n}", "chosen": words * (30 if n % 5 == 0 else 8), "rejected": words * 3} for n in range(100)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    content = least(tiny_llama, data={"train": [{"path": "json", "data_files": str(file)}], "max_length": 128})
    content["training"] = {"objective": "dpo"}
    path = write_recipe(tmp_path, content)
    counts = estimated(load_recipe(path).recipe)
    assert counts.too_long is not None
    assert counts.too_long[:2] == (20, 100)
    (line,) = (line for line in notes_before_launch(load_recipe(path).recipe)["notes"] if "max_length" in line)
    assert line.startswith(
        "data.max_length: about 20 of 100 pairs have an answer that with its prompt is longer than 128"
    )
    dropped = load_recipe(path, ["data.truncation=drop"]).recipe
    actual, counts = prepare(dropped, load_tokenizer(dropped)), estimated(dropped)
    assert counts.rows == len(actual.train) == 80
    for lengths_known in (False, True):
        (line,) = (
            note for note in notes_before_launch(dropped, lengths_known=lengths_known)["notes"] if "20 of" in note
        )
        assert line.endswith("; training leaves them out: raise it")
    assert counts.tokens == pytest.approx(actual.train.lengths.sum(), rel=0.06)


def test_a_default_system_turn_is_counted(tmp_path: Path, tiny_llama: Path, chats: Path) -> None:
    """SmolLM2's and Llama 3.1's templates begin with one: a fifth of the tokens of short chats."""
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    before = estimated(recipe_of(tmp_path, model, chats, packing=False))
    template = model / "chat_template.jinja"
    template.write_text("be kind be kind be kind" + template.read_text("utf-8"), "utf-8")
    recipe = recipe_of(tmp_path, model, chats, packing=False)
    more = len(load_tokenizer(recipe)("be kind be kind be kind", add_special_tokens=False)["input_ids"])
    assert more >= 6
    assert estimated(recipe).tokens - before.tokens == pytest.approx(300 * more, rel=0.02)


def test_a_template_that_cannot_be_rendered(tmp_path: Path, tiny_llama: Path, chats: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    (model / "chat_template.jinja").write_text("{% nonsense %}", "utf-8")
    assert estimated(recipe_of(tmp_path, model, chats)).rows > 0


def test_without_the_tokenizer_bytes_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": "a" * 400}) + "\n" for _ in range(10)), "utf-8")
    counts = estimated(recipe_of(tmp_path, "nobody/nothing", file, packing=False))
    assert (counts.rows, counts.tokens, counts.longest) == (10, 10 * 101, 101)
    assert "4 bytes a token" in counts.estimated_by


def test_data_that_are_not_at_hand(
    tmp_path: Path, tiny_llama: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert estimated_rows(recipe_of(tmp_path, tiny_llama, tmp_path / "none.jsonl")) is None
    content = least(tiny_llama, data={"train": [{"path": "someone/chats"}]})
    assert estimated_rows(load_recipe(write_recipe(tmp_path, content)).recipe) is None
    monkeypatch.setattr(estimate, "MOST_BYTES", 1000)
    assert estimated_rows(recipe_of(tmp_path, tiny_llama, chats)) is None


@pytest.mark.thorough
def test_check_and_preview_tell_the_same_steps(
    tmp_path: Path, tiny_llama: Path, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_of(tmp_path, tiny_llama, chats)
    path, told = str(tmp_path / "recipe.yaml"), {}
    for words in (["check", path, "--data"], ["preview", path, "-n", "0"]):
        assert main([*words, "--json"]) == 0
        told[words[0]] = json.loads(capsys.readouterr().out)["batches"]
        assert main(words) == 0
        lines = " ".join(capsys.readouterr().out.split())
        assert " ".join(told[words[0]]["notes"][0].split()) in lines
        assert "steps are few" in lines
    assert told["check"].keys() == told["preview"].keys()
    assert (told["check"]["estimated"], told["preview"]["estimated"]) == (True, False)
    assert told["check"]["steps"] == pytest.approx(told["preview"]["steps"], abs=1)
    assert told["check"]["notes"][0].startswith("data: estimated by the model's tokenizer: ")


def test_check_says_where_it_cannot_count(tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = least(tiny_llama, data={"train": [{"path": "someone/chats"}]}, training={"learning_rate": 0.5})
    assert main(["check", str(write_recipe(tmp_path, content)), "--data"]) == 0
    assert [line.split(";")[0] for line in capsys.readouterr().out.splitlines()[1:3]] == [
        "data: not counted: the data are on the Hub, or large",
        "training.learning_rate: 0.5 is far above what LoRA takes, 0.00001 to 0.002",
    ]


def test_tools_are_counted(tmp_path: Path, tiny_llama: Path) -> None:
    """Each row's, which templates write out, and which may be most of what is trained on."""
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    (model / "chat_template.jinja").write_text(
        "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
        "{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "utf-8",
    )
    function = {"name": "look", "description": "old stone bridge " * 30, "parameters": {"type": "object"}}
    messages = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    rows = [
        {"messages": messages * turns, "tools": [{"type": "function", "function": function}] * tools}
        for turns in (1, 3)
        for tools in (0, 1, 4)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows * 5), "utf-8")
    for more in ({}, {"train_on": "each_turn"}):
        recipe = recipe_of(tmp_path, model, file, packing=False, max_length=4096, **more)
        actual, counts = prepare(recipe, load_tokenizer(recipe)), estimated(recipe)
        assert counts.rows == len(actual.train)
        assert counts.tokens == pytest.approx(actual.facts["tokens"], rel=0.06)
    bare = estimated(recipe_of(tmp_path, "nobody/nothing", file, packing=False, max_length=4096))
    assert bare.tokens > 5 * (2 * 5 * 510 // 4)  # 510 bytes of a description are in it, ten times in five rows


@pytest.mark.thorough
def test_checking_data_without_a_tokenizer_imports_no_torch(tmp_path: Path, chats: Path) -> None:
    recipe_of(tmp_path, "nobody/nothing", chats)
    program = "import sys; from finetune.cli.main import main; main(sys.argv[1:]); print(sorted(sys.modules))"
    words = ["check", str(tmp_path / "recipe.yaml"), "--data"]
    process = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    assert "estimated by 4 bytes a token" in process.stdout
    assert "'numpy'" in process.stdout
    assert "'torch'" not in process.stdout
    assert "'transformers'" not in process.stdout


def test_the_estimate_imports_no_torch(tmp_path: Path, tiny_llama: Path, chats: Path) -> None:
    """`plan` and `check` print it before anything is loaded."""
    recipe_of(tmp_path, tiny_llama, chats)
    program = (
        "import sys; from finetune.recipe.loader import load_recipe; "
        "from finetune.tokens.estimate import estimated_rows; "
        "print(estimated_rows(load_recipe(sys.argv[1]).recipe).estimated_by, sorted(sys.modules))"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "recipe.yaml")]
    process = subprocess.run(words, capture_output=True, text=True, check=True)
    assert process.stdout.startswith("the model's tokenizer ")
    assert "'tokenizers'" in process.stdout
    assert "'torch'" not in process.stdout
    assert "'transformers'" not in process.stdout
