"""Attention on a TPU, counted: what noria's kernel and the one that comes with JAX copy and multiply for a layer.

    python benchmarks/tpu_kernels.py > benchmarks/results/tpu-kernels.jsonl

No TPU is needed, and nothing is timed. For noria's kernel the count is that of ops/ragged_paged_attention/tpu_cost.py,
which tests compare with the copies that the kernel makes when it is interpreted. For JAX's it is by hand from its code
(jax.experimental.pallas.ops.tpu.ragged_paged_attention, jax 0.10.2): tiles of `queries` tokens whatever rows they are
of; for each row in a tile all blocks of `pages` pages up to the row's end, also those after the tile's last token, and
whole blocks; products of all the tile's queries with each. It is given the cache after a scatter by XLA.

"least" is what no kernel can avoid: queries, results, new keys and values read and written once, and every key and
value that a row sees read once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from noria.ops.ragged_paged_attention.tpu_cost import SUBLANES, Count, count
from noria.ops.ragged_paged_attention.tpu_lines import LANES, Lines
from noria.ops.ragged_paged_attention.tpu_sizes import Sizes

BLOCK_SIZE = 16
MODELS: Mapping[str, tuple[int, int, int]] = MappingProxyType(  # attention heads, KV heads, size
    {"llama-3.1-8b": (32, 8, 128), "qwen3-4b": (32, 8, 128), "llama-3.1-70b on 8 chips": (8, 1, 128)}
)
Rows = Sequence[tuple[int, int]]  # tokens in the cache before, tokens computed
BATCHES: Mapping[str, Rows] = MappingProxyType(
    {
        "decode 64 rows at 1000": [(1000, 1)] * 64,
        "decode 64 rows at 4000": [(4000, 1)] * 64,
        "prefill 2048": [(0, 2048)],
        "prefill 2048 after 6144": [(6144, 2048)],
        "32 decode at 1000, prefill 512": [(1000, 1)] * 32 + [(0, 512)],
    }
)


def least(heads: int, kv_heads: int, head_dim: int, rows: Rows) -> int:
    token = 2 * kv_heads * head_dim * 2
    queries = 2 * heads * head_dim * 2
    return sum(tokens * (queries + 2 * token) + (before + tokens) * token for before, tokens in rows)


def noria(heads: int, kv_heads: int, head_dim: int, rows: Rows) -> Count:
    tokens, longest = sum(new for _, new in rows), max(before + new for before, new in rows)
    lines = Lines(kv_heads, head_dim, "bfloat16")
    width = -(-longest // BLOCK_SIZE)
    return count(Sizes.choose(lines, heads // kv_heads, BLOCK_SIZE, "bfloat16", tokens, width), rows)


def shipped(heads: int, kv_heads: int, head_dim: int, rows: Rows, queries: int = 32, most: int = 1024) -> Count:
    """queries, most: sizes that noria gave it; most: tokens of a block of pages, of which 4 MiB fit twice."""
    token = 2 * kv_heads * head_dim * 2
    tokens = min(most, (4 << 20) // (2 * token)) // BLOCK_SIZE * BLOCK_SIZE
    total, start = Count(), 0
    group = heads // kv_heads
    for before, new in rows:
        tiles = (start + new - 1) // queries - start // queries + 1  # that have tokens of the row
        blocks = tiles * -(-(before + new) // tokens)
        weights = blocks * 2 * kv_heads * (tokens // LANES) * (head_dim // LANES)
        total += Count(
            cache_read=blocks * tokens * token,
            cache_written=new * token,  # by the scatter
            weights=weights,
            passes=weights * (queries * group // SUBLANES),
            exponentials=blocks * tokens * heads * queries,
        )
        start += new
    size = -(-start // queries) * queries * heads * head_dim * 2
    return total + Count(queries=size, results=size)


def compare() -> Iterator[dict[str, Any]]:
    for model, (heads, kv_heads, head_dim) in MODELS.items():
        for batch, rows in BATCHES.items():
            shape = heads, kv_heads, head_dim, rows
            line: dict[str, Any] = {"model": model, "batch": batch, "least_bytes": least(*shape)}
            for name, found in (("noria", noria(*shape)), ("shipped", shipped(*shape))):
                line[name] = {
                    "bytes": found.bytes,
                    "of_least": round(found.bytes / line["least_bytes"], 3),
                    "mxu_weights": found.weights,
                    "mxu_passes": found.passes,
                    "exponentials": found.exponentials,
                }
            yield line


if __name__ == "__main__":
    for line in compare():
        sys.stdout.write(json.dumps(line) + "\n")
