// What a product with packed weights works on. docs: formats.h describes the bytes of each kind.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/types.h"

namespace noria {

// A tile has kLanes outputs; a matrix with N outputs has ceil(N / 16) tiles.
constexpr int kMaxWeights = 4;

// The numbers are those of KINDS in ops/linear/types.py.
enum class Kind : int32_t { kFloat32, kBFloat16, kInt8, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K };
constexpr int kKinds = 11;

enum class Activation : int32_t { kNone, kSilu, kGeluTanh };

// One layer's matrix.
struct Weight {
  Kind kind;
  const uint8_t* data;  // tiles
  int64_t outputs;      // N
  const void* bias;     // [N], or null
  Dtype bias_dtype;
  void* y;  // [rows, N], where the result goes; of the second of two gated weights: not used
};

// A root mean square norm of a row: y[i] = x[i] / sqrt(mean(x^2) + epsilon) * scale[i].
struct Norm {
  const float* scale;  // null: none
  float epsilon;
};

// The largest of some outputs of a row, the first of equals; NaN as soon as one output is.
struct Best {
  float value;
  int32_t output;
};

// Activations as 8-bit integers from -127 to 127, and what 32 neighbours q[0] .. q[31] of them share.
struct SharedBy32 {
  float scale;
  float sum;  // scale times the sum of the integers
  // Minus the sum of those q[i] with i % 4 < 2, and minus the sum of the others: of the first 16, the last 16, and all.
  int16_t less[3][2];
};
struct Quantized {
  int8_t* q;           // [rows, row_stride]
  SharedBy32* shared;  // [rows, row_stride / 32]
};
static inline Quantized advance(const Quantized& x, int64_t elements) {
  return {x.q + elements, x.shared + elements / 32};
}

struct Problem {
  int64_t rows;         // T
  int64_t k;            // K
  int64_t row_stride;   // elements between rows of x: K rounded up to a whole block of every kind, filled with zeros
  const float* x;       // [rows, row_stride]
  const uint16_t* x16;  // the same as bfloat16, when they were given so; or null
  Quantized x8;         // the same as 8-bit integers when they are to be rounded so; q is null for exact ones
  int weights;
  Weight weight[kMaxWeights];
  Activation activation;  // not kNone: there are two weights, and y[0] = activation(x w[0]) * (x w[1])
  Dtype y_dtype;
  const void* residual;  // [rows, N] of y_dtype, added to the only result; or null
  Norm post_norm;        // of the only result, before the residual is added
  float* raw;            // [rows, N]: the result before post_norm; null without one
  // Instead of results, the largest of the first `choices` outputs of each row; null for results.
  Best* best;  // [rows, units of a block of rows]
  int64_t choices;
};

// Bytes of a tile's fixed part, and of each block of k along K.
struct Shape {
  int64_t block;        // elements along K that a block holds, for 16 outputs
  int64_t block_bytes;
  int64_t tile_header;
};

// static, see runtime/types.h
static constexpr Shape shape_of(Kind kind) {
  switch (kind) {
    case Kind::kFloat32: return {4, 256, 0};
    case Kind::kBFloat16: return {4, 128, 0};
    case Kind::kInt8: return {32, 512, 64};
    case Kind::kQ8_0: return {32, 32 + 512, 0};
    case Kind::kQ4_0: return {32, 32 + 256, 0};
    case Kind::kQ4_1: return {32, 64 + 256, 0};
    case Kind::kQ5_0: return {32, 32 + 320, 0};
    case Kind::kQ5_1: return {32, 64 + 320, 0};
    case Kind::kQ4_K: return {256, 320 + 8 * 256, 0};
    case Kind::kQ5_K: return {256, 320 + 8 * 320, 0};
    case Kind::kQ6_K: return {256, 288 + 8 * 384, 0};
  }
  return {1, 0, 0};
}

static constexpr int64_t tile_bytes(Kind kind, int64_t k) {
  const Shape shape = shape_of(kind);
  return shape.tile_header + ceil_div(k, shape.block) * shape.block_bytes;
}

// The same functions compiled for one set of processor instructions each.
struct Kernels {
  bool takes_pairs;  // of bfloat16 activations: they are wanted in x16
  // Computes units first <= u < last of the problem's units(), each by one thread.
  void (*run)(const Problem& problem, int64_t first, int64_t last);
  int64_t (*units)(const Problem& problem);
  int64_t (*units_per_row_block)(const Problem& problem);
  void (*quantize)(const float* x, int64_t count, const Quantized& to);  // count: a multiple of 32
  void (*widen)(const uint16_t* x, int64_t count, float* y);   // bfloat16 to float32
  void (*narrow)(const float* x, int64_t count, uint16_t* y);  // and back, to the nearest, ties to even
  void (*normalize)(const float* x, int64_t count, const Norm& norm, float* y);  // y may be x
  // y = x + residual, rounded once to the dtype of both.
  void (*add_residual)(const float* x, int64_t count, const void* residual, void* y, Dtype dtype);
  // One head, normalized and turned. See rows.h.
  void (*rotate)(const void* x, Dtype dtype, int64_t size, const Norm& norm, const float* cosine, const float* sine,
                 float* work, void* y);
  // Elements 0 <= k of one output: tile points at its tile, lane is its place in it.
  void (*row)(Kind kind, const uint8_t* tile, int lane, int64_t k, float* y);
};

// The members of Kernels, in their order; for a file that includes kernels.h in the namespace of its instruction set.
#define NORIA_KERNELS(isa)                                                                                    \
  isa::kTakesPairs, isa::run, isa::units, isa::units_per_row_block, isa::quantize, isa::widen, isa::narrow, \
      isa::normalize, isa::add_residual, isa::rotate, isa::row

}  // namespace noria
