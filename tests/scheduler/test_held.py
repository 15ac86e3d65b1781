"""Requests that are not ready: passed over, and in their place as soon as they are."""

from __future__ import annotations

import pytest
from fake_runner import expected_tokens
from scheduler_loop import Loop

from noria.config import SamplingParams
from noria.engine.request import FinishReason, Request
from noria.errors import RequestError


def hold(loop: Loop, name: str) -> Request:
    request = Request(name, [1, 2, 3], SamplingParams(max_tokens=4), key=0)
    loop.scheduler.add(request, hold=True)
    return request


def test_nobody_waits_for_one_that_is_held() -> None:
    loop = Loop(max_num_seqs=1)
    held = hold(loop, "held")
    others = [loop.add(name, [4, 5]) for name in ("a", "b")]
    assert (loop.scheduler.num_waiting, loop.scheduler.can_advance) == (3, True)
    while not others[0].is_finished:
        loop.step()
    assert held.num_computed_tokens == 0
    loop.scheduler.release(held)
    loop.step()
    assert held.num_computed_tokens > 0  # it came first, so it is before b
    assert others[1].num_computed_tokens == 0
    loop.finish()
    assert held.output_token_ids == expected_tokens([1, 2, 3], 4)


def test_one_that_is_held_alone() -> None:
    loop = Loop()
    held = hold(loop, "held")
    assert (loop.scheduler.has_unfinished, loop.scheduler.can_advance) == (True, False)
    assert not loop.step().num_scheduled_tokens
    with pytest.raises(RequestError, match="in use"):
        hold(loop, "held")
    assert loop.scheduler.request("held") is held
    assert loop.scheduler.abort(["held"]) == [held]
    assert held.finish_reason is FinishReason.ABORT
    assert not loop.scheduler.has_unfinished
    loop.scheduler.check_integrity()
    assert loop.scheduler.num_waiting == 0
