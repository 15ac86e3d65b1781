"""The byte alphabet of GPT-2: every byte as one printable character.

Source: the encoder published with Radford et al., Language Models are Unsupervised Multitask Learners, 2019: the bytes
that are printable in Latin-1 stand for themselves, the others are numbered from U+0100 on in ascending order.
"""

from __future__ import annotations


def byte_alphabet() -> list[str]:
    """The character that stands for each of the 256 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class ByteAlphabet:
    """Translates the text of byte-level tokens back to the bytes it stands for."""

    def __init__(self) -> None:
        alphabet = {ord(char): byte for byte, char in enumerate(byte_alphabet())}
        # what is below U+0100 and no letter of the alphabet must not pass as a byte, so it becomes what Latin-1 lacks
        self._table = dict.fromkeys(range(0x100), 0x100) | alphabet

    def to_bytes(self, token: str) -> bytes:
        """The bytes of a token; a token with a character outside the alphabet is literal text."""
        try:
            return token.translate(self._table).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode("utf-8")
