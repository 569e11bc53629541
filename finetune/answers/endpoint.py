"""Answers of a server that speaks OpenAI's API (vLLM, llama.cpp, Ollama, SGLang), asked with the standard library.

    POST URL/chat/completions   a chat's messages; the server writes them with its own template
    POST URL/completions        a plain text
    GET  URL/models             the served names, if no name is given

The key comes from FINETUNE_ENDPOINT_KEY. It goes to the named host alone: a redirect is an error.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import math
import os
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from finetune.data.chat import Chat, Passage
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.files import append_lines, read_lines
from finetune.generation.generate import Answer, Sampling
from finetune.output_stream import printable
from finetune.redaction import hide_secrets, known_secrets
from finetune.wording import counted

KEY = "FINETUNE_ENDPOINT_KEY"
PARALLEL = 16  # requests at a time; a server queues or batches them
TIMEOUT = 600.0  # seconds of one reply; a busy server answers after its queue
LIST_SECONDS = 60.0  # of the list of models
WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each new try; Retry-After wins, up to a minute
PASSING = (408, 409, 425, 429, 500, 502, 503, 504)  # states of a server that may pass
OF_THE_QUESTION = (400, 413, 422)  # states that another question may not have
HALF_ANSWERS = ("abort", "error", "content_filter")  # a finish_reason whose text is half an answer
WHOLE_ANSWERS = ("stop", "tool_calls", "function_call", "eos", "eos_token", "end_turn", "stop_sequence")
LETTERS_PER_TOKEN = 200  # an answer with more of them was not limited by max_tokens
READ_SHARE = 0.75  # a server that reads a smaller share of a prompt's tokens has cut the prompt
MOST_REPLY_BYTES = 16 * 2**20  # of a reply
MOST_UNANSWERED = 8  # questions without an answer: then the server has a fault, not the questions
LAST_REPLIES = 5.0  # seconds for requests on their way when nothing more is asked


class NoAnswer(EnvironmentMismatch):
    """A server gave no answer to one question; the next one may have its answer."""


@dataclass(frozen=True)
class Endpoint:
    """A server, and the names of the tuned model and of its base there."""

    url: str  # without a slash at its end
    model: str
    base_model: str | None = None

    def models(self) -> dict[str, str]:
        """Names to ask for: base, if it is served, then tuned."""
        return {**({"base": self.base_model} if self.base_model else {}), "tuned": self.model}


LIKELIEST = Sampling(0.0, seed=None)


def open_endpoint(
    text: str, model: str | None, base_model: str | None, say: Callable[[str], None], trained_from: str = ""
) -> Endpoint:
    """Look at the address, and find the model's name if the server has one model alone.

    Args:
        say: Receives a warning about plain http.
        trained_from: The run's base. A server that has this model alone has no tuned one.

    Raises FinetuneError for a bad URL or name, EnvironmentMismatch for the server.
    """
    for option, name in (("--model", model), ("--base-model", base_model)):
        if name and hide_secrets(name, known_secrets()) != name:
            raise FinetuneError(f"{option}: holds a key or a token; set {KEY}, and name the model here")
    if model is not None and model == base_model:
        raise FinetuneError("--model, --base-model: are one name; name the tuned model and its base")
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
        (host or "").encode("idna")  # a label of more than 63 letters
    except ValueError:
        parts, host = urlsplit(""), None
    problem = None
    if parts.scheme not in ("http", "https") or not host or not text.isascii() or not text.isprintable() or " " in text:
        problem = "is not the address of a server; write http://HOST:PORT/v1"
    elif "@" in parts.netloc:
        problem = f"has a name or a password in it; set {KEY} instead"
    elif parts.query or parts.fragment:
        problem = "has a ? or #; write http://HOST:PORT/v1"
    if problem:
        shown = "an address" if set("@?#") & set(text) else hide_secrets(printable(text), known_secrets())
        raise FinetuneError(f"--endpoint {shown}: {problem}")
    url = text.rstrip("/").removesuffix("/completions").removesuffix("/chat").rstrip("/")
    if not urlsplit(url).path:
        url += "/v1"
    if parts.scheme == "http" and not _is_loopback(str(host)):
        say(f"--endpoint {url}: plain http, so others on the way can read prompts, answers and the key; take https")
    if model is None:
        served = _served(url)
        if len(served) != 1:
            names = ", ".join(map(printable, served[:8])) or "none"
            raise FinetuneError(f"--endpoint {url}: serves several models or none; name one with --model: {names}")
        model = served[0]
        if trained_from and _last_part(model) == _last_part(trained_from):
            raise FinetuneError(
                f"--endpoint {url}: serves {printable(model)} alone, which is the run's base; load the tuned model "
                "there, or name it with --model"
            )
    return Endpoint(url, model, base_model)


def reply_of(
    endpoint: Endpoint, model: str, question: Chat | Passage, *, max_new_tokens: int, sampling: Sampling = LIKELIEST
) -> Answer:
    """One answer. Raises EnvironmentMismatch in one line; NoAnswer if the next question may have one."""
    path, body = _question_sent(model, question, max_new_tokens, sampling)
    try:
        reply = _request(endpoint.url + path, body)
    except NoAnswer as error:  # OpenAI's newer models, Mistral's API
        if "max_completion_tokens" in str(error):
            body["max_completion_tokens"] = body.pop("max_tokens")
        elif body.pop("seed", None) is None or "seed" not in str(error):
            raise
        reply = _request(endpoint.url + path, body)
    choices = reply.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    sent = choice.get("message") if isinstance(choice, dict) else None
    message: dict[str, Any] = sent if isinstance(sent, dict) else {}
    text = _text_of(message.get("content"))
    if isinstance(question, Passage) and isinstance(choice, dict):
        text = _text_of(choice.get("text"))
    function, thoughts = message.get("function_call"), message.get("reasoning_content") or message.get("reasoning")
    calls = message.get("tool_calls") or ([{"function": function}] if isinstance(function, dict) else [])
    if isinstance(calls, list) and calls:
        text = "\n".join([text or "", *map(_written_call, calls)])
    if isinstance(thoughts, str) and thoughts:  # as the model wrote it; metrics read what follows
        text = f"<think>\n{thoughts}\n</think>\n\n{text}" if text else f"<think>\n{thoughts}"
    elif text is None and isinstance(sent, dict) and message.get("content") is None:
        text = ""
    page = endpoint.url + path
    if not isinstance(choice, dict) or text is None:
        raise _fault(page, f"the reply has no answer in choices{_reason(reply)}", NoAnswer)
    ending, usage = choice.get("finish_reason"), reply.get("usage")
    if str(ending).lower() in HALF_ANSWERS:
        raise _fault(page, f"the server broke the answer off: {ending}", NoAnswer)
    if len(text) > LETTERS_PER_TOKEN * (max_new_tokens + 50):
        raise _fault(
            page, f"{len(text):,} letters for at most {max_new_tokens} tokens; it ignores max_tokens", NoAnswer
        )
    # A reply that was cut inside a UTF-16 pair has half of a character, which no file can hold.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    read = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return Answer(
        text.strip(),
        ending is None or str(ending).lower() in WHOLE_ANSWERS,
        ending=printable(str(ending))[:40] if ending is not None else "",
        prompt_tokens=read if isinstance(read, int) and read > 0 else None,
    )


def _text_of(content: Any) -> str | None:
    """A message's text: a string, or the text chunks of a list."""
    if isinstance(content, list):
        chunks = [chunk.get("text") for chunk in content if isinstance(chunk, dict)]
        texts = [text for text in chunks if isinstance(text, str)]
        return "".join(texts) if texts else None
    return content if isinstance(content, str) else None


def server_notes(answers: Sequence[Answer], prompts: Sequence[int]) -> list[str]:
    """Lines about what a server did to answers and prompts.

    `prompts` are the prompts' lengths in tokens, by the run's own tokenizer and template.
    """
    notes = []
    endings = Counter(answer.ending for answer in answers if not answer.ended and answer.ending not in ("", "length"))
    for ending, count in endings.most_common(3):
        notes.append(f"{counted(count, 'answer')} ended with {ending!r}, which is no whole ending; counted as cut")
    shorter = [
        (answer.prompt_tokens, own)
        for answer, own in zip(answers, prompts, strict=True)
        if answer.prompt_tokens is not None and answer.prompt_tokens < READ_SHARE * own
    ]
    if shorter:
        read, own = max(shorter, key=lambda pair: pair[1] - pair[0])
        notes.append(
            f"the server cut {counted(len(shorter), 'prompt')}; of one it read {read:,} of {own:,} tokens; "
            "give it a longer context"
        )
    return notes


def _question_sent(
    model: str, question: Chat | Passage, max_new_tokens: int, sampling: Sampling
) -> tuple[str, dict[str, Any]]:
    """The page and the body of a request."""
    body: dict[str, Any] = {"model": model, "max_tokens": max_new_tokens, "temperature": sampling.temperature}
    if sampling.top_p < 1:
        body["top_p"] = sampling.top_p
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if isinstance(question, Passage):
        return "/completions", body | {"prompt": question.prompt}
    body["messages"] = _sent_messages(question.messages)
    if question.tools:
        body["tools"] = question.tools
    if question.template_kwargs:
        body["chat_template_kwargs"] = question.template_kwargs
    return "/chat/completions", body


class KeptAnswers:
    """Asks a server, and keeps its answers in a file from when they come until `eval` or `sample` has all of them.

    A command that a fault, a signal or a crash ended asks the rest when it is started again. An answer is known by the
    hash of its address and its request.
    """

    def __init__(self, file: Path, endpoint: Endpoint) -> None:
        self.file, self.endpoint = file, endpoint
        self._answers: dict[str, Answer] = {}
        for row in read_lines(file) if file.is_file() else ():
            text, read = row.get("text"), row.get("prompt_tokens")
            if isinstance(text, str):
                tokens = read if isinstance(read, int) else None
                answer = Answer(text, row.get("ended") is True, ending=str(row.get("ending", "")), prompt_tokens=tokens)
                self._answers[str(row.get("asked"))] = answer

    def find(
        self, model: str, question: Chat | Passage, max_new_tokens: int, sampling: Sampling
    ) -> tuple[str, Answer | None]:
        """The request's hash, and its answer if there is one."""
        path, body = _question_sent(model, question, max_new_tokens, sampling)
        key = hashlib.sha256(json.dumps([self.endpoint.url, path, body], sort_keys=True).encode()).hexdigest()
        return key, self._answers.get(key)

    def keep(self, key: str, answer: Answer) -> None:
        self._answers[key] = answer
        line = {"asked": key, "text": answer.text, "ended": answer.ended}
        append_lines(self.file, [line | {"ending": answer.ending, "prompt_tokens": answer.prompt_tokens}])

    def forget(self) -> None:
        """The evaluation has all answers."""
        self.file.unlink(missing_ok=True)

    def answers(
        self,
        model: str,
        questions: Sequence[tuple[str, Chat | Passage]],
        max_new_tokens: int,
        show: Callable[[str], None],
        samplings: Sequence[Sampling] = (),
    ) -> list[Answer]:
        """Answers in their order, PARALLEL at a time: greedy, or by `samplings`. `questions` are places, for messages,
        and conversations.

        A question without an answer does not end the others, until MOST_UNANSWERED have none. Then, or at the end, the
        first fault is raised. Any other fault ends everything. Answers that are kept are not asked for. Threads are
        daemons, so Ctrl-C does not wait for a slow server.
        """
        keys, answers = list[str](), dict[int, Answer]()
        samplings = samplings or [LIKELIEST] * len(questions)
        for index, (_, question) in enumerate(questions):
            key, answer = self.find(model, question, max_new_tokens, samplings[index])
            keys.append(key)
            if answer is not None:
                answers[index] = answer
        failed: list[Exception] = []
        outcomes: SimpleQueue[tuple[int, Answer | Exception]] = SimpleQueue()

        def request(index: int) -> None:
            (place, question), sampling = questions[index], samplings[index]
            outcome: Answer | Exception
            try:
                outcome = reply_of(self.endpoint, model, question, max_new_tokens=max_new_tokens, sampling=sampling)
            except EnvironmentMismatch as error:
                outcome = type(error)(f"{error} (asked for {place})")
            except Exception as error:  # raised again below
                outcome = error
            outcomes.put((index, outcome))

        left, running = deque(index for index in range(len(questions)) if index not in answers), 0
        given_up = math.inf  # when, on the monotonic clock
        while (left or running) and time.monotonic() < given_up + LAST_REPLIES:
            while left and running < PARALLEL:
                threading.Thread(target=request, args=(left.popleft(),), daemon=True).start()
                running += 1
            with suppress(Empty):
                index, outcome = outcomes.get(timeout=1.0)
                running -= 1
                try:
                    if isinstance(outcome, Exception):
                        raise outcome
                    answers[index] = outcome
                    self.keep(keys[index], outcome)
                except Exception as error:  # also of a full disk
                    failed.append(error)
            show(f"answer {len(answers)} of {len(questions)}")
            if len(failed) >= MOST_UNANSWERED or any(not isinstance(error, NoAnswer) for error in failed):
                left.clear()
                given_up = min(given_up, time.monotonic())
        if failed:
            first = next((error for error in failed if not isinstance(error, NoAnswer)), failed[0])
            if answers and isinstance(first, EnvironmentMismatch):
                rest = len(questions) - len(answers)
                raise EnvironmentMismatch(
                    f"{first}; {len(answers):,} answers are kept in {self.file}: the same command asks the other "
                    f"{rest:,}"
                )
            raise first
        return [answers[index] for index in range(len(questions))]


def _sent_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """In OpenAI's form: a call's arguments are a text."""
    sent = []
    for number, message in enumerate(messages):
        one = {key: value for key, value in message.items() if key != "weight"}
        if calls := message.get("tool_calls"):
            one["tool_calls"] = [
                {"id": f"call_{number}_{place}", **call}
                | {"function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for place, call in enumerate(calls)
            ]
        sent.append(one)
    return sent


def _written_call(call: Any) -> str:
    """A call in a reply as the JSON that the metrics read."""
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # the metric says that it is not JSON
            arguments = json.loads(arguments)
    return json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)


def _last_part(model: str) -> str:
    """A model's name without its owner, folder, `package:` and Ollama's `:latest`: `org/Name` -> `name`."""
    name = model.removeprefix("package:").removesuffix(":latest")
    return name.rstrip("/").rpartition("/")[2].casefold()


class _NoRedirect(HTTPRedirectHandler):
    """A redirect raises HTTPError, so no second host gets the key or a prompt."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _served(url: str) -> list[str]:
    models = _request(f"{url}/models", None).get("data")
    models = models if isinstance(models, list) else []
    return [str(model["id"]) for model in models if isinstance(model, dict) and "id" in model]


def _request(url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    """The reply's JSON object. Raises EnvironmentMismatch in one line."""
    key = os.environ.get(KEY, "").strip()
    if not key.isascii() or not key.isprintable():
        raise FinetuneError(f"{KEY}: has characters that no key has; set it again")
    headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "finetune"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    direct = [ProxyHandler({})] if _is_loopback(str(urlsplit(url).hostname)) else []
    opener = build_opener(_NoRedirect, *direct)
    waits, seconds = iter(WAITS), LIST_SECONDS if body is None else TIMEOUT

    def exchange(replies: SimpleQueue[tuple[BaseException | None, bytes, str]]) -> None:
        """Put an error or a refusal, the reply's bytes, and the kind that its headers name."""
        content = b""
        try:
            with opener.open(Request(url, data, headers), timeout=seconds) as response:
                content = response.read(MOST_REPLY_BYTES + 1)
                if response.length:  # http.client reads a part without an error if the limit is given
                    raise HTTPException("the reply ends early")
                kind = (response.headers.get("Content-Type"), response.headers.get("Content-Encoding"))
                replies.put((None, content, ", ".join(filter(None, kind))))
        except HTTPError as error:
            with suppress(Exception):  # a body that cannot be read must not hide the refusal
                content = error.read(MOST_REPLY_BYTES)
            replies.put((error, content, ""))
        except BaseException as error:
            replies.put((error, b"", ""))

    while True:
        wait = None
        # On a thread that is left behind if it takes longer. A socket's own limit is for each read, so a server that
        # drips bytes would never reach it.
        replies: SimpleQueue[tuple[BaseException | None, bytes, str]] = SimpleQueue()
        threading.Thread(target=exchange, args=(replies,), daemon=True).start()
        try:
            try:
                error, content, kind = replies.get(timeout=seconds)
            except Empty:
                raise TimeoutError from None
            if error is not None:
                raise error
            reply = _object(content)
            if reply is None and content.lstrip().startswith(b"{") and not content.rstrip().endswith(b"}"):
                raise HTTPException("the reply ends early")
            break
        except HTTPError as error:
            said = _reason(_object(content))
            if error.code in PASSING:
                problem = f"{error.code} {_STATES.get(error.code, 'a fault of the server')}{said}"
                after = (error.headers.get("Retry-After") or "").strip()
                wait = min(60.0, float(after)) if after.isdecimal() else None
            elif error.code == 404 and body is not None:
                served = []
                with suppress(EnvironmentMismatch):
                    served = _served(url.removesuffix("/completions").removesuffix("/chat"))[:8]
                names = f"; served are {', '.join(served)} (--model)" if served else ""
                raise _fault(url, f"404, no such page or no model {body['model']}{said}{names}") from None
            elif error.code == 404:
                raise _fault(url, f"404, lists no models{said}; name one with --model") from None
            elif 300 <= error.code < 400:
                raise _fault(url, "redirects to another address, which is not followed; name that one") from None
            else:
                problem = f"{error.code} {_STATES.get(error.code, 'refused')}{said}"
                if error.code not in OF_THE_QUESTION:
                    raise _fault(url, problem) from None
                remedy = "if the row is too long for the server, give it a longer context, or leave the row out"
                raise _fault(url, f"{problem}; {remedy}", NoAnswer) from None
        except TimeoutError:
            problem = f"no whole reply in {seconds:g} s; ask fewer tokens (--max-new-tokens) or another server"
            raise _fault(url, problem, NoAnswer) from None
        except (URLError, HTTPException, OSError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, TimeoutError):
                raise _fault(url, f"no connection in {seconds:g} s; is the server running?") from None
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise _fault(url, f"its certificate is not trusted: {reason.verify_message}") from None
            if isinstance(reason, ssl.SSLError):
                raise _fault(url, "does not speak https; write http://, or another port") from None
            problem = f"the connection broke: {reason or type(reason).__name__}"
            if isinstance(error, URLError):  # before anything was sent
                raise _fault(url, f"cannot be reached: {reason}; is the server running?") from None
        pause = next(waits, None)
        if pause is None:
            raise _fault(url, f"{problem}; {len(WAITS) + 1} tries", NoAnswer)
        time.sleep(pause if wait is None else wait)
    if reply is None:
        problem = f"the reply is no JSON object ({kind or 'of no named kind'})"
        raise _fault(url, f"{problem}; is this the address of an OpenAI-compatible API (/v1)?")
    return reply


_STATES = {
    400: "refused", 401: f"the key is refused (set {KEY})", 403: f"the key may not do this ({KEY})",
    404: "no such page", 413: "the prompt is too long", 429: "too many requests", 503: "not ready",
}  # fmt: skip


def _object(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _reason(reply: Mapping[str, Any] | None) -> str:
    """The server's own words, if it says any: {"error": {"message": ...}}, {"error": ...}, {"message": ...}, or
    {"detail": ...} and {"detail": [{"msg": ...}]} of FastAPI."""
    error = (reply or {}).get("error", reply) or {}
    words = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
    if isinstance(words, list) and words and isinstance(words[0], dict):
        words = f"{words[0].get('msg')} ({'.'.join(map(str, words[0].get('loc') or ['?']))})"
    return f": {words}" if isinstance(words, str) and words else ""


def _fault(url: str, problem: str, kind: type[EnvironmentMismatch] = EnvironmentMismatch) -> EnvironmentMismatch:
    """One line of at most 400 characters without the key, which a server may repeat."""
    key, text = os.environ.get(KEY, "").strip(), f"{url}: {problem}"
    return kind(printable(" ".join((text.replace(key, "***") if key else text).split()))[:400])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
