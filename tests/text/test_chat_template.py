from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from noria.errors import ConfigError, RequestError, WeightsError
from noria.text.chat import encode_chat, render_chat
from noria.text.tokenizer import load_tokenizer

USER = [{"role": "user", "content": "Hi"}]


def test_messages_become_a_prompt(byte_level_folder: Path) -> None:
    tokenizer = load_tokenizer(byte_level_folder)
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render_chat(tokenizer, USER) == prompt
    assert render_chat(tokenizer, USER, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert encode_chat(tokenizer, USER) == tokenizer.encode(prompt)


@pytest.mark.parametrize("content", ["As I", "As I ", "{{ a }}\n"])
def test_the_last_message_may_be_gone_on_with(byte_level_folder: Path, content: str) -> None:
    tokenizer = load_tokenizer(byte_level_folder)
    messages = [*USER, {"role": "assistant", "content": "As I"}, *USER, {"role": "assistant", "content": content}]
    text = render_chat(tokenizer, messages, continue_final_message=True)
    assert text == render_chat(tokenizer, messages[:-1]) + content
    trimmed = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    assert render_chat(trimmed, messages[2:], continue_final_message=True) == "<user>Hi</><assistant>" + content


@pytest.mark.parametrize(
    ("template", "last", "message"),
    [
        ("{{ messages[-1].content }}", USER[0], "needs a last message of the role assistant"),
        ("{{ messages[-1].content }}", {"role": "assistant", "content": ""}, "a content that is not empty"),
        ("{{ messages[-1].content }}", {"role": "assistant"}, "a content that is not empty"),
        ("{{ messages[0].content }}", {"role": "assistant", "content": "a"}, "does not show the last message"),
        ("{{ messages[-1].content * 2 }}", {"role": "assistant", "content": "a"}, "does not show the last message"),
    ],
)
def test_what_cannot_be_gone_on_with(template: str, last: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_chat(template, [*USER, last], continue_final_message=True)


def test_a_chat_prompt_has_one_beginning_of_sequence(metaspace_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(metaspace_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("the").count(1) == 1
    assert encode_chat(tokenizer, [{"role": "user", "content": "the"}]) == tokenizer.encode("the")


def test_parts_of_a_content_are_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render_chat("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "must be of type text, not 'image_url'; this model reads"),
        ([{"type": ["text"], "text": "x"}], "must be of type text"),
        (["text"], "must be of type text, not None"),
        ([], "a list of parts that is not empty"),
        ([{"type": "text", "text": 5}], "must have a text that is a string"),
        ([{"type": "text", "text": "x", "colour": 1}], "a content part of type text has no colour"),
    ],
)
def test_other_parts_are_refused(content: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render_chat("{{ messages[0].content }}", [{"role": "user", "content": content}])


def test_blocks_are_trimmed_and_loops_have_controls() -> None:
    template = """
        {%- for message in messages %}
            {%- if loop.first %}{% continue %}{% endif %}
            {%- if message.role == 'stop' %}{% break %}{% endif %}
    {{- message.content }}
    {% endfor %}"""
    roles = ["system", "user", "user", "stop", "user"]
    messages = [{"role": role, "content": str(index)} for index, role in enumerate(roles)]
    assert render_chat(template, messages) == "1\n2\n"


def test_a_block_on_its_own_line_leaves_no_line() -> None:
    assert render_chat("a\n   {% if true %}\nb\n   {% endif %}\nc", USER) == "a\nb\nc"


def test_generation_blocks_are_only_marks() -> None:
    template = "{% set x = 'out' %}{% generation %}{% set x = 'in' %}{{ x }}{% endgeneration %},{{ x }}"
    assert render_chat(template, USER) == "in,out"


def test_json_is_not_escaped_for_html() -> None:
    tools = [{"name": "f", "description": "a < b & 'c' \u00e9"}]
    assert render_chat("{{ tools | tojson }}", USER, tools=tools) == json.dumps(tools, ensure_ascii=False)
    assert render_chat("{{ tools | tojson(indent=2) }}", USER, tools=tools) == json.dumps(
        tools, ensure_ascii=False, indent=2
    )


def test_a_template_knows_the_date() -> None:
    assert render_chat("{{ strftime_now('%Y') }}", USER) in (
        str(datetime.datetime.now().year),
        str((datetime.datetime.now() - datetime.timedelta(minutes=1)).year),
    )


def test_extra_variables_reach_the_template() -> None:
    template = "{{ enable_thinking }} {{ tools is none }} {{ documents is none }} {{ nothing_such }}"
    assert render_chat(template, USER, enable_thinking=False) == "False True True "


def test_a_template_for_tools_is_preferred_with_tools(byte_level_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(byte_level_folder, tmp_path / "model")
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template == "plain"
    assert render_chat(tokenizer, USER) == "plain"
    assert render_chat(tokenizer, USER, tools=[{"name": "f"}]) == "tools"


def test_gguf_templates(byte_level_metadata: dict[str, Any], write_gguf: Callable[..., Path]) -> None:
    templates = {"tokenizer.chat_template": "{{ eos_token }}", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = load_tokenizer(write_gguf(byte_level_metadata | templates))
    assert render_chat(tokenizer, USER) == "<|im_end|>"
    assert render_chat(tokenizer, USER, tools=[{"name": "f"}]) == "tools"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{% if %}", "not valid"),
        ("{{ messages[0].content.nothing.such }}", "no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "append.*unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
    ],
)
def test_what_a_template_refuses_is_an_error_of_the_request_in_one_line(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        render_chat(template, USER)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("messages", [[], "Hi", {"role": "user"}, ["Hi"], [{"content": "Hi"}], [{"role": 1}], None])
def test_what_are_no_messages_is_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="must be a"):
        render_chat("{{ messages }}", messages)


def test_a_model_without_a_template_names_the_fix(metaspace_folder: Path) -> None:
    with pytest.raises(RequestError, match="no chat template; send a plain prompt"):
        render_chat(load_tokenizer(metaspace_folder), USER)


@pytest.mark.parametrize("as_file", [True, False])
def test_a_given_template_replaces_those_of_the_model(as_file: bool, byte_level_folder: Path, tmp_path: Path) -> None:
    source = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    given = source
    if as_file:
        (tmp_path / "own.jinja").write_text(source, "utf-8")
        given = str(tmp_path / "own.jinja")
    tokenizer = load_tokenizer(byte_level_folder, given)
    assert render_chat(tokenizer, USER) == f"<{USER[0]['content']}>"
    assert tokenizer.template_source("tool_use") is None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("nowhere.jinja", "cannot be read"),
        ("", "chat_template must not be empty"),
        ("{% for %}", "chat_template: the chat template is not"),
    ],
)
def test_a_given_template_that_is_none_is_refused(given: str, complaint: str, byte_level_folder: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_tokenizer(byte_level_folder, given)


def test_a_template_file_that_is_no_text(metaspace_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(metaspace_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_bytes(b"{{ messages \xff")
    with pytest.raises(WeightsError, match=r"cannot read .*chat_template\.jinja: 'utf-8' codec"):
        load_tokenizer(folder)
