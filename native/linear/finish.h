// What happens to a finished sum: bias, gate, conversion, store. And what happens to activations before the sums.
#pragma once

#include "linear/types.h"
#include "simd/math.h"

namespace noria::NORIA_ISA {

// x / (1 + e^-z)
inline Lanes times_sigmoid(Lanes x, Lanes z) {
  return div(x, add(splat(1.0f), exp(mul(z, splat(-1.0f)))));
}

inline Lanes activate(Activation kind, Lanes x) {
  if (kind == Activation::kSilu) return times_sigmoid(x, x);
  // gelu_tanh(x) = x / 2 (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
  const Lanes cubic = fma(mul(mul(x, x), x), splat(0.044715f), x);
  return times_sigmoid(x, mul(cubic, splat(2 * 0.7978845608028654f)));
}

// Rows first_row .. of the result, outputs `output` .. output + 15.
struct Piece {
  int64_t first_row, rows, output, stride;
};

inline Lanes bias_lanes(const Weight& weight, int64_t output, int count) {
  float values[kLanes] = {};
  if (weight.bias == nullptr) return load(values);
  for (int i = 0; i < count; ++i)
    values[i] = weight.bias_dtype == Dtype::kFloat32 ? static_cast<const float*>(weight.bias)[output + i]
                                                     : from_bfloat16(static_cast<const uint16_t*>(weight.bias)[output + i]);
  return load(values);
}

inline void store_result(void* y, Dtype dtype, int64_t at, int count, Lanes value) {
  float values[kLanes];
  if (dtype == Dtype::kFloat32 && count == kLanes) return store(static_cast<float*>(y) + at, value);
  store(values, value);
  if (dtype == Dtype::kFloat32) {
    __builtin_memcpy(static_cast<float*>(y) + at, values, count * sizeof(float));
  } else if (count == kLanes) {
    for (int i = 0; i < kLanes; ++i) static_cast<uint16_t*>(y)[at + i] = to_bfloat16(values[i]);
  } else {
    for (int i = 0; i < count; ++i) static_cast<uint16_t*>(y)[at + i] = to_bfloat16(values[i]);
  }
}

// sums, and for gated weights `up`: [rows][stride]
inline void finish(const Problem& problem, int index, const Piece& piece, const float* sums, const float* up) {
  const Weight& weight = problem.weight[index];
  const int64_t left = weight.outputs - piece.output;
  const int count = left < kLanes ? static_cast<int>(left) : kLanes;
  const Lanes bias = bias_lanes(weight, piece.output, count);
  const Lanes up_bias = up ? bias_lanes(problem.weight[1], piece.output, count) : zero();
  const bool biased = weight.bias != nullptr, up_biased = up && problem.weight[1].bias;
  for (int64_t row = 0; row < piece.rows; ++row) {
    Lanes value = load(sums + row * piece.stride);
    if (biased) value = add(value, bias);
    if (up) {
      Lanes other = load(up + row * piece.stride);
      if (up_biased) other = add(other, up_bias);
      value = mul(activate(problem.activation, value), other);
    }
    store_result(weight.y, problem.y_dtype, (piece.first_row + row) * weight.outputs + piece.output, count, value);
  }
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

inline void widen(const uint16_t* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = from_bfloat16(x[i]);
}
inline void narrow(const float* x, int64_t count, uint16_t* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = to_bfloat16(x[i]);
}

}  // namespace noria::NORIA_ISA
