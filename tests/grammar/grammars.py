"""A small vocabulary, and what may follow a text under a grammar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from noria.config import StructuredOutputsParams
from noria.grammar.compiler import GrammarCompiler
from noria.grammar.matcher import Matcher
from noria.text.tokenizer import Tokenizer, Vocabulary

EOS, TOOL, END_TOOL, EMPTY = 256, 257, 258, 259
WORDS = ("ab", '{"', "true", "the", "<a>", '":')
PIECES = (*(bytes([byte]) for byte in range(256)), b"</s>", b"<tool>", b"</tool>", b"", *(w.encode() for w in WORDS))


def encode(text: str) -> list[int]:
    return list(text.encode())


def make_tokenizer(pieces: tuple[bytes, ...] = PIECES) -> Tokenizer:
    special = frozenset({EOS, TOOL, END_TOOL} if pieces else ())
    ends = (EOS,) if pieces else ()
    return Tokenizer(Vocabulary(encode_text=encode, pieces=pieces, special_ids=special, eos_token_ids=ends))


@contextmanager
def compiler(tokenizer: Tokenizer | None = None) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer or make_tokenizer(), (EOS,))
    yield made
    made.close()


def begin(params: StructuredOutputsParams) -> Matcher:
    with compiler() as made:
        return made.compile(params).result(10).copy()


def allowed(matcher: Matcher) -> set[int]:
    row = np.zeros(-(-len(PIECES) // 32), np.int32)
    matcher.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def write(matcher: Matcher, text: str) -> str | None:
    """Token by token, byte by byte but for <tool> and </tool>. Returns what comes of it: "more", "may end", "must end",
    or what of the text was refused."""
    rest = text
    while rest:
        special = next((t for t in (TOOL, END_TOOL) if rest.startswith(PIECES[t].decode())), None)
        tokens = [special] if special is not None else list(rest[0].encode())
        for token in tokens:
            if token not in allowed(matcher):
                return f"refused {rest}"
            matcher.accept(token)
            assert matcher.error is None
        rest = rest[len(PIECES[special]) :] if special is not None else rest[1:]
    found = allowed(matcher)
    return "must end" if found == {EOS} else "may end" if EOS in found else "more"
