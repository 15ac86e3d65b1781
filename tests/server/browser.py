"""Headless Chromium, driven by its DevTools protocol over a pair of pipes: JSON messages that end with a zero byte."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import pytest

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--no-default-browser-check", "--disable-extensions", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-domain-reliability"),
    *("--force-prefers-no-reduced-motion", "--force-color-profile=srgb", "--lang=en"),
)
_TIMEOUT_S = 20


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One process; every page has a profile of its own."""

    def __init__(self, folder: Path) -> None:
        executable = find_chromium()
        if executable is None:
            pytest.skip("Chromium is not installed")
        read_end, self._to_browser = os.pipe()
        self._from_browser, write_end = os.pipe()
        # Chromium wants the pipes at 3 and 4, which may be taken in this process.
        script = f'exec "$0" "$@" 3</dev/fd/{read_end} 4>/dev/fd/{write_end}'
        command = ["sh", "-c", script, executable, *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"],
            pass_fds=(read_end, write_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self._buffer = b""
        self._last_id = 0
        self._events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            answer = self._receive(deadline)
            assert answer is not None, f"Chromium does not answer {method}"
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._events.append(answer)

    def events(self, session: str) -> list[dict[str, Any]]:
        """What has come so far, and was not taken before."""
        while (event := self._receive(time.monotonic())) is not None:
            self._events.append(event)
        mine = [event for event in self._events if event.get("sessionId") == session]
        self._events = [event for event in self._events if event.get("sessionId") != session]
        return mine

    def _receive(self, deadline: float) -> dict[str, Any] | None:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from_browser], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                return None
            data = os.read(self._from_browser, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to_browser)  # it ends when nobody can talk to it any more
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from_browser)


class Page:
    """A tab with nothing stored. Its console must stay silent."""

    def __init__(
        self,
        browser: Browser,
        url: str,
        *,
        width: int = 1280,
        height: int = 800,
        scale: float = 1,
        dark: bool = False,
    ) -> None:
        """width, height: in CSS pixels; scale: pixels of a picture for each of them."""
        self._browser = browser
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        self.emulate(dark=dark)
        self.go(url)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.getElementById('readiness')?.dataset.ready")

    def emulate(self, *, dark: bool, reduced_motion: bool = False) -> None:
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if reduced_motion else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def run(self, expression: str) -> Any:
        """The value of JavaScript; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 10) -> Any:
        """The first true value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(expression)):
            assert time.monotonic() < deadline, f"waited for {expression}\n{self.text('body')}"
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector: str) -> None:
        """With the mouse, where the element is: what lies over it would get the click."""
        element = f"document.querySelector({json.dumps(selector)})"
        box = self.run(f"{element}.scrollIntoView({{block: 'nearest'}}), {element}.getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, " ": 32}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 if shift else 0}
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def look(self) -> None:
        """Takes in what the page asked for and complained about."""
        for event in self._browser.events(self._session):
            params = event["params"]
            match event["method"]:
                case "Network.requestWillBeSent":
                    self.requested.append(params["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.complaints.append(str(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled":
                    self.complaints.append(str(params["args"]))
                case "Log.entryAdded":
                    self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self.look()
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
