"""Encoding with the `tokenizers` package, so that other threads can work meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer as Library

_LONG_TEXT = 4096  # characters


def encoder(library: Library) -> Callable[[str], list[int]]:
    """Text -> ids, special tokens in the text parsed as such and none added.

    The package lets go of the interpreter lock only while it encodes a batch. A short text is not worth that: the
    first batch starts the package's threads.
    """

    def encode(text: str) -> list[int]:
        if len(text) < _LONG_TEXT:
            return library.encode(text, add_special_tokens=False).ids
        return library.encode_batch_fast([text], add_special_tokens=False)[0].ids

    return encode
