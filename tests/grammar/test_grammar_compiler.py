"""Grammars are compiled once, in threads, and every sequence gets a matcher of its own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from grammars import EOS, PIECES, allowed, begin, compiler, write

from noria.config import StructuredOutputsParams
from noria.errors import RequestError
from noria.grammar import compiler as compiler_module
from noria.grammar.compiler import GrammarCompiler


def test_the_same_grammar_is_compiled_once() -> None:
    with compiler() as made:
        schema = {"type": "object", "properties": {"a": {}}}
        first = made.compile(StructuredOutputsParams(json=schema))
        assert made.compile(StructuredOutputsParams(json=dict(schema))) is first
        assert made.compile(StructuredOutputsParams(json=schema, disable_any_whitespace=True)) is not first
        assert made.compile(StructuredOutputsParams(choice=["a"])) is made.compile(
            StructuredOutputsParams(choice=("a",))
        )


def test_many_grammars_push_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_CACHE_SIZE", 3)
    with compiler() as made:
        futures = [made.compile(StructuredOutputsParams(choice=[str(index)])) for index in range(3)]
        assert made.compile(StructuredOutputsParams(choice=["0"])) is futures[0]
        made.compile(StructuredOutputsParams(choice=["3"]))
        assert made.compile(StructuredOutputsParams(choice=["0"])) is futures[0]
        assert made.compile(StructuredOutputsParams(choice=["1"])) is not futures[1]
        assert write(futures[1].result().copy(), "1") == "must end"


def test_copies_go_their_own_ways() -> None:
    with compiler() as made:
        original = made.compile(StructuredOutputsParams(choice=["ab", "ba"])).result()
        one, other = original.copy(), original.copy()
        assert write(one, "a") == "more"
        assert write(other, "b") == "more"
        later = one.copy()
        assert write(one, "b") == "must end"
        assert allowed(later) == {ord("b")}
        assert write(original.copy(), "ba") == "must end"
    ended = one.copy()
    ended.accept(EOS)
    assert (ended.has_ended, one.has_ended) == (True, False)
    assert ended.copy().has_ended


def test_the_mask_of_a_wider_and_of_a_narrower_model() -> None:
    matcher = begin(StructuredOutputsParams(regex=r"(.|\n)*"))
    words = -(-len(PIECES) // 32)
    wide = np.full(words + 3, -1, np.int32)
    matcher.fill(wide)
    assert not wide[words:].any()
    assert wide[0] == -1
    narrow = np.zeros(2, np.int32)
    matcher.fill(narrow)
    assert (narrow == wide[:2]).all()


def test_a_compilation_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(*_: object) -> str:
        release.wait(20)
        raise RequestError("late")

    monkeypatch.setattr(compiler_module, "grammar_source", slow)
    monkeypatch.setattr(compiler_module, "TIMEOUT_S", 0.05)
    with compiler() as made:
        try:
            with pytest.raises(RequestError, match=r"regex takes longer than 0.05 s to compile; make it simpler"):
                made.validate(StructuredOutputsParams(regex="a"))
            with pytest.raises(RequestError, match=r"regex takes longer than 0.05 s to compile; make it simpler"):
                asyncio.run(made.validate_async(StructuredOutputsParams(regex="a")))
        finally:
            release.set()


def test_who_gives_up_disturbs_nobody_who_waits_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    release, original = threading.Event(), compiler_module.grammar_source

    def slow(*arguments: Any) -> str:
        release.wait(20)
        return original(*arguments)

    monkeypatch.setattr(compiler_module, "grammar_source", slow)
    params = StructuredOutputsParams(regex="a")

    async def work(made: GrammarCompiler) -> None:
        waiting = [asyncio.ensure_future(made.validate_async(params)) for _ in range(3)]
        await asyncio.sleep(0.01)
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        release.set()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, type(None), type(None)]
        with pytest.raises(RequestError, match="unclosed group"):
            await made.validate_async(StructuredOutputsParams(regex="("))

    with compiler() as made:
        asyncio.run(work(made))


def test_what_is_too_long_is_not_kept() -> None:
    with compiler() as made:
        params = StructuredOutputsParams(choice=["x" * 200_000, "y" * 200_000])
        assert made.compile(params) is not made.compile(params)
        with pytest.raises(RequestError, match="choice has 400000 characters; at most 262144 are possible"):
            made.validate(params)
