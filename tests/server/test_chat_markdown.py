"""The Markdown of the chat page, in the browser it is written for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, Page, find_chromium
from live import live_service

from noria.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed")
MAX_S = 1.0  # for what is made to take long


@pytest.fixture(scope="module")
def page(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder: Path = tmp_path_factory.mktemp("chromium")
    with live_service(tokenizer) as live, Browser(folder) as browser, Page(browser, live.url) as page:
        page.run("import('/ui/markdown.js').then((module) => { window.markdown = module; })")
        yield page
        page.look()
        assert page.complaints == []


def shown(page: Page, text: str) -> str:
    """The HTML of what is shown; of code blocks their code alone."""
    program = f"""(() => {{
      const box = document.createElement("div");
      markdown.showMarkdown(box, {json.dumps(text)});
      for (const code of box.querySelectorAll("figure")) code.replaceWith(code.querySelector("pre"));
      for (const node of box.querySelectorAll("[tabindex], [rel]")) {{
        for (const name of ["tabindex", "rel", "target"]) node.removeAttribute(name);
      }}
      return box.innerHTML;
    }})()"""
    return page.run(program)


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("", ""),
        ("plain & <b>", "<p>plain &amp; &lt;b&gt;</p>"),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        ("**bold** and *it* and `co*d*e`", "<p><strong>bold</strong> and <em>it</em> and <code>co*d*e</code></p>"),
        ("__bold__ _it_ ~~old~~", "<p><strong>bold</strong> <em>it</em> <del>old</del></p>"),
        ("***both***", "<p><strong><em>both</em></strong></p>"),
        ("*a **b** c*", "<p><em>a <strong>b</strong> c</em></p>"),
        ("**a `**` b**", "<p><strong>a <code>**</code> b</strong></p>"),
        ("2 * 3 * 4, snake_case_name, **open", "<p>2 * 3 * 4, snake_case_name, **open</p>"),
        (r"\*not\* 5\_0", "<p>*not* 5_0</p>"),
        ("`` a ` b ``", "<p><code>a ` b</code></p>"),
        ("# One\n### Three #\n#none", "<h3>One</h3><h5>Three</h5><p>#none</p>"),
        ("a\n***\nb", "<p>a</p><hr><p>b</p>"),
        ("> quoted\n> **more**\n\nout", "<blockquote><p>quoted<br><strong>more</strong></p></blockquote><p>out</p>"),
        ("- a\n- b\n\ntext", "<ul><li>a</li><li>b</li></ul><p>text</p>"),
        ("3. c\n4. d", '<ol start="3"><li>c</li><li>d</li></ol>'),
        ("1. a\n   - b\n   - c\n2. d", "<ol><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ol>"),
        ("- a\n  - b", "<ul><li>a<ul><li>b</li></ul></li></ul>"),
        ("* a\n\n* b", "<ul><li>a</li><li>b</li></ul>"),
        ("- a\n\n  more\n- b", "<ul><li><p>a</p><p>more</p></li><li>b</li></ul>"),
        ("- a\n1. b", "<ul><li>a</li></ul><ol><li>b</li></ol>"),
        ("```py\nif a < b:\n\n    **c**\n```\nend", "<pre><code>if a &lt; b:\n\n    **c**</code></pre><p>end</p>"),
        ("````\n```\n````", "<pre><code>```</code></pre>"),
        ("- a\n  ```\n  x\n  ```", "<ul><li>a<pre><code>x</code></pre></li></ul>"),
        ("```\nnot yet at its end", "<pre><code>not yet at its end</code></pre>"),
        ("[a](https://example.org/x)", '<p><a href="https://example.org/x">a</a></p>'),
        ("see http://example.org/a.", '<p>see <a href="http://example.org/a">http://example.org/a</a>.</p>'),
        ("![a](https://example.org/x.png)", '<p>!<a href="https://example.org/x.png">a</a></p>'),
    ],
)
def test_what_models_write(page: Page, text: str, html: str) -> None:
    assert shown(page, text) == html


def test_a_table(page: Page) -> None:
    html = shown(page, "| a | b |\n|---|:-:|\n| 1 | **2** |\n| only |\n\nend")
    assert html == (
        '<div class="table"><table><thead><tr><th class="start">a</th><th class="center">b</th></tr></thead><tbody>'
        '<tr><td class="start">1</td><td class="center"><strong>2</strong></td></tr>'
        '<tr><td class="start">only</td><td class="center"></td></tr></tbody></table></div><p>end</p>'
    )


@pytest.mark.parametrize(
    "text",
    [
        "[x](javascript:alert(1))",
        "[x](data:text/html,<script>alert(1)</script>)",
        "[x](//example.org)",
        "[x](vbscript:x)",
        "[x](https:)",
        "<a href='https://example.org'>x</a>",
        "<img src=x onerror=alert(1)>",
        "<script>alert(1)</script>",
        "```<img src=x>\n<script>\n```",
        "| <img src=x> |\n|---|\n| <svg onload=x> |",
    ],
)
def test_what_would_do_harm_is_only_text(page: Page, text: str) -> None:
    program = f"""(() => {{
      const box = document.createElement("div");
      markdown.showMarkdown(box, {json.dumps(text)});
      const bad = "img, script, iframe, object, embed, svg:not(.icon), [onerror], [onload]";
      return [box.querySelectorAll(bad).length, [...box.querySelectorAll("a")].map((each) => each.protocol)];
    }})()"""
    count, protocols = page.run(program)
    assert count == 0
    assert set(protocols) <= {"https:", "http:"}
    assert "javascript" not in str(protocols)


def test_links_open_elsewhere_and_tell_nothing(page: Page) -> None:
    program = """(() => {
      const box = document.createElement("div");
      markdown.showMarkdown(box, "[a](https://example.org)");
      const { target, rel } = box.querySelector("a");
      return [target, rel];
    })()"""
    assert page.run(program) == ["_blank", "noopener noreferrer"]


@pytest.mark.parametrize(
    "text",
    [
        "*a " * 20_000,
        "**a " * 20_000,
        "_a *b **c ~~d " * 5_000,
        "`a``" * 20_000,
        "[" * 50_000,
        "[a](https://a" * 5_000,
        "[a](https://(" * 5_000,
        "> " * 2_000 + "deep",
        "\n".join(" " * 2 * depth + "- a" for depth in range(500)),
        "|-" * 20_000 + "\n" + "|-" * 20_000,
        "- " * 20_000,
        " " * 50_000 + "x",
        "http://" * 10_000,
        "\\" * 50_000,
        "a\n" * 20_000,
    ],
    ids=lambda text: text[:12].strip() or "blanks",
)
def test_nothing_takes_long(page: Page, text: str) -> None:
    program = f"""(() => {{
      const begin = performance.now();
      markdown.showMarkdown(document.createElement("div"), {json.dumps(text)});
      return (performance.now() - begin) / 1000;
    }})()"""
    assert page.run(program) < MAX_S


def test_a_growing_text_keeps_its_finished_blocks(page: Page) -> None:
    program = """(() => {
      const box = document.createElement("div");
      const text = "one\\n\\n```\\ncode\\n```\\n\\n- a\\n- b\\n\\nlast words";
      const seen = [];
      for (let end = 1; end <= text.length; end += 1) {
        markdown.showMarkdown(box, text.slice(0, end));
        seen.push(box.firstElementChild);
      }
      const whole = document.createElement("div");
      markdown.showMarkdown(whole, text);
      return [new Set(seen.slice(3)).size, box.innerHTML === whole.innerHTML];
    })()"""
    assert page.run(program) == [1, True]
