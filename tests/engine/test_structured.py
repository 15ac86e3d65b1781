"""Requests that follow a grammar, through the whole engine."""

from __future__ import annotations

import itertools
import json
import logging
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engine_checks import check_idle

from noria import LLM, AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from noria.engine.outputs import CompletionOutput
from noria.errors import RequestError
from noria.grammar import compiler as compiler_module
from noria.scheduler.schedule import Schedule

PROMPT = "the water wheel turns and the river runs"
EOS = 2
MILL = {
    "type": "object",
    "properties": {
        "w": {"type": "string", "maxLength": 4},
        "s": {"type": "integer", "minimum": 1, "maximum": 12},
        "r": {"enum": ["Rhine", None, True]},
        "k": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
    },
    "required": ["w", "s", "r", "k"],
    "additionalProperties": False,
}


def follow(**given: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given)


JSON = follow(json=MILL, disable_any_whitespace=True)


def params(structured: StructuredOutputsParams | None = JSON, **options: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=structured, **{"max_tokens": 50, "seed": 3} | options)


def outputs_of(llm: LLM, prompts: Any, given: Any) -> list[CompletionOutput]:
    return [output for answer in llm.generate(prompts, given) for output in answer.outputs]


def check_mill(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["w", "s", "r", "k"]
    assert isinstance(value["w"], str)
    assert len(value["w"]) <= 4
    assert type(value["s"]) is int
    assert 1 <= value["s"] <= 12
    assert value["r"] in ("Rhine", None) or value["r"] is True
    assert len(value["k"]) <= 1
    assert all(type(each) is bool for each in value["k"])
    assert '": ' not in text
    assert ", " not in text


@pytest.fixture(scope="module")
def plain_llm(options: dict[str, Any]) -> Iterator[LLM]:
    """Nothing planned ahead, no prefix cache."""
    with LLM(**options, async_scheduling=False, enable_prefix_caching=False) as llm:
        yield llm
        check_idle(llm)


def test_the_first_request_with_a_grammar_compiles_no_program(options: dict[str, Any]) -> None:
    with LLM(**options) as llm:
        [output] = outputs_of(llm, PROMPT, params(follow(choice=["red", "green"])))
        assert output.text in ("red", "green")
        assert llm.stats.compiles_after_warmup == 0


def test_every_answer_is_what_was_asked_for(llm: LLM) -> None:
    """JSON that parses and fits, from a model that writes noise, in crowds and at every temperature."""
    asked = [params(seed=seed, temperature=[0.0, 0.7, 1.5, 4.0][seed % 4]) for seed in range(24)]
    outputs = outputs_of(llm, [PROMPT[: 5 + seed % 7] for seed in range(24)], asked)
    for output in outputs:
        assert (output.finish_reason, output.stop_reason, output.token_ids[-1]) == ("stop", EOS, EOS)
        check_mill(output.text)
    assert len({output.text for output in outputs}) > 18


def test_every_kind(llm: LLM) -> None:
    tag = {"structures": [{"begin": "<m>", "schema": {"enum": [1, 2]}, "end": "</m>"}], "triggers": ["<m>"]}
    asked = [
        params(follow(regex="[a-c]{3,6}")),
        params(follow(choice=["mill", "miller"])),
        params(follow(grammar='start: "(" start ")" | "x"'), temperature=0),
        params(follow(grammar='root ::= "(" [ab] ")"')),
        params(follow(structural_tag=tag), max_tokens=20),
        params(follow(json='{"enum": ["a", 7]}')),
    ]
    texts = [output.text for output in outputs_of(llm, [PROMPT] * len(asked), asked)]
    assert set(texts[0]) <= set("abc")
    assert 3 <= len(texts[0]) <= 6
    assert texts[1] in ("mill", "miller")
    assert texts[2].startswith("(") or texts[2] == "x"
    assert texts[3] in ("(a)", "(b)")
    assert texts[4].count("<m>") == texts[4].count("</m>") or texts[4].endswith(("<m>", "<m>1", "<m>2"))
    assert json.loads(texts[5]) in ("a", 7)


def test_any_json_object(llm: LLM) -> None:
    asked = params(follow(json_object=True), max_tokens=40, temperature=0)
    [output] = outputs_of(llm, PROMPT, asked)
    assert output.text.startswith("{")
    if output.finish_reason == "stop":
        assert isinstance(json.loads(output.text), dict)


def test_rows_are_right_in_every_order(llm: LLM, plain_llm: LLM) -> None:
    """[plain, json, plain, json] in all 24 orders: each row equals its solo run."""
    requests = [
        ("the mill", params(None, temperature=0, max_tokens=30)),
        ("a river", params(seed=5)),
        ("flour and", params(None, seed=7, max_tokens=25)),
        ("the wheel", params(follow(regex="[a-f0-9]{4,20}"), temperature=1.3, seed=11)),
    ]
    alone = [outputs_of(plain_llm, prompt, given)[0] for prompt, given in requests]
    assert len({tuple(output.token_ids) for output in alone}) == 4
    for order in itertools.permutations(range(4)):
        prompts, given = zip(*(requests[index] for index in order))
        for index, output in zip(order, outputs_of(llm, list(prompts), list(given))):
            assert output == alone[index]


def test_running_ahead_changes_nothing(options: dict[str, Any], llm: LLM) -> None:
    """Also with prompts in chunks, more requests than seats, and a pool so small that some are preempted."""
    prompts = [[5 + (seed * 7 + index) % 180 for index in range(3 + 5 * (seed % 8))] for seed in range(20)]
    asked = [params(seed=seed) if seed % 3 else params(None, seed=seed) for seed in range(20)]
    expected = [output.token_ids for output in outputs_of(llm, prompts, asked)]
    for changes in ({"async_scheduling": False}, {"num_blocks_override": 14}, {"num_scheduler_steps": 4}):
        with LLM(**options | changes) as other:
            assert [output.token_ids for output in outputs_of(other, prompts, asked)] == expected
            assert (other.stats.scheduler.num_preemptions > 0) == ("num_blocks_override" in changes)
            check_idle(other)


def test_no_burst_while_a_grammar_is_followed(options: dict[str, Any]) -> None:
    with LLM(**options, num_scheduler_steps=4) as llm:
        bursts: list[tuple[bool, bool]] = []

        def see(schedule: Schedule) -> None:
            running = [llm.engine.core.scheduler.request(name) for name in schedule.num_scheduled_tokens]
            bursts.append((schedule.is_burst, any(request.sampling_params.structured_outputs for request in running)))

        llm.engine.core.on_schedule = see
        outputs_of(llm, [PROMPT] * 2, [params(None, max_tokens=40, ignore_eos=True), params(follow(regex="[ab]{9}"))])
        assert (True, True) not in bursts
        assert (True, False) in bursts
        assert (False, True) in bursts


def test_a_prefix_in_the_cache_changes_nothing(llm: LLM) -> None:
    llm.reset_prefix_cache()
    first, again = (llm.generate(list(range(20, 38)), params())[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens > 0) == (0, True)
    assert first.outputs == again.outputs


def test_several_sequences_of_a_prompt(llm: LLM) -> None:
    outputs = outputs_of(llm, "the mill", params(n=4, temperature=2.0))
    for output in outputs:
        check_mill(output.text)
    assert len({output.text for output in outputs}) == 4
    assert outputs == outputs_of(llm, "the mill", params(n=4, temperature=2.0))


@pytest.mark.parametrize(
    ("regex", "given", "text", "reason"),
    [
        ("ab", {}, "ab", "stop"),
        ("ab", {"ignore_eos": True}, "ab", "stop"),  # the text is complete: there is nothing to go on with
        ("ab", {"min_tokens": 10}, "ab", "stop"),  # no token is left that min_tokens would allow
        ("", {"min_tokens": 10}, "", "stop"),
        ("", {}, "", "stop"),
        ("a{12}", {"max_tokens": 5}, "aaaaa", "length"),
        ("abcabc", {"stop": ["ca"]}, "ab", "stop"),
        ("abcabc", {"stop": ["ca"], "include_stop_str_in_output": True}, "abca", "stop"),
    ],
)  # fmt: skip
def test_how_it_ends(llm: LLM, regex: str, given: dict[str, Any], text: str, reason: str) -> None:
    [output] = outputs_of(llm, PROMPT, params(follow(regex=regex), **given))
    assert (output.text, str(output.finish_reason)) == (text, reason)


def test_min_tokens_holds_up_the_end(llm: LLM) -> None:
    [output] = outputs_of(llm, PROMPT, params(follow(regex="[ab]*"), min_tokens=9, max_tokens=9))
    assert (len(output.token_ids), output.finish_reason) == (9, "length")
    assert set(output.text) <= set("ab")


def test_a_stop_token_inside_the_grammar(llm: LLM) -> None:
    [b] = llm.tokenizer.encode("b")
    [output] = outputs_of(llm, PROMPT, params(follow(regex="ab+"), stop_token_ids=[b]))
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", b)


def test_log_probabilities_are_finite(options: dict[str, Any], llm: LLM) -> None:
    """Raw ones are the model's own, processed ones those of what the grammar allows."""
    asked = params(follow(regex="[ab]{4}"), logprobs=20, temperature=1.0)
    [raw] = outputs_of(llm, PROMPT, asked)
    with LLM(**options, logprobs_mode="processed_logprobs") as other:
        [processed] = outputs_of(other, PROMPT, asked)
    assert raw.token_ids == processed.token_ids
    for found, token_id in zip(raw.logprobs or (), raw.token_ids, strict=True):
        assert len(found) in (20, 21)
        assert all(math.isfinite(each.logprob) for each in found.values())
        assert token_id in found
    for found, token_id in zip(processed.logprobs or (), processed.token_ids, strict=True):
        assert 1 <= len(found) <= 4  # a, b, and what begins with them; at the end </s>
        assert all(math.isfinite(each.logprob) for each in found.values())
        assert math.fsum(math.exp(each.logprob) for each in found.values()) == pytest.approx(1, abs=1e-4)
        assert token_id in found


def test_what_leaves_no_token_fails_alone(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    [c] = llm.tokenizer.encode("c")
    plain = params(None, max_tokens=20)
    [expected] = outputs_of(llm, PROMPT, plain)
    failed, fine = outputs_of(llm, [PROMPT] * 2, [params(follow(regex="ab"), allowed_token_ids=[c]), plain])
    assert failed.finish_reason == "error"
    assert "exclude all of them" in str(failed.stop_reason)
    assert fine == expected
    assert "no token can be sampled" in caplog.text


def test_a_grammar_that_is_too_much_fails_alone(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """What shows only after some tokens."""
    plain = params(None, max_tokens=30)
    [expected] = outputs_of(llm, PROMPT, plain)
    asked = params(follow(regex="xy((a{1000}){1000}){1000}"), max_tokens=30)
    failed, fine = outputs_of(llm, [PROMPT] * 2, [asked, plain])
    assert failed.finish_reason == "error"
    assert failed.stop_reason is not None
    assert str(failed.stop_reason).startswith("structured_outputs: regex failed after ")
    assert fine == expected
    assert "its grammar failed" in caplog.text


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (follow(regex="("), "regex cannot be used"),
        (follow(json={"type": "array", "uniqueItems": True}), "Unimplemented keys"),
        (follow(json={"$ref": "#"}), "no text can match it"),
    ],
)
def test_a_bad_grammar_is_refused_before_anything_runs(llm: LLM, bad: StructuredOutputsParams, message: str) -> None:
    steps = llm.stats.steps
    with pytest.raises(RequestError, match=message):
        llm.generate([PROMPT, PROMPT], [params(None), params(bad)])
    assert llm.stats.steps == steps


def test_no_tokenizer(options: dict[str, Any]) -> None:
    with LLM(**options, skip_tokenizer_init=True) as llm, pytest.raises(RequestError, match="there is no tokenizer"):
        llm.generate([5, 6, 7], params())


class Gate:
    """Holds up every compilation until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        original = compiler_module.grammar_source

        def wait(*arguments: Any) -> str:
            assert self._open.wait(20)
            return original(*arguments)

        monkeypatch.setattr(compiler_module, "grammar_source", wait)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


def begin(llm: LLM, name: str, given: SamplingParams) -> None:
    """As a served engine does it: admitted before the grammar is compiled."""
    llm._front.add(name, PROMPT, given)


def finish(llm: LLM) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    while llm._front.has_unfinished:
        for part in llm._front.step():
            if part.request_id in done:
                done[part.request_id].add(part)
            else:
                done[part.request_id] = part
    return done


def test_nobody_waits_for_a_grammar_that_is_compiled(llm: LLM, gate: Gate) -> None:
    """The others run; it comes in later, with the answer it would have had."""
    structured = follow(regex="[a-d]{5,9}q?")
    begin(llm, "slow", params(structured))
    begin(llm, "other", params(None, max_tokens=6, ignore_eos=True))
    scheduler = llm.engine.core.scheduler
    assert (scheduler.num_waiting, scheduler.num_running) == (2, 0)
    parts = []
    while not any(part.finished for part in parts):
        parts += llm._front.step()
        scheduler.check_integrity()
    assert {part.request_id for part in parts} == {"other"}
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 0)
    gate.open()
    found = finish(llm)["slow"].outputs
    assert found == llm.generate(PROMPT, params(structured))[0].outputs


def test_an_engine_that_only_waits_for_a_grammar_sleeps(llm: LLM, gate: Gate) -> None:
    begin(llm, "slow", params(follow(regex="[a-d]{5}r?")))
    steps, used, wall = llm.stats.steps, time.process_time(), time.perf_counter()
    gap = llm.stats.times.gap_s
    for _ in range(10):
        assert llm._front.step() == []
    assert time.perf_counter() - wall > 0.15
    assert time.process_time() - used < 0.1
    assert llm.stats.steps == steps
    assert llm.stats.times.gap_s == gap
    gate.open()
    assert finish(llm)["slow"].outputs[0].finish_reason == "stop"


def test_a_request_is_given_up_while_its_grammar_is_compiled(llm: LLM, gate: Gate) -> None:
    begin(llm, "slow", params(follow(regex="[a-d]{5}s?"), n=2))
    llm._front.step()
    output = llm._front.abort("slow")
    assert output is not None
    assert [each.finish_reason for each in output.outputs] == ["abort", "abort"]
    assert llm.engine.core.structured.num_compiling == 0


def test_a_compilation_that_fails_ends_its_own_request(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """In the engine's process, which was not the one that checked it."""
    caplog.set_level(logging.CRITICAL)
    begin(llm, "bad", params(follow(regex="(((")))
    begin(llm, "good", params(None, max_tokens=5, ignore_eos=True))
    done = finish(llm)
    assert done["bad"].outputs[0].finish_reason == "error"
    assert "regex cannot be used" in str(done["bad"].outputs[0].stop_reason)
    assert len(done["good"].outputs[0].token_ids) == 5


def test_a_compilation_that_takes_too_long_ends_its_own_request(
    llm: LLM, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("noria.engine.structured.TIMEOUT_S", 0.05)
    caplog.set_level(logging.CRITICAL)
    begin(llm, "slow", params(follow(regex="[a-d]{5}t?")))
    assert "takes longer than" in str(finish(llm)["slow"].outputs[0].stop_reason)


def test_an_id_that_is_in_use_keeps_its_matcher(llm: LLM) -> None:
    core = llm.engine.core
    requests = [llm._front.admission.requests("same", [5, 6], params(follow(regex="ab")))[0] for _ in range(2)]
    llm._front.grammars.validate(follow(regex="ab"))
    core.add(requests[0])
    with pytest.raises(RequestError, match="in use"):
        core.add(requests[1])
    while not requests[0].is_finished:
        core.step()
    assert requests[0].finish_reason == "stop"


def test_streams(llm: LLM) -> None:
    [whole] = outputs_of(llm, PROMPT, params())
    assert "".join(part.outputs[0].text for part in llm.stream(PROMPT, params())) == whole.text


def test_chats(llm: LLM) -> None:
    [answer] = llm.chat([{"role": "user", "content": "mill?"}], params())
    check_mill(answer.outputs[0].text)


def test_the_async_front(options: dict[str, Any], llm: LLM) -> None:
    import asyncio

    async def work() -> str:
        async with AsyncLLM(**options) as other:
            with pytest.raises(RequestError, match="regex cannot be used"):
                async for _ in other.generate(PROMPT, params(follow(regex="("))):
                    pass
            return "".join([part.outputs[0].text async for part in other.generate(PROMPT, params())])

    assert asyncio.run(work()) == outputs_of(llm, PROMPT, params())[0].text
