"""`finetune sample`: the same bytes in every run, rows for the next recipe, and one line for every mistake."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.answers import sample
from finetune.answers.kept_rows import pass_at
from finetune.answers.next_recipe import next_recipe
from finetune.answers.own_scorer import OwnScorer
from finetune.cli.main import main
from finetune.files import append_lines, json_lines, read_lines
from finetune.finished_run import FinishedRun
from finetune.generation import generate
from finetune.generation import held_out as scored_answers
from finetune.model.new_tokens import load_tokenizer
from finetune.recipe.loader import load_recipe, recipe_from_resolved
from finetune.recipe.schema import Recipe
from finetune.tokens.dataset import prepare
from finetune.train import main as train
from tests.support.models.tiny import save_tiny
from tests.support.runs.curve_table import skip_where_missing
from tests.support.runs.openai_server import OpenAI, serving
from tests.support.runs.sampling import sampled_run

ROOT = Path(__file__).resolve().parents[2]
NEW = ["--max-new-tokens", "12"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sampled_run(tmp_path_factory.mktemp("made"), base)


def words(run: Path, folder: Path, *more: str) -> list[str]:
    """The command with the run's tasks and scorer; 8 answers to each of 40 prompts."""
    made = run.parent
    own = [] if "--metric" in more or "--scorer" in more else ["--scorer", f"{made / 'check.py'}:score"]
    return ["sample", str(run), "--data", str(made / "tasks.jsonl"), "-o", str(folder), *NEW, *own, *more]


@pytest.fixture(scope="module")
def whole(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed command."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert main(words(run, folder)) == 0
    return folder


@pytest.mark.thorough
def test_forty_prompts_with_eight_answers(base: Path, whole: Path) -> None:
    lines, figures = read_lines(whole / "answers.jsonl"), json.loads((whole / "sample.json").read_text())["figures"]
    assert [len(line["answers"]) for line in lines] == [8] * 40
    right = [sum(len(each["text"]) % 3 == 0 for each in line["answers"]) for line in lines]
    assert right == [sum(each["score"] for each in line["answers"]) for line in lines]
    for k in (1, 2, 4, 8):
        mean = sum(pass_at(each, 8, k) for each in right) / 40
        assert figures["pass_at"][str(k)]["mean"] == pytest.approx(mean, abs=1e-12)
    assert 0.1 < figures["pass_at"]["1"]["mean"] < figures["pass_at"]["8"]["mean"]
    assert all(1 <= each["tokens"] <= 12 for line in lines for each in line["answers"])
    ended = sum(each["ended"] for line in lines for each in line["answers"])
    assert 200 < ended < 320
    assert len({each["text"] for line in lines for each in line["answers"]}) > 250
    rows = read_lines(whole / "rows.jsonl")
    assert len(rows) == figures["rows"] > 20
    assert {row["written_by"] for row in rows} == {f"run, trained from {base.name}"}


@pytest.mark.thorough
def test_stopped_ten_times_and_continued(
    run: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stop comes while a line is written, every second one leaves a torn line."""
    folder, draw, stops, left = tmp_path / "out", random.Random(3), 0, 0

    class Stop(Exception):
        pass

    def stopping(file: Path, rows: list[dict[str, Any]]) -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            append_lines(file, rows)
            return
        if stops % 2:
            with file.open("ab") as written:
                written.write((json.dumps(rows[0]) + "\n").encode()[: draw.randint(1, 200)])
        raise Stop

    monkeypatch.setattr(sample, "append_lines", stopping)
    while True:
        left = draw.randint(1, 4)
        try:
            assert main(words(run, folder)) == 0
            break
        except Stop:
            stops += 1
    assert stops >= 10
    for name in ("answers.jsonl", "rows.jsonl", "sample.json", "held_out.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.thorough
def test_the_batch_changes_no_byte(run: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less memory for batches, rounds of four tokens, prompts in groups of seven. A batch has one prompt's answers."""
    answers, rows = scored_answers.greedy_answers, list[set[int]]()
    monkeypatch.setattr(scored_answers, "BATCH_TOKENS", 300)
    monkeypatch.setattr(generate, "FIRST_ROUND", 4)

    def counted(*arguments: Any, **options: Any) -> Any:
        rows.append({row for row, _ in options["draws"]})
        return answers(*arguments, **options)

    monkeypatch.setattr(sample, "PROMPTS_ALONE", 7)
    monkeypatch.setattr(scored_answers, "greedy_answers", counted)
    assert main(words(run, tmp_path / "out")) == 0
    assert (tmp_path / "out/answers.jsonl").read_bytes() == (whole / "answers.jsonl").read_bytes()
    assert {len(each) for each in rows} == {1}
    assert len(rows) > 80  # 40 prompts in three rounds, less those whose answers had all ended


@pytest.mark.thorough
def test_another_seed_draws_other_answers(run: Path, whole: Path, tmp_path: Path) -> None:
    assert main(words(run, tmp_path / "out", "--seed", "1", "--limit", "4")) == 0
    other, one = (read_lines(folder / "answers.jsonl")[0]["answers"] for folder in (tmp_path / "out", whole))
    assert [each["text"] for each in other] != [each["text"] for each in one]


@pytest.mark.thorough
def test_a_small_top_p_is_greedy(run: Path, tmp_path: Path) -> None:
    assert main(words(run, tmp_path / "p", "--top-p", "1e-9", "--n", "3", "--limit", "4")) == 0
    assert main(words(run, tmp_path / "greedy", "--temperature", "0", "--n", "1", "--limit", "4")) == 0
    for drawn, greedy in zip(
        read_lines(tmp_path / "p/answers.jsonl"), read_lines(tmp_path / "greedy/answers.jsonl"), strict=True
    ):
        assert [each["text"] for each in drawn["answers"]] == [greedy["answers"][0]["text"]] * 3


@pytest.mark.parametrize("keep", ["right", "pairs", "judged", "all"])
def test_the_next_recipe_trains_on_the_rows(
    run: Path, whole: Path, keep: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another --keep loads no model, and leaves earlier rows and recipes as they are. The recipe's data are read, and
    its held-out questions are the run's."""
    monkeypatch.setattr(sample, "models_by_ranks", None)
    earlier = {file: file.read_bytes() for file in (*whole.glob("rows*"), *whole.glob("recipe*"))}
    assert main([*words(run, whole, "--keep", keep), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert {file: file.read_bytes() for file in earlier} == earlier
    assert (files["rows"] == str(whole / "rows.jsonl")) == (keep == "right")
    recipe = load_recipe(files["recipe"]).recipe
    assert [entry.path for entry in recipe.data.train] == [files["rows"]]
    prepared = prepare(recipe, load_tokenizer(recipe))
    assert prepared.facts["documents"] == len(read_lines(Path(files["rows"])))
    author = read_lines(whole / "answers.jsonl")[0]["by"]["model"]
    assert prepared.facts["written_by"] == {author: prepared.facts["documents"]}
    assert recipe.model.adapter == str(run / "adapter")
    assert recipe.eval.generate.file == str(whole / "held_out.jsonl")
    assert len(read_lines(whole / "held_out.jsonl")) == 4  # 0.3 of 12
    assert not Path(recipe.run_dir).exists()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_write_one_processes_rows(strategy: str, base: Path, tmp_path: Path) -> None:
    skip_where_missing(strategy)
    run = sampled_run(tmp_path / "made", base, accelerate_config=strategy)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    assert main(words(run, tmp_path / "one")) == 0
    command = [sys.executable, str(ROOT / "tests/support/runs/eval_by.py"), "2", *words(run, tmp_path / "two")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("written: ") == 1
    for name in ("answers.jsonl", "rows.jsonl"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


BAD: list[tuple[list[str], str]] = [
    (["--keep", "best"], "best is not one of right, pairs, judged, all"),
    (["--pick", "longest"], "longest is not one of shortest, random"),
    (["--leave-out", "sometimes"], "sometimes is not one of always, never"),
    (["--n", "0"], "--n"),
    (["--n", "5000"], "--n 5000: is more than 1,024 answers; name fewer"),
    (["--temperature", "0"], "--temperature 0: every answer would be the same; write --n 1, or a temperature above 0"),
    (["--temperature", "nan"], "--temperature"),
    (["--temperature", "inf"], "--temperature inf: is no number above 0"),
    (["--top-p", "0"], "--top-p 0: is a share above 0, up to 1; write 0.95"),
    (["--top-p", "1.5"], "--top-p 1.5: is a share above 0"),
    (["--at-least", "0"], "--at-least 0: is a score above 0, up to 1"),
    (["--at-least", "nan"], "--at-least nan: is a score above 0, up to 1"),
    (["--near", "0"], "sample --near: is not there any more; leave it out: "),
    (["--without-held-out"], "sample --without-held-out: is not there any more; leave it out: prompts that"),
    (["--scorer-seconds", "0"], "--scorer-seconds 0: write seconds above 0"),
    (["--keep", "pairs", "--n", "1"], "--keep pairs: needs a right and a wrong answer to a prompt; write --n 8"),
    (["--metric", "exact", "--scorer", "CHECK"], "--metric, --scorer: one of them says what is right; keep one"),
    (["--metric", "exakt"], "--metric exakt: "),
    (["--metric", "number"], "tasks.jsonl:1: metric number: the reference"),
    (["--scorer", "nowhere.py:score"], "--scorer nowhere.py:score: nowhere.py: no such file"),
    (["--scorer", "CHECK:judge"], "has no function judge"),
    (["--scorer", "EXITS"], "--scorer EXITS: the file fails: SystemExit: 0"),
    (["--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    (["--data", "HELD"], "HELD: every question is held out by the recipe (HELD:1 is "),
    (["--data", "HELD TEXT"], "HELD TEXT: every question is held out by the recipe (HELD TEXT:1 is "),
    (["--data", "UNANSWERED"], "unanswered.jsonl:1: no assistant turn"),
    (["--data", "EMPTY"], "no row has a question and an answer"),
    (["--output", "CHECK_FILE"], "is a file; name a folder that may be written"),
    (["--output", "OTHERS"], "holds other files; name another folder"),
    (["--model", "./other"], "./other: is no run, recipe or model here"),
    (["--endpoint", "localhost"], "--endpoint localhost: is not the address of a server"),
    (["--processes", "2", "--endpoint", "http://localhost:1/v1"], "--endpoint: is asked by one process"),
]


@pytest.fixture(scope="module")
def bad_files(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bad")
    files = {
        "exits.py": "raise SystemExit(0)\n",
        "unanswered.jsonl": json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n",
        "empty.jsonl": json.dumps({"text": "a river carries"}) + "\n",
        "others/thesis.txt": "mine",
    }
    (folder / "others").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    recipe = load_recipe(run / "recipe.yaml").recipe
    prepared = prepare(recipe, load_tokenizer(recipe))
    number = int(prepared.pool.place(int(prepared.split.held_out[0])).rpartition(":")[2])
    row = json.loads((run.parent / "chats.jsonl").read_text("utf-8").splitlines()[number - 1])
    row["messages"][0]["content"] = f"  {row['messages'][0]['content'].upper()}"  # it is the same question
    (folder / "held.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    question, answer = (turn["content"] for turn in row["messages"])
    (folder / "text.jsonl").write_text(json.dumps({"prompt": question, "completion": answer}) + "\n", "utf-8")
    return {
        "CHECK": f"{run.parent / 'check.py'}:score",
        "CHECK:judge": f"{run.parent / 'check.py'}:judge",
        "CHECK_FILE": str(run.parent / "check.py"),
        "EXITS": f"{folder / 'exits.py'}:score",
        "HELD": str(folder / "held.jsonl"),
        "HELD TEXT": str(folder / "text.jsonl"),
        "UNANSWERED": str(folder / "unanswered.jsonl"),
        "EMPTY": str(folder / "empty.jsonl"),
        "OTHERS": str(folder / "others"),
    }


@pytest.mark.parametrize(("more", "message"), BAD)
def test_bad_input_is_one_line(
    more: list[str],
    message: str,
    run: Path,
    bad_files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    command = words(run, tmp_path / "out", *(bad_files.get(word, word) for word in more))
    assert main(command) == 2
    printed = capsys.readouterr().err
    for name, file in sorted(bad_files.items(), reverse=True):  # HELD TEXT before HELD
        message = message.replace(name, file)
    assert message in " ".join(printed.split()), printed
    assert "Traceback" not in printed
    assert not list(tmp_path.iterdir())
    assert len(BAD) >= 25


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nowhere.yaml", "nowhere.yaml: no such recipe; "),
        ("tasks.jsonl", "is data, not a recipe"),
        ("made", "is no run, recipe or model here"),
        ("a b", "a b: is no run, recipe or model here"),
        ("\x1b[31m", "is no run, recipe or model here"),
    ],
)
def test_an_unknown_source_is_one_line(
    word: str,
    message: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    (tmp_path / "tasks.jsonl").write_text("{}\n", "utf-8")
    assert main(["sample", word, "--data", str(run.parent / "tasks.jsonl")]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "\x1b" not in printed


@pytest.mark.sample(1, thorough=5)
@pytest.mark.parametrize(
    ("bad", "words_of_it"),
    [
        ("raise KeyError(answer)", "the function raised KeyError"),
        ("while True: pass", "took more than 0.3 s"),
        ("return 'yes'", "the function returned 'yes'"),
        ("import os; os._exit(0)", "ended its process (0)"),
        ("import ctypes; ctypes.string_at(0)", "ended its process (SIGSEGV)"),
    ],
)
def test_a_bad_scorer_costs_one_answer(
    bad: str, words_of_it: str, run: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One answer of the second prompt alone; then the scorer is mended, and it is scored."""
    file, lines = tmp_path / "bad.py", read_lines(whole / "answers.jsonl")[:8]
    texts = [answer["text"] for line in lines for answer in line["answers"]]
    text = next(answer["text"] for answer in lines[1]["answers"] if texts.count(answer["text"]) == 1)
    code = (
        "def score(answer, reference, row):\n"
        f"    if answer == {text!r}:\n"
        "        BAD\n"
        "    return len(answer) % 3 == 0\n"
    )
    file.write_text(code.replace("BAD", bad), "utf-8")
    command = [
        *words(run, tmp_path / "out", "--scorer", f"{file}:score", "--limit", "8", "--scorer-seconds", "0.3"),
        "--json",
    ]
    assert main(command) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["failed"] == figures["left_out"]["the scorer failed"] == 1
    assert words_of_it in figures["first_failure"]
    for line, scored in zip(read_lines(tmp_path / "out/answers.jsonl"), lines, strict=True):
        for answer, right in zip(line["answers"], scored["answers"], strict=True):
            assert answer["score"] == (None if answer["text"] == text else right["score"])
            assert ("problem" in answer) is (answer["text"] == text)
    file.write_text(code.replace("BAD", "pass"), "utf-8")
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == 0
    assert read_lines(tmp_path / "out/answers.jsonl") == lines


def test_an_earlier_releases_failed_prompt_is_scored_again(run: Path, whole: Path, tmp_path: Path) -> None:
    """It wrote one problem for a prompt, and no score."""
    folder = shutil.copytree(whole, tmp_path / "out")
    lines = read_lines(folder / "answers.jsonl")
    lines[1] |= {"problem": "took more than 10 s"}
    for answer in lines[1]["answers"]:
        answer |= {"score": None, "unread": False}
    (folder / "answers.jsonl").write_text(json_lines(lines), "utf-8")
    assert main(words(run, folder)) == 0
    assert (folder / "answers.jsonl").read_bytes() == (whole / "answers.jsonl").read_bytes()


def test_a_scorer_that_mostly_fails_ends_the_command(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text("def score(answer, reference, row):\n    return 1 / 0\n", "utf-8")
    assert main(words(run, tmp_path / "out", "--scorer", f"{tmp_path / 'bad.py'}:score")) == 2
    error = capsys.readouterr().err
    assert "tasks.jsonl:1: the scorer failed: the function raised ZeroDivisionError" in error
    assert "3 of 3 prompts; mend it, and run the same command again: the answers are kept" in error
    assert len(read_lines(tmp_path / "out/answers.jsonl")) == 3
    assert not (tmp_path / "out/rows.jsonl").exists()


@pytest.mark.thorough
def test_two_commands_do_not_write_in_one_folder(run: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (whole / "answers.jsonl").read_bytes()
    holds = (
        "import sys, pathlib, finetune.files as files; files.lock(pathlib.Path(sys.argv[1]), wait_seconds=0); print()"
    )
    other = [sys.executable, "-c", f"{holds}; input()", str(whole / ".lock")]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert main(words(run, whole)) == 2
        said = f"--output {whole}: another command is writing here (process {holder.pid} on "
        assert said in " ".join(capsys.readouterr().err.split())
        holder.communicate("\n")
    assert main(words(run, whole)) == 0
    assert (whole / "answers.jsonl").read_bytes() == before


def test_another_request_is_refused_in_a_folder_with_answers(
    run: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (whole / "answers.jsonl").read_bytes()
    assert main(words(run, whole, "--temperature", "0.5")) == 2
    assert "holds answers of another request (temperature 1.0, not 0.5); name another folder" in capsys.readouterr().err
    assert main(words(run, whole, "--limit", "3")) == 2
    assert "(other prompts)" in capsys.readouterr().err
    assert (whole / "answers.jsonl").read_bytes() == before


def test_edited_rows_are_scored_again(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A column that the scorer reads, then a reference. No answer is drawn again."""
    data, rows = tmp_path / "tasks.jsonl", read_lines(run.parent / "tasks.jsonl")[:3]
    (tmp_path / "by.py").write_text(
        "def score(answer, reference, row):\n    return row['right'] == reference\n", "utf-8"
    )
    texts = []
    for right, reference, score in (("no", "yes", 0.0), ("yes", "yes", 1.0), ("yes", "else", 0.0)):
        for row in rows:
            row["messages"][-1]["content"] = reference
        data.write_text("".join(json.dumps(row | {"right": right}) + "\n" for row in rows), "utf-8")
        command = words(
            run, tmp_path / "out", "--data", str(data), "--scorer", f"{tmp_path / 'by.py'}:score", "--n", "2"
        )
        assert main(command) == 0
        lines = read_lines(tmp_path / "out/answers.jsonl")
        assert {each["score"] for line in lines for each in line["answers"]} == {score}
        assert {line["reference"] for line in lines} == {reference}
        texts.append([each["text"] for line in lines for each in line["answers"]])
        said = "because references or columns of the rows have changed" in capsys.readouterr().out
        assert said is (len(texts) > 1)
    assert texts[0] == texts[1] == texts[2]


def test_what_is_left_out_or_beyond_the_model_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows with an empty cell, and prompts that the model has no positions for."""
    model = save_tiny(tmp_path / "short", max_position_embeddings=40)
    rows = [{"prompt": text, "completion": answer} for text, answer in (("a river", "b"), ("a " * 38, "b"), ("c", ""))]
    data = tmp_path / "tasks.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    recipe = {
        "model": {"name_or_path": str(model)},
        "data": {"train": [{"path": str(data), "drop": ["empty"]}]},
        "budget": {"gpus": 0},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    asked = ["--data", str(data), "-o", str(tmp_path / "out"), "--n", "2", "--max-new-tokens", "4", "--metric", "exact"]
    assert main(["sample", str(tmp_path / "recipe.yaml"), *asked]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "tasks.jsonl: 1 row with an empty cell left out" in said
    assert "tasks.jsonl:2: with 4 new tokens beyond the model's 40 positions: 1 prompt; shorten such" in said


def test_prompts_without_a_whole_line_are_asked(run: Path, whole: Path, tmp_path: Path) -> None:
    """Lines that are gone, torn, doubled or edited in answers.jsonl. The answers are those of one command."""
    file, more = tmp_path / "out/answers.jsonl", ["--limit", "6"]
    assert main(words(run, tmp_path / "out", *more)) == 0
    lines = file.read_text("utf-8").splitlines()
    rows = (tmp_path / "out/rows.jsonl").read_bytes()
    half = {"row": 4, "answers": json.loads(lines[4])["answers"][:3]}
    file.write_text("\n".join([lines[0], lines[0], lines[2][:90], lines[5], lines[3], json.dumps(half)]), "utf-8")
    assert main(words(run, tmp_path / "out", *more)) == 0
    assert sorted(file.read_text("utf-8").splitlines()) == sorted(lines)
    assert (tmp_path / "out/rows.jsonl").read_bytes() == rows
    edited = [json.loads(line) for line in lines]
    edited[0]["answers"][0]["score"] = "high"
    edited[1]["answers"][0]["text"] = "\ud800"
    edited[2]["answers"][0] = 7
    edited[3]["question"]["messages"][0]["content"] = "another question"
    edited[4]["by"] = "me"
    edited[5]["answers"][0]["score"] = float("nan")
    file.write_text("\n".join(map(json.dumps, edited)) + "\n", "utf-8")
    assert main(words(run, tmp_path / "out", *more)) == 0
    assert sorted(file.read_text("utf-8").splitlines()) == sorted(lines)


def test_a_folder_holds_plain_files(run: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that are written in place: no link to a file of the user's or to a device, no folder, no pipe."""
    mine, kinds = tmp_path / "mine", list[tuple[str, Callable[[Path], None]]]()
    mine.write_text("my own", "utf-8")
    kinds += [(".lock", lambda path: path.symlink_to(mine)), ("answers.jsonl", os.mkdir), ("answers.jsonl", os.mkfifo)]
    kinds += [("endpoint.jsonl", lambda path: path.symlink_to("/dev/zero"))]
    for number, (name, make) in enumerate(kinds):
        file = shutil.copytree(whole, tmp_path / f"out-{number}") / name
        file.unlink(missing_ok=True)
        make(file)
        assert main(words(run, file.parent)) == 2
        assert f"{file}: is no plain file; remove it, or name another folder" in " ".join(
            capsys.readouterr().err.split()
        )
    assert mine.read_text("utf-8") == "my own"


def test_weights_are_known_by_their_content(
    run: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of the run with newer file times goes on. Other weights under the same name are refused."""
    copied, folder = tmp_path / "run", tmp_path / "out"
    assert main(words(run, folder, "--limit", "2", "--n", "2")) == 0
    shutil.copytree(run, copied)  # with times of its own
    more = ["--data", str(run.parent / "tasks.jsonl"), "--scorer", f"{run.parent / 'check.py'}:score"]
    small = ["--limit", "2", "--n", "2", *NEW, *more]
    os.utime(copied / "adapter/adapter_model.safetensors", (0, 0))
    assert main(["sample", str(copied), "-o", str(folder), *small]) == 0
    weights = copied / "adapter/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2] + b"\0\0")
    assert main(["sample", str(copied), "-o", str(folder), *small]) == 2
    model = shutil.copytree(base, tmp_path / "model")
    assert main(["sample", str(model), "-o", str(tmp_path / "by model"), *small]) == 0
    save_tiny(model, seed=5)
    assert main(["sample", str(model), "-o", str(tmp_path / "by model"), *small]) == 2
    assert capsys.readouterr().err.count("holds answers of another request (other weights)") == 2


@pytest.mark.parametrize(("stop", "kept"), [("3h50m", "3h50m"), ("2031-06-01T18:00Z", None)])
def test_the_next_recipe_is_no_part_of_the_earlier_run(
    run: Path, stop: str, kept: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place on a storage, its date, a warmup that was counted for other data, and a length for other rows."""
    monkeypatch.chdir(tmp_path)
    made = recipe_from_resolved(run / "recipe.yaml")
    changed = {
        "run": made.run.model_copy(update={"storage": "s3://bucket/one", "stop_after": stop}),
        "training": made.training.model_copy(update={"warmup_steps": 500, "max_steps": 5000, "warmup_ratio": 0.0}),
    }
    reads = FinishedRun(run, made.model_copy(update=changed))
    for words, longer in ((3, False), (300, True)):
        answer = {"role": "assistant", "content": "a " * words}
        rows = [{"messages": [{"role": "user", "content": "q"}, answer]}] * 8
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        text = next_recipe(reads, Path("rows.jsonl"), rows, "right", None, "exact")
        assert ("# data.max_length: the longest row's; the answers' recipe has " in text) is longer
        recipe = Recipe.model_validate(yaml.safe_load(text))
        assert prepare(recipe, load_tokenizer(recipe)).facts["truncated"] == 0
    assert text.count("# run.storage is left out: each run needs a place of its own.\n") == 1
    values = yaml.safe_load(text)
    assert values.get("run", {}) == ({"stop_after": kept} if kept else {})
    assert not {"warmup_steps", "max_steps"} & {*values["training"]}


def test_a_scorer_may_fork(tmp_path: Path) -> None:
    """A forked process, as multiprocessing's, ends as it wants. It answers no question in the scorer's place."""
    code = (
        "import multiprocessing\n"
        "def score(answer, reference, row):\n"
        "    own = multiprocessing.get_context('fork').Process(target=print)\n"
        "    own.start()\n"
        "    own.join()\n"
        "    return answer == 'right' and own.exitcode == 0\n"
    )
    (tmp_path / "forks.py").write_text(code, "utf-8")
    with OwnScorer(f"{tmp_path / 'forks.py'}:score", seconds=20.0) as scorer:
        answers = ["right", "wrong"] * 3
        assert [scorer.score(answer, "", {}) for answer in answers] == [1.0, 0.0] * 3


def test_what_a_scorer_starts_ends_with_it(tmp_path: Path) -> None:
    """The answer's program reads nothing from standard input, and does not outlive the scorer's time."""
    code = (
        "import subprocess, sys\n"
        "def score(answer, reference, row):\n"
        "    child = subprocess.Popen([sys.executable, '-c', answer])\n"
        "    open('started', 'w').write(str(child.pid))\n"
        "    return child.wait() == 0\n"
    )
    (tmp_path / "runs.py").write_text(code.replace("'started'", repr(str(tmp_path / "started"))), "utf-8")
    with OwnScorer(f"{tmp_path / 'runs.py'}:score", seconds=5.0) as scorer:
        assert scorer.score("import sys; sys.exit(len(sys.stdin.read()))", "", {}) == 1.0
        with pytest.raises(ValueError, match="took more than 5 s"):
            scorer.score("import time; time.sleep(60)", "", {})
        number = int((tmp_path / "started").read_text())
        state = Path(f"/proc/{number}/stat")
        until = time.monotonic() + 10
        while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < until:
            time.sleep(0.05)
        assert not state.exists() or state.read_text().split()[2] == "Z"
        assert scorer.score("pass", "", {}) == 1.0


@pytest.mark.thorough
def test_held_out_prompts_are_left_out(
    run: Path, bad_files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "both.jsonl"
    data.write_text(
        Path(bad_files["HELD"]).read_text("utf-8") + (run.parent / "tasks.jsonl").read_text("utf-8"), "utf-8"
    )
    assert main(words(run, tmp_path / "out", "--data", str(data), "--limit", "4")) == 0
    line = f"{data}: 1 prompt left out, held out by the recipe; the first: {data}:1 is {run.parent / 'chats.jsonl'}:"
    assert line in " ".join(capsys.readouterr().out.split())
    assert [line["row"] for line in read_lines(tmp_path / "out/answers.jsonl")] == [1, 2, 3]
    figures = json.loads((tmp_path / "out/sample.json").read_text("utf-8"))["figures"]
    assert figures["left_out_held_out"] == 1
    # The next round's recipe names held_out.jsonl, and its questions are still left out.
    recipe = load_recipe(tmp_path / "out/recipe.yaml", ["model.adapter=null"]).path
    text = recipe.read_text("utf-8").replace(f"adapter: {run / 'adapter'}", "adapter: null")
    (tmp_path / "next.yaml").write_text(text, "utf-8")
    assert main(words(tmp_path / "next.yaml", tmp_path / "two", "--data", str(data), "--limit", "1")) == 2
    assert "every question is held out by the recipe" in " ".join(capsys.readouterr().err.split())


def test_a_server_writes_the_answers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each request has a seed of its own. The file, each row and the model card name the server's model."""
    with serving(OpenAI(["teacher"])) as server:
        server.reply = lambda _, body: f"said {body['seed'] % 7}"
        more = ["--endpoint", server.url, "--model", "teacher", "--limit", "5", "--n", "4", "--top-p", "0.9"]
        assert main(words(run, tmp_path / "out", *more, "--keep", "all")) == 0
        assert len(server.asked) == 20
        assert len({body["seed"] for _, body, _ in server.asked}) == 20
        assert {(body["temperature"], body["top_p"]) for _, body, _ in server.asked} == {(1.0, 0.9)}
    lines = read_lines(tmp_path / "out/answers.jsonl")
    assert {(line["by"]["model"], line["by"]["endpoint"]) for line in lines} == {("teacher", f"{server.url}/v1")}
    assert [*(tmp_path / "out").glob("endpoint.jsonl")] == []
    assert {row["written_by"] for row in read_lines(tmp_path / "out/rows.jsonl")} == {"teacher"}


def test_a_scorer_that_fails_costs_few_answers_of_a_server(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers may be paid for: the command ends after the first prompts, and keeps what it has."""
    monkeypatch.setattr(sample, "PROMPTS_OF_SERVER", 4)
    (tmp_path / "bad.py").write_text("def score(answer, reference, row):\n    return 1 / 0\n")
    with serving(OpenAI(["teacher"])) as server:
        more = ["--endpoint", server.url, "--model", "teacher", "--limit", "20", "--n", "2"]
        assert main(words(run, tmp_path / "out", *more, "--scorer", f"{tmp_path / 'bad.py'}:score")) == 2
        assert len(server.asked) == 4 * 2
    assert "the scorer failed" in capsys.readouterr().err
    assert len(read_lines(tmp_path / "out/answers.jsonl")) == 4


def test_another_model_writes_the_answers(run: Path, whole: Path, tmp_path: Path, tiny_llama: Path) -> None:
    assert main(words(run, tmp_path / "out", "--model", str(tiny_llama), "--limit", "3", "--keep", "all")) == 0
    lines = read_lines(tmp_path / "out/answers.jsonl")
    assert {line["by"]["model"] for line in lines} == {tiny_llama.name}
    assert [line["question"] for line in lines] == [
        line["question"] for line in read_lines(whole / "answers.jsonl")[:3]
    ]


@pytest.mark.thorough
def test_a_recipe_and_a_model_draw_the_same_answers(run: Path, base: Path, tmp_path: Path) -> None:
    """Before any training both are the base. A model's next recipe comes from `init`."""
    made = load_recipe(run / "recipe.yaml").recipe
    text = f"model: {{name_or_path: {base}}}\ndata: {{train: [{{path: {made.data.train[0].path}}}]}}\n"
    if made.data.train[0].data_files:
        text = text.replace("}]}", f", data_files: {made.data.train[0].data_files}}}]}}")
    (tmp_path / "start.yaml").write_text(text + "budget: {gpus: 0}\n", "utf-8")
    data, scorer = run.parent / "tasks.jsonl", f"{run.parent / 'check.py'}:score"
    for source, folder in ((tmp_path / "start.yaml", "recipe"), (base, "model")):
        command = ["sample", str(source), "--data", str(data), "-o", str(tmp_path / folder), "--scorer", scorer]
        assert main([*command, *NEW, "--limit", "6", "--keep", "all"]) in (0, 2)
    first, second = (read_lines(tmp_path / folder / "answers.jsonl") for folder in ("recipe", "model"))
    assert first == second
    assert first[0]["by"] == {"model": base.name, "dtype": "float32"}


@pytest.mark.thorough
def test_sixteen_bits_record_batch_and_device(base: Path, tmp_path: Path) -> None:
    run = sampled_run(tmp_path / "made", base, model={"dtype": "bfloat16"})
    assert main(words(run, tmp_path / "out", "--limit", "3", "--n", "2")) == 0
    by = read_lines(tmp_path / "out/answers.jsonl")[0]["by"]
    assert by["dtype"] == "bfloat16"
    assert by["device"] == "cpu"
    assert by["prompts_together"] > 100  # a batch has up to 131,072 tokens


@pytest.mark.thorough
def test_texts_stay_texts(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    rows = [json.dumps({"prompt": f"say {n} ", "completion": f"{n}"}) for n in range(4)]
    file.write_text("\n".join(rows) + "\n", "utf-8")
    kept = (("all", "", {"prompt", "completion"}), ("judged", "-2", {"prompt", "completion", "label"}))
    for keep, mark, keys in kept:
        assert main(words(run, tmp_path / "out", "--data", str(file), "--keep", keep)) == 0
        found = read_lines(tmp_path / f"out/rows{mark}.jsonl")
        assert len(found) > 12
        assert all({*row} == {*keys, "written_by"} and row["prompt"].startswith("say ") for row in found)
        recipe = load_recipe(tmp_path / f"out/recipe{mark}.yaml").recipe
        assert prepare(recipe, load_tokenizer(recipe)).facts["documents"] == len(found)


@pytest.mark.slow
@pytest.mark.usefixtures("forget_the_last_run")
def test_a_round_is_three_commands(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sample, train, eval. The model card names the answers' author."""
    assert main(words(run, tmp_path / "one", "--keep", "all")) == 0
    recipe = str(tmp_path / "one/recipe.yaml")
    trained = tmp_path / "one-all"
    changes = ["training.max_steps=2", f"output_dir={trained}", "training.num_train_epochs=1"]
    assert train([recipe, *changes]) == 0
    assert main(["eval", str(trained), "--metric", "exact", *NEW]) == 0
    assert json.loads((trained / "eval.json").read_text("utf-8"))["scores"]["rows"] == 4  # the run's held-out rows
    author = read_lines(tmp_path / "one/rows.jsonl")[0]["written_by"]
    capsys.readouterr()
    assert main(["push", str(trained), "me/it", "--dry-run", "--base", "owner/base"]) == 0
    assert f"Answers written by {author} (" in capsys.readouterr().out


def test_a_models_rows_are_asked_as_init_would_train_them(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns of a question and an answer are chats for a model with a chat template; a recipe calls them texts."""
    rows = [{"prompt": f"the cat {number}", "completion": f"a dog {number}"} for number in range(8)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    asked = ["sample", str(base), "--data", str(tmp_path / "tasks.jsonl"), "-o", str(tmp_path / "out"), "--n", "2"]
    assert main([*asked, "--max-new-tokens", "3", "--metric", "number", "--limit", "2"]) == 0
    lines = read_lines(tmp_path / "out" / "answers.jsonl")
    not_read = [answer for line in lines for answer in line["answers"] if not any(map(str.isdigit, answer["text"]))]
    assert not_read
    assert all(answer["unread"] and answer["score"] == 0 for answer in not_read)
    assert f"unread: {len(not_read)} (scored 0), as " in capsys.readouterr().out
    questions = [line["question"] for line in lines]
    assert questions == [{"messages": [{"role": "user", "content": row["prompt"]}]} for row in rows[:2]]


def test_columns_that_may_be_read_in_two_ways(
    run: Path, tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The remedy that a refusal names is an option of this command, with a model and with a run."""
    rows = read_lines(run.parent / "tasks.jsonl")[:4]
    data = tmp_path / "tasks.jsonl"
    data.write_text(
        "".join(json.dumps(row | {"want": ["yes", "no"][at % 2]}) + "\n" for at, row in enumerate(rows)), "utf-8"
    )
    asked = ["--data", str(data), "-o", str(tmp_path / "out"), "--n", "2", "--max-new-tokens", "3", "--metric", "exact"]
    assert main(["sample", str(base), *asked]) == 2
    remedy = ["--columns", "{messages: messages}"]
    assert f"say which: {remedy[0]} '{remedy[1]}'" in " ".join(capsys.readouterr().err.split())
    assert main(["sample", str(base), *asked, *remedy]) == 0
    assert len(read_lines(tmp_path / "out/answers.jsonl")) == 4
    asked[3] = str(tmp_path / "by-run")
    data.write_text("".join(json.dumps({"a": each, "b": "it", **rows[0]}) + "\n" for each in ("yes", "no")), "utf-8")
    assert main(["sample", str(run), *asked, "--columns", "instruction=a,output=b"]) == 0
    question = read_lines(tmp_path / "by-run/answers.jsonl")[1]["question"]
    assert question == {"messages": [{"role": "user", "content": "no"}]}
