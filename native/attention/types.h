// What ragged paged attention works on. ops/ragged_paged_attention/types.py describes the batch and the cache.
#pragma once

#include "runtime/types.h"

namespace noria::attention {

// Sums over the KV sequence are cut at the same places whoever computes them, so that results do not depend on it: a
// tile's weights follow from one maximum, and the sums of a part are finished before they are added to those before.
constexpr int kKeyTile = 64;           // keys whose scores are computed together
constexpr int kPart = 4 * kKeyTile;    // keys that one thread can take alone
constexpr int kQueryRows = 96;         // queries (tokens times heads) that use a tile while it is in the caches

// The numbers are the places in CACHE_DTYPES of types.py.
enum class CacheDtype : int32_t { kFloat32, kBFloat16, kFloat16, kE4M3, kE5M2, kInt8 };
constexpr int kCacheDtypes = 6;

static constexpr int64_t cell_bytes(CacheDtype dtype) {
  return dtype == CacheDtype::kFloat32 ? 4 : dtype == CacheDtype::kBFloat16 || dtype == CacheDtype::kFloat16 ? 2 : 1;
}

struct Problem {
  int64_t tokens, rows;                       // T, R
  int64_t heads, kv_heads, head_dim;          // heads: a multiple of kv_heads
  Dtype dtype;                                // of q, k, v and out
  const void *q, *k, *v;                      // [T, heads, head_dim], [T, kv_heads, head_dim] twice
  void* out;                                  // [T, heads, head_dim]
  CacheDtype cache_dtype;
  uint8_t* cache;                             // [cache_blocks, block_size, kv_heads, 2, head_dim]
  float* cache_scale;                         // [cache_blocks, block_size, kv_heads, 2] for int8, else null
  int64_t cache_blocks, block_size;
  const int32_t *token_rows, *positions;      // [T]
  const int32_t *query_start, *seq_lens;      // [R + 1], [R]
  const int32_t* table;                       // [R, table_width]
  int64_t table_width;
  int64_t offset, window;                     // of the layer
  float scale, soft_cap;                      // soft_cap 0: none

  int64_t group() const { return heads / kv_heads; }
  int64_t row_tokens(int64_t row) const { return query_start[row + 1] - query_start[row]; }
  int64_t first_position(int64_t row) const { return seq_lens[row] - row_tokens(row); }
};

// Some tokens of a row, with some of the query heads of one KV head: at most kQueryRows, or one token. They look at the
// keys of parts first_part <= part < last_part.
struct Item {
  int64_t row, kv_head;
  int64_t head, heads;    // the first query head and their number
  int64_t token, tokens;  // the first token (of all T) and their number
  int64_t first_part, last_part;
  float* state;  // where the sums of the one part go; null: all parts are here, and the result goes to `out`

  int64_t queries() const { return heads * tokens; }
};

static constexpr int64_t padded(int64_t count) { return ceil_div(count, kLanes) * kLanes; }
// Floats of what is known of `queries` after some of the keys: see State in kernels.h.
static constexpr int64_t state_floats(int64_t queries, int64_t head_dim) {
  return padded(queries) * (1 + kLanes) + queries * padded(head_dim);
}
// Floats of scratch memory, aligned to 64 bytes, that a thread needs for items of so many queries.
static constexpr int64_t scratch_floats(int64_t queries, int64_t head_dim) {
  return 2 * state_floats(queries, head_dim) + 2 * padded(queries) + queries * (padded(head_dim) + kKeyTile) +
         (2 * kKeyTile + kLanes) * padded(head_dim);
}

// The same functions compiled for one set of processor instructions each.
struct Kernels {
  // Writes the keys and values of tokens first <= t < last to the cache. Tokens of no row are left out.
  void (*write)(const Problem& problem, int64_t first, int64_t last);
  void (*attend)(const Problem& problem, const Item& item, float* scratch);
  // Adds up the sums of an item's parts, `states` one after the other, and stores the result.
  void (*combine)(const Problem& problem, const Item& item, float* states, float* scratch);
};

}  // namespace noria::attention
