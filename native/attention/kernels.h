// Attention of some queries to some keys of their row, tile by tile.
//
// Online softmax (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022,
// "FlashAttention"), restarted for each part, the parts added up in the order of the sequence (Dao et al. 2023,
// "Flash-Decoding"). Scores are one chain of multiply-adds in the order of head_dim, results one in the order of the
// tile's keys. A key that a query does not see adds an exact zero. So a query's result depends on nothing but itself.
//
// Included once for each instruction set, by a file that defines NORIA_ISA and includes the lanes for it.
#pragma once

#include "attention/products.h"
#include "attention/tiles.h"
#include "attention/write.h"
#include "simd/math.h"

namespace noria::NORIA_ISA {

using attention::Item;
using attention::kPart;

constexpr float kUnseen = -1e30f;  // finite, so that the difference of two is not NaN

// What is known of each query after some of the keys. Queries are in the order [token][head].
struct State {
  float* top;    // [padded(queries)]: the largest score
  float* total;  // [padded(queries)][16]: sums of e^(score - top); lane l has keys l, l + 16, ...
  float* mixed;  // [queries][padded(head_dim)]: the values' sums with these weights

  State(float* memory, int64_t queries)
      : top(memory), total(top + padded(queries)), mixed(total + padded(queries) * kLanes) {}

  void begin(int64_t queries, int64_t width) {
    for (int64_t i = 0; i < padded(queries); ++i) top[i] = kUnseen;
    for (int64_t i = 0; i < padded(queries) * kLanes; ++i) total[i] = 0.0f;
    for (int64_t i = 0; i < queries * width; ++i) mixed[i] = 0.0f;
  }
};

// One item at work. Memory as in scratch_floats.
struct Work {
  const Problem& p;
  const Item& item;
  int64_t queries, width, position;  // head_dim with padding; of the first token
  float *q, *scores, *keys, *values, *room, *new_top, *fade;
  State sum, part;

  Work(const Problem& problem, const Item& the_item, float* scratch)
      : p(problem), item(the_item), queries(item.queries()), width(padded(p.head_dim)),
        position(p.first_position(item.row) + item.token - p.query_start[item.row]),
        sum(scratch, queries), part(scratch + attention::state_floats(queries, p.head_dim), queries) {
    float* at = scratch + 2 * attention::state_floats(queries, p.head_dim);
    new_top = at, at += padded(queries);
    fade = at, at += padded(queries);
    keys = at, at += kKeyTile * width;
    values = at, at += kKeyTile * width;
    room = at, at += kLanes * width;
    scores = at, at += queries * kKeyTile;
    q = at;
  }
  int64_t at(int64_t query) const {  // in q and out
    return ((item.token + query / item.heads) * p.heads + item.kv_head * p.group() + item.head + query % item.heads) *
           p.head_dim;
  }
};

// Keys of a tile, counted from its start, that a token sees; none: last <= first.
struct Seen {
  int64_t first, last;
  Seen(const Work& w, int64_t token, int64_t start) {
    const int64_t position = w.position + token, from = position - w.p.window + 1 - start, to = position + 1 - start;
    first = from > 0 ? from : 0;
    last = to < kKeyTile ? to : kKeyTile;
  }
};

inline void load_queries(const Work& w) {
  for (int64_t i = 0; i < w.queries; ++i) {
    float* to = w.q + i * w.width;
    const int64_t from = w.at(i);
    if (w.p.dtype == Dtype::kFloat32) {
      __builtin_memcpy(to, static_cast<const float*>(w.p.q) + from, w.p.head_dim * sizeof(float));
    } else {
      const auto* numbers = reinterpret_cast<const uint8_t*>(static_cast<const uint16_t*>(w.p.q) + from);
      each_lanes<CacheDtype::kBFloat16>(numbers, w.p.head_dim, [&](int64_t d, Lanes x) NORIA_INLINE { store(to + d, x); });
    }
  }
}

// scale and soft cap, then `unseen` for what the query's token does not see. Returns the largest. Lanes first .. last.
inline float finish_scores(const Problem& p, float* scores, int64_t first, int64_t last, Seen seen) {
  const Lanes scale = splat(p.scale), cap = splat(p.soft_cap);
  Lanes top = splat(kUnseen);
  const bool partly = seen.first > first || seen.last < last;
  for (int64_t i = first; i < last; i += kLanes) {
    Lanes score = mul(load(scores + i), scale);
    if (p.soft_cap != 0) score = mul(cap, tanh(div(score, cap)));
    store(scores + i, score);
    if (!partly) top = max(score, top);
  }
  if (!partly) return max_of(top);
  for (int64_t i = first; i < seen.first; ++i) scores[i] = kUnseen;
  for (int64_t i = seen.last; i < last; ++i) scores[i] = kUnseen;
  for (int64_t i = first; i < last; i += kLanes) top = max(load(scores + i), top);
  return max_of(top);
}

// Scores to weights, and their sum to `total`.
inline void weigh(float* scores, int64_t first, int64_t last, Seen seen, float top, float fade, float* total) {
  for (int64_t i = first; i < last; i += kLanes) store(scores + i, exp(add(load(scores + i), splat(-top))));
  for (int64_t i = first; i < seen.first; ++i) scores[i] = 0.0f;
  for (int64_t i = seen.last; i < last; ++i) scores[i] = 0.0f;
  Lanes sum = mul(load(total), splat(fade));
  for (int64_t i = first; i < last; i += kLanes) sum = add(sum, load(scores + i));
  store(total, sum);
}

// The weights of queries first .. last, in place of their scores.
inline void soften(const Work& w, int64_t first, int64_t last, int64_t start, int64_t first_key, int64_t last_key) {
  const State& s = w.part;
  const int64_t from = first / kLanes * kLanes, to = padded(last);
  for (int64_t i = from; i < to; i += kLanes) store(w.new_top + i, load(s.top + i));
  for (int64_t i = first; i < last; ++i) {
    const float top = finish_scores(w.p, w.scores + i * kKeyTile, first_key, last_key, Seen(w, i / w.item.heads, start));
    if (top > s.top[i]) w.new_top[i] = top;
  }
  for (int64_t i = from; i < to; i += kLanes) {
    const Lanes top = load(w.new_top + i);
    store(w.fade + i, exp(add(load(s.top + i), mul(top, splat(-1.0f)))));
    store(s.top + i, top);
  }
  for (int64_t i = first; i < last; ++i)
    weigh(w.scores + i * kKeyTile, first_key, last_key, Seen(w, i / w.item.heads, start), s.top[i], w.fade[i],
          s.total + i * kLanes);
}

// The values' sums of tokens first .. last with their weights.
inline void mix(const Work& w, int64_t first, int64_t last, int64_t first_key, int64_t last_key) {
  const int64_t query = first * w.item.heads;
  product({(last - first) * w.item.heads, last_key - first_key, w.width / kLanes},
          {w.scores + query * kKeyTile + first_key, kKeyTile}, {w.values + first_key * kLanes, kKeyTile * kLanes},
          {w.part.mixed + query * w.width, w.width}, w.fade + query);
}

inline void attend_tile(const Work& w, int64_t start) {
  // Tokens that see something of the tile, and the keys that any of them sees.
  const int64_t late = start - w.position, early = start + kKeyTile + w.p.window - 1 - w.position;
  const int64_t first = late > 0 ? late : 0, last = early < w.item.tokens ? early : w.item.tokens;
  if (first >= last) return;
  const int64_t first_key = Seen(w, first, start).first, last_key = Seen(w, last - 1, start).last;
  const TileCells cells(w.p, w.item.row, w.item.kv_head, start, first_key, last_key);
  const int64_t rest = w.position + w.item.tokens - (start + kKeyTile), next = rest < 0 ? 0 : rest;
  const TileCells ahead(w.p, w.item.row, w.item.kv_head, start + kKeyTile, 0, next < kKeyTile ? next : kKeyTile);
  bool finite = true;
  with_cells(w.p.cache_dtype, [&](auto dtype) {
    load_keys<dtype>(cells, ahead, w.p.head_dim, w.keys, w.room);
    finite = load_values<dtype>(cells, ahead, w.p.head_dim, w.values);
  });
  const int64_t from = first_key / kLanes * kLanes, to = padded(last_key);  // whole panels of keys
  const int64_t query = first * w.item.heads, count = (last - first) * w.item.heads;
  product({count, w.p.head_dim, (to - from) / kLanes}, {w.q + query * w.width, w.width},
          {w.keys + from * w.width, w.width * kLanes}, {w.scores + query * kKeyTile + from, kKeyTile}, nullptr);
  soften(w, query, query + count, start, from, to);
  if (finite) return mix(w, first, last, first_key, last_key);
  for (int64_t token = first; token < last; ++token) {  // zero times infinity is not zero: each with its own keys only
    const Seen seen(w, token, start);
    mix(w, token, token + 1, seen.first, seen.last);
  }
}

// sum += part, keys of the part after those of the sum.
inline void add_part(const Work& w, const State& sum, const State& part) {
  for (int64_t start = 0; start < w.queries; start += kLanes) {
    const Lanes old_top = load(sum.top + start), own_top = load(part.top + start), top = max(old_top, own_top);
    float fades[kLanes], own_fades[kLanes];
    store(fades, exp(add(old_top, mul(top, splat(-1.0f)))));
    store(own_fades, exp(add(own_top, mul(top, splat(-1.0f)))));
    store(sum.top + start, top);
    for (int64_t i = start; i < start + kLanes && i < w.queries; ++i) {
      const Lanes fade = splat(fades[i - start]), own_fade = splat(own_fades[i - start]);
      const auto fold = [&](float* to, const float* from) NORIA_INLINE {
        store(to, fma(load(from), own_fade, mul(load(to), fade)));
      };
      fold(sum.total + i * kLanes, part.total + i * kLanes);
      for (int64_t d = 0; d < w.width; d += kLanes) fold(sum.mixed + i * w.width + d, part.mixed + i * w.width + d);
    }
  }
}

inline void store_results(const Work& w) {
  const int64_t size = w.p.dtype == Dtype::kFloat32 ? 4 : 2;
  for (int64_t i = 0; i < w.queries; ++i) {
    float total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += w.sum.total[i * kLanes + lane];
    uint8_t* out = static_cast<uint8_t*>(w.p.out) + w.at(i) * size;
    for (int64_t d = 0; d < w.p.head_dim; d += kLanes) {
      const Lanes value = div(load(w.sum.mixed + i * w.width + d), splat(total));
      alignas(64) uint8_t rest[kLanes * sizeof(float)];
      const bool whole = d + kLanes <= w.p.head_dim;
      uint8_t* const to = whole ? out + d * size : rest;
      if (w.p.dtype == Dtype::kFloat32) {
        store(reinterpret_cast<float*>(to), value);
      } else {
        store_bfloat16(reinterpret_cast<uint16_t*>(to), value);
      }
      if (!whole) __builtin_memcpy(out + d * size, rest, (w.p.head_dim - d) * size);
    }
  }
}

void attend(const Problem& p, const Item& item, float* scratch) {
  Work w(p, item, scratch);
  load_queries(w);
  if (item.state) {
    w.part = State(item.state, w.queries);
  } else {
    w.sum.begin(w.queries, w.width);
  }
  const int64_t end = w.position + item.tokens;
  for (int64_t part = item.first_part; part < item.last_part; ++part) {
    w.part.begin(w.queries, w.width);
    for (int64_t start = part * kPart; start < (part + 1) * kPart && start < end; start += kKeyTile)
      attend_tile(w, start);
    if (!item.state) add_part(w, w.sum, w.part);
  }
  if (!item.state) store_results(w);
}

void combine(const Problem& p, const Item& item, float* states, float* scratch) {
  Work w(p, item, scratch);
  w.sum.begin(w.queries, w.width);
  for (int64_t part = item.first_part; part < item.last_part; ++part) {
    add_part(w, w.sum, State(states, w.queries));
    states += attention::state_floats(w.queries, p.head_dim);
  }
  store_results(w);
}

}  // namespace noria::NORIA_ISA
