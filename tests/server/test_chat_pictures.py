"""The chat page with a real model, and the pictures of it in docs/images, which this test takes anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from browser import Browser, Page, find_chromium
from server_process import ServerProcess

from noria.config import cache_home
from noria.weights.packaged import PACKAGED

NAME = "smollm2-135m-instruct"
PICTURES = Path(__file__).parent.parent.parent / "docs" / "images"
MAX_BYTES = 150_000
IDLE = "!document.querySelector('.coming')"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed"),
]


@pytest.fixture
def model() -> Path:
    path = cache_home() / "models" / next(model.file_name for model in PACKAGED if model.name == NAME)
    if not path.exists():
        pytest.skip(f"{path} is not here: `noria pull {NAME}` fetches it (make demo, too)")
    return path


def ask(page: Page, text: str) -> None:
    count = page.run("document.querySelectorAll('.message').length")
    page.click("#prompt")
    page.type(text)
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.message').length === {count + 2}")


def be_greedy(page: Page) -> None:
    """And look the same wherever the picture is taken."""
    page.click("#open-options")
    page.click("#temperature")
    page.type("0")
    page.click("#close-options")
    page.wait("!document.getElementById('options').open")
    page.run(
        f"document.documentElement.style.setProperty('--sans', {json.dumps('Liberation Sans, Arial, sans-serif')})"
    )


def take(page: Page, name: str) -> None:
    path = PICTURES / name
    PICTURES.mkdir(exist_ok=True)
    page.picture(path)
    assert 10_000 < path.stat().st_size < MAX_BYTES
    page.look()
    assert page.complaints == []


def test_pictures_with_a_real_model(model: Path, tmp_path: Path, compile_cache_dir: str) -> None:
    sizes = ["--max-model-len", "2048", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"]
    options = [*sizes, "--served-model-name", NAME, "--compile-cache-dir", compile_cache_dir]
    with ServerProcess(model, tmp_path / "log", *options) as server, Browser(tmp_path / "chromium") as browser:
        server.wait_ready()
        with Page(browser, server.url, width=1120, height=720, scale=1.5) as page:
            assert page.text("#model") == NAME
            be_greedy(page)
            ask(page, "What is a water wheel, in two sentences?")
            page.wait(IDLE, 60)
            ask(page, "Write a Python function that adds two numbers.")
            page.wait(IDLE, 60)
            assert "num1 + num2" in page.text(".assistant.last pre")
            cached = "/, ([1-9]\\d*) cached/.test(document.querySelector('.assistant.last .stats').innerText)"
            assert page.run(cached)
            page.wait("document.getElementById('hits').textContent !== '0%'")
            page.wait("document.getElementById('running').textContent === '0'")
            take(page, "chat-page.png")
        with Page(browser, server.url, width=360, height=780, scale=1.5, dark=True) as page:
            be_greedy(page)
            ask(page, "Give me three tips for a walk along a river.")
            page.wait("document.querySelector('.assistant .body').innerText.length > 400", 60)
            take(page, "chat-page-phone.png")
            page.press("Escape")
            page.wait(IDLE)
        server.wait_idle()
        assert server.metric("compiles_after_warmup_total") == 0
