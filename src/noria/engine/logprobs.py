"""Log-probabilities as a caller sees them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from noria.engine.request import Request
from noria.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token in one place. Never infinite nor NaN, so that it can be written as JSON."""

    logprob: float
    rank: int  # 1 and the number of tokens that were likelier
    decoded_token: str | None  # its text by itself; None without a tokenizer


# By token id: first the token that is there, then the likeliest ones, as many as were asked for.
TokenLogprobs = dict[int, Logprob]
Figures = Iterable[tuple[int, float, int]]  # as in Request


class SequenceLogprobs:
    """The log-probabilities of one sequence while it grows."""

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._has_prompt = request.sampling_params.prompt_logprobs is not None  # and nobody has got it yet
        self.cumulative = 0.0

    def take(self, first: int, stop: int) -> list[TokenLogprobs] | None:
        """Of the output tokens first to stop - 1; None when the request did not ask. Each is taken once."""
        if self._request.sampling_params.logprobs is None:
            return None
        news = self._request.logprobs[first:stop]
        for figures in news:  # one by one, so that the sum does not depend on how many come at once
            self.cumulative += figures[0][1]
        return [self._named(figures) for figures in news]

    def take_prompt(self) -> list[TokenLogprobs | None] | None:
        """Of the tokens of the prompt, the first of which has none, once; None when there is nothing to take."""
        if not self._has_prompt:
            return None
        self._has_prompt = False
        return [None, *(self._named(figures) if figures else None for figures in self._request.prompt_logprobs)]

    def _named(self, figures: Figures) -> TokenLogprobs:
        named: TokenLogprobs = {}
        for token_id, logprob, rank in figures:
            if token_id not in named:  # the token itself may be among the likeliest
                named[token_id] = Logprob(logprob, rank, self._text(token_id))
        return named

    def _text(self, token_id: int) -> str | None:
        if not self._tokenizer.vocab_size:
            return None
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
