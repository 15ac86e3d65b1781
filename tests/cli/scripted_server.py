"""A server on a real socket that answers completions and chats as it is told: well, or in one of many wrong ways."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Self

Script = Callable[[int, dict[str, Any]], str]  # the number of the request and its body, to a behaviour
PARTS = 3
CACHED = 2


class ScriptedServer:
    """Every answer is three parts of text and as many tokens as were asked for; `step_s` lies between the parts."""

    def __init__(self, script: Script | str = "good", *, step_s: float = 0.0, takes_ids: bool = True) -> None:
        self.script: Script = script if callable(script) else lambda number, body: script
        self.step_s = step_s
        self.takes_ids = takes_ids
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models: Any = {"data": [{"id": "scripted"}, {"id": "other"}]}
        self.now = self.most = 0
        self._lock = threading.Lock()
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Without the first request, by which the client looks whether it is answered at all."""
        return self.bodies[1:]

    def enter(self, body: dict[str, Any], headers: dict[str, str]) -> int:
        with self._lock:
            self.bodies.append(body)
            self.headers.append(headers)
            self.now += 1
            self.most = max(self.most, self.now)
            return len(self.bodies) - 1

    def leave(self) -> None:
        with self._lock:
            self.now -= 1

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def _handler(server: ScriptedServer) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self._whole(200, server.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = server.enter(body, dict(self.headers))
            try:
                if isinstance(body.get("prompt"), list) and not server.takes_ids:
                    self._whole(400, {"error": {"message": "prompt must be a string"}})
                else:
                    self._answer(server.script(number, body) if number else "good", body)
            except (BrokenPipeError, ConnectionResetError):
                pass
            finally:
                server.leave()

        def _answer(self, behaviour: str, body: dict[str, Any]) -> None:
            match behaviour.split():
                case ["status", code]:
                    self._whole(int(code), {"error": {"message": f"told to say {code}", "type": "x"}})
                case ["not", "json"]:
                    self._whole(500, b"<html>\n<b>oh</b> no</html>")
                case ["hang", "up"]:
                    self.close_connection = True
                case _:
                    self._stream(behaviour, body)

        def _stream(self, behaviour: str, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            is_chat = "messages" in body
            for index in range(0 if behaviour == "empty" else PARTS):
                time.sleep(server.step_s)
                if index == 1 and behaviour == "cut":
                    self.close_connection = True
                    return
                if index == 1 and behaviour == "error":
                    self._event({"error": {"message": "the device is gone", "code": "engine_dead"}})
                    break
                if index == 1 and behaviour == "garbage":
                    self._chunk(b"data: {no json\n\n")
                if index == 1 and behaviour == "stall":
                    time.sleep(1)
                text = f"part {index} "
                choice: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
                if is_chat and index == 0:
                    self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
                self._event({"choices": [{"index": 0, "finish_reason": None, **choice}], "usage": None})
            if behaviour not in ("no-usage", "error"):
                prompt = body.get("prompt", "a b c")
                count = len(prompt) if isinstance(prompt, list) else len(prompt.split())
                tokens = 0 if behaviour == "empty" else body["max_tokens"]
                details = {"prompt_tokens_details": {"cached_tokens": CACHED}} if behaviour == "cached" else {}
                usage = {"prompt_tokens": count, "completion_tokens": tokens, **details}
                self._event({"choices": [], "usage": usage})
            if behaviour != "no-done":
                self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

        def _event(self, content: Any) -> None:
            self._chunk(b"data: " + json.dumps(content).encode() + b"\n\n")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

        def _whole(self, status: int, content: Any) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
