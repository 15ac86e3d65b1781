"""A runner without a model: it believes schedules only, and checks that the cache holds what a model would read.

The "key and value" of a position is a digest of all tokens up to it, as the real ones are a function of them, and of
the request's random key, which stands for the cache salt here: tests give the same to requests that may share content.
The next token is a function of the digest read back from the cache, so the output of a request is known beforehand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from noria.cache.layout import CacheLayout
from noria.scheduler.schedule import Schedule, StepResult

VOCABULARY = 50


def chain(before: bytes, token_id: int) -> bytes:
    return hashlib.blake2b(before + token_id.to_bytes(4, "little"), digest_size=8).digest()


def sample(content: bytes) -> int:
    return content[0] % VOCABULARY


def expected_tokens(prompt: list[int], count: int, key: int = 0) -> list[int]:
    last, tokens = Row(key, prompt, None).right()[-1], []
    for _ in range(count):
        tokens.append(sample(last))
        last = chain(last, tokens[-1])
    return tokens


@dataclass
class Row:
    key: int
    token_ids: list[int]
    tables: list[list[int]] | None  # None while preempted
    stops: frozenset[int] = frozenset()
    over: bool = False  # a stop token was sampled: what comes after it means nothing
    contents: list[bytes] = field(default_factory=list)
    rank: int = 0

    def right(self) -> list[bytes]:
        """What the cache must hold for each of the tokens."""
        for token_id in self.token_ids[len(self.contents) :]:
            before = self.contents[-1] if self.contents else self.key.to_bytes(8, "little")
            self.contents.append(chain(before, token_id))
        return self.contents


class FakeRunner:
    def __init__(self, layout: CacheLayout, num_blocks: int, block_size: int, knows_stops: bool = True) -> None:
        """knows_stops: whether it ends bursts at stop tokens, or leaves that to the host."""
        self.layout = layout
        self.knows_stops = knows_stops
        self.num_passes = 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.rows: dict[str, Row] = {}
        # (block, offset) -> (group, content); the blocks of a rank are counted on from those of the rank before.
        self.cache: dict[tuple[int, int], tuple[int, bytes]] = {}

    def step(self, schedule: Schedule) -> StepResult:
        computed, counts = self._apply(schedule), schedule.num_scheduled_tokens
        for name, drafts in schedule.draft_token_ids.items():
            assert 0 < len(drafts) < counts[name]
            self.rows[name].token_ids += drafts
        assert computed.keys() == counts.keys()
        if not schedule.is_burst:
            self.num_passes += 1
            spans = {name: range(at, at + counts[name]) for name, at in computed.items()}
            return StepResult(self._pass(spans, schedule.draft_token_ids))
        assert max(counts.values()) == schedule.num_steps
        sampled: dict[str, list[int]] = {name: [] for name in computed}
        for index in range(schedule.num_steps):
            alive = [name for name in computed if index < counts[name] and not self._is_over(name)]
            self.num_passes += bool(alive)
            news = self._pass({name: range(computed[name] + index, computed[name] + index + 1) for name in alive})
            assert news.keys() == set(alive), "a row of a burst did not decode"
            for name, tokens in news.items():
                sampled[name] += tokens
        return StepResult(sampled)

    def _is_over(self, request_id: str) -> bool:
        return self.knows_stops and self.rows[request_id].over

    def _pass(
        self, spans: dict[str, range], drafts: Mapping[str, list[int]] = MappingProxyType({})
    ) -> dict[str, list[int]]:
        """One forward pass over positions of the requests; returns what it samples. drafts: the last known tokens."""
        # Planned before the host knew that a stop token would end a burst early: nobody will ask for what comes of it.
        lost = {
            name for name, span in spans.items() if self._is_over(name) and span.stop > len(self.rows[name].token_ids)
        }
        # What was computed before must be there before this step writes: no reading of blocks that are in the making.
        for request_id in spans.keys() - lost:
            self._check_reads(request_id, spans[request_id].start, spans[request_id].start)
        written: set[tuple[int, int]] = set()
        for request_id, span in spans.items():
            self._write(request_id, span, written, request_id in lost)
        sampled = {}
        for request_id, span in spans.items():
            if request_id in lost:
                sampled[request_id] = [VOCABULARY]
                continue
            for position in span:
                self._check_reads(request_id, position, position + 1)
            row = self.rows[request_id]
            if span.stop == len(row.token_ids):
                sampled[request_id] = self._verify(row, drafts.get(request_id, []))
                row.over |= sampled[request_id][0] in row.stops
        return sampled

    def _verify(self, row: Row, drafts: list[int]) -> list[int]:
        """What is sampled behind the tokens from before the drafts on, up to the first that is another than the draft;
        these replace the drafts."""
        assert row.tables is not None
        known = len(row.token_ids) - len(drafts)
        sampled: list[int] = []
        for place, draft in enumerate([*drafts, None], known - 1):
            block = row.tables[0][place // self.block_size]
            sampled.append(sample(self.cache[block, place % self.block_size][1]))
            if sampled[-1] != draft:
                break
        row.token_ids[known:] = sampled
        del row.contents[len(row.token_ids) - 1 :]
        return sampled

    def _apply(self, schedule: Schedule) -> dict[str, int]:
        """Finished, preempted, new, cached; returns the computed tokens of the scheduled requests."""
        computed = {}
        for request_id in schedule.finished_ids:
            del self.rows[request_id]  # KeyError: reported twice, or never seen
        for request_id in schedule.preempted_ids:
            assert self.rows[request_id].tables is not None
            self.rows[request_id].tables = None
        for new in schedule.new_requests:
            assert new.request_id not in self.rows
            assert 0 < new.num_prompt_tokens <= len(new.token_ids)
            tables = self._tables(new.block_ids, new.rank)
            row = Row(new.key, list(new.token_ids), tables, new.stop_token_ids, rank=new.rank)
            self.rows[new.request_id] = row
            computed[new.request_id] = new.num_computed_tokens
        for cached in schedule.cached_requests:
            row = self.rows[cached.request_id]
            if cached.resumed:
                assert row.tables is None
                assert cached.token_ids is not None
                assert cached.token_ids == row.token_ids
                row.tables, row.rank = self._tables(cached.new_block_ids, cached.rank), cached.rank
            else:
                assert row.tables is not None
                assert cached.token_ids is None
                for table, blocks in zip(row.tables, self._tables(cached.new_block_ids, row.rank), strict=True):
                    assert 0 not in blocks
                    table.extend(blocks)
            computed[cached.request_id] = cached.num_computed_tokens
        return computed

    def _tables(self, block_ids: tuple[list[int], ...], rank: int) -> list[list[int]]:
        assert len(block_ids) == self.layout.num_groups
        assert all(0 <= block < self.num_blocks for blocks in block_ids for block in blocks)
        return [[block and rank * self.num_blocks + block for block in blocks] for blocks in block_ids]

    def _write(self, request_id: str, span: range, written: set[tuple[int, int]], lost: bool) -> None:
        row = self.rows[request_id]
        assert row.tables is not None
        assert len(span) > 0
        assert lost or span.stop <= len(row.token_ids)
        right = row.right()
        for group, table in enumerate(row.tables):
            for position in span:
                place = table[position // self.block_size], position % self.block_size
                assert place[0] != 0, "a token would be written to the null block"
                assert place not in written, "two tokens would be written to one place"
                written.add(place)
                self.cache[place] = (group, b"" if lost else right[position])

    def _check_reads(self, request_id: str, position: int, stop: int) -> None:
        """That the query at `position` finds the right content before `stop`, as far as it sees."""
        row = self.rows[request_id]
        assert row.tables is not None
        right = row.right()
        for group, (spec, table) in enumerate(zip(self.layout.groups, row.tables, strict=True)):
            oldest = 0 if spec.window is None else max(0, position - spec.window + 1)
            for past in range(oldest, stop):
                block = table[past // self.block_size]
                assert block != 0, f"{request_id} would read the null block at {past} in group {group}"
                assert self.cache[block, past % self.block_size] == (group, right[past])
