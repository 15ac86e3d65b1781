// Keys and values of a tile: from the blocks of the cache to floats in the order that the products want.
#pragma once

#include "attention/cells.h"

namespace noria::NORIA_ISA {

using attention::kKeyTile;
using attention::padded;

// The keys first <= key < last of a tile (0 to kKeyTile) and where they lie, for one KV head.
struct TileCells {
  int64_t first, last;
  int64_t vector_bytes;
  const uint8_t* key[kKeyTile];  // head_dim numbers each; the value's are right behind
  const float* scale[kKeyTile];  // of the key; the value's is right behind. int8 only

  TileCells(const Problem& p, int64_t row, int64_t kv_head, int64_t start, int64_t first_key, int64_t last_key)
      : first(first_key), last(last_key), vector_bytes(p.head_dim * cell_bytes(p.cache_dtype)) {
    const int32_t* block = p.table + row * p.table_width + (start + first) / p.block_size;
    int64_t slot = (start + first) % p.block_size;
    const int64_t apart = p.kv_heads * 2;  // vectors
    for (int64_t i = first; i < last; slot = 0, ++block) {
      const int64_t vector = ((p.offset + *block) * p.block_size + slot) * apart + kv_head * 2;
      const int64_t end = i + p.block_size - slot < last ? i + p.block_size - slot : last, begin = i;
      const uint8_t* at = p.cache + vector * vector_bytes;
      for (; i < end; ++i, at += apart * vector_bytes) key[i] = at;
      if (p.cache_scale)
        for (i = begin; i < end; ++i) scale[i] = p.cache_scale + vector + (i - begin) * apart;
    }
  }
  const uint8_t* value(int64_t i) const { return key[i] + vector_bytes; }
};

// Asks for memory that will be read soon. The processor itself sees no pattern in where the vectors lie.
inline void prefetch(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Reads `count` cells, calls f(place of 16, lanes) and fills what is missing in the last ones with zeros.
template <CacheDtype dtype, typename F>
inline NORIA_INLINE void each_lanes(const uint8_t* p, int64_t count, F&& f) {
  constexpr int64_t bytes = attention::cell_bytes(dtype);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) f(i, widen_cells<dtype>(p + i * bytes));
  if (i == count) return;
  uint8_t rest[kLanes * bytes] = {};
  __builtin_memcpy(rest, p + i * bytes, (count - i) * bytes);
  f(i, widen_cells<dtype>(rest));
}

// A key as words to transpose: itself if it fills whole registers, else a copy in `room` [padded(head_dim)]. Words are
// floats, or pairs of bfloat16, which takes half the shuffles.
template <CacheDtype dtype>
inline NORIA_INLINE const float* key_words(const TileCells& cells, int64_t i, int64_t head_dim, float* room) {
  constexpr bool as_it_is = dtype == CacheDtype::kFloat32 || dtype == CacheDtype::kBFloat16;
  const int64_t width = padded(head_dim);
  if (i < cells.first || i >= cells.last) {
    for (int64_t c = 0; c < width; c += kLanes) store(room + c, zero());
  } else if constexpr (as_it_is) {
    if (cells.vector_bytes % 64 == 0) return reinterpret_cast<const float*>(cells.key[i]);
    __builtin_memset(room, 0, width * sizeof(float));
    __builtin_memcpy(room, cells.key[i], cells.vector_bytes);
  } else {
    const Lanes scale = splat(dtype == CacheDtype::kInt8 ? *cells.scale[i] : 1.0f);
    each_lanes<dtype>(cells.key[i], head_dim, [&](int64_t c, Lanes x) NORIA_INLINE {
      store(room + c, dtype == CacheDtype::kInt8 ? mul(x, scale) : x);
    });
  }
  return room;
}

// Keys as panels of 16: panel [padded(head_dim)][16 keys], those that are not there zero. room: 16 times
// padded(head_dim) floats. ahead: what will be needed next.
template <CacheDtype dtype>
void load_keys(const TileCells& cells, const TileCells& ahead, int64_t head_dim, float* keys, float* room) {
  const int64_t width = padded(head_dim);
  for (int64_t start = cells.first / kLanes * kLanes; start < cells.last; start += kLanes) {
    const float* rows[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) {
      rows[i] = key_words<dtype>(cells, start + i, head_dim, room + i * width);
      if (start + i >= ahead.first && start + i < ahead.last) prefetch(ahead.key[start + i], ahead.vector_bytes);
    }
    float* panel = keys + start * width;
    if constexpr (dtype == CacheDtype::kBFloat16) {
      alignas(64) float pairs[kLanes * kLanes];
      for (int64_t d = 0; d < width; d += 2 * kLanes) {
        transpose(rows, d / 2, pairs);
        for (int64_t i = 0; i < kLanes && d + 2 * i < width; ++i) {
          const Words words = load_words(pairs + i * kLanes);
          store(panel + (d + 2 * i) * kLanes, as_lanes(shift_left<16>(words)));
          store(panel + (d + 2 * i + 1) * kLanes, as_lanes(bit_and(words, 0xffff0000u)));
        }
      }
    } else {
      for (int64_t d = 0; d < width; d += kLanes) transpose(rows, d, panel + d * kLanes);
    }
  }
}

// Values as panels of 16 numbers: panel [kKeyTile keys][16]. Returns whether all are finite.
template <CacheDtype dtype>
bool load_values(const TileCells& cells, const TileCells& ahead, int64_t head_dim, float* values) {
  Lanes check = zero();
  for (int64_t i = cells.first; i < cells.last; ++i) {
    const Lanes scale = splat(dtype == CacheDtype::kInt8 ? cells.scale[i][1] : 1.0f);
    if (i >= ahead.first && i < ahead.last) prefetch(ahead.value(i), ahead.vector_bytes);
    Lanes own = zero();
    each_lanes<dtype>(cells.value(i), head_dim, [&](int64_t c, Lanes x) NORIA_INLINE {
      if constexpr (dtype == CacheDtype::kInt8) x = mul(x, scale);
      own = fma(x, zero(), own);  // NaN from the first infinity or NaN on
      store(values + c * kKeyTile + i * kLanes, x);
    });
    check = add(check, own);
  }
  float checks[kLanes];
  store(checks, check);
  bool finite = true;
  for (float value : checks) finite = finite && value == 0.0f;
  return finite;
}

}  // namespace noria::NORIA_ISA
