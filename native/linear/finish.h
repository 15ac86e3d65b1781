// What happens to a finished sum: bias, gate, residual, conversion, store; or the choice of the largest.
#pragma once

#include "linear/rows.h"
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
  int64_t unit, units;  // of its block of rows
};

inline Lanes bias_lanes(const Weight& weight, int64_t output, int count) {
  return weight.bias ? load_some(weight.bias, weight.bias_dtype, output, count) : zero();
}

// Keeps the largest of `count` outputs, which come in ascending order.
inline void choose(Best& best, int64_t output, int count, Lanes value) {
  float values[kLanes];
  store(values, value);
  for (int i = 0; i < count; ++i)
    if (values[i] > best.value || values[i] != values[i]) best = {values[i], static_cast<int32_t>(output + i)};
}

// sums, and for gated weights `up`: [rows][stride]
inline void finish(const Problem& problem, int index, const Piece& piece, const float* sums, const float* up) {
  const Weight& weight = problem.weight[index];
  const int64_t left = weight.outputs - piece.output;
  const int count = left < kLanes ? static_cast<int>(left) : kLanes;
  const Lanes bias = bias_lanes(weight, piece.output, count);
  const Lanes up_bias = up ? bias_lanes(problem.weight[1], piece.output, count) : zero();
  const int64_t choices = problem.choices - piece.output;
  const int chosen = choices < count ? static_cast<int>(choices < 0 ? 0 : choices) : count;
  const bool biased = weight.bias != nullptr, up_biased = up && problem.weight[1].bias;
  for (int64_t row = 0; row < piece.rows; ++row) {
    Lanes value = load(sums + row * piece.stride);
    if (biased) value = add(value, bias);
    if (up) {
      Lanes other = load(up + row * piece.stride);
      if (up_biased) other = add(other, up_bias);
      value = mul(activate(problem.activation, value), other);
    }
    const int64_t at = (piece.first_row + row) * weight.outputs + piece.output;
    if (problem.best) {
      choose(problem.best[(piece.first_row + row) * piece.units + piece.unit], piece.output, chosen, value);
    } else if (problem.raw) {
      store_some(problem.raw, Dtype::kFloat32, at, count, value);
    } else {
      if (problem.residual) value = add(value, load_some(problem.residual, problem.y_dtype, at, count));
      store_some(weight.y, problem.y_dtype, at, count, value);
    }
  }
}

}  // namespace noria::NORIA_ISA
