"""What requests take of the results of a step."""

from __future__ import annotations

import logging

from noria.engine.request import FinishReason, Request
from noria.ops.sampling.types import NOTHING_ALLOWED
from noria.scheduler.schedule import StepResult

_log = logging.getLogger(__name__)
_NO_NUMBER = "no token can be sampled, because the model's output is not a number; are its weights damaged?"
_NOTHING_ALLOWED = (
    "no token can be sampled: structured_outputs, allowed_token_ids, bad_words, bad_token_ids and (before min_tokens) "
    "stop tokens exclude all of them together; leave one of them out"
)


def take_tokens(request: Request, result: StepResult, least: int, most: int) -> list[int]:
    """The tokens taken: all that were sampled, or those up to the one that ends the request.

    Raises RuntimeError when a request that goes on did not get least to most tokens.
    """
    sampled = result.sampled_token_ids.get(request.request_id, [])
    for count, token_id in enumerate(sampled, 1):
        if token_id < 0:
            why = _NOTHING_ALLOWED if token_id == NOTHING_ALLOWED else None
            _log.error("request %s: %s", request.request_id, why or _NO_NUMBER)
            request.finish(FinishReason.ERROR, why)
            return sampled[: count - 1]
        if request.sampling_params.logprobs is not None:
            request.logprobs.append(result.logprobs[request.request_id][count - 1])
        request.append(token_id)
        if request.finish_reason is not None:
            return sampled[:count]
    if not least <= len(sampled) <= most:
        raise RuntimeError(
            f"the step yielded {len(sampled)} tokens for request {request.request_id}, which was due for {most}"
        )
    return sampled


def take_prompt_logprobs(request: Request, result: StepResult) -> None:
    """A request that was preempted meanwhile keeps them, and computes them again only if others are missing."""
    if not request.is_finished and request.request_id in result.prompt_logprobs:
        first, news = result.prompt_logprobs[request.request_id]
        request.prompt_logprobs[first - 1 : first - 1 + len(news)] = news
