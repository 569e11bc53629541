"""finetune chat: who answers, what is remembered, and that each of them is the model it is said to be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from finetune.answers import chat
from finetune.answers.chat import (
    HELP,
    ChatSession,
    GenerationSettings,
    answers_to,
    chat_loop,
    open_run,
    typed_lines,
)
from finetune.cli.main import main
from finetune.model.quantization import quantized_layers
from finetune.output_stream import without_controls
from tests.support.models.tiny import tiny_tokenizer
from tests.support.runs.finished import finished_run

ASKED = "tell me what it is"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    return finished_run(tmp_path_factory.mktemp("chat"), tiny_llama)


@pytest.fixture
def session(run: Path) -> ChatSession:
    return open_run(run)


def greedy() -> GenerationSettings:
    return GenerationSettings(max_new_tokens=6, temperature=0.0)


def talk(session: ChatSession, *lines: str, settings: GenerationSettings | None = None) -> list[str]:
    """What is printed besides the streamed answers."""
    printed: list[str] = []
    chat_loop(session, lines, "both", settings or greedy(), printed.append)
    return printed


def generated(model: Any) -> str:
    """By the libraries alone."""
    tokenizer = tiny_tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": ASKED}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        tokens = model.generate(**prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=2)
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def test_base_and_tuned_are_what_the_libraries_load(tmp_path: Path, tiny_llama: Path) -> None:
    run = finished_run(tmp_path, tiny_llama)
    answers = answers_to(open_run(run), [ASKED], "both", greedy())
    base = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    expected = [generated(base)]
    expected.append(generated(PeftModel.from_pretrained(base, str(run / "adapter")).eval()))
    assert [(line["who"], line["answer"]) for line in answers] == list(zip(("base", "tuned"), expected, strict=True))
    assert expected[0] != expected[1]


def test_all_weights(tmp_path: Path, tiny_llama: Path) -> None:
    run = finished_run(tmp_path, tiny_llama, lora=None)
    answers = answers_to(open_run(run), [ASKED], "both", greedy())
    assert answers[0]["answer"] == generated(AutoModelForCausalLM.from_pretrained(tiny_llama).eval())
    assert answers[1]["answer"] == generated(AutoModelForCausalLM.from_pretrained(run / "model").eval())


def test_a_quantised_base_is_quantised_again(tmp_path: Path, tiny_llama: Path) -> None:
    run = finished_run(tmp_path, tiny_llama, quantization={"load_in_4bit": True})
    session = open_run(run)
    assert len(list(quantized_layers(session.tuned.model))) == 14
    assert all(line["answer"] for line in answers_to(session, [ASKED], "both", greedy()))


def test_who_answers_and_who_remembers(session: ChatSession, capsys: pytest.CaptureFixture[str]) -> None:
    answers = talk(session, ASKED, "/tuned", "why", "/base", "", "/both", "/reset")
    assert [line.strip() for line in answers] == ["base:", "tuned:", "tuned:", "forgotten"]
    assert session.base.history == session.tuned.history == []
    talk(session, "/tuned", ASKED)
    assert [turn["role"] for turn in session.tuned.history] == ["user", "assistant"]
    assert session.base.history == []
    history = talk(session, "/history")
    assert history == [f"you: {ASKED}\ntuned: {session.tuned.history[1]['content']}"]
    assert capsys.readouterr().out


def test_the_history_is_part_of_the_prompt(session: ChatSession) -> None:
    first = session.reply(session.tuned, ASKED, greedy())
    alone = len(session.encoder.prompt_ids([{"role": "user", "content": "why"}]))
    session.reply(session.tuned, "why", greedy())
    assert [turn["content"] for turn in session.tuned.history[:3]] == [ASKED, first, "why"]
    assert len(session.encoder.prompt_ids(session.tuned.history[:3])) > alone


def test_answers_are_streamed_word_by_word(
    session: ChatSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(session, "/tuned", ASKED)
    assert capsys.readouterr().out.strip() == session.tuned.history[1]["content"]
    seen: list[str] = []

    def speaking(_: Any, tokenizer: Any, prompt: list[int], *, streamer: Any, **__: Any) -> str:
        streamer.put(torch.tensor([prompt]))  # as transformers' generate calls it
        for token in tokenizer("a river carries the boat", add_special_tokens=False)["input_ids"]:
            streamer.put(torch.tensor([token]))
            seen.append(capsys.readouterr().out)
        streamer.end()
        return "a river carries the boat"

    monkeypatch.setattr(chat, "answer", speaking)
    talk(session, "/tuned", ASKED)
    assert "".join([*seen, capsys.readouterr().out]).strip() == "a river carries the boat"
    assert len([piece for piece in seen if piece]) >= 3


def test_a_seed_repeats_an_answer(session: ChatSession) -> None:
    settings = GenerationSettings(max_new_tokens=12, temperature=1.5)

    def sampled(*commands: str) -> list[str]:
        answers = []
        for command in commands:
            talk(session, "/reset", command, "/tuned", ASKED, settings=settings)
            answers.append(session.tuned.history[1]["content"])
        return answers

    first, again, other = sampled("/seed 3", "/seed 3", "/seed 4")
    assert first == again != other
    free = sampled("/seed", "/seed")
    assert settings.seed is None
    assert free[0] != free[1]
    assert talk(session, "/seed 5", settings=settings) == ["seed: 5"]
    assert "answers are greedy, so it changes nothing" in talk(session, "/seed 5")[0]
    assert talk(session, "/seed five", "/what", "/save") == [HELP, HELP, HELP]


def test_a_saved_talk_can_be_trained_on(
    session: ChatSession, tmp_path: Path, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.jsonl"
    assert talk(session, f"/save {file}", "/history") == ["nothing to show yet"] * 2
    assert talk(session, ASKED, "/tuned", "why", f"/save {file}")[-1] == f"saved: {file} (2 conversations)"
    base, tuned = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert (base["who"], tuned["who"]) == ("base", "tuned")
    assert [len(row["messages"]) for row in (base, tuned)] == [2, 4]
    recipe = {
        "model": {"name_or_path": str(tiny_llama)},
        "data": {"train": [{"path": "json", "data_files": str(file)}]},
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert main(["check", str(tmp_path / "recipe.yaml"), "--data"]) == 0, capsys.readouterr().err
    assert talk(session, f"/save {file}") == [f"{file}: is there already; choose another name"]
    assert "could not be written: No such file" in talk(session, f"/save {tmp_path}/nowhere/talk.jsonl")[0]


def test_a_stopped_answer_is_not_remembered(session: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat, "answer", stopped)
        assert talk(session, ASKED) == ["\nbase:", "\n(stopped; not remembered)"]
    assert session.base.history == []
    assert len(talk(session, ASKED)) == 2
    assert session.tuned.history


def test_typed_lines_end_with_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(_: str) -> Iterator[Any]:
        yield "hello"
        yield KeyboardInterrupt
        yield "again"
        yield EOFError

    keys = typed("")

    def read(_: str) -> str:
        key = next(keys)
        if isinstance(key, str):
            return key
        raise key

    monkeypatch.setattr("builtins.input", read)
    assert list(typed_lines()) == ["hello", "", "again"]


def test_the_verb(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["chat", str(run), "--prompt", ASKED, "--max-new-tokens", "6", "--temperature", "1.5", "--seed", "7"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [line["who"] for line in result["answers"]] == ["base", "tuned"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert main([*words, "--who", "tuned"]) == 0
    output = capsys.readouterr().out
    assert "tuned:" in output
    assert "base:" not in output
    assert without_controls(result["answers"][1]["answer"]) in output
    assert main(["chat", str(run), "--who", "nobody"]) == 2
    assert main(["chat", str(tmp_path), "--prompt", ASKED]) == 2
    assert "not a run folder" in capsys.readouterr().err


@pytest.mark.sample(1, thorough=3)
@pytest.mark.parametrize(
    "words",
    [
        ["chat"], ["chat", "--step", "3"], ["eval"], ["eval", "--step", "3"], ["merge"], ["merge", "--step", "3"],
        ["export", "--step", "3"], ["push", "me/mine", "--step", "3"], ["push", "me/mine"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_wrong_folder_is_refused_before_torch_is_imported(words: list[str], tmp_path: Path) -> None:
    program = (
        "import sys; from finetune.cli.main import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    for folder in (tmp_path, tmp_path / "none"):
        command = [sys.executable, "-c", program, words[0], str(folder), *words[1:]]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        assert process.returncode == 2
        assert f"{folder}: not a run folder" in process.stderr
        assert process.stdout == "False\n"
