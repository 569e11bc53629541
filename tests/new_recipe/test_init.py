"""`finetune init` on files as people have them: the right mapping, or one clear line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import finetune.data.readings as readings_module
from finetune.cli.main import main
from finetune.data.chat import Chat, documents_in
from finetune.data.rows import RowReader, check_rows
from finetune.data.sources import resolve
from finetune.errors import FinetuneError
from finetune.model.new_tokens import load_tokenizer
from finetune.new_recipe import propose
from finetune.new_recipe.proposal import ROW_SIZES
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Data, DataSet, Recipe
from finetune.tokens.dataset import prepare
from finetune.training.batch_notes import notes_before_launch
from tests.support.models.chat_families import tokenizer_of
from tests.support.rows.real_rows import NUMBERS, real_rows, tool_rows

ROOT = Path(__file__).resolve().parents[2]
COUNT = 40


def german(number: int) -> tuple[str, str]:
    return (
        f"Was kostet Gerät {number} am Tag?",
        f"Gerät {number} kostet {number + 5} Euro am Tag; für Stammkunden weniger.",
    )


def table(
    names: list[str] | None, pair: Callable[[int], tuple[str, str]], delimiter: str = ",", encoding: str = "utf-8"
) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    if names:
        writer.writerow(names)
    writer.writerows(pair(number) for number in range(COUNT))
    return text.getvalue().encode(encoding)


def lines(make: Callable[[int], Any]) -> bytes:
    return "".join(json.dumps(make(number), ensure_ascii=False) + "\n" for number in range(COUNT)).encode()


def pairs(one: str, two: str, pair: Callable[[int], tuple[str, str]] = german) -> list[dict[str, str]]:
    return [dict(zip((one, two), pair(number), strict=True)) for number in range(COUNT)]


def parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(pairs("question", "answer")), sink := io.BytesIO())
    return sink.getvalue()


def excel() -> bytes:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in [["Frage", "Antwort"], *map(german, range(COUNT))]:
        book.active.append(row)
    book.save(sink := io.BytesIO())
    return sink.getvalue()


CHAT = [{"role": "user", "content": "Hello {}"}, {"role": "assistant", "content": "Hello to you, {}."}]
SHAREGPT = [{"from": "human", "value": "Hello {}"}, {"from": "gpt", "value": "Hello to you, {}."}]


def filled(turns: list[dict[str, str]], number: int) -> list[dict[str, str]]:
    return [{key: value.format(number) for key, value in turn.items()} for turn in turns]


QA = {"instruction": "question", "output": "answer"}
FA = {"instruction": "frage", "output": "antwort"}
READ: dict[str, tuple[str, Callable[[], bytes], dict[str, str]]] = {
    "semicolon": ("a.csv", lambda: table(["frage", "antwort"], german, ";"), FA),
    "UTF-16": ("a.csv", lambda: table(["frage", "antwort"], german, "\t", "utf-16"), FA),
    "tabs": ("a.tsv", lambda: table(["frage", "antwort"], german, "\t"), FA),
    "no suffix": ("export", lambda: table(["frage", "antwort"], german, ";"), FA),
    "names that say nothing": ("a.csv", lambda: table(["x", "y"], german), {"instruction": "x", "output": "y"}),
    "JSON Lines": ("a.jsonl", lambda: lines(lambda n: pairs("question", "answer")[n]), QA),
    "a JSON array": ("a.json", lambda: json.dumps(pairs("question", "answer")).encode(), QA),
    "JSON called CSV": ("a.csv", lambda: lines(lambda n: pairs("question", "answer")[n]), QA),
    "CSV called JSON": ("a.json", lambda: table(["frage", "antwort"], german, ";"), FA),
    "compressed": ("a.jsonl.gz", lambda: gzip.compress(lines(lambda n: pairs("frage", "antwort")[n])), FA),
    "Parquet": ("a.parquet", parquet, QA),
    "Excel": ("a.xlsx", excel, {"instruction": "Frage", "output": "Antwort"}),
    "OpenAI": ("a.jsonl", lambda: lines(lambda n: {"messages": filled(CHAT, n)}), {}),
    "ShareGPT": ("a.json", lambda: json.dumps([{"id": n, "conversations": filled(SHAREGPT, n)} for n in range(COUNT)])
                 .encode(), {}),
    "Alpaca": ("a.jsonl", lambda: lines(lambda n: pairs("instruction", "output")[n] | {"input": ""}), {}),
    "one column": ("a.csv", lambda: table(["inhalt"], lambda n: (" ".join(german(n)),)), {"text": "inhalt"}),  # type: ignore[arg-type,return-value]
    "inside objects": ("a.jsonl", lambda: lines(lambda n: {"a": {"qa": pairs("question", "answer")[n]}, "id": n}),
                       {"instruction": "a.qa.question", "output": "a.qa.answer"}),
    "turns inside objects": ("a.jsonl", lambda: lines(lambda n: {"ticket": {"messages": filled(CHAT, n)}}),
                             {"messages": "ticket.messages"}),
    "a text beside facts": ("a.jsonl", lambda: lines(lambda n: {"text": german(n)[1], "meta": {"title": f"A {n}"}}),
                            {}),
    "a text": ("a.txt", lambda: b"A text about a machine.\n" * 50, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_files_that_are_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, content, columns = READ[name]
    monkeypatch.chdir(tmp_path)
    Path(file).write_bytes(content())
    proposal = propose(file, gpus="cpu", output=Path("mine.yaml"))
    assert proposal.entry.columns == columns
    assert proposal.counts.rows == (1 if name == "a text" else COUNT)
    assert len(proposal.text.splitlines()) <= 25
    Path("mine.yaml").write_text(proposal.text)
    recipe = load_recipe("mine.yaml", here=True).recipe
    assert recipe.data.train[0] == proposal.entry
    assert sum(check_rows(recipe.data).values()) == proposal.counts.rows


REFUSED: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "turns of other fields": (
        "a.jsonl",
        lambda: lines(lambda n: {"x": {"log": [{"sender": who, "Text": f"{who} {n}"} for who in ("Ann", "desk")]}}),
        """'.["x"]["log"] |= map({role: {"Ann": "user", "desk": "assistant"}[.["sender"]], content: .["Text"]})'""",
    ),
    "no header": ("a.csv", lambda: table(None, german), "the first line looks like data"),
    "equal answers": (
        "a.jsonl", lambda: lines(lambda n: {"prompt": str(n), "chosen": f"b {n}", "rejected": f"b {n}"}),
        "chosen equals rejected in each of 40 pairs",
    ),
    "rows inside of an object": (
        "a.json", lambda: json.dumps({"data": pairs("a", "b")}, indent=1).encode(), "whose 'data' holds 40 rows"
    ),
    "rows by their numbers": (
        "a.json", lambda: json.dumps({str(n): pairs("question", "answer")[n] for n in range(COUNT)}).encode(),
        "one object whose 40 values are the rows; write one a line",
    ),
    "empty": ("a.csv", lambda: b"", "the file is empty"),
    "only a header": ("a.csv", lambda: b"frage;antwort\r\n", "no rows"),
    "binary": ("a.bin", lambda: bytes(range(256)) * 8, "binary file"),
    "an image called CSV": ("a.csv", lambda: b"\x89PNG\r\n\x1a\n" + bytes(64), "binary file"),
    "a PDF": ("a.pdf", lambda: b"%PDF-1.7 ...", "save it as plain text"),
    "numbers": ("a.csv", lambda: b"a,b\n" + b"1,2\n" * 40, "no column holds texts"),
    "two languages": (
        "a.csv", lambda: table(["en", "de"], lambda n: (f"The machine {n} is new.", f"Die Maschine {n} ist neu.")),
        "say which: --columns '{instruction: en, output: de}'",
    ),
}  # fmt: skip


# File -> (content, objective, columns, keys of the recipe).
PREFERENCES: dict[str, tuple[Callable[[int], dict[str, Any]], str, dict[str, str]]] = {
    "texts": (
        lambda n: {"question": german(n)[0], "chosen": german(n)[1], "rejected": "No."}, "dpo",
        {"instruction": "question"},
    ),
    "dialogues": (
        lambda n: {"prompt": german(n)[0], "chosen": filled(CHAT, n), "rejected": [*filled(CHAT, n)[:-1], SHORT]},
        "dpo", {},
    ),
    "labels": (
        lambda n: {"prompt": german(n)[0], "completion": german(n)[1], "label": n % 2 == 0}, "kto",
        {"instruction": "prompt"},
    ),
}  # fmt: skip
SHORT = {"role": "assistant", "content": "No."}


@pytest.mark.parametrize("gpus", ["cpu", "2x24GB"])
@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_become_recipes_with_their_objective(
    name: str, gpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, objective, columns = PREFERENCES[name]
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(lines(make))
    assert main(["init", "a.jsonl", "--gpus", gpus]) == 0
    printed = capsys.readouterr().out
    recipe = load_recipe("a.yaml", here=True).recipe
    assert recipe.training.objective == objective
    assert recipe.data.train[0].columns == columns
    assert recipe.training.learning_rate == (1e-4 if gpus == "cpu" else 5e-6), "of 135M, and of 8B"
    assert recipe.training.num_train_epochs == 1
    assert sum(check_rows(recipe.data).values()) == COUNT
    assert len(Path("a.yaml").read_text().splitlines()) <= 25
    shown = {"dpo": ("  chosen     ", "  rejected   "), "kto": ("  wanted     ", "  unwanted   ")}[objective]
    assert [printed.count(words) for words in shown] == {"dpo": [5, 5], "kto": [3, 2]}[objective]
    assert "not used" not in printed
    assert printed.count("  user       ") == 5  # a pair's prompt once
    assert f"training.objective: {objective} moves a model that answers already" in printed


def test_columns_of_pairs_may_be_said(tmp_path: Path) -> None:
    (file := tmp_path / "a.jsonl").write_bytes(lines(lambda n: {"a": f"Why {n}", "b": f"So {n}.", "c": f"No {n}."}))
    told = propose(str(file), gpus="cpu", columns="instruction=a,chosen=b,rejected=c")
    assert (told.reading.format, told.entry.columns) == (
        "preference", {"instruction": "a", "chosen": "b", "rejected": "c"}
    )  # fmt: skip
    with pytest.raises(FinetuneError, match="needs chosen and rejected"):
        propose(str(file), gpus="cpu", columns="instruction=a,chosen=b")


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_answered_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, content, problem = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    Path(file).write_bytes(content())
    assert main(["init", file, "--gpus", "cpu"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"reading {file}"
    assert len(said) == 2, said
    assert problem in said[1]
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_a_question_is_asked_where_it_can_be(tmp_path: Path) -> None:
    (file := tmp_path / "a.csv").write_bytes(REFUSED["two languages"][1]())
    asked: list[str] = []

    def choose(choices: Any) -> int:
        asked.extend(choices)
        return 1

    proposal = propose(str(file), gpus="cpu", choose=choose)
    assert asked == ["{instruction: en, output: de}", "{instruction: de, output: en}"]
    assert proposal.entry.columns == {"instruction": "de", "output": "en"}
    told = propose(str(file), gpus="cpu", columns="instruction=en,output=de")
    assert told.entry.columns == {"instruction": "en", "output": "de"}


def test_two_answers_to_one_question_may_be_a_better_and_a_worse_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(f"Wie lagert man Ding {n}?;Trocken und dunkel. {n};Das fragen sich viele {n}.\n" for n in range(40))
    (file := tmp_path / "a.csv").write_text(f"frage;gut;schlecht\n{rows}", "utf-8")
    assert main(["init", str(file), "--gpus", "cpu"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "{instruction: frage, chosen: gut, rejected: schlecht}" in said
    assert "{instruction: frage, chosen: schlecht, rejected: gut}" in said
    proposal = propose(str(file), gpus="cpu", columns="instruction=frage,chosen=gut,rejected=schlecht")
    assert "objective: dpo" in proposal.text
    assert not any("without its chat template" in line for line in proposal.lines)
    proposal = propose(str(file), gpus="cpu", columns="prompt=frage,chosen=gut,rejected=schlecht")
    assert any("'frage' is a text, which the model sees without its chat" in line for line in proposal.lines)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("frage", "is not a mapping"),
        ("question=frage,output=antwort", "'question' is none of our columns"),
        ("instruction=frage", "needs instruction and output"),
        ("instruction=frage,output=frage", "one column is named twice"),
        ("instruction=frag,output=antwort", "has no column 'frag'"),
        ("{instruction: [", "is not a mapping"),
    ],
)
def test_wrong_columns_are_one_line(columns: str, problem: str) -> None:
    with pytest.raises(FinetuneError, match=problem):
        propose(str(ROOT / "data" / "faq_de.csv"), gpus="cpu", columns=columns)


def test_the_shipped_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", str(ROOT / "data" / "faq_de.csv"), "--gpus", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "separated by ;, utf-8; 300 rows" in said
    assert "read as {instruction: frage, output: antwort}; not used: 'nr', 'kategorie', 'geändert'" in said
    assert "left out: 9 with an empty cell and 11 that are there already; 280 rows remain" in said
    for command in ("finetune preview faq_de.yaml", "finetune train faq_de.yaml", "finetune chat runs/faq_de"):
        assert command in said
    assert main(["init", str(ROOT / "data" / "faq_de.csv"), "--gpus", "cpu"]) == 2
    assert "faq_de.yaml: is there already; name another file with -o" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "model", "quantised", "strategy"),
    [
        ("8GB", "Qwen/Qwen3-4B", True, "single"),
        ("24GB", "Qwen/Qwen3-8B", False, "single"),
        ("4x24GB", "Qwen/Qwen3-8B", False, "ddp"),
        ("T4", "Qwen/Qwen3-8B", True, "single"),
    ],
)
def test_the_model_and_method_fit_the_gpus(gpus: str, model: str, quantised: bool, strategy: str) -> None:
    proposal = propose(str(ROOT / "data" / "faq_de.csv"), gpus=gpus)
    recipe = yaml.safe_load(proposal.text)
    assert recipe["model"]["name_or_path"] == model
    assert ("quantization" in recipe) == quantised
    assert recipe["accelerate_config"] == strategy
    assert recipe["data"]["train"][0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert len(proposal.text.splitlines()) <= 25


@pytest.mark.parametrize(
    ("count", "epochs", "share"),
    [(40, 3, 0.1), (2300, 2, 0.1), pytest.param(20_100, 1, 0.02, marks=pytest.mark.thorough)],
)
def test_more_rows_are_seen_less_often(count: int, epochs: int, share: float, tmp_path: Path) -> None:
    rows = [json.dumps(dict(zip(("q", "a"), german(n), strict=True))) + "\n" for n in range(count)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    settings = propose(str(tmp_path / "rows.jsonl"), gpus="24GB").settings
    assert (settings.epochs, settings.held_out) == (epochs, share)


@pytest.mark.parametrize("verb", ["check", "preview", "train", "plan"])
@pytest.mark.parametrize("file", ["a.csv", "a.jsonl", "a.json", "a.parquet"])
def test_other_verbs_name_init_for_a_data_file(
    verb: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(file).write_text("[{}]" if file == "a.json" else "PAR1" if file == "a.parquet" else "a;b\n1;2\n")
    assert main([verb, file]) == 2
    said = f"{file}: is data, not a recipe; run finetune init {file}, which writes a recipe for it"
    assert capsys.readouterr().err.splitlines() == [said]


def test_a_large_file_is_answered_from_a_sample(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of rows and tokens follow from some rows, within a twentieth; most rows are equal."""
    monkeypatch.setattr("finetune.new_recipe.sample.WHOLE_BELOW", 100_000)
    monkeypatch.setattr("finetune.tokens.dataset.MOST_ENCODED_BYTES", 100_000)
    rows = [json.dumps(dict(zip(("frage", "antwort"), german(n), strict=True))) + "\n" for n in range(20_000)]
    (file := tmp_path / "large.jsonl").write_text("".join(rows))
    proposal = propose(str(file), model=str(tiny_llama), gpus="cpu", output=tmp_path / "recipe.yaml")
    (line,) = [line for line in proposal.lines if "sampled" in line]
    assert float(line.split("about ")[1].split()[0].replace(",", "")) == pytest.approx(20_000, rel=0.05)
    assert any(line.startswith("data: the first 1,000 rows of each local data set were enc") for line in proposal.lines)
    (tmp_path / "recipe.yaml").write_text(proposal.text, "utf-8")
    recipe = load_recipe(tmp_path / "recipe.yaml").recipe
    actual = prepare(recipe, load_tokenizer(recipe))
    assert proposal.counts.tokens == pytest.approx(actual.facts["tokens"], rel=0.05)
    assert proposal.settings.steps == pytest.approx(notes_before_launch(recipe, actual)["steps"], rel=0.05)


def test_without_a_tokenizer_nothing_is_said_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "rows.jsonl").write_bytes(
        lines(lambda n: dict(zip(("frage", "antwort"), german(n), strict=True)))
    )
    words = ["init", str(file), "--gpus", "24GB", "-o", str(tmp_path / "a.yaml")]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["steps"], told["longest_tokens"]) == (None, None)
    assert "tokens; your longest row has " in told["recipe"]
    (tmp_path / "a.yaml").unlink()
    assert main(words) == 0
    output = " ".join(capsys.readouterr().out.split())
    line = f"data: {told['rows']} rows; tokens are not counted: the tokenizer of {told['model']} is not on this machine"
    assert f"{line}; `finetune preview` loads it and counts them" in output
    assert "about" not in output.partition("rows as the model will see them")[2]


@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize(("gpus", "length"), [("24GB", 4096), ("80GB", 16_384), ("cpu", 1024)])
def test_long_rows_are_kept_whole_where_they_cost_no_smaller_model(gpus: str, length: int, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(12):
        text = f"Das Gericht hat die Klage {number} abgewiesen. " * 700  # 31 kB
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    found = propose(str(tmp_path / "texts"), gpus=gpus)
    assert found.settings.max_length == length
    if gpus != "cpu":
        assert found.choice.model == "Qwen/Qwen3-8B"
    small = propose(str(ROOT / "data" / "faq_de.csv"), gpus=gpus)
    assert small.settings.max_length == 256


def test_tool_calls_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    row = {
        "messages": [
            {"role": "user", "content": "Rain in Ulm?"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "no"},
            {"role": "assistant", "content": "It is dry."},
        ]
    }
    (tmp_path / "traces.jsonl").write_text(f"{json.dumps(row)}\n" * 12)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "traces.jsonl"]) == 0
    assert "calls weather({'city': 'Ulm'})" in capsys.readouterr().out


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize(("gpus", "told"), [("cpu", True), ("24GB", False)])
def test_rows_with_tools_need_a_template_that_writes_them(gpus: str, told: bool, tmp_path: Path) -> None:
    """The line names a template, with which the rows are accepted. Qwen3's own template writes tools."""
    asked = [{"role": "user", "content": "Rain in Ulm?"}, {"role": "assistant", "content": "No."}]
    rows = [{"messages": asked}, *({key: row[key] for key in ("messages", "tools")} for row in tool_rows())]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    found = propose(str(tmp_path / "rows.jsonl"), gpus=gpus)
    lines = [line for line in found.lines if line.startswith("rows with tools: ")]
    assert len(lines) == told
    if told:
        (file := tmp_path / "my.yaml").write_text(found.text, "utf-8")
        template = next(word.strip("()") for word in lines[0].split() if "tools.jinja" in word)
        assert main(["check", str(file), "--data"]) == 2
        assert main(["check", str(file), "--data", f"data.chat_template={ROOT / template}"]) == 0


def test_a_narrow_task_is_named(tmp_path: Path) -> None:
    """Short answers to nearly all questions: others may be forgotten. Long answers, pairs, calls and texts are none."""

    def told(rows: Sequence[Mapping[str, Any]]) -> int:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        found = propose(str(tmp_path / "rows.jsonl"), gpus="cpu")
        lines = [line for line in found.lines if line.startswith("short answers: ")]
        assert all("finetune eval RUN --general" in line for line in lines)
        return len(lines)

    numbers = [row for name in NUMBERS for row in real_rows(name)]
    assert told(numbers) == 1
    longer = {"messages": [*numbers[0]["messages"][:2], {"role": "assistant", "content": "1 and 2 are 3. " * 3}]}
    assert told([*numbers, longer]) == 1  # 16 of 17
    assert told([*numbers, longer, {"messages": [*longer["messages"][1:]]}]) == 0  # 16 of 18
    assert told([{key: row[key] for key in ("messages", "tools")} for row in tool_rows()]) == 0
    assert told([{"text": f"A short text, number {n}."} for n in range(20)]) == 0
    pairs = [{"prompt": f"{n} + 1 =", "chosen": str(n + 1), "rejected": str(n)} for n in range(20)]
    assert told(pairs) == 0
    assert told([{"instruction": f"{n} + 1 =", "output": f"It is {n + 1}."} for n in range(20)]) == 1


def test_a_system_column_is_the_system_turn(tmp_path: Path) -> None:
    rows = [{"system": "You are kind.", **pair} for pair in pairs("question", "answer")]
    (tmp_path / "a.jsonl").write_bytes(lines(lambda n: rows[n]))
    found = propose(str(tmp_path / "a.jsonl"), gpus="cpu")
    assert found.entry.columns == {"instruction": "question", "output": "answer", "system": "system"}
    assert [message["role"] for message in found.examples[0].messages] == ["system", "user", "assistant"]  # type: ignore[union-attr]


def test_files_of_a_folder_that_are_not_used_are_named(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_bytes(lines(lambda n: pairs("question", "answer")[n]))
    found = propose(str(tmp_path), gpus="cpu")
    assert any(line.startswith("files that are not used: 'test.jsonl';") for line in found.lines)


# -- judged answers: never supervised without a word ----------------------------------------------------------------

# The labels of a wanted and of an unwanted answer, and what init makes of them as prompt, completion and label.
KNOWN = [("up", "down"), ("👍", "👎"), ("ja", "nein"), ("oui", "non"), ("sí", "no"), ("да", "нет"), ("はい", "いいえ"),
         ("T", "F"), ("accepted", "rejected"), ("like", "dislike"), ("thumbs_up", "thumbs_down"), ("evet", "hayır"),
         ("예", "아니요"), ("是", "否"), ("1.0", "0.0"), ("Yes", "No")]  # fmt: skip
MAPPED = [("1", "-1"), ("5", "1"), ("hilfreich", "nicht hilfreich"), ("safe", "unsafe")]


def judged(column: str, wanted: str, unwanted: str) -> bytes:
    rows = [f"Why {n}?,Because of {n}.,{(unwanted, wanted)[n % 2]}\n" for n in range(COUNT)]
    return f"prompt,completion,{column}\n{''.join(rows)}".encode()


@pytest.mark.sample(4)
@pytest.mark.parametrize(("wanted", "unwanted"), KNOWN)
def test_labels_whose_words_are_known(wanted: str, unwanted: str, tmp_path: Path) -> None:
    (file := tmp_path / "a.csv").write_bytes(judged("label", wanted, unwanted))
    found = propose(str(file), gpus="cpu")
    assert (found.reading.objective, found.entry.columns) == ("kto", {"instruction": "prompt"})
    assert [example.desirable for example in found.examples[:4]] == [False, True, False, True]  # type: ignore[union-attr]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("wanted", "unwanted"), [*MAPPED, *KNOWN[:4]])
@pytest.mark.parametrize("column", ["feedback", "thumb"])
def test_a_column_that_may_judge_the_answers_is_asked_about(
    wanted: str, unwanted: str, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_bytes(judged(column, wanted, unwanted))
    with pytest.raises(FinetuneError, match=r"\(all answers: supervised\) or .*\(judged answers: kto\)"):
        propose("a.csv", gpus="cpu")
    asked = propose("a.csv", gpus="cpu", choose=lambda lines: 1)
    told = propose("a.csv", gpus="cpu", columns=f"instruction=prompt,completion=completion,label={column}",
                   labels=f"{{{json.dumps(wanted)}: true, {json.dumps(unwanted)}: false}}")  # fmt: skip
    for found in (asked, told):
        assert found.reading.objective == "kto"
        assert [example.desirable for example in found.examples[:4]] == [False, True, False, True]  # type: ignore[union-attr]
        Path("mine.yaml").write_text(found.text, "utf-8")
        recipe = load_recipe("mine.yaml", here=True).recipe
        assert recipe.data.train[0].labels == dict(found.reading.labels)
        assert sum(check_rows(recipe.data).values()) == COUNT
    every = propose("a.csv", gpus="cpu", columns="instruction=prompt,output=completion")
    notes: list[str] = []  # of a recipe without a word about columns, by `check --data` and `train`
    check_rows(Data.model_validate({"train": [{"path": "csv", "data_files": "a.csv"}]}), notes.append)
    for lines in (every.lines, notes):
        assert any(f"{column!r} (" in line and "unwanted ones too" in line for line in lines)


def test_a_scale_and_a_label_against_the_answer(tmp_path: Path) -> None:
    rows = [{"question": f"Why {n}?", "answer": f"So {n}.", "rating": 1 + n % 5} for n in range(COUNT)]
    (file := tmp_path / "a.jsonl").write_bytes(lines(lambda n: rows[n]))
    with pytest.raises(FinetuneError, match=r'say which are wanted .*--labels .{"1": \.\.\., "2": '):
        propose(str(file), gpus="cpu", choose=lambda lines: 1)
    with pytest.raises(FinetuneError, match="say which are wanted"):
        propose(str(file), gpus="cpu", columns="instruction=question,completion=answer,label=rating")
    file.write_bytes(lines(lambda n: rows[n] | {"rating": None, "toxic": n % 4 == 0}))
    found = propose(str(file), gpus="cpu", choose=lambda lines: 1)
    assert found.reading.labels == {"true": False, "false": True}
    assert [example.desirable for example in found.examples[:4]] == [False, True, True, True]  # type: ignore[union-attr]


# -- chats and pairs as text in a cell --------------------------------------------------------------------------------


def written(how: str, turns: list[dict[str, str]]) -> str:
    if how == "json":
        return json.dumps(turns)
    return {"python": str(turns), "numpy": str(turns).replace("}, {", "}\n {"),
            "array": f"array({turns}, dtype=object)"}[how]  # fmt: skip


ASK, SAY, DENY = (
    {"role": "user", "content": 'It\'s "5"?\nTrue or None {n}'}, {"role": "assistant", "content": "Yes, it's {n}."},
    {"role": "assistant", "content": "No."},
)  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize("how", ["json", "python", "numpy", "array"])
@pytest.mark.parametrize("kind", ["messages", "chats", "conversations", "pairs", "answers", "judged"])
def test_turns_in_a_cell_are_turns(how: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As df.to_csv() writes them. By init's recipe, and by a recipe with no word about columns."""

    def turns(n: int, *parts: dict[str, str]) -> list[dict[str, str]]:
        return [{key: text.replace("{n}", str(n)) for key, text in turn.items()} for turn in parts]

    def row(n: int) -> dict[str, Any]:
        cells: dict[str, list[dict[str, str]]] = {
            "messages": turns(n, ASK, SAY), "prompt": turns(n, ASK), "chosen": turns(n, SAY), "rejected": [DENY]
        }  # fmt: skip
        if kind == "chats":
            return {"my chat": written(how, cells["messages"])}
        if kind == "conversations":
            renamed = [{"from": turn["role"], "value": turn["content"]} for turn in cells["messages"]]
            return {"conversations": written(how, renamed)}
        if kind == "judged":
            return {"messages": written(how, cells["messages"]), "label": n % 2 == 0}
        wanted = {
            "messages": ["messages"],
            "pairs": ["prompt", "chosen", "rejected"],
            "answers": ["chosen", "rejected"],
        }
        chosen = {name: written(how, cells[name]) for name in wanted[kind]}
        return chosen if kind != "answers" else {"prompt": cells["prompt"][0]["content"], **chosen}

    monkeypatch.chdir(tmp_path)
    table = io.StringIO()
    writer = csv.DictWriter(table, [*row(0)])
    writer.writeheader()
    writer.writerows(row(n) for n in range(COUNT))
    Path("a.csv").write_text(table.getvalue(), "utf-8")
    found = propose("a.csv", gpus="cpu")
    columns = {"messages": "my chat"} if kind == "chats" else {}
    format = {"pairs": "preference", "answers": "preference", "judged": "kto"}.get(kind, "auto")
    plain = DataSet.model_validate({"path": "csv", "data_files": "a.csv", "columns": columns, "format": format})
    for entry in (found.entry, plain):
        (first, *_) = [each.read for each in RowReader(resolve(entry)).rows()]
        document = documents_in(first)[0]  # type: ignore[arg-type]
        assert isinstance(document, Chat)
        assert document.messages == turns(0, ASK, SAY)
        assert document.supervised == [False, True]


def test_a_chat_that_is_cut_in_its_cell_is_refused_and_an_answer_of_json_is_told(tmp_path: Path) -> None:
    cells = [
        json.dumps([{"role": "user", "content": f"Why {n}?"}, {"role": "assistant", "content": "So."}])
        for n in range(9)
    ]
    rows = [{"messages": cell} for cell in [*cells, cells[0][:40]]]
    (file := tmp_path / "a.jsonl").write_bytes("".join(f"{json.dumps(row)}\n" for row in rows).encode())
    found = propose(str(file), gpus="cpu")
    assert (found.counts.rows, found.counts.refused) == (9, 1)
    file.write_bytes(lines(lambda n: {"question": f"Why {n}?", "answer": json.dumps([f"So {n}."])}))
    found = propose(str(file), gpus="cpu")
    assert any("'answer' holds lists or objects as text" in line for line in found.lines)
    notes: list[str] = []
    check_rows(Data.model_validate({"train": [found.entry.model_dump()]}), notes.append)
    assert any("'answer' holds lists or objects as text" in note for note in notes)


# -- names that are not plain -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ['it\'s "the" \\ file.csv', "-x.csv", "[red]rows.csv", "two words $HOME.csv"])
def test_a_file_with_an_odd_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(table(["frage", "antwort"], german, ";"))
    output = name.replace("csv", "yaml")
    assert main(["init", "--gpus", "cpu", f"--output={output}", "--", name]) == 0
    recipe = load_recipe(str(tmp_path / output), here=True).recipe
    assert recipe.data.train[0].data_files == name
    said = capsys.readouterr().out
    assert f"wrote {output}; next:" in said
    (line,) = [line for line in said.splitlines() if "finetune preview" in line]
    words = shlex.split(line, comments=True)
    assert words[:2] == ["finetune", "preview"]
    assert (Path(words[2]) == Path(output), words[2].startswith("-"), len(words)) == (True, False, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "a\nb"], "--model: 'a\\nb' holds a line break"),
        (["--model", 'a"\nb: {c'], "holds a line break"),
        (["-o", "r\nmodel: {}\n#.yaml"], "--output: "),
        (["-o", "\x1b[31mx.yaml"], "--output: "),
        (["-o", "x" * 300], "File name too long"),
        (["--columns", "{a: " * 3000], "is not a mapping"),
        (["--columns", "[a, b]"], "is not a mapping"),
        (["--columns", "{instruction: {a: b}, output: c}"], "is not a mapping"),
        (["--labels", "up=maybe"], "--labels: up is true (wanted) or false (not)"),
    ],
)
def test_odd_arguments_are_one_line(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", str(ROOT / "data" / "faq_de.csv"), "--gpus", "cpu", *arguments]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2, said
    assert words in said[1]
    assert not [*tmp_path.iterdir()]


def test_a_wide_table_compares_few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(readings_module, "_pair_score", lambda *pair: float(not compared.append(pair)))  # type: ignore[func-returns-value]
    rows = [{f"col {column}": f"some text number {n} in {column}" for column in range(1000)} for n in range(3)]
    assert len(readings_module.readings("auto", rows).plausible) > 1
    assert len(compared) <= readings_module.COMPARED**2


# -- a question longer than max_length is one story --------------------------------------------------------------------


def test_rows_whose_question_alone_is_too_long_are_left_out_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows: a long question, a long answer, both short. Against the counts of training's own reading."""
    monkeypatch.chdir(tmp_path)
    long = "word " * 3000
    rows = [{"question": f"Why {n}?", "answer": f"So {n}."} for n in range(20)]
    rows[3]["question"], rows[5]["answer"], rows[7]["question"] = long, long + "5", long + "word 7"
    Path("a.jsonl").write_bytes("".join(f"{json.dumps(row)}\n" for row in rows).encode())
    found = propose("a.jsonl", gpus="cpu")
    assert found.settings.max_length == 1024
    assert (found.counts.unanswered, found.counts.too_long) == (2, 3)
    (line,) = [line for line in found.lines if line.startswith("a question longer than max_length (1,024 tokens)")]
    assert f"2 rows; no answer is left after the cut, so they are left out; max_length: {found.counts.longest}" in line
    (line,) = [line for line in found.lines if line.startswith("longer than max_length: ")]
    assert "1 row; they are cut" in line
    written = yaml.safe_load(found.text) | {"model": {"name_or_path": "none"}}
    written["data"]["eval"] = None
    del written["training"]["load_best_model_at_end"]
    recipe = Recipe.model_validate(written)
    prepared = prepare(recipe, tokenizer_of("qwen"))
    assert (prepared.facts["unanswered"], prepared.facts["dropped"], prepared.facts["truncated"]) == (2, 2, 1)
    longest = prepared.facts["longest_unanswered"]
    assert prepared.notes[0] == (
        "2 documents dropped: the question alone is longer than data.max_length, so no answer is left; "
        f"data.max_length: {longest} keeps all of them"
    )
    longer = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": 32_768})})
    assert prepare(longer, tokenizer_of("qwen")).pool.lengths[[3, 7]].max() == longest


def test_a_small_file_is_read_whole_however_slow_the_machine_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of 300 rows has a third label."""
    monkeypatch.setattr("finetune.new_recipe.sample.SAMPLE_SECONDS", -1.0)
    rows = [f"Why {n}?,So {n}.,{5 if n == 299 else n % 2}\n" for n in range(300)]
    (tmp_path / "a.csv").write_text(f"prompt,completion,label\n{''.join(rows)}", "utf-8")
    with pytest.raises(FinetuneError, match=r"judged answers: kto"):
        propose(str(tmp_path / "a.csv"), gpus="cpu")


@pytest.mark.parametrize("tools", [0, 2])
def test_rows_are_counted_as_training_counts_them(
    tools: int, tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template's own text is longer than the rows, so that bytes alone would find 256 tokens enough."""
    shutil.copytree(tiny_llama, model := tmp_path / "model")
    words = "be kind to the old stone bridge " * 25
    template = (model / "chat_template.jinja").read_text("utf-8")
    template = f"{{% for tool in tools or [''] %}}{{{{ tool }}}}{words}{{% endfor %}}{template}"
    (model / "chat_template.jinja").write_text(template, "utf-8")
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    answer = {"role": "assistant", "content": "so"}
    more = {"tools": [tool] * tools} if tools else {}
    file = tmp_path / "rows.jsonl"
    file.write_bytes(lines(lambda n: {"messages": [{"role": "user", "content": f"why {n}"}, answer], **more}))
    made = propose(str(file), model=str(model), gpus="cpu")
    (written := tmp_path / "made.yaml").write_text(made.text, "utf-8")
    recipe = load_recipe(written).recipe
    prepared = prepare(recipe, load_tokenizer(recipe))
    longest = int(prepared.pool.lengths.max())
    assert prepared.facts["truncated"] == prepared.facts["dropped"] == made.counts.too_long == 0
    assert (made.counts.tokens, made.counts.longest) == (prepared.facts["tokens"], longest)
    assert recipe.data.max_length == min(size for size in ROW_SIZES if size >= longest) > 256
    assert notes_before_launch(recipe, prepared)["steps"] == made.settings.steps
    monkeypatch.setenv("FINETUNE_CACHE", "/proc/none")  # which cannot be written: not counted
    assert propose(str(file), model=str(model), gpus="cpu", output=tmp_path / "b.yaml").counts.longest == 0


def test_few_repeated_answers_are_named_as_options(tmp_path: Path) -> None:
    classes = ["spam", "no", "7"]
    rows = [{"question": f"Is mail {number} good?", "answer": classes[number % 3]} for number in range(60)]
    (tmp_path / "mails.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (tmp_path / "free.jsonl").write_bytes(lines(lambda number: dict(zip("qa", german(number), strict=True))))
    for name, options in (("mails", ["7", "no", "spam"]), ("free", [])):
        words = ["init", str(tmp_path / f"{name}.jsonl"), "-o", str(tmp_path / f"{name}.yaml"), "--gpus", "1x24GB"]
        assert main(words) == 0
        assert load_recipe(tmp_path / f"{name}.yaml").recipe.eval.options == options
