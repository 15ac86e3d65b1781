"""What cannot be used is refused with one line that names the kind and what is wrong; nothing hangs or crashes."""

from __future__ import annotations

import time
from typing import Any

import pytest
from grammars import EOS, allowed, begin, compiler, make_tokenizer, write

from noria.config import SamplingParams, StructuredOutputsParams
from noria.errors import RequestError
from noria.grammar.compiler import GrammarCompiler


def tag(format: Any) -> dict[str, Any]:
    return {"structural_tag": {"format": format}}


def nested(depth: int) -> str:
    return '{"properties": {"a": ' * depth + "{}" + "}}" * depth


ANY = {"type": "any_text"}
ONE = {"type": "tag", "begin": "a", "content": {"type": "json_schema", "json_schema": {}}, "end": ""}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, structural_tag, not none"),
        ({"json_object": False}, "not none"),
        ({"disable_any_whitespace": True}, "not none"),
        ({"json": {}, "regex": "a"}, "not json and regex"),
        ({"json": [1]}, "json must be a string"),
        ({"json": {"a": float("nan")}}, "json is not JSON"),
        ({"json": {"a": object()}}, "json is not JSON"),
        ({"choice": []}, "choice must hold at least one text"),
        ({"choice": ["a", ""]}, "choice must hold at least one text, and no empty one"),
        ({"choice": "ab"}, "choice must be a list"),
        ({"choice": [1]}, "choice must be a list"),
        ({"regex": 1}, "regex must be a string"),
        ({"jsn": {}}, "unknown option jsn; did you mean json?"),
        ({"whitespace_pattern": " "}, "unknown option whitespace_pattern"),
    ],
)
def test_what_can_be_seen_at_once(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match="structured_outputs") as found:
        StructuredOutputsParams(**given)
    assert message in str(found.value)


def test_options_have_names() -> None:
    with pytest.raises(RequestError, match="given by name"):
        StructuredOutputsParams({"type": "object"})
    with pytest.raises(RequestError, match="structured_outputs must be StructuredOutputsParams or None"):
        SamplingParams(structured_outputs={"json": {}})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": "{"}, "json is not JSON"),
        ({"json": "[1]"}, "json must be a JSON schema, which is a JSON object, not [1]"),
        ({"json": "true"}, "json must be a JSON schema"),
        ({"json": '{"minimum": NaN}'}, "NaN is no number of JSON"),
        ({"json": "[" * 100_000}, "nested too deeply"),
        ({"json": nested(60)}, "json is nested 121 deep; at most 100 are possible"),
        ({"json": {"enum": ["x" * 300_000]}}, "at most 262144 are possible"),
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"type": 5}}, "type must be a string"),
        ({"json": {"properties": 5}}, "properties must be an object"),
        ({"json": {"type": "array", "uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"json": {"if": {}, "then": {}}}, 'Unimplemented keys: ["if", "then"]'),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"x-guidance": 5}}, "x-guidance in a JSON schema must be an object"),
        ({"json": {"x-guidance": {"nope": 1}}}, "unknown field `nope`"),
        ({"json": {"$ref": "#"}}, "no text can match it"),
        ({"json": {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}}}, "cannot be used: "),
        ({"json": {"allOf": [{"$ref": "#"}, {"type": "string"}]}}, "circular references"),
        ({"json": {"$ref": "#/nowhere"}}, "does not exist"),
        ({"json": {"$ref": "other:schema"}}, "not present in a registry"),
        ({"json": {"enum": []}}, "Unsatisfiable schema"),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable schema"),
        ({"json": {"type": "string", "pattern": "("}}, "regex parse error"),
        ({"json": {"type": "string", "format": "colour"}}, "Unknown format: colour"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a{3,2}"}, "invalid repetition count range"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "(" * 5000 + ")" * 5000}, "regex cannot be used"),
        ({"regex": r"[^\s\S]"}, "no text can match it"),
        ({"regex": "\ud800"}, "surrogates not allowed"),
        ({"choice": ["a", "\ud800"]}, "surrogates not allowed"),
        ({"grammar": ""}, "grammar"),
        ({"grammar": "%%% 5"}, "Expected name at line 1"),
        ({"grammar": "start: %%% 5"}, "lexer error"),
        ({"grammar": 'a: "x"'}, "Expected ::= at line 1"),
        ({"grammar": '%llguidance {}\na: "x"'}, "no start rule"),
        ({"grammar": 'start: a\na: "x"\na: "y"'}, 'duplicate rule: "a"'),
        ({"grammar": 'root ::= a\na ::= "x"\na ::= "y"'}, "the rule a is defined 2 times"),
        ({"grammar": 'a ::= "x"'}, "No 'root' rule"),
        ({"grammar": "start: b"}, 'unknown name: "b"'),
        ({"grammar": "start: start"}, "no text can match it"),
        ({"grammar": "start: A\nA: B\nB: A"}, "circular reference"),
        ({"grammar": "start: <nothing>"}, "unknown special token"),
        ({"grammar": 'start: ("a"{1000}){1000}{1000}'}, "grammar cannot be used"),
        ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "too deeply nested"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "nested too deeply"),
        ({"structural_tag": "{"}, "structural_tag is not JSON"),
        ({"structural_tag": {"type": "other"}}, "type must be structural_tag"),
        ({"structural_tag": {}}, "structures must be a list of objects that is not empty"),
        ({"structural_tag": {"structures": [], "triggers": ["a"], "x": 1}}, "unknown field x"),
        ({"structural_tag": {"structures": [{"begin": 5}], "triggers": ["a"]}}, "begin must be a text, not 5"),
        ({"structural_tag": {"structures": [{"begin": "a", "schema": {}, "end": ""}]}}, "triggers must be a list"),
        (tag(5), "a format must have a type"),
        (tag({"type": "xml"}), "a format must have a type"),
        (tag({"type": "any_text", "x": 1}), "any_text has no field x; it has none"),
        (tag({"type": "const_string"}), "value must be a text, not null"),
        (tag({"type": "or", "elements": []}), "elements must be a list"),
        (tag({"type": "sequence", "elements": [ANY, {"type": "regex", "pattern": "a"}]}), "any_text must come last"),
        (tag({"type": "tag", "begin": "a", "content": ANY, "end": ""}), "ends a free text must not be empty"),
        (tag({"type": "triggered_tags", "triggers": [""], "tags": [ONE]}), "triggers must not contain an empty text"),
        (tag({"type": "triggered_tags", "triggers": ["b"], "tags": [ONE]}), "no tag begins with the trigger 'b'"),
        (
            tag({"type": "triggered_tags", "triggers": ["a"], "tags": [ONE, ONE | {"begin": "b"}]}),
            "the tag that begins with 'b' has no trigger",
        ),
        (
            tag({"type": "triggered_tags", "triggers": ["a"], "tags": [ONE], "at_least_one": 1}),
            "at_least_one must be true or false",
        ),
        (tag({"type": "json_schema", "json_schema": {"not": {}}}), 'Unimplemented keys: ["not"]'),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else None,
)
def test_what_the_compiler_finds(given: dict[str, Any], message: str) -> None:
    begin_s = time.perf_counter()
    with compiler() as made, pytest.raises(RequestError) as found:
        made.validate(StructuredOutputsParams(**given))
    assert str(found.value).startswith("structured_outputs: ")
    assert message in str(found.value)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 400
    assert time.perf_counter() - begin_s < 8


def test_a_large_schema_is_compiled_in_time() -> None:
    names = [f"property{index}" for index in range(2000)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    assert write(begin(StructuredOutputsParams(json=schema)), '{"property0": "", "prop') == "more"


def test_a_grammar_that_turns_out_to_be_too_much_is_an_error_of_its_own() -> None:
    matcher = begin(StructuredOutputsParams(regex="x|y((a{1000}){1000}){1000}"))
    assert allowed(matcher) == {ord("x"), ord("y")}
    matcher.accept(ord("y"))
    assert matcher.error is None
    for token in b"aaa":
        if matcher.error is None:
            matcher.accept(token)
            allowed(matcher)
    assert matcher.error == "lexer error: too many expressions constructed"


def test_a_token_that_is_not_allowed_is_an_error() -> None:
    matcher = begin(StructuredOutputsParams(choice=["ab"]))
    matcher.accept(ord("b"))
    assert matcher.error is not None
    assert "Tokens:" not in matcher.error
    assert not matcher.has_ended


def test_a_tokenizer_without_text_or_end() -> None:
    params = StructuredOutputsParams(regex="a")
    with compiler(make_tokenizer(())) as made, pytest.raises(RequestError, match="there is no tokenizer"):
        made.validate(params)
    made = GrammarCompiler(make_tokenizer(), (EOS + 10_000,))
    made.warm_up()
    with pytest.raises(RequestError, match="needs an end-of-sequence token"):
        made.validate(params)
    made.close()
