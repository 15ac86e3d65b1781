// New keys and values into the cache.
#pragma once

#include "attention/cells.h"

namespace noria::NORIA_ISA {

// One vector: at(i) is its i-th number. Returns the scale of int8.
template <CacheDtype dtype, bool from_bfloat16, typename At>
inline float write_cells(int64_t count, uint8_t* to, At&& at) {
  if constexpr (dtype != CacheDtype::kInt8) {
    for (int64_t i = 0; i < count; ++i) narrow_cell<dtype, from_bfloat16>(at(i), to + i * attention::cell_bytes(dtype));
    return 0.0f;
  } else {
    float top = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float size = float_of(bits_of(at(i)) & 0x7fffffff);
      top = size > top ? size : top;
    }
    // XLA turns both divisions of cache.py into products with an inverse, and takes subnormal floats as zeros.
    float scale = top * (1.0f / 127.0f);
    if (scale < float_of(0x00800000)) scale = 0.0f;
    const float inverse = 1.0f / (scale == 0.0f ? 1.0f : scale);
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<uint8_t>(round_to_int8(at(i) * inverse));
    return scale;
  }
}

template <CacheDtype dtype>
inline void write_vector(const Problem& p, const void* source, int64_t from, uint8_t* to, float* scale) {
  constexpr bool narrow = dtype == CacheDtype::kBFloat16;
  constexpr bool wide = dtype == CacheDtype::kFloat32;
  if ((narrow && p.dtype == Dtype::kBFloat16) || (wide && p.dtype == Dtype::kFloat32)) {
    const int64_t bytes = attention::cell_bytes(dtype);
    __builtin_memcpy(to, static_cast<const uint8_t*>(source) + from * bytes, p.head_dim * bytes);
    return;
  }
  float value;
  if (p.dtype == Dtype::kBFloat16) {
    const auto* numbers = static_cast<const uint16_t*>(source) + from;
    const auto at = [&](int64_t i) NORIA_INLINE { return float_of(static_cast<uint32_t>(numbers[i]) << 16); };
    value = write_cells<dtype, true>(p.head_dim, to, at);
  } else {
    const auto* numbers = static_cast<const float*>(source) + from;
    value = write_cells<dtype, false>(p.head_dim, to, [&](int64_t i) NORIA_INLINE { return numbers[i]; });
  }
  if (scale) *scale = value;
}

inline void write(const Problem& p, int64_t first, int64_t last) {
  const int64_t bytes = p.head_dim * attention::cell_bytes(p.cache_dtype);
  for (int64_t token = first; token < last; ++token) {
    const int64_t row = p.token_rows[token], position = p.positions[token];
    if (row >= p.rows) continue;
    const int64_t block = p.offset + p.table[row * p.table_width + position / p.block_size];
    const int64_t slot = (block * p.block_size + position % p.block_size) * p.kv_heads;
    for (int64_t head = 0; head < p.kv_heads; ++head) {
      const int64_t from = (token * p.kv_heads + head) * p.head_dim, to = (slot + head) * 2;
      float* scale = p.cache_scale ? p.cache_scale + to : nullptr;
      with_cells(p.cache_dtype, [&](auto dtype) {
        write_vector<dtype>(p, p.k, from, p.cache + to * bytes, scale);
        write_vector<dtype>(p, p.v, from, p.cache + (to + 1) * bytes, scale ? scale + 1 : nullptr);
      });
    }
  }
}

}  // namespace noria::NORIA_ISA
