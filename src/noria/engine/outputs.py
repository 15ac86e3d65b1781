"""What a caller gets back, and the text side of a request: detokenization and stop strings."""

from __future__ import annotations

from dataclasses import dataclass, field

from noria.engine.logprobs import SequenceLogprobs, TokenLogprobs
from noria.engine.request import FinishReason, Request
from noria.text.detokenizer import Detokenizer
from noria.text.stop import StopStrings
from noria.text.tokenizer import Tokenizer


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence: what is new since the last output in a stream, everything in a final result."""

    index: int  # of n
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # None while it runs
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    logprobs: list[TokenLogprobs] | None = None  # one for each of token_ids; None when the request did not ask
    cumulative_logprob: float | None = None  # of all tokens so far, also in a stream; None like logprobs


@dataclass(slots=True)
class RequestMetrics:
    """Seconds of time.perf_counter()."""

    arrival_time: float
    scheduled_time: float | None = None  # of its first sequence: it left the queue
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt, or, in a stream, the part of it that a step added."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # in a stream only those that have news
    finished: bool
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    metrics: RequestMetrics
    # One for each token of the prompt, the first None; in a stream only of the output that brings them.
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def usage(self) -> dict[str, int]:
        """Token counts with OpenAI's names. Of a final result: in a stream, outputs are parts."""
        completion = sum(len(output.token_ids) for output in self.outputs)
        return {
            "prompt_tokens": len(self.prompt_token_ids),
            "completion_tokens": completion,
            "total_tokens": len(self.prompt_token_ids) + completion,
            "cached_tokens": self.num_cached_tokens,
        }

    def add(self, part: RequestOutput) -> None:
        """Takes the next output of the stream in, so that this one covers everything up to it."""
        known = {output.index: output for output in self.outputs}
        for new in part.outputs:
            old = known.get(new.index)
            if old is None:
                self.outputs.append(old := CompletionOutput(new.index))
            old.text += new.text
            old.token_ids += new.token_ids
            old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
            if new.logprobs is not None:
                old.logprobs = [] if old.logprobs is None else old.logprobs
                old.logprobs += new.logprobs
                old.cumulative_logprob = new.cumulative_logprob
        self.outputs.sort(key=lambda output: output.index)
        if part.prompt_logprobs is not None:
            self.prompt_logprobs = part.prompt_logprobs
        self.finished, self.num_cached_tokens = part.finished, part.num_cached_tokens


class SequenceText:
    """The text of one sequence while it grows."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.sampling_params
        self._request = request
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._num_tokens = 0
        self.logprobs = SequenceLogprobs(tokenizer, request)

    def push(self, token_ids: list[int]) -> str:
        """The text that the new tokens make safe to emit. Finishes the request when a stop string is complete."""
        request, params = self._request, self._request.sampling_params
        text = ""
        for token_id in token_ids:
            self._num_tokens += 1
            if self._is_hidden(token_id):
                continue
            piece = self._detokenizer.push((token_id,))
            text += self._stops.push(piece, check=self._num_tokens >= params.min_tokens)
            if self._stops.matched is not None:
                # The string may end a few tokens before a limit or stop token that this step reached as well.
                del request.token_ids[request.num_prompt_tokens + self._num_tokens :]
                request.finish(FinishReason.STOP, self._stops.matched)
                return text
        if request.is_finished:
            text += self._stops.push(self._detokenizer.finish())
            if self._stops.matched is not None:
                request.finish(FinishReason.STOP, self._stops.matched)
            text += self._stops.finish()
        return text

    def _is_hidden(self, token_id: int) -> bool:
        """The stop token that ended the request is not part of its text, unless asked for."""
        request = self._request
        ended = request.is_finished and self._num_tokens == request.num_output_tokens
        return ended and request.stop_reason == token_id and not request.sampling_params.include_stop_str_in_output
