"""Before a run `check --data`, `preview` and `plan` count and refuse rows by the function that training calls."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune.cli.main import main
from finetune.errors import DataError
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.tokens import dataset
from finetune.tokens.dataset import prepare, prepare_here
from finetune.training.batch_notes import notes_before_launch
from tests.support.runs.recipes import least, write_recipe

Rows = list[dict[str, Any]]


def chat(*messages: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages], **more}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    return {"messages": [{"role": "user", "content": "go"}, turn]}


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
GOOD = [chat(("user", f"what is {n}"), ("assistant", f"it is {n}")) for n in range(4)]
LONG = [chat(("user", "why"), ("assistant", f"old stone bridge {n} " * 40)) for n in range(5)]
TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "no system": "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    f"{TURN}{{% endfor %}}{ASKED}",
    # Neither an object nor its JSON text can be added to a number.
    "calls that none can write": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}{{ 1 + c.function.arguments }}{% endfor %}<|im_end|>\n{% endfor %}" + ASKED,
    "no calls": f"{{% for m in messages %}}{TURN}{{% endfor %}}{ASKED}",
    "nonsense": "{% for m in %}",
}
# name -> rows, data settings, template, and whether training refuses
CASES: dict[str, tuple[Rows, dict[str, Any], str | None, bool]] = {
    "right": (GOOD, {}, None, False),
    "all too long": (LONG, {}, None, True),
    "one too long": ([*GOOD, LONG[0]], {}, None, True),
    "too long, cut": (LONG, {"truncation": "right"}, None, False),
    "all dropped": (LONG, {"truncation": "drop"}, None, True),
    "some dropped": ([*GOOD, *LONG], {"truncation": "drop"}, None, False),
    "texts too long": ([{"text": "old stone bridge " * 60}], {"format": "text"}, None, True),
    "each turn too long": (LONG, {"train_on": "each_turn"}, None, True),
    "a role that it refuses": ([chat(("system", "be kind"), ("user", "a"), ("assistant", "b"))], {}, "no system", True),
    "calls that it cannot write": ([call({"limit": 5}), *GOOD], {}, "calls that none can write", True),
    "calls as text that it cannot write": ([call('{"limit": 5}'), *GOOD], {}, "calls that none can write", True),
    "calls that it leaves out": ([call({"limit": 5}), *GOOD], {}, "no calls", True),
    "tools that it leaves out": ([{**GOOD[0], "tools": [TOOL]}], {}, "no calls", True),
    "a template that is none": (GOOD, {}, "nonsense", True),
    "a variable that it has not": (GOOD, {"chat_template_kwargs": {"enable_thinking": False}}, None, True),
    "one row to hold out of": (GOOD[:1], {"eval": {"fraction": 0.5}}, None, True),
    "nothing learned": ([chat(("user", "a"), ("assistant", ""))], {}, None, True),
}  # fmt: skip


def recipe_of(folder: Path, model: Path | str, rows: Rows, data: dict[str, Any]) -> Recipe:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    entry = {"path": "json", "data_files": str(file)}
    entry |= {key: data[key] for key in ("format", "chat_template_kwargs") if key in data}
    others = {key: value for key, value in data.items() if key not in entry}
    content = least(model, data={"train": [entry], "max_length": 64} | others)
    return load_recipe(write_recipe(folder, content)).recipe


def mistakes_of(work: Callable[[], object]) -> list[str]:
    try:
        work()
    except DataError as error:
        return list(error.mistakes)
    return []


@pytest.mark.sample(5, thorough=17)
@pytest.mark.parametrize("name", CASES)
def test_check_refuses_what_training_refuses(
    name: str, tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, data, template, refused = CASES[name]
    given = {"chat_template": TEMPLATES[template]} if template else {}
    recipe = recipe_of(tmp_path, tiny_llama, rows, data | given)
    trained = mistakes_of(lambda: prepare(recipe, load_tokenizer(recipe)))
    assert bool(trained) == refused
    code = main(["check", str(tmp_path / "recipe.yaml"), "--data"])
    output = capsys.readouterr()
    assert code == (2 if refused else 0)
    assert all(line in " ".join(output.err.split()) for line in (" ".join(each.split()) for each in trained))
    assert "Traceback" not in output.err


@pytest.mark.sample(2, thorough=4)
@pytest.mark.parametrize(
    "data",
    [{"eval": {"fraction": 0.3}}, {"truncation": "drop"}, {"packing": False}, {}],
    ids=lambda data: ",".join(data) or "packed",
)
def test_a_tokenizer_that_is_here_counts_as_training_does(
    tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str], data: dict[str, Any]
) -> None:
    recipe = recipe_of(tmp_path, tiny_llama, [*GOOD * 3, *LONG], {"truncation": "right"} | data)
    actual, plan = prepare(recipe, load_tokenizer(recipe)), notes_before_launch(recipe)
    assert (plan["rows"], plan["tokens"]) == (len(actual.train), actual.facts["tokens"])
    assert ("dropped: longer than data.max_length" in " ".join(plan["notes"])) == ("truncation" in data)
    for words in (["check", "--data"], ["preview", "-n", "0"]):
        command = [words[0], str(tmp_path / "recipe.yaml"), *words[1:]]
        assert main([*command, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["batches"]
        assert told == notes_before_launch(recipe, actual)
        assert main(command) == 0
        assert " ".join(told["notes"][0].split()) in " ".join(capsys.readouterr().out.split())


def test_large_data_are_encoded_in_part(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dataset, "MOST_ENCODED_BYTES", 100)
    monkeypatch.setattr(dataset, "FIRST_ROWS", 10)
    line = "data: the first 10 rows of each local data set were encoded: the data are on the Hub, or large; "
    line += "`finetune preview` counts all"
    recipe = recipe_of(tmp_path, tiny_llama, [*GOOD * 5, LONG[0]], {})
    prepared, uncounted = prepare_here(recipe)
    assert prepared is not None
    assert (prepared.facts["documents"], uncounted) == (10, line)
    assert notes_before_launch(recipe) == notes_before_launch(recipe, prepared, uncounted)
    assert notes_before_launch(recipe)["rows"] is None
    assert main(["check", str(tmp_path / "recipe.yaml"), "--data"]) == 0
    assert " ".join(capsys.readouterr().out.split()).count(line) == 1
    recipe = recipe_of(tmp_path, tiny_llama, [*GOOD, LONG[0], *GOOD], {})
    (mistake,) = mistakes_of(lambda: prepare_here(recipe))
    assert mistake.startswith(f"{tmp_path / 'rows.jsonl'}:5: ")
    assert "more than data.max_length 64" in mistake
    assert notes_before_launch(recipe)["notes"][0].startswith("data: not counted: training would refuse the rows; ")
    # Data on the Hub are not asked for; the local ones beside them are encoded.
    hub = recipe.data.train[0].model_copy(update={"path": "someone/rows", "data_files": None})
    mixed = recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": [hub, *recipe.data.train]})})
    assert mistakes_of(lambda: prepare_here(mixed)) == [mistake]


def test_data_on_the_hub_are_not_counted(tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = least(tiny_llama, data={"train": [{"path": "someone/chats"}]}, training={"learning_rate": 0.5})
    assert main(["check", str(write_recipe(tmp_path, content)), "--data"]) == 0
    assert [line.split(";")[0] for line in capsys.readouterr().out.splitlines()[1:3]] == [
        "data: not counted: the data are on the Hub, or large",
        "training.learning_rate: 0.5 is far above what LoRA takes, 0.00001 to 0.002",
    ]


def test_without_a_tokenizer_rows_are_counted_without_torch(tmp_path: Path) -> None:
    recipe_of(tmp_path, "nobody/nothing", [*GOOD, *LONG], {})
    program = "import sys; from finetune.cli.main import main; main(sys.argv[1:]); print(sorted(sys.modules))"
    words = ["check", str(tmp_path / "recipe.yaml"), "--data"]
    process = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    line = "data: 9 rows; tokens are not counted: the tokenizer of nobody/nothing is not on this machine; "
    assert line + "`finetune preview` loads it and counts them" in " ".join(process.stdout.split())
    assert "'numpy'" in process.stdout
    assert "'torch'" not in process.stdout
    assert "'transformers'" not in process.stdout


def test_a_models_code_is_not_run(tmp_path: Path, tiny_llama: Path) -> None:
    recipe = recipe_of(tmp_path, tiny_llama, LONG, {})
    trusted = recipe.model_copy(update={"model": recipe.model.model_copy(update={"trust_remote_code": True})})
    prepared, uncounted = prepare_here(trusted)
    assert prepared is None
    assert "may run code of its own" in uncounted


def test_a_cached_part_of_a_hubs_model_refuses_nothing(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part"
    part.mkdir()
    shutil.copy(tiny_llama / "tokenizer.json", part)
    (part / "tokenizer_config.json").write_text("{")
    monkeypatch.setattr(dataset, "tokenizer_file", lambda *_: part / "tokenizer.json")
    assert prepare_here(recipe_of(tmp_path, "someone/model", LONG, {}))[0] is None
