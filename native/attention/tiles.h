// Keys and values of a tile: from the blocks of the cache to floats in the order that the products want.
#pragma once

#include "attention/cells.h"

namespace noria::NORIA_ISA {

using attention::kKeyTile;
using attention::padded;

// The keys first <= key < last of a tile (0 to kKeyTile) and where they lie, for one KV head.
struct TileCells {
  int64_t first, last;
  const uint8_t* key[kKeyTile];    // head_dim numbers each; the value's are right behind
  const float* scale[kKeyTile];    // of the key; the value's is right behind. int8 only

  TileCells(const Problem& p, int64_t row, int64_t kv_head, int64_t start, int64_t first_key, int64_t last_key)
      : first(first_key), last(last_key) {
    const int64_t slot_bytes = p.kv_heads * 2 * p.head_dim * cell_bytes(p.cache_dtype);
    const int32_t* block = p.table + row * p.table_width + (start + first) / p.block_size;
    int64_t slot = (start + first) % p.block_size;
    for (int64_t i = first; i < last; ++i) {
      const int64_t at = (p.offset + *block) * p.block_size + slot;
      key[i] = p.cache + at * slot_bytes + kv_head * (slot_bytes / p.kv_heads);
      if (p.cache_scale) scale[i] = p.cache_scale + (at * p.kv_heads + kv_head) * 2;
      if (++slot == p.block_size) slot = 0, ++block;
    }
  }
};

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

// Keys as panels of 16: panel [head_dim][16 keys], those that are not there zero. room: 16 * padded(head_dim) floats.
template <CacheDtype dtype>
void load_keys(const TileCells& cells, int64_t head_dim, float* keys, float* room) {
  const int64_t width = padded(head_dim);
  for (int64_t start = cells.first / kLanes * kLanes; start < cells.last; start += kLanes) {
    for (int64_t i = 0; i < kLanes; ++i) {
      if (start + i < cells.first || start + i >= cells.last) {
        for (int64_t c = 0; c < width; c += kLanes) store(room + (c + i) * kLanes, zero());
        continue;
      }
      Lanes scale;
      if constexpr (dtype == CacheDtype::kInt8) scale = splat(*cells.scale[start + i]);
      each_lanes<dtype>(cells.key[start + i], head_dim, [&](int64_t c, Lanes x) NORIA_INLINE {
        if constexpr (dtype == CacheDtype::kInt8) x = mul(x, scale);
        store(room + (c + i) * kLanes, x);
      });
    }
    float* panel = keys + start * width;
    for (int64_t c = 0; c < width; c += kLanes) transpose(room + c * kLanes, panel + c * kLanes);
  }
}

// Values as panels of 16 numbers: panel [kKeyTile keys][16]. Returns whether all are finite.
template <CacheDtype dtype>
bool load_values(const TileCells& cells, int64_t head_dim, float* values) {
  const int64_t bytes = head_dim * attention::cell_bytes(dtype);
  Lanes check = zero();
  for (int64_t i = cells.first; i < cells.last; ++i) {
    Lanes scale;
    if constexpr (dtype == CacheDtype::kInt8) scale = splat(cells.scale[i][1]);
    each_lanes<dtype>(cells.key[i] + bytes, head_dim, [&](int64_t c, Lanes x) NORIA_INLINE {
      if constexpr (dtype == CacheDtype::kInt8) x = mul(x, scale);
      check = fma(x, zero(), check);  // NaN from the first infinity or NaN on
      store(values + c * kKeyTile + i * kLanes, x);
    });
  }
  float checks[kLanes];
  store(checks, check);
  bool finite = true;
  for (float value : checks) finite = finite && value == 0.0f;
  return finite;
}

}  // namespace noria::NORIA_ISA
