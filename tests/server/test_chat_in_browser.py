"""The chat page in headless Chromium, with the engine that says back what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser import Browser, Page, find_chromium
from live import Live, live_service
from server_process import wait_for

from noria.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed")
PHONE = {"width": 360, "height": 640}
ANSWER = ".assistant:last-child .body"
COMING = "document.querySelector('.coming')"
LIGHT, DARK = "rgb(250, 249, 246)", "rgb(18, 24, 27)"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
# Everything that models write, and a word that is wider than a phone.
MARKDOWN = f"""# Title

Some **bold**, *italic*, `code` and ~~old~~ text, a [link](https://example.org/a_(b)) and {"long" * 40}.

1. one
2. two
   - inner

> quoted

```python
print("{"x" * 80}")
```

| name | count |
|:-----|------:|
| {"cell" * 10} | {"1234567890" * 4} |
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def quick(tokenizer: Tokenizer) -> Iterator[Live]:
    with live_service(tokenizer, step_s=0.001) as live:
        yield live


@pytest.fixture(scope="module")
def slow(tokenizer: Tokenizer) -> Iterator[Live]:
    """An answer takes five seconds when nobody stops it."""
    with live_service(tokenizer, step_s=0.04) as live:
        yield live


@pytest.fixture
def page(browser: Browser, quick: Live) -> Iterator[Page]:
    yield from quiet(browser, quick)


@pytest.fixture
def slow_page(browser: Browser, slow: Live) -> Iterator[Page]:
    yield from quiet(browser, slow)
    wait_for(lambda: not slow.service.core.running, 10)


def quiet(browser: Browser, live: Live, **options: Any) -> Iterator[Page]:
    """A page that has to keep to its server, and to have nothing to complain about."""
    with Page(browser, live.url, **options) as page:
        yield page
        page.look()
        assert page.complaints == []
        assert all(address.startswith(live.url) for address in page.requested)


def say(page: Page, text: str) -> None:
    page.click("#prompt")
    page.type(text)
    page.press("Enter")


def say_and_wait(page: Page, text: str) -> None:
    count = page.run("document.querySelectorAll('.message').length")
    say(page, text)
    page.wait(f"document.querySelectorAll('.message').length === {count + 2} && !{COMING}")


def stop(page: Page, live: Live) -> None:
    """Ends the answer, here and in the engine."""
    page.press("Escape")
    page.wait(f"!{COMING}")
    wait_for(lambda: not live.service.core.running, 5)


def stub_chat(page: Page, deltas: list[dict[str, str]]) -> None:
    """From now on the chat route answers with these."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.run(
        f"{{const real = fetch; window.fetch = (address, options) => String(address).endsWith('chat/completions')"
        f" ? Promise.resolve(new Response({json.dumps(events)})) : real(address, options);}}"
    )


# ------------------------------------------------------------------------------------------------------ talking


def test_an_answer_is_streamed(slow_page: Page, slow: Live) -> None:
    page = slow_page
    assert page.text("#model") == "parrot"
    assert page.text("#readiness") == "ready"
    assert page.run("document.activeElement.id") == "prompt"
    say(page, "water wheel")
    page.wait(f"document.querySelector('{ANSWER}')?.innerText.length > 5")
    early = page.text(ANSWER)
    assert page.run("document.getElementById('messages').getAttribute('aria-busy')") == "true"
    assert page.run("document.getElementById('wheel').getAnimations().length") == 1
    page.wait(f"document.querySelector('{ANSWER}').innerText.length > {len(early) + 5}")
    assert page.text(ANSWER).startswith(early)
    assert early.startswith("water")
    page.wait("document.querySelector('.stats').innerText.includes('tokens/s')")
    assert "first after" in page.text(".stats")
    page.wait("document.getElementById('running').textContent === '1'")
    page.press("Escape")


def test_figures_of_a_whole_answer(page: Page) -> None:
    page.click("#open-options")
    page.click("#max_completion_tokens")
    page.type("7")
    say_and_wait(page, "the river runs under the old mill")
    assert "7 tokens" in page.text(".stats")
    assert "length limit" in page.text(".stats")
    assert page.run("/prompt \\d+, \\d+ cached/.test(document.querySelector('.stats').innerText)")
    assert page.run("document.getElementById('messages').getAttribute('aria-busy')") == "false"
    assert page.text("#figures").split()[:4] == ["running", page.text("#running"), "waiting", "0"]


@pytest.mark.parametrize("how", ["button", "escape", "new chat"])
def test_stopping_ends_the_work_in_the_engine(slow_page: Page, slow: Live, how: str) -> None:
    page, core = slow_page, slow.service.core
    aborts = len(core.aborted_at)
    say(page, "hello")
    page.wait(f"document.querySelector('{ANSWER}')?.innerText.length > 3")
    assert len(core.running) == 1
    if how == "escape":
        page.press("Escape")
    else:
        page.click({"button": "#stop", "new chat": "#new"}[how])
    wait_for(lambda: len(core.aborted_at) == aborts + 1 and not core.running and not slow.service.state.active, 2)
    assert page.run("document.getElementById('stop').hidden")
    assert page.run("document.activeElement.id") == "prompt"
    if how == "new chat":
        assert page.run("document.querySelectorAll('.message').length") == 0
        assert page.text("#welcome").startswith("Ask")
    else:
        page.wait("document.querySelector('.stats').innerText.endsWith('stopped')")
        assert page.text(ANSWER).startswith("hel")
    page.type("more")  # and on it goes
    assert not page.run("document.getElementById('send').disabled")


def test_the_conversation_is_sent_whole(slow_page: Page, slow: Live, tokenizer: Tokenizer) -> None:
    page = slow_page
    say(page, "one")
    page.wait(f"document.querySelector('{ANSWER}')?.innerText.length > 3")
    stop(page, slow)
    first = page.text(ANSWER)
    say(page, "two")
    [request] = wait_for(lambda: list(slow.service.core.running), 5)
    prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert prompt == f"<|user|>one<|end|><|assistant|>{first}<|end|><|user|>two<|end|><|assistant|>"
    page.press("Escape")


def test_options_are_sent(slow_page: Page, slow: Live, tokenizer: Tokenizer) -> None:
    page = slow_page
    values = {
        "system": "Be brief.",
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "20",
        "min_p": "0.01",
        "max_completion_tokens": "90",
        "seed": "42",
        "presence_penalty": "0.1",
        "frequency_penalty": "-0.2",
        "repetition_penalty": "1.1",
        "stops": "END\nlast\\nline",
    }
    page.click("#open-options")
    for name, value in values.items():
        page.click(f"#{name}")
        page.type(value)
    page.go(slow.url)  # a reload keeps them
    say(page, "hi")
    [request] = wait_for(lambda: list(slow.service.core.running), 5)
    params = request.sampling_params
    assert tokenizer.decode(request.prompt_token_ids).startswith("<|system|>Be brief.")
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 20, 0.01)
    assert (params.max_tokens, params.seed, list(params.stop)) == (90, 42, ["END", "last\nline"])
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    assert penalties == (0.1, -0.2, 1.1)
    stop(page, slow)
    page.click("#open-options")
    page.click("#reset")
    say(page, "again")
    [request] = wait_for(lambda: list(slow.service.core.running), 5)
    assert request.sampling_params.seed is None
    assert "system" not in tokenizer.decode(request.prompt_token_ids)
    page.press("Escape")


def test_another_answer_and_another_question(page: Page) -> None:
    say_and_wait(page, "first")
    page.run("document.querySelector('.assistant').dataset.old = 'yes'")
    page.click(".assistant [data-icon=again]")
    page.wait(
        f"document.querySelectorAll('.message').length === 2 && !document.querySelector('[data-old]') && !{COMING}"
    )
    page.press("ArrowUp")
    page.wait("document.activeElement.value === 'first'")
    page.press("Escape")
    assert page.text(".user .body") == "first"
    page.press("Enter")  # the focus is on the button that edits
    page.wait("document.activeElement.value === 'first'")
    page.run("document.activeElement.select()")
    page.type("second")
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.message').length === 2 && !{COMING}")
    assert page.text(".user .body") == "second"
    assert page.text(ANSWER).startswith("second")


def test_a_reload_keeps_the_conversation_and_a_new_chat_ends_it(page: Page, quick: Live) -> None:
    say_and_wait(page, "remember")
    page.go(quick.url)
    assert page.text(".user .body") == "remember"
    assert page.text(ANSWER).startswith("remember")
    page.click("#new")
    page.go(quick.url)
    assert page.run("document.querySelectorAll('.message').length") == 0


def test_thoughts_are_folded(page: Page) -> None:
    stub_chat(page, [{"reasoning_content": "Let me "}, {"reasoning_content": "think."}, {"content": "Four."}])
    say_and_wait(page, "2 + 2?")
    assert page.text(ANSWER) == "Four."
    assert page.text(".reasoning") == "Thoughts"
    page.click(".reasoning summary")
    assert page.text(".thoughts") == "Let me think."


# ------------------------------------------------------------------------------------------------ when it fails


@pytest.mark.filterwarnings("default")
def test_errors_are_shown_as_the_server_says_them(browser: Browser, quick: Live) -> None:
    with Page(browser, quick.url) as page:
        page.click("#open-options")
        page.click("#temperature")
        page.type("-1")
        say_and_wait(page, "hello")
        error = page.text(".error[role=alert]")
        assert "temperature" in error
        page.run("document.getElementById('temperature').value = ''")
        page.click(".assistant [data-icon=again]")
        page.wait(f"!document.querySelector('.error:not([hidden])') && !{COMING}")
        assert page.text(ANSWER).startswith("hello")


def test_a_key_is_asked_for(browser: Browser, tokenizer: Tokenizer) -> None:
    with live_service(tokenizer, api_key=("secret",)) as live, Page(browser, live.url) as page:
        for given in ("wrong", "secret"):
            page.wait("document.getElementById('key-dialog').open")
            assert "API key" in page.text("#key-reason")
            page.type(given)
            page.press("Enter")
        page.wait("document.getElementById('model').textContent === 'parrot'")
        assert not page.run("document.getElementById('key-dialog').open")
        say_and_wait(page, "let me in")
        assert page.text(ANSWER).startswith("let me in")
        assert page.run("JSON.stringify(localStorage)") == "{}"
        page.run("sessionStorage.removeItem('noria.key')")
        page.go(live.url)
        page.wait("document.getElementById('key-dialog').open")
        page.press("Escape")
        page.wait("!document.getElementById('key-dialog').open")


def test_readiness_is_shown_while_somebody_looks(browser: Browser, tokenizer: Tokenizer) -> None:
    with live_service(tokenizer) as live, Page(browser, live.url) as page:
        turn = "Object.defineProperty(document, 'visibilityState', {value: '%s', configurable: true});"
        turn += "document.dispatchEvent(new Event('visibilitychange'))"
        page.wait("!document.getElementById('figures').hidden")
        live.service.state.draining = True
        page.run(turn % "hidden")
        assert page.text("#readiness") == "ready"
        page.run(turn % "visible")
        page.wait("document.getElementById('readiness').textContent === 'the server is shutting down'", 2)
        live.service.state.draining = False
        page.run(turn % "visible")
        page.wait("document.getElementById('readiness').textContent === 'ready'", 2)


# ------------------------------------------------------------------------------------------------ how it looks

# Texts with too little contrast against what is behind them (WCAG 2 AA: 4.5), each with its ratio.
PALE = """(() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const [r, g, b, a = 1] = channels(getComputedStyle(node).backgroundColor);
      if (a === 1) return [r, g, b];
    }
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const pale = [];
  let count = 0;
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest("noscript")) continue;
    const [a, b] = [channels(getComputedStyle(node).color).slice(0, 3), behind(node)].map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    count += 1;
    if (ratio < 4.5) pale.push(`${walker.currentNode.data.trim()}: ${ratio.toFixed(2)}`);
  }
  return count > 20 ? pale : ["too few texts"];
})()"""
WIDER = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(browser: Browser, quick: Live, dark: bool) -> None:
    for page in quiet(browser, quick, dark=dark):
        page.click("#open-options")
        stub_chat(page, [{"reasoning": "Hm."}, {"content": MARKDOWN}])
        say_and_wait(page, "hello")
        page.run("document.querySelector('.error').hidden = false")
        page.run("document.querySelector('.error').textContent = 'It went wrong.'")
        assert page.run(BACKGROUND) == (DARK if dark else LIGHT)
        assert page.run(PALE) == []


def test_theme(page: Page, quick: Live) -> None:
    assert page.run(BACKGROUND) == LIGHT
    page.click("#theme")
    assert page.run(BACKGROUND) == DARK
    assert page.run("document.getElementById('theme').getAttribute('aria-pressed')") == "true"
    page.go(quick.url)
    assert page.run(BACKGROUND) == DARK
    page.click("#theme")
    assert page.run(BACKGROUND) == LIGHT
    page.emulate(dark=True)  # the system is followed again
    assert page.run(BACKGROUND) == DARK


def test_a_phone_has_nothing_wider_than_itself(browser: Browser, quick: Live) -> None:
    for page in quiet(browser, quick, **PHONE):
        assert not page.run(WIDER)
        stub_chat(page, [{"content": MARKDOWN}])
        say_and_wait(page, "wide" * 50)
        assert not page.run(WIDER)
        assert page.run("document.querySelector('#scroll').scrollWidth") <= PHONE["width"]
        outside = "[...document.querySelectorAll('button, textarea, .message, dd')].filter((each) =>"
        outside += " each.checkVisibility() && each.getBoundingClientRect().right > innerWidth).length"
        assert page.run(outside) == 0
        page.click("#open-options")
        page.wait("document.getElementById('options').matches(':modal')")
        assert not page.run(WIDER)
        assert page.run("document.getElementById('options').scrollWidth") <= PHONE["width"]
        page.press("Escape")
        page.wait("!document.getElementById('options').open")


def test_targets_are_large_enough_for_a_finger(browser: Browser, quick: Live) -> None:
    for page in quiet(browser, quick, **PHONE):
        small = "[...document.querySelectorAll('button')].filter((each) => each.checkVisibility()).filter((each) =>"
        small += " Math.min(each.offsetWidth, each.offsetHeight) < 40).map((each) => each.id)"
        assert page.run(small) == []


def test_nothing_moves_for_those_who_do_not_want_it(slow_page: Page) -> None:
    slow_page.emulate(dark=False, reduced_motion=True)
    say(slow_page, "still")
    slow_page.wait(f"document.querySelector('{ANSWER}')?.innerText.length > 3")
    assert slow_page.run("document.getAnimations().length") == 0
    slow_page.press("Escape")


def test_the_end_stays_in_view_until_somebody_scrolls_up(browser: Browser, slow: Live) -> None:
    for page in quiet(browser, slow, width=360, height=300):
        at_end = "{const s = document.querySelector('#scroll'); s.scrollHeight - s.scrollTop - s.clientHeight < 2}"
        page.run("document.querySelector('#messages').style.fontSize = '200%'")
        say(page, "the river runs under the old mill")
        page.wait(f"document.querySelector('{ANSWER}')?.innerText.length > 60")
        assert page.run(at_end)
        assert page.run("document.getElementById('latest').hidden")
        page.run("document.querySelector('#scroll').scrollTop = 0")
        page.wait("!document.getElementById('latest').hidden")
        assert page.run("document.querySelector('#scroll').scrollTop") == 0
        page.click("#latest")
        page.wait(at_end)
        page.press("Escape")
        page.wait(f"!{COMING}")


# --------------------------------------------------------------------------------------------------- keyboard


def test_keys(page: Page) -> None:
    page.type("one")
    page.press("Enter", shift=True)
    page.type("two")
    assert page.run("document.getElementById('prompt').value") == "one\ntwo"
    assert page.run("document.querySelectorAll('.message').length") == 0
    page.press("Enter")
    page.wait(f"document.querySelectorAll('.message').length === 2 && !{COMING}")
    assert page.text(".user .body") == "one\ntwo"
    assert page.run("document.getElementById('prompt').value") == ""
    page.press("Enter")
    page.type("   ")
    page.press("Enter")
    assert page.run("document.querySelectorAll('.message').length") == 2


def test_everything_is_reached_by_tab_and_is_seen_to_be(page: Page) -> None:
    while page.run("document.activeElement !== document.body"):
        page.press("Tab")  # from the message field out of the page
    seen = []
    for _ in range(30):
        page.press("Tab")
        name = page.run("(({id, className, textContent}) => id || className || textContent)(document.activeElement)")
        if page.run("document.activeElement === document.body") or name in seen:
            break
        seen.append(name)
        if name != "prompt":  # its frame shows it
            assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid", name
    assert {"skip", "new", "open-options", "theme", "scroll", "prompt", "Write a haiku about a river."} <= set(seen)
    assert seen[0] == "skip"


def test_options_with_keys(page: Page) -> None:
    page.run("document.getElementById('open-options').focus()")
    page.press("Enter")
    page.wait("document.getElementById('options').open")
    assert page.run("document.getElementById('open-options').getAttribute('aria-expanded')") == "true"
    assert page.run("document.activeElement.closest('dialog') !== null")
    page.press("Escape")
    page.wait("!document.getElementById('options').open")
    assert page.run("document.activeElement.id") == "open-options"
    page.wait("document.getElementById('open-options').getAttribute('aria-expanded') === 'false'")
