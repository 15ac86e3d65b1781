"""Compiles grammars in threads of its own, so that nobody who runs has to wait for one."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from noria.config import StructuredOutputsParams
from noria.errors import RequestError
from noria.grammar.matcher import Matcher
from noria.grammar.source import check_size, grammar_source
from noria.grammar.vocabulary import grammar_tokenizer
from noria.text.tokenizer import Tokenizer

TIMEOUT_S = 10.0  # that a grammar may take; its size and the compiler's own limits keep most below a second
_NUM_THREADS = 2
_CACHE_SIZE = 64  # grammars that are kept, good ones and bad ones
# Half of the library's own limits: what a step may take of everybody's time (about 50 ms at most), and the memory that
# a grammar may grow to (about 100 MB).
_STEP_LEXER_FUEL = 100_000
_MAX_LEXER_STATES = 100_000


class GrammarCompiler:
    """For one tokenizer. May be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        """eos_token_ids: those that end an answer when its grammar is complete."""
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < tokenizer.vocab_size)
        self._cache: OrderedDict[StructuredOutputsParams, Future[Matcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def compile(self, params: StructuredOutputsParams) -> Future[Matcher]:
        """A matcher at its beginning, to be copied, not used; or RequestError, which says what is wrong."""
        try:
            check_size(params)
        except RequestError as error:  # not worth a place among those that are kept
            refused: Future[Matcher] = Future()
            refused.set_exception(error)
            return refused
        with self._lock:
            if (future := self._cache.get(params)) is not None:
                self._cache.move_to_end(params)
                return future
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="noria-grammar")
            future = self._cache[params] = self._pool.submit(self._compile, params)
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
            return future

    def validate(self, params: StructuredOutputsParams) -> None:
        """Waits for the compilation. Raises RequestError."""
        try:
            self.compile(params).result(TIMEOUT_S)
        except TimeoutError:
            raise too_long(params) from None

    async def validate_async(self, params: StructuredOutputsParams) -> None:
        """The same without a thread that waits, and whoever else waits for the same grammar is not concerned when the
        caller gives up."""
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self.compile(params))), TIMEOUT_S)
        except TimeoutError:
            raise too_long(params) from None

    def warm_up(self) -> None:
        """Prepares the vocabulary, which holds up the whole process for a moment."""
        if self._eos_token_ids:
            self._vocabulary()

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
            self._cache.clear()

    def _vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:  # so that two threads do not make two
            return self._ll_tokenizer

    @cached_property
    def _ll_tokenizer(self) -> LLTokenizer:
        return grammar_tokenizer(self._tokenizer, self._eos_token_ids)

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        pieces = {i: self._tokenizer.token_bytes(i) for i in self._tokenizer.special_ids}
        return {piece.decode("utf-8", errors="replace"): i for i, piece in pieces.items() if piece}

    def _compile(self, params: StructuredOutputsParams) -> Matcher:
        if not self._tokenizer.vocab_size:
            raise RequestError(
                "structured_outputs works on text, but there is no tokenizer (skip_tokenizer_init); leave it out"
            )
        if not self._eos_token_ids:
            raise RequestError("structured_outputs needs an end-of-sequence token, and the tokenizer declares none")
        try:
            source = grammar_source(params, self._special_tokens)
            limits = LLParserLimits(
                step_lexer_fuel=_STEP_LEXER_FUEL, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
            )
            matcher = Matcher(
                LLMatcher(self._vocabulary(), source, log_level=0, limits=limits),
                frozenset(self._eos_token_ids),
                self._tokenizer.vocab_size,
            )
            # Some mistakes show only when the first mask is asked for.
            error = matcher.error
            if error is None:
                first = matcher.copy()
                first.fill(np.zeros(-(-self._tokenizer.vocab_size // 32), np.int32))
                error = first.error
        except RequestError:
            raise
        except Exception as problem:  # the library's words for what it was given, such as text that is not Unicode
            error = " ".join(str(problem).split()) or type(problem).__name__
        if error is not None:
            raise RequestError(f"structured_outputs: {params.kind} cannot be used: {error}")
        return matcher


def too_long(params: StructuredOutputsParams) -> RequestError:
    """For a grammar that was not ready in time."""
    return RequestError(
        f"structured_outputs: {params.kind} takes longer than {TIMEOUT_S:g} s to compile; make it simpler"
    )
