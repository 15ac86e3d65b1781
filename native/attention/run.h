// One call of the op: the batch checked, cut into items, and shared among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention/types.h"
#include "runtime/parallel.h"
#include "runtime/scratch.h"

namespace noria::attention {

constexpr int64_t kSmallWork = 1 << 16;  // multiply-adds below which waking a thread costs more than it gains
constexpr int64_t kWriteTokens = 16;     // tokens whose keys and values one thread writes at a time
constexpr int64_t kMostStates = 1 << 20;  // floats of all parts' sums: more memory traffic than it is worth beyond

// The lowest position that a token at `position` sees.
inline int64_t first_seen(const Problem& p, int64_t position) { return std::max<int64_t>(0, position - p.window + 1); }

inline bool good_block(const Problem& p, int64_t row, int64_t index) {
  const int64_t block = p.offset + p.table[row * p.table_width + index];
  return block >= 0 && block < p.cache_blocks;
}

// What would make the kernels read or write beyond their memory, or null.
inline const char* find_mistake(const Problem& p) {
  const int64_t reach = p.table_width * p.block_size;
  if (p.window < 1) return "the window must be 1 or more";
  for (int64_t t = 0; t < p.tokens; ++t) {
    if (p.token_rows[t] >= p.rows) continue;
    if (p.token_rows[t] < 0 || p.positions[t] < 0 || p.positions[t] >= reach)
      return "a token lies outside its block table";
    if (!good_block(p, p.token_rows[t], p.positions[t] / p.block_size)) return "a block lies outside the cache";
  }
  for (int64_t row = 0; row < p.rows; ++row) {
    if (p.query_start[row] < 0 || p.row_tokens(row) < 0 || p.query_start[row + 1] > p.tokens)
      return "query_start must rise from 0 to at most the number of tokens";
    const int64_t length = p.seq_lens[row];
    if (length == 0 || p.row_tokens(row) == 0) continue;
    if (length < p.row_tokens(row) || length > reach)
      return "a sequence is shorter than its tokens or longer than its blocks";
    const int64_t last = (length - 1) / p.block_size;
    for (int64_t i = first_seen(p, p.first_position(row)) / p.block_size; i <= last; ++i)
      if (!good_block(p, row, i)) return "a block lies outside the cache";
  }
  return nullptr;
}

// The work of all rows that have any: long ones first, so that threads end together.
inline std::vector<Item> cut(const Problem& p) {
  std::vector<Item> items;
  const int64_t heads = std::min<int64_t>(p.group(), kQueryRows), width = kQueryRows / heads;
  const auto add_row = [&](int64_t row) {
    const int64_t tokens = p.row_tokens(row);
    for (int64_t first = (tokens - 1) / width * width; first >= 0; first -= width) {
      const int64_t count = std::min(width, tokens - first), position = p.first_position(row) + first;
      for (int64_t kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
        for (int64_t head = 0; head < p.group(); head += heads) {
          items.push_back({row, kv_head, head, std::min(heads, p.group() - head), p.query_start[row] + first, count,
                           first_seen(p, position) / kPart, (position + count - 1) / kPart + 1, nullptr});
        }
      }
    }
  };
  for (const bool decode : {false, true})
    for (int64_t row = 0; row < p.rows; ++row)
      if (p.seq_lens[row] > 0 && p.row_tokens(row) > 0 && (p.row_tokens(row) == 1) == decode) add_row(row);
  return items;
}

inline int64_t work_of(const Problem& p, const Item& item) {
  const int64_t last = p.first_position(item.row) + item.token - p.query_start[item.row] + item.tokens;
  const int64_t keys = last - std::min(last, item.first_part * kPart);
  return keys * p.head_dim * (item.queries() + 4);  // as much as 4 queries: converting the tile
}

// Zeros for tokens that belong to no row: they cost less than what may lie there, an infinity or a slow denormal.
inline void clear_padding(const Problem& p) {
  const int64_t bytes = p.heads * p.head_dim * (p.dtype == Dtype::kFloat32 ? 4 : 2);
  const auto clear = [&](int64_t first, int64_t last) {
    if (first < last) std::memset(static_cast<uint8_t*>(p.out) + first * bytes, 0, (last - first) * bytes);
  };
  for (int64_t row = 0; row < p.rows; ++row)
    if (p.seq_lens[row] == 0) clear(p.query_start[row], p.query_start[row + 1]);
  clear(0, p.query_start[0]);
  clear(p.query_start[p.rows], p.tokens);
}

// This thread's scratch memory for items of the problem.
inline float* aligned_scratch(const Problem& p) {
  constexpr int64_t align = 64 / sizeof(float);
  float* memory = scratch<float, 8>(scratch_floats(kQueryRows, p.head_dim) + align);
  const auto over = reinterpret_cast<uintptr_t>(memory) % 64 / sizeof(float);
  return memory + (over ? align - over : 0);
}

inline int64_t states_of(const Problem& p, const Item& item) {
  return (item.last_part - item.first_part) * state_floats(item.queries(), p.head_dim);
}

// Few items: each part of theirs is a piece of work, and the parts are added up afterwards. floats: of their states.
template <typename Pool>
void run_parts(Pool& pool, const Problem& p, const Kernels& kernels, int64_t threads, const std::vector<Item>& items,
               int64_t floats) {
  std::vector<Item> pieces;
  float* const states = scratch<float, 9>(floats);
  float* state = states;
  for (const Item& item : items) {
    for (int64_t part = item.first_part; part < item.last_part; ++part) {
      pieces.push_back(item);
      pieces.back().first_part = part;
      pieces.back().last_part = part + 1;
      pieces.back().state = state;
      state += state_floats(item.queries(), p.head_dim);
    }
  }
  parallel(pool, static_cast<int64_t>(pieces.size()), threads, 1, [&](int64_t first, int64_t last) {
    float* memory = aligned_scratch(p);
    for (int64_t i = first; i < last; ++i) kernels.attend(p, pieces[i], memory);
  });
  state = states;
  for (const Item& item : items) {
    kernels.combine(p, item, state, aligned_scratch(p));
    state += states_of(p, item);
  }
}

// The problem must have no mistake.
template <typename Pool>
void run(Pool& pool, const Problem& p, const Kernels& kernels, int64_t threads) {
  clear_padding(p);
  const std::vector<Item> items = cut(p);
  int64_t work = 0, parts = 0, floats = 0;
  for (const Item& item : items) {
    work += work_of(p, item);
    parts += item.last_part - item.first_part;
    floats += states_of(p, item);
  }
  const auto count = static_cast<int64_t>(items.size());
  if (work < kSmallWork) threads = 1;
  parallel(pool, p.tokens, threads, kWriteTokens, [&](int64_t first, int64_t last) { kernels.write(p, first, last); });
  if (threads > 1 && count < 4 * threads && parts > count && floats <= kMostStates)
    return run_parts(pool, p, kernels, threads, items, floats);
  parallel(pool, count, threads, 1, [&](int64_t first, int64_t last) {
    float* memory = aligned_scratch(p);
    for (int64_t i = first; i < last; ++i) kernels.attend(p, items[i], memory);
  });
}

}  // namespace noria::attention
