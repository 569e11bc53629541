"""Eval and chat over a server: what is asked, what is scored, and one line for each fault."""

from __future__ import annotations

import json
import re
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from finetune.answers import endpoint as module
from finetune.answers import evaluation
from finetune.answers.endpoint import KEY, Endpoint, reply_of, server_notes
from finetune.cli.main import main
from finetune.data.chat import Chat, Passage
from finetune.files import read_lines
from finetune.finished_run import finished_run as finished
from finetune.generation.generate import Answer
from finetune.output_stream import REPLACEMENT
from finetune.scoring.texts import without_thoughts
from tests.support.runs.finished import finished_run
from tests.support.runs.openai_server import OpenAI, serving

CHAT = Chat([{"role": "user", "content": "why"}], None, [False])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    return finished_run(tmp_path_factory.mktemp("endpoint"), tiny_llama)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenAI]:
    monkeypatch.setattr(module, "WAITS", (0.01, 0.01))
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a loopback server is asked directly
    with serving(OpenAI(["tuned", "base"])) as state:
        yield state


def evaluated(run: Path, server: OpenAI, *words: str) -> list[str]:
    return ["eval", str(run), "--endpoint", server.url, "--model", "tuned", "--max-new-tokens", "8", *words]


def test_both_models_are_scored_by_their_answers_there(
    run: Path, server: OpenAI, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    references: dict[str, str] = {}
    for line in read_lines(run.parent / "chats.jsonl"):
        *asked, last = line["messages"]
        references[asked[-1]["content"]] = last["content"]
    server.reply = lambda model, body: references[body["messages"][-1]["content"]] if model == "tuned" else "no"
    monkeypatch.setenv(KEY, " secret-1 ")
    words = evaluated(run, server, "--base-model", "base", "--metric", "exact", "--json")
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    figures = result["scores"]["metrics"]["exact"]
    assert (figures["base"]["mean"], figures["tuned"]["mean"]) == (0, 1)
    assert result["endpoint"] == {"model": "tuned", "base_model": "base"}
    assert "held_out" not in result
    assert json.loads((run / "eval.json").read_text("utf-8"))["scores"] == result["scores"]
    path, body, headers = server.asked[0]
    assert path == "/v1/chat/completions"
    assert (body["temperature"], body["max_tokens"], body["messages"][-1]["role"]) == (0, 8, "user")
    assert headers["Authorization"] == "Bearer secret-1"
    assert len(server.asked) == 2 * result["scores"]["rows"]
    lines = read_lines(run / "eval_answers.jsonl")
    assert all(line["tuned"] == line["reference"] and line["base"] == "no" for line in lines)
    assert "secret-1" not in (run / "eval.json").read_text("utf-8")


@pytest.mark.thorough
def test_without_a_base_the_tuned_models_scores_alone(
    run: Path, server: OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(evaluated(run, server, "--metric", "exact", "--general", "--fail-under", "exact=0.5")) == 5
    printed = capsys.readouterr().out
    assert "held-out loss: not measured" in printed
    assert "base: not asked" in printed
    assert "the tuned model reaches 0.000, below 0.5" in printed
    assert {body["model"] for _, body, _ in server.asked} == {"tuned"}
    assert set(json.loads((run / "eval.json").read_text("utf-8"))["scores"]["cut"]) == {"tuned"}
    assert main(["report", str(run)]) == 0
    assert 2 <= server.most_at_once <= module.PARALLEL


def test_a_plain_text_goes_to_completions(
    tmp_path: Path, tiny_llama: Path, server: OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in range(40, 52)))
    data = {"train": [{"path": "json", "data_files": str(file)}]}
    run = finished_run(tmp_path / "made", tiny_llama, data=data)
    server.reply = lambda _, body: body["prompt"].split()[-1].replace("51", "fifty-one")
    assert main(evaluated(run, server, "--metric", "exact", "--metric", "number", "--data", str(file))) == 0
    assert "\nnumber of the tuned model: unread: 1 (scored 0), as 'fifty-one'" in capsys.readouterr().out
    assert {path for path, _, _ in server.asked} == {"/v1/completions"}
    assert sorted(body["prompt"] for _, body, _ in server.asked) == sorted(f"say {n}" for n in range(40, 52))
    assert json.loads((run / "eval.json").read_text("utf-8"))["scores"]["metrics"]["exact"]["tuned"]["mean"] == 11 / 12


def test_calls_are_sent_and_read_in_openais_form(server: OpenAI) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    reply_of(Endpoint(f"{server.url}/v1", "tuned"), "tuned", Chat(messages, tools, [False] * 3), max_new_tokens=4)
    sent = server.asked[0][1]
    assert sent["tools"] == tools
    assert sent["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert sent["messages"][1]["tool_calls"][0]["id"]
    assert json.loads(module._written_call(sent["messages"][1]["tool_calls"][0])) == {
        "name": "add",
        "arguments": {"a": 1},
    }


FAULTS = {
    "401": "401 the key is refused (set FINETUNE_ENDPOINT_KEY): ?[31mno to Bearer ***",
    "404": "404, no such page or no model tuned",
    "400": "400 refused: ?[31mno to",
    "429": "429 too many requests: ?[31mno to Bearer ***; 3 tries",
    "500": "500 a fault of the server",
    "302": "redirects to another address, which is not followed",
    "not json": "the reply is no JSON object (application/json); is this the address of an OpenAI-compatible API",
    "stream": "the reply is no JSON object (text/event-stream); is this",
    "gzip": "the reply is no JSON object (application/json, gzip); is this",
    "cut": "the connection broke: the reply ends early; 3 tries",
    "408": "408 a fault of the server: ?[31mno to Bearer ***; 3 tries",
    "409": "409 a fault of the server: ?[31mno to Bearer ***; 3 tries",
    "425": "425 a fault of the server: ?[31mno to Bearer ***; 3 tries",
    "drip": "no whole reply in 0.5 s; ask fewer tokens",
    "continue": "no whole reply in 0.5 s; ask fewer tokens",
    "no choices": "the reply has no answer in choices: no credit",
    "null choices": "the reply has no answer in choices",
    "abort": "the server broke the answer off: abort",
    "422": "422 refused: no extra fields",
    "slow": "no whole reply in 0.5 s; ask fewer tokens",
    "truncated": "the connection broke: the reply ends early; 3 tries",
    "broken": "the connection broke: ",
}


CALL = {"name": "add", "arguments": {"a": 1}}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.sample(8, thorough=22)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line(
    fault: str, run: Path, server: OpenAI, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "secret-1")
    monkeypatch.setattr(module, "TIMEOUT", 0.5)
    server.fault = fault
    if fault == "302":
        server.headers = {"Location": "http://127.0.0.2:1/v1/chat/completions"}
    before = contents(run)
    assert main(evaluated(run, server, "--metric", "exact")) == 4
    printed = capsys.readouterr().err.strip()
    said = FAULTS[fault].replace("?[", f"{REPLACEMENT}[")
    assert said in printed
    assert "secret-1" not in printed
    assert len(printed.splitlines()) == 1
    assert re.search(r"\(asked for \S*chats\.jsonl:\d+\)", printed)
    words = ["chat", str(run), "--endpoint", server.url, "--model", "tuned", "--prompt", "why"]
    assert main(words) == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert "secret-1" not in line
    assert contents(run) == before, "nothing is written"


def test_answers_are_kept_and_a_second_start_asks_the_rest(
    run: Path, server: OpenAI, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One question has no answer; all others are asked once, and what is scored at last is every row."""
    words = evaluated(run, server, "--base-model", "base", "--metric", "exact")
    assert main(words) == 0
    whole, asked = (run / "eval_answers.jsonl").read_text("utf-8"), len(server.asked)
    (run / "eval_answers.jsonl").unlink()
    (run / "eval.json").unlink()
    capsys.readouterr()
    poisoned = server.asked[2][1]
    server.asked.clear()
    server.fault_of = lambda body: "500" if body == poisoned else ""
    assert main(words) == 4
    (line,) = capsys.readouterr().err.strip().splitlines()
    kept = run / "eval_endpoint.jsonl"
    answered = len(read_lines(kept))
    here = asked // 2  # questions to one of two models
    assert "500 a fault of the server" in line
    assert line.endswith(f"{here - 1} answers are kept in {kept}: the same command asks the other 1")
    assert not (run / "eval.json").exists()
    assert answered == len([body for _, body, _ in server.asked if body != poisoned])
    server.asked.clear()
    server.fault_of = lambda body: ""
    assert main(words) == 0
    assert len(server.asked) == asked - answered, "no question twice"
    assert (run / "eval_answers.jsonl").read_text("utf-8") == whole
    assert not kept.exists()


def test_answers_are_kept_until_they_are_scored(run: Path, server: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scorer may be slow, and its user impatient: the same command then asks nothing again."""
    words = evaluated(run, server, "--metric", "exact")
    with monkeypatch.context() as patches:
        patches.setattr(evaluation, "scores_on_all", Mock(side_effect=KeyboardInterrupt))
        with suppress(KeyboardInterrupt, SystemExit):
            main(words)
    assert (run / "eval_endpoint.jsonl").exists()
    server.asked.clear()
    assert main(words) == 0
    assert server.asked == []
    assert not (run / "eval_endpoint.jsonl").exists()


def test_kept_answers_are_of_one_server_and_one_request(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    place = Endpoint("http://a/v1", "tuned")
    kept = module.KeptAnswers(file, place)
    key, answer = kept.find("tuned", CHAT, 8, module.LIKELIEST)
    assert answer is None
    kept.keep(key, module.Answer("yes", True))
    file.write_text(file.read_text() + '{"asked": 1}\n{"asked": "x", "te')  # torn by a crash
    assert module.KeptAnswers(file, place).find("tuned", CHAT, 8, module.LIKELIEST)[1] == module.Answer("yes", True)
    for other, model, asked, new in (
        (Endpoint("http://b/v1", "tuned"), "tuned", CHAT, 8),
        (place, "base", CHAT, 8),
        (place, "tuned", Passage("why", ""), 8),
        (place, "tuned", CHAT, 9),
    ):
        assert module.KeptAnswers(file, other).find(model, asked, new, module.LIKELIEST)[1] is None


def test_half_of_a_character_is_an_answer(run: Path, server: OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    """Some servers cut a reply inside a UTF-16 pair: the JSON is right, and the text cannot be encoded."""
    server.reply = lambda *_: "so \ud83d"
    assert main(evaluated(run, server, "--metric", "exact")) == 0
    assert {line["tuned"] for line in read_lines(run / "eval_answers.jsonl")} == {"so \ufffd"}
    words = ["chat", str(run), "--endpoint", server.url, "--model", "tuned", "--prompt", "why"]
    assert main([*words, "--prompt", "and then", "--json"]) == 0
    assert main(words) == 0
    assert "so" in capsys.readouterr().out


def test_a_fault_that_passes_is_asked_again(server: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: waited.append(seconds) if seconds != 0.02 else None)
    server.fault, server.times, server.headers = "429", 2, {"Retry_After": "7"}
    answer = reply_of(Endpoint(f"{server.url}/v1", "tuned"), "tuned", CHAT, max_new_tokens=4)
    assert answer.text == "tuned answers"
    assert waited == [7, 7]


def test_nothing_is_sent_after_a_redirect(server: OpenAI, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the key, and no prompt: the second server hears nothing."""
    monkeypatch.setenv(KEY, "secret-1")
    with serving(OpenAI(["tuned"])) as second:
        for status in ("301", "302", "307", "308"):
            server.fault, server.headers = status, {"Location": f"{second.url}/v1/chat/completions"}
            assert main(evaluated(run, server, "--metric", "exact")) == 4
        assert second.asked == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000", "is not the address of a server; write http://HOST:PORT/v1"),
        ("ftp://localhost", "is not the address of a server"),
        ("http://localhost:99999", "is not the address of a server"),
        ("http://", "is not the address of a server"),
        ("http://localhost/a b", "is not the address of a server"),
        ("https://me:word@localhost/v1", "an address: has a name or a password in it; set FINETUNE_ENDPOINT_KEY"),
        ("http://localhost/v1?key=word", "an address: has a ? or #"),
        ("https://localhost/v1#key=word", "an address: has a ? or #"),
        (f"http://{'a' * 64}.example/v1", "is not the address of a server"),
        ("http://a..b/v1", "is not the address of a server"),
    ],
)
def test_a_bad_address(url: str, message: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--endpoint", url]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "word" not in printed.replace("password", "")


def test_nobody_listens(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert main(["eval", str(run), "--endpoint", url]) == 4
    assert (
        "/v1/models: cannot be reached: [Errno 111] Connection refused; is the server running?"
        in capsys.readouterr().err
    )


def test_a_certificate_that_is_not_trusted(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem"), "-subj", "/CN=localhost"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            with pytest.raises((ssl.SSLError, OSError)), context.wrap_socket(listening.accept()[0], server_side=True):
                pass

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        assert main(["eval", str(run), "--endpoint", f"https://127.0.0.1:{listening.getsockname()[1]}/v1"]) == 4
        thread.join(10)
    assert "its certificate is not trusted: self" in capsys.readouterr().err


def test_plain_http_is_warned_of_unless_it_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for host in ("localhost:1", "127.0.0.1", "127.1.2.3:80", "[::1]:80"):
        module.open_endpoint(f"http://{host}/v1", "tuned", None, said.append)
    module.open_endpoint("https://example.org/v1", "tuned", None, said.append)
    assert said == []
    found = module.open_endpoint("http://example.org/v1/chat/completions", "tuned", None, said.append)
    assert found.url == "http://example.org/v1"
    assert len(said) == 1
    assert "others on the way can read prompts, answers and the key; take https" in said[0]


def test_the_models_name(run: Path, server: OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", str(run), "--endpoint", server.url, "--metric", "exact"]
    assert main(words) == 2
    assert "serves several models or none; name one with --model: tuned, base" in capsys.readouterr().err
    server.models = ["tuned"]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--model", "other"]) == 4
    assert "served are tuned (--model)" in capsys.readouterr().err
    for wrong in (["--tasks", "x"], ["--loss-only"]):
        assert main(["eval", str(run), "--endpoint", server.url, *wrong]) == 2
    assert main(["eval", str(run), "--model", "tuned"]) == 2
    assert "name it with --endpoint URL" in capsys.readouterr().err


def test_chat(run: Path, server: OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chat", str(run), "--endpoint", server.url, "--model", "tuned", "--prompt", "why"]
    assert main([*words, "--base-model", "base", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [(each["who"], each["answer"]) for each in answers] == [("base", "base answers"), ("tuned", "tuned answers")]
    server.reply = lambda *_: "\x1b[31mred"
    assert main([*words, "--prompt", "and then"]) == 0
    printed = capsys.readouterr().out
    assert "tuned:\n" in printed
    assert "red" in printed
    assert "\x1b" not in printed
    assert [turn["role"] for turn in server.asked[-1][1]["messages"]] == ["user", "assistant", "user"]
    assert main([*words, "--who", "base"]) == 2
    assert "name it with --base-model" in capsys.readouterr().err


def test_a_typed_talk_goes_on_after_a_missing_answer(
    run: Path, server: OpenAI, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["first", "lost", "second", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    server.fault_of = lambda body: "503" if body["messages"][-1]["content"] == "lost" else ""
    assert main(["chat", str(run), "--endpoint", server.url, "--model", "tuned"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "not remembered" in line]
    assert len(said) == 1
    assert "503 not ready" in said[0]
    asked = [turn["content"] for turn in server.asked[-1][1]["messages"]]
    assert asked == ["first", "tuned answers", "second"]


def test_an_end_token_that_a_server_shows_is_told(
    run: Path, server: OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    stop, *_ = finished(run).conversation.stops
    server.reply = lambda *_: f"yes{stop}"
    assert main(evaluated(run, server, "--metric", "exact")) == 0
    line = f"tuned: 4 answers end with {stop}, which the server shows as text; they are scored so"
    assert line in capsys.readouterr().out
    assert {each["tuned"] for each in read_lines(run / "eval_answers.jsonl")} == {f"yes{stop}"}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_that_a_server_took_out_is_part_of_the_answer(key: str, server: OpenAI) -> None:
    """vLLM, SGLang and llama.cpp, or Ollama; metrics read what follows the block."""
    place: Any = Endpoint(f"{server.url}/v1", "tuned")
    for message, text, visible in (
        ({"content": "yes", key: "hm"}, "<think>\nhm\n</think>\n\nyes", "yes"),
        ({"content": "", key: "hm"}, "<think>\nhm", ""),
        ({"content": None, key: "hm"}, "<think>\nhm", ""),
        ({"content": None, key: None}, "", ""),
        ({"content": "yes", key: ""}, "yes", "yes"),
    ):
        server.message = message
        answer = reply_of(place, "tuned", CHAT, max_new_tokens=8).text
        assert (answer, without_thoughts(answer)) == (text, visible)


def test_an_answer_that_was_cut(server: OpenAI) -> None:
    server.reply = lambda *_: "x" * 100
    place: Any = Endpoint(f"{server.url}/v1", "tuned")
    assert not reply_of(place, "tuned", Passage("a", ""), max_new_tokens=4).ended
    assert reply_of(place, "tuned", Passage("a", ""), max_new_tokens=64).ended


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": [{"type": "text", "text": "ye"}, {"type": "text", "text": "s"}]}, "yes"),
        ({"content": [{"type": "thinking", "thinking": []}, {"type": "text", "text": "yes"}]}, "yes"),
        ({"content": None, "function_call": CALL | {"arguments": '{"a": 1}'}}, json.dumps(CALL)),
        ({"content": 7, "tool_calls": [{"function": CALL}]}, json.dumps(CALL)),
        (
            {"content": [], "tool_calls": [{"function": CALL | {"arguments": "["}}]},
            json.dumps(CALL | {"arguments": "["}),
        ),
    ],
)
def test_the_forms_of_a_reply(message: dict[str, Any], text: str, server: OpenAI) -> None:
    """Mistral's chunks, the function_call that tool_calls replaced, and content that is no text beside calls."""
    server.message = message
    assert reply_of(Endpoint(f"{server.url}/v1", "tuned"), "tuned", CHAT, max_new_tokens=8).text == text


@pytest.mark.parametrize("content", [7, {"text": "yes"}, [], [7], [{"type": "image_url"}]])
def test_a_reply_without_text_is_no_answer(content: Any, server: OpenAI) -> None:
    server.message = {"content": content}
    with pytest.raises(module.NoAnswer, match="the reply has no answer in choices"):
        reply_of(Endpoint(f"{server.url}/v1", "tuned"), "tuned", CHAT, max_new_tokens=8)


def test_arguments_of_any_depth_and_answers_of_any_length(server: OpenAI) -> None:
    place = Endpoint(f"{server.url}/v1", "tuned")
    server.message = {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}
    with pytest.raises(module.NoAnswer, match="ignores max_tokens"):
        reply_of(place, "tuned", CHAT, max_new_tokens=8)
    assert "[[[" in reply_of(place, "tuned", CHAT, max_new_tokens=600).text
    server.message = {"content": "a" * 15_000_000}
    with pytest.raises(module.NoAnswer, match="15,000,000 letters for at most 256 tokens; it ignores max_tokens"):
        reply_of(place, "tuned", CHAT, max_new_tokens=256)


@pytest.mark.parametrize(
    ("ending", "whole"),
    [
        *(("stop", True), ("STOP", True), ("tool_calls", True), ("eos", True), ("end_turn", True), (None, True)),
        *(("length", False), ("max_tokens", False), ("MAX_TOKENS", False), ("model_length", False), ("safety", False)),
        *(("recitation", False), ("pause_turn", False), ("", False)),
    ],
)
def test_only_known_endings_are_whole(ending: str | None, whole: bool, server: OpenAI) -> None:
    server.ending = ending
    assert reply_of(Endpoint(f"{server.url}/v1", "tuned"), "tuned", CHAT, max_new_tokens=64).ended == whole


@pytest.mark.parametrize(("fault", "key"), [("newer", "max_tokens"), ("seed", "seed")])
def test_a_key_that_a_server_refuses_is_sent_otherwise(fault: str, key: str, server: OpenAI) -> None:
    """OpenAI's reasoning models call max_tokens otherwise, and Mistral's API takes no seed."""
    server.fault_of = lambda body: fault if key in body else ""
    answer = reply_of(
        Endpoint(f"{server.url}/v1", "tuned"), "tuned", CHAT, max_new_tokens=64, sampling=module.Sampling(1.0, seed=3)
    )
    assert answer.ended
    sent = server.asked[-1][1]
    assert (sent.get("max_tokens") or sent["max_completion_tokens"], "seed" in sent) == (64, fault == "newer")
    server.fault_of = lambda body: "temperature"
    with pytest.raises(module.NoAnswer, match=r"Extra inputs are not permitted \(body.temperature\)"):
        reply_of(Endpoint(f"{server.url}/v1", "tuned"), "tuned", CHAT, max_new_tokens=64)


@pytest.mark.parametrize("ending", ["abort", "error", "content_filter", "CONTENT_FILTER"])
def test_an_answer_that_the_server_broke_off_is_no_answer(ending: str, server: OpenAI) -> None:
    server.ending = ending
    with pytest.raises(module.NoAnswer, match=f"the server broke the answer off: {ending}"):
        reply_of(Endpoint(f"{server.url}/v1", "tuned"), "tuned", CHAT, max_new_tokens=64)


def test_another_ending_and_a_cut_prompt_are_told(
    run: Path, server: OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    server.ending, server.prompt_tokens = "MAX_TOKENS", 2
    assert main(evaluated(run, server, "--metric", "exact")) == 0
    out = capsys.readouterr().out
    assert "tuned: 4 answers ended with 'MAX_TOKENS', which is no whole ending; counted as cut" in out
    assert re.search(r"tuned: the server cut 4 prompts; of one it read 2 of \d+ tokens; give it a longer context", out)
    server.ending, server.prompt_tokens = "stop", 10_000
    assert main(evaluated(run, server, "--metric", "exact")) == 0
    assert "the server cut" not in (out := capsys.readouterr().out)
    assert "no whole ending" not in out


def test_a_server_with_the_base_alone_has_no_tuned_model(
    run: Path, tiny_llama: Path, server: OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scored as the tuned model, the base would pass --fail-under."""
    words = ["--endpoint", server.url]
    for name in (str(tiny_llama), tiny_llama.name, f"org/{tiny_llama.name.upper()}", f"{tiny_llama.name}:latest"):
        server.models = [name]
        for verb in (["eval", str(run), "--metric", "exact"], ["chat", str(run), "--prompt", "why"]):
            assert main([*verb, *words]) == 2, name
            assert "alone, which is the run's base; load the tuned model there" in capsys.readouterr().err
        assert server.asked == []
    assert main(["chat", str(run), "--prompt", "why", *words, "--model", server.models[0]]) == 0  # the user's own word


def test_names_of_models(run: Path, server: OpenAI, capsys: pytest.CaptureFixture[str]) -> None:
    key = "sk-" + "a1B2" * 8
    for option in ("--model", "--base-model"):
        assert main(["eval", str(run), "--endpoint", server.url, option, key]) == 2
        assert key not in (printed := capsys.readouterr().err)
        assert f"{option}: holds a key or a token" in printed
    assert main(["eval", str(run), "--endpoint", server.url, "--model", "a", "--base-model", "a"]) == 2
    assert "are one name" in capsys.readouterr().err
    server.fault = "no list"
    assert main(["eval", str(run), "--endpoint", server.url]) == 4
    assert "404, lists no models; name one with --model" in capsys.readouterr().err


def test_a_list_that_never_ends(run: Path, server: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIST_SECONDS", 0.3)
    server.fault = "drip"
    began = time.monotonic()
    assert main(["chat", str(run), "--endpoint", server.url, "--prompt", "why"]) == 4
    assert time.monotonic() - began < 8


def test_of_several_cut_prompts_the_one_that_lost_most_is_named() -> None:
    answers = [Answer("", True, [], prompt_tokens=read) for read in (100, 64, 600)]
    (note,) = server_notes(answers, [600, 580, 601])
    assert note == "the server cut 2 prompts; of one it read 64 of 580 tokens; give it a longer context"
