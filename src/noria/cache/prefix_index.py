"""Finding blocks that already hold the beginning of a prompt: chained block hashes and the index over them.

The hash of a block covers the hash of the block before it, so equal hashes mean equal tokens from the very start.
The idea is vLLM's automatic prefix caching. The digest is cryptographic (BLAKE2b, 256 bits, RFC 7693) because requests
of different tenants meet in one index, and it depends on nothing but its input, so processes agree on it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from noria.cache.block_pool import NULL_BLOCK
from noria.cache.layout import BlockIds, CacheLayout
from noria.engine.request import Request

_DIGEST_BYTES = 32
_NO_PARENT = bytes(_DIGEST_BYTES)

ExtraKey = str | int | bytes


def block_hash(parent: bytes | None, token_ids: Sequence[int], extra_keys: Sequence[ExtraKey] = ()) -> bytes:
    """The hash of a full block after the block with hash `parent` (None: the first block of a request).

    extra_keys: what the content depends on besides the tokens: tenant salt, adapter, hashes of images in the block.
    """
    digest = hashlib.blake2b(parent or _NO_PARENT, digest_size=_DIGEST_BYTES)
    digest.update(struct.pack(f"<I{len(token_ids)}i", len(token_ids), *token_ids))
    for key in extra_keys:
        digest.update(_encode(key))
    return digest.digest()


def _encode(key: ExtraKey) -> bytes:
    """Kind, length and bytes, so that no two lists of keys give the same string."""
    if isinstance(key, bytes):
        kind, raw = b"b", key
    elif isinstance(key, str):
        kind, raw = b"s", key.encode("utf-8", "surrogatepass")
    else:
        kind, raw = b"i", str(key).encode()
    return kind + struct.pack("<Q", len(raw)) + raw


def extend_hashes(request: Request, block_size: int, lookahead: int = 0) -> list[bytes]:
    """request.block_hashes, brought up to date with the full blocks of its tokens.

    lookahead: tokens behind a block that its content depends on, too.
    """
    hashes, token_ids = request.block_hashes, request.token_ids
    for index in range(len(hashes), (len(token_ids) - lookahead) // block_size):
        tokens = token_ids[index * block_size : (index + 1) * block_size + lookahead]
        hashes.append(block_hash(hashes[-1] if hashes else None, tokens, _extra_keys(request, index)))
    return hashes


def _extra_keys(request: Request, index: int) -> tuple[ExtraKey, ...]:
    # The chain carries the salt of the first block on to all others.
    return (request.cache_salt,) if index == 0 and request.cache_salt is not None else ()


class PrefixIndex:
    """(hash, group) -> block, and back. A block stays in the index until it is reused, also while it is free."""

    def __init__(self, layout: CacheLayout, block_size: int) -> None:
        self._layout = layout
        self._block_size = block_size
        self._full = [g for g, spec in enumerate(layout.groups) if spec.window is None]
        self._sliding = [g for g, spec in enumerate(layout.groups) if spec.window is not None]
        self._blocks: list[dict[bytes, int]] = [{} for _ in layout.groups]
        self._keys: dict[int, tuple[int, bytes]] = {}  # block -> (group, hash)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def add(self, group: int, digest: bytes, block: int) -> None:
        """Of two blocks with the same content the first stays in the index; the other is an ordinary block."""
        if self._blocks[group].setdefault(digest, block) == block:
            self._keys[block] = (group, digest)

    def discard(self, block: int) -> None:
        """To be called when the content of a block is about to be overwritten."""
        if (key := self._keys.pop(block, None)) is not None:
            group, digest = key
            del self._blocks[group][digest]

    def clear(self) -> None:
        self._keys.clear()
        for blocks in self._blocks:
            blocks.clear()

    def find(self, hashes: Sequence[bytes]) -> BlockIds:
        """The blocks of the longest prefix of `hashes` that every group can serve: per group one id per hash.

        A full group needs all blocks of the prefix, a sliding group only those that the token after it still sees;
        the others are the null block in its list.
        """
        length = self._longest(hashes)
        found = []
        for group, blocks in enumerate(self._blocks):
            first = min(length, self._first_needed(group, length))
            found.append([NULL_BLOCK] * first + [blocks[digest] for digest in hashes[first:length]])
        return tuple(found)

    def _longest(self, hashes: Sequence[bytes]) -> int:
        length = len(hashes)
        for group in self._full:
            blocks = self._blocks[group]
            length = next((i for i in range(length) if hashes[i] not in blocks), length)
        # A block that a window of this prefix misses is missed by all shorter prefixes that contain it, too.
        while (missing := self._last_missing(hashes, length)) is not None:
            length = missing
        return length

    def _last_missing(self, hashes: Sequence[bytes], length: int) -> int | None:
        for group in self._sliding:
            blocks = self._blocks[group]
            for i in range(length - 1, self._first_needed(group, length) - 1, -1):
                if hashes[i] not in blocks:
                    return i
        return None

    def _first_needed(self, group: int, length: int) -> int:
        return self._layout.groups[group].first_needed_block(length * self._block_size, self._block_size)

    def check_integrity(self, group_of: dict[int, int]) -> None:
        """group_of: block -> group for the blocks in use. Raises RuntimeError."""
        if len(self._keys) != sum(map(len, self._blocks)):
            raise RuntimeError("the two directions of the prefix index differ in size")
        for block, (group, digest) in self._keys.items():
            if self._blocks[group].get(digest) != block:
                raise RuntimeError(f"block {block} is not found under its own hash")
            if group_of.get(block, group) != group:
                raise RuntimeError(f"block {block} is used by group {group_of[block]} and indexed for group {group}")
