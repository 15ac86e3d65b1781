"""Pieces that the answers of all generating routes share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from noria.engine.outputs import CompletionOutput, RequestOutput
from noria.server.generation import Job
from noria.server.schema.sampling import StreamOptions


def envelope(request_id: str, kind: str, model: str) -> dict[str, Any]:
    """The fields that a whole answer and every chunk of a stream begin with."""
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": model}


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage(results: Sequence[RequestOutput]) -> dict[str, Any]:
    """Of whole answers. A prompt counts once, however many answers it got."""
    return usage_of(
        sum(len(result.prompt_token_ids) for result in results),
        sum(len(output.token_ids) for result in results for output in result.outputs),
        sum(result.num_cached_tokens for result in results),
    )


class UsageCount:
    """The same while a stream runs, for the chunks that tell of it."""

    def __init__(self, job: Job, options: StreamOptions | None) -> None:
        self.is_told = options is not None and bool(options.include_usage)
        self._in_every_chunk = self.is_told and options is not None and bool(options.continuous_usage_stats)
        self._num_prompt_tokens = job.num_prompt_tokens
        self._num_completion_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}  # by prompt

    def add(self, index: int, part: RequestOutput) -> None:
        self._num_completion_tokens += sum(len(output.token_ids) for output in part.outputs)
        self._num_cached_tokens[index] = part.num_cached_tokens

    @property
    def so_far(self) -> dict[str, Any]:
        """What a chunk before the last says of it, as fields."""
        if not self.is_told:
            return {}
        return {"usage": self.total if self._in_every_chunk else None}

    @property
    def total(self) -> dict[str, Any]:
        return usage_of(self._num_prompt_tokens, self._num_completion_tokens, sum(self._num_cached_tokens.values()))


def ending(output: CompletionOutput) -> dict[str, Any]:
    """Why an answer ended; stop_reason (as in vLLM) is the stop token or stop string that ended it."""
    reason = output.finish_reason
    return {"finish_reason": None if reason is None else str(reason), "stop_reason": output.stop_reason}
