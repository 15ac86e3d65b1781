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

// To 8-bit integers with one scale for 32: the largest becomes 127. See Kernels.
inline void quantize(const float* x, int64_t count, int8_t* q, float* scale, float* sum) {
  for (int64_t at = 0; at < count; at += 32, x += 32, q += 32, ++scale, sum += 2) {
    const Lanes a = load(x), b = load(x + kLanes);
    float values[kLanes];
    store(values, max(as_lanes(bit_and(as_words(a), 0x7fffffff)), as_lanes(bit_and(as_words(b), 0x7fffffff))));
    float top = 0;
    for (float value : values) top = value > top ? value : top;
    *scale = top / 127.0f;
    const float inverse = top > 0 ? 127.0f / top : 0.0f;
    int32_t integers[2 * kLanes];
    store_words(integers, to_words(mul(a, splat(inverse))));
    store_words(integers + kLanes, to_words(mul(b, splat(inverse))));
    int32_t totals[2] = {};
    for (int i = 0; i < 32; ++i) {
      q[i] = static_cast<int8_t>(integers[i]);
      totals[i / kLanes] += q[i];
    }
    for (int half = 0; half < 2; ++half) sum[half] = *scale * static_cast<float>(totals[half]);
  }
}

}  // namespace noria::NORIA_ISA
