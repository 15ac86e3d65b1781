"""The chat page as it is served, and its files as they are written. test_chat_in_browser.py uses it."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import httpx
import pytest
from fake_engine import ask

from noria.server.routes.page import PAGE_FILES, PAGE_PATHS
from noria.text.tokenizer import Tokenizer

UI = resources.files("noria.server") / "ui"
MAX_LINES = 400
SCRIPTS = [name for name in PAGE_FILES if name.endswith(".js")]


def text_of(name: str) -> str:
    return (UI / name).read_text("utf-8")


def policy_of(response: httpx.Response) -> dict[str, list[str]]:
    rules = (rule.split() for rule in response.headers["content-security-policy"].split(";"))
    return {name: values for name, *values in rules}


# ----------------------------------------------------------------------------------------------- as it is served


@pytest.mark.parametrize(
    ("path", "content_type", "file"),
    [
        ("/", "text/html; charset=utf-8", "index.html"),
        ("/ui/style.css", "text/css; charset=utf-8", "style.css"),
        ("/ui/app.js", "text/javascript; charset=utf-8", "app.js"),
        ("/ui/icon.svg", "image/svg+xml", "icon.svg"),
    ],
)
def test_files_are_served(tokenizer: Tokenizer, path: str, content_type: str, file: str) -> None:
    response = ask(tokenizer, "GET", path)
    assert response.status_code == 200
    assert response.headers["content-type"] == content_type
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.content == (UI / file).read_bytes()


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
def test_every_file_comes_with_the_policy(tokenizer: Tokenizer, path: str) -> None:
    policy = policy_of(ask(tokenizer, "GET", path))
    assert policy["default-src"] == ["'none'"]
    assert policy["script-src"] == ["'self'"]
    assert policy["connect-src"] == ["'self'"]
    assert policy["frame-ancestors"] == ["'none'"]
    assert policy["require-trusted-types-for"] == ["'script'"]
    assert "unsafe" not in str(policy)


def test_a_browser_gets_a_file_again_only_when_it_has_changed(tokenizer: Tokenizer) -> None:
    first = ask(tokenizer, "GET", "/ui/app.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        again = ask(tokenizer, "GET", "/ui/app.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == tag
    assert ask(tokenizer, "GET", "/ui/app.js", headers={"If-None-Match": '"other"'}).status_code == 200
    assert ask(tokenizer, "GET", "/ui/dom.js").headers["etag"] != tag


def test_head_and_other_methods(tokenizer: Tokenizer) -> None:
    assert ask(tokenizer, "HEAD", "/").status_code == 200
    assert ask(tokenizer, "POST", "/").status_code == 405


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/none.js", "/ui/../app.py", "/ui/%2e%2e/app.py", "/index.html"])
def test_nothing_else_is_served(tokenizer: Tokenizer, path: str) -> None:
    assert ask(tokenizer, "GET", path).status_code == 404


def test_the_page_needs_no_key_and_the_api_does(tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"api_key": ("secret",)}
    for path in PAGE_PATHS:
        assert ask(tokenizer, "GET", path, options).status_code == 200
    assert ask(tokenizer, "GET", "/v1/models", options).status_code == 401
    assert ask(tokenizer, "GET", "/ui/none.js", options).status_code == 401


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_a_server_may_have_no_page(tokenizer: Tokenizer, keys: tuple[str, ...]) -> None:
    for path in ("/", "/ui/app.js"):
        status = ask(tokenizer, "GET", path, {"chat_page": False, "api_key": keys}).status_code
        assert status == (401 if keys else 404)


def test_the_page_is_no_part_of_the_api(tokenizer: Tokenizer) -> None:
    paths = ask(tokenizer, "GET", "/openapi.json").json()["paths"]
    assert "/v1/models" in paths
    assert not PAGE_PATHS & paths.keys()


# ---------------------------------------------------------------------------------------------- as it is written


def test_every_file_is_known() -> None:
    assert sorted(entry.name for entry in UI.iterdir()) == sorted(PAGE_FILES)


@pytest.mark.parametrize("name", PAGE_FILES)
def test_files_are_short_and_name_no_other_place(name: str) -> None:
    text = text_of(name)
    assert len(text.splitlines()) <= MAX_LINES
    text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, not an address
    assert not re.findall(r"\b(?:https?|wss?|ftp)://|[\"'(]//\w|\burl\(|@import|@font-face|data:[a-z]+/", text)


def test_html_has_neither_scripts_nor_styles_in_it() -> None:
    html = text_of("index.html")
    assert not re.findall(r"\son[a-z]+=|\sstyle=|<style|javascript:", html)
    scripts = re.findall(r"<script\b([^>]*)>(.*?)</script>", html, re.DOTALL)
    assert scripts
    for attributes, content in scripts:
        assert 'type="module"' in attributes
        assert not content
    addresses = re.findall(r'\b(?:src|href)="([^"#]+)"', html)
    assert {f"/{address}" for address in addresses} <= PAGE_PATHS


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_elements_and_never_html(name: str) -> None:
    words = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|setHTML|DOMParser|createContextualFragment"
    assert not re.findall(rf"{words}|\beval\(|new Function|console\.", text_of(name))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_import_and_name_what_is_there(name: str) -> None:
    text = text_of(name)
    for source in re.findall(r'from "\./([^"]+)"', text):
        assert source in PAGE_FILES
    ids = re.findall(r'\bid="([^"]+)"', text_of("index.html"))
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'byId\("([^"]+)"\)', text)) <= set(ids)
    assert {f"i-{icon}" for icon in re.findall(r'icon(?:Button)?\("([a-z]+)"', text)} <= set(ids)


def test_every_field_has_a_label() -> None:
    html = text_of("index.html")
    fields = re.findall(r'<(?:input|textarea)\b[^>]*\bid="([^"]+)"', html)
    assert len(fields) > 10
    assert set(fields) == set(re.findall(r'<label\b[^>]*\bfor="([^"]+)"', html))
