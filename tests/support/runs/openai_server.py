"""A loopback server that speaks OpenAI's API, right or with a fault."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class OpenAI:
    """What the server has and what it was asked.

    Args:
        fault: status, or a name below; `times` says how often, then the server is right.
        reply: (model, body) -> an answer's text.
        message: Keys of a chat's answer that win over the usual ones.
        ending: The finish_reason of an answer that is not cut.
        prompt_tokens: usage.prompt_tokens.
        fault_of: body -> its fault, if it has one of its own.
    """

    models: list[str]
    reply: Callable[[str, dict[str, Any]], str] = lambda model, body: f"{model} answers"
    fault: str = ""
    message: dict[str, Any] = field(default_factory=dict)
    ending: str | None = "stop"
    prompt_tokens: int | None = None
    fault_of: Callable[[dict[str, Any]], str] = lambda body: ""
    times: int = 10**6
    headers: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)  # path, body, headers
    most_at_once: int = 0
    running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving(state: OpenAI) -> Iterator[OpenAI]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def send(self, status: int, content: bytes, *, length: int | None = None, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content_Type": "application/json", **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(content) if length is None else length))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            if state.fault == "drip":
                self.drip()
                return
            if self.path != "/v1/models" or state.fault == "no list":
                self.send(404, b"{}")
                return
            self.send(200, json.dumps({"data": [{"id": name} for name in state.models]}).encode())

        def drip(self) -> None:
            """A byte now and then, without end: each read of the client succeeds."""
            self.send_response(200)
            self.end_headers()
            for _ in range(400):
                self.wfile.write(b" ")
                time.sleep(0.02)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.asked.append((self.path, body, dict(self.headers)))
                state.running += 1
                state.most_at_once = max(state.most_at_once, state.running)
                fault = (state.fault if state.times > 0 else "") or state.fault_of(body)
                state.times -= 1
            try:
                self.answer(body, fault)
            finally:
                with state.lock:
                    state.running -= 1

        def answer(self, body: dict[str, Any], fault: str) -> None:
            if fault == "422":
                return self.send(422, b'{"detail": [{"loc": ["body"], "msg": "no extra fields"}]}')
            if fault.isdecimal():
                key = self.headers.get("Authorization", "")
                words = json.dumps({"error": {"message": f"\x1b[31mno\nto {key}"}}).encode()
                return self.send(int(fault), words, **state.headers)
            if fault == "newer":  # OpenAI's reasoning models
                refused = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
                return self.send(400, json.dumps({"error": {"message": f"Unsupported parameter: {refused}"}}).encode())
            if fault in ("seed", "temperature"):  # as FastAPI refuses a key
                detail = [{"loc": ["body", fault], "msg": "Extra inputs are not permitted"}]
                return self.send(422, json.dumps({"detail": detail}).encode())
            if fault == "not json":
                return self.send(200, b"<html>welcome</html>")
            if fault == "no choices":
                return self.send(200, b'{"choices": [], "error": {"message": "no credit"}}')
            if fault == "null choices":
                return self.send(200, b'{"choices": null}')
            if fault == "slow":
                time.sleep(3)
            if fault == "drip":
                return self.drip()
            if fault == "continue":
                for _ in range(400):
                    self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    time.sleep(0.02)
            if fault == "stream":
                return self.send(200, b"data: {}\n\n", Content_Type="text/event-stream")
            if fault == "gzip":
                return self.send(200, b"\x1f\x8b\x08\x00", Content_Encoding="gzip")
            if fault == "cut":  # as HTTP/1.0 without a length
                return self.send(200, b'{"choices": [{"mess')
            if fault == "truncated":
                return self.send(200, b'{"choices"', length=500)
            if fault == "broken":
                self.connection.close()
                return None
            if body["model"] not in state.models:
                return self.send(404, b'{"error": {"message": "unknown"}}')
            time.sleep(0.02)
            text = state.reply(body["model"], body)
            if self.path == "/v1/completions":
                choice: dict[str, Any] = {"text": text, "finish_reason": state.ending}
            else:
                choice = {"message": {"role": "assistant", "content": text, **state.message}}
                choice["finish_reason"] = state.ending
            if len(text) > 4 * (body.get("max_tokens") or body["max_completion_tokens"]):
                choice["finish_reason"] = "length"
            if fault == "abort":
                choice["finish_reason"] = "abort"
            usage = {"usage": {"prompt_tokens": state.prompt_tokens}}
            return self.send(200, json.dumps({"choices": [choice], **usage}).encode())

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:  # the client went away, or a fault closed the connection
            pass

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
