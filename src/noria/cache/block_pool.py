"""The pool of cache blocks: who may write where. Knows numbers only, not what the blocks hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

NULL_BLOCK = 0  # padding is written here; stands for blocks that left the window in a table; never handed out


class BlockPool:
    """Blocks 1 .. num_blocks - 1 with reference counts; free ones wait in the order in which they will be reused.

    Freed blocks whose content may be used again queue up at the end (least recently used first out), the others are
    reused at once. All operations are O(1) per block: an OrderedDict is a hash table over a doubly linked list.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a block pool needs at least 2 blocks (one is the null block), not {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, those first that were free the longest.

        Raises RuntimeError when there are fewer; the caller asks num_free before.
        """
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} free")
        popitem, references = self._free.popitem, self._references
        blocks = [popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more reference to a block that is in use, or that is free but still holds its content."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def release(self, block: int, keep_content: bool) -> None:
        """One reference less. The last one makes the block free, to be reused late if its content is worth keeping."""
        if self._references[block] < 1:
            raise RuntimeError(f"block {block} was released more often than it was taken")
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if not keep_content:
                self._free.move_to_end(block, last=False)

    def check_integrity(self, references: Sequence[int]) -> None:
        """Compares with the reference counts that the tables imply, [num_blocks]. Raises RuntimeError."""
        for block, (held, implied) in enumerate(zip(self._references, references)):
            if held != implied:
                raise RuntimeError(f"block {block} counts {held} references, the tables hold {implied}")
            if (block in self._free) != (held == 0 and block != NULL_BLOCK):
                state = "is" if block in self._free else "is not"
                raise RuntimeError(f"block {block} has {held} references and {state} in the free list")
