"""The offline front: what it accepts, in which order it answers, streams, several sequences, seeds."""

from __future__ import annotations

import numpy as np
import pytest
from engine_checks import check_idle, scheduler_of

from noria import LLM, SamplingParams
from noria.engine.request import FinishReason
from noria.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TEXTS = ["the water wheel", "flour", "the miller waits and waits and waits for the river", "A"]


def sampled(seed: int, n: int = 1, max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, n=n, max_tokens=max_tokens, ignore_eos=True)


def test_every_form_of_prompt_means_the_same(llm: LLM):
    ids = llm.tokenizer.encode(TEXTS[0])
    forms = [TEXTS[0], ids, tuple(ids), {"prompt": TEXTS[0]}, {"prompt_token_ids": ids}]
    answers = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(answer) == 1 for answer in answers)
    assert len({tuple(answer.outputs[0].token_ids) for [answer] in answers}) == 1
    assert [answer.prompt for [answer] in answers] == [TEXTS[0], None, None, TEXTS[0], None]
    assert all(answer.prompt_token_ids == ids for [answer] in answers)
    array = np.array(ids, np.uint16)
    for form in (array, array.reshape(1, -1), [array], {"prompt_token_ids": array}, list(array), [list(array)]):
        [answer] = llm.generate(form, GREEDY)
        assert answer.prompt_token_ids == ids
        assert all(type(token_id) is int for token_id in answer.prompt_token_ids)
    together = llm.generate(forms, GREEDY)
    assert [a.outputs[0].text for a in together] == [answer.outputs[0].text for [answer] in answers]
    assert llm.generate([], GREEDY) == []


def test_answers_come_in_the_order_of_the_prompts(llm: LLM):
    lengths = [30, 2, 11, 1]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    answers = llm.generate(TEXTS, params)
    assert [a.prompt for a in answers] == TEXTS
    assert [len(a.outputs[0].token_ids) for a in answers] == lengths
    alone = [llm.generate(text, p)[0] for text, p in zip(TEXTS, params)]
    assert [a.outputs[0].token_ids for a in answers] == [a.outputs[0].token_ids for a in alone]
    for answer in answers:
        [output] = answer.outputs
        assert answer.finished
        assert output.finish_reason is FinishReason.LENGTH
        assert output.text == llm.tokenizer.decode(output.token_ids, continuation=True)
        assert answer.usage["prompt_tokens"] == len(llm.tokenizer.encode(answer.prompt or ""))
        assert answer.usage["total_tokens"] == answer.usage["prompt_tokens"] + len(output.token_ids)
        metrics = answer.metrics
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        assert metrics.arrival_time < metrics.first_token_time <= metrics.finished_time


def test_more_requests_than_seats(llm: LLM):
    texts = [f"{text} {i}" for i in range(6) for text in TEXTS]
    answers = llm.generate(texts, GREEDY)
    assert [a.prompt for a in answers] == texts
    assert [a.outputs[0].token_ids for a in answers[:4]] == [
        llm.generate(text, GREEDY)[0].outputs[0].token_ids for text in texts[:4]
    ]


def test_default_sampling_params(llm: LLM):
    [answer] = llm.generate("the")
    assert 1 <= len(answer.outputs[0].token_ids) <= 16


def test_prefix_cache_is_reported(llm: LLM):
    ids = [7] * 30 + [9, 11]  # nobody else's beginning
    first, again = (llm.generate(ids, GREEDY)[0] for _ in range(2))
    assert first.usage["cached_tokens"] == 0
    assert again.usage["cached_tokens"] == 24  # three blocks; the last token is always computed
    assert first.outputs[0].token_ids == again.outputs[0].token_ids


def test_stream_is_generate_in_parts(llm: LLM):
    [whole] = llm.generate(TEXTS[2], sampled(5, n=2))
    parts = list(llm.stream(TEXTS[2], sampled(5, n=2)))
    assert len(parts) > 8
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    for index, output in enumerate(whole.outputs):
        mine = [o for part in parts for o in part.outputs if o.index == index]
        assert "".join(o.text for o in mine) == output.text
        assert [i for o in mine for i in o.token_ids] == output.token_ids
        assert [o.finish_reason for o in mine] == [None] * (len(mine) - 1) + [FinishReason.LENGTH]


def test_streams_side_by_side(llm: LLM):
    expected = [a.outputs[0].text for a in llm.generate(TEXTS[:2], GREEDY)]
    streams = [llm.stream(text, GREEDY) for text in TEXTS[:2]]
    texts = ["", ""]
    for step in range(12):
        for index, stream in enumerate(streams):
            part = next(stream)
            texts[index] += part.outputs[0].text
            assert part.finished == (step == 11)
    assert texts == expected
    assert [next(stream, None) for stream in streams] == [None, None]


def test_leaving_a_stream_ends_its_request(llm: LLM):
    stream = llm.stream(TEXTS[2], sampled(1, n=3, max_tokens=40))
    for _ in range(3):
        next(stream)
    assert scheduler_of(llm).stats.cache.num_used > 0
    stream.close()
    check_idle(llm)


def test_a_stream_that_nobody_begins_is_gone_with_its_iterator(llm: LLM):
    stream = llm.stream(TEXTS[0], GREEDY)
    assert scheduler_of(llm).has_unfinished
    del stream
    check_idle(llm)


def test_n_sequences_are_different_and_repeat(llm: LLM):
    [first], [again], [other] = (llm.generate(TEXTS[0], sampled(seed, n=3)) for seed in (7, 7, 8))
    assert [o.index for o in first.outputs] == [0, 1, 2]
    ids = [tuple(o.token_ids) for o in first.outputs]
    assert len(set(ids)) == 3
    assert ids == [tuple(o.token_ids) for o in again.outputs]
    assert not set(ids) & {tuple(o.token_ids) for o in other.outputs}
    assert first.usage["completion_tokens"] == 36


def test_seeds_repeat_in_any_company(llm: LLM):
    alone = llm.generate(TEXTS[1], sampled(3))[0].outputs[0].token_ids
    greedy_alone = llm.generate(TEXTS[0], GREEDY)[0].outputs[0].token_ids
    prompts = [TEXTS[1], TEXTS[0], TEXTS[1], TEXTS[1]]
    answers = llm.generate(prompts, [sampled(4), GREEDY, sampled(3), SamplingParams(max_tokens=20)])
    assert answers[2].outputs[0].token_ids == alone
    assert answers[0].outputs[0].token_ids != alone
    assert answers[1].outputs[0].token_ids == greedy_alone


def test_requests_without_a_seed_differ_unless_the_engine_has_one(options: dict, llm: LLM):
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    one, two = (a.outputs[0].token_ids for a in llm.generate([TEXTS[0]] * 2, free))
    assert one != two
    runs = []
    for _ in range(2):
        with LLM(**options, seed=11) as seeded:
            runs.append([a.outputs[0].token_ids for a in seeded.generate([TEXTS[0]] * 2, free)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_options_of_the_template_are_used_or_refused(llm: LLM) -> None:
    messages = [{"role": "user", "content": "the mill"}]
    options = {"add_generation_prompt": False, "chat_template_kwargs": {"colour": "red"}, "use_tqdm": False}
    assert llm.chat_prompts(messages, **options) == llm.chat_prompts(messages, add_generation_prompt=False)
    for name, value in (("chat_template", "{{ messages }}"), ("use_tqdm", True), ("lora_request", "x")):
        with pytest.raises(RequestError, match=f"{name} is not supported here"):
            llm.chat(messages, **{name: value})


def test_chat_goes_through_the_template(llm: LLM):
    messages = [{"role": "user", "content": "the mill"}]
    [answer] = llm.chat(messages, GREEDY)
    template = "<|user|>the mill<|end|><|assistant|>"
    assert answer.prompt_token_ids == llm.tokenizer.encode(template, add_special_tokens=False)
    parts = [{"role": "user", "content": [{"type": "text", "text": "the mill"}]}]
    assert llm.chat(parts, GREEDY)[0].prompt_token_ids == answer.prompt_token_ids
    several = llm.chat([messages, [*messages, {"role": "assistant", "content": "A"}, *messages]], GREEDY)
    assert several[0].outputs[0].token_ids == answer.outputs[0].token_ids
    longer = "<|user|>the mill<|end|><|assistant|>A<|end|>" + template
    assert several[1].prompt_token_ids == llm.tokenizer.encode(longer, add_special_tokens=False)


def test_a_failure_of_the_text_is_one_requests_own(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    from noria.engine.outputs import SequenceText

    original, bad = SequenceText.push, llm.tokenizer.encode(TEXTS[1])

    def push(self: SequenceText, token_ids: list[int]) -> str:
        if self._request.prompt_token_ids == bad and self._request.num_output_tokens == 3:
            raise UnicodeError("made up")
        return original(self, token_ids)

    expected = [a.outputs[0].token_ids for a in llm.generate(TEXTS, GREEDY)]
    monkeypatch.setattr(SequenceText, "push", push)
    answers = llm.generate(TEXTS, GREEDY)
    reasons = [a.outputs[0].finish_reason for a in answers]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
    assert [a.outputs[0].token_ids for a in answers] == [
        ids[:3] if index == 1 else ids for index, ids in enumerate(expected)
    ]


def test_a_closed_engine_says_so(options: dict):
    from noria.errors import EngineDeadError

    llm = LLM(**options)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("the", GREEDY)


def test_a_step_that_fails_is_the_last(options: dict, monkeypatch: pytest.MonkeyPatch):
    from noria.errors import EngineDeadError

    def fail(schedule: object) -> None:
        raise RuntimeError("the device is gone")

    with LLM(**options) as llm:
        monkeypatch.setattr(llm._front.engine.core.runner, "execute_model", fail)
        with pytest.raises(RuntimeError, match="the device is gone"):
            llm.generate("the", GREEDY)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            llm.generate("the", GREEDY)
