"""From a prompt and sampling parameters to requests, or a clear refusal that touches no other request."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from noria.batch.inputs import ShapingInputs
from noria.config import SamplingParams
from noria.engine.request import Request, derive_seed
from noria.errors import RequestError
from noria.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]
MAX_STOP_TOKENS_WITH_MIN_TOKENS = 16  # as many as the sampler can ban at a time


class Admission:
    """Checks and prepares requests. Holds what they are checked against."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        seed: int | None,
        max_logprobs: int = 20,
    ) -> None:
        """vocab_size: ids the model has an embedding for; those that the tokenizer does not know are padding, and
        refused. seed: of requests that bring none; None: unpredictable."""
        self._tokenizer = tokenizer
        self._vocab_size = min(vocab_size, tokenizer.vocab_size or vocab_size)
        self._max_logprobs = max_logprobs
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._random = random.Random(seed)

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text (None for a prompt of ids) and checked token ids. Raises RequestError."""
        text, token_ids = _split(prompt)
        if text is not None:
            if not text:
                raise RequestError("the prompt is empty; give some text, or token ids")
            token_ids = self._tokenizer.encode(text)
        assert token_ids is not None
        self._check(token_ids)
        return text, token_ids

    def requests(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> list[Request]:
        """params.n requests of one prompt. Raises RequestError."""
        self._check(token_ids)
        stops = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        self._check_shaping(params)
        bad_sequences = self._bad_sequences(params.bad_words or ())
        _check_choice(params, bad_sequences, stops, self._vocab_size)
        if params.stop_strings and not self._tokenizer.vocab_size:
            raise RequestError(
                "stop works on text, but there is no tokenizer (skip_tokenizer_init); use stop_token_ids"
            )
        if params.min_tokens and len(stops) > MAX_STOP_TOKENS_WITH_MIN_TOKENS:
            raise RequestError(
                f"min_tokens works with at most {MAX_STOP_TOKENS_WITH_MIN_TOKENS} stop tokens (those of the model "
                f"included), not {len(stops)}; name fewer in stop_token_ids"
            )
        if params.min_tokens > self._max_model_len - len(token_ids):
            raise RequestError(
                f"min_tokens ({params.min_tokens}) and the prompt ({len(token_ids)} tokens) exceed max_model_len "
                f"({self._max_model_len}); lower min_tokens"
            )
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        others = params
        if params.n > 1 and params.prompt_logprobs is not None:  # one sequence tells them, for all
            others = dataclasses.replace(params, prompt_logprobs=None)
        return [
            Request(
                request_id=f"{request_id}:{index}",
                prompt_token_ids=token_ids,
                sampling_params=others if index else params,
                key=derive_seed(seed, index),
                stop_token_ids=stops,
                cache_salt=cache_salt,
                priority=priority,
                bad_sequences=bad_sequences,
            )
            for index in range(params.n)
        ]

    def _check_shaping(self, params: SamplingParams) -> None:
        """That the token ids in the parameters are some, and none of the vocabulary's padding; and max_logprobs."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_token_ids"):
            for item in getattr(params, name) or ():
                token_id = item[0] if name == "logit_bias" else item
                if not 0 <= token_id < self._vocab_size:
                    raise RequestError(f"{name}: {token_id} is not a token id; ids are 0 to {self._vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self._max_logprobs:
                raise RequestError(
                    f"{name} ({getattr(params, name)}) exceeds the engine's max_logprobs ({self._max_logprobs}); "
                    "ask for fewer"
                )

    def _bad_sequences(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """How the tokenizer writes the words, at the beginning of a text and after a space."""
        sequences: dict[tuple[int, ...], None] = {}  # an ordered set
        for word in words:
            if not self._tokenizer.vocab_size:
                raise RequestError(
                    "bad_words works on text, but there is no tokenizer (skip_tokenizer_init); use bad_token_ids"
                )
            try:
                bare, spaced = (
                    tuple(self._tokenizer.encode(text, add_special_tokens=False))
                    for text in (word.lstrip(), " " + word.lstrip())
                )
            except RequestError as error:
                raise RequestError(f"bad_words: {word!r} is no text: {error}") from None
            if not bare:
                raise RequestError(f"bad_words: {word!r} has no tokens; leave it out")
            for sequence in (bare, spaced) if spaced[-len(bare) :] != bare else (bare,):
                if len(sequence) > ShapingInputs.MAX_BAD_LENGTH:
                    raise RequestError(
                        f"bad_words: {word!r} is {len(sequence)} tokens long; at most {ShapingInputs.MAX_BAD_LENGTH} "
                        "are possible"
                    )
                sequences[sequence] = None
        if sum(len(sequence) > 1 for sequence in sequences) > ShapingInputs.MAX_BAD:
            raise RequestError(
                f"bad_words: at most {ShapingInputs.MAX_BAD} ways to write words of several tokens are possible (most "
                "words have two); name fewer"
            )
        return tuple(sequences)

    def _check(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty; give some text, or token ids")
        if len(token_ids) >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, but max_model_len ({self._max_model_len}) must hold it and "
                "at least one new token; shorten the prompt or raise max_model_len"
            )
        for token_id in token_ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise RequestError(f"a prompt of token ids must hold integers, not {token_id!r}")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < self._vocab_size)
            raise RequestError(f"the prompt holds {wrong}, which is no token id; ids are 0 to {self._vocab_size - 1}")


def _check_choice(
    params: SamplingParams, bad_sequences: tuple[tuple[int, ...], ...], stops: frozenset[int], vocab_size: int
) -> None:
    """That some token can be sampled."""
    allowed = params.allowed_token_ids
    excluded = {*(params.bad_token_ids or ()), *(sequence[0] for sequence in bad_sequences if len(sequence) == 1)}
    if params.min_tokens:
        excluded |= stops
    if len(excluded) >= vocab_size if allowed is None else excluded.issuperset(allowed):
        name = "bad_token_ids" if allowed is None else "allowed_token_ids"
        raise RequestError(
            f"{name} leaves nothing to sample: every token is excluded by it, by bad_token_ids or bad_words, or "
            "(before min_tokens) as a stop token"
        )


def _ids_of(array: np.ndarray) -> list[int]:
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise RequestError(
            f"a prompt that is an array must be one row of integers, not of shape {array.shape} and dtype {array.dtype}"
        )
    return array.tolist()


def _split(prompt: Prompt) -> tuple[str | None, list[int] | None]:
    if isinstance(prompt, Mapping):
        keys = set(prompt) & {"prompt", "prompt_token_ids"}
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if len(keys) != 1 or unknown:
            raise RequestError("a prompt dictionary must have either prompt or prompt_token_ids, and nothing else")
        prompt = prompt[keys.pop()]
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, np.ndarray):
        return None, _ids_of(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        return None, [int(item) if isinstance(item, np.integer) else item for item in prompt]
    raise RequestError(f"a prompt must be a string or a list of token ids, not {type(prompt).__name__}")
