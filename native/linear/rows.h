// What happens to whole rows of activations, before the sums and after them.
#pragma once

#include <cmath>

#include "linear/types.h"

namespace noria::NORIA_ISA {

// Elements at .. at + count - 1, with zeros in the other lanes.
inline Lanes load_some(const void* x, Dtype dtype, int64_t at, int count) {
  if (dtype == Dtype::kFloat32) {
    const float* from = static_cast<const float*>(x) + at;
    if (count == kLanes) return load(from);
    float values[kLanes] = {};
    __builtin_memcpy(values, from, count * sizeof(float));
    return load(values);
  }
  const uint16_t* from = static_cast<const uint16_t*>(x) + at;
  if (count == kLanes) return from_bfloat16(from);
  uint16_t values[kLanes] = {};
  __builtin_memcpy(values, from, count * sizeof(uint16_t));
  return from_bfloat16(values);
}

inline void store_some(void* y, Dtype dtype, int64_t at, int count, Lanes value) {
  if (dtype == Dtype::kFloat32) {
    float* to = static_cast<float*>(y) + at;
    if (count == kLanes) return store(to, value);
    float values[kLanes];
    store(values, value);
    __builtin_memcpy(to, values, count * sizeof(float));
  } else {
    uint16_t* to = static_cast<uint16_t*>(y) + at;
    if (count == kLanes) return store_bfloat16(to, value);
    uint16_t values[kLanes];
    store_bfloat16(values, value);
    __builtin_memcpy(to, values, count * sizeof(uint16_t));
  }
}

// Calls f(at, count) for pieces of up to kLanes elements.
template <typename F>
inline NORIA_INLINE void each_piece(int64_t count, F&& f) {
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) f(at, kLanes);
  if (at < count) f(at, static_cast<int>(count - at));
}

inline void widen(const uint16_t* x, int64_t count, float* y) {
  each_piece(count, [&](int64_t at, int n) NORIA_INLINE {
    store_some(y, Dtype::kFloat32, at, n, load_some(x, Dtype::kBFloat16, at, n));
  });
}
inline void narrow(const float* x, int64_t count, uint16_t* y) {
  each_piece(count, [&](int64_t at, int n) NORIA_INLINE {
    store_some(y, Dtype::kBFloat16, at, n, load_some(x, Dtype::kFloat32, at, n));
  });
}

// The squares are summed in kLanes chains, and these in the order of the lanes.
inline void normalize(const float* x, int64_t count, const Norm& norm, float* y) {
  Lanes squares = zero();
  each_piece(count, [&](int64_t at, int n) NORIA_INLINE {
    const Lanes v = load_some(x, Dtype::kFloat32, at, n);
    squares = fma(v, v, squares);
  });
  float chains[kLanes], total = 0;
  store(chains, squares);
  for (float chain : chains) total += chain;
  const Lanes inverse = splat(1.0f / std::sqrt(total / static_cast<float>(count) + norm.epsilon));
  each_piece(count, [&](int64_t at, int n) NORIA_INLINE {
    const Lanes v = mul(load_some(x, Dtype::kFloat32, at, n), inverse);
    store_some(y, Dtype::kFloat32, at, n, mul(v, load_some(norm.scale, Dtype::kFloat32, at, n)));
  });
}

inline void add_residual(const float* x, int64_t count, const void* residual, void* y, Dtype dtype) {
  each_piece(count, [&](int64_t at, int n) NORIA_INLINE {
    store_some(y, dtype, at, n, add(load_some(x, Dtype::kFloat32, at, n), load_some(residual, dtype, at, n)));
  });
}

// Pairs (i, i + size / 2) turned by the angles whose cosines and sines are given, [size / 2] each. work: [size].
inline void rotate(const void* x, Dtype dtype, int64_t size, const Norm& norm, const float* cosine, const float* sine,
                   float* work, void* y) {
  each_piece(size, [&](int64_t at, int n) NORIA_INLINE {
    store_some(work, Dtype::kFloat32, at, n, load_some(x, dtype, at, n));
  });
  if (norm.scale) normalize(work, size, norm, work);
  const int64_t half = size / 2;
  each_piece(half, [&](int64_t at, int n) NORIA_INLINE {
    const Lanes first = load_some(work, Dtype::kFloat32, at, n), second = load_some(work, Dtype::kFloat32, half + at, n);
    const Lanes c = load_some(cosine, Dtype::kFloat32, at, n), s = load_some(sine, Dtype::kFloat32, at, n);
    store_some(y, dtype, at, n, fma(mul(second, splat(-1.0f)), s, mul(first, c)));
    store_some(y, dtype, half + at, n, fma(first, s, mul(second, c)));
  });
}

// The sums of those of 16 integers q[i] with i % 4 < 2 in the lower half of a word, and of the others in the upper one,
// 1024 too large each.
inline uint32_t pair_sums(const int8_t* q) {
  constexpr uint64_t kEven = 0x00ff00ff00ff00ff, kBias = 0x8080808080808080;  // no byte of q + 128 is negative
  uint64_t eight[2];
  __builtin_memcpy(eight, q, 16);
  uint64_t sums = 0;
  for (uint64_t v : eight) sums += ((v ^ kBias) & kEven) + ((v ^ kBias) >> 8 & kEven);
  return static_cast<uint32_t>(sums + (sums >> 32));
}

// To 8-bit integers with one scale for 32: the largest becomes 127.
inline void quantize(const float* x, int64_t count, const Quantized& rows) {
  Quantized to = rows;
  for (int64_t at = 0; at < count; at += 32, x += 32, to = advance(to, 32)) {
    const Lanes a = load(x), b = load(x + kLanes);
    const auto magnitude = [](Lanes v) { return as_lanes(bit_and(as_words(v), 0x7fffffff)); };
    const float top = max_of(max(magnitude(a), magnitude(b)));
    const float inverse = top > 0 ? 127.0f / top : 0.0f;
    store_bytes(to.q, to_words(mul(a, splat(inverse))));
    store_bytes(to.q + kLanes, to_words(mul(b, splat(inverse))));
    SharedBy32& shared = *to.shared;
    const uint32_t sums[2] = {pair_sums(to.q), pair_sums(to.q + kLanes)};
    int total = 0;
    for (int i = 0; i < 2; ++i) {
      const int first = 1024 - static_cast<int>(sums[0] >> 16 * i & 0xffff);
      const int last = 1024 - static_cast<int>(sums[1] >> 16 * i & 0xffff);
      shared.less[0][i] = static_cast<int16_t>(first);
      shared.less[1][i] = static_cast<int16_t>(last);
      shared.less[2][i] = static_cast<int16_t>(first + last);
      total -= first + last;
    }
    shared.scale = top / 127.0f;
    shared.sum = shared.scale * static_cast<float>(total);
  }
}

}  // namespace noria::NORIA_ISA
