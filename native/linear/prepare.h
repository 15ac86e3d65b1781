// Activations in the forms that the kernels need: padded to whole blocks, as float32, as 8-bit integers.
#pragma once

#include <cstring>

#include "linear/types.h"
#include "runtime/scratch.h"

namespace noria {

constexpr int64_t kManyRows = 16;  // that copying them to a better place pays

// Rows of `width` elements into rows of `stride`, the rest zero.
template <typename T>
void pad_rows(const T* from, int64_t rows, int64_t width, T* to, int64_t stride) {
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * stride, from + row * width, width * sizeof(T));
    std::memset(to + row * stride + width, 0, (stride - width) * sizeof(T));
  }
}

// Fills row_stride and the x of a problem whose weights are known. x: [rows, k] of dtype. What is made here lies in
// the calling thread's scratch memory and lasts until its next call.
inline void prepare(const void* x, Dtype dtype, bool x8, const Kernels& kernels, Problem* p) {
  int64_t block = x8 ? 32 : 1;
  for (int i = 0; i < p->weights; ++i) {
    const int64_t own = shape_of(p->weight[i].kind).block;
    block = own > block ? own : block;  // all blocks are powers of two
  }
  p->row_stride = ceil_div(p->k, block) * block;
  // Rows whose addresses differ by a multiple of a page compete for the same few places in the first-level cache.
  if (p->rows >= kManyRows && p->row_stride % 512 == 0) p->row_stride += 32;
  const int64_t count = p->rows * p->row_stride;
  const bool padded = p->row_stride != p->k;
  if (dtype == Dtype::kBFloat16) {
    p->x16 = static_cast<const uint16_t*>(x);
    if (padded) {
      uint16_t* wide = scratch<uint16_t, 0>(count);
      pad_rows(p->x16, p->rows, p->k, wide, p->row_stride);
      p->x16 = wide;
    }
    float* widened = scratch<float, 1>(count);
    kernels.widen(p->x16, count, widened);
    p->x = widened;
  } else {
    p->x = static_cast<const float*>(x);
    if (padded) {
      float* wide = scratch<float, 2>(count);
      pad_rows(p->x, p->rows, p->k, wide, p->row_stride);
      p->x = wide;
    }
  }
  if (x8) {
    int8_t* q = scratch<int8_t, 3>(count);
    float *scale = scratch<float, 4>(count / 32), *sum = scratch<float, 5>(count / 16);
    kernels.quantize(p->x, count, q, scale, sum);
    p->x8 = q, p->x8_scale = scale, p->x8_sum = sum;
  }
}

}  // namespace noria
